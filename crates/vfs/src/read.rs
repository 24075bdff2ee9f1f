//! Reading: handle → extents → cache or blocks.
//!
//! What was written here and is not committed lies on top of the extents. Bytes leave as slices of what the cache, the
//! network or the writer brought, without a copy. Who reads one range after the other gets the following blocks fetched ahead,
//! several at a time, so that a cold file streams from all servers; who jumps about gets the chunks it asks for.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::future::{Either, select};
use torchfs_proto::chunk::CHUNK;
use torchfs_proto::extent::{BlockRef, Extent, Source};
use torchfs_proto::msg::meta::{Done, Op, lease};
use torchfs_proto::{Code, Fault, Ino, Result};

use crate::extents::{Extents, Unknown};
use crate::node::{Inode, State};
use crate::open::Handle;
use crate::{Fh, Vfs, unexpected};

/// Holes are read from here.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// A read this near to where the last one ended goes on with it: the kernel sends several at once, in any order.
const NEAR: u64 = 2 << 20;
/// A first read of this size is taken for the start of many.
const FIRST_LARGE: u64 = 128 << 10;
/// The first window of reading ahead.
const AHEAD_MIN: u64 = 1 << 20;

/// A part of what is read.
enum Part {
    Here(Bytes),
    Zeros(u64),
    Block { block: BlockRef, from: u32, len: u32 },
}

/// How a read goes on.
enum Step {
    Known(Vec<Part>),
    /// Extents from here on are needed.
    Fetch(u64),
    /// Others write too: ask each time.
    Shared,
    /// No lease to read under.
    NoRight,
}

/// How a handle is being read.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// Where the last read ended.
    next: u64,
    /// How far to fetch ahead.
    window: u64,
    /// Fetched ahead up to here.
    upto: u64,
}

impl Vfs {
    /// Reads; short only at the end of the file.
    pub async fn read(&self, _ino: Ino, fh: Fh, offset: u64, len: u32, _flags: i32) -> Result<Vec<Bytes>> {
        let handle = self.handle(fh)?;
        handle.used();
        let range = offset..offset.saturating_add(u64::from(len));
        match self.read_node(&handle.node, range.clone(), Some(&handle)).await {
            // The extents were old: a block dies two lease terms after it was let go of.
            Err(fault) if fault.code == Code::Gone => {
                if let Some(file) = &mut handle.node.lock().file {
                    file.extents.clear();
                }
                self.read_node(&handle.node, range, None).await
            }
            done => done,
        }
    }

    /// The bytes of a range, cut at the end of the file.
    pub(crate) async fn read_node(
        &self,
        node: &Arc<Inode>,
        range: Range<u64>,
        handle: Option<&Arc<Handle>>,
    ) -> Result<Vec<Bytes>> {
        let parts = self.resolve(node, range.clone()).await?;
        if let Some(handle) = handle {
            self.read_ahead(handle, range);
        }
        self.gather(parts).await
    }

    /// Finds out where the bytes of a range are.
    async fn resolve(&self, node: &Arc<Inode>, range: Range<u64>) -> Result<Vec<Part>> {
        loop {
            match self.try_resolve(node, range.clone()) {
                Step::Known(parts) => return Ok(parts),
                Step::Fetch(from) => self.fetch_extents(node, from).await?,
                Step::Shared => {
                    // Written before others came, and not called back because the lease ran out.
                    self.write_back(node).await;
                    return self.resolve_shared(node, range).await;
                }
                Step::NoRight => self.ask_to_read(node).await?,
            }
        }
    }

    /// Waits for the right to read, or until it may be read without.
    async fn ask_to_read(&self, node: &Arc<Inode>) -> Result<()> {
        let mut asking = std::pin::pin!(self.open_data(node, false));
        loop {
            let progress = node.progress.listen();
            if node.lock().may_read_apart() {
                return Ok(());
            }
            match select(asking, progress).await {
                Either::Left((done, _)) => return done,
                Either::Right((_, rest)) => asking = rest,
            }
        }
    }

