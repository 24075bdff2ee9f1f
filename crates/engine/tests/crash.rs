//! Power cuts: whatever the disk loses, what is left is a prefix of the order with everything that was told durable.
//!
//! Log and replica run on doubles that share one power, without threads, so that a seed repeats every step. A life of
//! the engine ends with a power cut, at a random operation of the disk, or with the death of the process alone; the next
//! life must find what it was promised. TORCHFS_SEED runs one seed, `make soak` many fresh ones.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use torchfs_disk::{Op, SimDisk};
use torchfs_engine::{Batch, Change, Config, Embedded, Engine, Fence, LogConfig, MemReplica, Result, Seq};

const SEEDS: u64 = 3_000;
const SEEDS_SOAK: u64 = 200_000;

type State = BTreeMap<Vec<u8>, Vec<u8>>;

#[test]
fn every_power_cut_leaves_a_prefix_with_all_durable_batches() {
    let mut sum = Seen::default();
    for seed in torchfs_fuzz::seeds(0, SEEDS, SEEDS_SOAK) {
        let seen = std::panic::catch_unwind(|| Life::run(seed))
            .unwrap_or_else(|_| panic!("seed {seed} failed; run it alone with TORCHFS_SEED={seed}"));
        sum.lives += seen.lives;
        sum.checkpoints += seen.checkpoints;
        sum.lost += seen.lost;
        sum.replayed += seen.replayed;
    }
    println!("{sum:?}");
    if std::env::var_os("TORCHFS_SEED").is_none() {
        assert!(
            sum.checkpoints > 1000 && sum.lost > 1000 && sum.replayed > 1000,
            "the seeds test too little: {sum:?}"
        );
    }
}

