//! Content of files on one mount.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use torchfs_proto::attr::SetAttr;
use torchfs_proto::layout::Scheme;
use torchfs_proto::{Code, Ino};
use torchfs_vfs::{Caller, Config, NoHost, Seek, Vfs, WriteFlags};

use crate::world::{
    Kernel, Rng, WHO, World, close, content, create, read, rounds, run, run_with, until, write,
};

#[test]
fn what_is_written_is_read_back_before_and_after_it_is_committed() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        let data: Bytes = (0..3_000_000u32).map(|i| (i / 7) as u8).collect::<Vec<_>>().into();
        write(&vfs, ino, opened.fh, 0, data.clone()).await;
        assert_eq!(read(&vfs, ino, opened.fh, 0, 4 << 20).await, data);
        assert_eq!(vfs.getattr(ino, None).await.unwrap().attr.size, data.len() as u64);
        vfs.fsync(ino, opened.fh, false).await.unwrap();
        assert_eq!(read(&vfs, ino, opened.fh, 0, 4 << 20).await, data);
        assert_eq!(read(&vfs, ino, opened.fh, 1_000_001, 10).await, data[1_000_001..1_000_011]);
        close(&vfs, ino, opened.fh).await;

        let other = world.mount().await;
        let found = other.lookup(WHO, Ino::ROOT, b"file").await.unwrap().node.unwrap();
        assert_eq!(found.attr.size, data.len() as u64);
        assert_eq!(content(&other, found.attr.ino).await, data);
        assert_eq!(world.problems().await, Vec::<String>::new());
        other.shutdown().await.unwrap();
        vfs.shutdown().await.unwrap();
    });
}

/// Found by storms: after a pause the first commits arrive before the session has leases again. Three were sent within
/// milliseconds, and then what was written was given up.
#[test]
fn what_was_written_is_not_given_up_while_leases_are_late() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        let data: Bytes = vec![7; 300_000].into();
        write(&vfs, ino, opened.fh, 0, data.clone()).await;
        world.late_commits.store(6, std::sync::atomic::Ordering::Release);
        vfs.fsync(ino, opened.fh, false).await.unwrap();
        assert_eq!(world.late_commits.load(std::sync::atomic::Ordering::Acquire), 0);
        close(&vfs, ino, opened.fh).await;
        let other = world.mount().await;
        assert_eq!(content(&other, ino).await, data);
        other.shutdown().await.unwrap();
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn what_was_put_on_a_server_that_is_removed_before_the_commit_is_put_again() {
    let config = torchfs_meta::Config { redundancy: Some(Scheme::Replicas(1)), ..World::settings() };
    run_with(config, |world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        let data: Bytes = (0..2_000_000u32).map(|i| (i / 7) as u8).collect::<Vec<_>>().into();
        // No commit arrives in time before the server is removed.
        world.late_commits.store(u64::MAX, std::sync::atomic::Ordering::Release);
        write(&vfs, ino, opened.fh, 0, data.clone()).await;
        until(async || world.pieces() == 8).await;
        assert_eq!(world.blocks().await, 0, "nothing is committed yet");
        world.remove_server().await;
        world.late_commits.store(0, std::sync::atomic::Ordering::Release);
        vfs.fsync(ino, opened.fh, false).await.unwrap();
        close(&vfs, ino, opened.fh).await;
        let other = world.mount().await;
        assert_eq!(content(&other, ino).await, data);
        assert_eq!(world.problems().await, Vec::<String>::new());
        other.shutdown().await.unwrap();
        vfs.shutdown().await.unwrap();
    });
}

