//! Three mounts of one volume whose requests and answers overtake one another on their way.
//!
//! The idea: each name has one writer, who puts a higher number into it each time, over the old content or as another file
//! renamed over the name. Whoever reads on any mount must find the name, and in every word of the content a number at least as
//! high as the last one that was through before he began.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use torchfs_proto::{Code, Ino};
use torchfs_vfs::Vfs;

use crate::world::{RDWR, Rng, WHO, World, close, create, read, rounds, run, write};

const NAMES: usize = 2;

/// What was put into a name and is through.
type Through = [AtomicU64; NAMES];

fn words(number: u64, count: u64) -> Vec<u8> {
    (0..count).flat_map(|_| number.to_le_bytes()).collect()
}

/// As a program over the kernel: a stale inode is looked up once more.
async fn open(vfs: &Vfs, name: &str, flags: i32) -> (Ino, u64) {
    for last in [false, true] {
        let found = vfs.lookup(WHO, Ino::ROOT, name.as_bytes()).await.unwrap().node;
        let ino = found.unwrap_or_else(|| panic!("{name} is not there")).attr.ino;
        match vfs.open(ino, flags).await {
            Ok(opened) => return (ino, opened.fh),
            Err(fault) if fault.code == Code::Stale && !last => vfs.forget(ino, 1),
            Err(fault) => panic!("{name}: {fault}"),
        }
    }
    unreachable!()
}

async fn put(mounts: &[Vfs], rng: &mut Rng, at: usize, number: u64) {
    let vfs = &mounts[rng.below(mounts.len() as u64) as usize];
    let (name, fresh) = (format!("n{at}"), format!("fresh{at}"));
    // Inline, in one block, in several.
    let count = [8, 4_000, 80_000][rng.below(3) as usize];
    if number > 1 && rng.below(3) == 0 {
        let (ino, fh) = open(vfs, &name, RDWR).await;
        let size = vfs.getattr(ino, Some(fh)).await.unwrap().attr.size;
        write(vfs, ino, fh, 0, words(number, size / 8)).await;
        close(vfs, ino, fh).await;
        vfs.forget(ino, 1);
        return;
    }
    let (ino, opened) = create(vfs, &fresh).await;
    write(vfs, ino, opened.fh, 0, words(number, count)).await;
    close(vfs, ino, opened.fh).await;
    let mover = &mounts[rng.below(mounts.len() as u64) as usize];
    mover.rename(Ino::ROOT, fresh.as_bytes(), Ino::ROOT, name.as_bytes(), 0).await.unwrap();
    vfs.forget(ino, 1);
}

async fn look(mounts: &[Vfs], rng: &mut Rng, through: &Through) {
    let (vfs, at) = (&mounts[rng.below(mounts.len() as u64) as usize], rng.below(NAMES as u64) as usize);
    let least = through[at].load(Ordering::Acquire);
    if least == 0 {
        return tokio::task::yield_now().await;
    }
    let (ino, fh) = open(vfs, &format!("n{at}"), 0).await;
    let bytes = read(vfs, ino, fh, 0, 1 << 20).await;
    assert!(!bytes.is_empty() && bytes.len() % 8 == 0, "{} bytes", bytes.len());
    let lowest = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).min();
    assert!(lowest >= Some(least), "n{at}: {lowest:?} was read after {least} was through");
    close(vfs, ino, fh).await;
    vfs.forget(ino, 1);
}

#[test]
fn what_is_through_is_seen_everywhere_whatever_overtakes_what() {
    for seed in rounds(12) {
        run(|world: Arc<World>| async move {
            let mounts = [world.mount().await, world.mount().await, world.mount().await];
            *world.overtaking.lock() = Some(Rng(seed));
            let (mounts, through) = (Arc::new(mounts), Arc::new(Through::default()));
            let writers = (0..NAMES).map(|at| {
                let (mounts, through) = (mounts.clone(), through.clone());
                tokio::spawn(async move {
                    let mut rng = Rng(seed * 100 + at as u64);
                    for number in 1..=40 {
                        put(&*mounts, &mut rng, at, number).await;
                        through[at].store(number, Ordering::Release);
                    }
                })
            });
            let writers: Vec<_> = writers.collect();
            let readers = (0..4).map(|reader| {
                let (mounts, through) = (mounts.clone(), through.clone());
                tokio::spawn(async move {
                    let mut rng = Rng(seed * 100 + 50 + reader);
                    while through.iter().any(|number| number.load(Ordering::Acquire) < 40) {
                        look(&*mounts, &mut rng, &through).await;
                    }
                })
            });
            let readers: Vec<_> = readers.collect();
            for task in writers.into_iter().chain(readers) {
                task.await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            }
            *world.overtaking.lock() = None;
            assert_eq!(world.problems().await, Vec::<String>::new(), "seed {seed}");
        });
    }
}
