//! How much may be in flight: a count with a bound that readers wait for.
//!
//! Requests are admitted before they are read (`take` waits, so the reader stops and TCP holds the peer back). Answers are
//! added without asking (`add`): they exist already, but the next request waits until they are gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// A bounded amount.
pub(crate) struct Budget {
    used: AtomicU64,
    max: u64,
    freed: Notify,
}

impl Budget {
    pub fn new(max: u64) -> Arc<Budget> {
        Arc::new(Budget { used: AtomicU64::new(0), max, freed: Notify::new() })
    }

    /// Takes so much if there is room. One taker alone gets any amount, so that nothing waits for ever.
    pub fn try_take(&self, amount: u64) -> bool {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used == 0 || used.saturating_add(amount) <= self.max).then(|| used.saturating_add(amount))
            })
            .is_ok()
    }

    /// Waits for room, then takes it.
    pub async fn take(&self, amount: u64) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.try_take(amount) {
                return;
            }
            freed.await;
        }
    }

    /// Adds without asking.
    pub fn add(&self, amount: u64) {
        self.used.fetch_add(amount, Ordering::AcqRel);
    }

    pub fn give_back(&self, amount: u64) {
        self.used.fetch_sub(amount, Ordering::AcqRel);
        self.freed.notify_waiters();
    }

    /// Returns when everything was given back.
    pub async fn idle(&self) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.used.load(Ordering::Acquire) == 0 {
                return;
            }
            freed.await;
        }
    }
}
