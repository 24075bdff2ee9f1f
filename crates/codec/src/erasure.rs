//! Erasure coding: from the stored chunks of a block to pieces, any `data` of which bring all of it back.
//!
//! The data pieces are runs of the block's own stored chunks, so a healthy read of a few bytes touches one chunk of one
//! server and no arithmetic. What the code protects is a *shard* for each data piece: the piece's chunk table followed by its
//! stored bytes, padded with zeros to the longest. A lost piece comes back with its table and so with its checksums, and no
//! server needs to know about the others. Parity pieces are the parity shards cut into raw chunks.
//!
//! # Invariants
//! - Every data piece holds at least one chunk, since a block is coded only if it has a chunk for each of them.
//! - A rebuilt data piece is checked against its own table before anybody sees it.

use std::ops::Range;

use bytes::Bytes;
use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use torchfs_proto::BlockId;
use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_CHUNKS, codec};

use crate::{Encoded, Error, checksum, verify_chunk};

/// Blocks smaller than this are replicated instead.
pub const CODED_MIN: u32 = 256 << 10;

/// Bytes of one [`ChunkInfo`] in a shard.
const INFO_LEN: usize = 13;
/// Bytes before the infos: how many there are.
const HEAD_LEN: usize = 2;

/// How many data and parity pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
        block_len >= CODED_MIN && block_len.div_ceil(CHUNK) >= u32::from(self.data)
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

    /// Cuts a block into its data pieces and computes the parity pieces.
    pub fn split(self, block: BlockId, encoded: &Encoded) -> Result<Vec<Piece>, Error> {
        let mut pieces = self.data_pieces(encoded);
        let count = encoded.chunks.len() as u32;
        let shards: Vec<Vec<u8>> = self.shards(&pieces);
        let len = shards.first().map_or(0, Vec::len);
        let wrong = |e: reed_solomon_simd::Error| Error::Pack { block, why: e.to_string() };
        let mut encoder =
            ReedSolomonEncoder::new(self.data.into(), self.parity.into(), len).map_err(wrong)?;
        for shard in &shards {
            encoder.add_original_shard(shard).map_err(wrong)?;
        }
        let result = encoder.encode().map_err(wrong)?;
        for (n, shard) in (self.data..).zip(result.recovery_iter()) {
            pieces.push(parity_piece(block, self.first_index(n, count), shard));
        }
        Ok(pieces)
    }

    /// Brings back the pieces that are wanted from any `data` of the others, each given with its number.
    ///
    /// The pieces given must have been checked against their tables.
    pub fn rebuild(
        self,
        block: BlockId,
        block_chunks: u32,
        have: &[(u8, Piece)],
        want: &[u8],
    ) -> Result<Vec<Piece>, Error> {
        let corrupt = |why| Error::Corrupt { block, index: 0, why };
        if have.len() < usize::from(self.data) {
            return Err(corrupt("too few pieces are left"));
        }
        let have = &have[..usize::from(self.data)];
        // A parity piece tells the length of shards; without one no data piece is missing among those given.
        let len = match have.iter().find(|(n, _)| *n >= self.data) {
            Some((_, piece)) => piece.payload.len(),
            None => {
                let pieces: Vec<&Piece> = have.iter().map(|(_, p)| p).collect();
                shard_len(&pieces)
            }
        };
        let wrong = |e: reed_solomon_simd::Error| Error::Pack { block, why: e.to_string() };
        let mut originals: Vec<Option<Vec<u8>>> = vec![None; self.data.into()];
        let mut decoder =
            ReedSolomonDecoder::new(self.data.into(), self.parity.into(), len).map_err(wrong)?;
        for (n, piece) in have {
            if *n < self.data {
                let shard =
                    shard_of(piece, len).ok_or_else(|| corrupt("a piece is longer than its parity"))?;
                decoder.add_original_shard((*n).into(), &shard).map_err(wrong)?;
                originals[usize::from(*n)] = Some(shard);
            } else {
                if piece.payload.len() != len {
                    return Err(corrupt("its parity pieces have different lengths"));
                }
                decoder.add_recovery_shard((*n - self.data).into(), &piece.payload).map_err(wrong)?;
            }
        }
        let result = decoder.decode().map_err(wrong)?;
        for (n, shard) in result.restored_original_iter() {
            originals[n] = Some(shard.to_vec());
        }
        let originals: Vec<Vec<u8>> =
            originals.into_iter().collect::<Option<_>>().ok_or_else(|| corrupt("pieces are missing"))?;
        let mut parity = None;
        want.iter()
            .map(|n| {
                let first = self.first_index(*n, block_chunks);
                if *n < self.data {
                    return data_piece(block, first, &originals[usize::from(*n)]);
                }
                if parity.is_none() {
                    let mut encoder =
                        ReedSolomonEncoder::new(self.data.into(), self.parity.into(), len).map_err(wrong)?;
                    for shard in &originals {
                        encoder.add_original_shard(shard).map_err(wrong)?;
                    }
                    let result = encoder.encode().map_err(wrong)?;
                    parity = Some(result.recovery_iter().map(<[u8]>::to_vec).collect::<Vec<_>>());
                }
                let shard = parity.as_ref().and_then(|p| p.get(usize::from(*n - self.data)));
                shard.map(|s| parity_piece(block, first, s)).ok_or_else(|| corrupt("there is no such piece"))
            })
            .collect()
    }

    fn data_pieces(self, encoded: &Encoded) -> Vec<Piece> {
        let count = encoded.chunks.len() as u32;
        let all = gather(&encoded.payload);
        let mut at = 0;
        (0..self.data)
            .map(|n| {
                let range = self.chunks_of(n, count);
                let chunks = encoded.chunks[range.start as usize..range.end as usize].to_vec();
                let len: usize = chunks.iter().map(|c| c.stored as usize).sum();
                let payload = all.slice(at..at + len);
                at += len;
                Piece { chunks, payload }
            })
            .collect()
    }

    fn shards(self, pieces: &[Piece]) -> Vec<Vec<u8>> {
        let all: Vec<&Piece> = pieces.iter().collect();
        let len = shard_len(&all);
        pieces.iter().filter_map(|piece| shard_of(piece, len)).collect()
    }
}

