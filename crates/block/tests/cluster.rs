//! Data servers among themselves: several disks, pieces pulled from others, scrubbing, and who is served when many ask.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use torchfs_block::server::{BlockServer, Config, DiskName};
use torchfs_block::store;
use torchfs_client::Connector;
use torchfs_codec::erasure::{Code as Coding, Piece};
use torchfs_codec::{Compression, Encoded, encode};
use torchfs_disk::{Op as DiskOp, SimDisk};
use torchfs_proto::disk::{Disk, DiskFile, Space};
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::block::{Op, PullItem, Reply, Request, method};
use torchfs_proto::msg::meta::Heartbeat;
use torchfs_proto::{BlockId, ClusterId, Code, Fault, LayoutId, ServerId, msg};
use torchfs_rpc::{Call, Connection, Link, Peer, Role};

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 3, counter }
}

/// Noise that follows from the counter: no two blocks share bytes, and nothing shrinks.
fn data(counter: u64, len: usize) -> Bytes {
    let mut state = (counter + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect::<Vec<u8>>().into()
}

fn config(server: u32) -> Config {
    let store = store::Config {
        cluster: ClusterId(1),
        server: ServerId(server),
        segment_bytes: 4 << 20,
        keep_free: 0,
        ..store::Config::default()
    };
    Config { store, scrub_rate: 0, pull_timeout: Duration::from_secs(2), ..Config::default() }
}

/// Servers of one process by their addresses.
#[derive(Clone, Default)]
struct Net(Arc<Mutex<HashMap<String, Arc<BlockServer>>>>);

impl Connector for Net {
    fn link(&self, addr: &str) -> Link {
        match self.0.lock().get(addr) {
            Some(server) => Link::fixed(Connection::local(server.clone(), Peer::new(addr, Role::Data))),
            // Nobody listens on port 1.
            None => Link::new("127.0.0.1:1", torchfs_rpc::Config::default()),
        }
    }
}

impl Net {
    /// A server over these disks.
    fn start(&self, server: u32, disks: &[SimDisk], config: Config) -> Arc<BlockServer> {
        let named = disks.iter().zip(1..).map(|(disk, n)| {
            let name = DiskName { id: u64::from(server) * 100 + n, path: format!("/disk{n}") };
            (name, Arc::new(disk.clone()) as Arc<dyn Disk>)
        });
        let made = BlockServer::over_all(named.collect(), config, Some(Arc::new(self.clone()))).unwrap();
        self.0.lock().insert(format!("s{server}"), made.clone());
        made
    }
}

async fn ask(to: &Arc<BlockServer>, session: u64, op: Op, payload: Bytes) -> Result<(Reply, Bytes), Fault> {
    let connection = Connection::local(to.clone(), Peer::new("test", Role::Agent));
    let request = Request { session, capability: None, op };
    let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(60));
    let reply = connection.call(call.payload(payload).carries_sums()).await?;
    Ok((minicbor::decode(&reply.body).unwrap(), reply.payload.into_bytes()))
}

async fn put(
    to: &Arc<BlockServer>,
    block: BlockId,
    piece: u8,
    first: u32,
    bytes: &Piece,
) -> Result<(), Fault> {
    let chunks = bytes.chunks.clone();
    let op = Op::Put { block, piece, layout: LayoutId(1), group_version: 0, chunks, first };
    ask(to, 1, op, bytes.payload.clone()).await.map(|(reply, _)| assert_eq!(reply, Reply::Done))
}

/// Puts a whole copy.
async fn put_copy(to: &Arc<BlockServer>, counter: u64, piece: u8, len: usize) -> Result<(), Fault> {
    let encoded = encode(id(counter), &[data(counter, len)], Compression::Lz4).unwrap();
    put(to, id(counter), piece, 0, &gather(encoded)).await
}

fn gather(encoded: Encoded) -> Piece {
    Piece { chunks: encoded.chunks, payload: encoded.payload.concat().into() }
}

async fn get(from: &Arc<BlockServer>, counter: u64, piece: u8) -> Result<Piece, Fault> {
    let op = Op::Get { block: id(counter), piece, first: 0, count: 256 };
    let (reply, payload) = ask(from, 1, op, Bytes::new()).await?;
    let Reply::Chunks { chunks } = reply else { panic!("{reply:?}") };
    Ok(Piece { chunks, payload })
}

