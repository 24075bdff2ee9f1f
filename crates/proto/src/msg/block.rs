//! Messages to a data server. Bulk bytes travel as the frame's payload: the stored chunks, one after the other.

use minicbor::{Decode, Encode};

use crate::attr::Raw;
use crate::chunk::ChunkInfo;
use crate::fault::Fault;
use crate::layout::Scheme;
use crate::msg::dump::{DumpInfo, DumpOp};
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
    /// Which of these pieces are not here, or known to be bad? At most [`PIECES_MAX`].
    #[n(20)]
    Missing {
        /// The pieces in question.
        #[n(0)]
        pieces: Vec<(BlockId, u8)>,
    },
    /// Get these pieces from other servers and store them; only the metadata service asks. Answered when those that
    /// succeeded are durable. At most [`PULL_MAX`].
    #[n(21)]
    Pull {
        /// What to get.
        #[n(0)]
        items: Vec<PullItem>,
        /// Bytes per second to take at most; 0: no bound.
        #[n(1)]
        rate: u64,
    },
    /// Forget pieces that belong elsewhere; the block lives on. Only the metadata service asks. Answered when durable. At
    /// most [`PIECES_MAX`].
    #[n(22)]
    Drop {
        /// The pieces.
        #[n(0)]
        pieces: Vec<(BlockId, u8)>,
    },
    /// Read stored pieces in the order of ids and check them. Bad ones are forgotten as if they were not here.
    #[n(23)]
    Scrub {
        /// Begin after this piece.
        #[n(0)]
        after: Option<(BlockId, u8)>,
        /// At most this many pieces; the server may do fewer.
        #[n(1)]
        limit: u32,
        /// Bytes per second to read at most; 0: no bound.
        #[n(2)]
        rate: u64,
    },
    /// What each session did here since the server's start.
    #[n(24)]
    Sessions,
    /// Something with dumps of the metadata.
    #[n(40)]
    Dump(#[n(0)] DumpOp),
}

/// Most pieces in one Missing or Drop.
pub const PIECES_MAX: usize = 4_096;
/// Most pieces in one Pull.
pub const PULL_MAX: usize = 64;

/// A piece to get, and who may have what it is made of.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct PullItem {
    /// The block.
    #[n(0)]
    pub block: BlockId,
    /// The piece that is wanted here.
    #[n(1)]
    pub piece: u8,
    /// The block's layout.
    #[n(2)]
    pub layout: LayoutId,
    /// The layout's scheme.
    #[n(3)]
    pub scheme: Scheme,
    /// The block's raw length; with the scheme it says how the block is cut into pieces.
    #[n(4)]
    pub block_len: u32,
    /// (piece, HOST:PORT) of those that should have one: the same piece to copy, others to rebuild from. Best first.
    #[n(5)]
    pub sources: Vec<(u8, String)>,
    /// The copy here was reported bad: check it, and replace it if that is so.
    #[n(6)]
    pub verify: bool,
}

/// What one session did at a data server since the server's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct SessionLoad {
    /// The session; 0 for servers and tools.
    #[n(0)]
    pub session: u64,
    /// Pieces read.
    #[n(1)]
    pub gets: u64,
    /// Pieces stored.
    #[n(2)]
    pub puts: u64,
    /// Bytes sent.
    #[n(3)]
    pub read_bytes: u64,
    /// Bytes stored.
    #[n(4)]
    pub written_bytes: u64,
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
    /// Those that are not here.
    #[n(20)]
    Missing {
        /// In the order they were asked for.
        #[n(0)]
        pieces: Vec<(BlockId, u8)>,
    },
    /// What came of a Pull; whatever is not listed is stored and durable.
    #[n(21)]
    Pulled {
        /// (place in the request, why not). `Gone`: too few sources have what is needed.
        #[n(0)]
        failed: Vec<(u32, Fault)>,
        /// Bytes stored.
        #[n(1)]
        bytes: u64,
    },
    /// A part was scrubbed.
    #[n(23)]
    Scrubbed {
        /// Pieces that were found bad and are forgotten.
        #[n(0)]
        bad: Vec<(BlockId, u8)>,
        /// Go on after this piece; none at the end.
        #[n(1)]
        after: Option<(BlockId, u8)>,
        /// Pieces read.
        #[n(2)]
        pieces: u64,
        /// Bytes read.
        #[n(3)]
        bytes: u64,
    },
    /// What sessions did.
    #[n(24)]
    Sessions {
        /// One for each session that was heard of lately.
        #[n(0)]
        sessions: Vec<SessionLoad>,
    },
    /// The dumps that are complete, newest first.
    #[n(40)]
    Dumps(#[n(0)] Vec<DumpInfo>),
    /// A part of a dump follows in the payload.
    #[n(41)]
    DumpPart {
        /// Bytes of the whole dump.
        #[n(0)]
        total: u64,
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
