//! What an operator of a cluster types and sees: every command with right and wrong arguments, for people and for machines.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;
use torchfs_tests::cluster::binary;
use torchfs_tests::readers::Archive;
use torchfs_tests::{Cluster, Options, Ran, Rng, eventually, run, sys};

/// A cluster whose timers are short enough to wait for.
fn cluster(servers: usize, redundancy: &str) -> Cluster {
    Cluster::with(Options {
        servers,
        redundancy: Some(redundancy.into()),
        lease_term_ms: Some(300),
        session_term_ms: Some(20_000),
        meta_args: ["--server-timeout-ms", "2500", "--repair-retry-ms", "500"].map(String::from).to_vec(),
        data_args: ["--segment-size", "32MiB"].map(String::from).to_vec(),
        ..Options::default()
    })
}

/// What a command prints for machines.
#[track_caller]
fn json(cluster: &Cluster, line: &str) -> Value {
    let words = line.split(' ').chain(["--json"]);
    let said = cluster.torchfs(words).ok();
    serde_json::from_str(&said).unwrap_or_else(|e| panic!("{line} --json printed ({e}):\n{said}"))
}

#[track_caller]
fn says(cluster: &Cluster, line: &str, about: &str) {
    let said = cluster.torchfs(line.split(' ')).ok();
    assert!(said.contains(about), "{line} should say `{about}`:\n{said}");
}

/// A failure is one sentence that says what to do.
#[track_caller]
fn refuses(ran: Ran, about: &str) {
    let call = ran.call.clone();
    let said = ran.fails();
    assert!(!said.contains("panicked"), "{call} fell over:\n{said}");
    assert!(said.contains(about), "{call} should speak of `{about}`:\n{said}");
}

#[test]
fn volumes_and_policies_are_made_shown_changed_and_removed() {
    let cluster = cluster(4, "replicas:2");
    let t = |line: &str| cluster.torchfs(line.split(' '));
    says(&cluster, "volume create train --redundancy ec:2+1 --block-size 1MiB --compression none", "train");
    refuses(t("volume create train"), "volume set");
    refuses(t("volume create odd --block-size 3MiB"), "power of two");
    refuses(t("volume create odd --redundancy ec:4"), "ec:K+M");
    refuses(t("volume create bad/name"), "letters");
    refuses(t("volume show nothing"), "there are: main, train");
    refuses(t("volume set train"), "--redundancy");
    refuses(t("volume rm main"), "default");
    says(&cluster, "volume create wide --redundancy ec:8+3", "needs 11 data servers");
    assert_eq!(json(&cluster, "volume show train")["redundancy"], "ec:2+1");
    assert_eq!(json(&cluster, "volume set train --compression zstd")["volumes"][0]["compression"], "zstd");
    assert_eq!(json(&cluster, "volume rm wide")["removed"], "wide");

    let mount = cluster.mount_volume(Some("train"));
    refuses(t("volume rm train --force"), "unmount");
    let path = |name: &str| mount.at(name).to_string_lossy().into_owned();
    // Old data, in a folder that exists and in one below it with a policy of its own.
    for (n, folder) in ["a", "a/below", "a/own"].iter().enumerate() {
        fs::create_dir(mount.at(folder)).unwrap();
        fs::write(mount.at(&format!("{folder}/f")), Rng::new(n as u64).bytes(3 << 20)).unwrap();
    }
    json(&cluster, &format!("policy set {} --redundancy replicas:3", path("a/own")));
    let set = json(&cluster, &format!("policy set {} --redundancy replicas:2", path("a")));
    assert_eq!((&set["redundancy"], &set["own"]), (&Value::from("replicas:2"), &Value::from(true)));
    assert_eq!((&set["folders_that_follow"], &set["folders_with_their_own"]), (&1.into(), &1.into()));
    let get = |name: &str| json(&cluster, &format!("policy get {}", path(name)));
    assert_eq!(get("a/below")["redundancy"], "replicas:2");
    assert_eq!(get("a/own")["redundancy"], "replicas:3");
    assert_eq!(get("a/f")["redundancy"], "ec:2+1", "what was there stays as it was");
    says(&cluster, &format!("policy set {} --redundancy ec:8+3", path("a/own")), "needs 11 data servers");
    refuses(t(&format!("policy set {} --redundancy replicas:7", path("a/own"))), "needs 7 data servers");
    // What a file was given by its own name stays when its folder is restriped, until it is taken back.
    fs::create_dir(mount.at("mixed")).unwrap();
    for name in ["mixed/own", "mixed/other"] {
        fs::write(mount.at(name), Rng::new(9).bytes(2 << 20)).unwrap();
    }
    json(&cluster, &format!("policy set {} --redundancy replicas:3", path("mixed/own")));
    json(&cluster, &format!("policy set {} --redundancy replicas:2", path("mixed")));
    let moved = json(&cluster, &format!("policy restripe {}", path("mixed")));
    assert_eq!((&moved["files_moved"], &moved["files_with_their_own"]), (&2.into(), &1.into()));
    assert_eq!(
        (&get("mixed/own")["redundancy"], &get("mixed/other")["redundancy"]),
        (&"replicas:3".into(), &"replicas:2".into())
    );
    let again = json(&cluster, &format!("policy restripe {}", path("mixed/own")));
    assert_eq!((&again["files"], &again["files_moved"]), (&1.into(), &0.into()));
    says(&cluster, &format!("policy restripe {}", path("mixed/own")), "0 of 1 files");
    json(&cluster, &format!("policy set {} --redundancy volume", path("mixed/own")));
    json(&cluster, &format!("policy restripe {}", path("mixed")));
    assert_eq!(get("mixed/own")["redundancy"], "replicas:2");
    json(&cluster, &format!("policy set {} --redundancy replicas:3", path("a/own")));
    // Until it is moved.
    let moved = json(&cluster, &format!("policy restripe {}", path("a")));
    assert_eq!((&moved["files"], &moved["bytes_moved"]), (&3.into(), &(9 << 20).into()), "{moved}");
    for (name, redundancy) in [("a/f", "replicas:2"), ("a/below/f", "replicas:2"), ("a/own/f", "replicas:3")]
    {
        assert_eq!(
            (&get(name)["redundancy"], &get(name)["stored_otherwise"]),
            (&redundancy.into(), &0.into())
        );
    }
    assert_eq!(
        json(&cluster, &format!("policy restripe {}", path("a")))["bytes_moved"],
        0,
        "nothing is left"
    );
    for (n, folder) in ["a", "a/below", "a/own"].iter().enumerate() {
        assert!(fs::read(mount.at(&format!("{folder}/f"))).unwrap() == Rng::new(n as u64).bytes(3 << 20));
    }
    refuses(t("policy get /proc"), "TorchFS mount");
    refuses(t("policy get /no/such/thing"), "there is no");
    refuses(t(&format!("policy set {}", path("a"))), "--redundancy");
    assert_eq!(json(&cluster, "fsck --data")["clean"], true);
}

