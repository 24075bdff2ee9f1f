//! `torchfs bench`: load for one service over its wire, for bench/run.py and for people who tune a server.

mod meta;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use serde_json::json;
use torchfs_client::{Meta, MetaConfig};
use torchfs_proto::Ino;
use torchfs_proto::attr::Kind;
use torchfs_proto::msg::meta::{Done, Make, Op, OpenSession};
use torchfs_rpc::Role;

use crate::connect::Connect;
use crate::roles::{self, Cluster};
use crate::settings;

/// Put load on a service over its wire and print how much it takes
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Lookups at the metadata service, so many in flight at any moment over one connection
    Lookups(Lookups),
    /// Clients at the metadata service, each with a session and one request under way
    Meta(meta::Args),
}

#[derive(clap::Args)]
struct Lookups {
    #[command(flatten)]
    connect: Connect,

    /// The volume whose root gets a folder of files for the time of the measurement
    #[arg(default_value = "")]
    volume: String,

    /// Requests under way at the same time
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    in_flight: u32,

    /// Files to look up, each in its turn
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: u32,

    /// How long to measure
    #[arg(long, default_value = "2s", value_parser = settings::duration, value_name = "SPAN")]
    time: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let args = match args.what {
        What::Lookups(args) => args,
        What::Meta(args) => return meta::run(&args).map(|()| ExitCode::SUCCESS),
    };
    let found = args.connect.find()?;
    let (count, seconds) = roles::block_on(async {
        let cluster = Cluster::remote(&found);
        let runtime = tokio::runtime::Handle::current();
        let mut config = MetaConfig::new(cluster.meta.clone(), cluster.connector(Role::Agent), runtime);
        config.who = OpenSession {
            volume: args.volume.clone(),
            pid: std::process::id(),
            mount: "bench lookups".to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            ..OpenSession::default()
        };
        let meta = Meta::open(config).await?;
        let name = format!("torchfs-bench-{}", std::process::id());
        let measured = lookups(&meta, &name, &args).await;
        meta.close().await?;
        measured
    })?;
    let rate = count as f64 / seconds;
    if args.json {
        let out =
            json!({"lookups": count, "seconds": seconds, "per_second": rate, "in_flight": args.in_flight});
        println!("{out:#}");
    } else {
        println!("{rate:.0} lookups/s ({count} in {seconds:.2} s, {} in flight)", args.in_flight);
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes a folder of files, looks them up, takes them away: (lookups, seconds).
async fn lookups(meta: &Arc<Meta>, folder: &str, args: &Lookups) -> anyhow::Result<(u64, f64)> {
    let dir = make(meta, Ino::ROOT, folder, Kind::Dir).await?;
    for n in 0..args.files {
        make(meta, dir, &file_name(n), Kind::File).await?;
    }
    meta.durable_all().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..args.in_flight {
        let (meta, stop, files) = (meta.clone(), stop.clone(), args.files);
        callers.spawn(async move {
            let mut count = 0u64;
            let mut at = caller % files;
            while !stop.load(Ordering::Relaxed) {
                let op = Op::Lookup { parent: dir, name: file_name(at).into_bytes().into() };
                match meta.ask(op).await? {
                    Done::Entry(Some(_)) => {}
                    other => bail!("file {at} was made and cannot be found: {other:?}"),
                }
                count += 1;
                at = (at + 1) % files;
            }
            Ok(count)
        });
    }
    tokio::time::sleep(args.time).await;
    stop.store(true, Ordering::Relaxed);
    let mut count = 0;
    while let Some(ended) = callers.join_next().await {
        count += ended??;
    }
    let seconds = began.elapsed().as_secs_f64();
    for n in 0..args.files {
        let op = Op::Unlink { parent: dir, name: file_name(n).into_bytes().into(), idle: None };
        meta.change(op).await?;
    }
    meta.change(Op::Rmdir { parent: Ino::ROOT, name: folder.as_bytes().to_vec().into() }).await?;
    ensure!(count > 0, "the metadata service answered nothing in {:?}", args.time);
    Ok((count, seconds))
}

async fn make(meta: &Meta, parent: Ino, name: &str, kind: Kind) -> anyhow::Result<Ino> {
    let make = Make {
        parent,
        name: name.as_bytes().to_vec().into(),
        kind,
        mode: 0o755,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Vec::new().into(),
        exclusive: true,
        open: false,
    };
    match meta.change(Op::Make(make)).await?.done {
        Done::Made { attr, .. } => Ok(attr.ino),
        other => bail!("{name} could not be made: {other:?}"),
    }
}

fn file_name(n: u32) -> String {
    format!("file-{n:06}")
}
