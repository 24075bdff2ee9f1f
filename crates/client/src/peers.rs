//! Data servers as the metadata service reaches them: deletions of what a committed batch declared dead, and repair.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use torchfs_proto::msg::block::{Op, PieceInfo, PullItem, Reply};
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

    /// Which of these pieces a server does not have.
    pub async fn missing(&self, addr: &str, pieces: Vec<(BlockId, u8)>) -> Result<Vec<(BlockId, u8)>> {
        match self.ask(addr, Op::Missing { pieces }, self.config.timeout).await? {
            Reply::Missing { pieces } => Ok(pieces),
            other => Err(odd(addr, &other)),
        }
    }

    /// Has a server get pieces from others. Answers what failed (place in the request, why) and the bytes stored.
    pub async fn pull(
        &self,
        addr: &str,
        items: Vec<PullItem>,
        rate: u64,
        limit: Duration,
    ) -> Result<(Vec<(u32, Fault)>, u64)> {
        match self.ask(addr, Op::Pull { items, rate }, limit).await? {
            Reply::Pulled { failed, bytes } => Ok((failed, bytes)),
            other => Err(odd(addr, &other)),
        }
    }

    /// Lets a server forget pieces that belong elsewhere; returns when that is durable.
    pub async fn forget(&self, addr: &str, pieces: Vec<(BlockId, u8)>) -> Result<()> {
        self.tell(addr, Op::Drop { pieces }).await
    }

    /// What a server stores after this piece, and whether nothing follows.
    pub async fn list(
        &self,
        addr: &str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> Result<(Vec<PieceInfo>, bool)> {
        match self.ask(addr, Op::List { after, limit }, self.config.timeout).await? {
            Reply::Listed { pieces, end } => Ok((pieces, end)),
            other => Err(odd(addr, &other)),
        }
    }

    /// Has a server read and check what it stores after this piece.
    pub async fn scrub(
        &self,
        addr: &str,
        after: Option<(BlockId, u8)>,
        pieces: u32,
        rate: u64,
        limit: Duration,
    ) -> Result<Scrubbed> {
        match self.ask(addr, Op::Scrub { after, limit: pieces, rate }, limit).await? {
            Reply::Scrubbed { bad, after, pieces, bytes } => Ok(Scrubbed { bad, after, pieces, bytes }),
            other => Err(odd(addr, &other)),
        }
    }

    async fn tell(&self, addr: &str, op: Op) -> Result<()> {
        match self.ask(addr, op, self.config.timeout).await? {
            Reply::Done => Ok(()),
            other => Err(odd(addr, &other)),
        }
    }

    async fn ask(&self, addr: &str, op: Op, limit: Duration) -> Result<Reply> {
        let link = {
            let mut links = self.links.lock();
            links.entry(addr.to_string()).or_insert_with(|| self.connector.link(addr)).clone()
        };
        ask_data(&link, op, limit).await
    }
}

/// A part of a scrub.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scrubbed {
    /// Pieces that were bad and are forgotten.
    pub bad: Vec<(BlockId, u8)>,
    /// Go on after this piece; none at the end.
    pub after: Option<(BlockId, u8)>,
    /// Pieces read.
    pub pieces: u64,
    /// Bytes read.
    pub bytes: u64,
}

fn odd(addr: &str, reply: &Reply) -> Fault {
    Fault::new(Code::Protocol, format!("data server at {addr} gave another kind of answer: {reply:?}"))
}
