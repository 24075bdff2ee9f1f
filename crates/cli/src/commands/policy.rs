//! `torchfs policy`: how data below a folder is stored, where that differs from the volume.
//!
//! Works through the mount: the agent shows policies as extended attributes, so that the usual rights of the path hold.

mod restripe;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
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
/// A policy of a folder holds for everything that is made below it from now on; folders below
/// that have a policy of their own keep it. It is set by the folder's owner or root.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(subcommand)]
    action: Action,

    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show how new data at a path is stored
    Get {
        /// A file or folder in a mount
        path: PathBuf,
    },
    /// Set it, for data written from now on
    ///
    ///   torchfs policy set /mnt/t/checkpoints --redundancy replicas:3
    ///   torchfs policy set /mnt/t/checkpoints --redundancy volume     # as the volume says
    ///
    /// A policy that a file was given by its name stays its own when its folder is restriped.
    #[command(verbatim_doc_comment)]
    Set {
        /// A file or folder in a mount
        path: PathBuf,
        /// replicas:N or ec:K+M; `volume` for what the volume says
        #[arg(long, value_parser = scheme_or_volume, value_name = "SCHEME")]
        redundancy: Option<Choice>,
        /// Over how many placement groups the blocks of a file go in turn [default: as the volume says]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
        stripe: Option<u32>,
    },
    /// Write old data again by the present policy
    ///
    /// Each file gets the policy of the folder it is in, unless it was given one by its own name. Files stay readable and writable meanwhile, and those that share blocks go
    /// on sharing them. Ctrl-C ends it at any time; what is done is done, and a second run goes over the rest.
    Restripe {
        /// A file, or a folder with everything below it
        path: PathBuf,
        /// Most bytes per second [default: no bound]
        #[arg(long, value_parser = settings::bytes, value_name = "SIZE")]
        rate: Option<u64>,
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
const ASKED: &str = "torchfs.asked";
const POLICY: &str = "torchfs.policy";
const RESTRIPE: &str = "torchfs.restripe";
/// An extended attribute like any other, on files that were given a policy by their own name.
const OWN: &str = "user.torchfs.policy";

/// Asks the mount and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.action {
        Action::Get { path } => get(&path, args.json),
        Action::Set { path, redundancy, stripe } => set(&path, redundancy, stripe, args.json),
        Action::Restripe { path, rate } => restripe::run(&path, rate, args.json),
    }
}

/// How new data at a path is stored.
struct Shown {
    redundancy: String,
    asked: String,
    stripe: String,
    /// It differs from the volume.
    own: bool,
    /// Bytes of a file that are stored otherwise.
    otherwise: u64,
}

impl Shown {
    fn of(path: &Path) -> anyhow::Result<Shown> {
        Ok(Shown {
            redundancy: read(path, REDUNDANCY)?,
            asked: read(path, ASKED)?,
            stripe: read(path, STRIPE)?,
            own: !read(path, POLICY)?.is_empty(),
            otherwise: read(path, RESTRIPE)?.parse().unwrap_or(0),
        })
    }

    /// What there are too few servers for.
    fn warning(&self) -> Option<String> {
        let asked = self.asked.parse::<Scheme>().ok().filter(|_| self.asked != self.redundancy)?;
        Some(format!(
            "  ! {asked} was asked for and needs {} data servers; until they have joined new data gets {}",
            asked.width(),
            self.redundancy
        ))
    }

    fn describe(&self, path: &Path) -> serde_json::Value {
        json!({"path": path, "redundancy": self.redundancy, "asked": self.asked, "own": self.own,
               "stripe": self.stripe.parse::<u32>().ok(), "stored_otherwise": self.otherwise})
    }
}

