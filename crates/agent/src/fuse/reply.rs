//! Replies to the kernel, encoded: a small fixed part is built, file data is borrowed until the one `writev`.
//!
//! # Invariants
//! - A reply that hands out a reference (an inode of a lookup, an open handle) carries the [`Undo`] that takes it back,
//!   for when the kernel no longer wants the reply.
//! - A folder listing never grows past the size the kernel asked for.

use bytes::Bytes;
use std::time::Duration;

use super::abi;
use super::request::{Lock, Time};

/// What goes back for one request.
#[derive(Debug)]
pub struct Reply {
    pub(super) body: Body,
    pub(super) undo: Undo,
}

#[derive(Debug)]
pub(super) enum Body {
    /// An errno, positive.
    Error(i32),
    /// The fixed part, encoded.
    Fixed(Vec<u8>),
    /// File data, sent from where it lies.
    Data(Vec<Bytes>),
}

/// What to take back when a reply could not be delivered.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Undo {
    /// An inode on which one reference was handed out.
    pub forget: Option<u64>,
    /// The same for each row of a listing.
    pub listed: Vec<u64>,
    /// A file handle that was opened, with its inode.
    pub release: Option<(u64, u64)>,
    /// A folder handle that was opened, with its inode.
    pub releasedir: Option<(u64, u64)>,
}

impl Undo {
    /// Whether there is nothing to take back.
    pub fn is_empty(&self) -> bool {
        *self == Undo::default()
    }
}

/// Attributes in the kernel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Attr {
    /// Inode number as `stat` shows it.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Space in units of 512 bytes.
    pub blocks: u64,
    /// Access time.
    pub atime: Time,
    /// Modification time.
    pub mtime: Time,
    /// Change time.
    pub ctime: Time,
    /// Birth time; only STATX tells it.
    pub btime: Time,
    /// Kind and permission bits.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, encoded as the kernel does for user space.
    pub rdev: u32,
    /// Preferred size of reads and writes.
    pub blksize: u32,
}

/// An entry found or made, with how long the kernel may keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Entry {
    /// The inode; 0 says "no such entry" and may be kept, too.
    pub nodeid: u64,
    /// With `nodeid` unique for ever.
    pub generation: u64,
    /// How long the name stays valid.
    pub entry_valid: Duration,
    /// How long the attributes stay valid.
    pub attr_valid: Duration,
    /// The inode's attributes.
    pub attr: Attr,
}

/// Space and inodes of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Statfs {
    /// Size in units of `frsize`.
    pub blocks: u64,
    /// Free units.
    pub bfree: u64,
    /// Free units for ordinary users.
    pub bavail: u64,
    /// Inodes at most.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
    /// Preferred size of reads and writes.
    pub bsize: u32,
    /// Longest name.
    pub namelen: u32,
    /// The unit.
    pub frsize: u32,
}

impl Reply {
    /// Nothing but success.
    pub fn done() -> Reply {
        Reply::fixed(Vec::new())
    }

    /// A failure with this (positive) errno.
    pub fn error(errno: i32) -> Reply {
        // The kernel takes -511..=0 only and drops the reply otherwise, which would hang the caller.
        let errno = if (1..512).contains(&errno) { errno } else { libc::EIO };
        Reply { body: Body::Error(errno), undo: Undo::default() }
    }

    /// The errno, if this is a failure.
    pub fn errno(&self) -> Option<i32> {
        match self.body {
            Body::Error(errno) => Some(errno),
            _ => None,
        }
    }

    /// File data; the parts are sent from where they lie.
    pub fn data(parts: Vec<Bytes>) -> Reply {
        Reply { body: Body::Data(parts), undo: Undo::default() }
    }

    /// Plain bytes: a link's target, an attribute's value, a list of names.
    pub fn bytes(bytes: Bytes) -> Reply {
        Reply::data(vec![bytes])
    }

    /// An entry; the kernel holds one reference on its inode from now on.
    pub fn entry(entry: &Entry) -> Reply {
        let mut out = Vec::with_capacity(ENTRY_OUT);
        put_entry(&mut out, entry);
        let forget = (entry.nodeid != 0).then_some(entry.nodeid);
        Reply { body: Body::Fixed(out), undo: Undo { forget, ..Undo::default() } }
    }

