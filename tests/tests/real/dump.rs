//! Dumps of the metadata: made while the cluster works, loaded into an empty folder, kept on the data servers, and taken
//! from there when the metadata's disk is gone.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use torchfs_tests::{Cluster, Database, Mount, Options, Rng, Sandbox, eventually};

fn options() -> Options {
    Options {
        lease_term_ms: Some(300),
        session_term_ms: Some(2_000),
        redundancy: Some("replicas:2".into()),
        ..Options::default()
    }
}

/// Says how often dumps are made, from the next start on.
fn dump_every(sandbox: &Sandbox, span: &str) {
    fs::write(sandbox.path("torchfs.toml"), format!("[meta]\ndump-every = \"{span}\"\n")).unwrap();
}

/// A cluster with dumps as often as a test can wait for.
fn cluster_with_dumps() -> Cluster {
    let sandbox = Sandbox::new();
    dump_every(&sandbox, "1s");
    Cluster::inside(&sandbox, options())
}

/// The content of a file of this number.
fn content(n: u64) -> Vec<u8> {
    Rng::new(900 + n).bytes(30_000 + 1_000 * n as usize)
}

fn write(mount: &Mount, from: u64, to: u64) {
    for n in from..to {
        fs::write(mount.at(&format!("f{n}")), content(n)).unwrap();
    }
}

fn check(mount: &Mount, from: u64, to: u64) {
    for n in from..to {
        assert!(fs::read(mount.at(&format!("f{n}"))).unwrap() == content(n), "f{n} has other bytes");
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("--json prints JSON")
}

/// Waits until a dump that was begun after this moment is complete.
fn wait_for_dump(cluster: &Cluster) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    eventually("a later dump", || {
        let dumps = &cluster.status()["dumps"];
        match dumps["newest_unix_s"].as_u64() {
            Some(made) if made > now => Ok(()),
            _ => Err(dumps.to_string()),
        }
    });
}

/// Pieces on all servers.
fn pieces(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    let servers = status["servers"].as_array().cloned().unwrap_or_default();
    servers.iter().filter_map(|server| server["pieces"].as_u64()).sum()
}

fn incarnation(cluster: &Cluster) -> u64 {
    cluster.status()["incarnation"].as_u64().unwrap()
}

#[test]
fn a_dump_made_under_load_is_loaded_into_an_empty_folder() {
    let mut cluster = Cluster::with(options());
    let sandbox = cluster.sandbox().clone();
    let file = sandbox.path("meta.dump");
    let file = file.to_str().unwrap();
    let before = incarnation(&cluster);
    {
        let mut mount = cluster.mount();
        write(&mount, 0, 20);
        fs::create_dir(mount.at("folder")).unwrap();
        fs::hard_link(mount.at("f3"), mount.at("folder/linked")).unwrap();
        // Others make, rename and remove names while the dump is made.
        let path = mount.path().to_owned();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = stop.clone();
        let load = std::thread::spawn(move || {
            let mut n = 0u64;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let name = path.join(format!("busy{}", n % 50));
                fs::write(&name, [n as u8; 100]).unwrap();
                fs::rename(&name, path.join(format!("renamed{}", n % 30))).unwrap();
                n += 1;
            }
        });
        let mut dumps = 0;
        while dumps < 3 {
            let said = json(&cluster.torchfs(["meta", "dump", file, "--json"]).ok());
            assert!(said["changes"].as_u64() > Some(100), "{said}");
            assert_eq!(said["bytes"].as_u64(), fs::metadata(file).ok().map(|m| m.len()));
            dumps += 1;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        load.join().unwrap();
        mount.unmount(cluster.client());
    }
    // Into the same place, as after the loss of the disk.
    cluster.meta.stop();
    let folder = sandbox.path("meta");
    let said = cluster.torchfs(["meta", "load", file, "--dir", folder.to_str().unwrap()]);
    assert!(said.code != Some(0) && said.err.contains("holds metadata already"), "{}", said.err);
    fs::rename(&folder, sandbox.path("meta-before")).unwrap();
    let said = cluster.torchfs(["meta", "load", file, "--dir", folder.to_str().unwrap()]).ok();
    assert!(said.contains("torchfs fsck"), "it says what to do next: {said}");
    cluster.restart();
    let after = incarnation(&cluster);
    assert!(after > before + 60_000, "incarnation {before} became {after}");
    let mut mount = cluster.mount();
    check(&mount, 0, 20);
    assert!(fs::read(mount.at("folder/linked")).unwrap() == content(3));
    write(&mount, 20, 30);
    check(&mount, 20, 30);
    cluster.torchfs(["gc"]).ok();
    mount.unmount(cluster.client());
    // Only blocks that were freed after the dump may be missed, and those are named.
    let ran = cluster.torchfs(["fsck", "--json"]);
    let problems = json(&ran.out)["problems"].as_array().cloned().unwrap();
    assert!(problems.iter().all(|p| p.as_str().is_some_and(|p| p.contains("is missing"))), "{problems:?}");
}

