//! A data server: its identity, the stores in its folders, its listener, and its membership.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use torchfs_block::server::{BlockServer, Config};
use torchfs_block::store;
use torchfs_client::{Member, MemberConfig, Reports, Tool, ToolConfig};
use torchfs_proto::msg::meta::{Done, Heartbeat, Op};
use torchfs_proto::{ClusterId, LayoutId, ServerId};
use torchfs_rpc::{Listener, Role, ServerHandle, serve};

use super::Cluster;
use super::identity::Identity;
use crate::http::Health;
use crate::{connect, settings};

/// Flags of a data server.
#[derive(Args, Clone, Debug)]
pub struct DataOptions {
    /// Most bytes that one data server takes [default: what its disk has]
    #[arg(long, value_parser = settings::room, value_name = "SIZE")]
    capacity: Option<u64>,

    /// Size of segment files
    #[arg(long, default_value = "256MiB", value_parser = settings::bytes, value_name = "SIZE", hide = true)]
    segment_size: u64,

    /// Bytes per second and disk that are read in the background to find what rots; 0 turns it off
    #[arg(long, default_value = "4MiB", value_parser = settings::bytes, value_name = "SIZE")]
    scrub_rate: u64,

    /// Read all of a disk once in this time, if the rate allows it
    #[arg(long, default_value = "7d", value_parser = settings::duration, value_name = "TIME")]
    scrub_every: Duration,

    /// Look after each disk this often
    #[arg(long, default_value = "2s", value_parser = settings::duration, value_name = "TIME", hide = true)]
    watch_every: Duration,

    /// A disk that does not answer for this long gets nothing new until it does; others take its place
    #[arg(long, default_value = "15s", value_parser = settings::duration, value_name = "TIME")]
    silent_after: Duration,
}

/// How long one attempt to join may take before it is said that one waits.
const JOIN_ATTEMPT: Duration = Duration::from_secs(3);
/// How often the places of lost disks are looked at for new ones.
const REPLACE_EVERY: Duration = Duration::from_secs(5);

/// Where and as what a data server starts.
pub struct DataStart<'a> {
    /// Its folders, one per disk.
    pub dirs: &'a [PathBuf],
    /// Where it listens.
    pub listen: &'a str,
    /// Where others reach it.
    pub advertise: Advertise<'a>,
    /// Its failure domain.
    pub zone: &'a str,
    /// Listen beyond loopback without a secret.
    pub insecure: bool,
}

/// Where others reach a server.
#[derive(Clone, Copy, Debug)]
pub enum Advertise<'a> {
    /// Where it listens, or, if that is everywhere, the address that leads to the metadata service.
    Listening,
    /// At this address.
    Address(&'a str),
    /// At this host, and the port that it listens on.
    Host(&'a str),
}

/// A running data server.
pub struct Data {
    server: Arc<BlockServer>,
    member: Member,
    listener: ServerHandle,
    /// Looks for disks that were put in the place of lost ones.
    replacing: tokio::task::JoinHandle<()>,
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
        let addr = others_reach(start.advertise, listener.local_addr(), &cluster.meta)?;
        let mut identity = Identity::load(start.dirs)?;
        // Who dies between the join and what follows must not come back as somebody else.
        identity.store()?;
        if identity.cluster == 0 {
            // The first start: the cluster gives a number before there is anything to serve.
            let beat = Heartbeat {
                store: identity.store,
                addr: addr.clone(),
                zone: start.zone.to_string(),
                ..Heartbeat::default()
            };
            (identity.server, identity.cluster) = join(cluster, beat).await?;
        }
        identity.store()?;
        let disks = start.dirs.len().max(1) as u64;
        let config = Config {
            dirs: identity.usable(),
            lost: identity.lost(),
            store: store::Config {
                cluster: ClusterId(identity.cluster),
                server: ServerId(identity.server),
                segment_bytes: options.segment_size,
                capacity: options.capacity.map(|bytes| bytes / disks),
                sharers: sharers(start.dirs),
                ..store::Config::default()
            },
            scrub_rate: options.scrub_rate,
            scrub_every: options.scrub_every,
            watch_every: options.watch_every,
            silent_after: options.silent_after,
            ..Config::default()
        };
        let connector = cluster.connector(Role::Data);
        // Opening reads the headers of all pieces.
        let server = {
            let connector = connector.clone();
            tokio::task::spawn_blocking(move || BlockServer::open(config, Some(connector))).await??
        };
        cluster.add(&addr, server.clone());
        let listener = serve(listener, server.clone());
        let reports = Arc::new(Reporter {
            server: server.clone(),
            who: Heartbeat {
                server: ServerId(identity.server),
                store: identity.store,
                cluster: ClusterId(identity.cluster),
                addr: addr.clone(),
                zone: start.zone.to_string(),
                ..Heartbeat::default()
            },
        });
        let runtime = tokio::runtime::Handle::current();
        let member = Member::start(&cluster.meta, &*connector, MemberConfig::default(), &runtime, reports);
        let replacing = tokio::spawn(replace_lost(server.clone(), identity));
        Ok(Data { server, member, listener, replacing, addr })
    }

    /// Where others reach it.
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// Well while a disk of it works.
    pub fn health(&self) -> Health {
        let server = Arc::downgrade(&self.server);
        Arc::new(move || {
            let Some(server) = server.upgrade() else { return Err("the data server has stopped".into()) };
            server.stat().map(|_| ()).map_err(|e| e.to_string())
        })
    }

    /// Ends when the cluster does not take this server, with the reason.
    pub async fn refused(&self) -> anyhow::Error {
        anyhow::Error::msg(self.member.refused().await.to_string())
    }

    /// Says goodbye, stops serving and closes the store.
    pub async fn stop(self) {
        // Without an answer the service finds out by itself that this server is silent.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.member.leave()).await;
        self.listener.shutdown().await;
        self.replacing.abort();
        // It ends within a step, or has: an error says that it was aborted.
        let _ = self.replacing.await;
        drop(self.member);
        let server = self.server;
        // Waits for the writer's thread.
        let _ = tokio::task::spawn_blocking(move || drop(server)).await;
    }
}

