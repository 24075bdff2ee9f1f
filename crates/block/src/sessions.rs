//! What each session did here: for `torchfs top`, and to see who is greedy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use torchfs_proto::layout::Load;
use torchfs_proto::msg::block::SessionLoad;

/// The most sessions that are remembered; the one that was silent for longest is forgotten.
const SESSIONS_MAX: usize = 4096;

/// Counts since the start of the server.
#[derive(Default)]
pub(crate) struct Sessions {
    gets: AtomicU64,
    puts: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    each: Mutex<Each>,
}

#[derive(Default)]
struct Each {
    /// What a session did, and when it was heard last in the order of requests.
    known: HashMap<u64, (SessionLoad, u64)>,
    requests: u64,
}

impl Sessions {
    /// A piece, or a part of one, was sent.
    pub fn sent(&self, session: u64, bytes: u64) {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.note(session, |load| {
            load.gets += 1;
            load.read_bytes += bytes;
        });
    }

    /// A piece was stored.
    pub fn stored(&self, session: u64, bytes: u64) {
        self.puts.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.note(session, |load| {
            load.puts += 1;
            load.written_bytes += bytes;
        });
    }

    /// All sessions together.
    pub fn load(&self, waiting: u64) -> Load {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Load {
            gets: of(&self.gets),
            puts: of(&self.puts),
            read_bytes: of(&self.read_bytes),
            written_bytes: of(&self.written_bytes),
            waiting,
        }
    }

    /// The sessions that were heard of last, at most so many.
    pub fn latest(&self, most: usize) -> Vec<SessionLoad> {
        let mut known: Vec<(SessionLoad, u64)> = self.each.lock().known.values().copied().collect();
        known.sort_unstable_by_key(|(_, heard)| std::cmp::Reverse(*heard));
        known.truncate(most);
        known.into_iter().map(|(load, _)| load).collect()
    }

    fn note(&self, session: u64, count: impl FnOnce(&mut SessionLoad)) {
        let mut each = self.each.lock();
        each.requests += 1;
        let now = each.requests;
        if each.known.len() >= SESSIONS_MAX && !each.known.contains_key(&session) {
            let oldest = each.known.iter().min_by_key(|(_, (_, heard))| *heard).map(|(session, _)| *session);
            oldest.map(|session| each.known.remove(&session));
        }
        let (load, heard) = each.known.entry(session).or_default();
        (load.session, *heard) = (session, now);
        count(load);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_counted_apart_and_the_silent_ones_are_forgotten() {
        let sessions = Sessions::default();
        sessions.sent(7, 100);
        for session in 100..100 + 2 * SESSIONS_MAX as u64 {
            sessions.stored(session, 10);
            sessions.sent(7, 1);
        }
        let latest = sessions.latest(2);
        assert_eq!(latest[0].session, 7);
        assert_eq!(
            (latest[0].gets, latest[0].read_bytes),
            (1 + 2 * SESSIONS_MAX as u64, 100 + 2 * SESSIONS_MAX as u64)
        );
        assert_eq!((latest[1].puts, latest[1].written_bytes), (1, 10));
        assert_eq!(sessions.latest(usize::MAX).len(), SESSIONS_MAX);
        assert_eq!(sessions.load(3).puts, 2 * SESSIONS_MAX as u64);
    }
}
