//! Two mounts of one volume.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use torchfs_proto::attr::{Kind, SetAttr};
use torchfs_proto::msg::meta::{FileLock, LockKind, LockType};
use torchfs_proto::{Code, Ino, Result};
use torchfs_vfs::{Caller, Config, Opened, Vfs};

use crate::world::{
    Kernel, RDWR, Rng, WHO, World, append, close, content, create, find, names, read, rounds, run, run_with,
    until, write,
};

const O_EXCL: i32 = 0o200;
const O_TRUNC: i32 = 0o1000;

#[test]
fn what_one_mount_wrote_is_read_by_the_other_at_once() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let (ino, on_a) = create(&a, "file").await;
        write(&a, ino, on_a.fh, 0, vec![1; 500_000]).await;
        // Not closed, not synced: opening it elsewhere calls it back.
        let on_b = b.open(ino, 2).await.unwrap();
        assert!(on_b.direct);
        assert_eq!(read(&b, ino, on_b.fh, 0, 1 << 20).await, vec![1; 500_000]);
        write(&b, ino, on_b.fh, 100, vec![2; 10]).await;
        assert_eq!(read(&a, ino, on_a.fh, 99, 12).await, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]);
        write(&a, ino, on_a.fh, 100, vec![3; 5]).await;
        assert_eq!(read(&b, ino, on_b.fh, 99, 12).await, [1, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 1]);
        close(&a, ino, on_a.fh).await;
        close(&b, ino, on_b.fh).await;
        assert_eq!(content(&a, ino).await, content(&b, ino).await);
    });
}

/// The kernel fills the last page up with zeros, and shows them as soon as it hears of a greater length.
#[test]
fn pages_are_dropped_before_the_kernel_is_told_that_the_file_has_grown_elsewhere() {
    for cut_here in [false, true] {
        run(|world| async move {
            let host = Arc::new(Kernel::default());
            let a = world.mount_with(Config::default(), host.clone()).await;
            let b = world.mount().await;
            let (ino, on_b) = create(&b, "file").await;
            write(&b, ino, on_b.fh, 0, vec![1; 10_000]).await;
            close(&b, ino, on_b.fh).await;
            if !cut_here {
                let cut = SetAttr { size: Some(100), ..SetAttr::default() };
                b.setattr(ino, None, cut).await.unwrap();
            }
            find(&a, Ino::ROOT, "file").await;
            let on_a = a.open(ino, 0).await.unwrap();
            assert!(!on_a.direct);
            if cut_here {
                let cut = SetAttr { size: Some(100), ..SetAttr::default() };
                a.setattr(ino, None, cut).await.unwrap();
            }
            let on_b = b.open(ino, RDWR).await.unwrap();
            append(&b, ino, on_b.fh, vec![2; 4_000]).await;
            b.fsync(ino, on_b.fh, false).await.unwrap();
            let told = match cut_here {
                true => a.getattr(ino, None).await.unwrap(),
                false => {
                    a.setattr(ino, None, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await.unwrap()
                }
            };
            assert_eq!(told.attr.size, 4_100);
            assert!(host.pages.lock().contains(&(ino, 0, 4_100)), "{:?}", host.pages.lock());
        });
    }
}

/// It dropped them before the write, and a reader may have brought old bytes back until the write was through.
#[test]
fn the_kernel_drops_its_pages_of_what_was_written_past_them() {
    run(|world| async move {
        let kernel = Arc::new(Kernel::default());
        let (a, b) = (world.mount().await, world.mount_with(Config::default(), kernel.clone()).await);
        let (ino, on_a) = create(&a, "file").await;
        write(&a, ino, on_a.fh, 0, vec![1; 100_000]).await;
        close(&a, ino, on_a.fh).await;
        let reader = b.open(ino, 0).await.unwrap();
        assert!(!reader.direct);
        let on_a = a.open(ino, 2).await.unwrap();
        let on_b = b.open(ino, 2).await.unwrap();
        assert!(on_b.direct);
        kernel.pages.lock().clear();
        write(&b, ino, on_b.fh, 5000, vec![2; 10]).await;
        assert_eq!(*kernel.pages.lock(), [(ino, 5000, 10)]);
        for opened in [reader, on_b] {
            close(&b, ino, opened.fh).await;
        }
        close(&a, ino, on_a.fh).await;
    });
}

/// The kernel holds the lock of a page for a read of it, and cannot drop the page before.
#[test]
fn a_read_does_not_wait_for_the_recall_that_waits_for_it() {
    run(|world| async move {
        let kernel = Arc::new(Kernel::default());
        let config = Config { settle_max: Duration::from_secs(1), ..Config::default() };
        let (a, b) = (world.mount_with(config, kernel.clone()).await, world.mount().await);
        let (ino, on_b) = create(&b, "file").await;
        write(&b, ino, on_b.fh, 0, vec![1; 100_000]).await;
        close(&b, ino, on_b.fh).await;
        let on_a = a.open(ino, 0).await.unwrap();
        assert_eq!(read(&a, ino, on_a.fh, 0, 10).await, [1; 10]);
        kernel.pages.lock().clear();
        kernel.locked.store(true, Ordering::Release);
        let opening = tokio::spawn({
            let b = b.clone();
            async move { b.open(ino, RDWR).await.unwrap() }
        });
        until(async || !kernel.pages.lock().is_empty()).await;
        assert_eq!(read(&a, ino, on_a.fh, 50_000, 10).await, [1; 10]);
        assert!(!opening.is_finished());
        kernel.locked.store(false, Ordering::Release);
        let on_b = opening.await.unwrap();
        // Once more, because of that read.
        assert_eq!(*kernel.pages.lock(), [(ino, 0, 0); 2]);
        write(&b, ino, on_b.fh, 50_000, vec![2; 10]).await;
        assert_eq!(read(&a, ino, on_a.fh, 50_000, 10).await, [2; 10]);
        close(&b, ino, on_b.fh).await;
    });
}

#[test]
fn reads_come_to_an_end_while_leases_of_other_files_come_and_go() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let mut others = Vec::new();
        for n in 0..8 {
            let (other, on_b) = create(&b, &format!("other{n}")).await;
            close(&b, other, on_b.fh).await;
            others.push(other);
        }
        let (ino, on_b) = create(&b, "file").await;
        write(&b, ino, on_b.fh, 0, vec![1; 100_000]).await;
        close(&b, ino, on_b.fh).await;
        world.slow_extents.store(50, Ordering::Release);
        let busy = tokio::spawn({
            let (a, b) = (a.clone(), b.clone());
            async move {
                for mode in (0..).map(|n| 0o600 + n % 2) {
                    let set = || SetAttr { mode: Some(mode), ..SetAttr::default() };
                    let turns = others.iter().map(|other| async {
                        a.getattr(*other, None).await.unwrap();
                        b.setattr(*other, None, set()).await.unwrap();
                    });
                    futures_util::future::join_all(turns).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        });
        let read = tokio::time::timeout(Duration::from_secs(10), content(&a, ino)).await;
        busy.abort();
        let asked = world.extents.load(Ordering::Acquire);
        assert_eq!(read.map(|bytes| bytes.len()), Ok(100_000), "asked {asked} times");
    });
}

