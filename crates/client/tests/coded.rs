//! Erasure-coded blocks on servers that are down, slow, full, wrong or empty.

mod harness;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use harness::data::{Disk, Mood, placement};
use harness::meta::Fake;
use harness::{LONG, Net, Transport, soon, until};
use tokio::runtime::Handle;
use torchfs_client::{BlockRef, Blocks, BlocksConfig, Meta, MetaConfig};
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::block;
use torchfs_proto::msg::meta::{BadPiece, Op};
use torchfs_proto::{BlockId, Code, LayoutId, ServerId};

const CHUNK: usize = 64 << 10;
/// ec:4+2.
const WIDE: LayoutId = LayoutId(2);
/// ec:2+1.
const NARROW: LayoutId = LayoutId(3);

struct Cluster {
    disks: Vec<Arc<Disk>>,
    addrs: Vec<String>,
    fake: Arc<Fake>,
    meta: Arc<Meta>,
    blocks: Arc<Blocks>,
}

fn patient() -> BlocksConfig {
    BlocksConfig { hedge_min: LONG, op_timeout: LONG, ..BlocksConfig::default() }
}

async fn cluster(servers: usize, config: BlocksConfig) -> Cluster {
    let net = Net::default();
    let fake = Fake::new();
    let disks: Vec<Arc<Disk>> = (0..servers).map(|_| Disk::new()).collect();
    let mut addrs = Vec::new();
    for disk in &disks {
        addrs.push(net.add(Transport::Local, disk.clone()).await);
    }
    fake.set(|state| state.placement = placement(1, &addrs, servers));
    let addr = net.add(Transport::Local, fake.clone()).await;
    let meta = Meta::open(MetaConfig::new(vec![addr], Arc::new(net.clone()), Handle::current())).await;
    let meta = meta.expect("a session");
    let blocks = Blocks::new(meta.clone(), Arc::new(net), config);
    Cluster { disks, addrs, fake, meta, blocks }
}

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1, counter }
}

/// One chunk that packs, one that does not, and so on.
fn content(seed: u64, len: usize) -> Bytes {
    let mut state = seed.wrapping_mul(2) | 1;
    let mut bytes = vec![0; len];
    for (at, byte) in bytes.iter_mut().enumerate() {
        if (at / CHUNK).is_multiple_of(2) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
    }
    bytes.into()
}

impl Cluster {
    async fn put(&self, layout: LayoutId, counter: u64, len: usize) -> NewBlock {
        let bytes = content(counter, len);
        let parts = vec![bytes.slice(..len / 3), bytes.slice(len / 3..)];
        soon("a put", self.blocks.put(id(counter), layout, parts, Compression::Lz4)).await.expect("put")
    }

    async fn check(&self, block: &NewBlock) {
        let block = BlockRef::from(block);
        let all = content(block.id.counter, block.block_len as usize);
        let count = block.chunks();
        for chunks in [0..count, count / 2..count / 2 + 1, count - 1..count, 0..1] {
            let got = soon("a get", self.blocks.get(&block, chunks.clone())).await.expect("read");
            let end = all.len().min(usize::from(chunks.end) * CHUNK);
            assert_eq!(got.concat(), all[usize::from(chunks.start) * CHUNK..end], "chunks {chunks:?}");
        }
    }

    fn set_all(&self, mood: Mood) {
        self.disks.iter().for_each(|disk| disk.set(mood));
    }

    fn forget_requests(&self) {
        self.disks.iter().for_each(|disk| disk.asked.lock().clear());
    }

    /// (server, piece, chunks) of all reads since.
    fn gets(&self) -> Vec<(usize, u8, u16)> {
        let mut gets = Vec::new();
        for (index, disk) in self.disks.iter().enumerate() {
            for op in disk.asked.lock().iter() {
                if let block::Op::Get { piece, count, .. } = op {
                    gets.push((index, *piece, *count));
                }
            }
        }
        gets
    }

    fn reported(&self) -> Vec<BadPiece> {
        let state = self.fake.state.lock();
        let pieces = state.asked.iter().filter_map(|op| match op {
            Op::ReportBad { pieces } => Some(pieces.clone()),
            _ => None,
        });
        let mut pieces: Vec<BadPiece> = pieces.flatten().collect();
        pieces.sort();
        pieces
    }

