//! Servers that are lost, come back, are emptied and join, one situation per test, as docs/operating.md describes them.
//!
//! The idea: an archive of known files is written, something happens, and everything reads back through a client that has
//! seen none of it. Whether the redundancy is really there is shown by losing the next servers.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use torchfs_tests::readers::Archive;
use torchfs_tests::{Cluster, Options, eventually};

/// A cluster whose timers are short enough to wait for.
fn cluster(servers: usize, redundancy: &str, out_after: &str) -> Cluster {
    Cluster::with(Options {
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
    })
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
