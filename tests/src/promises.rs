//! Writers that record what they were told, and the check that it was true.
//!
//! The idea: each writer owns a folder and knows for each of its files every content it may have after a crash: from the
//! last one that was acknowledged as durable to the last one attempted. Contents follow from (writer, file, version), so a
//! wrong byte is seen wherever it comes from.
//!
//! # Invariants
//! - A promise counts only if its fsync or close returned before the cut was announced; see [`Writers::announce`].
//! - `told` is what a living client knows; killing servers alone must lose none of it. `durable` is what survives everything.
//! - One ordered log: what is durable makes every earlier change of names by the same writer durable too.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::rng::Rng;
use crate::sys;

const FILES: u64 = 12;

/// Which promise a check holds the file system to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// Everything a call returned for, synced or not: the client lived on.
    Told,
    /// Everything fsynced or closed; of the rest, some state between then and the end.
    Durable,
}

/// A content that a file may have.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Content {
    Absent,
    /// Exactly this version.
    Whole {
        version: u64,
        len: usize,
    },
    /// Any leading part of this version: it was being written in place.
    Part {
        version: u64,
        len: usize,
    },
}

/// What one file may be, oldest first.
#[derive(Clone, Debug)]
struct History {
    states: Vec<Content>,
    durable: usize,
    told: usize,
}

/// The record of one writer. Lives on over crashes.
#[derive(Debug)]
pub struct Ledger {
    writer: u64,
    rng: Rng,
    version: u64,
    files: BTreeMap<String, History>,
    log_durable: u64,
    log_told: u64,
    log_tried: u64,
    /// Bytes of the log that any later open must show, anywhere.
    closed: Arc<AtomicU64>,
    /// What went wrong although nobody had announced a cut.
    pub surprise: Option<String>,
}

impl Ledger {
    /// An empty record; `writer` names the folder.
    pub fn new(writer: u64, seed: u64) -> Ledger {
        Ledger {
            writer,
            rng: Rng::new(seed ^ writer.rotate_left(40)),
            version: 0,
            files: BTreeMap::new(),
            log_durable: 0,
            log_told: 0,
            log_tried: 0,
            closed: Arc::default(),
            surprise: None,
        }
    }

    /// What readers elsewhere are told about it.
    pub fn stream(&self) -> Stream {
        Stream { writer: self.writer, closed: self.closed.clone() }
    }

    fn folder(&self, mount: &Path) -> PathBuf {
        mount.join(format!("writer-{}", self.writer))
    }

    /// One random step; an error means that its outcome is not known.
    fn step(&mut self, mount: &Path, cut: &AtomicBool) -> io::Result<()> {
        let folder = self.folder(mount);
        let name = format!("f{}", self.rng.below(FILES));
        match self.rng.below(10) {
            0..=3 => self.store(&folder, &name, cut),
            4..=5 => self.replace(&folder, &name, cut),
            6..=8 => self.append(&folder, cut),
            _ => self.remove(&folder, &name, cut),
        }
    }

    /// Writes a new version in place, in pieces, then fsync or close.
    fn store(&mut self, folder: &Path, name: &str, cut: &AtomicBool) -> io::Result<()> {
        let (version, len) = self.next_version();
        let bytes = content(self.writer, name, version, len);
        self.attempt(name, Content::Part { version, len });
        let mut file = at(
            "open",
            name,
            OpenOptions::new().create(true).truncate(true).write(true).open(folder.join(name)),
        )?;
        let pieces = self.rng.range(1, 5) as usize;
        for piece in bytes.chunks(bytes.len().div_ceil(pieces).max(1)) {
            at("write", name, file.write_all(piece))?;
        }
        self.attempt(name, Content::Whole { version, len });
        if self.rng.chance(1, 2) {
            at("fsync", name, file.sync_all())?;
        }
        at("close", name, sys::close(file))?;
        self.told(name);
        self.durable(name, cut);
        Ok(())
    }

    /// Writes a new version beside and renames it over; sometimes with fsync of the folder.
    fn replace(&mut self, folder: &Path, name: &str, cut: &AtomicBool) -> io::Result<()> {
        let (version, len) = self.next_version();
        let temporary = folder.join(format!("{name}.tmp"));
        let file = at("create beside", name, File::create(&temporary))?;
        at("write beside", name, file.write_all_at(&content(self.writer, name, version, len), 0))?;
        at("fsync beside", name, file.sync_all())?;
        at("close beside", name, sys::close(file))?;
        self.attempt(name, Content::Whole { version, len });
        at("rename", name, fs::rename(&temporary, folder.join(name)))?;
        self.told(name);
        if self.rng.chance(1, 2) {
            sys::sync_folder(folder)?;
            self.durable(name, cut);
        }
        Ok(())
    }

