//! Opening the log: which batches are there, and where the next one goes.
//!
//! The segments are read in the order of their generations. The first place where no whole record with the next number
//! follows is the end: a power cut tears only what was not synced. Every record says how far the log was durable when it
//! was written; so a record behind the end that knows a missing batch as durable proves damage, and that is an
//! error with a name rather than a silent loss.
//!
//! # Invariants
//! - What is returned as recovered is durable: after the death of a process alone its last writes may still be in the
//!   page cache only, and after a failed sync they may look clean there and be lost on the disk. So whatever appends
//!   will rest on, the tail and the headers from there on, is written again as it is and synced.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use torchfs_proto::disk::Disk;
use torchfs_proto::{ClusterId, Fence, Seq};

use super::format::{HeaderPage, Kind, PAGE, RECORDS_AT, Stored, Writer};
use super::segments::{LogConfig, Pool, SEGMENT_MAX, Segment, Segments, Tail, create, name};
use crate::batch::Change;
use crate::error::{Error, Result};

/// Takes each batch that the replica does not have, in order.
pub type Replay<'a> = dyn FnMut(Seq, Vec<Change>) -> Result<()> + 'a;

impl Segments {
    /// Makes the log of a new folder. Segments that an earlier attempt left are removed, unless they hold batches.
    pub fn create(disk: &Arc<dyn Disk>, config: &LogConfig, cluster: ClusterId) -> Result<()> {
        for found in find_segments(&**disk)? {
            let bytes = read(&found)?;
            if let Ok((_, header)) = HeaderPage::newest(&bytes, Kind::Segment, &found.name)
                && Stored::find(&bytes, RECORDS_AT, header.cluster, header.turn)?.is_some()
            {
                return Err(Error::Corrupt {
                    what: format!("{} holds batches but engine.id is missing", found.name),
                });
            }
            disk.remove(&found.name).map_err(Error::io(format!("cannot remove {}", found.name)))?;
        }
        disk.sync_names().map_err(Error::io("cannot sync the names of the log"))?;
        let nobody = Writer { cluster, incarnation: Default::default(), fence: Fence(0) };
        for number in 0..config.segments_min.max(2) as u32 {
            create(&**disk, config, &nobody, number, u64::from(number) + 1)?;
        }
        Ok(())
    }

    /// Opens the log of an existing folder and replays what comes after `applied`. Returns the last batch too.
    pub fn open(
        disk: Arc<dyn Disk>,
        config: LogConfig,
        writer: Writer,
        applied: Seq,
        replay: &mut Replay<'_>,
    ) -> Result<(Segments, Seq)> {
        let mut segments = Vec::new();
        for found in find_segments(&*disk)? {
            segments.push(open_segment(found, writer.cluster)?);
        }
        segments.sort_by_key(|segment| segment.generation);
        if segments.is_empty() {
            return Err(Error::Corrupt {
                what: "engine.id is there and all files of the log are missing".into(),
            });
        }
        if let Some(pair) = segments.windows(2).find(|pair| pair[0].generation == pair[1].generation) {
            return Err(Error::Corrupt {
                what: format!(
                    "{} and {} have the same generation",
                    name(pair[0].number),
                    name(pair[1].number)
                ),
            });
        }

        let mut walk = Walk { writer, applied, next: None, fence: Fence(0), durable: applied };
        let mut ends = Vec::with_capacity(segments.len());
        let mut tail_bytes = Vec::new();
        for segment in &segments {
            let bytes = read_segment(segment)?;
            let end = walk.segment(segment, &bytes, replay)?;
            if end.last.0 > 0 {
                tail_bytes = bytes;
            }
            ends.push(end);
        }
        let last = walk.next.map_or(applied, |next| Seq(next.0 - 1));
        if last < applied {
            return Err(Error::Corrupt {
                what: format!("the log ends at batch {last} but the replica holds batch {applied}"),
            });
        }

        // Appends go on behind the last record; without any, in the first segment.
        let tail = ends.iter().rposition(|end| end.last.0 > 0).unwrap_or(0);
        let end = ends[tail];
        make_tail_durable(&segments[tail], &tail_bytes, end)?;
        for segment in &segments[tail..] {
            make_header_durable(segment)?;
        }

        let next_generation = segments.last().map_or(1, |segment| segment.generation + 1);
        let next_number = segments.iter().map(|segment| segment.number + 1).max().unwrap_or(0);
        let (count, bytes) = (segments.len(), segments.iter().map(|segment| segment.len as u64).sum());
        let mut full = VecDeque::new();
        let mut ready = VecDeque::new();
        let mut active = None;
        for (at, segment) in segments.into_iter().enumerate() {
            match at.cmp(&tail) {
                std::cmp::Ordering::Less => full.push_back((segment, ends[at].last)),
                std::cmp::Ordering::Equal => active = Some(segment),
                std::cmp::Ordering::Greater => ready.push_back(segment),
            }
        }
        let Some(segment) = active else {
            return Err(Error::Corrupt { what: "the log has no segment to append to".into() });
        };
        let tail_room = segment.len.saturating_sub(end.at);
        let log = Segments {
            disk,
            config,
            writer,
            tail: Mutex::new(Tail { segment, at: end.at, last: end.last, group: Vec::new() }),
            pool: Mutex::new(Pool { ready, full, next_generation, next_number, count, bytes, tail_room }),
        };
        Ok((log, last))
    }
}

