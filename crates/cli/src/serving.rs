//! Which process serves a mount of this machine, and how it ended: what `umount` waits for.
//!
//! The kernel takes a mount away at once; what was written may still be on its way to the servers then. So an agent keeps a
//! file in the runtime folder, named after the device number of its mount and its own, and holds a lock on it. When it has ended it
//! writes down how, and lets go. Who unmounts opens the file before, and waits for the lock after.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::connect;

/// Whoever waits longer than this is told for what.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// What stands in the file when everything is on its servers.
const WELL: &str = "well\n";

/// This process serves a mount; the file is gone when this is dropped.
pub struct Serving {
    file: File,
    path: PathBuf,
}

impl Serving {
    /// Says that this process serves the mount with this device number. Without rights to do so nobody waits for it.
    pub fn say(device: &str) -> Option<Serving> {
        let path = connect::runtime_file(&format!("{}{}", prefix(device), std::process::id())).ok()?;
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).ok()?;
        file.try_lock().ok()?;
        file.set_len(0).ok()?;
        Some(Serving { file, path })
    }

    /// Writes down how it ended: well, or why not.
    pub fn ended(&self, how: Result<(), String>) {
        let text = how.map_or_else(|why| why, |()| WELL.to_string());
        // Who waits and finds nothing is told that it is not known.
        let _ = (&self.file).write_all(text.as_bytes());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The processes that serve a mount, as another one sees them: one, or several when the kernel gave the number of an earlier
/// mount again whose agent still writes back.
pub struct Servers {
    files: Vec<(u32, File)>,
}

/// Looks for whoever serves the mount with this device number.
pub fn find(device: &str) -> Servers {
    let begins = prefix(device);
    let of_it = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&begins);
    let entries = connect::runtime_dirs().into_iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten();
    let mut files = Vec::new();
    for entry in entries.filter_map(Result::ok).filter(of_it) {
        let Ok(file) = File::open(entry.path()) else { continue };
        let process = entry.file_name().to_string_lossy()[begins.len()..].parse().unwrap_or_default();
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => files.push((process, file)),
            // Its process died; without the right to remove it, it stays and means nothing.
            _ => drop(fs::remove_file(entry.path())),
        }
    }
    Servers { files }
}

impl Servers {
    /// Whether one was killed and cannot end: a thread of it waits in the kernel for pages whose readers wait for its answers. Only
    /// the end of the connection frees them all.
    pub fn are_stuck(&self) -> bool {
        self.files.iter().any(|(process, _)| is_dead(*process))
    }

    /// Waits until they have ended, and says if one did not end well.
    pub fn wait(self, mount: &Path) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut told = false;
        let locked = |file: &File| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
        while self.files.iter().any(|(_, file)| locked(file)) {
            if !told && began.elapsed() >= PATIENCE {
                told = true;
                eprintln!(
                    "torchfs: {} is unmounted; waiting until what was written to it is on its servers. Ctrl-C ends \
                     the waiting, not the writing",
                    mount.display()
                );
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.files.into_iter().try_for_each(|(_, file)| check(file, mount))
    }
}

/// Whether its first thread has ended, though others may be left.
fn is_dead(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}

/// How it ended.
fn check(mut file: File, mount: &Path) -> anyhow::Result<()> {
    let mut how = String::new();
    file.rewind()?;
    file.read_to_string(&mut how)?;
    match how.as_str() {
        WELL => Ok(()),
        "" => bail!(
            "{} is unmounted, but its agent ended before it said that everything is written back; look into its log",
            mount.display()
        ),
        why => bail!("{} is unmounted, but {why}", mount.display()),
    }
}

fn prefix(device: &str) -> String {
    format!("serving-{device}-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(how: Option<&str>) -> anyhow::Result<()> {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(how.unwrap_or_default().as_bytes()).expect("written");
        check(file, Path::new("/mnt/t"))
    }

    #[test]
    fn who_waits_hears_how_it_ended() {
        assert!(ended(Some(WELL)).is_ok());
        let words = ended(Some("what was written is lost")).expect_err("lost").to_string();
        assert!(words.contains("/mnt/t is unmounted, but what was written is lost"), "{words}");
        let words = ended(None).expect_err("unknown").to_string();
        assert!(words.contains("look into its log"), "{words}");
    }
}
