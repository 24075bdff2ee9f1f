//! A file system in memory: just enough to be mounted, with files that never answer.

use std::collections::BTreeMap;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use torchfs_agent::fuse::{
    Attr, Call, Entry, Handler, Header, Listing, Op, Reply, SetAttr, SetTime, Undo, abi,
};

pub const LONG: Duration = Duration::from_secs(3600);

/// The file system and what it saw.
#[derive(Default)]
pub struct Toy {
    state: Mutex<State>,
    next: AtomicU64,
    /// How long the kernel may keep entries and attributes.
    keep: Duration,
    pub forgotten: AtomicU64,
    pub undone: Mutex<Vec<Undo>>,
    /// Operations that wait, now.
    pub waiting: AtomicUsize,
    /// Waiting operations that were dropped.
    pub dropped: AtomicUsize,
    /// Lets a folder or file called `slow` be made, or a file called that be emptied.
    pub go: Notify,
    pub payloads_on_a_page: AtomicUsize,
    pub lookups: AtomicUsize,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<u64, Node>,
    names: BTreeMap<(u64, Vec<u8>), u64>,
}

#[derive(Clone, Default)]
struct Node {
    attr: Attr,
    data: Vec<u8>,
}

impl Toy {
    pub fn new(keep: Duration) -> Arc<Toy> {
        let toy = Toy { keep, next: AtomicU64::new(2), ..Toy::default() };
        let attr = Attr { ino: 1, mode: libc::S_IFDIR | 0o755, nlink: 2, ..Attr::default() };
        toy.state.lock().nodes.insert(1, Node { attr, data: Vec::new() });
        Arc::new(toy)
    }

    /// A file made behind the kernel's back.
    pub fn put(&self, name: &str, data: &[u8]) -> u64 {
        let ino = self.add(1, name.as_bytes(), libc::S_IFREG | 0o644).attr.ino;
        self.set_data(ino, data);
        ino
    }

    pub fn set_data(&self, ino: u64, data: &[u8]) {
        let mut state = self.state.lock();
        let node = state.nodes.get_mut(&ino).unwrap();
        node.data = data.to_vec();
        node.attr.size = data.len() as u64;
    }

    pub fn remove(&self, name: &str) {
        self.state.lock().names.remove(&(1, name.as_bytes().to_vec()));
    }

    fn add(&self, parent: u64, name: &[u8], mode: u32) -> Entry {
        let ino = self.next.fetch_add(1, Ordering::SeqCst);
        let attr = Attr { ino, mode, nlink: 1, blksize: 64 << 10, ..Attr::default() };
        let mut state = self.state.lock();
        state.nodes.insert(ino, Node { attr, data: Vec::new() });
        state.names.insert((parent, name.to_vec()), ino);
        self.entry(attr)
    }

    fn entry(&self, attr: Attr) -> Entry {
        Entry { nodeid: attr.ino, generation: 1, entry_valid: self.keep, attr_valid: self.keep, attr }
    }

    fn answer(&self, header: Header, op: Op<'_>, payload: &Bytes) -> Reply {
        let ino = header.nodeid;
        let mut state = self.state.lock();
        match op {
            Op::Lookup { name } => {
                self.lookups.fetch_add(1, Ordering::SeqCst);
                match state.names.get(&(ino, name.to_vec())) {
                    Some(ino) => Reply::entry(&self.entry(state.nodes[ino].attr)),
                    None => Reply::negative(self.keep),
                }
            }
            Op::Getattr { .. } => Reply::attr(&state.nodes[&ino].attr, self.keep),
            Op::Statx { .. } => Reply::statx(&state.nodes[&ino].attr, self.keep),
            Op::Setattr(set) => {
                let node = state.nodes.get_mut(&ino).unwrap();
                apply(node, &set);
                Reply::attr(&node.attr, self.keep)
            }
            Op::Create { name, mode, .. } => {
                drop(state);
                Reply::create(&self.add(ino, name, libc::S_IFREG | mode), 5, 0)
            }
            Op::Mkdir { name, mode, .. } => {
                drop(state);
                Reply::entry(&self.add(ino, name, libc::S_IFDIR | mode))
            }
            Op::Open { .. } => {
                let never = state.names.get(&(1, b"never".to_vec())) == Some(&ino);
                // Past the page cache a read belongs to its process and can be interrupted.
                Reply::open(ino, 5, if never { abi::fopen::DIRECT_IO } else { 0 })
            }
            Op::Opendir { .. } => Reply::opendir(ino, 5, 0),
            Op::Read { offset, size, .. } => {
                let data = &state.nodes[&ino].data;
                let from = data.len().min(offset as usize);
                let to = data.len().min(from + size as usize);
                // In small pieces, as they would come from chunks.
                Reply::data(data[from..to].chunks(65536).map(Bytes::copy_from_slice).collect())
            }
            Op::Write { write, .. } => {
                if payload.as_ptr().addr().is_multiple_of(4096) {
                    self.payloads_on_a_page.fetch_add(1, Ordering::SeqCst);
                }
                let node = state.nodes.get_mut(&ino).unwrap();
                let end = write.offset as usize + payload.len();
                if node.data.len() < end {
                    node.data.resize(end, 0);
                }
                node.data[write.offset as usize..end].copy_from_slice(payload);
                node.attr.size = node.data.len() as u64;
                Reply::written(payload.len() as u32)
            }
            Op::Readdir { offset, size, plus, .. } => {
                let mut listing = Listing::new(size);
                let rows = state.names.iter().filter(|((parent, _), _)| *parent == ino).enumerate();
                for (at, ((_, name), child)) in rows.skip(offset as usize) {
                    let (attr, next) = (state.nodes[child].attr, at as u64 + 1);
                    let fits = if plus {
                        listing.push_plus(&self.entry(attr), *child, next, attr.mode, name)
                    } else {
                        listing.push(*child, next, attr.mode, name)
                    };
                    if !fits {
                        break;
                    }
                }
                Reply::listing(listing, Vec::new())
            }
            Op::Unlink { name } | Op::Rmdir { name } => match state.names.remove(&(ino, name.to_vec())) {
                Some(_) => Reply::done(),
                None => Reply::error(libc::ENOENT),
            },
            Op::Flush { .. } | Op::Release { .. } | Op::Releasedir { .. } | Op::Fsync { .. } => Reply::done(),
            Op::Setlk { .. } => Reply::done(),
            Op::Link { .. } => panic!("a handler that panics"),
            _ => Reply::error(libc::ENOSYS),
        }
    }

