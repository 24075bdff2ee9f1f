//! Volumes and policies: made, changed for new data, inherited, removed with everything in them.

use torchfs_meta::Config;
use torchfs_proto::attr::{Compression, Kind};
use torchfs_proto::extent::RangeOp;
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::meta::{Done, Op, OpenSession, Policy, VolumeOp, VolumePolicy, VolumeReport};
use torchfs_proto::{Code, Ino};

use crate::content::{commit, nth, within};
use crate::servers::Servers;
use crate::watched::Watched;
use crate::world::{Client, World};

fn volume(world: &World, op: VolumeOp) -> Vec<VolumeReport> {
    let Done::Volumes(volumes) = world.admin(Op::Volume(op)) else { panic!() };
    volumes
}

fn create(world: &World, name: &str, policy: VolumePolicy) -> VolumeReport {
    volume(world, VolumeOp::Create { name: name.into(), policy }).remove(0)
}

fn mount(world: &World, volume: &str) -> (Client, torchfs_proto::attr::VolumeInfo) {
    let who = OpenSession { volume: volume.into(), ..OpenSession::default() };
    let Done::Session(info) = world.admin(Op::OpenSession(who)) else { panic!() };
    (Client { id: info.session, epoch: info.epoch, seq: 0, watermark: 0 }, info.volume)
}

#[test]
fn volumes_have_names_and_policies_of_their_own() {
    let world = World::new();
    Servers::join(&world, 6);
    let ec = Scheme::Ec { data: 4, parity: 2 };
    let policy = VolumePolicy {
        block_size: Some(1 << 20),
        compression: Some(Compression::Zstd),
        scheme: Some(ec),
        stripe: Some(8),
    };
    let made = create(&world, "train", policy);
    assert_eq!((made.scheme, made.stripe, made.info.block_size), (ec, 8, 1 << 20));
    let (mut a, info) = mount(&world, "train");
    assert_eq!(info, made.info);
    let layout = world.placement().layout(info.layout).cloned().unwrap();
    assert_eq!((layout.scheme, layout.groups.len()), (ec, 8));
    let (mut b, other) = mount(&world, "");
    assert_ne!(other.layout, info.layout);
    a.file(&world, "only here");
    assert!(b.lookup(&world, Ino::ROOT, "only here").is_none());
    assert!(b.names(&world, Ino::ROOT).is_empty());
    let world = world.restart();
    let volumes = volume(&world, VolumeOp::List);
    let names: Vec<&str> = volumes.iter().map(|volume| volume.info.name.as_str()).collect();
    assert_eq!((names, volumes[1].inodes), (vec!["main", "train"], 2));
    assert!(world.problems().is_empty());
}

#[test]
fn policies_out_of_bounds_are_refused_with_advice() {
    let world = World::new();
    let bad = |policy: VolumePolicy| world.refused(Op::Volume(VolumeOp::Create { name: "v".into(), policy }));
    for size in [0, 100_000, 128 << 10, 32 << 20] {
        assert_eq!(bad(VolumePolicy { block_size: Some(size), ..Default::default() }), Code::Invalid);
    }
    assert_eq!(bad(VolumePolicy { scheme: Some(Scheme::Replicas(0)), ..Default::default() }), Code::Invalid);
    assert_eq!(bad(VolumePolicy { stripe: Some(0), ..Default::default() }), Code::Invalid);
    for name in ["", "a/b", "a b", &"x".repeat(65)] {
        let op = VolumeOp::Create { name: name.into(), policy: VolumePolicy::default() };
        assert_eq!(world.refused(Op::Volume(op)), Code::Invalid);
    }
    let again = VolumeOp::Create { name: "main".into(), policy: VolumePolicy::default() };
    assert_eq!(world.refused(Op::Volume(again)), Code::Exists);
}

#[test]
fn a_changed_policy_reaches_mounts_with_their_renewal() {
    let world = World::new();
    Servers::join(&world, 3);
    create(&world, "v", VolumePolicy::default());
    let (mut client, before) = mount(&world, "v");
    let policy = VolumePolicy {
        scheme: Some(Scheme::Replicas(3)),
        compression: Some(Compression::None),
        ..VolumePolicy::default()
    };
    volume(&world, VolumeOp::Set { name: "v".into(), policy });
    let Done::Renewed { volume: Some(after), placement, .. } = client.call(&world, Op::Renew).unwrap() else {
        panic!()
    };
    assert_eq!((after.compression, after.block_size), (Compression::None, before.block_size));
    assert_ne!(after.layout, before.layout);
    let table = world.placement();
    assert_eq!((table.version, table.layout(after.layout).unwrap().scheme), (placement, Scheme::Replicas(3)));
}

