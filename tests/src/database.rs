//! A real PostgreSQL server in the test's own folder, which can be killed, paused, copied and promoted.
//!
//! The idea: `initdb` runs once per machine and its result is copied; a server listens on a port of its own and on a socket
//! in its folder. PostgreSQL refuses to run as root, so root hands it to the user `postgres`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::ports::Port;
use crate::powercut::Disk;
use crate::process::Proc;
use crate::sandbox::Sandbox;
use crate::shell::{run, sh};
use crate::sys;
use crate::wait::eventually;

const USER: &str = "postgres";

/// One server with its folder.
#[derive(Debug)]
pub struct Database {
    /// The server's first process.
    pub server: Proc,
    port: Port,
    data: PathBuf,
    sandbox: Arc<Sandbox>,
}

impl Database {
    /// Starts an empty one.
    pub fn start(sandbox: &Arc<Sandbox>) -> Database {
        let mut database = Database::prepare(sandbox, "pg", &[]);
        database.restart();
        database
    }

    /// A server that is not started yet, with more settings.
    pub fn prepare(sandbox: &Arc<Sandbox>, name: &str, settings: &[&str]) -> Database {
        let data = sandbox.path(name);
        copy(&template(), &data);
        Database::over(sandbox, name, data, settings)
    }

    /// Starts an empty one on a disk of its own.
    pub fn start_on(sandbox: &Arc<Sandbox>, disk: &Disk) -> Database {
        let data = disk.path().join("pg");
        copy(&template(), &data);
        // The template was not synced; what is on this disk from now on is the database's own business.
        run(Command::new("sync").arg("-f").arg(&data)).ok();
        let mut database = Database::over(sandbox, "pg", data, &[]);
        database.restart();
        database
    }

    /// A server over a folder that is there already.
    pub fn over(sandbox: &Arc<Sandbox>, name: &str, data: PathBuf, settings: &[&str]) -> Database {
        let port = Port::reserve();
        let number = port.address().rsplit(':').next().expect("an address has a port").to_owned();
        let (program, mut args) = as_user(&bin("postgres"));
        args.extend(["-D".into(), data.to_string_lossy().into_owned(), "-p".into(), number]);
        let usual = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "max_connections=60",
            "shared_buffers=32MB",
            "max_wal_size=256MB",
            "wal_level=replica",
            "hot_standby=on",
            "log_min_messages=warning",
        ];
        for setting in usual.iter().chain(settings) {
            args.extend(["-c".into(), (*setting).to_owned()]);
        }
        let mut server = Proc::new(name, &program, sandbox.path(&format!("{name}.log")));
        server.args(args);
        Database { server, port, data, sandbox: sandbox.clone() }
    }

    /// Starts it and waits until it answers.
    pub fn restart(&mut self) {
        self.server.start();
        self.wait();
    }

    /// Waits until it answers.
    pub fn wait(&mut self) {
        eventually("the database", || {
            assert!(self.server.running(), "the database ended\n{}", self.server.log());
            let ran = run(Command::new(bin("pg_isready")).args(["-q", "-d", &self.url("postgres")]));
            if ran.code == Some(0) { Ok(()) } else { Err(format!("{ran:?}")) }
        });
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// The URL of one of its databases.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{USER}@{}/{database}", self.port.address())
    }

    /// Makes a database and gives its URL.
    pub fn create(&self, name: &str) -> String {
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        self.url(name)
    }

    /// Runs statements and gives what they print.
    pub fn sql(&self, database: &str, statements: &str) -> String {
        let mut psql = Command::new("psql");
        psql.args([
            "-X",
            "-q",
            "-t",
            "-A",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            &self.url(database),
            "-c",
            statements,
        ]);
        run(&mut psql).ok().trim().to_owned()
    }

    /// Ends every connection to a database, as an administrator would.
    pub fn cut_connections(&self, database: &str) {
        self.sql(
            "postgres",
            &format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"),
        );
    }

    /// Stops it in an orderly way.
    pub fn stop(&mut self) {
        self.server.signal(libc::SIGINT);
        self.server.wait_end();
    }

    /// Kills all of its processes at once.
    pub fn kill(&mut self) {
        self.kill_soon();
        self.server.reap();
    }

    /// Kills all of its processes at once and does not wait for their end.
    pub fn kill_soon(&self) {
        let pids = self.pids();
        self.server.kill_soon();
        pids.into_iter().for_each(|pid| sys::kill(pid, libc::SIGKILL));
    }

    /// Sends a signal to all of its processes: SIGSTOP and SIGCONT.
    pub fn signal_all(&self, signal: i32) {
        self.pids().into_iter().for_each(|pid| sys::kill(pid, signal));
    }

    /// A copy of its folder as it is now; the server must not run.
    pub fn copy_to(&self, name: &str) -> PathBuf {
        let to = self.sandbox.path(name);
        copy(&self.data, &to);
        to
    }

    /// Puts a copy in the place of its folder; the server must not run.
    pub fn put_back(&self, from: &Path) {
        std::fs::remove_dir_all(&self.data).expect("the server's folder can be removed");
        copy(from, &self.data);
    }

    /// Makes a standby of this server that its commits wait for.
    pub fn make_standby(&self, name: &str) -> Database {
        let data = self.sandbox.path(name);
        std::fs::create_dir(&data).expect("the sandbox takes folders");
        give(&data);
        let (program, mut args) = as_user(&bin("pg_basebackup"));
        let source = format!("{} application_name={name}", self.conninfo());
        args.extend([
            "-D".into(),
            data.to_string_lossy().into_owned(),
            "-R".into(),
            "-X".into(),
            "stream".into(),
        ]);
        args.extend(["-c".into(), "fast".into(), "-d".into(), source]);
        run(Command::new(program).args(args)).ok();
        let mut standby = Database::over(&self.sandbox, name, data, &[]);
        standby.restart();
        standby
    }

    /// Commits wait for this standby from now on.
    pub fn wait_for_standby(&self, name: &str) {
        self.sql("postgres", &format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'"));
        self.sql("postgres", "SELECT pg_reload_conf()");
        eventually("the standby to be synchronous", || {
            let state = self.sql("postgres", "SELECT sync_state FROM pg_stat_replication");
            if state == "sync" { Ok(()) } else { Err(state) }
        });
    }

    /// Lets a standby take writes.
    pub fn promote(&self) {
        self.sql("postgres", "ALTER SYSTEM RESET synchronous_standby_names");
        self.sql("postgres", "SELECT pg_promote(true, 60)");
    }

    /// Encrypts connections from the next start on, and takes only those, with passwords. Gives the file of the authority.
    pub fn demand_tls_and_passwords(&mut self) -> PathBuf {
        let data = self.data.display();
        let folder = self.sandbox.folder("authority");
        sh(
            &folder,
            &format!(
                "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem 2>/dev/null
                 openssl req -newkey rsa:2048 -nodes -subj /CN=server -keyout server.key -out server.csr 2>/dev/null
                 printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' > names
                 openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem 2>/dev/null
                 cp server.key server.pem '{data}'
                 printf 'host all postgres 127.0.0.1/32 trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n' > '{data}/pg_hba.conf'
                 printf \"ssl = on\\nssl_cert_file = 'server.pem'\\nssl_key_file = 'server.key'\\n\" >> '{data}/postgresql.conf'
                 chmod 600 '{data}/server.key'"
            ),
        );
        for file in ["server.key", "server.pem", "pg_hba.conf", "postgresql.conf"] {
            if root() {
                run(Command::new("chown").arg(format!("{USER}:")).arg(self.data.join(file))).ok();
            }
        }
        folder.join("ca.pem")
    }

    fn conninfo(&self) -> String {
        let address = self.port.address();
        let (host, port) = address.rsplit_once(':').expect("an address has a port");
        format!("host={host} port={port} user={USER}")
    }

    fn pids(&self) -> Vec<i32> {
        let mut pids = vec![self.server.pid()];
        let children =
            std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", pids[0])).unwrap_or_default();
        pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
        pids
    }
}

