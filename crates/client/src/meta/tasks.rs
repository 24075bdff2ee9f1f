//! What a session does by itself: renew, listen for events and honour recalls, acknowledge them, give things back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use torchfs_proto::Ino;
use torchfs_proto::msg::meta::{Done, Event, Op, RELEASE_MAX};

use super::session::{Heard, Shared};

/// Most acknowledgements or leases told in one request.
const BATCH: usize = 4096;

/// What is to be told to the service in the background. Bounded by what the session knows: each inode is in it once.
#[derive(Default)]
pub(crate) struct Outbox {
    acks: Vec<(u64, bool)>,
    forgets: HashMap<Ino, (u8, u64)>,
    releases: Vec<Ino>,
}

impl Outbox {
    pub fn clear(&mut self) {
        *self = Outbox::default();
    }

    /// Another leader knows neither our events nor our grants; orphans it does know.
    pub fn change_era(&mut self) {
        self.acks.clear();
        self.forgets.clear();
    }

    fn take_acks(&mut self) -> Vec<(u64, bool)> {
        let count = self.acks.len().min(BATCH);
        self.acks.drain(..count).collect()
    }

    fn take_forgets(&mut self) -> Vec<(Ino, u8, u64)> {
        let chosen: Vec<Ino> = self.forgets.keys().take(BATCH).copied().collect();
        chosen
            .into_iter()
            .filter_map(|ino| self.forgets.remove(&ino).map(|(bits, number)| (ino, bits, number)))
            .collect()
    }

    fn take_releases(&mut self) -> Vec<Ino> {
        let count = self.releases.len().min(RELEASE_MAX);
        self.releases.drain(..count).collect()
    }
}

impl Shared {
    /// Starts all of them.
    pub fn start_tasks(self: &Arc<Shared>) {
        let shared = self.clone();
        self.spawn_own(async move { shared.keep_renewing().await });
        let shared = self.clone();
        self.spawn_own(async move { shared.keep_listening().await });
        let shared = self.clone();
        self.spawn_own(async move { shared.keep_acknowledging().await });
        let shared = self.clone();
        self.spawn_own(async move { shared.keep_returning().await });
    }

    /// Gives bits back in the background; 255 says that the inode is not known any more.
    pub fn give_back(&self, ino: Ino, bits: u8) {
        {
            let mut state = self.state.lock();
            let number = state.leases.give_back(ino, bits);
            if bits == u8::MAX {
                self.forgot.note(ino);
            }
            let kept = state.outbox.forgets.entry(ino).or_insert((0, 0));
            *kept = (kept.0 | bits, kept.1.max(number));
        }
        self.returns.notify_one();
    }

    /// Says in the background that an orphan is not open here any more.
    pub fn release(&self, ino: Ino) {
        self.state.lock().outbox.releases.push(ino);
        self.returns.notify_one();
    }

    async fn keep_renewing(self: &Arc<Shared>) {
        let every =
            Duration::from_millis(u64::from(self.info.read().lease_ms) / 4).max(Duration::from_millis(1));
        while self.ended().is_none() {
            let limit = match self.config.addrs.len() {
                1 => self.config.attempt_timeout,
                _ => self.config.attempt_timeout.min(self.config.silence_max),
            };
            self.renew_once(Instant::now() + limit).await;
            let kick = std::pin::pin!(self.renew.notified());
            let next = Instant::now() + every;
            // Either somebody asks for a renewal now, or the time has come.
            let _ = self.within(next, kick).await;
        }
    }

    async fn renew_once(self: &Arc<Shared>, until: Instant) {
        let (sent, generation) = (Instant::now(), self.state.lock().generation);
        let heard = self.once(&Op::Renew, until).await;
        if matches!(heard, Heard::Again) && Instant::now() >= until && self.config.addrs.len() > 1 {
            // It may hang while another one leads; if it leads after all, it is found again.
            self.leave(generation);
            return;
        }
        if let Heard::Answer(Ok(Done::Renewed { space, placement, volume })) = heard {
            {
                let mut state = self.state.lock();
                if state.generation == generation {
                    state.leases.renewed(sent);
                }
            }
            self.set_space(space);
            if let Some(volume) = volume {
                self.set_volume(volume);
            }
            if placement > self.placement.read().version
                && let Heard::Answer(Ok(Done::Placement(placement))) = self.once(&Op::Placement, until).await
            {
                self.set_placement(placement);
            }
        }
    }

    async fn keep_listening(self: &Arc<Shared>) {
        let wait_ms = u32::try_from(self.config.listen.as_millis()).unwrap_or(u32::MAX);
        while self.ended().is_none() {
            let (seen, era) = {
                let state = self.state.lock();
                (state.seen, state.era)
            };
            let until = Instant::now() + self.config.listen + self.config.attempt_timeout;
            match self.once(&Op::Listen { seen, wait_ms }, until).await {
                Heard::Answer(Ok(Done::Events(events))) => {
                    events.into_iter().for_each(|(number, event)| self.heed(era, number, event));
                }
                Heard::Answer(Ok(_)) | Heard::Again => {
                    let _ = self.pause(until).await;
                }
                Heard::Answer(Err(fault)) => {
                    if self.ended().is_none() {
                        tracing::warn!("the metadata service does not tell of events: {fault}");
                        self.sleep_until(Instant::now() + Duration::from_secs(1)).await;
                    }
                }
                Heard::Lost => {
                    let _ = self.ready(until).await;
                }
            }
        }
    }

