//! Servers that die and return while blocks are written, and pieces that are lost or rot: every race of repair by name.

use torchfs_meta::Config;
use torchfs_proto::layout::{DiskInfo, Scheme, ServerState};
use torchfs_proto::msg::meta::{BadPiece, Done, Heartbeat, Op};
use torchfs_proto::{BlockId, Code};

use crate::servers::{Servers, Writer, addr};
use crate::world::World;

/// Large enough to be erasure coded.
pub const BIG: u32 = 1 << 20;

pub fn world(scheme: &str) -> World {
    World::with(Config {
        redundancy: Some(scheme.parse::<Scheme>().unwrap()),
        groups: 12,
        out_after_ms: 60_000,
        session_ms: 36_000_000,
        repair_blocks: 8,
        ..Config::default()
    })
}

/// Whoever is dead is silent until it is out.
pub fn until_out(world: &World, servers: &Servers) {
    servers.advance_ms(world, 80_000);
    let states: Vec<ServerState> = world.placement().servers.iter().map(|s| s.state).collect();
    assert!(states.contains(&ServerState::Out), "{states:?}");
}

/// How many groups of the layout for new blocks name each server.
pub fn places(world: &World) -> Vec<usize> {
    let placement = world.placement();
    let groups = &placement.layouts.last().unwrap().groups;
    let count = |id| groups.iter().filter(|group| group.servers.contains(&id)).count();
    placement.servers.iter().map(|server| count(server.id)).collect()
}

pub fn clean(world: &World, servers: &Servers) {
    assert_eq!(servers.astray(world), [], "pieces are not where they belong");
    assert!(world.blocks().iter().all(|block| block.substitutes.is_empty()));
    let problems = world.problems();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn a_lost_server_is_down_then_out_and_its_pieces_are_made_again_elsewhere() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 40, BIG);
    servers.settle(&world);
    servers.kill(2);
    servers.advance_ms(&world, 12_000);
    let two = world.server_id(2);
    let state = |world: &World| world.placement().servers.iter().find(|s| s.id == two).unwrap().state;
    assert_eq!(state(&world), ServerState::Down);
    let report = world.repair_report();
    assert!(report.degraded > 0 && report.dirty == 0, "nobody may think that all is well: {report:?}");
    writer.write(&world, &servers, 5, BIG);
    assert!(world.blocks().iter().any(|block| !block.substitutes.is_empty()), "substitutes are recorded");
    until_out(&world, &servers);
    assert_eq!(state(&world), ServerState::Out);
    servers.settle(&world);
    clean(&world, &servers);
    assert!(
        world.placement().layouts.last().unwrap().groups.iter().all(|group| !group.servers.contains(&two))
    );
    assert_eq!((world.repair_report().lost, world.repair_report().degraded), (0, 0));
}

#[test]
fn m_servers_lost_repaired_and_m_more_lost_leave_every_block_readable() {
    let world = world("ec:3+2");
    let servers = Servers::join(&world, 9);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 30, BIG);
    writer.write(&world, &servers, 10, 1_000); // short ones are replicated
    for gone in [[1, 2], [3, 4]] {
        gone.iter().for_each(|server| servers.kill(*server));
        assert!(servers.readable(&world));
        until_out(&world, &servers);
        servers.settle(&world);
        clean(&world, &servers);
    }
    assert!(servers.readable(&world));
    // Five servers are left for five pieces; two more may die, and what is written needs nobody else.
    servers.kill(5);
    servers.kill(6);
    assert!(servers.readable(&world));
}

#[test]
fn a_returning_server_gives_up_stale_pieces_and_gets_the_missing_ones() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    // Down for a moment: substitutes are used, and brought home when it is back.
    servers.kill(3);
    servers.advance_ms(&world, 12_000);
    writer.write(&world, &servers, 24, BIG);
    servers.repair(&world);
    assert!(world.repair_report().dirty > 0, "what belongs to a server that is down waits for it");
    servers.revive(3);
    servers.advance_ms(&world, 2_000);
    servers.settle(&world);
    clean(&world, &servers);
    let pieces = |servers: &Servers| (1..=3).map(|server| servers.count(server)).sum::<usize>();
    servers.rest(&world);
    assert_eq!(pieces(&servers), 96, "pieces on substitutes are removed");
    // Out for long: its groups are elsewhere when it comes back, and it holds what nobody needs.
    servers.kill(3);
    until_out(&world, &servers);
    servers.settle(&world);
    servers.revive(3);
    world.admin(Op::Rebalance { auto: Some(false) });
    servers.advance_ms(&world, 20_000);
    servers.settle(&world);
    servers.rest(&world);
    assert_eq!(servers.count(3), 0);
    clean(&world, &servers);
    assert!(!world.placement().servers.iter().any(|server| !server.up));
}

