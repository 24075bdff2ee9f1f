//! A disk in memory whose power can be cut: the double for crash and fault tests.
//!
//! Every sector of 512 bytes remembers all contents it had since the last sync. A power cut picks one of them for each
//! sector on its own, the one of the last sync included: so writes are dropped, reordered and torn at sectors. The
//! length of a file is picked the same way. Names are harsher than any journal: each creation, renaming and removal
//! since the last `sync_names` survives or not, and the survivors happen in any order.
//!
//! A sync that is told to fail behaves as Linux does: the content is unknown afterwards, later syncs succeed without
//! bringing it back, and reads from the cache go on as if nothing had happened.
//!
//! # Invariants
//! - The outcome of a cut depends on the operations before it and the seed, on nothing else.
//! - After the power is gone every operation of the old disk and of its files fails; the new one starts from what
//!   was kept.
//!
//! # Not here
//! - Sectors that are torn within themselves, and bits that rot: tests write damage with `write_at`; what cannot be read at all
//!   is made with [`SimDisk::spoil`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use torchfs_proto::disk::{Disk, DiskFile, Space};

/// The unit a power cut keeps or loses as a whole.
const SECTOR: usize = 512;
/// The unit of space.
const PAGE: usize = 4096;

/// An operation that can be told to fail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Op {
    /// A write to a file.
    Write,
    /// A sync of a file.
    Sync,
    /// A sync of the names.
    SyncNames,
    /// A creation, rename or removal.
    Name,
    /// Taking space for a file, by `preallocate` or `set_len`.
    Allocate,
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

impl SimDisk {
    /// An empty disk of 1 TiB. The seed decides what a failed sync leaves behind.
    pub fn new(seed: u64) -> SimDisk {
        SimDisk::with_state(State {
            files: BTreeMap::new(),
            next_file: 0,
            names: BTreeMap::new(),
            kept_names: BTreeMap::new(),
            name_changes: Vec::new(),
            capacity: 1 << 40,
            used: 0,
            off: false,
            ticks: 0,
            off_at: None,
            faults: Vec::new(),
            rng: StdRng::seed_from_u64(seed),
        })
    }

    /// Cuts the power and returns the disk as it comes back. This one is dead afterwards.
    pub fn power_cut(&self, seed: u64) -> SimDisk {
        let mut state = self.state.lock();
        state.off = true;
        SimDisk::with_state(state.survivors(&mut StdRng::seed_from_u64(seed)))
    }

    /// The process dies but the machine stays up: all that was written is still there, synced or not, and what was not
    /// synced is still at risk. This disk is dead afterwards.
    pub fn crash(&self) -> SimDisk {
        let mut state = self.state.lock();
        let next = State {
            files: state.files.clone(),
            next_file: state.next_file,
            names: state.names.clone(),
            kept_names: state.kept_names.clone(),
            name_changes: state.name_changes.clone(),
            capacity: state.capacity,
            used: state.used,
            off: false,
            ticks: 0,
            off_at: None,
            faults: Vec::new(),
            rng: StdRng::from_rng(&mut state.rng),
        };
        state.off = true;
        SimDisk::with_state(next)
    }

    /// Lets `ops` more changing operations through; the next one and everything after it fails, as if the power had
    /// gone in the middle of whatever runs. Call [`SimDisk::power_cut`] then to see what was kept.
    pub fn power_off_after(&self, ops: u64) {
        let mut state = self.state.lock();
        state.off_at = Some(state.ticks + ops);
    }

    /// Whether the power is gone.
    pub fn is_off(&self) -> bool {
        self.state.lock().off
    }

    /// How many changing operations there were.
    pub fn ticks(&self) -> u64 {
        self.state.lock().ticks
    }

    /// Counts as one changing operation: for doubles of other stores that share this machine's power.
    pub fn tick(&self) -> io::Result<()> {
        self.state.lock().tick()
    }

