//! Keys: a mutating request that comes again is answered with what came of it the first time.
//!
//! The result is stored in the batch of the change, as little as is needed to answer again. The client's watermark says
//! which results it has and knows durable; they are dropped in later batches of the same session.
//!
//! # Invariants
//! - A change and its result are in one batch: both survive or none.
//! - At most `outcomes_max` results that are not acknowledged are kept for a session; then it must wait.
//! - Refusals changed nothing and are not stored: they are decided anew.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use torchfs_proto::attr::{Attr, Kind, Time};
use torchfs_proto::msg::meta::{Done, Request};
use torchfs_proto::record::{Answered, Outcome};
use torchfs_proto::{Code, Fault, Ino, Result, SessionId, VolumeId, key};

use super::{Meta, State, Step};
use crate::view::View;

/// Results dropped in one batch.
const DROP_MAX: usize = 16;

impl Meta {
    /// The answer to a request that was done before; `None` if it is new.
    pub(super) fn replayed(&self, state: &mut State, request: &Request) -> Result<Option<Step>> {
        let Some(session) = state.sessions.get_mut(&request.session) else { return Ok(None) };
        session.watermark = session.watermark.max(request.watermark);
        if request.seq == 0 {
            return Ok(None);
        }
        let volume = session.volume;
        let mark = session.watermark;
        let named = (request.seq, request.step);
        if session.outcomes.contains(&named) {
            let view = self.view(volume);
            let at = key::outcome(volume, request.session, request.seq, request.step);
            if let Some(outcome) = view.get::<Outcome>(&at)? {
                let done = again(&view, outcome.what)?;
                let mut reply = self.reply(state, request.session, Ok(done), outcome.born, Vec::new());
                reply.bare = Some(Vec::new());
                return Ok(Some(Step::Reply(reply)));
            }
        }
        if request.seq <= mark {
            let what =
                format!("request {} of session {} was acknowledged before", request.seq, request.session);
            return Err(Fault::new(Code::Protocol, what));
        }
        if session.outcomes.len() >= self.config.outcomes_max {
            let waiting = session.outcomes.range((mark + 1, 0)..).count();
            if waiting >= self.config.outcomes_max {
                let what = format!("session {} did not acknowledge {waiting} results", request.session);
                return Err(Fault::new(Code::Overloaded, what));
            }
        }
        Ok(None)
    }

    /// Puts the result beside the change, and drops some that are acknowledged.
    pub(super) fn store_outcome(
        &self,
        state: &State,
        request: &Request,
        view: &mut View<'_>,
        answered: Option<Answered>,
    ) -> Result<()> {
        let Some(session) = state.sessions.get(&request.session) else { return Ok(()) };
        for (seq, step) in session.outcomes.range(..=(session.watermark, u32::MAX)).take(DROP_MAX) {
            view.delete(key::outcome(session.volume, request.session, *seq, *step));
        }
        if request.seq > 0
            && let Some(what) = answered
        {
            let at = key::outcome(session.volume, request.session, request.seq, request.step);
            view.put(at, &Outcome { born: view.born, what });
        }
        Ok(())
    }

    /// The batch was ordered: memory follows.
    pub(super) fn stored_outcome(&self, state: &mut State, request: &Request, stored: bool) {
        let Some(session) = state.sessions.get_mut(&request.session) else { return };
        let old: Vec<(u64, u32)> =
            session.outcomes.range(..=(session.watermark, u32::MAX)).take(DROP_MAX).copied().collect();
        for outcome in old {
            session.outcomes.remove(&outcome);
        }
        if request.seq > 0 && stored {
            session.outcomes.insert((request.seq, request.step));
        }
        session.last_seq = session.last_seq.max(request.seq);
    }
}

/// The answer that a stored result stands for, with attributes as they are now.
fn again(view: &View<'_>, what: Answered) -> Result<Done> {
    let attr = |ino: Ino, kind: Kind| -> Result<Attr> {
        Ok(match view.find_inode(ino)? {
            Some(inode) => inode.attr(ino),
            None => gone(ino, kind),
        })
    };
    Ok(match what {
        Answered::Ok => Done::Ok,
        Answered::Ids(ids) => Done::Ids(ids),
        Answered::Attr(ino) => Done::Attr(attr(ino, Kind::File)?),
        Answered::Made { ino, created } => Done::Made { attr: attr(ino, Kind::File)?, created },
        Answered::Removed { ino, kind, held } => Done::Removed { attr: attr(ino, kind)?, held },
        Answered::Renamed { ino, other, held } => Done::Renamed {
            attr: attr(ino, Kind::File)?,
            other: other.map(|(ino, kind)| attr(ino, kind)).transpose()?,
            held,
        },
        Answered::Committed { ino, appended, copied } => {
            Done::Committed { attr: attr(ino, Kind::File)?, appended, copied }
        }
    })
}

/// Attributes of an inode that is no more.
fn gone(ino: Ino, kind: Kind) -> Attr {
    let zero = Time::default();
    Attr {
        ino,
        kind,
        mode: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 0,
        stored: 0,
        atime: zero,
        mtime: zero,
        ctime: zero,
        btime: zero,
        data_version: 0,
        change: 0,
        flags: 0,
        generation: 1,
        layout: None,
    }
}

/// Loads which results a session has.
pub(super) fn load_outcomes(
    view: &View<'_>,
    volume: VolumeId,
    session: SessionId,
) -> Result<BTreeSet<(u64, u32)>> {
    let prefix = key::outcomes(volume, session);
    let mut found = BTreeSet::new();
    view.scan(&prefix, &key::after(&prefix), false, &mut |at, _: Outcome| {
        if let Some(parts) = key::Parts::of(at)
            && let (Some(seq), Some(step)) = (parts.u64_at(8), parts.rest.get(16..20))
        {
            found.insert((seq, u32::from_be_bytes([step[0], step[1], step[2], step[3]])));
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}
