//! File locks: fcntl and flock, held at the service, so that they hold across nodes and die with the session.
//!
//! A lock revalidates: what is cached without a lease is dropped, so that the holder sees what the last one left. An unlock
//! publishes: what was written under the lock is committed before it goes; where others have the file open too, what was changed in
//! mappings as well.
//!
//! A caller that leaves without an answer (a signal, or a silent service) may have got its lock all the same. So we remember which
//! locks their owners were told of, and bring the service back to those: what nobody knows of is unlocked, what was held
//! before stays. That may outlast the caller, who never waits for it; only what the same owner asks for next does.
//!
//! # Invariants
//! - A lock that no process knows of is taken back; one that a process was told of is never taken away.
//! - Nothing is asked for on a range while something of the same owner there is being unlocked or taken back: an unlock
//!   that comes late takes no newer lock along.

use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::HashMap;
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

    /// Takes or releases a lock. A caller that drops this future before it is ready does not get the lock.
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
        loop {
            let taken_back = self.undisturbed(&node, &lock).await;
            let mut asking = Asking { vfs: self.clone(), node: node.clone(), lock: Some(lock.clone()) };
            loop {
                let tick = self.0.tick.listen();
                match self.0.meta.change(Op::Lock { ino, lock: lock.clone(), wait }).await {
                    Ok(_) => break,
                    // Nobody knows how long it takes: ask again until it is there or the caller gives up.
                    Err(fault) if wait && matches!(fault.code, Code::WouldBlock | Code::Timeout) => {
                        tick.await
                    }
                    Err(fault) => {
                        // A silent service may hear it yet.
                        if fault.code != Code::Timeout {
                            asking.lock = None;
                        }
                        return Err(fault);
                    }
                }
            }
            let granting = Granting::begin(&node, &lock);
            self.revalidate(&node).await;
            asking.lock = None;
            // Otherwise a wait of the same owner was taken back meanwhile, and this lock may have gone with it.
            let granted = node.lock().locks.of(&lock).granted(&lock, taken_back);
            drop(granting);
            if granted {
                return Ok(());
            }
        }
    }

    /// Releases all locks of an owner, if there are any.
    pub(crate) async fn drop_locks(&self, ino: Ino, kind: LockKind, owner: u64) -> Result<()> {
        let Some(node) = self.find_node(ino) else { return Ok(()) };
        if !node.lock().locks.0.contains_key(&(kind, owner)) {
            return Ok(());
        }
        let lock = FileLock { kind, ty: LockType::Unlock, owner, pid: 0, start: 0, end: u64::MAX };
        let unlocked = self.unlock(node.clone(), lock.clone()).await;
        node.lock().locks.forget(&lock);
        unlocked
    }

    /// Publishes, then releases; from the moment it is sent it happens, whether or not somebody waits.
    async fn unlock(&self, node: Arc<Inode>, lock: FileLock) -> Result<()> {
        let releasing = Releasing::begin(&node, &lock);
        if self.0.meta.holds(node.ino, lease::WRITE).is_none() {
            self.take_mapped(&node).await;
        }
        self.write_back(&node).await;
        let vfs = self.clone();
        let sent = async move {
            loop {
                let progress = node.progress.listen();
                {
                    let mut state = node.lock();
                    let owner = state.locks.of(&lock);
                    // Before it waits, too: what is being taken back now need not come back.
                    owner.held.set(&lock);
                    if !overlaps(&owner.returning, &lock) {
                        break;
                    }
                }
                progress.await;
            }
            let unlocked = vfs.0.meta.change(Op::Lock { ino: node.ino, lock, wait: false }).await;
            drop(releasing);
            unlocked
        };
        self.finish(sent).await.map(|_| ())
    }

    /// Waits until nothing of the owner is being unlocked or taken back there, and notes that it asks for locks: whoever closes the
    /// file unlocks what is noted. Says how often something of it was taken back.
    async fn undisturbed(&self, node: &Inode, lock: &FileLock) -> u64 {
        loop {
            let progress = node.progress.listen();
            {
                let mut state = node.lock();
                let owner = state.locks.of(lock);
                if !overlaps(&owner.returning, lock) && !overlaps(&owner.releasing, lock) {
                    owner.asked = true;
                    return owner.taken_back;
                }
            }
            progress.await;
        }
    }

    /// Brings the service back to the locks that the owner was told of, where this one may have been granted unheard.
    async fn take_back(&self, node: &Arc<Inode>, lock: &FileLock) {
        let (mut from, last) = extent(lock);
        loop {
            let tick = self.0.tick.listen();
            // Looked at each time: the owner may have released it meanwhile.
            let known = node.lock().locks.of(lock).held.known(from, lock);
            let end = known.end;
            // One that has the wanted type already is what it was before.
            if known.ty != lock.ty {
                match self.0.meta.change(Op::Lock { ino: node.ino, lock: known, wait: false }).await {
                    Ok(_) => {}
                    // It was weakened by what was granted unheard, and others came in: theirs end.
                    Err(fault) if fault.code == Code::WouldBlock => {
                        tick.await;
                        continue;
                    }
                    // It happens all the same, before whatever is asked for next.
                    Err(fault) if fault.code == Code::Timeout => {}
                    Err(fault) => {
                        tracing::warn!(ino = %node.ino, %fault, "a lock that nobody knows of may be held");
                        return;
                    }
                }
            }
            if end >= last {
                return;
            }
            from = end + 1;
        }
    }

    /// Has the kernel write what programs changed in mappings.
    async fn take_mapped(&self, node: &Inode) {
        if node.lock().writers == 0 {
            return;
        }
        self.0.host.invalidate_data(node.ino, 0, 0);
        self.host_settled().await;
    }

    /// Drops what no lease protects.
    async fn revalidate(&self, node: &Inode) {
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
            self.host_settled().await;
        } else if attr {
            self.0.host.invalidate_attr(ino);
        }
    }
}

