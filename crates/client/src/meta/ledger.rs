//! The changes of a session that are not known to be durable, to be told again to the next leader. Pure.
//!
//! An answer means that the service has put a change in order, not that it is on disk. Until a reply says so the request
//! stays here. When another leader takes over, all of them are sent again in the order of their sequence; those that the
//! new leader found in the log are answered from there, the others happen again the same way.
//!
//! # Invariants
//! - Sequences rise by one and are never used twice. Everything up to the watermark is durable, refused or given up.
//! - An entry counts as durable only by the word of the leader that put it in order: places in the log given by one
//!   leader mean nothing under the next.
//! - A refused change leaves at once: it changed nothing, and there is nothing to repeat.
//! - A change that another session waits for finds room even when there is none for others: what holds the watermark may
//!   itself wait for that session.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokio::sync::oneshot;
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{Code, Fault, Ino, Result, Seq};

/// The changes under way and those not durable.
pub(crate) struct Ledger {
    entries: BTreeMap<u64, Entry>,
    /// (place in the log, sequence) of those that this leader has ordered, about in the order of places.
    ordered: VecDeque<(Seq, u64)>,
    durable: Seq,
    next: u64,
    /// Changes without an answer that are given up if they are lost: their owners send them anew under another sequence.
    loose: BTreeSet<u64>,
    /// Sequences above the watermark, at most,
    max: u64,
    /// and so many more for what others wait for.
    reserve: u64,
    /// The first change that the present leader answered otherwise than the one before.
    broken: Option<(u64, Fault)>,
}

struct Entry {
    op: Op,
    /// Where this leader's log has it.
    place: Option<Seq>,
    /// What the caller was told.
    told: Option<Told>,
    owner: Owner,
}

/// What a change is to those that wait for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    /// One of many.
    Common,
    /// It may wait for hours, and is given up rather than keep others waiting.
    Loose,
    /// Another session waits for it.
    Awaited,
}

/// As much of an answer as has to be the same when it is given again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Told {
    Ok,
    Made(Ino),
}

enum Owner {
    /// Polls its own call.
    Calling,
    /// Lost its connection; waits for what the replay brings.
    Waiting(oneshot::Sender<Result<Done>>),
    /// The replay was quicker than the owner.
    Brought(Box<Result<Done>>),
    /// Has its answer, or does not want it.
    Gone,
}

impl Ledger {
    pub fn new(max: usize, reserve: usize) -> Ledger {
        Ledger {
            entries: BTreeMap::new(),
            ordered: VecDeque::new(),
            durable: Seq(0),
            next: 1,
            loose: BTreeSet::new(),
            max: max.max(1) as u64,
            reserve: reserve as u64,
            broken: None,
        }
    }

    /// Whether a further change may be made. The service keeps the results of everything above the watermark, so what counts
    /// is the distance from it, not how many are left.
    pub fn has_room(&self, claim: Claim) -> bool {
        let distance = self.last() - self.watermark();
        match claim {
            Claim::Common => distance < self.max,
            // A quarter, so that those that give up make room for many others before they are back.
            Claim::Loose => distance < self.max && self.loose.len() as u64 <= self.max / 4,
            Claim::Awaited => distance < self.max + self.reserve,
        }
    }

    /// How many changes are kept.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Takes a change in and gives it its sequence.
    pub fn enter(&mut self, op: Op, loose: bool) -> u64 {
        let seq = self.next;
        self.next += 1;
        self.entries.insert(seq, Entry { op, place: None, told: None, owner: Owner::Calling });
        if loose {
            self.loose.insert(seq);
        }
        seq
    }

    /// The change of a sequence, while it is kept.
    pub fn op(&self, seq: u64) -> Option<&Op> {
        self.entries.get(&seq).map(|entry| &entry.op)
    }

    /// The inode that the first answer to this change named.
    pub fn made(&self, seq: u64) -> Option<Ino> {
        match self.entries.get(&seq)?.told? {
            Told::Made(ino) => Some(ino),
            Told::Ok => None,
        }
    }

    /// Every kept change, to be corrected before it is told to another leader; with whether it was answered.
    pub fn ops_mut(&mut self) -> impl Iterator<Item = (&mut Op, bool)> {
        self.entries.values_mut().map(|entry| (&mut entry.op, entry.told.is_some()))
    }

