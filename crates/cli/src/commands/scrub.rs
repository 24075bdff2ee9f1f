//! `torchfs scrub`: reads every stored piece and has the bad ones made again.

use std::process::ExitCode;

use torchfs_proto::msg::meta::{Op, RepairReport};

use crate::watch::{self, Stand, Watching};
use crate::{print, roles};

/// Read every stored piece, find flipped bits, and heal them
///
///   torchfs scrub --rate 50MiB
///
/// Each data server reads its disks at most at the given rate and checks every checksum. What
/// is bad or missing is made again from the other pieces. The work goes on when this command
/// ends, and begins again where it was after a restart. `--stop` ends it.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// End the scrub that runs
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
        let ran = watch::look(&tool, None).await?.scrub.running;
        tool.ask(Op::Scrub { on: !args.stop }).await?;
        if args.stop {
            let report = watch::look(&tool, None).await?;
            let sentence = if ran { "the scrub is ended" } else { "no scrub ran" };
            args.watching.ask.print(&watch::describe(&report), sentence);
            return Ok(ExitCode::SUCCESS);
        }
        let mut before = None;
        watch::watch(&tool, &args.watching, "scrub", |report| {
            stand(report, *before.get_or_insert(report.pieces_done))
        })
        .await
    })
}

/// Done when everything was read and what was bad or missing is whole again. `before` is what repair had done by then.
fn stand(report: &RepairReport, before: u64) -> Stand {
    let scrub = &report.scrub;
    let (read, bad) = (print::size(scrub.bytes), print::count(scrub.bad));
    if scrub.running {
        let says = format!("pieces, {read}, {bad} bad");
        return Stand { done: false, at: scrub.pieces, total: scrub.total, says, cannot: None };
    }
    let repair = watch::repair_stand(report);
    // What cannot be repaired is named at the end, not waited for.
    let done = repair.done || report.lost > 0;
    let made = print::count(report.pieces_done.saturating_sub(before));
    let says = match done {
        true => {
            let pieces = print::count(scrub.pieces);
            format!(
                "{pieces} pieces read, {read}; {bad} bad pieces found, {made} bad or missing ones made again"
            )
        }
        false => format!("{bad} bad pieces found; {}", repair.says),
    };
    Stand { done, says, ..repair }
}
