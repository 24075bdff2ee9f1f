//! Gets pieces from other servers: copies a piece from one that has it, or rebuilds it from others with the erasure code.
//!
//! The metadata service decides what is pulled and names the sources (`Op::Pull`); this file does it. It is background work
//! everywhere: the sources see a data server asking and serve it after their clients, and what was fetched waits here
//! behind the clients' puts. A rate bounds it besides.
//!
//! Also here: `Op::Scrub`, which reads stored pieces and checks them, and what is told to the metadata service about damage.
//!
//! # Invariants
//! - What is stored was checked against the checksums of whoever wrote the block, with the lengths that the block has.
//! - A piece that is here and whole is not fetched again.
//! - The answer comes before the caller stops waiting, with what was reached until then.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream::{self, FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use torchfs_client::Connector;
use torchfs_codec::erasure::{self, Piece};
use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_BLOCK, MAX_CHUNKS};
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::block::{Op, PullItem, Reply, Request, method};
use torchfs_proto::{BlockId, Code, Fault, Result, msg};
use torchfs_rpc::{Call, Link};

use crate::fair::Flow;
use crate::gate::Gate;
use crate::metrics as names;
use crate::server::BlockServer;
use crate::store::{NewPiece, check_chunks};

/// The most sources of one piece that are looked at.
const SOURCES_MAX: usize = 64;
/// The most links that are kept.
const LINKS_MAX: usize = 1024;
/// So long before the caller stops waiting the answer is made.
const MARGIN: Duration = Duration::from_millis(1500);
/// A damaged piece that is still not healed is reported again after this.
const REPORT_AGAIN: Duration = Duration::from_secs(600);
/// The most damaged pieces in one report.
const REPORT_MAX: usize = 256;

/// What a server needs to pull.
pub(crate) struct Repair {
    /// None for a server that was told of no others.
    connector: Option<Arc<dyn Connector>>,
    links: Mutex<HashMap<String, Link>>,
    /// Room for the pieces that are pulled at the same time, by all requests together.
    slots: Arc<Gate>,
    pulls: usize,
    timeout: Duration,
    pulling: Pace,
    scrubbing: Pace,
    /// Damaged pieces that the metadata service knows of, and since when.
    reported: Mutex<HashMap<(BlockId, u8), Instant>>,
}

/// How the pieces of a block are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape {
    /// Each is the whole block.
    Copies,
    /// Data and parity.
    Coded(erasure::Code),
}

/// Bytes from one source, not checked yet.
struct Fetched {
    chunks: Vec<ChunkInfo>,
    payload: Bytes,
}

impl Repair {
    /// Knows nobody yet.
    pub fn new(connector: Option<Arc<dyn Connector>>, pulls: usize, timeout: Duration) -> Repair {
        let pulls = pulls.max(1);
        Repair {
            connector,
            links: Mutex::default(),
            slots: Gate::new(pulls as u64, usize::MAX, usize::MAX),
            pulls,
            timeout,
            pulling: Pace::default(),
            scrubbing: Pace::default(),
            reported: Mutex::default(),
        }
    }

    /// Pulls what it can; returns what failed, by place in the request, and how many bytes were stored.
    pub async fn pull(
        &self,
        server: &BlockServer,
        items: Vec<PullItem>,
        rate: u64,
        until: Instant,
    ) -> (Vec<(u32, Fault)>, u64) {
        let until = before(until);
        let pulled: Vec<(u32, Result<u64>)> = stream::iter((0..).zip(items))
            .map(|(n, item)| async move { (n, self.pull_one(server, item, rate, until).await) })
            .buffer_unordered(self.pulls)
            .collect()
            .await;
        let mut failed = Vec::new();
        let mut bytes = 0;
        for (n, result) in pulled {
            match result {
                Ok(stored) => bytes += stored,
                Err(fault) => failed.push((n, fault)),
            }
        }
        failed.sort_by_key(|(n, _)| *n);
        metrics::counter!(names::PULLED_BYTES).increment(bytes);
        metrics::counter!(names::PULL_FAILURES).increment(failed.len() as u64);
        (failed, bytes)
    }

