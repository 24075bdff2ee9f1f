//! What goes wrong when a metadata store is opened; requests answer with [`torchfs_proto::Fault`].

use torchfs_proto::{ClusterId, Fault};

/// Why a metadata store cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] torchfs_engine::Error),
    /// The store's first record is none of ours.
    #[error("the metadata store has magic {found:#x}: it was not made by torchfs")]
    Magic {
        /// What is there.
        found: u64,
    },
    /// Written by a later version, or with features that this one must know.
    #[error(
        "the metadata store has version {version} and features {must_know:#x}, this program knows version {known}; \
         use a version of torchfs at least as new as the one that wrote it"
    )]
    Version {
        /// The store's version.
        version: u32,
        /// The store's features that must be known.
        must_know: u64,
        /// The version this program knows.
        known: u32,
    },
    /// A load from a dump did not come to its end.
    #[error(
        "the metadata store is half filled from a dump: that load was cut off; empty the store and load the dump again"
    )]
    Unfinished,
    /// The records belong to another cluster than the log.
    #[error("the metadata records belong to cluster {found:?}, the log to {log:?}")]
    Cluster {
        /// In the format record.
        found: ClusterId,
        /// In the log.
        log: ClusterId,
    },
    /// A record cannot be read.
    #[error("{0}")]
    Record(Fault),
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        Error::Record(fault)
    }
}
