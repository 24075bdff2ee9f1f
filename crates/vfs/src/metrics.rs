//! What this crate counts, by name, unit and meaning.

/// Lookups answered from memory under a lease.
pub const LOOKUP_HITS: &str = "torchfs_vfs_lookup_hits_total";
/// Lookups that asked the metadata service.
pub const LOOKUP_MISSES: &str = "torchfs_vfs_lookup_misses_total";
/// Leases given back because somebody else needed them.
pub const RECALLS: &str = "torchfs_vfs_recalls_total";
/// Bytes written here and not committed yet.
pub const DIRTY_BYTES: &str = "torchfs_vfs_dirty_bytes";
/// Seconds from a block's turn to be put until every piece was durable.
pub const PUT_SECONDS: &str = "torchfs_vfs_put_seconds";
/// Seconds that a commit took until it was ordered.
pub const COMMIT_SECONDS: &str = "torchfs_vfs_commit_seconds";
/// Commits in the background that failed and whose bytes are lost.
pub const WRITE_ERRORS: &str = "torchfs_vfs_write_errors_total";
/// Rows of small extents that were made one.
pub const COMPACTIONS: &str = "torchfs_vfs_compactions_total";

/// Says what the figures mean, those of the cache below too; call once when an exporter is there.
pub fn describe() {
    torchfs_cache::metrics::describe();
    ::metrics::describe_counter!(LOOKUP_HITS, "Lookups answered from memory under a lease");
    ::metrics::describe_counter!(LOOKUP_MISSES, "Lookups that asked the metadata service");
    ::metrics::describe_counter!(RECALLS, "Leases given back because somebody else needed them");
    ::metrics::describe_gauge!(DIRTY_BYTES, "Bytes written here and not committed yet");
    ::metrics::describe_histogram!(
        PUT_SECONDS,
        "Seconds from a block's turn to be put until every piece was durable"
    );
    ::metrics::describe_histogram!(COMMIT_SECONDS, "Seconds that a commit took until it was ordered");
    ::metrics::describe_counter!(
        WRITE_ERRORS,
        "Commits in the background that failed and whose bytes are lost"
    );
    ::metrics::describe_counter!(COMPACTIONS, "Rows of small extents that were made one");
}
