//! Writing: into the buffer under WRITE, through it under SHARED.
//!
//! Under WRITE nobody else sees the content, so bytes stay here: large ones as they came. As soon as a run reaches the
//! end of a block it is sealed and put in the background, so that a long write streams to all servers; what it takes to
//! make it visible is one commit (commit.rs). Under SHARED each write is put and committed before it returns, and an
//! append lands wherever the end of the file is then.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use torchfs_proto::attr::{SIZE_MAX, Time, flags};
use torchfs_proto::clock::{Clock, SystemClock};
use torchfs_proto::extent::{INLINE_MAX, RangeOp, Source};
use torchfs_proto::msg::meta::lease;
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::budget::Budget;
use crate::commit::{PutJob, STALE_TRIES, Sealed, source_of};
use crate::node::{Changing, File, Inode};
use crate::open::Handle;
use crate::{Fh, Vfs, WriteFlags};

/// A run that ends at the end of a block is sealed if it has at least this share of it.
const SEAL_SHARE: u64 = 4;

enum Buffered {
    /// The bytes are in the buffer, for this place.
    Done(u64),
    /// A truncation or the like is under way.
    Later,
    /// No lease to write under.
    NoRight,
    /// Others write too.
    Through,
    /// Too much of this file waits; if it is not even half of what may wait, all of it must be committed to make room.
    FileFull { all: bool },
    /// Too much of all files waits.
    AllFull,
}

impl Vfs {
    /// Writes all of it or fails.
    pub async fn write(&self, ino: Ino, fh: Fh, offset: u64, data: Bytes, flags: WriteFlags) -> Result<u32> {
        let handle = self.handle(fh)?;
        handle.used();
        let node = &handle.node;
        let len = u32::try_from(data.len()).map_err(|_| Fault::from(Code::Invalid))?;
        if !flags.append && offset.checked_add(u64::from(len)).is_none_or(|end| end > SIZE_MAX) {
            return Err(Fault::new(Code::TooLarge, format!("inode {ino} cannot have a byte at {offset}")));
        }
        if len == 0 {
            return Ok(0);
        }
        handle.wrote();
        let sync = flags.sync || handle.sync;
        let (at, told) = loop {
            let progress = node.progress.listen();
            let freed = self.0.budget.freed.listen();
            match self.buffer(&handle, offset, &data, flags)? {
                Buffered::Done(at) => break (at, None),
                Buffered::Later => progress.await,
                Buffered::NoRight => self.open_data(node, true).await?,
                Buffered::Through => {
                    let (at, told) = self.write_through(node, offset, data, flags).await?;
                    break (at, Some(told));
                }
                Buffered::FileFull { all } => {
                    self.start_flush(node, all);
                    progress.await;
                }
                Buffered::AllFull => {
                    self.make_room();
                    freed.await;
                }
            }
        };
        let len = u64::from(len);
        if handle.direct && !flags.page_cache {
            // The bytes went around the kernel's pages. What it read there meanwhile is older than they are.
            if told.unwrap_or_else(|| self.drop_pages(node, at, len)) {
                self.host_settled().await;
            }
        } else if at != offset {
            // O_APPEND was set after the open. The kernel put the bytes where the file ended for it, and holds the lock of the last
            // page until it is answered: that is not waited for.
            let first = at.min(offset);
            self.drop_pages(node, first, at.max(offset) + len - first);
        }
        if sync {
            self.sync_node(node).await?;
            handle.check()?;
        }
        Ok(len as u32)
    }

