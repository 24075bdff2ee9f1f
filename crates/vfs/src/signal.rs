//! A signal that many can wait for: whoever listens before it is given is woken by it.
//!
//! # Invariants
//! - A listener made before `notify` is ready after it, whenever it is polled: no wake-up is lost between the check of a
//!   condition and the wait.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

#[derive(Default)]
pub(crate) struct Signal {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    given: u64,
    waiting: Vec<Waker>,
}

impl Signal {
    /// Wakes everybody who listens now.
    pub(crate) fn notify(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.given += 1;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Make this first, then check the condition, then wait.
    pub(crate) fn listen(&self) -> Listen<'_> {
        Listen { signal: self, seen: self.state.lock().given }
    }
}

pub(crate) struct Listen<'a> {
    signal: &'a Signal,
    seen: u64,
}

impl Future for Listen<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.signal.state.lock();
        if state.given != self.seen {
            return Poll::Ready(());
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_listener_hears_what_was_given_after_it_began() {
        let signal = Signal::default();
        let early = signal.listen();
        signal.notify();
        let late = signal.listen();
        assert!(early.now_or_never().is_some());
        assert!(late.now_or_never().is_none());
    }
}
