//! Messages to the metadata service: one envelope, one operation, one reply.
//!
//! # The rules
//! - A mutating operation is named by its key (session, sequence, step). Its result is stored in the same batch, so a replay
//!   answers what the first try answered. Results up to `watermark` are dropped: the client has them and they are durable.
//! - A reply leaves when its decision is ordered. `ordered` names the batch it rests on, `durable` how far the log is on
//!   disk; the client keeps its mutating requests until `durable` passes them and replays them, in the order of sequence,
//!   to whoever leads next. A replayed Make says which inode the first answer named, and that one is made again: programs
//!   know it by its number. A service that starts must not give such numbers to others.
//! - A reply may grant leases. Each grant has a number from one rising counter; a recall names the number up to which
//!   grants on that inode are void, so a recall that overtakes a reply on the way still wins.
//! - All leases of a session end together when it was not renewed for a lease term; then its `lease_epoch` rises and the
//!   client drops whatever it remembers.

use minicbor::{Decode, Encode};

use crate::attr::{Kind, Raw, SetAttr, Time};
use crate::extent::{Extent, NewBlock, RangeOp};
use crate::fault::Fault;
use crate::layout::{DiskInfo, Load};
use crate::msg::block::SessionLoad;
use crate::{BlockId, ClusterId, Fence, Ino, Seq, ServerId, SessionId, VolumeId};

mod admin;
mod reply;

pub use admin::{
    BadPiece, DrainReport, FileBlocks, Policy, RepairReport, ScrubReport, SessionTop, Strays, VolumeOp,
    VolumePolicy, VolumeReport,
};
pub use reply::{
    DirEntry, Done, Event, MetaReport, SessionInfo, SessionReport, StandbyReport, StatusReport, VolumeUse,
};

/// Method numbers in the frame's header.
pub mod method {
    /// Any [`super::Request`].
    pub const META: u16 = 1;
}

/// The envelope of every request.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Request {
    /// The session, 0 for requests outside of one.
    #[n(0)]
    pub session: SessionId,
    /// The session's epoch, from [`SessionInfo`]; older ones are refused.
    #[n(1)]
    pub epoch: u32,
    /// Counts the mutating operations of a session from 1; 0 for operations that change nothing.
    #[n(2)]
    pub seq: u64,
    /// Tells apart the requests that one operation needs.
    #[n(3)]
    pub step: u32,
    /// Results of sequences up to this one may be dropped.
    #[n(4)]
    pub watermark: u64,
    /// The highest fence this client has seen; a server with a lower one must not answer.
    #[n(5)]
    pub fence: Fence,
    /// What to do.
    #[n(6)]
    pub op: Op,
    /// A Make that is replayed: the inode that the first answer named.
    #[n(7)]
    pub made: Option<Ino>,
}

/// The envelope of every reply.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Reply {
    /// The leader's fence; clients refuse lower ones than they saw.
    #[n(0)]
    pub fence: Fence,
    /// The batch this reply rests on; 0 if on none.
    #[n(1)]
    pub ordered: Seq,
    /// The log is durable up to here.
    #[n(2)]
    pub durable: Seq,
    /// The session's lease epoch; leases of older ones are void.
    #[n(3)]
    pub lease_epoch: u32,
    /// Leases granted with this reply.
    #[n(4)]
    pub grants: Vec<Grant>,
    /// What came of it.
    #[n(5)]
    pub result: Result<Done, Fault>,
    /// Inodes that the answer is about, and of which a lease that would protect it was not given: by the time it is heard it may
    /// be out of date, even if that lease was given with another reply meanwhile. It is not to be kept. Empty: all of it.
    #[n(6)]
    pub bare: Option<Vec<Ino>>,
}

/// Kinds of lease, as bits.
pub mod lease {
    /// Attributes, symlink target and extended attributes stay as they are.
    pub const ATTR: u8 = 1;
    /// The names in a folder stay as they are, absent ones too.
    pub const NAMES: u8 = 2;
    /// Content and extents stay as they are.
    pub const READ: u8 = 4;
    /// Nobody else reads or writes the content: it may be buffered here.
    pub const WRITE: u8 = 8;
    /// Several sessions write: write through, read past caches; a [`super::Event::Changed`] tells of others' commits.
    pub const SHARED: u8 = 16;
}

