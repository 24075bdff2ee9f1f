//! Pieces of blocks on one disk: append-only, preallocated, recycled segments and an index in memory.
//!
//! One named thread per disk writes. It takes what many threads want to put or delete, writes it as one batch at the end
//! of the active segment, syncs once, and only then changes the index and acknowledges. Since a segment's space is allocated
//! before and its length never changes, that sync is a flush of data and no commit of the file system's journal. Readers look up the
//! index and get a range of the segment's file; they neither wait for the writer nor does it wait for them.
//!
//! A deleted piece gets a tombstone. When half of a segment is dead, what lives in it is written again at the end of the
//! active one and the segment gets a new generation, durable before anything is written into it; from then on nothing that
//! it held can be found.
//!
//! # Invariants
//! - Acknowledged means durable, for puts and deletes. What was not acknowledged is there whole or not at all.
//! - Bytes of a segment are not overwritten while a reader holds a range of it.
//! - A segment is given a new generation only when nothing in it lives and no tombstone in it is needed.
//! - After a failed write or sync the disk is latched: no change any more, reads go on.
//!
//! # Not here
//! - Checking what a reader gets: the reader does that. [`Store::verify`] is for the scrubber.

mod compact;
mod cursor;
mod format;
mod index;
mod marks;
mod open;
mod read;
mod scan;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, RwLock};
use torchfs_proto::chunk::{ChunkInfo, MAX_CHUNKS};
use torchfs_proto::disk::Disk;
use torchfs_proto::{BlockId, ClusterId, IdRange, LayoutId, ServerId};

pub use cursor::Cursor;
pub use read::{Body, Found, Stat};
pub(crate) use read::{are_numbers, check_chunks, check_parts};

use crate::{Error, Result};
use index::Index;
use writer::Writer;

/// How a store behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The cluster whose data this is; segments of another one are refused.
    pub cluster: ClusterId,
    /// The server's name in faults.
    pub server: ServerId,
    /// The disk's name in faults: its folder. Empty where there is only one.
    pub disk: String,
    /// Bytes of a new segment; less on a small disk. The largest piece has to fit.
    pub segment_bytes: u64,
    /// The most bytes of all segments; `None` takes what the file system has.
    pub capacity: Option<u64>,
    /// Bytes of the file system that are left to others.
    pub keep_free: u64,
    /// How many stores share the file system's room, this one included.
    pub sharers: u64,
    /// Segments that puts may not use, so that deleting and emptying work when all else is full.
    pub reserve: usize,
    /// The most bytes of one batch.
    pub batch_bytes: u64,
    /// The most bytes that may wait to be written.
    pub queue_bytes: u64,
    /// Live bytes are rewritten in steps of so many, between the batches of others.
    pub compact_step: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            cluster: ClusterId(0),
            server: ServerId(0),
            disk: String::new(),
            segment_bytes: 256 << 20,
            capacity: None,
            keep_free: 64 << 20,
            sharers: 1,
            reserve: 2,
            batch_bytes: 32 << 20,
            queue_bytes: 128 << 20,
            compact_step: 8 << 20,
        }
    }
}

/// A piece to store.
#[derive(Clone, Debug)]
pub struct NewPiece {
    /// The block.
    pub block: BlockId,
    /// Which piece of it.
    pub piece: u8,
    /// The block's layout.
    pub layout: LayoutId,
    /// The index in the block of the piece's first chunk.
    pub first: u32,
    /// The piece's chunks.
    pub chunks: Vec<ChunkInfo>,
    /// Their stored bytes, one after the other, in parts of any length.
    pub payload: Vec<Bytes>,
}

/// Called once with the outcome, on the writer's thread; must not wait.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// The pieces on one disk. Closing waits for what was submitted.
pub struct Store {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the store in a folder; an empty folder becomes an empty store. Reads all segments' headers.
    pub fn open(disk: Arc<dyn Disk>, config: Config) -> Result<Store> {
        let server = config.server;
        let (shared, writer) = open::open(disk, config)?;
        let thread = std::thread::Builder::new()
            .name(format!("block-writer-{server}"))
            .spawn({
                let shared = shared.clone();
                move || shared.write_on(writer)
            })
            .map_err(|e| shared.io("start the writer's thread", e))?;
        Ok(Store { shared, thread: Some(thread) })
    }

