//! `torchfs volume`: makes, shows, changes and removes volumes.

use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::{Value, json};
use torchfs_client::Tool;
use torchfs_proto::attr::Compression;
use torchfs_proto::layout::Scheme;
use torchfs_proto::msg::meta::{Done, Op, VolumeOp, VolumePolicy, VolumeReport};

use crate::connect::Ask;
use crate::{print, roles, settings};

/// Make, show, change and remove volumes
///
///   torchfs volume create train --redundancy ec:4+2 --block-size 4MiB --compression lz4
///   torchfs mount train /mnt/t
///
/// A volume is one namespace with its own policies; all volumes share the data servers.
/// Policies can be changed later and then hold for new data; `torchfs policy` sets them for one
/// folder, and moves old data.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(subcommand)]
    action: Action,

    #[command(flatten)]
    ask: Ask,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make a volume; policies that are not given are the cluster's own
    ///
    ///   torchfs volume create train --redundancy ec:4+2
    ///   torchfs volume create scratch --redundancy replicas:1 --compression none
    #[command(verbatim_doc_comment)]
    Create {
        /// Its name: 1 to 64 letters, digits, `-`, `_` and `.`
        name: String,
        #[command(flatten)]
        policies: Policies,
    },
    /// List all volumes
    Ls,
    /// Show one volume
    Show {
        /// Which
        name: String,
    },
    /// Change policies, for data written from now on
    Set {
        /// Which
        name: String,
        #[command(flatten)]
        policies: Policies,
    },
    /// Remove a volume that nobody has mounted
    Rm {
        /// Which
        name: String,
        /// Even if there are files in it; they are gone then
        #[arg(long)]
        force: bool,
    },
}

#[derive(clap::Args)]
struct Policies {
    /// How data survives lost servers: replicas:N keeps N copies; ec:K+M cuts blocks into K pieces and adds M, any M of
    /// which may be lost [default of a new volume: the cluster's]
    #[arg(long, value_parser = settings::redundancy, value_name = "SCHEME")]
    redundancy: Option<Scheme>,

    /// Largest block: a power of two from 256KiB to 16MiB [default of a new volume: 4MiB]
    #[arg(long, value_parser = settings::bytes, value_name = "SIZE")]
    block_size: Option<u64>,

    /// How blocks are compressed [default of a new volume: lz4]
    #[arg(long, value_name = "CODEC")]
    compression: Option<Codec>,

    /// Over how many placement groups the blocks of a file go in turn [default of a new volume: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    stripe: Option<u32>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Codec {
    /// As it is
    None,
    /// Fast
    Lz4,
    /// Smaller
    Zstd,
}

/// Asks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let ask = args.ask;
    let (op, done) = match args.action {
        Action::Create { name, policies } => {
            let policy = policies.policy()?;
            (VolumeOp::Create { name, policy }, Some("is made; mount it with: torchfs mount"))
        }
        Action::Set { name, policies } => {
            let policy = policies.policy()?;
            if policy == VolumePolicy::default() {
                anyhow::bail!(
                    "nothing to change: give --redundancy, --block-size, --compression or --stripe"
                );
            }
            (VolumeOp::Set { name, policy }, Some("is changed, for data written from now on"))
        }
        Action::Rm { name, force } => return remove(name, force, &ask),
        Action::Ls => (VolumeOp::List, None),
        Action::Show { name } => return show(&name, &ask),
    };
    let found = ask.find()?;
    let volumes = roles::block_on(async move { request(&roles::tool(&found), op).await })?;
    if ask.json {
        let all: Vec<Value> = volumes.iter().map(describe).collect();
        println!("{:#}", json!({ "volumes": all }));
        return Ok(ExitCode::SUCCESS);
    }
    match (done, volumes.as_slice()) {
        (Some(done), [volume]) if done.ends_with("mount") => {
            println!("volume {} {done} {} PATH", volume.info.name, volume.info.name);
            warn(volume);
        }
        (Some(done), [volume]) => {
            println!("volume {} {done}", volume.info.name);
            warn(volume);
        }
        _ => list(&volumes),
    }
    Ok(ExitCode::SUCCESS)
}

impl Policies {
    fn policy(&self) -> anyhow::Result<VolumePolicy> {
        let block_size = match self.block_size {
            Some(size) if !size.is_power_of_two() || !(256 << 10..=16 << 20).contains(&size) => {
                anyhow::bail!("--block-size must be a power of two from 256KiB to 16MiB")
            }
            size => size.and_then(|size| u32::try_from(size).ok()),
        };
        let compression = self.compression.map(|codec| match codec {
            Codec::None => Compression::None,
            Codec::Lz4 => Compression::Lz4,
            Codec::Zstd => Compression::Zstd,
        });
        Ok(VolumePolicy { block_size, compression, scheme: self.redundancy, stripe: self.stripe })
    }
}

