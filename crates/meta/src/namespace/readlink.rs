//! readlink: where a symlink points.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use super::Decision;
use crate::view::View;

/// The target, which never changes while the symlink lives.
pub fn readlink(view: &View<'_>, ino: Ino) -> Result<Decision> {
    let inode = view.inode(ino)?;
    match (inode.kind, inode.target) {
        (Kind::Symlink, Some(target)) => {
            Ok(Decision::new(Done::Target(target)).read(ino).want(ino, lease::ATTR))
        }
        _ => Err(Fault::new(Code::Invalid, format!("inode {ino} is not a symlink"))),
    }
}
