//! Reading: from the index to a range of a segment's file.
//!
//! A piece's chunk table lies before its payload. A small piece is read with its table in one go; of a large one only the
//! table is read, and the payload is handed on as a range of the file, for sendfile. The bytes are not checked: the reader
//! does that, since it has to anyway. A piece that was found damaged is kept and marked until a good copy takes its
//! place; meanwhile it is checked here, and only chunks that are whole are handed out: they may be the last of their kind.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::disk::DiskFile;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::{BlockId, LayoutId};
use torchfs_rpc::AlignedBuf;

use super::format::{PAGE, PieceHeader, Record, Refused, SegmentHeader, What};
use super::index::{Entry, Held, Key};
use super::{Op, Shared, Store};
use crate::{Error, Result, metrics as names};

/// A record up to this length is read in one go, whatever part of it is wanted.
const SMALL: u64 = 80 << 10;

/// After so many reads that the disk refused it is taken out of use.
const READ_ERRORS_MAX: u32 = 32;

const ENDS_EARLY: &str = "the segment's file ends early";

/// A piece that is about to be read.
struct Wanted {
    block: BlockId,
    piece: u8,
    entry: Entry,
    file: Arc<Held>,
    bad: bool,
}

impl Wanted {
    /// How many bytes are read at first: all of a small record, the header of a large one.
    fn head(&self) -> usize {
        let span = self.entry.span();
        let whole = span.end - self.entry.offset();
        if whole <= SMALL { whole as usize } else { span.header }
    }
}

/// Chunks of a stored piece.
pub struct Found {
    /// The block's layout.
    pub layout: LayoutId,
    /// The index in the block of the first chunk here.
    pub first: u32,
    /// The chunks.
    pub chunks: Vec<ChunkInfo>,
    /// Their stored bytes, one chunk after the other, unchecked.
    pub body: Body,
}

/// Stored bytes.
pub enum Body {
    /// In memory.
    Memory(Bytes),
    /// In a file. While this clone of the file lives, the bytes stay as they are.
    File {
        /// The segment's file, for reading only.
        file: Arc<dyn DiskFile>,
        /// Where the bytes start.
        offset: u64,
        /// How many there are.
        len: u64,
    },
}

/// Figures of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// Bytes that pieces take or may take: what is used and what is free.
    pub total: u64,
    /// Bytes free for pieces, those included that emptying segments brings back.
    pub free: u64,
    /// Bytes that live pieces take.
    pub used: u64,
    /// Live pieces.
    pub pieces: u64,
    /// Places that could not be read when the store was opened.
    pub damaged: u64,
    /// Live pieces that are known to be damaged.
    pub bad: u64,
    /// Which file system it is on; 0: not known.
    pub fs: u64,
    /// Bytes left on that for pieces, whoever takes them.
    pub fs_free: u64,
    /// How many of these are counted in `free`.
    pub fs_share: u64,
}

