//! A cluster in one process: the real metadata service on a simulated disk, data servers that keep blocks in memory, and as
//! many mounts as a test wants.

use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use torchfs_client::{Blocks, BlocksConfig, Connector, Meta, MetaConfig};
use torchfs_disk::SimDisk;
use torchfs_engine::{Embedded, LogConfig, MemReplica};
use torchfs_meta::repair::{Asking, Listed, PieceAt, Pulled, ScrubPart, Scrubbed};
use torchfs_meta::server::Background;
use torchfs_meta::{BlockPeers, RepairPeers};
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::clock::SystemClock;
use torchfs_proto::msg::block::PullItem;
use torchfs_proto::msg::{self, block, meta};
use torchfs_proto::{BlockId, Code, Fault, Fence, IdRange, Ino, Result, Seq, SessionId};
use torchfs_rpc::{Answer, Answering, Connection, Link, Peer, Request, Role, Service};
use torchfs_vfs::{Caller, Config, Host, NoHost, Opened, Vfs, WriteFlags};

pub const WHO: Caller = Caller { uid: 0, gid: 0, pid: 1 };
pub const RDWR: i32 = 2;

/// Seeds for a test: fixed ones, or many more fresh ones.
pub fn rounds(count: u64) -> Range<u64> {
    torchfs_fuzz::seeds(1, count, count * 20)
}

/// SplitMix64: enough for picking operations.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound.max(1)
    }

    pub fn range(&mut self, size: u64, most: u64) -> Range<u64> {
        let from = self.below(size);
        from..(from + 1 + self.below(most)).min(size)
    }

    /// Mostly none, sometimes long enough to be overtaken by many.
    fn delay(&mut self) -> Duration {
        match self.below(8) {
            0 => Duration::from_micros(self.below(20_000)),
            1..4 => Duration::from_micros(self.below(2_000)),
            _ => Duration::ZERO,
        }
    }

    pub fn bytes(&mut self, len: u64) -> Bytes {
        let first = self.below(256);
        (0..len).map(|i| (first + i * 7) as u8).collect::<Vec<_>>().into()
    }
}

/// Runs a test on a runtime of its own.
pub fn run<F: Future<Output = ()>>(test: impl FnOnce(Arc<World>) -> F) {
    run_with(World::settings(), test);
}

pub fn run_with<F: Future<Output = ()>>(config: torchfs_meta::Config, test: impl FnOnce(Arc<World>) -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let world = World::new(config);
        let ended = tokio::time::timeout(Duration::from_secs(300), test(world)).await;
        assert!(ended.is_ok(), "the test hangs");
    });
    runtime.shutdown_timeout(Duration::from_secs(10));
}

pub struct World {
    service: Arc<torchfs_meta::Meta>,
    pub calls: Arc<AtomicU64>,
    /// So many commits more arrive under leases that have run out.
    pub late_commits: Arc<AtomicU64>,
    /// The service hears renewals, and its answers stay on the way while this is set.
    pub late_renewals: AtomicBool,
    /// The same for locks.
    pub late_locks: AtomicBool,
    /// So many commits more reach the service, and so many were answered.
    pub commits_left: Arc<AtomicU64>,
    pub commits: Arc<AtomicU64>,
    /// The service answers questions for extended attributes, and its answers stay on the way while this is set; how many do.
    pub late_xattrs: AtomicBool,
    pub xattrs_late: AtomicU64,
    /// The same for attributes.
    pub late_attrs: AtomicBool,
    pub attrs_late: AtomicU64,
    /// The service does not tell how far the log is durable while this is set.
    pub silent_log: AtomicBool,
    /// The same for extents, each for so many milliseconds; and how many were asked for.
    pub slow_extents: AtomicU64,
    pub extents: AtomicU64,
    /// Requests to the service and its answers overtake one another.
    pub overtaking: Mutex<Option<Rng>>,
    servers: HashMap<String, Arc<Server>>,
    _background: Background,
}

