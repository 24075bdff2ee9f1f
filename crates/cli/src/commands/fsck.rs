//! `torchfs fsck`: checks every record of the metadata, and that every block is on its servers; names what is hurt.

mod files;
mod pieces;
mod report;

use std::process::ExitCode;

use serde_json::json;

use files::Files;
use pieces::{Blocks, Strays};
use report::Report;

use crate::connect::Ask;
use crate::{print, roles};

/// Check the metadata against itself and against the data servers; names every inconsistency
///
///   torchfs fsck                  # records, and that every piece is on its server
///   torchfs fsck --data           # reads every piece as well
///
/// Proves that every block has all its pieces on the servers they belong to, or names those
/// that have not. With --data every piece is read from its disk as well, and pieces are named
/// that nobody needs. The files that such blocks belong to are named by volume and path. Of
/// each the first hundred are shown; --json has all. Nothing is changed: repair goes on by
/// itself, see torchfs servers. The status is 0 when all is well, 1 when something was found.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    ask: Ask,

    /// Read every piece from its disk and check the checksums too; look for pieces that nobody needs
    #[arg(long)]
    data: bool,
}

/// Checks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    let json = args.ask.json;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        let mut report = Report::new(json);
        let bar = report.begin("metadata", 0);
        let checked = tool
            .check(|progress, found| {
                found.iter().for_each(|problem| report.problem(problem));
                bar.set_length(progress.total.max(progress.done));
                bar.set_position(progress.done);
            })
            .await?;
        let blocks = pieces::check_blocks(&tool, args.data, &mut report).await?;
        let strays = match args.data {
            true => pieces::find_strays(&tool, &mut report).await?,
            false => pieces::Strays::default(),
        };
        report.end_problems();
        let files = files::name_files(&tool, &mut report, blocks.checked, json).await?;
        let clean = report.problems == 0;
        match json {
            true => report.end_json(&json!({
                "clean": clean,
                "records": checked.done,
                "blocks": blocks.checked,
                "blocks_whole": blocks.whole,
                "blocks_degraded": blocks.degraded,
                "blocks_unreadable": blocks.unreadable,
                "blocks_without_files_looked_for": report.hurt.more,
                "files_degraded": files.degraded,
                "files_unreadable": files.unreadable,
                "orphaned_pieces": strays.orphans,
                "leaving_pieces": strays.leaving,
            })),
            false => summary(&report, checked.done, blocks, files, strays),
        }
        Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

fn summary(report: &Report, records: u64, blocks: Blocks, files: Files, strays: Strays) {
    if report.hurt.more > 0 {
        println!("the files of {} more such blocks were not looked for", print::count(report.hurt.more));
    }
    println!(
        "{} records checked; {} of {} blocks have full redundancy, {} less, {} cannot be read",
        print::count(records),
        print::count(blocks.whole),
        print::count(blocks.checked),
        print::count(blocks.degraded),
        print::count(blocks.unreadable),
    );
    if files != Files::default() {
        println!(
            "{} files have less redundancy, {} cannot be read as a whole",
            print::count(files.degraded),
            print::count(files.unreadable)
        );
    }
    if strays.orphans + strays.leaving > 0 {
        println!(
            "{} pieces that nobody needs will go by themselves, {} will not",
            print::count(strays.leaving),
            print::count(strays.orphans)
        );
    }
    match report.problems {
        0 => println!("clean"),
        1 => println!("1 problem"),
        some => println!("{} problems", print::count(some)),
    }
}
