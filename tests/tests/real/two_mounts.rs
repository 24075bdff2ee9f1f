//! Two mounts of one volume, by two agents, as two machines would have them.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::Value;
use torchfs_tests::{Cluster, Mount, Options, Rng, count, eventually, sys};

fn two() -> (Cluster, Mount, Mount) {
    let cluster = Cluster::start();
    let (one, two) = (cluster.mount(), cluster.mount());
    (cluster, one, two)
}

#[test]
fn what_is_closed_on_one_mount_is_read_on_the_other() {
    let (_cluster, one, two) = two();
    let mut rng = Rng::new(30);
    for round in 0..60 {
        let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let len = *rng.pick(&[0, 10, 5000, 100_000, 5 << 20]);
        let bytes = rng.bytes(len);
        fs::write(writer.at("f"), &bytes).unwrap();
        assert_eq!(fs::metadata(reader.at("f")).unwrap().len(), bytes.len() as u64, "round {round}");
        assert!(fs::read(reader.at("f")).unwrap() == bytes, "round {round}: old bytes on the other mount");
    }
}

#[test]
fn names_and_attributes_change_on_both_mounts_at_once() {
    let (_cluster, one, two) = two();
    for round in 0..40 {
        let name = format!("n{round}");
        // The other mount has looked already and remembers that there is nothing.
        assert!(!two.at(&name).exists());
        fs::write(one.at(&name), "x").unwrap();
        assert!(two.at(&name).exists(), "round {round}: a new name is not seen");
        fs::set_permissions(one.at(&name), fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(fs::metadata(two.at(&name)).unwrap().mode() & 0o777, 0o640);
        OpenOptions::new().write(true).open(two.at(&name)).unwrap().set_len(round).unwrap();
        assert_eq!(fs::metadata(one.at(&name)).unwrap().len(), round);
        fs::rename(two.at(&name), two.at("moved")).unwrap();
        assert!(!one.at(&name).exists() && one.at("moved").exists(), "round {round}: a rename is not seen");
        fs::remove_file(one.at("moved")).unwrap();
        assert!(!two.at("moved").exists(), "round {round}: an unlink is not seen");
    }
}

/// Found by the model test with seed 10319880005833953986: the kernel kept "there is no `d`", which nobody took back.
#[test]
fn a_name_missing_from_a_listed_folder_is_seen_when_the_other_mount_makes_it() {
    let (_cluster, one, two) = two();
    for round in 0..10 {
        let (folder, inside) = (format!("d{round}"), format!("d{round}/f"));
        // All names of the folder are known now, so the next answer needs no call.
        assert!(fs::read_dir(one.path()).unwrap().count() >= round);
        assert!(!one.at(&folder).exists());
        fs::create_dir(two.at(&format!("other{round}"))).unwrap();
        fs::create_dir(two.at(&folder)).unwrap();
        fs::write(one.at(&inside), "x").unwrap_or_else(|e| panic!("round {round}: {e}"));
    }
}

#[test]
fn appends_from_both_sides_never_overwrite() {
    let (_cluster, one, two) = two();
    const EACH: usize = 120;
    std::thread::scope(|scope| {
        for (letter, mount) in [(b'a', &one), (b'b', &two)] {
            scope.spawn(move || {
                let mut file = OpenOptions::new().create(true).append(true).open(mount.at("log")).unwrap();
                for n in 0..EACH {
                    let mut record = format!("{}{n:06}", letter as char).into_bytes();
                    record.resize(100, letter);
                    record.push(b'\n');
                    file.write_all(&record).unwrap();
                    if n % 40 == 39 {
                        file.sync_all().unwrap();
                    }
                }
                sys::close(file).unwrap();
            });
        }
    });
    for mount in [&one, &two] {
        let text = fs::read_to_string(mount.at("log")).unwrap();
        let records: BTreeSet<&str> = text.lines().map(|l| &l[..7]).collect();
        assert_eq!(text.len(), 2 * EACH * 101, "records were lost");
        // A record of 101 bytes crosses the end of a page now and then; it stays in one piece.
        assert!(text.lines().all(|l| l.len() == 100 && l[7..].bytes().all(|b| b == l.as_bytes()[0])), "torn");
        assert_eq!(records.len(), 2 * EACH);
    }
}

#[test]
fn writers_of_different_ranges_do_not_erase_each_other() {
    let (_cluster, one, two) = two();
    fs::write(one.at("f"), vec![0; 2 << 20]).unwrap();
    std::thread::scope(|scope| {
        for (number, mount) in [&one, &two].into_iter().enumerate() {
            scope.spawn(move || {
                let file = OpenOptions::new().write(true).open(mount.at("f")).unwrap();
                for piece in (number..128).step_by(2) {
                    file.write_all_at(&vec![piece as u8 + 1; 16_384], piece as u64 * 16_384).unwrap();
                }
                file.sync_all().unwrap();
                sys::close(file).unwrap();
            });
        }
    });
    for mount in [&one, &two] {
        for (piece, bytes) in fs::read(mount.at("f")).unwrap().chunks(16_384).enumerate() {
            assert!(bytes.iter().all(|b| *b == piece as u8 + 1), "piece {piece} was erased by its neighbour");
        }
    }
}

#[test]
fn an_open_log_becomes_visible_on_the_other_mount() {
    let (_cluster, one, two) = two();
    let mut log = File::create(one.at("train.log")).unwrap();
    let mut reader = None;
    for line in 0..3 {
        writeln!(log, "epoch {line}").unwrap();
        // Nobody closes and nobody syncs; `tail -f` over there sees it all the same.
        let want = format!("epoch {line}\n");
        eventually("the line to be seen over there", || {
            let reader = reader.get_or_insert_with(|| File::open(two.at("train.log")).unwrap());
            reader.seek(SeekFrom::Start(0)).unwrap();
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            if text.ends_with(&want) { Ok(()) } else { Err(text) }
        });
    }
}

#[test]
fn files_unlinked_on_the_other_mount_stay_readable() {
    let (_cluster, one, two) = two();
    let bytes = Rng::new(31).bytes(6 << 20);
    fs::write(one.at("f"), &bytes).unwrap();
    let handle = File::open(two.at("f")).unwrap();
    fs::remove_file(one.at("f")).unwrap();
    assert!(!two.at("f").exists());
    assert!(sys::read_at(&handle, 0, bytes.len()).unwrap() == bytes);
}

#[test]
fn a_rename_over_a_name_is_atomic_for_readers_over_there() {
    let (_cluster, one, two) = two();
    fs::write(one.at("current"), "0000").unwrap();
    let done = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let text = fs::read_to_string(two.at("current")).expect("the name is always there");
                assert_eq!(text.len(), 4, "a half-written file was seen: {text:?}");
                reads.fetch_add(1, Ordering::Relaxed);
            }
        });
        for version in 1..=100 {
            fs::write(one.at("next"), format!("{version:04}")).unwrap();
            fs::rename(one.at("next"), one.at("current")).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(reads.into_inner() > 0);
    assert_eq!(fs::read_to_string(two.at("current")).unwrap(), "0100");
}

