//! Which inodes were changed by batches that are not durable yet, and by whom. Pure.
//!
//! Who made a change keeps the request and replays it if the log loses it. Nobody else can, so an answer to another
//! session that rests on such a change waits until it is durable.
//!
//! # Invariants
//! - What is remembered is bounded by the batches that are not durable; the engine bounds those.

use std::collections::{HashMap, VecDeque};

use torchfs_proto::{Seq, SessionId};

use crate::leases::Node;

/// Changes that are not durable yet.
#[derive(Debug, Default)]
pub struct Rests {
    last: HashMap<Node, Last>,
    order: VecDeque<(Seq, Node)>,
}

#[derive(Debug)]
struct Last {
    /// The last change, and who made it.
    seq: Seq,
    session: SessionId,
    /// The last change by anybody else.
    other: Seq,
}

impl Rests {
    /// A batch changed an inode.
    pub fn changed(&mut self, node: Node, seq: Seq, session: SessionId) {
        self.order.push_back((seq, node));
        let last = self.last.entry(node).or_insert(Last { seq, session, other: Seq(0) });
        if last.session != session {
            last.other = last.seq;
            last.session = session;
        }
        last.seq = seq;
    }

    /// The batch that an answer to this session about this inode rests on; 0 if there is none.
    pub fn on(&self, node: Node, session: SessionId) -> Seq {
        match self.last.get(&node) {
            Some(last) if last.session == session => last.other,
            Some(last) => last.seq,
            None => Seq(0),
        }
    }

    /// The log is durable up to here.
    pub fn durable(&mut self, upto: Seq) {
        while let Some((seq, node)) = self.order.front().copied()
            && seq <= upto
        {
            self.order.pop_front();
            if self.last.get(&node).is_some_and(|last| last.seq <= upto) {
                self.last.remove(&node);
            }
        }
    }

    /// How many changes are remembered.
    pub fn len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use torchfs_proto::{Ino, VolumeId};

    use super::*;

    #[test]
    fn only_others_wait_for_a_change() {
        let node = (VolumeId(1), Ino(7));
        let (a, b, c) = (SessionId(1), SessionId(2), SessionId(3));
        let mut rests = Rests::default();
        rests.changed(node, Seq(5), a);
        assert_eq!((rests.on(node, a), rests.on(node, b)), (Seq(0), Seq(5)));
        rests.changed(node, Seq(7), b);
        assert_eq!((rests.on(node, a), rests.on(node, b), rests.on(node, c)), (Seq(7), Seq(5), Seq(7)));
        rests.durable(Seq(5));
        assert_eq!(rests.on(node, a), Seq(7));
        rests.durable(Seq(7));
        assert_eq!((rests.on(node, a), rests.len()), (Seq(0), 0));
    }
}
