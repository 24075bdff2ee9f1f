//! Data servers of a test: sets of pieces that can die, be cut off, forget and lie about nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use torchfs_meta::BlockPeers;
use torchfs_meta::repair::{Asking, Listed, PieceAt, Pulled, RepairPeers, ScrubPart, Scrubbed};
use torchfs_proto::attr::Kind;
use torchfs_proto::extent::{NewBlock, RangeOp, Source};
use torchfs_proto::layout::{Layout, Placement, ServerInfo};
use torchfs_proto::msg::block::{PieceInfo, PullItem};
use torchfs_proto::msg::meta::{Commit, Done, Heartbeat, Op, RepairReport};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Ino, LayoutId, Result, ServerId};

use crate::world::{Client, World};

/// Where the server with this number listens; its store has the same number.
pub fn addr(server: u32) -> String {
    format!("127.0.0.1:{server}")
}

#[derive(Default)]
pub struct Servers {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    stores: BTreeMap<String, Store>,
    /// What pulls were told about their rate.
    rates: BTreeSet<u64>,
    pulled: u64,
    scrubbed: u64,
    /// The next pull waits until it is asked for once more.
    slow_pull: bool,
}

#[derive(Default)]
struct Store {
    dead: bool,
    /// The next removal happens, but its answer is lost.
    loses_answer: bool,
    /// So many pieces fit; 0: as many as there are.
    room: usize,
    pieces: BTreeSet<PieceAt>,
    rotten: BTreeSet<PieceAt>,
}

impl Inner {
    fn up(&mut self, addr: &str) -> Result<&mut Store> {
        match self.stores.get_mut(addr) {
            Some(store) if !store.dead => Ok(store),
            _ => Err(Fault::new(Code::Unreachable, format!("{addr} is gone"))),
        }
    }

    fn can_pull(&self, item: &PullItem) -> bool {
        let has = |(piece, addr): &(u8, String)| {
            let at = (item.block, *piece);
            self.stores
                .get(addr)
                .is_some_and(|s| !s.dead && s.pieces.contains(&at) && !s.rotten.contains(&at))
        };
        let found: BTreeSet<u8> = item.sources.iter().filter(|s| has(s)).map(|(piece, _)| *piece).collect();
        found.contains(&item.piece) || found.len() >= item.scheme.needed(item.block_len)
    }
}

impl Servers {
    /// This many servers join; their zones are empty.
    pub fn join(world: &World, count: u32) -> Servers {
        let servers = Servers::default();
        for server in 1..=count {
            servers.add(world, server, "");
        }
        // Nothing is stored yet: groups are evened out at once.
        (0..4).for_each(|_| servers.advance_ms(world, 1_000));
        servers
    }

    /// One more joins.
    pub fn add(&self, world: &World, server: u32, zone: &str) {
        self.inner.lock().stores.insert(addr(server), Store::default());
        self.beat(world, server, zone);
    }

    /// A heartbeat.
    pub fn beat(&self, world: &World, server: u32, zone: &str) -> Done {
        let pieces = self.inner.lock().stores[&addr(server)].pieces.len() as u64;
        world.admin(Op::Heartbeat(Heartbeat {
            store: u64::from(server),
            addr: addr(server),
            zone: zone.into(),
            total: 1 << 40,
            free: 1 << 39,
            pieces,
            ..Heartbeat::default()
        }))
    }

    /// Time passes, and everybody who lives is heard.
    pub fn advance_ms(&self, world: &World, ms: u64) {
        let step = u64::from(world.config.server_timeout_ms) / 2;
        let mut left = ms;
        while left > 0 {
            let now = left.min(step);
            let up: Vec<String> =
                self.inner.lock().stores.iter().filter(|(_, s)| !s.dead).map(|(a, _)| a.clone()).collect();
            let known = world.placement();
            for server in known.servers.iter().filter(|server| up.contains(&server.addr)) {
                let number = server.addr.rsplit(':').next().unwrap().parse().unwrap();
                self.beat(world, number, &server.zone);
            }
            world.advance_ms(now);
            left -= now;
        }
    }

