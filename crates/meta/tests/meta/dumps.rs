//! Dumps made under changes, stores restored from them, and dumps kept on data servers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use torchfs_disk::SimDisk;
use torchfs_engine::{Batch, Embedded, Engine, MemReplica, dump};
use torchfs_meta::dumps::server::Keeper;
use torchfs_meta::dumps::{DumpPeers, restore};
use torchfs_meta::repair::RepairPeers;
use torchfs_meta::{BlockPeers, Config, Meta};
use torchfs_proto::attr::Kind;
use torchfs_proto::clock::Clock;
use torchfs_proto::dump::DumpName;
use torchfs_proto::extent::RangeOp;
use torchfs_proto::key::{Parts, Space};
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::msg::dump::DumpInfo;
use torchfs_proto::msg::meta::{Done, FileLock, LockKind, LockType, Op};
use torchfs_proto::{BlockId, Code, Fault, Incarnation, Ino, LayoutId, Result};

use crate::content::{block, commit, within};
use crate::repair::{BIG, clean, until_out, world};
use crate::servers::{self, Writer};
use crate::world::World;

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

fn pairs(engine: &dyn Engine) -> Pairs {
    let mut pairs = Pairs::new();
    engine
        .scan(&[], &[0xff; 600], false, &mut |key, value| {
            pairs.insert(key.to_vec(), value.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
    pairs
}

/// Asks for a dump piece by piece; `between` runs after each of them.
fn dump(world: &World, mut between: impl FnMut()) -> Result<Vec<u8>> {
    let Done::Dumped { mut cursor, .. } = world.admin(Op::Dump { cursor: Vec::new().into() }) else {
        panic!()
    };
    let mut all = Vec::new();
    loop {
        let piece = world.meta.dump_piece(&cursor)?;
        assert_eq!(world.meta.dump_piece(&cursor).unwrap(), piece, "an answer that was lost is given again");
        let Done::Dumped { bytes, cursor: next, pairs, total } = piece else { panic!() };
        assert!(pairs <= total);
        all.extend_from_slice(&bytes);
        if next.is_empty() {
            return Ok(all);
        }
        cursor = next;
        between();
    }
}

/// What a dump's changes come to.
fn applied(bytes: &[u8]) -> (Pairs, dump::Trailer) {
    let mut reader = dump::Reader::new(bytes).unwrap();
    let mut pairs = Pairs::new();
    while let Some(changes) = reader.next().unwrap() {
        for change in changes {
            match change {
                torchfs_engine::Change::Put(key, value) => pairs.insert(key, value),
                torchfs_engine::Change::Delete(key) => pairs.remove(&key),
            };
        }
    }
    (pairs, *reader.trailer().unwrap())
}

/// An engine opened to be filled from a dump.
fn engine_for(bytes: &[u8], disk: &SimDisk, replica: &MemReplica, wall_ns: i64) -> Arc<Embedded> {
    let (header, trailer) = dump::check(bytes, |_| {}).unwrap();
    let floor = restore::floor(&header, &trailer, Incarnation(0), wall_ns).unwrap();
    let config = torchfs_engine::Config {
        cluster: Some(header.cluster),
        floor: Some(floor),
        threads: false,
        reserve_bytes: 0,
        ..torchfs_engine::Config::default()
    };
    Arc::new(Embedded::open_with(Arc::new(disk.clone()), Box::new(replica.clone()), config).unwrap())
}

/// A service over a store that was restored from a dump.
fn restored(old: &World, bytes: &[u8]) -> World {
    let disk = SimDisk::new(2);
    let replica = MemReplica::new(&disk);
    let engine = engine_for(bytes, &disk, &replica, old.clock.wall_ns());
    restore::load(&*engine, bytes, old.clock.wall_ns(), |_| {}).unwrap();
    let meta = Arc::new(Meta::open(engine.clone(), old.clock.clone(), old.config.clone()).unwrap());
    World { disk, replica, engine, clock: old.clock.clone(), config: old.config.clone(), meta }
}

/// A file with one block of its own, and that block.
fn file_with_block(world: &World, client: &mut crate::world::Client, name: &str) -> BlockId {
    let ino = client.file(world, name);
    let ids = client.ids(world, 1);
    let grant = client.open_write(world, ino);
    let range = RangeOp::Write { offset: 0, len: 4096, source: within(ids.first, 0) };
    client.call(world, commit(ino, grant, vec![block(ids.first, 4096)], vec![range])).unwrap();
    ids.first
}

#[test]
fn a_dump_made_under_changes_is_the_state_after_one_batch() {
    for seed in torchfs_fuzz::seeds(700, 30, 600) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let world = World::with(Config { dump_pairs: rng.random_range(1..12), ..Config::default() });
        let client = Mutex::new(world.client());
        let change = |rng: &mut SmallRng| {
            let mut client = client.lock();
            let name = format!("f{}", rng.random_range(0..60));
            // Whether it works does not matter: what is ordered does.
            match rng.random_range(0..4) {
                0 => drop(client.unlink(&world, Ino::ROOT, &name)),
                1 => {
                    let other = format!("f{}", rng.random_range(0..60));
                    drop(client.rename(&world, (Ino::ROOT, &name), (Ino::ROOT, &other), 0));
                }
                _ => drop(client.try_make(&world, Ino::ROOT, &name, Kind::File)),
            }
        };
        for _ in 0..80 {
            change(&mut rng);
        }
        let mut pieces = 0;
        let bytes = dump(&world, || {
            pieces += 1;
            for _ in 0..rng.random_range(0..6) {
                change(&mut rng);
            }
        })
        .unwrap();
        assert!(pieces > 2, "seed {seed}: {pieces} pieces");
        let (found, trailer) = applied(&bytes);
        assert_eq!(trailer.seq, world.engine.ordered(), "seed {seed}");
        assert_eq!(trailer.seq, world.engine.durable(), "seed {seed}: what is dumped is durable");
        assert!(found == pairs(&*world.engine), "seed {seed}: the dump is another state");
    }
}

#[test]
fn a_dump_that_missed_a_batch_or_was_forgotten_is_given_up() {
    let config =
        Config { dump_pairs: 2, dump_tape_bytes: 20_000, dump_patience_ms: 1_000, ..Config::default() };
    let world = World::with(config);
    let mut client = world.client();
    client.file(&world, "a");
    // A batch that went past the service.
    let fault = dump(&world, || {
        let mut batch = Batch::at(0);
        batch.put("x", "y");
        world.engine.order(batch).unwrap();
    })
    .unwrap_err();
    assert!(fault.what.contains("missed a batch"), "{fault}");
    // Too slow for what happens meanwhile.
    let many = Mutex::new((client, 0));
    let fault = dump(&world, || {
        let (client, n) = &mut *many.lock();
        for _ in 0..60 {
            *n += 1;
            client.file(&world, &format!("many{n}"));
        }
    })
    .unwrap_err();
    assert_eq!(fault.code, Code::Stale);
    // Nobody asked for a while.
    let fault = dump(&world, || {
        world.clock.advance_ms(1_500);
        let (client, n) = &mut *many.lock();
        *n += 1;
        client.renew(&world);
        client.file(&world, &format!("many{n}"));
    })
    .unwrap_err();
    assert!(fault.what.contains("nobody asked"), "{fault}");
    assert_eq!(world.meta.dump_piece(&[9; 16]).unwrap_err().code, Code::Stale);
    assert_eq!(world.meta.dump_piece(&[9; 3]).unwrap_err().code, Code::Invalid);
}

#[test]
fn a_restored_store_is_clean_and_gives_nothing_out_a_second_time() {
    let world = World::new();
    world.server(1);
    let mut client = world.client();
    file_with_block(&world, &mut client, "kept");
    let folder = client.dir(&world, "folder");
    client.make(&world, folder, "below", Kind::File);
    let open = client.file(&world, "unlinked");
    client.unlink(&world, Ino::ROOT, "unlinked").unwrap();
    let lock = FileLock { kind: LockKind::Posix, ty: LockType::Write, owner: 1, pid: 2, start: 0, end: 9 };
    client.call(&world, Op::Lock { ino: folder, lock, wait: false }).unwrap();
    let before = client.ids(&world, 10);
    let bytes = dump(&world, || {}).unwrap();

    // After the dump: more of everything.
    let lost = world.client();
    let (late, after) = (world.client(), client.ids(&world, 10));
    client.file(&world, "lost");
    let old_fence = world.engine.fence();

    let new = restored(&world, &bytes);
    assert_eq!(new.problems(), Vec::<String>::new());
    let mut names = new.client();
    assert!(names.id > late.id && names.id > lost.id, "a session's number came back");
    assert_eq!(names.names(&new, Ino::ROOT), ["kept", "folder"]);
    assert_eq!(names.names(&new, folder), ["below"]);
    assert!(new.engine.fence() > old_fence && new.engine.ordered() > world.engine.ordered());
    let ids = names.ids(&new, 10);
    assert!(ids.first.incarnation > after.first.incarnation.max(before.first.incarnation) + 60_000);
    assert_eq!(client.refused(&new, Op::GetAttr { ino: Ino::ROOT }), Code::NoSession);
    assert_eq!(names.refused(&new, Op::GetAttr { ino: open }), Code::Stale);
    let spaces: BTreeSet<u8> =
        pairs(&*new.engine).keys().filter_map(|key| Some(Parts::of(key)?.space)).collect();
    assert!(!spaces.contains(&(Space::Lock as u8)) && !spaces.contains(&(Space::DeadRange as u8)));
    // And a dump of the restored store restores again, higher still.
    let again = restored(&new, &dump(&new, || {}).unwrap());
    assert_eq!(again.problems(), Vec::<String>::new());
    assert!(again.engine.incarnation() > new.engine.incarnation());
}

#[test]
fn half_a_load_is_neither_served_nor_filled_up() {
    let world = World::new();
    world.client().file(&world, "f");
    let bytes = dump(&world, || {}).unwrap();
    let disk = SimDisk::new(3);
    let engine = engine_for(&bytes, &disk, &MemReplica::new(&disk), 0);
    restore::load(&*engine, &bytes[..bytes.len() - 1], 0, |_| {}).unwrap_err();
    let refused = Meta::open(engine.clone(), world.clock.clone(), Config::default());
    let error = refused.err().expect("half a store must not be served").to_string();
    assert!(error.contains("load the dump again"), "{error}");
    let fault = restore::load(&*engine, &bytes[..], 0, |_| {}).unwrap_err();
    assert_eq!(fault.code, Code::Exists);
    assert!(fault.what.contains("cut off"), "{fault}");
    // Nor is a store that is in use.
    let fault = restore::load(&*world.engine, &bytes[..], 0, |_| {}).unwrap_err();
    assert_eq!(fault.code, Code::Exists);
    assert!(fault.what.contains("already"), "{fault}");
}

/// Data servers in memory.
#[derive(Default)]
struct Servers {
    dumps: Mutex<BTreeMap<(String, DumpName), Vec<u8>>>,
    halves: Mutex<BTreeMap<(String, DumpName), Vec<u8>>>,
    pieces: Mutex<BTreeSet<(String, BlockId)>>,
    down: Mutex<BTreeSet<String>>,
}

impl Servers {
    fn reach(&self, addr: &str) -> Result<()> {
        match self.down.lock().contains(addr) {
            true => Err(Fault::new(Code::Unreachable, "down")),
            false => Ok(()),
        }
    }

    fn holders(&self, name: DumpName) -> usize {
        self.dumps.lock().keys().filter(|(_, held)| *held == name).count()
    }

    fn names(&self) -> BTreeSet<DumpName> {
        self.dumps.lock().keys().map(|(_, name)| *name).collect()
    }
}

impl DumpPeers for Servers {
    fn put<'a>(
        &'a self,
        addr: &'a str,
        name: DumpName,
        offset: u64,
        part: Bytes,
        end: Option<u32>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.reach(addr)?;
            let at = (addr.to_string(), name);
            let mut halves = self.halves.lock();
            if offset == 0 {
                halves.insert(at.clone(), Vec::new());
            }
            let half = halves.get_mut(&at).expect("parts follow each other");
            assert_eq!(half.len() as u64, offset);
            half.extend_from_slice(&part);
            if let Some(end) = end {
                assert_eq!(end, crc32c::crc32c(half));
                self.dumps.lock().insert(at.clone(), half.clone());
                halves.remove(&at);
            }
            Ok(())
        })
    }

    fn list<'a>(&'a self, addr: &'a str) -> BoxFuture<'a, Result<Vec<DumpInfo>>> {
        Box::pin(async move {
            self.reach(addr)?;
            let dumps = self.dumps.lock();
            let here = dumps.iter().filter(|((held, _), _)| held == addr);
            Ok(here.map(|((_, name), bytes)| DumpInfo { name: *name, len: bytes.len() as u64 }).collect())
        })
    }

    fn delete<'a>(&'a self, addr: &'a str, names: Vec<DumpName>) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.reach(addr)?;
            self.dumps.lock().retain(|(held, name), _| held != addr || !names.contains(name));
            Ok(())
        })
    }

    fn pieces<'a>(
        &'a self,
        addr: &'a str,
        after: Option<(BlockId, u8)>,
        _limit: u32,
    ) -> BoxFuture<'a, Result<(Vec<PieceInfo>, bool)>> {
        Box::pin(async move {
            self.reach(addr)?;
            // Two at a time, so that there is something to go on with.
            let pieces = self.pieces.lock();
            let behind = |block: &BlockId| after.is_none_or(|(after, _)| *block > after);
            let here = pieces.iter().filter(|(held, block)| held == addr && behind(block));
            let info = |block: BlockId| PieceInfo { block, piece: 0, layout: LayoutId(1), stored: 1 };
            let two: Vec<_> = here.take(2).map(|(_, block)| info(*block)).collect();
            Ok((two.clone(), two.len() < 2))
        })
    }

    fn delete_blocks<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.reach(addr)?;
            self.pieces.lock().retain(|(held, block)| held != addr || !blocks.contains(block));
            Ok(())
        })
    }
}

