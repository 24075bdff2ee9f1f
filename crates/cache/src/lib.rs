//! What this node keeps of blocks in memory, and the one fetch in flight for each run of chunks.
//!
//! Blocks never change, so what is here is right for ever; the only questions are what to keep (`plan`) and how to fetch
//! nothing twice. Chunks that several callers miss at the same time are fetched once: the first claims the run, the others
//! join its fetch. A fetch runs in whoever waits for it. If the one who claimed it goes away, the others drive it on;
//! if all go away it is dropped and its claim with it.
//!
//! # Invariants
//! - Bytes kept stay within `bytes_max`, except for what callers hold.
//! - A chunk has at most one fetch in flight, and a claim never outlives its fetch.
//! - What is here is answered at the first poll.
//!
//! # Not here
//! Where chunks come from and whether they are right ([`Fetch`]); tiers on disk and among peers.

pub mod metrics;
mod plan;

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::ops::Range;
use std::sync::Arc;

use ::metrics::{Counter, Gauge};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared, join_all};
use parking_lot::Mutex;
use torchfs_proto::chunk::MAX_CHUNKS;
use torchfs_proto::extent::BlockRef;
use torchfs_proto::{BlockId, Code, Fault, Result};

use plan::{Policy, Slot};

/// Where chunks come from when they are not here.
pub trait Fetch: Send + Sync + 'static {
    /// Fetches chunks of a block, checked and unpacked, one `Bytes` each.
    fn fetch(&self, block: &BlockRef, chunks: Range<u16>) -> BoxFuture<'static, Result<Vec<Bytes>>>;
}

/// Settings of [`Cache`].
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Bytes of content kept at most.
    pub bytes_max: u64,
}

impl Default for CacheConfig {
    fn default() -> CacheConfig {
        CacheConfig { bytes_max: 256 << 20 }
    }
}

/// The chunks this node keeps.
pub struct Cache {
    inner: Arc<Inner>,
}

type Key = (BlockId, u16);

/// The result of one fetch, shared by all who wait for it.
type Fetched = Result<Arc<Vec<Bytes>>>;
type Flight = Shared<BoxFuture<'static, Fetched>>;

struct Inner {
    fetch: Arc<dyn Fetch>,
    config: CacheConfig,
    state: Mutex<State>,
    hits: Counter,
    misses: Counter,
    joins: Counter,
    evicted: Counter,
    kept: Gauge,
}

struct State {
    kept: HashMap<Key, Kept>,
    policy: Policy<Key>,
    claims: HashMap<Key, Claimed>,
    next: u64,
}

struct Kept {
    bytes: Bytes,
    slot: Slot,
    /// The bytes are part of a larger buffer, which they keep alive.
    part: bool,
    /// Fetched ahead and not asked for since: the first who asks is what it was fetched for, and no second use.
    ahead: bool,
}

/// A chunk on its way.
struct Claimed {
    /// Tells claims apart that followed each other on one chunk.
    number: u64,
    first: u16,
    flight: WeakShared<BoxFuture<'static, Fetched>>,
}

/// Where one chunk of an answer comes from.
enum Source {
    Here(Bytes),
    /// Of the flight with this index, the chunk with this one.
    Coming(usize, usize),
}

impl Cache {
    /// An empty cache before a source.
    pub fn new(fetch: Arc<dyn Fetch>, config: CacheConfig) -> Arc<Cache> {
        let state = State {
            kept: HashMap::new(),
            policy: Policy::new(config.bytes_max),
            claims: HashMap::new(),
            next: 0,
        };
        Arc::new(Cache {
            inner: Arc::new(Inner {
                fetch,
                config,
                state: Mutex::new(state),
                hits: ::metrics::counter!(metrics::HITS),
                misses: ::metrics::counter!(metrics::MISSES),
                joins: ::metrics::counter!(metrics::JOINS),
                evicted: ::metrics::counter!(metrics::EVICTED),
                kept: ::metrics::gauge!(metrics::BYTES),
            }),
        })
    }

