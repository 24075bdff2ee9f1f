//! Erasure coding: from the stored chunks of a block to pieces, any `data` of which bring all of it back.
//!
//! The data pieces are runs of the block's own stored chunks, so a healthy read of a few bytes touches one chunk of one
//! server and no arithmetic. What the code protects is a *shard* for each data piece: its stored bytes, with zeros up to the
//! longest. A parity piece has the [`Table`] of the whole block as its first chunk and then its parity shard, cut into raw
//! chunks. The first chunk tells whoever misses a data piece which bytes of the other shards bring a few of its chunks back,
//! and how to check them; a lost piece comes back with its infos, and no server needs to know about the others.
//!
//! # Invariants
//! - Every data piece holds at least one chunk, since a block is coded only if it has a chunk for each of them.
//! - A rebuilt data chunk is checked against the writer's checksum before anybody sees it.
//! - The bytes of all pieces follow from the block's stored chunks alone and never change: `tests/pieces.rs` has them written down.

mod field;
mod table;

use std::ops::Range;

use bytes::Bytes;
use reed_solomon_simd::ReedSolomonEncoder;
use torchfs_proto::BlockId;
use torchfs_proto::chunk::{CHUNK, ChunkInfo, codec};

use crate::{Encoded, Error, checksum};
pub use table::{Part, Table};

/// Blocks smaller than this are replicated instead.
pub const CODED_MIN: u32 = 256 << 10;

/// Parity is computed in strips of so many bytes of each shard, which fit the processor's caches.
const STRIP: usize = 32 << 10;

/// How many data and parity pieces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Code {
    /// Pieces that hold the bytes.
    pub data: u8,
    /// Pieces that may be lost.
    pub parity: u8,
}

/// One part of a block, as one server stores it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// One info per chunk of the piece.
    pub chunks: Vec<ChunkInfo>,
    /// The stored bytes of its chunks.
    pub payload: Bytes,
}

impl Code {
    /// Whether a block of this length is coded; else it is replicated `parity + 1` times.
    pub fn applies(self, block_len: u32) -> bool {
        self.data > 1
            && self.parity > 0
            && block_len >= CODED_MIN
            && block_len.div_ceil(CHUNK) >= u32::from(self.data)
    }

    /// How many pieces there are.
    pub fn width(self) -> usize {
        usize::from(self.data) + usize::from(self.parity)
    }

    /// The block's chunks that a data piece holds.
    pub fn chunks_of(self, piece: u8, block_chunks: u32) -> Range<u32> {
        let at = |piece: u32| piece * block_chunks / u32::from(self.data);
        at(u32::from(piece))..at(u32::from(piece) + 1)
    }

    /// The data piece that holds a chunk of the block.
    pub fn piece_of(self, chunk: u32, block_chunks: u32) -> u8 {
        let guess = (chunk * u32::from(self.data) / block_chunks.max(1)) as u8;
        (guess..self.data).find(|p| self.chunks_of(*p, block_chunks).contains(&chunk)).unwrap_or(guess)
    }

    /// The number under which the first chunk of a piece is checksummed; the others follow.
    ///
    /// Chunks of data pieces keep their index in the block, so a reader checks them alike wherever they came from.
    pub fn first_index(self, piece: u8, block_chunks: u32) -> u32 {
        if piece < self.data { self.chunks_of(piece, block_chunks).start } else { u32::from(piece) << 16 }
    }

    /// Cuts a block into its data pieces, without copying them, and computes the parity pieces.
    pub fn split(self, block: BlockId, encoded: &Encoded) -> Result<Vec<Encoded>, Error> {
        let count = encoded.chunks.len() as u32;
        let mut pieces = self.data_pieces(encoded);
        let table = Table::new(self, encoded.chunks.clone());
        let shards = self.parity_shards(block, &pieces, table.shard_len())?;
        let head = Bytes::from(table.encode());
        for (n, shard) in (self.data..).zip(shards) {
            let chunks = parity_chunks(block, self.first_index(n, count), &head, &shard);
            pieces.push(Encoded { chunks, payload: vec![head.clone(), shard.into()] });
        }
        Ok(pieces)
    }

