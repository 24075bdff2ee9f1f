//! One change on its way: sent by its caller, and seen through by a task if the caller goes away.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use torchfs_proto::msg::meta::{Done, Op, method};
use torchfs_proto::{Code, Fault, Ino, Result};
use torchfs_rpc::{Call, CallFuture};

use super::leases::Ticket;
use super::ledger::Claim;
use super::session::{Heard, Kind, Route, Shared, State};
use super::{Changed, Mark};

/// A change that has its sequence and was sent.
pub(crate) struct Flight {
    shared: Arc<Shared>,
    seq: u64,
    kind: Kind,
    /// A lock that is waited for: given up with its caller, sent anew after a lost connection, and when others need room.
    loose: bool,
    /// Somebody waits for the answer, until then at most; otherwise this runs in a task until it is known.
    until: Option<Instant>,
    leg: Leg,
}

/// Where a change is.
#[allow(clippy::large_enum_variant)] // lives in the caller's future; a box would cost an allocation for every change
enum Leg {
    /// Sent over a connection.
    Sent {
        generation: u64,
        ticket: Option<Ticket>,
        call: Sending,
    },
    /// To be sent again in a little while.
    Resting {
        generation: u64,
    },
    /// Left to the replay.
    Lost,
    Over,
}

/// What came of an attempt to send a change.
#[allow(clippy::large_enum_variant)] // taken apart at once
enum Launch {
    Sent(Flight),
    /// There is no connection.
    Recovering,
    /// Too many changes are not durable yet.
    Full,
}

impl Shared {
    /// Makes a change, see [`super::Meta::change`].
    pub async fn change(self: &Arc<Shared>, op: Op) -> Result<Changed> {
        let waits = matches!(op, Op::Lock { wait: true, .. });
        let mut until = Instant::now() + self.config.op_timeout;
        let mut op = Some(op);
        let spare = if waits { op.clone() } else { None };
        loop {
            match poll_fn(|cx| Poll::Ready(self.launch(&mut op, waits, until, cx))).await? {
                Launch::Sent(mut flight) => {
                    let result = match flight.land().await {
                        Some(Err(fault)) if waits && fault.code == Code::WouldBlock => None,
                        result => result,
                    };
                    if let Some(result) = result {
                        return result.map(|done| Changed { done, seq: Mark(flight.seq) });
                    }
                    // A lock may be held by others for hours: only a silent service ends the wait.
                    op = spare.clone();
                    if self.state.lock().leases.alive(Instant::now()) {
                        until = Instant::now() + self.config.op_timeout;
                    } else if Instant::now() >= until {
                        return Err(self.silent());
                    }
                }
                Launch::Recovering => self.ready(until).await?,
                Launch::Full => self.make_room(&mut op, waits, until).await?,
            }
        }
    }

    /// Gives a change its sequence and sends it, in one step as far as other changes are concerned.
    fn launch(
        self: &Arc<Shared>,
        slot: &mut Option<Op>,
        loose: bool,
        until: Instant,
        cx: &mut Context<'_>,
    ) -> Result<Launch> {
        let Some(mut op) = slot.take() else { unreachable!("a change is launched once, or given back") };
        let _order = self.order.lock();
        let (route, seq) = {
            let mut state = self.state.lock();
            if !state.is_live()? {
                *slot = Some(op);
                return Ok(Launch::Recovering);
            }
            if !state.ledger.has_room(state.claim(&mut op, loose)) {
                *slot = Some(op);
                return Ok(Launch::Full);
            }
            let Some(route) = state.route()? else {
                *slot = Some(op);
                return Ok(Launch::Recovering);
            };
            rebase(&state.moved, &mut op);
            (route, state.ledger.last() + 1)
        };
        // Encoded outside of the lock that everybody takes; `order` keeps the sequence ours.
        let body = route.envelope.seal(seq, &op, None);
        let grant = grant_of(&mut op).is_some();
        {
            let mut state = self.state.lock();
            if state.generation != route.generation {
                state.leases.end(route.ticket);
                *slot = Some(op);
                return Ok(Launch::Recovering);
            }
            state.ledger.enter(op, loose);
        }
        let kind = Kind::Change { seq, mine: true, grant };
        let deadline = if loose { until.min(Instant::now() + self.config.lock_wait) } else { until };
        let mut flight = Flight::new(self.clone(), seq, kind, loose, Some(until), route, body, deadline);
        flight.depart(cx);
        Ok(Launch::Sent(flight))
    }