#[test]
fn servers_are_shown_scrubbed_evened_out_and_counted() {
    let mut cluster = cluster(3, "replicas:2");
    let mount = cluster.mount();
    Archive::write(mount.path(), "a", 6, 12 << 20, 1);
    let t = |line: &str| cluster.torchfs(line.split(' '));
    // All that moves by itself has moved, and everybody was looked at.
    says(&cluster, "rebalance", "is done");
    says(&cluster, "servers --wait", "is done");
    says(&cluster, "servers", "every group has full redundancy");
    assert_eq!(json(&cluster, "servers")["servers"].as_array().unwrap().len(), 3);
    assert_eq!(json(&cluster, "status")["servers"][0]["state"], "up");
    says(&cluster, "scrub --rate 0", "pieces read");
    let scrub = &json(&cluster, "scrub")["scrub"];
    assert!(scrub["pieces"].as_u64() > Some(0) && scrub["bad"] == 0, "{scrub}");
    says(&cluster, "scrub --stop", "no scrub ran");
    says(&cluster, "rebalance --auto off", "only when");
    assert_eq!(json(&cluster, "rebalance --auto on")["auto_rebalance"], true);
    says(&cluster, "top --interval 200ms", "SESSION");
    assert_eq!(json(&cluster, "top --interval 200ms")["servers"].as_array().unwrap().len(), 3);
    refuses(t("drain 99"), "there is no data server `99`");
    refuses(t("servers remove 1"), "drain");
    refuses(t("scrub --rate much"), "much");
    refuses(t("top --interval soon"), "soon");
    refuses(t("sessions evict 999"), "torchfs sessions");

    // Three servers on one disk have the room of one.
    let disk = sys::space(cluster.sandbox().root()).unwrap().0;
    let df = json(&cluster, "df");
    assert!(df["total"].as_u64().unwrap() <= disk, "{df} on a disk of {disk}");
    let room = sys::space(mount.path()).unwrap().0;
    assert!(room <= disk / 2, "{room} for two copies on a disk of {disk}");

    // The mount is of no use afterwards.
    assert_eq!(json(&cluster, "sessions evict 1")["evicted"], 1);

    // A page that nobody reads to its end.
    let line = "\"$0\" servers | true";
    let mut piped = Command::new("bash");
    piped.args(["-o", "pipefail", "-c", line]).arg(binary()).env("TORCHFS_META", cluster.address());
    let ran = run(piped.env("TORCHFS_SECRET_FILE", cluster.sandbox().path("secret")));
    assert!(!ran.err.contains("panicked"), "{}", ran.err);

    // A server is gone: what it had is named, and that it can still be read.
    cluster.data[2].kill();
    let ran = cluster.torchfs(["fsck", "--data", "--json"]);
    let found: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(ran.code, Some(1));
    assert_eq!(found["blocks_unreadable"], 0, "{found}");
    assert!(found["blocks_degraded"].as_u64() > Some(0), "{found}");
    eventually("the server to be missed", || match cluster.torchfs(["status"]).ok() {
        said if said.contains("is down") => Ok(()),
        said => Err(said),
    });
    says(&cluster, "df", "(down)");
    cluster.restart();
    cluster.torchfs(["servers", "--wait"]).ok();
    assert_eq!(json(&cluster, "fsck --data")["clean"], true);
}

