//! One session with the metadata service.
//!
//! - `session`: the state and where replies are heard · `flight`: one change on its way · `ledger`: changes not yet durable ·
//!   `leases`: what is held · `recover`: lost connections and new leaders · `sync`: waiting for durability · `ids`: block ids ·
//!   `tasks`: renewals, events, what is given back.

mod config;
mod flight;
mod ids;
mod leases;
mod ledger;
mod marks;
mod recover;
mod session;
mod sync;
mod tasks;

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use torchfs_proto::attr::Raw;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::meta::{Done, Op, SessionInfo};
use torchfs_proto::{BlockId, Code, Fault, Ino, Result};

pub use config::MetaConfig;
pub use marks::Marks;
use session::Shared;

/// Marks a place in the row of this session's changes: everything that was answered up to it.
/// The default is before the first change. Keep the highest of a file or folder and wait for it with [`Meta::durable`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Mark(pub(crate) u64);

/// When something was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    forgot: u64,
    bare: u64,
}

/// What came of a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Changed {
    /// The answer.
    pub done: Done,
    /// Its place in the row of changes, to wait for its durability.
    pub seq: Mark,
}

/// The owner of caches that leases protect (vfs). Called without any lock of ours held.
pub trait Keeper: Send + Sync + 'static {
    /// Give leases back: the future writes back what is dirty (commits still find their grant number), drops what is
    /// cached, and tells whether the file is still open for writing here. `names`: those that change; empty means all.
    fn recall(&self, ino: Ino, bits: u8, names: Vec<Raw>) -> BoxFuture<'static, bool>;

    /// The inode lost its last name elsewhere: call [`Meta::release`] when it is not open here any more.
    fn orphaned(&self, ino: Ino);

    /// A file held SHARED was changed by another session.
    fn changed(&self, ino: Ino);

    /// All leases are void: drop what they protected.
    fn lost(&self);

    /// Inodes open here, told to a new leader.
    fn open_inodes(&self) -> Vec<Ino>;

    /// The session is gone: what is dirty is lost, errors latch.
    fn fenced(&self);
}

/// One session with the metadata service.
///
/// Calls may be made from any thread. `ask` and `change` send from the caller's thread at the first poll; a service within
/// the process answers at that poll.
pub struct Meta {
    shared: Arc<Shared>,
    closed: AtomicBool,
}

impl Meta {
    /// Opens a session at whoever leads.
    pub async fn open(config: MetaConfig) -> Result<Arc<Meta>> {
        let runtime = config.runtime.clone();
        let shared = match runtime.spawn(recover::open(config)).await {
            Ok(shared) => shared?,
            Err(error) => {
                return Err(Fault::new(Code::Internal, format!("opening a session failed: {error}")));
            }
        };
        Ok(Arc::new(Meta { shared, closed: AtomicBool::new(false) }))
    }

    /// What the service told about the session when it was opened or resumed last.
    pub fn info(&self) -> Arc<SessionInfo> {
        self.shared.info.read().clone()
    }

    /// The newest known placement.
    pub fn placement(&self) -> Arc<Placement> {
        self.shared.placement.read().clone()
    }

    /// Fetches the placement again, for those who were told that theirs is old.
    pub async fn fetch_placement(&self) -> Result<Arc<Placement>> {
        match self.ask(Op::Placement).await? {
            Done::Placement(placement) => {
                self.shared.set_placement(placement);
                Ok(self.placement())
            }
            other => Err(unexpected("Placement", &other)),
        }
    }

    /// Bytes of new content that may be buffered; more would not find space.
    pub fn space(&self) -> u64 {
        self.shared.space.load(Ordering::Relaxed)
    }

    /// Says who honours recalls; until then they are acknowledged at once.
    pub fn set_keeper(&self, keeper: Weak<dyn Keeper>) {
        *self.shared.keeper.write() = Some(keeper);
    }

    /// Asks something that changes nothing. Tried again across lost connections and leaders, until `op_timeout`.
    pub async fn ask(&self, op: Op) -> Result<Done> {
        let until = Instant::now() + self.shared.config.op_timeout;
        self.shared.ask(op, until).await
    }

    /// Changes something, exactly once, whatever breaks meanwhile. A dropped future, or one that ends with `Timeout`, does
    /// not undo the change: it happens and its answer is consumed in the background. Only a `Lock` that waits is given up
    /// with its future. It may have been granted just then, but is not once something else was asked for by the same owner there.
    pub async fn change(&self, op: Op) -> Result<Changed> {
        self.shared.change(op).await
    }

