//! Sessions: their beginning, their end, and the grace after a restart.

use torchfs_engine::Engine;
use torchfs_proto::attr::{Kind, SetAttr};
use torchfs_proto::extent::RangeOp;
use torchfs_proto::msg::meta::{Done, Event, FileLock, LockKind, LockType, Op, lease};
use torchfs_proto::{Code, Ino, Seq, VolumeId, key, record};

use crate::content::{block, commit, nth, within};
use crate::world::{World, raw};

#[test]
fn a_session_that_is_not_renewed_ends_and_its_late_commits_are_refused() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let ids = a.ids(&world, 10);
    for _ in 0..61 {
        world.advance_ms(1_000);
        b.renew(&world);
    }
    let late = commit(
        f,
        grant,
        vec![block(nth(ids, 0), 4)],
        vec![RangeOp::Write { offset: 0, len: 4, source: within(nth(ids, 0), 0) }],
    );
    assert_eq!(a.refused(&world, late), Code::NoSession);
    b.open_write(&world, f);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_session_is_ended_by_eviction() {
    let world = World::new();
    let mut a = world.client();
    let Done::Sessions(sessions) = world.admin(Op::Sessions) else { panic!() };
    assert_eq!(sessions.len(), 1);
    world.admin(Op::Evict { session: a.id });
    assert_eq!(a.refused(&world, Op::Renew), Code::NoSession);
}

#[test]
fn another_epoch_or_a_higher_fence_is_refused() {
    let world = World::new();
    let mut a = world.client();
    let mut request = a.request(Op::GetAttr { ino: Ino::ROOT });
    request.epoch += 1;
    assert_eq!(world.start(request.clone()).ready().result.unwrap_err().code, Code::Fenced);
    request.fence.0 = u64::MAX;
    assert_eq!(world.start(request).ready().result.unwrap_err().code, Code::NotLeader);
}

#[test]
fn after_a_restart_nothing_that_conflicts_is_granted_until_all_have_reported() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.open_write(&world, f);
    let world = world.restart();
    let Done::Session(info) = b.call(&world, Op::ResumeSession).unwrap() else { panic!() };
    assert!(info.reclaim);
    b.call(&world, Op::Reclaim { leases: vec![], open: vec![], last: true }).unwrap();
    assert_eq!(b.refused(&world, Op::OpenData { ino: f, write: true }), Code::Grace);
    a.call(&world, Op::ResumeSession).unwrap();
    let leases = vec![(f, lease::WRITE | lease::ATTR)];
    let reply = a.reply(&world, Op::Reclaim { leases, open: vec![f], last: true });
    assert_eq!(reply.grants.len(), 1);
    // Now all have reported, and the writer's lease counts again: it is recalled before another gets it.
    let grant = reply.grants[0].number;
    let mut opening = b.start(&world, Op::OpenData { ino: f, write: false });
    assert!(!opening.is_ready());
    a.call(&world, commit(f, grant, vec![], vec![RangeOp::Extend { size: 9 }])).unwrap();
    a.obey(&world, false);
    world.sync();
    let reply = opening.ready();
    let Done::Opened(attr) = reply.result.unwrap() else { panic!() };
    assert_eq!((attr.size, reply.grants[0].bits), (9, lease::READ));
}

#[test]
fn grace_ends_with_the_lease_term_when_a_session_is_silent() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.open_write(&world, f);
    let world = world.restart();
    b.call(&world, Op::ResumeSession).unwrap();
    b.call(&world, Op::Reclaim { leases: vec![], open: vec![], last: true }).unwrap();
    assert_eq!(b.refused(&world, Op::GetAttr { ino: f }), Code::Grace);
    world.advance_ms(3_600);
    b.renew(&world);
    b.open_write(&world, f);
    // Who comes too late gets no lease back, and may still have files open.
    a.call(&world, Op::ResumeSession).unwrap();
    let reply = a.reply(&world, Op::Reclaim { leases: vec![(f, lease::WRITE)], open: vec![f], last: true });
    assert_eq!(reply.grants, vec![]);
    let idle = Op::Unlink { parent: Ino::ROOT, name: raw("f"), idle: Some(f) };
    b.call(&world, idle).unwrap();
    assert_eq!(a.getattr(&world, f).nlink, 0);
}

