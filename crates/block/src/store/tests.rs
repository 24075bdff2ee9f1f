//! Random work on a disk whose power goes at any moment, against an obvious model; then the named cases.

#![allow(clippy::unwrap_used)]

mod faults;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use torchfs_codec::{Compression, Encoded, decode_chunk, encode};
use torchfs_disk::{Op as DiskOp, SimDisk};
use torchfs_proto::disk::Disk;
use torchfs_proto::{BlockId, ClusterId, IdRange, LayoutId, ServerId};

use super::format::Use;
use super::index::Key;
use super::writer::Writer;
use super::{Body, Config, Dead, Found, NewPiece, Op, Store};
use crate::Error;

fn id(counter: u64) -> BlockId {
    BlockId { incarnation: 1 + (counter % 2) as u32, counter }
}

fn config() -> Config {
    Config {
        cluster: ClusterId(42),
        server: ServerId(7),
        segment_bytes: 64 << 10,
        keep_free: 0,
        batch_bytes: 24 << 10,
        compact_step: 4 << 10,
        ..Config::default()
    }
}

/// The content of a block follows from its id.
fn content(counter: u64, large: bool) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(counter);
    let len = if large && counter.is_multiple_of(3) {
        rng.random_range(60_000..140_000)
    } else {
        rng.random_range(1..6_000)
    };
    let mut bytes = vec![0; len];
    let noisy = rng.random_range(0..=len);
    rng.fill(&mut bytes[..noisy]);
    bytes
}

fn new_piece(counter: u64, large: bool) -> NewPiece {
    let data = Bytes::from(content(counter, large));
    let half = data.len() / 2;
    let parts = [data.slice(..half), data.slice(half..)];
    let encoded = encode(id(counter), &parts, Compression::Lz4).unwrap();
    NewPiece {
        block: id(counter),
        piece: (counter % 3) as u8,
        layout: LayoutId(5),
        first: 0,
        chunks: encoded.chunks,
        payload: encoded.payload,
    }
}

/// What a reader makes of what it gets: every chunk is checked.
fn decode(block: BlockId, found: &Found) -> Result<Vec<u8>, torchfs_codec::Error> {
    let stored = match &found.body {
        Body::Memory(bytes) => bytes.clone(),
        Body::File { file, offset, len } => {
            let mut bytes = vec![0; *len as usize];
            file.read_at(&mut bytes, *offset).unwrap();
            bytes.into()
        }
    };
    let mut at = 0;
    let mut out = Vec::new();
    for (index, chunk) in (found.first..).zip(&found.chunks) {
        let bytes = stored.slice(at..at + chunk.stored as usize);
        at += chunk.stored as usize;
        out.extend_from_slice(&decode_chunk(block, index, chunk, bytes)?);
    }
    Ok(out)
}

/// A store whose writer runs when the test says so.
struct Rig {
    store: Store,
    writer: Writer,
}

impl Rig {
    fn open(disk: &SimDisk, config: Config) -> Result<Rig, Error> {
        let (shared, writer) = super::open::open(Arc::new(disk.clone()), config)?;
        Ok(Rig { store: Store { shared, thread: None }, writer })
    }

    fn put(&mut self, counter: u64, large: bool) -> Result<(), Error> {
        let outcome = Arc::new(Mutex::new(None));
        let tell = outcome.clone();
        let op = Op::Put(new_piece(counter, large), Box::new(move |result| *tell.lock() = Some(result)));
        self.writer.run(vec![op]);
        outcome.lock().take().expect("every put is answered")
    }

    fn delete(&mut self, counters: &[u64]) -> Result<u64, Error> {
        self.bury(Dead::Blocks(counters.iter().map(|counter| id(*counter)).collect()))
    }

    fn drop_pieces(&mut self, counters: &[u64]) -> Result<u64, Error> {
        self.bury(Dead::Pieces(counters.iter().map(|counter| (id(*counter), (counter % 3) as u8)).collect()))
    }

    /// As if a scrub had found the piece damaged.
    fn damage(&self, counter: u64) {
        let (entry, ..) = self.store.shared.find(id(counter), (counter % 3) as u8).unwrap();
        self.store.shared.found_bad(Key::new(id(counter), (counter % 3) as u8), &entry, "the test says so");
    }

    fn keep_marks(&mut self) {
        self.writer.run(vec![Op::Marks(Box::new(|_| ()))]);
    }

