//! Reading chunks: pick the source that should answer first, ask another when it is slow, take nothing unverified.
//!
//! Here are the reads of copies, any of which answers alone, and what reads of coded blocks share with them.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use torchfs_codec::{CHUNK, ChunkInfo, unpack_chunk, verify_chunk};
use torchfs_proto::extent::BlockRef;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::block::{Op, Reply, Request};
use torchfs_proto::msg::meta::BadPiece;
use torchfs_proto::{Code, Fault, Result, ServerId};
use torchfs_rpc::{Data, Payload};

use super::Blocks;
use super::scheme::Shape;
use super::servers::Server;
use crate::metrics;

/// One round of reading a block.
#[derive(Clone, Copy)]
pub(super) struct Reading<'a> {
    pub block: &'a BlockRef,
    pub placement: &'a Placement,
    pub shape: Shape<'a>,
    pub until: Instant,
}

/// A piece and who may have it.
#[derive(Clone)]
pub(super) struct Source {
    pub piece: u8,
    pub server: Arc<Server>,
    /// The likeliest of the piece's places.
    first: bool,
    /// Silent lately, or known to be down.
    pub doubtful: bool,
}

/// A piece that could not be had from a server.
pub(super) struct Miss {
    pub piece: u8,
    /// `None` if nobody could be asked.
    pub server: Option<ServerId>,
    /// The piece should have been there.
    first: bool,
    pub fault: Fault,
}

/// Chunks of a piece as they are stored, checked.
pub(super) type Run = Vec<(ChunkInfo, Bytes)>;

impl Blocks {
    pub(super) async fn get_chunks(&self, block: &BlockRef, chunks: Range<u16>) -> Result<Vec<Bytes>> {
        if chunks.is_empty() || chunks.end > block.chunks() {
            let what = format!("chunks {chunks:?} of block {}, which has {}", block.id, block.chunks());
            return Err(Fault::new(Code::Invalid, what));
        }
        let chunks = u32::from(chunks.start)..u32::from(chunks.end);
        let until = Instant::now() + self.config.op_timeout;
        loop {
            let placement = self.placement(block.layout).await?;
            let shape = Shape::of(super::layout(&placement, block.layout)?, block.id, block.block_len)?;
            let reading = Reading { block, placement: &placement, shape, until };
            let mut misses = Vec::new();
            let got = match shape.code {
                None => self.get_copy(&reading, chunks.clone(), &mut misses).await,
                Some(code) => self.get_coded(&reading, code, chunks.clone(), &mut misses).await,
            };
            if let Some(run) = got {
                let bytes = self.unpack(block, chunks.start, run).await?;
                self.report(&reading, &misses);
                ::metrics::counter!(metrics::GETS).increment(1);
                ::metrics::counter!(metrics::GET_BYTES)
                    .increment(bytes.iter().map(|chunk| chunk.len() as u64).sum());
                return Ok(bytes);
            }
            let again = misses.iter().any(|miss| miss.fault.code.retry());
            if !again || Instant::now() + self.config.pause >= until {
                return Err(verdict(&reading, misses));
            }
            self.rest(until).await;
            // A server may have moved to another address; if the service is silent too, the old ones are tried.
            let _ = self.meta.fetch_placement().await;
        }
    }

    /// One round over all copies, the most promising first. A source that is slower than usual gets company.
    async fn get_copy(
        &self,
        reading: &Reading<'_>,
        chunks: Range<u32>,
        misses: &mut Vec<Miss>,
    ) -> Option<Run> {
        let mut sources: Vec<Source> = Vec::new();
        for piece in 0..reading.shape.pieces {
            sources.extend(self.sources(reading, piece, misses));
        }
        sources.sort_by_cached_key(Source::rank);
        let mut sources = sources.into_iter();
        let mut asked = FuturesUnordered::new();
        // Asks the next source; says how long to wait for it before the one after it is asked too.
        let mut ask = |asked: &mut FuturesUnordered<_>| {
            let source = sources.next()?;
            let patience = self.patience(&source.server);
            asked.push(self.get_run(reading, source, chunks.clone()));
            Some(patience)
        };
        let mut patience = ask(&mut asked);
        loop {
            let heard = match patience {
                None => asked.next().await,
                Some(patient) => match select(asked.next(), std::pin::pin!(self.sleep(patient))).await {
                    Either::Left((heard, _)) => heard,
                    Either::Right(_) => {
                        patience = ask(&mut asked);
                        if patience.is_some() {
                            ::metrics::counter!(metrics::HEDGES).increment(1);
                        }
                        continue;
                    }
                },
            };
            match heard? {
                Ok(run) => return Some(run),
                Err(miss) => {
                    misses.push(miss);
                    patience = ask(&mut asked);
                }
            }
        }
    }

