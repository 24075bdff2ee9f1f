//! `torchfs drain`: empties a data server, so that it can be removed.

use std::process::ExitCode;

use torchfs_proto::ServerId;
use torchfs_proto::msg::meta::{DrainReport, Op, RepairReport};

use crate::watch::{self, Stand, Watching};
use crate::{print, roles};

/// Move everything off a data server
///
///   torchfs drain 3                 # by its number, as `torchfs servers` shows it
///   torchfs servers remove 3        # afterwards
///
/// The cluster moves the server's groups to the others, at most at the given rate; data is as
/// safe meanwhile as before. The work goes on when this command ends, and over restarts of
/// every process; the same command again goes on watching. `--stop` takes it back.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Its number or address, as `torchfs servers` shows it
    server: String,

    /// Take it back: the server keeps what it has and is used again
    #[arg(long)]
    stop: bool,

    #[command(flatten)]
    watching: Watching,
}

/// Begins it and watches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.watching.ask.find()?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        let server = watch::find_server(&tool.status().await?.servers, &args.server)?.id;
        tool.ask(Op::Drain { server, on: !args.stop }).await?;
        if args.stop {
            let report = watch::look(&tool, None).await?;
            let sentence = format!("server {server} is not emptied any more; its groups may move back to it");
            args.watching.ask.print(&watch::describe(&report), &sentence);
            return Ok(ExitCode::SUCCESS);
        }
        let mut most = 0;
        watch::watch(&tool, &args.watching, &format!("drain of {server}"), |report| {
            stand(report, server, &mut most)
        })
        .await
    })
}

fn stand(report: &RepairReport, server: ServerId, most: &mut u64) -> Stand {
    let Some(drain) = report.drains.iter().find(|d| d.server == server) else {
        let says = "it was taken back or the server is removed".to_string();
        return Stand { done: true, at: 1, total: 1, says, cannot: None };
    };
    let moved = moved(drain);
    let empty = || {
        let left = match drain.pieces {
            0 => "nothing is left on it".to_string(),
            old => format!(
                "everything is on other servers (its {} old pieces go by themselves)",
                print::count(old)
            ),
        };
        format!("{left}, {moved}; torchfs servers remove {server} takes it out")
    };
    let left = u64::from(drain.groups);
    *most = left.max(*most);
    let stuck = drain.stuck > 0 && report.moving == 0 && report.dirty == 0;
    let cannot = stuck.then(|| {
        format!(
            "{} groups have no other server to go to: too few are left for their redundancy; start another data \
             server and the drain goes on by itself, or take it back with: torchfs drain {server} --stop",
            drain.stuck
        )
    });
    if left == 0 {
        // A block of another group may have a piece here in place of a server that was away.
        let repair = watch::repair_stand(report);
        let says = if repair.done { empty() } else { repair.says.clone() };
        return Stand { at: *most, total: *most, says, ..repair };
    }
    let says = format!("{} groups left on it, {moved}", print::count(left));
    Stand { done: false, at: *most - left, total: *most, says, cannot: cannot.or(watch::hopeless(report)) }
}

/// What has left the server so far.
pub fn moved(drain: &DrainReport) -> String {
    let (pieces, bytes) = drain.moved.unwrap_or_default();
    format!("{} pieces moved ({})", print::count(pieces), print::size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_that_cannot_end_is_told_from_one_that_goes_on() {
        let moved = Some((1_200, 3 << 30));
        let drain = DrainReport { server: ServerId(5), groups: 64, pieces: 9, stuck: 64, moved };
        let mut report = RepairReport { drains: vec![drain], moving: 3, dirty: 3, ..RepairReport::default() };
        let mut most = 100;
        let now = stand(&report, ServerId(5), &mut most);
        assert_eq!((now.done, now.at, now.total, now.cannot.is_some()), (false, 36, 100, false));
        assert_eq!(now.says, "64 groups left on it, 1,200 pieces moved (3.0 GiB)");
        (report.moving, report.dirty) = (0, 0);
        let sentence = stand(&report, ServerId(5), &mut most).cannot.unwrap();
        assert!(sentence.contains("--stop"), "{sentence}");
        (report.drains[0].stuck, report.dirty, report.lost) = (0, 1, 1);
        let sentence = stand(&report, ServerId(5), &mut most).cannot.unwrap();
        assert!(sentence.contains("too few pieces"), "{sentence}");
        (report.dirty, report.lost) = (0, 0);
        report.drains[0] = DrainReport { groups: 0, stuck: 0, ..drain };
        let end = stand(&report, ServerId(5), &mut most);
        assert!(end.done && end.says.contains("its 9 old pieces go by themselves"), "{}", end.says);
        report.drains[0].pieces = 0;
        assert!(stand(&report, ServerId(5), &mut most).says.starts_with("nothing is left on it"));
    }
}
