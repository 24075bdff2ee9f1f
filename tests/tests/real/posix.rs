//! POSIX, call by call, on one mount: each test is a promise of docs/semantics.md.
//!
//! With `TORCHFS_TEST_ON=DIR` the same tests run on any local folder: what fails there is wrong in the test.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use torchfs_tests::{Cluster, Ground, Rng, eventually, run, seed, sh, sys};

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.expect_err("this call must fail").raw_os_error().expect("a system call failed")
}

#[test]
fn unlinked_files_stay_readable() {
    let ground = Ground::new();
    let mut file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("f")).unwrap();
    file.write_all(b"before").unwrap();
    fs::remove_file(ground.at("f")).unwrap();
    file.write_all(b" and after").unwrap();
    file.sync_all().unwrap();
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before and after");
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert!(!ground.at("f").exists());
}

#[test]
fn a_file_renamed_over_stays_readable_through_its_handle() {
    let ground = Ground::new();
    fs::write(ground.at("old"), "old").unwrap();
    fs::write(ground.at("new"), "new").unwrap();
    let mut handle = File::open(ground.at("old")).unwrap();
    fs::rename(ground.at("new"), ground.at("old")).unwrap();
    let mut text = String::new();
    handle.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    assert_eq!(fs::read_to_string(ground.at("old")).unwrap(), "new");
}

#[test]
fn appends_ignore_the_offset_and_never_overwrite() {
    let ground = Ground::new();
    let path = ground.at("log");
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
                for _ in 0..50 {
                    file.seek(SeekFrom::Start(0)).unwrap();
                    file.write_all(&[b'a' + writer; 1000]).unwrap();
                }
            });
        }
    });
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 4 * 50 * 1000);
    for record in bytes.chunks(1000) {
        assert!(record.iter().all(|b| *b == record[0]), "a record was torn");
    }
}

#[test]
fn exclusive_creation_has_one_winner() {
    let ground = Ground::new();
    for round in 0..20 {
        let wins = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    match File::options().write(true).create_new(true).open(ground.at(&format!("x{round}"))) {
                        Ok(_) => drop(wins.fetch_add(1, Ordering::Relaxed)),
                        Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EEXIST)),
                    }
                });
            }
        });
        assert_eq!(wins.into_inner(), 1);
    }
}

#[test]
fn writes_of_any_size_at_any_offset_read_back() {
    let ground = Ground::new();
    let mut rng = Rng::new(seed(1));
    let mut want = vec![];
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("f")).unwrap();
    for _ in 0..150 {
        let at = rng.below(9 << 20) as usize;
        let len = *rng.pick(&[1, 100, 4096, 65_536, 70_001, 1 << 20]);
        let bytes = rng.bytes(len);
        file.write_all_at(&bytes, at as u64).unwrap();
        if want.len() < at + len {
            want.resize(at + len, 0);
        }
        want[at..at + len].copy_from_slice(&bytes);
        if rng.chance(1, 10) {
            let at = rng.below(want.len() as u64) as usize;
            let len = (want.len() - at).min(200_000);
            assert_eq!(sys::read_at(&file, at as u64, len).unwrap(), want[at..at + len]);
        }
    }
    sys::close(file).unwrap();
    assert!(fs::read(ground.at("f")).unwrap() == want, "the file differs from what was written");
}

#[test]
fn direct_io_sees_and_makes_the_same_bytes() {
    let ground = Ground::new();
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
    let direct = options.open(ground.at("f")).unwrap();
    let mut memory = sys::Aligned::new(1 << 20);
    memory.bytes().copy_from_slice(&Rng::new(2).bytes(1 << 20));
    direct.write_all_at(memory.bytes(), 0).unwrap();
    assert!(fs::read(ground.at("f")).unwrap() == memory.bytes());
    fs::OpenOptions::new().write(true).open(ground.at("f")).unwrap().write_all_at(b"changed", 8192).unwrap();
    direct.read_exact_at(memory.bytes(), 0).unwrap();
    assert_eq!(&memory.bytes()[8192..8199], b"changed");
}

