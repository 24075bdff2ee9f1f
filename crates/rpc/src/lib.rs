//! Both ends of a connection: frames, handshake, deadlines, cancellation.
//!
//! A caller makes a [`Call`] on a [`Connection`] (or a [`Link`], which reconnects) and gets a [`Reply`]; a [`Service`] gets a
//! [`Request`] and gives an [`Answer`]. Bodies are small typed messages that this crate does not look into; payloads are
//! bulk bytes that are received straight into their final buffer and sent without copying. The same API works
//! within one process, without sockets.
//!
//! # Invariants
//! - Every length is checked against its bound before memory is taken; every queue has a bound.
//! - Every call ends by its deadline; a dropped call is cancelled at the other end.
//! - Before the handshake has proven the secret, nothing else is read.
//!
//! # Not here
//! - What methods mean, retries, hedging, placement: the crate `client`.
//! - Pushes from server to client: a caller that waits for news keeps a request open.

mod budget;
pub mod buf;
mod call;
mod client;
mod config;
pub mod frame;
pub mod hello;
mod inbound;
mod link;
mod local;
pub mod metrics;
mod out;
mod payload;
mod server;
mod strangers;
mod table;

pub use buf::AlignedBuf;
pub use call::{Answer, Answering, Call, Peer, Reply, Request, Service};
pub use client::{CallFuture, Connection};
pub use config::{Config, Role, Secret};
pub use hello::Agreed;
pub use link::{Health, Link, LinkCall};
pub use payload::{Data, Parts, Payload};
pub use server::{Listener, ServerHandle, serve};

#[cfg(test)]
#[global_allocator]
static MEMORY: torchfs_fuzz::Counting = torchfs_fuzz::Counting;
