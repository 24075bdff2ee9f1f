//! The store as one decision sees it: the engine's state with the changes of the batch being built on top.
//!
//! A decision reads and writes typed records here and nowhere else. Nothing reaches the engine until the whole decision
//! stands; a decision that must wait, or that fails, is dropped with its changes.
//!
//! # Invariants
//! - Reads see the writes made before through the same view.
//! - Counters change in the same batch as what they count.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};

use minicbor::{Decode, Encode};
use torchfs_engine::{Batch, Engine};
use torchfs_proto::attr::Time;
use torchfs_proto::record::{self, Counters};
use torchfs_proto::{BlockId, Code, Fault, Ino, Result, Seq, VolumeId, key};

/// Changes of one batch by key; `None` deletes.
type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// What one decision reads and writes.
pub struct View<'a> {
    engine: &'a dyn Engine,
    /// The volume of the request.
    pub volume: VolumeId,
    /// The place that the batch will get: the birth of records written here.
    pub born: Seq,
    /// When the decision is made.
    pub now: Time,
    /// From when (ms since 1970) blocks that die now may be deleted.
    pub due_ms: u64,
    /// Whether the batch frees space in the end.
    pub frees: bool,
    changes: Changes,
}

impl<'a> View<'a> {
    /// The store as of now.
    pub fn new(engine: &'a dyn Engine, volume: VolumeId, wall_ns: i64, dead_ms: u64) -> View<'a> {
        View {
            engine,
            volume,
            born: Seq(engine.ordered().0 + 1),
            now: Time::from_ns(wall_ns),
            due_ms: (wall_ns / 1_000_000).unsigned_abs() + dead_ms,
            frees: false,
            changes: Changes::new(),
        }
    }

    /// Whether nothing was written.
    pub fn is_clean(&self) -> bool {
        self.changes.is_empty()
    }

    /// How many records were written or removed.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// The batch with everything written here.
    pub fn into_batch(self) -> Batch {
        let wall_ns = self.now.secs.saturating_mul(1_000_000_000).saturating_add(i64::from(self.now.nanos));
        let mut batch = Batch::at(wall_ns);
        batch.frees = self.frees;
        for (key, value) in self.changes {
            match value {
                Some(value) => batch.put(key, value),
                None => batch.delete(key),
            };
        }
        batch
    }

    /// A record.
    pub fn get<T: for<'b> Decode<'b, ()>>(&self, key: &[u8]) -> Result<Option<T>> {
        match self.changes.get(key) {
            Some(Some(value)) => decode(key, value).map(Some),
            Some(None) => Ok(None),
            None => match self.engine.get(key)? {
                Some(value) => decode(key, &value).map(Some),
                None => Ok(None),
            },
        }
    }

    /// Writes a record.
    pub fn put<T: Encode<()>>(&mut self, key: Vec<u8>, record: &T) {
        self.changes.insert(key, Some(torchfs_proto::msg::encode(record)));
    }

    /// Removes a record.
    pub fn delete(&mut self, key: Vec<u8>) {
        self.changes.insert(key, None);
    }

    /// Visits the records with `from <= key < to`, forwards or backwards, until `visit` breaks.
    pub fn scan<T: for<'b> Decode<'b, ()>>(
        &self,
        from: &[u8],
        to: &[u8],
        reverse: bool,
        visit: &mut dyn FnMut(&[u8], T) -> ControlFlow<()>,
    ) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let mut failed = None;
        let mut ended = false;
        let mut tell = |key: &[u8], value: &[u8]| match decode::<T>(key, value) {
            Ok(record) => visit(key, record),
            Err(fault) => {
                failed = Some(fault);
                ControlFlow::Break(())
            }
        };
        let range = (Bound::Included(from.to_vec()), Bound::Excluded(to.to_vec()));
        let mut ours = self.changes.range(range).peekable();
        let mut ours_back = ours.clone().rev().peekable();
        let mut next_ours = || if reverse { ours_back.next() } else { ours.next() };
        let mut held = next_ours();
        self.engine.scan(from, to, reverse, &mut |key, value| {
            // First what this batch wrote before that key, then the key as this batch left it.
            while let Some((own_key, own)) = held {
                let before = if reverse { own_key.as_slice() > key } else { own_key.as_slice() < key };
                let same = own_key.as_slice() == key;
                if !before && !same {
                    break;
                }
                held = next_ours();
                if let Some(value) = own
                    && tell(own_key, value).is_break()
                {
                    ended = true;
                    return ControlFlow::Break(());
                }
                if same {
                    return ControlFlow::Continue(());
                }
            }
            let flow = tell(key, value);
            ended = flow.is_break();
            flow
        })?;
        while !ended && let Some((own_key, own)) = held {
            held = next_ours();
            if let Some(value) = own
                && tell(own_key, value).is_break()
            {
                ended = true;
            }
        }
        match failed {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// All records whose keys begin with this prefix, at most so many.
    pub fn list<T: for<'b> Decode<'b, ()>>(&self, prefix: &[u8], limit: usize) -> Result<Vec<(Vec<u8>, T)>> {
        let mut found = Vec::new();
        if limit == 0 {
            return Ok(found);
        }
        self.scan(prefix, &key::after(prefix), false, &mut |key, record| {
            found.push((key.to_vec(), record));
            if found.len() >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(found)
    }

    /// An inode, if it is there.
    pub fn find_inode(&self, ino: Ino) -> Result<Option<record::Inode>> {
        self.get(&key::inode(self.volume, ino))
    }

    /// An inode that must be there.
    pub fn inode(&self, ino: Ino) -> Result<record::Inode> {
        self.find_inode(ino)?.ok_or_else(|| Fault::new(Code::Stale, format!("inode {ino} is gone")))
    }

    /// Writes an inode.
    pub fn put_inode(&mut self, ino: Ino, inode: &record::Inode) {
        self.put(key::inode(self.volume, ino), inode);
    }

    /// An entry of a folder.
    pub fn entry(&self, parent: Ino, name: &[u8]) -> Result<Option<record::Entry>> {
        self.get(&key::entry(self.volume, parent, name))
    }

    /// Writes an entry and the cookie that leads to it.
    pub fn put_entry(&mut self, parent: Ino, name: &[u8], entry: &record::Entry) {
        self.put(key::entry(self.volume, parent, name), entry);
        let cookie = record::Cookie { name: name.to_vec().into(), ino: entry.ino, kind: entry.kind };
        self.put(key::cookie(self.volume, parent, entry.cookie), &cookie);
    }

    /// Removes an entry and its cookie.
    pub fn delete_entry(&mut self, parent: Ino, name: &[u8], entry: &record::Entry) {
        self.delete(key::entry(self.volume, parent, name));
        self.delete(key::cookie(self.volume, parent, entry.cookie));
    }

    /// A block's record.
    pub fn block(&self, id: BlockId) -> Result<Option<record::Block>> {
        self.get(&key::block(self.volume, id))
    }

    /// What the volume counts.
    pub fn counters(&self) -> Result<Counters> {
        Ok(self.get(&key::counters(self.volume))?.unwrap_or_default())
    }

    /// Changes what the volume counts.
    pub fn count(&mut self, change: impl FnOnce(&mut Counters)) -> Result<()> {
        let mut counters = self.counters()?;
        change(&mut counters);
        self.put(key::counters(self.volume), &counters);
        Ok(())
    }
}

/// Decodes a stored record; one that cannot be read is damage and is named.
fn decode<T: for<'b> Decode<'b, ()>>(key: &[u8], value: &[u8]) -> Result<T> {
    minicbor::decode(value).map_err(|e| {
        let key: String = key.iter().map(|b| format!("{b:02x}")).collect();
        Fault::new(Code::Corrupt, format!("the metadata record {key} cannot be read: {e}"))
            .next("run `torchfs fsck`, or restore the metadata from its last dump")
    })
}
