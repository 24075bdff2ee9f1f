//! Files without a name, while somebody may have them open.

use torchfs_meta::Config;
use torchfs_proto::attr::Kind;
use torchfs_proto::extent::{RangeOp, Source};
use torchfs_proto::msg::meta::{Done, Event, Make, Op, Reply};
use torchfs_proto::{Code, Ino, VolumeId, key};

use crate::content::{block, commit, nth, within};
use crate::watched::{Scan, Watched};
use crate::world::{World, raw};

fn inodes(world: &World) -> u64 {
    while world.meta.run_chores(100) > 0 {}
    match world.admin(Op::Status) {
        Done::Status(status) => status.inodes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_unlinked_file_lives_until_every_session_has_released_it() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    b.lookup(&world, Ino::ROOT, "f").unwrap();
    let mut going = a.start(&world, Op::Unlink { parent: Ino::ROOT, name: raw("f"), idle: Some(f) });
    assert!(!going.is_ready(), "b's leases are in the way");
    b.obey(&world, false);
    let Done::Removed { attr, held } = going.ready().result.unwrap() else { panic!() };
    assert_eq!((attr.nlink, held), (0, false));
    assert_eq!(b.events(&world, 0).pop().unwrap().1, Event::Orphaned { ino: f });
    assert_eq!(b.getattr(&world, f).nlink, 0);
    assert_eq!(inodes(&world), 2);
    b.call(&world, Op::Release { inos: vec![f] }).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(b.refused(&world, Op::GetAttr { ino: f }), Code::Stale);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn who_forgets_a_file_and_looks_it_up_again_while_it_is_removed_keeps_it() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    let number = |reply: Reply| reply.grants.iter().find(|grant| grant.ino == f).expect("a number").number;
    let lookup = || Op::Lookup { parent: Ino::ROOT, name: raw("f") };
    let first = number(b.reply(&world, lookup()));
    let mut going = a.start(&world, Op::Unlink { parent: Ino::ROOT, name: raw("f"), idle: Some(f) });
    assert!(!going.is_ready(), "b's leases are in the way");
    // The answer can grant nothing now; still it is newer than what b says of the one before.
    assert!(number(b.reply(&world, lookup())) > first);
    b.call(&world, Op::Forget { leases: vec![(f, u8::MAX, first)] }).unwrap();
    b.obey(&world, false);
    let Done::Removed { attr, .. } = going.ready().result.unwrap() else { panic!() };
    assert_eq!(attr.nlink, 0);
    assert_eq!(b.events(&world, 0).pop().unwrap().1, Event::Orphaned { ino: f });
    b.call(&world, Op::OpenData { ino: f, write: false }).unwrap();
    b.call(&world, Op::Release { inos: vec![f] }).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_file_without_a_name_is_opened_only_by_who_holds_it() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.unlink(&world, Ino::ROOT, "f").unwrap();
    a.call(&world, Op::OpenData { ino: f, write: false }).unwrap();
    assert_eq!(b.refused(&world, Op::OpenData { ino: f, write: false }), Code::Stale);
    a.call(&world, Op::Release { inos: vec![f] }).unwrap();
    assert_eq!(inodes(&world), 1);
}

#[test]
fn the_caller_is_told_when_it_is_held_to_have_the_file_open() {
    let world = World::new();
    let mut a = world.client();
    let f = a.file(&world, "f");
    let (attr, held) = a.unlink(&world, Ino::ROOT, "f").unwrap();
    assert_eq!((attr.nlink, held), (0, true));
    assert_eq!(inodes(&world), 2);
    a.call(&world, Op::Release { inos: vec![f] }).unwrap();
    assert_eq!(inodes(&world), 1);
}

#[test]
fn the_end_of_a_session_releases_its_orphans() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    a.unlink(&world, Ino::ROOT, "f").unwrap();
    let world = world.restart();
    assert_eq!(inodes(&world), 2);
    for client in [&mut a, &mut b] {
        client.call(&world, Op::ResumeSession).unwrap();
        client.call(&world, Op::Reclaim { leases: vec![], open: vec![f], last: true }).unwrap();
    }
    a.call(&world, Op::CloseSession).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(b.refused(&world, Op::GetAttr { ino: f }), Code::Stale);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn who_did_not_hear_that_files_lost_their_names_is_told_by_the_next_leader() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let names: Vec<String> = (0..300).map(|n| format!("f{n}")).collect();
    let files: Vec<Ino> = names.iter().map(|name| a.file(&world, name)).collect();
    for name in &names {
        b.lookup(&world, Ino::ROOT, name).unwrap();
    }
    // It is cut off; its leases end, and its session does not.
    world.advance_ms(5_000);
    for (name, ino) in names.iter().zip(&files) {
        let op = Op::Unlink { parent: Ino::ROOT, name: raw(name), idle: Some(*ino) };
        a.call(&world, op).unwrap();
    }
    let world = world.restart();
    for client in [&mut a, &mut b] {
        client.call(&world, Op::ResumeSession).unwrap();
        client.call(&world, Op::Reclaim { leases: vec![], open: vec![], last: true }).unwrap();
    }
    assert_eq!(inodes(&world), 301, "b may have them open");
    assert_eq!(a.events(&world, 0), []);
    let told: Vec<Ino> = b
        .events(&world, 0)
        .into_iter()
        .map(|(_, event)| match event {
            Event::Orphaned { ino } => ino,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, files);
    b.call(&world, Op::Release { inos: told }).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_file_without_a_name_can_get_one() {
    let world = World::new();
    let mut a = world.client();
    let make = Make {
        parent: Ino::ROOT,
        name: raw(""),
        kind: Kind::File,
        mode: 0o600,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: raw(""),
        exclusive: false,
        open: true,
    };
    let reply = a.reply(&world, Op::Make(make));
    let Done::Made { attr, .. } = reply.result.unwrap() else { panic!() };
    let grant = reply.grants.iter().find(|grant| grant.ino == attr.ino).unwrap().number;
    let write = vec![RangeOp::Append { len: 2, source: Source::Inline(raw("hi")) }];
    a.call(&world, commit(attr.ino, grant, vec![], write)).unwrap();
    assert_eq!(world.problems(), Vec::<String>::new());
    a.call(&world, Op::Link { ino: attr.ino, parent: Ino::ROOT, name: raw("now") }).unwrap();
    assert_eq!(a.lookup(&world, Ino::ROOT, "now").unwrap().size, 2);
    a.call(&world, Op::CloseSession).unwrap();
    let mut b = world.client();
    assert_eq!(b.lookup(&world, Ino::ROOT, "now").unwrap().nlink, 1);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_removed_folder_that_is_open_takes_no_names() {
    let world = World::new();
    let mut a = world.client();
    let d = a.dir(&world, "d");
    a.rmdir(&world, Ino::ROOT, "d").unwrap();
    assert_eq!(a.getattr(&world, d).nlink, 0);
    assert_eq!(a.try_make(&world, d, "f", Kind::File).unwrap_err().code, Code::NotFound);
    a.call(&world, Op::Release { inos: vec![d] }).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn many_large_files_are_released_in_one_request() {
    let world = World::new();
    world.server(1);
    let mut a = world.client();
    let mut open = Vec::new();
    for n in 0..160 {
        let name = format!("f{n}");
        let ino = a.file(&world, &name);
        let (grant, ids) = (a.open_write(&world, ino), a.ids(&world, 500));
        let blocks = (0..500).map(|n| block(nth(ids, n), 10)).collect();
        let write = |n| RangeOp::Write { offset: n * 20, len: 10, source: within(nth(ids, n), 0) };
        a.call(&world, commit(ino, grant, blocks, (0..500).map(write).collect())).unwrap();
        assert!(a.unlink(&world, Ino::ROOT, &name).unwrap().1, "it is open here");
        a.watermark = a.seq;
        open.push(ino);
    }
    a.call(&world, Op::Release { inos: open }).unwrap();
    assert_eq!(inodes(&world), 1);
    assert_eq!(world.blocks(), []);
    assert_eq!(world.problems(), Vec::<String>::new());
}

/// A file of many runs that is unlinked; the upkeep has begun to remove it.
fn leaving(world: &World, runs: u64) -> Ino {
    let mut a = world.client();
    let f = a.file(world, "f");
    let grant = a.open_write(world, f);
    let write = |n| RangeOp::Write { offset: n * 20, len: 1, source: Source::Inline(raw("x")) };
    a.call(world, commit(f, grant, vec![], (0..runs).map(write).collect())).unwrap();
    a.call(world, Op::Unlink { parent: Ino::ROOT, name: raw("f"), idle: Some(f) }).unwrap();
    f
}

/// The scans over the runs of a file: how far from its beginning they began, in bytes.
fn begins(scans: &[Scan], ino: Ino) -> Vec<u64> {
    let runs = key::extents(VolumeId(1), ino);
    let of = scans.iter().filter(|(from, _)| from.starts_with(&runs));
    of.filter_map(|(from, _)| key::Parts::of(from).and_then(|parts| parts.u64_at(8))).collect()
}

#[test]
fn removing_a_large_file_goes_on_where_it_was() {
    let (world, engine) = Watched::world(Config { trim_extents: 10, ..Config::default() });
    while world.meta.run_chores(1) > 0 {}
    let f = leaving(&world, 100);
    engine.scans();
    while world.meta.run_chores(1) > 0 {}
    let began = begins(&engine.scans(), f);
    assert_eq!(began, (0..10).map(|piece| piece * 200).collect::<Vec<_>>());
    assert_eq!(inodes(&world), 1);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_tick_works_no_longer_than_it_may() {
    let (world, engine) = Watched::world(Config { trim_extents: 10, chores_ms: 0, ..Config::default() });
    while world.meta.run_chores(1) > 0 {}
    let f = leaving(&world, 100);
    engine.scans();
    for ticks in 1..=3 {
        world.meta.tick();
        assert!(begins(&engine.scans(), f).len() <= 1, "tick {ticks}");
    }
    assert!(world.meta.run_chores(1) > 0, "there is more to do");
}
