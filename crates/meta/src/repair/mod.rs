//! Repair: decides what has to be copied, moved and removed so that every piece is where the table says. Data servers do
//! the work: those that lack pieces pull them.
//!
//! There is one mechanism. Whatever may leave a piece missing (a server lost or back, a disk lost, a move, a substitute, a
//! bad piece) marks the group dirty, durably. A pass ([`pass`]) walks the block records, asks the servers of dirty groups
//! what they lack, and has that pulled; a group in which nothing is missing any more is clean, and has moved if it was
//! moving. Pieces that are left where they do not belong are found by asking servers what they hold ([`stale`]). A scrub
//! ([`scrub`]) has everything read and checked, and reports what is bad.
//!
//! # Invariants
//! - Nothing is held while a server is asked; what comes back is checked against the table of that moment.
//! - A pass never calls a group clean whose table or dirty mark changed since the pass began.
//! - Passes and removals run one after the other, in one task: a piece is not removed while a pass counts on it.
//!
//! # Not here
//! Which servers a group should be on: `placement.rs`, `table.rs`. Copying and rebuilding: `block`.

mod layouts;
mod pass;
mod scrub;
mod stale;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use torchfs_proto::msg::block::{PieceInfo, PullItem};
use torchfs_proto::msg::meta::{BadPiece, DrainReport, RepairReport, ScrubReport};
use torchfs_proto::record;
use torchfs_proto::{BlockId, Fault, Result, ServerId, VolumeId};

use crate::deleter::BlockPeers;
use crate::service::{Meta, State};
use crate::table::GroupAt;

/// A piece of a block.
pub type PieceAt = (BlockId, u8);

/// Reports of bad pieces that wait; more are found again by the next pass or scrub.
const BAD_QUEUE: usize = 65_536;
/// Lost blocks that are remembered by id.
const LOST_MAX: usize = 65_536;
/// Lost blocks in a report.
const LOST_SHOWN: usize = 64;

/// What came of a pull.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pulled {
    /// (place in the request, why not).
    pub failed: Vec<(u32, Fault)>,
    /// Bytes stored.
    pub bytes: u64,
}

/// What came of a part of a scrub.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scrubbed {
    /// Pieces that were bad and are forgotten.
    pub bad: Vec<PieceAt>,
    /// Go on after this piece.
    pub after: Option<PieceAt>,
    /// Pieces read.
    pub pieces: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// A call to a data server.
pub type Asking<'a, T> = BoxFuture<'a, Result<T>>;

/// A part of what a server stores, and whether nothing follows.
pub type Listed = (Vec<PieceInfo>, bool);

/// What a server is to read and check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubPart {
    /// Begin after this piece.
    pub after: Option<PieceAt>,
    /// At most this many pieces.
    pub pieces: u32,
    /// Bytes per second; 0: no bound.
    pub rate: u64,
}

/// How the service has data servers repair.
pub trait RepairPeers: BlockPeers {
    /// Which of these pieces the server does not have.
    fn missing<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, Vec<PieceAt>>;

    /// Has the server get pieces from others; answered when those that succeeded are durable.
    fn pull<'a>(
        &'a self,
        addr: &'a str,
        items: Vec<PullItem>,
        rate: u64,
        limit: Duration,
    ) -> Asking<'a, Pulled>;

    /// Has pieces removed that belong elsewhere; answered when that is durable.
    fn forget<'a>(&'a self, addr: &'a str, pieces: Vec<PieceAt>) -> Asking<'a, ()>;

    /// What the server stores, in the order of ids.
    fn list<'a>(&'a self, addr: &'a str, after: Option<PieceAt>, limit: u32) -> Asking<'a, Listed>;

    /// Has the server read and check what it stores.
    fn scrub<'a>(&'a self, addr: &'a str, part: ScrubPart, limit: Duration) -> Asking<'a, Scrubbed>;
}

