//! How buffered bytes become content: seal the tail, await the puts, one commit.
//!
//! At most one task per file does this, in rounds; whoever needs something committed says up to which write and waits. A round
//! takes everything written so far, so that each commit leaves the file as it was at one moment: writers wait before there is
//! more than a commit can take. While a long write
//! streams, a round may take just the sealed blocks, but only if no write older than theirs stays behind.
//!
//! Scattered small ranges share a block, one range operation each; very little content sits in the commit itself.
//!
//! # Invariants
//! - Commits of a file are sent one at a time, in the order of its writes.
//! - A round that fails is not tried again: its bytes are given up and the error latches on every open handle. A commit that is
//!   refused because a data server was removed since the put is no failure: the bytes are put again elsewhere.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;
use torchfs_client::{Changed, Mark};
use torchfs_proto::attr::{Attr, Time};
use torchfs_proto::extent::{NewBlock, RangeOp, Source};
use torchfs_proto::msg::meta::{COMMIT_BLOCKS_MAX, COMMIT_RANGES_MAX, Commit, Done, Op, lease};
use torchfs_proto::{Code, Fault, Result, ServerId};

use crate::budget::{Budget, Charge};
use crate::node::{Asked, File, Inode};
use crate::overlay::{Batch, Number, Run};
use crate::write::now;
use crate::{Vfs, metrics, unexpected};

/// Most ranges of a file that wait for one commit: all of them fit, with some to spare for those that are cut in two.
const WAITING_RANGES: usize = COMMIT_RANGES_MAX - COMMIT_RANGES_MAX / 8;

/// Most ranges that share a block.
const PACKED_RANGES: usize = COMMIT_RANGES_MAX / 2;

/// How often a commit whose grant was stale is sent again, a tick apart. After a pause of this process or of the network it
/// takes a while until the session has its leases again, and what was written must not be lost to that.
pub(crate) const STALE_TRIES: u32 = 300;

/// Bytes of a file on their way into one block, or into the commit itself.
pub(crate) struct Sealed {
    batch: Batch,
    /// The first and the last write in here.
    writes: RangeInclusive<Number>,
    pub(crate) len: u64,
    ranges: Vec<Placed>,
    body: Body,
    _charge: Arc<Charge>,
}

/// A range of the file and where in the block it lies.
struct Placed {
    offset: u64,
    len: u64,
    at: u64,
}

enum Body {
    Inline(Vec<Bytes>),
    Block(Arc<Put>),
}

/// A block being put.
pub(crate) struct Put {
    /// Kept until the commit: it may refuse where they were put.
    parts: Vec<Bytes>,
    result: Mutex<Option<Result<NewBlock>>>,
}

/// What there is to put.
pub(crate) struct PutJob {
    put: Arc<Put>,
    charge: Arc<Charge>,
}

/// What one commit takes.
struct Round {
    sealed: Vec<Sealed>,
    /// With it, all writes up to this one are committed.
    upto: Number,
    mtime: Option<Time>,
    kill_privileges: bool,
    errors: u64,
}

impl Sealed {
    /// Runs that share one block.
    pub(crate) fn block(
        budget: &Arc<Budget>,
        batch: Batch,
        writes: RangeInclusive<Number>,
        runs: Vec<Run>,
    ) -> (Sealed, PutJob) {
        let mut ranges = Vec::with_capacity(runs.len());
        let mut parts = Vec::new();
        let mut at = 0;
        for run in runs {
            ranges.push(Placed { offset: run.offset, len: run.len, at });
            at += run.len;
            parts.extend(run.parts);
        }
        let put = Arc::new(Put { parts, result: Mutex::default() });
        let charge = Charge::new(budget, at);
        let body = Body::Block(put.clone());
        let sealed = Sealed { batch, writes, len: at, ranges, body, _charge: charge.clone() };
        (sealed, PutJob { put, charge })
    }

