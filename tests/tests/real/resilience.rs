//! Servers that are lost, come back, are emptied and join, one situation per test, as docs/operating.md describes them.
//!
//! The idea: an archive of known files is written, something happens, and everything reads back through a client that has
//! seen none of it. Whether the redundancy is really there is shown by losing the next servers.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use torchfs_tests::readers::Archive;
use torchfs_tests::{Cluster, Mount, Options, Rng, eventually, sys};

use crate::storage::find;

/// A cluster whose timers are short enough to wait for.
fn cluster(servers: usize, redundancy: &str, out_after: &str) -> Cluster {
    Cluster::with(options(servers, redundancy, out_after))
}

fn options(servers: usize, redundancy: &str, out_after: &str) -> Options {
    Options {
        servers,
        redundancy: Some(redundancy.into()),
        lease_term_ms: Some(300),
        session_term_ms: Some(20_000),
        meta_args: ["--server-timeout-ms", "2500", "--out-after", out_after, "--repair-retry-ms", "500"]
            .map(String::from)
            .to_vec(),
        data_args: ["--segment-size", "32MiB"].map(String::from).to_vec(),
        mount_args: ["--cache-size", "8MiB"].map(String::from).to_vec(),
        ..Options::default()
    }
}

const NEVER: &str = "1h";

/// What `torchfs servers --json` says.
fn servers(cluster: &Cluster) -> Value {
    serde_json::from_str(&cluster.torchfs(["servers", "--json"]).ok()).expect("--json prints JSON")
}

/// One server as the cluster sees it, by its address.
fn server(cluster: &Cluster, n: usize) -> Value {
    let address = &cluster.data_addresses()[n];
    let all = servers(cluster);
    let found = all["servers"].as_array().expect("a list").iter().find(|s| s["addr"] == address.as_str());
    found.unwrap_or_else(|| panic!("{address} is not in {all}")).clone()
}

fn id(cluster: &Cluster, n: usize) -> String {
    server(cluster, n)["id"].to_string()
}

/// Waits until the cluster has noticed, so that the wait for repair which follows means something.
fn await_state(cluster: &Cluster, n: usize, state: &str) {
    eventually(&format!("server {n} to be {state}"), || {
        let now = server(cluster, n)["state"].as_str().unwrap_or_default().to_owned();
        if now == state { Ok(()) } else { Err(now) }
    });
}

/// Waits until every group has full redundancy, as an operator would.
fn await_repair(cluster: &Cluster) {
    cluster.torchfs(["servers", "--wait"]).ok();
}

/// Kills a server for good: its disk is gone too.
fn lose(cluster: &mut Cluster, n: usize) {
    cluster.data[n].kill();
    fs::remove_dir_all(cluster.data_dir(n)).unwrap();
}

/// Everything reads back through a client that was never there before.
fn check(cluster: &Cluster, archive: &Archive) {
    archive.check(cluster.mount().path());
}

#[test]
fn after_two_servers_are_lost_and_repaired_two_more_may_be_lost() {
    let mut cluster = cluster(9, "ec:4+2", "1s");
    let archive = Archive::write(cluster.mount().path(), "a", 12, 40 << 20, 1);
    for n in [0, 3] {
        lose(&mut cluster, n);
    }
    check(&cluster, &archive);
    for n in [0, 3] {
        await_state(&cluster, n, "out");
    }
    await_repair(&cluster);
    for n in [1, 6] {
        lose(&mut cluster, n);
    }
    check(&cluster, &archive);
}

#[test]
fn a_drained_server_is_empty_and_can_be_removed() {
    let mut cluster = cluster(4, "replicas:2", NEVER);
    let archive = Archive::write(cluster.mount().path(), "a", 12, 40 << 20, 4);
    let id = id(&cluster, 1);
    let refused = cluster.torchfs(["servers", "remove", &id]).fails();
    assert!(refused.contains("drain"), "a refusal must say what to do: {refused}");
    cluster.torchfs(["drain", &id]).ok();
    assert_eq!(server(&cluster, 1)["groups"], 0);
    cluster.torchfs(["servers", "remove", &id]).ok();
    lose(&mut cluster, 1);
    check(&cluster, &archive);
    let left = servers(&cluster)["servers"].as_array().unwrap().len();
    assert_eq!(left, 3, "a removed server is still listed");
    cluster.torchfs(["fsck", "--data"]).ok();
}

