//! Group commit: from the queue to the log, and the news that batches are durable.
//!
//! # Invariants
//! - Batches are written in the order of the queue, which is the order of their numbers.
//! - The first failed sync or write is remembered and told; nothing becomes durable after it. A write that lacks space
//!   is no such failure: it is tried again, since nothing of it was promised.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use torchfs_proto::Seq;

use super::{Durable, Failure, Inner};
use crate::error::{Error, Result};
use crate::log::format::Record;
use crate::log::{Appended, Wants};
use crate::{OnDurable, metrics};

/// How long the log waits before it tries again to write where there was no space.
const RETRY: Duration = Duration::from_millis(20);

/// Batches that have their number and are not durable yet.
#[derive(Default)]
pub struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    records: VecDeque<Record>,
    /// Bytes of these and of the group that is being written.
    bytes: usize,
    /// The longest of them; forgotten when there are none.
    longest: usize,
    /// When the first of them came.
    since: Option<Instant>,
    /// Somebody waits for every batch up to here.
    hurry: Seq,
    stop: bool,
}

/// The group that is being written. It stays here until it is durable.
#[derive(Default)]
pub struct Group {
    records: VecDeque<Record>,
}

/// What the log's thread does next.
enum Next {
    Group,
    Tick,
    Stop,
}

impl Queue {
    /// Adds a batch; called in the order of the numbers.
    pub fn push(&self, record: Record, group_bytes: usize) {
        let mut waiting = self.waiting.lock();
        let len = record.stored_len();
        waiting.bytes += len;
        waiting.longest = waiting.longest.max(len);
        let first = waiting.records.is_empty();
        if first {
            waiting.since = Some(Instant::now());
        }
        waiting.records.push_back(record);
        if first || (waiting.bytes >= group_bytes && waiting.bytes - len < group_bytes) {
            self.changed.notify_one();
        }
    }

    /// Somebody waits for this batch.
    pub fn hurry(&self, seq: Seq) {
        let mut waiting = self.waiting.lock();
        // Batches that do not exist yet are not hurried.
        let seq = waiting.records.back().map_or(Seq(0), |last| last.seq.min(seq));
        if seq > waiting.hurry {
            waiting.hurry = seq;
            self.changed.notify_one();
        }
    }

    /// Bytes that are not durable yet, and the longest record among them.
    pub fn bytes(&self) -> (usize, usize) {
        let waiting = self.waiting.lock();
        (waiting.bytes, waiting.longest)
    }

    /// Lets the log's thread finish what is queued and end.
    pub fn stop(&self) {
        self.waiting.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits until a group should be written, or nothing came for a while.
    fn wait_for_group(&self, linger: Duration, group_bytes: usize, tick: Option<Duration>) -> Next {
        let tick = tick.map(|tick| Instant::now() + tick);
        let mut waiting = self.waiting.lock();
        loop {
            let Some(first) = waiting.records.front() else {
                match tick {
                    _ if waiting.stop => return Next::Stop,
                    None => self.changed.wait(&mut waiting),
                    Some(tick) if self.changed.wait_until(&mut waiting, tick).timed_out() => {
                        return Next::Tick;
                    }
                    Some(_) => {}
                }
                continue;
            };
            if waiting.stop || waiting.hurry >= first.seq || waiting.bytes >= group_bytes {
                return Next::Group;
            }
            let due = waiting.since.unwrap_or_else(Instant::now) + linger;
            if self.changed.wait_until(&mut waiting, due).timed_out() {
                return Next::Group;
            }
        }
    }

    /// Moves waiting records into the group.
    fn take(&self, group: &mut Group, group_bytes: usize) {
        let mut waiting = self.waiting.lock();
        let mut bytes: usize = group.records.iter().map(Record::stored_len).sum();
        while bytes < group_bytes
            && let Some(record) = waiting.records.pop_front()
        {
            bytes += record.stored_len();
            group.records.push_back(record);
        }
        waiting.since = (!waiting.records.is_empty()).then(Instant::now);
    }

    /// These bytes are durable.
    fn done(&self, bytes: usize) {
        let mut waiting = self.waiting.lock();
        waiting.bytes -= bytes;
        if waiting.bytes == 0 {
            waiting.longest = 0;
        }
    }
}

impl Inner {
    /// The log's thread.
    pub(super) fn run_log(&self) {
        loop {
            let every = self.log.tick_every();
            let next = self.queue.wait_for_group(self.config.linger, self.config.group_bytes, every);
            let done = match next {
                Next::Stop => return,
                Next::Tick => self.log.tick(),
                Next::Group => self.write_groups(),
            };
            if let Err(e) = done {
                self.durable.fail(&e);
                self.tell_room();
                return;
            }
            if self.durable.doubted.load(Ordering::Acquire) && self.log.leads() {
                self.durable.doubted.store(false, Ordering::Release);
                self.durable.tell_lead();
            }
        }
    }