    /// Runs so short that the commit carries them.
    fn inline(budget: &Arc<Budget>, batch: Batch, writes: RangeInclusive<Number>, runs: Vec<Run>) -> Sealed {
        let ranges: Vec<Placed> =
            runs.iter().map(|run| Placed { offset: run.offset, len: run.len, at: 0 }).collect();
        let len = ranges.iter().map(|range| range.len).sum();
        let bodies = runs.into_iter().map(|run| run.parts.concat().into()).collect();
        Sealed { batch, writes, len, ranges, body: Body::Inline(bodies), _charge: Charge::new(budget, len) }
    }

    /// The operations that name the bytes, once they are where they belong.
    fn ops(&self, blocks: &mut Vec<NewBlock>, ops: &mut Vec<RangeOp>) -> Result<()> {
        match &self.body {
            Body::Inline(bodies) => {
                for (range, body) in self.ranges.iter().zip(bodies) {
                    let source = Source::Inline(body.to_vec().into());
                    ops.push(RangeOp::Write { offset: range.offset, len: range.len, source });
                }
            }
            Body::Block(put) => {
                let result = put.result.lock().clone();
                let block = result.unwrap_or_else(|| Err(Code::Internal.into()))?;
                for range in &self.ranges {
                    let source = source_of(&block, range.at as u32);
                    ops.push(RangeOp::Write { offset: range.offset, len: range.len, source });
                }
                blocks.push(block);
            }
        }
        Ok(())
    }

    /// Its bytes from an offset on belong further to the end.
    fn shift(&mut self, from: u64, by: u64) {
        let mut at = 0;
        while let Some(range) = self.ranges.get_mut(at) {
            let end = range.offset + range.len;
            if range.offset >= from {
                range.offset += by;
            } else if end > from {
                let kept = from - range.offset;
                let rest = Placed { offset: from, len: end - from, at: range.at + kept };
                range.len = kept;
                self.ranges.insert(at + 1, rest);
                if let Body::Inline(bodies) = &mut self.body {
                    let rest = bodies[at].split_off(kept as usize);
                    bodies.insert(at + 1, rest);
                }
            }
            at += 1;
        }
    }

    fn is_put(&self) -> bool {
        match &self.body {
            Body::Inline(_) => true,
            Body::Block(put) => put.result.lock().is_some(),
        }
    }
}

/// Bytes of a block from an offset on, as an extent names them.
pub(crate) fn source_of(block: &NewBlock, offset: u32) -> Source {
    Source::Block {
        id: block.id,
        offset,
        block_len: block.len,
        layout: block.layout,
        substitutes: block.substitutes.clone(),
    }
}

impl Vfs {
    /// Everything written to this file so far is committed when this returns, or its error has latched.
    pub(crate) async fn write_back(&self, node: &Arc<Inode>) {
        let Some(target) = node.lock().file.as_ref().map(|file| file.number) else { return };
        loop {
            let progress = node.progress.listen();
            {
                let mut state = node.lock();
                let file = state.file();
                if file.committed >= target {
                    return;
                }
                file.want = file.want.max(target);
            }
            self.start_flush(node, false);
            progress.await;
        }
    }

    /// Begins rounds for a file unless they are under way; `all` if everything written so far must be committed.
    pub(crate) fn start_flush(&self, node: &Arc<Inode>, all: bool) {
        {
            let mut state = node.lock();
            let file = state.file();
            if all {
                file.want = file.number;
            }
            if file.flushing || !file.is_dirty() {
                return;
            }
            file.flushing = true;
        }
        let (vfs, node) = (self.clone(), node.clone());
        self.0.meta.spawn(async move { vfs.flush_rounds(node).await });
    }

    /// Begins to commit the dirty files that are chosen.
    pub(crate) fn flush_dirty(&self, chosen: impl Fn(&File) -> bool) {
        let dirty: Vec<Arc<Inode>> = {
            let mut dirty = self.0.dirty.lock();
            // What was cut off needs no commit.
            dirty.retain(|_, node| node.lock().is_dirty());
            dirty.values().cloned().collect()
        };
        for node in dirty {
            if node.lock().file.as_ref().is_some_and(|file| file.is_dirty() && chosen(file)) {
                self.start_flush(&node, true);
            }
        }
    }

