//! One session with the metadata service.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use torchfs_proto::attr::Raw;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::meta::{Done, Op, OpenSession, SessionInfo};
use torchfs_proto::{BlockId, Code, Fault, Ino, Result};

use crate::Connector;

/// Settings of [`Meta`].
#[derive(Clone)]
pub struct MetaConfig {
    /// HOST:PORT of every metadata server.
    pub addrs: Vec<String>,
    /// How they are reached.
    pub connector: Arc<dyn Connector>,
    /// Who we are.
    pub who: OpenSession,
    /// Where timers and tasks live.
    pub runtime: tokio::runtime::Handle,
    /// How long a call waits for a silent service.
    pub op_timeout: Duration,
    /// Block ids asked for at a time.
    pub ids_per_grant: u32,
    /// Changes kept that are not known to be durable; further ones wait.
    pub ledger_max: usize,
}

/// Marks a place in the row of this session's changes: everything that was answered up to it.
/// The default is before the first change. Keep the highest of a file or folder and wait for it with [`Meta::durable`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Mark(pub(crate) u64);

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
pub struct Meta {
    info: Arc<SessionInfo>,
}

impl Meta {
    /// Opens a session.
    pub async fn open(_config: MetaConfig) -> Result<Arc<Meta>> {
        soon()
    }

    /// What the service told about the session.
    pub fn info(&self) -> Arc<SessionInfo> {
        self.info.clone()
    }

    /// The newest known placement.
    pub fn placement(&self) -> Arc<Placement> {
        Arc::new(Placement::default())
    }

    /// Bytes of new content that may be buffered.
    pub fn space(&self) -> u64 {
        0
    }

    /// Says who honours recalls; until then they are acknowledged at once.
    pub fn set_keeper(&self, _keeper: Weak<dyn Keeper>) {}

    /// Asks something that changes nothing. Tried again across lost connections and leaders.
    pub async fn ask(&self, _op: Op) -> Result<Done> {
        soon()
    }

    /// Changes something, exactly once, whatever breaks meanwhile. A dropped future does not undo the change: it happens and its
    /// answer is consumed in the background; only a waiting `Lock` is given up (send an unlock of the same owner after it).
    pub async fn change(&self, _op: Op) -> Result<Changed> {
        soon()
    }

    /// Waits until every change answered up to this mark is durable.
    pub async fn durable(&self, _mark: Mark) -> Result<()> {
        soon()
    }

    /// Waits until every change answered so far is durable.
    pub async fn durable_all(&self) -> Result<()> {
        soon()
    }

    /// If all these lease bits are held: for how long still.
    pub fn holds(&self, _ino: Ino, _bits: u8) -> Option<Duration> {
        None
    }

    /// The number of the WRITE or SHARED grant, for commits; 0 if there is none.
    pub fn grant_number(&self, _ino: Ino) -> u64 {
        0
    }

    /// Rises whenever all leases became void.
    pub fn lease_epoch(&self) -> u32 {
        0
    }

    /// The inode is not known here any more: its leases are given back, in the background.
    pub fn forget(&self, _ino: Ino) {}

    /// Gives leases back, in the background.
    pub fn give_back(&self, _ino: Ino, _bits: u8) {}

    /// An inode without a name is not open here any more; told in the background.
    pub fn release(&self, _ino: Ino) {}

    /// A fresh block id, from ranges that are durably ours.
    pub async fn block_id(&self) -> Result<BlockId> {
        soon()
    }

    /// Runs a task that the session owns and joins when it is closed.
    pub fn spawn(&self, _task: impl Future<Output = ()> + Send + 'static) {}

    /// Makes everything durable, ends the session and joins its tasks.
    pub async fn close(&self) -> Result<()> {
        soon()
    }
}

fn soon<T>() -> Result<T> {
    Err(Fault::new(Code::Unsupported, "comes with the next commit"))
}
