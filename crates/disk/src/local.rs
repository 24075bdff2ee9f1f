//! A folder of the local file system as a [`Disk`].
//!
//! Plain positioned I/O on descriptors opened with O_CLOEXEC; nothing is cached here. Whoever owns a folder opens it
//! with [`LocalDisk::open_locked`], so that a second process on the same folder fails at start with a clear sentence.
//!
//! # Invariants
//! - `sync` is fdatasync: the bytes and the length are durable, the name is not; `sync_names` makes names durable.
//! - Names are flat: a name with a slash never reaches the kernel.
//! - What is made here only its owner may read: folders are made with mode 0700, files with 0600.
//! - The lock is held while the disk or any clone of its `Arc` lives; the kernel drops it when the process dies.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use torchfs_proto::disk::{Advice, Disk, DiskFile, Space};

/// The name of the lock file; it is not part of [`Disk::list`].
const LOCK: &str = "LOCK";

/// Files hold what others wrote or named; rights are checked above, so nobody may go around that.
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;

/// One folder of the machine.
#[derive(Debug)]
pub struct LocalDisk {
    dir: PathBuf,
    /// The folder itself, open for syncing its names.
    folder: File,
    /// The number of the file system below.
    fs: u64,
    /// Held, never read: the lock ends with it.
    _lock: Option<File>,
}

impl LocalDisk {
    /// Opens the folder, making it if it is missing. Others may have it open too.
    pub fn open(dir: impl AsRef<Path>) -> io::Result<LocalDisk> {
        let dir = dir.as_ref().to_path_buf();
        make_dir_durably(&dir).map_err(|e| named(&dir, "cannot make the folder", e))?;
        let folder = File::open(&dir).map_err(|e| named(&dir, "cannot open the folder", e))?;
        let fs = folder.metadata().map_or(0, |meta| file_system(meta.dev()));
        Ok(LocalDisk { dir, folder, fs, _lock: None })
    }

    /// Opens the folder for this process alone. Fails with [`io::ErrorKind::WouldBlock`] if another one holds it.
    pub fn open_locked(dir: impl AsRef<Path>) -> io::Result<LocalDisk> {
        let mut disk = LocalDisk::open(dir)?;
        let path = disk.dir.join(LOCK);
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(FILE_MODE)
            .open(&path)
            .map_err(|e| named(&path, "cannot open the lock file", e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    format!(
                        "the folder {} is in use by another process; stop that one or choose another folder",
                        disk.dir.display()
                    ),
                ));
            }
            Err(TryLockError::Error(e)) => return Err(named(&path, "cannot lock", e)),
        }
        disk._lock = Some(lock);
        Ok(disk)
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        if name.is_empty() || name == "." || name == ".." || name == LOCK || name.contains(['/', '\0']) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name:?} is no name for a file here"),
            ));
        }
        Ok(self.dir.join(name))
    }
}

impl Disk for LocalDisk {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let path = self.path(name)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|e| named(&path, "cannot open", e))?;
        Ok(Arc::new(LocalFile { file, direct: OnceLock::new() }))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let path = self.path(name)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(FILE_MODE)
            .open(&path)
            .map_err(|e| named(&path, "cannot create", e))?;
        Ok(Arc::new(LocalFile { file, direct: OnceLock::new() }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        fs::rename(&from, to).map_err(|e| named(&from, "cannot rename", e))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let path = self.path(name)?;
        fs::remove_file(&path).map_err(|e| named(&path, "cannot remove", e))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(|e| named(&self.dir, "cannot list", e))? {
            let entry = entry?;
            // What is no plain file or has no readable name is not ours.
            if let Ok(name) = entry.file_name().into_string()
                && name != LOCK
                && entry.file_type()?.is_file()
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.folder.sync_all().map_err(|e| named(&self.dir, "cannot sync the names in", e))
    }

    fn space(&self) -> io::Result<Space> {
        let path = CString::new(self.dir.as_os_str().as_bytes()).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "the folder's name holds a zero byte")
        })?;
        let mut stat = MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: the path is a C string and `stat` has room for the answer.
        if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
            return Err(named(&self.dir, "cannot ask for the space under", io::Error::last_os_error()));
        }
        // SAFETY: the call returned 0, so the answer is complete.
        let stat = unsafe { stat.assume_init() };
        Ok(Space {
            total: stat.f_blocks.saturating_mul(stat.f_frsize),
            free: stat.f_bavail.saturating_mul(stat.f_frsize),
            fs: self.fs,
        })
    }
}

