//! Where blocks live: layouts, their placement groups, and the servers in them.
//!
//! The table is explicit and versioned: which group a block falls into depends on its id alone, which servers hold a
//! group is written down, and nothing is computed by a hash that a compiler or version could change.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use minicbor::{Decode, Encode};

use crate::{BlockId, Code, Fault, LayoutId, Result, ServerId};

/// Blocks shorter than this are replicated where longer ones are erasure coded.
pub const CODED_MIN: u32 = 256 << 10;

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

    /// How many pieces a block of this length has: short ones are replicated, never erasure coded.
    pub fn pieces(self, block_len: u32) -> usize {
        match self {
            Scheme::Ec { data, parity }
                if block_len < CODED_MIN || block_len.div_ceil(crate::chunk::CHUNK) < u32::from(data) =>
            {
                usize::from(parity) + 1
            }
            scheme => scheme.width(),
        }
    }

    /// How many pieces a reader of a block of this length needs.
    pub fn needed(self, block_len: u32) -> usize {
        match self {
            Scheme::Ec { data, .. } if self.pieces(block_len) == self.width() => usize::from(data),
            _ => 1,
        }
    }

    /// How many pieces may be lost without losing bytes.
    pub fn tolerates(self) -> usize {
        match self {
            Scheme::Replicas(n) => usize::from(n).saturating_sub(1),
            Scheme::Ec { parity, .. } => usize::from(parity),
        }
    }
}

/// As people write it: `replicas:3`, `ec:4+2`.
impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Replicas(n) => write!(f, "replicas:{n}"),
            Scheme::Ec { data, parity } => write!(f, "ec:{data}+{parity}"),
        }
    }
}

impl FromStr for Scheme {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Scheme> {
        let bad = || {
            Fault::new(Code::Invalid, format!("`{text}` is no redundancy"))
                .next("write replicas:N with N from 1 to 8, or ec:K+M with K from 2 to 16 and M from 1 to 8")
        };
        let scheme = match text.split_once(':') {
            Some(("replicas", n)) => Scheme::Replicas(n.parse().map_err(|_| bad())?),
            Some(("ec", shape)) => {
                let (data, parity) = shape.split_once('+').ok_or_else(bad)?;
                let number = |text: &str| text.parse().map_err(|_| bad());
                Scheme::Ec { data: number(data)?, parity: number(parity)? }
            }
            _ => return Err(bad()),
        };
        if scheme.is_sound() { Ok(scheme) } else { Err(bad()) }
    }
}

impl Scheme {
    /// Whether its numbers are within the bounds that are served.
    pub fn is_sound(self) -> bool {
        match self {
            Scheme::Replicas(n) => (1..=8).contains(&n),
            Scheme::Ec { data, parity } => (2..=16).contains(&data) && (1..=8).contains(&parity),
        }
    }
}

/// One placement group: piece `i` of its blocks lives on `servers[i]`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Group {
    /// Rises with every edit of the group; puts carry it and servers refuse older ones.
    #[n(0)]
    pub version: u32,
    /// The group's servers in the order of pieces.
    #[n(1)]
    pub servers: Vec<ServerId>,
    /// While the group moves: the servers it moves to, in the order of pieces. New pieces are put there; old ones are read
    /// from either until the group has moved.
    #[n(2)]
    pub moving_to: Vec<ServerId>,
    /// Pieces may be missing from the target: repair has to look.
    #[n(3)]
    #[cbor(default)]
    pub dirty: bool,
    /// Where pieces were put while the group moved to servers that it does not move to any more, or were found after the load
    /// of a dump, (piece, server). Read last; empty once all is at the target.
    #[n(4)]
    #[cbor(default)]
    pub former: Vec<(u8, ServerId)>,
}

