//! Ranges of files: fallocate, lseek, copy_file_range.
//!
//! Each is a change of content, or a question about it, that takes its turn after what was written before.

use std::ops::Range;
use std::sync::Arc;

use torchfs_client::Changed;
use torchfs_proto::attr::{SIZE_MAX, SetAttr, flags};
use torchfs_proto::extent::{RangeOp, Source};
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::commit::STALE_TRIES;
use crate::node::{Changing, Inode};
use crate::write::now;
use crate::{Caller, Fh, Seek, Vfs, unexpected};

const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 0x10;

impl Vfs {
    /// Extends, punches or zeroes a range. Space is not set aside: blocks are written where and when they come.
    pub async fn fallocate(
        &self,
        caller: Caller,
        ino: Ino,
        fh: Fh,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let handle = self.handle(fh)?;
        let end =
            offset.checked_add(len).filter(|end| *end <= SIZE_MAX).ok_or(Fault::from(Code::TooLarge))?;
        if len == 0 {
            return Err(Code::Invalid.into());
        }
        let ops = match mode {
            0 => vec![RangeOp::Extend { size: end }],
            KEEP_SIZE => Vec::new(),
            m if m == PUNCH_HOLE | KEEP_SIZE || m == ZERO_RANGE | KEEP_SIZE => {
                vec![RangeOp::Punch { offset, len }]
            }
            ZERO_RANGE => vec![RangeOp::Punch { offset, len }, RangeOp::Extend { size: end }],
            _ => {
                return Err(Fault::new(Code::Unsupported, format!("fallocate mode {mode:#x} is not served")));
            }
        };
        handle.wrote();
        handle.check()?;
        let node = handle.node.clone();
        self.kill_privileges(caller, ino).await?;
        if ops.is_empty() {
            return Ok(());
        }
        if !self.holds_for(ino, true) {
            self.open_data(&node, true).await?;
        }
        let changing = Changing::begin(&node).await;
        let vfs = self.clone();
        self.finish(async move {
            let _changing = changing;
            let _turn = vfs.quiet_turn(&node).await;
            let enough = mode == 0 && node.lock().view().is_some_and(|attr| attr.size >= end);
            match enough {
                true => Ok(Vec::new()),
                false => vfs.commit_now(&node, Vec::new(), ops, false).await,
            }
        })
        .await?;
        handle.check()
    }

    /// Takes set-user-id, set-group-id and capabilities away before others than root change content. The kernel says with each write
    /// when to do so, and leaves these operations to us.
    async fn kill_privileges(&self, caller: Caller, ino: Ino) -> Result<()> {
        if caller.uid == 0 {
            return Ok(());
        }
        let attr = self.getattr(ino, None).await?.attr;
        if attr.mode & 0o6000 == 0 && attr.flags & flags::XATTRS == 0 {
            return Ok(());
        }
        let set = SetAttr { kill_privileges: true, ..SetAttr::default() };
        self.setattr(ino, None, set).await.map(drop)
    }

    /// The next data or hole.
    pub async fn lseek(&self, _ino: Ino, fh: Fh, offset: u64, whence: Seek) -> Result<u64> {
        let handle = self.handle(fh)?;
        let node = &handle.node;
        self.write_back(node).await;
        let mut at = offset;
        loop {
            let done = self.0.meta.ask(Op::Extents { ino: node.ino, from: at, to: u64::MAX }).await?;
            let Done::Extents { extents, upto, size, .. } = done else {
                return Err(unexpected("extents", &done));
            };
            if offset >= size {
                return Err(Fault::new(
                    Code::NoDevice,
                    format!("{offset} is past the end of inode {}", node.ino),
                ));
            }
            let end = upto.min(size);
            for extent in extents.iter().filter(|extent| extent.source != Source::Hole) {
                let data = extent.offset.max(at)..(extent.offset + extent.len).min(end);
                if data.is_empty() {
                    continue;
                }
                match whence {
                    Seek::Data => return Ok(data.start),
                    Seek::Hole if data.start > at => return Ok(at),
                    Seek::Hole => at = data.end,
                }
            }
            match whence {
                Seek::Hole if at < end || end == size => return Ok(at.min(size)),
                Seek::Data if end == size => return Err(Code::NoDevice.into()),
                _ => at = end,
            }
        }
    }

    /// Shares a range of one file with another; says how many bytes.
    #[allow(clippy::too_many_arguments)]
    pub async fn copy_file_range(
        &self,
        caller: Caller,
        ino_in: Ino,
        fh_in: Fh,
        off_in: u64,
        ino_out: Ino,
        fh_out: Fh,
        off_out: u64,
        len: u64,
    ) -> Result<u64> {
        let (from, to) = (self.handle(fh_in)?, self.handle(fh_out)?);
        let range = |start: u64| start.checked_add(len).filter(|end| *end <= SIZE_MAX).map(|end| start..end);
        let (Some(source), Some(target)) = (range(off_in), range(off_out)) else {
            return Err(Code::TooLarge.into());
        };
        if ino_in == ino_out && overlap(&source, &target) {
            return Err(Fault::new(Code::Invalid, "the two ranges of the file overlap"));
        }
        to.wrote();
        to.check()?;
        self.kill_privileges(caller, ino_out).await?;
        let (from, to) = (from.node.clone(), to.node.clone());
        if !self.holds_for(ino_out, true) {
            self.open_data(&to, true).await?;
        }
        if !self.holds_for(ino_in, false) {
            self.open_data(&from, false).await?;
        }
        let changing = Changing::begin(&to).await;
        let vfs = self.clone();
        self.finish(async move {
            let _changing = changing;
            vfs.copy(from, source, to, off_out).await
        })
        .await
    }

    async fn copy(
        &self,
        from: Arc<Inode>,
        source: Range<u64>,
        to: Arc<Inode>,
        to_offset: u64,
    ) -> Result<u64> {
        self.write_back(&from).await;
        let _turn = self.quiet_turn(&to).await;
        let asked = self.asked();
        let mut stale = 0;
        let Changed { done, seq } = loop {
            let tick = self.0.tick.listen();
            let op = Op::CopyRange {
                from: from.ino,
                from_offset: source.start,
                to: to.ino,
                to_offset,
                len: source.end - source.start,
                grant: self.grant(&to).await?,
                mtime: Some(now()),
            };
            match self.0.meta.change(op).await {
                Err(fault) if fault.code == Code::Fenced && stale < STALE_TRIES => {
                    stale += 1;
                    self.ask_data(&to, true).await?;
                    tick.await;
                }
                changed => break changed?,
            }
        };
        let Done::Committed { attr, copied, .. } = done else { return Err(unexpected("copy", &done)) };
        let epoch = self.0.meta.lease_epoch();
        let mut state = to.lock();
        state.changed_at(seq);
        // What the range holds now is known to the service only.
        state.file().applied(&[], &attr, epoch, false, self.0.config.extents_max);
        state.learn(&self.0.meta, attr, self.is_current(asked, to.ino));
        Ok(copied)
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
