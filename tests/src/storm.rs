//! Faults at random, several at once, on a cluster whose machines have cables and disks of their own, while writers and readers
//! record what they were told.
//!
//! The idea: a storm is a row of rounds. In each one the clients work, faults strike, last a moment, and are put right in
//! any order; then everything that was promised is looked for. In some climates an operator moves groups meanwhile: he drains
//! servers, takes that back, evens out, adds servers. Which faults strike whom follows from the seed alone, so a
//! seed tells the story again, if not its exact timing.
//!
//! # Invariants
//! - At most as many data servers suffer at once as the redundancy tolerates, except when the whole cluster is struck, and then
//!   nothing that is durable is lost.
//! - A client that lives through a round may rely on everything it was told. One that is killed may rely on what was
//!   synced or closed.
//! - A disk with flipped bits counts as suffering until a scrub has healed it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::{Cluster, Mount, Options};
use crate::powercut::Disk;
use crate::promises::{self, Ledger, Level, Writers};
use crate::readers::{Archive, Readers};
use crate::rng::Rng;
use crate::sandbox::Sandbox;
use crate::sys;
use crate::wait::eventually;

/// Whom a fault strikes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// The metadata service.
    Meta,
    /// A data server.
    Data(usize),
    /// A client.
    Client(usize),
}

/// What happens to one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// kill -9.
    Kill,
    /// The process stands still, as in a long swap or a suspended machine.
    Stop,
    /// The cable is out.
    Cut,
    /// The cable lets little through.
    Slow,
    /// The power fails and with it what was not synced.
    Power,
    /// Somebody else fills the disk.
    Fill,
    /// Bits on the disk flip.
    Flip,
}

/// What a storm is like.
#[derive(Clone, Debug)]
pub struct Climate {
    /// Data servers.
    pub servers: usize,
    /// As `--redundancy` takes it.
    pub redundancy: &'static str,
    /// How many pieces a block has.
    pub width: usize,
    /// How many data servers may suffer at once.
    pub tolerated: usize,
    /// What may happen to data servers.
    pub data: &'static [Fault],
    /// Groups move: servers are drained and join, and those that are silent are out within seconds.
    pub moves: bool,
    /// More arguments for `torchfs meta`.
    pub meta_args: &'static [&'static str],
}

/// What an operator does between two rounds. It goes on during the next ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    Drain(usize),
    TakeBack(usize),
    Rebalance,
    Join,
}

/// A cluster in a storm.
#[derive(Debug)]
pub struct Storm {
    climate: Climate,
    rng: Rng,
    cluster: Cluster,
    meta_disk: Disk,
    data_disks: Vec<Disk>,
    clients: Vec<Client>,
    archive: Archive,
    faults: u64,
    /// Whose disk has flipped bits that no scrub has healed yet.
    flipped: Option<usize>,
    draining: Vec<usize>,
}

#[derive(Debug)]
struct Client {
    mount: Mount,
    ledgers: Vec<Ledger>,
}

/// Clients at work during one round.
struct Work {
    writers: Vec<Writers>,
    readers: Vec<Readers>,
}

const CLIENTS: usize = 2;
const WRITERS: u64 = 2;
const READERS: u64 = 2;
/// How long faults last at most: well within a session's term.
const HOLD: Duration = Duration::from_millis(2500);
/// How many servers may join.
const JOINS: usize = 2;

