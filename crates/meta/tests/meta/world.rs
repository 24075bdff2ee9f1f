//! One service whose clock, disk and waiting the test owns: a request is polled by hand, so nothing depends on timing.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_disk::SimDisk;
use torchfs_engine::{Embedded, Engine, LogConfig, MemReplica};
use torchfs_meta::{BlockPeers, Config, Meta};
use torchfs_proto::attr::{Attr, Kind};
use torchfs_proto::clock::Clock;
use torchfs_proto::msg::meta::{Done, Event, Heartbeat, Make, Op, OpenSession, Reply, Request};
use torchfs_proto::{Code, Fault, Fence, IdRange, Ino, SessionId};

/// A clock that stands still until it is moved.
pub struct ManualClock {
    start: Instant,
    passed: Mutex<Duration>,
}

impl ManualClock {
    fn new() -> ManualClock {
        ManualClock { start: Instant::now(), passed: Mutex::new(Duration::ZERO) }
    }

    pub fn advance_ms(&self, ms: u64) {
        *self.passed.lock() += Duration::from_millis(ms);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + *self.passed.lock()
    }

    fn wall_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.passed.lock().as_nanos() as i64
    }
}

/// The service with what lies below it.
pub struct World {
    pub disk: SimDisk,
    pub replica: MemReplica,
    pub engine: Arc<Embedded>,
    pub clock: Arc<ManualClock>,
    pub config: Config,
    pub meta: Arc<Meta>,
}

fn open_engine(disk: &SimDisk, replica: &MemReplica) -> Arc<Embedded> {
    let config = torchfs_engine::Config {
        log: LogConfig { segment_bytes: 4 << 20, segments_min: 2, segments_max: 8 },
        threads: false,
        reserve_bytes: 1 << 20,
        ..torchfs_engine::Config::default()
    };
    Arc::new(Embedded::open_with(Arc::new(disk.clone()), Box::new(replica.clone()), config).unwrap())
}

impl World {
    pub fn new() -> World {
        World::with(Config::default())
    }

    pub fn with(config: Config) -> World {
        let disk = SimDisk::new(1);
        let replica = MemReplica::new(&disk);
        let engine = open_engine(&disk, &replica);
        let clock = Arc::new(ManualClock::new());
        let meta = Arc::new(Meta::open(engine.clone(), clock.clone(), config.clone()).unwrap());
        World { disk, replica, engine, clock, config, meta }
    }

    /// Everything is durable, then the service dies and starts again.
    pub fn restart(self) -> World {
        self.sync();
        self.power_cut(1)
    }

    /// The power goes: what was not durable is lost.
    pub fn power_cut(self, seed: u64) -> World {
        let World { disk, replica, engine, clock, config, meta } = self;
        drop(meta);
        drop(engine);
        let disk = disk.power_cut(seed);
        let replica = replica.after(&disk);
        let engine = open_engine(&disk, &replica);
        let meta = Arc::new(Meta::open(engine.clone(), clock.clone(), config.clone()).unwrap());
        World { disk, replica, engine, clock, config, meta }
    }

    /// Makes durable what is ordered.
    pub fn sync(&self) {
        self.engine.wait_durable(self.engine.ordered(), Duration::from_secs(60)).unwrap();
    }

