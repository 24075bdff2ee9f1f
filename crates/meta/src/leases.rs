//! Leases: which session may rely on what, and whose reliance is in the way of a change. Pure; time is handed in.
//!
//! A lease is a set of bits on an inode (attributes, names, content). Changes by one session conflict with bits of others;
//! conflicting bits are recalled and the change waits, unordered, until they are acknowledged or their term is over. All
//! leases of a session share one term, so their end is one number: the lease epoch.
//!
//! Content has three modes: many sessions READ; one session has WRITE; or at least one session that writes is together
//! with others, then all have SHARED. A session whose WRITE is recalled while it still writes falls to SHARED with its
//! acknowledgement.
//!
//! # Invariants
//! - Never do two sessions hold WRITE on one inode, nor one WRITE and another READ or SHARED, nor one READ and another
//!   SHARED while it writes.
//! - Numbers of grants only rise; while an inode is recalled or waited for, nothing new is granted on it.
//! - A session that was ever granted something on an inode is *known* there until it forgets the inode or ends, even when
//!   its leases are over: it may have the file open.
//!
//! # Not here
//! Sending recalls and waiting for them: `service.rs`.

use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use torchfs_proto::msg::meta::{Grant, lease};
use torchfs_proto::{Ino, SessionId, VolumeId};

/// An inode of a volume.
pub type Node = (VolumeId, Ino);

/// Bits that concern content.
pub const DATA: u8 = lease::READ | lease::WRITE | lease::SHARED;

/// All leases of all sessions.
#[derive(Debug)]
pub struct Leases {
    term: Duration,
    known_max: usize,
    first_epoch: u32,
    number: u64,
    tickets: u64,
    sessions: HashMap<SessionId, Term>,
    nodes: HashMap<Node, Shelf>,
}

/// What one session's leases share.
#[derive(Debug)]
struct Term {
    volume: VolumeId,
    epoch: u32,
    ends: Instant,
    /// Leases of the epoch before this one count until here: the client may not know yet that they are over.
    before_ends: Instant,
    /// The next renewal begins a new epoch.
    condemned: bool,
    known: HashSet<Ino>,
    /// It may have any file open: too many are known, or it did not report after a restart.
    knows_all: bool,
}

/// What is held on one inode.
#[derive(Debug, Default)]
struct Shelf {
    holds: Vec<Hold>,
    /// Operations that wait for recalls here, in order of arrival.
    waiting: Vec<u64>,
    /// Who got the right to write last.
    writer: Option<SessionId>,
}

#[derive(Debug)]
struct Hold {
    session: SessionId,
    epoch: u32,
    bits: u8,
    /// The newest grant.
    number: u64,
    /// The newest answer about the inode, whether it granted anything or not.
    answered: u64,
    /// The grant since which the session may commit without a break.
    write_since: u64,
    /// The session has the file open for writing.
    writing: bool,
    recalls: Vec<Recall>,
}

#[derive(Debug, PartialEq, Eq)]
struct Recall {
    event: u64,
    bits: u8,
}

/// A lease of somebody else that is in the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conflict {
    /// Whose.
    pub holder: SessionId,
    /// On what.
    pub node: Node,
    /// Which bits.
    pub bits: u8,
    /// Of these, those not recalled yet.
    pub unasked: u8,
    /// The newest grant, up to which a recall voids.
    pub number: u64,
}

/// What came of asking for a data lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Data {
    /// Here it is.
    Granted(Grant),
    /// These must go first.
    Recall(Vec<Conflict>),
    /// An earlier operation waits here: its turn first.
    Queue,
}

impl Leases {
    /// No leases, with this term and at most so many known inodes for each session. Epochs begin at `first_epoch`, which is
    /// above all that an earlier leader gave.
    pub fn new(term: Duration, known_max: usize, first_epoch: u32) -> Leases {
        Leases {
            term,
            known_max,
            first_epoch,
            number: 0,
            tickets: 0,
            sessions: HashMap::new(),
            nodes: HashMap::new(),
        }
    }

    /// A session begins. One found in the store after a restart may have anything open until it reports.
    pub fn join(&mut self, session: SessionId, volume: VolumeId, now: Instant, found: bool) {
        let term = Term {
            volume,
            epoch: self.first_epoch,
            ends: now + self.term,
            before_ends: now,
            condemned: false,
            known: HashSet::new(),
            knows_all: found,
        };
        self.sessions.insert(session, term);
    }

