//! Restripe: content that is stored otherwise than its file's policy says is written again, through the way of compaction.
//!
//! Neighbouring extents are read, put as one block under the policy's layout, and committed on the condition that exactly these
//! are still there; programs see nothing of it. Files share blocks (copies made with copy_file_range): what was written
//! again for one file is remembered, and the next file that points to the same bytes is pointed to the new block instead of
//! getting one of its own.
//!
//! # Invariants
//! - What is remembered is a hint: the service refuses a commit that names a block which is gone, and then bytes are written.
//! - The memory is bounded by `MOVED_MAX`; beyond it the oldest is forgotten, and sharing with it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use torchfs_proto::extent::{Extent, NewBlock, RangeOp, Source};
use torchfs_proto::msg::meta::Commit;
use torchfs_proto::{BlockId, Code, Fault, Ino, LayoutId, Result};

use crate::commit::source_of;
use crate::node::Inode;
use crate::{Vfs, metrics};

/// Most extents that are rewritten with one commit.
const GROUP_MAX: usize = 256;
/// Extents that are remembered with where their bytes are now.
const MOVED_MAX: usize = 65_536;

impl Vfs {
    /// How many bytes of a file are stored by another layout than its policy says.
    pub(crate) async fn otherwise(&self, node: &Arc<Inode>) -> Result<u64> {
        self.write_back(node).await;
        let layout = self.layout(self.layout_of(node)).await?.id;
        let (mut at, mut bytes) = (0, 0);
        loop {
            let page = self.ask_extents(node.ino, at..u64::MAX).await?;
            bytes += page.extents.iter().filter(|e| is_otherwise(e, layout)).map(|e| e.len).sum::<u64>();
            at = page.upto;
            if at >= page.size {
                return Ok(bytes);
            }
        }
    }

    /// Writes about so many bytes again of what is stored by another layout than the file's policy says.
    pub(crate) async fn restripe(&self, ino: Ino, most: u64) -> Result<()> {
        let node = self.node(ino);
        self.open_data(&node, true).await?;
        self.write_back(&node).await;
        let block_size = u64::from(self.0.meta.info().volume.block_size);
        let layout = self.layout(self.layout_of(&node)).await?.id;
        let (mut at, mut done) = (0, 0);
        loop {
            let page = self.ask_extents(ino, at..u64::MAX).await?;
            let (known, new): (Vec<Extent>, Vec<Extent>) = {
                let moved = self.0.moved.lock();
                let others = page.extents.into_iter().filter(|e| is_otherwise(e, layout));
                others.partition(|extent| moved.find(extent, layout).is_some())
            };
            for group in rows(&known, u64::MAX) {
                let (vfs, node) = (self.clone(), node.clone());
                self.finish(async move { vfs.point(&node, group, layout).await }).await?;
            }
            for group in rows(&new, block_size) {
                if done >= most {
                    return Ok(());
                }
                done += group.iter().map(|extent| extent.len).sum::<u64>();
                let (vfs, node) = (self.clone(), node.clone());
                // A part that was begun is finished: our own extents must follow the commit.
                self.finish(async move { vfs.rewrite(&node, group).await }).await?;
            }
            at = page.upto;
            if at >= page.size {
                return Ok(());
            }
        }
    }

    /// Points extents to where their bytes were written again for another file.
    async fn point(&self, node: &Arc<Inode>, group: Vec<Extent>, layout: LayoutId) -> Result<()> {
        let _turn = self.quiet_turn(node).await;
        self.may_rewrite(node)?;
        let asked = self.asked();
        let ranges: Option<Vec<RangeOp>> = {
            let moved = self.0.moved.lock();
            let range = |extent: &Extent| {
                let source = moved.find(extent, layout)?;
                Some(RangeOp::Write { offset: extent.offset, len: extent.len, source })
            };
            group.iter().map(range).collect()
        };
        // Forgotten meanwhile.
        let Some(ranges) = ranges else { return self.remake(node, group).await };
        let commit = Commit {
            ino: node.ino,
            grant: 0,
            blocks: Vec::new(),
            ranges: ranges.clone(),
            mtime: None,
            kill_privileges: false,
            expect: Some(group.clone()),
            ends: None,
        };
        match self.send_commit(node, commit).await {
            Ok((attr, _, mark)) => {
                self.committed(node, asked, &ranges, attr, mark);
                Ok(())
            }
            // The other file is gone, and the block with it.
            Err(fault) if fault.code == Code::Gone => {
                self.0.moved.lock().forget(&group);
                self.remake(node, group).await
            }
            Err(fault) => Err(fault),
        }
    }

    async fn rewrite(&self, node: &Arc<Inode>, group: Vec<Extent>) -> Result<()> {
        let _turn = self.quiet_turn(node).await;
        self.may_rewrite(node)?;
        self.remake(node, group).await
    }

    fn may_rewrite(&self, node: &Inode) -> Result<()> {
        match self.may_compact(node) {
            true => Ok(()),
            false => Err(Fault::new(Code::Busy, format!("inode {} is being written elsewhere", node.ino))
                .next("try again when it is closed there")),
        }
    }

