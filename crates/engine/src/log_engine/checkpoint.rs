//! Checkpoints: the overlay goes into the replica, then log segments are used again.
//!
//! # Invariants
//! - Only durable batches reach the replica: it never knows more than the log.
//! - The overlay forgets a layer only after the replica holds it durably.
//! - A checkpoint that lacks space changes nothing and is tried again; any other failure latches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use torchfs_proto::Seq;

use super::Inner;
use crate::error::{Error, Result};
use crate::log::Wants;
use crate::metrics;

/// How long after a checkpoint without space the next one is tried, unless somebody asks for it.
const RETRY: Duration = Duration::from_secs(1);

/// What the chores' thread should do.
#[derive(Default)]
pub struct Chores {
    wanted: Mutex<Wanted>,
    changed: Condvar,
    /// Only one checkpoint at a time, whoever calls.
    one: Mutex<()>,
    full: AtomicBool,
}

#[derive(Default)]
struct Wanted {
    checkpoint: bool,
    segment: bool,
    stop: bool,
}

impl Chores {
    pub(super) fn want_checkpoint(&self) {
        let mut wanted = self.wanted.lock();
        if !wanted.checkpoint {
            wanted.checkpoint = true;
            self.changed.notify_one();
        }
    }

    pub(super) fn want_segment(&self) {
        let mut wanted = self.wanted.lock();
        if !wanted.segment {
            wanted.segment = true;
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.wanted.lock().stop = true;
        self.changed.notify_all();
    }

    /// Whether the last checkpoint found no space in the replica.
    pub(super) fn replica_is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }
}

impl Inner {
    /// The chores' thread.
    pub(super) fn run_chores(&self) {
        let mut due = Instant::now() + self.config.checkpoint_interval;
        loop {
            let checkpoint = {
                let mut wanted = self.chores.wanted.lock();
                while !wanted.stop && !wanted.checkpoint && !wanted.segment && Instant::now() < due {
                    self.chores.changed.wait_until(&mut wanted, due);
                }
                if wanted.stop {
                    return;
                }
                wanted.segment = false;
                std::mem::take(&mut wanted.checkpoint) || Instant::now() >= due
            };
            if self.durable.check().is_err() {
                // Nothing can be written any more; only the end is waited for.
                due = Instant::now() + self.config.checkpoint_interval.max(RETRY);
                continue;
            }
            let done = if checkpoint { self.checkpoint().map(|_| ()) } else { self.maintain_log() };
            if checkpoint {
                let pause =
                    if self.chores.replica_is_full() { RETRY } else { self.config.checkpoint_interval };
                due = Instant::now() + pause;
            }
            if let Err(error) = done
                && !error.is_space()
                && self.durable.check().is_ok()
            {
                tracing::warn!(%error, "a checkpoint of the metadata was not written");
            }
        }
    }

    /// Brings everything ordered so far into the replica.
    pub(super) fn checkpoint(&self) -> Result<Seq> {
        let _one = self.chores.one.lock();
        self.durable.check()?;
        let started = Instant::now();
        let (layer, last) = {
            let mut front = self.front.write();
            let last = Seq(front.next.0 - 1);
            if last.0 == self.applied.load(Ordering::Acquire) {
                drop(front);
                self.maintain_log()?;
                return Ok(last);
            }
            (front.overlay.freeze(), last)
        };
        let from = Seq(self.applied.load(Ordering::Acquire));
        let written = self.write_layer(&layer, from, last);
        let keys = layer.len();
        drop(layer);
        match written {
            Ok(()) => {
                let forgotten = {
                    let mut front = self.front.write();
                    let forgotten = front.overlay.forget_lower();
                    metrics::overlay(front.overlay.bytes(), front.overlay.keys());
                    forgotten
                };
                self.applied.store(last.0, Ordering::Release);
                self.checkpoints.fetch_add(1, Ordering::Relaxed);
                self.chores.full.store(false, Ordering::Release);
                self.space.lock().at = None;
                // Freeing many small pieces takes a while: not under the lock.
                drop(forgotten);
                metrics::checkpointed(keys, started.elapsed());
                let maintained = self.maintain_log();
                self.tell_room();
                maintained.map(|()| last)
            }
            Err(error) => {
                self.front.write().overlay.thaw();
                if error.is_space() {
                    if !self.chores.full.swap(true, Ordering::AcqRel) {
                        tracing::warn!("no space for a checkpoint of the metadata; only deleting goes on");
                    }
                } else if !matches!(error, Error::Timeout { .. } | Error::Silent { .. }) {
                    self.durable.fail(&error);
                }
                self.tell_room();
                Err(error)
            }
        }
    }

    fn write_layer(&self, layer: &crate::overlay::Layer, from: Seq, last: Seq) -> Result<()> {
        self.wait_durable(last, self.config.stall_timeout)?;
        self.log.settle(from, last, layer)?;
        let mut changes = layer.iter().map(|(key, value)| (&**key, value.as_deref()));
        self.replica.commit(&self.log.mark(last), &mut changes)
    }

    /// Uses segments again that the replica has made superfluous, or makes one more.
    pub(super) fn maintain_log(&self) -> Result<()> {
        let applied = Seq(self.applied.load(Ordering::Acquire));
        let may_grow = self.log.wants() == Wants::Segment && {
            let space = self.look_at_space(self.config.space_interval)?;
            space.free >= space.reserve.saturating_add(self.config.log.segment_bytes)
        };
        match self.log.maintain(applied, may_grow) {
            Err(error) if error.is_space() => {
                tracing::warn!(%error, "the metadata log does not grow");
                Ok(())
            }
            // Room is given back later.
            Err(Error::Silent { .. }) => Ok(()),
            Err(error) => {
                self.durable.fail(&error);
                Err(error)
            }
            Ok(()) => {
                self.tell_room();
                Ok(())
            }
        }
    }
}
