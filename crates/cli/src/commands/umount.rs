//! `torchfs umount`: ends a mount, also one whose agent is gone.

use std::path::PathBuf;
use std::process::ExitCode;

/// Unmount, after everything written is on its servers
///
/// Also clears a stale mount point whose agent died.
#[derive(clap::Args)]
pub struct Args {
    /// The mount point
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// Detach now, even if files are open
    #[arg(long, short)]
    lazy: bool,

    /// Detach now and fail every call that waits; what was written and not synced is lost
    #[arg(long, short, conflicts_with = "lazy")]
    force: bool,
}

/// Unmounts.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    crate::roles::unmount(&args.path, args.lazy, args.force)?;
    Ok(ExitCode::SUCCESS)
}
