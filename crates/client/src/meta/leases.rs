//! Which leases the session holds. Pure: the clock is handed in.
//!
//! A recall may overtake the reply that carries the grant it recalls, since they travel by different requests. Grants and
//! recalls therefore carry numbers from one rising counter, and a recall's number is remembered for as long as a request is
//! out that was sent before the recall came: such a reply may still bring a grant that is void already. Requests are
//! counted in generations for that. A recall closes the present generation; when all requests of a generation and of
//! those before it are back, its recalls are forgotten.
//!
//! # Invariants
//! - What is held here is held at the service too, never the other way round: in doubt a grant is refused.
//! - Nothing is held longer than a term after the last successful renewal was sent.
//! - At most `remember_max` recalls are remembered. Beyond that, grants up to the highest forgotten number are refused on
//!   every inode, which costs a round trip and is never wrong.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use torchfs_proto::Ino;
use torchfs_proto::msg::meta::{Grant, lease};

/// Bits that concern content: a session has one of them at a time.
const DATA: u8 = lease::READ | lease::WRITE | lease::SHARED;
/// Bits whose grant number a commit carries.
const WRITING: u8 = lease::WRITE | lease::SHARED;

/// The generation of a request that is out, see the top of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(u64);

/// The leases of one session.
pub(crate) struct Leases {
    epoch: u32,
    term: Duration,
    renewed: Instant,
    held: HashMap<Ino, Held>,
    /// Keepers are being told that all is lost: nothing is granted until they know.
    voiding: u32,
    recalls: Recalls,
    /// Recalls whose acknowledgement has not reached the service, by event: until then it may say again what it takes back.
    unheard: HashMap<u64, (Ino, u64)>,
    /// The same by inode: the newest grant that is taken back, and how many recalls there are.
    leaving: HashMap<Ino, (u64, u32)>,
}

#[derive(Clone, Copy, Default)]
struct Held {
    bits: u8,
    /// Recalled, and what is dirty under them is being written back.
    returning: u8,
    /// The newest answer about it, whether it granted anything or not.
    newest: u64,
    /// The newest grant of READ, WRITE or SHARED.
    data: u64,
    /// The newest grant of WRITE or SHARED.
    writing: u64,
}

impl Leases {
    pub fn new(epoch: u32, term: Duration, renewed: Instant, remember_max: usize) -> Leases {
        Leases {
            epoch,
            term,
            renewed,
            held: HashMap::new(),
            voiding: 0,
            recalls: Recalls { max: remember_max, ..Recalls::default() },
            unheard: HashMap::new(),
            leaving: HashMap::new(),
        }
    }

    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// How long leases last after a renewal.
    pub fn term(&self) -> Duration {
        self.term
    }

    /// A renewal that was sent at this time succeeded.
    pub fn renewed(&mut self, sent: Instant) {
        self.renewed = self.renewed.max(sent);
    }

    /// Whether the term still runs.
    pub fn alive(&self, now: Instant) -> bool {
        now < self.renewed + self.term
    }