async fn missing(from: &Arc<BlockServer>, pieces: Vec<(BlockId, u8)>) -> Vec<(BlockId, u8)> {
    match ask(from, 0, Op::Missing { pieces }, Bytes::new()).await.unwrap().0 {
        Reply::Missing { pieces } => pieces,
        other => panic!("{other:?}"),
    }
}

async fn pull(to: &Arc<BlockServer>, items: Vec<PullItem>) -> Vec<(u32, Fault)> {
    match ask(to, 0, Op::Pull { items, rate: 0 }, Bytes::new()).await.unwrap().0 {
        Reply::Pulled { failed, .. } => failed,
        other => panic!("{other:?}"),
    }
}

async fn scrub(at: &Arc<BlockServer>) -> Vec<(BlockId, u8)> {
    let (mut after, mut all) = (None, Vec::new());
    loop {
        match ask(at, 0, Op::Scrub { after, limit: 3, rate: 0 }, Bytes::new()).await.unwrap().0 {
            Reply::Scrubbed { bad, after: next, .. } => {
                all.extend(bad);
                match next {
                    Some(_) => after = next,
                    None => return all,
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

fn copies(counter: u64, piece: u8, len: usize, sources: &[(u8, &str)]) -> PullItem {
    PullItem {
        block: id(counter),
        piece,
        layout: LayoutId(1),
        scheme: Scheme::Replicas(3),
        block_len: len as u32,
        sources: sources.iter().map(|(piece, addr)| (*piece, (*addr).to_owned())).collect(),
        verify: false,
    }
}

/// Flips one bit in the stored bytes of a piece, wherever it is on the disk.
fn flip(disk: &SimDisk, stored: &[u8]) {
    for name in disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment")) {
        let file = disk.open(&name).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        if let Some(at) = bytes.windows(64).position(|part| part == &stored[..64]) {
            let at = at + stored.len() / 2;
            return file.write_at(&[bytes[at] ^ 8], at as u64).unwrap();
        }
    }
    panic!("the piece is not on the disk");
}

fn report(of: &BlockServer) -> Heartbeat {
    let mut beat = Heartbeat::default();
    of.report(&mut beat);
    beat
}

#[tokio::test]
async fn pieces_are_spread_over_disks_by_their_room() {
    let net = Net::default();
    let disks = [SimDisk::new(0), SimDisk::new(1), SimDisk::new(2)];
    for (disk, share) in disks.iter().zip([1, 2, 3]) {
        disk.set_capacity(share * (160 << 20));
    }
    let server = net.start(1, &disks, config(1));
    for counter in 0..600 {
        put_copy(&server, counter, 0, 20_000).await.unwrap();
    }
    server.stat().unwrap();
    let pieces: Vec<u64> = server.disks().iter().map(|disk| disk.pieces).collect();
    assert_eq!(pieces.iter().sum::<u64>(), 600);
    for (pieces, share) in pieces.iter().zip([100, 200, 300]) {
        assert!(pieces.abs_diff(share) < 60, "{pieces} instead of about {share}");
    }
    for counter in 0..600 {
        // The same again changes nothing, wherever it is.
        put_copy(&server, counter, 0, 20_000).await.unwrap();
        get(&server, counter, 0).await.unwrap();
    }
    assert_eq!(server.stat().unwrap().pieces, 600);
    let Reply::Listed { pieces, .. } =
        ask(&server, 0, Op::List { after: None, limit: 1000 }, Bytes::new()).await.unwrap().0
    else {
        panic!()
    };
    assert_eq!(
        pieces.iter().map(|piece| piece.block.counter).collect::<Vec<_>>(),
        (0..600).collect::<Vec<_>>()
    );
    let blocks = (0..300).map(id).collect();
    ask(&server, 0, Op::Delete { blocks }, Bytes::new()).await.unwrap();
    assert_eq!(server.stat().unwrap().pieces, 300);
}

#[tokio::test]
async fn a_disk_that_fails_is_taken_out_alone_and_repaired_onto_the_others() {
    let net = Net::default();
    let other = net.start(2, &[SimDisk::new(9)], config(2));
    let disks = [SimDisk::new(0), SimDisk::new(1)];
    let server = net.start(1, &disks, config(1));
    for counter in 0..40 {
        put_copy(&server, counter, 0, 30_000).await.unwrap();
        put_copy(&other, counter, 1, 30_000).await.unwrap();
    }
    disks[1].fail(DiskOp::Sync, 0, 5);
    // Some of these meet the failing disk; all of them are stored.
    for counter in 100..140 {
        put_copy(&server, counter, 0, 30_000).await.unwrap();
    }
    let beat = report(&server);
    let failed: Vec<bool> = beat.disks.iter().map(|disk| disk.failed).collect();
    assert_eq!(failed, [false, true]);
    assert!(!beat.disks[1].fault.is_empty() && beat.disks[1].path == "/disk2");
    assert!(beat.total < 2 << 40, "only the disk that works counts");

    let lost = missing(&server, (0..40).map(|counter| (id(counter), 0)).collect()).await;
    assert!((5..35).contains(&lost.len()), "{} of 40 were on the disk", lost.len());
    // It can still be read, for whoever has no other source.
    for (block, piece) in &lost {
        get(&server, block.counter, *piece).await.unwrap();
    }
    let items = lost.iter().map(|(block, piece)| copies(block.counter, *piece, 30_000, &[(1, "s2")]));
    assert_eq!(pull(&server, items.collect()).await, []);
    assert!(missing(&server, (0..40).map(|counter| (id(counter), 0)).collect()).await.is_empty());
    ask(&server, 0, Op::Delete { blocks: vec![id(100)] }, Bytes::new()).await.unwrap();
    drop(server);
    net.0.lock().remove("s1");

    // The disk comes back at the next start with what was repaired meanwhile. The scrub drops one of the two, never both.
    let disks = [disks[0].crash(), disks[1].crash()];
    let (bad, whole) = (lost[0].0.counter, lost[1].0.counter);
    flip(&disks[0], &data(bad, 30_000));
    let config = Config { scrub_rate: 1 << 30, scrub_every: Duration::ZERO, ..config(1) };
    let again = net.start(1, &disks, Config { watch_every: Duration::from_millis(5), ..config });
    assert!(report(&again).disks.iter().all(|disk| !disk.failed));
    until(&again, |beat| beat.pieces == 79).await;
    let holds = |n: usize, counter| again.stores()[n].stored(id(counter), 0).is_some();
    assert_eq!([holds(0, whole), holds(1, whole)], [true, false], "the earlier disk keeps it");
    assert_eq!([holds(0, bad), holds(1, bad)], [false, true], "but not if its copy is damaged");
    for counter in (0..40).chain(101..140) {
        assert_eq!(get(&again, counter, 0).await.unwrap().chunks[0].raw, 30_000);
    }
}

#[tokio::test]
async fn a_disk_with_damage_found_at_the_start_is_reported_as_another_one() {
    let net = Net::default();
    let disk = SimDisk::new(0);
    let server = net.start(1, std::slice::from_ref(&disk), config(1));
    for counter in 0..5 {
        put_copy(&server, counter, 0, 3_000).await.unwrap();
    }
    drop(server);
    drop(net.0.lock().remove("s1"));
    let server = net.start(1, &[disk.crash()], config(1));
    assert_eq!(report(&server).disks[0].id, 101, "nothing is wrong with it");
    drop(server);
    drop(net.0.lock().remove("s1"));
    let disk = SimDisk::new(0);
    let server = net.start(1, std::slice::from_ref(&disk), config(1));
    for counter in 0..5 {
        put_copy(&server, counter, 0, 3_000).await.unwrap();
    }
    // The headers of some records cannot be read any more, so nobody knows what was there.
    for name in disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment")) {
        disk.open(&name).unwrap().write_at(&[0; 4096], 8192 + 4096).unwrap();
    }
    drop(server);
    drop(net.0.lock().remove("s1"));
    let server = net.start(1, &[disk.crash()], config(1));
    assert_eq!(server.stat().unwrap().pieces, 4);
    let beat = report(&server);
    assert!(!beat.disks[0].failed && beat.disks[0].id != 101, "so that its groups are looked through");
}

#[tokio::test]
async fn a_server_whose_disks_all_failed_says_so() {
    let net = Net::default();
    let disk = SimDisk::new(0);
    let server = net.start(1, std::slice::from_ref(&disk), config(1));
    put_copy(&server, 1, 0, 1_000).await.unwrap();
    disk.fail(DiskOp::Sync, 0, 5);
    assert_eq!(put_copy(&server, 2, 0, 1_000).await.unwrap_err().code, Code::Io);
    assert_eq!(put_copy(&server, 3, 0, 1_000).await.unwrap_err().code, Code::Io);
    let delete = ask(&server, 0, Op::Delete { blocks: vec![id(1)] }, Bytes::new()).await;
    assert_eq!(delete.unwrap_err().code, Code::Io);
    assert!(server.stat().is_err());
}

#[tokio::test]
async fn copies_are_pulled_from_whoever_has_one() {
    let net = Net::default();
    let disks: Vec<SimDisk> = (0..3).map(SimDisk::new).collect();
    let servers: Vec<_> =
        (1..4).map(|n| net.start(n, &disks[n as usize - 1..n as usize], config(n))).collect();
    for counter in 0..10 {
        put_copy(&servers[0], counter, 0, 200_000).await.unwrap();
        put_copy(&servers[1], counter, 1, 200_000).await.unwrap();
    }
    // The first source of one block is damaged, another is not there, a third one is nobody.
    let stored = get(&servers[0], 4, 0).await.unwrap().payload;
    flip(&disks[0], &stored);
    ask(&servers[0], 0, Op::Drop { pieces: vec![(id(5), 0)] }, Bytes::new()).await.unwrap();
    let sources = [(0, "s1"), (1, "s2")];
    let mut items: Vec<_> = (0..10).map(|counter| copies(counter, 2, 200_000, &sources)).collect();
    items.push(copies(6, 1, 200_000, &[(0, "nowhere"), (1, "s2")]));
    items.push(copies(77, 2, 200_000, &sources));
    items.push(copies(7, 3, 200_000, &sources));
    items.push(copies(8, 1, 100_000, &sources));
    let failed = pull(&servers[2], items).await;
    let codes: Vec<(u32, Code)> = failed.iter().map(|(n, fault)| (*n, fault.code)).collect();
    assert_eq!(codes, [(11, Code::Gone), (12, Code::Invalid), (13, Code::Gone)], "{failed:?}");
    assert!(missing(&servers[2], vec![(id(6), 1)]).await.is_empty());
    for counter in 0..10 {
        assert_eq!(get(&servers[2], counter, 2).await.unwrap(), get(&servers[1], counter, 1).await.unwrap());
    }
    // Whoever sent the damaged one has looked at it since.
    assert_eq!(missing(&servers[0], vec![(id(4), 0), (id(3), 0)]).await, [(id(4), 0)]);
    assert_eq!(report(&servers[0]).bad, [(id(4), 0)]);
    // Durable: a power cut changes nothing.
    drop(net.0.lock().remove("s3"));
    let after = net.start(3, &[disks[2].power_cut(1)], config(3));
    for counter in 0..10 {
        get(&after, counter, 2).await.unwrap();
    }
}

#[tokio::test]
async fn every_piece_is_rebuilt_from_as_many_others_as_the_code_needs() {
    let net = Net::default();
    let code = Coding { data: 4, parity: 2 };
    let len = 700_000;
    let encoded = encode(id(1), &[data(1, len)], Compression::Lz4).unwrap();
    let count = encoded.chunks.len() as u32;
    let pieces: Vec<Piece> = code.split(id(1), &encoded).unwrap().into_iter().map(gather).collect();
    let disks: Vec<SimDisk> = (0..6).map(SimDisk::new).collect();
    for (n, piece) in pieces.iter().enumerate() {
        let server = net.start(n as u32, &disks[n..=n], config(n as u32));
        put(&server, id(1), n as u8, code.first_index(n as u8, count), piece).await.unwrap();
    }
    let item = |piece: u8, sources: &[u8]| PullItem {
        scheme: Scheme::Ec { data: 4, parity: 2 },
        sources: sources.iter().map(|n| (*n, format!("s{n}"))).collect(),
        ..copies(1, piece, len, &[])
    };
    let fresh = net.start(10, &[SimDisk::new(10)], config(10));
    for wanted in 0..6_u8 {
        let others: Vec<u8> = (0..6).filter(|n| *n != wanted).collect();
        for without in &others {
            let four: Vec<u8> = others.iter().copied().filter(|n| n != without).collect();
            assert_eq!(pull(&fresh, vec![item(wanted, &four)]).await, [], "{wanted} from {four:?}");
            assert_eq!(get(&fresh, 1, wanted).await.unwrap(), pieces[usize::from(wanted)]);
            ask(&fresh, 0, Op::Drop { pieces: vec![(id(1), wanted)] }, Bytes::new()).await.unwrap();
            let failed = pull(&fresh, vec![item(wanted, &four[..3])]).await;
            assert_eq!(failed[0].1.code, Code::Gone);
        }
        // A damaged one among five: another takes its place, and no wrong byte is stored.
        let bad = (wanted + 1) % 6;
        let mut others = others;
        others.sort_by_key(|n| (*n != bad, *n));
        let stored = &pieces[usize::from(bad)].payload;
        flip(&disks[usize::from(bad)], stored);
        assert_eq!(pull(&fresh, vec![item(wanted, &others)]).await, []);
        assert_eq!(get(&fresh, 1, wanted).await.unwrap(), pieces[usize::from(wanted)]);
        ask(&fresh, 0, Op::Drop { pieces: vec![(id(1), wanted)] }, Bytes::new()).await.unwrap();
        // Its own server heals it from the others.
        let holder = net.0.lock()[&format!("s{bad}")].clone();
        let rest: Vec<u8> = (0..6).filter(|n| *n != bad).collect();
        assert_eq!(pull(&holder, vec![item(bad, &rest)]).await, []);
        assert_eq!(get(&holder, 1, bad).await.unwrap(), pieces[usize::from(bad)]);
    }
    // Small blocks are copied, whatever the code.
    let small = encode(id(2), &[data(2, 9_000)], Compression::None).unwrap();
    let small = gather(small);
    let first = net.0.lock()["s0"].clone();
    put(&first, id(2), 0, 0, &small).await.unwrap();
    let one = PullItem { block: id(2), block_len: 9_000, ..item(2, &[0]) };
    assert_eq!(pull(&fresh, vec![one]).await, []);
    assert_eq!(get(&fresh, 2, 2).await.unwrap(), small);
}

#[tokio::test]
async fn scrub_finds_flipped_bits_and_a_pull_heals_them() {
    let net = Net::default();
    let disks = [SimDisk::new(0), SimDisk::new(1)];
    let (first, second) = (net.start(1, &disks[..1], config(1)), net.start(2, &disks[1..], config(2)));
    for counter in 0..20 {
        put_copy(&first, counter, 0, 100_000).await.unwrap();
        put_copy(&second, counter, 1, 100_000).await.unwrap();
    }
    assert_eq!(scrub(&first).await, []);
    for counter in [3, 11] {
        let stored = get(&first, counter, 0).await.unwrap().payload;
        flip(&disks[0], &stored);
    }
    assert_eq!(scrub(&first).await, [(id(3), 0), (id(11), 0)]);
    assert_eq!(get(&first, 3, 0).await.unwrap_err().code, Code::Corrupt);
    let all: Vec<_> = (0..20).map(|counter| (id(counter), 0)).collect();
    assert_eq!(missing(&first, all.clone()).await, [(id(3), 0), (id(11), 0)]);
    // The caller of the scrub knows already.
    assert_eq!(report(&first).bad, []);
    assert_eq!(first.stat().unwrap().pieces, 20, "damaged pieces are kept");
    let heal = |counter| PullItem { verify: true, ..copies(counter, 0, 100_000, &[(1, "s2")]) };
    assert_eq!(pull(&first, (0..20).map(heal).collect()).await, []);
    assert!(missing(&first, all).await.is_empty());
    assert_eq!(scrub(&first).await, []);
    for counter in 0..20 {
        assert_eq!(get(&first, counter, 0).await.unwrap(), get(&second, counter, 1).await.unwrap());
    }
}

#[tokio::test]
async fn what_rots_is_found_without_being_asked_and_reported_until_it_was_heard() {
    let net = Net::default();
    let disk = SimDisk::new(0);
    let config = Config { scrub_rate: 1 << 30, watch_every: Duration::from_millis(5), ..config(1) };
    let config = Config { scrub_every: Duration::ZERO, ..config };
    let server = net.start(1, std::slice::from_ref(&disk), config);
    put_copy(&server, 1, 0, 100_000).await.unwrap();
    put_copy(&server, 2, 0, 100_000).await.unwrap();
    let stored = get(&server, 1, 0).await.unwrap().payload;
    flip(&disk, &stored);
    until(&server, |beat| !beat.bad.is_empty()).await;
    let beat = report(&server);
    assert_eq!(beat.bad, [(id(1), 0)], "a report that was not heard is made again");
    server.heard(&beat, 4, vec![(LayoutId(1), vec![0, 5])]);
    assert_eq!(report(&server).bad, []);
    assert_eq!(report(&server).placement, 4);
    // The group's version came with the answer.
    assert_eq!(put_copy(&server, 3, 0, 1_000).await.unwrap_err().code, Code::StalePlacement);
    put_copy(&server, 4, 0, 1_000).await.unwrap();
}

#[tokio::test]
async fn a_pull_to_a_full_disk_leaves_the_reserve_for_deletes() {
    let net = Net::default();
    let source = net.start(2, &[SimDisk::new(2)], config(2));
    for counter in 0..60 {
        put_copy(&source, counter, 1, 1 << 20).await.unwrap();
    }
    let mut small = config(1);
    small.store.segment_bytes = 32 << 20;
    small.store.capacity = Some(3 * (32 << 20));
    let server = net.start(1, &[SimDisk::new(1)], small);
    let items = (0..60).map(|counter| copies(counter, 0, 1 << 20, &[(1, "s2")])).collect();
    let failed = pull(&server, items).await;
    assert!(failed.iter().all(|(_, fault)| fault.code == Code::NoSpace), "{failed:?}");
    // One of three segments is not kept back.
    assert_eq!(server.stat().unwrap().pieces, 60 - failed.len() as u64);
    assert!((28..=31).contains(&(60 - failed.len())), "{} were stored", 60 - failed.len());
    ask(&server, 0, Op::Delete { blocks: (0..60).map(id).collect() }, Bytes::new()).await.unwrap();
    assert_eq!(server.stat().unwrap().pieces, 0);
}

#[tokio::test]
async fn a_slow_rate_is_kept_and_the_answer_comes_in_time() {
    let net = Net::default();
    let source = net.start(2, &[SimDisk::new(2)], config(2));
    let server = net.start(1, &[SimDisk::new(1)], config(1));
    for counter in 0..3 {
        put_copy(&source, counter, 1, 100_000).await.unwrap();
    }
    let items = (0..3).map(|counter| copies(counter, 0, 100_000, &[(1, "s2")])).collect();
    let request = Request { session: 0, capability: None, op: Op::Pull { items, rate: 1 } };
    let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(4));
    let connection = Connection::local(server.clone(), Peer::new("test", Role::Meta));
    let reply = connection.call(call).await.expect("an answer before the deadline");
    let Reply::Pulled { failed, bytes } = minicbor::decode(&reply.body).unwrap() else { panic!() };
    // One is let through at once; at a byte per second the others would take a day.
    assert_eq!(failed.iter().map(|(_, fault)| fault.code).collect::<Vec<_>>(), [Code::Overloaded; 2]);
    assert!(bytes > 0);
    assert_eq!(server.stat().unwrap().pieces, 1);
}

/// A disk where nothing is in memory and every read waits until the test lets it through.
struct Slow {
    disk: SimDisk,
    turnstile: Arc<Turnstile>,
}

#[derive(Default)]
struct Turnstile {
    /// Reads that may go through; none waits while this is `None`.
    open: Mutex<Option<u64>>,
    moved: Condvar,
}

impl Turnstile {
    fn pass(&self) {
        let mut open = self.open.lock();
        while *open == Some(0) {
            self.moved.wait(&mut open);
        }
        if let Some(left) = open.as_mut() {
            *left -= 1;
        }
    }

    fn set(&self, open: Option<u64>) {
        *self.open.lock() = open;
        self.moved.notify_all();
    }
}

struct SlowFile {
    file: Arc<dyn DiskFile>,
    turnstile: Arc<Turnstile>,
}

impl Disk for Slow {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(SlowFile { file: self.disk.open(name)?, turnstile: self.turnstile.clone() }))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(SlowFile { file: self.disk.create(name)?, turnstile: self.turnstile.clone() }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.disk.sync_names()
    }

    fn space(&self) -> io::Result<Space> {
        self.disk.space()
    }
}

impl DiskFile for SlowFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.turnstile.pass();
        self.file.read_at(buf, offset)
    }

    fn read_at_once(&self, _: &mut [u8], _: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.turnstile.pass();
        self.file.read_direct_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.file.preallocate(len)
    }
}

