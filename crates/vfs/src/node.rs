//! The table of inodes known here, and what is remembered of each.
//!
//! A node lives as long as the kernel refers to it, it is open, or it holds data that is not committed. What it
//! remembers (attributes, target, extended attributes, entries, extents) counts only while the matching lease holds,
//! which is asked of the session each time; a recall, and the loss of all leases, wipe it.
//!
//! An answer may be overtaken by a recall, by a lease that another answer brings, or by the answer to a later change of our own. So
//! whoever asks notes the moment first ([`Vfs::asked`]) and keeps the answer only if no lease of it was recalled since, and no answer
//! came that is bare of the lease it would be kept under; attributes are ordered by their change counter, content by its
//! version, entries by a count of our own changes.
//!
//! # Invariants
//! - One node per inode number: it leaves the table only when nobody else holds it.
//! - `state` is never locked across an await, nor two of them at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use futures_util::future::{Either, select};
use parking_lot::{Mutex, MutexGuard};
use torchfs_client::{Mark, Meta, Moment};
use torchfs_proto::attr::{Attr, Kind, Raw, Time};
use torchfs_proto::extent::{INLINE_MAX, RangeOp};
use torchfs_proto::msg::meta::lease;
use torchfs_proto::{Fault, Ino, Result};

use crate::commit::Sealed;
use crate::extents::Extents;
use crate::locks::Locks;
use crate::overlay::{Batch, Number, Overlay};
use crate::signal::Signal;
use crate::{Node, Vfs};

/// An inode known here.
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    state: Mutex<State>,
    /// Whose turn it is to change the content at the service.
    pub(crate) turn: futures_util::lock::Mutex<()>,
    /// Given when a put or a commit of this file ended, or what was done to its locks.
    pub(crate) progress: Signal,
}

pub(crate) struct State {
    /// References of the kernel.
    pub(crate) refs: u64,
    /// Open handles, and those that may write.
    pub(crate) handles: u32,
    pub(crate) writers: u32,
    pub(crate) attr: Option<Attr>,
    /// Whether the attributes are what the lease of this epoch protects.
    fresh: Option<u32>,
    pub(crate) target: Option<Bytes>,
    pub(crate) xattrs: Option<Arc<Vec<(Raw, Raw)>>>,
    pub(crate) names: Option<Box<Names>>,
    pub(crate) file: Option<Box<File>>,
    /// Changes of this folder by this session: how many were answered, how many are under way, and whether some of those
    /// ran side by side, so that their order is not known here.
    pub(crate) changes: u64,
    pub(crate) busy: u32,
    pub(crate) overlap: bool,
    /// Removals of names under way that told the service that nobody here has it open: opening waits for them.
    pub(crate) leaving: u32,
    /// Those who open it and wait for the right to its content.
    pub(crate) opening: u32,
    /// Until then somebody is about to open it whom another removal must not disappoint.
    pub(crate) awaited: Option<Instant>,
    /// No name is left: to be released after the last close.
    pub(crate) orphan: bool,
    /// Without a name, it is kept until then for who is about to open it.
    pub(crate) lingers: Option<Instant>,
    /// The service removed it.
    pub(crate) gone: bool,
    /// A change of content other than a write is under way: writes wait for it, even if its caller went away.
    pub(crate) changing: bool,
    /// Data leases of it are being given back: nothing is buffered meanwhile.
    pub(crate) recalling: u32,
    /// How many recalls of the right to its content are being served, how many of those let nobody read any more, and how often
    /// it was read without that right meanwhile.
    pub(crate) parting: u32,
    pub(crate) parted: u32,
    pub(crate) read_apart: u64,
    /// The last change of this inode made here, or a later one.
    pub(crate) mark: Mark,
    /// Locks asked for here.
    pub(crate) locks: Locks,
}

/// When something was asked, among the recalls and among what else may overtake the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    recalls: u64,
    moment: Moment,
}

/// Entries of a folder, under a lease on its names.
pub(crate) struct Names {
    pub(crate) epoch: u32,
    /// No other entries of any folder had or will have this number.
    pub(crate) serial: u64,
    /// `None`: known to be absent.
    pub(crate) map: HashMap<Bytes, Option<Ino>>,
    /// What is not in the map is absent.
    pub(crate) complete: bool,
    /// Names that the kernel may know and we are not sure of: a recall has to take them back too.
    pub(crate) doubted: HashSet<Bytes>,
}