/// F_SETFL, as make does it to its output: the kernel writes through its pages, and holds the lock of the last one until it is answered.
#[test]
fn an_append_to_a_file_that_was_not_opened_for_appending_does_not_wait_for_the_kernel() {
    run(|world| async move {
        let kernel = Arc::new(Kernel::default());
        let vfs = world.mount_with(Config::default(), kernel.clone()).await;
        let (ino, opened) = create(&vfs, "file").await;
        assert!(!opened.direct);
        kernel.locked.store(true, Ordering::Release);
        let flags = WriteFlags { append: true, ..WriteFlags::default() };
        let append = |offset, text: &'static str| vfs.write(ino, opened.fh, offset, text.into(), flags);
        assert_eq!(append(0, "one ").now_or_never().expect("at once"), Ok(4));
        assert_eq!(append(4, "two ").now_or_never().expect("at once"), Ok(4));
        assert_eq!(*kernel.pages.lock(), []);
        // Where the file ended elsewhere for the kernel it wrote into pages of other bytes.
        assert_eq!(append(2, "three ").now_or_never().expect("at once"), Ok(6));
        assert_eq!(*kernel.pages.lock(), [(ino, 2, 12)]);
        kernel.locked.store(false, Ordering::Release);
        assert_eq!(read(&vfs, ino, opened.fh, 0, 100).await, b"one two three ");
        close(&vfs, ino, opened.fh).await;
    });
}

#[test]
fn each_whole_block_of_a_large_write_is_put_at_once() {
    run(|world| async move {
        let config = Config { commit_after: Duration::from_secs(3600), ..Config::default() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "file").await;
        let block = 256 << 10;
        // The first run ends at a boundary, two whole blocks follow, and the rest waits.
        write(&vfs, ino, opened.fh, block / 2, vec![7; 3 << 18]).await;
        until(async || world.pieces() == 2 * 3).await;
        // A first run that is not worth a block stays, and so does what follows it: never the end without the beginning.
        let (other, to) = create(&vfs, "other").await;
        write(&vfs, other, to.fh, block - 1000, vec![7; 3 << 18]).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(world.pieces(), 2 * 3);
        close(&vfs, ino, opened.fh).await;
        close(&vfs, other, to.fh).await;
        assert_eq!(world.problems().await, Vec::<String>::new());
    });
}

#[test]
fn random_operations_agree_with_an_array_of_bytes() {
    for seed in rounds(12) {
        run(|world| async move {
            let mut rng = Rng(seed);
            let tight = Config {
                dirty_max: 1 << 20,
                dirty_file_max: 800 << 10,
                commit_bytes: 300 << 10,
                commit_pieces: 40,
                ..Config::default()
            };
            let config = if seed % 2 == 0 { tight } else { Config::default() };
            let vfs = world.mount_with(config, Arc::new(NoHost)).await;
            let (ino, mut opened) = create(&vfs, "file").await;
            let mut model: Vec<u8> = Vec::new();
            let most = 1_500_000;
            for _ in 0..150 {
                let large = rng.below(4) == 0;
                let range = rng.range(most, if large { 600_000 } else { 5_000 });
                let (from, to) = (range.start as usize, range.end as usize);
                let len = range.end - range.start;
                match rng.below(14) {
                    0 => {
                        let set = SetAttr { size: Some(range.start), ..SetAttr::default() };
                        let node = vfs.setattr(ino, Some(opened.fh), set).await.unwrap();
                        assert_eq!(node.attr.size, range.start);
                        model.resize(from, 0);
                    }
                    1 => {
                        vfs.fallocate(WHO, ino, opened.fh, 3, range.start, len).await.unwrap();
                        let end = to.min(model.len());
                        model[from.min(end)..end].fill(0);
                    }
                    2 => {
                        vfs.fallocate(WHO, ino, opened.fh, 0x10, range.start, len).await.unwrap();
                        model.resize(model.len().max(to), 0);
                        model[from..to].fill(0);
                    }
                    3 => {
                        vfs.fallocate(WHO, ino, opened.fh, 0, range.start, len).await.unwrap();
                        model.resize(model.len().max(to), 0);
                    }
                    4 => vfs.fsync(ino, opened.fh, false).await.unwrap(),
                    5 => {
                        close(&vfs, ino, opened.fh).await;
                        opened = vfs.open(ino, 2).await.unwrap();
                    }
                    6 => {
                        let target = rng.below(most);
                        let apart = target + len <= range.start || range.end <= target;
                        let copied = vfs
                            .copy_file_range(WHO, ino, opened.fh, range.start, ino, opened.fh, target, len)
                            .await;
                        if !apart {
                            assert_eq!(copied.map_err(|fault| fault.code), Err(Code::Invalid));
                            continue;
                        }
                        let copied = copied.unwrap() as usize;
                        assert_eq!(copied, to.min(model.len()).saturating_sub(from));
                        let bytes = model[from.min(model.len())..from.min(model.len()) + copied].to_vec();
                        if copied > 0 {
                            let end = target as usize + copied;
                            model.resize(model.len().max(end), 0);
                            model[target as usize..end].copy_from_slice(&bytes);
                        }
                    }
                    7 => {
                        let data = rng.bytes(len);
                        let flags = WriteFlags { append: true, ..WriteFlags::default() };
                        vfs.write(ino, opened.fh, 0, data.clone(), flags).await.unwrap();
                        model.extend_from_slice(&data);
                        if model.len() > 4_000_000 {
                            let set = SetAttr { size: Some(0), ..SetAttr::default() };
                            vfs.setattr(ino, None, set).await.unwrap();
                            model.clear();
                        }
                    }
                    _ => {
                        let data = rng.bytes(len);
                        write(&vfs, ino, opened.fh, range.start, data.clone()).await;
                        model.resize(model.len().max(to), 0);
                        model[from..to].copy_from_slice(&data);
                    }
                }
                let size = vfs.getattr(ino, None).await.unwrap().attr.size;
                assert_eq!(size, model.len() as u64, "seed {seed}");
                let range = rng.range(most, 300_000);
                let got = read(&vfs, ino, opened.fh, range.start, range.end - range.start).await;
                let end = (range.end as usize).min(model.len());
                assert!(got == model[(range.start as usize).min(end)..end], "seed {seed}");
            }
            close(&vfs, ino, opened.fh).await;
            assert!(content(&vfs, ino).await == model, "seed {seed}");
            let other = world.mount().await;
            assert!(content(&other, ino).await == model, "seed {seed}");
            assert_eq!(world.problems().await, Vec::<String>::new());
        });
    }
}

