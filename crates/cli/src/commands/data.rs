//! `torchfs data`: a data server as a process of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::connect::{self, Connect};
use crate::http;
use crate::roles::{self, Advertise, DataOptions};

/// Run a data server; it joins the cluster by starting
///
///   torchfs data --dir /disk1/torchfs --dir /disk2/torchfs --zone rack7 --listen 10.0.0.2:7080 --meta 10.0.0.1:7070
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folder for the blocks, once per disk; made if it is missing. A disk that fails is taken out alone
    #[arg(long = "dir", required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,

    /// Where to listen; port 0 takes a free one
    #[arg(long, env = "TORCHFS_LISTEN", default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    listen: String,

    /// The address that others reach it by [default: where it listens; if that is 0.0.0.0 or [::], the address of this
    /// machine that leads to the metadata service]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,

    /// Failure domain, for example a rack
    #[arg(long, default_value = "", value_name = "NAME")]
    zone: String,

    /// Work without a secret, even beyond loopback: anybody who reaches the port can do anything
    #[arg(long)]
    insecure: bool,

    /// Serve /metrics and /healthz here
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,

    #[command(flatten)]
    connect: Connect,

    #[command(flatten)]
    options: DataOptions,
}

/// Runs until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    connect::check_addr(&args.listen, "--listen")?;
    if let Some(addr) = &args.advertise {
        connect::check_addr(addr, "--advertise")?;
    }
    let found = args.connect.find()?;
    roles::block_on(async move {
        for (n, dir) in args.dirs.iter().enumerate() {
            if args.dirs[..n].contains(dir) {
                anyhow::bail!("--dir {} is given twice; each disk has one folder", dir.display());
            }
        }
        let mut stop = std::pin::pin!(roles::stop_signal()?);
        let pages = http::collect(args.metrics.as_deref()).await?;
        let cluster = roles::Cluster::remote(&found);
        let start = roles::DataStart {
            dirs: &args.dirs,
            listen: &args.listen,
            advertise: args.advertise.as_deref().map_or(Advertise::Listening, Advertise::Address),
            zone: &args.zone,
            insecure: args.insecure,
        };
        let data = tokio::select! {
            data = roles::Data::start(start, &cluster, &args.options) => data?,
            // It may wait for a cluster that is not there yet.
            () = &mut stop => return Ok(ExitCode::SUCCESS),
        };
        http::serve(pages, data.health())?;
        println!("data server at {}", data.addr());
        roles::ready();
        let failed = tokio::select! {
            () = stop => None,
            why = data.refused() => Some(why),
        };
        data.stop().await;
        failed.map_or(Ok(ExitCode::SUCCESS), Err)
    })
}