    fn edit(&self, edit: impl FnOnce(&mut Placement)) {
        self.fake.set(|state| {
            edit(&mut state.placement);
            state.placement.version += 1;
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_lie_where_the_group_says_and_a_few_bytes_cost_one_request() {
    let cluster = cluster(7, patient()).await;
    let block = cluster.put(WIDE, 3, 1 << 20).await;
    let homes: Vec<u32> = (0..6).map(|piece| (3 + piece) % 7 + 1).collect();
    assert_eq!(block.servers.iter().map(|server| server.0).collect::<Vec<_>>(), homes);
    assert!(block.substitutes.is_empty());
    let stored: usize = cluster
        .disks
        .iter()
        .flat_map(|disk| disk.pieces.lock().values().map(|p| p.1.len()).collect::<Vec<_>>())
        .sum();
    assert_eq!(block.stored, stored as u64);
    cluster.check(&block).await;
    cluster.forget_requests();
    soon("a get", cluster.blocks.get(&BlockRef::from(&block), 5..6)).await.expect("read");
    assert_eq!(cluster.gets(), [(4, 1, 1)]);
    cluster.forget_requests();
    soon("a get", cluster.blocks.get(&BlockRef::from(&block), 0..16)).await.expect("read");
    assert_eq!(cluster.gets().len(), 4, "a whole block is read from its data pieces");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_tolerated_loss_is_read_around() {
    for mood in [Mood::Down, Mood::Empty, Mood::Flips, Mood::Shuffles] {
        let cluster = cluster(6, patient()).await;
        let large = cluster.put(WIDE, 0, (1 << 20) + 777).await;
        let small = cluster.put(WIDE, 6, 200_000).await;
        assert_eq!(small.servers.len(), 3, "a small block has copies, one more than may be lost");
        for one in 0..6 {
            for other in one + 1..6 {
                cluster.set_all(Mood::Well);
                cluster.disks[one].set(mood);
                cluster.disks[other].set(mood);
                cluster.check(&large).await;
                cluster.check(&small).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_degraded_read_of_a_chunk_fetches_a_chunk_of_each_other_and_the_table() {
    let cluster = cluster(6, patient()).await;
    let bytes = content(0, 2 << 20);
    let put = cluster.blocks.put(id(0), WIDE, vec![bytes.clone()], Compression::None);
    let block = BlockRef::from(&soon("a put", put).await.expect("put"));
    cluster.disks[1].set(Mood::Empty);
    cluster.forget_requests();
    let got = soon("a get", cluster.blocks.get(&block, 10..11)).await.expect("read");
    assert_eq!(got.concat(), bytes[10 * CHUNK..11 * CHUNK]);
    let mut chunks: Vec<u16> = cluster.gets().iter().map(|(_, _, count)| *count).collect();
    chunks.sort_unstable();
    // The piece that is gone, the table, and one chunk of four others.
    assert_eq!(chunks, [1, 1, 1, 1, 1, 1]);
    cluster.forget_requests();
    soon("a get", cluster.blocks.get(&block, 0..32)).await.expect("read");
    let all: u16 = cluster.gets().iter().map(|(_, _, count)| *count).sum();
    assert_eq!(
        all,
        5 * 8 + 1,
        "a whole block with a piece missing costs no more than a whole block and a table"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_pieces_are_told_to_the_metadata_service() {
    let cluster = cluster(6, patient()).await;
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    cluster.disks[1].set(Mood::Flips);
    cluster.disks[2].set(Mood::Empty);
    cluster.check(&block).await;
    let bad = |piece: u8| BadPiece { block: id(0), piece, server: ServerId(u32::from(piece) + 1) };
    until("reports", || cluster.reported().len() >= 2).await;
    cluster.check(&block).await;
    assert_eq!(cluster.reported(), [bad(1), bad(2)], "each is told once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_are_merely_down_are_not_reported() {
    let cluster = cluster(6, patient()).await;
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    cluster.disks[0].set(Mood::Down);
    cluster.check(&block).await;
    assert!(cluster.reported().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_servers_are_hedged_by_rebuilding() {
    for hanging in [[0, 1], [2, 4], [4, 5], [1, 5]] {
        let config =
            BlocksConfig { hedge_min: Duration::from_millis(1), hedge_factor: 1, ..BlocksConfig::default() };
        let cluster = cluster(6, config).await;
        let block = cluster.put(WIDE, 0, 1 << 20).await;
        hanging.into_iter().for_each(|server: usize| cluster.disks[server].set(Mood::Hangs));
        cluster.check(&block).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_loss_too_many_is_an_error_that_names_block_and_servers() {
    let cluster = cluster(6, patient()).await;
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    for server in 1..4 {
        cluster.disks[server].set(Mood::Flips);
    }
    let fault = soon("a get", cluster.blocks.get(&BlockRef::from(&block), 0..16)).await.expect_err("lost");
    assert_eq!(fault.code, Code::Corrupt);
    for word in ["block 1.0", "data server 2", "data server 3", "data server 4"] {
        assert!(fault.what.contains(word), "{fault}");
    }
    for server in 1..4 {
        cluster.disks[server].set(Mood::Empty);
    }
    let fault = soon("a get", cluster.blocks.get(&BlockRef::from(&block), 0..16)).await.expect_err("gone");
    assert_eq!(fault.code, Code::Gone, "the extents may be old: {fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_waits_for_servers_that_may_come_back() {
    let cluster = cluster(6, patient()).await;
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    for server in 0..3 {
        cluster.disks[server].set(Mood::Down);
    }
    let block = BlockRef::from(&block);
    let mut get = Box::pin(cluster.blocks.get(&block, 0..16));
    assert!(tokio::time::timeout(Duration::from_millis(50), get.as_mut()).await.is_err());
    cluster.disks[2].set(Mood::Well);
    let got = soon("a get", get).await.expect("read");
    assert_eq!(got.concat(), content(0, 1 << 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn substitutes_keep_full_redundancy_while_enough_servers_live() {
    let cluster = cluster(8, patient()).await;
    cluster.disks[1].set(Mood::Down);
    cluster.disks[3].set(Mood::Full);
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    let mut substitutes = block.substitutes.clone();
    substitutes.sort();
    assert_eq!(substitutes.iter().map(|(piece, _)| *piece).collect::<Vec<_>>(), [1, 3]);
    let mut servers = block.servers.clone();
    servers.sort();
    servers.dedup();
    assert_eq!(servers.len(), 6, "no two pieces share a server");
    cluster.set_all(Mood::Well);
    for lost in 0..8 {
        cluster.set_all(Mood::Well);
        cluster.disks[lost].set(Mood::Empty);
        cluster.disks[(lost + 1) % 8].set(Mood::Empty);
        cluster.check(&block).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn substitutes_prefer_zones_without_a_piece_and_servers_with_room() {
    let cluster = cluster(8, patient()).await;
    cluster.edit(|placement| {
        for server in &mut placement.servers {
            server.zone = format!("zone{}", server.id.0.min(7));
        }
        // Server 7 is in the zone of server 8; both are new to the block. 8 has far more room.
        placement.servers[6].free = 1 << 30;
    });
    cluster.disks[0].set(Mood::Full);
    // The client learns the placement when a server says that its own is old.
    *cluster.disks[0].version.lock() = 1;
    soon("a placement", cluster.meta.fetch_placement()).await.expect("fetched");
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    assert_eq!(block.substitutes, [(0, ServerId(8))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_servers_take_no_substitutes() {
    let cluster = cluster(8, patient()).await;
    cluster.edit(|placement| {
        placement.servers[7].draining = true;
        placement.servers[6].free = 1 << 20;
    });
    soon("a placement", cluster.meta.fetch_placement()).await.expect("fetched");
    cluster.disks[2].set(Mood::Down);
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    assert_eq!(block.substitutes, [(2, ServerId(7))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_too_few_servers_a_put_waits_and_then_names_those_it_misses() {
    let config = BlocksConfig { op_timeout: Duration::from_millis(600), ..patient() };
    let cluster = cluster(6, config).await;
    cluster.disks[1].set(Mood::Down);
    cluster.disks[4].set(Mood::Down);
    let put = cluster.blocks.put(id(0), WIDE, vec![content(0, 1 << 20)], Compression::None);
    let fault = soon("a put", put).await.expect_err("too few servers");
    assert_eq!(fault.code, Code::Unreachable);
    for word in ["block 1.0", "data server 2", "data server 5", "needs 6 data servers and 2 of them"] {
        assert!(fault.what.contains(word), "{fault}");
    }
    assert!(fault.next.contains("start these data servers"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_put_goes_on_when_a_server_comes() {
    let cluster = cluster(6, patient()).await;
    cluster.disks[5].set(Mood::Down);
    let mut put = Box::pin(cluster.put(WIDE, 0, 1 << 20));
    let early = tokio::time::timeout(Duration::from_millis(50), put.as_mut()).await;
    assert!(early.is_err(), "a put is never acknowledged with a piece missing");
    cluster.disks[5].set(Mood::Well);
    let block = soon("a put", put).await;
    assert!(block.substitutes.is_empty());
    cluster.check(&block).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_leaves_a_server_that_goes_down_while_it_waits_for_it() {
    let cluster = cluster(7, patient()).await;
    cluster.disks[0].set(Mood::Hangs);
    let mut put = Box::pin(cluster.put(WIDE, 0, 1 << 20));
    assert!(tokio::time::timeout(Duration::from_millis(50), put.as_mut()).await.is_err());
    cluster.edit(|placement| placement.servers[0].up = false);
    soon("a placement", cluster.meta.fetch_placement()).await.expect("fetched");
    let block = soon("a put", put).await;
    assert_eq!(block.substitutes, [(0, ServerId(7))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moving_group_is_written_to_its_target_and_read_from_both() {
    let cluster = cluster(8, patient()).await;
    let old = cluster.put(WIDE, 0, 1 << 20).await;
    cluster.edit(|placement| {
        let group = &mut placement.layouts[1].groups[0];
        group.version += 1;
        group.moving_to = group.servers.clone();
        group.moving_to[0] = ServerId(7);
        group.moving_to[5] = ServerId(8);
    });
    // Servers tell the writer that its table is old.
    cluster.disks.iter().for_each(|disk| *disk.version.lock() = 2);
    let new = cluster.put(WIDE, 8, 1 << 20).await;
    assert_eq!((new.servers[0], new.servers[5]), (ServerId(7), ServerId(8)));
    assert!(new.substitutes.is_empty());
    cluster.check(&old).await;
    cluster.check(&new).await;
    assert!(cluster.reported().is_empty(), "while a group moves, nothing is bad because it is elsewhere");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_put_under_an_old_table_are_named_exactly() {
    let cluster = cluster(8, patient()).await;
    let block = cluster.put(WIDE, 0, 1 << 20).await;
    // The group moved for good after the put; the commit names the servers, and the client's own reads follow.
    assert_eq!(block.servers.len(), 6);
    cluster.edit(|placement| {
        let group = &mut placement.layouts[1].groups[0];
        group.version += 1;
        group.servers[0] = ServerId(7);
    });
    soon("a placement", cluster.meta.fetch_placement()).await.expect("fetched");
    let recorded = BlockRef { substitutes: vec![(0, block.servers[0])], ..BlockRef::from(&block) };
    let got = soon("a get", cluster.blocks.get(&recorded, 0..16)).await.expect("read");
    assert_eq!(got.concat(), content(0, 1 << 20));
    assert!(cluster.reported().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_blocks_go_to_the_layout_that_replaced_the_chosen_one() {
    let cluster = cluster(6, patient()).await;
    cluster.edit(|placement| placement.layouts[0].replaced_by = Some(NARROW));
    soon("a placement", cluster.meta.fetch_placement()).await.expect("fetched");
    let block = cluster.put(LayoutId(1), 0, 1 << 20).await;
    assert_eq!((block.layout, block.servers.len()), (NARROW, 3));
    cluster.check(&block).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_all_sizes_share_a_layout() {
    let cluster = cluster(6, patient()).await;
    let mut blocks = Vec::new();
    let sizes = [1, 4_096, 65_536, 262_143, 262_144, 262_145, 1 << 20, 4 << 20, 16 << 20];
    for (counter, len) in (0..).zip(sizes) {
        for layout in [WIDE, NARROW] {
            let counter = counter * 2 + u64::from(layout.0 == 3);
            let block = cluster.put(layout, counter, len).await;
            let copies = if layout == WIDE { 3 } else { 2 };
            let pieces = if layout == WIDE { 6 } else { 3 };
            assert_eq!(block.servers.len(), if len < 256 << 10 { copies } else { pieces });
            blocks.push(block);
        }
    }
    for lost in 0..6 {
        cluster.set_all(Mood::Well);
        cluster.disks[lost].set(Mood::Empty);
        for block in &blocks {
            cluster.check(block).await;
        }
    }
    assert!(!cluster.addrs.is_empty());
}

#[tokio::test]
async fn a_put_ends_when_its_group_is_laid_out_anew_while_it_is_packed() {
    let cluster = cluster(6, patient()).await;
    let bytes = content(1, 4 << 20);
    let mut put = Box::pin(cluster.blocks.put(id(1), WIDE, vec![bytes], Compression::None));
    // It has begun, and packs on another thread.
    assert!(put.as_mut().now_or_never().is_none());
    let mut anew = placement(2, &cluster.addrs, 6);
    for group in anew.layouts.iter_mut().flat_map(|layout| &mut layout.groups) {
        group.servers.rotate_left(1);
    }
    cluster.fake.set(|state| state.placement = anew);
    cluster.disks.iter().for_each(|disk| *disk.version.lock() = 2);
    cluster.meta.fetch_placement().await.expect("a placement");
    let block = soon("a put", put).await.expect("put");
    assert!(block.substitutes.is_empty(), "{:?}", block.substitutes);
    cluster.check(&block).await;
}
