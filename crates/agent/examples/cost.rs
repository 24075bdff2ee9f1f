//! What a round trip through the kernel costs: `cargo run --release -p torchfs-agent --example cost`, as root.

// It borrows the tests' file system and uses a part of it.
#![allow(dead_code, clippy::unwrap_used, missing_docs)]

#[path = "../tests/it/stage.rs"]
mod stage;
#[path = "../tests/it/toy.rs"]
mod toy;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use torchfs_agent::FuseConfig;

use stage::Stage;

fn main() {
    for readers in [1, 2, 3, 4] {
        let Some(stage) = Stage::with(FuseConfig { readers, ..FuseConfig::default() }, Duration::ZERO) else {
            return;
        };
        let ino = stage.toy.put("file", &vec![7; 64 << 20]);
        let path = stage.at("file");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        measure(readers, "getattr", 100_000, 1, || {
            file.metadata().unwrap();
        });
        measure(readers, "lookup + getattr", 50_000, 4, || {
            fs::metadata(&path).unwrap();
        });
        let block = vec![1; 1 << 20];
        measure(readers, "write 1 MiB", 2_000, 1, || {
            file.write_all_at(&block, 0).unwrap();
        });
        measure(readers, "write 1 MiB", 2_000, 4, || {
            file.write_all_at(&block, 0).unwrap();
        });
        for threads in [1, 4] {
            measure(readers, "read 64 MiB cold", 20, threads, || {
                stage.tell(torchfs_agent::fuse::Notice::Inode { ino, offset: Some(0), len: 0 });
                let mut block = vec![0; 1 << 20];
                for at in 0..64 {
                    file.read_exact_at(&mut block, at << 20).unwrap();
                }
            });
        }
        drop(file);
        stage.end();
    }
}

fn measure(readers: usize, what: &str, count: u32, threads: u32, work: impl Fn() + Sync) {
    let (start, cpu) = (Instant::now(), cpu());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..count / threads).for_each(|_| work()));
        }
    });
    let wall = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
    let cpu = (self::cpu() - cpu) * 1e6 / f64::from(count);
    println!("{readers} readers, {threads} callers: {what:18} {wall:9.1} µs wall {cpu:9.1} µs CPU");
}

/// Seconds of CPU this process has used, both sides of the round trip.
fn cpu() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
