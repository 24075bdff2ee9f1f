//! The calling end: one connection over TCP, shared by any number of callers.
//!
//! A call writes its frame to the socket itself, on its first poll and on the caller's thread; no other task is woken for it.
//! The reader task receives replies and wakes exactly the waiter. The keeper task continues writes that the socket
//! refused, ends calls whose time is up, pings, and gives up on a silent peer.
//!
//! # Invariants
//! - Every call ends: with its reply, by its deadline, or with the connection.
//! - A dropped call is cancelled at the server, if its reply was still open.
//! - A call holds one of `Config::calls_max` places until its reply is here, or its cancelling frame is out.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{sleep_until, timeout, timeout_at};
use torchfs_proto::{Code, Fault, Result};

use crate::buf::trim_pool;
use crate::call::{Call, Peer, Reply, Service, panicked, timed_out};
use crate::config::Config;
use crate::frame::{FAULT, Garbage, Header, Kind, PONG};
use crate::hello::{self, Agreed};
use crate::inbound::{Ended, Heard, Inbound};
use crate::local::{Local, LocalCall};
use crate::metrics::send_wait;
use crate::out::{Frame, Out};
use crate::payload::{Data, Payload, Way};
use crate::table::Table;

/// A connection to one server, or to a service of this process. Cheap to clone; the last clone ends it.
#[derive(Clone)]
pub struct Connection {
    way: Arc<Transport>,
}

enum Transport {
    Tcp(Tcp),
    Local(Local),
}

impl Connection {
    /// Connects and shakes hands, within `Config::connect_timeout`.
    pub async fn connect(addr: &str, config: Config) -> Result<Connection> {
        Connection::connect_shared(addr, Arc::new(config)).await
    }

    pub(crate) async fn connect_shared(addr: &str, config: Arc<Config>) -> Result<Connection> {
        let connecting = async {
            let mut stream = TcpStream::connect(addr).await.map_err(|e| {
                Fault::new(Code::Unreachable, format!("cannot connect to {addr}: {e}"))
                    .next("check the address, and that the server is running")
            })?;
            stream
                .set_nodelay(true)
                .map_err(|e| Fault::new(Code::Unreachable, format!("cannot connect to {addr}: {e}")))?;
            let agreed = hello::call(&mut stream, addr, &config).await?;
            Ok::<_, Fault>((stream, agreed))
        };
        let (stream, agreed) = match timeout(config.connect_timeout, connecting).await {
            Ok(connected) => connected?,
            Err(_) => {
                return Err(Fault::new(
                    Code::Unreachable,
                    format!("{addr} did not answer within {:?}", config.connect_timeout),
                )
                .next("check the address, the network between, and that the server is running"));
            }
        };
        let tcp = Tcp::start(stream, addr, agreed, config);
        Ok(Connection { way: Arc::new(Transport::Tcp(tcp)) })
    }

    /// A connection to a service of this process: calls poll the service's future in the caller's task. `peer` is
    /// who the service sees.
    pub fn local(service: Arc<dyn Service>, peer: Peer) -> Connection {
        Connection { way: Arc::new(Transport::Local(Local::new(service, peer))) }
    }

    /// Makes a call; nothing happens before the first poll. Dropping the future cancels it.
    pub fn call(&self, call: Call) -> CallFuture {
        CallFuture { connection: self.clone(), state: State::Start(call) }
    }

    /// Where it goes, for people.
    pub fn addr(&self) -> &str {
        match &*self.way {
            Transport::Tcp(tcp) => &tcp.shared.addr,
            Transport::Local(local) => local.peer().addr(),
        }
    }

    /// What the handshake found; `None` within a process.
    pub fn agreed(&self) -> Option<&Agreed> {
        match &*self.way {
            Transport::Tcp(tcp) => Some(&tcp.shared.agreed),
            Transport::Local(_) => None,
        }
    }

    /// Why the connection is over, if it is.
    pub fn lost(&self) -> Option<Fault> {
        match &*self.way {
            Transport::Tcp(tcp) => tcp.shared.table.closed(),
            Transport::Local(_) => None,
        }
    }

