//! Keys of the metadata store: volume first, then a space, then what the space is ordered by.
//!
//! Numbers are big-endian, so the order of the bytes is the order of things: the entries of a folder lie together, the
//! extents of a file lie in the order of their offsets, and a whole volume is one range.
//!
//! # Invariants
//! - Numbers of spaces are on disk: they are added, never reused.
//! - A key is at most [`KEY_MAX`] bytes.

use crate::msg::meta::LockKind;
use crate::{BlockId, Ino, LayoutId, Seq, ServerId, SessionId, VolumeId};

/// The longest key: volume, space, an inode and a name.
pub const KEY_MAX: usize = 4 + 1 + 8 + crate::attr::NAME_MAX;

/// The volume of the cluster's own records.
pub const CLUSTER: VolumeId = VolumeId(0);

/// What kind of record a key names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum Space {
    /// The store's magic, version and features (cluster).
    Format = 0x01,
    /// Volumes by number (cluster).
    Volume = 0x02,
    /// Data servers by number (cluster).
    Server = 0x03,
    /// Layouts by number (cluster).
    Layout = 0x04,
    /// What the cluster counts (cluster).
    ClusterCounters = 0x05,
    /// Wall time of batches, sparse.
    BatchTime = 0x06,
    /// How repair goes on (cluster).
    Repair = 0x08,
    /// The dump that the store was filled from (cluster).
    Restored = 0x07,
    /// What a volume counts.
    Counters = 0x10,
    /// Inodes.
    Inode = 0x11,
    /// Entries by folder and name.
    Entry = 0x12,
    /// Names by folder and cookie.
    Cookie = 0x13,
    /// Extents by inode and offset.
    Extent = 0x14,
    /// Blocks by id.
    Block = 0x15,
    /// Extended attributes by inode and name.
    Xattr = 0x16,
    /// File locks by inode, kind, session, owner and first byte.
    Lock = 0x17,
    /// Inodes without a name.
    Orphan = 0x18,
    /// Sessions.
    Session = 0x19,
    /// Ranges of block ids by session and first id.
    Range = 0x1a,
    /// Results by session, sequence and step.
    Outcome = 0x1b,
    /// Dead blocks by the time from which they may be deleted.
    DeadBlock = 0x1c,
    /// Dead ranges by first id.
    DeadRange = 0x1d,
    /// Files with extents beyond their end that are still to be removed.
    Cut = 0x1e,
    /// Reserved: records that died, by space, key and the batch they died in.
    History = 0x40,
}

impl Space {
    /// Every space there is.
    pub const ALL: [Space; 24] = [
        Space::Format,
        Space::Volume,
        Space::Server,
        Space::Layout,
        Space::ClusterCounters,
        Space::BatchTime,
        Space::Repair,
        Space::Restored,
        Space::Counters,
        Space::Inode,
        Space::Entry,
        Space::Cookie,
        Space::Extent,
        Space::Block,
        Space::Xattr,
        Space::Lock,
        Space::Orphan,
        Space::Session,
        Space::Range,
        Space::Outcome,
        Space::DeadBlock,
        Space::DeadRange,
        Space::Cut,
        Space::History,
    ];

    /// The space of this number.
    pub fn of(number: u8) -> Option<Space> {
        Space::ALL.into_iter().find(|space| *space as u8 == number)
    }
}

/// A key being written.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Writer(Vec<u8>);

impl Writer {
    fn new(volume: VolumeId, space: Space, more: usize) -> Writer {
        let mut bytes = Vec::with_capacity(5 + more);
        bytes.extend_from_slice(&volume.0.to_be_bytes());
        bytes.push(space as u8);
        Writer(bytes)
    }

    fn u64(mut self, n: u64) -> Writer {
        self.0.extend_from_slice(&n.to_be_bytes());
        self
    }

    fn u32(mut self, n: u32) -> Writer {
        self.0.extend_from_slice(&n.to_be_bytes());
        self
    }