fn get(path: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let shown = Shown::of(path)?;
    if json {
        println!("{:#}", shown.describe(path));
        return Ok(ExitCode::SUCCESS);
    }
    let whose = if shown.own { "" } else { ", as the volume says" };
    println!("{}: {}, over {} groups{whose}", path.display(), shown.redundancy, shown.stripe);
    if let Some(warning) = shown.warning() {
        println!("{warning}");
    }
    if shown.otherwise > 0 {
        println!(
            "  {} of it are stored otherwise; torchfs policy restripe {} moves them",
            print::size(shown.otherwise),
            path.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn set(path: &Path, redundancy: Option<Choice>, stripe: Option<u32>, json: bool) -> anyhow::Result<ExitCode> {
    if redundancy.is_none() && stripe.is_none() {
        bail!("nothing to change: give --redundancy or --stripe");
    }
    let before = read(path, POLICY)?;
    if let Some(choice) = redundancy {
        let text = match choice {
            Choice::Volume => String::new(),
            Choice::Scheme(scheme) => scheme.to_string(),
        };
        set_redundancy(path, choice, &text)?;
    }
    if let Some(groups) = stripe {
        write(path, STRIPE, &groups.to_string())?;
    }
    if !path.is_dir() {
        note_own(path, redundancy != Some(Choice::Volume))?;
    }
    let shown = Shown::of(path)?;
    let (follow, keep) = hand_down(path, &before, &read(path, POLICY)?)?;
    if json {
        let mut out = shown.describe(path);
        out["folders_that_follow"] = follow.into();
        out["folders_with_their_own"] = keep.into();
        println!("{out:#}");
        return Ok(ExitCode::SUCCESS);
    }
    let path = path.display();
    let redundancy = &shown.redundancy;
    println!(
        "{path}: {redundancy} for data written from now on; torchfs policy restripe {path} moves what is there"
    );
    if let Some(warning) = shown.warning() {
        println!("{warning}");
    }
    if follow + keep > 0 {
        println!("  {follow} folders below follow, {keep} keep a policy of their own");
    }
    Ok(ExitCode::SUCCESS)
}

fn set_redundancy(path: &Path, choice: Choice, text: &str) -> anyhow::Result<()> {
    match (rustix::fs::setxattr(path, REDUNDANCY, text.as_bytes(), XattrFlags::empty()), choice) {
        (Ok(()), _) => Ok(()),
        (Err(Errno::INVAL), Choice::Scheme(scheme)) => {
            let (least, path) = (least_servers(scheme), path.display());
            bail!(
                "{path} cannot have {scheme} yet: that needs {least} data servers that are up, and a file or folder gets \
                 only what there are servers for; start more with `torchfs data` (`torchfs servers` lists them), then \
                 set it again"
            )
        }
        (Err(errno), _) => Err(explain(path, errno)),
    }
}

/// How many servers there must be for data with at least this redundancy.
fn least_servers(scheme: Scheme) -> usize {
    match scheme {
        Scheme::Replicas(copies) => usize::from(copies),
        Scheme::Ec { .. } => scheme.tolerates() + 1,
    }
}

/// Folders below get the policy too, unless they had another one than this folder. Answers how many did, and how many had.
fn hand_down(path: &Path, before: &str, now: &str) -> anyhow::Result<(u64, u64)> {
    let (mut follow, mut keep) = (0, 0);
    if before == now || !path.is_dir() {
        return Ok((0, 0));
    }
    restripe::walk(path, &mut |folder, _| {
        if folder == path {
            return Ok(true);
        }
        let own = read(folder, POLICY)?;
        if own != before {
            keep += u64::from(own != now);
            return Ok(own == now); // what is below it is its own affair
        }
        write(folder, POLICY, now)?;
        follow += 1;
        Ok(true)
    })?;
    Ok((follow, keep))
}

/// Notes that a file has a policy of its own, or that it has not any more.
fn note_own(path: &Path, own: bool) -> anyhow::Result<()> {
    let noted = match own {
        true => rustix::fs::setxattr(path, OWN, b"own", XattrFlags::empty()),
        false => match rustix::fs::removexattr(path, OWN) {
            Err(Errno::NODATA) => Ok(()),
            removed => removed,
        },
    };
    noted.map_err(|errno| explain(path, errno))
}

/// Whether a file was given a policy by its own name.
fn has_own(path: &Path) -> bool {
    rustix::fs::getxattr(path, OWN, &mut [0; 16][..]).is_ok()
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
        Errno::NOENT => anyhow::anyhow!("there is no {path}; give a path below a TorchFS mount"),
        Errno::PERM | Errno::ACCESS => {
            anyhow::anyhow!("only the owner of {path} and root may set its policy")
        }
        Errno::INVAL => {
            anyhow::anyhow!("{path} takes no such policy: too few data servers? See: torchfs servers")
        }
        errno => anyhow::anyhow!("cannot ask for the policy of {path}: {errno}"),
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
        let error = get(Path::new("/no such thing"), false).unwrap_err().to_string();
        assert!(error.contains("there is no"), "{error}");
    }
}