    fn try_resolve(&self, node: &Inode, range: Range<u64>) -> Step {
        let mut state = node.lock();
        let version = state.attr.as_ref().map(|attr| attr.data_version);
        if let Some(version) = version
            && self.holds_any(node.ino, &[lease::READ, lease::WRITE])
        {
            let epoch = self.0.meta.lease_epoch();
            let file = state.file();
            // Extents that came in late, under an earlier lease, say that there is nothing where the file ended then.
            if file.epoch != epoch || file.version < version {
                file.extents.clear();
                file.epoch = epoch;
                file.version = file.version.max(version);
            }
            return match resolve_known(&state, range) {
                Ok(parts) => Step::Known(parts),
                Err(Unknown(from)) => Step::Fetch(from),
            };
        }
        if self.0.meta.holds(node.ino, lease::SHARED).is_some() {
            return Step::Shared;
        }
        if state.may_read_apart() {
            // The kernel holds the page's lock for this, so the recall would wait for it, as it would for the recall.
            state.read_apart += 1;
            return Step::Shared;
        }
        Step::NoRight
    }

    /// Fetches a page of extents and keeps it if nothing overtook it.
    pub(crate) async fn fetch_extents(&self, node: &Arc<Inode>, from: u64) -> Result<()> {
        let asked = self.asked();
        let known = node.lock().file().version;
        let page = self.ask_extents(node.ino, from..u64::MAX).await?;
        if page.version < known {
            // It lost a change that it had told of; asking again would bring the same.
            let what = format!("version {known} of inode {} was told, and is {} now", node.ino, page.version);
            return Err(
                Fault::new(Code::Io, what).next("mount again, and look at the metadata service's log")
            );
        }
        let mut state = node.lock();
        let epoch = self.0.meta.lease_epoch();
        let file = state.file();
        if !self.is_current(asked, node.ino) || page.version < file.version {
            return Ok(());
        }
        file.learn_version(page.version, epoch);
        if file.extents.len() + page.extents.len() > self.0.config.extents_max {
            file.extents.clear();
        }
        file.extents.install(from..page.upto, &page.extents);
        Ok(())
    }

    pub(crate) async fn ask_extents(&self, ino: Ino, range: Range<u64>) -> Result<Page> {
        let done = self.0.meta.ask(Op::Extents { ino, from: range.start, to: range.end }).await?;
        let Done::Extents { extents, upto, data_version, size } = done else {
            return Err(unexpected("extents", &done));
        };
        if upto <= range.start {
            return Err(Fault::new(Code::Protocol, format!("a page of extents of inode {ino} is empty")));
        }
        Ok(Page { extents, upto, version: data_version, size })
    }

