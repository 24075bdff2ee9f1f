//! Notifications to the kernel: what it keeps of ours is stale, or here is more.
//!
//! The kernel takes a folder's lock for INVAL_ENTRY, which a process blocked in CREATE may hold, and a page's lock for
//! INVAL_INODE, which a READ in flight holds. So notifications are written by a thread of their own that holds no lock
//! of ours, in the order they were posted; whoever needs the effect awaits it.
//!
//! # Invariants
//! - The order of notices is the order of their posting, but for a queue that grew too long: then notices that mean
//!   the same become one, and all stale entries one new epoch of every entry. Nothing that was posted is lost.
//! - Posting never waits and holds no lock while anything is written. So it may be done from anywhere.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::abi::{self, notify};
use super::device::Device;
use super::reply::{put_u32, put_u64};
use crate::metrics;

/// One thing to tell the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Attributes of the inode are stale; with a range, so is that part of the page cache.
    Inode {
        /// Which inode.
        ino: u64,
        /// From where; `None` leaves the page cache alone.
        offset: Option<u64>,
        /// How many bytes; 0 is "to the end".
        len: u64,
    },
    /// An entry is stale.
    Entry {
        /// Its folder.
        parent: u64,
        /// Its name.
        name: Bytes,
        /// Ask again at the next use, but keep the inode and mounts below it.
        expire_only: bool,
    },
    /// An entry was removed elsewhere; watchers of the folder are told.
    Delete {
        /// Its folder.
        parent: u64,
        /// The inode it named.
        child: u64,
        /// Its name.
        name: Bytes,
    },
    /// Bytes for the page cache, before anybody asks for them.
    Store {
        /// Which inode.
        ino: u64,
        /// Where they belong.
        offset: u64,
        /// The bytes, sent from where they lie.
        data: Vec<Bytes>,
    },
    /// Every entry the kernel holds is stale.
    Epoch,
    /// Hand out again every request that was read but not answered (after an agent's death).
    Resend,
}

/// Posts notices; cheap to clone.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    bound: usize,
    device: Arc<Device>,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Gather what means the same when the queue has grown to this.
    gather_at: usize,
    /// Whether the kernel knows epochs.
    epochs: bool,
    stopped: bool,
}

#[derive(Debug)]
enum Item {
    Notice(Notice),
    /// Everything before has been delivered.
    Barrier(oneshot::Sender<()>),
}

/// The thread that writes notices, until [`Notifier::stop`].
pub(super) struct Writer {
    shared: Arc<Shared>,
}

impl Notifier {
    pub(super) fn new(device: Arc<Device>, bound: usize) -> (Notifier, Writer) {
        let bound = bound.max(16);
        let queue = Mutex::new(Queue { gather_at: bound, ..Queue::default() });
        let shared = Arc::new(Shared { queue, more: Condvar::new(), bound, device });
        (Notifier(Arc::clone(&shared)), Writer { shared })
    }

    /// Queues a notice. It has no effect once the mount is gone.
    pub fn post(&self, notice: Notice) {
        let mut queue = self.0.queue.lock();
        if queue.stopped {
            return;
        }
        queue.items.push_back(Item::Notice(notice));
        if queue.items.len() >= queue.gather_at {
            let epochs = queue.epochs;
            gather(&mut queue.items, epochs);
            // If most of it cannot be gathered, do not try again at once.
            queue.gather_at = self.0.bound.max(queue.items.len() * 2);
        }
        drop(queue);
        self.0.more.notify_one();
    }

    /// Queues a notice unless the queue is full: for hints, which may get lost.
    pub fn offer(&self, notice: Notice) -> bool {
        let full = self.0.queue.lock().items.len() >= self.0.bound;
        if !full {
            self.post(notice);
        }
        !full
    }

