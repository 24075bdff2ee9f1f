//! The seam to time: decisions get their clock handed in, so that tests own it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of time.
pub trait Clock: Send + Sync {
    /// Monotonic time, for terms and deadlines.
    fn now(&self) -> Instant;

    /// Wall time in nanoseconds since 1970, for what people read.
    fn wall_ns(&self) -> i64;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wall_ns(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    }
}
