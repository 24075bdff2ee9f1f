//! A mounted volume: the vfs, the mount that serves it, and their common end.
//!
//! # Invariants
//! - The vfs is shut down after the last operation, never before.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use torchfs_vfs::{Host, Vfs};

use crate::mount::{MountOptions, Umount};
use crate::ops::{KernelHost, Ops};
use crate::served::Served;
use crate::{Error, FuseConfig};

/// How long the end of a session is waited for when everything is written back.
const CLOSE_MAX: Duration = Duration::from_secs(15);

/// A mounted volume.
pub struct Mounted {
    served: Served,
    vfs: Vfs,
}

/// Mounts a volume. `vfs` is made with the way to tell the kernel things; the mount answers when this returns.
pub async fn mount(
    options: &MountOptions,
    config: FuseConfig,
    vfs: impl FnOnce(Arc<dyn Host>) -> Vfs,
) -> Result<Mounted, Error> {
    let mut made = None;
    let served = Served::new(options, config, |notifier| {
        let vfs = vfs(Arc::new(KernelHost(notifier.clone())));
        made = Some(vfs.clone());
        Arc::new(Ops::new(vfs))
    })
    .await?;
    let vfs = made.ok_or(Error::Ended)?;
    Ok(Mounted { served, vfs })
}

impl Mounted {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.served.path()
    }

    /// The vfs below.
    pub fn vfs(&self) -> &Vfs {
        &self.vfs
    }

    /// Waits until somebody has taken the mount away, then writes everything back and ends the session.
    pub async fn wait(&mut self) -> Result<(), Error> {
        self.served.wait().await;
        self.finish().await
    }

    /// Takes the mount away, writes everything back and ends the session. If the mount is in use, it stays as it is
    /// and says so; with [`Umount::Force`] it goes anyway, after what programs wrote so far is written back.
    pub async fn unmount(&mut self, how: Umount) -> Result<(), Error> {
        if how != Umount::Normal
            && let Err(fault) = self.vfs.syncfs().await
        {
            tracing::error!(%fault, "not everything could be written back");
        }
        self.served.unmount(how).await?;
        self.finish().await
    }

    /// Writes everything back, however long calls may take, and ends the session.
    async fn finish(&self) -> Result<(), Error> {
        let before = self.vfs.files_lost();
        let synced = self.vfs.syncfs().await;
        // Nothing is at stake any more: without an answer the service ends the session by itself.
        let closed = match tokio::time::timeout(CLOSE_MAX, self.vfs.shutdown()).await {
            Ok(closed) => closed.map_err(|fault| fault.to_string()),
            Err(_) => Err("the metadata service does not answer".to_string()),
        };
        let lost = self.vfs.files_lost() - before;
        if lost > 0 {
            return Err(Error::Lost { path: self.path().to_path_buf(), files: lost });
        }
        synced?;
        if let Err(why) = closed {
            tracing::warn!("everything is written back, but the session stays until its term ends: {why}");
        }
        Ok(())
    }
}