    /// The session reported all that it has open.
    pub fn reported(&mut self, session: SessionId) {
        if let Some(term) = self.sessions.get_mut(&session) {
            term.knows_all = term.known.len() >= self.known_max;
        }
    }

    /// A renewal was received. Leases whose term is over end, and the epoch rises.
    pub fn renew(&mut self, session: SessionId, now: Instant) {
        if let Some(term) = self.sessions.get_mut(&session) {
            if now >= term.ends || term.condemned {
                term.before_ends = term.ends;
                term.epoch += 1;
                term.condemned = false;
            }
            term.ends = now + self.term;
        }
    }

    /// Ends all leases of a session with its next renewal: it does not take its recalls.
    pub fn condemn(&mut self, session: SessionId) {
        if let Some(term) = self.sessions.get_mut(&session) {
            term.condemned = true;
        }
    }

    /// The session's lease epoch.
    pub fn epoch(&self, session: SessionId) -> u32 {
        self.sessions.get(&session).map_or(0, |term| term.epoch)
    }

    /// When the session's leases end unless they are renewed.
    pub fn ends(&self, session: SessionId) -> Option<Instant> {
        self.sessions.get(&session).map(|term| term.ends)
    }

    /// Everything of a session ends. Answers the inodes where somebody may wait for that.
    pub fn end(&mut self, session: SessionId) -> Vec<Node> {
        let Some(term) = self.sessions.remove(&session) else { return Vec::new() };
        let mut waited = Vec::new();
        for ino in term.known {
            let node = (term.volume, ino);
            if let Some(shelf) = self.nodes.get_mut(&node) {
                shelf.holds.retain(|hold| hold.session != session);
                if !shelf.waiting.is_empty() {
                    waited.push(node);
                }
                self.tidy(node);
            }
        }
        waited
    }

    /// Grants those of the bits that may be granted now: none while the inode is recalled or waited for by others than
    /// `ticket`, none after the term, no attributes while several sessions write. Data bits only for what is new. Even a grant
    /// of nothing has a number: the session knows the inode from then on, whatever it gave back before.
    pub fn grant(
        &mut self,
        session: SessionId,
        node: Node,
        bits: u8,
        now: Instant,
        ticket: Option<u64>,
    ) -> Grant {
        if !self.know(session, node, false) {
            return Grant { ino: node.1, bits: 0, number: 0 };
        }
        match bits & self.grantable(session, node, now, ticket) {
            0 => self.grant_nothing(session, node),
            bits => {
                let grant = self.give(session, node, bits);
                if bits & lease::WRITE != 0 {
                    self.mark_writing(session, node);
                }
                grant
            }
        }
    }

    fn grantable(&self, session: SessionId, node: Node, now: Instant, ticket: Option<u64>) -> u8 {
        if self.sessions.get(&session).is_none_or(|term| now >= term.ends || term.condemned) {
            return 0;
        }
        let Some(shelf) = self.nodes.get(&node) else { return u8::MAX };
        let busy = shelf.waiting.iter().any(|t| Some(*t) != ticket)
            || shelf.holds.iter().any(|hold| !hold.recalls.is_empty() && self.bits(hold, now) != 0);
        let shared = |hold: &Hold| hold.writing && self.bits(hold, now) & lease::SHARED != 0;
        match busy {
            true => 0,
            false if shelf.holds.iter().any(shared) => !lease::ATTR,
            false => u8::MAX,
        }
    }

    /// Gives back after a restart what the session held before, as far as it fits what others reported.
    pub fn reclaim(&mut self, session: SessionId, node: Node, bits: u8, now: Instant) -> Option<Grant> {
        let against = match bits & DATA {
            0 => 0,
            lease::READ => lease::WRITE,
            lease::SHARED => lease::WRITE | lease::READ,
            _ => DATA,
        };
        let free = |against: u8| self.conflicts(session, node, against, now).is_empty();
        let bits = match bits & DATA {
            _ if free(against) => bits,
            // Others share it: so can this one, which may have changes to tell again.
            data if data & (lease::WRITE | lease::SHARED) != 0 && free(lease::WRITE | lease::READ) => {
                bits & !DATA | lease::SHARED
            }
            _ => bits & !DATA,
        };
        let writes = bits & (lease::WRITE | lease::SHARED) != 0;
        self.know(session, node, true);
        let grant = (bits != 0).then(|| self.give(session, node, bits))?;
        if writes {
            self.mark_writing(session, node);
        }
        Some(grant)
    }

