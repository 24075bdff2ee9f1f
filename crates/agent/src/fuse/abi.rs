//! Numbers of the kernel's FUSE protocol, version 7.45: opcodes, flags, sizes of the fixed parts.
//!
//! Requests and replies are rows of native-endian integers without holes that matter, so nothing here is laid
//! over raw memory: [`super::request`] reads the fields one by one and [`super::reply`] writes them one by one.
//!
//! # Invariants
//! - A number here is the kernel's and never ours; `tests` in [`super::request`] and [`super::reply`] hold golden bytes.
//!
//! # Not here
//! - What we ask for at INIT: [`super::init`].

/// The protocol's major version.
pub const VERSION_MAJOR: u32 = 7;
/// The newest minor version whose meaning this crate knows.
pub const VERSION_MINOR: u32 = 45;
/// The oldest minor version served: 7.36 (Linux 5.17) brought the 64-bit INIT flags.
pub const VERSION_MINOR_MIN: u32 = 36;

/// The minor version that brought the notification INC_EPOCH.
pub const VERSION_MINOR_EPOCH: u32 = 44;

/// The node id of the mount's root.
pub const ROOT_ID: u64 = 1;
/// Bytes of the header before every request.
pub const IN_HEADER: usize = 40;
/// Bytes of the header before every reply and notification.
pub const OUT_HEADER: usize = 16;
/// Bytes before the payload of a WRITE: its header and its fixed part.
pub const WRITE_HEADER: usize = IN_HEADER + 40;
/// The kernel refuses smaller reads of the device.
pub const READ_MIN: usize = 8192;
/// The longest name of an entry the kernel sends (since Linux 6.13; 1024 before).
pub const NAME_MAX: usize = 4096;

/// Set in `unique` of an INTERRUPT; the rest names the interrupted request.
pub const UNIQUE_INTERRUPT: u64 = 1;
/// Set in `unique` of a request that was handed out before, after a RESEND notification.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// Opcodes of requests.
#[allow(missing_docs)] // the names are the protocol's
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BMAP: u32 = 37;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const POLL: u32 = 40;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Feature bits of INIT: the low word travels in `flags`, the high word in `flags2`.
#[allow(missing_docs)] // the names are the protocol's
pub mod feature {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Bits of `valid` in SETATTR.
#[allow(missing_docs)] // the names are the protocol's
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags in replies to OPEN, OPENDIR and CREATE.
pub mod fopen {
    /// Reads and writes of this open go past the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// The page cache of the file stays at this open.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// The kernel may keep the folder's listing.
    pub const CACHE_DIR: u32 = 1 << 3;
    /// No FLUSH at close.
    pub const NOFLUSH: u32 = 1 << 5;
    /// Direct writes to one inode may run at once.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Small flags of single requests.
pub mod flag {
    /// GETATTR and STATX: the file handle is valid.
    pub const GETATTR_FH: u32 = 1 << 0;
    /// READ: the lock owner is valid.
    pub const READ_LOCKOWNER: u32 = 1 << 1;
    /// WRITE: pages from the page cache; the handle is a guess.
    pub const WRITE_CACHE: u32 = 1 << 0;
    /// WRITE: the lock owner is valid.
    pub const WRITE_LOCKOWNER: u32 = 1 << 1;
    /// WRITE: clear set-user-id and set-group-id.
    pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
    /// OPEN and CREATE: clear set-user-id and set-group-id.
    pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
    /// RELEASE: the file should be flushed.
    pub const RELEASE_FLUSH: u32 = 1 << 0;
    /// RELEASE: drop the flock of this open file.
    pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
    /// FSYNC: the data only.
    pub const FSYNC_DATA: u32 = 1 << 0;
    /// GETLK, SETLK, SETLKW: a flock and not an fcntl lock.
    pub const LK_FLOCK: u32 = 1 << 0;
    /// Notification INVAL_ENTRY: let the entry expire instead of dropping it.
    pub const EXPIRE_ONLY: u32 = 1 << 0;
}

/// Codes of notifications, which travel in the `error` field of a reply header whose `unique` is 0.
#[allow(missing_docs)] // the names are the protocol's
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    pub const DELETE: i32 = 6;
    pub const RESEND: i32 = 7;
    pub const INC_EPOCH: i32 = 8;
}
