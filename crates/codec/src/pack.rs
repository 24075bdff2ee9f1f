//! Packing: from the bytes of a block to its stored chunks.
//!
//! Most training data (JPEG, video, packed tensors) does not shrink, and finding that out for every chunk costs more than
//! everything else a writer does. So three small samples decide about the whole block first, and within a block that
//! looks promising a run of chunks that did not shrink makes the next one prove itself by a sample.

use std::cell::RefCell;
use std::ops::Range;

use bytes::Bytes;
use torchfs_proto::BlockId;
use torchfs_proto::chunk::{CHUNK, ChunkInfo, MAX_BLOCK, codec};

use crate::{Compression, Error, checksum};

/// Bytes of one sample.
const SAMPLE: usize = 4 << 10;

/// So many chunks in a row that did not shrink make the next one be sampled before it is tried.
const PATIENCE: u32 = 3;

/// A block as it is stored.
#[derive(Clone, Debug, Default)]
pub struct Encoded {
    /// One info per chunk, in order.
    pub chunks: Vec<ChunkInfo>,
    /// The stored bytes of all chunks, one after the other, in parts of any length.
    pub payload: Vec<Bytes>,
}

impl Encoded {
    /// How many bytes are stored.
    pub fn stored(&self) -> u64 {
        torchfs_proto::chunk::stored_len(&self.chunks)
    }
}

/// Cuts a block into chunks, packs those that shrink, and checksums all. The bytes may come in parts of any length; what stays
/// raw is not copied.
pub fn encode(block: BlockId, parts: &[Bytes], compression: Compression) -> Result<Encoded, Error> {
    let rope = Rope::new(parts);
    if rope.len > MAX_BLOCK as usize {
        return Err(Error::TooLarge { block, len: rope.len as u64 });
    }
    let mut packer = Packer::new(block, compression)?;
    let mut out = Encoded {
        chunks: Vec::with_capacity(rope.len.div_ceil(CHUNK as usize)),
        payload: Vec::with_capacity(parts.len()),
    };
    let promising = packer.wants_to_pack() && rope.promising(&mut packer);

    // Neighbouring chunks of one kind leave as one run: raw ones as slices of the input, packed ones in one buffer.
    let mut raw_run = 0..0;
    let mut packed_run = Vec::new();
    let mut misses = 0;
    let mut gathered = Vec::new();
    let mut start = 0;
    while start < rope.len {
        let range = start..rope.len.min(start + CHUNK as usize);
        let index = out.chunks.len() as u32;
        let raw = range.len() as u32;
        let mut packed = None;
        if promising {
            let content = rope.contiguous(range.clone(), &mut gathered);
            if misses < PATIENCE || packer.shrinks(&content[..content.len().min(SAMPLE)]) {
                packed = packer.pack(content);
            }
        }
        if let Some((codec, bytes)) = packed {
            misses = 0;
            rope.push(&mut out.payload, std::mem::replace(&mut raw_run, range.end..range.end));
            out.chunks.push(ChunkInfo {
                codec,
                stored: bytes.len() as u32,
                raw,
                crc: checksum(block, index, [bytes]),
            });
            packed_run.extend_from_slice(bytes);
        } else {
            misses += 1;
            if !packed_run.is_empty() {
                out.payload.push(std::mem::take(&mut packed_run).into());
            }
            out.chunks.push(ChunkInfo {
                codec: codec::RAW,
                stored: raw,
                raw,
                crc: checksum(block, index, rope.slices(range.clone())),
            });
            raw_run.end = range.end;
        }
        start = range.end;
    }
    rope.push(&mut out.payload, raw_run);
    if !packed_run.is_empty() {
        out.payload.push(packed_run.into());
    }
    Ok(out)
}

/// Unpacks into a buffer of the expected length; `None` if the bytes make no sense, else the length that came out.
pub(crate) fn unpack(how: u8, stored: &[u8], out: &mut [u8]) -> Option<usize> {
    thread_local! {
        // A context costs 150 KB to set up; readers unpack thousands of chunks per second.
        static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
    }
    match how {
        codec::LZ4 => lz4_flex::block::decompress_into(stored, out).ok(),
        codec::ZSTD => ZSTD.with_borrow_mut(|context| {
            if context.is_none() {
                *context = zstd::bulk::Decompressor::new().ok();
            }
            context.as_mut()?.decompress_to_buffer(stored, out).ok()
        }),
        _ => None,
    }
}