/// What one change by this session did to a folder.
pub(crate) struct FolderChange {
    pub(crate) at: Time,
    pub(crate) entries: i64,
    pub(crate) folders: i32,
}

/// The kernel's pages, at least.
const PAGE: u64 = 4096;

/// By how much a folder's size grows with each entry.
const ENTRY_SIZE: i64 = 32;

/// The content of a regular file.
pub(crate) struct File {
    pub(crate) extents: Extents,
    /// The data version and lease epoch that the extents belong to.
    pub(crate) version: u64,
    pub(crate) epoch: u32,
    pub(crate) overlay: Overlay,
    /// The last write, the last one that must be committed now, and the last one that is.
    pub(crate) number: Number,
    pub(crate) want: Number,
    pub(crate) committed: Number,
    pub(crate) batch: Batch,
    /// From here on bytes are buffered because they were appended, to a file that had the length `ends` at the service.
    pub(crate) tail: Option<u64>,
    pub(crate) ends: u64,
    /// Blocks on their way, in the order of sealing.
    pub(crate) sealed: VecDeque<Sealed>,
    /// Bytes in the round that is under way.
    pub(crate) committing: u64,
    pub(crate) flushing: bool,
    pub(crate) dirty_since: Option<Instant>,
    pub(crate) quiet_since: Instant,
    /// When the program last wrote, if that is not committed yet.
    pub(crate) mtime: Option<Time>,
    pub(crate) kill_privileges: bool,
    /// Errors of writing in the background so far, and the last of them. Handles remember how many there were when they
    /// were opened.
    pub(crate) errors: u64,
    pub(crate) error: Option<Fault>,
    /// The data version of the pages that the kernel may have.
    pub(crate) kernel_version: Option<u64>,
    /// How often that became unknown.
    pub(crate) forgotten: u64,
    /// It was opened for use with the kernel's pages.
    pub(crate) paged: bool,
    /// The length that the kernel was told last: up to here its pages hold no zeros in the place of bytes.
    pub(crate) told: u64,
}

