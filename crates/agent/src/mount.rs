//! Making and taking away mounts: `/dev/fuse` is opened here, so whoever holds its descriptor holds the mount.
//!
//! # Invariants
//! - Only mounts of torchfs are ever taken away.
//! - A path below a mount whose server is gone cannot be looked at; only its parent is resolved.
//!
//! # Not here
//! - Serving the mount: [`crate::fuse::Session`].

#![allow(unsafe_code)]

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::fuse::Device;
use crate::{Error, fusermount};

/// The type the kernel shows for our mounts.
pub const FS_TYPE: &str = "fuse.torchfs";

/// Where and how to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// The mount point: a folder.
    pub path: PathBuf,
    /// What `mount` and `df` show as the source.
    pub source: String,
    /// Refuse changes.
    pub read_only: bool,
    /// Let other users in; permissions are checked by the kernel either way.
    pub allow_other: bool,
    /// Largest READ, in bytes.
    pub max_read: u32,
    /// Ignore set-user-id and set-group-id.
    pub nosuid: bool,
    /// Ignore device files.
    pub nodev: bool,
    /// Run no programs from here.
    pub noexec: bool,
}

impl MountOptions {
    /// The usual options for this mount point.
    pub fn new(path: impl Into<PathBuf>) -> MountOptions {
        MountOptions {
            path: path.into(),
            source: "torchfs".into(),
            read_only: false,
            allow_other: true,
            max_read: 1 << 20,
            nosuid: false,
            nodev: false,
            noexec: false,
        }
    }

    fn flags(&self) -> libc::c_ulong {
        let pairs = [
            (self.read_only, libc::MS_RDONLY),
            (self.nosuid, libc::MS_NOSUID),
            (self.nodev, libc::MS_NODEV),
            (self.noexec, libc::MS_NOEXEC),
        ];
        pairs.into_iter().filter(|(on, _)| *on).fold(0, |flags, (_, flag)| flags | flag)
    }

    /// The same as words for `fusermount3`, which adds nosuid and nodev itself and allows no other users by default.
    fn words(&self) -> String {
        let source = self.source.replace('\\', "\\\\").replace(',', "\\,");
        let mut words =
            format!("fsname={source},subtype=torchfs,default_permissions,max_read={}", self.max_read);
        for (on, word) in [(self.read_only, ",ro"), (self.noexec, ",noexec")] {
            if on {
                words.push_str(word);
            }
        }
        words
    }

    fn data(&self, device: &OwnedFd) -> String {
        // SAFETY: both calls only read the process's credentials.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let other = if self.allow_other { ",allow_other" } else { "" };
        format!(
            "fd={},rootmode=40000,user_id={uid},group_id={gid},default_permissions{other},max_read={}",
            device.as_raw_fd(),
            self.max_read
        )
    }
}

/// How hard to try to take a mount away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Umount {
    /// Only if nobody uses it; a mount whose server is gone always goes.
    Normal,
    /// Out of the tree now, gone when the last user leaves.
    Lazy,
    /// Out of the tree now; users get errors.
    Force,
}

/// Opens `/dev/fuse` and mounts it. The device answers nothing until a session serves it; dropping it ends the mount.
/// Who lacks the right gets it from `fusermount3`, if that is installed.
pub fn mount(options: &MountOptions) -> Result<(Device, PathBuf), Error> {
    let path = check_mount_point(&options.path)?;
    match mount_ourselves(options, &path) {
        Ok(device) => Ok((Device::new(device), path)),
        Err(Error::NoRights { error, .. }) => match fusermount::mount(&path, &options.words()) {
            Ok(device) => Ok((Device::new(device), path)),
            Err(helper) if helper.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoRights { doing: "mount on", path, error })
            }
            Err(error) => Err(Error::NoRights { doing: "mount on", path, error }),
        },
        Err(error) => Err(error),
    }
}

fn mount_ourselves(options: &MountOptions, path: &Path) -> Result<OwnedFd, Error> {
    let device = open_device(path)?;
    let refused = |error: io::Error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::NoRights { doing: "mount on", path: path.into(), error },
        Some(libc::ENODEV) => Error::NoDevice(error),
        _ => Error::Os { doing: "mount on", path: path.into(), error },
    };
    let source = c_string(OsStr::new(&options.source)).map_err(refused)?;
    let target = c_string(path.as_os_str()).map_err(refused)?;
    let kind = c_string(OsStr::new(FS_TYPE)).map_err(refused)?;
    let data = c_string(OsStr::new(&options.data(&device))).map_err(refused)?;
    // SAFETY: all four strings end in NUL and outlive the call, which only reads them.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), options.flags(), data.as_ptr().cast())
    };
    match result {
        0 => Ok(device),
        _ => Err(refused(io::Error::last_os_error())),
    }
}

