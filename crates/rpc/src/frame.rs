//! The header of a frame: 48 bytes that say what follows and how long it is. Pure.
//!
//! docs/wire.md holds the same table for people; the two change together.
//!
//! # Invariants
//! - No length leaves `decode` without having been checked against its bound.
//! - A header whose checksum is wrong is never looked at further: after it the stream has no known boundaries, so the
//!   connection ends.

use thiserror::Error;

/// Bytes of every header.
pub const HEADER_LEN: usize = 48;
/// The longest body: typed messages are small, manifests and listings come in pages.
pub const BODY_MAX: usize = 8 << 20;
/// The longest payload: two of the largest blocks.
pub const PAYLOAD_MAX: usize = 32 << 20;
/// The frame version this crate speaks.
pub const VERSION: u8 = 1;

const MAGIC: u8 = 0xF0;

/// The body is an encoded fault (replies only).
pub const FAULT: u16 = 1 << 0;
/// `payload_crc` covers the payload; without it the payload carries chunk checksums of its own.
pub const PAYLOAD_CRC: u16 = 1 << 1;
/// This ping answers a ping.
pub const PONG: u16 = 1 << 2;
/// Flags in the low byte must be known; flags in the high byte may be ignored.
const MUST_KNOW: u16 = 0x00FF;
const KNOWN: u16 = FAULT | PAYLOAD_CRC | PONG;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Asks for one reply.
    Request = 1,
    /// Answers the request of the same id.
    Reply = 2,
    /// The sender of this request no longer wants its reply; it may come nevertheless.
    Cancel = 3,
    /// Shows that the peer lives, and measures the round trip.
    Ping = 4,
}

/// A decoded header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// `FAULT`, `PAYLOAD_CRC`, `PONG`.
    pub flags: u16,
    /// The number of the method; replies repeat it.
    pub method: u16,
    /// Chosen by the caller, unique among its requests in flight on this connection.
    pub id: u64,
    /// Length of the body.
    pub body_len: u32,
    /// Length of the payload.
    pub payload_len: u32,
    /// How long the caller waits, counted from when the frame is received; 0 in everything but requests.
    pub deadline_ms: u32,
    /// Checksum of the body.
    pub body_crc: u32,
    /// Follows a request through all processes.
    pub trace: u64,
    /// Checksum of the payload, if `PAYLOAD_CRC` is set.
    pub payload_crc: u32,
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Garbage {
    /// The first byte is not ours or another version's.
    #[error("a frame begins with byte {0:#04x}")]
    Magic(u8),
    /// The header does not match its checksum.
    #[error("a header does not match its checksum")]
    HeaderCrc,
    /// Unknown kind of frame.
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    /// A flag that must be known is not.
    #[error("unknown flags {0:#06x}")]
    Flags(u16),
    /// A length is beyond its bound.
    #[error("a {what} of {len} bytes is longer than {max}")]
    Length {
        /// Body or payload.
        what: &'static str,
        /// What the header says.
        len: u32,
        /// The bound.
        max: usize,
    },
    /// The body does not match its checksum.
    #[error("a body does not match its checksum")]
    BodyCrc,
    /// The payload does not match its checksum.
    #[error("a payload does not match its checksum")]
    PayloadCrc,
    /// A frame of a kind that this end does not take, or an id that is in flight already.
    #[error("a frame out of place: {0:?}")]
    OutOfPlace(Kind),
}

