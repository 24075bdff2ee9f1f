//! Why a mount cannot be made, served or taken away; each sentence says what to do next.

use std::io;
use std::path::PathBuf;

use crate::fuse::Unfit;

/// What goes wrong around a mount.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `/dev/fuse` does not exist or has no driver.
    #[error(
        "there is no FUSE device (/dev/fuse: {0}); load the kernel module with `modprobe fuse`, or start the container with --device /dev/fuse"
    )]
    NoDevice(#[source] io::Error),
    /// The device or mount(2) needs rights we lack.
    #[error("no right to {doing} {} ({error}); run as root", path.display())]
    NoRights {
        /// What was tried.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// The mount point does not exist.
    #[error("the mount point {} does not exist; create it with `mkdir -p {}`", path.display(), path.display())]
    NoMountPoint {
        /// Where.
        path: PathBuf,
    },
    /// The mount point is no folder.
    #[error("the mount point {} is not a folder; choose another", path.display())]
    NotAFolder {
        /// Where.
        path: PathBuf,
    },
    /// Something is mounted there.
    #[error("{} is already a mount point of {what}; unmount it with `torchfs umount {}`, or choose another", path.display(), path.display())]
    Busy {
        /// Where.
        path: PathBuf,
        /// Source and type of what is there.
        what: String,
    },
    /// A mount is there whose server is gone.
    #[error("{} is a mount whose server is gone (Transport endpoint is not connected); clear it with `torchfs umount {}`", path.display(), path.display())]
    Stale {
        /// Where.
        path: PathBuf,
    },
    /// Nothing is mounted there.
    #[error("nothing is mounted on {}", path.display())]
    NotMounted {
        /// Where.
        path: PathBuf,
    },
    /// Something else is mounted there.
    #[error("{} is a mount of {what} and not of torchfs; it stays", path.display())]
    NotOurs {
        /// Where.
        path: PathBuf,
        /// Source and type of what is there.
        what: String,
    },
    /// The mount is in use.
    #[error("{} is in use; end the programs that use it (`fuser -vm {}` lists them), or use `torchfs umount --lazy {}`", path.display(), path.display(), path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// What was written and not synced did not reach its servers.
    #[error("what was written to {files} files of {} could not be written back and is lost; the agent's log names them", path.display())]
    Lost {
        /// Where it was mounted.
        path: PathBuf,
        /// How many files.
        files: u64,
    },
    /// Anything else the kernel refuses.
    #[error("cannot {doing} {}: {error}", path.display())]
    Os {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// The kernel's FUSE is too old.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The mount went away before it was ready.
    #[error("the mount ended before the kernel's first request")]
    Ended,
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The file system below failed while it was started or stopped.
    #[error(transparent)]
    Fault(#[from] torchfs_proto::Fault),
}
