//! Requests outside of sessions: what commands ask of the metadata service and of data servers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use torchfs_proto::attr::Raw;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::msg::block::{self, PieceInfo};
use torchfs_proto::msg::meta::{self, Done, FileBlocks, MetaReport, Op, SessionReport, StatusReport, Strays};
use torchfs_proto::{BlockId, Code, Fault, Fence, Ino, Result, ServerId, SessionId, VolumeId, msg};
use torchfs_rpc::{Call, Link};

use crate::Connector;
use crate::meta::unexpected;

/// Whoever waits longer than this is told for what.
const PATIENCE: Duration = Duration::from_secs(2);

/// Settings of [`Tool`], [`crate::Member`] and [`crate::Peers`].
#[derive(Clone, Debug)]
pub struct ToolConfig {
    /// A request ends after this, whoever was asked meanwhile.
    pub timeout: Duration,
    /// One server may take so long for one request.
    pub attempt_timeout: Duration,
    /// The pause before the addresses are gone through again.
    pub pause: Duration,
    /// Give up earlier, and say after a while that one waits, if nobody who leads could be reached for so long. With `timeout` or
    /// more there is neither.
    pub unreachable: Duration,
}

impl Default for ToolConfig {
    fn default() -> ToolConfig {
        ToolConfig {
            timeout: Duration::from_secs(30),
            attempt_timeout: Duration::from_secs(10),
            pause: Duration::from_millis(100),
            unreachable: Duration::from_secs(30),
        }
    }
}

/// Part of a check that was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Records checked.
    pub done: u64,
    /// Records in all, about.
    pub total: u64,
}

/// Names in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Names {
    /// The name of the volume.
    pub volume: String,
    /// The folder that this one is in.
    pub parent: Ino,
    /// Inodes and their names, in the order of names.
    pub names: Vec<(Ino, Raw)>,
    /// Nothing follows.
    pub end: bool,
}

/// Asks the leader among the metadata servers, and data servers by their address. Needs to be used within a tokio runtime.
pub struct Tool {
    leader: Leader,
    connector: Arc<dyn Connector>,
    /// Data servers that were asked.
    links: Mutex<HashMap<String, Link>>,
    config: ToolConfig,
}

impl Tool {
    /// Connects to nobody yet.
    pub fn new(addrs: &[String], connector: Arc<dyn Connector>, config: ToolConfig) -> Tool {
        let leader = Leader::new(addrs, &*connector, config.clone());
        Tool { leader, connector, links: Mutex::default(), config }
    }

    /// Figures of the cluster.
    pub async fn status(&self) -> Result<StatusReport> {
        match self.leader.ask(Op::Status).await? {
            Done::Status(status) => Ok(status),
            other => Err(unexpected("Status", &other)),
        }
    }

    /// The metadata service itself.
    pub async fn meta_status(&self) -> Result<MetaReport> {
        match self.leader.ask(Op::MetaStatus).await? {
            Done::MetaStatus(report) => Ok(report),
            other => Err(unexpected("MetaStatus", &other)),
        }
    }

    /// All sessions.
    pub async fn sessions(&self) -> Result<Vec<SessionReport>> {
        match self.leader.ask(Op::Sessions).await? {
            Done::Sessions(sessions) => Ok(sessions),
            other => Err(unexpected("Sessions", &other)),
        }
    }

    /// Ends somebody's session now.
    pub async fn evict(&self, session: SessionId) -> Result<()> {
        self.leader.ask(Op::Evict { session }).await.map(|_| ())
    }

    /// Checks all metadata; `part` hears of each part's progress and problems as they come.
    pub async fn check(&self, mut part: impl FnMut(Progress, &[String])) -> Result<Progress> {
        let mut cursor = Raw::from(Vec::new());
        let mut progress = Progress::default();
        loop {
            let done = self.leader.ask(Op::Check { cursor }).await?;
            let Done::Checked { problems, cursor: next, records, total } = done else {
                return Err(unexpected("Check", &done));
            };
            progress.done += records;
            progress.total = total.max(progress.done);
            part(progress, &problems);
            if next.is_empty() {
                return Ok(progress);
            }
            cursor = next;
        }
    }

