//! The bytes of a segment: its header, the records in it, and how to recognise both.
//!
//! A segment file starts with two header slots of 4 KiB, written in turn, so that a torn write leaves the other one. Then
//! come batches. A batch starts on a fresh page of 4 KiB, so that writing it cannot tear what an earlier one made
//! durable, and is a row of records at multiples of 64 bytes. A record is a header of 128 bytes, a table, and for a piece its
//! payload, which starts on a page of its own if it has 64 KiB or more. All numbers are little-endian; docs/disk.md has
//! the tables.
//!
//! # Invariants
//! - A record is accepted only where it was written: its header names cluster, segment, generation and offset. So neither
//!   leftovers of an earlier use of the segment nor copies of records inside users' files are ever taken for records.
//! - Within a segment, batch numbers never fall from one record to the next; what falls is a leftover of a torn batch.

use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_CHUNKS};
use torchfs_proto::{BlockId, ClusterId, LayoutId};

use super::index::Key;

/// Batches, large payloads and header slots start at multiples of this.
pub const PAGE: u64 = 4096;

/// Records start at multiples of this.
pub const GRAIN: u64 = 64;

/// Where the first batch starts.
pub const DATA: u64 = 2 * PAGE;

/// A payload of this length or more starts on a page of its own, so that it can be read around the page cache.
pub const ALIGNED: u32 = 64 << 10;

/// Bytes of a record's header before its table.
pub const FIXED: usize = 128;

/// Bytes per chunk in a piece's table.
const CHUNK_ENTRY: usize = 16;

/// Bytes per piece in a tombstone's table.
pub const TOMB_ENTRY: usize = 24;

/// The most pieces one tombstone record buries.
pub const MAX_TOMBS: usize = 1024;

/// The longest header of any record.
pub const MAX_HEADER: usize = FIXED + MAX_TOMBS * TOMB_ENTRY;

const SEGMENT_MAGIC: &[u8; 8] = b"TFSsegmt";
const RECORD_MAGIC: &[u8; 8] = b"TFSpiece";
const VERSION: u16 = 1;
/// Features a reader must know to read on; none yet.
const MUST_KNOW: u32 = 0;
const SEGMENT_BYTES: usize = 512;

const KIND_PIECE: u8 = 1;
const KIND_TOMBS: u8 = 2;
const FLAG_LAST: u8 = 1;

/// What a segment is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Nothing in it counts.
    Free,
    /// Records may follow anywhere.
    Open,
    /// Records end at the given offset; nothing is appended any more.
    Sealed(u64),
}

/// The header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// Whose data this is.
    pub cluster: ClusterId,
    /// The number in the file's name.
    pub number: u32,
    /// Rises with every reuse, over all segments of the store; records of another one do not count.
    pub generation: u64,
    /// Rises with every write of the header; the higher of the two slots counts.
    pub revision: u64,
    /// The file's length.
    pub size: u64,
    /// What the segment is used for.
    pub state: Use,
}

/// Why a header was not accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refused {
    /// No header, a torn one, or one of another place.
    Garbage,
    /// A header of a version or with features unknown here.
    Newer(String),
}

impl SegmentHeader {
    /// One slot.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(PAGE as usize);
        let (state, end) = match self.state {
            Use::Free => (0u8, 0),
            Use::Open => (1, 0),
            Use::Sealed(end) => (2, end),
        };
        out.extend_from_slice(SEGMENT_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[state, 0]);
        out.extend_from_slice(&MUST_KNOW.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.cluster.0.to_le_bytes());
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&self.revision.to_le_bytes());
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&end.to_le_bytes());
        out.resize(SEGMENT_BYTES - 4, 0);
        out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
        out.resize(PAGE as usize, 0);
        out
    }

    /// The inverse, for one slot.
    pub fn decode(slot: &[u8]) -> Result<SegmentHeader, Refused> {
        let mut at = Cursor(slot.get(..SEGMENT_BYTES).ok_or(Refused::Garbage)?);
        if at.bytes() != *SEGMENT_MAGIC {
            return Err(Refused::Garbage);
        }
        let crc = crc32c::crc32c(&slot[..SEGMENT_BYTES - 4]);
        if slot[SEGMENT_BYTES - 4..SEGMENT_BYTES] != crc.to_le_bytes() {
            return Err(Refused::Garbage);
        }
        let version = at.u16();
        let [state, _] = at.bytes();
        check_version(version, at.u32())?;
        let _may_know = at.u32();
        let number = at.u32();
        let cluster = ClusterId(at.u64());
        let generation = at.u64();
        let revision = at.u64();
        let size = at.u64();
        let end = at.u64();
        let state = match state {
            0 => Use::Free,
            1 => Use::Open,
            2 => Use::Sealed(end),
            _ => return Err(Refused::Garbage),
        };
        Ok(SegmentHeader { cluster, number, generation, revision, size, state })
    }
}

