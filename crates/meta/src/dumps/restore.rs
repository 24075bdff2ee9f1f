//! Fills an empty engine from a dump, and sees to it that nothing which was given out once is given out again.
//!
//! A dump is the past. What happened after it is lost, but its traces are about: blocks on data servers, sessions of
//! agents that still run, numbers that programs remember. So whatever is counted goes on far above where the dump left
//! it, what belonged to sessions stays behind, and a record tells the service to have unknown blocks collected.
//!
//! # Invariants
//! - The first record of a store being filled says so, and no service serves such a store; the last batch takes that
//!   back. So half a load is never mistaken for a store.
//! - The incarnation is higher than any that was ever given out, see [`floor`].

use std::collections::BTreeSet;
use std::io::Read;
use std::ops::ControlFlow;
use std::time::Duration;

use minicbor::Decode;
use torchfs_engine::dump::{Header, Reader, Trailer};
use torchfs_engine::{Batch, Change, Engine, Floor, KEY_MAX};
use torchfs_proto::attr::Time;
use torchfs_proto::key::{self, Parts, Space};
use torchfs_proto::record::{
    ClusterCounters, Counters, Format, LOADING, LayoutRecord, MAGIC, MUST_KNOW, Restored, VERSION,
};
use torchfs_proto::{Code, Fault, Fence, Incarnation, Result, Seq};

use super::ms;

/// More openings than there can have been between a dump and the loss of what came after it.
const OPENINGS: u32 = 1 << 16;
/// Fences of one load, before they reach those of a load a second later.
const FENCES: u64 = 1 << 20;
/// Sessions, and versions of the placement, that may have come after a dump.
const FAR: u64 = 1 << 32;
/// Data servers, layouts, volumes, and versions of groups that may have come after it.
const SOME: u32 = 1 << 16;
/// Inode numbers that are left out; old ones do harm no more, since no session remembers them.
const INODES: u64 = 1 << 20;
/// A batch is ordered when it has so many bytes.
const BATCH_BYTES: usize = 1 << 20;

/// What came of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Loaded {
    /// What the dump said before its frames.
    pub header: Header,
    /// And behind them.
    pub trailer: Trailer,
    /// The first incarnation that gives out ids again.
    pub incarnation: Incarnation,
    /// Changes taken in.
    pub changes: u64,
    /// Sessions that were left behind.
    pub sessions: u64,
}

/// What an engine must begin above to be filled from this dump. `known` is the highest incarnation that anybody knows
/// of: data servers that could be asked.
///
/// Every opening raises the incarnation by one, and takes more than a second on average. So an incarnation that is the
/// time in seconds (until 2106) is above all that were given out before, whether in this dump's line or by another load, and
/// even if nobody knows of them any more. If the dump or a server knows one that is not below the clock, the clock
/// stands wrong: then it is 65,536 openings above that one.
pub fn floor(header: &Header, trailer: &Trailer, known: Incarnation, wall_ns: i64) -> Result<Floor> {
    let seconds = ms(wall_ns) / 1_000;
    let spent = || Fault::new(Code::Invalid, "the cluster has used up its incarnations");
    let highest = header.incarnation.max(known).0;
    let incarnation = match u32::try_from(seconds) {
        Ok(seconds) if seconds > highest => seconds,
        _ => highest.checked_add(OPENINGS).ok_or_else(spent)?,
    };
    let fence = match seconds.saturating_mul(FENCES) {
        fence if fence > header.fence.0 => fence,
        _ => header.fence.0.checked_add(u64::from(OPENINGS)).ok_or_else(spent)?,
    };
    Ok(Floor { fence: Fence(fence), incarnation: Incarnation(incarnation), seq: trailer.seq })
}

