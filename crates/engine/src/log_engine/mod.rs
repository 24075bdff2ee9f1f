//! The engine over a log: a queue, an overlay in memory, LMDB behind it. Where the log is kept is a seam ([`Log`]); this is
//! the same for all of them.
//!
//! A batch is encoded by its caller, gets its number and goes into the overlay and the queue under one short lock. The
//! thread `torchfs-log` writes queued batches in groups, one sync each. The thread `torchfs-chores` writes
//! checkpoints: the overlay goes into the replica in one durable transaction, then log segments are used again.
//!
//! # Invariants
//! - Locks are taken in the order front, queue; nothing is written to disk under either.
//! - Whatever was ordered fits into the log without using a segment again; so a checkpoint can always wait for its
//!   batches to become durable, and the log never waits for a checkpoint that waits for the log.
//! - The overlay and the queue are bounded: `order` waits, for a bounded time, then fails.
//!
//! # Not here
//! - Formats: `log::format` and docs/disk.md.

mod checkpoint;
mod commit;
mod scan;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use torchfs_proto::disk::Disk;
use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use self::checkpoint::Chores;
use self::commit::{Group, Queue};
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::log::format::{Record, Writer};
use crate::log::{Log, LogConfig};
use crate::overlay::Overlay;
use crate::replica::{LmdbConfig, Replica};
use crate::{Engine, EngineSpace, Floor, OnDurable, OnLead, Peer, Stats, Visit, metrics};

/// How the engine behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// Whose metadata it must be. `None` takes what is there, and draws an id for a new folder.
    pub cluster: Option<ClusterId>,
    /// What this opening begins above: for an engine that is filled from a dump.
    pub floor: Option<Floor>,
    /// The log's files.
    pub log: LogConfig,
    /// The replica.
    pub lmdb: LmdbConfig,
    /// How long batches that nobody waits for may gather before they share a sync.
    pub linger: Duration,
    /// A group is written at once when it has this many bytes.
    pub group_bytes: usize,
    /// How many bytes may be ordered and not yet written.
    pub queue_bytes: usize,
    /// How many bytes the overlay may take.
    pub overlay_bytes: usize,
    /// A checkpoint is written when the overlay has this many bytes,
    pub checkpoint_bytes: usize,
    /// or this many keys,
    pub checkpoint_keys: usize,
    /// or after this time.
    pub checkpoint_interval: Duration,
    /// Space that only batches that free space may use; on small disks at most a sixteenth of the whole.
    pub reserve_bytes: u64,
    /// How old the known amount of free space may be.
    pub space_interval: Duration,
    /// How long `order` waits for room before it fails.
    pub stall_timeout: Duration,
    /// Whether threads of its own write the log and checkpoints. Without them everything happens in the calls
    /// `wait_durable`, `checkpoint`, and `order` when it finds no room: for tests that repeat every step.
    pub threads: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            cluster: None,
            floor: None,
            log: LogConfig::default(),
            lmdb: LmdbConfig::default(),
            linger: Duration::from_millis(5),
            group_bytes: 1 << 20,
            queue_bytes: 16 << 20,
            overlay_bytes: 128 << 20,
            checkpoint_bytes: 48 << 20,
            checkpoint_keys: 100_000,
            checkpoint_interval: Duration::from_secs(10),
            reserve_bytes: 64 << 20,
            space_interval: Duration::from_millis(250),
            stall_timeout: Duration::from_secs(60),
            threads: true,
        }
    }
}

