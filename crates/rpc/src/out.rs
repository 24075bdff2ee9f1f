//! The sending half of a connection: whoever has a frame writes it to the socket himself if he can.
//!
//! A frame is put into a queue; then the sender tries to become the writer and empties the queue with non-blocking
//! vectored writes. If somebody else is writing, that one takes the frame along, so many small frames share a system call
//! and nobody waits for a lock. When the socket is full, the connection's keeper task continues. When small frames come in
//! a burst (another was written microseconds ago), they are left to the keeper too, which lets the other ready tasks
//! run first and then writes all their frames at once.
//!
//! # Invariants
//! - Bytes leave in the order of the queue; only the holder of `writing` touches the socket.
//! - After the writer lets go, the queue is looked at again, so no frame is left behind without a writer or a keeper.
//! - A frame's guard is dropped when its last byte is written or the connection is closed.
//! - The queue is bounded by its users: a call or a request holds its place among the allowed ones until its frame is out.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use metrics::Histogram;
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::frame::{HEADER_LEN, Header, PAYLOAD_CRC};
use crate::payload::Payload;

/// How many pieces one vectored write takes.
const PIECES_MAX: usize = 64;
/// How many frames the writer looks at together.
const BATCH_MAX: usize = 32;
/// A small frame that comes so soon after the last write belongs to a burst. A lone caller waits longer than this for each
/// reply, so it never meets the keeper.
const BURST: Duration = Duration::from_micros(10);
/// Frames from this length on are written at once: they fill a write by themselves.
const SMALL: usize = 4 << 10;

/// A frame to send. `G` is what is held until it is out.
pub(crate) struct Frame<G> {
    head: [u8; HEADER_LEN],
    body: Bytes,
    payload: Payload,
    payload_len: usize,
    sent: usize,
    /// What the time until it is out is counted from.
    since: Option<Instant>,
    _guard: Option<G>,
}

impl<G> Frame<G> {
    /// A frame; lengths and checksums of the header are filled in here. The payload is memory or a file with a
    /// descriptor, within its bound.
    pub fn new(
        mut header: Header,
        body: Bytes,
        payload: Payload,
        carries_sums: bool,
        guard: Option<G>,
    ) -> Frame<G> {
        let payload_len = payload.len() as usize;
        header.body_len = body.len() as u32;
        header.body_crc = crc32c::crc32c(&body);
        header.payload_len = payload_len as u32;
        if payload_len > 0 && !carries_sums {
            header.flags |= PAYLOAD_CRC;
            header.payload_crc = payload.crc();
        }
        Frame { head: header.encode(), body, payload, payload_len, sent: 0, since: None, _guard: guard }
    }

    /// The same; how long after this moment it is out is recorded.
    pub fn since(self, since: Instant) -> Frame<G> {
        Frame { since: Some(since), ..self }
    }

    fn len(&self) -> usize {
        HEADER_LEN + self.body.len() + self.payload_len
    }
}

/// The sending half.
pub(crate) struct Out<G> {
    stream: Arc<TcpStream>,
    queue: Mutex<VecDeque<Frame<G>>>,
    writing: Mutex<VecDeque<Frame<G>>>,
    /// The reader holds small replies back until it has read all it can.
    corked: AtomicBool,
    /// The socket was full: the keeper waits until it is writable.
    blocked: AtomicBool,
    /// A burst waits for the keeper.
    burst: AtomicBool,
    closed: AtomicBool,
    written: AtomicU64,
    /// When the last write ended, in nanoseconds since `epoch`.
    last_write: AtomicU64,
    epoch: Instant,
    wake: Notify,
    /// How long frames took to get out.
    took: Histogram,
}

impl<G> Out<G> {
    pub fn new(stream: Arc<TcpStream>, took: Histogram) -> Out<G> {
        Out {
            stream,
            queue: Mutex::new(VecDeque::new()),
            writing: Mutex::new(VecDeque::new()),
            corked: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            burst: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            written: AtomicU64::new(0),
            last_write: AtomicU64::new(0),
            epoch: Instant::now(),
            wake: Notify::new(),
            took,
        }
    }

    /// Sends a frame: here and now if the socket takes it, unless it is one of a burst.
    pub fn send(&self, frame: Frame<G>) {
        let small = frame.len() < SMALL;
        self.queue.lock().push_back(frame);
        if self.is_closed() {
            self.queue.lock().clear();
        } else if self.corked.load(Ordering::Acquire) {
            // The reader sends it when it has read all it can.
        } else if small && self.is_burst() {
            if !self.burst.swap(true, Ordering::AcqRel) {
                self.wake.notify_one();
            }
        } else {
            self.pump();
        }
    }

    /// Holds frames back until `uncork`; only the connection's reader does this, and never across an await.
    pub fn cork(&self) {
        self.corked.store(true, Ordering::Release);
    }

    /// Sends what was held back.
    pub fn uncork(&self) {
        self.corked.store(false, Ordering::Release);
        self.pump();
    }

