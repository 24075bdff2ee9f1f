//! Disks that fail in part: a sync, a place that cannot be read, a slow read at the wrong moment.

use std::io;
use std::sync::{OnceLock, Weak};

use torchfs_proto::disk::{DiskFile, Space};

use super::*;

/// What is done one after the other in the life below.
#[derive(Clone, Copy)]
enum Step {
    Put(u64),
    Delete(u64),
    Maintain,
}

#[test]
fn what_a_failed_sync_left_in_memory_is_durable_after_the_next_start() {
    let puts = |from| (from..from + 30).map(Step::Put);
    let deletes = (0..30).filter(|c| c % 5 > 0).map(Step::Delete);
    let steps: Vec<Step> =
        puts(0).chain(deletes).chain([Step::Maintain; 40]).chain(puts(100)).chain(puts(200)).collect();
    // The same life over and over, with a later sync failing each time.
    for sync in 0.. {
        let mut disk = SimDisk::new(sync);
        let mut rig = Rig::open(&disk, config()).unwrap();
        disk.fail(DiskOp::Sync, sync, libc::EIO);
        let mut model = BTreeMap::new();
        let mut failed = false;
        for step in &steps {
            let run = |rig: &mut Rig| match step {
                Step::Put(counter) => rig.put(*counter, false),
                Step::Delete(counter) => rig.delete(&[*counter]).map(|_| ()),
                Step::Maintain => {
                    rig.writer.maintain();
                    Ok(())
                }
            };
            if run(&mut rig).is_err() {
                // The process starts again as the message says, and whoever was refused comes again.
                failed = true;
                disk = disk.crash();
                rig = Rig::open(&disk, config()).unwrap();
                run(&mut rig).unwrap();
            }
            match step {
                Step::Put(counter) => model.insert(*counter, true),
                Step::Delete(counter) => model.insert(*counter, false),
                Step::Maintain => None,
            };
        }
        if !failed {
            assert!(sync > 120, "the life has only {sync} syncs");
            break;
        }
        let rig = Rig::open(&disk.power_cut(sync), config()).unwrap();
        rig.store.shared.index.read().audit();
        model.iter().for_each(|(counter, there)| rig.check(*counter, false, *there));
    }
}

#[test]
fn a_disk_that_takes_no_writes_at_the_start_is_still_read() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    (0..20).for_each(|counter| rig.put(counter, false).unwrap());
    for op in [DiskOp::Write, DiskOp::Sync] {
        disk.fail(op, 0, libc::EIO);
        let mut rig = Rig::open(&disk, config()).unwrap();
        assert!(rig.store.failure().is_some());
        assert!(matches!(rig.put(20, false), Err(Error::Latched { .. })));
        (0..20).for_each(|counter| rig.check(counter, false, true));
    }
}

#[test]
fn a_tombstone_that_was_carried_over_does_not_stand_for_a_later_one() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    let mut next = 1;
    // Puts until another segment is the active one.
    let mut fill = |rig: &mut Rig| {
        let (active, first) = (rig.writer.active, next);
        while rig.writer.active == active {
            rig.put(next, false).unwrap();
            next += 1;
        }
        // The last one is in the next segment.
        (first..next - 1).collect::<Vec<u64>>()
    };
    rig.put(0, false).unwrap();
    fill(&mut rig);
    rig.delete(&[0]).unwrap();
    let second = fill(&mut rig);
    rig.put(0, false).unwrap();
    fill(&mut rig);
    // The first tombstone moves to where the second one will be.
    rig.delete(&second).unwrap();
    (0..100).for_each(|_| assert!(rig.writer.maintain() || rig.writer.emptying.is_none()));
    // So much lives between the two that they are not carried over in one step.
    (1_000..1_005).for_each(|counter| rig.put(counter, false).unwrap());
    rig.delete(&[0]).unwrap();
    let fourth = fill(&mut rig);
    rig.delete(&fourth).unwrap();
    (0..100).for_each(|_| assert!(rig.writer.maintain() || rig.writer.emptying.is_none()));
    rig.check(0, false, false);
    rig.store.shared.index.read().audit();
    let rig = Rig::open(&disk.crash(), config()).unwrap();
    rig.store.shared.index.read().audit();
    rig.check(0, false, false);
}

