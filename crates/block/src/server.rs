//! Answers the requests of `proto::msg::block` with the stores on the server's [`Disks`].
//!
//! Nothing here waits for a disk on a thread of the runtime: puts and deletes are handed to the writer of a disk, reads that
//! are not in memory to its reader threads. Before both is a gate where requests queue per session and take turns
//! by what they cost; repair and scrub queue there too, as one session that costs more.
//!
//! # Invariants
//! - A put's checksums are verified before it is written: what is acknowledged is what the writer meant.
//! - A request that was handed on is finished even if its caller is gone.
//! - A put under an older placement than this server knows of is refused.
//! - Nobody waits for a disk that does not answer (`pulse`).

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{Either, select};
use torchfs_client::Connector;
use torchfs_disk::LocalDisk;
use torchfs_proto::disk::Disk;
use torchfs_proto::layout::DiskInfo;
use torchfs_proto::msg::block::{Op, PIECES_MAX, PULL_MAX, Reply, Request, method};
use torchfs_proto::msg::dump::DumpOp;
use torchfs_proto::msg::meta::Heartbeat;
use torchfs_proto::{BlockId, Code, Fault, LayoutId, ServerId, msg};
use torchfs_rpc::{Answer, Answering, Data, Payload, Peer, Role, Service};

pub use crate::disks::DiskName;
use crate::disks::{DataDisk, Disks, Folder, Lost, Settings};
use crate::fair::Flow;
use crate::gate::{Gate, Place, Way};
use crate::promise::promise;
use crate::repair::Repair;
use crate::scrub::Watch;
use crate::sessions::Sessions;
use crate::store::{self, Body, Done, Found, NewPiece, Stat, Store};
use crate::versions::Versions;
use crate::{Error, Result};

/// A piece up to this length is checked where it arrives; a hop to another thread would cost more.
const CHECK_HERE: usize = 512 << 10;

/// The most pieces one answer lists.
const LIST_MAX: u32 = 16 << 10;
/// The most sessions in one report.
const SESSIONS_MAX: usize = 256;
/// The most damaged pieces that are looked at for a report.
const BAD_MAX: usize = 64 << 10;

/// How a data server behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folders with its segments, one per disk, for this process alone.
    pub dirs: Vec<DiskName>,
    /// Disks that should be there and are not, and why.
    pub lost: Vec<(DiskName, String)>,
    /// How the store on each behaves.
    pub store: store::Config,
    /// Threads per disk that wait for it to read.
    pub readers: usize,
    /// Requests of one session that may wait at a disk.
    pub waiting_each: usize,
    /// Requests of all sessions that may wait at a disk.
    pub waiting_all: usize,
    /// Pieces that are pulled from other servers at the same time.
    pub pulls: usize,
    /// How long another server may take to send a piece.
    pub pull_timeout: Duration,
    /// Bytes per second and disk that the scrub of every day reads; 0 turns it off.
    pub scrub_rate: u64,
    /// All of a disk is scrubbed once in this time, if the rate allows it.
    pub scrub_every: Duration,
    /// How often each disk is looked after.
    pub watch_every: Duration,
    /// A disk that does not answer for so long gets nothing new until it does.
    pub silent_after: Duration,
    /// After so long its pieces count as lost, until it answers.
    pub silent_max: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            dirs: Vec::new(),
            lost: Vec::new(),
            store: store::Config::default(),
            readers: 4,
            waiting_each: 1024,
            waiting_all: 16 << 10,
            pulls: 4,
            pull_timeout: Duration::from_secs(30),
            scrub_rate: 4 << 20,
            scrub_every: Duration::from_secs(7 * 24 * 3600),
            watch_every: Duration::from_secs(2),
            silent_after: Duration::from_secs(15),
            silent_max: Duration::from_secs(600),
        }
    }
}

/// A data server, behind `rpc::serve` or `rpc::Connection::local`.
pub struct BlockServer {
    pub(crate) disks: Arc<Disks>,
    pub(crate) server: ServerId,
    pub(crate) config: Config,
    sessions: Sessions,
    versions: Versions,
    pub(crate) repair: Repair,
    // Ends before the disks do.
    watch: Watch,
}