    /// The leases of others that a change of this kind must wait for.
    pub fn conflicts(&self, session: SessionId, node: Node, bits: u8, now: Instant) -> Vec<Conflict> {
        let Some(shelf) = self.nodes.get(&node) else { return Vec::new() };
        let mut found = Vec::new();
        for hold in shelf.holds.iter().filter(|hold| hold.session != session) {
            let held = self.bits(hold, now) & bits;
            if held != 0 {
                let asked = hold.recalls.iter().fold(0, |all, recall| all | recall.bits);
                let unasked = held & !asked;
                found.push(Conflict { holder: hold.session, node, bits: held, unasked, number: hold.number });
            }
        }
        found
    }

    /// Asks for the right to read or to write content.
    pub fn open_data(
        &mut self,
        session: SessionId,
        node: Node,
        write: bool,
        now: Instant,
        ticket: Option<u64>,
    ) -> Data {
        self.know(session, node, true);
        let (mut mine, mut number, mut alone, mut shared, mut shared_writer) = (0, 0, true, false, false);
        let (mut recalled, mut present) = (false, false);
        let epoch = self.epoch(session);
        let mut first = None;
        if let Some(shelf) = self.nodes.get(&node) {
            first = shelf.waiting.first().copied();
            for hold in &shelf.holds {
                let bits = self.bits(hold, now);
                if hold.session == session {
                    mine = bits & DATA;
                    number = hold.number;
                    recalled = !hold.recalls.is_empty();
                    present = hold.epoch == epoch;
                } else {
                    alone &= bits & DATA == 0;
                    shared |= bits & lease::SHARED != 0;
                    shared_writer |= hold.writing && bits & lease::SHARED != 0;
                }
            }
        }
        let enough = match write {
            true => mine & lease::WRITE != 0 || mine & lease::SHARED != 0 && !alone,
            false => mine & DATA != 0,
        };
        // What is held is answered again, even while it is recalled: the recalled session never waits behind the one
        // that waits for it.
        if enough {
            if write && !recalled {
                self.mark_writing(session, node);
            }
            // Under a new number, if it stays: that the session gives it back may be on its way, and was said of the old one.
            return Data::Granted(match present && !recalled {
                true => self.give(session, node, mine),
                false => Grant { ino: node.1, bits: mine, number },
            });
        }
        if first.is_some_and(|first| Some(first) != ticket) {
            return Data::Queue;
        }
        let against = if write { lease::READ | lease::WRITE } else { lease::WRITE };
        let conflicts = self.conflicts(session, node, against, now);
        if !conflicts.is_empty() {
            return Data::Recall(conflicts);
        }
        if self.sessions.get(&session).is_none_or(|term| now >= term.ends) {
            // Without a term there is no lease, and what is not granted is answered as such: the client renews and asks
            // again.
            return Data::Granted(Grant { ino: node.1, bits: 0, number: 0 });
        }
        let bits = match (write, shared, shared_writer) {
            (true, true, _) | (false, _, true) => lease::SHARED,
            (true, false, _) => lease::WRITE,
            (false, _, false) => lease::READ,
        };
        let grant = self.give(session, node, bits);
        // A session has one mode: a lone writer that was SHARED goes back to WRITE, its commits on the way stay good.
        if let Some(hold) = self.hold_mut(session, node) {
            hold.bits &= !DATA | bits;
        }
        if write {
            self.mark_writing(session, node);
        }
        Data::Granted(grant)
    }

    /// Whether a commit that names this grant may go on. A lease that ran out is good for it as long as nobody else got the
    /// right to write: changes that are told again after a restart may take longer than a term.
    pub fn may_write(&self, session: SessionId, node: Node, number: u64, now: Instant) -> bool {
        self.nodes.get(&node).is_some_and(|shelf| {
            shelf.holds.iter().any(|hold| {
                let bits = if shelf.writer == Some(session) { hold.bits } else { self.bits(hold, now) };
                hold.session == session
                    && bits & (lease::WRITE | lease::SHARED) != 0
                    && (hold.write_since..=hold.number).contains(&number)
            })
        })
    }

