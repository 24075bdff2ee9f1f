//! The chunk: 64 KiB of a block, the unit of compression, checksum and partial reads.
//!
//! A block is a row of chunks. Every chunk but the last of a block holds [`CHUNK`] bytes, so the chunk that holds a byte
//! follows from its offset. What is needed to check and to unpack one chunk is its [`ChunkInfo`]; it travels beside
//! the stored bytes, from the writer through the disk to the reader, and nobody in between may change it.
//!
//! # Not here
//! How the checksum is computed and how bytes are packed: crate `codec`.

use minicbor::{Decode, Encode};

/// Bytes of a full chunk before compression.
pub const CHUNK: u32 = 64 << 10;

/// The largest block, in bytes before compression.
pub const MAX_BLOCK: u32 = 16 << 20;

/// The most chunks a block can have.
pub const MAX_CHUNKS: usize = (MAX_BLOCK / CHUNK) as usize;

/// The values of [`ChunkInfo::codec`]. Numbers are on disk and on the wire; new ones are added, none is reused.
pub mod codec {
    /// Stored as it is.
    pub const RAW: u8 = 0;
    /// One LZ4 block.
    pub const LZ4: u8 = 1;
    /// One Zstandard frame.
    pub const ZSTD: u8 = 2;
}

/// How one chunk is stored and how to check it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Encode, Decode)]
pub struct ChunkInfo {
    /// How the bytes are packed: one of [`codec`].
    #[n(0)]
    pub codec: u8,
    /// How many bytes are stored.
    #[n(1)]
    pub stored: u32,
    /// How many bytes come out.
    #[n(2)]
    pub raw: u32,
    /// CRC-32C over the block's id, the chunk's index in the block, and the stored bytes.
    #[n(3)]
    pub crc: u32,
}

/// Bytes of a block before compression, by its chunks.
pub fn raw_len(chunks: &[ChunkInfo]) -> u64 {
    chunks.iter().map(|c| u64::from(c.raw)).sum()
}

/// Bytes of a block as stored, by its chunks.
pub fn stored_len(chunks: &[ChunkInfo]) -> u64 {
    chunks.iter().map(|c| u64::from(c.stored)).sum()
}
