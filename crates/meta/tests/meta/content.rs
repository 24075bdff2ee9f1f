//! Commits, extents and copies, against a file that is an array of bytes.

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use torchfs_meta::Config;
use torchfs_proto::attr::SetAttr;
use torchfs_proto::extent::{Extent, NewBlock, RangeOp, Source};
use torchfs_proto::msg::meta::{Commit, Done, Event, Op};
use torchfs_proto::{BlockId, Code, IdRange, Ino, LayoutId};

use crate::world::{Client, World, raw};

pub fn block(id: BlockId, len: u32) -> NewBlock {
    NewBlock { id, len, layout: LayoutId(1), stored: u64::from(len), ..NewBlock::default() }
}

pub fn nth(range: IdRange, n: u64) -> BlockId {
    BlockId { counter: range.first.counter + n, ..range.first }
}

pub fn within(id: BlockId, offset: u32) -> Source {
    Source::Block { id, offset, block_len: 0, layout: LayoutId(1), substitutes: vec![] }
}

pub fn commit(ino: Ino, grant: u64, blocks: Vec<NewBlock>, ranges: Vec<RangeOp>) -> Op {
    Op::Commit(Commit {
        ino,
        grant,
        blocks,
        ranges,
        mtime: None,
        kill_privileges: false,
        expect: None,
        ends: None,
    })
}

/// Names a block that was put, as the whole content of a file.
pub fn commit_block(world: &World, client: &mut Client, ino: Ino, grant: u64, block: NewBlock) {
    let range = RangeOp::Write { offset: 0, len: u64::from(block.len), source: within(block.id, 0) };
    client.call(world, commit(ino, grant, vec![block], vec![range])).unwrap();
}