/// The end of one segment's records.
#[derive(Clone, Copy)]
struct End {
    /// Its last batch; 0 if there is none.
    last: Seq,
    /// Where the next group goes.
    at: usize,
    /// Where the first record starts that is not known to be durable.
    unsure_at: usize,
}

/// Reads segment after segment.
struct Walk {
    writer: Writer,
    applied: Seq,
    /// The number that must come next, once there was a first.
    next: Option<Seq>,
    fence: Fence,
    /// How far the log is known to have been durable.
    durable: Seq,
}

impl Walk {
    fn segment(&mut self, segment: &Segment, bytes: &[u8], replay: &mut Replay<'_>) -> Result<End> {
        let cluster = self.writer.cluster;
        let file = name(segment.number);
        if let Some((generation, record)) = Stored::find_any(bytes, RECORDS_AT, cluster)?
            && generation > segment.generation
        {
            let what = format!(
                "{file} starts with batch {} of generation {generation}, which its header lost",
                record.seq
            );
            return Err(Error::Corrupt { what });
        }
        let mut at = RECORDS_AT;
        let mut end = End { last: Seq(0), at, unsure_at: at };
        // Where records start, for those not yet known to be durable.
        let mut starts = VecDeque::new();
        loop {
            let found = match self.find(segment, bytes, at, end.last == Seq(0), &file)? {
                Some(record) => Some((at, record)),
                // The rest of a group's last page is padding.
                None if !at.is_multiple_of(PAGE) => {
                    at = at.next_multiple_of(PAGE);
                    self.find(segment, bytes, at, false, &file)?.map(|record| (at, record))
                }
                None => None,
            };
            let Some((start, record)) = found else { break };
            if record.seq > self.applied {
                replay(record.seq, record.decode()?)?;
            }
            self.next = Some(Seq(record.seq.0 + 1));
            self.fence = record.fence;
            self.durable = self.durable.max(record.durable);
            end.last = record.seq;
            starts.push_back((record.seq, start));
            while starts.front().is_some_and(|(seq, _)| *seq <= self.durable) {
                starts.pop_front();
            }
            at = start + record.stored_len();
            end.at = at.next_multiple_of(PAGE).min(bytes.len());
        }
        end.unsure_at = starts.front().map_or(end.at, |(_, start)| *start);
        self.check_hole(segment, bytes, end, &file)?;
        Ok(end)
    }

    /// The record at `at` if it is the one that comes next.
    fn find<'a>(
        &self,
        segment: &Segment,
        bytes: &'a [u8],
        at: usize,
        first: bool,
        file: &str,
    ) -> Result<Option<Stored<'a>>> {
        let Some(record) = Stored::find(bytes, at, self.writer.cluster, segment.generation)? else {
            return Ok(None);
        };
        let covered = |seq: Seq| seq.0 <= self.applied.0 + 1;
        match self.next {
            // Behind a gap that the replica covers; only whole segments can be missing.
            None if first && covered(record.seq) => return Ok(Some(record)),
            Some(next)
                if first
                    && next != record.seq
                    && covered(next)
                    && covered(record.seq)
                    && next < record.seq =>
            {
                return Ok(Some(record));
            }
            Some(next) if next == record.seq && record.fence >= self.fence => return Ok(Some(record)),
            _ => {}
        }
        if first {
            let wanted = self.next.map_or(self.applied.0 + 1, |next| next.0);
            let what = format!("{file} starts with batch {} where batch {wanted} was expected", record.seq);
            return Err(Error::Corrupt { what });
        }
        Ok(None)
    }

    /// Looks behind the end for a record that knows what should follow there as durable. Such records begin groups of
    /// their own, so only starts of pages matter.
    fn check_hole(&self, segment: &Segment, bytes: &[u8], end: End, file: &str) -> Result<()> {
        let missing = self.next.map_or(self.applied.0 + 1, |next| next.0);
        let mut at = end.at;
        while at < bytes.len() {
            if let Some(record) = Stored::find(bytes, at, self.writer.cluster, segment.generation)?
                && record.durable.0 >= missing
            {
                let what = format!(
                    "{file} has a hole at byte {}: batch {missing} was durable and cannot be read, batch {} behind it can",
                    end.at, record.seq
                );
                return Err(Error::Corrupt { what });
            }
            at += PAGE;
        }
        Ok(())
    }
}

