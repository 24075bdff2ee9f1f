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
                self.pieces.lock().insert((block, piece), (chunks, payload));
                Ok((Reply::Done, Bytes::new()))
            }
            (Mood::Empty, Op::Get { block, .. }) => {
                Err(Fault::new(Code::Gone, format!("block {block} is not here")))
            }
            (_, Op::Get { block, piece, first, count }) => {
                let pieces = self.pieces.lock();
                let Some((chunks, bytes)) = pieces.get(&(block, piece)) else {
                    return Err(Fault::new(Code::Gone, format!("block {block} is not here")));
                };
                let wanted = usize::from(first)..usize::from(first + count);
                let from: usize = chunks[..wanted.start].iter().map(|chunk| chunk.stored as usize).sum();
                let len: usize = chunks[wanted.clone()].iter().map(|chunk| chunk.stored as usize).sum();
                let mut bytes = bytes.slice(from..from + len).to_vec();
                if mood == Mood::Flips {
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

/// Servers 1.. at these addresses; layout 1 keeps two copies, group `i` on servers `i + 1` and the next.
pub fn placement(version: u64, addrs: &[String], groups: usize) -> Placement {
    let count = addrs.len();
    let server = |index: usize| ServerId((index % count) as u32 + 1);
    let groups = (0..groups)
        .map(|group| Group {
            version: version as u32,
            servers: (0..count.min(2)).map(|copy| server(group + copy)).collect(),
            ..Group::default()
        })
        .collect();
    Placement {
        version,
        layouts: vec![
            Layout { id: LayoutId(1), scheme: Scheme::Replicas(2), groups, asked: None, replaced_by: None },
            Layout {
                id: LayoutId(2),
                scheme: Scheme::Ec { data: 4, parity: 2 },
                groups: vec![Group { version: 1, servers: vec![ServerId(1); 6], ..Group::default() }],
                asked: None,
                replaced_by: None,
            },
        ],
        servers: addrs
            .iter()
            .enumerate()
            .map(|(index, addr)| ServerInfo {
                id: server(index),
                addr: addr.clone(),
                up: true,
                total: 1 << 40,
                free: 1 << 39,
                used: 0,
                pieces: 0,
                ..ServerInfo::default()
            })
            .collect(),
    }
}