    /// The chunks of a range, one `Bytes` each. What is here is answered at the first poll; what is on its way is joined;
    /// the rest is fetched, neighbours in one request.
    pub async fn get(&self, block: &BlockRef, chunks: Range<u16>) -> Result<Vec<Bytes>> {
        let (sources, flights) = self.inner.sources(block, chunks, true);
        if flights.is_empty() {
            return Ok(sources.into_iter().filter_map(Source::here).collect());
        }
        let fetched = join_all(flights).await;
        let chunk = |source| match source {
            Source::Here(bytes) => Ok(bytes),
            Source::Coming(flight, index) => {
                let fetched = fetched[flight].as_ref().map_err(Fault::clone)?;
                fetched.get(index).cloned().ok_or_else(|| Code::Internal.into())
            }
        };
        sources.into_iter().map(chunk).collect()
    }

    /// What of a range is here, without fetching: the chunks, if all are.
    pub fn find(&self, block: BlockId, chunks: Range<u16>) -> Option<Vec<Bytes>> {
        let mut state = self.inner.state.lock();
        if !chunks.clone().all(|index| state.kept.contains_key(&(block, index))) {
            return None;
        }
        chunks.map(|index| state.use_kept((block, index))).collect()
    }

    /// Fetches what is neither here nor on its way. The future does the work, so somebody has to drive it; faults are left to
    /// those who will ask.
    pub async fn prefetch(&self, block: &BlockRef, chunks: Range<u16>) {
        let (_, flights) = self.inner.sources(block, chunks, false);
        join_all(flights).await;
    }

    /// Keeps chunks that were just written, from the chunk `first` on. Each but the block's last has the full length.
    pub fn insert(&self, id: BlockId, first: u16, chunks: Vec<Bytes>) {
        self.inner.keep(id, first, &chunks, false);
    }

    /// Forgets a block.
    pub fn remove(&self, id: BlockId) {
        let mut state = self.inner.state.lock();
        for index in 0..MAX_CHUNKS as u16 {
            if let Some(kept) = state.kept.remove(&(id, index)) {
                state.policy.remove(kept.slot);
            }
        }
        self.inner.kept.set(state.policy.bytes() as f64);
    }

    /// Bytes kept now.
    pub fn bytes(&self) -> u64 {
        self.inner.state.lock().policy.bytes()
    }
}

impl Source {
    fn here(self) -> Option<Bytes> {
        match self {
            Source::Here(bytes) => Some(bytes),
            Source::Coming(..) => None,
        }
    }
}

impl Inner {
    /// Finds, joins or claims every chunk of a range. With `join` false, chunks that are here or on their way are let be.
    fn sources(
        self: &Arc<Inner>,
        block: &BlockRef,
        chunks: Range<u16>,
        join: bool,
    ) -> (Vec<Source>, Vec<Flight>) {
        let mut sources = Vec::with_capacity(chunks.len());
        let mut flights: Vec<(u64, Flight)> = Vec::new();
        let mut unwanted = Vec::new(); // the last holder of a flight drops it, which must not happen under the lock
        let (mut hits, mut joins, mut misses) = (0, 0, 0);
        let mut state = self.state.lock();
        let mut index = chunks.start;
        while index < chunks.end {
            let key = (block.id, index);
            if !join && state.kept.contains_key(&key) {
                index += 1;
            } else if let Some(bytes) = state.use_kept(key) {
                hits += 1;
                sources.push(Source::Here(bytes));
                index += 1;
            } else if let Some((number, first, flight)) = state.claims.get(&key).and_then(Claimed::join) {
                if join {
                    joins += 1;
                    let known = flights.iter().position(|(known, _)| *known == number);
                    sources.push(Source::Coming(known.unwrap_or(flights.len()), usize::from(index - first)));
                    match known {
                        Some(_) => unwanted.push(flight),
                        None => flights.push((number, flight)),
                    }
                } else {
                    unwanted.push(flight);
                }
                index += 1;
            } else {
                // Up to the next chunk that is here or on its way. A claim that just ended is overwritten.
                let mut end = index + 1;
                while end < chunks.end && !state.kept.contains_key(&(block.id, end)) {
                    match state.claims.get(&(block.id, end)).and_then(Claimed::join) {
                        Some((.., flight)) => {
                            unwanted.push(flight);
                            break;
                        }
                        None => end += 1,
                    }
                }
                misses += u64::from(end - index);
                sources.extend((0..usize::from(end - index)).map(|at| Source::Coming(flights.len(), at)));
                flights.push(self.claim(&mut state, block, index..end, !join));
                index = end;
            }
        }
        drop(state);
        drop(unwanted);
        self.hits.increment(hits);
        self.joins.increment(joins);
        self.misses.increment(misses);
        (sources, flights.into_iter().map(|(_, flight)| flight).collect())
    }