#[test]
fn a_place_that_cannot_be_read_costs_what_is_there_and_not_the_disk() {
    let content = |counter: u64| (counter % 3) as u8;
    for at in 0..12 {
        let disk = SimDisk::new(at);
        let mut rig = Rig::open(&disk, config()).unwrap();
        for counter in 0..60 {
            rig.put(counter, false).unwrap();
        }
        let (entry, ..) = rig.store.shared.find(id(at * 5), content(at * 5)).unwrap();
        let name = super::super::writer::segment_name(entry.segment);
        let page = entry.offset() / 4096 * 4096;
        disk.spoil(&name, page);
        let there: Vec<bool> = (0..60)
            .map(|counter| {
                let (other, ..) = rig.store.shared.find(id(counter), content(counter)).unwrap();
                let hit = other.offset() < page + 4096 && other.span().end > page;
                other.segment != entry.segment || !hit
            })
            .collect();
        drop(rig);
        let mut rig = Rig::open(&disk, config()).expect("the disk is used");
        assert!(rig.store.stat().unwrap().damaged > 0, "the others are looked for");
        for counter in (0..60).filter(|counter| there[*counter as usize]) {
            rig.check(counter, false, true);
        }
        // What was there is put again, and the rest can be deleted and emptied.
        rig.put(at * 5, false).unwrap();
        rig.check(at * 5, false, true);
        rig.delete(&(0..60).collect::<Vec<_>>()).unwrap();
        (0..200).for_each(|_| {
            rig.writer.maintain();
        });
        rig.store.shared.index.read().audit();
    }
}

#[test]
fn a_piece_of_the_last_batch_that_cannot_be_read_is_kept_as_damaged() {
    let disk = SimDisk::new(0);
    let config = Config { segment_bytes: 1 << 20, ..config() };
    let mut rig = Rig::open(&disk, config.clone()).unwrap();
    let large = (0..).map(|c| c * 3).find(|c| content(*c, true).len() > 100_000).unwrap();
    rig.put(large, true).unwrap();
    let (entry, ..) = rig.store.shared.find(id(large), 0).unwrap();
    disk.spoil(&super::super::writer::segment_name(entry.segment), entry.span().payload);
    drop(rig);
    let mut rig = Rig::open(&disk, config.clone()).expect("the disk is used");
    assert!(rig.store.stored(id(large), 0).is_some() && !rig.store.has(id(large), 0));
    rig.keep_marks();
    assert_eq!(rig.store.bad(9), [(id(large), 0)]);
    rig.put(large, true).unwrap();
    rig.check(large, true, true);
}

#[test]
fn a_disk_of_which_nothing_can_be_read_is_not_used() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    for counter in 0..400 {
        rig.put(counter, false).unwrap();
    }
    for name in disk.list().unwrap() {
        (0..16).for_each(|page| disk.spoil(&name, page * 4096));
    }
    assert!(Rig::open(&disk, config()).is_err());
}

/// A disk that does something when a header is read around the page cache.
struct Hooked {
    disk: SimDisk,
    hook: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
}

struct HookedFile {
    file: Arc<dyn DiskFile>,
    hook: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
}

impl Hooked {
    fn file(&self, file: io::Result<Arc<dyn DiskFile>>) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(HookedFile { file: file?, hook: self.hook.clone() }))
    }
}

impl Disk for Hooked {
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(self.disk.open(name))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.file(self.disk.create(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.disk.sync_names()
    }

    fn space(&self) -> io::Result<Space> {
        self.disk.space()
    }
}

impl DiskFile for HookedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if let Some(hook) = self.hook.get().filter(|_| offset < 8192) {
            hook();
        }
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.file.preallocate(len)
    }
}

#[test]
fn looking_at_headers_takes_no_segment_away_from_those_who_need_one() {
    let hook = Arc::new(OnceLock::new());
    let disk = Hooked { disk: SimDisk::new(0), hook: hook.clone() };
    let config = Config { capacity: Some(6 * (64 << 10)), ..config() };
    let store = Arc::new(Store::open(Arc::new(disk), config).unwrap());
    let stored = (0..).find(|counter| store.put(new_piece(*counter, false)).is_err()).unwrap();
    let weak: Weak<Store> = Arc::downgrade(&store);
    let deleted = Arc::new(Mutex::new(0));
    let count = deleted.clone();
    // Each tombstone takes a page: soon the active segment is full, and only the reserve is left.
    let delete = move || {
        let store = weak.upgrade().unwrap();
        let mut done = count.lock();
        while *done < 4.min(stored) {
            store.delete(vec![id(*done)]).unwrap();
            *done += 1;
        }
    };
    assert!(hook.set(Box::new(delete)).is_ok());
    store.verify_headers().unwrap();
    assert_eq!(*deleted.lock(), 4);
}
