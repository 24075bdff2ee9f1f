//! System calls that std does not offer, each as a plain function over paths and files.
//!
//! # Invariants
//! Every descriptor made here is close-on-exec: a program started by another test must not hold this test's mount busy.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("paths in tests have no zero bytes")
}

fn check(result: i64) -> io::Result<u64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as u64) }
}

/// Sends a signal; a process that is gone already is fine.
pub fn kill(pid: i32, signal: i32) {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(pid, signal) };
}

/// Kills a process group.
pub fn kill_group(group: i32) {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

/// From now on the calling thread, and no other, uses files as this user and group, without root's rights.
pub fn use_files_as(id: u32) {
    // SAFETY: no memory is passed.
    unsafe {
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
        libc::setfsgid(id);
        libc::setfsuid(id);
    }
}

/// Takes a file's whole-file lock if nobody has it.
pub fn try_flock(fd: RawFd) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::flock(fd, libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// `flock(2)` with any operation.
pub fn flock(file: &File, operation: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::flock(file.as_raw_fd(), operation) }.into()).map(drop)
}

/// A POSIX lock over `[start, start + len)`; `kind` is F_RDLCK, F_WRLCK or F_UNLCK. Open-file-description locks, so that
/// two handles of one process conflict as two processes would.
pub fn ofd_lock(file: &File, kind: i32, start: u64, len: u64, wait: bool) -> io::Result<()> {
    range_lock(file, if wait { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK }, kind, start, len)
}

/// The same as a lock of the process (`F_SETLK`).
pub fn posix_lock(file: &File, kind: i32, start: u64, len: u64) -> io::Result<()> {
    range_lock(file, libc::F_SETLK, kind, start, len)
}

fn range_lock(file: &File, command: i32, kind: i32, start: u64, len: u64) -> io::Result<()> {
    // SAFETY: flock is plain data for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start as i64;
    lock.l_len = len as i64;
    // SAFETY: the pointer is to a live flock, which the call reads.
    check(unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const lock) }.into()).map(drop)
}

/// Lets a signal interrupt calls of this process and do nothing else.
pub fn only_interrupts(signal: i32) {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: sigaction is plain data for which zero is a valid value: an empty mask, and no SA_RESTART.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler touches nothing, and the pointer is to a live sigaction.
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}

/// The calling thread, for [`signal_thread`].
pub fn this_thread() -> libc::pthread_t {
    // SAFETY: it has no conditions.
    unsafe { libc::pthread_self() }
}

/// Sends a signal to a thread of this process that was not joined yet.
pub fn signal_thread(thread: libc::pthread_t, signal: i32) {
    // SAFETY: the caller promises that the thread was not joined.
    unsafe { libc::pthread_kill(thread, signal) };
}

/// `renameat2(2)` with flags such as RENAME_NOREPLACE and RENAME_EXCHANGE.
pub fn rename2(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let (from, to) = (c(from), c(to));
    // SAFETY: both are zero-terminated and outlive the call.
    check(
        unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) }.into(),
    )
    .map(drop)
}

/// `mknod(2)`: fifos, sockets, devices.
pub fn mknod(path: &Path, mode: u32, device: u64) -> io::Result<()> {
    let path = c(path);
    // SAFETY: zero-terminated and outlives the call.
    check(unsafe { libc::mknod(path.as_ptr(), mode, device) }.into()).map(drop)
}

/// `access(2)`.
pub fn access(path: &Path, mode: i32) -> io::Result<()> {
    let path = c(path);
    // SAFETY: zero-terminated and outlives the call.
    check(unsafe { libc::access(path.as_ptr(), mode) }.into()).map(drop)
}

/// `fallocate(2)` with any mode.
pub fn fallocate(file: &File, mode: i32, at: u64, len: u64) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, at as i64, len as i64) }.into()).map(drop)
}

/// `lseek(2)` with SEEK_DATA or SEEK_HOLE.
pub fn seek(file: &File, at: u64, whence: i32) -> io::Result<u64> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::lseek(file.as_raw_fd(), at as i64, whence) })
}

/// `copy_file_range(2)` once; gives how much was copied.
pub fn copy_range(from: &File, at: u64, to: &File, to_at: u64, len: u64) -> io::Result<u64> {
    let (mut at, mut to_at) = (at as i64, to_at as i64);
    // SAFETY: both offsets live through the call.
    check(unsafe {
        libc::copy_file_range(from.as_raw_fd(), &raw mut at, to.as_raw_fd(), &raw mut to_at, len as usize, 0)
    } as i64)
}

