//! A data server: its identity, the store in its folder, its listener, and its membership.
//!
//! The folder holds `server.toml` beside the segments: the number that the store drew for itself, and the cluster and
//! server number it was given when it first joined. So a server is recognised under any address, and a disk of one cluster
//! is never mixed into another.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use torchfs_block::server::{BlockServer, Config};
use torchfs_block::store;
use torchfs_client::{Member, MemberConfig, Tool, ToolConfig};
use torchfs_proto::msg::meta::{Done, Heartbeat, Op};
use torchfs_proto::{ClusterId, ServerId};
use torchfs_rpc::{Listener, Role, ServerHandle, serve};

use super::Cluster;
use crate::http::Health;
use crate::settings;

/// Flags of a data server.
#[derive(Args, Clone, Debug)]
pub struct DataOptions {
    /// Most bytes that one data server takes [default: what its disk has]
    #[arg(long, value_parser = settings::bytes, value_name = "SIZE")]
    capacity: Option<u64>,

    /// Size of segment files
    #[arg(long, default_value = "256MiB", value_parser = settings::bytes, value_name = "SIZE", hide = true)]
    segment_size: u64,
}

/// Where and as what a data server starts.
pub struct DataStart<'a> {
    /// Its folder.
    pub dir: &'a Path,
    /// Where it listens.
    pub listen: &'a str,
    /// Where others reach it, if that is another address.
    pub advertise: Option<&'a str>,
    /// Its failure domain.
    pub zone: &'a str,
    /// Listen beyond loopback without a secret.
    pub insecure: bool,
}

/// A running data server.
pub struct Data {
    server: Arc<BlockServer>,
    member: Member,
    listener: ServerHandle,
    addr: String,
}

impl Data {
    /// Joins the cluster, opens the store and begins to serve.
    pub async fn start(
        start: DataStart<'_>,
        cluster: &Cluster,
        options: &DataOptions,
    ) -> anyhow::Result<Data> {
        let rpc = torchfs_rpc::Config {
            role: Role::Data,
            secret: cluster.secret.clone(),
            insecure: start.insecure,
            ..torchfs_rpc::Config::default()
        };
        let listener = Listener::bind(start.listen, rpc).await?;
        let addr = start.advertise.map_or_else(|| listener.local_addr().to_string(), str::to_string);
        let mut identity = Identity::load(start.dir)?;
        if identity.cluster == 0 {
            // Who dies between the join and the next line must not come back as somebody else.
            identity.store(start.dir)?;
            // The first start: the cluster gives a number before there is anything to serve.
            let tool = Tool::new(&cluster.meta, cluster.connector(Role::Data), ToolConfig::default());
            let beat = Heartbeat {
                store: identity.store,
                addr: addr.clone(),
                zone: start.zone.to_string(),
                ..Heartbeat::default()
            };
            match tool.ask(Op::Heartbeat(beat)).await.context("cannot join the cluster")? {
                Done::Joined { server, cluster, .. } => {
                    (identity.server, identity.cluster) = (server.0, cluster.0)
                }
                other => bail!("the metadata service answered a join with {other:?}"),
            }
            identity.store(start.dir)?;
        }
        let config = Config {
            dir: start.dir.to_path_buf(),
            store: store::Config {
                cluster: ClusterId(identity.cluster),
                server: ServerId(identity.server),
                segment_bytes: options.segment_size,
                capacity: options.capacity,
                ..store::Config::default()
            },
            ..Config::default()
        };
        // Opening reads the headers of all pieces.
        let server = tokio::task::spawn_blocking(move || BlockServer::open(config)).await??;
        cluster.add(&addr, server.clone());
        let listener = serve(listener, server.clone());
        let figures = {
            let (server, addr, zone) = (server.clone(), addr.clone(), start.zone.to_string());
            Arc::new(move || {
                let stat = server.stat().unwrap_or_default();
                Heartbeat {
                    server: ServerId(identity.server),
                    store: identity.store,
                    cluster: ClusterId(identity.cluster),
                    addr: addr.clone(),
                    total: stat.total,
                    free: stat.free,
                    used: stat.used,
                    pieces: stat.pieces,
                    zone: zone.clone(),
                    leaving: false,
                    ..Heartbeat::default()
                }
            })
        };
        let runtime = tokio::runtime::Handle::current();
        let connector = cluster.connector(Role::Data);
        let member = Member::start(&cluster.meta, &*connector, MemberConfig::default(), &runtime, figures);
        Ok(Data { server, member, listener, addr })
    }

    /// Where others reach it.
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// Well while its disk answers.
    pub fn health(&self) -> Health {
        let server = Arc::downgrade(&self.server);
        Arc::new(move || {
            let Some(server) = server.upgrade() else { return Err("the data server has stopped".into()) };
            server.stat().map(|_| ()).map_err(|e| e.to_string())
        })
    }

    /// Says goodbye, stops serving and closes the store.
    pub async fn stop(self) {
        // Without an answer the service finds out by itself that this server is silent.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.member.leave()).await;
        self.listener.shutdown().await;
        drop(self.member);
        let server = self.server;
        // Waits for the writer's thread.
        let _ = tokio::task::spawn_blocking(move || drop(server)).await;
    }
}

/// What `server.toml` says.
#[derive(Clone, Copy, Debug)]
struct Identity {
    store: u64,
    cluster: u64,
    server: u32,
}

impl Identity {
    fn load(dir: &Path) -> anyhow::Result<Identity> {
        let path = dir.join("server.toml");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Identity { store: rand::random::<u64>() >> 1, cluster: 0, server: 0 });
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let table: toml::Table = text.parse().with_context(|| {
            format!("{} is damaged; put back a copy, or start with an empty --dir", path.display())
        })?;
        let hex = |key: &str| {
            let text = table.get(key).and_then(|v| v.as_str()).unwrap_or_default();
            u64::from_str_radix(text, 16).with_context(|| format!("{} has no `{key}`", path.display()))
        };
        let server =
            table.get("server").and_then(toml::Value::as_integer).and_then(|n| u32::try_from(n).ok());
        let server = server.with_context(|| format!("{} has no `server`", path.display()))?;
        Ok(Identity { store: hex("store")?, cluster: hex("cluster")?, server })
    }

    /// Durable before the first piece is.
    fn store(&self, dir: &Path) -> anyhow::Result<()> {
        let text = format!(
            "# Who this data server is; made by torchfs data.\nversion = 1\nstore = \"{:x}\"\ncluster = \"{:x}\"\n\
             server = {}\n",
            self.store, self.cluster, self.server
        );
        let (path, fresh) = (dir.join("server.toml"), dir.join("server.toml.new"));
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&fresh, &path)?;
            File::open(dir)?.sync_all()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}
