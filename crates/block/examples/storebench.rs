//! Measures the store against the raw disk below it, interleaved, with CPU seconds per GB.
//!
//! `cargo run --release -p torchfs-block --example storebench -- DIR [ROUNDS]`: needs about 6 GB under DIR, and root for cold
//! reads that are really cold.

#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use torchfs_block::store::{Body, Config, NewPiece, Store};
use torchfs_codec::{Compression, encode};
use torchfs_disk::LocalDisk;
use torchfs_proto::{BlockId, LayoutId};
use torchfs_rpc::AlignedBuf;

const LARGE: usize = 4 << 20;
const SMALL: usize = 64 << 10;
const LARGE_COUNT: u64 = 256;
const SMALL_COUNT: u64 = 4_000;

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().expect("usage: storebench DIR [ROUNDS]"));
    let rounds: usize = args.next().map_or(3, |n| n.parse().unwrap());
    std::fs::create_dir_all(&dir).unwrap();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let cores = std::thread::available_parallelism().unwrap();
    println!("kernel {}, {cores} cores, {rounds} rounds, {}", kernel.trim(), dir.display());

    let disk = Arc::new(LocalDisk::open(dir.join("store")).unwrap());
    let store = Store::open(disk, Config::default()).unwrap();
    let next = AtomicU64::new(0);
    let mut table: Vec<(String, Vec<Figure>)> = Vec::new();
    for round in 0..rounds {
        let mut note = |name: &str, figure: Figure| match table.iter_mut().find(|(n, _)| n == name) {
            Some((_, figures)) => figures.push(figure),
            None => table.push((name.to_owned(), vec![figure])),
        };
        note("raw: 4 MiB writes, direct, one sync", raw_write(&dir));
        note("raw: 64 KiB overwrites, direct, a sync each", raw_synced(&dir));
        let first = next.load(Ordering::Relaxed);
        note("put 4 MiB, 1 thread", puts(&store, &next, LARGE, LARGE_COUNT, 1));
        note("put 4 MiB, 4 threads", puts(&store, &next, LARGE, LARGE_COUNT, 4));
        let small = next.load(Ordering::Relaxed);
        note("put 64 KiB, 1 thread", puts(&store, &next, SMALL, SMALL_COUNT, 1));
        note("put 64 KiB, 16 threads", puts(&store, &next, SMALL, SMALL_COUNT, 16));
        for threads in [1, 4] {
            drop_caches();
            note(&format!("raw: cold random 64 KiB, direct, {threads} threads"), raw_read(&dir, threads));
            drop_caches();
            let name = format!("load 64 KiB, cold, {threads} threads");
            // What is read twice is kept in memory, so each takes pieces of its own.
            let skip = if threads == 1 { 0 } else { SMALL_COUNT };
            note(&name, loads(&store, small, 2 * SMALL_COUNT, skip, SMALL, threads));
        }
        loads(&store, small, 2 * SMALL_COUNT, 0, SMALL, 4);
        note("load 64 KiB, warm, 1 thread", loads(&store, small, 2 * SMALL_COUNT, 0, SMALL, 1));
        drop_caches();
        note("load 4 MiB, cold, 4 threads", loads(&store, first, 2 * LARGE_COUNT, 0, LARGE, 4));
        let all = (first..next.load(Ordering::Relaxed)).map(id).collect();
        let start = Instant::now();
        store.delete(all).unwrap();
        println!("round {}: deleted everything in {:.1} ms", round + 1, start.elapsed().as_secs_f64() * 1e3);
    }
    println!("{:42} {:>9} {:>9} {:>9} {:>16}", "", "per s", "MB/s", "CPU s/GB", "spread MB/s");
    for (name, mut figures) in table {
        figures.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        let middle = &figures[figures.len() / 2];
        let (low, high) = (figures.first().unwrap().rate / 1e6, figures.last().unwrap().rate / 1e6);
        println!(
            "{name:42} {:9.0} {:9.0} {:9.2} {low:7.0} -{high:7.0}",
            middle.per_second,
            middle.rate / 1e6,
            middle.cpu
        );
    }
}

