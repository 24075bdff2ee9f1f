//! What happens to an inode when a name of it goes: shared by unlink, rmdir and rename.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::lease;
use torchfs_proto::{Ino, Result, SessionId, key, record};

use super::release::remove_inode;
use super::{Ctx, Decision, touch};
use crate::view::View;

/// Takes one name off an inode. With the last one it becomes an orphan for those who may have it open, or goes at once
/// when nobody may and it is small. Answers the inode as it is now, and whether the caller is held to have it open.
pub(super) fn drop_name(
    view: &mut View<'_>,
    ctx: &Ctx<'_>,
    decision: &mut Decision,
    ino: Ino,
    mut inode: record::Inode,
    idle: bool,
) -> Result<(record::Inode, bool)> {
    view.frees = true;
    inode.nlink = match inode.kind {
        Kind::Dir => 0,
        _ => inode.nlink.saturating_sub(1),
    };
    touch(view, &mut inode);
    let bits = if inode.kind == Kind::Dir { lease::ATTR | lease::NAMES } else { lease::ATTR };
    decision.note_change(ino, bits);
    if inode.nlink > 0 {
        view.put_inode(ino, &inode);
        decision.wants.push((ino, lease::ATTR));
        return Ok((inode, false));
    }
    let mut holders: Vec<SessionId> = (ctx.known)(ino);
    if idle {
        holders.retain(|session| *session != ctx.session);
    }
    let held = holders.contains(&ctx.session);
    view.put_inode(ino, &inode);
    if holders.is_empty() && remove_inode(view, ino, &inode, ctx.trim)? {
        decision.gone.push(ino);
    } else {
        let orphan = record::Orphan { born: view.born, sessions: holders.clone() };
        view.put(key::orphan(view.volume, ino), &orphan);
        if holders.is_empty() {
            decision.upkeep.push(ino);
        } else {
            decision.orphaned.push((ino, holders));
        }
    }
    Ok((inode, held))
}
