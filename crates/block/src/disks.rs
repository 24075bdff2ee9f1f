//! The disks of one data server: a store on each, threads and gates of its own for each, and which disk has a piece.
//!
//! New pieces are spread by free space. A disk that fails is out alone: it takes no changes, its pieces count as missing, so
//! that repair brings them back from elsewhere onto the others; what it can still read it gives to whoever finds
//! no other source. A disk waits for nobody else's: each has its readers, its writer and its queues.
//!
//! A disk that does not answer (`pulse`) gets nothing new and is not read from, but its pieces count as here, since it may come back;
//! deletions wait for it. After a while it counts as failed until it answers again.
//!
//! # Invariants
//! - A piece is on one disk. Two have it only after one was away, or full, while it was repaired; the scrub drops one of the two,
//!   and only after it has read the other.
//! - Two puts of one piece at a time go to the same disk.
//! - A deletion is told to every disk that works. A disk that comes back later with what was deleted meanwhile holds garbage,
//!   which the metadata service finds as it does after a server was away.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use torchfs_proto::disk::Disk;
use torchfs_proto::layout::DiskInfo;
use torchfs_proto::msg::block::PieceInfo;
use torchfs_proto::{BlockId, ServerId};

use crate::dumps::Dumps;
use crate::gate::Gate;
use crate::pulse::{Pulse, Turn, Watched};
use crate::readers::Readers;
use crate::store::{self, Stat, Store};
use crate::{Error, Result};

/// Where a disk is and how it is recognised.
#[derive(Clone, Debug)]
pub struct DiskName {
    /// Drawn at random when its folder was made.
    pub id: u64,
    /// Its folder.
    pub path: String,
}

/// What a disk has to offer: a folder for segments, and one for dumps of the metadata.
pub(crate) struct Folder {
    pub disk: Arc<dyn Disk>,
    pub dumps: Option<Arc<dyn Disk>>,
}

/// How the disks of a server are used.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub store: store::Config,
    /// Threads per disk that wait for it to read.
    pub readers: usize,
    /// Requests that may wait per session, and in all, at each disk.
    pub waiting_each: usize,
    pub waiting_all: usize,
    /// A disk that does not answer for so long is silent; for so long, it counts as failed.
    pub silent_after: Duration,
    pub silent_max: Duration,
}

/// One disk in use.
pub(crate) struct DataDisk {
    pub name: DiskName,
    pub store: Arc<Store>,
    pub readers: Readers,
    /// Room for as many reads as there are threads.
    pub reads: Arc<Gate>,
    /// Room for as many bytes as the writer takes at once.
    pub writes: Arc<Gate>,
    /// Bytes free for pieces when last asked, less what was put since.
    free: AtomicU64,
    /// Dumps of the metadata, where there is a folder for them.
    pub dumps: Option<Arc<Dumps>>,
    /// The figures when last asked: reports do not wait for a disk.
    last: Mutex<Stat>,
    pub pulse: Arc<Pulse>,
    silent_max: Duration,
}

impl DataDisk {
    /// Opens the store on a disk and starts its threads.
    pub fn open(mut name: DiskName, folder: Folder, settings: &Settings) -> Result<DataDisk> {
        let pulse = Pulse::new(settings.silent_after);
        let folder = Folder {
            disk: Watched::over(folder.disk, &pulse),
            dumps: folder.dumps.map(|disk| Watched::over(disk, &pulse)),
        };
        let mut config = settings.store.clone();
        config.disk.clone_from(&name.path);
        let server = config.server;
        let writes = (2 * config.batch_bytes).min(config.queue_bytes);
        let dumps = match folder.dumps {
            Some(disk) => {
                Some(Arc::new(Dumps::open(disk, server, config.keep_free).map_err(|fault| Error::Io {
                    server,
                    what: "open its dumps",
                    why: fault.what,
                })?))
            }
            None => None,
        };
        let store = Arc::new(Store::open(folder.disk, config)?);
        if store.stat()?.damaged > 0 {
            // Records are gone and nobody knows which. Under another number it is a disk that was lost, and one that is new:
            // the metadata service looks for everything that should be on it.
            name.id ^= RandomState::new().build_hasher().finish() >> 1;
        }
        let threads = settings.readers.max(1);
        let disk = DataDisk {
            name,
            readers: Readers::start(server, threads)?,
            reads: Gate::new(threads as u64, settings.waiting_each, settings.waiting_all),
            writes: Gate::new(writes, settings.waiting_each, settings.waiting_all),
            free: AtomicU64::new(0),
            last: Mutex::default(),
            pulse,
            silent_max: settings.silent_max,
            dumps,
            store,
        };
        disk.refresh()?;
        Ok(disk)
    }

