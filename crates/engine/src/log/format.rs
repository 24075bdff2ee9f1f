//! The bytes of log records and of the header pages; docs/disk.md tells the same in tables.
//!
//! # Invariants
//! - Nothing is believed before its checksum fits; no length is followed before it is checked.
//! - All numbers are little-endian. What is reserved is written as zero and not read.

use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use crate::batch::{BODY_MAX, Batch, Change};
use crate::error::{Error, Result};

/// Groups of records start at multiples of this, so that no sync rewrites a page that an earlier one made durable.
pub const PAGE: usize = 4096;
/// Records start at multiples of this within a group.
const ALIGN: usize = 8;
/// Two slots for the header come first.
pub const RECORDS_AT: usize = 2 * PAGE;
/// Bytes of a record before its body.
pub const RECORD_HEADER: usize = 96;
/// The version of records and headers that this code writes, and the newest that it reads.
pub const RECORD_VERSION: u32 = 1;
/// Features that a reader must know; this code knows none.
const MUST_KNOWN: u64 = 0;

const RECORD_MAGIC: [u8; 4] = *b"TFLR";
const FREES: u32 = 1;

/// What every header says about its writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writer {
    pub cluster: ClusterId,
    pub incarnation: Incarnation,
    pub fence: Fence,
}

/// What a replica holds, and enough to recognise later that a log still has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    /// Whose it is.
    pub cluster: ClusterId,
    /// The last batch in the replica.
    pub applied: Seq,
    /// Who wrote that batch, or led when it was applied.
    pub fence: Fence,
    /// A random number that the leader of this fence drew; 0 where a fence is never used twice.
    pub reign: u64,
}

/// A record: one batch with its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub seq: Seq,
    pub wall_ns: i64,
    pub frees: bool,
    pub changes: u32,
    pub body: Vec<u8>,
    pub body_crc: u32,
}

impl Record {
    /// The record of a batch that has its place.
    pub fn new(seq: Seq, batch: &Batch, body: Vec<u8>) -> Record {
        Record {
            seq,
            wall_ns: batch.wall_ns,
            frees: batch.frees,
            changes: batch.changes.len() as u32,
            body_crc: crc32c::crc32c(&body),
            body,
        }
    }

    /// How many bytes it takes in the log.
    pub fn stored_len(&self) -> usize {
        stored_len(self.body.len())
    }

    /// Appends its bytes to a group.
    pub fn encode(&self, group: &mut Vec<u8>, writer: &Writer, generation: u64, durable: Seq) {
        let mut h = [0u8; RECORD_HEADER];
        h[0..4].copy_from_slice(&RECORD_MAGIC);
        h[4..8].copy_from_slice(&RECORD_VERSION.to_le_bytes());
        // 8..12 must-know and 12..16 may-know features: none yet.
        h[16..24].copy_from_slice(&writer.cluster.0.to_le_bytes());
        h[24..32].copy_from_slice(&generation.to_le_bytes());
        h[32..40].copy_from_slice(&self.seq.0.to_le_bytes());
        h[40..48].copy_from_slice(&writer.fence.0.to_le_bytes());
        h[48..56].copy_from_slice(&durable.0.to_le_bytes());
        h[56..64].copy_from_slice(&self.wall_ns.to_le_bytes());
        h[64..68].copy_from_slice(&writer.incarnation.0.to_le_bytes());
        h[68..72].copy_from_slice(&(if self.frees { FREES } else { 0 }).to_le_bytes());
        h[72..76].copy_from_slice(&(self.body.len() as u32).to_le_bytes());
        h[76..80].copy_from_slice(&self.changes.to_le_bytes());
        h[80..84].copy_from_slice(&self.body_crc.to_le_bytes());
        let crc = crc32c::crc32c(&h[..92]);
        h[92..96].copy_from_slice(&crc.to_le_bytes());
        group.extend_from_slice(&h);
        group.extend_from_slice(&self.body);
        group.resize(group.len().next_multiple_of(ALIGN), 0);
    }
}

/// How many bytes a record with this body takes.
pub fn stored_len(body: usize) -> usize {
    (RECORD_HEADER + body).next_multiple_of(ALIGN)
}

/// A record as found in a segment.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    pub seq: Seq,
    pub fence: Fence,
    /// How far the log was durable when this was written.
    pub durable: Seq,
    pub changes: u32,
    pub body: &'a [u8],
}