impl Store {
    /// Chunks `range` of a piece, counted within the piece and cut at its end; the bytes of a large piece stay in the file.
    pub fn get(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Found> {
        let wanted = self.wanted(block, piece)?;
        let mut head = AlignedBuf::with_len(wanted.head());
        let got = wanted.file.read_at(&mut head, wanted.entry.offset());
        head.truncate(got.map_err(|e| self.unreadable(&wanted, e))?);
        let bad = wanted.bad;
        let found = self.found(wanted, head.into_bytes(), range)?;
        if bad { self.checked(block, piece, found) } else { Ok(found) }
    }

    /// [`Store::get`] if that needs no wait for the disk, else `None`.
    pub fn get_now(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Option<Found>> {
        let wanted = self.wanted(block, piece)?;
        if wanted.bad {
            return Ok(None);
        }
        let offset = wanted.entry.offset();
        // A header in memory, read ahead with its neighbour, says nothing about the payload behind it.
        let span = wanted.entry.span();
        if range.start == 0
            && range.end >= u32::from(wanted.entry.chunks)
            && wanted.file.is_cached(offset, span.end - offset) == Some(false)
        {
            return Ok(None);
        }
        let mut head = AlignedBuf::with_len(wanted.head());
        if !wanted.file.read_at_once(&mut head, offset).map_err(|e| self.unreadable(&wanted, e))? {
            return Ok(None);
        }
        self.found(wanted, head.into_bytes(), range).map(Some)
    }

    /// [`Store::get`] with all bytes in memory. A whole piece is read with its header in one go, the first time around
    /// the page cache: most are read once per epoch and cached by the node that asked.
    pub fn load(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Found> {
        let wanted = self.wanted(block, piece)?;
        if range.start == 0 && range.end >= u32::from(wanted.entry.chunks) && !wanted.bad {
            return self.load_whole(wanted, range);
        }
        let mut found = self.get(block, piece, range)?;
        if let Body::File { file, offset, len } = found.body {
            let mut bytes = AlignedBuf::with_len(len as usize);
            let got = file.read_at(&mut bytes, offset).map_err(|e| self.unreadable(&wanted, e))?;
            if got < bytes.len() {
                return Err(self.corrupt(&wanted, ENDS_EARLY.to_owned()));
            }
            found.body = Body::Memory(bytes.into_bytes());
        }
        Ok(found)
    }

    fn load_whole(&self, wanted: Wanted, range: Range<u32>) -> Result<Found> {
        let (from, to) = (wanted.entry.offset(), wanted.entry.span().end);
        let again = self.shared.recent.touch(&Key::new(wanted.block, wanted.piece));
        let (start, end) = if again { (from, to) } else { (from - from % PAGE, to.next_multiple_of(PAGE)) };
        let mut bytes = AlignedBuf::with_len((end - start) as usize);
        let got = if again {
            wanted.file.read_at(&mut bytes, start)
        } else {
            wanted.file.read_direct_at(&mut bytes, start)
        };
        bytes.truncate(got.map_err(|e| self.unreadable(&wanted, e))?);
        let record = bytes.into_bytes();
        let record = record.slice(record.len().min((from - start) as usize)..);
        self.found(wanted, record, range)
    }

    fn wanted(&self, block: BlockId, piece: u8) -> Result<Wanted> {
        let (entry, file, bad) = self.shared.find(block, piece)?;
        Ok(Wanted { block, piece, entry, file, bad })
    }

    /// Chunks of a damaged piece, if these are whole.
    fn checked(&self, block: BlockId, piece: u8, mut found: Found) -> Result<Found> {
        let bytes = match found.body {
            Body::Memory(bytes) => bytes,
            Body::File { file, offset, len } => {
                let mut bytes = AlignedBuf::with_len(len as usize);
                let got = file
                    .read_at(&mut bytes, offset)
                    .map_err(|e| self.shared.io("read a damaged piece", e))?;
                bytes.truncate(got);
                bytes.into_bytes()
            }
        };
        check_chunks(block, found.first, &found.chunks, &bytes).map_err(|error| Error::Corrupt {
            block,
            piece,
            server: self.shared.config.server,
            why: error.to_string(),
        })?;
        found.body = Body::Memory(bytes);
        Ok(found)
    }

    /// Makes the answer from the head of a record: its header alone or all of it.
    fn found(&self, wanted: Wanted, head: Bytes, range: Range<u32>) -> Result<Found> {
        let span = wanted.entry.span();
        let header = self.header(&wanted, head.get(..span.header))?;
        let end = (range.end as usize).min(header.chunks.len());
        let range = (range.start as usize).min(end)..end;
        let within = torchfs_codec::stored_range(&header.chunks, range.clone());
        let body = if head.len() > span.header {
            let from = (span.payload - wanted.entry.offset()) as usize;
            let here = from + within.start as usize..from + within.end as usize;
            if here.end > head.len() {
                return Err(self.corrupt(&wanted, ENDS_EARLY.to_owned()));
            }
            Body::Memory(head.slice(here))
        } else {
            let file = wanted.file;
            Body::File { file, offset: span.payload + within.start, len: within.end - within.start }
        };
        let first = header.first + range.start as u32;
        Ok(Found { layout: header.layout, first, chunks: header.chunks[range].to_vec(), body })
    }

    /// Reads a piece around the page cache and checks all of it; returns its stored bytes. What does not fit is marked as
    /// damaged, and what fits again is not any more.
    pub fn verify(&self, block: BlockId, piece: u8) -> Result<u64> {
        let (entry, file, was_bad) = self.shared.find(block, piece)?;
        let wanted = Wanted { block, piece, entry, file, bad: was_bad };
        let (from, to) = (entry.offset(), entry.span().end);
        let start = from - from % PAGE;
        let mut bytes = AlignedBuf::with_len((to.next_multiple_of(PAGE) - start) as usize);
        let got = wanted.file.read_direct_at(&mut bytes, start).map_err(|e| self.unreadable(&wanted, e))?;
        let record = bytes.get((from - start) as usize..got).unwrap_or_default();
        let header = self.header(&wanted, record.get(..entry.span().header))?;
        let payload = (entry.span().payload - from) as usize..(to - from) as usize;
        let payload = record.get(payload).unwrap_or_default();
        check_chunks(block, header.first, &header.chunks, payload)
            .map_err(|error| self.corrupt(&wanted, error.to_string()))?;
        if was_bad {
            let mut index = self.shared.index.write();
            if index.find(&Key::new(block, piece)) == Some(&entry) {
                index.mark_good(&Key::new(block, piece));
            }
        }
        Ok(payload.len() as u64)
    }

    /// Reads the headers of all segments and has those written again that cannot be read any more: without its header
    /// nothing in a segment is found at the next start. Answers how many were bad.
    pub fn verify_headers(&self) -> Result<u64> {
        // No segment is held meanwhile: whoever needs one would find none.
        let segments: Vec<_> =
            self.shared.index.read().segments.values().map(|s| (s.header, s.file.file.clone())).collect();
        let mut bad = 0;
        for (header, file) in segments {
            let whole = header_is_whole(&*file, &header);
            if whole.map_err(|e| self.shared.io("read a segment's header", e))? {
                continue;
            }
            // The writer looks again: it may just have written another one.
            bad += u64::from(self.wait(|done| Op::Header(header.number, done))?);
        }
        Ok(bad)
    }

    /// Whether the piece is here and, as far as is known, whole.
    pub fn has(&self, block: BlockId, piece: u8) -> bool {
        let key = Key::new(block, piece);
        let index = self.shared.index.read();
        index.find(&key).is_some() && !index.is_bad(&key)
    }

    /// Stored bytes of a piece that is here, whole or not.
    pub fn stored(&self, block: BlockId, piece: u8) -> Option<u32> {
        self.shared.index.read().find(&Key::new(block, piece)).map(|entry| entry.payload)
    }

    /// Pieces that are known to be damaged, at most so many, as far as that is kept over a restart.
    pub fn bad(&self, limit: usize) -> Vec<(BlockId, u8)> {
        self.shared.index.read().bad().take(limit).map(|key| (key.block(), key.piece())).collect()
    }

    /// Looks whether the disk still answers: finds a segment under its name and reads its header. If not, the disk is
    /// taken out of use.
    pub fn probe(&self) {
        if self.failure().is_some() {
            return;
        }
        let Some(header) = self.shared.index.read().segments.values().next_back().map(|s| s.header) else {
            return;
        };
        let probe = || -> std::io::Result<()> {
            let file = self.shared.disk.open(&super::writer::segment_name(header.number))?;
            let mut slots = AlignedBuf::with_len(2 * PAGE as usize);
            let got = file.read_direct_at(&mut slots, 0)?;
            let ours = slots[..got].chunks(PAGE as usize).any(|slot| {
                SegmentHeader::decode(slot)
                    .is_ok_and(|found| (found.cluster, found.number) == (header.cluster, header.number))
            });
            if ours { Ok(()) } else { Err(std::io::Error::other("its segments are not there any more")) }
        };
        if let Err(error) = probe() {
            self.take_out("find its segments", error);
        }
    }

    /// Pieces after the given one, in the order of ids, at most so many.
    pub fn list(&self, after: Option<(BlockId, u8)>, limit: usize) -> Vec<PieceInfo> {
        let index = self.shared.index.read();
        let after = after.map(|(block, piece)| Key::new(block, piece));
        let info = |(key, entry): (&Key, &Entry)| PieceInfo {
            block: key.block(),
            piece: key.piece(),
            layout: entry.layout,
            stored: entry.payload,
        };
        index.after(after).take(limit).map(info).collect()
    }

    /// Figures of the store.
    pub fn stat(&self) -> Result<Stat> {
        let config = &self.shared.config;
        let space = self.shared.disk.space().map_err(|e| self.shared.io("ask for its space", e))?;
        let index = self.shared.index.read();
        let have: u64 = index.segments.values().map(|s| s.header.size).sum();
        let live: u64 = index.segments.values().map(|s| s.live + s.tombs).sum();
        // New pieces need whole segments. Stores on one file system share what it has left.
        let size = self.shared.segment_bytes.max(1);
        let whole = |bytes: u64| bytes - bytes % size;
        let fs_free = whole(space.free.saturating_sub(config.keep_free));
        let room = fs_free / config.sharers.max(1);
        let room = config.capacity.map_or(room, |most| whole(most.saturating_sub(have)).min(room));
        let all = have + room;
        // A put was refused, and nothing came back since: what is left lies in pieces too small for anybody.
        let full = room < size && self.shared.full.load(Ordering::Relaxed);
        let reserve = config.reserve as u64 * size;
        let free = if full { 0 } else { all.saturating_sub(live + reserve) };
        let used = index.payload();
        Ok(Stat {
            // 0 would say that nothing is known.
            total: (used + free).max(1),
            free,
            fs: space.fs,
            fs_free,
            // The rest is in segments that it has already.
            fs_share: room.min(free),
            used,
            pieces: index.pieces() as u64,
            damaged: self.shared.damaged,
            bad: index.bad_count() as u64,
        })
    }

    /// The header of a piece's record, if it is the one that the index means.
    fn header(&self, wanted: &Wanted, bytes: Option<&[u8]>) -> Result<PieceHeader> {
        let Wanted { block, piece, entry, file, .. } = wanted;
        let record = Record::decode(&file.place, entry.offset(), bytes.unwrap_or_default());
        match record {
            Ok(Record { what: What::Piece(header), .. })
                if header.key == Key::new(*block, *piece) && header.digest() == entry.digest =>
            {
                Ok(header)
            }
            Err(Refused::Newer(why)) => Err(self.corrupt(wanted, why)),
            _ => {
                let place = format!("its header at {} in segment {}", entry.offset(), entry.segment);
                Err(self.corrupt(wanted, format!("{place} cannot be read")))
            }
        }
    }

    fn corrupt(&self, wanted: &Wanted, why: String) -> Error {
        let Wanted { block, piece, entry, .. } = wanted;
        self.shared.found_bad(Key::new(*block, *piece), entry, &why);
        Error::Corrupt { block: *block, piece: *piece, server: self.shared.config.server, why }
    }

    /// The disk refused to read a piece. One bad place costs that piece; many mean that the disk is gone.
    fn unreadable(&self, wanted: &Wanted, error: std::io::Error) -> Error {
        let fault = self.shared.io("read a piece", error);
        self.shared.found_bad(Key::new(wanted.block, wanted.piece), &wanted.entry, &fault.to_string());
        if self.shared.read_errors.fetch_add(1, Ordering::Relaxed) >= READ_ERRORS_MAX {
            self.take_out("read its pieces", std::io::Error::other("too many places cannot be read"));
        }
        fault
    }
}

impl Shared {
    /// Where a piece is, and whether it is known to be damaged.
    pub(super) fn find(&self, block: BlockId, piece: u8) -> Result<(Entry, Arc<Held>, bool)> {
        let key = Key::new(block, piece);
        let index = self.index.read();
        index
            .find(&key)
            .and_then(|entry| {
                Some((*entry, index.segments.get(&entry.segment)?.file.clone(), index.is_bad(&key)))
            })
            .ok_or(Error::Gone { block, piece, server: self.config.server })
    }

    /// Marks a piece as damaged.
    pub(super) fn found_bad(&self, key: Key, entry: &Entry, why: &str) {
        if self.index.write().mark_bad(key, entry) {
            metrics::counter!(names::CORRUPT).increment(1);
            tracing::warn!(
                server = %self.config.server,
                disk = self.config.disk,
                block = %key.block(),
                piece = key.piece(),
                why,
                "a piece is damaged; it is kept and not served until a good copy is here"
            );
            // A writer with so much to do that it takes no more stores the marks by itself.
            let _ = self.submit(Op::Marks(Box::new(|_| ())), false);
        }
    }
}

/// Remembers some of the pieces that were read lately; a newer one takes the place of an older one.
pub(super) struct Recent(Vec<AtomicU32>);

impl Recent {
    const SLOTS: usize = 1 << 16;

    pub(super) fn new() -> Recent {
        Recent((0..Recent::SLOTS).map(|_| AtomicU32::new(0)).collect())
    }

    /// Whether the piece was read lately; it was now.
    fn touch(&self, key: &Key) -> bool {
        let mut name = [0; 13];
        name[..12].copy_from_slice(&key.block().to_bytes());
        name[12] = key.piece();
        // Two independent halves: where it is kept, and what is kept.
        let (place, print) = (crc32c::crc32c(&name), crc32c::crc32c_append(!0, &name[4..]));
        let slot = &self.0[place as usize % Recent::SLOTS];
        slot.swap(print, Ordering::Relaxed) == print
    }
}

/// Whether so many chunks from this one on can have numbers.
pub(crate) fn are_numbers(first: u32, chunks: usize) -> bool {
    u64::from(first) + (chunks as u64) < u64::from(u32::MAX)
}

/// Checks stored bytes against their chunks.
pub(crate) fn check_chunks(
    block: BlockId,
    first: u32,
    chunks: &[ChunkInfo],
    payload: &[u8],
) -> std::result::Result<(), torchfs_codec::Error> {
    check_parts(block, first, chunks, [payload])
}

/// The same for bytes that come in several parts, wherever these begin and end.
pub(crate) fn check_parts<'a>(
    block: BlockId,
    first: u32,
    chunks: &[ChunkInfo],
    payload: impl IntoIterator<Item = &'a [u8]>,
) -> std::result::Result<(), torchfs_codec::Error> {
    let mut payload = payload.into_iter();
    let mut part: &[u8] = &[];
    let mut stored = Vec::new();
    for (index, chunk) in (first..).zip(chunks) {
        stored.clear();
        let mut left = chunk.stored as usize;
        while left > 0 {
            if part.is_empty() {
                let Some(next) = payload.next() else { break };
                part = next;
                continue;
            }
            let (here, rest) = part.split_at(part.len().min(left));
            stored.push(here);
            left -= here.len();
            part = rest;
        }
        torchfs_codec::verify_parts(block, index, chunk, &stored)?;
    }
    Ok(())
}

/// Whether the slot that this header was written to still has it.
pub(super) fn header_is_whole(file: &dyn DiskFile, header: &SegmentHeader) -> std::io::Result<bool> {
    let mut slot = AlignedBuf::with_len(PAGE as usize);
    let got = file.read_direct_at(&mut slot, header.revision % 2 * PAGE)?;
    Ok(SegmentHeader::decode(&slot[..got]).is_ok_and(|found| found == *header))
}
