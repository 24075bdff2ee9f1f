//! The session's state, and the one place where replies are heard.
//!
//! A session lives on one connection at a time. When it is lost, or the service says that it does not lead, the state becomes
//! `Recovering` under a new generation and a task looks for the leader (see `recover`). Replies of an older generation are
//! not heard any more, except as plain answers to questions.
//!
//! # Invariants
//! - A reply with a lower fence than one seen before is refused, whatever it says.
//! - `order` is held from when a sequence is given until its request was sent, so changes arrive in the order of their
//!   sequence; the service polls a request when it arrives, and replays keep the same order.
//! - Keepers are called without any lock held.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use futures_util::future::{Either, select};
use minicbor::Encode;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use torchfs_proto::attr::VolumeInfo;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg;
use torchfs_proto::msg::meta::{Done, Op, Reply, SessionInfo, method};
use torchfs_proto::{Code, Fault, Fence, Ino, Result, Seq, SessionId};
use torchfs_rpc::{Call, Connection};

use super::ids::Ids;
use super::leases::{Leases, Ticket};
use super::ledger::{Claim, Ledger};
use super::marks::Marks;
use super::tasks::Outbox;
use super::{Keeper, MetaConfig};

/// What all parts of a session share.
pub(crate) struct Shared {
    /// Everything is durable and the session is being closed: from now on it may end without a word.
    pub closing: AtomicBool,
    pub config: MetaConfig,
    pub state: Mutex<State>,
    /// See the invariants.
    pub order: Mutex<()>,
    /// Something happened that waiters look for: another phase, more that is durable, room in the ledger.
    pub progress: Notify,
    /// The ledger has no room: locks that are waited for are given up and asked for anew.
    pub crowded: Notify,
    pub info: RwLock<Arc<SessionInfo>>,
    pub placement: RwLock<Arc<Placement>>,
    pub space: AtomicU64,
    pub keeper: RwLock<Option<Weak<dyn Keeper>>>,
    /// When inodes were forgotten, and when answers about them came without a lease.
    pub forgot: Marks,
    pub bare: Marks,
    pub ids: Ids,
    /// Wakes the task that acknowledges recalls.
    pub acks: Notify,
    /// Wakes the task that gives things back.
    pub returns: Notify,
    /// Wakes the task that renews.
    pub renew: Notify,
    /// Tasks that callers gave us.
    pub tasks: Mutex<JoinSet<()>>,
    /// Our own.
    pub own: Mutex<JoinSet<()>>,
}

/// What changes under the lock.
pub(crate) struct State {
    pub phase: Phase,
    /// Rises whenever a connection is given up.
    pub generation: u64,
    pub fence: Fence,
    pub session: SessionId,
    pub epoch: u32,
    pub ledger: Ledger,
    pub leases: Leases,
    /// How far the Syncs in flight wait.
    pub syncs: Vec<Seq>,
    /// Grant numbers of a leader before, and what they are now.
    pub moved: HashMap<(Ino, u64), u64>,
    pub outbox: Outbox,
    /// Events heard up to here.
    pub seen: u64,
    /// Rises when another leader takes over: event and grant numbers of before mean nothing.
    pub era: u64,
    /// Which of the addresses is in use.
    pub addr: usize,
}

pub(crate) enum Phase {
    Live(Connection),
    Recovering,
    /// Closed, or gone at the service.
    Ended(Fault),
}

/// A connection to send one request over.
pub(crate) struct Route {
    pub connection: Connection,
    pub generation: u64,
    pub ticket: Ticket,
    pub envelope: Envelope,
}

/// The part of a request's envelope that the state knows.
#[derive(Clone, Copy)]
pub(crate) struct Envelope {
    pub session: SessionId,
    pub epoch: u32,
    pub watermark: u64,
    pub fence: Fence,
}

/// A [`msg::meta::Request`] whose operation is borrowed.
#[derive(Encode)]
struct Borrowed<'a> {
    #[n(0)]
    session: SessionId,
    #[n(1)]
    epoch: u32,
    #[n(2)]
    seq: u64,
    #[n(3)]
    step: u32,
    #[n(4)]
    watermark: u64,
    #[n(5)]
    fence: Fence,
    #[n(6)]
    op: &'a Op,
    #[n(7)]
    made: Option<Ino>,
}

impl Envelope {
    /// The request's bytes. `made`: see [`msg::meta::Request::made`].
    pub fn seal(&self, seq: u64, op: &Op, made: Option<Ino>) -> Vec<u8> {
        let Envelope { session, epoch, watermark, fence } = *self;
        msg::encode(&Borrowed { session, epoch, seq, step: 0, watermark, fence, op, made })
    }
}