    /// Acts on an event. A recall takes effect here at once; its keeper has a task of its own, so that one that writes
    /// back much does not keep the others waiting.
    fn heed(self: &Arc<Shared>, era: u64, number: u64, event: Event) {
        {
            let mut state = self.state.lock();
            if state.era != era || number <= state.seen {
                return;
            }
            state.seen = number;
            if let Event::Recall { ino, bits, number: upto, .. } = &event {
                state.leases.recall(number, *ino, *bits, *upto);
            }
        }
        if let Event::Recall { .. } = &event {
            self.progress.notify_waiters(); // a commit that waits for room may be what is waited for now
        }
        let keeper = self.keeper();
        match (event, keeper) {
            (Event::Recall { ino, bits, number: upto, names }, Some(keeper)) => {
                let shared = self.clone();
                let recall = keeper.recall(ino, bits, names);
                self.spawn(async move {
                    let still_open = recall.await;
                    shared.acknowledge(era, number, ino, upto, still_open);
                });
            }
            (Event::Recall { ino, number: upto, .. }, None) => {
                self.acknowledge(era, number, ino, upto, false)
            }
            (Event::Orphaned { ino }, Some(keeper)) => keeper.orphaned(ino),
            (Event::Orphaned { ino }, None) => self.release(ino),
            (Event::Changed { ino }, Some(keeper)) => keeper.changed(ino),
            (Event::Changed { .. }, None) => {}
        }
    }

    fn acknowledge(&self, era: u64, number: u64, ino: Ino, upto: u64, still_open: bool) {
        {
            let mut state = self.state.lock();
            if state.era != era {
                return;
            }
            state.leases.returned(ino, upto);
            state.outbox.acks.push((number, still_open));
        }
        self.acks.notify_one();
    }

    async fn keep_acknowledging(self: &Arc<Shared>) {
        while self.ended().is_none() {
            let (era, acks) = {
                let mut state = self.state.lock();
                (state.era, state.outbox.take_acks())
            };
            if acks.is_empty() {
                self.acks.notified().await;
                continue;
            }
            let op = Op::Ack { events: acks };
            let told = self.told(era, &op).await;
            let Op::Ack { events } = op else { continue };
            let mut state = self.state.lock();
            if state.era != era {
                continue;
            }
            if told {
                events.iter().for_each(|(event, _)| state.leases.heard(*event));
            } else {
                state.outbox.acks.extend(events);
            }
        }
    }

    async fn keep_returning(self: &Arc<Shared>) {
        while self.ended().is_none() {
            self.returns.notified().await;
            self.sleep_until(Instant::now() + self.config.gather).await;
            while self.return_batch().await {}
            if !self.state.lock().outbox.releases.is_empty() {
                self.sleep_until(Instant::now() + self.config.refused_pause).await;
                self.returns.notify_one();
            }
        }
    }

    /// Tells one batch of what is given back; says whether there may be more to tell now.
    pub async fn return_batch(self: &Arc<Shared>) -> bool {
        let (era, forgets, releases) = {
            let mut state = self.state.lock();
            (state.era, state.outbox.take_forgets(), state.outbox.take_releases())
        };
        let some = !forgets.is_empty() || !releases.is_empty();
        if !forgets.is_empty() {
            let op = Op::Forget { leases: forgets };
            // Numbers of grants mean nothing to another leader, so this is repeated only to the same one.
            while !self.told(era, &op).await {
                let state = self.state.lock();
                if state.era != era || state.is_live().is_err() {
                    break;
                }
            }
        }
        if !releases.is_empty()
            && let Err(fault) = self.change(Op::Release { inos: releases.clone() }).await
            && self.ended().is_none()
        {
            // Forgotten here, they would take space until the session ends.
            tracing::warn!("released files wait: {fault}");
            self.state.lock().outbox.releases.extend(releases);
            return false;
        }
        some
    }

    /// Tells the service something that only the leader of this era understands; false if it has to be told again.
    async fn told(self: &Arc<Shared>, era: u64, op: &Op) -> bool {
        let until = Instant::now() + self.config.attempt_timeout;
        let route = {
            let mut state = self.state.lock();
            if state.era != era {
                return true; // there is nobody any more who wants to know
            }
            state.route()
        };
        let heard = match route {
            Ok(Some(route)) => self.send(route, op, until).await,
            Ok(None) => Heard::Lost,
            Err(_) => return true,
        };
        match heard {
            Heard::Answer(Ok(_)) => true,
            Heard::Answer(Err(fault)) => {
                if self.ended().is_none() {
                    tracing::warn!("the metadata service refused what it was told: {fault}");
                }
                true
            }
            Heard::Again => {
                let _ = self.pause(until).await;
                false
            }
            Heard::Lost => {
                let _ = self.ready(until).await;
                false
            }
        }
    }
}
