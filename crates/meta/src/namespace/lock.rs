//! lock: fcntl and flock locks, kept as records that die with their session.
//!
//! # Invariants
//! - Of one kind, an exclusive lock overlaps no lock of another owner.
//! - The fcntl locks of one owner on one file do not overlap each other.
//!
//! # Not here
//! Waiting, fairness and the search for deadlocks: `service/locking.rs`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use torchfs_proto::msg::meta::{FileLock, LockKind, LockType};
use torchfs_proto::{Code, Fault, Ino, Result, SessionId, key, record};

use crate::view::View;

/// Most locks on one file.
const LOCKS_MAX: usize = 65_536;

/// A lock and the session it belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// Whose.
    pub session: SessionId,
    /// What.
    pub lock: FileLock,
}

impl Held {
    /// Whether two locks cannot be held at once.
    pub fn excludes(&self, other: &Held) -> bool {
        self.lock.kind == other.lock.kind
            && (self.session, self.lock.owner) != (other.session, other.lock.owner)
            && (self.lock.ty == LockType::Write || other.lock.ty == LockType::Write)
            && self.lock.ty != LockType::Unlock
            && other.lock.ty != LockType::Unlock
            && self.overlaps(other)
    }

    /// Whether both are of one owner and concern the same bytes.
    pub fn is_replaced_by(&self, other: &Held) -> bool {
        self.lock.kind == other.lock.kind
            && (self.session, self.lock.owner) == (other.session, other.lock.owner)
            && self.overlaps(other)
    }

    fn overlaps(&self, other: &Held) -> bool {
        self.lock.kind == LockKind::Flock
            || self.lock.start <= other.lock.end && other.lock.start <= self.lock.end
    }
}

/// All locks on a file.
pub fn held_locks(view: &View<'_>, ino: Ino) -> Result<Vec<Held>> {
    let prefix = key::locks(view.volume, ino);
    let mut held = Vec::new();
    view.scan(&prefix, &key::after(&prefix), false, &mut |key, lock: record::Lock| {
        let Some(parts) = key::Parts::of(key) else { return ControlFlow::Continue(()) };
        let kind = if parts.rest.get(8) == Some(&1) { LockKind::Flock } else { LockKind::Posix };
        if let (Some(session), Some(owner), Some(start)) =
            (parts.u64_at(9), parts.u64_at(17), parts.u64_at(25))
        {
            let lock = FileLock { kind, ty: lock.ty, owner, pid: lock.pid, start, end: lock.end };
            held.push(Held { session: SessionId(session), lock });
        }
        ControlFlow::Continue(())
    })?;
    Ok(held)
}

/// The first lock that keeps this one from being taken.
pub fn in_the_way<'a>(held: &'a [Held], wanted: &Held) -> Option<&'a Held> {
    held.iter().find(|held| held.excludes(wanted))
}

/// Takes or releases a lock that nothing is in the way of; answers whether the session has a lock on the file then. Locks that
/// stay as they are cost nothing, however many an owner has.
pub fn set_lock(view: &mut View<'_>, ino: Ino, held: &[Held], wanted: &Held) -> Result<bool> {
    let lock = &wanted.lock;
    let same =
        |h: &&Held| h.session == wanted.session && h.lock.owner == lock.owner && h.lock.kind == lock.kind;
    let mine: Vec<&Held> = held.iter().filter(same).collect();
    let mut kept: Vec<FileLock> = Vec::new();
    let mut new = match lock.kind {
        LockKind::Flock => FileLock { start: 0, end: u64::MAX, ..lock.clone() },
        LockKind::Posix => lock.clone(),
    };
    if new.start > new.end {
        return Err(Fault::new(Code::Invalid, "a lock ends before it begins"));
    }
    for old in &mine {
        let old = &old.lock;
        let touches = old.start <= new.end.saturating_add(1) && new.start <= old.end.saturating_add(1);
        if old.ty == new.ty && touches {
            new.start = new.start.min(old.start);
            new.end = new.end.max(old.end);
        } else if old.start > new.end || new.start > old.end {
            kept.push(old.clone());
        } else {
            if old.start < new.start {
                kept.push(FileLock { end: new.start - 1, ..old.clone() });
            }
            if old.end > new.end {
                kept.push(FileLock { start: new.end + 1, ..old.clone() });
            }
        }
    }
    if lock.ty == LockType::Unlock {
        view.frees = true;
    } else {
        kept.push(new);
    }
    if held.len() - mine.len() + kept.len() > LOCKS_MAX {
        return Err(Fault::new(Code::TooMany, format!("inode {ino} has {LOCKS_MAX} locks")));
    }
    // Locks of one owner do not overlap: the first byte tells them apart.
    let mut before: BTreeMap<u64, &FileLock> = mine.iter().map(|old| (old.lock.start, &old.lock)).collect();
    for lock in &kept {
        if before.remove(&lock.start) != Some(lock) {
            let record = record::Lock { born: view.born, ty: lock.ty, end: lock.end, pid: lock.pid };
            view.put(key_of(view, ino, wanted.session, lock), &record);
        }
    }
    for old in before.into_values() {
        view.delete(key_of(view, ino, wanted.session, old));
    }
    let others = |h: &Held| h.session == wanted.session && !same(&h);
    Ok(!kept.is_empty() || held.iter().any(others))
}

/// Releases the locks of a session on a file, at most so many; answers whether none is left.
pub fn release_locks(view: &mut View<'_>, ino: Ino, session: SessionId, most: usize) -> Result<bool> {
    let mut held = held_locks(view, ino)?;
    held.retain(|held| held.session == session);
    for held in held.iter().take(most) {
        view.delete(key_of(view, ino, session, &held.lock));
    }
    Ok(held.len() <= most)
}

fn key_of(view: &View<'_>, ino: Ino, session: SessionId, lock: &FileLock) -> Vec<u8> {
    key::lock(view.volume, ino, lock.kind, session, lock.owner, lock.start)
}