    /// Begins to commit what frees memory soonest: blocks that are sealed, which costs nobody a short block. If there are none and
    /// none are on their way, all that is dirty.
    pub(crate) fn make_room(&self) {
        let dirty: Vec<Arc<Inode>> = self.0.dirty.lock().values().cloned().collect();
        let mut frees = false;
        for node in &dirty {
            let sealed = {
                let mut state = node.lock();
                let Some(file) = &mut state.file else { continue };
                frees |= file.flushing;
                let last = file.sealed.iter().map(|sealed| *sealed.writes.end()).max();
                file.want = file.want.max(last.unwrap_or(0));
                last.is_some()
            };
            if sealed {
                frees = true;
                self.start_flush(node, false);
            }
        }
        if !frees {
            self.flush_dirty(|_| true);
        }
    }

    /// The turn to change content at the service, when all that was written before is there.
    pub(crate) async fn quiet_turn<'a>(
        &self,
        node: &'a Arc<Inode>,
    ) -> futures_util::lock::MutexGuard<'a, ()> {
        // Somebody may go on writing; then the two are unordered anyway.
        for _ in 0..3 {
            self.write_back(node).await;
            let turn = node.turn.lock().await;
            if !node.lock().is_dirty() {
                return turn;
            }
        }
        node.turn.lock().await
    }

    /// Puts one block of a file under a fresh id, as the file's policy and the volume's say now.
    pub(crate) async fn put_block(&self, node: &Inode, parts: Vec<Bytes>) -> Result<NewBlock> {
        let _slot = self.0.puts.take().await;
        let (layout, compression) = (self.layout_of(node), self.0.meta.info().volume.compression);
        let id = self.0.meta.block_id().await?;
        let began = Instant::now();
        let block = self.0.blocks.put(id, layout, parts, compression).await?;
        ::metrics::histogram!(metrics::PUT_SECONDS).record(began.elapsed());
        Ok(block)
    }

    pub(crate) fn spawn_put(&self, node: &Arc<Inode>, PutJob { put, charge }: PutJob) {
        let (vfs, node) = (self.clone(), node.clone());
        self.0.meta.spawn(async move {
            let result = vfs.put_block(&node, put.parts.clone()).await;
            drop(charge);
            *put.result.lock() = Some(result);
            node.progress.notify();
        });
    }

    /// Commits ranges at once. The caller has the turn.
    pub(crate) async fn commit_now(
        &self,
        node: &Arc<Inode>,
        blocks: Vec<NewBlock>,
        ranges: Vec<RangeOp>,
        kill_privileges: bool,
    ) -> Result<Vec<u64>> {
        let asked = self.asked();
        let commit = Commit {
            ino: node.ino,
            grant: 0,
            blocks,
            ranges: ranges.clone(),
            mtime: Some(now()),
            kill_privileges,
            expect: None,
            ends: None,
        };
        let (attr, appended, mark) = self.send_commit(node, commit).await?;
        self.committed(node, asked, &ranges, attr, mark);
        if kill_privileges {
            node.lock().xattrs = None;
        }
        Ok(appended)
    }

    /// Sends a commit under the grant held now, and again under a new one if that was stale.
    pub(crate) async fn send_commit(
        &self,
        node: &Arc<Inode>,
        mut commit: Commit,
    ) -> Result<(Attr, Vec<u64>, Mark)> {
        let meta = &self.0.meta;
        let mut stale = 0;
        for _ in 0..self.0.config.open_tries {
            let tick = self.0.tick.listen();
            commit.grant = self.grant(node).await?;
            if commit.grant == 0 {
                tick.await;
                continue;
            }
            match meta.change(Op::Commit(commit.clone())).await {
                Ok(Changed { done: Done::Committed { attr, appended, .. }, seq }) => {
                    return Ok((attr, appended, seq));
                }
                Ok(changed) => return Err(unexpected("commit", &changed.done)),
                Err(fault) if fault.code == Code::Fenced && stale < STALE_TRIES => {
                    stale += 1;
                    self.ask_data(node, true).await?;
                    tick.await;
                }
                Err(fault) => return Err(fault),
            }
        }
        Err(Fault::new(Code::Timeout, format!("no right to write inode {} could be had", node.ino)))
    }

    /// The number of the grant to write under; 0 if there is none right now.
    pub(crate) async fn grant(&self, node: &Arc<Inode>) -> Result<u64> {
        match self.0.meta.grant_number(node.ino) {
            0 => {
                // The lease ran out while the session lived on: ask for the right anew.
                self.ask_data(node, true).await?;
                Ok(self.0.meta.grant_number(node.ino))
            }
            number => Ok(number),
        }
    }

    /// Takes in what a commit did.
    pub(crate) fn committed(&self, node: &Inode, asked: Asked, ranges: &[RangeOp], attr: Attr, mark: Mark) {
        let current = self.is_current(asked, node.ino);
        let protected = current && self.0.meta.holds(node.ino, lease::WRITE).is_some();
        let epoch = self.0.meta.lease_epoch();
        let mut state = node.lock();
        state.changed_at(mark);
        let file = state.file();
        file.applied(ranges, &attr, epoch, protected, self.0.config.extents_max);
        state.learn(&self.0.meta, attr, current);
    }

    async fn flush_rounds(self, node: Arc<Inode>) {
        loop {
            let turn = node.turn.lock().await;
            let Some((mut round, jobs)) = self.seal_rest(&node) else { break };
            for job in jobs {
                self.spawn_put(&node, job);
            }
            let asked = self.asked();
            let outcome = self.commit_round(&node, &mut round).await;
            let lost = outcome.is_err();
            self.settle(&node, asked, round, outcome);
            if lost {
                // The kernel's pages have what is lost; who hears of the error must not read it there.
                self.0.host.invalidate_data(node.ino, 0, 0);
                self.host_settled().await;
            }
            drop(turn);
            node.progress.notify();
        }
        node.progress.notify();
        let mut dirty = self.0.dirty.lock();
        if !node.lock().is_dirty() {
            dirty.remove(&node.ino);
        }
    }

    /// The next round, or the end of rounds.
    fn seal_rest(&self, node: &Inode) -> Option<(Round, Vec<PutJob>)> {
        let info = self.0.meta.info();
        let most = u64::from(info.volume.block_size.max(1));
        let mut state = node.lock();
        let file = state.file();
        let streamed = file.sealed.iter().map(|sealed| sealed.len).sum::<u64>() >= self.0.config.commit_bytes;
        let full = file.waiting() >= self.0.config.dirty_file_max / 2;
        if file.want <= file.committed && !streamed && !full {
            file.flushing = false;
            return None;
        }
        let last = file.sealed.iter().map(|sealed| *sealed.writes.end()).max().unwrap_or(0);
        let oldest = file.overlay.oldest_dirty();
        let older_stay = oldest.is_some_and(|oldest| oldest < last);
        // What is wanted is in the sealed blocks, and all of the last write.
        let suffices = file.want <= file.committed || (file.want <= last && oldest != Some(last));
        let mut jobs = Vec::new();
        if !suffices || older_stay || file.sealed.is_empty() {
            jobs = seal_all(file, most, &self.0.budget);
        }
        let mut sealed: Vec<Sealed> = Vec::new();
        let (mut ranges, mut blocks, mut last) = (0, 0, 0);
        while let Some(next) = file.sealed.front() {
            ranges += next.ranges.len();
            blocks += 1;
            let too_much = ranges > COMMIT_RANGES_MAX || blocks > COMMIT_BLOCKS_MAX;
            // Of much that streams, what is there already: its memory is needed for what follows, before all of it is there.
            let later = streamed && !next.is_put() && file.sealed.iter().all(|s| *s.writes.start() > last);
            if !sealed.is_empty() && (too_much || later) {
                break;
            }
            last = last.max(*next.writes.end());
            sealed.extend(file.sealed.pop_front());
        }
        file.committing = sealed.iter().map(|sealed| sealed.len).sum();
        let stays = file.sealed.iter().map(|sealed| *sealed.writes.start());
        let oldest = stays.chain(file.overlay.oldest_dirty()).min();
        let upto = oldest.map_or(file.number, |oldest| oldest.saturating_sub(1));
        let round = Round {
            sealed,
            upto,
            mtime: file.mtime,
            kill_privileges: file.kill_privileges,
            errors: file.errors,
        };
        Some((round, jobs))
    }

    /// Awaits the puts, then commits.
    async fn commit_round(
        &self,
        node: &Arc<Inode>,
        round: &mut Round,
    ) -> Result<Option<(Attr, Mark, Vec<RangeOp>)>> {
        for sealed in &round.sealed {
            loop {
                let progress = node.progress.listen();
                if sealed.is_put() {
                    break;
                }
                progress.await;
            }
        }
        let began = Instant::now();
        for _ in 0..STALE_TRIES {
            let (mut blocks, mut ranges) = (Vec::new(), Vec::new());
            for sealed in &round.sealed {
                sealed.ops(&mut blocks, &mut ranges)?;
            }
            if ranges.is_empty() {
                return Ok(None);
            }
            let ends = node.lock().file().ends_expected();
            let commit = Commit {
                ino: node.ino,
                grant: 0,
                blocks,
                ranges: ranges.clone(),
                mtime: round.mtime,
                kill_privileges: round.kill_privileges,
                expect: None,
                ends,
            };
            match self.send_commit(node, commit).await {
                Ok((attr, _, mark)) => {
                    ::metrics::histogram!(metrics::COMMIT_SECONDS).record(began.elapsed());
                    return Ok(Some((attr, mark, ranges)));
                }
                Err(fault) if fault.code == Code::Busy && ends.is_some() => {
                    self.follow_end(node, round).await?;
                }
                Err(fault) if fault.code == Code::StalePlacement => self.put_again(node, round).await?,
                Err(fault) => return Err(fault),
            }
        }
        let what = format!("inode {} or the data servers change faster than it can be written", node.ino);
        Err(Fault::new(Code::Timeout, what))
    }

    /// A server or layout is gone that blocks of the round name: they go where the table of now says.
    async fn put_again(&self, node: &Inode, round: &Round) -> Result<()> {
        let tick = self.0.tick.listen();
        let table = self.0.meta.fetch_placement().await?;
        let is_there = |id: &ServerId| table.servers.iter().any(|server| server.id == *id);
        let stands =
            |block: &NewBlock| table.layout(block.layout).is_some() && block.servers.iter().all(is_there);
        let mut again = false;
        for sealed in &round.sealed {
            let Body::Block(put) = &sealed.body else { continue };
            let gone = matches!(&*put.result.lock(), Some(Ok(block)) if !stands(block));
            if gone {
                let result = self.put_block(node, put.parts.clone()).await;
                *put.result.lock() = Some(result);
                again = true;
            }
        }
        // The table may be older than the refusal.
        if !again {
            tick.await;
        }
        Ok(())
    }

    /// The lease ran out before what was appended here was committed, and the file has another end now: it goes there.
    async fn follow_end(&self, node: &Arc<Inode>, round: &mut Round) -> Result<()> {
        let done = self.0.meta.ask(Op::GetAttr { ino: node.ino }).await?;
        let Done::Attr(attr) = done else { return Err(unexpected("getattr", &done)) };
        {
            let mut state = node.lock();
            let size = attr.size;
            state.learn(&self.0.meta, attr, false);
            let file = state.file();
            let Some(tail) = file.tail else { return Ok(()) };
            let start = tail.max(file.ends);
            let to = if tail <= file.ends { size } else { size.max(tail) };
            file.ends = size;
            file.extents.clear();
            file.forget_pages();
            if to > start {
                tracing::warn!(ino = %node.ino, start, to, "others appended after our lease had run out");
                file.overlay.shift(start, to - start);
                let sealed = round.sealed.iter_mut().chain(&mut file.sealed);
                sealed.for_each(|sealed| sealed.shift(start, to - start));
                file.tail = Some(to);
            }
        }
        self.0.host.invalidate_data(node.ino, 0, 0);
        Ok(())
    }

    /// A round is over: the extents have its bytes, or they are lost.
    fn settle(
        &self,
        node: &Inode,
        asked: Asked,
        round: Round,
        outcome: Result<Option<(Attr, Mark, Vec<RangeOp>)>>,
    ) {
        let fault = match outcome {
            Ok(Some((attr, mark, ranges))) => {
                node.lock().file().ends = attr.size;
                self.committed(node, asked, &ranges, attr, mark);
                None
            }
            Ok(None) => None,
            Err(fault) => Some(fault),
        };
        let mut state = node.lock();
        if round.kill_privileges {
            // Capabilities are among them, and may have been asked for since the write.
            state.xattrs = None;
        }
        let (gone, heard) = (state.gone, state.writers > 0);
        let compact = self.0.config.compact_extents;
        let file = state.file();
        file.committing = 0;
        for sealed in &round.sealed {
            for range in &sealed.ranges {
                file.overlay.settle(range.offset..range.offset + range.len, sealed.batch);
            }
        }
        file.committed = file.committed.max(round.upto);
        if !file.is_dirty() {
            file.is_clean();
        } else {
            file.dirty_since = Some(Instant::now());
        }
        file.quiet_since = Instant::now();
        let fragmented = compact > 0 && file.extents.len() >= compact;
        if fault.is_some() {
            // Whether the service took it is not known.
            file.extents.clear();
            file.forget_pages();
        }
        if let Some(fault) = fault
            && !gone
            && file.errors == round.errors
        {
            tracing::error!(ino = %node.ino, %fault, "what was written is lost");
            ::metrics::counter!(metrics::WRITE_ERRORS).increment(1);
            self.0.files_lost.fetch_add(1, Ordering::Relaxed);
            if !heard {
                *self.0.unheard.lock() = Some(fault.clone());
            }
            file.latch(fault);
        }
        drop(state);
        if fragmented {
            self.0.fragmented.lock().insert(node.ino);
        }
    }
}

