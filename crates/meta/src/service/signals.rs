//! Waiting without a runtime: a request that must wait gets a signal, registered under the lock that it was decided under,
//! so that nothing that happens afterwards is missed.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use parking_lot::Mutex;
use torchfs_engine::Engine;
use torchfs_proto::{Code, Fault, Result, Seq, SessionId};

use crate::leases::Node;

/// What a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Topic {
    /// Leases on an inode change hands.
    Lease(Node),
    /// There is an event for a session.
    Events(SessionId),
    /// A change that a session told again is done.
    Turn(SessionId),
    /// A lock on a file is released.
    Lock(Node),
}

/// One wait; fires once.
#[derive(Debug)]
pub struct Signal {
    fired: AtomicBool,
    until: Option<Instant>,
    waker: Mutex<Option<Waker>>,
}

impl Signal {
    fn fire(&self) {
        self.fired.store(true, Ordering::Release);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

/// The future of a signal.
pub struct Fired(pub Arc<Signal>);

impl Future for Fired {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.fired.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        *self.0.waker.lock() = Some(cx.waker().clone());
        // It may have fired in between, before the waker was there to be found.
        if self.0.fired.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// All waits, by what they wait for. Those that nobody awaits any more are dropped on the way.
#[derive(Debug, Default)]
pub struct Signals {
    topics: HashMap<Topic, Vec<Weak<Signal>>>,
}

impl Signals {
    /// A signal that fires when any of the topics is woken, or when the upkeep comes by after `until`.
    pub fn register(&mut self, topics: &[Topic], until: Option<Instant>) -> Arc<Signal> {
        let signal = Arc::new(Signal { fired: AtomicBool::new(false), until, waker: Mutex::new(None) });
        for topic in topics {
            let waiting = self.topics.entry(*topic).or_default();
            waiting.retain(|signal| signal.strong_count() > 0);
            waiting.push(Arc::downgrade(&signal));
        }
        signal
    }

    /// Fires everything that waits for this.
    pub fn wake(&mut self, topic: Topic) {
        for signal in self.topics.remove(&topic).into_iter().flatten() {
            if let Some(signal) = signal.upgrade() {
                signal.fire();
            }
        }
    }

    /// Fires what has waited long enough.
    pub fn expire(&mut self, now: Instant) {
        self.topics.retain(|_, waiting| {
            waiting.retain(|signal| match signal.upgrade() {
                Some(signal) if signal.until.is_some_and(|until| until <= now) => {
                    signal.fire();
                    false
                }
                Some(_) => true,
                None => false,
            });
            !waiting.is_empty()
        });
    }

    /// Fires everything: the service stops.
    pub fn wake_all(&mut self) {
        for signal in self.topics.drain().flat_map(|(_, waiting)| waiting) {
            if let Some(signal) = signal.upgrade() {
                signal.fire();
            }
        }
    }
}

/// Who waits for the log to become durable. Told from the log's thread, so it has a lock of its own, never held with
/// another.
#[derive(Debug, Default)]
pub struct Board {
    next: AtomicU64,
    waiting: Mutex<BTreeMap<(Seq, u64), Waker>>,
    /// Those that wait until it is sure who leads.
    doubting: Mutex<BTreeMap<u64, Waker>>,
    failed: Mutex<Option<Fault>>,
}

impl Board {
    /// Called by the engine.
    pub fn tell(&self, how_far: torchfs_engine::Result<Seq>) {
        let woken = {
            let mut waiting = self.waiting.lock();
            match how_far {
                Ok(seq) => {
                    let later = waiting.split_off(&(Seq(seq.0 + 1), 0));
                    std::mem::replace(&mut *waiting, later)
                }
                Err(error) => {
                    *self.failed.lock() = Some(error.into());
                    std::mem::take(&mut *waiting)
                }
            }
        };
        woken.into_values().for_each(Waker::wake);
        if self.failed.lock().is_some() {
            self.lead();
        }
    }

    /// Called by the engine when it leads for sure again.
    pub fn lead(&self) {
        let woken = std::mem::take(&mut *self.doubting.lock());
        woken.into_values().for_each(Waker::wake);
    }
}

/// Waits until the engine leads for sure, or the log failed. What was read before is then of the newest state: nobody else
/// has led meanwhile, or it fails.
pub struct Leading<'a> {
    engine: &'a dyn Engine,
    board: &'a Board,
    id: Option<u64>,
}

impl<'a> Leading<'a> {
    /// Ready at the first poll as a rule.
    pub fn new(engine: &'a dyn Engine, board: &'a Board) -> Leading<'a> {
        Leading { engine, board, id: None }
    }

    fn look(&self) -> Option<Result<()>> {
        if self.engine.leads() {
            return Some(Ok(()));
        }
        self.board.failed.lock().clone().map(Err)
    }
}

impl Future for Leading<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if let Some(result) = self.look() {
            return Poll::Ready(result);
        }
        let board = self.board;
        let id = *self.id.get_or_insert_with(|| board.next.fetch_add(1, Ordering::Relaxed));
        self.board.doubting.lock().insert(id, cx.waker().clone());
        match self.look() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.board.doubting.lock().remove(&id);
        }
    }
}

/// Waits until a batch is durable, or the log failed.
pub struct Durable<'a> {
    engine: &'a dyn Engine,
    board: &'a Board,
    seq: Seq,
    id: Option<u64>,
}

impl<'a> Durable<'a> {
    /// Waits for this batch; one that does not exist yet is refused.
    pub fn new(engine: &'a dyn Engine, board: &'a Board, seq: Seq) -> Durable<'a> {
        Durable { engine, board, seq, id: None }
    }

    fn look(&self) -> Option<Result<()>> {
        if self.engine.durable() >= self.seq {
            return Some(Ok(()));
        }
        if let Some(fault) = self.board.failed.lock().clone() {
            return Some(Err(fault));
        }
        if self.seq > self.engine.ordered() {
            let what = format!("batch {} does not exist", self.seq);
            return Some(Err(Fault::new(Code::Invalid, what)));
        }
        None
    }
}

impl Future for Durable<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if let Some(result) = self.look() {
            return Poll::Ready(result);
        }
        let id = match self.id {
            Some(id) => id,
            None => {
                let id = self.board.next.fetch_add(1, Ordering::Relaxed);
                self.id = Some(id);
                id
            }
        };
        self.board.waiting.lock().insert((self.seq, id), cx.waker().clone());
        self.engine.hurry(self.seq);
        match self.look() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Drop for Durable<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.board.waiting.lock().remove(&(self.seq, id));
        }
    }
}
