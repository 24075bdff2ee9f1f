//! Whether a disk answers: the age of its oldest call in flight.
//!
//! A disk that hangs gives no error, it just does not come back: a controller that resets, a path of a SAN that is lost, a
//! frozen file system. Every call to a disk goes through [`Watched`], which notes when it began. A call that takes too long
//! makes the disk *silent*: it gets nothing new, whoever waits for it is told, and others take its place. When the call comes back the
//! disk is used again, after it has been well for as long as it takes to be called silent.
//!
//! # Invariants
//! - Nothing here waits for a disk: silence is found by a thread that only looks at clocks.
//! - Calls that never wait for the disk (bytes in memory) are not noted.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_proto::disk::{Advice, Disk, DiskFile, Space};

/// The calls of one disk.
pub(crate) struct Pulse {
    calls: Mutex<Calls>,
    /// A call that takes longer makes the disk silent.
    bound: Duration,
    /// Since when it is silent, in milliseconds after `start`, and one more; 0 while it answers.
    silent: AtomicU64,
    start: Instant,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Calls {
    next: u64,
    /// When each began; the first is the oldest.
    flying: BTreeMap<u64, Instant>,
    /// The last one that took too long: when it began and ended.
    late: Option<(Instant, Instant)>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    wakers: HashMap<u64, Waker>,
}

/// What a look found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// It has just become silent.
    Silent,
    /// It has just come back.
    Back,
}

impl Pulse {
    /// Of a disk with no call yet.
    pub fn new(bound: Duration) -> Arc<Pulse> {
        Arc::new(Pulse {
            calls: Mutex::default(),
            bound,
            silent: AtomicU64::new(0),
            start: Instant::now(),
            waiting: Mutex::default(),
        })
    }

    /// How long the disk has not answered; `None` while it does.
    pub fn silence(&self) -> Option<Duration> {
        let since = self.silent.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.start.elapsed().saturating_sub(Duration::from_millis(since)))
    }

    /// Looks at the calls; says if that changes anything.
    pub fn look(&self) -> Option<Turn> {
        let since = {
            let calls = self.calls.lock();
            let oldest = calls.flying.values().next().copied().filter(|began| began.elapsed() >= self.bound);
            let late = calls.late.filter(|(_, ended)| ended.elapsed() < self.bound).map(|(began, _)| began);
            late.into_iter().chain(oldest).min()
        };
        let now = since.map_or(0, |since| {
            u64::try_from(since.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX - 1) + 1
        });
        let before = self.silent.swap(now, Ordering::Relaxed);
        if now > 0 {
            // Also those who came since the last look.
            let wakers: Vec<Waker> = self.waiting.lock().wakers.drain().map(|(_, waker)| waker).collect();
            wakers.into_iter().for_each(Waker::wake);
        }
        match (before, now) {
            (0, 1..) => Some(Turn::Silent),
            (1.., 0) => Some(Turn::Back),
            _ => None,
        }
    }

    /// Comes when the disk is silent.
    pub fn until_silent(self: &Arc<Pulse>) -> UntilSilent {
        UntilSilent { pulse: self.clone(), waits: None }
    }

    fn timed<T>(&self, call: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let id = {
            let mut calls = self.calls.lock();
            calls.next += 1;
            let id = calls.next;
            calls.flying.insert(id, began);
            id
        };
        let result = call();
        let mut calls = self.calls.lock();
        calls.flying.remove(&id);
        if began.elapsed() >= self.bound {
            calls.late = Some((began, Instant::now()));
        }
        result
    }
}

/// See [`Pulse::until_silent`].
pub(crate) struct UntilSilent {
    pulse: Arc<Pulse>,
    waits: Option<u64>,
}

