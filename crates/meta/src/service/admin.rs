//! Requests of data servers and people: heartbeats, status, sessions, checks, collection.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::{Scheme, ServerInfo};
use torchfs_proto::msg::meta::{Done, MetaReport, Op, RepairReport, StandbyReport, StatusReport, VolumeOp};
use torchfs_proto::record::Block;
use torchfs_proto::{BlockId, Code, Fault, Result, Seq, SessionId, VolumeId, key};

use super::sessions::Ending;
use super::{Meta, State};
use crate::namespace;

/// Block records in one answer, and blocks in one question.
const BLOCKS_MAX: usize = 4_096;

impl Meta {
    /// Serves what needs no session; `None` for all else.
    pub(super) fn admin(&self, state: &mut State, op: &Op, now: Instant) -> Result<Option<Done>> {
        let done = match op {
            Op::OpenSession(who) => self.open_session(state, who, now)?,
            Op::Volume(op) => self.volume_op(state, op, now)?,
            Op::Placement => Done::Placement(state.members.placement()),
            Op::Status => Done::Status(self.status(state, now)?),
            Op::MetaStatus => Done::MetaStatus(self.meta_status()),
            Op::Sessions => Done::Sessions(self.session_reports(state, now)?),
            Op::Evict { session } => {
                if !state.sessions.contains_key(session) {
                    return Err(Fault::new(Code::NotFound, format!("there is no session {session}"))
                        .next("`torchfs sessions` lists them"));
                }
                self.end_session(state, *session, Ending::Evicted)?;
                Done::Ok
            }
            Op::Check { cursor } => self.check(state, cursor)?,
            Op::KnownBlocks { blocks } => {
                if blocks.len() > BLOCKS_MAX {
                    return Err(Code::TooMany.into());
                }
                let mut known = Vec::new();
                for id in blocks {
                    for volume in state.volumes.keys() {
                        if self.view(*volume).block(*id)?.is_some() {
                            known.push(*id);
                        }
                    }
                }
                Done::Known(known)
            }
            Op::Strays { server, pieces } => {
                if pieces.len() > BLOCKS_MAX {
                    return Err(Code::TooMany.into());
                }
                Done::Strays(self.strays(state, *server, pieces)?)
            }
            Op::ListBlocks { after, limit } => self.list_blocks(state, *after, *limit)?,
            Op::ListFiles { cursor, limit } => self.list_files(state, cursor, *limit)?,
            Op::ListNames { volume, folder, after, limit } => {
                self.list_names(state, *volume, *folder, after, *limit)?
            }
            Op::Collect => {
                let mut waiting = 0;
                for volume in state.volumes.keys() {
                    let view = self.view(*volume);
                    let counters = view.counters()?;
                    waiting += counters.dead;
                    let ranges = key::space(*volume, key::Space::DeadRange);
                    waiting +=
                        view.list::<torchfs_proto::record::DeadRange>(&ranges, BLOCKS_MAX)?.len() as u64;
                }
                // Whatever is in a volume that is removed dies with it, and then its own records.
                for volume in state.volumes.values().filter(|volume| volume.removed) {
                    waiting += self.view(volume.id).counters()?.blocks + 1;
                }
                waiting += state.chores.len() as u64;
                waiting += state.dumps.unswept(&state.members.servers()) as u64;
                Done::Collected { deleted: state.deleted, waiting }
            }
            Op::Dump { cursor } => self.dump_cursor(state, cursor, now)?,
            op => return self.cluster_op(state, op, now),
        };
        Ok(Some(done))
    }

