//! Extents: which bytes of a file are where. Reading them, and the range edits that other operations are made of.
//!
//! One record for each run, under the run's first byte; holes have none. An edit touches only the runs that overlap it.
//!
//! # Invariants
//! - Runs of one file do not overlap.
//! - `stored` of the inode is the sum of their lengths; a block's record counts the runs that point into it.
//! - A truncation too large for one batch sets `cut`: runs from there on are dead though still there. The file's length does
//!   not pass `cut` before they are gone, so nobody ever sees them.

use std::ops::ControlFlow;

use torchfs_proto::extent::{Extent, Source};
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::{self, Bytes};
use torchfs_proto::{BlockId, Code, Fault, Ino, Result, key};

use super::{BlockChanges, Decision, First, file, touch};
use crate::view::View;

/// Extents in one answer: fewer than the message allows, so that one answer does not hold up the others.
const ANSWER_MAX: usize = 1_024;

/// The extents that cover a range of a file.
pub fn extents(view: &View<'_>, ino: Ino, from: u64, to: u64) -> Result<Decision> {
    let inode = file(view, ino)?;
    let end = to.min(inode.size);
    let (runs, more) = overlapping(view, ino, from, end, ANSWER_MAX)?;
    let upto = match runs.last() {
        Some((offset, run)) if more => offset + run.len,
        _ => to.max(from),
    };
    let mut blocks: Option<(BlockId, record::Block)> = None;
    let mut extents = Vec::with_capacity(runs.len());
    for (offset, run) in runs {
        let len = run.len.min(inode.size - offset);
        let source = match run.bytes {
            Bytes::Inline(mut bytes) => {
                bytes.truncate(len as usize);
                Source::Inline(bytes)
            }
            Bytes::Block { id, offset } => {
                // Neighbours often share a block.
                if blocks.as_ref().is_none_or(|(last, _)| *last != id) {
                    let block = view.block(id)?.ok_or_else(|| {
                        Fault::new(
                            Code::Corrupt,
                            format!("inode {ino} has bytes in block {id}, which has no record"),
                        )
                        .next("run `torchfs fsck`")
                    })?;
                    blocks = Some((id, block));
                }
                let Some((_, block)) = &blocks else { continue };
                let substitutes = block.substitutes.clone().unwrap_or_default();
                Source::Block { id, offset, block_len: block.len, layout: block.layout, substitutes }
            }
        };
        extents.push(Extent { offset, len, source });
    }
    let (data_version, size) = (inode.data_version, inode.size);
    Ok(Decision::new(Done::Extents { extents, upto, data_version, size }).read(ino))
}

/// What a change of length came to.
pub(super) enum Resized {
    /// All done.
    Done,
    /// Done, but runs beyond the end are left to the upkeep.
    Cut,
    /// This first.
    First(First),
}

/// Range edits of one file whose inode is at hand. The caller writes the inode and applies the changes of blocks when all
/// edits are made.
pub(super) struct Edit<'e, 'v> {
    pub view: &'e mut View<'v>,
    pub ino: Ino,
    pub inode: &'e mut record::Inode,
    pub changes: &'e mut BlockChanges,
}

impl Edit<'_, '_> {
    /// Sets the length.
    pub fn resize(&mut self, size: u64, trim: usize) -> Result<Resized> {
        if let Some(cut) = self.inode.cut
            && size > cut
        {
            return Ok(Resized::First(First::Trim(self.ino)));
        }
        let shrinks = size < self.inode.size;
        self.inode.size = size;
        if !shrinks {
            return Ok(Resized::Done);
        }
        let cuts = self.inode.cut.is_some() || overlaps_more_than(self.view, self.ino, size, u64::MAX, trim)?;
        if !cuts {
            self.punch(size, u64::MAX)?;
            return Ok(Resized::Done);
        }
        // Only the run that crosses the new end is touched now.
        let (runs, _) = overlapping(self.view, self.ino, size, size.saturating_add(1), 1)?;
        if let Some((offset, run)) = runs.into_iter().next()
            && offset < size
        {
            self.remove_part((offset, run), size, u64::MAX);
        }
        self.inode.cut = Some(size);
        self.view.put(key::cut(self.view.volume, self.ino), &size);
        Ok(Resized::Cut)
    }

