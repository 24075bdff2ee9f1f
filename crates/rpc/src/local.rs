//! Calls within a process: the service's future is polled in the caller's task, and payloads are handed over.
//!
//! The same API, limits and faults as over TCP, without sockets, tasks or copies; only parts are joined and files read,
//! because a receiver gets one run of bytes.
//!
//! # Invariants
//! - A call that is ready at once allocates nothing beyond the service's own future; the timer is made when it is not.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Sleep;
use torchfs_proto::{Fault, Result};

use crate::call::{Answering, Call, Peer, Reply, Request, Service, panicked, timed_out};
use crate::payload::{Payload, Way};

/// The connection: a service, and who it thinks is calling.
pub(crate) struct Local {
    service: Arc<dyn Service>,
    peer: Peer,
    runtime: Option<Handle>,
}

impl Local {
    pub fn new(service: Arc<dyn Service>, peer: Peer) -> Local {
        Local { service, peer, runtime: Handle::try_current().ok() }
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The runtime for timers and blocking reads: that of the caller, or of whoever made the connection.
    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.runtime.clone())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.service.closed(&self.peer);
    }
}

/// One call.
pub(crate) struct LocalCall {
    step: Step,
    method: u16,
    deadline: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

enum Step {
    Start(Call),
    ReadRequest(Call, Reading),
    Answering(Answering),
    ReadAnswer(Bytes, Reading),
    Over,
}

/// A file that is read on a blocking thread.
type Reading = JoinHandle<Result<Payload>>;

impl LocalCall {
    pub fn new(call: Call) -> LocalCall {
        LocalCall { method: call.method, deadline: call.deadline, step: Step::Start(call), timer: None }
    }

    pub fn poll(&mut self, local: &Local, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
        match self.advance(local, cx) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => {
                ready!(self.poll_timer(local, cx));
                self.step = Step::Over; // drops the service's future, as a server would
                Poll::Ready(Err(self.timed_out(local)))
            }
        }
    }

    fn advance(&mut self, local: &Local, cx: &mut Context<'_>) -> Poll<Result<Reply>> {
        loop {
            match std::mem::replace(&mut self.step, Step::Over) {
                Step::Start(mut call) => {
                    call.check()?;
                    if Instant::now() >= self.deadline {
                        return Poll::Ready(Err(self.timed_out(local)));
                    }
                    let payload = std::mem::take(&mut call.payload);
                    match in_memory(payload, local)? {
                        Memory::Here(payload) => {
                            call.payload = payload;
                            self.step = Step::Answering(self.ask(call, local)?);
                        }
                        Memory::Soon(reading) => self.step = Step::ReadRequest(call, reading),
                    }
                }
                Step::ReadRequest(mut call, mut reading) => match Pin::new(&mut reading).poll(cx) {
                    Poll::Ready(read) => {
                        call.payload = read.map_err(|_| panicked(self.method))??;
                        self.step = Step::Answering(self.ask(call, local)?);
                    }
                    Poll::Pending => {
                        self.step = Step::ReadRequest(call, reading);
                        return Poll::Pending;
                    }
                },
                Step::Answering(mut answering) => {
                    let polled = catch_unwind(AssertUnwindSafe(|| answering.as_mut().poll(cx)))
                        .map_err(|_| panicked(self.method))?;
                    let Poll::Ready(answer) = polled else {
                        self.step = Step::Answering(answering);
                        return Poll::Pending;
                    };
                    let answer = answer?;
                    answer.check()?;
                    match in_memory(answer.payload, local)? {
                        Memory::Here(payload) => return done(answer.body, payload),
                        Memory::Soon(reading) => self.step = Step::ReadAnswer(answer.body, reading),
                    }
                }
                Step::ReadAnswer(body, mut reading) => match Pin::new(&mut reading).poll(cx) {
                    Poll::Ready(read) => return done(body, read.map_err(|_| panicked(self.method))??),
                    Poll::Pending => {
                        self.step = Step::ReadAnswer(body, reading);
                        return Poll::Pending;
                    }
                },
                Step::Over => panic!("a call was polled after it ended"),
            }
        }
    }

    /// Hands the request to the service.
    fn ask(&self, call: Call, local: &Local) -> Result<Answering> {
        let request = Request {
            method: call.method,
            body: call.body,
            payload: call.payload.into_data(),
            deadline: call.deadline,
            trace: call.trace,
        };
        let (service, peer) = (local.service.clone(), local.peer.clone());
        catch_unwind(AssertUnwindSafe(|| service.call(peer, request))).map_err(|_| panicked(self.method))
    }

    /// Ready when the deadline has passed.
    fn poll_timer(&mut self, local: &Local, cx: &mut Context<'_>) -> Poll<()> {
        let timer = match &mut self.timer {
            Some(timer) => timer,
            none => match local.runtime() {
                Some(runtime) => {
                    let _context = runtime.enter();
                    none.insert(Box::pin(tokio::time::sleep_until(self.deadline.into())))
                }
                // Without any runtime the deadline is looked at whenever the call is polled.
                None if Instant::now() >= self.deadline => return Poll::Ready(()),
                None => return Poll::Pending,
            },
        };
        timer.as_mut().poll(cx)
    }

    fn timed_out(&self, local: &Local) -> Fault {
        timed_out(local.peer.addr(), self.method)
    }
}

enum Memory {
    Here(Payload),
    Soon(Reading),
}

/// Brings a file's bytes into memory: here if that is quick, else on a blocking thread.
fn in_memory(payload: Payload, local: &Local) -> Result<Memory> {
    match (payload.way(true), local.runtime()) {
        (Way::AsIs, _) => Ok(Memory::Here(payload)),
        (Way::ReadElsewhere, Some(runtime)) => {
            Ok(Memory::Soon(runtime.spawn_blocking(move || payload.read())))
        }
        (Way::ReadHere | Way::ReadElsewhere, _) => Ok(Memory::Here(payload.read()?)),
    }
}

fn done(body: Bytes, payload: Payload) -> Poll<Result<Reply>> {
    Poll::Ready(Ok(Reply { body, payload: payload.into_data() }))
}
