//! The service: takes requests one at a time through one short critical section, and waits outside of it.
//!
//! A request is decided under the lock: session, key, decision on a view, leases in the way, order. Nothing in there waits
//! for anybody. What has to wait (for recalls, a lock, an event, durability) leaves the lock, waits, and is decided again
//! from the start.
//!
//! # Invariants
//! - A batch is ordered in the same critical section in which it was decided.
//! - A request that waits for recalls is not ordered and blocks no other, least of all from the recalled session.
//! - An answer that rests on another session's change leaves only when that change is durable. So does one to servers and
//!   administrators that ordered something, and whatever tells of the placement: numbers that were told are not given twice.
//! - Every answer leaves under the lead, asked after everything it rests on was read. While the lead is in doubt requests
//!   wait, before they are decided and before they are answered.
//!
//! # Not here
//! What operations mean: `namespace/`. Sockets and timers: `server.rs`.

mod admin;
mod cluster;
mod files;
mod locking;
mod open;
mod replay;
pub(crate) mod sessions;
pub(crate) mod signals;
mod volumes;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use foldhash::{HashSet, HashSetExt};
use parking_lot::{Mutex, MutexGuard};
use torchfs_engine::Engine;
use torchfs_proto::clock::Clock;
use torchfs_proto::msg::meta::{Done, Event, Grant, Op, Reply, Request};
use torchfs_proto::record::{self, ClusterCounters};
use torchfs_proto::{Code, Fault, Ino, Result, Seq, SessionId, VolumeId, key};

use crate::config::Config;
use crate::leases::{Conflict, Data, Leases, Node};
use crate::members::Members;
use crate::metrics;
use crate::namespace::{self, Against, Copy, Ctx, Decision, End, Progress};
use crate::repair::Repairs;
use crate::rests::Rests;
use crate::table::Table;
use crate::view::View;
use locking::Waiter;
use sessions::Session;
use signals::{Board, Durable, Fired, Leading, Signal, Signals, Topic};

/// The metadata service of one store.
pub struct Meta {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: Config,
    /// When the service began.
    pub(crate) since: torchfs_proto::attr::Time,
    board: Arc<Board>,
    pub(crate) state: Mutex<State>,
}

/// What the service holds in memory; the store has everything that must survive.
pub(crate) struct State {
    pub sessions: BTreeMap<SessionId, Session>,
    pub leases: Leases,
    pub rests: Rests,
    pub signals: Signals,
    pub members: Members,
    pub repairs: Repairs,
    /// When the placement was last looked at.
    pub reshaped: Option<Instant>,
    pub volumes: BTreeMap<VolumeId, record::Volume>,
    pub cluster: ClusterCounters,
    pub waiters: Vec<Waiter>,
    pub chores: VecDeque<Chore>,
    /// After a restart, until all sessions have reported: nothing is served but what they report.
    pub grace: Option<Grace>,
    /// When a batch's time was last noted.
    pub noted: Option<Instant>,
    /// When the upkeep last came by.
    pub ticked: Option<Instant>,
    /// The lead was in doubt at the last tick: nobody could be heard meanwhile.
    pub deaf: bool,
    pub deleted: u64,
    /// Where the deleter goes on in the queue of each volume.
    pub deleted_upto: BTreeMap<VolumeId, Vec<u8>>,
    pub check: Option<crate::check::Run>,
    pub dumps: crate::dumps::Dumps,
    pub stopped: bool,
}

/// How long sessions are waited for after a restart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grace {
    /// Until then for all of them.
    pub earliest: Instant,
    /// Until then for those that have much to tell.
    pub latest: Instant,
}

