//! The seam to a local disk: the log and the block store do all their file I/O through these two traits.
//!
//! There are two implementations in the crate `disk`: the local disk, and a double whose power can be cut, which then
//! drops, reorders and tears everything that was not synced, folder entries included.
//!
//! # Invariants
//! - What `sync` covered before it returned `Ok` survives a power cut; nothing else is promised.
//! - A created, renamed or removed name survives only after `sync_names`.
//! - After a failed `sync` the content of the file is unknown; callers latch the error and never retry.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// One folder of files, flat.
pub trait Disk: Send + Sync {
    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Makes a new file; fails if the name is taken.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Renames, replacing a file of the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// All names, in no order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes all earlier creations, renames and removals durable.
    fn sync_names(&self) -> io::Result<()>;

    /// Size and free bytes of the file system below.
    fn space(&self) -> io::Result<Space>;
}

/// One open file.
#[expect(
    clippy::len_without_is_empty,
    reason = "a file is asked for its length to place the next write, never for emptiness"
)]
pub trait DiskFile: Send + Sync {
    /// Reads until the buffer is full or the file ends; returns how many bytes were read.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Whether all these bytes are in memory already, where the disk can tell without fetching any of them.
    fn is_cached(&self, _offset: u64, _len: u64) -> Option<bool> {
        None
    }

    /// Fills the buffer if that needs no wait for the disk; whether it did. A disk that cannot tell reads.
    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        Ok(self.read_at(buf, offset)? == buf.len())
    }

    /// The same as `read_at` around the page cache, where the disk can: for bytes that are not read again soon. The offset, and
    /// the buffer in memory and length, are multiples of 4 KiB.
    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read_at(buf, offset)
    }

    /// Writes all bytes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes all parts one after the other, in one call where the disk can.
    fn write_vectored_at(&self, parts: &[&[u8]], mut offset: u64) -> io::Result<()> {
        for part in parts {
            self.write_at(part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// The same around the page cache, where the disk can: for bytes that are not read soon. The offset, and every part in
    /// memory and length, are multiples of 4 KiB.
    fn write_direct_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        self.write_vectored_at(parts, offset)
    }

    /// Makes all completed writes and the size durable (fdatasync).
    fn sync(&self) -> io::Result<()>;

    /// The file's length.
    fn len(&self) -> io::Result<u64>;

    /// Sets the length; growing reads as zeros.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Reserves blocks for `[0, len)` so that later writes within need no new space; the file has at least this
    /// length afterwards.
    fn preallocate(&self, len: u64) -> io::Result<()>;

    /// Hints that these bytes are wanted soon, or are not wanted any more in the page cache; may do nothing.
    fn advise(&self, _offset: u64, _len: u64, _advice: Advice) {}

    /// The descriptor, where there is one, for sendfile.
    fn raw_fd(&self) -> Option<RawFd> {
        None
    }
}

/// What a reader will do with a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// Read it soon.
    WillNeed,
    /// Not soon: drop it from the page cache.
    DontNeed,
}

/// Room on the file system below a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// All bytes.
    pub total: u64,
    /// Bytes that may still be written.
    pub free: u64,
    /// Which file system that is: the same number for every folder on it, while this machine runs. 0: not known.
    pub fs: u64,
}