#[test]
fn random_reads_and_writes_on_two_mounts_agree_with_an_array() {
    for seed in rounds(6) {
        run(|world| async move {
            let mounts = [world.mount().await, world.mount().await];
            let mut rng = Rng(seed);
            let (ino, opened) = create(&mounts[0], "file").await;
            let mut open = [Some(opened), None];
            let mut model: Vec<u8> = Vec::new();
            for _ in 0..120 {
                let i = rng.below(2) as usize;
                let vfs = &mounts[i];
                let Some(opened) = open[i] else {
                    open[i] = Some(vfs.open(ino, 2).await.unwrap());
                    continue;
                };
                let range = rng.range(600_000, 200_000);
                let (from, to) = (range.start as usize, range.end as usize);
                match rng.below(6) {
                    0 => {
                        close(vfs, ino, opened.fh).await;
                        open[i] = None;
                    }
                    1 => {
                        let data = rng.bytes(1 + rng.0 % 3000);
                        append(vfs, ino, opened.fh, data.clone()).await;
                        model.extend_from_slice(&data);
                    }
                    2 | 3 => {
                        let data = rng.bytes(range.end - range.start);
                        write(vfs, ino, opened.fh, range.start, data.clone()).await;
                        model.resize(model.len().max(to), 0);
                        model[from..to].copy_from_slice(&data);
                    }
                    _ => {
                        let got = read(vfs, ino, opened.fh, range.start, range.end - range.start).await;
                        let end = to.min(model.len());
                        assert!(got == model[from.min(end)..end], "seed {seed}");
                    }
                }
            }
            for (i, vfs) in mounts.iter().enumerate() {
                if let Some(opened) = open[i] {
                    close(vfs, ino, opened.fh).await;
                }
                assert!(content(vfs, ino).await == model, "seed {seed}");
            }
            assert_eq!(world.problems().await, Vec::<String>::new());
        });
    }
}

