//! Sessions: an agent's durable connection, its events, its ranges of ids, and its end.
//!
//! # Invariants
//! - A session is a record; its locks, orphans, results and ranges are records too and go with it.
//! - Events are numbered for each session and sent again until the client has seen them; the queue is bounded.
//! - After a restart, sessions report what they held before anything that could conflict is served to anybody.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use torchfs_proto::attr::Time;
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::meta::{Done, Event, Op, OpenSession, Request, SessionInfo, SessionReport, lease};
use torchfs_proto::record::{self, Answered, DeadRange};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Ino, Result, Seq, SessionId, VolumeId, key};

use super::signals::Topic;
use super::{Chore, Hold, Meta, State, Step};
use crate::leases::Node;
use crate::namespace;
use crate::view::View;

/// Events in one answer.
const EVENTS_MAX: usize = 1_024;
/// Leases in one Forget or Reclaim, and events in one Ack.
const LIST_MAX: usize = 1 << 20;
/// Ids set aside for a session at a time. What it is granted grows within them, so its ranges stay few for all its life.
const ARENA_IDS: u32 = 1 << 20;
/// Changes after which the batch that ends a session leaves locks to the upkeep.
const END_CHANGES_MAX: usize = 16_384;
/// Longest of the texts a session tells about itself.
const TEXT_MAX: usize = 4_096;

/// Why a session ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// Its client is done: nothing of it is on its way.
    Closed,
    /// An administrator wants it gone.
    Evicted,
    /// It was not renewed. Its client may only be stopped, and put blocks when it goes on.
    Silent,
}

impl Ending {
    fn shown(self) -> &'static str {
        match self {
            Ending::Closed => "closed",
            Ending::Evicted => "evicted",
            Ending::Silent => "it was not renewed",
        }
    }
}

/// One session, as memory holds it.
pub(crate) struct Session {
    pub volume: VolumeId,
    pub who: OpenSession,
    pub epoch: u32,
    pub began: Time,
    pub renewed: Instant,
    /// It told what it holds and what was answered to it, or it began after the last start.
    pub reported: bool,
    /// When it last told something of that.
    pub telling: Option<Instant>,
    /// Changes told again that wait, with those that wait behind them: they happen in the order of their sequences.
    pub held_up: BTreeSet<u64>,
    pub ranges: Vec<IdRange>,
    /// Ids that are set aside for it behind its last range. Not written down: after a restart ids are of a new incarnation.
    pub spare: u32,
    /// Results that are stored.
    pub outcomes: BTreeSet<(u64, u32)>,
    pub watermark: u64,
    pub last_seq: u64,
    pub events: VecDeque<(u64, Event)>,
    pub next_event: u64,
    /// Recalls that are not acknowledged, by event.
    pub recalls: HashMap<u64, Node>,
    /// Files on which it has locks.
    pub locked: HashSet<Ino>,
    /// Requests that wait.
    pub waiting: usize,
    pub ops: u64,
}

impl Session {
    pub(super) fn new(volume: VolumeId, record: record::Session, now: Instant, reported: bool) -> Session {
        Session {
            volume,
            who: record.who,
            epoch: record.epoch,
            began: record.began,
            renewed: now,
            reported,
            telling: None,
            held_up: BTreeSet::new(),
            ranges: Vec::new(),
            spare: 0,
            outcomes: BTreeSet::new(),
            watermark: 0,
            last_seq: 0,
            events: VecDeque::new(),
            next_event: 1,
            recalls: HashMap::new(),
            locked: HashSet::new(),
            waiting: 0,
            ops: 0,
        }
    }
}

