//! What the metadata service counts: name, unit, meaning.

use torchfs_engine::{Peer, Stats};
use torchfs_proto::layout::{Room, ServerInfo, ServerState};
use torchfs_proto::msg::meta::{Op, StatusReport};

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

/// 1 while this server leads, else 0.
const LEADS: &str = "torchfs_meta_leads";
/// Inodes of all volumes.
const INODES: &str = "torchfs_meta_inodes";
/// Blocks of all volumes.
const BLOCKS: &str = "torchfs_meta_blocks";
/// Blocks that wait to be deleted.
const BLOCKS_DEAD: &str = "torchfs_meta_blocks_dead";
/// Bytes of content in blocks.
const CONTENT: &str = "torchfs_meta_content_bytes";
/// Lines that `torchfs status` shows as needing attention.
const WARNINGS: &str = "torchfs_meta_warnings";
/// Data servers by state.
const SERVERS: &str = "torchfs_meta_servers";
/// Data servers that are being emptied, or are empty.
const DRAINING: &str = "torchfs_meta_servers_draining";
/// Data servers that take no more data.
const FULL: &str = "torchfs_meta_servers_full";
/// Disks that failed or do not answer.
const DISKS_FAILED: &str = "torchfs_meta_disks_failed";
/// Bytes that pieces may take on all data servers that are up.
const TOTAL: &str = "torchfs_meta_data_total_bytes";
/// Bytes free for pieces on all data servers that are up.
const FREE: &str = "torchfs_meta_data_free_bytes";
/// Bytes that pieces take on all data servers that are up.
const USED: &str = "torchfs_meta_data_used_bytes";
/// Placement groups.
const GROUPS: &str = "torchfs_meta_groups";
/// Placement groups in which pieces may be missing.
const DIRTY: &str = "torchfs_meta_groups_to_repair";
/// Placement groups that move.
const MOVING: &str = "torchfs_meta_groups_moving";
/// Placement groups with a server that is away.
const DEGRADED: &str = "torchfs_meta_groups_degraded";
/// Placement groups that survive no further loss until they are repaired.
const AT_RISK: &str = "torchfs_meta_groups_at_risk";
/// Pieces known to be missing or bad.
const TO_REPAIR: &str = "torchfs_meta_pieces_to_repair";
/// Blocks with too few pieces left to be read.
const LOST: &str = "torchfs_meta_blocks_lost";
/// Bytes free on the disk of the metadata.
const META_FREE: &str = "torchfs_meta_disk_free_bytes";
/// Bytes that log and replica take.
const META_BYTES: &str = "torchfs_meta_disk_used_bytes";
/// Batches that are ordered but not yet in this server's replica.
const REPLICA_LAG: &str = "torchfs_meta_replica_lag_batches";
/// Batches that are ordered but not yet durable.
const DURABLE_LAG: &str = "torchfs_meta_durable_lag_batches";
/// Batches that a standby does not have yet.
const STANDBY_LAG: &str = "torchfs_meta_standby_lag_batches";
/// Seconds since a standby was heard.
const STANDBY_SILENT: &str = "torchfs_meta_standby_silent_seconds";

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    metrics::describe_gauge!(LEADS, "1 while this server leads, else 0");
    metrics::describe_gauge!(INODES, "Inodes of all volumes");
    metrics::describe_gauge!(BLOCKS, "Blocks of all volumes");
    metrics::describe_gauge!(BLOCKS_DEAD, "Blocks that wait to be deleted");
    metrics::describe_gauge!(CONTENT, "Bytes of content in blocks");
    metrics::describe_gauge!(WARNINGS, "Lines that `torchfs status` shows as needing attention");
    metrics::describe_gauge!(SERVERS, "Data servers by state");
    metrics::describe_gauge!(DRAINING, "Data servers that are being emptied, or are empty");
    metrics::describe_gauge!(FULL, "Data servers that take no more data");
    metrics::describe_gauge!(DISKS_FAILED, "Disks that failed or do not answer");
    metrics::describe_gauge!(TOTAL, "Bytes that pieces may take on all data servers that are up");
    metrics::describe_gauge!(FREE, "Bytes free for pieces on all data servers that are up");
    metrics::describe_gauge!(USED, "Bytes that pieces take on all data servers that are up");
    metrics::describe_gauge!(GROUPS, "Placement groups");
    metrics::describe_gauge!(DIRTY, "Placement groups in which pieces may be missing");
    metrics::describe_gauge!(MOVING, "Placement groups that move");
    metrics::describe_gauge!(DEGRADED, "Placement groups with a server that is away");
    metrics::describe_gauge!(
        AT_RISK,
        "Placement groups that survive no further loss until they are repaired"
    );
    metrics::describe_gauge!(TO_REPAIR, "Pieces known to be missing or bad");
    metrics::describe_gauge!(LOST, "Blocks with too few pieces left to be read");
    metrics::describe_gauge!(META_FREE, "Bytes free on the disk of the metadata");
    metrics::describe_gauge!(META_BYTES, "Bytes that log and replica take");
    metrics::describe_gauge!(REPLICA_LAG, "Batches that are ordered but not yet in this server's replica");
    metrics::describe_gauge!(DURABLE_LAG, "Batches that are ordered but not yet durable");
    metrics::describe_gauge!(STANDBY_LAG, "Batches that a standby does not have yet");
    metrics::describe_gauge!(STANDBY_SILENT, "Seconds since a standby was heard");
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

