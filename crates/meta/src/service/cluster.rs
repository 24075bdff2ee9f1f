//! The cluster's servers as administrators and heartbeats change them, and what time does to the placement.
//!
//! # Invariants
//! - Every change of the table is one batch, and memory follows when that is ordered.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use torchfs_proto::attr::Time;
use torchfs_proto::layout::ServerState;
use torchfs_proto::msg::meta::{BAD_MAX, BadPiece, Done, Heartbeat, Op, SessionTop};
use torchfs_proto::record::ClusterCounters;
use torchfs_proto::{Code, Fault, LayoutId, Result, ServerId, SessionId, key};

use super::{Chore, Meta, State};
use crate::members::Members;
use crate::metrics;
use crate::table::Table;

/// How often the figures of the cluster are set.
const FIGURES_EVERY: Duration = Duration::from_secs(2);
/// Removed servers that are remembered.
const REMOVED_MAX: usize = 256;

impl Meta {
    /// Edits a copy of the table, writes what differs as one batch, and puts the copy in its place.
    pub(crate) fn edit_members<T>(
        &self,
        state: &mut State,
        now: Instant,
        edit: impl FnOnce(&mut Table, &mut ClusterCounters) -> Result<T>,
    ) -> Result<T> {
        let mut table = state.members.table.clone();
        let mut counters = state.cluster.clone();
        let result = edit(&mut table, &mut counters)?;
        let mut view = self.view(key::CLUSTER);
        table.write(&state.members.table, &mut view, &mut counters, &state.cluster);
        let mut seq = state.members.placed;
        if !view.is_clean() {
            view.frees = true;
            seq = self.order(state, view, now)?;
            state.cluster = counters;
        }
        if table.layouts.keys().next_back() > state.members.table.layouts.keys().next_back() {
            state.repairs.layouts.look(); // a new one may have replaced an old one
        }
        state.members.take(table, seq);
        Ok(result)
    }

    /// Serves what administrators ask about servers and repair; `None` for all else.
    pub(super) fn cluster_op(&self, state: &mut State, op: &Op, now: Instant) -> Result<Option<Done>> {
        let done = match op {
            Op::Heartbeat(beat) => self.heartbeat(state, beat, now)?,
            Op::Drain { server, on } => {
                let before = state.members.table.servers.get(server).is_some_and(|record| record.draining);
                if before != *on {
                    state.repairs.moved.remove(server);
                }
                self.edit_members(state, now, |table, counters| {
                    table.servers.get_mut(server).ok_or_else(|| unknown(*server))?.draining = *on;
                    table.evade();
                    table.widen(counters);
                    Ok(())
                })?;
                state.repairs.changed();
                let idle = state.repairs.layouts.idle();
                if *on && state.members.table.stuck(*server, &idle) > 0 {
                    state.repairs.layouts.look();
                }
                Done::Repair(self.repair_report(state, now))
            }
            Op::RemoveServer { server, force } => {
                self.remove_server(state, *server, *force, now)?;
                Done::Ok
            }
            Op::Rebalance { auto } => {
                if let Some(auto) = auto {
                    let settings = torchfs_proto::record::Repair {
                        no_rebalance: !auto,
                        ..state.repairs.settings.clone()
                    };
                    self.set_repair(state, settings)?;
                }
                if auto.unwrap_or(true) {
                    state.repairs.balance_now = true;
                    self.reshape(state, now)?;
                }
                Done::Repair(self.repair_report(state, now))
            }
            Op::Scrub { on } => {
                self.set_scrub(state, *on)?;
                Done::Repair(self.repair_report(state, now))
            }
            Op::Repair { rate } => {
                if let Some(rate) = rate {
                    let settings =
                        torchfs_proto::record::Repair { rate: *rate, ..state.repairs.settings.clone() };
                    self.set_repair(state, settings)?;
                }
                Done::Repair(self.repair_report(state, now))
            }
            Op::ReportBad { pieces } => {
                if pieces.len() > BAD_MAX {
                    return Err(Code::TooMany.into());
                }
                self.report_bad(state, pieces, now)?;
                Done::Ok
            }
            Op::Top => Done::Top(top(state)),
            _ => return Ok(None),
        };
        Ok(Some(done))
    }