impl File {
    /// The length that the file must have at the service for what was appended here to be in its place.
    fn ends_expected(&self) -> Option<u64> {
        self.tail.map(|_| self.ends)
    }

    /// Whether one commit could not take all that waits and a write of `len` bytes more. If scattered writes were spread over two,
    /// a crash between them would leave later ones without earlier ones.
    pub(crate) fn fills_a_commit(&self, len: u64, block: u64) -> bool {
        // A write may cut what it falls into in two.
        let pieces = self.overlay.dirty_pieces() + 2;
        let blocks = ((self.overlay.dirty() + len) / block) as usize + pieces / PACKED_RANGES + 1;
        let ranges = self.sealed.iter().map(|sealed| sealed.ranges.len()).sum::<usize>() + pieces + blocks;
        ranges > WAITING_RANGES || self.sealed.len() + blocks > COMMIT_BLOCKS_MAX
    }
}

/// Seals everything dirty: neighbours together, blocks filled one after the other.
fn seal_all(file: &mut File, most: u64, budget: &Arc<Budget>) -> Vec<PutJob> {
    let before = file.overlay.dirty();
    let jobs = seal_runs(file, most, budget);
    budget.adjust(before, file.overlay.dirty());
    jobs
}

fn seal_runs(file: &mut File, most: u64, budget: &Arc<Budget>) -> Vec<PutJob> {
    let little = file.fits_inline();
    file.batch += 1;
    let (runs, writes) = file.overlay.seal(0..u64::MAX, file.batch);
    if runs.is_empty() {
        return Vec::new();
    }
    if little {
        let sealed = Sealed::inline(budget, file.batch, writes, runs);
        file.sealed.push_back(sealed);
        return Vec::new();
    }
    let mut jobs = Vec::new();
    for group in pack(runs, most) {
        let (sealed, job) = Sealed::block(budget, file.batch, writes.clone(), group);
        file.sealed.push_back(sealed);
        jobs.push(job);
    }
    jobs
}

