//! Two metadata servers on one PostgreSQL: the leader dies, sleeps or loses its database, and clients notice only the wait.
//!
//! The idea: the same writers as in `crash` record what they were told; whatever happens to the servers, all of it must be there,
//! and nothing twice.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use torchfs_tests::cluster::binary;
use torchfs_tests::powercut::Disk;
use torchfs_tests::promises::{self, Level, Writers};
use torchfs_tests::{
    Cluster, Database, Mount, Options, Proc, Rng, Sandbox, count, eventually, run, seed, sys,
};

use crate::suites;

const WRITERS: u64 = 3;

/// A cluster whose metadata is in a database.
struct Shared {
    cluster: Cluster,
    database: Database,
}

impl Shared {
    fn start(standbys: usize) -> Shared {
        Shared::with(Options { standbys, ..Options::default() })
    }

    fn with(options: Options) -> Shared {
        let sandbox = Sandbox::new();
        let database = Database::start(&sandbox);
        let url = database.create("torchfs");
        Shared { cluster: Cluster::inside(&sandbox, on(&url, options)), database }
    }

    /// What `torchfs meta status` says; `None` while nobody leads.
    fn status(&self) -> Option<Value> {
        let ran = self.cluster.torchfs(["meta", "status", "--json"]);
        if ran.code == Some(0) { serde_json::from_str(&ran.out).ok() } else { None }
    }

    /// Which server leads.
    fn leader(&self) -> usize {
        let addresses = self.cluster.meta_addresses();
        eventually("somebody to lead", || {
            let status = self.status().ok_or("nobody answers")?;
            let leader = status["leader"].as_str().unwrap_or_default();
            addresses.iter().position(|a| a == leader).ok_or(format!("{leader} is none of {addresses:?}"))
        })
    }

    fn server(&mut self, n: usize) -> &mut Proc {
        if n == 0 { &mut self.cluster.meta } else { &mut self.cluster.standbys[n - 1] }
    }

    /// Waits until every other server follows closely.
    fn followed(&self) {
        eventually("the standbys to follow", || {
            let status = self.status().ok_or("nobody leads")?;
            let standbys = status["standbys"].as_array().cloned().unwrap_or_default();
            let near = |s: &&Value| s["silent_ms"].as_u64() < Some(5000) && s["behind"].as_u64() < Some(1000);
            if standbys.iter().filter(near).count() == self.cluster.standbys.len() {
                Ok(())
            } else {
                Err(format!("{status}"))
            }
        });
    }
}

/// The same options for a cluster on this database.
fn on(url: &str, mut options: Options) -> Options {
    options.meta_args.extend(["--engine".into(), url.into()]);
    options
}

/// Lets the writers do some more steps.
fn let_work(writers: &Writers, steps: u64) {
    let until = writers.steps() + steps;
    eventually("the writers to go on", || {
        if writers.steps() >= until || !writers.working() {
            Ok(())
        } else {
            Err(format!("{} steps", writers.steps()))
        }
    });
}

/// How long a call through the mount takes that the service must answer.
fn answered(mount: &Mount, name: &str) -> Duration {
    let began = Instant::now();
    let file = File::create(mount.at(name)).unwrap();
    file.sync_all().unwrap();
    sys::close(file).unwrap();
    began.elapsed()
}

#[test]
fn kills_of_the_leader_lose_nothing_and_the_standby_serves() {
    let mut rng = Rng::new(seed(80));
    let mut shared = Shared::start(1);
    let mount = shared.cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut took = vec![];
    for round in 0..count(10, 50) {
        shared.followed();
        let leader = shared.leader();
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, rng.range(1, 25));
        shared.server(leader).kill();
        took.push(answered(&mount, &format!("after-{round}")));
        let_work(&writers, rng.range(1, 25));
        assert_ne!(shared.leader(), leader, "a dead server leads");
        shared.server(leader).start();
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    took.sort();
    println!("served again after: median {:?}, worst {:?}", took[took.len() / 2], took[took.len() - 1]);
    let fresh = shared.cluster.mount();
    promises::check(fresh.path(), &mut ledgers, Level::Told);
    shared.cluster.fsck();
}