    /// Makes the operation of this kind fail that comes after `skip` more of them; once.
    pub fn fail(&self, op: Op, skip: u64, errno: i32) {
        self.state.lock().faults.push(Fail { op, skip, errno });
    }

    /// The page at this offset of a file cannot be read any more, until it is written anew.
    pub fn spoil(&self, name: &str, offset: u64) {
        let mut state = self.state.lock();
        let id = state.names.get(name).copied();
        if let Some(file) = id.and_then(|id| state.files.get_mut(&id)) {
            file.spoiled.insert(offset as usize / PAGE);
        }
    }

    /// Limits the space; what is there stays even if it is more.
    pub fn set_capacity(&self, bytes: u64) {
        self.state.lock().capacity = bytes;
    }

    fn with_state(state: State) -> SimDisk {
        SimDisk { state: Arc::new(Mutex::new(state)) }
    }

    fn on(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.state.lock();
        if state.off { Err(power_is_off()) } else { Ok(state) }
    }

    fn handle(&self, id: u64) -> Arc<dyn DiskFile> {
        Arc::new(SimFile { disk: self.clone(), id })
    }
}

impl Disk for SimDisk {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let id = self.on()?.find(name)?;
        Ok(self.handle(id))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.on()?;
        state.step(Op::Name)?;
        if name.is_empty() || name.contains('/') {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name")));
        }
        if state.names.contains_key(name) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{name} is there already")));
        }
        let id = state.next_file;
        state.next_file += 1;
        state.files.insert(id, FileState::default());
        state.names.insert(name.to_owned(), id);
        state.name_changes.push(NameChange { file: id, from: None, to: Some(name.to_owned()) });
        Ok(self.handle(id))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.on()?;
        state.step(Op::Name)?;
        let id = state.find(from)?;
        state.names.remove(from);
        if let Some(replaced) = state.names.insert(to.to_owned(), id)
            && replaced != id
        {
            state.release(replaced);
        }
        state.name_changes.push(NameChange {
            file: id,
            from: Some(from.to_owned()),
            to: Some(to.to_owned()),
        });
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.on()?;
        state.step(Op::Name)?;
        let id = state.find(name)?;
        state.names.remove(name);
        state.release(id);
        state.name_changes.push(NameChange { file: id, from: Some(name.to_owned()), to: None });
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.on()?.names.keys().cloned().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.on()?;
        state.step(Op::SyncNames)?;
        state.kept_names = state.names.clone();
        state.name_changes.clear();
        Ok(())
    }

    fn space(&self) -> io::Result<Space> {
        let state = self.on()?;
        Ok(Space { total: state.capacity, free: state.capacity.saturating_sub(state.used), fs: 0 })
    }
}

struct SimFile {
    disk: SimDisk,
    id: u64,
}

impl DiskFile for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.disk.on()?;
        let FileState { bytes, spoiled, .. } = state.file(self.id)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let n = buf.len().min(bytes.len() - start);
        if n > 0 && spoiled.range(start / PAGE..(start + n).div_ceil(PAGE)).next().is_some() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        buf[..n].copy_from_slice(&bytes[start..start + n]);
        Ok(n)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.on()?;
        let outcome = state.step(Op::Write);
        if state.off {
            // The write was on its way when the power went: it is one of the things that may have happened.
            let _ = state.write(self.id, bytes, offset);
        }
        outcome?;
        state.write(self.id, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        let mut guard = self.disk.on()?;
        let outcome = guard.step(Op::Sync);
        let state = &mut *guard;
        let file = state.files.get_mut(&self.id).ok_or_else(gone)?;
        match outcome {
            Ok(()) => file.keep_all(),
            Err(_) if state.off => {}
            Err(_) => {
                *file = FileState {
                    bytes: file.bytes.clone(),
                    pages: file.pages.clone(),
                    ..file.survivor(&mut state.rng)
                };
            }
        }
        outcome
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.on()?.file(self.id)?.bytes.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.on()?;
        state.step(Op::Allocate)?;
        state.set_len(self.id, len)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.on()?;
        state.step(Op::Allocate)?;
        state.allocate(self.id, 0, len)?;
        if (state.file(self.id)?.bytes.len() as u64) < len { state.set_len(self.id, len) } else { Ok(()) }
    }
}