/// Fills an engine that was opened above [`floor`]; `told` hears how many bytes of the dump are done.
///
/// The dump should have been read to its end before: what is found wrong here leaves a store that is not served.
pub fn load(engine: &dyn Engine, from: impl Read, wall_ns: i64, mut told: impl FnMut(u64)) -> Result<Loaded> {
    let mut reader = Reader::new(from)?;
    let header = *reader.header();
    check_empty(engine)?;
    if engine.cluster() != header.cluster || engine.incarnation() <= header.incarnation {
        return Err(Fault::new(Code::Internal, "the engine was not opened for this dump"));
    }
    let mut filling = Filling {
        engine,
        wall_ns,
        batch: Batch::at(wall_ns),
        bytes: 0,
        changes: 0,
        sessions: BTreeSet::new(),
        format: None,
    };
    let format = Format {
        magic: MAGIC,
        version: VERSION,
        must_know: LOADING,
        may_know: 0,
        cluster: header.cluster,
        made: Time::from_ns(wall_ns),
    };
    filling.put(key::format(), &format);
    filling.order()?;
    while let Some(changes) = reader.next()? {
        for change in changes {
            filling.change(change)?;
        }
        told(reader.bytes());
    }
    let trailer = reader.trailer().copied().unwrap_or_default();
    if engine.ordered() < trailer.seq {
        return Err(Fault::new(Code::Internal, "the engine was opened below the dump's last batch"));
    }
    let Some(format) = filling.format.take() else {
        return Err(Fault::new(
            Code::Corrupt,
            "the dump has no format record: it is not of a metadata store",
        ));
    };
    let incarnation = engine.incarnation();
    let restored = Restored {
        born: Seq(engine.ordered().0 + 1),
        from: trailer.seq,
        dumped: Time::from_ns(trailer.wall_ns),
        loaded: Time::from_ns(wall_ns),
        incarnation,
        swept: Vec::new(),
    };
    filling.order()?;
    filling.put(key::restored(), &restored);
    filling.put(key::format(), &format);
    let seq = filling.order()?;
    engine.wait_durable(seq, Duration::from_secs(600))?;
    Ok(Loaded {
        header,
        trailer,
        incarnation,
        changes: filling.changes,
        sessions: filling.sessions.len() as u64,
    })
}

/// Refuses an engine that holds anything.
fn check_empty(engine: &dyn Engine) -> Result<()> {
    let mut found = None;
    engine.scan(&[], &[u8::MAX; KEY_MAX + 1], false, &mut |key, value| {
        found = Some((key.to_vec(), value.to_vec()));
        ControlFlow::Break(())
    })?;
    let Some((first, value)) = found else { return Ok(()) };
    let unfinished = first == key::format()
        && minicbor::decode::<Format>(&value).is_ok_and(|format| format.must_know & LOADING != 0);
    Err(match unfinished {
        true => Fault::new(Code::Exists, "an earlier load into this engine was cut off"),
        false => Fault::new(Code::Exists, "the engine holds metadata already"),
    }
    .next("load into an empty one; nothing was changed"))
}

/// The batch being filled.
struct Filling<'a> {
    engine: &'a dyn Engine,
    wall_ns: i64,
    batch: Batch,
    bytes: usize,
    changes: u64,
    sessions: BTreeSet<Vec<u8>>,
    format: Option<Format>,
}