    /// Waits until the ledger has room for this change.
    async fn make_room(self: &Arc<Shared>, op: &mut Option<Op>, loose: bool, until: Instant) -> Result<()> {
        self.crowded.notify_waiters();
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            // Each time: what is answered meanwhile has to become durable, too.
            let last = self.state.lock().ledger.last();
            self.durable(last, until).await?;
            {
                let state = self.state.lock();
                state.is_live()?;
                // A recall may have come for it while it waited.
                if op.as_mut().is_none_or(|op| state.ledger.has_room(state.claim(op, loose))) {
                    return Ok(());
                }
            }
            self.within(until, progress).await?;
        }
    }

    /// The answer to a loose change; `None` when others wait for the room that it keeps.
    async fn unless_crowded(&self, call: &mut Sending) -> Option<Result<torchfs_rpc::Reply>> {
        let mut crowded = std::pin::pin!(self.crowded.notified());
        crowded.as_mut().enable();
        // Those who wait already do not say so again.
        if call.answer.is_none() && !self.state.lock().ledger.has_room(Claim::Common) {
            return None;
        }
        match select(std::pin::pin!(call.answer()), crowded).await {
            Either::Left((result, _)) => Some(result),
            Either::Right(_) => None,
        }
    }

    /// A change to be told again over a new connection.
    pub fn replay(self: &Arc<Shared>, seq: u64, route: Route, op: &mut Op, made: Option<Ino>) -> Flight {
        let grant = grant_of(op).is_some();
        let body = route.envelope.seal(seq, op, made);
        let until = Instant::now() + self.config.op_timeout;
        let kind = Kind::Change { seq, mine: false, grant };
        Flight::new(self.clone(), seq, kind, false, None, route, body, until)
    }
}

impl State {
    /// What a change is to others that wait for room.
    ///
    /// Where a change holds the watermark, it may wait for another session to give a lease back, and that one for us: what gives a
    /// lease back must never wait for room. That is a commit of the file, and the ids of its blocks; one request for
    /// ids is under way at a time.
    fn claim(&self, op: &mut Op, loose: bool) -> Claim {
        let awaited = match op {
            Op::GrantIds { .. } => true,
            op => grant_of(op).is_some_and(|(ino, _)| self.leases.is_leaving(ino)),
        };
        match (awaited, loose) {
            (true, _) => Claim::Awaited,
            (false, true) => Claim::Loose,
            (false, false) => Claim::Common,
        }
    }
}

impl Flight {
    #[allow(clippy::too_many_arguments)]
    fn new(
        shared: Arc<Shared>,
        seq: u64,
        kind: Kind,
        loose: bool,
        until: Option<Instant>,
        route: Route,
        body: Vec<u8>,
        deadline: Instant,
    ) -> Flight {
        let mut call = Call::new(method::META, body, Duration::ZERO);
        call.deadline = deadline;
        let call = Sending { call: route.connection.call(call), answer: None };
        let leg = Leg::Sent { generation: route.generation, ticket: Some(route.ticket), call };
        Flight { shared, seq, kind, loose, until, leg }
    }

    /// Sends the request. If the answer is there at once it is kept for [`Flight::land`].
    pub fn depart(&mut self, cx: &mut Context<'_>) {
        if let Leg::Sent { call, .. } = &mut self.leg {
            call.depart(cx);
        }
    }

    /// The answer; `None` if a waiting lock lost its connection and has to be sent anew.
    pub async fn land(&mut self) -> Option<Result<Done>> {
        loop {
            match &mut self.leg {
                Leg::Sent { generation, ticket, call } => {
                    let result = match self.loose {
                        false => call.answer().await,
                        true => match self.shared.unless_crowded(call).await {
                            Some(result) => result,
                            None => {
                                if let Some(ticket) = ticket.take() {
                                    self.shared.state.lock().leases.end(ticket);
                                }
                                self.give_up();
                                return None;
                            }
                        },
                    };
                    let (generation, ticket) = (*generation, ticket.take());
                    match self.shared.hear(generation, ticket, result, self.kind) {
                        Heard::Answer(result) => {
                            self.leg = Leg::Over;
                            return Some(result);
                        }
                        Heard::Lost | Heard::Again if self.loose => {
                            self.give_up();
                            return None;
                        }
                        Heard::Lost => self.leg = Leg::Lost,
                        Heard::Again => self.leg = Leg::Resting { generation },
                    }
                }
                Leg::Resting { generation } => {
                    let generation = *generation;
                    let until = self.until.unwrap_or_else(|| Instant::now() + self.shared.config.op_timeout);
                    if let Err(fault) = self.shared.pause(until).await {
                        return Some(Err(fault));
                    }
                    self.leg = self.again(generation, until);
                }
                Leg::Lost => {
                    if self.until.is_none() {
                        self.leg = Leg::Over; // the replay sees to it, and nobody waits here
                        return None;
                    }
                    let told = self.shared.state.lock().ledger.wait(self.seq);
                    self.shared.progress.notify_waiters(); // what was brought already makes room
                    let until = self.until.unwrap_or_else(Instant::now);
                    let result = match told {
                        None => Err(self.ended()),
                        Some(told) => match self.shared.within(until, told).await {
                            Ok(Ok(result)) => result,
                            Ok(Err(_)) => Err(self.ended()),
                            Err(silent) => Err(silent),
                        },
                    };
                    self.leg = Leg::Over;
                    return Some(result);
                }
                Leg::Over => return None,
            }
        }
    }

