//! Groups on the move: drains, servers that join or go, rebalancing, layouts that are replaced or not used any more.

use torchfs_proto::Code;
use torchfs_proto::layout::{DiskInfo, Scheme};
use torchfs_proto::msg::meta::{Done, Heartbeat, Op, OpenSession, VolumeOp, VolumePolicy};

use crate::repair::{BIG, clean, places, until_out, world};
use crate::servers::{Servers, Writer, addr};
use crate::world::{Client, World};

#[test]
fn a_drain_tells_how_many_pieces_and_bytes_it_moved() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.settle(&world);
    let one = world.server_id(1);
    let had = servers.count(1) as u64;
    world.admin(Op::Drain { server: one, on: true });
    assert_eq!(world.repair_report().drains[0].moved, None);
    servers.settle(&world);
    let (pieces, bytes) = world.repair_report().drains[0].moved.unwrap();
    assert_eq!((pieces, bytes > 0), (had, true));
    // Asked again it goes on counting; taken back and begun anew it begins anew.
    world.admin(Op::Drain { server: one, on: true });
    assert_eq!(world.repair_report().drains[0].moved, Some((pieces, bytes)));
    world.admin(Op::Drain { server: one, on: false });
    world.admin(Op::Drain { server: one, on: true });
    assert_eq!(world.repair_report().drains[0].moved, None);
}

#[test]
fn a_late_commit_under_an_old_table_is_recorded_exactly_while_a_group_moves() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    // Puts under the table of now; they are committed after the groups have moved, and after repair is done with them.
    let old = world.placement();
    let mut late = Vec::new();
    for _ in 0..24 {
        let id = writer.id();
        late.push(servers.put_block(&old, old.layouts.last().unwrap().id, id, BIG));
    }
    let one = world.server_id(1);
    world.admin(Op::Drain { server: one, on: true });
    assert!(world.repair_report().moving > 0);
    for block in late.drain(..8) {
        writer.commit(&world, block).unwrap(); // while groups move
    }
    servers.settle(&world);
    clean(&world, &servers);
    for block in late.drain(..8) {
        writer.commit(&world, block).unwrap(); // after they have moved
    }
    assert!(servers.readable(&world));
    servers.settle(&world);
    // Stale pieces go two lease terms later; those of blocks in flight stay.
    servers.rest(&world);
    for block in late.drain(..) {
        for (piece, server) in block.servers.iter().enumerate() {
            assert!(servers.has(server.0, (block.id, piece as u8)), "a piece in flight was removed");
        }
        writer.commit(&world, block).unwrap(); // after stale pieces were removed
    }
    assert!(servers.readable(&world));
    servers.settle(&world);
    clean(&world, &servers);
    servers.rest(&world);
    assert_eq!(servers.count(1), 0, "the drained server is empty");
}

#[test]
fn a_target_that_dies_while_a_group_moves_is_replaced_and_what_it_has_stays_known() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    // Server 1 goes; its groups move to others, and new blocks are put there. Nothing is repaired yet.
    servers.kill(1);
    until_out(&world, &servers);
    writer.write(&world, &servers, 24, BIG);
    let before = world.placement();
    let moving: Vec<usize> =
        (0..12).filter(|g| !before.layouts.last().unwrap().groups[*g].moving_to.is_empty()).collect();
    assert!(!moving.is_empty());
    // A target dies too, for good as it seems.
    servers.kill(2);
    until_out(&world, &servers);
    servers.advance_ms(&world, 80_000);
    let after = world.placement();
    assert!(
        after.layouts.last().unwrap().groups.iter().any(|group| !group.former.is_empty()),
        "former targets are noted"
    );
    // The only other copies die; then the former targets come back, and everything is still found.
    servers.revive(2);
    servers.advance_ms(&world, 5_000);
    assert!(servers.readable(&world));
    servers.settle(&world);
    assert_eq!(world.repair_report().lost, 0);
    clean(&world, &servers);
    servers.rest(&world);
    assert!(servers.readable(&world));
    clean(&world, &servers);
}

