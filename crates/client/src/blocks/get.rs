//! Reading chunks: pick the source that should answer first, ask another when it is slow, take nothing unverified.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use torchfs_codec::{CHUNK, ChunkInfo, decode_chunk};
use torchfs_proto::extent::BlockRef;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::block::{Op, Reply, Request};
use torchfs_proto::{Code, Fault, Result};
use torchfs_rpc::{Data, Payload};

use super::Blocks;
use super::scheme::{Copy, copies};
use super::servers::Server;
use crate::metrics;

/// A copy of the block and who has it.
struct Source {
    copy: Copy,
    server: Arc<Server>,
}

impl Blocks {
    pub(super) async fn get_chunks(&self, block: &BlockRef, chunks: Range<u16>) -> Result<Vec<Bytes>> {
        if chunks.is_empty() || chunks.end > block.chunks() {
            let what = format!("chunks {chunks:?} of block {}, which has {}", block.id, block.chunks());
            return Err(Fault::new(Code::Invalid, what));
        }
        let until = Instant::now() + self.config.op_timeout;
        loop {
            let (placement, layout) = self.layout(block.layout).await?;
            let copies = copies(&layout, block.id, &block.substitutes)?;
            let faults = match self.get_from_any(block, &chunks, &placement, &copies, until).await {
                Ok(bytes) => {
                    ::metrics::counter!(metrics::GETS).increment(1);
                    ::metrics::counter!(metrics::GET_BYTES)
                        .increment(bytes.iter().map(|chunk| chunk.len() as u64).sum());
                    return Ok(bytes);
                }
                Err(faults) => faults,
            };
            let again = faults.iter().any(|fault| fault.code.retry());
            if !again || Instant::now() + self.config.pause >= until {
                return Err(verdict(block, faults));
            }
            self.rest(until).await;
            // A server may have moved to another address; if the service is silent too, the old ones are tried.
            let _ = self.meta.fetch_placement().await;
        }
    }

    /// One round over all sources, the most promising first. A source that is slower than usual gets company.
    async fn get_from_any(
        &self,
        block: &BlockRef,
        chunks: &Range<u16>,
        placement: &Placement,
        copies: &[Copy],
        until: Instant,
    ) -> Result<Vec<Bytes>, Vec<Fault>> {
        let mut faults = Vec::new();
        let mut sources = self.sources(placement, copies, &mut faults).into_iter();
        let mut asked = FuturesUnordered::new();
        // Asks the next source; says how long to wait for it before the one after it is asked too.
        let mut ask = |asked: &mut FuturesUnordered<_>| {
            let source = sources.next()?;
            let usual = source.server.usual().unwrap_or_default();
            asked.push(self.get_from(block, chunks.clone(), source, until));
            Some((usual * self.config.hedge_factor).max(self.config.hedge_min))
        };
        let mut patience = ask(&mut asked);
        loop {
            let heard = match patience {
                None => asked.next().await,
                Some(patient) => {
                    let sleep = {
                        let _context = self.servers.runtime().enter();
                        tokio::time::sleep(patient)
                    };
                    match select(asked.next(), std::pin::pin!(sleep)).await {
                        Either::Left((heard, _)) => heard,
                        Either::Right(_) => {
                            patience = ask(&mut asked);
                            if patience.is_some() {
                                ::metrics::counter!(metrics::HEDGES).increment(1);
                            }
                            continue;
                        }
                    }
                }
            };
            match heard {
                Some(Ok(bytes)) => return Ok(bytes),
                Some(Err(fault)) => {
                    faults.push(fault);
                    patience = ask(&mut asked);
                }
                None if faults.is_empty() => return Err(vec![Code::Internal.into()]),
                None => return Err(faults),
            }
        }
    }

