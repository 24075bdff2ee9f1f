//! A metadata server over a database: it follows the log, serves while it leads, and follows again when it does not.
//!
//! One thread does it all in turn; requests that arrive meanwhile get the service of the moment, or hear who leads.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::watch;
use torchfs_engine::postgres::{PostgresConfig, Standby};
use torchfs_engine::{Engine, Error};
use torchfs_proto::{Code, Fault};
use torchfs_rpc::{Answering, Peer, Request, Role, Service};

use super::meta::{Serving, Stage};
use crate::http::Health;
use crate::{connect, settings};

/// The pause before a silent database is tried again at the start.
const PAUSE: Duration = Duration::from_millis(500);
/// How long the folder may still be locked by the service that has just ended.
const LOCKED_MAX: Duration = Duration::from_secs(60);

/// Flags for a log that is kept in a database.
#[derive(Args, Clone, Debug)]
pub struct DatabaseOptions {
    /// Keep log and state in this PostgreSQL: postgres://USER@HOST1,HOST2/DATABASE. The host that takes writes is used. Start
    /// a second metadata server with the same URL and it is the standby
    #[arg(long, env = "TORCHFS_ENGINE", value_name = "URL")]
    pub engine: Option<String>,

    /// File with the password of the database's user [default: PGPASSWORD, or PGPASSFILE]
    #[arg(long, value_name = "FILE")]
    pg_password_file: Option<PathBuf>,

    /// PEM file with the authorities that sign the database's certificate [default: the system's]
    #[arg(long, value_name = "FILE")]
    pg_ca_file: Option<PathBuf>,

    /// How long a leader counts as such after its last sign of life
    #[arg(long, default_value = "2s", value_parser = settings::duration, value_name = "TIME")]
    pg_lease: Duration,

    /// How long the database keeps the log for standbys that are away
    #[arg(long, default_value = "5m", value_parser = settings::duration, value_name = "TIME")]
    pg_log_keep: Duration,

    /// The address of this server as others see it [default: where it listens]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
}

impl DatabaseOptions {
    /// The engine's settings.
    pub fn config(&self, address: &str, engine: torchfs_engine::Config) -> anyhow::Result<PostgresConfig> {
        let url = self.engine.clone().unwrap_or_default();
        torchfs_engine::postgres::check_url(&url)?;
        Ok(PostgresConfig {
            password: self.password(&url)?,
            url,
            ca_file: self.pg_ca_file.clone(),
            address: self.address(address)?,
            lease: self.pg_lease,
            margin: (self.pg_lease / 8).max(Duration::from_millis(50)),
            poll: (self.pg_lease / 10).clamp(Duration::from_millis(20), Duration::from_millis(250)),
            log_keep: self.pg_log_keep,
            engine,
            ..PostgresConfig::default()
        })
    }

    /// Where the others of the cluster find this server, which is written into the database.
    fn address(&self, listens: &str) -> anyhow::Result<String> {
        if let Some(address) = &self.advertise {
            connect::check_addr(address, "--advertise")?;
            return Ok(address.clone());
        }
        if connect::is_wildcard(listens) {
            anyhow::bail!(
                "{listens} is every address of this machine, and the others need one to find it by; give --advertise HOST:PORT"
            );
        }
        Ok(listens.to_string())
    }

    /// From the file, the environment, or the file that PostgreSQL's own programs read.
    fn password(&self, url: &str) -> anyhow::Result<Option<String>> {
        if let Some(path) = &self.pg_password_file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the password in {}", path.display()))?;
            return Ok(Some(text.trim_end_matches(['\n', '\r']).to_string()));
        }
        if let Ok(password) = std::env::var("PGPASSWORD") {
            return Ok(Some(password));
        }
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".pgpass"));
        let Some(path) = std::env::var_os("PGPASSFILE").map(PathBuf::from).or_else(home) else {
            return Ok(None);
        };
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        Ok(find_password(&text, url))
    }
}

/// The password of the first line HOST:PORT:DATABASE:USER:PASSWORD that fits the URL; `*` fits everything.
fn find_password(text: &str, url: &str) -> Option<String> {
    let rest = url.split_once("://")?.1;
    let (user, rest) = rest.split_once('@').unwrap_or(("", rest));
    let (hosts, rest) = rest.split_once('/').unwrap_or((rest, ""));
    let database = rest.split('?').next().unwrap_or_default();
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let mut fields = line.splitn(5, ':');
        let [host, port, base, name, password] = std::array::from_fn(|_| fields.next().unwrap_or_default());
        let fits = |field: &str, is: &str| field == "*" || field == is;
        let there = hosts.split(',').any(|address| {
            let (is_host, is_port) = address.rsplit_once(':').unwrap_or((address, "5432"));
            fits(host, is_host) && fits(port, is_port)
        });
        (there && fits(base, database) && fits(name, user)).then(|| password.to_string())
    })
}

