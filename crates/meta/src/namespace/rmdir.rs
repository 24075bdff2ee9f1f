//! rmdir: removes an empty folder.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Ino, Result};

use super::remove::drop_name;
use super::{Ctx, Decision, count_entries, folder, shown, touch_folder};
use crate::view::View;

/// Removes the folder if nothing is in it.
pub fn rmdir(view: &mut View<'_>, ctx: &Ctx<'_>, parent: Ino, name: &[u8]) -> Result<Decision> {
    // As rmdir(2) has it: `.` is no name to remove, and `..` is never empty.
    match name {
        b"." => return Err(Code::Invalid.into()),
        b".." => return Err(Code::NotEmpty.into()),
        _ => super::check_name(name)?,
    }
    let mut dir = folder(view, parent)?;
    let Some(entry) = view.entry(parent, name)? else {
        return Err(Fault::new(Code::NotFound, format!("{} does not exist", shown(name))));
    };
    if entry.kind != Kind::Dir {
        return Err(Fault::new(Code::NotDir, format!("{} is not a folder", shown(name))));
    }
    let inode = view.inode(entry.ino)?;
    if inode.entries.unwrap_or(0) > 0 {
        return Err(Fault::new(Code::NotEmpty, format!("{} is not empty", shown(name))));
    }
    view.delete_entry(parent, name, &entry);
    count_entries(&mut dir, -1);
    dir.nlink = dir.nlink.saturating_sub(1);
    touch_folder(view, &mut dir);
    view.put_inode(parent, &dir);
    let mut decision = Decision::new(Done::Ok).change_name(parent, name).want(parent, lease::NAMES);
    let (inode, held) = drop_name(view, ctx, &mut decision, entry.ino, inode, false)?;
    decision.done = Done::Removed { attr: inode.attr(entry.ino), held };
    Ok(decision.store(Answered::Removed { ino: entry.ino, kind: Kind::Dir, held }))
}
