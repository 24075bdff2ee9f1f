//! Attributes of an inode as they travel and as people see them.

use minicbor::{Decode, Encode};

use crate::{Ino, VolumeId};

/// Raw bytes that travel as a byte string: names, symlink targets, attribute values.
pub type Raw = minicbor::bytes::ByteVec;

/// Longest name of an entry or extended attribute.
pub const NAME_MAX: usize = 255;
/// Longest symlink target.
pub const TARGET_MAX: usize = 4095;
/// Largest value of one extended attribute.
pub const XATTR_MAX: usize = 64 << 10;
/// Largest sum of names and values of one inode's extended attributes.
pub const XATTRS_MAX: usize = 256 << 10;
/// Largest file.
pub const SIZE_MAX: u64 = i64::MAX as u64;
/// Most links to one inode.
pub const LINK_MAX: u32 = 65_000;

/// A point in time: seconds since 1970, negative before, and nanoseconds after that second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash, Encode, Decode)]
pub struct Time {
    /// Whole seconds, rounded down.
    #[n(0)]
    pub secs: i64,
    /// 0 to 999,999,999.
    #[n(1)]
    pub nanos: u32,
}

impl Time {
    /// From nanoseconds since 1970.
    pub fn from_ns(ns: i64) -> Time {
        Time { secs: ns.div_euclid(1_000_000_000), nanos: ns.rem_euclid(1_000_000_000) as u32 }
    }
}

/// What an inode is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Encode, Decode)]
#[cbor(index_only)]
pub enum Kind {
    /// A regular file.
    #[n(0)]
    File,
    /// A folder.
    #[n(1)]
    Dir,
    /// A symbolic link.
    #[n(2)]
    Symlink,
    /// A named pipe.
    #[n(3)]
    Fifo,
    /// A unix socket.
    #[n(4)]
    Socket,
    /// A character device.
    #[n(5)]
    CharDev,
    /// A block device.
    #[n(6)]
    BlockDev,
}

impl Kind {
    /// The S_IFMT bits of `st_mode`.
    pub fn mode_bits(self) -> u32 {
        match self {
            Kind::File => 0o100_000,
            Kind::Dir => 0o040_000,
            Kind::Symlink => 0o120_000,
            Kind::Fifo => 0o010_000,
            Kind::Socket => 0o140_000,
            Kind::CharDev => 0o020_000,
            Kind::BlockDev => 0o060_000,
        }
    }

    /// The kind that these S_IFMT bits name.
    pub fn from_mode(mode: u32) -> Option<Kind> {
        [Kind::File, Kind::Dir, Kind::Symlink, Kind::Fifo, Kind::Socket, Kind::CharDev, Kind::BlockDev]
            .into_iter()
            .find(|kind| kind.mode_bits() == mode & 0o170_000)
    }
}

/// The attributes of one inode.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Attr {
    /// The inode.
    #[n(0)]
    pub ino: Ino,
    /// Its kind.
    #[n(1)]
    pub kind: Kind,
    /// The lower twelve bits of the mode.
    #[n(2)]
    pub mode: u32,
    /// Links; 0 for an open file without a name.
    #[n(3)]
    pub nlink: u32,
    /// Owner.
    #[n(4)]
    pub uid: u32,
    /// Group.
    #[n(5)]
    pub gid: u32,
    /// Device number of a device.
    #[n(6)]
    pub rdev: u32,
    /// Length in bytes; for a folder a figure that grows with its entries.
    #[n(7)]
    pub size: u64,
    /// Bytes that extents hold, without holes.
    #[n(8)]
    pub stored: u64,
    /// Last access (kept only by explicit utimens; atime is off).
    #[n(9)]
    pub atime: Time,
    /// Last change of content.
    #[n(10)]
    pub mtime: Time,
    /// Last change of anything.
    #[n(11)]
    pub ctime: Time,
    /// Birth.
    #[n(12)]
    pub btime: Time,
    /// Rises with each change of content.
    #[n(13)]
    pub data_version: u64,
    /// Rises with each change of anything.
    #[n(14)]
    pub change: u64,
    /// Bits of [`flags`].
    #[n(15)]
    pub flags: u32,
    /// Distinguishes lives of one inode number; numbers are not reused, so it is 1.
    #[n(16)]
    pub generation: u64,
    /// Layout of new blocks, where it differs from the volume's; see [`crate::layout::Placement::current`].
    #[n(17)]
    pub layout: Option<crate::LayoutId>,
}

/// Bits of [`Attr::flags`].
pub mod flags {
    /// The inode has extended attributes; without this bit nobody needs to ask.
    pub const XATTRS: u32 = 1;
    /// The content never changes again.
    pub const SEALED: u32 = 2;
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum SetTime {
    /// The service's present.
    #[n(0)]
    Now,
    /// A given time.
    #[n(1)]
    At(#[n(0)] Time),
}

/// A change of attributes; `None` leaves things as they are.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct SetAttr {
    /// Mode bits (lower twelve).
    #[n(0)]
    pub mode: Option<u32>,
    /// Owner.
    #[n(1)]
    pub uid: Option<u32>,
    /// Group.
    #[n(2)]
    pub gid: Option<u32>,
    /// Truncate or extend to this length.
    #[n(3)]
    pub size: Option<u64>,
    /// Access time.
    #[n(4)]
    pub atime: Option<SetTime>,
    /// Modification time.
    #[n(5)]
    pub mtime: Option<SetTime>,
    /// Status time, where the kernel gives one.
    #[n(6)]
    pub ctime: Option<SetTime>,
    /// Clear suid, sgid (where group execution is set) and file capabilities, as a write by somebody without rights does.
    #[n(7)]
    pub kill_privileges: bool,
}

/// What a volume is, as a mount sees it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct VolumeInfo {
    /// Its number.
    #[n(0)]
    pub id: VolumeId,
    /// Its name.
    #[n(1)]
    pub name: String,
    /// Largest block, 256 KiB to 16 MiB.
    #[n(2)]
    pub block_size: u32,
    /// How chunks are compressed.
    #[n(3)]
    pub compression: Compression,
    /// Layout for new blocks.
    #[n(4)]
    pub layout: crate::LayoutId,
}

/// How chunks are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
#[cbor(index_only)]
pub enum Compression {
    /// Stored as they are.
    #[n(0)]
    None,
    /// Fast.
    #[default]
    #[n(1)]
    Lz4,
    /// Smaller.
    #[n(2)]
    Zstd,
}