    /// Stores a piece; returns when it is durable. The same piece again is fine, another one under its name is refused.
    pub fn put(&self, piece: NewPiece) -> Result<()> {
        self.wait(|done| Op::Put(piece, done))
    }

    /// Deletes all pieces of these blocks that are here; returns how many, when that is durable.
    pub fn delete(&self, blocks: Vec<BlockId>) -> Result<u64> {
        self.wait(|done| Op::Delete(Dead::Blocks(blocks), done))
    }

    /// Deletes all pieces of a run of blocks, except those to keep; returns how many, when that is durable.
    pub fn purge(&self, range: IdRange, keep: Vec<BlockId>) -> Result<u64> {
        self.wait(|done| Op::Delete(Dead::Range(range, keep.into_iter().collect()), done))
    }

    /// Deletes single pieces of blocks that live on elsewhere; returns how many were here, when that is durable.
    pub fn drop_pieces(&self, pieces: Vec<(BlockId, u8)>) -> Result<u64> {
        self.wait(|done| Op::Delete(Dead::Pieces(pieces), done))
    }

    /// [`Store::put`] without waiting: fails at once with [`Error::Overloaded`] if too much waits already.
    pub fn submit_put(&self, piece: NewPiece, done: Done<()>) -> Result<()> {
        self.shared.submit(Op::Put(piece, done), false)
    }

    /// [`Store::delete`] without waiting for it.
    pub fn submit_delete(&self, blocks: Vec<BlockId>, done: Done<u64>) -> Result<()> {
        self.shared.submit(Op::Delete(Dead::Blocks(blocks), done), false)
    }

    /// [`Store::purge`] without waiting for it.
    pub fn submit_purge(&self, range: IdRange, keep: Vec<BlockId>, done: Done<u64>) -> Result<()> {
        let keep = keep.into_iter().collect();
        self.shared.submit(Op::Delete(Dead::Range(range, keep), done), false)
    }

    /// [`Store::drop_pieces`] without waiting for it.
    pub fn submit_drop(&self, pieces: Vec<(BlockId, u8)>, done: Done<u64>) -> Result<()> {
        self.shared.submit(Op::Delete(Dead::Pieces(pieces), done), false)
    }

    /// Why the disk takes no changes any more, if it failed.
    pub fn failure(&self) -> Option<&str> {
        self.shared.latched.get().map(String::as_str)
    }

    /// Takes the disk out of use as if a write had failed: no changes any more, reads go on as far as they can.
    pub fn take_out(&self, what: &'static str, error: std::io::Error) {
        self.shared.latch(what, error);
    }

    fn wait<T: Send + 'static>(&self, op: impl FnOnce(Done<T>) -> Op) -> Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let done = Box::new(move |result| {
            // The receiver waits below; it cannot be gone.
            let _ = sender.send(result);
        });
        self.shared.submit(op(done), true)?;
        receiver.recv().unwrap_or(Err(Error::Closed { server: self.shared.config.server }))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.queue.lock().closing = true;
        self.shared.wake.notify_all();
        self.shared.room.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(server = %self.shared.config.server, "the block writer's thread panicked");
        }
    }
}

/// What the writer is asked for.
enum Op {
    Put(NewPiece, Done<()>),
    Delete(Dead, Done<u64>),
    /// Write the segment's header again if it cannot be read; answers whether that was so.
    Header(u32, Done<bool>),
    /// Make the marks of damaged pieces durable.
    Marks(Done<()>),
}

/// What to delete.
enum Dead {
    Blocks(Vec<BlockId>),
    Pieces(Vec<(BlockId, u8)>),
    Range(IdRange, HashSet<BlockId>),
}

impl Op {
    /// What it takes of the queue's bound.
    fn weight(&self) -> u64 {
        match self {
            Op::Put(piece, _) => piece.payload.iter().map(|part| part.len() as u64).sum::<u64>() + 256,
            Op::Delete(Dead::Blocks(blocks), _) => blocks.len() as u64 * 16 + 256,
            Op::Delete(Dead::Pieces(pieces), _) => pieces.len() as u64 * 24 + 256,
            Op::Delete(Dead::Range(_, keep), _) => keep.len() as u64 * 32 + 256,
            Op::Header(..) | Op::Marks(_) => 256,
        }
    }
}

