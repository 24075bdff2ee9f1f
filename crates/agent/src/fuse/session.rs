//! The session loop: a few threads read requests from one device and answer what they can on the spot.
//!
//! Each request becomes a future that is polled once on the thread that read it. A cache hit is ready then and answered
//! without another thread; a miss is moved into a task of the runtime, which answers when it is done. That first
//! poll uses a waker that does nothing, and loses nothing: the task polls again at once and leaves the real one.
//!
//! A signal (INTERRUPT) ends a wait for a lock at once. Any other operation gets `interrupt_grace` to end by itself
//! first, since on a local disk it would not be interruptible at all, and programs with timers rely on that. Then the
//! caller leaves with EINTR: an operation without effect is dropped, one with effect runs on unheard, what its
//! reply would have handed out is taken back, and pages that the kernel would have dropped with it are dropped then.
//! What is dropped is dropped before the caller hears of it: an operation for a lock takes back by itself what it may
//! have got, and what the caller asks for next must come after that.
//!
//! # Invariants
//! - Every request but FORGET is answered once: a panic or a dropped task answers EIO.
//! - Reader threads never wait for the network. They wait for room when `max_tasks` operations are under way.
//!
//! # Not here
//! - What requests mean: the [`Handler`].

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, JoinHandle};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::abi::{self, op};
use super::buffer::{Buffer, Pool};
use super::device::{Device, Received, Sent};
use super::init::{Agreed, Unfit, negotiate};
use super::interrupt::{Interrupts, Ticket};
use super::notify::{Notice, Notifier};
use super::reply::{Reply, Undo};
use super::request::{Header, Malformed, Op, Request, SetAttr};
use crate::metrics;
use crate::{Error, FuseConfig};