struct State {
    files: BTreeMap<u64, FileState>,
    next_file: u64,
    names: BTreeMap<String, u64>,
    /// The names as of the last `sync_names`.
    kept_names: BTreeMap<String, u64>,
    name_changes: Vec<NameChange>,
    capacity: u64,
    used: u64,
    off: bool,
    ticks: u64,
    off_at: Option<u64>,
    faults: Vec<Fail>,
    rng: StdRng,
}

/// A file's content now and what the platter may hold.
#[derive(Clone, Default)]
struct FileState {
    /// What reads see.
    bytes: Vec<u8>,
    /// What the last sync made durable.
    kept: Vec<u8>,
    /// The contents each sector had since then, oldest first.
    versions: BTreeMap<usize, Vec<[u8; SECTOR]>>,
    /// The lengths the file had since then.
    lengths: Vec<usize>,
    /// Which pages take space.
    pages: Vec<bool>,
    /// Pages that cannot be read.
    spoiled: BTreeSet<usize>,
}

#[derive(Clone)]
struct NameChange {
    file: u64,
    from: Option<String>,
    to: Option<String>,
}

struct Fail {
    op: Op,
    skip: u64,
    errno: i32,
}

impl State {
    fn tick(&mut self) -> io::Result<()> {
        if !self.off && self.off_at.is_some_and(|at| self.ticks >= at) {
            self.off = true;
        }
        if self.off {
            return Err(power_is_off());
        }
        self.ticks += 1;
        Ok(())
    }

    /// Counts the operation and fails it if somebody asked for that.
    fn step(&mut self, op: Op) -> io::Result<()> {
        self.tick()?;
        let mut failed = None;
        for (at, fail) in self.faults.iter_mut().enumerate().filter(|(_, fail)| fail.op == op) {
            if fail.skip == 0 {
                failed = Some(at);
                break;
            }
            fail.skip -= 1;
        }
        match failed {
            Some(at) => Err(io::Error::from_raw_os_error(self.faults.remove(at).errno)),
            None => Ok(()),
        }
    }

