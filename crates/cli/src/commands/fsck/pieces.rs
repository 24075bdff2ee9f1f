//! Whether every block has its pieces on the data servers, and what lies there that nobody needs.
//!
//! Block records are taken a page at a time, and the servers asked for the pieces of that page, so memory is bounded. The
//! cluster goes on working meanwhile: a block that seems to lack something is looked at once more, by its record and the
//! placement of that later moment, and only what is still missing then counts.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use torchfs_client::Tool;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::{Layout, Placement};
use torchfs_proto::msg::block::PIECES_MAX;
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{BlockId, Code, ServerId};

use super::report::Report;

/// Blocks or pieces in one answer.
const PAGE: u32 = 2_048;
/// Pieces that one server reads at a time.
const READS: usize = 4;

/// What was found about blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Blocks {
    /// All of them.
    pub checked: u64,
    /// With all their pieces.
    pub whole: u64,
    /// With fewer, but enough to read them.
    pub degraded: u64,
    /// With too few.
    pub unreadable: u64,
}

/// What was found about pieces that nobody needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Strays {
    /// Nobody will remove them.
    pub orphans: u64,
    /// They go by themselves.
    pub leaving: u64,
}

/// A piece of a block, and who should have it, the likeliest first.
struct Piece {
    block: BlockId,
    number: u8,
    holders: Vec<ServerId>,
}

/// Why pieces are not where they should be.
type Lacking = BTreeMap<(BlockId, u8), String>;

