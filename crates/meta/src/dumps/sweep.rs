//! After a restore: has every data server forget the blocks that the dump did not know, and finds pieces of those it knew.
//!
//! They were written after the dump was made. Their files are lost with the metadata that named them, and no session that
//! could still name them lives: restoring ended all sessions, and new ones get ids of a later incarnation only. So what
//! no record names and is of an earlier incarnation is dead for good, once the batches that unnamed it are durable.
//!
//! Groups may have moved since the dump, so that pieces of known blocks are on servers that the restored table does not
//! name. What is found there becomes a former place of its group: readers and repair look there from then on, until all is
//! at the group's target. In a group that is clean again all is there already, and what was found is left over.
//!
//! # Invariants
//! - Only ids of earlier incarnations than the restored store's are looked at, so nothing in flight is touched.
//! - A server counts as searched when it has answered for every piece; that is durable, and done once for each server, those
//!   that come later included.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::{BlockId, Code, Fault, Result, ServerId, key};

use super::DumpPeers;
use crate::metrics;
use crate::server::within;
use crate::service::Meta;

/// Pieces asked for at a time.
const PIECES: u32 = 4_096;
/// Pieces judged without letting others have the state.
const JUDGED: usize = 512;

impl Meta {
    /// Searches one data server that was not searched yet; whether there was one and it is done. One that cannot be searched
    /// does not hold up the others.
    pub async fn sweep(&self, peers: &dyn DumpPeers) -> bool {
        for (server, addr, first) in self.to_sweep() {
            match self.sweep_server(peers, server, &addr, first).await {
                Ok(deleted) => {
                    if deleted > 0 {
                        tracing::info!(
                            server = server.0,
                            "{deleted} blocks that were written after the restored dump are deleted"
                        );
                    }
                    return self.note_swept(server, deleted);
                }
                Err(fault) => {
                    tracing::debug!(server = server.0, "a server cannot be searched yet: {fault}");
                }
            }
        }
        false
    }

    /// The servers that are up and were not searched, with the first incarnation that is not looked at.
    fn to_sweep(&self) -> Vec<(ServerId, String, u32)> {
        let state = self.state.lock();
        let Some(restored) = state.dumps.restored.as_ref() else { return Vec::new() };
        let servers = state.members.servers().into_iter();
        let open = servers.filter(|server| server.up && !restored.swept.contains(&server.id));
        open.map(|server| (server.id, server.addr, restored.incarnation.0)).collect()
    }

    async fn sweep_server(
        &self,
        peers: &dyn DumpPeers,
        server: ServerId,
        addr: &str,
        first: u32,
    ) -> Result<u64> {
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        let (mut after, mut deleted, mut left) = (None, 0, false);
        loop {
            let (mut pieces, end) = within(limit, peers.pieces(addr, after, PIECES)).await?;
            after = pieces.last().map(|piece| (piece.block, piece.piece));
            let all = pieces.len();
            pieces.retain(|piece| piece.block.incarnation < first);
            let passed = pieces.len() < all;
            let mut old: Vec<BlockId> = pieces.iter().map(|piece| piece.block).collect();
            old.dedup();
            let unknown = self.unnamed(old)?;
            if !unknown.is_empty() {
                let gone: HashSet<BlockId> = unknown.iter().copied().collect();
                pieces.retain(|piece| !gone.contains(&piece.block));
                self.settled().await?;
                deleted += unknown.len() as u64;
                within(limit, peers.delete_blocks(addr, unknown)).await?;
            }
            for part in pieces.chunks(JUDGED) {
                left |= self.take_places(server, part)?;
            }
            if end || passed || after.is_none() {
                break;
            }
        }
        if left {
            self.edit_members(&mut self.state.lock(), self.clock.now(), |table, _| {
                table.mark_stale(server);
                Ok(())
            })?;
        }
        Ok(deleted)
    }

    /// Has the groups know that this server holds these pieces, where they do not. Answers whether some are left over.
    fn take_places(&self, server: ServerId, pieces: &[PieceInfo]) -> Result<bool> {
        let mut state = self.state.lock();
        let table = &state.members.table;
        if !table.servers.contains_key(&server) {
            return Err(Fault::new(Code::NotFound, format!("data server {server} was removed")));
        }
        let mut found = BTreeSet::new();
        let mut left = false;
        for piece in pieces {
            let Some((_, record)) = self.find_block(&state, piece.block)? else {
                left = true; // dead: whoever deletes it may not know of this server
                continue;
            };
            let Some((at, layout, group)) = table.group_of(record.layout, piece.block) else { continue };
            let substitutes = record.substitutes.as_deref().unwrap_or_default();
            if table.holders_of(group, piece.piece, substitutes).contains(&server) {
                continue;
            }
            match group.dirty && usize::from(piece.piece) < layout.scheme.pieces(record.len) {
                true => drop(found.insert((at, piece.piece))),
                false => left = true,
            }
        }
        if !found.is_empty() {
            left |= self.edit_members(&mut state, self.clock.now(), |table, _| {
                let noted = found.iter().filter(|(at, piece)| table.add_former(*at, (*piece, server)));
                Ok(noted.count() < found.len())
            })?;
        }
        Ok(left)
    }

    /// Those that no record of any volume names and that the deleter does not see to.
    fn unnamed(&self, mut blocks: Vec<BlockId>) -> Result<Vec<BlockId>> {
        let volumes: Vec<_> = self.state.lock().volumes.keys().copied().collect();
        for volume in volumes {
            let view = self.view(volume);
            let mut rest = BTreeSet::new();
            for block in blocks {
                if view.block(block)?.is_none() {
                    rest.insert(block);
                }
            }
            if !rest.is_empty() {
                self.dead_blocks(volume, &mut |id| {
                    rest.remove(&id);
                })?;
            }
            blocks = rest.into_iter().collect();
        }
        Ok(blocks)
    }

    fn note_swept(&self, server: ServerId, deleted: u64) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(mut restored) = state.dumps.restored.clone() else { return false };
        restored.swept.push(server);
        let mut view = self.view(key::CLUSTER);
        view.frees = true;
        view.put(key::restored(), &restored);
        if let Err(fault) = self.order(state, view, self.clock.now()) {
            tracing::warn!("a searched server cannot be noted: {fault}");
            return false;
        }
        state.dumps.restored = Some(restored);
        state.deleted += deleted;
        metrics::deleted(deleted);
        true
    }
}
