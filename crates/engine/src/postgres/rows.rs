//! What rows of the database mean.

use tokio_postgres::Row;
use torchfs_proto::{ClusterId, Fence, Incarnation, Seq};

use crate::batch::Change;
use crate::error::{Error, Result};
use crate::log::format::Stored;

/// The row that all agree on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    pub fence: Fence,
    pub incarnation: Incarnation,
    /// The random number of this leadership.
    pub reign: u64,
    /// Rises with every sign of life.
    pub counter: u64,
    pub lease_ms: u64,
    /// Where the leader listens; empty when nobody leads.
    pub address: String,
    pub last: Seq,
}

impl Head {
    /// Reads [`super::schema::HEAD`].
    pub fn of(row: &Row) -> Result<Head> {
        Ok(Head {
            fence: Fence(number(row, 0)?),
            reign: number(row, 1)?,
            counter: number(row, 2)?,
            lease_ms: number(row, 3)?,
            address: row.try_get(4).map_err(odd)?,
            last: Seq(number(row, 5)?),
            incarnation: Incarnation(u32::try_from(number(row, 6)?).unwrap_or(u32::MAX)),
        })
    }
}

/// A group of batches of the log.
pub struct Group {
    pub last: Seq,
    pub first: Seq,
    pub fence: Fence,
    body: Vec<u8>,
}

impl Group {
    /// Reads a row of [`super::schema::GROUPS`].
    pub fn of(row: &Row) -> Result<Group> {
        Ok(Group {
            last: Seq(number(row, 0)?),
            first: Seq(number(row, 1)?),
            fence: Fence(number(row, 2)?),
            body: row.try_get(3).map_err(odd)?,
        })
    }

    /// Visits the batches behind a place, in order.
    pub fn replay(
        &self,
        cluster: ClusterId,
        after: Seq,
        visit: &mut dyn FnMut(Seq, Vec<Change>),
    ) -> Result<()> {
        let wrong = |what: &str| Error::Corrupt {
            what: format!("the database's log, batches {} to {}: {what}", self.first, self.last),
        };
        let (mut at, mut next) = (0, self.first);
        while at < self.body.len() {
            let record = match Stored::find(&self.body, at, cluster, 0)? {
                Some(record) if record.seq == next && record.fence == self.fence => record,
                Some(record) => return Err(wrong(&format!("batch {} is not expected there", record.seq))),
                None => return Err(wrong("a checksum does not fit")),
            };
            if record.seq > after {
                visit(record.seq, record.decode()?);
            }
            at += record.stored_len();
            next = Seq(next.0 + 1);
        }
        if next.0 == self.last.0 + 1 { Ok(()) } else { Err(wrong("batches are missing")) }
    }
}

/// A number that is never negative.
pub fn number(row: &Row, at: usize) -> Result<u64> {
    row.try_get::<_, i64>(at).map(|n| n as u64).map_err(odd)
}

/// A row of another shape than this code made.
pub fn odd(error: tokio_postgres::Error) -> Error {
    Error::Database { what: format!("a row of the metadata's tables makes no sense: {error}") }
}