/// Writes the records again that no later record knows as durable.
fn make_tail_durable(segment: &Segment, bytes: &[u8], end: End) -> Result<()> {
    let file = name(segment.number);
    let from = end.unsure_at / PAGE * PAGE;
    if end.last.0 > 0 && from < end.at {
        segment
            .file
            .write_at(&bytes[from..end.at], from as u64)
            .map_err(Error::io(format!("cannot write {file}")))?;
    }
    Ok(())
}

/// Writes the header that counts again, byte for byte, and syncs the segment.
fn make_header_durable(segment: &Segment) -> Result<()> {
    let failed = |what: &str| Error::io(format!("cannot {what} {}", name(segment.number)));
    let mut page = [0; PAGE];
    let at = (segment.slot * PAGE) as u64;
    segment.file.read_at(&mut page, at).map_err(failed("read"))?;
    segment.file.write_at(&page, at).map_err(failed("write"))?;
    segment.file.sync().map_err(failed("sync"))
}

struct Found {
    name: String,
    number: u32,
    file: Arc<dyn torchfs_proto::disk::DiskFile>,
}

/// All segments of the folder; what was not finished is removed.
fn find_segments(disk: &dyn Disk) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in disk.list().map_err(Error::io("cannot list the log"))? {
        let Some(rest) = entry.strip_prefix("log-") else { continue };
        if rest.ends_with(".new") {
            match disk.remove(&entry) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::Io { what: format!("cannot remove {entry}"), source: e });
                }
                _ => continue,
            }
        }
        let Ok(number) = rest.parse() else { continue };
        let file = disk.open(&entry).map_err(Error::io(format!("cannot open {entry}")))?;
        found.push(Found { name: entry, number, file });
    }
    Ok(found)
}

fn open_segment(found: Found, cluster: ClusterId) -> Result<Segment> {
    let failed = |what: &str| Error::io(format!("cannot {what} {}", found.name));
    let mut bytes = vec![0; RECORDS_AT];
    let n = found.file.read_at(&mut bytes, 0).map_err(failed("read"))?;
    let (slot, header) = HeaderPage::newest(&bytes[..n], Kind::Segment, &found.name)?;
    if header.cluster != cluster {
        return Err(Error::WrongCluster { found: header.cluster, expected: cluster });
    }
    let stored = found.file.len().map_err(failed("measure"))?;
    if header.number > SEGMENT_MAX || stored < header.number || header.number < (RECORDS_AT + PAGE) as u64 {
        let what = format!("{} has {stored} bytes and its header says {}", found.name, header.number);
        return Err(Error::Corrupt { what });
    }
    Ok(Segment {
        number: found.number,
        file: found.file,
        generation: header.turn,
        slot,
        len: header.number as usize,
    })
}

fn read_segment(segment: &Segment) -> Result<Vec<u8>> {
    let mut bytes = vec![0; segment.len];
    let file = name(segment.number);
    let n = segment.file.read_at(&mut bytes, 0).map_err(Error::io(format!("cannot read {file}")))?;
    if n != bytes.len() {
        return Err(Error::Corrupt { what: format!("{file} ends early") });
    }
    Ok(bytes)
}

/// The whole file, within the bound of a segment.
fn read(found: &Found) -> Result<Vec<u8>> {
    let failed = |what: &str| Error::io(format!("cannot {what} {}", found.name));
    let len = found.file.len().map_err(failed("measure"))?.min(SEGMENT_MAX);
    let mut bytes = vec![0; len as usize];
    let n = found.file.read_at(&mut bytes, 0).map_err(failed("read"))?;
    bytes.truncate(n);
    Ok(bytes)
}
