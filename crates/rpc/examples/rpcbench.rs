//! Measures both ends of a connection in one process: round trips per second, MB/s, and the CPU they cost together.
//!
//! `cargo run --release -p torchfs-rpc --example rpcbench [seconds per line]`

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use torchfs_proto::disk::DiskFile;
use torchfs_proto::{Code, Fault};
use torchfs_rpc::{
    AlignedBuf, Answer, Answering, Call, Config, Connection, Listener, Payload, Peer, Request, Role, Service,
    serve,
};

const ECHO: u16 = 1;
const ECHO_IN_TASK: u16 = 2;
const READ_MEMORY: u16 = 3;
const READ_FILE: u16 = 4;
const PUT: u16 = 5;

struct Bench {
    memory: Bytes,
    file: Arc<dyn DiskFile>,
}

impl Service for Bench {
    fn call(self: Arc<Self>, _peer: Peer, request: Request) -> Answering {
        Box::pin(async move {
            let len = || u64::from_le_bytes(request.body[..8].try_into().unwrap_or_default());
            match request.method {
                ECHO => Ok(Answer::new(request.body)),
                ECHO_IN_TASK => {
                    tokio::task::yield_now().await;
                    Ok(Answer::new(request.body))
                }
                READ_MEMORY => {
                    let memory = self.memory.slice(..len() as usize);
                    Ok(Answer::new(Bytes::new()).payload(memory).carries_sums())
                }
                READ_FILE => {
                    let file = Payload::File { file: self.file.clone(), ranges: vec![(0, len())] };
                    Ok(Answer::new(Bytes::new()).payload(file).carries_sums())
                }
                PUT => Ok(Answer::default()),
                other => Err(Fault::new(Code::Unsupported, format!("method {other}"))),
            }
        })
    }
}

struct Plain(std::fs::File);

impl DiskFile for Plain {
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
    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(2.0);
    tokio::runtime::Runtime::new()?.block_on(run(Duration::from_secs_f64(seconds)))
}

async fn run(time: Duration) -> Result<(), Box<dyn std::error::Error>> {
    let memory = Bytes::from(vec![7; 4 << 20]);
    let file = tempfile::tempfile()?;
    file.write_all_at(&memory, 0)?;
    let service: Arc<dyn Service> = Arc::new(Bench { memory, file: Arc::new(Plain(file)) });
    let server = serve(Listener::bind("127.0.0.1:0", Config::default()).await?, service.clone());
    let tcp = Connection::connect(&server.local_addr().to_string(), Config::default()).await?;
    let local = Connection::local(service, Peer::new("this process", Role::Tool));

    println!("{:<44} {:>10} {:>10} {:>10} {:>10}", "", "calls/s", "MB/s", "CPU µs/op", "CPU s/GB");
    let small = |method| move || Call::new(method, vec![0; 40], Duration::from_secs(30));
    measure("tcp, 40 bytes, one caller", time, &tcp, 1, small(ECHO), 0).await?;
    measure("tcp, 40 bytes, 16 callers", time, &tcp, 16, small(ECHO), 0).await?;
    measure("tcp, 40 bytes, 64 callers", time, &tcp, 64, small(ECHO), 0).await?;
    measure("tcp, 40 bytes, 64 callers, in tasks", time, &tcp, 64, small(ECHO_IN_TASK), 0).await?;
    measure("local, 40 bytes, one caller", time, &local, 1, small(ECHO), 0).await?;
    for len in [64u64 << 10, 1 << 20, 4 << 20] {
        let kib = len >> 10;
        let read = |method| move || Call::new(method, len.to_le_bytes().to_vec(), Duration::from_secs(30));
        let put = move || {
            Call::new(PUT, "", Duration::from_secs(30))
                .payload(AlignedBuf::with_len(len as usize))
                .carries_sums()
        };
        measure(
            &format!("tcp, read {kib} KiB of memory, 32 callers"),
            time,
            &tcp,
            32,
            read(READ_MEMORY),
            len,
        )
        .await?;
        measure(&format!("tcp, read {kib} KiB of a file, 32 callers"), time, &tcp, 32, read(READ_FILE), len)
            .await?;
        measure(&format!("tcp, put {kib} KiB, 32 callers"), time, &tcp, 32, put, len).await?;
        measure(&format!("local, read {kib} KiB of a file"), time, &local, 1, read(READ_FILE), len).await?;
    }
    tcp.close().await;
    server.shutdown().await;
    Ok(())
}

async fn measure(
    what: &str,
    time: Duration,
    connection: &Connection,
    callers: usize,
    make: impl Fn() -> Call + Clone + Send + 'static,
    len: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (began, cpu) = (Instant::now(), cpu_time());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..callers {
        let (connection, make) = (connection.clone(), make.clone());
        let (stop, count) = (stop.clone(), count.clone());
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                connection.call(make()).await?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, Fault>(())
        });
    }
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let (took, cpu) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    let count = count.load(Ordering::Relaxed).max(1) as f64;
    let bytes = count * len as f64;
    print!("{what:<44} {:>10.0} {:>10.0} {:>10.2}", count / took, bytes / took / 1e6, cpu * 1e6 / count);
    println!(" {:>10.3}", if len > 0 { cpu * 1e9 / bytes } else { 0.0 });
    Ok(())
}

/// What this process has used so far, in user and system mode.
fn cpu_time() -> Duration {
    // Fields 14 and 15 of /proc/self/stat, in ticks of 10 ms; the name before them may hold blanks but ends with ')'.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}
