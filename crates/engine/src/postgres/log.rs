//! The log in the database, as its leader writes it; the lease; and the pairs that follow the log.
//!
//! # Invariants
//! - The log's thread alone appends and renews, over one connection; checkpoints use another, so that they never keep a
//!   commit waiting.
//! - Pairs are changed in bounded statements that check the fence. While a checkpoint is on its way they are a mixture, but
//!   their place still is the old one: replaying the log from there overwrites every key of the mixture.
//! - What was done to the pairs may be lost in a crash of the database, the last of it only. So each statement names the place
//!   that it goes on from, and none goes on over another connection from where one before it ended.
//! - Rows of the log go only when the pairs hold them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_proto::Seq;

use super::rows::{Group, Head, number, odd};
use super::session::{Session, Target};
use super::{PostgresConfig, schema};
use crate::Peer;
use crate::batch::BODY_MAX;
use crate::error::{Error, Result};
use crate::log::format::{Mark, Record, Writer};
use crate::log::{Appended, Log, Wants};
use crate::overlay::{Layer, Overlay};

/// The pause before a silent database is asked again: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// How often the leader looks how far the standbys are, and says how far it is itself.
const LOOK: Duration = Duration::from_secs(2);
/// A standby that was not heard for this long is not waited for.
const AWAY_MS: u64 = 30_000;

/// The log of a leader.
pub struct PgLog {
    config: PostgresConfig,
    writer: Writer,
    reign: u64,
    /// For appends and renewals.
    session: Mutex<Session>,
    /// For everything that may take longer.
    slow: Mutex<Session>,
    lease: Lease,
    /// The last place in the database's log.
    last: AtomicU64,
    /// As of which place the pairs were last.
    settled: AtomicU64,
    /// Bytes of the log and of the pairs in the database.
    bytes: [AtomicU64; 2],
    peers: Mutex<Vec<Peer>>,
    looked: Mutex<Option<Instant>>,
    stopping: AtomicBool,
    lost: AtomicBool,
}

/// Until when this process is the leader for sure, by its own clock.
pub struct Lease {
    began: Instant,
    until_us: AtomicU64,
}

impl Lease {
    /// Sure until a term after `sent`.
    pub fn new(sent: Instant, term: Duration) -> Lease {
        Lease { began: sent, until_us: AtomicU64::new(term.as_micros() as u64) }
    }

    fn renew(&self, sent: Instant, term: Duration) {
        let until = (sent.saturating_duration_since(self.began) + term).as_micros() as u64;
        self.until_us.fetch_max(until, Ordering::AcqRel);
    }

    fn holds(&self) -> bool {
        (self.began.elapsed().as_micros() as u64) < self.until_us.load(Ordering::Acquire)
    }
}

impl PgLog {
    /// The log of whoever has just taken the lead.
    pub(super) fn new(
        config: PostgresConfig,
        session: Session,
        target: &Target,
        writer: Writer,
        reign: u64,
        lease: Lease,
        last: Seq,
    ) -> Result<PgLog> {
        let slow = Session::new(target.relaxed())?;
        Ok(PgLog {
            config,
            writer,
            reign,
            session: Mutex::new(session),
            slow: Mutex::new(slow),
            lease,
            last: AtomicU64::new(last.0),
            // Asked for at the first checkpoint.
            settled: AtomicU64::new(u64::MAX),
            bytes: Default::default(),
            peers: Mutex::default(),
            looked: Mutex::new(None),
            stopping: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        })
    }

    fn fence(&self) -> i64 {
        self.writer.fence.0 as i64
    }

    /// Runs a statement until it has an answer. After a lost answer the statement must find out by itself what happened.
    fn insist<T>(&self, session: &mut Session, mut run: impl FnMut(&mut Session) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let mut pause = PAUSE.0;
        let mut told = false;
        loop {
            match run(session) {
                Err(Error::Silent { what }) => {
                    if self.stopping.load(Ordering::Acquire) && began.elapsed() >= self.config.close_timeout {
                        return Err(Error::Silent { what });
                    }
                    if !told && began.elapsed() > self.config.lease {
                        told = true;
                        tracing::warn!("the metadata's database is silent, calls wait for it: {what}");
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE.1);
                }
                done => {
                    if told && done.is_ok() {
                        let after_s = began.elapsed().as_secs();
                        tracing::info!(after_s, "the metadata's database answers again");
                    }
                    return done;
                }
            }
        }
    }