    /// Others write the file: nothing is remembered.
    async fn resolve_shared(&self, node: &Arc<Inode>, range: Range<u64>) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let page = self.ask_extents(node.ino, at..range.end).await?;
            let end = range.end.min(page.size).min(page.upto);
            if end <= at {
                break;
            }
            let mut extents = Extents::default();
            extents.install(at..page.upto, &page.extents);
            let found = extents.find(at..end).map_err(|_| Fault::from(Code::Protocol))?;
            found.into_iter().for_each(|extent| push_extent(&mut parts, extent));
            at = end;
        }
        Ok(parts)
    }

    /// The bytes that extents stand for, whatever was written over them since.
    pub(crate) async fn read_extents(&self, extents: &[Extent]) -> Result<Vec<Bytes>> {
        let mut parts = Vec::with_capacity(extents.len());
        extents.iter().cloned().for_each(|extent| push_extent(&mut parts, extent));
        self.gather(parts).await
    }

    /// Fetches what is not here, all at once.
    async fn gather(&self, parts: Vec<Part>) -> Result<Vec<Bytes>> {
        let mut out = Vec::with_capacity(parts.len());
        let waits = parts.iter().filter(|part| matches!(part, Part::Block { .. })).count();
        if waits <= 1 {
            for part in parts {
                self.gather_part(part, &mut out).await?;
            }
            return Ok(out);
        }
        let all = try_join_all(parts.into_iter().map(|part| async move {
            let mut bytes = Vec::new();
            self.gather_part(part, &mut bytes).await?;
            Ok::<_, Fault>(bytes)
        }))
        .await?;
        all.into_iter().for_each(|bytes| out.extend(bytes));
        Ok(out)
    }

    async fn gather_part(&self, part: Part, out: &mut Vec<Bytes>) -> Result<()> {
        match part {
            Part::Here(bytes) => out.push(bytes),
            Part::Zeros(mut len) => {
                while len > 0 {
                    let some = len.min(ZEROS.len() as u64);
                    out.push(Bytes::from_static(&ZEROS[..some as usize]));
                    len -= some;
                }
            }
            Part::Block { block, from, len } => {
                let chunks = chunks(from, len);
                let got = self.0.cache.get(&block, chunks.clone()).await?;
                slice_chunks(&block, from, len, chunks.start, got, out)?;
            }
        }
        Ok(())
    }

    /// Notices reads in a row and fetches what follows them.
    fn read_ahead(&self, handle: &Arc<Handle>, range: Range<u64>) {
        let most = self.0.config.readahead_max;
        if most == 0 {
            return;
        }
        let block = u64::from(self.0.meta.info().volume.block_size.max(1));
        let wanted = {
            let mut ahead = handle.ahead.lock();
            if range.start.abs_diff(ahead.next) > NEAR {
                *ahead = ReadAhead { next: range.end, window: 0, upto: 0 };
                return;
            }
            ahead.next = ahead.next.max(range.end);
            if ahead.window == 0 && range.end - range.start < FIRST_LARGE {
                // Maybe just a header: wait for the next one.
                ahead.window = AHEAD_MIN.min(most) / 2;
                return;
            }
            ahead.window = (ahead.window * 2).clamp(AHEAD_MIN.min(most), most);
            let from = ahead.upto.max(ahead.next);
            let mut to = ahead.next + ahead.window;
            if ahead.window >= block {
                // Whole blocks: their servers read them in one go, around the page cache.
                to = to.next_multiple_of(block);
            }
            // In large steps: half a window at a time.
            if to - from.min(to) < ahead.window / 2 {
                return;
            }
            from..to
        };
        let parts = {
            let state = handle.node.lock();
            match resolve_known(&state, wanted.clone()) {
                Ok(parts) => parts,
                // Extents that are not here are fetched by the read that needs them.
                Err(_) => return,
            }
        };
        let mut upto = wanted.start;
        for part in parts {
            let len = match part {
                Part::Here(bytes) => bytes.len() as u64,
                Part::Zeros(len) => len,
                Part::Block { block, from, len } => {
                    let Some(slot) = self.0.prefetches.try_take() else { break };
                    let vfs = self.clone();
                    self.0.meta.spawn(async move {
                        let _slot = slot;
                        vfs.0.cache.prefetch(&block, chunks(from, len)).await;
                    });
                    u64::from(len)
                }
            };
            upto += len;
        }
        let mut ahead = handle.ahead.lock();
        ahead.upto = ahead.upto.max(upto);
    }
}

pub(crate) struct Page {
    pub(crate) extents: Vec<Extent>,
    pub(crate) upto: u64,
    version: u64,
    pub(crate) size: u64,
}

