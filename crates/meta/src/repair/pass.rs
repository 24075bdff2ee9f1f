//! A pass: walks all block records once for the dirty groups that are most at risk, and has what they lack pulled.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::Duration;

use futures_util::future::join_all;
use torchfs_proto::layout::{Group, ServerState};
use torchfs_proto::msg::block::{PIECES_MAX, PULL_MAX, PullItem};
use torchfs_proto::msg::meta::BadPiece;
use torchfs_proto::record::Block;
use torchfs_proto::{BlockId, Code, Fault, Result, ServerId, VolumeId, key};

use super::{PieceAt, Pulled, RepairPeers, Wait, pull_item};
use crate::metrics;
use crate::server::within;
use crate::service::{Meta, State};
use crate::table::{Dirt, GroupAt};

/// Records that one step reads at most.
const SCAN_MAX: usize = 8_192;

/// A pass under way.
pub(super) struct Pass {
    groups: BTreeMap<GroupAt, Checked>,
    volumes: Vec<VolumeId>,
    /// The next key to look at in the first of these volumes.
    at: Option<Vec<u8>>,
    done: u64,
    total: u64,
}

/// A group as it was when the pass began, and what was found since.
#[derive(Clone, Copy, Debug)]
struct Checked {
    version: u32,
    dirt: Dirt,
    failed: bool,
    /// A server of the target was not there at some time.
    lacks: bool,
}

/// A block to look at.
struct Work {
    volume: VolumeId,
    id: BlockId,
    record: Block,
    at: GroupAt,
    /// Its pieces and where they belong, as far as those servers are there.
    pieces: Vec<(u8, ServerId)>,
}

/// One call for one server.
struct Call {
    server: ServerId,
    items: Vec<PullItem>,
}

impl Pass {
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.done.min(self.total), self.total)
    }
}

impl Meta {
    /// A part of the present pass, or the beginning of the next one. Answers whether there was something to do.
    pub(super) async fn pass_step(&self, peers: &dyn RepairPeers) -> bool {
        {
            let mut state = self.state.lock();
            if state.repairs.pass.is_none() && !self.begin_pass(&mut state) {
                return false;
            }
        }
        match self.pass_part(peers).await {
            Ok(true) => {}
            Ok(false) => {
                let mut state = self.state.lock();
                if let Err(fault) = self.end_pass(&mut state) {
                    tracing::warn!("a pass of repair cannot be noted: {fault}");
                }
            }
            Err(fault) => {
                tracing::warn!("a pass of repair is held up: {fault}");
                self.state.lock().repairs.pass = None;
                return false;
            }
        }
        true
    }

    /// Chooses the dirty groups that survive the fewest further losses.
    fn begin_pass(&self, state: &mut State) -> bool {
        let now = self.clock.now();
        let table = &state.members.table;
        let changes = state.repairs.changes;
        let waits = |at: &GroupAt, group: &Group| match state.repairs.waits.get(at) {
            Some((version, _)) if *version != group.version => false,
            Some((_, Wait::Until(until))) => now < *until,
            Some((_, Wait::Change(seen))) => *seen == changes,
            None => false,
        };
        let dirty: Vec<_> =
            table.groups().filter(|(at, _, group)| group.dirty && !waits(at, group)).collect();
        let Some(least) = dirty.iter().map(|(_, layout, group)| table.margin(layout, group)).min() else {
            return false;
        };
        let mut groups = BTreeMap::new();
        for (at, layout, group) in dirty {
            if table.margin(layout, group) == least {
                groups.insert(
                    at,
                    Checked { version: group.version, dirt: table.dirt(at), failed: false, lacks: false },
                );
            }
        }
        state.repairs.lost.retain(|_, at| !groups.contains_key(at));
        let volumes: Vec<VolumeId> = state.volumes.keys().copied().collect();
        let blocks = |volume: &VolumeId| self.view(*volume).counters().map_or(0, |counters| counters.blocks);
        let total = volumes.iter().map(blocks).sum();
        state.repairs.pass = Some(Pass { groups, volumes, at: None, done: 0, total });
        true
    }

