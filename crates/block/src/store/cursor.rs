//! How far the scrub of a disk has come: a small file beside the segments, so that a restart goes on where it was.
//!
//! It is written in place. A torn or lost one costs a scrub from the beginning and nothing else.

use std::io;

use torchfs_proto::{BlockId, ClusterId};

use super::Store;

/// The file's name.
pub(super) const NAME: &str = "scrub";

const MAGIC: &[u8; 8] = b"TFSscrub";
const VERSION: u16 = 1;
const LEN: usize = 64;

/// How far the scrub of a disk has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cursor {
    /// The last piece that was read; none at the beginning and after the end.
    pub after: Option<(BlockId, u8)>,
    /// When the scrub began, in seconds since 1970; 0: never.
    pub began_secs: u64,
}

impl Store {
    /// The stored cursor; the beginning if there is none that makes sense.
    pub fn load_cursor(&self) -> Cursor {
        let mut bytes = [0; LEN];
        let read = self.shared.disk.open(NAME).and_then(|file| file.read_at(&mut bytes, 0));
        match read {
            Ok(LEN) => decode(self.shared.config.cluster, &bytes).unwrap_or_default(),
            _ => Cursor::default(),
        }
    }

    /// Stores the cursor.
    pub fn store_cursor(&self, cursor: &Cursor) -> io::Result<()> {
        let disk = &self.shared.disk;
        let (file, fresh) = match disk.open(NAME) {
            Ok(file) => (file, false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (disk.create(NAME)?, true),
            Err(error) => return Err(error),
        };
        file.write_at(&encode(self.shared.config.cluster, cursor), 0)?;
        file.sync()?;
        if fresh { disk.sync_names() } else { Ok(()) }
    }
}

fn encode(cluster: ClusterId, cursor: &Cursor) -> Vec<u8> {
    let (block, piece) = cursor.after.unwrap_or_default();
    let mut out = Vec::with_capacity(LEN);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[u8::from(cursor.after.is_some()), piece]);
    // Features that must, and that may be known.
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&block.incarnation.to_le_bytes());
    out.extend_from_slice(&cluster.0.to_le_bytes());
    out.extend_from_slice(&block.counter.to_le_bytes());
    out.extend_from_slice(&cursor.began_secs.to_le_bytes());
    out.resize(LEN - 4, 0);
    let crc = crc32c::crc32c(&out);
    out.extend_from_slice(&crc.to_le_bytes());
    out
}

fn decode(cluster: ClusterId, bytes: &[u8; LEN]) -> Option<Cursor> {
    let u64_at = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    let u32_at = |at: usize| bytes[at..at + 4].try_into().map(u32::from_le_bytes).ok();
    let whole = crc32c::crc32c(&bytes[..LEN - 4]) == u32_at(LEN - 4)?;
    let version = u16::from_le_bytes([bytes[8], bytes[9]]);
    if !whole || bytes[..8] != *MAGIC || version != VERSION || u32_at(12)? != 0 || u64_at(24)? != cluster.0 {
        return None;
    }
    let block = BlockId { incarnation: u32_at(20)?, counter: u64_at(32)? };
    let after = (bytes[10] == 1).then_some((block, bytes[11]));
    Some(Cursor { after, began_secs: u64_at(40)? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_cursor_comes_back_as_it_was_and_every_flipped_bit_is_found() {
        let cluster = ClusterId(7);
        let block = BlockId { incarnation: 3, counter: 1 << 40 };
        for cursor in
            [Cursor { after: Some((block, 5)), began_secs: 9 }, Cursor { after: None, began_secs: 1 << 33 }]
        {
            let bytes: [u8; LEN] = encode(cluster, &cursor).try_into().unwrap();
            assert_eq!(decode(cluster, &bytes), Some(cursor));
            assert_eq!(decode(ClusterId(8), &bytes), None);
            for bit in 0..LEN * 8 {
                let mut broken = bytes;
                broken[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(cluster, &broken), None, "bit {bit}");
            }
        }
    }
}