/// An engine over a log. Dropping it makes all ordered batches durable if the log still can and it has threads.
pub struct LogEngine {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

/// Everything the threads share.
struct Inner {
    config: Config,
    // Dropped in this order: the disk, and with it the lock on the folder, goes last.
    replica: Box<dyn Replica>,
    log: Box<dyn Log>,
    disk: Arc<dyn Disk>,
    writer: Writer,
    front: RwLock<Front>,
    queue: Queue,
    group: Mutex<Group>,
    durable: Durable,
    chores: Chores,
    /// Signalled when a waiting `order` may find room.
    room: (Mutex<()>, Condvar),
    space: Mutex<KnownSpace>,
    ordered: AtomicU64,
    applied: AtomicU64,
    syncs: AtomicU64,
    synced_batches: AtomicU64,
    checkpoints: AtomicU64,
}

/// What a batch changes when it is ordered.
struct Front {
    overlay: Overlay,
    next: Seq,
}

/// How far the log is durable, and whether it failed for good.
struct Durable {
    seq: AtomicU64,
    failed: AtomicBool,
    what: Mutex<Option<Failure>>,
    changed: Condvar,
    tell: RwLock<Vec<Arc<OnDurable>>>,
    lead: RwLock<Vec<Arc<OnLead>>>,
    /// Somebody was told that leadership is in doubt.
    doubted: AtomicBool,
}

/// Why nothing becomes durable any more.
#[derive(Clone)]
enum Failure {
    /// The log failed.
    Failed(String),
    /// Another one leads.
    Deposed(String),
}

#[derive(Default)]
struct KnownSpace {
    at: Option<Instant>,
    space: EngineSpace,
}

/// A dirty key may cost the replica a page of its own.
const PAGE_PER_KEY: u64 = 4096;

/// What an engine is started with.
pub(crate) struct Parts {
    pub config: Config,
    pub disk: Arc<dyn Disk>,
    pub replica: Box<dyn Replica>,
    pub log: Box<dyn Log>,
    pub writer: Writer,
    /// What the log has and the replica has not.
    pub overlay: Overlay,
    /// The last batch in the replica,
    pub applied: Seq,
    /// and in the log.
    pub last: Seq,
}

impl LogEngine {
    /// Begins to take batches.
    pub(crate) fn start(parts: Parts) -> Result<LogEngine> {
        let Parts { config, disk, replica, log, writer, overlay, applied, last } = parts;
        let threads = config.threads;
        let inner = Arc::new(Inner {
            config,
            disk,
            log,
            replica,
            writer,
            front: RwLock::new(Front { overlay, next: Seq(last.0 + 1) }),
            queue: Queue::default(),
            group: Mutex::default(),
            durable: Durable {
                seq: AtomicU64::new(last.0),
                failed: AtomicBool::new(false),
                what: Mutex::new(None),
                changed: Condvar::new(),
                tell: RwLock::default(),
                lead: RwLock::default(),
                doubted: AtomicBool::new(false),
            },
            chores: Chores::default(),
            room: Default::default(),
            space: Mutex::default(),
            ordered: AtomicU64::new(last.0),
            applied: AtomicU64::new(applied.0),
            syncs: AtomicU64::new(0),
            synced_batches: AtomicU64::new(0),
            checkpoints: AtomicU64::new(0),
        });
        let mut engine = LogEngine { inner, threads: Vec::new() };
        engine.inner.maintain_log()?;
        if threads {
            for (name, run) in
                [("torchfs-log", Inner::run_log as fn(&Inner)), ("torchfs-chores", Inner::run_chores)]
            {
                let inner = engine.inner.clone();
                let thread = std::thread::Builder::new()
                    .name(name.into())
                    .spawn(move || run(&inner))
                    .map_err(Error::io(format!("cannot start the thread {name}")))?;
                engine.threads.push(thread);
            }
        }
        Ok(engine)
    }

    /// Brings everything ordered so far into the replica and returns the last batch in it.
    pub fn checkpoint(&self) -> Result<Seq> {
        self.inner.checkpoint()
    }
}

impl Drop for LogEngine {
    fn drop(&mut self) {
        self.inner.queue.stop();
        self.inner.chores.stop();
        self.inner.log.interrupt();
        for thread in self.threads.drain(..) {
            // A panic in it was already printed; there is nobody left to tell.
            let _ = thread.join();
        }
        self.inner.log.close();
    }
}

impl Engine for LogEngine {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        if let Some(found) = self.inner.front.read().overlay.find(key) {
            return Ok(found.map(<[u8]>::to_vec));
        }
        self.inner.replica.get(key)
    }