/// Whether this server leads.
pub(crate) fn leads(leads: bool) {
    metrics::gauge!(LEADS).set(if leads { 1.0 } else { 0.0 });
}

/// What an operator watches: the state of the cluster as `torchfs status` tells it, and how far the replicas are.
pub(crate) fn cluster(status: &StatusReport, engine: &Stats, standbys: &[Peer]) {
    let set = |name: &'static str, value: u64| metrics::gauge!(name).set(value as f64);
    set(INODES, status.inodes);
    set(BLOCKS, status.blocks);
    set(BLOCKS_DEAD, status.dead);
    set(CONTENT, status.bytes);
    set(WARNINGS, status.warnings.len() as u64);
    let servers = &status.servers;
    for state in [ServerState::Up, ServerState::Suspected, ServerState::Down, ServerState::Out] {
        let count = servers.iter().filter(|server| server.state == state).count();
        metrics::gauge!(SERVERS, "state" => state.to_string()).set(count as f64);
    }
    set(DRAINING, servers.iter().filter(|server| server.draining).count() as u64);
    set(FULL, servers.iter().filter(|server| server.is_full()).count() as u64);
    set(DISKS_FAILED, servers.iter().flat_map(|s| &s.disks).filter(|disk| !disk.works()).count() as u64);
    let up = servers.iter().filter(|server| server.up).flat_map(ServerInfo::parts);
    let room = Room::of(&up.collect::<Vec<_>>());
    set(TOTAL, room.total);
    set(FREE, room.free);
    set(USED, room.used);
    if let Some(repair) = &status.repair {
        set(GROUPS, u64::from(repair.groups));
        set(DIRTY, u64::from(repair.dirty));
        set(MOVING, u64::from(repair.moving));
        set(DEGRADED, u64::from(repair.degraded));
        set(AT_RISK, u64::from(repair.at_risk));
        set(TO_REPAIR, repair.pieces_left);
        set(LOST, repair.lost);
    }
    set(META_FREE, status.meta_free);
    set(META_BYTES, status.meta_bytes);
    set(REPLICA_LAG, engine.ordered.0.saturating_sub(engine.applied.0));
    set(DURABLE_LAG, engine.ordered.0.saturating_sub(engine.durable.0));
    for standby in standbys {
        let lag = engine.ordered.0.saturating_sub(standby.applied.0);
        metrics::gauge!(STANDBY_LAG, "standby" => standby.address.clone()).set(lag as f64);
        let silent = standby.silent_ms as f64 / 1_000.0;
        metrics::gauge!(STANDBY_SILENT, "standby" => standby.address.clone()).set(silent);
    }
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
