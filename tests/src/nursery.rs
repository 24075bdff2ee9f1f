//! Processes are started by a process of their own, the nursery, which never opens anything on a mount under test.
//!
//! A child inherits copies of its parent's open files and closes them when it executes its program. Closing a file on
//! FUSE is a request to its agent. So a test that has files open on a mount whose metadata service is down, and starts
//! that service, would have the new service wait for the agent, and the agent for the service.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::LazyLock;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// A process that the nursery started.
#[derive(Debug)]
pub struct Nursling(u64);

struct Nursery {
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

// It ends with its input, and then this process is gone too: nobody is left to wait for it.
#[allow(clippy::zombie_processes)]
static NURSERY: LazyLock<Mutex<Nursery>> = LazyLock::new(|| {
    let program = program();
    let mut child = Command::new(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("cannot start {}: {e}", program.display()));
    let (ask, answers) = (child.stdin.take(), child.stdout.take());
    let answers = BufReader::new(answers.expect("it is piped"));
    Mutex::new(Nursery { ask: ask.expect("it is piped"), answers })
});

/// Starts the nursery if it does not run yet. To be called before the first mount.
pub fn open() {
    LazyLock::force(&NURSERY);
}

/// Starts a process with these files as stdout and stderr; both are appended to.
pub fn start(command: &Command, out: &Path, err: &Path) -> Result<Nursling, String> {
    let text = |s: &std::ffi::OsStr| s.to_str().expect("the tests' arguments are text").to_owned();
    let args: Vec<String> = command.get_args().map(text).collect();
    let env: Vec<(String, Option<String>)> =
        command.get_envs().map(|(k, v)| (text(k), v.map(text))).collect();
    let answer = ask(&json!({
        "program": text(command.get_program()), "args": args, "env": env,
        "folder": command.get_current_dir(), "out": out, "err": err,
    }))?;
    Ok(Nursling(answer["pid"].as_u64().ok_or("the nursery names no process")?))
}

impl Nursling {
    /// Its process id, which is its group too.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.0).expect("process ids are small")
    }

    /// How it ended, if it has.
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, String> {
        let answer = ask(&json!({"pid": self.0}))?;
        Ok(answer["status"].as_i64().map(|raw| ExitStatus::from_raw(raw as i32)))
    }
}

fn ask(request: &Value) -> Result<Value, String> {
    let mut nursery = NURSERY.lock();
    let mut line = String::new();
    writeln!(nursery.ask, "{request}").and_then(|()| nursery.ask.flush()).expect("the nursery listens");
    nursery.answers.read_line(&mut line).expect("the nursery answers");
    let answer: Value = serde_json::from_str(&line).map_err(|e| format!("the nursery said `{line}`: {e}"))?;
    match answer["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(answer),
    }
}

/// Built beside the tests: `target/release/nursery` for `target/release/deps/real-…`.
fn program() -> PathBuf {
    let own = std::env::current_exe().expect("this program has a path");
    let folders = own.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("nursery")).find(|path| path.exists()).expect("cargo built the nursery")
}