    fn bury(&mut self, dead: Dead) -> Result<u64, Error> {
        let outcome = Arc::new(Mutex::new(None));
        let tell = outcome.clone();
        self.writer.run(vec![Op::Delete(dead, Box::new(move |result| *tell.lock() = Some(result)))]);
        outcome.lock().take().expect("every delete is answered")
    }

    fn read(&self, counter: u64) -> Result<Vec<u8>, Error> {
        let found = self.store.get(id(counter), (counter % 3) as u8, 0..u32::MAX)?;
        Ok(decode(id(counter), &found).expect("what is found is whole"))
    }

    fn check(&self, counter: u64, large: bool, there: bool) {
        match self.read(counter) {
            Ok(bytes) => {
                assert!(there, "block {counter} should be gone");
                assert!(bytes == content(counter, large), "block {counter} has other bytes");
            }
            Err(Error::Gone { block, server, .. }) => {
                assert_eq!((block, server), (id(counter), ServerId(7)));
                assert!(!there, "block {counter} is lost");
            }
            Err(error) => panic!("block {counter}: {error}"),
        }
    }
}

/// What may be found of a block after a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    There,
    Absent,
    Either,
}

#[test]
fn acknowledged_puts_and_deletes_survive_every_power_cut() {
    for seed in torchfs_fuzz::seeds(0, 1_500, 50_000) {
        // The name of the seed is all that is needed to see a failure again.
        let run = std::panic::catch_unwind(|| random_life(seed));
        if let Err(panic) = run {
            eprintln!("failed with TORCHFS_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// One store through several crashes.
fn random_life(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let large = rng.random_bool(0.1);
    let mut config = config();
    if large {
        config.segment_bytes = 512 << 10;
        config.batch_bytes = 200 << 10;
    }
    if rng.random_bool(0.5) {
        config.capacity = Some(config.segment_bytes * rng.random_range(4..9));
    }
    let mut disk = SimDisk::new(seed);
    let mut model = BTreeMap::<u64, Fate>::new();
    let names = rng.random_range(5..60);
    for _crash in 0..rng.random_range(1..6) {
        if rng.random_bool(0.8) {
            disk.power_off_after(rng.random_range(0..120));
        }
        // The power may go while the store is being opened.
        if let Ok(mut rig) = Rig::open(&disk, config.clone())
            && !disk.is_off()
        {
            settle(&rig, &mut model, large);
            for _ in 0..rng.random_range(1..25) {
                if disk.is_off() {
                    break;
                }
                random_batch(&mut rng, &mut rig, &mut model, names, large);
                for _ in 0..rng.random_range(0..4) {
                    rig.writer.maintain();
                }
                rig.store.shared.index.read().audit();
            }
        }
        disk = if rng.random_bool(0.2) { disk.crash() } else { disk.power_cut(rng.random()) };
    }
    let rig = Rig::open(&disk, config).unwrap();
    settle(&rig, &mut model, large);
    rig.store.shared.index.read().audit();
    let listed = rig.store.list(None, usize::MAX);
    assert_eq!(listed.len(), model.values().filter(|fate| **fate == Fate::There).count());
    assert!(listed.is_sorted_by_key(|piece| (piece.block, piece.piece)));
    for piece in listed {
        rig.store.verify(piece.block, piece.piece).unwrap();
    }
}

/// Everything promised is there; what was undecided is decided from now on.
fn settle(rig: &Rig, model: &mut BTreeMap<u64, Fate>, large: bool) {
    for (counter, fate) in model {
        if *fate == Fate::Either {
            let there = rig.store.get(id(*counter), (counter % 3) as u8, 0..1).is_ok();
            *fate = if there { Fate::There } else { Fate::Absent };
        }
        rig.check(*counter, large, *fate == Fate::There);
    }
}

/// What a test remembers of one operation: whose fate it decides, what the fate is then, and what was answered.
type Promise = (Vec<u64>, Fate, Arc<Mutex<Option<Result<(), Error>>>>);

fn random_batch(rng: &mut StdRng, rig: &mut Rig, model: &mut BTreeMap<u64, Fate>, names: u64, large: bool) {
    let mut ops = Vec::new();
    let mut promises: Vec<Promise> = Vec::new();
    let mut damaged = Vec::new();
    for _ in 0..rng.random_range(1..8) {
        let answer = Arc::new(Mutex::new(None));
        let tell = answer.clone();
        let counter = rng.random_range(0..names);
        match rng.random_range(0..10) {
            kind @ 0..7 => {
                // Some take the place of a damaged one, as a pull does.
                if kind == 0 && model.get(&counter) == Some(&Fate::There) {
                    rig.damage(counter);
                    damaged.push(counter);
                }
                let done = Box::new(move |result| *tell.lock() = Some(result));
                ops.push(Op::Put(new_piece(counter, large), done));
                promises.push((vec![counter], Fate::There, answer));
            }
            kind => {
                let counters: Vec<u64> = if kind < 9 {
                    (0..rng.random_range(1..5)).map(|_| rng.random_range(0..names)).collect()
                } else {
                    (counter..counter + 10)
                        .filter(|c| id(*c).incarnation == id(counter).incarnation)
                        .collect()
                };
                let dead = if kind < 8 {
                    Dead::Pieces(counters.iter().map(|c| (id(*c), (c % 3) as u8)).collect())
                } else if kind < 9 {
                    Dead::Blocks(counters.iter().map(|c| id(*c)).collect())
                } else {
                    Dead::Range(IdRange { first: id(counter), count: 10 }, [id(counter + 2)].into())
                };
                let counters: Vec<u64> =
                    counters.into_iter().filter(|c| kind < 9 || *c != counter + 2).collect();
                let done =
                    Box::new(move |result: Result<u64, Error>| *tell.lock() = Some(result.map(|_| ())));
                ops.push(Op::Delete(dead, done));
                promises.push((counters, Fate::Absent, answer));
            }
        }
    }
    // Somebody reads while all this is written.
    let reader = model.iter().find(|(_, fate)| **fate == Fate::There).map(|(counter, _)| *counter);
    let held = reader
        .filter(|c| !damaged.contains(c))
        .and_then(|c| Some((c, rig.store.get(id(c), (c % 3) as u8, 0..u32::MAX).ok()?)));
    rig.writer.run(ops);
    rig.writer.maintain();
    for counter in damaged {
        // The bytes were whole all the time; whoever was not healed says so when looked at.
        let _ = rig.store.verify(id(counter), (counter % 3) as u8);
    }
    if let Some((counter, found)) = held
        && rig.store.shared.disk.list().is_ok()
    {
        // The power is still on.
        assert!(decode(id(counter), &found).unwrap() == content(counter, large), "a held range changed");
    }
    for (counters, fate, answer) in promises {
        let answer = answer.lock().take().expect("every operation is answered");
        for counter in counters {
            let before = model.get(&counter).copied().unwrap_or(Fate::Absent);
            let after = match &answer {
                Ok(()) => fate,
                // Refused before anything was written.
                Err(Error::NoSpace { .. } | Error::Latched { .. }) if fate == Fate::There => before,
                Err(_) if before == fate => fate,
                Err(_) => Fate::Either,
            };
            model.insert(counter, after);
        }
    }
}

#[test]
fn the_same_piece_again_is_fine_and_another_one_under_its_name_is_refused() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    rig.put(1, false).unwrap();
    let ticks = disk.ticks();
    rig.put(1, false).unwrap();
    assert_eq!(disk.ticks(), ticks, "nothing was written twice");
    let mut other = new_piece(4, false);
    other.block = id(1);
    other.piece = 1;
    let answer = Arc::new(Mutex::new(None));
    let tell = answer.clone();
    rig.writer.run(vec![Op::Put(other, Box::new(move |result| *tell.lock() = Some(result)))]);
    assert!(matches!(answer.lock().take(), Some(Err(Error::Differs { .. }))));
    rig.check(1, false, true);
}

#[test]
fn flipped_bits_are_found_by_verify_and_by_the_reader() {
    for large in [false, true] {
        let disk = SimDisk::new(0);
        let config = Config { segment_bytes: 1 << 20, ..config() };
        let mut rig = Rig::open(&disk, config).unwrap();
        rig.put(3, large).unwrap();
        rig.put(6, large).unwrap();
        let (entry, ..) = rig.store.shared.find(id(3), 0).unwrap();
        let span = entry.span();
        let file = disk.open(&super::writer::segment_name(entry.segment)).unwrap();
        let mut rng = StdRng::seed_from_u64(9);
        for _ in 0..300 {
            let at = rng.random_range(entry.offset()..span.end);
            let in_padding = (entry.offset() + span.header as u64..span.payload).contains(&at);
            let mut byte = [0];
            file.read_at(&mut byte, at).unwrap();
            let flip = 1 << rng.random_range(0..8);
            file.write_at(&[byte[0] ^ flip], at).unwrap();
            let verified = rig.store.verify(id(3), 0);
            let read = rig.store.get(id(3), 0, 0..u32::MAX);
            let read = read.map(|found| decode(id(3), &found));
            if in_padding {
                assert!(verified.is_ok() && matches!(read, Ok(Ok(_))));
            } else {
                let Err(Error::Corrupt { block, server, .. }) = verified else { panic!("{verified:?}") };
                assert_eq!((block, server), (id(3), ServerId(7)));
                assert!(!matches!(read, Ok(Ok(_))), "offset {at}");
            }
            file.write_at(&byte, at).unwrap();
        }
        rig.store.verify(id(3), 0).expect("it is whole again");
        rig.check(3, large, true);
        rig.check(6, large, true);
    }
}

#[test]
fn a_damaged_segment_header_is_found_and_written_again() {
    let disk = SimDisk::new(0);
    let open = || Store::open(Arc::new(disk.clone()), config()).unwrap();
    let store = open();
    for counter in 0..60 {
        store.put(new_piece(counter, false)).unwrap();
    }
    let segments: Vec<u32> = store.shared.index.read().segments.keys().copied().collect();
    assert!(segments.len() > 1);
    assert_eq!(store.verify_headers().unwrap(), 0);
    for number in &segments {
        let file = disk.open(&super::writer::segment_name(*number)).unwrap();
        [0, 4096].into_iter().for_each(|slot| file.write_at(&[0xff; 64], slot).unwrap());
    }
    // The writer may have written some of them again for reasons of its own.
    assert!(store.verify_headers().unwrap() > 0);
    assert_eq!(store.verify_headers().unwrap(), 0);
    drop(store);
    // Everything is found at the next start.
    let store = open();
    for counter in 0..60 {
        store.verify(id(counter), (counter % 3) as u8).unwrap();
    }
}

#[test]
fn damage_in_the_middle_loses_that_record_only() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    for counter in 0..30 {
        rig.put(counter, false).unwrap();
    }
    let (entry, ..) = rig.store.shared.find(id(4), 1).unwrap();
    let file = disk.open(&super::writer::segment_name(entry.segment)).unwrap();
    file.write_at(&[0xff; 100], entry.offset()).unwrap();
    drop(rig);
    let rig = Rig::open(&disk, config()).unwrap();
    for counter in 0..30 {
        rig.check(counter, false, counter != 4);
    }
    assert_eq!(rig.store.stat().unwrap().damaged, 1);
}

#[test]
fn a_full_disk_refuses_puts_and_still_deletes() {
    for capped_by_store in [true, false] {
        let disk = SimDisk::new(0);
        let mut config = config();
        if capped_by_store {
            config.capacity = Some(10 * config.segment_bytes);
        } else {
            disk.set_capacity(10 * config.segment_bytes + 1000);
        }
        let mut rig = Rig::open(&disk, config).unwrap();
        let mut stored = 0;
        while rig.put(stored, false).is_ok() {
            stored += 1;
        }
        assert!(matches!(rig.put(stored, false), Err(Error::NoSpace { server: ServerId(7) })));
        assert!(stored > 50);
        let stat = rig.store.stat().unwrap();
        assert_eq!((stat.free, stat.total), (0, stat.used), "what is refused is not free");
        for round in 0..6 {
            // Every third piece dies: nothing is half dead, and yet the space comes back.
            let there = |c: &u64| rig.read(*c).is_ok();
            let dead: Vec<u64> = (0..stored).filter(|c| c % 3 == round % 3).filter(there).collect();
            assert_eq!(rig.delete(&dead).unwrap(), dead.len() as u64);
            let stat = rig.store.stat().unwrap();
            assert!(stat.free > 0 && stat.total == stat.used + stat.free, "{stat:?}");
            while rig.writer.maintain() {}
            rig.store.shared.index.read().audit();
            let back = dead.iter().filter(|counter| rig.put(**counter, false).is_ok()).count();
            assert!(back * 10 > dead.len() * 7, "{back} of {} fit again", dead.len());
        }
    }
}

#[test]
fn a_power_cut_at_any_moment_of_a_pull_a_drop_or_an_emptying_loses_nothing() {
    // The same life over and over, with the power going one operation later each time.
    for cut in 0.. {
        let disk = SimDisk::new(cut);
        let config = Config { capacity: Some(7 * (64 << 10)), ..config() };
        let mut rig = Rig::open(&disk, config.clone()).unwrap();
        for counter in 0..60 {
            rig.put(counter, false).unwrap();
        }
        disk.power_off_after(cut);
        let mut model: BTreeMap<u64, Fate> = (0..60).map(|counter| (counter, Fate::There)).collect();
        let mut end = false;
        for round in 0..4 {
            let of_round: Vec<u64> = (0..60).filter(|c| c % 4 == round).collect();
            for counter in &of_round {
                if round < 2 && model[counter] == Fate::There {
                    // Pulled over a damaged one: the old bytes are whole here, so it is there either way.
                    rig.damage(*counter);
                    let _ = rig.put(*counter, false);
                }
            }
            let dropped = rig.drop_pieces(&of_round).is_ok();
            let fate = if dropped { Fate::Absent } else { Fate::Either };
            model.extend(of_round.iter().map(|counter| (*counter, fate)));
            while rig.writer.maintain() {}
            let again: Vec<u64> = of_round.into_iter().filter(|c| c % 3 == 0).collect();
            for counter in again {
                let fate = if rig.put(counter, false).is_ok() { Fate::There } else { Fate::Either };
                model.insert(counter, fate);
            }
            while rig.writer.maintain() {}
            end = !disk.is_off();
        }
        let rig = Rig::open(&disk.power_cut(cut), config).unwrap();
        settle(&rig, &mut model, false);
        rig.store.shared.index.read().audit();
        for piece in rig.store.list(None, usize::MAX) {
            rig.store.verify(piece.block, piece.piece).unwrap();
        }
        if end {
            assert!(cut > 100, "the life has only {cut} operations");
            break;
        }
    }
}

#[test]
fn a_damaged_piece_is_kept_and_not_served_until_a_good_one_is_there() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    for counter in 0..20 {
        rig.put(counter, false).unwrap();
    }
    let (entry, ..) = rig.store.shared.find(id(7), 1).unwrap();
    let name = super::writer::segment_name(entry.segment);
    let file = disk.open(&name).unwrap();
    let mut byte = [0];
    file.read_at(&mut byte, entry.span().payload).unwrap();
    file.write_at(&[byte[0] ^ 1], entry.span().payload).unwrap();
    assert!(matches!(rig.store.verify(id(7), 1), Err(Error::Corrupt { .. })));
    assert!(!rig.store.has(id(7), 1));
    assert_eq!(rig.store.bad(10), [], "nobody is told before the mark is durable");
    rig.keep_marks();
    assert_eq!(rig.store.bad(10), [(id(7), 1)]);
    for read in [rig.store.get(id(7), 1, 0..1), rig.store.load(id(7), 1, 0..1)] {
        assert!(matches!(read, Err(Error::Corrupt { .. })));
    }
    assert!(matches!(rig.store.get_now(id(7), 1, 0..1), Ok(None)), "it is looked at first");
    // Emptying its segment carries it along as it is: the rest of it may be needed to save something.
    rig.delete(&(8..20).collect::<Vec<_>>()).unwrap();
    while rig.writer.maintain() {}
    assert!(rig.store.stored(id(7), 1).is_some() && !rig.store.has(id(7), 1));
    rig.put(7, false).unwrap();
    rig.check(7, false, true);
    assert!(rig.store.bad(10).is_empty());
    rig.store.shared.index.read().audit();
    let rig = Rig::open(&disk.power_cut(3), config()).unwrap();
    for counter in 0..8 {
        rig.check(counter, false, true);
        rig.store.verify(id(counter), (counter % 3) as u8).unwrap();
    }
}

#[test]
fn a_segment_with_an_unreadable_piece_is_used_again_when_that_is_deleted() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    let first = {
        rig.put(0, false).unwrap();
        rig.store.shared.find(id(0), 0).unwrap().0
    };
    let sealed = |rig: &Rig| {
        let index = rig.store.shared.index.read();
        matches!(index.segments[&first.segment].header.state, Use::Sealed(_))
    };
    let mut last = 0;
    while !sealed(&rig) {
        last += 1;
        rig.put(last, false).unwrap();
    }
    let file = disk.open(&super::writer::segment_name(first.segment)).unwrap();
    file.write_at(&[0xff; 64], first.offset()).unwrap();
    rig.delete(&(1..=last).collect::<Vec<_>>()).unwrap();
    while rig.writer.maintain() {}
    assert!(sealed(&rig), "what cannot be read is kept as it is");
    rig.delete(&[0]).unwrap();
    while rig.writer.maintain() {}
    assert!(!sealed(&rig), "nothing in it is needed");
    rig.store.shared.index.read().audit();
}

