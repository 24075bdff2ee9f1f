//! Faults: damaged files, failing and full disks. Each is named, none loses what was durable.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_disk::{Op, SimDisk};
use torchfs_engine::{
    Batch, ClusterId, Config, Embedded, Engine, Error, LmdbConfig, LogConfig, MemReplica, Result, Seq,
};
use torchfs_proto::disk::Disk;
use torchfs_proto::{Code, Fault};

const LONG: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;
const RECORDS_AT: u64 = 2 * PAGE;

/// A machine of doubles.
struct Machine {
    disk: SimDisk,
    replica: MemReplica,
    config: Config,
}

impl Machine {
    fn new() -> Machine {
        let disk = SimDisk::new(7);
        let config = Config {
            threads: false,
            log: LogConfig { segment_bytes: 64 << 10, segments_min: 2, segments_max: 4 },
            reserve_bytes: 0,
            space_interval: Duration::ZERO,
            ..Config::default()
        };
        Machine { replica: MemReplica::new(&disk), disk, config }
    }

    fn open(&self) -> Result<Embedded> {
        Embedded::open_with(Arc::new(self.disk.clone()), Box::new(self.replica.clone()), self.config.clone())
    }

    /// The process ends, the machine goes on.
    fn restart(&mut self) {
        self.disk = self.disk.crash();
        self.replica = self.replica.after(&self.disk);
    }

    fn cut(&mut self, seed: u64) {
        self.disk = self.disk.power_cut(seed);
        self.replica = self.replica.after(&self.disk);
    }

    /// Flips a bit of a file and makes that durable.
    fn damage(&self, name: &str, at: u64) {
        let file = self.disk.open(name).unwrap();
        let mut byte = [0];
        file.read_at(&mut byte, at).unwrap();
        file.write_at(&[byte[0] ^ 4], at).unwrap();
        file.sync().unwrap();
    }
}

fn put(key: &str, value: impl Into<Vec<u8>>) -> Batch {
    let mut batch = Batch::at(1);
    batch.put(key, value);
    batch
}

fn delete(key: &str) -> Batch {
    let mut batch = Batch::at(1);
    batch.delete(key);
    batch.frees = true;
    batch
}

/// Orders and waits, so that the batch has a page of its own.
fn store(engine: &Embedded, batch: Batch) -> Seq {
    let seq = engine.order(batch).unwrap();
    engine.wait_durable(seq, LONG).unwrap();
    seq
}

fn corrupt(result: Result<Embedded>) -> String {
    match result.map(|engine| engine.ordered()) {
        Err(error @ Error::Corrupt { .. }) => error.to_string(),
        other => panic!("expected damage to be found, got {other:?}"),
    }
}

#[test]
fn a_hole_before_durable_batches_is_damage_with_a_name() {
    let mut machine = Machine::new();
    let engine = machine.open().unwrap();
    for n in 0..5 {
        store(&engine, put("k", n.to_string()));
    }
    drop(engine);
    machine.restart();
    machine.damage("log-000000", RECORDS_AT + 2 * PAGE + 100);
    let error = corrupt(machine.open());
    assert!(error.contains("log-000000") && error.contains("hole") && error.contains("batch 3"), "{error}");
}

#[test]
fn a_hole_at_the_end_of_a_full_segment_is_damage_too() {
    let mut machine = Machine::new();
    let engine = machine.open().unwrap();
    // 14 pages of records per segment: the last ones are in the second.
    for n in 0..18 {
        store(&engine, put("k", n.to_string()));
    }
    drop(engine);
    machine.restart();
    machine.damage("log-000000", RECORDS_AT + 13 * PAGE + 100);
    let error = corrupt(machine.open());
    assert!(error.contains("log-000001") && error.contains("batch 14"), "{error}");
}

#[test]
fn a_torn_last_group_ends_the_log_quietly() {
    let mut machine = Machine::new();
    let engine = machine.open().unwrap();
    for n in 0..5 {
        store(&engine, put("k", n.to_string()));
    }
    drop(engine);
    machine.restart();
    machine.damage("log-000000", RECORDS_AT + 4 * PAGE + 100);
    let engine = machine.open().unwrap();
    assert_eq!(engine.ordered(), Seq(4));
    assert_eq!(engine.get(b"k").unwrap().unwrap(), b"3");
}

/// Found by taking the check of the fence out: the random cuts alone did not notice.
#[test]
fn what_a_torn_group_left_behind_never_follows_what_was_written_over_it() {
    let mut machine = Machine::new();
    let engine = machine.open().unwrap();
    // Three records of exactly a page each, in one group.
    for n in 1..=3 {
        engine.order(put("k", vec![n; 3992])).unwrap();
    }
    engine.wait_durable(Seq(3), LONG).unwrap();
    drop(engine);
    machine.restart();
    machine.damage("log-000000", RECORDS_AT + PAGE + 500);
    let engine = machine.open().unwrap();
    assert_eq!(engine.ordered(), Seq(1), "the second is torn");
    assert_eq!(store(&engine, put("k", vec![9; 3992])), Seq(2));
    drop(engine);
    machine.cut(1);
    let engine = machine.open().unwrap();
    assert_eq!(engine.ordered(), Seq(2), "the old third must not come back behind the new second");
    assert_eq!(engine.get(b"k").unwrap().unwrap(), vec![9; 3992]);
}

