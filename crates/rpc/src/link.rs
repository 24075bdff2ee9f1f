//! A server by its address: connections are made when they are wanted and made again when they are lost.
//!
//! A link has a few lanes, each with at most one connection, so that a small call need not wait behind a large payload.
//! After a failed attempt the lane waits before the next one; calls that come meanwhile fail at once with the
//! reason, because their caller may have another source.
//!
//! # Invariants
//! - A lane makes one attempt at a time; its task belongs to the lane and ends with the link.
//! - A call over a standing connection costs no more than on that connection.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout_at;
use torchfs_proto::{Code, Fault, Result};

use crate::call::{Call, Reply, timed_out};
use crate::client::{CallFuture, Connection};
use crate::config::Config;

/// A way to one server. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    shared: Arc<Shared>,
}

/// How a link is doing.
#[derive(Clone, Debug)]
pub struct Health {
    /// Connections that stand now.
    pub connections: usize,
    /// Attempts that failed since the last that succeeded.
    pub failures: u32,
    /// The last failure of an attempt or a connection, and when it was seen.
    pub last_failure: Option<(Instant, Fault)>,
    /// The round trip over a standing connection.
    pub round_trip: Option<Duration>,
}

struct Shared {
    addr: String,
    config: Arc<Config>,
    lanes: Vec<Mutex<Lane>>,
    turn: AtomicUsize,
    troubles: Mutex<Troubles>,
}

#[derive(Default)]
struct Troubles {
    failures: u32,
    retry_at: Option<Instant>,
    last: Option<(Instant, Fault)>,
}

#[derive(Default)]
struct Lane {
    connection: Option<Connection>,
    attempt: Option<Attempt>,
}

struct Attempt {
    outcome: Outcome,
    task: JoinHandle<()>,
}

/// What an attempt came to; `None` while it is under way.
type Outcome = watch::Receiver<Option<Result<Connection>>>;

impl Link {
    /// A link to this address; connects when the first call is made.
    pub fn new(addr: impl Into<String>, config: Config) -> Link {
        let lanes = config.lanes.max(1);
        Link::make(addr.into(), config, (0..lanes).map(|_| Lane::default()))
    }

    /// A link that is one standing connection, for services of this process.
    pub fn fixed(connection: Connection) -> Link {
        let addr = connection.addr().to_string();
        let lane = Lane { connection: Some(connection), attempt: None };
        Link::make(addr, Config::default(), [lane])
    }

    fn make(addr: String, config: Config, lanes: impl IntoIterator<Item = Lane>) -> Link {
        Link {
            shared: Arc::new(Shared {
                addr,
                config: Arc::new(config),
                lanes: lanes.into_iter().map(Mutex::new).collect(),
                turn: AtomicUsize::new(0),
                troubles: Mutex::default(),
            }),
        }
    }

    /// Where it goes.
    pub fn addr(&self) -> &str {
        &self.shared.addr
    }

    /// Makes a call over the lanes in turn; connects first if it has to.
    pub fn call(&self, call: Call) -> LinkCall {
        let lane = match self.shared.lanes.len() {
            1 => 0,
            _ => self.shared.turn.fetch_add(1, Ordering::Relaxed),
        };
        self.call_on(lane, call)
    }

    /// Makes a call over this lane (modulo their number), for callers that keep large and small calls apart.
    pub fn call_on(&self, lane: usize, call: Call) -> LinkCall {
        let lane = lane % self.shared.lanes.len();
        match self.shared.standing(lane) {
            Some(connection) => LinkCall::Standing(connection.call(call)),
            None => LinkCall::Connecting { link: self.clone(), lane, call: Some(call), waiting: None },
        }
    }

    /// A connection of this lane that stands, or is made by this deadline.
    pub async fn connection(&self, lane: usize, deadline: Instant) -> Result<Connection> {
        self.clone().connect(lane % self.shared.lanes.len(), deadline).await
    }

    /// How it is doing, as far as was seen.
    pub fn health(&self) -> Health {
        let standing: Vec<Connection> =
            (0..self.shared.lanes.len()).filter_map(|lane| self.shared.standing(lane)).collect();
        let troubles = self.shared.troubles.lock();
        Health {
            connections: standing.len(),
            failures: troubles.failures,
            last_failure: troubles.last.clone(),
            round_trip: standing.iter().map(Connection::round_trip).min(),
        }
    }

    async fn connect(self, lane: usize, deadline: Instant) -> Result<Connection> {
        let mut outcome = match self.shared.attempt(lane)? {
            Progress::Standing(connection) => return Ok(connection),
            Progress::UnderWay(outcome) => outcome,
        };
        match timeout_at(deadline.into(), outcome.wait_for(Option::is_some)).await {
            Ok(Ok(outcome)) => match &*outcome {
                Some(result) => result.clone(),
                None => Err(self.shared.unreachable()),
            },
            Ok(Err(_)) => Err(self.shared.unreachable()),
            Err(_) => Err(Fault::new(Code::Timeout, format!("{} could not be reached in time", self.addr()))
                .next("check the address, and that the server is running")),
        }
    }
}

