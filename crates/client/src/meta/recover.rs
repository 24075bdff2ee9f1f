//! Opening a session, and going on with it after a lost connection or a change of leaders.
//!
//! The addresses are tried in turn until one answers that it leads. Then, on that connection and before anything else: resume
//! the session, reclaim leases if the leader is a new one, and tell again every change that is not known to be durable, in
//! the order of sequence and pipelined. Callers wait meanwhile and notice nothing.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::Poll;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use torchfs_proto::msg;
use torchfs_proto::msg::meta::{Done, Op, Reply, SessionInfo, lease, method};
use torchfs_proto::{Code, Fault, Ino, Result, SessionId};
use torchfs_rpc::{Call, Connection, Link};

use super::flight::{Flight, grant_of, rebase};
use super::ids::Ids;
use super::leases::Leases;
use super::ledger::Ledger;
use super::marks::Marks;
use super::session::{Envelope, Heard, Phase, Route, Shared, State};
use super::tasks::Outbox;
use super::{MetaConfig, unexpected};

/// Most leases or open inodes told in one Reclaim.
const RECLAIM: usize = 4096;

/// Why an attempt came to nothing.
enum Failed {
    /// Try elsewhere or later.
    Retry(Fault),
    /// The service does not know the session any more.
    Gone(Fault),
}

/// Opens a session at whoever leads.
pub(crate) async fn open(config: MetaConfig) -> Result<Arc<Shared>> {
    if config.addrs.is_empty() {
        return Err(Fault::new(Code::Invalid, "no address of a metadata server is known")
            .next("give --meta HOST:PORT or set TORCHFS_META"));
    }
    let until = Instant::now() + config.open_timeout;
    let mut silent = false;
    for turn in 0.. {
        let index = turn % config.addrs.len();
        let addr = &config.addrs[index];
        match open_at(&config, &config.connector.link(addr), until).await {
            Ok((connection, sent, reply, info)) => {
                if silent {
                    tracing::info!(addr, "the metadata service answers");
                }
                return Ok(started(config, index, connection, sent, &reply, info));
            }
            Err(fault) if !fault.code.retry() || Instant::now() + config.pause >= until => return Err(fault),
            Err(fault) => {
                if !silent {
                    tracing::warn!(addr, "waiting for the metadata service: {fault}");
                    silent = true;
                }
            }
        }
        if index + 1 == config.addrs.len() {
            tokio::time::sleep(config.pause).await;
        }
    }
    unreachable!("the loop ends by returning")
}

async fn open_at(
    config: &MetaConfig,
    link: &Link,
    until: Instant,
) -> Result<(Connection, Instant, Reply, SessionInfo)> {
    let until = until.min(Instant::now() + config.attempt_timeout);
    let connection = link.connection(0, until).await?;
    let envelope = Envelope { session: SessionId(0), epoch: 0, watermark: 0, fence: torchfs_proto::Fence(0) };
    let sent = Instant::now();
    let body = envelope.seal(0, &Op::OpenSession(config.who.clone()), None);
    let (reply, done) = ask(&connection, body, until).await?;
    match done {
        Done::Session(info) => Ok((connection, sent, reply, info)),
        other => Err(unexpected("OpenSession", &other)),
    }
}

/// One question over a connection of our own. The reply's result is taken out of it.
async fn ask(connection: &Connection, body: Vec<u8>, until: Instant) -> Result<(Reply, Done)> {
    let mut call = Call::new(method::META, body, Duration::ZERO);
    call.deadline = until;
    let answer = connection.call(call).await?;
    let mut reply: Reply = msg::decode(&answer.body)?;
    let done = std::mem::replace(&mut reply.result, Ok(Done::Ok))?;
    Ok((reply, done))
}

