//! What this crate counts, by name, unit and meaning.

/// Connections to the metadata service that were given up.
pub const RECOVERIES: &str = "torchfs_client_recoveries_total";
/// Changes that were told again to a leader.
pub const REPLAYED: &str = "torchfs_client_replayed_total";
/// Blocks put.
pub const PUTS: &str = "torchfs_client_puts_total";
/// Bytes of content in blocks put.
pub const PUT_BYTES: &str = "torchfs_client_put_bytes_total";
/// Pieces put on another server than their group's.
pub const SUBSTITUTES: &str = "torchfs_client_substitutes_total";
/// Reads of blocks.
pub const GETS: &str = "torchfs_client_gets_total";
/// Bytes of content read from blocks.
pub const GET_BYTES: &str = "torchfs_client_get_bytes_total";
/// Reads that asked a second server because the first was slow.
pub const HEDGES: &str = "torchfs_client_hedges_total";
/// Copies that were corrupt, missing or out of reach when they were read.
pub const BAD_COPIES: &str = "torchfs_client_bad_copies_total";
/// Reads of coded blocks for which a piece was missing, corrupt or slow.
pub const DEGRADED_GETS: &str = "torchfs_client_degraded_gets_total";
/// Bytes of shards computed for such reads.
pub const REBUILT_BYTES: &str = "torchfs_client_rebuilt_bytes_total";
/// Times that bad pieces were told to the metadata service.
pub const REPORTS: &str = "torchfs_client_bad_reports_total";

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    ::metrics::describe_counter!(RECOVERIES, "Connections to the metadata service that were given up");
    ::metrics::describe_counter!(REPLAYED, "Changes that were told again to a leader");
    ::metrics::describe_counter!(PUTS, "Blocks put");
    ::metrics::describe_counter!(PUT_BYTES, "Bytes of content in blocks put");
    ::metrics::describe_counter!(SUBSTITUTES, "Pieces put on another server than their group's");
    ::metrics::describe_counter!(GETS, "Reads of blocks");
    ::metrics::describe_counter!(GET_BYTES, "Bytes of content read from blocks");
    ::metrics::describe_counter!(HEDGES, "Reads that asked a second server because the first was slow");
    ::metrics::describe_counter!(
        BAD_COPIES,
        "Copies that were corrupt, missing or out of reach when they were read"
    );
    ::metrics::describe_counter!(
        DEGRADED_GETS,
        "Reads of coded blocks for which a piece was missing, corrupt or slow"
    );
    ::metrics::describe_counter!(REBUILT_BYTES, "Bytes of shards computed for such reads");
    ::metrics::describe_counter!(REPORTS, "Times that bad pieces were told to the metadata service");
}