    /// What was answered and is not in the log of a leader that has the change of sequence `stored`, or nothing of ours if that is 0.
    /// A log that was cut off has everything up to some place.
    pub fn lost_ops_mut(&mut self, stored: u64) -> impl Iterator<Item = &mut Op> {
        let last = self.entries.get(&stored).and_then(|entry| entry.place);
        let told = self.entries.iter_mut().filter(|(_, entry)| entry.told.is_some());
        let lost = told.filter(move |(seq, entry)| match (entry.place, last) {
            (Some(place), Some(last)) => place > last,
            _ => **seq > stored,
        });
        lost.map(|(_, entry)| &mut entry.op)
    }

    /// The results of sequences up to this one are not needed any more.
    pub fn watermark(&self) -> u64 {
        self.entries.first_key_value().map_or(self.next, |(seq, _)| *seq) - 1
    }

    /// The last sequence given out.
    pub fn last(&self) -> u64 {
        self.next - 1
    }

    /// The present leader answered. `mine`: to the owner's own call, so the answer need not be kept for it.
    pub fn answer(&mut self, seq: u64, place: Seq, result: &Result<Done>, mine: bool) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return; // known to be durable meanwhile, or given up
        };
        self.loose.remove(&seq);
        let told = entry.told;
        if told.is_none() {
            entry.owner = match std::mem::replace(&mut entry.owner, Owner::Gone) {
                Owner::Waiting(tell) => {
                    // The receiver may have been dropped: then nobody wants to know.
                    let _ = tell.send(result.clone());
                    Owner::Gone
                }
                Owner::Calling | Owner::Brought(_) if !mine => Owner::Brought(Box::new(result.clone())),
                Owner::Calling | Owner::Brought(_) | Owner::Gone => Owner::Gone,
            };
        }
        match result {
            Ok(done) => {
                let now = Told::of(done);
                if let Some(told) = told.filter(|told| *told != now) {
                    let what = format!(
                        "change {seq} was answered {told:?} before and {now:?} after a change of leaders"
                    );
                    self.broken.get_or_insert((seq, Fault::new(Code::Internal, what)));
                }
                entry.told = Some(now);
                entry.place = Some(place);
                self.ordered.push_back((place, seq));
                self.sweep();
            }
            Err(fault) => {
                if told.is_some() {
                    let what = format!(
                        "change {seq} was done, but another leader of the metadata refused it: {fault}"
                    );
                    self.broken.get_or_insert((seq, Fault::new(Code::Io, what)));
                }
                if !matches!(entry.owner, Owner::Brought(_)) {
                    self.entries.remove(&seq);
                }
            }
        }
    }

    /// The owner's connection is gone: what the replay brought, or a way to be told.
    pub fn wait(&mut self, seq: u64) -> Option<oneshot::Receiver<Result<Done>>> {
        let entry = self.entries.get_mut(&seq)?;
        let (tell, told) = oneshot::channel();
        match std::mem::replace(&mut entry.owner, Owner::Gone) {
            Owner::Brought(result) => {
                // The receiver is in our hands, so this cannot fail.
                let _ = tell.send(*result);
                self.fetched(seq);
            }
            Owner::Calling | Owner::Waiting(_) | Owner::Gone => entry.owner = Owner::Waiting(tell),
        }
        Some(told)
    }

    /// The owner will not be back for its answer.
    pub fn disown(&mut self, seq: u64) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && let Owner::Brought(_) = std::mem::replace(&mut entry.owner, Owner::Gone)
        {
            self.fetched(seq);
        }
    }

    /// A change that has no answer is given up; whatever it did or does is none of ours.
    pub fn give_up(&mut self, seq: u64) {
        if self.entries.get(&seq).is_some_and(|entry| entry.told.is_none()) {
            self.entries.remove(&seq);
            self.loose.remove(&seq);
        }
    }

    /// The present leader's log is durable up to here. Says whether that was news.
    pub fn durable(&mut self, upto: Seq) -> bool {
        if upto <= self.durable {
            return false;
        }
        self.durable = upto;
        self.sweep();
        true
    }

    /// Another leader: places in the log that were not durable mean nothing any more. Returns what to tell it again, in order:
    /// either what was answered before, or the rest. Loose changes without an answer are left to their owners.
    pub fn replay(&mut self, answered: bool) -> Vec<u64> {
        if answered {
            self.durable = Seq(0);
            self.ordered.clear();
            for seq in std::mem::take(&mut self.loose) {
                self.entries.remove(&seq);
            }
            self.entries.values_mut().for_each(|entry| entry.place = None);
        }
        let chosen = self.entries.iter().filter(|(_, entry)| entry.told.is_some() == answered);
        chosen.map(|(seq, _)| *seq).collect()
    }

    /// How far the log has to be durable for all answered changes up to this sequence; `None` if they are.
    pub fn needed(&self, upto: u64) -> Result<Option<Seq>> {
        if let Some((seq, fault)) = &self.broken
            && *seq <= upto
        {
            return Err(fault.clone());
        }
        // A change that was answered by a leader before and not yet by this one counts as far away.
        let far = Seq(u64::MAX);
        let told = self.entries.range(..=upto).filter(|(_, entry)| entry.told.is_some());
        Ok(told.map(|(_, entry)| entry.place.unwrap_or(far)).filter(|place| *place > self.durable).max())
    }

    /// The farthest place of all that is in order.
    pub fn farthest(&self) -> Seq {
        self.ordered.iter().map(|(place, _)| *place).max().unwrap_or(Seq(0))
    }

    /// The session is gone: nobody gets an answer any more.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.loose.clear();
        self.ordered.clear();
    }

    /// An answer that the replay brought has left: what was kept for it alone can go.
    fn fetched(&mut self, seq: u64) {
        let durable = self.durable;
        if self.entries.get(&seq).is_some_and(|entry| match (entry.told, entry.place) {
            (None, _) => true, // it was refused
            (Some(_), place) => place.is_some_and(|place| place <= durable),
        }) {
            self.entries.remove(&seq);
        }
    }

    fn sweep(&mut self) {
        while let Some((place, seq)) = self.ordered.front().copied()
            && place <= self.durable
        {
            self.ordered.pop_front();
            let waits = self.entries.get(&seq).is_some_and(|entry| matches!(entry.owner, Owner::Brought(_)));
            if !waits {
                self.entries.remove(&seq);
            }
        }
    }
}

