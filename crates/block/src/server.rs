//! Answers the requests of `proto::msg::block` with a [`Store`].
//!
//! Nothing here waits for a disk on a thread of the runtime: puts and deletes are handed to the store's writer, reads that
//! are not in memory to a few reader threads with names. Both queues are bounded; who comes when they are full waits (puts)
//! or is told to come back (reads).
//!
//! # Invariants
//! - A put's checksums are verified before it is written: what is acknowledged is what the writer meant.
//! - A request that was handed on is finished even if its caller is gone.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use torchfs_disk::LocalDisk;
use torchfs_proto::disk::Disk;
use torchfs_proto::msg;
use torchfs_proto::msg::block::{Op, Reply, Request, method};
use torchfs_proto::msg::dump::DumpOp;
use torchfs_proto::{BlockId, Code, Fault, ServerId};
use torchfs_rpc::{Answer, Answering, Payload, Peer, Role, Service};

use crate::dumps::Dumps;
use crate::store::{self, Body, Done, Found, NewPiece, Stat, Store};
use crate::{Error, Result};

/// A piece up to this length is checked where it arrives; a hop to another thread would cost more.
const CHECK_HERE: usize = 512 << 10;

/// The most pieces one answer lists.
const LIST_MAX: u32 = 16 << 10;

/// How a data server behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folder with its segments, for this process alone.
    pub dir: PathBuf,
    /// How its store behaves.
    pub store: store::Config,
    /// Threads that wait for the disk to read.
    pub readers: usize,
    /// Reads that may wait for them.
    pub reads_max: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config { dir: PathBuf::from("."), store: store::Config::default(), readers: 4, reads_max: 1024 }
    }
}

/// A data server on one disk, behind `rpc::serve` or `rpc::Connection::local`.
pub struct BlockServer {
    store: Arc<Store>,
    /// Only a server with a folder of its own keeps dumps of the metadata.
    dumps: Option<Arc<Dumps>>,
    readers: Readers,
    server: ServerId,
    /// Bytes that may wait for the writer, in KiB.
    room: Arc<Semaphore>,
    room_max: u32,
}

impl BlockServer {
    /// Opens the store in the configured folder and starts its threads.
    pub fn open(config: Config) -> Result<Arc<BlockServer>> {
        let server = config.store.server;
        let failed =
            |what: &'static str| move |e: std::io::Error| Error::Io { server, what, why: e.to_string() };
        let disk = LocalDisk::open_locked(&config.dir).map_err(failed("open its folder"))?;
        let dumps = LocalDisk::open(config.dir.join("dumps")).map_err(failed("open its folder of dumps"))?;
        BlockServer::build(Arc::new(disk), Some(Arc::new(dumps)), config)
    }

    /// The same over any disk, without dumps.
    pub fn over(disk: Arc<dyn Disk>, config: Config) -> Result<Arc<BlockServer>> {
        BlockServer::build(disk, None, config)
    }

    fn build(disk: Arc<dyn Disk>, dumps: Option<Arc<dyn Disk>>, config: Config) -> Result<Arc<BlockServer>> {
        let server = config.store.server;
        let dumps = match dumps {
            Some(disk) => {
                let dumps = Dumps::open(disk, server, config.store.keep_free);
                Some(Arc::new(dumps.map_err(|e| Error::Io {
                    server,
                    what: "open its dumps",
                    why: e.what,
                })?))
            }
            None => None,
        };
        let room_max = u32::try_from(config.store.queue_bytes / 1024).unwrap_or(u32::MAX).clamp(1, 1 << 28);
        let store = Arc::new(Store::open(disk, config.store)?);
        let readers = Readers::start(server, config.readers, config.reads_max)?;
        let room = Arc::new(Semaphore::new(room_max as usize));
        Ok(Arc::new(BlockServer { store, dumps, readers, server, room, room_max }))
    }

    /// The store below.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Figures for the metadata service.
    pub fn stat(&self) -> Result<Stat> {
        self.store.stat()
    }