#[test]
fn a_server_that_returns_during_a_pass_is_not_waited_for_any_longer() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.kill(3);
    servers.advance_ms(&world, 12_000);
    writer.write(&world, &servers, 24, BIG);
    servers.repair_steps(&world, 1);
    assert!(world.repair_report().pass_total > 0, "a pass is under way");
    servers.revive(3);
    servers.beat(&world, 3, "");
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn a_server_in_doubt_is_looked_at_when_the_doubt_ends_during_a_pass() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    // Server 3 comes back with pieces that nobody needs, and the answer to their removal is lost.
    servers.kill(3);
    servers.advance_ms(&world, 12_000);
    writer.write(&world, &servers, 24, BIG);
    servers.revive(3);
    servers.lose_next_answer(3);
    let three = world.server_id(3);
    servers.plant(3, (BlockId { incarnation: 1, counter: 1 << 40 }, 0));
    servers.advance_ms(&world, 2_000);
    servers.settle(&world);
    let asked_ms = 2 * u64::from(world.config.peer_timeout_ms);
    for _ in 0..60 {
        servers.repair_steps(&world, 1);
        world.sync();
        if world.repair_report().dirty > 0 {
            break;
        }
        servers.advance_ms(&world, 1_000);
    }
    let report = world.repair_report();
    assert!(report.dirty > 0, "the groups of server {three} are doubted: {report:?}");
    servers.repair_steps(&world, 1);
    assert!(world.repair_report().pass_total > 0, "a pass is under way");
    servers.advance_ms(&world, asked_ms + 1_000);
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn a_removal_whose_answer_is_lost_is_doubted() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    let one = world.server_id(1);
    world.admin(Op::Drain { server: one, on: true });
    servers.settle(&world);
    servers.lose_next_answer(1);
    servers.rest(&world);
    // The groups come back to it at once, while nobody knows what it still has.
    world.admin(Op::Drain { server: one, on: false });
    world.admin(Op::Rebalance { auto: None });
    servers.settle(&world);
    clean(&world, &servers);
    assert!(servers.count(1) > 0);
}