    fn heartbeat(&self, state: &mut State, beat: &Heartbeat, now: Instant) -> Result<Done> {
        let (cluster, before) = (self.engine.cluster(), self.engine.ordered());
        state.members.check(cluster, beat)?;
        if state.cluster.removed.as_ref().is_some_and(|removed| removed.contains(&beat.store)) {
            let what = format!("the data server at {} was removed from this cluster", beat.addr);
            return Err(Fault::new(Code::Denied, what)
                .next("stop it; to have it join as a new server, start it on empty folders"));
        }
        let wall = Time::from_ns(self.clock.wall_ns());
        if let Some(server) = state.members.loses_disk(beat) {
            // Blocks that were put there and not committed are in no record yet. Whoever may still commit them does so by then.
            let term = Duration::from_millis(u64::from(self.config.session_ms));
            state.members.look_again(server, now + term);
        }
        let server = match (state.members.changed(beat, wall), state.members.known(beat)) {
            (None, Some(server)) => server,
            (None, None) => return Err(Code::Internal.into()),
            (Some(record), known) => {
                let born = self.view(key::CLUSTER).born;
                let policies = self.policies(state);
                let server = self.edit_members(state, now, |table, counters| {
                    let server = Members::edit(table, counters, born, record);
                    for (asked, stripe) in policies {
                        table.ensure_layout(counters, asked, stripe);
                    }
                    Ok(server)
                })?;
                if known.is_none() {
                    tracing::info!(server = server.0, addr = %beat.addr, "a data server joins");
                }
                state.repairs.changed();
                server
            }
        };
        if state.members.begins(server, beat) {
            self.edit_members(state, now, |table, _| {
                table.mark_server_dirty(server);
                Ok(())
            })?;
            state.repairs.changed();
        }
        state.members.heard(server, beat, now);
        if !beat.bad.is_empty() {
            let bad = beat.bad.iter().map(|(block, piece)| BadPiece { block: *block, piece: *piece, server });
            let bad: Vec<BadPiece> = bad.collect();
            self.report_bad(state, &bad, now)?;
        }
        let placement = state.members.version();
        // What is not durable is not told yet: the next heartbeat asks again. One that ordered something waits for that anyway.
        let told = self.engine.durable() >= state.members.placed || self.engine.ordered() > before;
        Ok(match told && beat.placement < placement {
            true => Done::Joined { server, cluster, placement, groups: state.members.group_versions() },
            false => {
                Done::Joined { server, cluster, placement: beat.placement.min(placement), groups: Vec::new() }
            }
        })
    }

    fn remove_server(&self, state: &mut State, server: ServerId, force: bool, now: Instant) -> Result<()> {
        let table = &state.members.table;
        let record = table.servers.get(&server).ok_or_else(|| unknown(server))?;
        let idle = state.repairs.layouts.idle();
        let places = table.places(server, &idle);
        // Substitutes are in groups that are dirty; once all are clean, the groups name every holder.
        let dirty = table.needed_groups(&idle).filter(|(_, _, group)| group.dirty).count();
        if !force && (places > 0 || dirty > 0) {
            let what = match places {
                0 => format!("{dirty} groups are being repaired and may need data server {server}"),
                _ => format!("data server {server} still has a place in {places} groups"),
            };
            return Err(Fault::new(Code::Busy, what)
                .next(format!("run `torchfs drain {server}` and wait until it is empty, or give --force")));
        }
        if record.state < ServerState::Down && !force && !record.draining {
            return Err(Fault::new(Code::Busy, format!("data server {server} is up and not drained"))
                .next(format!("run `torchfs drain {server}` first, or give --force")));
        }
        // Layouts that nothing uses and that could not do without it go now, whatever a session may still have under way.
        let bound: BTreeSet<LayoutId> = table
            .groups()
            .filter(|(at, _, group)| idle.contains(&at.0) && group.target().contains(&server))
            .map(|(at, _, _)| at.0)
            .collect();
        self.drop_layouts(state, bound, now)?;
        self.edit_members(state, now, |table, counters| {
            table.mark_server_dirty(server);
            // Its process may live on and speak.
            if let Some(record) = table.servers.remove(&server) {
                let removed = counters.removed.get_or_insert_default();
                removed.push(record.store);
                removed.drain(..removed.len().saturating_sub(REMOVED_MAX));
            }
            table.evade();
            Ok(())
        })?;
        state.members.forget(server);
        state.repairs.moved.remove(&server);
        state.repairs.changed();
        tracing::warn!(server = server.0, force, "a data server is removed");
        Ok(())
    }

