//! Extended attributes: list, set, remove.

use std::ops::ControlFlow;

use torchfs_proto::attr::{NAME_MAX, Raw, XATTR_MAX, XATTRS_MAX, flags};
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::{self, Answered, Xattr};
use torchfs_proto::{Code, Fault, Ino, Result, key};

use super::{Decision, shown, touch};
use crate::view::View;

/// setxattr: the attribute must not be there.
const CREATE: u32 = 1;
/// setxattr: the attribute must be there.
const REPLACE: u32 = 2;

/// All of them, with their values.
pub fn xattrs(view: &View<'_>, ino: Ino) -> Result<Decision> {
    let inode = view.inode(ino)?;
    let all = if inode.has_xattrs() { load(view, ino)? } else { Vec::new() };
    Ok(Decision::new(Done::Xattrs(all)).read(ino).want(ino, lease::ATTR))
}

/// Sets one.
pub fn set_xattr(view: &mut View<'_>, ino: Ino, name: &[u8], value: &Raw, how: u32) -> Result<Decision> {
    let mut inode = view.inode(ino)?;
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Fault::new(Code::Range, "the name of an extended attribute has 1 to 255 bytes"));
    }
    if value.len() > XATTR_MAX {
        return Err(Fault::new(Code::TooMany, format!("the value of {} is too long", shown(name))));
    }
    if how & !(CREATE | REPLACE) != 0 || how == CREATE | REPLACE {
        return Err(Fault::new(Code::Invalid, format!("setxattr flags {how:#x} make no sense")));
    }
    let there = inode.has_xattrs() && view.get::<Xattr>(&key::xattr(view.volume, ino, name))?.is_some();
    match (there, how) {
        (true, CREATE) => return Err(Fault::new(Code::Exists, format!("{} exists", shown(name)))),
        (false, REPLACE) => return Err(Fault::new(Code::NoAttr, format!("{} does not exist", shown(name)))),
        _ => {}
    }
    let sum: usize = match inode.has_xattrs() {
        true => load(view, ino)?.iter().filter(|(n, _)| **n != *name).map(|(n, v)| n.len() + v.len()).sum(),
        false => 0,
    };
    if sum + name.len() + value.len() > XATTRS_MAX {
        return Err(Fault::new(Code::NoSpace, format!("inode {ino} has too many extended attributes")));
    }
    view.put(key::xattr(view.volume, ino, name), &Xattr { born: view.born, value: value.clone() });
    inode.flags |= flags::XATTRS;
    touch(view, &mut inode);
    view.put_inode(ino, &inode);
    Ok(changed(ino, inode.attr(ino)))
}

/// Removes one.
pub fn remove_xattr(view: &mut View<'_>, ino: Ino, name: &[u8]) -> Result<Decision> {
    let mut inode = view.inode(ino)?;
    if name.is_empty() || name.len() > NAME_MAX || !drop_xattr(view, ino, &mut inode, name)? {
        return Err(Fault::new(Code::NoAttr, format!("{} does not exist", shown(name))));
    }
    view.frees = true;
    touch(view, &mut inode);
    view.put_inode(ino, &inode);
    Ok(changed(ino, inode.attr(ino)))
}

/// Takes one away if it is there, and tells whether it was.
pub(super) fn drop_xattr(
    view: &mut View<'_>,
    ino: Ino,
    inode: &mut record::Inode,
    name: &[u8],
) -> Result<bool> {
    let at = key::xattr(view.volume, ino, name);
    if !inode.has_xattrs() || view.get::<Xattr>(&at)?.is_none() {
        return Ok(false);
    }
    view.delete(at);
    if view.list::<Xattr>(&key::xattrs(view.volume, ino), 1)?.is_empty() {
        inode.flags &= !flags::XATTRS;
    }
    Ok(true)
}

fn changed(ino: Ino, attr: torchfs_proto::attr::Attr) -> Decision {
    Decision::new(Done::Attr(attr)).change(ino, lease::ATTR).want(ino, lease::ATTR).store(Answered::Attr(ino))
}

fn load(view: &View<'_>, ino: Ino) -> Result<Vec<(Raw, Raw)>> {
    let prefix = key::xattrs(view.volume, ino);
    let mut all = Vec::new();
    view.scan(&prefix, &key::after(&prefix), false, &mut |key, xattr: Xattr| {
        all.push((key[prefix.len()..].to_vec().into(), xattr.value));
        ControlFlow::Continue(())
    })?;
    Ok(all)
}
