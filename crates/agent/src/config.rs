//! Settings of the mount; every bound and every timer is a field.

use std::time::Duration;

use crate::fuse::Wish;

/// How the FUSE session works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FuseConfig {
    /// Threads that read requests.
    pub readers: usize,
    /// Largest payload of one READ or WRITE, in bytes; the kernel allows `fs.fuse.max_pages_limit` pages (1 MiB).
    pub max_write: u32,
    /// How far the kernel reads ahead, in bytes. INIT caps it at 128 KiB, so it is set on the mount afterwards.
    pub readahead: u32,
    /// Readaheads and asynchronous direct reads and writes under way at once.
    pub max_background: u16,
    /// The kernel gathers writes by itself; not for volumes mounted more than once.
    pub writeback_cache: bool,
    /// Operations that had to wait and are under way at once; more wait in the kernel.
    pub tasks_max: u32,
    /// Waits for locks under way at once; more get ENOLCK.
    pub lock_waits_max: u32,
    /// Write payloads held without a copy, `max_write` bytes each.
    pub buffers_max: usize,
    /// Notifications that wait to be sent before those that mean the same are gathered.
    pub notices_max: usize,
    /// How long an operation may go on after its caller got a signal. On a local disk it could not be interrupted at all.
    pub interrupt_grace: Duration,
    /// How long to wait for operations under way after the mount is gone.
    pub drain_max: Duration,
    /// How long the kernel may take for its first request after mounting.
    pub init_max: Duration,
}

impl Default for FuseConfig {
    fn default() -> FuseConfig {
        FuseConfig {
            readers: 2,
            max_write: 1 << 20,
            readahead: 8 << 20,
            max_background: 64,
            writeback_cache: false,
            tasks_max: 4096,
            lock_waits_max: 4096,
            buffers_max: 256,
            notices_max: 16_384,
            interrupt_grace: Duration::from_secs(1),
            drain_max: Duration::from_secs(60),
            init_max: Duration::from_secs(30),
        }
    }
}

impl FuseConfig {
    pub(crate) fn wish(&self) -> Wish {
        Wish {
            max_write: self.max_write,
            max_readahead: self.readahead,
            max_background: self.max_background,
            writeback_cache: self.writeback_cache,
        }
    }
}
