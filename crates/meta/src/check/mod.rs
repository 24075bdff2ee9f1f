//! The check: walks the whole store in pieces and names every inconsistency in a sentence.
//!
//! One run walks all keys of a volume in their order, a bounded number under each hold of the lock, and then the inodes once
//! more. Records that belong together lie together, so most sums need to remember one folder or file only; for links
//! a bit for each inode is kept, and block references are summed for a part of the blocks at a time.
//!
//! Requests go on meanwhile. Whatever a batch touches during the run is noted, and sums that rest on it are not judged: a
//! check may leave things out under load, but what it names is wrong.
//!
//! A volume that is being removed is left out: its records go in any order.
//!
//! # Invariants
//! - Memory is bounded by a few bits for each inode number, `BLOCKS_MAX` sums and `TOUCHED_MAX` notes.

mod placement;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;

use minicbor::Decode;
use torchfs_engine::{Batch, Change};
use torchfs_proto::attr::Kind;
use torchfs_proto::key::{self, Parts, Space};
use torchfs_proto::msg::meta::Done;
use torchfs_proto::record::{self, Bytes, Counters};
use torchfs_proto::{BlockId, Code, Fault, IdRange, Ino, Result, SessionId, VolumeId};

use crate::service::{Meta, State};
use crate::view::View;

/// Records in one piece.
const PIECE: usize = 2_000;
/// Block sums held at once; more blocks take several walks over the extents.
const BLOCKS_MAX: u64 = 4_000_000;
/// Inodes and blocks noted as touched.
const TOUCHED_MAX: usize = 4_000_000;
/// Problems in one answer; a store this broken is restored, not read about.
const PROBLEMS_MAX: usize = 1_000;

/// A check under way.
pub(crate) struct Run {
    id: u64,
    volume: VolumeId,
    later: Vec<VolumeId>,
    /// The next key to look at.
    at: Vec<u8>,
    /// The second walk over the inodes has begun.
    closing: bool,
    parts: u64,
    part: u64,
    /// What batches touched since the run began.
    touched: Touched,
    sums: Sums,
}

#[derive(Default)]
struct Touched {
    inodes: HashSet<Ino>,
    blocks: HashSet<BlockId>,
    counters: bool,
    /// Too much to note: nothing is judged by sums any more.
    all: bool,
}

/// What the walk adds up for one volume.
#[derive(Default)]
struct Sums {
    counters: Counters,
    inodes: u64,
    blocks: u64,
    bytes: u64,
    stored: u64,
    dead: u64,
    /// Inodes named by an entry, and how often beyond the first time.
    named: Bits,
    more_names: HashMap<Ino, u32>,
    with_entries: Bits,
    with_extents: Bits,
    with_xattrs: Bits,
    folder: Option<(Ino, u64, u32)>,
    file: Option<(Ino, u64, u64)>,
    references: BTreeMap<BlockId, (u32, u64)>,
    ranges: Vec<(IdRange, String)>,
}

/// A set of small numbers.
#[derive(Default)]
struct Bits(Vec<u64>);