    pub fn kill(&self, server: u32) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().dead = true;
    }

    pub fn revive(&self, server: u32) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().dead = false;
    }

    pub fn lose_next_answer(&self, server: u32) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().loses_answer = true;
    }

    pub fn has(&self, server: u32, at: PieceAt) -> bool {
        self.inner.lock().stores[&addr(server)].pieces.contains(&at)
    }

    pub fn pieces(&self, server: u32) -> Vec<PieceAt> {
        self.inner.lock().stores[&addr(server)].pieces.iter().copied().collect()
    }

    pub fn count(&self, server: u32) -> usize {
        self.inner.lock().stores[&addr(server)].pieces.len()
    }

    /// A disk of the server is lost with all that is on it.
    pub fn wipe(&self, server: u32) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().pieces.clear();
    }

    /// The server is full with so many pieces.
    pub fn set_room(&self, server: u32, pieces: usize) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().room = pieces;
    }

    /// A step of repair during whose pull something happens.
    pub fn repair_while(&self, world: &World, happens: impl FnOnce()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        self.inner.lock().slow_pull = true;
        let mut step = std::pin::pin!(world.meta.repair(self));
        let waits = runtime.block_on(async { step.as_mut().now_or_never().is_none() });
        assert!(waits, "something is pulled");
        happens();
        runtime.block_on(step);
    }

    /// A piece is lost, and nobody knows.
    pub fn lose(&self, server: u32, at: PieceAt) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().pieces.remove(&at);
    }

    /// A piece is there that the service knows nothing of.
    pub fn plant(&self, server: u32, at: PieceAt) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().pieces.insert(at);
    }

    pub fn rot(&self, server: u32, at: PieceAt) {
        self.inner.lock().stores.get_mut(&addr(server)).unwrap().rotten.insert(at);
    }

    pub fn is_rotten(&self, server: u32, at: PieceAt) -> bool {
        self.inner.lock().stores[&addr(server)].rotten.contains(&at)
    }

    pub fn rates(&self) -> BTreeSet<u64> {
        self.inner.lock().rates.clone()
    }

    pub fn pulled(&self) -> u64 {
        self.inner.lock().pulled
    }

    pub fn scrubbed(&self) -> u64 {
        self.inner.lock().scrubbed
    }

    /// Repairs until there is nothing to do at this moment.
    pub fn repair(&self, world: &World) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for _ in 0..10_000 {
            world.sync();
            if !runtime.block_on(world.meta.repair(self)) {
                return;
            }
        }
        panic!("repair does not come to an end");
    }

    /// So many steps of repair.
    pub fn repair_steps(&self, world: &World, steps: usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for _ in 0..steps {
            runtime.block_on(world.meta.repair(self));
        }
    }

    /// Lets time pass and repair work until no group is dirty or moves.
    pub fn settle(&self, world: &World) {
        for _ in 0..200 {
            self.repair(world);
            let report = world.repair_report();
            if report.dirty == 0 && report.moving == 0 {
                return;
            }
            self.advance_ms(world, 2_000);
        }
        panic!("groups stay dirty: {:?}", world.repair_report());
    }

    /// Lets time pass and repair work until stale pieces are gone too.
    pub fn rest(&self, world: &World) {
        for _ in 0..6 {
            self.settle(world);
            self.advance_ms(world, 10_000);
            self.repair(world);
        }
    }

    /// One step of the scrub on every server; whether one runs.
    pub fn scrub_step(&self, world: &World) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(world.meta.scrub(self))
    }

    /// Puts a block as a client does that knows this table: on the targets, or on substitutes for the dead.
    pub fn put_block(&self, placement: &Placement, layout: LayoutId, id: BlockId, len: u32) -> NewBlock {
        let layout = placement.current(layout).unwrap();
        let pieces = layout.scheme.pieces(len);
        let target = layout.groups[layout.group_of(id)].target();
        let mut servers: Vec<ServerId> = Vec::new();
        let lives = |server: &ServerInfo| self.inner.lock().stores.get(&server.addr).is_some_and(|s| !s.dead);
        let living: Vec<&ServerInfo> = placement.servers.iter().filter(|server| lives(server)).collect();
        for wanted in target.iter().take(pieces) {
            let there = living.iter().any(|server| server.id == *wanted);
            let spare = living.iter().find(|s| !target.contains(&s.id) && !servers.contains(&s.id));
            servers.push(if there { *wanted } else { spare.expect("a spare server").id });
        }
        for (piece, server) in servers.iter().enumerate() {
            let info = placement.servers.iter().find(|info| info.id == *server).unwrap();
            self.inner.lock().stores.get_mut(&info.addr).unwrap().pieces.insert((id, piece as u8));
        }
        NewBlock { id, len, layout: layout.id, stored: 1, servers, ..NewBlock::default() }
    }

    /// Whether every block can be read from servers that live.
    pub fn readable(&self, world: &World) -> bool {
        let placement = world.placement();
        world.blocks().iter().all(|block| {
            let layout = placement.layout(block.layout).unwrap();
            let found = (0..layout.scheme.pieces(block.len) as u8)
                .filter(|piece| {
                    self.holders(&placement, layout, block, *piece)
                        .iter()
                        .any(|s| self.reads(&placement, *s, (block.id, *piece)))
                })
                .count();
            found >= layout.scheme.needed(block.len)
        })
    }

    /// Pieces that are not where they belong.
    pub fn astray(&self, world: &World) -> Vec<(BlockId, u8, ServerId)> {
        let placement = world.placement();
        let mut astray = Vec::new();
        for block in world.blocks() {
            let layout = placement.layout(block.layout).unwrap();
            let target = layout.groups[layout.group_of(block.id)].target();
            for (piece, server) in target.iter().enumerate().take(layout.scheme.pieces(block.len)) {
                if !self.reads(&placement, *server, (block.id, piece as u8)) {
                    astray.push((block.id, piece as u8, *server));
                }
            }
        }
        astray
    }

    fn pull_now(&self, addr: &str, items: Vec<PullItem>, rate: u64) -> Result<Pulled> {
        let mut inner = self.inner.lock();
        inner.rates.insert(rate);
        inner.up(addr)?;
        let mut pulled = Pulled::default();
        for (place, item) in items.iter().enumerate() {
            let at = (item.block, item.piece);
            let store = &inner.stores[addr];
            if store.pieces.contains(&at) && !(item.verify && store.rotten.contains(&at)) {
                continue;
            }
            if store.room > 0 && store.pieces.len() >= store.room {
                pulled.failed.push((place as u32, Fault::new(Code::NoSpace, "the disk is full")));
                continue;
            }
            if !inner.can_pull(item) {
                pulled.failed.push((place as u32, Fault::new(Code::Gone, "too few sources")));
                continue;
            }
            inner.pulled += 1;
            pulled.bytes += u64::from(item.block_len);
            let store = inner.stores.get_mut(addr).unwrap();
            store.pieces.insert(at);
            store.rotten.remove(&at);
        }
        Ok(pulled)
    }

    fn reads(&self, placement: &Placement, server: ServerId, at: PieceAt) -> bool {
        let Some(info) = placement.servers.iter().find(|info| info.id == server) else { return false };
        let inner = self.inner.lock();
        inner
            .stores
            .get(&info.addr)
            .is_some_and(|s| !s.dead && s.pieces.contains(&at) && !s.rotten.contains(&at))
    }

    /// Where a client looks for a piece.
    fn holders(&self, _: &Placement, layout: &Layout, block: &NewBlock, piece: u8) -> Vec<ServerId> {
        let group = &layout.groups[layout.group_of(block.id)];
        let substituted = block.substitutes.iter().chain(&group.former).filter(|(p, _)| *p == piece);
        let mut holders: Vec<ServerId> = substituted.map(|(_, server)| *server).collect();
        holders.extend(group.servers.get(usize::from(piece)));
        holders.extend(group.moving_to.get(usize::from(piece)));
        holders
    }
}