impl BlockServer {
    /// Opens the stores in the configured folders and starts their threads. A disk that fails is reported as such; if all do,
    /// or one is in use or of another cluster, that is an error.
    pub fn open(config: Config, connector: Option<Arc<dyn Connector>>) -> Result<Arc<BlockServer>> {
        let open = |name: DiskName| {
            let disk = open_folder(&name, config.store.server);
            (name, disk)
        };
        let disks = config.dirs.iter().cloned().map(open).collect();
        BlockServer::build(disks, config, connector)
    }

    /// The same over any disk; nothing can be pulled from others.
    pub fn over(disk: Arc<dyn Disk>, config: Config) -> Result<Arc<BlockServer>> {
        BlockServer::over_all(vec![(DiskName { id: 1, path: String::new() }, disk)], config, None)
    }

    /// The same over any disks, without dumps.
    pub fn over_all(
        disks: Vec<(DiskName, Arc<dyn Disk>)>,
        config: Config,
        connector: Option<Arc<dyn Connector>>,
    ) -> Result<Arc<BlockServer>> {
        let disks = disks.into_iter().map(|(name, disk)| (name, Ok(Folder { disk, dumps: None }))).collect();
        BlockServer::build(disks, config, connector)
    }

    fn build(
        disks: Vec<(DiskName, Result<Folder>)>,
        config: Config,
        connector: Option<Arc<dyn Connector>>,
    ) -> Result<Arc<BlockServer>> {
        let server = config.store.server;
        let settings = settings(&config);
        let (mut used, mut first) = (Vec::new(), None);
        let mut lost: Vec<Lost> = config.lost.iter().cloned().map(|(name, why)| Lost { name, why }).collect();
        for Lost { name, why } in &lost {
            tracing::error!(%server, disk = name.path, why, "a disk is missing");
        }
        for (name, disk) in disks {
            match disk.and_then(|disk| DataDisk::open(name.clone(), disk, &settings)) {
                Ok(disk) => used.push(disk),
                // A mistake, not a failure: going on without it would have its pieces copied for nothing.
                Err(error @ (Error::Foreign { .. } | Error::Busy { .. })) => return Err(error),
                Err(error) => {
                    tracing::error!(%server, disk = name.path, %error, "a disk cannot be used");
                    lost.push(Lost { name, why: error.to_string() });
                    first.get_or_insert(error);
                }
            }
        }
        if used.is_empty() {
            let why = "it has no folder".to_owned();
            return Err(first.unwrap_or(Error::Latched { server, why }));
        }
        let disks = Arc::new(Disks::new(server, used, lost));
        let watch = Watch::start(&disks, &config)?;
        Ok(Arc::new(BlockServer {
            sessions: Sessions::default(),
            versions: Versions::default(),
            repair: Repair::new(connector, config.pulls, config.pull_timeout),
            watch,
            disks,
            server,
            config,
        }))
    }

    /// Takes an empty folder into use while the server runs, in place of a disk that was lost.
    pub fn add(&self, name: DiskName) -> Result<()> {
        let disk = open_folder(&name, self.server)?;
        self.disks.add(DataDisk::open(name, disk, &settings(&self.config))?);
        self.watch.look_for_disks(&self.disks)
    }

    /// The stores below.
    pub fn stores(&self) -> Vec<Arc<Store>> {
        self.disks.all().iter().map(|disk| disk.store.clone()).collect()
    }

    /// Figures of all disks that work; an error if none does.
    pub fn stat(&self) -> Result<Stat> {
        self.disks.working()?;
        self.disks.refresh();
        Ok(self.disks.stat())
    }

    /// Figures of each disk.
    pub fn disks(&self) -> Vec<DiskInfo> {
        self.disks.infos()
    }

    /// Fills a report to the metadata service with everything that this server knows of itself.
    pub fn report(&self, beat: &mut Heartbeat) {
        let Stat { total, free, used, pieces, .. } = self.disks.stat();
        (beat.total, beat.free, beat.used, beat.pieces) = (total, free, used, pieces);
        beat.disks = self.disks.infos();
        crate::metrics::disks(self.server, &beat.disks, self.disks.waiting());
        beat.bad = self.repair.to_report(self.disks.bad(BAD_MAX));
        beat.load = self.sessions.load(self.disks.waiting());
        beat.sessions = self.sessions.latest(SESSIONS_MAX);
        beat.placement = self.versions.placement();
    }

