//! One real process of the product, with its log kept in a file.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use crate::netns;
use crate::nursery::{self, Nursling};
use crate::sys;
use crate::wait::within;

/// A process that can be killed, stopped, continued and started again with the same arguments.
#[derive(Debug)]
pub struct Proc {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(String, OsString)>,
    log: PathBuf,
    namespace: Option<String>,
    child: Option<Nursling>,
}

impl Proc {
    /// Describes a process; `log` gets its stdout and stderr, over all its starts.
    pub fn new(name: &str, program: &Path, log: PathBuf) -> Proc {
        let program = program.to_owned();
        Proc { name: name.to_owned(), program, args: vec![], env: vec![], log, namespace: None, child: None }
    }

    /// Adds arguments for the next start.
    pub fn args<I: IntoIterator<Item = A>, A: Into<OsString>>(&mut self, args: I) -> &mut Proc {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable for the next start.
    pub fn env(&mut self, key: &str, value: impl Into<OsString>) -> &mut Proc {
        self.env.push((key.to_owned(), value.into()));
        self
    }

    /// Puts it on a machine of a network of its own.
    pub fn on(&mut self, host: &netns::Host) -> &mut Proc {
        self.namespace = Some(host.namespace().to_owned());
        self
    }

    /// Starts it.
    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} runs already", self.name);
        let mut command = match &self.namespace {
            Some(namespace) => netns::enter(namespace, &self.program),
            None => Command::new(&self.program),
        };
        command.args(&self.args).envs(self.env.iter().map(|(k, v)| (k, v)));
        let child = nursery::start(&command, &self.log, &self.log)
            .unwrap_or_else(|e| panic!("cannot start {} ({}): {e}", self.name, self.program.display()));
        self.child = Some(child);
    }

    /// What it is called in the logs.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().map_or_else(|| panic!("{} does not run", self.name), Nursling::pid)
    }

    /// Everything it has said so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Where its log is.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Whether it runs.
    pub fn running(&mut self) -> bool {
        self.child.as_ref().is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// Sends a signal. After SIGSTOP it waits until the threads stand still, but not for those that the kernel holds up.
    pub fn signal(&self, signal: i32) {
        let pid = self.pid();
        sys::kill(pid, signal);
        if signal == libc::SIGSTOP {
            let still = || sys::stands_still(pid).then_some(()).ok_or_else(|| sys::stacks(pid));
            let _ = within(Duration::from_secs(2), still);
        }
    }

    /// Ends it as a crash would, and waits until it is gone.
    pub fn kill(&mut self) {
        self.kill_soon();
        self.reap();
    }

    /// Sends the deadly signal and does not wait.
    pub fn kill_soon(&self) {
        if let Some(child) = &self.child {
            sys::kill(child.pid(), libc::SIGKILL);
        }
    }

    /// Waits for a process that has been told to end; `None` if none was started.
    pub fn reap(&mut self) -> Option<ExitStatus> {
        let child = self.child.take()?;
        loop {
            match child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }

    /// Asks it to end and expects that it does so, with status 0, in good time.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(libc::SIGTERM);
        let status = self.wait_end();
        assert!(
            status.success(),
            "{} ended with {status} (signal {:?}) after SIGTERM\n{}",
            self.name,
            status.signal(),
            self.log()
        );
    }

    /// Waits for its end, at most a minute and a half.
    #[track_caller]
    pub fn wait_end(&mut self) -> ExitStatus {
        let child = self.child.take().unwrap_or_else(|| panic!("{} does not run", self.name));
        let ended = within(Duration::from_secs(90), || match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            other => Err(format!("{other:?}")),
        });
        ended.unwrap_or_else(|_| {
            let stacks = sys::stacks(child.pid());
            sys::kill(child.pid(), libc::SIGKILL);
            panic!("{} did not end by itself\n{stacks}\n{}", self.name, self.log())
        })
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.kill();
    }
}
