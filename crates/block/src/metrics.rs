//! Every figure this crate reports: name, unit, meaning.

use torchfs_proto::ServerId;
use torchfs_proto::layout::DiskInfo;

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

/// Bytes that pieces may take on a disk, by server and folder.
const DISK_TOTAL: &str = "torchfs_block_disk_total_bytes";
/// Bytes free for pieces on a disk.
const DISK_FREE: &str = "torchfs_block_disk_free_bytes";
/// Bytes that pieces take on a disk.
const DISK_USED: &str = "torchfs_block_disk_used_bytes";
/// Pieces on a disk.
const DISK_PIECES: &str = "torchfs_block_disk_pieces";
/// Whether a disk failed or does not answer (0 or 1).
const DISK_FAILED: &str = "torchfs_block_disk_failed";
/// Requests that wait for a disk.
const WAITING: &str = "torchfs_block_waiting";

/// Figures of the disks of a server, as they are told to the metadata service.
pub(crate) fn disks(server: ServerId, disks: &[DiskInfo], waiting: u64) {
    for disk in disks {
        let labels = [("server", server.to_string()), ("disk", disk.path.clone())];
        metrics::gauge!(DISK_TOTAL, &labels).set(disk.total as f64);
        metrics::gauge!(DISK_FREE, &labels).set(disk.free as f64);
        metrics::gauge!(DISK_USED, &labels).set(disk.used as f64);
        metrics::gauge!(DISK_PIECES, &labels).set(disk.pieces as f64);
        metrics::gauge!(DISK_FAILED, &labels).set(if disk.works() { 0.0 } else { 1.0 });
    }
    metrics::gauge!(WAITING, "server" => server.to_string()).set(waiting as f64);
}

/// Says what the figures mean; call once when an exporter is there.
pub fn describe() {
    metrics::describe_gauge!(DISK_TOTAL, "Bytes that pieces may take on a disk");
    metrics::describe_gauge!(DISK_FREE, "Bytes free for pieces on a disk");
    metrics::describe_gauge!(DISK_USED, "Bytes that pieces take on a disk");
    metrics::describe_gauge!(DISK_PIECES, "Pieces on a disk");
    metrics::describe_gauge!(DISK_FAILED, "1 for a disk that failed or does not answer, else 0");
    metrics::describe_gauge!(WAITING, "Requests that wait for a disk");
    metrics::describe_counter!(PUTS, "Pieces made durable");
    metrics::describe_counter!(PUT_BYTES, "Stored bytes of pieces made durable");
    metrics::describe_counter!(DELETES, "Pieces deleted");
    metrics::describe_counter!(BATCHES, "Batches written, with one sync each");
    metrics::describe_histogram!(
        BATCH_SECONDS,
        "Seconds from the start of a batch's write to the end of its sync"
    );
    metrics::describe_counter!(COMPACTED_BYTES, "Bytes rewritten to empty segments that are mostly dead");
    metrics::describe_counter!(
        DAMAGED,
        "Places in segments that could not be read when the store was opened"
    );
    metrics::describe_counter!(CORRUPT, "Pieces found corrupt by reading them");
    metrics::describe_counter!(DUMPS, "Dumps of the metadata taken");
    metrics::describe_counter!(DUMP_BYTES, "Bytes of dumps taken");
    metrics::describe_counter!(PULLED_BYTES, "Bytes of pieces pulled from other servers");
    metrics::describe_counter!(PULL_FAILURES, "Pieces that could not be pulled");
    metrics::describe_counter!(REBUILT, "Pieces rebuilt by the erasure code");
    metrics::describe_counter!(SCRUBBED_BYTES, "Stored bytes read and checked by scrubbing");
}
