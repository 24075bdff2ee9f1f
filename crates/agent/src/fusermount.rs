//! Mounting without root, by way of `fusermount3`: it may mount, and sends the descriptor back over a socket.

#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "fusermount3";

/// Mounts with these options and returns the descriptor of `/dev/fuse`.
pub(crate) fn mount(path: &Path, options: &str) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let fd = theirs.as_raw_fd();
    let mut command = Command::new(PROGRAM);
    command
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(path)
        .env("_FUSE_COMMFD", fd.to_string())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec only fcntl is called, which is safe to call there; it lets the child keep its end.
    unsafe {
        command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = command.spawn()?;
    drop(theirs);
    let received = receive_fd(&ours);
    let output = child.wait_with_output()?;
    match received? {
        Some(device) => Ok(device),
        None => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// Unmounts; lazily where asked.
pub(crate) fn umount(path: &Path, lazy: bool) -> io::Result<()> {
    let mut command = Command::new(PROGRAM);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(path).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// The descriptor the other side sent, or none if it hung up.
fn receive_fd(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // Room for one descriptor, aligned as a control message must be.
    let mut control = [0u64; 8];
    // SAFETY: a message header is plain data for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: all that the header points to is alive and as long as it says.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    match count {
        -1 => return Err(io::Error::last_os_error()),
        0 => return Ok(None),
        _ => {}
    }
    // SAFETY: the header was filled in by the kernel; what it returns lies in `control` or is null.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const message).as_ref() };
    let Some(first) = first else { return Ok(None) };
    // SAFETY: CMSG_LEN only computes.
    let wanted = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as _;
    if first.cmsg_level != libc::SOL_SOCKET || first.cmsg_type != libc::SCM_RIGHTS || first.cmsg_len != wanted
    {
        return Ok(None);
    }
    // SAFETY: the checks above say that one descriptor follows, which is ours from now on.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<RawFd>().read_unaligned()) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_helper_hands_the_descriptor_over() {
        let dir = tempfile::tempdir().unwrap();
        let device = match mount(dir.path(), "fsname=torchfs,subtype=torchfs,default_permissions") {
            Ok(device) => device,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        // Nobody serves it, so the helper must not find it waiting for an answer.
        drop(device);
        umount(dir.path(), true).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_the_helper_says_is_passed_on() {
        let refused = mount(Path::new("/proc/no-such-folder"), "fsname=torchfs").unwrap_err();
        assert!(refused.kind() == io::ErrorKind::NotFound || !refused.to_string().is_empty());
    }
}