impl Inode {
    fn new(ino: Ino, mark: Mark) -> Inode {
        Inode {
            ino,
            state: Mutex::new(State {
                refs: 0,
                handles: 0,
                writers: 0,
                changes: 0,
                busy: 0,
                overlap: false,
                leaving: 0,
                opening: 0,
                awaited: None,
                lingers: None,
                gone: false,
                changing: false,
                recalling: 0,
                parting: 0,
                parted: 0,
                read_apart: 0,
                attr: None,
                fresh: None,
                target: None,
                xattrs: None,
                names: None,
                file: None,
                orphan: false,
                mark,
                locks: Locks::default(),
            }),
            turn: futures_util::lock::Mutex::new(()),
            progress: Signal::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The only change of content under way, writes aside; from when its turn came until it is dropped.
pub(crate) struct Changing(Arc<Inode>);

impl Changing {
    /// Waits for its turn. Whoever has it must finish what it begins.
    pub(crate) async fn begin(node: &Arc<Inode>) -> Changing {
        loop {
            let progress = node.progress.listen();
            if !std::mem::replace(&mut node.lock().changing, true) {
                return Changing(node.clone());
            }
            progress.await;
        }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.lock().changing = false;
        self.0.progress.notify();
    }
}

impl State {
    /// Takes in attributes of an answer; `current` if no recall came since it was asked for.
    pub(crate) fn learn(&mut self, meta: &Meta, attr: Attr, current: bool) {
        if self.attr.as_ref().is_some_and(|have| have.change > attr.change) {
            return;
        }
        if attr.nlink == 0 {
            self.orphan = true;
        } else if current {
            // Any other answer may be from before it lost its last name.
            self.has_a_name();
        }
        // While own changes of a folder are under way nobody knows whether the answer counts them.
        self.fresh = (current && self.busy == 0).then(|| meta.lease_epoch());
        self.attr = Some(attr);
    }

    /// It has a name, maybe again: nobody is to give it up.
    pub(crate) fn has_a_name(&mut self) {
        (self.orphan, self.gone, self.lingers) = (false, false, None);
    }

    /// A change of it by this session was answered. Answers may come in another order than the changes happened.
    pub(crate) fn changed_at(&mut self, mark: Mark) {
        self.mark = self.mark.max(mark);
    }

    /// Own changes of a folder: its attributes follow without asking. `None` if that is not known well enough.
    pub(crate) fn predict(&mut self, meta: &Meta, change: &FolderChange) {
        let held = self.fresh == Some(meta.lease_epoch());
        match self.attr.as_mut().filter(|attr| held && meta.holds(attr.ino, lease::ATTR).is_some()) {
            Some(attr) => {
                attr.mtime = attr.mtime.max(change.at);
                attr.ctime = attr.ctime.max(change.at);
                attr.change += 1;
                attr.data_version += 1;
                attr.nlink = attr.nlink.saturating_add_signed(change.folders);
                attr.size = attr.size.saturating_add_signed(change.entries * ENTRY_SIZE);
            }
            None => self.fresh = None,
        }
    }

    /// The attributes as this node sees them, if a lease protects them, and for how long.
    pub(crate) fn find_attr(&self, meta: &Meta) -> Option<(Attr, Duration)> {
        let attr = self.attr.as_ref()?;
        if self.fresh != Some(meta.lease_epoch()) {
            return None;
        }
        let ttl = meta.holds(attr.ino, lease::ATTR)?;
        Some((self.view()?, ttl))
    }

    /// The attributes with what is written here and not committed.
    pub(crate) fn view(&self) -> Option<Attr> {
        let mut attr = self.attr.clone()?;
        if let Some(file) = &self.file {
            attr.size = attr.size.max(file.overlay.end().unwrap_or(0));
            if let Some(mtime) = file.mtime {
                attr.mtime = mtime;
                attr.ctime = attr.ctime.max(mtime);
            }
            attr.stored = attr.stored.max(file.overlay.bytes().min(attr.size));
        }
        Some(attr)
    }

    /// The attributes are not protected any more.
    pub(crate) fn doubt_attr(&mut self) {
        self.fresh = None;
        self.xattrs = None;
        self.target = None;
    }

    /// Whether somebody is about to open it.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.is_some_and(|until| Instant::now() < until)
    }

    /// Whether it may be read without a lease: what others wait for has not begun, and the pages are dropped before it does.
    pub(crate) fn may_read_apart(&self) -> bool {
        self.parting > 0 && self.parted == 0
    }

    /// Whether writes of this file are not committed yet.
    pub(crate) fn is_dirty(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_dirty())
    }

    pub(crate) fn file(&mut self) -> &mut File {
        self.file.get_or_insert_with(|| Box::new(File::new()))
    }

    /// The entries of the folder, if a lease protects them, and for how long.
    pub(crate) fn find_names(&mut self, meta: &Meta, ino: Ino) -> Option<(&mut Names, Duration)> {
        let names = self.names.as_mut()?;
        if names.epoch != meta.lease_epoch() {
            return None;
        }
        let ttl = meta.holds(ino, lease::NAMES)?;
        Some((names, ttl))
    }

    fn is_in_use(&self) -> bool {
        self.handles > 0 || self.attr.as_ref().is_some_and(|attr| attr.kind == Kind::Dir)
    }

    fn idle(&self) -> bool {
        self.refs == 0 && self.handles == 0 && !self.is_dirty() && self.locks.is_empty()
    }
}

impl Names {
    fn new(epoch: u32) -> Names {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        Names { epoch, serial, map: HashMap::new(), complete: false, doubted: HashSet::new() }
    }

    /// Whether the kernel may trust this name, and a recall would take it back.
    pub(crate) fn may_be_told(&self, name: &[u8]) -> bool {
        self.map.get(name).is_some_and(Option::is_some) || self.doubted.contains(name)
    }
}

impl File {
    fn new() -> File {
        File {
            extents: Extents::default(),
            version: 0,
            epoch: 0,
            overlay: Overlay::default(),
            number: 0,
            want: 0,
            committed: 0,
            batch: 0,
            tail: None,
            ends: 0,
            sealed: VecDeque::new(),
            committing: 0,
            flushing: false,
            dirty_since: None,
            quiet_since: Instant::now(),
            mtime: None,
            kill_privileges: false,
            errors: 0,
            error: None,
            kernel_version: None,
            forgotten: 0,
            paged: false,
            told: 0,
        }
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.committed < self.number
    }

    /// Bytes in memory that are not committed, those among them that newer ones lie on.
    pub(crate) fn waiting(&self) -> u64 {
        let sealed: u64 = self.sealed.iter().map(|sealed| sealed.len).sum();
        self.overlay.dirty() + sealed + self.committing
    }

