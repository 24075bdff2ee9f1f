//! link: one more name for an inode.

use torchfs_proto::attr::{Kind, LINK_MAX};
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::{self, Answered};
use torchfs_proto::{Code, Fault, Ino, Result, key};

use super::{Decision, check_name, count_entries, living_folder, next_cookie, shown, touch, touch_folder};
use crate::view::View;

/// Gives an inode that is not a folder another name; one without any name (O_TMPFILE) gets its first.
pub fn link(view: &mut View<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Result<Decision> {
    check_name(name)?;
    let mut folder = living_folder(view, parent)?;
    let mut inode = view.inode(ino)?;
    if inode.kind == Kind::Dir {
        return Err(Fault::new(Code::Permission, "a folder has one name only"));
    }
    if view.entry(parent, name)?.is_some() {
        return Err(Fault::new(Code::Exists, format!("{} exists", shown(name))));
    }
    if inode.nlink >= LINK_MAX {
        return Err(Fault::new(Code::TooManyLinks, format!("inode {ino} has {LINK_MAX} names")));
    }
    if inode.nlink == 0 {
        let orphan: Option<record::Orphan> = view.get(&key::orphan(view.volume, ino))?;
        // One that nobody has open is being removed already.
        if orphan.is_none_or(|orphan| orphan.sessions.is_empty()) {
            return Err(Fault::new(Code::NotFound, format!("inode {ino} is gone")));
        }
        view.delete(key::orphan(view.volume, ino));
    }
    inode.nlink += 1;
    inode.parent = parent;
    touch(view, &mut inode);
    view.put_inode(ino, &inode);
    let entry = record::Entry { born: view.born, ino, kind: inode.kind, cookie: next_cookie(&mut folder) };
    count_entries(&mut folder, 1);
    touch_folder(view, &mut folder);
    view.put_inode(parent, &folder);
    view.put_entry(parent, name, &entry);
    Ok(Decision::new(Done::Attr(inode.attr(ino)))
        .change_name(parent, name)
        .change(ino, lease::ATTR)
        .want(parent, lease::NAMES)
        .want(ino, lease::ATTR)
        .store(Answered::Attr(ino)))
}
