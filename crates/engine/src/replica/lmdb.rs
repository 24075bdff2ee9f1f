//! The replica in LMDB: lookups in a few microseconds, snapshots for readers, one writer.
//!
//! # Invariants
//! - Every commit is synced (no NOSYNC): an LMDB that was not synced can be torn by a power cut.
//! - Pairs and the number of their last batch change in one transaction.
//! - A transaction that ran out of space is aborted; LMDB then still holds the state before it.
//!
//! # Not here
//! - The seam `Disk`: LMDB maps its file. Its folder is a real one even in tests.

#![allow(unsafe_code)]

use std::io;
use std::ops::{Bound, ControlFlow};
use std::path::Path;

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvOpenOptions, MdbError, RoTxn, WithoutTls};
use torchfs_proto::{ClusterId, Fence, Seq};

use super::{Changes, Replica, Room, View, is_empty_range};
use crate::Visit;
use crate::batch::KEY_MAX;
use crate::error::{Error, Result};
use crate::log::format::Mark;

/// How LMDB is opened.
#[derive(Clone, Debug)]
pub struct LmdbConfig {
    /// How large it may grow. Only address space is taken at once.
    pub map_bytes: u64,
    /// How many views and lookups may be open at the same moment.
    pub readers_max: u32,
}

impl Default for LmdbConfig {
    fn default() -> LmdbConfig {
        LmdbConfig { map_bytes: 1 << 40, readers_max: 1024 }
    }
}

/// Format of the pairs and of the state record.
const VERSION: u32 = 1;
/// Features that a reader must know; this code knows none.
const MUST_KNOWN: u64 = 0;
/// The one key of the database `state`.
const STATE: &[u8] = b"state";

/// The open LMDB.
pub struct Lmdb {
    env: Env<WithoutTls>,
    pairs: Database<'static, Bytes, Bytes>,
    state: Database<'static, Bytes, Bytes>,
    page_bytes: u64,
}

impl Lmdb {
    /// Opens the LMDB in this folder, making it if it is missing. The caller holds a lock that keeps other processes out.
    pub fn open(dir: &Path, config: &LmdbConfig) -> Result<Lmdb> {
        let failed = |e: heed::Error| replica_error("open", e);
        // LMDB gives its files the usual mode; its folder keeps others out.
        torchfs_disk::make_dir_durably(dir).map_err(Error::io(format!("cannot make {}", dir.display())))?;
        let map_bytes = usize::try_from(config.map_bytes).unwrap_or(usize::MAX) / 4096 * 4096;
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(map_bytes).max_dbs(2).max_readers(config.readers_max);
        // SAFETY: the file is changed through LMDB only, and the caller's lock on the folder keeps others out.
        let env = unsafe { options.open(dir) }.map_err(failed)?;
        let txn = env.write_txn().map_err(failed)?;
        let (pairs, state) = env
            .create_databases_and_commit(txn, |opener, txn| -> Result<_, heed::Error> {
                let pairs = opener.create_database::<Bytes, Bytes>(txn, Some("pairs"))?;
                let state = opener.create_database::<Bytes, Bytes>(txn, Some("state"))?;
                Ok(CommitOrAbort::<_, ()>::Commit((pairs, state)))
            })
            .map_err(failed)?
            .unwrap_commit();
        // The last commit of a process that died may be visible and not yet durable.
        env.force_sync().map_err(failed)?;
        std::fs::File::open(dir)
            .and_then(|folder| folder.sync_all())
            .map_err(Error::io(format!("cannot sync {}", dir.display())))?;
        let page_bytes = u64::from(env.unnamed_database_stat().page_size);
        let lmdb = Lmdb { env, pairs, state, page_bytes };
        lmdb.mark()?;
        Ok(lmdb)
    }

    fn read(&self) -> Result<RoTxn<'_, WithoutTls>> {
        self.env.read_txn().map_err(|e| replica_error("read", e))
    }

    fn load_state(&self, txn: &RoTxn<'_, WithoutTls>) -> Result<Option<Mark>> {
        let stored = self.state.get(txn, STATE).map_err(|e| replica_error("read", e))?;
        stored.map(decode_state).transpose()
    }
}

