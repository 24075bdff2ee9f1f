//! The replica: the key-value state as of some batch, durable, behind the log.
//!
//! It is written by checkpoints only, each one transaction that holds its last batch's number, so it is always the state
//! after a whole number of batches. LMDB maps its file and cannot do its I/O through the seam `Disk`; so the replica has
//! a seam of its own with two forms: LMDB, and a double in memory that shares the power of a `SimDisk`.
//!
//! # Invariants
//! - After `commit` returned `Ok` the change is durable; after a lack of space nothing changed.
//! - A view shows one moment, whatever is committed meanwhile.

mod lmdb;
mod memory;

use std::ops::Bound;

use torchfs_proto::Seq;

pub use self::lmdb::{Lmdb, LmdbConfig};
pub use self::memory::MemReplica;
use crate::Visit;
use crate::error::Result;
use crate::log::format::Mark;

/// The changes of a checkpoint in order of their keys; `None` deletes.
pub type Changes<'a> = dyn Iterator<Item = (&'a [u8], Option<&'a [u8]>)> + 'a;

/// The state as of some batch.
pub trait Replica: Send + Sync {
    /// Whose state it is and the last batch in it; `None` before the first commit.
    fn mark(&self) -> Result<Option<Mark>>;

    /// One value.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// A moment of the state, for reading many. Keep it short: what it shows cannot be used again meanwhile.
    fn view(&self) -> Result<Box<dyn View + '_>>;

    /// Applies a checkpoint in one durable transaction.
    fn commit(&self, mark: &Mark, changes: &mut Changes<'_>) -> Result<()>;

    /// Forgets everything, durably; the replica is as before its first commit.
    fn clear(&self) -> Result<()>;

    /// What it takes and may still take.
    fn room(&self) -> Result<Room>;
}

/// One moment of a replica.
pub trait View {
    /// The last batch in it.
    fn applied(&self) -> Result<Seq>;

    /// Visits the pairs within the bounds in order of the keys, or backwards.
    fn scan(&self, from: Bound<&[u8]>, to: Bound<&[u8]>, reverse: bool, visit: &mut Visit<'_>) -> Result<()>;
}

/// What a replica takes and may still take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Room {
    /// Bytes on disk.
    pub bytes: u64,
    /// Pairs.
    pub keys: u64,
    /// Bytes of them that it can use again without growing.
    pub reusable: u64,
    /// By how much it may grow before it reaches a limit of its own.
    pub headroom: u64,
}

/// Whether no key can lie within the bounds (an ordered map refuses to be asked then).
fn is_empty_range(from: Bound<&[u8]>, to: Bound<&[u8]>) -> bool {
    match (from, to) {
        (Bound::Included(from), Bound::Included(to)) => from > to,
        (Bound::Included(from) | Bound::Excluded(from), Bound::Included(to) | Bound::Excluded(to)) => {
            from >= to
        }
        _ => false,
    }
}