#[test]
fn a_dump_of_a_stopped_folder_is_the_same_and_damage_is_refused() {
    let mut cluster = Cluster::with(options());
    let sandbox = cluster.sandbox().clone();
    let path = |name: &str| sandbox.path(name).to_str().unwrap().to_owned();
    {
        let mut mount = cluster.mount();
        write(&mount, 0, 5);
        mount.unmount(cluster.client());
    }
    let (online, offline) = (path("online.dump"), path("offline.dump"));
    cluster.torchfs(["meta", "dump", &online]).ok();
    let refused = cluster.torchfs(["meta", "dump", &offline, "--dir", &path("meta")]);
    assert!(refused.code != Some(0) && refused.err.contains("in use by another process"), "{}", refused.err);
    assert!(!Path::new(&offline).exists());
    cluster.meta.stop();
    cluster.torchfs(["meta", "dump", &offline, "--dir", &path("meta")]).ok();

    let bytes = fs::read(&online).unwrap();
    let load = |name: &str, bytes: &[u8]| {
        let file = path(name);
        fs::write(&file, bytes).unwrap();
        let ran = cluster.torchfs(["meta", "load", &file, "--dir", &path("elsewhere")]);
        (ran.code, ran.err)
    };
    let (code, said) = load("short.dump", &bytes[..bytes.len() - 10]);
    assert!(code == Some(1) && said.contains("cut off"), "{said}");
    let mut broken = bytes.clone();
    broken[bytes.len() / 2] ^= 4;
    let (code, said) = load("broken.dump", &broken);
    assert!(code == Some(1) && said.contains("damaged"), "{said}");
    let mut later = bytes.clone();
    later[8] = 9;
    let (code, said) = load("later.dump", &later);
    assert!(code == Some(1) && said.contains("version 9"), "{said}");
    let (code, said) = load(
        "other.dump",
        b"something else altogether, and longer than a header would be, if it were one, which it is not",
    );
    assert!(code == Some(1) && said.contains("does not begin as a dump"), "{said}");
    assert!(!Path::new(&path("elsewhere")).join("engine.id").exists(), "nothing is made from a broken dump");

    // The one made offline brings everything back.
    fs::rename(path("meta"), path("meta-before")).unwrap();
    cluster.torchfs(["meta", "load", &offline, "--dir", &path("meta")]).ok();
    cluster.restart();
    let mount = cluster.mount();
    check(&mount, 0, 5);
    drop(mount);
    cluster.torchfs(["gc"]).ok();
    cluster.fsck();
}

