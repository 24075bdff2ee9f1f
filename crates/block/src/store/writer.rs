//! The one writer of a disk: batches with one sync each, and the segments they go to.
//!
//! Everything that changes the disk or the index runs here, on one thread, so there is an order of all changes and
//! nothing to lock against but readers.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use torchfs_proto::disk::DiskFile;
use torchfs_rpc::AlignedBuf;

use super::compact::Emptying;
use super::format::{DATA, GRAIN, MAX_TOMBS, PAGE, PieceHeader, Record, SegmentHeader, Tomb, Use, What};
use super::index::{Entry, Held, Key, Segment};
use super::read::header_is_whole;
use super::{Dead, Done, NewPiece, Op, Shared};
use crate::{Error, Result, metrics as names};

/// Up to this length a batch in space that was never written is preceded by zeros for the next ones: then their syncs
/// need no commit of the file system's journal for the extents. For larger batches that commit does not matter.
const SMALL_BATCH: u64 = 256 << 10;
const ZERO_AHEAD: u64 = 8 << 20;

/// Batches of this length or more are written around the page cache: a copy and the page cache's work are saved.
const DIRECT_MIN: usize = 128 << 10;
/// Shorter parts are rather copied together.
const AS_IS_MIN: usize = 32 << 10;

static ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

/// Why space is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// For a new piece: leaves the reserve alone.
    Put,
    /// For what makes space: tombstones and pieces of a segment that is being emptied.
    MakeSpace,
}

/// The state of the writer that nobody else needs.
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    /// The segment that batches go to.
    pub(super) active: Option<u32>,
    /// Segments whose content does not count.
    pub(super) free: Vec<u32>,
    /// The next numbers of their kinds.
    pub(super) seq: u64,
    pub(super) batch: u64,
    pub(super) generation: u64,
    pub(super) number: u32,
    /// Bytes of a new segment.
    pub(super) segment_bytes: u64,
    /// Up to where segments made by this process were ever written; others are taken as written.
    pub(super) written: HashMap<u32, u64>,
    /// The segment that is being emptied.
    pub(super) emptying: Option<Emptying>,
    /// Something died or was sealed since the last look for a segment to empty.
    pub(super) look_again: bool,
    /// Emptying a segment brought no space, and nothing died since.
    pub(super) nothing_to_gain: bool,
}

/// Records that one write and one sync will make durable.
#[derive(Default)]
pub(super) struct Batch {
    start: u64,
    /// Where the next record may start.
    at: u64,
    records: Vec<(Record, Vec<Bytes>)>,
    puts: HashMap<Key, u32>,
    dead: HashSet<Key>,
    done: Vec<Box<dyn FnOnce(Result<()>) + Send>>,
    /// The records were somewhere else before: sequence numbers stay, nothing dies.
    pub(super) moves: bool,
}

impl Writer {
    /// Does what was asked for, in order, in as few batches as can be; answers each when it is durable.
    pub(super) fn run(&mut self, ops: Vec<Op>) {
        let mut batch = Batch::default();
        let mut marked = Vec::new();
        for op in ops {
            match op {
                Op::Put(piece, done) => self.put(&mut batch, piece, done),
                Op::Delete(dead, done) => self.delete(&mut batch, dead, done),
                Op::Header(segment, done) => done(self.heal_header(segment)),
                Op::Marks(done) => marked.push(done),
            }
        }
        // Those who wait hear of a failure through the batch.
        let _ = self.commit(&mut batch);
        self.store_marks();
        marked.into_iter().for_each(|done| done(Ok(())));
    }