#[test]
fn exclusive_creation_has_one_winner_among_mounts() {
    let (_cluster, one, two) = two();
    for round in 0..25 {
        let wins = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for mount in [&one, &two] {
                let wins = &wins;
                scope.spawn(move || {
                    let path = mount.at(&format!("x{round}"));
                    if File::options().write(true).create_new(true).open(path).is_ok() {
                        wins.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(wins.into_inner(), 1);
    }
}

/// The kernel moves an entry with the time it was given under the lease of the old folder.
#[test]
fn a_file_moved_into_a_busy_folder_is_seen_to_go_when_the_other_mount_removes_it() {
    let (_cluster, one, two) = two();
    for folder in ["quiet", "busy"] {
        fs::create_dir(one.at(folder)).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                fs::write(one.at("busy/other"), "").unwrap();
                fs::remove_file(one.at("busy/other")).unwrap();
            }
        });
        let stale = (0..count(300, 3000)).filter(|round| {
            let (old, new) = (format!("quiet/f{}", round % 20), format!("busy/f{}", round % 20));
            fs::write(two.at(&old), "").unwrap();
            assert!(two.at(&old).exists());
            fs::rename(two.at(&old), two.at(&new)).unwrap();
            fs::remove_file(one.at(&new)).unwrap();
            two.at(&new).exists()
        });
        let stale = stale.count();
        done.store(true, Ordering::Release);
        assert_eq!(stale, 0, "names that were gone were still seen");
    });
}