#[tokio::test]
async fn what_a_restored_store_does_not_know_is_deleted_on_every_server() {
    let world = World::with(Config { peer_timeout_ms: 1, ..Config::default() });
    for store in [1, 2] {
        world.server(store);
    }
    let mut client = world.client();
    let kept = file_with_block(&world, &mut client, "kept");
    let bytes = dump(&world, || {}).unwrap();
    let lost: Vec<BlockId> =
        (0..5).map(|n| file_with_block(&world, &mut client, &format!("lost{n}"))).collect();

    let new = restored(&world, &bytes);
    let mut client = new.client();
    let fresh = client.ids(&new, 1).first;
    let servers = Servers::default();
    let addr = |store: u64| format!("127.0.0.1:{store}");
    for store in [1, 2, 3] {
        let mut pieces = servers.pieces.lock();
        pieces.extend(lost.iter().chain([&kept, &fresh]).map(|block| (addr(store), *block)));
    }
    let left = |store| {
        let pieces = servers.pieces.lock();
        pieces.iter().filter(|(held, _)| *held == addr(store)).map(|(_, block)| *block).collect::<Vec<_>>()
    };
    let waiting = |world: &World| match world.admin(Op::Collect) {
        Done::Collected { waiting, .. } => waiting,
        other => panic!("{other:?}"),
    };
    servers.down.lock().insert(addr(2));
    client.file(&new, "f");
    assert!(!new.meta.sweep(&servers).await, "what it judges by is not durable");
    new.sync();
    assert_eq!(left(1).len(), 7);
    assert!(new.meta.sweep(&servers).await);
    assert!(!new.meta.sweep(&servers).await, "one is down");
    assert_eq!(left(1), [kept, fresh], "what is named, and what is in flight, stays");
    assert_eq!(left(2).len(), 7);
    while new.meta.run_chores(100) > 0 {}
    assert_eq!(waiting(&new), 1);
    // It comes back, and one joins that the dump did not know: its number is nobody else's.
    servers.down.lock().clear();
    new.server(3);
    // What it notes on the way is to be durable before it goes on.
    for _ in 0..20 {
        new.sync();
        new.meta.sweep(&servers).await;
    }
    assert_eq!((left(2), left(3)), (vec![kept, fresh], vec![kept, fresh]));
    assert_eq!(waiting(&new), 0);
    // Each server is searched once, over restarts too.
    servers.pieces.lock().insert((addr(1), lost[0]));
    assert!(!new.meta.sweep(&servers).await);
}