#[test]
fn a_lost_header_identity_or_log_is_damage_with_a_name() {
    let mut machine = Machine::new();
    store(&machine.open().unwrap(), put("k", "v"));
    machine.restart();
    let copy = |machine: &Machine| Machine {
        disk: machine.disk.power_cut(0),
        replica: machine.replica.clone(),
        config: machine.config.clone(),
    };
    // The first segment has only its first header slot so far.
    machine.damage("log-000000", 40);
    assert!(corrupt(machine.open()).contains("log-000000"));
    machine.damage("log-000000", 40);
    let machine = copy(&machine);
    machine.disk.rename("engine.id", "elsewhere").unwrap();
    assert!(corrupt(machine.open()).contains("engine.id"));
    machine.disk.rename("elsewhere", "engine.id").unwrap();
    for name in ["log-000000", "log-000001"] {
        machine.disk.remove(name).unwrap();
    }
    assert!(corrupt(machine.open()).contains("log"));
}

#[test]
fn a_later_format_and_another_cluster_are_refused_with_a_sentence() {
    let mut machine = Machine::new();
    machine.config.cluster = Some(ClusterId(5));
    drop(machine.open().unwrap());
    machine.restart();
    machine.config.cluster = Some(ClusterId(6));
    assert!(matches!(
        machine.open().map(|_| ()),
        Err(Error::WrongCluster { found: ClusterId(5), expected: ClusterId(6) })
    ));
    machine.config.cluster = None;
    assert_eq!(machine.open().unwrap().cluster(), ClusterId(5));
    machine.restart();
    let file = machine.disk.open("engine.id").unwrap();
    for slot in 0..2 {
        let mut page = [0; 64];
        file.read_at(&mut page, slot * PAGE).unwrap();
        page[8] = 2;
        let crc = crc32c::crc32c(&page[..60]);
        page[60..].copy_from_slice(&crc.to_le_bytes());
        file.write_at(&page, slot * PAGE).unwrap();
    }
    let fault = Fault::from(machine.open().map(|_| ()).unwrap_err());
    assert_eq!(fault.code, Code::Version);
    assert!(fault.what.contains("engine.id has format version 2; use a version of torchfs"), "{fault}");
}