/// Cuts runs into groups of at most `most` bytes and not too many ranges.
fn pack(runs: Vec<Run>, most: u64) -> Vec<Vec<Run>> {
    let mut groups: Vec<Vec<Run>> = Vec::new();
    let mut group: Vec<Run> = Vec::new();
    let mut filled = 0;
    for run in runs {
        let mut rest = Some(run);
        while let Some(run) = rest.take() {
            if filled == most || group.len() == PACKED_RANGES {
                groups.push(std::mem::take(&mut group));
                filled = 0;
            }
            let (head, tail) = split(run, most - filled);
            filled += head.len;
            group.push(head);
            rest = tail;
        }
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// The first `len` bytes of a run, and the rest.
fn split(run: Run, len: u64) -> (Run, Option<Run>) {
    if run.len <= len {
        return (run, None);
    }
    let mut head = Run { offset: run.offset, len, parts: Vec::new() };
    let mut tail = Run { offset: run.offset + len, len: run.len - len, parts: Vec::new() };
    let mut left = len as usize;
    for mut part in run.parts {
        if left == 0 {
            tail.parts.push(part);
        } else if part.len() <= left {
            left -= part.len();
            head.parts.push(part);
        } else {
            head.parts.push(part.split_to(left));
            left = 0;
            tail.parts.push(part);
        }
    }
    (head, Some(tail))
}

/// The session is gone: what is dirty is lost.
pub(crate) fn lose(vfs: &Vfs, node: &Inode) {
    {
        let mut state = node.lock();
        let Some(file) = &mut state.file else { return };
        if !file.is_dirty() {
            return;
        }
        file.latch(
            Fault::new(Code::Fenced, format!("the session ended before inode {} was written back", node.ino))
                .next("mount again; what was not synced is lost"),
        );
    }
    vfs.0.files_lost.fetch_add(1, Ordering::Relaxed);
    vfs.discard(node);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offset: u64, bytes: &[u8]) -> Run {
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let parts = [a, b].iter().filter(|p| !p.is_empty()).map(|p| Bytes::copy_from_slice(p)).collect();
        Run { offset, len: bytes.len() as u64, parts }
    }

    #[test]
    fn what_moves_with_the_end_keeps_its_bytes() {
        let budget = Arc::new(Budget::new(100));
        let runs = vec![run(0, b"head"), run(10, b"keeptail"), run(20, b"more")];
        let mut sealed = Sealed::inline(&budget, 1, 1..=1, runs);
        sealed.shift(14, 100);
        let mut ops = Vec::new();
        sealed.ops(&mut Vec::new(), &mut ops).unwrap();
        let found: Vec<(u64, Vec<u8>)> = ops
            .into_iter()
            .map(|op| match op {
                RangeOp::Write { offset, len, source: Source::Inline(bytes) } => {
                    assert_eq!(len, bytes.len() as u64);
                    (offset, bytes.to_vec())
                }
                other => panic!("{other:?}"),
            })
            .collect();
        let want: [(u64, &[u8]); 4] = [(0, b"head"), (10, b"keep"), (114, b"tail"), (120, b"more")];
        assert_eq!(found, want.map(|(at, bytes)| (at, bytes.to_vec())));
    }

    #[test]
    fn packing_keeps_every_byte_in_its_place() {
        let runs = vec![run(0, b"abcdefghij"), run(100, b"k"), run(200, b"lmnopqrstuvwxyz")];
        let groups = pack(runs, 8);
        let mut file = vec![b'.'; 215];
        for group in &groups {
            assert!(group.iter().map(|run| run.len).sum::<u64>() <= 8);
            for run in group {
                let bytes = run.parts.concat();
                assert_eq!(bytes.len() as u64, run.len);
                file[run.offset as usize..run.end() as usize].copy_from_slice(&bytes);
            }
        }
        assert_eq!(&file[..10], b"abcdefghij");
        assert_eq!(&file[100..101], b"k");
        assert_eq!(&file[200..], b"lmnopqrstuvwxyz");
        assert_eq!(file.iter().filter(|b| **b == b'.').count(), 215 - 26);
    }
}
