//! Notifications to the kernel: what it keeps of ours is stale, or here is more.
//!
//! The kernel takes a folder's lock for INVAL_ENTRY, which a process blocked in CREATE may hold, and a page's lock for
//! INVAL_INODE, which a READ in flight holds. So notifications are written by a thread of their own that holds no lock
//! of ours, in the order they were posted; whoever needs the effect awaits it.
//!
//! # Invariants
//! - The order of notices is the order of their posting.
//! - The queue is bounded; posting waits for room, outside of any lock.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::abi::{self, notify};
use super::device::Device;
use super::reply::{put_u32, put_u64};
use crate::metrics;

/// One thing to tell the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Attributes of the inode are stale; with a range, so is that part of the page cache.
    Inode {
        /// Which inode.
        ino: u64,
        /// From where; `None` leaves the page cache alone.
        offset: Option<u64>,
        /// How many bytes; 0 is "to the end".
        len: u64,
    },
    /// An entry is stale.
    Entry {
        /// Its folder.
        parent: u64,
        /// Its name.
        name: Bytes,
        /// Ask again at the next use, but keep the inode and mounts below it.
        expire_only: bool,
    },
    /// An entry was removed elsewhere; watchers of the folder are told.
    Delete {
        /// Its folder.
        parent: u64,
        /// The inode it named.
        child: u64,
        /// Its name.
        name: Bytes,
    },
    /// Bytes for the page cache, before anybody asks for them.
    Store {
        /// Which inode.
        ino: u64,
        /// Where they belong.
        offset: u64,
        /// The bytes, sent from where they lie.
        data: Vec<Bytes>,
    },
    /// Hand out again every request that was read but not answered (after an agent's death).
    Resend,
}

/// Posts notices; cheap to clone.
#[derive(Clone, Debug)]
pub struct Notifier(mpsc::Sender<Posted>);

#[derive(Debug)]
enum Posted {
    Notice(Notice, Option<oneshot::Sender<io::Result<()>>>),
    Stop,
}

/// The thread that writes notices, until [`Notifier::stop`].
pub(super) struct Writer {
    queue: mpsc::Receiver<Posted>,
    device: Arc<Device>,
}

impl Notifier {
    pub(super) fn new(device: Arc<Device>, bound: usize) -> (Notifier, Writer) {
        let (sender, queue) = mpsc::channel(bound.max(1));
        (Notifier(sender), Writer { queue, device })
    }

    /// Puts a notice into the queue, waiting for room. It has no effect once the mount is gone.
    pub async fn post(&self, notice: Notice) {
        let _ = self.0.send(Posted::Notice(notice, None)).await;
    }

    /// Puts a notice into the queue if there is room; gives it back if there is none.
    pub fn try_post(&self, notice: Notice) -> Result<(), Notice> {
        match self.0.try_send(Posted::Notice(notice, None)) {
            Err(mpsc::error::TrySendError::Full(Posted::Notice(notice, _))) => Err(notice),
            _ => Ok(()),
        }
    }

    /// Posts a notice and waits until the kernel has acted on it. Something the kernel does not hold, or a mount that is
    /// gone, is no error: there is nothing stale.
    pub async fn apply(&self, notice: Notice) -> io::Result<()> {
        let (done, wait) = oneshot::channel();
        if self.0.send(Posted::Notice(notice, Some(done))).await.is_err() {
            return Ok(());
        }
        wait.await.unwrap_or(Ok(()))
    }

    /// Ends the writing thread after what is queued.
    pub(super) fn stop(&self) {
        let _ = self.0.blocking_send(Posted::Stop);
    }
}

impl Writer {
    /// Writes notices until told to stop.
    pub fn run(mut self) {
        while let Some(Posted::Notice(notice, done)) = self.queue.blocking_recv() {
            let result = self.write(&notice);
            if let Err(error) = &result {
                tracing::warn!(%error, ?notice, "the kernel refused a notification");
            }
            if let Some(done) = done {
                let _ = done.send(result);
            }
        }
    }

    fn write(&self, notice: &Notice) -> io::Result<()> {
        metrics::notices().increment(1);
        let (code, fixed, data) = encode(notice);
        match self.device.notify(code, &fixed, data) {
            Err(error) if is_harmless(&error) => Ok(()),
            result => result,
        }
    }
}

fn is_harmless(error: &io::Error) -> bool {
    // ENOENT: not cached. ENODEV, ECONNABORTED: the mount is gone. ENOTEMPTY, EBUSY: the entry is in use by a process
    // (a working directory, a mount point); the kernel asks again when its time is over.
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOENT | libc::ENODEV | libc::ECONNABORTED | libc::ENOTEMPTY | libc::EBUSY | libc::ENOTDIR
        )
    )
}

/// Code, fixed part with name, and data.
fn encode(notice: &Notice) -> (i32, Vec<u8>, &[Bytes]) {
    let mut out = Vec::with_capacity(64);
    let code = match notice {
        Notice::Inode { ino, offset, len } => {
            put_u64(&mut out, *ino);
            // A negative offset means "attributes only".
            let offset = offset.map_or(-1, |offset| i64::try_from(offset).unwrap_or(i64::MAX));
            put_u64(&mut out, offset.cast_unsigned());
            put_u64(&mut out, i64::try_from(*len).unwrap_or(0).cast_unsigned());
            notify::INVAL_INODE
        }
        Notice::Entry { parent, name, expire_only } => {
            put_u64(&mut out, *parent);
            put_u32(&mut out, name.len() as u32);
            put_u32(&mut out, if *expire_only { abi::flag::EXPIRE_ONLY } else { 0 });
            put_name(&mut out, name);
            notify::INVAL_ENTRY
        }
        Notice::Delete { parent, child, name } => {
            put_u64(&mut out, *parent);
            put_u64(&mut out, *child);
            put_u32(&mut out, name.len() as u32);
            put_u32(&mut out, 0);
            put_name(&mut out, name);
            notify::DELETE
        }
        Notice::Store { ino, offset, data } => {
            put_u64(&mut out, *ino);
            put_u64(&mut out, *offset);
            put_u32(&mut out, data.iter().map(Bytes::len).sum::<usize>() as u32);
            put_u32(&mut out, 0);
            return (notify::STORE, out, data);
        }
        Notice::Resend => notify::RESEND,
    };
    (code, out, &[])
}

fn put_name(out: &mut Vec<u8>, name: &[u8]) {
    out.extend_from_slice(name);
    out.push(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_have_the_kernels_layout() {
        let (code, out, _) = encode(&Notice::Inode { ino: 5, offset: None, len: 0 });
        assert_eq!((code, out.len()), (2, 24));
        assert_eq!(out[8..16], (-1i64).to_ne_bytes());

        let entry = Notice::Entry { parent: 1, name: Bytes::from_static(b"abc"), expire_only: true };
        let (code, out, _) = encode(&entry);
        assert_eq!((code, &out[12..]), (3, &b"\x01\0\0\0abc\0"[..]));

        let (code, out, _) = encode(&Notice::Delete { parent: 1, child: 2, name: Bytes::from_static(b"a") });
        assert_eq!((code, out.len()), (6, 26));

        let store = Notice::Store { ino: 5, offset: 4096, data: vec![Bytes::from_static(b"xy")] };
        let (code, out, data) = encode(&store);
        assert_eq!((code, out.len(), data.len()), (4, 24, 1));
        assert_eq!(out[16..20], 2u32.to_ne_bytes());
        assert_eq!(encode(&Notice::Resend).0, 7);
    }
}
