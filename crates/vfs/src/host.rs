//! What vfs asks of the kernel: a few notifications, delivered by somebody else's thread.
//!
//! # Invariants
//! - Never called with a lock of ours held.
//! - The calls queue and return; only [`Host::settled`] waits. The kernel may hold the lock of a folder for an operation
//!   that waits for us, so nobody may wait for a notification without a deadline.

use futures_util::future::BoxFuture;
use torchfs_proto::Ino;

/// Callbacks into the kernel, implemented by the agent with its notification thread.
pub trait Host: Send + Sync {
    /// Cached pages of this range are void; a length of 0 means all of them.
    fn invalidate_data(&self, ino: Ino, offset: u64, len: u64);

    /// Cached attributes are void, pages stay.
    fn invalidate_attr(&self, ino: Ino);

    /// A cached entry, positive or negative, is void.
    fn invalidate_entry(&self, parent: Ino, name: &[u8]);

    /// A cached entry is to be asked for again at its next use. Who stands in it or has it open keeps it, and so does what is mounted
    /// on it. An answer that is on its way to somebody who asks already may make it valid for its time once more.
    fn expire_entry(&self, parent: Ino, name: &[u8]);

    /// All cached entries are void from now on, and the attributes of a folder, whatever the kernel holds locks for. False if the
    /// kernel cannot do that.
    fn expire_entries(&self, folder: Ino) -> bool;

    /// Ready when all notifications queued so far were delivered.
    fn settled(&self) -> BoxFuture<'static, ()>;
}

/// A host without a kernel: for programs that use vfs directly, and for tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHost;

impl Host for NoHost {
    fn invalidate_data(&self, _: Ino, _: u64, _: u64) {}

    fn invalidate_attr(&self, _: Ino) {}

    fn invalidate_entry(&self, _: Ino, _: &[u8]) {}

    fn expire_entry(&self, _: Ino, _: &[u8]) {}

    fn expire_entries(&self, _: Ino) -> bool {
        true
    }

    fn settled(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}