#[test]
fn no_creation_is_lost_or_done_twice_over_takeovers() {
    // With as many names as `make soak` allows: a takeover does not take longer with more of them.
    let files = count(3_000, 200_000);
    let mut shared = Shared::start(1);
    shared.cluster.sandbox().allow(Duration::from_secs(if torchfs_tests::soak() { 7200 } else { 400 }));
    let mounts = [shared.cluster.mount(), shared.cluster.mount()];
    let (made, exist) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for (number, mount) in mounts.iter().enumerate() {
            let (made, exist) = (&made, &exist);
            let folder = mount.at(&format!("d{number}"));
            scope.spawn(move || {
                fs::create_dir(&folder).unwrap();
                for n in 0..files / 2 {
                    // Each name has one maker, so that a creation that is done twice finds the name taken.
                    let name = folder.join(format!("{n:07}"));
                    match File::options().write(true).create_new(true).open(name) {
                        Ok(_) => made.fetch_add(1, Ordering::Relaxed),
                        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                            exist.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(e) => panic!("{n}: {e}"),
                    };
                }
            });
        }
        let (made, shared) = (&made, &mut shared);
        scope.spawn(move || {
            let kills = 3;
            for kill in 1..=kills {
                let enough = || made.load(Ordering::Relaxed) >= files * kill / (kills + 1);
                while !enough() {
                    let before = made.load(Ordering::Relaxed);
                    eventually("creations", || {
                        if enough() || made.load(Ordering::Relaxed) > before {
                            Ok(())
                        } else {
                            Err("none".into())
                        }
                    });
                }
                let leader = shared.leader();
                shared.server(leader).kill();
                assert_ne!(shared.leader(), leader);
                shared.server(leader).start();
                shared.followed();
            }
        });
    });
    assert_eq!(exist.load(Ordering::Relaxed), 0, "creations were done twice");
    assert_eq!(made.load(Ordering::Relaxed), files / 2 * 2);
    for mount in &mounts {
        for folder in ["d0", "d1"] {
            let entries = fs::read_dir(mount.at(folder)).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            assert_eq!(names.len() as u64, files / 2);
            assert!(names.iter().enumerate().all(|(n, name)| *name == format!("{n:07}")));
        }
    }
    shared.cluster.fsck();
}

#[test]
fn a_leader_that_slept_commits_nothing_answers_nothing_stale_and_steps_down() {
    let mut rng = Rng::new(seed(81));
    let mut shared = Shared::start(1);
    let mount = shared.cluster.mount();
    let addresses = shared.cluster.meta_addresses();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    for round in 0..count(1, 10) {
        shared.followed();
        let old = shared.leader();
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, rng.range(1, 25));
        shared.server(old).signal(libc::SIGSTOP);
        let_work(&writers, rng.range(5, 25));
        let new = shared.leader();
        assert_ne!(new, old);
        fs::write(mount.at("newest"), round.to_string()).unwrap();
        shared.server(old).signal(libc::SIGCONT);
        // Asked alone and at once, it either says nothing or that it is no leader, but never what it knew.
        let mut ask = Command::new("timeout");
        ask.args(["3"]).arg(binary()).args(["sessions", "--json", "--meta", &addresses[old]]);
        let ran = run(ask.env("TORCHFS_SECRET_FILE", shared.cluster.sandbox().path("secret")));
        assert_ne!(ran.code, Some(0), "a leader that slept answered: {}", ran.out);
        let_work(&writers, rng.range(1, 25));
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
        assert_eq!(shared.leader(), new, "the one that slept leads again");
        shared.followed();
        assert!(shared.server(old).log().contains("leads no more"), "it stepped down without a word");
    }
    shared.cluster.fsck();
}

