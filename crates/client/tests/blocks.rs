//! Blocks on servers that are down, slow, full, wrong or empty.

mod harness;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harness::data::{Disk, Mood, placement};
use harness::meta::Fake;
use harness::{LONG, Net, Transport, soon};
use tokio::runtime::Handle;
use torchfs_client::{BlockRef, Blocks, BlocksConfig, Meta, MetaConfig};
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::msg::block::Op;
use torchfs_proto::{BlockId, Code, LayoutId, ServerId};

const CHUNK: usize = 64 << 10;

struct Cluster {
    disks: Vec<Arc<Disk>>,
    addrs: Vec<String>,
    fake: Arc<Fake>,
    _meta: Arc<Meta>,
    blocks: Arc<Blocks>,
}

async fn cluster(transport: Transport, servers: usize) -> Cluster {
    with(transport, servers, BlocksConfig { hedge_min: LONG, op_timeout: LONG, ..BlocksConfig::default() })
        .await
}

async fn with(transport: Transport, servers: usize, config: BlocksConfig) -> Cluster {
    let net = Net::default();
    let fake = Fake::new();
    let disks: Vec<Arc<Disk>> = (0..servers).map(|_| Disk::new()).collect();
    let mut addrs = Vec::new();
    for disk in &disks {
        addrs.push(net.add(transport, disk.clone()).await);
    }
    fake.set(|state| state.placement = placement(1, &addrs, servers));
    let addr = net.add(transport, fake.clone()).await;
    let meta = Meta::open(MetaConfig::new(vec![addr], Arc::new(net.clone()), Handle::current())).await;
    let meta = meta.expect("a session");
    let blocks = Blocks::new(meta.clone(), Arc::new(net), config);
    Cluster { disks, addrs, fake, _meta: meta, blocks }
}

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1, counter }
}

/// Three chunks and a half: one that packs, one that does not, and so on.
fn content(seed: u64) -> Bytes {
    let mut state = seed | 1;
    let mut bytes = vec![0; 3 * CHUNK + CHUNK / 2];
    for (at, byte) in bytes.iter_mut().enumerate() {
        if (at / CHUNK).is_multiple_of(2) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
    }
    bytes.into()
}

impl Cluster {
    async fn put(&self, counter: u64) -> NewBlock {
        let parts = vec![content(counter).slice(..100_000), content(counter).slice(100_000..)];
        let put = self.blocks.put(id(counter), LayoutId(1), parts, Compression::Lz4);
        soon("a put", put).await.expect("put")
    }

    async fn check(&self, block: &NewBlock) {
        let block = BlockRef::from(block);
        let got = soon("a get", self.blocks.get(&block, 0..4)).await.expect("read");
        assert_eq!(got.concat(), content(block.id.counter));
        let got = soon("a get", self.blocks.get(&block, 2..3)).await.expect("read");
        assert_eq!(got.concat(), content(block.id.counter)[2 * CHUNK..3 * CHUNK]);
    }

