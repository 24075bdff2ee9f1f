//! A cluster of real `torchfs` processes on this machine, and mounts of it.
//!
//! The idea: every assumption about the command line is in this file, so that a changed flag is changed once. All
//! addresses are on 127.0.0.1, or each process is on a machine of its own (`Options::apart`); they stay the same over a
//! restart. All folders lie in the test's sandbox.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::netns::{self, Host, Net};
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
    /// Every process on a machine of its own, on a network of its own, whose cables can be pulled.
    pub apart: bool,
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
            apart: false,
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
    places: Places,
    mounts: AtomicU32,
}

/// Where the processes are: ports of this machine, or machines of their own. The metadata service first.
#[derive(Debug)]
enum Places {
    Ports(Vec<Port>),
    Hosts(Arc<Net>, Vec<Host>),
}

/// What a command needs to reach a cluster.
#[derive(Clone, Debug)]
pub struct Client {
    sandbox: Arc<Sandbox>,
    meta: String,
    secret: PathBuf,
    /// The machine that commands are typed on, if not this one.
    desk: Option<Arc<Host>>,
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
        let (mut places, desk) = match options.apart {
            true => {
                let net = Net::new();
                let desk = net.host("desk");
                (Places::Hosts(net, vec![]), Some(Arc::new(desk)))
            }
            false => (Places::Ports(vec![]), None),
        };
        let metas = 1 + options.standbys;
        let names: Vec<String> =
            (0..metas).map(|n| if n == 0 { "meta".to_owned() } else { format!("meta-{n}") }).collect();
        let addresses: Vec<String> = names.iter().map(|name| places.add(name)).collect();
        let client = Client { sandbox: sandbox.clone(), meta: addresses.join(","), secret, desk };

        let mut standbys: Vec<Proc> = (0..metas)
            .map(|n| {
                let mut meta = client.process(&names[n], "meta");
                let given = options.meta_dir.clone().filter(|_| n == 0);
                let dir = given.unwrap_or_else(|| sandbox.path(&names[n]));
                meta.args([
                    "--dir".into(),
                    dir.into_os_string(),
                    "--listen".into(),
                    addresses[n].clone().into(),
                ]);
                meta.args(meta_flags(&options));
                places.settle(n, &mut meta);
                meta.start();
                meta
            })
            .collect();
        let meta = standbys.remove(0);
        let servers = options.servers;
        let mounts = AtomicU32::new(0);
        let mut cluster = Cluster { meta, standbys, data: vec![], options, client, places, mounts };
        for _ in 0..servers {
            cluster.start_server(&[]);
        }
        cluster.ready();
        cluster
    }

    /// Starts one more data server and waits until it has reported; gives its number.
    pub fn add_server(&mut self, args: &[&str]) -> usize {
        let number = self.start_server(args);
        self.options.servers = self.data.len();
        self.ready();
        number
    }

    fn start_server(&mut self, args: &[&str]) -> usize {
        let n = self.data.len();
        let address = self.places.add(&format!("data-{n}"));
        let mut data = self.client.process(&format!("data-{n}"), "data");
        data.args(["--dir".into(), self.data_dir(n).into_os_string()]);
        data.args(["--listen", &address]).args(&self.options.data_args).args(args.iter().copied());
        self.places.settle(self.metas() + n, &mut data);
        data.start();
        self.data.push(data);
        n
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

    /// Mounts the first volume once more, by an agent of its own.
    pub fn mount(&self) -> Mount {
        self.mount_volume(None)
    }

    /// Mounts a volume, by an agent of its own.
    pub fn mount_volume(&self, volume: Option<&str>) -> Mount {
        let number = self.mounts.fetch_add(1, Ordering::Relaxed);
        let path = self.client.sandbox.folder(&format!("mnt-{number}"));
        let mut agent = self.client.process(&format!("agent-{number}"), "mount");
        agent.args(["--foreground"]).args(&self.options.mount_args).args(volume).args([path.as_os_str()]);
        let host = match &self.places {
            Places::Hosts(net, _) => Some(net.host(&format!("client-{number}"))),
            Places::Ports(_) => None,
        };
        if let Some(host) = &host {
            agent.on(host);
        }
        let mut mount = Mount { agent, path, host };
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
        (0..self.metas()).map(|n| self.places.address(n)).collect()
    }

    /// The addresses of the data servers.
    pub fn data_addresses(&self) -> Vec<String> {
        (0..self.data.len()).map(|n| self.places.address(self.metas() + n)).collect()
    }

    /// The machine of the metadata service, where each process has one.
    pub fn meta_host(&self) -> &Host {
        self.places.host(0)
    }

    /// The machine of a data server, where each process has one.
    pub fn data_host(&self, n: usize) -> &Host {
        self.places.host(self.metas() + n)
    }

    fn metas(&self) -> usize {
        1 + self.standbys.len()
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

/// Where a server listens on a machine of its own.
const PORT: u16 = 7070;

impl Places {
    /// A place for one more process; gives its address.
    fn add(&mut self, name: &str) -> String {
        match self {
            Places::Ports(ports) => ports.push(Port::reserve()),
            Places::Hosts(net, hosts) => hosts.push(net.host(name)),
        }
        let last = match self {
            Places::Ports(ports) => ports.len(),
            Places::Hosts(_, hosts) => hosts.len(),
        };
        self.address(last - 1)
    }

    fn address(&self, n: usize) -> String {
        match self {
            Places::Ports(ports) => ports[n].address(),
            Places::Hosts(_, hosts) => hosts[n].at(PORT),
        }
    }

    /// Puts a process where its place is.
    fn settle(&self, n: usize, process: &mut Proc) {
        if let Places::Hosts(_, hosts) = self {
            process.on(&hosts[n]);
        }
    }

    fn host(&self, n: usize) -> &Host {
        match self {
            Places::Hosts(_, hosts) => &hosts[n],
            Places::Ports(_) => {
                panic!("this cluster's processes share a machine; start it with Options::apart")
            }
        }
    }
}

impl Client {
    /// A client of an address that a test has chosen itself.
    pub fn new(sandbox: &Arc<Sandbox>, meta: &str, secret: &Path) -> Client {
        Client { sandbox: sandbox.clone(), meta: meta.to_owned(), secret: secret.to_owned(), desk: None }
    }

    /// Runs a `torchfs` command to its end.
    pub fn torchfs<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Ran {
        run(self.command().args(args))
    }

    /// The binary with the environment that leads to the cluster.
    pub fn command(&self) -> Command {
        let mut command = match &self.desk {
            Some(desk) => netns::enter(desk.namespace(), &binary()),
            None => Command::new(binary()),
        };
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
    host: Option<Host>,
}

impl Mount {
    /// Wraps a mount that a test started itself.
    pub fn of(agent: Proc, path: &Path) -> Mount {
        Mount { agent, path: path.to_owned(), host: None }
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The machine it is on, where each process has one.
    pub fn host(&self) -> &Host {
        self.host
            .as_ref()
            .expect("this mount's agent shares a machine; start its cluster with Options::apart")
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
        self.agent.kill_soon();
        // A thread that told the kernel to drop a page stays until nobody reads that page, which may be one of its own readers.
        self.detach();
        self.agent.kill();
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