fn extents(client: &mut Client, world: &World, ino: Ino) -> (Vec<Extent>, u64) {
    let mut all = Vec::new();
    let mut from = 0;
    loop {
        match client.call(world, Op::Extents { ino, from, to: u64::MAX }).unwrap() {
            Done::Extents { extents, upto, size, .. } => {
                all.extend(extents);
                if upto == u64::MAX {
                    return (all, size);
                }
                from = upto;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The bytes of every block the test has put, by id.
type Blocks = HashMap<BlockId, Vec<u8>>;

fn content(client: &mut Client, world: &World, ino: Ino, blocks: &Blocks) -> Vec<u8> {
    let (extents, size) = extents(client, world, ino);
    let mut bytes = vec![0; size as usize];
    let mut last = 0;
    for extent in extents {
        assert!(extent.offset >= last, "extents are sorted and do not overlap");
        last = extent.offset + extent.len;
        let range = extent.offset as usize..last as usize;
        match extent.source {
            Source::Hole => {}
            Source::Inline(inline) => bytes[range].copy_from_slice(&inline),
            Source::Block { id, offset, block_len, .. } => {
                assert_eq!(block_len as usize, blocks[&id].len());
                bytes[range].copy_from_slice(&blocks[&id][offset as usize..][..extent.len as usize]);
            }
        }
    }
    bytes
}

fn write_model(model: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    if model.len() < offset + bytes.len() {
        model.resize(offset + bytes.len(), 0);
    }
    model[offset..offset + bytes.len()].copy_from_slice(bytes);
}

fn one_file_against_bytes(seed: u64, steps: usize) {
    const MAX: u64 = 4_000;
    let mut rng = StdRng::seed_from_u64(seed);
    // Small bounds, so that cuts and work in pieces happen all the time.
    let world = World::with(Config { trim_extents: 3, ..Config::default() });
    world.server(1);
    let mut a = world.client();
    let files = [a.file(&world, "f"), a.file(&world, "g")];
    let grants = files.map(|ino| a.open_write(&world, ino));
    let mut models = [Vec::new(), Vec::new()];
    let mut blocks = Blocks::new();
    let ids = a.ids(&world, 60_000);
    let mut next = 0;
    for step in 0..steps {
        let which = rng.random_range(0..2);
        let (ino, grant) = (files[which], grants[which]);
        match rng.random_range(0..10) {
            0 => {
                let size = rng.random_range(0..MAX);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                a.call(&world, Op::SetAttr { ino, set }).unwrap();
                models[which].resize(size as usize, 0);
            }
            1 => {
                let from = rng.random_range(0..2);
                let (at, to) = (rng.random_range(0..MAX), rng.random_range(0..MAX));
                let len = rng.random_range(1..600);
                let op = Op::CopyRange {
                    from: files[from],
                    from_offset: at,
                    to: ino,
                    to_offset: to,
                    len,
                    grant,
                    mtime: None,
                };
                let had = models[from].len() as u64;
                let len = len.min(had.saturating_sub(at));
                let overlap = from == which && at < to + len && to < at + len;
                match a.call(&world, op) {
                    Ok(Done::Committed { copied, .. }) => {
                        assert!(!overlap);
                        assert_eq!(copied, len);
                        if len > 0 {
                            let bytes = models[from][at as usize..(at + len) as usize].to_vec();
                            write_model(&mut models[which], to as usize, &bytes);
                        }
                    }
                    Err(fault) => assert!(overlap && fault.code == Code::Invalid, "{fault:?}"),
                    other => panic!("{other:?}"),
                }
            }
            _ => {
                let mut new = Vec::new();
                let mut ranges = Vec::new();
                let mut appended = Vec::new();
                let model = &mut models[which];
                for _ in 0..rng.random_range(1..6) {
                    let offset = rng.random_range(0..MAX);
                    match rng.random_range(0..8) {
                        0 => {
                            let len = rng.random_range(1..1_500);
                            ranges.push(RangeOp::Punch { offset, len });
                            let end = (offset + len).min(model.len() as u64) as usize;
                            if (offset as usize) < end {
                                model[offset as usize..end].fill(0);
                            }
                        }
                        1 => {
                            ranges.push(RangeOp::Truncate { size: offset });
                            model.resize(offset as usize, 0);
                        }
                        2 => {
                            ranges.push(RangeOp::Extend { size: offset });
                            let len = model.len().max(offset as usize);
                            model.resize(len, 0);
                        }
                        3 => {
                            let bytes: Vec<u8> = (0..rng.random_range(1..20)).map(|_| rng.random()).collect();
                            let (len, source) = (bytes.len() as u64, Source::Inline(bytes.clone().into()));
                            ranges.push(RangeOp::Write { offset, len, source });
                            write_model(model, offset as usize, &bytes);
                        }
                        4 => {
                            let len = rng.random_range(1..300);
                            ranges.push(RangeOp::Write { offset, len, source: Source::Hole });
                            write_model(model, offset as usize, &vec![0; len as usize]);
                        }
                        kind => {
                            let id = nth(ids, next);
                            next += 1;
                            let bytes: Vec<u8> =
                                (0..rng.random_range(1..400)).map(|_| rng.random()).collect();
                            let skip = rng.random_range(0..bytes.len());
                            let part = bytes[skip..].to_vec();
                            let (len, source) = (part.len() as u64, within(id, skip as u32));
                            new.push(block(id, bytes.len() as u32));
                            blocks.insert(id, bytes);
                            if kind == 5 && model.len() as u64 + len < MAX * 2 {
                                appended.push(model.len() as u64);
                                ranges.push(RangeOp::Append { len, source });
                                let end = model.len();
                                write_model(model, end, &part);
                            } else {
                                ranges.push(RangeOp::Write { offset, len, source });
                                write_model(model, offset as usize, &part);
                            }
                        }
                    }
                }
                let done = a.call(&world, commit(ino, grant, new, ranges)).unwrap();
                let Done::Committed { attr, appended: landed, .. } = done else { panic!() };
                assert_eq!(landed, appended, "seed {seed} step {step}");
                assert_eq!(attr.size as usize, models[which].len(), "seed {seed} step {step}");
            }
        }
        if rng.random_range(0..4) == 0 {
            world.meta.run_chores(1);
        }
        a.watermark = a.seq;
        a.renew(&world);
        if step % 7 == 0 || step + 1 == steps {
            for which in 0..2 {
                let bytes = content(&mut a, &world, files[which], &blocks);
                assert!(bytes == models[which], "seed {seed} step {step}: file {which} differs");
            }
        }
        if step % 50 == 49 {
            assert_eq!(world.problems(), Vec::<String>::new(), "seed {seed} step {step}");
        }
    }
    // Without files there are no blocks.
    for name in ["f", "g"] {
        a.call(&world, Op::Unlink { parent: Ino::ROOT, name: raw(name), idle: None }).unwrap();
    }
    a.call(&world, Op::Release { inos: files.to_vec() }).unwrap();
    assert_eq!(world.problems(), Vec::<String>::new(), "seed {seed}");
    let Done::Status(status) = world.admin(Op::Status) else { panic!() };
    assert_eq!((status.inodes, status.blocks, status.bytes), (1, 0, 0), "seed {seed}");
    assert_eq!(status.dead, next, "every block that was named is dead once");
}

#[test]
fn extents_are_what_an_array_of_bytes_would_be() {
    for seed in torchfs_fuzz::seeds(1, 12, 240) {
        one_file_against_bytes(seed, 150);
    }
}

fn landed(done: Done) -> Vec<u64> {
    match done {
        Done::Committed { appended, .. } => appended,
        other => panic!("{other:?}"),
    }
}

/// Found by a storm: changes were told again after a restart for longer than a lease lasts, and refused.
#[test]
fn a_commit_under_a_lease_that_ran_out_stands_unless_another_may_write_since() {
    let world = World::new();
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    world.sync();
    world.advance_ms(u64::from(world.config.lease_ms) * 2);
    b.call(&world, Op::Renew).unwrap();
    let append =
        |text: &str| vec![RangeOp::Append { len: text.len() as u64, source: Source::Inline(raw(text)) }];
    // Another one reads meanwhile: it is told first.
    b.call(&world, Op::OpenData { ino: f, write: false }).unwrap();
    let mut committing = a.start(&world, commit(f, grant, vec![], append("late")));
    assert!(!committing.is_ready());
    b.obey(&world, false);
    committing.ready().result.unwrap();
    world.sync();
    b.open_write(&world, f);
    assert_eq!(a.refused(&world, commit(f, grant, vec![], append("too late"))), Code::Fenced);
}

#[test]
fn appends_land_where_the_file_ends_now() {
    let world = World::new();
    world.server(1);
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    let one = a.open_write(&world, f);
    world.sync();
    let mut opening = b.start(&world, Op::OpenData { ino: f, write: true });
    assert!(!opening.is_ready());
    a.obey(&world, true);
    assert!(opening.is_ready());
    let two = opening.ready().grants[0].number;
    let append =
        |text: &str| vec![RangeOp::Append { len: text.len() as u64, source: Source::Inline(raw(text)) }];
    assert_eq!(a.refused(&world, commit(f, one, vec![], append("x"))), Code::Fenced);
    let one = a.open_write(&world, f);
    a.call(&world, commit(f, one, vec![], append("hello "))).unwrap();
    // The attributes that a got when it made the file are recalled once; while both write, nobody gets them again.
    let mut committing = b.start(&world, commit(f, two, vec![], append("world")));
    assert!(!committing.is_ready());
    a.obey(&world, true);
    assert_eq!(landed(committing.settle(&world).result.unwrap()), [6]);
    a.call(&world, Op::GetAttr { ino: f }).unwrap();
    assert_eq!(landed(b.call(&world, commit(f, two, vec![], append("!"))).unwrap()), [11]);
    assert_eq!(content(&mut a, &world, f, &Blocks::new()), b"hello world!");
    assert!(a.obey(&world, true).contains(&Event::Changed { ino: f }));
}

#[test]
fn a_commit_with_a_foreign_or_known_block_is_refused_whole() {
    let world = World::new();
    world.server(1);
    let (mut a, mut b) = (world.client(), world.client());
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let (mine, theirs) = (a.ids(&world, 10), b.ids(&world, 10));
    let write = |id| vec![RangeOp::Write { offset: 0, len: 5, source: within(id, 0) }];
    let both = vec![block(nth(mine, 0), 5), block(nth(theirs, 0), 5)];
    assert_eq!(a.refused(&world, commit(f, grant, both, write(nth(mine, 0)))), Code::Fenced);
    assert_eq!(a.getattr(&world, f).size, 0);
    a.call(&world, commit(f, grant, vec![block(nth(mine, 1), 5)], write(nth(mine, 1)))).unwrap();
    let again = vec![block(nth(mine, 1), 5)];
    assert_eq!(a.refused(&world, commit(f, grant, again, write(nth(mine, 1)))), Code::Invalid);
    assert_eq!(a.refused(&world, commit(f, grant, vec![], write(nth(mine, 7)))), Code::Gone);
    let beyond = vec![RangeOp::Write { offset: 0, len: 5, source: within(nth(mine, 1), 1) }];
    assert_eq!(a.refused(&world, commit(f, grant, vec![], beyond)), Code::Invalid);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_compaction_commits_only_if_nothing_changed() {
    let world = World::new();
    world.server(1);
    let mut a = world.client();
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let ids = a.ids(&world, 10);
    let new = vec![block(nth(ids, 0), 8), block(nth(ids, 1), 8)];
    let ranges = vec![
        RangeOp::Write { offset: 0, len: 8, source: within(nth(ids, 0), 0) },
        RangeOp::Write { offset: 8, len: 8, source: within(nth(ids, 1), 0) },
    ];
    a.call(&world, commit(f, grant, new, ranges)).unwrap();
    let before = a.getattr(&world, f);
    let (expect, _) = extents(&mut a, &world, f);
    let compact = |id, expect| {
        Op::Commit(Commit {
            ino: f,
            grant: 0,
            blocks: vec![block(id, 16)],
            ranges: vec![RangeOp::Write { offset: 0, len: 16, source: within(id, 0) }],
            mtime: None,
            kill_privileges: false,
            expect: Some(expect),
            ends: None,
        })
    };
    a.call(&world, compact(nth(ids, 2), expect.clone())).unwrap();
    assert_eq!(a.getattr(&world, f), before);
    assert_eq!(a.refused(&world, compact(nth(ids, 3), expect)), Code::Busy);
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_large_truncation_is_seen_at_once_and_finished_after_a_crash() {
    let world = World::with(Config { trim_extents: 4, ..Config::default() });
    world.server(1);
    let mut a = world.client();
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    let ids = a.ids(&world, 100);
    let new: Vec<NewBlock> = (0..100).map(|n| block(nth(ids, n), 10)).collect();
    let ranges = (0..100)
        .map(|n| RangeOp::Write { offset: n * 20, len: 10, source: within(nth(ids, n), 0) })
        .collect();
    a.call(&world, commit(f, grant, new, ranges)).unwrap();
    let set = SetAttr { size: Some(25), ..SetAttr::default() };
    a.call(&world, Op::SetAttr { ino: f, set }).unwrap();
    let (left, size) = extents(&mut a, &world, f);
    assert_eq!((left.len(), size), (2, 25));
    let world = world.restart();
    let mut b = world.client();
    world.advance_ms(5_000);
    b.renew(&world);
    let (left, size) = extents(&mut b, &world, f);
    assert_eq!((left.len(), size), (2, 25));
    // Growing shows zeros, never what was cut off.
    let set = SetAttr { size: Some(2_000), ..SetAttr::default() };
    b.call(&world, Op::SetAttr { ino: f, set }).unwrap();
    assert_eq!(extents(&mut b, &world, f).0.len(), 2);
    assert_eq!(world.problems(), Vec::<String>::new());
    let Done::Status(status) = world.admin(Op::Status) else { panic!() };
    assert_eq!((status.blocks, status.dead), (2, 98));
}

#[test]
fn what_is_cut_off_twice_at_one_place_is_gone_twice() {
    let world = World::with(Config { trim_extents: 4, ..Config::default() });
    world.server(1);
    let mut a = world.client();
    let f = a.file(&world, "f");
    let grant = a.open_write(&world, f);
    while world.meta.run_chores(1) > 0 {}
    let fill = |a: &mut Client| {
        let ids = a.ids(&world, 100);
        let new: Vec<NewBlock> = (0..100).map(|n| block(nth(ids, n), 10)).collect();
        let write = |n| RangeOp::Write { offset: n * 20, len: 10, source: within(nth(ids, n), 0) };
        a.call(&world, commit(f, grant, new, (0..100).map(write).collect())).unwrap();
    };
    let resize = |a: &mut Client, size| {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        a.call(&world, Op::SetAttr { ino: f, set }).unwrap();
    };
    fill(&mut a);
    // The upkeep has come half the way when the file is filled and cut again.
    resize(&mut a, 25);
    world.meta.run_chores(10);
    assert!(world.meta.run_chores(0) > 0);
    fill(&mut a);
    resize(&mut a, 25);
    while world.meta.run_chores(1) > 0 {}
    resize(&mut a, 2_000);
    assert_eq!(extents(&mut a, &world, f).0.len(), 2, "what was cut off is back");
    // The same where two cuts are on the list at once: the first one to end does the work of both.
    fill(&mut a);
    resize(&mut a, 60);
    resize(&mut a, 25);
    world.meta.run_chores(8);
    while a.getattr(&world, f).stored > 15 {
        world.meta.run_chores(1);
    }
    assert!(world.meta.run_chores(0) > 0);
    fill(&mut a);
    resize(&mut a, 25);
    while world.meta.run_chores(1) > 0 {}
    resize(&mut a, 2_000);
    assert_eq!(extents(&mut a, &world, f).0.len(), 2, "what was cut off is back");
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn a_copy_onto_a_fragmented_file_goes_as_far_as_a_batch_takes() {
    let world = World::new();
    world.server(1);
    let mut a = world.client();
    let (from, to) = (a.file(&world, "from"), a.file(&world, "to"));
    const RUNS: u64 = 60_000;
    let (grant, ids) = (a.open_write(&world, from), a.ids(&world, 1));
    let whole = vec![RangeOp::Write { offset: 0, len: RUNS * 20, source: within(nth(ids, 0), 0) }];
    a.call(&world, commit(from, grant, vec![block(nth(ids, 0), (RUNS * 20) as u32)], whole)).unwrap();
    let (grant, ids) = (a.open_write(&world, to), a.ids(&world, RUNS as u32));
    for first in (0..RUNS).step_by(1_000) {
        a.watermark = a.seq;
        let new = (first..first + 1_000).map(|n| block(nth(ids, n), 10)).collect();
        let write = |n| RangeOp::Write { offset: n * 20, len: 10, source: within(nth(ids, n), 0) };
        a.call(&world, commit(to, grant, new, (first..first + 1_000).map(write).collect())).unwrap();
    }
    let mut at = 0;
    while at < RUNS * 20 {
        let (len, mtime) = (RUNS * 20 - at, None);
        let op = Op::CopyRange { from, from_offset: at, to, to_offset: at, len, grant, mtime };
        a.watermark = a.seq;
        match a.call(&world, op).unwrap() {
            Done::Committed { copied, .. } => {
                assert!(copied > 0);
                at += copied;
            }
            other => panic!("{other:?}"),
        }
    }
    let (extents, size) = extents(&mut a, &world, to);
    assert_eq!(size, RUNS * 20);
    assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), RUNS * 20);
    assert_eq!(world.problems(), Vec::<String>::new());
}
