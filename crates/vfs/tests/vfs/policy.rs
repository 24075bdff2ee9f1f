//! Policies of folders and files: new content follows them, and old content is written again by them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use torchfs_proto::attr::{Kind, SetAttr};
use torchfs_proto::{Code, Ino};
use torchfs_vfs::{Caller, Config, NoHost, Vfs};

use crate::world::{RDWR, Rng, WHO, close, content, create, rounds, run, write};

/// More bytes than any file here has.
const ALL: &[u8] = b"1000000000";
const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 1 };

async fn redundancy(vfs: &Vfs, ino: Ino) -> String {
    let value = vfs.getxattr(ino, b"torchfs.redundancy").await.unwrap();
    String::from_utf8(value.to_vec()).unwrap()
}

fn noise(len: u32) -> Bytes {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn what_is_made_in_a_folder_follows_its_policy() {
    run(|world| async move {
        let vfs = world.mount().await;
        let folder = vfs.make(WHO, Ino::ROOT, b"folder", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        assert_eq!(redundancy(&vfs, folder).await, "replicas:2");
        vfs.setxattr(ROOT, folder, b"torchfs.redundancy", b"replicas:1", 0).await.unwrap();
        assert_eq!(redundancy(&vfs, folder).await, "replicas:1");
        assert!(vfs.listxattr(folder).await.unwrap().is_empty(), "policies are in no listing");

        let (node, opened) = vfs.create(WHO, folder, b"file", 0o644, RDWR).await.unwrap();
        let ino = node.attr.ino;
        assert_eq!(redundancy(&vfs, ino).await, "replicas:1");
        let before = world.pieces();
        write(&vfs, ino, opened.fh, 0, noise(1 << 20)).await;
        close(&vfs, ino, opened.fh).await;
        assert_eq!(world.pieces() - before, 4, "one copy of each block of 256 KiB");
        assert_eq!(content(&vfs, ino).await, noise(1 << 20));

        let (other, opened) = create(&vfs, "elsewhere").await;
        let before = world.pieces();
        write(&vfs, other, opened.fh, 0, noise(1 << 20)).await;
        close(&vfs, other, opened.fh).await;
        assert_eq!(world.pieces() - before, 8, "two copies of each");
        assert_eq!(world.problems().await, Vec::<String>::new());
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn a_file_is_written_again_by_its_policy_and_keeps_its_bytes() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        let bytes = noise(9_000_000);
        write(&vfs, ino, opened.fh, 0, bytes.clone()).await;
        close(&vfs, ino, opened.fh).await;
        let attr = vfs.getattr(ino, None).await.unwrap().attr;
        vfs.setxattr(ROOT, ino, b"torchfs.redundancy", b"replicas:1", 0).await.unwrap();
        let before = world.pieces();
        vfs.setxattr(ROOT, ino, b"torchfs.restripe", ALL, 0).await.unwrap();
        let again = world.pieces() - before;
        assert_eq!(again, 35, "one copy of each block");
        assert_eq!(content(&vfs, ino).await, bytes);
        let after = vfs.getattr(ino, None).await.unwrap().attr;
        assert_eq!((after.size, after.mtime), (attr.size, attr.mtime), "programs see nothing of it");
        let before = world.pieces();
        vfs.setxattr(ROOT, ino, b"torchfs.restripe", ALL, 0).await.unwrap();
        assert_eq!(world.pieces(), before, "there is nothing left to do");
        assert_eq!(world.problems().await, Vec::<String>::new());
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn a_large_file_is_written_again_in_parts_that_can_be_counted() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        let bytes = noise(4 << 20);
        write(&vfs, ino, opened.fh, 0, bytes.clone()).await;
        close(&vfs, ino, opened.fh).await;
        let left = || async {
            let value = vfs.getxattr(ino, b"torchfs.restripe").await.unwrap();
            String::from_utf8(value.to_vec()).unwrap().parse::<u64>().unwrap()
        };
        assert_eq!(left().await, 0);
        vfs.setxattr(ROOT, ino, b"torchfs.policy", b"replicas:1 64", 0).await.unwrap();
        assert_eq!(vfs.getxattr(ino, b"torchfs.policy").await.unwrap(), "replicas:1 64");
        assert_eq!(left().await, 4 << 20);
        vfs.setxattr(ROOT, ino, b"torchfs.restripe", b"1048576", 0).await.unwrap();
        assert_eq!(left().await, 3 << 20);
        vfs.setxattr(ROOT, ino, b"torchfs.restripe", ALL, 0).await.unwrap();
        assert_eq!(left().await, 0);
        assert_eq!(content(&vfs, ino).await, bytes);
        vfs.setxattr(ROOT, ino, b"torchfs.policy", b"", 0).await.unwrap();
        assert_eq!(redundancy(&vfs, ino).await, "replicas:2");
        assert!(vfs.getxattr(ino, b"torchfs.policy").await.unwrap().is_empty());
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn files_that_share_blocks_go_on_sharing_them_when_they_are_written_again() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (first, opened) = create(&vfs, "first").await;
        let bytes = noise(2 << 20);
        write(&vfs, first, opened.fh, 0, bytes.clone()).await;
        let (second, copy) = create(&vfs, "second").await;
        let len = bytes.len() as u64;
        let copied = vfs.copy_file_range(WHO, first, opened.fh, 0, second, copy.fh, 0, len).await.unwrap();
        assert_eq!(copied, len);
        close(&vfs, first, opened.fh).await;
        close(&vfs, second, copy.fh).await;
        for ino in [first, second] {
            vfs.setxattr(ROOT, ino, b"torchfs.redundancy", b"replicas:1", 0).await.unwrap();
        }
        let before = world.pieces();
        vfs.setxattr(ROOT, first, b"torchfs.restripe", ALL, 0).await.unwrap();
        assert_eq!(world.pieces() - before, 8, "one copy of each block");
        vfs.setxattr(ROOT, second, b"torchfs.restripe", ALL, 0).await.unwrap();
        assert_eq!(world.pieces() - before, 8, "the second file has the same blocks");
        assert_eq!(vfs.getxattr(second, b"torchfs.restripe").await.unwrap(), "0");
        for ino in [first, second] {
            assert_eq!(content(&vfs, ino).await, bytes);
        }
        // What is remembered may be gone: then bytes are written after all.
        let two = |ino| vfs.setxattr(ROOT, ino, b"torchfs.redundancy", b"replicas:2", 0);
        two(first).await.unwrap();
        two(second).await.unwrap();
        vfs.setxattr(ROOT, first, b"torchfs.restripe", ALL, 0).await.unwrap();
        vfs.setattr(first, None, SetAttr { size: Some(0), ..SetAttr::default() }).await.unwrap();
        vfs.setxattr(ROOT, second, b"torchfs.restripe", ALL, 0).await.unwrap();
        assert_eq!(vfs.getxattr(second, b"torchfs.restripe").await.unwrap(), "0");
        assert_eq!(content(&vfs, second).await, bytes);
        assert_eq!(world.problems().await, Vec::<String>::new());
        vfs.shutdown().await.unwrap();
    });
}

#[test]
fn only_the_owner_and_root_set_policies_and_nonsense_is_refused() {
    run(|world| async move {
        let vfs = world.mount().await;
        let (ino, opened) = create(&vfs, "file").await;
        close(&vfs, ino, opened.fh).await;
        let other = Caller { uid: 5, ..WHO };
        let set = |who: Caller, name: &'static [u8], value: &'static [u8]| {
            let vfs = vfs.clone();
            async move { vfs.setxattr(who, ino, name, value, 0).await.map_err(|fault| fault.code) }
        };
        assert_eq!(set(other, b"torchfs.redundancy", b"replicas:1").await, Err(Code::Permission));
        assert_eq!(set(ROOT, b"torchfs.redundancy", b"replicas:0").await, Err(Code::Invalid));
        assert_eq!(set(ROOT, b"torchfs.redundancy", b"ec:4").await, Err(Code::Invalid));
        assert_eq!(set(ROOT, b"torchfs.stripe", b"many").await, Err(Code::Invalid));
        assert_eq!(set(ROOT, b"torchfs.nothing", b"1").await, Err(Code::Unsupported));
        assert_eq!(set(WHO, b"torchfs.redundancy", b"replicas:1").await, Ok(()));
        assert_eq!(redundancy(&vfs, ino).await, "replicas:1");
        assert_eq!(set(WHO, b"torchfs.redundancy", b"").await, Ok(()));
        assert_eq!(redundancy(&vfs, ino).await, "replicas:2");
        vfs.shutdown().await.unwrap();
    });
}

/// What a file shares with another must not become what was written to one of them while it was written again.
#[test]
fn what_is_written_while_a_file_is_written_again_stays_its_own() {
    for seed in rounds(8) {
        run(|world| async move {
            // Where bytes are has to be asked each time.
            let config = Config { extents_max: 0, ..Config::default() };
            let vfs = world.mount_with(config, Arc::new(NoHost)).await;
            let (first, opened) = create(&vfs, "first").await;
            let bytes = noise(1 << 20);
            write(&vfs, first, opened.fh, 0, bytes.clone()).await;
            let (second, copy) = create(&vfs, "second").await;
            let len = bytes.len() as u64;
            vfs.copy_file_range(WHO, first, opened.fh, 0, second, copy.fh, 0, len).await.unwrap();
            vfs.fsync(first, opened.fh, false).await.unwrap();
            close(&vfs, second, copy.fh).await;
            for ino in [first, second] {
                vfs.setxattr(ROOT, ino, b"torchfs.redundancy", b"replicas:1", 0).await.unwrap();
            }
            *world.overtaking.lock() = Some(Rng(seed));
            let (other, fh) = (vfs.clone(), opened.fh);
            let writing = tokio::spawn(async move {
                let mut rng = Rng(seed + 1);
                for _ in 0..30 {
                    let at = rng.below(len - 5000);
                    write(&other, first, fh, at, vec![0xEE; 5000]).await;
                    tokio::time::sleep(Duration::from_micros(rng.below(5_000))).await;
                }
            });
            while !writing.is_finished() {
                // Given up where somebody writes.
                let _ = vfs.setxattr(ROOT, first, b"torchfs.restripe", ALL, 0).await;
            }
            writing.await.unwrap();
            *world.overtaking.lock() = None;
            close(&vfs, first, opened.fh).await;
            vfs.setxattr(ROOT, second, b"torchfs.restripe", ALL, 0).await.unwrap();
            assert!(content(&vfs, second).await == bytes, "seed {seed}");
            assert_eq!(world.problems().await, Vec::<String>::new());
        });
    }
}