    /// The batch that an answer outside of sessions rests on, whatever it is; `before` is the last one before the request.
    pub(super) fn admin_rests(&self, state: &State, op: &Op, before: Seq) -> Seq {
        let ordered = self.engine.ordered();
        match op {
            // Rare, and meant to last: they rest on all that others asked for before, refusals too.
            Op::OpenSession(_)
            | Op::Volume(VolumeOp::Create { .. } | VolumeOp::Set { .. } | VolumeOp::Remove { .. })
            | Op::Evict { .. }
            | Op::Drain { .. }
            | Op::RemoveServer { .. }
            | Op::ReportBad { .. } => ordered,
            Op::Placement => state.members.placed,
            // Who reports bad pieces forgets them when it is answered; who asks again for its number must not lose it.
            Op::Heartbeat(beat) if !beat.bad.is_empty() => ordered,
            Op::Heartbeat(beat) if ordered == before => state.members.joined(beat),
            // Reports show what is ordered, also while the log stands still; a heartbeat as a rule changes nothing.
            _ if ordered > before => ordered,
            _ => Seq(0),
        }
    }

    /// Figures of a volume.
    pub(super) fn volume_use(&self, state: &State, volume: VolumeId) -> Result<Done> {
        let counters = self.view(volume).counters()?;
        let scheme =
            state.volumes.get(&volume).map_or(Scheme::Replicas(1), |v| self.volume_layout(state, v).1);
        let (total, free) = state.members.room(scheme);
        let meta_free = self.engine.space()?.free;
        Ok(Done::Use(namespace::volume_use(&counters, total, free, meta_free)))
    }

    pub(super) fn status(&self, state: &State, now: Instant) -> Result<StatusReport> {
        let (mut inodes, mut blocks, mut bytes, mut dead) = (0, 0, 0, 0);
        for volume in state.volumes.keys() {
            let counters = self.view(*volume).counters()?;
            inodes += counters.inodes;
            blocks += counters.blocks;
            bytes += counters.bytes;
            dead += counters.dead;
        }
        let stats = self.engine.stats();
        let suspect = Duration::from_millis(u64::from(self.config.server_suspect_ms));
        let idle = state.repairs.layouts.idle();
        let servers = state.members.report(suspect, &state.repairs.missing, &idle, now);
        let repair = self.repair_report(state, now);
        let mut warnings = Vec::new();
        match servers.len() {
            0 => warnings.push("no data server has joined: nothing can be written".to_string()),
            1 => warnings.push("there is one data server: its loss is the loss of the data".to_string()),
            _ => {}
        }
        warnings.extend(self.server_warnings(state, &servers, &repair));
        let space = self.engine.space()?;
        if space.free < space.reserve {
            warnings.push("the metadata disk is full: only deleting works".to_string());
        }
        if state.grace.is_some() {
            warnings.push("the metadata service waits for sessions to report after its start".to_string());
        }
        let dumps = self.dump_report(state, &mut warnings);
        Ok(StatusReport {
            cluster: self.engine.cluster(),
            incarnation: self.engine.incarnation(),
            inodes,
            blocks,
            bytes,
            dead,
            sessions: state.sessions.len() as u64,
            servers,
            meta_bytes: stats.log_bytes + stats.replica_bytes,
            meta_free: space.free,
            placement: state.members.version(),
            redundancy: self.default_scheme(state).to_string(),
            warnings,
            dumps: Some(dumps),
            volumes: state.volumes.values().map(|volume| volume.name.clone()).collect(),
            repair: Some(repair),
        })
    }

    fn meta_status(&self) -> MetaReport {
        let stats = self.engine.stats();
        let standby = |peer: torchfs_engine::Peer| StandbyReport {
            addr: peer.address,
            applied: peer.applied,
            replica_bytes: peer.replica_bytes,
            silent_ms: peer.silent_ms,
        };
        MetaReport {
            cluster: self.engine.cluster(),
            leader: self.config.address.clone(),
            since: self.since,
            fence: self.engine.fence(),
            incarnation: self.engine.incarnation(),
            engine: self.config.engine.clone(),
            ordered: stats.ordered,
            durable: stats.durable,
            applied: stats.applied,
            replica_bytes: stats.replica_bytes,
            replica_keys: stats.replica_keys,
            overlay_bytes: stats.overlay_bytes,
            log_bytes: stats.log_bytes,
            state_bytes: stats.state_bytes,
            standbys: self.engine.peers().into_iter().map(standby).collect(),
        }
    }

