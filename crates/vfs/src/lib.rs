//! POSIX meaning without FUSE: handles, leases, the write path.
//!
//! [`Vfs`] turns the words of a kernel (or of any other program) into calls to the metadata service and to data servers, and
//! remembers the answers for as long as leases allow. A read goes handle → extents → cache or blocks; a write goes into
//! a buffer, is sealed into immutable blocks that are put in the background, and becomes visible to others with one commit
//! that names them.
//!
//! # Invariants
//! - Nothing is answered from memory without a lease that holds now, and no answer tells the kernel to trust it longer.
//! - Each node (inode known here) has one lock; it is never held across an await, and never together with another's.
//! - Content of a file changes at the service in turns: a commit, a truncation, a punch, a copy; one at a time per file.
//! - A future may be dropped at any time. What must not stop halfway is finished in the background.
//! - What is buffered has a bound, and so has everything else that is kept.
//!
//! # Not here
//! FUSE and errno (agent), wire and retries (client), what is kept of blocks (cache), who may do what (the kernel checks
//! permissions by mode, owner and group; the service checks what only it can know).

mod api;
#[allow(dead_code)]
mod extents;
mod host;
#[allow(dead_code)]
mod overlay;
#[allow(dead_code)]
mod signal;
#[cfg(test)]
mod testing;

use std::sync::Arc;

use bytes::Bytes;
use torchfs_client::{Blocks, Meta};
use torchfs_proto::attr::{Kind, SetAttr};
use torchfs_proto::msg::meta::{FileLock, VolumeUse};
use torchfs_proto::{Code, Ino, Result};

pub use api::{Caller, Config, DirItem, Fh, Found, Node, Opened, Seek, WriteFlags};
pub use host::{Host, NoHost};

/// A mounted volume. Cheap to clone.
#[derive(Clone)]
pub struct Vfs {
    _inner: Arc<Inner>,
}

struct Inner {
    _config: Config,
    _meta: Arc<Meta>,
    _blocks: Arc<Blocks>,
    _host: Arc<dyn Host>,
}

impl Vfs {
    /// Serves the volume that `meta` has a session on.
    pub fn new(config: Config, meta: Arc<Meta>, blocks: Arc<Blocks>, host: Arc<dyn Host>) -> Vfs {
        Vfs { _inner: Arc::new(Inner { _config: config, _meta: meta, _blocks: blocks, _host: host }) }
    }

    /// The entry of a folder; each positive answer adds one reference of the kernel's.
    pub async fn lookup(&self, _parent: Ino, _name: &[u8]) -> Result<Found> {
        Err(Code::Unsupported.into())
    }

    /// Attributes.
    pub async fn getattr(&self, _ino: Ino, _fh: Option<Fh>) -> Result<Node> {
        Err(Code::Unsupported.into())
    }

    /// Changes attributes, the length among them.
    pub async fn setattr(&self, _ino: Ino, _fh: Option<Fh>, _set: SetAttr) -> Result<Node> {
        Err(Code::Unsupported.into())
    }

    /// The target of a symlink.
    pub async fn readlink(&self, _ino: Ino) -> Result<Bytes> {
        Err(Code::Unsupported.into())
    }

    /// Makes a folder, symlink, device, pipe, socket or closed file; adds one reference.
    #[allow(clippy::too_many_arguments)]
    pub async fn make(
        &self,
        _caller: Caller,
        _parent: Ino,
        _name: &[u8],
        _kind: Kind,
        _mode: u32,
        _rdev: u32,
        _target: &[u8],
    ) -> Result<Node> {
        Err(Code::Unsupported.into())
    }

    /// Makes and opens a file; adds one reference.
    pub async fn create(
        &self,
        _caller: Caller,
        _parent: Ino,
        _name: &[u8],
        _mode: u32,
        _flags: i32,
    ) -> Result<(Node, Opened)> {
        Err(Code::Unsupported.into())
    }

    /// Makes and opens a file without a name; adds one reference.
    pub async fn tmpfile(
        &self,
        _caller: Caller,
        _parent: Ino,
        _mode: u32,
        _flags: i32,
    ) -> Result<(Node, Opened)> {
        Err(Code::Unsupported.into())
    }

    /// One more name; adds one reference.
    pub async fn link(&self, _ino: Ino, _parent: Ino, _name: &[u8]) -> Result<Node> {
        Err(Code::Unsupported.into())
    }

