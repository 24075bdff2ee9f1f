//! Deletions: what the metadata service tells data servers once a committed batch declared blocks dead.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use torchfs_proto::msg::block::{Op, Reply};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Result};
use torchfs_rpc::Link;

use crate::tool::ask_data;
use crate::{Connector, ToolConfig};

/// Most blocks named in one request.
const BATCH: usize = 8192;

/// Data servers by their address. Needs to be used within a tokio runtime.
pub struct Peers {
    connector: Arc<dyn Connector>,
    links: Mutex<HashMap<String, Link>>,
    config: ToolConfig,
}

impl Peers {
    /// Connects to nobody yet.
    pub fn new(connector: Arc<dyn Connector>, config: ToolConfig) -> Peers {
        Peers { connector, links: Mutex::default(), config }
    }

    /// Lets a server forget dead blocks; returns when that is durable.
    pub async fn delete(&self, addr: &str, blocks: &[BlockId]) -> Result<()> {
        for batch in blocks.chunks(BATCH) {
            self.tell(addr, Op::Delete { blocks: batch.to_vec() }).await?;
        }
        Ok(())
    }

    /// Lets a server forget every block of a dead range except these; returns when that is durable.
    pub async fn purge(&self, addr: &str, range: IdRange, keep: Vec<BlockId>) -> Result<()> {
        self.tell(addr, Op::Purge { range, keep }).await
    }

    async fn tell(&self, addr: &str, op: Op) -> Result<()> {
        let link = {
            let mut links = self.links.lock();
            links.entry(addr.to_string()).or_insert_with(|| self.connector.link(addr)).clone()
        };
        match ask_data(&link, op, self.config.timeout).await? {
            Reply::Done => Ok(()),
            other => Err(Fault::new(
                Code::Protocol,
                format!("data server at {addr} answered a deletion with {other:?}"),
            )),
        }
    }
}