    fn put(&mut self, batch: &mut Batch, piece: NewPiece, done: Done<()>) {
        let server = self.shared.config.server;
        let NewPiece { block, piece, layout, first, chunks, payload } = piece;
        let key = Key::new(block, piece);
        let header = PieceHeader { key, seq: self.seq, layout, first, chunks };
        let digest = header.digest();
        if let Err(latched) = self.shared.check_latch() {
            return done(Err(latched));
        }
        if batch.dead.contains(&key)
            && let Err(error) = self.commit(batch)
        {
            return done(Err(error));
        }
        if let Some(other) = batch.puts.get(&key) {
            if *other == digest {
                batch.done.push(done);
            } else {
                done(Err(Error::Differs { block, piece, server }));
            }
            return;
        }
        let known = {
            let index = self.shared.index.read();
            // A damaged piece gives way to its good copy.
            index.find(&key).filter(|_| !index.is_bad(&key)).map(|entry| entry.digest)
        };
        if let Some(other) = known {
            let same = other == digest;
            return done(if same { Ok(()) } else { Err(Error::Differs { block, piece, server }) });
        }
        let what = What::Piece(header);
        if DATA + what.span(0).end.next_multiple_of(PAGE) > self.segment_bytes {
            let why = format!("piece {piece} is larger than a segment of {} bytes", self.segment_bytes);
            return done(Err(Error::Invalid { block, server, why }));
        }
        if let Err(error) = self.make_room(batch, &what, Purpose::Put) {
            return done(Err(error));
        }
        self.seq += 1;
        metrics::counter!(names::PUTS).increment(1);
        metrics::counter!(names::PUT_BYTES).increment(payload.iter().map(|part| part.len() as u64).sum());
        batch.puts.insert(key, digest);
        batch.push(what, payload);
        batch.done.push(done);
    }

