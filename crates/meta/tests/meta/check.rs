//! What a check must name: each test breaks one thing in the records and expects a sentence about exactly that.

use minicbor::{Decode, Encode};
use torchfs_engine::{Batch, Engine};
use torchfs_meta::Config;
use torchfs_proto::attr::Kind;
use torchfs_proto::layout::{Group, Scheme};
use torchfs_proto::msg::meta::{Done, Op, Strays, VolumeOp, VolumePolicy};
use torchfs_proto::record::{self, ClusterCounters, LayoutRecord};
use torchfs_proto::{BlockId, Code, Ino, LayoutId, ServerId, VolumeId, key, msg};

use crate::servers::{Servers, Writer};
use crate::world::World;

const VOLUME: VolumeId = VolumeId(1);
const LEN: u32 = 1 << 20;

/// Three servers, a file of a few blocks, and nothing wrong.
fn sound() -> (World, Servers, Writer) {
    let scheme = Some("replicas:2".parse::<Scheme>().unwrap());
    let world = World::with(Config { redundancy: scheme, groups: 4, ..Config::default() });
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 6, LEN);
    servers.settle(&world);
    assert_eq!(world.problems(), Vec::<String>::new());
    (world, servers, writer)
}

/// Changes a record behind the service's back, which then starts again.
fn break_record<T>(world: World, at: Vec<u8>, change: impl FnOnce(&mut T)) -> World
where
    T: Encode<()> + for<'b> Decode<'b, ()>,
{
    let bytes = world.engine.get(&at).unwrap().expect("the record");
    let mut record: T = minicbor::decode(&bytes).unwrap();
    change(&mut record);
    let mut batch = Batch::at(0);
    batch.put(at, msg::encode(&record));
    world.engine.order(batch).unwrap();
    world.restart()
}

#[track_caller]
fn named(world: &World, about: &str) {
    let problems = world.problems();
    assert!(problems.iter().any(|problem| problem.contains(about)), "`{about}` is not in {problems:?}");
}

/// The layout in use, and a block in it.
fn layout(world: &World) -> (LayoutId, BlockId) {
    let blocks = world.blocks();
    (blocks[0].layout, blocks[0].id)
}

fn break_group(world: World, change: impl FnOnce(&mut Group)) -> World {
    let (id, block) = layout(&world);
    break_record(world, key::layout(id), |record: &mut LayoutRecord| {
        let number = record.layout.group_of(block);
        change(&mut record.layout.groups[number]);
    })
}

fn break_block(world: World, change: impl FnOnce(&mut record::Block)) -> World {
    let (_, block) = layout(&world);
    break_record(world, key::block(VOLUME, block), change)
}

#[test]
fn a_block_whose_layout_is_not_there_is_named() {
    let (world, ..) = sound();
    let world = break_block(world, |block| block.layout = LayoutId(99));
    named(&world, "names layout 99, which is not there");
}

#[test]
fn substitutes_in_a_group_that_is_not_marked_are_named() {
    let (world, ..) = sound();
    let world = break_block(world, |block| block.substitutes = Some(vec![(0, ServerId(3))]));
    named(&world, "is not marked for repair");
    let world = break_group(world, |group| group.dirty = true);
    assert_eq!(world.problems(), Vec::<String>::new(), "that is what a substitute looks like");
}

#[test]
fn substitutes_that_do_not_fit_the_scheme_are_named() {
    let (world, ..) = sound();
    let world = break_group(world, |group| group.dirty = true);
    let world = break_block(world, |block| block.substitutes = Some(vec![(2, ServerId(3))]));
    named(&world, "says where piece 2 is, but has 2 pieces");
    let twice = vec![(1, ServerId(3)), (1, ServerId(1))];
    let world = break_block(world, |block| block.substitutes = Some(twice));
    named(&world, "says twice where piece 1 is");
    let world = break_block(world, |block| block.substitutes = Some(Vec::new()));
    named(&world, "empty list of pieces");
}