    fn name_of(&self, ino: u64) -> Vec<u8> {
        let state = self.state.lock();
        state
            .names
            .iter()
            .find(|(_, child)| **child == ino)
            .map(|((_, name), _)| name.clone())
            .unwrap_or_default()
    }
}

/// Counts a wait, and that it was dropped.
struct Waiting(Arc<Toy>);

impl Waiting {
    fn new(toy: &Arc<Toy>) -> Waiting {
        toy.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(Arc::clone(toy))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

impl Handler for Toy {
    fn call(self: Arc<Self>, header: Header, op: Op<'_>, payload: Bytes) -> Call {
        let never = match &op {
            Op::Setlk { wait: true, .. } => true,
            Op::Read { .. } | Op::Setlk { .. } => self.name_of(header.nodeid) == b"never",
            _ => false,
        };
        if never {
            return Box::pin(async move {
                let _waiting = Waiting::new(&self);
                pending().await
            });
        }
        if matches!(op, Op::Read { .. }) && self.name_of(header.nodeid) == b"later" {
            return Box::pin(async move {
                let _waiting = Waiting::new(&self);
                self.go.notified().await;
                Reply::data(vec![Bytes::from_static(&[1; 100])])
            });
        }
        if let Op::Mkdir { name: b"slow", mode, .. } = op {
            return Box::pin(async move {
                let waiting = Waiting::new(&self);
                self.go.notified().await;
                drop(waiting);
                Reply::entry(&self.add(header.nodeid, b"slow", libc::S_IFDIR | mode))
            });
        }
        if let Op::Create { name: b"slow", mode, .. } = op {
            return Box::pin(async move {
                let waiting = Waiting::new(&self);
                self.go.notified().await;
                drop(waiting);
                Reply::create(&self.add(header.nodeid, b"slow", libc::S_IFREG | mode), 5, 0)
            });
        }
        if matches!(op, Op::Fallocate { .. }) && self.name_of(header.nodeid) == b"slow" {
            return Box::pin(async move {
                let _waiting = Waiting::new(&self);
                self.go.notified().await;
                self.state.lock().nodes.get_mut(&header.nodeid).unwrap().data.fill(0);
                Reply::done()
            });
        }
        if let Op::Mkdir { name: b"yields", mode, .. } = op {
            return Box::pin(async move {
                tokio::task::yield_now().await;
                Reply::entry(&self.add(header.nodeid, b"yields", libc::S_IFDIR | mode))
            });
        }
        let reply = self.answer(header, op, &payload);
        Box::pin(async move { reply })
    }

    fn forget(&self, _nodeid: u64, count: u64) {
        self.forgotten.fetch_add(count, Ordering::SeqCst);
    }

    fn undo(self: Arc<Self>, undo: Undo) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        self.undone.lock().push(undo);
        Box::pin(async {})
    }
}

fn apply(node: &mut Node, set: &SetAttr) {
    if let Some(size) = set.size {
        node.data.resize(size as usize, 0);
        node.attr.size = size;
    }
    if let Some(mode) = set.mode {
        node.attr.mode = mode;
    }
    if let Some(SetTime::At(time)) = set.mtime {
        node.attr.mtime = time;
    }
}
