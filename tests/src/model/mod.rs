//! Random operations against an in-memory reference file system, shrunk to the few that matter when they differ.
//!
//! The idea: [`Reference`] is the obvious implementation of POSIX names and bytes, [`real::Real`] does the same with system
//! calls below a folder. After every operation both must have said the same; at the end both trees must be the same
//! through every mount. A difference is shrunk by leaving operations out, in fresh folders, and printed with its seed.
//!
//! # Invariants
//! The reference is checked against a local file system in this crate's unit tests, so that a difference on the product
//! is the product's.

mod ops;
mod real;
mod reference;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub use ops::{Generator, Op};
pub use real::Real;
pub use reference::Reference;

use crate::rng::Rng;

/// What an operation says: a value or an errno.
pub type Said = Result<Value, i32>;

/// What an operation may give.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// It worked.
    Done,
    /// Bytes read.
    Bytes(Vec<u8>),
    /// Names with their kinds, sorted.
    Names(Vec<(String, char)>),
    /// A symlink's target.
    Text(String),
    /// How much was copied.
    Count(u64),
    /// Attributes; `links` and `size` are 0 for folders, where file systems differ.
    Stat {
        /// `f`, `d` or `l`.
        kind: char,
        /// Size in bytes.
        size: u64,
        /// Names of the inode.
        links: u64,
        /// Permission bits.
        mode: u32,
    },
}

/// Runs `count` random operations over the given mounts of one volume; panics with the shrunk sequence if they differ
/// from the reference.
pub fn check(mounts: &[PathBuf], seed: u64, count: u64) {
    let mut rng = Rng::new(seed);
    // Open handles on two mounts would see each other's writes only after a recall; close-to-open is what is promised.
    let mut generator = Generator::new(mounts.len() == 1);
    let ops: Vec<(usize, Op)> =
        (0..count).map(|_| (rng.below(mounts.len() as u64) as usize, generator.next(&mut rng))).collect();
    let Some(difference) = compare(mounts, &ops) else { return };
    let (ops, difference) = shrink(ops, difference, |ops| compare(mounts, ops));
    let mut text = String::new();
    for (mount, op) in &ops {
        writeln!(text, "  mount {mount}: {op:?}").expect("a string takes text");
    }
    panic!("seed {seed}: the file system differs from the reference after\n{text}{difference}");
}

/// Runs the operations in a fresh folder; gives the first difference.
fn compare(mounts: &[PathBuf], ops: &[(usize, Op)]) -> Option<Difference> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("model-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    std::fs::create_dir(mounts[0].join(&name)).expect("a mounted volume takes folders");
    let mut reals: Vec<Real> = mounts.iter().map(|m| Real::new(m.join(&name))).collect();
    let mut reference = Reference::default();
    let mut difference = None;
    for (at, (mount, op)) in ops.iter().enumerate() {
        let want = reference.apply(op);
        let got = reals[*mount].apply(op);
        if want != got {
            difference =
                Some(Difference { at, text: format!("wanted {}\n   got {}", brief(&want), brief(&got)) });
            break;
        }
    }
    drop(reals);
    if difference.is_none() {
        let want = reference.tree();
        for (number, mount) in mounts.iter().enumerate() {
            let got = tree(&mount.join(&name));
            if want != got {
                let text = format!("at the end, through mount {number}:\nwanted {want:#?}\n   got {got:#?}");
                difference = Some(Difference { at: ops.len().saturating_sub(1), text });
                break;
            }
        }
    }
    std::fs::remove_dir_all(mounts[0].join(&name)).expect("what was made can be removed");
    difference
}

struct Difference {
    at: usize,
    text: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Leaves out ever smaller runs of operations as long as some difference remains.
fn shrink(
    mut ops: Vec<(usize, Op)>,
    mut difference: Difference,
    compare: impl Fn(&[(usize, Op)]) -> Option<Difference>,
) -> (Vec<(usize, Op)>, Difference) {
    ops.truncate(difference.at + 1);
    let mut tries = 300;
    let mut size = ops.len() / 2;
    while size > 0 && tries > 0 {
        let mut from = 0;
        while from < ops.len() && tries > 0 {
            let mut fewer = ops.clone();
            fewer.drain(from..(from + size).min(ops.len()));
            tries -= 1;
            match compare(&fewer) {
                Some(found) => {
                    fewer.truncate(found.at + 1);
                    (ops, difference) = (fewer, found);
                }
                None => from += size,
            }
        }
        size /= 2;
    }
    (ops, difference)
}

/// Every path below a folder with its kind, and what tells contents apart.
fn tree(root: &Path) -> Vec<(String, String)> {
    fn walk(folder: &Path, prefix: &str, out: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).expect("a folder can be read") {
            let entry = entry.expect("a folder can be read");
            let name = format!("{prefix}/{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type().expect("an entry has a kind");
            if kind.is_dir() {
                out.push((name.clone(), "folder".into()));
                walk(&entry.path(), &name, out);
            } else if kind.is_symlink() {
                let target = std::fs::read_link(entry.path()).expect("a symlink can be read");
                out.push((name, format!("link to {}", target.display())));
            } else {
                out.push((name, digest(&std::fs::read(entry.path()).expect("a file can be read"))));
            }
        }
    }
    let mut out = vec![];
    walk(root, "", &mut out);
    out.sort();
    out
}

/// What tells two contents apart in a printed tree.
fn digest(bytes: &[u8]) -> String {
    let sum =
        bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    format!("{} bytes {sum:016x}", bytes.len())
}

fn brief(said: &Said) -> String {
    match said {
        Ok(Value::Bytes(bytes)) => {
            let first = bytes.iter().position(|b| *b != 0);
            format!("{} (first byte that is not zero: {first:?})", digest(bytes))
        }
        Err(errno) => format!("{}", std::io::Error::from_raw_os_error(*errno)),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_agrees_with_a_local_file_system() {
        let folder = folder();
        for seed in 0..30 {
            check(&[folder.path().to_owned()], seed, 400);
        }
    }

    #[test]
    fn two_paths_to_one_local_folder_agree_too() {
        let folder = folder();
        for seed in 0..10 {
            check(&[folder.path().to_owned(), folder.path().to_owned()], seed, 400);
        }
    }

    #[test]
    fn a_difference_is_shrunk_to_the_operations_that_matter() {
        let mut generator = Generator::new(true);
        let mut rng = Rng::new(1);
        let mut ops: Vec<(usize, Op)> = (0..200).map(|_| (0, generator.next(&mut rng))).collect();
        let (one, two) = (Op::Mkdir { path: "x".into() }, Op::Rmdir { path: "x".into() });
        ops.insert(50, (0, one.clone()));
        ops.insert(150, (0, two.clone()));
        // A file system that goes wrong when `x` is removed after it was made.
        let wrong = |ops: &[(usize, Op)]| {
            let made = ops.iter().position(|(_, op)| *op == one)?;
            let at = made + ops[made..].iter().position(|(_, op)| *op == two)?;
            Some(Difference { at, text: "wrong".into() })
        };
        let first = wrong(&ops).unwrap();
        let (ops, _) = shrink(ops, first, wrong);
        assert_eq!(ops, [(0, one), (0, two)]);
    }

    /// Beside the executable: the temporary folder may be a file system that lacks half of the operations.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
    }
}