#[test]
fn a_damaged_piece_stays_marked_over_power_cuts_until_a_good_one_is_there() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    for counter in 0..20 {
        rig.put(counter, false).unwrap();
    }
    for counter in [7, 8, 9] {
        rig.damage(counter);
    }
    rig.keep_marks();
    // One is deleted and one healed; the third waits.
    rig.delete(&[8]).unwrap();
    rig.put(9, false).unwrap();
    for seed in 0..40 {
        let mut rig = Rig::open(&disk.power_cut(seed), config()).unwrap();
        rig.store.shared.index.read().audit();
        assert_eq!(rig.store.bad(10), [(id(7), 1)]);
        assert!(!rig.store.has(id(7), 1) && rig.store.has(id(9), 0) && rig.store.stored(id(8), 2).is_none());
        // A mark that is out of date ends with the first look.
        rig.store.verify(id(7), 1).unwrap();
        assert!(rig.store.has(id(7), 1));
        rig.damage(7);
        rig.keep_marks();
        rig.put(7, false).unwrap();
        rig.check(7, false, true);
        assert_eq!(rig.store.bad(10), []);
    }
    // Without its list the store opens, and a scrub finds everything again.
    let disk = disk.power_cut(40);
    disk.open("damaged").unwrap().write_at(b"torn", 0).unwrap();
    let rig = Rig::open(&disk, config()).unwrap();
    assert_eq!(rig.store.bad(10), []);
    rig.check(7, false, true);
}

