//! open_data: the attributes that come with a right to read or write content; the right itself is a lease.

use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Orphan;
use torchfs_proto::{Code, Fault, Ino, Result, SessionId, key};

use super::{Decision, file};
use crate::view::View;

/// The file as of now. One without a name can be opened only by who is known to hold it: for others it may go at any time.
pub fn open_data(view: &View<'_>, session: SessionId, ino: Ino) -> Result<Decision> {
    let inode = file(view, ino)?;
    if inode.nlink == 0 {
        let orphan = view.get::<Orphan>(&key::orphan(view.volume, ino))?;
        if !orphan.is_some_and(|orphan| orphan.sessions.contains(&session)) {
            return Err(Fault::new(Code::Stale, format!("inode {ino} lost its last name")));
        }
    }
    Ok(Decision::new(Done::Opened(inode.attr(ino))).read(ino).want(ino, lease::ATTR))
}
