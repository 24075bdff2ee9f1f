//! The operations of the model, and their random generation.

use crate::rng::Rng;

/// One operation. Paths are relative to the folder of the run.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the fields are the arguments of the call of that name
pub enum Op {
    Create { path: String, mode: u32 },
    Write { path: String, at: u64, len: u64, fill: u8 },
    Append { path: String, len: u64, fill: u8 },
    Truncate { path: String, len: u64 },
    Read { path: String },
    Punch { path: String, at: u64, len: u64 },
    Allocate { path: String, at: u64, len: u64, keep: bool },
    ZeroRange { path: String, at: u64, len: u64 },
    Copy { from: String, at: u64, to: String, to_at: u64, len: u64 },
    Mkdir { path: String },
    Rmdir { path: String },
    Unlink { path: String },
    Rename { from: String, to: String, flags: u32 },
    Link { from: String, to: String },
    Symlink { path: String },
    Readlink { path: String },
    List { path: String },
    Stat { path: String },
    Chmod { path: String, mode: u32 },
    SetXattr { path: String, name: String, value: Vec<u8> },
    GetXattr { path: String, name: String },
    RemoveXattr { path: String, name: String },
    ListXattrs { path: String },
    Open { slot: usize, path: String },
    WriteOpen { slot: usize, at: u64, len: u64, fill: u8 },
    ReadOpen { slot: usize },
    TruncateOpen { slot: usize, len: u64 },
    SyncOpen { slot: usize },
    Close { slot: usize },
}

/// How many files may be open at once.
pub const SLOTS: usize = 3;

/// Draws operations; few names, so that they meet.
#[derive(Debug)]
pub struct Generator {
    handles: bool,
}

impl Generator {
    /// With or without operations on open handles.
    pub fn new(handles: bool) -> Generator {
        Generator { handles }
    }

    /// The next operation.
    #[allow(clippy::should_implement_trait)] // it draws from the given numbers
    pub fn next(&mut self, rng: &mut Rng) -> Op {
        let kinds = if self.handles { 62 } else { 48 };
        let p = path(rng);
        match rng.below(kinds) {
            0..=4 => Op::Create { path: p, mode: *rng.pick(&[0o644, 0o600, 0o755]) },
            5..=10 => Op::Write { path: p, at: offset(rng), len: length(rng), fill: fill(rng) },
            11..=12 => Op::Append { path: p, len: length(rng), fill: fill(rng) },
            13..=14 => Op::Truncate { path: p, len: offset(rng) },
            15..=18 => Op::Read { path: p },
            19 => Op::Punch { path: p, at: offset(rng), len: length(rng).max(1) },
            20 => Op::Allocate { path: p, at: offset(rng), len: length(rng).max(1), keep: rng.chance(1, 2) },
            21 => Op::ZeroRange { path: p, at: offset(rng), len: length(rng).max(1) },
            22..=23 => {
                Op::Copy { from: p, at: offset(rng), to: path(rng), to_at: offset(rng), len: length(rng) }
            }
            24..=27 => Op::Mkdir { path: p },
            28..=29 => Op::Rmdir { path: p },
            30..=32 => Op::Unlink { path: p },
            33..=36 => {
                let flags = *rng.pick(&[0, 0, libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE]);
                Op::Rename { from: p, to: path(rng), flags }
            }
            37 => Op::Link { from: p, to: path(rng) },
            38 => Op::Symlink { path: p },
            39 => Op::Readlink { path: p },
            40..=41 => Op::List { path: p },
            42..=43 => Op::Stat { path: p },
            44 => Op::Chmod { path: p, mode: *rng.pick(&[0o640, 0o700, 0o755, 0o777]) },
            45 => {
                let value_len = rng.below(40) as usize;
                Op::SetXattr { path: p, name: xattr(rng), value: rng.bytes(value_len) }
            }
            46 => Op::GetXattr { path: p, name: xattr(rng) },
            47 if rng.chance(1, 2) => Op::RemoveXattr { path: p, name: xattr(rng) },
            47 => Op::ListXattrs { path: p },
            48..=51 => Op::Open { slot: slot(rng), path: p },
            52..=55 => Op::WriteOpen { slot: slot(rng), at: offset(rng), len: length(rng), fill: fill(rng) },
            56..=57 => Op::ReadOpen { slot: slot(rng) },
            58 => Op::TruncateOpen { slot: slot(rng), len: offset(rng) },
            59 => Op::SyncOpen { slot: slot(rng) },
            _ => Op::Close { slot: slot(rng) },
        }
    }
}

fn path(rng: &mut Rng) -> String {
    let depth = *rng.pick(&[1, 1, 1, 2, 2, 3]);
    (0..depth).map(|_| *rng.pick(&["a", "b", "c", "d"])).collect::<Vec<_>>().join("/")
}

/// Small numbers mostly; sometimes around the sizes where pages, chunks and blocks end.
fn offset(rng: &mut Rng) -> u64 {
    match rng.below(8) {
        0..=3 => rng.below(9000),
        4..=5 => rng.below(200_000),
        6 => rng.pick(&[4096u64, 65_536, 131_072]) + rng.below(3) - 1,
        _ => *rng.pick(&[0, 4096, 65_536]),
    }
}

fn length(rng: &mut Rng) -> u64 {
    match rng.below(6) {
        0..=2 => rng.below(5000),
        3..=4 => rng.below(70_000),
        _ => *rng.pick(&[0, 1, 4096, 65_536]),
    }
}

fn fill(rng: &mut Rng) -> u8 {
    rng.range(1, 256) as u8
}

fn xattr(rng: &mut Rng) -> String {
    (*rng.pick(&["user.one", "user.two"])).into()
}

fn slot(rng: &mut Rng) -> usize {
    rng.below(SLOTS as u64) as usize
}
