//! Names on one mount.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use torchfs_proto::attr::Kind;
use torchfs_proto::{Code, Ino};
use torchfs_vfs::{Config, NoHost};

use crate::world::{Rng, WHO, World, find, names, rounds, run, run_with, until};

#[test]
fn creating_a_file_in_a_folder_made_here_costs_one_call() {
    run(|world| async move {
        let vfs = world.mount().await;
        let folder = vfs.make(WHO, Ino::ROOT, b"d", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        let before = world.calls.load(Ordering::Acquire);
        for i in 0..100 {
            let name = format!("f{i}");
            assert_eq!(find(&vfs, folder, &name).await, None);
            let (node, opened) = vfs.create(WHO, folder, name.as_bytes(), 0o644, 2).await.unwrap();
            vfs.flush(node.attr.ino, opened.fh, 0).await.unwrap();
            vfs.release(node.attr.ino, opened.fh, None).await;
            assert_eq!(vfs.getattr(folder, None).await.unwrap().attr.size, 4096 + 32 * (i + 1));
            assert_eq!(find(&vfs, folder, &name).await, Some(node.attr.ino));
        }
        assert_eq!(world.calls.load(Ordering::Acquire) - before, 100);
    });
}

/// Found by storms on a busy machine, as ENOENT of a rename.
#[test]
fn names_changed_while_the_lease_had_run_out_are_known_when_its_renewal_comes_late() {
    let config = torchfs_meta::Config { lease_ms: 2000, ..World::settings() };
    run_with(config, |world| async move {
        let vfs = world.mount().await;
        let folder = vfs.make(WHO, Ino::ROOT, b"d", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        let old = vfs.make(WHO, folder, b"old", Kind::File, 0o644, 0, b"").await.unwrap().attr.ino;
        assert_eq!(find(&vfs, folder, "new").await, None);
        assert_eq!(find(&vfs, folder, "old").await, Some(old));
        let held = || !vfs.entry_ttl(folder, b"old").is_zero();
        world.late_renewals.store(true, Ordering::Release);
        until(|| async { !held() }).await;
        // The kernel's time ends a little before the lease.
        tokio::time::sleep(Duration::from_millis(400)).await;
        vfs.rename(folder, b"old", folder, b"new", 0).await.unwrap();
        world.late_renewals.store(false, Ordering::Release);
        for _ in 0..40 {
            assert_eq!(find(&vfs, folder, "old").await, None);
            assert_eq!(find(&vfs, folder, "new").await, Some(old));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

#[test]
fn an_extended_attribute_that_was_set_is_not_hidden_by_an_older_answer() {
    run(|world| async move {
        let vfs = world.mount().await;
        let ino = vfs.make(WHO, Ino::ROOT, b"f", Kind::File, 0o644, 0, b"").await.unwrap().attr.ino;
        vfs.setxattr(WHO, ino, b"user.a", b"old", 0).await.unwrap();
        world.late_xattrs.store(true, Ordering::Release);
        let asking = tokio::spawn({
            let vfs = vfs.clone();
            async move { vfs.getxattr(ino, b"user.a").await }
        });
        until(|| async { world.xattrs_late.load(Ordering::Acquire) == 1 }).await;
        vfs.setxattr(WHO, ino, b"user.a", b"new", 0).await.unwrap();
        world.late_xattrs.store(false, Ordering::Release);
        assert_eq!(asking.await.unwrap().unwrap(), "old");
        assert_eq!(vfs.getxattr(ino, b"user.a").await.unwrap(), "new");
    });
}

#[test]
fn foreseen_attributes_of_a_folder_are_those_of_the_service() {
    run(|world| async move {
        let vfs = world.mount().await;
        let folder = vfs.make(WHO, Ino::ROOT, b"d", Kind::Dir, 0o755, 0, b"").await.unwrap().attr.ino;
        for i in 0..10 {
            vfs.make(WHO, folder, format!("d{i}").as_bytes(), Kind::Dir, 0o755, 0, b"").await.unwrap();
            vfs.create(WHO, folder, format!("f{i}").as_bytes(), 0o644, 2).await.unwrap();
        }
        vfs.unlink(folder, b"f3").await.unwrap();
        vfs.rmdir(folder, b"d3").await.unwrap();
        let foreseen = vfs.getattr(folder, None).await.unwrap().attr;
        let other = world.mount().await;
        let told = other.lookup(WHO, Ino::ROOT, b"d").await.unwrap().node.unwrap().attr;
        assert_eq!(foreseen, told);
    });
}

#[test]
fn random_names_agree_with_a_map() {
    for seed in rounds(8) {
        run(|world| async move {
            let vfs = world.mount().await;
            let mut rng = Rng(seed);
            let mut folders = vec![Ino::ROOT];
            for i in 0..2 {
                let name = format!("folder{i}");
                let node = vfs.make(WHO, Ino::ROOT, name.as_bytes(), Kind::Dir, 0o755, 0, b"").await.unwrap();
                folders.push(node.attr.ino);
            }
            let mut model: BTreeMap<(u64, String), Ino> = BTreeMap::new();
            for (i, folder) in folders.iter().enumerate().skip(1) {
                model.insert((1, format!("folder{}", i - 1)), *folder);
            }
            for _ in 0..300 {
                let folder = folders[rng.below(3) as usize];
                let name = format!("n{}", rng.below(12));
                let at = (folder.0, name.clone());
                match rng.below(6) {
                    0 | 1 => {
                        let made = vfs.make(WHO, folder, name.as_bytes(), Kind::File, 0o644, 0, b"").await;
                        match model.get(&at) {
                            Some(_) => assert_eq!(made.map_err(|f| f.code), Err(Code::Exists)),
                            None => {
                                model.insert(at, made.unwrap().attr.ino);
                            }
                        }
                    }
                    2 => {
                        let gone = vfs.unlink(folder, name.as_bytes()).await;
                        match model.remove(&at) {
                            Some(_) => gone.unwrap(),
                            None => assert_eq!(gone.map_err(|f| f.code), Err(Code::NotFound)),
                        }
                    }
                    3 => {
                        let (to, new) = (folders[rng.below(3) as usize], format!("n{}", rng.below(12)));
                        let moved = vfs.rename(folder, name.as_bytes(), to, new.as_bytes(), 0).await;
                        match model.get(&at).copied() {
                            Some(ino) => {
                                moved.unwrap();
                                // Two names of one file: rename does nothing.
                                if model.get(&(to.0, new.clone())) != Some(&ino) {
                                    model.remove(&at);
                                    model.insert((to.0, new), ino);
                                }
                            }
                            None => assert_eq!(moved.map_err(|f| f.code), Err(Code::NotFound)),
                        }
                    }
                    4 => {
                        let (to, new) = (folders[rng.below(3) as usize], format!("n{}", rng.below(12)));
                        if let Some(ino) = model.get(&at).copied() {
                            let linked = vfs.link(ino, to, new.as_bytes()).await;
                            match model.get(&(to.0, new.clone())) {
                                Some(_) => assert_eq!(linked.map_err(|f| f.code), Err(Code::Exists)),
                                None => {
                                    linked.unwrap();
                                    model.insert((to.0, new), ino);
                                }
                            }
                        }
                    }
                    _ => {
                        let want = 1 + rng.below(20) as usize;
                        let mut listed = names(&vfs, folder, want).await;
                        listed.sort();
                        let range = (folder.0, String::new())..(folder.0 + 1, String::new());
                        let known: Vec<String> =
                            model.range(range).map(|((_, name), _)| name.clone()).collect();
                        assert_eq!(listed, known, "seed {seed}");
                    }
                }
                let name = format!("n{}", rng.below(12));
                assert_eq!(
                    find(&vfs, folder, &name).await,
                    model.get(&(folder.0, name)).copied(),
                    "seed {seed}"
                );
            }
            assert_eq!(world.problems().await, Vec::<String>::new());
        });
    }
}

/// Seed 34 of the random names.
#[test]
fn renaming_one_name_of_a_file_to_another_of_its_names_keeps_both() {
    run(|world| async move {
        let vfs = world.mount().await;
        let ino = vfs.make(WHO, Ino::ROOT, b"a", Kind::File, 0o644, 0, b"").await.unwrap().attr.ino;
        vfs.link(ino, Ino::ROOT, b"b").await.unwrap();
        vfs.rename(Ino::ROOT, b"a", Ino::ROOT, b"b", 0).await.unwrap();
        assert_eq!(find(&vfs, Ino::ROOT, "a").await, Some(ino));
        assert_eq!(find(&vfs, Ino::ROOT, "b").await, Some(ino));
    });
}

#[test]
fn a_listed_folder_answers_absent_names_from_memory() {
    run(|world| async move {
        let first = world.mount().await;
        for i in 0..3000 {
            first.make(WHO, Ino::ROOT, format!("f{i}").as_bytes(), Kind::File, 0o644, 0, b"").await.unwrap();
        }
        let vfs = world.mount().await;
        assert_eq!(names(&vfs, Ino::ROOT, 100).await.len(), 3000);
        let before = world.calls.load(Ordering::Acquire);
        for i in 0..100 {
            assert_eq!(find(&vfs, Ino::ROOT, &format!("absent{i}")).await, None);
        }
        assert_eq!(world.calls.load(Ordering::Acquire), before);
    });
}

#[test]
fn what_was_made_in_a_folder_is_waited_for_though_the_folder_was_forgotten_since() {
    run(|world| async move {
        let config = Config { tick: Duration::from_millis(5), ..Config::default() };
        let vfs = world.mount_with(config, Arc::new(NoHost)).await;
        let made = vfs.make(WHO, Ino::ROOT, b"folder", Kind::Dir, 0o755, 0, b"").await.unwrap();
        let folder = made.attr.ino;
        vfs.fsyncdir(folder).await.unwrap();
        world.silent_log.store(true, Ordering::Release);
        let made = vfs.make(WHO, folder, b"file", Kind::File, 0o644, 0, b"").await.unwrap();
        vfs.forget(made.attr.ino, 1);
        vfs.forget(folder, 1);
        tokio::time::sleep(Duration::from_millis(200)).await;
        let synced = tokio::spawn(async move { vfs.fsyncdir(folder).await });
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!synced.is_finished(), "nobody told that it is durable");
        world.silent_log.store(false, Ordering::Release);
        synced.await.unwrap().unwrap();
    });
}

#[test]
fn an_interrupted_change_happens_and_is_remembered_rightly() {
    run(|world| async move {
        let vfs = world.mount().await;
        for i in 0..50 {
            let name = format!("f{i}");
            {
                // Polled once at most, then dropped.
                let make = vfs.make(WHO, Ino::ROOT, name.as_bytes(), Kind::File, 0o644, 0, b"");
                let _ = futures_util::FutureExt::now_or_never(make);
            }
            let made = vfs.make(WHO, Ino::ROOT, name.as_bytes(), Kind::File, 0o644, 0, b"").await;
            assert_eq!(made.map_err(|f| f.code).err(), Some(Code::Exists));
            assert!(find(&vfs, Ino::ROOT, &name).await.is_some());
            let _ = futures_util::FutureExt::now_or_never(vfs.unlink(Ino::ROOT, name.as_bytes()));
            let gone = vfs.unlink(Ino::ROOT, name.as_bytes()).await;
            assert_eq!(gone.map_err(|f| f.code), Err(Code::NotFound));
            assert_eq!(find(&vfs, Ino::ROOT, &name).await, None);
        }
    });
}