    /// Brings back the pieces that are wanted from any `data` of the others, each given with its number.
    ///
    /// The pieces given must have been checked against their infos.
    pub fn rebuild(
        self,
        block: BlockId,
        block_chunks: u32,
        have: &[(u8, Piece)],
        want: &[u8],
    ) -> Result<Vec<Piece>, Error> {
        let table = table::find(self, block, block_chunks, have)?;
        let span = 0..table.shard_len();
        let parts: Vec<Part> = have
            .iter()
            .map(|(piece, whole)| {
                let skip = match whole.chunks.first() {
                    Some(head) if *piece >= self.data => (head.stored as usize).min(whole.payload.len()),
                    _ => 0,
                };
                let first = u32::from(*piece >= self.data);
                Part { piece: *piece, first, payload: whole.payload.slice(skip..) }
            })
            .collect();
        let head = Bytes::from(table.encode());
        want.iter()
            .map(|n| {
                if *n >= self.data {
                    let shard = table.shard(block, &span, &parts, *n)?;
                    let chunks = parity_chunks(block, self.first_index(*n, block_chunks), &head, &shard);
                    return Ok(Piece { chunks, payload: [&head[..], &shard[..]].concat().into() });
                }
                let chunks = table.of_piece(*n).to_vec();
                let rebuilt = table.rebuild(block, &parts, *n, 0..chunks.len() as u32)?;
                let parts: Vec<Bytes> = rebuilt.into_iter().map(|(_, stored)| stored).collect();
                Ok(Piece { chunks, payload: parts.concat().into() })
            })
            .collect()
    }

    fn data_pieces(self, encoded: &Encoded) -> Vec<Encoded> {
        let count = encoded.chunks.len() as u32;
        let mut parts = encoded.payload.iter().cloned();
        let mut rest = Bytes::new();
        let mut cut = |mut len: usize| {
            let mut payload = Vec::new();
            while len > 0 {
                if rest.is_empty() {
                    match parts.next() {
                        Some(part) => rest = part,
                        None => break,
                    }
                    continue;
                }
                let part = rest.split_to(len.min(rest.len()));
                len -= part.len();
                payload.push(part);
            }
            payload
        };
        (0..self.data)
            .map(|n| {
                let range = self.chunks_of(n, count);
                let chunks = encoded.chunks[range.start as usize..range.end as usize].to_vec();
                let len = chunks.iter().map(|c| c.stored as usize).sum();
                Encoded { chunks, payload: cut(len) }
            })
            .collect()
    }

    /// The parity shards of these data pieces, strip by strip.
    fn parity_shards(self, block: BlockId, pieces: &[Encoded], len: usize) -> Result<Vec<Vec<u8>>, Error> {
        let wrong = |e: reed_solomon_simd::Error| Error::Pack { block, why: e.to_string() };
        let (data, parity) = (self.data.into(), self.parity.into());
        let mut encoder = ReedSolomonEncoder::new(data, parity, len.min(STRIP)).map_err(wrong)?;
        let mut readers: Vec<Reader> = pieces.iter().map(|piece| Reader::new(&piece.payload)).collect();
        let mut shards = vec![Vec::with_capacity(len); parity];
        let mut scratch = Vec::new();
        let mut at = 0;
        while at < len {
            let strip = STRIP.min(len - at);
            if strip < STRIP && at > 0 {
                encoder.reset(data, parity, strip).map_err(wrong)?;
            }
            for reader in &mut readers {
                encoder.add_original_shard(reader.next(strip, &mut scratch)).map_err(wrong)?;
            }
            let result = encoder.encode().map_err(wrong)?;
            for (shard, part) in shards.iter_mut().zip(result.recovery_iter()) {
                shard.extend_from_slice(part);
            }
            at += strip;
        }
        Ok(shards)
    }
}

/// Reads the parts of a piece in strips, and zeros after them.
struct Reader<'a> {
    parts: std::slice::Iter<'a, Bytes>,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(parts: &'a [Bytes]) -> Reader<'a> {
        Reader { parts: parts.iter(), rest: &[] }
    }

    /// The next bytes; copied only where they do not lie in one part.
    fn next<'b>(&mut self, len: usize, scratch: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        if self.rest.is_empty() {
            self.rest = self.parts.next().map_or(&[], |part| part);
        }
        if let Some((strip, rest)) = self.rest.split_at_checked(len) {
            self.rest = rest;
            return strip;
        }
        scratch.clear();
        while scratch.len() < len {
            if self.rest.is_empty() {
                match self.parts.next() {
                    Some(part) => self.rest = part,
                    None => break,
                }
            }
            let (some, rest) = self.rest.split_at(self.rest.len().min(len - scratch.len()));
            scratch.extend_from_slice(some);
            self.rest = rest;
        }
        scratch.resize(len, 0);
        scratch
    }
}

/// The infos of a parity piece: the table, then the shard in raw chunks.
fn parity_chunks(block: BlockId, first: u32, head: &[u8], shard: &[u8]) -> Vec<ChunkInfo> {
    let parts = std::iter::once(head).chain(shard.chunks(CHUNK as usize));
    let info = |(index, part): (u32, &[u8])| {
        let len = part.len() as u32;
        ChunkInfo { codec: codec::RAW, stored: len, raw: len, crc: checksum(block, index, [part]) }
    };
    (first..).zip(parts).map(info).collect()
}
