//! After a restore: has every data server forget the blocks that the dump did not know.
//!
//! They were written after the dump was made. Their files are lost with the metadata that named them, and no session that
//! could still name them lives: restoring ended all sessions, and new ones get ids of a later incarnation only. So what
//! no record names and is of an earlier incarnation is dead for good, once the batches that unnamed it are durable.
//!
//! # Invariants
//! - Only ids of earlier incarnations than the restored store's are looked at, so nothing in flight is touched.
//! - A server counts as searched when it has answered for every piece; that is durable, and done once for each server, those
//!   that come later included.

use std::collections::BTreeSet;
use std::time::Duration;

use torchfs_proto::{BlockId, Result, ServerId, key};

use super::DumpPeers;
use crate::metrics;
use crate::server::within;
use crate::service::Meta;

/// Pieces asked for at a time.
const PIECES: u32 = 4_096;

impl Meta {
    /// Searches one data server that was not searched yet; whether there was one and it is done. One that cannot be searched
    /// does not hold up the others.
    pub async fn sweep(&self, peers: &dyn DumpPeers) -> bool {
        for (server, addr, first) in self.to_sweep() {
            match self.sweep_server(peers, &addr, first).await {
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

    async fn sweep_server(&self, peers: &dyn DumpPeers, addr: &str, first: u32) -> Result<u64> {
        let limit = Duration::from_millis(u64::from(self.config.peer_timeout_ms));
        let (mut after, mut deleted) = (None, 0);
        loop {
            let (pieces, end) = within(limit, peers.pieces(addr, after, PIECES)).await?;
            after = pieces.last().map(|piece| (piece.block, piece.piece));
            let mut old: Vec<BlockId> = pieces.iter().map(|piece| piece.block).collect();
            let all = old.len();
            old.retain(|block| block.incarnation < first);
            let passed = old.len() < all;
            old.dedup();
            let unknown = self.unnamed(old)?;
            if !unknown.is_empty() {
                self.settled().await?;
                deleted += unknown.len() as u64;
                within(limit, peers.delete_blocks(addr, unknown)).await?;
            }
            if end || passed || after.is_none() {
                return Ok(deleted);
            }
        }
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