#[test]
fn a_drain_shows_its_progress_survives_its_command_and_says_when_it_cannot_end() {
    let cluster = cluster(4, "replicas:3");
    let mount = cluster.mount();
    let archive = Archive::write(mount.path(), "a", 12, 40 << 20, 2);
    // On a terminal, slowly; the command is killed in the middle.
    let mut drain = Command::new("script");
    drain.args(["-qec", &format!("{} drain 1 --rate 2MiB", binary().display()), "/dev/null"]);
    drain.env("TORCHFS_META", cluster.address()).env("TORCHFS_SECRET_FILE", cluster.sandbox().path("secret"));
    let log = cluster.sandbox().path("terminal");
    let file = fs::File::create(&log).unwrap();
    let mut watching = drain.stdin(Stdio::null()).stdout(file).spawn().unwrap();
    eventually("a bar", || {
        let seen = fs::read_to_string(&log).unwrap_or_default();
        let bar =
            seen.contains("drain of 1") && seen.contains("groups left on it, ") && seen.contains("/s, ");
        if bar && seen.contains(" left") { Ok(()) } else { Err(seen) }
    });
    watching.kill().unwrap();
    watching.wait().unwrap();
    assert!(json(&cluster, "servers")["repair"]["moving_groups"].as_u64() > Some(0), "it goes on alone");
    // Another one goes on watching, faster.
    let end = json(&cluster, "drain 1 --rate 0");
    assert_eq!(end["drains"][0]["groups"], 0, "{end}");
    assert!(end["drains"][0]["moved_bytes"].as_u64() > Some(1 << 20), "{end}");
    // On a busy machine a server may count as suspected for a moment, which is shown first.
    eventually("`servers` to say `drained`", || {
        let said = cluster.torchfs(["servers"]).ok();
        if said.contains("drained") { Ok(()) } else { Err(said) }
    });
    // Three are left for three copies: the next one cannot be emptied.
    refuses(cluster.torchfs(["drain", "2"]), "drain 2 --stop");
    says(&cluster, "servers", "no other server to go to");
    assert!(json(&cluster, "drain 2 --stop")["drains"].as_array().unwrap().len() == 1);
    assert_eq!(json(&cluster, "servers remove 1")["removed"], 1);
    refuses(cluster.torchfs(["servers", "remove", "1"]), "there is no data server");
    cluster.torchfs(["servers", "--wait"]).ok();
    archive.check(cluster.mount().path());
}

