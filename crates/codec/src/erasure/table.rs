//! The table of a coded block: the infos of all its chunks, which every parity piece carries as its first chunk.
//!
//! It tells where each chunk of a lost piece begins in its shard, and so what has to be fetched to bring a few chunks back: the
//! same bytes of `data` other shards. Without compression these are exactly as many chunks of each as are wanted; with it,
//! chunks of one piece lie beside two or three of another, and those come whole.

use std::ops::Range;

use bytes::Bytes;
use torchfs_proto::BlockId;
use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_CHUNKS};

use super::field::{self, LANE};
use super::{Code, Piece};
use crate::{Error, plausible, stored_range, verify_chunk};

/// The version of the bytes below.
const VERSION: u8 = 1;
/// Bytes before the infos: version, data pieces, chunks.
const HEAD_LEN: usize = 4;
/// Bytes of one info.
const INFO_LEN: usize = 13;

/// The infos of all chunks of a coded block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    code: Code,
    chunks: Vec<ChunkInfo>,
}

/// Stored chunks of one piece, one after the other and checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Which piece.
    pub piece: u8,
    /// The first chunk, counted within the piece.
    pub first: u32,
    /// Their stored bytes.
    pub payload: Bytes,
}

impl Table {
    pub(super) fn new(code: Code, chunks: Vec<ChunkInfo>) -> Table {
        Table { code, chunks }
    }

