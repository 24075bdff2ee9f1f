//! `torchfs status`: the cluster at a glance.

use std::process::ExitCode;

use serde_json::json;
use torchfs_proto::clock::{Clock, SystemClock};

use super::servers::state;
use crate::connect::Ask;
use crate::{print, roles, watch};

/// Show servers, capacity, files, blocks, health
///
///   torchfs status
///   torchfs status --json | jq .warnings
///
/// Lines with `!` need attention. The status is 0 whenever the cluster answered.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    ask: Ask,
}

/// Asks and prints; the status is 0 whenever the cluster answered.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    let report = roles::block_on(async move { Ok(roles::tool(&found).status().await?) })?;
    if args.ask.json {
        let servers: Vec<_> = report
            .servers
            .iter()
            .map(|s| {
                json!({"id": s.id.0, "addr": s.addr, "up": s.up, "state": state(s), "zone": s.zone, "total": s.total, "free": s.free,
                       "used": s.used, "pieces": s.pieces})
            })
            .collect();
        let out = json!({
            "cluster": format!("{:016x}", report.cluster.0),
            "incarnation": report.incarnation.0,
            "health": if report.warnings.is_empty() { "ok" } else { "needs attention" },
            "warnings": report.warnings,
            "volumes": report.volumes,
            "redundancy": report.redundancy,
            "inodes": report.inodes,
            "blocks": report.blocks,
            "bytes": report.bytes,
            "dead_blocks": report.dead,
            "sessions": report.sessions,
            "meta_bytes": report.meta_bytes,
            "meta_free": report.meta_free,
            "placement": report.placement,
            "dumps": report.dumps.as_ref().map(|d| json!({
                "every_s": d.every_s,
                "newest_unix_s": d.newest_ms.map(|ms| ms / 1_000),
                "age_s": d.newest_ms.map(age_s),
                "copies": d.copies,
                "bytes": d.bytes,
                "failure": d.failure,
            })),
            "repair": report.repair.as_ref().map(watch::describe),
            "servers": servers,
        });
        println!("{out:#}");
        return Ok(ExitCode::SUCCESS);
    }
    let health = if report.warnings.is_empty() { "healthy" } else { "needs attention" };
    println!("cluster {:016x}: {health}", report.cluster.0);
    for warning in &report.warnings {
        println!("  ! {warning}");
    }
    println!(
        "{} inodes, {} in {} blocks ({} waiting to be deleted), {}, {} sessions, metadata {}",
        print::count(report.inodes),
        print::size(report.bytes),
        print::count(report.blocks),
        print::count(report.dead),
        report.redundancy,
        report.sessions,
        print::size(report.meta_bytes),
    );
    if let Some((dumps, newest)) = report.dumps.as_ref().and_then(|d| Some((d, d.newest_ms?))) {
        println!(
            "last dump of the metadata {} ago, {} on {} data servers",
            print::span(age_s(newest)),
            print::size(dumps.bytes),
            dumps.copies
        );
    }
    if let Some(repair) = report.repair.as_ref().filter(|repair| !watch::redundancy_stand(repair).done) {
        println!("redundancy: {}, {}/s", watch::redundancy_stand(repair).says, print::size(repair.rate));
    }
    let rows: Vec<Vec<String>> = report
        .servers
        .iter()
        .map(|s| {
            vec![
                s.id.to_string(),
                state(s),
                print::size(s.used),
                print::size(s.free),
                print::count(s.pieces),
                s.addr.clone(),
            ]
        })
        .collect();
    print!("{}", print::table(&["SERVER", "STATE", "USED", "FREE", "PIECES", "ADDRESS"], &rows));
    Ok(ExitCode::SUCCESS)
}

/// Seconds since a moment, in milliseconds since 1970.
fn age_s(ms: u64) -> u64 {
    let now = SystemClock.wall_ns().div_euclid(1_000_000);
    u64::try_from(now).unwrap_or(0).saturating_sub(ms) / 1_000
}