    /// What time brings to servers and placement: silence, and groups that should move.
    pub(crate) fn watch_servers(&self, state: &mut State, now: Instant) {
        let timeout = Duration::from_millis(u64::from(self.config.server_timeout_ms));
        let out_after = Duration::from_millis(u64::from(self.config.out_after_ms));
        let wall = self.clock.wall_ns();
        let silent = state.members.silent(timeout, out_after, wall / 1_000_000, now);
        if !silent.is_empty() {
            let edited = self.edit_members(state, now, |table, _| {
                for (server, is) in &silent {
                    if let Some(record) = table.servers.get_mut(server) {
                        record.state = *is;
                        record.down_since.get_or_insert(Time::from_ns(wall));
                    }
                    if *is == ServerState::Out {
                        table.mark_server_dirty(*server);
                    }
                }
                table.evade();
                Ok(())
            });
            match edited {
                Ok(()) => silent.iter().for_each(|(server, is)| {
                    tracing::warn!(server = server.0, "a data server is silent and counts as {is}");
                }),
                Err(fault) => tracing::warn!("a silent server cannot be noted: {fault}"),
            }
            state.repairs.changed();
        }
        let due = state.members.take_due(now);
        if !due.is_empty() {
            let edited = self.edit_members(state, now, |table, _| {
                due.iter().for_each(|server| table.mark_server_dirty(*server));
                Ok(())
            });
            if let Err(fault) = edited {
                tracing::warn!("groups cannot be marked: {fault}");
                due.into_iter().for_each(|server| state.members.look_again(server, now));
            }
        }
        let every = Duration::from_millis(u64::from(self.config.reshape_ms));
        if state.reshaped.is_none_or(|last| now >= last + every) {
            state.reshaped = Some(now);
            let removed = state.volumes.values().filter(|volume| volume.removed);
            let removed: Vec<Chore> = removed.map(|volume| Chore::Empty(volume.id)).collect();
            let new = removed.into_iter().filter(|chore| !state.chores.contains(chore)).collect::<Vec<_>>();
            state.chores.extend(new);
            if let Err(fault) = self.reshape(state, now) {
                tracing::warn!("the placement cannot be changed: {fault}");
            }
            if let Err(fault) = self.search_late(state, now) {
                tracing::warn!("a search for late pieces cannot be begun: {fault}");
            }
            if state.repairs.told.is_none_or(|last| now >= last + FIGURES_EVERY) {
                state.repairs.told = Some(now);
                match self.status(state, now) {
                    Ok(status) => metrics::cluster(&status, &self.engine.stats(), &self.engine.peers()),
                    Err(fault) => tracing::debug!("the cluster has no figures: {fault}"),
                }
            }
        }
    }

    /// Has all servers searched when it is time to: the purge of a session that was cut off came before what its client put
    /// when it went on.
    fn search_late(&self, state: &mut State, now: Instant) -> Result<()> {
        if state.repairs.settings.search_ms.is_none_or(|due| self.wall_ms() < due) {
            return Ok(());
        }
        self.edit_members(state, now, |table, _| {
            let servers: Vec<ServerId> = table.servers.keys().copied().collect();
            servers.into_iter().for_each(|server| table.mark_stale(server));
            Ok(())
        })?;
        let settings = torchfs_proto::record::Repair { search_ms: None, ..state.repairs.settings.clone() };
        self.set_repair(state, settings)
    }

    /// Moves groups: off servers that go, and gently to even out the others.
    fn reshape(&self, state: &mut State, now: Instant) -> Result<()> {
        // Dead blocks count: where their pieces are is known from their groups.
        let mut blocks = 0;
        for volume in state.volumes.keys() {
            let counters = self.view(*volume).counters()?;
            blocks += counters.blocks + counters.dead;
        }
        let at_once = blocks == 0;
        let (auto, asked) = (!state.repairs.settings.no_rebalance, state.repairs.balance_now);
        let (most, slack) = (self.config.rebalance_groups, if asked || at_once { 0 } else { 20 });
        let moved = self.edit_members(state, now, |table, _| {
            let away = table.evade();
            let even = if auto || asked { table.balance(most, slack, asked, at_once) } else { 0 };
            // Others move when these have.
            let busy = table.groups().any(|(_, _, group)| !group.moving_to.is_empty());
            Ok((away, even, busy))
        })?;
        if asked && moved.1 == 0 && !moved.2 {
            state.repairs.balance_now = false;
        }
        Ok(())
    }
}

/// What sessions do, at the data servers and here.
fn top(state: &State) -> Vec<SessionTop> {
    let mut top: std::collections::BTreeMap<u64, SessionTop> = std::collections::BTreeMap::new();
    let entry = |session: u64| SessionTop {
        session: SessionId(session),
        who: None,
        ops: 0,
        load: torchfs_proto::msg::block::SessionLoad { session, ..Default::default() },
    };
    for (id, session) in &state.sessions {
        let row = top.entry(id.0).or_insert_with(|| entry(id.0));
        row.who = Some(session.who.clone());
        row.ops = session.ops;
    }
    for load in state.members.session_loads() {
        let row = top.entry(load.session).or_insert_with(|| entry(load.session));
        row.load.gets += load.gets;
        row.load.puts += load.puts;
        row.load.read_bytes += load.read_bytes;
        row.load.written_bytes += load.written_bytes;
    }
    top.into_values().collect()
}

fn unknown(server: ServerId) -> Fault {
    Fault::new(Code::NotFound, format!("there is no data server {server}"))
        .next("`torchfs servers` lists them")
}
