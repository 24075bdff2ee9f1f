//! A data server's disks: one of several fails alone, an empty one takes its place, and what rots is healed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use torchfs_tests::powercut::Disk;
use torchfs_tests::{Cluster, Options, Rng, Sandbox, eventually, sys};

use crate::storage::find;

/// How many servers count as up.
fn living(cluster: &Cluster) -> usize {
    let status = cluster.status();
    let servers = status["servers"].as_array().expect("a list of servers");
    servers.iter().filter(|server| server["up"] == true).count()
}

/// How many segments a folder has.
fn segments(folder: &Path) -> usize {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with("segment-")).count()
}

#[test]
fn a_disk_fails_alone_and_an_empty_one_takes_its_place() {
    let sandbox = Sandbox::new();
    let mut disks = [Disk::new(&sandbox, "disk-a", 512), Disk::new(&sandbox, "disk-b", 512)];
    let cluster = Cluster::inside(
        &sandbox,
        Options { servers: 1, redundancy: Some("replicas:2".into()), ..Options::default() },
    );
    let mut two = cluster.client().process("data-two-disks", "data");
    for disk in &disks {
        two.args(["--dir".as_ref(), disk.path().as_os_str()]);
    }
    two.args(["--watch-every", "200ms", "--zone", "rack7"]).start();
    eventually("both servers", || match living(&cluster) {
        2 => Ok(()),
        n => Err(format!("{n} servers\n{}", two.log())),
    });

    let mount = cluster.mount();
    let content = |n: u64| Rng::new(900 + n).bytes(300_000 + 1000 * n as usize);
    let write = |range: std::ops::Range<u64>| {
        for n in range {
            fs::write(mount.at(&format!("f{n}")), content(n)).unwrap_or_else(|e| panic!("f{n}: {e}"));
        }
    };
    write(0..30);
    for disk in &disks {
        assert!(segments(disk.path()) > 0 && disk.path().join("server.toml").exists());
    }

    // The disk is gone while the server runs: nobody notices but the log.
    disks[1].cut();
    write(30..60);
    eventually("the failed disk to be named", || {
        let log = two.log();
        let named = log.contains("takes no changes any more") && log.contains("disk-b");
        if named { Ok(()) } else { Err(log) }
    });
    write(60..90);
    assert!(two.running(), "{}", two.log());
    let fresh = cluster.mount();
    for n in 0..90 {
        assert!(fs::read(fresh.at(&format!("f{n}"))).unwrap() == content(n), "f{n}");
    }

    // An empty disk in its place joins without a restart.
    disks[1].replace();
    eventually("the new disk to be used", || {
        if disks[1].path().join("server.toml").exists() && segments(disks[1].path()) > 0 {
            Ok(())
        } else {
            Err(two.log())
        }
    });
    write(90..120);
    eventually("both servers", || if living(&cluster) == 2 { Ok(()) } else { Err(two.log()) });

    // And the two are recognised together at the next start.
    two.kill();
    two.start();
    eventually("both servers", || if living(&cluster) == 2 { Ok(()) } else { Err(two.log()) });
    let fresh = cluster.mount();
    for n in 0..120 {
        assert!(fs::read(fresh.at(&format!("f{n}"))).unwrap() == content(n), "f{n}");
    }
    eventually("what was on the lost disk to be copied again", || {
        let ran = cluster.torchfs(["fsck"]);
        if ran.code == Some(0) { Ok(()) } else { Err(ran.out) }
    });
}