/// Work that is done in bounded pieces beside the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Chore {
    /// Remove an orphan that nobody holds.
    Reap(Node, Progress),
    /// Remove extents beyond a cut.
    Trim(Node, Progress),
    /// Take ended sessions off the orphans after this one.
    Sweep(VolumeId, Ino),
    /// Tell a session of the orphans that it holds after this one: what the leader before told may not have been heard.
    Remind(SessionId, Ino),
    /// Release the locks on a file of a session that has ended.
    Unlock(Node, SessionId),
    /// Remove what is in a removed volume.
    Empty(VolumeId),
}

impl State {
    /// A cut of this file is over, or may be: how far the upkeep came with it says nothing of the next one, which may be at the
    /// same place.
    pub fn trimmed(&mut self, node: Node) {
        for chore in &mut self.chores {
            if let Chore::Trim(other, progress) = chore
                && *other == node
            {
                *progress = Progress::default();
            }
        }
    }
}

/// What one pass through the critical section came to.
enum Step {
    Reply(Reply),
    /// Reply when this batch is durable.
    Durable(Seq, Reply),
    Wait(Arc<Signal>),
    Again,
}

/// What a request leaves behind in the state while it waits; taken back when it is done or dropped.
struct Hold<'a> {
    meta: &'a Meta,
    session: SessionId,
    ticket: Option<u64>,
    nodes: Vec<Node>,
    lock: Option<u64>,
    listen_until: Option<Instant>,
    counted: bool,
    /// A change that is told again and that others wait behind.
    held_up: Option<u64>,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if self.ticket.is_none() && self.lock.is_none() && !self.counted {
            return;
        }
        let mut state = self.meta.state.lock();
        if let Some(ticket) = self.ticket {
            for node in self.nodes.drain(..) {
                state.leases.unwait(node, ticket);
                state.signals.wake(Topic::Lease(node));
            }
        }
        if let Some(id) = self.lock
            && let Some(at) = state.waiters.iter().position(|waiter| waiter.id == id)
        {
            let waiter = state.waiters.swap_remove(at);
            // Those behind it may have waited only for their turn.
            state.signals.wake(Topic::Lock(waiter.node));
        }
        if self.counted
            && let Some(session) = state.sessions.get_mut(&self.session)
        {
            session.waiting = session.waiting.saturating_sub(1);
            if let Some(seq) = self.held_up {
                session.held_up.remove(&seq);
                state.signals.wake(Topic::Turn(self.session));
            }
        }
    }
}

impl Meta {
    /// Answers one request. Ready at the first poll when nothing has to be waited for; may be dropped at any time.
    pub async fn handle(&self, request: Request) -> Reply {
        let mut hold = Hold {
            meta: self,
            session: request.session,
            ticket: None,
            nodes: Vec::new(),
            lock: None,
            listen_until: None,
            counted: false,
            held_up: None,
        };
        let mut reply = match self.lead().await {
            Ok(()) => self.decided(&request, &mut hold).await,
            Err(fault) => self.refusal(fault),
        };
        if let Err(fault) = self.lead().await {
            reply = self.refusal(fault);
        }
        reply
    }

    /// The answer, if this service still leads when it leaves.
    async fn decided(&self, request: &Request, hold: &mut Hold<'_>) -> Reply {
        loop {
            match self.step(request, hold) {
                Step::Reply(reply) => return reply,
                Step::Durable(seq, mut reply) => {
                    metrics::waited_durable();
                    if let Err(fault) = self.durable(seq).await {
                        reply.result = Err(fault);
                        reply.grants.clear();
                    }
                    reply.durable = self.engine.durable();
                    return reply;
                }
                Step::Wait(signal) => Fired(signal).await,
                Step::Again => {}
            }
        }
    }

