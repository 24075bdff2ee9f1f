//! What can be set about the metadata service; every timer and bound is a field.

use std::time::Duration;

use torchfs_proto::attr::Compression;
use torchfs_proto::layout::Scheme;

/// Settings of the metadata service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// A lease ends this long after the client sent its last renewal.
    pub lease_ms: u32,
    /// The service counts leases this much longer, from when it received the renewal.
    pub lease_margin_ms: u32,
    /// A session ends when it was not renewed for this long.
    pub session_ms: u32,
    /// How often the upkeep looks for what has become due.
    pub tick_ms: u32,
    /// Freed blocks wait this many lease terms before they are deleted.
    pub dead_terms: u32,
    /// A data server is suspected when its last heartbeat is older.
    pub server_suspect_ms: u32,
    /// A data server is down when its last heartbeat is older.
    pub server_timeout_ms: u32,
    /// A server that is down for so long is out: its groups move to others.
    pub out_after_ms: u32,
    /// How often the placement is looked at: groups that should move.
    pub reshape_ms: u32,
    /// A layout that nothing uses is kept for so long if sessions may still commit blocks under it.
    pub layout_keep_ms: u32,
    /// Groups that move at once to even out the servers.
    pub rebalance_groups: usize,
    /// Bytes per second that repair, moves and scrub take on each server; 0: no bound. Administrators may change it.
    pub repair_rate: u64,
    /// Blocks that repair looks at in one step.
    pub repair_blocks: usize,
    /// A group whose repair failed is tried again after this.
    pub repair_retry_ms: u32,
    /// One request to pull pieces, beside the time that its bytes take at the allowed rate.
    pub pull_timeout_ms: u32,
    /// Bytes of blocks in one such request.
    pub pull_bytes: u64,
    /// So long after a session was cut off, servers are searched for what it put too late.
    pub search_after_ms: u32,
    /// How far a scrub is, is written down so often.
    pub scrub_save_ms: u32,
    /// One call to a data server.
    pub peer_timeout_ms: u32,
    /// Copies of new data; `None`: one on a single server, else two.
    pub redundancy: Option<Scheme>,
    /// Placement groups of a new layout.
    pub groups: u32,
    /// Name of the volume made at the first start.
    pub volume: String,
    /// Largest block of that volume.
    pub block_size: u32,
    /// Compression of that volume.
    pub compression: Compression,
    /// Most sessions.
    pub sessions_max: usize,
    /// Most results kept for one session before it must acknowledge some.
    pub outcomes_max: usize,
    /// Most inodes remembered for one session; beyond it, it counts as holding all.
    pub known_max: usize,
    /// Most events waiting for one session; beyond it, its leases end.
    pub events_max: usize,
    /// Most requests of one session that wait for recalls, locks or events.
    pub waiting_max: usize,
    /// Extents that one batch removes at most; more are removed by the upkeep.
    pub trim_extents: usize,
    /// The upkeep works in bounded pieces at most so long in each tick.
    pub chores_ms: u32,
    /// Inode numbers left out at a start with sessions: those that answers named and a crash took may be replayed. More
    /// than the makes that the engine's queue holds.
    pub ino_gap: u64,
    /// Most block ids in one grant.
    pub ids_max: u32,
    /// Longest wait of one Listen.
    pub listen_ms_max: u32,
    /// A batch's time is noted when the last note is older.
    pub batch_time_ms: u32,
    /// Most dead blocks named in one call to a data server.
    pub delete_batch: usize,
    /// Where this service listens, for people.
    pub address: String,
    /// Where its log is kept, for people.
    pub engine: String,
    /// A dump of the metadata is put onto the data servers so often; 0: never.
    pub dump_every_ms: u64,
    /// The first one at the earliest so long after the start.
    pub dump_first_ms: u32,
    /// How many servers get it.
    pub dump_copies: usize,
    /// How many dumps are kept.
    pub dumps_kept: usize,
    /// Most pairs in one piece of a dump.
    pub dump_pairs: usize,
    /// Most bytes of changes kept for one dump between two of its pieces.
    pub dump_tape_bytes: usize,
    /// A dump is given up when no piece was asked for in so long.
    pub dump_patience_ms: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            lease_ms: 3_000,
            lease_margin_ms: 500,
            session_ms: 60_000,
            tick_ms: 50,
            dead_terms: 2,
            server_suspect_ms: 3_000,
            server_timeout_ms: 10_000,
            out_after_ms: 600_000,
            reshape_ms: 1_000,
            layout_keep_ms: 600_000,
            rebalance_groups: 8,
            repair_rate: 128 << 20,
            repair_blocks: 1_024,
            repair_retry_ms: 30_000,
            pull_timeout_ms: 60_000,
            pull_bytes: 64 << 20,
            search_after_ms: 3_600_000,
            scrub_save_ms: 10_000,
            peer_timeout_ms: 10_000,
            redundancy: None,
            groups: 64,
            volume: "main".into(),
            block_size: 4 << 20,
            compression: Compression::Lz4,
            sessions_max: 10_000,
            outcomes_max: 4_096,
            known_max: 1_000_000,
            events_max: 16_384,
            waiting_max: 4_096,
            trim_extents: 512,
            chores_ms: 5,
            ino_gap: 1 << 17,
            ids_max: 65_536,
            listen_ms_max: 30_000,
            batch_time_ms: 10_000,
            delete_batch: 1_024,
            address: String::new(),
            engine: "embedded".into(),
            dump_every_ms: 3_600_000,
            dump_first_ms: 60_000,
            dump_copies: 3,
            dumps_kept: 48,
            dump_pairs: 16_384,
            dump_tape_bytes: 64 << 20,
            dump_patience_ms: 60_000,
        }
    }
}

impl Config {
    /// How long the service honours a lease after it received the renewal.
    pub fn lease_term(&self) -> Duration {
        Duration::from_millis(u64::from(self.lease_ms) + u64::from(self.lease_margin_ms))
    }

    /// How long the service keeps a session after it received the renewal.
    pub fn session_term(&self) -> Duration {
        Duration::from_millis(u64::from(self.session_ms) + u64::from(self.lease_margin_ms))
    }
}
