//! The listening end: accepts connections, reads requests, polls the service, sends answers.
//!
//! One task per connection reads frames and polls each request once; what is ready then is answered at once, and the
//! answers of one read leave in one write. Other requests become tasks. A second task, the keeper, continues writes
//! that the socket refused and drops peers that are silent or do not take their answers.
//!
//! # Invariants
//! - A request counts as in flight from before its bytes are read until its answer is written or it is dropped; beyond the
//!   bounds the connection is not read, so the peer is held back by TCP.
//! - The answers' bytes count too, but exist before they can be counted: a connection may exceed its bound by the answers
//!   of requests that were admitted before.
//! - When `closed` is called, no request of that peer is running (unless the whole server was dropped, not shut down).
//! - Who has not proven itself takes no place of those who have: see `strangers`.
//! - Every task is in the set of its owner: requests and keeper with their connection, connections with the listener.

use std::collections::HashMap;
use std::future::pending;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinHandle, JoinSet, spawn_blocking};
use tokio::time::{sleep_until, timeout, timeout_at};
use torchfs_proto::{Code, Fault, Result};

use crate::budget::Budget;
use crate::buf::trim_pool;
use crate::call::{Answer, Answering, Peer, Request, Service, panicked, timed_out};
use crate::config::Config;
use crate::frame::{FAULT, Garbage, Header, Kind, PONG};
use crate::hello;
use crate::inbound::{Ended, Heard, Inbound};
use crate::metrics::ServerMetrics;
use crate::out::{Frame, Out};
use crate::payload::{Data, Way};
use crate::strangers::{Stranger, Strangers};

/// After so many frames in a row a reader lets others run.
const FRAMES_PER_TURN: u32 = 256;
/// After an error of accept that will not pass by itself (no descriptors left), wait so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound address.
pub struct Listener {
    listener: TcpListener,
    addr: SocketAddr,
    config: Arc<Config>,
}