impl Meta {
    /// Begins a session.
    pub(super) fn open_session(&self, state: &mut State, who: &OpenSession, now: Instant) -> Result<Done> {
        if state.sessions.len() >= self.config.sessions_max {
            return Err(Fault::new(Code::Overloaded, "there are too many sessions")
                .next("see `torchfs sessions`, and evict those that are dead"));
        }
        if [&who.volume, &who.host, &who.mount, &who.version].iter().any(|text| text.len() > TEXT_MAX) {
            return Err(Fault::new(Code::Invalid, "a session tells too much about itself"));
        }
        let name = if who.volume.is_empty() { &self.config.volume } else { &who.volume };
        let open = |volume: &&record::Volume| volume.name == *name && !volume.removed;
        let Some(volume) = state.volumes.values().find(open).map(|volume| volume.id) else {
            return Err(Fault::new(Code::NotFound, format!("there is no volume {name}"))
                .next("`torchfs volume ls` lists the volumes"));
        };
        let mut view = self.view(volume);
        // A full store can be emptied only through a mount.
        view.frees = true;
        let id = SessionId(state.cluster.next_session.max(1));
        let mut counters = state.cluster.clone();
        counters.next_session = id.0 + 1;
        view.put(key::cluster_counters(), &counters);
        let record = record::Session { born: view.born, who: who.clone(), epoch: 1, began: view.now };
        view.put(key::session(volume, id), &record);
        self.order(state, view, now)?;
        state.cluster = counters;
        state.sessions.insert(id, Session::new(volume, record, now, true));
        state.leases.join(id, volume, now, false);
        tracing::info!(session = id.0, host = %who.host, mount = %who.mount, "a session begins");
        self.session_info(state, id)
    }

    fn session_info(&self, state: &State, id: SessionId) -> Result<Done> {
        let session = state.sessions.get(&id).ok_or(Code::NoSession)?;
        let volume = state.volumes.get(&session.volume).ok_or(Code::NoSession)?;
        let root = self.view(session.volume).inode(Ino::ROOT)?.attr(Ino::ROOT);
        Ok(Done::Session(SessionInfo {
            session: id,
            epoch: session.epoch,
            cluster: self.engine.cluster(),
            incarnation: self.engine.incarnation(),
            lease_ms: self.config.lease_ms,
            session_ms: self.config.session_ms,
            volume: self.volume_info(state, volume),
            root,
            placement: state.members.placement(),
            reclaim: !session.reported,
            seq: session.last_seq,
        }))
    }

    /// Whether the session may ask for this now; answers its volume.
    pub(super) fn admit(&self, state: &mut State, request: &Request, now: Instant) -> Result<VolumeId> {
        self.look_at_grace(state, now);
        let grace = state.grace.is_some();
        let Some(session) = state.sessions.get_mut(&request.session) else {
            return Err(Fault::new(Code::NoSession, format!("session {} is not known", request.session))
                .next("mount again"));
        };
        if request.epoch != session.epoch {
            return Err(Fault::new(Code::Fenced, format!("session {} is in another epoch", request.session)));
        }
        session.ops += 1;
        let always = matches!(
            request.op,
            Op::ResumeSession | Op::Reclaim { .. } | Op::Renew | Op::CloseSession | Op::Listen { .. }
        );
        if !session.reported {
            let again = session.telling.is_some() && request.seq > 0;
            if !always && !again {
                return Err(Fault::new(
                    Code::Grace,
                    "the metadata service started anew: report first what is held",
                ));
            }
            session.telling = Some(now);
            if again {
                return Ok(session.volume);
            }
        }
        let harmless = matches!(request.op, Op::Ack { .. } | Op::Forget { .. } | Op::Sync { .. });
        if grace && !always && !harmless {
            return Err(Fault::new(Code::Grace, "the metadata service waits for sessions to report"));
        }
        Ok(session.volume)
    }