    /// A recall was sent under this event number.
    pub fn recalled(&mut self, conflict: &Conflict, event: u64) {
        if let Some(hold) = self.hold_mut(conflict.holder, conflict.node) {
            hold.recalls.push(Recall { event, bits: conflict.unasked });
        }
    }

    /// A recall was honoured. A session that still writes falls from WRITE to SHARED.
    pub fn acknowledge(
        &mut self,
        session: SessionId,
        node: Node,
        event: u64,
        writing: bool,
        now: Instant,
    ) -> Option<Grant> {
        let live = self.sessions.get(&session).is_some_and(|term| now < term.ends);
        let hold = self.hold_mut(session, node)?;
        let Some(at) = hold.recalls.iter().position(|recall| recall.event == event) else {
            // Said before, and the answer may have been lost: what it got then is told again.
            let shared = hold.bits & lease::SHARED;
            return (shared != 0).then_some(Grant { ino: node.1, bits: shared, number: hold.number });
        };
        let recall = hold.recalls.swap_remove(at);
        let had_write = recall.bits & hold.bits & lease::WRITE != 0;
        hold.bits &= !recall.bits;
        if hold.bits & DATA == 0 {
            hold.writing = false;
        }
        if had_write && writing && live {
            let grant = self.give(session, node, lease::SHARED);
            self.mark_writing(session, node);
            return Some(grant);
        }
        None
    }

    /// The session gives back what it got up to this grant; with bits 255 it does not know the inode any more.
    pub fn forget(&mut self, session: SessionId, node: Node, bits: u8, number: u64) {
        let epoch = self.epoch(session);
        let Some(hold) = self.hold_mut(session, node) else { return };
        // A newer answer is on its way to the session. Not so if its epoch ended: then it may be forgotten under any number.
        if hold.answered > number && hold.epoch == epoch {
            return;
        }
        hold.bits &= !bits;
        if hold.bits & DATA == 0 {
            hold.writing = false;
        }
        for recall in &mut hold.recalls {
            recall.bits &= !bits;
        }
        hold.recalls.retain(|recall| recall.bits != 0);
        if bits == u8::MAX {
            if let Some(shelf) = self.nodes.get_mut(&node) {
                shelf.holds.retain(|hold| hold.session != session);
            }
            if let Some(term) = self.sessions.get_mut(&session) {
                term.known.remove(&node.1);
            }
            self.tidy(node);
        }
    }

    /// Every session that may have the inode open.
    pub fn known(&self, node: Node) -> Vec<SessionId> {
        let mut known: Vec<SessionId> =
            self.nodes.get(&node).map_or(Vec::new(), |shelf| shelf.holds.iter().map(|h| h.session).collect());
        for (session, term) in &self.sessions {
            if term.knows_all && term.volume == node.0 && !known.contains(session) {
                known.push(*session);
            }
        }
        known.sort_unstable();
        known
    }

    /// The session may have the inode open. Beyond the bound of what is remembered only what must be is added; the
    /// answer is whether the inode is remembered.
    pub fn know(&mut self, session: SessionId, node: Node, must: bool) -> bool {
        let Some(term) = self.sessions.get_mut(&session) else { return false };
        if term.known.contains(&node.1) {
            return true;
        }
        if term.known.len() >= self.known_max {
            term.knows_all = true;
            if !must {
                return false;
            }
        }
        let epoch = term.epoch;
        term.known.insert(node.1);
        self.nodes.entry(node).or_default().holds.push(Hold {
            session,
            epoch,
            bits: 0,
            number: 0,
            answered: 0,
            write_since: 0,
            writing: false,
            recalls: Vec::new(),
        });
        true
    }

    /// The inode is no more.
    pub fn gone(&mut self, node: Node) {
        if let Some(shelf) = self.nodes.get_mut(&node) {
            for hold in shelf.holds.drain(..) {
                if let Some(term) = self.sessions.get_mut(&hold.session) {
                    term.known.remove(&node.1);
                }
            }
            self.tidy(node);
        }
    }

    /// Other sessions that share the file's content.
    pub fn sharers(&self, session: SessionId, node: Node, now: Instant) -> Vec<SessionId> {
        self.nodes.get(&node).map_or(Vec::new(), |shelf| {
            let shares = |h: &&Hold| h.session != session && self.bits(h, now) & lease::SHARED != 0;
            shelf.holds.iter().filter(shares).map(|h| h.session).collect()
        })
    }