/// The parts as one buffer; one part is not copied.
fn gather(parts: &[Bytes]) -> Bytes {
    match parts {
        [one] => one.clone(),
        many => many.concat().into(),
    }
}

/// The longest shard, even as the code wants it.
fn shard_len(pieces: &[&Piece]) -> usize {
    let len = |p: &&Piece| HEAD_LEN + p.chunks.len() * INFO_LEN + p.payload.len();
    pieces.iter().map(len).max().unwrap_or(0).next_multiple_of(2)
}

/// Table and bytes of a data piece, padded; `None` if they do not fit.
fn shard_of(piece: &Piece, len: usize) -> Option<Vec<u8>> {
    let mut shard = Vec::with_capacity(len);
    shard.extend_from_slice(&u16::try_from(piece.chunks.len()).ok()?.to_be_bytes());
    for info in &piece.chunks {
        shard.push(info.codec);
        shard.extend_from_slice(&info.stored.to_be_bytes());
        shard.extend_from_slice(&info.raw.to_be_bytes());
        shard.extend_from_slice(&info.crc.to_be_bytes());
    }
    shard.extend_from_slice(&piece.payload);
    if shard.len() > len {
        return None;
    }
    shard.resize(len, 0);
    Some(shard)
}

/// The inverse of [`shard_of`], checked.
fn data_piece(block: BlockId, first: u32, shard: &[u8]) -> Result<Piece, Error> {
    let corrupt = |index, why| Error::Corrupt { block, index, why };
    let short = || corrupt(first, "the rebuilt piece makes no sense");
    let count = usize::from(u16::from_be_bytes(shard.first_chunk().copied().ok_or_else(short)?));
    if count > MAX_CHUNKS {
        return Err(short());
    }
    let table = shard.get(HEAD_LEN..HEAD_LEN + count * INFO_LEN).ok_or_else(short)?;
    let word = |bytes: &[u8], at: usize| bytes[at..at + 4].iter().fold(0, |n, b| n << 8 | u32::from(*b));
    let chunks: Vec<ChunkInfo> = table
        .chunks_exact(INFO_LEN)
        .map(|i| ChunkInfo { codec: i[0], stored: word(i, 1), raw: word(i, 5), crc: word(i, 9) })
        .collect();
    let mut at = HEAD_LEN + count * INFO_LEN;
    let begin = at;
    for (index, info) in (first..).zip(&chunks) {
        let end = at + info.stored as usize;
        verify_chunk(block, index, info, shard.get(at..end).ok_or_else(short)?)?;
        at = end;
    }
    Ok(Piece { chunks, payload: Bytes::copy_from_slice(&shard[begin..at]) })
}