impl Replica for Lmdb {
    fn mark(&self) -> Result<Option<Mark>> {
        self.load_state(&self.read()?)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        if key.is_empty() || key.len() > KEY_MAX {
            return Ok(None);
        }
        let txn = self.read()?;
        let value = self.pairs.get(&txn, key).map_err(|e| replica_error("read", e))?;
        Ok(value.map(<[u8]>::to_vec))
    }

    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(LmdbView { lmdb: self, txn: self.read()? }))
    }

    fn commit(&self, mark: &Mark, changes: &mut Changes<'_>) -> Result<()> {
        let failed = |e: heed::Error| replica_error("write", e);
        let mut txn = self.env.write_txn().map_err(failed)?;
        for (key, value) in changes {
            match value {
                Some(value) => self.pairs.put(&mut txn, key, value).map_err(failed)?,
                None => {
                    self.pairs.delete(&mut txn, key).map_err(failed)?;
                }
            }
        }
        self.state.put(&mut txn, STATE, &encode_state(mark)).map_err(failed)?;
        txn.commit().map_err(failed)
    }

    fn clear(&self) -> Result<()> {
        let failed = |e: heed::Error| replica_error("clear", e);
        let mut txn = self.env.write_txn().map_err(failed)?;
        self.pairs.clear(&mut txn).map_err(failed)?;
        self.state.clear(&mut txn).map_err(failed)?;
        txn.commit().map_err(failed)
    }

    fn room(&self) -> Result<Room> {
        let failed = |e: heed::Error| replica_error("read", e);
        let txn = self.read()?;
        let pairs = self.pairs.stat(&txn).map_err(failed)?;
        let state = self.state.stat(&txn).map_err(failed)?;
        let main = self.env.unnamed_database_stat();
        let info = self.env.info();
        let bytes = (info.last_page_number as u64 + 1) * self.page_bytes;
        let taken = [pairs, state, main].iter().map(|stat| stat.non_free_page_size() as u64).sum::<u64>();
        Ok(Room {
            bytes,
            keys: pairs.entries as u64,
            // Two pages are LMDB's own; the list of free pages is counted as free, which is a small error.
            reusable: bytes.saturating_sub(taken + 2 * self.page_bytes),
            headroom: (info.map_size as u64).saturating_sub(bytes),
        })
    }
}

struct LmdbView<'a> {
    lmdb: &'a Lmdb,
    txn: RoTxn<'a, WithoutTls>,
}

impl View for LmdbView<'_> {
    fn applied(&self) -> Result<Seq> {
        Ok(self.lmdb.load_state(&self.txn)?.map_or(Seq(0), |mark| mark.applied))
    }

    fn scan(&self, from: Bound<&[u8]>, to: Bound<&[u8]>, reverse: bool, visit: &mut Visit<'_>) -> Result<()> {
        if is_empty_range(from, to) || to == Bound::Excluded(&[]) {
            return Ok(());
        }
        let (from, to) = (searchable(from, true), searchable(to, false));
        let failed = |e: heed::Error| replica_error("read", e);
        let range = (from, to);
        let mut step = |pair: Result<(&[u8], &[u8]), heed::Error>| -> Result<ControlFlow<()>> {
            let (key, value) = pair.map_err(failed)?;
            Ok(visit(key, value))
        };
        if reverse {
            for pair in self.lmdb.pairs.rev_range(&self.txn, &range).map_err(failed)? {
                if step(pair)?.is_break() {
                    break;
                }
            }
        } else {
            for pair in self.lmdb.pairs.range(&self.txn, &range).map_err(failed)? {
                if step(pair)?.is_break() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The same bound in keys that LMDB can look for: neither empty nor too long.
fn searchable(bound: Bound<&[u8]>, low: bool) -> Bound<&[u8]> {
    match bound {
        Bound::Included(key) | Bound::Excluded(key) if key.is_empty() => Bound::Unbounded,
        // A key of the replica is shorter: it is above this bound if it is above the bound's beginning.
        Bound::Included(key) | Bound::Excluded(key) if key.len() > KEY_MAX => {
            if low {
                Bound::Excluded(&key[..KEY_MAX])
            } else {
                Bound::Included(&key[..KEY_MAX])
            }
        }
        bound => bound,
    }
}

const STATE_LEN: usize = 56;

fn encode_state(mark: &Mark) -> [u8; STATE_LEN] {
    let mut bytes = [0; STATE_LEN];
    bytes[0..4].copy_from_slice(b"TFRP");
    bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
    // 8..16 must-know and 16..24 may-know features: none yet.
    bytes[24..32].copy_from_slice(&mark.cluster.0.to_le_bytes());
    bytes[32..40].copy_from_slice(&mark.applied.0.to_le_bytes());
    bytes[40..48].copy_from_slice(&mark.fence.0.to_le_bytes());
    bytes[48..56].copy_from_slice(&mark.reign.to_le_bytes());
    bytes
}

fn decode_state(bytes: &[u8]) -> Result<Mark> {
    let number = |at: usize| {
        let mut n = [0; 8];
        n.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(n)
    };
    if bytes.len() < STATE_LEN || bytes[0..4] != *b"TFRP" {
        return Err(Error::Corrupt { what: "the replica's state record makes no sense".into() });
    }
    let version = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    if version > VERSION {
        return Err(Error::Unsupported { what: format!("the replica has format version {version}") });
    }
    let unknown = number(8) & !MUST_KNOWN;
    if unknown != 0 {
        return Err(Error::Unsupported { what: format!("the replica needs unknown features {unknown:#x}") });
    }
    Ok(Mark {
        cluster: ClusterId(number(24)),
        applied: Seq(number(32)),
        fence: Fence(number(40)),
        reign: number(48),
    })
}

/// A lack of space, in the map or on the disk, is told apart: the caller may try again after it.
fn replica_error(what: &str, error: heed::Error) -> Error {
    match error {
        heed::Error::Mdb(MdbError::MapFull) => Error::NoSpace { free: 0, reserve: 0 },
        heed::Error::Mdb(MdbError::Other(libc::ENOSPC | libc::EDQUOT)) => {
            Error::NoSpace { free: 0, reserve: 0 }
        }
        heed::Error::Io(e)
            if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
        {
            Error::NoSpace { free: 0, reserve: 0 }
        }
        error => Error::Replica { what: format!("cannot {what}: {error}") },
    }
}
