//! The bytes of blocks: put to every server of their group, fetched from the fastest that has them.
//!
//! - `put`: pack, place, wait until all pieces are durable · `get`: pick a source, hedge, verify · `coded`: the same where pieces
//!   are parts · `report`: bad pieces are told to the metadata service · `servers`: the data servers and how they are doing ·
//!   `scheme`: how a block becomes pieces.
//!
//! # Invariants
//! - What `get` returns matches the checksums that the writer computed for exactly this block and these chunks.
//! - What `put` returns is durable on a server for every piece, and names every piece that is not where its group says.

mod coded;
mod get;
mod put;
mod report;
mod scheme;
mod servers;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::{BlockRef, NewBlock};
use torchfs_proto::layout::{Layout, Placement};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result};

use crate::{Connector, Meta};
use report::Reports;
use servers::Servers;

/// Settings of [`Blocks`].
#[derive(Clone, Debug)]
pub struct BlocksConfig {
    /// Puts and gets end after this with the last fault that they met.
    pub op_timeout: Duration,
    /// One server may take so long for one put.
    pub put_timeout: Duration,
    /// One server may take so long for one get.
    pub get_timeout: Duration,
    /// The pause before all servers are tried again.
    pub pause: Duration,
    /// A read asks a second server when the first took so many times longer than it usually does.
    pub hedge_factor: u32,
    /// And not before this.
    pub hedge_min: Duration,
    /// A server that failed is asked last for so long.
    pub shun: Duration,
    /// Bytes of puts in flight; further ones wait.
    pub put_bytes_max: u64,
    /// Blocks from this size on are packed and unpacked on threads for blocking work.
    pub offload_from: usize,
    /// The level of zstd.
    pub zstd_level: i32,
}

impl Default for BlocksConfig {
    fn default() -> BlocksConfig {
        BlocksConfig {
            op_timeout: Duration::from_secs(300),
            put_timeout: Duration::from_secs(30),
            get_timeout: Duration::from_secs(30),
            pause: Duration::from_millis(100),
            hedge_factor: 8,
            hedge_min: Duration::from_millis(50),
            shun: Duration::from_secs(5),
            put_bytes_max: 256 << 20,
            offload_from: 128 << 10,
            zstd_level: 3,
        }
    }
}

/// Puts and fetches blocks.
pub struct Blocks {
    meta: Arc<Meta>,
    servers: Servers,
    reports: Arc<Reports>,
    /// In units of [`UNIT`] bytes.
    room: Semaphore,
    units: u32,
    config: BlocksConfig,
}

/// The room for puts is counted in such units, since a semaphore counts in u32.
const UNIT: u64 = 4096;

impl Blocks {
    /// Uses the session's placement, and asks for a newer one when a server says that it is old.
    pub fn new(meta: Arc<Meta>, connector: Arc<dyn Connector>, config: BlocksConfig) -> Arc<Blocks> {
        let units = u32::try_from(config.put_bytes_max / UNIT).unwrap_or(u32::MAX).max(1);
        let servers = Servers::new(connector, meta.runtime().clone());
        let reports = Arc::default();
        Arc::new(Blocks { meta, servers, reports, room: Semaphore::new(units as usize), units, config })
    }

    /// Puts a block of at most 16 MiB; returns when every piece is durable. It goes to the layout that is in use where this one
    /// was chosen. What is returned goes into the commit that names the block. Dropping the future leaves pieces that
    /// nobody names; garbage collection removes them.
    pub async fn put(
        &self,
        id: BlockId,
        layout: LayoutId,
        data: Vec<Bytes>,
        compression: Compression,
    ) -> Result<NewBlock> {
        self.put_block(id, layout, data, compression).await
    }

    /// Fetches chunks of a block, checked and unpacked, one `Bytes` each. `Gone` when no server has the block: the
    /// extents may be old, fetch them again once.
    pub async fn get(&self, block: &BlockRef, chunks: Range<u16>) -> Result<Vec<Bytes>> {
        self.get_chunks(block, chunks).await
    }

    /// A placement that has this layout, fetched again if it is not known yet.
    async fn placement(&self, id: LayoutId) -> Result<Arc<Placement>> {
        let placement = self.meta.placement();
        match placement.layout(id) {
            Some(_) => Ok(placement),
            None => self.meta.fetch_placement().await,
        }
    }
}

fn layout(placement: &Placement, id: LayoutId) -> Result<&Layout> {
    let unknown = || Fault::new(Code::Invalid, format!("layout {id} is not in the placement"));
    placement.layout(id).ok_or_else(unknown)
}