    /// Ready when everything posted before was delivered, or the mount is gone.
    pub fn settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let (done, wait) = oneshot::channel();
        let mut queue = self.0.queue.lock();
        if !queue.stopped {
            queue.items.push_back(Item::Barrier(done));
        }
        drop(queue);
        self.0.more.notify_one();
        async move {
            let _ = wait.await;
        }
    }

    /// Posts a notice and waits until it was delivered.
    pub async fn apply(&self, notice: Notice) {
        self.post(notice);
        self.settled().await;
    }

    /// Makes every entry stale before this returns, and the attributes of a folder: the kernel takes no lock for that. False if
    /// it cannot.
    pub fn expire_entries(&self, folder: u64) -> bool {
        let able = {
            let queue = self.0.queue.lock();
            queue.epochs && !queue.stopped
        };
        able && [Notice::Inode { ino: folder, offset: None, len: 0 }, Notice::Epoch]
            .iter()
            .all(|notice| self.0.write(notice))
    }

    /// The kernel said whether it knows epochs.
    pub(super) fn set_epochs(&self, epochs: bool) {
        self.0.queue.lock().epochs = epochs;
    }

    /// Ends the writing thread; what is queued has no effect any more.
    pub(super) fn stop(&self) {
        let mut queue = self.0.queue.lock();
        queue.stopped = true;
        queue.items.clear();
        drop(queue);
        self.0.more.notify_one();
    }
}

impl Writer {
    /// Writes notices until told to stop.
    pub fn run(self) {
        while let Some(item) = self.next() {
            match item {
                Item::Notice(notice) => drop(self.shared.write(&notice)),
                Item::Barrier(done) => {
                    let _ = done.send(());
                }
            }
        }
    }

    fn next(&self) -> Option<Item> {
        let mut queue = self.shared.queue.lock();
        loop {
            if queue.stopped {
                return None;
            }
            if let Some(item) = queue.items.pop_front() {
                if queue.items.is_empty() {
                    queue.gather_at = self.shared.bound;
                }
                return Some(item);
            }
            self.shared.more.wait(&mut queue);
        }
    }
}

impl Shared {
    /// Tells the kernel; false if it refused.
    fn write(&self, notice: &Notice) -> bool {
        metrics::notices().increment(1);
        let (code, fixed, data) = encode(notice);
        match self.device.notify(code, &fixed, data) {
            Err(error) if !is_harmless(&error) => {
                tracing::warn!(%error, ?notice, "the kernel refused a notification");
                false
            }
            _ => true,
        }
    }
}

/// Makes notices that mean the same one: inodes become stale as a whole, entries all at once if the kernel can.
/// Barriers go to the end, so they still come after what they waited for.
fn gather(items: &mut VecDeque<Item>, epochs: bool) {
    let mut inodes: BTreeMap<u64, bool> = BTreeMap::new();
    let mut entries: HashMap<(u64, Bytes), bool> = HashMap::new();
    let (mut others, mut barriers) = (Vec::new(), Vec::new());
    for item in items.drain(..) {
        match item {
            Item::Notice(Notice::Inode { ino, offset, .. }) => {
                *inodes.entry(ino).or_default() |= offset.is_some()
            }
            Item::Notice(Notice::Entry { parent, name, expire_only }) => {
                *entries.entry((parent, name)).or_insert(true) &= expire_only;
            }
            Item::Notice(other) => others.push(Item::Notice(other)),
            barrier => barriers.push(barrier),
        }
    }
    items.extend(others);
    items.extend(
        inodes
            .into_iter()
            .map(|(ino, data)| Item::Notice(Notice::Inode { ino, offset: data.then_some(0), len: 0 })),
    );
    if epochs && !entries.is_empty() {
        items.push_back(Item::Notice(Notice::Epoch));
    } else {
        let entry = |((parent, name), expire_only)| Item::Notice(Notice::Entry { parent, name, expire_only });
        items.extend(entries.into_iter().map(entry));
    }
    items.extend(barriers);
}

fn is_harmless(error: &io::Error) -> bool {
    // ENOENT: not cached. ENODEV, ECONNABORTED: the mount is gone. ENOTEMPTY, EBUSY: the entry is in use by a process
    // (a working directory, a mount point); the kernel asks again when its time is over.
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOENT | libc::ENODEV | libc::ECONNABORTED | libc::ENOTEMPTY | libc::EBUSY | libc::ENOTDIR
        )
    )
}