    fn scan(&self, from: &[u8], to: &[u8], reverse: bool, visit: &mut Visit<'_>) -> Result<()> {
        self.inner.scan(from, to, reverse, visit)
    }

    fn order(&self, batch: Batch) -> Result<Seq> {
        let inner = &*self.inner;
        let body = batch.encode()?;
        let max = inner.log.body_max();
        if body.len() > max {
            return Err(Error::TooLarge { what: "a batch", len: body.len(), max });
        }
        let mut record = Record::new(Seq(0), &batch, body);
        let mut front = loop {
            inner.wait_for_room(&record)?;
            let front = inner.front.write();
            // Others may have been faster: only what is found under the lock counts.
            if inner.fits_log(&record) {
                break front;
            }
        };
        inner.durable.check()?;
        let seq = front.next;
        front.next = Seq(seq.0 + 1);
        front.overlay.apply(batch.changes);
        let (keys, bytes) = front.overlay.waiting();
        record.seq = seq;
        inner.queue.push(record, inner.config.group_bytes);
        inner.ordered.store(seq.0, Ordering::Release);
        drop(front);
        if keys >= inner.config.checkpoint_keys || bytes >= inner.config.checkpoint_bytes {
            inner.chores.want_checkpoint();
        }
        Ok(seq)
    }

    fn ordered(&self) -> Seq {
        Seq(self.inner.ordered.load(Ordering::Acquire))
    }

    fn durable(&self) -> Seq {
        self.inner.durable.seq()
    }

    fn hurry(&self, seq: Seq) {
        self.inner.queue.hurry(seq);
    }

    fn wait_durable(&self, seq: Seq, timeout: Duration) -> Result<()> {
        self.inner.wait_durable(seq, timeout)
    }

    fn on_durable(&self, tell: OnDurable) {
        self.inner.durable.tell.write().push(Arc::new(tell));
    }

    fn leads(&self) -> bool {
        let leads = self.inner.log.leads();
        if !leads {
            self.inner.durable.doubted.store(true, Ordering::Release);
        }
        leads
    }

    fn on_lead(&self, tell: OnLead) {
        self.inner.durable.lead.write().push(Arc::new(tell));
    }

    fn snapshot(&self, visit: &mut Visit<'_>) -> Result<Seq> {
        self.inner.checkpoint()?;
        let view = self.inner.replica.view()?;
        view.scan(std::ops::Bound::Unbounded, std::ops::Bound::Unbounded, false, visit)?;
        view.applied()
    }

    fn fence(&self) -> Fence {
        self.inner.writer.fence
    }

    fn incarnation(&self) -> Incarnation {
        self.inner.writer.incarnation
    }

    fn cluster(&self) -> ClusterId {
        self.inner.writer.cluster
    }

    fn space(&self) -> Result<EngineSpace> {
        self.inner.look_at_space(Duration::ZERO)
    }

    fn stats(&self) -> Stats {
        let inner = &*self.inner;
        let (overlay_keys, overlay_bytes) = {
            let front = inner.front.read();
            (front.overlay.keys() as u64, front.overlay.bytes() as u64)
        };
        let room = inner.replica.room().unwrap_or_default();
        Stats {
            ordered: self.ordered(),
            durable: self.durable(),
            applied: Seq(inner.applied.load(Ordering::Acquire)),
            overlay_keys,
            overlay_bytes,
            log_bytes: inner.log.bytes(),
            replica_bytes: room.bytes,
            replica_keys: room.keys,
            syncs: inner.syncs.load(Ordering::Relaxed),
            synced_batches: inner.synced_batches.load(Ordering::Relaxed),
            checkpoints: inner.checkpoints.load(Ordering::Relaxed),
            state_bytes: inner.log.state_bytes(),
        }
    }

    fn peers(&self) -> Vec<Peer> {
        self.inner.log.peers()
    }
}

