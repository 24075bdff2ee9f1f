//! Logs go to stderr, as text for people or as JSON for machines; journald takes them from there.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging for the process.
pub fn start(level: &str, json: bool) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    if json {
        builder.json().init();
    } else {
        builder.compact().init();
    }
}
