//! A data server as its callers see it, over TCP and within a process.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use torchfs_block::server::{BlockServer, Config, DiskName};
use torchfs_block::store;
use torchfs_codec::{Compression, Encoded, decode_chunk, encode};
use torchfs_disk::SimDisk;
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::msg::block::{Op, Reply, Request, method};
use torchfs_proto::{BlockId, ClusterId, Code, Fault, IdRange, LayoutId, ServerId, msg};
use torchfs_rpc::{Call, Connection, Data, Listener, Peer, Role, serve};

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 3, counter }
}

fn data(counter: u64, len: usize) -> Bytes {
    (0..len).map(|i| (i as u64 * 31 + i as u64 / 251 * counter) as u8).collect::<Vec<u8>>().into()
}

fn config() -> Config {
    let store = store::Config {
        cluster: ClusterId(1),
        server: ServerId(12),
        segment_bytes: 32 << 20,
        ..store::Config::default()
    };
    Config { store, ..Config::default() }
}

async fn ask(to: &Connection, op: Op, payload: Bytes) -> Result<(Reply, Data), Fault> {
    let request = Request { session: 0, capability: None, op };
    let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(60));
    let reply = to.call(call.payload(payload).carries_sums()).await?;
    Ok((minicbor::decode(&reply.body).unwrap(), reply.payload))
}

async fn put(to: &Connection, counter: u64, data: &Bytes) -> Result<(), Fault> {
    let encoded = encode(id(counter), std::slice::from_ref(data), Compression::None).unwrap();
    put_chunks(to, counter, encoded.chunks, encoded.payload.concat().into()).await
}

async fn put_chunks(
    to: &Connection,
    counter: u64,
    chunks: Vec<ChunkInfo>,
    payload: Bytes,
) -> Result<(), Fault> {
    let op =
        Op::Put { block: id(counter), piece: 0, layout: LayoutId(1), group_version: 0, chunks, first: 0 };
    ask(to, op, payload).await.map(|(reply, _)| assert_eq!(reply, Reply::Done))
}

async fn get(to: &Connection, counter: u64, first: u16, count: u16) -> Result<Vec<u8>, Fault> {
    let op = Op::Get { block: id(counter), piece: 0, first, count };
    let (reply, payload) = ask(to, op, Bytes::new()).await?;
    let Reply::Chunks { chunks } = reply else { panic!("{reply:?}") };
    let mut rest = payload.into_bytes();
    let mut out = Vec::new();
    for (index, chunk) in (u32::from(first)..).zip(&chunks) {
        let stored = rest.split_to(chunk.stored as usize);
        out.extend_from_slice(&decode_chunk(id(counter), index, chunk, stored).unwrap());
    }
    assert!(rest.is_empty());
    Ok(out)
}

/// Everything a caller can ask for.
async fn all_requests(to: &Connection) {
    let small = data(1, 3_000);
    let middle = data(2, 100_000);
    let large = data(3, 4 << 20);
    tokio::try_join!(put(to, 1, &small), put(to, 2, &middle), put(to, 3, &large)).unwrap();
    put(to, 1, &small).await.unwrap();
    assert_eq!(put(to, 1, &middle).await.unwrap_err().code, Code::Exists);
    assert!(get(to, 1, 0, 1).await.unwrap() == small);
    assert!(get(to, 2, 0, 256).await.unwrap() == middle);
    assert!(get(to, 2, 1, 1).await.unwrap() == middle[65_536..]);
    assert!(get(to, 3, 0, 64).await.unwrap() == large);
    assert!(get(to, 3, 10, 2).await.unwrap() == large[10 * 65_536..12 * 65_536]);

    let list = |after, limit| ask(to, Op::List { after, limit }, Bytes::new());
    let Reply::Listed { pieces, end } = list(None, 2).await.unwrap().0 else { panic!() };
    assert_eq!(pieces.iter().map(|p| p.block).collect::<Vec<_>>(), [id(1), id(2)]);
    assert!(!end);
    let Reply::Listed { pieces, end } = list(Some((id(2), 0)), 2).await.unwrap().0 else { panic!() };
    assert_eq!((pieces.len(), pieces[0].stored, end), (1, 4 << 20, true));

    let Reply::Stat { total, free, used, pieces } = ask(to, Op::Stat, Bytes::new()).await.unwrap().0 else {
        panic!()
    };
    assert!(free < total && used == 3_000 + 100_000 + (4 << 20) && pieces == 3);

    let verify = |counter| ask(to, Op::Verify { block: id(counter), piece: 0 }, Bytes::new());
    assert_eq!(verify(3).await.unwrap().0, Reply::Done);
    let gone = verify(4).await.unwrap_err();
    assert_eq!(gone.code, Code::Gone);
    assert!(gone.what.contains("block 3.4") && gone.what.contains("server 12"), "{}", gone.what);

    ask(to, Op::Delete { blocks: vec![id(1), id(9)] }, Bytes::new()).await.unwrap();
    assert_eq!(get(to, 1, 0, 1).await.unwrap_err().code, Code::Gone);
    let range = IdRange { first: id(0), count: 10 };
    ask(to, Op::Purge { range, keep: vec![id(3)] }, Bytes::new()).await.unwrap();
    assert_eq!(get(to, 2, 0, 1).await.unwrap_err().code, Code::Gone);
    assert!(get(to, 3, 63, 1).await.unwrap() == large[63 * 65_536..]);
}

