//! Scans: overlay and replica merged, in chunks.
//!
//! For each chunk the part of the overlay is copied and the replica's view opened under one short lock, so that both
//! are of one moment; the replica is then read without it. The first chunks are small, since most scans end early.
//!
//! # Invariants
//! - Memory is bounded by a chunk; a view lives for one chunk; `visit` runs when both are gone.

use std::ops::{Bound, ControlFlow};

use super::Inner;
use crate::Visit;
use crate::error::Result;

const FIRST_LIMIT: usize = 16;
const LIMIT_MAX: usize = 512;
const BYTES_MAX: usize = 256 << 10;
/// How many pairs of the replica one chunk passes at most: deleted ones too.
const STEPS_MAX: usize = 4096;

type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

impl Inner {
    pub(super) fn scan(&self, from: &[u8], to: &[u8], reverse: bool, visit: &mut Visit<'_>) -> Result<()> {
        let mut rest = Some((Bound::Included(from.to_vec()), Bound::Excluded(to.to_vec())));
        let mut limit = FIRST_LIMIT;
        while let Some((low, high)) = rest {
            if from >= to || is_exhausted(&low, &high) {
                return Ok(());
            }
            let (pairs, last) = self.scan_chunk(as_slice(&low), as_slice(&high), reverse, limit)?;
            for (key, value) in &pairs {
                if visit(key, value).is_break() {
                    return Ok(());
                }
            }
            rest =
                last.map(
                    |last| if reverse { (low, Bound::Excluded(last)) } else { (Bound::Excluded(last), high) },
                );
            limit = (limit * 2).min(LIMIT_MAX);
        }
        Ok(())
    }

    /// The first pairs within the bounds, and where to go on, if anything may be left.
    fn scan_chunk(
        &self,
        low: Bound<&[u8]>,
        high: Bound<&[u8]>,
        reverse: bool,
        limit: usize,
    ) -> Result<(Pairs, Option<Vec<u8>>)> {
        let (chunk, view) = {
            let front = self.front.read();
            (front.overlay.chunk(low, high, reverse, limit, BYTES_MAX), self.replica.view()?)
        };
        // Beyond the last key of an incomplete part the overlay may know more: the replica is read up to there only.
        let edge = if chunk.complete { None } else { chunk.pairs.last().map(|(key, _)| key.clone()) };
        let (low, high) = match &edge {
            Some(edge) if reverse => (Bound::Included(edge.as_slice()), high),
            Some(edge) => (low, Bound::Included(edge.as_slice())),
            None => (low, high),
        };

        let mut pairs = Pairs::new();
        let mut bytes = 0;
        let mut steps = 0;
        let mut stopped_at = None;
        let mut overlay = chunk.pairs.into_iter().peekable();
        view.scan(low, high, reverse, &mut |key, value| {
            // What the overlay has before this key comes first, and hides it if it is the same.
            let mut hidden = false;
            while let Some((ours, _)) = overlay.peek()
                && (if reverse { ours.as_slice() >= key } else { ours.as_slice() <= key })
            {
                hidden |= ours.as_slice() == key;
                if let Some((ours, Some(value))) = overlay.next() {
                    bytes += ours.len() + value.len();
                    pairs.push((ours, value));
                }
            }
            if !hidden {
                bytes += key.len() + value.len();
                pairs.push((key.to_vec(), value.to_vec()));
            }
            steps += 1;
            if pairs.len() >= limit || bytes >= BYTES_MAX || steps >= STEPS_MAX {
                stopped_at = Some(key.to_vec());
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
        if stopped_at.is_some() {
            return Ok((pairs, stopped_at));
        }
        pairs.extend(overlay.filter_map(|(key, value)| Some((key, value?))));
        Ok((pairs, edge))
    }
}

fn as_slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}

/// Whether nothing can lie between the bounds.
fn is_exhausted(low: &Bound<Vec<u8>>, high: &Bound<Vec<u8>>) -> bool {
    match (low, high) {
        (Bound::Included(low) | Bound::Excluded(low), Bound::Excluded(high)) => low >= high,
        _ => false,
    }
}
