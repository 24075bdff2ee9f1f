//! Names: lookup, make, create, link, unlink, rmdir, rename.
//!
//! A folder whose names are leased answers from memory, absent names too. One that was made here, or listed from end to end
//! under its lease, is *complete*: names it does not know are absent, so creating files in it costs one call each.
//!
//! # Invariants
//! - A change and what follows from its answer are one future that always finishes; references and handles of the kernel
//!   are counted only when the caller is still there to tell it.
//! - An entry is kept only if no recall and no other change of the folder could have overtaken the answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use torchfs_client::{Changed, Mark};
use torchfs_proto::attr::{Attr, Kind, NAME_MAX, SetAttr, TARGET_MAX};
use torchfs_proto::msg::meta::{Done, Make, Op, lease, rename};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::again::Met;
use crate::node::{Asked, FolderChange, Inode, State};
use crate::open::{O_ACCMODE, O_EXCL, O_TRUNC};
use crate::{Caller, Found, Node, Opened, Vfs, metrics, unexpected};

impl Vfs {
    /// The entry of a folder; each positive answer adds one reference of the kernel's.
    pub async fn lookup(&self, caller: Caller, parent: Ino, name: &[u8]) -> Result<Found> {
        check_name(name)?;
        match self.look_again(caller, parent, name).await {
            Some(found) => found,
            None => self.look(parent, name).await,
        }
    }

    pub(crate) async fn look(&self, parent: Ino, name: &[u8]) -> Result<Found> {
        if let Some((child, found)) = self.find_entry(parent, name) {
            ::metrics::counter!(metrics::LOOKUP_HITS).increment(1);
            self.bound_entries();
            if let (Some(child), Some(answer)) = (child, &found.node) {
                self.before_told(&child, answer).await;
                // Last: a caller that went away while this waited has no reference to give back.
                child.lock().refs += 1;
            }
            return Ok(found);
        }
        ::metrics::counter!(metrics::LOOKUP_MISSES).increment(1);
        let folder = self.node(parent);
        loop {
            let changes = folder.lock().changes;
            let asked = self.asked();
            let done = self.0.meta.ask(Op::Lookup { parent, name: name.to_vec().into() }).await?;
            let Done::Entry(entry) = done else { return Err(unexpected("lookup", &done)) };

            // From here on the child is not forgotten.
            let child = entry.map(|attr| (self.node(attr.ino), attr));
            if let Some((child, _)) = &child
                && self.was_forgotten(asked, child.ino)
            {
                continue;
            }
            let entry_ttl = {
                let mut state = folder.lock();
                let kept = self.is_current(asked, parent)
                    && state.changes == changes
                    && name != b".."
                    && name != b".";
                let ino = child.as_ref().map(|(child, _)| child.ino);
                if kept { self.keep_name(&mut state, parent, name, ino) } else { Duration::ZERO }
            };
            self.bound_entries();
            let Some((child, attr)) = child else { return Ok(Found { node: None, entry_ttl }) };
            let answer = self.learned(&child, attr, asked);
            self.before_told(&child, &answer).await;
            child.lock().refs += 1;
            return Ok(Found { node: Some(answer), entry_ttl });
        }
    }

    /// How long the kernel may keep an entry that was just made; zero if no lease covers it.
    pub fn entry_ttl(&self, parent: Ino, name: &[u8]) -> Duration {
        match self.find_name(parent, name) {
            Some((Some(_), ttl)) => self.kernel_ttl(ttl),
            _ => Duration::ZERO,
        }
    }

    /// Makes a folder, symlink, device, pipe, socket or closed file; adds one reference.
    #[allow(clippy::too_many_arguments)]
    pub async fn make(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        kind: Kind,
        mode: u32,
        rdev: u32,
        target: &[u8],
    ) -> Result<Node> {
        check_name(name)?;
        if target.len() > TARGET_MAX {
            return Err(Code::NameTooLong.into());
        }
        let make = Make {
            parent,
            name: name.to_vec().into(),
            kind,
            mode,
            uid: caller.uid,
            gid: caller.gid,
            rdev,
            target: target.to_vec().into(),
            exclusive: true,
            open: false,
        };
        let (node, attr, _) = self.made(make).await?;
        Ok(self.refer(&node, attr).await)
    }