    /// How long a message to the server and back takes, measured by the handshake and by pings; zero within a process.
    pub fn round_trip(&self) -> Duration {
        match &*self.way {
            Transport::Tcp(tcp) => Duration::from_micros(tcp.shared.round_trip_us.load(Ordering::Relaxed)),
            Transport::Local(_) => Duration::ZERO,
        }
    }

    /// Ends the connection and waits for its tasks; calls in flight fail.
    pub async fn close(&self) {
        if let Transport::Tcp(tcp) = &*self.way {
            tcp.shared.lose(Fault::new(
                Code::Unreachable,
                format!("the connection to {} was closed here", tcp.shared.addr),
            ));
            let tasks = std::mem::take(&mut *tcp.tasks.lock());
            for task in tasks {
                // An error is a panic of the task, which is in the log already.
                let _ = task.await;
            }
        }
    }
}

/// A call on its way; see [`Connection::call`].
pub struct CallFuture {
    connection: Connection,
    state: State,
}

enum State {
    Start(Call),
    /// Waits for a file to be read, or for a place among the calls in flight.
    Slow(Pin<Box<dyn Future<Output = Result<Admitted>> + Send>>),
    Waiting(u64),
    Local(LocalCall),
    Over,
}

/// A call whose payload can be sent, with its place.
struct Admitted {
    call: Call,
    place: OwnedSemaphorePermit,
}

impl Future for CallFuture {
    type Output = Result<Reply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
        let this = &mut *self;
        let result = match &*this.connection.way {
            Transport::Tcp(tcp) => ready!(poll_tcp(&tcp.shared, &mut this.state, cx)),
            Transport::Local(local) => {
                if let State::Start(_) = this.state
                    && let State::Start(call) = std::mem::replace(&mut this.state, State::Over)
                {
                    this.state = State::Local(LocalCall::new(call));
                }
                match &mut this.state {
                    State::Local(call) => ready!(call.poll(local, cx)),
                    _ => panic!("a call was polled after it ended"),
                }
            }
        };
        this.state = State::Over;
        Poll::Ready(result)
    }
}

fn poll_tcp(shared: &Arc<Shared>, state: &mut State, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
    loop {
        match state {
            State::Start(_) => {
                let State::Start(call) = std::mem::replace(state, State::Over) else { unreachable!() };
                *state = match shared.start(call) {
                    Ok(Start::Now(admitted)) => State::Waiting(shared.send(admitted, cx)?),
                    Ok(Start::Later(slow)) => State::Slow(slow),
                    Err(fault) => return Poll::Ready(Err(fault)),
                };
                if let State::Waiting(_) = state {
                    return Poll::Pending; // the waker is in the table since before the frame was sent
                }
            }
            State::Slow(slow) => {
                let admitted = {
                    let _context = shared.runtime.enter();
                    ready!(slow.as_mut().poll(cx))
                };
                *state = State::Over;
                *state = State::Waiting(shared.send(admitted?, cx)?);
                return Poll::Pending;
            }
            State::Waiting(id) => {
                let done = ready!(shared.table.poll(*id, cx));
                return Poll::Ready(done.unwrap_or_else(|| Err(shared.gone())));
            }
            State::Local(_) | State::Over => panic!("a call was polled after it ended"),
        }
    }
}

impl Drop for CallFuture {
    fn drop(&mut self) {
        if let (State::Waiting(id), Transport::Tcp(tcp)) = (&self.state, &*self.connection.way)
            && let Some(place) = tcp.shared.table.abandon(*id)
        {
            tcp.shared.cancel(*id, place);
        }
    }
}