    /// Content of this version is what the service has now; older extents go.
    pub(crate) fn learn_version(&mut self, version: u64, epoch: u32) {
        if self.version != version || self.epoch != epoch {
            self.extents.clear();
            self.version = version;
            self.epoch = epoch;
        }
    }

    /// What the kernel may have is not known any more.
    pub(crate) fn forget_pages(&mut self) {
        self.kernel_version = None;
        self.forgotten += 1;
    }

    /// Own commit: the extents follow it if a lease protected them all the while, and they are not too many.
    pub(crate) fn applied(
        &mut self,
        ops: &[RangeOp],
        attr: &Attr,
        epoch: u32,
        protected: bool,
        extents_max: usize,
    ) {
        if protected && self.epoch == epoch {
            ops.iter().for_each(|op| self.extents.apply(op));
        } else {
            self.extents.clear();
            self.epoch = epoch;
        }
        if self.extents.len() > extents_max {
            self.extents.clear();
        }
        if self.kernel_version == Some(self.version) {
            self.kernel_version = Some(attr.data_version);
        }
        self.version = attr.data_version;
    }

    /// Writing in the background failed: whoever has the file open hears of it.
    pub(crate) fn latch(&mut self, fault: Fault) {
        self.errors += 1;
        self.error = Some(fault);
    }

