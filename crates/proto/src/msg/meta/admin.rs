//! What administrators ask for and are told: volumes, policies, repair, scrub, what sessions do.

use minicbor::{Decode, Encode};

use super::OpenSession;
use crate::attr::{Compression, VolumeInfo};
use crate::layout::Scheme;
use crate::msg::block::SessionLoad;
use crate::{BlockId, Ino, ServerId, SessionId, VolumeId};

/// How new content is stored, where it differs from the volume; nothing set means as the volume says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Policy {
    /// Redundancy.
    #[n(0)]
    pub scheme: Option<Scheme>,
    /// Placement groups that blocks go through in turn.
    #[n(1)]
    pub stripe: Option<u32>,
}

/// Policies of a volume; what is not given stays, or is the cluster's default for a new volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct VolumePolicy {
    /// Largest block: a power of two, 256 KiB to 16 MiB.
    #[n(0)]
    pub block_size: Option<u32>,
    /// How chunks are compressed.
    #[n(1)]
    pub compression: Option<Compression>,
    /// Redundancy.
    #[n(2)]
    pub scheme: Option<Scheme>,
    /// Placement groups that blocks go through in turn, at most 512.
    #[n(3)]
    pub stripe: Option<u32>,
}

/// What is done about volumes.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum VolumeOp {
    /// All volumes.
    #[n(0)]
    List,
    /// Make one.
    #[n(1)]
    Create {
        /// Its name: 1 to 64 letters, digits, `-`, `_`, `.`; free.
        #[n(0)]
        name: String,
        /// Its policies.
        #[n(1)]
        policy: VolumePolicy,
    },
    /// Change policies for new data.
    #[n(2)]
    Set {
        /// Which.
        #[n(0)]
        name: String,
        /// What changes.
        #[n(1)]
        policy: VolumePolicy,
    },
    /// Remove one with everything in it. Refused while it is mounted, or not empty unless forced.
    #[n(3)]
    Remove {
        /// Which.
        #[n(0)]
        name: String,
        /// Even if it has files.
        #[n(1)]
        force: bool,
    },
}

/// A volume as people see it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct VolumeReport {
    /// As a mount sees it.
    #[n(0)]
    pub info: VolumeInfo,
    /// Redundancy of new blocks.
    #[n(1)]
    pub scheme: Scheme,
    /// The redundancy that was asked for, where it is not the cluster's own.
    #[n(2)]
    pub asked: Option<Scheme>,
    /// Placement groups that blocks go through in turn.
    #[n(3)]
    pub stripe: u32,
    /// Inodes in use.
    #[n(4)]
    pub inodes: u64,
    /// Live blocks.
    #[n(5)]
    pub blocks: u64,
    /// Bytes of content in live blocks.
    #[n(6)]
    pub bytes: u64,
    /// Bytes of live blocks on the data servers' disks.
    #[n(7)]
    pub stored: u64,
    /// Sessions on it.
    #[n(8)]
    pub sessions: u64,
    /// Being removed.
    #[n(9)]
    pub removed: bool,
}

/// A piece that was found bad or missing where it should be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Encode, Decode)]
pub struct BadPiece {
    /// The block.
    #[n(0)]
    pub block: BlockId,
    /// Which piece of it.
    #[n(1)]
    pub piece: u8,
    /// Where.
    #[n(2)]
    pub server: ServerId,
}

