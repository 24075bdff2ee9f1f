//! What stays and what goes: a segmented LRU over slots.
//!
//! New chunks enter on probation. A chunk that is asked for again moves to the protected segment, which may take up to a share of
//! the space; its oldest fall back to probation. What goes first is the oldest on probation, so one long scan pushes out
//! other scans and not what is used again and again.
//!
//! # Not here
//! Knowledge of the future: plans replace this policy behind the same calls.

/// A slot's number, the handle by which its owner names it.
pub(crate) type Slot = usize;

/// How much of the space may be protected.
const PROTECTED_PERCENT: u64 = 80;

const NONE: usize = usize::MAX;

/// The policy. It knows sizes and order, not content; the owner keeps one key per slot.
pub(crate) struct Policy<K> {
    nodes: Vec<Node<K>>,
    free: Vec<Slot>,
    probation: List,
    protected: List,
    protected_max: u64,
}

struct Node<K> {
    key: Option<K>,
    bytes: u64,
    protected: bool,
    newer: Slot,
    older: Slot,
}

/// A doubly linked list through the nodes.
struct List {
    newest: Slot,
    oldest: Slot,
    bytes: u64,
}

impl<K> Policy<K> {
    /// For a cache of this many bytes.
    pub fn new(bytes_max: u64) -> Policy<K> {
        Policy {
            nodes: Vec::new(),
            free: Vec::new(),
            probation: List::EMPTY,
            protected: List::EMPTY,
            protected_max: bytes_max / 100 * PROTECTED_PERCENT,
        }
    }

    /// Bytes in all slots.
    pub fn bytes(&self) -> u64 {
        self.probation.bytes + self.protected.bytes
    }

    /// Takes something in.
    pub fn admit(&mut self, key: K, bytes: u64) -> Slot {
        let node = Node { key: Some(key), bytes, protected: false, newer: NONE, older: NONE };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.nodes[slot] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.push(slot, false);
        slot
    }

    /// It was asked for again. Says whether it became protected with this.
    pub fn touch(&mut self, slot: Slot) -> bool {
        let was_protected = self.nodes[slot].protected;
        self.unlink(slot);
        self.push(slot, true);
        while self.protected.bytes > self.protected_max && self.protected.oldest != slot {
            let oldest = self.protected.oldest;
            self.unlink(oldest);
            self.push(oldest, false);
        }
        !was_protected
    }

    /// Takes something out.
    pub fn remove(&mut self, slot: Slot) -> Option<K> {
        self.unlink(slot);
        self.free.push(slot);
        self.nodes[slot].key.take()
    }

    /// Takes out what is least worth keeping.
    pub fn evict(&mut self) -> Option<K> {
        let slot = match self.probation.oldest {
            NONE => self.protected.oldest,
            slot => slot,
        };
        if slot == NONE { None } else { self.remove(slot) }
    }

    fn push(&mut self, slot: Slot, protected: bool) {
        let list = if protected { &mut self.protected } else { &mut self.probation };
        let newest = std::mem::replace(&mut list.newest, slot);
        list.bytes += self.nodes[slot].bytes;
        match newest {
            NONE => list.oldest = slot,
            newest => self.nodes[newest].newer = slot,
        }
        let node = &mut self.nodes[slot];
        (node.protected, node.older, node.newer) = (protected, newest, NONE);
    }

    fn unlink(&mut self, slot: Slot) {
        let Node { newer, older, protected, bytes, .. } = self.nodes[slot];
        let list = if protected { &mut self.protected } else { &mut self.probation };
        list.bytes -= bytes;
        match newer {
            NONE => list.newest = older,
            newer => self.nodes[newer].older = older,
        }
        match older {
            NONE => list.oldest = newer,
            older => self.nodes[older].newer = newer,
        }
    }
}

impl List {
    const EMPTY: List = List { newest: NONE, oldest: NONE, bytes: 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_first_goes_first() {
        let mut policy = Policy::new(100);
        for key in 0..3 {
            policy.admit(key, 10);
        }
        assert_eq!(
            (policy.evict(), policy.evict(), policy.evict(), policy.evict()),
            (Some(0), Some(1), Some(2), None)
        );
        assert_eq!(policy.bytes(), 0);
    }

    #[test]
    fn a_scan_does_not_push_out_what_is_used_again() {
        let mut policy = Policy::new(100);
        let used = policy.admit(u64::MAX, 10);
        assert!(policy.touch(used));
        assert!(!policy.touch(used));
        for key in 0..1_000 {
            policy.admit(key, 10);
            while policy.bytes() > 100 {
                assert_ne!(policy.evict(), Some(u64::MAX));
            }
        }
    }

    #[test]
    fn the_protected_share_is_bounded_and_its_oldest_fall_back() {
        let mut policy = Policy::new(100);
        let slots: Vec<Slot> = (0..10).map(|key| policy.admit(key, 10)).collect();
        slots.iter().for_each(|slot| {
            policy.touch(*slot);
        });
        assert!(policy.protected.bytes <= 80);
        assert_eq!(policy.evict(), Some(0), "the oldest of those that fell back");
        assert_eq!(policy.bytes(), 90);
    }

    #[test]
    fn slots_are_used_again() {
        let mut policy = Policy::new(100);
        for key in 0..1_000 {
            let slot = policy.admit(key, 1);
            assert_eq!(policy.remove(slot), Some(key));
        }
        assert_eq!(policy.nodes.len(), 1);
    }
}