    /// Passes of the deleter with everything durable, until there is nothing to do at this moment.
    pub fn collect(&self, peers: &dyn BlockPeers) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        loop {
            self.sync();
            if runtime.block_on(self.meta.collect(peers)) == 0 {
                return;
            }
        }
    }

    /// Time passes and the upkeep comes by.
    pub fn advance_ms(&self, ms: u64) {
        // In steps: a clock that jumps looks like a process that stood still.
        let step = u64::from(self.config.tick_ms.max(1)) * 2;
        for at in (0..ms).step_by(step as usize) {
            self.clock.advance_ms(step.min(ms - at));
            self.meta.tick();
        }
    }

    /// Time passes while the service stands still.
    pub fn stand_still_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
        self.meta.tick();
    }

    /// A request that may have to wait.
    pub fn start(&self, request: Request) -> Pending {
        let meta = self.meta.clone();
        Pending { future: Some(Box::pin(async move { meta.handle(request).await })), reply: None }
    }

    /// A request outside of sessions; makes the log durable if the answer waits for that.
    pub fn admin(&self, op: Op) -> Done {
        self.ask(op).settle(self).result.unwrap()
    }

    /// The same, as far as it comes by itself.
    pub fn ask(&self, op: Op) -> Pending {
        let mut nobody = Client { id: SessionId(0), epoch: 0, seq: 0, watermark: 0 };
        nobody.start(self, op)
    }

    /// The code with which a request outside of sessions is refused.
    pub fn refused(&self, op: Op) -> Code {
        let mut nobody = Client { id: SessionId(0), epoch: 0, seq: 0, watermark: 0 };
        nobody.refused(self, op)
    }

    pub fn client(&self) -> Client {
        let Done::Session(info) = self.admin(Op::OpenSession(OpenSession::default())) else { panic!() };
        Client { id: info.session, epoch: info.epoch, seq: 0, watermark: 0 }
    }

    /// A data server joins.
    pub fn server(&self, store: u64) {
        let beat = Heartbeat {
            store,
            addr: format!("127.0.0.1:{store}"),
            total: 1 << 40,
            free: 1 << 39,
            ..Heartbeat::default()
        };
        self.admin(Op::Heartbeat(beat));
    }

    /// Every problem that a whole check finds.
    pub fn problems(&self) -> Vec<String> {
        while self.meta.run_chores(1_000) > 0 {}
        let mut problems = Vec::new();
        let mut cursor = Vec::new().into();
        loop {
            let Done::Checked { problems: found, cursor: next, .. } = self.admin(Op::Check { cursor }) else {
                panic!()
            };
            problems.extend(found);
            if next.is_empty() {
                return problems;
            }
            cursor = next;
        }
    }
}

/// A request on its way.
pub struct Pending {
    future: Option<Pin<Box<dyn Future<Output = Reply> + Send>>>,
    reply: Option<Reply>,
}

impl Pending {
    /// Whether the answer is there now.
    pub fn is_ready(&mut self) -> bool {
        if let Some(future) = &mut self.future
            && let Poll::Ready(reply) = future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            self.reply = Some(reply);
            self.future = None;
        }
        self.reply.is_some()
    }

    /// The answer, which waits for nothing but the disk.
    pub fn settle(mut self, world: &World) -> Reply {
        if !self.is_ready() {
            world.sync();
        }
        self.ready()
    }

    /// The answer, which must be there.
    pub fn ready(mut self) -> Reply {
        assert!(self.is_ready(), "the request waits");
        self.reply.unwrap()
    }
}

/// One session as its client has it.
#[derive(Clone)]
pub struct Client {
    pub id: SessionId,
    pub epoch: u32,
    pub seq: u64,
    pub watermark: u64,
}

impl Client {
    /// An envelope; mutating operations get the next sequence.
    pub fn request(&mut self, op: Op) -> Request {
        let mutates = matches!(
            op,
            Op::GrantIds { .. }
                | Op::SetAttr { .. }
                | Op::SetPolicy { .. }
                | Op::Make(_)
                | Op::Link { .. }
                | Op::Unlink { .. }
                | Op::Rmdir { .. }
                | Op::Rename { .. }
                | Op::SetXattr { .. }
                | Op::RemoveXattr { .. }
                | Op::Commit(_)
                | Op::CopyRange { .. }
                | Op::Lock { .. }
                | Op::Release { .. }
        );
        if mutates {
            self.seq += 1;
        }
        let seq = if mutates { self.seq } else { 0 };
        Request {
            session: self.id,
            epoch: self.epoch,
            seq,
            step: 0,
            watermark: self.watermark,
            fence: Fence(0),
            op,
            made: None,
        }
    }

    pub fn start(&mut self, world: &World, op: Op) -> Pending {
        world.start(self.request(op))
    }

    /// The whole reply; makes the log durable if the answer waits for that.
    pub fn reply(&mut self, world: &World, op: Op) -> Reply {
        self.start(world, op).settle(world)
    }

    pub fn call(&mut self, world: &World, op: Op) -> Result<Done, Fault> {
        self.reply(world, op).result
    }

    /// The code of a refusal.
    pub fn refused(&mut self, world: &World, op: Op) -> Code {
        self.call(world, op).expect_err("the request should be refused").code
    }

    pub fn lookup(&mut self, world: &World, parent: Ino, name: &str) -> Option<Attr> {
        match self.call(world, Op::Lookup { parent, name: raw(name) }).unwrap() {
            Done::Entry(entry) => entry,
            other => panic!("{other:?}"),
        }
    }