    /// Takes a range out of the file: runs within it go, runs that cross its ends are trimmed or split.
    pub fn punch(&mut self, from: u64, to: u64) -> Result<()> {
        let (runs, _) = overlapping(self.view, self.ino, from, to, usize::MAX)?;
        for run in runs {
            self.remove_part(run, from, to);
        }
        Ok(())
    }

    /// Puts a run where nothing is.
    pub fn place(&mut self, offset: u64, len: u64, bytes: Bytes) {
        if let Bytes::Block { id, .. } = &bytes {
            self.changes.add(*id, 1, signed(len));
        }
        self.inode.stored += len;
        let run = record::Extent { born: self.view.born, len, bytes };
        self.view.put(key::extent(self.view.volume, self.ino, offset), &run);
    }

    /// Removes the part of one run that lies within `[from, to)`.
    fn remove_part(&mut self, (offset, run): (u64, record::Extent), from: u64, to: u64) {
        let end = offset + run.len;
        let left = from.saturating_sub(offset).min(run.len);
        let right = end.saturating_sub(to.max(offset)).min(run.len);
        let removed = run.len - left - right;
        let pieces = i64::from(left > 0) + i64::from(right > 0);
        if let Bytes::Block { id, .. } = &run.bytes {
            self.changes.add(*id, pieces - 1, -signed(removed));
        }
        self.inode.stored = self.inode.stored.saturating_sub(removed);
        let (volume, born) = (self.view.volume, self.view.born);
        let at = key::extent(volume, self.ino, offset);
        match left {
            0 => self.view.delete(at),
            _ => self.view.put(at, &record::Extent { born, len: left, bytes: part(&run.bytes, 0, left) }),
        }
        if right > 0 {
            let skip = run.len - right;
            let tail = record::Extent { born, len: right, bytes: part(&run.bytes, skip, right) };
            self.view.put(key::extent(volume, self.ino, offset + skip), &tail);
        }
    }
}

/// How far work on a file's extents has come, so that it goes on there: what it removed already is slow to pass by until the
/// next checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// From where on runs are removed.
    from: u64,
    /// None is left before this byte.
    upto: u64,
}

impl Progress {
    /// Where to go on with the removal of all runs from this byte on.
    fn start(self, from: u64) -> u64 {
        if from == self.from { self.upto.max(from) } else { from }
    }
}

/// Removes runs beyond a cut, at most so many; answers where to go on, if some are left.
pub fn trim(view: &mut View<'_>, ino: Ino, progress: Progress, limit: usize) -> Result<Option<Progress>> {
    view.frees = true;
    let Some(mut inode) = view.find_inode(ino)? else {
        view.delete(key::cut(view.volume, ino));
        return Ok(None);
    };
    let Some(cut) = inode.cut else {
        view.delete(key::cut(view.volume, ino));
        return Ok(None);
    };
    let left = remove_from(view, ino, &mut inode, progress.start(cut), limit)?;
    if left.is_none() {
        inode.cut = None;
        view.delete(key::cut(view.volume, ino));
    }
    view.put_inode(ino, &inode);
    Ok(left.map(|upto| Progress { from: cut, upto }))
}

/// Removes all runs of a file, at most so many; answers where to go on, if some are left.
pub(super) fn remove_runs(
    view: &mut View<'_>,
    ino: Ino,
    inode: &mut record::Inode,
    progress: Progress,
    limit: usize,
) -> Result<Option<Progress>> {
    let left = remove_from(view, ino, inode, progress.start(0), limit)?;
    // Nobody should have written meanwhile; if somebody did, it shows here.
    let left = left.or((inode.stored > 0 && progress.upto > 0).then_some(0));
    Ok(left.map(|upto| Progress { from: 0, upto }))
}