#[test]
fn a_cluster_whose_metadata_folder_is_gone_comes_back_from_its_data_servers() {
    let mut cluster = cluster_with_dumps();
    let sandbox = cluster.sandbox().clone();
    let folder = sandbox.path("meta");
    let mut mount = cluster.mount();
    write(&mount, 0, 20);
    wait_for_dump(&cluster);
    let (known, before) = (pieces(&cluster), incarnation(&cluster));
    // From now on no more dumps: what follows is lost.
    cluster.meta.stop();
    dump_every(&sandbox, "0");
    cluster.restart();
    write(&mount, 20, 30);
    mount.unmount(cluster.client());
    eventually("the servers to report", || match pieces(&cluster) {
        n if n >= known + 10 => Ok(()),
        n => Err(format!("{n} pieces")),
    });

    cluster.meta.stop();
    fs::remove_dir_all(&folder).unwrap();
    let servers = cluster.data_addresses().join(",");
    let dir = folder.to_str().unwrap();
    let listed = json(&cluster.torchfs(["meta", "recover", "--list", "--data", &servers, "--json"]).ok());
    let dumps = listed["dumps"].as_array().cloned().unwrap();
    assert!(!dumps.is_empty() && dumps.len() <= 48, "{listed}");
    assert_eq!(dumps[0]["servers"].as_array().map(Vec::len), Some(3), "{listed}");
    let said = json(&cluster.torchfs(["meta", "recover", "--dir", dir, "--data", &servers, "--json"]).ok());
    assert_eq!(said["dump"], dumps[0]["name"]);
    assert!(!folder.join("recover.dump").exists(), "the fetched copy is left behind");
    let again = cluster.torchfs(["meta", "recover", "--dir", dir, "--data", &servers]);
    assert!(again.code == Some(1) && again.err.contains("holds metadata already"), "{}", again.err);

    cluster.restart();
    let after = incarnation(&cluster);
    assert!(after > before + 60_000, "incarnation {before} became {after}");
    let mut mount = cluster.mount();
    check(&mount, 0, 20);
    for n in 20..30 {
        assert!(!mount.at(&format!("f{n}")).exists(), "f{n} was written after the dump");
    }
    // What was written after the dump is collected, and nothing else is.
    cluster.torchfs(["gc"]).ok();
    eventually("unknown blocks to go", || match pieces(&cluster) {
        n if n <= known => Ok(()),
        n => Err(format!("{n} pieces, {known} are known")),
    });
    write(&mount, 30, 40);
    check(&mount, 0, 20);
    check(&mount, 30, 40);
    mount.unmount(cluster.client());
    cluster.fsck();
}

#[test]
fn what_moved_to_other_servers_after_a_dump_is_read_after_its_load() {
    let mut cluster = Cluster::with(Options { redundancy: Some("replicas:1".into()), ..options() });
    let sandbox = cluster.sandbox().clone();
    let (folder, dump) = (sandbox.path("meta"), sandbox.path("d.dump"));
    let (dir, file) = (folder.to_str().unwrap(), dump.to_str().unwrap());
    let mut mount = cluster.mount();
    write(&mount, 0, 20);
    mount.unmount(cluster.client());
    cluster.torchfs(["meta", "dump", file]).ok();
    // Nothing is left on the server that the dump names.
    let held = |cluster: &Cluster| cluster.status()["servers"][0]["pieces"].as_u64().unwrap();
    eventually("a server with pieces", || match held(&cluster) {
        0 => Err("it has none".into()),
        _ => Ok(()),
    });
    let id = cluster.status()["servers"][0]["id"].as_u64().unwrap().to_string();
    cluster.torchfs(["drain", &id]).ok();
    eventually("the server to be empty", || match held(&cluster) {
        0 => Ok(()),
        n => Err(format!("{n} pieces")),
    });
    cluster.meta.stop();
    fs::rename(&folder, sandbox.path("meta-before")).unwrap();
    cluster.torchfs(["meta", "load", file, "--dir", dir]).ok();
    cluster.restart();
    cluster.torchfs(["gc"]).ok();
    let mut mount = cluster.mount();
    check(&mount, 0, 20);
    mount.unmount(cluster.client());
    eventually("a clean check", || match cluster.torchfs(["fsck", "--data"]) {
        ran if ran.code == Some(0) => Ok(()),
        ran => Err(ran.out),
    });
}