    /// What a session holds on an inode now.
    pub fn held(&self, session: SessionId, node: Node, now: Instant) -> u8 {
        self.nodes.get(&node).map_or(0, |shelf| {
            shelf.holds.iter().find(|h| h.session == session).map_or(0, |h| self.bits(h, now))
        })
    }

    /// Who holds what of an inode, for messages.
    pub fn describe(&self, node: Node, now: Instant) -> String {
        let holds = self.nodes.get(&node).map(|shelf| shelf.holds.as_slice()).unwrap_or_default();
        let hold = |hold: &Hold| {
            let (bits, since, number) = (self.bits(hold, now), hold.write_since, hold.number);
            format!("{bits:#x} of session {} ({since} to {number})", hold.session)
        };
        if holds.is_empty() {
            "nothing".into()
        } else {
            holds.iter().map(hold).collect::<Vec<_>>().join(", ")
        }
    }

    /// A number for an operation that begins to wait.
    pub fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// The operation with this ticket waits for recalls on the inode.
    pub fn wait(&mut self, node: Node, ticket: u64) {
        let shelf = self.nodes.entry(node).or_default();
        if !shelf.waiting.contains(&ticket) {
            shelf.waiting.push(ticket);
        }
    }

    /// It waits no more.
    pub fn unwait(&mut self, node: Node, ticket: u64) {
        if let Some(shelf) = self.nodes.get_mut(&node) {
            shelf.waiting.retain(|t| *t != ticket);
            self.tidy(node);
        }
    }

    /// (leases held, files with a right to write) of a session.
    pub fn figures(&self, session: SessionId, now: Instant) -> (u64, u64) {
        let Some(term) = self.sessions.get(&session) else { return (0, 0) };
        let mut figures = (0, 0);
        for ino in &term.known {
            let bits = self.held(session, (term.volume, *ino), now);
            figures.0 += u64::from(bits != 0);
            figures.1 += u64::from(bits & (lease::WRITE | lease::SHARED) != 0);
        }
        figures
    }

    /// The bits that count now.
    fn bits(&self, hold: &Hold, now: Instant) -> u8 {
        match self.sessions.get(&hold.session) {
            Some(term) if hold.epoch == term.epoch && now < term.ends => hold.bits,
            Some(term) if hold.epoch + 1 == term.epoch && now < term.before_ends => hold.bits,
            _ => 0,
        }
    }

    /// Adds bits under a new number. Bits of an older epoch are dropped first.
    fn give(&mut self, session: SessionId, node: Node, bits: u8) -> Grant {
        self.number += 1;
        let number = self.number;
        let epoch = self.epoch(session);
        if let Some(hold) = self.hold_mut(session, node) {
            if hold.epoch != epoch {
                hold.epoch = epoch;
                hold.bits = 0;
                hold.writing = false;
                hold.recalls.clear();
            }
            let could = hold.bits & (lease::WRITE | lease::SHARED) != 0;
            hold.bits |= bits;
            hold.number = number;
            hold.answered = number;
            if !could {
                hold.write_since = number;
            }
        }
        Grant { ino: node.1, bits, number }
    }

    /// An answer that grants nothing. Its number is newer than what the session may just be saying of the inode, and no grant: a recall
    /// on its way voids what was granted before.
    fn grant_nothing(&mut self, session: SessionId, node: Node) -> Grant {
        self.number += 1;
        let number = self.number;
        if let Some(hold) = self.hold_mut(session, node) {
            hold.answered = number;
        }
        Grant { ino: node.1, bits: 0, number }
    }

    fn mark_writing(&mut self, session: SessionId, node: Node) {
        if let Some(hold) = self.hold_mut(session, node) {
            hold.writing = true;
        }
        if let Some(shelf) = self.nodes.get_mut(&node) {
            shelf.writer = Some(session);
        }
    }

    fn hold_mut(&mut self, session: SessionId, node: Node) -> Option<&mut Hold> {
        self.nodes.get_mut(&node)?.holds.iter_mut().find(|hold| hold.session == session)
    }

    fn tidy(&mut self, node: Node) {
        if self.nodes.get(&node).is_some_and(|shelf| shelf.holds.is_empty() && shelf.waiting.is_empty()) {
            self.nodes.remove(&node);
        }
    }
}