    /// Checks pieces after the given one.
    pub async fn scrub(
        &self,
        server: &BlockServer,
        after: Option<(BlockId, u8)>,
        limit: u32,
        rate: u64,
        until: Instant,
    ) -> Result<Reply> {
        let until = before(until);
        if after.is_none() {
            server.verify_headers().await?;
        }
        let list = server.disks.list(after, limit as usize);
        let mut next =
            (list.len() == limit as usize).then(|| list.last().map(|p| (p.block, p.piece))).flatten();
        let (mut last, mut bad, mut pieces, mut bytes) = (after, Vec::new(), 0, 0);
        for piece in list {
            let name = (piece.block, piece.piece);
            // At least one, so that whoever comes back with the answer gets on.
            let late = pieces > 0 && self.scrubbing.wait(u64::from(piece.stored), rate, until).await.is_err();
            if late || (pieces > 0 && Instant::now() >= until) {
                next = last;
                break;
            }
            match server.verify(piece.block, piece.piece).await {
                Ok(_) => {}
                // Deleted meanwhile.
                Err(fault) if fault.code == Code::Gone => {}
                Err(fault) if matches!(fault.code, Code::Corrupt | Code::Io) => bad.push(name),
                Err(fault) => return Err(fault),
            }
            last = Some(name);
            pieces += 1;
            bytes += u64::from(piece.stored);
        }
        metrics::counter!(names::SCRUBBED_BYTES).increment(bytes);
        self.reported(&bad);
        Ok(Reply::Scrubbed { bad, after: next, pieces, bytes })
    }

    /// Which of the damaged pieces the metadata service has to be told about now.
    pub fn to_report(&self, bad: Vec<(BlockId, u8)>) -> Vec<(BlockId, u8)> {
        let mut reported = self.reported.lock();
        if !reported.is_empty() {
            let still: HashSet<_> = bad.iter().copied().collect();
            reported.retain(|piece, since| still.contains(piece) && since.elapsed() < REPORT_AGAIN);
        }
        bad.into_iter().filter(|piece| !reported.contains_key(piece)).take(REPORT_MAX).collect()
    }

    /// The metadata service has heard of these.
    pub fn reported(&self, bad: &[(BlockId, u8)]) {
        let now = Instant::now();
        self.reported.lock().extend(bad.iter().map(|piece| (*piece, now)));
    }

    async fn pull_one(&self, server: &BlockServer, item: PullItem, rate: u64, until: Instant) -> Result<u64> {
        let shape = shape(&item)?;
        let _slot = server.pass(&self.slots, Flow::Background, 1, u64::from(item.block_len)).await?;
        if Instant::now() >= until {
            return Err(late());
        }
        if item.verify {
            match server.verify(item.block, item.piece).await {
                Ok(_) => return Ok(0),
                Err(fault) if matches!(fault.code, Code::Gone | Code::Corrupt | Code::Io) => {}
                Err(fault) => return Err(fault),
            }
        } else if server.disks.has(item.block, item.piece) {
            return Ok(0);
        }
        let mut faults = Vec::new();
        for (piece, addr) in item.sources.iter().take(SOURCES_MAX) {
            if shape != Shape::Copies && *piece != item.piece {
                continue;
            }
            self.pulling.wait(shape.piece_len(item.block_len), rate, until).await?;
            match self.copy(server, &item, shape, *piece, addr, until).await {
                Ok(bytes) => return Ok(bytes),
                Err(fault) if fault.code == Code::NoSpace => return Err(fault),
                Err(fault) => faults.push(fault),
            }
        }
        match shape {
            Shape::Copies => Err(verdict(&item, faults)),
            Shape::Coded(code) => {
                self.pulling.wait(u64::from(item.block_len), rate, until).await?;
                self.rebuild(server, &item, code, faults, until).await
            }
        }
    }