impl Future for UntilSilent {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let pulse = self.pulse.clone();
        let mut waiting = pulse.waiting.lock();
        // Looked at under the lock: whoever is added afterwards is woken by the next look.
        if pulse.silence().is_some() {
            return Poll::Ready(());
        }
        let id = *self.waits.get_or_insert_with(|| {
            waiting.next += 1;
            waiting.next
        });
        waiting.wakers.insert(id, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for UntilSilent {
    fn drop(&mut self) {
        if let Some(id) = self.waits {
            self.pulse.waiting.lock().wakers.remove(&id);
        }
    }
}

/// A disk whose calls are timed.
pub(crate) struct Watched {
    disk: Arc<dyn Disk>,
    pulse: Arc<Pulse>,
}

impl Watched {
    /// The same disk.
    pub fn over(disk: Arc<dyn Disk>, pulse: &Arc<Pulse>) -> Arc<dyn Disk> {
        Arc::new(Watched { disk, pulse: pulse.clone() })
    }

    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(WatchedFile { file, pulse: self.pulse.clone() })
    }
}

impl Disk for Watched {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.pulse.timed(|| self.disk.open(name)).map(|file| self.file(file))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.pulse.timed(|| self.disk.create(name)).map(|file| self.file(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.pulse.timed(|| self.disk.rename(from, to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.pulse.timed(|| self.disk.remove(name))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.pulse.timed(|| self.disk.list())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.pulse.timed(|| self.disk.sync_names())
    }

    fn space(&self) -> io::Result<Space> {
        self.pulse.timed(|| self.disk.space())
    }
}

struct WatchedFile {
    file: Arc<dyn DiskFile>,
    pulse: Arc<Pulse>,
}

impl DiskFile for WatchedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.pulse.timed(|| self.file.read_at(buf, offset))
    }

    fn is_cached(&self, offset: u64, len: u64) -> Option<bool> {
        self.file.is_cached(offset, len)
    }

    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        self.file.read_at_once(buf, offset)
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.pulse.timed(|| self.file.read_direct_at(buf, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.pulse.timed(|| self.file.write_at(bytes, offset))
    }

    fn write_vectored_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        self.pulse.timed(|| self.file.write_vectored_at(parts, offset))
    }

    fn write_direct_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        self.pulse.timed(|| self.file.write_direct_at(parts, offset))
    }

    fn sync(&self) -> io::Result<()> {
        self.pulse.timed(|| self.file.sync())
    }

    fn len(&self) -> io::Result<u64> {
        self.pulse.timed(|| self.file.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.pulse.timed(|| self.file.set_len(len))
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.pulse.timed(|| self.file.preallocate(len))
    }

    fn advise(&self, offset: u64, len: u64, advice: Advice) {
        self.file.advise(offset, len, advice);
    }

    fn raw_fd(&self) -> Option<RawFd> {
        self.file.raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_takes_too_long_is_silence_until_it_was_well_for_as_long() {
        let pulse = Pulse::new(Duration::from_millis(40));
        assert_eq!((pulse.look(), pulse.silence()), (None, None));
        let mut silent = Box::pin(pulse.until_silent());
        let mut context = Context::from_waker(Waker::noop());
        assert!(silent.as_mut().poll(&mut context).is_pending());
        pulse.timed(|| {
            assert_eq!(pulse.look(), None);
            std::thread::sleep(Duration::from_millis(60));
            assert_eq!(pulse.look(), Some(Turn::Silent));
            assert_eq!(pulse.look(), None);
            assert!(pulse.silence().is_some_and(|silence| silence >= Duration::from_millis(50)));
            assert!(silent.as_mut().poll(&mut context).is_ready());
        });
        assert_eq!(pulse.look(), None, "it may hang again at once");
        assert!(pulse.silence().is_some());
        std::thread::sleep(Duration::from_millis(60));
        pulse.timed(|| ());
        assert_eq!((pulse.look(), pulse.silence()), (Some(Turn::Back), None));
    }

    #[test]
    fn those_who_stop_waiting_are_forgotten() {
        let pulse = Pulse::new(Duration::from_secs(1));
        let mut context = Context::from_waker(Waker::noop());
        let mut both = [Box::pin(pulse.until_silent()), Box::pin(pulse.until_silent())];
        for one in &mut both {
            assert!(one.as_mut().poll(&mut context).is_pending());
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(pulse.waiting.lock().wakers.len(), 2);
        drop(both);
        assert_eq!(pulse.waiting.lock().wakers.len(), 0);
    }
}
