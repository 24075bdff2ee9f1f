//! Policies: how new content of a file is stored, or of everything made in a folder; shown as extended attributes.
//!
//! `torchfs.redundancy` and `torchfs.stripe` can be read by anybody who can read attributes, and set by the owner and root; an
//! empty value means what the volume says. Setting `torchfs.restripe` on a file writes again what is stored otherwise than
//! its policy says, through the way of compaction: each part is committed only if nobody changed it meanwhile, and
//! programs see nothing of it. These names are in no listing, so that copies of a file do not carry them along.

use std::sync::Arc;

use bytes::Bytes;
use torchfs_client::Changed;
use torchfs_proto::attr::Kind;
use torchfs_proto::extent::{Extent, Source};
use torchfs_proto::layout::{Layout, Scheme};
use torchfs_proto::msg::meta::{Done, Op, Policy};
use torchfs_proto::{Code, Fault, Ino, LayoutId, Result};

use crate::node::Inode;
use crate::{Caller, Vfs, metrics};

const PREFIX: &[u8] = b"torchfs.";
const REDUNDANCY: &[u8] = b"torchfs.redundancy";
const STRIPE: &[u8] = b"torchfs.stripe";
const RESTRIPE: &[u8] = b"torchfs.restripe";

/// Most extents that are rewritten with one commit.
const GROUP_MAX: usize = 256;

/// Whether an extended attribute of this name is a policy and not stored as such.
pub(crate) fn is_policy(name: &[u8]) -> bool {
    name.starts_with(PREFIX)
}

impl Vfs {
    /// A policy as text.
    pub(crate) async fn policy(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        self.getattr(ino, None).await?;
        let node = self.node(ino);
        let layout = self.layout(self.layout_of(&node)).await?;
        match name {
            REDUNDANCY => Ok(layout.scheme.to_string().into()),
            STRIPE => Ok(layout.groups.len().to_string().into()),
            _ => Err(Code::NoAttr.into()),
        }
    }

