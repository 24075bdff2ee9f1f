//! unlink: removes a name that is not a folder's.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Ino, Result};

use super::remove::drop_name;
use super::{Ctx, Decision, check_name, count_entries, folder, shown, touch_folder};
use crate::view::View;

/// Removes the name. `idle` names the inode that the caller knows not to be open on its side.
pub fn unlink(
    view: &mut View<'_>,
    ctx: &Ctx<'_>,
    parent: Ino,
    name: &[u8],
    idle: Option<Ino>,
) -> Result<Decision> {
    check_name(name)?;
    let mut dir = folder(view, parent)?;
    let Some(entry) = view.entry(parent, name)? else {
        return Err(Fault::new(Code::NotFound, format!("{} does not exist", shown(name))));
    };
    if entry.kind == Kind::Dir {
        return Err(Fault::new(Code::IsDir, format!("{} is a folder", shown(name))));
    }
    let inode = view.inode(entry.ino)?;
    view.delete_entry(parent, name, &entry);
    count_entries(&mut dir, -1);
    touch_folder(view, &mut dir);
    view.put_inode(parent, &dir);
    let mut decision = Decision::new(Done::Ok).change_name(parent, name).want(parent, lease::NAMES);
    let (inode, held) = drop_name(view, ctx, &mut decision, entry.ino, inode, idle == Some(entry.ino))?;
    decision.done = Done::Removed { attr: inode.attr(entry.ino), held };
    Ok(decision.store(Answered::Removed { ino: entry.ino, kind: inode.kind, held }))
}
