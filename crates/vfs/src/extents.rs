//! The extents of one file, as far as they were fetched: a map of runs, and the ranges it speaks for.
//!
//! Extents come in pages (a random-written file of 1 GiB has 260,000), so the map knows parts of a file. Within a known
//! range, what no run covers is a hole. Own commits are applied to the map the way the service applies them, so that
//! a file that was just written needs no fetch to be read.
//!
//! # Invariants
//! - Runs do not overlap, are never empty, and lie within known ranges.
//! - Valid only under a READ or WRITE lease; whoever loses the lease clears the map.

use std::collections::BTreeMap;
use std::ops::Range;

use torchfs_proto::extent::{Extent, RangeOp, Source};

#[derive(Default)]
pub(crate) struct Extents {
    runs: BTreeMap<u64, Run>,
    /// Start → end of what is known; never touching each other.
    known: BTreeMap<u64, u64>,
}

#[derive(Clone, Debug)]
struct Run {
    len: u64,
    source: Source,
}

/// The map does not speak for this offset: fetch from here on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unknown(pub(crate) u64);

impl Extents {
    /// The runs and holes that cover a range without gaps, cut to it.
    pub(crate) fn find(&self, range: Range<u64>) -> Result<Vec<Extent>, Unknown> {
        let mut found = Vec::new();
        if range.is_empty() {
            return Ok(found);
        }
        let upto = self.known_upto(range.start);
        if upto < range.end {
            return Err(Unknown(upto));
        }
        let mut at = range.start;
        for (start, run) in self.overlapping(range.clone()) {
            if start > at {
                found.push(Extent { offset: at, len: start - at, source: Source::Hole });
            }
            let cut = cut(start, run, range.clone());
            at = cut.offset + cut.len;
            found.push(cut);
        }
        if at < range.end {
            found.push(Extent { offset: at, len: range.end - at, source: Source::Hole });
        }
        Ok(found)
    }

    /// Takes in an answer of the service that holds everything in `range`.
    pub(crate) fn install(&mut self, range: Range<u64>, extents: &[Extent]) {
        self.clear_range(range.clone());
        for extent in extents {
            let run = Run { len: extent.len, source: extent.source.clone() };
            let cut = cut(extent.offset, &run, range.clone());
            if cut.len > 0 && cut.source != Source::Hole {
                self.runs.insert(cut.offset, Run { len: cut.len, source: cut.source });
            }
        }
        self.learn(range);
    }

    /// Applies what this session committed. Appends are given as writes at the place where they landed.
    pub(crate) fn apply(&mut self, op: &RangeOp) {
        match op {
            RangeOp::Write { offset, len, source } => {
                self.install(
                    *offset..offset + len,
                    &[Extent { offset: *offset, len: *len, source: source.clone() }],
                );
            }
            RangeOp::Punch { offset, len } => self.install(*offset..offset.saturating_add(*len), &[]),
            RangeOp::Truncate { size } => self.install(*size..u64::MAX, &[]),
            // Where an append landed is not known here, and an extension makes a hole that is known or not as before.
            RangeOp::Append { .. } => self.clear(),
            RangeOp::Extend { .. } => {}
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.known.clear();
    }

    /// How many runs are kept, or ranges without any.
    pub(crate) fn len(&self) -> usize {
        self.runs.len().max(self.known.len())
    }

    /// The end of the known range that holds `at`, or `at` itself.
    pub(crate) fn known_upto(&self, at: u64) -> u64 {
        self.known.range(..=at).next_back().map_or(at, |(_, end)| (*end).max(at))
    }

    fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Run)> {
        let first = self
            .runs
            .range(..range.start)
            .next_back()
            .filter(|(start, run)| *start + run.len > range.start)
            .map_or(range.start, |(start, _)| *start);
        self.runs.range(first..range.end.max(first)).map(|(start, run)| (*start, run))
    }

    fn clear_range(&mut self, range: Range<u64>) {
        let touched: Vec<u64> = self.overlapping(range.clone()).map(|(start, _)| start).collect();
        for start in touched {
            let Some(run) = self.runs.remove(&start) else { continue };
            for side in [0..range.start, range.end..u64::MAX] {
                let part = cut(start, &run, side);
                if part.len > 0 {
                    self.runs.insert(part.offset, Run { len: part.len, source: part.source });
                }
            }
        }
    }