    /// Operations on the session itself; `None` for all others.
    pub(super) fn session_op(
        &self,
        state: &mut State,
        request: &Request,
        hold: &mut Hold<'_>,
        volume: VolumeId,
        now: Instant,
    ) -> Result<Option<Step>> {
        let id = request.session;
        let mut grants = Vec::new();
        let mut rests = Seq(0);
        let done = match &request.op {
            Op::ResumeSession => {
                self.renew(state, id, now);
                rests = state.members.placed;
                self.session_info(state, id)?
            }
            Op::Reclaim { leases, open, last } => {
                if leases.len() > LIST_MAX || open.len() > LIST_MAX {
                    return Err(Code::TooMany.into());
                }
                self.renew(state, id, now);
                let view = self.view(volume);
                let in_time = state.grace.is_some() && state.sessions.get(&id).is_some_and(|s| !s.reported);
                for ino in open {
                    state.leases.know(id, (volume, *ino), true);
                }
                for (ino, bits) in leases {
                    // A file that is to be written and is not there: its creation was not durable, and comes again before
                    // the commits that need this grant.
                    let told_again = bits & (lease::WRITE | lease::SHARED) != 0;
                    if in_time && (told_again || view.find_inode(*ino)?.is_some()) {
                        grants.extend(state.leases.reclaim(id, (volume, *ino), *bits, now));
                    }
                }
                if *last {
                    self.reported(state, id);
                }
                Done::Ok
            }
            Op::Renew => {
                self.renew(state, id, now);
                let volume = state.sessions.get(&id).and_then(|session| state.volumes.get(&session.volume));
                let scheme = volume.map_or(Scheme::Replicas(1), |volume| self.volume_layout(state, volume).1);
                let (_, free) = state.members.room(scheme);
                let sharing = state.sessions.len().max(1) as u64;
                // Just started: a full disk then shows in the put, as it does when space runs out between two reports. With too
                // few servers writers wait for them, which is not a matter of space.
                let known = state.members.all_reported() && state.members.enough(scheme);
                let space = if known { free / sharing } else { u64::MAX };
                // A renewal does not wait for the log. Of what is not durable the next one tells.
                match self.engine.durable() >= state.members.placed {
                    true => {
                        let volume = volume.map(|volume| self.volume_info(state, volume));
                        Done::Renewed { space, placement: state.members.version(), volume }
                    }
                    false => Done::Renewed { space, placement: 0, volume: None },
                }
            }
            Op::CloseSession => {
                self.end_session(state, id, Ending::Closed)?;
                Done::Ok
            }
            Op::Listen { seen, wait_ms } => {
                let Some(session) = state.sessions.get_mut(&id) else { return Err(Code::NoSession.into()) };
                session.events.retain(|(number, _)| number > seen);
                let wait = Duration::from_millis(u64::from((*wait_ms).min(self.config.listen_ms_max)));
                let until = *hold.listen_until.get_or_insert(now + wait);
                if session.events.is_empty() && now < until {
                    self.count_waiting(state, hold)?;
                    return Ok(Some(Step::Wait(state.signals.register(&[Topic::Events(id)], Some(until)))));
                }
                Done::Events(session.events.iter().take(EVENTS_MAX).cloned().collect())
            }
            Op::Ack { events } => {
                if events.len() > LIST_MAX {
                    return Err(Code::TooMany.into());
                }
                for (event, writing) in events {
                    let Some(session) = state.sessions.get_mut(&id) else { break };
                    session.events.retain(|(number, _)| number != event);
                    if let Some(node) = session.recalls.remove(event) {
                        grants.extend(state.leases.acknowledge(id, node, *event, *writing, now));
                        state.signals.wake(Topic::Lease(node));
                    }
                }
                Done::Ok
            }
            Op::Forget { leases } => {
                if leases.len() > LIST_MAX {
                    return Err(Code::TooMany.into());
                }
                for (ino, bits, number) in leases {
                    state.leases.forget(id, (volume, *ino), *bits, *number);
                    state.signals.wake(Topic::Lease((volume, *ino)));
                }
                Done::Ok
            }
            Op::Sync { seq } => {
                let reply = self.reply(state, id, Ok(Done::Ok), *seq, Vec::new());
                return Ok(Some(match *seq > reply.durable {
                    true => Step::Durable(*seq, reply),
                    false => Step::Reply(reply),
                }));
            }
            Op::GrantIds { count } => return self.grant_ids(state, request, *count, now).map(Some),
            _ => return Ok(None),
        };
        let reply = self.reply(state, id, Ok(done), Seq(0), grants);
        Ok(Some(if rests > reply.durable { Step::Durable(rests, reply) } else { Step::Reply(reply) }))
    }

    fn renew(&self, state: &mut State, id: SessionId, now: Instant) {
        let before = state.leases.epoch(id);
        state.leases.renew(id, now);
        let ended = state.leases.epoch(id) != before;
        if let Some(session) = state.sessions.get_mut(&id) {
            session.renewed = now;
            if ended {
                // The client drops all leases when it sees the new epoch: nothing is left to recall.
                session.recalls.clear();
                session.events.retain(|(_, event)| matches!(event, Event::Orphaned { .. }));
            }
        }
    }

    fn reported(&self, state: &mut State, id: SessionId) {
        if let Some(session) = state.sessions.get_mut(&id)
            && !std::mem::replace(&mut session.reported, true)
        {
            state.chores.push_back(Chore::Remind(id, Ino(0)));
        }
        state.leases.reported(id);
        self.look_at_grace(state, self.clock.now());
    }