    /// Waits while the lead is in doubt.
    fn lead(&self) -> Leading<'_> {
        Leading::new(&*self.engine, &self.board)
    }

    /// Waits until a batch is durable.
    pub(crate) fn durable(&self, seq: Seq) -> Durable<'_> {
        Durable::new(&*self.engine, &self.board, seq)
    }

    fn refusal(&self, fault: Fault) -> Reply {
        Reply {
            fence: self.engine.fence(),
            ordered: Seq(0),
            durable: self.engine.durable(),
            lease_epoch: 0,
            grants: Vec::new(),
            result: Err(fault),
            bare: None,
        }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The engine below.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    /// One pass through the critical section.
    fn step(&self, request: &Request, hold: &mut Hold<'_>) -> Step {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let now = self.clock.now();
        metrics::request(&request.op);
        let before = self.engine.ordered();
        match self.serve(state, request, hold, now) {
            Ok(Step::Again) => {
                // Comes back at once: those who wait go first.
                MutexGuard::unlock_fair(guard);
                Step::Again
            }
            Ok(step) => step,
            Err(fault) => {
                // A refusal rests on what was read as much as any other answer.
                let rests =
                    self.rests(state, request, [].iter()).max(self.admin_rests(state, &request.op, before));
                let reply = self.reply(state, request.session, Err(fault), Seq(0), Vec::new());
                if rests > self.engine.durable() { Step::Durable(rests, reply) } else { Step::Reply(reply) }
            }
        }
    }

    fn serve(&self, state: &mut State, request: &Request, hold: &mut Hold<'_>, now: Instant) -> Result<Step> {
        if request.fence > self.engine.fence() {
            return Err(Fault::new(Code::NotLeader, "another metadata server leads"));
        }
        if state.stopped {
            return Err(Fault::new(Code::NotLeader, "the metadata service stops"));
        }
        let before = self.engine.ordered();
        if let Some(done) = self.admin(state, &request.op, now)? {
            // A new session learns its lease epoch with its number.
            let session = if let Done::Session(info) = &done { info.session } else { request.session };
            let rests = self.admin_rests(state, &request.op, before);
            let reply = self.reply(state, session, Ok(done), Seq(0), Vec::new());
            return Ok(if rests > reply.durable { Step::Durable(rests, reply) } else { Step::Reply(reply) });
        }
        let volume = self.admit(state, request, now)?;
        if let Some(step) = self.session_op(state, request, hold, volume, now)? {
            return Ok(step);
        }
        if let Some(step) = self.replayed(state, request)? {
            return Ok(step);
        }
        if let Some(step) = self.in_turn(state, request, hold, now)? {
            return Ok(step);
        }
        if let Op::Lock { ino, lock, wait } = &request.op {
            return self.lock(state, request, hold, (volume, *ino), lock, *wait);
        }
        self.may_write(state, request, volume, now)?;

        let mut view = self.view(volume);
        let mut edit = None;
        let mut layout = None;
        if let Op::SetPolicy { policy, .. } = &request.op {
            let (mut table, mut counters) = (state.members.table.clone(), state.cluster.clone());
            layout = self.policy_layout(state, volume, policy, &mut table, &mut counters)?;
            edit = Some((table, counters));
        }
        let mut decision = {
            let session = &state.sessions[&request.session];
            let leases = &state.leases;
            let known = |ino: Ino| leases.known((volume, ino));
            let ctx = Ctx {
                session: request.session,
                known: &known,
                ranges: &session.ranges,
                trim: self.config.trim_extents,
                made: request.made,
                table: &state.members.table,
                layout,
            };
            decide(&mut view, &ctx, &request.op, || self.volume_use(state, volume))?
        };
        if let Some(step) = self.recall(state, request, hold, volume, &decision.against, now)? {
            return Ok(step);
        }
        if let Some(first) = decision.first {
            drop(view);
            return self.work(state, request.session, volume, first);
        }
        let mut grants = Vec::new();
        if let Op::OpenData { ino, write } = &request.op {
            let node = (volume, *ino);
            match state.leases.open_data(request.session, node, *write, now, hold.ticket) {
                Data::Granted(grant) => grants.extend((grant.bits != 0).then_some(grant)),
                Data::Recall(conflicts) => return self.wait_for(state, hold, node, conflicts, now),
                Data::Queue => return self.queue(state, hold, node, now),
            }
        }
        let seq = match view.is_clean() {
            true => Seq(0),
            false => self.commit(state, request, view, &decision, edit, now)?,
        };
        let mut bare = Vec::new();
        for (ino, bits) in &decision.wants {
            let grant = state.leases.grant(request.session, (volume, *ino), *bits, now, hold.ticket);
            if grant.bits != *bits {
                bare.push(*ino);
            }
            grants.push(grant);
        }
        undress(&mut decision.done, &mut bare);
        let rests = self.rests(state, request, decision.reads.iter().chain(&decision.changed));
        let mut reply = self.reply(state, request.session, Ok(decision.done), seq, grants);
        reply.bare = (!bare.is_empty()).then_some(bare);
        Ok(if rests > reply.durable { Step::Durable(rests, reply) } else { Step::Reply(reply) })
    }

    /// Orders a decision with its stored result, and lets memory follow.
    fn commit(
        &self,
        state: &mut State,
        request: &Request,
        mut view: View<'_>,
        decision: &Decision,
        mut edit: Option<(Table, ClusterCounters)>,
        now: Instant,
    ) -> Result<Seq> {
        let (volume, born) = (view.volume, view.born);
        self.store_outcome(state, request, &mut view, decision.answered.clone())?;
        if !decision.dirty.is_empty() {
            let (table, _) = edit.get_or_insert_with(|| (state.members.table.clone(), state.cluster.clone()));
            decision.dirty.iter().for_each(|group| table.mark_substituted(*group));
        }
        if let Some((table, counters)) = &mut edit {
            table.write(&state.members.table, &mut view, counters, &state.cluster);
        }
        let seq = self.order(state, view, now)?;
        if let Some((table, counters)) = edit {
            state.members.take(table, seq);
            state.cluster = counters;
        }
        debug_assert_eq!(seq, born, "one writer orders under one lock");
        self.stored_outcome(state, request, decision.answered.is_some());
        for ino in &decision.changed {
            state.rests.changed((volume, *ino), seq, request.session);
        }
        self.follow(state, request.session, volume, decision, now);
        Ok(seq)
    }

    /// Tells others and the upkeep what a decision brought.
    fn follow(
        &self,
        state: &mut State,
        session: SessionId,
        volume: VolumeId,
        decision: &Decision,
        now: Instant,
    ) {
        for ino in &decision.content {
            for sharer in state.leases.sharers(session, (volume, *ino), now) {
                self.push_event(state, sharer, Event::Changed { ino: *ino });
            }
        }
        for (ino, holders) in &decision.orphaned {
            for holder in holders.iter().filter(|holder| **holder != session) {
                self.push_event(state, *holder, Event::Orphaned { ino: *ino });
            }
        }
        for ino in &decision.gone {
            state.leases.gone((volume, *ino));
        }
        for ino in &decision.upkeep {
            state.chores.push_back(Chore::Reap((volume, *ino), Progress::default()));
            state.chores.push_back(Chore::Trim((volume, *ino), Progress::default()));
        }
    }

    /// Work on extents that must come before an operation, as a batch of its own.
    fn work(
        &self,
        state: &mut State,
        session: SessionId,
        volume: VolumeId,
        first: namespace::First,
    ) -> Result<Step> {
        let mut view = self.view(volume);
        let left = namespace::work(&mut view, first, self.config.trim_extents)?;
        let (namespace::First::Trim(ino)
        | namespace::First::Cut(ino, _)
        | namespace::First::Punch(ino, _, _)) = first;
        let seq = self.order(state, view, self.clock.now())?;
        state.rests.changed((volume, ino), seq, session);
        if matches!(first, namespace::First::Trim(_)) {
            state.trimmed((volume, ino));
        }
        state.chores.extend(left.map(|ino| Chore::Trim((volume, ino), Progress::default())));
        Ok(Step::Again)
    }

    /// Sends recalls for leases in the way and waits; `None` when nothing is in the way.
    fn recall(
        &self,
        state: &mut State,
        request: &Request,
        hold: &mut Hold<'_>,
        volume: VolumeId,
        against: &[Against],
        now: Instant,
    ) -> Result<Option<Step>> {
        let mut topics = Vec::new();
        let mut until: Option<Instant> = None;
        for against in against {
            let node = (volume, against.ino);
            let conflicts = state.leases.conflicts(request.session, node, against.bits, now);
            if conflicts.is_empty() {
                continue;
            }
            if state.grace.is_some() {
                return Err(Fault::new(Code::Grace, "others hold what this change would have to recall"));
            }
            let names: Vec<_> = against.name.iter().map(|name| name.clone().into()).collect();
            let ends = self.send_recalls(state, &conflicts, &names);
            until = until.into_iter().chain(ends).min();
            topics.push(Topic::Lease(node));
            self.take_ticket(state, hold, node)?;
        }
        if topics.is_empty() {
            return Ok(None);
        }
        self.hold_up(state, request, hold)?;
        Ok(Some(Step::Wait(state.signals.register(&topics, until))))
    }

    /// The same for a data lease on one file.
    fn wait_for(
        &self,
        state: &mut State,
        hold: &mut Hold<'_>,
        node: Node,
        conflicts: Vec<Conflict>,
        _now: Instant,
    ) -> Result<Step> {
        let until = self.send_recalls(state, &conflicts, &[]);
        self.take_ticket(state, hold, node)?;
        Ok(Step::Wait(state.signals.register(&[Topic::Lease(node)], until)))
    }

    /// Waits behind an earlier operation on the same file.
    fn queue(&self, state: &mut State, hold: &mut Hold<'_>, node: Node, now: Instant) -> Result<Step> {
        self.take_ticket(state, hold, node)?;
        let until = now + self.config.lease_term();
        Ok(Step::Wait(state.signals.register(&[Topic::Lease(node)], Some(until))))
    }

    fn take_ticket(&self, state: &mut State, hold: &mut Hold<'_>, node: Node) -> Result<()> {
        self.count_waiting(state, hold)?;
        let ticket = *hold.ticket.get_or_insert_with(|| state.leases.ticket());
        if !hold.nodes.contains(&node) {
            hold.nodes.push(node);
            state.leases.wait(node, ticket);
        }
        Ok(())
    }

    fn count_waiting(&self, state: &mut State, hold: &mut Hold<'_>) -> Result<()> {
        if !hold.counted
            && let Some(session) = state.sessions.get_mut(&hold.session)
        {
            if session.waiting >= self.config.waiting_max {
                return Err(Fault::new(Code::Overloaded, "too many requests of this session wait"));
            }
            session.waiting += 1;
            hold.counted = true;
        }
        Ok(())
    }

    /// Sends what was not recalled yet; answers when the first of these leases ends by itself.
    fn send_recalls(
        &self,
        state: &mut State,
        conflicts: &[Conflict],
        names: &[torchfs_proto::attr::Raw],
    ) -> Option<Instant> {
        for conflict in conflicts.iter().filter(|conflict| conflict.unasked != 0) {
            metrics::recall();
            let event = Event::Recall {
                ino: conflict.node.1,
                bits: conflict.unasked,
                number: conflict.number,
                names: names.to_vec(),
            };
            if let Some(number) = self.push_event(state, conflict.holder, event) {
                state.leases.recalled(conflict, number);
                if let Some(session) = state.sessions.get_mut(&conflict.holder) {
                    session.recalls.insert(number, conflict.node);
                }
            }
        }
        conflicts.iter().filter_map(|conflict| state.leases.ends(conflict.holder)).min()
    }

    /// Whether a commit rests on a lease that counts.
    fn may_write(&self, state: &State, request: &Request, volume: VolumeId, now: Instant) -> Result<()> {
        let (ino, grant) = match &request.op {
            // A compaction changes no content and checks what it replaces: it needs no lease.
            Op::Commit(commit) if commit.expect.is_some() && commit.grant == 0 => return Ok(()),
            Op::Commit(commit) => (commit.ino, commit.grant),
            Op::CopyRange { to, grant, .. } => (*to, *grant),
            _ => return Ok(()),
        };
        match state.leases.may_write(request.session, (volume, ino), grant, now) {
            true => Ok(()),
            false => {
                let held = state.leases.describe((volume, ino), now);
                let what = format!("grant {grant} on inode {ino} is over; held is {held}");
                Err(Fault::new(Code::Fenced, what))
            }
        }
    }

    /// The batch that an answer rests on and that others must not lose.
    fn rests<'a>(&self, state: &mut State, request: &Request, reads: impl Iterator<Item = &'a Ino>) -> Seq {
        state.rests.durable(self.engine.durable());
        if state.rests.len() == 0 {
            return Seq(0);
        }
        let Some(session) = state.sessions.get(&request.session) else { return Seq(0) };
        let volume = session.volume;
        let named = subjects(&request.op);
        let on = |ino: Ino| state.rests.on((volume, ino), request.session);
        reads.copied().chain(named.into_iter().flatten()).map(on).max().unwrap_or(Seq(0))
    }

    fn reply(
        &self,
        state: &State,
        session: SessionId,
        result: Result<Done>,
        ordered: Seq,
        grants: Vec<Grant>,
    ) -> Reply {
        Reply {
            fence: self.engine.fence(),
            ordered,
            durable: self.engine.durable(),
            lease_epoch: state.leases.epoch(session),
            grants,
            result,
            bare: None,
        }
    }

    /// The time that records carry, in ms since 1970.
    pub(crate) fn wall_ms(&self) -> u64 {
        (self.clock.wall_ns() / 1_000_000).unsigned_abs()
    }

    /// A view for one decision.
    pub(crate) fn view(&self, volume: VolumeId) -> View<'_> {
        let dead_ms = u64::from(self.config.dead_terms)
            * (u64::from(self.config.lease_ms) + u64::from(self.config.lease_margin_ms));
        View::new(&*self.engine, volume, self.clock.wall_ns(), dead_ms)
    }

    /// Orders a batch; from time to time it notes when.
    pub(crate) fn order(&self, state: &mut State, mut view: View<'_>, now: Instant) -> Result<Seq> {
        let every = std::time::Duration::from_millis(u64::from(self.config.batch_time_ms));
        if state.noted.is_none_or(|noted| now >= noted + every) {
            state.noted = Some(now);
            let at = view.now;
            view.put(key::batch_time(key::CLUSTER, view.born), &record::BatchTime { at });
        }
        let batch = view.into_batch();
        if let Some(run) = &mut state.check {
            run.touch(&batch);
        }
        state.repairs.layouts.touch(&batch, &state.members.table);
        let taped = state.dumps.tapes.copy(&batch);
        let seq = self.engine.order(batch)?;
        if let Some(changes) = taped {
            state.dumps.tapes.add(&changes, seq, now);
        }
        Ok(seq)
    }
}

