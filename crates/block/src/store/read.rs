//! Reading: from the index to a range of a segment's file.
//!
//! A piece's chunk table lies before its payload. A small piece is read with its table in one go; of a large one only the
//! table is read, and the payload is handed on as a range of the file, for sendfile. The bytes are not checked: the reader
//! does that, since it has to anyway.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::disk::DiskFile;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::{BlockId, LayoutId};
use torchfs_rpc::AlignedBuf;

use super::format::{PAGE, Record, Refused, What};
use super::index::{Entry, Held, Key};
use super::{Shared, Store};
use crate::{Error, Result, metrics as names};

/// A record up to this length is read in one go, whatever part of it is wanted.
const SMALL: u64 = 80 << 10;

const ENDS_EARLY: &str = "the segment's file ends early";

/// A piece that is about to be read.
struct Wanted {
    block: BlockId,
    piece: u8,
    entry: Entry,
    file: Arc<Held>,
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
    /// Bytes that pieces and what belongs to them may take.
    pub total: u64,
    /// Bytes free for pieces, those included that emptying segments brings back.
    pub free: u64,
    /// Bytes that live pieces take.
    pub used: u64,
    /// Live pieces.
    pub pieces: u64,
    /// Places that could not be read when the store was opened.
    pub damaged: u64,
}

