//! `torchfs up`: all roles in one process, for one machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use torchfs_proto::layout::Scheme;

use crate::connect::{self, Note};
use crate::http;
use crate::roles::{self, Advertise, DataOptions, MetaOptions, MountOptions};

/// Run a whole cluster in one process, in the foreground
///
///   torchfs up --dir ./data --servers 3 --mount /mnt/t
///
/// Other machines may mount it too when --listen names an address they reach. Ctrl-C stops it and unmounts cleanly.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folder for everything; made if it is missing
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,

    /// How many data servers, at least: those that DIR holds from before are all started
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    servers: u16,

    /// Mount the volume here
    #[arg(long, value_name = "PATH")]
    mount: Option<PathBuf>,

    /// Where the metadata service listens; port 0 takes a free one
    #[arg(long, env = "TORCHFS_LISTEN", default_value = "127.0.0.1:7070", value_name = "HOST:PORT")]
    listen: String,

    /// The address or name that others reach this machine by [default: the one in --listen]
    #[arg(long, value_name = "HOST")]
    advertise: Option<String>,

    /// File with the cluster secret [default: DIR/secret, made if it is missing]
    #[arg(long, env = "TORCHFS_SECRET_FILE", value_name = "FILE")]
    secret_file: Option<PathBuf>,

    /// Work without a secret, even beyond loopback: anybody who reaches the port can do anything
    #[arg(long)]
    insecure: bool,

    /// Serve /metrics and /healthz here
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,

    #[command(flatten)]
    meta_options: MetaOptions,

    #[command(flatten)]
    data_options: DataOptions,

    #[command(flatten)]
    mount_options: MountOptions,
}

/// Runs until a signal ends it, or somebody unmounts.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    connect::check_addr(&args.listen, "--listen")?;
    let advertise = args.advertise.clone().or_else(|| {
        let host = args.listen.rsplit_once(':').map(|(host, _)| host.to_string());
        host.filter(|_| !connect::is_wildcard(&args.listen))
    });
    let Some(advertise) = advertise else {
        bail!(
            "{} is every address of this machine, and others need one to reach the data servers by; give --advertise HOST",
            args.listen
        );
    };
    roles::block_on(async move {
        roles::make_dir(&args.dir)?;
        let secret_file = args.secret_file.clone().unwrap_or_else(|| args.dir.join("secret"));
        let secret = match (&args.secret_file, args.insecure) {
            (_, true) => Vec::new(),
            (Some(path), _) => connect::read_secret(path)?,
            (None, _) => connect::make_secret(&secret_file)?,
        };
        let stop = roles::stop_signal()?;
        let pages = http::collect(args.metrics.as_deref()).await?;
        let mut meta_options = args.meta_options.clone();
        // All servers share one machine: a second copy would cost space and save nobody from anything.
        meta_options.redundancy.get_or_insert(Scheme::Replicas(1));
        let meta_dir = args.dir.join("meta");
        roles::make_dir(&meta_dir)?;
        let meta =
            roles::Meta::start(&meta_dir, &args.listen, &secret, args.insecure, &meta_options, None).await?;
        let cluster = roles::Cluster::local(&meta, &secret);
        let host = args.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host).to_string();
        let (numbers, more) = data_folders(&args.dir, args.servers)?;
        let mut servers = Vec::new();
        for n in numbers {
            let dir = args.dir.join(format!("data{n}"));
            roles::make_dir(&dir)?;
            let listen = format!("{host}:0");
            let start = roles::DataStart {
                dirs: &[dir],
                listen: &listen,
                advertise: Advertise::Host(&advertise),
                zone: "",
                insecure: args.insecure,
            };
            servers.push(roles::Data::start(start, &cluster, &args.data_options).await?);
        }
        let note = Note::leave(&meta.addr(), (!args.insecure).then_some(secret_file.as_path()));
        let mount = match &args.mount {
            Some(path) => Some(mount(path, &cluster, &args.mount_options).await.context("cannot mount")?),
            None => None,
        };
        http::serve(pages, meta.health())?;
        println!("metadata service at {}", meta.addr());
        println!("{} data servers under {}{more}", servers.len(), args.dir.display());
        match &args.mount {
            Some(path) => println!("mounted at {}; Ctrl-C stops and unmounts", path.display()),
            // Root does not look at the notes of others.
            None if note.is_none() || !connect::is_root() => {
                let secret = match args.insecure {
                    true => String::new(),
                    false => format!(" --secret-file {}", std::path::absolute(&secret_file)?.display()),
                };
                let port =
                    meta.addr().rsplit_once(':').map_or_else(String::new, |(_, port)| port.to_string());
                println!(
                    "mount it with: torchfs mount /mnt/t --meta {advertise}:{port}{secret}; Ctrl-C stops"
                )
            }
            None => println!("mount it with: torchfs mount /mnt/t; Ctrl-C stops"),
        }
        roles::ready();
        match &mount {
            Some(mount) => {
                tokio::select! {
                    () = stop => {}
                    () = mount.ended() => tracing::info!("unmounted from outside; stopping"),
                }
            }
            None => stop.await,
        }
        drop(note);
        let unmounted = match mount {
            Some(mount) => mount.stop().await,
            None => Ok(()),
        };
        for server in servers {
            server.stop().await;
        }
        meta.stop().await;
        unmounted?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The numbers of the data servers to start, and a word about those that were not asked for: without one of them files
/// that it has pieces of could not be read.
fn data_folders(dir: &Path, servers: u16) -> anyhow::Result<(Vec<u16>, String)> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut more: Vec<u16> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("data")?.parse().ok())
        .filter(|n| *n > servers && dir.join(format!("data{n}")).join("server.toml").exists())
        .collect();
    more.sort_unstable();
    let word = match more.as_slice() {
        [] => String::new(),
        more => {
            let names: Vec<String> = more.iter().map(|n| format!("data{n}")).collect();
            format!(" (with {}, which a start with more --servers made)", names.join(", "))
        }
    };
    Ok(((1..=servers).chain(more).collect(), word))
}

async fn mount(
    path: &Path,
    cluster: &roles::Cluster,
    options: &MountOptions,
) -> anyhow::Result<roles::Mount> {
    let opened = roles::Mount::open(path, "", cluster, options).await?;
    roles::Mount::start(opened, path, options).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_data_server_from_before_is_started() {
        let dir = tempfile::tempdir().expect("a folder");
        for name in ["data1", "data4", "data5", "data7", "data", "datax", "meta"] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
        }
        for name in ["data1", "data4", "data5"] {
            std::fs::write(dir.path().join(name).join("server.toml"), "").expect("written");
        }
        let (numbers, word) = data_folders(dir.path(), 2).expect("listed");
        assert_eq!(numbers, [1, 2, 4, 5]);
        assert!(word.contains("data4, data5"), "{word}");
        assert_eq!(data_folders(dir.path(), 5).expect("listed"), ((1..=5).collect(), String::new()));
    }
}