#[test]
fn locks_open_unlinked_files_and_sessions_survive_a_takeover() {
    let mut shared = Shared::start(1);
    let (one, two) = (shared.cluster.mount(), shared.cluster.mount());
    let bytes = Rng::new(82).bytes(100_000);
    fs::write(one.at("locked"), "x").unwrap();
    let locked = File::open(one.at("locked")).unwrap();
    sys::flock(&locked, libc::LOCK_EX).unwrap();
    let mut unlinked =
        File::options().create_new(true).read(true).write(true).open(one.at("unlinked")).unwrap();
    unlinked.write_all(&bytes).unwrap();
    unlinked.sync_all().unwrap();
    fs::remove_file(one.at("unlinked")).unwrap();
    let mut dirty = File::create(one.at("dirty")).unwrap();
    dirty.write_all(&bytes).unwrap();
    let sessions = |shared: &Shared| -> Vec<u64> {
        let list: Value = serde_json::from_str(&shared.cluster.torchfs(["sessions", "--json"]).ok()).unwrap();
        let list = list.as_array().cloned().or_else(|| list["sessions"].as_array().cloned()).unwrap();
        let mut ids: Vec<u64> =
            list.iter().filter_map(|s| s["session"].as_u64().or(s["id"].as_u64())).collect();
        ids.sort_unstable();
        ids
    };
    let before = sessions(&shared);
    assert_eq!(before.len(), 2);
    for round in 0..2 {
        shared.followed();
        let leader = shared.leader();
        shared.server(leader).kill();
        // A lock that is held stays held, for whoever asks.
        let other = File::open(two.at("locked")).unwrap();
        let refused = sys::flock(&other, libc::LOCK_EX | libc::LOCK_NB).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EWOULDBLOCK), "round {round}");
        let mut found = vec![0; bytes.len()];
        unlinked.read_exact_at(&mut found, 0).unwrap();
        assert!(found == bytes, "an unlinked file lost its bytes");
        assert_eq!(sessions(&shared), before);
        shared.server(leader).start();
    }
    unlinked.write_all_at(b"more", 0).unwrap();
    unlinked.sync_all().unwrap();
    sys::close(dirty).unwrap();
    let mut read = Vec::new();
    File::open(two.at("dirty")).unwrap().read_to_end(&mut read).unwrap();
    assert!(read == bytes);
    sys::flock(&locked, libc::LOCK_UN).unwrap();
    let other = File::open(two.at("locked")).unwrap();
    sys::flock(&other, libc::LOCK_EX).unwrap();
    drop(unlinked);
    shared.cluster.fsck();
}

#[test]
fn calls_wait_while_the_database_is_away_and_go_on_when_it_is_back() {
    let mut rng = Rng::new(seed(83));
    let mut shared = Shared::start(1);
    let mount = shared.cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    for how in ["connections cut", "paused", "stopped", "killed"] {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, rng.range(1, 25));
        match how {
            "connections cut" => shared.database.cut_connections("torchfs"),
            "paused" => {
                shared.database.signal_all(libc::SIGSTOP);
                std::thread::sleep(Duration::from_secs(4));
                shared.database.signal_all(libc::SIGCONT);
            }
            "stopped" => {
                shared.database.stop();
                std::thread::sleep(Duration::from_secs(4));
                shared.database.restart();
            }
            _ => {
                shared.database.kill();
                shared.database.restart();
            }
        }
        let_work(&writers, rng.range(5, 25));
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    let fresh = shared.cluster.mount();
    promises::check(fresh.path(), &mut ledgers, Level::Told);
    shared.cluster.fsck();
}