/// Every block that the metadata names must have each of its pieces on a server that should have it; with `read` each is read.
pub async fn check_blocks(tool: &Tool, read: bool, report: &mut Report) -> anyhow::Result<Blocks> {
    let mut found = Blocks::default();
    let mut silent = BTreeMap::new();
    let bar = report.begin(if read { "reading blocks" } else { "blocks" }, tool.status().await?.blocks);
    let mut after = None;
    loop {
        let placement = placement(tool).await?;
        let (blocks, end) = tool.list_blocks(after, PAGE).await?;
        let lacking = lacking(tool, &placement, &blocks, read, &mut silent).await;
        let doubtful: BTreeSet<BlockId> = lacking.keys().map(|(block, _)| *block).collect();
        found.checked += blocks.len() as u64;
        for block in &blocks {
            bar.inc(1);
            let sound = placement.layout(block.layout).is_some() && !doubtful.contains(&block.id);
            match sound {
                true => found.whole += 1,
                false => again(tool, block.id, read, &mut silent, &mut found, report).await?,
            }
        }
        after = blocks.last().map(|block| block.id);
        if end || after.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    silent.values().for_each(|why| report.problem(why));
    Ok(found)
}

/// Looks at a block once more, as it is by now.
async fn again(
    tool: &Tool,
    id: BlockId,
    read: bool,
    silent: &mut BTreeMap<ServerId, String>,
    found: &mut Blocks,
    report: &mut Report,
) -> anyhow::Result<()> {
    let (blocks, _) = tool.list_blocks(before(id), 1).await?;
    let Some(block) = blocks.first().filter(|block| block.id == id) else {
        found.checked -= 1; // deleted meanwhile
        return Ok(());
    };
    let placement = placement(tool).await?;
    let Some(layout) = placement.layout(block.layout) else {
        found.unreadable += 1;
        report.hurt.add(id, true);
        report.problem(&format!("block {id} cannot be found: its layout {} is not there", block.layout));
        return Ok(());
    };
    let lacking = lacking(tool, &placement, &blocks, read, silent).await;
    if lacking.is_empty() {
        found.whole += 1;
        return Ok(());
    }
    let (all, needed) = (layout.scheme.pieces(block.len), layout.scheme.needed(block.len));
    let left = all - lacking.len();
    let why: Vec<String> = lacking.iter().map(|((_, piece), why)| format!("piece {piece} {why}")).collect();
    let why = why.join(", ");
    report.hurt.add(id, left < needed);
    if left >= needed {
        found.degraded += 1;
        report
            .problem(&format!("block {id} has {left} of {all} pieces ({needed} suffice to read it): {why}"));
    } else {
        found.unreadable += 1;
        report.problem(&format!("block {id} cannot be read: {left} of {all} pieces, {needed} needed: {why}"));
    }
    Ok(())
}

/// The pieces of these blocks that none of their holders has.
async fn lacking(
    tool: &Tool,
    placement: &Placement,
    blocks: &[NewBlock],
    read: bool,
    silent: &mut BTreeMap<ServerId, String>,
) -> Lacking {
    let mut open: Vec<Piece> = Vec::new();
    for block in blocks {
        let Some(layout) = placement.layout(block.layout) else { continue };
        open.extend(pieces(layout, block));
    }
    let mut lacking = Lacking::new();
    // One round for each place where a piece may be; nearly all end in the first.
    for round in 0.. {
        let mut questions: BTreeMap<ServerId, Vec<(BlockId, u8)>> = BTreeMap::new();
        for piece in &open {
            if let Some(server) = piece.holders.get(round) {
                questions.entry(*server).or_default().push((piece.block, piece.number));
            }
        }
        if questions.is_empty() {
            break;
        }
        let asked = questions.into_iter().map(|(server, pieces)| async move {
            (server, ask(tool, placement, server, pieces, read).await)
        });
        let mut here: BTreeSet<(BlockId, u8)> = BTreeSet::new();
        for (server, answer) in join_all(asked).await {
            here.extend(&answer.here);
            for (piece, why) in answer.lacking {
                lacking.insert(piece, why);
            }
            if let Some(why) = answer.silent {
                silent.insert(server, why);
            }
        }
        lacking.retain(|piece, _| !here.contains(piece));
        open.retain(|piece| !here.contains(&(piece.block, piece.number)));
    }
    lacking
}

/// What a server said about pieces.
#[derive(Default)]
struct Answer {
    here: Vec<(BlockId, u8)>,
    lacking: Vec<((BlockId, u8), String)>,
    /// It could not be asked.
    silent: Option<String>,
}

async fn ask(
    tool: &Tool,
    placement: &Placement,
    server: ServerId,
    pieces: Vec<(BlockId, u8)>,
    read: bool,
) -> Answer {
    let mut answer = Answer::default();
    let Some(info) = placement.servers.iter().find(|info| info.id == server) else {
        let why = format!("belongs to data server {server}, which is removed");
        answer.lacking = pieces.into_iter().map(|piece| (piece, why.clone())).collect();
        return answer;
    };
    let addr = info.addr.as_str();
    for part in pieces.chunks(PIECES_MAX) {
        let missing = match tool.missing(addr, part.to_vec()).await {
            Ok(missing) => missing,
            Err(fault) => {
                let state = super::super::servers::state(info);
                answer.silent = Some(format!("data server {server} ({state}) cannot be asked: {fault}"));
                let why = format!("is on data server {server}, which cannot be asked");
                answer.lacking.extend(part.iter().map(|piece| (*piece, why.clone())));
                continue;
            }
        };
        let missing: BTreeSet<(BlockId, u8)> = missing.into_iter().collect();
        let why = format!("is missing on data server {server}");
        answer.lacking.extend(missing.iter().map(|piece| (*piece, why.clone())));
        let present: Vec<(BlockId, u8)> = part.iter().copied().filter(|p| !missing.contains(p)).collect();
        if !read {
            answer.here.extend(present);
            continue;
        }
        let reads = present
            .into_iter()
            .map(|(block, number)| async move { ((block, number), tool.verify(addr, block, number).await) });
        let mut reads = stream::iter(reads).buffer_unordered(READS);
        while let Some((piece, read)) = reads.next().await {
            match read {
                Ok(()) => answer.here.push(piece),
                Err(fault) => {
                    let what = if fault.code == Code::Gone { "is missing" } else { "cannot be read" };
                    let why = format!("{what} on data server {server}: {}", fault.what);
                    answer.lacking.push((piece, why));
                }
            }
        }
    }
    answer
}

/// The pieces of a block and where each may be: where its record says, then where its group is, moves to and was.
fn pieces(layout: &Layout, block: &NewBlock) -> Vec<Piece> {
    let group = &layout.groups[layout.group_of(block.id)];
    let holders = |number: u8| {
        let at = usize::from(number);
        let listed = |list: &[(u8, ServerId)]| -> Vec<ServerId> {
            list.iter().filter(|(piece, _)| *piece == number).map(|(_, server)| *server).collect()
        };
        let mut holders: Vec<ServerId> = listed(&block.substitutes);
        // With a substitute it was never put at the target.
        let named = [group.target().get(at), group.servers.get(at)];
        holders.extend(named.into_iter().flatten());
        holders.extend(listed(&group.former));
        let mut seen = BTreeSet::new();
        holders.retain(|server| seen.insert(*server));
        holders
    };
    let count = layout.scheme.pieces(block.len) as u8;
    (0..count).map(|number| Piece { block: block.id, number, holders: holders(number) }).collect()
}

/// Names pieces on data servers that no record knows and that will not go by themselves.
pub async fn find_strays(tool: &Tool, report: &mut Report) -> anyhow::Result<Strays> {
    let placement = placement(tool).await?;
    let mut found = Strays::default();
    let bar = report.begin("stored pieces", placement.servers.iter().map(|s| s.pieces).sum());
    // Who cannot be asked was named already.
    for server in placement.servers.iter().filter(|server| server.up) {
        let mut after = None;
        loop {
            let (listed, end) = match tool.list_pieces(&server.addr, after, PAGE).await {
                Ok(listed) => listed,
                Err(fault) if fault.code == Code::Unreachable => break,
                Err(fault) => {
                    report.problem(&format!("data server {} cannot list its pieces: {fault}", server.id));
                    break;
                }
            };
            bar.inc(listed.len() as u64);
            after = listed.last().map(|piece| (piece.block, piece.piece));
            let pieces: Vec<(BlockId, u8)> = listed.iter().map(|piece| (piece.block, piece.piece)).collect();
            if pieces.is_empty() {
                break;
            }
            let strays = tool.strays(server.id, pieces).await?;
            found.leaving += strays.leaving.len() as u64;
            if !strays.orphans.is_empty() {
                // What was deleted between the two questions is no orphan.
                let gone = tool.missing(&server.addr, strays.orphans.clone()).await.unwrap_or_default();
                for (block, piece) in strays.orphans.iter().filter(|orphan| !gone.contains(orphan)) {
                    found.orphans += 1;
                    report.problem(&format!(
                        "piece {piece} of block {block} on data server {} is an orphan: no record needs it there",
                        server.id
                    ));
                }
            }
            if end {
                break;
            }
        }
    }
    bar.finish_and_clear();
    Ok(found)
}

async fn placement(tool: &Tool) -> anyhow::Result<Placement> {
    match tool.ask(Op::Placement).await? {
        Done::Placement(placement) => Ok(placement),
        other => anyhow::bail!("the metadata service answered a request for its placement with {other:?}"),
    }
}

/// The id before this one; `None` before the first.
fn before(id: BlockId) -> Option<BlockId> {
    match (id.incarnation, id.counter) {
        (0, 0) => None,
        (incarnation, 0) => Some(BlockId { incarnation: incarnation - 1, counter: u64::MAX }),
        (incarnation, counter) => Some(BlockId { incarnation, counter: counter - 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torchfs_proto::LayoutId;
    use torchfs_proto::layout::{Group, Scheme};

    #[test]
    fn a_piece_is_looked_for_where_its_record_says_and_wherever_its_group_was() {
        let group = Group {
            servers: vec![ServerId(1), ServerId(2)],
            moving_to: vec![ServerId(3), ServerId(2)],
            former: vec![(0, ServerId(5))],
            ..Group::default()
        };
        let layout = Layout {
            id: LayoutId(1),
            scheme: Scheme::Replicas(2),
            groups: vec![group],
            asked: None,
            replaced_by: None,
        };
        let block = NewBlock { len: 10, substitutes: vec![(1, ServerId(4))], ..NewBlock::default() };
        let holders: Vec<Vec<u32>> = pieces(&layout, &block)
            .iter()
            .map(|piece| piece.holders.iter().map(|server| server.0).collect())
            .collect();
        assert_eq!(holders, [vec![3, 1, 5], vec![4, 2]]);
    }

    #[test]
    fn the_id_before_one_is_found_over_incarnations() {
        let id = |incarnation, counter| BlockId { incarnation, counter };
        assert_eq!(before(id(2, 5)), Some(id(2, 4)));
        assert_eq!(before(id(2, 0)), Some(id(1, u64::MAX)));
        assert_eq!(before(id(0, 0)), None);
    }
}
