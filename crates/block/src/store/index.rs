//! What is where: pieces, the dead that can still be found on disk, and how much of each segment lives.
//!
//! Pure bookkeeping: the writer's thread changes it after a batch became durable, readers look things up. It is rebuilt from
//! the segments at every start.
//!
//! A tombstone has to be kept as long as a record that it buries can still be found on disk, and not longer, or tombstones
//! would fill the disk. So the index counts for each key the records that are dead but not yet wiped (their segment was
//! not given a new generation), and knows where the key's tombstone is.
//!
//! # Invariants
//! - `live` of a segment is the sum of the footprints of its live pieces, `tombs` that of its tombstones that are needed.
//! - A key in `bad` lives: some of its bytes are not what was put. They are kept, and checked before they are served, until
//!   a good copy is here. Their marks are stored by the writer (`marks`).
//! - A key with a dead record somewhere has an entry in `dead`; with the last such record the entry and the need for
//!   its tombstone end.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use torchfs_proto::disk::{Advice, DiskFile};
use torchfs_proto::{BlockId, IdRange, LayoutId};

use super::format::{GRAIN, Place, SegmentHeader, Span, TOMB_ENTRY, Tomb, piece_span};

/// A piece's name in 16 bytes; their order is the order of ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Key {
    incarnation: u32,
    high: u32,
    low: u32,
    piece: u8,
}

impl Key {
    pub fn new(block: BlockId, piece: u8) -> Key {
        let (high, low) = ((block.counter >> 32) as u32, block.counter as u32);
        Key { incarnation: block.incarnation, high, low, piece }
    }

    pub fn block(&self) -> BlockId {
        let counter = u64::from(self.high) << 32 | u64::from(self.low);
        BlockId { incarnation: self.incarnation, counter }
    }

    pub fn piece(&self) -> u8 {
        self.piece
    }
}

/// Where a live piece is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub segment: u32,
    /// The record's offset in units of [`GRAIN`].
    pub grain: u32,
    pub payload: u32,
    pub layout: LayoutId,
    /// A fingerprint of layout and chunks.
    pub digest: u32,
    pub chunks: u16,
}

impl Entry {
    pub fn offset(&self) -> u64 {
        u64::from(self.grain) * GRAIN
    }

    pub fn span(&self) -> Span {
        piece_span(self.offset(), usize::from(self.chunks), self.payload)
    }

    /// What the piece takes of its segment.
    pub fn footprint(&self) -> u64 {
        footprint(self.offset(), self.span().end)
    }
}

/// What a record from `start` to `end` takes of its segment, padding included.
pub fn footprint(start: u64, end: u64) -> u64 {
    end.next_multiple_of(GRAIN) - start
}

/// A key with records that are dead but can still be found on disk.
#[derive(Clone, Copy, Debug, Default)]
struct Dead {
    /// How many such records.
    records: u32,
    /// The segment of the tombstone and its place in the order, if the death was a delete and not a rewrite. Only the last
    /// one of a key counts: records may be younger than those before it.
    tomb: Option<(u32, u64)>,
}

/// A segment and how much of it lives.
pub struct Segment {
    /// A new one for each generation; a reader's clone keeps the segment from being written again.
    pub file: Arc<Held>,
    pub header: SegmentHeader,
    /// Where the next batch starts.
    pub tail: u64,
    /// Bytes of live pieces.
    pub live: u64,
    /// Bytes of tombstones that are still needed.
    pub tombs: u64,
    /// Keys of its dead records, one for each.
    pub dead: Vec<Key>,
    /// Live pieces of it could not be found when it was to be emptied: never emptied again.
    pub stuck: bool,
}

impl Segment {
    pub fn place(&self) -> Place {
        let SegmentHeader { cluster, number, generation, .. } = self.header;
        Place { cluster, segment: number, generation }
    }
}

/// A segment's file under one generation.
pub struct Held {
    pub file: Arc<dyn DiskFile>,
    pub place: Place,
}

/// The bookkeeping of one store.
#[derive(Default)]
pub struct Index {
    live: BTreeMap<Key, Entry>,
    dead: HashMap<Key, Dead>,
    /// Damaged pieces, and whether the mark is kept over a restart.
    bad: BTreeMap<Key, bool>,
    /// The marks are not those that were kept last.
    marks_changed: bool,
    pub segments: BTreeMap<u32, Segment>,
    /// Stored bytes of all live pieces.
    payload: u64,
}

