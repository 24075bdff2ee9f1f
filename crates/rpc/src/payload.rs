//! Bulk bytes on their way: what is sent (`Payload`) and what arrived (`Data`).
//!
//! Sending copies nothing: memory goes out by vectored writes, file ranges by sendfile. Sendfile of bytes that are not in
//! the page cache would make a thread of the runtime wait for the disk, so the ranges are probed first (a read of one
//! byte that refuses to wait); cold ranges are read on a blocking thread instead.
//!
//! # Invariants
//! - A payload that was handed to the socket is memory, or ranges of a file with a descriptor.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use torchfs_proto::disk::DiskFile;
use torchfs_proto::{Code, Fault, Result};

use crate::buf::AlignedBuf;
use crate::frame::PAYLOAD_MAX;

/// Up to this length a file is read where the caller stands; a hop to another thread would cost more.
const INLINE_READ_MAX: u64 = 64 << 10;
/// The page cache is probed once per so many bytes; the kernel reads ahead in such steps.
const PROBE_EVERY: u64 = 128 << 10;

/// Bulk bytes to send.
#[derive(Default)]
pub enum Payload {
    /// Nothing.
    #[default]
    None,
    /// Shared bytes.
    Bytes(Bytes),
    /// Shared bytes, one part after the other.
    Parts(Vec<Bytes>),
    /// A buffer of the sender's own.
    Buf(AlignedBuf),
    /// Ranges `(offset, length)` of a file, one after the other.
    File {
        /// The file.
        file: Arc<dyn DiskFile>,
        /// Where to read how much.
        ranges: Vec<(u64, u64)>,
    },
}

impl Payload {
    /// How many bytes there are.
    pub fn len(&self) -> u64 {
        match self {
            Payload::None => 0,
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::Parts(parts) => parts.iter().map(|part| part.len() as u64).sum(),
            Payload::Buf(buf) => buf.len() as u64,
            Payload::File { ranges, .. } => {
                ranges.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len))
            }
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The checksum of bytes in memory; files are read before.
    pub(crate) fn crc(&self) -> u32 {
        match self {
            Payload::None | Payload::File { .. } => 0,
            Payload::Bytes(bytes) => crc32c::crc32c(bytes),
            Payload::Parts(parts) => parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part)),
            Payload::Buf(buf) => crc32c::crc32c(buf),
        }
    }

    /// How a file has to be brought into memory before it is sent; `summed` if the frame's checksum covers it.
    pub(crate) fn way(&self, summed: bool) -> Way {
        let Payload::File { file, ranges } = self else {
            return Way::AsIs;
        };
        let short = self.len() <= INLINE_READ_MAX;
        match file.raw_fd() {
            None if short => Way::ReadHere,
            None => Way::ReadElsewhere,
            Some(fd) => match (is_cached(&**file, fd, ranges), summed) {
                (false, _) => Way::ReadElsewhere,
                (true, false) => Way::AsIs,
                (true, true) if short => Way::ReadHere,
                (true, true) => Way::ReadElsewhere,
            },
        }
    }

    /// The bytes of a file payload in memory; may wait for the disk.
    pub(crate) fn read(self) -> Result<Payload> {
        let Payload::File { file, ranges } = &self else {
            return Ok(self);
        };
        let mut buf = AlignedBuf::with_len(self.checked_len()?);
        let mut rest = &mut buf[..];
        for (offset, len) in ranges {
            let (part, after) = rest.split_at_mut(*len as usize);
            let got = file
                .read_at(part, *offset)
                .map_err(|e| Fault::new(Code::Io, format!("reading {len} bytes to send failed: {e}")))?;
            if got < part.len() {
                return Err(ends_early(*offset, *len));
            }
            rest = after;
        }
        Ok(Payload::Buf(buf))
    }

    /// The length, if it is within the bound.
    pub(crate) fn checked_len(&self) -> Result<usize> {
        match self.len() {
            len if len <= PAYLOAD_MAX as u64 => Ok(len as usize),
            len => Err(Fault::new(
                Code::TooLarge,
                format!("a payload of {len} bytes is longer than the {PAYLOAD_MAX} that one frame carries"),
            )),
        }
    }

    /// What a receiver in the same process gets; files were read before.
    pub(crate) fn into_data(self) -> Data {
        match self {
            Payload::None | Payload::File { .. } => Data::Empty,
            Payload::Bytes(bytes) => Data::from(bytes),
            Payload::Buf(buf) => Data::from(buf),
            Payload::Parts(mut parts) => {
                parts.retain(|part| !part.is_empty());
                match parts.len() {
                    0 | 1 => parts.pop().map_or(Data::Empty, Data::Bytes),
                    _ => Data::Parts(Parts { parts, joined: OnceLock::new() }),
                }
            }
        }
    }
}

/// What to do with a payload before it can be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    AsIs,
    ReadHere,
    ReadElsewhere,
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Payload {
        if bytes.is_empty() { Payload::None } else { Payload::Bytes(bytes) }
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Payload {
        Payload::from(Bytes::from(bytes))
    }
}

impl From<AlignedBuf> for Payload {
    fn from(buf: AlignedBuf) -> Payload {
        if buf.is_empty() { Payload::None } else { Payload::Buf(buf) }
    }
}

impl From<Data> for Payload {
    fn from(data: Data) -> Payload {
        match data {
            Data::Empty => Payload::None,
            Data::Buf(buf) => Payload::from(buf),
            Data::Bytes(bytes) => Payload::from(bytes),
            Data::Parts(Parts { parts, .. }) => Payload::Parts(parts),
        }
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Payload::None => "None",
            Payload::Bytes(_) => "Bytes",
            Payload::Parts(_) => "Parts",
            Payload::Buf(_) => "Buf",
            Payload::File { .. } => "File",
        };
        write!(f, "Payload::{kind}({} bytes)", self.len())
    }
}