/// An operation under way.
pub type Call = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// Gives requests their meaning.
pub trait Handler: Send + Sync + 'static {
    /// Starts an operation. `op` is borrowed from the request; `payload` is the data of a WRITE and may be kept.
    /// The first poll happens on the reader's thread and must not block.
    fn call(self: Arc<Self>, header: Header, op: Op<'_>, payload: Bytes) -> Call;

    /// Gives back `count` references on an inode.
    fn forget(&self, nodeid: u64, count: u64);

    /// Takes back what a reply handed out that the kernel did not get.
    fn undo(self: Arc<Self>, undo: Undo) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// A running session. Dropping it does not end it; the mount's end does.
#[derive(Debug)]
pub struct Session {
    notifier: Notifier,
    agreed: watch::Receiver<Option<Result<Agreed, Unfit>>>,
    readers: watch::Receiver<usize>,
    interrupts: Arc<Interrupts>,
    tasks: Arc<Semaphore>,
    lock_waits: Arc<Semaphore>,
    config: FuseConfig,
    threads: Vec<JoinHandle<()>>,
}

impl Session {
    /// Starts serving a device on which a mount was made. `agreed` is what an earlier agent negotiated, if one did:
    /// the kernel sends INIT only once per mount. The handler is made with the notifier in hand.
    pub fn start<H: Handler>(
        device: Device,
        config: FuseConfig,
        agreed: Option<Agreed>,
        runtime: &Handle,
        handler: impl FnOnce(&Notifier) -> Arc<H>,
    ) -> Result<Session, Error> {
        let device = Arc::new(device);
        let (notifier, writer) = Notifier::new(Arc::clone(&device), config.notices_max);
        let (agreed, agreed_seen) = watch::channel(agreed.map(Ok));
        let (readers, readers_seen) = watch::channel(config.readers.max(1));
        let shared = Arc::new(Shared {
            device,
            handler: handler(&notifier),
            notifier: notifier.clone(),
            pool: Pool::new(config.max_write as usize, config.buffers_max),
            interrupts: Arc::default(),
            tasks: Arc::new(Semaphore::new(config.tasks_max as usize)),
            lock_waits: Arc::new(Semaphore::new(config.lock_waits_max as usize)),
            agreed,
            readers,
            runtime: runtime.clone(),
            config,
        });
        let mut session = Session {
            notifier: notifier.clone(),
            agreed: agreed_seen,
            readers: readers_seen,
            interrupts: Arc::clone(&shared.interrupts),
            tasks: Arc::clone(&shared.tasks),
            lock_waits: Arc::clone(&shared.lock_waits),
            config,
            threads: Vec::new(),
        };
        if let Some(Ok(agreed)) = *session.agreed.borrow() {
            notifier.set_epochs(agreed.minor >= abi::VERSION_MINOR_EPOCH);
        }
        session.spawn("fuse-notify".into(), move || writer.run())?;
        for number in 0..config.readers.max(1) {
            let reader = Reader(Arc::clone(&shared));
            session.spawn(format!("fuse-{number}"), move || {
                reader.run();
                reader.leave();
            })?;
        }
        Ok(session)
    }

    /// Tells the kernel things.
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Waits until the kernel's INIT was answered.
    pub async fn ready(&self) -> Result<Agreed, Error> {
        let mut agreed = self.agreed.clone();
        match agreed.wait_for(Option::is_some).await.map(|agreed| *agreed) {
            Ok(Some(Ok(agreed))) => Ok(agreed),
            Ok(Some(Err(unfit))) => Err(unfit.into()),
            Ok(None) | Err(_) => Err(Error::Ended),
        }
    }

    /// Waits until the mount is gone and every operation under way has ended, at most `drain_max` for the latter.
    pub async fn ended(&self) {
        let mut readers = self.readers.clone();
        let _ = readers.wait_for(|&readers| readers == 0).await;
        self.interrupts.interrupt_all();
        let drained = async {
            let _ = self.tasks.acquire_many(self.config.tasks_max).await;
            let _ = self.lock_waits.acquire_many(self.config.lock_waits_max).await;
        };
        if tokio::time::timeout(self.config.drain_max, drained).await.is_err() {
            tracing::warn!("operations were still under way when the mount ended");
        }
    }

    /// Joins the threads; call after [`Session::ended`], then it does not wait.
    pub fn join(&mut self) {
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }

    fn spawn(&mut self, name: String, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = Builder::new().name(name).spawn(work).map_err(Error::Thread)?;
        self.threads.push(thread);
        Ok(())
    }
}

/// What readers and tasks share.
struct Shared<H> {
    device: Arc<Device>,
    handler: Arc<H>,
    notifier: Notifier,
    pool: Arc<Pool>,
    interrupts: Arc<Interrupts>,
    tasks: Arc<Semaphore>,
    lock_waits: Arc<Semaphore>,
    agreed: watch::Sender<Option<Result<Agreed, Unfit>>>,
    readers: watch::Sender<usize>,
    runtime: Handle,
    config: FuseConfig,
}

struct Reader<H>(Arc<Shared<H>>);

impl<H: Handler> Reader<H> {
    fn run(&self) {
        let _runtime = self.0.runtime.enter();
        let mut buffer = self.0.pool.own();
        loop {
            match self.0.device.receive(buffer.room()) {
                Ok(Received::Request(len)) => {
                    // Whatever a request does to us, the next one gets served.
                    let served = catch_unwind(AssertUnwindSafe(|| self.serve(&mut buffer, len)));
                    if served.is_err() {
                        tracing::error!("an operation panicked; its caller got EIO");
                    }
                }
                Ok(Received::Nothing) => {}
                Ok(Received::Ended) => return,
                Err(error) => {
                    tracing::error!(%error, "cannot read from the FUSE device any more");
                    return;
                }
            }
        }
    }

    /// Counts this reader out. With the last one the kernel listens no more.
    fn leave(&self) {
        self.0.readers.send_modify(|readers| {
            *readers -= 1;
            if *readers == 0 {
                self.0.notifier.stop();
            }
        });
    }

    fn serve(&self, buffer: &mut Buffer, len: usize) {
        let Request { header, op } = match Request::decode(buffer.request(len)) {
            Ok(request) => request,
            Err(malformed) => return self.refuse(&malformed),
        };
        metrics::request(header.opcode);
        match op {
            Op::Forget { count } => self.0.handler.forget(header.nodeid, count),
            Op::BatchForget { rows } => {
                for (nodeid, count) in rows.iter() {
                    self.0.handler.forget(nodeid, count);
                }
            }
            Op::Interrupt { unique } => self.interrupt(header.unique, unique),
            Op::Init(init) => {
                let answer = Answer::new(&self.0, header.unique);
                let agreed = match negotiate(&init, &self.0.config.wish()) {
                    Ok((reply, agreed)) => {
                        self.0.notifier.set_epochs(agreed.minor >= abi::VERSION_MINOR_EPOCH);
                        answer.send(reply);
                        Ok(agreed)
                    }
                    Err(unfit) => {
                        answer.send(Reply::error(libc::EPROTO));
                        Err(unfit)
                    }
                };
                self.0.agreed.send_replace(Some(agreed));
            }
            Op::Destroy => Answer::new(&self.0, header.unique).send(Reply::done()),
            Op::Other => Answer::new(&self.0, header.unique).send(Reply::error(libc::ENOSYS)),
            Op::Write { write, data } => {
                let payload = self.0.pool.keep(buffer, data.len());
                self.start(header, Op::Write { write, data: &payload.clone() }, payload);
            }
            op => self.start(header, op, Bytes::new()),
        }
    }

    fn start(&self, header: Header, op: Op<'_>, payload: Bytes) {
        let kind = Kind::of(&header, &op);
        let answer = Answer::new(&self.0, header.unique);
        let ticket = self.0.interrupts.enter(header.unique);
        let mut call = Arc::clone(&self.0.handler).call(header, op, payload);
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(reply) => {
                drop(ticket);
                answer.send(reply);
            }
            Poll::Pending => self.move_to_task(kind, call, answer, ticket),
        }
    }

    fn move_to_task(&self, kind: Kind, call: Call, answer: Answer<H>, ticket: Ticket) {
        metrics::moved().increment(1);
        let permit = match kind {
            // Waits for locks may fill their own bound and no other: the unlock that ends them must get through.
            Kind::LockWait => match Arc::clone(&self.0.lock_waits).try_acquire_owned() {
                Ok(permit) => permit,
                Err(_) => return answer.send(Reply::error(libc::ENOLCK)),
            },
            Kind::Read | Kind::Change | Kind::Content(_) => {
                match Arc::clone(&self.0.tasks).try_acquire_owned() {
                    Ok(permit) => permit,
                    Err(_) => {
                        metrics::full().increment(1);
                        match self.0.runtime.block_on(Arc::clone(&self.0.tasks).acquire_owned()) {
                            Ok(permit) => permit,
                            Err(_) => return,
                        }
                    }
                }
            }
        };
        self.0.runtime.spawn(run(kind, call, answer, ticket, permit));
    }

    fn interrupt(&self, unique: u64, interrupted: u64) {
        metrics::interrupts().increment(1);
        // Another thread has read that request and not entered it yet, or has just answered it. EAGAIN makes the
        // kernel repeat the interrupt in the first case and is ignored in the second.
        if !self.0.interrupts.interrupt(interrupted) {
            let _ = self.0.device.reply(unique, &Reply::error(libc::EAGAIN));
        }
    }

    fn refuse(&self, malformed: &Malformed) {
        tracing::error!(%malformed, "the kernel sent what we cannot read");
        metrics::malformed().increment(1);
        if let Malformed::Body { unique, opcode } = *malformed
            && !matches!(opcode, op::FORGET | op::BATCH_FORGET)
            && unique & abi::UNIQUE_INTERRUPT == 0
        {
            Answer::new(&self.0, unique).send(Reply::error(libc::EINVAL));
        }
    }
}