    /// Makes and opens a file; adds one reference.
    pub async fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        flags: i32,
    ) -> Result<(Node, Opened)> {
        check_name(name)?;
        self.make_open(caller, parent, name, mode, flags).await
    }

    /// Makes and opens a file without a name; adds one reference.
    pub async fn tmpfile(
        &self,
        caller: Caller,
        parent: Ino,
        mode: u32,
        flags: i32,
    ) -> Result<(Node, Opened)> {
        self.make_open(caller, parent, b"", mode, flags).await
    }

    /// One more name; adds one reference.
    pub async fn link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Node> {
        check_name(name)?;
        let (vfs, node, folder) = (self.clone(), self.node(ino), self.node(parent));
        let name = Bytes::copy_from_slice(name);
        let (node, attr) = self
            .finish(async move {
                vfs.begin(&folder);
                let asked = vfs.asked();
                let op = Op::Link { ino, parent, name: name.to_vec().into() };
                let changed = vfs.0.meta.change(op).await;
                let (done, mark) = vfs.folder_fault(&folder, changed)?;
                let Done::Attr(attr) = done else {
                    vfs.end_doubtful(&folder, mark);
                    return Err(unexpected("link", &done));
                };
                vfs.end(&folder, asked, mark, &[(name, Some(ino))], added(&attr, 0));
                vfs.learned(&node, attr.clone(), asked);
                let mut state = node.lock();
                state.has_a_name();
                state.changed_at(mark);
                drop(state);
                Ok((node, attr))
            })
            .await?;
        Ok(self.refer(&node, attr).await)
    }

    /// Removes a name that is not a folder's.
    pub async fn unlink(&self, parent: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let (vfs, folder) = (self.clone(), self.node(parent));
        let name = Bytes::copy_from_slice(name);
        self.finish(async move {
            let leaving = Leaving::find(&vfs, parent, &name);
            vfs.begin(&folder);
            let asked = vfs.asked();
            let idle = leaving.as_ref().map(|leaving| leaving.0.ino);
            let changed = vfs.0.meta.change(Op::Unlink { parent, name: name.to_vec().into(), idle }).await;
            let (done, mark) = vfs.folder_fault(&folder, changed)?;
            let Done::Removed { attr, held } = done else {
                vfs.end_doubtful(&folder, mark);
                return Err(unexpected("unlink", &done));
            };
            vfs.end(&folder, asked, mark, &[(name, None)], removed(&attr, 0));
            vfs.lost_name(attr, held, asked, mark);
            Ok(())
        })
        .await
    }

    /// Removes an empty folder.
    pub async fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let (vfs, folder) = (self.clone(), self.node(parent));
        let name = Bytes::copy_from_slice(name);
        self.finish(async move {
            vfs.begin(&folder);
            let asked = vfs.asked();
            let changed = vfs.0.meta.change(Op::Rmdir { parent, name: name.to_vec().into() }).await;
            let (done, mark) = vfs.folder_fault(&folder, changed)?;
            let Done::Removed { attr, held } = done else {
                vfs.end_doubtful(&folder, mark);
                return Err(unexpected("rmdir", &done));
            };
            vfs.end(&folder, asked, mark, &[(name, None)], removed(&attr, -1));
            vfs.lost_name(attr, held, asked, mark);
            Ok(())
        })
        .await
    }

    /// Renames; flags as in [`torchfs_proto::msg::meta::rename`].
    pub async fn rename(
        &self,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: u32,
    ) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        if flags & !(rename::NOREPLACE | rename::EXCHANGE) != 0 {
            return Err(Fault::new(Code::Invalid, format!("rename does not know the flags {flags:#x}")));
        }
        let (vfs, from, to) = (self.clone(), self.node(parent), self.node(new_parent));
        let (name, new_name) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(new_name));
        self.finish(async move {
            vfs.begin(&from);
            let two = parent != new_parent;
            if two {
                vfs.begin(&to);
            }
            let asked = vfs.asked();
            let op = Op::Rename {
                parent,
                name: name.to_vec().into(),
                new_parent,
                new_name: new_name.to_vec().into(),
                flags,
            };
            let changed = vfs.0.meta.change(op).await;
            let (done, mark) = match vfs.folder_fault(&from, changed) {
                Ok(done) => done,
                Err(fault) => {
                    if two {
                        vfs.end_failed(&to, &fault);
                    }
                    return Err(fault);
                }
            };
            let Done::Renamed { attr, other, held } = done else {
                vfs.end_doubtful(&from, mark);
                if two {
                    vfs.end_doubtful(&to, mark);
                }
                return Err(unexpected("rename", &done));
            };
            let exchanged = flags & rename::EXCHANGE != 0;
            let behind = other.as_ref().filter(|_| exchanged).map(|other| other.ino);
            let (old, new) = ((name.clone(), behind), (new_name.clone(), Some(attr.ino)));
            let (told, safe) = if two {
                let (told, old_safe) = vfs.end_moved(&from, asked, mark, &[old], false);
                let (told, new_safe) = vfs.end_moved(&to, asked, mark, &[new], told);
                (told, old_safe && new_safe)
            } else {
                vfs.end_moved(&from, asked, mark, &[old, new], false)
            };
            if told && !safe && !vfs.0.host.expire_entries(new_parent) {
                vfs.0.host.invalidate_entry(new_parent, &new_name);
                vfs.0.host.invalidate_entry(parent, &name);
            }
            if other.is_none() && attr.kind != Kind::Dir && attr.nlink > 1 {
                // If both were names of one inode nothing happened, and the answer does not say so.
                vfs.doubt_name(&mut from.lock(), &name);
            }
            if let Some(node) = vfs.find_node(attr.ino) {
                vfs.learned(&node, attr, asked);
                node.lock().changed_at(mark);
            }
            match other {
                Some(other) if !exchanged => vfs.lost_name(other, held, asked, mark),
                Some(other) => {
                    if let Some(node) = vfs.find_node(other.ino) {
                        vfs.learned(&node, other, asked);
                        node.lock().changed_at(mark);
                    }
                }
                None => {}
            }
            Ok(())
        })
        .await
    }

    /// Adds a reference of the kernel's, and gives what it is told.
    pub(crate) async fn refer(&self, node: &Inode, attr: Attr) -> Node {
        let answer = self.answer(&node.lock(), attr);
        self.before_told(node, &answer).await;
        node.lock().refs += 1;
        answer
    }

    /// An entry from memory, if leases protect it and what it names.
    fn find_entry(&self, parent: Ino, name: &[u8]) -> Option<(Option<Arc<Inode>>, Found)> {
        let (ino, ttl) = self.find_name(parent, name)?;
        let entry_ttl = self.kernel_ttl(ttl);
        let Some(ino) = ino else { return Some((None, Found { node: None, entry_ttl })) };
        let child = self.find_node(ino)?;
        let answer = {
            let state = child.lock();
            let (attr, _) = state.find_attr(&self.0.meta)?;
            self.answer(&state, attr)
        };
        Some((Some(child), Found { node: Some(answer), entry_ttl }))
    }

    /// What a folder says about a name, if it may. A name that is absent because all others are known is noted: the kernel may
    /// remember the answer, and a recall has to take it back.
    fn find_name(&self, parent: Ino, name: &[u8]) -> Option<(Option<Ino>, Duration)> {
        let folder = self.find_node(parent)?;
        let mut state = folder.lock();
        let (names, ttl) = state.find_names(&self.0.meta, parent)?;
        match names.map.get(name) {
            Some(ino) => Some((*ino, ttl)),
            None if names.complete && name != b".." && name != b"." => {
                names.map.insert(Bytes::copy_from_slice(name), None);
                self.0.entries.fetch_add(1, Ordering::Relaxed);
                Some((None, ttl))
            }
            None => None,
        }
    }

    /// Makes room for entries of a folder if its names are leased.
    pub(crate) fn leased_names(&self, state: &mut State, parent: Ino) -> Option<Duration> {
        let epoch = self.0.meta.lease_epoch();
        let ttl = self.0.meta.holds(parent, lease::NAMES)?;
        if state.names.as_ref().is_none_or(|names| names.epoch != epoch) {
            self.drop_names(state);
            self.new_names(state, parent, false);
        }
        Some(ttl)
    }

    /// Notes an entry in a folder whose names are leased, and tells for how long they are. If the lease has just run out, what
    /// was known of the name goes: a renewal whose answer is late brings the lease back as it was.
    pub(crate) fn keep_name(
        &self,
        state: &mut State,
        parent: Ino,
        name: &[u8],
        ino: Option<Ino>,
    ) -> Duration {
        let Some(ttl) = self.leased_names(state, parent) else {
            self.doubt_name(state, name);
            return Duration::ZERO;
        };
        if let Some(names) = &mut state.names {
            let more = names.map.insert(Bytes::copy_from_slice(name), ino).is_none();
            self.0.entries.fetch_add(usize::from(more), Ordering::Relaxed);
            let fewer = names.doubted.remove(name);
            self.0.entries.fetch_sub(usize::from(fewer), Ordering::Relaxed);
        }
        self.kernel_ttl(ttl)
    }

    /// Keeps the number of remembered entries within its bound: whole folders go, the first that came first.
    pub(crate) fn bound_entries(&self) {
        while self.0.entries.load(Ordering::Relaxed) > self.0.config.entries_max {
            let Some((_, ino)) = self.0.folders.lock().pop_first() else { return };
            if let Some(node) = self.find_node(ino) {
                let names = self.drop_names(&mut node.lock());
                // A recall could not name them to the kernel any more.
                self.forget_entries(ino, &names);
            }
        }
    }

    async fn make_open(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        flags: i32,
    ) -> Result<(Node, Opened)> {
        let make = Make {
            parent,
            name: name.to_vec().into(),
            kind: Kind::File,
            mode,
            uid: caller.uid,
            gid: caller.gid,
            rdev: 0,
            target: Vec::new().into(),
            exclusive: flags & O_EXCL != 0 || name.is_empty(),
            open: true,
        };
        let (node, attr, created) = self.made(make).await?;
        if !created && !owner_may(caller, &attr, flags) {
            // The kernel lets its caller have what it created without asking who may. Told this it looks the name up
            // again, and opens what it finds as any other file.
            let name = Bytes::copy_from_slice(name);
            return Err(self.met(caller, Met { parent, name, node, attr }));
        }
        let opened = self.open_node(&node, flags, created).await?;
        if !created && flags & O_TRUNC != 0 {
            // The kernel takes what it created for new and does not truncate it.
            let kill_privileges = caller.uid != 0;
            let cut = SetAttr { size: Some(0), kill_privileges, ..SetAttr::default() };
            if let Err(fault) = self.setattr(node.ino, Some(opened.fh), cut).await {
                self.release(node.ino, opened.fh, None).await;
                return Err(fault);
            }
        }
        Ok((self.refer(&node, attr).await, opened))
    }

    /// Sends a Make and takes in what came of it.
    async fn made(&self, make: Make) -> Result<(Arc<Inode>, Attr, bool)> {
        let (vfs, folder) = (self.clone(), self.node(make.parent));
        self.finish(async move {
            let named = !make.name.is_empty();
            if named {
                vfs.begin(&folder);
            }
            let asked = vfs.asked();
            let changed = vfs.0.meta.change(Op::Make(make.clone())).await;
            let (done, mark) = match (named, changed) {
                (true, changed) => vfs.folder_fault(&folder, changed)?,
                (false, changed) => changed.map(|changed| (changed.done, changed.seq))?,
            };
            let Done::Made { attr, created } = done else {
                if named {
                    vfs.end_doubtful(&folder, mark);
                }
                return Err(unexpected("make", &done));
            };
            if named {
                let names = [(Bytes::copy_from_slice(&make.name), Some(attr.ino))];
                let change = created.then(|| added(&attr, i32::from(make.kind == Kind::Dir)));
                vfs.end(&folder, asked, mark, &names, change.flatten());
            }
            let node = vfs.node(attr.ino);
            vfs.learned(&node, attr.clone(), asked);
            let (meta, epoch) = (&vfs.0.meta, vfs.0.meta.lease_epoch());
            {
                let mut state = node.lock();
                state.changed_at(mark);
                if created {
                    match make.kind {
                        Kind::Dir
                            if vfs.is_current(asked, attr.ino)
                                && meta.holds(attr.ino, lease::NAMES).is_some() =>
                        {
                            vfs.drop_names(&mut state);
                            vfs.new_names(&mut state, attr.ino, true);
                        }
                        Kind::Symlink => state.target = Some(Bytes::copy_from_slice(&make.target)),
                        Kind::File if vfs.is_current(asked, attr.ino) => {
                            let file = state.file();
                            file.learn_version(attr.data_version, epoch);
                            file.extents.install(0..u64::MAX, &[]);
                            file.kernel_version = Some(attr.data_version);
                        }
                        _ => {}
                    }
                }
            }
            Ok((node, attr, created))
        })
        .await
    }

    /// A change of a folder begins.
    fn begin(&self, folder: &Inode) {
        let mut state = folder.lock();
        state.overlap |= state.busy > 0;
        state.busy += 1;
    }

    /// A change of a folder is through: entries and attributes follow.
    fn end(
        &self,
        folder: &Inode,
        asked: Asked,
        mark: Mark,
        names: &[(Bytes, Option<Ino>)],
        change: Option<FolderChange>,
    ) {
        {
            let mut state = folder.lock();
            let known = self.is_current(asked, folder.ino) && !state.overlap;
            self.ended(&mut state, mark);
            for (name, ino) in names {
                if known {
                    self.keep_name(&mut state, folder.ino, name, *ino);
                } else {
                    self.doubt_name(&mut state, name);
                }
            }
            match change {
                Some(change) => state.predict(&self.0.meta, &change),
                None => state.doubt_attr(),
            }
        }
        self.bound_entries();
    }

    /// A rename is through in this folder. The kernel moves entries together with the time it was given for them under their old names;
    /// `told` if it may have been given any. Tells that, and whether a recall will take back the new names.
    fn end_moved(
        &self,
        folder: &Inode,
        asked: Asked,
        mark: Mark,
        names: &[(Bytes, Option<Ino>)],
        mut told: bool,
    ) -> (bool, bool) {
        let mut safe = true;
        {
            let mut state = folder.lock();
            let known = self.is_current(asked, folder.ino) && !state.overlap;
            self.ended(&mut state, mark);
            let knows = |state: &State, name: &[u8]| {
                state.names.as_ref().is_some_and(|names| names.may_be_told(name))
            };
            told |= names.iter().any(|(name, _)| knows(&state, name));
            for (name, ino) in names {
                if known {
                    self.keep_name(&mut state, folder.ino, name, *ino);
                } else {
                    self.doubt_name(&mut state, name);
                    if told && ino.is_some() {
                        self.note_doubted(&mut state, folder.ino, name);
                    }
                }
                safe &= ino.is_none() || knows(&state, name);
            }
            state.doubt_attr();
        }
        self.bound_entries();
        (told, safe)
    }

    fn ended(&self, state: &mut State, mark: Mark) {
        state.busy = state.busy.saturating_sub(1);
        state.changes += 1;
        state.changed_at(mark);
        if state.busy == 0 {
            state.overlap = false;
        }
    }

    /// The answer of a change: a fault ends the change here.
    fn folder_fault(&self, folder: &Inode, changed: Result<Changed>) -> Result<(Done, Mark)> {
        match changed {
            Ok(changed) => Ok((changed.done, changed.seq)),
            Err(fault) => {
                self.end_failed(folder, &fault);
                Err(fault)
            }
        }
    }

    /// The service refused, or nobody knows what it did: then the folder is asked again.
    fn end_failed(&self, folder: &Inode, fault: &Fault) {
        let mut state = folder.lock();
        self.ended(&mut state, Mark::default());
        if fault.errno() == Code::Io.errno() || fault.code.retry() || fault.code == Code::NotFound {
            self.drop_names(&mut state);
            state.doubt_attr();
        }
    }

    fn end_doubtful(&self, folder: &Inode, mark: Mark) {
        let mut state = folder.lock();
        self.ended(&mut state, mark);
        self.drop_names(&mut state);
        state.doubt_attr();
    }

    fn doubt_name(&self, state: &mut State, name: &[u8]) {
        if let Some(names) = &mut state.names {
            names.complete = false;
            if names.map.remove(name).is_some() {
                self.0.entries.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// If the names of the folder are leased, a recall will take this one back whatever it stands for.
    fn note_doubted(&self, state: &mut State, parent: Ino, name: &Bytes) {
        if self.leased_names(state, parent).is_some()
            && let Some(names) = &mut state.names
            && names.doubted.insert(name.clone())
        {
            self.0.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An inode lost a name, maybe its last.
    fn lost_name(&self, attr: Attr, held: bool, asked: Asked, mark: Mark) {
        let ino = attr.ino;
        let last = attr.nlink == 0;
        // The answer to a lookup of it may still be on its way here.
        let node = if last && held { Some(self.node(ino)) } else { self.find_node(ino) };
        let Some(node) = node else { return };
        self.learned(&node, attr, asked);
        let open = {
            let mut state = node.lock();
            state.changed_at(mark);
            if last {
                state.orphan = true;
                // A removal told again is answered as it was the first time, when there was another name maybe.
                state.gone = !held && state.handles == 0;
            }
            state.handles > 0
        };
        if last && !open {
            match held {
                true => self.linger(node),
                false => self.discard(&node),
            }
        }
    }
}

/// An inode about to lose a name while nobody here has it open; opening it waits until that is through.
struct Leaving(Arc<Inode>);

impl Leaving {
    fn find(vfs: &Vfs, parent: Ino, name: &[u8]) -> Option<Leaving> {
        let ino = vfs.find_name(parent, name)?.0?;
        let node = vfs.find_node(ino)?;
        {
            let mut state = node.lock();
            if state.handles > 0 || state.is_awaited() || state.is_dirty() {
                return None;
            }
            state.leaving += 1;
        }
        Some(Leaving(node))
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.lock().leaving -= 1;
        self.0.progress.notify();
    }
}

/// Whether this is a file of the caller's own that its mode lets the owner open like that. Of files of others only the kernel can
/// tell: it knows all groups of the caller, its capabilities, and what is forbidden in folders that all may write.
fn owner_may(caller: Caller, attr: &Attr, flags: i32) -> bool {
    let (read, write) = (0o400, 0o200);
    let wanted = match flags & O_ACCMODE {
        0 => read,
        1 => write,
        _ => read | write,
    };
    let wanted = if flags & O_TRUNC != 0 { wanted | write } else { wanted };
    attr.kind == Kind::File && caller.uid == attr.uid && attr.mode & wanted == wanted
}

fn added(attr: &Attr, folders: i32) -> Option<FolderChange> {
    Some(FolderChange { at: attr.ctime, entries: 1, folders })
}

fn removed(attr: &Attr, folders: i32) -> Option<FolderChange> {
    Some(FolderChange { at: attr.ctime, entries: -1, folders })
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Fault::new(Code::NameTooLong, format!("a name has {} bytes", name.len())));
    }
    Ok(())
}
