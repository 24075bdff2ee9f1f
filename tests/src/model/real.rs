//! The same operations by system calls below a folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use super::ops::{Op, SLOTS};
use super::reference::NOWHERE;
use super::{Said, Value};
use crate::sys;

/// A folder of a mounted file system, and the files the model holds open in it.
#[derive(Debug)]
pub struct Real {
    root: PathBuf,
    open: [Option<File>; SLOTS],
}

impl Real {
    /// Works below `root`.
    pub fn new(root: PathBuf) -> Real {
        Real { root, open: Default::default() }
    }

    /// Does an operation.
    pub fn apply(&mut self, op: &Op) -> Said {
        self.call(op).map_err(|e| e.raw_os_error().unwrap_or(-1))
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn writable(&self, path: &str) -> io::Result<File> {
        OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(self.at(path))
    }

    fn slot(&self, slot: usize) -> io::Result<&File> {
        self.open[slot].as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    fn call(&mut self, op: &Op) -> io::Result<Value> {
        match op {
            Op::Create { path, mode } => {
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).mode(*mode);
                sys::close(options.open(self.at(path))?)?;
            }
            Op::Write { path, at, len, fill } => {
                let file = self.writable(path)?;
                file.write_all_at(&vec![*fill; *len as usize], *at)?;
                sys::close(file)?;
            }
            Op::Append { path, len, fill } => {
                let mut options = OpenOptions::new();
                let mut file = options.append(true).custom_flags(libc::O_NOFOLLOW).open(self.at(path))?;
                file.write_all(&vec![*fill; *len as usize])?;
                sys::close(file)?;
            }
            Op::Truncate { path, len } => {
                let file = self.writable(path)?;
                file.set_len(*len)?;
                sys::close(file)?;
            }
            Op::Read { path } => {
                let mut options = OpenOptions::new();
                let mut file = options.read(true).custom_flags(libc::O_NOFOLLOW).open(self.at(path))?;
                let mut bytes = vec![];
                file.read_to_end(&mut bytes)?;
                return Ok(Value::Bytes(bytes));
            }
            Op::Punch { path, at, len } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                self.allocate(path, mode, *at, *len)?;
            }
            Op::ZeroRange { path, at, len } => self.allocate(path, libc::FALLOC_FL_ZERO_RANGE, *at, *len)?,
            Op::Allocate { path, at, len, keep } => {
                self.allocate(path, if *keep { libc::FALLOC_FL_KEEP_SIZE } else { 0 }, *at, *len)?;
            }
            Op::Copy { from, at, to, to_at, len } => {
                return self.copy(from, *at, to, *to_at, *len).map(Value::Count);
            }
            Op::Mkdir { path } => fs::create_dir(self.at(path))?,
            Op::Rmdir { path } => fs::remove_dir(self.at(path))?,
            Op::Unlink { path } => fs::remove_file(self.at(path))?,
            Op::Rename { from, to, flags } => sys::rename2(&self.at(from), &self.at(to), *flags)?,
            Op::Link { from, to } => fs::hard_link(self.at(from), self.at(to))?,
            Op::Symlink { path } => std::os::unix::fs::symlink(NOWHERE, self.at(path))?,
            Op::Readlink { path } => {
                return Ok(Value::Text(fs::read_link(self.at(path))?.to_string_lossy().into_owned()));
            }
            Op::List { path } => return self.list(path),
            Op::Stat { path } => return self.stat(path),
            Op::Chmod { path, mode } => {
                fs::set_permissions(self.at(path), fs::Permissions::from_mode(*mode))?;
            }
            Op::SetXattr { path, name, value } => {
                // These calls do not follow links, the reference does.
                fs::metadata(self.at(path))?;
                sys::set_xattr(&self.at(path), name, value, 0)?;
            }
            Op::GetXattr { path, name } => {
                fs::metadata(self.at(path))?;
                return sys::get_xattr(&self.at(path), name).map(Value::Bytes);
            }
            Op::RemoveXattr { path, name } => {
                fs::metadata(self.at(path))?;
                sys::remove_xattr(&self.at(path), name)?;
            }
            Op::ListXattrs { path } => {
                fs::metadata(self.at(path))?;
                let names = sys::list_xattrs(&self.at(path))?;
                return Ok(Value::Names(names.into_iter().map(|n| (n, 'x')).collect()));
            }
            Op::Open { slot, path } => {
                let mut options = OpenOptions::new();
                let file =
                    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(self.at(path))?;
                if let Some(old) = self.open[*slot].replace(file) {
                    sys::close(old)?;
                }
            }
            Op::WriteOpen { slot, at, len, fill } => {
                self.slot(*slot)?.write_all_at(&vec![*fill; *len as usize], *at)?;
            }
            Op::ReadOpen { slot } => {
                let file = self.slot(*slot)?;
                let len = file.metadata()?.len() as usize;
                return sys::read_at(file, 0, len).map(Value::Bytes);
            }
            Op::TruncateOpen { slot, len } => self.slot(*slot)?.set_len(*len)?,
            Op::SyncOpen { slot } => self.slot(*slot)?.sync_all()?,
            Op::Close { slot } => {
                if let Some(old) = self.open[*slot].take() {
                    sys::close(old)?;
                }
            }
        }
        Ok(Value::Done)
    }

    fn allocate(&self, path: &str, mode: i32, at: u64, len: u64) -> io::Result<()> {
        let file = self.writable(path)?;
        sys::fallocate(&file, mode, at, len)?;
        sys::close(file)
    }

    fn copy(&self, from: &str, at: u64, to: &str, to_at: u64, len: u64) -> io::Result<u64> {
        // Opened for writing too, so that folders and links fail as they do in the reference.
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let (from, to) = (options.open(self.at(from))?, options.open(self.at(to))?);
        // What the source had at the beginning: copying within one file may make it longer.
        let have = from.metadata()?.len().saturating_sub(at).min(len);
        let mut done = sys::copy_range(&from, at, &to, to_at, len)?;
        while done > 0 && done < have {
            match sys::copy_range(&from, at + done, &to, to_at + done, have - done)? {
                0 => break,
                n => done += n,
            }
        }
        sys::close(from)?;
        sys::close(to)?;
        Ok(done)
    }

    fn list(&self, path: &str) -> io::Result<Value> {
        let mut names = vec![];
        for entry in fs::read_dir(self.at(path))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let kind = if kind.is_dir() {
                'd'
            } else if kind.is_symlink() {
                'l'
            } else {
                'f'
            };
            names.push((entry.file_name().to_string_lossy().into_owned(), kind));
        }
        names.sort();
        Ok(Value::Names(names))
    }

    fn stat(&self, path: &str) -> io::Result<Value> {
        let m = fs::symlink_metadata(self.at(path))?;
        let mode = m.mode() & 0o7777;
        Ok(if m.is_dir() {
            Value::Stat { kind: 'd', size: 0, links: 0, mode }
        } else {
            let kind = if m.is_symlink() { 'l' } else { 'f' };
            Value::Stat { kind, size: m.len(), links: m.nlink(), mode }
        })
    }
}