/// The bytes of a block in several parts.
struct Rope<'a> {
    parts: &'a [Bytes],
    /// Where each part starts.
    starts: Vec<usize>,
    len: usize,
}

impl<'a> Rope<'a> {
    fn new(parts: &'a [Bytes]) -> Rope<'a> {
        let mut len = 0;
        let starts = parts
            .iter()
            .map(|part| {
                let start = len;
                len += part.len();
                start
            })
            .collect();
        Rope { parts, starts, len }
    }

    /// The parts that hold a range, each with its own range of bytes.
    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (&'a Bytes, Range<usize>)> + '_ {
        let first = self.starts.partition_point(|start| *start <= range.start).saturating_sub(1);
        self.parts[first.min(self.parts.len())..]
            .iter()
            .zip(&self.starts[first.min(self.starts.len())..])
            .map_while(move |(part, start)| {
                (*start < range.end).then(|| {
                    let from = range.start.saturating_sub(*start).min(part.len());
                    let to = (range.end - start).min(part.len());
                    (part, from..to)
                })
            })
    }

    fn slices(&self, range: Range<usize>) -> impl Iterator<Item = &'a [u8]> + '_ {
        self.pieces(range).map(|(part, within)| &part[within])
    }

    /// Appends the range to a payload without copying it.
    fn push(&self, payload: &mut Vec<Bytes>, range: Range<usize>) {
        if !range.is_empty() {
            payload.extend(self.pieces(range).filter(|(_, r)| !r.is_empty()).map(|(part, r)| part.slice(r)));
        }
    }

    /// The range in one slice; copied into the buffer only if it spans parts.
    fn contiguous<'b>(&self, range: Range<usize>, buffer: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        let len = range.len();
        if let Some(whole) = self.slices(range.clone()).next().filter(|slice| slice.len() == len) {
            return whole;
        }
        buffer.clear();
        self.slices(range).for_each(|slice| buffer.extend_from_slice(slice));
        buffer
    }

    /// Whether one of three samples shrinks. Small blocks are simply tried.
    fn promising(&self, packer: &mut Packer) -> bool {
        if self.len <= 4 * SAMPLE {
            return true;
        }
        let mut buffer = Vec::new();
        [0, self.len / 2, self.len - SAMPLE].into_iter().any(|start| {
            let sample = self.contiguous(start..start + SAMPLE, &mut buffer);
            packer.shrinks(sample)
        })
    }
}

/// A compressor with its buffer.
struct Packer {
    kind: Kind,
    buffer: Vec<u8>,
}

enum Kind {
    Nothing,
    Lz4,
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Packer {
    fn new(block: BlockId, compression: Compression) -> Result<Packer, Error> {
        let kind = match compression {
            Compression::None => Kind::Nothing,
            Compression::Lz4 => Kind::Lz4,
            Compression::Zstd(level) => Kind::Zstd(
                zstd::bulk::Compressor::new(level).map_err(|e| Error::Pack { block, why: e.to_string() })?,
            ),
        };
        Ok(Packer { kind, buffer: Vec::new() })
    }

    fn wants_to_pack(&self) -> bool {
        !matches!(self.kind, Kind::Nothing)
    }

    /// Whether a sample saves a sixteenth.
    fn shrinks(&mut self, sample: &[u8]) -> bool {
        self.pack(sample).is_some()
    }

    /// The packed bytes, if packing saves at least a sixteenth: less is not worth the reader's work.
    fn pack(&mut self, content: &[u8]) -> Option<(u8, &[u8])> {
        let room = match self.kind {
            Kind::Nothing => 0,
            Kind::Lz4 => lz4_flex::block::get_maximum_output_size(content.len()),
            Kind::Zstd(_) => zstd::zstd_safe::compress_bound(content.len()),
        };
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        let (codec, len) = match &mut self.kind {
            Kind::Nothing => return None,
            Kind::Lz4 => (codec::LZ4, lz4_flex::block::compress_into(content, &mut self.buffer).ok()?),
            Kind::Zstd(context) => {
                (codec::ZSTD, context.compress_to_buffer(content, self.buffer.as_mut_slice()).ok()?)
            }
        };
        (len < content.len() && len <= content.len() - content.len() / 16)
            .then(|| (codec, &self.buffer[..len]))
    }
}