#[test]
fn a_failed_sync_latches_and_is_told() {
    for (op, threads) in [(Op::Sync, true), (Op::Sync, false), (Op::Write, true), (Op::Write, false)] {
        let mut machine = Machine::new();
        machine.config.threads = threads;
        let engine = machine.open().unwrap();
        let news = Arc::new(Mutex::new(Vec::new()));
        let ears = news.clone();
        engine.on_durable(Box::new(move |said| ears.lock().push(said.is_ok())));
        store(&engine, put("a", "1"));
        machine.disk.fail(op, 0, libc::EIO);
        let seq = engine.order(put("b", "2")).unwrap();
        assert!(engine.wait_durable(seq, LONG).is_err());
        // Later ones fail too, although the disk would take them now.
        assert!(matches!(engine.order(put("c", "3")), Err(Error::Failed { .. })));
        assert!(matches!(engine.wait_durable(seq, LONG), Err(Error::Failed { .. })));
        assert!(matches!(engine.checkpoint(), Err(Error::Failed { .. })));
        assert_eq!(engine.durable(), Seq(1));
        assert_eq!(engine.get(b"a").unwrap().unwrap(), b"1", "reads go on");
        let deadline = Instant::now() + LONG;
        while news.lock().last() != Some(&false) {
            assert!(Instant::now() < deadline, "nobody was told");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(*news.lock(), [true, false]);
        drop(engine);
        machine.cut(3);
        let engine = machine.open().unwrap();
        assert!(engine.ordered() >= Seq(1));
        assert_eq!(engine.get(b"a").unwrap().unwrap(), b"1");
    }
}

#[test]
fn a_log_write_without_space_is_tried_again_and_nothing_is_lost() {
    let machine = Machine::new();
    let engine = machine.open().unwrap();
    store(&engine, put("a", "1"));
    machine.disk.fail(Op::Write, 0, libc::ENOSPC);
    let seq = engine.order(put("b", "2")).unwrap();
    let fault = Fault::from(engine.wait_durable(seq, LONG).unwrap_err());
    assert_eq!(fault.code, Code::NoSpace);
    assert_eq!(engine.durable(), Seq(1));
    engine.order(delete("a")).unwrap();
    engine.wait_durable(Seq(3), LONG).unwrap();
    assert_eq!(engine.get(b"b").unwrap().unwrap(), b"2");
}

#[test]
fn a_full_disk_refuses_puts_and_takes_deletes_from_the_reserve() {
    let mut machine = Machine::new();
    machine.config.reserve_bytes = 1 << 20;
    machine.disk.set_capacity(64 << 20);
    let engine = machine.open().unwrap();
    for n in 0..20 {
        store(&engine, put(&format!("k{n:02}"), vec![0; 1000]));
    }
    let free = machine.disk.space().unwrap().free;
    machine.disk.create("ballast").unwrap().preallocate(free - (512 << 10)).unwrap();
    let error = engine.order(put("more", "x")).unwrap_err();
    assert!(matches!(error, Error::NoSpace { free: 524_288, reserve: 1_048_576 }), "{error}");
    assert_eq!(engine.get(b"more").unwrap(), None);
    // More deletes than the log holds at once: checkpoints make room meanwhile, without new files.
    for round in 0..10 {
        for n in 0..20 {
            store(&engine, delete(&format!("k{n:02}")));
            assert!(matches!(engine.order(put("more", "x")), Err(Error::NoSpace { .. })), "round {round}");
        }
    }
    machine.disk.remove("ballast").unwrap();
    store(&engine, put("more", "x"));
    assert_eq!(count(&engine), 1);
}

#[test]
fn a_replica_without_space_keeps_everything_and_recovers_after_deletes() {
    let mut machine = Machine::new();
    let engine = machine.open().unwrap();
    for n in 0..10 {
        store(&engine, put(&format!("k{n}"), vec![0; 500]));
    }
    machine.replica.set_capacity(2_000);
    assert!(matches!(engine.checkpoint(), Err(Error::NoSpace { .. })));
    assert_eq!(count(&engine), 10, "nothing is lost");
    assert!(matches!(engine.order(put("more", "x")), Err(Error::NoSpace { .. })));
    for n in 0..8 {
        store(&engine, delete(&format!("k{n}")));
    }
    drop(engine);
    machine.cut(1);
    let engine = machine.open().unwrap();
    assert_eq!(count(&engine), 2);
    engine.checkpoint().unwrap();
    store(&engine, put("more", "x"));
    assert_eq!(count(&engine), 3);
}

#[test]
fn a_full_lmdb_refuses_puts_takes_deletes_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        log: LogConfig { segment_bytes: 256 << 10, ..LogConfig::default() },
        lmdb: LmdbConfig { map_bytes: 8 << 20, ..LmdbConfig::default() },
        reserve_bytes: 2 << 20,
        space_interval: Duration::ZERO,
        ..Config::default()
    };
    let engine = Embedded::open(dir.path(), config.clone()).unwrap();
    let key = |n: u32| format!("k{n:06}");
    let fill = |from: u32| -> u32 {
        for n in from.. {
            assert!(n < 100_000, "it never fills");
            match engine.order(put(&key(n), vec![1; 1000])) {
                Ok(_) => {}
                Err(Error::NoSpace { .. }) => return n,
                Err(other) => panic!("{other}"),
            }
        }
        unreachable!()
    };
    let filled = fill(0);
    assert!(filled > 1000, "{filled} pairs of 1 KB in 6 MiB");
    for n in 0..filled {
        engine.order(delete(&key(n))).unwrap();
    }
    engine.checkpoint().unwrap();
    assert_eq!(count(&engine), 0);
    // What the deletes freed can be filled again, though the file does not shrink.
    let refilled = fill(0);
    assert!(refilled > filled / 2, "{filled} fitted, then {refilled}");
    assert_eq!(count(&engine), refilled as usize);
    drop(engine);
    let engine = Embedded::open(dir.path(), config).unwrap();
    assert_eq!(count(&engine), refilled as usize);
}

#[test]
fn the_log_is_used_again_and_does_not_grow_past_its_bound() {
    let machine = Machine::new();
    let engine = machine.open().unwrap();
    for n in 0..500 {
        store(&engine, put("k", n.to_string()));
    }
    let stats = engine.stats();
    assert!(stats.checkpoints > 0);
    assert!(stats.log_bytes <= 4 * (64 << 10), "{stats:?}");
    assert!(machine.disk.list().unwrap().len() <= 5);
}

#[test]
fn an_overlay_at_its_bound_holds_callers_back_until_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        log: LogConfig { segment_bytes: 256 << 10, ..LogConfig::default() },
        overlay_bytes: 64 << 10,
        checkpoint_bytes: usize::MAX,
        checkpoint_keys: usize::MAX,
        ..Config::default()
    };
    let engine = Embedded::open(dir.path(), config).unwrap();
    for n in 0..2000 {
        engine.order(put(&format!("k{n}"), vec![0; 200])).unwrap();
        assert!(engine.stats().overlay_bytes < 66 << 10);
    }
    assert_eq!(count(&engine), 2000);
}

fn count(engine: &Embedded) -> usize {
    let mut count = 0;
    engine
        .scan(b"", b"\xff", false, &mut |_, _| {
            count += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
    count
}