    /// Claims a run of chunks: whoever misses them from now on joins this fetch.
    fn claim(
        self: &Arc<Inner>,
        state: &mut State,
        block: &BlockRef,
        chunks: Range<u16>,
        ahead: bool,
    ) -> (u64, Flight) {
        state.next += 1;
        let number = state.next;
        let claim = Claim { inner: self.clone(), block: block.id, chunks: chunks.clone(), number };
        let (id, inner, block) = (block.id, self.clone(), block.clone());
        let flight = async move {
            let claim = claim;
            let fetching = inner.fetch.fetch(&block, claim.chunks.clone());
            let fetched = fetching.await?;
            if fetched.len() != claim.chunks.len() {
                let what = format!(
                    "{} chunks of block {} came, {} were asked for",
                    fetched.len(),
                    block.id,
                    claim.chunks.len()
                );
                return Err(Fault::new(Code::Internal, what));
            }
            inner.keep(block.id, claim.chunks.start, &fetched, ahead);
            Ok(Arc::new(fetched))
        }
        .boxed()
        .shared();
        let Some(weak) = flight.downgrade() else {
            unreachable!("a future that was never polled has not ended")
        };
        for index in chunks.clone() {
            let claimed = Claimed { number, first: chunks.start, flight: weak.clone() };
            state.claims.insert((id, index), claimed);
        }
        (number, flight)
    }

    /// Keeps chunks and makes room for them.
    fn keep(&self, id: BlockId, first: u16, chunks: &[Bytes], ahead: bool) {
        let part = chunks.len() > 1;
        let mut evicted = 0;
        let mut out = Vec::new(); // freed after the lock
        let mut state = self.state.lock();
        let State { kept, policy, .. } = &mut *state;
        for (index, bytes) in (first..).zip(chunks) {
            let size = bytes.len() as u64;
            if size == 0 || size > self.config.bytes_max {
                continue;
            }
            if let MapEntry::Vacant(vacant) = kept.entry((id, index)) {
                let slot = policy.admit((id, index), size);
                vacant.insert(Kept { bytes: bytes.clone(), slot, part, ahead });
            }
        }
        while policy.bytes() > self.config.bytes_max
            && let Some(key) = policy.evict()
        {
            out.extend(kept.remove(&key));
            evicted += 1;
        }
        self.kept.set(policy.bytes() as f64);
        drop(state);
        drop(out);
        self.evicted.increment(evicted);
    }
}

impl State {
    /// A kept chunk, which is thereby used.
    fn use_kept(&mut self, key: Key) -> Option<Bytes> {
        let kept = self.kept.get_mut(&key)?;
        if std::mem::take(&mut kept.ahead) {
            return Some(kept.bytes.clone());
        }
        let promoted = self.policy.touch(kept.slot);
        if promoted && kept.part {
            // It will outlive its neighbours: let it not keep their memory alive.
            kept.bytes = Bytes::copy_from_slice(&kept.bytes);
            kept.part = false;
        }
        Some(kept.bytes.clone())
    }
}

impl Claimed {
    /// The fetch, unless all who waited for it are gone.
    fn join(&self) -> Option<(u64, u16, Flight)> {
        Some((self.number, self.first, self.flight.upgrade()?))
    }
}

/// Lives in a fetch and ends the claim with it, however it ends.
struct Claim {
    inner: Arc<Inner>,
    block: BlockId,
    chunks: Range<u16>,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        for index in self.chunks.clone() {
            if let MapEntry::Occupied(claimed) = state.claims.entry((self.block, index))
                && claimed.get().number == self.number
            {
                claimed.remove();
            }
        }
    }
}