    /// A statement found another fence or place than expected: decides what the row that all agree on says. `true` if the log
    /// ends at `wanted`, which only this leader can have brought about.
    fn resolve(&self, session: &mut Session, before: Seq, wanted: Seq) -> Result<bool> {
        let head = self.insist(session, |session| Head::of(&session.query_one(schema::HEAD, &[])?))?;
        if head.fence > self.writer.fence {
            return Err(Error::Deposed {
                what: match head.address.as_str() {
                    "" => "nobody at the moment".into(),
                    address => format!("{address} leads"),
                },
            });
        }
        let here = head.fence == self.writer.fence && head.reign == self.reign;
        match head.last {
            last if here && last == wanted => Ok(true),
            last if here && last == before => Ok(false),
            last => Err(Error::BackInTime {
                what: format!(
                    "the database's log ends at batch {last} under fence {}, but batch {before} under fence {} was durable: \
                     it was restored from an older state, or a standby without the last commits was promoted. Bring the \
                     newer database back; if it is gone for good, stop all metadata servers, remove their folders and start \
                     them again: what came after batch {last} is lost",
                    head.fence, self.writer.fence
                ),
            }),
        }
    }

    /// Looks after the standbys from time to time.
    fn look(&self, session: &mut Session) -> Result<()> {
        let due = self.looked.lock().is_none_or(|at| at.elapsed() >= LOOK);
        if !due {
            return Ok(());
        }
        *self.looked.lock() = Some(Instant::now());
        let mut peers = Vec::new();
        for row in session.query(schema::SERVERS, &[])? {
            peers.push(Peer {
                address: row.try_get(0).map_err(odd)?,
                applied: Seq(number(&row, 1)?),
                replica_bytes: number(&row, 2)?,
                silent_ms: number(&row, 3)?,
            });
        }
        peers.retain(|peer| peer.address != self.config.address);
        *self.peers.lock() = peers;
        Ok(())
    }

    /// Brings the pairs forward by what the log itself holds, up to this place.
    fn settle_from_log(&self, session: &mut Session, mut settled: Seq, to: Seq) -> Result<Seq> {
        while settled < to {
            let (after, bytes) = (settled.0 as i64, self.config.fetch_bytes as i64);
            let mut merged = Overlay::default();
            let mut reached = settled;
            for row in session.query(schema::GROUPS, &[&after, &bytes])? {
                let group = Group::of(&row)?;
                if group.first.0 > reached.0 + 1 {
                    break;
                }
                group.replay(self.writer.cluster, reached, &mut |_, changes| merged.apply(changes))?;
                reached = group.last;
            }
            if reached == settled {
                return Err(Error::Corrupt {
                    what: format!(
                        "the database's log lacks batch {} that its pairs do not hold",
                        settled.0 + 1
                    ),
                });
            }
            self.change_pairs(session, settled, reached, &merged.freeze())?;
            settled = reached;
        }
        Ok(settled)
    }

    /// Brings the pairs from one place to another.
    fn change_pairs(&self, session: &mut Session, from: Seq, to: Seq, layer: &Layer) -> Result<()> {
        let mut changes = layer.iter().peekable();
        let mut begun = false;
        loop {
            if std::mem::replace(&mut begun, true) && !session.is_open() {
                return Err(Error::Silent {
                    what: "the connection was lost between changes of pairs".into(),
                });
            }
            let (mut gone, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
            let mut bytes = 0;
            while gone.len() + keys.len() < self.config.state_keys
                && bytes < self.config.state_bytes
                && let Some((key, value)) = changes.next()
            {
                bytes += key.len() + value.as_ref().map_or(0, |value| value.len());
                match value {
                    Some(value) => {
                        keys.push(&**key);
                        values.push(&**value);
                    }
                    None => gone.push(&**key),
                }
            }
            let whole = changes.peek().is_none();
            let (place, before) = (if whole { to.0 } else { from.0 } as i64, from.0 as i64);
            let row = session
                .query_one(schema::CHANGE_PAIRS, &[&self.fence(), &place, &gone, &keys, &values, &before])?;
            if number(&row, 0)? == 0 {
                let head = Head::of(&session.query_one(schema::HEAD, &[])?)?;
                return Err(match head.fence == self.writer.fence {
                    // The next checkpoint asks again where they are.
                    true => Error::Silent { what: format!("its pairs are not as of batch {from} any more") },
                    false => Error::Deposed { what: "it has the pairs of the database".into() },
                });
            }
            if whole {
                return Ok(());
            }
            if self.stopping.load(Ordering::Acquire) {
                return Err(Error::Silent { what: "the engine ends".into() });
            }
        }
    }
}

impl Log for PgLog {
    fn body_max(&self) -> usize {
        BODY_MAX
    }