    /// Removes a name that is not a folder's.
    pub async fn unlink(&self, _parent: Ino, _name: &[u8]) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Removes an empty folder.
    pub async fn rmdir(&self, _parent: Ino, _name: &[u8]) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Renames; flags as in [`torchfs_proto::msg::meta::rename`].
    pub async fn rename(
        &self,
        _parent: Ino,
        _name: &[u8],
        _new_parent: Ino,
        _new_name: &[u8],
        _flags: u32,
    ) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Opens a file.
    pub async fn open(&self, _ino: Ino, _flags: i32) -> Result<Opened> {
        Err(Code::Unsupported.into())
    }

    /// Reads; short only at the end of the file.
    pub async fn read(&self, _ino: Ino, _fh: Fh, _offset: u64, _len: u32, _flags: i32) -> Result<Vec<Bytes>> {
        Err(Code::Unsupported.into())
    }

    /// Writes all of it or fails.
    pub async fn write(
        &self,
        _ino: Ino,
        _fh: Fh,
        _offset: u64,
        _data: Bytes,
        _flags: WriteFlags,
    ) -> Result<u32> {
        Err(Code::Unsupported.into())
    }

    /// A descriptor is closed: durable after writing, and the owner's fcntl locks go.
    pub async fn flush(&self, _ino: Ino, _fh: Fh, _lock_owner: u64) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// The last descriptor is closed.
    pub async fn release(&self, _ino: Ino, _fh: Fh, _flock_owner: Option<u64>) {}

    /// Durable when it returns.
    pub async fn fsync(&self, _ino: Ino, _fh: Fh, _data_only: bool) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// The folder's entries are durable when it returns.
    pub async fn fsyncdir(&self, _ino: Ino) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Everything is durable when it returns.
    pub async fn syncfs(&self) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Opens a folder for listing.
    pub async fn opendir(&self, _ino: Ino) -> Result<Opened> {
        Err(Code::Unsupported.into())
    }

    /// Entries after a cookie, at most `want`; none at the end.
    pub async fn readdir(
        &self,
        _ino: Ino,
        _fh: Fh,
        _cookie: u64,
        _want: usize,
        _plus: bool,
    ) -> Result<Vec<DirItem>> {
        Err(Code::Unsupported.into())
    }

    /// A listing is done.
    pub async fn releasedir(&self, _fh: Fh) {}

    /// Figures of the volume.
    pub async fn statfs(&self) -> Result<VolumeUse> {
        Err(Code::Unsupported.into())
    }

    /// One extended attribute.
    pub async fn getxattr(&self, _ino: Ino, _name: &[u8]) -> Result<Bytes> {
        Err(Code::Unsupported.into())
    }

    /// Names of extended attributes.
    pub async fn listxattr(&self, _ino: Ino) -> Result<Vec<Bytes>> {
        Err(Code::Unsupported.into())
    }

    /// Sets an extended attribute; XATTR_CREATE 1, XATTR_REPLACE 2.
    pub async fn setxattr(&self, _ino: Ino, _name: &[u8], _value: &[u8], _flags: u32) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Removes an extended attribute.
    pub async fn removexattr(&self, _ino: Ino, _name: &[u8]) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// The lock that is in the way.
    pub async fn getlk(&self, _ino: Ino, _lock: FileLock) -> Result<Option<FileLock>> {
        Err(Code::Unsupported.into())
    }

    /// Takes or releases a lock.
    pub async fn setlk(&self, _ino: Ino, _fh: Fh, _lock: FileLock, _wait: bool) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// Extends, punches or zeroes a range.
    pub async fn fallocate(&self, _ino: Ino, _fh: Fh, _mode: i32, _offset: u64, _len: u64) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// The next data or hole.
    pub async fn lseek(&self, _ino: Ino, _fh: Fh, _offset: u64, _whence: Seek) -> Result<u64> {
        Err(Code::Unsupported.into())
    }

    /// Shares a range of one file with another; says how many bytes.
    #[allow(clippy::too_many_arguments)]
    pub async fn copy_file_range(
        &self,
        _ino_in: Ino,
        _fh_in: Fh,
        _off_in: u64,
        _ino_out: Ino,
        _fh_out: Fh,
        _off_out: u64,
        _len: u64,
    ) -> Result<u64> {
        Err(Code::Unsupported.into())
    }

    /// Writes everything back and ends the session.
    pub async fn shutdown(&self) -> Result<()> {
        Err(Code::Unsupported.into())
    }

    /// The kernel forgot so many references.
    pub fn forget(&self, _ino: Ino, _count: u64) {}

    /// The kernel got this entry of a listing and holds one reference more.
    pub fn referenced(&self, _ino: Ino) {}
}
