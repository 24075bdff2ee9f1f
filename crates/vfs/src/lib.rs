//! POSIX meaning without FUSE: handles, leases, the write path.
//!
//! [`Vfs`] turns the words of a kernel (or of any other program) into calls to the metadata service and to data servers, and
//! remembers the answers for as long as leases allow. A read goes handle → extents → cache or blocks; a write goes into
//! a buffer, is sealed into immutable blocks that are put in the background, and becomes visible to others with one commit
//! that names them.
//!
//! # Invariants
//! - Nothing is answered from memory without a lease that holds now, and no answer tells the kernel to trust it longer.
//! - Each node (inode known here) has one lock; it is never held across an await, and never together with another's.
//! - Content of a file changes at the service in turns: a commit, a truncation, a punch, a copy; one at a time per file.
//! - A future may be dropped at any time. What must not stop halfway is finished in the background.
//! - What is buffered has a bound, and so has everything else that is kept.
//!
//! # Not here
//! FUSE and errno (agent), wire and retries (client), what is kept of blocks (cache), who may do what (the kernel checks
//! permissions by mode, owner and group; the service checks what only it can know).

mod again;
mod api;
mod attr;
mod budget;
mod commit;
mod compact;
mod dir;
mod extents;
mod finish;
mod host;
mod locks;
pub mod metrics;
mod names;
mod node;
mod open;
mod overlay;
mod policy;
mod range;
mod read;
mod recall;
mod restripe;
mod signal;
#[cfg(test)]
mod testing;
mod write;
mod xattr;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use foldhash::HashMap;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use torchfs_cache::{Cache, CacheConfig, Fetch};
use torchfs_client::{Blocks, Keeper, Mark, Marks, Meta};
use torchfs_proto::extent::BlockRef;
use torchfs_proto::{Fault, Ino, Result};

pub use api::{Caller, Config, DirItem, Fh, Found, Node, Opened, Seek, WriteFlags};
pub(crate) use attr::unexpected;
pub use host::{Host, NoHost};

use budget::{Budget, Slots};
use finish::Finish;
use node::Inode;
use open::Handle;
use signal::Signal;

/// A mounted volume. Cheap to clone.
#[derive(Clone)]
pub struct Vfs(Arc<Inner>);

struct Inner {
    me: Weak<Inner>,
    config: Config,
    meta: Arc<Meta>,
    blocks: Arc<Blocks>,
    cache: Arc<Cache>,
    host: Arc<dyn Host>,
    nodes: RwLock<HashMap<Ino, Arc<Inode>>>,
    /// The last change of an inode that was forgotten since: whoever comes to know it again waits for that one too.
    past: Mutex<Mark>,
    handles: RwLock<HashMap<Fh, Arc<Handle>>>,
    next_fh: AtomicU64,
    /// When leases of inodes were recalled: answers about them that were asked for before are not kept.
    recalls: Marks,
    /// Entries remembered over all folders, and the folders that have some by the serial numbers of these, which is the order they
    /// came in.
    entries: AtomicUsize,
    folders: Mutex<BTreeMap<u64, Ino>>,
    /// Files whose writes were lost in the background.
    files_lost: AtomicU64,
    /// Files with writes that are not committed.
    dirty: Mutex<HashMap<Ino, Arc<Inode>>>,
    /// The last loss of what was written to a file that nobody had open for writing any more.
    unheard: Mutex<Option<Fault>>,
    /// Nodes that nobody may need any more.
    idle: Mutex<Vec<Ino>>,
    fragmented: Mutex<HashSet<Ino>>,
    /// What a restripe wrote again lately, so that files go on sharing it.
    moved: Mutex<restripe::Moved>,
    budget: Arc<Budget>,
    puts: Slots,
    prefetches: Slots,
    /// Inodes without a name that nobody has open, and until when they stay for who has just found them.
    departing: Mutex<VecDeque<(Instant, Arc<Inode>)>>,
    /// Threads that were told ESTALE and look again.
    again: again::Again,
    /// Given with each tick.
    tick: Signal,
    stopped: AtomicBool,
    ticker: Mutex<Option<JoinHandle<()>>>,
}