#[test]
fn the_whole_chunks_of_a_damaged_piece_are_served_and_no_other() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, Config { segment_bytes: 1 << 20, ..config() }).unwrap();
    let mut data = vec![0; 300_000];
    StdRng::seed_from_u64(5).fill(&mut data[..]);
    let encoded = encode(id(8), &[data.clone().into()], Compression::None).unwrap();
    let Encoded { chunks, payload } = encoded;
    let piece = NewPiece { block: id(8), piece: 0, layout: LayoutId(1), first: 0, chunks, payload };
    rig.writer.run(vec![Op::Put(piece, Box::new(|result| result.unwrap()))]);
    let (entry, ..) = rig.store.shared.find(id(8), 0).unwrap();
    let file = disk.open(&super::writer::segment_name(entry.segment)).unwrap();
    let at = entry.span().payload + 100_000;
    file.write_at(&[data[100_000] ^ 16], at).unwrap();
    assert!(rig.store.verify(id(8), 0).is_err());
    for chunk in 0..5 {
        let read = rig.store.load(id(8), 0, chunk..chunk + 1);
        match (chunk, read) {
            (1, Err(Error::Corrupt { .. })) => {}
            (1, _) => panic!("the damaged chunk was served"),
            (_, read) => {
                let range = (chunk as usize) << 16..data.len().min((chunk as usize + 1) << 16);
                assert!(decode(id(8), &read.unwrap()).unwrap() == data[range]);
            }
        }
    }
    assert!(matches!(rig.store.load(id(8), 0, 0..5), Err(Error::Corrupt { .. })));
    assert!(rig.store.get(id(8), 0, 2..5).is_ok());
}

