//! Putting a block: pack it, put every piece, choose substitutes for servers that cannot take theirs.

use std::collections::HashSet;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use torchfs_codec::{ChunkInfo, Encoded};
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::block::{Op, Request};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result, ServerId};
use torchfs_rpc::Payload;

use super::{Blocks, UNIT, scheme};
use crate::metrics;

/// What all pieces of one put share.
struct Put<'a> {
    id: BlockId,
    layout: LayoutId,
    chunks: &'a [ChunkInfo],
    payload: &'a [Bytes],
    until: Instant,
    /// Servers that hold or try a piece: no two pieces share one.
    taken: Mutex<HashSet<ServerId>>,
}

impl Blocks {
    pub(super) async fn put_block(
        &self,
        id: BlockId,
        layout: LayoutId,
        data: Vec<Bytes>,
        compression: Compression,
    ) -> Result<NewBlock> {
        let len: u64 = data.iter().map(|part| part.len() as u64).sum();
        if len == 0 || len > u64::from(torchfs_codec::MAX_BLOCK) {
            return Err(Fault::new(Code::Invalid, format!("block {id} would have {len} bytes")));
        }
        let units = u32::try_from(len.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.units);
        let Ok(_room) = self.room.acquire_many(units).await else {
            unreachable!("the semaphore is never closed")
        };
        let until = Instant::now() + self.config.op_timeout;
        let encoded = self.encode(id, data, compression).await?;
        let (_, known) = self.layout(layout).await?;
        let group = scheme::group(&known, id)?;
        let put = Put {
            id,
            layout,
            chunks: &encoded.chunks,
            payload: &encoded.payload,
            until,
            taken: Mutex::new(group.servers.iter().copied().collect()),
        };
        let pieces = (0..group.servers.len()).map(|piece| self.put_piece(&put, piece));
        let moving =
            group.moving_to.iter().enumerate().map(|(piece, server)| self.put_moving(&put, piece, *server));
        let (servers, _) = futures_util::future::try_join(try_join_all(pieces), try_join_all(moving)).await?;

        // The group may have changed meanwhile: what counts is where the pieces are and what readers will be told.
        let (_, known) = self.layout(layout).await?;
        let group = scheme::group(&known, id)?;
        let substitutes: Vec<(u8, ServerId)> = (0u8..)
            .zip(&servers)
            .filter(|(piece, server)| group.servers.get(usize::from(*piece)) != Some(server))
            .map(|(piece, server)| (piece, *server))
            .collect();
        ::metrics::counter!(metrics::PUTS).increment(1);
        ::metrics::counter!(metrics::PUT_BYTES).increment(len);
        ::metrics::counter!(metrics::SUBSTITUTES).increment(substitutes.len() as u64);
        let stored = encoded.stored() * servers.len() as u64;
        Ok(NewBlock { id, len: len as u32, layout, substitutes, stored, servers: Vec::new() })
    }

    async fn encode(&self, id: BlockId, data: Vec<Bytes>, compression: Compression) -> Result<Encoded> {
        let compression = match compression {
            Compression::None => torchfs_codec::Compression::None,
            Compression::Lz4 => torchfs_codec::Compression::Lz4,
            Compression::Zstd => torchfs_codec::Compression::Zstd(self.config.zstd_level),
        };
        let large = data.iter().map(Bytes::len).sum::<usize>() >= self.config.offload_from;
        let encode = move || torchfs_codec::encode(id, &data, compression);
        let encoded =
            if large {
                self.servers.runtime().spawn_blocking(encode).await.map_err(|error| {
                    Fault::new(Code::Internal, format!("packing block {id} failed: {error}"))
                })?
            } else {
                encode()
            };
        encoded.map_err(|error| Fault::new(Code::Io, error.to_string()))
    }

