//! Putting a block: pack it, cut it into pieces, put every piece, choose substitutes for servers that cannot take theirs.
//!
//! A piece goes to the home that its group names, or, if that server is down, silent or full, to another one that holds no
//! piece of the block; the commit says where each piece is. While fewer servers live than there are pieces the put waits,
//! and at last fails with the names of those it missed. It also waits for a layout while too few servers have joined for one.
//!
//! # Invariants
//! - No two pieces of a block are put to one server.
//! - A piece is packed once: every try sends the same bytes, so a try that arrived although its answer was lost does no harm. It may
//!   leave a second copy of the piece on a server where nobody will look for it; the metadata service finds and drops those.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{Either, select, try_join_all};
use parking_lot::Mutex;
use torchfs_codec::Encoded;
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::{Placement, ServerInfo, ServerState};
use torchfs_proto::msg::block::{Op, Request};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result, ServerId};
use torchfs_rpc::Payload;

use super::get::is_up;
use super::scheme::Shape;
use super::{Blocks, UNIT, layout};
use crate::metrics;

/// How often a put that waits for its server looks whether that is still thought to live.
const LOOK: Duration = Duration::from_millis(250);

/// What all pieces of one put share.
struct Put {
    id: BlockId,
    len: u32,
    layout: LayoutId,
    pieces: Vec<NewPiece>,
    until: Instant,
    state: Mutex<State>,
}

/// A piece as it is sent.
struct NewPiece {
    /// The number under which its first chunk is checksummed.
    first: u32,
    body: Encoded,
}

#[derive(Default)]
struct State {
    /// Who holds or tries which piece; a piece has one server at most.
    taken: HashMap<ServerId, u8>,
    /// What each piece waits for.
    waits: HashMap<u8, Fault>,
}

impl Blocks {
    pub(super) async fn put_block(
        &self,
        id: BlockId,
        chosen: LayoutId,
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
        let chosen = self.await_layout(chosen, until).await?;
        let placement = self.placement(chosen).await?;
        let known = placement.current(chosen).map_or_else(|| layout(&placement, chosen), Ok)?;
        let shape = Shape::of(known, id, len as u32)?;
        let pieces = self.pack(id, data, compression, shape).await?;
        let put =
            Put { id, len: len as u32, layout: known.id, pieces, until, state: Mutex::new(State::default()) };
        // Homes as they are now: the table may have changed while the block was packed.
        let placement = self.placement(put.layout).await?;
        let shape = Shape::of(layout(&placement, put.layout)?, id, put.len)?;
        for piece in 0..shape.pieces {
            put.state.lock().taken.extend(shape.home(piece).map(|home| (home, piece)));
        }
        let all = (0..shape.pieces).map(|piece| self.put_piece(&put, piece));
        let servers = match try_join_all(all).await {
            Ok(servers) => servers,
            Err(fault) => return Err(put.failed(fault)),
        };

        // The group may have changed meanwhile. The service compares with what it knows then; this is for our own reads.
        let placement = self.placement(put.layout).await?;
        let shape = Shape::of(layout(&placement, put.layout)?, id, put.len)?;
        let substitutes: Vec<(u8, ServerId)> = (0u8..)
            .zip(&servers)
            .filter(|(n, s)| shape.home(*n) != Some(**s))
            .map(|(n, s)| (n, *s))
            .collect();
        ::metrics::counter!(metrics::PUTS).increment(1);
        ::metrics::counter!(metrics::PUT_BYTES).increment(len);
        ::metrics::counter!(metrics::SUBSTITUTES).increment(substitutes.len() as u64);
        let stored = put.pieces.iter().map(|piece| piece.body.stored()).sum();
        Ok(NewBlock { id, len: put.len, layout: put.layout, substitutes, stored, servers })
    }

    /// The layout, which there is none of until enough servers have joined for the redundancy that the volume asks for.
    async fn await_layout(&self, mut chosen: LayoutId, until: Instant) -> Result<LayoutId> {
        while chosen.0 == 0 {
            if self.is_late(until) {
                let what = "too few data servers have joined for the redundancy that is asked for";
                return Err(
                    Fault::new(Code::Unreachable, what).next("`torchfs status` says how many it needs")
                );
            }
            self.rest(until).await;
            // Told with every renewal of the session.
            chosen = self.meta.info().volume.layout;
        }
        Ok(chosen)
    }

