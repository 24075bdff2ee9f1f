//! Stale pieces: what a server holds and should not, because it was away, or because pieces moved elsewhere.
//!
//! A server that may hold such pieces is marked, durably. So are all of them a while after a session was cut off: its client
//! may have been stopped and put blocks when it went on, after the purge. One search serves all sessions of that while; what
//! comes later still goes with the next one.
//! A marked server is asked to list what it holds, and each piece is judged by the
//! records of that moment. A piece of a known block goes only if its group is clean, so that every piece was seen at its
//! target, and this server is not where the record or the group says. A piece of an unknown block goes only if its id is in no
//! live range and in no queue of the dead.
//!
//! # Invariants
//! - Ids in live ranges are never touched: a commit may name them at any moment.
//! - The search begins two lease terms after the last change that made pieces stale, and when that is durable; what it
//!   removes was judged by durable records.
//! - If the outcome of a removal is unknown, its server's groups are checked again before anything rests on it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use torchfs_proto::layout::ServerState;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::msg::meta::Strays;
use torchfs_proto::record::{DeadBlock, DeadRange};
use torchfs_proto::{BlockId, IdRange, LayoutId, Result, Seq, ServerId, key};

use super::{PieceAt, RepairPeers};
use crate::server::within;
use crate::service::{Meta, State};

/// Pieces listed in one step.
const LIST_MAX: u32 = 2_048;
/// Dead blocks that are looked at; with more of them in the queue, unknown pieces wait.
const DEAD_MAX: usize = 100_000;

/// A search for stale pieces on one server.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    /// The mark it answers; a later one begins it again.
    mark: u64,
    not_before: Instant,
    durable: Seq,
    after: Option<PieceAt>,
    /// Some pieces could not be judged yet.
    again: bool,
}

/// What is to become of a listed piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Keep,
    /// Not now: its group is not clean.
    Later,
    Drop,
}

impl Meta {
    /// A part of a search. Answers whether there was something to do.
    pub(super) async fn stale_step(&self, peers: &dyn RepairPeers) -> bool {
        let chosen = {
            let mut state = self.state.lock();
            self.next_scan(&mut state)
        };
        let Some((server, addr, after)) = chosen else { return false };
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        let (pieces, end) = match within(limit, peers.list(&addr, after, LIST_MAX)).await {
            Ok(listed) => listed,
            Err(fault) => {
                tracing::debug!(server = server.0, "a search for stale pieces waits: {fault}");
                self.postpone(server, false);
                return false;
            }
        };
        let last = pieces.last().map(|piece| (piece.block, piece.piece));
        let judged = {
            let state = self.state.lock();
            if self.is_outdated(&state, server) {
                return true; // marked again meanwhile: begins again, later
            }
            self.judge(&state, server, &pieces)
        };
        let (drops, later) = match judged {
            Ok(judged) => judged,
            Err(fault) => {
                tracing::warn!("stale pieces cannot be judged: {fault}");
                self.postpone(server, false);
                return false;
            }
        };
        let count = drops.len() as u64;
        if count > 0
            && let Err(fault) = self.settled().await
        {
            tracing::debug!("a search for stale pieces waits: {fault}");
            self.postpone(server, false);
            return false;
        }
        // What was judged holds only while nobody else leads.
        if count > 0 && !self.engine.leads() {
            return false;
        }
        if count > 0
            && let Err(fault) = within(limit, peers.forget(&addr, drops)).await
        {
            tracing::warn!(server = server.0, "whether stale pieces were removed is not known: {fault}");
            self.postpone(server, true);
            return false;
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        state.repairs.dropped += count;
        let mark = state.members.table.marks.get(&server).copied().unwrap_or(0);
        let Some(scan) = state.repairs.scans.get_mut(&server) else { return true };
        scan.again |= later;
        scan.after = last.or(scan.after);
        if scan.mark != mark {
            state.repairs.scans.remove(&server); // begins again, later
        } else if end {
            let again = scan.again;
            state.repairs.scans.remove(&server);
            if again {
                let retry = Duration::from_millis(u64::from(self.config.repair_retry_ms));
                let scan = self.scan_from(state, mark, retry);
                state.repairs.scans.insert(server, scan);
            } else if let Err(fault) = self.edit_members(state, self.clock.now(), |table, _| {
                if let Some(record) = table.servers.get_mut(&server) {
                    record.reconcile = false;
                }
                Ok(())
            }) {
                tracing::warn!("the end of a search cannot be noted: {fault}");
            }
        }
        true
    }

    /// The next server to ask, and from where on.
    fn next_scan(&self, state: &mut State) -> Option<(ServerId, String, Option<PieceAt>)> {
        let now = self.clock.now();
        let marked: Vec<(ServerId, String)> = state
            .members
            .table
            .servers
            .values()
            .filter(|server| server.reconcile && server.state == ServerState::Up)
            .map(|server| (server.id, server.addr.clone()))
            .collect();
        let terms = self.config.lease_term() * self.config.dead_terms;
        let durable = self.engine.durable();
        for (server, addr) in marked {
            let mark = state.members.table.marks.get(&server).copied().unwrap_or(0);
            if state.repairs.scans.get(&server).is_none_or(|scan| scan.mark != mark) {
                let scan = self.scan_from(state, mark, terms);
                state.repairs.scans.insert(server, scan);
            }
            let sure = state.repairs.is_sure(server, now);
            let Some(scan) = state.repairs.scans.get(&server) else { continue };
            if sure && now >= scan.not_before && durable >= scan.durable {
                return Some((server, addr, scan.after));
            }
        }
        None
    }

    /// Whether the server was marked again since its search began.
    fn is_outdated(&self, state: &State, server: ServerId) -> bool {
        let mark = state.members.table.marks.get(&server).copied().unwrap_or(0);
        state.repairs.scans.get(&server).is_none_or(|scan| scan.mark != mark)
    }

    fn scan_from(&self, _state: &State, mark: u64, pause: Duration) -> Scan {
        let not_before = self.clock.now() + pause;
        Scan { mark, not_before, durable: self.engine.ordered(), after: None, again: false }
    }

    /// The server did not answer. If it was told to remove something, nobody knows whether it did.
    fn postpone(&self, server: ServerId, unsure: bool) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let state = &mut *state;
        let retry = Duration::from_millis(u64::from(self.config.repair_retry_ms));
        if let Some(scan) = state.repairs.scans.get_mut(&server) {
            scan.not_before = now + retry;
        }
        if unsure {
            // The request ends with its deadline, wherever it is.
            let until = now + 2 * Duration::from_millis(u64::from(self.config.peer_timeout_ms));
            state.repairs.unsure.insert(server, until);
            let marked = self.edit_members(state, now, |table, _| {
                table.mark_server_dirty(server);
                Ok(())
            });
            if let Err(fault) = marked {
                tracing::warn!("groups cannot be marked: {fault}");
            }
        }
    }