    fn find(&self, name: &str) -> io::Result<u64> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("{name} is not there"));
        self.names.get(name).copied().ok_or_else(missing)
    }

    fn file(&self, id: u64) -> io::Result<&FileState> {
        self.files.get(&id).ok_or_else(gone)
    }

    fn file_mut(&mut self, id: u64) -> io::Result<&mut FileState> {
        self.files.get_mut(&id).ok_or_else(gone)
    }

    /// Gives back the space of a file without a name. Its bytes stay for those who have it open.
    fn release(&mut self, id: u64) {
        if let Some(file) = self.files.get_mut(&id) {
            let pages = std::mem::take(&mut file.pages).into_iter().filter(|page| *page).count();
            self.used -= (pages * PAGE) as u64;
        }
    }

    fn allocate(&mut self, id: u64, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let (capacity, used) = (self.capacity, self.used);
        let named = self.names.values().any(|named| *named == id);
        let file = self.file_mut(id)?;
        let (first, end) = (offset as usize / PAGE, (offset + len).div_ceil(PAGE as u64) as usize);
        if file.pages.len() < end {
            file.pages.resize(end, false);
        }
        let missing = file.pages[first..end].iter().filter(|page| !**page).count();
        let bytes = (missing * PAGE) as u64;
        if missing > 0 && used + bytes > capacity {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if named {
            file.pages[first..end].fill(true);
            self.used += bytes;
        }
        Ok(())
    }

    fn write(&mut self, id: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.allocate(id, offset, bytes.len() as u64)?;
        let file = self.file_mut(id)?;
        let start = offset as usize;
        let end = start + bytes.len();
        if file.bytes.len() < end {
            file.bytes.resize(end, 0);
            file.lengths.push(end);
        }
        file.bytes[start..end].copy_from_slice(bytes);
        file.remember(start, end);
        // A page has to be written whole: the rest of it would have to be read.
        for page in start.div_ceil(PAGE)..end / PAGE {
            file.spoiled.remove(&page);
        }
        Ok(())
    }

    fn set_len(&mut self, id: u64, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        let file = self.file_mut(id)?;
        let old = file.bytes.len();
        if len < old {
            // What was cut off reads as zeros if the file grows again.
            file.bytes[len..].fill(0);
            file.remember(len, old);
            let pages = len.div_ceil(PAGE).min(file.pages.len());
            let freed = file.pages.split_off(pages).into_iter().filter(|page| *page).count();
            file.bytes.truncate(len);
            file.lengths.push(len);
            self.used -= (freed * PAGE) as u64;
        } else if len > old {
            file.bytes.resize(len, 0);
            file.lengths.push(len);
        }
        Ok(())
    }

    /// The disk after a power cut.
    fn survivors(&self, rng: &mut StdRng) -> State {
        let mut names = self.kept_names.clone();
        let keep = chance(rng);
        let mut changes: Vec<&NameChange> =
            self.name_changes.iter().filter(|_| rng.random_bool(keep)).collect();
        changes.shuffle(rng);
        for change in changes {
            if let Some(from) = &change.from
                && names.get(from) == Some(&change.file)
            {
                names.remove(from);
            }
            // A file has one name: a creation that comes after its own renaming says nothing new.
            if let Some(to) = &change.to
                && !names.values().any(|file| *file == change.file)
            {
                names.insert(to.clone(), change.file);
            }
        }
        let files: BTreeMap<u64, FileState> = names
            .values()
            .filter_map(|id| self.files.get(id).map(|file| (*id, file.survivor(rng))))
            .collect();
        let pages: usize = files.values().flat_map(|file| &file.pages).filter(|page| **page).count();
        State {
            files,
            next_file: self.next_file,
            kept_names: names.clone(),
            names,
            name_changes: Vec::new(),
            capacity: self.capacity,
            used: (pages * PAGE) as u64,
            off: false,
            ticks: 0,
            off_at: None,
            faults: Vec::new(),
            rng: StdRng::from_rng(rng),
        }
    }
}

impl FileState {
    /// Notes what the sectors of `[start, end)` hold now.
    fn remember(&mut self, start: usize, end: usize) {
        for sector in start / SECTOR..end.div_ceil(SECTOR) {
            let content = sector_of(&self.bytes, sector);
            self.versions.entry(sector).or_default().push(content);
        }
    }

    fn keep_all(&mut self) {
        self.kept.resize(self.bytes.len(), 0);
        for sector in self.versions.keys() {
            let start = (sector * SECTOR).min(self.bytes.len());
            let end = ((sector + 1) * SECTOR).min(self.bytes.len());
            self.kept[start..end].copy_from_slice(&self.bytes[start..end]);
        }
        self.versions.clear();
        self.lengths.clear();
    }

    /// What is left of it after a power cut: for the length and for each sector one of its versions.
    fn survivor(&self, rng: &mut StdRng) -> FileState {
        let keep = chance(rng);
        let mut bytes = self.kept.clone();
        if !self.lengths.is_empty() && rng.random_bool(keep) {
            bytes.resize(self.lengths[rng.random_range(0..self.lengths.len())], 0);
        }
        for (sector, versions) in &self.versions {
            let start = sector * SECTOR;
            if start < bytes.len() && rng.random_bool(keep) {
                let version = &versions[rng.random_range(0..versions.len())];
                let end = (start + SECTOR).min(bytes.len());
                bytes[start..end].copy_from_slice(&version[..end - start]);
            }
        }
        let pages = bytes.len().div_ceil(PAGE);
        let mut kept_pages = self.pages.clone();
        kept_pages.resize(pages, true);
        FileState {
            kept: bytes.clone(),
            bytes,
            versions: BTreeMap::new(),
            lengths: Vec::new(),
            pages: kept_pages,
            spoiled: self.spoiled.clone(),
        }
    }
}

