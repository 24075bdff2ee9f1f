//! A metadata service with a log of its own, whose leader can be killed.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use torchfs_proto::attr::{Attr, Compression, Kind, Time, VolumeInfo};
use torchfs_proto::layout::Placement;
use torchfs_proto::msg;
use torchfs_proto::msg::meta::{Done, Event, Grant, Heartbeat, Op, RELEASE_MAX, Reply, SessionInfo};
use torchfs_proto::{
    BlockId, ClusterId, Code, Fault, Fence, IdRange, Incarnation, Ino, LayoutId, Result, Seq, ServerId,
    SessionId, VolumeId,
};
use torchfs_rpc::{Answer, Answering, Peer, Request, Service};

/// The fake; clone it to keep a handle.
#[derive(Default)]
pub struct Fake {
    pub state: Mutex<State>,
    /// Something changed that requests may wait for.
    changed: Notify,
}

/// What the test sees and sets.
pub struct State {
    pub fence: u64,
    pub lease_epoch: u32,
    /// Answers NotLeader to everybody.
    pub follower: bool,
    /// Does not know the session any more.
    pub forgot: bool,
    /// Answers no change until this is lifted; they are decided, though.
    pub hold: bool,
    /// Of the changes, `hold` concerns only these.
    pub held: fn(&Op) -> bool,
    /// Answers no lookup until this is lifted.
    pub hold_lookups: bool,
    /// Answers nothing at all.
    pub mute: bool,
    /// Refuses so many releases.
    pub refuse_releases: u32,
    /// A Sync makes everything durable.
    pub auto_sync: bool,
    /// Grants for the next answers to lookups.
    pub grants: VecDeque<Vec<Grant>>,
    /// What a Reclaim is granted: numbers for (inode, bits), by inode.
    pub regrants: HashMap<Ino, Grant>,
    pub events: Vec<(u64, Event)>,
    pub placement: Placement,
    /// (sequence, place, what), in the order in which it was decided.
    pub log: Vec<(u64, u64, Op)>,
    results: BTreeMap<u64, (Result<Done>, u64)>,
    pub durable: u64,
    pub next_ino: u64,
    next_id: u64,
    /// Mutating requests as they came, with the watermark.
    pub came: Vec<(u64, u64)>,
    pub asked: Vec<Op>,
    reclaim: bool,
    /// Connections of a leader that was killed.
    dead: HashSet<u64>,
    known: HashSet<u64>,
    life: u64,
    pub closed: bool,
    pub beats: Vec<Heartbeat>,
}

impl Default for State {
    fn default() -> State {
        State {
            fence: 1,
            lease_epoch: 1,
            follower: false,
            forgot: false,
            hold: false,
            held: |_| true,
            hold_lookups: false,
            mute: false,
            refuse_releases: 0,
            auto_sync: true,
            grants: VecDeque::new(),
            regrants: HashMap::new(),
            events: Vec::new(),
            placement: Placement::default(),
            log: Vec::new(),
            results: BTreeMap::new(),
            durable: 0,
            next_ino: 100,
            next_id: 0,
            came: Vec::new(),
            asked: Vec::new(),
            reclaim: false,
            dead: HashSet::new(),
            known: HashSet::new(),
            life: 1,
            closed: false,
            beats: Vec::new(),
        }
    }
}

impl Fake {
    pub fn new() -> Arc<Fake> {
        Arc::new(Fake::default())
    }

    /// Changes what the fake does, and lets waiting requests look again.
    pub fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }

    /// Answers none of these changes until `hold` is lifted.
    pub fn hold(&self, held: fn(&Op) -> bool) {
        self.set(|state| (state.hold, state.held) = (true, held));
    }

    /// Makes everything durable that was decided.
    pub fn sync(&self) {
        self.set(|state| state.durable = state.log.len() as u64);
    }

    /// The leader dies with what was not durable; the next one knows nobody's leases, and the numbers it gives differ.
    pub fn kill(&self) {
        self.set(|state| {
            state.life += 1;
            state.fence += 1;
            state.lease_epoch += 10;
            state.reclaim = true;
            state.hold = false;
            let durable = state.durable;
            state.log.retain(|(_, place, _)| *place <= durable);
            state.results.retain(|_, (_, place)| *place <= durable);
            state.next_ino += 1_000;
            state.events.clear();
            let known = std::mem::take(&mut state.known);
            state.dead.extend(known);
        });
    }

    pub fn count(&self, matches: impl Fn(&Op) -> bool) -> usize {
        self.state.lock().asked.iter().filter(|op| matches(op)).count()
    }

    /// Sequences in the log.
    pub fn sequences(&self) -> Vec<u64> {
        self.state.lock().log.iter().map(|(seq, ..)| *seq).collect()
    }

    async fn answer(self: Arc<Fake>, peer: Peer, request: msg::meta::Request) -> Result<Answer> {
        let life = {
            let mut state = self.state.lock();
            if state.dead.contains(&peer.id()) {
                return Err(lost());
            }
            state.known.insert(peer.id());
            state.asked.push(request.op.clone());
            state.life
        };
        let mut reply = None;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let mut state = self.state.lock();
                if state.life != life {
                    return Err(lost());
                }
                if !state.mute {
                    if reply.is_none() {
                        reply = state.decide(&request);
                    }
                    let held = (request.seq > 0 && state.hold && (state.held)(&request.op))
                        || (matches!(request.op, Op::Lookup { .. }) && state.hold_lookups);
                    if let Some(mut reply) = reply.take_if(|_| !held) {
                        reply.durable = Seq(state.durable);
                        return Ok(Answer::new(msg::encode(&reply)));
                    }
                }
            }
            changed.await;
        }
    }
}

