//! Dumps: the whole state as one stream of bytes, consistent at one batch, for any engine.
//!
//! A dump is a header, frames of changes and a trailer (docs/disk.md). [`Writer`] makes the bytes and hands them out in
//! pieces, so that they can go to a file or over the wire as they come; [`Reader`] takes them from anywhere. Applying all
//! changes of a dump in their order to an empty engine gives the state as of the batch that its trailer names. That a dump
//! is a row of changes and not of pairs lets it be made while batches are ordered: pairs that a walk over the state read
//! too early are followed by what changed since.
//!
//! # Invariants
//! - A reader believes no length before it has checked it, and takes no more than two frames' memory.
//! - Only a dump with its trailer counts: [`Reader::next`] answers `None` after the totals and the checksum over every
//!   byte fitted and nothing follows. Whoever must not act on half a dump reads it to the end first ([`check`]).
//!
//! # Not here
//! - What keys mean, and what must not come back from a dump: that is `meta`'s business.

use std::io::{self, Read, Write};
use std::ops::ControlFlow;

use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use crate::Engine;
use crate::batch::{self, Batch, Change, KEY_MAX, VALUE_MAX};
use crate::error::{Error, Result};

/// The version of the format that this code writes.
pub const VERSION: u32 = 1;

/// Bytes of the header, and of the trailer.
pub const HEADER: usize = 96;
const FRAME_HEADER: usize = 32;
const MAGIC: [u8; 8] = *b"TFSDUMP\0";
const FRAME_MAGIC: [u8; 4] = *b"TFDF";
const TRAILER_MAGIC: [u8; 4] = *b"TFDE";

/// A frame is closed when its changes take this many bytes.
const FRAME_RAW: usize = 512 << 10;
/// No longer frame is believed: one more change may have come on top.
const FRAME_RAW_MAX: usize = FRAME_RAW + KEY_MAX + VALUE_MAX + 16;
/// What cannot be compressed grows a little.
const FRAME_STORED_MAX: usize = FRAME_RAW_MAX + FRAME_RAW_MAX / 128 + 1024;
/// Fast; metadata shrinks to a quarter or less already.
const LEVEL: i32 = 1;

/// What a dump says before its first frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// Whose metadata it is.
    pub cluster: ClusterId,
    /// The incarnation of the engine that it was made from.
    pub incarnation: Incarnation,
    /// Its fence.
    pub fence: Fence,
    /// The last batch ordered when the dump was begun.
    pub seq: Seq,
    /// When that was, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Pairs in all, about, for progress bars.
    pub pairs: u64,
}

impl Header {
    /// Of a dump of this engine that begins now.
    pub fn of(engine: &dyn Engine, wall_ns: i64) -> Header {
        let stats = engine.stats();
        Header {
            cluster: engine.cluster(),
            incarnation: engine.incarnation(),
            fence: engine.fence(),
            seq: engine.ordered(),
            wall_ns,
            pairs: stats.replica_keys + stats.overlay_keys,
        }
    }
}

/// What a dump says after its last frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Trailer {
    /// The state is the one after this batch.
    pub seq: Seq,
    /// When the dump was ended, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Frames.
    pub frames: u64,
    /// Changes in them.
    pub changes: u64,
    /// Their bytes before compression.
    pub raw: u64,
    /// Bytes of the dump, the trailer left out.
    pub bytes: u64,
}

/// Makes the bytes of a dump.
pub struct Writer {
    out: Vec<u8>,
    raw: Vec<u8>,
    in_frame: u32,
    checksum: u32,
    trailer: Trailer,
    packer: zstd::bulk::Compressor<'static>,
}

impl Writer {
    /// Begins a dump.
    pub fn new(header: &Header) -> Result<Writer> {
        let packer =
            zstd::bulk::Compressor::new(LEVEL).map_err(Error::io("cannot begin to compress a dump"))?;
        let mut writer = Writer {
            out: Vec::new(),
            raw: Vec::new(),
            in_frame: 0,
            checksum: 0,
            trailer: Trailer::default(),
            packer,
        };
        writer.emit(&encode_header(header));
        Ok(writer)
    }