/// A lock asked for; taken back if the caller goes away before it is answered.
struct Asking {
    vfs: Vfs,
    node: Arc<Inode>,
    lock: Option<FileLock>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take() else { return };
        {
            let mut state = self.node.lock();
            let owner = state.locks.of(&lock);
            owner.taken_back += 1;
            owner.returning.push(extent(&lock));
        }
        let (vfs, node) = (self.vfs.clone(), self.node.clone());
        self.vfs.0.meta.spawn(async move {
            vfs.take_back(&node, &lock).await;
            {
                let locks = &mut node.lock().locks;
                remove(&mut locks.of(&lock).returning, &lock);
                locks.tidy(&lock);
            }
            node.progress.notify();
        });
    }
}

/// A lock that the service granted and its owner is not told of yet: what the owner unlocks there comes after it.
struct Granting {
    node: Arc<Inode>,
    lock: FileLock,
}

impl Granting {
    fn begin(node: &Arc<Inode>, lock: &FileLock) -> Granting {
        node.lock().locks.of(lock).returning.push(extent(lock));
        Granting { node: node.clone(), lock: lock.clone() }
    }
}

impl Drop for Granting {
    fn drop(&mut self) {
        {
            let locks = &mut self.node.lock().locks;
            remove(&mut locks.of(&self.lock).returning, &self.lock);
            locks.tidy(&self.lock);
        }
        self.node.progress.notify();
    }
}

/// An unlock that was asked for and has no answer yet.
struct Releasing {
    node: Arc<Inode>,
    lock: FileLock,
}

impl Releasing {
    fn begin(node: &Arc<Inode>, lock: &FileLock) -> Releasing {
        node.lock().locks.of(lock).releasing.push(extent(lock));
        Releasing { node: node.clone(), lock: lock.clone() }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        {
            let locks = &mut self.node.lock().locks;
            remove(&mut locks.of(&self.lock).releasing, &self.lock);
            locks.tidy(&self.lock);
        }
        self.node.progress.notify();
    }
}

/// The locks on one inode that were asked for here, by owner.
#[derive(Default)]
pub(crate) struct Locks(HashMap<(LockKind, u64), Owner>);

#[derive(Default)]
struct Owner {
    held: Ranges,
    /// It asked for locks since it last closed the file.
    asked: bool,
    /// Where locks are being unlocked,
    releasing: Vec<(u64, u64)>,
    /// and where they are being granted or taken back, and how often the latter was begun.
    returning: Vec<(u64, u64)>,
    taken_back: u64,
}

impl Locks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of(&mut self, lock: &FileLock) -> &mut Owner {
        self.0.entry((lock.kind, lock.owner)).or_default()
    }

    /// The owner closed the file.
    fn forget(&mut self, lock: &FileLock) {
        self.of(lock).asked = false;
        self.tidy(lock);
    }

    /// Something of the owner ended.
    fn tidy(&mut self, lock: &FileLock) {
        let owner = self.of(lock);
        let under_way = owner.asked || !owner.releasing.is_empty() || !owner.returning.is_empty();
        if !under_way && owner.held.0.is_empty() {
            self.0.remove(&(lock.kind, lock.owner));
        }
    }
}

impl Owner {
    /// The owner is told of a lock, unless something was taken back since it was asked for.
    fn granted(&mut self, lock: &FileLock, taken_back: u64) -> bool {
        if self.taken_back != taken_back {
            return false;
        }
        self.held.set(lock);
        true
    }
}