impl Service for Fake {
    fn call(self: Arc<Self>, peer: Peer, request: Request) -> Answering {
        Box::pin(async move {
            let request: msg::meta::Request = msg::decode(&request.body)?;
            self.answer(peer, request).await
        })
    }
}

fn lost() -> Fault {
    Fault::new(Code::Unreachable, "the connection was lost with its leader")
}

impl State {
    /// What comes of a request; `None` if it has to wait.
    fn decide(&mut self, request: &msg::meta::Request) -> Option<Reply> {
        let mut grants = Vec::new();
        let mut ordered = 0;
        let result = if self.follower {
            Err(Code::NotLeader.into())
        } else if self.forgot && request.session != SessionId(0) {
            Err(Fault::new(Code::NoSession, "session 7 is not known"))
        } else if request.seq > 0 {
            let (result, place) = self.change(request);
            ordered = place;
            result
        } else if self.reclaim && matches!(request.op, Op::Lookup { .. } | Op::GetAttr { .. }) {
            Err(Code::Grace.into())
        } else {
            self.ask(request, &mut grants)?
        };
        Some(Reply {
            bare: None,
            fence: Fence(self.fence),
            ordered: Seq(ordered),
            durable: Seq(self.durable),
            lease_epoch: self.lease_epoch,
            grants,
            result,
        })
    }

    fn change(&mut self, request: &msg::meta::Request) -> (Result<Done>, u64) {
        self.came.push((request.seq, request.watermark));
        if let Some(known) = self.results.get(&request.seq) {
            return known.clone();
        }
        let result = match &request.op {
            Op::Make(make) if make.name.as_slice() == b"taken" => {
                return (Err(Code::Exists.into()), 0);
            }
            Op::Release { inos } if inos.len() > RELEASE_MAX => return (Err(Code::TooMany.into()), 0),
            Op::Release { .. } if self.refuse_releases > 0 => {
                self.refuse_releases -= 1;
                return (Err(Code::NoSpace.into()), 0);
            }
            Op::Make(_) => {
                let ino = request.made.unwrap_or_else(|| {
                    self.next_ino += 1;
                    Ino(self.next_ino)
                });
                Ok(Done::Made { attr: attr(ino), created: true })
            }
            Op::GrantIds { count } => {
                let first = BlockId { incarnation: 1, counter: self.next_id };
                self.next_id += u64::from(*count);
                Ok(Done::Ids(IdRange { first, count: *count }))
            }
            _ => Ok(Done::Ok),
        };
        let place = self.log.len() as u64 + 1;
        self.log.push((request.seq, place, request.op.clone()));
        self.results.insert(request.seq, (result.clone(), place));
        (result, place)
    }

    fn ask(&mut self, request: &msg::meta::Request, grants: &mut Vec<Grant>) -> Option<Result<Done>> {
        Some(Ok(match &request.op {
            Op::OpenSession(_) | Op::ResumeSession => Done::Session(self.info()),
            Op::Reclaim { leases, last, .. } => {
                for (ino, bits) in leases {
                    if let Some(grant) = self.regrants.get(ino) {
                        grants.push(Grant { bits: grant.bits & bits, ..*grant });
                    }
                }
                self.reclaim &= !last;
                Done::Ok
            }
            Op::Renew => Done::Renewed { space: 1 << 30, placement: self.placement.version, volume: None },
            Op::Listen { seen, .. } => {
                let events: Vec<_> =
                    self.events.iter().filter(|(number, _)| number > seen).cloned().collect();
                if events.is_empty() {
                    return None;
                }
                Done::Events(events)
            }
            Op::Sync { seq } => {
                if self.auto_sync {
                    self.durable = self.log.len() as u64;
                }
                if self.durable < seq.0 {
                    return None;
                }
                Done::Ok
            }
            Op::Placement => Done::Placement(self.placement.clone()),
            Op::Lookup { .. } => {
                grants.extend(self.grants.pop_front().unwrap_or_default());
                Done::Entry(None)
            }
            Op::Heartbeat(beat) => {
                self.beats.push(beat.clone());
                Done::Joined { server: ServerId(3), cluster: ClusterId(9), placement: 0, groups: Vec::new() }
            }
            Op::Check { cursor } => Done::Checked {
                problems: vec![format!("problem {}", cursor.len())],
                cursor: if cursor.len() < 2 { vec![0; cursor.len() + 1].into() } else { Vec::new().into() },
                records: 10,
                total: 25,
            },
            Op::Collect => Done::Collected { deleted: 4, waiting: 5 },
            Op::CloseSession => {
                self.closed = true;
                Done::Ok
            }
            _ => Done::Ok,
        }))
    }

    fn info(&self) -> SessionInfo {
        SessionInfo {
            session: SessionId(7),
            epoch: 1,
            cluster: ClusterId(9),
            incarnation: Incarnation(1),
            // Long, so that no lease ends while a loaded machine sleeps.
            lease_ms: 600_000,
            session_ms: 600_000,
            volume: VolumeInfo {
                id: VolumeId(1),
                name: "default".into(),
                block_size: 4 << 20,
                compression: Compression::Lz4,
                layout: LayoutId(1),
            },
            root: attr(Ino::ROOT),
            placement: self.placement.clone(),
            reclaim: self.reclaim,
            seq: self.results.last_key_value().map_or(0, |(seq, _)| *seq),
        }
    }
}

pub fn attr(ino: Ino) -> Attr {
    let time = Time::default();
    Attr {
        ino,
        kind: Kind::File,
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 0,
        stored: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        data_version: 1,
        change: 1,
        flags: 0,
        generation: 1,
        layout: None,
    }
}