#[test]
fn commands_say_that_the_database_is_away_or_who_leads() {
    let shared = Shared::start(1);
    let leader = shared.leader();
    let addresses = shared.cluster.meta_addresses();
    let ran = shared.cluster.torchfs(["status", "--meta", &addresses[1 - leader]]);
    let leads = format!("{} leads", addresses[leader]);
    assert!(ran.code == Some(1) && ran.err.contains(&leads), "{}", ran.err);
    shared.database.signal_all(libc::SIGSTOP);
    eventually("status to name the database", || {
        let ran = shared.cluster.torchfs(["status", "--meta", &addresses[leader]]);
        if ran.code == Some(1) && ran.err.contains("database") { Ok(()) } else { Err(ran.err) }
    });
    shared.database.signal_all(libc::SIGCONT);
    shared.leader();
}

#[test]
fn the_death_of_the_databases_primary_loses_nothing_when_its_standby_is_promoted() {
    let mut rng = Rng::new(seed(84));
    let sandbox = Sandbox::new();
    let mut primary = Database::start(&sandbox);
    primary.create("torchfs");
    let standby = primary.make_standby("pg_standby");
    primary.wait_for_standby("pg_standby");
    let url = format!("postgres://postgres@{},{}/torchfs", primary.address(), standby.address());
    let cluster = Cluster::inside(&sandbox, on(&url, Options { standbys: 1, ..Options::default() }));
    let mount = cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let writers = Writers::start(mount.path(), ledgers);
    let_work(&writers, rng.range(10, 40));
    primary.kill();
    standby.promote();
    let_work(&writers, rng.range(10, 40));
    ledgers = writers.finish();
    promises::check(mount.path(), &mut ledgers, Level::Told);
    let fresh = cluster.mount();
    promises::check(fresh.path(), &mut ledgers, Level::Told);
    cluster.fsck();
}

#[test]
fn a_clean_stop_hands_the_lead_over_at_once_and_status_tells_who_has_it() {
    let mut shared = Shared::start(1);
    let mount = shared.cluster.mount();
    fs::write(mount.at("f"), "x").unwrap();
    shared.followed();
    let old = shared.leader();
    let before = shared.status().unwrap();
    assert_eq!(before["engine"].as_str(), Some("postgres"));
    assert!(before["durable"].as_u64() > Some(0) && before["since"].as_u64() > Some(0), "{before}");
    assert!(shared.cluster.torchfs(["meta", "status"]).ok().contains("leads cluster"));
    shared.server(old).stop();
    fs::write(mount.at("g"), "y").unwrap();
    let after = shared.status().unwrap();
    assert_ne!(after["leader"], before["leader"]);
    assert!(after["fence"].as_u64() > before["fence"].as_u64());
    assert!(after["incarnation"].as_u64() > before["incarnation"].as_u64());
    assert_eq!(after["cluster"], before["cluster"]);
    shared.server(old).start();
    shared.followed();
    assert_eq!(fs::read_to_string(mount.at("f")).unwrap(), "x");
    shared.cluster.fsck();
}

#[test]
fn a_metadata_server_without_its_folder_builds_its_replica_again() {
    let mut shared = Shared::start(0);
    let mount = shared.cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, seed(85));
    for _ in 0..2 {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, 20);
        shared.cluster.meta.kill();
        fs::remove_dir_all(shared.cluster.sandbox().path("meta")).unwrap();
        shared.cluster.restart();
        let_work(&writers, 20);
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    shared.cluster.fsck();
}

#[test]
fn kills_of_everything_but_the_database_keep_what_was_synced_or_closed() {
    let mut rng = Rng::new(seed(86));
    let mut shared =
        Shared::with(Options { session_term_ms: Some(2000), lease_term_ms: Some(500), ..Options::default() });
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut mount = shared.cluster.mount();
    for _ in 0..count(4, 50) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, rng.range(1, 25));
        writers.announce();
        mount.agent.kill_soon();
        shared.cluster.kill_all();
        mount.kill();
        ledgers = writers.finish();
        shared.cluster.restart();
        mount.start();
        promises::check(mount.path(), &mut ledgers, Level::Durable);
    }
    shared.cluster.fsck();
}