#[test]
fn a_server_that_comes_back_is_brought_up_to_date() {
    let mut cluster = cluster(3, "replicas:2", NEVER);
    let mount = cluster.mount();
    let before = Archive::write(mount.path(), "before", 8, 10 << 20, 5);
    cluster.data[0].kill();
    await_state(&cluster, 0, "down");
    let meanwhile = Archive::write(mount.path(), "meanwhile", 8, 20 << 20, 6);
    fs::remove_dir_all(mount.at("before")).unwrap();
    cluster.restart();
    await_state(&cluster, 0, "up");
    await_repair(&cluster);
    cluster.torchfs(["fsck", "--data"]).ok();
    for other in [1, 2] {
        cluster.data[other].kill();
        check(&cluster, &meanwhile);
        cluster.restart();
    }
    drop(before);
}

#[test]
fn a_new_server_gets_its_share() {
    let mut cluster = cluster(3, "replicas:2", NEVER);
    let archive = Archive::write(cluster.mount().path(), "a", 12, 48 << 20, 7);
    let new = cluster.add_server(&[]);
    cluster.torchfs(["rebalance"]).ok();
    eventually("the new server to hold a quarter or so", || {
        let all = servers(&cluster);
        let used = |s: &Value| s["used"].as_u64().unwrap_or(0);
        let total: u64 = all["servers"].as_array().unwrap().iter().map(used).sum();
        let share = used(&server(&cluster, new)) as f64 / total.max(1) as f64;
        if (0.15..0.35).contains(&share) { Ok(()) } else { Err(format!("{share:.2} of {total}")) }
    });
    check(&cluster, &archive);
    cluster.torchfs(["fsck", "--data"]).ok();
}

#[test]
fn writes_go_on_with_full_redundancy_while_a_server_is_down() {
    let mut cluster = cluster(4, "replicas:2", NEVER);
    let mount = cluster.mount();
    cluster.data[0].kill();
    let archive = Archive::write(mount.path(), "a", 12, 30 << 20, 8);
    // Two copies each on those that lived: any further one may go.
    for n in [1, 2, 3] {
        cluster.data[n].kill();
        check(&cluster, &archive);
        cluster.data[n].start();
        await_state(&cluster, n, "up");
    }
}

#[test]
fn moves_and_repair_go_on_over_restarts_of_everything() {
    let mut cluster = cluster(5, "ec:2+1", NEVER);
    let archive = Archive::write(cluster.mount().path(), "a", 12, 60 << 20, 10);
    let id = id(&cluster, 2);
    cluster.torchfs(["drain", &id, "--rate", "2MiB", "--no-wait"]).ok();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        cluster.kill_all();
        cluster.restart();
    }
    check(&cluster, &archive);
    cluster.torchfs(["drain", &id, "--rate", "0"]).ok();
    assert_eq!(server(&cluster, 2)["groups"], 0);
    check(&cluster, &archive);
    cluster.torchfs(["fsck", "--data"]).ok();
}

#[test]
fn top_names_the_client_that_is_busy() {
    let cluster = cluster(3, "replicas:2", NEVER);
    let mount = cluster.mount();
    let archive = Archive::write(mount.path(), "a", 4, 20 << 20, 12);
    let path = mount.path().to_string_lossy().into_owned();
    eventually("the writer to be seen", || {
        archive.check(mount.path());
        let said = cluster.torchfs(["top", "--once", "--json", "--interval", "200ms"]).ok();
        let top: Value = serde_json::from_str(&said).map_err(|e| e.to_string())?;
        let sessions = top["sessions"].as_array().cloned().unwrap_or_default();
        let own = sessions.iter().find(|s| s["mount"] == path.as_str());
        match own.and_then(|s| s["written_bytes"].as_u64()) {
            Some(bytes) if bytes >= 40 << 20 => Ok(()),
            _ => Err(said),
        }
    });
}

