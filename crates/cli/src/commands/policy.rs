//! `torchfs policy`: how data below a folder is stored, where that differs from the volume.
//!
//! Works through the mount: the agent shows policies as extended attributes, so that the usual rights of the path hold.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde_json::json;
use torchfs_proto::layout::Scheme;

use crate::{print, settings};

/// Show or set how data below a folder is stored
///
///   torchfs policy set /mnt/t/checkpoints --redundancy replicas:3
///   torchfs policy get /mnt/t/checkpoints
///   torchfs policy restripe /mnt/t/checkpoints       # moves what was written before
///
/// A policy of a folder holds for everything that is made below it from now on. It is set by the folder's owner or root.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show how new data at a path is stored
    Get {
        /// A file or folder in a mount
        path: PathBuf,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Set it, for data written from now on
    Set {
        /// A file or folder in a mount
        path: PathBuf,
        /// replicas:N or ec:K+M; `volume` for what the volume says
        #[arg(long, value_parser = scheme_or_volume, value_name = "SCHEME")]
        redundancy: Option<Choice>,
        /// Over how many placement groups the blocks of a file go in turn
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
        stripe: Option<u32>,
    },
    /// Write old data again by the present policy
    ///
    /// Files stay readable and writable meanwhile. Ctrl-C ends it between two files; what is done is done, and a second run goes
    /// over the rest.
    Restripe {
        /// A file, or a folder with everything below it
        path: PathBuf,
        /// Most bytes per second
        #[arg(long, value_parser = settings::bytes, value_name = "SIZE")]
        rate: Option<u64>,
        /// Print one JSON object at the end
        #[arg(long)]
        json: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Volume,
    Scheme(Scheme),
}

fn scheme_or_volume(text: &str) -> Result<Choice, String> {
    match text {
        "volume" => Ok(Choice::Volume),
        text => settings::redundancy(text).map(Choice::Scheme),
    }
}

const REDUNDANCY: &str = "torchfs.redundancy";
const STRIPE: &str = "torchfs.stripe";
const RESTRIPE: &str = "torchfs.restripe";

/// Asks the mount and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.action {
        Action::Get { path, json } => get(&path, json),
        Action::Set { path, redundancy, stripe } => set(&path, redundancy, stripe),
        Action::Restripe { path, rate, json } => restripe(&path, rate, json),
    }
}

fn get(path: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let (redundancy, stripe) = (read(path, REDUNDANCY)?, read(path, STRIPE)?);
    if json {
        println!(
            "{:#}",
            json!({"path": path, "redundancy": redundancy, "stripe": stripe.parse::<u32>().ok()})
        );
    } else {
        println!("{}: {redundancy}, over {stripe} groups", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn set(path: &Path, redundancy: Option<Choice>, stripe: Option<u32>) -> anyhow::Result<ExitCode> {
    if redundancy.is_none() && stripe.is_none() {
        bail!("nothing to change: give --redundancy or --stripe");
    }
    if let Some(choice) = redundancy {
        let text = match choice {
            Choice::Volume => String::new(),
            Choice::Scheme(scheme) => scheme.to_string(),
        };
        write(path, REDUNDANCY, &text)?;
    }
    if let Some(groups) = stripe {
        write(path, STRIPE, &groups.to_string())?;
    }
    println!(
        "{}: {} for data written from now on; torchfs policy restripe {} moves what is there",
        path.display(),
        read(path, REDUNDANCY)?,
        path.display()
    );
    Ok(ExitCode::SUCCESS)
}

fn restripe(path: &Path, rate: Option<u64>, json: bool) -> anyhow::Result<ExitCode> {
    read(path, REDUNDANCY)?;
    let mut files = Vec::new();
    collect(path, &mut files)?;
    let total: u64 = files.iter().map(|(_, len)| len).sum();
    let bar = print::progress_bytes("restripe", total, json);
    let (start, mut done) = (std::time::Instant::now(), 0u64);
    let mut failed = Vec::new();
    for (file, len) in &files {
        if let Err(error) = rewrite(file) {
            failed.push(format!("{error:#}"));
        }
        done += len;
        bar.set_position(done);
        if let Some(rate) = rate.filter(|rate| *rate > 0) {
            let due = std::time::Duration::from_secs_f64(done as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
        }
    }
    bar.finish_and_clear();
    if json {
        println!("{:#}", json!({"files": files.len(), "bytes": total, "failed": failed}));
    } else {
        for error in &failed {
            println!("{error}");
        }
        println!("{} files, {} written again", print::count(files.len() as u64), print::size(total));
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Has one file written again; somebody who changes it meanwhile goes first.
fn rewrite(file: &Path) -> anyhow::Result<()> {
    for _ in 0..20 {
        match rustix::fs::setxattr(file, RESTRIPE, b"1", XattrFlags::empty()) {
            Err(Errno::AGAIN | Errno::BUSY) => std::thread::sleep(std::time::Duration::from_millis(250)),
            // Removed meanwhile.
            Err(Errno::NOENT) => return Ok(()),
            done => return done.with_context(|| format!("cannot write {} again", file.display())),
        }
    }
    bail!("{} is being changed all the time; run this again later", file.display())
}

/// The regular files at or below a path, of its own file system, with their lengths.
fn collect(path: &Path, files: &mut Vec<(PathBuf, u64)>) -> anyhow::Result<()> {
    let meta = fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    let device = meta.dev();
    let mut folders = Vec::new();
    if meta.is_file() {
        files.push((path.to_path_buf(), meta.len()));
    } else if meta.is_dir() {
        folders.push(path.to_path_buf());
    }
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            // Entries that vanish meanwhile need nothing.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != device {
                continue;
            }
            if meta.is_dir() {
                folders.push(entry.path());
            } else if meta.is_file() && meta.len() > 0 {
                files.push((entry.path(), meta.len()));
            }
        }
    }
    Ok(())
}

fn read(path: &Path, name: &str) -> anyhow::Result<String> {
    let mut value = vec![0; 256];
    let len = rustix::fs::getxattr(path, name, &mut value[..]).map_err(|errno| explain(path, errno))?;
    value.truncate(len);
    Ok(String::from_utf8_lossy(&value).into_owned())
}

fn write(path: &Path, name: &str, value: &str) -> anyhow::Result<()> {
    rustix::fs::setxattr(path, name, value.as_bytes(), XattrFlags::empty())
        .map_err(|errno| explain(path, errno))
}

/// One sentence with what to do next.
fn explain(path: &Path, errno: Errno) -> anyhow::Error {
    let path = path.display();
    match errno {
        Errno::NODATA | Errno::OPNOTSUPP => {
            anyhow::anyhow!(
                "{path} is not in a TorchFS mount; give a path below one (see: mount -t fuse.torchfs)"
            )
        }
        Errno::PERM | Errno::ACCESS => {
            anyhow::anyhow!("only the owner of {path} and root may set its policy")
        }
        Errno::INVAL => {
            anyhow::anyhow!("{path} takes no such policy: too few data servers? See: torchfs servers")
        }
        errno => anyhow::anyhow!("{path}: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_or_the_volumes_own_is_taken() {
        assert_eq!(scheme_or_volume("volume"), Ok(Choice::Volume));
        assert_eq!(scheme_or_volume("ec:4+2"), Ok(Choice::Scheme(Scheme::Ec { data: 4, parity: 2 })));
        assert!(scheme_or_volume("ec:1+0").is_err());
    }

    #[test]
    fn a_folder_elsewhere_is_named_as_such() {
        let error = get(Path::new("/proc"), false).unwrap_err().to_string();
        assert!(error.contains("TorchFS mount"), "{error}");
    }
}
