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