/// How repair, moves and scrub go on.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct RepairReport {
    /// Groups in which pieces may be missing.
    #[n(0)]
    pub dirty: u32,
    /// Groups that move to other servers.
    #[n(1)]
    pub moving: u32,
    /// Groups in all.
    #[n(2)]
    pub groups: u32,
    /// Dirty or degraded groups that survive no further loss.
    #[n(3)]
    pub at_risk: u32,
    /// Blocks that the present pass has looked at.
    #[n(4)]
    pub pass_done: u64,
    /// Blocks that the present pass has to look at, about; 0 while none runs.
    #[n(5)]
    pub pass_total: u64,
    /// Pieces found missing and not yet stored.
    #[n(6)]
    pub pieces_left: u64,
    /// Pieces stored since the service started.
    #[n(7)]
    pub pieces_done: u64,
    /// Bytes of these.
    #[n(8)]
    pub bytes_done: u64,
    /// Bytes per second lately.
    #[n(9)]
    pub rate: u64,
    /// Bytes per second that are allowed on each server; 0: no bound.
    #[n(10)]
    pub rate_max: u64,
    /// Blocks of which too few pieces were found; some of them by id.
    #[n(11)]
    pub lost: u64,
    /// At most 64 of them.
    #[n(12)]
    pub lost_blocks: Vec<BlockId>,
    /// Groups move by themselves to even out the servers.
    #[n(13)]
    pub auto_rebalance: bool,
    /// Servers that are being emptied.
    #[n(14)]
    pub drains: Vec<DrainReport>,
    /// The scrub that runs, or the last one.
    #[n(15)]
    pub scrub: ScrubReport,
    /// Stale pieces removed since the service started.
    #[n(16)]
    pub dropped: u64,
    /// Groups with a server that is down, out or removed: blocks of theirs lack pieces for now.
    #[n(17)]
    #[cbor(default)]
    pub degraded: u32,
    /// Servers are being evened out because somebody asked; groups move a few at a time.
    #[n(18)]
    #[cbor(default)]
    pub balancing: bool,
}

/// How far a server is emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct DrainReport {
    /// Which.
    #[n(0)]
    pub server: ServerId,
    /// Places in groups that still name it; 0: it may be removed.
    #[n(1)]
    pub groups: u32,
    /// Pieces it reported to hold.
    #[n(2)]
    pub pieces: u64,
    /// Those of its places for which there is no other server: too few are left for the redundancy.
    #[n(3)]
    #[cbor(default)]
    pub stuck: u32,
    /// Pieces of it that others have got since it is being emptied or the service started, and their bytes.
    #[n(4)]
    pub moved: Option<(u64, u64)>,
}

/// Pieces that a server holds and nobody needs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Strays {
    /// Of blocks that no record names, no living session may still name and no queue has for deletion, or of which this piece is
    /// elsewhere; and the server is not being searched for such.
    #[n(0)]
    pub orphans: Vec<(BlockId, u8)>,
    /// The same on a server that is being searched: they go by themselves.
    #[n(1)]
    pub leaving: Vec<(BlockId, u8)>,
}

/// A file and blocks that hold bytes of it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct FileBlocks {
    /// Its volume.
    #[n(0)]
    pub volume: VolumeId,
    /// Its inode.
    #[n(1)]
    pub ino: Ino,
    /// The folder it is in; with several names, of the last one given.
    #[n(2)]
    pub parent: Ino,
    /// It has a name; else it is only open somewhere.
    #[n(3)]
    pub named: bool,
    /// The blocks, in the order of the file; those that follow may be in the next answer.
    #[n(4)]
    pub blocks: Vec<BlockId>,
}

/// How far a scrub is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct ScrubReport {
    /// It runs; if not, the figures are those of the last whole one.
    #[n(0)]
    pub running: bool,
    /// Pieces read.
    #[n(1)]
    pub pieces: u64,
    /// Pieces in all, about.
    #[n(2)]
    pub total: u64,
    /// Bytes read.
    #[n(3)]
    pub bytes: u64,
    /// Pieces found bad; repair gets them again.
    #[n(4)]
    pub bad: u64,
    /// Seconds since 1970 at the end of the last whole one; 0: never.
    #[n(5)]
    pub last_end: i64,
}

/// What a session does, as figures that only rise.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SessionTop {
    /// Its number.
    #[n(0)]
    pub session: SessionId,
    /// Who it is; none for servers and tools, and for sessions that ended.
    #[n(1)]
    pub who: Option<OpenSession>,
    /// Metadata operations served.
    #[n(2)]
    pub ops: u64,
    /// At the data servers, as of their last heartbeats, added up.
    #[n(3)]
    pub load: SessionLoad,
}