/// A connection over TCP with its two tasks.
struct Tcp {
    shared: Arc<Shared>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// What callers, reader and keeper share.
struct Shared {
    out: Out<OwnedSemaphorePermit>,
    table: Table,
    places: Arc<Semaphore>,
    addr: String,
    agreed: Agreed,
    config: Arc<Config>,
    heard: Arc<Heard>,
    runtime: Handle,
    round_trip_us: AtomicU64,
    /// The ping whose answer is open.
    ping: Mutex<Option<(u64, Instant)>>,
}

enum Start {
    Now(Admitted),
    Later(Pin<Box<dyn Future<Output = Result<Admitted>> + Send>>),
}

impl Tcp {
    fn start(stream: TcpStream, addr: &str, agreed: Agreed, config: Arc<Config>) -> Tcp {
        let stream = Arc::new(stream);
        let inbound = Inbound::new(stream.clone(), &config);
        let shared = Arc::new(Shared {
            out: Out::new(stream, send_wait(agreed.role)),
            table: Table::new(),
            places: Arc::new(Semaphore::new(config.calls_max.clamp(1, Semaphore::MAX_PERMITS))),
            addr: addr.to_string(),
            round_trip_us: AtomicU64::new(micros(agreed.round_trip)),
            agreed,
            config,
            heard: inbound.heard.clone(),
            runtime: Handle::current(),
            ping: Mutex::new(None),
        });
        let tasks = vec![tokio::spawn(read(shared.clone(), inbound)), tokio::spawn(keep(shared.clone()))];
        Tcp { shared, tasks: Mutex::new(tasks) }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.shared.lose(self.shared.gone());
        self.tasks.lock().iter().for_each(JoinHandle::abort);
    }
}

impl Shared {
    /// Checks a call and finds it a place, or says what it has to wait for.
    fn start(self: &Arc<Shared>, mut call: Call) -> Result<Start> {
        call.check()?;
        if Instant::now() >= call.deadline {
            return Err(timed_out(&self.addr, call.method));
        }
        let way = call.payload.way(!call.carries_sums);
        if way == Way::ReadHere {
            call.payload = call.payload.read()?;
        }
        if way != Way::ReadElsewhere
            && let Ok(place) = self.places.clone().try_acquire_owned()
        {
            return Ok(Start::Now(Admitted { call, place }));
        }
        let shared = self.clone();
        Ok(Start::Later(Box::pin(async move { shared.admit(call, way == Way::ReadElsewhere).await })))
    }

    async fn admit(&self, mut call: Call, read: bool) -> Result<Admitted> {
        let (deadline, method) = (call.deadline, call.method);
        let admitted = async {
            if read {
                let payload = call.payload;
                call.payload = match self.runtime.spawn_blocking(move || payload.read()).await {
                    Ok(payload) => payload?,
                    Err(_) => return Err(panicked(method)),
                };
            }
            let place = self.places.clone().acquire_owned().await.map_err(|_| self.gone())?;
            Ok(Admitted { call, place })
        };
        match timeout_at(deadline.into(), admitted).await {
            Ok(admitted) => admitted,
            Err(_) => Err(timed_out(&self.addr, method)),
        }
    }

    /// Sends the frame and returns the id whose reply to wait for.
    fn send(&self, admitted: Admitted, cx: &Context<'_>) -> Result<u64> {
        let Admitted { call, place } = admitted;
        let (id, sooner) = self.table.insert(call.method, call.deadline, cx.waker().clone(), place)?;
        let left = call.deadline.saturating_duration_since(Instant::now());
        let header = Header {
            method: call.method,
            trace: call.trace,
            deadline_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1),
            ..Header::bare(Kind::Request, id)
        };
        let frame = Frame::new(header, call.body, call.payload, call.carries_sums, None);
        self.out.send(frame.since(Instant::now()));
        if sooner {
            self.out.wake();
        }
        Ok(id)
    }

    fn cancel(&self, id: u64, place: OwnedSemaphorePermit) {
        let header = Header::bare(Kind::Cancel, id);
        self.out.send(Frame::new(header, Bytes::new(), Payload::None, true, Some(place)));
    }

    /// Fails all calls, and ends the connection.
    fn lose(&self, fault: Fault) {
        self.table.close(fault);
        self.places.close();
        self.out.close();
    }