#[test]
fn a_full_disk_keeps_its_reserve_for_deletes_when_pieces_are_pulled_to_it() {
    let disk = SimDisk::new(0);
    let config = Config { capacity: Some(8 * (64 << 10)), ..config() };
    let mut rig = Rig::open(&disk, config.clone()).unwrap();
    let mut stored = 0;
    while rig.put(stored, false).is_ok() {
        stored += 1;
    }
    // Even the good copies of damaged pieces do not get at the reserve.
    let damaged: Vec<u64> = (0..stored).filter(|c| c % 5 == 0).collect();
    damaged.iter().for_each(|counter| rig.damage(*counter));
    let healed = damaged.iter().filter(|counter| rig.put(**counter, false).is_ok()).count();
    assert!(healed < damaged.len(), "{healed} of {}", damaged.len());
    assert!(matches!(rig.put(stored, false), Err(Error::NoSpace { .. })));
    let dead: Vec<u64> = (0..stored).filter(|c| c % 2 == 1).collect();
    assert_eq!(rig.delete(&dead).unwrap(), dead.len() as u64);
    while rig.writer.maintain() {}
    for counter in &damaged {
        if rig.store.stored(id(*counter), (counter % 3) as u8).is_some() {
            rig.put(*counter, false).unwrap();
        }
    }
    let rig = Rig::open(&disk.power_cut(1), config).unwrap();
    for counter in 0..stored {
        rig.check(counter, false, !dead.contains(&counter));
    }
}