    /// The metadata service has heard this report, and says how new the groups are.
    pub fn heard(&self, beat: &Heartbeat, placement: u64, groups: Vec<(LayoutId, Vec<u32>)>) {
        self.repair.reported(&beat.bad);
        self.versions.learn(placement, groups);
    }

    async fn answer(self: Arc<Self>, asks: Asks, op: Op, payload: Data) -> Result<Answer, Fault> {
        let reply = match op {
            Op::Put { block, piece, layout, group_version, chunks, first } => {
                self.versions.check(block, layout, group_version)?;
                let bytes = payload.len() as u64;
                let piece = NewPiece { block, piece, layout, first, chunks, payload: payload.into_parts() };
                self.put(asks.flow, piece).await?;
                self.sessions.stored(asks.session, bytes);
                Reply::Done
            }
            Op::Get { block, piece, first, count } => {
                let found = self.get(asks.flow, block, piece, first, count).await?;
                return self.chunks(asks.session, found);
            }
            Op::Delete { blocks } => {
                let weight = blocks.len() as u64 * 16;
                self.change(asks.flow, weight, |store, done| store.submit_delete(blocks.clone(), done))
                    .await?;
                Reply::Done
            }
            Op::Purge { range, keep } => {
                let weight = keep.len() as u64 * 32;
                self.change(asks.flow, weight, |store, done| store.submit_purge(range, keep.clone(), done))
                    .await?;
                Reply::Done
            }
            Op::Drop { pieces } => {
                at_most(pieces.len(), PIECES_MAX)?;
                let weight = pieces.len() as u64 * 24;
                self.change(asks.flow, weight, |store, done| store.submit_drop(pieces.clone(), done)).await?;
                Reply::Done
            }
            Op::List { after, limit } => {
                let limit = limit.min(LIST_MAX);
                let pieces = self.disks.list(after, limit as usize);
                Reply::Listed { end: pieces.len() < limit as usize, pieces }
            }
            Op::Stat => {
                let Stat { total, free, used, pieces, .. } = self.stat()?;
                Reply::Stat { total, free, used, pieces }
            }
            Op::Verify { block, piece } => {
                self.verify(block, piece).await?;
                Reply::Done
            }
            Op::Missing { mut pieces } => {
                at_most(pieces.len(), PIECES_MAX)?;
                pieces.retain(|(block, piece)| !self.disks.has(*block, *piece));
                Reply::Missing { pieces }
            }
            Op::Pull { items, rate } => {
                at_most(items.len(), PULL_MAX)?;
                let (failed, bytes) = self.repair.pull(&self, items, rate, asks.until).await;
                Reply::Pulled { failed, bytes }
            }
            Op::Scrub { after, limit, rate } => {
                self.repair.scrub(&self, after, limit.min(LIST_MAX), rate, asks.until).await?
            }
            Op::Dump(op) => return self.dump(asks.role, op, payload.into_bytes()).await,
            Op::Sessions => Reply::Sessions { sessions: self.sessions.latest(usize::MAX) },
        };
        Ok(Answer::new(msg::encode(&reply)))
    }