/// What answers requests: the service while this server leads, else a hint to who does.
struct Desk {
    service: RwLock<Option<Arc<torchfs_meta::Meta>>>,
    /// Who leads instead, and whether the database answers.
    news: Mutex<News>,
}

#[derive(Default)]
struct News {
    leader: String,
    trouble: Option<String>,
}

impl Service for Desk {
    fn call(self: Arc<Self>, peer: Peer, request: Request) -> Answering {
        let service = self.service.read().clone();
        match service {
            // Sessions wait for the database; people want to know what they wait for.
            Some(service) if peer.role() == Role::Tool && !service.engine().leads() => {
                let fault = Fault::new(Code::NotLeader, "the metadata's database does not answer its leader")
                    .next("check the database; the metadata server's log tells more");
                Box::pin(async move { Err(fault) })
            }
            Some(service) => service.call(peer, request),
            None => {
                let fault = self.refusal();
                Box::pin(async move { Err(fault) })
            }
        }
    }

    fn closed(&self, peer: &Peer) {
        if let Some(service) = &*self.service.read() {
            service.closed(peer);
        }
    }
}

impl Desk {
    fn refusal(&self) -> Fault {
        let news = self.news.lock();
        let fault = Fault::new(Code::NotLeader, "this metadata server is a standby");
        match (&news.trouble, news.leader.as_str()) {
            (Some(trouble), _) => {
                Fault::new(Code::NotLeader, trouble.clone()).next("check the database of the metadata")
            }
            (None, "") => fault.next("nobody leads yet; try again"),
            (None, leader) => fault.next(format!("{leader} leads; give --meta that address, too")),
        }
    }

    fn hear(&self, leader: &str, trouble: Option<String>) {
        let mut news = self.news.lock();
        if news.leader != leader {
            news.leader = leader.to_string();
        }
        news.trouble = trouble;
    }
}

/// Asks the thread to end, and wakes it when the lead is lost.
#[derive(Default)]
struct Bell {
    rung: Mutex<Rung>,
    changed: Condvar,
}

#[derive(Default)]
struct Rung {
    stop: bool,
    lost: Option<String>,
}

impl Bell {
    fn stops(&self) -> bool {
        self.rung.lock().stop
    }

    fn ring(&self, change: impl FnOnce(&mut Rung)) {
        change(&mut self.rung.lock());
        self.changed.notify_all();
    }

    /// Waits until the lead is lost or the end has come; says what was lost.
    fn wait(&self) -> Option<String> {
        let mut rung = self.rung.lock();
        while !rung.stop && rung.lost.is_none() {
            self.changed.wait(&mut rung);
        }
        rung.lost.take()
    }

    fn pause(&self, time: Duration) {
        let mut rung = self.rung.lock();
        if !rung.stop {
            self.changed.wait_for(&mut rung, time);
        }
    }
}

/// The thread that follows and serves in turn.
pub struct Follower {
    desk: Arc<Desk>,
    bell: Arc<Bell>,
    thread: JoinHandle<()>,
    ended: watch::Receiver<Option<String>>,
}

impl Follower {
    /// Begins to follow; needs a runtime around it.
    pub fn start(dir: &Path, config: PostgresConfig, stage: Stage) -> anyhow::Result<Follower> {
        // Said before anything else is: later a lock may be that of the service that has just ended here.
        drop(torchfs_disk::LocalDisk::open_locked(dir)?);
        let desk = Arc::new(Desk { service: RwLock::new(None), news: Mutex::default() });
        let bell = Arc::new(Bell::default());
        let (tell, ended) = watch::channel(None);
        let turn = Turns { dir: dir.to_owned(), config, stage, desk: desk.clone(), bell: bell.clone() };
        let runtime = Handle::current();
        let thread = thread::Builder::new()
            .name("torchfs-follow".into())
            .spawn(move || {
                let _runtime = runtime.enter();
                if let Err(error) = turn.run() {
                    tell.send_replace(Some(format!("{error:#}")));
                }
            })
            .context("cannot start a thread")?;
        Ok(Follower { desk, bell, thread, ended })
    }

    /// What answers requests.
    pub fn desk(&self) -> Arc<dyn Service> {
        self.desk.clone()
    }