#[test]
fn what_a_target_loses_while_a_group_moves_to_it_comes_from_where_it_was() {
    let world = world("replicas:1");
    let servers = Servers::join(&world, 2);
    let beat = |ids: &[u64]| {
        let disk = |id: &u64| DiskInfo { id: *id, total: 1 << 39, free: 1 << 38, ..DiskInfo::default() };
        let disks = ids.iter().map(disk).collect();
        let beat = Heartbeat { store: 2, addr: addr(2), total: 1 << 40, disks, ..Heartbeat::default() };
        world.admin(Op::Heartbeat(beat));
    };
    beat(&[7, 8]);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 48, BIG);
    servers.advance_ms(&world, 12_000);
    let had = servers.pieces(1);
    world.admin(Op::Drain { server: world.server_id(1), on: true });
    servers.repair_steps(&world, 1);
    let copied: Vec<_> = had.iter().copied().filter(|at| servers.has(2, *at)).collect();
    assert!(!copied.is_empty() && copied.len() < had.len(), "a pass is under way");
    // A disk fails with what was copied to it.
    copied.iter().for_each(|at| servers.lose(2, *at));
    beat(&[7]);
    servers.settle(&world);
    assert_eq!((servers.readable(&world), world.repair_report().lost), (true, 0));
    clean(&world, &servers);
    assert_eq!(world.repair_report().drains[0].groups, 0);
}

#[test]
fn a_late_commit_does_not_hold_up_the_move_of_its_group() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 36, BIG);
    servers.advance_ms(&world, 12_000);
    let old = world.placement();
    let layout = old.layouts.last().unwrap().id;
    let late: Vec<_> = (0..12).map(|_| servers.put_block(&old, layout, writer.id(), BIG)).collect();
    world.admin(Op::Drain { server: world.server_id(1), on: true });
    servers.repair_steps(&world, 1);
    late.into_iter().for_each(|block| writer.commit(&world, block).unwrap());
    while world.repair_report().pass_total > 0 {
        servers.repair_steps(&world, 1);
    }
    let report = world.repair_report();
    assert!(
        report.moving == 0 && report.dirty > 0,
        "they are looked at once more, but have moved: {report:?}"
    );
    assert!(servers.readable(&world));
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn a_drained_server_is_emptied_and_then_removed() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 40, BIG);
    let four = world.server_id(4);
    assert_eq!(world.refused(Op::RemoveServer { server: four, force: false }), Code::Busy);
    let Done::Repair(report) = world.admin(Op::Drain { server: four, on: true }) else { panic!() };
    assert!(report.drains[0].server == four && report.drains[0].groups > 0 && report.moving > 0);
    assert_eq!(world.refused(Op::RemoveServer { server: four, force: false }), Code::Busy);
    servers.settle(&world);
    assert_eq!(world.repair_report().drains[0].groups, 0);
    servers.rest(&world);
    assert_eq!(servers.count(4), 0);
    world.admin(Op::RemoveServer { server: four, force: false });
    // Its process lives on for a while; it is not taken in again under another number.
    let beat = Heartbeat { store: 4, addr: addr(4), total: 1 << 40, ..Heartbeat::default() };
    assert_eq!(world.refused(Op::Heartbeat(beat)), Code::Denied);
    assert_eq!(world.placement().servers.len(), 3);
    servers.kill(4);
    assert_eq!(world.placement().servers.len(), 3);
    clean(&world, &servers);
}

#[test]
fn a_server_removed_by_force_is_replaced() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.kill(2);
    let two = world.server_id(2);
    world.admin(Op::RemoveServer { server: two, force: true });
    servers.settle(&world);
    clean(&world, &servers);
    assert!(servers.readable(&world));
}