    /// The error that a handle opened when there were `seen` of them must report.
    pub(crate) fn check(&self, seen: u64) -> Result<()> {
        match &self.error {
            Some(fault) if self.errors > seen => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    /// Whether the whole content is small and here, so that it can sit in its extent.
    pub(crate) fn fits_inline(&self) -> bool {
        self.sealed.is_empty() && self.overlay.dirty() <= INLINE_MAX as u64
    }
}

impl Vfs {
    /// The node of an inode, made if it is not known.
    pub(crate) fn node(&self, ino: Ino) -> Arc<Inode> {
        if let Some(node) = self.find_node(ino) {
            return node;
        }
        let (node, new) = {
            let mut nodes = self.0.nodes.write();
            let before = nodes.len();
            let node =
                nodes.entry(ino).or_insert_with(|| Arc::new(Inode::new(ino, *self.0.past.lock()))).clone();
            (node, nodes.len() > before)
        };
        if new {
            // If nobody comes to refer to it or opens it, it goes with the next sweep.
            self.0.idle.lock().push(ino);
        }
        node
    }

    pub(crate) fn find_node(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.0.nodes.read().get(&ino).cloned()
    }

    /// To be noted before something is asked whose answer will be kept.
    pub(crate) fn asked(&self) -> Asked {
        Asked { recalls: self.0.recalls.now(), moment: self.0.meta.now() }
    }

    /// Whether no recall of the inode came since, and no answer about it that came without a lease: it may be out of date although
    /// one is held by now.
    pub(crate) fn is_current(&self, asked: Asked, ino: Ino) -> bool {
        !self.0.recalls.since(ino, asked.recalls) && !self.0.meta.bare_since(ino, asked.moment)
    }

    /// Whether the inode was forgotten since, so that the service may not know that it is known here.
    pub(crate) fn was_forgotten(&self, asked: Asked, ino: Ino) -> bool {
        self.0.meta.forgot_since(ino, asked.moment)
    }

    /// Takes in attributes and answers with them.
    pub(crate) fn learned(&self, node: &Inode, attr: Attr, asked: Asked) -> Node {
        let mut state = node.lock();
        state.learn(&self.0.meta, attr.clone(), self.is_current(asked, node.ino));
        self.answer(&state, attr)
    }

    /// To be awaited before the kernel is told of these attributes. The last page of a file is filled up with zeros, and the
    /// kernel shows them as soon as it hears of a greater length, before it drops its pages by itself.
    pub(crate) async fn before_told(&self, node: &Inode, answer: &Node) {
        let size = answer.attr.size;
        let told = {
            let mut state = node.lock();
            let Some(file) = &mut state.file else { return };
            if !file.paged || size <= file.told {
                file.told = size;
                return;
            }
            file.told
        };
        let from = told / PAGE * PAGE;
        self.0.host.invalidate_data(node.ino, from, size - from);
        self.host_settled().await;
        if let Some(file) = &mut node.lock().file {
            file.told = file.told.max(size);
        }
    }

    /// Ready when the kernel has heard what it was told, or has had its time.
    pub(crate) async fn host_settled(&self) {
        let deadline = Instant::now() + self.0.config.settle_max;
        let mut settled = self.0.host.settled();
        while Instant::now() < deadline {
            match select(settled, self.0.tick.listen()).await {
                Either::Left(_) => break,
                Either::Right((_, rest)) => settled = rest,
            }
        }
    }

    /// For how long the kernel may rely on something that is protected for so long. Its time begins when whoever asked runs again,
    /// which may take a while, so it is told less.
    pub(crate) fn kernel_ttl(&self, left: Duration) -> Duration {
        let late = Duration::from_millis(u64::from(self.0.meta.info().lease_ms) / 6);
        left.saturating_sub(late).min(self.0.config.ttl_max)
    }

    /// What the kernel is told of a node; `attr` is what it gets if nothing newer is known.
    pub(crate) fn answer(&self, state: &State, attr: Attr) -> Node {
        match state.find_attr(&self.0.meta) {
            // Size and times of a file being written change without a call, so the kernel asks again.
            Some((attr, _)) if state.is_dirty() => Node { attr, ttl: Duration::ZERO },
            Some((attr, ttl)) => Node { attr, ttl: self.kernel_ttl(ttl) },
            None => Node { attr: state.view().unwrap_or(attr), ttl: Duration::ZERO },
        }
    }

    /// The kernel forgot so many references.
    pub fn forget(&self, ino: Ino, count: u64) {
        let Some(node) = self.find_node(ino) else { return };
        let left = {
            let mut state = node.lock();
            state.refs = state.refs.saturating_sub(count);
            state.refs
        };
        drop(node);
        if left == 0 {
            self.retire(ino);
        }
    }

    /// The kernel got this entry of a listing and holds one reference more.
    pub fn referenced(&self, ino: Ino) {
        self.node(ino).lock().refs += 1;
    }

    /// Drops a node that nobody needs, now or as soon as that is so.
    pub(crate) fn retire(&self, ino: Ino) {
        if !self.try_retire(ino) {
            self.0.idle.lock().push(ino);
        }
    }

    /// Whether there is nothing left to wait for.
    pub(crate) fn try_retire(&self, ino: Ino) -> bool {
        if ino == Ino::ROOT {
            return true;
        }
        let mut nodes = self.0.nodes.write();
        let Some(node) = nodes.get(&ino) else { return true };
        let (idle, needed) = {
            let state = node.lock();
            (state.idle(), state.refs > 0)
        };
        if needed {
            return true;
        }
        if !idle || Arc::strong_count(node) > 1 {
            return false;
        }
        let mark = {
            let mut state = node.lock();
            self.drop_names(&mut state);
            state.mark
        };
        {
            let mut past = self.0.past.lock();
            *past = mark.max(*past);
        }
        nodes.remove(&ino);
        // Under the lock: who makes a new node of it knows that the old one was forgotten.
        self.0.meta.forget(ino);
        true
    }

    /// Begins to remember entries of a folder, of which there are none if it is complete.
    pub(crate) fn new_names(&self, state: &mut State, ino: Ino, complete: bool) {
        let names = Names { complete, ..Names::new(self.0.meta.lease_epoch()) };
        self.0.folders.lock().insert(names.serial, ino);
        state.names = Some(Box::new(names));
    }

    /// Forgets the entries of a folder; tells which they were, and what they named as far as that is known.
    pub(crate) fn drop_names(&self, state: &mut State) -> Vec<(Bytes, Option<Ino>)> {
        let Some(names) = state.names.take() else { return Vec::new() };
        self.0.folders.lock().remove(&names.serial);
        self.0.entries.fetch_sub(names.map.len() + names.doubted.len(), Ordering::Relaxed);
        names.map.into_iter().chain(names.doubted.into_iter().map(|name| (name, None))).collect()
    }

    /// Has the kernel forget entries of a folder that no lease protects any more. They may be as good as ever, so a folder, in which
    /// somebody may stand or on which something may be mounted, and what is open stay until they are asked for again.
    pub(crate) fn forget_entries(&self, folder: Ino, names: &[(Bytes, Option<Ino>)]) {
        let host = &self.0.host;
        for (name, ino) in names {
            match ino.and_then(|ino| self.find_node(ino)).is_some_and(|node| node.lock().is_in_use()) {
                true => host.expire_entry(folder, name),
                false => host.invalidate_entry(folder, name),
            }
        }
    }

    /// All nodes, for rare sweeps.
    pub(crate) fn all_nodes(&self) -> Vec<Arc<Inode>> {
        self.0.nodes.read().values().cloned().collect()
    }
}
