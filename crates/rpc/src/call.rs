//! The nouns of a call, the same over TCP and within a process.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use torchfs_proto::{Code, Fault, Result};

use crate::config::Role;
use crate::frame::BODY_MAX;
use crate::payload::{Data, Payload};

/// A request as its caller gives it.
#[derive(Debug)]
pub struct Call {
    /// The number of the method.
    pub method: u16,
    /// The small typed message.
    pub body: Bytes,
    /// Bulk bytes beside it.
    pub payload: Payload,
    /// The payload carries checksums of its own (the chunks of a block), so the frame adds none.
    pub carries_sums: bool,
    /// When the call ends at the latest, with a `Timeout`.
    pub deadline: Instant,
    /// Follows the request through all processes; 0 is none.
    pub trace: u64,
}

impl Call {
    /// A call without payload that may take so long.
    pub fn new(method: u16, body: impl Into<Bytes>, within: Duration) -> Call {
        Call {
            method,
            body: body.into(),
            payload: Payload::None,
            carries_sums: false,
            deadline: Instant::now() + within,
            trace: 0,
        }
    }

    /// The same with a payload.
    pub fn payload(mut self, payload: impl Into<Payload>) -> Call {
        self.payload = payload.into();
        self
    }

    /// The same, knowing that the payload carries checksums of its own.
    pub fn carries_sums(mut self) -> Call {
        self.carries_sums = true;
        self
    }

    /// The same with a trace id.
    pub fn trace(mut self, trace: u64) -> Call {
        self.trace = trace;
        self
    }

    /// Refuses what one frame cannot carry.
    pub(crate) fn check(&self) -> Result<()> {
        check_body(&self.body)?;
        self.payload.checked_len().map(|_| ())
    }
}

/// A request as the service gets it.
#[derive(Debug)]
pub struct Request {
    /// The number of the method.
    pub method: u16,
    /// The small typed message.
    pub body: Bytes,
    /// Bulk bytes beside it.
    pub payload: Data,
    /// When the caller stops waiting; the service's future is dropped then.
    pub deadline: Instant,
    /// Follows the request through all processes; 0 is none.
    pub trace: u64,
}

/// What a service answers.
#[derive(Debug, Default)]
pub struct Answer {
    /// The small typed message.
    pub body: Bytes,
    /// Bulk bytes beside it.
    pub payload: Payload,
    /// The payload carries checksums of its own, so the frame adds none; needed for sendfile.
    pub carries_sums: bool,
}

impl Answer {
    /// An answer without payload.
    pub fn new(body: impl Into<Bytes>) -> Answer {
        Answer { body: body.into(), payload: Payload::None, carries_sums: false }
    }

    /// The same with a payload.
    pub fn payload(mut self, payload: impl Into<Payload>) -> Answer {
        self.payload = payload.into();
        self
    }

    /// The same, knowing that the payload carries checksums of its own.
    pub fn carries_sums(mut self) -> Answer {
        self.carries_sums = true;
        self
    }

    /// Refuses what one frame cannot carry.
    pub(crate) fn check(&self) -> Result<()> {
        check_body(&self.body)?;
        self.payload.checked_len().map(|_| ())
    }
}

/// What the caller gets.
#[derive(Debug, Default)]
pub struct Reply {
    /// The small typed message.
    pub body: Bytes,
    /// Bulk bytes beside it.
    pub payload: Data,
}

/// The future of an answer.
pub type Answering = Pin<Box<dyn Future<Output = Result<Answer>> + Send>>;

/// What answers requests.
///
/// `call` is polled once where the request was read (or, within a process, where it was made); an answer that is ready
/// then costs no task. It is dropped when the caller cancels, the deadline passes or the connection ends: work that
/// must go on has to live in a task of the service's own.
pub trait Service: Send + Sync + 'static {
    /// Answers one request.
    fn call(self: Arc<Self>, peer: Peer, request: Request) -> Answering;

    /// The connection of this peer has ended; no request of it is running any more.
    fn closed(&self, _peer: &Peer) {}
}

/// Who is at the other end of a connection. Cheap to clone.
#[derive(Clone)]
pub struct Peer(Arc<PeerInfo>);

struct PeerInfo {
    id: u64,
    addr: String,
    role: Role,
}

impl Peer {
    /// A peer with an id that no other connection of this process has.
    pub fn new(addr: impl Into<String>, role: Role) -> Peer {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Peer(Arc::new(PeerInfo { id: NEXT.fetch_add(1, Ordering::Relaxed), addr: addr.into(), role }))
    }

    /// Unique per connection within this process.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Where it is, for people.
    pub fn addr(&self) -> &str {
        &self.0.addr
    }

    /// What it says it is.
    pub fn role(&self) -> Role {
        self.0.role
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} (connection {})", self.0.role, self.0.addr, self.0.id)
    }
}

/// The fault of a call whose time is up.
pub(crate) fn timed_out(addr: &str, method: u16) -> Fault {
    Fault::new(Code::Timeout, format!("{addr} did not answer method {method} in time"))
        .next("check that the server is running, that its disk or its database answers, and that it is not overloaded")
}

/// The fault of a service that panicked.
pub(crate) fn panicked(method: u16) -> Fault {
    Fault::new(Code::Internal, format!("method {method} failed inside the server; its log has the place"))
}

fn check_body(body: &Bytes) -> Result<()> {
    if body.len() <= BODY_MAX {
        return Ok(());
    }
    Err(Fault::new(
        Code::TooLarge,
        format!("a message of {} bytes is longer than the {BODY_MAX} that one frame carries", body.len()),
    ))
}