/// What repair knows in memory; what must survive is in the table and in [`record::Repair`].
#[derive(Default)]
pub(crate) struct Repairs {
    /// Settings, and how far the scrub is.
    pub settings: record::Repair,
    /// Even out the servers although that is off by itself.
    pub balance_now: bool,
    /// Rises whenever a server comes or goes.
    pub changes: u64,
    /// Layouts that nothing uses.
    pub layouts: layouts::Layouts,
    pass: Option<pass::Pass>,
    /// Groups that are left alone for now, as they were at this version: one that moves since then is looked at.
    waits: HashMap<GroupAt, (u32, Wait)>,
    bad: VecDeque<BadPiece>,
    lost: BTreeMap<BlockId, GroupAt>,
    /// Pieces found missing and not yet stored, by server.
    pub missing: BTreeMap<ServerId, u64>,
    scans: BTreeMap<ServerId, stale::Scan>,
    /// Servers whose last removal has an unknown outcome: nothing is counted on until then.
    unsure: BTreeMap<ServerId, Instant>,
    scrub_saved: Option<Instant>,
    /// When figures were last set.
    pub told: Option<Instant>,
    pieces_done: u64,
    bytes_done: u64,
    /// Pieces and bytes that were copied off servers that are being emptied.
    pub moved: BTreeMap<ServerId, (u64, u64)>,
    dropped: u64,
    /// The bytes of this and of the last second or so.
    speed: Speed,
}

/// Why a dirty group is left alone for now.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// Something failed.
    Until(Instant),
    /// A server that it needs is not there; looked at again when a server comes or goes.
    Change(u64),
}

#[derive(Default)]
struct Speed {
    since: Option<Instant>,
    bytes: u64,
    per_second: u64,
}

impl Meta {
    /// One step of repair: reported pieces, then a part of a pass, then a part of a search for stale pieces. Call it again
    /// and again, from one task. Answers whether something was done.
    pub async fn repair(&self, peers: &dyn RepairPeers) -> bool {
        // A removal that the last leader asked for may still be on its way; it ends with its deadline.
        let asked_before = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        if !self.engine.leads() || self.clock.now() < self.state.lock().members.began() + asked_before {
            return false;
        }
        let walked = self.layouts_step();
        if self.heal_reported(peers).await || self.pass_step(peers).await {
            return true;
        }
        self.stale_step(peers).await || walked
    }

    /// How repair, moves and scrub go on.
    pub(crate) fn repair_report(&self, state: &State, now: Instant) -> RepairReport {
        let table = &state.members.table;
        let repairs = &state.repairs;
        let mut report = RepairReport {
            pieces_left: repairs.missing.values().sum::<u64>() + repairs.bad.len() as u64,
            pieces_done: repairs.pieces_done,
            bytes_done: repairs.bytes_done,
            rate: repairs.speed.now(now),
            rate_max: self.repair_rate(state),
            lost: repairs.lost.len() as u64,
            lost_blocks: repairs.lost.keys().take(LOST_SHOWN).copied().collect(),
            auto_rebalance: !repairs.settings.no_rebalance,
            balancing: repairs.balance_now,
            dropped: repairs.dropped,
            ..RepairReport::default()
        };
        let idle = repairs.layouts.idle();
        for (_, layout, group) in table.needed_groups(&idle) {
            report.groups += 1;
            report.dirty += u32::from(group.dirty);
            report.moving += u32::from(!group.moving_to.is_empty());
            let degraded = table.lacks_server(group);
            report.degraded += u32::from(degraded);
            // One copy survives no loss at the best of times; that is no news.
            let least = if layout.scheme.tolerates() > 0 { 0 } else { -1 };
            let at_risk = (group.dirty || degraded) && table.margin(layout, group) <= least;
            report.at_risk += u32::from(at_risk);
        }
        if let Some(pass) = &repairs.pass {
            (report.pass_done, report.pass_total) = pass.progress();
        }
        let servers = state.members.servers();
        let draining = servers.iter().filter(|server| server.draining);
        report.drains = draining
            .map(|server| DrainReport {
                server: server.id,
                groups: table.places(server.id, &idle),
                pieces: server.pieces,
                // What nobody uses is in nobody's way; while that is looked for nobody knows.
                stuck: if repairs.layouts.is_looking() { 0 } else { table.stuck(server.id, &idle) },
                moved: repairs.moved.get(&server.id).copied(),
            })
            .collect();
        let scrub = repairs.settings.scrub.as_ref().or(repairs.settings.last.as_ref());
        report.scrub = ScrubReport {
            running: repairs.settings.scrub.is_some(),
            pieces: scrub.map_or(0, |scrub| scrub.pieces),
            total: state.members.pieces(),
            bytes: scrub.map_or(0, |scrub| scrub.bytes),
            bad: scrub.map_or(0, |scrub| scrub.bad),
            last_end: repairs.settings.scrubbed.map_or(0, |time| time.secs),
        };
        report
    }

    /// Bytes per second that repair may take on each server.
    pub(crate) fn repair_rate(&self, state: &State) -> u64 {
        match state.repairs.settings.rate {
            0 => self.config.repair_rate,
            rate => rate,
        }
    }