/// Writes of so many bytes go through the file from its end to its start.
async fn write_backwards(vfs: &Vfs, ino: Ino, fh: u64, which: std::ops::Range<u64>) -> u64 {
    for i in which.clone() {
        let data = vec![1 + (i % 250) as u8; 5001];
        let write = vfs.write(ino, fh, (BACKWARDS - 1 - i) * 8192, data.into(), WriteFlags::default());
        match write.now_or_never() {
            Some(written) => assert_eq!(written, Ok(5001)),
            None => return i,
        }
    }
    which.end
}

const BACKWARDS: u64 = 6000;

#[test]
fn scattered_writes_that_a_crash_leaves_are_the_first_ones() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        world.hold_servers(true);
        let first = write_backwards(&vfs, ino, opened.fh, 0..1100).await;
        until(|| async { world.puts() > 0 }).await;
        // A round is under way; what comes now is for the next one.
        let written = write_backwards(&vfs, ino, opened.fh, first..BACKWARDS).await;
        assert!(written > first);
        world.commits_left.store(2, Ordering::Release);
        world.hold_servers(false);
        until(|| async { world.commits.load(Ordering::Acquire) == 2 }).await;
        world.evict_all().await;
        let other = world.mount().await;
        let left = content(&other, ino).await;
        let there = |i: u64| left[((BACKWARDS - 1 - i) * 8192) as usize] != 0;
        let count = (0..written).filter(|i| there(*i)).count() as u64;
        assert!(count > 0 && (0..count).all(there), "{count} of {written} writes are there");
    });
}

