//! commit: new content. Range operations applied in order, with the blocks that they name, in one batch.

use std::collections::HashSet;

use torchfs_proto::attr::SIZE_MAX;
use torchfs_proto::chunk::MAX_BLOCK;
use torchfs_proto::extent::{Extent, INLINE_MAX, NewBlock, RangeOp, Source};
use torchfs_proto::msg::meta::{COMMIT_BLOCKS_MAX, COMMIT_RANGES_MAX, Commit, Done, lease};
use torchfs_proto::record::{Answered, Bytes};
use torchfs_proto::{Code, Fault, Ino, Result};

use super::extents::{CONTENT, Edit, Resized, overlapping, overlaps_more_than};
use super::{BlockChanges, Ctx, Decision, First, file, kill_privileges, touch};
use crate::table::GroupAt;
use crate::view::View;

/// Runs that a hole may take away in one batch; a larger one is punched in pieces.
const PUNCH_MAX: usize = 4_096;

/// Applies a commit whose lease was checked by the caller. It stands as a whole or not at all.
pub fn commit(view: &mut View<'_>, ctx: &Ctx<'_>, commit: &Commit) -> Result<Decision> {
    if commit.ranges.len() > COMMIT_RANGES_MAX || commit.blocks.len() > COMMIT_BLOCKS_MAX {
        return Err(Fault::new(Code::TooMany, "a commit names too many blocks or ranges"));
    }
    let ino = commit.ino;
    let mut inode = file(view, ino)?;
    if let Some(ends) = commit.ends
        && ends != inode.size
    {
        let what = format!("inode {ino} does not end at {ends} any more, but at {}", inode.size);
        return Err(Fault::new(Code::Busy, what));
    }
    let mut changes = BlockChanges::default();
    let dirty = introduce(view, ctx, &commit.blocks, &mut changes)?;
    let compacts = commit.expect.is_some();
    if let Some(expect) = &commit.expect {
        expected(view, ino, expect)?;
    }
    let mut decision = Decision::new(Done::Ok);
    decision.dirty = dirty;
    let bits = if compacts { 0 } else { CONTENT };
    let mut appended = Vec::new();
    let (size_before, had_cut) = (inode.size, inode.cut.is_some());
    view.frees =
        commit.ranges.iter().all(|op| matches!(op, RangeOp::Punch { .. } | RangeOp::Truncate { .. }));
    for (at, op) in commit.ranges.iter().enumerate() {
        // Work in pieces is ordered before the commit, so only the commit's first operation may ask for it: a later one
        // must not happen before an earlier one. Elsewhere the batch takes all of it, up to what a batch can be.
        let opens = at == 0;
        let mut edit = Edit { view, ino, inode: &mut inode, changes: &mut changes };
        let first = match op {
            RangeOp::Write { offset, len, source } => write(&mut edit, opens, *offset, *len, source)?,
            RangeOp::Append { len, source } => {
                let end = edit.inode.size;
                appended.push(end);
                write(&mut edit, opens, end, *len, source)?
            }
            RangeOp::Punch { offset, len } => hole(&mut edit, opens, *offset, offset.saturating_add(*len))?,
            RangeOp::Truncate { size } => {
                within(*size, 0)?;
                let grows = |later: &RangeOp| match later {
                    RangeOp::Punch { .. } => false,
                    RangeOp::Truncate { size: later } => later > size,
                    _ => true,
                };
                let grows_again = commit.ranges[at + 1..].iter().any(grows);
                let trim = if opens || !grows_again { ctx.trim } else { usize::MAX };
                match edit.resize(*size, trim)? {
                    Resized::Done => None,
                    // An earlier cut is trimmed first in any case; then this one may fit the batch.
                    Resized::Cut if grows_again && had_cut => Some(First::Trim(ino)),
                    Resized::Cut if grows_again => Some(First::Cut(ino, *size)),
                    Resized::Cut => {
                        decision.upkeep.push(ino);
                        None
                    }
                    Resized::First(first) => Some(first),
                }
            }
            RangeOp::Extend { size } => {
                within(*size, 0)?;
                grow(&mut edit, *size)
            }
        };
        if let Some(first) = first {
            decision.first = Some(first);
            return Ok(decision.change(ino, bits));
        }
    }
    changes.apply(view)?;
    if compacts {
        if inode.size != size_before {
            return Err(Fault::new(Code::Invalid, "a compaction must not change the length of a file"));
        }
    } else {
        if !commit.ranges.is_empty() {
            inode.data_version += 1;
            inode.mtime = commit.mtime.unwrap_or(view.now);
            decision.content.push(ino);
        }
        if commit.kill_privileges {
            kill_privileges(view, ino, &mut inode)?;
        }
        touch(view, &mut inode);
    }
    view.put_inode(ino, &inode);
    let attr = inode.attr(ino);
    decision.done = Done::Committed { attr, appended: appended.clone(), copied: 0 };
    Ok(decision.change(ino, bits).want(ino, lease::ATTR).store(Answered::Committed {
        ino,
        appended,
        copied: 0,
    }))
}