    fn delete(&mut self, batch: &mut Batch, dead: Dead, done: Done<u64>) {
        if let Err(latched) = self.shared.check_latch() {
            return done(Err(latched));
        }
        // A piece put in this very batch has to be in the index before it can die.
        let clash = match &dead {
            Dead::Blocks(blocks) => {
                !batch.puts.is_empty() && {
                    let blocks: HashSet<_> = blocks.iter().collect();
                    batch.puts.keys().any(|key| blocks.contains(&key.block()))
                }
            }
            Dead::Pieces(pieces) => {
                pieces.iter().any(|(block, piece)| batch.puts.contains_key(&Key::new(*block, *piece)))
            }
            Dead::Range(range, _) => batch.puts.keys().any(|key| range.contains(key.block())),
        };
        if clash && let Err(error) = self.commit(batch) {
            return done(Err(error));
        }
        let mut keys: Vec<Key> = {
            let index = self.shared.index.read();
            match &dead {
                Dead::Blocks(blocks) => blocks.iter().flat_map(|block| index.of_block(*block)).collect(),
                Dead::Pieces(pieces) => pieces
                    .iter()
                    .map(|(block, piece)| Key::new(*block, *piece))
                    .filter(|key| index.find(key).is_some())
                    .collect(),
                Dead::Range(range, keep) => {
                    index.of_range(*range).filter(|key| !keep.contains(&key.block())).collect()
                }
            }
        };
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| !batch.dead.contains(key));
        for keys in keys.chunks(MAX_TOMBS) {
            let tombs = keys.iter().map(|key| Tomb { key: *key, seq: self.seq }).collect();
            let what = What::Tombs(tombs);
            if let Err(error) = self.make_room(batch, &what, Purpose::MakeSpace) {
                return done(Err(error));
            }
            self.seq += 1;
            batch.dead.extend(keys);
            batch.push(what, Vec::new());
        }
        let count = keys.len() as u64;
        metrics::counter!(names::DELETES).increment(count);
        // Even with nothing to bury the answer waits for the batch: it may hold this delete's first sending.
        batch.done.push(Box::new(move |result| done(result.map(|()| count))));
    }

    /// Makes sure that the batch can take this record, ending it and going to another segment if need be.
    pub(super) fn make_room(&mut self, batch: &mut Batch, what: &What, purpose: Purpose) -> Result<()> {
        loop {
            if let Some(segment) = self.active {
                let index = self.shared.index.read();
                let (tail, size) = index.segments.get(&segment).map_or((0, 0), |s| (s.tail, s.header.size));
                drop(index);
                if batch.records.is_empty() {
                    batch.start = tail;
                    batch.at = tail;
                }
                let end = what.span(batch.at).end.next_multiple_of(PAGE);
                let large = end - batch.start > self.shared.config.batch_bytes;
                if end <= size && (batch.records.is_empty() || !large) {
                    return Ok(());
                }
            }
            if batch.records.is_empty() {
                self.next_segment(purpose)?;
            } else {
                self.commit(batch)?;
            }
        }
    }

    /// Writes and syncs the batch, then changes the index and tells everybody; the batch is empty afterwards.
    pub(super) fn commit(&mut self, batch: &mut Batch) -> Result<()> {
        let mut batch = std::mem::replace(batch, Batch { moves: batch.moves, ..Batch::default() });
        let result = match (batch.records.is_empty(), self.active) {
            (true, _) => Ok(()),
            (false, None) => Err(Error::NoSpace { server: self.shared.config.server }),
            (false, Some(segment)) => self.write(segment, &mut batch).inspect(|()| {
                self.apply(segment, &batch);
                self.batch += 1;
            }),
        };
        for done in batch.done {
            done(result.clone());
        }
        result
    }

    fn write(&mut self, segment: u32, batch: &mut Batch) -> Result<()> {
        self.shared.check_latch()?;
        let (file, place) = {
            let index = self.shared.index.read();
            let Some(segment) = index.segments.get(&segment) else {
                return Err(Error::NoSpace { server: self.shared.config.server });
            };
            (segment.file.file.clone(), segment.place())
        };
        if let Some((last, _)) = batch.records.last_mut() {
            last.last = true;
        }
        let headers: Vec<Vec<u8>> = batch
            .records
            .iter_mut()
            .map(|(record, _)| {
                record.batch = self.batch;
                record.encode(&place)
            })
            .collect();
        let mut parts: Vec<&[u8]> = Vec::with_capacity(4 * headers.len());
        let mut at = batch.start;
        let pad = |parts: &mut Vec<&[u8]>, from: u64, to: u64| parts.push(&ZEROS[..(to - from) as usize]);
        for ((record, payload), header) in batch.records.iter().zip(&headers) {
            let span = record.what.span(record.offset);
            pad(&mut parts, at, record.offset);
            parts.push(header);
            pad(&mut parts, record.offset + span.header as u64, span.payload);
            parts.extend(payload.iter().map(|part| &part[..]));
            at = span.end;
        }
        let end = at.next_multiple_of(PAGE);
        pad(&mut parts, at, end);

        let began = Instant::now();
        self.zero_ahead(&*file, segment, batch.start, end)
            .map_err(|e| self.shared.latch("write zeros", e))?;
        write_parts(&*file, &parts, batch.start).map_err(|e| self.shared.latch("write a batch", e))?;
        file.sync().map_err(|e| self.shared.latch("sync a batch", e))?;
        metrics::counter!(names::BATCHES).increment(1);
        metrics::histogram!(names::BATCH_SECONDS).record(began.elapsed());
        Ok(())
    }

    /// Writes zeros beyond a small batch that goes to space never written before.
    fn zero_ahead(&mut self, file: &dyn DiskFile, segment: u32, start: u64, end: u64) -> io::Result<()> {
        let Some(written) = self.written.get_mut(&segment) else { return Ok(()) };
        if end <= *written {
            return Ok(());
        }
        *written = end;
        if end - start > SMALL_BATCH {
            return Ok(());
        }
        let size = self.shared.index.read().segments.get(&segment).map_or(0, |s| s.header.size);
        let until = (end + ZERO_AHEAD).min(size);
        let zeros = AlignedBuf::zeroed((until - end) as usize);
        file.write_direct_at(&[&zeros], end)?;
        *written = until;
        Ok(())
    }

    fn apply(&mut self, segment: u32, batch: &Batch) {
        let mut index = self.shared.index.write();
        for (record, _) in &batch.records {
            match &record.what {
                What::Piece(piece) => {
                    index.put(piece.key, entry(segment, record.offset, piece));
                    if !batch.moves && index.mark_good(&piece.key) {
                        // The segment with the damaged one may be emptied now.
                        self.look_again = true;
                    }
                }
                What::Tombs(tombs) if batch.moves => {
                    tombs.iter().for_each(|tomb| index.set_tomb(tomb, segment));
                }
                What::Tombs(tombs) => {
                    tombs.iter().for_each(|tomb| index.delete(tomb, segment));
                    self.look_again = true;
                    self.nothing_to_gain = false;
                    self.shared.full.store(false, Ordering::Relaxed);
                }
            }
        }
        if let Some(segment) = index.segments.get_mut(&segment) {
            segment.tail = batch.at.next_multiple_of(PAGE);
        }
    }

    /// Makes another segment the active one, emptying one first if there is no other way.
    fn next_segment(&mut self, purpose: Purpose) -> Result<()> {
        self.shared.check_latch()?;
        let Some(next) = self.take_free(purpose)? else {
            // Emptying a segment may have changed the active one; the caller looks again.
            if purpose == Purpose::Put && self.empty_one()? {
                return Ok(());
            }
            self.shared.full.fetch_or(purpose == Purpose::Put, Ordering::Relaxed);
            return Err(Error::NoSpace { server: self.shared.config.server });
        };
        if purpose == Purpose::Put {
            self.shared.full.store(false, Ordering::Relaxed);
        }
        self.start_generation(next, Use::Open)?;
        if let Some(old) = self.active.replace(next) {
            let tail = self.shared.index.read().segments.get(&old).map_or(DATA, |s| s.tail);
            self.write_header(old, |header| header.state = Use::Sealed(tail))?;
            self.look_again = true;
        }
        Ok(())
    }

    /// A segment that may be overwritten, if this purpose may have one.
    fn take_free(&mut self, purpose: Purpose) -> Result<Option<u32>> {
        let unused: Vec<u32> = {
            let index = self.shared.index.read();
            // A reader that still sends from it holds it.
            let held = |number| index.segments.get(number).is_none_or(|s| Arc::strong_count(&s.file) > 1);
            self.free.iter().filter(|number| !held(number)).copied().collect()
        };
        let keep = if purpose == Purpose::Put { self.shared.config.reserve } else { 0 };
        let found = if unused.len() > keep { unused.first().copied() } else { None };
        if let Some(number) = found {
            self.free.retain(|other| *other != number);
            return Ok(Some(number));
        }
        if !self.make_segment()? {
            return Ok(None);
        }
        Ok(self.free.pop())
    }

    /// Makes a new free segment, if there is space for one.
    pub(super) fn make_segment(&mut self) -> Result<bool> {
        let size = self.segment_bytes;
        let config = &self.shared.config;
        let have: u64 = self.shared.index.read().segments.values().map(|s| s.header.size).sum();
        if config.capacity.is_some_and(|capacity| have + size > capacity) {
            return Ok(false);
        }
        let space = self.shared.disk.space().map_err(|e| self.shared.io("ask for its space", e))?;
        if space.free < size + config.keep_free {
            return Ok(false);
        }
        let number = self.number;
        let name = segment_name(number);
        self.number += 1;
        let made = self.shared.disk.create(&name).and_then(|file| file.preallocate(size).map(|()| file));
        let file = match made {
            Ok(file) => file,
            Err(error) => {
                // Without a header the file is removed at the next start.
                let _ = self.shared.disk.remove(&name);
                if !is_full(&error) {
                    return Err(self.shared.latch("make a segment", error));
                }
                // Somebody else was faster to take the space.
                tracing::warn!(server = %config.server, %error, "no space for another segment");
                return Ok(false);
            }
        };
        let header = SegmentHeader {
            cluster: config.cluster,
            number,
            generation: self.generation,
            revision: 0,
            size,
            state: Use::Free,
        };
        self.generation += 1;
        let latch = |e| self.shared.latch("write a segment's header", e);
        file.write_at(&header.encode(), 0).map_err(latch)?;
        file.sync().map_err(latch)?;
        self.shared.disk.sync_names().map_err(latch)?;
        self.shared.index.write().segments.insert(number, Segment::new(file, header));
        self.written.insert(number, DATA);
        self.free.push(number);
        Ok(true)
    }

    /// Gives a segment a new generation: nothing that it held can be found any more.
    pub(super) fn start_generation(&mut self, number: u32, state: Use) -> Result<()> {
        let generation = self.generation;
        self.generation += 1;
        self.write_header(number, |header| {
            header.state = state;
            header.generation = generation;
        })?;
        let mut index = self.shared.index.write();
        index.wipe(number);
        if let Some(segment) = index.segments.get_mut(&number)
            && state == Use::Open
        {
            *segment = Segment::new(segment.file.file.clone(), segment.header);
        }
        Ok(())
    }

    /// Writes the segment's header again, into both slots, if it cannot be read.
    fn heal_header(&mut self, number: u32) -> Result<bool> {
        self.shared.check_latch()?;
        let found = {
            let index = self.shared.index.read();
            index.segments.get(&number).map(|s| (s.file.file.clone(), s.header))
        };
        let Some((file, header)) = found else { return Ok(false) };
        let whole = header_is_whole(&*file, &header);
        if whole.map_err(|e| self.shared.io("read a segment's header", e))? {
            return Ok(false);
        }
        let config = &self.shared.config;
        tracing::warn!(server = %config.server, disk = config.disk, segment = number, "a segment's header is damaged; it is written again");
        metrics::counter!(names::CORRUPT).increment(1);
        self.write_header(number, |_| ())?;
        self.write_header(number, |_| ())?;
        Ok(true)
    }

    /// Writes a segment's header into the slot that does not hold the current one, durably.
    pub(super) fn write_header(
        &mut self,
        number: u32,
        change: impl FnOnce(&mut SegmentHeader),
    ) -> Result<()> {
        let (file, mut header) = {
            let index = self.shared.index.read();
            let Some(segment) = index.segments.get(&number) else { return Ok(()) };
            (segment.file.file.clone(), segment.header)
        };
        header.revision += 1;
        change(&mut header);
        let latch = |e| self.shared.latch("write a segment's header", e);
        file.write_at(&header.encode(), header.revision % 2 * PAGE).map_err(latch)?;
        file.sync().map_err(latch)?;
        if let Some(segment) = self.shared.index.write().segments.get_mut(&number) {
            segment.header = header;
        }
        Ok(())
    }
}