/// Takes a mount of ours away.
pub fn umount(path: &Path, how: Umount) -> Result<(), Error> {
    let path = resolve_mount(path)?;
    match find_mount(&path)? {
        None => return Err(Error::NotMounted { path }),
        Some(found) if found.kind != FS_TYPE => return Err(Error::NotOurs { path, what: found.what() }),
        Some(_) => {}
    }
    if how == Umount::Force {
        // Ends the connection, whatever the call returns; then the mount is stale.
        let _ = umount2(&path, libc::MNT_FORCE);
    }
    let flags = if how == Umount::Normal { 0 } else { libc::MNT_DETACH };
    let result = match umount2(&path, flags) {
        // Only now is the mount looked at: a server that hangs would make us hang, too.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) && is_stale(&path) => {
            umount2(&path, libc::MNT_DETACH)
        }
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            // Who mounted by way of the helper may unmount that way; its words are less clear than the kernel's.
            fusermount::umount(&path, how != Umount::Normal).map_err(|_| error)
        }
        result => result,
    };
    match result {
        Ok(()) => Ok(()),
        Err(error) => Err(match error.raw_os_error() {
            // Force may have finished it already.
            Some(libc::EINVAL) if how == Umount::Force => return Ok(()),
            Some(libc::EBUSY) => Error::InUse { path },
            Some(libc::EINVAL) => Error::NotMounted { path },
            Some(libc::EPERM | libc::EACCES) => Error::NoRights { doing: "unmount", path, error },
            _ => Error::Os { doing: "unmount", path, error },
        }),
    }
}

/// The device number of the mount there, `major:minor`: no other mount has it while this one lives.
pub fn device(path: &Path) -> Result<Option<String>, Error> {
    Ok(find_mount(&resolve_mount(path)?)?.map(|found| found.device))
}

/// Lets the kernel read this far ahead on a mount; INIT itself caps it at 128 KiB.
pub fn set_readahead(path: &Path, bytes: u32) -> Result<(), Error> {
    let path = resolve_parent(path);
    let Some(found) = find_mount(&path)? else { return Err(Error::NotMounted { path }) };
    let file = PathBuf::from(format!("/sys/class/bdi/{}/read_ahead_kb", found.device));
    fs::write(&file, (bytes / 1024).to_string()).map_err(|error| Error::Os {
        doing: "write",
        path: file,
        error,
    })
}

fn check_mount_point(path: &Path) -> Result<PathBuf, Error> {
    if is_stale(path) {
        return Err(Error::Stale { path: path.into() });
    }
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::NoMountPoint { path: path.into() });
        }
        Err(error) => return Err(Error::Os { doing: "look at", path: path.into(), error }),
    };
    if !meta.is_dir() {
        return Err(Error::NotAFolder { path: path.into() });
    }
    let path =
        path.canonicalize().map_err(|error| Error::Os { doing: "look at", path: path.into(), error })?;
    match find_mount(&path)? {
        Some(found) => Err(Error::Busy { path, what: found.what() }),
        None => Ok(path),
    }
}

/// Major 10, minor 229.
const FUSE_DEVICE: u64 = libc::makedev(10, 229);

fn open_device(path: &Path) -> Result<OwnedFd, Error> {
    let device = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open("/dev/fuse");
    let device = device.map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Error::NoRights { doing: "mount on", path: path.into(), error },
        _ => Error::NoDevice(error),
    })?;
    // Containers sometimes put another file in its place, which mount(2) refuses without a reason.
    let is_fuse = |meta: fs::Metadata| meta.file_type().is_char_device() && meta.rdev() == FUSE_DEVICE;
    match device.metadata().map(is_fuse) {
        Ok(true) => Ok(device.into()),
        _ => Err(Error::NoDevice(io::Error::other("it is not the FUSE device"))),
    }
}

/// Whether a mount is there whose server is gone.
pub fn is_stale(path: &Path) -> bool {
    matches!(fs::metadata(path), Err(error) if error.raw_os_error() == Some(libc::ENOTCONN))
}

