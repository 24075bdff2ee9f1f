//! Watching long work that the cluster does: repair, moves, scrub.
//!
//! The work runs in the cluster and survives whoever asked for it. So a command begins it, looks at it twice a second and draws a
//! bar; Ctrl-C ends the looking and says so.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use torchfs_client::Tool;
use torchfs_proto::layout::ServerInfo;
use torchfs_proto::msg::meta::{Done, Op, RepairReport};

use crate::connect::Ask;
use crate::{print, roles, settings};

/// Flags of commands that begin long work.
#[derive(clap::Args, Clone)]
pub struct Watching {
    #[command(flatten)]
    pub ask: Ask,

    /// Bytes per second that repair, moves and scrub may take on each server from now on; 0: the default,
    /// 128MiB
    #[arg(long, value_parser = settings::bytes, value_name = "SIZE")]
    rate: Option<u64>,

    /// Begin it and do not wait for its end
    #[arg(long)]
    pub no_wait: bool,
}

/// How far something is.
pub struct Stand {
    /// Nothing is left to do.
    pub done: bool,
    /// Of `total`, in units of the work.
    pub at: u64,
    /// 0: not known.
    pub total: u64,
    /// What is going on, in a few words; at the end, what came of it.
    pub says: String,
    /// Why it will not end by itself, and what to do.
    pub cannot: Option<String>,
}

/// What a report says about how redundant the data is.
pub fn repair_stand(report: &RepairReport) -> Stand {
    let says = match (report.dirty, report.pieces_left) {
        (0, _) if report.balancing => "choosing what moves next".to_string(),
        (0, _) => "all is as it should be".to_string(),
        (groups, 0) => format!("{groups} groups to look at"),
        (groups, pieces) => format!("{groups} groups, {} pieces to copy", print::count(pieces)),
    };
    let done = report.dirty == 0 && report.moving == 0 && !report.balancing;
    Stand { done, at: report.pass_done, total: report.pass_total, says, cannot: hopeless(report) }
}

/// Why groups stay as they are: what blocks of theirs lack is nowhere, and nothing else is left to copy.
pub fn hopeless(report: &RepairReport) -> Option<String> {
    let rests = report.lost > 0 && report.pieces_left == 0 && report.pass_total == 0;
    rests.then(|| {
        format!(
            "{} blocks have too few pieces left to be read; bring back a server that had them, or delete their files, \
             which `torchfs fsck --data` names",
            print::count(report.lost)
        )
    })
}

/// What a report says about whether all data has all its pieces: as [`repair_stand`], but servers that are away count too.
pub fn redundancy_stand(report: &RepairReport) -> Stand {
    let repair = repair_stand(report);
    if report.degraded == 0 {
        return repair;
    }
    let away = format!("{} groups have a server that is away", report.degraded);
    let says = if repair.done { away } else { format!("{away}; {}", repair.says) };
    Stand { done: false, says, ..repair }
}

/// Asks for the present state, and sets the rate if one is given.
pub async fn look(tool: &Tool, rate: Option<u64>) -> anyhow::Result<RepairReport> {
    match tool.ask(Op::Repair { rate }).await? {
        Done::Repair(report) => Ok(report),
        other => anyhow::bail!("the metadata service answered a question about repair with {other:?}"),
    }
}

