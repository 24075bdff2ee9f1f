//! The receiving half of a connection: finds frames, and reads payloads straight into their final buffer.
//!
//! Small frames come many at a time through one read-ahead buffer. After a frame with a large payload the next one is
//! probably large too, so the read that ends a payload asks only for the next header beside it; what the read-ahead
//! buffer does not hold need not be copied out of it.
//!
//! # Invariants
//! - No memory is taken for a length that was not checked (`Header::decode` does) and granted by the caller.
//! - A frame that began is complete by its deadline, or the connection ends.

use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout_at;

use crate::buf::AlignedBuf;
use crate::config::Config;
use crate::frame::{Garbage, HEADER_LEN, Header, PAYLOAD_CRC};

/// From this length on a payload counts as large.
const LARGE: usize = 8 << 10;
/// What is read beside the end of a large payload: a header and a usual body.
const SMALL_READ: usize = 512;

/// Why a connection stopped receiving.
#[derive(Debug, Error)]
pub(crate) enum Ended {
    #[error("the connection was closed by the peer")]
    Closed,
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    #[error("the peer sent {0}")]
    Garbage(#[from] Garbage),
    #[error("the peer did not finish a frame in time")]
    Slow,
}

/// The receiving half.
pub(crate) struct Inbound {
    stream: Arc<TcpStream>,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last payload was large.
    large: bool,
    /// When bytes were read from the socket last.
    filled: Instant,
    frame_timeout: Duration,
    rate_min: u64,
    /// When bytes arrived last, in milliseconds since `epoch`; the keeper looks at it.
    pub heard: Arc<Heard>,
}

/// When bytes arrived last.
pub(crate) struct Heard {
    epoch: Instant,
    last_ms: AtomicU64,
}

impl Heard {
    pub fn new() -> Heard {
        Heard { epoch: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    pub fn touch(&self) {
        self.touch_at(Instant::now());
    }

    fn touch_at(&self, now: Instant) {
        let since = now.saturating_duration_since(self.epoch);
        self.last_ms.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn last(&self) -> Instant {
        self.epoch + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }
}

impl Inbound {
    pub fn new(stream: Arc<TcpStream>, config: &Config) -> Inbound {
        Inbound {
            stream,
            buf: vec![0; config.read_buffer.max(4 * SMALL_READ)].into_boxed_slice(),
            start: 0,
            end: 0,
            large: false,
            filled: Instant::now(),
            frame_timeout: config.frame_timeout,
            rate_min: config.frame_rate_min.max(1),
            heard: Arc::new(Heard::new()),
        }
    }

    /// The next header, if it is here already.
    pub fn buffered_header(&mut self) -> Result<Option<Header>, Ended> {
        let Some(bytes) = self.buf[self.start..self.end].first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let header = Header::decode(bytes)?;
        self.start += HEADER_LEN;
        Ok(Some(header))
    }

    /// Reads what has arrived, without waiting; false if nothing had.
    pub fn try_fill(&mut self) -> Result<bool, Ended> {
        self.make_room(HEADER_LEN);
        let room = if self.large { (self.end + SMALL_READ).min(self.buf.len()) } else { self.buf.len() };
        match self.stream.try_read(&mut self.buf[self.end..room]) {
            Ok(0) => Err(Ended::Closed),
            Ok(n) => {
                self.end += n;
                self.touch();
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// When the bytes of the last header arrived here, or some after them.
    pub fn arrived(&self) -> Instant {
        self.filled
    }

    /// Whether so many bytes after the last header are here already.
    pub fn has(&self, header: &Header) -> bool {
        self.end - self.start >= header.body_len as usize + header.payload_len as usize
    }

    /// The next header, waiting for it.
    pub async fn header(&mut self) -> Result<Header, Ended> {
        let mut began: Option<Instant> = None;
        loop {
            if let Some(header) = self.buffered_header()? {
                return Ok(header);
            }
            if self.try_fill()? {
                continue;
            }
            if self.start == self.end {
                self.stream.readable().await?;
            } else {
                let deadline = *began.get_or_insert_with(|| Instant::now() + self.frame_timeout);
                self.readable_by(deadline).await?;
            }
        }
    }

    /// By when a frame that begins now has to be complete.
    pub fn frame_deadline(&self, header: &Header) -> Instant {
        let len = u64::from(header.body_len) + u64::from(header.payload_len);
        Instant::now() + self.frame_timeout + Duration::from_secs(len / self.rate_min)
    }

    /// The body, checked.
    pub async fn body(&mut self, header: &Header, deadline: Instant) -> Result<Bytes, Ended> {
        let len = header.body_len as usize;
        let body = if len == 0 {
            Bytes::new()
        } else if self.end - self.start >= len {
            let body = Bytes::copy_from_slice(&self.buf[self.start..self.start + len]);
            self.start += len;
            body
        } else {
            let mut body = vec![0; len];
            self.fill(&mut body, deadline).await?;
            Bytes::from(body)
        };
        if crc32c::crc32c(&body) != header.body_crc {
            return Err(Garbage::BodyCrc.into());
        }
        Ok(body)
    }

    /// The payload, in its final buffer, checked if it carries no checksums of its own.
    pub async fn payload(&mut self, header: &Header, deadline: Instant) -> Result<AlignedBuf, Ended> {
        let len = header.payload_len as usize;
        let mut payload = AlignedBuf::with_len(len);
        self.fill(&mut payload, deadline).await?;
        self.large = len >= LARGE;
        if header.has(PAYLOAD_CRC) && crc32c::crc32c(&payload) != header.payload_crc {
            return Err(Garbage::PayloadCrc.into());
        }
        Ok(payload)
    }

    /// Reads over so many bytes that nobody waits for any more.
    pub async fn skip(&mut self, mut len: usize, deadline: Instant) -> Result<(), Ended> {
        loop {
            let here = len.min(self.end - self.start);
            self.start += here;
            len -= here;
            if len == 0 {
                return Ok(());
            }
            if !self.try_fill()? {
                self.readable_by(deadline).await?;
            }
        }
    }

    /// Fills `to` with the next bytes of the stream.
    async fn fill(&mut self, to: &mut [u8], deadline: Instant) -> Result<(), Ended> {
        let mut at = to.len().min(self.end - self.start);
        to[..at].copy_from_slice(&self.buf[self.start..self.start + at]);
        self.start += at;
        while at < to.len() {
            // The read-ahead buffer is empty here; its beginning takes what comes after.
            (self.start, self.end) = (0, 0);
            let mut places = [IoSliceMut::new(&mut to[at..]), IoSliceMut::new(&mut self.buf[..SMALL_READ])];
            match self.stream.try_read_vectored(&mut places) {
                Ok(0) => return Err(Ended::Closed),
                Ok(n) => {
                    let here = n.min(to.len() - at);
                    at += here;
                    self.end = n - here;
                    self.touch();
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.readable_by(deadline).await?,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn touch(&mut self) {
        self.filled = Instant::now();
        self.heard.touch_at(self.filled);
    }

    async fn readable_by(&self, deadline: Instant) -> Result<(), Ended> {
        match timeout_at(deadline.into(), self.stream.readable()).await {
            Ok(ready) => Ok(ready?),
            Err(_) => Err(Ended::Slow),
        }
    }

    /// Moves a rest to the front when less than `want` bytes could follow.
    fn make_room(&mut self, want: usize) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buf.len() - self.start < want {
            self.buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }
}