    fn remove(&mut self, folder: &Path, name: &str, cut: &AtomicBool) -> io::Result<()> {
        if matches!(self.files.get(name).and_then(|h| h.states.last()), None | Some(Content::Absent)) {
            return Ok(());
        }
        self.attempt(name, Content::Absent);
        at("remove", name, fs::remove_file(folder.join(name)))?;
        self.told(name);
        if self.rng.chance(1, 2) {
            sys::sync_folder(folder)?;
            self.durable(name, cut);
        }
        Ok(())
    }

    /// Adds to one long stream of known bytes.
    fn append(&mut self, folder: &Path, cut: &AtomicBool) -> io::Result<()> {
        let len = self.rng.range(1, 3000);
        let bytes = stream(self.writer, self.log_told, len);
        let mut file =
            at("open", "log", OpenOptions::new().create(true).append(true).open(folder.join("log")))?;
        self.log_tried = self.log_told + len;
        at("append", "log", file.write_all(&bytes))?;
        self.log_told = self.log_tried;
        if self.rng.chance(1, 3) {
            at("fsync", "log", file.sync_all())?;
        }
        at("close", "log", sys::close(file))?;
        if !cut.load(Ordering::SeqCst) {
            self.log_durable = self.log_told;
            self.closed.store(self.log_told, Ordering::SeqCst);
            self.names_durable();
        }
        Ok(())
    }

    fn next_version(&mut self) -> (u64, usize) {
        self.version += 1;
        let len = match self.rng.below(20) {
            0 => self.rng.range(1 << 20, 6 << 20),
            1..=4 => self.rng.range(0, 300_000),
            _ => self.rng.range(0, 20_000),
        };
        (self.version, len as usize)
    }

    fn attempt(&mut self, name: &str, state: Content) {
        let history = self.files.entry(name.to_owned()).or_insert_with(History::absent);
        history.states.push(state);
    }

    fn told(&mut self, name: &str) {
        let history = self.files.get_mut(name).expect("attempted before");
        history.told = history.states.len() - 1;
    }

    fn durable(&mut self, name: &str, cut: &AtomicBool) {
        // Read after the call returned: if no cut was announced by now, the call returned before it.
        if cut.load(Ordering::SeqCst) {
            return;
        }
        let history = self.files.get_mut(name).expect("attempted before");
        history.durable = history.told;
        self.names_durable();
    }

    fn names_durable(&mut self) {
        for history in self.files.values_mut() {
            history.durable = history.told;
        }
    }

    /// Panics unless every file is what it may be; then takes what it found as the new beginning.
    fn check(&mut self, mount: &Path, level: Level) {
        let folder = self.folder(mount);
        let mut found: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for entry in fs::read_dir(&folder).expect("the writer's folder was synced") {
            let entry = entry.expect("a folder can be read");
            let name = entry.file_name().to_string_lossy().into_owned();
            let bytes = fs::read(entry.path())
                .unwrap_or_else(|e| panic!("cannot read {}: {e}", entry.path().display()));
            found.insert(name, bytes);
        }
        let log = found.remove("log").unwrap_or_default();
        self.check_log(&log, level);
        for (name, history) in &mut self.files {
            let bytes = found.remove(name);
            let from = if level == Level::Told { history.told } else { history.durable };
            let allowed = &history.states[from..];
            let Some(is) = allowed.iter().rev().find_map(|s| matches(self.writer, name, s, bytes.as_deref()))
            else {
                panic!(
                    "writer {} {name}: found {}, which is none of {allowed:?} ({level:?}; all: {history:?})",
                    self.writer,
                    describe(self.writer, name, bytes.as_deref(), &history.states),
                );
            };
            *history = History { states: vec![is], durable: 0, told: 0 };
        }
        for name in found.keys() {
            assert!(name.ends_with(".tmp"), "writer {}: {name} was never written", self.writer);
            fs::remove_file(folder.join(name)).expect("a leftover can be removed");
        }
    }