    /// Puts one piece where its group says, or on a substitute; returns where it is.
    async fn put_piece(&self, put: &Put<'_>, piece: usize) -> Result<ServerId> {
        let mut failed: HashSet<ServerId> = HashSet::new();
        let mut last: Option<Fault> = None;
        loop {
            let (placement, layout) = self.layout(put.layout).await?;
            let group = scheme::group(&layout, put.id)?;
            let Some(home) = group.servers.get(piece).copied() else {
                return Err(Fault::new(
                    Code::StalePlacement,
                    format!("the group of block {} became smaller", put.id),
                ));
            };
            let Some(server) = self.choose(put, &placement, home, &failed) else {
                // Every server that could take it has failed by now: begin anew if they may come back.
                if let Some(fault) =
                    last.take().filter(|fault| !fault.code.retry() || self.is_late(put.until))
                {
                    return Err(fault);
                }
                failed.clear();
                self.rest(put.until).await;
                continue;
            };
            let fault = match self.put_once(put, &placement, group.version, piece, server).await {
                Ok(()) => return Ok(server),
                Err(fault) => fault,
            };
            if server != home {
                put.taken.lock().remove(&server);
            }
            if self.is_late(put.until) {
                return Err(fault);
            }
            match fault.code {
                Code::StalePlacement => {
                    self.meta.fetch_placement().await?;
                    // A placement that is old at the service too changes soon, not at once.
                    if self.meta.placement().version == placement.version {
                        self.rest(put.until).await;
                    }
                }
                Code::Overloaded => self.rest(put.until).await,
                _ => {
                    tracing::debug!(block = %put.id, piece, "a piece goes elsewhere: {fault}");
                    failed.insert(server);
                    last = Some(fault);
                }
            }
        }
    }

    /// Writes a piece to the server that its group moves to as well.
    async fn put_moving(&self, put: &Put<'_>, piece: usize, server: ServerId) -> Result<()> {
        let (placement, layout) = self.layout(put.layout).await?;
        let group = scheme::group(&layout, put.id)?;
        if !group.moving_to.contains(&server) || group.servers.contains(&server) {
            return Ok(()); // it moved already, or holds a piece anyway
        }
        self.put_once(put, &placement, group.version, piece, server).await
    }

    /// The server to try next: the group's own, unless it failed or is known to be down and another can take the piece.
    fn choose(
        &self,
        put: &Put<'_>,
        placement: &Placement,
        home: ServerId,
        failed: &HashSet<ServerId>,
    ) -> Option<ServerId> {
        let is_up = |id: ServerId| placement.servers.iter().any(|server| server.id == id && server.up);
        let shunned = |id: ServerId| {
            self.servers.find(placement, id).map_or(true, |server| server.failed_within(self.config.shun))
        };
        let home_fails = failed.contains(&home);
        if !home_fails && is_up(home) && !shunned(home) {
            return Some(home);
        }
        let mut taken = put.taken.lock();
        let zones: Vec<&str> = placement
            .servers
            .iter()
            .filter(|server| taken.contains(&server.id) && server.id != home && !server.zone.is_empty())
            .map(|server| server.zone.as_str())
            .collect();
        let substitute = placement
            .servers
            .iter()
            .filter(|server| server.up && !taken.contains(&server.id) && !failed.contains(&server.id))
            .filter(|server| !shunned(server.id))
            .max_by_key(|server| (!zones.contains(&server.zone.as_str()), server.free))
            .map(|server| server.id);
        match substitute {
            Some(substitute) => {
                taken.insert(substitute);
                Some(substitute)
            }
            None => (!home_fails).then_some(home),
        }
    }

    async fn put_once(
        &self,
        put: &Put<'_>,
        placement: &Placement,
        group_version: u32,
        piece: usize,
        server: ServerId,
    ) -> Result<()> {
        let server = self.servers.find(placement, server)?;
        let request = Request {
            session: self.meta.info().session.0,
            capability: None,
            op: Op::Put {
                block: put.id,
                piece: piece as u8,
                layout: put.layout,
                group_version,
                chunks: put.chunks.to_vec(),
                first: 0,
            },
        };
        let until = put.until.min(Instant::now() + self.config.put_timeout);
        match server.call(&request, Payload::Parts(put.payload.to_vec()), until).await {
            Ok(_) => Ok(()),
            // A first try arrived and its answer was lost: ids are never used twice, so this is the same piece.
            Err(fault) if fault.code == Code::Exists => Ok(()),
            Err(fault) => Err(Fault { what: format!("putting block {}: {}", put.id, fault.what), ..fault }),
        }
    }

    /// Whether there is no time for another try.
    fn is_late(&self, until: Instant) -> bool {
        Instant::now() + self.config.pause >= until
    }

    /// Waits a little, not beyond `until`.
    pub(super) async fn rest(&self, until: Instant) {
        let at = until.min(Instant::now() + self.config.pause);
        let sleep = {
            let _context = self.servers.runtime().enter();
            tokio::time::sleep_until(at.into())
        };
        sleep.await;
    }
}