/// Where a record lies; part of its header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Whose data this is.
    pub cluster: ClusterId,
    /// The segment's number.
    pub segment: u32,
    /// The segment's generation.
    pub generation: u64,
}

/// A record's header with its table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Where in the segment it starts.
    pub offset: u64,
    /// The batch it was written with; one sync covers a batch.
    pub batch: u64,
    /// Nothing follows in this batch.
    pub last: bool,
    /// What it says.
    pub what: What,
}

/// What a record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// A piece of a block.
    Piece(PieceHeader),
    /// Pieces that are dead: every record of the piece with a lower sequence number does not count.
    Tombs(Vec<Tomb>),
}

/// A piece of a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PieceHeader {
    /// Its name.
    pub key: Key,
    /// Its place in the order of puts and deletes; a rewritten piece keeps it.
    pub seq: u64,
    /// The block's layout.
    pub layout: LayoutId,
    /// The index in the block of its first chunk.
    pub first: u32,
    /// Its chunks.
    pub chunks: Vec<ChunkInfo>,
}

/// One dead piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tomb {
    /// Its name.
    pub key: Key,
    /// The death's place in the order of puts and deletes.
    pub seq: u64,
}

impl PieceHeader {
    /// Bytes of the payload.
    pub fn payload(&self) -> u32 {
        self.chunks.iter().map(|c| c.stored).sum()
    }

    /// A fingerprint of the content: equal chunks have equal checksums.
    pub fn digest(&self) -> u32 {
        let mut table = Vec::with_capacity(8 + self.chunks.len() * CHUNK_ENTRY);
        table.extend_from_slice(&self.layout.0.to_le_bytes());
        table.extend_from_slice(&self.first.to_le_bytes());
        self.chunks.iter().for_each(|chunk| put_chunk(&mut table, chunk));
        crc32c::crc32c(&table)
    }
}

impl What {
    fn header_len(&self) -> usize {
        match self {
            What::Piece(piece) => FIXED + piece.chunks.len() * CHUNK_ENTRY,
            What::Tombs(tombs) => FIXED + tombs.len() * TOMB_ENTRY,
        }
    }

    /// The extent of the record if it starts at this offset.
    pub fn span(&self, offset: u64) -> Span {
        match self {
            What::Piece(piece) => piece_span(offset, piece.chunks.len(), piece.payload()),
            What::Tombs(_) => {
                let end = offset + self.header_len() as u64;
                Span { header: self.header_len(), payload: end, end }
            }
        }
    }
}

/// The extent of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Bytes of the header with its table.
    pub header: usize,
    /// Where the payload starts.
    pub payload: u64,
    /// Where the record ends.
    pub end: u64,
}

/// The extent of a piece with so many chunks and payload bytes.
pub fn piece_span(offset: u64, chunks: usize, payload: u32) -> Span {
    let header = FIXED + chunks * CHUNK_ENTRY;
    let after = offset + header as u64;
    let start = if payload >= ALIGNED { after.next_multiple_of(PAGE) } else { after };
    Span { header, payload: start, end: start + u64::from(payload) }
}

impl Record {
    /// Where the record after this one starts, if there is one.
    pub fn next(&self) -> u64 {
        let end = self.what.span(self.offset).end;
        end.next_multiple_of(if self.last { PAGE } else { GRAIN })
    }

