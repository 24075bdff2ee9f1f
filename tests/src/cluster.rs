//! A cluster of real `torchfs` processes on this machine, and mounts of it.
//!
//! The idea: every assumption about the command line is in this file, so that a changed flag is changed once. All
//! addresses are on 127.0.0.1 and stay the same over a restart; all folders lie in the test's sandbox.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::ports::Port;
use crate::process::Proc;
use crate::sandbox::Sandbox;
use crate::shell::{Ran, run};
use crate::sys;
use crate::wait::eventually;

/// What differs between the clusters of the tests.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many data servers.
    pub servers: usize,
    /// How many more metadata servers, with the same arguments and a folder each.
    pub standbys: usize,
    /// Copies of each block, as `--redundancy` takes it; the product's default if not given.
    pub redundancy: Option<String>,
    /// How long a silent client keeps what it holds.
    pub session_term_ms: Option<u64>,
    /// How long a client may trust what it was told without asking.
    pub lease_term_ms: Option<u64>,
    /// Where the metadata lies; by default a folder in the sandbox.
    pub meta_dir: Option<PathBuf>,
    /// Where the data servers' blocks lie; by default folders in the sandbox.
    pub data_dirs: Vec<PathBuf>,
    /// More arguments for `torchfs meta`.
    pub meta_args: Vec<String>,
    /// More arguments for `torchfs data`.
    pub data_args: Vec<String>,
    /// More arguments for `torchfs mount`.
    pub mount_args: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            servers: 3,
            standbys: 0,
            redundancy: None,
            session_term_ms: None,
            lease_term_ms: None,
            meta_dir: None,
            data_dirs: vec![],
            meta_args: vec![],
            data_args: vec![],
            mount_args: vec![],
        }
    }
}

/// A metadata service and data servers, each a process of its own.
#[derive(Debug)]
pub struct Cluster {
    /// The metadata service.
    pub meta: Proc,
    /// The others, of which one may lead.
    pub standbys: Vec<Proc>,
    /// The data servers.
    pub data: Vec<Proc>,
    options: Options,
    client: Client,
    ports: Vec<Port>,
    data_ports: Vec<Port>,
    mounts: AtomicU32,
}

/// What a command needs to reach a cluster.
#[derive(Clone, Debug)]
pub struct Client {
    sandbox: Arc<Sandbox>,
    meta: String,
    secret: PathBuf,
}

impl Cluster {
    /// Starts one with three data servers.
    pub fn start() -> Cluster {
        Cluster::with(Options::default())
    }

    /// Starts one and waits until every server has reported.
    pub fn with(options: Options) -> Cluster {
        Cluster::inside(&Sandbox::new(), options)
    }

    /// Starts one in a sandbox that the test has prepared.
    pub fn inside(sandbox: &Arc<Sandbox>, options: Options) -> Cluster {
        let sandbox = sandbox.clone();
        let secret = make_secret(&sandbox);
        let metas = 1 + options.standbys;
        let mut ports: Vec<Port> = (0..metas + options.servers).map(|_| Port::reserve()).collect();
        let data_ports = ports.split_off(metas);
        let addresses: Vec<String> = ports.iter().map(Port::address).collect();
        let client = Client { sandbox: sandbox.clone(), meta: addresses.join(","), secret };

        let mut standbys: Vec<Proc> = (0..metas)
            .map(|n| {
                let name = if n == 0 { "meta".to_owned() } else { format!("meta-{n}") };
                let mut meta = client.process(&name, "meta");
                let given = options.meta_dir.clone().filter(|_| n == 0);
                let dir = given.unwrap_or_else(|| sandbox.path(&name));
                meta.args([
                    "--dir".into(),
                    dir.into_os_string(),
                    "--listen".into(),
                    addresses[n].clone().into(),
                ]);
                meta.args(meta_flags(&options));
                meta.start();
                meta
            })
            .collect();
        let meta = standbys.remove(0);
        let data = (0..options.servers)
            .map(|n| {
                let mut data = client.process(&format!("data-{n}"), "data");
                let dir = options.data_dirs.get(n).cloned();
                let dir = dir.unwrap_or_else(|| sandbox.path(&format!("data-{n}")));
                data.args(["--dir".into(), dir.into_os_string()]);
                data.args(["--listen", &data_ports[n].address()]).args(&options.data_args);
                data.start();
                data
            })
            .collect();
        let mounts = AtomicU32::new(0);
        let mut cluster = Cluster { meta, standbys, data, options, client, ports, data_ports, mounts };
        cluster.ready();
        cluster
    }