impl Storm {
    /// Builds the cluster, mounts it twice and fills the archive.
    pub fn new(seed: u64, climate: Climate) -> Storm {
        let sandbox = Sandbox::new();
        let meta_disk = Disk::new(&sandbox, "disk-meta", 2048);
        let disk = |n| Disk::new(&sandbox, &format!("disk-{n}"), 1024);
        let joins = if climate.moves { JOINS } else { 0 };
        let data_disks: Vec<Disk> = (0..climate.servers + joins).map(disk).collect();
        let texts = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let mut meta_args = texts(climate.meta_args);
        meta_args.extend(texts(&["--repair-retry-ms", "500"]));
        if climate.moves {
            meta_args.extend(texts(&["--server-timeout-ms", "1200", "--out-after", "1s"]));
        }
        let options = Options {
            servers: climate.servers,
            redundancy: Some(climate.redundancy.into()),
            lease_term_ms: Some(500),
            session_term_ms: Some(20_000),
            meta_dir: Some(meta_disk.path().join("meta")),
            data_dirs: data_disks.iter().map(|d| d.path().join("data")).collect(),
            meta_args,
            data_args: texts(&["--segment-size", "32MiB"]),
            // Little memory, so that reads go to the servers.
            mount_args: texts(&["--cache-size", "8MiB"]),
            apart: true,
            ..Options::default()
        };
        let cluster = Cluster::inside(&sandbox, options);
        let mut rng = Rng::new(seed);
        let clients: Vec<Client> = (0..CLIENTS as u64)
            .map(|n| Client {
                mount: cluster.mount(),
                ledgers: promises::ledgers_from(n * WRITERS, WRITERS, rng.next()),
            })
            .collect();
        let archive = Archive::write(clients[0].mount.path(), "archive", 24, 40 << 20, rng.next());
        Storm {
            climate,
            rng,
            cluster,
            meta_disk,
            data_disks,
            clients,
            archive,
            faults: 0,
            flipped: None,
            draining: vec![],
        }
    }

    /// Rounds until there were this many faults; then the last reckoning.
    pub fn rage(&mut self, faults: u64) {
        while self.faults < faults {
            self.round();
        }
        self.reckon();
    }

