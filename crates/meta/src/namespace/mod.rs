//! The namespace: one file per operation. Each decides on a [`View`] and writes into its batch; none waits or locks.
//!
//! Permission checks are the kernel's; what is kept here is structure: kinds, names, links, times as ext4 keeps them,
//! extents and the blocks behind them.
//!
//! # Invariants
//! - A decision that fails leaves nothing: its view is dropped.
//! - Each decision names the leases of others that must go before it may be ordered, and the inodes it read and changed.

mod blocks;
mod commit;
mod copy_range;
mod extents;
mod getattr;
mod link;
mod lock;
mod lookup;
mod make;
mod open_data;
mod readdir;
mod readlink;
mod release;
mod remove;
mod rename;
mod rmdir;
mod set_policy;
mod setattr;
mod statfs;
mod unlink;
mod xattrs;

pub use blocks::BlockChanges;
pub use commit::commit;
pub use copy_range::{Copy, copy_range};
pub use extents::{Progress, extents, trim, work};
pub use getattr::getattr;
pub use link::link;
pub use lock::{Held, held_locks, in_the_way, release_locks, set_lock};
pub use lookup::lookup;
pub use make::make;
pub use open_data::open_data;
pub use readdir::readdir;
pub use readlink::readlink;
pub use release::{leave, release, remove_orphan};
pub use rename::{End, rename};
pub use rmdir::rmdir;
pub use set_policy::set_policy;
pub use setattr::setattr;
pub use statfs::volume_use;
pub use unlink::unlink;
pub use xattrs::{remove_xattr, set_xattr, xattrs};

use torchfs_proto::attr::{Kind, NAME_MAX};
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::{self, Answered};
use torchfs_proto::{Code, Fault, IdRange, Ino, LayoutId, Result, SessionId};

use crate::table::{GroupAt, Table};
use crate::view::View;

/// What a decision may know beside the store.
pub struct Ctx<'a> {
    /// Who asks.
    pub session: SessionId,
    /// Every session that may have an inode open.
    pub known: &'a dyn Fn(Ino) -> Vec<SessionId>,
    /// Ids that the session may name in commits.
    pub ranges: &'a [IdRange],
    /// Extents that one batch may remove.
    pub trim: usize,
    /// The inode that the first answer to a replayed make named.
    pub made: Option<Ino>,
    /// Servers and layouts as of now.
    pub table: &'a Table,
    /// The layout that a policy asks for.
    pub layout: Option<LayoutId>,
}

/// Leases of others that a decision must wait for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Against {
    /// On what.
    pub ino: Ino,
    /// Which bits of others.
    pub bits: u8,
    /// For NAMES: the name that changes.
    pub name: Option<Vec<u8>>,
}

/// What a decision came to, beside its batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// The answer.
    pub done: Done,
    /// What is stored to answer a replay; `None` when nothing changed.
    pub answered: Option<Answered>,
    /// Leases of others in the way.
    pub against: Vec<Against>,
    /// Leases that the answer may carry.
    pub wants: Vec<(Ino, u8)>,
    /// Inodes that the answer rests on.
    pub reads: Vec<Ino>,
    /// Inodes that changed.
    pub changed: Vec<Ino>,
    /// Files whose content changed: those who share it are told.
    pub content: Vec<Ino>,
    /// Inodes that lost their last name, and who may have them open.
    pub orphaned: Vec<(Ino, Vec<SessionId>)>,
    /// Inodes that are no more.
    pub gone: Vec<Ino>,
    /// Inodes with work left for the upkeep: to be removed, or cut.
    pub upkeep: Vec<Ino>,
    /// Groups with pieces that are not at their target: repair brings them home.
    pub dirty: Vec<GroupAt>,
    /// Work on extents that is too much for one batch and must be ordered first, in pieces; then the operation is
    /// decided again from the start.
    pub first: Option<First>,
}

/// Work on a file's extents that comes before an operation. Each kind leaves a state that a program could have made by
/// itself, so a crash in between tears nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum First {
    /// Remove what an earlier truncation left beyond the end.
    Trim(Ino),
    /// Truncate.
    Cut(Ino, u64),
    /// Punch a part of the hole that is asked for.
    Punch(Ino, u64, u64),
}

