//! The mount: a session with the metadata service, the vfs over it, and the FUSE mount over that.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use tokio::sync::Mutex;
use torchfs_agent::mount::Umount;
use torchfs_agent::{FuseConfig, Mounted};
use torchfs_client::{Blocks, BlocksConfig, MetaConfig};
use torchfs_proto::msg::meta::OpenSession;
use torchfs_rpc::Role;
use torchfs_vfs::Vfs;

use super::Cluster;
use crate::http::Health;
use crate::settings;

/// Flags of a mount.
#[derive(Args, Clone, Debug)]
pub struct MountOptions {
    /// Refuse changes
    #[arg(long)]
    ro: bool,

    /// Let other users in; permissions are checked either way [default: on for root]
    #[arg(long)]
    allow_other: bool,

    /// Memory for blocks that were read
    #[arg(long, default_value = "512MiB", value_parser = settings::bytes, value_name = "SIZE")]
    cache_size: u64,

    /// Memory for what was written and is not on its servers yet
    #[arg(long, default_value = "256MiB", value_parser = settings::bytes, value_name = "SIZE")]
    buffer_size: u64,

    /// close() does not wait until the data is safe; fsync still does
    #[arg(long)]
    writeback: bool,

    /// How long a call waits for a silent server before it fails
    #[arg(long, default_value = "5m", value_parser = settings::duration, value_name = "SPAN")]
    op_timeout: Duration,

    /// How often dirty data of open files is written back
    #[arg(long, default_value = "5s", value_parser = settings::duration, value_name = "SPAN", hide = true)]
    commit_interval: Duration,
}

/// A running mount.
pub struct Mount {
    mounted: Mutex<Mounted>,
    meta: Arc<torchfs_client::Meta>,
    path: PathBuf,
    /// Somebody took the mount away; everything is written back and the session is closed.
    gone: AtomicBool,
}

impl Mount {
    /// Opens a session on the volume and mounts it.
    pub async fn start(
        path: &Path,
        volume: &str,
        cluster: &Cluster,
        options: &MountOptions,
    ) -> anyhow::Result<Mount> {
        let runtime = tokio::runtime::Handle::current();
        let connector = cluster.connector(Role::Agent);
        let mut config = MetaConfig::new(cluster.meta.clone(), connector.clone(), runtime);
        config.op_timeout = options.op_timeout;
        config.who = OpenSession {
            volume: volume.to_string(),
            host: host_name(),
            pid: std::process::id(),
            // As others would name it; a folder that is gone by now keeps the name it was given.
            mount: std::path::absolute(path).unwrap_or_else(|_| path.into()).display().to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
        };
        let meta = torchfs_client::Meta::open(config).await?;
        let blocks_config = BlocksConfig { op_timeout: options.op_timeout, ..BlocksConfig::default() };
        let blocks = Blocks::new(meta.clone(), connector, blocks_config);
        let vfs_config = torchfs_vfs::Config {
            cache_bytes: options.cache_size,
            dirty_max: options.buffer_size,
            commit_after: options.commit_interval,
            writeback: options.writeback,
            ..torchfs_vfs::Config::default()
        };
        let mut mount_options = torchfs_agent::mount::MountOptions::new(path);
        mount_options.read_only = options.ro;
        mount_options.allow_other = options.allow_other || is_root();
        mount_options.source = match volume {
            "" => "torchfs".to_string(),
            volume => format!("torchfs:{volume}"),
        };
        let session = meta.clone();
        let mounted = torchfs_agent::mount(&mount_options, FuseConfig::default(), move |host| {
            Vfs::new(vfs_config, session, blocks, host)
        })
        .await;
        match mounted {
            Ok(mounted) => Ok(Mount {
                mounted: Mutex::new(mounted),
                meta,
                path: path.to_path_buf(),
                gone: AtomicBool::new(false),
            }),
            Err(error) => {
                let _ = meta.close().await;
                Err(error.into())
            }
        }
    }

    /// Ends when somebody takes the mount away from outside.
    pub async fn ended(&self) {
        if let Err(error) = self.mounted.lock().await.wait().await {
            tracing::error!("after the unmount of {}: {error}", self.path.display());
        }
        self.gone.store(true, Ordering::Release);
    }

    /// Unmounts; a mount in use is detached after everything was written back.
    pub async fn stop(self) -> anyhow::Result<()> {
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut mounted = self.mounted.into_inner();
        if mounted.unmount(Umount::Normal).await.is_err() {
            tracing::warn!(
                "{} is in use; it is detached now, programs keep what they have open",
                self.path.display()
            );
            mounted.unmount(Umount::Force).await?;
        }
        Ok(())
    }

    /// Well while the session lives.
    pub fn health(&self) -> Health {
        let meta = Arc::downgrade(&self.meta);
        Arc::new(move || match meta.upgrade() {
            Some(_) => Ok(()),
            None => Err("the mount has ended".to_string()),
        })
    }
}

/// Takes a mount away, also one whose agent is gone.
pub fn unmount(path: &Path, lazy: bool, force: bool) -> anyhow::Result<()> {
    let how = match (lazy, force) {
        (_, true) => Umount::Force,
        (true, _) => Umount::Lazy,
        _ => Umount::Normal,
    };
    torchfs_agent::mount::umount(path, how)?;
    Ok(())
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|s| s.trim().to_string()).unwrap_or_default()
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}
