//! The words between vfs and its callers.

use std::time::Duration;

use bytes::Bytes;
use torchfs_proto::Ino;
use torchfs_proto::attr::{Attr, Kind};

/// Names an open file or folder until it is released.
pub type Fh = u64;

/// On whose behalf something is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Process.
    pub pid: u32,
}

/// Attributes and how long the kernel may trust them: never beyond the lease; zero means not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The attributes, with what was written here and is not committed yet.
    pub attr: Attr,
    /// How long they may be kept.
    pub ttl: Duration,
}

/// The answer to a lookup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// What the name stands for; `None` is a negative entry.
    pub node: Option<Node>,
    /// How long the entry, or its absence, may be kept.
    pub entry_ttl: Duration,
}

/// An open file or folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Its name from now on.
    pub fh: Fh,
    /// Reads and writes go past the kernel's page cache.
    pub direct: bool,
    /// Pages that the kernel has of it are still good (for a folder: its entries may be cached).
    pub keep_cache: bool,
}

/// How a write is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriteFlags {
    /// At the end of the file, whatever the offset says.
    pub append: bool,
    /// Durable before it returns.
    pub sync: bool,
    /// Clear suid, sgid and capabilities.
    pub kill_privileges: bool,
    /// Written back from shared pages, by nobody in particular.
    pub page_cache: bool,
}

/// One entry of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirItem {
    /// The name.
    pub name: Bytes,
    /// The inode.
    pub ino: Ino,
    /// Its kind.
    pub kind: Kind,
    /// Where the listing goes on after it.
    pub cookie: u64,
    /// Its attributes and how long the entry may be kept, where asked for and known.
    pub node: Option<(Node, Duration)>,
}

/// What lseek looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    /// The next byte that is not in a hole.
    Data,
    /// The next hole; the end of the file is one.
    Hole,
}

/// Settings of a [`crate::Vfs`].
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes written and not yet committed, over all files; writers wait beyond.
    pub dirty_max: u64,
    /// The same for one file.
    pub dirty_file_max: u64,
    /// Commit when this much of a file waits in sealed blocks.
    pub commit_bytes: u64,
    /// Commit when a file's dirty data is in this many pieces.
    pub commit_pieces: usize,
    /// Dirty data is committed after this long, fsync or not.
    pub commit_after: Duration,
    /// Blocks of this node that are put at the same time.
    pub puts_max: usize,
    /// Read ahead at most this far.
    pub readahead_max: u64,
    /// Blocks of this node that are fetched ahead at the same time, unless they would fill more than half of the memory for chunks.
    pub prefetches_max: usize,
    /// Memory for chunks of blocks.
    pub cache_bytes: u64,
    /// Entries of folders kept, over all folders.
    pub entries_max: usize,
    /// Extents kept of one file.
    pub extents_max: usize,
    /// The kernel may keep attributes and entries at most this long, even if the lease lasts longer.
    pub ttl_max: Duration,
    /// An acknowledgement of a recall waits at most this long for the kernel's invalidations.
    pub settle_max: Duration,
    /// How often a data lease is asked for that is taken away at once; a tick apart.
    pub open_tries: u32,
    /// `close` does not wait for durability.
    pub writeback: bool,
    /// A file of at least this many extents that are small on average is rewritten when it is quiet; 0 turns it off.
    pub compact_extents: usize,
    /// How long a file must be quiet for that.
    pub compact_after: Duration,
    /// How often timers are looked at.
    pub tick: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            dirty_max: 256 << 20,
            dirty_file_max: 128 << 20,
            commit_bytes: 32 << 20,
            commit_pieces: 1_024,
            commit_after: Duration::from_secs(4),
            puts_max: 32,
            readahead_max: 32 << 20,
            prefetches_max: 32,
            cache_bytes: 256 << 20,
            entries_max: 1 << 20,
            extents_max: 64 << 10,
            ttl_max: Duration::from_secs(3600),
            settle_max: Duration::from_secs(2),
            open_tries: 600,
            writeback: false,
            compact_extents: 64,
            compact_after: Duration::from_secs(30),
            tick: Duration::from_millis(100),
        }
    }
}
