//! A replica in memory that loses power together with a [`SimDisk`]: the double for crash and fault tests.
//!
//! A commit counts as two operations of the disk. If the power goes at the first, nothing happened; if it goes at the
//! second, the change is durable and the caller was not told, as when a machine dies at the end of an fsync.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use parking_lot::RwLock;
use torchfs_disk::SimDisk;
use torchfs_proto::Seq;

use super::{Changes, Replica, Room, View, is_empty_range};
use crate::Visit;
use crate::error::{Error, Result};
use crate::log::format::Mark;

/// The state in memory. It outlives the engine that uses it: take [`MemReplica::after`] for the next one.
#[derive(Clone)]
pub struct MemReplica {
    disk: SimDisk,
    state: Arc<RwLock<State>>,
}

#[derive(Clone, Default)]
struct State {
    mark: Option<Mark>,
    /// Shared with views; a commit copies it if one is open.
    pairs: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
    bytes: u64,
    capacity: Option<u64>,
}

impl State {
    fn applied(&self) -> Seq {
        self.mark.map_or(Seq(0), |mark| mark.applied)
    }
}

impl MemReplica {
    /// An empty replica on the machine of this disk.
    pub fn new(disk: &SimDisk) -> MemReplica {
        MemReplica { disk: disk.clone(), state: Arc::default() }
    }

    /// The same state on the disk that came back after a power cut or crash.
    pub fn after(&self, disk: &SimDisk) -> MemReplica {
        let state = self.state.read().clone();
        MemReplica { disk: disk.clone(), state: Arc::new(RwLock::new(state)) }
    }

    /// Limits the bytes of keys and values.
    pub fn set_capacity(&self, bytes: u64) {
        self.state.write().capacity = Some(bytes);
    }

    fn tick(&self) -> Result<()> {
        self.disk.tick().map_err(Error::io("cannot write the replica"))
    }
}

impl Replica for MemReplica {
    fn mark(&self) -> Result<Option<Mark>> {
        Ok(self.state.read().mark)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.state.read().pairs.get(key).cloned())
    }

    fn view(&self) -> Result<Box<dyn View + '_>> {
        let state = self.state.read();
        Ok(Box::new(MemView { applied: state.applied(), pairs: state.pairs.clone() }))
    }

    fn commit(&self, mark: &Mark, changes: &mut Changes<'_>) -> Result<()> {
        self.tick()?;
        let mut next = self.state.read().clone();
        let pairs = Arc::make_mut(&mut next.pairs);
        for (key, value) in changes {
            let old = match value {
                Some(value) => {
                    next.bytes += (key.len() + value.len()) as u64;
                    pairs.insert(key.to_vec(), value.to_vec())
                }
                None => pairs.remove(key),
            };
            if let Some(old) = old {
                next.bytes -= (key.len() + old.len()) as u64;
            }
        }
        if let Some(capacity) = next.capacity
            && next.bytes > capacity
        {
            return Err(Error::NoSpace { free: 0, reserve: 0 });
        }
        next.mark = Some(*mark);
        *self.state.write() = next;
        self.tick()
    }

    fn clear(&self) -> Result<()> {
        self.tick()?;
        let mut state = self.state.write();
        *state = State { capacity: state.capacity, ..State::default() };
        self.tick()
    }

    fn room(&self) -> Result<Room> {
        let state = self.state.read();
        Ok(Room {
            bytes: state.bytes,
            keys: state.pairs.len() as u64,
            reusable: 0,
            headroom: state.capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(state.bytes)),
        })
    }
}

struct MemView {
    applied: Seq,
    pairs: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl View for MemView {
    fn applied(&self) -> Result<Seq> {
        Ok(self.applied)
    }

    fn scan(&self, from: Bound<&[u8]>, to: Bound<&[u8]>, reverse: bool, visit: &mut Visit<'_>) -> Result<()> {
        if is_empty_range(from, to) {
            return Ok(());
        }
        let mut range = self.pairs.range::<[u8], _>((from, to));
        while let Some((key, value)) = if reverse { range.next_back() } else { range.next() } {
            if visit(key, value).is_break() {
                break;
            }
        }
        Ok(())
    }
}
