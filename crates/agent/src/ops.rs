//! Kernel words to our words: each FUSE request becomes one call of the vfs; the errno is chosen here, once.
//!
//! # Invariants
//! - Whatever the vfs counts (references, handles) and the kernel does not get is given back.
//! - No request is answered with more trust (timeouts, kept pages) than the vfs allows.
//!
//! # Not here
//! - Meaning of operations: `torchfs_vfs`. When and where they run: [`crate::fuse::Session`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use torchfs_proto::attr::{self, Kind};
use torchfs_proto::msg::meta::{FileLock, LockKind, LockType, VolumeUse, rename};
use torchfs_proto::{Code, Fault, Ino};
use torchfs_vfs::{Caller, Found, Host, Node, Opened, Seek, Vfs, WriteFlags};

use crate::fuse::{
    Attr, Call, Entry, Handler, Header, Listing, Lock, Notice, Notifier, Op, Reply, SetAttr, SetTime, Statfs,
    Time, Undo, Write, abi,
};
use crate::refusal::Refusals;

/// Serves a mount from a vfs.
pub struct Ops {
    vfs: Vfs,
    refusals: Refusals,
}

type Outcome = Result<Reply, Fault>;

impl Ops {
    /// Serves this vfs.
    pub fn new(vfs: Vfs) -> Ops {
        Ops { vfs, refusals: Refusals::default() }
    }

    /// The call whose fault becomes an errno.
    fn answer(self: &Arc<Self>, caller: Caller, op: impl Future<Output = Outcome> + Send + 'static) -> Call {
        let ops = Arc::clone(self);
        Box::pin(async move { op.await.unwrap_or_else(|fault| ops.refuse(caller, &fault)) })
    }

    fn refuse(&self, caller: Caller, fault: &Fault) -> Reply {
        if fault.code == Code::Stale {
            self.vfs.told_stale(caller);
        }
        Reply::error(self.refusals.errno(fault))
    }
}