    /// Puts bytes into the buffer if that is allowed now.
    fn buffer(&self, handle: &Handle, offset: u64, data: &Bytes, flags: WriteFlags) -> Result<Buffered> {
        let (node, meta, config) = (&handle.node, &self.0.meta, &self.0.config);
        let len = data.len() as u64;
        let block = u64::from(meta.info().volume.block_size.max(1));
        let (jobs, flush, (first, at)) = {
            let mut state = node.lock();
            if let Some(file) = &state.file {
                file.check(handle.seen)?;
            }
            if state.gone {
                return Err(Fault::new(Code::Stale, format!("inode {} was removed", node.ino)));
            }
            if state.changing {
                return Ok(Buffered::Later);
            }
            if state.recalling > 0 || state.attr.is_none() {
                return Ok(Buffered::NoRight);
            }
            if meta.holds(node.ino, lease::WRITE).is_none() {
                let shared = meta.holds(node.ino, lease::SHARED).is_some();
                return Ok(if shared { Buffered::Through } else { Buffered::NoRight });
            }
            let buffered = self.0.budget.used();
            if buffered + len > meta.space() {
                return Err(Fault::new(Code::NoSpace, "the data servers have no space for this write")
                    .next("delete something, or add a data server"));
            }
            let waiting = state.file().waiting();
            if waiting > 0 && waiting + len > config.dirty_file_max {
                return Ok(Buffered::FileFull { all: waiting < config.dirty_file_max / 2 });
            }
            let file = state.file();
            if file.is_dirty() && file.fills_a_commit(len, block) {
                return Ok(Buffered::FileFull { all: true });
            }
            if self.0.budget.exceeded_by(len) {
                return Ok(Buffered::AllFull);
            }
            let size = state.view().map_or(0, |attr| attr.size);
            let committed = state.attr.as_ref().map_or(0, |attr| attr.size);
            let offset = if flags.append { size } else { offset };
            let end = offset + len;
            if end > SIZE_MAX {
                return Err(Fault::new(Code::TooLarge, format!("inode {} is as long as can be", node.ino)));
            }
            if !flags.append && end > size && state.file().tail.is_some() && state.is_dirty() {
                // What was appended may have to follow the end of the file; this stays where it is.
                return Ok(Buffered::FileFull { all: true });
            }
            if flags.kill_privileges
                && let Some(attr) = &mut state.attr
            {
                let before = attr.mode;
                attr.mode = without_privileges(attr.mode);
                let kills = attr.mode != before || attr.flags & flags::XATTRS != 0;
                if kills {
                    state.xattrs = None;
                    state.file().kill_privileges = true;
                }
            }
            let file = state.file();
            if flags.append && file.tail.is_none() {
                (file.tail, file.ends) = (Some(offset), committed);
            }
            let first = !file.is_dirty();
            let before = file.overlay.dirty();
            file.number += 1;
            file.overlay.write(offset, data.clone(), file.number);
            file.mtime = Some(now());
            file.dirty_since.get_or_insert_with(Instant::now);
            file.quiet_since = Instant::now();
            // The kernel wrote into its pages and knows; what goes around them, see below.
            file.told = file.told.max(end);
            let jobs = seal_blocks(file, offset, end, block, &self.0.budget);
            self.0.budget.adjust(before, file.overlay.dirty());
            let sealed: u64 = file.sealed.iter().map(|sealed| sealed.len).sum();
            let many = file.overlay.pieces() >= config.commit_pieces;
            if many {
                file.want = file.number;
            }
            (jobs, many || sealed >= config.commit_bytes, (first, offset))
        };
        if first {
            self.0.dirty.lock().insert(node.ino, node.clone());
        }
        for job in jobs {
            self.spawn_put(node, job);
        }
        if flush {
            self.start_flush(node, false);
        }
        Ok(Buffered::Done(at))
    }

    /// Has the kernel drop the pages of a range; false if it has none.
    fn drop_pages(&self, node: &Inode, offset: u64, len: u64) -> bool {
        let paged = node.lock().file.as_ref().is_some_and(|file| file.paged);
        if paged {
            self.0.host.invalidate_data(node.ino, offset, len);
        }
        paged
    }

