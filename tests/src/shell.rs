//! Running other programs with a deadline and with everything they said in the failure.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{nursery, sys};

/// What a program did.
#[derive(Debug)]
pub struct Ran {
    /// How it was called.
    pub call: String,
    /// Its exit status; `None` when a signal or the deadline ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub out: String,
    /// What it complained about.
    pub err: String,
}

impl Ran {
    /// Panics unless the program succeeded; gives what it printed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(
            self.code,
            Some(0),
            "{} failed\n--- stdout\n{}\n--- stderr\n{}",
            self.call,
            self.out,
            self.err
        );
        self.out
    }

    /// Panics unless the program failed by itself; gives what it complained about.
    #[track_caller]
    pub fn fails(self) -> String {
        assert!(
            self.code.is_some_and(|c| c != 0),
            "{} should have failed but ended with {:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.call,
            self.code,
            self.out,
            self.err
        );
        self.err
    }
}

/// Runs a command to its end, at most five minutes.
pub fn run(command: &mut Command) -> Ran {
    run_for(Duration::from_secs(300), command)
}

/// Runs a command to its end; kills it and its children at the deadline.
pub fn run_for(deadline: Duration, command: &mut Command) -> Ran {
    let call = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ");
    let said = tempfile::tempdir().expect("there is room for what a program says");
    let (out, err) = (said.path().join("out"), said.path().join("err"));
    let child = nursery::start(command, &out, &err).unwrap_or_else(|e| panic!("cannot start {call}: {e}"));
    let text =
        |path: &PathBuf| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break status,
            None if started.elapsed() < deadline => std::thread::sleep(pause),
            None => {
                sys::kill_group(child.pid());
                let (out, err) = (text(&out), text(&err));
                panic!("{call} was still running after {deadline:?}\n--- stdout\n{out}\n--- stderr\n{err}");
            }
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    Ran { call, code: status.code(), out: text(&out), err: text(&err) }
}

/// Runs a line of shell in a folder and expects it to succeed; gives what it printed.
#[track_caller]
pub fn sh(folder: impl AsRef<std::path::Path>, line: &str) -> String {
    run(Command::new("bash").args(["-euo", "pipefail", "-c", line]).current_dir(folder)).ok()
}

/// A test program that `scripts/setup` has built (`pjdfstest`, `fsx`).
pub fn tool(name: &str) -> PathBuf {
    let folder = std::env::var_os("TORCHFS_TOOLS").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/".into())).join(".cache")
        });
        cache.join("torchfs/tools")
    });
    let path = folder.join("bin").join(name);
    assert!(path.exists(), "{} is not there; run scripts/setup", path.display());
    path
}