    /// "No such entry", which the kernel may keep for a while.
    pub fn negative(entry_valid: Duration) -> Reply {
        Reply::entry(&Entry { entry_valid, ..Entry::default() })
    }

    /// Attributes and how long they stay valid.
    pub fn attr(attr: &Attr, valid: Duration) -> Reply {
        let mut out = Vec::with_capacity(16 + ATTR);
        put_u64(&mut out, valid.as_secs());
        put_u32(&mut out, valid.subsec_nanos());
        put_u32(&mut out, 0);
        put_attr(&mut out, attr);
        Reply::fixed(out)
    }

    /// Attributes for STATX.
    pub fn statx(attr: &Attr, valid: Duration) -> Reply {
        let mut out = Vec::with_capacity(288);
        put_u64(&mut out, valid.as_secs());
        put_u32(&mut out, valid.subsec_nanos());
        put_u32(&mut out, 0);
        put_u64(&mut out, 0);
        put_u64(&mut out, 0);
        put_statx(&mut out, attr);
        Reply::fixed(out)
    }

    /// An open file; `flags` from [`abi::fopen`].
    pub fn open(nodeid: u64, fh: u64, flags: u32) -> Reply {
        let mut out = Vec::with_capacity(16);
        put_open(&mut out, fh, flags);
        Reply { body: Body::Fixed(out), undo: Undo { release: Some((nodeid, fh)), ..Undo::default() } }
    }

    /// An open folder; `flags` from [`abi::fopen`].
    pub fn opendir(nodeid: u64, fh: u64, flags: u32) -> Reply {
        let mut out = Vec::with_capacity(16);
        put_open(&mut out, fh, flags);
        Reply { body: Body::Fixed(out), undo: Undo { releasedir: Some((nodeid, fh)), ..Undo::default() } }
    }

    /// A file made and opened in one step.
    pub fn create(entry: &Entry, fh: u64, flags: u32) -> Reply {
        let mut out = Vec::with_capacity(ENTRY_OUT + 16);
        put_entry(&mut out, entry);
        put_open(&mut out, fh, flags);
        let undo = Undo { forget: Some(entry.nodeid), release: Some((entry.nodeid, fh)), ..Undo::default() };
        Reply { body: Body::Fixed(out), undo }
    }

    /// How many bytes a WRITE or COPY_FILE_RANGE took.
    pub fn written(count: u32) -> Reply {
        Reply::fixed([count.to_ne_bytes(), [0; 4]].concat())
    }

    /// A 64-bit number: the offset of LSEEK, the count of COPY_FILE_RANGE_64.
    pub fn number(number: u64) -> Reply {
        Reply::fixed(number.to_ne_bytes().to_vec())
    }

    /// The length of an attribute's value or of the list of names, when only that was asked for.
    pub fn xattr_len(len: u32) -> Reply {
        Reply::written(len)
    }

    /// The lock that stands in the way, or F_UNLCK.
    pub fn lock(lock: &Lock) -> Reply {
        let mut out = Vec::with_capacity(24);
        put_u64(&mut out, lock.start);
        put_u64(&mut out, lock.end);
        put_u32(&mut out, lock.kind);
        put_u32(&mut out, lock.pid);
        Reply::fixed(out)
    }

    /// Space and inodes.
    pub fn statfs(stat: &Statfs) -> Reply {
        let mut out = Vec::with_capacity(80);
        for number in [stat.blocks, stat.bfree, stat.bavail, stat.files, stat.ffree] {
            put_u64(&mut out, number);
        }
        for number in [stat.bsize, stat.namelen, stat.frsize] {
            put_u32(&mut out, number);
        }
        out.resize(80, 0);
        Reply::fixed(out)
    }

    /// A folder's rows; the kernel holds one reference more on each of the `listed` inodes from now on.
    pub fn listing(listing: Listing, listed: Vec<u64>) -> Reply {
        Reply { body: Body::Fixed(listing.out), undo: Undo { listed, ..Undo::default() } }
    }

    pub(super) fn fixed(out: Vec<u8>) -> Reply {
        Reply { body: Body::Fixed(out), undo: Undo::default() }
    }
}

/// Rows of a folder, up to the size the kernel asked for.
#[derive(Debug)]
pub struct Listing {
    out: Vec<u8>,
    size: usize,
}