    /// Puts and commits at once. Tells where, and whether the kernel was told to drop its pages of it.
    async fn write_through(
        &self,
        node: &Arc<Inode>,
        offset: u64,
        data: Bytes,
        flags: WriteFlags,
    ) -> Result<(u64, bool)> {
        let changing = Changing::begin(node).await;
        let (vfs, node) = (self.clone(), node.clone());
        self.finish(async move {
            let _changing = changing;
            // What was buffered before others came goes first.
            let _turn = vfs.quiet_turn(&node).await;
            let most = vfs.0.meta.info().volume.block_size.max(1) as usize;
            let parts: Vec<Bytes> =
                (0..data.len()).step_by(most).map(|i| data.slice(i..data.len().min(i + most))).collect();
            let mut tries = 0;
            let appended = loop {
                let tick = vfs.0.tick.listen();
                let mut ranges = Vec::new();
                let mut blocks = Vec::new();
                let mut at = offset;
                for part in &parts {
                    let len = part.len() as u64;
                    let source = if part.len() <= INLINE_MAX {
                        Source::Inline(part.to_vec().into())
                    } else {
                        let block = vfs.put_block(&node, vec![part.clone()]).await?;
                        let source = source_of(&block, 0);
                        blocks.push(block);
                        source
                    };
                    ranges.push(match flags.append {
                        true => RangeOp::Append { len, source },
                        false => RangeOp::Write { offset: at, len, source },
                    });
                    at += len;
                }
                match vfs.commit_now(&node, blocks, ranges, flags.kill_privileges).await {
                    // A server was removed since the puts: they go elsewhere.
                    Err(fault) if fault.code == Code::StalePlacement && tries < STALE_TRIES => {
                        tries += 1;
                        vfs.0.meta.fetch_placement().await?;
                        tick.await;
                    }
                    done => break done?,
                }
            };
            let at = appended.first().copied().unwrap_or(offset);
            // Even if the caller went away: nobody else knows that the bytes got there.
            let told = !flags.page_cache && vfs.drop_pages(&node, at, data.len() as u64);
            Ok((at, told))
        })
        .await
    }

    /// Bytes of a range are not worth committing any more.
    pub(crate) fn cut_overlay(&self, node: &Inode, range: std::ops::Range<u64>) {
        let mut state = node.lock();
        let Some(file) = &mut state.file else { return };
        let before = file.overlay.dirty();
        file.overlay.cut(range);
        self.0.budget.adjust(before, file.overlay.dirty());
        if file.overlay.bytes() == 0 && file.sealed.is_empty() && !file.flushing {
            file.is_clean();
        }
    }

    /// All that was written and is not committed is not wanted any more.
    pub(crate) fn discard(&self, node: &Inode) {
        {
            let mut state = node.lock();
            let Some(file) = &mut state.file else { return };
            self.0.budget.adjust(file.overlay.dirty(), 0);
            file.overlay.clear();
            file.sealed.clear();
            file.is_clean();
        }
        self.0.dirty.lock().remove(&node.ino);
        node.progress.notify();
    }
}

impl File {
    /// Everything written is committed, or given up.
    pub(crate) fn is_clean(&mut self) {
        self.committed = self.number;
        self.mtime = None;
        self.kill_privileges = false;
        self.dirty_since = None;
        self.tail = None;
    }
}

/// Seals the run that this write brought to the end of a block, if it is long enough to be worth a block, and the whole blocks of
/// the write that follow. Never those without the first: what is sealed may be committed before what is not.
fn seal_blocks(file: &mut File, offset: u64, end: u64, block: u64, budget: &Arc<Budget>) -> Vec<PutJob> {
    let mut boundary = (offset / block + 1) * block;
    if boundary > end {
        return Vec::new();
    }
    let mut start = file.overlay.dirty_run_before(boundary, boundary - block);
    if boundary - start < block / SEAL_SHARE {
        return Vec::new();
    }
    let mut jobs = Vec::new();
    while boundary <= end {
        file.batch += 1;
        let (runs, writes) = file.overlay.seal(start..boundary, file.batch);
        let (sealed, job) = Sealed::block(budget, file.batch, writes, runs);
        file.sealed.push_back(sealed);
        jobs.push(job);
        start = boundary;
        boundary += block;
    }
    jobs
}

/// The mode after a write by somebody without rights.
fn without_privileges(mode: u32) -> u32 {
    let mode = mode & !0o4000;
    if mode & 0o010 != 0 { mode & !0o2000 } else { mode }
}

pub(crate) fn now() -> Time {
    Time::from_ns(SystemClock.wall_ns())
}