    /// For how long all these bits are held.
    pub fn holds(&self, ino: Ino, bits: u8, now: Instant) -> Option<Duration> {
        let held = self.held.get(&ino)?;
        if held.bits & bits != bits || self.voiding > 0 {
            return None;
        }
        (self.renewed + self.term).checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// The number of the WRITE or SHARED grant; 0 if there is none.
    pub fn writing(&self, ino: Ino) -> u64 {
        self.held.get(&ino).map_or(0, |held| held.writing)
    }

    /// Whether a lease of this inode is being given back and the service does not know yet that it is.
    pub fn is_leaving(&self, ino: Ino) -> bool {
        self.leaving.contains_key(&ino)
    }

    /// A request goes out that may bring grants.
    pub fn begin(&mut self) -> Ticket {
        self.recalls.begin()
    }

    /// It is back, or nobody waits for it.
    pub fn end(&mut self, ticket: Ticket) {
        self.recalls.end(ticket);
    }

    /// Takes the grants of a reply, except those that are void already.
    pub fn grant(&mut self, epoch: u32, grants: &[Grant]) {
        if epoch != self.epoch {
            return;
        }
        for grant in grants {
            // Number 0: the service knows of too many inodes here to remember this one.
            if grant.number > 0 {
                let held = self.held.entry(grant.ino).or_default();
                held.newest = held.newest.max(grant.number);
            }
            if self.voiding > 0 || grant.bits == 0 {
                continue;
            }
            let leaving = self.leaving.get(&grant.ino).is_some_and(|(upto, _)| grant.number <= *upto);
            if leaving || self.recalls.void(grant.ino, grant.number) {
                if leaving && grant.bits & WRITING != 0 {
                    // Good to commit under what is dirty, and for nothing new.
                    let held = self.held.entry(grant.ino).or_default();
                    if held.bits & WRITING == 0 {
                        held.returning |= grant.bits & WRITING;
                        held.writing = held.writing.max(grant.number);
                    }
                }
                continue;
            }
            let held = self.held.entry(grant.ino).or_default();
            held.bits |= grant.bits & !DATA;
            if grant.bits & DATA != 0 && grant.number >= held.data {
                // The service grants READ, WRITE or SHARED; the newer one replaces the others, there and here. A READ that
                // stayed behind would outlive the recall of the WRITE that took its place.
                held.bits = (held.bits & !DATA) | (grant.bits & DATA);
                held.data = grant.number;
                if grant.bits & WRITING != 0 {
                    held.writing = grant.number;
                    held.returning = 0;
                }
            }
        }
    }

    /// A recall came with this event: the bits are not held any more. The grant number stays until [`Leases::returned`], so that
    /// what is dirty can be committed under it.
    pub fn recall(&mut self, event: u64, ino: Ino, bits: u8, number: u64) {
        self.recalls.recalled(ino, number);
        if self.unheard.insert(event, (ino, number)).is_none() {
            let leaving = self.leaving.entry(ino).or_insert((number, 0));
            *leaving = (leaving.0.max(number), leaving.1 + 1);
        }
        if let Some(held) = self.held.get_mut(&ino) {
            held.returning |= held.bits & bits & WRITING;
            held.bits &= !bits;
            self.tidy(ino);
        }
    }

    /// The recall up to this number was honoured.
    pub fn returned(&mut self, ino: Ino, number: u64) {
        if let Some(held) = self.held.get_mut(&ino) {
            if held.writing <= number {
                held.returning = 0;
            }
            self.tidy(ino);
        }
    }

    /// The service knows that the recall of this event was honoured. What it said before and is still on its way stays void.
    pub fn heard(&mut self, event: u64) {
        let Some((ino, number)) = self.unheard.remove(&event) else { return };
        if let Some(leaving) = self.leaving.get_mut(&ino) {
            leaving.1 -= 1;
            if leaving.1 == 0 {
                self.leaving.remove(&ino);
            }
        }
        self.recalls.recalled(ino, number);
        self.returned(ino, number);
    }

    /// The session gives bits back; returns the newest grant it knew. 255 gives back all.
    pub fn give_back(&mut self, ino: Ino, bits: u8) -> u64 {
        let Some(held) = self.held.get_mut(&ino) else {
            return 0;
        };
        let newest = held.newest;
        held.bits &= !bits;
        held.returning &= !bits;
        match bits {
            u8::MAX => drop(self.held.remove(&ino)),
            _ => self.tidy(ino),
        }
        newest
    }

    /// All leases are void from this epoch on. Pair with [`Leases::told`] when the keeper knows.
    pub fn void(&mut self, epoch: u32) {
        self.epoch = epoch;
        self.held.clear();
        self.voiding += 1;
    }

    /// The keeper knows.
    pub fn told(&mut self) {
        self.voiding -= 1;
    }

    /// Takes everything out to have it granted anew by another leader, whose numbers are others: (inode, bits, number of the
    /// WRITE or SHARED grant).
    pub fn take(&mut self) -> Vec<(Ino, u8, u64)> {
        self.recalls.forget_numbers();
        self.unheard.clear();
        self.leaving.clear();
        let held = self.held.drain().map(|(ino, held)| (ino, held.bits | held.returning, held.writing));
        held.filter(|(_, bits, _)| *bits != 0).collect()
    }

    /// The new leader's epoch: what it granted under another one is void.
    pub fn begin_epoch(&mut self, epoch: u32) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.held.clear();
        }
    }

    /// Puts back what [`Leases::take`] took: it was not granted anew, and not lost either.
    pub fn restore(&mut self, epoch: u32, held: Vec<(Ino, u8, u64)>) {
        if self.voiding == 0 {
            self.epoch = epoch;
            self.held.clear();
            let held = held.into_iter();
            self.held.extend(held.map(|(ino, bits, writing)| {
                (ino, Held { bits, returning: 0, newest: writing, data: writing, writing })
            }));
        }
    }

    /// The bits held, whatever the clock says.
    pub fn bits(&self, ino: Ino) -> u8 {
        self.held.get(&ino).map_or(0, |held| held.bits)
    }

    fn tidy(&mut self, ino: Ino) {
        if let Some(held) = self.held.get_mut(&ino)
            && (held.bits | held.returning) & WRITING == 0
        {
            held.writing = 0;
        }
    }
}

/// The recalls that a reply still on its way may not know of.
#[derive(Default)]
struct Recalls {
    numbers: HashMap<Ino, (u64, u64)>,
    /// Requests out and inodes recalled, by generation; the last one is the present.
    generations: VecDeque<Generation>,
    first: u64,
    /// Grants up to this number are refused on any inode while `floor_generation` is remembered.
    floor: u64,
    max: usize,
}