    /// Fetches the piece from a server that has it, and stores it.
    async fn copy(
        &self,
        server: &BlockServer,
        item: &PullItem,
        shape: Shape,
        piece: u8,
        addr: &str,
        until: Instant,
    ) -> Result<u64> {
        let Fetched { chunks, payload } = self.fetch(item, shape, piece, addr, until).await?;
        let bytes = payload.len() as u64;
        let put = NewPiece {
            block: item.block,
            piece: item.piece,
            layout: item.layout,
            first: shape.first(item.piece, item.block_len),
            chunks,
            payload: vec![payload],
        };
        // The put checks every chunk.
        let stored = server.put(Flow::Background, put).await;
        if stored.as_ref().is_err_and(|fault| fault.code == Code::Corrupt) {
            self.tell_of_damage(item.block, piece, addr, until).await;
        }
        stored.map(|()| bytes)
    }

    /// Fetches as many other pieces as the code needs, and stores what they give.
    async fn rebuild(
        &self,
        server: &BlockServer,
        item: &PullItem,
        code: erasure::Code,
        mut faults: Vec<Fault>,
        until: Instant,
    ) -> Result<u64> {
        let shape = Shape::Coded(code);
        let mut sources = item.sources.iter().take(SOURCES_MAX).filter(|(piece, _)| *piece != item.piece);
        let mut asked = FuturesUnordered::new();
        let mut have: Vec<(u8, Piece)> = Vec::new();
        loop {
            while have.len() + asked.len() < usize::from(code.data)
                && let Some((piece, addr)) = sources.next()
            {
                if have.iter().all(|(other, _)| other != piece) {
                    asked.push(self.fetch_checked(item, shape, *piece, addr, until));
                }
            }
            match asked.next().await {
                Some(Ok((piece, _))) if have.iter().any(|(other, _)| *other == piece) => {}
                Some(Ok(one)) => have.push(one),
                Some(Err(fault)) => faults.push(fault),
                None => break,
            }
        }
        if have.len() < usize::from(code.data) {
            return Err(verdict(item, faults));
        }
        let (block, wanted, count) = (item.block, item.piece, item.block_len.div_ceil(CHUNK));
        let rebuild = move || code.rebuild(block, count, &have, &[wanted]);
        let rebuilt = tokio::task::spawn_blocking(rebuild)
            .await
            .map_err(|error| Fault::new(Code::Internal, format!("rebuilding block {block} failed: {error}")))?
            .map_err(|error| Fault::new(Code::Corrupt, error.to_string()))?;
        let Some(Piece { chunks, payload }) = rebuilt.into_iter().next() else {
            return Err(Fault::new(Code::Internal, format!("rebuilding block {block} gave nothing")));
        };
        let bytes = payload.len() as u64;
        let first = shape.first(item.piece, item.block_len);
        let put =
            NewPiece { block, piece: wanted, layout: item.layout, first, chunks, payload: vec![payload] };
        server.put(Flow::Background, put).await?;
        metrics::counter!(names::REBUILT).increment(1);
        Ok(bytes)
    }

    /// A piece from one source, checked: what a rebuilt piece rests on.
    async fn fetch_checked(
        &self,
        item: &PullItem,
        shape: Shape,
        piece: u8,
        addr: &str,
        until: Instant,
    ) -> Result<(u8, Piece)> {
        let Fetched { chunks, payload } = self.fetch(item, shape, piece, addr, until).await?;
        let (block, first) = (item.block, shape.first(piece, item.block_len));
        let check = move || check_chunks(block, first, &chunks, &payload).map(|()| Piece { chunks, payload });
        let checked = tokio::task::spawn_blocking(check)
            .await
            .map_err(|error| Fault::new(Code::Internal, format!("checking block {block} failed: {error}")))?;
        match checked {
            Ok(good) => Ok((piece, good)),
            Err(error) => {
                self.tell_of_damage(block, piece, addr, until).await;
                Err(Fault::new(Code::Corrupt, format!("{addr} sent: {error}")))
            }
        }
    }