#[test]
fn a_mount_from_before_a_recovery_is_refused_and_mounts_again() {
    let mut cluster = Cluster::with(Options {
        mount_args: ["--op-timeout", "20s"].map(String::from).to_vec(),
        ..options()
    });
    let sandbox = cluster.sandbox().clone();
    let folder = sandbox.path("meta");
    let dump = sandbox.path("d.dump");
    let (dir, file) = (folder.to_str().unwrap(), dump.to_str().unwrap());
    cluster.torchfs(["meta", "dump", file]).ok();
    // Its session is younger than the dump.
    let old = cluster.mount();
    write(&old, 0, 3);
    cluster.meta.stop();
    fs::rename(&folder, sandbox.path("meta-before")).unwrap();
    cluster.torchfs(["meta", "load", file, "--dir", dir]).ok();
    cluster.restart();
    let new = cluster.mount();
    write(&new, 10, 13);
    eventually("the old mount to fail", || match fs::write(old.at("late"), "x") {
        Err(_) => Ok(()),
        Ok(()) => Err("it still writes".into()),
    });
    check(&new, 10, 13);
    assert!(!new.at("late").exists() && !new.at("f0").exists(), "the old session changed the new store");
}

#[test]
fn deleted_files_that_a_dump_brings_back_are_named_by_fsck() {
    let mut cluster = Cluster::with(options());
    let sandbox = cluster.sandbox().clone();
    let folder = sandbox.path("meta");
    let dump = sandbox.path("d.dump");
    let (dir, file) = (folder.to_str().unwrap(), dump.to_str().unwrap());
    {
        let mut mount = cluster.mount();
        write(&mount, 0, 3);
        cluster.torchfs(["meta", "dump", file]).ok();
        fs::remove_file(mount.at("f1")).unwrap();
        mount.unmount(cluster.client());
    }
    cluster.torchfs(["gc"]).ok();
    cluster.meta.stop();
    fs::rename(&folder, sandbox.path("meta-before")).unwrap();
    cluster.torchfs(["meta", "load", file, "--dir", dir]).ok();
    cluster.restart();
    let ran = cluster.torchfs(["fsck", "--json"]);
    let problems = json(&ran.out)["problems"].to_string();
    assert!(ran.code == Some(1) && problems.contains("is missing on data server"), "{problems}");
    let mount = cluster.mount();
    check(&mount, 0, 1);
    check(&mount, 2, 3);
    let error = fs::read(mount.at("f1")).expect_err("its blocks are gone");
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    // Removing it is the cure.
    fs::remove_file(mount.at("f1")).unwrap();
    drop(mount);
    eventually("a clean check", || match cluster.torchfs(["fsck"]) {
        ran if ran.code == Some(0) => Ok(()),
        ran => Err(ran.out),
    });
}

#[test]
fn a_dump_moves_a_cluster_into_postgresql_and_back() {
    let mut cluster = Cluster::with(options());
    let sandbox = cluster.sandbox().clone();
    let database = Database::start(&sandbox);
    let url = database.create("torchfs");
    let path = |name: &str| sandbox.path(name).to_str().unwrap().to_owned();
    let (folder, file, settings) = (path("meta"), path("move.dump"), path("torchfs.toml"));
    let files = |cluster: &Cluster, from, to| {
        let mut mount = cluster.mount();
        check(&mount, 0, from);
        write(&mount, from, to);
        mount.unmount(cluster.client());
    };
    files(&cluster, 0, 10);
    let before = incarnation(&cluster);
    cluster.meta.stop();
    cluster.torchfs(["meta", "dump", &file, "--dir", &folder]).ok();
    fs::rename(&folder, path("meta-before")).unwrap();
    let said = cluster.torchfs(["meta", "load", &file, "--engine", &url, "--dir", &folder]).ok();
    assert!(said.contains(&format!("--engine '{url}'")), "the next step is whole: {said}");
    // Without it the folder is not a service's own.
    let ran = cluster.torchfs(["meta", "--dir", &folder, "--listen", "127.0.0.1:0"]);
    assert!(ran.code == Some(1) && ran.err.contains("the replica of a database"), "{}", ran.err);
    let again = cluster.torchfs(["meta", "load", &file, "--engine", &url, "--dir", &path("other")]);
    assert!(again.code == Some(1) && again.err.contains("holds metadata already"), "{}", again.err);
    fs::write(&settings, format!("[meta]\nengine = \"{url}\"\n")).unwrap();
    cluster.restart();
    let within = incarnation(&cluster);
    assert!(within > before);
    files(&cluster, 10, 20);
    cluster.torchfs(["gc"]).ok();
    cluster.fsck();

    cluster.torchfs(["meta", "dump", &file]).ok();
    cluster.meta.stop();
    fs::remove_file(&settings).unwrap();
    fs::rename(&folder, path("replica-before")).unwrap();
    cluster.torchfs(["meta", "load", &file, "--dir", &folder]).ok();
    cluster.restart();
    assert!(incarnation(&cluster) > within);
    files(&cluster, 20, 25);
    cluster.torchfs(["gc"]).ok();
    cluster.fsck();
}

