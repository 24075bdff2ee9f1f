//! Compaction: a file that many small writes left in many small extents is rewritten when it has been quiet for a while.
//!
//! Extents that follow each other are read, put together as one block, and committed on the condition that exactly these
//! are still there; otherwise somebody wrote, and the work was in vain. Only done under the right to write that is held
//! anyway: it never takes a lease from anybody.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use torchfs_proto::extent::{Extent, NewBlock, RangeOp, Source};
use torchfs_proto::msg::meta::{COMMIT_RANGES_MAX, Commit, lease};
use torchfs_proto::{Ino, Result};

use crate::commit::source_of;
use crate::node::Inode;
use crate::{Vfs, metrics};

/// At least so many blocks become one.
const GROUP_MIN: usize = 4;
/// At most so many extents are named in one commit.
const GROUP_MAX: usize = COMMIT_RANGES_MAX / 2;

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

    pub(crate) fn may_compact(&self, node: &Inode) -> bool {
        let state = node.lock();
        !state.is_dirty()
            && !state.gone
            && state.recalling == 0
            && self.0.meta.holds(node.ino, lease::WRITE).is_some()
    }

    /// Brings the bytes of several extents into one block, in their order. What is written to the file meanwhile is not among
    /// them: the commit is made on the condition of these extents and no other.
    pub(crate) async fn merge(&self, node: &Arc<Inode>, group: Vec<Extent>) -> Result<NewBlock> {
        let asked = self.asked();
        let block = self.put_block(node, self.read_extents(&group).await?).await?;
        let mut at = 0;
        let mut ranges = Vec::new();
        for run in runs(&group) {
            let len = run.end - run.start;
            ranges.push(RangeOp::Write { offset: run.start, len, source: source_of(&block, at) });
            at += len as u32;
        }
        let commit = Commit {
            ino: node.ino,
            grant: 0,
            blocks: vec![block.clone()],
            ranges: ranges.clone(),
            mtime: None,
            kill_privileges: false,
            expect: Some(group),
            ends: None,
        };
        let (attr, _, mark) = self.send_commit(node, commit).await?;
        self.committed(node, asked, &ranges, attr, mark);
        Ok(block)
    }
}

/// Rows of extents, holes between them or not, that fit into one block and come from several.
fn groups(extents: &[Extent], most: u64) -> Vec<Vec<Extent>> {
    let mut groups = Vec::new();
    let mut group: Vec<Extent> = Vec::new();
    let mut len = 0;
    let mut close = |group: &mut Vec<Extent>| {
        let group = std::mem::take(group);
        if sources(&group) >= GROUP_MIN {
            groups.push(group);
        }
    };
    for extent in extents.iter().filter(|extent| extent.source != Source::Hole) {
        if len + extent.len > most || group.len() >= GROUP_MAX {
            close(&mut group);
            len = 0;
        }
        if extent.len < most {
            len += extent.len;
            group.push(extent.clone());
        } else {
            close(&mut group);
            len = 0;
        }
    }
    close(&mut group);
    groups
}

/// From how many blocks a read of these extents has to fetch; contents that sit inline count as one each.
fn sources(group: &[Extent]) -> usize {
    let mut blocks = HashSet::new();
    let inline = group
        .iter()
        .filter(|extent| match &extent.source {
            Source::Block { id, .. } => {
                blocks.insert(*id);
                false
            }
            _ => true,
        })
        .count();
    inline + blocks.len()
}

/// The ranges of the file that extents cover, neighbours joined.
fn runs(group: &[Extent]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for extent in group {
        match runs.last_mut() {
            Some(run) if run.end == extent.offset => run.end += extent.len,
            _ => runs.push(extent.offset..extent.offset + extent.len),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(offset: u64, len: u64) -> Extent {
        Extent { offset, len, source: Source::Inline(vec![0; len as usize].into()) }
    }

    #[test]
    fn extents_that_fit_a_block_are_gathered_over_holes() {
        let mut extents: Vec<Extent> = (0..6).map(|i| small(i * 10, 10)).collect();
        extents.push(small(1000, 10));
        extents.extend((0..9).map(|i| small(2000 + i * 10, 10)));
        let groups = groups(&extents, 50);
        let shape: Vec<(u64, usize)> = groups.iter().map(|group| (group[0].offset, group.len())).collect();
        assert_eq!(shape, [(0, 5), (50, 5), (2030, 5)]);
        assert_eq!(runs(&groups[1]), [50..60, 1000..1010, 2000..2030]);
    }

    #[test]
    fn what_lies_in_one_block_already_is_left_alone() {
        let source = |n: u32| Source::Block {
            id: torchfs_proto::BlockId { incarnation: 1, counter: 7 },
            offset: n * 10,
            block_len: 500,
            layout: torchfs_proto::LayoutId(1),
            substitutes: Vec::new(),
        };
        let extents: Vec<Extent> =
            (0..9).map(|n| Extent { offset: u64::from(n) * 20, len: 10, source: source(n) }).collect();
        assert!(groups(&extents, 500).is_empty());
    }
}
