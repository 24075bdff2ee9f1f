//! The mount: a session with the metadata service, the vfs over it, and the FUSE mount over that.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Args;
use tokio::sync::Mutex;
use torchfs_agent::mount::Umount;
use torchfs_agent::{Error, FuseConfig, Mounted};
use torchfs_client::{Blocks, BlocksConfig, Connector, MetaConfig};
use torchfs_proto::msg::meta::OpenSession;
use torchfs_rpc::Role;
use torchfs_vfs::Vfs;

use super::Cluster;
use crate::http::Health;
use crate::serving::Serving;
use crate::{connect, settings};

/// Flags of a mount.
#[derive(Args, Clone, Debug)]
pub struct MountOptions {
    /// Refuse changes
    #[arg(long)]
    ro: bool,

    /// Ignore set-user-id and set-group-id bits
    #[arg(long)]
    nosuid: bool,

    /// Ignore device files
    #[arg(long)]
    nodev: bool,

    /// Run no programs from here
    #[arg(long)]
    noexec: bool,

    /// What `mount` and `df` show as the source [default: torchfs:VOLUME]
    #[arg(long, value_name = "NAME", hide = true)]
    source: Option<String>,

    /// Let other users in; permissions are checked either way [default: on for root]
    #[arg(long)]
    allow_other: bool,

    /// Memory for blocks that were read
    #[arg(long, default_value = "512MiB", value_parser = settings::room, value_name = "SIZE")]
    cache_size: u64,

    /// Memory for what was written and is not on its servers yet
    #[arg(long, default_value = "256MiB", value_parser = settings::room, value_name = "SIZE")]
    buffer_size: u64,

    /// close() does not wait until the data is safe; fsync still does
    #[arg(long)]
    writeback: bool,

    /// How long to wait for a metadata service that does not answer before the mount is given up
    #[arg(long, default_value = "30s", value_parser = settings::positive, value_name = "SPAN")]
    connect_timeout: Duration,

    /// How long a call waits for a silent server before it fails, once the volume is mounted
    #[arg(long, default_value = "5m", value_parser = settings::positive, value_name = "SPAN")]
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
    /// Tells whoever unmounts how it ended.
    serving: Option<Serving>,
    /// Somebody took the mount away and the session is closed: everything is written back, or not.
    gone: OnceLock<Result<(), String>>,
}

/// A session that nothing is mounted with yet. Opening one may take long, and may be given up at any time.
pub struct Opened {
    meta: Arc<torchfs_client::Meta>,
    connector: Arc<dyn Connector>,
}

impl Mount {
    /// Opens a session on the volume.
    pub async fn open(
        path: &Path,
        volume: &str,
        cluster: &Cluster,
        options: &MountOptions,
    ) -> anyhow::Result<Opened> {
        let runtime = tokio::runtime::Handle::current();
        let connector = cluster.connector(Role::Agent);
        let mut config = MetaConfig::new(cluster.meta.clone(), connector.clone(), runtime);
        config.open_timeout = options.connect_timeout;
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
        Ok(Opened { meta, connector })
    }

    /// Mounts the session's volume.
    pub async fn start(opened: Opened, path: &Path, options: &MountOptions) -> anyhow::Result<Mount> {
        let Opened { meta, connector } = opened;
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
        mount_options.allow_other = options.allow_other || connect::is_root();
        (mount_options.nosuid, mount_options.nodev) = (options.nosuid, options.nodev);
        mount_options.noexec = options.noexec;
        mount_options.source =
            options.source.clone().unwrap_or_else(|| format!("torchfs:{}", meta.info().volume.name));
        let session = meta.clone();
        let mounted = torchfs_agent::mount(&mount_options, FuseConfig::default(), move |host| {
            Vfs::new(vfs_config, session, blocks, host)
        })
        .await;
        match mounted {
            Ok(mounted) => {
                let device = torchfs_agent::mount::device(mounted.path()).ok().flatten();
                Ok(Mount {
                    mounted: Mutex::new(mounted),
                    meta,
                    path: path.to_path_buf(),
                    serving: device.and_then(|device| Serving::say(&device)),
                    gone: OnceLock::new(),
                })
            }
            Err(error) => {
                let _ = meta.close().await;
                Err(error.into())
            }
        }
    }

    /// Ends when somebody takes the mount away from outside.
    pub async fn ended(&self) {
        let how = self.mounted.lock().await.wait().await.map_err(|error| error.to_string());
        if let Err(error) = &how {
            tracing::error!("after the unmount of {}: {error}", self.path.display());
        }
        let _ = self.gone.set(how);
    }

    /// Unmounts; a mount in use is detached after everything was written back.
    pub async fn stop(self) -> anyhow::Result<()> {
        let how = match self.gone.into_inner() {
            Some(how) => how,
            None => {
                let mut mounted = self.mounted.into_inner();
                match mounted.unmount(Umount::Normal).await {
                    Err(Error::InUse { .. }) => {
                        tracing::warn!(
                            "{} is in use; it is detached now, programs keep what they have open",
                            self.path.display()
                        );
                        mounted.unmount(Umount::Force).await
                    }
                    // Somebody was faster.
                    Err(Error::NotMounted { .. }) => mounted.wait().await,
                    how => how,
                }
                .map_err(|error| error.to_string())
            }
        };
        if let Some(serving) = &self.serving {
            serving.ended(how.clone());
        }
        how.map_err(anyhow::Error::msg)
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