/// Takes in the new blocks: each must be from a live range of the session and unknown until now. Where their pieces are is
/// compared with the targets of this moment; answers the groups with pieces elsewhere.
fn introduce(
    view: &View<'_>,
    ctx: &Ctx<'_>,
    blocks: &[NewBlock],
    changes: &mut BlockChanges,
) -> Result<Vec<GroupAt>> {
    let mut dirty = Vec::new();
    let mut seen = HashSet::new();
    for block in blocks {
        let id = block.id;
        if !ctx.ranges.iter().any(|range| range.contains(id)) {
            return Err(Fault::new(
                Code::Fenced,
                format!("block {id} is from no live range of session {}", ctx.session),
            ));
        }
        if !seen.insert(id) || view.block(id)?.is_some() {
            return Err(Fault::new(Code::Invalid, format!("block {id} is committed already")));
        }
        if block.len == 0 || block.len > MAX_BLOCK {
            return Err(Fault::new(Code::Invalid, format!("block {id} cannot have {} bytes", block.len)));
        }
        let (substitutes, group) = ctx.table.substitutes(block)?;
        dirty.extend(group);
        changes.introduce(NewBlock { substitutes, servers: Vec::new(), ..block.clone() });
    }
    Ok(dirty)
}

/// Whether exactly these extents are there, for a compaction that copied their bytes.
fn expected(view: &View<'_>, ino: Ino, expect: &[Extent]) -> Result<()> {
    let (Some(first), Some(last)) = (expect.first(), expect.last()) else { return Ok(()) };
    let end = last.offset.saturating_add(last.len);
    let (runs, _) = overlapping(view, ino, first.offset, end, COMMIT_RANGES_MAX)?;
    let same = runs.len() == expect.len()
        && runs.iter().zip(expect).all(|((offset, run), expect)| {
            *offset == expect.offset
                && run.len == expect.len
                && match (&run.bytes, &expect.source) {
                    (Bytes::Block { id, offset }, Source::Block { id: other, offset: at, .. }) => {
                        id == other && offset == at
                    }
                    (Bytes::Inline(bytes), Source::Inline(other)) => bytes == other,
                    _ => false,
                }
        });
    match same {
        true => Ok(()),
        false => Err(Fault::new(Code::Busy, format!("inode {ino} changed since its extents were read"))),
    }
}

fn write(
    edit: &mut Edit<'_, '_>,
    opens: bool,
    offset: u64,
    len: u64,
    source: &Source,
) -> Result<Option<First>> {
    within(offset, len)?;
    if len == 0 {
        return Err(Fault::new(Code::Invalid, "an extent has at least one byte"));
    }
    let end = offset + len;
    if edit.inode.cut.is_some_and(|cut| end > cut) {
        return Ok(Some(First::Trim(edit.ino)));
    }
    let bytes = match source {
        Source::Hole => {
            let first = hole(edit, opens, offset, end)?;
            edit.inode.size = edit.inode.size.max(end);
            return Ok(first);
        }
        Source::Inline(bytes) => {
            if bytes.len() as u64 != len || bytes.len() > INLINE_MAX {
                return Err(Fault::new(Code::Invalid, format!("{len} inline bytes do not fit an extent")));
            }
            Bytes::Inline(bytes.clone())
        }
        Source::Block { id, offset: at, .. } => {
            let block_len = match edit.changes.introduced(*id) {
                Some(block) => block.len,
                None => match edit.view.block(*id)? {
                    Some(block) => block.len,
                    None => return Err(Fault::new(Code::Gone, format!("block {id} is not known"))),
                },
            };
            if u64::from(*at) + len > u64::from(block_len) {
                return Err(Fault::new(Code::Invalid, format!("an extent reaches beyond block {id}")));
            }
            Bytes::Block { id: *id, offset: *at }
        }
    };
    edit.punch(offset, end)?;
    edit.place(offset, len, bytes);
    edit.inode.size = edit.inode.size.max(end);
    Ok(None)
}

fn hole(edit: &mut Edit<'_, '_>, opens: bool, from: u64, to: u64) -> Result<Option<First>> {
    if opens && overlaps_more_than(edit.view, edit.ino, from, to, PUNCH_MAX)? {
        return Ok(Some(First::Punch(edit.ino, from, to)));
    }
    edit.punch(from, to)?;
    Ok(None)
}

fn grow(edit: &mut Edit<'_, '_>, size: u64) -> Option<First> {
    if edit.inode.cut.is_some_and(|cut| size > cut) {
        return Some(First::Trim(edit.ino));
    }
    edit.inode.size = edit.inode.size.max(size);
    None
}

/// Whether a file may reach this far.
pub(super) fn within(offset: u64, len: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= SIZE_MAX => Ok(()),
        _ => Err(Fault::new(Code::TooLarge, "the file would grow past its limit")),
    }
}
