//! The calls of one connection that wait for their reply.
//!
//! Slots are reused; an id is the slot's place and how often it was used, so a late reply finds nobody instead of somebody
//! else. Deadlines cost nothing per call: the table remembers for when its keeper is armed, and only a call with
//! an earlier deadline asks it to be woken.
//!
//! # Invariants
//! - A reply wakes its waiter and nobody else, outside the lock.
//! - Once closed, the table stays empty and every insertion fails with the reason.

use std::task::{Context, Poll, Waker};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use torchfs_proto::{Fault, Result};

use crate::call::Reply;

/// The waiting calls.
pub(crate) struct Table {
    state: Mutex<State>,
}

struct State {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// When the keeper looks for deadlines next.
    armed: Option<Instant>,
    closed: Option<Fault>,
}

struct Slot {
    uses: u32,
    call: Option<Waiting>,
}

struct Waiting {
    method: u16,
    deadline: Instant,
    waker: Option<Waker>,
    done: Option<Result<Reply>>,
    /// Goes with the frame that cancels the call, if there is one.
    place: Option<OwnedSemaphorePermit>,
}

/// A call whose time is up.
pub(crate) struct Expired {
    pub id: u64,
    pub place: OwnedSemaphorePermit,
}

impl Table {
    pub fn new() -> Table {
        let state = State { slots: Vec::new(), free: Vec::new(), armed: None, closed: None };
        Table { state: Mutex::new(state) }
    }

    /// A new waiting call; also says whether the keeper has to be woken for its deadline.
    pub fn insert(
        &self,
        method: u16,
        deadline: Instant,
        waker: Waker,
        place: OwnedSemaphorePermit,
    ) -> Result<(u64, bool)> {
        let mut state = self.state.lock();
        if let Some(fault) = &state.closed {
            return Err(fault.clone());
        }
        let index = match state.free.pop() {
            Some(index) => index as usize,
            None => {
                state.slots.push(Slot { uses: 0, call: None });
                state.slots.len() - 1
            }
        };
        let slot = &mut state.slots[index];
        slot.uses = slot.uses.wrapping_add(1);
        slot.call = Some(Waiting { method, deadline, waker: Some(waker), done: None, place: Some(place) });
        let id = u64::from(slot.uses) << 32 | index as u64;
        let sooner = state.armed.is_none_or(|armed| deadline < armed);
        if sooner {
            state.armed = Some(deadline);
        }
        Ok((id, sooner))
    }

    /// Whether somebody waits for this id.
    pub fn waits(&self, id: u64) -> bool {
        self.state.lock().find(id).is_some_and(|call| call.done.is_none())
    }

    /// Gives a waiting call its result; one that nobody waits for is dropped.
    pub fn complete(&self, id: u64, result: Result<Reply>) {
        let mut state = self.state.lock();
        let Some(call) = state.find(id) else { return };
        if call.done.is_some() {
            return;
        }
        call.done = Some(result);
        let waker = call.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The result, if it is there; the slot is free afterwards.
    pub fn poll(&self, id: u64, cx: &mut Context<'_>) -> Poll<Option<Result<Reply>>> {
        let mut state = self.state.lock();
        let Some(call) = state.find(id) else {
            return Poll::Ready(None);
        };
        if call.done.is_none() {
            match &mut call.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        Poll::Ready(state.remove(id).and_then(|call| call.done))
    }

    /// The caller went away; returns its place if the server should be told.
    pub fn abandon(&self, id: u64) -> Option<OwnedSemaphorePermit> {
        let mut state = self.state.lock();
        let open = state.closed.is_none();
        let call = state.remove(id)?;
        drop(state);
        if open && call.done.is_none() { call.place } else { None }
    }

    /// Ends the calls whose time is up with what `fault` says of their method, and returns them and when to look next.
    pub fn expire(&self, now: Instant, fault: impl Fn(u16) -> Fault) -> (Vec<Expired>, Option<Instant>) {
        let mut expired = Vec::new();
        let mut wakers = Vec::new();
        let mut state = self.state.lock();
        if state.armed.is_none_or(|armed| now < armed) {
            return (expired, state.armed);
        }
        let mut next: Option<Instant> = None;
        for (index, slot) in state.slots.iter_mut().enumerate() {
            let id = u64::from(slot.uses) << 32 | index as u64;
            let Some(call) = slot.call.as_mut().filter(|call| call.done.is_none()) else { continue };
            if call.deadline > now {
                next = Some(next.map_or(call.deadline, |next| next.min(call.deadline)));
                continue;
            }
            call.done = Some(Err(fault(call.method)));
            wakers.extend(call.waker.take());
            expired.extend(call.place.take().map(|place| Expired { id, place }));
        }
        state.armed = next;
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        (expired, next)
    }

    /// Ends all calls, now and later, with this fault.
    pub fn close(&self, fault: Fault) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        let mut wakers = Vec::new();
        for call in state.slots.iter_mut().filter_map(|slot| slot.call.as_mut()) {
            if call.done.is_none() {
                call.done = Some(Err(fault.clone()));
                wakers.extend(call.waker.take());
            }
        }
        state.closed = Some(fault);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Why the table is closed.
    pub fn closed(&self) -> Option<Fault> {
        self.state.lock().closed.clone()
    }
}

impl State {
    fn find(&mut self, id: u64) -> Option<&mut Waiting> {
        let slot = self.slots.get_mut(id as u32 as usize)?;
        if u64::from(slot.uses) == id >> 32 { slot.call.as_mut() } else { None }
    }

    fn remove(&mut self, id: u64) -> Option<Waiting> {
        self.find(id)?;
        self.free.push(id as u32);
        self.slots[id as u32 as usize].call.take()
    }
}
