//! Giving leases back: recalls, the loss of all leases, the end of the session.
//!
//! The kernel may hold a lock for an operation that waits for the very recall we serve, so its invalidations are not waited for
//! without end: our own caches go first, from then on answers carry a timeout of zero, the
//! notifications are queued, and the acknowledgement follows when they were delivered or the time is up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use parking_lot::MutexGuard;
use torchfs_client::Keeper;
use torchfs_proto::Ino;
use torchfs_proto::attr::Raw;
use torchfs_proto::msg::meta::lease;

use crate::node::{Inode, State};
use crate::{Inner, Vfs, commit, metrics};

/// How long what lost its last name stays to be opened by who has just found it.
const LINGER: Duration = Duration::from_secs(1);

/// How often pages are dropped for one recall while they are read again and again.
const PARTINGS_MAX: u32 = 4;

impl Keeper for Inner {
    fn recall(&self, ino: Ino, bits: u8, names: Vec<Raw>) -> BoxFuture<'static, bool> {
        self.recalls.note(ino);
        ::metrics::counter!(metrics::RECALLS).increment(1);
        let vfs = self.vfs();
        Box::pin(async move {
            let Some(vfs) = vfs else { return false };
            let Some(node) = vfs.find_node(ino) else { return false };
            vfs.honour(&node, bits, names).await
        })
    }

    fn orphaned(&self, ino: Ino) {
        self.recalls.note(ino);
        let Some(vfs) = self.vfs() else { return };
        // A program that found the name a moment ago may be about to open what was behind it, even if the answer that tells
        // of it is still on its way here.
        let node = vfs.node(ino);
        {
            let mut state = node.lock();
            state.orphan = true;
            state.doubt_attr();
        }
        vfs.linger(node);
        self.host.invalidate_attr(ino);
    }

    fn changed(&self, ino: Ino) {
        self.recalls.note(ino);
        if let Some(node) = self.vfs().and_then(|vfs| vfs.find_node(ino)) {
            let mut state = node.lock();
            state.doubt_attr();
            if let Some(file) = &mut state.file {
                file.extents.clear();
                file.forget_pages();
            }
        }
        self.host.invalidate_data(ino, 0, 0);
    }

    fn lost(&self) {
        self.recalls.note_all();
        let Some(vfs) = self.vfs() else { return };
        tracing::warn!("all leases ran out; what was remembered under them is dropped");
        for node in vfs.all_nodes() {
            let pages = {
                let state = node.lock();
                state.handles > 0 || state.file.as_ref().is_some_and(|file| file.kernel_version.is_some())
            };
            vfs.forget_all(&node, u8::MAX);
            // Entries and attributes were never trusted for longer than the lease; pages were.
            if pages {
                self.host.invalidate_data(node.ino, 0, 0);
            }
        }
    }

    fn open_inodes(&self) -> Vec<Ino> {
        let nodes = self.nodes.read();
        nodes.values().filter(|node| node.lock().handles > 0).map(|node| node.ino).collect()
    }

    fn fenced(&self) {
        let Some(vfs) = self.vfs() else { return };
        let dirty: Vec<Arc<Inode>> = self.dirty.lock().values().cloned().collect();
        tracing::error!(files = dirty.len(), "the session ended; what was not written back is lost");
        for node in dirty {
            commit::lose(&vfs, &node);
        }
        self.lost();
    }
}

/// A recall of the right to content under way. Until it is acknowledged nobody else changes the content, so it may still be read
/// here: the kernel holds a page's lock for a read, and to drop the page it has to wait for that.
///
/// # Invariants
/// - Pages that were read meanwhile are dropped after that, and before the end of this.
struct Parting {
    node: Arc<Inode>,
    closed: bool,
    ended: bool,
}

impl Parting {
    fn begin(node: &Arc<Inode>) -> Parting {
        node.lock().parting += 1;
        // Who waits for a lease need not do so.
        node.progress.notify();
        Parting { node: node.clone(), closed: false, ended: false }
    }

    /// From now on reads wait for a lease.
    fn close(&mut self) {
        self.closed = true;
        self.node.lock().parted += 1;
    }

    fn end(mut self, state: MutexGuard<'_, State>) {
        self.over(state);
    }

    fn over(&mut self, mut state: MutexGuard<'_, State>) {
        self.ended = true;
        state.parting -= 1;
        state.parted -= u32::from(self.closed);
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        if !self.ended {
            let node = self.node.clone();
            self.over(node.lock());
        }
    }
}

