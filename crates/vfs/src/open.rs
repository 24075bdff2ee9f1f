//! Handles: open, release, flush, fsync.
//!
//! A file is opened under a data lease: READ to read, WRITE to write, or SHARED when several sessions are at it and at
//! least one writes; then pages are not cached and writes go through.
//!
//! Errors of writing in the background latch on every handle that was open then: each further write, fsync and close of it
//! fails with the error; a handle opened later starts clean. So a program that once saw fsync fail never sees it succeed
//! on the same handle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, LockKind, Op, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::dir::Listing;
use crate::node::Inode;
use crate::read::ReadAhead;
use crate::{Fh, Opened, Vfs, unexpected};

pub(crate) const O_ACCMODE: i32 = 3;
pub(crate) const O_WRONLY: i32 = 1;
pub(crate) const O_EXCL: i32 = 0o200;
pub(crate) const O_TRUNC: i32 = 0o1000;
pub(crate) const O_APPEND: i32 = 0o2000;
/// O_DSYNC; O_SYNC is this and one more bit.
pub(crate) const O_DSYNC: i32 = 0o10000;

/// An open file or folder.
pub(crate) struct Handle {
    pub(crate) node: Arc<Inode>,
    pub(crate) writes: bool,
    /// Reads and writes go past the kernel's pages.
    pub(crate) direct: bool,
    /// Each write is durable before it returns.
    pub(crate) sync: bool,
    /// Errors of the file that happened before it was opened.
    pub(crate) seen: u64,
    wrote: AtomicBool,
    /// What the kernel's pages are once it has acted on the answer to this open, and how often that had become unknown.
    fresh: Mutex<Option<(u64, u64)>>,
    pub(crate) ahead: Mutex<ReadAhead>,
    pub(crate) listing: Mutex<Listing>,
    /// Owners that took fcntl locks through this handle and have not closed it. When it goes, those left are the handle's
    /// own (open file description locks): the kernel names no owner for them.
    pub(crate) lockers: Mutex<Vec<u64>>,
}

impl Handle {
    /// Closing must wait for durability from now on.
    pub(crate) fn wrote(&self) {
        self.wrote.store(true, Ordering::Release);
    }

    /// The kernel uses the handle: it has dropped the pages that the answer to this open told it to drop. Before, another
    /// open that was answered at the same time must not keep them.
    pub(crate) fn used(&self) {
        let Some((version, forgotten)) = self.fresh.lock().take() else { return };
        if let Some(file) = &mut self.node.lock().file
            && file.forgotten == forgotten
            && file.kernel_version.is_none()
        {
            file.kernel_version = Some(version);
        }
    }

    /// The error that latched on this handle.
    pub(crate) fn check(&self) -> Result<()> {
        self.node.lock().file.as_ref().map_or(Ok(()), |file| file.check(self.seen))
    }
}

/// Somebody opens an inode and waits for the right to its content.
struct Opening<'a>(&'a Inode);

impl Opening<'_> {
    fn begin(node: &Inode) -> Opening<'_> {
        node.lock().opening += 1;
        Opening(node)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.lock().opening -= 1;
    }
}

impl Vfs {
    /// Opens a file.
    pub async fn open(&self, ino: Ino, flags: i32) -> Result<Opened> {
        let node = self.node(ino);
        self.open_node(&node, flags, false).await
    }

    /// A descriptor is closed: durable after writing, and the owner's fcntl locks go.
    pub async fn flush(&self, ino: Ino, fh: Fh, lock_owner: u64) -> Result<()> {
        let handle = self.handle(fh)?;
        let published = if handle.wrote.load(Ordering::Acquire) && !self.0.config.writeback {
            self.sync_node(&handle.node).await
        } else {
            Ok(())
        };
        handle.lockers.lock().retain(|owner| *owner != lock_owner);
        let unlocked = self.drop_locks(ino, LockKind::Posix, lock_owner).await;
        published.and(handle.check()).and(unlocked)
    }

    /// Durable when it returns.
    pub async fn fsync(&self, _ino: Ino, fh: Fh, _data_only: bool) -> Result<()> {
        let handle = self.handle(fh)?;
        self.sync_node(&handle.node).await?;
        handle.check()
    }

    /// The last descriptor is closed.
    pub async fn release(&self, ino: Ino, fh: Fh, flock_owner: Option<u64>) {
        let Some(handle) = self.0.handles.write().remove(&fh) else { return };
        let lockers = std::mem::take(&mut *handle.lockers.lock());
        let flock = flock_owner.map(|owner| (LockKind::Flock, owner));
        for (kind, owner) in lockers.into_iter().map(|owner| (LockKind::Posix, owner)).chain(flock) {
            // The descriptor is gone: there is nobody left to tell, and the service ends locks with the session.
            let _ = self.drop_locks(ino, kind, owner).await;
        }
        self.closed(&handle.node, handle.writes);
    }

    /// All that was done to a file here is durable when this returns.
    pub(crate) async fn sync_node(&self, node: &Arc<Inode>) -> Result<()> {
        self.write_back(node).await;
        let mark = node.lock().mark;
        self.0.meta.durable(mark).await
    }

    pub(crate) fn handle(&self, fh: Fh) -> Result<Arc<Handle>> {
        let handle = self.0.handles.read().get(&fh).cloned();
        handle.ok_or_else(|| Fault::new(Code::Stale, format!("handle {fh} is not open")))
    }