    fn u8(mut self, n: u8) -> Writer {
        self.0.push(n);
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Writer {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// All keys of a space.
pub fn space(volume: VolumeId, space: Space) -> Vec<u8> {
    Writer::new(volume, space, 0).0
}

/// The first key after all keys that begin with this prefix.
pub fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // Only a prefix of 0xff bytes ends here; no volume has that number.
    vec![u8::MAX; KEY_MAX]
}

/// The store's format record.
pub fn format() -> Vec<u8> {
    space(CLUSTER, Space::Format)
}

/// A volume's record.
pub fn volume(id: VolumeId) -> Vec<u8> {
    Writer::new(CLUSTER, Space::Volume, 4).u32(id.0).0
}

/// A data server's record.
pub fn server(id: ServerId) -> Vec<u8> {
    Writer::new(CLUSTER, Space::Server, 4).u32(id.0).0
}

/// A layout's record.
pub fn layout(id: LayoutId) -> Vec<u8> {
    Writer::new(CLUSTER, Space::Layout, 4).u32(id.0).0
}

/// What the cluster counts.
pub fn cluster_counters() -> Vec<u8> {
    space(CLUSTER, Space::ClusterCounters)
}

/// The dump that the store was filled from.
pub fn restored() -> Vec<u8> {
    space(CLUSTER, Space::Restored)
}

/// When a batch was decided.
pub fn batch_time(volume: VolumeId, seq: Seq) -> Vec<u8> {
    Writer::new(volume, Space::BatchTime, 8).u64(seq.0).0
}

/// How repair goes on.
pub fn repair() -> Vec<u8> {
    space(CLUSTER, Space::Repair)
}

/// What a volume counts.
pub fn counters(volume: VolumeId) -> Vec<u8> {
    space(volume, Space::Counters)
}

/// An inode.
pub fn inode(volume: VolumeId, ino: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Inode, 8).u64(ino.0).0
}

/// An entry.
pub fn entry(volume: VolumeId, parent: Ino, name: &[u8]) -> Vec<u8> {
    Writer::new(volume, Space::Entry, 8 + name.len()).u64(parent.0).bytes(name).0
}

/// All entries of a folder.
pub fn entries(volume: VolumeId, parent: Ino) -> Vec<u8> {
    entry(volume, parent, b"")
}

/// The name behind a cookie.
pub fn cookie(volume: VolumeId, parent: Ino, cookie: u64) -> Vec<u8> {
    Writer::new(volume, Space::Cookie, 16).u64(parent.0).u64(cookie).0
}

/// All cookies of a folder.
pub fn cookies(volume: VolumeId, parent: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Cookie, 8).u64(parent.0).0
}

/// An extent by its first byte.
pub fn extent(volume: VolumeId, ino: Ino, offset: u64) -> Vec<u8> {
    Writer::new(volume, Space::Extent, 16).u64(ino.0).u64(offset).0
}

/// All extents of a file.
pub fn extents(volume: VolumeId, ino: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Extent, 8).u64(ino.0).0
}

/// A block.
pub fn block(volume: VolumeId, id: BlockId) -> Vec<u8> {
    Writer::new(volume, Space::Block, 12).bytes(&id.to_bytes()).0
}

/// An extended attribute.
pub fn xattr(volume: VolumeId, ino: Ino, name: &[u8]) -> Vec<u8> {
    Writer::new(volume, Space::Xattr, 8 + name.len()).u64(ino.0).bytes(name).0
}

/// All extended attributes of an inode.
pub fn xattrs(volume: VolumeId, ino: Ino) -> Vec<u8> {
    xattr(volume, ino, b"")
}

/// A file lock.
pub fn lock(
    volume: VolumeId,
    ino: Ino,
    kind: LockKind,
    session: SessionId,
    owner: u64,
    start: u64,
) -> Vec<u8> {
    let kind = match kind {
        LockKind::Posix => 0,
        LockKind::Flock => 1,
    };
    Writer::new(volume, Space::Lock, 33).u64(ino.0).u8(kind).u64(session.0).u64(owner).u64(start).0
}

/// All locks on a file.
pub fn locks(volume: VolumeId, ino: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Lock, 8).u64(ino.0).0
}

/// An inode without a name.
pub fn orphan(volume: VolumeId, ino: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Orphan, 8).u64(ino.0).0
}

/// A session.
pub fn session(volume: VolumeId, id: SessionId) -> Vec<u8> {
    Writer::new(volume, Space::Session, 8).u64(id.0).0
}

/// A range of block ids that a session has.
pub fn range(volume: VolumeId, session: SessionId, first: BlockId) -> Vec<u8> {
    Writer::new(volume, Space::Range, 20).u64(session.0).bytes(&first.to_bytes()).0
}