/// Locks of one owner, as it knows them: first byte, last byte, type. They do not overlap.
#[derive(Default, PartialEq, Eq, Debug)]
struct Ranges(BTreeMap<u64, (u64, LockType)>);

impl Ranges {
    /// Locks or unlocks a range.
    fn set(&mut self, lock: &FileLock) {
        let (mut start, mut end) = extent(lock);
        // Neighbours too: those of the same type become one.
        let touching = (start.saturating_sub(1), end.saturating_add(1));
        let first = self.0.range(..touching.0).next_back().map_or(touching.0, |(first, _)| *first);
        let near: Vec<u64> = self.0.range(first..=touching.1).map(|(first, _)| *first).collect();
        for first in near {
            let Some((last, ty)) = self.0.get(&first).copied().filter(|(last, _)| *last >= touching.0) else {
                continue;
            };
            if ty == lock.ty {
                self.0.remove(&first);
                (start, end) = (start.min(first), end.max(last));
            } else if first <= end && last >= start {
                self.0.remove(&first);
                if first < start {
                    self.0.insert(first, (start - 1, ty));
                }
                if last > end {
                    self.0.insert(end + 1, (last, ty));
                }
            }
        }
        if lock.ty != LockType::Unlock {
            self.0.insert(start, (end, lock.ty));
        }
    }

    /// What is known in a lock's range from here on, up to where that changes.
    fn known(&self, start: u64, lock: &FileLock) -> FileLock {
        let (_, end) = extent(lock);
        let (ty, upto) = match self.0.range(..=start).next_back().filter(|(_, (last, _))| *last >= start) {
            Some((_, (last, ty))) => (*ty, *last),
            None => {
                let next = self.0.range(start..).next().map_or(u64::MAX, |(next, _)| next - 1);
                (LockType::Unlock, next)
            }
        };
        FileLock { ty, start, end: upto.min(end), ..lock.clone() }
    }
}

/// The first and the last byte that a lock concerns.
fn extent(lock: &FileLock) -> (u64, u64) {
    match lock.kind {
        LockKind::Flock => (0, u64::MAX),
        LockKind::Posix => (lock.start, lock.end),
    }
}

fn overlaps(ranges: &[(u64, u64)], lock: &FileLock) -> bool {
    let (start, end) = extent(lock);
    ranges.iter().any(|(first, last)| *first <= end && start <= *last)
}

fn remove(ranges: &mut Vec<(u64, u64)>, lock: &FileLock) {
    if let Some(at) = ranges.iter().position(|range| *range == extent(lock)) {
        ranges.swap_remove(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(ty: LockType, start: u64, end: u64) -> FileLock {
        FileLock { kind: LockKind::Posix, ty, owner: 1, pid: 1, start, end }
    }

    fn pieces(ranges: &Ranges, start: u64, end: u64) -> Vec<(u64, u64, LockType)> {
        let (mut found, mut from) = (Vec::new(), start);
        loop {
            let known = ranges.known(from, &lock(LockType::Write, start, end));
            found.push((known.start, known.end, known.ty));
            if known.end == end {
                return found;
            }
            from = known.end + 1;
        }
    }

    #[test]
    fn what_an_owner_knows_agrees_with_an_array() {
        use LockType::{Read, Unlock, Write};
        let (mut ranges, mut model, mut seed) = (Ranges::default(), [Unlock; 40], 1u64);
        for _ in 0..5_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (one, two) = (seed >> 33 & 0xffff, seed >> 49);
            let (start, end) = ((one % 40).min(two % 40), (one % 40).max(two % 40));
            let ty = [Read, Write, Unlock][(one / 40 % 3) as usize];
            ranges.set(&lock(ty, start, end));
            model[start as usize..=end as usize].fill(ty);
            let told: Vec<LockType> = pieces(&ranges, 0, 39)
                .into_iter()
                .flat_map(|(start, end, ty)| (start..=end).map(move |_| ty))
                .collect();
            assert_eq!(told, model);
            let runs = model.chunk_by(|a, b| a == b).filter(|run| run[0] != Unlock).count();
            assert_eq!(ranges.0.len(), runs, "neighbours of one type are one");
        }
    }

    #[test]
    fn ranges_reach_to_both_ends() {
        let mut ranges = Ranges::default();
        ranges.set(&lock(LockType::Read, 0, u64::MAX));
        ranges.set(&lock(LockType::Unlock, 10, u64::MAX));
        assert_eq!(pieces(&ranges, 5, u64::MAX), [(5, 9, LockType::Read), (10, u64::MAX, LockType::Unlock)]);
        ranges.set(&FileLock { kind: LockKind::Flock, ..lock(LockType::Write, 3, 4) });
        assert_eq!(pieces(&ranges, 0, 7), [(0, 7, LockType::Write)]);
    }
}
