//! Which pieces of a disk are known to be damaged: a small file beside the segments, so that who starts again after a
//! crash does not take them for whole.
//!
//! The writer's thread stores all of them anew when one comes or goes: as a new file that takes the old one's name. A mark that
//! is out of date costs one look at a piece that is whole; a lost one costs what it did before it was found, a scrub.
//!
//! # Invariants
//! - The metadata service is told of a damaged piece when its mark is durable, or cannot be made so: what it begins to heal
//!   does not count as whole again after a restart.

use std::io;

use torchfs_proto::disk::Disk;
use torchfs_proto::{BlockId, ClusterId};

use super::index::{Index, Key};
use super::writer::Writer;
use super::{Config, Op, Store};

/// The file's name, and that of one that is being made.
const NAME: &str = "damaged";
const NEW: &str = "damaged.new";

const MAGIC: &[u8; 8] = b"TFSmarks";
const VERSION: u16 = 1;
const HEAD: usize = 40;
const ENTRY: usize = 16;
/// The most marks that are kept. With more the disk is not worth a list.
const MARKS_MAX: usize = 1 << 16;

impl Store {
    /// Returns when the marks of everything that was found damaged so far are durable, or cannot be made so.
    pub fn keep_marks(&self) {
        // Only a store that closes refuses, and then nobody is told anything any more.
        let _ = self.wait(Op::Marks);
    }
}

impl Writer {
    /// Stores the marks if they changed.
    pub(super) fn store_marks(&self) {
        let shared = &self.shared;
        let Some(keys) = shared.index.write().changed_marks() else { return };
        if shared.latched.get().is_none() {
            let kept = &keys[..keys.len().min(MARKS_MAX)];
            if let Err(error) = store(&*shared.disk, &encode(shared.config.cluster, kept)) {
                let (server, disk) = (shared.config.server, &shared.config.disk);
                tracing::warn!(%server, disk, %error, "cannot remember which pieces are damaged");
                shared.index.write().keep_marks_again();
            }
        }
        // Nobody waits for a disk that does not take them: the next batch tries again.
        shared.index.write().marks_kept(&keys);
    }
}

/// Marks what an earlier process found damaged and what still lives. A list that cannot be read is passed over.
pub(super) fn load(disk: &dyn Disk, config: &Config, index: &mut Index) {
    let keys = match read(disk) {
        Ok(bytes) => decode(config.cluster, &bytes).ok_or_else(|| io::Error::other("it makes no sense")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => Err(error),
    };
    let keys = match keys {
        Ok(keys) => keys,
        Err(error) => {
            let (server, disk) = (config.server, &config.disk);
            tracing::warn!(%server, disk, %error, "the list of damaged pieces cannot be read; a scrub finds them again");
            return;
        }
    };
    for key in &keys {
        if let Some(entry) = index.find(key).copied() {
            index.mark_bad(*key, &entry);
        }
    }
    // They are durable as they are.
    index.marks_kept(&keys);
}

fn read(disk: &dyn Disk) -> io::Result<Vec<u8>> {
    let file = disk.open(NAME)?;
    let len = usize::try_from(file.len()?).unwrap_or(usize::MAX).min(HEAD + MARKS_MAX * ENTRY);
    let mut bytes = vec![0; len];
    let got = file.read_at(&mut bytes, 0)?;
    bytes.truncate(got);
    Ok(bytes)
}

fn store(disk: &dyn Disk, bytes: &[u8]) -> io::Result<()> {
    let file = match disk.create(NEW) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            disk.remove(NEW)?;
            disk.create(NEW)?
        }
        created => created?,
    };
    file.write_at(bytes, 0)?;
    file.sync()?;
    disk.rename(NEW, NAME)?;
    disk.sync_names()
}

fn encode(cluster: ClusterId, keys: &[Key]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + keys.len() * ENTRY);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    // Features that must, and that may be known.
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&(keys.len() as u32).to_le_bytes());
    out.extend_from_slice(&cluster.0.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    for key in keys {
        let BlockId { incarnation, counter } = key.block();
        out.extend_from_slice(&incarnation.to_le_bytes());
        out.extend_from_slice(&[key.piece(), 0, 0, 0]);
        out.extend_from_slice(&counter.to_le_bytes());
    }
    let crc = crc32c::crc32c(&out);
    out[36..HEAD].copy_from_slice(&crc.to_le_bytes());
    out
}

fn decode(cluster: ClusterId, bytes: &[u8]) -> Option<Vec<Key>> {
    let (head, entries) = bytes.split_at_checked(HEAD)?;
    let u32_at = |bytes: &[u8], at: usize| bytes.get(at..at + 4)?.try_into().map(u32::from_le_bytes).ok();
    let u64_at = |bytes: &[u8], at: usize| bytes.get(at..at + 8)?.try_into().map(u64::from_le_bytes).ok();
    let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&head[..36]), &[0; 4]), entries);
    let version = u16::from_le_bytes([head[8], head[9]]);
    let count = u32_at(head, 20)? as usize;
    if head[..8] != *MAGIC || version != VERSION || u32_at(head, 12)? != 0 || u64_at(head, 24)? != cluster.0 {
        return None;
    }
    if crc != u32_at(head, 36)? || entries.len() != count.checked_mul(ENTRY)? {
        return None;
    }
    let key = |entry: &[u8]| {
        let block = BlockId { incarnation: u32_at(entry, 0)?, counter: u64_at(entry, 8)? };
        Some(Key::new(block, *entry.get(4)?))
    };
    entries.chunks_exact(ENTRY).map(key).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn marks_come_back_as_they_were_and_every_flipped_bit_is_found() {
        let cluster = ClusterId(7);
        let key = |counter, piece| Key::new(BlockId { incarnation: 3, counter }, piece);
        for keys in [vec![], vec![key(1 << 40, 5), key(2, 0)]] {
            let bytes = encode(cluster, &keys);
            assert_eq!(decode(cluster, &bytes), Some(keys));
            assert_eq!(decode(ClusterId(8), &bytes), None);
            assert_eq!(decode(cluster, &bytes[..bytes.len() - 1]), None);
            for bit in 0..bytes.len() * 8 {
                let mut broken = bytes.clone();
                broken[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(cluster, &broken), None, "bit {bit}");
            }
        }
    }
}
