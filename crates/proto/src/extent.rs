//! Extents: which bytes of a file live where, and the range operations that change them.

use minicbor::{Decode, Encode};

use crate::attr::Raw;
use crate::{BlockId, LayoutId, ServerId};

/// Contents up to this size may sit in the extent itself.
pub const INLINE_MAX: usize = 512;

/// Where the bytes of an extent are.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Source {
    /// Nowhere: zeros.
    #[n(0)]
    Hole,
    /// In a block, from this offset on.
    #[n(1)]
    Block {
        /// The block.
        #[n(0)]
        id: BlockId,
        /// Where in the (raw) bytes of the block the extent begins.
        #[n(1)]
        offset: u32,
        /// The block's whole raw length.
        #[n(2)]
        block_len: u32,
        /// The block's layout.
        #[n(3)]
        layout: LayoutId,
        /// Pieces that were put on other servers than the group's: (piece, server).
        #[n(4)]
        substitutes: Vec<(u8, ServerId)>,
    },
    /// Here.
    #[n(2)]
    Inline(#[n(0)] Raw),
}

/// A run of a file's bytes.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Extent {
    /// Where in the file.
    #[n(0)]
    pub offset: u64,
    /// How many bytes.
    #[n(1)]
    pub len: u64,
    /// Where the bytes are.
    #[n(2)]
    pub source: Source,
}

/// All that is needed to fetch bytes of a block.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockRef {
    /// The block.
    pub id: BlockId,
    /// Its layout.
    pub layout: LayoutId,
    /// Its whole raw length.
    pub block_len: u32,
    /// Pieces that were put on other servers than the group's: (piece, server).
    pub substitutes: Vec<(u8, ServerId)>,
}

impl BlockRef {
    /// The block behind an extent, if there is one.
    pub fn of(source: &Source) -> Option<BlockRef> {
        match source {
            Source::Block { id, block_len, layout, substitutes, .. } => Some(BlockRef {
                id: *id,
                layout: *layout,
                block_len: *block_len,
                substitutes: substitutes.clone(),
            }),
            Source::Hole | Source::Inline(_) => None,
        }
    }

    /// How many chunks the block has.
    pub fn chunks(&self) -> u16 {
        u16::try_from(self.block_len.div_ceil(crate::chunk::CHUNK)).unwrap_or(u16::MAX)
    }
}

impl From<&NewBlock> for BlockRef {
    fn from(block: &NewBlock) -> BlockRef {
        BlockRef {
            id: block.id,
            layout: block.layout,
            block_len: block.len,
            substitutes: block.substitutes.clone(),
        }
    }
}

/// A block that a commit names for the first time.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct NewBlock {
    /// Its id, from a live range of the session.
    #[n(0)]
    pub id: BlockId,
    /// Raw length.
    #[n(1)]
    pub len: u32,
    /// Its layout.
    #[n(2)]
    pub layout: LayoutId,
    /// Pieces that were put on other servers than the group's. In a commit `servers` counts if it is there.
    #[n(3)]
    pub substitutes: Vec<(u8, ServerId)>,
    /// Bytes on disk after compression, all pieces.
    #[n(4)]
    pub stored: u64,
    /// In a commit: where each piece really is, `servers[i]` has piece `i`. The service compares it with the group's target
    /// of that moment and records what differs; so a put under an old table is recorded as exactly as any other.
    #[n(5)]
    #[cbor(default)]
    pub servers: Vec<ServerId>,
}

/// One change of a file's content; a commit is a row of them, applied in order.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum RangeOp {
    /// These bytes now live there; the file grows if needed.
    #[n(0)]
    Write {
        /// Where in the file.
        #[n(0)]
        offset: u64,
        /// How many bytes.
        #[n(1)]
        len: u64,
        /// Where they live.
        #[n(2)]
        source: Source,
    },
    /// The same at the end of the file, wherever that is now.
    #[n(1)]
    Append {
        /// How many bytes.
        #[n(0)]
        len: u64,
        /// Where they live.
        #[n(1)]
        source: Source,
    },
    /// Zeros from here on for this long; the length of the file stays.
    #[n(2)]
    Punch {
        /// Where in the file.
        #[n(0)]
        offset: u64,
        /// How many bytes.
        #[n(1)]
        len: u64,
    },
    /// The length becomes this.
    #[n(3)]
    Truncate {
        /// New length.
        #[n(0)]
        size: u64,
    },
    /// The length becomes at least this.
    #[n(4)]
    Extend {
        /// Least length.
        #[n(0)]
        size: u64,
    },
}
