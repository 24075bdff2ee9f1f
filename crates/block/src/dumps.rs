//! Dumps of the metadata that a data server keeps beside its pieces: the last copy, if the metadata's disk is lost.
//!
//! The metadata service puts a dump in parts; with the last one it says the checksum of the whole. Only then, and when the
//! bytes are durable, the file gets its name. What is in a dump is nothing to this server; who reads one checks it.
//!
//! # Invariants
//! - A file with a dump's name is whole and durable. What was being put when the server died is removed at its start.
//! - Parts and their number are bounded, and no part is taken that would leave the disk less than is to be kept free.
//!
//! # Not here
//! - When a dump is made, how many are kept: the metadata service decides that (`meta/src/dumps`).

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use torchfs_proto::disk::{Disk, DiskFile};
use torchfs_proto::dump::DumpName;
use torchfs_proto::msg::dump::{DUMP_PART_MAX, DumpInfo};
use torchfs_proto::{Code, Fault, Result, ServerId};

use crate::metrics as names;

/// The end of a name that is not complete yet.
const PART: &str = ".part";
/// Dumps that may be put at the same time.
const PARTS_MAX: usize = 4;
/// One that got no part for so long is given up when another one needs its place.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most dumps that are kept, whatever the metadata service asks for.
const DUMPS_MAX: usize = 1_024;

/// The dumps in one folder.
pub struct Dumps {
    disk: Arc<dyn Disk>,
    server: ServerId,
    /// Bytes of the file system that are left to others.
    keep_free: u64,
    parts: Mutex<HashMap<DumpName, Part>>,
}

/// A dump that is being put.
struct Part {
    file: Arc<dyn DiskFile>,
    len: u64,
    checksum: u32,
    touched: Instant,
}

impl Dumps {
    /// Opens the folder and removes what was never completed.
    pub fn open(disk: Arc<dyn Disk>, server: ServerId, keep_free: u64) -> Result<Dumps> {
        let dumps = Dumps { disk, server, keep_free, parts: Mutex::default() };
        for name in dumps.disk.list().map_err(|e| dumps.io("list its dumps", &e))? {
            if name.ends_with(PART) {
                dumps.disk.remove(&name).map_err(|e| dumps.io("remove half a dump", &e))?;
            }
        }
        dumps.disk.sync_names().map_err(|e| dumps.io("sync the names of its dumps", &e))?;
        Ok(dumps)
    }

    /// Takes the next part of a dump; one at 0 begins it anew. With the checksum of the whole it is complete, and durable
    /// when this returns.
    pub fn put(&self, name: DumpName, offset: u64, bytes: &Bytes, end: Option<u32>) -> Result<()> {
        if bytes.len() > DUMP_PART_MAX {
            let what = format!("a part of a dump has {} bytes, {DUMP_PART_MAX} are allowed", bytes.len());
            return Err(Fault::new(Code::TooLarge, what));
        }
        let space = self.disk.space().map_err(|e| self.io("ask for its space", &e))?;
        if space.free < self.keep_free.saturating_add(bytes.len() as u64) {
            self.give_up(name);
            let what =
                format!("data server {} has {} bytes left, too few for a dump", self.server, space.free);
            return Err(Fault::new(Code::NoSpace, what));
        }
        if offset == 0 {
            self.begin(name)?;
        }
        // Two parts of one dump at once would be a mistake of the caller: the part is out of the table while it is written.
        let Some(mut part) = self.parts.lock().remove(&name) else {
            return Err(Fault::new(Code::Stale, format!("{name} was not begun here, or was given up"))
                .next("begin it again"));
        };
        // The same part again: its answer was lost on the way.
        let repeated = offset + bytes.len() as u64 == part.len && offset > 0 && !bytes.is_empty();
        if !repeated && offset != part.len {
            let what = format!("{name} has {} bytes so far, a part for {offset} does not follow", part.len);
            self.give_up_file(name);
            return Err(Fault::new(Code::Invalid, what));
        }
        if !repeated {
            if let Err(error) = part.file.write_at(bytes, offset) {
                self.give_up_file(name);
                return Err(self.io("write a dump", &error));
            }
            part.len += bytes.len() as u64;
            part.checksum = crc32c::crc32c_append(part.checksum, bytes);
            part.touched = Instant::now();
        }
        let Some(checksum) = end else {
            self.parts.lock().insert(name, part);
            return Ok(());
        };
        if checksum != part.checksum {
            self.give_up_file(name);
            return Err(Fault::new(Code::Corrupt, format!("{name} arrived with another checksum")));
        }
        let named = part
            .file
            .sync()
            .and_then(|()| self.disk.rename(&partial(name), &name.to_string()))
            .and_then(|()| self.disk.sync_names());
        if let Err(error) = named {
            self.give_up_file(name);
            return Err(self.io("complete a dump", &error));
        }
        metrics::counter!(names::DUMPS).increment(1);
        metrics::counter!(names::DUMP_BYTES).increment(part.len);
        Ok(())
    }

