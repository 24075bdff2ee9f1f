//! A gate before a disk: lets in what the disk can do at once, and the rest in a fair order.
//!
//! # Invariants
//! - What was let in has a [`Place`]; its room is given back when the place is dropped, wherever that happens.
//! - One request alone is let in even if it is larger than all the room.
//! - A request that nobody waits for any more takes no room.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::fair::{Fair, Flow};
use crate::promise::{Giver, Promise, promise};

/// A gate with so much room behind it.
pub(crate) struct Gate {
    state: Mutex<State>,
    room: u64,
}

struct State {
    free: u64,
    waiting: Fair<Waiting>,
}

struct Waiting {
    room: u64,
    giver: Giver<Place>,
}

/// Room behind the gate.
pub(crate) struct Place {
    gate: Arc<Gate>,
    room: u64,
}

/// Too many wait already.
#[derive(Debug)]
pub(crate) struct Full;

/// A way through the gate.
pub(crate) enum Way {
    /// At once.
    Open(Place),
    /// When it is this request's turn; `None` never comes while the gate exists.
    Later(Promise<Place>),
}

impl Gate {
    /// A gate with this much room, where so many may wait per flow and in all.
    pub fn new(room: u64, each_max: usize, all_max: usize) -> Arc<Gate> {
        let room = room.max(1);
        let state = State { free: room, waiting: Fair::new(each_max, all_max) };
        Arc::new(Gate { state: Mutex::new(state), room })
    }

    /// Asks for room; `cost` is what counts for whose turn it is.
    pub fn enter(self: &Arc<Gate>, flow: Flow, room: u64, cost: u64) -> Result<Way, Full> {
        let room = room.min(self.room);
        let mut state = self.state.lock();
        if state.waiting.len() == 0 && state.free >= room {
            state.free -= room;
            return Ok(Way::Open(Place { gate: self.clone(), room }));
        }
        let (giver, promise) = promise();
        state.waiting.push(flow, cost, Waiting { room, giver }).map_err(|_| Full)?;
        Ok(Way::Later(promise))
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    fn give_back(self: &Arc<Gate>, room: u64) {
        let mut back = room;
        loop {
            let mut state = self.state.lock();
            state.free += std::mem::take(&mut back);
            let free = state.free;
            if state.waiting.peek().is_none_or(|next| next.room > free) {
                return;
            }
            let Some(Waiting { room, giver }) = state.waiting.pop() else { return };
            state.free -= room;
            drop(state);
            if let Some(unwanted) = giver.give(Place { gate: self.clone(), room }) {
                // Given back here and not by its end, which would call this again for each that is gone.
                back = unwanted.forget();
            }
        }
    }
}

impl Place {
    fn forget(mut self) -> u64 {
        std::mem::take(&mut self.room)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.room > 0 {
            self.gate.give_back(self.room);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_open(promise: &mut Promise<Place>) -> Option<Place> {
        match Pin::new(promise).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place.unwrap()),
            Poll::Pending => None,
        }
    }

    fn open(way: Result<Way, Full>) -> Place {
        match way.unwrap() {
            Way::Open(place) => place,
            Way::Later(_) => panic!("it has to wait"),
        }
    }

    fn later(way: Result<Way, Full>) -> Promise<Place> {
        match way.unwrap() {
            Way::Open(_) => panic!("it did not have to wait"),
            Way::Later(promise) => promise,
        }
    }

    #[test]
    fn room_is_given_in_turn_and_comes_back() {
        let gate = Gate::new(10, 100, 100);
        let session = Flow::Session;
        let first = open(gate.enter(session(1), 10, 0));
        let mut waits: Vec<_> = (0..5).map(|_| later(gate.enter(session(1), 10, 1 << 20))).collect();
        let mut other = later(gate.enter(session(2), 3, 0));
        assert!(is_open(&mut waits[0]).is_none());
        drop(first);
        let held = is_open(&mut waits[0]).unwrap();
        assert!(is_open(&mut other).is_none());
        drop(held);
        // The other session's turn comes before the rest of the first one's.
        let held = is_open(&mut other).unwrap();
        assert!(is_open(&mut waits[1]).is_none(), "7 of 10 are free");
        drop(held);
        drop(is_open(&mut waits[1]).unwrap());
        // Those that nobody awaits are passed over.
        drop(waits);
        assert_eq!(gate.waiting(), 0);
        assert_eq!(gate.state.lock().free, 10);
        drop(open(gate.enter(session(3), 1_000, 0)));
    }

    #[test]
    fn thousands_that_gave_up_do_not_block_the_way() {
        let gate = Gate::new(1, 100_000, 100_000);
        let held = open(gate.enter(Flow::Session(1), 1, 0));
        let gone: Vec<_> = (0..50_000).map(|_| later(gate.enter(Flow::Session(1), 1, 0))).collect();
        drop(gone);
        let mut last = later(gate.enter(Flow::Session(1), 1, 0));
        drop(held);
        assert!(is_open(&mut last).is_some());
        assert_eq!((gate.waiting(), gate.state.lock().free), (0, 1));
    }
}
