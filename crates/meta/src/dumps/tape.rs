//! Making a dump while requests go on: a walk over the state in pieces, and a tape of what changes meanwhile.
//!
//! A snapshot of the replica that lives as long as a dump takes would keep every page that is rewritten meanwhile. So the
//! walk reads piece after piece, each of a later moment than the one before, and every batch ordered since the dump began is
//! put into the dump behind what was read up to then. A key that did not change was read right whenever it was read; a
//! key that did has its last change behind everything that was read of it. When the walk is over, the dump is the state
//! after the last batch on the tape. Pieces are made when they are asked for: nothing is kept on the metadata's disk.
//!
//! # Invariants
//! - The tape has every batch from the first on, in their order: their numbers are checked. A dump that missed one fails.
//! - A tape is bounded: whoever asks for pieces too slowly, or not any more, loses the dump and holds up nobody.
//! - Locks are taken in the order work, state, tape.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_engine::dump::{Header, Writer};
use torchfs_engine::{Batch, Change, Engine, KEY_MAX};
use torchfs_proto::attr::Raw;
use torchfs_proto::msg::meta::Done;
use torchfs_proto::{Code, Fault, Result, Seq};

use crate::config::Config;
use crate::service::{Meta, State};

/// Dumps being made at the same time.
const RUNS_MAX: usize = 4;
/// A piece is made of about so many bytes before compression at most.
const BYTES_MAX: usize = 2 << 20;
/// How long the end of a dump waits for its last batch to become durable.
const DURABLE: Duration = Duration::from_secs(30);

/// All dumps being made.
pub(crate) struct Tapes {
    runs: Vec<Arc<Run>>,
    next: u64,
    bytes_max: usize,
    patience: Duration,
}

/// One dump being made.
pub(crate) struct Run {
    id: u64,
    header: Header,
    tape: Mutex<Tape>,
    work: Mutex<Work>,
}

/// What changed since the last piece.
struct Tape {
    changes: Vec<Change>,
    bytes: usize,
    /// The last batch on it.
    last: Seq,
    /// When a piece was last asked for.
    asked: Instant,
    /// Nothing more is taken: the dump is complete, or why it never will be.
    over: Option<Result<()>>,
}

struct Work {
    writer: Writer,
    /// Where the walk goes on; `None` when it is over.
    at: Option<Vec<u8>>,
    pairs: u64,
    /// The number of the next piece, and the last one made: its answer may have been lost.
    next: u64,
    last: Option<Done>,
}

impl Tapes {
    pub fn new(config: &Config) -> Tapes {
        let patience = Duration::from_millis(u64::from(config.dump_patience_ms));
        Tapes { runs: Vec::new(), next: 0, bytes_max: config.dump_tape_bytes, patience }
    }

    /// The changes of a batch, if any dump wants them; hand them to [`Tapes::add`] when it is ordered.
    pub fn copy(&self, batch: &Batch) -> Option<Vec<Change>> {
        let wanted = self.runs.iter().any(|run| run.tape.lock().over.is_none());
        wanted.then(|| batch.changes.clone())
    }

    /// The batch got this place.
    pub fn add(&mut self, changes: &[Change], seq: Seq, now: Instant) {
        for run in &self.runs {
            let mut tape = run.tape.lock();
            if tape.over.is_some() {
                continue;
            }
            let expected = tape.last.0 + 1;
            tape.last = seq;
            tape.bytes +=
                changes.iter().map(|change| change.key().len() + value_len(change) + 64).sum::<usize>();
            let why = if seq.0 != expected {
                Some(format!("batch {seq} came where batch {expected} was expected"))
            } else if tape.bytes > self.bytes_max {
                Some("more changed than is kept for a dump: it was asked for too slowly".to_string())
            } else if now.saturating_duration_since(tape.asked) > self.patience {
                Some("nobody asked for it any more".to_string())
            } else {
                None
            };
            match why {
                None => tape.changes.extend_from_slice(changes),
                Some(why) => tape.give_up(why),
            }
        }
    }

    fn begin(&mut self, engine: &dyn Engine, wall_ns: i64, now: Instant) -> Result<Arc<Run>> {
        let patience = self.patience;
        self.runs.retain(|run| {
            let tape = run.tape.lock();
            tape.over.is_none() && now.saturating_duration_since(tape.asked) <= patience
        });
        if self.runs.len() >= RUNS_MAX {
            return Err(Fault::new(Code::Overloaded, format!("{RUNS_MAX} dumps are being made already"))
                .next("wait until one of them is done"));
        }
        let header = Header::of(engine, wall_ns);
        self.next += 1;
        let tape = Tape { changes: Vec::new(), bytes: 0, last: header.seq, asked: now, over: None };
        let work =
            Work { writer: Writer::new(&header)?, at: Some(Vec::new()), pairs: 0, next: 0, last: None };
        let run = Arc::new(Run { id: self.next, header, tape: Mutex::new(tape), work: Mutex::new(work) });
        self.runs.push(run.clone());
        Ok(run)
    }

    fn find(&self, id: u64) -> Result<Arc<Run>> {
        self.runs.iter().find(|run| run.id == id).cloned().ok_or_else(|| {
            Fault::new(Code::Stale, "this dump is not being made any more, or the service restarted")
                .next("begin the dump again")
        })
    }
}

impl Tape {
    fn take(&mut self) -> Result<Vec<Change>> {
        if let Some(Err(fault)) = &self.over {
            return Err(fault.clone());
        }
        self.bytes = 0;
        Ok(std::mem::take(&mut self.changes))
    }