/// A parity shard cut into raw chunks.
fn parity_piece(block: BlockId, first: u32, shard: &[u8]) -> Piece {
    let chunks = (first..)
        .zip(shard.chunks(CHUNK as usize))
        .map(|(index, part)| {
            let len = part.len() as u32;
            ChunkInfo { codec: codec::RAW, stored: len, raw: len, crc: checksum(block, index, [part]) }
        })
        .collect();
    Piece { chunks, payload: Bytes::copy_from_slice(shard) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compression, encode};

    const BLOCK: BlockId = BlockId { incarnation: 1, counter: 7 };

    /// Half text, half noise, so that chunks have different lengths.
    fn content(len: usize) -> Bytes {
        let mut state = 88_172_645_463_325_252_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..len).map(|i| if (i >> 16) % 2 == 0 { b'a' + (i % 7) as u8 } else { next() as u8 }).collect()
    }

    fn every_loss(code: Code, len: usize) {
        let encoded = encode(BLOCK, &[content(len)], Compression::Lz4).unwrap();
        let count = encoded.chunks.len() as u32;
        let pieces = code.split(BLOCK, &encoded).unwrap();
        let width = code.data + code.parity;
        assert_eq!(pieces.len(), usize::from(width));
        for lost in 0..1_u32 << width {
            if lost.count_ones() != u32::from(code.parity) {
                continue;
            }
            let (gone, left): (Vec<u8>, Vec<u8>) = (0..width).partition(|n| lost >> n & 1 == 1);
            let have: Vec<(u8, Piece)> = left.iter().map(|n| (*n, pieces[usize::from(*n)].clone())).collect();
            let back = code.rebuild(BLOCK, count, &have, &gone).unwrap();
            for (n, piece) in gone.iter().zip(back) {
                assert_eq!(piece, pieces[usize::from(*n)], "piece {n} of {code:?}, lost {lost:b}");
            }
        }
    }

    #[test]
    fn any_tolerated_loss_brings_the_same_pieces_back() {
        every_loss(Code { data: 4, parity: 2 }, 4 << 20);
        every_loss(Code { data: 4, parity: 2 }, (1 << 20) + 12_345);
        every_loss(Code { data: 2, parity: 1 }, 256 << 10);
        every_loss(Code { data: 6, parity: 3 }, (6 << 16) + 1);
        every_loss(Code { data: 5, parity: 2 }, 1 << 20);
    }

    #[test]
    fn each_chunk_is_in_exactly_one_data_piece() {
        for data in 1..=16 {
            let code = Code { data, parity: 2 };
            for count in u32::from(data)..=256 {
                let mut next = 0;
                for piece in 0..data {
                    let range = code.chunks_of(piece, count);
                    assert!(range.start == next && !range.is_empty());
                    assert!(range.clone().all(|chunk| code.piece_of(chunk, count) == piece));
                    next = range.end;
                }
                assert_eq!(next, count);
            }
        }
    }

    #[test]
    fn a_damaged_piece_does_not_rebuild_into_wrong_bytes() {
        let code = Code { data: 4, parity: 2 };
        let encoded = encode(BLOCK, &[content(1 << 20)], Compression::None).unwrap();
        let pieces = code.split(BLOCK, &encoded).unwrap();
        let mut have: Vec<(u8, Piece)> =
            [1, 2, 3, 4].map(|n: u8| (n, pieces[usize::from(n)].clone())).to_vec();
        let mut bytes = have[3].1.payload.to_vec();
        bytes[100] ^= 1;
        have[3].1.payload = bytes.into();
        assert!(code.rebuild(BLOCK, encoded.chunks.len() as u32, &have, &[0]).is_err());
        assert!(code.rebuild(BLOCK, encoded.chunks.len() as u32, &have[..3], &[0]).is_err());
    }
}