    /// Which of these pieces go, and whether some have to be looked at again.
    fn judge(&self, state: &State, server: ServerId, pieces: &[PieceInfo]) -> Result<(Vec<PieceAt>, bool)> {
        let (mut drops, mut later) = (Vec::new(), false);
        let mut dead: Option<Dead> = None;
        for piece in pieces {
            let verdict = match self.find_block(state, piece.block)? {
                Some((_, record)) => {
                    let table = &state.members.table;
                    match table.group_of(record.layout, piece.block) {
                        None => Verdict::Keep,
                        Some((_, _, group)) => {
                            let substitutes = record.substitutes.as_deref().unwrap_or_default();
                            let holders = table.holders_of(group, piece.piece, substitutes);
                            match holders.contains(&server) {
                                true => Verdict::Keep,
                                false if group.dirty || !group.moving_to.is_empty() => Verdict::Later,
                                false => Verdict::Drop,
                            }
                        }
                    }
                }
                None => {
                    if dead.is_none() {
                        dead = Some(self.dead(state)?);
                    }
                    match &dead {
                        Some(dead) => dead.judge(state, piece.block),
                        None => Verdict::Later,
                    }
                }
            };
            match verdict {
                Verdict::Keep => {}
                Verdict::Later => later = true,
                Verdict::Drop => drops.push((piece.block, piece.piece)),
            }
        }
        Ok((drops, later))
    }

    /// Which of these pieces of a server nobody needs, for a check.
    pub(crate) fn strays(&self, state: &State, server: ServerId, pieces: &[PieceAt]) -> Result<Strays> {
        let info = |(block, piece): &PieceAt| PieceInfo {
            block: *block,
            piece: *piece,
            layout: LayoutId::default(),
            stored: 0,
        };
        let pieces: Vec<PieceInfo> = pieces.iter().map(info).collect();
        let (drops, _) = self.judge(state, server, &pieces)?;
        let marked = state.members.table.servers.get(&server).is_some_and(|server| server.reconcile);
        let searched = marked || state.repairs.settings.search_ms.is_some();
        Ok(match searched {
            true => Strays { leaving: drops, ..Strays::default() },
            false => Strays { orphans: drops, ..Strays::default() },
        })
    }

    fn dead(&self, state: &State) -> Result<Dead> {
        let mut dead = Dead::default();
        for volume in state.volumes.keys() {
            let view = self.view(*volume);
            let ranges = key::space(*volume, key::Space::DeadRange);
            dead.ranges.extend(view.list::<DeadRange>(&ranges, usize::MAX)?.into_iter().map(|(_, r)| r.ids));
            let blocks = key::space(*volume, key::Space::DeadBlock);
            let listed = view.list::<DeadBlock>(&blocks, DEAD_MAX)?;
            dead.more |= listed.len() >= DEAD_MAX;
            let ids =
                listed.iter().filter_map(|(at, _)| key::Parts::of(at).and_then(|parts| parts.block_at(8)));
            dead.blocks.extend(ids);
        }
        Ok(dead)
    }
}

/// What the deleter has yet to remove.
#[derive(Default)]
struct Dead {
    blocks: HashSet<BlockId>,
    ranges: Vec<IdRange>,
    more: bool,
}

impl Dead {
    /// What becomes of a piece whose block no record names.
    fn judge(&self, state: &State, id: BlockId) -> Verdict {
        let mut live = state.sessions.values().flat_map(|session| &session.ranges);
        if live.any(|range| range.contains(id)) {
            // In flight. When its session ends, the deleter purges what was not committed.
            return Verdict::Keep;
        }
        if self.more || self.blocks.contains(&id) || self.ranges.iter().any(|range| range.contains(id)) {
            return Verdict::Later;
        }
        Verdict::Drop
    }
}
