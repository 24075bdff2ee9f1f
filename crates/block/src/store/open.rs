//! Opening a store: reads the headers of all records and rebuilds the index.
//!
//! Only the last batch can be torn, since a batch is written after the one before was synced. Its pieces are read and
//! checked; what is torn is wiped, so that no later start takes it for whole. Everything else is taken by its header.
//!
//! After a failed sync the page cache shows what the disk does not hold, and takes it for written. So the last thing that was
//! written, a batch or a segment's header, is written again as it is.
//!
//! A place that the disk refuses to read costs what lies there, as damage does, and not the disk.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32};

use parking_lot::{Condvar, Mutex, RwLock};
use torchfs_proto::disk::{Disk, DiskFile};

use super::format::{DATA, GRAIN, PAGE, PieceHeader, Record, Refused, SegmentHeader, Tomb, Use, What};
use super::index::{Index, Key, Segment};
use super::scan::{Step, Walk};
use super::writer::{Writer, entry, segment_name};
use super::{Config, Queue, Shared};
use crate::{Error, Result, metrics as names};

/// A disk with more pages that cannot be read is not used.
const UNREADABLE_MAX: usize = 32;

/// Opens the store in a folder.
pub(super) fn open(disk: Arc<dyn Disk>, config: Config) -> Result<(Arc<Shared>, Writer)> {
    let mut opening = Opening { disk: &*disk, config: &config, found: Found::default() };
    opening.find_segments()?;
    opening.read_segments()?;
    let mut found = opening.finish()?;
    super::marks::load(&*disk, &config, &mut found.index);

    let space = disk.space().map_err(|e| opening_error(&config, "ask for its space", e))?;
    let total = config.capacity.unwrap_or(space.total);
    // A small disk has small segments, so that the reserve does not eat it.
    let segment_bytes = config.segment_bytes.min((total / 32).next_multiple_of(1 << 20).max(32 << 20));
    let shared = Arc::new(Shared {
        config,
        disk: disk.clone(),
        index: RwLock::new(found.index),
        recent: super::read::Recent::new(),
        latched: OnceLock::new(),
        read_errors: AtomicU32::new(0),
        damaged: found.damaged,
        segment_bytes,
        full: AtomicBool::new(false),
        queue: Mutex::new(Queue::default()),
        wake: Condvar::new(),
        room: Condvar::new(),
    });
    let mut writer = Writer {
        shared: shared.clone(),
        active: found.active,
        free: found.free,
        seq: found.seq + 1,
        batch: found.batch + 1,
        generation: found.generation + 1,
        number: found.number + 1,
        segment_bytes,
        written: HashMap::new(),
        emptying: None,
        look_again: true,
        nothing_to_gain: false,
    };
    if let Some(error) = found.failed {
        // What is on it can still be read.
        shared.latch("write again what was written last", error);
        return Ok((shared, writer));
    }
    for (number, tail) in found.to_seal {
        writer.write_header(number, |header| header.state = Use::Sealed(tail))?;
    }
    while writer.free.len() < shared.config.reserve {
        if !writer.make_segment()? {
            tracing::warn!(server = %shared.config.server, "no space for the reserve that deletes need");
            break;
        }
    }
    Ok((shared, writer))
}

/// What was found so far.
#[derive(Default)]
struct Found {
    index: Index,
    free: Vec<u32>,
    active: Option<u32>,
    to_seal: Vec<(u32, u64)>,
    damaged: u64,
    /// The highest of their kinds.
    seq: u64,
    batch: u64,
    generation: u64,
    number: u32,
    /// Order and batch of the piece that the index has under a key.
    order: HashMap<Key, (u64, u64)>,
    /// The latest tombstone of a key: its order and its segment.
    tombs: HashMap<Key, (u64, u32)>,
    /// Pieces of the highest batch so far: the last one may be torn.
    last: Vec<Piece>,
    /// Where that batch lies.
    last_at: (u32, Range<u64>),
    /// The disk could be read and takes no writes.
    failed: Option<std::io::Error>,
    /// Pages that cannot be read.
    unreadable: usize,
}

