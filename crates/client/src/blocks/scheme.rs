//! How a block becomes pieces: the one place that knows what redundancy means.
//!
//! With replicas every piece is the whole block, so one piece answers any read.
//!
//! # Not here
//! Erasure coding: its layouts are refused by name until it is built.

use torchfs_proto::layout::{Group, Layout, Scheme};
use torchfs_proto::{BlockId, Code, Fault, Result, ServerId};

/// A piece of a block and a server that should have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Copy {
    pub piece: u8,
    pub server: ServerId,
}

/// The copies of a block, any of which answers a read: first those that were put, then where they may have moved.
pub(crate) fn copies(layout: &Layout, block: BlockId, substitutes: &[(u8, ServerId)]) -> Result<Vec<Copy>> {
    let group = group(layout, block)?;
    let mut copies: Vec<Copy> = Vec::with_capacity(group.servers.len());
    let mut add = |piece: usize, server: ServerId| {
        let copy = Copy { piece: piece as u8, server };
        if !copies.contains(&copy) {
            copies.push(copy);
        }
    };
    for (piece, server) in group.servers.iter().enumerate() {
        if !substitutes.iter().any(|(substituted, _)| usize::from(*substituted) == piece) {
            add(piece, *server);
        }
    }
    substitutes.iter().for_each(|(piece, server)| add(usize::from(*piece), *server));
    group.servers.iter().enumerate().for_each(|(piece, server)| add(piece, *server));
    group.moving_to.iter().enumerate().for_each(|(piece, server)| add(piece, *server));
    Ok(copies)
}

/// The group of a block, if its pieces are whole copies.
pub(crate) fn group(layout: &Layout, block: BlockId) -> Result<&Group> {
    match layout.scheme {
        Scheme::Replicas(_) => {}
        Scheme::Ec { data, parity } => {
            return Err(Fault::new(
                Code::Unsupported,
                format!(
                    "layout {} is ec:{data}+{parity}; this version reads and writes replicas only",
                    layout.id
                ),
            )
            .next("use a layout of replicas, or a newer torchfs"));
        }
    }
    match layout.groups.get(layout.group_of(block)) {
        Some(group) if !group.servers.is_empty() && group.servers.len() <= usize::from(u8::MAX) => Ok(group),
        _ => Err(Fault::new(Code::Invalid, format!("the group of block {block} has no servers"))
            .next("add data servers to the cluster")),
    }
}