#[test]
fn appends_from_both_sides_never_overwrite_each_other() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let (ino, on_a) = create(&a, "log").await;
        let on_b = b.open(ino, 2).await.unwrap();
        let one = async {
            for i in 0..100 {
                append(&a, ino, on_a.fh, format!("a{i:03}\n")).await;
            }
        };
        let two = async {
            for i in 0..100 {
                append(&b, ino, on_b.fh, format!("b{i:03}\n")).await;
            }
        };
        futures_util::future::join(one, two).await;
        close(&a, ino, on_a.fh).await;
        close(&b, ino, on_b.fh).await;
        let text = String::from_utf8(content(&a, ino).await).unwrap();
        for side in ["a", "b"] {
            let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(side)).collect();
            let wanted: Vec<String> = (0..100).map(|i| format!("{side}{i:03}")).collect();
            assert_eq!(lines, wanted);
        }
    });
}

#[test]
fn names_that_change_on_one_mount_change_on_the_other() {
    run(|world| async move {
        let mounts = [world.mount().await, world.mount().await];
        for i in 0..60 {
            let (here, there) = (&mounts[i % 2], &mounts[1 - i % 2]);
            let name = format!("n{}", i / 4);
            let before = find(there, Ino::ROOT, &name).await;
            match before {
                Some(_) => here.unlink(Ino::ROOT, name.as_bytes()).await.unwrap(),
                None => {
                    here.make(WHO, Ino::ROOT, name.as_bytes(), Kind::File, 0o644, 0, b"").await.unwrap();
                }
            }
            assert_eq!(find(there, Ino::ROOT, &name).await.is_some(), before.is_none());
            assert_eq!(find(here, Ino::ROOT, &name).await.is_some(), before.is_none());
            let (mut one, mut two) = (names(here, Ino::ROOT, 50).await, names(there, Ino::ROOT, 50).await);
            one.sort();
            two.sort();
            assert_eq!(one, two);
        }
    });
}

#[test]
fn who_creates_a_file_that_another_mount_made_first_opens_it_only_as_its_owner() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let caller = Caller { uid: 1000, gid: 1000, pid: 1 };
        let (file, opened) = a.create(caller, Ino::ROOT, b"file", 0o600, 2).await.unwrap();
        write(&a, file.attr.ino, opened.fh, 0, vec![1; 10]).await;
        close(&a, file.attr.ino, opened.fh).await;
        a.make(WHO, Ino::ROOT, b"link", Kind::Symlink, 0o777, 0, b"file").await.unwrap();
        let create = |caller, name: &'static [u8], flags| {
            let b = b.clone();
            async move { b.create(caller, Ino::ROOT, name, 0o644, flags).await.map_err(|f| f.code) }
        };
        let stranger = Caller { uid: 1001, ..caller };
        for (caller, name) in [(stranger, &b"file"[..]), (WHO, b"file"), (WHO, b"link")] {
            assert_eq!(create(caller, name, 2).await.err(), Some(Code::Stale));
        }
        assert_eq!(create(caller, b"file", 2 | O_EXCL).await.err(), Some(Code::Exists));
        let (node, opened) = create(caller, b"file", 2).await.unwrap();
        assert_eq!((node.attr.ino, node.attr.size), (file.attr.ino, 10));
        close(&b, node.attr.ino, opened.fh).await;
        let (node, _) = create(caller, b"file", 1 | O_TRUNC).await.unwrap();
        assert_eq!(b.getattr(node.attr.ino, None).await.unwrap().attr.size, 0);
    });
}

