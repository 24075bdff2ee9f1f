//! `torchfs gc`: collects now what would be collected by and by.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::connect::Ask;
use crate::{print, roles};

/// Collect dead blocks now and wait until they are gone
///
///   torchfs gc
///   torchfs gc --timeout 30m
///
/// Blocks of deleted and overwritten data die two lease terms after their commit; blocks that
/// no commit ever named die with the session that put them. The cluster collects both by
/// itself; this command waits for it.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    ask: Ask,

    /// Give up waiting after this long
    #[arg(long, default_value = "5m", value_parser = crate::settings::duration, value_name = "SPAN")]
    timeout: Duration,
}

/// Asks until nothing is left.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    let (first, last, waiting) = roles::block_on(async move {
        let tool = roles::tool(&found);
        let (first, waiting) = tool.collect().await?;
        let bar = print::progress("collecting", waiting, args.ask.json);
        let end = Instant::now() + args.timeout;
        let (mut last, mut waiting) = (first, waiting);
        while waiting > 0 && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(200)).await;
            (last, waiting) = tool.collect().await?;
            bar.set_length(last - first + waiting);
            bar.set_position(last - first);
        }
        bar.finish_and_clear();
        Ok((first, last, waiting))
    })?;
    if args.ask.json {
        println!("{:#}", json!({"collected": last - first, "waiting": waiting}));
    } else {
        println!("{} collected, {} left", print::count(last - first), print::count(waiting));
    }
    if waiting > 0 {
        anyhow::bail!(
            "{waiting} are left: a data server is down, or sessions still hold them; see torchfs status"
        );
    }
    Ok(ExitCode::SUCCESS)
}