/// The kernel asks nobody whether the caller of a creation may have the file.
#[test]
fn a_file_that_another_mount_made_first_is_opened_by_who_may() {
    let (_cluster, one, two) = two();
    for mount in [&one, &two] {
        fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let folder = File::open(two.path()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                for (name, mode) in [("secret", 0o600), ("own", 0o644)] {
                    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
                    drop(sys::open(&one.at(name), flags, mode));
                    let _ = fs::remove_file(one.at(name));
                }
            }
        });
        let own = scope.spawn(|| {
            for i in 0..count(1500, 20_000) {
                let file = sys::open(&two.at("own"), libc::O_CREAT | libc::O_RDWR | libc::O_TRUNC, 0o644);
                file.unwrap_or_else(|e| panic!("try {i}: {e}"));
            }
        });
        let other = scope.spawn(|| {
            sys::use_files_as(1000);
            // The way to the mount may be closed to others.
            let path = format!("/proc/self/fd/{}/secret", std::os::fd::AsRawFd::as_raw_fd(&folder));
            for i in 0..count(1500, 20_000) {
                match sys::open(Path::new(&path), libc::O_CREAT | libc::O_RDWR, 0o644) {
                    Ok(file) => assert_eq!(file.metadata().unwrap().uid(), 1000, "try {i}: not theirs"),
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EACCES), "try {i}"),
                }
            }
        });
        let ended = (own.join(), other.join());
        done.store(true, Ordering::Release);
        assert!(ended.0.is_ok() && ended.1.is_ok());
    });
}