    /// The header with its table.
    pub fn encode(&self, place: &Place) -> Vec<u8> {
        let span = self.what.span(self.offset);
        let mut out = Vec::with_capacity(span.header);
        let (kind, key, seq, layout, first, count) = match &self.what {
            What::Piece(p) => (KIND_PIECE, p.key, p.seq, p.layout, p.first, p.chunks.len()),
            What::Tombs(t) => (KIND_TOMBS, Key::default(), 0, LayoutId(0), 0, t.len()),
        };
        let block = key.block();
        out.extend_from_slice(RECORD_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[kind, if self.last { FLAG_LAST } else { 0 }]);
        out.extend_from_slice(&MUST_KNOW.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&(span.header as u32).to_le_bytes());
        out.extend_from_slice(&place.cluster.0.to_le_bytes());
        out.extend_from_slice(&place.generation.to_le_bytes());
        out.extend_from_slice(&place.segment.to_le_bytes());
        out.extend_from_slice(&[key.piece(), 0, 0, 0]);
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.batch.to_le_bytes());
        out.extend_from_slice(&seq.to_le_bytes());
        out.extend_from_slice(&block.incarnation.to_le_bytes());
        out.extend_from_slice(&layout.0.to_le_bytes());
        out.extend_from_slice(&block.counter.to_le_bytes());
        out.extend_from_slice(&((span.payload - self.offset) as u32).to_le_bytes());
        out.extend_from_slice(&((span.end - span.payload) as u32).to_le_bytes());
        out.extend_from_slice(&first.to_le_bytes());
        out.extend_from_slice(&(count as u32).to_le_bytes());
        // Room for a key id (4) and a nonce (12): all zero is not encrypted.
        out.extend_from_slice(&[0; 16]);
        out.resize(FIXED, 0);
        match &self.what {
            What::Piece(piece) => piece.chunks.iter().for_each(|chunk| put_chunk(&mut out, chunk)),
            What::Tombs(tombs) => {
                for tomb in tombs {
                    let block = tomb.key.block();
                    out.extend_from_slice(&block.incarnation.to_le_bytes());
                    out.extend_from_slice(&[tomb.key.piece(), 0, 0, 0]);
                    out.extend_from_slice(&block.counter.to_le_bytes());
                    out.extend_from_slice(&tomb.seq.to_le_bytes());
                }
            }
        }
        let crc = crc32c::crc32c(&out);
        out[CRC_AT..FIXED].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// How many bytes the header at the start of these has, as far as the first 128 tell; `None` if this is no header of
    /// the place.
    pub fn peek(place: &Place, offset: u64, fixed: &[u8]) -> Result<usize, Refused> {
        let mut at = Cursor(fixed.get(..FIXED).ok_or(Refused::Garbage)?);
        if at.bytes() != *RECORD_MAGIC {
            return Err(Refused::Garbage);
        }
        let _version_kind_flags_and_features: [u8; 12] = at.bytes();
        let header = at.u32() as usize;
        let here = (at.u64(), at.u64(), at.u32()) == (place.cluster.0, place.generation, place.segment);
        let _piece = at.u32();
        if !here || at.u64() != offset || !(FIXED..=MAX_HEADER).contains(&header) {
            return Err(Refused::Garbage);
        }
        Ok(header)
    }