#[test]
fn synchronous_writes_return_and_read_back() {
    let ground = Ground::new();
    for flag in [libc::O_SYNC, libc::O_DSYNC] {
        let mut file =
            File::options().create(true).append(true).custom_flags(flag).open(ground.at("f")).unwrap();
        for _ in 0..20 {
            file.write_all(b"0123456789").unwrap();
        }
    }
    assert_eq!(fs::read(ground.at("f")).unwrap().len(), 400);
}

#[test]
fn a_sparse_file_reaches_beyond_four_gibibytes() {
    let ground = Ground::new();
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("big")).unwrap();
    let far = (6u64 << 30) + 123;
    file.write_all_at(b"far", far).unwrap();
    file.write_all_at(b"near", 10).unwrap();
    file.sync_all().unwrap();
    assert_eq!(file.metadata().unwrap().len(), far + 3);
    assert_eq!(sys::read_at(&file, far - 5, 8).unwrap(), b"\0\0\0\0\0far");
    assert_eq!(sys::read_at(&file, 5 << 30, 4096).unwrap(), vec![0; 4096]);
    let used = file.metadata().unwrap().blocks() * 512;
    assert!(used < 64 << 20, "a sparse file uses {used} bytes");
}

#[test]
fn seek_finds_data_and_holes() {
    let ground = Ground::new();
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("f")).unwrap();
    file.set_len(8 << 20).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 2 << 20).unwrap();
    file.sync_all().unwrap();
    let data = sys::seek(&file, 0, libc::SEEK_DATA).unwrap();
    assert_eq!(data, 2 << 20);
    let hole = sys::seek(&file, data, libc::SEEK_HOLE).unwrap();
    assert_eq!(hole, 3 << 20);
    assert_eq!(errno(sys::seek(&file, hole, libc::SEEK_DATA)), libc::ENXIO);
    assert_eq!(sys::seek(&file, 0, libc::SEEK_HOLE).unwrap(), 0);
}

#[test]
fn fallocate_reserves_punches_and_zeroes() {
    let ground = Ground::new();
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("f")).unwrap();
    file.write_all_at(&[9; 300_000], 0).unwrap();
    sys::fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 300_000);
    sys::fallocate(&file, 0, 0, 400_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 400_000);
    sys::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 65_536, 131_072).unwrap();
    sys::fallocate(&file, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, 250_000, 10).unwrap();
    let mut want = vec![9; 300_000];
    want.resize(400_000, 0);
    want[65_536..65_536 + 131_072].fill(0);
    want[250_000..250_010].fill(0);
    sys::close(file).unwrap();
    assert!(fs::read(ground.at("f")).unwrap() == want);
}

#[test]
fn copy_file_range_copies_and_the_copies_live_their_own_lives() {
    let ground = Ground::new();
    let bytes = Rng::new(3).bytes(5 << 20);
    fs::write(ground.at("from"), &bytes).unwrap();
    let from = File::open(ground.at("from")).unwrap();
    let to = File::create(ground.at("to")).unwrap();
    let mut done = 0;
    while done < bytes.len() as u64 {
        let n = sys::copy_range(&from, done, &to, done, bytes.len() as u64 - done).unwrap();
        assert!(n > 0);
        done += n;
    }
    to.write_all_at(b"mine", 100).unwrap();
    sys::close(to).unwrap();
    assert!(fs::read(ground.at("from")).unwrap() == bytes, "writing the copy changed the original");
    fs::remove_file(ground.at("from")).unwrap();
    let copy = fs::read(ground.at("to")).unwrap();
    assert_eq!(&copy[100..104], b"mine");
    assert!(copy[104..] == bytes[104..], "removing the original changed the copy");
}