    /// Those who may have a piece, the most promising first.
    pub(super) fn sources(&self, reading: &Reading<'_>, piece: u8, misses: &mut Vec<Miss>) -> Vec<Source> {
        let places = reading.shape.places(piece, &reading.block.substitutes);
        let mut sources = Vec::with_capacity(places.len());
        for (index, id) in places.into_iter().enumerate() {
            let first = index == 0;
            match self.servers.find(reading.placement, id) {
                Ok(server) => {
                    let doubtful = server.failed_within(self.config.shun) || !is_up(reading.placement, id);
                    sources.push(Source { piece, server, first, doubtful });
                }
                Err(fault) => misses.push(Miss { piece, server: None, first, fault }),
            }
        }
        sources.sort_by_cached_key(Source::rank);
        sources
    }

    /// How long to wait for a server before another one is asked too.
    pub(super) fn patience(&self, server: &Server) -> Duration {
        (server.usual().unwrap_or_default() * self.config.hedge_factor).max(self.config.hedge_min)
    }

    pub(super) fn sleep(&self, time: Duration) -> tokio::time::Sleep {
        let _context = self.servers.runtime().enter();
        tokio::time::sleep(time)
    }

    /// Fetches and checks chunks of a piece, counted within it.
    pub(super) async fn get_run(
        &self,
        reading: &Reading<'_>,
        source: Source,
        chunks: Range<u32>,
    ) -> Result<Run, Miss> {
        let Source { piece, server, first, .. } = source;
        let block = reading.block;
        let index = |chunk: u32| u16::try_from(chunk).unwrap_or(u16::MAX);
        let (from, count) = (index(chunks.start), index(chunks.end - chunks.start));
        let request = Request {
            session: self.meta.info().session.0,
            capability: None,
            op: Op::Get { block: block.id, piece, first: from, count },
        };
        let until = reading.until.min(Instant::now() + self.config.get_timeout);
        let result = match server.call(&request, Payload::None, until).await {
            Ok((Reply::Chunks { chunks: infos }, data)) => check(reading, piece, chunks, infos, data),
            Ok((other, _)) => Err(Fault::new(Code::Protocol, format!("answered a read with {other:?}"))),
            Err(fault) => Err(fault),
        };
        result.map_err(|fault| {
            ::metrics::counter!(metrics::BAD_COPIES).increment(1);
            let mut fault = fault;
            if !fault.what.starts_with("data server") {
                fault = server.named(fault);
            }
            // At other places than the likeliest nobody wonders, nor while the group moves.
            let expected = first && reading.shape.group.moving_to.is_empty();
            if !fault.code.retry() && (expected || fault.code != Code::Gone) {
                tracing::warn!(block = %block.id, piece, server = %server.id, "a piece cannot be read: {fault}");
            }
            Miss { piece, server: Some(server.id), first, fault }
        })
    }

    /// Unpacks chunks of the block that were checked.
    async fn unpack(&self, block: &BlockRef, first: u32, run: Run) -> Result<Vec<Bytes>> {
        let packed: usize =
            run.iter().filter(|(info, _)| info.stored != info.raw).map(|(info, _)| info.raw as usize).sum();
        let id = block.id;
        let unpack = move || {
            let chunks = (first..).zip(run);
            let chunks = chunks.map(|(index, (info, stored))| unpack_chunk(id, index, &info, stored));
            chunks.collect::<Result<Vec<Bytes>, _>>()
        };
        let unpacked = self.offload(packed, unpack).await?;
        unpacked.map_err(|error| Fault::new(Code::Corrupt, error.to_string()))
    }

