//! Messages to a data server. Bulk bytes travel as the frame's payload: the stored chunks, one after the other.

use minicbor::{Decode, Encode};

use crate::attr::Raw;
use crate::chunk::ChunkInfo;
use crate::{BlockId, IdRange, LayoutId};

/// Method numbers in the frame's header.
pub mod method {
    /// Any [`super::Request`].
    pub const BLOCK: u16 = 2;
}

/// A request to a data server.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Request {
    /// The session on whose behalf, 0 for servers and tools; requests are served fairly per session.
    #[n(0)]
    pub session: u64,
    /// Room for a signed right to this block.
    #[n(1)]
    pub capability: Option<Raw>,
    /// What to do.
    #[n(2)]
    pub op: Op,
}

/// What a data server does.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Op {
    /// Store one piece; answered when it is durable. Payload: the stored chunks.
    #[n(0)]
    Put {
        /// The block.
        #[n(0)]
        block: BlockId,
        /// Which piece of it.
        #[n(1)]
        piece: u8,
        /// The block's layout.
        #[n(2)]
        layout: LayoutId,
        /// The group's version that the writer knows.
        #[n(3)]
        group_version: u32,
        /// The chunks in the payload.
        #[n(4)]
        chunks: Vec<ChunkInfo>,
        /// The number under which the first of them is checksummed: 0 for a copy of the block, else as its code says.
        #[n(5)]
        first: u32,
    },
    /// Fetch chunks `[first, first + count)` of a piece, counted within the piece. Payload of the answer: the stored chunks.
    #[n(1)]
    Get {
        /// The block.
        #[n(0)]
        block: BlockId,
        /// Which piece of it.
        #[n(1)]
        piece: u8,
        /// First chunk.
        #[n(2)]
        first: u16,
        /// How many.
        #[n(3)]
        count: u16,
    },
    /// Forget blocks that a committed batch declared dead; only the metadata service asks. Answered when durable.
    #[n(2)]
    Delete {
        /// The dead.
        #[n(0)]
        blocks: Vec<BlockId>,
    },
    /// Forget every block of a dead range except these; only the metadata service asks. Answered when durable.
    #[n(3)]
    Purge {
        /// The range whose session is gone.
        #[n(0)]
        range: IdRange,
        /// Those that commits name.
        #[n(1)]
        keep: Vec<BlockId>,
    },
    /// What is stored, in the order of ids.
    #[n(4)]
    List {
        /// Begin after this piece.
        #[n(0)]
        after: Option<(BlockId, u8)>,
        /// At most this many.
        #[n(1)]
        limit: u32,
    },
    /// Figures of the server.
    #[n(5)]
    Stat,
    /// Read a piece from disk and check it.
    #[n(6)]
    Verify {
        /// The block.
        #[n(0)]
        block: BlockId,
        /// Which piece of it.
        #[n(1)]
        piece: u8,
    },
}

/// What a data server answers.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Reply {
    /// Done and durable.
    #[n(0)]
    Done,
    /// Chunks follow in the payload.
    #[n(1)]
    Chunks {
        /// One for each chunk.
        #[n(0)]
        chunks: Vec<ChunkInfo>,
    },
    /// What is stored.
    #[n(2)]
    Listed {
        /// In the order of ids.
        #[n(0)]
        pieces: Vec<PieceInfo>,
        /// Nothing follows.
        #[n(1)]
        end: bool,
    },
    /// Figures.
    #[n(3)]
    Stat {
        /// Bytes in all.
        #[n(0)]
        total: u64,
        /// Bytes free for pieces.
        #[n(1)]
        free: u64,
        /// Bytes that pieces take.
        #[n(2)]
        used: u64,
        /// Pieces.
        #[n(3)]
        pieces: u64,
    },
}

/// A stored piece.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct PieceInfo {
    /// The block.
    #[n(0)]
    pub block: BlockId,
    /// Which piece.
    #[n(1)]
    pub piece: u8,
    /// Its layout.
    #[n(2)]
    pub layout: LayoutId,
    /// Stored bytes.
    #[n(3)]
    pub stored: u32,
}
