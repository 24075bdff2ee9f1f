//! The metadata service: the engine in its folder, the service over it, its listener and its background work.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use torchfs_client::{Peers, ToolConfig};
use torchfs_engine::{Embedded, Engine};
use torchfs_meta::server::Background;
use torchfs_meta::{BlockPeers, Config};
use torchfs_proto::clock::SystemClock;
use torchfs_proto::layout::Scheme;
use torchfs_proto::{BlockId, IdRange};
use torchfs_rpc::{Listener, Role, Secret, ServerHandle, Service, serve};

use super::cluster::Links;
use crate::http::Health;
use crate::settings;

/// Flags of the metadata service.
#[derive(Args, Clone, Debug)]
pub struct MetaOptions {
    /// Copies of new data, as replicas:N [default: replicas:2, or replicas:1 with one server and in `up`]
    #[arg(long, value_parser = redundancy, value_name = "SCHEME")]
    pub redundancy: Option<Scheme>,

    /// Space on the metadata's disk that only deletes may use
    #[arg(long, default_value = "64MiB", value_parser = settings::bytes, value_name = "SIZE")]
    meta_reserve: u64,

    /// Term of leases
    #[arg(long, default_value_t = 3_000, value_name = "MS", hide = true)]
    lease_term_ms: u32,

    /// Term of sessions
    #[arg(long, default_value_t = 60_000, value_name = "MS", hide = true)]
    session_term_ms: u32,
}

/// `replicas:2`.
fn redundancy(text: &str) -> Result<Scheme, String> {
    let copies =
        text.strip_prefix("replicas:").and_then(|n| n.parse::<u8>().ok()).filter(|n| (1..=8).contains(n));
    copies
        .map(Scheme::Replicas)
        .ok_or_else(|| format!("`{text}` is no redundancy; write replicas:1 to replicas:8"))
}

/// A running metadata service.
pub struct Meta {
    service: Arc<torchfs_meta::Meta>,
    engine: Arc<dyn Engine>,
    here: Arc<Mutex<HashMap<String, Arc<dyn Service>>>>,
    background: Background,
    listener: ServerHandle,
}

impl Meta {
    /// Opens the engine and begins to serve.
    pub async fn start(
        dir: &Path,
        listen: &str,
        secret: &[u8],
        insecure: bool,
        options: &MetaOptions,
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
        let engine_config = torchfs_engine::Config {
            reserve_bytes: options.meta_reserve,
            ..torchfs_engine::Config::default()
        };
        let engine: Arc<dyn Engine> = Arc::new(Embedded::open(dir, engine_config)?);
        let config = Config {
            redundancy: options.redundancy,
            lease_ms: options.lease_term_ms,
            // Short terms are for tests; the margin follows so that they stay short.
            lease_margin_ms: (options.lease_term_ms / 6).clamp(100, 500),
            session_ms: options.session_term_ms,
            ..Config::default()
        };
        let service = Arc::new(torchfs_meta::Meta::open(engine.clone(), Arc::new(SystemClock), config)?);
        let here = Arc::<Mutex<HashMap<_, _>>>::default();
        let links = Arc::new(Links { role: Role::Meta, secret, here: here.clone() });
        let timeout = ToolConfig { timeout: Duration::from_secs(10), ..ToolConfig::default() };
        let peers = Arc::new(DataServers(Peers::new(links, timeout)));
        let background = Background::start(service.clone(), peers)?;
        let listener = serve(listener, service.clone());
        Ok(Meta { service, engine, here, background, listener })
    }

    /// Where it listens.
    pub fn addr(&self) -> String {
        self.listener.local_addr().to_string()
    }

    /// The service, for calls within the process.
    pub fn service(&self) -> Arc<dyn Service> {
        self.service.clone()
    }

    /// Services of this process by address; the metadata service calls those directly.
    pub fn here(&self) -> Arc<Mutex<HashMap<String, Arc<dyn Service>>>> {
        self.here.clone()
    }

    /// Well while the log can be written.
    pub fn health(&self) -> Health {
        let engine = Arc::downgrade(&self.engine);
        Arc::new(move || {
            let Some(engine) = engine.upgrade() else {
                return Err("the metadata service has stopped".into());
            };
            engine.space().map(|_| ()).map_err(|e| e.to_string())
        })
    }

    /// Stops serving; what was ordered is made durable first.
    pub async fn stop(self) {
        self.listener.shutdown().await;
        self.here.lock().clear();
        let Meta { service, engine, background, .. } = self;
        let finish = move || {
            drop(background);
            if let Err(error) = engine.wait_durable(engine.ordered(), Duration::from_secs(30)) {
                tracing::error!("the end of the log is not durable: {error}");
            }
            drop(service);
            drop(engine);
        };
        // Joins threads and syncs a disk.
        let _ = tokio::task::spawn_blocking(finish).await;
    }
}

/// Data servers as the deleter reaches them.
struct DataServers(Peers);

impl BlockPeers for DataServers {
    fn delete<'a>(&'a self, addr: &'a str, blocks: Vec<BlockId>) -> BoxFuture<'a, torchfs_proto::Result<()>> {
        Box::pin(async move { self.0.delete(addr, &blocks).await })
    }

    fn purge<'a>(
        &'a self,
        addr: &'a str,
        range: IdRange,
        keep: Vec<BlockId>,
    ) -> BoxFuture<'a, torchfs_proto::Result<()>> {
        Box::pin(self.0.purge(addr, range, keep))
    }
}