#[test]
fn a_removed_volume_goes_with_everything_in_it_also_after_a_crash() {
    let world = World::with(Config { groups: 12, peer_timeout_ms: 1, ..Config::default() });
    let servers = Servers::join(&world, 2);
    create(&world, "v", VolumePolicy::default());
    let (mut client, info) = mount(&world, "v");
    for number in 0..20 {
        let folder = client.dir(&world, &format!("d{number}"));
        let ino = client.make(&world, folder, "f", Kind::File).ino;
        let grant = client.open_write(&world, ino);
        let ids = client.ids(&world, 1);
        let block = servers.put_block(&world.placement(), info.layout, ids.first, 4096);
        crate::content::commit_block(&world, &mut client, ino, grant, block);
    }
    let remove = |force| Op::Volume(VolumeOp::Remove { name: "v".into(), force });
    assert_eq!(world.refused(remove(true)), Code::Busy, "it is mounted");
    client.call(&world, Op::CloseSession).unwrap();
    assert_eq!(world.refused(remove(false)), Code::NotEmpty);
    world.admin(remove(true));
    let waiting = |world: &World| match world.admin(Op::Collect) {
        Done::Collected { waiting, .. } => waiting,
        other => panic!("{other:?}"),
    };
    assert!(waiting(&world) >= 20, "its blocks are still there");
    world.meta.run_chores(1);
    assert_eq!(
        world.refused(Op::OpenSession(OpenSession { volume: "v".into(), ..Default::default() })),
        Code::NotFound
    );
    let world = world.restart();
    for _ in 0..4 {
        world.meta.run_chores(64);
        world.sync();
        servers.advance_ms(&world, 8_000);
        world.collect(&servers);
    }
    let left = volume(&world, VolumeOp::List);
    assert_eq!(left.len(), 1, "{left:?} {:?}", world.admin(Op::Collect));
    assert_eq!(waiting(&world), 0);
    assert_eq!((servers.count(1), servers.count(2)), (0, 0), "its blocks are deleted");
    assert!(world.problems().is_empty());
    create(&world, "v", VolumePolicy::default());
    let (mut client, _) = mount(&world, "v");
    assert!(client.names(&world, Ino::ROOT).is_empty());
}

#[test]
fn the_default_volume_stays() {
    let world = World::new();
    assert_eq!(world.refused(Op::Volume(VolumeOp::Remove { name: "main".into(), force: true })), Code::Busy);
    let gone = VolumeOp::Remove { name: "nobody".into(), force: true };
    assert_eq!(world.refused(Op::Volume(gone)), Code::NotFound);
}

#[test]
fn a_folders_policy_is_inherited_by_what_is_made_in_it() {
    let world = World::new();
    Servers::join(&world, 3);
    let mut client = world.client();
    let folder = client.dir(&world, "checkpoints");
    let before = client.make(&world, folder, "before", Kind::File);
    let policy = Policy { scheme: Some(Scheme::Replicas(3)), stripe: None };
    let Done::Attr(attr) = client.call(&world, Op::SetPolicy { ino: folder, policy }).unwrap() else {
        panic!()
    };
    let layout = attr.layout.expect("a layout of its own");
    assert_eq!(world.placement().layout(layout).unwrap().scheme, Scheme::Replicas(3));
    let inside = client.make(&world, folder, "sub", Kind::Dir);
    let file = client.make(&world, inside.ino, "f", Kind::File);
    assert_eq!((inside.layout, file.layout, before.layout), (Some(layout), Some(layout), None));
    assert_eq!(client.getattr(&world, before.ino).layout, None, "what is there stays as it is");
    let Done::Attr(attr) =
        client.call(&world, Op::SetPolicy { ino: folder, policy: Policy::default() }).unwrap()
    else {
        panic!()
    };
    assert_eq!(attr.layout, None);
    let odd = Policy { scheme: Some(Scheme::Replicas(200)), stripe: None };
    assert_eq!(client.refused(&world, Op::SetPolicy { ino: folder, policy: odd }), Code::Invalid);
    // The same policy again is the same layout, also after a restart.
    let world = world.restart();
    let mut client = world.client();
    world.advance_ms(4_000);
    let Done::Attr(attr) = client.call(&world, Op::SetPolicy { ino: folder, policy }).unwrap() else {
        panic!()
    };
    assert_eq!(attr.layout, Some(layout));
    assert!(world.problems().is_empty());
}

#[test]
fn the_removal_of_a_volume_does_not_pass_through_what_waits_to_be_deleted() {
    let (world, engine) = Watched::world(Config { groups: 12, ..Config::default() });
    let servers = Servers::join(&world, 2);
    create(&world, "v", VolumePolicy::default());
    let (mut client, info) = mount(&world, "v");
    let f = client.file(&world, "f");
    let (grant, ids) = (client.open_write(&world, f), client.ids(&world, 300));
    let placement = world.placement();
    let blocks: Vec<_> =
        (0..300).map(|n| servers.put_block(&placement, info.layout, nth(ids, n), 10)).collect();
    let write = |n| RangeOp::Write { offset: n * 10, len: 10, source: within(nth(ids, n), 0) };
    client.call(&world, commit(f, grant, blocks, (0..300).map(write).collect())).unwrap();
    client.call(&world, Op::CloseSession).unwrap();
    world.admin(Op::Volume(VolumeOp::Remove { name: "v".into(), force: true }));
    while world.meta.run_chores(10) > 0 {}
    // Nothing is left but the queue; the removal comes by every second until that is empty.
    servers.advance_ms(&world, 1_000);
    engine.scans();
    servers.advance_ms(&world, 1_000);
    let shown: usize = engine.scans().iter().map(|(_, shown)| shown).sum();
    assert!(shown < 100, "{shown} records were looked at");
    assert_eq!(volume(&world, VolumeOp::List).len(), 2);
}
