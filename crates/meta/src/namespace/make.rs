//! make: a new file, folder, symlink, pipe, socket or device.

use torchfs_proto::attr::{Kind, TARGET_MAX};
use torchfs_proto::msg::meta::{Done, Make, lease};
use torchfs_proto::record::{self, Answered};
use torchfs_proto::{Code, Fault, Ino, Result};

use super::{Ctx, Decision, check_name, count_entries, living_folder, next_cookie, shown, touch_folder};
use crate::view::View;

/// Makes an inode with a name, or without one for O_TMPFILE. A folder with sgid hands down its group, and to folders
/// the bit itself.
pub fn make(view: &mut View<'_>, ctx: &Ctx<'_>, make: &Make) -> Result<Decision> {
    let mut parent = living_folder(view, make.parent)?;
    let named = !make.name.is_empty();
    if named {
        check_name(&make.name)?;
        if let Some(entry) = view.entry(make.parent, &make.name)? {
            if make.exclusive || make.kind != Kind::File {
                return Err(Fault::new(Code::Exists, format!("{} exists", shown(&make.name))));
            }
            let attr = view.inode(entry.ino)?.attr(entry.ino);
            let decision = Decision::new(Done::Made { attr, created: false });
            return Ok(decision
                .read(make.parent)
                .read(entry.ino)
                .want(make.parent, lease::NAMES)
                .want(entry.ino, lease::ATTR));
        }
    } else if make.kind != Kind::File {
        return Err(Fault::new(Code::Invalid, "only a file can be made without a name"));
    }
    let target = match make.kind {
        Kind::Symlink if make.target.is_empty() => {
            return Err(Fault::new(Code::NotFound, "a symlink must point somewhere"));
        }
        Kind::Symlink if make.target.len() > TARGET_MAX => return Err(Code::NameTooLong.into()),
        Kind::Symlink => Some(make.target.clone()),
        _ => None,
    };

    let mut counters = view.counters()?;
    let next = Ino(counters.next_ino.max(Ino::ROOT.0 + 1));
    let ino = match ctx.made {
        // Programs know the inode by the number that the first answer gave it; only a crash took the record away.
        Some(made) if made > Ino::ROOT && made < next && view.find_inode(made)?.is_none() => made,
        _ => {
            counters.next_ino = next.0 + 1;
            next
        }
    };
    counters.inodes += 1;
    view.put(torchfs_proto::key::counters(view.volume), &counters);

    let inherits = parent.mode & 0o2000 != 0;
    let is_dir = make.kind == Kind::Dir;
    let mut mode = make.mode & 0o7777;
    if inherits && is_dir {
        mode |= 0o2000;
    }
    let inode = record::Inode {
        born: view.born,
        kind: make.kind,
        mode: if make.kind == Kind::Symlink { 0o777 } else { mode },
        uid: make.uid,
        gid: if inherits { parent.gid } else { make.gid },
        nlink: match (named, is_dir) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        },
        size: target.as_ref().map_or(0, |target| target.len() as u64),
        stored: 0,
        atime: view.now,
        mtime: view.now,
        ctime: view.now,
        btime: view.now,
        data_version: 1,
        change: 1,
        flags: 0,
        parent: make.parent,
        generation: 1,
        layout: parent.layout,
        quota: parent.quota,
        rdev: matches!(make.kind, Kind::CharDev | Kind::BlockDev).then_some(make.rdev),
        target,
        next_cookie: None,
        entries: None,
        cut: None,
    };
    view.put_inode(ino, &inode);
    let done = Done::Made { attr: inode.attr(ino), created: true };
    let mut decision = Decision::new(done).store(Answered::Made { ino, created: true });
    if named {
        let entry = record::Entry { born: view.born, ino, kind: make.kind, cookie: next_cookie(&mut parent) };
        count_entries(&mut parent, 1);
        if is_dir {
            parent.nlink += 1;
        }
        touch_folder(view, &mut parent);
        view.put_inode(make.parent, &parent);
        view.put_entry(make.parent, &make.name, &entry);
        decision = decision.change_name(make.parent, &make.name).want(make.parent, lease::NAMES);
    } else {
        let orphan = record::Orphan { born: view.born, sessions: vec![ctx.session] };
        view.put(torchfs_proto::key::orphan(view.volume, ino), &orphan);
    }
    decision.changed.push(ino);
    let write = if make.open && make.kind == Kind::File { lease::WRITE } else { 0 };
    // A folder that was just made is empty, and nobody else can have filled it.
    let names = if is_dir { lease::NAMES } else { 0 };
    Ok(decision.want(ino, lease::ATTR | write | names))
}
