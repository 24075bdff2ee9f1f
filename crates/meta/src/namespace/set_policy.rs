//! set_policy: the layout of new blocks of a file, or of what is made in a folder from now on.

use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Ino, LayoutId, Result};

use super::{Decision, touch};
use crate::view::View;

/// Sets or clears the layout; what is stored already stays where it is.
pub fn set_policy(view: &mut View<'_>, ino: Ino, layout: Option<LayoutId>) -> Result<Decision> {
    let mut inode = view.inode(ino)?;
    if !matches!(inode.kind, Kind::File | Kind::Dir) {
        return Err(Fault::new(Code::Invalid, format!("inode {ino} has no content to store")));
    }
    inode.layout = layout;
    touch(view, &mut inode);
    view.put_inode(ino, &inode);
    let decision = Decision::new(Done::Attr(inode.attr(ino)));
    Ok(decision.change(ino, lease::ATTR).want(ino, lease::ATTR).store(Answered::Attr(ino)))
}
