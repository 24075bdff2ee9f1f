//! Content of files on one mount.

use bytes::Bytes;
use torchfs_proto::Code;
use torchfs_proto::attr::SetAttr;
use torchfs_vfs::{Config, NoHost, Seek, WriteFlags};

use crate::world::{Rng, close, content, create, read, rounds, run, write};

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
        let found = other.lookup(torchfs_proto::Ino::ROOT, b"file").await.unwrap().node.unwrap();
        assert_eq!(found.attr.size, data.len() as u64);
        assert_eq!(content(&other, found.attr.ino).await, data);
        assert_eq!(world.problems().await, Vec::<String>::new());
        other.shutdown().await.unwrap();
        vfs.shutdown().await.unwrap();
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
            let vfs = world.mount_with(config, std::sync::Arc::new(NoHost)).await;
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
                        vfs.fallocate(ino, opened.fh, 3, range.start, len).await.unwrap();
                        let end = to.min(model.len());
                        model[from.min(end)..end].fill(0);
                    }
                    2 => {
                        vfs.fallocate(ino, opened.fh, 0x10, range.start, len).await.unwrap();
                        model.resize(model.len().max(to), 0);
                        model[from..to].fill(0);
                    }
                    3 => {
                        vfs.fallocate(ino, opened.fh, 0, range.start, len).await.unwrap();
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
                            .copy_file_range(ino, opened.fh, range.start, ino, opened.fh, target, len)
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
fn an_unlinked_file_stays_usable_until_it_is_closed() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        write(&vfs, ino, opened.fh, 0, vec![1; 100_000]).await;
        vfs.unlink(torchfs_proto::Ino::ROOT, b"file").await.unwrap();
        assert_eq!(vfs.getattr(ino, None).await.unwrap().attr.nlink, 0);
        write(&vfs, ino, opened.fh, 50_000, vec![2; 100_000]).await;
        vfs.fsync(ino, opened.fh, false).await.unwrap();
        let bytes = read(&vfs, ino, opened.fh, 0, 1 << 20).await;
        assert_eq!((bytes.len(), bytes[0], bytes[149_999]), (150_000, 1, 2));
        close(&vfs, ino, opened.fh).await;
        assert_eq!(vfs.open(ino, 0).await.map_err(|f| f.code), Err(Code::NotFound));
        vfs.shutdown().await.unwrap();
        assert_eq!(world.problems().await, Vec::<String>::new());
    });
}