/// Code, fixed part with name, and data.
fn encode(notice: &Notice) -> (i32, Vec<u8>, &[Bytes]) {
    let mut out = Vec::with_capacity(64);
    let code = match notice {
        Notice::Inode { ino, offset, len } => {
            put_u64(&mut out, *ino);
            // A negative offset means "attributes only".
            let offset = offset.map_or(-1, |offset| i64::try_from(offset).unwrap_or(i64::MAX));
            put_u64(&mut out, offset.cast_unsigned());
            put_u64(&mut out, i64::try_from(*len).unwrap_or(0).cast_unsigned());
            notify::INVAL_INODE
        }
        Notice::Entry { parent, name, expire_only } => {
            put_u64(&mut out, *parent);
            put_u32(&mut out, name.len() as u32);
            put_u32(&mut out, if *expire_only { abi::flag::EXPIRE_ONLY } else { 0 });
            put_name(&mut out, name);
            notify::INVAL_ENTRY
        }
        Notice::Delete { parent, child, name } => {
            put_u64(&mut out, *parent);
            put_u64(&mut out, *child);
            put_u32(&mut out, name.len() as u32);
            put_u32(&mut out, 0);
            put_name(&mut out, name);
            notify::DELETE
        }
        Notice::Store { ino, offset, data } => {
            put_u64(&mut out, *ino);
            put_u64(&mut out, *offset);
            put_u32(&mut out, data.iter().map(Bytes::len).sum::<usize>() as u32);
            put_u32(&mut out, 0);
            return (notify::STORE, out, data);
        }
        Notice::Epoch => notify::INC_EPOCH,
        Notice::Resend => notify::RESEND,
    };
    (code, out, &[])
}

fn put_name(out: &mut Vec<u8>, name: &[u8]) {
    out.extend_from_slice(name);
    out.push(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(parent: u64, name: &'static [u8]) -> Notice {
        Notice::Entry { parent, name: Bytes::from_static(name), expire_only: false }
    }

    fn gathered(notices: Vec<Notice>, epochs: bool) -> Vec<Notice> {
        let mut items: VecDeque<Item> = notices.into_iter().map(Item::Notice).collect();
        let (done, _wait) = oneshot::channel();
        items.insert(1, Item::Barrier(done));
        gather(&mut items, epochs);
        assert!(matches!(items.pop_back(), Some(Item::Barrier(_))), "barriers come last");
        items
            .into_iter()
            .map(|item| if let Item::Notice(notice) = item { notice } else { panic!() })
            .collect()
    }

    #[test]
    fn a_long_queue_is_gathered_and_loses_nothing() {
        let inode = |ino, offset, len| Notice::Inode { ino, offset, len };
        let notices = vec![
            inode(5, None, 0),
            inode(5, Some(4096), 100),
            inode(6, None, 0),
            inode(6, None, 0),
            entry(1, b"a"),
            entry(1, b"a"),
            entry(2, b"a"),
            Notice::Resend,
        ];
        let whole = [Notice::Resend, inode(5, Some(0), 0), inode(6, None, 0), Notice::Epoch];
        assert_eq!(gathered(notices.clone(), true), whole);
        let named = gathered(notices, false);
        assert_eq!(named.len(), 5);
        assert!(named.contains(&entry(1, b"a")) && named.contains(&entry(2, b"a")));
    }

    #[test]
    fn notices_have_the_kernels_layout() {
        let (code, out, _) = encode(&Notice::Inode { ino: 5, offset: None, len: 0 });
        assert_eq!((code, out.len()), (2, 24));
        assert_eq!(out[8..16], (-1i64).to_ne_bytes());

        let entry = Notice::Entry { parent: 1, name: Bytes::from_static(b"abc"), expire_only: true };
        let (code, out, _) = encode(&entry);
        assert_eq!((code, &out[12..]), (3, &b"\x01\0\0\0abc\0"[..]));

        let (code, out, _) = encode(&Notice::Delete { parent: 1, child: 2, name: Bytes::from_static(b"a") });
        assert_eq!((code, out.len()), (6, 26));

        let store = Notice::Store { ino: 5, offset: 4096, data: vec![Bytes::from_static(b"xy")] };
        let (code, out, data) = encode(&store);
        assert_eq!((code, out.len(), data.len()), (4, 24, 1));
        assert_eq!(out[16..20], 2u32.to_ne_bytes());
        assert_eq!((encode(&Notice::Resend).0, encode(&Notice::Epoch).0), (7, 8));
    }
}