    /// All chunks of a piece, as many and as long as they have to be, else unchecked.
    async fn fetch(
        &self,
        item: &PullItem,
        shape: Shape,
        piece: u8,
        addr: &str,
        until: Instant,
    ) -> Result<Fetched> {
        let op = Op::Get { block: item.block, piece, first: 0, count: MAX_CHUNKS as u16 };
        let (reply, payload) = self.ask(addr, op, until).await?;
        let Reply::Chunks { chunks } = reply else {
            return Err(Fault::new(Code::Protocol, format!("{addr} answered a read with {reply:?}")));
        };
        let corrupt = |what: &str| {
            Fault::new(Code::Corrupt, format!("piece {piece} of block {} from {addr}: {what}", item.block))
        };
        if torchfs_proto::chunk::stored_len(&chunks) != payload.len() as u64 {
            return Err(corrupt("the bytes are not as many as their chunks say"));
        }
        if !shape.fits(piece, item.block_len, &chunks) {
            return Err(corrupt("its chunks are not those of this block"));
        }
        Ok(Fetched { chunks, payload })
    }

    /// Lets a server look at a piece that arrived damaged. It marks what it finds and reports it; if it does not answer, its
    /// scrub will find it.
    async fn tell_of_damage(&self, block: BlockId, piece: u8, addr: &str, until: Instant) {
        let _ = self.ask(addr, Op::Verify { block, piece }, until).await;
    }

    async fn ask(&self, addr: &str, op: Op, until: Instant) -> Result<(Reply, Bytes)> {
        let Some(connector) = &self.connector else {
            return Err(Fault::new(Code::Unsupported, "this data server does not know how to reach others"));
        };
        let link = {
            let mut links = self.links.lock();
            if links.len() >= LINKS_MAX {
                links.clear();
            }
            links.entry(addr.to_owned()).or_insert_with(|| connector.link(addr)).clone()
        };
        let within = self.timeout.min(until.saturating_duration_since(Instant::now()));
        let body = msg::encode(&Request { session: 0, capability: None, op });
        let reply = link.call(Call::new(method::BLOCK, body, within)).await?;
        Ok((msg::decode::<Reply>(&reply.body)?, reply.payload.into_bytes()))
    }
}

impl Shape {
    /// The number under which the first chunk of a piece is checksummed.
    fn first(self, piece: u8, block_len: u32) -> u32 {
        match self {
            Shape::Copies => 0,
            Shape::Coded(code) => code.first_index(piece, block_len.div_ceil(CHUNK)),
        }
    }

    /// About how long a piece is.
    fn piece_len(self, block_len: u32) -> u64 {
        match self {
            Shape::Copies => u64::from(block_len),
            Shape::Coded(code) => u64::from(block_len.div_ceil(u32::from(code.data.max(1)))),
        }
    }

    /// Whether a piece of this block can have these chunks.
    fn fits(self, piece: u8, block_len: u32, chunks: &[ChunkInfo]) -> bool {
        let count = block_len.div_ceil(CHUNK);
        let range = match self {
            Shape::Copies => 0..count,
            Shape::Coded(code) if piece < code.data => code.chunks_of(piece, count),
            // Parity has the length of the longest data piece with its table; its checksums tell the rest.
            Shape::Coded(_) => return !chunks.is_empty() && chunks.len() <= MAX_CHUNKS,
        };
        let raw = |index: u32| (block_len - index * CHUNK).min(CHUNK);
        chunks.len() == range.len() && range.zip(chunks).all(|(index, chunk)| chunk.raw == raw(index))
    }
}

