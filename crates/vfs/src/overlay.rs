//! Bytes written here that the metadata service does not know yet: an ordered map of byte ranges.
//!
//! Each piece is *dirty* (may still be overwritten in place) or *sealed* (its bytes are on their way into a block; a batch
//! number says which commit will name it). New writes lie on top of both, so one map answers every read. When a commit
//! is through, the pieces of its batch that are still visible leave the map: the extents have them now.
//!
//! Large writes are kept as they came and only ever sliced. Small ones are copied, because they would pin the whole
//! buffer they arrived in, and grow in place while a program appends to them.
//!
//! # Invariants
//! - Pieces do not overlap and are never empty.
//! - `bytes` is the sum of all pieces, `dirty` of those not sealed; `dirty_pieces` counts the latter.
//!
//! # Not here
//! Which ranges are sealed when: write.rs. What a batch becomes: commit.rs.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use bytes::Bytes;

/// Writes below this size are copied; pieces of copied bytes grow up to this size.
const SMALL: usize = 64 << 10;

/// A number that rises with each write of a file.
pub(crate) type Number = u64;
/// A number that rises with each sealing of a file; pieces of batch 0 are dirty.
pub(crate) type Batch = u64;

#[derive(Default)]
pub(crate) struct Overlay {
    pieces: BTreeMap<u64, Piece>,
    bytes: u64,
    dirty: u64,
    dirty_pieces: usize,
}

struct Piece {
    data: Data,
    batch: Batch,
    /// The oldest and the newest write in here.
    born: Number,
    last: Number,
}

enum Data {
    Whole(Bytes),
    Growing(Vec<u8>),
}

/// Neighbouring bytes taken out together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) parts: Vec<Bytes>,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.len
    }
}

impl Overlay {
    /// Lays bytes on top.
    pub(crate) fn write(&mut self, offset: u64, data: Bytes, number: Number) {
        if data.is_empty() {
            return;
        }
        let end = offset + data.len() as u64;
        if data.len() < SMALL {
            if self.grow(offset, &data, number) {
                return;
            }
            self.cut(offset..end);
            self.insert(
                offset,
                Piece { data: Data::Growing(data.to_vec()), batch: 0, born: number, last: number },
            );
        } else {
            self.cut(offset..end);
            self.insert(offset, Piece { data: Data::Whole(data), batch: 0, born: number, last: number });
        }
    }

    /// Moves everything from an offset on further to the end.
    pub(crate) fn shift(&mut self, from: u64, by: u64) {
        self.split(from);
        let moved = self.pieces.split_off(&from);
        self.pieces.extend(moved.into_iter().map(|(at, piece)| (at + by, piece)));
    }

    /// Removes all bytes of a range, dirty or sealed.
    pub(crate) fn cut(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((&start, piece)) = self.pieces.range(..range.start).next_back() {
            let end = start + piece.len();
            if end > range.start {
                let Some(mut left) = self.take(start) else { return };
                if end > range.end {
                    self.insert(range.end, left.slice(range.end - start..end - start));
                }
                left.shorten(range.start - start);
                self.insert(start, left);
            }
        }
        while let Some((&start, piece)) = self.pieces.range(range.clone()).next() {
            let end = start + piece.len();
            let Some(gone) = self.take(start) else { return };
            if end > range.end {
                self.insert(range.end, gone.slice(range.end - start..end - start));
            }
        }
    }

    /// The visible bytes of a range, in order, with gaps where the overlay has nothing.
    pub(crate) fn read(&self, range: Range<u64>) -> Vec<(u64, Bytes)> {
        let mut found = Vec::new();
        for (start, piece) in self.overlapping(range.clone()) {
            let from = range.start.max(start);
            let to = range.end.min(start + piece.len());
            found.push((from, piece.bytes(from - start..to - start)));
        }
        found
    }

    /// The end of the last piece.
    pub(crate) fn end(&self) -> Option<u64> {
        self.pieces.last_key_value().map(|(start, piece)| start + piece.len())
    }

    /// Where the neighbouring dirty bytes before `end` begin, at most back to `floor`.
    pub(crate) fn dirty_run_before(&self, end: u64, floor: u64) -> u64 {
        let mut start = end;
        for (&at, piece) in self.pieces.range(..end).rev() {
            if at + piece.len() < start || piece.batch != 0 {
                break;
            }
            start = at.max(floor);
            if at <= floor {
                break;
            }
        }
        start
    }

