//! A disk that does not answer: nobody waits for it, another takes its place, and it is used again when it is back.

#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use torchfs_block::server::{BlockServer, Config, DiskName};
use torchfs_block::store;
use torchfs_codec::{Compression, encode};
use torchfs_disk::SimDisk;
use torchfs_proto::disk::{Disk, DiskFile, Space};
use torchfs_proto::msg::block::{Op, Reply, Request, method};
use torchfs_proto::msg::meta::Heartbeat;
use torchfs_proto::{BlockId, ClusterId, Code, Fault, LayoutId, ServerId, msg};
use torchfs_rpc::{Call, Connection, Peer, Role};

/// Lets calls through, or holds them.
#[derive(Default)]
struct Valve {
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Valve {
    fn pass(&self) {
        let mut shut = self.shut.lock();
        while *shut {
            self.opened.wait(&mut shut);
        }
    }

    fn set(&self, shut: bool) {
        *self.shut.lock() = shut;
        self.opened.notify_all();
    }
}

/// A disk behind a valve.
struct Hanging(Arc<dyn Disk>, Arc<Valve>);

impl Hanging {
    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(HangingFile(file, self.1.clone()))
    }
}

impl Disk for Hanging {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.1.pass();
        self.0.open(name).map(|file| self.file(file))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.1.pass();
        self.0.create(name).map(|file| self.file(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.1.pass();
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.1.pass();
        self.0.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.1.pass();
        self.0.list()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync_names()
    }

    fn space(&self) -> io::Result<Space> {
        self.1.pass();
        self.0.space()
    }
}

struct HangingFile(Arc<dyn DiskFile>, Arc<Valve>);

impl DiskFile for HangingFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.1.pass();
        self.0.read_at(buf, offset)
    }

    fn read_at_once(&self, _buf: &mut [u8], _offset: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.1.pass();
        self.0.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync()
    }

    fn len(&self) -> io::Result<u64> {
        self.1.pass();
        self.0.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.1.pass();
        self.0.set_len(len)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.1.pass();
        self.0.preallocate(len)
    }
}

/// A server over so many disks, and their valves.
fn server(disks: u64, silent_max: Duration) -> (Arc<BlockServer>, Vec<Arc<Valve>>) {
    let valves: Vec<Arc<Valve>> = (0..disks).map(|_| Arc::default()).collect();
    let store = store::Config {
        cluster: ClusterId(1),
        server: ServerId(1),
        segment_bytes: 32 << 20,
        ..store::Config::default()
    };
    let config = Config {
        store,
        scrub_rate: 0,
        silent_after: Duration::from_secs(3),
        silent_max,
        watch_every: Duration::from_millis(50),
        ..Config::default()
    };
    let over = |(n, valve): (u64, &Arc<Valve>)| {
        let disk: Arc<dyn Disk> = Arc::new(Hanging(Arc::new(SimDisk::new(n)), valve.clone()));
        (DiskName { id: n, path: format!("/d{n}") }, disk)
    };
    let disks = (1..).zip(&valves).map(over).collect();
    (BlockServer::over_all(disks, config, None).unwrap(), valves)
}

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1, counter }
}

async fn ask(to: &Connection, op: Op, payload: Bytes) -> Result<Reply, Fault> {
    let request = Request { session: 7, capability: None, op };
    let call = Call::new(method::BLOCK, msg::encode(&request), Duration::from_secs(60));
    let reply = to.call(call.payload(payload).carries_sums()).await?;
    Ok(minicbor::decode(&reply.body).unwrap())
}

async fn put(to: &Connection, counter: u64) -> Result<(), Fault> {
    let data = Bytes::from(vec![counter as u8; 10_000]);
    let encoded = encode(id(counter), &[data], Compression::None).unwrap();
    let chunks = encoded.chunks;
    let op =
        Op::Put { block: id(counter), piece: 0, layout: LayoutId(1), group_version: 0, chunks, first: 0 };
    ask(to, op, encoded.payload.concat().into()).await.map(|_| ())
}