/// The path with everything but its last part resolved, so that a dead mount is not touched.
fn resolve_parent(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            parent.canonicalize().map_or_else(|_| absolute.clone(), |dir| dir.join(name))
        }
        _ => absolute,
    }
}

/// The same, and a link that is no mount itself is followed.
fn resolve_mount(path: &Path) -> Result<PathBuf, Error> {
    const LINKS_MAX: usize = 40;
    let mut path = resolve_parent(path);
    for _ in 0..LINKS_MAX {
        if find_mount(&path)?.is_some() {
            break;
        }
        let Ok(next) = fs::read_link(&path) else { break };
        path = resolve_parent(&path.parent().unwrap_or(Path::new("/")).join(next));
    }
    Ok(path)
}

fn umount2(path: &Path, flags: i32) -> io::Result<()> {
    let target = c_string(path.as_os_str())?;
    // SAFETY: the string ends in NUL and outlives the call, which only reads it.
    match unsafe { libc::umount2(target.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// One line of the mount table.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// `major:minor`.
    device: String,
    kind: String,
    source: String,
}

impl Found {
    fn what(&self) -> String {
        format!("{} ({})", self.source, self.kind)
    }
}

/// What is mounted exactly there, on top.
fn find_mount(path: &Path) -> Result<Option<Found>, Error> {
    let table = Path::new("/proc/self/mountinfo");
    let read = |error| Error::Os { doing: "read", path: table.into(), error };
    let bytes = fs::read(table).map_err(read)?;
    Ok(parse_mounts(&bytes, path))
}

fn parse_mounts(table: &[u8], path: &Path) -> Option<Found> {
    table.split(|&b| b == b'\n').filter_map(|line| parse_mount(line, path)).next_back()
}

fn parse_mount(line: &[u8], path: &Path) -> Option<Found> {
    let mut fields = line.split(|&b| b == b' ');
    let device = fields.nth(2)?;
    let point = fields.nth(1)?;
    if unescape(point) != path {
        return None;
    }
    // Optional fields end with a lone dash.
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let text = |field: &[u8]| unescape(field).to_string_lossy().into_owned();
    Some(Found { device: text(device), kind: text(fields.next()?), source: text(fields.next()?) })
}

/// Spaces, tabs, newlines and backslashes are written as `\ooo` there.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        rest = tail;
        match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                out.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                rest = tail;
            }
            _ => out.push(*first),
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        40 22 0:33 / /mnt/a\\040b rw,nosuid shared:5 master:2 - fuse.torchfs torchfs rw,user_id=0\n\
        41 22 0:34 / /mnt/t rw - tmpfs tmpfs rw\n\
        42 22 0:35 / /mnt/t rw - fuse.torchfs vol\\0401 rw\n";

    #[test]
    fn the_topmost_mount_of_exactly_that_path_is_found() {
        let found = parse_mounts(TABLE, Path::new("/mnt/t")).unwrap();
        assert_eq!((found.device.as_str(), found.what().as_str()), ("0:35", "vol 1 (fuse.torchfs)"));
        assert_eq!(parse_mounts(TABLE, Path::new("/mnt/a b")).unwrap().device, "0:33");
        assert_eq!(parse_mounts(TABLE, Path::new("/mnt")), None);
    }

    #[test]
    fn what_cannot_be_a_mount_point_is_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let missing = mount(&MountOptions::new(dir.path().join("no"))).unwrap_err();
        assert!(missing.to_string().contains("mkdir -p"), "{missing}");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(mount(&MountOptions::new(&file)), Err(Error::NotAFolder { .. })));
        let busy = mount(&MountOptions::new("/proc")).unwrap_err();
        assert!(busy.to_string().contains("already a mount point of proc (proc)"), "{busy}");
    }

    #[test]
    fn a_link_to_a_mount_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::os::unix::fs::symlink("/proc", &one).unwrap();
        std::os::unix::fs::symlink("one", &two).unwrap();
        assert_eq!(resolve_mount(&two).unwrap(), Path::new("/proc"));
        assert_eq!(device(&two).unwrap(), device(Path::new("/proc")).unwrap());
        assert!(matches!(umount(&two, Umount::Normal), Err(Error::NotOurs { .. })));
    }

    #[test]
    fn only_mounts_of_ours_are_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(umount(dir.path(), Umount::Normal), Err(Error::NotMounted { .. })));
        assert!(matches!(umount(Path::new("/proc"), Umount::Force), Err(Error::NotOurs { .. })));
    }
}
