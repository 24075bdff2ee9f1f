//! Looks after the disks: each has a thread that sees whether it still answers, and reads all of it over and over at a gentle
//! rate to find what rots.
//!
//! What is damaged is marked by the store, kept, not served, and reported to the metadata service with the next
//! heartbeat; repair then pulls a good copy, which takes its place.
//!
//! # Invariants
//! - The scrub waits while clients wait for the disk, but never for longer than a second per piece.
//! - A disk that does not answer holds up its own thread only. One more thread sees that, and waits for no disk.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use crate::disks::{DataDisk, Disks};
use crate::server::Config;
use crate::store::Cursor;
use crate::{Error, Result, metrics as names};

/// The cursor is stored this often.
const STORE_EVERY: Duration = Duration::from_secs(60);
/// Pieces that are listed at a time.
const LIST: usize = 256;
/// How long a piece waits for clients at most, and how often it looks.
const GIVE_WAY: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often the clocks of calls are looked at.
const LOOK_AT_PULSE: Duration = Duration::from_millis(250);

/// The threads.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    /// By disk; the one that looks at clocks has none.
    threads: Mutex<Vec<(Option<u64>, JoinHandle<()>)>>,
}

struct Shared {
    config: Config,
    stopping: Mutex<bool>,
    stop: Condvar,
}

impl Watch {
    /// Starts one thread for each disk.
    pub fn start(disks: &Arc<Disks>, config: &Config) -> Result<Watch> {
        let shared = Shared { config: config.clone(), stopping: Mutex::new(false), stop: Condvar::new() };
        let watch = Watch { shared: Arc::new(shared), threads: Mutex::default() };
        let (shared, all, server) = (watch.shared.clone(), disks.clone(), config.store.server);
        let look = move || {
            while !shared.wait(LOOK_AT_PULSE) {
                all.all().iter().for_each(|disk| disk.look(server));
            }
        };
        let thread =
            std::thread::Builder::new().name(format!("block-pulse-{server}")).spawn(look).map_err(|e| {
                Error::Io { server, what: "start the watch of its disks' pulse", why: e.to_string() }
            })?;
        watch.threads.lock().push((None, thread));
        watch.look_for_disks(disks)?;
        Ok(watch)
    }

    /// Starts a thread for each disk that has none.
    pub fn look_for_disks(&self, disks: &Arc<Disks>) -> Result<()> {
        let server = self.shared.config.store.server;
        let mut threads = self.threads.lock();
        for disk in disks.all().iter() {
            if threads.iter().any(|(id, _)| *id == Some(disk.name.id)) {
                continue;
            }
            let (shared, disks, watched) = (self.shared.clone(), disks.clone(), disk.clone());
            let thread = std::thread::Builder::new()
                .name(format!("block-watch-{server}"))
                .spawn(move || shared.watch(&disks, &watched))
                .map_err(|e| Error::Io { server, what: "start a disk's watch", why: e.to_string() })?;
            threads.push((Some(disk.name.id), thread));
        }
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.shared.stopping.lock() = true;
        self.shared.stop.notify_all();
        for (_, thread) in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!(server = %self.shared.config.store.server, "a disk's watch panicked");
            }
        }
    }
}

impl Shared {
    /// Until the server stops or the disk fails.
    fn watch(&self, disks: &Disks, disk: &DataDisk) {
        let mut scrub = Scrub::new(disks, disk, &self.config);
        let mut probed = Instant::now();
        let tick = self.config.watch_every.min(Duration::from_secs(1));
        while disk.store.failure().is_none() && !self.wait(tick) {
            if probed.elapsed() >= self.config.watch_every {
                probed = Instant::now();
                disk.store.probe();
            }
            if let Err(error) = disk.refresh() {
                tracing::debug!(disk = disk.name.path, %error, "a disk has no figures");
            }
            scrub.go_on(tick, || self.wait(LOOK_AGAIN));
        }
        scrub.keep_cursor();
    }