    /// Adds a pair.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        batch::push_put(&mut self.raw, key, value);
        self.added()
    }

    /// Adds a change.
    pub fn change(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::Put(key, value) => batch::push_put(&mut self.raw, key, value),
            Change::Delete(key) => batch::push_delete(&mut self.raw, key),
        }
        self.added()
    }

    /// Ends the dump: it holds the state after this batch.
    pub fn finish(&mut self, seq: Seq, wall_ns: i64) -> Result<Trailer> {
        self.close_frame()?;
        self.trailer.seq = seq;
        self.trailer.wall_ns = wall_ns;
        let bytes = encode_trailer(&self.trailer, self.checksum);
        self.out.extend_from_slice(&bytes);
        Ok(self.trailer)
    }

    /// How many bytes wait to be taken.
    pub fn waiting(&self) -> usize {
        self.out.len()
    }

    /// The bytes made since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// How many changes were added.
    pub fn changes(&self) -> u64 {
        self.trailer.changes + u64::from(self.in_frame)
    }

    fn added(&mut self) -> Result<()> {
        self.in_frame += 1;
        if self.raw.len() >= FRAME_RAW { self.close_frame() } else { Ok(()) }
    }

    fn close_frame(&mut self) -> Result<()> {
        if self.raw.is_empty() {
            return Ok(());
        }
        let stored = self.packer.compress(&self.raw).map_err(Error::io("cannot compress a dump"))?;
        let mut header = [0; FRAME_HEADER];
        header[..4].copy_from_slice(&FRAME_MAGIC);
        header[4..8].copy_from_slice(&(stored.len() as u32).to_le_bytes());
        header[8..12].copy_from_slice(&(self.raw.len() as u32).to_le_bytes());
        header[12..16].copy_from_slice(&self.in_frame.to_le_bytes());
        header[16..24].copy_from_slice(&self.trailer.frames.to_le_bytes());
        header[24..28].copy_from_slice(&crc32c::crc32c(&stored).to_le_bytes());
        seal(&mut header);
        self.trailer.frames += 1;
        self.trailer.changes += u64::from(self.in_frame);
        self.trailer.raw += self.raw.len() as u64;
        self.raw.clear();
        self.in_frame = 0;
        self.emit(&header);
        self.emit(&stored);
        Ok(())
    }

    fn emit(&mut self, bytes: &[u8]) {
        self.checksum = crc32c::crc32c_append(self.checksum, bytes);
        self.trailer.bytes += bytes.len() as u64;
        self.out.extend_from_slice(bytes);
    }
}

/// Reads a dump.
pub struct Reader<R> {
    from: R,
    header: Header,
    checksum: u32,
    seen: Trailer,
    ended: Option<Trailer>,
}

impl<R: Read> Reader<R> {
    /// Reads the header and checks it.
    pub fn new(mut from: R) -> Result<Reader<R>> {
        let mut bytes = [0; HEADER];
        // Something else may be shorter than a header.
        fill(&mut from, &mut bytes[..8], "its header")?;
        if bytes[..8] != MAGIC {
            return Err(Error::Dump { what: "it does not begin as a dump of TorchFS does".into() });
        }
        fill(&mut from, &mut bytes[8..], "its header")?;
        let header = decode_header(&bytes)?;
        let seen = Trailer { bytes: HEADER as u64, ..Trailer::default() };
        Ok(Reader { from, header, checksum: crc32c::crc32c(&bytes), seen, ended: None })
    }