impl World {
    pub fn placement(&self) -> Placement {
        let Done::Placement(placement) = self.admin(Op::Placement) else { panic!() };
        placement
    }

    pub fn repair_report(&self) -> RepairReport {
        let Done::Repair(report) = self.admin(Op::Repair { rate: None }) else { panic!() };
        report
    }

    pub fn blocks(&self) -> Vec<NewBlock> {
        let Done::Blocks { blocks, end } = self.admin(Op::ListBlocks { after: None, limit: 4_096 }) else {
            panic!()
        };
        assert!(end);
        blocks
    }

    /// The number that the cluster gave to this store.
    pub fn server_id(&self, server: u32) -> ServerId {
        self.placement().servers.iter().find(|info| info.addr == addr(server)).unwrap().id
    }
}

/// A file that grows by one block at a time.
pub struct Writer {
    pub client: Client,
    pub ino: Ino,
    grant: u64,
    ids: IdRange,
    next: u64,
    size: u64,
}

impl Writer {
    pub fn new(world: &World, name: &str) -> Writer {
        let mut client = world.client();
        let ino = client.make(world, Ino::ROOT, name, Kind::File).ino;
        let grant = client.open_write(world, ino);
        let ids = client.ids(world, 1_000);
        Writer { client, ino, grant, ids, next: 0, size: 0 }
    }

    pub fn id(&mut self) -> BlockId {
        self.next += 1;
        BlockId { counter: self.ids.first.counter + self.next - 1, ..self.ids.first }
    }

    pub fn commit(&mut self, world: &World, block: NewBlock) -> Result<()> {
        let source = Source::Block {
            id: block.id,
            offset: 0,
            block_len: block.len,
            layout: block.layout,
            substitutes: Vec::new(),
        };
        let range = RangeOp::Write { offset: self.size, len: u64::from(block.len), source };
        self.size += u64::from(block.len);
        self.change(world, vec![block], range)
    }

    /// Gives up all blocks of the file.
    pub fn empty(&mut self, world: &World) {
        self.size = 0;
        self.change(world, Vec::new(), RangeOp::Truncate { size: 0 }).unwrap();
    }