    /// Waits so long; whether the server stops.
    fn wait(&self, time: Duration) -> bool {
        let mut stopping = self.stopping.lock();
        if !*stopping {
            self.stop.wait_for(&mut stopping, time);
        }
        *stopping
    }
}

/// The scrub of one disk.
struct Scrub<'a> {
    disks: &'a Disks,
    disk: &'a DataDisk,
    rate: u64,
    every: Duration,
    cursor: Cursor,
    stored: Instant,
    /// Bytes that may be read now; less than nothing after a large piece.
    budget: i64,
}

impl<'a> Scrub<'a> {
    fn new(disks: &'a Disks, disk: &'a DataDisk, config: &Config) -> Scrub<'a> {
        let cursor = disk.store.load_cursor();
        let (rate, every) = (config.scrub_rate, config.scrub_every);
        Scrub { disks, disk, rate, every, cursor, stored: Instant::now(), budget: 0 }
    }

    /// Reads what the time that has passed allows.
    fn go_on(&mut self, passed: Duration, wait: impl Fn() -> bool) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if self.rate == 0 || rests(&self.cursor, now, self.every) {
            return;
        }
        let more = i64::try_from(u128::from(self.rate) * passed.as_millis() / 1000).unwrap_or(i64::MAX);
        self.budget = self.budget.saturating_add(more).min(more);
        if self.cursor.after.is_none() {
            self.cursor.began_secs = now;
            if let Err(error) = self.disk.store.verify_headers() {
                tracing::warn!(disk = self.disk.name.path, %error, "cannot read the headers of all segments");
            }
        }
        while self.budget > 0 {
            let pieces = self.disk.store.list(self.cursor.after, LIST);
            if pieces.is_empty() {
                self.cursor.after = None;
                self.keep_cursor();
                return;
            }
            for piece in pieces {
                if self.budget <= 0 || !self.disk.works() {
                    break;
                }
                let came = Instant::now();
                while self.disk.reads.waiting() > 0 && came.elapsed() < GIVE_WAY {
                    if wait() {
                        return;
                    }
                }
                // What is wrong is marked and logged by the store.
                if self.disk.store.verify(piece.block, piece.piece).is_ok() {
                    self.disks.drop_double(self.disk, piece.block, piece.piece);
                }
                self.cursor.after = Some((piece.block, piece.piece));
                self.budget -= i64::from(piece.stored) + 4096;
                metrics::counter!(names::SCRUBBED_BYTES).increment(u64::from(piece.stored));
            }
            if !self.disk.works() {
                return;
            }
        }
        if self.stored.elapsed() >= STORE_EVERY {
            self.keep_cursor();
        }
    }

    fn keep_cursor(&mut self) {
        self.stored = Instant::now();
        if self.disk.works()
            && self.cursor != self.disk.store.load_cursor()
            && let Err(error) = self.disk.store.store_cursor(&self.cursor)
        {
            tracing::warn!(disk = self.disk.name.path, %error, "cannot remember how far the scrub has come");
        }
    }
}

/// Whether it is too early for the next scrub. One that began in the future was noted by a clock that was wrong.
fn rests(cursor: &Cursor, now_secs: u64, every: Duration) -> bool {
    let ends = cursor.began_secs.saturating_add(every.as_secs());
    cursor.after.is_none() && cursor.began_secs > 0 && (cursor.began_secs..ends).contains(&now_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_that_a_wrong_clock_began_in_the_future_is_begun_again() {
        let every = Duration::from_secs(100);
        let rests = |began_secs, now| rests(&Cursor { after: None, began_secs }, now, every);
        assert!(!rests(0, 50), "there was none yet");
        assert!(rests(1_000, 1_000) && rests(1_000, 1_099));
        assert!(!rests(1_000, 1_100));
        assert!(!rests(1_000, 999) && !rests(u64::MAX, 1_000));
    }
}
