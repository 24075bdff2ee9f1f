//! Waiting for durability: one Sync in flight serves everybody who needs no more than it waits for.

use std::sync::Arc;
use std::time::Instant;

use torchfs_proto::msg::meta::Op;
use torchfs_proto::{Result, Seq};

use super::session::{Heard, Route, Shared, State};

/// What one who waits has to do next.
enum Next {
    /// Send a Sync up to here.
    Send(Route, Seq),
    /// Wait for one in flight, or for a connection.
    Wait,
}

impl Shared {
    /// Waits until all changes answered so far, up to this sequence, are durable.
    pub async fn durable(self: &Arc<Shared>, upto: u64, until: Instant) -> Result<()> {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            let next = self.state.lock().next_sync(upto)?;
            match next {
                None => return Ok(()),
                Some(Next::Wait) => self.within(until, progress).await?,
                Some(Next::Send(route, place)) => {
                    let flying = Flying { shared: self, place, generation: route.generation };
                    let heard = self.send(route, &Op::Sync { seq: place }, until).await;
                    drop(flying);
                    match heard {
                        Heard::Answer(result) => {
                            result?;
                            // The reply said how far the log is durable; if not far enough after all, do not spin.
                            if self.state.lock().still_needs(upto)? {
                                self.pause(until).await?;
                            }
                        }
                        Heard::Lost => self.ready(until).await?,
                        Heard::Again => self.pause(until).await?,
                    }
                }
            }
        }
    }
}

impl State {
    fn still_needs(&self, upto: u64) -> Result<bool> {
        Ok(self.ledger.needed(upto)?.is_some_and(|place| place != Seq(u64::MAX)))
    }

    fn next_sync(&mut self, upto: u64) -> Result<Option<Next>> {
        let live = self.is_live()?;
        let Some(needed) = self.ledger.needed(upto)? else {
            return Ok(None);
        };
        // A change that this leader has not answered yet: its replay is under way.
        let unknown = needed == Seq(u64::MAX);
        if !live || unknown || self.syncs.iter().any(|place| *place >= needed) {
            return Ok(Some(Next::Wait));
        }
        let place = needed.max(self.ledger.farthest());
        Ok(self.route()?.map(|route| {
            self.syncs.push(place);
            Next::Send(route, place)
        }))
        .map(|next| Some(next.unwrap_or(Next::Wait)))
    }
}

/// A Sync in flight; when it ends, however it ends, those who joined it look again.
struct Flying<'a> {
    shared: &'a Shared,
    place: Seq,
    generation: u64,
}

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.lock();
            if state.generation == self.generation
                && let Some(index) = state.syncs.iter().position(|place| *place == self.place)
            {
                state.syncs.swap_remove(index);
            }
        }
        self.shared.progress.notify_waiters();
    }
}
