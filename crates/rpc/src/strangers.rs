//! Connections that have not proven yet that they belong here: few at a time, and each only for as long as nobody else waits.
//!
//! Whoever reaches the port can open connections and say nothing. They share a small room of their own, so that they take
//! no place of those who know the secret. When the room is full the next one waits a moment for one to become free; then
//! the oldest has to go. A handshake takes two round trips, so one who means it is done long before.
//!
//! # Invariants
//! - At most `max` connections are in the room.
//! - A newcomer waits at most `patience` for a place, however many stay in the room.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The room.
pub(crate) struct Strangers {
    max: usize,
    patience: Duration,
    room: Mutex<Room>,
    left: Notify,
}

#[derive(Default)]
struct Room {
    /// By their number, so the first is the oldest.
    inside: BTreeMap<u64, (Instant, Arc<Notify>)>,
    next: u64,
}

/// A place in the room, until it is dropped.
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    dismissal: Arc<Notify>,
}

impl Strangers {
    pub fn new(max: usize, patience: Duration) -> Arc<Strangers> {
        Arc::new(Strangers { max: max.max(1), patience, room: Mutex::default(), left: Notify::new() })
    }

    /// Waits until there is a place.
    pub async fn make_room(&self) {
        loop {
            let due = {
                let room = self.room.lock();
                match room.inside.first_key_value() {
                    Some((_, (since, _))) if room.inside.len() >= self.max => *since + self.patience,
                    _ => return,
                }
            };
            tokio::select! {
                // Kept for the next who waits if nobody does: then a look is too many, never one too few.
                _ = self.left.notified() => {}
                _ = tokio::time::sleep_until(due.into()) => self.dismiss_oldest(due),
            }
        }
    }

    /// Takes a place.
    pub fn enter(self: &Arc<Strangers>) -> Stranger {
        let dismissal = Arc::new(Notify::new());
        let mut room = self.room.lock();
        let number = room.next;
        room.next += 1;
        room.inside.insert(number, (Instant::now(), dismissal.clone()));
        Stranger { strangers: self.clone(), number, dismissal }
    }

    fn dismiss_oldest(&self, due: Instant) {
        let mut room = self.room.lock();
        if room.inside.len() >= self.max
            && let Some(oldest) = room.inside.first_entry()
            && oldest.get().0 + self.patience <= due
        {
            oldest.remove().1.notify_one();
        }
    }
}

impl Stranger {
    /// Ends when somebody else needs the place.
    pub async fn dismissed(&self) {
        self.dismissal.notified().await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.room.lock().inside.remove(&self.number);
        self.strangers.left.notify_one();
    }
}