    /// What needs attention about servers and redundancy.
    fn server_warnings(&self, state: &State, servers: &[ServerInfo], repair: &RepairReport) -> Vec<String> {
        let mut warnings = Vec::new();
        for server in servers.iter().filter(|server| !server.up) {
            warnings.push(format!("data server {} at {} is {}", server.id, server.addr, server.state));
        }
        for server in servers {
            for disk in server.disks.iter().filter(|disk| !disk.works()) {
                let (path, fault) = (&disk.path, &disk.fault);
                let what = if disk.silent_ms.is_some() { "hangs" } else { "failed" };
                warnings.push(format!("disk {path} of data server {} {what}: {fault}", server.id));
            }
        }
        let full: Vec<String> =
            servers.iter().filter(|server| server.is_full()).map(|server| server.id.to_string()).collect();
        if !full.is_empty() {
            let (who, take) = match &full[..] {
                [one] => (format!("data server {one} is"), "takes"),
                several => (format!("data servers {} are", several.join(", ")), "take"),
            };
            warnings.push(format!(
                "{who} full and {take} no more data; delete files, or add a data server and run `torchfs rebalance`"
            ));
        }
        if repair.lost > 0 {
            warnings.push(format!(
                "{} blocks have too few pieces left to be read; `torchfs fsck --data` names them",
                repair.lost
            ));
        }
        if repair.at_risk > 0 {
            let groups = repair.at_risk;
            warnings
                .push(format!("{groups} placement groups survive no further loss until they are repaired"));
        }
        for volume in state.volumes.values().filter(|volume| !volume.removed) {
            let (asked, (layout, is)) = (self.policy_of(volume).0, self.volume_layout(state, volume));
            let Some(asked) = asked.filter(|_| !servers.is_empty()) else { continue };
            if layout.0 == 0 {
                warnings.push(format!(
                    "volume {} asks for {asked}: writing waits until {} data servers are up",
                    volume.name,
                    asked.width()
                ));
            } else if asked != is {
                warnings.push(format!(
                    "volume {} asks for {asked}, but there are servers for {is} only",
                    volume.name
                ));
            }
        }
        warnings
    }

    /// The redundancy of new blocks of the default volume.
    fn default_scheme(&self, state: &State) -> Scheme {
        let volume = state.volumes.values().find(|volume| volume.name == self.config.volume);
        volume.map_or(Scheme::Replicas(1), |volume| self.volume_layout(state, volume).1)
    }

    fn list_blocks(&self, state: &State, after: Option<BlockId>, limit: u32) -> Result<Done> {
        let limit = (limit as usize).clamp(1, BLOCKS_MAX);
        let mut blocks: Vec<NewBlock> = Vec::new();
        let mut end = true;
        for volume in state.volumes.keys() {
            let view = self.view(*volume);
            let space = key::space(*volume, key::Space::Block);
            let mut from = after.map_or(space.clone(), |id| key::block(*volume, id));
            if after.is_some() {
                from.push(0);
            }
            let mut taken = 0;
            view.scan(&from, &key::after(&space), false, &mut |at, block: Block| {
                if taken == limit {
                    end = false;
                    return ControlFlow::Break(());
                }
                taken += 1;
                if let Some(id) = key::Parts::of(at).and_then(|parts| parts.block_at(0)) {
                    blocks.push(NewBlock {
                        id,
                        len: block.len,
                        layout: block.layout,
                        substitutes: block.substitutes.unwrap_or_default(),
                        stored: block.stored,
                        servers: Vec::new(),
                    });
                }
                ControlFlow::Continue(())
            })?;
        }
        blocks.sort_by_key(|block| block.id);
        end &= blocks.len() <= limit;
        blocks.truncate(limit);
        Ok(Done::Blocks { blocks, end })
    }

    /// The sessions there are, for tests and pages.
    pub fn session_ids(&self) -> Vec<SessionId> {
        self.state.lock().sessions.keys().copied().collect()
    }
}