#[test]
fn a_new_server_takes_the_place_of_a_dead_one_that_nobody_could_take() {
    let world = world("ec:2+1");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.advance_ms(&world, 12_000);
    servers.kill(2);
    let two = world.server_id(2);
    world.admin(Op::RemoveServer { server: two, force: true });
    servers.repair(&world);
    assert!(world.repair_report().degraded > 0, "there is no other server yet");
    // A pass looks at the groups after the new server joined and before they move to it.
    servers.add(&world, 4, "");
    servers.repair(&world);
    servers.settle(&world);
    clean(&world, &servers);
    assert_eq!((servers.count(4), world.repair_report().degraded), (24, 0));
}

#[test]
fn a_new_server_gets_its_share_of_groups_gently() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 36, BIG);
    servers.settle(&world);
    servers.add(&world, 4, "");
    world.advance_ms(2_000);
    let report = world.repair_report();
    assert!(report.moving > 0 && report.moving as usize <= world.config.rebalance_groups, "{report:?}");
    world.admin(Op::Rebalance { auto: None });
    for _ in 0..10 {
        servers.settle(&world);
        servers.advance_ms(&world, 2_000);
    }
    assert_eq!(places(&world), [6, 6, 6, 6]);
    clean(&world, &servers);
    servers.rest(&world);
    assert_eq!((1..=4).map(|server| servers.count(server)).sum::<usize>(), 72);
}

#[test]
fn a_rebalance_that_is_asked_for_while_groups_are_looked_at_is_not_forgotten() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 36, BIG);
    servers.settle(&world);
    world.admin(Op::Rebalance { auto: Some(false) });
    servers.add(&world, 4, "");
    // Every group is looked at, as after a start.
    [1, 2].into_iter().for_each(|server| servers.kill(server));
    servers.advance_ms(&world, 11_000);
    [1, 2].into_iter().for_each(|server| servers.revive(server));
    servers.advance_ms(&world, 1_000);
    let report = world.repair_report();
    assert_eq!(report.dirty, report.groups);
    world.admin(Op::Rebalance { auto: None });
    assert!(world.repair_report().balancing);
    for _ in 0..10 {
        servers.settle(&world);
        servers.advance_ms(&world, 2_000);
    }
    assert_eq!(places(&world), [6, 6, 6, 6]);
    assert!(!world.repair_report().balancing, "and it ends");
}

#[test]
fn a_rebalance_takes_groups_off_a_server_that_is_full() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.settle(&world);
    world.admin(Op::Rebalance { auto: Some(false) });
    servers.advance_ms(&world, 12_000);
    // A disk of server 3 is lost, and the rest has not room enough: each of its groups lacks something.
    let had = servers.count(3);
    servers.wipe(3);
    servers.set_room(3, had / 2);
    let beat = Heartbeat { store: 3, addr: addr(3), total: 1 << 40, placement: 1, ..Heartbeat::default() };
    world.admin(Op::Heartbeat(beat.clone()));
    world.admin(Op::Heartbeat(Heartbeat { placement: 0, ..beat }));
    servers.repair(&world);
    assert_eq!((world.repair_report().dirty, servers.count(3)), (8, had / 2));
    (4..=6).for_each(|server| servers.add(&world, server, ""));
    world.admin(Op::Rebalance { auto: None });
    for _ in 0..10 {
        servers.repair(&world);
        servers.advance_ms(&world, 31_000);
    }
    servers.settle(&world);
    assert!(!world.repair_report().balancing);
    assert_eq!(places(&world), [4, 4, 4, 4, 4, 4]);
    clean(&world, &servers);
}

#[test]
fn servers_that_join_an_empty_cluster_share_it_at_once() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 2);
    (3..=6).for_each(|server| servers.add(&world, server, ""));
    (0..4).for_each(|_| servers.advance_ms(&world, 1_000));
    assert_eq!(places(&world), [4, 4, 4, 4, 4, 4]);
    let groups = &world.placement().layouts.last().unwrap().groups.clone();
    let streams = groups.windows(2).all(|two| two[0].servers[0] != two[1].servers[0]);
    assert!(streams, "one file streams from all servers: {groups:?}");
    assert_eq!(world.repair_report().moving, 0);
}