impl World {
    /// Small blocks, and leases that do not run out on a busy machine.
    pub fn settings() -> torchfs_meta::Config {
        torchfs_meta::Config {
            block_size: 256 << 10,
            lease_ms: 60_000,
            session_ms: 600_000,
            ..torchfs_meta::Config::default()
        }
    }

    fn new(config: torchfs_meta::Config) -> Arc<World> {
        let disk = SimDisk::new(1);
        let replica = MemReplica::new(&disk);
        let log = LogConfig { segment_bytes: 4 << 20, segments_min: 2, segments_max: 16 };
        let engine = torchfs_engine::Config { log, reserve_bytes: 0, ..torchfs_engine::Config::default() };
        let engine = Embedded::open_with(Arc::new(disk), Box::new(replica), engine).unwrap();
        let service =
            Arc::new(torchfs_meta::Meta::open(Arc::new(engine), Arc::new(SystemClock), config).unwrap());
        let background = Background::start(service.clone(), Arc::new(NoPeers)).unwrap();
        let servers = (1..=2).map(|i| (format!("data{i}"), Arc::default())).collect();
        Arc::new(World {
            service,
            calls: Arc::default(),
            late_commits: Arc::default(),
            late_renewals: AtomicBool::default(),
            late_locks: AtomicBool::default(),
            commits_left: Arc::new(AtomicU64::new(u64::MAX)),
            commits: Arc::default(),
            late_xattrs: AtomicBool::default(),
            xattrs_late: AtomicU64::default(),
            late_attrs: AtomicBool::default(),
            attrs_late: AtomicU64::default(),
            silent_log: AtomicBool::default(),
            slow_extents: AtomicU64::default(),
            extents: AtomicU64::default(),
            overtaking: Mutex::default(),
            servers,
            _background: background,
        })
    }

    pub async fn mount(self: &Arc<World>) -> Vfs {
        self.mount_with(Config::default(), Arc::new(NoHost)).await
    }

    pub async fn mount_with(self: &Arc<World>, config: Config, host: Arc<dyn Host>) -> Vfs {
        for (i, (addr, server)) in self.servers.iter().enumerate() {
            if server.removed.load(Ordering::Acquire) {
                continue;
            }
            let beat = meta::Heartbeat {
                store: i as u64 + 1,
                addr: addr.clone(),
                total: 1 << 40,
                free: 1 << 39,
                ..meta::Heartbeat::default()
            };
            self.admin(meta::Op::Heartbeat(beat)).await;
        }
        let connector: Arc<dyn Connector> = Arc::new(Within(self.clone()));
        let config_meta =
            MetaConfig::new(vec!["meta".into()], connector.clone(), tokio::runtime::Handle::current());
        let meta = Meta::open(config_meta).await.unwrap();
        let blocks = Blocks::new(meta.clone(), connector, BlocksConfig::default());
        Vfs::new(config, meta, blocks, host)
    }

    /// A data server that holds pieces is removed by force, and what it has is gone.
    pub async fn remove_server(&self) {
        let holds = |server: &&Arc<Server>| !server.pieces.lock().is_empty();
        let (addr, server) = self.servers.iter().find(|(_, server)| holds(server)).unwrap();
        let meta::Done::Status(status) = self.admin(meta::Op::Status).await else { panic!() };
        let id = status.servers.iter().find(|info| info.addr == *addr).unwrap().id;
        self.admin(meta::Op::RemoveServer { server: id, force: true }).await;
        server.removed.store(true, Ordering::Release);
        server.pieces.lock().clear();
    }

    /// Pieces that the data servers hold.
    pub fn pieces(&self) -> usize {
        self.servers.values().map(|server| server.pieces.lock().len()).sum()
    }

    /// From now on data servers refuse what they are given, or take it again.
    pub fn break_servers(&self, broken: bool) {
        self.servers.values().for_each(|server| server.broken.store(broken, Ordering::Release));
    }

    /// From now on data servers take their time with what they are given, or go on.
    pub fn hold_servers(&self, held: bool) {
        self.servers.values().for_each(|server| server.held.store(held, Ordering::Release));
    }