/// Where the bytes of a range are, as far as extents are known; cut at the end of the file.
fn resolve_known(state: &State, range: Range<u64>) -> Result<Vec<Part>, Unknown> {
    let (Some(attr), Some(file)) = (&state.attr, &state.file) else { return Err(Unknown(range.start)) };
    let committed = attr.size;
    let size = committed.max(file.overlay.end().unwrap_or(0));
    let end = range.end.min(size);
    let mut parts = Vec::new();
    let mut at = range.start;
    if at >= end {
        return Ok(parts);
    }
    let below = |parts: &mut Vec<Part>, gap: Range<u64>| {
        // Past the committed end there are no extents to ask for.
        let known = gap.start.min(committed)..gap.end.min(committed);
        if !known.is_empty() {
            for extent in file.extents.find(known.clone())? {
                push_extent(parts, extent);
            }
        }
        let zeros = gap.end - gap.start.max(known.end);
        if zeros > 0 {
            parts.push(Part::Zeros(zeros));
        }
        Ok(())
    };
    for (offset, bytes) in file.overlay.read(at..end) {
        if offset > at {
            below(&mut parts, at..offset)?;
        }
        at = offset + bytes.len() as u64;
        parts.push(Part::Here(bytes));
    }
    if at < end {
        below(&mut parts, at..end)?;
    }
    Ok(parts)
}

fn push_extent(parts: &mut Vec<Part>, extent: Extent) {
    match &extent.source {
        Source::Hole => parts.push(Part::Zeros(extent.len)),
        Source::Inline(bytes) => {
            let have = bytes.len().min(extent.len as usize);
            parts.push(Part::Here(Bytes::copy_from_slice(&bytes[..have])));
            if extent.len > have as u64 {
                parts.push(Part::Zeros(extent.len - have as u64));
            }
        }
        Source::Block { offset, .. } => {
            let Some(block) = BlockRef::of(&extent.source) else { return };
            parts.push(Part::Block { block, from: *offset, len: extent.len as u32 });
        }
    }
}

/// The chunks of a block that hold a range of its bytes.
fn chunks(from: u32, len: u32) -> Range<u16> {
    let index = |n: u64| u16::try_from(n).unwrap_or(u16::MAX);
    let end = u64::from(from) + u64::from(len);
    index(u64::from(from / CHUNK))..index(end.div_ceil(u64::from(CHUNK)))
}

/// Cuts a range of a block out of its chunks.
fn slice_chunks(
    block: &BlockRef,
    from: u32,
    len: u32,
    first: u16,
    chunks: Vec<Bytes>,
    out: &mut Vec<Bytes>,
) -> Result<()> {
    let mut skip = (from - u32::from(first) * CHUNK) as usize;
    let mut left = len as usize;
    for chunk in chunks {
        let some = chunk.len().saturating_sub(skip).min(left);
        if some > 0 {
            out.push(chunk.slice(skip..skip + some));
        }
        left -= some;
        skip = skip.saturating_sub(chunk.len());
    }
    if left > 0 {
        return Err(Fault::new(Code::Corrupt, format!("block {} is {left} bytes short", block.id)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use torchfs_proto::{BlockId, LayoutId};

    fn block() -> BlockRef {
        BlockRef {
            id: BlockId::default(),
            layout: LayoutId(1),
            block_len: 3 * CHUNK,
            substitutes: Vec::new(),
        }
    }

    #[test]
    fn a_range_is_cut_from_the_chunks_that_hold_it() {
        let bytes: Vec<u8> = (0..3 * CHUNK).map(|i| (i % 251) as u8).collect();
        let all: Vec<Bytes> = bytes.chunks(CHUNK as usize).map(Bytes::copy_from_slice).collect();
        for (from, len) in
            [(0, 1), (CHUNK - 1, 2), (10, 2 * CHUNK), (CHUNK, CHUNK), (2 * CHUNK + 5, CHUNK - 5)]
        {
            let range = chunks(from, len);
            let got = all[range.start as usize..range.end as usize].to_vec();
            let mut out = Vec::new();
            slice_chunks(&block(), from, len, range.start, got, &mut out).expect("the chunks hold it");
            assert_eq!(out.concat(), bytes[from as usize..(from + len) as usize]);
        }
    }

    #[test]
    fn a_short_block_is_an_error_and_never_short_bytes() {
        let mut out = Vec::new();
        let got = vec![Bytes::from_static(b"short")];
        assert_eq!(slice_chunks(&block(), 0, 6, 0, got, &mut out).map_err(|f| f.code), Err(Code::Corrupt));
    }
}