impl Inner {
    /// Waits until the batch fits into the queue, the overlay and the log, and keeps to the reserve.
    fn wait_for_room(&self, record: &Record) -> Result<()> {
        if !self.is_busy(record)? {
            return Ok(());
        }
        let started = Instant::now();
        let deadline = started + self.config.stall_timeout;
        let mut tried = false;
        loop {
            self.durable.check()?;
            if !self.is_busy(record)? {
                metrics::stalled(started.elapsed());
                return Ok(());
            }
            if self.config.threads {
                if Instant::now() >= deadline {
                    return Err(Error::Stalled { timeout: self.config.stall_timeout });
                }
                self.queue.hurry(Seq(u64::MAX));
                self.chores.want_checkpoint();
                let mut guard = self.room.0.lock();
                self.room.1.wait_for(&mut guard, Duration::from_millis(20));
                continue;
            }
            // Without threads one checkpoint makes all the room there is.
            if std::mem::replace(&mut tried, true) {
                return Err(Error::Stalled { timeout: Duration::ZERO });
            }
            match self.checkpoint() {
                Err(e) if e.is_space() => return Err(self.no_space()?),
                done => drop(done?),
            }
        }
    }

    /// Whether the batch has to wait: the queue, the overlay or the log is full, or the overlay must go into the replica
    /// first, while its space is sure.
    fn is_busy(&self, record: &Record) -> Result<bool> {
        self.durable.check()?;
        if !self.config.threads && self.chores.replica_is_full() {
            // Nobody else tries again; that it still lacks space shows in the flag.
            let _ = self.checkpoint();
        }
        let (overlay_bytes, dirty_keys) = {
            let front = self.front.read();
            (front.overlay.bytes(), front.overlay.keys() as u64)
        };
        let full = self.queue.bytes().0 > self.config.queue_bytes
            || overlay_bytes > self.config.overlay_bytes
            || !self.fits_log(record);
        if full && self.chores.replica_is_full() {
            // No checkpoint can make room: waiting would be in vain.
            return Err(self.no_space()?);
        }
        if full || record.frees {
            return Ok(full);
        }
        let space = self.look_at_space(self.config.space_interval)?;
        if space.free < space.reserve || self.chores.replica_is_full() {
            let space = self.look_at_space(Duration::ZERO)?;
            if space.free < space.reserve || self.chores.replica_is_full() {
                self.chores.want_checkpoint();
                return Err(Error::NoSpace { free: space.free, reserve: space.reserve });
            }
        }
        // What is in the overlay still has to find its place, in the worst case a page per key.
        Ok(dirty_keys > 0 && space.free < space.reserve + dirty_keys * PAGE_PER_KEY)
    }

    /// Whether the log takes this record beside everything queued without using a segment again.
    fn fits_log(&self, record: &Record) -> bool {
        let (queued, longest) = self.queue.bytes();
        let bytes = queued + record.stored_len();
        self.log.fits(bytes, longest.max(record.stored_len()), bytes / self.config.group_bytes.max(1) + 3)
    }

    fn no_space(&self) -> Result<Error> {
        let space = self.look_at_space(Duration::ZERO)?;
        Ok(Error::NoSpace { free: space.free, reserve: space.reserve })
    }

    /// The free space, no older than this.
    fn look_at_space(&self, age: Duration) -> Result<EngineSpace> {
        let mut known = self.space.lock();
        if known.at.is_none_or(|at| at.elapsed() >= age) {
            let disk = self.disk.space().map_err(Error::io("cannot ask for free space"))?;
            let room = self.replica.room()?;
            known.space = EngineSpace {
                total: disk.total,
                free: disk.free.min(room.headroom).saturating_add(room.reusable),
                reserve: self.config.reserve_bytes.min(disk.total / 16),
            };
            known.at = Some(Instant::now());
        }
        Ok(known.space)
    }

    /// Lets waiting `order` calls look again.
    fn tell_room(&self) {
        let _guard = self.room.0.lock();
        self.room.1.notify_all();
    }
}