/// Writes and syncs; what comes back is the acknowledgement.
fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    sys::close(file)
}

/// Expects that a write which cannot have its redundancy is refused, after a wait, with an error that is no damage.
#[track_caller]
fn refused(mount: &Mount, name: &str, len: usize) {
    let error = write_synced(&mount.at(name), &Rng::new(len as u64).bytes(len))
        .expect_err("a write was acknowledged with less redundancy than it asks for");
    let code = error.raw_os_error();
    assert!([libc::EHOSTUNREACH, libc::ETIMEDOUT].contains(&code.unwrap_or(0)), "{name}: {error}");
    let log = mount.agent.log();
    assert!(log.contains("data servers"), "the log must say what is missing:\n{log}");
}

/// Every server but the ones that may be lost is killed; then nothing is acknowledged until they are back.
fn too_few(redundancy: &str, servers: usize, lost: &[usize]) {
    let mut cluster = Cluster::with(Options {
        mount_args: ["--cache-size", "8MiB", "--op-timeout", "3s"].map(String::from).to_vec(),
        ..options(servers, redundancy, "4s")
    });
    let mount = cluster.mount();
    let bytes = Rng::new(40).bytes(3 << 20);
    write_synced(&mount.at("before"), &bytes).unwrap();
    lost.iter().for_each(|n| cluster.data[*n].kill());
    // Nobody has noticed yet; then it is known; then the groups would move, if there were anywhere to go.
    refused(&mount, "at-once", 1 << 20);
    for state in ["down", "out"] {
        lost.iter().for_each(|n| await_state(&cluster, *n, state));
        refused(&mount, state, 1 << 20);
    }
    // What is made meanwhile gets no less.
    cluster.torchfs(["volume", "create", "late"]).ok();
    cluster.torchfs(["volume", "create", "later", "--redundancy", redundancy]).ok();
    let late = cluster.mount_volume(Some("late"));
    let later = cluster.mount_volume(Some("later"));
    refused(&late, "f", 1 << 20);
    refused(&later, "f", 1 << 20);
    // Nor after the service has forgotten who was there before.
    cluster.meta.kill();
    cluster.meta.start();
    refused(&cluster.mount(), "restarted", 1 << 20);
    assert!(fs::read(mount.at("before")).unwrap() == bytes);

    cluster.restart();
    for mount in [&mount, &late, &later] {
        eventually("writing to go on", || {
            write_synced(&mount.at("after"), &bytes).map_err(|error| error.to_string())
        });
    }
    await_repair(&cluster);
    cluster.torchfs(["fsck", "--data"]).ok();
    // As many as the redundancy tolerates may go again.
    cluster.data[servers - 1].kill();
    for volume in [None, Some("late"), Some("later")] {
        assert!(fs::read(cluster.mount_volume(volume).at("after")).unwrap() == bytes);
    }
}

#[test]
fn with_one_server_of_two_nothing_is_acknowledged_with_one_copy() {
    too_few("replicas:2", 2, &[0]);
}

#[test]
fn with_too_few_servers_nothing_is_acknowledged_with_fewer_pieces() {
    too_few("ec:2+2", 4, &[0, 1]);
}