    /// Live block records after this one, at most `limit` of them, and whether none follow.
    pub async fn list_blocks(&self, after: Option<BlockId>, limit: u32) -> Result<(Vec<NewBlock>, bool)> {
        match self.leader.ask(Op::ListBlocks { after, limit }).await? {
            Done::Blocks { blocks, end } => Ok((blocks, end)),
            other => Err(unexpected("ListBlocks", &other)),
        }
    }

    /// Files and the blocks that hold their bytes, `limit` extents at most, and where to go on; empty at the end.
    pub async fn list_files(&self, cursor: Raw, limit: u32) -> Result<(Vec<FileBlocks>, Raw)> {
        match self.leader.ask(Op::ListFiles { cursor, limit }).await? {
            Done::Files { files, cursor } => Ok((files, cursor)),
            other => Err(unexpected("ListFiles", &other)),
        }
    }

    /// Names in a folder after this one.
    pub async fn list_names(&self, volume: VolumeId, folder: Ino, after: Raw, limit: u32) -> Result<Names> {
        match self.leader.ask(Op::ListNames { volume, folder, after, limit }).await? {
            Done::Names { volume, parent, names, end } => Ok(Names { volume, parent, names, end }),
            other => Err(unexpected("ListNames", &other)),
        }
    }

    /// Those of these blocks that a record names.
    pub async fn known_blocks(&self, blocks: Vec<BlockId>) -> Result<Vec<BlockId>> {
        match self.leader.ask(Op::KnownBlocks { blocks }).await? {
            Done::Known(blocks) => Ok(blocks),
            other => Err(unexpected("KnownBlocks", &other)),
        }
    }

    /// Collects what can be collected now: (deleted since the service started, waiting).
    pub async fn collect(&self) -> Result<(u64, u64)> {
        match self.leader.ask(Op::Collect).await? {
            Done::Collected { deleted, waiting } => Ok((deleted, waiting)),
            other => Err(unexpected("Collect", &other)),
        }
    }

    /// Any other request outside of sessions.
    pub async fn ask(&self, op: Op) -> Result<Done> {
        self.leader.ask(op).await
    }

    /// Pieces that a data server stores after this one, at most `limit` of them, and whether none follow.
    pub async fn list_pieces(
        &self,
        addr: &str,
        after: Option<(BlockId, u8)>,
        limit: u32,
    ) -> Result<(Vec<PieceInfo>, bool)> {
        match self.data(addr, block::Op::List { after, limit }).await? {
            block::Reply::Listed { pieces, end } => Ok((pieces, end)),
            other => Err(odd(addr, &other)),
        }
    }

    /// Which of these pieces a data server does not have, or knows to be bad; at most [`block::PIECES_MAX`] in one question.
    pub async fn missing(&self, addr: &str, pieces: Vec<(BlockId, u8)>) -> Result<Vec<(BlockId, u8)>> {
        match self.data(addr, block::Op::Missing { pieces }).await? {
            block::Reply::Missing { pieces } => Ok(pieces),
            other => Err(odd(addr, &other)),
        }
    }

    /// Those of these pieces of a data server that nobody needs.
    pub async fn strays(&self, server: ServerId, pieces: Vec<(BlockId, u8)>) -> Result<Strays> {
        match self.leader.ask(Op::Strays { server, pieces }).await? {
            Done::Strays(strays) => Ok(strays),
            other => Err(unexpected("Strays", &other)),
        }
    }

    /// Lets a data server read a piece from its disk and check it.
    pub async fn verify(&self, addr: &str, block: BlockId, piece: u8) -> Result<()> {
        self.data(addr, block::Op::Verify { block, piece }).await.map(|_| ())
    }

    async fn data(&self, addr: &str, op: block::Op) -> Result<block::Reply> {
        let link = {
            let mut links = self.links.lock();
            links.entry(addr.to_string()).or_insert_with(|| self.connector.link(addr)).clone()
        };
        ask_data(&link, op, self.config.timeout).await
    }
}