    /// The inverse of [`Record::encode`], for a header that [`Record::peek`] measured.
    pub fn decode(place: &Place, offset: u64, header: &[u8]) -> Result<Record, Refused> {
        if Record::peek(place, offset, header)? != header.len() {
            return Err(Refused::Garbage);
        }
        let (fixed, mut table) = header.split_at(FIXED);
        let mut crc = crc32c::crc32c(&fixed[..CRC_AT]);
        crc = crc32c::crc32c_append(crc, &[0; 4]);
        if fixed[CRC_AT..] != crc32c::crc32c_append(crc, table).to_le_bytes() {
            return Err(Refused::Garbage);
        }
        let mut at = Cursor(&fixed[8..]);
        let version = at.u16();
        let [kind, flags] = at.bytes();
        check_version(version, at.u32())?;
        let _may_know_header_and_place: [u8; 28] = at.bytes();
        let [piece, ..] = at.bytes::<4>();
        let _offset = at.u64();
        let batch = at.u64();
        let seq = at.u64();
        let incarnation = at.u32();
        let layout = LayoutId(at.u32());
        let counter = at.u64();
        let payload_at = at.u32();
        let payload = at.u32();
        let first = at.u32();
        let count = at.u32() as usize;
        let key_id_and_nonce: [u8; 16] = at.bytes();
        let what = match kind {
            KIND_PIECE if count <= MAX_CHUNKS && table.len() == count * CHUNK_ENTRY => {
                if key_id_and_nonce != [0; 16] {
                    return Err(Refused::Newer("its pieces are encrypted".to_owned()));
                }
                let chunks: Vec<ChunkInfo> = (0..count).map(|_| take_chunk(&mut table)).collect();
                if chunks.iter().any(|chunk| chunk.stored > CHUNK) {
                    return Err(Refused::Garbage);
                }
                let key = Key::new(BlockId { incarnation, counter }, piece);
                What::Piece(PieceHeader { key, seq, layout, first, chunks })
            }
            KIND_TOMBS if count <= MAX_TOMBS && table.len() == count * TOMB_ENTRY => {
                let mut at = Cursor(table);
                let tombs = (0..count).map(|_| {
                    let incarnation = at.u32();
                    let [piece, ..] = at.bytes::<4>();
                    let key = Key::new(BlockId { incarnation, counter: at.u64() }, piece);
                    Tomb { key, seq: at.u64() }
                });
                What::Tombs(tombs.collect())
            }
            _ => return Err(Refused::Garbage),
        };
        let record = Record { offset, batch, last: flags & FLAG_LAST != 0, what };
        let span = record.what.span(offset);
        if (span.payload - offset, span.end - span.payload) != (u64::from(payload_at), u64::from(payload)) {
            return Err(Refused::Garbage);
        }
        Ok(record)
    }
}

/// Where the header's checksum is, over all of the header and the table with itself as zero.
const CRC_AT: usize = FIXED - 4;

fn check_version(version: u16, must_know: u32) -> Result<(), Refused> {
    if version != VERSION {
        return Err(Refused::Newer(format!("it has format {version}, this program knows {VERSION}")));
    }
    if must_know & !MUST_KNOW != 0 {
        return Err(Refused::Newer(format!("it needs features {must_know:#x}, unknown to this program")));
    }
    Ok(())
}

fn put_chunk(out: &mut Vec<u8>, chunk: &ChunkInfo) {
    out.extend_from_slice(&[chunk.codec, 0, 0, 0]);
    out.extend_from_slice(&chunk.stored.to_le_bytes());
    out.extend_from_slice(&chunk.raw.to_le_bytes());
    out.extend_from_slice(&chunk.crc.to_le_bytes());
}

fn take_chunk(table: &mut &[u8]) -> ChunkInfo {
    let mut at = Cursor(table);
    let [codec, ..] = at.bytes::<4>();
    let chunk = ChunkInfo { codec, stored: at.u32(), raw: at.u32(), crc: at.u32() };
    *table = at.0;
    chunk
}