#[test]
fn shared_mappings_write_the_file() {
    let ground = Ground::new();
    let file =
        File::options().create(true).read(true).write(true).truncate(true).open(ground.at("f")).unwrap();
    file.set_len(100_000).unwrap();
    let mut map = sys::Map::shared(&file, 100_000).unwrap();
    map.write(50_000, b"through the mapping");
    map.sync().unwrap();
    assert_eq!(sys::read_at(&file, 50_000, 19).unwrap(), b"through the mapping");
    file.write_all_at(b"through the call", 10).unwrap();
    assert_eq!(map.read(10, 16), b"through the call");
    // The mapping outlives the descriptor and the name.
    drop(file);
    map.write(60_000, b"later");
    drop(map);
    assert_eq!(&fs::read(ground.at("f")).unwrap()[60_000..60_005], b"later");
}

#[test]
fn times_have_nanoseconds_and_reach_before_1970() {
    let mut ground = Ground::new();
    for (name, seconds, nanos) in
        [("now", 1_700_000_000, 123_456_789), ("old", -86_400 * 365, 987_654_321), ("far", 4_300_000_000, 1)]
    {
        fs::write(ground.at(name), "").unwrap();
        sys::utimens(&ground.at(name), (seconds, nanos), (seconds + 1, nanos - 1)).unwrap();
        let m = fs::metadata(ground.at(name)).unwrap();
        assert_eq!(
            (m.atime(), m.atime_nsec(), m.mtime(), m.mtime_nsec()),
            (seconds, nanos, seconds + 1, nanos - 1),
            "{name}"
        );
    }
    ground.restart();
    let m = fs::metadata(ground.at("old")).unwrap();
    assert_eq!((m.mtime(), m.mtime_nsec()), (-86_400 * 365 + 1, 987_654_320));
}

#[test]
fn changes_move_the_times_posix_says() {
    let ground = Ground::new();
    fs::write(ground.at("f"), "x").unwrap();
    let long_ago = (1_000_000_000, 0);
    let reset = |name: &str| sys::utimens(&ground.at(name), long_ago, long_ago).unwrap();
    reset("f");
    let changed = fs::metadata(ground.at("f")).unwrap().ctime();
    assert!(changed > long_ago.0, "setting times must move ctime");
    fs::OpenOptions::new().append(true).open(ground.at("f")).unwrap().write_all(b"y").unwrap();
    assert!(fs::metadata(ground.at("f")).unwrap().mtime() > long_ago.0, "a write must move mtime");
    fs::create_dir(ground.at("d")).unwrap();
    reset("d");
    fs::write(ground.at("d/in"), "").unwrap();
    assert!(
        fs::metadata(ground.at("d")).unwrap().mtime() > long_ago.0,
        "a new name must move its folder's mtime"
    );
    reset("f");
    fs::set_permissions(ground.at("f"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(ground.at("f")).unwrap().mtime(), long_ago.0, "chmod must not move mtime");
}

#[test]
fn names_have_up_to_255_bytes() {
    let ground = Ground::new();
    let longest = "ä".repeat(127) + "x";
    assert_eq!(longest.len(), 255);
    fs::write(ground.at(&longest), "here").unwrap();
    assert_eq!(fs::read_to_string(ground.at(&longest)).unwrap(), "here");
    let names: Vec<_> = fs::read_dir(ground.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().any(|n| n.to_string_lossy() == longest));
    assert_eq!(errno(fs::write(ground.at(&"x".repeat(256)), "")), libc::ENAMETOOLONG);
}

#[test]
fn fifos_sockets_and_devices_work() {
    let ground = Ground::new();
    sys::mknod(&ground.at("fifo"), libc::S_IFIFO | 0o600, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| fs::write(ground.at("fifo"), "through the fifo").unwrap());
        assert_eq!(fs::read_to_string(ground.at("fifo")).unwrap(), "through the fifo");
    });
    // Addresses of sockets are short, so the way to the folder goes through its descriptor.
    let folder = File::open(ground.root()).unwrap();
    let _listening = UnixListener::bind(format!("/proc/self/fd/{}/s", folder.as_raw_fd())).unwrap();
    assert!(fs::symlink_metadata(ground.at("s")).unwrap().file_type().is_socket());
    sys::mknod(&ground.at("null"), libc::S_IFCHR | 0o666, libc::makedev(1, 3)).unwrap();
    let device = fs::symlink_metadata(ground.at("null")).unwrap();
    assert!(device.file_type().is_char_device());
    assert_eq!(device.rdev(), libc::makedev(1, 3));
}

