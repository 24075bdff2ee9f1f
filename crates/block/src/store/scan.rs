//! Walks over the records of one segment, from its first batch to where nothing follows.
//!
//! Where a record should start and none does, the walk looks for the next one at every multiple of 64 bytes: a damaged
//! header in the middle costs its own record only, and a torn tail ends the walk. A page that the disk refuses to read is such
//! a damage, too; a disk with many of them is not walked over.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use torchfs_proto::disk::DiskFile;

use super::format::{DATA, FIXED, GRAIN, PAGE, Place, Record, Refused};

/// Bytes read at once when hopping from header to header, and when looking for the next one.
const HOP: usize = 16 << 10;
const SEARCH: usize = 1 << 20;

/// The most pages of a segment that may be unreadable.
const UNREADABLE_MAX: usize = 16;

/// What the walk met.
#[derive(Debug)]
pub enum Step {
    /// A record.
    Record(Record),
    /// Bytes from here to there are no record, and a record follows.
    Gap { from: u64, to: u64 },
    /// A record that a later version of this program wrote.
    Newer(String),
    /// Nothing follows; the last record's successor would start here.
    End { tail: u64 },
}

/// A walk over one segment.
pub struct Walk {
    file: Arc<dyn DiskFile>,
    place: Place,
    /// Where records end at the latest.
    end: u64,
    at: u64,
    /// The highest batch met: what is lower and comes later is a leftover of a torn batch.
    batch: u64,
    window: Vec<u8>,
    window_at: u64,
    /// A record found behind a gap that was reported first.
    found: Option<Record>,
    /// Pages that cannot be read, by their offsets.
    unreadable: BTreeSet<u64>,
}

impl Walk {
    /// A walk that ends at `end`.
    pub fn new(file: Arc<dyn DiskFile>, place: Place, end: u64) -> Walk {
        let (window, unreadable) = (Vec::new(), BTreeSet::new());
        Walk { file, place, end, at: DATA, batch: 0, window, window_at: 0, found: None, unreadable }
    }

    /// How many pages could not be read.
    pub fn unreadable(&self) -> usize {
        self.unreadable.len()
    }

    /// The next thing in the segment. After [`Step::End`] the walk is over.
    pub fn step(&mut self) -> io::Result<Step> {
        if let Some(record) = self.found.take() {
            return Ok(self.accept(record));
        }
        match self.record(self.at, HOP)? {
            Ok(record) => return Ok(self.accept(record)),
            Err(Refused::Garbage) => {}
            Err(Refused::Newer(why)) => return Ok(Step::Newer(why)),
        }
        let from = self.at;
        let mut at = from + GRAIN;
        while at + FIXED as u64 <= self.end {
            match self.record(at, SEARCH)? {
                Ok(record) => {
                    self.found = Some(record);
                    return Ok(Step::Gap { from, to: at });
                }
                Err(Refused::Garbage) => {}
                Err(Refused::Newer(why)) => return Ok(Step::Newer(why)),
            }
            at += GRAIN;
        }
        // Nothing is written over what could not be read: it may be readable later.
        let tail = if self.unreadable.is_empty() { from } else { self.end };
        Ok(Step::End { tail })
    }

    fn accept(&mut self, record: Record) -> Step {
        self.batch = record.batch;
        self.at = record.next();
        Step::Record(record)
    }

    fn record(&mut self, at: u64, read: usize) -> io::Result<Result<Record, Refused>> {
        if at + FIXED as u64 > self.end {
            return Ok(Err(Refused::Garbage));
        }
        let place = self.place;
        let len = match Record::peek(&place, at, self.bytes(at, FIXED, read)?) {
            Ok(len) => len,
            Err(refused) => return Ok(Err(refused)),
        };
        let record = match Record::decode(&place, at, self.bytes(at, len, read)?) {
            Ok(record) => record,
            Err(refused) => return Ok(Err(refused)),
        };
        let fits = record.batch >= self.batch && record.what.span(at).end <= self.end;
        Ok(if fits { Ok(record) } else { Err(Refused::Garbage) })
    }

    /// Bytes of the file; fewer only where it ends.
    fn bytes(&mut self, at: u64, len: usize, read: usize) -> io::Result<&[u8]> {
        let have = self.window_at..self.window_at + self.window.len() as u64;
        if at < have.start || at + len as u64 > have.end {
            let most = usize::try_from(self.end - at).unwrap_or(usize::MAX);
            self.window.resize(read.max(len).min(most), 0);
            self.window_at = at;
            let got = match self.file.read_at(&mut self.window, at) {
                Err(error) if error.raw_os_error().is_some() => self.read_pages(at)?,
                read => read?,
            };
            self.window.truncate(got);
        }
        let from = (at - self.window_at) as usize;
        Ok(&self.window[from..self.window.len().min(from + len)])
    }

    /// Fills the window page by page, with zeros for those that cannot be read.
    fn read_pages(&mut self, at: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < self.window.len() {
            let from = at + done as u64;
            let page = from - from % PAGE;
            let len = ((page + PAGE - from) as usize).min(self.window.len() - done);
            let part = &mut self.window[done..done + len];
            let read = if self.unreadable.contains(&page) { Ok(0) } else { self.file.read_at(part, from) };
            match read {
                Ok(got) if got == len => {}
                Ok(_) if self.unreadable.contains(&page) => part.fill(0),
                Ok(got) => return Ok(done + got),
                Err(error) if self.unreadable.len() >= UNREADABLE_MAX => return Err(error),
                Err(error) => {
                    tracing::warn!(segment = self.place.segment, at = from, %error, "a page cannot be read");
                    self.unreadable.insert(page);
                    part.fill(0);
                }
            }
            done += len;
        }
        Ok(done)
    }
}
