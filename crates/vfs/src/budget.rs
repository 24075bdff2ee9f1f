//! Bounds: bytes buffered in all, and things done at the same time.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::metrics;
use crate::signal::Signal;

/// Bytes that are written here and not committed, over all files: those that may still be overwritten in place, and those on their
/// way into blocks, which stay in memory until they are there even if newer ones lie on top.
pub(crate) struct Budget {
    used: Mutex<u64>,
    max: u64,
    /// Given whenever some are free again.
    pub(crate) freed: Signal,
}

impl Budget {
    pub(crate) fn new(max: u64) -> Budget {
        Budget { used: Mutex::new(0), max, freed: Signal::default() }
    }

    pub(crate) fn used(&self) -> u64 {
        *self.used.lock()
    }

    /// Whether so many bytes more are too many. One write always fits into an empty budget.
    pub(crate) fn exceeded_by(&self, more: u64) -> bool {
        let used = *self.used.lock();
        used > 0 && used + more > self.max
    }

    /// A file's dirty bytes became more or fewer.
    pub(crate) fn adjust(&self, before: u64, after: u64) {
        {
            let mut used = self.used.lock();
            *used = (*used + after).saturating_sub(before);
            ::metrics::gauge!(metrics::DIRTY_BYTES).set(*used as f64);
        }
        if after < before {
            self.freed.notify();
        }
    }
}

/// Bytes on their way into a block or a commit; they count until the last who needs them is done.
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Charge {
    pub(crate) fn new(budget: &Arc<Budget>, bytes: u64) -> Arc<Charge> {
        budget.adjust(0, bytes);
        Arc::new(Charge { budget: budget.clone(), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.adjust(self.bytes, 0);
    }
}

/// A number of places; who finds none free waits.
#[derive(Clone)]
pub(crate) struct Slots(Arc<Places>);

struct Places {
    free: Mutex<usize>,
    given: Signal,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Slots {
        Slots(Arc::new(Places { free: Mutex::new(count.max(1)), given: Signal::default() }))
    }

    pub(crate) async fn take(&self) -> Slot {
        loop {
            let given = self.0.given.listen();
            if let Some(slot) = self.try_take() {
                return slot;
            }
            given.await;
        }
    }

    pub(crate) fn try_take(&self) -> Option<Slot> {
        let mut free = self.0.free.lock();
        *free = free.checked_sub(1)?;
        Some(Slot(self.0.clone()))
    }
}

/// A place taken, until dropped.
pub(crate) struct Slot(Arc<Places>);

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.given.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_place_given_back_is_found_by_who_waits() {
        let slots = Slots::new(1);
        let first = slots.take().now_or_never().expect("one is free");
        let mut second = Box::pin(slots.take());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.now_or_never().is_some());
    }

    #[test]
    fn one_write_fits_into_an_empty_budget() {
        let budget = Budget::new(10);
        assert!(!budget.exceeded_by(100));
        budget.adjust(0, 100);
        assert!(budget.exceeded_by(1));
        let freed = budget.freed.listen();
        budget.adjust(100, 0);
        assert!(freed.now_or_never().is_some());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_two_need_counts_until_both_are_done() {
        let budget = Arc::new(Budget::new(10));
        let one = Charge::new(&budget, 7);
        let two = one.clone();
        drop(one);
        assert_eq!(budget.used(), 7);
        drop(two);
        assert_eq!(budget.used(), 0);
    }
}