    /// Looks at the next blocks. Answers whether more follow.
    async fn pass_part(&self, peers: &dyn RepairPeers) -> Result<bool> {
        let (groups, volume, from) = {
            let state = self.state.lock();
            let Some(pass) = &state.repairs.pass else { return Ok(false) };
            let Some(volume) = pass.volumes.first().copied() else { return Ok(false) };
            let groups: HashSet<GroupAt> = pass.groups.keys().copied().collect();
            let lengths: HashMap<_, _> =
                state.members.table.layouts.values().map(|layout| (layout.id, layout.clone())).collect();
            ((groups, lengths), volume, pass.at.clone())
        };
        let (groups, layouts) = groups;
        // The records are read without the lock; what is done about them is decided under it.
        let space = key::space(volume, key::Space::Block);
        let mut found: Vec<(BlockId, Block, GroupAt)> = Vec::new();
        let (mut seen, mut next) = (0, None);
        let view = self.view(volume);
        view.scan(
            &from.unwrap_or_else(|| space.clone()),
            &key::after(&space),
            false,
            &mut |at, block: Block| {
                if seen >= SCAN_MAX || found.len() >= self.config.repair_blocks.max(1) {
                    next = Some(at.to_vec());
                    return ControlFlow::Break(());
                }
                seen += 1;
                if let Some(id) = key::Parts::of(at).and_then(|parts| parts.block_at(0))
                    && let Some(layout) = layouts.get(&block.layout)
                {
                    let group = (block.layout, layout.group_of(id) as u32);
                    if groups.contains(&group) {
                        found.push((id, block, group));
                    }
                }
                ControlFlow::Continue(())
            },
        )?;
        drop(view);
        self.look_at(peers, volume, found).await?;
        let mut state = self.state.lock();
        let Some(pass) = &mut state.repairs.pass else { return Ok(false) };
        pass.done += seen as u64;
        if next.is_none() {
            pass.volumes.remove(0);
        }
        pass.at = next;
        Ok(!pass.volumes.is_empty())
    }