    async fn answer(self: Arc<Self>, role: Role, op: Op, payload: Bytes) -> Result<Answer, Fault> {
        let reply = match op {
            Op::Put { block, piece, layout, group_version: _, chunks, first } => {
                let piece = NewPiece { block, piece, layout, first, chunks, payload: vec![payload] };
                self.put(piece).await?;
                Reply::Done
            }
            Op::Get { block, piece, first, count } => {
                let range = u32::from(first)..u32::from(first) + u32::from(count);
                let found = match self.store.get_now(block, piece, range.clone())? {
                    Some(found) => found,
                    None => {
                        let store = self.store.clone();
                        self.readers.run(move || store.load(block, piece, range)).await??
                    }
                };
                return chunks(found);
            }
            Op::Delete { blocks } => {
                self.change(blocks.len() as u64 * 16, |store, done| store.submit_delete(blocks, done))
                    .await?;
                Reply::Done
            }
            Op::Purge { range, keep } => {
                let weight = keep.len() as u64 * 32;
                self.change(weight, |store, done| store.submit_purge(range, keep, done)).await?;
                Reply::Done
            }
            Op::List { after, limit } => {
                let limit = limit.min(LIST_MAX);
                let pieces = self.store.list(after, limit as usize);
                Reply::Listed { end: pieces.len() < limit as usize, pieces }
            }
            Op::Stat => {
                let Stat { total, free, used, pieces, .. } = self.store.stat()?;
                Reply::Stat { total, free, used, pieces }
            }
            Op::Verify { block, piece } => {
                let store = self.store.clone();
                self.readers.run(move || store.verify(block, piece)).await??;
                Reply::Done
            }
            Op::Missing { .. } | Op::Pull { .. } | Op::Drop { .. } | Op::Scrub { .. } | Op::Sessions => {
                return Err(Fault::new(Code::Unsupported, "this data server cannot repair yet"));
            }
            Op::Dump(op) => return self.dump(role, op, payload).await,
        };
        Ok(Answer::new(msg::encode(&reply)))
    }

    /// Dumps are rare and long: they take their turn among the reads.
    async fn dump(&self, role: Role, op: DumpOp, payload: Bytes) -> Result<Answer, Fault> {
        let Some(dumps) = self.dumps.clone() else {
            let what = format!("data server {} keeps no dumps", self.server);
            return Err(Fault::new(Code::Unsupported, what));
        };
        if matches!(op, DumpOp::Put { .. } | DumpOp::Delete { .. }) && role != Role::Meta {
            return Err(Fault::new(Code::Denied, "only the metadata service puts and deletes dumps"));
        }
        let reply = self.readers.run(move || match op {
            DumpOp::Put { name, offset, end } => {
                dumps.put(name, offset, &payload, end).map(|()| (Reply::Done, Vec::new()))
            }
            DumpOp::List => dumps.list().map(|found| (Reply::Dumps(found), Vec::new())),
            DumpOp::Get { name, offset, len } => {
                dumps.load(name, offset, len).map(|(part, total)| (Reply::DumpPart { total }, part))
            }
            DumpOp::Delete { names } => dumps.delete(&names).map(|()| (Reply::Done, Vec::new())),
        });
        let (reply, part) = reply.await??;
        let answer = Answer::new(msg::encode(&reply));
        Ok(if part.is_empty() { answer } else { answer.payload(Bytes::from(part)) })
    }

    async fn put(&self, piece: NewPiece) -> Result<(), Fault> {
        let len: usize = piece.payload.iter().map(Bytes::len).sum();
        let server = self.server;
        let piece = if len <= CHECK_HERE {
            check(server, &piece)?;
            piece
        } else {
            self.readers.run(move || check(server, &piece).map(|()| piece)).await??
        };
        self.change(len as u64, |store, done| store.submit_put(piece, done)).await
    }

    /// Hands a change to the store's writer when there is room for it, and waits for its end.
    async fn change<T: Send + 'static>(
        &self,
        bytes: u64,
        submit: impl FnOnce(&Store, Done<T>) -> Result<()>,
    ) -> Result<T, Fault> {
        let weight = u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX).min(self.room_max);
        let closed = || Fault::from(Error::Closed { server: self.server });
        let permit = self.room.clone().acquire_many_owned(weight).await.map_err(|_| closed())?;
        let (tell, told) = oneshot::channel();
        submit(&self.store, done(permit, tell))?;
        Ok(told.await.map_err(|_| closed())??)
    }
}

