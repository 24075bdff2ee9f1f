//! Crashes: kill -9 and power cuts at random moments, full disks, and what they leave behind.
//!
//! The idea: writers record what they were told (see `torchfs_tests::promises`), something dies, and everything that was
//! promised is looked for. Between them the kill tests kill more than fifty times and the cut tests cut more than twenty
//! times in `make test`, hundreds of times in `make soak`.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torchfs_tests::powercut::Disk;
use torchfs_tests::promises::{self, Ledger, Level, Writers};
use torchfs_tests::{Cluster, Options, Rng, Sandbox, count, eventually, seed, sys};

const WRITERS: u64 = 3;

/// Lets the writers do some more steps: a random moment in their work, not in time.
fn let_work(writers: &Writers, rng: &mut Rng) {
    let until = writers.steps() + rng.range(1, 25);
    eventually("the writers to go on", || {
        if writers.steps() >= until || !writers.working() {
            Ok(())
        } else {
            Err(format!("{} steps", writers.steps()))
        }
    });
}

/// Checks through the given mount, then through a fresh one.
fn check_fresh(cluster: &Cluster, ledgers: &mut [Ledger], level: Level) {
    let fresh = cluster.mount();
    promises::check(fresh.path(), ledgers, level);
}

#[test]
fn kills_of_the_metadata_service_lose_nothing_a_living_client_was_told() {
    let mut rng = Rng::new(seed(40));
    let mut cluster = Cluster::start();
    let mount = cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    for _ in 0..count(14, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        cluster.meta.kill();
        cluster.restart();
        let_work(&writers, &mut rng);
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    check_fresh(&cluster, &mut ledgers, Level::Told);
    cluster.fsck();
}

#[test]
fn kills_of_data_servers_lose_nothing_a_living_client_was_told() {
    let mut rng = Rng::new(seed(41));
    let mut cluster = Cluster::start();
    let mount = cluster.mount();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    for _ in 0..count(14, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        let n = rng.below(cluster.data.len() as u64) as usize;
        cluster.data[n].kill();
        cluster.restart();
        let_work(&writers, &mut rng);
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    check_fresh(&cluster, &mut ledgers, Level::Told);
    cluster.fsck();
}

#[test]
fn kills_of_the_agent_keep_what_was_synced_or_closed() {
    let mut rng = Rng::new(seed(42));
    // What a dead agent held is freed at its session's end; the next one need not wait long for it.
    let cluster = Cluster::with(Options {
        session_term_ms: Some(2000),
        lease_term_ms: Some(500),
        ..Options::default()
    });
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut mount = cluster.mount();
    for _ in 0..count(14, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        writers.announce();
        mount.kill();
        ledgers = writers.finish();
        mount.start();
        promises::check(mount.path(), &mut ledgers, Level::Durable);
    }
    cluster.fsck();
}

#[test]
fn kills_of_everything_at_once_keep_what_was_synced_or_closed() {
    let mut rng = Rng::new(seed(43));
    let mut cluster = Cluster::with(Options {
        session_term_ms: Some(2000),
        lease_term_ms: Some(500),
        ..Options::default()
    });
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut mount = cluster.mount();
    for _ in 0..count(14, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        writers.announce();
        mount.agent.kill_soon();
        cluster.kill_all();
        mount.kill();
        ledgers = writers.finish();
        cluster.restart();
        mount.start();
        promises::check(mount.path(), &mut ledgers, Level::Durable);
    }
    cluster.fsck();
}

/// A cluster whose folders lie on disks whose power can be cut.
struct Machines {
    cluster: Cluster,
    meta: Disk,
    data: Vec<Disk>,
}

impl Machines {
    fn new() -> Machines {
        let sandbox = Sandbox::new();
        let meta = Disk::new(&sandbox, "disk-meta", 2048);
        let data: Vec<Disk> = (0..3).map(|n| Disk::new(&sandbox, &format!("disk-{n}"), 2048)).collect();
        let options = Options {
            session_term_ms: Some(2000),
            lease_term_ms: Some(500),
            meta_dir: Some(meta.path().join("meta")),
            data_dirs: data.iter().map(|d| d.path().join("data")).collect(),
            data_args: vec!["--segment-size".into(), "64MiB".into()],
            ..Options::default()
        };
        Machines { cluster: Cluster::inside(&sandbox, options), meta, data }
    }

    fn cut_all(&mut self) {
        // Dead first, dark second: see `torchfs_tests::powercut`.
        self.cluster.meta.kill_soon();
        self.cluster.data.iter().for_each(torchfs_tests::Proc::kill_soon);
        self.meta.cut();
        self.data.iter().for_each(Disk::cut);
        self.cluster.kill_all();
        self.meta.revive();
        self.data.iter().for_each(Disk::revive);
        self.cluster.restart();
    }

    fn cut_meta(&mut self) {
        self.cluster.meta.kill_soon();
        self.meta.cut();
        self.cluster.meta.reap();
        self.meta.revive();
        self.cluster.restart();
    }

    fn cut_data(&mut self, n: usize) {
        self.cluster.data[n].kill_soon();
        self.data[n].cut();
        self.cluster.data[n].reap();
        self.data[n].revive();
        self.cluster.restart();
    }
}

#[test]
fn a_cut_of_the_harness_loses_what_was_not_synced_and_nothing_else() {
    let sandbox = Sandbox::new();
    let disk = Disk::new(&sandbox, "disk", 64);
    let file = File::create(disk.path().join("synced")).unwrap();
    file.write_all_at(b"synced", 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    fs::write(disk.path().join("not synced"), "x").unwrap();
    disk.cut();
    disk.revive();
    assert_eq!(fs::read(disk.path().join("synced")).unwrap(), b"synced");
    assert!(!disk.path().join("not synced").exists(), "this cut would prove nothing");
}

#[test]
fn power_cuts_of_everything_keep_what_was_synced_or_closed() {
    let mut rng = Rng::new(seed(44));
    let mut machines = Machines::new();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mut mount = machines.cluster.mount();
    for _ in 0..count(12, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        writers.announce();
        mount.agent.kill_soon();
        machines.cut_all();
        mount.kill();
        ledgers = writers.finish();
        mount.start();
        promises::check(mount.path(), &mut ledgers, Level::Durable);
    }
    machines.cluster.fsck();
}

#[test]
fn power_cuts_of_one_server_lose_nothing_a_living_client_was_told() {
    let mut rng = Rng::new(seed(45));
    let mut machines = Machines::new();
    let mut ledgers = promises::ledgers(WRITERS, rng.next());
    let mount = machines.cluster.mount();
    for round in 0..count(10, 100) {
        let writers = Writers::start(mount.path(), ledgers);
        let_work(&writers, &mut rng);
        if round % 2 == 0 {
            machines.cut_meta();
        } else {
            machines.cut_data(rng.below(3) as usize);
        }
        let_work(&writers, &mut rng);
        ledgers = writers.finish();
        promises::check(mount.path(), &mut ledgers, Level::Told);
    }
    check_fresh(&machines.cluster, &mut ledgers, Level::Told);
    machines.cluster.fsck();
}

#[test]
fn names_that_nobody_synced_survive_as_a_prefix() {
    let mut rng = Rng::new(seed(46));
    let mut machines = Machines::new();
    for round in 0..count(3, 30) {
        let mut mount = machines.cluster.mount();
        let folder = mount.at(&format!("round-{round}"));
        fs::create_dir(&folder).unwrap();
        sys::sync_folder(&folder).unwrap();
        let many = rng.range(50, 400);
        for n in 0..many {
            File::create(folder.join(format!("{n:05}"))).unwrap();
        }
        mount.agent.kill_soon();
        machines.cut_all();
        mount.kill();
        mount.start();
        let mut names: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        let want: Vec<_> = (0..names.len()).map(|n| format!("{n:05}")).collect();
        assert_eq!(names, want, "a later name is there without an earlier one");
        mount.unmount(machines.cluster.client());
    }
    machines.cluster.fsck();
}

/// Writes files of 4 MiB until the disk is full; gives how many were taken.
fn fill(folder: &Path) -> (u64, std::io::Error) {
    let bytes = Rng::new(47).bytes(4 << 20);
    for n in 0..2000 {
        let write = || -> std::io::Result<()> {
            let mut file = File::create(folder.join(format!("fill-{n}")))?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            sys::close(file)
        };
        if let Err(error) = write() {
            return (n, error);
        }
    }
    panic!("8 GiB fitted on a small disk")
}

#[test]
fn a_full_data_disk_is_enospc_and_deletes_still_work() {
    let sandbox = Sandbox::new();
    let disk = Disk::new(&sandbox, "disk", 700);
    let options = Options {
        servers: 1,
        lease_term_ms: Some(300),
        session_term_ms: Some(2000),
        data_dirs: vec![disk.path().join("data")],
        data_args: vec!["--segment-size".into(), "32MiB".into()],
        ..Options::default()
    };
    let cluster = Cluster::inside(&sandbox, options);
    let mount = cluster.mount();
    let kept = Rng::new(48).bytes(3 << 20);
    fs::write(mount.at("kept"), &kept).unwrap();
    let (taken, error) = fill(mount.path());
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    assert!(taken > 10, "a disk of 700 MiB took only {taken} files of 4 MiB");
    assert!(fs::read(mount.at("kept")).unwrap() == kept, "a full disk changed a file");
    for n in 0..=taken {
        fs::remove_file(mount.at(&format!("fill-{n}"))).ok();
    }
    eventually("freed space to be usable", || {
        cluster.torchfs(["gc", "--timeout", "2s"]);
        let write = || -> std::io::Result<()> {
            let file = File::create(mount.at("again"))?;
            file.write_all_at(&kept, 0)?;
            file.sync_all()?;
            sys::close(file)
        };
        write().map_err(|e| e.to_string())
    });
    assert!(fs::read(mount.at("again")).unwrap() == kept);
    cluster.fsck();
}

#[test]
fn a_full_metadata_disk_is_enospc_and_deletes_still_work() {
    let sandbox = Sandbox::new();
    let disk = Disk::new(&sandbox, "disk", 700);
    let options = Options { meta_dir: Some(disk.path().join("meta")), ..Options::default() };
    let cluster = Cluster::inside(&sandbox, options);
    let mount = cluster.mount();
    fs::write(mount.at("kept"), "kept").unwrap();
    fs::create_dir(mount.at("d")).unwrap();
    for n in 0..200 {
        fs::write(mount.at(&format!("d/{n}")), "x").unwrap();
    }
    // Somebody else fills the disk up to the last byte.
    let ballast = disk.path().join("ballast");
    let mut file = File::create(&ballast).unwrap();
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
    file.sync_all().ok();
    drop(file);
    let mut made = 0u64;
    let error = loop {
        let made_one = File::create(mount.at(&format!("new-{made}"))).and_then(|f| {
            f.write_all_at(b"x", 0)?;
            f.sync_all()?;
            sys::close(f)
        });
        match made_one {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
        assert!(made < 200_000, "a full disk took {made} files");
    };
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    for n in 0..200 {
        fs::remove_file(mount.at(&format!("d/{n}")))
            .unwrap_or_else(|e| panic!("deleting on a full disk: {e}"));
    }
    fs::remove_dir(mount.at("d")).unwrap();
    assert_eq!(fs::read_to_string(mount.at("kept")).unwrap(), "kept");
    fs::remove_file(&ballast).unwrap();
    eventually("space to be seen again", || fs::write(mount.at("after"), "after").map_err(|e| e.to_string()));
    cluster.fsck();
}

#[test]
fn orphaned_blocks_are_collected_and_blocks_in_flight_never() {
    let cluster = Cluster::with(Options {
        session_term_ms: Some(1500),
        lease_term_ms: Some(300),
        ..Options::default()
    });
    let mut steady = cluster.mount();
    let before = blocks(&cluster);
    // Clients that die in the middle of writing leave blocks that nobody owns.
    for round in 0..3 {
        let mut dies = cluster.mount();
        let path = dies.at(&format!("dying-{round}"));
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let mut file = File::create(&path)?;
                let bytes = Rng::new(49).bytes(1 << 20);
                for _ in 0..400 {
                    file.write_all(&bytes)?;
                }
                Ok::<(), std::io::Error>(())
            });
            eventually("some blocks to be put", || {
                if writing.is_finished() || fs::metadata(&path).is_ok_and(|m| m.len() > 8 << 20) {
                    Ok(())
                } else {
                    Err("nothing yet".into())
                }
            });
            dies.kill();
            drop(writing.join());
        });
        // Meanwhile somebody else writes and `gc` runs: nothing of his may go.
        let file = File::create(steady.at(&format!("steady-{round}"))).unwrap();
        for piece in 0..8u64 {
            file.write_all_at(&Rng::new(piece).bytes(1 << 20), piece << 20).unwrap();
            cluster.torchfs(["gc", "--timeout", "2s"]);
        }
        sys::close(file).unwrap();
    }
    let fresh = cluster.mount();
    for round in 0..3 {
        let bytes = fs::read(fresh.at(&format!("steady-{round}"))).unwrap();
        for (piece, found) in bytes.chunks(1 << 20).enumerate() {
            assert!(found == Rng::new(piece as u64).bytes(1 << 20), "gc took a block in flight");
        }
    }
    for round in 0..3 {
        fs::remove_file(steady.at(&format!("steady-{round}"))).unwrap();
        fs::remove_file(steady.at(&format!("dying-{round}"))).ok();
    }
    drop(fresh);
    // Blocks that a living client put and did not name go with its session's ranges, not before.
    steady.unmount(cluster.client());
    eventually("blocks that nobody owns to be collected", || {
        cluster.torchfs(["gc", "--timeout", "2s"]);
        let now = blocks(&cluster);
        if now <= before { Ok(()) } else { Err(format!("{now} pieces, {before} at the beginning")) }
    });
    cluster.fsck();
}

/// How many pieces the data servers hold, owned or not.
fn blocks(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    let servers = status["servers"].as_array().expect("a list of servers");
    servers.iter().map(|s| s["pieces"].as_u64().expect("a server counts its pieces")).sum()
}
