//! What the metadata service counts: name, unit, meaning.

use torchfs_proto::msg::meta::Op;

/// Requests by operation.
const REQUESTS: &str = "torchfs_meta_requests_total";
/// Leases recalled.
const RECALLS: &str = "torchfs_meta_recalls_total";
/// Answers that waited for another session's change to become durable.
const WAITED: &str = "torchfs_meta_waited_durable_total";
/// Blocks deleted from data servers.
const DELETED: &str = "torchfs_meta_blocks_deleted_total";
/// Pieces that repair had stored.
const REPAIRED: &str = "torchfs_meta_pieces_repaired_total";
/// Bytes of these.
const REPAIRED_BYTES: &str = "torchfs_meta_repaired_bytes_total";
/// Sessions there are.
const SESSIONS: &str = "torchfs_meta_sessions";
/// Work left for the upkeep.
const CHORES: &str = "torchfs_meta_chores";

/// Dumps put onto data servers.
const DUMPS: &str = "torchfs_meta_dumps_total";
/// Dumps that came to nothing.
const DUMP_FAILURES: &str = "torchfs_meta_dump_failures_total";
/// Bytes of the newest dump.
const DUMP_BYTES: &str = "torchfs_meta_dump_bytes";
/// Seconds since the newest dump was begun.
const DUMP_AGE: &str = "torchfs_meta_dump_age_seconds";

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    metrics::describe_counter!(REQUESTS, "Requests by operation");
    metrics::describe_counter!(RECALLS, "Leases recalled");
    metrics::describe_counter!(WAITED, "Answers that waited for another session's change to become durable");
    metrics::describe_counter!(DELETED, "Blocks deleted from data servers");
    metrics::describe_counter!(DUMPS, "Dumps put onto data servers");
    metrics::describe_counter!(DUMP_FAILURES, "Dumps that came to nothing");
    metrics::describe_gauge!(DUMP_BYTES, "Bytes of the newest dump");
    metrics::describe_gauge!(DUMP_AGE, "Seconds since the newest dump was begun");
    metrics::describe_counter!(REPAIRED, "Pieces that repair had stored");
    metrics::describe_counter!(REPAIRED_BYTES, metrics::Unit::Bytes, "Bytes that repair had stored");
    metrics::describe_gauge!(SESSIONS, "Sessions");
    metrics::describe_gauge!(CHORES, "Pieces of work left for the upkeep");
}

pub(crate) fn request(op: &Op) {
    metrics::counter!(REQUESTS, "op" => name(op)).increment(1);
}

pub(crate) fn recall() {
    metrics::counter!(RECALLS).increment(1);
}

pub(crate) fn waited_durable() {
    metrics::counter!(WAITED).increment(1);
}

pub(crate) fn deleted(blocks: u64) {
    metrics::counter!(DELETED).increment(blocks);
}

pub(crate) fn repaired(pieces: u64, bytes: u64) {
    metrics::counter!(REPAIRED).increment(pieces);
    metrics::counter!(REPAIRED_BYTES).increment(bytes);
}

pub(crate) fn upkeep(sessions: usize, chores: usize) {
    metrics::gauge!(SESSIONS).set(sessions as f64);
    metrics::gauge!(CHORES).set(chores as f64);
}

pub(crate) fn dumped(bytes: u64) {
    metrics::counter!(DUMPS).increment(1);
    metrics::gauge!(DUMP_BYTES).set(bytes as f64);
}

pub(crate) fn dump_failed() {
    metrics::counter!(DUMP_FAILURES).increment(1);
}

pub(crate) fn dump_age(age: std::time::Duration) {
    metrics::gauge!(DUMP_AGE).set(age.as_secs_f64());
}

fn name(op: &Op) -> &'static str {
    match op {
        Op::OpenSession(_) => "open_session",
        Op::ResumeSession => "resume_session",
        Op::Reclaim { .. } => "reclaim",
        Op::Renew => "renew",
        Op::CloseSession => "close_session",
        Op::Listen { .. } => "listen",
        Op::Ack { .. } => "ack",
        Op::GrantIds { .. } => "grant_ids",
        Op::Sync { .. } => "sync",
        Op::Forget { .. } => "forget",
        Op::Placement => "placement",
        Op::Lookup { .. } => "lookup",
        Op::GetAttr { .. } => "getattr",
        Op::SetAttr { .. } => "setattr",
        Op::ReadLink { .. } => "readlink",
        Op::Make(_) => "make",
        Op::Link { .. } => "link",
        Op::Unlink { .. } => "unlink",
        Op::Rmdir { .. } => "rmdir",
        Op::Rename { .. } => "rename",
        Op::ReadDir { .. } => "readdir",
        Op::Xattrs { .. } => "xattrs",
        Op::SetXattr { .. } => "setxattr",
        Op::RemoveXattr { .. } => "removexattr",
        Op::OpenData { .. } => "open_data",
        Op::Extents { .. } => "extents",
        Op::Commit(_) => "commit",
        Op::CopyRange { .. } => "copy_range",
        Op::Lock { .. } => "lock",
        Op::GetLock { .. } => "getlock",
        Op::Release { .. } => "release",
        Op::StatFs => "statfs",
        Op::Heartbeat(_) => "heartbeat",
        Op::Status => "status",
        Op::Sessions => "sessions",
        Op::Evict { .. } => "evict",
        Op::Check { .. } => "check",
        Op::KnownBlocks { .. } => "known_blocks",
        Op::Strays { .. } => "strays",
        Op::ListBlocks { .. } => "list_blocks",
        Op::ListFiles { .. } => "list_files",
        Op::ListNames { .. } => "list_names",
        Op::Collect => "collect",
        Op::SetPolicy { .. } => "set_policy",
        Op::Volume(_) => "volume",
        Op::Drain { .. } => "drain",
        Op::RemoveServer { .. } => "remove_server",
        Op::Rebalance { .. } => "rebalance",
        Op::Scrub { .. } => "scrub",
        Op::Repair { .. } => "repair",
        Op::ReportBad { .. } => "report_bad",
        Op::Top => "top",
        Op::MetaStatus => "meta_status",
        Op::Dump { .. } => "dump",
    }
}