/// Sets both times of a path, as (seconds, nanoseconds); seconds may lie before 1970.
pub fn utimens(path: &Path, access: (i64, i64), modified: (i64, i64)) -> io::Result<()> {
    let path = c(path);
    let time = |(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec };
    let times = [time(access), time(modified)];
    // SAFETY: the path is zero-terminated, the array has the two elements the call reads.
    check(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), 0) }.into()).map(drop)
}

/// `lsetxattr(2)`.
pub fn set_xattr(path: &Path, name: &str, value: &[u8], flags: i32) -> io::Result<()> {
    let (path, name) = (c(path), c(Path::new(name)));
    // SAFETY: the strings are zero-terminated, the value is as long as said.
    check(
        unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) }
            .into(),
    )
    .map(drop)
}

/// `lgetxattr(2)`.
pub fn get_xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (c(path), c(Path::new(name)));
    let mut value = vec![0u8; 65_536];
    // SAFETY: the strings are zero-terminated, the buffer is as long as said.
    let len =
        check(
            unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) }
                as i64,
        )?;
    value.truncate(len as usize);
    Ok(value)
}

/// `llistxattr(2)`, sorted.
pub fn list_xattrs(path: &Path) -> io::Result<Vec<String>> {
    let path = c(path);
    let mut names = vec![0u8; 65_536];
    // SAFETY: the path is zero-terminated, the buffer is as long as said.
    let len =
        check(unsafe { libc::llistxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) } as i64)?;
    let mut names: Vec<String> = names[..len as usize]
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect();
    names.sort();
    Ok(names)
}

/// `lremovexattr(2)`.
pub fn remove_xattr(path: &Path, name: &str) -> io::Result<()> {
    let (path, name) = (c(path), c(Path::new(name)));
    // SAFETY: both are zero-terminated and outlive the call.
    check(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) }.into()).map(drop)
}

/// Free and total space and inodes of a file system: (total bytes, free bytes, inodes, free inodes).
pub fn space(path: &Path) -> io::Result<(u64, u64, u64, u64)> {
    let path = c(path);
    // SAFETY: statvfs is plain data for which zero is a valid value.
    let mut s: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is zero-terminated, the pointer is to a live statvfs.
    check(unsafe { libc::statvfs(path.as_ptr(), &raw mut s) }.into())?;
    Ok((s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize, s.f_files, s.f_ffree))
}

/// Cuts the power of a mounted ext4: nothing that is not on its disk will ever get there.
pub fn shut_down(mount: &Path) -> io::Result<()> {
    const EXT4_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587D;
    let no_log_flush: u32 = 2;
    let folder = File::open(mount)?;
    // SAFETY: the call reads one u32 through the pointer.
    check(unsafe { libc::ioctl(folder.as_raw_fd(), EXT4_IOC_SHUTDOWN, &raw const no_log_flush) }.into())
        .map(drop)
}

/// Opens with raw flags, always close-on-exec.
pub fn open(path: &Path, flags: i32, mode: u32) -> io::Result<File> {
    let path = c(path);
    // SAFETY: zero-terminated; a successful call gives a descriptor that nobody else owns.
    unsafe {
        let fd = check(libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode).into())?;
        Ok(File::from_raw_fd(fd as RawFd))
    }
}

/// Gives an open file a name.
pub fn link_open(file: &File, path: &Path) -> io::Result<()> {
    let (from, to) = (c(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))), c(path));
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both are zero-terminated.
    check(unsafe { libc::linkat(here, from.as_ptr(), here, to.as_ptr(), follow) }.into()).map(drop)
}

/// Closes a file and says what the file system said about it, which dropping does not.
pub fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is given up by its owner and closed once.
    check(unsafe { libc::close(file.into_raw_fd()) }.into()).map(drop)
}

/// Takes everybody else's rights to a file away.
pub fn private(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("an own file can be changed");
}

/// `fsync(2)` of a folder.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Memory for direct I/O: `len` bytes aligned to 4 KiB.
#[derive(Debug)]
pub struct Aligned {
    memory: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    /// Zeroed memory.
    pub fn new(len: usize) -> Aligned {
        let memory = vec![0u8; len + 4096];
        let from = memory.as_ptr().align_offset(4096);
        Aligned { memory, from, len }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.from..self.from + self.len]
    }
}

/// A shared mapping of a file.
#[derive(Debug)]
pub struct Map {
    at: *mut u8,
    len: usize,
}

