//! Dumps: what went in comes out, and whatever is not whole is refused.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use torchfs_engine::dump::{self, HEADER, Header, Reader, Writer};
use torchfs_engine::{
    Batch, Change, ClusterId, Config, Embedded, Engine, Error, Fence, Floor, Incarnation, Seq,
};

fn header() -> Header {
    Header {
        cluster: ClusterId(0xfeed),
        incarnation: Incarnation(3),
        fence: Fence(5),
        seq: Seq(100),
        wall_ns: -7,
        pairs: 2,
    }
}

/// A dump of these pairs.
fn dump_of(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut writer = Writer::new(&header()).unwrap();
    for (key, value) in pairs {
        writer.put(key, value).unwrap();
    }
    writer.finish(Seq(101), 9).unwrap();
    writer.take()
}

fn read(bytes: &[u8]) -> Result<Vec<Change>, Error> {
    let mut reader = Reader::new(bytes)?;
    let mut changes = Vec::new();
    while let Some(frame) = reader.next()? {
        changes.extend(frame);
    }
    assert!(reader.trailer().is_some(), "the end was not read");
    Ok(changes)
}

fn pairs(count: usize, seed: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..count)
        .map(|n| {
            let mut value = vec![0; rng.random_range(0..300)];
            rng.fill(&mut value[..]);
            (format!("key {n:08}").into_bytes(), value)
        })
        .collect()
}

#[test]
fn what_was_dumped_is_read_back_in_its_order() {
    let pairs = pairs(20_000, 1);
    let bytes = dump_of(&pairs);
    let (told, trailer) = dump::check(&bytes[..], |_| {}).unwrap();
    assert_eq!(told, header());
    assert!(trailer.frames > 3, "several frames are needed for this test: {trailer:?}");
    assert_eq!((trailer.seq, trailer.wall_ns, trailer.changes), (Seq(101), 9, 20_000));
    let changes = read(&bytes).unwrap();
    let wanted: Vec<Change> = pairs.into_iter().map(|(key, value)| Change::Put(key, value)).collect();
    assert!(changes == wanted);
}

#[test]
fn every_flipped_byte_is_detected() {
    let bytes = dump_of(&pairs(40, 2));
    read(&bytes).unwrap();
    for at in 0..bytes.len() {
        for bit in [1, 0x80] {
            let mut broken = bytes.clone();
            broken[at] ^= bit;
            read(&broken).expect_err(&format!("byte {at} of {}", bytes.len()));
        }
    }
}

