//! statfs: figures of a volume.

use torchfs_proto::msg::meta::VolumeUse;
use torchfs_proto::record::Counters;

/// What an inode takes at most in the metadata store, for the figure of those that can still be made.
const INODE_BYTES: u64 = 600;

/// The figures, from what the volume counts, the data servers' room with redundancy taken off, and the room below the
/// metadata.
pub fn volume_use(counters: &Counters, total: u64, free: u64, meta_free: u64) -> VolumeUse {
    VolumeUse { total, free: free.min(total), inodes: counters.inodes, inodes_free: meta_free / INODE_BYTES }
}
