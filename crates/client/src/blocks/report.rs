//! Pieces that were found bad or missing, on their way to the metadata service, which has them repaired.
//!
//! Reading does not wait for it. What cannot be told is dropped: whoever reads the block again finds it again, and scrubs do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_proto::msg::meta::{BAD_MAX, BadPiece, Op};

use crate::{Meta, metrics};

/// A piece is not reported again for so long.
const AGAIN: Duration = Duration::from_secs(60);
/// Pieces remembered as reported.
const KNOWN_MAX: usize = 16 << 10;

/// Pieces to be told, and those told lately.
#[derive(Default)]
pub(super) struct Reports {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: Vec<BadPiece>,
    told: HashMap<BadPiece, Instant>,
    telling: bool,
}

impl Reports {
    /// Notes a piece; it is told soon.
    pub fn add(self: &Arc<Reports>, meta: &Arc<Meta>, bad: BadPiece) {
        {
            let mut state = self.state.lock();
            let known = state.told.get(&bad).is_some_and(|at| at.elapsed() < AGAIN);
            if known || state.waiting.len() >= BAD_MAX {
                return;
            }
            if state.told.len() >= KNOWN_MAX {
                state.told.retain(|_, at| at.elapsed() < AGAIN);
                if state.told.len() >= KNOWN_MAX {
                    state.told.clear();
                }
            }
            state.told.insert(bad, Instant::now());
            state.waiting.push(bad);
            if std::mem::replace(&mut state.telling, true) {
                return;
            }
        }
        ::metrics::counter!(metrics::REPORTS).increment(1);
        let (reports, session) = (self.clone(), meta.clone());
        meta.spawn(async move {
            loop {
                let pieces = {
                    let mut state = reports.state.lock();
                    state.telling = !state.waiting.is_empty();
                    std::mem::take(&mut state.waiting)
                };
                if pieces.is_empty() {
                    return;
                }
                if let Err(fault) = session.ask(Op::ReportBad { pieces }).await {
                    tracing::debug!("bad pieces could not be reported: {fault}");
                }
            }
        });
    }
}
