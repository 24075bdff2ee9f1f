//! copy_range: shares extents of one file with another, or with another place of itself.

use torchfs_proto::attr::Time;
use torchfs_proto::msg::meta::{Done, lease};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Ino, Result};

use super::commit::within;
use super::extents::{CONTENT, Edit, overlapping, part};
use super::{BlockChanges, Decision, First, file, touch};
use crate::view::View;

/// Runs that one request copies at most, and that it replaces; the answer says how far it came.
const RUNS_MAX: usize = 2_048;

/// What to copy where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// From this file.
    pub from: Ino,
    /// From here.
    pub from_offset: u64,
    /// To this file.
    pub to: Ino,
    /// To here.
    pub to_offset: u64,
    /// How many bytes.
    pub len: u64,
    /// When the program did it.
    pub mtime: Option<Time>,
}

/// Shares what the source has there now, cut at its end. The lease on the target was checked by the caller.
pub fn copy_range(view: &mut View<'_>, copy: &Copy) -> Result<Decision> {
    let source = file(view, copy.from)?;
    let mut inode = file(view, copy.to)?;
    let mut len = copy.len.min(source.size.saturating_sub(copy.from_offset));
    within(copy.to_offset, len)?;
    let mut end = copy.from_offset + len;
    if copy.from == copy.to && copy.from_offset < copy.to_offset + len && copy.to_offset < end {
        return Err(Fault::new(Code::Invalid, "the ranges of a copy within one file overlap"));
    }
    let mut decision = Decision::new(Done::Ok).read(copy.from);
    // What the source's writer still buffers must be committed first.
    decision.against.push(super::Against { ino: copy.from, bits: lease::WRITE, name: None });
    if inode.cut.is_some_and(|cut| copy.to_offset + len > cut) {
        decision.first = Some(First::Trim(copy.to));
        return Ok(decision.change(copy.to, CONTENT));
    }
    let (runs, more) = overlapping(view, copy.from, copy.from_offset, end, RUNS_MAX)?;
    if more && let Some((offset, run)) = runs.last() {
        end = end.min(offset + run.len);
        len = end - copy.from_offset;
    }
    let (replaced, more) = overlapping(view, copy.to, copy.to_offset, copy.to_offset + len, RUNS_MAX)?;
    if more && let Some((offset, run)) = replaced.last() {
        len = len.min(offset + run.len - copy.to_offset);
        end = copy.from_offset + len;
    }
    if len > 0 {
        let mut changes = BlockChanges::default();
        let mut edit = Edit { view, ino: copy.to, inode: &mut inode, changes: &mut changes };
        edit.punch(copy.to_offset, copy.to_offset + len)?;
        for (offset, run) in runs.into_iter().filter(|(offset, _)| *offset < end) {
            let from = offset.max(copy.from_offset);
            let upto = (offset + run.len).min(end);
            let bytes = part(&run.bytes, from - offset, upto - from);
            let at = copy.to_offset + (from - copy.from_offset);
            edit.place(at, upto - from, bytes);
        }
        changes.apply(view)?;
        inode.size = inode.size.max(copy.to_offset + len);
        inode.data_version += 1;
        inode.mtime = copy.mtime.unwrap_or(view.now);
        touch(view, &mut inode);
        view.put_inode(copy.to, &inode);
        decision.content.push(copy.to);
    }
    decision.done = Done::Committed { attr: inode.attr(copy.to), appended: Vec::new(), copied: len };
    Ok(decision.change(copy.to, CONTENT).want(copy.to, lease::ATTR).store(Answered::Committed {
        ino: copy.to,
        appended: Vec::new(),
        copied: len,
    }))
}
