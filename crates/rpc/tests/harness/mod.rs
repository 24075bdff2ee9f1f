//! A service with one method per behaviour, and a way to reach it over each transport.
#![allow(dead_code)]

pub mod raw;

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use torchfs_proto::disk::DiskFile;
use torchfs_proto::{Code, Fault};
use torchfs_rpc::{
    AlignedBuf, Answer, Answering, Call, Config, Connection, Listener, Payload, Peer, Request, Role,
    ServerHandle, Service, serve,
};

/// Answers at once with what it got.
pub const ECHO: u16 = 1;
/// The same after the task slept a few turns.
pub const ECHO_LATER: u16 = 2;
/// Never answers.
pub const HANG: u16 = 3;
/// Fails.
pub const FAIL: u16 = 4;
/// Panics at once.
pub const PANIC: u16 = 5;
/// Panics in a later poll.
pub const PANIC_LATER: u16 = 6;
/// Answers with the payload kind whose number is the first byte of the body.
pub const KIND: u16 = 7;
/// Says how many milliseconds are left and the trace id.
pub const ABOUT: u16 = 8;
/// Answers when the gate opens; one permit each.
pub const GATE: u16 = 9;
/// Answers with so many bytes as the body says.
pub const BULK: u16 = 10;

/// Generous: only a broken test reaches it.
pub const LONG: Duration = Duration::from_secs(60);

/// The service.
#[derive(Default)]
pub struct Zoo {
    pub started: AtomicUsize,
    pub dropped: AtomicUsize,
    pub running: AtomicUsize,
    pub running_most: AtomicUsize,
    pub closed: AtomicUsize,
    pub last_peer: AtomicU64,
    pub gate: Option<Arc<Semaphore>>,
    pub files: Option<Files>,
}

/// The two kinds of files.
#[derive(Clone)]
pub struct Files {
    pub real: Arc<dyn DiskFile>,
    pub double: Arc<dyn DiskFile>,
}

impl Files {
    /// Both kinds with the same content, longer than what is read in place.
    pub fn new() -> Files {
        let bytes = pattern(300_000, 7);
        let file = tempfile::tempfile().expect("a temporary file");
        file.write_all_at(&bytes, 0).expect("written");
        Files { real: Arc::new(RealFile(file)), double: Arc::new(FakeFile(bytes)) }
    }
}

impl Zoo {
    pub fn new() -> Arc<Zoo> {
        Arc::new(Zoo { gate: Some(Arc::new(Semaphore::new(0))), files: Some(Files::new()), ..Zoo::default() })
    }

    pub fn open_gate(&self, count: usize) {
        self.gate.as_ref().expect("a gate").add_permits(count);
    }
}

/// Counts a request as running until it is dropped.
struct Running(Arc<Zoo>, bool);

impl Running {
    fn new(zoo: Arc<Zoo>) -> Running {
        let now = zoo.running.fetch_add(1, Ordering::SeqCst) + 1;
        zoo.running_most.fetch_max(now, Ordering::SeqCst);
        zoo.started.fetch_add(1, Ordering::SeqCst);
        Running(zoo, false)
    }