    pub(crate) fn new_handle(
        &self,
        node: Arc<Inode>,
        writes: bool,
        direct: bool,
        sync: bool,
        seen: u64,
        fresh: Option<(u64, u64)>,
    ) -> Fh {
        let fh = self.0.next_fh.fetch_add(1, Ordering::Relaxed);
        let handle = Handle {
            node,
            writes,
            direct,
            sync,
            seen,
            wrote: AtomicBool::new(false),
            fresh: Mutex::new(fresh),
            ahead: Mutex::default(),
            listing: Mutex::default(),
            lockers: Mutex::default(),
        };
        self.0.handles.write().insert(fh, Arc::new(handle));
        fh
    }

    /// Opens a file whose node is at hand; `new` if it was just made under the right to write.
    pub(crate) async fn open_node(&self, node: &Arc<Inode>, flags: i32, new: bool) -> Result<Opened> {
        let writes = flags & O_ACCMODE != 0;
        let mut asked = new && self.holds_for(node.ino, writes);
        let (direct, seen, keep_cache, fresh) = loop {
            let progress = node.progress.listen();
            let leaving = node.lock().leaving > 0;
            if leaving {
                progress.await;
                continue;
            }
            // A lone session that still has SHARED may get better.
            let shared = !asked && self.0.meta.holds(node.ino, lease::SHARED).is_some();
            if shared || !self.holds_for(node.ino, writes) {
                let kind = node.lock().attr.as_ref().map(|attr| attr.kind);
                if kind.is_some_and(|kind| kind != Kind::File) {
                    return Err(Fault::new(Code::Invalid, format!("inode {} is not a file", node.ino)));
                }
                let _opening = Opening::begin(node);
                self.open_data(node, writes).await?;
                asked = true;
            }
            let mut state = node.lock();
            if state.gone {
                // Stale, not absent: the kernel then looks the name up again, and finds what replaced it.
                return Err(Fault::new(Code::Stale, format!("inode {} was removed", node.ino)));
            }
            // A removal that began meanwhile told the service that nobody here has it open.
            if state.leaving > 0 {
                continue;
            }
            // Through its page cache the kernel cuts a write at the end of a page, and what another machine appends could come
            // between the parts.
            let appends = writes && flags & O_APPEND != 0;
            let direct = appends || !self.holds_any(node.ino, &[lease::READ, lease::WRITE]);
            state.handles += 1;
            state.writers += u32::from(writes);
            let version = state.attr.as_ref().map(|attr| attr.data_version);
            let size = state.view().map_or(0, |attr| attr.size);
            let file = state.file();
            // What is mapped has pages however it was opened.
            if !file.paged && (!direct || flags & O_ACCMODE != O_WRONLY) {
                (file.paged, file.told) = (true, size);
            }
            let keep = !direct && version.is_some() && file.kernel_version == version;
            if !keep {
                file.forget_pages();
            }
            let fresh = version.filter(|_| !direct && !keep).map(|version| (version, file.forgotten));
            break (direct, file.errors, keep, fresh);
        };
        let fh = self.new_handle(node.clone(), writes, direct, flags & O_DSYNC != 0, seen, fresh);
        Ok(Opened { fh, direct, keep_cache })
    }

    /// Whether content may be read, or written, under a lease held now.
    pub(crate) fn holds_for(&self, ino: Ino, write: bool) -> bool {
        let bits: &[u8] = match write {
            true => &[lease::WRITE, lease::SHARED],
            false => &[lease::READ, lease::WRITE, lease::SHARED],
        };
        self.holds_any(ino, bits)
    }

    pub(crate) fn holds_any(&self, ino: Ino, bits: &[u8]) -> bool {
        bits.iter().any(|bit| self.0.meta.holds(ino, *bit).is_some())
    }

    /// Asks for the right to read or write content. A grant may be recalled at once; then the caller asks again, a tick
    /// later.
    pub(crate) async fn open_data(&self, node: &Arc<Inode>, write: bool) -> Result<()> {
        for _ in 0..self.0.config.open_tries {
            let progress = node.progress.listen();
            let tick = self.0.tick.listen();
            if node.lock().recalling > 0 {
                // The service answers with what is being taken away; wait until that is over.
                futures_util::future::select(progress, tick).await;
                continue;
            }
            self.ask_data(node, write).await?;
            if self.holds_for(node.ino, write) {
                return Ok(());
            }
            tick.await;
        }
        Err(Fault::new(
            Code::Timeout,
            format!("the right to use inode {} is taken away again and again", node.ino),
        ))
    }

    /// One question for a data lease.
    pub(crate) async fn ask_data(&self, node: &Arc<Inode>, write: bool) -> Result<()> {
        let asked = self.asked();
        let done = self.0.meta.ask(Op::OpenData { ino: node.ino, write }).await?;
        let Done::Opened(attr) = done else { return Err(unexpected("open", &done)) };
        let mut state = node.lock();
        let current = self.is_current(asked, node.ino);
        if current {
            let epoch = self.0.meta.lease_epoch();
            state.file().learn_version(attr.data_version, epoch);
        }
        state.learn(&self.0.meta, attr, current);
        Ok(())
    }

    /// A handle is gone; with the last one of an inode without a name, the inode goes too.
    pub(crate) fn closed(&self, node: &Arc<Inode>, wrote: bool) {
        let (last, orphan) = {
            let mut state = node.lock();
            state.handles = state.handles.saturating_sub(1);
            state.writers = state.writers.saturating_sub(u32::from(wrote));
            (state.handles == 0, state.orphan)
        };
        if !last {
            return;
        }
        if orphan {
            // The close is not waited for, so its name may have been looked up again before that went.
            self.linger(node.clone());
        } else if self.0.meta.holds(node.ino, lease::SHARED).is_some() {
            // Others may buffer again.
            self.0.meta.give_back(node.ino, lease::SHARED);
        }
        if node.lock().refs == 0 {
            self.0.idle.lock().push(node.ino);
        }
    }
}
