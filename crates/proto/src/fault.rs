//! What goes wrong between processes: one closed code that knows its errno and whether to try again.

use std::fmt;

use minicbor::{Decode, Encode};

macro_rules! codes {
    ($($(#[$doc:meta])* $n:literal $name:ident = $errno:literal, $retry:literal;)*) => {
        /// The closed list of faults. Numbers are on the wire and never change their meaning.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Encode, Decode)]
        #[cbor(index_only)]
        pub enum Code { $($(#[$doc])* #[n($n)] $name,)* }

        impl Code {
            /// Every code there is.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// The Linux errno a program sees.
            pub fn errno(self) -> i32 {
                match self { $(Code::$name => $errno,)* }
            }

            /// Whether the same request may succeed later or elsewhere.
            pub fn retry(self) -> bool {
                match self { $(Code::$name => $retry,)* }
            }
        }
    };
}

codes! {
    /// No such entry or inode.
    0 NotFound = 2, false;
    /// The name is taken.
    1 Exists = 17, false;
    /// A folder was needed.
    2 NotDir = 20, false;
    /// A folder was not wanted.
    3 IsDir = 21, false;
    /// The folder has entries.
    4 NotEmpty = 39, false;
    /// The arguments make no sense.
    5 Invalid = 22, false;
    /// The caller may not do this.
    6 Permission = 1, false;
    /// The caller lacks the right.
    7 Access = 13, false;
    /// A name is longer than 255 bytes.
    8 NameTooLong = 36, false;
    /// Too many links to one inode.
    9 TooManyLinks = 31, false;
    /// The file would grow past its limit.
    10 TooLarge = 27, false;
    /// No space left on a disk that this needs.
    11 NoSpace = 28, false;
    /// A quota is used up.
    12 Quota = 122, false;
    /// No such extended attribute.
    13 NoAttr = 61, false;
    /// The value does not fit the caller's buffer.
    14 Range = 34, false;
    /// The kind of request is not served.
    15 Unsupported = 95, false;
    /// The volume or mount is read-only.
    16 ReadOnly = 30, false;
    /// The inode's generation is another: the handle is stale.
    17 Stale = 116, false;
    /// A lock is held by somebody else.
    18 WouldBlock = 11, false;
    /// Waiting for the lock would be a deadlock.
    19 Deadlock = 35, false;
    /// The wait was interrupted by a signal.
    20 Interrupted = 4, false;
    /// Rename across volumes.
    21 CrossVolume = 18, false;
    /// The thing is in use.
    22 Busy = 16, false;
    /// Too many of something for one request or session.
    23 TooMany = 7, false;
    /// Disk or data error: named block and server.
    24 Io = 5, false;
    /// Stored bytes do not match their checksum.
    25 Corrupt = 5, false;
    /// The block is not on this server, or was declared dead.
    26 Gone = 5, false;
    /// The session is unknown, closed or fenced.
    27 NoSession = 5, false;
    /// The session's epoch or lease generation is an older one.
    28 Fenced = 5, false;
    /// The answering server does not lead.
    29 NotLeader = 5, true;
    /// The server starts up, or a new leader waits for old leases to end.
    30 Grace = 5, true;
    /// No answer came in time.
    31 Timeout = 110, true;
    /// The connection is lost or cannot be made.
    32 Unreachable = 113, true;
    /// The peer is overloaded; try again a little later.
    33 Overloaded = 11, true;
    /// The request carried an older placement than the server's.
    34 StalePlacement = 11, true;
    /// The secret or token was not accepted.
    35 Denied = 13, false;
    /// Versions or features do not fit.
    36 Version = 71, false;
    /// The peer sent bytes that make no sense.
    37 Protocol = 71, false;
    /// A bug or broken promise inside the server.
    38 Internal = 5, false;
    /// The request was cancelled by its sender.
    39 Cancelled = 125, false;
    /// No such device or address.
    40 NoDevice = 6, false;
}

/// A fault as it travels: what happened, to what, and what to do next.
#[derive(Clone, PartialEq, Eq, Encode, Decode, thiserror::Error)]
pub struct Fault {
    /// The closed code; the errno follows from it.
    #[n(0)]
    pub code: Code,
    /// What happened, to what.
    #[n(1)]
    pub what: String,
    /// What a person can do about it; may be empty.
    #[n(2)]
    pub next: String,
}

/// The usual result between processes.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

impl Fault {
    /// A fault without advice.
    pub fn new(code: Code, what: impl Into<String>) -> Fault {
        Fault { code, what: what.into(), next: String::new() }
    }

    /// The same with the next step for a person.
    pub fn next(mut self, next: impl Into<String>) -> Fault {
        self.next = next.into();
        self
    }

    /// The errno a program sees.
    pub fn errno(&self) -> i32 {
        self.code.errno()
    }
}

impl From<Code> for Fault {
    fn from(code: Code) -> Fault {
        Fault::new(code, String::new())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.what.is_empty() {
            write!(f, "{:?}", self.code)?;
        } else {
            f.write_str(&self.what)?;
        }
        if !self.next.is_empty() {
            write!(f, "; {}", self.next)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.code)
    }
}
