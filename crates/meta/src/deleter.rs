//! The deleter: has dead blocks and the rest of dead ranges removed from the data servers.
//!
//! A block whose last reference went waits in a queue until nobody can still read it under an old lease, and until the
//! batch that declared it dead is durable. The range of a session that ended is purged of everything that neither a record
//! nor that queue names. A queue entry goes when every server that could hold something has said that it is gone.
//!
//! # Invariants
//! - Servers are told only what a durable batch declared dead; what is purged was unnamed by durable batches only.
//! - Nothing is held while a server is asked.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use torchfs_proto::layout::ServerState;
use torchfs_proto::record::{Block, DeadBlock, DeadRange};
use torchfs_proto::{BlockId, IdRange, Result, ServerId, VolumeId, key};

use crate::metrics;
use crate::server::within;
use crate::service::{Meta, State};

/// Ids of one purge; a longer range is purged in parts, so that what is kept fits a message.
const PURGE_IDS: u32 = 8_192;

/// Entries of the queue that one pass looks at.
const LOOK_MAX: usize = 16_384;

/// How the service reaches data servers.
pub trait BlockPeers: Send + Sync + 'static {
    /// Has these blocks deleted; answered when that is durable.
    fn delete<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>>;

    /// Has everything of a range deleted except these; answered when that is durable.
    fn purge<'a>(&'a self, addr: &'a str, range: IdRange, keep: Vec<BlockId>) -> BoxFuture<'a, Result<()>>;
}

/// A dead block with the servers that may hold it.
struct Due {
    at: Vec<u8>,
    id: BlockId,
    holders: Vec<ServerId>,
}

impl Meta {
    /// One pass: has deleted what is due, as far as servers are up. Answers how many entries are done with.
    pub async fn collect(&self, peers: &dyn BlockPeers) -> usize {
        let volumes: Vec<VolumeId> = self.state.lock().volumes.keys().copied().collect();
        let mut done = 0;
        for volume in volumes {
            done += self.collect_blocks(volume, peers).await;
            done += self.collect_range(volume, peers).await;
        }
        done
    }

    async fn collect_blocks(&self, volume: VolumeId, peers: &dyn BlockPeers) -> usize {
        let (due, addrs) = {
            let mut state = self.state.lock();
            match self.due_blocks(&mut state, volume) {
                Ok(due) => (due, state.members.addresses()),
                Err(fault) => {
                    tracing::warn!("the queue of dead blocks cannot be read: {fault}");
                    return 0;
                }
            }
        };
        if due.is_empty() {
            return 0;
        }
        let mut by_server: BTreeMap<ServerId, Vec<BlockId>> = BTreeMap::new();
        for block in &due {
            for holder in &block.holders {
                by_server.entry(*holder).or_default().push(block.id);
            }
        }
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        let calls = by_server.into_iter().map(|(server, blocks)| {
            let addr = addrs.get(&server);
            async move {
                let addr = addr?;
                match within(limit, peers.delete(addr, blocks)).await {
                    Ok(()) => Some(server),
                    Err(fault) => {
                        tracing::debug!(server = server.0, "dead blocks wait: {fault}");
                        None
                    }
                }
            }
        });
        let answered: HashSet<ServerId> = join_all(calls).await.into_iter().flatten().collect();
        let gone: Vec<Vec<u8>> = due
            .into_iter()
            .filter(|block| block.holders.iter().all(|holder| answered.contains(holder)))
            .map(|block| block.at)
            .collect();
        let count = gone.len();
        if count > 0 {
            let mut state = self.state.lock();
            let state = &mut *state;
            let mut view = self.view(volume);
            view.frees = true;
            let counted = view.count(|counters| counters.dead = counters.dead.saturating_sub(count as u64));
            gone.into_iter().for_each(|at| view.delete(at));
            let ordered = counted.and_then(|()| self.order(state, view, self.clock.now()));
            if let Err(fault) = ordered {
                tracing::warn!("deleted blocks cannot be noted: {fault}");
                return 0;
            }
            state.deleted += count as u64;
            metrics::deleted(count as u64);
        }
        count
    }

    /// Dead blocks whose time has come, whose death is durable and whose holders are up. Those of a server that is down stay in
    /// the queue and do not keep others: each pass goes on where the last one ended.
    fn due_blocks(&self, state: &mut State, volume: VolumeId) -> Result<Vec<Due>> {
        let now_ms = self.wall_ms();
        let head = key::space(volume, key::Space::DeadBlock);
        let to = key::dead_block(volume, now_ms + 1, BlockId::default());
        let from = state.deleted_upto.remove(&volume);
        let (mut due, mut next) = self.due_between(state, volume, from.as_ref().unwrap_or(&head), &to)?;
        if due.is_empty() && next.is_none() && from.is_some() {
            (due, next) = self.due_between(state, volume, &head, &to)?;
        }
        state.deleted_upto.extend(next.map(|next| (volume, next)));
        Ok(due)
    }