#[test]
fn unnamed_temporary_files_can_be_given_a_name() {
    let ground = Ground::new();
    let file = sys::open(ground.root(), libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
    file.write_all_at(b"no name yet", 0).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read_dir(ground.root()).unwrap().count(), 0);
    sys::link_open(&file, &ground.at("named")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    drop(file);
    assert_eq!(fs::read_to_string(ground.at("named")).unwrap(), "no name yet");
    // One that never gets a name is gone with its handle.
    let lost = sys::open(ground.root(), libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
    lost.write_all_at(b"gone soon", 0).unwrap();
    drop(lost);
    assert_eq!(fs::read_dir(ground.root()).unwrap().count(), 1);
}

#[test]
fn acls_are_refused() {
    let mut ground = Ground::new();
    fs::write(ground.at("f"), "").unwrap();
    if ground.up().is_none() {
        return;
    }
    let ran = run(Command::new("setfacl").args(["-m", "u:daemon:r"]).arg(ground.at("f")));
    assert!(ran.fails().contains("not supported"), "setfacl must say why it fails");
}

#[test]
fn renames_can_keep_and_exchange() {
    let ground = Ground::new();
    fs::write(ground.at("a"), "a").unwrap();
    fs::create_dir(ground.at("b")).unwrap();
    fs::write(ground.at("b/inside"), "").unwrap();
    let kept = sys::rename2(&ground.at("a"), &ground.at("b"), libc::RENAME_NOREPLACE);
    assert_eq!(errno(kept), libc::EEXIST);
    sys::rename2(&ground.at("a"), &ground.at("b"), libc::RENAME_EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(ground.at("b")).unwrap(), "a");
    assert!(ground.at("a/inside").exists());
    let into_itself = fs::rename(ground.at("a"), ground.at("a/below"));
    assert_eq!(errno(into_itself), libc::EINVAL);
}

#[test]
fn extended_attributes_are_kept_and_bounded() {
    let mut ground = Ground::new();
    fs::write(ground.at("f"), "").unwrap();
    let f = ground.at("f");
    sys::set_xattr(&f, "user.one", b"1", libc::XATTR_CREATE).unwrap();
    assert_eq!(errno(sys::set_xattr(&f, "user.one", b"2", libc::XATTR_CREATE)), libc::EEXIST);
    assert_eq!(errno(sys::set_xattr(&f, "user.two", b"2", libc::XATTR_REPLACE)), libc::ENODATA);
    sys::set_xattr(&f, "user.one", b"", libc::XATTR_REPLACE).unwrap();
    let long = Rng::new(4).bytes(2000);
    sys::set_xattr(&f, "user.long", &long, 0).unwrap();
    ground.restart();
    assert_eq!(sys::get_xattr(&f, "user.one").unwrap(), b"");
    assert_eq!(sys::get_xattr(&f, "user.long").unwrap(), long);
    assert_eq!(sys::list_xattrs(&f).unwrap(), ["user.long", "user.one"]);
    sys::remove_xattr(&f, "user.one").unwrap();
    assert_eq!(errno(sys::get_xattr(&f, "user.one")), libc::ENODATA);
}

#[test]
fn extended_attributes_of_kinds_that_nobody_guards_are_refused() {
    let ground = Ground::new();
    let f = ground.at("f");
    fs::write(&f, "").unwrap();
    for name in ["system.none", "none.none", "none"] {
        assert_eq!(errno(sys::set_xattr(&f, name, b"1", 0)), libc::EOPNOTSUPP, "{name}");
        assert_eq!(errno(sys::get_xattr(&f, name)), libc::EOPNOTSUPP, "{name}");
        assert_eq!(errno(sys::remove_xattr(&f, name)), libc::EOPNOTSUPP, "{name}");
    }
    assert_eq!(sys::list_xattrs(&f).unwrap(), [""; 0]);
    for name in ["user.kept", "trusted.kept", "security.kept"] {
        sys::set_xattr(&f, name, b"1", 0).unwrap();
        assert_eq!(sys::get_xattr(&f, name).unwrap(), b"1");
        sys::remove_xattr(&f, name).unwrap();
    }
}

#[test]
fn links_count_and_symlinks_keep_their_text() {
    let ground = Ground::new();
    fs::write(ground.at("one"), "same").unwrap();
    fs::hard_link(ground.at("one"), ground.at("two")).unwrap();
    assert_eq!(fs::metadata(ground.at("one")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(ground.at("one")).unwrap().ino(), fs::metadata(ground.at("two")).unwrap().ino());
    fs::remove_file(ground.at("one")).unwrap();
    assert_eq!(fs::read_to_string(ground.at("two")).unwrap(), "same");
    assert_eq!(fs::metadata(ground.at("two")).unwrap().nlink(), 1);
    let target = "t".repeat(4000);
    std::os::unix::fs::symlink(&target, ground.at("link")).unwrap();
    assert_eq!(fs::read_link(ground.at("link")).unwrap().to_string_lossy(), target);
    fs::create_dir(ground.at("d")).unwrap();
    fs::create_dir(ground.at("d/e")).unwrap();
    assert_eq!(fs::metadata(ground.at("d")).unwrap().nlink(), 3, "a folder's links count its folders");
}

#[test]
fn umask_and_set_group_id_folders_rule_new_files() {
    let ground = Ground::new();
    sh(
        ground.root(),
        "umask 027; touch masked; mkdir shared; chgrp daemon shared; chmod 2775 shared; touch shared/f; mkdir shared/d",
    );
    assert_eq!(fs::metadata(ground.at("masked")).unwrap().mode() & 0o777, 0o640);
    let group = fs::metadata(ground.at("shared")).unwrap().gid();
    assert_eq!(fs::metadata(ground.at("shared/f")).unwrap().gid(), group);
    let below = fs::metadata(ground.at("shared/d")).unwrap();
    assert_eq!((below.gid(), below.mode() & 0o2000), (group, 0o2000));
}

#[test]
fn writing_takes_set_user_id_away() {
    let ground = Ground::new();
    fs::write(ground.at("f"), "x").unwrap();
    fs::set_permissions(ground.at("f"), fs::Permissions::from_mode(0o6777)).unwrap();
    fs::set_permissions(ground.root(), fs::Permissions::from_mode(0o777)).unwrap();
    // The descriptor is opened by the shell, since the way to the file may be closed to others.
    let path = ground.at("f");
    sh(
        ground.root(),
        &format!("setpriv --reuid=1 --regid=1 --clear-groups sh -c 'echo y >&3' 3>>{}", path.display()),
    );
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
    // So do other changes of content.
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    let (file, source) = (open(), ground.at("source"));
    fs::write(&source, "xyz").unwrap();
    let source = File::open(source).unwrap();
    let changes: [&(dyn Fn() + Sync); 4] = [
        &|| sys::fallocate(&file, 0, 0, 100).unwrap(),
        &|| sys::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 10).unwrap(),
        &|| sys::fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 0, 10).unwrap(),
        &|| assert_eq!(sys::copy_range(&source, 0, &file, 0, 3).unwrap(), 3),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                sys::use_files_as(1);
                change();
            });
        });
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777, "change {number}");
    }
}

