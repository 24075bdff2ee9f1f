//! Emptying segments that are mostly dead: what lives in them is written again, then they are used anew.
//!
//! It runs in small steps on the writer's thread, between the batches of others, so nothing changes under a step.

use std::collections::HashMap;

use torchfs_rpc::AlignedBuf;

use super::format::{MAX_TOMBS, Tomb, Use, What};
use super::index::{Key, Segment};
use super::scan::{Step, Walk};
use super::writer::{Batch, Purpose, Writer};
use crate::{Error, Result, metrics as names};

/// A segment on its way to be free.
pub(super) struct Emptying {
    victim: u32,
    walk: Walk,
    /// Its dead records by key, when it was chosen.
    dead_here: HashMap<Key, u32>,
}

impl Writer {
    /// One step of what can be done in the background; whether there is more to do.
    pub(super) fn maintain(&mut self) -> bool {
        if self.shared.latched.get().is_some() {
            return false;
        }
        if self.emptying.is_none() {
            if !self.look_again {
                return false;
            }
            // Half dead: rewriting costs at most as much as it gains.
            self.look_again = self.choose(|segment| segment.header.size / 2);
            return self.look_again;
        }
        match self.empty_step(self.shared.config.compact_step) {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(server = %self.shared.config.server, %error, "cannot empty a segment");
                self.emptying = None;
                self.look_again = false;
                false
            }
        }
    }

    /// Empties a segment for somebody who found no space; whether that brought any.
    pub(super) fn empty_one(&mut self) -> Result<bool> {
        if self.nothing_to_gain {
            return Ok(false);
        }
        let before = self.room();
        let emptied = self.empty_whole();
        if emptied.is_err() {
            self.emptying = None;
        }
        // What a segment loses to padding counts as dead and comes back as padding: without this end, writers on a
        // full disk would have it rewritten over and over.
        let gained = self.room() >= before + self.segment_bytes / 32;
        self.nothing_to_gain = !gained;
        match emptied {
            Ok(()) | Err(Error::NoSpace { .. }) => Ok(gained),
            Err(error) => Err(error),
        }
    }

    fn empty_whole(&mut self) -> Result<()> {
        // When space runs out, a sixteenth is worth the work.
        if self.emptying.is_none() && !self.choose(|segment| segment.header.size / 16 * 15) {
            return Ok(());
        }
        while self.empty_step(self.shared.config.batch_bytes)?.is_none() {}
        Ok(())
    }

    /// Bytes that could be written right now.
    fn room(&self) -> u64 {
        let index = self.shared.index.read();
        let free = self.free.iter().filter_map(|number| index.segments.get(number)).map(|s| s.header.size);
        let active = self.active.and_then(|number| index.segments.get(&number));
        free.sum::<u64>() + active.map_or(0, |s| s.header.size - s.tail)
    }

    /// Chooses the sealed segment with the least life in it, if that is at most the limit.
    fn choose(&mut self, limit: impl Fn(&Segment) -> u64) -> bool {
        let index = self.shared.index.read();
        let victim = index
            .segments
            .values()
            .filter(|s| matches!(s.header.state, Use::Sealed(_)) && !s.stuck && s.live + s.tombs <= limit(s))
            .min_by_key(|s| s.live + s.tombs);
        let Some(victim) = victim else { return false };
        let number = victim.header.number;
        let end = match victim.header.state {
            // Nothing to carry over, so nothing to look for.
            _ if victim.live == 0 && victim.tombs == 0 => 0,
            Use::Sealed(end) => end,
            Use::Open | Use::Free => victim.header.size,
        };
        let walk = Walk::new(victim.file.file.clone(), victim.place(), end);
        let dead_here = index.dead_in(number);
        drop(index);
        self.emptying = Some(Emptying { victim: number, walk, dead_here });
        true
    }

    /// Carries some of the victim over. When nothing is left, frees it: `Some(true)`, or `Some(false)` if part of it cannot
    /// be found.
    fn empty_step(&mut self, most: u64) -> Result<Option<bool>> {
        let Some(mut emptying) = self.emptying.take() else { return Ok(Some(false)) };
        let mut batch = Batch::of_moves();
        let mut bytes = 0;
        while bytes < most {
            let step = match emptying.walk.step() {
                Ok(step) => step,
                Err(error) => {
                    // What was carried over counts; the rest stays where it is.
                    self.commit(&mut batch)?;
                    let error = self.shared.io("read a segment", error);
                    tracing::warn!(server = %self.shared.config.server, %error, "cannot empty a segment");
                    self.keep_as_it_is(emptying.victim);
                    return Ok(Some(false));
                }
            };
            match step {
                Step::Record(record) => {
                    bytes += self.carry_over(&mut batch, &emptying, record.offset, record.what)?;
                }
                Step::Gap { .. } | Step::Newer(_) => {}
                Step::End { .. } => {
                    self.commit(&mut batch)?;
                    metrics::counter!(names::COMPACTED_BYTES).increment(bytes);
                    return self.free_victim(emptying.victim).map(Some);
                }
            }
        }
        self.commit(&mut batch)?;
        metrics::counter!(names::COMPACTED_BYTES).increment(bytes);
        self.emptying = Some(emptying);
        Ok(None)
    }

    /// Appends a record of the victim to the batch, if it is still needed; how many bytes that takes.
    fn carry_over(&mut self, batch: &mut Batch, from: &Emptying, offset: u64, what: What) -> Result<u64> {
        match what {
            What::Piece(piece) => {
                let index = self.shared.index.read();
                let here = index
                    .find(&piece.key)
                    .filter(|entry| (entry.segment, entry.offset()) == (from.victim, offset))
                    .and_then(|entry| Some((*entry, index.segments.get(&from.victim)?.file.file.clone())));
                drop(index);
                let Some((entry, file)) = here else { return Ok(0) };
                let mut payload = AlignedBuf::with_len(entry.payload as usize);
                let whole = file.read_at(&mut payload, entry.span().payload);
                if whole.as_ref().ok() != Some(&payload.len()) {
                    // It stays here, damaged as it is, until a good copy takes its place.
                    let why =
                        whole.map_or_else(|e| e.to_string(), |_| "the segment's file ends early".into());
                    self.shared.found_bad(piece.key, &entry, &why);
                    return Ok(0);
                }
                let what = What::Piece(piece);
                self.make_room(batch, &what, Purpose::MakeSpace)?;
                batch.push(what, vec![payload.into_bytes()]);
                Ok(entry.footprint())
            }
            What::Tombs(tombs) => {
                let needed: Vec<Tomb> = {
                    let index = self.shared.index.read();
                    let needs = |t: &Tomb| index.needs_tomb(t, from.victim, &from.dead_here);
                    tombs.into_iter().filter(needs).collect()
                };
                debug_assert!(needed.len() <= MAX_TOMBS);
                if needed.is_empty() {
                    return Ok(0);
                }
                let what = What::Tombs(needed);
                let bytes = what.span(0).end;
                self.make_room(batch, &what, Purpose::MakeSpace)?;
                batch.push(what, Vec::new());
                Ok(bytes)
            }
        }
    }

    fn free_victim(&mut self, victim: u32) -> Result<bool> {
        let empty = self.shared.index.read().is_empty(victim);
        if !empty {
            // Its records were found when the store was opened and are not now. Leave every bit as it is.
            tracing::error!(
                server = %self.shared.config.server,
                segment = victim,
                "part of a segment cannot be read any more; it is kept as it is, run torchfs scrub"
            );
            self.keep_as_it_is(victim);
            return Ok(false);
        }
        self.start_generation(victim, Use::Free)?;
        self.free.push(victim);
        Ok(true)
    }

    fn keep_as_it_is(&mut self, victim: u32) {
        if let Some(segment) = self.shared.index.write().segments.get_mut(&victim) {
            segment.stuck = true;
        }
    }
}