#[test]
fn an_answer_names_the_inodes_that_no_lease_protects() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let (f, g) = (a.file(&world, "f"), a.file(&world, "g"));
    b.lookup(&world, Ino::ROOT, "f").unwrap();
    world.sync();
    let change = Op::SetAttr { ino: f, set: SetAttr { mode: Some(0o600), ..SetAttr::default() } };
    let mut changing = a.start(&world, change);
    assert!(!changing.is_ready(), "b has the attributes");
    let lookup = |name| Op::Lookup { parent: Ino::ROOT, name: raw(name) };
    assert_eq!(b.reply(&world, lookup("f")).bare, Some(vec![f]));
    assert_eq!(b.reply(&world, lookup("g")).bare, None);
    // A listing has its names, and the attributes of all others.
    let listing = b.reply(&world, Op::ReadDir { ino: Ino::ROOT, cookie: 0, limit: 10, plus: true });
    let Done::Entries { entries, .. } = listing.result.unwrap() else { panic!() };
    let dressed: Vec<(Ino, bool)> = entries.iter().map(|entry| (entry.ino, entry.attr.is_some())).collect();
    assert_eq!((dressed, listing.bare), (vec![(f, false), (g, true)], None));
    b.obey(&world, false);
    assert_eq!(changing.settle(&world).bare, None);
}

#[test]
fn what_is_being_recalled_is_never_said_again_as_something_newer() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.open_write(&world, f);
    let mut opening = b.start(&world, Op::OpenData { ino: f, write: true });
    assert!(!opening.is_ready());
    let recalls = a.events(&world, 0).into_iter().filter_map(|(_, event)| match event {
        Event::Recall { ino, number, .. } if ino == f => Some(number),
        _ => None,
    });
    let upto = recalls.max().expect("a recall");
    // An answer that grants nothing is newer, and what is held is no newer for it.
    let lookup = Op::Lookup { parent: Ino::ROOT, name: raw("f") };
    let bare = a.reply(&world, lookup);
    assert!(bare.grants.iter().any(|grant| grant.ino == f && grant.bits == 0 && grant.number > upto));
    assert!(a.open_write(&world, f) <= upto, "it would outlive its recall");
    a.obey(&world, false);
    opening.settle(&world).result.unwrap();
}

#[test]
fn what_is_asked_for_again_is_held_though_it_was_given_back_before() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.open_write(&world, f);
    let mut opening = b.start(&world, Op::OpenData { ino: f, write: true });
    assert!(!opening.is_ready());
    a.obey(&world, true);
    let reply = opening.settle(&world);
    let before = reply.grants.iter().find(|grant| grant.bits == lease::SHARED).expect("shared").number;
    // It gives the lease back and asks again, and the second word is heard first.
    let number = b.open_write(&world, f);
    b.call(&world, Op::Forget { leases: vec![(f, lease::SHARED, before)] }).unwrap();
    let write = |size| vec![RangeOp::Extend { size }];
    let mut writing = b.start(&world, commit(f, number, vec![], write(5)));
    assert!(!writing.is_ready(), "a has the attributes");
    a.obey(&world, true);
    writing.settle(&world).result.expect("the newer grant holds");
    // A commit under the older grant that was on its way is good, too.
    b.call(&world, commit(f, before, vec![], write(6))).expect("nobody else came in between");
}

#[test]
fn ids_are_never_given_twice() {
    let mut world = World::new();
    let mut seen = std::collections::BTreeSet::new();
    for cut in 0..6 {
        let mut a = world.client();
        for _ in 0..3 {
            let range = a.ids(&world, 100);
            for n in 0..100 {
                assert!(seen.insert(nth(range, n)));
            }
        }
        world = world.power_cut(cut);
        world.advance_ms(4_000);
    }
}

