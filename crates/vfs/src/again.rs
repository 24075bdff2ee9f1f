//! The second look of a thread that was told ESTALE.
//!
//! What the kernel looked up may be gone when it opens it, because another process removed it; and where it found nothing there may
//! be a file of somebody else's when it makes one, because another mount made it. It is told ESTALE then, looks the name up once more on
//! behalf of the same thread, and tries once more. If that failed too the program would see ESTALE, which no local file system says. So
//! what the second look finds lasts: what a creation met is found again even if it lost its name since (the open happened when it was
//! met), and whatever else is found stays for a moment to be opened.
//!
//! # Invariants
//! - What a creation met is told to one lookup only: by the same thread, of the same name, within [`AGAIN`].
//! - The table is bounded: by threads that were told ESTALE within that time, and by [`THREADS_MAX`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foldhash::HashMap;
use parking_lot::Mutex;
use torchfs_proto::attr::Attr;
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::node::{Inode, State};
use crate::{Caller, Found, Vfs};

/// How long a second look may take to come, and to open what it found.
pub(crate) const AGAIN: Duration = Duration::from_secs(1);

const THREADS_MAX: usize = 4_096;

/// How often a second look may find what another removal of this mount is taking away.
const LOOKS_MAX: u32 = 64;

/// Threads that are about to look again.
#[derive(Default)]
pub(crate) struct Again {
    threads: Mutex<HashMap<u32, Look>>,
    /// How many there are, to be read without the lock.
    count: AtomicUsize,
}

struct Look {
    due: Instant,
    /// And until when.
    met: Option<(Instant, Met)>,
}

/// What was there when a file was to be made.
pub(crate) struct Met {
    pub(crate) parent: Ino,
    pub(crate) name: Bytes,
    pub(crate) node: Arc<Inode>,
    pub(crate) attr: Attr,
}

impl Again {
    fn note(&self, caller: Caller, met: Option<Met>) {
        // Threads that are not known to the mount's namespace all have this number.
        if caller.pid == 0 {
            return;
        }
        let mut threads = self.threads.lock();
        if threads.len() >= THREADS_MAX {
            return;
        }
        let due = Instant::now() + AGAIN;
        let look = threads.entry(caller.pid).or_insert(Look { due, met: None });
        look.due = due;
        look.met = met.map(|met| (due, met)).or(look.met.take());
        self.count.store(threads.len(), Ordering::Release);
    }

    fn looks(&self, caller: Caller) -> bool {
        self.count.load(Ordering::Acquire) > 0
            && self.threads.lock().get(&caller.pid).is_some_and(|look| Instant::now() < look.due)
    }

    fn take_met(&self, caller: Caller, parent: Ino, name: &[u8]) -> Option<Met> {
        let mut threads = self.threads.lock();
        let look = threads.get_mut(&caller.pid)?;
        let (until, met) = look.met.take_if(|(_, met)| met.parent == parent && met.name == name)?;
        (Instant::now() < until).then_some(met)
    }

    /// Forgets those whose time is up.
    pub(crate) fn expire(&self) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let now = Instant::now();
        let mut threads = self.threads.lock();
        threads.retain(|_, look| now < look.due);
        self.count.store(threads.len(), Ordering::Release);
    }
}

impl Vfs {
    /// The kernel was told ESTALE on behalf of this thread: it looks again.
    pub fn told_stale(&self, caller: Caller) {
        self.0.again.note(caller, None);
    }

    /// A creation met a file that it must not open by itself: the fault that has the kernel look again, and find it.
    pub(crate) fn met(&self, caller: Caller, met: Met) -> Fault {
        let what = format!("inode {} was made elsewhere meanwhile", met.node.ino);
        met.node.lock().awaited = Some(Instant::now() + AGAIN);
        self.0.again.note(caller, Some(met));
        Fault::new(Code::Stale, what)
    }

    /// A lookup whose thread was told ESTALE a moment ago; `None` for all others.
    pub(crate) async fn look_again(&self, caller: Caller, parent: Ino, name: &[u8]) -> Option<Result<Found>> {
        if !self.0.again.looks(caller) {
            return None;
        }
        if let Some(met) = self.0.again.take_met(caller, parent, name)
            && met.node.lock().is_kept()
        {
            let node = Some(self.refer(&met.node, met.attr).await);
            return Some(Ok(Found { node, entry_ttl: Duration::ZERO }));
        }
        let mut left = LOOKS_MAX;
        loop {
            let found = match self.look(parent, name).await {
                Ok(found) => found,
                Err(fault) => return Some(Err(fault)),
            };
            let Some(node) = found.node.as_ref().and_then(|node| self.find_node(node.attr.ino)) else {
                return Some(Ok(found));
            };
            let progress = node.progress.listen();
            let leaving = {
                let mut state = node.lock();
                left -= 1;
                if state.is_kept() || left == 0 {
                    return Some(Ok(found));
                }
                state.leaving > 0
            };
            self.forget(node.ino, 1);
            if leaving {
                // It told the service that nobody here has the file open.
                progress.await;
            }
        }
    }
}

impl State {
    /// Whether it stays to be opened for a moment, whoever removes it from now on.
    fn is_kept(&mut self) -> bool {
        self.awaited = Some(Instant::now() + AGAIN);
        self.leaving == 0 && !self.gone
    }
}
