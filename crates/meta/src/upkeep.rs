//! Upkeep: what time brings. Sessions that end, servers that fall silent, waits that are over, and work in bounded pieces.
//!
//! # Invariants
//! - One piece of work is one batch under one short hold of the lock; requests go in between.
//! - Whatever is left undone is found again after a restart.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use torchfs_proto::msg::meta::Event;
use torchfs_proto::record::Orphan;
use torchfs_proto::{Ino, Result, SessionId, key};

use crate::metrics;
use crate::namespace::{self, Decision, Progress};
use crate::service::sessions::Ending;
use crate::service::signals::Topic;
use crate::service::{Chore, Meta, State};
use crate::view::View;

/// Orphans that one sweep looks at.
const SWEEP_MAX: usize = 256;

/// Locks that one piece of work releases.
const UNLOCK_MAX: usize = 4_096;

/// Pieces of work in one tick.
const CHORES_MAX: usize = 64;

/// After so many ticks that did not come, this process has stood still.
const PAUSE_TICKS: u32 = 4;

impl Meta {
    /// Looks for what has become due. Call every `tick_ms`, from one thread.
    pub fn tick(&self) {
        let now = self.clock.now();
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.signals.expire(now);
            state.rests.durable(self.engine.durable());
            metrics::leads(self.engine.leads());
            if !self.engine.leads() {
                // Requests wait meanwhile, renewals and heartbeats too.
                state.deaf = true;
                return;
            }
            let every = Duration::from_millis(u64::from(self.config.tick_ms));
            let gap = state.ticked.replace(now).map_or(every, |before| now.saturating_duration_since(before));
            if gap > every * PAUSE_TICKS {
                // This process or its machine stood still. Whoever spoke meanwhile is only heard from now on.
                let gap = gap - every;
                state
                    .sessions
                    .values_mut()
                    .for_each(|session| session.renewed = now.min(session.renewed + gap));
                state.members.deaf_for(gap, now);
            }
            if std::mem::take(&mut state.deaf) {
                for session in state.sessions.values_mut() {
                    session.renewed = now;
                }
                state.members.all_heard(now);
            }
            self.end_silent_sessions(state, now);
            self.watch_servers(state, now);
            metrics::upkeep(state.sessions.len(), state.chores.len());
        }
        let until = now + Duration::from_millis(u64::from(self.config.chores_ms));
        for _ in 0..CHORES_MAX {
            if self.run_chores(1) == 0 || self.clock.now() >= until {
                break;
            }
        }
    }

    /// Does at most so many pieces of work; answers how many are left.
    pub fn run_chores(&self, most: usize) -> usize {
        for _ in 0..most {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let Some(chore) = state.chores.pop_front() else { return 0 };
            match self.chore(state, chore) {
                Ok(again) => state.chores.extend(again),
                Err(fault) => {
                    // The disk may be full or gone for a while; the work is not lost.
                    tracing::warn!("upkeep is held up: {fault}");
                    state.chores.push_back(chore);
                    return state.chores.len();
                }
            }
            // Whoever waits goes first: a lock that is taken again at once would keep them out.
            MutexGuard::unlock_fair(guard);
        }
        self.state.lock().chores.len()
    }

    /// Stops serving: everything that waits is answered.
    pub fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        state.signals.wake_all();
    }

    fn end_silent_sessions(&self, state: &mut State, now: Instant) {
        let term = self.config.session_term();
        let silent: Vec<SessionId> =
            state.sessions.iter().filter(|(_, s)| now >= s.renewed + term).map(|(id, _)| *id).collect();
        for id in silent {
            if let Err(fault) = self.end_session(state, id, Ending::Silent) {
                tracing::warn!(session = id.0, "a session cannot be ended: {fault}");
            }
        }
    }

    /// One piece of work; answers what is left of it.
    fn chore(&self, state: &mut State, chore: Chore) -> Result<Option<Chore>> {
        let now = self.clock.now();
        match chore {
            Chore::Empty(volume) => Ok(self.empty_volume(state, volume)?.then_some(chore)),
            Chore::Reap(node, progress) => {
                let mut view = self.view(node.0);
                let left = namespace::remove_orphan(&mut view, node.1, progress, self.config.trim_extents)?;
                if !view.is_clean() {
                    self.order(state, view, now)?;
                    if left.is_none() {
                        state.leases.gone(node);
                    }
                }
                Ok(left.map(|progress| Chore::Reap(node, progress)))
            }
            Chore::Trim(node, progress) => {
                let mut view = self.view(node.0);
                if view.get::<u64>(&key::cut(node.0, node.1))?.is_none() {
                    return Ok(None);
                }
                let left = namespace::trim(&mut view, node.1, progress, self.config.trim_extents)?;
                self.order(state, view, now)?;
                if left.is_none() {
                    state.trimmed(node);
                }
                Ok(left.map(|progress| Chore::Trim(node, progress)))
            }
            Chore::Unlock(node, session) => {
                let mut view = self.view(node.0);
                view.frees = true;
                let done = namespace::release_locks(&mut view, node.1, session, UNLOCK_MAX)?;
                if !view.is_clean() {
                    self.order(state, view, now)?;
                    state.signals.wake(Topic::Lock(node));
                }
                Ok((!done).then_some(chore))
            }
            Chore::Remind(id, after) => {
                let Some(session) = state.sessions.get(&id) else { return Ok(None) };
                let (found, last) = orphans(&self.view(session.volume), after)?;
                for (ino, _) in found.into_iter().filter(|(_, orphan)| orphan.sessions.contains(&id)) {
                    self.push_event(state, id, Event::Orphaned { ino });
                }
                Ok(last.map(|ino| Chore::Remind(id, ino)))
            }
            Chore::Sweep(volume, after) => {
                let mut view = self.view(volume);
                let (found, last) = orphans(&view, after)?;
                let mut decision = Decision::new(torchfs_proto::msg::meta::Done::Ok);
                for (ino, orphan) in found {
                    if orphan.sessions.is_empty() {
                        state.chores.push_back(Chore::Reap((volume, ino), Progress::default()));
                    }
                    for holder in orphan.sessions {
                        if !state.sessions.contains_key(&holder) {
                            namespace::leave(
                                &mut view,
                                holder,
                                ino,
                                self.config.trim_extents,
                                &mut decision,
                            )?;
                        }
                    }
                }
                if !view.is_clean() {
                    view.frees = true;
                    self.order(state, view, now)?;
                    for ino in decision.gone {
                        state.leases.gone((volume, ino));
                    }
                    let reap = |ino| Chore::Reap((volume, ino), Progress::default());
                    state.chores.extend(decision.upkeep.into_iter().map(reap));
                }
                Ok(last.map(|ino| Chore::Sweep(volume, ino)))
            }
        }
    }
}

/// Orphans, and the last of them if there may be more.
type Page = (Vec<(Ino, Orphan)>, Option<Ino>);

/// The next orphans.
fn orphans(view: &View<'_>, after: Ino) -> Result<Page> {
    let mut from = key::orphan(view.volume, after);
    from.push(0);
    let to = key::after(&key::space(view.volume, key::Space::Orphan));
    let mut found: Vec<(Ino, Orphan)> = Vec::new();
    view.scan(&from, &to, false, &mut |at, orphan: Orphan| {
        if let Some(ino) = key::Parts::of(at).and_then(|parts| parts.u64_at(0)) {
            found.push((Ino(ino), orphan));
        }
        match found.len() >= SWEEP_MAX {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    let last = found.last().map(|(ino, _)| *ino).filter(|_| found.len() >= SWEEP_MAX);
    Ok((found, last))
}