    /// The dumps that are whole, newest first.
    pub fn list(&self) -> Result<Vec<DumpInfo>> {
        let mut found = Vec::new();
        for name in self.disk.list().map_err(|e| self.io("list its dumps", &e))? {
            let Ok(name) = name.parse::<DumpName>() else { continue };
            match self.disk.open(&name.to_string()).and_then(|file| file.len()) {
                Ok(len) => found.push(DumpInfo { name, len }),
                // It may have been deleted meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.io("look at a dump", &error)),
            }
        }
        found.sort_unstable_by_key(|dump| std::cmp::Reverse(dump.name));
        Ok(found)
    }

    /// A part of a dump, shorter only where it ends; and how long it is in all.
    pub fn load(&self, name: DumpName, offset: u64, len: u32) -> Result<(Vec<u8>, u64)> {
        let file = self.disk.open(&name.to_string()).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Fault::new(Code::NotFound, format!("data server {} has no {name}", self.server))
            }
            _ => self.io("open a dump", &e),
        })?;
        let total = file.len().map_err(|e| self.io("look at a dump", &e))?;
        let left = total.saturating_sub(offset).min(u64::from(len)).min(DUMP_PART_MAX as u64);
        let mut bytes = vec![0; left as usize];
        let read = file.read_at(&mut bytes, offset).map_err(|e| self.io("read a dump", &e))?;
        bytes.truncate(read);
        Ok((bytes, total))
    }

    /// Removes dumps; those that are not there are fine.
    pub fn delete(&self, dumps: &[DumpName]) -> Result<()> {
        for name in dumps {
            match self.disk.remove(&name.to_string()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(self.io("remove a dump", &error));
                }
                _ => {}
            }
        }
        self.disk.sync_names().map_err(|e| self.io("sync the names of its dumps", &e))
    }

    fn begin(&self, name: DumpName) -> Result<()> {
        self.give_up(name);
        if self.list()?.len() >= DUMPS_MAX {
            let what = format!("data server {} keeps {DUMPS_MAX} dumps already", self.server);
            return Err(Fault::new(Code::TooMany, what).next("remove old files from its folder `dumps`"));
        }
        let mut parts = self.parts.lock();
        if parts.len() >= PARTS_MAX {
            let oldest =
                parts.iter().min_by_key(|(_, part)| part.touched).map(|(name, part)| (*name, part.touched));
            match oldest {
                Some((oldest, touched)) if touched.elapsed() >= PATIENCE => {
                    parts.remove(&oldest);
                    self.give_up_file(oldest);
                }
                _ => {
                    let what = format!("data server {} takes {PARTS_MAX} dumps already", self.server);
                    return Err(Fault::new(Code::Overloaded, what));
                }
            }
        }
        let file = self.disk.create(&partial(name)).map_err(|e| self.io("begin a dump", &e))?;
        parts.insert(name, Part { file, len: 0, checksum: 0, touched: Instant::now() });
        Ok(())
    }

    fn give_up(&self, name: DumpName) {
        self.parts.lock().remove(&name);
        self.give_up_file(name);
    }

    /// Leaves nothing behind of a dump that will not be complete; what cannot be removed goes at the next start.
    fn give_up_file(&self, name: DumpName) {
        match self.disk.remove(&partial(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(server = %self.server, %error, "half a dump cannot be removed");
            }
            _ => {}
        }
    }

    fn io(&self, what: &str, error: &io::Error) -> Fault {
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::NoSpace,
            _ => Code::Io,
        };
        Fault::new(code, format!("data server {} cannot {what}: {error}", self.server))
    }
}

fn partial(name: DumpName) -> String {
    format!("{name}{PART}")
}

#[cfg(test)]
mod tests {
    use torchfs_disk::{LocalDisk, SimDisk};
    use torchfs_proto::{Incarnation, Seq};

