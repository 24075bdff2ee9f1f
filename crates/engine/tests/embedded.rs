//! The embedded engine keeps the promises of every engine: with LMDB on a real folder, and with small bounds.

#![allow(clippy::unwrap_used)]

use torchfs_engine::conformance;
use torchfs_engine::{Config, Embedded, Engine, LogConfig};

fn run(config: impl Fn() -> Config) {
    for (name, promise) in conformance::all() {
        println!("{name}");
        let dir = tempfile::tempdir().unwrap();
        promise(&|| Ok(Box::new(Embedded::open(dir.path(), config())?) as Box<dyn Engine>));
    }
}

fn small_log() -> LogConfig {
    LogConfig { segment_bytes: 256 << 10, segments_min: 2, segments_max: 4 }
}

#[test]
fn the_embedded_engine_keeps_all_promises() {
    run(|| Config { log: LogConfig { segment_bytes: 1 << 20, ..LogConfig::default() }, ..Config::default() });
}

#[test]
fn the_embedded_engine_keeps_all_promises_with_small_bounds() {
    run(|| Config {
        log: small_log(),
        checkpoint_keys: 50,
        checkpoint_bytes: 8 << 10,
        overlay_bytes: 64 << 10,
        queue_bytes: 16 << 10,
        group_bytes: 4 << 10,
        ..Config::default()
    });
}
