//! Folders whose power can really be cut: loop-mounted ext4 images.
//!
//! The idea: kill -9 does not test fsync, since the page cache survives it. The ioctl EXT4_IOC_SHUTDOWN without log flush
//! makes a mounted ext4 forget everything that is not on its disk.
//!
//! # Invariants
//! The processes on an image get SIGKILL *before* the ioctl: an fsync that races with the ioctl may return success wrongly,
//! and a dead process can tell nobody.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::sandbox::Sandbox;
use crate::shell::run;
use crate::sys;
use crate::wait::eventually;

/// A small ext4 of its own.
#[derive(Debug)]
pub struct Disk {
    image: PathBuf,
    mount: PathBuf,
    mib: u64,
    _sandbox: Arc<Sandbox>,
}

impl Disk {
    /// Makes and mounts one; the image is sparse, so its size costs little.
    pub fn new(sandbox: &Arc<Sandbox>, name: &str, mib: u64) -> Disk {
        let image = sandbox.path(&format!("{name}.img"));
        let file = std::fs::File::create(&image).expect("the sandbox takes files");
        file.set_len(mib << 20).expect("the sandbox takes sparse files");
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image)).ok();
        let disk = Disk { image, mib, mount: sandbox.folder(name), _sandbox: sandbox.clone() };
        disk.mount_again();
        disk
    }

    /// Its mount point.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Cuts the power. What was not synced is gone.
    pub fn cut(&self) {
        sys::shut_down(&self.mount).expect("ext4 can be shut down by root");
    }

    /// Takes the dead mount away and mounts what the disk still has.
    pub fn revive(&self) {
        eventually("unmounting a dead disk", || sys::unmount(&self.mount).map_err(|e| e.to_string()));
        self.mount_again();
    }

    /// From now on nothing that is written to it comes back, until it thaws; as a disk that hangs.
    pub fn freeze(&self) {
        run(Command::new("fsfreeze").arg("--freeze").arg(&self.mount)).ok();
    }

    /// Everything that waited goes on.
    pub fn thaw(&self) {
        run(Command::new("fsfreeze").arg("--unfreeze").arg(&self.mount)).ok();
    }

    /// Puts an empty disk in its place, as a hand in the server room does; the old one goes when nobody has it open any more.
    pub fn replace(&mut self) {
        sys::detach(&self.mount);
        self.image.set_extension("new.img");
        let file = std::fs::File::create(&self.image).expect("the sandbox takes files");
        file.set_len(self.mib << 20).expect("the sandbox takes sparse files");
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&self.image)).ok();
        self.mount_again();
    }

    fn mount_again(&self) {
        // A loop device may be in the hands of another test between being found free and being taken.
        eventually("a loop mount", || {
            let ran = run(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.mount));
            if ran.code == Some(0) { Ok(()) } else { Err(ran.err) }
        });
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A process that waits for a frozen disk cannot be killed; one that is not frozen says so.
        run(Command::new("fsfreeze").arg("--unfreeze").arg(&self.mount));
        sys::detach(&self.mount);
    }
}
