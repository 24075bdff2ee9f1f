//! `torchfs df`: space by data server.

use std::process::ExitCode;

use serde_json::json;
use torchfs_proto::layout::{Room, ServerInfo};

use super::servers::state;
use crate::connect::Ask;
use crate::{print, roles};

/// Show space used and free, by data server and in all
///
///   torchfs df
///   torchfs df --json
///
/// TOTAL is what is used and what is free for data; what servers keep back for deleting is in
/// neither. Servers on one file system share what it has left: `all` counts that once.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    ask: Ask,
}

/// Asks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    let report = roles::block_on(async move { Ok(roles::tool(&found).status().await?) })?;
    // Servers that share a file system share what it has left; those that are down have nothing to offer.
    let up = report.servers.iter().filter(|s| s.up).flat_map(ServerInfo::parts);
    let Room { total, free, used } = Room::of(&up.collect::<Vec<_>>());
    if args.ask.json {
        let servers: Vec<_> = report
            .servers
            .iter()
            .map(|s| json!({"id": s.id.0, "addr": s.addr, "up": s.up, "state": state(s), "total": s.total, "free": s.free, "used": s.used}))
            .collect();
        let out = json!({"total": total, "free": free, "used": used, "content": report.bytes, "inodes": report.inodes,
                         "redundancy": report.redundancy, "servers": servers});
        println!("{out:#}");
        return Ok(ExitCode::SUCCESS);
    }
    // Rounded up, as df does: what has one byte used is not empty.
    let percent = |used: u64, free: u64| match used + free {
        0 => "-".to_string(),
        all => format!("{} %", used.saturating_mul(100).div_ceil(all)),
    };
    let mut rows: Vec<Vec<String>> = report
        .servers
        .iter()
        .map(|s| {
            vec![
                format!("server {}", s.id),
                print::size(s.total),
                print::size(s.used),
                print::size(s.free),
                percent(s.used, s.free),
                if s.up { s.addr.clone() } else { format!("{} ({})", s.addr, state(s)) },
            ]
        })
        .collect();
    rows.push(vec![
        "all".into(),
        print::size(total),
        print::size(used),
        print::size(free),
        percent(used, free),
        format!("{} of content, {}", print::size(report.bytes), report.redundancy),
    ]);
    print!("{}", print::table(&["", "TOTAL", "USED", "FREE", "USE", "WHERE"], &rows));
    Ok(ExitCode::SUCCESS)
}
