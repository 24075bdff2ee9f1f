//! A mount being served: from mount(2) to the last reply.
//!
//! # Invariants
//! - Dropping a [`Served`] takes the mount away by force; a clean end goes through [`Served::unmount`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::fuse::{Agreed, Device, Handler, Notifier, Session};
use crate::mount::{self, MountOptions, Umount};
use crate::{Error, FuseConfig};

/// A mount being served.
#[derive(Debug)]
pub struct Served {
    session: Session,
    agreed: Agreed,
    path: PathBuf,
    ended: bool,
}

impl Served {
    /// Mounts and serves. Returns once the kernel has shaken hands.
    pub async fn new<H: Handler>(
        options: &MountOptions,
        config: FuseConfig,
        handler: impl FnOnce(&Notifier) -> Arc<H>,
    ) -> Result<Served, Error> {
        let (device, path) = mount::mount(options)?;
        Served::serve(device, path, config, None, handler).await
    }

    /// Serves a mount that was made before, perhaps by a supervisor; `agreed` is what an earlier agent negotiated on it.
    pub async fn serve<H: Handler>(
        device: Device,
        path: PathBuf,
        config: FuseConfig,
        agreed: Option<Agreed>,
        handler: impl FnOnce(&Notifier) -> Arc<H>,
    ) -> Result<Served, Error> {
        let session = Session::start(device, config, agreed, &Handle::current(), handler)?;
        let agreed = match tokio::time::timeout(config.init_max, session.ready()).await {
            Ok(Ok(agreed)) => agreed,
            failed => {
                // Nobody holds a handle on this mount, so it must not stay behind.
                let _ = umount(path, Umount::Force).await;
                return Err(failed.map_or(Error::Ended, |ready| ready.err().unwrap_or(Error::Ended)));
            }
        };
        if let Err(error) = mount::set_readahead(&path, config.readahead) {
            tracing::warn!(%error, "the kernel keeps its small readahead");
        }
        Ok(Served { session, agreed, path, ended: false })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was negotiated with the kernel; the next agent on the same mount needs it.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// Tells the kernel things.
    pub fn notifier(&self) -> &Notifier {
        self.session.notifier()
    }

    /// Waits until somebody has taken the mount away and every operation under way has ended.
    pub async fn wait(&mut self) {
        self.session.ended().await;
        self.ended = true;
        self.session.join();
    }

    /// Takes the mount away and waits for its end. With [`Umount::Lazy`] that is when its last user leaves.
    pub async fn unmount(&mut self, how: Umount) -> Result<(), Error> {
        umount(self.path.clone(), how).await?;
        self.wait().await;
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if !self.ended {
            let _ = mount::umount(&self.path, Umount::Force);
        }
    }
}

/// The kernel may ask us things while it unmounts, so no thread of the runtime may be the one that waits.
async fn umount(path: PathBuf, how: Umount) -> Result<(), Error> {
    tokio::task::spawn_blocking(move || mount::umount(&path, how)).await.unwrap_or(Err(Error::Ended))
}
