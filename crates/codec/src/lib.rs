//! The bytes of a block: how they are cut into chunks, packed, checksummed, and unpacked again; pure.
//!
//! A block is a row of 64 KiB chunks ([`CHUNK`]), each packed and checksummed alone, so that a small read touches one
//! chunk. The writer packs and computes the checksums; everybody between hands bytes and [`ChunkInfo`] on untouched; the
//! reader checks and unpacks. So a flipped bit anywhere on the way, in a cable, in a controller or on a platter, ends
//! as an error with the chunk's name and never as wrong bytes.
//!
//! Bytes that do not shrink stay as they are and are never copied: they leave [`encode`] as slices of what came in, and
//! [`decode_chunk`] returns the very buffer it was given.
//!
//! # Invariants
//! - The checksum covers the block's id and the chunk's index too: the right bytes in the wrong place do not pass.
//! - A packed chunk is smaller than its content; a chunk with codec RAW is exactly as long. No other chunk passes.
//! - Unpacking takes at most [`CHUNK`] bytes of memory, whatever the input says.

pub mod erasure;
mod pack;

use std::ops::Range;

use bytes::Bytes;
use torchfs_proto::BlockId;
pub use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_BLOCK, MAX_CHUNKS, codec};

pub use pack::{Encoded, encode};

/// What a volume wants done with its bytes. Bytes that do not shrink are stored raw under each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// Leave the bytes alone.
    #[default]
    None,
    /// Fast: about a core per GB/s to pack, several GB/s to unpack.
    Lz4,
    /// Smaller, at the given level (1 to 19).
    Zstd(i32),
}

/// Why bytes were refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// A block has at most [`MAX_BLOCK`] bytes.
    #[error("block {block} would have {len} bytes; the limit is {MAX_BLOCK}")]
    TooLarge {
        /// Whose bytes.
        block: BlockId,
        /// How many there were.
        len: u64,
    },
    /// The stored bytes are not the ones the writer checksummed, or belong elsewhere.
    #[error("chunk {index} of block {block} is corrupt: {why}")]
    Corrupt {
        /// The block that was asked for.
        block: BlockId,
        /// The chunk's index in the block.
        index: u32,
        /// What did not fit.
        why: &'static str,
    },
    /// The compression library refused to start.
    #[error("cannot pack block {block}: {why}")]
    Pack {
        /// Whose bytes.
        block: BlockId,
        /// The library's words.
        why: String,
    },
}

/// The checksum of one chunk: CRC-32C over the block's id, the chunk's index in the block, and the stored bytes, which may
/// come in several parts.
pub fn checksum<'a>(block: BlockId, index: u32, parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut name = [0; 16];
    name[..12].copy_from_slice(&block.to_bytes());
    name[12..].copy_from_slice(&index.to_be_bytes());
    parts.into_iter().fold(crc32c::crc32c(&name), crc32c::crc32c_append)
}

/// Checks stored bytes against their info without unpacking them.
pub fn verify_chunk(block: BlockId, index: u32, info: &ChunkInfo, stored: &[u8]) -> Result<(), Error> {
    verify_parts(block, index, info, &[stored])
}

/// The same for stored bytes that come in several parts.
pub fn verify_parts(block: BlockId, index: u32, info: &ChunkInfo, stored: &[&[u8]]) -> Result<(), Error> {
    let corrupt = |why| Error::Corrupt { block, index, why };
    if stored.iter().map(|part| part.len()).sum::<usize>() != info.stored as usize {
        return Err(corrupt("its length is another"));
    }
    if !plausible(info) {
        return Err(corrupt("its lengths make no sense"));
    }
    if checksum(block, index, stored.iter().copied()) != info.crc {
        return Err(corrupt("the checksum does not match"));
    }
    Ok(())
}

/// Checks and unpacks one chunk. A chunk stored raw is returned as it came, without a copy.
pub fn decode_chunk(block: BlockId, index: u32, info: &ChunkInfo, stored: Bytes) -> Result<Bytes, Error> {
    verify_chunk(block, index, info, &stored)?;
    unpack_chunk(block, index, info, stored)
}

/// Unpacks one chunk that was checked before. A chunk stored raw is returned as it came, without a copy.
pub fn unpack_chunk(block: BlockId, index: u32, info: &ChunkInfo, stored: Bytes) -> Result<Bytes, Error> {
    if info.codec == codec::RAW {
        return Ok(stored);
    }
    let mut out = vec![0; info.raw as usize];
    unpack(block, index, info, &stored, &mut out)?;
    Ok(out.into())
}

/// Checks one chunk and unpacks it into the caller's buffer, which has exactly the chunk's raw length.
pub fn decode_chunk_into(
    block: BlockId,
    index: u32,
    info: &ChunkInfo,
    stored: &[u8],
    out: &mut [u8],
) -> Result<(), Error> {
    verify_chunk(block, index, info, stored)?;
    if out.len() != info.raw as usize {
        return Err(Error::Corrupt { block, index, why: "the reader expects another length" });
    }
    if info.codec == codec::RAW {
        out.copy_from_slice(stored);
        return Ok(());
    }
    unpack(block, index, info, stored, out)
}

/// Whether the lengths and the codec of an info can belong to any chunk at all.
pub fn plausible(info: &ChunkInfo) -> bool {
    if info.raw == 0 || info.raw > CHUNK {
        return false;
    }
    match info.codec {
        codec::RAW => info.stored == info.raw,
        codec::LZ4 | codec::ZSTD => info.stored > 0 && info.stored < info.raw,
        _ => false,
    }
}

/// The chunks that hold the bytes `[from, to)` of a block.
pub fn chunks_of(bytes: Range<u64>) -> Range<u32> {
    if bytes.is_empty() {
        return 0..0;
    }
    let chunk = u64::from(CHUNK);
    let index = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    index(bytes.start / chunk)..index(bytes.end.div_ceil(chunk))
}

/// Where the chunks of a range lie within the stored bytes of a row of chunks.
pub fn stored_range(row: &[ChunkInfo], chunks: Range<usize>) -> Range<u64> {
    let len = |part: &[ChunkInfo]| part.iter().map(|c| u64::from(c.stored)).sum::<u64>();
    let end = chunks.end.min(row.len());
    let start = chunks.start.min(end);
    let from = len(&row[..start]);
    from..from + len(&row[start..end])
}

fn unpack(block: BlockId, index: u32, info: &ChunkInfo, stored: &[u8], out: &mut [u8]) -> Result<(), Error> {
    if pack::unpack(info.codec, stored, out) == Some(out.len()) {
        return Ok(());
    }
    // The checksum matched, so the writer packed what cannot be unpacked: still corrupt to the reader.
    Err(Error::Corrupt { block, index, why: "it does not unpack to its length" })
}