impl Told {
    fn of(done: &Done) -> Told {
        match done {
            Done::Made { attr, .. } => Told::Made(attr.ino),
            _ => Told::Ok,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op() -> Op {
        Op::GrantIds { count: 1 }
    }

    fn ok() -> Result<Done> {
        Ok(Done::Ok)
    }

    #[test]
    fn a_change_stays_until_its_place_is_durable() {
        let mut ledger = Ledger::new(10, 0);
        let (first, second) = (ledger.enter(op(), false), ledger.enter(op(), false));
        assert_eq!((first, second, ledger.watermark()), (1, 2, 0));
        ledger.answer(second, Seq(5), &ok(), true);
        ledger.durable(Seq(5));
        assert_eq!(ledger.watermark(), 0, "the first has no answer");
        ledger.answer(first, Seq(6), &ok(), true);
        assert_eq!(ledger.needed(first).expect("not broken"), Some(Seq(6)));
        assert!(ledger.durable(Seq(6)));
        assert_eq!(ledger.needed(first).expect("not broken"), None);
        assert_eq!((ledger.watermark(), ledger.len()), (2, 0));
    }

    #[test]
    fn a_refused_change_leaves_at_once() {
        let mut ledger = Ledger::new(10, 0);
        let seq = ledger.enter(op(), false);
        ledger.answer(seq, Seq(0), &Err(Code::Exists.into()), true);
        assert_eq!((ledger.len(), ledger.watermark()), (0, 1));
    }

    #[test]
    fn places_of_an_old_leader_mean_nothing_under_the_next() {
        let mut ledger = Ledger::new(10, 0);
        let seq = ledger.enter(op(), false);
        ledger.answer(seq, Seq(100), &ok(), true);
        assert_eq!((ledger.replay(true), ledger.replay(false)), (vec![seq], vec![]));
        ledger.durable(Seq(200));
        assert!(ledger.needed(seq).expect("not broken").is_some(), "not replayed yet, so not durable");
        ledger.answer(seq, Seq(150), &ok(), false);
        assert_eq!(ledger.needed(seq).expect("not broken"), None);
        assert_eq!(ledger.len(), 0);
    }

    #[test]
    fn what_a_leader_has_lost_follows_from_the_last_change_that_it_has() {
        let mut ledger = Ledger::new(10, 0);
        for count in 1..=4 {
            ledger.enter(Op::GrantIds { count }, false);
        }
        // The first one had to wait, the last one was not answered.
        for (seq, place) in [(2, 7), (1, 8), (3, 9)] {
            ledger.answer(seq, Seq(place), &ok(), true);
        }
        let mut grants = |stored| -> Vec<u32> {
            let counts = ledger.lost_ops_mut(stored).map(|op| match op {
                Op::GrantIds { count } => *count,
                other => panic!("{other:?}"),
            });
            counts.collect()
        };
        assert_eq!((grants(0), grants(2), grants(1)), (vec![1, 2, 3], vec![1, 3], vec![3]));
        assert_eq!((grants(3), grants(4)), (vec![], vec![]));
    }

    #[test]
    fn a_replay_that_is_quicker_than_the_owner_keeps_its_answer() {
        let mut ledger = Ledger::new(10, 0);
        let seq = ledger.enter(op(), false);
        ledger.durable(Seq(9));
        assert_eq!((ledger.replay(true), ledger.replay(false)), (vec![], vec![seq]));
        ledger.durable(Seq(9));
        ledger.answer(seq, Seq(8), &Err(Code::Exists.into()), false);
        let mut told = ledger.wait(seq).expect("kept");
        assert_eq!(told.try_recv().expect("there already"), Err(Code::Exists.into()));
        assert_eq!(ledger.len(), 0);
    }

    #[test]
    fn an_answer_that_changed_between_leaders_is_never_swallowed() {
        let mut ledger = Ledger::new(10, 0);
        let seq = ledger.enter(op(), false);
        ledger.answer(seq, Seq(100), &ok(), true);
        ledger.replay(true);
        ledger.answer(seq, Seq(0), &Err(Code::Exists.into()), false);
        assert_eq!(ledger.needed(seq).expect_err("latched").code, Code::Io);
        assert!(ledger.needed(seq - 1).is_ok(), "earlier changes are not concerned");
    }

    #[test]
    fn a_waiting_lock_is_not_replayed_but_sent_anew_by_its_owner() {
        let mut ledger = Ledger::new(10, 0);
        let lock = ledger.enter(op(), true);
        let other = ledger.enter(op(), false);
        assert_eq!((ledger.replay(true), ledger.replay(false)), (vec![], vec![other]));
        ledger.answer(lock, Seq(0), &ok(), true);
        assert_eq!(ledger.len(), 1, "an answer to what was given up says nothing");
    }

    #[test]
    fn the_distance_from_the_watermark_is_bounded() {
        let mut ledger = Ledger::new(3, 0);
        for _ in 0..3 {
            assert!(ledger.has_room(Claim::Common));
            ledger.enter(op(), false);
        }
        assert!(!ledger.has_room(Claim::Common));
        ledger.answer(2, Seq(0), &ok(), true);
        ledger.answer(3, Seq(0), &ok(), true);
        assert!(!ledger.has_room(Claim::Common), "the first still holds the watermark");
        ledger.answer(1, Seq(0), &ok(), true);
        assert!(ledger.has_room(Claim::Common));
    }

    #[test]
    fn what_others_wait_for_has_room_of_its_own() {
        let mut ledger = Ledger::new(3, 2);
        for _ in 0..5 {
            assert!(ledger.has_room(Claim::Awaited));
            ledger.enter(op(), false);
        }
        assert!(!ledger.has_room(Claim::Awaited), "the service keeps no more results than that");
        ledger.answer(1, Seq(0), &ok(), true);
        assert!(ledger.has_room(Claim::Awaited) && !ledger.has_room(Claim::Common));
    }

    #[test]
    fn locks_that_are_waited_for_never_fill_the_ledger_alone() {
        let mut ledger = Ledger::new(8, 0);
        let mut waiting = Vec::new();
        while ledger.has_room(Claim::Loose) {
            waiting.push(ledger.enter(op(), true));
        }
        assert!(waiting.len() == 3 && ledger.has_room(Claim::Common));
        ledger.give_up(waiting[0]);
        assert!(ledger.has_room(Claim::Loose));
        ledger.enter(op(), true);
        assert!(!ledger.has_room(Claim::Loose));
        ledger.replay(true);
        assert!(ledger.has_room(Claim::Loose), "another leader is asked anew");
    }
}