#[test]
fn groups_that_do_not_fit_their_scheme_are_named() {
    let (world, ..) = sound();
    let world = break_group(world, |group| group.servers.truncate(1));
    named(&world, "has 1 servers, but replicas:2 needs 2");
    let (world, ..) = sound();
    let world = break_group(world, |group| group.servers[1] = group.servers[0]);
    named(&world, "names one of its servers twice");
    let (world, ..) = sound();
    let world = break_group(world, |group| (group.moving_to, group.dirty) = (vec![ServerId(3)], true));
    named(&world, "has 1 servers to move to");
    let (world, ..) = sound();
    let world = break_group(world, |group| group.moving_to = group.servers.iter().rev().copied().collect());
    named(&world, "moves, but is not marked for repair");
    let (world, ..) = sound();
    let world = break_group(world, |group| (group.former, group.dirty) = (vec![(5, ServerId(3))], true));
    named(&world, "former place of a piece that it does not have");
}

#[test]
fn groups_on_servers_that_are_removed_are_named() {
    let (world, ..) = sound();
    let world = break_group(world, |group| group.servers[0] = ServerId(77));
    named(&world, "belongs on data server 77, which is removed");
}

#[test]
fn a_layout_without_groups_or_successor_is_named() {
    let (world, ..) = sound();
    let (id, _) = layout(&world);
    let world = break_record(world, key::layout(id), |record: &mut LayoutRecord| {
        record.layout.replaced_by = Some(LayoutId(98));
    });
    named(&world, "is replaced by layout 98");
    let world = break_record(world, key::layout(id), |record: &mut LayoutRecord| {
        record.layout.groups.clear();
    });
    named(&world, "has no groups");
}

#[test]
fn numbers_that_were_never_given_out_are_named() {
    let (world, ..) = sound();
    let world = break_record(world, key::cluster_counters(), |counters: &mut ClusterCounters| {
        (counters.next_server, counters.next_layout) = (3, 1);
    });
    named(&world, "data server 3 was never given out");
    named(&world, "layout 1 was never given out");
}

#[test]
fn a_policy_whose_layout_is_not_there_is_named() {
    let (world, _, writer) = sound();
    let at = key::inode(VOLUME, writer.ino);
    let world = break_record(world, at, |inode: &mut record::Inode| inode.layout = Some(LayoutId(97)));
    named(&world, &format!("inode {} names layout 97, which is not there", writer.ino));
}

#[test]
fn records_that_are_not_counted_are_named() {
    let (world, ..) = sound();
    let counters = |change: fn(&mut record::Counters)| (key::counters(VOLUME), change);
    for (about, (at, change)) in [
        ("blocks", counters(|c| c.blocks += 1)),
        ("inodes", counters(|c| c.inodes += 1)),
        ("bytes in blocks", counters(|c| c.bytes += 1)),
        ("bytes on disks", counters(|c| c.stored += 1)),
        ("dead blocks", counters(|c| c.dead += 1)),
    ] {
        let (world, ..) = sound();
        let world = break_record(world, at, change);
        named(&world, &format!("{about} but has"));
    }
    let world = break_block(world, |block| block.references += 1);
    named(&world, "says 2 references, but 1 extents point into it");
}

#[test]
fn a_volume_that_is_being_removed_is_left_out() {
    let (world, ..) = sound();
    let create = VolumeOp::Create { name: "old".into(), policy: VolumePolicy::default() };
    let Done::Volumes(made) = world.admin(Op::Volume(create)) else { panic!() };
    let id = made[0].info.id;
    // Something is wrong with it, and it goes.
    let world = break_record(world, key::counters(id), |counters: &mut record::Counters| counters.blocks = 9);
    named(&world, "9 blocks but has 0");
    let world = break_record(world, key::volume(id), |volume: &mut record::Volume| volume.removed = true);
    assert_eq!(checked(&world), Vec::<String>::new());
}

/// A check without the upkeep that would remove the volume first.
fn checked(world: &World) -> Vec<String> {
    let (mut problems, mut cursor) = (Vec::new(), Vec::new().into());
    loop {
        let Done::Checked { problems: found, cursor: next, .. } = world.admin(Op::Check { cursor }) else {
            panic!()
        };
        problems.extend(found);
        if next.is_empty() {
            return problems;
        }
        cursor = next;
    }
}

