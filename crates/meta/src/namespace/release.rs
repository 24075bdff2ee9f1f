//! release: an inode without a name goes when nobody has it open any more.

use torchfs_proto::msg::meta::{Done, RELEASE_MAX};
use torchfs_proto::record::{self, Answered, Orphan, Xattr};
use torchfs_proto::{Ino, Result, SessionId, key};

use super::extents::{Progress, overlaps_more_than, remove_runs};
use super::{Ctx, Decision};
use crate::view::View;

/// Changes after which a batch takes no more extents in: many files may go at once, and they must fit together.
const CHANGES_MAX: usize = 8_192;

/// The session has these not open any more. What nobody holds then is removed, at once if it is small.
pub fn release(view: &mut View<'_>, ctx: &Ctx<'_>, inos: &[Ino]) -> Result<Decision> {
    if inos.len() > RELEASE_MAX {
        return Err(torchfs_proto::Code::TooMany.into());
    }
    view.frees = true;
    let mut decision = Decision::new(Done::Ok);
    for ino in inos {
        leave(view, ctx.session, *ino, ctx.trim, &mut decision)?;
    }
    Ok(if view.is_clean() { decision } else { decision.store(Answered::Ok) })
}

/// Takes a session off an orphan.
pub fn leave(
    view: &mut View<'_>,
    session: SessionId,
    ino: Ino,
    trim: usize,
    decision: &mut Decision,
) -> Result<()> {
    let at = key::orphan(view.volume, ino);
    let Some(mut orphan) = view.get::<Orphan>(&at)? else { return Ok(()) };
    if !orphan.sessions.contains(&session) {
        return Ok(());
    }
    orphan.sessions.retain(|holder| *holder != session);
    let trim = trim.min(CHANGES_MAX.saturating_sub(view.len()));
    let done = match view.find_inode(ino)? {
        Some(inode) => orphan.sessions.is_empty() && remove_inode(view, ino, &inode, trim)?,
        None => true,
    };
    if done {
        view.delete(at);
        decision.gone.push(ino);
    } else {
        if orphan.sessions.is_empty() {
            decision.upkeep.push(ino);
        }
        view.put(at, &orphan);
    }
    decision.changed.push(ino);
    Ok(())
}

/// Removes an inode with everything it has, if that fits one batch; else nothing happens and the answer is no.
pub(super) fn remove_inode(
    view: &mut View<'_>,
    ino: Ino,
    inode: &record::Inode,
    trim: usize,
) -> Result<bool> {
    if inode.stored > 0 && overlaps_more_than(view, ino, 0, u64::MAX, trim)? {
        return Ok(false);
    }
    if inode.has_xattrs() && view.list::<Xattr>(&key::xattrs(view.volume, ino), trim + 1)?.len() > trim {
        return Ok(false);
    }
    Ok(remove_all(view, ino, inode.clone(), Progress::default(), trim)?.is_none())
}

/// Removes a part of an orphan that nobody holds; answers where to go on, if something is left of it.
pub fn remove_orphan(
    view: &mut View<'_>,
    ino: Ino,
    progress: Progress,
    trim: usize,
) -> Result<Option<Progress>> {
    view.frees = true;
    let at = key::orphan(view.volume, ino);
    match view.get::<Orphan>(&at)? {
        Some(orphan) if orphan.sessions.is_empty() => {}
        // Held again (it got a name meanwhile), or gone.
        _ => return Ok(None),
    }
    let left = match view.find_inode(ino)? {
        Some(inode) => remove_all(view, ino, inode, progress, trim)?,
        None => None,
    };
    if left.is_none() {
        view.delete(at);
    }
    Ok(left)
}

fn remove_all(
    view: &mut View<'_>,
    ino: Ino,
    mut inode: record::Inode,
    progress: Progress,
    trim: usize,
) -> Result<Option<Progress>> {
    let mut next = None;
    if inode.stored > 0 {
        next = remove_runs(view, ino, &mut inode, progress, trim)?;
    }
    let mut left = 0;
    if next.is_none() && inode.has_xattrs() {
        let xattrs = view.list::<Xattr>(&key::xattrs(view.volume, ino), trim + 1)?;
        left = xattrs.len().saturating_sub(trim);
        for (at, _) in xattrs.into_iter().take(trim) {
            view.delete(at);
        }
    }
    if next.is_some() || left > 0 {
        view.put_inode(ino, &inode);
        return Ok(Some(next.unwrap_or(progress)));
    }
    if inode.cut.is_some() {
        view.delete(key::cut(view.volume, ino));
    }
    view.delete(key::inode(view.volume, ino));
    view.count(|counters| counters.inodes = counters.inodes.saturating_sub(1))?;
    Ok(None)
}
