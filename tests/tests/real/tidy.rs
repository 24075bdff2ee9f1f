//! The house itself: allowed edges between crates, headers, sizes, and documents that name tests which exist.
//!
//! No process is started here; these tests read the tree.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Which of our crates each crate may use. Dependencies point down only; `cli` may use all.
const EDGES: &[(&str, &[&str])] = &[
    ("fuzz", &[]),
    ("proto", &[]),
    ("disk", &["proto"]),
    ("codec", &["proto"]),
    ("rpc", &["proto"]),
    ("engine", &["proto", "disk"]),
    ("client", &["proto", "rpc", "codec"]),
    ("cache", &["proto", "codec"]),
    ("vfs", &["proto", "codec", "client", "cache"]),
    ("control", &["proto"]),
    ("meta", &["proto", "engine", "client", "rpc"]),
    ("block", &["proto", "disk", "codec", "client", "rpc"]),
    ("agent", &["proto", "vfs", "rpc", "control"]),
    ("supervisor", &[]),
    (
        "cli",
        &[
            "proto",
            "disk",
            "codec",
            "rpc",
            "engine",
            "client",
            "cache",
            "vfs",
            "control",
            "meta",
            "block",
            "agent",
            "supervisor",
        ],
    ),
];

/// Crates that may use tokio anywhere; elsewhere it is for files called `server.rs`.
const ASYNC: &[&str] = &["rpc", "client", "agent", "cli"];

/// Files elsewhere that may: repair waits for other data servers and for its rate; the engine speaks to its database through a crate that knows no other way, behind a
/// synchronous face.
const ASYNC_FILES: &[&str] =
    &["block/src/repair.rs", "engine/src/postgres/session.rs", "engine/src/postgres/tls.rs"];

/// Outside crates that have one home.
const HOMES: &[(&str, &str)] = &[("fuser", "agent"), ("pyo3", "python"), ("clap", "cli"), ("anyhow", "cli")];

const LINES_MAX: usize = 900;

#[test]
fn crates_use_only_the_crates_below_them() {
    let allowed: BTreeMap<_, _> = EDGES.iter().copied().collect();
    for (name, manifest) in manifests() {
        let allowed = allowed.get(name.as_str()).unwrap_or_else(|| {
            panic!("crate {name} has no row in the table of edges (and `common`, `utils`, `core` get none)")
        });
        for dependency in dependencies(&manifest) {
            if let Some(ours) = dependency.strip_prefix("torchfs-") {
                assert!(allowed.contains(&ours), "{name} may not use {ours}: dependencies point down only");
            }
            for (outside, home) in HOMES {
                assert!(
                    dependency != *outside || name == *home,
                    "{outside} appears only in {home}, not in {name}"
                );
            }
        }
    }
}