#[test]
fn pieces_of_dead_blocks_are_found_after_servers_joined() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 2);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    (3..=6).for_each(|server| servers.add(&world, server, ""));
    writer.empty(&world);
    // No block is alive, but what the dead ones left is still where it was.
    for _ in 0..60 {
        servers.advance_ms(&world, 1_000);
        servers.repair(&world);
        world.collect(&servers);
    }
    servers.rest(&world);
    assert_eq!(world.blocks(), []);
    assert_eq!((1..=6).map(|server| servers.count(server)).sum::<usize>(), 0, "pieces stay behind");
    assert_eq!(places(&world), [4, 4, 4, 4, 4, 4]);
}

#[test]
fn a_layout_is_replaced_by_a_wider_one_when_enough_servers_joined() {
    let world = world("ec:2+1");
    let servers = Servers::join(&world, 2);
    let before = world.placement();
    assert_eq!(before.layouts.last().unwrap().scheme, Scheme::Replicas(2));
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 4, BIG);
    let first = before.layouts[0].id;
    servers.add(&world, 3, "");
    let after = world.placement();
    assert_eq!(after.current(first).unwrap().scheme, Scheme::Ec { data: 2, parity: 1 });
    writer.write(&world, &servers, 4, BIG);
    servers.settle(&world);
    clean(&world, &servers);
    (4..=8).for_each(|server| servers.add(&world, server, ""));
    assert_eq!(world.placement().layouts.len(), after.layouts.len(), "no layout per join");
}

#[test]
fn puts_learn_of_new_versions_from_heartbeats() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let Done::Joined { placement, groups, .. } = servers.beat(&world, 1, "") else { panic!() };
    assert_eq!(groups.last().unwrap().1.len(), 12);
    let told = |placement: u64| {
        world.admin(Op::Heartbeat(Heartbeat {
            store: 1,
            addr: addr(1),
            total: 1 << 40,
            free: 1 << 39,
            placement,
            ..Heartbeat::default()
        }))
    };
    let Done::Joined { groups, .. } = told(placement) else { panic!() };
    assert!(groups.is_empty(), "nothing new");
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 1, BIG);
    world.admin(Op::Drain { server: world.server_id(2), on: true });
    let Done::Joined { groups: newer, .. } = told(placement) else { panic!() };
    assert!(newer.last().unwrap().1.iter().any(|version| *version > 1));
}

#[test]
fn a_server_that_cannot_be_emptied_is_told_so() {
    let world = world("replicas:3");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    world.admin(Op::Drain { server: world.server_id(1), on: true });
    assert_eq!(world.repair_report().drains[0].stuck, 0);
    servers.settle(&world);
    world.admin(Op::Drain { server: world.server_id(2), on: true });
    servers.settle(&world);
    let report = world.repair_report();
    let of = |server| report.drains.iter().find(|d| d.server == world.server_id(server)).unwrap();
    assert_eq!((of(1).groups, of(1).stuck), (0, 0));
    assert!(of(2).stuck > 0 && of(2).stuck <= of(2).groups, "{report:?}");
}

/// Repairs and collects until nothing is left to do.
fn collect(world: &World, servers: &Servers) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for _ in 0..4 {
        world.meta.run_chores(64);
        world.sync();
        servers.advance_ms(world, 8_000);
        while runtime.block_on(world.meta.collect(servers)) > 0 {}
    }
    servers.settle(world);
}

fn volume(world: &World, op: VolumeOp) {
    world.admin(Op::Volume(op));
}

fn wants(scheme: &str) -> VolumePolicy {
    VolumePolicy { scheme: Some(scheme.parse().unwrap()), ..VolumePolicy::default() }
}

