//! The data server: immutable blocks in recycled segments on local disks.
//!
//! [`store`] keeps pieces of blocks on one disk; `disks` are all of a server's. The server answers the requests of
//! `proto::msg::block` with them: clients take turns at each disk (`fair`, `gate`), `repair` pulls pieces from other servers, and
//! `scrub` looks for what rots, and `pulse` whether a disk answers at all.
//!
//! # Invariants
//! - A put is acknowledged when it is durable; a deleted piece stays deleted once that is acknowledged.
//! - A corrupt or missing piece is an error that names the block and the server, never wrong bytes.
//! - Only what a committed batch of the metadata declared dead is deleted: this crate deletes nothing on its own.
//!
//! # Not here
//! - Where pieces belong (placement): the client decides, the metadata records it.
//! - Checking what is read: the reader does, end to end (crate `codec`); `verify` is for the scrubber.

mod disks;
mod dumps;
mod error;
mod fair;
mod gate;
pub mod metrics;
mod promise;
mod pulse;
mod readers;
mod repair;
mod scrub;
pub mod server;
mod sessions;
pub mod store;
mod versions;

pub use error::{Error, Result};
pub use server::BlockServer;

#[cfg(test)]
#[global_allocator]
static MEMORY: torchfs_fuzz::Counting = torchfs_fuzz::Counting;