    /// What it says about itself.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What it says at its end, once that was read.
    pub fn trailer(&self) -> Option<&Trailer> {
        self.ended.as_ref()
    }

    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.seen.bytes
    }

    /// The changes of the next frame; `None` when the dump ended as it should.
    #[expect(clippy::should_implement_trait, reason = "an iterator that fails would be no shorter")]
    pub fn next(&mut self) -> Result<Option<Vec<Change>>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        let frame = self.seen.frames;
        let mut header = [0; FRAME_HEADER];
        fill(&mut self.from, &mut header, &format!("the header of frame {frame}"))?;
        if header[..4] == TRAILER_MAGIC {
            self.end(&header)?;
            return Ok(None);
        }
        let at = |from: usize| u32_at(&header, from);
        if header[..4] != FRAME_MAGIC || !is_sealed(&header) {
            return Err(damaged(format!("the header of frame {frame} at byte {}", self.seen.bytes)));
        }
        let (stored_len, raw_len, count) = (at(4) as usize, at(8) as usize, at(12));
        if stored_len > FRAME_STORED_MAX || raw_len > FRAME_RAW_MAX || u64_at(&header, 16) != frame {
            return Err(damaged(format!("frame {frame} at byte {} does not belong there", self.seen.bytes)));
        }
        let mut stored = vec![0; stored_len];
        fill(&mut self.from, &mut stored, &format!("frame {frame}"))?;
        if crc32c::crc32c(&stored) != at(24) {
            return Err(damaged(format!(
                "frame {frame} at byte {} does not fit its checksum",
                self.seen.bytes
            )));
        }
        let changes = zstd::bulk::decompress(&stored, raw_len)
            .ok()
            .filter(|raw| raw.len() == raw_len)
            .and_then(|raw| Batch::decode(&raw, count))
            .ok_or_else(|| damaged(format!("frame {frame} at byte {} makes no sense", self.seen.bytes)))?;
        self.checksum = crc32c::crc32c_append(crc32c::crc32c_append(self.checksum, &header), &stored);
        self.seen.frames += 1;
        self.seen.changes += u64::from(count);
        self.seen.raw += raw_len as u64;
        self.seen.bytes += (FRAME_HEADER + stored_len) as u64;
        Ok(Some(changes))
    }

    fn end(&mut self, first: &[u8; FRAME_HEADER]) -> Result<()> {
        let mut bytes = [0; HEADER];
        bytes[..FRAME_HEADER].copy_from_slice(first);
        fill(&mut self.from, &mut bytes[FRAME_HEADER..], "its end")?;
        if !is_sealed(&bytes) {
            return Err(damaged("its end does not fit its checksum".into()));
        }
        let (trailer, checksum) = decode_trailer(&bytes);
        let told = Trailer { seq: trailer.seq, wall_ns: trailer.wall_ns, ..self.seen };
        if trailer != told || checksum != self.checksum {
            return Err(damaged("its parts do not fit its end".into()));
        }
        let mut more = [0];
        match self.from.read(&mut more) {
            Ok(0) => {}
            Ok(_) => return Err(damaged("something follows its end".into())),
            Err(source) => return Err(Error::Io { what: "cannot read the dump".into(), source }),
        }
        self.ended = Some(trailer);
        Ok(())
    }
}

/// Reads a dump to its end and checks every byte.
pub fn check(from: impl Read, mut told: impl FnMut(u64)) -> Result<(Header, Trailer)> {
    let mut reader = Reader::new(from)?;
    while reader.next()?.is_some() {
        told(reader.bytes());
    }
    let header = *reader.header();
    let trailer = reader.trailer().copied().unwrap_or_default();
    Ok((header, trailer))
}