#[test]
fn every_truncation_and_every_addition_is_refused() {
    let bytes = dump_of(&pairs(40, 3));
    for len in 0..bytes.len() {
        let error = read(&bytes[..len]).expect_err("cut off").to_string();
        assert!(error.contains("cut off") || len < 8, "{len}: {error}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(read(&longer).unwrap_err().to_string().contains("follows"));
}

#[test]
fn a_frame_left_out_or_moved_is_detected() {
    let bytes = dump_of(&pairs(20_000, 4));
    let frame = |at: usize| 32 + u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
    let (first, second) = (frame(HEADER), frame(HEADER + frame(HEADER)));
    let mut without = bytes.clone();
    without.drain(HEADER..HEADER + first);
    read(&without).unwrap_err();
    let mut swapped = bytes[..HEADER].to_vec();
    swapped.extend_from_slice(&bytes[HEADER + first..HEADER + first + second]);
    swapped.extend_from_slice(&bytes[HEADER..HEADER + first]);
    swapped.extend_from_slice(&bytes[HEADER + first + second..]);
    read(&swapped).unwrap_err();
}

#[test]
fn garbage_is_refused_and_takes_no_memory() {
    let good = dump_of(&pairs(300, 5));
    let mut rng = SmallRng::seed_from_u64(6);
    for round in 0..20_000 {
        let mut bytes = good[..HEADER].to_vec();
        match round % 3 {
            // Noise behind a good header.
            0 => {
                let mut noise = vec![0; rng.random_range(0..200)];
                rng.fill(&mut noise[..]);
                bytes.extend_from_slice(&noise);
            }
            // A frame whose header fits its checksum and claims anything.
            1 => {
                let mut frame = [0; 32];
                rng.fill(&mut frame[4..28]);
                frame[..4].copy_from_slice(b"TFDF");
                frame[16..24].fill(0);
                let sum = crc32c::crc32c(&frame[..28]);
                frame[28..].copy_from_slice(&sum.to_le_bytes());
                bytes.extend_from_slice(&frame);
            }
            // A good dump with noise somewhere.
            _ => {
                bytes = good.clone();
                let at = rng.random_range(0..bytes.len());
                let end = (at + rng.random_range(1..64)).min(bytes.len());
                let before = bytes[at..end].to_vec();
                rng.fill(&mut bytes[at..end]);
                if bytes[at..end] == before[..] {
                    continue;
                }
            }
        }
        read(&bytes).expect_err("garbage");
    }
}

#[test]
fn a_later_version_is_refused_with_a_sentence() {
    let mut bytes = dump_of(&[]);
    bytes[8] = 2;
    let error = read(&bytes).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("at least as new"), "{error}");
}

#[test]
fn an_engine_is_dumped_as_of_one_batch_and_another_one_begins_above_it() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut wanted = BTreeMap::new();
    let mut bytes = Vec::new();
    let (told, trailer) = {
        let engine = Embedded::open(from.path(), Config::default()).unwrap();
        for n in 0..500u32 {
            let (key, value) = (n.to_be_bytes().to_vec(), vec![n as u8; (n % 90) as usize]);
            wanted.insert(key.clone(), value.clone());
            let mut batch = Batch::at(i64::from(n));
            batch.put(key, value).put("gone", "x");
            engine.order(batch).unwrap();
        }
        let mut batch = Batch::at(500);
        batch.delete("gone");
        engine.order(batch).unwrap();
        dump::store(&engine, 1, &mut bytes, |_| {}).unwrap()
    };
    assert_eq!((told.incarnation, trailer.seq, trailer.changes), (Incarnation(1), Seq(501), 500));

    let floor = Floor { fence: Fence(1 << 40), incarnation: Incarnation(70_000), seq: trailer.seq };
    let config = || Config { cluster: Some(told.cluster), floor: Some(floor), ..Config::default() };
    {
        let engine = Embedded::open(to.path(), config()).unwrap();
        assert_eq!((engine.incarnation(), engine.fence()), (Incarnation(70_001), Fence((1 << 40) + 1)));
        assert_eq!((engine.ordered(), engine.durable()), (Seq(501), Seq(501)));
        let mut batch = Batch::at(2);
        batch.changes = read(&bytes).unwrap();
        let seq = engine.order(batch).unwrap();
        assert_eq!(seq, Seq(502));
        engine.wait_durable(seq, Duration::from_secs(60)).unwrap();
    }
    // An ordinary opening goes on from there, and a floor moves no order that has begun.
    for floor in [None, Some(Floor { seq: Seq(9_000), ..Floor::default() })] {
        let engine = Embedded::open(to.path(), Config { floor, ..Config::default() }).unwrap();
        assert_eq!(engine.cluster(), told.cluster);
        assert!(engine.incarnation() > Incarnation(70_001) && engine.fence() > Fence((1 << 40) + 1));
        assert_eq!(engine.ordered(), Seq(502));
        let mut found = BTreeMap::new();
        engine
            .scan(&[], &[0xff; 8], false, &mut |key, value| {
                found.insert(key.to_vec(), value.to_vec());
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        assert!(found == wanted);
    }
}

#[test]
fn a_floor_holds_over_a_crash_before_the_first_batch() {
    let folder = tempfile::tempdir().unwrap();
    let floor = Floor { fence: Fence(9), incarnation: Incarnation(9), seq: Seq(77) };
    let config = |floor| Config { floor, ..Config::default() };
    drop(Embedded::open(folder.path(), config(Some(floor))).unwrap());
    let engine = Embedded::open(folder.path(), config(None)).unwrap();
    assert_eq!((engine.ordered(), engine.incarnation()), (Seq(77), Incarnation(11)));
    let mut batch = Batch::at(0);
    batch.put("a", "b");
    let seq = engine.order(batch).unwrap();
    assert_eq!(seq, Seq(78));
    engine.wait_durable(seq, Duration::from_secs(60)).unwrap();
}
