//! `torchfs fsck`: checks every record of the metadata, and that every block is on its servers.

use std::collections::HashSet;
use std::process::ExitCode;

use serde_json::json;
use torchfs_client::Tool;
use torchfs_proto::layout::Placement;
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{BlockId, Code, ServerId};

use crate::connect::Connect;
use crate::{print, roles};

/// Check the metadata against itself and against the data servers; names every inconsistency
///
/// Nothing is changed. The status is 0 when all is well, 1 when something was found.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    connect: Connect,

    /// Read every stored piece from its disk and check the checksums too
    #[arg(long)]
    data: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.connect.find()?;
    let (problems, records, blocks) = roles::block_on(async move {
        let tool = roles::tool(&found);
        let mut problems = Vec::new();
        let bar = print::progress("metadata", 0, args.json);
        let checked = tool
            .check(|progress, found| {
                problems.extend_from_slice(found);
                bar.set_length(progress.total.max(progress.done));
                bar.set_position(progress.done);
            })
            .await?;
        bar.finish_and_clear();
        let blocks = check_pieces(&tool, args.data, args.json, &mut problems).await?;
        Ok((problems, checked.done, blocks))
    })?;
    if args.json {
        println!(
            "{:#}",
            json!({"clean": problems.is_empty(), "problems": problems, "records": records, "blocks": blocks})
        );
    } else {
        for problem in &problems {
            println!("{problem}");
        }
        println!(
            "{} records and {} blocks checked: {}",
            print::count(records),
            print::count(blocks),
            if problems.is_empty() { "clean".to_string() } else { format!("{} problems", problems.len()) }
        );
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every block that the metadata names must have each of its pieces on the server it belongs to.
///
/// The cluster goes on working meanwhile, so a piece that seems to be missing is looked for once more by name, and its
/// block asked for once more: only what is still named and still missing counts.
async fn check_pieces(
    tool: &Tool,
    read: bool,
    quiet: bool,
    problems: &mut Vec<String>,
) -> anyhow::Result<u64> {
    let placement = placement(tool).await?;
    let held = list_held(tool, &placement, read, quiet, problems).await?;
    let bar = print::progress("blocks", tool.status().await?.blocks, quiet);
    let (mut after, mut count) = (None, 0);
    loop {
        let (blocks, end) = tool.list_blocks(after, LIST_MAX).await?;
        let mut missing = Vec::new();
        for block in &blocks {
            count += 1;
            bar.inc(1);
            let Some(layout) = placement.layouts.iter().find(|l| l.id == block.layout) else {
                problems
                    .push(format!("block {} names layout {}, which does not exist", block.id, block.layout));
                continue;
            };
            let group = &layout.groups[layout.group_of(block.id)];
            for (piece, home) in (0..).zip(&group.servers) {
                let home =
                    block.substitutes.iter().find(|(p, _)| *p == piece).map_or(*home, |(_, server)| *server);
                if !held.contains(&(block.id, piece, home)) {
                    missing.push((block.id, piece, home));
                }
            }
        }
        for (block, piece, home) in missing {
            let Some(server) = placement.servers.iter().find(|s| s.id == home) else {
                problems.push(format!(
                    "block {block} piece {piece} belongs to data server {home}, which is unknown"
                ));
                continue;
            };
            if let Err(fault) = tool.verify(&server.addr, block, piece).await
                && !tool.known_blocks(vec![block]).await?.is_empty()
            {
                problems
                    .push(format!("block {block} piece {piece} is missing on data server {home}: {fault}"));
            }
        }
        after = blocks.last().map(|b| b.id);
        if end || after.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(count)
}

async fn placement(tool: &Tool) -> anyhow::Result<Placement> {
    match tool.ask(Op::Placement).await? {
        Done::Placement(placement) => Ok(placement),
        other => anyhow::bail!("the metadata service answered a request for its placement with {other:?}"),
    }
}

/// Most pieces or blocks in one answer.
const LIST_MAX: u32 = 4096;

/// What all servers hold; with `read` every piece is read from its disk as well.
async fn list_held(
    tool: &Tool,
    placement: &Placement,
    read: bool,
    quiet: bool,
    problems: &mut Vec<String>,
) -> anyhow::Result<HashSet<(BlockId, u8, ServerId)>> {
    let mut held = HashSet::new();
    let bar = print::progress("pieces", placement.servers.iter().map(|s| s.pieces).sum(), quiet);
    for server in &placement.servers {
        let mut after = None;
        loop {
            let (pieces, end) = match tool.list_pieces(&server.addr, after, LIST_MAX).await {
                Ok(listed) => listed,
                Err(fault) => {
                    problems.push(format!(
                        "data server {} at {} cannot be checked: {fault}",
                        server.id, server.addr
                    ));
                    break;
                }
            };
            after = pieces.last().map(|p| (p.block, p.piece));
            for piece in pieces {
                bar.inc(1);
                held.insert((piece.block, piece.piece, server.id));
                if read
                    && let Err(fault) = tool.verify(&server.addr, piece.block, piece.piece).await
                    && fault.code != Code::Gone
                {
                    problems.push(format!(
                        "block {} piece {} on data server {} at {}: {fault}",
                        piece.block, piece.piece, server.id, server.addr
                    ));
                }
            }
            if end || after.is_none() {
                break;
            }
        }
    }
    bar.finish_and_clear();
    Ok(held)
}
