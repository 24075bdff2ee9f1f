//! Names, units and meanings of the engine's metrics.

use std::time::Duration;

use metrics::{counter, gauge, histogram};

/// A sync of the log made `batches` batches durable.
pub fn synced(batches: usize, took: Duration) {
    counter!("torchfs_engine_syncs_total").increment(1);
    counter!("torchfs_engine_batches_total").increment(batches as u64);
    histogram!("torchfs_engine_sync_seconds").record(took.as_secs_f64());
}

/// A checkpoint brought `keys` keys into the replica.
pub fn checkpointed(keys: usize, took: Duration) {
    counter!("torchfs_engine_checkpoints_total").increment(1);
    counter!("torchfs_engine_checkpoint_keys_total").increment(keys as u64);
    histogram!("torchfs_engine_checkpoint_seconds").record(took.as_secs_f64());
}

/// A caller waited until the engine had room for its batch.
pub fn stalled(took: Duration) {
    histogram!("torchfs_engine_stall_seconds").record(took.as_secs_f64());
}

/// Bytes and keys that are in memory and in the log only.
pub fn overlay(bytes: usize, keys: usize) {
    gauge!("torchfs_engine_overlay_bytes").set(bytes as f64);
    gauge!("torchfs_engine_overlay_keys").set(keys as f64);
}

/// The log failed for good (0 or 1).
pub fn failed() {
    gauge!("torchfs_engine_failed").set(1.0);
}

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    metrics::describe_counter!("torchfs_engine_syncs_total", "Syncs of the log");
    metrics::describe_counter!("torchfs_engine_batches_total", "Batches made durable");
    metrics::describe_histogram!("torchfs_engine_sync_seconds", "Seconds that a sync of the log took");
    metrics::describe_counter!("torchfs_engine_checkpoints_total", "Checkpoints of the replica");
    metrics::describe_counter!(
        "torchfs_engine_checkpoint_keys_total",
        "Keys that checkpoints brought into the replica"
    );
    metrics::describe_histogram!("torchfs_engine_checkpoint_seconds", "Seconds that a checkpoint took");
    metrics::describe_histogram!(
        "torchfs_engine_stall_seconds",
        "Seconds that a caller waited for room in the engine"
    );
    metrics::describe_gauge!(
        "torchfs_engine_overlay_bytes",
        "Bytes of metadata in memory and in the log only"
    );
    metrics::describe_gauge!("torchfs_engine_overlay_keys", "Keys that are in memory and in the log only");
    metrics::describe_gauge!("torchfs_engine_failed", "1 when the log failed for good, else 0");
}