    /// Whether it takes changes and gives what it has.
    pub fn works(&self) -> bool {
        self.store.failure().is_none() && self.pulse.silence().is_none()
    }

    /// Whether what is on it counts as here: it works, or may soon do so again.
    pub fn counts(&self) -> bool {
        let lost = |silence: Duration| silence >= self.silent_max;
        self.store.failure().is_none() && !self.pulse.silence().is_some_and(lost)
    }

    /// The error of whoever needs it while it does not answer.
    pub fn silent(&self, server: ServerId) -> Option<Error> {
        let seconds = self.pulse.silence()?.as_secs();
        Some(Error::Silent { server, disk: self.name.path.clone(), seconds })
    }

    /// Looks whether it answers; the log hears when that changes.
    pub fn look(&self, server: ServerId) {
        let disk = &self.name.path;
        match self.pulse.look() {
            Some(Turn::Silent) => {
                tracing::error!(%server, disk, "the disk does not answer; it gets nothing new until it does");
            }
            Some(Turn::Back) => tracing::info!(%server, disk, "the disk answers again"),
            None => {}
        }
    }

    /// Asks the store for its figures anew.
    pub fn refresh(&self) -> Result<()> {
        let stat = self.store.stat()?;
        self.free.store(stat.free, Ordering::Relaxed);
        *self.last.lock() = stat;
        Ok(())
    }

    fn info(&self) -> DiskInfo {
        let DiskName { id, path } = self.name.clone();
        if let Some(fault) = self.store.failure() {
            return DiskInfo { id, path, failed: true, fault: fault.to_owned(), ..DiskInfo::default() };
        }
        let Stat { total, free, used, pieces, fs, fs_free, fs_share, .. } = *self.last.lock();
        let Some(silence) = self.pulse.silence() else {
            let (failed, fault, silent_ms) = (false, String::new(), None);
            return DiskInfo {
                id,
                path,
                total,
                free,
                used,
                pieces,
                failed,
                fault,
                fs,
                fs_free,
                fs_share,
                silent_ms,
            };
        };
        let fault = format!("it has not answered for {} s", silence.as_secs());
        let silent_ms = Some(silence.as_millis() as u64);
        DiskInfo { id, path, used, pieces, failed: !self.counts(), fault, silent_ms, ..DiskInfo::default() }
    }
}

/// A disk that could not be opened.
#[derive(Clone, Debug)]
pub(crate) struct Lost {
    pub name: DiskName,
    pub why: String,
}

/// All disks of a server.
pub(crate) struct Disks {
    server: ServerId,
    used: RwLock<Arc<Vec<Arc<DataDisk>>>>,
    lost: Mutex<Vec<Lost>>,
    /// Puts on their way: to which disk, and how many of the same piece.
    placing: Mutex<HashMap<(BlockId, u8), Placing>>,
    /// Held while a piece that is here twice is dropped from one disk.
    dropping: Mutex<()>,
}

type Placing = (Weak<DataDisk>, usize);

impl Disks {
    /// The disks that could be opened, and those that could not.
    pub fn new(server: ServerId, used: Vec<DataDisk>, lost: Vec<Lost>) -> Disks {
        let used = used.into_iter().map(Arc::new).collect();
        Disks {
            server,
            used: RwLock::new(Arc::new(used)),
            lost: Mutex::new(lost),
            placing: Mutex::default(),
            dropping: Mutex::default(),
        }
    }

    /// The disks in use, failed ones included.
    pub fn all(&self) -> Arc<Vec<Arc<DataDisk>>> {
        self.used.read().clone()
    }

    /// Takes an empty disk into use, in place of one that was at the same path.
    pub fn add(&self, disk: DataDisk) {
        let path = disk.name.path.clone();
        self.lost.lock().retain(|lost| lost.name.path != path);
        let mut used = self.used.write();
        let mut next: Vec<_> = used.iter().filter(|other| other.name.path != path).cloned().collect();
        next.push(Arc::new(disk));
        *used = Arc::new(next);
    }