    /// Asks for what is missing of these blocks and has it pulled.
    async fn look_at(
        &self,
        peers: &dyn RepairPeers,
        volume: VolumeId,
        found: Vec<(BlockId, Block, GroupAt)>,
    ) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        let (work, addrs) = {
            let mut state = self.state.lock();
            let addrs = state.members.addresses();
            (self.aimed(&mut state, volume, found), addrs)
        };
        let mut questions: BTreeMap<ServerId, Vec<PieceAt>> = BTreeMap::new();
        for block in &work {
            for (piece, server) in &block.pieces {
                questions.entry(*server).or_default().push((block.id, *piece));
            }
        }
        let asked = questions.into_iter().flat_map(|(server, pieces)| {
            let parts: Vec<Vec<PieceAt>> = pieces.chunks(PIECES_MAX).map(<[PieceAt]>::to_vec).collect();
            parts.into_iter().map(move |pieces| (server, pieces))
        });
        let calls = asked.map(|(server, pieces)| {
            let addr = addrs.get(&server).cloned().unwrap_or_default();
            async move { (server, within(limit, peers.missing(&addr, pieces)).await) }
        });
        let mut lacking: HashSet<(ServerId, BlockId, u8)> = HashSet::new();
        let mut silent: HashSet<ServerId> = HashSet::new();
        for (server, answer) in join_all(calls).await {
            match answer {
                Ok(pieces) => lacking.extend(pieces.into_iter().map(|(id, piece)| (server, id, piece))),
                Err(fault) => {
                    tracing::debug!(server = server.0, "repair waits: {fault}");
                    silent.insert(server);
                }
            }
        }
        let calls = {
            let mut state = self.state.lock();
            self.pulls(&mut state, &work, &addrs, &lacking, &silent)
        };
        let failed = self.pull_all(peers, calls, &addrs).await;
        let mut state = self.state.lock();
        self.take_in(&mut state, volume, work, &lacking, &silent, failed)
    }

    /// Where the pieces of these blocks belong now; groups whose servers are not there are noted.
    fn aimed(&self, state: &mut State, volume: VolumeId, found: Vec<(BlockId, Block, GroupAt)>) -> Vec<Work> {
        let now = self.clock.now();
        let mut work = Vec::new();
        let mut lacks = HashSet::new();
        for (id, record, at) in found {
            let table = &state.members.table;
            let Some((_, layout, group)) = table.group_of(record.layout, id) else { continue };
            let mut pieces = Vec::new();
            for (piece, server) in group.target().iter().take(layout.scheme.pieces(record.len)).enumerate() {
                let heard = table.servers.get(server).is_some_and(|s| s.state < ServerState::Down);
                match heard && state.repairs.is_sure(*server, now) {
                    true => pieces.push((piece as u8, *server)),
                    false => {
                        lacks.insert(at);
                    }
                }
            }
            work.push(Work { volume, id, record, at, pieces });
        }
        if let Some(pass) = &mut state.repairs.pass {
            for at in lacks {
                if let Some(checked) = pass.groups.get_mut(&at) {
                    checked.lacks = true;
                }
            }
        }
        work
    }

    /// The pulls that bring what is lacking.
    fn pulls(
        &self,
        state: &mut State,
        work: &[Work],
        addrs: &BTreeMap<ServerId, String>,
        lacking: &HashSet<(ServerId, BlockId, u8)>,
        silent: &HashSet<ServerId>,
    ) -> Vec<Call> {
        let mut by_server: BTreeMap<ServerId, Vec<PullItem>> = BTreeMap::new();
        for block in work {
            for (piece, server) in &block.pieces {
                if !lacking.contains(&(*server, block.id, *piece)) {
                    continue;
                }
                let lacks = |holder: ServerId, other: u8| {
                    lacking.contains(&(holder, block.id, other)) || silent.contains(&holder)
                };
                let item = pull_item(state, addrs, (block.id, &block.record), *piece, *server, &lacks);
                if let Some(item) = item {
                    by_server.entry(*server).or_default().push(item);
                }
            }
        }
        for (server, items) in &by_server {
            *state.repairs.missing.entry(*server).or_default() += items.len() as u64;
        }
        by_server.into_iter().map(|(server, items)| Call { server, items }).collect()
    }

    /// Has pieces pulled: every server at once, each in requests of bounded size. Answers what failed.
    async fn pull_all(
        &self,
        peers: &dyn RepairPeers,
        calls: Vec<Call>,
        addrs: &BTreeMap<ServerId, String>,
    ) -> HashMap<(ServerId, BlockId, u8), Fault> {
        let rate = self.repair_rate(&self.state.lock());
        let one = |call: Call| async move {
            let mut failed = HashMap::new();
            let addr = addrs.get(&call.server).cloned().unwrap_or_default();
            let most = self.config.pull_bytes.max(1);
            let mut items = call.items.into_iter().peekable();
            while items.peek().is_some() {
                let mut part: Vec<PullItem> = Vec::new();
                let mut bytes = 0;
                while let Some(item) = items.peek()
                    && part.len() < PULL_MAX
                    && (part.is_empty() || bytes + u64::from(item.block_len) <= most)
                {
                    bytes += u64::from(item.block_len);
                    part.extend(items.next());
                }
                // At this rate it takes that long; and it may have to wait for others.
                let slow = Duration::from_millis(bytes.saturating_mul(1_000).checked_div(rate).unwrap_or(0));
                let limit = Duration::from_millis(u64::from(self.config.pull_timeout_ms)) + slow;
                let names: Vec<PieceAt> = part.iter().map(|item| (item.block, item.piece)).collect();
                let homes: Vec<Option<ServerId>> = part.iter().map(|item| self.drained_home(item)).collect();
                let answer = within(limit, peers.pull(&addr, part, rate, limit)).await;
                self.pulled(call.server, &names, &homes, answer, &mut failed);
            }
            failed
        };
        join_all(calls.into_iter().map(one)).await.into_iter().flatten().collect()
    }

    /// The server that the piece leaves, if that is being emptied.
    fn drained_home(&self, item: &PullItem) -> Option<ServerId> {
        let state = self.state.lock();
        let table = &state.members.table;
        let (_, _, group) = table.group_of(item.layout, item.block)?;
        let home = group.servers.get(usize::from(item.piece)).copied()?;
        table.servers.get(&home).filter(|server| server.draining).map(|server| server.id)
    }

    fn pulled(
        &self,
        server: ServerId,
        names: &[PieceAt],
        homes: &[Option<ServerId>],
        answer: Result<Pulled>,
        failed: &mut HashMap<(ServerId, BlockId, u8), Fault>,
    ) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let repairs = &mut state.repairs;
        if let Some(missing) = repairs.missing.get_mut(&server) {
            *missing = missing.saturating_sub(names.len() as u64);
        }
        match answer {
            Ok(pulled) => {
                let stored = (names.len() as u64).saturating_sub(pulled.failed.len() as u64);
                repairs.stored(stored, pulled.bytes, now);
                metrics::repaired(stored, pulled.bytes);
                let done = |place: &usize| !pulled.failed.iter().any(|(other, _)| *other as usize == *place);
                for home in (0..homes.len()).filter(done).filter_map(|place| homes[place]) {
                    let (pieces, bytes) = repairs.moved.entry(home).or_default();
                    *pieces += 1;
                    *bytes += pulled.bytes / stored.max(1);
                }
                for (place, fault) in pulled.failed {
                    if let Some((id, piece)) = names.get(place as usize) {
                        failed.insert((server, *id, *piece), fault);
                    }
                }
            }
            Err(fault) => {
                tracing::debug!(server = server.0, "pieces are not pulled: {fault}");
                failed.extend(names.iter().map(|(id, piece)| ((server, *id, *piece), fault.clone())));
            }
        }
    }

    /// Notes what is home now: substitutes of such pieces are struck from the records.
    fn take_in(
        &self,
        state: &mut State,
        volume: VolumeId,
        work: Vec<Work>,
        lacking: &HashSet<(ServerId, BlockId, u8)>,
        silent: &HashSet<ServerId>,
        failed: HashMap<(ServerId, BlockId, u8), Fault>,
    ) -> Result<()> {
        let now = self.clock.now();
        let mut view = self.view(volume);
        let mut stale: HashSet<ServerId> = HashSet::new();
        for block in &work {
            let checked = state.repairs.pass.as_ref().and_then(|pass| pass.groups.get(&block.at)).copied();
            let Some(mut checked) = checked else { continue };
            let version = state.members.table.group(block.at).map(|group| group.version);
            let now_there = view.block(block.id)?;
            let mut home: Vec<u8> = Vec::new();
            for (piece, server) in &block.pieces {
                let place = (*server, block.id, *piece);
                match failed.get(&place) {
                    _ if silent.contains(server) => checked.failed = true,
                    Some(_) if now_there.is_none() => {}
                    Some(fault) => {
                        checked.failed = true;
                        if fault.code == Code::Gone {
                            state.repairs.lose(block.id, block.at);
                        }
                        tracing::debug!(block = %block.id, piece, server = server.0, "not repaired: {fault}");
                    }
                    None => home.push(*piece),
                }
            }
            if let Some(pass) = &mut state.repairs.pass {
                pass.groups.insert(block.at, checked);
            }
            match now_there {
                // It died meanwhile: what was pulled for it is left over.
                None => stale.extend(
                    block
                        .pieces
                        .iter()
                        .filter(|(piece, server)| lacking.contains(&(*server, block.id, *piece)))
                        .map(|(_, server)| *server),
                ),
                Some(mut record) if version == Some(checked.version) => {
                    let Some(substitutes) = record.substitutes.take() else { continue };
                    let (struck, left): (Vec<_>, Vec<_>) =
                        substitutes.into_iter().partition(|(piece, _)| home.contains(piece));
                    if !struck.is_empty() {
                        let target = state.members.table.group(block.at).map(|g| g.target().to_vec());
                        let target = target.unwrap_or_default();
                        let elsewhere = struck
                            .iter()
                            .filter(|(piece, server)| target.get(usize::from(*piece)) != Some(server));
                        stale.extend(elsewhere.map(|(_, server)| *server));
                        record.substitutes = (!left.is_empty()).then_some(left);
                        view.put(key::block(block.volume, block.id), &record);
                    }
                }
                Some(_) => {}
            }
        }
        if !view.is_clean() {
            view.frees = true;
            self.order(state, view, now)?;
        }
        if !stale.is_empty() {
            self.edit_members(state, now, |table, _| {
                stale.iter().for_each(|server| table.mark_stale(*server));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The walk is over: groups in which nothing is missing are clean, and where they were moving to.
    fn end_pass(&self, state: &mut State) -> Result<()> {
        let now = self.clock.now();
        let Some(pass) = state.repairs.pass.take() else { return Ok(()) };
        let retry = now + Duration::from_millis(u64::from(self.config.repair_retry_ms));
        let mut clean = Vec::new();
        for (at, checked) in pass.groups {
            let table = &state.members.table;
            let Some(group) = table.group(at).filter(|group| group.version == checked.version) else {
                continue;
            };
            let heard = group.target().iter().all(|server| table.is_heard(*server));
            let sure = group.target().iter().all(|server| state.repairs.is_sure(*server, now));
            if checked.failed || (heard && !sure) {
                state.repairs.waits.insert(at, (group.version, Wait::Until(retry)));
            } else if !heard {
                state.repairs.waits.insert(at, (group.version, Wait::Change(state.repairs.changes)));
            } else if checked.lacks {
                // Whoever was away during the pass is back: no change will come that tells of it.
                state.repairs.waits.remove(&at);
            } else {
                clean.push((at, checked.dirt));
            }
        }
        if clean.is_empty() {
            return Ok(());
        }
        self.edit_members(state, now, |table, _| {
            clean.iter().for_each(|(at, dirt)| table.settle(*at, *dirt));
            Ok(())
        })?;
        clean.iter().for_each(|(at, _)| {
            state.repairs.waits.remove(at);
        });
        Ok(())
    }

    /// Has pieces that were reported bad replaced where they are. Answers whether there were any.
    pub(super) async fn heal_reported(&self, peers: &dyn RepairPeers) -> bool {
        let (calls, addrs) = {
            let mut state = self.state.lock();
            let addrs = state.members.addresses();
            let count = state.repairs.bad.len().min(PULL_MAX);
            let reports: Vec<BadPiece> = state.repairs.bad.drain(..count).collect();
            let mut by_server: BTreeMap<ServerId, Vec<PullItem>> = BTreeMap::new();
            for bad in reports.into_iter().filter(|bad| addrs.contains_key(&bad.server)) {
                let Ok(Some((_, record))) = self.find_block(&state, bad.block) else { continue };
                let table = &state.members.table;
                let Some((_, _, group)) = table.group_of(record.layout, bad.block) else { continue };
                let substitutes = record.substitutes.as_deref().unwrap_or_default();
                if !table.holders_of(group, bad.piece, substitutes).contains(&bad.server) {
                    continue; // it does not belong there any more
                }
                let nobody = |_: ServerId, _: u8| false;
                let item = pull_item(&state, &addrs, (bad.block, &record), bad.piece, bad.server, &nobody);
                if let Some(item) = item {
                    by_server.entry(bad.server).or_default().push(PullItem { verify: true, ..item });
                }
            }
            let calls: Vec<Call> =
                by_server.into_iter().map(|(server, items)| Call { server, items }).collect();
            (calls, addrs)
        };
        if calls.is_empty() {
            return false;
        }
        let pulled: Vec<(ServerId, BlockId)> =
            calls.iter().flat_map(|call| call.items.iter().map(|item| (call.server, item.block))).collect();
        // What fails stays marked in its group; the next pass names it.
        self.pull_all(peers, calls, &addrs).await;
        let mut state = self.state.lock();
        // Blocks that died meanwhile: what was pulled for them is left over.
        let dead = |id: BlockId| !matches!(self.find_block(&state, id), Ok(Some(_)));
        let stale: HashSet<ServerId> =
            pulled.into_iter().filter(|(_, id)| dead(*id)).map(|(server, _)| server).collect();
        if !stale.is_empty() {
            let marked = self.edit_members(&mut state, self.clock.now(), |table, _| {
                stale.iter().for_each(|server| table.mark_stale(*server));
                Ok(())
            });
            if let Err(fault) = marked {
                tracing::warn!("servers with stale pieces cannot be marked: {fault}");
            }
        }
        true
    }
}
