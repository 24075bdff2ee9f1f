//! Placement: which servers hold which group of a new layout. Pure.
//!
//! # Invariants
//! - The table follows from its arguments alone and is written down once made; no hash takes part.

use torchfs_proto::layout::{Group, Layout, Scheme};
use torchfs_proto::{LayoutId, ServerId};

/// The redundancy of new data: what was asked for, as far as there are servers for it.
pub fn scheme(asked: Option<Scheme>, servers: usize) -> Scheme {
    let copies = |n: usize| Scheme::Replicas(u8::try_from(n.clamp(1, servers.max(1))).unwrap_or(u8::MAX));
    match asked {
        None => copies(2),
        Some(Scheme::Replicas(n)) => copies(usize::from(n)),
        Some(ec) if ec.width() <= servers => ec,
        // Too few servers for the pieces: as many copies as would survive the same losses.
        Some(Scheme::Ec { parity, .. }) => copies(usize::from(parity) + 1),
    }
}

/// A layout over these servers: group after group begins one server further, so consecutive blocks fall on different
/// servers, and every server gets the same share.
pub fn layout(id: LayoutId, scheme: Scheme, servers: &[ServerId], groups: u32) -> Layout {
    let group = |g: usize| Group {
        version: 1,
        servers: (0..scheme.width()).map(|piece| servers[(g + piece) % servers.len()]).collect(),
        ..Group::default()
    };
    let groups =
        if servers.is_empty() { Vec::new() } else { (0..groups.max(1) as usize).map(group).collect() };
    Layout { id, scheme, groups, asked: None, replaced_by: None }
}

/// A scheme for people.
pub fn shown(scheme: Scheme) -> String {
    match scheme {
        Scheme::Replicas(n) => format!("replicas:{n}"),
        Scheme::Ec { data, parity } => format!("ec:{data}+{parity}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_this_one_forever() {
        let servers: Vec<ServerId> = (1..=3).map(ServerId).collect();
        let made = layout(LayoutId(4), Scheme::Replicas(2), &servers, 5);
        let table: Vec<Vec<u32>> =
            made.groups.iter().map(|group| group.servers.iter().map(|s| s.0).collect()).collect();
        assert_eq!(table, [[1, 2], [2, 3], [3, 1], [1, 2], [2, 3]]);
        let golden = "83048200810285840182010280f4840182020380f4840182030180f4840182010280f4840182020380f4";
        let bytes: String = torchfs_proto::msg::encode(&made).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(bytes, golden);
    }

    #[test]
    fn redundancy_follows_the_servers_there_are() {
        assert_eq!(scheme(None, 1), Scheme::Replicas(1));
        assert_eq!(scheme(None, 5), Scheme::Replicas(2));
        assert_eq!(scheme(Some(Scheme::Replicas(3)), 2), Scheme::Replicas(2));
        assert_eq!(scheme(Some(Scheme::Ec { data: 4, parity: 2 }), 6), Scheme::Ec { data: 4, parity: 2 });
        assert_eq!(scheme(Some(Scheme::Ec { data: 4, parity: 2 }), 4), Scheme::Replicas(3));
    }
}