impl Decision {
    /// A decision with this answer and nothing else.
    pub fn new(done: Done) -> Decision {
        Decision {
            done,
            answered: None,
            against: Vec::new(),
            wants: Vec::new(),
            reads: Vec::new(),
            changed: Vec::new(),
            content: Vec::new(),
            orphaned: Vec::new(),
            gone: Vec::new(),
            upkeep: Vec::new(),
            dirty: Vec::new(),
            first: None,
        }
    }

    /// The answer rests on this inode.
    pub fn read(mut self, ino: Ino) -> Decision {
        self.reads.push(ino);
        self
    }

    /// The answer may carry this lease.
    pub fn want(mut self, ino: Ino, bits: u8) -> Decision {
        self.wants.push((ino, bits));
        self
    }

    /// The inode changed; others' leases of these bits must go first.
    pub fn change(mut self, ino: Ino, bits: u8) -> Decision {
        self.note_change(ino, bits);
        self
    }

    /// The same in place.
    pub fn note_change(&mut self, ino: Ino, bits: u8) {
        self.against.push(Against { ino, bits, name: None });
        self.changed.push(ino);
    }

    /// A name in the folder changed.
    pub fn change_name(mut self, parent: Ino, name: &[u8]) -> Decision {
        self.against.push(Against {
            ino: parent,
            bits: lease::NAMES | lease::ATTR,
            name: Some(name.to_vec()),
        });
        self.changed.push(parent);
        self
    }

    /// What a replay is answered with.
    pub fn store(mut self, answered: Answered) -> Decision {
        self.answered = Some(answered);
        self
    }
}

/// A folder in which names are looked up or changed.
fn folder(view: &View<'_>, ino: Ino) -> Result<record::Inode> {
    let inode = view.inode(ino)?;
    match inode.kind {
        Kind::Dir => Ok(inode),
        _ => Err(Fault::new(Code::NotDir, format!("inode {ino} is not a folder"))),
    }
}

/// A folder that may get new names: one that was removed may not.
fn living_folder(view: &View<'_>, ino: Ino) -> Result<record::Inode> {
    let inode = folder(view, ino)?;
    if inode.nlink == 0 {
        return Err(Fault::new(Code::NotFound, format!("folder {ino} was removed")));
    }
    Ok(inode)
}

/// A regular file.
fn file(view: &View<'_>, ino: Ino) -> Result<record::Inode> {
    let inode = view.inode(ino)?;
    match inode.kind {
        Kind::File => Ok(inode),
        Kind::Dir => Err(Fault::new(Code::IsDir, format!("inode {ino} is a folder"))),
        _ => Err(Fault::new(Code::Invalid, format!("inode {ino} is not a regular file"))),
    }
}

/// Whether a name may be an entry's.
fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Fault::new(Code::NameTooLong, format!("a name has {} bytes", name.len())));
    }
    if name.is_empty() || name == b"." || name == b".." || name.iter().any(|b| *b == b'/' || *b == 0) {
        return Err(Fault::new(Code::Invalid, "this cannot be a name"));
    }
    Ok(())
}

/// A name for people.
fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// The names in a folder changed: its times and counters follow.
fn touch_folder(view: &View<'_>, folder: &mut record::Inode) {
    folder.mtime = view.now;
    folder.ctime = view.now;
    folder.change += 1;
    folder.data_version += 1;
}

/// Something about an inode changed, but not its content.
fn touch(view: &View<'_>, inode: &mut record::Inode) {
    inode.ctime = view.now;
    inode.change += 1;
}

/// The next place in a folder.
fn next_cookie(folder: &mut record::Inode) -> u64 {
    let cookie = folder.next_cookie.unwrap_or(1);
    folder.next_cookie = Some(cookie + 1);
    cookie
}

/// Counts the entries of a folder.
fn count_entries(folder: &mut record::Inode, by: i64) {
    folder.entries = Some(folder.entries.unwrap_or(0).saturating_add_signed(by));
}

/// Clears the rights that a write or a change of owner by others must not keep: bits of the mode, and capabilities.
fn kill_privileges(view: &mut View<'_>, ino: Ino, inode: &mut record::Inode) -> Result<()> {
    if inode.kind == Kind::Dir {
        return Ok(());
    }
    inode.mode &= !0o4000;
    if inode.mode & 0o010 != 0 {
        inode.mode &= !0o2000;
    }
    xattrs::drop_xattr(view, ino, inode, b"security.capability").map(drop)
}
