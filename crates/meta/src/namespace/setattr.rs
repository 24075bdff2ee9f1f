//! setattr: mode, owner, times, length.

use torchfs_proto::attr::{Kind, SIZE_MAX, SetAttr, SetTime, Time};
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Ino, Result};

use super::extents::{Edit, Resized};
use super::{BlockChanges, Ctx, Decision, file, kill_privileges, touch};
use crate::view::View;

/// Changes what is given. A new length below the old one frees space; extents beyond it that are too many for one
/// batch are left to the upkeep.
pub fn setattr(view: &mut View<'_>, ctx: &Ctx<'_>, ino: Ino, set: &SetAttr) -> Result<Decision> {
    let mut inode = view.inode(ino)?;
    let mut bits = lease::ATTR;
    let mut decision = Decision::new(Done::Ok);
    if let Some(size) = set.size {
        file(view, ino)?;
        if size > SIZE_MAX {
            return Err(Fault::new(Code::TooLarge, format!("{size} bytes are more than a file can have")));
        }
        bits |= lease::READ | lease::WRITE;
        view.frees = size < inode.size;
        let mut changes = BlockChanges::default();
        let mut edit = Edit { view, ino, inode: &mut inode, changes: &mut changes };
        match edit.resize(size, ctx.trim)? {
            Resized::Done => {}
            Resized::Cut => decision.upkeep.push(ino),
            Resized::First(first) => {
                decision.first = Some(first);
                return Ok(decision.change(ino, bits));
            }
        }
        changes.apply(view)?;
        inode.mtime = view.now;
        inode.data_version += 1;
        decision.content.push(ino);
    }
    if set.uid.is_some() || set.gid.is_some() || set.kill_privileges {
        if inode.kind == Kind::File {
            kill_privileges(view, ino, &mut inode)?;
        }
        inode.uid = set.uid.unwrap_or(inode.uid);
        inode.gid = set.gid.unwrap_or(inode.gid);
    }
    if let Some(mode) = set.mode {
        inode.mode = mode & 0o7777;
    }
    let time = |set: SetTime| match set {
        SetTime::Now => view.now,
        SetTime::At(time) => Time { nanos: time.nanos.min(999_999_999), ..time },
    };
    touch(view, &mut inode);
    inode.atime = set.atime.map_or(inode.atime, time);
    inode.mtime = set.mtime.map_or(inode.mtime, time);
    inode.ctime = set.ctime.map_or(inode.ctime, time);
    view.put_inode(ino, &inode);
    decision.done = Done::Attr(inode.attr(ino));
    Ok(decision.change(ino, bits).want(ino, lease::ATTR).store(Answered::Attr(ino)))
}
