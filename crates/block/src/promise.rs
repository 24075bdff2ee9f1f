//! One value that one thread or task gives and another awaits.
//!
//! # Invariants
//! - A promise whose giver is dropped resolves to `None`: nobody waits forever.
//! - A value that nobody awaits any more goes back to its giver, or is dropped if it was given before.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// A promise and the right to keep it.
pub(crate) fn promise<T>() -> (Giver<T>, Promise<T>) {
    let shared = Arc::new(Mutex::new(Shared { value: None, waker: None, given_up: false, unwanted: false }));
    (Giver(shared.clone()), Promise(shared))
}

struct Shared<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// The giver is gone.
    given_up: bool,
    /// The one who waited is gone.
    unwanted: bool,
}

/// The end that gives.
pub(crate) struct Giver<T>(Arc<Mutex<Shared<T>>>);

impl<T> Giver<T> {
    /// Gives the value, or has it back if nobody wants it any more.
    pub fn give(self, value: T) -> Option<T> {
        let mut shared = self.0.lock();
        if shared.unwanted {
            return Some(value);
        }
        shared.value = Some(value);
        let waker = shared.waker.take();
        drop(shared);
        if let Some(waker) = waker {
            waker.wake();
        }
        None
    }
}

impl<T> Drop for Giver<T> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.given_up = true;
        let waker = shared.waker.take();
        drop(shared);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The end that waits.
pub(crate) struct Promise<T>(Arc<Mutex<Shared<T>>>);

impl<T> Future for Promise<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut shared = self.0.lock();
        if let Some(value) = shared.value.take() {
            return Poll::Ready(Some(value));
        }
        if shared.given_up {
            return Poll::Ready(None);
        }
        shared.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.unwanted = true;
        let value = shared.value.take();
        // Whatever the value does when it goes, it does without our lock.
        drop(shared);
        drop(value);
    }
}
