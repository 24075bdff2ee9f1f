//! A mounted volume: the vfs, the mount that serves it, and their common end.
//!
//! # Invariants
//! - The vfs is shut down after the last operation, never before.

use std::path::Path;
use std::sync::Arc;

use torchfs_vfs::{Host, Vfs};

use crate::mount::{MountOptions, Umount};
use crate::ops::{KernelHost, Ops};
use crate::served::Served;
use crate::{Error, FuseConfig};

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
        Ok(self.vfs.shutdown().await?)
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
        Ok(self.vfs.shutdown().await?)
    }
}