/// What readers, submitters and the writer share.
struct Shared {
    config: Config,
    disk: Arc<dyn Disk>,
    index: RwLock<Index>,
    /// What was read lately.
    recent: read::Recent,
    /// The first failure of a write or sync.
    latched: OnceLock<String>,
    /// Reads that the disk refused.
    read_errors: AtomicU32,
    /// Places that could not be read at the start.
    damaged: u64,
    /// How long new segments are.
    segment_bytes: u64,
    /// The last put that needed another segment got none.
    full: AtomicBool,
    queue: Mutex<Queue>,
    /// Something was submitted, or the store closes.
    wake: Condvar,
    /// Something was taken from the queue, or the store closes.
    room: Condvar,
}

#[derive(Default)]
struct Queue {
    ops: VecDeque<Op>,
    bytes: u64,
    closing: bool,
}

impl Shared {
    fn submit(&self, op: Op, wait: bool) -> Result<()> {
        let server = self.config.server;
        if let Op::Put(piece, _) = &op {
            self.check(piece)?;
        }
        let weight = op.weight();
        let mut queue = self.queue.lock();
        loop {
            if queue.closing {
                return Err(Error::Closed { server });
            }
            // One that is larger than the whole bound is let through alone.
            if queue.ops.is_empty() || queue.bytes + weight <= self.config.queue_bytes {
                break;
            }
            if !wait {
                return Err(Error::Overloaded { server });
            }
            self.room.wait(&mut queue);
        }
        queue.bytes += weight;
        queue.ops.push_back(op);
        drop(queue);
        self.wake.notify_one();
        Ok(())
    }

    /// Refuses what no reader could make sense of later.
    fn check(&self, piece: &NewPiece) -> Result<()> {
        let invalid = |why: &str| Error::Invalid {
            block: piece.block,
            server: self.config.server,
            why: format!("piece {}: {why}", piece.piece),
        };
        if piece.chunks.is_empty() || piece.chunks.len() > MAX_CHUNKS {
            return Err(invalid("a piece has between one and 256 chunks"));
        }
        if !are_numbers(piece.first, piece.chunks.len()) {
            return Err(invalid("there are no chunks of such numbers"));
        }
        if !piece.chunks.iter().all(torchfs_codec::plausible) {
            return Err(invalid("a chunk's lengths or codec make no sense"));
        }
        let stored = torchfs_proto::chunk::stored_len(&piece.chunks);
        if stored != piece.payload.iter().map(|part| part.len() as u64).sum::<u64>() {
            return Err(invalid("the payload is not as long as its chunks"));
        }
        Ok(())
    }

    /// The writer's thread.
    fn write_on(&self, mut writer: Writer) {
        let mut more = true;
        loop {
            let mut queue = self.queue.lock();
            while queue.ops.is_empty() && !queue.closing && !more {
                self.wake.wait(&mut queue);
            }
            if queue.ops.is_empty() && queue.closing {
                return;
            }
            // What arrives during one batch's sync goes into the next one together.
            let mut ops = Vec::new();
            let mut bytes = 0;
            while bytes < self.config.batch_bytes
                && let Some(op) = queue.ops.pop_front()
            {
                bytes += op.weight();
                ops.push(op);
            }
            queue.bytes -= bytes;
            drop(queue);
            self.room.notify_all();
            writer.run(ops);
            more = writer.maintain();
        }
    }

    fn io(&self, what: &'static str, error: std::io::Error) -> Error {
        io_error(&self.config, what, error)
    }

    /// Remembers the first failure; from now on the disk takes no change.
    fn latch(&self, what: &'static str, error: std::io::Error) -> Error {
        let error = self.io(what, error);
        if self.latched.set(error.to_string()).is_ok() {
            tracing::error!(
                server = %self.config.server,
                disk = self.config.disk,
                %error,
                "the disk takes no changes any more"
            );
        }
        error
    }

    fn check_latch(&self) -> Result<()> {
        match self.latched.get() {
            Some(why) => Err(Error::Latched { server: self.config.server, why: why.clone() }),
            None => Ok(()),
        }
    }
}

fn io_error(config: &Config, what: &'static str, error: std::io::Error) -> Error {
    let why = match config.disk.as_str() {
        "" => error.to_string(),
        disk => format!("{disk}: {error}"),
    };
    Error::Io { server: config.server, what, why }
}