impl Handler for Ops {
    fn call(self: Arc<Self>, header: Header, op: Op<'_>, payload: Bytes) -> Call {
        let vfs = self.vfs.clone();
        let ino = Ino(header.nodeid);
        let caller = Caller { uid: header.uid, gid: header.gid, pid: header.pid };
        match op {
            Op::Lookup { name } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move { lookup(&vfs, caller, ino, &name).await })
            }
            Op::Getattr { fh } => self.answer(caller, async move {
                let node = vfs.getattr(ino, fh).await?;
                Ok(Reply::attr(&to_attr(&node.attr), node.ttl))
            }),
            Op::Statx { fh, .. } => self.answer(caller, async move {
                let node = vfs.getattr(ino, fh).await?;
                Ok(Reply::statx(&to_attr(&node.attr), node.ttl))
            }),
            Op::Setattr(set) => self.answer(caller, async move {
                let node = vfs.setattr(ino, set.fh, to_setattr(&set)).await?;
                Ok(Reply::attr(&to_attr(&node.attr), node.ttl))
            }),
            Op::Readlink => self.answer(caller, async move { Ok(Reply::bytes(vfs.readlink(ino).await?)) }),
            Op::Mknod { name, mode, rdev, .. } => {
                // A mode without a kind is a file's.
                let kind = Kind::from_mode(mode).unwrap_or(Kind::File);
                self.make(caller, ino, name, kind, mode, rdev, b"")
            }
            Op::Mkdir { name, mode, .. } => self.make(caller, ino, name, Kind::Dir, mode, 0, b""),
            Op::Symlink { name, target } => self.make(caller, ino, name, Kind::Symlink, 0o777, 0, target),
            Op::Unlink { name } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move { vfs.unlink(ino, &name).await.map(|()| Reply::done()) })
            }
            Op::Rmdir { name } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move { vfs.rmdir(ino, &name).await.map(|()| Reply::done()) })
            }
            Op::Rename { name, new_parent, new_name, flags } => {
                if flags & !(rename::NOREPLACE | rename::EXCHANGE) != 0 {
                    return refuse(libc::EINVAL);
                }
                let (name, new_name) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(new_name));
                self.answer(caller, async move {
                    vfs.rename(ino, &name, Ino(new_parent), &new_name, flags).await.map(|()| Reply::done())
                })
            }
            Op::Link { inode, name } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move {
                    let node = vfs.link(Ino(inode), ino, &name).await?;
                    Ok(Reply::entry(&made(&vfs, ino, &name, &node)))
                })
            }
            Op::Open { flags, .. } => self.answer(caller, async move {
                let opened = vfs.open(ino, flags.cast_signed()).await?;
                Ok(Reply::open(ino.0, opened.fh, file_flags(&opened)))
            }),
            Op::Create { name, flags, mode, .. } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move {
                    let (node, opened) =
                        vfs.create(caller, ino, &name, mode & 0o7777, flags.cast_signed()).await?;
                    Ok(Reply::create(&made(&vfs, ino, &name, &node), opened.fh, file_flags(&opened)))
                })
            }
            Op::Tmpfile { flags, mode, .. } => self.answer(caller, async move {
                let (node, opened) = vfs.tmpfile(caller, ino, mode & 0o7777, flags.cast_signed()).await?;
                Ok(Reply::create(&to_entry(&node, Duration::ZERO), opened.fh, file_flags(&opened)))
            }),
            Op::Read { fh, offset, size, flags, .. } => self.answer(caller, async move {
                Ok(Reply::data(vfs.read(ino, fh, offset, size, flags.cast_signed()).await?))
            }),
            Op::Write { write, .. } => self.answer(caller, async move {
                Ok(Reply::written(
                    vfs.write(ino, write.fh, write.offset, payload, to_write_flags(&write)).await?,
                ))
            }),
            Op::Flush { fh, lock_owner } => self
                .answer(caller, async move { vfs.flush(ino, fh, lock_owner).await.map(|()| Reply::done()) }),
            Op::Release { fh, lock_owner, flock_unlock, .. } => self.answer(caller, async move {
                vfs.release(ino, fh, flock_unlock.then_some(lock_owner)).await;
                Ok(Reply::done())
            }),
            Op::Fsync { fh, data_only } => self
                .answer(caller, async move { vfs.fsync(ino, fh, data_only).await.map(|()| Reply::done()) }),
            Op::Fsyncdir { .. } => {
                self.answer(caller, async move { vfs.fsyncdir(ino).await.map(|()| Reply::done()) })
            }
            Op::Syncfs => self.answer(caller, async move { vfs.syncfs().await.map(|()| Reply::done()) }),
            Op::Opendir { .. } => self.answer(caller, async move {
                let opened = vfs.opendir(ino).await?;
                Ok(Reply::opendir(ino.0, opened.fh, folder_flags(&opened)))
            }),
            Op::Readdir { fh, offset, size, plus } => {
                self.answer(caller, async move { readdir(&vfs, ino, fh, offset, size, plus).await })
            }
            Op::Releasedir { fh, .. } => self.answer(caller, async move {
                vfs.releasedir(fh).await;
                Ok(Reply::done())
            }),
            Op::Statfs => {
                self.answer(caller, async move { Ok(Reply::statfs(&to_statfs(&vfs.statfs().await?))) })
            }
            Op::Setxattr { name, .. } | Op::Getxattr { name, .. } | Op::Removexattr { name }
                if is_acl(name) =>
            {
                refuse(libc::EOPNOTSUPP)
            }
            Op::Setxattr { name, value, flags } => {
                let (name, value) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
                self.answer(caller, async move {
                    vfs.setxattr(caller, ino, &name, &value, flags).await.map(|()| Reply::done())
                })
            }
            Op::Getxattr { name, size } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move { fitted(vfs.getxattr(ino, &name).await?, size) })
            }
            Op::Listxattr { size } => self.answer(caller, async move {
                let mut list = Vec::new();
                for name in vfs.listxattr(ino).await? {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                fitted(list.into(), size)
            }),
            Op::Removexattr { name } => {
                let name = Bytes::copy_from_slice(name);
                self.answer(caller, async move {
                    vfs.removexattr(caller, ino, &name).await.map(|()| Reply::done())
                })
            }
            Op::Getlk(lock) => self.answer(caller, async move {
                let asked = to_lock(&lock, header.pid).ok_or(Code::Invalid)?;
                let found = vfs.getlk(ino, asked).await?;
                Ok(Reply::lock(
                    &found.map_or(Lock { kind: libc::F_UNLCK as u32, ..lock }, |found| from_lock(&found)),
                ))
            }),
            Op::Setlk { lock, wait } => self.answer(caller, async move {
                let asked = to_lock(&lock, header.pid).ok_or(Code::Invalid)?;
                vfs.setlk(ino, lock.fh, asked, wait).await.map(|()| Reply::done())
            }),
            Op::Fallocate { fh, offset, length, mode } => self.answer(caller, async move {
                vfs.fallocate(caller, ino, fh, mode.cast_signed(), offset, length)
                    .await
                    .map(|()| Reply::done())
            }),
            Op::Lseek { fh, offset, whence } => self.answer(caller, async move {
                let seek = match whence.cast_signed() {
                    libc::SEEK_DATA => Seek::Data,
                    libc::SEEK_HOLE => Seek::Hole,
                    _ => return Err(Code::Invalid.into()),
                };
                Ok(Reply::number(vfs.lseek(ino, fh, offset, seek).await?))
            }),
            Op::CopyFileRange { fh, offset, out_inode, out_fh, out_offset, len, flags, wide } => {
                if flags != 0 {
                    return refuse(libc::EINVAL);
                }
                let len = if wide { len } else { len.min(COPY_MAX) };
                self.answer(caller, async move {
                    let to = Ino(out_inode);
                    let count =
                        vfs.copy_file_range(caller, ino, fh, offset, to, out_fh, out_offset, len).await?;
                    Ok(if wide { Reply::number(count) } else { Reply::written(count as u32) })
                })
            }
            // The kernel checks permissions itself (default_permissions); the rest the session answers.
            Op::Access { .. }
            | Op::Forget { .. }
            | Op::BatchForget { .. }
            | Op::Init(_)
            | Op::Interrupt { .. }
            | Op::Destroy
            | Op::Other => refuse(libc::ENOSYS),
        }
    }

    fn forget(&self, nodeid: u64, count: u64) {
        self.vfs.forget(Ino(nodeid), count);
    }

    fn undo(self: Arc<Self>, undo: Undo) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            if let Some((nodeid, fh)) = undo.release {
                self.vfs.release(Ino(nodeid), fh, None).await;
            }
            if let Some((_, fh)) = undo.releasedir {
                self.vfs.releasedir(fh).await;
            }
            for nodeid in undo.forget.into_iter().chain(undo.listed) {
                self.vfs.forget(Ino(nodeid), 1);
            }
        })
    }
}

