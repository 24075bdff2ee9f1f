//! `torchfs bench meta`: clients at the metadata service, each with a session, a folder and one request under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use serde_json::json;
use torchfs_client::{Meta, MetaConfig};
use torchfs_proto::Ino;
use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, Op, OpenSession};
use torchfs_rpc::Role;

use super::{file_name, make};
use crate::connect::Connect;
use crate::roles::{self, Cluster};
use crate::settings;

/// What each client does, again and again.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    /// Make an empty file
    Creates,
    /// Look a file up
    Lookups,
    /// Give a file another name
    Renames,
}

#[derive(clap::Args)]
pub struct Args {
    /// What to measure
    work: Work,

    #[command(flatten)]
    connect: Connect,

    /// Clients at work at the same time, each with one request under way
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    clients: u32,

    /// How long to measure; changes count when they are durable
    #[arg(long, default_value = "3s", value_parser = settings::duration, value_name = "SPAN")]
    time: Duration,

    /// Leave the files there
    #[arg(long)]
    keep: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Files that each client looks up in turn.
const FILES: u32 = 200;

/// Measures and prints.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let found = args.connect.find()?;
    let (count, seconds) = roles::block_on(async {
        let cluster = Cluster::remote(&found);
        let mut clients = Vec::new();
        for n in 0..args.clients {
            let runtime = tokio::runtime::Handle::current();
            let mut config = MetaConfig::new(cluster.meta.clone(), cluster.connector(Role::Agent), runtime);
            config.who = OpenSession {
                pid: std::process::id(),
                mount: format!("bench {n}"),
                version: env!("CARGO_PKG_VERSION").to_string(),
                ..OpenSession::default()
            };
            clients.push(Client::begin(config, n, args.work).await?);
        }
        let began = Instant::now();
        let until = began + args.time;
        let mut working = tokio::task::JoinSet::new();
        for client in clients {
            let work = args.work;
            working.spawn(async move { client.work(work, until).await });
        }
        let mut done = Vec::new();
        while let Some(ended) = working.join_next().await {
            done.push(ended??);
        }
        let seconds = began.elapsed().as_secs_f64();
        let count: u64 = done.iter().map(|client| client.count).sum();
        for client in done {
            client.end(args.keep).await?;
        }
        Ok((count, seconds))
    })?;
    ensure!(count > 0, "the metadata service did nothing in {:?}", args.time);
    let rate = count as f64 / seconds;
    if args.json {
        let out = json!({"count": count, "seconds": seconds, "per_second": rate, "clients": args.clients});
        println!("{out:#}");
    } else {
        println!("{rate:.0}/s ({count} in {seconds:.2} s, {} clients)", args.clients);
    }
    Ok(())
}

struct Client {
    meta: Arc<Meta>,
    dir: Ino,
    folder: String,
    names: Vec<String>,
    count: u64,
}

impl Client {
    async fn begin(config: MetaConfig, number: u32, work: Work) -> anyhow::Result<Client> {
        let meta = Meta::open(config).await?;
        let folder = format!("torchfs-bench-{}-{number}", std::process::id());
        let dir = make(&meta, Ino::ROOT, &folder, Kind::Dir).await?;
        let mut names = Vec::new();
        let files = match work {
            Work::Creates => 0,
            Work::Lookups => FILES,
            Work::Renames => 1,
        };
        for n in 0..files {
            make(&meta, dir, &file_name(n), Kind::File).await?;
            names.push(file_name(n));
        }
        meta.durable_all().await?;
        Ok(Client { meta, dir, folder, names, count: 0 })
    }

    async fn work(mut self, work: Work, until: Instant) -> anyhow::Result<Client> {
        while Instant::now() < until {
            match work {
                Work::Creates => {
                    let name = file_name(u32::try_from(self.count)?);
                    make(&self.meta, self.dir, &name, Kind::File).await?;
                    self.names.push(name);
                }
                Work::Lookups => {
                    let name = &self.names[(self.count % u64::from(FILES)) as usize];
                    let op = Op::Lookup { parent: self.dir, name: name.clone().into_bytes().into() };
                    match self.meta.ask(op).await? {
                        Done::Entry(Some(_)) => {}
                        other => bail!("{name} was made and cannot be found: {other:?}"),
                    }
                }
                Work::Renames => {
                    let new = file_name(u32::try_from(self.count)? + 1);
                    let old = std::mem::replace(&mut self.names[0], new.clone());
                    let (name, new_name) = (old.into_bytes().into(), new.into_bytes().into());
                    let (parent, new_parent) = (self.dir, self.dir);
                    self.meta.change(Op::Rename { parent, name, new_parent, new_name, flags: 0 }).await?;
                }
            }
            self.count += 1;
        }
        self.meta.durable_all().await?;
        Ok(self)
    }

    async fn end(self, keep: bool) -> anyhow::Result<()> {
        if !keep {
            for name in self.names {
                let op = Op::Unlink { parent: self.dir, name: name.into_bytes().into(), idle: None };
                self.meta.change(op).await?;
            }
            let name = self.folder.into_bytes().into();
            self.meta.change(Op::Rmdir { parent: Ino::ROOT, name }).await?;
        }
        Ok(self.meta.close().await?)
    }
}