impl Listing {
    /// An empty listing that takes at most `size` bytes.
    pub fn new(size: u32) -> Listing {
        // The kernel asks for what it has pages for; a larger wish is not believed.
        let size = (size as usize).min(1 << 20);
        Listing { out: Vec::with_capacity(size.min(32 << 10)), size }
    }

    /// Adds a row for READDIR; `false` if it does not fit. `next` is the cookie that continues after this row.
    #[must_use]
    pub fn push(&mut self, ino: u64, next: u64, kind: u32, name: &[u8]) -> bool {
        if self.out.len() + row_len(name) > self.size {
            return false;
        }
        self.put_row(ino, next, kind, name);
        true
    }

    /// Adds a row for READDIRPLUS; `false` if it does not fit. An entry with node id 0 hands out no reference.
    #[must_use]
    pub fn push_plus(&mut self, entry: &Entry, ino: u64, next: u64, kind: u32, name: &[u8]) -> bool {
        if self.out.len() + ENTRY_OUT + row_len(name) > self.size {
            return false;
        }
        put_entry(&mut self.out, entry);
        self.put_row(ino, next, kind, name);
        true
    }

    /// How many more rows fit for certain, if no name is longer than this.
    pub fn room(&self, plus: bool, name_max: usize) -> usize {
        let row = (DIRENT + name_max).next_multiple_of(8) + if plus { ENTRY_OUT } else { 0 };
        (self.size - self.out.len()) / row
    }

    /// Whether no row was added.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    fn put_row(&mut self, ino: u64, next: u64, kind: u32, name: &[u8]) {
        put_u64(&mut self.out, ino);
        put_u64(&mut self.out, next);
        put_u32(&mut self.out, name.len() as u32);
        // The kind as in `d_type`: the type bits of the mode.
        put_u32(&mut self.out, (kind & libc::S_IFMT) >> 12);
        self.out.extend_from_slice(name);
        self.out.resize(self.out.len().next_multiple_of(8), 0);
    }
}

/// The header of a reply (`error` ≤ 0) or of a notification (`error` is its code, `unique` 0).
pub(super) fn out_header(body: usize, error: i32, unique: u64) -> [u8; abi::OUT_HEADER] {
    let mut header = [0; abi::OUT_HEADER];
    header[..4].copy_from_slice(&((abi::OUT_HEADER + body) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

const ATTR: usize = 88;
const ENTRY_OUT: usize = 40 + ATTR;
const DIRENT: usize = 24;

fn row_len(name: &[u8]) -> usize {
    (DIRENT + name.len()).next_multiple_of(8)
}

pub(super) fn put_u16(out: &mut Vec<u8>, number: u16) {
    out.extend_from_slice(&number.to_ne_bytes());
}

pub(super) fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_ne_bytes());
}

pub(super) fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_ne_bytes());
}

fn put_open(out: &mut Vec<u8>, fh: u64, flags: u32) {
    put_u64(out, fh);
    put_u32(out, flags);
    put_u32(out, 0);
}

fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    put_u64(out, entry.nodeid);
    put_u64(out, entry.generation);
    put_u64(out, entry.entry_valid.as_secs());
    put_u64(out, entry.attr_valid.as_secs());
    put_u32(out, entry.entry_valid.subsec_nanos());
    put_u32(out, entry.attr_valid.subsec_nanos());
    put_attr(out, &entry.attr);
}

fn put_attr(out: &mut Vec<u8>, attr: &Attr) {
    let (a, m, c) = (attr.atime, attr.mtime, attr.ctime);
    put_u64(out, attr.ino);
    put_u64(out, attr.size);
    put_u64(out, attr.blocks);
    for time in [a, m, c] {
        put_u64(out, time.secs.cast_unsigned());
    }
    for time in [a, m, c] {
        put_u32(out, time.nanos);
    }
    for number in [attr.mode, attr.nlink, attr.uid, attr.gid, attr.rdev, attr.blksize, 0] {
        put_u32(out, number);
    }
}