#[test]
fn a_disk_whose_segments_are_gone_is_taken_out() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    rig.put(1, false).unwrap();
    rig.store.probe();
    assert_eq!(rig.store.failure(), None);
    for name in disk.list().unwrap() {
        disk.remove(&name).unwrap();
    }
    rig.store.probe();
    assert!(rig.store.failure().is_some());
    assert!(matches!(rig.put(2, false), Err(Error::Latched { .. })));
}

#[test]
fn a_disk_that_refuses_to_make_files_is_not_a_full_one() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    // Read-only.
    disk.fail(DiskOp::Name, 0, 30);
    let refused = (0..100).find_map(|counter| rig.put(counter, false).err()).unwrap();
    assert!(matches!(refused, Error::Io { .. }), "{refused}");
    assert!(rig.store.failure().is_some());
}

#[test]
fn the_cursor_of_the_scrub_survives() {
    let disk = SimDisk::new(0);
    let rig = Rig::open(&disk, config()).unwrap();
    assert_eq!(rig.store.load_cursor(), super::Cursor::default());
    let cursor = super::Cursor { after: Some((id(9), 2)), began_secs: 77 };
    rig.store.store_cursor(&cursor).unwrap();
    let rig = Rig::open(&disk.power_cut(5), config()).unwrap();
    assert_eq!(rig.store.load_cursor(), cursor);
}