    /// Pieces that were given to data servers so far, taken or not.
    pub fn puts(&self) -> u64 {
        self.servers.values().map(|server| server.puts.load(Ordering::Acquire)).sum()
    }

    /// A request outside of sessions.
    async fn admin(&self, op: meta::Op) -> meta::Done {
        let request = meta::Request {
            session: SessionId(0),
            epoch: 0,
            seq: 0,
            step: 0,
            watermark: 0,
            fence: Fence(0),
            op,
            made: None,
        };
        self.service.handle(request).await.result.unwrap()
    }

    /// How many blocks are alive.
    pub async fn blocks(&self) -> u64 {
        let meta::Done::Status(status) = self.admin(meta::Op::Status).await else { panic!() };
        status.blocks
    }

    /// Ends all sessions.
    pub async fn evict_all(&self) {
        let meta::Done::Sessions(sessions) = self.admin(meta::Op::Sessions).await else { panic!() };
        for session in sessions {
            self.admin(meta::Op::Evict { session: session.session }).await;
        }
    }

    /// Every inconsistency that a whole check finds.
    pub async fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut cursor: torchfs_proto::attr::Raw = Vec::new().into();
        loop {
            let done = self.admin(meta::Op::Check { cursor }).await;
            let meta::Done::Checked { problems: found, cursor: next, .. } = done else {
                panic!("the check failed");
            };
            problems.extend(found);
            if next.is_empty() {
                return problems;
            }
            cursor = next;
        }
    }
}

struct Within(Arc<World>);

impl Connector for Within {
    fn link(&self, addr: &str) -> Link {
        let service: Arc<dyn Service> = match self.0.servers.get(addr) {
            Some(server) => server.clone(),
            None => Arc::new(Counted(self.0.clone())),
        };
        Link::fixed(Connection::local(service, Peer::new(addr, Role::Agent)))
    }
}

/// The metadata service, counting what it is asked on behalf of programs.
struct Counted(Arc<World>);

impl Service for Counted {
    fn call(self: Arc<Self>, peer: Peer, request: Request) -> Answering {
        let delay = || self.0.overtaking.lock().as_mut().map_or(Duration::ZERO, Rng::delay);
        let (before, after) = (delay(), delay());
        if before.is_zero() && after.is_zero() {
            return self.answer(peer, request);
        }
        Box::pin(async move {
            tokio::time::sleep(before).await;
            let answer = self.answer(peer, request).await;
            tokio::time::sleep(after).await;
            answer
        })
    }
}

impl Counted {
    fn answer(self: Arc<Self>, peer: Peer, mut request: Request) -> Answering {
        let one_less = |left: u64| left.checked_sub(1);
        if let Ok(mut asked) = msg::decode::<meta::Request>(&request.body)
            && let meta::Op::Commit(commit) = &mut asked.op
            && self.0.late_commits.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok()
        {
            commit.grant = u64::MAX;
            request.body = msg::encode(&asked).into();
        }
        let op = msg::decode::<meta::Request>(&request.body).map(|request| request.op);
        let upkeep = matches!(
            op,
            Ok(meta::Op::Renew | meta::Op::Listen { .. } | meta::Op::Ack { .. } | meta::Op::Forget { .. })
        );
        if !upkeep {
            self.0.calls.fetch_add(1, Ordering::AcqRel);
        }
        let world = self.0.clone();
        if let Ok(meta::Op::Commit(_)) = op {
            return Box::pin(async move {
                let left = &world.commits_left;
                while left.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_err() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let answer = world.service.clone().call(peer, request).await;
                world.commits.fetch_add(1, Ordering::AcqRel);
                answer
            });
        }
        let answer = world.service.clone().call(peer, request);
        Box::pin(async move {
            let mut answer = answer.await;
            if world.silent_log.load(Ordering::Acquire)
                && let Ok(heard) = &mut answer
                && let Ok(mut reply) = msg::decode::<meta::Reply>(&heard.body)
            {
                reply.durable = Seq(0);
                heard.body = msg::encode(&reply).into();
            }
            let late = match op {
                Ok(meta::Op::Renew) => &world.late_renewals,
                Ok(meta::Op::Lock { .. }) => &world.late_locks,
                Ok(meta::Op::GetAttr { .. }) => {
                    world.attrs_late.fetch_add(1, Ordering::AcqRel);
                    &world.late_attrs
                }
                Ok(meta::Op::Extents { .. }) => {
                    world.extents.fetch_add(1, Ordering::AcqRel);
                    let slow = world.slow_extents.load(Ordering::Acquire);
                    if slow > 0 {
                        tokio::time::sleep(Duration::from_millis(slow)).await;
                    }
                    return answer;
                }
                Ok(meta::Op::Xattrs { .. }) => {
                    world.xattrs_late.fetch_add(1, Ordering::AcqRel);
                    &world.late_xattrs
                }
                _ => return answer,
            };
            while late.load(Ordering::Acquire) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer
        })
    }
}