    /// Dumps are rare and long: they take their turn among the reads of a disk, as background work. New ones go to the first
    /// disk that works; old ones are wherever they were put.
    async fn dump(&self, role: Role, op: DumpOp, payload: Bytes) -> Result<Answer, Fault> {
        if matches!(op, DumpOp::Put { .. } | DumpOp::Delete { .. }) && role != Role::Meta {
            return Err(Fault::new(Code::Denied, "only the metadata service puts and deletes dumps"));
        }
        let all = self.disks.with_dumps();
        let Some((disk, first)) = all.first().cloned() else {
            let what = format!("data server {} keeps no dumps", self.server);
            return Err(Fault::new(Code::Unsupported, what));
        };
        let place = self
            .unless_silent(&disk, self.pass(&disk.reads, Flow::Background, 1, payload.len() as u64))
            .await??;
        let work = move || {
            let _place = place;
            let each = all.iter().map(|(_, dumps)| dumps);
            match op {
                DumpOp::Put { name, offset, end } => {
                    first.put(name, offset, &payload, end).map(|()| (Reply::Done, Vec::new()))
                }
                DumpOp::List => {
                    let found: Result<Vec<_>, Fault> = each.map(|dumps| dumps.list()).collect();
                    let mut found = found?.concat();
                    found.sort_by_key(|dump| std::cmp::Reverse(dump.name));
                    Ok((Reply::Dumps(found), Vec::new()))
                }
                DumpOp::Get { name, offset, len } => {
                    let mut parts = each.map(|dumps| dumps.load(name, offset, len));
                    let first = parts.next().unwrap_or_else(|| Err(Code::Gone.into()));
                    let part = first.or_else(|fault| parts.find(Result::is_ok).unwrap_or(Err(fault)));
                    part.map(|(part, total)| (Reply::DumpPart { total }, part))
                }
                DumpOp::Delete { names } => {
                    let deleted: Result<Vec<()>, Fault> = each.map(|dumps| dumps.delete(&names)).collect();
                    deleted.map(|_| (Reply::Done, Vec::new()))
                }
            }
        };
        let done = self.unless_silent(&disk, disk.readers.run(work)).await?;
        let (reply, part) = done.ok_or_else(|| self.closed())??;
        let answer = Answer::new(msg::encode(&reply));
        Ok(if part.is_empty() { answer } else { answer.payload(Bytes::from(part)) })
    }

