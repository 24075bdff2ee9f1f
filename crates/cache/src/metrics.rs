//! What this crate counts, by name, unit and meaning.

/// Chunks that were asked for and here.
pub const HITS: &str = "torchfs_cache_hits_total";
/// Chunks that had to be fetched.
pub const MISSES: &str = "torchfs_cache_misses_total";
/// Chunks that were on their way for somebody else.
pub const JOINS: &str = "torchfs_cache_joins_total";
/// Chunks that had to make room.
pub const EVICTED: &str = "torchfs_cache_evicted_total";
/// Bytes kept now.
pub const BYTES: &str = "torchfs_cache_bytes";

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    ::metrics::describe_counter!(HITS, "Chunks that were asked for and here");
    ::metrics::describe_counter!(MISSES, "Chunks that had to be fetched");
    ::metrics::describe_counter!(JOINS, "Chunks that were on their way for somebody else");
    ::metrics::describe_counter!(EVICTED, "Chunks that had to make room");
    ::metrics::describe_gauge!(BYTES, "Bytes kept now");
}
