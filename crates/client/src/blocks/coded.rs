//! Reading an erasure-coded block: its chunks from the data pieces that hold them, or from what is left of the others.
//!
//! A healthy read of a few chunks asks one server for exactly these. When a data piece is missing, corrupt, or slower than
//! usual, its chunks are rebuilt: the first chunk of a parity piece is the block's table (13 bytes for each of its chunks), and
//! says which bytes of the other shards are needed; then as many chunks as are wanted, of `data` pieces, bring them back.
//! So a degraded read of `c` chunks fetches `data · c` chunks and one table; a whole block with pieces missing still
//! fetches no more than `data` pieces, since those that are read anyway count.
//!
//! # Invariants
//! - What is rebuilt is checked against the writer's checksums, like everything else.
//! - A piece is asked for a chunk at most once in a round; one that failed is not asked again in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, Either, FutureExt, select};
use futures_util::stream::FuturesUnordered;
use torchfs_codec::ChunkInfo;
use torchfs_codec::erasure::{Code, Part, Table};
use torchfs_proto::{Code as FaultCode, Fault};

use super::Blocks;
use super::get::{Miss, Reading, Run, Source};
use crate::metrics;

/// What is known of one piece in this round.
#[derive(Default)]
struct State {
    sources: Vec<Source>,
    /// All its places are silent or down.
    doubtful: bool,
    /// None of its places has it, or has it whole.
    bad: bool,
    /// It takes longer than usual.
    slow: bool,
    flights: usize,
    /// Chunks asked for, and those that came; counted within the piece.
    asked: BTreeSet<u32>,
    have: BTreeMap<u32, (ChunkInfo, Bytes)>,
}

type Answer = (u8, Range<u32>, Result<Run, Vec<Miss>>);

struct Coded<'a> {
    blocks: &'a Blocks,
    reading: &'a Reading<'a>,
    code: Code,
    /// Chunks of the block.
    count: u32,
    /// Data pieces and the chunks of them that are read.
    wanted: Vec<(u8, Range<u32>)>,
    pieces: Vec<State>,
    table: Option<Table>,
    flights: FuturesUnordered<BoxFuture<'a, Answer>>,
    patience: Duration,
}

impl Blocks {
    /// One round over all pieces. `None` if too few of them answered.
    pub(super) async fn get_coded(
        &self,
        reading: &Reading<'_>,
        code: Code,
        chunks: Range<u32>,
        misses: &mut Vec<Miss>,
    ) -> Option<Run> {
        let count = u32::from(reading.block.chunks());
        let mut read = Coded::new(self, reading, code, count, &chunks, misses);
        for (piece, chunks) in read.wanted.clone() {
            if !read.pieces[usize::from(piece)].doubtful {
                read.ask(piece, chunks);
            }
        }
        let mut rebuilds = false;
        loop {
            let lost = read.lost();
            if !lost.is_empty() {
                if !std::mem::replace(&mut rebuilds, true) {
                    ::metrics::counter!(metrics::DEGRADED_GETS).increment(1);
                }
                match read.rebuild(lost, misses).await {
                    Rebuilt::Waits => {}
                    Rebuilt::Done => continue,
                    Rebuilt::Never => return None,
                }
            }
            if let Some(run) = read.take() {
                return Some(run);
            }
            read.hear(misses).await;
        }
    }
}

enum Rebuilt {
    /// The chunks are here.
    Done,
    /// Something that is asked for has to come first.
    Waits,
    /// Too few pieces are left.
    Never,
}

