//! What a check found, told as it comes: to people the first of each kind and how many more there are, to programs all of it.

use indicatif::ProgressBar;
use serde_json::{Value, json};
use torchfs_proto::BlockId;

use crate::print;

/// Problems, and files of each kind, that people are shown; `--json` has all.
pub const SHOWN: usize = 100;
/// Blocks whose files are looked for; 24 bytes each.
const HURT_MAX: usize = 4_000_000;

/// Problems as they are found, and the blocks that have some.
pub struct Report {
    json: bool,
    bar: ProgressBar,
    /// How many.
    pub problems: u64,
    /// Blocks that lack something.
    pub hurt: Hurt,
}

/// Blocks that lack pieces.
#[derive(Default)]
pub struct Hurt {
    /// In the order of ids; whether the block cannot be read.
    blocks: Vec<(BlockId, bool)>,
    /// Blocks beyond those: their files are not looked for.
    pub more: u64,
}

impl Report {
    /// Nothing is found yet.
    pub fn new(json: bool) -> Report {
        Report { json, bar: ProgressBar::hidden(), problems: 0, hurt: Hurt::default() }
    }

    /// Another part of the check begins; the bar shows how far it is.
    pub fn begin(&mut self, what: &str, total: u64) -> ProgressBar {
        self.bar.finish_and_clear();
        self.bar = print::progress(what, total, self.json);
        self.bar.clone()
    }

    /// Tells of a problem.
    pub fn problem(&mut self, problem: &str) {
        self.problems += 1;
        match self.json {
            true => {
                print!("{}\n    {}", if self.problems == 1 { START } else { "," }, json!(problem));
            }
            false if self.problems <= SHOWN as u64 => self.bar.suspend(|| println!("{problem}")),
            false => {}
        }
    }

    /// All problems are told; files follow.
    pub fn end_problems(&mut self) {
        self.bar.finish_and_clear();
        match self.json {
            true if self.problems == 0 => print!("{START}],"),
            true => print!("\n  ],"),
            false => more(self.problems, "problems"),
        }
    }

    /// The last thing of the object that was begun with the first problem.
    pub fn end_json(&self, rest: &Value) {
        let text = format!("{rest:#}");
        println!("{}", text.trim_start_matches(['{', '\n']));
    }
}

/// How the object for programs begins.
const START: &str = "{\n  \"problems\": [";

/// Says that not all are shown.
pub fn more(all: u64, what: &str) {
    if let Some(more) = all.checked_sub(SHOWN as u64).filter(|more| *more > 0) {
        println!("… and {} more {what}; --json has all", print::count(more));
    }
}

impl Hurt {
    /// A block lacks pieces; ids come in their order.
    pub fn add(&mut self, block: BlockId, unreadable: bool) {
        match self.blocks.len() < HURT_MAX {
            true => self.blocks.push((block, unreadable)),
            false => self.more += 1,
        }
    }

    /// Whether the block lacks pieces, and if so, whether it cannot be read.
    pub fn find(&self, block: BlockId) -> Option<bool> {
        let at = self.blocks.binary_search_by_key(&block, |(id, _)| *id).ok()?;
        self.blocks.get(at).map(|(_, unreadable)| *unreadable)
    }

    /// Whether all blocks are whole.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