    /// Ends the grace when all sessions have told what they have to tell, or when those that have not are silent.
    fn look_at_grace(&self, state: &mut State, now: Instant) {
        let Some(grace) = &state.grace else { return };
        let term = self.config.lease_term();
        let mut missing = state.sessions.values().filter(|session| !session.reported).peekable();
        let why = if missing.peek().is_none() {
            "all sessions reported"
        } else if now >= grace.latest
            || now >= grace.earliest
                && !missing.any(|session| session.telling.is_some_and(|told| now < told + term))
        {
            "not all sessions reported in time"
        } else {
            return;
        };
        state.grace = None;
        tracing::info!("{why}: the metadata service serves");
    }

    /// A change that is told again waits for those told before it; `None` when it is its turn.
    pub(super) fn in_turn(
        &self,
        state: &mut State,
        request: &Request,
        hold: &mut Hold<'_>,
        now: Instant,
    ) -> Result<Option<Step>> {
        let id = request.session;
        let Some(session) = state.sessions.get(&id) else { return Ok(None) };
        if session.reported || session.held_up.first().is_none_or(|first| *first >= request.seq) {
            return Ok(None);
        }
        self.hold_up(state, request, hold)?;
        let until = now + self.config.lease_term();
        Ok(Some(Step::Wait(state.signals.register(&[Topic::Turn(id)], Some(until)))))
    }

    /// A change that is told again has to wait: those behind it do, too.
    pub(super) fn hold_up(&self, state: &mut State, request: &Request, hold: &mut Hold<'_>) -> Result<()> {
        self.count_waiting(state, hold)?;
        if let Some(session) = state.sessions.get_mut(&request.session)
            && !session.reported
            && request.seq > 0
        {
            session.held_up.insert(request.seq);
            hold.held_up = Some(request.seq);
        }
        Ok(())
    }

    fn grant_ids(&self, state: &mut State, request: &Request, count: u32, now: Instant) -> Result<Step> {
        if let Some(step) = self.replayed(state, request)? {
            return Ok(step);
        }
        if count == 0 || count > self.config.ids_max {
            return Err(Fault::new(Code::Invalid, format!("{count} block ids cannot be granted at once")));
        }
        let Some(session) = state.sessions.get(&request.session) else {
            return Err(Code::NoSession.into());
        };
        let mut view = self.view(session.volume);
        let mut counters = state.cluster.clone();
        let (mut ranges, mut spare) = (session.ranges.clone(), session.spare);
        if spare < count {
            let incarnation = self.engine.incarnation().0;
            if counters.incarnation != incarnation {
                counters.incarnation = incarnation;
                counters.next_block = 0;
            }
            ranges.push(IdRange { first: BlockId { incarnation, counter: counters.next_block }, count: 0 });
            spare = ARENA_IDS.max(count);
            counters.next_block += u64::from(spare);
            view.put(key::cluster_counters(), &counters);
        }
        let Some(range) = ranges.last_mut() else { return Err(Code::Internal.into()) };
        let first = BlockId { counter: range.first.counter + u64::from(range.count), ..range.first };
        let ids = IdRange { first, count };
        range.count += count;
        spare -= count;
        let record = record::Range { born: view.born, ids: *range };
        view.put(key::range(session.volume, request.session, range.first), &record);
        self.store_outcome(state, request, &mut view, Some(Answered::Ids(ids)))?;
        let seq = self.order(state, view, now)?;
        self.stored_outcome(state, request, true);
        state.cluster = counters;
        if let Some(session) = state.sessions.get_mut(&request.session) {
            (session.ranges, session.spare) = (ranges, spare);
        }
        // Blocks are put under these ids before anything else tells of them: the range must not get lost.
        let reply = self.reply(state, request.session, Ok(Done::Ids(ids)), seq, Vec::new());
        Ok(Step::Durable(seq, reply))
    }

