//! Dumps of the metadata: made while requests go on, kept on the data servers, and taken in again when all else is lost.
//!
//! [`tape`] makes a dump in pieces, for people (`torchfs meta dump`) and for [`server::Keeper`], which puts one onto the
//! data servers every hour. [`restore`] fills an empty engine from a dump. [`sweep`] then has the data servers forget what
//! was written after the dump: the restored metadata does not know it, and never will. And it finds what moved since.
//!
//! # Invariants
//! - A dump is the state after one batch, and that batch is durable before the dump ends.
//! - Making a dump holds neither the service's lock nor a snapshot of the replica for longer than one piece takes.
//! - After a restore nothing is given out that was given out before: not an id of a block or a session, not a fence.
//!
//! # Not here
//! - The bytes of a dump: `engine::dump`. Files on data servers: `block/src/dumps.rs`.

pub mod restore;
pub mod server;
mod sweep;
pub(crate) mod tape;

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use torchfs_proto::dump::DumpName;
use torchfs_proto::layout::ServerInfo;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::msg::dump::{DumpInfo, DumpReport};
use torchfs_proto::record::Restored;
use torchfs_proto::{BlockId, Result, key};

use crate::config::Config;
use crate::service::{Meta, State};
use crate::view::View;
use tape::Tapes;

/// How the service reaches data servers for dumps.
pub trait DumpPeers: Send + Sync + 'static {
    /// Puts the next part of a dump; with the checksum of the whole it is complete and durable.
    fn put<'a>(
        &'a self,
        addr: &'a str,
        name: DumpName,
        offset: u64,
        part: Bytes,
        end: Option<u32>,
    ) -> BoxFuture<'a, Result<()>>;

    /// The dumps that a server has.
    fn list<'a>(&'a self, addr: &'a str) -> BoxFuture<'a, Result<Vec<DumpInfo>>>;

    /// Has dumps deleted.
    fn delete<'a>(&'a self, addr: &'a str, names: Vec<DumpName>) -> BoxFuture<'a, Result<()>>;

    /// Pieces that a server stores after this one, in the order of ids, and whether none follow.
    fn pieces<'a>(
        &'a self,
        addr: &'a str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> BoxFuture<'a, Result<(Vec<PieceInfo>, bool)>>;

    /// Has blocks deleted; answered when that is durable.
    fn delete_blocks<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>>;
}

/// What the service holds in memory about dumps.
pub(crate) struct Dumps {
    /// Those being made.
    pub tapes: Tapes,
    /// Those that were made.
    pub kept: Kept,
    /// The load that this store came from, if it came from one.
    pub restored: Option<Restored>,
}

/// The newest dump on the data servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    pub newest: Option<DumpName>,
    pub copies: u32,
    pub bytes: u64,
    pub failure: String,
    /// When the service was opened, in milliseconds since 1970.
    pub opened_ms: u64,
}

impl Dumps {
    /// As a store that was just opened has it.
    pub fn load(view: &View<'_>, config: &Config) -> Result<Dumps> {
        let restored = view.get(&key::restored())?;
        let opened_ms = ms(view.now.secs.saturating_mul(1_000_000_000));
        Ok(Dumps { tapes: Tapes::new(config), kept: Kept { opened_ms, ..Kept::default() }, restored })
    }

    /// Known servers on which nothing was looked for since the store was restored.
    pub fn unswept(&self, servers: &[ServerInfo]) -> usize {
        let Some(restored) = &self.restored else { return 0 };
        servers.iter().filter(|server| !restored.swept.contains(&server.id)).count()
    }
}

impl Meta {
    /// The dumps for a status page, and what needs attention about them.
    pub(crate) fn dump_report(&self, state: &State, warnings: &mut Vec<String>) -> DumpReport {
        let kept = &state.dumps.kept;
        let every = Duration::from_millis(self.config.dump_every_ms);
        let report = DumpReport {
            every_s: every.as_secs(),
            newest_ms: kept.newest.map(|name| name.wall_ms),
            copies: kept.copies,
            bytes: kept.bytes,
            failure: kept.failure.clone(),
        };
        let servers = state.members.servers();
        if every.is_zero() {
            warnings.push(
                "no dumps of the metadata are made: the loss of its disk is the loss of everything"
                    .to_string(),
            );
        } else if !servers.is_empty() {
            let since = kept.newest.map_or(kept.opened_ms, |name| name.wall_ms);
            let age = Duration::from_millis(ms(self.clock.wall_ns()).saturating_sub(since));
            if age > every * 2 + Duration::from_millis(u64::from(self.config.dump_first_ms)) {
                let why = if kept.failure.is_empty() { String::new() } else { format!(": {}", kept.failure) };
                warnings.push(match kept.newest {
                    Some(_) => {
                        format!("the newest dump of the metadata is {} minutes old{why}", age.as_secs() / 60)
                    }
                    None => format!("the data servers have no dump of the metadata yet{why}"),
                });
            }
        }
        let unswept = state.dumps.unswept(&servers);
        if let Some(restored) = state.dumps.restored.as_ref().filter(|_| unswept > 0) {
            warnings.push(format!(
                "the metadata was restored from its batch {}; {unswept} data servers are still to be searched for what \
                 was written after it",
                restored.from
            ));
        }
        report
    }
}

/// Nanoseconds since 1970 in milliseconds; what was before counts as then.
pub(crate) fn ms(wall_ns: i64) -> u64 {
    u64::try_from(wall_ns / 1_000_000).unwrap_or(0)
}