/// A lease given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Grant {
    /// On what.
    #[n(0)]
    pub ino: Ino,
    /// Bits of [`lease`]; they add to those held. None if the inode is merely known to the session now.
    #[n(1)]
    pub bits: u8,
    /// From one rising counter of the service.
    #[n(2)]
    pub number: u64,
}

/// How an entry is made.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Make {
    /// The folder.
    #[n(0)]
    pub parent: Ino,
    /// The name. Empty for a file without a name (O_TMPFILE); such a file is an orphan held by this session.
    #[n(1)]
    pub name: Raw,
    /// What to make.
    #[n(2)]
    pub kind: Kind,
    /// Lower twelve bits, umask applied.
    #[n(3)]
    pub mode: u32,
    /// Owner.
    #[n(4)]
    pub uid: u32,
    /// Group, unless the folder has sgid and hands down its own.
    #[n(5)]
    pub gid: u32,
    /// Device number.
    #[n(6)]
    pub rdev: u32,
    /// Symlink target.
    #[n(7)]
    pub target: Raw,
    /// An existing file is an error; otherwise it is answered as it is (files only).
    #[n(8)]
    pub exclusive: bool,
    /// The file is opened at once for writing: grant the right to write if it is new.
    #[n(9)]
    pub open: bool,
}

/// Flags of rename.
pub mod rename {
    /// The new name must be free.
    pub const NOREPLACE: u32 = 1;
    /// The two names change places.
    pub const EXCHANGE: u32 = 2;
}

/// Kinds of file lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, Encode, Decode)]
#[cbor(index_only)]
pub enum LockKind {
    /// fcntl, by range and process.
    #[n(0)]
    Posix,
    /// flock, whole file and open description.
    #[n(1)]
    Flock,
}

/// Types of file lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum LockType {
    /// Shared.
    #[n(0)]
    Read,
    /// Exclusive.
    #[n(1)]
    Write,
    /// None: releases.
    #[n(2)]
    Unlock,
}

/// A file lock asked for or held.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct FileLock {
    /// fcntl or flock.
    #[n(0)]
    pub kind: LockKind,
    /// Shared, exclusive, none.
    #[n(1)]
    pub ty: LockType,
    /// Who, within its session: the kernel's lock owner.
    #[n(2)]
    pub owner: u64,
    /// The process, for those who ask who holds it.
    #[n(3)]
    pub pid: u32,
    /// First byte.
    #[n(4)]
    pub start: u64,
    /// Last byte, inclusive; u64::MAX for all.
    #[n(5)]
    pub end: u64,
}

/// A commit of content: new blocks and the range operations that name them.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Commit {
    /// The file.
    #[n(0)]
    pub ino: Ino,
    /// The number of the WRITE or SHARED grant this rests on; a stale one is refused.
    #[n(1)]
    pub grant: u64,
    /// Blocks named here for the first time.
    #[n(2)]
    pub blocks: Vec<NewBlock>,
    /// Applied in order.
    #[n(3)]
    pub ranges: Vec<RangeOp>,
    /// When the program wrote.
    #[n(4)]
    pub mtime: Option<Time>,
    /// Somebody without rights wrote: clear suid, sgid and capabilities.
    #[n(5)]
    pub kill_privileges: bool,
    /// Compaction: commit only if exactly these extents are there; size, times and versions stay.
    #[n(6)]
    pub expect: Option<Vec<Extent>>,
    /// Bytes in here were appended to a file of this length; if it has another one by now, nothing is done (Busy).
    #[n(7)]
    pub ends: Option<u64>,
}

/// Most range operations in one commit.
pub const COMMIT_RANGES_MAX: usize = 2_000;
/// Most new blocks in one commit.
pub const COMMIT_BLOCKS_MAX: usize = 1_024;
/// Most inodes in one release.
pub const RELEASE_MAX: usize = 1_024;
/// Most extents in one answer.
pub const EXTENTS_MAX: usize = 4_096;
/// Most entries in one answer.
pub const ENTRIES_MAX: usize = 1_024;

