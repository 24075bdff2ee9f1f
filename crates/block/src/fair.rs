//! Who is served next: requests wait per session and take turns by what they cost.
//!
//! The idea is a clock that counts cost instead of time. Each request begins where the session's last one ended on that clock,
//! or now if the session had nothing waiting; the one with the earliest beginning goes next. A session with a
//! thousand requests queues up behind itself, and one that comes along with a single small read is next. The cost of
//! a request is its bytes plus a fixed amount, so many small requests and few large ones weigh alike.
//!
//! Background work (repair, scrub, copies for other servers) is one session of its own whose requests cost sixteen
//! times as much: beside busy clients it gets about a seventeenth, and all of an idle disk. It never gets nothing, since
//! a cluster that cannot repair while it is busy loses data.
//!
//! # Invariants
//! - Between two sessions that both always wait, the difference in cost served is at most one request of each.
//! - Every queue is bounded: a session has at most `each_max` waiting, and all together `all_max`; beyond that only sessions
//!   that wait for nothing get one more in.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// What a request costs beside its bytes: about as much time as a disk needs to transfer them.
pub(crate) const OP_COST: u64 = 64 << 10;

/// How much dearer background work is.
const BACKGROUND: u64 = 16;

/// Whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Flow {
    /// A session of an agent.
    Session(u64),
    /// A connection without a session: a tool, the metadata service.
    Connection(u64),
    /// Repair, scrub, copies for other servers.
    Background,
}

/// Requests that wait for their turn.
pub(crate) struct Fair<T> {
    waiting: BinaryHeap<Reverse<Item<T>>>,
    flows: HashMap<Flow, Turn>,
    /// The beginning of the request that went last.
    now: u64,
    arrivals: u64,
    each_max: usize,
    all_max: usize,
}

/// Where a flow is on the clock.
#[derive(Default)]
struct Turn {
    end: u64,
    waiting: usize,
}

struct Item<T> {
    begin: u64,
    arrival: u64,
    flow: Flow,
    what: T,
}

impl<T> Fair<T> {
    /// Nobody waits.
    pub fn new(each_max: usize, all_max: usize) -> Fair<T> {
        let (waiting, flows) = (BinaryHeap::new(), HashMap::new());
        Fair { waiting, flows, now: 0, arrivals: 0, each_max: each_max.max(1), all_max: all_max.max(1) }
    }

    /// Queues a request of this cost; gives it back if too many wait already.
    pub fn push(&mut self, flow: Flow, cost: u64, what: T) -> Result<(), T> {
        let full = self.waiting.len() >= self.all_max;
        let turn = self.flows.entry(flow).or_default();
        if turn.waiting >= self.each_max || (full && turn.waiting > 0) {
            return Err(what);
        }
        let dearer = if flow == Flow::Background { BACKGROUND } else { 1 };
        let cost = cost.saturating_add(OP_COST).saturating_mul(dearer);
        let begin = turn.end.max(self.now);
        turn.end = begin.saturating_add(cost);
        turn.waiting += 1;
        self.arrivals += 1;
        self.waiting.push(Reverse(Item { begin, arrival: self.arrivals, flow, what }));
        Ok(())
    }

    /// The one that is next, without taking it.
    pub fn peek(&self) -> Option<&T> {
        self.waiting.peek().map(|Reverse(item)| &item.what)
    }

    /// Takes the one that is next.
    pub fn pop(&mut self) -> Option<T> {
        let Reverse(Item { begin, flow, what, .. }) = self.waiting.pop()?;
        self.now = self.now.max(begin);
        if let Some(turn) = self.flows.get_mut(&flow) {
            turn.waiting -= 1;
        }
        if self.waiting.is_empty() {
            // Nobody was kept waiting by anybody, so nobody owes anything.
            self.flows.clear();
            self.now = 0;
        } else if self.flows.len() > 64 + 2 * self.waiting.len() {
            let now = self.now;
            self.flows.retain(|_, turn| turn.waiting > 0 || turn.end > now);
        }
        Some(what)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }
}

impl<T> PartialEq for Item<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Item<T> {}