#[test]
fn a_disk_that_hangs_is_noticed_passed_over_and_used_again() {
    let sandbox = Sandbox::new();
    let disks: Vec<Disk> = (0..3).map(|n| Disk::new(&sandbox, &format!("disk-{n}"), 512)).collect();
    let cluster = Cluster::inside(
        &sandbox,
        Options {
            redundancy: Some("replicas:2".into()),
            data_dirs: disks.iter().map(|disk| disk.path().join("data")).collect(),
            data_args: ["--silent-after", "1s", "--watch-every", "200ms"].map(String::from).to_vec(),
            ..Options::default()
        },
    );
    let mount = cluster.mount();
    let content = |n: u64| Rng::new(500 + n).bytes(200_000 + 1000 * n as usize);
    let write = |range: std::ops::Range<u64>| {
        for n in range {
            let path = mount.at(&format!("f{n}"));
            fs::write(&path, content(n)).unwrap_or_else(|e| panic!("f{n}: {e}"));
            File::open(&path).and_then(|file| file.sync_all()).unwrap_or_else(|e| panic!("f{n}: {e}"));
        }
    };
    let check = |range: std::ops::Range<u64>| {
        let fresh = cluster.mount();
        for n in range {
            assert!(fs::read(fresh.at(&format!("f{n}"))).unwrap() == content(n), "f{n}");
        }
    };
    write(0..30);
    cluster.torchfs(["rebalance"]).ok();

    // Every write to it waits for ever. Its process goes on sending signs of life, and says what is wrong.
    disks[1].freeze();
    write(30..60);
    eventually("the disk to be missed", || {
        let said = cluster.torchfs(["servers"]).ok();
        let missed = said.contains("hangs: it has not answered for")
            && said.contains("disk-1")
            && said.contains("down");
        if missed { Ok(()) } else { Err(format!("{said}{}", cluster.data[1].log())) }
    });
    assert!(cluster.torchfs(["status"]).ok().contains("hangs"));
    assert_eq!(living(&cluster), 2);
    write(60..70);
    check(0..70);

    // It comes back, and with it everything that waited.
    disks[1].thaw();
    eventually("the disk to be used again", || match living(&cluster) {
        3 => Ok(()),
        _ => Err(format!("{}{}", cluster.torchfs(["servers"]).ok(), cluster.data[1].log())),
    });
    write(70..90);
    cluster.torchfs(["servers", "--wait"]).ok();
    check(0..90);
    eventually("every piece in its place", || match cluster.torchfs(["fsck", "--data"]) {
        ran if ran.code == Some(0) => Ok(()),
        ran => Err(ran.out),
    });
}

#[test]
fn a_flipped_bit_is_found_and_healed_without_being_asked() {
    let words = ["--scrub-rate", "1GiB", "--scrub-every", "1s", "--watch-every", "200ms"];
    let cluster = Cluster::with(Options {
        redundancy: Some("replicas:2".into()),
        data_args: words.map(String::from).to_vec(),
        ..Options::default()
    });
    let mount = cluster.mount();
    let bytes = Rng::new(77).bytes(6 << 20);
    fs::write(mount.at("f"), &bytes).unwrap();
    let at = 1_500_000;
    let print = &bytes[at..at + 64];
    let holds = |n: &usize| find(&cluster.data_dir(*n), print);
    let (n, (path, place)) = (0..3).find_map(|n| Some((n, holds(&n)?))).expect("some server has it");
    // While the server runs, as a platter does it.
    let segment = File::options().read(true).write(true).open(&path).unwrap();
    let byte = sys::read_at(&segment, place, 1).unwrap()[0];
    segment.write_all_at(&[byte ^ 64], place).unwrap();
    segment.sync_all().unwrap();
    eventually("the scrub to find it", || {
        let log = cluster.data[n].log();
        if log.contains("a piece is damaged") { Ok(()) } else { Err(log) }
    });
    eventually("a good copy to take its place", || {
        holds(&n).map(|_| ()).ok_or_else(|| format!("{}\n{}", cluster.data[n].log(), cluster.meta.log()))
    });
    cluster.fsck();
    assert!(fs::read(cluster.mount().at("f")).unwrap() == bytes);
}

#[test]
fn folders_of_two_servers_are_refused_with_a_sentence() {
    let cluster = Cluster::with(Options { servers: 2, ..Options::default() });
    let mut both: Command = cluster.client().command();
    both.arg("data");
    for n in 0..2 {
        both.arg("--dir").arg(cluster.data_dir(n));
    }
    let ran = torchfs_tests::shell::run(&mut both);
    assert_ne!(ran.code, Some(0));
    assert!(ran.err.contains("belongs to data server"), "{}", ran.err);
    let mut twice = cluster.client().command();
    twice.args(["data", "--dir", "/tmp/x", "--dir", "/tmp/x"]);
    let ran = torchfs_tests::shell::run(&mut twice);
    assert!(ran.err.contains("given twice"), "{}", ran.err);
}