    use super::*;

    fn name(seq: u64) -> DumpName {
        DumpName { incarnation: Incarnation(1), seq: Seq(seq), wall_ms: 5 }
    }

    fn open(disk: &SimDisk) -> Dumps {
        Dumps::open(Arc::new(disk.clone()), ServerId(1), 0).unwrap()
    }

    /// Puts a dump in parts of ten bytes.
    fn put(dumps: &Dumps, name: DumpName, bytes: &[u8]) {
        let parts: Vec<&[u8]> = bytes.chunks(10).collect();
        for (n, part) in parts.iter().enumerate() {
            let end = (n + 1 == parts.len()).then(|| crc32c::crc32c(bytes));
            dumps.put(name, n as u64 * 10, &Bytes::copy_from_slice(part), end).unwrap();
        }
    }

    #[test]
    fn a_dump_comes_back_in_parts_and_after_a_power_cut() {
        let disk = SimDisk::new(7);
        let bytes: Vec<u8> = (0..95).collect();
        let dumps = open(&disk);
        put(&dumps, name(2), &bytes);
        put(&dumps, name(9), &bytes[..30]);
        dumps.put(name(11), 0, &Bytes::from_static(b"half"), None).unwrap();
        let listed: Vec<_> = dumps.list().unwrap().iter().map(|dump| (dump.name.seq.0, dump.len)).collect();
        assert_eq!(listed, [(9, 30), (2, 95)], "newest first, halves left out");

        let disk = disk.power_cut(3);
        let dumps = open(&disk);
        assert_eq!(dumps.list().unwrap().len(), 2);
        assert!(!disk.list().unwrap().iter().any(|name| name.ends_with(PART)), "the half is gone");
        assert_eq!(dumps.load(name(2), 0, 50).unwrap(), (bytes[..50].to_vec(), 95));
        assert_eq!(dumps.load(name(2), 50, 1000).unwrap(), (bytes[50..].to_vec(), 95));
        assert_eq!(dumps.load(name(2), 200, 10).unwrap(), (vec![], 95));
        assert_eq!(dumps.load(name(3), 0, 10).unwrap_err().code, Code::NotFound);
        dumps.delete(&[name(2), name(3)]).unwrap();
        assert_eq!(dumps.list().unwrap().len(), 1);
    }

    #[test]
    fn parts_that_do_not_fit_leave_nothing_behind() {
        let disk = SimDisk::new(8);
        let dumps = open(&disk);
        let part = Bytes::from_static(b"0123456789");
        assert_eq!(dumps.put(name(1), 10, &part, None).unwrap_err().code, Code::Stale);
        dumps.put(name(1), 0, &part, None).unwrap();
        dumps.put(name(1), 10, &part, None).unwrap();
        // The same part again, as after a lost answer.
        dumps.put(name(1), 10, &part, None).unwrap();
        assert_eq!(dumps.put(name(1), 30, &part, None).unwrap_err().code, Code::Invalid);
        assert_eq!(dumps.put(name(1), 20, &part, None).unwrap_err().code, Code::Stale);
        dumps.put(name(1), 0, &part, None).unwrap();
        assert_eq!(dumps.put(name(1), 10, &part, Some(1)).unwrap_err().code, Code::Corrupt);
        assert!(disk.list().unwrap().is_empty());
        // Begun again it is fine.
        put(&dumps, name(1), &part);
        assert_eq!(dumps.list().unwrap(), [DumpInfo { name: name(1), len: 10 }]);
        let long = Bytes::from(vec![0; DUMP_PART_MAX + 1]);
        assert_eq!(dumps.put(name(2), 0, &long, None).unwrap_err().code, Code::TooLarge);
        for n in 10..10 + PARTS_MAX as u64 {
            dumps.put(name(n), 0, &part, None).unwrap();
        }
        assert_eq!(dumps.put(name(99), 0, &part, None).unwrap_err().code, Code::Overloaded);
    }

    #[test]
    fn a_full_disk_takes_no_dump() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Arc::new(LocalDisk::open(folder.path()).unwrap());
        let dumps = Dumps::open(disk, ServerId(1), u64::MAX).unwrap();
        let fault = dumps.put(name(1), 0, &Bytes::from_static(b"x"), None).unwrap_err();
        assert_eq!(fault.code, Code::NoSpace);
    }
}