    /// Stores a piece on the disk that has it or room for it; if that one cannot take it, on another.
    pub(crate) async fn put(&self, flow: Flow, piece: NewPiece) -> Result<(), Fault> {
        let len: u64 = piece.payload.iter().map(|part| part.len() as u64).sum();
        let mut checked = false;
        let mut refused = Vec::new();
        let mut last: Option<Error> = None;
        loop {
            let placed = match self.disks.place(piece.block, piece.piece, len, &refused) {
                Ok(placed) => placed,
                // The first disk's words say more than that there is no other.
                Err(error) => return Err(last.unwrap_or(error).into()),
            };
            let disk = placed.disk.clone();
            let store = async {
                let place = self.pass(&disk.writes, flow, len, len).await?;
                if !checked {
                    self.check(&disk, &piece).await?;
                    checked = true;
                }
                let result = hand_on(place, |done| disk.store.submit_put(piece.clone(), done)).await;
                Ok::<_, Fault>(result.unwrap_or(Err(Error::Closed { server: self.server })))
            };
            // What a disk that does not answer was given may still be stored later: the same bytes, so that does no harm.
            let result = match self.unless_silent(&disk, store).await {
                Ok(result) => result?,
                Err(silent) => Err(silent),
            };
            match result {
                Ok(()) => return Ok(()),
                Err(
                    error @ (Error::NoSpace { .. }
                    | Error::Io { .. }
                    | Error::Latched { .. }
                    | Error::Silent { .. }),
                ) => {
                    refused.push(disk.name.id);
                    last.get_or_insert(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Chunks of a piece: at once if they are in memory, else when it is this flow's turn at the disk.
    async fn get(
        &self,
        flow: Flow,
        block: BlockId,
        piece: u8,
        first: u16,
        count: u16,
    ) -> Result<Found, Fault> {
        let range = u32::from(first)..u32::from(first) + u32::from(count);
        let disk = self.disks.find(block, piece)?;
        if let Some(silent) = disk.silent(self.server) {
            return Err(silent.into());
        }
        // Bytes of a failed disk are read before they are promised: a send that breaks off ends the connection.
        if disk.works()
            && let Some(found) = disk.store.get_now(block, piece, range.clone())?
        {
            return Ok(found);
        }
        let cost = u64::from(count) << 16;
        let cost = disk.store.stored(block, piece).map_or(cost, |stored| cost.min(u64::from(stored)));
        let read = async {
            let place = self.pass(&disk.reads, flow, 1, cost).await?;
            let store = disk.store.clone();
            let load = move || {
                let found = store.load(block, piece, range);
                drop(place);
                found
            };
            Ok(disk.readers.run(load).await.ok_or_else(|| self.closed())??)
        };
        self.unless_silent(&disk, read).await?
    }

    /// Reads a piece and checks all of it, when background work has its turn; its stored bytes.
    pub(crate) async fn verify(&self, block: BlockId, piece: u8) -> Result<u64, Fault> {
        let disk = self.disks.find(block, piece)?;
        let cost = disk.store.stored(block, piece).unwrap_or(0);
        let read = async {
            let place = self.pass(&disk.reads, Flow::Background, 1, u64::from(cost)).await?;
            let store = disk.store.clone();
            let verify = move || {
                let verified = store.verify(block, piece);
                if verified.is_err() {
                    store.keep_marks();
                }
                drop(place);
                verified
            };
            Ok(disk.readers.run(verify).await.ok_or_else(|| self.closed())??)
        };
        self.unless_silent(&disk, read).await?
    }

    /// Reads the headers of all segments, and has those written again that are damaged.
    pub(crate) async fn verify_headers(&self) -> Result<(), Fault> {
        for disk in self.disks.all().iter().filter(|disk| disk.works()) {
            let read = async {
                let place = self.pass(&disk.reads, Flow::Background, 1, 1 << 20).await?;
                let store = disk.store.clone();
                let verify = move || {
                    let verified = store.verify_headers();
                    drop(place);
                    verified
                };
                Ok::<_, Fault>(disk.readers.run(verify).await.ok_or_else(|| self.closed())??)
            };
            self.unless_silent(disk, read).await??;
        }
        Ok(())
    }

    /// Waits for a disk, but not for one that does not answer.
    async fn unless_silent<T>(&self, disk: &DataDisk, wait: impl Future<Output = T>) -> Result<T> {
        match select(std::pin::pin!(wait), disk.pulse.until_silent()).await {
            Either::Left((result, _)) => Ok(result),
            Either::Right(_) => Err(disk.silent(self.server).unwrap_or_else(|| self.closed())),
        }
    }

    /// Hands a deletion to the writer of every disk that counts, and waits for all of them.
    async fn change(
        &self,
        flow: Flow,
        bytes: u64,
        submit: impl Fn(&Store, Done<u64>) -> Result<()>,
    ) -> Result<(), Fault> {
        let mut waiting = Vec::new();
        for disk in self.disks.changeable()? {
            let place = self.unless_silent(&disk, self.pass(&disk.writes, flow, bytes, bytes)).await??;
            waiting.push((disk.clone(), hand_on(place, |done| submit(&disk.store, done))));
        }
        let mut failed = None;
        for (disk, result) in waiting {
            let result = self.unless_silent(&disk, result).await?;
            match result.unwrap_or(Err(Error::Closed { server: self.server })) {
                Ok(_) => {}
                // It failed just now and is out: what it holds does not count any more.
                Err(error) if !disk.counts() => {
                    failed.get_or_insert((true, error));
                }
                Err(error) => failed = Some((false, error)),
            }
        }
        match failed {
            Some((out, error)) if !out || self.disks.working().is_err() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Waits at a gate for this flow's turn.
    pub(crate) async fn pass(
        &self,
        gate: &Arc<Gate>,
        flow: Flow,
        room: u64,
        cost: u64,
    ) -> Result<Place, Fault> {
        match gate.enter(flow, room, cost) {
            Ok(Way::Open(place)) => Ok(place),
            Ok(Way::Later(promise)) => Ok(promise.await.ok_or_else(|| self.closed())?),
            Err(_) => Err(Error::Overloaded { server: self.server }.into()),
        }
    }

    /// Checks the bytes of a put against its chunks.
    async fn check(&self, disk: &DataDisk, piece: &NewPiece) -> Result<(), Fault> {
        let len: usize = piece.payload.iter().map(Bytes::len).sum();
        let server = self.server;
        if len <= CHECK_HERE {
            return Ok(check(server, piece)?);
        }
        let piece = piece.clone();
        Ok(disk.readers.run(move || check(server, &piece)).await.ok_or_else(|| self.closed())??)
    }

    pub(crate) fn closed(&self) -> Error {
        Error::Closed { server: self.server }
    }

    fn chunks(&self, session: u64, found: Found) -> Result<Answer, Fault> {
        let payload = match found.body {
            Body::Memory(bytes) => Payload::from(bytes),
            Body::File { file, offset, len } => Payload::File { file, ranges: vec![(offset, len)] },
        };
        self.sessions.sent(session, payload.len());
        let reply = Reply::Chunks { chunks: found.chunks };
        Ok(Answer::new(msg::encode(&reply)).payload(payload).carries_sums())
    }
}

/// Who asks.
struct Asks {
    session: u64,
    role: Role,
    flow: Flow,
    until: Instant,
}

impl Service for BlockServer {
    fn call(self: Arc<Self>, peer: Peer, request: torchfs_rpc::Request) -> Answering {
        Box::pin(async move {
            if request.method != method::BLOCK {
                let fault = Fault::new(Code::Unsupported, "this is the address of a data server");
                return Err(
                    fault.next("where a metadata service is asked for, give the address of `torchfs meta`")
                );
            }
            let until = request.deadline;
            let Request { session, op, .. } = msg::decode(&request.body)?;
            let flow = match (peer.role(), session) {
                (Role::Data, _) => Flow::Background,
                (_, 0) => Flow::Connection(peer.id()),
                (_, session) => Flow::Session(session),
            };
            self.answer(Asks { session, role: peer.role(), flow, until }, op, request.payload).await
        })
    }
}

/// Gives a change to a disk's writer. The room is given back when the change is durable, even if the caller is gone by then.
fn hand_on<T: Send + 'static>(
    place: Place,
    submit: impl FnOnce(Done<T>) -> Result<()>,
) -> crate::promise::Promise<Result<T>> {
    let (giver, promise) = promise();
    let giver = Arc::new(parking_lot::Mutex::new(Some((giver, place))));
    let tell = {
        let giver = giver.clone();
        move |result| {
            let taken = giver.lock().take();
            if let Some((giver, place)) = taken {
                drop(place);
                // A caller that is gone does not want to know.
                let _ = giver.give(result);
            }
        }
    };
    let done: Done<T> = Box::new(tell.clone());
    if let Err(error) = submit(done) {
        tell(Err(error));
    }
    promise
}

fn open_folder(name: &DiskName, server: ServerId) -> Result<Folder> {
    let path = Path::new(&name.path);
    let opened = LocalDisk::open_locked(path).and_then(|disk| {
        let dumps = LocalDisk::open(path.join("dumps"))?;
        Ok(Folder { disk: Arc::new(disk), dumps: Some(Arc::new(dumps)) })
    });
    opened.map_err(|e| match e.kind() {
        std::io::ErrorKind::WouldBlock => Error::Busy { server, why: e.to_string() },
        _ => Error::Io { server, what: "open its folder", why: format!("{}: {e}", name.path) },
    })
}

fn settings(config: &Config) -> Settings {
    Settings {
        store: config.store.clone(),
        readers: config.readers,
        waiting_each: config.waiting_each,
        waiting_all: config.waiting_all,
        silent_after: config.silent_after,
        silent_max: config.silent_max,
    }
}

fn at_most(count: usize, most: usize) -> Result<(), Fault> {
    if count <= most {
        return Ok(());
    }
    Err(Fault::new(Code::TooMany, format!("{count} pieces in one request; at most {most} are served")))
}

/// Checks the bytes of a put against its chunks.
fn check(server: ServerId, piece: &NewPiece) -> Result<()> {
    let NewPiece { block, first, chunks, payload, .. } = piece;
    let invalid = |why: String| Error::Invalid { block: *block, server, why };
    if payload.is_empty() {
        return Err(invalid("the payload is missing".to_owned()));
    }
    let len: u64 = payload.iter().map(|part| part.len() as u64).sum();
    if torchfs_proto::chunk::stored_len(chunks) != len {
        return Err(invalid("the payload is not as long as its chunks".to_owned()));
    }
    if !store::are_numbers(*first, chunks.len()) {
        return Err(invalid("there are no chunks of such numbers".to_owned()));
    }
    store::check_parts(*block, *first, chunks, payload.iter().map(|part| &part[..]))
        .map_err(|e| corrupted_on_the_way(*block, piece.piece, server, &e))
}

fn corrupted_on_the_way(block: BlockId, piece: u8, server: ServerId, error: &torchfs_codec::Error) -> Error {
    Error::Corrupt { block, piece, server, why: format!("it arrived so: {error}") }
}
