//! Who may be interrupted: a table of the requests in progress, from `unique` to whoever waits for a signal.
//!
//! The kernel sends INTERRUPT when the process behind a request gets a signal, and then still waits for the reply,
//! even if the process was killed. So every request is entered here before its operation starts; the operation's
//! task asks [`Ticket::interrupted`] beside its work.
//!
//! # Invariants
//! - An interrupt that comes before anybody asks is remembered, one that comes after the request's end is ignored.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

const SHARDS: usize = 16;

/// The requests in progress.
#[derive(Debug, Default)]
pub struct Interrupts {
    shards: [Mutex<HashMap<u64, State>>; SHARDS],
}

#[derive(Debug)]
enum State {
    Running,
    Waiting(Waker),
    Interrupted,
}

/// One request's place in the table; leaves it when dropped.
#[derive(Debug)]
pub struct Ticket {
    table: Arc<Interrupts>,
    unique: u64,
}

impl Interrupts {
    /// Enters a request.
    pub fn enter(self: &Arc<Interrupts>, unique: u64) -> Ticket {
        self.shard(unique).lock().insert(unique, State::Running);
        Ticket { table: Arc::clone(self), unique }
    }

    /// A signal came for this request. `false` if it is not in progress: not yet, or no longer.
    pub fn interrupt(&self, unique: u64) -> bool {
        let before = match self.shard(unique).lock().entry(unique) {
            Entry::Occupied(mut entry) => entry.insert(State::Interrupted),
            Entry::Vacant(_) => return false,
        };
        if let State::Waiting(waker) = before {
            waker.wake();
        }
        true
    }

    /// Interrupts everything, when the mount is gone and nobody waits for replies any more.
    pub fn interrupt_all(&self) {
        for shard in &self.shards {
            let uniques: Vec<u64> = shard.lock().keys().copied().collect();
            for unique in uniques {
                self.interrupt(unique);
            }
        }
    }

    fn shard(&self, unique: u64) -> &Mutex<HashMap<u64, State>> {
        // Uniques of requests are even: the lowest bit marks an INTERRUPT.
        &self.shards[(unique >> 1) as usize % SHARDS]
    }
}

impl Ticket {
    /// Ends when a signal comes for this request.
    pub async fn interrupted(&self) {
        poll_fn(|cx| {
            let mut shard = self.table.shard(self.unique).lock();
            match shard.get_mut(&self.unique) {
                Some(State::Interrupted) | None => Poll::Ready(()),
                Some(state) => {
                    *state = State::Waiting(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.table.shard(self.unique).lock().remove(&self.unique);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_before_the_wait_is_not_lost() {
        let table = Arc::new(Interrupts::default());
        let ticket = table.enter(4);
        assert!(table.interrupt(4));
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(ticket.interrupted());
    }

    #[test]
    fn an_interrupt_wakes_the_wait() {
        let table = Arc::new(Interrupts::default());
        let ticket = table.enter(4);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let waiting = runtime.spawn(async move { ticket.interrupted().await });
        while !matches!(table.shard(4).lock().get(&4), Some(State::Waiting(_))) {
            std::thread::yield_now();
        }
        assert!(table.interrupt(4));
        runtime.block_on(waiting).unwrap();
    }

    #[test]
    fn a_request_that_ended_is_unknown() {
        let table = Arc::new(Interrupts::default());
        drop(table.enter(4));
        assert!(!table.interrupt(4));
    }
}