    /// Writes all that is queued.
    fn write_groups(&self) -> Result<()> {
        loop {
            match self.sync_group() {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(e) if e.is_space() && !self.queue.waiting.lock().stop => std::thread::sleep(RETRY),
                Err(e) => return Err(e),
            }
        }
    }

    /// Writes and syncs one group. Returns whether some of it is still left because a segment was full.
    pub(super) fn sync_group(&self) -> Result<bool> {
        self.durable.check()?;
        let mut group = self.group.lock();
        self.queue.take(&mut group, self.config.group_bytes);
        if group.records.is_empty() {
            return Ok(false);
        }
        let started = Instant::now();
        let count = match self.log.append(&group.records, self.durable.seq())? {
            Appended::Durable(count) => count,
            // `order` sees to it that whatever is ordered fits.
            Appended::Full => {
                return Err(Error::Failed { what: "the log is full although it had room".into() });
            }
        };
        let mut bytes = 0;
        let mut last = Seq(0);
        for record in group.records.drain(..count) {
            bytes += record.stored_len();
            last = record.seq;
        }
        let left = !group.records.is_empty();
        drop(group);
        metrics::synced(count, started.elapsed());
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.synced_batches.fetch_add(count as u64, Ordering::Relaxed);
        self.durable.rise(last);
        self.queue.done(bytes);
        self.tell_room();
        match self.log.wants() {
            Wants::Nothing => {}
            Wants::Segment => self.chores.want_segment(),
            Wants::Checkpoint => self.chores.want_checkpoint(),
        }
        Ok(left)
    }

    pub(super) fn wait_durable(&self, seq: Seq, timeout: Duration) -> Result<()> {
        if self.durable.seq() >= seq {
            return Ok(());
        }
        self.queue.hurry(seq);
        if !self.config.threads {
            while self.durable.seq() < seq {
                let before = self.durable.seq();
                if let Err(e) = self.sync_group() {
                    if !e.is_space() {
                        self.durable.fail(&e);
                    }
                    return Err(e);
                }
                if self.durable.seq() == before {
                    return Err(Error::Timeout { seq, timeout: Duration::ZERO });
                }
            }
            return Ok(());
        }
        self.durable.wait(seq, timeout)
    }
}

impl Durable {
    pub(super) fn seq(&self) -> Seq {
        Seq(self.seq.load(Ordering::Acquire))
    }

    /// Fails if the log failed.
    pub(super) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { Err(self.failure()) } else { Ok(()) }
    }

    fn failure(&self) -> Error {
        self.what.lock().as_ref().map_or(Error::Failed { what: String::new() }, Failure::error)
    }

    /// Leadership is sure again.
    fn tell_lead(&self) {
        let listeners = self.lead.read().clone();
        listeners.iter().for_each(|tell| tell());
    }

    fn rise(&self, seq: Seq) {
        {
            let _guard = self.what.lock();
            self.seq.store(seq.0, Ordering::Release);
            self.changed.notify_all();
        }
        for tell in self.listeners() {
            tell(Ok(seq));
        }
    }

    /// Latches the first failure and tells everybody.
    pub(super) fn fail(&self, error: &Error) {
        {
            let mut what = self.what.lock();
            if what.is_some() {
                return;
            }
            *what = Some(match error {
                Error::Failed { what } => Failure::Failed(what.clone()),
                Error::Deposed { what } => Failure::Deposed(what.clone()),
                error => Failure::Failed(error.to_string()),
            });
            self.failed.store(true, Ordering::Release);
            self.changed.notify_all();
        }
        match error {
            Error::Deposed { what } => tracing::warn!("this metadata server leads no more: {what}"),
            error => {
                tracing::error!(%error, "the metadata log failed; no more changes are taken");
                metrics::failed();
            }
        }
        for tell in self.listeners() {
            tell(Err(self.failure()));
        }
    }

    fn wait(&self, seq: Seq, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut what = self.what.lock();
        loop {
            if self.seq() >= seq {
                return Ok(());
            }
            if let Some(what) = &*what {
                return Err(what.error());
            }
            if self.changed.wait_until(&mut what, deadline).timed_out() && self.seq() < seq {
                return match &*what {
                    Some(what) => Err(what.error()),
                    None => Err(Error::Timeout { seq, timeout }),
                };
            }
        }
    }

    fn listeners(&self) -> Vec<Arc<OnDurable>> {
        self.tell.read().clone()
    }
}

impl Failure {
    fn error(&self) -> Error {
        match self.clone() {
            Failure::Failed(what) => Error::Failed { what },
            Failure::Deposed(what) => Error::Deposed { what },
        }
    }
}
