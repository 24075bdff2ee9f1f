//! Compaction: a file that many small writes left in many small extents is rewritten when it has been quiet for a while.
//!
//! Neighbouring extents are read, put together as one block, and committed on the condition that exactly these extents
//! are still there; otherwise somebody wrote, and the work was in vain. Only done under the right to write that is held
//! anyway: it never takes a lease from anybody.

use std::sync::Arc;

use torchfs_proto::extent::{Extent, RangeOp, Source};
use torchfs_proto::msg::meta::{Commit, lease};
use torchfs_proto::{Ino, Result};

use crate::commit::source_of;
use crate::node::Inode;
use crate::{Vfs, metrics};

/// At least so many extents become one.
const GROUP_MIN: usize = 4;

impl Vfs {
    /// Begins to compact the fragmented files that have been quiet for long enough.
    pub(crate) fn compact_quiet(&self) {
        let marked: Vec<Ino> = self.0.fragmented.lock().iter().copied().collect();
        for ino in marked {
            let node = self.find_node(ino);
            let quiet = match &node {
                Some(node) => match &node.lock().file {
                    Some(file) => {
                        !file.is_dirty() && file.quiet_since.elapsed() >= self.0.config.compact_after
                    }
                    None => true,
                },
                None => true,
            };
            if !quiet {
                continue;
            }
            self.0.fragmented.lock().remove(&ino);
            if let Some(node) = node {
                let vfs = self.clone();
                self.0.meta.spawn(async move {
                    if let Err(fault) = vfs.compact(&node).await {
                        tracing::debug!(ino = %node.ino, %fault, "compaction was given up");
                    }
                });
            }
        }
    }

    async fn compact(&self, node: &Arc<Inode>) -> Result<()> {
        let most = u64::from(self.0.meta.info().volume.block_size);
        let mut at = 0;
        while self.may_compact(node) {
            let page = self.ask_extents(node.ino, at..u64::MAX).await?;
            for group in groups(&page.extents, most) {
                let _turn = node.turn.lock().await;
                if !self.may_compact(node) {
                    return Ok(());
                }
                self.merge(node, group).await?;
                ::metrics::counter!(metrics::COMPACTIONS).increment(1);
            }
            at = page.upto;
            if at >= page.size {
                return Ok(());
            }
        }
        Ok(())
    }

    fn may_compact(&self, node: &Inode) -> bool {
        let state = node.lock();
        !state.is_dirty()
            && !state.gone
            && state.recalling == 0
            && self.0.meta.holds(node.ino, lease::WRITE).is_some()
    }

    /// Makes one extent of several.
    async fn merge(&self, node: &Arc<Inode>, group: Vec<Extent>) -> Result<()> {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return Ok(()) };
        let range = first.offset..last.offset + last.len;
        let asked = self.asked();
        let parts = self.read_node(node, range.clone(), None).await?;
        let len = range.end - range.start;
        if parts.iter().map(|part| part.len() as u64).sum::<u64>() != len {
            return Ok(());
        }
        let block = self.put_block(parts).await?;
        let ranges = vec![RangeOp::Write { offset: range.start, len, source: source_of(&block, 0) }];
        let commit = Commit {
            ino: node.ino,
            grant: 0,
            blocks: vec![block],
            ranges: ranges.clone(),
            mtime: None,
            kill_privileges: false,
            expect: Some(group),
        };
        let (attr, _, mark) = self.send_commit(node, commit).await?;
        self.committed(node, asked, &ranges, attr, mark);
        Ok(())
    }
}

/// Rows of neighbouring extents that fit into one block and are worth it.
fn groups(extents: &[Extent], most: u64) -> Vec<Vec<Extent>> {
    let mut groups = Vec::new();
    let mut group: Vec<Extent> = Vec::new();
    let mut len = 0;
    let mut close = |group: &mut Vec<Extent>| {
        if group.len() >= GROUP_MIN {
            groups.push(std::mem::take(group));
        }
        group.clear();
    };
    for extent in extents {
        let follows = group.last().is_none_or(|last| last.offset + last.len == extent.offset);
        if extent.source == Source::Hole || !follows || len + extent.len > most {
            close(&mut group);
            len = 0;
        }
        if extent.source != Source::Hole && extent.len < most {
            len += extent.len;
            group.push(extent.clone());
        }
    }
    close(&mut group);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(offset: u64, len: u64) -> Extent {
        Extent { offset, len, source: Source::Inline(vec![0; len as usize].into()) }
    }

    #[test]
    fn only_neighbours_that_fit_a_block_are_merged() {
        let mut extents: Vec<Extent> = (0..6).map(|i| small(i * 10, 10)).collect();
        extents.push(small(1000, 10));
        extents.extend((0..9).map(|i| small(2000 + i * 10, 10)));
        let groups = groups(&extents, 50);
        let shape: Vec<(u64, usize)> = groups.iter().map(|group| (group[0].offset, group.len())).collect();
        assert_eq!(shape, [(0, 5), (2000, 5), (2050, 4)]);
    }
}
