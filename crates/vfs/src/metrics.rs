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