impl Group {
    /// Where new pieces belong: piece `i` on `target()[i]`.
    pub fn target(&self) -> &[ServerId] {
        if self.moving_to.is_empty() { &self.servers } else { &self.moving_to }
    }
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
    /// The redundancy that was asked for; `scheme` is less where there were too few servers. None: the cluster's default.
    #[n(3)]
    pub asked: Option<Scheme>,
    /// New blocks go to this layout instead, since more servers have joined.
    #[n(4)]
    pub replaced_by: Option<LayoutId>,
}

impl Layout {
    /// The group of a block: consecutive ids fall into consecutive groups, so one file streams from all servers.
    pub fn group_of(&self, block: BlockId) -> usize {
        (block.counter % self.groups.len().max(1) as u64) as usize
    }
}

/// Whether a data server is heard of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Encode, Decode)]
#[cbor(index_only)]
pub enum ServerState {
    /// It sent a heartbeat lately.
    #[default]
    #[n(0)]
    Up,
    /// A heartbeat is overdue; it is still used.
    #[n(1)]
    Suspected,
    /// Silent for too long: writers choose substitutes, readers other sources.
    #[n(2)]
    Down,
    /// Down for so long that its groups move to others.
    #[n(3)]
    Out,
}

impl fmt::Display for ServerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ServerState::Up => "up",
            ServerState::Suspected => "suspected",
            ServerState::Down => "down",
            ServerState::Out => "out",
        })
    }
}

/// One disk of a data server.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct DiskInfo {
    /// Drawn at random by its store when made.
    #[n(0)]
    pub id: u64,
    /// Its folder, for people.
    #[n(1)]
    pub path: String,
    /// Bytes in all.
    #[n(2)]
    pub total: u64,
    /// Bytes free for pieces.
    #[n(3)]
    pub free: u64,
    /// Bytes that pieces take.
    #[n(4)]
    pub used: u64,
    /// Pieces held.
    #[n(5)]
    pub pieces: u64,
    /// It failed and is not used any more: its pieces are missing.
    #[n(6)]
    pub failed: bool,
    /// What happened to it; empty while it works.
    #[n(7)]
    pub fault: String,
    /// The file system that it is on: disks with the same number share its room. 0: one of its own.
    #[n(8)]
    #[cbor(default)]
    pub fs: u64,
    /// Bytes that this file system has left for pieces, whoever takes them.
    #[n(9)]
    #[cbor(default)]
    pub fs_free: u64,
    /// How many of these are counted in `free`.
    #[n(10)]
    #[cbor(default)]
    pub fs_share: u64,
    /// It has not answered for so many milliseconds: it gets nothing new, and is used again when it answers.
    #[n(11)]
    pub silent_ms: Option<u64>,
}

impl DiskInfo {
    /// Whether pieces can be put on it and read from it.
    pub fn works(&self) -> bool {
        !self.failed && self.silent_ms.is_none()
    }
}

/// Bytes that disks have together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Room {
    /// In all.
    pub total: u64,
    /// Free for pieces.
    pub free: u64,
    /// That pieces take.
    pub used: u64,
}

impl Room {
    /// The sum over disks; what a file system has left counts once, however many disks are on it.
    pub fn of<'a>(disks: impl IntoIterator<Item = &'a DiskInfo>) -> Room {
        let mut room = Room::default();
        // By file system: what is left of it, and how much of that was added up.
        let mut shared: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for disk in disks.into_iter().filter(|disk| disk.works()) {
            room.total = room.total.saturating_add(disk.total);
            room.free = room.free.saturating_add(disk.free);
            room.used = room.used.saturating_add(disk.used);
            if disk.fs != 0 {
                let (left, added) = shared.entry(disk.fs).or_default();
                *left = disk.fs_free.max(*left);
                *added = added.saturating_add(disk.fs_share);
            }
        }
        let twice: u64 = shared.values().map(|(left, added)| added.saturating_sub(*left)).sum();
        room.total = room.total.saturating_sub(twice);
        room.free = room.free.saturating_sub(twice);
        room
    }
}