/// What came of one request.
#[allow(clippy::large_enum_variant)] // handed on at once; a box would cost an allocation for every request
pub(crate) enum Heard {
    /// An answer or a final fault.
    Answer(Result<Done>),
    /// The connection is given up; another one follows.
    Lost,
    /// The service cannot answer now.
    Again,
}

/// Things to do once the lock is free.
#[derive(Default)]
struct After {
    notify: bool,
    recover: Option<Fault>,
    void: bool,
    end: Option<Fault>,
}

impl State {
    pub fn envelope(&self) -> Envelope {
        Envelope {
            session: self.session,
            epoch: self.epoch,
            watermark: self.ledger.watermark(),
            fence: self.fence,
        }
    }

    /// Whether there is a connection; a fault if there will never be one again.
    pub fn is_live(&self) -> Result<bool> {
        match &self.phase {
            Phase::Live(_) => Ok(true),
            Phase::Recovering => Ok(false),
            Phase::Ended(fault) => Err(fault.clone()),
        }
    }

    /// The way to the service; `None` while it is looked for.
    pub fn route(&mut self) -> Result<Option<Route>> {
        match &self.phase {
            Phase::Live(connection) => {
                let connection = connection.clone();
                let ticket = self.leases.begin();
                Ok(Some(Route { connection, generation: self.generation, ticket, envelope: self.envelope() }))
            }
            Phase::Recovering => Ok(None),
            Phase::Ended(fault) => Err(fault.clone()),
        }
    }

    fn lose(&mut self, generation: u64) -> bool {
        if self.generation != generation || !matches!(self.phase, Phase::Live(_)) {
            return false;
        }
        self.phase = Phase::Recovering;
        self.generation += 1;
        self.syncs.clear();
        true
    }
}

impl Shared {
    /// Makes one try over the present connection; `Lost` if there is none.
    pub async fn once(self: &Arc<Shared>, op: &Op, until: Instant) -> Heard {
        let route = self.state.lock().route();
        match route {
            Ok(Some(route)) => self.send(route, op, until).await,
            Ok(None) => Heard::Lost,
            Err(fault) => Heard::Answer(Err(fault)),
        }
    }

    /// Leaves a silent server and looks for another one, beginning with the next.
    pub fn leave(self: &Arc<Shared>, generation: u64) {
        let left = {
            let mut state = self.state.lock();
            let left = state.lose(generation);
            if left {
                state.addr = (state.addr + 1) % self.config.addrs.len();
            }
            left
        };
        if left {
            self.begin_recovery(Fault::new(Code::Timeout, "a renewal of the session was not answered"));
        }
    }

    /// Makes one try over this connection.
    pub async fn send(self: &Arc<Shared>, route: Route, op: &Op, until: Instant) -> Heard {
        let mut out = Out { shared: self, ticket: Some(route.ticket) };
        let mut call = Call::new(method::META, route.envelope.seal(0, op, None), std::time::Duration::ZERO);
        call.deadline = until;
        let result = route.connection.call(call).await;
        out.ticket = None;
        self.hear(route.generation, Some(route.ticket), result, Kind::Ask)
    }

    /// Asks until there is an answer, or time is up.
    pub async fn ask(self: &Arc<Shared>, op: Op, until: Instant) -> Result<Done> {
        loop {
            match self.once(&op, until).await {
                Heard::Answer(result) => return result,
                Heard::Lost => self.ready(until).await?,
                Heard::Again => self.pause(until).await?,
            }
        }
    }

    /// Hears a reply: fence, durability, lease epoch and grants, and what has to follow from a fault.
    pub fn hear(
        self: &Arc<Shared>,
        generation: u64,
        ticket: Option<Ticket>,
        result: Result<torchfs_rpc::Reply>,
        kind: Kind,
    ) -> Heard {
        let reply = result.and_then(|reply| msg::decode::<Reply>(&reply.body));
        let mut after = After::default();
        let heard = {
            let mut state = self.state.lock();
            let state = &mut *state;
            let heard = match reply {
                Ok(reply) => self.take(state, generation, reply, kind, &mut after),
                Err(fault) => self.judge(state, generation, Err(fault), kind, Seq(0), &mut after),
            };
            // Only now: until its grants are taken, the recalls that came after it was sent must be remembered.
            if let Some(ticket) = ticket {
                state.leases.end(ticket);
            }
            heard
        };
        self.follow(after);
        heard
    }