/// A number for a file system of this machine. Device numbers mean something within one running kernel, which has a number of
/// its own; so processes on one machine agree, and those on different ones do not.
fn file_system(device: u64) -> u64 {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = boot.chars().filter(char::is_ascii_hexdigit).collect();
    let Ok(boot) = u128::from_str_radix(&digits, 16) else { return 0 };
    let kernel = (boot >> 64) as u64 ^ boot as u64;
    kernel ^ device.rotate_left(32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// One open file of the machine.
#[derive(Debug)]
struct LocalFile {
    file: File,
    /// The same file for I/O around the page cache, opened when first wanted; `None` where that is not possible.
    direct: OnceLock<Option<File>>,
}

impl LocalFile {
    fn direct(&self) -> Option<&File> {
        let open = || {
            // The name may have changed since; the descriptor knows the file.
            let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).ok()
        };
        self.direct.get_or_init(open).as_ref()
    }
}

impl DiskFile for LocalFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_full(&self.file, buf, offset)
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let Some(direct) = self.direct() else {
            return self.read_at(buf, offset);
        };
        match read_full(direct, buf, offset) {
            // The file system wants another alignment, or none of it; so does the rest after a short read.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => self.read_at(buf, offset),
            other => other,
        }
    }

    fn is_cached(&self, offset: u64, len: u64) -> Option<bool> {
        cached_pages(&self.file, offset, len).map(|pages| pages >= pages_of(offset, len))
    }

    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        // A read that refuses to wait still starts to read ahead, and whoever then goes around the page cache reads it all
        // a second time.
        if self.is_cached(offset, buf.len() as u64) == Some(false) {
            return Ok(false);
        }
        match preadv_nowait(&self.file, buf, offset) {
            Ok(n) => Ok(n == buf.len()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            // Some file systems cannot tell; they wait.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                Ok(self.read_at(buf, offset)? == buf.len())
            }
            Err(e) => Err(e),
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn write_direct_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        let Some(direct) = self.direct() else {
            return self.write_vectored_at(parts, offset);
        };
        match write_parts(direct, parts, offset) {
            // The file system wants another alignment, or none of it.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => self.write_vectored_at(parts, offset),
            other => other,
        }
    }

    fn write_vectored_at(&self, parts: &[&[u8]], offset: u64) -> io::Result<()> {
        write_parts(&self.file, parts, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let len = offset(len)?;
        loop {
            // SAFETY: the descriptor is open as long as `self.file`; the call takes no memory of ours.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // File systems without it at least get the length; the space is then claimed by the writes.
                Some(libc::EOPNOTSUPP) => {
                    return if self.len()? < len as u64 { self.set_len(len as u64) } else { Ok(()) };
                }
                _ => return Err(error),
            }
        }
    }

    fn advise(&self, from: u64, len: u64, advice: Advice) {
        let advice = match advice {
            Advice::WillNeed => libc::POSIX_FADV_WILLNEED,
            Advice::DontNeed => libc::POSIX_FADV_DONTNEED,
        };
        if let (Ok(from), Ok(len)) = (offset(from), offset(len)) {
            // SAFETY: the descriptor is open; the call takes no memory of ours. A refused hint changes nothing.
            let _ = unsafe { libc::posix_fadvise(self.file.as_raw_fd(), from, len, advice) };
        }
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}

/// How many parts one pwritev takes (IOV_MAX of Linux).
const PARTS_MAX: usize = 1024;

