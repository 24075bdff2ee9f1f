//! A data server in memory that can fail in every way.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use torchfs_proto::chunk::ChunkInfo;
use torchfs_proto::layout::{Group, Layout, Placement, Scheme, ServerInfo};
use torchfs_proto::msg::block::{Op, PieceInfo, Reply, Request};
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result, ServerId, msg};
use torchfs_rpc::{Answer, Answering, Peer, Service};

/// How it behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mood {
    #[default]
    Well,
    /// Out of reach.
    Down,
    /// Takes requests and never answers.
    Hangs,
    /// One bit of what it sends is wrong.
    Flips,
    /// Sends chunks of another place than was asked for.
    Shuffles,
    /// Has nothing.
    Empty,
    /// Its disk is full.
    Full,
}

/// Chunks and their stored bytes, by block and piece.
type Pieces = HashMap<(BlockId, u8), (Vec<ChunkInfo>, Bytes)>;

#[derive(Default)]
pub struct Disk {
    pub mood: Mutex<Mood>,
    /// Puts with an older version are refused.
    pub version: Mutex<u32>,
    pub pieces: Mutex<Pieces>,
    pub asked: Mutex<Vec<Op>>,
}

impl Disk {
    pub fn new() -> Arc<Disk> {
        Arc::new(Disk::default())
    }

    pub fn set(&self, mood: Mood) {
        *self.mood.lock() = mood;
    }

    fn serve(&self, mood: Mood, request: Request, payload: Bytes) -> Result<(Reply, Bytes)> {
        match (mood, request.op) {
            (Mood::Down, _) => Err(Fault::new(Code::Unreachable, "connection refused")),
            (Mood::Full, Op::Put { .. }) => Err(Fault::new(Code::NoSpace, "the disk is full")),
            (_, Op::Put { block, piece, group_version, chunks, .. }) => {
                if group_version < *self.version.lock() {
                    return Err(Code::StalePlacement.into());
                }
                let mut pieces = self.pieces.lock();
                match pieces.get(&(block, piece)) {
                    Some((known, _)) if *known != chunks => {
                        Err(Fault::new(Code::Exists, "another piece has that name"))
                    }
                    _ => {
                        pieces.insert((block, piece), (chunks, payload));
                        Ok((Reply::Done, Bytes::new()))
                    }
                }
            }
            (Mood::Empty, Op::Get { block, .. }) => {
                Err(Fault::new(Code::Gone, format!("block {block} is not here")))
            }
            (_, Op::Get { block, piece, first, count }) => {
                let first = if mood == Mood::Shuffles { first ^ 1 } else { first };
                let pieces = self.pieces.lock();
                let Some((chunks, bytes)) = pieces.get(&(block, piece)) else {
                    return Err(Fault::new(Code::Gone, format!("block {block} is not here")));
                };
                let end = chunks.len().min(usize::from(first + count));
                let wanted = usize::from(first).min(end)..end;
                let from: usize = chunks[..wanted.start].iter().map(|chunk| chunk.stored as usize).sum();
                let len: usize = chunks[wanted.clone()].iter().map(|chunk| chunk.stored as usize).sum();
                let mut bytes = bytes.slice(from..from + len).to_vec();
                if mood == Mood::Flips && !bytes.is_empty() {
                    bytes[0] ^= 1;
                }
                Ok((Reply::Chunks { chunks: chunks[wanted].to_vec() }, bytes.into()))
            }
            (_, Op::Delete { blocks }) => {
                self.pieces.lock().retain(|(block, _), _| !blocks.contains(block));
                Ok((Reply::Done, Bytes::new()))
            }
            (_, Op::Purge { range, keep }) => {
                self.pieces.lock().retain(|(block, _), _| !range.contains(*block) || keep.contains(block));
                Ok((Reply::Done, Bytes::new()))
            }
            (_, Op::List { after, limit }) => {
                let mut pieces: Vec<PieceInfo> = self
                    .pieces
                    .lock()
                    .iter()
                    .filter(|(key, _)| after.is_none_or(|after| **key > after))
                    .map(|((block, piece), (_, bytes))| PieceInfo {
                        block: *block,
                        piece: *piece,
                        layout: LayoutId(1),
                        stored: bytes.len() as u32,
                    })
                    .collect();
                pieces.sort_by_key(|piece| (piece.block, piece.piece));
                let end = pieces.len() <= limit as usize;
                pieces.truncate(limit as usize);
                Ok((Reply::Listed { pieces, end }, Bytes::new()))
            }
            (_, other) => Err(Fault::new(Code::Unsupported, format!("{other:?}"))),
        }
    }
}

impl Service for Disk {
    fn call(self: Arc<Self>, _peer: Peer, request: torchfs_rpc::Request) -> Answering {
        Box::pin(async move {
            let payload = request.payload.into_bytes();
            let request: Request = msg::decode(&request.body)?;
            self.asked.lock().push(request.op.clone());
            let mood = *self.mood.lock();
            if mood == Mood::Hangs {
                std::future::pending::<()>().await;
            }
            let (reply, payload) = self.serve(mood, request, payload)?;
            Ok(Answer::new(msg::encode(&reply)).payload(payload).carries_sums())
        })
    }
}

/// Servers 1.. at these addresses. Layout 1 keeps two copies, layout 2 is ec:4+2, layout 3 is ec:2+1, as far as there are
/// servers for them; group `i` begins on server `i + 1`.
pub fn placement(version: u64, addrs: &[String], groups: usize) -> Placement {
    let count = addrs.len();
    let server = |index: usize| ServerId((index % count) as u32 + 1);
    let layout = |id: u32, scheme: Scheme| {
        let group = |group: usize| Group {
            version: version as u32,
            servers: (0..scheme.width().min(count)).map(|piece| server(group + piece)).collect(),
            ..Group::default()
        };
        let groups = (0..groups).map(group).collect();
        Layout { id: LayoutId(id), scheme, groups, asked: None, replaced_by: None }
    };
    let schemes = [Scheme::Replicas(2), Scheme::Ec { data: 4, parity: 2 }, Scheme::Ec { data: 2, parity: 1 }];
    Placement {
        version,
        layouts: (1..).zip(schemes).map(|(id, scheme)| layout(id, scheme)).collect(),
        servers: addrs
            .iter()
            .enumerate()
            .map(|(index, addr)| ServerInfo {
                id: server(index),
                addr: addr.clone(),
                up: true,
                total: 1 << 40,
                free: 1 << 39,
                ..ServerInfo::default()
            })
            .collect(),
    }
}