    /// Takes the dirty bytes of a range for a batch; they stay visible. Also says which writes were the first and the last of them.
    pub(crate) fn seal(&mut self, range: Range<u64>, batch: Batch) -> (Vec<Run>, RangeInclusive<Number>) {
        self.split(range.start);
        self.split(range.end);
        let mut runs: Vec<Run> = Vec::new();
        let (mut first, mut last) = (Number::MAX, 0);
        for (&start, piece) in self.pieces.range_mut(range) {
            if piece.batch != 0 {
                continue;
            }
            piece.batch = batch;
            first = first.min(piece.born);
            last = last.max(piece.last);
            self.dirty -= piece.len();
            self.dirty_pieces -= 1;
            let bytes = piece.freeze();
            match runs.last_mut() {
                Some(run) if run.end() == start => {
                    run.len += bytes.len() as u64;
                    run.parts.push(bytes);
                }
                _ => runs.push(Run { offset: start, len: bytes.len() as u64, parts: vec![bytes] }),
            }
        }
        (runs, first..=last)
    }

    /// Removes what is still visible of a batch within a range: the extents have it, or it is lost.
    pub(crate) fn settle(&mut self, range: Range<u64>, batch: Batch) {
        // A piece may reach into the next block, whose commit is still to come.
        self.split(range.start);
        self.split(range.end);
        let starts: Vec<u64> = self
            .overlapping(range)
            .filter(|(_, piece)| piece.batch == batch)
            .map(|(start, _)| start)
            .collect();
        for start in starts {
            self.take(start);
        }
    }

    /// The oldest write among the dirty pieces.
    pub(crate) fn oldest_dirty(&self) -> Option<Number> {
        self.pieces.values().filter(|piece| piece.batch == 0).map(|piece| piece.born).min()
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes not sealed.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// How many pieces are not sealed.
    pub(crate) fn dirty_pieces(&self) -> usize {
        self.dirty_pieces
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Overlay::default();
    }

    fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Piece)> {
        let first = self
            .pieces
            .range(..range.start)
            .next_back()
            .filter(|(start, piece)| *start + piece.len() > range.start)
            .map_or(range.start, |(start, _)| *start);
        self.pieces.range(first..range.end.max(first)).map(|(start, piece)| (*start, piece))
    }

    /// Writes into the growing piece that holds or touches `offset`, if there is one.
    fn grow(&mut self, offset: u64, data: &[u8], number: Number) -> bool {
        let Some((&start, piece)) = self.pieces.range(..=offset).next_back() else { return false };
        let Data::Growing(have) = &piece.data else { return false };
        let at = (offset - start) as usize;
        let len = have.len();
        if piece.batch != 0 || at > len || at + data.len() > SMALL {
            return false;
        }
        self.cut(start + len as u64..offset + data.len() as u64);
        let Some(Piece { data: Data::Growing(have), last, .. }) = self.pieces.get_mut(&start) else {
            return false;
        };
        *last = number;
        let inside = data.len().min(len - at);
        have[at..at + inside].copy_from_slice(&data[..inside]);
        have.extend_from_slice(&data[inside..]);
        let added = (data.len() - inside) as u64;
        self.bytes += added;
        self.dirty += added;
        true
    }

    fn split(&mut self, at: u64) {
        let Some((&start, piece)) = self.pieces.range(..at).next_back() else { return };
        let end = start + piece.len();
        if end <= at {
            return;
        }
        let Some(mut left) = self.take(start) else { return };
        self.insert(at, left.slice(at - start..end - start));
        left.shorten(at - start);
        self.insert(start, left);
    }

    fn insert(&mut self, offset: u64, piece: Piece) {
        self.bytes += piece.len();
        if piece.batch == 0 {
            self.dirty += piece.len();
            self.dirty_pieces += 1;
        }
        self.pieces.insert(offset, piece);
    }

    fn take(&mut self, offset: u64) -> Option<Piece> {
        let piece = self.pieces.remove(&offset)?;
        self.bytes -= piece.len();
        if piece.batch == 0 {
            self.dirty -= piece.len();
            self.dirty_pieces -= 1;
        }
        Some(piece)
    }
}

impl Piece {
    fn len(&self) -> u64 {
        match &self.data {
            Data::Whole(bytes) => bytes.len() as u64,
            Data::Growing(bytes) => bytes.len() as u64,
        }
    }

    fn bytes(&self, range: Range<u64>) -> Bytes {
        let range = range.start as usize..range.end as usize;
        match &self.data {
            Data::Whole(bytes) => bytes.slice(range),
            Data::Growing(bytes) => Bytes::copy_from_slice(&bytes[range]),
        }
    }

    fn slice(&self, range: Range<u64>) -> Piece {
        let data = match &self.data {
            Data::Whole(_) => Data::Whole(self.bytes(range)),
            Data::Growing(bytes) => Data::Growing(bytes[range.start as usize..range.end as usize].to_vec()),
        };
        Piece { data, ..*self }
    }

    fn shorten(&mut self, len: u64) {
        match &mut self.data {
            Data::Whole(bytes) => bytes.truncate(len as usize),
            Data::Growing(bytes) => bytes.truncate(len as usize),
        }
    }