/// Watches until `stand` says that it is done, or somebody presses Ctrl-C. `what` is the work, for people.
pub async fn watch(
    tool: &Tool,
    options: &Watching,
    what: &str,
    mut stand: impl FnMut(&RepairReport) -> Stand,
) -> anyhow::Result<ExitCode> {
    let mut report = look(tool, options.rate).await?;
    let json = options.ask.json;
    let goes_on = format!("{what} goes on in the cluster; torchfs servers shows how far it is");
    if options.no_wait {
        options.ask.print(&describe(&report), &goes_on);
        return Ok(ExitCode::SUCCESS);
    }
    let bar = bar(what, json);
    let stop = roles::stop_signal()?;
    tokio::pin!(stop);
    let end = loop {
        let now = stand(&report);
        bar.set_length(now.total.max(now.at));
        bar.set_position(now.at);
        bar.set_message(format!("{}, {}/s", now.says, print::size(report.rate)));
        if now.done || now.cannot.is_some() {
            break now;
        }
        tokio::select! {
            () = &mut stop => {
                bar.finish_and_clear();
                eprintln!("{goes_on}");
                return Ok(ExitCode::from(130));
            }
            () = tokio::time::sleep(Duration::from_millis(500)) => {}
        }
        report = look(tool, None).await?;
    };
    bar.finish_and_clear();
    if let Some(why) = end.cannot.filter(|_| !end.done) {
        if json {
            println!("{:#}", describe(&report));
        }
        anyhow::bail!("{what} cannot end: {why}");
    }
    options.ask.print(&describe(&report), &format!("{what} is done; {}", end.says));
    if report.lost > 0 {
        if !json {
            print_lost(&report);
        }
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Names what cannot be repaired.
pub fn print_lost(report: &RepairReport) {
    println!(
        "! {} blocks have too few pieces left to be read; bring back a server that had them. Some of them:",
        print::count(report.lost)
    );
    for block in report.lost_blocks.iter().take(8) {
        println!("    block {block}");
    }
}

/// A report for programs.
pub fn describe(report: &RepairReport) -> Value {
    let lost: Vec<String> = report.lost_blocks.iter().map(ToString::to_string).collect();
    let drains: Vec<Value> = report
        .drains
        .iter()
        .map(|d| {
            let (pieces, bytes) = d.moved.unwrap_or_default();
            json!({"server": d.server.0, "groups": d.groups, "pieces": d.pieces, "stuck": d.stuck,
                   "moved_pieces": pieces, "moved_bytes": bytes})
        })
        .collect();
    json!({
        "dirty_groups": report.dirty,
        "degraded_groups": report.degraded,
        "moving_groups": report.moving,
        "groups": report.groups,
        "groups_at_risk": report.at_risk,
        "pass_done": report.pass_done,
        "pass_total": report.pass_total,
        "pieces_left": report.pieces_left,
        "pieces_done": report.pieces_done,
        "bytes_done": report.bytes_done,
        "bytes_per_s": report.rate,
        "bytes_per_s_max": report.rate_max,
        "stale_dropped": report.dropped,
        "lost": report.lost,
        "lost_blocks": lost,
        "auto_rebalance": report.auto_rebalance,
        "balancing": report.balancing,
        "drains": drains,
        "scrub": {"running": report.scrub.running, "pieces": report.scrub.pieces, "total": report.scrub.total,
                  "bytes": report.scrub.bytes, "bad": report.scrub.bad, "last_end": report.scrub.last_end},
    })
}

/// The server that somebody means: its number or its address.
pub fn find_server<'a>(servers: &'a [ServerInfo], wanted: &str) -> anyhow::Result<&'a ServerInfo> {
    let number = wanted.parse::<u32>().ok();
    let found = servers.iter().find(|s| Some(s.id.0) == number || s.addr == wanted);
    found.ok_or_else(|| {
        let all: Vec<String> = servers.iter().map(|s| format!("{} ({})", s.id, s.addr)).collect();
        anyhow::anyhow!("there is no data server `{wanted}`; there are: {}", all.join(", "))
    })
}

fn bar(what: &str, hidden: bool) -> ProgressBar {
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    let style =
        ProgressStyle::with_template("{prefix:12} [{bar:28}] {human_pos}/{human_len} {msg}, {eta} left");
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(what.to_string());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use torchfs_proto::ServerId;

    #[test]
    fn servers_are_found_by_number_and_address() {
        let server =
            |id, addr: &str| ServerInfo { id: ServerId(id), addr: addr.into(), ..ServerInfo::default() };
        let servers = [server(1, "10.0.0.1:7080"), server(2, "10.0.0.2:7080")];
        assert_eq!(find_server(&servers, "2").unwrap().id, ServerId(2));
        assert_eq!(find_server(&servers, "10.0.0.1:7080").unwrap().id, ServerId(1));
        let error = find_server(&servers, "3").unwrap_err().to_string();
        assert!(error.contains("10.0.0.2:7080"), "{error}");
    }

    #[test]
    fn work_is_done_when_no_group_is_dirty_or_moves() {
        let mut report = RepairReport { dirty: 2, moving: 1, pieces_left: 7, ..RepairReport::default() };
        assert!(!repair_stand(&report).done);
        report.dirty = 0;
        assert!(!repair_stand(&report).done);
        report.moving = 0;
        assert!(repair_stand(&report).done && redundancy_stand(&report).done);
        report.balancing = true;
        assert!(!repair_stand(&report).done, "the next groups are about to move");
        report.balancing = false;
        report.degraded = 3;
        assert!(repair_stand(&report).done && !redundancy_stand(&report).done, "a server is away");
    }

    #[test]
    fn work_that_lost_blocks_hold_up_is_not_waited_for() {
        let mut report = RepairReport { dirty: 2, lost: 1, pass_total: 9, ..RepairReport::default() };
        assert_eq!(repair_stand(&report).cannot, None, "others may still be made whole");
        (report.pass_total, report.pieces_left) = (0, 3);
        assert_eq!(repair_stand(&report).cannot, None);
        report.pieces_left = 0;
        let why = repair_stand(&report).cannot.unwrap();
        assert!(why.contains("bring back a server"), "{why}");
        report.degraded = 1;
        assert!(redundancy_stand(&report).cannot.is_some());
        assert_eq!(repair_stand(&RepairReport { dirty: 2, ..RepairReport::default() }).cannot, None);
    }
}