/// What a signal may do to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// It waits for another process: leave at once.
    LockWait,
    /// It changes nothing, or takes back by itself what nobody heard of: may be dropped. Or it writes: once the bytes are in the
    /// buffer nothing is left to do but wait, and before that they must not get there later, over what is written meanwhile.
    Read,
    /// It changes something: runs to its end, heard or not.
    Change,
    /// The same with the content of this inode: the kernel drops its pages when it hears of that, and else has to be told.
    Content(u64),
}

impl Kind {
    fn of(header: &Header, op: &Op<'_>) -> Kind {
        match op {
            Op::Setlk { wait: true, .. } => Kind::LockWait,
            Op::Setlk { lock, .. } if lock.kind.cast_signed() != libc::F_UNLCK => Kind::Read,
            Op::Lookup { .. }
            | Op::Getattr { .. }
            | Op::Statx { .. }
            | Op::Readlink
            | Op::Read { .. }
            | Op::Write { .. }
            | Op::Statfs
            | Op::Getxattr { .. }
            | Op::Listxattr { .. }
            | Op::Readdir { .. }
            | Op::Getlk(_)
            | Op::Access { .. }
            | Op::Lseek { .. } => Kind::Read,
            Op::Fallocate { .. } | Op::Setattr(SetAttr { size: Some(_), .. }) => Kind::Content(header.nodeid),
            Op::CopyFileRange { out_inode, .. } => Kind::Content(*out_inode),
            _ => Kind::Change,
        }
    }
}