impl Store {
    /// Chunks `range` of a piece, counted within the piece and cut at its end; the bytes of a large piece stay in the file.
    pub fn get(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Found> {
        let wanted = self.wanted(block, piece)?;
        let mut head = AlignedBuf::with_len(wanted.head());
        let got = self.read(&wanted.file, &mut head, wanted.entry.offset())?;
        head.truncate(got);
        self.found(wanted, head.into_bytes(), range)
    }

    /// [`Store::get`] if that needs no wait for the disk, else `None`.
    pub fn get_now(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Option<Found>> {
        let wanted = self.wanted(block, piece)?;
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
        if !wanted.file.read_at_once(&mut head, offset).map_err(|e| self.shared.io("read a piece", e))? {
            return Ok(None);
        }
        self.found(wanted, head.into_bytes(), range).map(Some)
    }

    /// [`Store::get`] with all bytes in memory. A whole piece is read with its header in one go, the first time around
    /// the page cache: most are read once per epoch and cached by the node that asked.
    pub fn load(&self, block: BlockId, piece: u8, range: Range<u32>) -> Result<Found> {
        let wanted = self.wanted(block, piece)?;
        if range.start == 0 && range.end >= u32::from(wanted.entry.chunks) {
            return self.load_whole(wanted, range);
        }
        let mut found = self.get(block, piece, range)?;
        if let Body::File { file, offset, len } = found.body {
            let mut bytes = AlignedBuf::with_len(len as usize);
            let got = file.read_at(&mut bytes, offset).map_err(|e| self.shared.io("read a piece", e))?;
            if got < bytes.len() {
                return Err(self.shared.corrupt(block, piece, ENDS_EARLY.to_owned()));
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
        bytes.truncate(got.map_err(|e| self.shared.io("read a piece", e))?);
        let record = bytes.into_bytes();
        let record = record.slice(record.len().min((from - start) as usize)..);
        self.found(wanted, record, range)
    }

    fn wanted(&self, block: BlockId, piece: u8) -> Result<Wanted> {
        let (entry, file) = self.shared.find(block, piece)?;
        Ok(Wanted { block, piece, entry, file })
    }

    /// Makes the answer from the head of a record: its header alone or all of it.
    fn found(&self, wanted: Wanted, head: Bytes, range: Range<u32>) -> Result<Found> {
        let Wanted { block, piece, entry, file } = wanted;
        let span = entry.span();
        let header = self.header(block, piece, &entry, &file, head.get(..span.header))?;
        let end = (range.end as usize).min(header.chunks.len());
        let range = (range.start as usize).min(end)..end;
        let within = torchfs_codec::stored_range(&header.chunks, range.clone());
        let body = if head.len() > span.header {
            let from = (span.payload - entry.offset()) as usize;
            let here = from + within.start as usize..from + within.end as usize;
            if here.end > head.len() {
                return Err(self.shared.corrupt(block, piece, ENDS_EARLY.to_owned()));
            }
            Body::Memory(head.slice(here))
        } else {
            Body::File { file, offset: span.payload + within.start, len: within.end - within.start }
        };
        let first = header.first + range.start as u32;
        Ok(Found { layout: header.layout, first, chunks: header.chunks[range].to_vec(), body })
    }

    /// Reads a piece from disk and checks all of it; returns its stored bytes.
    pub fn verify(&self, block: BlockId, piece: u8) -> Result<u64> {
        let (entry, file) = self.shared.find(block, piece)?;
        let span = entry.span();
        let mut bytes = vec![0; (span.end - entry.offset()) as usize];
        let got = self.read(&file, &mut bytes, entry.offset())?;
        bytes.truncate(got);
        let header = self.header(block, piece, &entry, &file, bytes.get(..span.header))?;
        let payload = bytes.get((span.payload - entry.offset()) as usize..).unwrap_or_default();
        check_chunks(block, header.first, &header.chunks, payload)
            .map_err(|error| self.shared.corrupt(block, piece, error.to_string()))?;
        Ok(payload.len() as u64)
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
        let room = space.free.saturating_sub(config.keep_free);
        let total = config.capacity.map_or(have + room, |capacity| capacity.min(have + room));
        let reserve = config.reserve as u64 * index.segments.values().next().map_or(0, |s| s.header.size);
        Ok(Stat {
            total,
            free: total.saturating_sub(live + reserve),
            used: index.payload(),
            pieces: index.pieces() as u64,
            damaged: self.shared.damaged,
        })
    }

    fn read(&self, file: &Held, buf: &mut [u8], at: u64) -> Result<usize> {
        file.read_at(buf, at).map_err(|e| self.shared.io("read a piece", e))
    }

    /// The header of a piece's record, if it is the one that the index means.
    fn header(
        &self,
        block: BlockId,
        piece: u8,
        entry: &Entry,
        file: &Held,
        bytes: Option<&[u8]>,
    ) -> Result<super::format::PieceHeader> {
        let record = Record::decode(&file.place, entry.offset(), bytes.unwrap_or_default());
        match record {
            Ok(Record { what: What::Piece(header), .. })
                if header.key == Key::new(block, piece) && header.digest() == entry.digest =>
            {
                Ok(header)
            }
            Err(Refused::Newer(why)) => Err(self.shared.corrupt(block, piece, why)),
            _ => {
                let place = format!("its header at {} in segment {}", entry.offset(), entry.segment);
                Err(self.shared.corrupt(block, piece, format!("{place} cannot be read")))
            }
        }
    }
}

impl Shared {
    pub(super) fn find(&self, block: BlockId, piece: u8) -> Result<(Entry, Arc<Held>)> {
        let index = self.index.read();
        index
            .find(&Key::new(block, piece))
            .and_then(|entry| Some((*entry, index.segments.get(&entry.segment)?.file.clone())))
            .ok_or(Error::Gone { block, piece, server: self.config.server })
    }

    fn corrupt(&self, block: BlockId, piece: u8, why: String) -> Error {
        metrics::counter!(names::CORRUPT).increment(1);
        Error::Corrupt { block, piece, server: self.config.server, why }
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

/// Checks stored bytes against their chunks.
pub(crate) fn check_chunks(
    block: BlockId,
    first: u32,
    chunks: &[ChunkInfo],
    mut payload: &[u8],
) -> std::result::Result<(), torchfs_codec::Error> {
    for (index, chunk) in (first..).zip(chunks) {
        let (stored, rest) = payload.split_at(payload.len().min(chunk.stored as usize));
        torchfs_codec::verify_chunk(block, index, chunk, stored)?;
        payload = rest;
    }
    Ok(())
}