    /// Writes what waits, as far as the socket takes it and nobody else is writing.
    pub fn pump(&self) {
        loop {
            if self.queue.lock().is_empty() && !self.blocked.load(Ordering::Acquire) {
                return;
            }
            let Some(mut batch) = self.writing.try_lock() else {
                return; // the other one looks again when it is done
            };
            match self.write(&mut batch) {
                Ok(()) => self.blocked.store(false, Ordering::Release),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let before = self.blocked.swap(true, Ordering::AcqRel);
                    if self.is_closed() {
                        batch.clear();
                    }
                    drop(batch);
                    if !before {
                        self.wake.notify_one();
                    }
                    return;
                }
                Err(_) => {
                    batch.clear();
                    drop(batch);
                    self.close();
                    return;
                }
            }
        }
    }

    /// Ends the connection in both directions; what was not sent is dropped.
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            // An error means that it is closed already.
            let _ = SockRef::from(&*self.stream).shutdown(std::net::Shutdown::Both);
        }
        self.queue.lock().clear();
        if let Some(mut batch) = self.writing.try_lock() {
            batch.clear();
        }
        self.wake.notify_one();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether frames wait for the socket.
    pub fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// All bytes written so far, to see progress.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Wakes the keeper.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Returns when the keeper is wanted.
    pub async fn wanted(&self) {
        self.wake.notified().await;
    }

    /// Sends a burst, after the other ready tasks had their chance to add to it. The keeper does this first whenever it
    /// wakes, for whatever reason, so that no burst is forgotten.
    pub async fn send_burst(&self) {
        if self.burst.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
            self.burst.store(false, Ordering::Release);
            self.pump();
        }
    }

    fn is_burst(&self) -> bool {
        let last = Duration::from_nanos(self.last_write.load(Ordering::Relaxed));
        self.epoch.elapsed().saturating_sub(last) < BURST
    }

    /// Returns when the socket takes bytes again.
    pub async fn writable(&self) -> io::Result<()> {
        self.stream.writable().await
    }

    /// Writes until nothing is left.
    fn write(&self, batch: &mut VecDeque<Frame<G>>) -> io::Result<()> {
        loop {
            if batch.len() < BATCH_MAX {
                let mut queue = self.queue.lock();
                let count = (BATCH_MAX - batch.len()).min(queue.len());
                batch.extend(queue.drain(..count));
            }
            if self.is_closed() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let Some(first) = batch.front() else {
                return Ok(());
            };
            let mut sent = match next_file_piece(first) {
                Some((file, offset, len)) => self.send_file(file, offset, len)?,
                None => self.send_memory(batch)?,
            };
            self.written.fetch_add(sent as u64, Ordering::Relaxed);
            let now = Instant::now();
            let last = now.saturating_duration_since(self.epoch);
            self.last_write.store(last.as_nanos() as u64, Ordering::Relaxed);
            while sent > 0 {
                let Some(first) = batch.front_mut() else { break };
                let here = sent.min(first.len() - first.sent);
                first.sent += here;
                sent -= here;
                if first.sent == first.len() {
                    if let Some(since) = first.since {
                        self.took.record(now.saturating_duration_since(since));
                    }
                    batch.pop_front();
                }
            }
        }
    }

    fn send_memory(&self, batch: &VecDeque<Frame<G>>) -> io::Result<usize> {
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let mut count = 0;
        let mut more = false;
        for frame in batch {
            let full = !gather(frame, &mut pieces, &mut count);
            more = matches!(frame.payload, Payload::File { .. });
            if full || more {
                break;
            }
        }
        let flags = libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
        let sent = retry_interrupted(|| {
            self.stream.try_io(Interest::WRITABLE, || {
                SockRef::from(&*self.stream).send_vectored_with_flags(&pieces[..count], flags)
            })
        })?;
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(sent)
    }

    fn send_file(&self, fd: i32, offset: u64, len: usize) -> io::Result<usize> {
        // SAFETY: the frame at the front of the batch owns the file, so the descriptor stays open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let sent = retry_interrupted(|| {
            self.stream.try_io(Interest::WRITABLE, || {
                SockRef::from(&*self.stream).sendfile(&file, offset as usize, NonZeroUsize::new(len))
            })
        })?;
        if sent == 0 {
            // The length is in the header already: all that is left is to end the connection.
            tracing::error!(offset, len, "a file ended while it was being sent; closing the connection");
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(sent)
    }
}

/// Adds what a frame has in memory and not yet sent; false if there was no room for all of it.
fn gather<'a, G>(frame: &'a Frame<G>, pieces: &mut [IoSlice<'a>], count: &mut usize) -> bool {
    let mut skip = frame.sent;
    let mut add = |bytes: &'a [u8]| {
        let here = skip.min(bytes.len());
        skip -= here;
        if here == bytes.len() {
            return true;
        }
        let Some(place) = pieces.get_mut(*count) else {
            return false;
        };
        *place = IoSlice::new(&bytes[here..]);
        *count += 1;
        true
    };
    add(&frame.head)
        && add(&frame.body)
        && match &frame.payload {
            Payload::None | Payload::File { .. } => true,
            Payload::Bytes(bytes) => add(bytes),
            Payload::Buf(buf) => add(buf),
            Payload::Parts(parts) => parts.iter().all(|part| add(part)),
        }
}

/// The range of its file that a frame has to send next, once header and body are out.
fn next_file_piece<G>(frame: &Frame<G>) -> Option<(i32, u64, usize)> {
    let Payload::File { file, ranges } = &frame.payload else {
        return None;
    };
    let mut skip = frame.sent.checked_sub(HEADER_LEN + frame.body.len())? as u64;
    for (offset, len) in ranges {
        if skip < *len {
            // Files without a descriptor are read before they are sent; -1 would end the connection.
            return Some((file.raw_fd().unwrap_or(-1), offset + skip, (len - skip) as usize));
        }
        skip -= len;
    }
    None
}

fn retry_interrupted<T>(mut op: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match op() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