#[test]
fn repair_goes_on_after_a_crash_of_the_service() {
    let mut world = world("ec:2+1");
    let servers = Servers::join(&world, 5);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 60, BIG);
    servers.kill(4);
    until_out(&world, &servers);
    servers.repair_steps(&world, 1);
    assert!(world.repair_report().dirty > 0);
    for seed in 0..3 {
        world.sync();
        world = world.power_cut(seed);
        assert!(world.repair_report().dirty > 0, "dirty groups survive");
        assert!(servers.readable(&world));
    }
    let states: Vec<ServerState> = world.placement().servers.iter().map(|s| s.state).collect();
    assert_eq!(states.iter().filter(|state| **state == ServerState::Out).count(), 1, "out survives");
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn a_lost_disk_is_filled_again() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let beat = |ids: &[u64], total: u64| {
        let disk = |id: &u64| torchfs_proto::layout::DiskInfo { id: *id, ..Default::default() };
        world.admin(Op::Heartbeat(Heartbeat {
            store: 2,
            addr: addr(2),
            total,
            free: 1 << 39,
            disks: ids.iter().map(disk).collect(),
            ..Heartbeat::default()
        }))
    };
    beat(&[7, 8], 1 << 40);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    world.admin(Op::Rebalance { auto: Some(false) });
    servers.wipe(2);
    beat(&[7], 1 << 40);
    assert!(world.repair_report().dirty > 0, "groups of the server are checked");
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn a_block_that_was_in_flight_when_its_disk_was_lost_is_made_whole() {
    let world = World::with(Config {
        redundancy: Some(Scheme::Replicas(2)),
        groups: 12,
        session_ms: 60_000,
        ..Config::default()
    });
    let servers = Servers::join(&world, 3);
    let beat = |ids: &[u64]| {
        let disks = ids.iter().map(|id| DiskInfo { id: *id, ..DiskInfo::default() }).collect();
        let beat = Heartbeat { store: 2, addr: addr(2), total: 1 << 40, disks, ..Heartbeat::default() };
        world.admin(Op::Heartbeat(beat));
    };
    beat(&[7, 8]);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.advance_ms(&world, 12_000);
    let table = world.placement();
    let layout = table.layouts.last().unwrap().id;
    let late: Vec<_> = (0..12).map(|_| servers.put_block(&table, layout, writer.id(), BIG)).collect();
    servers.wipe(2);
    beat(&[7]);
    servers.settle(&world);
    clean(&world, &servers);
    late.into_iter().for_each(|block| writer.commit(&world, block).unwrap());
    assert_eq!(world.repair_report().dirty, 0, "nobody knows of it yet");
    for _ in 0..14 {
        writer.client.renew(&world);
        servers.advance_ms(&world, 5_000);
    }
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn what_is_pulled_for_a_block_that_dies_meanwhile_is_removed() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    servers.advance_ms(&world, 12_000);
    servers.rest(&world);
    let block = world.blocks()[0].clone();
    let table = world.placement();
    let layout = table.layouts.last().unwrap();
    let home = layout.groups[layout.group_of(block.id)].servers[0];
    servers.lose(home.0, (block.id, 0));
    world.admin(Op::ReportBad { pieces: vec![BadPiece { block: block.id, piece: 0, server: home }] });
    world.sync();
    let session = writer.client.id;
    servers.repair_while(&world, || {
        writer.empty(&world);
        world.admin(Op::Evict { session });
        for _ in 0..60 {
            servers.advance_ms(&world, 1_000);
            world.collect(&servers);
        }
    });
    assert!(servers.has(home.0, (block.id, 0)), "it arrived when the block was dead");
    servers.rest(&world);
    assert_eq!((1..=3).map(|server| servers.count(server)).sum::<usize>(), 0);
}

#[test]
fn a_server_that_speaks_but_has_no_disk_that_works_is_down_until_it_has() {
    let world = world("replicas:2");
    let _servers = Servers::join(&world, 3);
    let beat = |silent: &[bool]| {
        let disk = |(id, silent): (u64, &bool)| torchfs_proto::layout::DiskInfo {
            id,
            path: format!("/disk{id}"),
            silent_ms: silent.then_some(16_000),
            fault: "it has not answered for 16 s".into(),
            ..Default::default()
        };
        let disks = (7..).zip(silent).map(disk).collect();
        world.admin(Op::Heartbeat(Heartbeat {
            store: 2,
            addr: addr(2),
            total: 1 << 40,
            placement: 1,
            disks,
            ..Heartbeat::default()
        }));
        let Done::Status(status) = world.admin(Op::Status) else { panic!() };
        let server = status.servers.iter().find(|server| server.addr == addr(2)).unwrap().clone();
        (server.up, status.warnings.iter().filter(|warning| warning.contains("hangs")).count())
    };
    assert_eq!(beat(&[false, false]), (true, 0));
    let dirty = world.repair_report().dirty;
    assert_eq!(beat(&[false, true]), (true, 1), "one of two hangs");
    assert_eq!(world.repair_report().dirty, dirty, "its pieces count as there");
    assert_eq!(beat(&[true, true]), (false, 2));
    assert_eq!(beat(&[true, true]), (false, 2));
    assert_eq!(beat(&[false, true]), (true, 1));
    assert_eq!(beat(&[false, false]), (true, 0));
}

#[test]
fn a_block_with_too_few_pieces_is_named_and_healed_when_a_server_returns() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    let both = world.placement().layouts.last().unwrap().groups[0].servers.clone();
    both.iter().for_each(|server| servers.kill(server.0));
    until_out(&world, &servers);
    servers.repair(&world);
    let report = world.repair_report();
    assert!(report.lost > 0 && !report.lost_blocks.is_empty(), "{report:?}");
    let Done::Status(status) = world.admin(Op::Status) else { panic!() };
    assert!(
        status.warnings.iter().any(|warning| warning.contains("too few pieces")),
        "{:?}",
        status.warnings
    );
    servers.revive(both[1].0);
    servers.advance_ms(&world, 40_000);
    servers.settle(&world);
    assert_eq!(world.repair_report().lost, 0);
    clean(&world, &servers);
}

