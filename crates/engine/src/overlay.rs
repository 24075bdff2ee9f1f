//! The overlay: what is ordered and not yet in the replica, in memory, newest value per key.
//!
//! There are two layers. Batches go into the upper one. A checkpoint freezes it into the lower one, writes that to the
//! replica without any lock, and drops it. A reader looks into the upper, the lower, then the replica.
//!
//! # Invariants
//! - The lower layer is dropped only after the replica holds it; so whoever looks into the overlay first and then opens
//!   the replica misses nothing.
//! - A deleted key is present with no value until the replica has forgotten it.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::batch::Change;

/// One layer: the last value of each key; `None` is a deletion.
pub type Layer = BTreeMap<Box<[u8]>, Option<Box<[u8]>>>;

/// What a key costs beside its bytes, roughly: the map's node and two allocations.
const OVERHEAD: usize = 64;

/// Both layers.
#[derive(Default)]
pub struct Overlay {
    upper: Layer,
    upper_bytes: usize,
    lower: Option<Arc<Layer>>,
    lower_bytes: usize,
}

/// A part of the overlay within a range.
pub struct Chunk {
    /// Pairs in the order of the scan.
    pub pairs: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    /// Whether nothing of the range is left.
    pub complete: bool,
}

impl Overlay {
    /// Puts the changes of a batch on top.
    pub fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            let (key, value) = match change {
                Change::Put(key, value) => (key, Some(value.into_boxed_slice())),
                Change::Delete(key) => (key, None),
            };
            self.insert(key.into_boxed_slice(), value);
        }
    }

    fn insert(&mut self, key: Box<[u8]>, value: Option<Box<[u8]>>) {
        let len = |value: &Option<Box<[u8]>>| value.as_ref().map_or(0, |value| value.len());
        self.upper_bytes += len(&value);
        let key_len = key.len();
        match self.upper.insert(key, value) {
            Some(old) => self.upper_bytes -= len(&old),
            None => self.upper_bytes += key_len + OVERHEAD,
        }
    }

    /// What the overlay knows about a key: nothing, that it is deleted, or its value.
    pub fn find(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        let found = self.upper.get(key).or_else(|| self.lower.as_ref()?.get(key))?;
        Some(found.as_deref())
    }

    /// The first pairs of a range, at most `limit` of them and not many more than `bytes`.
    pub fn chunk(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        reverse: bool,
        limit: usize,
        bytes: usize,
    ) -> Chunk {
        let empty = Layer::new();
        let mut upper = self.upper.range::<[u8], _>((from, to));
        let mut lower = self.lower.as_deref().unwrap_or(&empty).range::<[u8], _>((from, to));
        let mut next_upper = || if reverse { upper.next_back() } else { upper.next() };
        let mut next_lower = || if reverse { lower.next_back() } else { lower.next() };
        let (mut a, mut b) = (next_upper(), next_lower());
        let mut pairs = Vec::new();
        let mut taken = 0;
        loop {
            let upper_first = match (a, b) {
                (None, None) => return Chunk { pairs, complete: true },
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (Some((ka, _)), Some((kb, _))) => {
                    if ka == kb {
                        // The upper layer hides it.
                        b = next_lower();
                        true
                    } else {
                        (ka < kb) != reverse
                    }
                }
            };
            if pairs.len() >= limit || taken >= bytes {
                return Chunk { pairs, complete: false };
            }
            let pair = if upper_first {
                std::mem::replace(&mut a, next_upper())
            } else {
                std::mem::replace(&mut b, next_lower())
            };
            if let Some((key, value)) = pair {
                taken += key.len() + value.as_ref().map_or(0, |value| value.len());
                pairs.push((key.to_vec(), value.as_ref().map(|value| value.to_vec())));
            }
        }
    }

    /// Moves the upper layer below for a checkpoint; the lower one must be gone.
    pub fn freeze(&mut self) -> Arc<Layer> {
        debug_assert!(self.lower.is_none(), "one checkpoint at a time");
        let layer = Arc::new(std::mem::take(&mut self.upper));
        self.lower_bytes = std::mem::take(&mut self.upper_bytes);
        self.lower = Some(layer.clone());
        layer
    }

    /// The replica holds the lower layer: forgets it. The caller frees the memory outside of the lock.
    pub fn forget_lower(&mut self) -> Option<Arc<Layer>> {
        self.lower_bytes = 0;
        self.lower.take()
    }

    /// The checkpoint failed for lack of space: both layers become one again, so that later deletions meet the puts that
    /// they cancel before the replica has to take them.
    pub fn thaw(&mut self) {
        if let Some(lower) = self.lower.take() {
            let upper = std::mem::take(&mut self.upper);
            self.upper_bytes = std::mem::take(&mut self.lower_bytes);
            self.upper = Arc::try_unwrap(lower).unwrap_or_else(|shared| (*shared).clone());
            for (key, value) in upper {
                self.insert(key, value);
            }
        }
    }

    /// Keys in both layers.
    pub fn keys(&self) -> usize {
        self.upper.len() + self.lower.as_ref().map_or(0, |lower| lower.len())
    }

    /// Bytes of both layers.
    pub fn bytes(&self) -> usize {
        self.upper_bytes + self.lower_bytes
    }

    /// Keys and bytes that wait for the next checkpoint.
    pub fn waiting(&self) -> (usize, usize) {
        (self.upper.len(), self.upper_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, value: &str) -> Change {
        Change::Put(key.into(), value.into())
    }

    #[test]
    fn the_upper_layer_hides_the_lower_in_both_directions() {
        let mut overlay = Overlay::default();
        overlay.apply(vec![put("a", "1"), put("b", "1"), put("d", "1")]);
        overlay.freeze();
        overlay.apply(vec![put("b", "2"), put("c", "2"), Change::Delete("d".into())]);
        assert_eq!(overlay.find(b"a"), Some(Some(&b"1"[..])));
        assert_eq!(overlay.find(b"b"), Some(Some(&b"2"[..])));
        assert_eq!(overlay.find(b"d"), Some(None));
        assert_eq!(overlay.find(b"e"), None);
        let all = |reverse, limit| {
            let chunk = overlay.chunk(Bound::Unbounded, Bound::Unbounded, reverse, limit, usize::MAX);
            let keys: Vec<u8> = chunk.pairs.iter().map(|(key, _)| key[0]).collect();
            (String::from_utf8(keys).unwrap(), chunk.complete)
        };
        assert_eq!(all(false, 9), ("abcd".into(), true));
        assert_eq!(all(true, 9), ("dcba".into(), true));
        assert_eq!(all(false, 2), ("ab".into(), false));
        assert_eq!(all(true, 4), ("dcba".into(), true));
    }

    #[test]
    fn thawing_keeps_the_newest_and_the_books_in_order() {
        let mut overlay = Overlay::default();
        overlay.apply(vec![put("a", "1"), put("b", "1")]);
        overlay.freeze();
        overlay.apply(vec![put("b", "22"), Change::Delete("a".into())]);
        overlay.thaw();
        assert_eq!(overlay.find(b"a"), Some(None));
        assert_eq!(overlay.find(b"b"), Some(Some(&b"22"[..])));
        assert_eq!(overlay.keys(), 2);
        assert_eq!(overlay.bytes(), 2 * (1 + OVERHEAD) + 2);
        overlay.freeze();
        overlay.forget_lower();
        assert_eq!((overlay.keys(), overlay.bytes()), (0, 0));
    }
}