/// The database's machine too: what PostgreSQL had not synced is gone with all the rest.
#[test]
fn power_cuts_of_everything_and_the_database_keep_what_was_synced_or_closed() {
    let mut rng = Rng::new(seed(88));
    let sandbox = Sandbox::new();
    let (pg_disk, meta_disk) = (Disk::new(&sandbox, "disk-pg", 2048), Disk::new(&sandbox, "disk-meta", 2048));
    let data: Vec<Disk> = (0..3).map(|n| Disk::new(&sandbox, &format!("disk-{n}"), 2048)).collect();
    let mut database = Database::start_on(&sandbox, &pg_disk);
    let options = Options {
        session_term_ms: Some(2000),
        lease_term_ms: Some(500),
        meta_dir: Some(meta_disk.path().join("meta")),
        data_dirs: data.iter().map(|d| d.path().join("data")).collect(),
        data_args: vec!["--segment-size".into(), "64MiB".into()],
        ..Options::default()
    };
    let mut cluster = Cluster::inside(&sandbox, on(&database.create("torchfs"), options));
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut mount = cluster.mount();
    for _ in 0..count(4, 50) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, rng.range(1, 25));
        writers.announce();
        mount.agent.kill_soon();
        // Dead first, dark second: see `torchfs_tests::powercut`.
        database.kill_soon();
        cluster.meta.kill_soon();
        cluster.data.iter().for_each(Proc::kill_soon);
        let disks = || [&pg_disk, &meta_disk].into_iter().chain(&data);
        disks().for_each(Disk::cut);
        database.server.reap();
        cluster.kill_all();
        mount.kill();
        ledgers = writers.finish();
        disks().for_each(Disk::revive);
        database.restart();
        cluster.restart();
        mount.start();
        promises::check(mount.path(), &mut ledgers, Level::Durable);
    }
    cluster.fsck();
}

#[test]
fn pjdfstest_and_fsx_find_nothing_with_the_metadata_in_a_database() {
    let shared = Shared::start(0);
    let mount = shared.cluster.mount();
    let sandbox = shared.cluster.sandbox();
    // All of them in `make soak`; the families that change names and attributes otherwise.
    match torchfs_tests::soak() {
        true => suites::pjdfstest(sandbox, mount.path(), &[], 383),
        false => suites::pjdfstest(sandbox, mount.path(), &["rename", "unlink", "rmdir", "symlink"], 60),
    }
    suites::fsx(sandbox, &mount.at("f"), seed(87), count(3_000, 100_000));
    shared.cluster.fsck();
}

/// Private memory of a process, in bytes: what is mapped from files is the kernel's.
fn private_memory(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel counts it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Makes files until this many lie in the metadata and answers the most private memory that was seen meanwhile.
fn fill_and_watch(cluster: &Cluster, files: u64) -> u64 {
    let (pid, mut most, mut made) = (cluster.meta.pid(), 0, 0);
    while made < files {
        let ran = cluster.torchfs([
            "bench",
            "meta",
            "creates",
            "--clients",
            "16",
            "--time",
            "1s",
            "--keep",
            "--json",
        ]);
        let report: Value = serde_json::from_str(&ran.ok()).expect("JSON");
        made += report["count"].as_u64().expect("a count");
        most = most.max(private_memory(pid));
    }
    most
}

#[test]
fn the_memory_of_a_metadata_service_stays_within_its_bound_on_both_engines() {
    const BOUND: u64 = 24 << 20;
    let small =
        || Options { servers: 0, meta_args: vec!["--memory".into(), "24MiB".into()], ..Options::default() };
    // Ten times what fits: a file takes about 400 bytes and more in memory.
    let files = count(100_000, 500_000);
    let shared = Shared::with(small());
    // Beside the bound: the program, its threads' arenas, its sessions; and batches on their way to the database, as text too.
    for (cluster, base) in [(&Cluster::with(small()), 24 << 20), (&shared.cluster, 56 << 20)] {
        let most = fill_and_watch(cluster, files);
        assert!(most < base + BOUND, "{} MiB of private memory", most >> 20);
        cluster.fsck();
    }
}