fn started(
    config: MetaConfig,
    addr: usize,
    connection: Connection,
    sent: Instant,
    reply: &Reply,
    info: SessionInfo,
) -> Arc<Shared> {
    let term = Duration::from_millis(u64::from(info.lease_ms));
    let mut leases = Leases::new(reply.lease_epoch, term, sent, config.recalls_max);
    leases.grant(reply.lease_epoch, &reply.grants);
    let state = State {
        phase: Phase::Live(connection),
        generation: 1,
        fence: reply.fence,
        session: info.session,
        epoch: info.epoch,
        ledger: Ledger::new(config.ledger_max, config.ledger_reserve),
        leases,
        syncs: Vec::new(),
        moved: HashMap::new(),
        outbox: Outbox::default(),
        seen: 0,
        era: 1,
        addr,
    };
    let shared = Arc::new(Shared {
        closing: AtomicBool::new(false),
        state: Mutex::new(state),
        order: Mutex::new(()),
        progress: Notify::new(),
        crowded: Notify::new(),
        placement: RwLock::new(Arc::new(info.placement.clone())),
        info: RwLock::new(Arc::new(info)),
        space: AtomicU64::new(u64::MAX),
        keeper: RwLock::new(None),
        forgot: Marks::default(),
        bare: Marks::default(),
        ids: Ids::default(),
        acks: Notify::new(),
        returns: Notify::new(),
        renew: Notify::new(),
        tasks: Mutex::default(),
        own: Mutex::default(),
        config,
    });
    shared.start_tasks();
    shared
}

impl Shared {
    /// The connection was given up for this reason.
    pub fn begin_recovery(self: &Arc<Shared>, why: Fault) {
        let shared = self.clone();
        self.spawn_own(async move { shared.recover(why).await });
    }

    async fn recover(self: &Arc<Shared>, why: Fault) {
        metrics::counter!(crate::metrics::RECOVERIES).increment(1);
        let began = Instant::now();
        tracing::debug!("the connection to the metadata service is given up: {why}");
        let mut silent = false;
        while self.ended().is_none() {
            let index = self.state.lock().addr % self.config.addrs.len();
            let addr = &self.config.addrs[index];
            // A fresh link each time: the pauses between attempts are ours, and a service that is back is found at once.
            let last = match self.resume_at(&self.config.connector.link(addr)).await {
                Ok(()) => {
                    if silent {
                        let after_s = began.elapsed().as_secs();
                        tracing::info!(addr, after_s, "the metadata service is back");
                    }
                    return;
                }
                Err(Failed::Gone(fault)) => {
                    let fault = Fault::new(
                        fault.code,
                        format!("the session with the metadata service is gone: {fault}"),
                    )
                    .next("mount again; what was not yet written back is lost");
                    self.end(fault, true);
                    return;
                }
                Err(Failed::Retry(fault)) => fault,
            };
            let wrapped = {
                let mut state = self.state.lock();
                state.addr = (index + 1) % self.config.addrs.len();
                state.addr == 0
            };
            if wrapped {
                if !silent {
                    silent = true;
                    tracing::warn!(
                        addrs = self.config.addrs.join(", "),
                        "the metadata service is silent, calls wait for it: {last}"
                    );
                }
                self.sleep_until(Instant::now() + self.config.pause).await;
            }
        }
    }

    async fn resume_at(self: &Arc<Shared>, link: &Link) -> Result<(), Failed> {
        let until = Instant::now() + self.config.attempt_timeout;
        let connection = link.connection(0, until).await.map_err(Failed::Retry)?;
        let envelope = self.state.lock().envelope();
        let (reply, done) = self.question(&connection, &envelope, &Op::ResumeSession, until).await?;
        let Done::Session(info) = done else {
            return Err(Failed::Retry(unexpected("ResumeSession", &done)));
        };
        let (reclaim, stored) = (info.reclaim, info.seq);
        let voided = {
            let mut state = self.state.lock();
            state.fence = reply.fence;
            state.epoch = info.epoch;
            state.generation += 1; // replies to an attempt before this one are not heard
            // A new leader begins an epoch of its own; what is reclaimed within the term is not lost by that.
            let void = match reclaim {
                true => !state.leases.alive(Instant::now()),
                false => reply.lease_epoch != state.leases.epoch(),
            };
            if void {
                state.leases.void(reply.lease_epoch);
            }
            void
        };
        if voided {
            self.tell_lost();
        }
        self.set_placement(info.placement.clone());
        *self.info.write() = Arc::new(info);
        if reclaim {
            self.reclaim(&connection, reply.lease_epoch, stored).await?;
        }
        while !self.retell_all(&connection).await? {
            if self.ended().is_some() {
                break;
            }
            self.sleep_until(Instant::now() + self.config.pause).await;
        }
        if reclaim {
            self.report(&connection, &[], &[], true).await?;
        }
        self.go_live(&connection).await?;
        self.renew.notify_one();
        Ok(())
    }

