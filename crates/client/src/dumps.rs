//! Dumps of the metadata on data servers, and what a recovery asks of them.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use torchfs_proto::dump::DumpName;
use torchfs_proto::msg::block::{Op, PieceInfo, Reply, Request, method};
use torchfs_proto::msg::dump::{DumpInfo, DumpOp};
use torchfs_proto::{BlockId, Code, Fault, Result, msg};
use torchfs_rpc::{Call, Link};

use crate::{Connector, ToolConfig};

/// Data servers by their address, as keepers of dumps. Needs to be used within a tokio runtime.
pub struct Dumps {
    connector: Arc<dyn Connector>,
    links: Mutex<HashMap<String, Link>>,
    config: ToolConfig,
}

impl Dumps {
    /// Connects to nobody yet.
    pub fn new(connector: Arc<dyn Connector>, config: ToolConfig) -> Dumps {
        Dumps { connector, links: Mutex::default(), config }
    }

    /// Puts the next part of a dump; with the checksum of the whole it is complete and durable.
    pub async fn put(
        &self,
        addr: &str,
        name: DumpName,
        offset: u64,
        part: Bytes,
        end: Option<u32>,
    ) -> Result<()> {
        match self.ask(addr, Op::Dump(DumpOp::Put { name, offset, end }), part).await? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// The dumps that a server has, newest first.
    pub async fn list(&self, addr: &str) -> Result<Vec<DumpInfo>> {
        match self.ask(addr, Op::Dump(DumpOp::List), Bytes::new()).await? {
            (Reply::Dumps(dumps), _) => Ok(dumps),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// A part of a dump, shorter only where it ends, and the length of the whole.
    pub async fn fetch(&self, addr: &str, name: DumpName, offset: u64, len: u32) -> Result<(Bytes, u64)> {
        match self.ask(addr, Op::Dump(DumpOp::Get { name, offset, len }), Bytes::new()).await? {
            (Reply::DumpPart { total }, part) => Ok((part, total)),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// Lets a server forget dumps.
    pub async fn delete(&self, addr: &str, names: Vec<DumpName>) -> Result<()> {
        match self.ask(addr, Op::Dump(DumpOp::Delete { names }), Bytes::new()).await? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// Pieces that a server stores after this one, at most `limit` of them, and whether none follow.
    pub async fn pieces(
        &self,
        addr: &str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> Result<(Vec<PieceInfo>, bool)> {
        match self.ask(addr, Op::List { after, limit }, Bytes::new()).await? {
            (Reply::Listed { pieces, end }, _) => Ok((pieces, end)),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// Lets a server forget blocks; returns when that is durable.
    pub async fn delete_blocks(&self, addr: &str, blocks: Vec<BlockId>) -> Result<()> {
        match self.ask(addr, Op::Delete { blocks }, Bytes::new()).await? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(odd(addr, &other)),
        }
    }

    /// The highest incarnation among the blocks that a server stores; 0 if it stores none.
    pub async fn highest_incarnation(&self, addr: &str) -> Result<u32> {
        // Pieces are listed in the order of ids, so whether any lies behind an incarnation is one question.
        let (mut low, mut high) = (0, u32::MAX);
        while low < high {
            let middle = low + (high - low) / 2;
            let last = BlockId { incarnation: middle, counter: u64::MAX };
            let (behind, _) = self.pieces(addr, Some((last, u8::MAX)), 1).await?;
            match behind.first() {
                Some(piece) => low = piece.block.incarnation,
                None => high = middle,
            }
        }
        Ok(low)
    }

    async fn ask(&self, addr: &str, op: Op, payload: Bytes) -> Result<(Reply, Bytes)> {
        let link = {
            let mut links = self.links.lock();
            links.entry(addr.to_string()).or_insert_with(|| self.connector.link(addr)).clone()
        };
        let named = |fault: Fault| Fault { what: format!("data server at {addr}: {}", fault.what), ..fault };
        let request = Request { session: 0, capability: None, op };
        let mut call = Call::new(method::BLOCK, msg::encode(&request), self.config.timeout);
        call.payload = payload.into();
        let answer = link.call(call).await.map_err(named)?;
        Ok((msg::decode(&answer.body).map_err(named)?, answer.payload.into_bytes()))
    }
}

fn odd(addr: &str, reply: &Reply) -> Fault {
    Fault::new(Code::Protocol, format!("data server at {addr} gave another kind of answer: {reply:?}"))
}
