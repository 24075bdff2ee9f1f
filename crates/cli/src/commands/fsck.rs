//! `torchfs fsck`: checks every record of the metadata, and that every block is on its servers.

mod pieces;

use std::process::ExitCode;

use serde_json::json;

use crate::connect::Ask;
use crate::{print, roles};

/// Check the metadata against itself and against the data servers; names every inconsistency
///
/// Proves that every block has all its pieces on the servers they belong to, or names those that have not. With --data
/// every piece is read from its disk as well, and pieces are named that nobody needs. Nothing is changed: repair goes on by
/// itself, see torchfs servers. The status is 0 when all is well, 1 when something was found.
#[derive(clap::Args)]
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
    let (problems, records, blocks, strays) = roles::block_on(async move {
        let tool = roles::tool(&found);
        let mut problems = Vec::new();
        let bar = print::progress("metadata", 0, json);
        let checked = tool
            .check(|progress, found| {
                problems.extend_from_slice(found);
                bar.set_length(progress.total.max(progress.done));
                bar.set_position(progress.done);
            })
            .await?;
        bar.finish_and_clear();
        let blocks = pieces::check_blocks(&tool, args.data, json, &mut problems).await?;
        let strays = match args.data {
            true => pieces::find_strays(&tool, json, &mut problems).await?,
            false => pieces::Strays::default(),
        };
        Ok((problems, checked.done, blocks, strays))
    })?;
    if json {
        let out = json!({
            "clean": problems.is_empty(),
            "problems": problems,
            "records": records,
            "blocks": blocks.checked,
            "blocks_whole": blocks.whole,
            "blocks_degraded": blocks.degraded,
            "blocks_unreadable": blocks.unreadable,
            "orphaned_pieces": strays.orphans,
            "leaving_pieces": strays.leaving,
        });
        println!("{out:#}");
    } else {
        for problem in &problems {
            println!("{problem}");
        }
        println!(
            "{} records checked; {} of {} blocks have full redundancy, {} less, {} cannot be read",
            print::count(records),
            print::count(blocks.whole),
            print::count(blocks.checked),
            print::count(blocks.degraded),
            print::count(blocks.unreadable),
        );
        if strays.orphans + strays.leaving > 0 {
            println!(
                "{} pieces that nobody needs will go by themselves, {} will not",
                print::count(strays.leaving),
                print::count(strays.orphans)
            );
        }
        match problems.len() {
            0 => println!("clean"),
            1 => println!("1 problem"),
            some => println!("{} problems", print::count(some as u64)),
        }
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
