//! The metadata service: namespace, sessions, leases, members.
//!
//! The single writer of a volume's namespace. It decides in memory ([`namespace`]), gives each decision its place in the
//! engine's order, and answers; waiting happens outside ([`service`]).
//!
//! # Invariants
//! - Decisions are pure: they read and write through a [`view::View`] and know neither clocks nor sockets.
//! - One lock guards everything that is in memory; nobody waits while holding it.
//! - What must survive is a record; what is in memory follows from records, or ends with a lease term.
//!
//! # Not here
//! - The log and its durability: `engine`. Bytes of files: `block`. Caching: `vfs` and `client`.

mod check;
mod config;
mod deleter;
pub mod dumps;
mod error;
mod leases;
mod members;
pub mod metrics;
mod namespace;
mod placement;
pub mod repair;
mod rests;
pub mod server;
mod service;
mod table;
mod upkeep;
mod view;

pub use config::Config;
pub use deleter::BlockPeers;
pub use error::Error;
pub use repair::RepairPeers;
pub use service::Meta;