/// All ranges of a session.
pub fn ranges(volume: VolumeId, session: SessionId) -> Vec<u8> {
    Writer::new(volume, Space::Range, 8).u64(session.0).0
}

/// The result of a keyed request.
pub fn outcome(volume: VolumeId, session: SessionId, seq: u64, step: u32) -> Vec<u8> {
    Writer::new(volume, Space::Outcome, 20).u64(session.0).u64(seq).u32(step).0
}

/// All results of a session.
pub fn outcomes(volume: VolumeId, session: SessionId) -> Vec<u8> {
    Writer::new(volume, Space::Outcome, 8).u64(session.0).0
}

/// A dead block in the order of the time (ms since 1970) from which it may be deleted.
pub fn dead_block(volume: VolumeId, due_ms: u64, id: BlockId) -> Vec<u8> {
    Writer::new(volume, Space::DeadBlock, 20).u64(due_ms).bytes(&id.to_bytes()).0
}

/// A dead range.
pub fn dead_range(volume: VolumeId, first: BlockId) -> Vec<u8> {
    Writer::new(volume, Space::DeadRange, 12).bytes(&first.to_bytes()).0
}

/// A file with extents beyond its end.
pub fn cut(volume: VolumeId, ino: Ino) -> Vec<u8> {
    Writer::new(volume, Space::Cut, 8).u64(ino.0).0
}

/// A key taken apart, for walks over the whole store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parts<'a> {
    /// Its volume.
    pub volume: VolumeId,
    /// The number of its space.
    pub space: u8,
    /// What follows.
    pub rest: &'a [u8],
}

impl<'a> Parts<'a> {
    /// Takes a key apart; `None` if it is none of ours.
    pub fn of(key: &'a [u8]) -> Option<Parts<'a>> {
        let (volume, rest) = key.split_first_chunk::<4>()?;
        let (space, rest) = rest.split_first()?;
        Some(Parts { volume: VolumeId(u32::from_be_bytes(*volume)), space: *space, rest })
    }

    /// Whether the key belongs to this space.
    pub fn is(&self, space: Space) -> bool {
        self.space == space as u8
    }

    /// A number at this offset of what follows.
    pub fn u64_at(&self, at: usize) -> Option<u64> {
        let bytes = self.rest.get(at..at.checked_add(8)?)?;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    }

    /// A block id at this offset of what follows.
    pub fn block_at(&self, at: usize) -> Option<BlockId> {
        let bytes = self.rest.get(at..at.checked_add(12)?)?;
        Some(BlockId::from_bytes(bytes.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_the_order_of_what_they_name() {
        let v = VolumeId(1);
        assert!(extent(v, Ino(1), 5) < extent(v, Ino(1), 1 << 40));
        assert!(extent(v, Ino(1), u64::MAX) < extent(v, Ino(2), 0));
        assert!(
            dead_block(v, 9, BlockId { incarnation: 9, counter: 9 }) < dead_block(v, 10, BlockId::default())
        );
        assert!(entry(v, Ino(3), b"z") < after(&entries(v, Ino(3))));
        assert!(after(&entries(v, Ino(3))) <= entries(v, Ino(4)));
        assert!(entries(v, Ino(u64::MAX)) < after(&space(v, Space::Entry)));
    }

    #[test]
    fn keys_are_these_bytes() {
        assert_eq!(inode(VolumeId(1), Ino(2)), [0, 0, 0, 1, 0x11, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(entry(VolumeId(1), Ino(2), b"a"), [0, 0, 0, 1, 0x12, 0, 0, 0, 0, 0, 0, 0, 2, b'a']);
        assert_eq!(format(), [0, 0, 0, 0, 1]);
        assert_eq!(entry(VolumeId(1), Ino(2), &[b'x'; 255]).len(), KEY_MAX);
    }

    #[test]
    fn keys_come_apart_again() {
        let key = dead_block(VolumeId(7), 99, BlockId { incarnation: 3, counter: 4 });
        let parts = Parts::of(&key).unwrap();
        assert!(parts.is(Space::DeadBlock));
        assert_eq!(parts.u64_at(0), Some(99));
        assert_eq!(parts.block_at(8), Some(BlockId { incarnation: 3, counter: 4 }));
        assert_eq!(parts.block_at(9), None);
        assert_eq!(Parts::of(&[0, 0, 0]), None);
    }
}
