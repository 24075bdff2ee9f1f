//! What lies on the servers' disks: corruption is an error and never wrong bytes; fsck names it; space comes back.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use torchfs_tests::{Cluster, Options, Rng, eventually, sys};

/// Where some bytes lie below a folder.
pub fn find(folder: &Path, bytes: &[u8]) -> Option<(PathBuf, u64)> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find(&path, bytes) {
                return Some(found);
            }
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        let mut window = vec![0; (1 << 20) + bytes.len()];
        let mut at = 0;
        loop {
            let read = file.read_at(&mut window, at).unwrap_or(0);
            if read < bytes.len() {
                break;
            }
            if let Some(inside) = window[..read].windows(bytes.len()).position(|w| w == bytes) {
                return Some((path, at + inside as u64));
            }
            at += 1 << 20;
        }
    }
    None
}

/// Flips one bit of a stored content; gives the number of the server that had it.
pub fn flip(cluster: &mut Cluster, content: &[u8]) -> usize {
    for n in 0..cluster.data.len() {
        if let Some((path, at)) = find(&cluster.data_dir(n), content) {
            cluster.data[n].stop();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let byte = sys::read_at(&file, at, 1).unwrap()[0];
            file.write_all_at(&[byte ^ 1], at).unwrap();
            file.sync_all().unwrap();
            cluster.restart();
            return n;
        }
    }
    panic!("the content is on no server")
}

#[test]
fn what_a_failed_fsync_lost_is_not_read_from_pages() {
    let args = ["--op-timeout", "3s"].map(String::from).to_vec();
    let cluster = Cluster::with(Options { mount_args: args, ..Options::default() });
    let mount = cluster.mount();
    fs::write(mount.at("f"), vec![b'1'; 100_000]).unwrap();
    let file = File::options().read(true).write(true).open(mount.at("f")).unwrap();
    cluster.data.iter().for_each(|server| server.signal(libc::SIGSTOP));
    file.write_all_at(&[b'2'; 100_000], 0).unwrap();
    let synced = file.sync_all();
    cluster.data.iter().for_each(|server| server.signal(libc::SIGCONT));
    assert!(synced.is_err());
    assert!(file.sync_all().is_err(), "an error of fsync must stay");
    assert!(fs::read(mount.at("f")).unwrap() == vec![b'1'; 100_000], "lost bytes are read");
}

#[test]
fn a_flipped_bit_is_an_error_that_names_block_and_server() {
    let mut cluster = Cluster::with(Options { redundancy: Some("replicas:1".into()), ..Options::default() });
    // What is flipped must not be on its way to another server.
    cluster.torchfs(["rebalance", "--auto", "off"]).ok();
    let bytes = Rng::new(60).bytes(2 << 20);
    {
        let mut mount = cluster.mount();
        fs::write(mount.at("f"), &bytes).unwrap();
        fs::write(mount.at("other"), "still here").unwrap();
        // On every server something follows: a piece of the last batch that is not whole counts as torn, not as damaged.
        fs::write(mount.at("later"), Rng::new(67).bytes(32 << 20)).unwrap();
        mount.unmount(cluster.client());
    }
    let at = 1_000_000;
    let server = flip(&mut cluster, &bytes[at..at + 64]);
    let mount = cluster.mount();
    let file = File::open(mount.at("f")).unwrap();
    let error = sys::read_at(&file, 983_040, 65_536).expect_err("a broken chunk must not be read");
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    // What is not broken is served.
    assert!(sys::read_at(&file, 0, 65_536).unwrap() == bytes[..65_536]);
    assert_eq!(fs::read_to_string(mount.at("other")).unwrap(), "still here");
    let address = &cluster.data_addresses()[server];
    eventually("the log to name block and server", || {
        let logs = format!("{}{}", mount.agent.log(), cluster.data[server].log());
        let line =
            logs.lines().find(|l| l.contains("block") && (l.contains("checksum") || l.contains("corrupt")));
        match line {
            Some(line) if logs.contains(address.as_str()) || line.contains("server") => Ok(()),
            _ => Err(logs),
        }
    });
}

#[test]
fn a_flipped_bit_in_one_copy_is_read_from_the_other() {
    let mut cluster = Cluster::with(Options { redundancy: Some("replicas:2".into()), ..Options::default() });
    let bytes = Rng::new(66).bytes(2 << 20);
    {
        let mut mount = cluster.mount();
        fs::write(mount.at("f"), &bytes).unwrap();
        mount.unmount(cluster.client());
    }
    for at in [70_000, 900_000, 1_500_000] {
        flip(&mut cluster, &bytes[at..at + 64]);
    }
    let mount = cluster.mount();
    assert!(fs::read(mount.at("f")).unwrap() == bytes, "wrong bytes were served");
}