/// The same with all threads running: no step repeats, the promise is the same.
#[test]
fn callers_on_many_threads_keep_what_they_were_told() {
    for seed in torchfs_fuzz::seeds(0, 40, 2000) {
        let disk = SimDisk::new(seed);
        let replica = MemReplica::new(&disk);
        let config = Config {
            log: LogConfig { segment_bytes: 64 << 10, segments_min: 2, segments_max: 4 },
            checkpoint_keys: 20,
            linger: Duration::from_micros(200),
            ..Config::default()
        };
        let open = |disk: &SimDisk, replica: &MemReplica| {
            Embedded::open_with(Arc::new(disk.clone()), Box::new(replica.clone()), config.clone()).unwrap()
        };
        let engine = open(&disk, &replica);
        disk.power_off_after(50 + seed % 40 * 10);
        let ordered = Mutex::new(BTreeMap::new());
        let told = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                let (engine, ordered, told) = (&engine, &ordered, &told);
                scope.spawn(move || {
                    for n in 0u32.. {
                        let mut batch = Batch::at(1);
                        batch.put(vec![b'k', thread, n as u8 % 16], n.to_le_bytes());
                        batch.put("last", [thread]);
                        let changes = batch.changes.clone();
                        let Ok(seq) = engine.order(batch) else { return };
                        ordered.lock().insert(seq, changes);
                        if n % 4 == 0 {
                            if engine.wait_durable(seq, Duration::from_secs(60)).is_err() {
                                return;
                            }
                            told.fetch_max(seq.0, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        drop(engine);
        let after = disk.power_cut(seed);
        let engine = open(&after, &replica.after(&after));
        let last = engine.ordered();
        let ordered = ordered.into_inner();
        assert!(told.into_inner() <= last.0 && last.0 <= ordered.len() as u64, "seed {seed}");
        let mut model = State::new();
        for change in ordered.range(..=last).flat_map(|(_, changes)| changes) {
            if let Change::Put(key, value) = change {
                model.insert(key.clone(), value.clone());
            }
        }
        assert!(state_of(&engine) == model, "seed {seed}");
    }
}

/// What the seeds met, so that a test that tests nothing is noticed.
#[derive(Default, Debug)]
struct Seen {
    lives: u64,
    checkpoints: u64,
    /// Batches that were ordered and lost.
    lost: u64,
    replayed: u64,
}

struct Life {
    rng: StdRng,
    disk: SimDisk,
    replica: MemReplica,
    config: Config,
    /// Everything ordered, by place.
    history: Vec<Vec<Change>>,
    told: Seq,
    fence: Fence,
    seen: Seen,
}

impl Life {
    fn run(seed: u64) -> Seen {
        let mut rng = StdRng::seed_from_u64(seed);
        let disk = SimDisk::new(seed);
        let config = Config {
            threads: false,
            log: LogConfig {
                segment_bytes: [16 << 10, 24 << 10, 48 << 10][rng.random_range(0..3)],
                segments_min: 2,
                segments_max: rng.random_range(2..5),
            },
            group_bytes: [1, 4 << 10, 1 << 20][rng.random_range(0..3)],
            checkpoint_keys: usize::MAX,
            reserve_bytes: 0,
            ..Config::default()
        };
        let replica = MemReplica::new(&disk);
        let seen = Seen::default();
        let mut life =
            Life { rng, disk, replica, config, history: Vec::new(), told: Seq(0), fence: Fence(0), seen };
        for _ in 0..4 {
            let engine = life.open();
            life.check(&engine);
            life.work(&engine);
            life.seen.checkpoints += engine.stats().checkpoints;
            life.die(engine);
        }
        let engine = life.open();
        life.check(&engine);
        life.seen
    }

    /// Opens it, however often the power goes meanwhile.
    fn open(&mut self) -> Embedded {
        loop {
            if self.rng.random_bool(0.3) {
                self.disk.power_off_after(self.rng.random_range(0..20));
            }
            match Embedded::open_with(
                Arc::new(self.disk.clone()),
                Box::new(self.replica.clone()),
                self.config.clone(),
            ) {
                Ok(engine) => return engine,
                Err(error) => {
                    assert!(self.disk.is_off(), "it does not open: {error}");
                    self.cut();
                }
            }
        }
    }

    /// Checks what a fresh engine holds against what was promised.
    fn check(&mut self, engine: &Embedded) {
        self.seen.lives += 1;
        let last = engine.ordered();
        assert!(last >= self.told, "batch {} was durable, the log ends at {last}", self.told);
        assert!(
            last.0 as usize <= self.history.len(),
            "the log ends at {last}, only {} were ordered",
            self.history.len()
        );
        assert_eq!(engine.durable(), last);
        assert!(engine.fence() > self.fence);
        self.fence = engine.fence();
        self.seen.lost += self.history.len() as u64 - last.0;
        self.seen.replayed += last.0 - engine.stats().applied.0;
        self.history.truncate(last.0 as usize);
        self.told = last;
        assert!(state_of(engine) == self.model(), "the state is not that after batch {last}");
    }

    fn model(&self) -> State {
        let mut state = State::new();
        for change in self.history.iter().flatten() {
            match change {
                Change::Put(key, value) => drop(state.insert(key.clone(), value.clone())),
                Change::Delete(key) => drop(state.remove(key)),
            }
        }
        state
    }

    fn work(&mut self, engine: &Embedded) {
        if self.rng.random_bool(0.5) {
            self.disk.power_off_after(self.rng.random_range(0..80));
        }
        if self.rng.random_bool(0.1) {
            self.disk.fail(Op::Sync, self.rng.random_range(0..20), libc::EIO);
        }
        for _ in 0..self.rng.random_range(0..60) {
            if self.step(engine).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, engine: &Embedded) -> Result<()> {
        match self.rng.random_range(0..20) {
            0 => drop(engine.checkpoint()?),
            1..6 => {
                let from = self.told.0.min(engine.ordered().0);
                let seq = Seq(self.rng.random_range(from..=engine.ordered().0));
                engine.wait_durable(seq, Duration::ZERO)?;
                assert!(engine.durable() >= seq);
            }
            _ => {
                let mut batch = Batch::at(1);
                for _ in 0..self.rng.random_range(0..5) {
                    let key = vec![b'k', self.rng.random_range(0..40)];
                    if self.rng.random_bool(0.3) {
                        batch.delete(key);
                    } else {
                        let len = [3, 30, 700, 2500][self.rng.random_range(0..4)];
                        batch.put(key, vec![self.rng.random::<u8>(); len]);
                    }
                }
                let changes = batch.changes.clone();
                let seq = engine.order(batch)?;
                self.history.push(changes);
                assert_eq!(seq.0 as usize, self.history.len());
            }
        }
        self.told = self.told.max(engine.durable());
        Ok(())
    }

    fn die(&mut self, engine: Embedded) {
        // A step that failed may have made more durable before: what is told counts.
        self.told = self.told.max(engine.durable());
        if self.rng.random_bool(0.25) && !self.disk.is_off() {
            self.disk = self.disk.crash();
            self.replica = self.replica.after(&self.disk);
        } else {
            self.cut();
        }
        drop(engine);
    }

    fn cut(&mut self) {
        self.disk = self.disk.power_cut(self.rng.random());
        self.replica = self.replica.after(&self.disk);
    }
}

fn state_of(engine: &dyn Engine) -> State {
    let mut state = State::new();
    engine
        .scan(b"", b"\xff", false, &mut |key, value| {
            state.insert(key.to_vec(), value.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
    state
}