    /// Takes in reports of bad pieces; their groups are marked so that a restart forgets none.
    pub(crate) fn report_bad(&self, state: &mut State, pieces: &[BadPiece], now: Instant) -> Result<()> {
        let mut known = Vec::new();
        let mut stale: BTreeSet<ServerId> = BTreeSet::new();
        for bad in pieces {
            let table = &state.members.table;
            let found = self.find_block(state, bad.block)?;
            let placed = found.as_ref().and_then(|(_, record)| {
                let (at, _, group) = table.group_of(record.layout, bad.block)?;
                let substitutes = record.substitutes.as_deref().unwrap_or_default();
                Some((at, table.holders_of(group, bad.piece, substitutes).contains(&bad.server)))
            });
            match placed {
                Some((at, true)) => known.push((*bad, at)),
                // Nobody needs it there: it goes, and needs no repair.
                _ => {
                    stale.insert(bad.server);
                }
            }
        }
        self.edit_members(state, now, |table, _| {
            known.iter().for_each(|(_, at)| table.mark_dirty(*at));
            stale.iter().for_each(|server| table.mark_stale(*server));
            Ok(())
        })?;
        for (bad, at) in known {
            state.repairs.waits.remove(&at);
            if state.repairs.bad.len() < BAD_QUEUE && !state.repairs.bad.contains(&bad) {
                state.repairs.bad.push_back(bad);
            }
        }
        Ok(())
    }

    /// A block's record and volume, whichever that is.
    pub(crate) fn find_block(&self, state: &State, id: BlockId) -> Result<Option<(VolumeId, record::Block)>> {
        for volume in state.volumes.keys() {
            if let Some(block) = self.view(*volume).block(id)? {
                return Ok(Some((*volume, block)));
            }
        }
        Ok(None)
    }
}

impl Repairs {
    /// With what is written down.
    pub fn new(settings: record::Repair) -> Repairs {
        Repairs { settings, ..Repairs::default() }
    }

    /// A server came, went or changed: what waited for that is looked at again.
    pub fn changed(&mut self) {
        self.changes += 1;
    }

    fn stored(&mut self, pieces: u64, bytes: u64, now: Instant) {
        self.pieces_done += pieces;
        self.bytes_done += bytes;
        self.speed.add(bytes, now);
    }

    fn lose(&mut self, id: BlockId, at: GroupAt) {
        if self.lost.len() < LOST_MAX {
            self.lost.insert(id, at);
        }
    }

    /// Whether what this server says can be counted on.
    fn is_sure(&self, server: ServerId, now: Instant) -> bool {
        self.unsure.get(&server).is_none_or(|until| now >= *until)
    }
}

impl Speed {
    fn add(&mut self, bytes: u64, now: Instant) {
        let since = *self.since.get_or_insert(now);
        self.bytes += bytes;
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= Duration::from_secs(1) {
            self.per_second = (u128::from(self.bytes) * 1_000 / elapsed.as_millis().max(1)) as u64;
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    fn now(&self, now: Instant) -> u64 {
        let lately =
            self.since.is_some_and(|since| now.saturating_duration_since(since) < Duration::from_secs(5));
        if lately { self.per_second } else { 0 }
    }
}

/// A pull of one piece: the piece itself from whoever has it, then others to rebuild it from.
pub(crate) fn pull_item(
    state: &State,
    addrs: &BTreeMap<ServerId, String>,
    (id, record): (BlockId, &record::Block),
    piece: u8,
    on: ServerId,
    lacking: &dyn Fn(ServerId, u8) -> bool,
) -> Option<PullItem> {
    let table = &state.members.table;
    let (_, layout, group) = table.group_of(record.layout, id)?;
    let pieces = layout.scheme.pieces(record.len);
    let substitutes = record.substitutes.as_deref().unwrap_or_default();
    let mut sources: Vec<(u8, String)> = Vec::new();
    let order = std::iter::once(piece).chain((0..pieces as u8).filter(|other| *other != piece));
    for other in order {
        for holder in table.holders_of(group, other, substitutes) {
            if (holder == on && other == piece) || lacking(holder, other) {
                continue;
            }
            if let Some(addr) = addrs.get(&holder) {
                sources.push((other, addr.clone()));
            }
        }
    }
    Some(PullItem {
        block: id,
        piece,
        layout: layout.id,
        scheme: layout.scheme,
        block_len: record.len,
        sources,
        verify: false,
    })
}