/// Writes the state of an engine that nobody else uses; `told` hears how many pairs are done.
///
/// A service that goes on ordering batches makes its dumps itself, in pieces; this holds one snapshot all along.
pub fn store(
    engine: &dyn Engine,
    wall_ns: i64,
    to: &mut dyn Write,
    mut told: impl FnMut(u64),
) -> Result<(Header, Trailer)> {
    let header = Header::of(engine, wall_ns);
    let mut writer = Writer::new(&header)?;
    let mut write = |bytes: Vec<u8>| to.write_all(&bytes).map_err(Error::io("cannot write the dump"));
    let mut failed = None;
    let seq = engine.snapshot(&mut |key, value| {
        let put = writer.put(key, value).and_then(|()| match writer.waiting() >= FRAME_RAW {
            true => {
                told(writer.changes());
                write(writer.take())
            }
            false => Ok(()),
        });
        match put {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let trailer = writer.finish(seq, wall_ns)?;
    write(writer.take())?;
    Ok((header, trailer))
}

fn fill(from: &mut impl Read, bytes: &mut [u8], what: &str) -> Result<()> {
    from.read_exact(bytes).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => Error::Dump { what: format!("it is cut off within {what}") },
        _ => Error::Io { what: "cannot read the dump".into(), source },
    })
}

fn damaged(what: String) -> Error {
    Error::Dump { what: format!("it is damaged: {what}") }
}

fn encode_header(header: &Header) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&header.incarnation.0.to_le_bytes());
    // 16..32: no features yet, must-know and may-know.
    bytes[32..40].copy_from_slice(&header.cluster.0.to_le_bytes());
    bytes[40..48].copy_from_slice(&header.fence.0.to_le_bytes());
    bytes[48..56].copy_from_slice(&header.seq.0.to_le_bytes());
    bytes[56..64].copy_from_slice(&header.wall_ns.to_le_bytes());
    bytes[64..72].copy_from_slice(&header.pairs.to_le_bytes());
    seal(&mut bytes);
    bytes
}

fn decode_header(bytes: &[u8; HEADER]) -> Result<Header> {
    let (version, must_know) = (u32_at(bytes, 8), u64_at(bytes, 16));
    // A later version may end its header elsewhere: it is told first.
    if version > VERSION {
        return Err(Error::Unsupported {
            what: format!("the dump has version {version}, this is {VERSION}"),
        });
    }
    if !is_sealed(bytes) {
        return Err(damaged("its header does not fit its checksum".into()));
    }
    if must_know != 0 {
        return Err(Error::Unsupported { what: format!("the dump has features {must_know:#x}") });
    }
    Ok(Header {
        cluster: ClusterId(u64_at(bytes, 32)),
        incarnation: Incarnation(u32_at(bytes, 12)),
        fence: Fence(u64_at(bytes, 40)),
        seq: Seq(u64_at(bytes, 48)),
        wall_ns: u64_at(bytes, 56).cast_signed(),
        pairs: u64_at(bytes, 64),
    })
}

fn encode_trailer(trailer: &Trailer, checksum: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&TRAILER_MAGIC);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
    bytes[8..16].copy_from_slice(&trailer.seq.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&trailer.wall_ns.to_le_bytes());
    bytes[24..32].copy_from_slice(&trailer.frames.to_le_bytes());
    bytes[32..40].copy_from_slice(&trailer.changes.to_le_bytes());
    bytes[40..48].copy_from_slice(&trailer.raw.to_le_bytes());
    bytes[48..56].copy_from_slice(&trailer.bytes.to_le_bytes());
    seal(&mut bytes);
    bytes
}

fn decode_trailer(bytes: &[u8; HEADER]) -> (Trailer, u32) {
    let trailer = Trailer {
        seq: Seq(u64_at(bytes, 8)),
        wall_ns: u64_at(bytes, 16).cast_signed(),
        frames: u64_at(bytes, 24),
        changes: u64_at(bytes, 32),
        raw: u64_at(bytes, 40),
        bytes: u64_at(bytes, 48),
    };
    (trailer, u32_at(bytes, 4))
}

/// Puts the checksum of all that comes before into the last four bytes.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let checksum = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
}

fn is_sealed(bytes: &[u8]) -> bool {
    let end = bytes.len() - 4;
    crc32c::crc32c(&bytes[..end]) == u32_at(bytes, end)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(eight)
}