    fn check_log(&mut self, log: &[u8], level: Level) {
        let len = log.len() as u64;
        let least = if level == Level::Told { self.log_told } else { self.log_durable };
        assert!(
            len >= least && len <= self.log_tried,
            "writer {}: the log has {len} bytes, {least} were promised and {} written",
            self.writer,
            self.log_tried
        );
        let want = stream(self.writer, 0, len);
        if let Some(at) = log.iter().zip(&want).position(|(a, b)| a != b) {
            panic!("writer {}: the log differs at byte {at} of {len}", self.writer);
        }
        (self.log_durable, self.log_told, self.log_tried) = (len, len, len);
    }
}

impl History {
    fn absent() -> History {
        History { states: vec![Content::Absent], durable: 0, told: 0 }
    }
}

/// Writers at work on one mount.
#[derive(Debug)]
pub struct Writers {
    cut: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Ledger>>,
}

impl Writers {
    /// Starts a thread per record.
    pub fn start(mount: &Path, ledgers: Vec<Ledger>) -> Writers {
        let cut = Arc::new(AtomicBool::new(false));
        let stop = Arc::new(AtomicBool::new(false));
        let steps = Arc::new(AtomicU64::new(0));
        let threads = ledgers
            .into_iter()
            .map(|mut ledger| {
                let folder = ledger.folder(mount);
                if !folder.exists() {
                    fs::create_dir(&folder).expect("a mounted volume takes folders");
                    sys::sync_folder(mount).expect("a folder can be synced");
                }
                let (mount, cut, stop) = (mount.to_owned(), cut.clone(), stop.clone());
                let steps = steps.clone();
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        if let Err(error) = ledger.step(&mount, &cut) {
                            if !cut.load(Ordering::SeqCst) {
                                ledger.surprise = Some(error.to_string());
                            }
                            break;
                        }
                        steps.fetch_add(1, Ordering::Relaxed);
                    }
                    ledger
                })
            })
            .collect();
        Writers { cut, stop, steps, threads }
    }

    /// How many steps all of them have done.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Whether all of them still work.
    pub fn working(&self) -> bool {
        self.threads.iter().all(|t| !t.is_finished())
    }

    /// Says that from now on calls may fail and nothing that returns is a promise. Call it right before a cut.
    pub fn announce(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    /// Lets each end its step and gives the records back.
    pub fn finish(self) -> Vec<Ledger> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|t| t.join().expect("a writer does not panic")).collect()
    }
}

/// The log of a writer, as somebody else may read it while it grows.
#[derive(Clone, Debug)]
pub struct Stream {
    writer: u64,
    closed: Arc<AtomicU64>,
}

impl Stream {
    /// Reads it through a mount: everything that was closed before must be there, and every byte must be right.
    pub fn check(&self, mount: &Path) -> io::Result<()> {
        let least = self.closed.load(Ordering::SeqCst);
        let log = match fs::read(mount.join(format!("writer-{}", self.writer)).join("log")) {
            Err(error) if least == 0 && error.kind() == io::ErrorKind::NotFound => return Ok(()),
            read => read?,
        };
        let (writer, len) = (self.writer, log.len() as u64);
        if len < least {
            // Who does not know: the kernel, the agent, or the service?
            let path = mount.join(format!("writer-{}", self.writer)).join("log");
            let again = fs::read(&path)?.len();
            std::thread::sleep(std::time::Duration::from_secs(3));
            let later = fs::read(&path)?.len();
            return Err(io::Error::other(format!(
                "the log of writer {writer} has {len} bytes, {least} were closed before; read again at once: {again}, \
                 after a while: {later}"
            )));
        }
        let want = stream(writer, 0, len);
        match log.iter().zip(&want).position(|(a, b)| a != b) {
            Some(at) => {
                let last = log.iter().zip(&want).rposition(|(a, b)| a != b).unwrap_or(at);
                let path = mount.join(format!("writer-{}", self.writer)).join("log");
                // Who has the wrong bytes: the kernel's pages, or the agent?
                let again = fs::read(&path)?.get(at..=last) != want.get(at..=last);
                let direct = sys::open(&path, libc::O_RDONLY | libc::O_DIRECT, 0).and_then(|file| {
                    let mut pages = sys::Aligned::new(log.len().next_multiple_of(4096));
                    let read = file.read_at(pages.bytes(), 0)?;
                    Ok(pages.bytes()[..read].get(at..=last) != want.get(at..=last))
                })?;
                Err(io::Error::other(format!(
                    "the log of writer {writer} is wrong from byte {at} to {last} of {len} ({least} were closed before): \
                     {:?}; wrong when read again: {again}, around the kernel's pages: {direct}",
                    &log[at..log.len().min(at + 16)]
                )))
            }
            None => Ok(()),
        }
    }
}