impl Header {
    /// A header without body and payload.
    pub fn bare(kind: Kind, id: u64) -> Header {
        Header {
            kind,
            flags: 0,
            method: 0,
            id,
            body_len: 0,
            payload_len: 0,
            deadline_ms: 0,
            body_crc: 0,
            trace: 0,
            payload_crc: 0,
        }
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = MAGIC | VERSION;
        bytes[1] = self.kind as u8;
        bytes[2..4].copy_from_slice(&self.flags.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.method.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.deadline_ms.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.body_crc.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.trace.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header and checks everything that can be checked without what follows.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Header, Garbage> {
        if bytes[0] != MAGIC | VERSION {
            return Err(Garbage::Magic(bytes[0]));
        }
        if crc32c::crc32c(&bytes[..44]) != u32_at(bytes, 44) {
            return Err(Garbage::HeaderCrc);
        }
        let kind = match bytes[1] {
            1 => Kind::Request,
            2 => Kind::Reply,
            3 => Kind::Cancel,
            4 => Kind::Ping,
            other => return Err(Garbage::Kind(other)),
        };
        let flags = u16::from_le_bytes([bytes[2], bytes[3]]);
        if flags & MUST_KNOW & !KNOWN != 0 {
            return Err(Garbage::Flags(flags));
        }
        let header = Header {
            kind,
            flags,
            method: u16::from_le_bytes([bytes[4], bytes[5]]),
            id: u64_at(bytes, 8),
            body_len: u32_at(bytes, 16),
            payload_len: u32_at(bytes, 20),
            deadline_ms: u32_at(bytes, 24),
            body_crc: u32_at(bytes, 28),
            trace: u64_at(bytes, 32),
            payload_crc: u32_at(bytes, 40),
        };
        let bare = matches!(kind, Kind::Cancel | Kind::Ping);
        let (body_max, payload_max) = if bare { (0, 0) } else { (BODY_MAX, PAYLOAD_MAX) };
        check_len("body", header.body_len, body_max)?;
        check_len("payload", header.payload_len, payload_max)?;
        Ok(header)
    }

    /// Whether the frame carries this flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

fn check_len(what: &'static str, len: u32, max: usize) -> Result<(), Garbage> {
    if len as usize > max { Err(Garbage::Length { what, len, max }) } else { Ok(()) }
}

fn u32_at(bytes: &[u8; HEADER_LEN], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_LEN], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Header {
        Header {
            kind: Kind::Request,
            flags: PAYLOAD_CRC,
            method: 0x0102,
            id: 0x0304_0506_0708_090A,
            body_len: 0x1122,
            payload_len: 0x0033_4455,
            deadline_ms: 30_000,
            body_crc: 0xAABB_CCDD,
            trace: 0xDEAD_BEEF_0000_0001,
            payload_crc: 0x0BAD_CAFE,
        }
    }

    #[test]
    fn a_header_survives_its_bytes() {
        let header = example();
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn the_bytes_of_version_one_never_change() {
        let golden: [u8; 44] = [
            0xF1, 1, 2, 0, 2, 1, 0, 0, 0x0A, 9, 8, 7, 6, 5, 4, 3, 0x22, 0x11, 0, 0, 0x55, 0x44, 0x33, 0,
            0x30, 0x75, 0, 0, 0xDD, 0xCC, 0xBB, 0xAA, 1, 0, 0, 0, 0xEF, 0xBE, 0xAD, 0xDE, 0xFE, 0xCA, 0xAD,
            0x0B,
        ];
        assert_eq!(example().encode()[..44], golden);
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = example().encode();
        for bit in 0..HEADER_LEN * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_beyond_their_bound_are_refused() {
        let long = Header { body_len: BODY_MAX as u32 + 1, ..example() };
        assert!(matches!(Header::decode(&long.encode()), Err(Garbage::Length { what: "body", .. })));
        let long = Header { payload_len: PAYLOAD_MAX as u32 + 1, ..example() };
        assert!(matches!(Header::decode(&long.encode()), Err(Garbage::Length { what: "payload", .. })));
        let ping = Header { body_len: 1, ..Header::bare(Kind::Ping, 1) };
        assert!(matches!(Header::decode(&ping.encode()), Err(Garbage::Length { .. })));
    }

    #[test]
    fn flags_in_the_high_byte_may_be_unknown() {
        let later = Header { flags: 0x8000, ..example() };
        assert!(Header::decode(&later.encode()).is_ok());
        let must = Header { flags: 0x0080, ..example() };
        assert_eq!(Header::decode(&must.encode()), Err(Garbage::Flags(0x0080)));
    }

    #[test]
    fn any_bytes_give_a_header_or_garbage() {
        torchfs_fuzz::Fuzz::rounds(200_000).run(&[example().encode().to_vec()], |bytes| {
            let Some((bytes, _)) = bytes.split_first_chunk::<HEADER_LEN>() else { return false };
            let mut bytes = *bytes;
            let crc = crc32c::crc32c(&bytes[..44]);
            bytes[44..].copy_from_slice(&crc.to_le_bytes());
            Header::decode(&bytes).is_ok_and(|header| {
                assert!(header.body_len as usize <= BODY_MAX && header.payload_len as usize <= PAYLOAD_MAX);
                true
            })
        });
    }
}
