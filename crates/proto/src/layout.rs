//! Where blocks live: layouts, their placement groups, and the servers in them.
//!
//! The table is explicit and versioned: which group a block falls into depends on its id alone, which servers hold a
//! group is written down, and nothing is computed by a hash that a compiler or version could change.

use minicbor::{Decode, Encode};

use crate::{BlockId, LayoutId, ServerId};

/// How a block is made redundant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Scheme {
    /// The same bytes on this many servers.
    #[n(0)]
    Replicas(#[n(0)] u8),
    /// `data` pieces and `parity` pieces, any `data` of which suffice.
    #[n(1)]
    Ec {
        /// Pieces that hold the bytes.
        #[n(0)]
        data: u8,
        /// Pieces that may be lost.
        #[n(1)]
        parity: u8,
    },
}

impl Scheme {
    /// How many servers a group has.
    pub fn width(self) -> usize {
        match self {
            Scheme::Replicas(n) => usize::from(n),
            Scheme::Ec { data, parity } => usize::from(data) + usize::from(parity),
        }
    }
}

/// One placement group: piece `i` of its blocks lives on `servers[i]`.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Group {
    /// Rises with every edit of the group; puts carry it and servers refuse older ones.
    #[n(0)]
    pub version: u32,
    /// The group's servers in the order of pieces.
    #[n(1)]
    pub servers: Vec<ServerId>,
    /// While the group moves: the servers it moves to, written as well and read as well.
    #[n(2)]
    pub moving_to: Vec<ServerId>,
}

/// A scheme with its groups.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Layout {
    /// Named by every block placed by it.
    #[n(0)]
    pub id: LayoutId,
    /// Redundancy.
    #[n(1)]
    pub scheme: Scheme,
    /// Placement groups; never empty.
    #[n(2)]
    pub groups: Vec<Group>,
}

impl Layout {
    /// The group of a block: consecutive ids fall into consecutive groups, so one file streams from all servers.
    pub fn group_of(&self, block: BlockId) -> usize {
        (block.counter % self.groups.len().max(1) as u64) as usize
    }
}

/// A data server as clients need to know it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ServerInfo {
    /// Its number.
    #[n(0)]
    pub id: ServerId,
    /// HOST:PORT.
    #[n(1)]
    pub addr: String,
    /// Whether it sent a heartbeat lately.
    #[n(2)]
    pub up: bool,
    /// Bytes in all.
    #[n(3)]
    pub total: u64,
    /// Bytes free.
    #[n(4)]
    pub free: u64,
    /// Bytes that pieces take.
    #[n(5)]
    pub used: u64,
    /// Pieces held.
    #[n(6)]
    pub pieces: u64,
    /// Failure domain; may be empty.
    #[n(7)]
    pub zone: String,
}

/// All layouts and servers at one version.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Placement {
    /// Rises with every change.
    #[n(0)]
    pub version: u64,
    /// All layouts.
    #[n(1)]
    pub layouts: Vec<Layout>,
    /// All servers.
    #[n(2)]
    pub servers: Vec<ServerInfo>,
}
