//! `torchfs meta status`: who leads, how far its log is, who follows.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::connect::Connect;
use crate::{print, roles};

/// Show who leads, since when, how far the log is and how far the standbys are
///
///   torchfs meta status --meta 10.0.0.1:7070,10.0.0.2:7070
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    connect: Connect,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.connect.find()?;
    let report = roles::block_on(async move { Ok(roles::tool(&found).meta_status().await?) })?;
    let behind = |applied: u64| report.durable.0.saturating_sub(applied);
    if args.json {
        let standbys: Vec<_> = report
            .standbys
            .iter()
            .map(|s| {
                json!({"addr": s.addr, "applied": s.applied.0, "behind": behind(s.applied.0),
                       "replica_bytes": s.replica_bytes, "silent_ms": s.silent_ms})
            })
            .collect();
        let out = json!({
            "cluster": format!("{:016x}", report.cluster.0),
            "leader": report.leader,
            "since": report.since.secs,
            "fence": report.fence.0,
            "incarnation": report.incarnation.0,
            "engine": report.engine,
            "ordered": report.ordered.0,
            "durable": report.durable.0,
            "applied": report.applied.0,
            "replica_bytes": report.replica_bytes,
            "replica_keys": report.replica_keys,
            "overlay_bytes": report.overlay_bytes,
            "log_bytes": report.log_bytes,
            "state_bytes": report.state_bytes,
            "standbys": standbys,
        });
        println!("{out:#}");
        return Ok(ExitCode::SUCCESS);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let since = now.saturating_sub(u64::try_from(report.since.secs).unwrap_or(0));
    println!(
        "{} leads cluster {:016x} since {} (fence {}, incarnation {}, engine {})",
        report.leader,
        report.cluster.0,
        print::span(since),
        report.fence.0,
        report.incarnation.0,
        report.engine
    );
    println!(
        "log: batch {} ordered, {} durable, {} in the replica; {} on disk",
        print::count(report.ordered.0),
        print::count(report.durable.0),
        print::count(report.applied.0),
        print::size(report.log_bytes)
    );
    println!(
        "replica: {} in {} pairs, {} in memory",
        print::size(report.replica_bytes),
        print::count(report.replica_keys),
        print::size(report.overlay_bytes)
    );
    if report.state_bytes > 0 {
        println!("database: {} of pairs", print::size(report.state_bytes));
    }
    if report.standbys.is_empty() {
        println!("no standby follows");
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = report
        .standbys
        .iter()
        .map(|s| {
            vec![
                s.addr.clone(),
                print::count(behind(s.applied.0)),
                print::size(s.replica_bytes),
                format!("{:.1} s", s.silent_ms as f64 / 1e3),
            ]
        })
        .collect();
    print!("{}", print::table(&["STANDBY", "BEHIND", "REPLICA", "HEARD BEFORE"], &rows));
    Ok(ExitCode::SUCCESS)
}
