//! `torchfs meta recover`: brings the metadata back from the dumps on the data servers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;
use torchfs_client::{Dumps, Tcp, ToolConfig};
use torchfs_engine::Change;
use torchfs_engine::dump::{Header, Reader};
use torchfs_proto::dump::DumpName;
use torchfs_proto::key::{CLUSTER, Parts, Space};
use torchfs_proto::{Incarnation, ServerId, msg, record};
use torchfs_rpc::{Role, Secret};

use super::load;
use crate::roles::DatabaseOptions;
use crate::{connect, print, roles};

/// Bring the metadata back from the hourly dumps on the data servers
///
/// For a cluster whose metadata disk is gone. The data servers must run, and the old metadata
/// service must not. Name all data servers, or as many as still answer: the newest dump among
/// theirs is taken, and what they have seen tells which ids must not be given out again.
///
///   torchfs meta recover --dir /var/lib/torchfs/meta --data 10.0.0.2:7080,10.0.0.3:7080 --secret-file secret
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The folder to fill; empty or missing
    #[arg(long, value_name = "DIR", required_unless_present = "list")]
    dir: Option<PathBuf>,

    /// The data servers: HOST:PORT, several separated by commas
    #[arg(long, value_name = "HOST:PORT[,…]", value_delimiter = ',', required = true)]
    data: Vec<String>,

    /// File with the cluster secret
    #[arg(long, env = "TORCHFS_SECRET_FILE", value_name = "FILE")]
    secret_file: Option<PathBuf>,

    /// Show the dumps that the servers have, and do nothing
    #[arg(long)]
    list: bool,

    /// Take this dump instead of the newest
    #[arg(long, value_name = "NAME", value_parser = dump_name)]
    dump: Option<DumpName>,

    #[command(flatten)]
    database: DatabaseOptions,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn dump_name(text: &str) -> Result<DumpName, String> {
    text.parse().map_err(|_| format!("`{text}` is no name of a dump; --list shows them"))
}

/// A dump and where it is.
struct Place {
    len: u64,
    addrs: Vec<String>,
}

type Places = BTreeMap<DumpName, Place>;

/// Looks, fetches, checks, loads.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    for addr in &args.data {
        connect::check_addr(addr, "--data")?;
    }
    let secret = match &args.secret_file {
        Some(path) => connect::read_secret(path)?,
        None => Vec::new(),
    };
    let rpc = torchfs_rpc::Config {
        role: Role::Tool,
        secret: Secret::new(&secret),
        ..torchfs_rpc::Config::default()
    };
    let Some(dir) = args.dir.clone().filter(|_| !args.list) else {
        let Looked { places, .. } = roles::block_on(async { look(&servers(&rpc), &args.data).await })?;
        list(&places, args.json);
        return Ok(ExitCode::SUCCESS);
    };
    load::check_empty(&dir)?;
    roles::make_dir(&dir)?;
    let file = dir.join("recover.dump");
    let fetched = roles::block_on(async {
        let servers = servers(&rpc);
        let looked = look(&servers, &args.data).await?;
        let (name, known) = fetch_newest(&servers, &looked.places, args.dump, &file, args.json).await?;
        let others = not_asked(&known, &looked.answered);
        if !others.is_empty() {
            eprintln!("torchfs: {}", without(&others, known.len(), name));
        }
        Ok((name, looked.highest, others))
    });
    let loaded = fetched.and_then(|(name, highest, others)| {
        Ok((name, load::load(&file, &dir, &args.database, highest, args.json)?, others))
    });
    // Whatever came of it, the copy has done its work.
    let _ = std::fs::remove_file(&file);
    let (name, loaded, others) = loaded?;
    if args.json {
        let mut report = load::report(&loaded, &dir);
        report["dump"] = json!(name.to_string());
        report["servers_not_asked"] = json!(others.values().collect::<Vec<_>>());
        println!("{report:#}");
    } else {
        println!("{}", load::told(&loaded, &dir, &args.database));
    }
    Ok(ExitCode::SUCCESS)
}

fn servers(rpc: &torchfs_rpc::Config) -> Dumps {
    let config = ToolConfig { timeout: Duration::from_secs(30), ..ToolConfig::default() };
    Dumps::new(std::sync::Arc::new(Tcp(rpc.clone())), config)
}

/// Data servers that a dump names, and where they were.
type Known = BTreeMap<ServerId, String>;

/// Those servers that did not answer under their address. Where as many answered as there are, addresses have changed.
fn not_asked(known: &Known, answered: &[String]) -> Known {
    if answered.len() >= known.len() {
        return Known::new();
    }
    known.iter().filter(|(_, addr)| !answered.contains(addr)).map(|(id, addr)| (*id, addr.clone())).collect()
}

/// What going on without these servers may cost.
fn without(others: &Known, known: usize, name: DumpName) -> String {
    let named: Vec<String> = others.iter().map(|(id, addr)| format!("{id} at {addr}")).collect();
    format!(
        "{name} knows {known} data servers, and {} of them did not answer or were not named: {}; one of them may have a newer \
         dump, or have seen ids that must not be given out again. If they still run, begin again with all of them in --data",
        others.len(),
        named.join(", ")
    )
}

/// What the servers say.
struct Looked {
    places: Places,
    /// The highest incarnation that any of them has seen.
    highest: Incarnation,
    /// Those that answered.
    answered: Vec<String>,
}

