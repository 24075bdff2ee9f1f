//! `torchfs policy restripe`: has old data written again by the present policy.
//!
//! How far it is stands in the files themselves: the mount tells how many bytes of each are stored otherwise. So it can be ended
//! at any moment, and the next run does what is left.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use serde_json::json;

use super::{POLICY, REDUNDANCY, RESTRIPE, has_own, read, write};
use crate::print;

/// Bytes that are written again with one request, so that the bar moves and the rate holds.
const STEP: u64 = 32 << 20;
/// How often somebody else may come first.
const TRIES: u32 = 40;

/// Moves everything at or below a path.
pub fn run(path: &Path, rate: Option<u64>, json: bool) -> anyhow::Result<ExitCode> {
    read(path, REDUNDANCY)?;
    let mut failed = Vec::new();
    let looking = print::progress("looking at files", 0, json);
    let Seen { files, seen, own } = collect(path, &looking, &mut failed)?;
    looking.finish_and_clear();
    let total: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let bar = print::progress_bytes("restripe", total, json);
    let mut pace = Pace { rate: rate.filter(|rate| *rate > 0), begun: Instant::now(), bytes: 0 };
    let mut moved = 0;
    for (file, bytes) in &files {
        match rewrite(file, *bytes, &mut pace, &bar) {
            Ok(()) => moved += 1,
            Err(error) => failed.push(format!("{error:#}")),
        }
    }
    bar.finish_and_clear();
    if json {
        let out = json!({"files": seen, "files_moved": moved, "bytes_moved": pace.bytes,
                         "files_with_their_own": own, "failed": failed});
        println!("{out:#}");
    } else {
        for error in &failed {
            println!("{error}");
        }
        println!(
            "{} of {} files had data to move: {} written again",
            print::count(files.len() as u64),
            print::count(seen),
            print::size(pace.bytes)
        );
        if own > 0 {
            let own = print::count(own);
            println!(
                "{own} of them keep a policy of their own; torchfs policy set FILE --redundancy volume takes it back"
            );
        }
    }
    if !failed.is_empty() {
        bail!("{} files are not done; run the same command again, it goes over the rest", failed.len());
    }
    Ok(ExitCode::SUCCESS)
}

/// How fast it goes.
struct Pace {
    rate: Option<u64>,
    begun: Instant,
    bytes: u64,
}

impl Pace {
    /// So many bytes were written: waits as the rate asks for.
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(self.begun.elapsed()));
        }
    }

    /// Bytes of one request: about a second's worth.
    fn step(&self) -> u64 {
        self.rate.map_or(STEP, |rate| rate.clamp(1, STEP))
    }
}

/// Has one file written again; somebody who changes it meanwhile goes first.
fn rewrite(file: &Path, bytes: u64, pace: &mut Pace, bar: &ProgressBar) -> anyhow::Result<()> {
    let what = || format!("cannot write {} again", file.display());
    let (mut left, mut tries) = (bytes, 0);
    while left > 0 {
        match rustix::fs::setxattr(file, RESTRIPE, pace.step().to_string().as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::BUSY) => std::thread::sleep(Duration::from_millis(250)),
            // Removed meanwhile.
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(errno).with_context(what),
        }
        let Ok(now) = read(file, RESTRIPE) else { return Ok(()) };
        let now: u64 = now.parse().with_context(what)?;
        let done = left.saturating_sub(now);
        bar.inc(done);
        pace.add(done);
        tries = if done > 0 { 0 } else { tries + 1 };
        if tries > TRIES {
            bail!("{} is being changed all the time; run this again later", file.display());
        }
        left = now;
    }
    Ok(())
}

/// What was found at or below a path.
#[derive(Default)]
struct Seen {
    /// Files with bytes that are stored otherwise, and how many.
    files: Vec<(PathBuf, u64)>,
    /// Files looked at.
    seen: u64,
    /// Those with another policy than their folder, which they were given by their own name.
    own: u64,
}

/// Looks at everything at or below a path. Each file gets the policy of its folder first; one that was given a policy by its own
/// name, or that is named alone, keeps its own.
fn collect(path: &Path, bar: &ProgressBar, failed: &mut Vec<String>) -> anyhow::Result<Seen> {
    let meta = fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    let mut all = Seen::default();
    if !meta.is_dir() {
        all.seen = 1;
        let bytes = read(path, RESTRIPE)?.parse().unwrap_or(0);
        all.files.extend((bytes > 0).then(|| (path.to_path_buf(), bytes)));
        return Ok(all);
    }
    walk(path, &mut |folder, names| {
        let policy = read(folder, POLICY)?;
        for file in names {
            all.seen += 1;
            bar.inc(1);
            match adopt(file, &policy, &mut all.own) {
                Ok(0) => {}
                Ok(bytes) => all.files.push((file.clone(), bytes)),
                // Removed meanwhile.
                Err(_) if fs::symlink_metadata(file).is_err() => {}
                Err(error) => failed.push(format!("{error:#}")),
            }
        }
        Ok(true)
    })?;
    Ok(all)
}

/// Gives a file this policy, unless it has one of its own; answers how many of its bytes are stored otherwise.
fn adopt(file: &Path, policy: &str, own: &mut u64) -> anyhow::Result<u64> {
    if read(file, POLICY)? != policy {
        match has_own(file) {
            true => *own += 1,
            false => write(file, POLICY, policy)?,
        }
    }
    Ok(read(file, RESTRIPE)?.parse().unwrap_or(0))
}

/// Calls `each` for a folder and every folder below it on the same file system, with its regular files; it says whether to go
/// down from there. What vanishes meanwhile is passed over.
pub(super) fn walk(
    path: &Path,
    each: &mut dyn FnMut(&Path, &[PathBuf]) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let look = || format!("cannot look at {}", path.display());
    let device = fs::symlink_metadata(path).with_context(look)?.dev();
    let mut folders = vec![path.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries.with_context(|| format!("cannot list {}", folder.display()))?,
        };
        let (mut files, mut below) = (Vec::new(), Vec::new());
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != device {
                continue;
            }
            if meta.is_dir() {
                below.push(entry.path());
            } else if meta.is_file() {
                files.push(entry.path());
            }
        }
        match each(&folder, &files) {
            Ok(true) => folders.extend(below),
            Ok(false) => {}
            Err(_) if fs::symlink_metadata(&folder).is_err() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_goes_down_only_where_it_is_told_to() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["a/b", "c/d"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
            fs::write(dir.path().join(folder).join("f"), "").unwrap();
        }
        let mut seen = Vec::new();
        walk(dir.path(), &mut |folder, files| {
            seen.push((folder.strip_prefix(dir.path()).unwrap().to_path_buf(), files.len()));
            Ok(!folder.ends_with("c"))
        })
        .unwrap();
        seen.sort();
        let expected: Vec<(PathBuf, usize)> =
            [("", 0), ("a", 0), ("a/b", 1), ("c", 0)].map(|(path, n)| (path.into(), n)).to_vec();
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_rate_bounds_each_request() {
        let pace = |rate| Pace { rate, begun: Instant::now(), bytes: 0 }.step();
        assert_eq!(pace(None), STEP);
        assert_eq!(pace(Some(1 << 20)), 1 << 20);
        assert_eq!(pace(Some(1 << 30)), STEP);
    }
}
