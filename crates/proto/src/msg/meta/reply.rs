//! What the metadata service answers: the outcome of an operation and the nouns in it.

use minicbor::{Decode, Encode};

use super::{FileBlocks, FileLock, OpenSession, RepairReport, SessionTop, Strays, VolumeReport};
use crate::attr::{Attr, Kind, Raw, Time, VolumeInfo};
use crate::extent::{Extent, NewBlock};
use crate::layout::{Placement, ServerInfo};
use crate::msg::dump::DumpReport;
use crate::{BlockId, ClusterId, Fence, IdRange, Incarnation, Ino, LayoutId, Seq, ServerId, SessionId};

/// What came of an operation.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Done {
    /// Nothing to tell.
    #[n(0)]
    Ok,
    /// A session began or went on.
    #[n(1)]
    Session(#[n(0)] SessionInfo),
    /// The session lives. Bytes of new content that it may buffer; the placement's version.
    #[n(2)]
    Renewed {
        /// Writes beyond this would not find space.
        #[n(0)]
        space: u64,
        /// Fetch the placement if this is newer.
        #[n(1)]
        placement: u64,
        /// The volume's policies as they are now, for new data.
        #[n(2)]
        volume: Option<VolumeInfo>,
    },
    /// Events with their numbers.
    #[n(3)]
    Events(#[n(0)] Vec<(u64, Event)>),
    /// Block ids.
    #[n(4)]
    Ids(#[n(0)] IdRange),
    /// Layouts and servers.
    #[n(5)]
    Placement(#[n(0)] Placement),
    /// The entry, or its absence. Absence is an answer, not a fault, so that it can carry a lease on the folder.
    #[n(6)]
    Entry(#[n(0)] Option<Attr>),
    /// Attributes after the operation.
    #[n(7)]
    Attr(#[n(0)] Attr),
    /// A symlink's target.
    #[n(8)]
    Target(#[n(0)] Raw),
    /// Made, or found if `created` is false.
    #[n(9)]
    Made {
        /// The inode.
        #[n(0)]
        attr: Attr,
        /// It is new.
        #[n(1)]
        created: bool,
    },
    /// A name is gone; the inode behind it as it is now (nlink 0: no name is left).
    #[n(10)]
    Removed {
        /// The inode behind the name.
        #[n(0)]
        attr: Attr,
        /// The session is held to have it open: tell with Release when that is not so.
        #[n(1)]
        held: bool,
    },
    /// Renamed.
    #[n(11)]
    Renamed {
        /// The inode that moved.
        #[n(0)]
        attr: Attr,
        /// The inode that was replaced or exchanged, as it is now.
        #[n(1)]
        other: Option<Attr>,
        /// The session is held to have the replaced inode open.
        #[n(2)]
        held: bool,
    },
    /// Entries.
    #[n(12)]
    Entries {
        /// In the order of cookies.
        #[n(0)]
        entries: Vec<DirEntry>,
        /// Nothing follows.
        #[n(1)]
        end: bool,
    },
    /// All extended attributes.
    #[n(13)]
    Xattrs(#[n(0)] Vec<(Raw, Raw)>),
    /// The data lease came with the grants; the attributes as of now.
    #[n(14)]
    Opened(#[n(0)] Attr),
    /// Extents that cover the range from its start; holes may be left out; sorted.
    #[n(15)]
    Extents {
        /// The extents.
        #[n(0)]
        extents: Vec<Extent>,
        /// The answer holds everything up to here (at least one extent, or the range's end).
        #[n(1)]
        upto: u64,
        /// The file's data version.
        #[n(2)]
        data_version: u64,
        /// The file's length.
        #[n(3)]
        size: u64,
    },
    /// Committed.
    #[n(16)]
    Committed {
        /// Attributes after it.
        #[n(0)]
        attr: Attr,
        /// Where each Append landed, in order.
        #[n(1)]
        appended: Vec<u64>,
        /// How many bytes a CopyRange shared.
        #[n(2)]
        copied: u64,
    },
    /// The lock in the way, if any, and the session that holds it.
    #[n(17)]
    LockHolder(#[n(0)] Option<FileLock>),
    /// Figures for statfs.
    #[n(18)]
    Use(#[n(0)] VolumeUse),
    /// A data server's number and cluster.
    #[n(19)]
    Joined {
        /// Its number from now on.
        #[n(0)]
        server: ServerId,
        /// Its cluster from now on.
        #[n(1)]
        cluster: ClusterId,
        /// The placement's version.
        #[n(2)]
        #[cbor(default)]
        placement: u64,
        /// If the heartbeat knew an older placement: the version of each group of each layout. Puts that carry a lower one
        /// are refused.
        #[n(3)]
        #[cbor(default)]
        groups: Vec<(LayoutId, Vec<u32>)>,
    },
    /// The cluster.
    #[n(20)]
    Status(#[n(0)] StatusReport),
    /// All sessions.
    #[n(21)]
    Sessions(#[n(0)] Vec<SessionReport>),
    /// A part was checked.
    #[n(22)]
    Checked {
        /// Each inconsistency in a sentence.
        #[n(0)]
        problems: Vec<String>,
        /// Go on with this; empty at the end.
        #[n(1)]
        cursor: Raw,
        /// Records checked in this part.
        #[n(2)]
        records: u64,
        /// Records in all, about.
        #[n(3)]
        total: u64,
    },
    /// Those that a record names.
    #[n(23)]
    Known(#[n(0)] Vec<BlockId>),
    /// Block records.
    #[n(24)]
    Blocks {
        /// In the order of ids; `stored` is 0 where unknown.
        #[n(0)]
        blocks: Vec<NewBlock>,
        /// Nothing follows.
        #[n(1)]
        end: bool,
    },
    /// What is left to collect, and what was collected since the last call.
    #[n(25)]
    Collected {
        /// Blocks deleted since the service started.
        #[n(0)]
        deleted: u64,
        /// Waiting for their time (two lease terms) or for a server.
        #[n(1)]
        waiting: u64,
    },
    /// Volumes: all of them, or the one that was made or changed.
    #[n(40)]
    Volumes(#[n(0)] Vec<VolumeReport>),
    /// How repair, moves and scrub go on.
    #[n(41)]
    Repair(#[n(0)] RepairReport),
    /// What sessions do.
    #[n(42)]
    Top(#[n(0)] Vec<SessionTop>),
    /// Pieces that nobody needs.
    #[n(43)]
    Strays(#[n(0)] Strays),
    /// Files with their blocks.
    #[n(44)]
    Files {
        /// In the order of volumes and inodes.
        #[n(0)]
        files: Vec<FileBlocks>,
        /// Go on with this; empty at the end.
        #[n(1)]
        cursor: Raw,
    },
    /// Names in a folder.
    #[n(45)]
    Names {
        /// The name of the volume.
        #[n(0)]
        volume: String,
        /// The folder that this one is in.
        #[n(1)]
        parent: Ino,
        /// Inodes and their names, in the order of names.
        #[n(2)]
        names: Vec<(Ino, Raw)>,
        /// Nothing follows.
        #[n(3)]
        end: bool,
    },
    /// The metadata service itself.
    #[n(48)]
    MetaStatus(#[n(0)] MetaReport),
    /// The next piece of a dump.
    #[n(50)]
    Dumped {
        /// Its bytes; may be none.
        #[n(0)]
        bytes: Raw,
        /// Go on with this; empty at the end.
        #[n(1)]
        cursor: Raw,
        /// Pairs that are done.
        #[n(2)]
        pairs: u64,
        /// Pairs in all, about.
        #[n(3)]
        total: u64,
    },
}

/// What a session needs to know.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SessionInfo {
    /// Its number.
    #[n(0)]
    pub session: SessionId,
    /// Its epoch.
    #[n(1)]
    pub epoch: u32,
    /// The cluster.
    #[n(2)]
    pub cluster: ClusterId,
    /// The metadata's incarnation.
    #[n(3)]
    pub incarnation: Incarnation,
    /// A lease ends this long after the last renewal was sent.
    #[n(4)]
    pub lease_ms: u32,
    /// The session ends this long after the last renewal.
    #[n(5)]
    pub session_ms: u32,
    /// The volume.
    #[n(6)]
    pub volume: VolumeInfo,
    /// Attributes of its root.
    #[n(7)]
    pub root: Attr,
    /// Layouts and servers.
    #[n(8)]
    pub placement: Placement,
    /// Leases must be reclaimed: another leader, or this one restarted. Until the last Reclaim
    /// nothing else is served but changes that are told again.
    #[n(9)]
    pub reclaim: bool,
    /// Sequences up to this one are ordered already (on resume).
    #[n(10)]
    pub seq: u64,
}

/// Something the service tells a session.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Event {
    /// Give leases back: drop caches (first write back what is dirty if WRITE is among the bits), then Ack.
    #[n(0)]
    Recall {
        /// On what.
        #[n(0)]
        ino: Ino,
        /// Which bits.
        #[n(1)]
        bits: u8,
        /// Grants on this inode up to this number are void.
        #[n(2)]
        number: u64,
        /// For NAMES: the names that change; empty means all.
        #[n(3)]
        names: Vec<Raw>,
    },
    /// The inode lost its last name: tell with Release when it is not open here any more. No Ack.
    #[n(1)]
    Orphaned {
        /// The inode.
        #[n(0)]
        ino: Ino,
    },
    /// A file held SHARED was changed by another session: drop cached pages. No Ack.
    #[n(2)]
    Changed {
        /// The file.
        #[n(0)]
        ino: Ino,
    },
}

/// An entry in an answer to ReadDir.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DirEntry {
    /// The name.
    #[n(0)]
    pub name: Raw,
    /// The inode.
    #[n(1)]
    pub ino: Ino,
    /// Its kind.
    #[n(2)]
    pub kind: Kind,
    /// Ask for what follows with this; survives restarts.
    #[n(3)]
    pub cookie: u64,
    /// Attributes, where asked for.
    #[n(4)]
    pub attr: Option<Attr>,
}

/// Figures of a volume for statfs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct VolumeUse {
    /// Bytes that could be stored in all, redundancy taken off.
    #[n(0)]
    pub total: u64,
    /// Bytes that can still be stored.
    #[n(1)]
    pub free: u64,
    /// Inodes in use.
    #[n(2)]
    pub inodes: u64,
    /// Inodes that can still be made.
    #[n(3)]
    pub inodes_free: u64,
}

/// A session as people see it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SessionReport {
    /// Its number.
    #[n(0)]
    pub session: SessionId,
    /// Who it is.
    #[n(1)]
    pub who: OpenSession,
    /// Seconds since it began.
    #[n(2)]
    pub age_s: u64,
    /// Milliseconds since it was renewed.
    #[n(3)]
    pub renewed_ms: u64,
    /// Leases held.
    #[n(4)]
    pub leases: u64,
    /// Files with a right to write.
    #[n(5)]
    pub writing: u64,
    /// Locks held.
    #[n(6)]
    pub locks: u64,
    /// Unlinked files held.
    #[n(7)]
    pub orphans: u64,
    /// Operations served.
    #[n(8)]
    pub ops: u64,
}

/// The cluster as people see it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct StatusReport {
    /// The cluster.
    #[n(0)]
    pub cluster: ClusterId,
    /// Its incarnation.
    #[n(1)]
    pub incarnation: Incarnation,
    /// Inodes in use.
    #[n(2)]
    pub inodes: u64,
    /// Live blocks.
    #[n(3)]
    pub blocks: u64,
    /// Bytes of content in live blocks, before compression and redundancy.
    #[n(4)]
    pub bytes: u64,
    /// Blocks waiting to be deleted.
    #[n(5)]
    pub dead: u64,
    /// Sessions.
    #[n(6)]
    pub sessions: u64,
    /// Data servers.
    #[n(7)]
    pub servers: Vec<ServerInfo>,
    /// Bytes of metadata on disk.
    #[n(8)]
    pub meta_bytes: u64,
    /// Bytes free under the metadata.
    #[n(9)]
    pub meta_free: u64,
    /// Placement version.
    #[n(10)]
    pub placement: u64,
    /// Copies of new data, for people: `replicas:2`.
    #[n(11)]
    pub redundancy: String,
    /// Things that need attention, one sentence each.
    #[n(12)]
    pub warnings: Vec<String>,
    /// Default volume and others by name.
    #[n(13)]
    pub volumes: Vec<String>,
    /// How repair, moves and scrub go on.
    #[n(14)]
    pub repair: Option<RepairReport>,
    /// The dumps on the data servers.
    #[n(18)]
    pub dumps: Option<DumpReport>,
}

/// The metadata service as people see it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct MetaReport {
    /// The cluster.
    #[n(0)]
    pub cluster: ClusterId,
    /// Where the leader listens.
    #[n(1)]
    pub leader: String,
    /// Since when it leads.
    #[n(2)]
    pub since: Time,
    /// Its fence.
    #[n(3)]
    pub fence: Fence,
    /// Its incarnation.
    #[n(4)]
    pub incarnation: Incarnation,
    /// Where its log is kept: `embedded`, `postgres`.
    #[n(5)]
    pub engine: String,
    /// The last batch ordered.
    #[n(6)]
    pub ordered: Seq,
    /// The last batch that is durable.
    #[n(7)]
    pub durable: Seq,
    /// The last batch in the leader's replica.
    #[n(8)]
    pub applied: Seq,
    /// Bytes of the leader's replica.
    #[n(9)]
    pub replica_bytes: u64,
    /// Pairs in it.
    #[n(10)]
    pub replica_keys: u64,
    /// Bytes in memory that are not in it yet.
    #[n(11)]
    pub overlay_bytes: u64,
    /// Bytes of the log.
    #[n(12)]
    pub log_bytes: u64,
    /// Bytes of the state in the database; 0 without one.
    #[n(13)]
    pub state_bytes: u64,
    /// Servers that follow.
    #[n(14)]
    pub standbys: Vec<StandbyReport>,
}

/// A metadata server that follows.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct StandbyReport {
    /// Where it listens.
    #[n(0)]
    pub addr: String,
    /// The last batch that it has.
    #[n(1)]
    pub applied: Seq,
    /// Bytes of its replica.
    #[n(2)]
    pub replica_bytes: u64,
    /// Milliseconds since it said so.
    #[n(3)]
    pub silent_ms: u64,
}