#[test]
fn before_enough_servers_have_joined_writing_waits() {
    let mut cluster = Cluster::with(Options {
        mount_args: ["--op-timeout", "3s"].map(String::from).to_vec(),
        ..options(1, "replicas:2", NEVER)
    });
    let mount = cluster.mount();
    refused(&mount, "early", 1 << 20);
    let warnings = cluster.status()["warnings"].to_string();
    assert!(warnings.contains("writing waits until 2 data servers are up"), "{warnings}");
    let shown = cluster.torchfs(["volume", "show", "main"]).ok();
    assert!(shown.contains("writing waits"), "{shown}");
    cluster.add_server(&[]);
    let bytes = Rng::new(41).bytes(1 << 20);
    eventually("writing to go on", || {
        write_synced(&mount.at("f"), &bytes).map_err(|error| error.to_string())
    });
    let refused =
        cluster.torchfs(["policy", "set", &mount.path().to_string_lossy(), "--redundancy", "replicas:3"]);
    let said = refused.fails();
    assert!(said.contains("data servers") || mount.agent.log().contains("replicas:3 needs 3"), "{said}");
    cluster.data[0].kill();
    assert!(fs::read(cluster.mount().at("f")).unwrap() == bytes);
}

/// Flips a bit of each of these contents on the first server that has it; gives (server, content).
fn flip_each<'a>(cluster: &Cluster, contents: &[&'a [u8]]) -> Vec<(usize, &'a [u8])> {
    let mut flipped = Vec::new();
    for content in contents {
        let on = |n: usize| Some((n, find(&cluster.data_dir(n), content)?));
        let (n, (path, at)) = (0..cluster.data.len()).find_map(on).expect("some server has it");
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.write_all_at(&[content[0] ^ 4], at).unwrap();
        file.sync_all().unwrap();
        flipped.push((n, *content));
    }
    flipped
}

/// Bits rot in data that nobody reads; the command finds and heals all of them.
fn scrubbed(redundancy: &str, servers: usize) {
    let mut options = options(servers, redundancy, NEVER);
    // Nobody finds them before the command does.
    options.data_args.extend(["--scrub-rate", "0"].map(String::from));
    let mut cluster = Cluster::with(options);
    let files: Vec<Vec<u8>> = (0..6).map(|n| Rng::new(500 + n).bytes(1_500_000)).collect();
    {
        let mut mount = cluster.mount();
        for (n, bytes) in files.iter().enumerate() {
            fs::write(mount.at(&format!("f{n}")), bytes).unwrap();
        }
        mount.unmount(cluster.client());
    }
    cluster.torchfs(["fsck", "--data"]).ok();
    let prints: Vec<&[u8]> = files.iter().map(|bytes| &bytes[100_000..100_064]).collect();
    // Nobody reads them first: what a reader finds, a check among them, is healed at once and not counted here.
    let flipped = flip_each(&cluster, &prints);
    let said = cluster.torchfs(["scrub", "--json"]).ok();
    let report: Value = serde_json::from_str(&said).expect("--json prints JSON");
    assert_eq!(report["scrub"]["bad"], flipped.len(), "{said}");
    for (n, content) in &flipped {
        assert!(find(&cluster.data_dir(*n), content).is_some(), "server {n} has no good copy yet\n{said}");
    }
    cluster.torchfs(["fsck", "--data"]).ok();
    let said = cluster.torchfs(["scrub"]).ok();
    assert!(said.contains("0 bad pieces found"), "{said}");
    // Each of those that were damaged is needed now.
    for other in 0..servers {
        cluster.data[other].kill();
        let mount = cluster.mount();
        for (n, bytes) in files.iter().enumerate() {
            assert!(fs::read(mount.at(&format!("f{n}"))).unwrap() == *bytes, "f{n} without server {other}");
        }
        cluster.data[other].start();
        cluster.ready();
    }
    flip_each(&cluster, &prints);
    let problems = cluster.torchfs(["fsck", "--data"]);
    assert_ne!(problems.code, Some(0), "fsck --data must see the flipped bits: {}", problems.out);
}

#[test]
fn a_scrub_of_copies_says_what_it_found_and_heals_it() {
    scrubbed("replicas:2", 3);
}

#[test]
fn a_scrub_of_coded_pieces_says_what_it_found_and_heals_it() {
    scrubbed("ec:4+2", 6);
}