    /// Runs work on so many bytes here, or on a thread for such work if there are many.
    pub(super) async fn offload<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        if bytes < self.config.offload_from {
            return Ok(work());
        }
        let done = self.servers.runtime().spawn_blocking(work).await;
        done.map_err(|error| Fault::new(Code::Internal, format!("work on a block failed: {error}")))
    }

    /// The block could be read, so what was missed on the way is worth a repair.
    fn report(&self, reading: &Reading<'_>, misses: &[Miss]) {
        let moving = !reading.shape.group.moving_to.is_empty();
        for miss in misses {
            let Some(server) = miss.server else { continue };
            let bad = match miss.fault.code {
                Code::Corrupt => true,
                // While a group moves, pieces are in one of two places.
                Code::Gone => miss.first && !moving,
                _ => false,
            };
            if bad {
                let piece = BadPiece { block: reading.block.id, piece: miss.piece, server };
                self.reports.add(&self.meta, piece);
            }
        }
    }
}

impl Miss {
    /// A piece that is of no use wherever it is.
    pub(super) fn nowhere(piece: u8, fault: Fault) -> Miss {
        Miss { piece, server: None, first: false, fault }
    }
}

impl Source {
    fn rank(&self) -> (bool, bool, u64) {
        (self.doubtful, !self.first, self.server.expected_us())
    }
}

/// Whether the metadata service hears of a server.
pub(super) fn is_up(placement: &Placement, id: ServerId) -> bool {
    placement.servers.iter().any(|server| server.id == id && server.up)
}

/// Checks what a server sent against the block and the writer's checksums.
fn check(
    reading: &Reading<'_>,
    piece: u8,
    chunks: Range<u32>,
    infos: Vec<ChunkInfo>,
    data: Data,
) -> Result<Run> {
    let block = reading.block;
    let corrupt = |what: &str| Fault::new(Code::Corrupt, format!("block {}: {what}", block.id));
    if infos.len() != chunks.len() {
        return Err(corrupt("another number of chunks came than was asked for"));
    }
    let stored: u64 = infos.iter().map(|info| u64::from(info.stored)).sum();
    if stored != data.len() as u64 {
        return Err(corrupt("the bytes that came are not as many as their chunks say"));
    }
    let (first, of_block) = match reading.shape.code {
        None => (chunks.start, true),
        Some(code) => {
            let first = code.first_index(piece, u32::from(block.chunks()));
            (first + chunks.start, piece < code.data)
        }
    };
    let fits = |(index, info): (u32, &ChunkInfo)| {
        info.raw == block.block_len.saturating_sub(index.saturating_mul(CHUNK)).min(CHUNK)
    };
    if of_block && !(first..).zip(&infos).all(fits) {
        return Err(corrupt("a chunk has another length than the block says"));
    }
    let mut rest = data.into_bytes();
    let mut run = Vec::with_capacity(infos.len());
    for (index, info) in (first..).zip(infos) {
        let stored = rest.split_to(info.stored as usize);
        verify_chunk(block.id, index, &info, &stored)
            .map_err(|error| Fault::new(Code::Corrupt, error.to_string()))?;
        run.push((info, stored));
    }
    Ok(run)
}

/// One fault for all sources.
fn verdict(reading: &Reading<'_>, misses: Vec<Miss>) -> Fault {
    let (block, shape) = (reading.block, reading.shape);
    let gone = |piece: u8| {
        let mut of_piece = misses.iter().filter(|miss| miss.piece == piece).peekable();
        of_piece.peek().is_some() && of_piece.all(|miss| miss.fault.code == Code::Gone)
    };
    let gone = (0..shape.pieces).filter(|piece| gone(*piece)).count();
    // More are gone than may be: the extents that named the block are old, or it is lost.
    let most = shape.code.map_or(usize::from(shape.pieces) - 1, |code| code.parity.into());
    if gone > most {
        return Fault::new(Code::Gone, format!("no server has block {}", block.id));
    }
    // The words of all, the code of the one that says most.
    let mut faults: Vec<Fault> = misses.into_iter().map(|miss| miss.fault).collect();
    faults.sort_by_key(|fault| match fault.code {
        Code::Corrupt => 0,
        Code::Io => 1,
        Code::Gone => 2,
        _ => 3,
    });
    let all: Vec<String> = faults.iter().map(|fault| fault.what.clone()).collect();
    let code = faults.first().map_or(Code::Io, |fault| fault.code);
    Fault::new(code, format!("block {} cannot be read: {}", block.id, all.join("; ")))
        .next("check these data servers, then run torchfs fsck")
}
