//! `torchfs servers`: the data servers, what they hold and lack; removes one.

use std::process::ExitCode;

use anyhow::bail;
use serde_json::{Value, json};
use torchfs_proto::layout::{ServerInfo, ServerState};
use torchfs_proto::msg::meta::{Op, RepairReport};

use crate::watch::{self, Watching};
use crate::{print, roles};

/// Show the data servers: state, zone, capacity, load, pieces to repair; or remove one
///
///   torchfs servers
///   torchfs servers --wait        # until every block has full redundancy again
///   torchfs drain 3 && torchfs servers remove 3
///
/// A server is *up* while it sends signs of life, *suspected* when one is overdue, *down* when
/// it has been silent for ten seconds: writers then choose others in its place. After ten
/// minutes it is *out*: what it held is made again elsewhere. One that comes back is brought up
/// to date by itself.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,

    /// Wait until every block has full redundancy, and no group moves
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    watching: Watching,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Forget a server that holds nothing any more
    ///
    /// Drain it first. A server that is dead and will not come back can be removed too, once it is out and what it held was
    /// made again elsewhere.
    Remove {
        /// Its number or address, as `torchfs servers` shows it
        server: String,
        /// Even if data is lost with it
        #[arg(long)]
        force: bool,
    },
}

/// Asks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let ask = args.watching.ask.clone();
    let found = ask.find()?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        if let Some(Action::Remove { server, force }) = args.action {
            let id = watch::find_server(&tool.status().await?.servers, &server)?.id;
            tool.ask(Op::RemoveServer { server: id, force }).await?;
            let sentence =
                format!("server {id} is removed; its process may be stopped and its folders deleted");
            ask.print(&json!({"removed": id.0}), &sentence);
            return Ok(ExitCode::SUCCESS);
        }
        if args.watching.no_wait && !args.wait {
            bail!("--no-wait goes with --wait, which waits; without either nothing is waited for");
        }
        if args.wait {
            return watch::watch(&tool, &args.watching, "repair", watch::redundancy_stand).await;
        }
        let repair = watch::look(&tool, None).await?;
        let servers = tool.status().await?.servers;
        if ask.json {
            let all: Vec<Value> = servers.iter().map(describe).collect();
            println!("{:#}", json!({"servers": all, "repair": watch::describe(&repair)}));
        } else {
            show(&servers, &repair);
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// What people call the state of a server.
pub fn state(server: &ServerInfo) -> String {
    match (server.draining, server.state) {
        (false, state) => state.to_string(),
        (true, ServerState::Up) if server.groups == 0 => "drained".to_string(),
        (true, ServerState::Up) => "draining".to_string(),
        (true, state) => format!("draining, {state}"),
    }
}

fn show(servers: &[ServerInfo], repair: &RepairReport) {
    let rows: Vec<Vec<String>> = servers
        .iter()
        .map(|s| {
            vec![
                s.id.to_string(),
                state(s),
                s.zone.clone(),
                print::size(s.used),
                print::size(s.free),
                print::count(s.pieces),
                s.groups.to_string(),
                print::count(s.to_repair),
                format!("{}/s", print::size(s.load.read_bytes)),
                format!("{}/s", print::size(s.load.written_bytes)),
                s.addr.clone(),
            ]
        })
        .collect();
    let headings = [
        "SERVER",
        "STATE",
        "ZONE",
        "USED",
        "FREE",
        "PIECES",
        "GROUPS",
        "TO REPAIR",
        "READ",
        "WRITTEN",
        "ADDRESS",
    ];
    print!("{}", print::table(&headings, &rows));
    for server in servers {
        for disk in server.disks.iter().filter(|disk| !disk.works()) {
            let (path, fault) = (&disk.path, &disk.fault);
            match disk.silent_ms {
                Some(_) => println!(
                    "! disk {path} of server {} hangs: {fault}; others take its place, it is used again when it answers",
                    server.id
                ),
                None => println!(
                    "! disk {path} of server {} failed: {fault}; its pieces are made again elsewhere, replace it when \
                     convenient",
                    server.id
                ),
            }
        }
    }
    for drain in repair.drains.iter().filter(|drain| drain.groups > 0) {
        let stuck = match drain.stuck {
            0 => String::new(),
            stuck => format!(", {stuck} of them with no other server to go to: start another data server"),
        };
        let moved = super::drain::moved(drain);
        println!("server {} is being emptied: {} groups left{stuck}; {moved}", drain.server, drain.groups);
    }
    if repair.scrub.running {
        let scrub = &repair.scrub;
        let (read, all) = (print::count(scrub.pieces), print::count(scrub.total));
        println!("scrub: {read} of {all} pieces read, {} bad", print::count(scrub.bad));
    }
    let stand = watch::redundancy_stand(repair);
    if stand.done {
        println!("every group has full redundancy");
    } else {
        println!(
            "{}; {} groups move, {} survive no further loss; {}/s of at most {}/s on each server",
            stand.says,
            repair.moving,
            repair.at_risk,
            print::size(repair.rate),
            print::size(repair.rate_max)
        );
    }
    if repair.lost > 0 {
        watch::print_lost(repair);
    }
}

fn describe(server: &ServerInfo) -> Value {
    let disks: Vec<Value> = server
        .disks
        .iter()
        .map(|d| {
            json!({"path": d.path, "total": d.total, "free": d.free, "used": d.used, "pieces": d.pieces, "fs": d.fs,
                   "failed": d.failed, "fault": d.fault, "silent_ms": d.silent_ms})
        })
        .collect();
    json!({
        "id": server.id.0,
        "addr": server.addr,
        "state": server.state.to_string(),
        "draining": server.draining,
        "up": server.up,
        "zone": server.zone,
        "total": server.total,
        "free": server.free,
        "used": server.used,
        "pieces": server.pieces,
        "groups": server.groups,
        "to_repair": server.to_repair,
        "gets_per_s": server.load.gets,
        "puts_per_s": server.load.puts,
        "read_bytes_per_s": server.load.read_bytes,
        "written_bytes_per_s": server.load.written_bytes,
        "waiting": server.load.waiting,
        "disks": disks,
    })
}