    /// Sets a policy, or has a file written again by the one it has.
    pub(crate) async fn set_policy(&self, caller: Caller, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> {
        let attr = self.getattr(ino, None).await?.attr;
        if caller.uid != 0 && caller.uid != attr.uid {
            return Err(Fault::new(
                Code::Permission,
                format!("only the owner of inode {ino} and root may do this"),
            ));
        }
        let text = std::str::from_utf8(value).map_err(|_| Fault::from(Code::Invalid))?.trim();
        let known = match attr.layout {
            Some(id) => Some(self.layout(id).await?),
            None => None,
        };
        let volume = self.layout(self.0.meta.info().volume.layout).await?;
        let mut policy = Policy {
            scheme: known.as_ref().map(|layout| layout.asked.unwrap_or(layout.scheme)),
            stripe: known
                .map(|layout| layout.groups.len())
                .filter(|n| *n != volume.groups.len())
                .map(|n| n as u32),
        };
        match name {
            REDUNDANCY if text.is_empty() => policy.scheme = None,
            REDUNDANCY => policy.scheme = Some(text.parse::<Scheme>()?),
            STRIPE if text.is_empty() => policy.stripe = None,
            STRIPE => policy.stripe = Some(text.parse().map_err(|_| stripe_fault(text))?),
            RESTRIPE if attr.kind == Kind::File => return self.restripe(ino).await,
            RESTRIPE => return Err(Fault::new(Code::IsDir, "only the content of files is written again")),
            _ => return Err(Fault::new(Code::Unsupported, "there is no such policy")),
        }
        let (vfs, node) = (self.clone(), self.node(ino));
        self.finish(async move {
            let asked = vfs.asked();
            let Changed { done, seq } = vfs.0.meta.change(Op::SetPolicy { ino, policy }).await?;
            {
                let mut state = node.lock();
                state.mark = state.mark.max(seq);
                match done {
                    Done::Attr(attr) => state.learn(&vfs.0.meta, attr, vfs.is_current(asked)),
                    _ => state.doubt_attr(),
                }
            }
            // It may be the first of its kind: its layout is in a newer placement then.
            vfs.layout(vfs.layout_of(&node)).await.map(|_| ())
        })
        .await
    }

    /// The layout chosen for new blocks of a file.
    pub(crate) fn layout_of(&self, node: &Inode) -> LayoutId {
        let own = node.lock().attr.as_ref().and_then(|attr| attr.layout);
        own.unwrap_or_else(|| self.0.meta.info().volume.layout)
    }

    /// The layout that is in use where this one was chosen.
    async fn layout(&self, id: LayoutId) -> Result<Layout> {
        let mut placement = self.0.meta.placement();
        if placement.current(id).is_none() {
            placement = self.0.meta.fetch_placement().await?;
        }
        let unknown = || match id.0 {
            0 => {
                Fault::new(Code::Unreachable, "too few data servers have joined for the volume's redundancy")
                    .next("`torchfs status` says how many it needs")
            }
            _ => Fault::new(Code::Invalid, format!("layout {id} is not in the placement")),
        };
        placement.current(id).cloned().ok_or_else(unknown)
    }

    /// Writes again what is stored by another layout than the file's policy says.
    async fn restripe(&self, ino: Ino) -> Result<()> {
        let node = self.node(ino);
        self.open_data(&node, true).await?;
        self.write_back(&node).await;
        let most = u64::from(self.0.meta.info().volume.block_size);
        let layout = self.layout(self.layout_of(&node)).await?.id;
        let mut at = 0;
        loop {
            let page = self.ask_extents(ino, at..u64::MAX).await?;
            for group in groups(&page.extents, layout, most) {
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

    async fn rewrite(&self, node: &Arc<Inode>, group: Vec<Extent>) -> Result<()> {
        let _turn = self.quiet_turn(node).await;
        if !self.may_compact(node) {
            return Err(Fault::new(Code::Busy, format!("inode {} is being written elsewhere", node.ino))
                .next("try again when it is closed there"));
        }
        self.merge(node, group).await?;
        ::metrics::counter!(metrics::COMPACTIONS).increment(1);
        Ok(())
    }
}

fn stripe_fault(text: &str) -> Fault {
    Fault::new(Code::Invalid, format!("`{text}` is no number of groups")).next("write a number from 1 to 512")
}

/// Rows of neighbouring extents in blocks of other layouts, each row for one block.
fn groups(extents: &[Extent], layout: LayoutId, most: u64) -> Vec<Vec<Extent>> {
    let mut groups: Vec<Vec<Extent>> = Vec::new();
    let mut len = 0;
    for extent in extents {
        if !matches!(extent.source, Source::Block { layout: own, .. } if own != layout) {
            continue;
        }
        let follows = |group: &Vec<Extent>| {
            let end = group.last().map(|last| last.offset + last.len);
            end == Some(extent.offset) && len + extent.len <= most && group.len() < GROUP_MAX
        };
        match groups.last_mut().filter(|group| follows(group)) {
            Some(group) => {
                len += extent.len;
                group.push(extent.clone());
            }
            None => {
                len = extent.len;
                groups.push(vec![extent.clone()]);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use torchfs_proto::BlockId;

    fn extent(offset: u64, len: u64, layout: u32) -> Extent {
        let id = BlockId { incarnation: 1, counter: offset };
        let source = Source::Block {
            id,
            offset: 0,
            block_len: len as u32,
            layout: LayoutId(layout),
            substitutes: Vec::new(),
        };
        Extent { offset, len, source }
    }

    #[test]
    fn only_what_is_stored_otherwise_is_written_again() {
        let extents =
            [extent(0, 40, 1), extent(40, 40, 1), extent(80, 40, 1), extent(120, 40, 2), extent(160, 200, 1)];
        let shape: Vec<Vec<u64>> = groups(&extents, LayoutId(2), 100)
            .iter()
            .map(|group| group.iter().map(|extent| extent.offset).collect())
            .collect();
        assert_eq!(shape, [vec![0, 40], vec![80], vec![160]]);
        assert!(groups(&extents, LayoutId(1), 100).iter().all(|group| group[0].offset == 120));
    }
}