struct Figure {
    per_second: f64,
    /// Bytes per second.
    rate: f64,
    /// CPU seconds per GB, user and system, of the whole process.
    cpu: f64,
}

fn measure(count: u64, size: usize, work: impl FnOnce()) -> Figure {
    let cpu = cpu_seconds();
    let start = Instant::now();
    work();
    let seconds = start.elapsed().as_secs_f64();
    let bytes = count as f64 * size as f64;
    let cpu = (cpu_seconds() - cpu) / (bytes / 1e9);
    Figure { per_second: count as f64 / seconds, rate: bytes / seconds, cpu }
}

fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    // User and system time are fields 14 and 15 of all, in hundredths.
    after_name.split_whitespace().skip(11).take(2).map(|n| n.parse::<f64>().unwrap() / 100.0).sum()
}

fn drop_caches() {
    if std::fs::write("/proc/sys/vm/drop_caches", "1").is_err() {
        eprintln!("not root: cold reads may come from the page cache");
    }
}

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1, counter }
}

/// Bytes that do not shrink, in a buffer as payloads from the network have it.
fn content(len: usize) -> Bytes {
    let mut buf = AlignedBuf::with_len(len);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for chunk in buf.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    buf.into_bytes()
}

fn puts(store: &Store, next: &AtomicU64, size: usize, count: u64, threads: u64) -> Figure {
    let data = content(size);
    measure(count, size, || {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..count / threads {
                        let block = id(next.fetch_add(1, Ordering::Relaxed));
                        let encoded = encode(block, std::slice::from_ref(&data), Compression::None).unwrap();
                        let piece = NewPiece {
                            block,
                            piece: 0,
                            layout: LayoutId(1),
                            first: 0,
                            chunks: encoded.chunks,
                            payload: encoded.payload,
                        };
                        store.put(piece).unwrap();
                    }
                });
            }
        });
    })
}

/// Half of the pieces, each once, in an order without order.
fn loads(store: &Store, first: u64, pieces: u64, skip: u64, size: usize, threads: u64) -> Figure {
    let count = pieces / 2;
    measure(count, size, || {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    for n in 0..count / threads {
                        let at = (skip + n * threads + thread) * 7_919 % pieces;
                        let found = store.load(id(first + at), 0, 0..u32::MAX).unwrap();
                        let Body::Memory(bytes) = found.body else { panic!("in memory") };
                        assert_eq!(bytes.len(), size);
                    }
                });
            }
        });
    })
}

fn raw_file(dir: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
    options.open(dir.join("raw")).unwrap()
}

fn raw_write(dir: &Path) -> Figure {
    let file = raw_file(dir);
    let buf = AlignedBuf::copy_of(&content(LARGE));
    measure(LARGE_COUNT, LARGE, || {
        for n in 0..LARGE_COUNT {
            file.write_all_at(&buf, n * LARGE as u64).unwrap();
        }
        file.sync_data().unwrap();
    })
}

fn raw_synced(dir: &Path) -> Figure {
    let file = raw_file(dir);
    let buf = AlignedBuf::copy_of(&content(SMALL));
    measure(SMALL_COUNT / 4, SMALL, || {
        for n in 0..SMALL_COUNT / 4 {
            file.write_all_at(&buf, n * SMALL as u64).unwrap();
            file.sync_data().unwrap();
        }
    })
}

fn raw_read(dir: &Path, threads: u64) -> Figure {
    let file = &raw_file(dir);
    let places = LARGE_COUNT * (LARGE / SMALL) as u64;
    measure(SMALL_COUNT, SMALL, || {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    let mut buf = AlignedBuf::with_len(SMALL);
                    for n in 0..SMALL_COUNT / threads {
                        let at = (n * threads + thread) * 7_919 % places;
                        file.read_exact_at(&mut buf, at * SMALL as u64).unwrap();
                    }
                });
            }
        });
    })
}