#[test]
fn a_failed_sync_latches_the_disk_and_reads_go_on() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, config()).unwrap();
    rig.put(1, false).unwrap();
    disk.fail(DiskOp::Sync, 0, 5);
    assert!(matches!(rig.put(2, false), Err(Error::Io { .. })));
    assert!(matches!(rig.put(3, false), Err(Error::Latched { .. })));
    assert!(matches!(rig.delete(&[1]), Err(Error::Latched { .. })));
    rig.check(1, false, true);
    rig.check(2, false, false);
    assert!(!rig.writer.maintain());
}

#[test]
fn a_held_range_keeps_its_segment_from_being_written_again() {
    let disk = SimDisk::new(0);
    let config = Config { segment_bytes: 256 << 10, capacity: Some(6 * (256 << 10)), ..config() };
    let mut rig = Rig::open(&disk, config).unwrap();
    let large = (0..).map(|c| c * 3).find(|c| content(*c, true).len() > 100_000).unwrap();
    rig.put(large, true).unwrap();
    let held = rig.store.get(id(large), 0, 0..u32::MAX).unwrap();
    assert!(matches!(held.body, Body::File { .. }));
    rig.delete(&[large]).unwrap();
    for counter in 1000..1200 {
        rig.put(counter, true).unwrap();
        rig.delete(&[counter]).unwrap();
        while rig.writer.maintain() {}
    }
    assert!(decode(id(large), &held).unwrap() == content(large, true));
}

#[test]
fn tombstones_do_not_pile_up() {
    let disk = SimDisk::new(0);
    let config = Config { capacity: Some(8 * (64 << 10)), ..config() };
    let mut rig = Rig::open(&disk, config.clone()).unwrap();
    // One piece that lives forever, in the first segment.
    rig.put(0, false).unwrap();
    for round in 1..3_000 {
        rig.put(round, false).unwrap();
        rig.delete(&[round]).unwrap();
        rig.writer.maintain();
    }
    rig.check(0, false, true);
    drop(rig);
    let rig = Rig::open(&disk.crash(), config).unwrap();
    assert_eq!(rig.store.list(None, 10).len(), 1);
    rig.check(0, false, true);
}