#[test]
fn locks_hold_across_mounts_and_publish_what_they_guard() {
    let (_cluster, one, two) = two();
    fs::write(one.at("counter"), "0").unwrap();
    const EACH: u64 = 30;
    std::thread::scope(|scope| {
        for (number, mount) in [&one, &two].into_iter().enumerate() {
            scope.spawn(move || {
                let mut file = File::options().read(true).write(true).open(mount.at("counter")).unwrap();
                for _ in 0..EACH {
                    if number == 0 {
                        sys::flock(&file, libc::LOCK_EX).unwrap();
                    }
                    let whole = || sys::ofd_lock(&file, libc::F_WRLCK, 0, 0, true);
                    whole().unwrap();
                    let mut text = String::new();
                    file.seek(SeekFrom::Start(0)).unwrap();
                    file.read_to_string(&mut text).unwrap();
                    let next = text.trim().parse::<u64>().unwrap() + 1;
                    file.set_len(0).unwrap();
                    file.write_all_at(next.to_string().as_bytes(), 0).unwrap();
                    sys::ofd_lock(&file, libc::F_UNLCK, 0, 0, false).unwrap();
                    if number == 0 {
                        sys::flock(&file, libc::LOCK_UN).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(fs::read_to_string(two.at("counter")).unwrap(), (2 * EACH).to_string());
    let (here, there) = (File::open(one.at("counter")).unwrap(), File::open(two.at("counter")).unwrap());
    sys::flock(&here, libc::LOCK_EX).unwrap();
    let refused = sys::flock(&there, libc::LOCK_SH | libc::LOCK_NB).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EWOULDBLOCK));
    drop(here);
    eventually("the lock to be given on", || {
        sys::flock(&there, libc::LOCK_EX | libc::LOCK_NB).map_err(|e| e.to_string())
    });
}

#[test]
fn what_is_written_through_a_mapping_under_a_lock_is_seen_by_the_next_holder() {
    let (_cluster, one, two) = two();
    fs::write(one.at("counter"), [0; 8192]).unwrap();
    const EACH: u64 = 100;
    std::thread::scope(|scope| {
        for mount in [&one, &two] {
            scope.spawn(move || {
                let file = File::options().read(true).write(true).open(mount.at("counter")).unwrap();
                let mut map = sys::Map::shared(&file, 8192).unwrap();
                for _ in 0..EACH {
                    sys::ofd_lock(&file, libc::F_WRLCK, 0, 0, true).unwrap();
                    let count = u64::from_le_bytes(map.read(0, 8).try_into().unwrap());
                    map.write(0, &(count + 1).to_le_bytes());
                    sys::ofd_lock(&file, libc::F_UNLCK, 0, 0, false).unwrap();
                }
            });
        }
    });
    let count = fs::read(two.at("counter")).unwrap()[..8].try_into().unwrap();
    assert_eq!(u64::from_le_bytes(count), 2 * EACH);
}

#[test]
fn both_mounts_at_work_in_one_folder_come_to_an_end() {
    let (cluster, one, two) = two();
    fs::create_dir(one.at("d")).unwrap();
    std::thread::scope(|scope| {
        for (number, mount) in [&one, &two, &one, &two].into_iter().enumerate() {
            scope.spawn(move || {
                for n in 0..120 {
                    // The same few names from all sides, so that each call recalls what the others hold.
                    let path = mount.at(&format!("d/{}", n % 5));
                    match (n + number) % 4 {
                        0 => drop(fs::write(&path, "x")),
                        1 => drop(fs::remove_file(&path)),
                        2 => drop(fs::rename(&path, mount.at(&format!("d/{}", (n + 1) % 5)))),
                        _ => drop(fs::read_dir(mount.at("d")).map(Iterator::count)),
                    }
                }
            });
        }
    });
    let list =
        |m: &Mount| fs::read_dir(m.at("d")).unwrap().map(|e| e.unwrap().file_name()).collect::<BTreeSet<_>>();
    assert_eq!(list(&one), list(&two));
    cluster.fsck();
}

/// Sessions shorter than a minute, so that a test can wait for their end.
fn short() -> Cluster {
    Cluster::with(Options { session_term_ms: Some(3000), lease_term_ms: Some(500), ..Options::default() })
}

#[test]
fn a_killed_clients_locks_and_leases_end() {
    let cluster = short();
    let (mut dies, lives) = (cluster.mount(), cluster.mount());
    fs::write(dies.at("f"), "from the one that dies").unwrap();
    let held = File::options().read(true).write(true).open(dies.at("f")).unwrap();
    sys::flock(&held, libc::LOCK_EX).unwrap();
    sys::ofd_lock(&held, libc::F_WRLCK, 0, 10, false).unwrap();
    held.write_all_at(b"dirty", 0).unwrap();
    let wants = File::options().read(true).write(true).open(lives.at("f")).unwrap();
    assert!(sys::flock(&wants, libc::LOCK_EX | libc::LOCK_NB).is_err());
    dies.kill();
    drop(held);
    eventually("the dead client's lock to end", || {
        sys::flock(&wants, libc::LOCK_EX | libc::LOCK_NB).map_err(|e| e.to_string())
    });
    eventually("the dead client's range lock to end", || {
        sys::ofd_lock(&wants, libc::F_WRLCK, 0, 10, false).map_err(|e| e.to_string())
    });
    fs::write(lives.at("f"), "from the one that lives").unwrap();
    assert_eq!(fs::read_to_string(lives.at("f")).unwrap(), "from the one that lives");
    cluster.fsck();
}

#[test]
fn late_commits_of_an_evicted_client_are_refused() {
    let cluster = short();
    let before = sessions(&cluster);
    let late = cluster.mount();
    let after = sessions(&cluster);
    let id = after.difference(&before).next().expect("a mount has a session").clone();
    let other = cluster.mount();
    fs::write(late.at("f"), "first").unwrap();
    let file = File::options().write(true).open(late.at("f")).unwrap();
    file.write_all_at(b"LATE!", 0).unwrap();
    late.agent.signal(libc::SIGSTOP);
    cluster.torchfs(["sessions", "evict", &id]).ok();
    eventually("the evicted session to be gone", || {
        if sessions(&cluster).contains(&id) { Err("still there".into()) } else { Ok(()) }
    });
    // The other one has the file to itself now, whatever the stopped one thinks.
    eventually("the other mount to write", || fs::write(other.at("f"), "other").map_err(|e| e.to_string()));
    late.agent.signal(libc::SIGCONT);
    let refused = file.sync_all().expect_err("a late commit must fail");
    assert_eq!(refused.raw_os_error(), Some(libc::EIO), "{refused}");
    assert_eq!(fs::read_to_string(other.at("f")).unwrap(), "other");
    drop(file);
    cluster.fsck();
}

/// The ids that `torchfs sessions --json` lists.
fn sessions(cluster: &Cluster) -> BTreeSet<String> {
    let said: Value = serde_json::from_str(&cluster.torchfs(["sessions", "--json"]).ok()).unwrap();
    let list = said.as_array().or_else(|| said["sessions"].as_array()).expect("a list of sessions");
    list.iter()
        .map(|s| match &s["id"] {
            Value::String(id) => id.clone(),
            other => other.to_string(),
        })
        .collect()
}

#[test]
fn sessions_say_who_is_connected() {
    let (cluster, one, two) = two();
    assert_eq!(sessions(&cluster).len(), 2, "two mounts are two sessions");
    let text = cluster.torchfs(["sessions"]).ok();
    for mount in [one.path(), two.path()] as [&Path; 2] {
        assert!(
            text.contains(&*mount.to_string_lossy()),
            "the table must name the mount {}:\n{text}",
            mount.display()
        );
    }
}

/// The lease of a client that stands still ends, and others may append. What it had appended goes behind that, or before it if it
/// was committed in time, and never into it.
#[test]
fn appends_of_a_client_that_lost_its_lease_go_behind_those_of_others() {
    let cluster = Cluster::with(Options { lease_term_ms: Some(500), ..Options::default() });
    let (one, two) = (cluster.mount(), cluster.mount());
    let append = |mount: &Mount| OpenOptions::new().create(true).append(true).open(mount.at("log")).unwrap();
    let mut want: Vec<u8> = Vec::new();
    for round in 0..count(4, 40) {
        let (mine, yours) =
            (vec![b'a'; 300 + round as usize * 7000], vec![b'b'; 200 + round as usize * 9000]);
        let mut first = append(&one);
        first.write_all(&mine).unwrap();
        one.agent.signal(libc::SIGSTOP);
        let mut second = append(&two);
        second.write_all(&yours).unwrap();
        sys::close(second).unwrap();
        one.agent.signal(libc::SIGCONT);
        first.write_all(b"c").unwrap();
        sys::close(first).unwrap();
        let found = fs::read(two.at("log")).unwrap();
        let orders = [[&yours[..], &mine, b"c"], [&mine[..], &yours, b"c"]];
        let allowed = orders.map(|parts| [&want[..], &parts.concat()].concat());
        assert!(allowed.contains(&found), "round {round}: {} bytes, not where they belong", found.len());
        assert!(fs::read(one.at("log")).unwrap() == found, "round {round}: the mounts see different bytes");
        want = found;
    }
}

/// The kernel of each mount held the folder's lock for a creation that waited for the other mount to have its kernel forget names,
/// for which that needed the lock: each creation took two seconds, until the notification was given up.
#[test]
fn creations_of_two_mounts_in_one_folder_do_not_wait_for_each_others_kernels() {
    let (_cluster, one, two) = two();
    fs::create_dir(one.at("d")).unwrap();
    let each = count(30, 600);
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for (side, mount) in [&one, &two].into_iter().enumerate() {
            for thread in 0..2 {
                scope.spawn(move || {
                    for n in 0..each / 2 {
                        let name = format!("d/{side}-{thread}-{n}");
                        File::create(mount.at(&name)).unwrap();
                        assert!(mount.at(&name).exists());
                    }
                });
            }
        }
    });
    // It takes 0.2 s; each wait for the kernel takes two.
    assert!(began.elapsed().as_secs() < each / 4, "{each} creations took {:?}", began.elapsed());
    for mount in [&one, &two] {
        assert_eq!(fs::read_dir(mount.at("d")).unwrap().count() as u64, each * 2);
    }
}