impl Index {
    pub fn find(&self, key: &Key) -> Option<&Entry> {
        self.live.get(key)
    }

    /// Whether the live piece is known to be damaged.
    pub fn is_bad(&self, key: &Key) -> bool {
        self.bad.contains_key(key)
    }

    /// All damaged pieces whose marks are kept, in order.
    pub fn bad(&self) -> impl Iterator<Item = Key> {
        self.bad.iter().filter(|(_, kept)| **kept).map(|(key, _)| *key)
    }

    /// All marks, if they changed since the last time.
    pub fn changed_marks(&mut self) -> Option<Vec<Key>> {
        std::mem::take(&mut self.marks_changed).then(|| self.bad.keys().copied().collect())
    }

    /// The marks could not be kept: they are handed out again.
    pub fn keep_marks_again(&mut self) {
        self.marks_changed = true;
    }

    /// These marks are kept as well as can be.
    pub fn marks_kept(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(kept) = self.bad.get_mut(key) {
                *kept = true;
            }
        }
    }

    /// How many pieces are damaged.
    pub fn bad_count(&self) -> usize {
        self.bad.len()
    }

    /// The piece is damaged, if it still is the one that was looked at; whether that is news.
    pub fn mark_bad(&mut self, key: Key, entry: &Entry) -> bool {
        if self.live.get(&key) != Some(entry) || self.bad.contains_key(&key) {
            return false;
        }
        self.bad.insert(key, false);
        self.marks_changed = true;
        true
    }

    /// The piece is whole: written anew, or its disk recovered; whether it was damaged before.
    pub fn mark_good(&mut self, key: &Key) -> bool {
        let was = self.bad.remove(key).is_some();
        self.marks_changed |= was;
        was
    }

    /// How many pieces live.
    pub fn pieces(&self) -> usize {
        self.live.len()
    }

    /// Stored bytes of all live pieces.
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// Live pieces after a key, in order.
    pub fn after(&self, after: Option<Key>) -> impl Iterator<Item = (&Key, &Entry)> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.live.range((after.map_or(Unbounded, Excluded), Unbounded))
    }

    /// Live pieces of one block.
    pub fn of_block(&self, block: BlockId) -> impl Iterator<Item = Key> {
        self.live.range(Key::new(block, 0)..=Key::new(block, u8::MAX)).map(|(key, _)| *key)
    }

    /// Live pieces of a run of blocks.
    pub fn of_range(&self, range: IdRange) -> impl Iterator<Item = Key> {
        let IdRange { first, .. } = range;
        let from = Key::new(first, 0);
        self.live.range(from..).map(|(key, _)| *key).take_while(move |key| range.contains(key.block()))
    }

    /// A record of this piece is durable and is now the live one. One that lived before is dead.
    pub fn put(&mut self, key: Key, entry: Entry) {
        self.add_live(entry.segment, entry.footprint());
        self.payload += u64::from(entry.payload);
        if let Some(old) = self.live.insert(key, entry) {
            self.replaced(key, &old);
        }
    }

    /// A live record is dead now.
    fn replaced(&mut self, key: Key, old: &Entry) {
        self.payload -= u64::from(old.payload);
        self.sub_live(old.segment, old.footprint());
        self.bury(key, old.segment);
        // What could not be carried over may be empty now.
        if let Some(segment) = self.segments.get_mut(&old.segment) {
            segment.stuck = false;
        }
    }

    /// A record that was found on disk does not count.
    pub fn bury(&mut self, key: Key, segment: u32) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.dead.push(key);
            self.dead.entry(key).or_default().records += 1;
        }
    }

    /// A tombstone of this piece is durable in the given segment.
    pub fn delete(&mut self, tomb: &Tomb, segment: u32) {
        self.mark_good(&tomb.key);
        if let Some(old) = self.live.remove(&tomb.key) {
            self.replaced(tomb.key, &old);
        }
        self.set_tomb(tomb, segment);
    }

    /// The last tombstone of a key is in this segment from now on, if one is needed.
    pub fn set_tomb(&mut self, tomb: &Tomb, segment: u32) {
        let Some(dead) = self.dead.get_mut(&tomb.key) else { return };
        let before = dead.tomb.replace((segment, tomb.seq));
        if let Some(before) = before.and_then(|(number, _)| self.segments.get_mut(&number)) {
            before.tombs = before.tombs.saturating_sub(TOMB_ENTRY as u64);
        }
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.tombs += TOMB_ENTRY as u64;
        }
    }

    /// Dead records of a segment, counted by key.
    pub fn dead_in(&self, segment: u32) -> HashMap<Key, u32> {
        let mut count = HashMap::new();
        for key in self.segments.get(&segment).into_iter().flat_map(|s| &s.dead) {
            *count.entry(*key).or_default() += 1;
        }
        count
    }

    /// Whether a tombstone that lies in this segment must be kept when the segment is wiped: a record that it buries is
    /// somewhere else.
    pub fn needs_tomb(&self, tomb: &Tomb, segment: u32, dead_here: &HashMap<Key, u32>) -> bool {
        self.dead.get(&tomb.key).is_some_and(|dead| {
            let elsewhere = dead.records > dead_here.get(&tomb.key).copied().unwrap_or(0);
            dead.tomb == Some((segment, tomb.seq)) && elsewhere
        })
    }

    /// Whether wiping the segment loses nothing: no live piece, no tombstone that buries a record elsewhere.
    pub fn is_empty(&self, number: u32) -> bool {
        let Some(segment) = self.segments.get(&number) else { return false };
        if segment.live > 0 {
            return false;
        }
        let here = self.dead_in(number);
        let own = here.iter().filter(|(key, records)| {
            let dead = self.dead.get(key);
            dead.is_some_and(|d| d.tomb.is_some_and(|(at, _)| at == number) && d.records <= **records)
        });
        segment.tombs == own.count() as u64 * TOMB_ENTRY as u64
    }

    /// Nothing in this segment can be found on disk any more.
    pub fn wipe(&mut self, segment: u32) {
        let Some(dead) = self.segments.get_mut(&segment).map(|s| std::mem::take(&mut s.dead)) else { return };
        for key in dead {
            let Some(entry) = self.dead.get_mut(&key) else { continue };
            entry.records -= 1;
            if entry.records == 0 {
                let tomb = entry.tomb;
                self.dead.remove(&key);
                if let Some(segment) = tomb.and_then(|(number, _)| self.segments.get_mut(&number)) {
                    segment.tombs = segment.tombs.saturating_sub(TOMB_ENTRY as u64);
                }
            }
        }
    }

    /// Counts everything anew and compares.
    #[cfg(test)]
    pub fn audit(&self) {
        let mut live = HashMap::<u32, u64>::new();
        for entry in self.live.values() {
            *live.entry(entry.segment).or_default() += entry.footprint();
        }
        let mut tombs = HashMap::<u32, u64>::new();
        for (segment, _) in self.dead.values().filter_map(|dead| dead.tomb) {
            *tombs.entry(segment).or_default() += TOMB_ENTRY as u64;
        }
        let mut records = HashMap::<Key, u32>::new();
        for (number, segment) in &self.segments {
            assert_eq!(segment.live, live.remove(number).unwrap_or(0), "live bytes of segment {number}");
            assert_eq!(segment.tombs, tombs.remove(number).unwrap_or(0), "tombstones of segment {number}");
            for key in &segment.dead {
                *records.entry(*key).or_default() += 1;
            }
        }
        assert!(live.is_empty() && tombs.is_empty());
        assert_eq!(records.len(), self.dead.len());
        for (key, dead) in &self.dead {
            assert_eq!(records.get(key), Some(&dead.records), "dead records of {key:?}");
        }
        assert!(self.bad.keys().all(|key| self.live.contains_key(key)));
        assert_eq!(self.payload, self.live.values().map(|entry| u64::from(entry.payload)).sum::<u64>());
    }

    fn add_live(&mut self, segment: u32, bytes: u64) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.live += bytes;
        }
    }

    fn sub_live(&mut self, segment: u32, bytes: u64) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.live = segment.live.saturating_sub(bytes);
        }
    }
}

// A reader hands the file on for sendfile; while it does, the generation stays as it is.
impl DiskFile for Held {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn is_cached(&self, offset: u64, len: u64) -> Option<bool> {
        self.file.is_cached(offset, len)
    }

    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        self.file.read_at_once(buf, offset)
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_direct_at(buf, offset)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn sync(&self) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn preallocate(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn advise(&self, offset: u64, len: u64, advice: Advice) {
        self.file.advise(offset, len, advice);
    }

    fn raw_fd(&self) -> Option<RawFd> {
        self.file.raw_fd()
    }
}