/// The address that others reach a server by.
fn others_reach(advertise: Advertise<'_>, listens: SocketAddr, meta: &[String]) -> anyhow::Result<String> {
    match advertise {
        Advertise::Address(addr) => return Ok(addr.to_string()),
        Advertise::Host(host) => return Ok(format!("{host}:{}", listens.port())),
        Advertise::Listening => {}
    }
    if !listens.ip().is_unspecified() {
        return Ok(listens.to_string());
    }
    let Some(own) = connect::own_address(meta) else {
        bail!(
            "{listens} is every address of this machine, and none of them leads to {}; give --advertise HOST:PORT, the address \
             that others reach it by",
            meta.join(", ")
        );
    };
    let addr = SocketAddr::new(own, listens.port()).to_string();
    match own.is_loopback() {
        true => tracing::warn!(
            "other machines cannot reach this server: it tells its address as {addr}; give --advertise"
        ),
        false => tracing::info!("others reach this server at {addr}; --advertise gives another address"),
    }
    Ok(addr)
}

/// Asks the cluster for a number, however long nobody answers.
async fn join(cluster: &Cluster, beat: Heartbeat) -> anyhow::Result<(u32, u64)> {
    let config = ToolConfig { timeout: JOIN_ATTEMPT, attempt_timeout: JOIN_ATTEMPT, ..ToolConfig::default() };
    let tool = Tool::new(&cluster.meta, cluster.connector(Role::Data), config);
    let mut told = false;
    loop {
        match tool.ask(Op::Heartbeat(beat.clone())).await {
            Ok(Done::Joined { server, cluster, .. }) => return Ok((server.0, cluster.0)),
            Ok(other) => bail!("the metadata service answered a join with {other:?}"),
            Err(fault) if !fault.code.retry() => return Err(fault).context("cannot join the cluster"),
            Err(fault) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!("waiting for the metadata service to join its cluster: {fault}");
                }
            }
        }
    }
}

/// Tells the metadata service about the server, and the server what the service knows.
struct Reporter {
    server: Arc<BlockServer>,
    who: Heartbeat,
}

impl Reports for Reporter {
    fn figures(&self) -> Heartbeat {
        let mut beat = self.who.clone();
        self.server.report(&mut beat);
        beat
    }

    fn heard(&self, report: &Heartbeat, placement: u64, groups: Vec<(LayoutId, Vec<u32>)>) {
        self.server.heard(report, placement, groups);
    }
}

/// Takes empty disks into use that were put in the place of lost ones, while the server runs.
async fn replace_lost(server: Arc<BlockServer>, mut identity: Identity) {
    loop {
        tokio::time::sleep(REPLACE_EVERY).await;
        let lost: Vec<String> = server
            .disks()
            .into_iter()
            .filter(|d| d.failed && d.silent_ms.is_none())
            .map(|d| d.path)
            .collect();
        if lost.is_empty() {
            continue;
        }
        let (on, mut known) = (server.clone(), identity.clone());
        let looked = tokio::task::spawn_blocking(move || {
            for path in lost {
                let replaced = match known.replace(&path) {
                    Ok(Some(name)) => on.add(name).map_err(anyhow::Error::from),
                    Ok(None) => continue,
                    Err(error) => Err(error),
                };
                match replaced {
                    Ok(()) => tracing::info!(path, "a new disk takes the place of a lost one"),
                    Err(error) => tracing::warn!(path, "cannot use a new disk: {error:#}"),
                }
            }
            known
        });
        match looked.await {
            Ok(known) => identity = known,
            // A panic, which is in the log already.
            Err(_) => return,
        }
    }
}

/// How many of the folders share a file system, where any do.
fn sharers(dirs: &[PathBuf]) -> u64 {
    let of: Vec<u64> = dirs.iter().filter_map(|dir| Some(std::fs::metadata(dir).ok()?.dev())).collect();
    let most = of.iter().map(|dev| of.iter().filter(|other| *other == dev).count()).max().unwrap_or(1);
    if most > 1 {
        tracing::warn!("{most} folders are on one file system; give each disk one folder");
    }
    most.max(1) as u64
}
