//! What the deleter and the searches tell data servers to remove, and when.

use torchfs_meta::Config;
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{BlockId, Ino};

use crate::servers::{Servers, Writer};
use crate::world::{Client, World, raw};

/// One pass of the deleter.
pub fn collect(world: &World, servers: &Servers) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(world.meta.collect(servers))
}

/// What waits to be deleted.
pub fn waiting(world: &World) -> u64 {
    match world.admin(Op::Collect) {
        Done::Collected { waiting, .. } => waiting,
        other => panic!("{other:?}"),
    }
}

/// A log that stands still is noticed soon.
fn impatient() -> Config {
    Config { peer_timeout_ms: 1, ..Config::default() }
}

/// A durable file of one block; the session that wrote it has ended, and its range is due.
fn left_behind(world: &World, servers: &Servers, name: &str) -> BlockId {
    let mut writer = Writer::new(world, name);
    writer.write(world, servers, 1, 100);
    let block = world.blocks().last().unwrap().id;
    writer.client.call(world, Op::CloseSession).unwrap();
    world.sync();
    servers.advance_ms(world, 8_000);
    world.sync();
    block
}

fn unlink(world: &World, client: &mut Client, name: &str) {
    client.renew(world);
    let ino = client.lookup(world, Ino::ROOT, name).unwrap().ino;
    client.call(world, Op::Unlink { parent: Ino::ROOT, name: raw(name), idle: Some(ino) }).unwrap();
}

#[test]
fn a_purge_does_not_rest_on_an_unlink_that_is_not_durable() {
    let world = World::with(impatient());
    let servers = Servers::join(&world, 1);
    let mut b = world.client();
    let block = left_behind(&world, &servers, "f");
    unlink(&world, &mut b, "f");
    assert_eq!(world.blocks(), []);
    // The log stands still: the range waits, whatever time passes.
    for _ in 0..3 {
        collect(&world, &servers);
        world.clock.advance_ms(10_000);
    }
    assert!(servers.has(1, (block, 0)));
    let world = world.power_cut(7);
    assert_eq!(world.blocks().len(), 1, "the unlink is lost, and the file is whole");
    assert!(servers.has(1, (block, 0)));
}

#[test]
fn a_purge_leaves_blocks_to_the_queue_that_waits_for_their_readers() {
    let world = World::with(impatient());
    let servers = Servers::join(&world, 1);
    let mut b = world.client();
    let block = left_behind(&world, &servers, "f");
    unlink(&world, &mut b, "f");
    world.sync();
    assert_eq!(collect(&world, &servers), 1, "the range is done with");
    assert!(servers.has(1, (block, 0)), "a reader may still hold a lease on its extents");
    servers.advance_ms(&world, 8_000);
    world.sync();
    assert_eq!(collect(&world, &servers), 1);
    assert!(!servers.has(1, (block, 0)));
    assert_eq!(waiting(&world), 0);
}

#[test]
fn a_server_that_is_down_keeps_only_its_own_blocks_from_being_deleted() {
    let one = Some(Scheme::Replicas(1));
    let world = World::with(Config { delete_batch: 4, groups: 12, redundancy: one, ..impatient() });
    let servers = Servers::join(&world, 3);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 60, 100);
    let held = |server| servers.count(server);
    let before = held(1);
    assert!(before > 4 && held(2) > 4 && held(3) > 4, "more than one call takes");
    // One goes down while nothing is due yet; then everything is deleted.
    servers.kill(1);
    servers.advance_ms(&world, 15_000);
    writer.empty(&world);
    servers.advance_ms(&world, 15_000);
    world.collect(&servers);
    assert_eq!((held(1), held(2), held(3)), (before, 0, 0));
    assert_eq!(waiting(&world), before as u64);
    servers.revive(1);
    servers.beat(&world, 1, "");
    world.collect(&servers);
    assert_eq!((held(1), waiting(&world)), (0, 0));
}

#[test]
fn what_a_client_puts_after_its_session_was_cut_off_is_found_and_removed() {
    let world = World::with(Config { search_after_ms: 60_000, ..impatient() });
    let servers = Servers::join(&world, 2);
    let mut writer = Writer::new(&world, "f");
    writer.write(&world, &servers, 1, 100);
    let kept = world.blocks()[0].id;
    let late = writer.id();
    // Its client is stopped in the middle of a put, and goes on when all is over.
    servers.advance_ms(&world, 70_000);
    world.collect(&servers);
    assert_eq!((world.meta.session_ids(), waiting(&world)), (vec![], 0));
    servers.plant(1, (late, 0));
    let world = world.restart();
    servers.advance_ms(&world, 60_000);
    servers.rest(&world);
    assert!(!servers.has(1, (late, 0)));
    assert_eq!(servers.count(1) + servers.count(2), 2, "both copies of the other one are there");
    assert!(servers.has(1, (kept, 0)) || servers.has(1, (kept, 1)));
    // Sessions that end by themselves ask for no search.
    let mut writer = Writer::new(&world, "g");
    let planted = writer.id();
    writer.client.call(&world, Op::CloseSession).unwrap();
    servers.advance_ms(&world, 8_000);
    world.collect(&servers);
    servers.plant(1, (planted, 0));
    servers.advance_ms(&world, 120_000);
    servers.rest(&world);
    assert!(servers.has(1, (planted, 0)));
}
