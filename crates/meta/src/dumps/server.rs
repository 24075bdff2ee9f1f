//! The keeper: a task that puts a dump onto data servers every hour, removes old ones, and has restored stores searched.
//!
//! Pieces of a dump are made by threads that may wait for a disk, and go to a few servers at once as they are made; the
//! metadata's own disk is not written. A server that fails is left out; the dump counts if one server has it whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use torchfs_proto::attr::Raw;
use torchfs_proto::dump::DumpName;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::msg::dump::{DUMP_PART_MAX, DumpInfo};
use torchfs_proto::msg::meta::Done;
use torchfs_proto::{BlockId, Code, Fault, Result};

use super::{DumpPeers, ms};
use crate::metrics;
use crate::server::within;
use crate::service::Meta;

/// After a failure the next try comes at the latest after this.
const RETRY_MAX: Duration = Duration::from_secs(60);

impl DumpPeers for torchfs_client::Dumps {
    fn put<'a>(
        &'a self,
        addr: &'a str,
        name: DumpName,
        offset: u64,
        part: Bytes,
        end: Option<u32>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(torchfs_client::Dumps::put(self, addr, name, offset, part, end))
    }

    fn list<'a>(&'a self, addr: &'a str) -> BoxFuture<'a, Result<Vec<DumpInfo>>> {
        Box::pin(torchfs_client::Dumps::list(self, addr))
    }

    fn delete<'a>(&'a self, addr: &'a str, names: Vec<DumpName>) -> BoxFuture<'a, Result<()>> {
        Box::pin(torchfs_client::Dumps::delete(self, addr, names))
    }

    fn pieces<'a>(
        &'a self,
        addr: &'a str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> BoxFuture<'a, Result<(Vec<PieceInfo>, bool)>> {
        Box::pin(torchfs_client::Dumps::pieces(self, addr, after, limit))
    }

    fn delete_blocks<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, Result<()>> {
        Box::pin(torchfs_client::Dumps::delete_blocks(self, addr, blocks))
    }
}

/// The running task; dropping it ends it.
pub struct Keeper(tokio::task::JoinHandle<()>);

