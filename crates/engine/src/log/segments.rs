//! The log on the local disk: a set of preallocated files (segments) that are filled one after the other and used again.
//!
//! A segment is written with zeros once, when it is made, so that later appends change no file-system metadata and a
//! sync costs one flush. A group of records is one write and one sync; it starts on a page of its own.
//!
//! # Invariants
//! - A segment's new generation is durable before the first record of that generation is written; records of older
//!   generations in the same file are never read again.
//! - Segments are used in the order of their generations, and all records in one are durable before the next gets
//!   its first. So at most one segment has a tail that a power cut can tear.
//! - The fence of records never falls along the log: what a torn tail left behind cannot follow what was written
//!   over it later.
//! - A segment is used again only when the replica holds all of its batches durably.
//!
//! # Not here
//! - Threads, waiting and latching: the caller's. After an error that is not a lack of space the log must not be used.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use torchfs_proto::Seq;
use torchfs_proto::disk::{Disk, DiskFile};

use super::format::{HeaderPage, Kind, Mark, PAGE, RECORDS_AT, Record, Writer, stored_len};
use super::{Appended, Log, Wants};
use crate::batch::BODY_MAX;
use crate::error::{Error, Result};

/// How large the log is.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Bytes of one segment, headers included; takes effect for segments that are made.
    pub segment_bytes: u64,
    /// How many segments there are from the start, at least 2.
    pub segments_min: usize,
    /// How many there may be.
    pub segments_max: usize,
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig { segment_bytes: 8 << 20, segments_min: 2, segments_max: 8 }
    }
}

/// No segment longer than this is believed.
pub(super) const SEGMENT_MAX: u64 = 1 << 30;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The open log.
pub struct Segments {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) config: LogConfig,
    pub(super) writer: Writer,
    pub(super) tail: Mutex<Tail>,
    pub(super) pool: Mutex<Pool>,
}

/// Where appends go. Locked during a write and its sync.
pub(super) struct Tail {
    pub(super) segment: Segment,
    /// Where the next group starts.
    pub(super) at: usize,
    /// The last batch in this segment; 0 if there is none.
    pub(super) last: Seq,
    pub(super) group: Vec<u8>,
}

/// The segments that do not take appends. Locked for moments only.
pub(super) struct Pool {
    /// Ready to take appends, in order of their generations.
    pub(super) ready: VecDeque<Segment>,
    /// Full ones with their last batch, oldest first.
    pub(super) full: VecDeque<(Segment, Seq)>,
    pub(super) next_generation: u64,
    pub(super) next_number: u32,
    pub(super) count: usize,
    pub(super) bytes: u64,
    /// Room in the tail's segment, as of the last append.
    pub(super) tail_room: usize,
}

pub(super) struct Segment {
    pub(super) number: u32,
    pub(super) file: Arc<dyn DiskFile>,
    pub(super) generation: u64,
    /// Which slot holds the header of this generation.
    pub(super) slot: usize,
    pub(super) len: usize,
}

impl Log for Segments {
    fn body_max(&self) -> usize {
        let len = usize::try_from(self.config.segment_bytes).unwrap_or(usize::MAX);
        BODY_MAX.min(len.saturating_sub(RECORDS_AT + stored_len(0)))
    }

    /// Writes as many of the records as the tail's segment takes.
    fn append(&self, records: &VecDeque<Record>, durable: Seq) -> Result<Appended> {
        let mut tail = self.tail.lock();
        let Some(first) = records.front() else { return Ok(Appended::Durable(0)) };
        while tail.at + first.stored_len() > tail.segment.len {
            let mut pool = self.pool.lock();
            let Some(next) = pool.ready.pop_front() else { return Ok(Appended::Full) };
            let last = std::mem::take(&mut tail.last);
            let full = std::mem::replace(&mut tail.segment, next);
            pool.full.push_back((full, last));
            pool.tail_room = tail.segment.len - RECORDS_AT;
            tail.at = RECORDS_AT;
        }

        let mut group = std::mem::take(&mut tail.group);
        group.clear();
        let mut count = 0;
        let mut last = tail.last;
        for record in records {
            if tail.at + group.len() + record.stored_len() > tail.segment.len {
                break;
            }
            record.encode(&mut group, &self.writer, tail.segment.generation, durable);
            last = record.seq;
            count += 1;
        }
        // Whole pages: nothing has to be read back to write them, and nothing durable is written again.
        let padded = group.len().next_multiple_of(PAGE).min(tail.segment.len - tail.at);
        group.resize(padded, 0);
        let name = name(tail.segment.number);
        let written = tail
            .segment
            .file
            .write_at(&group, tail.at as u64)
            .map_err(Error::io(format!("cannot write {name}")));
        tail.group = group;
        written?;
        tail.segment.file.sync().map_err(|e| latching(&name, e))?;
        tail.at += padded;
        tail.last = last;
        self.pool.lock().tail_room = tail.segment.len.saturating_sub(tail.at);
        Ok(Appended::Durable(count))
    }

