//! What goes wrong in the engine.

use std::io;
use std::time::Duration;

use torchfs_proto::{ClusterId, Code, Fault, Seq};

/// The engine's usual result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that goes wrong in the engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Room is short and the batch does not free any.
    #[error("no space left for metadata: {free} bytes free, {reserve} are kept for deleting")]
    NoSpace {
        /// What is left.
        free: u64,
        /// What is kept back.
        reserve: u64,
    },
    /// A key, a value or a batch is larger than the format allows.
    #[error("{what} has {len} bytes, {max} are allowed")]
    TooLarge {
        /// Which part.
        what: &'static str,
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A write or sync failed earlier; nothing can be promised any more.
    #[error("the metadata log failed and takes no more changes: {what}")]
    Failed {
        /// The first failure.
        what: String,
    },
    /// The place was not durable in time.
    #[error("batch {seq} was not durable within {timeout:?}")]
    Timeout {
        /// The place waited for.
        seq: Seq,
        /// How long.
        timeout: Duration,
    },
    /// The engine stayed behind with writing to disk for longer than a caller should wait.
    #[error("the metadata log is behind: no room for another batch within {timeout:?}")]
    Stalled {
        /// How long the caller waited.
        timeout: Duration,
    },
    /// Another process has the folder.
    #[error("{what}")]
    Locked {
        /// The sentence that names the folder.
        what: String,
    },
    /// The folder is not one of this kind of engine.
    #[error("{what}")]
    Foreign {
        /// The sentence that says whose it is and what to do.
        what: String,
    },
    /// Stored bytes contradict each other.
    #[error("the metadata on disk is damaged: {what}")]
    Corrupt {
        /// Which file, where, and what is wrong.
        what: String,
    },
    /// Written by a later version, or with a feature that this version must know and does not.
    #[error("{what}; use a version of torchfs at least as new as the one that wrote it")]
    Unsupported {
        /// Which file and which version or feature.
        what: String,
    },
    /// The folder belongs to another cluster.
    #[error("the metadata folder belongs to cluster {found:016x}, not to {expected:016x}; give the --dir of this cluster", found = .found.0, expected = .expected.0)]
    WrongCluster {
        /// Whose folder it is.
        found: ClusterId,
        /// Whose it should be.
        expected: ClusterId,
    },
    /// A dump is cut off, damaged or none at all.
    #[error("the dump cannot be used: {what}")]
    Dump {
        /// What is wrong with it, and where.
        what: String,
    },
    /// Another opener of the same log has taken the lead.
    #[error("another metadata server leads: {what}")]
    Deposed {
        /// Who, if that is known.
        what: String,
    },
    /// The database does not answer, or refuses for now; it may be tried again.
    #[error("the metadata's database does not answer: {what}")]
    Silent {
        /// What was tried and what came back.
        what: String,
    },
    /// The database refuses what this program needs.
    #[error("the metadata's database refuses: {what}")]
    Database {
        /// What was tried, what came back, and what to do.
        what: String,
    },
    /// The database knows less than it did before.
    #[error("{what}")]
    BackInTime {
        /// The sentence that says what is missing and what to do.
        what: String,
    },
    /// The disk failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// LMDB failed.
    #[error("the replica failed: {what}")]
    Replica {
        /// What was tried and what LMDB said.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }

    /// Whether more room would have helped.
    pub(crate) fn is_space(&self) -> bool {
        match self {
            Error::NoSpace { .. } => true,
            Error::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let (code, next) = match &error {
            Error::NoSpace { .. } => {
                (Code::NoSpace, "delete something or give the metadata folder more room")
            }
            Error::Io { .. } if error.is_space() => {
                (Code::NoSpace, "delete something or give the metadata folder more room")
            }
            Error::TooLarge { .. } => (Code::TooLarge, ""),
            Error::Failed { .. } => {
                (Code::Io, "check the disk below the metadata folder, then start the server again")
            }
            Error::Timeout { .. } => (Code::Timeout, ""),
            Error::Stalled { .. } => (Code::Overloaded, ""),
            Error::Locked { .. } => (Code::Busy, ""),
            Error::Corrupt { .. } => (Code::Corrupt, "restore the metadata from its last dump"),
            Error::Foreign { .. } => (Code::Invalid, ""),
            Error::Unsupported { .. } => (Code::Version, ""),
            Error::Dump { .. } => (Code::Corrupt, "take another dump, or copy this one again"),
            Error::Deposed { .. } => (Code::NotLeader, ""),
            Error::Silent { .. } => (Code::Unreachable, "check the database of the metadata"),
            Error::Database { .. } => (Code::Io, "check the database of the metadata"),
            Error::BackInTime { .. } => (Code::Corrupt, ""),
            Error::WrongCluster { .. } => (Code::Invalid, ""),
            Error::Io { .. } | Error::Replica { .. } => {
                (Code::Io, "check the disk below the metadata folder")
            }
        };
        Fault::new(code, error.to_string()).next(next)
    }
}