impl Ops {
    #[allow(clippy::too_many_arguments)]
    fn make(
        self: &Arc<Self>,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        kind: Kind,
        mode: u32,
        rdev: u32,
        target: &[u8],
    ) -> Call {
        let vfs = self.vfs.clone();
        let (name, target) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(target));
        self.answer(caller, async move {
            let node = vfs.make(caller, parent, &name, kind, mode & 0o7777, rdev, &target).await?;
            Ok(Reply::entry(&made(&vfs, parent, &name, &node)))
        })
    }
}

fn entry_notice(parent: Ino, name: &[u8], expire_only: bool) -> Notice {
    Notice::Entry { parent: parent.0, name: Bytes::copy_from_slice(name), expire_only }
}

/// What the vfs wants the kernel to know, by way of the notification thread.
#[derive(Clone, Debug)]
pub struct KernelHost(pub Notifier);

impl Host for KernelHost {
    fn invalidate_data(&self, ino: Ino, offset: u64, len: u64) {
        self.0.post(Notice::Inode { ino: ino.0, offset: Some(offset), len });
    }

    fn invalidate_attr(&self, ino: Ino) {
        self.0.post(Notice::Inode { ino: ino.0, offset: None, len: 0 });
    }

    fn invalidate_entry(&self, parent: Ino, name: &[u8]) {
        self.0.post(entry_notice(parent, name, false));
    }

    fn expire_entry(&self, parent: Ino, name: &[u8]) {
        self.0.post(entry_notice(parent, name, true));
    }

    fn expire_entries(&self, folder: Ino) -> bool {
        self.0.expire_entries(folder.0)
    }

    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.0.settled())
    }
}