    /// Packs the chunks and makes the pieces.
    async fn pack(
        &self,
        id: BlockId,
        data: Vec<Bytes>,
        compression: Compression,
        shape: Shape<'_>,
    ) -> Result<Vec<NewPiece>> {
        let compression = match compression {
            Compression::None => torchfs_codec::Compression::None,
            Compression::Lz4 => torchfs_codec::Compression::Lz4,
            Compression::Zstd => torchfs_codec::Compression::Zstd(self.config.zstd_level),
        };
        let bytes = data.iter().map(Bytes::len).sum::<usize>();
        let (code, copies) = (shape.code, shape.pieces);
        let pack = move || {
            let encoded = torchfs_codec::encode(id, &data, compression)?;
            let Some(code) = code else {
                return Ok((0..copies).map(|_| NewPiece { first: 0, body: encoded.clone() }).collect());
            };
            let count = encoded.chunks.len() as u32;
            let pieces = (0..).zip(code.split(id, &encoded)?);
            Ok(pieces.map(|(n, body)| NewPiece { first: code.first_index(n, count), body }).collect())
        };
        let packed: Result<_, torchfs_codec::Error> = self.offload(bytes, pack).await?;
        packed.map_err(|error| Fault::new(Code::Io, error.to_string()))
    }

    /// Puts one piece where its group says, or on a substitute; returns where it is.
    async fn put_piece(&self, put: &Put, piece: u8) -> Result<ServerId> {
        let mut failed: HashSet<ServerId> = HashSet::new();
        let mut last: Option<Fault> = None;
        loop {
            let placement = self.placement(put.layout).await?;
            let shape = Shape::of(layout(&placement, put.layout)?, put.id, put.len)?;
            let Some(home) = shape.home(piece) else {
                let what = format!("the group of block {} became smaller", put.id);
                return Err(Fault::new(Code::StalePlacement, what));
            };
            let Some(server) = self.choose(put, &placement, piece, home, &failed) else {
                // Every server that could take it has failed by now: begin anew if they may come back.
                let fault = last.take().unwrap_or_else(|| {
                    let what = format!("no data server is free to take piece {piece} of block {}", put.id);
                    Fault::new(Code::Unreachable, what)
                });
                if !may_pass(&fault) || self.is_late(put.until) {
                    return Err(fault);
                }
                put.waits(piece, fault);
                failed.clear();
                self.rest(put.until).await;
                continue;
            };
            let fault = match self.put_once(put, &placement, shape.group.version, piece, server).await {
                Ok(()) => {
                    put.state.lock().waits.remove(&piece);
                    return Ok(server);
                }
                Err(fault) => fault,
            };
            put.release(server, piece);
            if self.is_late(put.until) || fault.code == Code::Exists {
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
                    put.waits(piece, fault.clone());
                    failed.insert(server);
                    last = Some(fault);
                }
            }
        }
    }

    /// The server to try next, which is taken for the piece: its home, unless that failed or is known to be down and another
    /// one can take the piece.
    fn choose(
        &self,
        put: &Put,
        placement: &Placement,
        piece: u8,
        home: ServerId,
        failed: &HashSet<ServerId>,
    ) -> Option<ServerId> {
        let shunned = |id: ServerId| {
            self.servers.find(placement, id).map_or(true, |server| server.failed_within(self.config.shun))
        };
        let taken = &mut put.state.lock().taken;
        // What it had before has come to nothing, or its home is another one now. Pieces that kept their old homes while all of
        // them looked for new ones would wait for each other.
        taken.retain(|_, by| *by != piece);
        let home_free = taken.get(&home).is_none_or(|by| *by == piece) && !failed.contains(&home);
        if home_free && is_up(placement, home) && !shunned(home) {
            taken.insert(home, piece);
            return Some(home);
        }
        let others = |server: &ServerInfo| taken.get(&server.id).is_some_and(|by| *by != piece);
        let zones: HashSet<&str> = placement
            .servers
            .iter()
            .filter(|server| others(server))
            .map(|server| server.zone.as_str())
            .collect();
        let candidates: Vec<&ServerInfo> = placement
            .servers
            .iter()
            .filter(|server| server.up && server.state <= ServerState::Suspected)
            .filter(|server| !taken.contains_key(&server.id) && !failed.contains(&server.id))
            .filter(|server| !shunned(server.id))
            .collect();
        let most = candidates.iter().map(|server| server.free / 8).max().unwrap_or(0).max(1);
        let substitute = candidates.into_iter().max_by_key(|server| {
            let new_zone = !server.zone.is_empty() && !zones.contains(server.zone.as_str());
            // Among those with about as much room the blocks take turns.
            let turn =
                put.id.counter.wrapping_add(u64::from(server.id.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // One that is being emptied is better than none.
            (!server.draining, new_zone, server.free / most, turn >> 32)
        });
        let chosen = match substitute {
            Some(substitute) => substitute.id,
            None if home_free => home,
            None => return None,
        };
        taken.insert(chosen, piece);
        Some(chosen)
    }

    async fn put_once(
        &self,
        put: &Put,
        placement: &Placement,
        group_version: u32,
        piece: u8,
        server: ServerId,
    ) -> Result<()> {
        let was_up = is_up(placement, server);
        let server = self.servers.find(placement, server)?;
        let NewPiece { first, body } = &put.pieces[usize::from(piece)];
        let request = Request {
            session: self.meta.info().session.0,
            capability: None,
            op: Op::Put {
                block: put.id,
                piece,
                layout: put.layout,
                group_version,
                chunks: body.chunks.clone(),
                first: *first,
            },
        };
        let until = put.until.min(Instant::now() + self.config.put_timeout);
        let mut call = std::pin::pin!(server.call(&request, Payload::Parts(body.payload.clone()), until));
        let result = loop {
            match select(call.as_mut(), std::pin::pin!(self.sleep(LOOK))).await {
                Either::Left((result, _)) => break result,
                // A server that was cut off does not refuse: no need to wait for it longer than the others do.
                Either::Right(_) if was_up && !is_up(&self.meta.placement(), server.id) => {
                    break Err(server.named(Fault::new(Code::Unreachable, "it went down")));
                }
                Either::Right(_) => {}
            }
        };
        match result {
            Ok(_) => Ok(()),
            Err(fault) if fault.code == Code::Exists => Err(Fault::new(
                Code::Exists,
                format!("other bytes are stored under the id of block {}: {}", put.id, fault.what),
            )
            .next("report this: an id was given twice")),
            Err(fault) => Err(Fault { what: format!("putting block {}: {}", put.id, fault.what), ..fault }),
        }
    }

    /// Whether there is no time for another try.
    fn is_late(&self, until: Instant) -> bool {
        Instant::now() + self.config.pause >= until
    }

    /// Waits a little, not beyond `until`.
    pub(super) async fn rest(&self, until: Instant) {
        let pause = self.config.pause.min(until.saturating_duration_since(Instant::now()));
        self.sleep(pause).await;
    }
}

impl Put {
    /// A piece waits, because of this.
    fn waits(&self, piece: u8, fault: Fault) {
        self.state.lock().waits.insert(piece, fault);
    }

    fn release(&self, server: ServerId, piece: u8) {
        let taken = &mut self.state.lock().taken;
        if taken.get(&server) == Some(&piece) {
            taken.remove(&server);
        }
    }

    /// The fault of the whole put, which names everybody who is missing.
    fn failed(&self, fault: Fault) -> Fault {
        if !may_pass(&fault) {
            return fault;
        }
        let mut waits: Vec<(u8, Fault)> = self.state.lock().waits.drain().collect();
        waits.sort_by_key(|(piece, _)| *piece);
        let missing: Vec<String> =
            waits.iter().map(|(piece, fault)| format!("piece {piece}: {}", fault.what)).collect();
        let (width, missed) = (self.pieces.len(), waits.len().max(1));
        let what = format!(
            "block {} needs {width} data servers and {missed} of them cannot be had: {}",
            self.id,
            if missing.is_empty() { fault.what } else { missing.join("; ") }
        );
        Fault { code: fault.code, what, next: "start these data servers, or add others".to_owned() }
    }
}

/// Whether a later try may succeed. Bytes that were damaged on their way may arrive whole.
fn may_pass(fault: &Fault) -> bool {
    fault.code.retry() || fault.code == Code::Corrupt
}
