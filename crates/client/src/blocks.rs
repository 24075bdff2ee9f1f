//! The bytes of blocks: put to every server of their group, fetched from the fastest that has them.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use torchfs_proto::attr::Compression;
use torchfs_proto::extent::{BlockRef, NewBlock};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result};

use crate::{Connector, Meta};

/// Settings of [`Blocks`].
#[derive(Clone, Debug, Default)]
pub struct BlocksConfig {}

/// Puts and fetches blocks.
pub struct Blocks {
    _meta: Arc<Meta>,
}

impl Blocks {
    /// Uses the placement that `meta` knows.
    pub fn new(meta: Arc<Meta>, _connector: Arc<dyn Connector>, _config: BlocksConfig) -> Arc<Blocks> {
        Arc::new(Blocks { _meta: meta })
    }

    /// Puts a block; returns when every piece is durable. What is returned goes into the commit that names the block.
    pub async fn put(
        &self,
        _id: BlockId,
        _layout: LayoutId,
        _data: Vec<Bytes>,
        _compression: Compression,
    ) -> Result<NewBlock> {
        Err(Fault::new(Code::Unsupported, "comes with the next commit"))
    }

    /// Fetches chunks of a block, checked and unpacked, one `Bytes` each. `Gone` when no server has the block: the
    /// extents may be old, fetch them again once.
    pub async fn get(&self, _block: &BlockRef, _chunks: Range<u16>) -> Result<Vec<Bytes>> {
        Err(Fault::new(Code::Unsupported, "comes with the next commit"))
    }
}