impl Bits {
    /// Adds a number; answers whether it is new.
    fn add(&mut self, ino: Ino) -> bool {
        let (word, bit) = ((ino.0 / 64) as usize, 1 << (ino.0 % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }

    fn has(&self, ino: Ino) -> bool {
        self.0.get((ino.0 / 64) as usize).is_some_and(|word| word & (1 << (ino.0 % 64)) != 0)
    }
}

impl Run {
    /// A batch is ordered while the run is under way.
    pub(crate) fn touch(&mut self, batch: &Batch) {
        let noted = self.touched.inodes.len() + self.touched.blocks.len();
        if self.touched.all || noted > TOUCHED_MAX {
            self.touched = Touched { counters: true, all: true, ..Touched::default() };
            return;
        }
        for change in &batch.changes {
            let (Change::Put(at, _) | Change::Delete(at)) = change;
            let Some(parts) = Parts::of(at) else { continue };
            if parts.volume != self.volume {
                continue;
            }
            if parts.is(Space::Counters) {
                self.touched.counters = true;
            } else if parts.is(Space::Block) {
                self.touched.blocks.extend(parts.block_at(0));
            } else if (Space::Inode as u8..=Space::Orphan as u8).contains(&parts.space) {
                self.touched.inodes.extend(parts.u64_at(0).map(Ino));
            }
        }
    }
}

impl Meta {
    /// Checks one piece. An empty cursor begins a run and ends an earlier one.
    pub(crate) fn check(&self, state: &mut State, cursor: &[u8]) -> Result<Done> {
        let mut problems = Vec::new();
        let mut run = match (<[u8; 8]>::try_from(cursor), state.check.take()) {
            (Err(_), earlier) if cursor.is_empty() => {
                let id = earlier.map_or(1, |run| run.id + 1);
                problems.extend(placement::table(&state.members.table, &state.cluster));
                let served = state.volumes.values().filter(|volume| !volume.removed);
                let mut volumes: Vec<VolumeId> = served.map(|volume| volume.id).collect();
                volumes.reverse();
                let first = volumes.pop().unwrap_or_default();
                self.begin(id, first, volumes)?
            }
            (Ok(id), Some(run)) if u64::from_be_bytes(id) == run.id => run,
            (_, run) => {
                state.check = run;
                return Err(Fault::new(Code::Stale, "another check was begun, or the service restarted")
                    .next("begin the check again"));
            }
        };
        let served = |volume| state.volumes.get(&volume).is_some_and(|volume| !volume.removed);
        let (records, ended) = match served(run.volume) {
            true => self.check_piece(state, &mut run, &mut problems)?,
            false => (0, true),
        };
        let mut next = run.id.to_be_bytes().to_vec();
        if ended {
            run.later.retain(|volume| served(*volume));
            match run.later.pop() {
                Some(volume) => state.check = Some(self.begin(run.id, volume, run.later)?),
                None => next.clear(),
            }
        } else {
            state.check = Some(run);
        }
        problems.truncate(PROBLEMS_MAX);
        let stats = self.engine.stats();
        let total = stats.replica_keys + stats.overlay_keys;
        Ok(Done::Checked { problems, cursor: next.into(), records, total })
    }

    fn begin(&self, id: u64, volume: VolumeId, later: Vec<VolumeId>) -> Result<Run> {
        let counters = self.view(volume).counters()?;
        Ok(Run {
            id,
            volume,
            later,
            at: key::space(volume, Space::Counters),
            closing: false,
            parts: counters.blocks / BLOCKS_MAX + 1,
            part: 0,
            touched: Touched::default(),
            sums: Sums { counters, ..Sums::default() },
        })
    }

    /// Looks at the next records; answers how many, and whether the volume is done.
    fn check_piece(&self, state: &State, run: &mut Run, problems: &mut Vec<String>) -> Result<(u64, bool)> {
        let view = self.view(run.volume);
        let end = match run.closing {
            true => key::after(&key::space(run.volume, Space::Inode)),
            false => key::after(&run.volume.0.to_be_bytes()),
        };
        let mut pairs: Vec<(Vec<u8>, Vec<u8>)> = Vec::with_capacity(PIECE);
        self.engine.scan(&run.at, &end, false, &mut |at, value| {
            pairs.push((at.to_vec(), value.to_vec()));
            if pairs.len() >= PIECE { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let mut look = Look { view: &view, state, touched: &run.touched, sums: &mut run.sums, problems };
        for (at, value) in &pairs {
            let Some(parts) = Parts::of(at) else { continue };
            // Another walk for another part of the blocks looks at extents and blocks only.
            let again = run.part > 0 && !parts.is(Space::Extent) && !parts.is(Space::Block);
            if run.closing {
                look.close_inode(&parts, value)?;
            } else if !again {
                look.record(&parts, value, run.parts, run.part)?;
            }
        }
        let records = pairs.len() as u64;
        match pairs.pop() {
            Some((at, _)) if pairs.len() + 1 >= PIECE => {
                run.at = at;
                run.at.push(0);
                return Ok((records, false));
            }
            _ => {}
        }
        if run.closing {
            return Ok((records, true));
        }
        look.end_of_walk(run.part == 0)?;
        run.part += 1;
        run.at = key::space(run.volume, Space::Extent);
        if run.part >= run.parts {
            run.closing = true;
            run.at = key::space(run.volume, Space::Inode);
        }
        Ok((records, false))
    }
}

/// One piece of the walk.
struct Look<'a> {
    view: &'a View<'a>,
    state: &'a State,
    touched: &'a Touched,
    sums: &'a mut Sums,
    problems: &'a mut Vec<String>,
}

impl Look<'_> {
    fn say(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// A record that cannot be read is a problem of its own.
    fn read<T: for<'b> Decode<'b, ()>>(&mut self, parts: &Parts<'_>, value: &[u8]) -> Option<T> {
        match minicbor::decode(value) {
            Ok(record) => Some(record),
            Err(error) => {
                let rest: String = parts.rest.iter().map(|b| format!("{b:02x}")).collect();
                self.say(format!("the record {rest} of space {:#x} cannot be read: {error}", parts.space));
                None
            }
        }
    }

    fn judged(&self, ino: Ino) -> bool {
        !self.touched.all && !self.touched.inodes.contains(&ino)
    }

    /// An inode number that was never given out would blow up the sets.
    fn plausible(&self, ino: Ino) -> bool {
        ino.0 < self.sums.counters.next_ino || !self.judged(ino)
    }

    fn record(&mut self, parts: &Parts<'_>, value: &[u8], of: u64, part: u64) -> Result<()> {
        let ino = Ino(parts.u64_at(0).unwrap_or(0));
        let Some(space) = Space::of(parts.space) else {
            self.say(format!("a record is in space {:#x}, which is not known", parts.space));
            return Ok(());
        };
        match space {
            Space::Inode => {
                let Some(inode) = self.read::<record::Inode>(parts, value) else { return Ok(()) };
                self.sums.inodes += 1;
                if !self.plausible(ino) {
                    let next = self.sums.counters.next_ino;
                    self.say(format!("inode {ino} was never given out: the next number is {next}"));
                }
                if let Some(problem) = placement::policy(&self.state.members.table, inode.layout) {
                    self.say(format!("inode {ino} {problem}"));
                }
                if inode.kind == Kind::Symlink
                    && inode.target.as_ref().map_or(0, |target| target.len() as u64) != inode.size
                {
                    self.say(format!("symlink {ino} has {} bytes but its target another length", inode.size));
                }
            }
            Space::Entry => self.entry(ino, parts, value)?,
            Space::Cookie => self.cookie(ino, parts, value)?,
            Space::Extent => self.extent(ino, parts, value, of, part)?,
            Space::Block => self.block(parts, value, of, part),
            Space::Xattr => {
                if self.view.find_inode(ino)?.is_none() {
                    self.say(format!("an extended attribute belongs to inode {ino}, which is not there"));
                } else if self.plausible(ino) {
                    self.sums.with_xattrs.add(ino);
                }
            }
            Space::Lock => {
                let session = SessionId(parts.u64_at(9).unwrap_or(0));
                if !self.state.sessions.contains_key(&session) {
                    self.say(format!(
                        "a lock on inode {ino} belongs to session {session}, which is not there"
                    ));
                }
                if self.view.find_inode(ino)?.is_none() {
                    self.say(format!("a lock is on inode {ino}, which is not there"));
                }
            }
            Space::Orphan => match self.view.find_inode(ino)? {
                None => self.say(format!("orphan {ino} has no inode")),
                Some(inode) if inode.nlink > 0 => {
                    self.say(format!("orphan {ino} has {} links", inode.nlink));
                }
                Some(_) => {}
            },
            Space::Session if !self.state.sessions.contains_key(&SessionId(ino.0)) => {
                self.say(format!("session {ino} has a record but is not served"));
            }
            Space::Range => {
                let session = SessionId(ino.0);
                if !self.state.sessions.contains_key(&session) {
                    self.say(format!(
                        "a range of block ids belongs to session {session}, which is not there"
                    ));
                }
                if let Some(range) = self.read::<record::Range>(parts, value) {
                    self.sums.ranges.push((range.ids, format!("of session {session}")));
                }
            }
            Space::Outcome if !self.state.sessions.contains_key(&SessionId(ino.0)) => {
                self.say(format!("a result is kept for session {ino}, which is not there"));
            }
            Space::DeadBlock => {
                self.sums.dead += 1;
                if let Some(id) = parts.block_at(8)
                    && self.view.block(id)?.is_some()
                {
                    self.say(format!("block {id} waits to be deleted but has a record"));
                }
            }
            Space::DeadRange => {
                if let Some(range) = self.read::<record::DeadRange>(parts, value) {
                    self.sums.ranges.push((range.ids, "that is dead".to_string()));
                }
            }
            Space::Cut if self.view.find_inode(ino)?.is_none_or(|inode| inode.cut.is_none()) => {
                self.say(format!("inode {ino} is listed as cut but is not"));
            }
            _ => {}
        }
        Ok(())
    }

    fn entry(&mut self, parent: Ino, parts: &Parts<'_>, value: &[u8]) -> Result<()> {
        let Some(entry) = self.read::<record::Entry>(parts, value) else { return Ok(()) };
        let name = String::from_utf8_lossy(name_of(parts)).into_owned();
        if self.sums.folder.is_none_or(|(folder, _, _)| folder != parent) {
            self.close_folder()?;
            self.sums.folder = Some((parent, 0, 0));
            match self.view.find_inode(parent)? {
                None => self.say(format!("entries belong to folder {parent}, which is not there")),
                Some(inode) if inode.kind != Kind::Dir => {
                    self.say(format!("inode {parent} has entries but is not a folder"));
                }
                Some(_) if self.plausible(parent) => {
                    self.sums.with_entries.add(parent);
                }
                Some(_) => {}
            }
        }
        if let Some((_, entries, folders)) = &mut self.sums.folder {
            *entries += 1;
            *folders += u32::from(entry.kind == Kind::Dir);
        }
        match self.view.find_inode(entry.ino)? {
            None => {
                self.say(format!("{name} in folder {parent} names inode {}, which is not there", entry.ino))
            }
            Some(inode) => {
                if inode.kind != entry.kind {
                    let (is, says) = (inode.kind, entry.kind);
                    self.say(format!(
                        "{name} in folder {parent} says {says:?}, inode {} is {is:?}",
                        entry.ino
                    ));
                }
                if inode.kind == Kind::Dir && inode.parent != parent {
                    let other = inode.parent;
                    self.say(format!(
                        "folder {} lies in {parent} but says that it lies in {other}",
                        entry.ino
                    ));
                }
                if self.plausible(entry.ino) && !self.sums.named.add(entry.ino) {
                    *self.sums.more_names.entry(entry.ino).or_default() += 1;
                }
            }
        }
        let at = key::cookie(self.view.volume, parent, entry.cookie);
        let found = self.view.get::<record::Cookie>(&at)?;
        if found.is_none_or(|cookie| cookie.ino != entry.ino || cookie.name.as_slice() != name_of(parts)) {
            self.say(format!("{name} in folder {parent} has cookie {}, which leads elsewhere", entry.cookie));
        }
        Ok(())
    }

    fn cookie(&mut self, parent: Ino, parts: &Parts<'_>, value: &[u8]) -> Result<()> {
        let Some(cookie) = self.read::<record::Cookie>(parts, value) else { return Ok(()) };
        let number = parts.u64_at(8).unwrap_or(0);
        let name = String::from_utf8_lossy(&cookie.name).into_owned();
        let entry = self.view.entry(parent, &cookie.name)?;
        if entry.is_none_or(|entry| entry.cookie != number || entry.ino != cookie.ino) {
            self.say(format!("cookie {number} of folder {parent} leads to {name}, which is not there"));
        }
        if let Some(folder) = self.view.find_inode(parent)?
            && number >= folder.next_cookie.unwrap_or(1)
        {
            self.say(format!("cookie {number} of folder {parent} was never given out"));
        }
        Ok(())
    }

    fn extent(&mut self, ino: Ino, parts: &Parts<'_>, value: &[u8], of: u64, part: u64) -> Result<()> {
        let Some(extent) = self.read::<record::Extent>(parts, value) else { return Ok(()) };
        let offset = parts.u64_at(8).unwrap_or(0);
        let end = offset.saturating_add(extent.len);
        if part == 0 {
            if self.sums.file.is_none_or(|(file, _, _)| file != ino) {
                self.close_file()?;
                self.sums.file = Some((ino, 0, 0));
                match self.view.find_inode(ino)? {
                    None => self.say(format!("extents belong to inode {ino}, which is not there")),
                    Some(inode) if inode.kind != Kind::File => {
                        self.say(format!("inode {ino} has extents but is not a file"));
                    }
                    Some(_) if self.plausible(ino) => {
                        self.sums.with_extents.add(ino);
                    }
                    Some(_) => {}
                }
            }
            if let Some((_, stored, last)) = &mut self.sums.file {
                let overlaps = offset < *last;
                *stored += extent.len;
                *last = end;
                if overlaps && self.judged(ino) {
                    self.say(format!("extents of inode {ino} overlap at byte {offset}"));
                }
            }
            if let Bytes::Inline(bytes) = &extent.bytes
                && bytes.len() as u64 != extent.len
            {
                self.say(format!(
                    "the inline extent of inode {ino} at {offset} has another length than its bytes"
                ));
            }
            if let Bytes::Block { id, offset: within } = &extent.bytes {
                match self.view.block(*id)? {
                    None => {
                        self.say(format!(
                            "inode {ino} has bytes at {offset} in block {id}, which has no record"
                        ));
                    }
                    Some(block) if u64::from(*within) + extent.len > u64::from(block.len) => {
                        self.say(format!("the extent of inode {ino} at {offset} reaches beyond block {id}"));
                    }
                    Some(_) => {}
                }
            }
        }
        if let Bytes::Block { id, .. } = &extent.bytes
            && id.counter % of == part
        {
            let sum = self.sums.references.entry(*id).or_default();
            sum.0 += 1;
            sum.1 += extent.len;
        }
        Ok(())
    }

    fn block(&mut self, parts: &Parts<'_>, value: &[u8], of: u64, part: u64) {
        let Some(id) = parts.block_at(0) else { return };
        let Some(block) = self.read::<record::Block>(parts, value) else { return };
        if part == 0 {
            self.sums.blocks += 1;
            self.sums.bytes += u64::from(block.len);
            self.sums.stored += block.stored;
            self.problems.extend(placement::block(&self.state.members.table, id, &block));
        }
        if id.counter % of != part {
            return;
        }
        let (references, live) = self.sums.references.remove(&id).unwrap_or_default();
        // Whatever changed extents of the block changed its record too, in the same batch.
        if self.touched.all || self.touched.blocks.contains(&id) {
            return;
        }
        if references != block.references {
            let says = block.references;
            self.say(format!("block {id} says {says} references, but {references} extents point into it"));
        }
        if live != block.live {
            let says = block.live;
            self.say(format!("block {id} says {says} live bytes, but extents cover {live}"));
        }
    }

    fn close_folder(&mut self) -> Result<()> {
        let Some((ino, entries, folders)) = self.sums.folder.take() else { return Ok(()) };
        let Some(inode) = self.view.find_inode(ino)? else { return Ok(()) };
        if inode.kind != Kind::Dir || !self.judged(ino) {
            return Ok(());
        }
        let says = inode.entries.unwrap_or(0);
        if says != entries {
            self.say(format!("folder {ino} says {says} entries but has {entries}"));
        }
        if inode.nlink != folders + 2 {
            self.say(format!("folder {ino} says {} links but has {}", inode.nlink, folders + 2));
        }
        Ok(())
    }

    fn close_file(&mut self) -> Result<()> {
        let Some((ino, stored, end)) = self.sums.file.take() else { return Ok(()) };
        let Some(inode) = self.view.find_inode(ino)? else { return Ok(()) };
        if !self.judged(ino) {
            return Ok(());
        }
        if inode.stored != stored {
            self.say(format!("inode {ino} says {} stored bytes, its extents have {stored}", inode.stored));
        }
        if end > inode.size && inode.cut.is_none() {
            self.say(format!(
                "an extent of inode {ino} ends at {end}, beyond the file's end at {}",
                inode.size
            ));
        }
        Ok(())
    }

    /// After all keys: what is left over, and the volume's counters.
    fn end_of_walk(&mut self, first: bool) -> Result<()> {
        self.sums.references.clear();
        if !first {
            return Ok(());
        }
        self.close_folder()?;
        self.close_file()?;
        let mut ranges = std::mem::take(&mut self.sums.ranges);
        ranges.sort_by_key(|(range, _)| range.first);
        for pair in ranges.windows(2) {
            if pair[0].0.contains(pair[1].0.first) {
                let first = pair[1].0.first;
                self.say(format!(
                    "block ids from {first} are in the range {} and in the one {}",
                    pair[0].1, pair[1].1
                ));
            }
        }
        if self.view.find_inode(Ino::ROOT)?.is_none_or(|root| root.kind != Kind::Dir) {
            self.say("the volume has no root folder".to_string());
        }
        if !self.touched.counters {
            let says = self.sums.counters.clone();
            for (what, says, is) in [
                ("inodes", says.inodes, self.sums.inodes),
                ("blocks", says.blocks, self.sums.blocks),
                ("bytes in blocks", says.bytes, self.sums.bytes),
                ("bytes on disks", says.stored, self.sums.stored),
                ("dead blocks", says.dead, self.sums.dead),
            ] {
                if says != is {
                    self.say(format!("the volume counts {says} {what} but has {is}"));
                }
            }
        }
        Ok(())
    }

    /// The second look at an inode, when all that points to it is known.
    fn close_inode(&mut self, parts: &Parts<'_>, value: &[u8]) -> Result<()> {
        let ino = Ino(parts.u64_at(0).unwrap_or(0));
        let Ok(inode) = minicbor::decode::<record::Inode>(value) else { return Ok(()) };
        if !self.judged(ino) || !self.plausible(ino) {
            return Ok(());
        }
        let names =
            u32::from(self.sums.named.has(ino)) + self.sums.more_names.get(&ino).copied().unwrap_or(0);
        let orphan = self.view.get::<record::Orphan>(&key::orphan(self.view.volume, ino))?.is_some();
        match (inode.kind, names) {
            _ if ino == Ino::ROOT => {}
            (_, 0) if inode.nlink > 0 => {
                self.say(format!("inode {ino} says {} links but no folder names it", inode.nlink));
            }
            (_, 0) if !orphan => self.say(format!("inode {ino} has no name and is no orphan")),
            (_, 0) => {}
            (Kind::Dir, 1) => {}
            (Kind::Dir, _) => self.say(format!("folder {ino} has {names} names")),
            (_, names) if names != inode.nlink => {
                self.say(format!("inode {ino} says {} links but has {names} names", inode.nlink));
            }
            _ => {}
        }
        if inode.kind == Kind::Dir && !self.sums.with_entries.has(ino) {
            if inode.entries.unwrap_or(0) != 0 {
                self.say(format!("folder {ino} says {} entries but has none", inode.entries.unwrap_or(0)));
            }
            if inode.nlink != 2 && inode.nlink != 0 {
                self.say(format!("folder {ino} says {} links but has 2", inode.nlink));
            }
        }
        if inode.stored > 0 && !self.sums.with_extents.has(ino) {
            self.say(format!("inode {ino} says {} stored bytes but has no extents", inode.stored));
        }
        if inode.has_xattrs() != self.sums.with_xattrs.has(ino) {
            self.say(format!("inode {ino} is wrong about whether it has extended attributes"));
        }
        Ok(())
    }
}

/// The name in an entry's key.
fn name_of<'a>(parts: &Parts<'a>) -> &'a [u8] {
    parts.rest.get(8..).unwrap_or_default()
}
