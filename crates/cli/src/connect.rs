//! How a command finds its cluster: `--meta`, TORCHFS_META, or the one cluster that `torchfs up` runs on this machine.
//!
//! `up` leaves a note under the runtime folder while it runs: where its metadata service listens and where its secret
//! is. Root's notes are in /run/torchfs, those of other users in their own runtime folder. A command without `--meta` follows the only note there is; with `--meta` the note of that address tells the secret.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;

/// Flags of every command that talks to a cluster.
#[derive(Args, Clone, Debug, Default)]
pub struct Connect {
    /// The metadata service: HOST:PORT, several separated by commas [default: the cluster that `up` runs here]
    #[arg(long, global = true, env = "TORCHFS_META", value_name = "HOST:PORT[,…]", value_delimiter = ',')]
    pub meta: Vec<String>,

    /// File with the cluster secret: at least 16 random characters, the same for all processes (`up` makes one in its folder)
    #[arg(long, global = true, env = "TORCHFS_SECRET_FILE", value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// Flags of every command that asks a cluster and prints what it hears.
#[derive(Args, Clone, Debug, Default)]
pub struct Ask {
    #[command(flatten)]
    connect: Connect,

    /// Print one JSON object
    #[arg(long, global = true)]
    pub json: bool,
}

impl Ask {
    /// Looks for the cluster.
    pub fn find(&self) -> anyhow::Result<Found> {
        self.connect.find()
    }

    /// Prints an answer: the object for programs, or the sentence for people.
    pub fn print(&self, object: &Value, sentence: &str) {
        if self.json {
            println!("{object:#}");
        } else {
            println!("{sentence}");
        }
    }
}

/// A cluster found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Addresses of the metadata service.
    pub meta: Vec<String>,
    /// The secret; empty without one.
    pub secret: Vec<u8>,
    /// The file it came from, to hand on.
    pub secret_file: Option<PathBuf>,
}

impl Connect {
    /// Looks for the cluster.
    pub fn find(&self) -> anyhow::Result<Found> {
        let notes = notes();
        let (meta, noted) = if self.meta.is_empty() {
            match notes.as_slice() {
                [note] => (vec![note.meta.clone()], note.secret_file.clone()),
                [] => bail!(
                    "no cluster given and none runs on this machine; give --meta HOST:PORT or set TORCHFS_META, \
                     or start one with: torchfs up --dir ./data"
                ),
                several => bail!(
                    "{} clusters run on this machine ({}); choose one with --meta HOST:PORT",
                    several.len(),
                    several.iter().map(|n| n.meta.as_str()).collect::<Vec<_>>().join(", ")
                ),
            }
        } else {
            for addr in &self.meta {
                check_addr(addr, "--meta")?;
            }
            let noted = notes.into_iter().find(|n| self.meta.contains(&n.meta)).and_then(|n| n.secret_file);
            (self.meta.clone(), noted)
        };
        let secret_file = self.secret_file.clone().or(noted);
        let secret = match &secret_file {
            Some(path) => read_secret(path)?,
            None => Vec::new(),
        };
        Ok(Found { meta, secret, secret_file })
    }
}

/// Refuses what cannot be an address, with a sentence.
pub fn check_addr(addr: &str, flag: &str) -> anyhow::Result<()> {
    let port =
        addr.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
    match port {
        Some(Ok(_)) => Ok(()),
        _ => bail!("`{addr}` is not an address; {flag} takes HOST:PORT, for example 127.0.0.1:7070"),
    }
}

/// Whether an address stands for every one of its machine, so that nobody else can use it.
pub fn is_wildcard(addr: &str) -> bool {
    addr.parse::<SocketAddr>().is_ok_and(|addr| addr.ip().is_unspecified())
}

/// The address of this machine that leads to one of these; what others see it by. Nothing is sent.
pub fn own_address(towards: &[String]) -> Option<IpAddr> {
    let ways = towards.iter().filter_map(|addr| addr.to_socket_addrs().ok()).flatten().filter_map(|addr| {
        let any = if addr.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(addr).ok()?;
        Some(socket.local_addr().ok()?.ip())
    });
    // One that only this machine knows comes last.
    ways.min_by_key(IpAddr::is_loopback)
}

/// The shortest secret that is taken.
const SECRET_MIN: usize = 16;