impl Vfs {
    /// Serves the volume that `meta` has a session on.
    pub fn new(config: Config, meta: Arc<Meta>, blocks: Arc<Blocks>, host: Arc<dyn Host>) -> Vfs {
        let source = Arc::new(Source(blocks.clone()));
        let cache = Cache::new(source, CacheConfig { bytes_max: config.cache_bytes });
        // What is fetched ahead must not push out what was fetched ahead before it.
        let block = u64::from(meta.info().volume.block_size.max(1));
        let ahead_max = usize::try_from(config.cache_bytes / 2 / block).unwrap_or(usize::MAX);
        let inner = Arc::new_cyclic(|me| Inner {
            me: me.clone(),
            nodes: RwLock::default(),
            past: Mutex::default(),
            handles: RwLock::default(),
            next_fh: AtomicU64::new(1),
            recalls: Marks::default(),
            entries: AtomicUsize::new(0),
            folders: Mutex::default(),
            files_lost: AtomicU64::new(0),
            dirty: Mutex::default(),
            unheard: Mutex::default(),
            idle: Mutex::default(),
            fragmented: Mutex::default(),
            moved: Mutex::default(),
            budget: Arc::new(Budget::new(config.dirty_max)),
            puts: Slots::new(config.puts_max),
            prefetches: Slots::new(config.prefetches_max.min(ahead_max)),
            departing: Mutex::default(),
            again: again::Again::default(),
            tick: Signal::default(),
            stopped: AtomicBool::new(false),
            ticker: Mutex::default(),
            config,
            meta,
            blocks,
            cache,
            host,
        });
        let vfs = Vfs(inner);
        vfs.node(Ino::ROOT).lock().refs = 1;
        let keeper: Weak<dyn Keeper> = vfs.0.me.clone();
        vfs.0.meta.set_keeper(keeper);
        vfs.start_ticking();
        vfs
    }

    /// How often what was written to a file was lost in the background. Whoever has it open hears of it; after an unmount
    /// nobody has.
    pub fn files_lost(&self) -> u64 {
        self.0.files_lost.load(Ordering::Relaxed)
    }

    /// Writes everything back and ends the session.
    pub async fn shutdown(&self) -> Result<()> {
        let synced = self.syncfs().await;
        self.0.stopped.store(true, Ordering::Release);
        let ticker = self.0.ticker.lock().take();
        if let Some(ticker) = ticker {
            ticker.thread().unpark();
        }
        let closed = self.0.meta.close().await;
        synced.and(closed)
    }

    /// Runs a change so that it is finished even if the caller goes away.
    fn finish<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Finish<T> {
        Finish::new(&self.0.meta, future)
    }

    /// Timers are looked at by a thread of their own, so that nothing here needs a runtime's clock.
    fn start_ticking(&self) {
        let (inner, every) = (self.0.me.clone(), self.0.config.tick);
        let thread = std::thread::Builder::new().name("torchfs-vfs-tick".into()).spawn(move || {
            while let Some(inner) = inner.upgrade() {
                if inner.stopped.load(Ordering::Acquire) {
                    break;
                }
                Vfs(inner).ticked();
                std::thread::park_timeout(every);
            }
        });
        match thread {
            Ok(thread) => *self.0.ticker.lock() = Some(thread),
            Err(error) => {
                tracing::error!(%error, "no thread for timers: dirty data waits for fsync or close")
            }
        }
    }

    fn ticked(&self) {
        self.0.tick.notify();
        self.let_go_due();
        self.0.again.expire();
        let after = self.0.config.commit_after;
        self.flush_dirty(|file| file.dirty_since.is_some_and(|since| since.elapsed() >= after));
        let idle = std::mem::take(&mut *self.0.idle.lock());
        let rest: Vec<Ino> = idle.into_iter().filter(|ino| !self.try_retire(*ino)).collect();
        self.0.idle.lock().extend(rest);
        self.compact_quiet();
    }
}

impl Inner {
    fn vfs(&self) -> Option<Vfs> {
        self.me.upgrade().map(Vfs)
    }
}

/// The data servers, as the cache sees them.
struct Source(Arc<Blocks>);

impl Fetch for Source {
    fn fetch(&self, block: &BlockRef, chunks: Range<u16>) -> BoxFuture<'static, Result<Vec<Bytes>>> {
        let (blocks, block) = (self.0.clone(), block.clone());
        Box::pin(async move { blocks.get(&block, chunks).await })
    }
}