    /// The answer to a change told again: it was answered before, so only whether it was heard matters.
    pub async fn retold(mut self, until: Instant) -> Heard {
        let Leg::Sent { generation, ticket, call } = &mut self.leg else {
            return Heard::Lost;
        };
        let generation = *generation;
        let result = {
            let answer = std::pin::pin!(call.answer());
            match self.shared.within(until, answer).await {
                Ok(result) => result,
                Err(_) => return Heard::Lost,
            }
        };
        let ticket = ticket.take();
        self.shared.hear(generation, ticket, result, self.kind)
    }

    /// Sends the same change again, unless a replay did so.
    fn again(&self, generation: u64, until: Instant) -> Leg {
        let mut state = self.shared.state.lock();
        if state.generation != generation {
            return Leg::Lost;
        }
        let Ok(Some(route)) = state.route() else {
            return Leg::Lost;
        };
        let Some(op) = state.ledger.op(self.seq) else {
            state.leases.end(route.ticket);
            return Leg::Lost;
        };
        let mut call = Call::new(
            method::META,
            route.envelope.seal(self.seq, op, state.ledger.made(self.seq)),
            Duration::ZERO,
        );
        call.deadline = until;
        let call = Sending { call: route.connection.call(call), answer: None };
        Leg::Sent { generation: route.generation, ticket: Some(route.ticket), call }
    }

    fn give_up(&mut self) {
        self.leg = Leg::Over;
        self.shared.state.lock().ledger.give_up(self.seq);
        self.shared.progress.notify_waiters();
    }

    fn ended(&self) -> Fault {
        self.shared.ended().unwrap_or_else(|| self.shared.silent())
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let leg = std::mem::replace(&mut self.leg, Leg::Over);
        if let Leg::Over = leg {
            return;
        }
        if self.loose || self.until.is_none() || self.shared.ended().is_some() {
            let mut state = self.shared.state.lock();
            if let Leg::Sent { ticket: Some(ticket), .. } = &leg {
                state.leases.end(*ticket);
            }
            if self.loose {
                state.ledger.give_up(self.seq);
                drop(state);
                self.shared.progress.notify_waiters();
            }
            return;
        }
        // Wherever the answer comes from: what a replay brings has nobody to wait for either.
        self.shared.state.lock().ledger.disown(self.seq);
        self.shared.progress.notify_waiters();
        if let Leg::Lost = leg {
            return;
        }
        // The caller is gone, the change is not: its answer is consumed by a task.
        let mut rest = Flight {
            shared: self.shared.clone(),
            seq: self.seq,
            kind: self.kind,
            loose: false,
            until: None,
            leg,
        };
        self.shared.spawn_own(async move {
            rest.land().await;
        });
    }
}

/// A call, and its answer if that came at the first poll.
struct Sending {
    call: CallFuture,
    answer: Option<Result<torchfs_rpc::Reply>>,
}

impl Sending {
    fn depart(&mut self, cx: &mut Context<'_>) {
        if let Poll::Ready(answer) = Pin::new(&mut self.call).poll(cx) {
            self.answer = Some(answer);
        }
    }

    async fn answer(&mut self) -> Result<torchfs_rpc::Reply> {
        match self.answer.take() {
            Some(answer) => answer,
            None => (&mut self.call).await,
        }
    }
}

/// The grant that an operation rests on, and the file it is on.
pub(crate) fn grant_of(op: &mut Op) -> Option<(Ino, &mut u64)> {
    match op {
        Op::Commit(commit) => Some((commit.ino, &mut commit.grant)),
        Op::CopyRange { to, grant, .. } => Some((*to, grant)),
        _ => None,
    }
}

/// Grants were numbered anew by another leader: names the same grant by its new number.
pub(crate) fn rebase(moved: &HashMap<(Ino, u64), u64>, op: &mut Op) {
    if let Some((ino, grant)) = grant_of(op)
        && let Some(new) = moved.get(&(ino, *grant))
    {
        *grant = *new;
    }
}