    fn append(&self, records: &VecDeque<Record>, durable: Seq) -> Result<Appended> {
        let (Some(first), Some(last)) = (records.front(), records.back()) else {
            return Ok(Appended::Durable(0));
        };
        let mut body = Vec::with_capacity(records.iter().map(Record::stored_len).sum());
        for record in records {
            record.encode(&mut body, &self.writer, 0, durable);
        }
        let before = Seq(self.last.load(Ordering::Acquire));
        let numbers = [self.fence(), before.0 as i64, last.seq.0 as i64, first.seq.0 as i64];
        let mut session = self.session.lock();
        let appended = loop {
            let done = self.insist(&mut session, |session| {
                let sent = Instant::now();
                let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
                    [&numbers[0], &numbers[1], &numbers[2], &numbers[3], &body];
                Ok((sent, session.execute(schema::APPEND, &params)?))
            });
            match done {
                Ok((sent, 1)) => {
                    self.lease.renew(sent, self.config.lease);
                    break Ok(());
                }
                // Either an earlier attempt did it after all, or another one leads.
                Ok(_) => match self.resolve(&mut session, before, last.seq) {
                    Ok(true) => break Ok(()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                },
                Err(error) => break Err(error),
            }
        };
        if let Err(error) = appended {
            self.lost.store(true, Ordering::Release);
            return Err(error);
        }
        self.last.store(last.seq.0, Ordering::Release);
        if self.look(&mut session).is_err() {
            // The next append finds out.
            session.reset();
        }
        Ok(Appended::Durable(records.len()))
    }

    fn fits(&self, _bytes: usize, _longest: usize, _groups: usize) -> bool {
        true
    }

    fn wants(&self) -> Wants {
        Wants::Nothing
    }

    fn bytes(&self) -> u64 {
        self.bytes[0].load(Ordering::Relaxed)
    }

    fn state_bytes(&self) -> u64 {
        self.bytes[1].load(Ordering::Relaxed)
    }

    fn peers(&self) -> Vec<Peer> {
        self.peers.lock().clone()
    }

    /// Removes what the pairs hold, no standby needs and is old enough.
    fn maintain(&self, _applied: Seq, _may_grow: bool) -> Result<()> {
        let settled = self.settled.load(Ordering::Acquire);
        if settled == u64::MAX || self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let needed =
            self.peers.lock().iter().filter(|peer| peer.silent_ms < AWAY_MS).map(|p| p.applied.0).min();
        let floor = settled.min(needed.unwrap_or(u64::MAX)) as i64;
        let keep_ms = self.config.log_keep.as_millis() as i64;
        let mut session = self.slow.lock();
        while session.execute(schema::PRUNE, &[&self.fence(), &floor, &(keep_ms as f64)])? >= 10_000 {}
        let row = session.query_one(schema::SIZES, &[])?;
        for (at, bytes) in self.bytes.iter().enumerate() {
            bytes.store(number(&row, at)?, Ordering::Relaxed);
        }
        Ok(())
    }

    fn settle(&self, from: Seq, to: Seq, layer: &Layer) -> Result<()> {
        let mut session = self.slow.lock();
        let session = &mut *session;
        // Never from memory: a crash of the database may have taken what the last checkpoint brought.
        let settled = Seq(number(&session.query_one(schema::STATE, &[])?, 0)?);
        self.settled.store(settled.0, Ordering::Release);
        // Leaders before this one may have left more to do than this checkpoint knows of.
        let settled = if settled < from { self.settle_from_log(session, settled, from)? } else { settled };
        if settled < to {
            self.change_pairs(session, settled, to, layer)?;
        }
        self.settled.store(settled.max(to).0, Ordering::Release);
        Ok(())
    }

    fn mark(&self, applied: Seq) -> Mark {
        Mark { cluster: self.writer.cluster, applied, fence: self.writer.fence, reign: self.reign }
    }

    fn tick_every(&self) -> Option<Duration> {
        Some(self.config.lease / 4)
    }

    fn tick(&self) -> Result<()> {
        let mut session = self.session.lock();
        let last = Seq(self.last.load(Ordering::Acquire));
        let sent = Instant::now();
        let renewed = session.execute(schema::RENEW, &[&self.fence(), &(last.0 as i64)]);
        let done = match renewed {
            Ok(1) => {
                self.lease.renew(sent, self.config.lease);
                self.look(&mut session)
            }
            Ok(_) => self.resolve(&mut session, last, last).map(|_| ()),
            Err(error) => Err(error),
        };
        match done {
            // Asked again at the next tick; until then the lease runs out.
            Err(Error::Silent { .. }) => Ok(()),
            Err(error) => {
                self.lost.store(true, Ordering::Release);
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    fn leads(&self) -> bool {
        !self.lost.load(Ordering::Acquire) && self.lease.holds()
    }

    fn interrupt(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Gives the lead up, so that a standby need not wait.
    fn close(&self) {
        if self.lost.load(Ordering::Acquire) {
            return;
        }
        self.lost.store(true, Ordering::Release);
        if let Err(error) = self.session.lock().execute(schema::RELEASE, &[&self.fence()]) {
            tracing::warn!("the lead was not given up, a standby will wait it out: {error}");
        }
    }
}