#[test]
fn what_is_overwritten_on_its_way_to_slow_servers_keeps_within_the_bounds() {
    run(|world| async move {
        const BLOCK: usize = 256 << 10;
        let config = Config { dirty_max: 4 << 20, dirty_file_max: 2 << 20, ..quick() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        world.hold_servers(true);
        let (ino, opened) = create(&vfs, "rewritten").await;
        let rewrite = |i: usize| {
            let data = vec![1 + i as u8; BLOCK];
            vfs.write(ino, opened.fh, 0, data.into(), WriteFlags::default()).now_or_never()
        };
        let written = (0..100).take_while(|i| rewrite(*i).is_some()).count();
        assert_eq!(written, (2 << 20) / BLOCK);
        // What was removed stays in memory too, until its servers have it or failed.
        let mut files = 0;
        while files < 100 {
            let (ino, opened) = create(&vfs, "removed").await;
            let wrote = vfs.write(ino, opened.fh, 0, vec![1; BLOCK].into(), WriteFlags::default());
            let wrote = wrote.now_or_never().is_some();
            vfs.unlink(Ino::ROOT, b"removed").await.unwrap();
            vfs.release(ino, opened.fh, None).await;
            if !wrote {
                break;
            }
            files += 1;
        }
        assert_eq!(files, (2 << 20) / BLOCK);
        world.hold_servers(false);
        write(&vfs, ino, opened.fh, BLOCK as u64, vec![200; 10]).await;
        close(&vfs, ino, opened.fh).await;
        let left = content(&vfs, ino).await;
        assert_eq!((left.len(), left[0], left[BLOCK]), (BLOCK + 10, written as u8, 200));
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn holes_are_found_and_data_too() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "sparse").await;
        write(&vfs, ino, opened.fh, 1 << 20, vec![1; 70_000]).await;
        write(&vfs, ino, opened.fh, 3 << 20, vec![2; 10]).await;
        let seek = |offset, whence| vfs.lseek(ino, opened.fh, offset, whence);
        assert_eq!(seek(0, Seek::Data).await, Ok(1 << 20));
        assert_eq!(seek(0, Seek::Hole).await, Ok(0));
        assert_eq!(seek(1 << 20, Seek::Hole).await, Ok((1 << 20) + 70_000));
        assert_eq!(seek(2 << 20, Seek::Data).await, Ok(3 << 20));
        assert_eq!(seek(3 << 20, Seek::Hole).await, Ok((3 << 20) + 10));
        assert_eq!(seek((3 << 20) + 10, Seek::Data).await.map_err(|f| f.code), Err(Code::NoDevice));
    });
}

#[test]
fn a_failed_write_latches_on_its_handle_and_on_no_later_one() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
        world.break_servers(true);
        assert_eq!(vfs.fsync(ino, opened.fh, false).await.map_err(|f| f.code), Err(Code::NoSpace));
        world.break_servers(false);
        let again = vfs.write(ino, opened.fh, 0, Bytes::from_static(b"x"), WriteFlags::default()).await;
        assert_eq!(again.map_err(|f| f.code), Err(Code::NoSpace));
        assert_eq!(vfs.fsync(ino, opened.fh, false).await.map_err(|f| f.code), Err(Code::NoSpace));
        assert_eq!(vfs.flush(ino, opened.fh, 0).await.map_err(|f| f.code), Err(Code::NoSpace));
        vfs.release(ino, opened.fh, None).await;
        let opened = vfs.open(ino, 2).await.unwrap();
        write(&vfs, ino, opened.fh, 0, vec![2; 10_000]).await;
        close(&vfs, ino, opened.fh).await;
        assert_eq!(content(&vfs, ino).await, vec![2; 10_000]);
    });
}

#[test]
fn bytes_that_were_lost_are_not_left_in_the_kernels_pages() {
    run(|world| async move {
        let host = Arc::new(Kernel::default());
        let vfs = world.mount_with(Config::default(), host.clone()).await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
        close(&vfs, ino, opened.fh).await;
        let opened = vfs.open(ino, 2).await.unwrap();
        assert!(opened.keep_cache);
        write(&vfs, ino, opened.fh, 0, vec![2; 10_000]).await;
        world.break_servers(true);
        assert_eq!(vfs.fsync(ino, opened.fh, false).await.map_err(|f| f.code), Err(Code::NoSpace));
        assert_eq!(*host.pages.lock(), [(ino, 0, 0)]);
        let again = vfs.open(ino, 0).await.unwrap();
        assert!(!again.keep_cache);
        assert_eq!(read(&vfs, ino, again.fh, 0, 20_000).await, vec![1; 10_000]);
    });
}

