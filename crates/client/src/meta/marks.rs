//! When something last happened to an inode, as far as it matters to answers that are on their way.
//!
//! Whoever asks notes the time first, and sees afterwards whether it happened meanwhile to the inode, or to one that shares its
//! place: then he asks again, or does not keep the answer, which is never wrong.

use std::sync::atomic::{AtomicU64, Ordering};

use torchfs_proto::Ino;

/// Places that inodes share by the end of their number.
const PLACES: usize = 1024;

/// The last times, by place. Time is the count of what happened.
pub struct Marks {
    count: AtomicU64,
    last: Box<[AtomicU64]>,
    last_of_all: AtomicU64,
}

impl Default for Marks {
    fn default() -> Marks {
        let last = (0..PLACES).map(|_| AtomicU64::new(0)).collect();
        Marks { count: AtomicU64::new(0), last, last_of_all: AtomicU64::new(0) }
    }
}

impl Marks {
    /// The time.
    pub fn now(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// It happened to this inode.
    pub fn note(&self, ino: Ino) {
        let now = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        self.place(ino).fetch_max(now, Ordering::AcqRel);
    }

    /// It happened to any inode.
    pub fn note_all(&self) {
        let now = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        self.last_of_all.fetch_max(now, Ordering::AcqRel);
    }

    /// Whether it may have happened to the inode after that time.
    pub fn since(&self, ino: Ino, then: u64) -> bool {
        self.place(ino).load(Ordering::Acquire).max(self.last_of_all.load(Ordering::Acquire)) > then
    }

    fn place(&self, ino: Ino) -> &AtomicU64 {
        &self.last[(ino.0 % PLACES as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_to_an_inode_is_known_until_it_is_asked_for_again() {
        let marks = Marks::default();
        let then = marks.now();
        marks.note(Ino(7));
        assert!(marks.since(Ino(7), then) && !marks.since(Ino(8), then));
        assert!(marks.since(Ino(7 + PLACES as u64), then), "it shares the place");
        let then = marks.now();
        assert!(!marks.since(Ino(7), then));
        marks.note_all();
        assert!(marks.since(Ino(7), then) && marks.since(Ino(8), then));
    }
}