impl Service for BlockServer {
    fn call(self: Arc<Self>, peer: Peer, request: torchfs_rpc::Request) -> Answering {
        Box::pin(async move {
            if request.method != method::BLOCK {
                let what = format!("a data server has no method {}", request.method);
                return Err(Fault::new(Code::Unsupported, what));
            }
            let Request { op, .. } = msg::decode(&request.body)?;
            self.answer(peer.role(), op, request.payload.into_bytes()).await
        })
    }
}

/// The room is given back when the change is durable, even if the caller is gone by then.
fn done<T: Send + 'static>(permit: OwnedSemaphorePermit, tell: oneshot::Sender<Result<T>>) -> Done<T> {
    Box::new(move |result| {
        drop(permit);
        // A caller that is gone does not want to know.
        let _ = tell.send(result);
    })
}

/// Checks the bytes of a put against its chunks.
fn check(server: ServerId, piece: &NewPiece) -> Result<()> {
    let NewPiece { block, first, chunks, payload, .. } = piece;
    let invalid = |why: String| Error::Invalid { block: *block, server, why };
    let [payload] = payload.as_slice() else {
        return Err(invalid("the payload is missing".to_owned()));
    };
    if torchfs_proto::chunk::stored_len(chunks) != payload.len() as u64 {
        return Err(invalid("the payload is not as long as its chunks".to_owned()));
    }
    store::check_chunks(*block, *first, chunks, payload)
        .map_err(|e| corrupted_on_the_way(*block, piece.piece, server, &e))
}

fn corrupted_on_the_way(block: BlockId, piece: u8, server: ServerId, error: &torchfs_codec::Error) -> Error {
    Error::Corrupt { block, piece, server, why: format!("it arrived so: {error}") }
}

fn chunks(found: Found) -> Result<Answer, Fault> {
    let payload = match found.body {
        Body::Memory(bytes) => Payload::from(bytes),
        Body::File { file, offset, len } => Payload::File { file, ranges: vec![(offset, len)] },
    };
    let reply = Reply::Chunks { chunks: found.chunks };
    Ok(Answer::new(msg::encode(&reply)).payload(payload).carries_sums())
}

/// A few threads that wait for the disk.
struct Readers {
    jobs: OnceLock<SyncSender<Job>>,
    threads: Vec<JoinHandle<()>>,
    server: ServerId,
}

type Job = Box<dyn FnOnce() + Send>;

impl Readers {
    fn start(server: ServerId, threads: usize, queue: usize) -> Result<Readers> {
        let (jobs, queue) = sync_channel::<Job>(queue.max(1));
        let queue = Arc::new(Mutex::new(queue));
        let mut readers = Readers { jobs: OnceLock::from(jobs), threads: Vec::new(), server };
        for n in 0..threads.max(1) {
            let queue = queue.clone();
            let thread = std::thread::Builder::new()
                .name(format!("block-reader-{server}-{n}"))
                .spawn(move || work(&queue))
                .map_err(|e| Error::Io { server, what: "start a reader's thread", why: e.to_string() })?;
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Runs a job on one of the threads.
    async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, Fault> {
        let (tell, told) = oneshot::channel();
        let job: Job = Box::new(move || {
            // A caller that is gone does not want to know.
            let _ = tell.send(job());
        });
        let closed = || Fault::from(Error::Closed { server: self.server });
        match self.jobs.get().ok_or_else(closed)?.try_send(job) {
            Ok(()) => told.await.map_err(|_| closed()),
            Err(TrySendError::Full(_)) => Err(Error::Overloaded { server: self.server }.into()),
            Err(TrySendError::Disconnected(_)) => Err(closed()),
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.jobs.take();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(server = %self.server, "a block reader's thread panicked");
            }
        }
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        // Only one of the threads waits for the next job; the others work or wait for their turn to wait.
        let next = queue.lock().recv();
        match next {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