/// How the block is made, if the request makes sense.
fn shape(item: &PullItem) -> Result<Shape> {
    let invalid = |what: &str| Fault::new(Code::Invalid, format!("pulling block {}: {what}", item.block));
    if item.block_len == 0 || u64::from(item.block_len) > u64::from(MAX_BLOCK) {
        return Err(invalid("a block has between one byte and 16 MiB"));
    }
    if !item.scheme.is_sound() || usize::from(item.piece) >= item.scheme.width() {
        return Err(invalid("there is no such piece"));
    }
    match item.scheme {
        Scheme::Replicas(_) => Ok(Shape::Copies),
        Scheme::Ec { data, parity } => {
            let code = erasure::Code { data, parity };
            Ok(if code.applies(item.block_len) { Shape::Coded(code) } else { Shape::Copies })
        }
    }
}

/// One fault for all sources of a piece.
fn verdict(item: &PullItem, faults: Vec<Fault>) -> Fault {
    let words: Vec<&str> = faults.iter().map(|fault| fault.what.as_str()).collect();
    let words = if words.is_empty() { "no source was named".to_owned() } else { words.join("; ") };
    let what = format!("piece {} of block {} cannot be made: {words}", item.piece, item.block);
    let code = faults.iter().map(|fault| fault.code).find(|code| code.retry()).unwrap_or(Code::Gone);
    Fault::new(code, what)
}

fn late() -> Fault {
    Fault::new(Code::Overloaded, "there was no time left for this piece")
}

fn before(until: Instant) -> Instant {
    let left = until.saturating_duration_since(Instant::now());
    until.checked_sub(MARGIN.min(left / 4)).unwrap_or(until)
}

/// Spreads work over time: so many bytes per second. Holds the rate, and when the next bytes may move at it.
#[derive(Default)]
pub(crate) struct Pace(Mutex<Option<(u64, Instant)>>);

impl Pace {
    /// Waits until these bytes may move; refuses if that is too late.
    async fn wait(&self, bytes: u64, rate: u64, until: Instant) -> Result<()> {
        if rate == 0 {
            return Ok(());
        }
        let at = {
            let mut free = self.0.lock();
            // What was reserved at another rate says nothing about this one.
            let reserved = free.filter(|(reserved, _)| *reserved == rate).map(|(_, free)| free);
            let at = reserved.map_or_else(Instant::now, |free| free.max(Instant::now()));
            if at >= until {
                return Err(late());
            }
            *free = Some((rate, at + Duration::from_secs_f64(bytes as f64 / rate as f64)));
            at
        };
        tokio::time::sleep_until(at.into()).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_scrub_without_time_reads_one_piece_and_does_not_say_that_it_is_done() {
        let disk = Arc::new(torchfs_disk::SimDisk::new(0));
        let server = BlockServer::over(disk, crate::server::Config::default()).unwrap();
        for counter in 0..3 {
            let block = BlockId { incarnation: 1, counter };
            let encoded = torchfs_codec::encode(block, &[Bytes::from_static(b"some")], Default::default());
            let torchfs_codec::Encoded { chunks, payload } = encoded.unwrap();
            let layout = torchfs_proto::LayoutId(1);
            let piece = NewPiece { block, piece: 0, layout, first: 0, chunks, payload };
            server.put(Flow::Background, piece).await.unwrap();
        }
        let (mut after, mut read) = (None, 0);
        for _ in 0..3 {
            let reply = server.repair.scrub(&server, after, 10, 0, Instant::now()).await.unwrap();
            let Reply::Scrubbed { after: next, pieces, .. } = reply else { panic!("{reply:?}") };
            (after, read) = (next, read + pieces);
        }
        assert_eq!(read, 3);
    }

    #[tokio::test]
    async fn a_raised_rate_holds_at_once() {
        let pace = Pace::default();
        let until = Instant::now() + Duration::from_secs(3_600);
        pace.wait(1 << 20, 1, until).await.unwrap();
        assert_eq!(pace.wait(1, 1, until).await.unwrap_err().code, Code::Overloaded);
        pace.wait(1 << 20, 1 << 30, until).await.unwrap();
        pace.wait(1, 1 << 30, until).await.unwrap();
    }
}