    fn gone(&self) -> Fault {
        self.table.closed().unwrap_or_else(|| {
            Fault::new(Code::Unreachable, format!("the connection to {} is closed", self.addr))
        })
    }
}

/// Receives replies until the connection ends.
async fn read(shared: Arc<Shared>, mut inbound: Inbound) {
    let ended = loop {
        if let Err(ended) = read_frame(&shared, &mut inbound).await {
            break ended;
        }
    };
    if let Ended::Garbage(_) = ended {
        tracing::warn!(addr = shared.addr, "closing a connection: {ended}");
    }
    shared.lose(
        Fault::new(Code::Unreachable, format!("the connection to {} was lost: {ended}", shared.addr))
            .next("check that the server is running"),
    );
}

async fn read_frame(shared: &Shared, inbound: &mut Inbound) -> std::result::Result<(), Ended> {
    let header = inbound.header().await?;
    match header.kind {
        Kind::Reply => {
            let by = inbound.frame_deadline(&header);
            if !shared.table.waits(header.id) {
                let len = header.body_len as usize + header.payload_len as usize;
                return inbound.skip(len, by).await;
            }
            let body = inbound.body(&header, by).await?;
            let payload = match header.payload_len {
                0 => Data::Empty,
                _ => Data::Buf(inbound.payload(&header, by).await?),
            };
            let result = if header.has(FAULT) {
                Err(minicbor::decode::<Fault>(&body).unwrap_or_else(|_| {
                    Fault::new(
                        Code::Protocol,
                        format!("{} reported a fault that cannot be read", shared.addr),
                    )
                }))
            } else {
                Ok(Reply { body, payload })
            };
            shared.table.complete(header.id, result);
        }
        Kind::Ping if header.has(PONG) => {
            let sent = shared.ping.lock().take_if(|(id, _)| *id == header.id);
            if let Some((_, sent)) = sent {
                let now = micros(sent.elapsed());
                let before = shared.round_trip_us.load(Ordering::Relaxed);
                shared.round_trip_us.store((before * 7 + now) / 8, Ordering::Relaxed);
            }
        }
        kind => return Err(Garbage::OutOfPlace(kind).into()),
    }
    Ok(())
}

/// Continues blocked writes, ends calls in time, pings, and gives up on a silent peer.
async fn keep(shared: Arc<Shared>) {
    let config = &shared.config;
    let mut pings = 0;
    let mut ping_at = Instant::now() + config.ping_every;
    let mut written = shared.out.written();
    let mut progress = Instant::now();
    while !shared.out.is_closed() {
        shared.out.send_burst().await;
        let now = Instant::now();
        let (expired, next) = shared.table.expire(now, |method| timed_out(&shared.addr, method));
        expired.into_iter().for_each(|call| shared.cancel(call.id, call.place));
        let blocked = shared.out.is_blocked();
        if !blocked || shared.out.written() != written {
            (written, progress) = (shared.out.written(), now);
        }
        if now >= ping_at {
            trim_pool();
            ping_at = now + config.ping_every;
            let open = shared.ping.lock().is_some();
            if !open {
                pings += 1;
                *shared.ping.lock() = Some((pings, now));
                let ping = Header::bare(Kind::Ping, pings);
                shared.out.send(Frame::new(ping, Bytes::new(), Payload::None, true, None));
            }
        }
        let silent_at = shared.heard.last() + config.silence_max;
        let stalled_at = progress + config.stall_timeout;
        if now >= silent_at || (blocked && now >= stalled_at) {
            shared.lose(
                Fault::new(Code::Unreachable, format!("{} is silent; gave the connection up", shared.addr))
                    .next("check the server and the network between"),
            );
            return;
        }
        let wake_at = [ping_at, silent_at, stalled_at].into_iter().chain(next).min().unwrap_or(ping_at);
        let writable = async { if blocked { shared.out.writable().await } else { pending().await } };
        tokio::select! {
            _ = shared.out.wanted() => {}
            _ = writable => shared.out.pump(),
            _ = sleep_until(wake_at.into()) => {}
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}