#[test]
fn pieces_that_a_reader_or_a_scrub_finds_bad_are_replaced() {
    let world = world("ec:2+1");
    let servers = Servers::join(&world, 4);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 100, BIG);
    let placement = world.placement();
    let block = world.blocks()[5].clone();
    let home = placement.layouts.last().unwrap().groups[placement.layouts.last().unwrap().group_of(block.id)]
        .servers[1];
    servers.rot(home.0, (block.id, 1));
    world.admin(Op::ReportBad { pieces: vec![BadPiece { block: block.id, piece: 1, server: home }] });
    servers.settle(&world);
    assert!(!servers.is_rotten(home.0, (block.id, 1)));
    clean(&world, &servers);

    let other = world.blocks()[60].clone();
    let home = placement.layouts.last().unwrap().groups[placement.layouts.last().unwrap().group_of(other.id)]
        .servers[2];
    servers.rot(home.0, (other.id, 2));
    world.admin(Op::Scrub { on: true });
    let mut steps = 0;
    while servers.scrub_step(&world) {
        steps += 1;
        assert!(steps < 100);
    }
    assert_eq!(servers.scrubbed(), 300);
    servers.settle(&world);
    clean(&world, &servers);
    let scrub = world.repair_report().scrub;
    assert!(scrub.last_end > 0 && !scrub.running);
    assert_eq!((scrub.pieces, scrub.bad), (300, 1), "what it came to is told after its end");
    let scrub = world.restart().repair_report().scrub;
    assert_eq!((scrub.pieces, scrub.bad), (300, 1), "also after a restart");
}

#[test]
fn a_scrub_finds_what_is_not_there_at_all() {
    let world = world("ec:2+1");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 20, BIG);
    servers.settle(&world);
    servers.wipe(2);
    assert_eq!(world.repair_report().dirty, 0, "nobody knows of it");
    world.admin(Op::Scrub { on: true });
    while servers.scrub_step(&world) {}
    servers.settle(&world);
    clean(&world, &servers);
    assert_eq!(servers.count(2), 20);
}

#[test]
fn what_a_server_lost_with_its_last_process_is_found_when_it_starts_again() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 24, BIG);
    servers.settle(&world);
    let beat = |placement: u64| {
        world.admin(Op::Heartbeat(Heartbeat {
            store: 2,
            addr: addr(2),
            total: 1 << 40,
            free: 1 << 39,
            placement,
            ..Heartbeat::default()
        }));
        world.repair_report().dirty
    };
    let version = world.placement().version;
    assert_eq!((beat(version), beat(version)), (0, 0));
    // It was gone for less time than it takes to count as down.
    servers.wipe(2);
    assert!(beat(0) > 0);
    servers.settle(&world);
    clean(&world, &servers);
    assert_eq!(
        (beat(0), beat(version)),
        (0, 0),
        "the answer to its first report may be lost; that is no new start"
    );
}

#[test]
fn a_scrub_goes_on_after_a_restart() {
    let world = World::with(Config { scrub_save_ms: 0, groups: 12, ..Config::default() });
    let servers = Servers::join(&world, 2);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 150, BIG);
    world.admin(Op::Scrub { on: true });
    servers.scrub_step(&world);
    let world = world.restart();
    assert!(world.repair_report().scrub.running);
    while servers.scrub_step(&world) {}
    assert_eq!(servers.scrubbed(), 300, "nothing is read twice");
}

#[test]
fn groups_that_survive_no_further_loss_are_repaired_first() {
    let world = world("replicas:3");
    let servers = Servers::join(&world, 7);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 60, BIG);
    servers.kill(1);
    servers.kill(2);
    until_out(&world, &servers);
    let placement = world.placement();
    let (one, two) = (world.server_id(1), world.server_id(2));
    let lost = |g: usize| {
        placement.layouts.last().unwrap().groups[g].servers.iter().filter(|s| [one, two].contains(s)).count()
    };
    let worst: Vec<usize> = (0..12).filter(|g| lost(*g) == 2).collect();
    assert!(!worst.is_empty(), "some group lost two of three");
    // One pass: it is over when the worst groups are clean.
    while worst.iter().any(|g| world.placement().layouts.last().unwrap().groups[*g].dirty) {
        servers.repair_steps(&world, 1);
    }
    let left = world.placement();
    let others = (0..12).filter(|g| lost(*g) == 1);
    assert!(
        others.into_iter().all(|g| left.layouts.last().unwrap().groups[g].dirty),
        "others wait for the worst"
    );
    servers.settle(&world);
    clean(&world, &servers);
}