    /// Waits until every change answered so far, up to this mark, is durable.
    pub async fn durable(&self, mark: Mark) -> Result<()> {
        let until = Instant::now() + self.shared.config.op_timeout;
        self.shared.durable(mark.0, until).await
    }

    /// Waits until every change answered so far is durable.
    pub async fn durable_all(&self) -> Result<()> {
        let last = Mark(self.shared.state.lock().ledger.last());
        self.durable(last).await
    }

    /// If all these lease bits are held: for how long still.
    pub fn holds(&self, ino: Ino, bits: u8) -> Option<Duration> {
        self.shared.state.lock().leases.holds(ino, bits, Instant::now())
    }

    /// The number of the WRITE or SHARED grant, for commits; 0 if there is none. While a recall is being honoured it is
    /// still the old one, so that what is dirty can be committed.
    pub fn grant_number(&self, ino: Ino) -> u64 {
        self.shared.state.lock().leases.writing(ino)
    }

    /// Rises whenever all leases became void.
    pub fn lease_epoch(&self) -> u32 {
        self.shared.state.lock().leases.epoch()
    }

    /// The inode is not known here any more: its leases are given back, in the background.
    pub fn forget(&self, ino: Ino) {
        self.shared.give_back(ino, u8::MAX);
    }

    /// To be noted before something is asked, for [`Meta::forgot_since`] and [`Meta::bare_since`].
    pub fn now(&self) -> Moment {
        Moment { forgot: self.shared.forgot.now(), bare: self.shared.bare.now() }
    }

    /// Whether the inode was forgotten since. Then an answer about it does not mean that the service counts this session among
    /// those that know it, and it has to be asked again.
    pub fn forgot_since(&self, ino: Ino, then: Moment) -> bool {
        self.shared.forgot.since(ino, then.forgot)
    }

    /// Whether an answer about the inode was heard since that no lease protects, whatever is held by now.
    pub fn bare_since(&self, ino: Ino, then: Moment) -> bool {
        self.shared.bare.since(ino, then.bare)
    }

    /// Gives leases back, in the background; they are not held from now on.
    pub fn give_back(&self, ino: Ino, bits: u8) {
        self.shared.give_back(ino, bits);
    }

    /// An inode without a name is not open here any more; told in the background.
    pub fn release(&self, ino: Ino) {
        self.shared.release(ino);
    }

    /// A fresh block id, from ranges that are durably ours.
    pub async fn block_id(&self) -> Result<BlockId> {
        self.shared.block_id().await
    }

    /// Where timers and tasks live.
    pub fn runtime(&self) -> &tokio::runtime::Handle {
        &self.shared.config.runtime
    }

    /// Runs a task that the session owns and joins when it is closed.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.shared.spawn(task);
    }

    /// Waits for the tasks given to it (those that do not end in time are aborted), makes everything durable, ends the
    /// session and joins its own tasks.
    pub async fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let shared = &self.shared;
        let tasks = std::mem::take(&mut *shared.tasks.lock());
        join(shared, tasks).await;
        while shared.ended().is_none() && shared.return_batch().await {}
        let mut result = self.durable_all().await;
        if result.is_ok() {
            shared.closing.store(true, Ordering::Release);
            result = match self.ask(Op::CloseSession).await {
                Ok(_) => Ok(()),
                // The answer to a first try was lost with its connection.
                Err(fault) if fault.code == Code::NoSession => Ok(()),
                Err(fault) => Err(fault),
            };
        }
        self.stop();
        let own = std::mem::take(&mut *shared.own.lock());
        join(shared, own).await;
        result
    }

    fn stop(&self) {
        let closed = Fault::new(Code::NoSession, "the session with the metadata service was closed");
        self.shared.end(closed, false);
        self.shared.own.lock().abort_all();
    }
}

impl Drop for Meta {
    fn drop(&mut self) {
        self.stop();
        self.shared.tasks.lock().abort_all();
    }
}

/// Waits for tasks, not longer than the configuration allows; then they are aborted.
async fn join(shared: &Shared, mut tasks: JoinSet<()>) {
    let until = Instant::now() + shared.config.close_timeout;
    let ended = std::pin::pin!(async { while tasks.join_next().await.is_some() {} });
    if shared.within(until, ended).await.is_err() {
        tracing::warn!("tasks of the session did not end in time and are aborted");
    }
}

/// The fault for an answer that does not fit its question.
pub(crate) fn unexpected(op: &str, done: &Done) -> Fault {
    let mut shown = format!("{done:?}");
    shown.truncate(shown.floor_char_boundary(60));
    Fault::new(Code::Protocol, format!("the metadata service answered {op} with {shown}"))
        .next("check that both ends run neighbouring versions of torchfs")
}