impl Batch {
    /// A batch of records that were somewhere else before.
    pub(super) fn of_moves() -> Batch {
        Batch { moves: true, ..Batch::default() }
    }

    /// Appends a record for which there is room.
    pub(super) fn push(&mut self, what: What, payload: Vec<Bytes>) {
        let offset = self.at;
        self.at = what.span(offset).end.next_multiple_of(GRAIN);
        self.records.push((Record { offset, batch: 0, last: false, what }, payload));
    }
}

impl Segment {
    /// A segment with nothing in it.
    pub(super) fn new(file: Arc<dyn DiskFile>, header: SegmentHeader) -> Segment {
        let SegmentHeader { cluster, number, generation, .. } = header;
        let place = super::format::Place { cluster, segment: number, generation };
        let file = Arc::new(Held { file, place });
        Segment { file, header, tail: DATA, live: 0, tombs: 0, dead: Vec::new(), stuck: false }
    }
}

/// The index entry of a piece's record.
pub(super) fn entry(segment: u32, offset: u64, piece: &PieceHeader) -> Entry {
    Entry {
        segment,
        grain: (offset / GRAIN) as u32,
        payload: piece.payload(),
        layout: piece.layout,
        digest: piece.digest(),
        chunks: piece.chunks.len() as u16,
    }
}