impl Map {
    /// Maps the first `len` bytes for reading and writing.
    pub fn shared(file: &File, len: usize) -> io::Result<Map> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address; the result is checked.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Map { at: at.cast(), len })
    }

    /// Copies out.
    pub fn read(&self, from: usize, len: usize) -> Vec<u8> {
        assert!(from + len <= self.len);
        let mut out = vec![0u8; len];
        // SAFETY: the range was checked to lie in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(from), out.as_mut_ptr(), len) };
        out
    }

    /// Copies in.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the range was checked to lie in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.add(at), bytes.len()) };
    }

    /// `msync(MS_SYNC)`.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the mapping is live.
        check(unsafe { libc::msync(self.at.cast(), self.len, libc::MS_SYNC) }.into()).map(drop)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is live and nobody keeps a pointer into it.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// A folder read entry by entry with its position, as telldir and seekdir do.
#[derive(Debug)]
pub struct Dir(*mut libc::DIR);

impl Dir {
    /// Opens a folder.
    pub fn open(path: &Path) -> io::Result<Dir> {
        let path = c(path);
        // SAFETY: zero-terminated; the result is checked.
        let dir = unsafe { libc::opendir(path.as_ptr()) };
        if dir.is_null() { Err(io::Error::last_os_error()) } else { Ok(Dir(dir)) }
    }

    /// The next name and the position after it; `None` at the end.
    #[allow(clippy::should_implement_trait)] // it also fails
    pub fn next(&mut self) -> io::Result<Option<(String, i64)>> {
        // SAFETY: the stream is open; errno is this thread's own; the entry stays valid until the next call.
        unsafe {
            *libc::__errno_location() = 0;
            let entry = libc::readdir(self.0);
            if entry.is_null() {
                let error = io::Error::last_os_error();
                return if error.raw_os_error() == Some(0) { Ok(None) } else { Err(error) };
            }
            let name = std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()).to_string_lossy().into_owned();
            Ok(Some((name, (*entry).d_off)))
        }
    }

    /// Goes to a position that `next` gave, perhaps in another stream of the same folder.
    pub fn seek(&mut self, position: i64) {
        // SAFETY: the stream is open.
        unsafe { libc::seekdir(self.0, position) };
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // SAFETY: the stream is open and not used again.
        unsafe { libc::closedir(self.0) };
    }
}

/// Unmounts a path at once, whoever uses it; what waits for an answer there gets an error.
pub fn detach(path: &Path) {
    let path = c(path);
    for flag in [libc::MNT_FORCE, libc::MNT_DETACH] {
        // SAFETY: zero-terminated and outlives the call.
        unsafe { libc::umount2(path.as_ptr(), flag) };
    }
}

/// Unmounts a path that nobody uses.
pub fn unmount(path: &Path) -> io::Result<()> {
    let path = c(path);
    // SAFETY: zero-terminated and outlives the call.
    check(unsafe { libc::umount2(path.as_ptr(), 0) }.into()).map(drop)
}

/// The mount points at or below a folder, in the order they were mounted. Reads /proc, so it never blocks on a mount.
pub fn mounts_below(root: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table
        .lines()
        .filter_map(|l| l.split(' ').nth(1))
        .map(|p| PathBuf::from(p.replace("\\040", " ")))
        .filter(|p| p.starts_with(root))
        .collect()
}

/// Whether something is mounted exactly there.
pub fn mounted(path: &Path) -> bool {
    mounts_below(path).iter().any(|m| m == path)
}

/// The processes that have a path below `root` in their arguments.
pub fn processes_of(root: &Path) -> Vec<i32> {
    let root = root.to_string_lossy();
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|p| {
            *p != std::process::id() as i32
                && fs::read(format!("/proc/{p}/cmdline"))
                    .is_ok_and(|l| String::from_utf8_lossy(&l).contains(&*root))
        })
        .collect()
}

/// Where each thread of a process is in the kernel, for the dump of a hang.
pub fn stacks(pid: i32) -> String {
    let mut out = String::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let state = state(&read("stat"));
        let stack = read("stack").lines().take(6).map(str::trim).collect::<Vec<_>>().join(" < ");
        out.push_str(&format!("  {} {state} {} {stack}\n", read("comm").trim(), read("wchan").trim()));
    }
    out
}

/// Whether all threads of a process were stopped.
pub fn stands_still(pid: i32) -> bool {
    let mut tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.all(|task| state(&fs::read_to_string(task.path().join("stat")).unwrap_or_default()) == 'T')
}

/// The state in a line of /proc/PID/stat.
fn state(stat: &str) -> char {
    stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap_or('?')
}

/// How many descriptors a process has open.
pub fn open_files(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().count()
}

/// Writes to the process's own stderr, past the capture of the test that runs.
pub fn say(text: &str) {
    io::stderr().lock().write_all(text.as_bytes()).ok();
}

/// Reads exactly `len` bytes at `at`.
pub fn read_at(file: &File, at: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0u8; len];
    file.read_exact_at(&mut out, at)?;
    Ok(out)
}