/// Asks whoever leads among the metadata servers.
pub(crate) struct Leader {
    links: Vec<Link>,
    /// The one that led last.
    last: AtomicUsize,
    config: ToolConfig,
}

impl Leader {
    pub fn new(addrs: &[String], connector: &dyn Connector, config: ToolConfig) -> Leader {
        let links = addrs.iter().map(|addr| connector.link(addr)).collect();
        Leader { links, last: AtomicUsize::new(0), config }
    }

    /// Goes through the addresses until one answers, or time is up.
    pub async fn ask(&self, op: Op) -> Result<Done> {
        let request = meta::Request {
            session: SessionId(0),
            epoch: 0,
            seq: 0,
            step: 0,
            watermark: 0,
            fence: Fence(0),
            op,
            made: None,
        };
        let body = bytes::Bytes::from(msg::encode(&request));
        let began = Instant::now();
        let until = began + self.config.timeout;
        let (mut reached, mut told) = (false, false);
        let Some(mut turns_left) = Some(self.links.len()).filter(|count| *count > 0) else {
            return Err(Fault::new(Code::Invalid, "no address of a metadata server is known")
                .next("give --meta HOST:PORT or set TORCHFS_META"));
        };
        loop {
            let turn = self.last.load(Ordering::Relaxed);
            let link = &self.links[turn % self.links.len()];
            let fault = match self.ask_at(link, body.clone(), until).await {
                Ok(done) => return Ok(done),
                Err(fault) if !fault.code.retry() => return Err(fault),
                Err(fault) => fault,
            };
            // Who answers that nobody leads is of no more use than who does not answer.
            reached |= !matches!(fault.code, Code::Unreachable | Code::NotLeader);
            let give_up = if reached { until } else { until.min(began + self.config.unreachable) };
            let now = Instant::now();
            if now + self.config.pause >= give_up {
                return Err(fault);
            }
            if !told && self.config.unreachable < self.config.timeout && now >= began + PATIENCE {
                told = true;
                let left = give_up.saturating_duration_since(now).as_secs();
                tracing::warn!("no metadata server serves, waiting {left} s more: {}", fault.what);
            }
            self.last.store(turn.wrapping_add(1), Ordering::Relaxed);
            turns_left -= 1;
            if turns_left == 0 {
                turns_left = self.links.len();
                tokio::time::sleep(self.config.pause).await;
            }
        }
    }

    async fn ask_at(&self, link: &Link, body: bytes::Bytes, until: Instant) -> Result<Done> {
        let mut call = Call::new(meta::method::META, body, Duration::ZERO);
        call.deadline = until.min(Instant::now() + self.config.attempt_timeout);
        let answer = link.call(call).await.map_err(|fault| match fault.code {
            Code::Unsupported => Fault { what: format!("{}: {}", link.addr(), fault.what), ..fault },
            _ => fault,
        })?;
        let reply: meta::Reply = msg::decode(&answer.body)?;
        reply.result.map_err(|fault| match fault.what.is_empty() {
            true => {
                Fault::new(fault.code, format!("the metadata service at {}: {:?}", link.addr(), fault.code))
            }
            false => fault,
        })
    }
}

/// One request to a data server, on behalf of nobody's session.
pub(crate) async fn ask_data(link: &Link, op: block::Op, timeout: Duration) -> Result<block::Reply> {
    let request = block::Request { session: 0, capability: None, op };
    let call = Call::new(block::method::BLOCK, msg::encode(&request), timeout);
    let named =
        |fault: Fault| Fault { what: format!("data server at {}: {}", link.addr(), fault.what), ..fault };
    let answer = link.call(call).await.map_err(named)?;
    msg::decode(&answer.body).map_err(named)
}

fn odd(addr: &str, reply: &block::Reply) -> Fault {
    Fault::new(Code::Protocol, format!("data server at {addr} gave another kind of answer: {reply:?}"))
}