    fn give_up(&mut self, why: String) {
        let fault =
            Fault::new(Code::Stale, format!("the dump was given up: {why}")).next("begin the dump again");
        self.over = Some(Err(fault));
        self.changes = Vec::new();
        self.bytes = 0;
    }
}

impl Meta {
    /// Begins a dump, or finds the one that a cursor belongs to; answers the cursor for [`Meta::dump_piece`].
    pub(crate) fn dump_cursor(&self, state: &mut State, cursor: &[u8], now: Instant) -> Result<Done> {
        let cursor = match cursor {
            [] => {
                let run = state.dumps.tapes.begin(&*self.engine, self.clock.wall_ns(), now)?;
                cursor_of(run.id, 0)
            }
            cursor => {
                let (id, _) = parse(cursor)?;
                state.dumps.tapes.find(id)?;
                cursor.to_vec().into()
            }
        };
        Ok(Done::Dumped { bytes: Vec::new().into(), cursor, pairs: 0, total: 0 })
    }

    /// Begins a dump for the service's own use: its header and the first cursor.
    pub(crate) fn begin_dump(&self) -> Result<(Header, Raw)> {
        let mut state = self.state.lock();
        let run = state.dumps.tapes.begin(&*self.engine, self.clock.wall_ns(), self.clock.now())?;
        Ok((run.header, cursor_of(run.id, 0)))
    }

    /// Makes the piece that the cursor names. Reads a disk and may wait for one; holds the service's lock at the end only.
    pub fn dump_piece(&self, cursor: &[u8]) -> Result<Done> {
        let (id, number) = parse(cursor)?;
        let run = self.state.lock().dumps.tapes.find(id)?;
        let mut work = run.work.lock();
        if let Some(last) = work.last.as_ref().filter(|_| number + 1 == work.next) {
            return Ok(last.clone());
        }
        if number != work.next {
            return Err(Fault::new(Code::Invalid, "a dump's pieces are asked for one after the other"));
        }
        run.tape.lock().asked = self.clock.now();
        let made = self.make_piece(&run, &mut work);
        if let Err(fault) = &made {
            // The walk may have gone on without its piece: whoever asks again must begin again.
            run.tape.lock().give_up(fault.what.clone());
        }
        let ended = made?;
        work.next += 1;
        let cursor = if ended { Vec::new().into() } else { cursor_of(id, work.next) };
        let bytes = work.writer.take().into();
        let done = Done::Dumped { bytes, cursor, pairs: work.pairs, total: run.header.pairs.max(work.pairs) };
        work.last = Some(done.clone());
        Ok(done)
    }

    /// Adds to the dump; whether it is complete.
    fn make_piece(&self, run: &Run, work: &mut Work) -> Result<bool> {
        if let Some(at) = work.at.take() {
            work.at = self.walk(&at, work)?;
        }
        // Behind what was read before: it is at least as new.
        let changes = run.tape.lock().take()?;
        for change in &changes {
            work.writer.change(change)?;
        }
        if work.at.is_some() {
            return Ok(false);
        }
        let (rest, seq) = {
            // No batch is ordered while the lock is held.
            let _state = self.state.lock();
            let mut tape = run.tape.lock();
            let rest = tape.take()?;
            if tape.last != self.engine.ordered() {
                let what = format!(
                    "the dump missed a batch: it has {} and the log has {}",
                    tape.last,
                    self.engine.ordered()
                );
                return Err(Fault::new(Code::Internal, what));
            }
            tape.over = Some(Ok(()));
            (rest, tape.last)
        };
        for change in &rest {
            work.writer.change(change)?;
        }
        self.engine.wait_durable(seq, DURABLE)?;
        work.writer.finish(seq, self.clock.wall_ns())?;
        Ok(true)
    }

    /// Reads on from a key; answers where the next piece goes on.
    fn walk(&self, at: &[u8], work: &mut Work) -> Result<Option<Vec<u8>>> {
        let (mut pairs, mut bytes, mut next, mut failed) = (0, 0, None, None);
        self.engine.scan(at, &[u8::MAX; KEY_MAX + 1], false, &mut |key, value| {
            if let Err(error) = work.writer.put(key, value) {
                failed = Some(error);
                return ControlFlow::Break(());
            }
            pairs += 1;
            bytes += key.len() + value.len();
            if pairs < self.config.dump_pairs && bytes < BYTES_MAX {
                return ControlFlow::Continue(());
            }
            let mut after = key.to_vec();
            after.push(0);
            next = Some(after);
            ControlFlow::Break(())
        })?;
        work.pairs += pairs as u64;
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(next),
        }
    }
}

fn value_len(change: &Change) -> usize {
    match change {
        Change::Put(_, value) => value.len(),
        Change::Delete(_) => 0,
    }
}

fn cursor_of(id: u64, number: u64) -> Raw {
    [id.to_be_bytes(), number.to_be_bytes()].concat().into()
}

fn parse(cursor: &[u8]) -> Result<(u64, u64)> {
    let bad = || Fault::new(Code::Invalid, "this is no cursor of a dump");
    let (id, number) = cursor.split_first_chunk::<8>().ok_or_else(bad)?;
    let number = <[u8; 8]>::try_from(number).map_err(|_| bad())?;
    Ok((u64::from_be_bytes(*id), u64::from_be_bytes(number)))
}
