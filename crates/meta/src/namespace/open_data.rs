//! open_data: the attributes that come with a right to read or write content; the right itself is a lease.

use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::{Ino, Result};

use super::{Decision, file};
use crate::view::View;

/// The file as of now.
pub fn open_data(view: &View<'_>, ino: Ino) -> Result<Decision> {
    let inode = file(view, ino)?;
    Ok(Decision::new(Done::Opened(inode.attr(ino))).read(ino).want(ino, lease::ATTR))
}