#[test]
fn pieces_that_nobody_needs_are_told_from_those_in_flight_and_those_that_go_anyway() {
    let (world, servers, mut writer) = sound();
    let strays = |server, pieces| {
        let Done::Strays(strays) = world.admin(Op::Strays { server, pieces }) else { panic!() };
        strays
    };
    let nobody = BlockId { incarnation: 1, counter: 1 << 40 };
    let in_flight = writer.id();
    let (_, known) = layout(&world);
    let placement = world.placement();
    let layout = placement.layouts.last().unwrap();
    let target = layout.groups[layout.group_of(known)].target();
    let other = placement.servers.iter().map(|server| server.id).find(|id| !target.contains(id)).unwrap();
    let pieces = vec![(nobody, 0), (in_flight, 0), (known, 0)];
    let orphans = |orphans| Strays { orphans, ..Strays::default() };
    assert_eq!(strays(target[0], pieces.clone()), orphans(vec![(nobody, 0)]));
    assert_eq!(strays(other, pieces.clone()), orphans(vec![(nobody, 0), (known, 0)]));
    // Deleted, and waiting for its turn.
    writer.client.unlink(&world, Ino::ROOT, "f").unwrap();
    writer.client.call(&world, Op::Release { inos: vec![writer.ino] }).unwrap();
    while world.meta.run_chores(100) > 0 {}
    assert_eq!(world.blocks(), []);
    assert_eq!(strays(target[0], vec![(known, 0)]), Strays::default());
    // A server that was away is searched, so what it should not have goes by itself.
    servers.kill(target[0].0);
    servers.advance_ms(&world, 12_000);
    servers.revive(target[0].0);
    servers.advance_ms(&world, 1);
    let leaving = Strays { leaving: vec![(nobody, 0)], ..Strays::default() };
    assert_eq!(strays(target[0], pieces), leaving);
}

#[test]
fn files_are_listed_with_their_blocks_and_names_a_page_at_a_time() {
    let (world, _servers, mut writer) = sound();
    let dir = writer.client.dir(&world, "d");
    let mut made: Vec<Ino> = Vec::new();
    for n in 0..5 {
        made.push(writer.client.make(&world, dir, &format!("n{n}"), Kind::File).ino);
    }
    let list = |after: &[u8], limit| {
        let op = Op::ListNames { volume: VolumeId(1), folder: dir, after: after.to_vec().into(), limit };
        let Done::Names { volume, parent, names, end } = world.admin(op) else { panic!() };
        assert_eq!((volume.as_str(), parent), ("main", Ino::ROOT));
        (names.into_iter().map(|(ino, name)| (ino, name.to_vec())).collect::<Vec<_>>(), end)
    };
    let all: Vec<(Ino, Vec<u8>)> =
        made.iter().enumerate().map(|(n, ino)| (*ino, format!("n{n}").into_bytes())).collect();
    assert_eq!(list(b"", 100), (all.clone(), true));
    assert_eq!(list(b"", 5), (all.clone(), true));
    assert_eq!(list(b"", 2), (all[..2].to_vec(), false));
    assert_eq!(list(b"n1", 2), (all[2..4].to_vec(), false));
    assert_eq!(list(b"n3", 2), (all[4..].to_vec(), true));
    let nowhere =
        Op::ListNames { volume: VolumeId(1), folder: Ino(1 << 40), after: Vec::new().into(), limit: 1 };
    assert_eq!(world.refused(nowhere), Code::NotFound);

    let pages = |limit| {
        let (mut found, mut cursor, mut pages): (Vec<(Ino, BlockId)>, Vec<u8>, _) = Default::default();
        loop {
            let op = Op::ListFiles { cursor: cursor.into(), limit };
            let Done::Files { files, cursor: next } = world.admin(op) else { panic!() };
            pages += 1;
            for file in files {
                assert_eq!((file.volume, file.parent, file.named), (VolumeId(1), Ino::ROOT, true));
                found.extend(file.blocks.iter().map(|block| (file.ino, *block)));
            }
            if next.is_empty() {
                return (found, pages);
            }
            cursor = next.to_vec();
        }
    };
    let (all, _) = pages(4_096);
    assert!(all.len() > 1 && all.iter().all(|(ino, _)| *ino == writer.ino), "{all:?}");
    let (one, count) = pages(1);
    assert_eq!((one.len(), count), (all.len(), all.len()));
    assert_eq!(one, all);
}