/// Requests that no sane caller makes.
async fn bad_requests(to: &Connection) {
    let bytes = data(7, 200_000);
    let encoded = encode(id(7), std::slice::from_ref(&bytes), Compression::None).unwrap();
    let mut broken = bytes.to_vec();
    broken[150_000] ^= 4;
    let corrupt = put_chunks(to, 7, encoded.chunks.clone(), broken.into()).await.unwrap_err();
    assert_eq!(corrupt.code, Code::Corrupt);
    let short = put_chunks(to, 7, encoded.chunks.clone(), bytes.slice(..100)).await.unwrap_err();
    assert_eq!(short.code, Code::Invalid);
    let other = put_chunks(to, 8, encoded.chunks, bytes).await.unwrap_err();
    assert_eq!(other.code, Code::Corrupt, "chunks of another block");
    assert_eq!(put_chunks(to, 7, Vec::new(), Bytes::new()).await.unwrap_err().code, Code::Invalid);
    // Chunks with numbers that do not exist; as many as there are threads that might trip over them.
    let large = data(7, 1 << 20);
    for _ in 0..6 {
        let Encoded { chunks, .. } = encode(id(7), std::slice::from_ref(&large), Compression::None).unwrap();
        let (block, layout, group_version) = (id(7), LayoutId(1), 0);
        let op = Op::Put { block, piece: 0, layout, group_version, chunks, first: u32::MAX };
        assert_eq!(ask(to, op, large.clone()).await.unwrap_err().code, Code::Invalid);
    }
    put(to, 77, &large).await.unwrap();
    assert_eq!(get(to, 7, 0, 1).await.unwrap_err().code, Code::Gone);

    let call = Call::new(method::BLOCK, vec![0xff; 40], Duration::from_secs(60));
    assert_eq!(to.call(call).await.unwrap_err().code, Code::Protocol);
    let call = Call::new(999, Vec::new(), Duration::from_secs(60));
    assert_eq!(to.call(call).await.unwrap_err().code, Code::Unsupported);
}

#[tokio::test]
async fn every_request_is_answered_over_tcp_from_a_real_folder() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![DiskName { id: 1, path: dir.path().display().to_string() }];
    let config = || Config { dirs: dirs.clone(), ..config() };
    let server = BlockServer::open(config(), None).unwrap();
    let rpc = torchfs_rpc::Config { role: Role::Data, ..torchfs_rpc::Config::default() };
    let listener = Listener::bind("127.0.0.1:0", rpc).await.unwrap();
    let handle = serve(listener, server.clone());
    let addr = handle.local_addr().to_string();
    let connection = Connection::connect(&addr, torchfs_rpc::Config::default()).await.unwrap();
    all_requests(&connection).await;
    bad_requests(&connection).await;
    connection.close().await;
    handle.shutdown().await;
    // The folder is free when the last connection has let go of the server.
    let closed = async {
        while Arc::strong_count(&server) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), closed).await.expect("connections end");
    drop(server);

    let again = BlockServer::open(config(), None).unwrap();
    assert!(again.stores()[0].verify(id(3), 0).is_ok());
    let second = BlockServer::open(config(), None);
    assert!(second.is_err(), "the folder is in use");
}

#[tokio::test]
async fn every_request_is_answered_within_a_process() {
    let server = BlockServer::over(Arc::new(SimDisk::new(0)), config()).unwrap();
    let connection = Connection::local(server, Peer::new("here", Role::Agent));
    all_requests(&connection).await;
    bad_requests(&connection).await;
}
