//! getattr: the attributes of an inode.

use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::{Ino, Result};

use super::Decision;
use crate::view::View;

/// The attributes as of now.
pub fn getattr(view: &View<'_>, ino: Ino) -> Result<Decision> {
    let attr = view.inode(ino)?.attr(ino);
    Ok(Decision::new(Done::Attr(attr)).read(ino).want(ino, lease::ATTR))
}
