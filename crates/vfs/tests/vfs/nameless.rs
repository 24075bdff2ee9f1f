//! Files that lose their last name on one mount while another one uses them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use torchfs_proto::attr::SetAttr;
use torchfs_proto::{Code, Ino};
use torchfs_vfs::Caller;

use crate::world::{WHO, close, content, create, find, run, until, write};

/// Longer than an inode without a name is kept for who has just found it.
const LONG: Duration = Duration::from_millis(1_500);

#[test]
fn a_file_that_got_a_new_name_while_it_lost_its_last_one_elsewhere_stays() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let (ino, opened) = create(&b, "file").await;
        write(&b, ino, opened.fh, 0, vec![7; 100_000]).await;
        close(&b, ino, opened.fh).await;
        assert_eq!(find(&a, Ino::ROOT, "file").await, Some(ino));
        b.unlink(Ino::ROOT, b"file").await.unwrap();
        a.link(ino, Ino::ROOT, b"again").await.unwrap();
        tokio::time::sleep(LONG).await;
        for vfs in [&a, &b] {
            assert_eq!(find(vfs, Ino::ROOT, "again").await, Some(ino));
            assert_eq!(content(vfs, ino).await, vec![7; 100_000]);
        }
        a.unlink(Ino::ROOT, b"again").await.unwrap();
        until(async || world.blocks().await == 0).await;
    });
}

#[test]
fn a_late_answer_from_before_a_removal_does_not_keep_the_file_for_ever() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let (ino, opened) = create(&b, "file").await;
        write(&b, ino, opened.fh, 0, vec![7; 100_000]).await;
        close(&b, ino, opened.fh).await;
        find(&a, Ino::ROOT, "file").await;
        let opened = a.open(ino, 0).await.unwrap();
        // So that its attributes have to be asked for.
        b.setattr(ino, None, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await.unwrap();
        let before = world.attrs_late.load(Ordering::Acquire);
        world.late_attrs.store(true, Ordering::Release);
        let asking = tokio::spawn({
            let a = a.clone();
            async move { a.getattr(ino, None).await }
        });
        until(async || world.attrs_late.load(Ordering::Acquire) > before).await;
        b.unlink(Ino::ROOT, b"file").await.unwrap();
        // What tells of the removal comes by another way than the answer.
        tokio::time::sleep(LONG).await;
        world.late_attrs.store(false, Ordering::Release);
        asking.await.unwrap().unwrap();
        a.release(ino, opened.fh, None).await;
        until(async || world.blocks().await == 0).await;
    });
}

/// What is found is gone for good: the caller hears so, and nobody waits.
#[test]
fn a_second_look_at_what_is_being_removed_here_ends() {
    run(|world| async move {
        let (a, b) = (world.mount().await, world.mount().await);
        let stranger = Caller { uid: 1000, gid: 1000, pid: 77 };
        for _ in 0..50 {
            let (ino, opened) = create(&a, "file").await;
            close(&a, ino, opened.fh).await;
            let created = b.create(stranger, Ino::ROOT, b"file", 0o644, 2).await;
            assert_eq!(created.map_err(|fault| fault.code).err(), Some(Code::Stale));
            let second = async {
                let Some(found) = b.lookup(stranger, Ino::ROOT, b"file").await.unwrap().node else { return };
                // It was there, so it can be opened.
                let opened = b.open(found.attr.ino, 0).await.unwrap();
                b.release(found.attr.ino, opened.fh, None).await;
                b.forget(found.attr.ino, 1);
            };
            let (removed, ()) = futures_util::future::join(b.unlink(Ino::ROOT, b"file"), second).await;
            removed.unwrap();
            assert_eq!(b.lookup(WHO, Ino::ROOT, b"file").await.unwrap().node, None);
        }
    });
}
