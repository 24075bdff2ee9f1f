//! Typed calls to other processes: [`Meta`] (a session with the metadata service), [`Blocks`] (the bytes of blocks on data
//! servers), [`Tool`] (requests outside of sessions), [`Member`] (a data server's heartbeat), [`Peers`] (deletions),
//! [`Dumps`] (the last copies of the metadata).
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
mod dumps;
mod member;
mod meta;
pub mod metrics;
mod peers;
mod tool;

pub use blocks::{Blocks, BlocksConfig};
pub use dumps::Dumps;
pub use member::{Figures, Identity, Member, MemberConfig, Reports};
pub use meta::{Changed, Keeper, Mark, Marks, Meta, MetaConfig, Moment};
pub use peers::Peers;
pub use tool::{Names, Progress, Tool, ToolConfig};
pub use torchfs_proto::extent::BlockRef;
use torchfs_rpc::Link;

/// How a process reaches the others: over TCP, or within the process in `torchfs up`.
pub trait Connector: Send + Sync + 'static {
    /// A way to the server at this address; nothing is connected yet.
    fn link(&self, addr: &str) -> Link;
}

/// Reaches everybody over TCP.
#[derive(Clone, Debug)]
pub struct Tcp(pub torchfs_rpc::Config);

impl Connector for Tcp {
    fn link(&self, addr: &str) -> Link {
        Link::new(addr, self.0.clone())
    }
}
