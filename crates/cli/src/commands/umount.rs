//! `torchfs umount`: ends a mount, also one whose agent is gone.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::serving;

/// Unmount, and wait until everything written is on its servers
///
/// Also clears a stale mount point whose agent died, and frees one that was killed and cannot end.
#[derive(clap::Args)]
pub struct Args {
    /// The mount point
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// Detach now, even if files are open; does not wait for what is written back
    #[arg(long, short)]
    lazy: bool,

    /// Only if its agent is gone; otherwise do nothing
    #[arg(long)]
    stale: bool,

    /// Detach now and fail every call that waits; what was written and not synced is lost
    #[arg(long, short, conflicts_with = "lazy")]
    force: bool,
}

/// Unmounts.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    // The device number goes with the mount, so its agent is looked for before.
    let servers = torchfs_agent::mount::device(&args.path)?.map(|device| serving::find(&device));
    // Not by looking at the mount, which would have us wait, too.
    let stuck = servers.as_ref().is_some_and(serving::Servers::are_stuck);
    if args.stale && !stuck && !torchfs_agent::mount::is_stale(&args.path) {
        return Ok(ExitCode::SUCCESS);
    }
    crate::roles::unmount(&args.path, args.lazy, args.force || stuck)?;
    if let Some(servers) = servers.filter(|_| !args.lazy && !args.force) {
        let ended = servers.wait(&args.path);
        if !args.stale {
            ended?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