#[test]
fn a_file_is_forgotten_though_all_that_was_written_to_it_was_cut_off() {
    run(|world| async move {
        let vfs = world.mount_with(quick(), Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        vfs.setattr(ino, Some(opened.fh), cut).await.unwrap();
        close(&vfs, ino, opened.fh).await;
        vfs.forget(ino, 1);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let before = world.calls.load(Ordering::Acquire);
        vfs.getattr(ino, None).await.unwrap();
        assert_eq!(world.calls.load(Ordering::Acquire) - before, 1, "it is asked for");
    });
}

#[test]
fn whoever_changes_content_takes_set_user_id_away() {
    run(|world| async move {
        let vfs = world.mount().await;
        let caller = Caller { uid: 1000, gid: 1000, pid: 1 };
        let (source, from) = create(&vfs, "source").await;
        write(&vfs, source, from.fh, 0, vec![1; 10_000]).await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
        for who in [WHO, caller] {
            for (mode, len) in [(0, 5), (0, 50_000), (1, 10), (3, 10), (0x10, 10), (0x11, 10), (-1, 10)] {
                let set = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
                vfs.setattr(ino, None, set).await.unwrap();
                if mode >= 0 {
                    vfs.fallocate(who, ino, opened.fh, mode, 0, len).await.unwrap();
                } else {
                    let copied = vfs.copy_file_range(who, source, from.fh, 0, ino, opened.fh, 0, len).await;
                    assert_eq!(copied, Ok(len));
                }
                let left = vfs.getattr(ino, None).await.unwrap().attr.mode;
                assert_eq!(left, if who.uid == 0 { 0o6755 } else { 0o755 }, "{mode:#x}");
            }
        }
    });
}

#[test]
fn what_is_lost_after_the_last_close_is_told_by_syncfs_and_by_the_end_of_the_mount() {
    run(|world| async move {
        let config = Config { writeback: true, commit_after: Duration::from_millis(20), ..quick() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "file").await;
        world.break_servers(true);
        let lose = || async {
            let opened = vfs.open(ino, 2).await.unwrap();
            write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
            close(&vfs, ino, opened.fh).await;
        };
        close(&vfs, ino, opened.fh).await;
        lose().await;
        assert_eq!(vfs.syncfs().await.map_err(|f| f.code), Err(Code::NoSpace));
        assert_eq!(vfs.syncfs().await, Ok(()));
        lose().await;
        until(|| async { vfs.getattr(ino, None).await.unwrap().attr.size == 0 }).await;
        assert_eq!(vfs.shutdown().await.map_err(|f| f.code), Err(Code::NoSpace));
    });
}

#[test]
fn extents_that_are_too_many_to_be_kept_are_asked_for() {
    run(|world| async move {
        let config = Config { extents_max: 100, compact_extents: 0, ..Config::default() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "file").await;
        let calls_to_read = || async {
            vfs.fsync(ino, opened.fh, false).await.unwrap();
            let before = world.calls.load(Ordering::Acquire);
            assert_eq!(read(&vfs, ino, opened.fh, 0, 10).await, vec![1; 10]);
            world.calls.load(Ordering::Acquire) - before
        };
        for i in 0..50 {
            write(&vfs, ino, opened.fh, i * 9000, vec![1; 10]).await;
        }
        assert_eq!(calls_to_read().await, 0);
        for i in 50..200 {
            write(&vfs, ino, opened.fh, i * 9000, vec![1; 10]).await;
        }
        assert!(calls_to_read().await > 0);
    });
}

#[test]
fn an_unlinked_file_stays_usable_until_it_is_closed() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 100_000]).await;
        vfs.unlink(Ino::ROOT, b"file").await.unwrap();
        assert_eq!(vfs.getattr(ino, None).await.unwrap().attr.nlink, 0);
        write(&vfs, ino, opened.fh, 50_000, vec![2; 100_000]).await;
        vfs.fsync(ino, opened.fh, false).await.unwrap();
        let bytes = read(&vfs, ino, opened.fh, 0, 1 << 20).await;
        assert_eq!((bytes.len(), bytes[0], bytes[149_999]), (150_000, 1, 2));
        close(&vfs, ino, opened.fh).await;
        // It stays a little longer, for who looked its name up before that went.
        close(&vfs, ino, vfs.open(ino, 0).await.unwrap().fh).await;
        let gone = loop {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            match vfs.open(ino, 0).await {
                Ok(opened) => close(&vfs, ino, opened.fh).await,
                Err(fault) => break fault,
            }
        };
        assert_eq!(gone.code, Code::Stale);
        vfs.shutdown().await.unwrap();
        assert_eq!(world.problems().await, Vec::<String>::new());
    });
}

