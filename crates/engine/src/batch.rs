//! A batch: the changes of one decision, and their bytes in the log.
//!
//! # Invariants
//! - Limits are checked before anything is encoded, and again on decoding before memory is taken.
//! - Encoding is canonical: the same batch gives the same bytes.

use crate::error::{Error, Result};

/// The longest key (LMDB's limit).
pub const KEY_MAX: usize = 511;
/// The longest value: an extended attribute of 64 KiB with what is noted beside it.
pub const VALUE_MAX: usize = 65 << 10;
/// The longest encoded batch.
pub const BODY_MAX: usize = 4 << 20;

const PUT: u8 = 1;
const DELETE: u8 = 2;
/// Tag, length of the key, length of the value.
const CHANGE_HEADER: usize = 1 + 2 + 4;

/// One change of the state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Sets the value of a key.
    Put(Vec<u8>, Vec<u8>),
    /// Removes a key, if it is there.
    Delete(Vec<u8>),
}

/// Changes that happen together, in this order, with the time at which they were decided.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Batch {
    /// What changes; a later change of the same key wins.
    pub changes: Vec<Change>,
    /// Wall time of the decision, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Whether it frees space in the end, so that it may use the reserve.
    pub frees: bool,
}

impl Batch {
    /// An empty batch decided at this time.
    pub fn at(wall_ns: i64) -> Batch {
        Batch { wall_ns, ..Batch::default() }
    }

    /// Sets a value.
    pub fn put(&mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> &mut Batch {
        self.changes.push(Change::Put(key.into(), value.into()));
        self
    }

    /// Removes a key.
    pub fn delete(&mut self, key: impl Into<Vec<u8>>) -> &mut Batch {
        self.changes.push(Change::Delete(key.into()));
        self
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// How many bytes the changes take in the log; at most [`BODY_MAX`] can be ordered.
    pub fn encoded_len(&self) -> usize {
        self.changes.iter().map(Change::encoded_len).sum()
    }

    /// The bytes for the log, within the limits.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        for change in &self.changes {
            let key = change.key();
            if key.is_empty() || key.len() > KEY_MAX {
                return Err(Error::TooLarge { what: "a key", len: key.len(), max: KEY_MAX });
            }
            if let Change::Put(_, value) = change
                && value.len() > VALUE_MAX
            {
                return Err(Error::TooLarge { what: "a value", len: value.len(), max: VALUE_MAX });
            }
        }
        let len = self.encoded_len();
        if len > BODY_MAX {
            return Err(Error::TooLarge { what: "a batch", len, max: BODY_MAX });
        }
        let mut body = Vec::with_capacity(len);
        for change in &self.changes {
            let (tag, value): (u8, &[u8]) = match change {
                Change::Put(_, value) => (PUT, value),
                Change::Delete(_) => (DELETE, &[]),
            };
            push_change(&mut body, tag, change.key(), value);
        }
        Ok(body)
    }

    /// The changes of a body from the log. `None` if the bytes make no sense.
    pub(crate) fn decode(mut body: &[u8], count: u32) -> Option<Vec<Change>> {
        // Each change takes at least its header and one byte of key, so the count cannot ask for more than this.
        if count as usize > body.len() / (CHANGE_HEADER + 1) {
            return None;
        }
        let mut changes = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let (header, rest) = body.split_first_chunk::<CHANGE_HEADER>()?;
            let [tag, k0, k1, v0, v1, v2, v3] = *header;
            let key_len = usize::from(u16::from_le_bytes([k0, k1]));
            let value_len = u32::from_le_bytes([v0, v1, v2, v3]) as usize;
            if key_len == 0 || key_len > KEY_MAX || value_len > VALUE_MAX {
                return None;
            }
            let (key, rest) = rest.split_at_checked(key_len)?;
            let (value, rest) = rest.split_at_checked(value_len)?;
            changes.push(match tag {
                PUT => Change::Put(key.to_vec(), value.to_vec()),
                DELETE if value.is_empty() => Change::Delete(key.to_vec()),
                _ => return None,
            });
            body = rest;
        }
        body.is_empty().then_some(changes)
    }
}

/// Adds a put to a body; the caller keeps to the limits.
pub(crate) fn push_put(body: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    push_change(body, PUT, key, value);
}

/// Adds a delete to a body; the caller keeps to the limits.
pub(crate) fn push_delete(body: &mut Vec<u8>, key: &[u8]) {
    push_change(body, DELETE, key, &[]);
}

fn push_change(body: &mut Vec<u8>, tag: u8, key: &[u8], value: &[u8]) {
    body.push(tag);
    body.extend_from_slice(&(key.len() as u16).to_le_bytes());
    body.extend_from_slice(&(value.len() as u32).to_le_bytes());
    body.extend_from_slice(key);
    body.extend_from_slice(value);
}

impl Change {
    /// The key that changes.
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(key, _) | Change::Delete(key) => key,
        }
    }

    /// How many bytes it takes in the log.
    pub fn encoded_len(&self) -> usize {
        CHANGE_HEADER
            + match self {
                Change::Put(key, value) => key.len() + value.len(),
                Change::Delete(key) => key.len(),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_encoded_decodes() {
        let mut batch = Batch::at(5);
        batch.put("a", "1").put("b", vec![7; VALUE_MAX]).delete(vec![9; KEY_MAX]).put("c", "");
        let body = batch.encode().unwrap();
        assert_eq!(body.len(), batch.encoded_len());
        assert_eq!(Batch::decode(&body, 4), Some(batch.changes));
        assert_eq!(Batch::decode(&body, 3), None);
        assert_eq!(Batch::decode(&body, u32::MAX), None);
        for len in 0..body.len().min(600) {
            assert_eq!(Batch::decode(&body[..len], 4), None);
        }
    }

    #[test]
    fn limits_are_kept() {
        let limit = |batch: &Batch| matches!(batch.encode(), Err(Error::TooLarge { .. }));
        assert!(limit(Batch::at(0).put("", "x")));
        assert!(limit(Batch::at(0).put(vec![1; KEY_MAX + 1], "x")));
        assert!(limit(Batch::at(0).put("x", vec![0; VALUE_MAX + 1])));
        let mut batch = Batch::at(0);
        for _ in 0..BODY_MAX / VALUE_MAX + 1 {
            batch.put("k", vec![0; VALUE_MAX]);
        }
        assert!(limit(&batch));
    }

    #[test]
    fn any_bytes_give_changes_or_nothing() {
        let mut batch = Batch::at(5);
        batch.put("key", vec![7; 300]).delete("other").put("third", "");
        let mut sample = 3u32.to_le_bytes().to_vec();
        sample.extend(batch.encode().unwrap());
        torchfs_fuzz::Fuzz::rounds(200_000).run(&[sample], |bytes| match bytes.split_first_chunk() {
            Some((count, body)) => Batch::decode(body, u32::from_le_bytes(*count)).is_some(),
            None => false,
        });
    }
}