/// Takes numbers from the front of bytes whose length was checked; what is not there reads as zeros.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((head, rest)) => {
                self.0 = rest;
                *head
            }
            None => [0; N],
        }
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const PLACE: Place = Place { cluster: ClusterId(9), segment: 3, generation: 17 };

    fn piece() -> Record {
        let chunk = ChunkInfo { codec: 1, stored: 40_000, raw: 65_536, crc: 5 };
        let key = Key::new(BlockId { incarnation: 2, counter: u64::MAX - 3 }, 250);
        let what = PieceHeader { key, seq: 8, layout: LayoutId(4), first: 12, chunks: vec![chunk; 3] };
        Record { offset: 8192, batch: 77, last: true, what: What::Piece(what) }
    }

    #[test]
    fn records_come_back_as_they_were_written() {
        let tombs = (0..5).map(|n| Tomb { key: Key::new(BlockId { incarnation: n, counter: 6 }, 1), seq: 9 });
        let tombs = Record { offset: 64, batch: 1, last: false, what: What::Tombs(tombs.collect()) };
        for record in [piece(), tombs] {
            let bytes = record.encode(&PLACE);
            assert_eq!(Record::peek(&PLACE, record.offset, &bytes[..FIXED]).unwrap(), bytes.len());
            assert_eq!(Record::decode(&PLACE, record.offset, &bytes).unwrap(), record);
        }
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_found() {
        let bytes = piece().encode(&PLACE);
        for bit in 0..bytes.len() * 8 {
            let mut broken = bytes.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode(&PLACE, 8192, &broken).is_err(), "bit {bit}");
        }
        let header = header();
        let slot = header.encode();
        for bit in 0..SEGMENT_BYTES * 8 {
            let mut broken = slot.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&broken), Err(Refused::Garbage), "bit {bit}");
        }
    }

    #[test]
    fn a_record_counts_only_where_it_was_written() {
        let bytes = piece().encode(&PLACE);
        assert!(Record::decode(&PLACE, 8256, &bytes).is_err());
        for place in [
            Place { cluster: ClusterId(8), ..PLACE },
            Place { segment: 4, ..PLACE },
            Place { generation: 18, ..PLACE },
        ] {
            assert!(Record::decode(&place, 8192, &bytes).is_err());
        }
    }

    fn header() -> SegmentHeader {
        let state = Use::Sealed(12_288);
        SegmentHeader { cluster: ClusterId(9), number: 3, generation: 17, revision: 2, size: 1 << 28, state }
    }

    #[test]
    fn segment_headers_come_back_and_newer_ones_are_refused_by_name() {
        for state in [Use::Free, Use::Open, Use::Sealed(12_288)] {
            let header = SegmentHeader { state, ..header() };
            assert_eq!(SegmentHeader::decode(&header.encode()).unwrap(), header);
        }
        let mut newer = header().encode();
        newer[8] = 2;
        let crc = crc32c::crc32c(&newer[..SEGMENT_BYTES - 4]);
        newer[SEGMENT_BYTES - 4..SEGMENT_BYTES].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(SegmentHeader::decode(&newer), Err(Refused::Newer(_))));
    }

    #[test]
    fn any_bytes_give_a_record_or_a_refusal() {
        let place = Place { cluster: ClusterId(9), segment: 3, generation: 4 };
        let chunk = ChunkInfo { codec: 0, stored: 1000, raw: 1000, crc: 77 };
        let key = Key::new(BlockId { incarnation: 1, counter: 2 }, 1);
        let piece =
            What::Piece(PieceHeader { key, seq: 8, layout: LayoutId(1), first: 0, chunks: vec![chunk; 5] });
        let tombs = What::Tombs(vec![Tomb { key, seq: 9 }; 3]);
        let samples: Vec<Vec<u8>> = [piece, tombs]
            .into_iter()
            .map(|what| Record { offset: 8192, batch: 5, last: true, what }.encode(&place))
            .collect();
        torchfs_fuzz::Fuzz::rounds(200_000).run(&samples, |bytes| {
            let mut bytes = bytes.to_vec();
            if bytes.len() >= FIXED {
                bytes[CRC_AT..FIXED].fill(0);
                let crc = crc32c::crc32c(&bytes);
                bytes[CRC_AT..FIXED].copy_from_slice(&crc.to_le_bytes());
            }
            Record::decode(&place, 8192, &bytes).is_ok()
        });
    }

    #[test]
    fn any_bytes_give_a_segment_header_or_a_refusal() {
        let header = SegmentHeader {
            cluster: ClusterId(9),
            number: 3,
            generation: 4,
            revision: 5,
            size: 1 << 20,
            state: Use::Sealed(70_000),
        };
        torchfs_fuzz::Fuzz::rounds(50_000).run(&[header.encode()], |bytes| {
            let mut bytes = bytes.to_vec();
            if bytes.len() >= SEGMENT_BYTES {
                let crc = crc32c::crc32c(&bytes[..SEGMENT_BYTES - 4]);
                bytes[SEGMENT_BYTES - 4..SEGMENT_BYTES].copy_from_slice(&crc.to_le_bytes());
            }
            SegmentHeader::decode(&bytes).is_ok()
        });
    }
}