    /// The sources in the order in which they should be asked.
    fn sources(&self, placement: &Placement, copies: &[Copy], faults: &mut Vec<Fault>) -> Vec<Source> {
        let mut sources = Vec::with_capacity(copies.len());
        for (index, copy) in copies.iter().enumerate() {
            match self.servers.find(placement, copy.server) {
                Ok(server) => sources.push((index, Source { copy: *copy, server })),
                Err(fault) => faults.push(fault),
            }
        }
        let is_up = |id| placement.servers.iter().any(|server| server.id == id && server.up);
        sources.sort_by_cached_key(|(index, source)| {
            let server = &source.server;
            let doubtful = server.failed_within(self.config.shun) || !is_up(server.id);
            (doubtful, server.expected_us(), *index)
        });
        sources.into_iter().map(|(_, source)| source).collect()
    }

    async fn get_from(
        &self,
        block: &BlockRef,
        chunks: Range<u16>,
        source: Source,
        until: Instant,
    ) -> Result<Vec<Bytes>> {
        let Source { copy, server } = source;
        let (first, count) = (chunks.start, chunks.end - chunks.start);
        let request = Request {
            session: self.meta.info().session.0,
            capability: None,
            op: Op::Get { block: block.id, piece: copy.piece, first, count },
        };
        let until = until.min(Instant::now() + self.config.get_timeout);
        let result = match server.call(&request, Payload::None, until).await {
            Ok((Reply::Chunks { chunks }, data)) => self.unpack(block, first, count, chunks, data).await,
            Ok((other, _)) => Err(Fault::new(Code::Protocol, format!("answered a read with {other:?}"))),
            Err(fault) => Err(fault),
        };
        result.map_err(|fault| {
            ::metrics::counter!(metrics::BAD_COPIES).increment(1);
            let mut fault = fault;
            if !fault.what.starts_with("data server") {
                fault = server.named(fault);
            }
            if !fault.code.retry() {
                tracing::warn!(block = %block.id, server = %server.id, "a copy cannot be read: {fault}");
            }
            fault
        })
    }

    /// Checks and unpacks what a server sent.
    async fn unpack(
        &self,
        block: &BlockRef,
        first: u16,
        count: u16,
        infos: Vec<ChunkInfo>,
        data: Data,
    ) -> Result<Vec<Bytes>> {
        let corrupt = |what: &str| Fault::new(Code::Corrupt, format!("block {}: {what}", block.id));
        if infos.len() != usize::from(count) {
            return Err(corrupt("another number of chunks came than was asked for"));
        }
        let stored: u64 = infos.iter().map(|info| u64::from(info.stored)).sum();
        if stored != data.len() as u64 {
            return Err(corrupt("the bytes that came are not as many as their chunks say"));
        }
        let fits = (first..).zip(&infos).all(|(index, info)| {
            let from = u32::from(index) * CHUNK;
            info.raw == block.block_len.saturating_sub(from).min(CHUNK)
        });
        if !fits {
            return Err(corrupt("a chunk has another length than the block says"));
        }
        let packed: usize =
            infos.iter().filter(|info| info.stored != info.raw).map(|info| info.raw as usize).sum();
        let (id, mut rest) = (block.id, data.into_bytes());
        let mut decode = move || {
            let mut out = Vec::with_capacity(infos.len());
            for (index, info) in (u32::from(first)..).zip(&infos) {
                let stored = rest.split_to(info.stored as usize);
                out.push(decode_chunk(id, index, info, stored)?);
            }
            Ok::<_, torchfs_codec::Error>(out)
        };
        let decoded = if packed >= self.config.offload_from {
            self.servers.runtime().spawn_blocking(decode).await.map_err(|error| {
                Fault::new(Code::Internal, format!("unpacking block {id} failed: {error}"))
            })?
        } else {
            decode()
        };
        decoded.map_err(|error| Fault::new(Code::Corrupt, error.to_string()))
    }
}

/// One fault for all sources.
fn verdict(block: &BlockRef, mut faults: Vec<Fault>) -> Fault {
    if faults.iter().all(|fault| fault.code == Code::Gone) {
        return Fault::new(Code::Gone, format!("no server has block {}", block.id));
    }
    // The words of all, the code of the one that says most.
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