/// A piece's record.
struct Piece {
    segment: u32,
    offset: u64,
    batch: u64,
    header: PieceHeader,
}

/// What the two slots of a segment's header say.
enum Header {
    Good(SegmentHeader),
    /// The file was being made when the power went.
    Unfinished,
    Damaged,
}

struct Opening<'a> {
    disk: &'a dyn Disk,
    config: &'a Config,
    found: Found,
}

impl Opening<'_> {
    fn find_segments(&mut self) -> Result<()> {
        let names = self.disk.list().map_err(|e| opening_error(self.config, "list its folder", e))?;
        let mut unfinished = Vec::new();
        for name in names {
            let Some(number) = name.strip_prefix("segment-").and_then(|n| n.parse::<u32>().ok()) else {
                continue;
            };
            if segment_name(number) != name {
                continue;
            }
            self.found.number = self.found.number.max(number);
            let file = self.disk.open(&name).map_err(|e| opening_error(self.config, "open a segment", e))?;
            match self.read_header(&*file, number)? {
                Header::Good(header) => {
                    self.found.generation = self.found.generation.max(header.generation);
                    self.found.index.segments.insert(number, Segment::new(file, header));
                }
                Header::Unfinished => unfinished.push(name),
                Header::Damaged => {
                    self.found.damaged += 1;
                    metrics::counter!(names::DAMAGED).increment(1);
                    tracing::error!(
                        server = %self.config.server,
                        file = name,
                        "the header of a segment is damaged; its pieces are lost, the file is kept"
                    );
                }
            }
        }
        // The power went while they were being made; nothing was ever in them.
        for name in unfinished {
            self.disk.remove(&name).map_err(|e| opening_error(self.config, "remove a segment", e))?;
        }
        // After a crash of the process alone, names may be visible that are not durable yet.
        self.disk.sync_names().map_err(|e| opening_error(self.config, "sync its folder", e))
    }

    fn read_header(&mut self, file: &dyn DiskFile, number: u32) -> Result<Header> {
        let mut slots = vec![0; DATA as usize];
        let (mut got, mut unreadable) = (0, false);
        for (slot, at) in slots.chunks_mut(PAGE as usize).zip([0, PAGE]) {
            match file.read_at(slot, at) {
                Ok(read) => got += read,
                Err(error) if error.raw_os_error().is_some() => {
                    self.unreadable(1, error)?;
                    unreadable = true;
                }
                Err(error) => return Err(opening_error(self.config, "read a segment's header", error)),
            }
        }
        let mut best: Option<SegmentHeader> = None;
        for slot in slots.chunks(PAGE as usize) {
            match SegmentHeader::decode(slot) {
                Ok(header) if best.is_none_or(|best| header.revision > best.revision) => best = Some(header),
                Ok(_) | Err(Refused::Garbage) => {}
                Err(Refused::Newer(why)) => return Err(self.foreign(number, &why)),
            }
        }
        let Some(header) = best else {
            let blank = !unreadable && slots[..got].iter().all(|byte| *byte == 0);
            return Ok(if blank { Header::Unfinished } else { Header::Damaged });
        };
        if header.cluster != self.config.cluster {
            let why = format!("it belongs to cluster {}, not to {}", header.cluster, self.config.cluster);
            return Err(self.foreign(number, &why));
        }
        // The one that cannot be read may be the newer one and say that it is in use.
        let doubtful = unreadable && header.state == Use::Free;
        Ok(if header.number == number && !doubtful { Header::Good(header) } else { Header::Damaged })
    }

    /// Notes places that cannot be read. Too many mean that the disk is gone.
    fn unreadable(&mut self, pages: usize, error: std::io::Error) -> Result<()> {
        self.found.unreadable += pages;
        if self.found.unreadable <= UNREADABLE_MAX {
            return Ok(());
        }
        Err(opening_error(self.config, "read its segments", error))
    }

    fn foreign(&self, segment: u32, why: &str) -> Error {
        let why = format!("{}: {why}", segment_name(segment));
        Error::Foreign { server: self.config.server, why }
    }

    fn read_segments(&mut self) -> Result<()> {
        let numbers: Vec<u32> = self.found.index.segments.keys().copied().collect();
        let mut open = Vec::new();
        for number in numbers {
            let Some(segment) = self.found.index.segments.get(&number) else { continue };
            let (file, place, size) = (segment.file.file.clone(), segment.place(), segment.header.size);
            let end = match segment.header.state {
                Use::Free => {
                    self.found.free.push(number);
                    continue;
                }
                Use::Open => size,
                Use::Sealed(end) => end.min(size),
            };
            let tail = self.read_records(Walk::new(file, place, end), number)?;
            if let Some(segment) = self.found.index.segments.get_mut(&number) {
                segment.tail = tail;
                if segment.header.state == Use::Open {
                    open.push((segment.header.generation, number, tail));
                }
            }
        }
        // The power may have gone between opening the next segment and sealing the one before.
        open.sort_unstable();
        self.found.active = open.pop().map(|(_, number, _)| number);
        self.found.to_seal = open.into_iter().map(|(_, number, tail)| (number, tail)).collect();
        Ok(())
    }

    /// Takes all records of a segment; returns where the next batch may start.
    fn read_records(&mut self, mut walk: Walk, number: u32) -> Result<u64> {
        loop {
            match walk.step().map_err(|e| opening_error(self.config, "read a segment", e))? {
                Step::Record(record) => self.take(number, record),
                Step::Gap { from, to } => {
                    self.found.damaged += 1;
                    metrics::counter!(names::DAMAGED).increment(1);
                    tracing::warn!(
                        server = %self.config.server,
                        file = segment_name(number),
                        from,
                        to,
                        "no record can be read here: a torn write that was never acknowledged, or damage"
                    );
                }
                Step::Newer(why) => return Err(self.foreign(number, &why)),
                Step::End { tail } => {
                    if walk.unreadable() > 0 {
                        // Nobody knows what was there, even if nothing follows.
                        self.found.damaged += 1;
                        let error = std::io::Error::other("too many places cannot be read");
                        self.unreadable(walk.unreadable(), error)?;
                    }
                    return Ok(tail.next_multiple_of(PAGE));
                }
            }
        }
    }

    fn take(&mut self, segment: u32, record: Record) {
        let end = record.what.span(record.offset).end;
        let Record { offset, batch, what, .. } = record;
        if batch == self.found.batch {
            self.found.last_at.1.end = end;
        }
        if batch > self.found.batch {
            self.found.batch = batch;
            self.found.last_at = (segment, offset..end);
            for piece in std::mem::take(&mut self.found.last) {
                self.found.take(piece);
            }
        }
        match what {
            What::Piece(header) => {
                let piece = Piece { segment, offset, batch, header };
                if batch == self.found.batch {
                    self.found.last.push(piece);
                } else {
                    self.found.take(piece);
                }
            }
            What::Tombs(tombs) => {
                for tomb in tombs {
                    self.found.seq = self.found.seq.max(tomb.seq);
                    let latest = self.found.tombs.entry(tomb.key).or_insert((tomb.seq, segment));
                    if tomb.seq > latest.0 {
                        *latest = (tomb.seq, segment);
                    }
                }
            }
        }
    }

    /// Checks the last batch, applies the tombstones, and makes what was found durable.
    fn finish(mut self) -> Result<Found> {
        for piece in std::mem::take(&mut self.found.last) {
            let Some(segment) = self.found.index.segments.get(&piece.segment) else { continue };
            let file = segment.file.file.clone();
            let whole = match self.is_whole(&*file, &piece) {
                Err(error) if error.raw_os_error().is_some() => {
                    // Torn or not, nobody knows. It is kept as damaged.
                    self.unreadable(1, error)?;
                    let (key, entry) = (piece.header.key, entry(piece.segment, piece.offset, &piece.header));
                    self.found.take(piece);
                    self.found.index.mark_bad(key, &entry);
                    continue;
                }
                whole => {
                    whole.map_err(|e| opening_error(self.config, "read a piece of the last batch", e))?
                }
            };
            if whole {
                self.found.take(piece);
            } else {
                self.found.seq = self.found.seq.max(piece.header.seq);
                file.write_at(&[0; GRAIN as usize], piece.offset)
                    .map_err(|e| opening_error(self.config, "wipe a torn piece", e))?;
            }
        }
        for (key, (seq, segment)) in std::mem::take(&mut self.found.tombs) {
            let tomb = Tomb { key, seq };
            if self.found.order.get(&key).is_some_and(|(put, _)| *put < seq) {
                self.found.index.delete(&tomb, segment);
            } else {
                self.found.index.set_tomb(&tomb, segment);
            }
        }
        self.found.failed = self.write_again().err();
        // If only the process died, what was read may not be durable yet. Records lie in an open segment then, and a
        // segment that was just freed must not come back.
        for segment in self.found.index.segments.values() {
            if self.found.failed.is_none() && !matches!(segment.header.state, Use::Sealed(_)) {
                self.found.failed = segment.file.file.sync().err();
            }
        }
        Ok(self.found)
    }

    /// Writes what was written last again as it is; the sync after it makes it durable. A failed sync latches the disk, so
    /// there is one such thing at most.
    fn write_again(&self) -> std::io::Result<()> {
        let segments = &self.found.index.segments;
        let unsealed = || segments.values().filter(|s| !matches!(s.header.state, Use::Sealed(_)));
        if let Some(Segment { header, file, .. }) = unsealed().max_by_key(|s| s.header.generation) {
            file.file.write_at(&header.encode(), header.revision % 2 * PAGE)?;
        }
        let (number, range) = &self.found.last_at;
        let Some(segment) = unsealed().find(|s| s.header.number == *number) else { return Ok(()) };
        let file = &*segment.file.file;
        let end = range.end.next_multiple_of(PAGE);
        let mut page = vec![0; PAGE as usize];
        for at in (range.start - range.start % PAGE..end).step_by(page.len()) {
            match file.read_at(&mut page, at) {
                Ok(got) => file.write_at(&page[..got], at)?,
                // What cannot be read was not written just now.
                Err(error) if error.raw_os_error().is_some() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn is_whole(&self, file: &dyn DiskFile, piece: &Piece) -> std::io::Result<bool> {
        let header = &piece.header;
        let mut payload = vec![0; header.payload() as usize];
        let at = What::Piece(header.clone()).span(piece.offset).payload;
        if file.read_at(&mut payload, at)? < payload.len() {
            return Ok(false);
        }
        Ok(super::read::check_chunks(header.key.block(), header.first, &header.chunks, &payload).is_ok())
    }
}

impl Found {
    /// Puts a piece's record into the index, or among the dead if a later or newer record of the piece is there.
    fn take(&mut self, piece: Piece) {
        let Piece { segment, offset, batch, header } = piece;
        self.seq = self.seq.max(header.seq);
        let order = (header.seq, batch);
        match self.order.get(&header.key) {
            Some(other) if *other >= order => self.index.bury(header.key, segment),
            _ => {
                self.order.insert(header.key, order);
                self.index.put(header.key, entry(segment, offset, &header));
            }
        }
    }
}

fn opening_error(config: &Config, what: &'static str, error: std::io::Error) -> Error {
    super::io_error(config, what, error)
}