#[test]
fn fsck_names_the_files_that_are_hurt() {
    let mut cluster = cluster(3, "replicas:1");
    // What is flipped must not be on its way to another server.
    cluster.torchfs(["rebalance", "--auto", "off"]).ok();
    cluster.torchfs(["volume", "create", "train"]).ok();
    let broken = Rng::new(70).bytes(300_000);
    {
        let mut mount = cluster.mount();
        let mut other = cluster.mount_volume(Some("train"));
        fs::create_dir_all(mount.at("a/b c")).unwrap();
        fs::write(mount.at("a/b c/broken\u{7}.bin"), &broken).unwrap();
        fs::write(mount.at("a/whole.bin"), Rng::new(71).bytes(300_000)).unwrap();
        fs::create_dir_all(other.at("deep/er")).unwrap();
        for n in 0..360 {
            fs::write(other.at(&format!("deep/er/f{n}")), Rng::new(1_000 + n).bytes(9_000)).unwrap();
        }
        mount.unmount(cluster.client());
        other.unmount(cluster.client());
    }
    let clean = json(&cluster, "fsck --data");
    assert!(clean["files"] == serde_json::json!([]) && clean["problems"] == serde_json::json!([]), "{clean}");

    // One flipped bit: one file, by its path.
    crate::storage::flip(&mut cluster, &broken[1_000..1_064]);
    let ran = cluster.torchfs(["fsck", "--data"]);
    let (code, said) = (ran.code, ran.out);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("main:/a/b c/broken\\u{7}.bin (1 block)"), "{said}");
    assert!(said.contains("0 files have less redundancy, 1 cannot be read as a whole"), "{said}");
    assert!(!said.contains("whole.bin") && !said.contains("deep"), "{said}");
    fs::remove_file(cluster.mount().at("a/b c/broken\u{7}.bin")).unwrap();
    eventually("a clean check", || match cluster.torchfs(["fsck", "--data"]) {
        ran if ran.code == Some(0) => Ok(()),
        ran => Err(ran.out),
    });

    // A server is gone, and with it a third of the files.
    cluster.torchfs(["rebalance"]).ok();
    cluster.data[1].kill();
    let said = cluster.torchfs(["fsck"]).out;
    let found: Value = serde_json::from_str(&cluster.torchfs(["fsck", "--json"]).out).unwrap();
    let files = found["files"].as_array().unwrap();
    let hurt = found["files_unreadable"].as_u64().unwrap();
    assert!(hurt > 101 && files.len() as u64 == hurt && found["files_degraded"] == 0, "{found}");
    assert_eq!(found["blocks_unreadable"], hurt, "each has one block: {found}");
    let problems = found["problems"].as_array().unwrap().len() as u64;
    assert!(problems > hurt, "each block, and the server: {found}");
    let mut paths: Vec<&str> = files.iter().map(|file| file["path"].as_str().unwrap()).collect();
    paths.sort_unstable();
    paths.dedup();
    assert_eq!(paths.len() as u64, hurt, "{found}");
    let known = |path: &&str| path.starts_with("/deep/er/f") || **path == *"/a/whole.bin";
    assert!(paths.iter().all(known), "{found}");
    // People are shown the beginning.
    assert!(said.contains(&format!("… and {} more problems; --json has all", problems - 100)), "{said}");
    assert!(said.contains(&format!("… and {} more files; --json has all", hurt - 100)), "{said}");
    let file = |line: &&str| line.starts_with("  train:/") || line.starts_with("  main:/");
    assert_eq!(said.lines().filter(file).count(), 100, "{said}");
    cluster.restart();
    assert_eq!(json(&cluster, "fsck --data")["clean"], true);
}

#[test]
fn every_command_works_while_programs_write_and_read() {
    let cluster = cluster(4, "replicas:2");
    says(&cluster, "volume create train --redundancy ec:2+1 --block-size 1MiB --compression lz4", "train");
    let mount = cluster.mount_volume(Some("train"));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let content = |n: u64| Rng::new(n).bytes(1_500_000);
    let path = |n: u64| mount.at(&format!("w{}", n % 12));
    let working = || !stop.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut n = 0;
            while working() {
                fs::write(path(n), content(n)).unwrap();
                assert!(fs::read(path(n)).unwrap() == content(n), "w{n} is another one");
                n += 1;
            }
            n
        });
        let folder = mount.at("ckpt");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("a"), content(99)).unwrap();
        let folder = folder.to_str().unwrap();
        says(&cluster, &format!("policy set {folder} --redundancy replicas:3"), "replicas:3");
        says(&cluster, &format!("policy restripe {folder}"), "1 of 1 files");
        says(&cluster, "volume set train --compression zstd", "changed");
        says(&cluster, "rebalance", "rebalance is done");
        says(&cluster, "scrub", "0 bad pieces found");
        says(&cluster, "top --interval 200ms", "SESSION");
        let end = json(&cluster, "drain 4");
        assert_eq!(end["drains"][0]["groups"], 0, "{end}");
        assert_eq!(json(&cluster, "servers remove 4")["removed"], 4);
        says(&cluster, "fsck --data", "clean");
        refuses(cluster.torchfs(["volume", "rm", "train"]), "unmount");
        // Its process lives on and speaks, but it is not a server any more.
        eventually("the removed server to be told so", || {
            let logs: Vec<String> = cluster.data.iter().map(|server| server.log()).collect();
            let told = logs.iter().any(|log| log.contains("was removed from this cluster"));
            if told { Ok(()) } else { Err(logs.join("\n")) }
        });
        assert_eq!(json(&cluster, "servers")["servers"].as_array().unwrap().len(), 3);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(writer.join().unwrap() > 0);
    });
    assert!(fs::read(mount.at("ckpt/a")).unwrap() == content(99));
}