    /// The two disks that hold this block.
    fn homes(&self, counter: u64) -> (&Disk, &Disk) {
        let first = counter as usize % self.disks.len();
        (&self.disks[first], &self.disks[(first + 1) % self.disks.len()])
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_put_is_read_back_over_both_transports() {
    for transport in [Transport::Local, Transport::Tcp] {
        let cluster = cluster(transport, 3).await;
        for (counter, compression) in
            [Compression::None, Compression::Lz4, Compression::Zstd].into_iter().enumerate()
        {
            let counter = counter as u64;
            let put = cluster.blocks.put(id(counter), LayoutId(1), vec![content(counter)], compression);
            let block = soon("a put", put).await.expect("put");
            assert_eq!((block.len, block.substitutes.len()), (content(counter).len() as u32, 0));
            let (one, other) = cluster.homes(counter);
            assert!(one.pieces.lock().contains_key(&(id(counter), 0)));
            assert!(other.pieces.lock().contains_key(&(id(counter), 1)));
            cluster.check(&block).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_down_is_substituted_and_the_commit_will_know() {
    let cluster = cluster(Transport::Local, 3).await;
    cluster.disks[1].set(Mood::Down);
    let block = cluster.put(0).await;
    assert_eq!(block.substitutes, [(1, ServerId(3))]);
    assert_eq!(block.servers, [ServerId(1), ServerId(3)]);
    assert!(cluster.disks[2].pieces.lock().contains_key(&(id(0), 1)));
    cluster.disks[0].set(Mood::Down);
    cluster.check(&block).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_substitute_a_put_waits_for_the_server() {
    let cluster = cluster(Transport::Local, 2).await;
    cluster.disks[1].set(Mood::Down);
    let mut put = Box::pin(cluster.put(0));
    let early = tokio::time::timeout(Duration::from_millis(50), put.as_mut()).await;
    assert!(early.is_err(), "a put is never acknowledged with a piece missing");
    cluster.disks[1].set(Mood::Well);
    let block = put.await;
    assert!(block.substitutes.is_empty());
    cluster.check(&block).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_servers_are_passed_over_until_all_are_full() {
    let cluster = cluster(Transport::Local, 3).await;
    cluster.disks[0].set(Mood::Full);
    let block = cluster.put(0).await;
    assert_eq!(block.substitutes, [(0, ServerId(3))]);
    cluster.disks.iter().for_each(|disk| disk.set(Mood::Full));
    let put = cluster.blocks.put(id(1), LayoutId(1), vec![content(1)], Compression::None);
    let fault = soon("a put", put).await.expect_err("no space");
    assert_eq!(fault.code, Code::NoSpace);
    assert!(fault.what.contains("data server"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_placement_is_refreshed_and_the_put_tried_again() {
    let cluster = cluster(Transport::Local, 3).await;
    cluster.disks.iter().for_each(|disk| *disk.version.lock() = 2);
    cluster.fake.set(|state| state.placement = placement(2, &cluster.addrs, 3));
    let block = cluster.put(0).await;
    assert!(block.substitutes.is_empty());
    cluster.check(&block).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_or_missing_copy_is_passed_over() {
    for mood in [Mood::Flips, Mood::Empty, Mood::Down] {
        for bad in 0..2 {
            let cluster = cluster(Transport::Local, 2).await;
            let block = cluster.put(0).await;
            cluster.disks[bad].set(mood);
            for _ in 0..4 {
                cluster.check(&block).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_every_copy_is_corrupt_the_fault_names_block_and_servers() {
    let cluster = cluster(Transport::Local, 2).await;
    let block = cluster.put(0).await;
    cluster.disks.iter().for_each(|disk| disk.set(Mood::Flips));
    let fault = soon("a get", cluster.blocks.get(&BlockRef::from(&block), 0..1)).await.expect_err("corrupt");
    assert_eq!(fault.code, Code::Corrupt);
    for word in ["block 1.0", "data server 1", "data server 2"] {
        assert!(fault.what.contains(word), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_is_nowhere_is_gone() {
    let cluster = cluster(Transport::Local, 2).await;
    let block = BlockRef { id: id(5), layout: LayoutId(1), block_len: 100, substitutes: Vec::new() };
    let fault = soon("a get", cluster.blocks.get(&block, 0..1)).await.expect_err("gone");
    assert_eq!(fault.code, Code::Gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_hangs_is_hedged() {
    for transport in [Transport::Local, Transport::Tcp] {
        let config = BlocksConfig { hedge_min: Duration::from_millis(1), ..BlocksConfig::default() };
        let cluster = with(transport, 2, config).await;
        let block = cluster.put(0).await;
        for hanging in 0..2 {
            cluster.disks.iter().for_each(|disk| disk.set(Mood::Well));
            cluster.disks[hanging].set(Mood::Hangs);
            cluster.check(&block).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_another_length_than_the_block_says_are_refused() {
    let cluster = cluster(Transport::Local, 2).await;
    let block = BlockRef { block_len: 4 * CHUNK as u32, ..BlockRef::from(&cluster.put(0).await) };
    let fault = soon("a get", cluster.blocks.get(&block, 3..4)).await.expect_err("too short");
    assert_eq!(fault.code, Code::Corrupt);
    let fault = soon("a get", cluster.blocks.get(&block, 3..9)).await.expect_err("beyond the end");
    assert_eq!(fault.code, Code::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_one_block_ask_one_server_when_all_is_well() {
    let cluster = cluster(Transport::Local, 2).await;
    let block = cluster.put(0).await;
    cluster.disks.iter().for_each(|disk| disk.asked.lock().clear());
    soon("a get", cluster.blocks.get(&BlockRef::from(&block), 0..4)).await.expect("read");
    let gets: usize = cluster
        .disks
        .iter()
        .map(|disk| disk.asked.lock().iter().filter(|op| matches!(op, Op::Get { .. })).count())
        .sum();
    assert_eq!(gets, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_bytes_under_the_same_id_are_refused_loudly() {
    let cluster = cluster(Transport::Local, 3).await;
    cluster.put(0).await;
    let same = cluster.put(0).await;
    assert_eq!(same.servers, [ServerId(1), ServerId(2)]);
    let put = cluster.blocks.put(id(0), LayoutId(1), vec![content(9)], Compression::Lz4);
    let fault = soon("a put", put).await.expect_err("refused");
    assert_eq!(fault.code, Code::Exists);
    assert!(fault.next.contains("report this"), "{fault}");
}
