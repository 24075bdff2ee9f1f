//! Readers that check every byte: an archive of old files whose content is known, and logs that others are writing.
//!
//! The idea: old data is what faults endanger silently, so it is read all the time, in random ranges and around the page
//! cache, while writers and faults are at work. A reader that is told something wrong, or an error that nobody announced,
//! ends with a sentence that the test fails with.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::promises::Stream;
use crate::rng::Rng;
use crate::sys::{self, Aligned};

/// Files that are written once and read for the rest of the test.
#[derive(Clone, Debug)]
pub struct Archive {
    folder: String,
    seed: u64,
    lens: Arc<Vec<usize>>,
}

impl Archive {
    /// Writes `files` files of many sizes, `bytes` of them in all or a little more, and waits until they are safe.
    pub fn write(mount: &Path, folder: &str, files: usize, bytes: usize, seed: u64) -> Archive {
        let mut rng = Rng::new(seed);
        let mut lens: Vec<usize> = (0..files)
            .map(|n| match n % 4 {
                0 => rng.range(1, 4096),
                1 => rng.range(4096, 200_000),
                _ => rng.range(300_000, 3_000_000),
            } as usize)
            .collect();
        let have: usize = lens.iter().sum();
        lens.push(bytes.saturating_sub(have).max(1));
        let archive = Archive { folder: folder.to_owned(), seed, lens: Arc::new(lens) };
        fs::create_dir_all(mount.join(folder)).expect("a mounted volume takes folders");
        for n in 0..archive.len() {
            let path = archive.path(mount, n);
            let file = File::create(&path).expect("a mounted volume takes files");
            file.write_all_at(&archive.content(n), 0)
                .and_then(|()| sys::close(file))
                .unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
        }
        archive
    }

    /// How many files it has.
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// Panics unless every file reads back whole.
    pub fn check(&self, mount: &Path) {
        for n in 0..self.len() {
            let path = self.path(mount, n);
            let bytes = fs::read(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
            let want = self.content(n);
            assert_eq!(bytes.len(), want.len(), "{} has another length", path.display());
            if let Some(at) = bytes.iter().zip(&want).position(|(a, b)| a != b) {
                panic!("{} is wrong at byte {at} of {}", path.display(), want.len());
            }
        }
    }

    /// Reads one range of one file around the kernel's pages.
    fn probe(&self, mount: &Path, rng: &mut Rng) -> io::Result<()> {
        const PAGE: usize = 4096;
        let n = rng.below(self.len() as u64) as usize;
        let pages = self.lens[n].div_ceil(PAGE) as u64;
        let at = rng.below(pages) as usize * PAGE;
        let room = rng.range(1, 257) as usize * PAGE;
        let file = sys::open(&self.path(mount, n), libc::O_RDONLY | libc::O_DIRECT, 0)?;
        let mut buffer = Aligned::new(room);
        let mut read = 0;
        while read < room {
            match file.read_at(&mut buffer.bytes()[read..], (at + read) as u64)? {
                0 => break,
                more => read += more,
            }
        }
        let want = self.content(n);
        let want = &want[at..want.len().min(at + room)];
        if &buffer.bytes()[..read] != want {
            let wrong = buffer.bytes()[..read].iter().zip(want).position(|(a, b)| a != b);
            let path = self.path(mount, n);
            return Err(io::Error::other(format!(
                "{} from byte {at}: {read} bytes instead of {}, the first wrong one {wrong:?}",
                path.display(),
                want.len()
            )));
        }
        Ok(())
    }

    fn path(&self, mount: &Path, n: usize) -> PathBuf {
        mount.join(&self.folder).join(format!("{n:03}"))
    }

    fn content(&self, n: usize) -> Vec<u8> {
        Rng::new(self.seed ^ (n as u64).rotate_left(20)).bytes(self.lens[n])
    }
}

/// Readers at work on one mount.
#[derive(Debug)]
pub struct Readers {
    cut: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

impl Readers {
    /// Starts `threads` readers of an archive and of others' logs.
    pub fn start(mount: &Path, archive: &Archive, streams: &[Stream], threads: u64, seed: u64) -> Readers {
        let (cut, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let reads = Arc::new(AtomicU64::new(0));
        let threads = (0..threads)
            .map(|n| {
                let (mount, archive, streams) = (mount.to_owned(), archive.clone(), streams.to_vec());
                let (cut, stop, reads) = (cut.clone(), stop.clone(), reads.clone());
                std::thread::spawn(move || {
                    let mut rng = Rng::new(seed ^ n.rotate_left(33));
                    while !stop.load(Ordering::Relaxed) {
                        let read = match rng.below(4) {
                            0 if !streams.is_empty() => rng.pick(&streams).check(&mount),
                            _ => archive.probe(&mount, &mut rng),
                        };
                        match read {
                            Ok(()) => reads.fetch_add(1, Ordering::Relaxed),
                            Err(_) if cut.load(Ordering::SeqCst) => return Ok(()),
                            Err(error) => return Err(format!("reader {n} at {}: {error}", mount.display())),
                        };
                    }
                    Ok(())
                })
            })
            .collect();
        Readers { cut, stop, reads, threads }
    }

    /// How many reads all of them have done.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Whether all of them still work.
    pub fn working(&self) -> bool {
        self.threads.iter().all(|t| !t.is_finished())
    }

    /// Says that from now on reads may fail. Wrong bytes are wrong all the same, before.
    pub fn announce(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    /// Lets each end its read; panics if one was told something wrong.
    #[track_caller]
    pub fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            if let Err(why) = thread.join().expect("a reader does not panic") {
                panic!("{why}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_folder_is_read_right_and_a_wrong_byte_is_seen() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let archive = Archive::write(folder.path(), "old", 4, 1 << 20, 3);
        archive.check(folder.path());
        let readers = Readers::start(folder.path(), &archive, &[], 2, 5);
        crate::eventually("reads", || if readers.reads() > 20 { Ok(()) } else { Err("few".into()) });
        readers.finish();
        for n in 0..archive.len() {
            let file = File::options().write(true).open(archive.path(folder.path(), n)).unwrap();
            file.write_all_at(&[archive.content(n)[0] ^ 1], 0).unwrap();
        }
        let readers = Readers::start(folder.path(), &archive, &[], 2, 5);
        crate::eventually(
            "a reader to notice",
            || if readers.working() { Err("none".into()) } else { Ok(()) },
        );
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| readers.finish())).is_err());
    }
}
