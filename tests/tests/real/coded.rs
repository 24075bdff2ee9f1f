//! Erasure-coded volumes: any two servers of ec:4+2 may be gone, and reading and writing go on.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torchfs_tests::{Cluster, Options, Rng, eventually};

use crate::storage::find;

fn cluster(servers: usize, mount_args: &[&str]) -> Cluster {
    Cluster::with(Options {
        servers,
        redundancy: Some("ec:4+2".into()),
        meta_args: ["--repair-retry-ms", "500"].map(String::from).to_vec(),
        mount_args: mount_args.iter().map(|arg| (*arg).to_owned()).collect(),
        ..Options::default()
    })
}

/// Every block has all its pieces again, and each of them is whole.
fn check_pieces(cluster: &Cluster) {
    cluster.torchfs(["servers", "--wait"]).ok();
    cluster.torchfs(["fsck", "--data"]).ok();
}

/// Files of every size around the borders: inline, copied, coded, several blocks; with and without what shrinks.
fn contents(seed: u64) -> Vec<(String, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let sizes = [1, 400, 4_096, 100_000, 262_143, 262_144, 1 << 20, (4 << 20) + 1, 13_000_000];
    let mut files = Vec::new();
    for size in sizes {
        files.push((format!("noise-{seed}-{size}"), rng.bytes(size)));
        let line = |i: usize| format!("seed {seed} step {i} loss {}\n", i % 97).into_bytes();
        files.push((format!("text-{seed}-{size}"), (0..).flat_map(line).take(size).collect()));
    }
    files
}

fn write_all(folder: &Path, files: &[(String, Vec<u8>)]) {
    for (name, bytes) in files {
        let mut file = File::create(folder.join(name)).unwrap();
        file.write_all(bytes).unwrap();
        file.sync_all().unwrap();
    }
}

#[track_caller]
fn check_all(folder: &Path, files: &[(String, Vec<u8>)]) {
    for (name, bytes) in files {
        let read = fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(read == *bytes, "{name} has other bytes than were written");
    }
}

#[test]
fn erasure_coded_files_survive_the_loss_of_any_two_servers() {
    let mut cluster = cluster(6, &[]);
    let files = contents(70);
    write_all(cluster.mount().path(), &files);
    assert_eq!(cluster.status()["redundancy"], "ec:4+2");
    for (one, other) in [(0, 1), (1, 4), (2, 3), (3, 5)] {
        cluster.data[one].kill();
        cluster.data[other].kill();
        // A new mount: nothing comes from a cache.
        check_all(cluster.mount().path(), &files);
        cluster.restart();
    }
    check_all(cluster.mount().path(), &files);
    check_pieces(&cluster);
}

#[test]
fn writing_goes_on_with_substitutes_while_two_servers_are_down() {
    let mut cluster = cluster(8, &[]);
    let before = contents(71);
    let mount = cluster.mount();
    write_all(mount.path(), &before);
    cluster.data[2].kill();
    cluster.data[5].kill();
    let during = contents(72);
    write_all(mount.path(), &during);
    check_all(mount.path(), &before);
    drop(mount);
    cluster.restart();
    // Full redundancy: two others may go, and what was written meanwhile is there.
    cluster.data[0].kill();
    cluster.data[7].kill();
    let mount = cluster.mount();
    check_all(mount.path(), &during);
    check_all(mount.path(), &before);
    drop(mount);
    cluster.restart();
    check_pieces(&cluster);
}

#[test]
fn with_too_few_servers_writing_waits_and_then_names_those_it_misses() {
    let mut cluster = cluster(7, &["--op-timeout", "4s"]);
    let files = contents(73);
    let mount = cluster.mount();
    write_all(mount.path(), &files);
    cluster.data[0].kill();
    cluster.data[3].kill();
    let error = File::create(mount.at("late"))
        .and_then(|mut file| {
            file.write_all(&files[0].1)?;
            file.write_all(&Rng::new(5).bytes(1 << 20))?;
            file.sync_all()
        })
        .expect_err("five servers are too few for six pieces");
    assert!(error.raw_os_error().is_some_and(|e| e != libc::EIO), "{error}");
    check_all(mount.path(), &files);
    let addresses = cluster.data_addresses();
    eventually("the log to name those who are missing", || {
        let log = mount.agent.log();
        let line = log.lines().find(|line| line.contains("needs 6 data servers"));
        match line {
            Some(line) if line.contains(&addresses[0]) || line.contains(&addresses[3]) => Ok(()),
            _ => Err(log),
        }
    });
    cluster.restart();
    fs::write(mount.at("late"), &files[5].1).unwrap();
    assert!(fs::read(mount.at("late")).unwrap() == files[5].1);
    check_pieces(&cluster);
}

#[test]
fn flipped_bits_in_coded_pieces_are_not_noticed_by_readers_and_heal() {
    let cluster = cluster(6, &[]);
    let bytes = Rng::new(74).bytes(3 << 20);
    fs::write(cluster.mount().at("f"), &bytes).unwrap();
    // One in each of two data pieces of the block, as many as may be lost, while the servers run.
    let prints = [&bytes[200_000..200_064], &bytes[2_500_000..2_500_064]];
    let mut flipped = Vec::new();
    for print in prints {
        let on = |n: usize| Some((n, find(&cluster.data_dir(n), print)?));
        let (n, (path, at)) = (0..6).find_map(on).expect("some server has it");
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(&[print[0] ^ 16], at).unwrap();
        file.sync_all().unwrap();
        flipped.push((n, print));
    }
    assert_ne!(flipped[0].0, flipped[1].0, "two data pieces are on two servers");
    assert!(fs::read(cluster.mount().at("f")).unwrap() == bytes, "wrong bytes were served");
    for (n, print) in flipped {
        eventually("what the reader told of to be made again", || {
            find(&cluster.data_dir(n), print).map(drop).ok_or_else(|| cluster.data[n].log())
        });
    }
    check_pieces(&cluster);
}
