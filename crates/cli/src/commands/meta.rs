//! `torchfs meta`: the metadata service as a process of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::connect;
use crate::http;
use crate::roles::{self, MetaOptions};

/// Run the metadata service
///
/// Its folder holds the log and the local replica. Beyond loopback it needs the cluster's secret, any file with enough
/// random characters that all processes of the cluster share:
///
///   torchfs meta --dir /var/lib/torchfs/meta --listen 10.0.0.1:7070 --secret-file /etc/torchfs.secret
#[derive(clap::Args)]
pub struct Args {
    /// Folder for the log and its replica; made if it is missing
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,

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
    options: MetaOptions,
}

/// Runs until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    connect::check_addr(&args.listen, "--listen")?;
    roles::block_on(async move {
        roles::make_dir(&args.dir)?;
        let secret = match &args.secret_file {
            Some(path) => connect::read_secret(path)?,
            None => Vec::new(),
        };
        let stop = roles::stop_signal()?;
        let pages = http::collect(args.metrics.as_deref()).await?;
        let meta = roles::Meta::start(&args.dir, &args.listen, &secret, args.insecure, &args.options).await?;
        http::serve(pages, meta.health())?;
        println!("metadata service at {}", meta.addr());
        stop.await;
        meta.stop().await;
        Ok(ExitCode::SUCCESS)
    })
}