/// Takes attributes that no lease protects out of a listing, whose names count without them.
fn undress(done: &mut Done, bare: &mut Vec<Ino>) {
    let Done::Entries { entries, .. } = done else { return };
    if bare.is_empty() {
        return;
    }
    let refused: HashSet<Ino> = bare.iter().copied().collect();
    let mut undressed = HashSet::new();
    for entry in entries.iter_mut().filter(|entry| refused.contains(&entry.ino)) {
        if entry.attr.take().is_some() {
            undressed.insert(entry.ino);
        }
    }
    bare.retain(|ino| !undressed.contains(ino));
}

/// Decides an operation on the namespace.
fn decide(
    view: &mut View<'_>,
    ctx: &Ctx<'_>,
    op: &Op,
    volume_use: impl FnOnce() -> Result<Done>,
) -> Result<Decision> {
    match op {
        Op::Lookup { parent, name } => namespace::lookup(view, *parent, name),
        Op::GetAttr { ino } => namespace::getattr(view, *ino),
        Op::SetAttr { ino, set } => namespace::setattr(view, ctx, *ino, set),
        Op::SetPolicy { ino, .. } => namespace::set_policy(view, *ino, ctx.layout),
        Op::ReadLink { ino } => namespace::readlink(view, *ino),
        Op::Make(make) => namespace::make(view, ctx, make),
        Op::Link { ino, parent, name } => namespace::link(view, *ino, *parent, name),
        Op::Unlink { parent, name, idle } => namespace::unlink(view, ctx, *parent, name, *idle),
        Op::Rmdir { parent, name } => namespace::rmdir(view, ctx, *parent, name),
        Op::Rename { parent, name, new_parent, new_name, flags } => {
            let (from, to) = (End { parent: *parent, name }, End { parent: *new_parent, name: new_name });
            namespace::rename(view, ctx, from, to, *flags)
        }
        Op::ReadDir { ino, cookie, limit, plus } => namespace::readdir(view, *ino, *cookie, *limit, *plus),
        Op::Xattrs { ino } => namespace::xattrs(view, *ino),
        Op::SetXattr { ino, name, value, flags } => namespace::set_xattr(view, *ino, name, value, *flags),
        Op::RemoveXattr { ino, name } => namespace::remove_xattr(view, *ino, name),
        Op::OpenData { ino, .. } => namespace::open_data(view, ctx.session, *ino),
        Op::Extents { ino, from, to } => namespace::extents(view, *ino, *from, *to),
        Op::Commit(commit) => namespace::commit(view, ctx, commit),
        Op::CopyRange { from, from_offset, to, to_offset, len, mtime, .. } => {
            let (from, from_offset, to, to_offset) = (*from, *from_offset, *to, *to_offset);
            namespace::copy_range(view, &Copy { from, from_offset, to, to_offset, len: *len, mtime: *mtime })
        }
        Op::GetLock { ino, lock } => {
            let wanted = namespace::Held { session: ctx.session, lock: lock.clone() };
            let held = namespace::held_locks(view, *ino)?;
            let holder = namespace::in_the_way(&held, &wanted).map(|held| held.lock.clone());
            Ok(Decision::new(Done::LockHolder(holder)))
        }
        Op::Release { inos } => namespace::release(view, ctx, inos),
        Op::StatFs => Ok(Decision::new(volume_use()?)),
        _ => Err(Fault::new(Code::Unsupported, "this request is not served")),
    }
}

/// The inodes that an operation names.
fn subjects(op: &Op) -> [Option<Ino>; 2] {
    match op {
        Op::Lookup { parent, .. } | Op::Unlink { parent, .. } | Op::Rmdir { parent, .. } => {
            [Some(*parent), None]
        }
        Op::Make(make) => [Some(make.parent), None],
        Op::Link { ino, parent, .. } => [Some(*ino), Some(*parent)],
        Op::Rename { parent, new_parent, .. } => [Some(*parent), Some(*new_parent)],
        Op::GetAttr { ino }
        | Op::SetAttr { ino, .. }
        | Op::SetPolicy { ino, .. }
        | Op::ReadLink { ino }
        | Op::ReadDir { ino, .. }
        | Op::Xattrs { ino }
        | Op::SetXattr { ino, .. }
        | Op::RemoveXattr { ino, .. }
        | Op::OpenData { ino, .. }
        | Op::Extents { ino, .. }
        | Op::Lock { ino, .. }
        | Op::GetLock { ino, .. } => [Some(*ino), None],
        Op::Commit(commit) => [Some(commit.ino), None],
        Op::CopyRange { from, to, .. } => [Some(*from), Some(*to)],
        _ => [None, None],
    }
}