    /// Asks over a connection that is not in use yet, and checks its fence.
    async fn question(
        &self,
        connection: &Connection,
        envelope: &Envelope,
        op: &Op,
        until: Instant,
    ) -> Result<(Reply, Done), Failed> {
        let (reply, done) =
            ask(connection, envelope.seal(0, op, None), until).await.map_err(|fault| match fault.code {
                Code::NoSession | Code::Fenced => Failed::Gone(fault),
                _ => Failed::Retry(fault),
            })?;
        if reply.fence < envelope.fence {
            let what = format!("{} leads no more: its fence is {}", connection.addr(), reply.fence);
            return Err(Failed::Retry(Fault::new(Code::NotLeader, what)));
        }
        Ok((reply, done))
    }

    /// Tells a new leader what this session holds; what it does not grant anew is taken from the keeper.
    ///
    /// The right to write is reclaimed, even after the term, for files with commits that were answered and that this leader, which
    /// has the changes up to `stored`, has lost: what others did after them is lost too, and the commits have to be told again. Not
    /// so for those that it has: others may have got the right since, and would lose what they wrote under it.
    async fn reclaim(
        self: &Arc<Shared>,
        connection: &Connection,
        epoch: u32,
        stored: u64,
    ) -> Result<(), Failed> {
        let open = self.keeper().map(|keeper| keeper.open_inodes()).unwrap_or_default();
        let (old_epoch, held, asked) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.era += 1;
            state.seen = 0;
            state.outbox.change_era();
            let old_epoch = state.leases.epoch();
            let held = state.leases.take();
            state.leases.begin_epoch(epoch);
            let mut asked: HashMap<Ino, u8> = held.iter().map(|(ino, bits, _)| (*ino, *bits)).collect();
            for op in state.ledger.lost_ops_mut(stored) {
                if let Some((ino, _)) = grant_of(op) {
                    let bits = asked.entry(ino).or_default();
                    if *bits & (lease::WRITE | lease::SHARED) == 0 {
                        *bits |= lease::WRITE;
                    }
                }
            }
            (old_epoch, held, asked.into_iter().collect::<Vec<_>>())
        };
        if let Err(failed) = self.reclaim_all(connection, &asked, &open).await {
            self.state.lock().leases.restore(old_epoch, held);
            return Err(failed);
        }
        let missing: Vec<(Ino, u8)> = {
            let mut state = self.state.lock();
            let State { leases, ledger, moved, .. } = &mut *state;
            let mut renamed = HashMap::new();
            for (ino, _, old) in held.iter().filter(|(_, _, old)| *old > 0) {
                let new = leases.writing(*ino);
                if new > 0 {
                    renamed.insert((*ino, *old), new);
                }
            }
            // What the leader before had renamed leads on to the newest number.
            for ((ino, oldest), old) in moved.drain() {
                if let Some(new) = renamed.get(&(ino, old)).copied() {
                    renamed.entry((ino, oldest)).or_insert(new);
                }
            }
            *moved = renamed;
            for (op, answered) in ledger.ops_mut() {
                if let Some((ino, grant)) = grant_of(op).filter(|_| answered)
                    && leases.writing(ino) > 0
                {
                    *grant = leases.writing(ino);
                }
                rebase(moved, op);
            }
            held.iter()
                .map(|(ino, bits, _)| (*ino, bits & !leases.bits(*ino)))
                .filter(|(_, bits)| *bits != 0)
                .collect()
        };
        if let Some(keeper) = self.keeper() {
            for (ino, bits) in missing {
                let recall = keeper.recall(ino, bits, Vec::new());
                self.spawn(async move {
                    recall.await;
                });
            }
        }
        Ok(())
    }

    async fn reclaim_all(
        &self,
        connection: &Connection,
        held: &[(Ino, u8)],
        open: &[Ino],
    ) -> Result<(), Failed> {
        let (mut held, mut open) = (held, open);
        while !held.is_empty() || !open.is_empty() {
            let (leases, held_rest) = held.split_at(held.len().min(RECLAIM));
            let (inos, open_rest) = open.split_at(open.len().min(RECLAIM));
            (held, open) = (held_rest, open_rest);
            self.report(connection, leases, inos, false).await?;
        }
        Ok(())
    }

    /// Tells what is held and open; the last one says that all changes were told again, too.
    async fn report(
        &self,
        connection: &Connection,
        leases: &[(Ino, u8)],
        open: &[Ino],
        last: bool,
    ) -> Result<(), Failed> {
        let op = Op::Reclaim { leases: leases.to_vec(), open: open.to_vec(), last };
        let envelope = self.state.lock().envelope();
        let until = Instant::now() + self.config.attempt_timeout;
        let (reply, _) = self.question(connection, &envelope, &op, until).await?;
        let mut state = self.state.lock();
        state.leases.begin_epoch(reply.lease_epoch);
        state.leases.grant(reply.lease_epoch, &reply.grants);
        Ok(())
    }

    /// Tells every change again that was answered and is not known to be durable, in order. A new leader serves nobody until all
    /// sessions have done so. False if the service does not take them yet.
    async fn retell_all(self: &Arc<Shared>, connection: &Connection) -> Result<bool, Failed> {
        let told: Vec<u64> = self.state.lock().ledger.replay(true);
        let mut flights = VecDeque::new();
        // The first one is waited for alone: it finds out whether the service takes them.
        let mut window = 1;
        let mut renewed = Instant::now();
        let term = self.state.lock().leases.term();
        for seq in told {
            let Some(flight) = self.retell(connection, seq).await else { continue };
            flights.push_back(flight);
            if flights.len() >= window
                && let Some(first) = flights.pop_front()
            {
                if !self.landed(first).await? {
                    return Ok(false);
                }
                window = self.config.replay_window.max(1);
            }
            if renewed.elapsed() > term / 4 {
                renewed = Instant::now();
                self.renew_over(connection).await?;
            }
        }
        for flight in flights {
            if !self.landed(flight).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Keeps the leases while there is much to tell.
    async fn renew_over(&self, connection: &Connection) -> Result<(), Failed> {
        let (sent, envelope) = (Instant::now(), self.state.lock().envelope());
        let (reply, _) =
            self.question(connection, &envelope, &Op::Renew, sent + self.config.attempt_timeout).await?;
        let mut state = self.state.lock();
        if reply.lease_epoch == state.leases.epoch() {
            state.leases.renewed(sent);
        }
        Ok(())
    }

    /// Lets callers use the connection, and sends what was never answered: it may have to wait for others' recalls.
    async fn go_live(self: &Arc<Shared>, connection: &Connection) -> Result<(), Failed> {
        let open: Vec<u64> = self.state.lock().ledger.replay(false);
        let mut flights = Vec::with_capacity(open.len());
        for seq in open {
            flights.extend(self.retell(connection, seq).await);
        }
        {
            let mut state = self.state.lock();
            if let Phase::Ended(fault) = &state.phase {
                return Err(Failed::Retry(fault.clone()));
            }
            state.phase = Phase::Live(connection.clone());
        }
        for mut flight in flights {
            self.spawn_own(async move {
                flight.land().await;
            });
        }
        self.progress.notify_waiters();
        Ok(())
    }

    /// Sends a change again.
    async fn retell(self: &Arc<Shared>, connection: &Connection, seq: u64) -> Option<Flight> {
        let mut flight = {
            let mut state = self.state.lock();
            let mut op = state.ledger.op(seq)?.clone();
            let made = state.ledger.made(seq);
            let ticket = state.leases.begin();
            let (generation, envelope) = (state.generation, state.envelope());
            drop(state);
            let route = Route { connection: connection.clone(), generation, ticket, envelope };
            self.replay(seq, route, &mut op, made)
        };
        poll_fn(|cx| {
            flight.depart(cx);
            Poll::Ready(())
        })
        .await;
        metrics::counter!(crate::metrics::REPLAYED).increment(1);
        Some(flight)
    }

    /// Waits for the answer to a change told again; false if it has to be told once more.
    async fn landed(self: &Arc<Shared>, flight: Flight) -> Result<bool, Failed> {
        let until = Instant::now() + self.config.attempt_timeout;
        match flight.retold(until).await {
            Heard::Answer(_) => Ok(true),
            Heard::Again => Ok(false),
            Heard::Lost => {
                let what = "the connection was lost while changes were told again";
                Err(Failed::Retry(Fault::new(Code::Unreachable, what)))
            }
        }
    }
}