#[test]
fn dirty_data_is_committed_after_a_while_without_being_asked_for() {
    run(|world| async move {
        let config = Config { commit_after: Duration::from_millis(20), ..quick() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "log").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 1000]).await;
        let other = world.mount().await;
        until(|| async { other.getattr(ino, None).await.unwrap().attr.size == 1000 }).await;
    });
}

#[test]
fn a_fragmented_file_is_compacted_when_it_is_quiet() {
    run(|world| async move {
        let config = Config { compact_extents: 16, compact_after: Duration::from_millis(50), ..quick() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let (ino, opened) = create(&vfs, "file").await;
        let mut model = Vec::new();
        for i in 0..64u64 {
            let data = vec![i as u8; 3000];
            write(&vfs, ino, opened.fh, i * 3000, data.clone()).await;
            vfs.fsync(ino, opened.fh, false).await.unwrap();
            model.extend(data);
        }
        until(|| async { world.blocks().await <= 4 }).await;
        assert_eq!(read(&vfs, ino, opened.fh, 0, 1 << 20).await, model);
        close(&vfs, ino, opened.fh).await;
        assert_eq!(content(&world.mount().await, ino).await, model);
        assert_eq!(world.problems().await, Vec::<String>::new());
    });
}

#[test]
fn the_end_of_a_session_is_an_error_for_what_was_dirty() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 10_000]).await;
        world.evict_all().await;
        assert!(vfs.fsync(ino, opened.fh, false).await.is_err());
        assert!(vfs.flush(ino, opened.fh, 0).await.is_err());
        let again = vfs.write(ino, opened.fh, 0, Bytes::from_static(b"x"), WriteFlags::default()).await;
        assert!(again.is_err());
    });
}

#[test]
fn interrupted_calls_leave_nothing_broken() {
    for seed in rounds(4) {
        run(|world| async move {
            let config = Config { dirty_file_max: 400 << 10, commit_bytes: 100 << 10, ..quick() };
            let vfs = world.mount_with(config, Arc::new(NoHost)).await;
            let mut rng = Rng(seed);
            let (ino, opened) = create(&vfs, "file").await;
            let mut model = vec![0; 1 << 20];
            write(&vfs, ino, opened.fh, 0, model.clone()).await;
            for _ in 0..200 {
                let range = rng.range(1 << 20, 100_000);
                let (from, to) = (range.start as usize, range.end as usize);
                let data = rng.bytes(range.end - range.start);
                match rng.below(5) {
                    0 => {
                        let _ = vfs.fsync(ino, opened.fh, false).now_or_never();
                    }
                    1 => {
                        let _ = vfs.read(ino, opened.fh, range.start, 100_000, 0).now_or_never();
                    }
                    2 => {
                        let _ = vfs
                            .fallocate(WHO, ino, opened.fh, 3, range.start, data.len() as u64)
                            .now_or_never();
                        // It happens, now or a little later: a second one of the same kind waits for it.
                        vfs.fallocate(WHO, ino, opened.fh, 3, range.start, data.len() as u64).await.unwrap();
                        model[from..to].fill(0);
                    }
                    3 => {
                        let write =
                            vfs.write(ino, opened.fh, range.start, data.clone(), WriteFlags::default());
                        if write.now_or_never().is_none() {
                            write_all(&vfs, ino, opened.fh, range.start, &data).await;
                        }
                        model[from..to].copy_from_slice(&data);
                    }
                    _ => {
                        write_all(&vfs, ino, opened.fh, range.start, &data).await;
                        model[from..to].copy_from_slice(&data);
                    }
                }
            }
            assert!(read(&vfs, ino, opened.fh, 0, 2 << 20).await == model, "seed {seed}");
            close(&vfs, ino, opened.fh).await;
            assert!(content(&world.mount().await, ino).await == model, "seed {seed}");
        });
    }
}

async fn write_all(vfs: &Vfs, ino: Ino, fh: u64, offset: u64, data: &Bytes) {
    write(vfs, ino, fh, offset, data.clone()).await;
}

/// Timers that do not keep a test waiting.
fn quick() -> Config {
    Config { tick: Duration::from_millis(5), ..Config::default() }
}
