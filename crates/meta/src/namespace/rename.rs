//! rename: moves a name, replaces what was there, or exchanges two.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, lease, rename as flag};
use torchfs_proto::record::{self, Answered};
use torchfs_proto::{Code, Fault, Ino, Result};

use super::remove::drop_name;
use super::{
    Ctx, Decision, check_name, count_entries, folder, living_folder, next_cookie, shown, touch, touch_folder,
};
use crate::view::View;

/// One end of a rename.
#[derive(Clone, Copy)]
pub struct End<'a> {
    /// The folder.
    pub parent: Ino,
    /// The name in it.
    pub name: &'a [u8],
}

/// Folders deeper than this are taken for a damaged tree.
const DEPTH_MAX: usize = 1 << 20;

/// Moves `from` to `to`, atomically.
pub fn rename(
    view: &mut View<'_>,
    ctx: &Ctx<'_>,
    from: End<'_>,
    to: End<'_>,
    flags: u32,
) -> Result<Decision> {
    check_name(from.name)?;
    check_name(to.name)?;
    let exchange = flags & flag::EXCHANGE != 0;
    let noreplace = flags & flag::NOREPLACE != 0;
    if flags & !(flag::EXCHANGE | flag::NOREPLACE) != 0 || exchange && noreplace {
        return Err(Fault::new(Code::Invalid, format!("rename flags {flags:#x} make no sense")));
    }
    folder(view, from.parent)?;
    living_folder(view, to.parent)?;
    let Some(entry) = view.entry(from.parent, from.name)? else {
        return Err(Fault::new(Code::NotFound, format!("{} does not exist", shown(from.name))));
    };
    let target = view.entry(to.parent, to.name)?;
    if target.is_some() && noreplace {
        return Err(Fault::new(Code::Exists, format!("{} exists", shown(to.name))));
    }
    if entry.kind == Kind::Dir && is_within(view, to.parent, entry.ino)? {
        return Err(Fault::new(Code::Invalid, format!("{} cannot move into itself", shown(from.name))));
    }
    if let Some(target) = &target
        && target.ino == entry.ino
    {
        // Two names of one inode: POSIX asks that nothing happens.
        let attr = view.inode(entry.ino)?.attr(entry.ino);
        let decision = Decision::new(Done::Renamed { attr, other: None, held: false });
        let decision = decision.read(from.parent).read(to.parent).read(entry.ino);
        return Ok(decision
            .want(from.parent, lease::NAMES)
            .want(to.parent, lease::NAMES)
            .want(entry.ino, lease::ATTR));
    }
    let mut decision = Decision::new(Done::Ok)
        .change_name(from.parent, from.name)
        .change_name(to.parent, to.name)
        .change(entry.ino, lease::ATTR);
    let mut inode = view.inode(entry.ino)?;
    touch(view, &mut inode);
    inode.parent = to.parent;

    let (other, held) = match (exchange, target) {
        (true, None) => {
            return Err(Fault::new(Code::NotFound, format!("{} does not exist", shown(to.name))));
        }
        (true, Some(target)) => {
            if target.kind == Kind::Dir && is_within(view, from.parent, target.ino)? {
                return Err(Fault::new(Code::Invalid, format!("{} cannot move into itself", shown(to.name))));
            }
            let mut other = view.inode(target.ino)?;
            touch(view, &mut other);
            other.parent = from.parent;
            decision.note_change(target.ino, lease::ATTR);
            view.put_inode(entry.ino, &inode);
            view.put_inode(target.ino, &other);
            // Each name keeps its place in its folder.
            view.put_entry(from.parent, from.name, &record::Entry { cookie: entry.cookie, ..target.clone() });
            view.put_entry(to.parent, to.name, &record::Entry { cookie: target.cookie, ..entry.clone() });
            let subfolders = i32::from(target.kind == Kind::Dir) - i32::from(entry.kind == Kind::Dir);
            change_folder(view, from.parent, 0, subfolders)?;
            change_folder(view, to.parent, 0, -subfolders)?;
            (Some((target.ino, other)), false)
        }
        (false, Some(target)) => {
            match (entry.kind, target.kind) {
                (Kind::Dir, Kind::Dir) => {}
                (Kind::Dir, _) => {
                    return Err(Fault::new(Code::NotDir, format!("{} is not a folder", shown(to.name))));
                }
                (_, Kind::Dir) => {
                    return Err(Fault::new(Code::IsDir, format!("{} is a folder", shown(to.name))));
                }
                _ => {}
            }
            let replaced = view.inode(target.ino)?;
            if replaced.entries.unwrap_or(0) > 0 {
                return Err(Fault::new(Code::NotEmpty, format!("{} is not empty", shown(to.name))));
            }
            view.put_inode(entry.ino, &inode);
            view.delete_entry(from.parent, from.name, &entry);
            // The name was there before and is there after: a listing that goes on meanwhile sees it once.
            view.put_entry(to.parent, to.name, &record::Entry { cookie: target.cookie, ..entry.clone() });
            let moved = i32::from(entry.kind == Kind::Dir);
            change_folder(view, from.parent, -1, -moved)?;
            change_folder(view, to.parent, 0, moved - i32::from(target.kind == Kind::Dir))?;
            let (replaced, held) = drop_name(view, ctx, &mut decision, target.ino, replaced, false)?;
            // What a rename replaces does not make the rename a deletion: the name stays.
            view.frees = false;
            (Some((target.ino, replaced)), held)
        }
        (false, None) => {
            view.put_inode(entry.ino, &inode);
            view.delete_entry(from.parent, from.name, &entry);
            let mut new_folder = view.inode(to.parent)?;
            let cookie = next_cookie(&mut new_folder);
            view.put_inode(to.parent, &new_folder);
            view.put_entry(to.parent, to.name, &record::Entry { cookie, ..entry.clone() });
            let moved = i32::from(entry.kind == Kind::Dir);
            change_folder(view, from.parent, -1, -moved)?;
            change_folder(view, to.parent, 1, moved)?;
            (None, false)
        }
    };
    // The moved inode may be one of the folders written above only when it is a folder moved beside itself; read it again.
    let attr = view.inode(entry.ino)?.attr(entry.ino);
    let answered = Answered::Renamed {
        ino: entry.ino,
        other: other.as_ref().map(|(ino, inode)| (*ino, inode.kind)),
        held,
    };
    decision.done = Done::Renamed { attr, other: other.map(|(ino, inode)| inode.attr(ino)), held };
    if from.parent != to.parent {
        decision = decision.want(from.parent, lease::NAMES);
    }
    Ok(decision.want(to.parent, lease::NAMES).want(entry.ino, lease::ATTR).store(answered))
}

/// The names of a folder changed, by so many entries and so many folders among them.
fn change_folder(view: &mut View<'_>, ino: Ino, entries: i64, subfolders: i32) -> Result<()> {
    let mut folder = view.inode(ino)?;
    count_entries(&mut folder, entries);
    folder.nlink = folder.nlink.saturating_add_signed(subfolders);
    touch_folder(view, &mut folder);
    view.put_inode(ino, &folder);
    Ok(())
}

/// Whether a folder is another one or lies below it.
fn is_within(view: &View<'_>, mut ino: Ino, above: Ino) -> Result<bool> {
    for _ in 0..DEPTH_MAX {
        if ino == above {
            return Ok(true);
        }
        if ino == Ino::ROOT {
            return Ok(false);
        }
        let parent = view.inode(ino)?.parent;
        if parent == ino {
            return Ok(false);
        }
        ino = parent;
    }
    Err(Fault::new(Code::Corrupt, format!("the folders above inode {ino} have no end"))
        .next("run `torchfs fsck`"))
}