/// What the metadata service does. Those marked † mutate and carry a sequence.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Op {
    /// Begin a session on a volume. Not keyed; an answer that is lost leaves a session that ends by itself.
    #[n(0)]
    OpenSession(#[n(0)] OpenSession),
    /// Go on with a session after a lost connection or a change of leaders.
    #[n(1)]
    ResumeSession,
    /// After a change of leaders: what this session held; several requests. Then come the changes that were answered and may be
    /// lost, and at last one more of these, which says that this was all.
    #[n(2)]
    Reclaim {
        /// (inode, lease bits) held.
        #[n(0)]
        leases: Vec<(Ino, u8)>,
        /// Inodes open here.
        #[n(1)]
        open: Vec<Ino>,
        /// Nothing follows, and all answered changes were told again.
        #[n(2)]
        last: bool,
    },
    /// Keep session and leases alive.
    #[n(3)]
    Renew,
    /// End the session: locks, leases, ranges and orphans go with it.
    #[n(4)]
    CloseSession,
    /// Wait for events; answers at once when there are some, else empty after `wait_ms`.
    #[n(5)]
    Listen {
        /// Events up to this number were received.
        #[n(0)]
        seen: u64,
        /// How long to wait at most.
        #[n(1)]
        wait_ms: u32,
    },
    /// Recalls were honoured.
    #[n(6)]
    Ack {
        /// (event number, whether the file is still open for writing here).
        #[n(0)]
        events: Vec<(u64, bool)>,
    },
    /// † A range of block ids.
    #[n(7)]
    GrantIds {
        /// How many, at most 65,536.
        #[n(0)]
        count: u32,
    },
    /// Wait until the log is durable up to here.
    #[n(8)]
    Sync {
        /// The batch to wait for.
        #[n(0)]
        seq: Seq,
    },
    /// Leases that the session gives back, and inodes it does not know any more (bits 255).
    #[n(9)]
    Forget {
        /// (inode, bits, the number of the newest grant the session knew; newer grants stay).
        #[n(0)]
        leases: Vec<(Ino, u8, u64)>,
    },
    /// The table of layouts and servers.
    #[n(10)]
    Placement,

    /// An entry of a folder.
    #[n(20)]
    Lookup {
        /// The folder.
        #[n(0)]
        parent: Ino,
        /// The name; `..` is answered with the parent.
        #[n(1)]
        name: Raw,
    },
    /// Attributes.
    #[n(21)]
    GetAttr {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
    },
    /// † Change attributes.
    #[n(22)]
    SetAttr {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
        /// To this.
        #[n(1)]
        set: SetAttr,
    },
    /// Target of a symlink.
    #[n(23)]
    ReadLink {
        /// The symlink.
        #[n(0)]
        ino: Ino,
    },
    /// † Make a file, folder, symlink or other.
    #[n(24)]
    Make(#[n(0)] Make),
    /// † One more name for an inode.
    #[n(25)]
    Link {
        /// The inode.
        #[n(0)]
        ino: Ino,
        /// The folder.
        #[n(1)]
        parent: Ino,
        /// The name.
        #[n(2)]
        name: Raw,
    },
    /// † Remove a name that is not a folder's.
    #[n(26)]
    Unlink {
        /// The folder.
        #[n(0)]
        parent: Ino,
        /// The name.
        #[n(1)]
        name: Raw,
        /// The session knows the inode behind the name, and that nobody here has it open.
        #[n(2)]
        idle: Option<Ino>,
    },
    /// † Remove an empty folder.
    #[n(27)]
    Rmdir {
        /// The folder it is in.
        #[n(0)]
        parent: Ino,
        /// Its name.
        #[n(1)]
        name: Raw,
    },
    /// † Rename, atomically.
    #[n(28)]
    Rename {
        /// From this folder.
        #[n(0)]
        parent: Ino,
        /// This name.
        #[n(1)]
        name: Raw,
        /// To this folder.
        #[n(2)]
        new_parent: Ino,
        /// And this name.
        #[n(3)]
        new_name: Raw,
        /// Bits of [`rename`].
        #[n(4)]
        flags: u32,
    },
    /// Entries of a folder in the order of their cookies.
    #[n(29)]
    ReadDir {
        /// The folder.
        #[n(0)]
        ino: Ino,
        /// Begin after this cookie; 0 from the start.
        #[n(1)]
        cookie: u64,
        /// At most this many.
        #[n(2)]
        limit: u32,
        /// With attributes.
        #[n(3)]
        plus: bool,
    },
    /// All extended attributes.
    #[n(30)]
    Xattrs {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
    },
    /// † Set one extended attribute.
    #[n(31)]
    SetXattr {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
        /// The name.
        #[n(1)]
        name: Raw,
        /// The value.
        #[n(2)]
        value: Raw,
        /// XATTR_CREATE 1, XATTR_REPLACE 2.
        #[n(3)]
        flags: u32,
    },
    /// † Remove one extended attribute.
    #[n(32)]
    RemoveXattr {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
        /// The name.
        #[n(1)]
        name: Raw,
    },
    /// A data lease: READ or WRITE is asked for; SHARED may be what comes back. Waits for recalls.
    #[n(33)]
    OpenData {
        /// The file.
        #[n(0)]
        ino: Ino,
        /// To write, else to read.
        #[n(1)]
        write: bool,
    },
    /// Extents of a range.
    #[n(34)]
    Extents {
        /// The file.
        #[n(0)]
        ino: Ino,
        /// From here.
        #[n(1)]
        from: u64,
        /// To here, exclusive.
        #[n(2)]
        to: u64,
    },
    /// † New content.
    #[n(35)]
    Commit(#[n(0)] Commit),
    /// † Share extents of one file with another (or itself).
    #[n(36)]
    CopyRange {
        /// From this file.
        #[n(0)]
        from: Ino,
        /// From here.
        #[n(1)]
        from_offset: u64,
        /// To this file.
        #[n(2)]
        to: Ino,
        /// To here.
        #[n(3)]
        to_offset: u64,
        /// How many bytes; cut at the end of the source.
        #[n(4)]
        len: u64,
        /// The number of the grant on `to`.
        #[n(5)]
        grant: u64,
        /// When.
        #[n(6)]
        mtime: Option<Time>,
    },
    /// † Take or release a lock. With `wait` the answer may take until the deadline; the client asks again.
    #[n(37)]
    Lock {
        /// The file.
        #[n(0)]
        ino: Ino,
        /// What.
        #[n(1)]
        lock: FileLock,
        /// Wait for it.
        #[n(2)]
        wait: bool,
    },
    /// Who would be in the way of this lock.
    #[n(38)]
    GetLock {
        /// The file.
        #[n(0)]
        ino: Ino,
        /// What.
        #[n(1)]
        lock: FileLock,
    },
    /// † Orphans that are not open here any more.
    #[n(39)]
    Release {
        /// The inodes, at most [`RELEASE_MAX`].
        #[n(0)]
        inos: Vec<Ino>,
    },
    /// Figures of the volume.
    #[n(40)]
    StatFs,
    /// † How new content of a file is stored, or of everything made in a folder from now on. Answers [`Done::Attr`]; who may
    /// ask (the owner, root) is checked by the client, as for SetAttr.
    #[n(41)]
    SetPolicy {
        /// Of this inode.
        #[n(0)]
        ino: Ino,
        /// To this; empty: as the volume says.
        #[n(1)]
        policy: Policy,
    },

    /// A data server joins or reports; answers [`Done::Joined`].
    #[n(60)]
    Heartbeat(#[n(0)] Heartbeat),
    /// Figures of the cluster.
    #[n(61)]
    Status,
    /// All sessions.
    #[n(62)]
    Sessions,
    /// End somebody's session now.
    #[n(63)]
    Evict {
        /// Whose.
        #[n(0)]
        session: SessionId,
    },
    /// Check a part of the metadata; begin with an empty cursor, go on with the one answered.
    #[n(64)]
    Check {
        /// Where to go on.
        #[n(0)]
        cursor: Raw,
    },
    /// Which of these blocks does a record name?
    #[n(65)]
    KnownBlocks {
        /// The blocks in question.
        #[n(0)]
        blocks: Vec<BlockId>,
    },
    /// Which of these pieces of a server does nobody need? (for fsck)
    #[n(88)]
    Strays {
        /// Who holds them.
        #[n(0)]
        server: ServerId,
        /// The pieces in question.
        #[n(1)]
        pieces: Vec<(BlockId, u8)>,
    },
    /// Live block records in the order of ids (for fsck and gc).
    #[n(66)]
    ListBlocks {
        /// Begin after this one.
        #[n(0)]
        after: Option<BlockId>,
        /// At most this many.
        #[n(1)]
        limit: u32,
    },
    /// Files with the blocks that hold their bytes, in the order of volumes and inodes (for fsck). Answers [`Done::Files`].
    #[n(89)]
    ListFiles {
        /// Where to go on; empty at first.
        #[n(0)]
        cursor: Raw,
        /// Look at this many extents at most.
        #[n(1)]
        limit: u32,
    },
    /// The names in a folder, in their order (for fsck). Answers [`Done::Names`].
    #[n(90)]
    ListNames {
        /// Of this volume.
        #[n(0)]
        volume: VolumeId,
        /// The folder.
        #[n(1)]
        folder: Ino,
        /// Begin after this name.
        #[n(2)]
        after: Raw,
        /// At most this many.
        #[n(3)]
        limit: u32,
    },
    /// Collect now what can be collected: dead blocks, ranges of ended sessions. Answers what is left.
    #[n(67)]
    Collect,

    /// Volumes: all but List change durably before the answer. Answers [`Done::Volumes`].
    #[n(80)]
    Volume(#[n(0)] VolumeOp),
    /// Move everything off a server, or stop that.
    #[n(81)]
    Drain {
        /// Which.
        #[n(0)]
        server: ServerId,
        /// Begin, else stop.
        #[n(1)]
        on: bool,
    },
    /// Forget a server. Refused while data needs it, unless forced.
    #[n(82)]
    RemoveServer {
        /// Which.
        #[n(0)]
        server: ServerId,
        /// Even if data is lost with it.
        #[n(1)]
        force: bool,
    },
    /// Even out the servers now. Answers [`Done::Repair`].
    #[n(83)]
    Rebalance {
        /// From now on also by itself whenever servers join or leave; none: as it was.
        #[n(0)]
        auto: Option<bool>,
    },
    /// Read and check every piece: begin, or stop. Answers [`Done::Repair`].
    #[n(84)]
    Scrub {
        /// Begin (or go on), else stop.
        #[n(0)]
        on: bool,
    },
    /// How repair, moves and scrub go on. Answers [`Done::Repair`].
    #[n(85)]
    Repair {
        /// Bytes per second that they may take on each server from now on; none: as it was; 0: the default.
        #[n(0)]
        rate: Option<u64>,
    },
    /// Pieces that a reader or a scrub found bad or missing. At most [`BAD_MAX`].
    #[n(86)]
    ReportBad {
        /// The pieces.
        #[n(0)]
        pieces: Vec<BadPiece>,
    },
    /// What each session does.
    #[n(87)]
    Top,
    /// The metadata service itself: who leads, how far its log is, who follows.
    #[n(70)]
    MetaStatus,
    /// The next piece of a dump; begin with an empty cursor, go on with the one answered. The last piece can be asked for
    /// again.
    #[n(100)]
    Dump {
        /// Where to go on.
        #[n(0)]
        cursor: Raw,
    },
}

/// Most pieces in one ReportBad or heartbeat.
pub const BAD_MAX: usize = 1_024;

/// The start of a session.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct OpenSession {
    /// Volume name; empty for the default one.
    #[n(0)]
    pub volume: String,
    /// Host name, for people.
    #[n(1)]
    pub host: String,
    /// Process, for people.
    #[n(2)]
    pub pid: u32,
    /// Mount point, for people.
    #[n(3)]
    pub mount: String,
    /// Program version, for people.
    #[n(4)]
    pub version: String,
}

/// A data server's report.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Heartbeat {
    /// Its number; 0 the first time.
    #[n(0)]
    pub server: ServerId,
    /// Drawn at random by the store when made, so that a server is recognised when its number was lost.
    #[n(1)]
    pub store: u64,
    /// The cluster its disk belongs to; 0 for a fresh one.
    #[n(2)]
    pub cluster: ClusterId,
    /// HOST:PORT where it listens.
    #[n(3)]
    pub addr: String,
    /// Bytes in all.
    #[n(4)]
    pub total: u64,
    /// Bytes free for pieces.
    #[n(5)]
    pub free: u64,
    /// Bytes that pieces take.
    #[n(6)]
    pub used: u64,
    /// Pieces.
    #[n(7)]
    pub pieces: u64,
    /// Failure domain.
    #[n(8)]
    pub zone: String,
    /// It stops now, on purpose.
    #[n(9)]
    pub leaving: bool,
    /// Its disks; none from servers that know only one.
    #[n(10)]
    #[cbor(default)]
    pub disks: Vec<DiskInfo>,
    /// Pieces that it found bad since its last heartbeat; at most [`BAD_MAX`].
    #[n(11)]
    #[cbor(default)]
    pub bad: Vec<(BlockId, u8)>,
    /// What it did since its start.
    #[n(12)]
    #[cbor(default)]
    pub load: Load,
    /// What sessions did since its start.
    #[n(13)]
    #[cbor(default)]
    pub sessions: Vec<SessionLoad>,
    /// The placement's version that it knows; the answer has the versions of groups if there is a newer one.
    #[n(14)]
    #[cbor(default)]
    pub placement: u64,
}
