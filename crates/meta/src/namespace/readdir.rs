//! readdir: the entries of a folder in the order of their cookies.

use std::ops::ControlFlow;

use foldhash::{HashMap, HashMapExt};
use torchfs_proto::msg::meta::{DirEntry, Done, ENTRIES_MAX, lease};
use torchfs_proto::record::{Cookie, Inode};
use torchfs_proto::{Code, Fault, Ino, Result, key};

use super::{Decision, folder};
use crate::view::View;

/// Entries after a cookie, which names the same place after a restart and after any change of the folder.
pub fn readdir(view: &View<'_>, ino: Ino, cookie: u64, limit: u32, plus: bool) -> Result<Decision> {
    let inode = folder(view, ino)?;
    let limit = (limit as usize).clamp(1, ENTRIES_MAX);
    let mut entries = Vec::with_capacity(limit.min(inode.entries.unwrap_or(0) as usize));
    let mut end = true;
    if cookie < u64::MAX {
        let from = key::cookie(view.volume, ino, cookie + 1);
        let to = key::after(&key::cookies(view.volume, ino));
        view.scan(&from, &to, false, &mut |key, found: Cookie| {
            if entries.len() == limit {
                end = false;
                return ControlFlow::Break(());
            }
            let cookie = key::Parts::of(key).and_then(|parts| parts.u64_at(8)).unwrap_or(0);
            entries.push(DirEntry { name: found.name, ino: found.ino, kind: found.kind, cookie, attr: None });
            ControlFlow::Continue(())
        })?;
    }
    let mut decision = Decision::new(Done::Ok).read(ino).want(ino, lease::NAMES);
    if plus {
        let mut near = neighbours(view, &entries)?;
        for entry in &mut entries {
            let child = match near.remove(&entry.ino) {
                Some(child) => child,
                None => view.find_inode(entry.ino)?.ok_or_else(|| {
                    Fault::new(
                        Code::Corrupt,
                        format!("an entry of folder {ino} names inode {}, which is not there", entry.ino),
                    )
                    .next("run `torchfs fsck`")
                })?,
            };
            entry.attr = Some(child.attr(entry.ino));
            decision.reads.push(entry.ino);
            decision.wants.push((entry.ino, lease::ATTR));
        }
    }
    decision.done = Done::Entries { entries, end };
    Ok(decision)
}

/// The inodes behind entries if they lie close together, as those of files made one after the other do: one scan finds
/// them for a fraction of what looking up each would cost.
fn neighbours(view: &View<'_>, entries: &[DirEntry]) -> Result<HashMap<Ino, Inode>> {
    let inos = || entries.iter().map(|entry| entry.ino);
    let (Some(first), Some(last)) = (inos().min(), inos().max()) else { return Ok(HashMap::new()) };
    if last.0 - first.0 > 2 * entries.len() as u64 {
        return Ok(HashMap::new());
    }
    let mut found = HashMap::with_capacity(entries.len());
    let (from, to) = (key::inode(view.volume, first), key::after(&key::inode(view.volume, last)));
    view.scan(&from, &to, false, &mut |key, inode: Inode| {
        if let Some(ino) = key::Parts::of(key).and_then(|parts| parts.u64_at(0)) {
            found.insert(Ino(ino), inode);
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}