    pub fn getattr(&mut self, world: &World, ino: Ino) -> Attr {
        match self.call(world, Op::GetAttr { ino }).unwrap() {
            Done::Attr(attr) => attr,
            other => panic!("{other:?}"),
        }
    }

    pub fn try_make(&mut self, world: &World, parent: Ino, name: &str, kind: Kind) -> Result<Attr, Fault> {
        let make = Make {
            parent,
            name: raw(name),
            kind,
            mode: 0o755,
            uid: 10,
            gid: 20,
            rdev: 0,
            target: if kind == Kind::Symlink { raw("target") } else { raw("") },
            exclusive: true,
            open: false,
        };
        match self.call(world, Op::Make(make))? {
            Done::Made { attr, .. } => Ok(attr),
            other => panic!("{other:?}"),
        }
    }

    pub fn make(&mut self, world: &World, parent: Ino, name: &str, kind: Kind) -> Attr {
        self.try_make(world, parent, name, kind).unwrap()
    }

    pub fn file(&mut self, world: &World, name: &str) -> Ino {
        self.make(world, Ino::ROOT, name, Kind::File).ino
    }

    pub fn dir(&mut self, world: &World, name: &str) -> Ino {
        self.make(world, Ino::ROOT, name, Kind::Dir).ino
    }

    pub fn unlink(&mut self, world: &World, parent: Ino, name: &str) -> Result<(Attr, bool), Fault> {
        match self.call(world, Op::Unlink { parent, name: raw(name), idle: None })? {
            Done::Removed { attr, held } => Ok((attr, held)),
            other => panic!("{other:?}"),
        }
    }

    pub fn rmdir(&mut self, world: &World, parent: Ino, name: &str) -> Result<(), Fault> {
        self.call(world, Op::Rmdir { parent, name: raw(name) }).map(|_| ())
    }

    pub fn rename(
        &mut self,
        world: &World,
        (parent, name): (Ino, &str),
        (new_parent, new_name): (Ino, &str),
        flags: u32,
    ) -> Result<(), Fault> {
        let op = Op::Rename { parent, name: raw(name), new_parent, new_name: raw(new_name), flags };
        self.call(world, op).map(|_| ())
    }

    pub fn names(&mut self, world: &World, ino: Ino) -> Vec<String> {
        let mut names = Vec::new();
        let mut cookie = 0;
        loop {
            let done = self.call(world, Op::ReadDir { ino, cookie, limit: 3, plus: false }).unwrap();
            let Done::Entries { entries, end } = done else { panic!() };
            for entry in entries {
                assert!(entry.cookie > cookie);
                cookie = entry.cookie;
                names.push(String::from_utf8(entry.name.to_vec()).unwrap());
            }
            if end {
                return names;
            }
        }
    }

    pub fn ids(&mut self, world: &World, count: u32) -> IdRange {
        match self.call(world, Op::GrantIds { count }).unwrap() {
            Done::Ids(ids) => ids,
            other => panic!("{other:?}"),
        }
    }

    /// The right to write, and its number.
    pub fn open_write(&mut self, world: &World, ino: Ino) -> u64 {
        let reply = self.reply(world, Op::OpenData { ino, write: true });
        reply.result.unwrap();
        reply.grants.iter().find(|grant| grant.bits & 24 != 0).expect("a right to write").number
    }

    pub fn events(&mut self, world: &World, seen: u64) -> Vec<(u64, Event)> {
        match self.call(world, Op::Listen { seen, wait_ms: 0 }).unwrap() {
            Done::Events(events) => events,
            other => panic!("{other:?}"),
        }
    }

    /// Takes and acknowledges all recalls, as one who writes or not.
    pub fn obey(&mut self, world: &World, writing: bool) -> Vec<Event> {
        let events = self.events(world, 0);
        let acks = events.iter().filter(|(_, event)| matches!(event, Event::Recall { .. }));
        let acks: Vec<(u64, bool)> = acks.map(|(number, _)| (*number, writing)).collect();
        self.call(world, Op::Ack { events: acks }).unwrap();
        let last = events.last().map_or(0, |(number, _)| *number);
        self.events(world, last);
        events.into_iter().map(|(_, event)| event).collect()
    }

    pub fn renew(&mut self, world: &World) {
        self.call(world, Op::Renew).unwrap();
    }
}

pub fn raw(text: &str) -> torchfs_proto::attr::Raw {
    text.as_bytes().to_vec().into()
}