    /// Without using a segment again.
    fn fits(&self, bytes: usize, longest: usize, groups: usize) -> bool {
        let pool = self.pool.lock();
        let room = |segment: &Segment| segment.len - RECORDS_AT;
        if bytes == longest
            && (bytes <= pool.tail_room || pool.ready.iter().any(|segment| bytes <= room(segment)))
        {
            return true;
        }
        let ready: usize = pool.ready.iter().map(room).sum();
        let switches = pool.ready.len();
        // Each group may leave a page unfilled, each switch as much as the record that did not fit, and a page.
        bytes + (groups + switches) * PAGE + switches * longest <= pool.tail_room + ready
    }

    fn wants(&self) -> Wants {
        let pool = self.pool.lock();
        let max = self.config.segments_max.max(2);
        if (pool.full.len() + 1) * 2 > max && !pool.full.is_empty() {
            Wants::Checkpoint
        } else if pool.ready.is_empty() {
            if pool.count < max { Wants::Segment } else { Wants::Checkpoint }
        } else {
            Wants::Nothing
        }
    }

    fn bytes(&self) -> u64 {
        self.pool.lock().bytes
    }

    /// Takes segments into use again whose batches are all held by the replica, and makes a new one if none is ready and
    /// `may_grow`. Only one thread does this.
    fn maintain(&self, applied: Seq, may_grow: bool) -> Result<()> {
        loop {
            let (mut segment, generation) = {
                let mut pool = self.pool.lock();
                if pool.full.front().is_none_or(|(_, last)| *last > applied) {
                    break;
                }
                let generation = pool.next_generation;
                pool.next_generation += 1;
                match pool.full.pop_front() {
                    Some((segment, _)) => (segment, generation),
                    None => break,
                }
            };
            let slot = 1 - segment.slot;
            let name = name(segment.number);
            segment
                .file
                .write_at(&self.header(generation, segment.len).encode(Kind::Segment), (slot * PAGE) as u64)
                .map_err(|e| latching(&name, e))?;
            segment.file.sync().map_err(|e| latching(&name, e))?;
            (segment.slot, segment.generation) = (slot, generation);
            self.pool.lock().ready.push_back(segment);
        }
        let wanted = {
            let pool = self.pool.lock();
            pool.count < self.config.segments_min || (pool.ready.is_empty() && may_grow)
        };
        if wanted { self.grow() } else { Ok(()) }
    }

    fn mark(&self, applied: Seq) -> Mark {
        Mark { cluster: self.writer.cluster, applied, fence: self.writer.fence, reign: 0 }
    }
}

impl Segments {
    /// Makes one more segment if the configuration allows it.
    fn grow(&self) -> Result<()> {
        let (number, generation) = {
            let mut pool = self.pool.lock();
            if pool.count >= self.config.segments_max.max(2) {
                return Ok(());
            }
            pool.next_generation += 1;
            pool.next_number += 1;
            (pool.next_number - 1, pool.next_generation - 1)
        };
        let segment = create(&*self.disk, &self.config, &self.writer, number, generation)?;
        let mut pool = self.pool.lock();
        pool.count += 1;
        pool.bytes += segment.len as u64;
        pool.ready.push_back(segment);
        Ok(())
    }

    fn header(&self, generation: u64, len: usize) -> HeaderPage {
        HeaderPage {
            cluster: self.writer.cluster,
            incarnation: self.writer.incarnation,
            turn: generation,
            number: len as u64,
        }
    }
}

/// Makes a segment: it gets its name only when it is complete and durable.
pub(super) fn create(
    disk: &dyn Disk,
    config: &LogConfig,
    writer: &Writer,
    number: u32,
    generation: u64,
) -> Result<Segment> {
    let len =
        config.segment_bytes.next_multiple_of(PAGE as u64).clamp((RECORDS_AT + PAGE) as u64, SEGMENT_MAX);
    let name = name(number);
    let new = format!("{name}.new");
    let made = (|| {
        match disk.remove(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = disk.create(&new)?;
        file.preallocate(len)?;
        // Writing zeros turns the reserved blocks into written ones; otherwise each sync would journal that change.
        let mut at = 0;
        while at < len {
            let n = ZEROS.len().min((len - at) as usize);
            file.write_at(&ZEROS[..n], at)?;
            at += n as u64;
        }
        let header = HeaderPage {
            cluster: writer.cluster,
            incarnation: writer.incarnation,
            turn: generation,
            number: len,
        };
        file.write_at(&header.encode(Kind::Segment), 0)?;
        file.sync()?;
        disk.rename(&new, &name)?;
        disk.sync_names()?;
        Ok(file)
    })();
    match made {
        Ok(file) => Ok(Segment { number, file, generation, slot: 0, len: len as usize }),
        Err(source) => {
            // Give the space back; what cannot be removed now is removed at the next open.
            let _ = disk.remove(&new);
            Err(Error::Io { what: format!("cannot make {name}"), source })
        }
    }
}

pub(super) fn name(number: u32) -> String {
    format!("log-{number:06}")
}

/// After a failed sync the content is unknown: even a lack of space is final then.
fn latching(name: &str, source: io::Error) -> Error {
    Error::Failed { what: format!("cannot sync {name}: {source}") }
}