    /// From now on the bytes never change.
    fn freeze(&mut self) -> Bytes {
        if let Data::Growing(bytes) = &mut self.data {
            self.data = Data::Whole(std::mem::take(bytes).into());
        }
        self.bytes(0..self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, rounds};

    /// Per byte: the value, and the batch that carries it (0 for dirty).
    type Model = Vec<Option<(u8, Batch)>>;

    fn check(overlay: &Overlay, model: &Model) {
        let mut seen: Model = vec![None; model.len()];
        for (start, piece) in overlay.overlapping(0..u64::MAX) {
            for (i, byte) in piece.bytes(0..piece.len()).iter().enumerate() {
                let at = &mut seen[start as usize + i];
                assert!(at.is_none(), "pieces overlap");
                *at = Some((*byte, piece.batch));
            }
        }
        assert!(seen == *model, "the overlay differs from the model");
        assert_eq!(overlay.bytes(), model.iter().flatten().count() as u64);
        assert_eq!(overlay.dirty(), model.iter().flatten().filter(|b| b.1 == 0).count() as u64);
        let dirty = overlay.pieces.values().filter(|piece| piece.batch == 0).count();
        assert_eq!(overlay.dirty_pieces(), dirty);
        assert_eq!(
            overlay.end().unwrap_or(0),
            model.iter().rposition(Option::is_some).map_or(0, |i| i as u64 + 1)
        );
    }

    #[test]
    fn random_operations_agree_with_an_array_of_bytes() {
        for seed in rounds(6) {
            let mut rng = Rng::new(seed);
            let size = 400_000;
            let mut overlay = Overlay::default();
            let mut model: Model = vec![None; size];
            let mut batch = 0;
            for number in 1..120 {
                let from = rng.below(size as u64) as usize;
                let most = if rng.below(2) == 0 { 300 } else { 150_000 };
                let to = (from + rng.below(most) as usize).min(size);
                let range = from as u64..to as u64;
                match rng.below(10) {
                    0 => {
                        overlay.cut(range);
                        model[from..to].fill(None);
                    }
                    1 => {
                        batch += 1;
                        let (runs, _) = overlay.seal(range, batch);
                        for run in runs {
                            let bytes = run.parts.concat();
                            assert_eq!(bytes.len() as u64, run.len);
                            for (i, byte) in bytes.iter().enumerate() {
                                let at = &mut model[run.offset as usize + i];
                                assert_eq!(*at, Some((*byte, 0)));
                                *at = Some((*byte, batch));
                            }
                        }
                        assert!(!model[from..to].iter().flatten().any(|b| b.1 == 0));
                    }
                    2 if batch > 0 => {
                        let gone = 1 + rng.below(batch);
                        overlay.settle(range, gone);
                        let settled = model[from..to].iter_mut().filter(|b| b.is_some_and(|b| b.1 == gone));
                        settled.for_each(|b| *b = None);
                    }
                    _ => {
                        // Neighbouring writes now and then, since that is what grows in place.
                        let from =
                            if rng.below(3) == 0 { overlay.end().unwrap_or(0) as usize % size } else { from };
                        let to = (from + (to - from.min(to))).min(size);
                        let byte = rng.below(256) as u8;
                        overlay.write(from as u64, vec![byte; to - from].into(), number);
                        model[from..to].fill(Some((byte, 0)));
                    }
                }
                check(&overlay, &model);
                let at = rng.below(size as u64);
                for (offset, bytes) in overlay.read(at..at + 1000) {
                    for (i, byte) in bytes.iter().enumerate() {
                        assert_eq!(model[offset as usize + i].map(|b| b.0), Some(*byte));
                    }
                }
            }
        }
    }

    #[test]
    fn appended_lines_become_one_piece() {
        let mut overlay = Overlay::default();
        for i in 0..100 {
            overlay.write(i * 10, Bytes::from_static(b"0123456789"), i + 1);
        }
        assert_eq!(overlay.pieces(), 1);
        assert_eq!(overlay.oldest_dirty(), Some(1));
        assert_eq!(overlay.dirty_run_before(1000, 0), 0);
        assert_eq!(overlay.dirty_run_before(1000, 64), 64);
    }

    #[test]
    fn a_large_write_is_not_copied() {
        let data = Bytes::from(vec![7; 1 << 20]);
        let mut overlay = Overlay::default();
        overlay.write(4096, data.clone(), 1);
        let (runs, writes) = overlay.seal(0..u64::MAX, 1);
        assert_eq!(writes, 1..=1);
        assert_eq!(runs[0].parts[0].as_ptr(), data.as_ptr());
    }

    #[test]
    fn a_piece_that_is_committed_in_two_parts_stays_visible_until_the_second() {
        let mut overlay = Overlay::default();
        overlay.write(0, Bytes::from_static(b"0123456789"), 1);
        overlay.seal(0..u64::MAX, 1);
        overlay.settle(0..4, 1);
        assert_eq!(overlay.read(0..10), [(4, Bytes::from_static(b"456789"))]);
        overlay.settle(4..10, 1);
        assert_eq!(overlay.bytes(), 0);
    }
}
