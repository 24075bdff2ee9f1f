//! `torchfs meta`: the metadata service as a process of its own, and commands about it and its metadata.

mod dump;
mod load;
mod recover;
mod status;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use crate::connect;
use crate::http;
use crate::roles::{self, DatabaseOptions, MetaOptions};

/// Run the metadata service, ask about it, or do something with its metadata
///
/// Its folder holds the log and the local replica. Beyond loopback it needs the cluster's
/// secret, any file with enough random characters that all processes of the cluster share:
///
///   torchfs meta --dir /var/lib/torchfs/meta --listen 10.0.0.1:7070 --secret-file /etc/torchfs.secret
///
/// With --engine the log is in a database and several of them can run: one leads, the others
/// follow and take over.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    serve: Serve,
}

/// Commands about the metadata of a cluster.
#[derive(clap::Subcommand)]
enum Command {
    Status(status::Args),
    Dump(dump::Args),
    Load(load::Args),
    Recover(recover::Args),
}

/// Flags of the service.
#[derive(clap::Args)]
struct Serve {
    /// Folder for the log and its replica, or for the replica alone; made if it is missing
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Where to listen; port 0 takes a free one
    #[arg(long, env = "TORCHFS_LISTEN", default_value = "127.0.0.1:7070", value_name = "HOST:PORT")]
    listen: String,

    /// File with the cluster secret; without one it listens on loopback only
    #[arg(long, env = "TORCHFS_SECRET_FILE", value_name = "FILE")]
    secret_file: Option<PathBuf>,

    /// Work without a secret, even beyond loopback: anybody who reaches the port can do anything
    #[arg(long)]
    insecure: bool,

    /// Serve /metrics and /healthz here
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,

    #[command(flatten)]
    database: DatabaseOptions,

    #[command(flatten)]
    options: MetaOptions,
}

/// Runs the command, or the service until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Some(Command::Status(args)) => status::run(args),
        Some(Command::Dump(args)) => dump::run(args),
        Some(Command::Load(args)) => load::run(args),
        Some(Command::Recover(args)) => recover::run(args),
        None => serve(args.serve),
    }
}

fn serve(args: Serve) -> anyhow::Result<ExitCode> {
    connect::check_addr(&args.listen, "--listen")?;
    let dir = args.dir.context("the service needs a folder; give --dir DIR")?;
    roles::block_on(async move {
        roles::make_dir(&dir)?;
        let secret = match &args.secret_file {
            Some(path) => connect::read_secret(path)?,
            None => Vec::new(),
        };
        let stop = roles::stop_signal()?;
        let pages = http::collect(args.metrics.as_deref()).await?;
        let database = args.database.engine.is_some().then_some(&args.database);
        let meta =
            roles::Meta::start(&dir, &args.listen, &secret, args.insecure, &args.options, database).await?;
        http::serve(pages, meta.health())?;
        println!("metadata service at {}", meta.addr());
        roles::ready();
        let failed = tokio::select! {
            () = stop => None,
            why = meta.ended() => Some(why),
        };
        meta.stop().await;
        failed.map_or(Ok(ExitCode::SUCCESS), Err)
    })
}