    fn take(&self, state: &mut State, generation: u64, reply: Reply, kind: Kind, after: &mut After) -> Heard {
        if reply.fence < state.fence || (reply.fence > state.fence && generation == state.generation) {
            // Either an old leader that does not know of the new one, or another leader on a connection where
            // we have not introduced ourselves.
            let what = format!("fence {} came after {}", reply.fence, state.fence);
            if state.lose(generation) {
                after.recover = Some(Fault::new(Code::NotLeader, what));
            }
            return Heard::Lost;
        }
        if generation == state.generation {
            after.notify |= state.ledger.durable(reply.durable);
            if reply.lease_epoch > state.leases.epoch() {
                state.leases.void(reply.lease_epoch);
                after.void = true;
                // Grants of this reply are dropped with all others: the keeper has to know first.
            } else {
                state.leases.grant(reply.lease_epoch, &reply.grants);
            }
        }
        let taken = generation == state.generation && reply.lease_epoch == state.leases.epoch();
        match reply.bare.as_deref() {
            _ if !taken => self.bare.note_all(),
            Some([]) => self.bare.note_all(),
            Some(inos) => inos.iter().for_each(|ino| self.bare.note(*ino)),
            None => {}
        }
        self.judge(state, generation, reply.result, kind, reply.ordered, after)
    }

    /// Decides what a result means for the request and for the session.
    fn judge(
        &self,
        state: &mut State,
        generation: u64,
        result: Result<Done>,
        kind: Kind,
        ordered: Seq,
        after: &mut After,
    ) -> Heard {
        let code = result.as_ref().err().map(|fault| fault.code);
        match (code, result) {
            (Some(Code::Unreachable | Code::NotLeader), Err(fault)) => {
                if state.lose(generation) {
                    after.recover = Some(fault);
                }
                Heard::Lost
            }
            (Some(Code::Timeout | Code::Overloaded | Code::Grace), Err(_)) => Heard::Again,
            (Some(Code::NoSession | Code::Fenced), Err(fault))
                if generation == state.generation && !(code == Some(Code::Fenced) && kind.has_grant()) =>
            {
                after.end = Some(fault.clone());
                Heard::Answer(Err(gone(&fault)))
            }
            (_, result) => {
                if let Kind::Change { seq, mine, .. } = kind {
                    if generation != state.generation {
                        return Heard::Lost; // what an old connection says is no answer; the replay brings it
                    }
                    // Whatever somebody may wait for room for.
                    after.notify |= !state.ledger.has_room(Claim::Loose);
                    state.ledger.answer(seq, ordered, &result, mine);
                } else if generation != state.generation && result.is_err() {
                    return Heard::Lost; // the next leader may see it otherwise
                }
                Heard::Answer(result)
            }
        }
    }

    fn follow(self: &Arc<Shared>, after: After) {
        if let Some(fault) = after.end {
            self.end(gone(&fault), true);
            return;
        }
        if after.void {
            self.tell_lost();
        }
        if after.notify {
            self.progress.notify_waiters();
        }
        if let Some(fault) = after.recover {
            self.begin_recovery(fault);
        }
    }

    /// Tells the keeper that all leases are void; pairs with [`Leases::void`].
    pub fn tell_lost(&self) {
        if let Some(keeper) = self.keeper() {
            keeper.lost();
        }
        self.state.lock().leases.told();
    }

