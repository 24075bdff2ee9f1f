//! Files as a check needs them: which blocks hold their bytes, and what they are called.
//!
//! Blocks do not know their files. Whoever looks for the files of some blocks goes through all extents in pages, keeps the inodes
//! that matter, and asks for the names in their folders.

use std::ops::ControlFlow;

use torchfs_proto::attr::Raw;
use torchfs_proto::key::{self, Space};
use torchfs_proto::msg::meta::{Done, FileBlocks};
use torchfs_proto::record::{Bytes, Entry, Extent};
use torchfs_proto::{Code, Fault, Ino, Result, VolumeId};

use super::{Meta, State};

/// Extents or names in one answer.
const PAGE_MAX: usize = 4_096;

impl Meta {
    /// The next extents, by file.
    pub(super) fn list_files(&self, state: &State, cursor: &[u8], limit: u32) -> Result<Done> {
        let limit = (limit as usize).clamp(1, PAGE_MAX);
        let mut files: Vec<FileBlocks> = Vec::new();
        let mut left = limit;
        for volume in state.volumes.keys() {
            let space = key::space(*volume, Space::Extent);
            let end = key::after(&space);
            if cursor >= end.as_slice() {
                continue;
            }
            let view = self.view(*volume);
            let mut next = None;
            let from = space.as_slice().max(cursor);
            view.scan(from, &end, false, &mut |at, extent: Extent| {
                if left == 0 {
                    next = Some(at.to_vec());
                    return ControlFlow::Break(());
                }
                left -= 1;
                let ino = key::Parts::of(at).and_then(|parts| parts.u64_at(0)).map(Ino);
                if let (Some(ino), Bytes::Block { id, .. }) = (ino, &extent.bytes) {
                    if files.last().is_none_or(|file| (file.volume, file.ino) != (*volume, ino)) {
                        files.push(FileBlocks {
                            volume: *volume,
                            ino,
                            parent: Ino(0),
                            named: false,
                            blocks: Vec::new(),
                        });
                    }
                    if let Some(file) = files.last_mut().filter(|file| file.blocks.last() != Some(id)) {
                        file.blocks.push(*id);
                    }
                }
                ControlFlow::Continue(())
            })?;
            for file in files.iter_mut().filter(|file| file.volume == *volume) {
                if let Some(inode) = view.find_inode(file.ino)? {
                    (file.parent, file.named) = (inode.parent, inode.nlink > 0);
                }
            }
            if let Some(next) = next {
                return Ok(Done::Files { files, cursor: next.into() });
            }
        }
        Ok(Done::Files { files, cursor: Raw::from(Vec::new()) })
    }

    /// The next names of a folder.
    pub(super) fn list_names(
        &self,
        state: &State,
        volume: VolumeId,
        folder: Ino,
        after: &[u8],
        limit: u32,
    ) -> Result<Done> {
        let limit = (limit as usize).clamp(1, PAGE_MAX);
        let missing = || Fault::new(Code::NotFound, format!("volume {volume} has no folder {folder}"));
        let name = state.volumes.get(&volume).ok_or_else(missing)?.name.clone();
        let view = self.view(volume);
        let parent = view.find_inode(folder)?.ok_or_else(missing)?.parent;
        let all = key::entries(volume, folder);
        let mut from = key::entry(volume, folder, after);
        if !after.is_empty() {
            from.push(0);
        }
        let (mut names, mut end) = (Vec::new(), true);
        view.scan(&from, &key::after(&all), false, &mut |at, entry: Entry| {
            if names.len() == limit {
                end = false;
                return ControlFlow::Break(());
            }
            names.push((entry.ino, Raw::from(at[all.len().min(at.len())..].to_vec())));
            ControlFlow::Continue(())
        })?;
        Ok(Done::Names { volume: name, parent, names, end })
    }
}
