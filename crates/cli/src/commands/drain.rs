//! `torchfs drain`: empties a data server, so that it can be removed.

use std::process::ExitCode;

use torchfs_proto::ServerId;
use torchfs_proto::msg::meta::{Op, RepairReport};

use crate::connect::Connect;
use crate::watch::{self, Stand, Watching};
use crate::{print, roles};

/// Move everything off a data server
///
///   torchfs drain 3                 # by its number, as `torchfs servers` shows it
///   torchfs servers remove 3        # afterwards
///
/// The cluster moves the server's groups to the others, at most at the given rate; data is as safe meanwhile as before. The
/// work goes on when this command ends, and over restarts of every process. `--stop` takes it back.
#[derive(clap::Args)]
pub struct Args {
    /// Its number or address, as `torchfs servers` shows it
    server: String,

    /// Take it back: the server keeps what it has and is used again
    #[arg(long)]
    stop: bool,

    #[command(flatten)]
    connect: Connect,

    #[command(flatten)]
    watching: Watching,
}

/// Begins it and watches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.connect.find()?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        let server = watch::find_server(&tool.status().await?.servers, &args.server)?.id;
        tool.ask(Op::Drain { server, on: !args.stop }).await?;
        if args.stop {
            println!("server {server} is not drained any more");
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
        return Stand { done: true, at: 1, total: 1, says: "nothing is left on it".to_string() };
    };
    let left = u64::from(drain.groups);
    *most = left.max(*most);
    if left == 0 {
        // A block of another group may have a piece here in place of a server that was away.
        let repair = watch::repair_stand(report);
        return Stand { at: *most, total: *most, ..repair };
    }
    let says = format!("{left} groups left on it, {} pieces", print::count(drain.pieces));
    Stand { done: false, at: *most - left, total: *most, says }
}