    /// The session is over, by our wish or the service's.
    pub fn end(&self, fault: Fault, fenced: bool) {
        {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Ended(_)) {
                return;
            }
            state.phase = Phase::Ended(fault.clone());
            state.generation += 1;
            state.ledger.clear();
            state.leases.take();
            state.outbox.clear();
        }
        self.ids.fail(&fault);
        self.progress.notify_waiters();
        for waiting in [&self.acks, &self.returns, &self.renew] {
            waiting.notify_one();
        }
        if fenced && !self.closing.load(Ordering::Acquire) {
            tracing::error!("{fault}");
            if let Some(keeper) = self.keeper() {
                keeper.fenced();
            }
        }
    }

    pub fn keeper(&self) -> Option<Arc<dyn Keeper>> {
        self.keeper.read().as_ref().and_then(Weak::upgrade)
    }

    /// Why the session is over, if it is.
    pub fn ended(&self) -> Option<Fault> {
        match &self.state.lock().phase {
            Phase::Ended(fault) => Some(fault.clone()),
            Phase::Live(_) | Phase::Recovering => None,
        }
    }

    /// Waits until there is a connection.
    pub async fn ready(&self, until: Instant) -> Result<()> {
        self.wait_for(until, |state| match state.is_live() {
            Ok(live) => live.then_some(Ok(())),
            Err(fault) => Some(Err(fault)),
        })
        .await
    }

    /// Waits until the condition says something, looked at whenever there is progress.
    pub async fn wait_for<T>(
        &self,
        until: Instant,
        mut condition: impl FnMut(&mut State) -> Option<Result<T>>,
    ) -> Result<T> {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            if let Some(done) = condition(&mut self.state.lock()) {
                return done;
            }
            self.within(until, progress).await?;
        }
    }

    /// Waits a little before the same thing is tried again.
    pub async fn pause(&self, until: Instant) -> Result<()> {
        let at = Instant::now() + self.config.pause;
        if at >= until {
            return Err(self.silent());
        }
        self.sleep_until(at).await;
        Ok(())
    }

    /// The future's value, or a fault that names the service when time is up.
    pub async fn within<F: Future + Unpin>(&self, until: Instant, future: F) -> Result<F::Output> {
        let sleep = std::pin::pin!(self.sleep_until(until));
        match select(future, sleep).await {
            Either::Left((value, _)) => Ok(value),
            Either::Right(_) => Err(self.silent()),
        }
    }

    /// A timer of our runtime, for callers that may be on threads of their own.
    pub fn sleep_until(&self, at: Instant) -> tokio::time::Sleep {
        let _context = self.config.runtime.enter();
        tokio::time::sleep_until(at.into())
    }

    /// The fault of a call whose time is up.
    pub fn silent(&self) -> Fault {
        Fault::new(
            Code::Timeout,
            format!(
                "the metadata service at {} did not answer within {} s",
                self.config.addrs.join(", "),
                self.config.op_timeout.as_secs()
            ),
        )
        .next("check that it is running and can be reached from here")
    }

    /// Runs a task of a caller.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn_into(&self.tasks, &self.config.runtime, task);
    }

    /// Runs a task of our own.
    pub fn spawn_own(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn_into(&self.own, &self.config.runtime, task);
    }

    pub fn set_space(&self, space: u64) {
        self.space.store(space, Ordering::Relaxed);
    }

    /// Takes the volume's policies as they are now, for new data.
    pub fn set_volume(&self, volume: VolumeInfo) {
        let mut info = self.info.write();
        if info.volume != volume {
            *info = Arc::new(SessionInfo { volume, ..(**info).clone() });
        }
    }

    /// Takes a placement if it is newer than ours.
    pub fn set_placement(&self, placement: Placement) {
        let mut known = self.placement.write();
        if placement.version > known.version {
            *known = Arc::new(placement);
        }
    }
}

/// What a request is to the session.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Changes nothing.
    Ask,
    /// A change of this sequence; `mine`: the caller itself hears the answer.
    Change { seq: u64, mine: bool, grant: bool },
}

impl Kind {
    /// Whether the operation names a grant, so that `Fenced` may mean the grant and not the session.
    fn has_grant(self) -> bool {
        matches!(self, Kind::Change { grant: true, .. })
    }
}

/// A request that is out; if its caller is dropped it is not waited for.
struct Out<'a> {
    shared: &'a Shared,
    ticket: Option<Ticket>,
}

impl Drop for Out<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.shared.state.lock().leases.end(ticket);
        }
    }
}

fn spawn_into(
    tasks: &Mutex<JoinSet<()>>,
    runtime: &tokio::runtime::Handle,
    task: impl Future<Output = ()> + Send + 'static,
) {
    let mut tasks = tasks.lock();
    // Those that ended are let go here, so the set holds what runs and little more. A panic is in the log already.
    while tasks.try_join_next().is_some() {}
    tasks.spawn_on(task, runtime);
}

/// The sentence for callers after the service has given up the session.
fn gone(fault: &Fault) -> Fault {
    Fault::new(fault.code, format!("the session with the metadata service is gone: {fault}"))
        .next("mount again; what was not yet written back is lost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_borrowed_request_has_the_bytes_of_an_owned_one() {
        let op = Op::Lookup { parent: Ino(1), name: b"name".to_vec().into() };
        let envelope = Envelope { session: SessionId(3), epoch: 4, watermark: 5, fence: Fence(6) };
        let owned = msg::meta::Request {
            session: SessionId(3),
            epoch: 4,
            seq: 7,
            step: 0,
            watermark: 5,
            fence: Fence(6),
            op: op.clone(),
            made: Some(Ino(9)),
        };
        assert_eq!(envelope.seal(7, &op, Some(Ino(9))), msg::encode(&owned));
    }
}