#[test]
fn fsck_names_a_broken_block() {
    let mut cluster = Cluster::start();
    let bytes = Rng::new(61).bytes(300_000);
    {
        let mut mount = cluster.mount();
        fs::write(mount.at("broken"), &bytes).unwrap();
        mount.unmount(cluster.client());
    }
    cluster.fsck();
    flip(&mut cluster, &bytes[1000..1064]);
    let ran = cluster.torchfs(["fsck", "--data"]);
    let said = format!("{}{}", ran.out, ran.err);
    assert!(ran.code.is_some_and(|c| c != 0), "fsck must fail when something is wrong:\n{said}");
    assert!(said.contains("block"), "fsck must name the block:\n{said}");
}

#[test]
fn deleted_space_comes_back() {
    let cluster = Cluster::with(Options {
        lease_term_ms: Some(300),
        session_term_ms: Some(2000),
        ..Options::default()
    });
    let mount = cluster.mount();
    fs::write(mount.at("stays"), Rng::new(62).bytes(1 << 20)).unwrap();
    let before = used(&cluster);
    fs::write(mount.at("goes"), Rng::new(63).bytes(48 << 20)).unwrap();
    eventually("the written bytes to be counted", || {
        let now = used(&cluster);
        if now >= before + (40 << 20) { Ok(()) } else { Err(format!("{before} → {now}")) }
    });
    fs::remove_file(mount.at("goes")).unwrap();
    eventually("the space to come back", || {
        cluster.torchfs(["gc", "--timeout", "2s"]);
        let now = used(&cluster);
        if now <= before + (4 << 20) { Ok(()) } else { Err(format!("{before} → {now}")) }
    });
    assert_eq!(fs::read(mount.at("stays")).unwrap().len(), 1 << 20);
}

/// Bytes of blocks on all servers.
fn used(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    let servers = status["servers"].as_array().expect("a list of servers");
    servers.iter().map(|s| s["used"].as_u64().expect("a server counts its bytes")).sum()
}

#[test]
fn a_fragmented_file_is_compacted_and_keeps_its_bytes() {
    let cluster = Cluster::with(Options {
        // Long enough to be kept on a busy machine: a file is compacted under the right to write it.
        lease_term_ms: Some(2000),
        session_term_ms: Some(10_000),
        ..Options::default()
    });
    let mount = cluster.mount();
    let mut want = vec![0u8; 4 << 20];
    let mut rng = Rng::new(64);
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(mount.at("f")).unwrap();
    file.set_len(want.len() as u64).unwrap();
    for n in 0..600 {
        let at = (rng.below(1024) * 4096) as usize;
        let bytes = rng.bytes(4096);
        file.write_all_at(&bytes, at as u64).unwrap();
        want[at..at + 4096].copy_from_slice(&bytes);
        if n % 8 == 7 {
            file.sync_data().unwrap();
        }
    }
    sys::close(file).unwrap();
    let pieces = |c: &Cluster| c.status()["blocks"].as_u64().expect("status counts blocks");
    let before = pieces(&cluster);
    assert!(before > 20, "the file is not fragmented: {before} blocks");
    eventually("compaction", || {
        cluster.torchfs(["gc", "--timeout", "2s"]);
        let now = pieces(&cluster);
        if now <= before / 2 { Ok(()) } else { Err(format!("{before} → {now} blocks")) }
    });
    assert!(fs::read(mount.at("f")).unwrap() == want, "compaction changed the file");
    let fresh = cluster.mount();
    assert!(fs::read(fresh.at("f")).unwrap() == want, "compaction changed the file");
    cluster.fsck();
}

#[test]
fn a_file_is_striped_over_all_servers() {
    let cluster = Cluster::start();
    let mount = cluster.mount();
    fs::write(mount.at("f"), Rng::new(65).bytes(64 << 20)).unwrap();
    eventually("every server to hold a share", || {
        let status = cluster.status();
        let servers = status["servers"].as_array().expect("a list of servers").clone();
        let shares: Vec<u64> = servers.iter().filter_map(|s| s["used"].as_u64()).collect();
        if shares.len() == 3 && shares.iter().all(|s| *s > 4 << 20) {
            Ok(())
        } else {
            Err(format!("{shares:?}"))
        }
    });
}

#[test]
fn with_writeback_close_does_not_wait_and_fsync_keeps_its_word() {
    let options = Options { mount_args: vec!["--writeback".into()], ..Options::default() };
    let mut cluster = Cluster::with(Options { session_term_ms: Some(2000), ..options });
    let mut mount = cluster.mount();
    let bytes = Rng::new(64).bytes(100_000);
    fs::write(mount.at("synced"), &bytes).unwrap();
    File::open(mount.at("synced")).unwrap().sync_all().unwrap();
    // While nobody takes the data, a close that waited would never return.
    cluster.data.iter().for_each(|server| server.signal(libc::SIGSTOP));
    fs::write(mount.at("later"), &bytes).unwrap();
    cluster.data.iter().for_each(|server| server.signal(libc::SIGCONT));
    eventually("the closed file to be written back", || {
        let stored = cluster.status()["blocks"].as_u64();
        if stored >= Some(2) { Ok(()) } else { Err(format!("{stored:?} blocks")) }
    });
    mount.kill();
    cluster.kill_all();
    cluster.restart();
    let fresh = cluster.mount();
    assert!(fs::read(fresh.at("synced")).unwrap() == bytes, "what was synced is lost");
}
