//! What goes wrong in a data server; each variant names what it happened to.

use torchfs_proto::{BlockId, Code, Fault, ServerId};

/// The result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What goes wrong in a data server.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The piece is not here: never was, or was declared dead.
    #[error("piece {piece} of block {block} is not on server {server}")]
    Gone {
        /// The block.
        block: BlockId,
        /// Its piece.
        piece: u8,
        /// This server.
        server: ServerId,
    },
    /// What is stored is not what was put.
    #[error("piece {piece} of block {block} is corrupt on server {server}: {why}")]
    Corrupt {
        /// The block.
        block: BlockId,
        /// Its piece.
        piece: u8,
        /// This server.
        server: ServerId,
        /// What did not fit.
        why: String,
    },
    /// The id is taken by other content. Ids are never given twice, so this is a bug of the writer.
    #[error("piece {piece} of block {block} is on server {server} already, with other content")]
    Differs {
        /// The block.
        block: BlockId,
        /// Its piece.
        piece: u8,
        /// This server.
        server: ServerId,
    },
    /// The request makes no sense.
    #[error("a request about block {block} makes no sense to server {server}: {why}")]
    Invalid {
        /// The block.
        block: BlockId,
        /// This server.
        server: ServerId,
        /// What is wrong with it.
        why: String,
    },
    /// No room for another piece; what is left is kept for deleting.
    #[error("no space left on server {server}")]
    NoSpace {
        /// This server.
        server: ServerId,
    },
    /// The disk failed.
    #[error("server {server} failed to {what}: {why}")]
    Io {
        /// This server.
        server: ServerId,
        /// What it tried.
        what: &'static str,
        /// The system's words.
        why: String,
    },
    /// The disk failed to sync earlier; nothing is written to it any more.
    #[error("server {server} takes no changes since its disk failed: {why}")]
    Latched {
        /// This server.
        server: ServerId,
        /// The first failure.
        why: String,
    },
    /// The disk does not answer; it may come back.
    #[error("the disk {disk} of server {server} has not answered for {seconds} s")]
    Silent {
        /// This server.
        server: ServerId,
        /// The disk's folder.
        disk: String,
        /// How long by now.
        seconds: u64,
    },
    /// The files are of another cluster or of a newer version.
    #[error("server {server} cannot use its folder: {why}")]
    Foreign {
        /// This server.
        server: ServerId,
        /// What does not fit.
        why: String,
    },
    /// Another process has the folder.
    #[error("server {server} cannot use its folder: {why}")]
    Busy {
        /// This server.
        server: ServerId,
        /// Whose it is.
        why: String,
    },
    /// Too much waits already.
    #[error("server {server} has too much to do")]
    Overloaded {
        /// This server.
        server: ServerId,
    },
    /// The store is closing.
    #[error("server {server} is stopping")]
    Closed {
        /// This server.
        server: ServerId,
    },
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        let (code, next) = match &error {
            Error::Gone { .. } => (Code::Gone, ""),
            Error::Corrupt { .. } => (Code::Corrupt, "run torchfs scrub"),
            Error::Differs { .. } => (Code::Exists, ""),
            Error::Invalid { .. } => (Code::Invalid, ""),
            Error::NoSpace { .. } => (Code::NoSpace, "delete files or add a server"),
            Error::Io { .. } => (Code::Io, "check the server's disk"),
            Error::Latched { .. } => (Code::Io, "check the server's disk, then restart the server"),
            Error::Silent { .. } => (Code::Unreachable, "check the server's disk"),
            Error::Foreign { .. } => (Code::Version, "use another folder or the version that wrote this one"),
            Error::Busy { .. } => (Code::Busy, ""),
            Error::Overloaded { .. } => (Code::Overloaded, ""),
            Error::Closed { .. } => (Code::Unreachable, ""),
        };
        Fault::new(code, error.to_string()).next(next)
    }
}