impl Listener {
    /// Binds; port 0 picks a free one. Refuses to listen beyond loopback without a secret unless `insecure` is set.
    pub async fn bind(addr: &str, config: Config) -> Result<Listener> {
        let fail = |e: std::io::Error| {
            Fault::new(Code::Unreachable, format!("cannot listen on {addr}: {e}"))
                .next("choose another address, or stop the process that has this one")
        };
        for addr in tokio::net::lookup_host(addr).await.map_err(fail)? {
            config.may_listen(&addr)?;
        }
        let listener = TcpListener::bind(addr).await.map_err(fail)?;
        let addr = listener.local_addr().map_err(fail)?;
        Ok(Listener { listener, addr, config: Arc::new(config) })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

/// A running server; dropping it ends everything at once.
pub struct ServerHandle {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl ServerHandle {
    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Accepts and reads no more, waits for requests in flight (at most `Config::grace`), and ends.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        if let Some(task) = self.task.take() {
            // An error is a panic in our own accept loop, which is in the log already.
            let _ = task.await;
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Serves requests until the handle says otherwise.
pub fn serve(listener: Listener, service: Arc<dyn Service>) -> ServerHandle {
    let (stop, stopped) = watch::channel(false);
    let addr = listener.addr;
    let server = Arc::new(Server {
        total: Budget::new(listener.config.total_bytes_max),
        places: Arc::new(Semaphore::new(listener.config.connections_max)),
        strangers: Strangers::new(listener.config.strangers_max, listener.config.strangers_patience),
        config: listener.config,
        metrics: ServerMetrics::new(),
        service,
    });
    let task = tokio::spawn(accept(listener.listener, server, stopped));
    ServerHandle { addr, stop, task: Some(task) }
}

struct Server {
    config: Arc<Config>,
    service: Arc<dyn Service>,
    metrics: ServerMetrics,
    total: Arc<Budget>,
    /// Of peers that proved themselves.
    places: Arc<Semaphore>,
    strangers: Arc<Strangers>,
}

async fn accept(listener: TcpListener, server: Arc<Server>, mut stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => break,
            Some(_) = connections.join_next() => continue,
            accepted = async {
                server.strangers.make_room().await;
                listener.accept().await
            } => accepted,
        };
        let (stream, addr) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!("accepting a connection failed: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let stranger = server.strangers.enter();
        connections.spawn(connection(server.clone(), stream, addr, stranger, stopped.clone()));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// One connection from its first byte to its last.
async fn connection(
    server: Arc<Server>,
    mut stream: TcpStream,
    addr: SocketAddr,
    stranger: Stranger,
    mut stopped: watch::Receiver<bool>,
) {
    let addr = addr.to_string();
    let config = server.config.clone();
    let hands = async {
        stream.set_nodelay(true).map_err(|e| Fault::new(Code::Unreachable, e.to_string()))?;
        hello::answer(&mut stream, &addr, &config, || {
            server.places.clone().try_acquire_owned().map_err(|_| {
                Fault::new(Code::Overloaded, "the server has as many connections as it may have")
                    .next("try again later, or raise its limit of connections")
            })
        })
        .await
    };
    let agreed = tokio::select! {
        agreed = timeout(config.handshake_timeout, hands) => agreed,
        _ = stranger.dismissed() => {
            server.metrics.refused.increment(1);
            return;
        }
        _ = stopped.wait_for(|stop| *stop) => return,
    };
    drop(stranger);
    let (agreed, _place) = match agreed {
        Ok(Ok(agreed)) => agreed,
        Ok(Err(fault)) => {
            server.metrics.refused.increment(1);
            if fault.code == Code::Protocol {
                server.metrics.garbage.increment(1);
            }
            tracing::debug!("refused a connection: {fault}");
            return;
        }
        Err(_) => {
            server.metrics.stalled.increment(1);
            return;
        }
    };
    let stream = Arc::new(stream);
    let inbound = Inbound::new(stream.clone(), &config);
    let conn = Arc::new(Conn {
        out: Out::new(stream, server.metrics.answer.clone()),
        peer: Peer::new(addr, agreed.role),
        requests: Budget::new(config.requests_max as u64),
        bytes: Budget::new(config.connection_bytes_max),
        heard: inbound.heard.clone(),
        paused: AtomicBool::new(false),
        running: Mutex::new(HashMap::new()),
        server: server.clone(),
    });
    server.metrics.connections.increment(1.0);
    let _closing = Closing(conn.clone());
    serve_connection(conn, inbound, stopped).await;
}

/// Runs when the connection's task ends in any way, after everything that belongs to it.
struct Closing(Arc<Conn>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.out.close();
        self.0.server.metrics.connections.decrement(1.0);
        self.0.server.service.closed(&self.0.peer);
    }
}

async fn serve_connection(conn: Arc<Conn>, inbound: Inbound, mut stopped: watch::Receiver<bool>) {
    let mut tasks = JoinSet::new();
    let mut keeper = JoinSet::new();
    keeper.spawn(keep(conn.clone()));
    let ended = tokio::select! {
        ended = read(&conn, inbound, &mut tasks) => Some(ended),
        _ = stopped.wait_for(|stop| *stop) => None,
    };
    conn.out.uncork();
    match ended {
        Some(Ended::Closed | Ended::Failed(_)) => {}
        Some(Ended::Garbage(garbage)) => {
            conn.server.metrics.garbage.increment(1);
            tracing::warn!(peer = ?conn.peer, "closing a connection: the peer sent {garbage}");
        }
        Some(Ended::Slow) => {
            conn.server.metrics.stalled.increment(1);
            tracing::warn!(peer = ?conn.peer, "closing a connection: the peer did not finish a frame in time");
        }
        None => {
            // Shutdown: what is in flight may end, answers are sent by the keeper or the tasks themselves.
            let _ = timeout(conn.server.config.grace, conn.requests.idle()).await;
        }
    }
    conn.out.close();
    tasks.shutdown().await;
    keeper.shutdown().await;
}

/// What the tasks of one connection share.
struct Conn {
    out: Out<InFlight>,
    peer: Peer,
    requests: Arc<Budget>,
    bytes: Arc<Budget>,
    heard: Arc<Heard>,
    /// The reader waits for room: the silence is ours, not the peer's.
    paused: AtomicBool,
    /// The requests that became tasks, for cancelling.
    running: Mutex<HashMap<u64, AbortHandle>>,
    server: Arc<Server>,
}

/// A request's place among those in flight; given back when it is dropped.
struct InFlight {
    requests: Arc<Budget>,
    connection: Arc<Budget>,
    total: Arc<Budget>,
    bytes: u64,
}

impl InFlight {
    /// Exchanges the request's bytes for the answer's.
    fn answer(&mut self, bytes: u64) {
        self.connection.add(bytes);
        self.total.add(bytes);
        self.connection.give_back(self.bytes);
        self.total.give_back(self.bytes);
        self.bytes = bytes;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.connection.give_back(self.bytes);
        self.total.give_back(self.bytes);
        self.requests.give_back(1);
    }
}

impl Conn {
    /// Waits until a frame of this length may be read.
    async fn admit(&self, bytes: u64) -> InFlight {
        let places = [(&self.requests, 1), (&self.bytes, bytes), (&self.server.total, bytes)];
        for (budget, amount) in places {
            if !budget.try_take(amount) {
                self.server.metrics.paused.increment(1);
                self.paused.store(true, Ordering::Release);
                self.out.wake();
                self.out.uncork();
                budget.take(amount).await;
                self.out.cork();
                self.heard.touch();
                self.paused.store(false, Ordering::Release);
            }
        }
        InFlight {
            requests: self.requests.clone(),
            connection: self.bytes.clone(),
            total: self.server.total.clone(),
            bytes,
        }
    }
}

/// Reads frames until the connection ends.
async fn read(conn: &Arc<Conn>, mut inbound: Inbound, tasks: &mut JoinSet<()>) -> Ended {
    match read_frames(conn, &mut inbound, tasks).await {
        Ok(never) => match never {},
        Err(ended) => ended,
    }
}

enum Never {}

async fn read_frames(
    conn: &Arc<Conn>,
    inbound: &mut Inbound,
    tasks: &mut JoinSet<()>,
) -> std::result::Result<Never, Ended> {
    let mut turn = 0;
    loop {
        if conn.out.is_closed() {
            return Err(Ended::Closed); // no answer would arrive: do not begin what was read ahead
        }
        let header = match inbound.buffered_header()? {
            Some(header) => header,
            None => {
                conn.out.uncork();
                while tasks.try_join_next().is_some() {}
                let header = inbound.header().await?;
                conn.out.cork();
                header
            }
        };
        match header.kind {
            Kind::Request => take_request(conn, inbound, tasks, &header).await?,
            Kind::Cancel => {
                if let Some(task) = conn.running.lock().remove(&header.id) {
                    task.abort();
                    conn.server.metrics.cancelled.increment(1);
                }
            }
            Kind::Ping if !header.has(PONG) => {
                let pong = Header { flags: PONG, ..Header::bare(Kind::Ping, header.id) };
                // Pongs have a place among the requests, so that a peer that reads nothing cannot pile them up.
                let place = conn.admit(0).await;
                conn.out.send(Frame::new(pong, Bytes::new(), Default::default(), true, Some(place)));
            }
            kind @ (Kind::Reply | Kind::Ping) => return Err(Garbage::OutOfPlace(kind).into()),
        }
        turn += 1;
        if turn >= FRAMES_PER_TURN {
            turn = 0;
            conn.out.uncork();
            tokio::task::yield_now().await;
            conn.out.cork();
        }
    }
}

async fn take_request(
    conn: &Arc<Conn>,
    inbound: &mut Inbound,
    tasks: &mut JoinSet<()>,
    header: &Header,
) -> std::result::Result<(), Ended> {
    let (arrived, received) = (inbound.arrived(), Instant::now());
    let place = conn.admit(u64::from(header.body_len) + u64::from(header.payload_len)).await;
    let waits = !inbound.has(header);
    if waits {
        conn.out.uncork();
    }
    let by = inbound.frame_deadline(header);
    let body = inbound.body(header, by).await?;
    let payload =
        if header.payload_len == 0 { Data::Empty } else { Data::Buf(inbound.payload(header, by).await?) };
    if waits {
        conn.out.cork();
    }
    conn.server.metrics.requests.increment(1);
    let request = Request {
        method: header.method,
        body,
        payload,
        deadline: received + Duration::from_millis(u64::from(header.deadline_ms)),
        trace: header.trace,
    };
    let deadline = request.deadline;
    let mut pending = Pending { conn: conn.clone(), header: *header, place: Some(place), arrived };
    let (service, peer) = (conn.server.service.clone(), conn.peer.clone());
    conn.server.metrics.start.record(arrived.elapsed());
    // The first poll needs no waker: a future that is not ready becomes a task, which polls it again with its own.
    let polled = catch_unwind(AssertUnwindSafe(|| {
        let mut answering = service.call(peer, request);
        let polled = answering.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        (answering, polled)
    }));
    let answering = match polled {
        Err(_) => {
            pending.send(Err(panicked(header.method)));
            return Ok(());
        }
        Ok((_, Poll::Ready(answer))) => match pending.try_send(answer) {
            None => return Ok(()),
            // Its payload has to be read from a disk.
            Some(answer) => Box::pin(async move { Ok(answer) }) as Answering,
        },
        Ok((answering, Poll::Pending)) => answering,
    };
    let mut running = conn.running.lock();
    if running.contains_key(&header.id) {
        return Err(Garbage::OutOfPlace(Kind::Request).into());
    }
    let task = tasks.spawn(run(pending, answering, deadline));
    running.insert(header.id, task);
    Ok(())
}

/// A request that was not ready at once.
async fn run(mut pending: Pending, answering: Answering, deadline: Instant) {
    let answer = async {
        let mut answer = answering.await?;
        answer.check()?;
        if answer.payload.way(!answer.carries_sums) != Way::AsIs {
            let payload = answer.payload;
            answer.payload = match spawn_blocking(move || payload.read()).await {
                Ok(read) => read?,
                Err(_) => return Err(panicked(pending.header.method)),
            };
        }
        Ok(answer)
    };
    let answer = match timeout_at(deadline.into(), answer).await {
        Ok(answer) => answer,
        Err(_) => {
            pending.conn.server.metrics.expired.increment(1);
            Err(timed_out("the server", pending.header.method))
        }
    };
    pending.conn.running.lock().remove(&pending.header.id);
    pending.send(answer);
}

/// A request whose answer is owed. Dropped without one it was cancelled, or its task panicked.
struct Pending {
    conn: Arc<Conn>,
    header: Header,
    place: Option<InFlight>,
    arrived: Instant,
}

impl Pending {
    /// Sends the answer, or gives it back if its payload has to be read elsewhere first.
    fn try_send(&mut self, answer: Result<Answer>) -> Option<Answer> {
        let answer = answer.and_then(|answer| answer.check().map(|()| answer));
        match answer {
            Ok(mut answer) => {
                match answer.payload.way(!answer.carries_sums) {
                    Way::AsIs => {}
                    Way::ReadElsewhere => return Some(answer),
                    Way::ReadHere => match std::mem::take(&mut answer.payload).read() {
                        Ok(payload) => answer.payload = payload,
                        Err(fault) => {
                            self.send(Err(fault));
                            return None;
                        }
                    },
                }
                self.send(Ok(answer));
            }
            Err(fault) => self.send(Err(fault)),
        }
        None
    }

    /// Sends an answer whose payload is in memory or can be sent from its file.
    fn send(&mut self, answer: Result<Answer>) {
        let Some(mut place) = self.place.take() else {
            return;
        };
        let (flags, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(fault) => (FAULT, Answer::new(encode_fault(&fault))),
        };
        place.answer(answer.body.len() as u64 + answer.payload.len());
        let header = Header {
            flags,
            method: self.header.method,
            trace: self.header.trace,
            ..Header::bare(Kind::Reply, self.header.id)
        };
        let frame = Frame::new(header, answer.body, answer.payload, answer.carries_sums, Some(place));
        self.conn.out.send(frame.since(self.arrived));
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.place.is_some() && std::thread::panicking() {
            self.conn.running.lock().remove(&self.header.id);
            self.send(Err(panicked(self.header.method)));
        }
    }
}

fn encode_fault(fault: &Fault) -> Vec<u8> {
    // Encoding into memory cannot fail; an empty body would be reported as a broken reply.
    minicbor::to_vec(fault).unwrap_or_default()
}

/// Continues blocked writes, and drops a peer that is silent or takes nothing.
async fn keep(conn: Arc<Conn>) {
    let config = &conn.server.config;
    let mut written = conn.out.written();
    let mut progress = Instant::now();
    let mut pong_at = Instant::now();
    while !conn.out.is_closed() {
        conn.out.send_burst().await;
        let now = Instant::now();
        let blocked = conn.out.is_blocked();
        if !blocked || conn.out.written() != written {
            (written, progress) = (conn.out.written(), now);
        }
        let paused = conn.paused.load(Ordering::Acquire);
        let silent_at = if paused { now } else { conn.heard.last() } + config.silence_max;
        let stalled_at = progress + config.stall_timeout;
        if now >= silent_at || (blocked && now >= stalled_at) {
            conn.server.metrics.stalled.increment(1);
            tracing::warn!(peer = ?conn.peer, "closing a connection: the peer is silent");
            conn.out.close();
            return;
        }
        if paused && !blocked && now >= pong_at {
            // The caller's pings are not read now; this tells it that the connection is only held back.
            pong_at = now + config.ping_every;
            let pong = Header { flags: PONG, ..Header::bare(Kind::Ping, 0) };
            conn.out.send(Frame::new(pong, Bytes::new(), Default::default(), true, None));
        }
        trim_pool();
        let mut wake_at = silent_at.min(stalled_at);
        if paused && !blocked {
            wake_at = wake_at.min(pong_at);
        }
        let writable = async { if blocked { conn.out.writable().await } else { pending().await } };
        tokio::select! {
            _ = conn.out.wanted() => {}
            _ = writable => conn.out.pump(),
            _ = sleep_until(wake_at.into()) => {}
        }
    }
}