/// The most a COPY_FILE_RANGE with a 32-bit count may take, in whole pages.
const COPY_MAX: u64 = 0x7fff_f000;

/// What `stat` tells programs to read and write at once: a chunk. Without a writeback cache each write of a program
/// is a round trip, and buffered I/O of C and Python takes its size from here.
const IO_SIZE: u32 = 64 << 10;

async fn lookup(vfs: &Vfs, caller: Caller, parent: Ino, name: &[u8]) -> Outcome {
    if name == b"." {
        // Somebody came with a file handle (open_by_handle_at, NFS).
        let node = vfs.getattr(parent, None).await?;
        vfs.referenced(parent);
        return Ok(Reply::entry(&to_entry(&node, Duration::ZERO)));
    }
    let Found { node, entry_ttl } = vfs.lookup(caller, parent, name).await?;
    Ok(match node {
        Some(node) => Reply::entry(&to_entry(&node, entry_ttl)),
        None => Reply::negative(entry_ttl),
    })
}

/// `.` and `..` come first, at positions 1 and 2; what the service lists follows, each cookie moved up by as many.
const DOTS: [&[u8]; 2] = [b".", b".."];
/// What the kernel takes for an inode number that nobody knows.
const UNKNOWN_INO: u64 = 0xffff_ffff;

/// A listing for the kernel.
async fn readdir(vfs: &Vfs, ino: Ino, fh: u64, offset: u64, size: u32, plus: bool) -> Outcome {
    let mut listed = Listed { vfs, inos: Vec::new() };
    let listing = list(&mut listed, ino, fh, offset, size, plus).await?;
    Ok(Reply::listing(listing, std::mem::take(&mut listed.inos)))
}

/// References of rows that are not in a reply yet; given back if there will be none.
struct Listed<'a> {
    vfs: &'a Vfs,
    inos: Vec<u64>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.inos.iter().for_each(|ino| self.vfs.forget(Ino(*ino), 1));
    }
}

/// Fills a listing. Rows that would not fit would have to be fetched again, so each time only as many are taken as
/// fit even with the longest names.
async fn list(
    listed: &mut Listed<'_>,
    ino: Ino,
    fh: u64,
    offset: u64,
    size: u32,
    plus: bool,
) -> Result<Listing, Fault> {
    let vfs = listed.vfs;
    let mut listing = Listing::new(size);
    for (position, name) in (1..).zip(DOTS).filter(|(position, _)| *position > offset) {
        let number = if position == 1 || ino == Ino::ROOT { ino.0 } else { UNKNOWN_INO };
        if !push(&mut listing, plus, &Entry::default(), number, position, Kind::Dir.mode_bits(), name) {
            return Ok(listing);
        }
    }
    let dots = DOTS.len() as u64;
    let mut cookie = offset.saturating_sub(dots);
    loop {
        let room = listing.room(plus, attr::NAME_MAX);
        if room == 0 && !listing.is_empty() {
            return Ok(listing);
        }
        let items = match vfs.readdir(ino, fh, cookie, room.max(1), plus).await {
            Ok(items) if items.is_empty() => return Ok(listing),
            Ok(items) => items,
            // What is there goes out; the fault comes again with the next call.
            Err(_) if !listing.is_empty() => return Ok(listing),
            Err(fault) => return Err(fault),
        };
        for item in items {
            // Without a node id the kernel takes only the name.
            let entry = item.node.as_ref().map(|(node, ttl)| to_entry(node, *ttl)).unwrap_or_default();
            let next = item.cookie + dots;
            if !push(&mut listing, plus, &entry, item.ino.0, next, item.kind.mode_bits(), &item.name) {
                return Ok(listing);
            }
            if plus && entry.nodeid != 0 {
                vfs.referenced(item.ino);
                listed.inos.push(item.ino.0);
            }
            cookie = item.cookie;
        }
    }
}

/// Adds a row of either kind; `false` if it does not fit.
fn push(
    listing: &mut Listing,
    plus: bool,
    entry: &Entry,
    ino: u64,
    next: u64,
    kind: u32,
    name: &[u8],
) -> bool {
    match plus {
        true => listing.push_plus(entry, ino, next, kind, name),
        false => listing.push(ino, next, kind, name),
    }
}

