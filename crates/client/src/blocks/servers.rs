//! The data servers as this process sees them: a link to each, how fast it usually answers, when it failed last.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::block::{Reply, Request, method};
use torchfs_proto::{Code, Fault, Result, ServerId, msg};
use torchfs_rpc::{Call, Data, Link, LinkCall, Payload};

use crate::Connector;

/// All data servers that were needed so far; as many as the placement names.
pub(crate) struct Servers {
    connector: Arc<dyn Connector>,
    runtime: Handle,
    known: Mutex<HashMap<ServerId, Arc<Server>>>,
}

/// One data server.
pub(crate) struct Server {
    pub id: ServerId,
    pub addr: String,
    link: Link,
    runtime: Handle,
    /// Requests in flight.
    busy: AtomicU64,
    /// A smoothed time per request, 0 before the first.
    usual_us: AtomicU64,
    failed: Mutex<Option<Instant>>,
    /// The log has said that it does not answer.
    silent: AtomicBool,
}

impl Servers {
    pub fn new(connector: Arc<dyn Connector>, runtime: Handle) -> Servers {
        Servers { connector, runtime, known: Mutex::default() }
    }

    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The server of this number, at the address that the placement gives.
    pub fn find(&self, placement: &Placement, id: ServerId) -> Result<Arc<Server>> {
        let Some(info) = placement.servers.iter().find(|server| server.id == id) else {
            return Err(Fault::new(Code::Unreachable, format!("data server {id} is not in the placement")));
        };
        let mut known = self.known.lock();
        if let Some(server) = known.get(&id).filter(|server| server.addr == info.addr) {
            return Ok(server.clone());
        }
        let server = Arc::new(Server {
            id,
            addr: info.addr.clone(),
            link: self.connector.link(&info.addr),
            runtime: self.runtime.clone(),
            busy: AtomicU64::new(0),
            usual_us: AtomicU64::new(0),
            failed: Mutex::new(None),
            silent: AtomicBool::new(false),
        });
        known.insert(id, server.clone());
        Ok(server)
    }
}

impl Server {
    /// Makes one request.
    pub async fn call(&self, request: &Request, payload: Payload, until: Instant) -> Result<(Reply, Data)> {
        let mut call =
            Call::new(method::BLOCK, msg::encode(request), Duration::ZERO).payload(payload).carries_sums();
        call.deadline = until;
        let began = Instant::now();
        let _busy = Busy::new(&self.busy);
        let result = Within { runtime: &self.runtime, call: self.link.call(call) }.await;
        let result = result.and_then(|reply| Ok((msg::decode::<Reply>(&reply.body)?, reply.payload)));
        self.note(began, &result);
        result.map_err(|fault| self.named(fault))
    }

    /// How long it will take, as far as can be told: what it usually takes, for each request before this one.
    pub fn expected_us(&self) -> u64 {
        self.usual_us.load(Ordering::Relaxed).max(1) * (self.busy.load(Ordering::Relaxed) + 1)
    }

    /// What a request usually takes; `None` before the first.
    pub fn usual(&self) -> Option<Duration> {
        match self.usual_us.load(Ordering::Relaxed) {
            0 => None,
            us => Some(Duration::from_micros(us)),
        }
    }

    /// Whether it failed within this time.
    pub fn failed_within(&self, time: Duration) -> bool {
        self.failed.lock().is_some_and(|at| at.elapsed() < time)
    }

    /// The same fault with the server's name.
    pub fn named(&self, fault: Fault) -> Fault {
        Fault { what: format!("data server {} at {}: {}", self.id, self.addr, fault.what), ..fault }
    }

    fn note<T>(&self, began: Instant, result: &Result<T>) {
        match result {
            Err(fault) if matches!(fault.code, Code::Unreachable | Code::Timeout) => {
                *self.failed.lock() = Some(Instant::now());
                if !self.silent.swap(true, Ordering::Relaxed) {
                    tracing::warn!(server = %self.id, addr = self.addr, "a data server is silent: {fault}");
                }
            }
            _ => {
                let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
                let usual = self.usual_us.load(Ordering::Relaxed);
                let smoothed = if usual == 0 { took } else { (usual * 7 + took) / 8 };
                self.usual_us.store(smoothed.max(1), Ordering::Relaxed);
                if self.silent.swap(false, Ordering::Relaxed) {
                    *self.failed.lock() = None;
                    tracing::info!(server = %self.id, addr = self.addr, "a data server is back");
                }
            }
        }
    }
}

/// Counts a request while it is in flight.
struct Busy<'a>(&'a AtomicU64);

impl<'a> Busy<'a> {
    fn new(count: &'a AtomicU64) -> Busy<'a> {
        count.fetch_add(1, Ordering::Relaxed);
        Busy(count)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Polls a call within our runtime, since a link that has to connect first needs one and callers come from threads of
/// their own.
struct Within<'a> {
    runtime: &'a Handle,
    call: LinkCall,
}

impl Future for Within<'_> {
    type Output = Result<torchfs_rpc::Reply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let _context = self.runtime.enter();
        Pin::new(&mut self.call).poll(cx)
    }
}