#[test]
fn writing_takes_capabilities_away() {
    let ground = Ground::new();
    let path = ground.at("f");
    fs::set_permissions(ground.root(), fs::Permissions::from_mode(0o777)).unwrap();
    let write_as = |how: &str| {
        let write =
            format!("setpriv --reuid=1 --regid=1 --clear-groups sh -c 'echo y >&3' 3{how}{}", path.display());
        sh(ground.root(), &write);
    };
    for how in [">>", "<>"] {
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        sh(ground.root(), "setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 f");
        assert_eq!(sys::list_xattrs(&path).unwrap(), ["security.capability"]);
        write_as(how);
        assert!(sys::list_xattrs(&path).unwrap().is_empty(), "after writing with {how}");
    }
}

#[test]
fn space_and_inodes_are_counted() {
    let ground = Ground::new();
    let (total, free, inodes, free_inodes) = sys::space(ground.root()).unwrap();
    assert!(total > 0 && free > 0 && free <= total, "{total} {free}");
    assert!(inodes > 0 && free_inodes > 0 && free_inodes <= inodes, "{inodes} {free_inodes}");
}

#[test]
fn locks_conflict_and_are_handed_on() {
    let ground = Ground::new();
    fs::write(ground.at("f"), "x").unwrap();
    let open = || File::options().read(true).write(true).open(ground.at("f")).unwrap();
    let (one, two) = (open(), open());
    sys::flock(&one, libc::LOCK_EX).unwrap();
    assert_eq!(errno(sys::flock(&two, libc::LOCK_SH | libc::LOCK_NB)), libc::EWOULDBLOCK);
    sys::flock(&one, libc::LOCK_UN).unwrap();
    sys::flock(&two, libc::LOCK_SH | libc::LOCK_NB).unwrap();
    sys::ofd_lock(&one, libc::F_WRLCK, 0, 10, false).unwrap();
    assert_eq!(errno(sys::ofd_lock(&two, libc::F_WRLCK, 5, 10, false)), libc::EAGAIN);
    sys::ofd_lock(&two, libc::F_WRLCK, 10, 10, false).unwrap();
    // One that waits gets the lock when it is given up.
    let waits = open();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sys::ofd_lock(&waits, libc::F_WRLCK, 0, 5, true));
        std::thread::sleep(Duration::from_millis(200));
        sys::ofd_lock(&one, libc::F_UNLCK, 0, 10, false).unwrap();
        waiting.join().unwrap().unwrap();
    });
    // Closing ends what is left, as soon as no process that is just being started has the file any more.
    drop(waits);
    eventually("the lock to be free", || {
        sys::ofd_lock(&one, libc::F_WRLCK, 0, 5, false).map_err(|e| e.to_string())
    });
}

