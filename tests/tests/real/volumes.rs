//! Several volumes on one cluster: each with names, policies and a life of its own.

use std::fs;
use std::path::Path;

use serde_json::Value;
use torchfs_tests::{Cluster, Options, Rng, eventually};

/// What `torchfs volume show --json` says.
fn show(cluster: &Cluster, name: &str) -> Value {
    serde_json::from_str(&cluster.torchfs(["volume", "show", name, "--json"]).ok())
        .expect("--json prints JSON")
}

/// Bytes that pieces take on all servers.
fn used(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    let servers = status["servers"].as_array().cloned().unwrap_or_default();
    servers.iter().filter_map(|server| server["used"].as_u64()).sum()
}

fn text(seed: u64, len: usize) -> Vec<u8> {
    (0u64..).flat_map(|i| format!("epoch {seed} step {i} loss {}\n", i % 89).into_bytes()).take(len).collect()
}

#[track_caller]
fn check(folder: &Path, name: &str, bytes: &[u8]) {
    assert!(fs::read(folder.join(name)).unwrap() == bytes, "{name} has other bytes than were written");
}

#[test]
fn volumes_have_names_policies_and_a_life_of_their_own() {
    let mut cluster = Cluster::with(Options {
        servers: 4,
        lease_term_ms: Some(300),
        session_term_ms: Some(5_000),
        ..Options::default()
    });
    let create = |words: &[&str]| {
        cluster.torchfs(["volume", "create"].into_iter().chain(words.iter().copied())).ok();
    };
    create(&["coded", "--redundancy", "ec:2+1", "--block-size", "256KiB", "--compression", "none"]);
    create(&["packed", "--redundancy", "replicas:3", "--block-size", "16MiB", "--compression", "zstd"]);
    let words = text(1, 6 << 20);
    let noise = Rng::new(2).bytes(3 << 20);
    let names = [None, Some("coded"), Some("packed")];
    {
        let mut mounts = names.map(|name| cluster.mount_volume(name));
        for (n, mount) in mounts.iter().enumerate() {
            fs::create_dir(mount.at("d")).unwrap();
            fs::write(mount.at("d/same"), format!("of volume {n}")).unwrap();
            fs::write(mount.at("words"), &words).unwrap();
            fs::write(mount.at("noise"), &noise).unwrap();
        }
        for (n, mount) in mounts.iter().enumerate() {
            check(mount.path(), "d/same", format!("of volume {n}").as_bytes());
        }
        fs::remove_file(mounts[1].at("d/same")).unwrap();
        check(mounts[2].path(), "d/same", b"of volume 2");
        mounts.iter_mut().for_each(|mount| mount.unmount(cluster.client()));
    }
    let (coded, packed) = (show(&cluster, "coded"), show(&cluster, "packed"));
    assert_eq!(
        (coded["redundancy"].as_str(), coded["block_size"].as_u64()),
        (Some("ec:2+1"), Some(256 << 10))
    );
    assert_eq!(
        (packed["redundancy"].as_str(), packed["compression"].as_str()),
        (Some("replicas:3"), Some("zstd"))
    );
    let number = |volume: &Value, field: &str| volume[field].as_u64().unwrap_or_default();
    assert!(number(&coded, "blocks") >= 36, "9 MiB in blocks of 256 KiB: {coded}");
    assert!(number(&packed, "blocks") <= 4, "9 MiB in blocks of 16 MiB: {packed}");
    // ec:2+1 without compression is half as much again; three copies of what shrinks well are little more than the noise.
    assert!(
        (1.4..1.7).contains(&(number(&coded, "stored") as f64 / number(&coded, "bytes") as f64)),
        "{coded}"
    );
    assert!(number(&packed, "stored") < 3 * (noise.len() as u64 + (words.len() / 4) as u64), "{packed}");

    // One is removed: with a sentence while somebody uses it or it has files, and for good with --force.
    {
        let mut mount = cluster.mount_volume(Some("coded"));
        let busy = cluster.torchfs(["volume", "rm", "coded", "--force"]).fails();
        assert!(busy.contains("session"), "{busy}");
        mount.unmount(cluster.client());
    }
    let full = cluster.torchfs(["volume", "rm", "coded"]).fails();
    assert!(full.contains("--force"), "{full}");
    let before = eventually("the servers to report what they hold", || {
        let used = used(&cluster);
        if used >= 34_000_000 { Ok(used) } else { Err(format!("{used} bytes")) }
    });
    cluster.torchfs(["volume", "rm", "coded", "--force"]).ok();
    // From this moment on it is gone for everybody, also after a restart in the middle of it.
    gone(&cluster);
    cluster.meta.kill();
    cluster.meta.start();
    cluster.ready();
    gone(&cluster);
    eventually("the volume's last record to go", || {
        let ran = cluster.torchfs(["volume", "show", "coded"]);
        if ran.code == Some(0) { Err(ran.out) } else { Ok(()) }
    });
    eventually("the space to come back", || {
        let now = used(&cluster);
        let freed = before.saturating_sub(now);
        if freed >= 13 << 20 { Ok(()) } else { Err(format!("{before} bytes before, {now} now")) }
    });
    for (name, content) in [(None, "of volume 0"), (Some("packed"), "of volume 2")] {
        let mount = cluster.mount_volume(name);
        check(mount.path(), "words", &words);
        check(mount.path(), "noise", &noise);
        check(mount.path(), "d/same", content.as_bytes());
    }
    cluster.torchfs(["fsck", "--data"]).ok();
    // The name is free again and leads to a new, empty volume.
    cluster.torchfs(["volume", "create", "coded"]).ok();
    assert_eq!(fs::read_dir(cluster.mount_volume(Some("coded")).path()).unwrap().count(), 0);
}

/// A removed volume is shown as such or not at all, and nobody can mount it.
#[track_caller]
fn gone(cluster: &Cluster) {
    let shown = cluster.torchfs(["volume", "show", "coded"]);
    let said = format!("{}{}", shown.out, shown.err);
    let honest = said.contains("being removed") || said.contains("there is no volume");
    assert!(honest, "volume show hides that the volume is removed: {said}");
    let folder = cluster.sandbox().folder("refused");
    let mut mount = cluster.client().command();
    let refused = torchfs_tests::run(mount.arg("mount").arg("coded").arg(folder)).fails();
    assert!(refused.contains("there is no volume coded"), "{refused}");
    let again = cluster.torchfs(["volume", "set", "coded", "--compression", "lz4"]).fails();
    assert!(again.contains("there is no volume coded"), "{again}");
}