#[test]
fn the_groups_of_a_removed_volume_hold_up_no_drain() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let _mount = Writer::new(&world, "f"); // of another volume
    volume(&world, VolumeOp::Create { name: "wide".into(), policy: wants("replicas:4") });
    let who = OpenSession { volume: "wide".into(), ..OpenSession::default() };
    let Done::Session(info) = world.admin(Op::OpenSession(who)) else { panic!() };
    let mut client = Client { id: info.session, epoch: info.epoch, seq: 0, watermark: 0 };
    let ino = client.file(&world, "f");
    let grant = client.open_write(&world, ino);
    let ids = client.ids(&world, 1);
    let block = servers.put_block(&world.placement(), info.volume.layout, ids.first, BIG);
    crate::content::commit_block(&world, &mut client, ino, grant, block);
    client.call(&world, Op::CloseSession).unwrap();
    let one = world.server_id(1);
    world.admin(Op::Drain { server: one, on: true });
    servers.settle(&world);
    assert_eq!(world.repair_report().drains[0].stuck, 12, "they hold a block");
    let before = world.placement().layouts.len();
    volume(&world, VolumeOp::Remove { name: "wide".into(), force: true });
    collect(&world, &servers);
    assert_eq!(world.placement().layouts.len(), before - 1, "the layout is dropped");
    let drain = world.repair_report().drains[0];
    assert_eq!((drain.groups, drain.stuck), (0, 0));
    world.admin(Op::RemoveServer { server: one, force: false });
    clean(&world, &servers);
    let world = world.restart();
    assert_eq!(world.placement().layouts.len(), before - 1, "also after a restart");
    assert!(world.problems().is_empty());
}

#[test]
fn a_layout_that_nothing_uses_stays_while_a_session_may_commit_to_it() {
    let world = world("replicas:3");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    let old = world.placement().layouts[0].id;
    volume(&world, VolumeOp::Set { name: "main".into(), policy: wants("replicas:2") });
    let one = world.server_id(1);
    world.admin(Op::Drain { server: one, on: true });
    servers.settle(&world);
    let drain = world.repair_report().drains[0];
    assert_eq!((drain.groups, drain.stuck), (0, 0), "it is in nobody's way");
    assert!(world.placement().layout(old).is_some(), "a block may be under way");
    world.admin(Op::Drain { server: one, on: false });
    // It is: the layout is in use again, whatever time passes.
    let block = servers.put_block(&world.placement(), old, writer.id(), BIG);
    writer.commit(&world, block).unwrap();
    assert_eq!(world.blocks()[0].layout, old);
    servers.advance_ms(&world, 700_000);
    servers.settle(&world);
    clean(&world, &servers);
    // A file that goes leaves it unused; then only time or the session's end lets it go.
    writer.client.unlink(&world, torchfs_proto::Ino::ROOT, "f").unwrap();
    writer.client.call(&world, Op::CloseSession).unwrap();
    let _later = world.client();
    collect(&world, &servers);
    volume(&world, VolumeOp::Set { name: "main".into(), policy: wants("replicas:2") });
    servers.settle(&world);
    servers.settle(&world);
    assert!(world.placement().layout(old).is_some(), "a session is there that was there before");
    servers.advance_ms(&world, 700_000);
    servers.settle(&world);
    assert_eq!(world.placement().layout(old), None);
    clean(&world, &servers);
}

#[test]
fn a_server_that_takes_no_more_data_is_named_by_the_status() {
    let world = world("replicas:2");
    Servers::join(&world, 3);
    let beat = |free: u64| {
        let (used, total) = (1 << 30, (1 << 30) + free);
        let addr = addr(2);
        world.admin(Op::Heartbeat(Heartbeat { store: 2, addr, total, free, used, ..Heartbeat::default() }));
        let Done::Status(status) = world.admin(Op::Status) else { panic!() };
        status.warnings.iter().any(|line| line.contains("data server 2 is full"))
    };
    assert_eq!((beat(1 << 30), beat(0), beat(1 << 30)), (false, true, false));
}