    /// The cluster, for what a test wants to do besides.
    pub fn cluster(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    /// The test's folder.
    pub fn sandbox(&self) -> &Arc<Sandbox> {
        self.cluster.sandbox()
    }

    /// How many faults there were.
    pub fn faults(&self) -> u64 {
        self.faults
    }

    /// A round without faults.
    pub fn calm(&mut self) {
        let mut work = self.start_work();
        for _ in 0..10 {
            work.go_on(&mut self.rng);
        }
        self.end_work(work, None);
    }

    fn round(&mut self) {
        if self.climate.moves && self.rng.chance(1, 2) {
            self.make_move();
        }
        let mut work = self.start_work();
        work.go_on(&mut self.rng);
        let mut killed = None;
        if self.rng.chance(1, 7) {
            self.strike_all();
        } else {
            let chosen = self.choose();
            self.faults += chosen.len() as u64;
            println!("{} faults, now {chosen:?}", self.faults);
            for (who, fault) in &chosen {
                if let (Who::Client(n), Fault::Kill) = (who, fault) {
                    work.writers[*n].announce();
                    work.readers[*n].announce();
                    killed = Some(*n);
                }
                self.strike(*who, *fault);
            }
            self.last(&work);
            let mut healing = chosen;
            self.rng.shuffle(&mut healing);
            // A new client opens a session, which needs the service: it comes last.
            healing.sort_by_key(|healed| matches!(healed, (Who::Client(_), Fault::Kill)));
            for (who, fault) in healing {
                self.heal(who, fault);
            }
        }
        self.cluster.ready();
        work.go_on(&mut self.rng);
        self.end_work(work, killed);
        if let Some(n) = self.flipped.take() {
            self.scrub(n);
        }
    }

    fn start_work(&mut self) -> Work {
        let streams: Vec<_> =
            self.clients.iter().flat_map(|c| c.ledgers.iter().map(Ledger::stream)).collect();
        let mut work = Work { writers: vec![], readers: vec![] };
        for client in &mut self.clients {
            let ledgers = std::mem::take(&mut client.ledgers);
            work.writers.push(Writers::start(client.mount.path(), ledgers));
            let seed = self.rng.next();
            work.readers.push(Readers::start(client.mount.path(), &self.archive, &streams, READERS, seed));
        }
        work
    }

    /// Lets everybody end what he is at, and looks for what each was promised.
    fn end_work(&mut self, work: Work, killed: Option<usize>) {
        for (client, writers) in self.clients.iter_mut().zip(work.writers) {
            client.ledgers = writers.finish();
        }
        work.readers.into_iter().for_each(Readers::finish);
        for (n, client) in self.clients.iter_mut().enumerate() {
            let level = if killed == Some(n) { Level::Durable } else { Level::Told };
            promises::check(client.mount.path(), &mut client.ledgers, level);
        }
    }

    /// Some servers, perhaps the metadata service, perhaps a client.
    fn choose(&mut self) -> Vec<(Who, Fault)> {
        use Fault::{Cut, Kill, Power, Slow, Stop};
        let mut chosen = vec![];
        let most = self.climate.tolerated as u64;
        let mut servers: Vec<usize> = (0..self.cluster.data.len()).collect();
        for _ in 0..self.rng.range(u64::from(most > 0), most + 1) {
            let n = servers.swap_remove(self.rng.below(servers.len() as u64) as usize);
            chosen.push((Who::Data(n), *self.rng.pick(self.climate.data)));
        }
        if chosen.is_empty() || self.rng.chance(1, 3) {
            chosen.push((Who::Meta, *self.rng.pick(&[Kill, Stop, Cut, Slow, Power])));
        }
        if self.rng.chance(1, 4) {
            let n = self.rng.below(CLIENTS as u64) as usize;
            chosen.push((Who::Client(n), *self.rng.pick(&[Kill, Stop, Cut, Slow])));
        }
        // One disk at a time may have flipped bits.
        let mut flips = 0;
        for (_, fault) in &mut chosen {
            flips += u32::from(*fault == Fault::Flip);
            if *fault == Fault::Flip && flips > 1 {
                *fault = Kill;
            }
        }
        chosen
    }

    /// A moment of the clients' work, or of time where they cannot work.
    fn last(&mut self, work: &Work) {
        let (until, end) = (work.steps() + self.rng.range(1, 60), Instant::now() + HOLD);
        while work.steps() < until && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn strike(&mut self, who: Who, fault: Fault) {
        match (fault, who) {
            (Fault::Kill, Who::Meta) => self.cluster.meta.kill(),
            (Fault::Kill, Who::Data(n)) => self.cluster.data[n].kill(),
            (Fault::Kill, Who::Client(n)) => self.clients[n].mount.kill(),
            (Fault::Stop, who) => self.signal(who, libc::SIGSTOP),
            (Fault::Cut, who) => self.on_host(who, |host| host.cut()),
            (Fault::Slow, who) => {
                let rate = self.rng.range(300_000, 4_000_000);
                self.on_host(who, |host| host.limit(rate));
            }
            (Fault::Power, Who::Meta) => {
                self.cluster.meta.kill_soon();
                self.meta_disk.cut();
                self.cluster.meta.reap();
            }
            (Fault::Power, Who::Data(n)) => {
                self.cluster.data[n].kill_soon();
                self.data_disks[n].cut();
                self.cluster.data[n].reap();
            }
            (Fault::Fill, Who::Data(n)) => fill(self.data_disks[n].path()),
            (Fault::Flip, Who::Data(n)) => {
                let count = self.rng.range(1, 6);
                flip(&self.cluster.data_dir(n), count, &mut self.rng);
                self.flipped = Some(n);
            }
            (fault, who) => panic!("{fault:?} does not happen to {who:?}"),
        }
    }

    fn heal(&mut self, who: Who, fault: Fault) {
        match (fault, who) {
            (Fault::Kill, Who::Meta) => self.cluster.meta.start(),
            (Fault::Kill, Who::Data(n)) => self.cluster.data[n].start(),
            (Fault::Kill, Who::Client(n)) => self.replace_client(n),
            (Fault::Stop, who) => self.signal(who, libc::SIGCONT),
            (Fault::Cut, who) => self.on_host(who, |host| host.rejoin()),
            (Fault::Slow, who) => self.on_host(who, |host| host.unlimit()),
            (Fault::Power, Who::Meta) => {
                self.meta_disk.revive();
                self.cluster.meta.start();
            }
            (Fault::Power, Who::Data(n)) => {
                self.data_disks[n].revive();
                self.cluster.data[n].start();
            }
            (Fault::Fill, Who::Data(n)) => {
                fs::remove_file(self.data_disks[n].path().join(BALLAST)).expect("ballast can be removed");
            }
            (Fault::Flip, _) => {}
            (fault, who) => panic!("{fault:?} does not happen to {who:?}"),
        }
    }

    /// A new agent for a killed one, after somebody told the cluster that the old one will not come back.
    fn replace_client(&mut self, n: usize) {
        let path = self.clients[n].mount.path().to_string_lossy().into_owned();
        self.clients[n].mount.agent.start();
        eventually("the old session to be ended", || {
            let ran = self.cluster.torchfs(["sessions", "--json"]);
            if ran.code != Some(0) {
                return Err(ran.err);
            }
            let sessions: Value = serde_json::from_str(&ran.out).map_err(|e| e.to_string())?;
            let sessions = sessions["sessions"].as_array().cloned().unwrap_or_default();
            let new = i64::from(self.clients[n].mount.agent.pid());
            let old = sessions.iter().find(|s| s["mount"] == path.as_str() && s["pid"].as_i64() != Some(new));
            match old {
                None => Ok(()),
                Some(old) => {
                    self.cluster.torchfs(["sessions", "evict", &old["id"].to_string()]);
                    Err("just told".into())
                }
            }
        });
        self.clients[n].mount.wait();
    }

    /// Kills, or cuts the power of, every server at the same moment; they come back one after the other, in any order.
    fn strike_all(&mut self) {
        let power = self.rng.chance(1, 2);
        self.faults += 1 + self.cluster.data.len() as u64;
        self.cluster.meta.kill_soon();
        self.cluster.data.iter().for_each(crate::Proc::kill_soon);
        if power {
            self.meta_disk.cut();
            self.data_disks.iter().for_each(Disk::cut);
        }
        self.cluster.kill_all();
        if power {
            self.meta_disk.revive();
            self.data_disks.iter().for_each(Disk::revive);
        }
        let mut order: Vec<usize> = (0..=self.cluster.data.len()).collect();
        self.rng.shuffle(&mut order);
        println!("{} faults, now all at once (power {power}), back in the order {order:?}", self.faults);
        for n in order {
            match n.checked_sub(1) {
                None => self.cluster.meta.start(),
                Some(n) => self.cluster.data[n].start(),
            }
            std::thread::sleep(Duration::from_millis(self.rng.below(150)));
        }
    }

    fn signal(&self, who: Who, signal: i32) {
        match who {
            Who::Meta => self.cluster.meta.signal(signal),
            Who::Data(n) => self.cluster.data[n].signal(signal),
            Who::Client(n) => self.clients[n].mount.agent.signal(signal),
        }
    }

    fn on_host(&self, who: Who, act: impl FnOnce(&crate::netns::Host)) {
        act(match who {
            Who::Meta => self.cluster.meta_host(),
            Who::Data(n) => self.cluster.data_host(n),
            Who::Client(n) => self.clients[n].mount.host(),
        });
    }

    /// Begins to move groups, or takes it back.
    fn make_move(&mut self) {
        let servers = self.cluster.data.len();
        let mut moves = vec![Move::Rebalance];
        moves.extend(self.draining.iter().map(|n| Move::TakeBack(*n)));
        // So many have to stay that writing goes on while others suffer.
        if servers > self.climate.width + self.climate.tolerated + self.draining.len() {
            let stays = (0..servers).filter(|n| !self.draining.contains(n));
            moves.extend(stays.map(Move::Drain));
        }
        if servers < self.data_disks.len() {
            moves.extend([Move::Join; 2]);
        }
        let chosen = *self.rng.pick(&moves);
        println!("{} faults, and the operator: {chosen:?}", self.faults);
        let address = |n: usize| self.cluster.data_addresses()[n].clone();
        match chosen {
            Move::Rebalance => drop(self.cluster.torchfs(["rebalance", "--no-wait"]).ok()),
            Move::Drain(n) => {
                self.cluster.torchfs(["drain", &address(n), "--no-wait"]).ok();
                self.draining.push(n);
            }
            Move::TakeBack(n) => {
                self.cluster.torchfs(["drain", &address(n), "--stop"]).ok();
                self.draining.retain(|other| *other != n);
            }
            Move::Join => drop(self.cluster.add_server(&[])),
        }
    }

    /// Has a disk's flipped bits healed, as an operator would after a warning.
    fn scrub(&mut self, n: usize) {
        println!("scrub, for the disk of server {n}");
        let said = self.cluster.torchfs(["scrub", "--rate", "1GiB"]).ok();
        println!("{}", said.trim());
    }

    /// Everything, through a client that was never there before; and with full redundancy.
    fn reckon(&mut self) {
        for n in std::mem::take(&mut self.draining) {
            let address = self.cluster.data_addresses()[n].clone();
            self.cluster.torchfs(["drain", &address, "--stop"]).ok();
        }
        let fresh = self.cluster.mount();
        for client in &mut self.clients {
            promises::check(fresh.path(), &mut client.ledgers, Level::Told);
        }
        self.archive.check(fresh.path());
        let cluster = AssertUnwindSafe(&self.cluster);
        if let Err(panic) = catch_unwind(|| cluster.torchfs(["servers", "--wait"]).ok()) {
            println!("{}\n{}", cluster.torchfs(["servers"]).out, cluster.torchfs(["servers", "--json"]).out);
            println!("{}", cluster.torchfs(["fsck", "--data"]).out);
            resume_unwind(panic);
        }
        self.cluster.torchfs(["fsck", "--data"]).ok();
    }
}

impl Work {
    fn steps(&self) -> u64 {
        self.writers.iter().map(Writers::steps).sum()
    }

    /// Waits until every client that lives has done a little more.
    fn go_on(&mut self, rng: &mut Rng) {
        let more = rng.range(1, 12);
        for (writers, readers) in self.writers.iter().zip(&self.readers) {
            let (steps, reads) = (writers.steps() + more, readers.reads() + more);
            eventually("the clients to go on", || {
                let written = writers.steps() >= steps || !writers.working();
                let read = readers.reads() >= reads || !readers.working();
                let state =
                    || format!("{} of {steps} steps, {} of {reads} reads", writers.steps(), readers.reads());
                if written && read { Ok(()) } else { Err(state()) }
            });
        }
    }
}

const BALLAST: &str = "ballast";

/// Fills a disk up to the last byte.
pub fn fill(disk: &Path) {
    let mut at = 0;
    let file = File::create(disk.join(BALLAST)).expect("the disk takes one more file");
    for size in [64 << 20, 1 << 20, 64 << 10, 4096] {
        while sys::fallocate(&file, 0, at, size).is_ok() {
            at += size;
        }
    }
}

/// Flips single bits of what lies in a data server's segments, while the server runs.
pub fn flip(folder: &Path, count: u64, rng: &mut Rng) {
    let segments = files(folder, 64 << 10);
    if segments.is_empty() {
        return;
    }
    let mut left = count;
    for _ in 0..count * 400 {
        let path = rng.pick(&segments);
        let Ok(file) = File::options().read(true).write(true).open(path) else { continue };
        let len = file.metadata().map(|m| m.len()).unwrap_or(0);
        let at = rng.below(len.saturating_sub(64).max(1));
        let Ok(found) = sys::read_at(&file, at, 64) else { continue };
        // What was never written holds nothing that could break.
        if found.iter().all(|b| *b == 0) {
            continue;
        }
        file.write_all_at(&[found[0] ^ (1 << rng.below(8))], at).expect("a segment can be written");
        file.sync_all().expect("a segment can be synced");
        println!("flipped a bit of {} at byte {at}", path.display());
        left -= 1;
        if left == 0 {
            return;
        }
    }
}

/// The files of at least this size below a folder.
pub fn files(folder: &Path, least: u64) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.metadata() {
            Ok(meta) if meta.is_dir() => found.extend(files(&path, least)),
            Ok(meta) if meta.len() >= least => found.push(path),
            _ => {}
        }
    }
    found.sort();
    found
}