/// A reply known at once.
fn refuse(errno: i32) -> Call {
    Box::pin(async move { Reply::error(errno) })
}

/// A value for a buffer of `size` bytes; 0 asks for the length.
fn fitted(value: Bytes, size: u32) -> Outcome {
    match u32::try_from(value.len()) {
        Ok(len) if size == 0 => Ok(Reply::xattr_len(len)),
        Ok(len) if len <= size => Ok(Reply::bytes(value)),
        _ => Err(Code::Range.into()),
    }
}

/// POSIX ACLs are refused, as docs/semantics.md says.
fn is_acl(name: &[u8]) -> bool {
    matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default")
}

fn file_flags(opened: &Opened) -> u32 {
    let direct = if opened.direct { abi::fopen::DIRECT_IO | abi::fopen::PARALLEL_DIRECT_WRITES } else { 0 };
    let keep = if opened.keep_cache { abi::fopen::KEEP_CACHE } else { 0 };
    direct | keep
}

fn folder_flags(opened: &Opened) -> u32 {
    if opened.keep_cache { abi::fopen::CACHE_DIR | abi::fopen::KEEP_CACHE } else { 0 }
}

/// An entry just made.
fn made(vfs: &Vfs, parent: Ino, name: &[u8], node: &Node) -> Entry {
    to_entry(node, vfs.entry_ttl(parent, name))
}

fn to_entry(node: &Node, entry_valid: Duration) -> Entry {
    Entry {
        nodeid: node.attr.ino.0,
        generation: node.attr.generation,
        entry_valid,
        attr_valid: node.ttl,
        attr: to_attr(&node.attr),
    }
}

fn to_attr(attr: &attr::Attr) -> Attr {
    let time = |time: attr::Time| Time { secs: time.secs, nanos: time.nanos };
    Attr {
        ino: attr.ino.0,
        size: attr.size,
        blocks: attr.stored.div_ceil(512),
        atime: time(attr.atime),
        mtime: time(attr.mtime),
        ctime: time(attr.ctime),
        btime: time(attr.btime),
        mode: attr.kind.mode_bits() | (attr.mode & 0o7777),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: if attr.kind == Kind::File { IO_SIZE } else { 4096 },
    }
}

fn to_setattr(set: &SetAttr) -> attr::SetAttr {
    let at = |time: Time| attr::SetTime::At(attr::Time { secs: time.secs, nanos: time.nanos });
    let time = |time: SetTime| match time {
        SetTime::Now => attr::SetTime::Now,
        SetTime::At(time) => at(time),
    };
    attr::SetAttr {
        mode: set.mode.map(|mode| mode & 0o7777),
        uid: set.uid,
        gid: set.gid,
        size: set.size,
        atime: set.atime.map(time),
        mtime: set.mtime.map(time),
        ctime: set.ctime.map(at),
        // With HANDLE_KILLPRIV_V2 the kernel leaves it to us to notice that a change of owner takes privileges away.
        kill_privileges: set.kill_suidgid || set.uid.is_some() || set.gid.is_some(),
    }
}

fn to_write_flags(write: &Write) -> WriteFlags {
    let has = |flag: i32| write.flags.cast_signed() & flag == flag;
    WriteFlags {
        // Pages know where they belong, whoever dirtied them.
        append: has(libc::O_APPEND) && !write.cached,
        sync: has(libc::O_DSYNC),
        kill_privileges: write.kill_suidgid,
        page_cache: write.cached,
    }
}

/// "To the end" is the largest offset for the kernel, and the largest number for us.
fn to_lock(lock: &Lock, pid: u32) -> Option<FileLock> {
    let ty = match lock.kind.cast_signed() {
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        libc::F_UNLCK => LockType::Unlock,
        _ => return None,
    };
    Some(FileLock {
        kind: if lock.flock { LockKind::Flock } else { LockKind::Posix },
        ty,
        owner: lock.owner,
        pid: if lock.pid != 0 { lock.pid } else { pid },
        start: lock.start,
        end: if lock.end >= i64::MAX as u64 { u64::MAX } else { lock.end },
    })
}