/// Bulk bytes that arrived: in a buffer of their own from the network, perhaps shared within a process.
#[derive(Debug, Default)]
pub enum Data {
    /// Nothing.
    #[default]
    Empty,
    /// Aligned, and the receiver's alone.
    Buf(AlignedBuf),
    /// Shared with others of the process; not necessarily aligned.
    Bytes(Bytes),
    /// The same in several parts, which are copied together only for those who need them in one.
    Parts(Parts),
}

/// Bytes in several parts.
pub struct Parts {
    parts: Vec<Bytes>,
    joined: OnceLock<AlignedBuf>,
}

impl Parts {
    fn joined(&self) -> &AlignedBuf {
        self.joined.get_or_init(|| {
            let mut buf = AlignedBuf::with_len(self.parts.iter().map(Bytes::len).sum());
            let mut rest = &mut buf[..];
            for part in &self.parts {
                let (here, after) = rest.split_at_mut(part.len());
                here.copy_from_slice(part);
                rest = after;
            }
            buf
        })
    }

    fn into_buf(self) -> AlignedBuf {
        self.joined();
        self.joined.into_inner().unwrap_or_else(AlignedBuf::empty)
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parts({})", self.parts.len())
    }
}

impl Data {
    /// How many bytes came.
    pub fn len(&self) -> usize {
        match self {
            Data::Empty => 0,
            Data::Buf(buf) => buf.len(),
            Data::Bytes(bytes) => bytes.len(),
            Data::Parts(Parts { parts, .. }) => parts.iter().map(Bytes::len).sum(),
        }
    }

    /// Whether none came.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As shared bytes; copies only parts, which it joins.
    pub fn into_bytes(self) -> Bytes {
        match self {
            Data::Empty => Bytes::new(),
            Data::Buf(buf) => buf.into_bytes(),
            Data::Bytes(bytes) => bytes,
            Data::Parts(parts) => parts.into_buf().into_bytes(),
        }
    }

    /// As shared bytes in as many parts as they came, without copying.
    pub fn into_parts(self) -> Vec<Bytes> {
        match self {
            Data::Parts(Parts { parts, .. }) => parts,
            Data::Empty => Vec::new(),
            data => vec![data.into_bytes()],
        }
    }

    /// As an aligned buffer; copies only what was shared within the process.
    pub fn into_buf(self) -> AlignedBuf {
        match self {
            Data::Empty => AlignedBuf::empty(),
            Data::Buf(buf) => buf,
            Data::Bytes(bytes) => AlignedBuf::copy_of(&bytes),
            Data::Parts(parts) => parts.into_buf(),
        }
    }
}

impl Deref for Data {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Data::Empty => &[],
            Data::Buf(buf) => buf,
            Data::Bytes(bytes) => bytes,
            Data::Parts(parts) => parts.joined(),
        }
    }
}

impl AsRef<[u8]> for Data {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Bytes> for Data {
    fn from(bytes: Bytes) -> Data {
        if bytes.is_empty() { Data::Empty } else { Data::Bytes(bytes) }
    }
}

impl From<AlignedBuf> for Data {
    fn from(buf: AlignedBuf) -> Data {
        if buf.is_empty() { Data::Empty } else { Data::Buf(buf) }
    }
}

/// The fault for a file that is shorter than its range.
pub(crate) fn ends_early(offset: u64, len: u64) -> Fault {
    Fault::new(Code::Io, format!("a file ends within the {len} bytes at {offset} that were to be sent"))
}

/// Whether all ranges seem to be in the page cache. Where the file system cannot tell, yes: the price of being wrong is
/// a thread that waits for a disk, the price of always asking elsewhere is a copy of every byte.
fn is_cached(file: &dyn DiskFile, fd: RawFd, ranges: &[(u64, u64)]) -> bool {
    ranges.iter().filter(|(_, len)| *len > 0).all(|(offset, len)| {
        if let Some(cached) = file.is_cached(*offset, *len) {
            return cached;
        }
        let last = offset.saturating_add(len - 1);
        (*offset..last).step_by(PROBE_EVERY as usize).chain([last]).all(|at| probe(fd, at))
    })
}

fn probe(fd: RawFd, at: u64) -> bool {
    let Ok(at) = libc::off_t::try_from(at) else {
        return false;
    };
    let mut byte = 0u8;
    let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one iovec that describes one writable byte, alive for the call; a bad descriptor is an error, no harm.
    let got = unsafe { libc::preadv2(fd, &to, 1, at, libc::RWF_NOWAIT) };
    match got {
        1 => true,
        0 => false, // the file ends here: let the read find the words for it
        _ => io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_shared_as_they_are_and_joined_for_those_who_ask() {
        let (a, b) = (Bytes::from(vec![1; 5000]), Bytes::from(vec![2; 3000]));
        let data = || Payload::Parts(vec![a.clone(), Bytes::new(), b.clone()]).into_data();
        let parts = data().into_parts();
        assert_eq!(parts.iter().map(|part| part.as_ptr()).collect::<Vec<_>>(), [a.as_ptr(), b.as_ptr()]);
        let whole = [&a[..], &b[..]].concat();
        assert_eq!(data().len(), whole.len());
        assert_eq!(&*data(), &whole[..]);
        assert_eq!(data().into_bytes(), whole);
        assert_eq!(&data().into_buf()[..], &whole[..]);
    }
}
