//! Values of the metadata store, as numbered fields in CBOR arrays.
//!
//! # Invariants
//! - Numbers of fields are on disk: they are added, never reused. Fields that are left out decode as their default.
//! - Each record knows the batch it was born in, so that history and retention need no rewrite.

use minicbor::{Decode, Encode};

use crate::attr::{Attr, Compression, Kind, Raw, Time, flags};
use crate::layout::{Layout, Scheme, ServerState};
use crate::msg::meta::{LockType, OpenSession};
use crate::{BlockId, ClusterId, IdRange, Incarnation, Ino, LayoutId, Seq, ServerId, SessionId, VolumeId};

/// The first bytes of every store.
pub const MAGIC: u64 = 0x746f_7263_686d_6431;
/// The version of keys and records that this code writes.
pub const VERSION: u32 = 1;
/// Features that a reader must know to touch the store; this code knows none beyond the version.
pub const MUST_KNOW: u64 = 0;
/// The feature of a store that is being filled from a dump: nobody may serve it.
pub const LOADING: u64 = 1 << 63;

/// What the store is; checked before anything else is read.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Format {
    /// [`MAGIC`].
    #[n(0)]
    pub magic: u64,
    /// The version of keys and records.
    #[n(1)]
    pub version: u32,
    /// Feature bits that a reader must know.
    #[n(2)]
    pub must_know: u64,
    /// Feature bits that a reader may ignore.
    #[n(3)]
    pub may_know: u64,
    /// Whose store it is.
    #[n(4)]
    pub cluster: ClusterId,
    /// When it was made.
    #[n(5)]
    pub made: Time,
}

/// One namespace with its policies.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Volume {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Its number.
    #[n(1)]
    pub id: VolumeId,
    /// Its name.
    #[n(2)]
    pub name: String,
    /// Largest block.
    #[n(3)]
    pub block_size: u32,
    /// How chunks are compressed.
    #[n(4)]
    pub compression: Compression,
    /// Redundancy of new blocks, where it differs from the cluster's.
    #[n(5)]
    pub scheme: Option<Scheme>,
    /// Placement groups that new blocks go through in turn, where the number differs from the cluster's.
    #[n(6)]
    pub stripe: Option<u32>,
    /// Being removed: it serves nobody any more.
    #[n(7)]
    #[cbor(default)]
    pub removed: bool,
}

/// What the cluster counts.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct ClusterCounters {
    /// The next session's number.
    #[n(0)]
    pub next_session: u64,
    /// The next data server's number.
    #[n(1)]
    pub next_server: u32,
    /// The next layout's number.
    #[n(2)]
    pub next_layout: u32,
    /// The incarnation in which `next_block` counts.
    #[n(3)]
    pub incarnation: u32,
    /// The next block id's counter.
    #[n(4)]
    pub next_block: u64,
    /// The placement's version.
    #[n(5)]
    pub placement: u64,
    /// The next volume's number; 0: the one after the first.
    #[n(6)]
    #[cbor(default)]
    pub next_volume: u32,
    /// Stores of data servers that were removed, the latest last; they are not taken in again.
    #[n(7)]
    pub removed: Option<Vec<u64>>,
}

/// What a volume counts.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Counters {
    /// The next inode's number.
    #[n(0)]
    pub next_ino: u64,
    /// Inodes there are, orphans among them.
    #[n(1)]
    pub inodes: u64,
    /// Live blocks.
    #[n(2)]
    pub blocks: u64,
    /// Raw bytes of live blocks.
    #[n(3)]
    pub bytes: u64,
    /// Bytes of live blocks on the data servers' disks.
    #[n(4)]
    pub stored: u64,
    /// Blocks in the queue of the dead.
    #[n(5)]
    pub dead: u64,
}

/// A file, folder or other object.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Inode {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// What it is.
    #[n(1)]
    pub kind: Kind,
    /// Lower twelve bits.
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
    /// Links; for a folder two and one for each folder in it.
    #[n(5)]
    pub nlink: u32,
    /// Bytes of a file or symlink target.
    #[n(6)]
    pub size: u64,
    /// Bytes that extents hold.
    #[n(7)]
    pub stored: u64,
    /// Last access.
    #[n(8)]
    pub atime: Time,
    /// Last change of content.
    #[n(9)]
    pub mtime: Time,
    /// Last change of anything.
    #[n(10)]
    pub ctime: Time,
    /// Birth.
    #[n(11)]
    pub btime: Time,
    /// Rises with each change of content.
    #[n(12)]
    pub data_version: u64,
    /// Rises with each change of anything.
    #[n(13)]
    pub change: u64,
    /// Bits of [`crate::attr::flags`].
    #[n(14)]
    pub flags: u32,
    /// The folder it is in; with several names, the last one given. Binding for folders only.
    #[n(15)]
    pub parent: Ino,
    /// Lives of this number.
    #[n(16)]
    pub generation: u64,
    /// Layout of new blocks, where it differs from the volume's.
    #[n(17)]
    pub layout: Option<LayoutId>,
    /// Whose quota it counts against.
    #[n(18)]
    pub quota: Option<u32>,
    /// Device number.
    #[n(19)]
    pub rdev: Option<u32>,
    /// A symlink's target.
    #[n(20)]
    pub target: Option<Raw>,
    /// A folder: the next entry's cookie. Cookies are never given twice.
    #[n(21)]
    pub next_cookie: Option<u64>,
    /// A folder: how many entries.
    #[n(22)]
    pub entries: Option<u64>,
    /// Extents from here on are left over from a truncation and still to be removed; `size` does not pass it meanwhile.
    #[n(23)]
    pub cut: Option<u64>,
}

