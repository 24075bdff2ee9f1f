//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

/// How long a condition may take on a loaded machine before the test fails.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// Asks `ask` until it gives something; panics with the last reason after [`DEADLINE`].
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Result<T, String>) -> T {
    match within(DEADLINE, ask) {
        Ok(found) => found,
        Err(why) => panic!("{what} did not come true within {DEADLINE:?}: {why}"),
    }
}

/// Asks `ask` until it gives something, or until the deadline, which gives the last reason.
pub fn within<T>(deadline: Duration, mut ask: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let start = Instant::now();
    loop {
        match ask() {
            Ok(found) => return Ok(found),
            Err(why) if start.elapsed() > deadline => return Err(why),
            Err(_) => std::thread::sleep(Duration::from_millis(30)),
        }
    }
}
