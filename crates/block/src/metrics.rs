//! Every figure this crate reports: name, unit, meaning.

/// Pieces made durable.
pub(crate) const PUTS: &str = "torchfs_block_puts_total";
/// Stored bytes of pieces made durable.
pub(crate) const PUT_BYTES: &str = "torchfs_block_put_bytes_total";
/// Pieces deleted.
pub(crate) const DELETES: &str = "torchfs_block_deletes_total";
/// Batches written, with one sync each.
pub(crate) const BATCHES: &str = "torchfs_block_batches_total";
/// Seconds from the start of a batch's write to the end of its sync.
pub(crate) const BATCH_SECONDS: &str = "torchfs_block_batch_seconds";
/// Bytes rewritten to empty segments that are mostly dead.
pub(crate) const COMPACTED_BYTES: &str = "torchfs_block_compacted_bytes_total";
/// Places in segments that could not be read when the store was opened.
pub(crate) const DAMAGED: &str = "torchfs_block_damaged_places_total";
/// Pieces found corrupt by reading them.
pub(crate) const CORRUPT: &str = "torchfs_block_corrupt_total";
/// Dumps of the metadata taken.
pub(crate) const DUMPS: &str = "torchfs_block_dumps_total";
/// Bytes of dumps taken.
pub(crate) const DUMP_BYTES: &str = "torchfs_block_dump_bytes_total";
/// Bytes of pieces pulled from other servers.
pub(crate) const PULLED_BYTES: &str = "torchfs_block_pulled_bytes_total";
/// Pieces that could not be pulled.
pub(crate) const PULL_FAILURES: &str = "torchfs_block_pull_failures_total";
/// Pieces rebuilt by the erasure code.
pub(crate) const REBUILT: &str = "torchfs_block_rebuilt_total";
/// Stored bytes read and checked by scrubbing.
pub(crate) const SCRUBBED_BYTES: &str = "torchfs_block_scrubbed_bytes_total";