/// Waits for a lock that is not to be had until a signal ends the wait.
fn wait_interrupted(file: &File, start: u64, len: u64) {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            tell.send(sys::this_thread()).unwrap();
            sys::ofd_lock(file, libc::F_WRLCK, start, len, true)
        });
        let thread = told.recv().unwrap();
        // The first may come before it waits.
        while !waiting.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
            sys::signal_thread(thread, libc::SIGUSR2);
        }
        assert_eq!(errno(waiting.join().unwrap()), libc::EINTR);
    });
}

#[test]
fn an_interrupted_wait_for_a_lock_leaves_the_others_alone() {
    let ground = Ground::new();
    fs::write(ground.at("f"), "x").unwrap();
    sys::only_interrupts(libc::SIGUSR2);
    let open = || File::options().read(true).write(true).open(ground.at("f")).unwrap();
    let (one, two, three) = (open(), open(), open());
    // One that is held and could not be made more of.
    sys::ofd_lock(&one, libc::F_RDLCK, 0, 10, false).unwrap();
    sys::ofd_lock(&two, libc::F_RDLCK, 0, 100, false).unwrap();
    wait_interrupted(&one, 0, 100);
    sys::ofd_lock(&two, libc::F_UNLCK, 0, 100, false).unwrap();
    assert_eq!(errno(sys::ofd_lock(&three, libc::F_WRLCK, 0, 10, false)), libc::EAGAIN);
    sys::ofd_lock(&one, libc::F_UNLCK, 0, 10, false).unwrap();
    // One that is taken right after the wait.
    sys::ofd_lock(&two, libc::F_WRLCK, 50, 10, false).unwrap();
    for _ in 0..100 {
        wait_interrupted(&one, 0, 100);
        sys::ofd_lock(&one, libc::F_WRLCK, 0, 10, false).unwrap();
        for _ in 0..10 {
            assert_eq!(errno(sys::ofd_lock(&three, libc::F_WRLCK, 0, 10, false)), libc::EAGAIN);
        }
        sys::ofd_lock(&one, libc::F_UNLCK, 0, 10, false).unwrap();
    }
    // Nothing is kept of what was waited for.
    sys::ofd_lock(&two, libc::F_UNLCK, 0, 100, false).unwrap();
    eventually("the lock to be free", || {
        sys::ofd_lock(&three, libc::F_WRLCK, 0, 100, false).map_err(|e| e.to_string())
    });
}

