//! A log that stands still: which answers wait for it, and which do not.

use torchfs_proto::ServerId;
use torchfs_proto::msg::meta::{Done, Heartbeat, Op, OpenSession, VolumeOp, VolumePolicy};

use crate::world::World;

fn beat(store: u64, placement: u64) -> Op {
    let addr = format!("127.0.0.1:{store}");
    Op::Heartbeat(Heartbeat { store, addr, total: 1 << 40, free: 1 << 39, placement, ..Heartbeat::default() })
}

fn joined(done: Done) -> (ServerId, u64, usize) {
    match done {
        Done::Joined { server, placement, groups, .. } => (server, placement, groups.len()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_session_learns_its_number_only_when_that_is_durable() {
    let world = World::new();
    world.sync();
    let mut opening = world.ask(Op::OpenSession(OpenSession::default()));
    assert!(!opening.is_ready());
    let world = world.power_cut(3);
    // Nobody was told the number, so it may be given again.
    assert!(world.meta.session_ids().is_empty());
    let mut opening = world.ask(Op::OpenSession(OpenSession::default()));
    assert!(!opening.is_ready());
    world.sync();
    let Done::Session(info) = opening.ready().result.unwrap() else { panic!() };
    let world = world.power_cut(4);
    assert_eq!(world.meta.session_ids(), [info.session]);
}

#[test]
fn what_administrators_ask_for_is_answered_when_it_is_durable() {
    let world = World::new();
    let a = world.client();
    let create = || Op::Volume(VolumeOp::Create { name: "v".into(), policy: VolumePolicy::default() });
    let (mut first, mut again) = (world.ask(create()), world.ask(create()));
    assert!(!first.is_ready());
    assert!(!again.is_ready(), "that there is one already rests on the same batch");
    world.sync();
    assert!(first.ready().result.is_ok());
    assert!(again.ready().result.is_err());
    let mut evict = world.ask(Op::Evict { session: a.id });
    assert!(!evict.is_ready());
    // Who only looks does not wait.
    for op in [Op::Status, Op::Sessions, Op::Volume(VolumeOp::List), Op::Collect, Op::MetaStatus] {
        assert!(world.ask(op.clone()).is_ready(), "{op:?}");
    }
    world.sync();
    assert!(evict.ready().result.is_ok());
}

#[test]
fn a_data_server_learns_its_number_only_when_that_is_durable() {
    let world = World::new();
    world.sync();
    let mut joins = world.ask(beat(7, 0));
    assert!(!joins.is_ready());
    let mut again = world.ask(beat(7, 0));
    assert!(!again.is_ready(), "nor when it asks again");
    world.sync();
    let (server, placement, groups) = joined(joins.ready().result.unwrap());
    assert!(placement > 0 && groups > 0);
    assert_eq!(joined(again.ready().result.unwrap()).0, server);
    let world = world.power_cut(3);
    assert_eq!(world.placement().servers.iter().map(|s| s.id).collect::<Vec<_>>(), [server]);
}

#[test]
fn a_placement_is_told_only_when_it_is_durable_and_heartbeats_do_not_wait_for_it() {
    let world = World::new();
    world.server(7);
    let mut a = world.client();
    let before = world.placement().version;
    // Another one joins: a table that only memory knows.
    let mut joins = world.ask(beat(8, 0));
    assert!(!joins.is_ready());
    let mut asks = world.ask(Op::Placement);
    assert!(!asks.is_ready());
    let (_, told, groups) = joined(world.ask(beat(7, before)).ready().result.unwrap());
    assert_eq!((told, groups), (before, 0));
    let renewed = |done| match done {
        Done::Renewed { placement, volume, .. } => (placement, volume.is_some()),
        other => panic!("{other:?}"),
    };
    assert_eq!(renewed(a.start(&world, Op::Renew).ready().result.unwrap()), (0, false));
    let mut resumes = a.start(&world, Op::ResumeSession);
    assert!(!resumes.is_ready());
    world.sync();
    let Done::Placement(now) = asks.ready().result.unwrap() else { panic!() };
    assert!(now.version > before);
    let Done::Session(info) = resumes.ready().result.unwrap() else { panic!() };
    assert_eq!(info.placement.version, now.version);
    let (_, told, groups) = joined(world.ask(beat(7, before)).ready().result.unwrap());
    assert!(told == now.version && groups > 0);
    assert_eq!(renewed(a.start(&world, Op::Renew).ready().result.unwrap()), (now.version, true));
}