    /// The disk that has a piece: one that works and knows nothing bad of it, if there is one.
    pub fn find(&self, block: BlockId, piece: u8) -> Result<Arc<DataDisk>> {
        let all = self.all();
        all.iter()
            .find(|disk| disk.works() && disk.store.has(block, piece))
            .or_else(|| all.iter().find(|disk| disk.store.has(block, piece)))
            .or_else(|| all.iter().find(|disk| disk.store.stored(block, piece).is_some()))
            .cloned()
            .ok_or(Error::Gone { block, piece, server: self.server })
    }

    /// Whether the piece is here, whole as far as is known.
    pub fn has(&self, block: BlockId, piece: u8) -> bool {
        self.all().iter().any(|disk| disk.counts() && disk.store.has(block, piece))
    }

    /// Chooses the disk for a piece; one that has it already, else by free space. `not` are disks that refused it.
    pub fn place(&self, block: BlockId, piece: u8, len: u64, not: &[u64]) -> Result<Placed<'_>> {
        let all = self.all();
        let may = |disk: &&Arc<DataDisk>| disk.works() && !not.contains(&disk.name.id);
        let mut placing = self.placing.lock();
        let same = placing.get(&(block, piece)).and_then(|(disk, _)| disk.upgrade()).filter(|d| may(&d));
        let here = || all.iter().filter(may).find(|disk| disk.store.stored(block, piece).is_some()).cloned();
        let disk = match same.or_else(here).or_else(|| by_space(all.iter().filter(may), block, piece, len)) {
            Some(disk) => disk,
            None if not.is_empty() => return Err(self.no_disk()),
            None => return Err(Error::NoSpace { server: self.server }),
        };
        let (_, count) = placing.entry((block, piece)).or_insert_with(|| (Arc::downgrade(&disk), 0));
        *count += 1;
        drop(placing);
        disk.free
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(free.saturating_sub(len)))
            .ok();
        Ok(Placed { disks: self, piece: (block, piece), disk })
    }

    /// The disks that work and keep dumps of the metadata, the one for new ones first.
    pub fn with_dumps(&self) -> Vec<(Arc<DataDisk>, Arc<Dumps>)> {
        let all = self.all();
        let working = all.iter().filter(|disk| disk.works());
        working.filter_map(|disk| Some((disk.clone(), disk.dumps.clone()?))).collect()
    }

    /// The disks that a deletion has to reach: all that count. An error if one of them does not answer, or if there is none.
    pub fn changeable(&self) -> Result<Vec<Arc<DataDisk>>> {
        let all = self.all();
        let counting: Vec<_> = all.iter().filter(|disk| disk.counts()).cloned().collect();
        match counting.iter().find_map(|disk| disk.silent(self.server)) {
            Some(silent) => Err(silent),
            None if counting.is_empty() => Err(self.no_disk()),
            None => Ok(counting),
        }
    }

    /// The disks that take changes; an error if none is left.
    pub fn working(&self) -> Result<Vec<Arc<DataDisk>>> {
        let working: Vec<_> = self.all().iter().filter(|disk| disk.works()).cloned().collect();
        if working.is_empty() { Err(self.no_disk()) } else { Ok(working) }
    }

    fn no_disk(&self) -> Error {
        let all = self.all();
        if let Some(silent) = all.iter().find_map(|disk| disk.silent(self.server)) {
            return silent;
        }
        let why = all.iter().find_map(|disk| disk.store.failure().map(str::to_owned));
        let why = why.or_else(|| self.lost.lock().first().map(|lost| lost.why.clone()));
        Error::Latched { server: self.server, why: why.unwrap_or_else(|| "it has none".to_owned()) }
    }

    /// Pieces after the given one on disks that count, in the order of ids, at most so many.
    pub fn list(&self, after: Option<(BlockId, u8)>, limit: usize) -> Vec<PieceInfo> {
        let all = self.all();
        let mut pieces: Vec<PieceInfo> = Vec::new();
        for disk in all.iter().filter(|disk| disk.counts()) {
            pieces.extend(disk.store.list(after, limit));
        }
        pieces.sort_by_key(|piece| (piece.block, piece.piece));
        pieces.dedup_by_key(|piece| (piece.block, piece.piece));
        pieces.truncate(limit);
        pieces
    }

    /// Pieces on disks that work that are known to be damaged and nowhere else whole, at most so many.
    pub fn bad(&self, limit: usize) -> Vec<(BlockId, u8)> {
        let all = self.all();
        let mut bad: Vec<_> =
            all.iter().filter(|disk| disk.works()).flat_map(|disk| disk.store.bad(limit)).collect();
        bad.retain(|(block, piece)| !self.has(*block, *piece));
        bad.truncate(limit);
        bad
    }

    /// Asks every disk that works for its figures anew.
    pub fn refresh(&self) {
        for disk in self.all().iter().filter(|disk| disk.works()) {
            if let Err(error) = disk.refresh() {
                tracing::debug!(server = %self.server, disk = disk.name.path, %error, "a disk has no figures");
            }
        }
    }

    /// Figures of all disks that work together, as of a moment ago.
    pub fn stat(&self) -> Stat {
        let mut sum = Stat::default();
        for disk in self.all().iter().filter(|disk| disk.works()) {
            let stat = *disk.last.lock();
            sum.total += stat.total;
            sum.free += stat.free;
            sum.used += stat.used;
            sum.pieces += stat.pieces;
            sum.damaged += stat.damaged;
            sum.bad += stat.bad;
        }
        sum
    }

    /// Figures of each disk, those included that could not be opened.
    pub fn infos(&self) -> Vec<DiskInfo> {
        let lost = |lost: &Lost| DiskInfo {
            id: lost.name.id,
            path: lost.name.path.clone(),
            failed: true,
            fault: lost.why.clone(),
            ..DiskInfo::default()
        };
        let mut infos: Vec<DiskInfo> = self.all().iter().map(|disk| disk.info()).collect();
        infos.extend(self.lost.lock().iter().map(lost));
        infos
    }

    /// Requests that wait at all disks.
    pub fn waiting(&self) -> u64 {
        self.all().iter().map(|disk| (disk.reads.waiting() + disk.writes.waiting()) as u64).sum()
    }

    /// A piece on this disk was just read and found whole. If another disk has it too, since it was away while its pieces
    /// were repaired or was full when a damaged one was healed, one of the two goes: the damaged one, or the later disk's.
    pub fn drop_double(&self, whole: &DataDisk, block: BlockId, piece: u8) {
        let all = self.all();
        let is_double = |disk: &Arc<DataDisk>| {
            let other = disk.name.id != whole.name.id && disk.works();
            other && disk.store.stored(block, piece).is_some()
        };
        if all.len() < 2 || !all.iter().any(is_double) {
            return;
        }
        // One at a time, and looked at again: two disks must not drop each other's.
        let _only = self.dropping.lock();
        for disk in all.iter().filter(|disk| is_double(disk)) {
            let bad = !disk.store.has(block, piece);
            if !whole.works() || !whole.store.has(block, piece) || (disk.name.id < whole.name.id && !bad) {
                continue;
            }
            match disk.store.drop_pieces(vec![(block, piece)]) {
                Ok(_) => {
                    let (disk, server) = (&disk.name.path, self.server);
                    tracing::debug!(%server, disk, %block, piece, "another disk has this piece too; dropped");
                }
                Err(error) => {
                    tracing::warn!(server = %self.server, %error, "cannot drop a piece that is here twice");
                }
            }
        }
    }
}