    /// Waits until the metadata service answers and counts every data server among the living.
    pub fn ready(&mut self) {
        let servers = self.options.servers;
        eventually("the cluster", || {
            assert!(self.meta.running(), "the metadata service ended\n{}", self.meta.log());
            for data in &mut self.data {
                assert!(data.running(), "{} ended\n{}", data.name(), data.log());
            }
            let ran = self.client.torchfs(["status", "--json"]);
            if ran.code != Some(0) {
                return Err(ran.err);
            }
            let status: Value = serde_json::from_str(&ran.out).map_err(|e| format!("{e}: {}", ran.out))?;
            let up = living_servers(&status);
            if up == servers { Ok(()) } else { Err(format!("{up} of {servers} servers: {}", ran.out)) }
        });
    }

    /// Mounts the volume once more, by an agent of its own.
    pub fn mount(&self) -> Mount {
        let number = self.mounts.fetch_add(1, Ordering::Relaxed);
        let path = self.client.sandbox.folder(&format!("mnt-{number}"));
        let mut agent = self.client.process(&format!("agent-{number}"), "mount");
        agent.args(["--foreground"]).args(&self.options.mount_args).args([path.as_os_str()]);
        let mut mount = Mount { agent, path };
        mount.start();
        mount
    }

    /// Runs a `torchfs` command against this cluster.
    pub fn torchfs<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Ran {
        self.client.torchfs(args)
    }

    /// What `torchfs status --json` says.
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.torchfs(["status", "--json"]).ok()).expect("--json prints JSON")
    }

    /// Runs `torchfs fsck` and expects it to find nothing wrong.
    #[track_caller]
    pub fn fsck(&self) {
        self.torchfs(["fsck"]).ok();
    }

    /// Kills everything at the same moment, without waiting in between.
    pub fn kill_all(&mut self) {
        let all = || std::iter::once(&self.meta).chain(&self.standbys).chain(&self.data);
        all().for_each(Proc::kill_soon);
        for process in std::iter::once(&mut self.meta).chain(&mut self.standbys).chain(&mut self.data) {
            process.reap();
        }
    }

    /// Starts whatever does not run and waits until all is well.
    pub fn restart(&mut self) {
        for process in std::iter::once(&mut self.meta).chain(&mut self.standbys).chain(&mut self.data) {
            if !process.running() {
                process.reap();
                process.start();
            }
        }
        self.ready();
    }

    /// The folder of one data server.
    pub fn data_dir(&self, n: usize) -> PathBuf {
        let given = self.options.data_dirs.get(n).cloned();
        given.unwrap_or_else(|| self.client.sandbox.path(&format!("data-{n}")))
    }

    /// The address of the metadata service.
    pub fn address(&self) -> &str {
        &self.client.meta
    }

    /// The address of each metadata server.
    pub fn meta_addresses(&self) -> Vec<String> {
        self.ports.iter().map(Port::address).collect()
    }

    /// The addresses of the data servers.
    pub fn data_addresses(&self) -> Vec<String> {
        self.data_ports.iter().map(Port::address).collect()
    }

    /// What a command needs to reach it.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The test's folder.
    pub fn sandbox(&self) -> &Arc<Sandbox> {
        &self.client.sandbox
    }
}

impl Client {
    /// A client of an address that a test has chosen itself.
    pub fn new(sandbox: &Arc<Sandbox>, meta: &str, secret: &Path) -> Client {
        Client { sandbox: sandbox.clone(), meta: meta.to_owned(), secret: secret.to_owned() }
    }

    /// Runs a `torchfs` command to its end.
    pub fn torchfs<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Ran {
        run(self.command().args(args))
    }