    fn learn(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        if start >= end {
            return;
        }
        while let Some((&from, &to)) = self.known.range(..=end).next_back().filter(|(_, to)| **to >= start) {
            self.known.remove(&from);
            start = start.min(from);
            end = end.max(to);
        }
        self.known.insert(start, end);
    }
}

/// The part of a run within a range; of length 0 if there is none.
fn cut(start: u64, run: &Run, range: Range<u64>) -> Extent {
    let from = start.max(range.start);
    let to = (start + run.len).min(range.end);
    if from >= to {
        return Extent { offset: from, len: 0, source: Source::Hole };
    }
    let skip = from - start;
    let source = match &run.source {
        Source::Hole => Source::Hole,
        Source::Inline(bytes) => {
            let end = bytes.len().min((to - start) as usize);
            Source::Inline(bytes[(skip as usize).min(end)..end].to_vec().into())
        }
        Source::Block { id, offset, block_len, layout, substitutes } => Source::Block {
            id: *id,
            offset: offset + skip as u32,
            block_len: *block_len,
            layout: *layout,
            substitutes: substitutes.clone(),
        },
    };
    Extent { offset: from, len: to - from, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, rounds};
    use torchfs_proto::{BlockId, LayoutId};

    /// Byte `i` of block `b` has the value `b * 7919 + i`, so that any slip shows.
    fn value(source: &Source, i: u64) -> u64 {
        match source {
            Source::Hole => 0,
            Source::Block { id, offset, .. } => id.counter * 7919 + u64::from(*offset) + i,
            Source::Inline(bytes) => 1_000_000_000 + u64::from(bytes[i as usize]),
        }
    }

    fn random_source(rng: &mut Rng, len: u64) -> Source {
        if len <= 200 && rng.below(2) == 0 {
            return Source::Inline((0..len).map(|_| rng.below(256) as u8).collect::<Vec<_>>().into());
        }
        Source::Block {
            id: BlockId { incarnation: 1, counter: 1 + rng.below(1 << 20) },
            offset: rng.below(5000) as u32,
            block_len: 1 << 20,
            layout: LayoutId(1),
            substitutes: Vec::new(),
        }
    }

    #[test]
    fn commits_and_fetches_agree_with_an_array() {
        for seed in rounds(80) {
            let mut rng = Rng::new(seed);
            let size = 5_000usize;
            // What the service would answer, and which parts of it the map may know.
            let mut truth = vec![0u64; size];
            let mut known = vec![false; size];
            let mut service = Extents::default();
            service.install(0..u64::MAX, &[]);
            let mut map = Extents::default();
            for _ in 0..200 {
                let from = rng.below(size as u64);
                let to = (from + 1 + rng.below(700)).min(size as u64);
                let (f, t) = (from as usize, to as usize);
                match rng.below(8) {
                    0 => {
                        let page = service.find(from..to).expect("the service knows everything");
                        map.install(from..to, &page);
                        known[f..t].fill(true);
                    }
                    1 => {
                        let op = RangeOp::Punch { offset: from, len: to - from };
                        map.apply(&op);
                        service.apply(&op);
                        truth[f..t].fill(0);
                        known[f..t].fill(true);
                    }
                    2 if rng.below(4) == 0 => {
                        let op = RangeOp::Truncate { size: from };
                        map.apply(&op);
                        service.apply(&op);
                        truth[f..].fill(0);
                        known[f..].fill(true);
                    }
                    3 if rng.below(10) == 0 => {
                        map.clear();
                        known.fill(false);
                    }
                    _ => {
                        let source = random_source(&mut rng, to - from);
                        for i in from..to {
                            truth[i as usize] = value(&source, i - from);
                        }
                        let op = RangeOp::Write { offset: from, len: to - from, source };
                        map.apply(&op);
                        service.apply(&op);
                        known[f..t].fill(true);
                    }
                }
                let from = rng.below(size as u64);
                let to = (from + 1 + rng.below(900)).min(size as u64);
                match map.find(from..to) {
                    Err(Unknown(at)) => {
                        assert_eq!(
                            known[from as usize..to as usize].iter().position(|k| !k),
                            Some((at - from) as usize)
                        );
                    }
                    Ok(found) => {
                        let mut at = from;
                        for extent in found {
                            assert_eq!(extent.offset, at);
                            for i in 0..extent.len {
                                assert_eq!(value(&extent.source, i), truth[(at + i) as usize]);
                            }
                            at += extent.len;
                        }
                        assert_eq!(at, to);
                        assert!(known[from as usize..to as usize].iter().all(|k| *k));
                    }
                }
            }
        }
    }
}