impl Vfs {
    /// Keeps an inode without a name for who is about to open it, until the time is up.
    pub(crate) fn linger(&self, node: Arc<Inode>) {
        let due = Instant::now() + LINGER;
        node.lock().lingers = Some(due);
        self.0.departing.lock().push_back((due, node));
    }

    /// Gives up what nobody opened in its time.
    pub(crate) fn let_go_due(&self) {
        let now = Instant::now();
        loop {
            let next = self.0.departing.lock().pop_front_if(|(due, _)| *due <= now);
            let Some((due, node)) = next else { return };
            // It may have been opened and closed since; then its turn comes later.
            if node.lock().lingers == Some(due) {
                self.let_go(&node);
            }
        }
    }

    /// Gives up an inode without a name, unless somebody has it open by now; then its last handle does so. One that is being opened
    /// stays for another while.
    fn let_go(&self, node: &Arc<Inode>) {
        {
            let mut state = node.lock();
            if state.handles > 0 || state.gone || !state.orphan {
                return;
            }
            if state.opening > 0 || state.is_awaited() {
                drop(state);
                return self.linger(node.clone());
            }
            state.gone = true;
        }
        self.discard(node);
        self.0.meta.release(node.ino);
    }

    /// Serves a recall; tells whether the file is still open for writing here.
    async fn honour(&self, node: &Arc<Inode>, bits: u8, names: Vec<Raw>) -> bool {
        let parting = (bits & (lease::READ | lease::WRITE) != 0).then(|| Parting::begin(node));
        if bits & lease::WRITE != 0 {
            node.lock().recalling += 1;
            self.write_back(node).await;
        }
        let known = self.forget_all(node, bits);
        if bits & lease::WRITE != 0 {
            node.lock().recalling -= 1;
            node.progress.notify();
        }
        if bits & lease::NAMES != 0 {
            self.forget_names(node, &known, &names).await;
        }
        match parting {
            Some(parting) => self.part(parting).await,
            None if bits & lease::NAMES == 0 => {
                self.tell_kernel(node, bits);
                self.host_settled().await;
            }
            None => {}
        }
        node.lock().writers > 0
    }

    /// Has the kernel drop the pages, until nobody has read any without a lease meanwhile.
    async fn part(&self, mut parting: Parting) {
        for last in (0..PARTINGS_MAX).map(|round| round + 1 == PARTINGS_MAX) {
            let before = parting.node.lock().read_apart;
            if last {
                parting.close();
            }
            self.0.host.invalidate_data(parting.node.ino, 0, 0);
            self.host_settled().await;
            let node = parting.node.clone();
            let state = node.lock();
            if last || state.read_apart == before {
                return parting.end(state);
            }
        }
    }

    /// Drops what these leases protected; tells which names the kernel may know.
    fn forget_all(&self, node: &Inode, bits: u8) -> Vec<(Bytes, Option<Ino>)> {
        let mut state = node.lock();
        if bits & lease::ATTR != 0 {
            state.doubt_attr();
        }
        if bits & (lease::READ | lease::WRITE | lease::SHARED) != 0
            && let Some(file) = &mut state.file
        {
            file.extents.clear();
            file.forget_pages();
        }
        if bits & lease::NAMES == 0 {
            return Vec::new();
        }
        // Without the lease nobody tells us when other names change, so the kernel must ask about all of them.
        self.drop_names(&mut state)
    }

    fn tell_kernel(&self, node: &Inode, bits: u8) {
        if bits & lease::ATTR != 0 {
            self.0.host.invalidate_attr(node.ino);
        }
    }

    /// Has the kernel forget names of a folder: all that are known, and those that change. It takes the folder's lock for each of
    /// them, which an operation here may hold that waits for the very operation elsewhere that we hold up. Then all entries of all
    /// folders are made to be asked for again, which takes no lock.
    async fn forget_names(&self, node: &Inode, known: &[(Bytes, Option<Ino>)], changing: &[Raw]) {
        let host = &self.0.host;
        let busy = node.lock().busy > 0;
        if busy && host.expire_entries(node.ino) {
            return;
        }
        host.invalidate_attr(node.ino);
        self.forget_entries(node.ino, known);
        changing.iter().for_each(|name| host.invalidate_entry(node.ino, name));
        let settled = select(host.settled(), self.0.tick.listen()).await;
        if matches!(settled, Either::Right(_)) && !host.expire_entries(node.ino) {
            self.host_settled().await;
        }
    }
}