impl Keeper {
    /// Starts it; needs a runtime around it.
    pub fn start(meta: Arc<Meta>, peers: Arc<dyn DumpPeers>) -> Keeper {
        Keeper(tokio::spawn(run(meta, peers)))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The next piece of a dump, made by a thread that may wait.
pub(crate) async fn piece(meta: Arc<Meta>, cursor: Raw) -> Result<Done> {
    match tokio::task::spawn_blocking(move || meta.dump_piece(&cursor)).await {
        Ok(done) => done,
        Err(_) => Err(Fault::new(Code::Internal, "making a dump panicked; the log has the place")),
    }
}

async fn run(meta: Arc<Meta>, peers: Arc<dyn DumpPeers>) {
    let every = Duration::from_millis(meta.config().dump_every_ms);
    let first = Duration::from_millis(u64::from(meta.config().dump_first_ms));
    let pause = (every / 10).clamp(Duration::from_millis(50), Duration::from_secs(1));
    let mut due = Instant::now() + every.min(first);
    let mut looked = false;
    loop {
        while meta.sweep(&*peers).await {}
        if !every.is_zero() {
            if !looked && let Some(age) = look(&meta, &*peers).await {
                // A restart does not put off a dump that is due, nor does it bring one forward by more than that.
                due = due.max(Instant::now() + every.saturating_sub(age));
                looked = true;
            }
            if Instant::now() >= due {
                due = Instant::now() + keep_one(&meta, &*peers).await.unwrap_or((every / 10).min(RETRY_MAX));
                looked = true;
            }
            tell_age(&meta);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Makes a dump, remembers what came of it, and removes old ones; answers when the next one is due.
async fn keep_one(meta: &Arc<Meta>, peers: &dyn DumpPeers) -> Option<Duration> {
    let made = make(meta, peers).await;
    let every = Duration::from_millis(meta.config().dump_every_ms);
    match made {
        Ok((name, copies, bytes)) => {
            metrics::dumped(bytes);
            tracing::info!("a dump of the metadata with {bytes} bytes is on {copies} data servers");
            {
                let kept = &mut meta.state.lock().dumps.kept;
                (kept.newest, kept.copies, kept.bytes) = (Some(name), copies, bytes);
                kept.failure.clear();
            }
            remove_old(meta, peers).await;
            Some(every)
        }
        Err(fault) => {
            metrics::dump_failed();
            tracing::warn!("no dump of the metadata was made: {fault}");
            meta.state.lock().dumps.kept.failure = fault.to_string();
            None
        }
    }
}

/// Makes a dump and puts it onto the servers with the most room; answers how many have it.
async fn make(meta: &Arc<Meta>, peers: &dyn DumpPeers) -> Result<(DumpName, u32, u64)> {
    let mut servers = servers_up(meta);
    servers.sort_by_key(|(_, free)| std::cmp::Reverse(*free));
    let mut addrs: Vec<String> = servers.into_iter().map(|(addr, _)| addr).collect();
    addrs.truncate(meta.config().dump_copies);
    if addrs.is_empty() {
        return Err(Fault::new(Code::Unreachable, "no data server is up to take it"));
    }
    let (header, mut cursor) = meta.begin_dump()?;
    let name = DumpName { incarnation: header.incarnation, seq: header.seq, wall_ms: ms(header.wall_ns) };
    let (mut offset, mut checksum) = (0, 0);
    loop {
        let done = piece(meta.clone(), cursor).await?;
        let Done::Dumped { bytes, cursor: next, .. } = done else {
            return Err(Fault::new(Code::Internal, "a piece of a dump is something else"));
        };
        let bytes = Bytes::from(Vec::from(bytes));
        for at in (0..bytes.len()).step_by(DUMP_PART_MAX) {
            let part = bytes.slice(at..bytes.len().min(at + DUMP_PART_MAX));
            checksum = crc32c::crc32c_append(checksum, &part);
            let last = next.is_empty() && at + part.len() == bytes.len();
            addrs = put_part(meta, peers, addrs, name, offset, &part, last.then_some(checksum)).await?;
            offset += part.len() as u64;
        }
        if next.is_empty() {
            return Ok((name, u32::try_from(addrs.len()).unwrap_or(u32::MAX), offset));
        }
        cursor = next;
    }
}

/// Puts a part onto all of these servers; answers those that took it, at least one.
async fn put_part(
    meta: &Meta,
    peers: &dyn DumpPeers,
    addrs: Vec<String>,
    name: DumpName,
    offset: u64,
    part: &Bytes,
    end: Option<u32>,
) -> Result<Vec<String>> {
    let limit = Duration::from_millis(u64::from(meta.config().peer_timeout_ms));
    let puts = addrs.iter().map(|addr| within(limit, peers.put(addr, name, offset, part.clone(), end)));
    let results = join_all(puts).await;
    let mut took = Vec::new();
    let mut failed = Fault::from(Code::Unreachable);
    for (addr, result) in addrs.into_iter().zip(results) {
        match result {
            Ok(()) => took.push(addr),
            Err(fault) => {
                tracing::warn!("the data server at {addr} does not take a dump: {fault}");
                failed = fault;
            }
        }
    }
    if took.is_empty() { Err(failed) } else { Ok(took) }
}

/// Looks what the data servers have from earlier; answers how old the newest is, once every server has told.
async fn look(meta: &Meta, peers: &dyn DumpPeers) -> Option<Duration> {
    let held = held(meta, peers).await;
    let known = meta.state.lock().members.servers().len();
    if known == 0 || held.len() < known {
        return None;
    }
    let newest = held.values().flatten().max_by_key(|dump| dump.name).copied()?;
    let copies = held.values().filter(|dumps| dumps.contains(&newest)).count();
    let mut state = meta.state.lock();
    let kept = &mut state.dumps.kept;
    (kept.newest, kept.bytes) = (Some(newest.name), newest.len);
    kept.copies = u32::try_from(copies).unwrap_or(u32::MAX);
    Some(Duration::from_millis(ms(meta.clock.wall_ns()).saturating_sub(newest.name.wall_ms)))
}

/// Keeps the newest dumps and has all others deleted, on every server that answers.
async fn remove_old(meta: &Meta, peers: &dyn DumpPeers) {
    let held = held(meta, peers).await;
    let names: BTreeSet<DumpName> = held.values().flatten().map(|dump| dump.name).collect();
    let kept: BTreeSet<DumpName> = names.into_iter().rev().take(meta.config().dumps_kept.max(1)).collect();
    let limit = Duration::from_millis(u64::from(meta.config().peer_timeout_ms));
    for (addr, dumps) in held {
        let old: Vec<DumpName> =
            dumps.iter().map(|dump| dump.name).filter(|name| !kept.contains(name)).collect();
        if old.is_empty() {
            continue;
        }
        if let Err(fault) = within(limit, peers.delete(&addr, old)).await {
            tracing::debug!("old dumps on {addr} wait: {fault}");
        }
    }
}

/// The dumps on every server that is up and answers.
async fn held(meta: &Meta, peers: &dyn DumpPeers) -> BTreeMap<String, Vec<DumpInfo>> {
    let limit = Duration::from_millis(u64::from(meta.config().peer_timeout_ms));
    let servers = servers_up(meta);
    let asked = join_all(servers.iter().map(|(addr, _)| within(limit, peers.list(addr)))).await;
    let answered = servers.iter().zip(asked);
    answered.filter_map(|((addr, _), dumps)| Some((addr.clone(), dumps.ok()?))).collect()
}

/// Where the servers that are up listen, and how much room they have.
fn servers_up(meta: &Meta) -> Vec<(String, u64)> {
    let servers = meta.state.lock().members.servers();
    servers.into_iter().filter(|server| server.up).map(|server| (server.addr, server.free)).collect()
}

fn tell_age(meta: &Meta) {
    if let Some(newest) = meta.state.lock().dumps.kept.newest {
        let age = ms(meta.clock.wall_ns()).saturating_sub(newest.wall_ms);
        metrics::dump_age(Duration::from_millis(age));
    }
}