/// Waits until the server reports so.
async fn until(server: &BlockServer, so: impl Fn(&Heartbeat) -> bool) {
    let waiting = async {
        while !so(&report(server)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(waited.is_ok(), "{:?}", report(server));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_greedy_session_does_not_starve_a_small_one_nor_does_repair() {
    let turnstile = Arc::new(Turnstile::default());
    let disk = Slow { disk: SimDisk::new(0), turnstile: turnstile.clone() };
    let config =
        Config { readers: 1, waiting_each: 500, watch_every: Duration::from_secs(3600), ..config(1) };
    let server = BlockServer::over(Arc::new(disk), config).unwrap();
    for counter in 0..10 {
        put_copy(&server, counter, 0, 1 << 20).await.unwrap();
    }
    put_copy(&server, 50, 0, 4_000).await.unwrap();
    turnstile.set(Some(0));

    let mut tasks = Vec::new();
    let mut read = |who: &'static str, session: u64, role: Role, counter: u64| {
        let server = server.clone();
        tasks.push(tokio::spawn(async move {
            let op = Op::Get { block: id(counter), piece: 0, first: 0, count: 256 };
            let request = Request { session, capability: None, op };
            let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(60));
            let reply = Connection::local(server, Peer::new(who, role)).call(call).await;
            reply.map(|_| ()).map_err(|fault| fault.code)
        }));
    };
    // More than one session may have waiting, beside one that is being read.
    for n in 0..520 {
        read("greedy", 1, Role::Agent, n % 10);
    }
    until(&server, |beat| beat.load.waiting == 500).await;
    for n in 0..40 {
        read("repair", 0, Role::Data, n % 10);
    }
    until(&server, |beat| beat.load.waiting == 540).await;
    for _ in 0..5 {
        read("small", 2, Role::Agent, 50);
    }
    until(&server, |beat| beat.load.waiting == 545).await;

    let gets = |beat: &Heartbeat, session| {
        beat.sessions.iter().find(|load| load.session == session).map_or(0, |load| load.gets)
    };
    // The one that is being read, the next one of each, and the rest of the small ones.
    turnstile.set(Some(8));
    until(&server, |beat| beat.load.gets == 8).await;
    let beat = report(&server);
    assert_eq!((gets(&beat, 2), gets(&beat, 0)), (5, 1), "five small reads among the next eight");
    turnstile.set(Some(162));
    until(&server, |beat| beat.load.gets == 170).await;
    let repaired = gets(&report(&server), 0);
    assert!((5..=15).contains(&repaired), "{repaired} of the first 170 are repair's");

    turnstile.set(None);
    let mut refused = 0;
    for task in tasks {
        match task.await.unwrap() {
            Ok(()) => {}
            Err(code) => {
                assert_eq!(code, Code::Overloaded);
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 19, "what goes beyond a session's bound is told to come back later");
    let beat = report(&server);
    assert_eq!((gets(&beat, 1), gets(&beat, 2), gets(&beat, 0)), (501, 5, 40));
    let greedy = beat.sessions.iter().find(|load| load.session == 1).unwrap();
    assert_eq!((greedy.puts, greedy.read_bytes), (11, 501 << 20));
}
