//! The log under an engine: where batches become durable.
//!
//! Queue, overlay, group commit and checkpoints are the same for every engine (`log_engine`); where the groups go is this
//! seam. It has two forms: [`Segments`], files on the local disk, and the log in PostgreSQL.
//!
//! # Invariants
//! - Records are appended in the order of their places, by one thread at a time.
//! - After an error that is not a lack of space the log must not be used.

pub mod format;
mod recover;
mod segments;

use std::collections::VecDeque;
use std::time::Duration;

use torchfs_proto::Seq;

pub use self::format::RECORD_VERSION;
use self::format::{Mark, Record};
pub use self::segments::{LogConfig, Segments};
use crate::Peer;
use crate::error::Result;
use crate::overlay::Layer;

/// Where batches become durable.
pub trait Log: Send + Sync {
    /// The longest body that it takes.
    fn body_max(&self) -> usize;

    /// Makes as many of the records durable as it takes at once. The caller says how far the log is durable already.
    fn append(&self, records: &VecDeque<Record>, durable: Seq) -> Result<Appended>;

    /// Whether records of `bytes` in all, none longer than `longest`, in at most `groups` groups are sure to fit.
    fn fits(&self, bytes: usize, longest: usize, groups: usize) -> bool;

    /// What would give the log more room, if it needs any soon.
    fn wants(&self) -> Wants;

    /// Bytes that it takes.
    fn bytes(&self) -> u64;

    /// Bytes of the state that it keeps beside itself.
    fn state_bytes(&self) -> u64 {
        0
    }

    /// The other servers that follow it, as of a few seconds ago.
    fn peers(&self) -> Vec<Peer> {
        Vec::new()
    }

    /// Gives room back that the replica has made superfluous, and grows if it must and `may_grow`.
    fn maintain(&self, applied: Seq, may_grow: bool) -> Result<()>;

    /// A checkpoint is about to go into the replica: everything after `from` up to `to`. A log that keeps the state beside
    /// itself brings that forward too.
    fn settle(&self, _from: Seq, _to: Seq, _layer: &Layer) -> Result<()> {
        Ok(())
    }

    /// How to recognise later that the log still has the batches that a replica holds.
    fn mark(&self, applied: Seq) -> Mark;

    /// How often the log's thread calls [`Log::tick`] while it has nothing to write.
    fn tick_every(&self) -> Option<Duration> {
        None
    }

    /// What has to be done from time to time.
    fn tick(&self) -> Result<()> {
        Ok(())
    }

    /// Whether nobody else can have appended up to this moment.
    fn leads(&self) -> bool {
        true
    }

    /// The engine ends: waits for a silent store end now.
    fn interrupt(&self) {}

    /// Nothing will be appended any more. Called once, when the threads have ended.
    fn close(&self) {}
}

/// What an append did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Appended {
    /// This many records are durable now.
    Durable(usize),
    /// There is no segment to write to before one can be used again.
    Full,
}

/// What would give the log more room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wants {
    /// There is enough.
    Nothing,
    /// One more segment.
    Segment,
    /// A checkpoint, so that segments can be used again.
    Checkpoint,
}
