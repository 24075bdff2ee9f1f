//! How fast the embedded engine is on this disk: `cargo run --release -p torchfs-engine --example enginebench [DIR]`.
//!
//! Prints gets per second (overlay and replica), scans, what ordering costs, durable batches per second when 1, 64 or
//! 512 share a sync, the CPU time of each, and what a pair takes on disk. CPU time is the robust figure on a noisy
//! machine.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use torchfs_engine::{Batch, Config, Embedded, Engine, Result, Seq};

const KEYS: u64 = 300_000;
const LONG: Duration = Duration::from_secs(600);

fn main() -> Result<()> {
    let dir = std::env::args().nth(1).unwrap_or_else(|| "enginebench.tmp".into());
    let _ = std::fs::remove_dir_all(&dir);
    let engine = Embedded::open(&dir, Config::default())?;

    line("order (4 puts, nobody waits)", KEYS / 4, || {
        for n in 0..KEYS / 4 {
            engine.order(create(n))?;
        }
        Ok(())
    })?;
    line("get from the overlay", 200_000, || gets(&engine, 200_000, KEYS / 4 - 1000, 1000))?;
    line("checkpoint, per pair", KEYS, || engine.checkpoint().map(|_| ()))?;
    line("get from the replica", 300_000, || gets(&engine, 300_000, 0, KEYS / 4))?;
    line("get of a missing key", 300_000, || {
        for n in 0..300_000u64 {
            engine.get(&key(b'x', n))?;
        }
        Ok(())
    })?;
    line("scan, per pair", KEYS, || engine.scan(b"", b"\xff", false, &mut |_, _| ControlFlow::Continue(())))?;
    line("scan of one pair", 100_000, || {
        for n in 0..100_000u64 {
            engine.scan(&key(b'e', n * 7919 % (KEYS / 4)), b"\xff", false, &mut |_, _| {
                ControlFlow::Break(())
            })?;
        }
        Ok(())
    })?;
    let stats = engine.stats();
    println!(
        "{:<44} {:>10.0} bytes ({} pairs of ~130 bytes)",
        "replica, per pair",
        stats.replica_bytes as f64 / stats.replica_keys as f64,
        stats.replica_keys
    );

    for group in [1u64, 64, 512] {
        let rounds = if group == 1 { 1000 } else { 300 };
        let before = engine.stats().syncs;
        line(&format!("durable batches, {group} share a sync"), rounds * group, || {
            for round in 0..rounds {
                let mut last = Seq(0);
                for n in 0..group {
                    last = engine.order(create(1_000_000 + round * group + n))?;
                }
                engine.wait_durable(last, LONG)?;
            }
            Ok(())
        })?;
        println!("{:<44} {:>10} syncs", "", engine.stats().syncs - before);
    }
    drop(engine);
    let started = Instant::now();
    let engine = Embedded::open(&dir, Config::default())?;
    println!("{:<44} {:>10.1} ms", "open with what the log held", started.elapsed().as_secs_f64() * 1e3);
    drop(engine);
    let _ = std::fs::remove_dir_all(&dir);
    Ok(())
}

/// Like the batch of a file creation: entry, inode, parent, key of the request.
fn create(n: u64) -> Batch {
    let mut batch = Batch::at(n as i64);
    for (kind, len) in [(b'e', 40), (b'i', 160), (b'p', 160), (b'r', 60)] {
        batch.put(key(kind, n), vec![kind; len]);
    }
    batch
}

fn key(kind: u8, n: u64) -> Vec<u8> {
    let mut key = vec![kind];
    key.extend_from_slice(&n.to_be_bytes());
    key.extend_from_slice(b"some-name.jpg");
    key
}

fn gets(engine: &Embedded, count: u64, first: u64, of: u64) -> Result<()> {
    for n in 0..count {
        let n = first + n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % of;
        assert!(engine.get(&key(b'i', n))?.is_some());
    }
    Ok(())
}

fn line(what: &str, count: u64, run: impl FnOnce() -> Result<()>) -> Result<()> {
    let (started, cpu) = (Instant::now(), cpu_time());
    run()?;
    let (took, cpu) = (started.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    let per = |seconds: f64| seconds * 1e6 / count as f64;
    println!(
        "{what:<44} {:>10.0} /s   {:>7.2} µs   {:>7.2} µs CPU",
        count as f64 / took,
        per(took),
        per(cpu)
    );
    Ok(())
}

/// CPU time of the whole process, from the kernel's count of clock ticks.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name may hold spaces; the numbers follow the last parenthesis. utime and stime are fields 14 and 15.
    let ticks: u64 = stat
        .rsplit(')')
        .next()
        .map(|rest| {
            rest.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
        })
        .unwrap_or(0);
    Duration::from_millis(ticks * 10)
}