/// What a data server does: since its start in a heartbeat, per second in a report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Load {
    /// Pieces read.
    #[n(0)]
    pub gets: u64,
    /// Pieces stored.
    #[n(1)]
    pub puts: u64,
    /// Bytes sent.
    #[n(2)]
    pub read_bytes: u64,
    /// Bytes stored.
    #[n(3)]
    pub written_bytes: u64,
    /// Requests that wait right now.
    #[n(4)]
    pub waiting: u64,
}

/// A data server as clients need to know it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
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
    /// Whether it is heard of.
    #[n(8)]
    #[cbor(default)]
    pub state: ServerState,
    /// An administrator wants it emptied: its groups move to others.
    #[n(9)]
    #[cbor(default)]
    pub draining: bool,
    /// Places in groups that name it, old and new ones; 0 for a server that is drained.
    #[n(10)]
    #[cbor(default)]
    pub groups: u32,
    /// Pieces that it should hold and does not, as far as known. Only in reports.
    #[n(11)]
    #[cbor(default)]
    pub to_repair: u64,
    /// Its disks. Only in reports.
    #[n(12)]
    #[cbor(default)]
    pub disks: Vec<DiskInfo>,
    /// What it does, per second. Only in reports.
    #[n(13)]
    #[cbor(default)]
    pub load: Load,
}

impl ServerInfo {
    /// Whether it takes no more data, as far as it told: it is up, and no block of the largest size has room on a disk of it.
    pub fn is_full(&self) -> bool {
        let room = |disk: &DiskInfo| disk.works() && disk.free >= u64::from(crate::chunk::MAX_BLOCK);
        self.up && self.used.saturating_add(self.free) > 0 && !self.parts().iter().any(room)
    }

    /// Its disks as far as it told; else itself as one.
    pub fn parts(&self) -> Vec<DiskInfo> {
        let &ServerInfo { total, free, used, pieces, .. } = self;
        match self.disks.is_empty() {
            true => vec![DiskInfo { total, free, used, pieces, ..DiskInfo::default() }],
            false => self.disks.clone(),
        }
    }
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

impl Placement {
    /// The layout for new blocks where this one was chosen: itself, or what replaced it.
    pub fn current(&self, id: LayoutId) -> Option<&Layout> {
        let mut layout = self.layout(id)?;
        // Layouts are replaced by newer ones only, so this ends.
        while let Some(next) = layout.replaced_by.filter(|next| *next > layout.id) {
            layout = self.layout(next)?;
        }
        Some(layout)
    }

    /// A layout by its number.
    pub fn layout(&self, id: LayoutId) -> Option<&Layout> {
        self.layouts.iter().find(|layout| layout.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_system_has_left_counts_once() {
        // Two disks on one file system with 100 bytes left; each has 10 in segments of its own, and takes 5.
        let disk = |fs| DiskInfo {
            total: 115,
            free: 110,
            used: 5,
            fs,
            fs_free: 100,
            fs_share: 100,
            ..DiskInfo::default()
        };
        assert_eq!(Room::of(&[disk(7), disk(7)]), Room { total: 130, free: 120, used: 10 });
        assert_eq!(Room::of(&[disk(7), disk(8)]), Room { total: 230, free: 220, used: 10 });
        assert_eq!(Room::of(&[disk(0), disk(0)]), Room { total: 230, free: 220, used: 10 });
        // Together they may take less than it has.
        let bounded = DiskInfo { total: 45, free: 40, fs_share: 30, ..disk(7) };
        assert_eq!(Room::of(&[bounded.clone(), bounded]), Room { total: 90, free: 80, used: 10 });
        let silent = DiskInfo { silent_ms: Some(20_000), ..disk(7) };
        assert_eq!(Room::of(&[disk(7), silent]), Room { total: 115, free: 110, used: 5 });
        let failed = DiskInfo { failed: true, ..disk(7) };
        assert_eq!(Room::of(&[disk(7), failed]), Room { total: 115, free: 110, used: 5 });
    }
}