    /// The due ones of a part of the queue, and where to go on if there are more.
    fn due_between(
        &self,
        state: &State,
        volume: VolumeId,
        from: &[u8],
        to: &[u8],
    ) -> Result<(Vec<Due>, Option<Vec<u8>>)> {
        let view = self.view(volume);
        let durable = self.engine.durable();
        let table = &state.members.table;
        // Where groups have left servers that are still to be searched, pieces may be there too. The search takes them for pieces
        // in flight once nothing here names them. One that is down is searched when it comes back.
        let unsearched: Vec<ServerId> =
            table.servers.values().filter(|s| s.reconcile && table.is_heard(s.id)).map(|s| s.id).collect();
        let (mut due, mut looked, mut next) = (Vec::new(), 0, None);
        view.scan(from, to, false, &mut |at, dead: DeadBlock| {
            if due.len() >= self.config.delete_batch || looked >= LOOK_MAX {
                next = Some(at.to_vec());
                return ControlFlow::Break(());
            }
            looked += 1;
            if dead.born > durable {
                return ControlFlow::Continue(());
            }
            if let Some(id) = key::Parts::of(at).and_then(|parts| parts.block_at(8)) {
                let substitutes = dead.substitutes.unwrap_or_default();
                let mut holders = table.holders(id, dead.layout, &substitutes);
                holders.extend(&unsearched);
                holders.sort_unstable();
                holders.dedup();
                // Servers that are out are searched for what is left on them when they come back.
                holders.retain(|id| table.servers.get(id).is_some_and(|s| s.state != ServerState::Out));
                if holders.iter().all(|id| table.is_heard(*id)) {
                    due.push(Due { at: at.to_vec(), id, holders });
                }
            }
            ControlFlow::Continue(())
        })?;
        Ok((due, next))
    }

    /// Purges one dead range; it goes when every server there is has answered.
    async fn collect_range(&self, volume: VolumeId, peers: &dyn BlockPeers) -> usize {
        let found = {
            let state = self.state.lock();
            let expected = state.members.table.servers.values().filter(|s| s.state != ServerState::Out);
            let (expected, addrs) = (expected.count(), state.members.addresses());
            self.due_range(volume).map(|range| (range, addrs, expected))
        };
        let (range, addrs, servers) = match found {
            Ok((Some(range), addrs, servers)) => (range, addrs, servers),
            Ok((None, _, _)) => return 0,
            Err(fault) => {
                tracing::warn!("the queue of dead ranges cannot be read: {fault}");
                return 0;
            }
        };
        if addrs.len() < servers {
            return 0; // a server is down; the range waits for it
        }
        let parts = match self.kept_of(volume, range) {
            Ok(parts) => parts,
            Err(fault) => {
                tracing::warn!("the blocks of a dead range cannot be read: {fault}");
                return 0;
            }
        };
        if let Err(fault) = self.settled().await {
            tracing::debug!("a dead range waits: {fault}");
            return 0;
        }
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        for (part, keep) in parts {
            let calls = addrs.values().map(|addr| within(limit, peers.purge(addr, part, keep.clone())));
            for result in join_all(calls).await {
                if let Err(fault) = result {
                    tracing::debug!("a dead range waits: {fault}");
                    return 0;
                }
            }
        }
        let mut state = self.state.lock();
        let mut view = self.view(volume);
        view.frees = true;
        view.delete(key::dead_range(volume, range.first));
        match self.order(&mut state, view, self.clock.now()) {
            Ok(_) => 1,
            Err(fault) => {
                tracing::warn!("a purged range cannot be noted: {fault}");
                0
            }
        }
    }

    fn due_range(&self, volume: VolumeId) -> Result<Option<IdRange>> {
        let view = self.view(volume);
        let durable = self.engine.durable();
        let now_ms = self.wall_ms();
        let space = key::space(volume, key::Space::DeadRange);
        let mut found = None;
        view.scan(&space, &key::after(&space), false, &mut |_, dead: DeadRange| {
            if dead.born <= durable && dead.due_ms <= now_ms {
                found = Some(dead.ids);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
        Ok(found)
    }

    /// A dead range in parts, each with its blocks that must stay: those that records name, and those that wait for readers
    /// in the queue. The range's session is gone, so no more are added.
    fn kept_of(&self, volume: VolumeId, range: IdRange) -> Result<Vec<(IdRange, Vec<BlockId>)>> {
        let at = |counter| BlockId { counter, ..range.first };
        let end = range.first.counter + u64::from(range.count);
        let mut parts: Vec<(IdRange, Vec<BlockId>)> = (range.first.counter..end)
            .step_by(PURGE_IDS as usize)
            .map(|first| {
                let count = u32::try_from(end - first).unwrap_or(PURGE_IDS).min(PURGE_IDS);
                (IdRange { first: at(first), count }, Vec::new())
            })
            .collect();
        let mut keep = |id: BlockId| {
            let part = ((id.counter - range.first.counter) / u64::from(PURGE_IDS)) as usize;
            if let Some((_, keep)) = parts.get_mut(part) {
                keep.push(id);
            }
        };
        let (from, to) = (key::block(volume, range.first), key::block(volume, at(end)));
        self.view(volume).scan(&from, &to, false, &mut |at, _: Block| {
            key::Parts::of(at).and_then(|parts| parts.block_at(0)).into_iter().for_each(&mut keep);
            ControlFlow::Continue(())
        })?;
        // Last: a block goes from its record into the queue, never back.
        self.dead_blocks(volume, &mut |id| {
            if range.contains(id) {
                keep(id);
            }
        })?;
        Ok(parts)
    }

    /// Visits every block that waits to be deleted.
    pub(crate) fn dead_blocks(&self, volume: VolumeId, visit: &mut dyn FnMut(BlockId)) -> Result<()> {
        let space = key::space(volume, key::Space::DeadBlock);
        self.view(volume).scan(&space, &key::after(&space), false, &mut |at, _: DeadBlock| {
            key::Parts::of(at).and_then(|parts| parts.block_at(8)).into_iter().for_each(&mut *visit);
            ControlFlow::Continue(())
        })
    }
}