/// A call over a link; see [`Link::call`].
pub enum LinkCall {
    /// Over a connection that stood.
    #[doc(hidden)]
    Standing(CallFuture),
    /// The connection is made first.
    #[doc(hidden)]
    Connecting {
        link: Link,
        lane: usize,
        call: Option<Call>,
        waiting: Option<Pin<Box<dyn Future<Output = Result<Connection>> + Send>>>,
    },
}

impl Future for LinkCall {
    type Output = Result<Reply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
        loop {
            match &mut *self {
                LinkCall::Standing(call) => return Pin::new(call).poll(cx),
                LinkCall::Connecting { link, lane, call, waiting } => {
                    let Some(next) = call.as_ref() else {
                        panic!("a call was polled after it ended");
                    };
                    let deadline = next.deadline;
                    if waiting.is_none() && Instant::now() >= deadline {
                        return Poll::Ready(Err(timed_out(link.addr(), next.method)));
                    }
                    let waiting =
                        waiting.get_or_insert_with(|| Box::pin(link.clone().connect(*lane, deadline)));
                    let connection = ready!(waiting.as_mut().poll(cx));
                    let call = call.take();
                    match (connection, call) {
                        (Ok(connection), Some(call)) => *self = LinkCall::Standing(connection.call(call)),
                        (Err(fault), _) => return Poll::Ready(Err(fault)),
                        (_, None) => return Poll::Ready(Err(link.shared.unreachable())),
                    }
                }
            }
        }
    }
}

enum Progress {
    Standing(Connection),
    UnderWay(Outcome),
}

impl Shared {
    /// The lane's connection, if it stands; a lost one is let go.
    fn standing(&self, lane: usize) -> Option<Connection> {
        let mut lane = self.lanes[lane].lock();
        let fault = match lane.connection.as_ref()?.lost() {
            None => return lane.connection.clone(),
            Some(fault) => fault,
        };
        let lost = lane.connection.take();
        if lane.attempt.as_ref().is_some_and(|attempt| attempt.task.is_finished()) {
            lane.attempt = None; // its outcome holds the lost connection too
        }
        drop(lane);
        drop(lost);
        self.troubles.lock().last = Some((Instant::now(), fault));
        None
    }

    /// The lane's connection or attempt; begins one unless the last failure is too recent.
    fn attempt(self: &Arc<Shared>, lane: usize) -> Result<Progress> {
        if let Some(connection) = self.standing(lane) {
            return Ok(Progress::Standing(connection));
        }
        let mut state = self.lanes[lane].lock();
        if let Some(attempt) = state.attempt.as_ref().filter(|attempt| !attempt.task.is_finished()) {
            return Ok(Progress::UnderWay(attempt.outcome.clone()));
        }
        if let Some(connection) = &state.connection {
            return Ok(Progress::Standing(connection.clone()));
        }
        let early = self.troubles.lock().retry_at.is_some_and(|at| Instant::now() < at);
        if early {
            return Err(self.unreachable());
        }
        let (tell, outcome) = watch::channel(None);
        // The attempt must not keep the link alive, or dropping the link would not end it.
        let link = Arc::downgrade(self);
        let (addr, config) = (self.addr.clone(), self.config.clone());
        let task = tokio::spawn(async move {
            let result = Connection::connect_shared(&addr, config).await;
            if let Some(link) = link.upgrade() {
                link.note(lane, &result);
            }
            tell.send_replace(Some(result));
        });
        state.attempt = Some(Attempt { outcome: outcome.clone(), task });
        Ok(Progress::UnderWay(outcome))
    }

    fn note(&self, lane: usize, result: &Result<Connection>) {
        match result {
            Ok(connection) => {
                self.lanes[lane].lock().connection = Some(connection.clone());
                let mut troubles = self.troubles.lock();
                (troubles.failures, troubles.retry_at) = (0, None);
            }
            Err(fault) => {
                let now = Instant::now();
                let mut troubles = self.troubles.lock();
                let doubled = self.config.backoff_min * (1 << troubles.failures.min(16));
                let wait = doubled.min(self.config.backoff_max);
                // Between a half and the whole, so that those who lost a server together do not return together.
                troubles.retry_at = Some(now + wait.mul_f64(rand::random_range(0.5..=1.0)));
                troubles.failures = troubles.failures.saturating_add(1);
                troubles.last = Some((now, fault.clone()));
            }
        }
    }

    /// The last failure, as the reason for this one.
    fn unreachable(&self) -> Fault {
        match &self.troubles.lock().last {
            Some((_, fault)) => fault.clone(),
            None => Fault::new(Code::Unreachable, format!("{} cannot be reached", self.addr)),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            if let Some(attempt) = &lane.get_mut().attempt {
                attempt.task.abort();
            }
        }
    }
}