impl<'a> Stored<'a> {
    /// The record at this position, if one of this generation is there whole.
    pub fn find(
        bytes: &'a [u8],
        at: usize,
        cluster: ClusterId,
        generation: u64,
    ) -> Result<Option<Stored<'a>>> {
        match Stored::find_any(bytes, at, cluster)? {
            Some((found, record)) if found == generation => Ok(Some(record)),
            _ => Ok(None),
        }
    }

    /// The record at this position with its generation, whichever that is.
    pub fn find_any(bytes: &'a [u8], at: usize, cluster: ClusterId) -> Result<Option<(u64, Stored<'a>)>> {
        let Some(h) = bytes.get(at..at + RECORD_HEADER) else { return Ok(None) };
        if h[0..4] != RECORD_MAGIC || crc32c::crc32c(&h[..92]) != u32_at(h, 92) || u64_at(h, 16) != cluster.0
        {
            return Ok(None);
        }
        let version = u32_at(h, 4);
        if version > RECORD_VERSION {
            return Err(Error::Unsupported { what: format!("the log has a record of version {version}") });
        }
        let unknown = u64::from(u32_at(h, 8)) & !MUST_KNOWN;
        if unknown != 0 {
            return Err(Error::Unsupported {
                what: format!("the log has a record with unknown features {unknown:#x}"),
            });
        }
        let len = u32_at(h, 72) as usize;
        if len > BODY_MAX {
            return Ok(None);
        }
        let Some(body) = bytes.get(at + RECORD_HEADER..at + RECORD_HEADER + len) else { return Ok(None) };
        if crc32c::crc32c(body) != u32_at(h, 80) {
            return Ok(None);
        }
        let record = Stored {
            seq: Seq(u64_at(h, 32)),
            fence: Fence(u64_at(h, 40)),
            durable: Seq(u64_at(h, 48)),
            changes: u32_at(h, 76),
            body,
        };
        Ok(Some((u64_at(h, 24), record)))
    }

    /// Its changes.
    pub fn decode(&self) -> Result<Vec<Change>> {
        Batch::decode(self.body, self.changes).ok_or_else(|| Error::Corrupt {
            what: format!("batch {} has a good checksum and makes no sense", self.seq),
        })
    }

    /// How many bytes it takes.
    pub fn stored_len(&self) -> usize {
        stored_len(self.body.len())
    }
}

/// A page that opens a file: there are two slots for it, written in turn, so that one is always whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeaderPage {
    pub cluster: ClusterId,
    pub incarnation: Incarnation,
    /// The higher one of two slots counts: the generation of a segment.
    pub turn: u64,
    /// A segment's length, or the fence.
    pub number: u64,
}

/// Which file a header page opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Segment,
    Identity,
}

impl Kind {
    fn magic(self) -> [u8; 8] {
        match self {
            Kind::Segment => *b"TFSLOG\0\0",
            Kind::Identity => *b"TFSENGID",
        }
    }
}

impl HeaderPage {
    /// The whole page.
    pub fn encode(&self, kind: Kind) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[0..8].copy_from_slice(&kind.magic());
        page[8..12].copy_from_slice(&RECORD_VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&self.incarnation.0.to_le_bytes());
        // 16..24 must-know and 24..32 may-know features: none yet.
        page[32..40].copy_from_slice(&self.cluster.0.to_le_bytes());
        page[40..48].copy_from_slice(&self.turn.to_le_bytes());
        page[48..56].copy_from_slice(&self.number.to_le_bytes());
        let crc = crc32c::crc32c(&page[..60]);
        page[60..64].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// The page, if it is whole.
    fn decode(page: &[u8], kind: Kind, file: &str) -> Result<Option<HeaderPage>> {
        let Some(h) = page.get(..64) else { return Ok(None) };
        if h[0..8] != kind.magic() || crc32c::crc32c(&h[..60]) != u32_at(h, 60) {
            return Ok(None);
        }
        let version = u32_at(h, 8);
        if version > RECORD_VERSION {
            return Err(Error::Unsupported { what: format!("{file} has format version {version}") });
        }
        let unknown = u64_at(h, 16) & !MUST_KNOWN;
        if unknown != 0 {
            return Err(Error::Unsupported { what: format!("{file} needs unknown features {unknown:#x}") });
        }
        Ok(Some(HeaderPage {
            cluster: ClusterId(u64_at(h, 32)),
            incarnation: Incarnation(u32_at(h, 12)),
            turn: u64_at(h, 40),
            number: u64_at(h, 48),
        }))
    }