#[derive(Default)]
struct Generation {
    out: u64,
    recalled: Vec<Ino>,
    floor: u64,
}

impl Recalls {
    fn begin(&mut self) -> Ticket {
        let needs_new = self.generations.back().is_none_or(Generation::closed);
        if needs_new {
            self.generations.push_back(Generation::default());
        }
        if let Some(present) = self.generations.back_mut() {
            present.out += 1;
        }
        Ticket(self.first + self.generations.len() as u64 - 1)
    }

    fn end(&mut self, ticket: Ticket) {
        let index = ticket.0.checked_sub(self.first).map(|index| index as usize);
        let Some(generation) = index.and_then(|index| self.generations.get_mut(index)) else {
            return; // of a leader before
        };
        generation.out = generation.out.saturating_sub(1);
        while self.generations.front().is_some_and(|front| front.out == 0) {
            let ended = self.generations.pop_front().unwrap_or_default();
            for ino in ended.recalled {
                if self.numbers.get(&ino).is_some_and(|(_, of)| *of == self.first) {
                    self.numbers.remove(&ino);
                }
            }
            self.first += 1;
        }
        self.floor = self.generations.iter().map(|generation| generation.floor).max().unwrap_or(0);
    }

    fn recalled(&mut self, ino: Ino, number: u64) {
        let present = self.first + (self.generations.len() as u64).saturating_sub(1);
        let Some(generation) = self.generations.back_mut() else {
            return; // nothing is out that could bring an older grant
        };
        if self.numbers.len() < self.max || self.numbers.contains_key(&ino) {
            generation.recalled.push(ino);
            let known = self.numbers.entry(ino).or_insert((number, present));
            *known = (known.0.max(number), present);
        } else {
            generation.floor = generation.floor.max(number);
            self.floor = self.floor.max(number);
        }
    }

    fn void(&self, ino: Ino, number: u64) -> bool {
        number <= self.floor || self.numbers.get(&ino).is_some_and(|(recalled, _)| number <= *recalled)
    }

    /// Another leader counts anew. Requests that are out belong to the old one and their replies are not heard.
    fn forget_numbers(&mut self) {
        self.first += self.generations.len() as u64;
        self.generations.clear();
        self.numbers.clear();
        self.floor = 0;
    }
}