/// A kernel that notes what it was told to forget.
#[derive(Default)]
pub struct Kernel {
    pub pages: Mutex<Vec<(Ino, u64, u64)>>,
    pub entries: Mutex<Vec<(Ino, Bytes)>>,
    /// What it was told to ask for again, and to keep in the meantime.
    pub kept: Mutex<Vec<(Ino, Bytes)>>,
    /// How often all entries were made to be asked for again.
    pub expired: AtomicU64,
    /// It does not come to what it is told: a lock is in the way.
    pub locked: AtomicBool,
}

impl Host for Kernel {
    fn invalidate_data(&self, ino: Ino, offset: u64, len: u64) {
        self.pages.lock().push((ino, offset, len));
    }

    fn invalidate_attr(&self, _: Ino) {}

    fn invalidate_entry(&self, parent: Ino, name: &[u8]) {
        self.entries.lock().push((parent, Bytes::copy_from_slice(name)));
    }

    fn expire_entry(&self, parent: Ino, name: &[u8]) {
        self.kept.lock().push((parent, Bytes::copy_from_slice(name)));
    }

    fn expire_entries(&self, _: Ino) -> bool {
        self.expired.fetch_add(1, Ordering::AcqRel);
        true
    }

    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self.locked.load(Ordering::Acquire) {
            true => Box::pin(std::future::pending()),
            false => Box::pin(std::future::ready(())),
        }
    }
}

type Pieces = HashMap<(BlockId, u8), (Vec<ChunkInfo>, Bytes)>;

/// A data server that keeps pieces in memory.
#[derive(Default)]
struct Server {
    pieces: Mutex<Pieces>,
    broken: AtomicBool,
    held: AtomicBool,
    puts: AtomicU64,
    removed: AtomicBool,
}

impl Service for Server {
    fn call(self: Arc<Self>, _peer: Peer, request: Request) -> Answering {
        Box::pin(async move {
            let asked: block::Request = msg::decode(&request.body)?;
            match asked.op {
                block::Op::Put { block, piece, chunks, .. } => {
                    self.puts.fetch_add(1, Ordering::AcqRel);
                    while self.held.load(Ordering::Acquire) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    if self.broken.load(Ordering::Acquire) {
                        return Err(Fault::new(Code::NoSpace, "the disk is full"));
                    }
                    let bytes = Bytes::copy_from_slice(&request.payload);
                    self.pieces.lock().insert((block, piece), (chunks, bytes));
                    Ok(Answer::new(msg::encode(&block::Reply::Done)))
                }
                block::Op::Get { block, piece, first, count } => {
                    let found = self.pieces.lock().get(&(block, piece)).cloned();
                    let (infos, bytes) = found.ok_or_else(|| Fault::from(Code::Gone))?;
                    let (from, to) = (usize::from(first), usize::from(first) + usize::from(count));
                    let at: usize = infos[..from].iter().map(|info| info.stored as usize).sum();
                    let len: usize = infos[from..to].iter().map(|info| info.stored as usize).sum();
                    let reply = block::Reply::Chunks { chunks: infos[from..to].to_vec() };
                    Ok(Answer::new(msg::encode(&reply)).payload(bytes.slice(at..at + len)).carries_sums())
                }
                _ => Err(Code::Unsupported.into()),
            }
        })
    }
}