#[test]
fn locks_of_a_killed_process_end() {
    let ground = Ground::new();
    fs::write(ground.at("f"), "x").unwrap();
    let mut holder =
        Command::new("flock").arg(ground.at("f")).args(["sleep", "1000"]).spawn().expect("flock(1) is there");
    let file = File::open(ground.at("f")).unwrap();
    eventually("the other process to take the lock", || {
        if sys::flock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err() {
            return Ok(());
        }
        sys::flock(&file, libc::LOCK_UN).unwrap();
        Err("still free".into())
    });
    // flock(1) waits for its child, which has the descriptor too.
    let children = run(Command::new("pgrep").args(["-P", &holder.id().to_string()])).ok();
    holder.kill().unwrap();
    holder.wait().unwrap();
    for child in children.lines() {
        sys::kill(child.trim().parse().unwrap(), libc::SIGKILL);
    }
    eventually("the lock to be free", || {
        sys::flock(&file, libc::LOCK_EX | libc::LOCK_NB).map_err(|e| e.to_string())
    });
}

#[test]
fn a_folder_of_100_000_entries_is_streamed_whole_and_once() {
    let ground = Ground::new();
    let folder = ground.at("many");
    fs::create_dir(&folder).unwrap();
    const MANY: u64 = 100_000;
    std::thread::scope(|scope| {
        for part in 0..4 {
            let folder = &folder;
            scope.spawn(move || {
                for n in (part..MANY).step_by(4) {
                    sys::mknod(&folder.join(format!("entry-{n:06}")), libc::S_IFREG | 0o644, 0).unwrap();
                }
            });
        }
    });
    let mut seen = BTreeSet::new();
    let mut dir = sys::Dir::open(&folder).unwrap();
    while let Some((name, _)) = dir.next().unwrap() {
        assert!(seen.insert(name.clone()), "{name} came twice");
    }
    assert_eq!(seen.len() as u64, MANY + 2);
    // A stream that is read while names go and come gives every name that stayed, once.
    let mut dir = sys::Dir::open(&folder).unwrap();
    let mut seen = BTreeSet::new();
    let mut step = 0u64;
    while let Some((name, _)) = dir.next().unwrap() {
        assert!(seen.insert(name.clone()), "{name} came twice");
        if step.is_multiple_of(200) {
            fs::remove_file(folder.join(format!("entry-{:06}", step * 7 % MANY / 10 * 10))).ok();
            fs::write(folder.join(format!("new-{step}")), "").unwrap();
        }
        step += 1;
    }
    let stayed = (0..MANY).filter(|n| !n.is_multiple_of(10)).all(|n| seen.contains(&format!("entry-{n:06}")));
    assert!(stayed, "a name that was there all the time was left out");
}

#[test]
fn folder_positions_survive_a_restart() {
    let mut ground = Ground::new();
    for n in 0..3000 {
        fs::write(ground.at(&format!("f{n:05}")), "").unwrap();
    }
    let mut names = BTreeSet::new();
    let mut dir = sys::Dir::open(ground.root()).unwrap();
    let mut position = 0;
    for _ in 0..1234 {
        let (name, after) = dir.next().unwrap().unwrap();
        names.insert(name);
        position = after;
    }
    drop(dir);
    ground.restart();
    let mut dir = sys::Dir::open(ground.root()).unwrap();
    dir.seek(position);
    while let Some((name, _)) = dir.next().unwrap() {
        assert!(names.insert(name.clone()), "{name} came before and after the restart");
    }
    assert_eq!(names.len(), 3002);
}