/// The result of `initdb`, made once.
fn template() -> PathBuf {
    static ONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _one = ONE.lock();
    let version = run(Command::new(bin("postgres")).arg("--version")).ok();
    let number = version.split_whitespace().nth(2).unwrap_or("0").to_owned();
    let made = std::env::temp_dir().join(format!("torchfs-test-initdb-{number}"));
    if made.join("PG_VERSION").exists() {
        return made;
    }
    let making = std::env::temp_dir().join(format!("torchfs-test-initdb-{number}.{}", std::process::id()));
    std::fs::remove_dir_all(&making).ok();
    std::fs::create_dir_all(&making).expect("the temporary folder takes folders");
    give(&making);
    let (program, mut args) = as_user(&bin("initdb"));
    args.extend(["-D".into(), making.to_string_lossy().into_owned()]);
    args.extend(["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"].map(String::from));
    run(Command::new(program).args(args)).ok();
    if std::fs::rename(&making, &made).is_err() {
        // Another process was faster.
        std::fs::remove_dir_all(&making).ok();
    }
    made
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-a").arg(from).arg(to)).ok();
}

/// Makes a folder the database's own.
fn give(folder: &Path) {
    run(Command::new("chmod").arg("700").arg(folder)).ok();
    if root() {
        run(Command::new("chown").arg(format!("{USER}:")).arg(folder)).ok();
    }
}

/// A program with its first arguments, run as somebody PostgreSQL agrees to.
fn as_user(program: &Path) -> (PathBuf, Vec<String>) {
    if !root() {
        return (program.to_owned(), vec![]);
    }
    let program = program.to_string_lossy().into_owned();
    let user = |flag: &str| format!("--{flag}={USER}");
    ("/usr/bin/setpriv".into(), vec![user("reuid"), user("regid"), "--clear-groups".into(), program])
}

fn root() -> bool {
    run(Command::new("id").arg("-u")).out.trim() == "0"
}

/// A program of the newest PostgreSQL installed.
fn bin(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.max_by_key(|e| e.file_name().to_string_lossy().parse::<u32>().unwrap_or(0));
    let path = newest.map(|e| e.path().join("bin").join(name)).unwrap_or_else(|| name.into());
    assert!(path.exists(), "{} is not there; run scripts/setup", path.display());
    path
}
