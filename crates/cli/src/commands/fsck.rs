//! `torchfs fsck`: checks every record of the metadata, and that every block is on its servers.

use std::collections::HashSet;
use std::process::ExitCode;

use serde_json::json;
use torchfs_client::Tool;
use torchfs_codec::erasure;
use torchfs_proto::extent::NewBlock;
use torchfs_proto::layout::{Layout, Placement, Scheme};
use torchfs_proto::msg::meta::{Done, Op};
use torchfs_proto::{BlockId, Code, ServerId};

use crate::connect::Connect;
use crate::{print, roles};

/// Check the metadata against itself and against the data servers; names every inconsistency
///
/// Proves that every block has all its pieces on the servers they belong to, or names those that have not. With --data
/// every piece is read from its disk as well. Nothing is changed: repair goes on by itself, see torchfs servers. The status is 0
/// when all is well, 1 when something was found.
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
            for (piece, homes) in homes(layout, block) {
                if !homes.iter().any(|home| held.contains(&(block.id, piece, *home))) {
                    missing.push((block.id, piece, homes));
                }
            }
        }
        for (block, piece, homes) in missing {
            let mut why = String::new();
            for home in homes {
                let Some(server) = placement.servers.iter().find(|s| s.id == home) else {
                    why = format!("belongs to data server {home}, which is unknown");
                    continue;
                };
                match tool.verify(&server.addr, block, piece).await {
                    Ok(()) => {
                        why.clear();
                        break;
                    }
                    Err(fault) if fault.code == Code::Gone => {
                        why = format!("is missing on data server {home}: {fault}");
                    }
                    Err(fault) => why = format!("cannot be read on data server {home}: {fault}"),
                }
            }
            if !why.is_empty() && !tool.known_blocks(vec![block]).await?.is_empty() {
                problems.push(format!("block {block} piece {piece} {why}"));
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

/// The pieces of a block and where each may be: where its record says, else where its group is or moves to.
fn homes(layout: &Layout, block: &NewBlock) -> Vec<(u8, Vec<ServerId>)> {
    let group = &layout.groups[layout.group_of(block.id)];
    let pieces = match layout.scheme {
        // Small blocks are replicated instead.
        Scheme::Ec { data, parity } if !(erasure::Code { data, parity }).applies(block.len) => {
            usize::from(parity) + 1
        }
        scheme => scheme.width(),
    };
    let home = |piece: u8| match block.substitutes.iter().find(|(p, _)| *p == piece) {
        Some((_, server)) => vec![*server],
        None => {
            let at = usize::from(piece);
            let mut homes: Vec<ServerId> = group.target().get(at).copied().into_iter().collect();
            homes.extend(group.servers.get(at).filter(|s| !homes.contains(s)));
            homes
        }
    };
    (0..).take(pieces).map(|piece| (piece, home(piece))).collect()
}

async fn placement(tool: &Tool) -> anyhow::Result<Placement> {
    match tool.ask(Op::Placement).await? {
        Done::Placement(placement) => Ok(placement),
        other => anyhow::bail!("the metadata service answered a request for its placement with {other:?}"),
    }
}

/// Most pieces or blocks in one answer.
const LIST_MAX: u32 = 4096;

/// What all servers hold; with `read` only what can be read from its disk.
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
                // What is damaged counts as missing; if it is needed here, it is asked for once more and named.
                if !read || tool.verify(&server.addr, piece.block, piece.piece).await.is_ok() {
                    held.insert((piece.block, piece.piece, server.id));
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
