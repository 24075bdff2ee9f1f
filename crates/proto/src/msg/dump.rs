//! What a data server does with dumps of the metadata. Their bytes travel as the frame's payload.

use minicbor::{Decode, Encode};

use crate::dump::DumpName;

/// Most bytes of a dump in one request or answer.
pub const DUMP_PART_MAX: usize = 4 << 20;

/// Requests about dumps; only the metadata service puts and deletes.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum DumpOp {
    /// Take the next part of a dump. Payload: the part.
    #[n(0)]
    Put {
        /// Which dump.
        #[n(0)]
        name: DumpName,
        /// Where the part belongs; 0 begins the dump anew, all others follow the last one.
        #[n(1)]
        offset: u64,
        /// The last part: the checksum of all. The dump is complete and durable when this is answered.
        #[n(2)]
        end: Option<u32>,
    },
    /// The dumps that are complete.
    #[n(1)]
    List,
    /// Fetch a part of a dump. Payload of the answer: the part, shorter only where the dump ends.
    #[n(2)]
    Get {
        /// Which dump.
        #[n(0)]
        name: DumpName,
        /// From here.
        #[n(1)]
        offset: u64,
        /// At most so many bytes, and at most [`DUMP_PART_MAX`].
        #[n(2)]
        len: u32,
    },
    /// Forget these; answered when durable.
    #[n(3)]
    Delete {
        /// Those that are too old.
        #[n(0)]
        names: Vec<DumpName>,
    },
}

/// A dump that a data server has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DumpInfo {
    /// Which.
    #[n(0)]
    pub name: DumpName,
    /// Its bytes.
    #[n(1)]
    pub len: u64,
}

/// How the dumps on the data servers are doing, for people.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct DumpReport {
    /// Seconds between two dumps; 0: none are made.
    #[n(0)]
    pub every_s: u64,
    /// When the newest that is complete was made, in milliseconds since 1970.
    #[n(1)]
    pub newest_ms: Option<u64>,
    /// How many data servers have it.
    #[n(2)]
    pub copies: u32,
    /// How many bytes it has.
    #[n(3)]
    pub bytes: u64,
    /// Why the last try came to nothing; empty if it did not.
    #[n(4)]
    pub failure: String,
}