#[test]
fn parts_of_a_piece_are_found_by_their_chunks() {
    let disk = SimDisk::new(0);
    let mut rig = Rig::open(&disk, Config { segment_bytes: 2 << 20, ..config() }).unwrap();
    let data: Vec<u8> = (0..1_000_000u32).map(|i| (i / 7) as u8).collect();
    let encoded = encode(id(8), &[data.clone().into()], Compression::Zstd(1)).unwrap();
    let piece = NewPiece {
        block: id(8),
        piece: 0,
        layout: LayoutId(1),
        first: 0,
        chunks: encoded.chunks,
        payload: encoded.payload,
    };
    rig.writer.run(vec![Op::Put(piece, Box::new(|result| result.unwrap()))]);
    for (from, to) in [(0, 1), (3, 5), (15, 16), (14, 99), (16, 20), (0, u32::MAX)] {
        let found = rig.store.get(id(8), 0, from..to).unwrap();
        let bytes = decode(id(8), &found).unwrap();
        let range = |chunk: u32| (chunk as usize).saturating_mul(64 << 10).min(data.len());
        assert!(bytes == data[range(from)..range(to)], "chunks {from} to {to}");
    }
}

#[test]
fn segments_of_another_cluster_are_refused_by_name() {
    let disk = SimDisk::new(0);
    drop(Rig::open(&disk, config()).unwrap());
    let other = Config { cluster: ClusterId(43), ..config() };
    let Err(Error::Foreign { why, .. }) = Rig::open(&disk, other) else { panic!("accepted") };
    assert!(why.contains("cluster 42"), "{why}");
}

#[test]
fn many_threads_share_one_sync() {
    let disk = SimDisk::new(0);
    let store = Arc::new(Store::open(Arc::new(disk.clone()), config()).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..50 {
                    let counter = thread * 1000 + n;
                    store.put(new_piece(counter, false)).unwrap();
                    if n % 3 == 0 {
                        assert_eq!(store.delete(vec![id(counter)]).unwrap(), 1);
                    }
                }
            });
        }
    });
    drop(store);
    let disk = disk.power_cut(1);
    let rig = Rig::open(&disk, config()).unwrap();
    for thread in 0..8u64 {
        for n in 0..50 {
            rig.check(thread * 1000 + n, false, n % 3 != 0);
        }
    }
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let store = Store::open(Arc::new(SimDisk::new(0)), config()).unwrap();
    let mut short = new_piece(1, false);
    short.payload.pop();
    assert!(matches!(store.put(short), Err(Error::Invalid { .. })));
    let mut none = new_piece(1, false);
    none.chunks.clear();
    none.payload.clear();
    assert!(matches!(store.put(none), Err(Error::Invalid { .. })));
    let large = (0..).map(|c| c * 3).find(|c| content(*c, true).len() > 70_000).unwrap();
    assert!(matches!(store.put(new_piece(large, true)), Err(Error::Invalid { .. })));
}

#[test]
fn bytes_in_parts_are_checked_wherever_the_parts_begin() {
    let data = Bytes::from((0..200_000u32).map(|i| (i * 7 + i / 251) as u8).collect::<Vec<u8>>());
    let chunks = encode(id(1), std::slice::from_ref(&data), Compression::None).unwrap().chunks;
    for cuts in [vec![], vec![1], vec![65_535, 65_537, 131_072], vec![0, 70_000, 70_000]] {
        let ends = cuts.iter().copied().chain([data.len()]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let parts: Vec<Bytes> = starts.zip(ends).map(|(from, to)| data.slice(from..to)).collect();
        let check =
            |parts: &[Bytes]| super::check_parts(id(1), 0, &chunks, parts.iter().map(|part| &part[..]));
        assert!(check(&parts).is_ok(), "{cuts:?}");
        let mut damaged = parts.clone();
        let mut last = damaged.pop().unwrap().to_vec();
        *last.last_mut().unwrap() ^= 1;
        damaged.push(last.into());
        assert!(check(&damaged).is_err(), "{cuts:?}");
        assert!(check(&parts[..parts.len() - 1]).is_err(), "{cuts:?}");
    }
}