async fn run<H: Handler>(
    kind: Kind,
    mut call: Call,
    answer: Answer<H>,
    ticket: Ticket,
    _permit: OwnedSemaphorePermit,
) {
    tokio::select! {
        biased;
        reply = &mut call => return answer.send(reply),
        () = ticket.interrupted() => {}
    }
    if kind != Kind::LockWait
        && let Ok(reply) = tokio::time::timeout(answer.shared.config.interrupt_grace, &mut call).await
    {
        return answer.send(reply);
    }
    drop(ticket);
    if matches!(kind, Kind::LockWait | Kind::Read) {
        drop(call);
        return answer.send(Reply::error(libc::EINTR));
    }
    let shared = Arc::clone(&answer.shared);
    answer.send(Reply::error(libc::EINTR));
    let reply = call.await;
    if let Kind::Content(ino) = kind {
        shared.notifier.post(Notice::Inode { ino, offset: Some(0), len: 0 });
    }
    if !reply.undo.is_empty() {
        Arc::clone(&shared.handler).undo(reply.undo).await;
    }
}

/// The duty to answer one request.
struct Answer<H: Handler> {
    shared: Arc<Shared<H>>,
    unique: u64,
    owed: bool,
}

impl<H: Handler> Answer<H> {
    fn new(shared: &Arc<Shared<H>>, unique: u64) -> Answer<H> {
        Answer { shared: Arc::clone(shared), unique, owed: true }
    }

    fn send(mut self, reply: Reply) {
        self.owed = false;
        if reply.errno().is_some() {
            metrics::errors().increment(1);
        }
        match self.shared.device.reply(self.unique, &reply) {
            Ok(Sent::Delivered) => {}
            Ok(Sent::Unwanted) => self.take_back(reply.undo),
            Err(error) => {
                tracing::error!(%error, unique = self.unique, "the kernel refused a reply; its caller gets EIO");
                self.take_back(reply.undo);
                let _ = self.shared.device.reply(self.unique, &Reply::error(libc::EIO));
            }
        }
    }

    fn take_back(&self, undo: Undo) {
        if !undo.is_empty() {
            self.shared.runtime.spawn(Arc::clone(&self.shared.handler).undo(undo));
        }
    }
}

impl<H: Handler> Drop for Answer<H> {
    fn drop(&mut self) {
        if self.owed {
            let _ = self.shared.device.reply(self.unique, &Reply::error(libc::EIO));
        }
    }
}