/// Whether this is the answer of a disk that is full and otherwise well.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The file's name of a segment.
pub(super) fn segment_name(number: u32) -> String {
    format!("segment-{number:08}")
}

/// Writes parts one after the other; a large row goes around the page cache. Parts that lie right for that, such as
/// payloads as they came from the network, are not copied.
fn write_parts(file: &dyn DiskFile, parts: &[&[u8]], at: u64) -> io::Result<()> {
    let total: usize = parts.iter().map(|part| part.len()).sum();
    if total < DIRECT_MIN {
        return file.write_vectored_at(parts, at);
    }
    // The head of a part that goes out from where it is. Whatever lies before it is a whole number of pages, too.
    let as_is = |part: &[u8], at: usize| {
        let right = at.is_multiple_of(PAGE as usize) && part.as_ptr().addr().is_multiple_of(PAGE as usize);
        if right && part.len() >= AS_IS_MIN { part.len() - part.len() % PAGE as usize } else { 0 }
    };
    let mut at_part = 0;
    let mut copied = 0;
    for part in parts {
        copied += part.len() - as_is(part, at_part);
        at_part += part.len();
    }
    let mut buffer = AlignedBuf::with_len(copied);
    let mut plan = Vec::new();
    let (mut at_part, mut filled, mut from) = (0, 0, 0);
    for part in parts {
        let (head, rest) = part.split_at(as_is(part, at_part));
        if !head.is_empty() {
            plan.push((from..filled, head));
            from = filled;
        }
        buffer[filled..filled + rest.len()].copy_from_slice(rest);
        filled += rest.len();
        at_part += part.len();
    }
    let mut aligned: Vec<&[u8]> = Vec::with_capacity(2 * plan.len() + 1);
    for (before, head) in plan {
        aligned.extend([&buffer[before], head]);
    }
    aligned.push(&buffer[from..]);
    aligned.retain(|part| !part.is_empty());
    file.write_direct_at(&aligned, at)
}