/// Reads until the buffer is full or the file ends.
fn read_full(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Writes all parts, in as few calls as can be.
fn write_parts(file: &File, parts: &[&[u8]], mut offset: u64) -> io::Result<()> {
    for some in parts.chunks(PARTS_MAX) {
        let wanted: usize = some.iter().map(|part| part.len()).sum();
        let mut done = pwritev(file, some, offset)?;
        // A short write is rare: finish part by part.
        if done < wanted {
            let mut at = offset;
            for part in some {
                let skip = done.min(part.len());
                done -= skip;
                file.write_all_at(&part[skip..], at + skip as u64)?;
                at += part.len() as u64;
            }
        }
        offset += wanted as u64;
    }
    Ok(())
}

/// How many pages a range of a file touches.
fn pages_of(offset: u64, len: u64) -> u64 {
    const PAGE: u64 = 4096;
    if len == 0 { 0 } else { offset.saturating_add(len).div_ceil(PAGE) - offset / PAGE }
}

/// How many pages of a range are in the page cache; `None` where the kernel (before 6.5) cannot tell, or may not.
fn cached_pages(file: &File, offset: u64, len: u64) -> Option<u64> {
    // As the kernel has them in linux/mman.h.
    #[repr(C)]
    struct Range {
        offset: u64,
        len: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Found {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    // libc does not name it yet for every machine.
    const CACHESTAT: Option<libc::c_long> =
        if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) { Some(451) } else { None };
    if len == 0 {
        return Some(0);
    }
    let number = CACHESTAT?;
    let (range, mut found) = (Range { offset, len }, Found::default());
    // SAFETY: both structures have the kernel's layout and outlive the call; only `found` is written.
    let result = unsafe { libc::syscall(number, file.as_raw_fd(), &raw const range, &raw mut found, 0u32) };
    (result == 0).then_some(found.cached)
}

/// One read that fails with `WouldBlock` rather than wait for the disk; may be short.
fn preadv_nowait(file: &File, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let at = offset(at)?;
    // SAFETY: the one vector describes the borrowed buffer, which outlives the call.
    let n = unsafe { libc::preadv2(file.as_raw_fd(), &vector, 1, at, libc::RWF_NOWAIT) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// One pwritev; returns how many bytes went out.
fn pwritev(file: &File, parts: &[&[u8]], at: u64) -> io::Result<usize> {
    let vectors: Vec<libc::iovec> = parts
        .iter()
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() })
        .collect();
    let at = offset(at)?;
    loop {
        // SAFETY: each vector points into a borrowed slice that outlives the call, which only reads them; there are
        // at most PARTS_MAX of them.
        let n =
            unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int, at) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn offset(n: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(n).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Makes the folder and its missing parents for their owner alone, each durable in the folder above it. A folder that is
/// there keeps its mode.
pub fn make_dir_durably(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = match dir.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    make_dir_durably(parent)?;
    match DirBuilder::new().mode(FOLDER_MODE).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
        other => other?,
    }
    File::open(parent)?.sync_all()
}

/// Makes a file that only its owner may read, in place of one that may be there. A link is replaced, not followed: in a
/// folder that others may write to it could lead anywhere.
pub fn create_private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    OpenOptions::new().read(true).write(true).create_new(true).mode(FILE_MODE).open(path)
}

/// The same error, naming the file; the errno stays readable through its kind.
fn named(path: &Path, what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_the_owner_may_read_what_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let (made, kept) = (dir.path().join("a/b"), dir.path().join("kept"));
        fs::create_dir(&kept).unwrap();
        fs::set_permissions(&kept, fs::Permissions::from_mode(0o755)).unwrap();
        for folder in [&made, &kept] {
            LocalDisk::open_locked(folder).unwrap().create("x").unwrap();
        }
        create_private(&made.join("y")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for file in [made.join("x"), made.join("y"), made.join(LOCK), kept.join("x"), kept.join(LOCK)] {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
        assert_eq!((mode(&dir.path().join("a")), mode(&made)), (0o700, 0o700));
        assert_eq!(mode(&kept), 0o755, "a folder of the user's own stays as it is");
    }

    #[test]
    fn files_keep_what_was_written_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(dir.path().join("a/b")).unwrap();
        let file = disk.create("x").unwrap();
        let parts: Vec<Vec<u8>> = (0..3000u32).map(|i| vec![i as u8; (i % 7) as usize]).collect();
        let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        file.write_vectored_at(&slices, 5).unwrap();
        file.sync().unwrap();
        disk.sync_names().unwrap();
        let whole = parts.concat();
        let mut back = vec![0; whole.len() + 100];
        assert_eq!(disk.open("x").unwrap().read_at(&mut back, 5).unwrap(), whole.len());
        assert_eq!(&back[..whole.len()], &whole[..]);
        assert!(disk.create("x").is_err());
        disk.rename("x", "y").unwrap();
        assert_eq!(disk.list().unwrap(), ["y"]);
        disk.remove("y").unwrap();
        assert!(disk.list().unwrap().is_empty());
    }

    #[test]
    fn preallocated_files_have_their_length_and_read_as_zeros() {
        let dir = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(dir.path()).unwrap();
        let file = disk.create("x").unwrap();
        file.preallocate(10_000).unwrap();
        assert_eq!(file.len().unwrap(), 10_000);
        let mut buf = [1; 16];
        assert_eq!(file.read_at(&mut buf, 9_992).unwrap(), 8);
        assert_eq!(buf[..8], [0; 8]);
        file.advise(0, 10_000, Advice::DontNeed);
    }

    #[test]
    fn direct_writes_are_seen_by_reads() {
        let dir = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(dir.path()).unwrap();
        let file = disk.create("x").unwrap();
        file.preallocate(1 << 20).unwrap();
        let memory = vec![7u8; 3 * 4096 + 4096];
        let start = memory.as_ptr().align_offset(4096);
        let aligned = &memory[start..start + 2 * 4096];
        file.write_direct_at(&[aligned, &aligned[..4096]], 4096).unwrap();
        file.write_direct_at(&[&memory[1..100]], 100_000).unwrap();
        let mut back = vec![0; 5 * 4096];
        file.read_at(&mut back, 0).unwrap();
        assert_eq!(back[..4096], [0; 4096]);
        assert!(back[4096..4 * 4096].iter().all(|byte| *byte == 7));
        assert_eq!(back[4 * 4096..], [0; 4096]);
        let mut again = vec![0; back.len()];
        if file.read_at_once(&mut again, 0).unwrap() {
            assert_eq!(again, back);
        }
        assert!(!file.read_at_once(&mut back, (1 << 20) - 4096).unwrap(), "the file ends within");
        let mut direct = vec![0u8; 6 * 4096];
        let start = direct.as_ptr().align_offset(4096);
        assert_eq!(file.read_direct_at(&mut direct[start..start + 4 * 4096], 0).unwrap(), 4 * 4096);
        assert_eq!(direct[start..start + 4 * 4096], back[..4 * 4096]);
        file.read_at(&mut back[..99], 100_000).unwrap();
        file.sync().unwrap();
        if file.is_cached(0, 4096).is_some() {
            file.advise(0, 1 << 20, Advice::DontNeed);
            assert_eq!(file.is_cached(0, 4096), Some(false));
            assert!(!file.read_at_once(&mut again, 0).unwrap(), "nothing was read ahead by asking");
            file.read_at(&mut again, 0).unwrap();
            assert_eq!(file.is_cached(1, again.len() as u64 - 1), Some(true));
        }
        assert_eq!(back[..99], [7; 99]);
    }

    #[test]
    fn a_second_opener_of_a_locked_folder_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let first = LocalDisk::open_locked(dir.path()).unwrap();
        let error = LocalDisk::open_locked(dir.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(error.to_string().contains(&*dir.path().to_string_lossy()), "{error}");
        assert!(first.list().unwrap().is_empty(), "the lock is not a file of the disk");
        drop(first);
        LocalDisk::open_locked(dir.path()).unwrap();
    }

    #[test]
    fn names_never_leave_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(dir.path()).unwrap();
        for name in ["", ".", "..", "a/b", "../x", "LOCK"] {
            assert!(disk.create(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn space_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let space = LocalDisk::open(dir.path()).unwrap().space().unwrap();
        assert!(space.total >= space.free && space.total > 0);
        let other = LocalDisk::open(dir.path().join("other")).unwrap().space().unwrap();
        assert!(space.fs != 0 && space.fs == other.fs, "two folders of one file system have one number");
        assert_ne!(file_system(1), file_system(2));
    }
}