#[test]
fn tokio_stays_where_it_is_allowed() {
    for file in sources() {
        let crate_name = crate_of(&file);
        if ASYNC.contains(&crate_name.as_str())
            || file.ends_with("server.rs")
            || ASYNC_FILES.iter().any(|allowed| file.ends_with(allowed))
        {
            continue;
        }
        let text = read(&file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let uses = code.lines().find(|l| l.contains("tokio::") && !l.trim_start().starts_with("//"));
        assert!(uses.is_none(), "{} uses tokio: {}", file.display(), uses.unwrap_or_default().trim());
    }
}

#[test]
fn each_source_file_says_what_it_is_and_fits_a_head() {
    for file in rust_files() {
        let text = read(&file);
        assert!(text.starts_with("//!"), "{} does not open with `//!`", file.display());
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{} has {lines} lines, more than {LINES_MAX}", file.display());
    }
}

#[test]
fn nothing_is_left_unfinished() {
    // In pieces, so that this file does not find itself.
    let marks = [
        concat!("todo", "!("),
        concat!("unimplement", "ed!("),
        concat!("FIX", "ME"),
        concat!("#[ign", "ore"),
    ];
    for file in rust_files() {
        let text = read(&file);
        for mark in marks {
            assert!(!text.contains(mark), "{} contains {mark}", file.display());
        }
    }
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    let folders = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    for file in texts() {
        let text = read(&file);
        for folder in folders {
            for (at, _) in text.match_indices(folder) {
                let next = text[at + folder.len()..].chars().next().unwrap_or(' ');
                assert!(
                    !next.is_ascii_lowercase() && next != '.',
                    "{} names {folder}{next}…",
                    file.display()
                );
            }
        }
    }
}

#[test]
fn every_promise_in_semantics_names_a_test_that_exists() {
    let text = read(&top().join("docs/semantics.md"));
    let mut items: Vec<String> = vec![];
    for line in text.lines() {
        if line.starts_with("- ") {
            items.push(line.to_owned());
        } else if line.starts_with("  ")
            && let Some(item) = items.last_mut()
        {
            item.push_str(line);
        }
    }
    assert!(items.len() > 20, "docs/semantics.md has only {} promises", items.len());
    for item in items {
        let named: Vec<&str> = item.split('`').skip(1).step_by(2).filter(|c| is_test_name(c)).collect();
        assert!(!named.is_empty(), "this promise names no test: {item}");
        for name in named {
            assert!(test_exists(name), "the test `{name}` does not exist, but is named by: {item}");
        }
    }
}

#[test]
fn the_map_names_what_is_there() {
    let text = read(&top().join("ARCHITECTURE.md"));
    let named =
        text.split('`').skip(1).step_by(2).filter(|word| word.contains("/src/") || word.contains("/tests/"));
    for path in named {
        let there = top().join(path).exists() || top().join("crates").join(path).exists();
        assert!(there, "ARCHITECTURE.md names `{path}`, which does not exist");
    }
}

#[test]
fn ci_runs_what_a_developer_runs() {
    let script = read(&top().join(".ci/run"));
    assert!(script.contains("exec make test"), "CI must call exactly `make test`");
}

fn is_test_name(code: &str) -> bool {
    code.split_once("::").is_some_and(|(module, name)| {
        let word = |w: &str| {
            !w.is_empty() && w.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        word(module) && word(name)
    })
}

fn test_exists(name: &str) -> bool {
    let Some((module, function)) = name.split_once("::") else { return false };
    let file = top().join(format!("tests/tests/real/{module}.rs"));
    file.exists() && read(&file).contains(&format!("#[test]\nfn {function}()"))
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

fn manifests() -> Vec<(String, String)> {
    let folder = top().join("crates");
    let mut found: Vec<_> = std::fs::read_dir(&folder)
        .expect("crates/ exists")
        .flatten()
        .filter(|e| e.path().join("Cargo.toml").exists())
        .map(|e| (e.file_name().to_string_lossy().into_owned(), read(&e.path().join("Cargo.toml"))))
        .collect();
    found.sort();
    found
}

/// The names under `[dependencies]`; what tests use is their own affair.
fn dependencies(manifest: &str) -> Vec<String> {
    manifest
        .split("\n[")
        .find_map(|section| section.strip_prefix("dependencies]"))
        .unwrap_or_default()
        .lines()
        .filter_map(|l| l.split(['.', '=', ' ']).next())
        .filter(|n| !n.is_empty() && !n.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

fn crate_of(file: &Path) -> String {
    let below = file.strip_prefix(top().join("crates")).expect("a source of a crate");
    below.components().next().expect("not empty").as_os_str().to_string_lossy().into_owned()
}

/// The sources of the product: `crates/*/src`.
fn sources() -> Vec<PathBuf> {
    let inside = |p: &PathBuf| {
        p.strip_prefix(top().join("crates")).is_ok_and(|b| b.iter().nth(1).is_some_and(|d| d == "src"))
    };
    rust_files().into_iter().filter(inside).collect()
}

fn rust_files() -> Vec<PathBuf> {
    texts().into_iter().filter(|p| p.extension().is_some_and(|e| e == "rs")).collect()
}

/// Every file of ours that a person reads.
fn texts() -> Vec<PathBuf> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("the tree can be read").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = entry.path();
            let kind = entry.file_type().expect("an entry has a kind");
            if kind.is_dir() {
                if !["target", ".git", "data", "results", "__pycache__"].contains(&name.as_str()) {
                    walk(&path, out);
                }
            } else if kind.is_file()
                && ![".git", "Cargo.lock"].contains(&name.as_str())
                && std::fs::read_to_string(&path).is_ok()
            {
                out.push(path);
            }
        }
    }
    let mut out = vec![];
    walk(&top(), &mut out);
    out.sort();
    out
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()))
}