fn put_statx(out: &mut Vec<u8>, attr: &Attr) {
    put_u32(out, libc::STATX_BASIC_STATS | libc::STATX_BTIME);
    put_u32(out, attr.blksize);
    put_u64(out, 0); // attributes
    for number in [attr.nlink, attr.uid, attr.gid] {
        put_u32(out, number);
    }
    put_u16(out, attr.mode as u16);
    put_u16(out, 0);
    for number in [attr.ino, attr.size, attr.blocks, 0] {
        put_u64(out, number); // the last is the mask of attributes
    }
    for time in [attr.atime, attr.btime, attr.ctime, attr.mtime] {
        put_u64(out, time.secs.cast_unsigned());
        put_u32(out, time.nanos);
        put_u32(out, 0);
    }
    // The kernel's own split of a 32-bit device number: 12 bits major, 20 bits minor around them.
    let (major, minor) = ((attr.rdev >> 8) & 0xfff, (attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xfff00));
    for number in [major, minor, 0, 0] {
        put_u32(out, number);
    }
    for _ in 0..14 {
        put_u64(out, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(reply: &Reply) -> &[u8] {
        match &reply.body {
            Body::Fixed(bytes) => bytes,
            other => panic!("not a fixed reply: {other:?}"),
        }
    }

    #[test]
    fn fixed_parts_have_the_sizes_the_kernel_checks() {
        assert_eq!(fixed(&Reply::entry(&Entry::default())).len(), 128);
        assert_eq!(fixed(&Reply::create(&Entry::default(), 1, 0)).len(), 144);
        assert_eq!(fixed(&Reply::attr(&Attr::default(), Duration::ZERO)).len(), 104);
        assert_eq!(fixed(&Reply::statx(&Attr::default(), Duration::ZERO)).len(), 288);
        assert_eq!(fixed(&Reply::open(1, 2, 0)).len(), 16);
        assert_eq!(fixed(&Reply::written(3)).len(), 8);
        assert_eq!(fixed(&Reply::number(3)).len(), 8);
        assert_eq!(fixed(&Reply::statfs(&Statfs::default())).len(), 80);
    }

    #[test]
    fn times_before_1970_go_out_as_negative_seconds() {
        let attr = Attr { mtime: Time { secs: -2, nanos: 500_000_000 }, ..Attr::default() };
        let reply = Reply::attr(&attr, Duration::from_millis(1500));
        let out = fixed(&reply);
        assert_eq!(out[..8], 1u64.to_ne_bytes());
        assert_eq!(out[8..12], 500_000_000u32.to_ne_bytes());
        assert_eq!(out[16 + 32..16 + 40], (-2i64).to_ne_bytes());
        assert_eq!(out[16 + 52..16 + 56], 500_000_000u32.to_ne_bytes());
    }

    #[test]
    fn an_errno_outside_the_kernels_range_becomes_eio() {
        for errno in [0, -5, 512, i32::MAX, i32::MIN] {
            assert_eq!(Reply::error(errno).errno(), Some(libc::EIO));
        }
        assert_eq!(Reply::error(libc::ENOENT).errno(), Some(libc::ENOENT));
    }

    #[test]
    fn a_listing_stops_before_it_grows_past_what_was_asked() {
        let mut listing = Listing::new(100);
        assert!(listing.push(5, 1, libc::S_IFDIR, b"12345678"));
        assert!(listing.push(6, 2, libc::S_IFREG, b"1"));
        assert!(listing.push(7, 3, libc::S_IFLNK, b"1"));
        assert!(!listing.push(8, 4, libc::S_IFREG, b"1"));
        assert_eq!((listing.room(false, 1), Listing::new(1000).room(true, 255)), (0, 2));
        let reply = Reply::listing(listing, Vec::new());
        let out = fixed(&reply);
        assert_eq!(out.len(), 96);
        assert_eq!(out[20..24], 4u32.to_ne_bytes());
        assert_eq!(&out[24..32], b"12345678");
    }

    #[test]
    fn replies_that_hand_out_references_know_how_to_take_them_back() {
        let entry = Entry { nodeid: 9, ..Entry::default() };
        assert_eq!(Reply::entry(&entry).undo.forget, Some(9));
        assert!(Reply::negative(Duration::ZERO).undo.is_empty());
        let create = Reply::create(&entry, 4, 0).undo;
        assert_eq!((create.forget, create.release), (Some(9), Some((9, 4))));
        assert_eq!(Reply::opendir(9, 4, 0).undo.releasedir, Some((9, 4)));
        assert_eq!(Reply::listing(Listing::new(100), vec![9, 8]).undo.listed, [9, 8]);
    }
}
