//! Locks as records: what a change of one writes.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use torchfs_engine::Engine;
use torchfs_proto::msg::meta::{FileLock, LockKind, LockType, Op};
use torchfs_proto::{Ino, Seq, VolumeId, key, record};

use crate::world::World;

fn lock(ino: Ino, ty: LockType, start: u64, end: u64) -> Op {
    let lock = FileLock { kind: LockKind::Posix, ty, owner: 5, pid: 6, start, end };
    Op::Lock { ino, lock, wait: false }
}

/// The locks on a file: (first byte, last byte) and when the record was written.
fn written(world: &World, ino: Ino) -> BTreeMap<(u64, u64), Seq> {
    let all = key::locks(VolumeId(1), ino);
    let mut found = BTreeMap::new();
    let visit = &mut |at: &[u8], value: &[u8]| {
        let lock: record::Lock = minicbor::decode(value).unwrap();
        let start = key::Parts::of(at).and_then(|parts| parts.u64_at(25)).unwrap();
        found.insert((start, lock.end), lock.born);
        ControlFlow::Continue(())
    };
    world.engine.scan(&all, &key::after(&all), false, visit).unwrap();
    found
}

#[test]
fn a_change_of_one_lock_leaves_the_others_of_its_owner_alone() {
    let world = World::new();
    let mut a = world.client();
    let f = a.file(&world, "f");
    for at in [0, 20, 40, 60] {
        a.call(&world, lock(f, LockType::Write, at, at + 9)).unwrap();
    }
    let before = written(&world, f);
    assert_eq!(before.keys().copied().collect::<Vec<_>>(), [(0, 9), (20, 29), (40, 49), (60, 69)]);
    let kept = |after: &BTreeMap<(u64, u64), Seq>| -> Vec<(u64, u64)> {
        before.iter().filter(|(at, born)| after.get(at) == Some(born)).map(|(at, _)| *at).collect()
    };
    // A new one, one that is cut in two, one that is weakened, and one that goes.
    a.call(&world, lock(f, LockType::Write, 80, 89)).unwrap();
    assert_eq!(kept(&written(&world, f)), [(0, 9), (20, 29), (40, 49), (60, 69)]);
    a.call(&world, lock(f, LockType::Unlock, 23, 24)).unwrap();
    let after = written(&world, f);
    assert_eq!(kept(&after), [(0, 9), (40, 49), (60, 69)]);
    assert!(after.contains_key(&(20, 22)) && after.contains_key(&(25, 29)));
    a.call(&world, lock(f, LockType::Read, 40, 49)).unwrap();
    assert_eq!(kept(&written(&world, f)), [(0, 9), (60, 69)]);
    a.call(&world, lock(f, LockType::Unlock, 60, 69)).unwrap();
    let after = written(&world, f);
    assert_eq!(after.keys().copied().collect::<Vec<_>>(), [(0, 9), (20, 22), (25, 29), (40, 49), (80, 89)]);
    a.call(&world, lock(f, LockType::Unlock, 0, u64::MAX)).unwrap();
    assert!(written(&world, f).is_empty());
    a.call(&world, Op::CloseSession).unwrap();
    assert_eq!(world.problems(), Vec::<String>::new());
}
