//! `torchfs rebalance`: evens out the data servers.

use std::process::ExitCode;

use clap::ValueEnum;
use torchfs_proto::msg::meta::Op;

use crate::roles;
use crate::watch::{self, Watching};

/// Even out the data servers: each gets its share by capacity
///
///   torchfs rebalance
///   torchfs rebalance --auto off        # from now on only when asked; moves nothing now
///
/// The cluster does this by itself when servers join or leave, gently; this command does it now
/// and waits. It moves no more than it must, at most at the given rate, and goes on when the
/// command ends.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// From now on also by itself whenever servers join or leave
    #[arg(long, value_name = "WHEN")]
    auto: Option<Auto>,

    #[command(flatten)]
    watching: Watching,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Auto {
    /// The default
    On,
    /// Only when asked
    Off,
}

/// Begins it and watches.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.watching.ask.find()?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        tool.ask(Op::Rebalance { auto: args.auto.map(|auto| auto == Auto::On) }).await?;
        if args.auto == Some(Auto::Off) {
            let report = watch::look(&tool, None).await?;
            let sentence = "servers are evened out only when torchfs rebalance is typed, from now on";
            args.watching.ask.print(&watch::describe(&report), sentence);
            return Ok(ExitCode::SUCCESS);
        }
        watch::watch(&tool, &args.watching, "rebalance", watch::repair_stand).await
    })
}
