//! lookup: an entry of a folder, or its absence.

use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use super::{Decision, folder};
use crate::view::View;

/// Finds a name; `.` and `..` are answered too. Absence is an answer that a lease on the folder's names covers.
pub fn lookup(view: &View<'_>, parent: Ino, name: &[u8]) -> Result<Decision> {
    let inode = folder(view, parent)?;
    if name == b"." || name == b".." {
        let ino = if name == b"." { parent } else { inode.parent };
        let attr = view.inode(ino)?.attr(ino);
        return Ok(Decision::new(Done::Entry(Some(attr))).read(parent).read(ino).want(ino, lease::ATTR));
    }
    if name.len() > torchfs_proto::attr::NAME_MAX {
        return Err(Code::NameTooLong.into());
    }
    match view.entry(parent, name)? {
        Some(entry) => {
            let child = view.find_inode(entry.ino)?.ok_or_else(|| {
                Fault::new(
                    Code::Corrupt,
                    format!("an entry of folder {parent} names inode {}, which is not there", entry.ino),
                )
                .next("run `torchfs fsck`")
            })?;
            let decision = Decision::new(Done::Entry(Some(child.attr(entry.ino))));
            Ok(decision.read(parent).read(entry.ino).want(parent, lease::NAMES).want(entry.ino, lease::ATTR))
        }
        None => Ok(Decision::new(Done::Entry(None)).read(parent).want(parent, lease::NAMES)),
    }
}
