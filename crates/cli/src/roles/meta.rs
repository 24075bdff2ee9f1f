//! The metadata service: its engine, the service over it, its listener and its background work.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use parking_lot::Mutex;
use torchfs_client::{Dumps, Peers, ToolConfig};
use torchfs_engine::{Embedded, Engine};
use torchfs_meta::dumps::DumpPeers;
use torchfs_meta::dumps::server::Keeper;
use torchfs_meta::server::Background;
use torchfs_meta::{Config, RepairPeers};
use torchfs_proto::clock::SystemClock;
use torchfs_proto::layout::Scheme;
use torchfs_rpc::{Listener, Role, Secret, ServerHandle, Service, serve};

use super::cluster::Links;
use super::follower::{DatabaseOptions, Follower};
use crate::http::Health;
use crate::settings;

/// Flags of the metadata service.
#[derive(Args, Clone, Debug)]
pub struct MetaOptions {
    /// Redundancy of new data, as replicas:N or ec:K+M [default: replicas:2, or replicas:1 with one server and in `up`]
    #[arg(long, value_parser = redundancy, value_name = "SCHEME")]
    pub redundancy: Option<Scheme>,

    /// Space on the metadata's disk that only deletes may use
    #[arg(long, default_value = "64MiB", value_parser = settings::bytes, value_name = "SIZE")]
    meta_reserve: u64,

    /// Memory for metadata that is not yet in the replica; what the replica itself is read through is the kernel's page
    /// cache and not counted
    #[arg(long, default_value = "160MiB", value_parser = settings::memory, value_name = "SIZE")]
    memory: u64,

    /// How often a dump of the metadata is put onto the data servers; 0: never
    #[arg(long, default_value = "1h", value_parser = settings::duration, value_name = "SPAN")]
    dump_every: Duration,

    /// Term of leases
    #[arg(long, default_value_t = 3_000, value_name = "MS", hide = true)]
    lease_term_ms: u32,

    /// A silent data server is down after this
    #[arg(long, default_value_t = 10_000, value_name = "MS", hide = true)]
    server_timeout_ms: u32,

    /// A data server that is down for so long is out: its data is copied to others
    #[arg(long, default_value = "10m", value_parser = settings::duration, value_name = "TIME")]
    out_after: Duration,

    /// Bytes per second that repair, moves and scrub take on each data server
    #[arg(long, default_value = "128MiB", value_parser = settings::bytes, value_name = "SIZE")]
    repair_rate: u64,

    /// Repair that failed is tried again after this
    #[arg(long, default_value_t = 30_000, value_name = "MS", hide = true)]
    repair_retry_ms: u32,

    /// Term of sessions
    #[arg(long, default_value_t = 60_000, value_name = "MS", hide = true)]
    session_term_ms: u32,
}

/// `replicas:2`, `ec:4+2`.
fn redundancy(text: &str) -> Result<Scheme, String> {
    text.parse().map_err(|fault: torchfs_proto::Fault| fault.to_string())
}

/// A running metadata service: it serves, or it follows whoever does.
pub struct Meta {
    addr: String,
    service: Arc<dyn Service>,
    here: Here,
    listener: ServerHandle,
    running: Running,
}

enum Running {
    /// The log is in the folder.
    Here(Serving),
    /// The log is in a database.
    Shared(Follower),
}

/// Services of this process by address.
pub type Here = Arc<Mutex<HashMap<String, Arc<dyn Service>>>>;

impl Meta {
    /// Opens the engine and begins to serve; over a database, begins to follow, and serves when it leads.
    pub async fn start(
        dir: &Path,
        listen: &str,
        secret: &[u8],
        insecure: bool,
        options: &MetaOptions,
        database: Option<&DatabaseOptions>,
    ) -> anyhow::Result<Meta> {
        let secret = Secret::new(secret);
        let rpc = torchfs_rpc::Config {
            role: Role::Meta,
            secret: secret.clone(),
            insecure,
            ..torchfs_rpc::Config::default()
        };
        // The address first: a second start in a wrong terminal should not touch the folder.
        let listener = Listener::bind(listen, rpc).await?;
        let addr = listener.local_addr().to_string();
        let here = Here::default();
        let links = Arc::new(Links { role: Role::Meta, secret, here: here.clone() });
        let timeout = ToolConfig { timeout: Duration::from_secs(10), ..ToolConfig::default() };
        let stage = Stage {
            address: addr.clone(),
            options: options.clone(),
            peers: Arc::new(Peers::new(links.clone(), timeout.clone())),
            dumps: Arc::new(Dumps::new(links, timeout)),
        };
        let (service, running): (Arc<dyn Service>, Running) = match database {
            None => {
                let engine: Arc<dyn Engine> = Arc::new(Embedded::open(dir, stage.engine_config())?);
                let serving = Serving::begin(engine, &stage, "embedded")?;
                (serving.service.clone(), Running::Here(serving))
            }
            Some(database) => {
                let config = database.config(&stage.address, stage.engine_config())?;
                let follower = Follower::start(dir, config, stage)?;
                (follower.desk(), Running::Shared(follower))
            }
        };
        let listener = serve(listener, service.clone());
        Ok(Meta { addr, service, here, listener, running })
    }

