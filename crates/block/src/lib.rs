//! The data server: immutable blocks in recycled segments on local disks.
//!
//! [`store`] keeps pieces of blocks on one disk; the server answers the requests of `proto::msg::block` with it.
//!
//! # Invariants
//! - A put is acknowledged when it is durable; a deleted piece stays deleted once that is acknowledged.
//! - A corrupt or missing piece is an error that names the block and the server, never wrong bytes.
//! - Only what a committed batch of the metadata declared dead is deleted: this crate deletes nothing on its own.
//!
//! # Not here
//! - Where pieces belong (placement): the client decides, the metadata records it.
//! - Checking what is read: the reader does, end to end (crate `codec`); `verify` is for the scrubber.

mod dumps;
mod error;
mod metrics;
pub mod server;
pub mod store;

pub use error::{Error, Result};
pub use server::BlockServer;

#[cfg(test)]
#[global_allocator]
static MEMORY: torchfs_fuzz::Counting = torchfs_fuzz::Counting;