    /// The binary with the environment that leads to the cluster.
    pub fn command(&self) -> Command {
        let mut command = Command::new(binary());
        command.envs(self.environment());
        command
    }

    /// A process of this cluster, not yet started; `role` is its command.
    pub fn process(&self, name: &str, role: &str) -> Proc {
        let mut process = Proc::new(name, &binary(), self.sandbox.path(&format!("{name}.log")));
        for (key, value) in self.environment() {
            process.env(key, value);
        }
        process.args([role]);
        process
    }

    /// What leads to the cluster and to nothing else on this machine.
    fn environment(&self) -> [(&'static str, OsString); 4] {
        [
            ("TORCHFS_META", self.meta.clone().into()),
            ("TORCHFS_SECRET_FILE", self.secret.clone().into_os_string()),
            ("TORCHFS_RUNTIME_DIR", self.sandbox.path("run").into_os_string()),
            ("TORCHFS_CONFIG", self.sandbox.path("torchfs.toml").into_os_string()),
        ]
    }
}

/// A mounted volume and the agent behind it.
#[derive(Debug)]
pub struct Mount {
    /// The agent's process.
    pub agent: Proc,
    path: PathBuf,
}

impl Mount {
    /// Wraps a mount that a test started itself.
    pub fn of(agent: Proc, path: &Path) -> Mount {
        Mount { agent, path: path.to_owned() }
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Starts the agent and waits until the mount answers.
    pub fn start(&mut self) {
        self.agent.start();
        self.wait();
    }

    /// Waits until the mount answers.
    pub fn wait(&mut self) {
        eventually("the mount", || {
            assert!(self.agent.running(), "{} ended\n{}", self.agent.name(), self.agent.log());
            if !sys::mounted(&self.path) {
                return Err("nothing is mounted there".into());
            }
            std::fs::metadata(&self.path).map(drop).map_err(|e| e.to_string())
        });
    }

    /// Ends the agent as a crash would and takes the dead mount away.
    pub fn kill(&mut self) {
        self.agent.kill();
        self.detach();
    }

    /// Takes the mount point away, whoever uses it.
    pub fn detach(&self) {
        while sys::mounted(&self.path) {
            sys::detach(&self.path);
        }
    }

    /// Unmounts as a user would, and expects that the agent ends well.
    #[track_caller]
    pub fn unmount(&mut self, client: &Client) {
        client.torchfs(["umount", &self.path.to_string_lossy()]).ok();
        let status = self.agent.wait_end();
        assert!(status.success(), "the agent ended with {status}\n{}", self.agent.log());
        assert!(!sys::mounted(&self.path), "still mounted after umount");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The flags of the metadata service, for `meta` and `up`.
pub fn meta_flags(options: &Options) -> Vec<String> {
    let flags = [
        ("--redundancy", options.redundancy.clone()),
        ("--session-term-ms", options.session_term_ms.map(|n| n.to_string())),
        ("--lease-term-ms", options.lease_term_ms.map(|n| n.to_string())),
    ];
    let given = flags.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?]));
    given.flatten().chain(options.meta_args.iter().cloned()).collect()
}

/// Writes the secret of a test's cluster.
pub fn make_secret(sandbox: &Sandbox) -> PathBuf {
    let secret = sandbox.path("secret");
    std::fs::write(&secret, "0123456789abcdef0123456789abcdef\n").expect("the sandbox takes files");
    sys::private(&secret);
    secret
}

/// How many data servers a status counts among the living.
pub fn living_servers(status: &Value) -> usize {
    let servers = status["servers"].as_array().map(Vec::as_slice).unwrap_or_default();
    servers.iter().filter(|s| s["up"].as_bool() == Some(true)).count()
}

/// The binary under test: `TORCHFS_BIN`, or the one built beside the tests.
pub fn binary() -> PathBuf {
    if let Some(given) = std::env::var_os("TORCHFS_BIN") {
        return given.into();
    }
    let test = std::env::current_exe().expect("a process knows its executable");
    let beside = test.ancestors().nth(2).expect("tests lie in target/release/deps").join("torchfs");
    assert!(beside.exists(), "{} is not built: cargo build --release -p torchfs-cli", beside.display());
    beside
}