/// The kernel looks again once only, so what it finds then must not be lost to the next race.
#[test]
fn what_a_creation_met_is_found_by_the_second_look_though_it_is_removed_and_made_again_meanwhile() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let stranger = Caller { uid: 1000, gid: 1000, pid: 77 };
        for mode in [0o600, 0o666] {
            let (met, opened) = a.create(WHO, Ino::ROOT, b"file", mode, 2).await.unwrap();
            write(&a, met.attr.ino, opened.fh, 0, vec![7; 10]).await;
            close(&a, met.attr.ino, opened.fh).await;
            let created = b.create(stranger, Ino::ROOT, b"file", 0o644, 2).await;
            assert_eq!(created.map_err(|fault| fault.code).err(), Some(Code::Stale));
            a.unlink(Ino::ROOT, b"file").await.unwrap();

            // Others see what is so; the thread sees what it met, once.
            let other = Caller { pid: 78, ..stranger };
            assert_eq!(b.lookup(other, Ino::ROOT, b"file").await.unwrap().node, None);
            let found = b.lookup(stranger, Ino::ROOT, b"file").await.unwrap();
            assert_eq!(found.entry_ttl, Duration::ZERO);
            assert_eq!(found.node.unwrap().attr.ino, met.attr.ino);
            assert_eq!(content(&b, met.attr.ino).await, vec![7; 10]);
            b.forget(met.attr.ino, 1);
            assert_eq!(b.lookup(stranger, Ino::ROOT, b"file").await.unwrap().node, None);
        }
    });
}

#[test]
fn what_a_second_look_finds_can_be_opened_though_it_is_removed_here_meanwhile() {
    run(|world| async move {
        let vfs = world.mount().await;
        let reader = Caller { pid: 77, ..WHO };
        for told in [false, true] {
            let (ino, opened) = create(&vfs, "file").await;
            write(&vfs, ino, opened.fh, 0, vec![7; 10]).await;
            close(&vfs, ino, opened.fh).await;
            if told {
                vfs.told_stale(reader);
            }
            let found = vfs.lookup(reader, Ino::ROOT, b"file").await.unwrap().node.unwrap();
            assert_eq!(found.attr.ino, ino);
            vfs.unlink(Ino::ROOT, b"file").await.unwrap();
            match told {
                true => assert_eq!(content(&vfs, ino).await, vec![7; 10]),
                // A file that nobody has open goes at once.
                false => assert_eq!(vfs.open(ino, 0).await.unwrap_err().code, Code::Stale),
            }
        }
    });
}

/// The kernel moves an entry with the time it was given under the lease of the old folder.
#[test]
fn a_name_moved_into_a_folder_that_is_not_leased_is_asked_for_again() {
    let config = torchfs_meta::Config { lease_ms: 3000, ..World::settings() };
    run_with(config, |world| async move {
        let kernel = Arc::new(Kernel::default());
        let (a, b) = (world.mount().await, world.mount_with(Config::default(), kernel.clone()).await);
        let folder = |name: &'static [u8]| {
            let a = a.clone();
            async move { a.make(WHO, Ino::ROOT, name, Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino }
        };
        let (from, to) = (folder(b"from").await, folder(b"to").await);
        let busy = tokio::spawn({
            let a = a.clone();
            async move {
                loop {
                    a.make(WHO, to, b"other", Kind::File, 0o644, 0, b"").await.unwrap();
                    a.unlink(to, b"other").await.unwrap();
                }
            }
        });
        for i in 0..60 {
            let name = format!("f{i}");
            b.make(WHO, from, name.as_bytes(), Kind::File, 0o644, 0, b"").await.unwrap();
            if b.entry_ttl(from, name.as_bytes()).is_zero() {
                // The kernel was told nothing.
                continue;
            }
            let before = kernel.expired.load(Ordering::Acquire);
            b.rename(from, name.as_bytes(), to, name.as_bytes(), 0).await.unwrap();
            let leased = !b.entry_ttl(to, name.as_bytes()).is_zero();
            if leased || kernel.expired.load(Ordering::Acquire) > before {
                continue;
            }
            // Then it is in doubt under a lease, which the other mount takes away with its next name.
            let entry = (to, name.into());
            until(|| async { kernel.entries.lock().contains(&entry) }).await;
        }
        busy.abort();
    });
}