struct NoPeers;

type Answered<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

impl BlockPeers for NoPeers {
    fn delete<'a>(&'a self, _: &'a str, _: Vec<BlockId>) -> Answered<'a> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn purge<'a>(&'a self, _: &'a str, _: IdRange, _: Vec<BlockId>) -> Answered<'a> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Nothing is ever missing from these servers.
impl RepairPeers for NoPeers {
    fn missing<'a>(&'a self, _: &'a str, _: Vec<PieceAt>) -> Asking<'a, Vec<PieceAt>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn pull<'a>(&'a self, _: &'a str, _: Vec<PullItem>, _: u64, _: Duration) -> Asking<'a, Pulled> {
        Box::pin(std::future::ready(Ok(Pulled::default())))
    }

    fn forget<'a>(&'a self, _: &'a str, _: Vec<PieceAt>) -> Asking<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn list<'a>(&'a self, _: &'a str, _: Option<PieceAt>, _: u32) -> Asking<'a, Listed> {
        Box::pin(std::future::ready(Ok((Vec::new(), true))))
    }

    fn scrub<'a>(&'a self, _: &'a str, _: ScrubPart, _: Duration) -> Asking<'a, Scrubbed> {
        Box::pin(std::future::ready(Ok(Scrubbed::default())))
    }
}

/// Waits for a condition, however long it takes a busy machine.
pub async fn until<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    for _ in 0..6000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the condition did not come true");
}

/// Makes and opens a file in the root folder.
pub async fn create(vfs: &Vfs, name: &str) -> (Ino, Opened) {
    let (node, opened) = vfs.create(WHO, Ino::ROOT, name.as_bytes(), 0o644, RDWR).await.unwrap();
    (node.attr.ino, opened)
}

pub async fn find(vfs: &Vfs, parent: Ino, name: &str) -> Option<Ino> {
    vfs.lookup(WHO, parent, name.as_bytes()).await.unwrap().node.map(|node| node.attr.ino)
}

pub async fn write(vfs: &Vfs, ino: Ino, fh: u64, offset: u64, data: impl Into<Bytes>) {
    let data = data.into();
    let len = data.len() as u32;
    assert_eq!(vfs.write(ino, fh, offset, data, WriteFlags::default()).await, Ok(len));
}

pub async fn append(vfs: &Vfs, ino: Ino, fh: u64, data: impl Into<Bytes>) {
    let flags = WriteFlags { append: true, ..WriteFlags::default() };
    vfs.write(ino, fh, 0, data.into(), flags).await.unwrap();
}

pub async fn read(vfs: &Vfs, ino: Ino, fh: u64, offset: u64, len: u64) -> Vec<u8> {
    vfs.read(ino, fh, offset, len as u32, 0).await.unwrap().concat()
}

/// Opens, reads and closes a whole file.
pub async fn content(vfs: &Vfs, ino: Ino) -> Vec<u8> {
    let opened = vfs.open(ino, 0).await.unwrap();
    let bytes = read(vfs, ino, opened.fh, 0, 64 << 20).await;
    close(vfs, ino, opened.fh).await;
    bytes
}

pub async fn close(vfs: &Vfs, ino: Ino, fh: u64) {
    vfs.flush(ino, fh, 0).await.unwrap();
    vfs.release(ino, fh, None).await;
}

pub async fn names(vfs: &Vfs, ino: Ino, want: usize) -> Vec<String> {
    let opened = vfs.opendir(ino).await.unwrap();
    let mut names = Vec::new();
    let mut cookie = 0;
    loop {
        let items = vfs.readdir(ino, opened.fh, cookie, want, true).await.unwrap();
        let Some(last) = items.last() else { break };
        cookie = last.cookie;
        names.extend(items.iter().map(|item| String::from_utf8_lossy(&item.name).into_owned()));
    }
    vfs.releasedir(opened.fh).await;
    names
}