/// Reads a secret; white space at its ends does not count.
pub fn read_secret(path: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = fs::read(path).with_context(|| {
        format!("cannot read the secret {}; give the right --secret-file", path.display())
    })?;
    let secret = bytes.trim_ascii().to_vec();
    if secret.is_empty() {
        bail!(
            "the secret {} is empty; copy the one of the metadata service, or make one for the whole cluster with: \
             head -c 32 /dev/urandom | base64",
            path.display()
        );
    }
    if secret.len() < SECRET_MIN {
        bail!(
            "the secret {} has {} characters and can be guessed; make one of at least {SECRET_MIN} for the whole cluster with: \
             head -c 32 /dev/urandom | base64",
            path.display(),
            secret.len()
        );
    }
    Ok(secret)
}

/// Reads the secret of a folder, or draws one if there is none.
pub fn make_secret(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path.exists() {
        return read_secret(path);
    }
    let secret: String = (0..4).map(|_| format!("{:016x}", rand::random::<u64>())).collect();
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot write the secret {}", path.display()))?;
    file.write_all(secret.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    Ok(secret.into_bytes())
}

/// A note about a running cluster; gone when dropped.
pub struct Note {
    path: PathBuf,
}

impl Note {
    /// Leaves a note; without rights to do so there is none, and commands need `--meta`.
    pub fn leave(meta: &str, secret_file: Option<&Path>) -> Option<Note> {
        let dir = runtime_dir();
        fs::create_dir_all(&dir).ok()?;
        let path = dir.join(format!("{}.toml", std::process::id()));
        let secret = secret_file.map(fs::canonicalize).and_then(Result::ok).unwrap_or_default();
        let text = format!("meta = {meta:?}\nsecret_file = {:?}\n", secret.display().to_string());
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path).ok()?;
        file.write_all(text.as_bytes()).ok()?;
        Some(Note { path })
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Noted {
    meta: String,
    secret_file: Option<PathBuf>,
}

/// The notes of processes that still live.
fn notes() -> Vec<Noted> {
    let entries = own_dirs().into_iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten();
    let mut notes = Vec::new();
    for path in entries.filter_map(Result::ok).map(|e| e.path()) {
        if path.extension().is_none_or(|e| e != "toml") {
            continue;
        }
        let alive = path
            .file_stem()
            .and_then(|s| s.to_str())
            .and_then(|s| s.parse::<u32>().ok())
            .is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists());
        if !alive {
            let _ = fs::remove_file(&path);
            continue;
        }
        let Some(table) = fs::read_to_string(&path).ok().and_then(|t| t.parse::<toml::Table>().ok()) else {
            continue;
        };
        let text = |key: &str| table.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_string();
        let secret = text("secret_file");
        notes.push(Noted { meta: text("meta"), secret_file: (!secret.is_empty()).then(|| secret.into()) });
    }
    notes
}

/// A file in the runtime folder, which is made if it is missing.
pub fn runtime_file(name: &str) -> anyhow::Result<PathBuf> {
    let dir = runtime_dir();
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir.join(name))
}

/// Where root's notes are, whatever the session that root works in says.
const ROOTS: &str = "/run/torchfs";

/// Where this process leaves notes.
fn runtime_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("TORCHFS_RUNTIME_DIR") {
        return PathBuf::from(dir).join("torchfs");
    }
    let user = rustix::process::geteuid();
    if user.is_root() {
        return ROOTS.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => PathBuf::from(dir).join("torchfs"),
        None => PathBuf::from(format!("/run/user/{}/torchfs", user.as_raw())),
    }
}

/// Where notes are that this user trusts: the own ones, and root's.
fn own_dirs() -> Vec<PathBuf> {
    let own = runtime_dir();
    let roots = PathBuf::from(ROOTS);
    match std::env::var_os("TORCHFS_RUNTIME_DIR") {
        None if own != roots => vec![own, roots],
        _ => vec![own],
    }
}

/// Where any process of this machine may have left notes that this one can read.
pub fn runtime_dirs() -> Vec<PathBuf> {
    let mut dirs = own_dirs();
    let users = fs::read_dir("/run/user").into_iter().flatten().filter_map(Result::ok);
    dirs.extend(users.map(|user| user.path().join("torchfs")).filter(|dir| dir.is_dir()));
    dirs
}

/// Whether notes of this process are found by root, too.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_can_use_is_told_from_one_that_they_cannot() {
        assert!(is_wildcard("0.0.0.0:7070") && is_wildcard("[::]:0"));
        assert!(!is_wildcard("10.0.0.1:7070") && !is_wildcard("storage-1:7070"));
        assert_eq!(own_address(&["127.0.0.1:7070".to_string()]), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(own_address(&[]), None);
    }
}
