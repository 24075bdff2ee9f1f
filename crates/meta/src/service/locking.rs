//! Waiting for file locks: in order of arrival, without deadlock, until released or dropped.
//!
//! # Invariants
//! - A waiter gets its lock only when no earlier waiter asks for one that excludes it.
//! - What an owner asks for without waiting ends its earlier waits there, wherever those requests still are: one that was given up
//!   gets nothing afterwards, even if its cancel comes late or its connection is lost. Who still wants it asks again.
//! - A wait that would close a circle of fcntl owners is refused, as far as this service knows of them.

use std::collections::HashSet;

use torchfs_proto::msg::meta::{Done, FileLock, LockKind, LockType, Request};
use torchfs_proto::record::Answered;
use torchfs_proto::{Code, Fault, Result, SessionId};

use super::signals::Topic;
use super::{Hold, Meta, State, Step};
use crate::leases::Node;
use crate::namespace::{Held, held_locks, in_the_way, set_lock};

/// A request that waits for a lock.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub id: u64,
    pub node: Node,
    pub wanted: Held,
}

impl Meta {
    /// Takes or releases a lock, or waits for it.
    pub(super) fn lock(
        &self,
        state: &mut State,
        request: &Request,
        hold: &mut Hold<'_>,
        node: Node,
        lock: &FileLock,
        wait: bool,
    ) -> Result<Step> {
        let wanted = Held { session: request.session, lock: lock.clone() };
        if wait && is_outdated(state, request, hold) {
            return Err(Fault::new(Code::WouldBlock, "its owner asked for something else meanwhile"));
        }
        if !wait {
            end_waits(state, node, &wanted);
        }
        let mut view = self.view(node.0);
        view.inode(node.1)?;
        let held = held_locks(&view, node.1)?;
        let turn = |waiter: &&Waiter| {
            waiter.node == node
                && hold.lock.is_none_or(|id| waiter.id < id)
                && waiter.wanted.excludes(&wanted)
        };
        // Who does not wait does not queue either, as fcntl has it.
        let blocker = in_the_way(&held, &wanted)
            .or_else(|| state.waiters.iter().find(turn).filter(|_| wait).map(|waiter| &waiter.wanted));
        if lock.ty != LockType::Unlock
            && let Some(blocker) = blocker
        {
            if !wait {
                let what = format!("a lock on inode {} is held by session {}", node.1, blocker.session);
                return Err(Fault::new(Code::WouldBlock, what));
            }
            if lock.kind == LockKind::Posix && self.closes_circle(state, node, &held, &wanted)? {
                return Err(Fault::new(
                    Code::Deadlock,
                    format!("waiting for inode {} would never end", node.1),
                ));
            }
            self.count_waiting(state, hold)?;
            if hold.lock.is_none() {
                let id = state.leases.ticket();
                hold.lock = Some(id);
                state.waiters.push(Waiter { id, node, wanted });
            }
            return Ok(Step::Wait(state.signals.register(&[Topic::Lock(node)], None)));
        }
        let still = set_lock(&mut view, node.1, &held, &wanted)?;
        self.store_outcome(state, request, &mut view, Some(Answered::Ok))?;
        let seq = self.order(state, view, self.clock.now())?;
        self.stored_outcome(state, request, true);
        if let Some(session) = state.sessions.get_mut(&request.session) {
            match still {
                true => session.locked.insert(node.1),
                false => session.locked.remove(&node.1),
            };
        }
        // A release, a smaller range or a weaker type may let somebody go on.
        state.signals.wake(Topic::Lock(node));
        // After a crash another session could take a lock that was lost with the end of the log before its holder replays
        // it. So where there are others, a lock is told only when durable.
        let rests = state.rests.on(node, request.session);
        let alone = state.sessions.values().filter(|session| session.volume == node.0).count() == 1;
        let upto = if alone || lock.ty == LockType::Unlock { rests } else { rests.max(seq) };
        let reply = self.reply(state, request.session, Ok(Done::Ok), seq, Vec::new());
        Ok(if upto > reply.durable { Step::Durable(upto, reply) } else { Step::Reply(reply) })
    }

    /// Whether those in the way wait, directly or through others, for the one who asks.
    fn closes_circle(&self, state: &State, node: Node, held: &[Held], wanted: &Held) -> Result<bool> {
        let me = (wanted.session, wanted.lock.owner);
        let mut open: Vec<(SessionId, u64)> =
            held.iter().filter(|h| h.excludes(wanted)).map(|h| (h.session, h.lock.owner)).collect();
        let mut seen = HashSet::new();
        let posix = |waiter: &&Waiter| waiter.wanted.lock.kind == LockKind::Posix;
        while let Some(owner) = open.pop() {
            if owner == me {
                return Ok(true);
            }
            if !seen.insert(owner) {
                continue;
            }
            for waiter in state.waiters.iter().filter(posix) {
                if (waiter.wanted.session, waiter.wanted.lock.owner) != owner {
                    continue;
                }
                let there = match waiter.node == node {
                    true => held.to_vec(),
                    false => held_locks(&self.view(waiter.node.0), waiter.node.1)?,
                };
                let blocking = there.iter().filter(|h| h.excludes(&waiter.wanted));
                open.extend(blocking.map(|h| (h.session, h.lock.owner)));
            }
        }
        Ok(false)
    }
}

/// Whether a wait was ended, or comes over a connection that its session has left: requests come in order otherwise, once what
/// another leader answered has been told again.
fn is_outdated(state: &State, request: &Request, hold: &Hold<'_>) -> bool {
    match hold.lock {
        Some(id) => !state.waiters.iter().any(|waiter| waiter.id == id),
        None => {
            let session = state.sessions.get(&request.session);
            session.is_some_and(|session| session.reported && request.seq < session.last_seq)
        }
    }
}

/// Ends the waits of the same owner for what this request is about.
fn end_waits(state: &mut State, node: Node, wanted: &Held) {
    let before = state.waiters.len();
    state.waiters.retain(|waiter| !(waiter.node == node && waiter.wanted.is_replaced_by(wanted)));
    if state.waiters.len() < before {
        state.signals.wake(Topic::Lock(node));
    }
}