#[test]
fn the_ranges_of_ended_sessions_are_purged_and_dead_blocks_deleted() {
    use std::sync::Arc;

    use futures_util::future::BoxFuture;
    use parking_lot::Mutex;
    use torchfs_meta::BlockPeers;
    use torchfs_proto::{BlockId, IdRange, Result};

    type Purged = Vec<(IdRange, Vec<BlockId>)>;
    #[derive(Default)]
    struct Peers(Mutex<(Vec<BlockId>, Purged)>);
    impl BlockPeers for Peers {
        fn delete<'a>(&'a self, _: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
            self.0.lock().0.extend(blocks);
            Box::pin(async { Ok(()) })
        }
        fn purge<'a>(&'a self, _: &'a str, range: IdRange, keep: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
            self.0.lock().1.push((range, keep));
            Box::pin(async { Ok(()) })
        }
    }

    let world = World::with(torchfs_meta::Config { peer_timeout_ms: 1, ..Default::default() });
    world.server(7);
    let mut a = world.client();
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let ids = a.ids(&world, 10);
    let write = |n| vec![RangeOp::Write { offset: 0, len: 4, source: within(nth(ids, n), 0) }];
    a.call(&world, commit(f, grant, vec![block(nth(ids, 0), 4)], write(0))).unwrap();
    a.call(&world, commit(f, grant, vec![block(nth(ids, 1), 4)], write(1))).unwrap();
    a.call(&world, Op::CloseSession).unwrap();
    let peers = Arc::new(Peers::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let collect = || while runtime.block_on(world.meta.collect(&*peers)) > 0 {};
    // Not before the batch is durable, and not before two lease terms are over.
    collect();
    world.sync();
    collect();
    assert!(peers.0.lock().0.is_empty() && peers.0.lock().1.is_empty());
    world.advance_ms(8_000);
    world.server(7);
    world.collect(&*peers);
    let (deleted, purged) = &*peers.0.lock();
    assert_eq!(*deleted, [nth(ids, 0)]);
    assert_eq!(*purged, [(ids, vec![nth(ids, 1)])]);
    let Done::Collected { deleted, waiting } = world.admin(Op::Collect) else { panic!() };
    assert_eq!((deleted, waiting), (1, 0));
    assert_eq!(world.problems(), Vec::<String>::new());
}

/// Found by a storm: after a pause of the metadata service all data servers counted as silent, and writers heard that there was
/// no space.
#[test]
fn who_spoke_while_the_service_stood_still_is_not_taken_for_silent() {
    let world = World::new();
    let mut a = world.client();
    let f = a.file(&world, "f");
    let (session, timeout) = (world.config.session_ms, world.config.server_timeout_ms);
    world.advance_ms(100);
    world.stand_still_ms(u64::from(session) + u64::from(timeout) * 2);
    assert_eq!(a.getattr(&world, f).ino, f, "the session goes on");
    let servers = world.placement().servers;
    assert!(servers.iter().all(|server| server.up), "{servers:?}");
}

#[test]
fn a_full_metadata_disk_can_be_mounted_and_emptied() {
    let world = World::new();
    let mut a = world.client();
    for n in 0..10 {
        a.file(&world, &format!("f{n}"));
    }
    a.call(&world, Op::CloseSession).unwrap();
    let world = world.restart();
    // The log's segments are all that is left.
    world.disk.set_capacity((8 << 20) + (64 << 10));
    let mut b = world.client();
    assert_eq!(b.try_make(&world, Ino::ROOT, "more", Kind::File).unwrap_err().code, Code::NoSpace);
    for n in 0..10 {
        let ino = b.lookup(&world, Ino::ROOT, &format!("f{n}")).unwrap().ino;
        let name = raw(&format!("f{n}"));
        b.call(&world, Op::Unlink { parent: Ino::ROOT, name, idle: Some(ino) }).unwrap();
    }
    assert_eq!(b.names(&world, Ino::ROOT), Vec::<String>::new());
}

#[test]
fn there_are_connections_for_all_sessions() {
    let rpc = torchfs_rpc::Config::default();
    assert!(rpc.connections_max > torchfs_meta::Config::default().sessions_max * rpc.lanes);
}

fn lock(ino: Ino, ty: LockType, start: u64, end: u64, wait: bool) -> Op {
    let lock = FileLock { kind: LockKind::Posix, ty, owner: 1, pid: 2, start, end };
    Op::Lock { ino, lock, wait }
}

#[test]
fn a_wait_for_a_lock_that_was_given_up_is_never_granted() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.call(&world, lock(f, LockType::Write, 0, 99, false)).unwrap();
    // Its cancel is late, or its connection was left: it still waits when its owner has asked for something else there.
    let mut given_up = b.start(&world, lock(f, LockType::Write, 0, 9, true));
    let mut elsewhere = b.start(&world, lock(f, LockType::Write, 20, 29, true));
    assert!(!given_up.is_ready() && !elsewhere.is_ready());
    let unread = b.request(lock(f, LockType::Write, 0, 9, true));
    b.call(&world, lock(f, LockType::Unlock, 5, 5, false)).unwrap();
    assert_eq!(given_up.ready().result.unwrap_err().code, Code::WouldBlock);
    assert!(!elsewhere.is_ready(), "this one still waits");
    a.call(&world, lock(f, LockType::Unlock, 0, 99, false)).unwrap();
    elsewhere.settle(&world).result.unwrap();
    // Its request itself comes late, over the connection that was left.
    let late = world.start(unread).ready();
    assert_eq!(late.result.unwrap_err().code, Code::WouldBlock);
    a.call(&world, lock(f, LockType::Write, 0, 19, false)).unwrap();
    assert_eq!(a.refused(&world, lock(f, LockType::Write, 20, 20, false)), Code::WouldBlock);
}