fn from_lock(lock: &FileLock) -> Lock {
    let kind = match lock.ty {
        LockType::Read => libc::F_RDLCK,
        LockType::Write => libc::F_WRLCK,
        LockType::Unlock => libc::F_UNLCK,
    };
    Lock {
        fh: 0,
        owner: lock.owner,
        start: lock.start.min(i64::MAX as u64),
        end: lock.end.min(i64::MAX as u64),
        kind: kind as u32,
        pid: lock.pid,
        flock: lock.kind == LockKind::Flock,
    }
}

fn to_statfs(used: &VolumeUse) -> Statfs {
    const UNIT: u32 = 4096;
    let units = |bytes: u64| bytes / u64::from(UNIT);
    Statfs {
        blocks: units(used.total),
        bfree: units(used.free),
        bavail: units(used.free),
        files: used.inodes.saturating_add(used.inodes_free),
        ffree: used.inodes_free,
        bsize: UNIT,
        namelen: attr::NAME_MAX as u32,
        frsize: UNIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: Lock = Lock {
        fh: 1,
        owner: 2,
        start: 0,
        end: i64::MAX as u64,
        kind: libc::F_WRLCK as u32,
        pid: 0,
        flock: false,
    };

    #[test]
    fn locks_keep_their_family_and_reach_to_the_end() {
        let ours = to_lock(&LOCK, 42).unwrap();
        let expected = FileLock {
            kind: LockKind::Posix,
            ty: LockType::Write,
            owner: 2,
            pid: 42,
            start: 0,
            end: u64::MAX,
        };
        assert_eq!(ours, expected);
        assert_eq!(from_lock(&ours), Lock { fh: 0, pid: 42, ..LOCK });
        let flock = to_lock(&Lock { flock: true, pid: 7, ..LOCK }, 42).unwrap();
        assert_eq!((flock.kind, flock.pid), (LockKind::Flock, 7));
        assert_eq!(to_lock(&Lock { kind: 9, ..LOCK }, 42), None);
        let part = Lock { start: 5, end: 9, kind: libc::F_RDLCK as u32, pid: 3, ..LOCK };
        assert_eq!(from_lock(&to_lock(&part, 0).unwrap()), Lock { fh: 0, ..part });
    }

    #[test]
    fn a_change_of_owner_takes_privileges_away() {
        assert!(to_setattr(&SetAttr { uid: Some(5), ..SetAttr::default() }).kill_privileges);
        assert!(to_setattr(&SetAttr { gid: Some(5), ..SetAttr::default() }).kill_privileges);
        assert!(to_setattr(&SetAttr { kill_suidgid: true, ..SetAttr::default() }).kill_privileges);
        let chmod = to_setattr(&SetAttr { mode: Some(0o104_755), ..SetAttr::default() });
        assert_eq!((chmod.mode, chmod.kill_privileges), (Some(0o4755), false));
    }

    #[test]
    fn times_keep_their_sign() {
        let old = Time { secs: -5, nanos: 999_999_999 };
        let set = SetAttr { atime: Some(SetTime::At(old)), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let ours = to_setattr(&set);
        assert_eq!(ours.atime, Some(attr::SetTime::At(attr::Time { secs: -5, nanos: 999_999_999 })));
        assert_eq!(ours.mtime, Some(attr::SetTime::Now));
    }

    #[test]
    fn pages_are_never_appended() {
        let write = Write {
            fh: 1,
            offset: 0,
            flags: (libc::O_APPEND | libc::O_SYNC) as u32,
            lock_owner: None,
            cached: false,
            kill_suidgid: true,
        };
        let flags = to_write_flags(&write);
        assert_eq!(
            (flags.append, flags.sync, flags.kill_privileges, flags.page_cache),
            (true, true, true, false)
        );
        let pages = to_write_flags(&Write { cached: true, ..write });
        assert_eq!((pages.append, pages.page_cache), (false, true));
    }

    #[test]
    fn values_fit_or_tell_their_length() {
        let value = Bytes::from_static(b"value");
        assert!(fitted(value.clone(), 5).unwrap().errno().is_none());
        assert!(fitted(value.clone(), 0).unwrap().errno().is_none());
        assert_eq!(fitted(value, 4).unwrap_err().code, Code::Range);
    }
}