    /// Well while the database answers.
    pub fn health(&self) -> Health {
        let desk = self.desk.clone();
        Arc::new(move || match desk.service.read().as_ref() {
            Some(service) if service.engine().leads() => Ok(()),
            Some(_) => Err("the metadata's database is silent".into()),
            None => desk.news.lock().trouble.clone().map_or(Ok(()), Err),
        })
    }

    /// Ends when it cannot go on.
    pub async fn ended(&self) -> anyhow::Error {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(why) => anyhow::anyhow!(why.clone().unwrap_or_default()),
            Err(_) => std::future::pending().await,
        }
    }

    /// Stops serving and gives the lead up. Blocks.
    pub fn stop(self) {
        self.bell.ring(|rung| rung.stop = true);
        if self.thread.join().is_err() {
            tracing::error!("the thread that follows the log panicked");
        }
    }
}

struct Turns {
    dir: PathBuf,
    config: PostgresConfig,
    stage: Stage,
    desk: Arc<Desk>,
    bell: Arc<Bell>,
}

impl Turns {
    fn run(&self) -> anyhow::Result<()> {
        while !self.bell.stops() {
            let Some(standby) = self.open()? else { return Ok(()) };
            let Some(engine) = self.follow(standby)? else { return Ok(()) };
            self.serve(engine)?;
        }
        Ok(())
    }

    /// Opens the replica, however long the database is silent.
    fn open(&self) -> anyhow::Result<Option<Standby>> {
        let began = Instant::now();
        let mut told = false;
        while !self.bell.stops() {
            match Standby::open(&self.dir, self.config.clone()) {
                Ok(standby) => return Ok(Some(standby)),
                Err(error @ Error::Silent { .. }) => {
                    self.desk.hear("", Some(error.to_string()));
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!("waiting for the database: {error}");
                    }
                }
                // Requests of the service that has just ended may hold it for a moment.
                Err(Error::Locked { .. }) if began.elapsed() < LOCKED_MAX => {}
                Err(error) => return Err(error.into()),
            }
            self.bell.pause(PAUSE);
        }
        Ok(None)
    }

    /// Follows until it is time to lead.
    fn follow(&self, standby: Standby) -> anyhow::Result<Option<Arc<dyn Engine>>> {
        let mut told = None;
        let engine = standby.run(&mut |standby| {
            let leader = standby.leader();
            let address = leader.as_ref().map(|leader| leader.address.clone()).unwrap_or_default();
            let trouble = leader.is_none().then(|| "the metadata's database was not asked yet".to_string());
            self.desk.hear(&address, trouble);
            if !address.is_empty() && told.as_ref() != Some(&address) {
                tracing::info!(leader = address, "this metadata server is the standby");
                told = Some(address);
            }
            if self.bell.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(engine.map(|engine| Arc::new(engine) as Arc<dyn Engine>))
    }

    /// Serves while it leads.
    fn serve(&self, engine: Arc<dyn Engine>) -> anyhow::Result<()> {
        let bell = self.bell.clone();
        bell.ring(|rung| rung.lost = None);
        engine.on_durable(Box::new(move |news| {
            if let Err(error) = news {
                let fatal = !matches!(error, Error::Deposed { .. });
                bell.ring(|rung| rung.lost = Some(if fatal { error.to_string() } else { String::new() }));
            }
        }));
        let began = Serving::begin(engine.clone(), &self.stage, "postgres");
        drop(engine);
        let serving = match began {
            Ok(serving) => serving,
            // The lead was lost before anything was served.
            Err(error) => match self.bell.rung.lock().lost.take() {
                Some(why) if why.is_empty() => return Ok(()),
                _ => return Err(error),
            },
        };
        *self.desk.service.write() = Some(serving.service.clone());
        let lost = self.bell.wait();
        self.desk.hear("", None);
        *self.desk.service.write() = None;
        serving.end();
        match lost {
            Some(why) if !why.is_empty() => Err(anyhow::anyhow!(why)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_found_as_the_databases_own_programs_find_them() {
        let text =
            "# comment\nother:5432:*:torchfs:no\n*:5433:db:torchfs:a:b\nh2:*:db:torchfs:yes\n*:*:*:*:any\n";
        let find = |url| find_password(text, url);
        assert_eq!(find("postgres://torchfs@h1,h2/db").as_deref(), Some("yes"));
        assert_eq!(find("postgres://torchfs@h1:5433/db?x=y").as_deref(), Some("a:b"));
        assert_eq!(find("postgres://somebody@h1/db").as_deref(), Some("any"));
        assert_eq!(find_password("h:1:d:u:p", "postgres://u@h:2/d"), None);
    }
}