impl<'a> Coded<'a> {
    fn new(
        blocks: &'a Blocks,
        reading: &'a Reading<'a>,
        code: Code,
        count: u32,
        chunks: &Range<u32>,
        misses: &mut Vec<Miss>,
    ) -> Coded<'a> {
        let wanted = (0..code.data)
            .filter_map(|piece| {
                let holds = code.chunks_of(piece, count);
                let both = holds.start.max(chunks.start)..holds.end.min(chunks.end);
                (!both.is_empty()).then(|| (piece, both.start - holds.start..both.end - holds.start))
            })
            .collect();
        let pieces = (0..reading.shape.pieces)
            .map(|piece| {
                let sources = blocks.sources(reading, piece, misses);
                let doubtful = sources.iter().all(|source| source.doubtful);
                State { bad: sources.is_empty(), doubtful, sources, ..State::default() }
            })
            .collect();
        Coded {
            blocks,
            reading,
            code,
            count,
            wanted,
            pieces,
            table: None,
            flights: FuturesUnordered::new(),
            patience: Duration::ZERO,
        }
    }

    /// Asks for the chunks of a piece that were not asked for yet, at its places one after the other.
    fn ask(&mut self, piece: u8, chunks: Range<u32>) {
        let (blocks, reading) = (self.blocks, self.reading);
        let state = &mut self.pieces[usize::from(piece)];
        let missing: Vec<u32> = chunks.filter(|chunk| !state.asked.contains(chunk)).collect();
        let (Some(first), Some(last)) = (missing.first(), missing.last()) else { return };
        let range = *first..*last + 1;
        state.asked.extend(range.clone());
        state.flights += 1;
        if let Some(source) = state.sources.first() {
            self.patience = self.patience.max(blocks.patience(&source.server));
        }
        let sources: Vec<Source> = state.sources.iter().map(Source::clone).collect();
        let flight = async move {
            let mut misses = Vec::new();
            for source in sources {
                match blocks.get_run(reading, source, range.clone()).await {
                    Ok(run) => return (piece, range, Ok(run)),
                    Err(miss) => misses.push(miss),
                }
            }
            (piece, range, Err(misses))
        };
        self.flights.push(flight.boxed());
    }

    /// Waits for an answer, or until whoever is asked takes too long.
    async fn hear(&mut self, misses: &mut Vec<Miss>) {
        let all_slow = self.pieces.iter().all(|state| state.flights == 0 || state.slow);
        let heard = if all_slow {
            self.flights.next().await
        } else {
            let sleep = self.blocks.sleep(self.patience);
            match select(self.flights.next(), std::pin::pin!(sleep)).await {
                Either::Left((heard, _)) => heard,
                Either::Right(_) => {
                    ::metrics::counter!(metrics::HEDGES).increment(1);
                    self.pieces.iter_mut().for_each(|state| state.slow = state.flights > 0);
                    return;
                }
            }
        };
        let Some((piece, range, result)) = heard else { return };
        let state = &mut self.pieces[usize::from(piece)];
        state.flights -= 1;
        state.slow &= state.flights > 0;
        match result {
            Ok(run) => state.have.extend(range.zip(run)),
            Err(missed) => {
                state.bad = true;
                misses.extend(missed);
            }
        }
    }

    /// Wanted pieces that will not come by themselves soon.
    fn lost(&self) -> Vec<(u8, Range<u32>)> {
        let is_lost = |(piece, chunks): &&(u8, Range<u32>)| {
            let state = &self.pieces[usize::from(*piece)];
            let here = state.covers(chunks);
            !here && (state.bad || state.slow || state.flights == 0)
        };
        self.wanted.iter().filter(is_lost).cloned().collect()
    }

    /// All chunks that are read, in order, if they are here.
    fn take(&mut self) -> Option<Run> {
        let here = |(piece, chunks): &(u8, Range<u32>)| self.pieces[usize::from(*piece)].covers(chunks);
        if !self.wanted.iter().all(here) {
            return None;
        }
        let mut run = Vec::new();
        for (piece, chunks) in &self.wanted {
            let have = &self.pieces[usize::from(*piece)].have;
            run.extend(chunks.clone().filter_map(|chunk| have.get(&chunk).cloned()));
        }
        Some(run)
    }

    /// Goes on with rebuilding chunks of lost pieces: the table, then enough of the others, then the arithmetic.
    async fn rebuild(&mut self, lost: Vec<(u8, Range<u32>)>, misses: &mut Vec<Miss>) -> Rebuilt {
        let Some(table) = self.find_table(misses) else {
            let parity = self.code.data..self.reading.shape.pieces;
            let parity: Vec<u8> = self.ranked(parity.filter(|piece| self.is_left(*piece)).collect());
            // One is enough; a slow one gets company.
            let coming = parity.iter().any(|piece| {
                let state = &self.pieces[usize::from(*piece)];
                state.flights > 0 && !state.slow
            });
            let next = parity.iter().find(|piece| !self.pieces[usize::from(**piece)].asked.contains(&0));
            if let Some(piece) = next.filter(|_| !coming) {
                self.ask(*piece, 0..1);
            }
            return self.ask_rest(&lost);
        };
        let span = lost
            .iter()
            .map(|(piece, chunks)| table.span(*piece, chunks.clone()))
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .unwrap_or(0..0);
        let lost_pieces: Vec<u8> = lost.iter().map(|(piece, _)| *piece).collect();
        let others = (0..self.reading.shape.pieces)
            .filter(|piece| !lost_pieces.contains(piece) && self.is_left(*piece))
            .collect();
        let mut sources = self.ranked(others);
        sources.truncate(self.code.data.into());
        for piece in &sources {
            self.ask(*piece, table.needed(*piece, &span));
        }
        if sources.len() < usize::from(self.code.data) {
            return self.ask_rest(&lost);
        }
        let here = |piece: &u8| self.pieces[usize::from(*piece)].covers(&table.needed(*piece, &span));
        if !sources.iter().all(here) {
            return Rebuilt::Waits;
        }
        let parts: Vec<Part> = sources.iter().map(|piece| self.part(&table, *piece, &span)).collect();
        let bytes = span.len() * lost.len();
        let (block, work) = (self.reading.block.id, lost.clone());
        let rebuilt = self.blocks.offload(bytes, move || {
            let one = |(piece, chunks): (u8, Range<u32>)| table.rebuild(block, &parts, piece, chunks);
            work.into_iter().map(one).collect::<Result<Vec<_>, _>>()
        });
        let fault = match rebuilt.await {
            Ok(Ok(runs)) => {
                ::metrics::counter!(metrics::REBUILT_BYTES).increment(bytes as u64);
                for ((piece, chunks), run) in lost.into_iter().zip(runs) {
                    self.pieces[usize::from(piece)].have.extend(chunks.zip(run));
                }
                return Rebuilt::Done;
            }
            Ok(Err(error)) => Fault::new(FaultCode::Corrupt, error.to_string()),
            Err(fault) => fault,
        };
        // All parts matched their checksums, so these pieces were never of one block.
        tracing::error!(%block, "pieces do not fit together: {fault}");
        misses.extend(lost_pieces.into_iter().map(|piece| Miss::nowhere(piece, fault.clone())));
        Rebuilt::Never
    }

    /// Too few others are left: the lost ones are asked as well, even those that are probably down.
    fn ask_rest(&mut self, lost: &[(u8, Range<u32>)]) -> Rebuilt {
        if self.flights.is_empty() {
            for (piece, chunks) in lost {
                if self.is_left(*piece) {
                    self.ask(*piece, chunks.clone());
                }
            }
        }
        if self.flights.is_empty() { Rebuilt::Never } else { Rebuilt::Waits }
    }

    /// The table, if a parity piece brought it.
    fn find_table(&mut self, misses: &mut Vec<Miss>) -> Option<Table> {
        if self.table.is_none() {
            for piece in self.code.data..self.reading.shape.pieces {
                let state = &mut self.pieces[usize::from(piece)];
                let Some((_, bytes)) = state.have.get(&0).filter(|_| !state.bad) else { continue };
                match Table::decode(self.reading.block.id, self.code, self.count, bytes) {
                    Ok(table) => {
                        self.table = Some(table);
                        break;
                    }
                    Err(error) => {
                        state.bad = true;
                        let fault = Fault::new(FaultCode::Corrupt, error.to_string());
                        misses.push(Miss::nowhere(piece, fault));
                    }
                }
            }
        }
        self.table.clone()
    }

    /// Whether there is still hope for a piece.
    fn is_left(&self, piece: u8) -> bool {
        !self.pieces[usize::from(piece)].bad
    }

    /// Pieces in the order in which they should help: what is here or coming, then who answers fast, then the rest.
    fn ranked(&self, mut pieces: Vec<u8>) -> Vec<u8> {
        pieces.sort_by_cached_key(|piece| {
            let state = &self.pieces[usize::from(*piece)];
            let rank = match state {
                State { slow: true, .. } => 2,
                State { flights: 1.., .. } => 0,
                State { have, .. } if !have.is_empty() => 0,
                State { doubtful: true, .. } => 3,
                _ => 1,
            };
            (rank, state.sources.first().map_or(u64::MAX, |source| source.server.expected_us()))
        });
        pieces
    }

    fn part(&self, table: &Table, piece: u8, span: &Range<usize>) -> Part {
        let needed = table.needed(piece, span);
        let have = &self.pieces[usize::from(piece)].have;
        let bytes: Vec<Bytes> =
            needed.clone().filter_map(|chunk| have.get(&chunk)).map(|(_, bytes)| bytes.clone()).collect();
        let payload = match bytes.as_slice() {
            [one] => one.clone(),
            many => many.concat().into(),
        };
        let first = if needed.is_empty() { u32::from(piece >= self.code.data) } else { needed.start };
        Part { piece, first, payload }
    }
}

impl State {
    fn covers(&self, chunks: &Range<u32>) -> bool {
        chunks.clone().all(|chunk| self.have.contains_key(&chunk))
    }
}