#[test]
fn the_rate_of_repair_is_told_to_servers_and_survives() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    world.admin(Op::Repair { rate: Some(7 << 20) });
    let world = world.restart();
    assert_eq!(world.repair_report().rate_max, 7 << 20);
    world.admin(Op::Drain { server: world.server_id(1), on: true });
    servers.settle(&world);
    assert_eq!(servers.rates().into_iter().collect::<Vec<_>>(), [7 << 20]);
    assert!(servers.pulled() > 0);
}

#[test]
fn a_commit_that_names_too_few_servers_is_refused() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 2);
    let mut writer = Writer::new(&world, "f");
    let placement = world.placement();
    let id = writer.id();
    let mut block = servers.put_block(&placement, placement.layouts.last().unwrap().id, id, BIG);
    block.servers.pop();
    assert_eq!(writer.commit(&world, block).unwrap_err().code, Code::Invalid);
}

#[test]
fn a_commit_that_names_a_removed_server_is_refused() {
    let world = world("replicas:1");
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    servers.advance_ms(&world, 12_000);
    let old = world.placement();
    let layout = old.layouts.last().unwrap().id;
    let one = world.server_id(1);
    let mut put = || servers.put_block(&old, layout, writer.id(), BIG);
    let block = std::iter::repeat_with(&mut put).find(|block| block.servers == [one]).unwrap();
    world.admin(Op::Drain { server: one, on: true });
    servers.rest(&world);
    world.admin(Op::RemoveServer { server: one, force: false });
    assert_eq!(writer.commit(&world, block).unwrap_err().code, Code::StalePlacement);
    assert!(servers.readable(&world));
}

#[test]
fn a_disk_that_comes_back_is_searched_for_what_was_deleted_meanwhile() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    let disks = |ids: &[u64]| {
        let disk = |id: &u64| DiskInfo { id: *id, total: 1 << 39, free: 1 << 38, ..DiskInfo::default() };
        world.admin(Op::Heartbeat(Heartbeat {
            store: 2,
            addr: addr(2),
            total: (1 << 39) * ids.len() as u64,
            free: 1 << 39,
            disks: ids.iter().map(disk).collect(),
            ..Heartbeat::default()
        }))
    };
    disks(&[7, 8]);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 12, BIG);
    servers.rest(&world);
    // A piece of a block that nobody knows any more, on the disk that is away.
    let forgotten = (BlockId { incarnation: 1, counter: 1 << 40 }, 0);
    disks(&[7]);
    servers.rest(&world);
    servers.plant(2, forgotten);
    servers.rest(&world);
    assert!(servers.has(2, forgotten), "nobody looks without a reason");
    disks(&[7, 8]);
    servers.rest(&world);
    assert!(!servers.has(2, forgotten));
    clean(&world, &servers);
}

#[test]
fn who_was_down_stays_down_after_a_restart_until_it_is_heard() {
    let world = world("replicas:2");
    let servers = Servers::join(&world, 3);
    servers.settle(&world);
    servers.kill(2);
    servers.advance_ms(&world, 12_000);
    let up = |world: &World| -> Vec<bool> { world.placement().servers.iter().map(|s| s.up).collect() };
    assert_eq!(up(&world), [true, false, true]);
    let world = world.restart();
    assert_eq!(up(&world), [true, false, true], "a start makes nobody alive");
    // Those who were up get the time to say so; only then are they missed.
    world.advance_ms(9_000);
    assert_eq!(up(&world), [true, false, true], "a start raises no alarm");
    assert_eq!(world.repair_report().dirty, 0);
    servers.beat(&world, 1, "");
    world.advance_ms(2_000);
    assert_eq!(up(&world), [true, false, false]);
    servers.revive(2);
    servers.beat(&world, 2, "");
    assert_eq!(up(&world), [true, true, false]);
    assert!(world.repair_report().dirty > 0, "what it missed is looked for");
}
