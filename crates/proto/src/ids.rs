//! Names of things: every id is a type of its own, so that two of them cannot be mixed up.

use std::fmt;

use minicbor::{Decode, Encode};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode)]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

id!(
    /// One cluster, drawn at random when it is made.
    ClusterId(u64)
);
id!(
    /// Rises on every takeover, load and restore of the metadata, so that no id is ever given twice.
    Incarnation(u32)
);
id!(
    /// One namespace with its policies. Volume 0 is the cluster's own records.
    VolumeId(u32)
);
id!(
    /// A file, folder or other object of a volume.
    Ino(u64)
);
id!(
    /// One agent's durable connection with the metadata service.
    SessionId(u64)
);
id!(
    /// One data server.
    ServerId(u32)
);
id!(
    /// A scheme of redundancy with its own placement groups.
    LayoutId(u32)
);
id!(
    /// A place in the ordered log; 0 is before the first batch.
    Seq(u64)
);
id!(
    /// Who may write the log; a higher fence shuts out every lower one.
    Fence(u64)
);

impl Ino {
    /// The root folder of every volume.
    pub const ROOT: Ino = Ino(1);
}

/// A block's name: never used twice, since the incarnation rises whenever the counter could go back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode)]
pub struct BlockId {
    /// The metadata's incarnation that gave the id out.
    #[n(0)]
    pub incarnation: u32,
    /// Counts within the incarnation.
    #[n(1)]
    pub counter: u64,
}

impl BlockId {
    /// Twelve bytes whose order is the order of ids.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.incarnation.to_be_bytes());
        bytes[4..].copy_from_slice(&self.counter.to_be_bytes());
        bytes
    }

    /// The inverse of [`BlockId::to_bytes`].
    pub fn from_bytes(bytes: [u8; 12]) -> BlockId {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
        BlockId {
            incarnation: u32::from_be_bytes([a, b, c, d]),
            counter: u64::from_be_bytes([e, f, g, h, i, j, k, l]),
        }
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation, self.counter)
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockId({self})")
    }
}

/// A run of block ids `[first, first + count)` given to one session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct IdRange {
    /// The first id of the run.
    #[n(0)]
    pub first: BlockId,
    /// How many ids follow each other.
    #[n(1)]
    pub count: u32,
}

impl IdRange {
    /// Whether the run holds this id.
    pub fn contains(&self, id: BlockId) -> bool {
        id.incarnation == self.first.incarnation
            && id.counter >= self.first.counter
            && id.counter - self.first.counter < u64::from(self.count)
    }
}
