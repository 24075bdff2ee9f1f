//! The ordered log of metadata batches and its local replica; synchronous.
//!
//! One ordered log is the only point of truth. A caller decides, hands a [`Batch`] to [`Engine::order`] and gets its
//! place; from then on [`Engine::get`] and [`Engine::scan`] show it. It becomes durable together with others in one
//! append. What was ordered but not durable when everything dies is lost from the end only: what is left is always a
//! prefix of the order.
//!
//! [`LogEngine`] keeps what is not yet in the replica in memory (the overlay), the rest in LMDB, and the log below a seam:
//! [`Embedded`] has it in preallocated, recycled files of its own folder, [`postgres`] in a database, with standbys that
//! follow. Both keep the promises of the same [`conformance`] suite.
//!
//! # Invariants
//! - `durable() <= ordered()`, both only rise, and after a restart `ordered()` is at least the last `durable()` told.
//! - A reader never sees half a batch in one `get` or within one chunk of a `scan`.
//! - A failed sync latches: nothing is ordered or reported durable afterwards; reads go on.
//! - Fence and incarnation rise at every open, durably, before the first batch is ordered.
//!
//! # Not here
//! - What keys and values mean: that is `meta`'s business.
//! - Waiting without a thread: servers use [`Engine::on_durable`] to wake their own waiters.

mod batch;
pub mod conformance;
pub mod dump;
mod embedded;
mod error;
mod identity;
mod log;
mod log_engine;
pub mod metrics;
mod overlay;
pub mod postgres;
mod replica;

use std::ops::ControlFlow;
use std::time::Duration;

pub use batch::{BODY_MAX, Batch, Change, KEY_MAX, VALUE_MAX};
pub use embedded::Embedded;
pub use error::{Error, Result};
pub use log::format::Mark;
pub use log::{LogConfig, RECORD_VERSION};
pub use log_engine::{Config, LogEngine};
pub use replica::{Lmdb, LmdbConfig, MemReplica, Replica, Room, View};
pub use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

/// Receives each pair of a scan; `Break` ends it.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Told from the log's thread how far the log is durable, or once that it failed for good.
pub type OnDurable = Box<dyn Fn(Result<Seq>) + Send + Sync>;

/// Told from the log's thread that leadership is sure again after it was in doubt.
pub type OnLead = Box<dyn Fn() + Send + Sync>;

/// An ordered log with the key-value state that follows from it.
pub trait Engine: Send + Sync {
    /// The value as of the last ordered batch.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Visits the pairs with `from <= key < to` in order of the keys, or backwards.
    ///
    /// The scan goes on in bounded chunks. Each chunk is one moment of the state; between two chunks batches may be
    /// ordered, and the scan then shows the later state for the keys that it has not passed yet. `visit` runs without
    /// any lock held and may call the engine.
    fn scan(&self, from: &[u8], to: &[u8], reverse: bool, visit: &mut Visit<'_>) -> Result<()>;

    /// Gives the batch its place. It is visible at once and not yet durable.
    ///
    /// Waits while the engine is behind with writing to disk, for a bounded time.
    fn order(&self, batch: Batch) -> Result<Seq>;

    /// The last place given.
    fn ordered(&self) -> Seq;

    /// Every batch up to here survives a power cut.
    fn durable(&self) -> Seq;

    /// Somebody waits for this place: sync now rather than gather more.
    fn hurry(&self, seq: Seq);

    /// Hurries and waits until the place is durable.
    fn wait_durable(&self, seq: Seq, timeout: Duration) -> Result<()>;

    /// Adds somebody to be told, from the log's thread, each time more is durable, and once if the log fails for good.
    fn on_durable(&self, tell: OnDurable);

    /// Whether no other opener can have ordered anything up to this moment. Asked after a read, it says that the read was
    /// of the newest state. False while that is in doubt; it may become true again.
    fn leads(&self) -> bool {
        true
    }

    /// Adds somebody to be told, from the log's thread, when [`Engine::leads`] is true again.
    fn on_lead(&self, _tell: OnLead) {}

    /// Visits all pairs as of one batch, whose place it returns. Meant for dumps: it may write a checkpoint first and
    /// holds a snapshot of the replica while it runs.
    fn snapshot(&self, visit: &mut Visit<'_>) -> Result<Seq>;

    /// The number under which this opener writes the log.
    fn fence(&self) -> Fence;

    /// Rises with every open, so that ids made with it are never made again.
    fn incarnation(&self) -> Incarnation;

    /// Whose log it is.
    fn cluster(&self) -> ClusterId;

    /// Room for more.
    fn space(&self) -> Result<EngineSpace>;

    /// Numbers for status pages.
    fn stats(&self) -> Stats;

    /// The servers that follow this log and could take over, as of a few seconds ago.
    fn peers(&self) -> Vec<Peer> {
        Vec::new()
    }
}

/// What an engine that is filled from a dump begins above, so that nothing is given out a second time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Floor {
    /// The fence of this opening is higher.
    pub fence: Fence,
    /// The incarnation of this opening is higher.
    pub incarnation: Incarnation,
    /// The first batch gets a higher place, if the engine has none yet.
    pub seq: Seq,
}

/// Room below the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineSpace {
    /// All bytes of the disk below.
    pub total: u64,
    /// Bytes that batches may still take, what the replica can reuse included.
    pub free: u64,
    /// Ordinary batches are refused when `free` is below this; batches that free space may use it.
    pub reserve: u64,
}

/// What the engine holds and did since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// The last place given.
    pub ordered: Seq,
    /// The last durable place.
    pub durable: Seq,
    /// The last place that the replica holds.
    pub applied: Seq,
    /// Keys that are in memory only (and in the log).
    pub overlay_keys: u64,
    /// What they take.
    pub overlay_bytes: u64,
    /// Bytes of all log files.
    pub log_bytes: u64,
    /// Bytes that the replica takes on disk.
    pub replica_bytes: u64,
    /// Pairs in the replica.
    pub replica_keys: u64,
    /// Syncs of the log.
    pub syncs: u64,
    /// Batches made durable by them.
    pub synced_batches: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Bytes of the state outside of the replica: in the database, if there is one.
    pub state_bytes: u64,
}

/// Another server with a replica of the same log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Where it listens.
    pub address: String,
    /// The last batch that it has.
    pub applied: Seq,
    /// Bytes of its replica.
    pub replica_bytes: u64,
    /// How long ago it said so.
    pub silent_ms: u64,
}

#[cfg(test)]
#[global_allocator]
static MEMORY: torchfs_fuzz::Counting = torchfs_fuzz::Counting;