impl Inode {
    /// As it travels.
    pub fn attr(&self, ino: Ino) -> Attr {
        Attr {
            ino,
            kind: self.kind,
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev.unwrap_or(0),
            size: match self.kind {
                Kind::Dir => 4096 + 32 * self.entries.unwrap_or(0),
                _ => self.size,
            },
            stored: self.stored,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            data_version: self.data_version,
            change: self.change,
            flags: self.flags,
            generation: self.generation,
            layout: self.layout,
        }
    }

    /// Whether it has extended attributes.
    pub fn has_xattrs(&self) -> bool {
        self.flags & flags::XATTRS != 0
    }
}

/// A name in a folder.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Entry {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// What it names.
    #[n(1)]
    pub ino: Ino,
    /// The kind of that.
    #[n(2)]
    pub kind: Kind,
    /// Its place in the folder.
    #[n(3)]
    pub cookie: u64,
}

/// The name behind a cookie, with what a listing needs.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Cookie {
    /// The name.
    #[n(0)]
    pub name: Raw,
    /// What it names.
    #[n(1)]
    pub ino: Ino,
    /// The kind of that.
    #[n(2)]
    pub kind: Kind,
}

/// Where an extent's bytes are. Holes have no record.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Bytes {
    /// In a block from this offset on; length, layout and substitutes are in the block's record.
    #[n(0)]
    Block {
        /// The block.
        #[n(0)]
        id: BlockId,
        /// Where in its raw bytes.
        #[n(1)]
        offset: u32,
    },
    /// Here.
    #[n(1)]
    Inline(#[n(0)] Raw),
}

/// A run of a file's bytes; the first byte is in the key.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Extent {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// How many bytes.
    #[n(1)]
    pub len: u64,
    /// Where they are.
    #[n(2)]
    pub bytes: Bytes,
}

/// A block that extents point into.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Block {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Raw length.
    #[n(1)]
    pub len: u32,
    /// Bytes on disk, all pieces.
    #[n(2)]
    pub stored: u64,
    /// Its layout.
    #[n(3)]
    pub layout: LayoutId,
    /// Extents that point into it.
    #[n(4)]
    pub references: u32,
    /// The sum of their lengths.
    #[n(5)]
    pub live: u64,
    /// Pieces put on other servers than the group's.
    #[n(6)]
    pub substitutes: Option<Vec<(u8, ServerId)>>,
}

/// An extended attribute.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Xattr {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Its value.
    #[n(1)]
    pub value: Raw,
}

/// A file lock; kind, session, owner and first byte are in the key.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Lock {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Shared or exclusive.
    #[n(1)]
    pub ty: LockType,
    /// Last byte, inclusive.
    #[n(2)]
    pub end: u64,
    /// The process, for people.
    #[n(3)]
    pub pid: u32,
}

/// An inode without a name, kept while somebody may have it open.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Orphan {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Those who may; when none is left, the inode is removed.
    #[n(1)]
    pub sessions: Vec<SessionId>,
}

/// One agent's connection.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Session {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Who it is.
    #[n(1)]
    pub who: OpenSession,
    /// Its epoch.
    #[n(2)]
    pub epoch: u32,
    /// When it began.
    #[n(3)]
    pub began: Time,
}

/// A range of block ids; session and first id are in the key.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Range {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// The ids.
    #[n(1)]
    pub ids: IdRange,
}

/// What a keyed request came to, as little as is needed to answer it again.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Outcome {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// What came of it.
    #[n(1)]
    pub what: Answered,
}