#[tokio::test]
async fn a_server_that_cannot_be_searched_does_not_hold_up_the_others() {
    let world = World::new();
    let new = restored(&world, &dump(&world, || {}).unwrap());
    for store in [1, 2, 3] {
        new.server(store);
    }
    new.sync();
    let servers = Servers::default();
    servers.down.lock().insert("127.0.0.1:1".into());
    assert!(new.meta.sweep(&servers).await && new.meta.sweep(&servers).await);
    assert!(!new.meta.sweep(&servers).await);
}

/// Servers that repair can work on; they keep no dumps.
impl DumpPeers for servers::Servers {
    fn put<'a>(
        &'a self,
        _: &'a str,
        _: DumpName,
        _: u64,
        _: Bytes,
        _: Option<u32>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Err(Code::Unsupported.into())))
    }

    fn list<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<DumpInfo>>> {
        Box::pin(std::future::ready(Err(Code::Unsupported.into())))
    }

    fn delete<'a>(&'a self, _: &'a str, _: Vec<DumpName>) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Err(Code::Unsupported.into())))
    }

    fn pieces<'a>(
        &'a self,
        addr: &'a str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> BoxFuture<'a, Result<(Vec<PieceInfo>, bool)>> {
        RepairPeers::list(self, addr, after, limit)
    }

    fn delete_blocks<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        BlockPeers::delete(self, addr, blocks)
    }
}