#[test]
fn everything_is_there_after_a_restart() {
    let mut ground = Ground::new();
    let bytes = Rng::new(5).bytes(9_000_000);
    fs::write(ground.at("big"), &bytes).unwrap();
    fs::create_dir_all(ground.at("a/b/c")).unwrap();
    for n in 0..100 {
        fs::write(ground.at(&format!("a/b/c/{n}")), format!("file {n}")).unwrap();
    }
    ground.restart();
    assert!(fs::read(ground.at("big")).unwrap() == bytes);
    for n in 0..100 {
        assert_eq!(fs::read_to_string(ground.at(&format!("a/b/c/{n}"))).unwrap(), format!("file {n}"));
    }
}

#[test]
fn a_signal_ends_a_wait_for_a_silent_server() {
    let cluster = Cluster::start();
    let bytes = Rng::new(6).bytes(1 << 20);
    fs::write(cluster.mount().at("f"), &bytes).unwrap();
    // A fresh mount, so that nothing is in a cache.
    let mount = cluster.mount();
    cluster.data.iter().for_each(|d| d.signal(libc::SIGSTOP));
    let mut reader =
        Command::new("cat").arg(mount.at("f")).stdout(std::process::Stdio::null()).spawn().unwrap();
    // It must get as far as waiting in the kernel for the mount.
    eventually("the reader to wait", || {
        let stack = sys::stacks(reader.id() as i32);
        let waits = stack.contains("fuse") || stack.contains("folio_wait") || stack.contains("request_wait");
        if waits { Ok(()) } else { Err(stack) }
    });
    sys::kill(reader.id() as i32, libc::SIGTERM);
    eventually("the signalled reader to leave its wait", || match reader.try_wait() {
        Ok(Some(_)) => Ok(()),
        _ => Err(sys::stacks(reader.id() as i32)),
    });
    cluster.data.iter().for_each(|d| d.signal(libc::SIGCONT));
    assert!(fs::read(mount.at("f")).unwrap() == bytes, "reads go on when the servers do");
}

#[test]
fn io_uring_programs_work() {
    let ground = Ground::new();
    let line = "fio --name=ring --ioengine=io_uring --filename=ring --rw=randrw --bs=16k --size=8m --iodepth=16 \
                --verify=crc32c --verify_fatal=1 --randseed=1 --minimal";
    let mut fio = Command::new("bash");
    let ran = run(fio.args(["-c", line]).current_dir(ground.root()));
    if ran.err.contains("Operation not permitted") || ran.err.contains("Function not implemented") {
        println!("this kernel does not let programs use io_uring; nothing was tested");
        return;
    }
    ran.ok();
}

#[test]
fn errors_are_the_ones_posix_names() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    fs::write(ground.at("d/f"), "x").unwrap();
    assert_eq!(errno(fs::remove_dir(ground.at("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::create_dir(ground.at("d"))), libc::EEXIST);
    assert_eq!(errno(fs::read(ground.at("d/f/g"))), libc::ENOTDIR);
    assert_eq!(errno(fs::read(ground.at("none"))), libc::ENOENT);
    assert_eq!(errno(File::options().write(true).open(ground.at("d"))), libc::EISDIR);
    let file = File::open(ground.at("d/f")).unwrap();
    assert_eq!(errno(file.write_at(b"x", 0)), libc::EBADF);
    assert_eq!(errno(sys::fallocate(&file, 0, 0, 10)), libc::EBADF);
    sys::access(&ground.at("d/f"), libc::R_OK).unwrap();
    assert_eq!(errno(sys::access(&ground.at("none"), libc::R_OK)), libc::ENOENT);
}

#[test]
fn syncing_files_and_folders_returns() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    let file = File::create(ground.at("d/f")).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    sys::sync_folder(&ground.at("d")).unwrap();
    sys::sync_folder(ground.root()).unwrap();
    sh(ground.root(), "sync -f d/f");
}