    /// Queues an event; `None` if the session is gone or its queue is full, in which case its leases end instead.
    pub(crate) fn push_event(&self, state: &mut State, id: SessionId, event: Event) -> Option<u64> {
        let session = state.sessions.get_mut(&id)?;
        let kept = matches!(event, Event::Orphaned { .. });
        if !kept
            && session
                .events
                .iter()
                .any(|(_, queued)| *queued == event && matches!(event, Event::Changed { .. }))
        {
            return Some(0);
        }
        if session.events.len() >= self.config.events_max && !kept {
            // It does not listen. What it must not miss (that a file lost its last name) stays; for the rest the end of its
            // leases says as much.
            session.events.retain(|(_, event)| matches!(event, Event::Orphaned { .. }));
            state.leases.condemn(id);
            return None;
        }
        let number = session.next_event;
        session.next_event += 1;
        session.events.push_back((number, event));
        state.signals.wake(Topic::Events(id));
        Some(number)
    }

    /// Ends a session: everything that it had goes, and those who waited for it go on.
    pub(crate) fn end_session(&self, state: &mut State, id: SessionId, why: Ending) -> Result<()> {
        let Some(session) = state.sessions.get(&id) else { return Ok(()) };
        let volume = session.volume;
        let mut view = self.view(volume);
        view.frees = true;
        view.delete(key::session(volume, id));
        for range in &session.ranges {
            view.delete(key::range(volume, id, range.first));
            let dead = DeadRange { born: view.born, ids: *range, due_ms: view.due_ms };
            view.put(key::dead_range(volume, range.first), &dead);
        }
        for (seq, step) in &session.outcomes {
            view.delete(key::outcome(volume, id, *seq, *step));
        }
        let locked: Vec<Ino> = session.locked.iter().copied().collect();
        let mut left = Vec::new();
        for ino in &locked {
            let room = END_CHANGES_MAX.saturating_sub(view.len());
            if !namespace::release_locks(&mut view, *ino, id, room)? {
                left.push(Chore::Unlock((volume, *ino), id));
            }
        }
        let now = self.clock.now();
        let mut repair = state.repairs.settings.clone();
        if why != Ending::Closed && !session.ranges.is_empty() && repair.search_ms.is_none() {
            repair.search_ms = Some(self.wall_ms() + u64::from(self.config.search_after_ms));
            view.put(key::repair(), &repair);
        }
        let seq = self.order(state, view, now)?;
        state.repairs.settings = repair;
        state.sessions.remove(&id);
        for ino in locked {
            // Whoever gets a lock now would lose it if the session came back with its own.
            state.rests.changed((volume, ino), seq, id);
            state.signals.wake(Topic::Lock((volume, ino)));
        }
        for node in state.leases.end(id) {
            state.signals.wake(Topic::Lease(node));
        }
        state.signals.wake(Topic::Events(id));
        state.chores.extend(left);
        state.chores.push_back(Chore::Sweep(volume, Ino(0)));
        self.look_at_grace(state, now);
        tracing::info!(session = id.0, "a session ends: {}", why.shown());
        Ok(())
    }

    /// All sessions, for people.
    pub(super) fn session_reports(&self, state: &State, now: Instant) -> Result<Vec<SessionReport>> {
        let mut orphans: HashMap<SessionId, u64> = HashMap::new();
        for volume in state.volumes.keys() {
            let view = self.view(*volume);
            let all = key::space(*volume, key::Space::Orphan);
            for (_, orphan) in view.list::<record::Orphan>(&all, LIST_MAX)? {
                for holder in orphan.sessions {
                    *orphans.entry(holder).or_default() += 1;
                }
            }
        }
        let wall = Time::from_ns(self.clock.wall_ns());
        let report = |(id, session): (&SessionId, &Session)| {
            let (leases, writing) = state.leases.figures(*id, now);
            SessionReport {
                session: *id,
                who: session.who.clone(),
                age_s: wall.secs.saturating_sub(session.began.secs).max(0).unsigned_abs(),
                renewed_ms: now.saturating_duration_since(session.renewed).as_millis() as u64,
                leases,
                writing,
                locks: session.locked.len() as u64,
                orphans: orphans.get(id).copied().unwrap_or(0),
                ops: session.ops,
            }
        };
        Ok(state.sessions.iter().map(report).collect())
    }
}

/// Loads the ranges of a session.
pub(super) fn load_ranges(view: &View<'_>, volume: VolumeId, session: SessionId) -> Result<Vec<IdRange>> {
    let all = view.list::<record::Range>(&key::ranges(volume, session), usize::MAX)?;
    Ok(all.into_iter().map(|(_, range)| range.ids).collect())
}