#[test]
fn a_second_process_on_the_same_folder_is_refused() {
    let cluster = Cluster::start();
    let folder = cluster.sandbox().path("meta");
    let ran = cluster.torchfs(["meta", "--dir", folder.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    assert!(ran.code == Some(1) && ran.err.contains("in use by another process"), "{}", ran.err);
    // Over a database that is not there, too: it is said before anybody waits for one.
    let shared = ["--engine", "postgres://nobody@127.0.0.1:1/none"];
    let words = ["meta", "--dir", folder.to_str().unwrap(), "--listen", "127.0.0.1:0"];
    let ran = cluster.torchfs(words.into_iter().chain(shared));
    assert!(ran.code == Some(1) && ran.err.contains("in use by another process"), "{}", ran.err);
    cluster.fsck();
}

#[test]
fn a_dump_takes_the_place_of_files_only_and_is_for_its_owner_alone() {
    use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
    let cluster = Cluster::start();
    let path = |name: &str| cluster.sandbox().path(name).to_str().unwrap().to_owned();
    torchfs_tests::sh("/", &format!("mkfifo '{}'", path("fifo")));
    symlink("fifo", path("link-to-fifo")).unwrap();
    symlink("file", path("link")).unwrap();
    for refused in [&path("fifo"), &path("link-to-fifo"), &path(""), "-"] {
        let ran = cluster.torchfs(["meta", "dump", refused]);
        assert!(ran.code == Some(1) && ran.err.contains("give the name of a file"), "{}", ran.err);
    }
    assert!(fs::symlink_metadata(path("fifo")).unwrap().file_type().is_fifo());
    cluster.torchfs(["meta", "dump", &path("link")]).ok();
    assert!(fs::symlink_metadata(path("link")).unwrap().is_symlink(), "the link is followed");
    assert_eq!(fs::metadata(path("file")).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn status_tells_how_old_the_newest_dump_is_and_warns_when_there_is_none() {
    let mut cluster = cluster_with_dumps();
    wait_for_dump(&cluster);
    let status = cluster.status();
    assert_eq!(status["dumps"]["copies"].as_u64(), Some(3), "{status}");
    assert!(status["dumps"]["age_s"].as_u64() < Some(60), "{status}");
    let said = cluster.torchfs(["status"]).ok();
    assert!(said.contains("last dump of the metadata"), "{said}");
    assert!(!said.contains("dumps of the metadata are made"), "{said}");
    // Half a dump that a server was given before it died is nothing.
    let half = cluster.data_dir(0).join("dumps/dump-00000001-0000000000000001-0000000000000001.part");
    cluster.data[0].kill();
    fs::write(&half, "half").unwrap();
    cluster.restart();
    eventually(
        "half a dump to be removed",
        || if half.exists() { Err("it is there".into()) } else { Ok(()) },
    );
    cluster.meta.stop();
    dump_every(cluster.sandbox(), "0");
    cluster.restart();
    let warnings = cluster.status()["warnings"].to_string();
    assert!(warnings.contains("no dumps of the metadata are made"), "{warnings}");
}