    fn change(&mut self, world: &World, blocks: Vec<NewBlock>, range: RangeOp) -> Result<()> {
        self.client.renew(world);
        let reply = self.client.reply(world, Op::OpenData { ino: self.ino, write: true });
        if let Some(grant) = reply.grants.iter().find(|grant| grant.bits & 24 != 0) {
            self.grant = grant.number;
        }
        let commit = Commit {
            ino: self.ino,
            grant: self.grant,
            blocks,
            ranges: vec![range],
            mtime: None,
            kill_privileges: false,
            expect: None,
            ends: None,
        };
        self.client.call(world, Op::Commit(commit)).map(|_| ())
    }

    /// Writes so many blocks under the table of now.
    pub fn write(&mut self, world: &World, servers: &Servers, count: usize, len: u32) {
        for _ in 0..count {
            let placement = world.placement();
            let layout = placement.layouts.last().unwrap().id;
            let block = servers.put_block(&placement, layout, self.id(), len);
            self.commit(world, block).unwrap();
        }
    }
}

impl BlockPeers for Servers {
    fn delete<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        let mut inner = self.inner.lock();
        let done = inner.up(addr).map(|store| store.pieces.retain(|(id, _)| !blocks.contains(id)));
        Box::pin(std::future::ready(done))
    }

    fn purge<'a>(&'a self, addr: &'a str, range: IdRange, keep: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        let mut inner = self.inner.lock();
        let done = inner
            .up(addr)
            .map(|store| store.pieces.retain(|(id, _)| !range.contains(*id) || keep.contains(id)));
        Box::pin(std::future::ready(done))
    }
}

impl RepairPeers for Servers {
    fn missing<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, Vec<PieceAt>> {
        let mut inner = self.inner.lock();
        let lacks = inner.up(addr).map(|store| {
            pieces.into_iter().filter(|piece| !store.pieces.contains(piece)).collect::<Vec<_>>()
        });
        Box::pin(std::future::ready(lacks))
    }

    fn pull<'a>(&'a self, addr: &'a str, items: Vec<PullItem>, rate: u64, _: Duration) -> Asking<'a, Pulled> {
        let slow = std::mem::take(&mut self.inner.lock().slow_pull);
        Box::pin(async move {
            let pieces: Vec<PieceAt> = items.iter().map(|item| (item.block, item.piece)).collect();
            let pulled = self.pull_now(addr, items, rate);
            if slow {
                // What was fetched before is stored after.
                let mut waited = false;
                std::future::poll_fn(|_| match std::mem::replace(&mut waited, true) {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                })
                .await;
                self.inner.lock().up(addr)?.pieces.extend(pieces);
            }
            pulled
        })
    }

    fn forget<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, ()> {
        let mut inner = self.inner.lock();
        let done = inner.up(addr).and_then(|store| {
            store.pieces.retain(|at| !pieces.contains(at));
            match std::mem::take(&mut store.loses_answer) {
                true => Err(Fault::new(Code::Timeout, "the answer is lost")),
                false => Ok(()),
            }
        });
        Box::pin(std::future::ready(done))
    }

    fn list<'a>(&'a self, addr: &'a str, after: Option<PieceAt>, limit: u32) -> Asking<'a, Listed> {
        let mut inner = self.inner.lock();
        let listed = inner.up(addr).map(|store| {
            let later = store.pieces.iter().filter(|at| after.is_none_or(|after| **at > after));
            let pieces: Vec<PieceInfo> = later
                .take(limit as usize)
                .map(|(block, piece)| PieceInfo {
                    block: *block,
                    piece: *piece,
                    layout: LayoutId(1),
                    stored: 1,
                })
                .collect();
            let end = pieces.len() < limit as usize;
            (pieces, end)
        });
        Box::pin(std::future::ready(listed))
    }

    fn scrub<'a>(&'a self, addr: &'a str, part: ScrubPart, _: Duration) -> Asking<'a, Scrubbed> {
        let mut inner = self.inner.lock();
        let scrubbed = inner.up(addr).map(|store| {
            let later = store.pieces.iter().filter(|at| part.after.is_none_or(|after| **at > after));
            let read: Vec<PieceAt> = later.take(part.pieces as usize).copied().collect();
            let bad: Vec<PieceAt> = read.iter().filter(|at| store.rotten.contains(at)).copied().collect();
            bad.iter().for_each(|at| {
                store.pieces.remove(at);
                store.rotten.remove(at);
            });
            let after = read.last().copied().filter(|_| read.len() == part.pieces as usize);
            Scrubbed { bad, after, pieces: read.len() as u64, bytes: read.len() as u64 }
        });
        inner.scrubbed += scrubbed.as_ref().map_or(0, |part| part.pieces);
        Box::pin(std::future::ready(scrubbed))
    }
}
