//! The folder of one test, its watchdog, and the sweep of what earlier runs left.
//!
//! The idea: everything a test makes lies under `TMP/tfs-test.PID.N.NAME`. When the test hangs, the watchdog kills
//! the processes that name it in their arguments and detaches the mounts below it, which frees blocked threads. When a run is
//! killed, the next one finds the folder, sees that PID is gone, and does the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sys;

const PREFIX: &str = "tfs-test.";
/// How long a test may take before it counts as hanging; SOAK has no such bound worth naming.
const LIMIT: Duration = Duration::from_secs(420);
/// How long a test has to fall over once its processes are gone.
const GRACE: Duration = Duration::from_secs(60);

/// The folder of one test. Removed when dropped; when the test failed, the logs in it are printed first.
#[derive(Debug)]
pub struct Sandbox {
    watch: Arc<Watch>,
}

/// What the watchdog sees of a sandbox; apart from it, so that the sandbox always dies in its test's thread, where the
/// logs of a failure belong.
#[derive(Debug)]
struct Watch {
    root: PathBuf,
    deadline: Mutex<Instant>,
    expired: AtomicBool,
}

impl Sandbox {
    /// Makes the folder of the running test.
    pub fn new() -> Arc<Sandbox> {
        crate::nursery::open();
        static SWEEP: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        SWEEP.call_once(sweep);
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("main").rsplit("::").next().unwrap_or("test").to_owned();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let short: String = test.chars().take(12).collect();
        let root = home().join(format!("{PREFIX}{}.{number}.{short}", std::process::id()));
        fs::create_dir_all(&root).expect("the temporary folder takes folders");
        let limit = if crate::soak() { LIMIT * 100 } else { LIMIT };
        let deadline = Mutex::new(Instant::now() + limit);
        let watch = Arc::new(Watch { root, deadline, expired: AtomicBool::new(false) });
        register(&watch);
        Arc::new(Sandbox { watch })
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.watch.root
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A fresh folder in it.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("the sandbox takes folders");
        path
    }

    /// Gives a test that is long by nature more time.
    pub fn allow(&self, time: Duration) {
        let mut deadline = self.watch.deadline.lock();
        *deadline = (*deadline).max(Instant::now() + time);
    }
}

/// The last lines of every log in a sandbox.
fn logs(root: &Path) -> String {
    let mut out = String::new();
    let mut logs: Vec<_> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "log"))
        .collect();
    logs.sort();
    for log in logs {
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(120);
        let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
        out.push_str(&format!("---- {name} (last {} of {} lines)\n", lines.len() - from, lines.len()));
        for line in &lines[from..] {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if std::thread::panicking() || self.watch.expired.load(Ordering::Relaxed) {
            println!("{}", logs(self.root()));
        }
        clear(self.root());
        fs::remove_dir_all(self.root()).ok();
    }
}

/// Kills the processes and detaches the mounts of a sandbox.
fn clear(root: &Path) {
    // The folder's name is nobody else's, so whoever carries it in his arguments is ours, daemons included.
    sys::processes_of(root).into_iter().for_each(|pid| sys::kill(pid, libc::SIGKILL));
    // The deepest first, again and again, since one place may be mounted over more than once.
    for _ in 0..3 {
        let mut mounts = sys::mounts_below(root);
        mounts.reverse();
        mounts.iter().for_each(|m| sys::detach(m));
    }
}

/// Where sandboxes lie. The path of a unix socket has at most 107 bytes, and tests make some deep below their sandbox.
fn home() -> PathBuf {
    let given = std::env::temp_dir();
    if given.as_os_str().len() <= 24 { given } else { "/tmp".into() }
}

fn sweep() {
    crate::netns::sweep();
    let Ok(entries) = fs::read_dir(home()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix(PREFIX).and_then(|r| r.split('.').next()?.parse::<u32>().ok())
        else {
            continue;
        };
        if !Path::new(&format!("/proc/{pid}")).exists() {
            clear(&entry.path());
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

fn register(watch: &Arc<Watch>) {
    static WATCHED: OnceLock<Mutex<Vec<Weak<Watch>>>> = OnceLock::new();
    let watched = WATCHED.get_or_init(|| {
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(|| {
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                    let Some(watched) = WATCHED.get() else { continue };
                    let alive: Vec<_> = {
                        let mut list = watched.lock();
                        list.retain(|w| w.strong_count() > 0);
                        list.iter().filter_map(Weak::upgrade).collect()
                    };
                    alive.iter().for_each(|s| look(s));
                }
            })
            .expect("a thread can be started");
        Mutex::new(Vec::new())
    });
    watched.lock().push(Arc::downgrade(watch));
}

/// What the watchdog does with one sandbox. It prints straight to the process's stderr: the test's own output is held
/// back until the test ends, which is just what may not happen.
fn look(sandbox: &Watch) {
    let late = Instant::now().saturating_duration_since(*sandbox.deadline.lock());
    if late.is_zero() {
        return;
    }
    if !sandbox.expired.swap(true, Ordering::Relaxed) {
        let root = &sandbox.root;
        sys::say(&format!(
            "watchdog: {} hangs; killing its processes and detaching its mounts\n{}\n{}\n",
            root.display(),
            sys::stacks(std::process::id() as i32),
            logs(root)
        ));
        for pid in sys::processes_of(root) {
            sys::say(&format!("watchdog: stacks of {pid}\n{}\n", sys::stacks(pid)));
        }
        clear(root);
    } else if late > GRACE {
        clear(&sandbox.root);
        sys::say(&format!("watchdog: {} does not come free; ending the run\n", sandbox.root.display()));
        std::process::exit(70);
    }
}