fn show(name: &str, ask: &Ask) -> anyhow::Result<ExitCode> {
    let found = ask.find()?;
    let volumes = roles::block_on(async move { request(&roles::tool(&found), VolumeOp::List).await })?;
    let Some(volume) = volumes.iter().find(|v| v.info.name == name) else {
        let names: Vec<&str> = volumes.iter().map(|v| v.info.name.as_str()).collect();
        anyhow::bail!("there is no volume `{name}`; there are: {}", names.join(", "));
    };
    if ask.json {
        println!("{:#}", describe(volume));
        return Ok(ExitCode::SUCCESS);
    }
    println!("volume {}{}", volume.info.name, if volume.removed { " (being removed)" } else { "" });
    println!("  redundancy   {}", volume.scheme);
    println!("  block size   {}", print::size(volume.info.block_size.into()));
    println!("  compression  {}", codec(volume.info.compression));
    println!("  stripe       {} groups", volume.stripe);
    println!(
        "  content      {} in {} blocks, {} on disks, {} inodes",
        print::size(volume.bytes),
        print::count(volume.blocks),
        print::size(volume.stored),
        print::count(volume.inodes)
    );
    println!("  sessions     {}", volume.sessions);
    warn(volume);
    Ok(ExitCode::SUCCESS)
}

fn remove(name: String, force: bool, ask: &Ask) -> anyhow::Result<ExitCode> {
    let found = ask.find()?;
    let op = VolumeOp::Remove { name: name.clone(), force };
    roles::block_on(async move { request(&roles::tool(&found), op).await })?;
    let sentence = format!("volume {name} is removed; its space comes back in the background");
    ask.print(&json!({ "removed": name }), &sentence);
    Ok(ExitCode::SUCCESS)
}

async fn request(tool: &Tool, op: VolumeOp) -> anyhow::Result<Vec<VolumeReport>> {
    match tool.ask(Op::Volume(op)).await? {
        Done::Volumes(volumes) => Ok(volumes),
        Done::Ok => Ok(Vec::new()),
        other => anyhow::bail!("the metadata service answered a request for volumes with {other:?}"),
    }
}

/// Says when there are too few servers for what was asked.
fn warn(volume: &VolumeReport) {
    if volume.info.layout.0 == 0 && !volume.removed {
        let (scheme, needs) = (volume.scheme, volume.scheme.width());
        println!("  ! {scheme} needs {needs} data servers; writing waits until they have joined");
    } else if let Some(asked) = volume.asked.filter(|asked| *asked != volume.scheme) {
        println!(
            "  ! {asked} was asked for and needs {} data servers; until they have joined new data gets {}",
            asked.width(),
            volume.scheme
        );
    }
}

fn list(volumes: &[VolumeReport]) {
    let rows: Vec<Vec<String>> = volumes
        .iter()
        .map(|v| {
            vec![
                v.info.name.clone(),
                v.scheme.to_string(),
                print::size(v.info.block_size.into()),
                codec(v.info.compression).to_string(),
                print::count(v.inodes),
                print::size(v.bytes),
                print::size(v.stored),
                v.sessions.to_string(),
                if v.removed { "being removed" } else { "" }.to_string(),
            ]
        })
        .collect();
    let headings =
        ["VOLUME", "REDUNDANCY", "BLOCK", "COMPRESSION", "INODES", "CONTENT", "ON DISK", "SESSIONS", ""];
    print!("{}", print::table(&headings, &rows));
}

fn describe(volume: &VolumeReport) -> Value {
    json!({
        "name": volume.info.name,
        "id": volume.info.id.0,
        "redundancy": volume.scheme.to_string(),
        "asked": volume.asked.map(|scheme| scheme.to_string()),
        "block_size": volume.info.block_size,
        "compression": codec(volume.info.compression),
        "stripe": volume.stripe,
        "inodes": volume.inodes,
        "blocks": volume.blocks,
        "bytes": volume.bytes,
        "stored": volume.stored,
        "sessions": volume.sessions,
        "removed": volume.removed,
        "writable": volume.info.layout.0 != 0 && !volume.removed,
    })
}

fn codec(compression: Compression) -> &'static str {
    match compression {
        Compression::None => "none",
        Compression::Lz4 => "lz4",
        Compression::Zstd => "zstd",
    }
}
