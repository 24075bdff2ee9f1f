//! Typed calls to other processes: [`Meta`] (a session with the metadata service), [`Blocks`] (the bytes of blocks on data
//! servers), [`Tool`] (requests outside of sessions), [`Member`] (a data server's heartbeat), [`Peers`] (deletions).
//!
//! Callers get answers or faults that name who failed; everything between is hidden here: connections that break, leaders
//! that change, requests that are replayed, leases that overtake replies, servers that are slow, down or wrong.
//!
//! # Invariants
//! - Every call ends: with an answer, with a fault, or at its deadline.
//! - No lock is held across an await, and none while code of others runs (keepers, services within the process).
//!
//! # Not here
//! What a lease allows (vfs), frames and deadlines on the wire (rpc), how chunks are packed (codec).

mod blocks;
mod meta;

pub use blocks::{Blocks, BlocksConfig};
pub use meta::{Changed, Keeper, Mark, Meta, MetaConfig};
pub use torchfs_proto::extent::BlockRef;

/// How a process reaches the others: over TCP, or within the process in `torchfs up`.
pub trait Connector: Send + Sync + 'static {}
