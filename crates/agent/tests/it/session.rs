//! What only the real kernel can show.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use torchfs_agent::fuse::{Notice, abi};
use torchfs_agent::mount::{MountOptions, Umount, mount, umount};
use torchfs_agent::{Error, FuseConfig};

use crate::stage::{Stage, until};
use crate::toy::LONG;

/// A process of its own, so that it can be signalled and cannot hang the test.
fn shell(script: &str, path: &Path) -> Child {
    Command::new("sh").arg("-c").arg(script).arg("sh").arg(path).stderr(Stdio::null()).spawn().unwrap()
}

fn signal(child: &Child) {
    let script = format!("kill -TERM {}", child.id());
    assert!(Command::new("sh").arg("-c").arg(script).status().unwrap().success());
}

fn ended(child: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    until("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn files_can_be_written_read_listed_and_removed() {
    let Some(stage) = Stage::new() else { return };
    fs::create_dir(stage.at("dir")).unwrap();
    fs::create_dir(stage.at("yields")).unwrap();
    for number in 0..500 {
        fs::write(stage.at(&format!("file-{number:03}")), format!("content {number}")).unwrap();
    }
    assert_eq!(fs::read_dir(&stage.path).unwrap().count(), 502);
    assert_eq!(fs::read_to_string(stage.at("file-321")).unwrap(), "content 321");
    fs::remove_file(stage.at("file-321")).unwrap();
    assert_eq!(fs::metadata(stage.at("file-321")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    stage.end();
}

#[test]
fn large_payloads_arrive_whole_and_on_a_page() {
    let Some(stage) = Stage::new() else { return };
    let data: Vec<u8> = (0..5 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let path = stage.at("large");
    File::create(&path).unwrap().write_all(&data).unwrap();
    assert!(stage.toy.payloads_on_a_page.load(Ordering::SeqCst) >= 4);
    // Read it from the toy and not from the page cache.
    let ino = fs::metadata(&path).unwrap().ino();
    stage.tell(Notice::Inode { ino, offset: Some(0), len: 0 });
    assert!(fs::read(&path).unwrap() == data);
    stage.end();
}

#[test]
fn writes_inside_a_page_keep_what_is_around_them() {
    // The kernel once took the preferred size of I/O for the size of its blocks; ours is larger than a page.
    let Some(stage) = Stage::with(FuseConfig::default(), LONG) else { return };
    let mut data: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    let ino = stage.toy.put("file", &data);
    let file = File::options().read(true).write(true).open(stage.at("file")).unwrap();
    for (round, at) in [0, 1, 4095, 65_530, 70_000, 131_072, 299_990, 300_500].into_iter().enumerate() {
        stage.tell(Notice::Inode { ino, offset: Some(0), len: 0 });
        let part = vec![round as u8; 1 + round * 700];
        file.write_all_at(&part, at as u64).unwrap();
        data.resize(data.len().max(at + part.len()), 0);
        data[at..at + part.len()].copy_from_slice(&part);
        assert!(fs::read(stage.at("file")).unwrap() == data, "page cache, round {round}");
        stage.tell(Notice::Inode { ino, offset: Some(0), len: 0 });
        assert!(fs::read(stage.at("file")).unwrap() == data, "toy, round {round}");
    }
    drop(file);
    stage.end();
}

#[test]
fn the_mounts_readahead_is_raised() {
    let Some(stage) = Stage::new() else { return };
    let dev = fs::metadata(&stage.path).unwrap().dev();
    let file = format!("/sys/class/bdi/{}:{}/read_ahead_kb", libc::major(dev), libc::minor(dev));
    assert_eq!(fs::read_to_string(file).unwrap().trim(), "8192");
    stage.end();
}

#[test]
fn the_kernel_agrees_to_what_we_rest_on() {
    let Some(stage) = Stage::new() else { return };
    let agreed = stage.served.agreed();
    use abi::feature::*;
    assert!(agreed.has(HANDLE_KILLPRIV_V2 | PARALLEL_DIROPS | CACHE_SYMLINKS));
    assert!(!agreed.has(WRITEBACK_CACHE));
    stage.end();
}

#[test]
fn times_before_1970_survive_the_way_through_the_kernel() {
    let Some(stage) = Stage::new() else { return };
    let path = stage.at("old");
    let file = File::create(&path).unwrap();
    let old = UNIX_EPOCH - Duration::new(1, 500_000_000);
    file.set_modified(old).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (-2, 500_000_000));
    assert_eq!(meta.modified().unwrap(), old);
    drop(file);
    stage.end();
}

#[test]
fn stale_data_and_entries_are_dropped_when_told() {
    let Some(stage) = Stage::with(FuseConfig::default(), LONG) else { return };
    let ino = stage.toy.put("file", b"old");
    assert_eq!(fs::read(stage.at("file")).unwrap(), b"old");
    // Opens drop the page cache, so hold one open across the change.
    let mut file = File::open(stage.at("file")).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    stage.toy.set_data(ino, b"newer");
    stage.tell(Notice::Inode { ino, offset: Some(0), len: 0 });
    file.rewind().unwrap();
    text.clear();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "newer");

    stage.toy.remove("file");
    assert!(stage.at("file").exists(), "the kernel may keep the entry");
    let entry = |expire_only| Notice::Entry { parent: 1, name: Bytes::from_static(b"file"), expire_only };
    stage.tell(entry(false));
    assert!(!stage.at("file").exists());
    stage.toy.put("file", b"again");
    assert!(!stage.at("file").exists(), "the kernel may keep that there is none");
    stage.tell(entry(false));
    assert!(stage.at("file").exists());
    stage.toy.remove("file");
    if stage.served.agreed().minor >= abi::VERSION_MINOR_EPOCH {
        stage.tell(Notice::Epoch);
        assert!(!stage.at("file").exists(), "every entry is stale");
    }
    // What the kernel does not hold is no error.
    stage.tell(Notice::Entry { parent: 1, name: Bytes::from_static(b"unknown"), expire_only: true });
    stage.tell(Notice::Inode { ino: 999, offset: None, len: 0 });
    drop(file);
    stage.end();
}

#[test]
fn pushed_data_is_read_without_asking_us() {
    let Some(stage) = Stage::with(FuseConfig::default(), LONG) else { return };
    let ino = stage.toy.put("file", &[b'x'; 4096]);
    let file = File::open(stage.at("file")).unwrap();
    let pushed = vec![Bytes::from_static(&[b'p'; 1000]), Bytes::from_static(&[b'q'; 3096])];
    stage.tell(Notice::Store { ino, offset: 0, data: pushed });
    let mut data = [0; 4096];
    file.read_exact_at(&mut data, 0).unwrap();
    assert_eq!((data[999], data[1000], data[4095]), (b'p', b'q', b'q'));
    drop(file);
    stage.end();
}

#[test]
fn resend_is_understood_by_the_kernel() {
    let Some(stage) = Stage::new() else { return };
    if stage.served.agreed().has(abi::feature::HAS_RESEND) {
        stage.tell(Notice::Resend);
    }
    fs::write(stage.at("file"), "still works").unwrap();
    stage.end();
}

#[test]
fn a_killed_process_leaves_a_read_that_never_ends() {
    let Some(stage) = Stage::with(quick(), Duration::ZERO) else { return };
    stage.toy.put("never", &[1; 100]);
    let mut child = shell("exec cat \"$1/never\"", &stage.path);
    until("the read waits", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    child.kill().unwrap();
    assert!(!ended(&mut child).success());
    until("the wait was dropped", || stage.toy.waiting.load(Ordering::SeqCst) == 0);
    stage.end();
}

#[test]
fn a_killed_process_does_not_wait_for_readahead() {
    let Some(stage) = Stage::with(quick(), Duration::ZERO) else { return };
    stage.toy.put("later", &[1; 100]);
    let mut child = shell("exec cat \"$1/later\"", &stage.path);
    until("the readahead waits", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    child.kill().unwrap();
    assert!(!ended(&mut child).success());
    // Nobody interrupts what the kernel reads ahead; it ends by itself.
    stage.toy.go.notify_one();
    until("the readahead ended", || stage.toy.waiting.load(Ordering::SeqCst) == 0);
    stage.end();
}

#[test]
fn a_signal_ends_a_wait_for_a_lock() {
    let Some(stage) = Stage::with(FuseConfig { interrupt_grace: LONG, ..quick() }, Duration::ZERO) else {
        return;
    };
    fs::write(stage.at("file"), "").unwrap();
    let mut child = shell("exec flock \"$1/file\" true", &stage.path);
    until("the lock is waited for", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    signal(&child);
    assert!(!ended(&mut child).success());
    assert_eq!(stage.toy.waiting.load(Ordering::SeqCst), 0, "dropped before its caller knows");
    stage.end();
}

#[test]
fn a_lock_whose_caller_left_is_dropped_and_does_not_run_on() {
    let Some(stage) = Stage::with(quick(), Duration::ZERO) else { return };
    stage.toy.put("never", b"");
    let mut child = shell("exec flock -n \"$1/never\" true", &stage.path);
    until("the lock is asked for", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    signal(&child);
    assert!(!ended(&mut child).success());
    assert_eq!(stage.toy.waiting.load(Ordering::SeqCst), 0, "dropped before its caller knows");
    stage.end();
}

#[test]
fn a_change_whose_caller_left_runs_on_and_its_reference_is_taken_back() {
    let Some(stage) = Stage::with(quick(), Duration::ZERO) else { return };
    let mut child = shell("exec mkdir \"$1/slow\"", &stage.path);
    until("mkdir waits", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    child.kill().unwrap();
    ended(&mut child);
    assert!(stage.toy.undone.lock().is_empty());
    stage.toy.go.notify_one();
    until("the reference is taken back", || !stage.toy.undone.lock().is_empty());
    assert!(stage.toy.undone.lock()[0].forget.is_some());
    assert!(stage.at("slow").is_dir());
    stage.end();
}

#[test]
fn pages_of_a_hole_whose_caller_left_are_dropped_when_it_is_there() {
    let Some(stage) = Stage::with(quick(), LONG) else { return };
    stage.toy.put("slow", &[1; 8192]);
    let file = File::open(stage.at("slow")).unwrap();
    let read = || {
        let mut data = [9; 8192];
        file.read_exact_at(&mut data, 0).unwrap();
        data
    };
    assert!(read() == [1; 8192]);
    let mut child = shell("exec fallocate -p -o 0 -l 8192 \"$1/slow\"", &stage.path);
    until("fallocate waits", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    signal(&child);
    assert!(!ended(&mut child).success());
    // Its own open has dropped them, too.
    assert!(read() == [1; 8192]);
    stage.toy.go.notify_one();
    until("the hole is seen", || read() == [0; 8192]);
    drop(file);
    stage.end();
}

#[test]
fn a_signal_does_not_disturb_what_ends_in_time() {
    let Some(stage) = Stage::with(FuseConfig { interrupt_grace: LONG, ..quick() }, Duration::ZERO) else {
        return;
    };
    // The shell itself creates the file, and has a handler for the signal.
    let mut child = shell("trap : TERM; echo made > \"$1/slow\"", &stage.path);
    until("create waits", || stage.toy.waiting.load(Ordering::SeqCst) > 0);
    signal(&child);
    std::thread::sleep(Duration::from_millis(100));
    assert!(child.try_wait().unwrap().is_none(), "it still waits");
    stage.toy.go.notify_one();
    assert!(ended(&mut child).success());
    assert_eq!(fs::read_to_string(stage.at("slow")).unwrap(), "made\n");
    stage.end();
}

#[test]
fn a_panic_in_an_operation_costs_its_caller_an_error_and_nobody_else_anything() {
    let Some(stage) = Stage::new() else { return };
    fs::write(stage.at("file"), b"12345678").unwrap();
    for _ in 0..8 {
        let error = fs::hard_link(stage.at("file"), stage.at("link")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    assert_eq!(fs::read(stage.at("file")).unwrap(), b"12345678");
    stage.end();
}

#[test]
fn a_mount_in_use_stays_until_it_is_forced() {
    let Some(mut stage) = Stage::new() else { return };
    fs::write(stage.at("file"), "x").unwrap();
    let file = File::open(stage.at("file")).unwrap();
    let busy = stage.runtime.block_on(stage.served.unmount(Umount::Normal)).unwrap_err();
    assert!(matches!(busy, Error::InUse { .. }), "{busy}");
    assert!(busy.to_string().contains("--lazy"), "{busy}");
    let again = mount(&MountOptions::new(&stage.path)).unwrap_err();
    assert!(matches!(again, Error::Busy { .. }), "{again}");
    stage.runtime.block_on(stage.served.unmount(Umount::Force)).unwrap();
    assert_eq!(file.metadata().unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    assert_eq!(fs::read_dir(&stage.path).unwrap().count(), 0);
}

#[test]
fn a_mount_whose_server_is_gone_is_named_and_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let device = match mount(&MountOptions::new(dir.path())) {
        Ok((device, _)) => device,
        Err(error @ (Error::NoDevice(_) | Error::NoRights { .. })) => return eprintln!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    drop(device);
    let stale = mount(&MountOptions::new(dir.path())).unwrap_err();
    assert!(matches!(stale, Error::Stale { .. }), "{stale}");
    assert!(stale.to_string().contains("torchfs umount"), "{stale}");
    umount(dir.path(), Umount::Normal).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_mount_taken_away_from_outside_ends_the_session() {
    let Some(mut stage) = Stage::new() else { return };
    fs::write(stage.at("file"), "x").unwrap();
    until("nobody uses the mount", || umount(&stage.path, Umount::Normal).is_ok());
    stage.runtime.block_on(stage.served.wait());
}

/// A short grace, since these tests wait it out.
fn quick() -> FuseConfig {
    FuseConfig { interrupt_grace: Duration::from_millis(50), ..FuseConfig::default() }
}