impl<T> PartialOrd for Item<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Item<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.begin, self.arrival).cmp(&(other.begin, other.arrival))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const GREEDY: Flow = Flow::Session(1);
    const SMALL: Flow = Flow::Session(2);

    #[test]
    fn a_small_reader_beside_a_greedy_one_is_next() {
        let mut fair = Fair::new(10_000, 10_000);
        for n in 0..1_000 {
            fair.push(GREEDY, 4 << 20, (GREEDY, n)).unwrap();
        }
        for n in 0..100 {
            // The greedy one keeps its queue full.
            assert_eq!(fair.pop(), Some((GREEDY, n)));
            fair.push(GREEDY, 4 << 20, (GREEDY, 1_000 + n)).unwrap();
            fair.push(SMALL, 4 << 10, (SMALL, n)).unwrap();
            let before = (0..).take_while(|_| fair.pop().unwrap().0 != SMALL).count();
            assert!(before <= 1, "the small reader waited for {before} large reads");
            (0..before).for_each(|k| fair.push(GREEDY, 4 << 20, (GREEDY, 10_000 + k)).unwrap());
        }
    }

    #[test]
    fn sessions_get_equal_bytes_whatever_the_size_of_their_requests() {
        let mut fair = Fair::new(10_000, 100_000);
        let sizes = [(1, 16_u64 << 20), (2, 1 << 20), (3, 64 << 10), (4, 4 << 20)];
        let push = |fair: &mut Fair<(u64, u64)>, session: u64, size: u64| {
            fair.push(Flow::Session(session), size, (session, size + OP_COST)).unwrap();
        };
        for (session, size) in sizes {
            (0..10).for_each(|_| push(&mut fair, session, size));
        }
        let mut served = HashMap::<u64, u64>::new();
        for _ in 0..20_000 {
            let (session, cost) = fair.pop().unwrap();
            *served.entry(session).or_default() += cost;
            push(&mut fair, session, cost - OP_COST);
        }
        let (least, most) = (served.values().min().unwrap(), served.values().max().unwrap());
        assert!(most - least <= 2 * ((16 << 20) + OP_COST), "{served:?}");
    }

    #[test]
    fn background_work_gets_a_small_share_beside_busy_clients_and_all_of_an_idle_disk() {
        let mut fair = Fair::new(100, 1_000);
        let mut share = |busy: bool| {
            (0..10).for_each(|_| fair.push(Flow::Background, 1 << 20, Flow::Background).unwrap());
            if busy {
                (0..10).for_each(|_| fair.push(GREEDY, 1 << 20, GREEDY).unwrap());
            }
            let mut background = 0;
            for _ in 0..1_700 {
                let flow = fair.pop().unwrap();
                background += u32::from(flow == Flow::Background);
                fair.push(flow, 1 << 20, flow).unwrap();
            }
            while fair.pop().is_some() {}
            background
        };
        let (busy, idle) = (share(true), share(false));
        assert!((98..=103).contains(&busy), "{busy} of 1700");
        assert_eq!(idle, 1_700);
    }

    #[test]
    fn queues_are_bounded_and_a_greedy_session_does_not_use_up_the_places_of_others() {
        let mut fair = Fair::new(8, 20);
        let mut taken = 0;
        while fair.push(GREEDY, 1, ()).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, 8);
        for session in 10..40 {
            let mut taken = 0;
            while fair.push(Flow::Session(session), 1, ()).is_ok() {
                taken += 1;
            }
            assert!((1..=8).contains(&taken), "a session that waits for nothing gets in");
        }
        assert!(fair.len() <= 20 + 30);
        while fair.pop().is_some() {}
        assert!(fair.flows.is_empty());
        fair.push(GREEDY, 1, ()).unwrap();
    }

    #[test]
    fn sessions_that_are_gone_are_forgotten() {
        let mut fair = Fair::new(8, 100);
        fair.push(GREEDY, 1 << 20, 0).unwrap();
        for session in 0..100_000 {
            fair.push(Flow::Session(10 + session), 1, 1).unwrap();
            fair.push(GREEDY, 1 << 20, 0).unwrap();
            while fair.len() > 1 {
                fair.pop().unwrap();
            }
        }
        assert!(fair.flows.len() < 200, "{} are remembered", fair.flows.len());
    }
}