async fn get(to: &Connection, counter: u64) -> Result<(), Fault> {
    ask(to, Op::Get { block: id(counter), piece: 0, first: 0, count: 1 }, Bytes::new()).await.map(|_| ())
}

/// How many disks say that they do not answer, and how many that they failed.
fn silent(server: &BlockServer) -> (usize, usize) {
    let mut beat = Heartbeat::default();
    server.report(&mut beat);
    let silent = beat.disks.iter().filter(|disk| disk.silent_ms.is_some()).count();
    (silent, beat.disks.iter().filter(|disk| disk.failed).count())
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_hangs_is_passed_over_and_used_again_when_it_is_back() {
    let (server, valves) = server(2, Duration::from_secs(600));
    let to = Connection::local(server.clone(), Peer::new("test", Role::Agent));
    for n in 0..40 {
        put(&to, n).await.unwrap();
    }
    let on = |n: usize| server.stores()[n].list(None, 1_000).len();
    assert!(on(0) > 0 && on(1) > 0);
    let first = server.stores()[0].list(None, 1)[0].block.counter;
    let other = server.stores()[1].list(None, 1)[0].block.counter;

    // Who waits for it already is told, and what was put goes to the other one.
    valves[0].set(true);
    let waits = get(&to, first).await.unwrap_err();
    assert_eq!(waits.code, Code::Unreachable, "{waits}");
    assert!(waits.what.contains("/d1") && waits.what.contains("has not answered"), "{waits}");
    for n in 100..140 {
        put(&to, n).await.unwrap();
    }
    assert_eq!(silent(&server), (1, 0));
    get(&to, other).await.unwrap();
    assert_eq!(get(&to, first).await.unwrap_err().code, Code::Unreachable);
    // Its pieces count as here; a deletion that it did not hear of is not done.
    let pieces: Vec<(BlockId, u8)> = (0..40).map(|n| (id(n), 0)).collect();
    let missing = ask(&to, Op::Missing { pieces }, Bytes::new()).await.unwrap();
    assert_eq!(missing, Reply::Missing { pieces: vec![] });
    let delete = || ask(&to, Op::Delete { blocks: vec![id(first)] }, Bytes::new());
    assert_eq!(delete().await.unwrap_err().code, Code::Unreachable);

    valves[0].set(false);
    eventually("the disk is used again", || silent(&server) == (0, 0)).await;
    get(&to, first).await.unwrap();
    delete().await.unwrap();
    assert_eq!(get(&to, first).await.unwrap_err().code, Code::Gone);
    let before = on(0);
    for n in 200..240 {
        put(&to, n).await.unwrap();
    }
    assert!(on(0) > before, "new pieces go there too");
    for n in (100..140).chain(200..240) {
        get(&to, n).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_only_disk_hangs_says_so_and_holds_nobody_up() {
    let (server, valves) = server(1, Duration::from_secs(6));
    let to = Connection::local(server.clone(), Peer::new("test", Role::Agent));
    put(&to, 1).await.unwrap();
    valves[0].set(true);
    let all = futures_util::future::join_all((2..50).map(|n| put(&to, n))).await;
    assert!(
        all.iter().all(|put| put.as_ref().is_err_and(|fault| fault.code == Code::Unreachable)),
        "{all:?}"
    );
    eventually("its pieces count as lost after a while", || silent(&server) == (1, 1)).await;
    let missing = Op::Missing { pieces: vec![(id(1), 0)] };
    let lost = ask(&to, missing.clone(), Bytes::new()).await.unwrap();
    assert_eq!(lost, Reply::Missing { pieces: vec![(id(1), 0)] });
    valves[0].set(false);
    eventually("it is back", || silent(&server) == (0, 0)).await;
    assert_eq!(ask(&to, missing, Bytes::new()).await.unwrap(), Reply::Missing { pieces: vec![] });
    get(&to, 1).await.unwrap();
    put(&to, 60).await.unwrap();
}