/// The kinds of [`Outcome`]; attributes are answered as they are at the time of the replay.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Answered {
    /// Nothing to tell.
    #[n(0)]
    Ok,
    /// Block ids.
    #[n(1)]
    Ids(#[n(0)] IdRange),
    /// Attributes of this inode.
    #[n(2)]
    Attr(#[n(0)] Ino),
    /// Made or found.
    #[n(3)]
    Made {
        /// The inode.
        #[n(0)]
        ino: Ino,
        /// It was new.
        #[n(1)]
        created: bool,
    },
    /// A name is gone.
    #[n(4)]
    Removed {
        /// The inode behind it.
        #[n(0)]
        ino: Ino,
        /// What it was.
        #[n(1)]
        kind: Kind,
        /// The session is held to have it open.
        #[n(2)]
        held: bool,
    },
    /// Renamed.
    #[n(5)]
    Renamed {
        /// The inode that moved.
        #[n(0)]
        ino: Ino,
        /// The inode that was replaced or exchanged, and what it was.
        #[n(1)]
        other: Option<(Ino, Kind)>,
        /// The session is held to have it open.
        #[n(2)]
        held: bool,
    },
    /// Committed.
    #[n(6)]
    Committed {
        /// The file.
        #[n(0)]
        ino: Ino,
        /// Where appends landed.
        #[n(1)]
        appended: Vec<u64>,
        /// Bytes that a CopyRange shared.
        #[n(2)]
        copied: u64,
    },
}

/// A block without references, to be deleted; time and id are in the key.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DeadBlock {
    /// It died in this batch.
    #[n(0)]
    pub born: Seq,
    /// Its layout.
    #[n(1)]
    pub layout: LayoutId,
    /// Pieces on other servers than the group's.
    #[n(2)]
    pub substitutes: Option<Vec<(u8, ServerId)>>,
}

/// A range whose session is gone: what no commit names is to be deleted.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DeadRange {
    /// It died in this batch.
    #[n(0)]
    pub born: Seq,
    /// The ids.
    #[n(1)]
    pub ids: IdRange,
    /// From this time on (ms since 1970).
    #[n(2)]
    pub due_ms: u64,
}

/// A data server.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Server {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// Its number.
    #[n(1)]
    pub id: ServerId,
    /// Drawn by its store when made.
    #[n(2)]
    pub store: u64,
    /// Where it listens.
    #[n(3)]
    pub addr: String,
    /// Failure domain.
    #[n(4)]
    pub zone: String,
    /// Up, down or out; that a server is suspected is not written down.
    #[n(5)]
    #[cbor(default)]
    pub state: ServerState,
    /// It is to be emptied.
    #[n(6)]
    #[cbor(default)]
    pub draining: bool,
    /// Bytes of its disks that work: its weight in the placement. 0 before it reported.
    #[n(7)]
    #[cbor(default)]
    pub total: u64,
    /// Its disks that work, by the numbers their stores drew.
    #[n(8)]
    #[cbor(default)]
    pub disks: Vec<u64>,
    /// Since when it is down.
    #[n(9)]
    pub down_since: Option<Time>,
    /// It came back and may hold pieces that belong elsewhere now.
    #[n(10)]
    #[cbor(default)]
    pub reconcile: bool,
}

/// How repair goes on: settings of administrators, and how far the scrub is.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Repair {
    /// Bytes per second that repair, moves and scrub may take on each server; 0: the default.
    #[n(0)]
    pub rate: u64,
    /// Groups do not move by themselves to even out the servers.
    #[n(1)]
    pub no_rebalance: bool,
    /// A scrub runs.
    #[n(2)]
    pub scrub: Option<Scrub>,
    /// When the last whole scrub ended.
    #[n(3)]
    pub scrubbed: Option<Time>,
    /// What it came to.
    #[n(4)]
    pub last: Option<Scrub>,
    /// From this time on (ms since 1970) all servers are to be searched for pieces that came too late.
    #[n(5)]
    pub search_ms: Option<u64>,
}

/// A scrub that runs.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Scrub {
    /// When it began.
    #[n(0)]
    pub began: Time,
    /// How far it is on each server: the last piece read; servers that are not listed are not begun.
    #[n(1)]
    pub cursors: Vec<(ServerId, BlockId, u8)>,
    /// Servers that are done.
    #[n(2)]
    pub done: Vec<ServerId>,
    /// Pieces read.
    #[n(3)]
    pub pieces: u64,
    /// Bytes read.
    #[n(4)]
    pub bytes: u64,
    /// Pieces found bad.
    #[n(5)]
    pub bad: u64,
}

/// A layout.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct LayoutRecord {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// The layout.
    #[n(1)]
    pub layout: Layout,
}

/// Wall time of a batch.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct BatchTime {
    /// When it was decided.
    #[n(0)]
    pub at: Time,
}

/// Where a store came from that was filled from a dump.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Restored {
    /// Born in this batch.
    #[n(0)]
    pub born: Seq,
    /// The last batch in the dump.
    #[n(1)]
    pub from: Seq,
    /// When the dump was made.
    #[n(2)]
    pub dumped: Time,
    /// When it was taken in.
    #[n(3)]
    pub loaded: Time,
    /// Blocks of earlier incarnations that no record names are dead.
    #[n(4)]
    pub incarnation: Incarnation,
    /// Data servers that have forgotten those.
    #[n(5)]
    pub swept: Vec<ServerId>,
}