/// Asks all servers what they have; at least one must answer.
async fn look(servers: &Dumps, addrs: &[String]) -> anyhow::Result<Looked> {
    let mut places = Places::new();
    let mut highest = 0;
    let mut last = None;
    let mut answered = Vec::new();
    for addr in addrs {
        let seen = async {
            Ok::<_, torchfs_proto::Fault>((
                servers.list(addr).await?,
                servers.highest_incarnation(addr).await?,
            ))
        };
        match seen.await {
            Ok((dumps, seen)) => {
                answered.push(addr.clone());
                highest = highest.max(seen);
                for dump in dumps {
                    highest = highest.max(dump.name.incarnation.0);
                    let place = places.entry(dump.name).or_insert(Place { len: dump.len, addrs: Vec::new() });
                    place.len = place.len.max(dump.len);
                    place.addrs.push(addr.clone());
                }
            }
            Err(fault) => {
                eprintln!("torchfs: {fault}; going on without it");
                last = Some(fault);
            }
        }
    }
    match last {
        Some(fault) if answered.is_empty() => Err(fault).context("no data server answers"),
        _ => Ok(Looked { places, highest: Incarnation(highest), answered }),
    }
}

/// Fetches the newest dump that is whole, or the one that was asked for. Also the servers that it names.
async fn fetch_newest(
    servers: &Dumps,
    places: &Places,
    wanted: Option<DumpName>,
    file: &Path,
    quiet: bool,
) -> anyhow::Result<(DumpName, Known)> {
    if let Some(name) = wanted.filter(|name| !places.contains_key(name)) {
        bail!("no data server that answers has {name}; --list shows what they have");
    }
    for (name, place) in places.iter().rev().filter(|(name, _)| wanted.is_none_or(|wanted| wanted == **name))
    {
        for addr in &place.addrs {
            match fetch(servers, addr, *name, place.len, file, quiet).await {
                Ok(known) => return Ok((*name, known)),
                Err(error) => eprintln!("torchfs: {name} on {addr} is not taken: {error:#}"),
            }
        }
    }
    bail!(
        "none of the data servers that answer has a whole dump; name more of them with --data, or load a file of \
         `torchfs meta dump` with `torchfs meta load`"
    )
}

/// Fetches a dump from one server and reads it to its end.
async fn fetch(
    servers: &Dumps,
    addr: &str,
    name: DumpName,
    len: u64,
    file: &Path,
    quiet: bool,
) -> anyhow::Result<Known> {
    let mut out =
        torchfs_disk::create_private(file).with_context(|| format!("cannot write {}", file.display()))?;
    let bar = print::progress("fetching", len, quiet);
    let mut offset = 0;
    loop {
        let (part, total) = servers.fetch(addr, name, offset, 1 << 20).await?;
        out.write_all(&part).with_context(|| format!("cannot write {}", file.display()))?;
        offset += part.len() as u64;
        bar.set_position(offset);
        if part.is_empty() || offset >= total {
            break;
        }
    }
    bar.finish_and_clear();
    let (header, known) = read_back(file)?;
    if header.incarnation != name.incarnation {
        bail!("it says that it was made by incarnation {}", header.incarnation);
    }
    Ok(known)
}

/// Reads a dump to its end and checks every byte; answers what it says of itself and of the data servers.
fn read_back(file: &Path) -> anyhow::Result<(Header, Known)> {
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, File::open(file)?))?;
    let mut known = Known::new();
    while let Some(changes) = reader.next()? {
        for change in &changes {
            let (Change::Put(at, _) | Change::Delete(at)) = change;
            let server = Parts::of(at).filter(|parts| parts.volume == CLUSTER && parts.is(Space::Server));
            let Some(id) = server.and_then(|parts| Some(u32::from_be_bytes(parts.rest.try_into().ok()?)))
            else {
                continue;
            };
            known.remove(&ServerId(id));
            if let Change::Put(_, value) = change {
                let server: record::Server = msg::decode(value)?;
                known.insert(server.id, server.addr);
            }
        }
    }
    Ok((*reader.header(), known))
}

fn list(places: &Places, as_json: bool) {
    let secs = |name: &DumpName| i64::try_from(name.wall_ms / 1_000).unwrap_or(i64::MAX);
    if as_json {
        let dumps: Vec<_> = places
            .iter()
            .rev()
            .map(|(name, place)| {
                json!({"name": name.to_string(), "bytes": place.len, "made_unix_s": secs(name), "servers": place.addrs})
            })
            .collect();
        println!("{:#}", json!({ "dumps": dumps }));
        return;
    }
    let rows: Vec<Vec<String>> = places
        .iter()
        .rev()
        .map(|(name, place)| {
            vec![name.to_string(), print::utc(secs(name)), print::size(place.len), place.addrs.join(" ")]
        })
        .collect();
    print!("{}", print::table(&["DUMP", "MADE", "SIZE", "SERVERS"], &rows));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_were_not_asked_are_named() {
        let known: Known = (1..=3).map(|id| (ServerId(id), format!("10.0.0.{id}:7080"))).collect();
        let addr = |id: u32| format!("10.0.0.{id}:7080");
        let others = not_asked(&known, &[addr(2)]);
        assert_eq!(others.keys().map(|id| id.0).collect::<Vec<_>>(), [1, 3]);
        let sentence = without(&others, 3, DumpName::default());
        assert!(sentence.contains("3 at 10.0.0.3:7080") && sentence.contains("--data"), "{sentence}");
        assert!(not_asked(&known, &[addr(1), addr(2), addr(3)]).is_empty());
        assert!(not_asked(&known, &[addr(7), addr(8), addr(9)]).is_empty(), "all have moved");
    }
}
