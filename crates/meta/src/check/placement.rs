//! What a check knows of the placement: layouts, groups and servers fit each other, and blocks fit their layouts.
//!
//! The table is small and in memory, so it is looked at in one piece. Everything here is judged by one moment: the table and
//! the records that rest on it change in one batch.

use std::collections::BTreeSet;

use torchfs_proto::layout::{Group, Layout};
use torchfs_proto::record::{self, ClusterCounters};
use torchfs_proto::{BlockId, LayoutId, ServerId};

use crate::table::Table;

/// What is wrong with the table itself.
pub(super) fn table(table: &Table, counters: &ClusterCounters) -> Vec<String> {
    let mut problems = Vec::new();
    for id in table.servers.keys().filter(|id| id.0 >= counters.next_server) {
        problems.push(format!(
            "data server {id} was never given out: the next number is {}",
            counters.next_server
        ));
    }
    for (id, layout) in &table.layouts {
        if id.0 >= counters.next_layout {
            let next = counters.next_layout;
            problems.push(format!("layout {id} was never given out: the next number is {next}"));
        }
        if layout.groups.is_empty() {
            problems.push(format!("layout {id} has no groups: its blocks are nowhere"));
        }
        if let Some(next) =
            layout.replaced_by.filter(|next| *next <= *id || !table.layouts.contains_key(next))
        {
            problems.push(format!("layout {id} is replaced by layout {next}, which is not there or older"));
        }
        for (number, group) in layout.groups.iter().enumerate() {
            for problem in self::group(table, layout, group) {
                problems.push(format!("group {number} of layout {id} {problem}"));
            }
        }
    }
    problems
}

fn group(table: &Table, layout: &Layout, group: &Group) -> Vec<String> {
    let mut problems = Vec::new();
    let width = layout.scheme.width();
    let rows = [("servers", &group.servers), ("servers to move to", &group.moving_to)];
    for (what, row) in rows {
        if row.len() != width && !(row.is_empty() && what != "servers") {
            let (has, scheme) = (row.len(), layout.scheme);
            problems.push(format!("has {has} {what}, but {scheme} needs {width}"));
        }
        if row.iter().collect::<BTreeSet<_>>().len() != row.len() {
            problems.push(format!("names one of its {what} twice"));
        }
    }
    if group.former.iter().any(|(piece, _)| usize::from(*piece) >= width) {
        problems.push("remembers a former place of a piece that it does not have".to_string());
    }
    let moves = !group.moving_to.is_empty() || !group.former.is_empty();
    if moves && !group.dirty {
        problems.push("moves, but is not marked for repair: nobody will finish it".to_string());
    }
    // Where it moves away from a server that was removed, that one may still be named until it has moved.
    for server in group.target().iter().filter(|server| !table.servers.contains_key(server)) {
        problems.push(format!(
            "belongs on data server {server}, which is removed; start another data server, so that it can move"
        ));
    }
    problems
}

/// What is wrong with where a block says that its pieces are.
pub(super) fn block(table: &Table, id: BlockId, block: &record::Block) -> Vec<String> {
    let Some((at, layout, group)) = table.group_of(block.layout, id) else {
        return vec![format!("block {id} names layout {}, which is not there", block.layout)];
    };
    let Some(substitutes) = block.substitutes.as_deref() else { return Vec::new() };
    let mut problems = Vec::new();
    let pieces = layout.scheme.pieces(block.len);
    if substitutes.is_empty() {
        problems.push(format!("block {id} has an empty list of pieces that are elsewhere"));
    } else if !group.dirty {
        problems.push(format!(
            "block {id} has pieces elsewhere, but its group {} of layout {} is not marked for repair",
            at.1, at.0
        ));
    }
    let mut seen: BTreeSet<u8> = BTreeSet::new();
    for (piece, server) in substitutes {
        if usize::from(*piece) >= pieces {
            problems.push(format!("block {id} says where piece {piece} is, but has {pieces} pieces"));
        }
        if !seen.insert(*piece) {
            problems.push(format!("block {id} says twice where piece {piece} is"));
        }
        if *server == ServerId(0) {
            problems.push(format!("block {id} has piece {piece} on no data server"));
        }
    }
    problems
}

/// What is wrong with the layout that a file or folder names.
pub(super) fn policy(table: &Table, layout: Option<LayoutId>) -> Option<String> {
    let layout = layout.filter(|layout| !table.layouts.contains_key(layout))?;
    Some(format!("names layout {layout}, which is not there"))
}