/// Searches all servers that are up.
fn sweep(world: &World, servers: &servers::Servers) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    world.sync();
    while runtime.block_on(world.meta.sweep(servers)) {
        world.sync();
    }
}

#[test]
fn what_a_drain_moved_after_the_dump_is_found_where_it_is() {
    for scheme in ["replicas:1", "replicas:2", "ec:2+1"] {
        let world = world(scheme);
        let servers = servers::Servers::join(&world, 5);
        let mut writer = Writer::new(&world, "f");
        writer.write(&world, &servers, 40, BIG);
        servers.settle(&world);
        let known: usize = (1..=5).map(|server| servers.count(server)).sum();
        let bytes = dump(&world, || {}).unwrap();
        for server in [1, 2] {
            world.admin(Op::Drain { server: world.server_id(server), on: true });
            servers.rest(&world);
            assert_eq!(servers.count(server), 0);
        }
        writer.write(&world, &servers, 5, BIG);

        let new = restored(&world, &bytes);
        servers.advance_ms(&new, 12_000);
        // Repair is there first and finds too little.
        servers.repair(&new);
        if scheme == "replicas:1" {
            assert!(!servers.readable(&new) && new.repair_report().lost > 0);
        }
        sweep(&new, &servers);
        assert!(servers.readable(&new), "{scheme}: found, before anything is copied");
        servers.repair(&new);
        assert_eq!(new.repair_report().lost, 0, "{scheme}: looked at again, at once");
        // It is known after a restart, too.
        let new = new.restart();
        assert!(servers.readable(&new), "{scheme}");
        servers.rest(&new);
        clean(&new, &servers);
        assert_eq!((1..=5).map(|server| servers.count(server)).sum::<usize>(), known, "{scheme}");
    }
}