    /// Reads the first chunk of a parity piece, which must have been checked, and holds it against what is known of the block.
    pub fn decode(block: BlockId, code: Code, block_chunks: u32, bytes: &[u8]) -> Result<Table, Error> {
        let corrupt = |why| Error::Corrupt { block, index: code.first_index(code.data, block_chunks), why };
        let (head, infos) =
            bytes.split_first_chunk::<HEAD_LEN>().ok_or_else(|| corrupt("the table is short"))?;
        let [version, data, count @ ..] = *head;
        if version != VERSION {
            return Err(corrupt("the table is of a newer version"));
        }
        let count = usize::from(u16::from_be_bytes(count));
        let fits = data == code.data && count == block_chunks as usize && count <= MAX_CHUNKS;
        if !fits || infos.len() != count * INFO_LEN {
            return Err(corrupt("the table is of another block or code"));
        }
        let word = |i: &[u8], at: usize| i[at..at + 4].iter().fold(0, |n, b| n << 8 | u32::from(*b));
        let info = |i: &[u8]| ChunkInfo { codec: i[0], stored: word(i, 1), raw: word(i, 5), crc: word(i, 9) };
        let chunks: Vec<ChunkInfo> = infos.chunks_exact(INFO_LEN).map(info).collect();
        if !chunks.iter().all(plausible) {
            return Err(corrupt("the table makes no sense"));
        }
        Ok(Table { code, chunks })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_LEN + self.chunks.len() * INFO_LEN);
        out.extend_from_slice(&[VERSION, self.code.data]);
        out.extend_from_slice(&(self.chunks.len() as u16).to_be_bytes());
        for info in &self.chunks {
            out.push(info.codec);
            out.extend_from_slice(&info.stored.to_be_bytes());
            out.extend_from_slice(&info.raw.to_be_bytes());
            out.extend_from_slice(&info.crc.to_be_bytes());
        }
        out
    }

    /// The infos of a data piece.
    pub fn of_piece(&self, piece: u8) -> &[ChunkInfo] {
        let range = self.code.chunks_of(piece, self.chunks.len() as u32);
        &self.chunks[range.start as usize..range.end as usize]
    }

    /// The length of every shard: the longest data piece, in whole groups of the code.
    pub fn shard_len(&self) -> usize {
        let len = |piece| stored_range(self.of_piece(piece), 0..usize::MAX).end as usize;
        (0..self.code.data).map(len).max().unwrap_or(0).next_multiple_of(LANE)
    }

    /// The bytes of the shards that are needed to bring back these chunks (counted within the piece) of a data piece.
    pub fn span(&self, piece: u8, chunks: Range<u32>) -> Range<usize> {
        let range = stored_range(self.of_piece(piece), chunks.start as usize..chunks.end as usize);
        range.start as usize / LANE * LANE..(range.end as usize).next_multiple_of(LANE)
    }

    /// The chunks of a piece, counted within it, that hold its part of these bytes of the shards.
    pub fn needed(&self, piece: u8, span: &Range<usize>) -> Range<u32> {
        if piece >= self.code.data {
            let chunk = CHUNK as usize;
            return 1 + (span.start / chunk) as u32..1 + span.end.div_ceil(chunk) as u32;
        }
        let (mut at, mut needed) = (0, 0..0);
        for (index, info) in (0..).zip(self.of_piece(piece)) {
            let end = at + info.stored as usize;
            if end > span.start && at < span.end {
                if needed.is_empty() {
                    needed.start = index;
                }
                needed.end = index + 1;
            }
            at = end;
        }
        needed
    }

    /// Brings back chunks (counted within the piece) of a data piece from the parts of `data` other pieces that [`Self::needed`]
    /// names for their [`Self::span`]. Each is checked against its info.
    pub fn rebuild(
        &self,
        block: BlockId,
        have: &[Part],
        want: u8,
        chunks: Range<u32>,
    ) -> Result<Vec<(ChunkInfo, Bytes)>, Error> {
        let span = self.span(want, chunks.clone());
        let shard = self.shard(block, &span, have, want)?;
        let infos = self.of_piece(want);
        let range = chunks.start as usize..(chunks.end as usize).min(infos.len());
        let mut at = stored_range(infos, range.clone()).start as usize - span.start;
        let first = self.code.first_index(want, self.chunks.len() as u32) + chunks.start;
        let mut out = Vec::with_capacity(range.len());
        for (index, info) in (first..).zip(&infos[range]) {
            let stored = shard.slice(at..at + info.stored as usize);
            verify_chunk(block, index, info, &stored)?;
            at += info.stored as usize;
            out.push((*info, stored));
        }
        Ok(out)
    }

    /// These bytes of one shard, from those of `data` others.
    pub(super) fn shard(
        &self,
        block: BlockId,
        span: &Range<usize>,
        have: &[Part],
        want: u8,
    ) -> Result<Bytes, Error> {
        let corrupt = |why| Error::Corrupt { block, index: 0, why };
        let too_few = || corrupt("too few pieces are left");
        let have = have.get(..usize::from(self.code.data)).ok_or_else(too_few)?;
        let pieces: Vec<u8> = have.iter().map(|part| part.piece).collect();
        let rows = field::rows(self.code, &pieces, &[want]).ok_or_else(too_few)?;
        let mut shards = Vec::with_capacity(have.len());
        for part in have {
            shards.push(self.lanes(part, span).ok_or_else(|| corrupt("a part of a piece is too short"))?);
        }
        let shards: Vec<&[[u8; LANE]]> = shards.iter().map(Vec::as_slice).collect();
        let mut out = vec![[0; LANE]; span.len() / LANE];
        field::sum(&mut out, &rows[0], &shards);
        Ok(out.into_flattened().into())
    }

    /// The bytes of a shard in whole groups, with the zeros behind a data piece. `None` if the part does not hold them.
    fn lanes(&self, part: &Part, span: &Range<usize>) -> Option<Vec<[u8; LANE]>> {
        let mut out = vec![[0; LANE]; span.len() / LANE];
        let (from, len) = if part.piece >= self.code.data {
            (part.first.checked_sub(1)? as usize * CHUNK as usize, self.shard_len())
        } else {
            let infos = self.of_piece(part.piece);
            let from = stored_range(infos, part.first as usize..usize::MAX);
            (from.start as usize, from.end as usize)
        };
        let end = span.end.min(len);
        if span.start < end {
            let bytes = part.payload.get(span.start.checked_sub(from)?..end - from)?;
            out.as_flattened_mut()[..bytes.len()].copy_from_slice(bytes);
        }
        Some(out)
    }
}

/// The table of a block of which these pieces are left: a parity piece has it, else all data pieces are there.
pub(super) fn find(
    code: Code,
    block: BlockId,
    block_chunks: u32,
    have: &[(u8, Piece)],
) -> Result<Table, Error> {
    let corrupt = |why| Error::Corrupt { block, index: 0, why };
    if let Some((_, parity)) = have.iter().find(|(n, _)| *n >= code.data) {
        let len = parity.chunks.first().map_or(0, |info| info.stored as usize);
        let bytes = parity.payload.get(..len).ok_or_else(|| corrupt("a parity piece is short"))?;
        let table = Table::decode(block, code, block_chunks, bytes)?;
        let fits = have.iter().all(|(n, piece)| *n >= code.data || table.of_piece(*n) == piece.chunks);
        return if fits { Ok(table) } else { Err(corrupt("pieces and table do not fit")) };
    }
    let mut chunks = Vec::with_capacity(block_chunks as usize);
    for n in 0..code.data {
        let (_, piece) =
            have.iter().find(|(m, _)| *m == n).ok_or_else(|| corrupt("too few pieces are left"))?;
        chunks.extend_from_slice(&piece.chunks);
    }
    match chunks.len() == block_chunks as usize {
        true => Ok(Table::new(code, chunks)),
        false => Err(corrupt("its pieces have another number of chunks")),
    }
}