/// How likely each unsynced thing survives: all, nothing, and in between, each often enough to be met.
fn chance(rng: &mut StdRng) -> f64 {
    [0.0, 0.1, 0.5, 0.9, 1.0][rng.random_range(0..5)]
}

/// One sector, zeros beyond the end.
fn sector_of(bytes: &[u8], sector: usize) -> [u8; SECTOR] {
    let mut content = [0; SECTOR];
    let start = (sector * SECTOR).min(bytes.len());
    let end = ((sector + 1) * SECTOR).min(bytes.len());
    content[..end - start].copy_from_slice(&bytes[start..end]);
    content
}

fn power_is_off() -> io::Error {
    io::Error::other("the power is off")
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the file is gone")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(disk: &SimDisk, name: &str) -> Vec<u8> {
        let file = disk.open(name).unwrap();
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn synced_bytes_and_names_survive_every_cut() {
        for seed in 0..200 {
            let disk = SimDisk::new(seed);
            let file = disk.create("a").unwrap();
            file.write_at(&[7; 3000], 0).unwrap();
            file.sync().unwrap();
            disk.sync_names().unwrap();
            file.write_at(&[8; 1000], 3000).unwrap();
            let after = disk.power_cut(seed);
            assert_eq!(read_all(&after, "a")[..3000], [7; 3000]);
            assert!(file.sync().is_err(), "the old disk is dead");
        }
    }

    #[test]
    fn cuts_drop_reorder_and_tear_what_was_not_synced() {
        let mut seen = BTreeSet::new();
        for seed in 0..300 {
            let disk = SimDisk::new(seed);
            let file = disk.create("a").unwrap();
            file.write_at(&[0; 2048], 0).unwrap();
            file.sync().unwrap();
            disk.sync_names().unwrap();
            file.write_at(&[1; 1024], 0).unwrap();
            file.write_at(&[2; 1024], 1024).unwrap();
            let bytes = read_all(&disk.power_cut(seed), "a");
            seen.insert([bytes[0], bytes[512], bytes[1024], bytes[1536]]);
        }
        for outcome in [[0, 0, 0, 0], [1, 1, 2, 2], [0, 0, 2, 2], [1, 0, 2, 0], [0, 1, 0, 0]] {
            assert!(seen.contains(&outcome), "{outcome:?} never happened");
        }
    }

    #[test]
    fn a_sector_written_twice_keeps_any_of_its_contents() {
        let mut seen = BTreeSet::new();
        for seed in 0..100 {
            let disk = SimDisk::new(seed);
            let file = disk.create("a").unwrap();
            file.write_at(&[1], 0).unwrap();
            file.sync().unwrap();
            disk.sync_names().unwrap();
            file.write_at(&[2], 0).unwrap();
            file.write_at(&[3], 0).unwrap();
            seen.insert(read_all(&disk.power_cut(seed), "a")[0]);
        }
        assert_eq!(seen, BTreeSet::from([1, 2, 3]));
    }

    #[test]
    fn unsynced_names_survive_or_not() {
        let mut seen = BTreeSet::new();
        for seed in 0..300 {
            let disk = SimDisk::new(seed);
            disk.create("old").unwrap();
            disk.create("doomed").unwrap();
            disk.sync_names().unwrap();
            disk.rename("old", "new").unwrap();
            disk.remove("doomed").unwrap();
            disk.create("fresh").unwrap();
            let mut names = disk.power_cut(seed).list().unwrap();
            names.sort();
            assert!(
                names.contains(&"old".to_owned()) != names.contains(&"new".to_owned()),
                "a rename is atomic"
            );
            seen.insert(names);
        }
        assert_eq!(seen.len(), 8, "each of the three changes is kept or lost on its own: {seen:?}");
    }

    #[test]
    fn a_cut_is_decided_by_its_seed() {
        let image = |seed| {
            let disk = SimDisk::new(1);
            let file = disk.create("a").unwrap();
            disk.sync_names().unwrap();
            for i in 0..50u8 {
                file.write_at(&[i; 700], u64::from(i) * 100).unwrap();
            }
            read_all(&disk.power_cut(seed), "a")
        };
        assert_eq!(image(5), image(5));
        assert_ne!(image(5), image(6));
    }

    #[test]
    fn a_failed_sync_loses_data_and_later_syncs_do_not_bring_it_back() {
        let mut lost = 0;
        for seed in 0..50 {
            let disk = SimDisk::new(seed);
            let file = disk.create("a").unwrap();
            disk.sync_names().unwrap();
            file.write_at(&[0; 512], 0).unwrap();
            file.sync().unwrap();
            file.write_at(&[9; 512], 0).unwrap();
            disk.fail(Op::Sync, 0, libc::EIO);
            assert_eq!(file.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
            file.sync().unwrap();
            assert_eq!(read_all(&disk, "a")[0], 9, "the cache still shows it");
            lost += u32::from(read_all(&disk.power_cut(seed), "a")[0] == 0);
        }
        assert!(lost > 0);
    }

    #[test]
    fn space_runs_out_and_comes_back() {
        let disk = SimDisk::new(0);
        disk.set_capacity(8192);
        let a = disk.create("a").unwrap();
        a.write_at(&[1; 4097], 0).unwrap();
        let b = disk.create("b").unwrap();
        assert_eq!(b.write_at(&[1], 0).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        a.write_at(&[2; 4097], 0).unwrap();
        disk.remove("a").unwrap();
        b.preallocate(8192).unwrap();
        assert_eq!(disk.space().unwrap().free, 0);
        b.set_len(100).unwrap();
        assert_eq!(disk.space().unwrap().free, 4096);
    }

    #[test]
    fn the_nth_operation_fails_once() {
        let disk = SimDisk::new(0);
        let file = disk.create("a").unwrap();
        disk.fail(Op::Write, 1, libc::EIO);
        file.write_at(&[1], 0).unwrap();
        assert!(file.write_at(&[1], 0).is_err());
        file.write_at(&[1], 0).unwrap();
    }

    #[test]
    fn the_power_goes_in_the_middle() {
        let disk = SimDisk::new(0);
        let file = disk.create("a").unwrap();
        disk.power_off_after(1);
        file.write_at(&[1], 0).unwrap();
        assert!(file.sync().is_err());
        assert!(disk.is_off() && file.read_at(&mut [0], 0).is_err());
    }

    #[test]
    fn a_crash_of_the_process_keeps_the_page_cache_and_its_risk() {
        let disk = SimDisk::new(0);
        let file = disk.create("a").unwrap();
        file.write_at(&[1; 10], 0).unwrap();
        let after = disk.crash();
        assert!(file.sync().is_err());
        assert_eq!(read_all(&after, "a"), [1; 10]);
        let names: BTreeSet<usize> =
            (0..50).map(|seed| after.crash_copy_for_test().power_cut(seed).list().unwrap().len()).collect();
        assert_eq!(names, BTreeSet::from([0, 1]), "its name was never synced");
    }

    impl SimDisk {
        fn crash_copy_for_test(&self) -> SimDisk {
            let copy = self.crash();
            self.state.lock().off = false;
            copy
        }
    }
}