    /// The newer of the two slots at the start of a file, and which slot it is.
    pub fn newest(bytes: &[u8], kind: Kind, file: &str) -> Result<(usize, HeaderPage)> {
        let mut newest: Option<(usize, HeaderPage)> = None;
        for slot in 0..2 {
            let page = bytes.get(slot * PAGE..(slot + 1) * PAGE).unwrap_or(&[]);
            if let Some(page) = HeaderPage::decode(page, kind, file)?
                && newest.is_none_or(|(_, best)| page.turn > best.turn)
            {
                newest = Some((slot, page));
            }
        }
        newest.ok_or_else(|| Error::Corrupt { what: format!("{file} has no readable header") })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut n = [0; 4];
    n.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(n)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut n = [0; 8];
    n.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITER: Writer =
        Writer { cluster: ClusterId(0x1122_3344_5566_7788), incarnation: Incarnation(3), fence: Fence(4) };

    fn sample() -> Vec<u8> {
        let mut batch = Batch::at(1_700_000_000_000_000_000);
        batch.put("key", "value").delete("x").frees = true;
        let body = batch.encode().unwrap();
        let mut bytes = Vec::new();
        Record::new(Seq(42), &batch, body).encode(&mut bytes, &WRITER, 7, Seq(41));
        bytes
    }

    /// The bytes of version 1 on disk: a change here is a new version.
    #[test]
    fn a_record_has_its_golden_bytes() {
        let hex: String = sample().iter().map(|byte| format!("{byte:02x}")).collect();
        let golden = [
            "54464c52010000000000000000000000", // magic, version, features
            "88776655443322110700000000000000", // cluster, generation
            "2a000000000000000400000000000000", // number, fence
            "290000000000000000002a36fe9c9717", // durable, wall time
            "03000000010000001700000002000000", // incarnation, flags, length, changes
            "6836a19c000000000000000047daf645", // checksums of body and header
            "010300050000006b657976616c7565",   // put key=value
            "0201000000000078",                 // delete x
            "00",                               // padding to 8
        ];
        assert_eq!(hex, golden.concat());
    }

    #[test]
    fn any_flipped_bit_makes_a_record_invisible() {
        let bytes = sample();
        assert!(Stored::find(&bytes, 0, WRITER.cluster, 7).unwrap().is_some());
        assert!(Stored::find(&bytes, 0, WRITER.cluster, 8).unwrap().is_none());
        // The last byte is padding.
        for bit in 0..(bytes.len() - 1) * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Stored::find(&bytes, 0, WRITER.cluster, 7).unwrap().is_none(), "bit {bit}");
        }
        for len in 0..bytes.len() - 1 {
            assert!(Stored::find(&bytes[..len], 0, WRITER.cluster, 7).unwrap().is_none());
        }
    }

    #[test]
    fn later_versions_and_unknown_must_know_features_are_refused_with_a_sentence() {
        for (at, word) in [(4, "version"), (8, "features")] {
            let mut bytes = sample();
            bytes[at] = 2;
            let crc = crc32c::crc32c(&bytes[..92]);
            bytes[92..96].copy_from_slice(&crc.to_le_bytes());
            let error = Stored::find(&bytes, 0, WRITER.cluster, 7).unwrap_err();
            assert!(
                matches!(error, Error::Unsupported { .. }) && error.to_string().contains(word),
                "{error}"
            );

            let mut page = HeaderPage::default().encode(Kind::Segment);
            page[if at == 4 { 8 } else { 16 }] = 2;
            let crc = crc32c::crc32c(&page[..60]);
            page[60..64].copy_from_slice(&crc.to_le_bytes());
            let error = HeaderPage::newest(&page, Kind::Segment, "log-0").unwrap_err();
            assert!(
                matches!(error, Error::Unsupported { .. }) && error.to_string().contains(word),
                "{error}"
            );
        }
    }

    #[test]
    fn the_newer_whole_header_slot_counts() {
        let page = |turn| HeaderPage { turn, ..HeaderPage::default() }.encode(Kind::Segment);
        let mut bytes = [page(5), page(6)].concat();
        assert_eq!(HeaderPage::newest(&bytes, Kind::Segment, "f").unwrap().1.turn, 6);
        bytes[PAGE + 50] ^= 1;
        let (slot, found) = HeaderPage::newest(&bytes, Kind::Segment, "f").unwrap();
        assert_eq!((slot, found.turn), (0, 5));
        bytes[50] ^= 1;
        assert!(matches!(HeaderPage::newest(&bytes, Kind::Segment, "f"), Err(Error::Corrupt { .. })));
        assert!(matches!(HeaderPage::newest(&page(1), Kind::Identity, "f"), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn any_bytes_give_a_record_or_none() {
        torchfs_fuzz::Fuzz::rounds(200_000).run(&[sample()], |bytes| {
            // With checksums made good again, so that the damage reaches what they protect.
            let mut bytes = bytes.to_vec();
            if bytes.len() >= RECORD_HEADER {
                let len = (u32_at(&bytes, 72) as usize).min(bytes.len() - RECORD_HEADER);
                let body = crc32c::crc32c(&bytes[RECORD_HEADER..RECORD_HEADER + len]);
                bytes[80..84].copy_from_slice(&body.to_le_bytes());
                let header = crc32c::crc32c(&bytes[..92]);
                bytes[92..96].copy_from_slice(&header.to_le_bytes());
            }
            let cluster = bytes.get(16..24).map_or(0, |_| u64_at(&bytes, 16));
            match Stored::find_any(&bytes, 0, ClusterId(cluster)) {
                Ok(Some((_, record))) => record.decode().is_ok(),
                Ok(None) | Err(_) => false,
            }
        });
    }
}
