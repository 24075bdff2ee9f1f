//! File locks: fcntl and flock, held at the service, so that they hold across nodes and die with the session.
//!
//! A lock revalidates: what is cached without a lease is dropped, so that the holder sees what the last one left. An unlock
//! publishes: what was written under the lock is committed before it goes.
//!
//! A wait that is interrupted is given up, and whatever it may have got meanwhile is unlocked again; a lock that the same
//! owner held on that range before goes with it.

use std::sync::Arc;

use torchfs_proto::msg::meta::{Done, FileLock, LockKind, LockType, Op, lease};
use torchfs_proto::{Code, Ino, Result};

use crate::node::Inode;
use crate::{Fh, Vfs, unexpected};

impl Vfs {
    /// The lock that is in the way.
    pub async fn getlk(&self, ino: Ino, lock: FileLock) -> Result<Option<FileLock>> {
        match self.0.meta.ask(Op::GetLock { ino, lock }).await? {
            Done::LockHolder(holder) => Ok(holder),
            done => Err(unexpected("getlk", &done)),
        }
    }

    /// Takes or releases a lock.
    pub async fn setlk(&self, ino: Ino, fh: Fh, lock: FileLock, wait: bool) -> Result<()> {
        let node = self.node(ino);
        if lock.ty == LockType::Unlock {
            return self.unlock(node, lock).await;
        }
        if lock.kind == LockKind::Posix {
            let handle = self.handle(fh)?;
            let mut lockers = handle.lockers.lock();
            if !lockers.contains(&lock.owner) {
                lockers.push(lock.owner);
            }
        }
        {
            // Noted before it is asked for: whoever closes the file unlocks what is noted.
            let mut state = node.lock();
            if !state.locks.contains(&(lock.kind, lock.owner)) {
                state.locks.push((lock.kind, lock.owner));
            }
        }
        let mut waiting = Waiting { vfs: self.clone(), node: node.clone(), lock: Some(lock.clone()) };
        loop {
            let tick = self.0.tick.listen();
            match self.0.meta.change(Op::Lock { ino, lock: lock.clone(), wait }).await {
                Ok(_) => break,
                // Nobody knows how long it takes: ask again until it is there or the caller gives up.
                Err(fault) if wait && matches!(fault.code, Code::WouldBlock | Code::Timeout) => tick.await,
                Err(fault) => {
                    waiting.lock = None;
                    return Err(fault);
                }
            }
        }
        waiting.lock = None;
        self.revalidate(&node);
        Ok(())
    }

    /// Releases all locks of an owner, if there are any.
    pub(crate) async fn drop_locks(&self, ino: Ino, kind: LockKind, owner: u64) -> Result<()> {
        let Some(node) = self.find_node(ino) else { return Ok(()) };
        if !node.lock().locks.contains(&(kind, owner)) {
            return Ok(());
        }
        let lock = FileLock { kind, ty: LockType::Unlock, owner, pid: 0, start: 0, end: u64::MAX };
        let unlocked = self.unlock(node.clone(), lock).await;
        node.lock().locks.retain(|held| *held != (kind, owner));
        unlocked
    }

    /// Publishes, then releases; from the moment it is sent it happens, whether or not somebody waits.
    async fn unlock(&self, node: Arc<Inode>, lock: FileLock) -> Result<()> {
        self.write_back(&node).await;
        let vfs = self.clone();
        let sent = async move { vfs.0.meta.change(Op::Lock { ino: node.ino, lock, wait: false }).await };
        self.finish(sent).await.map(|_| ())
    }

    /// Drops what no lease protects.
    fn revalidate(&self, node: &Inode) {
        let ino = node.ino;
        let content = !self.holds_any(ino, &[lease::READ, lease::WRITE]);
        let attr = self.0.meta.holds(ino, lease::ATTR).is_none();
        {
            let mut state = node.lock();
            if attr {
                state.doubt_attr();
            }
            if content && let Some(file) = &mut state.file {
                file.extents.clear();
                file.forget_pages();
            }
        }
        if content {
            self.0.host.invalidate_data(ino, 0, 0);
        } else if attr {
            self.0.host.invalidate_attr(ino);
        }
    }
}

/// A lock asked for; given up if the caller goes away.
struct Waiting {
    vfs: Vfs,
    node: Arc<Inode>,
    lock: Option<FileLock>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take() else { return };
        let (vfs, ino) = (self.vfs.clone(), self.node.ino);
        let lock = FileLock { ty: LockType::Unlock, ..lock };
        self.vfs.0.meta.spawn(async move {
            if let Err(fault) = vfs.0.meta.change(Op::Lock { ino, lock, wait: false }).await {
                tracing::warn!(%ino, %fault, "a lock that was given up may still be held");
            }
        });
    }
}