    fn answered(mut self) {
        self.1 = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        if !self.1 {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Service for Zoo {
    fn call(self: Arc<Self>, peer: Peer, request: Request) -> Answering {
        self.last_peer.store(peer.id(), Ordering::SeqCst);
        let running = Running::new(self.clone());
        Box::pin(async move {
            let answer = match request.method {
                ECHO => Ok(Answer::new(request.body).payload(Payload::from(request.payload))),
                ECHO_LATER => {
                    for _ in 0..3 {
                        tokio::task::yield_now().await;
                    }
                    Ok(Answer::new(request.body).payload(Payload::from(request.payload)))
                }
                HANG => std::future::pending().await,
                FAIL => Err(Fault::new(Code::NoSpace, "disk 3 is full").next("add a disk")),
                PANIC => panic!("as asked (a test)"),
                PANIC_LATER => {
                    tokio::task::yield_now().await;
                    panic!("as asked, later (a test)")
                }
                KIND => Ok(self.of_kind(request.body[0])),
                ABOUT => {
                    let left = request.deadline.saturating_duration_since(Instant::now()).as_millis() as u64;
                    Ok(Answer::new([left.to_le_bytes(), request.trace.to_le_bytes()].concat()))
                }
                GATE => {
                    let gate = self.gate.clone().expect("a gate");
                    gate.acquire().await.expect("open").forget();
                    Ok(Answer::new(request.body))
                }
                BULK => {
                    let len = u32::from_le_bytes(request.body[..4].try_into().expect("four bytes"));
                    Ok(Answer::new(Bytes::new()).payload(AlignedBuf::zeroed(len as usize)))
                }
                other => Err(Fault::new(Code::Unsupported, format!("method {other}"))),
            };
            running.answered();
            answer
        })
    }

    fn closed(&self, _peer: &Peer) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// How many kinds `of_kind` knows.
pub const KINDS: u8 = 10;

impl Zoo {
    fn of_kind(&self, kind: u8) -> Answer {
        let files = self.files.clone().expect("files");
        let answer = Answer::new(vec![kind]);
        let all = pattern(300_000, 7);
        match kind {
            0 => answer,
            1 => answer.payload(Bytes::from(all)),
            2 => answer.payload(Payload::Parts(
                all.chunks(777).map(Bytes::copy_from_slice).chain([Bytes::new()]).collect(),
            )),
            3 => answer.payload(AlignedBuf::copy_of(&all)),
            4 => answer.payload(Payload::File { file: files.real, ranges: ranges() }).carries_sums(),
            5 => answer.payload(Payload::File { file: files.real, ranges: ranges() }),
            6 => answer.payload(Payload::File { file: files.double, ranges: ranges() }).carries_sums(),
            7 => answer.payload(Payload::File { file: files.real, ranges: vec![(10, 20)] }).carries_sums(),
            8 => answer.payload(Payload::File { file: files.double, ranges: vec![(10, 20)] }),
            _ => answer.payload(AlignedBuf::copy_of(&all)).carries_sums(),
        }
    }

    /// What `of_kind` has to arrive as.
    pub fn expected(kind: u8) -> Vec<u8> {
        let all = pattern(300_000, 7);
        match kind {
            0 => Vec::new(),
            4..=6 => {
                ranges().iter().flat_map(|(at, len)| &all[*at as usize..][..*len as usize]).copied().collect()
            }
            7 | 8 => all[10..30].to_vec(),
            _ => all,
        }
    }
}

fn ranges() -> Vec<(u64, u64)> {
    vec![(100_000, 200_000), (5, 0), (5, 1), (0, 70_000)]
}

struct RealFile(std::fs::File);

impl DiskFile for RealFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&self.0, buf, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn preallocate(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }
    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

struct FakeFile(Vec<u8>);

impl DiskFile for FakeFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = self.0.get(offset as usize..).unwrap_or(&[]);
        let len = rest.len().min(buf.len());
        buf[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
    fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn preallocate(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Which transport a test runs over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Over {
    Tcp,
    Local,
}

/// A service and a connection to it.
pub struct World {
    pub zoo: Arc<Zoo>,
    pub connection: Connection,
    pub server: Option<ServerHandle>,
}

impl World {
    pub async fn new(over: Over) -> World {
        World::with(over, Config::default(), Config::default()).await
    }

    pub async fn with(over: Over, server: Config, client: Config) -> World {
        let zoo = Zoo::new();
        match over {
            Over::Tcp => {
                let server = start(zoo.clone(), server).await;
                let addr = server.local_addr().to_string();
                let connection = Connection::connect(&addr, client).await.expect("connected");
                World { zoo, connection, server: Some(server) }
            }
            Over::Local => {
                let connection = Connection::local(zoo.clone(), Peer::new("this process", Role::Tool));
                World { zoo, connection, server: None }
            }
        }
    }
}

/// Starts a server on a free port.
pub async fn start(zoo: Arc<Zoo>, config: Config) -> ServerHandle {
    let listener = Listener::bind("127.0.0.1:0", config).await.expect("bound");
    serve(listener, zoo)
}

/// A call with a generous deadline.
pub fn call(method: u16, body: impl Into<Bytes>) -> Call {
    Call::new(method, body, LONG)
}

/// Bytes that are easy to tell apart.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Waits until something is so.
pub async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Polls once, as a FUSE thread does.
pub fn poll_once<F: Future + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    std::pin::Pin::new(future).poll(&mut cx)
}
