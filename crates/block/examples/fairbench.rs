//! Measures how long a small reader waits beside a greedy one: alone, as a session of its own, and in the greedy one's
//! session, where it queues behind everything as it would without turns.
//!
//! `cargo run --release -p torchfs-block --example fairbench -- DIR [ROUNDS]`: needs about 2 GB under DIR, and root to make reads
//! cold.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use torchfs_block::server::{BlockServer, Config, DiskName};
use torchfs_codec::{Compression, encode};
use torchfs_proto::msg::block::{Op, Request, method};
use torchfs_proto::{BlockId, LayoutId, msg};
use torchfs_rpc::{Call, Connection, Peer, Role};

const LARGE: usize = 4 << 20;
const LARGE_COUNT: u64 = 320;
const SMALL: usize = 64 << 10;
/// Small pieces of each phase; each is read once, so none is in memory.
const SMALL_COUNT: u64 = 400;
/// Reads that the greedy one has in flight.
const GREED: u64 = 64;

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().expect("usage: fairbench DIR [ROUNDS]");
    let rounds: usize = args.next().map_or(3, |n| n.parse().unwrap());
    std::fs::create_dir_all(&dir).unwrap();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let cores = std::thread::available_parallelism().unwrap();
    println!("kernel {}, {cores} cores, {rounds} rounds, greedy: {GREED} x 4 MiB, {dir}", kernel.trim());
    let dirs = vec![DiskName { id: 1, path: dir }];
    let server = BlockServer::open(Config { dirs, scrub_rate: 0, ..Config::default() }, None).unwrap();
    let to = Connection::local(server, Peer::new("bench", Role::Agent));
    for counter in 0..LARGE_COUNT {
        put(&to, counter, LARGE).await;
    }
    for counter in LARGE_COUNT..LARGE_COUNT + 3 * rounds as u64 * SMALL_COUNT {
        put(&to, counter, SMALL).await;
    }
    let mut first = LARGE_COUNT;
    println!("{:<40} {:>9} {:>9} {:>9} {:>12}", "small reader", "reads", "p50 ms", "p99 ms", "greedy MB/s");
    for _ in 0..rounds {
        for (name, greedy, session) in [
            ("alone", false, 2),
            ("beside a greedy session", true, 2),
            ("in the greedy session's queue", true, 1),
        ] {
            phase(&to, name, greedy, session, first).await;
            first += SMALL_COUNT;
        }
    }
}

async fn phase(to: &Connection, name: &str, greedy: bool, session: u64, first: u64) {
    // Without root the reads are warm, and the table says so by its speed.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
    let (next, running) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
    let began = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..if greedy { GREED } else { 0 } {
        let (to, next) = (to.clone(), next.clone());
        tasks.push(tokio::spawn(async move {
            loop {
                let counter = next.fetch_add(1, Ordering::Relaxed);
                if counter >= LARGE_COUNT {
                    return;
                }
                get(&to, 1, counter).await;
            }
        }));
    }
    let small = tokio::spawn({
        let (to, running) = (to.clone(), running.clone());
        async move {
            let mut took = Vec::new();
            for counter in first..first + SMALL_COUNT {
                let began = Instant::now();
                get(&to, session, counter).await;
                took.push(began.elapsed());
                if !running.load(Ordering::Relaxed) {
                    break;
                }
            }
            took
        }
    });
    for task in tasks {
        task.await.unwrap();
    }
    let seconds = began.elapsed().as_secs_f64();
    running.store(!greedy, Ordering::Relaxed);
    let mut took = small.await.unwrap();
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    let speed = if greedy { (LARGE_COUNT as usize * LARGE) as f64 / 1e6 / seconds } else { 0.0 };
    println!("{name:<40} {:>9} {:>9.2} {:>9.2} {speed:>12.0}", took.len(), at(0.5), at(0.99));
}

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1, counter }
}

async fn put(to: &Connection, counter: u64, len: usize) {
    let mut state = counter + 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let data: Vec<u8> = (0..len / 8).flat_map(|_| next().to_le_bytes()).collect();
    let encoded = encode(id(counter), &[Bytes::from(data)], Compression::None).unwrap();
    let (chunks, layout) = (encoded.chunks, LayoutId(1));
    let op = Op::Put { block: id(counter), piece: 0, layout, group_version: 0, chunks, first: 0 };
    call(to, 3, op, encoded.payload.concat().into()).await;
}

async fn get(to: &Connection, session: u64, counter: u64) {
    call(to, session, Op::Get { block: id(counter), piece: 0, first: 0, count: 256 }, Bytes::new()).await;
}

async fn call(to: &Connection, session: u64, op: Op, payload: Bytes) {
    let request = Request { session, capability: None, op };
    let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(60));
    to.call(call.payload(payload).carries_sums()).await.unwrap();
}