/// Several changes at once leave names in doubt, which the kernel trusts nevertheless.
#[test]
fn names_moved_side_by_side_are_taken_back_from_the_kernel_by_a_recall() {
    run(|world| async move {
        let kernel = Arc::new(Kernel::default());
        let (a, b) = (world.mount().await, world.mount_with(Config::default(), kernel.clone()).await);
        let d = b.make(WHO, Ino::ROOT, b"d", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        for i in 0..20 {
            b.make(WHO, d, format!("old{i}").as_bytes(), Kind::File, 0o644, 0, b"").await.unwrap();
        }
        let moved = (0..20).map(|i| {
            let b = b.clone();
            tokio::spawn(async move {
                let (old, new) = (format!("old{i}"), format!("new{i}"));
                b.rename(d, old.as_bytes(), d, new.as_bytes(), 0).await.unwrap();
            })
        });
        for moved in moved.collect::<Vec<_>>() {
            moved.await.unwrap();
        }
        a.unlink(d, b"new0").await.unwrap();
        let told = kernel.entries.lock().clone();
        let expired = kernel.expired.load(Ordering::Acquire) > 0;
        let missed: Vec<String> = (0..20)
            .map(|i| format!("new{i}"))
            .filter(|name| !told.iter().any(|(folder, told)| *folder == d && told == name.as_bytes()))
            .collect();
        assert!(expired || missed.is_empty(), "not taken back: {missed:?}");
    });
}

/// Who stands in a folder, or has a file open, does not lose it to a change beside it.
#[test]
fn folders_and_open_files_stay_in_the_kernel_when_another_mount_changes_what_lies_beside_them() {
    run(|world| async move {
        let kernel = Arc::new(Kernel::default());
        let (a, b) = (world.mount().await, world.mount_with(Config::default(), kernel.clone()).await);
        let folder = a.make(WHO, Ino::ROOT, b"folder", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        for name in ["open", "closed"] {
            let (ino, opened) = create(&a, name).await;
            close(&a, ino, opened.fh).await;
        }
        for name in ["folder", "open", "closed"] {
            find(&b, Ino::ROOT, name).await.unwrap();
        }
        let open = find(&b, Ino::ROOT, "open").await.unwrap();
        let opened = b.open(open, 0).await.unwrap();
        create(&a, "beside").await;
        let root = |names: &[&'static str]| -> Vec<(Ino, Bytes)> {
            names.iter().map(|name| (Ino::ROOT, Bytes::from_static(name.as_bytes()))).collect()
        };
        let sorted = |entries: &parking_lot::Mutex<Vec<(Ino, Bytes)>>| {
            let mut entries = entries.lock().clone();
            entries.sort();
            entries.dedup();
            entries
        };
        assert_eq!(sorted(&kernel.kept), root(&["folder", "open"]));
        assert_eq!(sorted(&kernel.entries), root(&["beside", "closed"]));
        // What itself is changed goes.
        assert_eq!(find(&b, Ino::ROOT, "folder").await, Some(folder));
        a.rmdir(Ino::ROOT, b"folder").await.unwrap();
        assert!(sorted(&kernel.entries).contains(&root(&["folder"])[0]));
        b.release(open, opened.fh, None).await;
        assert_eq!(find(&b, Ino::ROOT, "folder").await, None);
    });
}

#[test]
fn a_lock_waits_for_the_other_mount_and_sees_what_it_left() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let (ino, on_a) = create(&a, "file").await;
        let on_b = b.open(ino, 2).await.unwrap();
        let lock = |ty, owner| FileLock { kind: LockKind::Posix, ty, owner, pid: 1, start: 0, end: u64::MAX };
        a.setlk(ino, on_a.fh, lock(LockType::Write, 1), true).await.unwrap();
        write(&a, ino, on_a.fh, 0, vec![7; 1000]).await;
        let held = b.setlk(ino, on_b.fh, lock(LockType::Write, 2), false).await;
        assert_eq!(held.map_err(|f| f.code), Err(Code::WouldBlock));
        assert!(b.getlk(ino, lock(LockType::Write, 2)).await.unwrap().is_some());
        let waits = async {
            b.setlk(ino, on_b.fh, lock(LockType::Write, 2), true).await.unwrap();
            read(&b, ino, on_b.fh, 0, 5000).await
        };
        let unlocks = async { a.setlk(ino, on_a.fh, lock(LockType::Unlock, 1), false).await.unwrap() };
        let (seen, ()) = futures_util::future::join(waits, unlocks).await;
        assert_eq!(seen, vec![7; 1000]);
        // Closing drops the owner's locks.
        b.flush(ino, on_b.fh, 2).await.unwrap();
        a.setlk(ino, on_a.fh, lock(LockType::Write, 1), false).await.unwrap();
    });
}

/// A mount with the file open, and a lock owner on it.
struct Locker {
    vfs: Vfs,
    ino: Ino,
    opened: Opened,
    owner: u64,
}

impl Locker {
    fn lock(&self, ty: LockType, start: u64, end: u64, wait: bool) -> impl Future<Output = Result<()>> {
        let lock = FileLock { kind: LockKind::Posix, ty, owner: self.owner, pid: 1, start, end };
        self.vfs.setlk(self.ino, self.opened.fh, lock, wait)
    }