    /// Where it listens.
    pub fn addr(&self) -> String {
        self.addr.clone()
    }

    /// The service, for calls within the process.
    pub fn service(&self) -> Arc<dyn Service> {
        self.service.clone()
    }

    /// Services of this process by address; the metadata service calls those directly.
    pub fn here(&self) -> Here {
        self.here.clone()
    }

    /// Well while the log can be written, or followed.
    pub fn health(&self) -> Health {
        match &self.running {
            Running::Here(serving) => {
                let engine = Arc::downgrade(&serving.engine);
                Arc::new(move || {
                    let Some(engine) = engine.upgrade() else {
                        return Err("the metadata service has stopped".into());
                    };
                    engine.space().map(|_| ()).map_err(|e| e.to_string())
                })
            }
            Running::Shared(follower) => follower.health(),
        }
    }

    /// Ends when the service cannot go on, with the reason.
    pub async fn ended(&self) -> anyhow::Error {
        match &self.running {
            Running::Here(_) => std::future::pending().await,
            Running::Shared(follower) => follower.ended().await,
        }
    }

    /// Stops serving; what was ordered is made durable first.
    pub async fn stop(self) {
        self.listener.shutdown().await;
        self.here.lock().clear();
        let Meta { service, running, .. } = self;
        // Joins threads and syncs a disk.
        let finish = move || {
            drop(service);
            match running {
                Running::Here(serving) => serving.end(),
                Running::Shared(follower) => follower.stop(),
            }
        };
        let _ = tokio::task::spawn_blocking(finish).await;
    }
}

/// What every service of this process is made with.
#[derive(Clone)]
pub struct Stage {
    /// Where it listens.
    pub address: String,
    /// Its flags.
    pub options: MetaOptions,
    /// How it reaches data servers.
    pub peers: Arc<dyn RepairPeers>,
    /// The same, for dumps.
    pub dumps: Arc<dyn DumpPeers>,
}

impl Stage {
    /// The engine's settings.
    pub fn engine_config(&self) -> torchfs_engine::Config {
        let memory = usize::try_from(self.options.memory).unwrap_or(usize::MAX);
        torchfs_engine::Config {
            reserve_bytes: self.options.meta_reserve,
            // What is ordered and not yet written, what is not yet in the replica, and what goes there now.
            queue_bytes: memory / 10,
            overlay_bytes: memory / 10 * 9,
            checkpoint_bytes: memory / 10 * 3,
            checkpoint_keys: (memory / 2000).clamp(1_000, 100_000),
            ..torchfs_engine::Config::default()
        }
    }
}

/// A service over an engine that leads, with its background work.
pub struct Serving {
    pub(super) service: Arc<torchfs_meta::Meta>,
    pub(super) engine: Arc<dyn Engine>,
    background: Background,
    keeper: Keeper,
}

impl Serving {
    /// Opens the store and begins its background work; needs a runtime around it.
    pub fn begin(engine: Arc<dyn Engine>, stage: &Stage, kind: &str) -> anyhow::Result<Serving> {
        let options = &stage.options;
        let config = Config {
            redundancy: options.redundancy,
            lease_ms: options.lease_term_ms,
            // Short terms are for tests; the margin follows so that they stay short.
            lease_margin_ms: (options.lease_term_ms / 6).clamp(100, 500),
            session_ms: options.session_term_ms,
            server_timeout_ms: options.server_timeout_ms,
            server_suspect_ms: (options.server_timeout_ms / 3).max(1),
            out_after_ms: u32::try_from(options.out_after.as_millis()).unwrap_or(u32::MAX),
            repair_rate: options.repair_rate,
            repair_retry_ms: options.repair_retry_ms,
            dump_every_ms: u64::try_from(options.dump_every.as_millis()).unwrap_or(u64::MAX),
            address: stage.address.clone(),
            engine: kind.into(),
            ..Config::default()
        };
        let service = Arc::new(torchfs_meta::Meta::open(engine.clone(), Arc::new(SystemClock), config)?);
        let background = Background::start(service.clone(), stage.peers.clone())?;
        let keeper = Keeper::start(service.clone(), stage.dumps.clone());
        Ok(Serving { service, engine, background, keeper })
    }

    /// Stops; what was ordered is made durable first, if that still can be. Blocks.
    pub fn end(self) {
        let Serving { service, engine, background, keeper } = self;
        drop(keeper);
        drop(background);
        match engine.wait_durable(engine.ordered(), Duration::from_secs(30)) {
            Ok(()) | Err(torchfs_engine::Error::Deposed { .. }) => {}
            Err(error) => tracing::error!("the end of the log is not durable: {error}"),
        }
        drop(service);
        // Requests that were under way hold the engine for a moment more; it should end here, on a thread that may wait.
        let patience = Instant::now() + Duration::from_secs(10);
        while Arc::strong_count(&engine) > 1 && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(engine);
    }
}