impl Filling<'_> {
    fn change(&mut self, change: Change) -> Result<()> {
        let parts = Parts::of(change.key());
        let space = parts.as_ref().and_then(|parts| Space::of(parts.space));
        let change = match (space, change) {
            // Sessions end here, with what was theirs; ranges of ids are covered by the search for unknown blocks.
            (Some(Space::Session), Change::Put(at, _)) => {
                self.sessions.insert(at);
                return Ok(());
            }
            (Some(Space::Session), Change::Delete(at)) => {
                self.sessions.remove(&at);
                return Ok(());
            }
            (Some(Space::Range | Space::Outcome | Space::Lock | Space::DeadRange | Space::Restored), _) => {
                return Ok(());
            }
            (Some(Space::Format), Change::Put(_, value)) => {
                let format: Format = decode("format", &value)?;
                if format.magic != MAGIC || format.version > VERSION || format.must_know & !MUST_KNOW != 0 {
                    let what = format!(
                        "the dump is of a store of version {} with features {:#x}, this program knows version {VERSION}",
                        format.version, format.must_know
                    );
                    return Err(
                        Fault::new(Code::Version, what).next("use a version of torchfs at least as new")
                    );
                }
                if format.cluster != self.engine.cluster() {
                    return Err(Fault::new(Code::Corrupt, "the dump's records are of another cluster"));
                }
                self.format = Some(format);
                return Ok(());
            }
            (Some(Space::ClusterCounters), Change::Put(at, value)) => {
                let mut counters: ClusterCounters = decode("cluster's counters", &value)?;
                counters.next_session = counters.next_session.saturating_add(FAR);
                counters.placement = counters.placement.saturating_add(FAR);
                counters.next_server = counters.next_server.saturating_add(SOME);
                counters.next_layout = counters.next_layout.saturating_add(SOME);
                counters.next_volume = counters.next_volume.max(1).saturating_add(SOME);
                Change::Put(at, torchfs_proto::msg::encode(&counters))
            }
            (Some(Space::Layout), Change::Put(at, value)) => {
                // Data servers may have heard of later versions of the groups, and refuse older ones; and pieces may have
                // moved since.
                let mut record: LayoutRecord = decode("layout", &value)?;
                for group in &mut record.layout.groups {
                    group.version = group.version.saturating_add(SOME);
                    group.dirty = true;
                }
                Change::Put(at, torchfs_proto::msg::encode(&record))
            }
            (Some(Space::Counters), Change::Put(at, value)) => {
                let mut counters: Counters = decode("volume's counters", &value)?;
                counters.next_ino = counters.next_ino.saturating_add(INODES);
                Change::Put(at, torchfs_proto::msg::encode(&counters))
            }
            (_, change) => change,
        };
        self.changes += 1;
        self.bytes += change.encoded_len();
        self.batch.changes.push(change);
        if self.bytes >= BATCH_BYTES {
            self.order()?;
        }
        Ok(())
    }

    fn put<T: minicbor::Encode<()>>(&mut self, at: Vec<u8>, record: &T) {
        self.batch.put(at, torchfs_proto::msg::encode(record));
    }

    /// Orders what was gathered.
    fn order(&mut self) -> Result<Seq> {
        if self.batch.is_empty() {
            return Ok(self.engine.ordered());
        }
        self.bytes = 0;
        let batch = std::mem::replace(&mut self.batch, Batch::at(self.wall_ns));
        Ok(self.engine.order(batch)?)
    }
}

fn decode<T: for<'b> Decode<'b, ()>>(what: &str, value: &[u8]) -> Result<T> {
    minicbor::decode(value).map_err(|error| {
        Fault::new(Code::Corrupt, format!("the dump's record of the {what} cannot be read: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_above_the_dump_the_clock_and_what_servers_know() {
        let header = Header { incarnation: Incarnation(7), fence: Fence(9), ..Header::default() };
        let trailer = Trailer { seq: Seq(55), ..Trailer::default() };
        let at = |header: &Header, known, wall_s: i64| {
            floor(header, &trailer, Incarnation(known), wall_s * 1_000_000_000).unwrap()
        };
        let now = 1_800_000_000;
        let first = at(&header, 0, now);
        assert_eq!(first.incarnation, Incarnation(1_800_000_000));
        assert_eq!((first.fence, first.seq), (Fence(1_800_000_000 << 20), Seq(55)));
        // The same dump a second later is above the first load, whoever remembers that.
        assert!(at(&header, 0, now + 1).incarnation > first.incarnation);
        assert!(at(&header, 0, now + 1).fence > first.fence);
        // A clock that lost its battery is caught by the dump and by the servers.
        assert_eq!(at(&header, 0, -5).incarnation, Incarnation(7 + OPENINGS));
        assert_eq!(at(&header, 1_800_000_009, now).incarnation.0, 1_800_000_009 + OPENINGS);
        assert_eq!(at(&header, 0, -5).fence, Fence(9 + u64::from(OPENINGS)));
        let last = Header { incarnation: Incarnation(u32::MAX), ..header };
        assert!(floor(&last, &trailer, Incarnation(0), 0).is_err());
    }
}