impl Generation {
    fn closed(&self) -> bool {
        !self.recalled.is_empty() || self.floor > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: Ino = Ino(7);
    const TERM: Duration = Duration::from_secs(3);

    fn leases(now: Instant) -> Leases {
        Leases::new(1, TERM, now, 4)
    }

    fn grant(ino: Ino, bits: u8, number: u64) -> Grant {
        Grant { ino, bits, number }
    }

    #[test]
    fn a_lease_ends_a_term_after_the_renewal_was_sent() {
        let start = Instant::now();
        let mut leases = leases(start);
        leases.grant(1, &[grant(INO, lease::ATTR, 1)]);
        let later = start + Duration::from_secs(2);
        assert_eq!(leases.holds(INO, lease::ATTR, later), Some(Duration::from_secs(1)));
        assert_eq!(leases.holds(INO, lease::ATTR | lease::READ, later), None);
        assert_eq!(leases.holds(INO, lease::ATTR, start + TERM), None);
        leases.renewed(later);
        assert_eq!(leases.holds(INO, lease::ATTR, start + TERM), Some(Duration::from_secs(2)));
    }

    #[test]
    fn a_recall_that_overtakes_the_reply_wins() {
        let now = Instant::now();
        let mut leases = leases(now);
        let early = leases.begin();
        leases.recall(1, INO, lease::ATTR, 10);
        let late = leases.begin();
        leases.end(late);
        leases.grant(1, &[grant(INO, lease::ATTR, 10), grant(Ino(8), lease::ATTR, 9)]);
        assert_eq!(leases.holds(INO, lease::ATTR, now), None);
        assert!(leases.holds(Ino(8), lease::ATTR, now).is_some(), "another inode is not concerned");
        leases.grant(1, &[grant(INO, lease::ATTR, 11)]);
        assert!(leases.holds(INO, lease::ATTR, now).is_some(), "a newer grant is good");
        leases.end(early);
        assert!(leases.recalls.numbers.is_empty(), "nothing is remembered when all is back");
        assert!(leases.recalls.generations.is_empty());
    }

    #[test]
    fn a_recall_repeated_in_a_later_generation_is_remembered_until_that_one_ends() {
        let now = Instant::now();
        let mut leases = leases(now);
        let first = leases.begin();
        leases.recall(2, INO, lease::ATTR, 10);
        let second = leases.begin();
        leases.recall(3, INO, lease::ATTR, 20);
        leases.end(first);
        leases.grant(1, &[grant(INO, lease::ATTR, 15)]);
        assert_eq!(leases.holds(INO, lease::ATTR, now), None);
        leases.end(second);
        assert!(leases.recalls.numbers.is_empty());
    }

    #[test]
    fn more_recalls_than_can_be_remembered_refuse_old_grants_everywhere() {
        let now = Instant::now();
        let mut leases = leases(now);
        let ticket = leases.begin();
        for n in 1..=100 {
            leases.recall(n, Ino(n), lease::ATTR, n);
        }
        assert!(leases.recalls.numbers.len() <= 4);
        leases.grant(1, &[grant(Ino(500), lease::ATTR, 99), grant(Ino(501), lease::ATTR, 101)]);
        assert_eq!(leases.holds(Ino(500), lease::ATTR, now), None);
        assert!(leases.holds(Ino(501), lease::ATTR, now).is_some());
        leases.end(ticket);
        leases.grant(1, &[grant(Ino(500), lease::ATTR, 99)]);
        assert!(
            leases.holds(Ino(500), lease::ATTR, now).is_some(),
            "with all requests back, numbers are free again"
        );
    }

    #[test]
    fn the_number_of_a_recalled_write_grant_serves_until_it_is_returned() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::WRITE | lease::ATTR, 5)]);
        leases.recall(5, INO, lease::WRITE, 5);
        assert_eq!(leases.holds(INO, lease::WRITE, now), None);
        assert!(leases.holds(INO, lease::ATTR, now).is_some());
        assert_eq!(leases.writing(INO), 5);
        leases.returned(INO, 5);
        assert_eq!(leases.writing(INO), 0);
    }

    #[test]
    fn a_shared_grant_replaces_the_right_to_write_alone() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::WRITE, 5)]);
        leases.grant(1, &[grant(INO, lease::SHARED, 6)]);
        assert_eq!(leases.holds(INO, lease::WRITE, now), None);
        assert!(leases.holds(INO, lease::SHARED, now).is_some());
        assert_eq!(leases.writing(INO), 6);
    }

    #[test]
    fn a_grant_that_is_said_again_while_it_is_taken_back_is_good_for_commits_only() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::WRITE, 5)]);
        leases.recall(1, INO, lease::WRITE, 5);
        leases.returned(INO, 5);
        assert_eq!(leases.writing(INO), 0);
        // Asked after the recall came, and answered before its acknowledgement did.
        let early = leases.begin();
        let late = leases.begin();
        leases.grant(1, &[grant(INO, lease::WRITE, 5)]);
        leases.end(early);
        assert_eq!(leases.holds(INO, lease::WRITE, now), None);
        assert_eq!(leases.writing(INO), 5);
        leases.grant(1, &[grant(INO, lease::SHARED, 6)]);
        leases.heard(1);
        leases.grant(1, &[grant(INO, lease::WRITE, 5)]);
        assert!(leases.holds(INO, lease::SHARED, now).is_some());
        assert_eq!((leases.holds(INO, lease::WRITE, now), leases.writing(INO)), (None, 6));
        leases.end(late);
        assert!(leases.recalls.numbers.is_empty() && leases.leaving.is_empty() && leases.unheard.is_empty());
    }

    #[test]
    fn a_recalled_write_leaves_no_older_read_behind() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::READ, 5)]);
        leases.grant(1, &[grant(INO, lease::WRITE, 6)]);
        leases.grant(1, &[grant(INO, lease::READ, 5)]);
        assert_eq!(leases.holds(INO, lease::READ, now), None);
        assert!(leases.holds(INO, lease::WRITE, now).is_some());
        leases.recall(6, INO, lease::WRITE, 6);
        assert_eq!(leases.holds(INO, lease::READ, now), None);
    }

    #[test]
    fn what_is_forgotten_carries_the_newest_answer_heard_whatever_it_granted() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::ATTR, 5)]);
        leases.recall(1, INO, lease::ATTR, 5);
        leases.grant(1, &[grant(INO, 0, 6)]);
        leases.heard(1);
        assert_eq!(leases.holds(INO, lease::ATTR, now), None);
        assert_eq!(leases.give_back(INO, u8::MAX), 6);
        assert!(leases.held.is_empty());
    }

    #[test]
    fn grants_of_another_epoch_are_refused() {
        let now = Instant::now();
        let mut leases = leases(now);
        leases.grant(1, &[grant(INO, lease::ATTR, 5)]);
        leases.void(2);
        leases.told();
        assert_eq!(leases.holds(INO, lease::ATTR, now), None);
        leases.grant(1, &[grant(INO, lease::ATTR, 6)]);
        assert_eq!(leases.holds(INO, lease::ATTR, now), None);
        leases.grant(2, &[grant(INO, lease::ATTR, 7)]);
        assert!(leases.holds(INO, lease::ATTR, now).is_some());
    }
}