/// Removes runs that begin at or after this byte, at most so many; answers where the first one begins that is left.
fn remove_from(
    view: &mut View<'_>,
    ino: Ino,
    inode: &mut record::Inode,
    from: u64,
    limit: usize,
) -> Result<Option<u64>> {
    let mut runs = Vec::new();
    let mut left = None;
    let start = key::extent(view.volume, ino, from);
    let end = key::after(&key::extents(view.volume, ino));
    view.scan(&start, &end, false, &mut |key, run: record::Extent| {
        if runs.len() == limit {
            left = Some(offset_of(key));
            return ControlFlow::Break(());
        }
        runs.push((offset_of(key), run));
        ControlFlow::Continue(())
    })?;
    let mut changes = BlockChanges::default();
    let mut edit = Edit { view, ino, inode, changes: &mut changes };
    for run in runs {
        edit.remove_part(run, 0, u64::MAX);
    }
    changes.apply(view)?;
    Ok(left)
}

/// One piece of work that comes before an operation, as a batch of its own; answers whether runs are left for the upkeep.
pub fn work(view: &mut View<'_>, first: First, limit: usize) -> Result<Option<Ino>> {
    view.frees = true;
    match first {
        First::Trim(ino) => trim(view, ino, Progress::default(), limit).map(|_| None),
        First::Cut(ino, size) => {
            let mut inode = file(view, ino)?;
            let mut changes = BlockChanges::default();
            let mut edit = Edit { view, ino, inode: &mut inode, changes: &mut changes };
            let resized = edit.resize(size, limit)?;
            changes.apply(view)?;
            inode.mtime = view.now;
            inode.data_version += 1;
            touch(view, &mut inode);
            view.put_inode(ino, &inode);
            Ok(matches!(resized, Resized::Cut).then_some(ino))
        }
        First::Punch(ino, from, to) => {
            let mut inode = file(view, ino)?;
            let (runs, _) = overlapping(view, ino, from, to, limit)?;
            let mut changes = BlockChanges::default();
            let mut edit = Edit { view, ino, inode: &mut inode, changes: &mut changes };
            for run in runs {
                edit.remove_part(run, from, to);
            }
            changes.apply(view)?;
            inode.data_version += 1;
            touch(view, &mut inode);
            view.put_inode(ino, &inode);
            Ok(None)
        }
    }
}

/// Whether more runs than this overlap a range.
pub(super) fn overlaps_more_than(
    view: &View<'_>,
    ino: Ino,
    from: u64,
    to: u64,
    limit: usize,
) -> Result<bool> {
    Ok(overlapping(view, ino, from, to, limit)?.1)
}

/// The runs that overlap `[from, to)` with their first bytes, at most so many, and whether there are more.
pub(super) fn overlapping(
    view: &View<'_>,
    ino: Ino,
    from: u64,
    to: u64,
    limit: usize,
) -> Result<(Vec<(u64, record::Extent)>, bool)> {
    let mut runs = Vec::new();
    let mut more = false;
    if from >= to {
        return Ok((runs, false));
    }
    let first = key::extents(view.volume, ino);
    let start = key::extent(view.volume, ino, from);
    // At most one run begins before the range and reaches into it: the last one that begins before it.
    view.scan(&first, &start, true, &mut |key, run: record::Extent| {
        let offset = offset_of(key);
        if offset + run.len > from {
            runs.push((offset, run));
        }
        ControlFlow::Break(())
    })?;
    let end = match to {
        u64::MAX => key::after(&first),
        _ => key::extent(view.volume, ino, to),
    };
    view.scan(&start, &end, false, &mut |key, run: record::Extent| {
        if runs.len() >= limit {
            more = true;
            return ControlFlow::Break(());
        }
        runs.push((offset_of(key), run));
        ControlFlow::Continue(())
    })?;
    Ok((runs, more))
}

/// A part of where a run's bytes are.
pub(super) fn part(bytes: &Bytes, skip: u64, len: u64) -> Bytes {
    match bytes {
        // A run is no longer than its block, so the sum stays within u32.
        Bytes::Block { id, offset } => Bytes::Block { id: *id, offset: offset + skip as u32 },
        Bytes::Inline(bytes) => {
            let from = (skip as usize).min(bytes.len());
            let to = from.saturating_add(len as usize).min(bytes.len());
            Bytes::Inline(bytes[from..to].to_vec().into())
        }
    }
}

fn signed(len: u64) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

fn offset_of(key: &[u8]) -> u64 {
    key::Parts::of(key).and_then(|parts| parts.u64_at(8)).unwrap_or(0)
}

/// Leases that content edits of a file conflict with.
pub(super) const CONTENT: u8 = lease::ATTR | lease::READ;