#[test]
fn a_lock_that_an_ended_session_had_is_told_to_the_next_when_that_end_is_durable() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.call(&world, lock(f, LockType::Write, 0, 9, false)).unwrap();
    world.sync();
    let mut evicted = world.ask(Op::Evict { session: a.id });
    assert!(!evicted.is_ready());
    let mut early = b.start(&world, lock(f, LockType::Write, 0, 9, false));
    assert!(!early.is_ready(), "a crash would give it back to the other session");
    world.sync();
    early.ready().result.unwrap();
}

#[test]
fn the_ranges_of_a_session_stay_few_however_many_ids_it_gets() {
    let world = World::new();
    world.server(1);
    let (mut a, mut b) = (world.client(), world.client());
    let mut granted = std::collections::BTreeSet::new();
    let ranges = |world: &World, session| {
        let all = key::ranges(VolumeId(1), session);
        let mut count = 0;
        let visit = &mut |_: &[u8], _: &[u8]| {
            count += 1;
            std::ops::ControlFlow::Continue(())
        };
        world.engine.scan(&all, &key::after(&all), false, visit).unwrap();
        count
    };
    for _ in 0..100 {
        for client in [&mut a, &mut b] {
            client.watermark = client.seq;
            let ids = client.ids(&world, 4_096);
            assert!((0..4_096).all(|n| granted.insert(nth(ids, n))), "an id is granted once");
        }
    }
    assert_eq!((ranges(&world, a.id), ranges(&world, b.id)), (1, 1));
    // Ids of one session do not pass for the other's.
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let write = |id| vec![RangeOp::Write { offset: 0, len: 4, source: within(id, 0) }];
    let (mine, others) = (a.ids(&world, 1).first, b.ids(&world, 1).first);
    assert_eq!(a.refused(&world, commit(f, grant, vec![block(others, 4)], write(others))), Code::Fenced);
    a.call(&world, commit(f, grant, vec![block(mine, 4)], write(mine))).unwrap();
    let world = world.restart();
    assert_eq!((ranges(&world, a.id), world.problems()), (1, vec![]));
}

#[test]
fn a_session_with_very_many_locks_ends_and_all_of_them_go_also_after_a_crash() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let files: Vec<Ino> = (0..3).map(|n| a.file(&world, &format!("f{n}"))).collect();
    // Written as the service writes them, but faster. More than one batch could release.
    for file in &files {
        let mut batch = torchfs_engine::Batch::at(0);
        for n in 0..40_000u64 {
            let lock = record::Lock { born: Seq(1), ty: LockType::Write, end: n * 10, pid: 1 };
            let at = key::lock(VolumeId(1), *file, LockKind::Posix, a.id, 5, n * 10);
            batch.put(at, torchfs_proto::msg::encode(&lock));
        }
        world.engine.order(batch).unwrap();
    }
    let world = world.restart();
    a.call(&world, Op::ResumeSession).unwrap();
    a.call(&world, Op::Reclaim { leases: vec![], open: vec![], last: true }).unwrap();
    a.call(&world, Op::CloseSession).unwrap();
    world.sync();
    // Not all of them are gone with it; a restart finds the others.
    let world = world.power_cut(1);
    b.call(&world, Op::ResumeSession).unwrap();
    b.call(&world, Op::Reclaim { leases: vec![], open: vec![], last: true }).unwrap();
    while world.meta.run_chores(100) > 0 {}
    let lock =
        FileLock { kind: LockKind::Posix, ty: LockType::Write, owner: 1, pid: 1, start: 0, end: u64::MAX };
    for ino in files {
        b.call(&world, Op::Lock { ino, lock: lock.clone(), wait: false }).unwrap();
    }
    assert_eq!(world.problems(), Vec::<String>::new());
}