#[test]
fn what_moved_off_a_server_that_was_removed_or_onto_one_that_joined_after_the_dump_is_found() {
    let world = world("replicas:1");
    let servers = servers::Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 40, BIG);
    servers.settle(&world);
    let bytes = dump(&world, || {}).unwrap();
    servers.add(&world, 4, "");
    for server in [1, 2] {
        let id = world.server_id(server);
        world.admin(Op::Drain { server: id, on: true });
        servers.rest(&world);
        world.admin(Op::RemoveServer { server: id, force: false });
        servers.kill(server);
    }
    assert!(servers.count(4) > 0);

    let new = restored(&world, &bytes);
    servers.advance_ms(&new, 1_000);
    sweep(&new, &servers);
    assert!(!servers.readable(&new), "one did not say yet that it is there");
    servers.beat(&new, 4, "");
    sweep(&new, &servers);
    assert!(servers.readable(&new));
    until_out(&new, &servers);
    servers.rest(&new);
    clean(&new, &servers);
    assert_eq!(servers.count(3) + servers.count(4), 40);
}

#[test]
fn pieces_that_are_left_over_when_a_store_is_restored_are_removed() {
    let world = world("replicas:1");
    let servers = servers::Servers::join(&world, 12);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 40, BIG);
    servers.settle(&world);
    let blocks: Vec<BlockId> = world.blocks().iter().map(|block| block.id).collect();
    let new = restored(&world, &dump(&world, || {}).unwrap());
    servers.advance_ms(&new, 1_000);
    // Found before repair has looked: more places than a group remembers.
    for server in 1..=12 {
        servers.plant(server, (blocks[0], 0));
        servers.plant(server, (blocks[1], 3)); // no such piece
    }
    // Found after it has, at one of them.
    servers.kill(12);
    servers.advance_ms(&new, 12_000);
    sweep(&new, &servers);
    let most = new.placement().layouts.iter().flat_map(|layout| &layout.groups).map(|g| g.former.len()).max();
    assert_eq!(most, Some(8));
    assert_eq!(new.problems(), Vec::<String>::new());
    servers.revive(12);
    servers.advance_ms(&new, 2_000);
    servers.settle(&new);
    sweep(&new, &servers);
    servers.rest(&new);
    clean(&new, &servers);
    assert_eq!((1..=12).map(|server| servers.count(server)).sum::<usize>(), 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dumps_go_onto_three_servers_again_and_again_and_old_ones_go() {
    let config = Config { dump_every_ms: 40, dump_first_ms: 0, dumps_kept: 4, ..Config::default() };
    let world = World::with(config);
    for store in 1..=5 {
        world.server(store);
    }
    let mut client = world.client();
    client.file(&world, "f");
    let servers = Arc::new(Servers::default());
    servers.down.lock().insert("127.0.0.1:1".into());
    let keeper = Keeper::start(world.meta.clone(), servers.clone());
    let mut seen = BTreeSet::new();
    for _ in 0..3_000 {
        // Each dump has a place of its own in the order.
        client.file(&world, &format!("f{}", client.seq));
        world.clock.advance_ms(10);
        seen.extend(servers.names());
        if seen.len() > 8 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(seen.len() > 8, "{} dumps were made", seen.len());
    drop(keeper);
    let Done::Status(status) = world.admin(Op::Status) else { panic!() };
    let report = status.dumps.unwrap();
    assert!(report.newest_ms.is_some() && report.copies >= 2 && report.failure.is_empty(), "{report:?}");
    let names = servers.names();
    assert!(names.len() <= 6, "old dumps stay: {names:?}");
    let dumps = servers.dumps.lock().clone();
    for ((_, name), bytes) in &dumps {
        let (header, _) = dump::check(&bytes[..], |_| {}).unwrap();
        assert_eq!((header.seq, header.incarnation), (name.seq, name.incarnation));
    }
    assert!(names.iter().all(|name| servers.holders(*name) <= 3));
    assert!(names.iter().any(|name| servers.holders(*name) >= 2));

    // A service that starts later knows of them.
    let mut config = world.config.clone();
    config.dump_every_ms = 3_600_000;
    servers.down.lock().clear();
    let meta = Arc::new(Meta::open(world.engine.clone(), world.clock.clone(), config).unwrap());
    let _keeper = Keeper::start(meta.clone(), servers.clone());
    let later = World { meta, disk: world.disk, replica: world.replica, ..world };
    for _ in 0..500 {
        let Done::Status(status) = later.admin(Op::Status) else { panic!() };
        if status.dumps.unwrap().newest_ms == names.iter().next_back().map(|name| name.wall_ms) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the dumps of before are not known");
}