    /// Writes extents again. The caller has the turn.
    async fn remake(&self, node: &Arc<Inode>, group: Vec<Extent>) -> Result<()> {
        let most = u64::from(self.0.meta.info().volume.block_size);
        for row in rows(&group, most) {
            let block = self.merge(node, row.clone()).await?;
            self.0.moved.lock().note(&row, &block);
            ::metrics::counter!(metrics::COMPACTIONS).increment(1);
        }
        Ok(())
    }
}

/// Where bytes of old blocks were written again, the oldest first to be forgotten.
#[derive(Default)]
pub(crate) struct Moved {
    by_block: HashMap<BlockId, Vec<Move>>,
    order: VecDeque<BlockId>,
}

struct Move {
    /// In the old block.
    offset: u32,
    len: u64,
    block: NewBlock,
    /// In the new one.
    at: u32,
}

impl Moved {
    /// These extents lie in this block now, one after the other.
    fn note(&mut self, extents: &[Extent], block: &NewBlock) {
        let mut at = 0;
        for extent in extents {
            if let Source::Block { id, offset, .. } = &extent.source {
                let moves = self.by_block.entry(*id).or_default();
                let (offset, len) = (*offset, extent.len);
                moves.push(Move { offset, len, block: block.clone(), at });
                self.order.push_back(*id);
            }
            at += extent.len as u32;
        }
        while self.order.len() > MOVED_MAX {
            if let Some(id) = self.order.pop_front() {
                self.by_block.remove(&id);
            }
        }
    }

    /// Where the bytes of an extent are under this layout, if they were written again as a whole.
    fn find(&self, extent: &Extent, layout: LayoutId) -> Option<Source> {
        let Source::Block { id, offset, .. } = &extent.source else { return None };
        let end = u64::from(*offset) + extent.len;
        let covers =
            |m: &&Move| m.block.layout == layout && m.offset <= *offset && end <= u64::from(m.offset) + m.len;
        let found = self.by_block.get(id)?.iter().rev().find(covers)?;
        Some(source_of(&found.block, found.at + (offset - found.offset)))
    }

    fn forget(&mut self, extents: &[Extent]) {
        for extent in extents {
            if let Source::Block { id, .. } = &extent.source {
                self.by_block.remove(id);
            }
        }
    }
}

fn is_otherwise(extent: &Extent, layout: LayoutId) -> bool {
    matches!(extent.source, Source::Block { layout: own, .. } if own != layout)
}

/// Rows of neighbouring extents, each with at most so many bytes unless one alone has more.
fn rows(extents: &[Extent], most: u64) -> Vec<Vec<Extent>> {
    let mut rows: Vec<Vec<Extent>> = Vec::new();
    let mut len = 0u64;
    for extent in extents {
        let follows = |row: &Vec<Extent>| {
            let end = row.last().map(|last| last.offset + last.len);
            end == Some(extent.offset) && len.saturating_add(extent.len) <= most && row.len() < GROUP_MAX
        };
        match rows.last_mut().filter(|row| follows(row)) {
            Some(row) => {
                len += extent.len;
                row.push(extent.clone());
            }
            None => {
                len = extent.len;
                rows.push(vec![extent.clone()]);
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, len: u64, layout: u32) -> Extent {
        let id = BlockId { incarnation: 1, counter: offset };
        let layout = LayoutId(layout);
        let source = Source::Block { id, offset: 7, block_len: 1 << 20, layout, substitutes: Vec::new() };
        Extent { offset, len, source }
    }

    #[test]
    fn only_what_is_stored_otherwise_is_written_again() {
        let extents =
            [extent(0, 40, 1), extent(40, 40, 1), extent(80, 40, 1), extent(120, 40, 2), extent(160, 200, 1)];
        let others = |layout| -> Vec<Extent> {
            extents.iter().filter(|e| is_otherwise(e, LayoutId(layout))).cloned().collect()
        };
        let shape: Vec<Vec<u64>> =
            rows(&others(2), 100).iter().map(|row| row.iter().map(|e| e.offset).collect()).collect();
        assert_eq!(shape, [vec![0, 40], vec![80], vec![160]]);
        assert_eq!(others(1).len(), 1);
    }

    #[test]
    fn bytes_that_were_written_again_are_found_by_where_they_were() {
        let mut moved = Moved::default();
        let block = NewBlock {
            id: BlockId { incarnation: 2, counter: 9 },
            len: 80,
            layout: LayoutId(2),
            ..NewBlock::default()
        };
        let (first, second) = (extent(0, 40, 1), extent(40, 40, 1));
        moved.note(&[first.clone(), second.clone()], &block);
        assert_eq!(moved.find(&second, LayoutId(2)), Some(source_of(&block, 40)));
        assert_eq!(moved.find(&second, LayoutId(3)), None, "another policy by now");
        // A part of it, wherever in a file that is; but nothing beyond.
        let part = |at: u32, len| {
            let mut part = Extent { offset: 1000, len, ..first.clone() };
            if let Source::Block { offset, .. } = &mut part.source {
                *offset += at;
            }
            part
        };
        assert_eq!(moved.find(&part(10, 30), LayoutId(2)), Some(source_of(&block, 10)));
        assert_eq!(moved.find(&part(10, 31), LayoutId(2)), None);
        moved.forget(std::slice::from_ref(&first));
        assert_eq!(moved.find(&first, LayoutId(2)), None);
    }
}