    async fn may(&self, ty: LockType, start: u64, end: u64) -> bool {
        match self.lock(ty, start, end, false).await {
            Ok(()) => true,
            Err(fault) if fault.code == Code::WouldBlock => false,
            Err(fault) => panic!("{fault}"),
        }
    }

    /// Waits until nothing is being taken back in this range any more; nothing is held there.
    async fn settled(&self, start: u64, end: u64) {
        self.lock(LockType::Unlock, start, end, false).await.unwrap();
    }
}

async fn lockers(world: &std::sync::Arc<crate::world::World>) -> (Locker, Locker) {
    let (a, b) = (world.mount().await, world.mount().await);
    let (ino, on_a) = create(&a, "file").await;
    let on_b = b.open(ino, 2).await.unwrap();
    (Locker { vfs: a, ino, opened: on_a, owner: 1 }, Locker { vfs: b, ino, opened: on_b, owner: 2 })
}

#[test]
fn an_interrupted_wait_for_more_leaves_what_was_held() {
    run(|world| async move {
        let (a, b) = lockers(&world).await;
        a.lock(LockType::Read, 0, 9, false).await.unwrap();
        b.lock(LockType::Read, 5, 30, false).await.unwrap();
        let mut waits = Box::pin(a.lock(LockType::Write, 0, 99, true));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(waits);
        a.settled(50, 60).await;
        assert!(!b.may(LockType::Write, 0, 4).await, "it is still held");
        assert!(b.may(LockType::Write, 10, 99).await, "and nothing besides");
        a.lock(LockType::Unlock, 0, 9, false).await.unwrap();
        assert!(b.may(LockType::Write, 0, 99).await);
    });
}

#[test]
fn a_lock_that_was_granted_unheard_is_taken_back_and_what_was_held_stays() {
    run(|world| async move {
        for wait in [true, false] {
            let (a, b) = lockers(&world).await;
            a.lock(LockType::Read, 10, 19, false).await.unwrap();
            world.late_locks.store(true, Ordering::Release);
            let mut waits = Box::pin(a.lock(LockType::Write, 0, 99, wait));
            assert!(waits.as_mut().now_or_never().is_none(), "granted, and the answer is on its way");
            drop(waits);
            let mut next = Box::pin(a.lock(LockType::Read, 90, 99, false));
            assert!(next.as_mut().now_or_never().is_none(), "the same owner's next comes after that");
            world.late_locks.store(false, Ordering::Release);
            next.await.unwrap();
            assert!(b.may(LockType::Read, 0, 99).await, "nobody keeps the lock that nobody knows of");
            assert!(b.may(LockType::Write, 0, 9).await);
            assert!(!b.may(LockType::Write, 10, 19).await, "what was held is");
            assert!(!b.may(LockType::Write, 90, 99).await, "and what was taken since");
            a.vfs.unlink(Ino::ROOT, b"file").await.unwrap();
            // Or the next ones would wait for leases that nobody gives back.
            a.vfs.shutdown().await.unwrap();
            b.vfs.shutdown().await.unwrap();
        }
    });
}

#[test]
fn a_lock_taken_after_an_interrupted_wait_stays() {
    run(|world| async move {
        let (a, b) = lockers(&world).await;
        for _ in 0..200 {
            b.lock(LockType::Write, 0, 9, false).await.unwrap();
            let mut waits = Box::pin(a.lock(LockType::Write, 0, 9, true));
            assert!(waits.as_mut().now_or_never().is_none());
            b.lock(LockType::Unlock, 0, 9, false).await.unwrap();
            drop(waits);
            a.lock(LockType::Write, 0, 9, false).await.unwrap();
            for _ in 0..20 {
                tokio::task::yield_now().await;
                assert!(!b.may(LockType::Write, 0, 9).await, "it is held");
            }
            a.lock(LockType::Unlock, 0, 9, false).await.unwrap();
        }
    });
}

#[test]
fn closing_a_file_ends_what_is_being_taken_back() {
    run(|world| async move {
        let (a, b) = lockers(&world).await;
        a.lock(LockType::Read, 0, 9, false).await.unwrap();
        world.late_locks.store(true, Ordering::Release);
        let mut waits = Box::pin(a.lock(LockType::Write, 0, 99, true));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(waits);
        world.late_locks.store(false, Ordering::Release);
        a.vfs.flush(a.ino, a.opened.fh, a.owner).await.unwrap();
        assert!(b.may(LockType::Write, 0, 99).await);
    });
}