/// A put's disk; while this lives, other puts of the same piece go there too.
pub(crate) struct Placed<'a> {
    disks: &'a Disks,
    piece: (BlockId, u8),
    pub disk: Arc<DataDisk>,
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        let mut placing = self.disks.placing.lock();
        if let Some((_, count)) = placing.get_mut(&self.piece) {
            *count -= 1;
            if *count == 0 {
                placing.remove(&self.piece);
            }
        }
    }
}

/// One of the disks, each as likely as it has room; which one follows from the piece's name. A disk without room for the
/// piece is asked only if none has.
fn by_space<'a>(
    disks: impl Iterator<Item = &'a Arc<DataDisk>>,
    block: BlockId,
    piece: u8,
    len: u64,
) -> Option<Arc<DataDisk>> {
    let disks: Vec<_> = disks.map(|disk| (disk, disk.free.load(Ordering::Relaxed))).collect();
    let all: u128 = disks.iter().filter(|(_, free)| *free >= len).map(|(_, free)| u128::from(*free)).sum();
    if all == 0 {
        return disks.iter().max_by_key(|(_, free)| *free).map(|(disk, _)| (*disk).clone());
    }
    let mut name = [0; 13];
    name[..12].copy_from_slice(&block.to_bytes());
    name[12] = piece;
    let mut at = (u128::from(crc32c::crc32c(&name)) * all) >> 32;
    for (disk, free) in disks.iter().filter(|(_, free)| *free >= len) {
        match at.checked_sub(u128::from(*free)) {
            Some(rest) => at = rest,
            None => return Some((*disk).clone()),
        }
    }
    disks.first().map(|(disk, _)| (*disk).clone())
}