/// Makes `n` empty records.
pub fn ledgers(n: u64, seed: u64) -> Vec<Ledger> {
    ledgers_from(0, n, seed)
}

/// Makes `n` empty records of writers numbered from `first`.
pub fn ledgers_from(first: u64, n: u64, seed: u64) -> Vec<Ledger> {
    (first..first + n).map(|w| Ledger::new(w, seed)).collect()
}

/// Checks every record through a mount.
pub fn check(mount: &Path, ledgers: &mut [Ledger], level: Level) {
    for ledger in ledgers {
        if let Some(surprise) = ledger.surprise.take() {
            panic!("writer {} failed although nothing was announced: {surprise}", ledger.writer);
        }
        ledger.check(mount, level);
    }
}

/// Says in an error what was being done.
fn at<T>(call: &str, name: &str, done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| io::Error::new(error.kind(), format!("{call} {name}: {error}")))
}

/// The bytes of a version of a file.
fn content(writer: u64, name: &str, version: u64, len: usize) -> Vec<u8> {
    let number: u64 = name.bytes().fold(writer << 32, |n, b| n.wrapping_mul(31).wrapping_add(b.into()));
    let mut bytes = format!("{writer} {name} {version} {len}\n").into_bytes();
    let body = Rng::new(number ^ version.rotate_left(17)).bytes(len.saturating_sub(bytes.len()));
    bytes.extend(body);
    bytes.truncate(len);
    bytes
}

/// A part of a writer's endless stream: every eight bytes are their own position, scrambled.
fn stream(writer: u64, from: u64, len: u64) -> Vec<u8> {
    let first = from / 8;
    let bytes: Vec<u8> = (first..=(from + len) / 8)
        .flat_map(|word| Rng::new(word ^ writer.rotate_left(48)).next().to_le_bytes())
        .collect();
    bytes[(from % 8) as usize..][..len as usize].to_vec()
}

/// The exact state of a file, if it is one that `state` allows.
fn matches(writer: u64, name: &str, state: &Content, bytes: Option<&[u8]>) -> Option<Content> {
    match (state, bytes) {
        (Content::Absent, None) => Some(Content::Absent),
        (Content::Whole { version, len }, Some(bytes)) => {
            (bytes == content(writer, name, *version, *len)).then(|| state.clone())
        }
        (Content::Part { version, len }, Some(bytes)) => {
            content(writer, name, *version, *len).starts_with(bytes).then(|| state.clone())
        }
        _ => None,
    }
}

fn describe(writer: u64, name: &str, bytes: Option<&[u8]>, states: &[Content]) -> String {
    let Some(bytes) = bytes else { return "nothing".into() };
    let head = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
    let known = states.iter().find(|s| matches(writer, name, s, Some(bytes)).is_some());
    format!("{} bytes starting {head:?} (an earlier state: {known:?})", bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_folder_keeps_every_promise() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = ledgers(2, 7);
        for _ in 0..3 {
            let writers = Writers::start(folder.path(), records);
            let before = writers.steps();
            crate::eventually("some steps", || {
                if writers.steps() > before + 50 { Ok(()) } else { Err("few".into()) }
            });
            records = writers.finish();
            check(folder.path(), &mut records, Level::Told);
        }
    }

    #[test]
    fn a_lost_promise_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let cut = AtomicBool::new(false);
        let mut ledger = Ledger::new(0, 1);
        fs::create_dir(folder.path().join("writer-0")).unwrap();
        ledger.store(&folder.path().join("writer-0"), "f0", &cut).unwrap();
        fs::write(folder.path().join("writer-0/f0"), "something else").unwrap();
        let seen = std::panic::catch_unwind(move || ledger.check(folder.path(), Level::Durable));
        assert!(seen.is_err());
    }

    #[test]
    fn the_stream_is_the_same_however_it_is_cut() {
        let whole = stream(3, 0, 1000);
        assert_eq!(whole[13..500], stream(3, 13, 487)[..]);
    }
}
