//! Whole suites and random search on mounts: pjdfstest, fsx, and the model.
//!
//! # Invariants
//! What is skipped is named here and in docs/semantics.md, with its reason; a test that is skipped for another reason fails.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use torchfs_tests::shell::run_for;
use torchfs_tests::{Cluster, Ground, Sandbox, count, model, seed, tool};

/// `erofs` remounts the file system read-only, which needs a block device; ext4 skips those too. `link_count_max` asks the C
/// library for the limit of links, which it knows for no FUSE file system.
const SKIPPED: &[&str] = &[
    "link::link_count_max",
    "chmod::erofs_named",
    "chown::erofs_named",
    "chown::lchown::erofs_named",
    "link::erofs_named",
    "mkdir::erofs_new_file",
    "mkfifo::erofs_new_file",
    "open::erofs_named",
    "open::erofs_new_file",
    "rename::erofs_named",
    "rmdir::erofs_named",
    "symlink::erofs_new_file",
    "truncate::erofs_named",
    "unlink::erofs_named",
];

const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

#[test]
fn pjdfstest_passes_as_on_ext4() {
    let ground = Ground::new();
    pjdfstest(ground.sandbox(), ground.root(), &[], 383);
}

/// Runs the tests whose names contain one of these words, or all; at least so many must pass.
pub fn pjdfstest(sandbox: &Sandbox, root: &Path, words: &[&str], least: usize) {
    sandbox.allow(Duration::from_secs(900));
    let config = sandbox.path("pjdfstest.toml");
    std::fs::write(&config, PJDFSTEST).unwrap();
    let other = sandbox.folder("another-file-system");
    let mut command = Command::new(tool("pjdfstest"));
    command.arg("-c").arg(&config).arg("-p").arg(root).args(words).env("NO_COLOR", "1");
    if std::env::var_os("TORCHFS_TEST_ON").is_none() {
        command.arg("-s").arg(&other);
    }
    let ran = run_for(Duration::from_secs(800), &mut command);
    let failed: Vec<&str> = ran.out.lines().filter(|l| l.trim_end().ends_with("FAILED")).collect();
    assert!(failed.is_empty(), "{} failed: {failed:#?}\n{}", failed.len(), ran.out);
    let skipped: Vec<&str> = ran
        .out
        .lines()
        .filter(|l| l.trim_end().ends_with("skipped"))
        .filter_map(|l| l.split_whitespace().next())
        .filter(|name| !SKIPPED.contains(name) && !name.ends_with("exdev_target"))
        .collect();
    assert!(skipped.is_empty(), "skipped without a reason in the list: {skipped:?}");
    let passed = ran.out.lines().filter(|l| l.trim_end().ends_with(" ok")).count();
    assert!(passed >= least, "{passed} passed, {least} do on ext4\n{}", ran.out);
    ran.ok();
}

/// Files larger than a block, every operation that fsx knows.
const FSX: &str = "
flen = 6291456
[opsize]
min = 1
max = 131072
[weights]
close_open = 1
read = 12
write = 12
mapread = 6
mapwrite = 2
invalidate = 1
truncate = 2
fsync = 0.1
fdatasync = 0.1
posix_fallocate = 1
punch_hole = 4
sendfile = 2
posix_fadvise = 1
copy_file_range = 4
";

/// Operations of one run of fsx, which keeps a mapping of each read that it makes through one; a process may have 65,530.
const FSX_RUN: u64 = 100_000;

/// Runs fsx on a file, as often as it takes for so many operations.
pub fn fsx(sandbox: &Sandbox, file: &Path, seed: u64, operations: u64) {
    let runs = operations.div_ceil(FSX_RUN);
    for run in 0..runs {
        let left = operations - run * FSX_RUN;
        fsx_once(sandbox, file, seed.wrapping_add(run), left.min(FSX_RUN));
    }
}

/// One run; what it says on failure names the operation and the bytes.
fn fsx_once(sandbox: &Sandbox, file: &Path, seed: u64, operations: u64) {
    let name = format!("fsx-{}", file.file_name().unwrap().to_string_lossy());
    let config = sandbox.path(&format!("{name}.toml"));
    std::fs::write(&config, FSX).unwrap();
    let artifacts = sandbox.folder(&name);
    let mut command = Command::new(tool("fsx"));
    command.arg("-f").arg(config).arg("-P").arg(artifacts);
    command.args(["-N", &operations.to_string(), "-S", &(seed % 1_000_000).to_string()]).arg(file);
    let limit = Duration::from_secs(if torchfs_tests::soak() { 20_000 } else { 1_500 });
    sandbox.allow(limit);
    run_for(limit, &mut command).ok();
}

#[test]
fn fsx_finds_nothing() {
    let ground = Ground::new();
    fsx(ground.sandbox(), &ground.at("f"), seed(10), count(50_000, 1_000_000));
}

#[test]
fn two_fsx_at_once_on_two_mounts_find_nothing() {
    let cluster = Cluster::start();
    let mounts = [cluster.mount(), cluster.mount()];
    let operations = count(5_000, 100_000);
    let base = seed(11);
    std::thread::scope(|scope| {
        for (number, mount) in mounts.iter().enumerate() {
            let sandbox = cluster.sandbox();
            scope.spawn(move || {
                fsx(sandbox, &mount.at(&format!("f{number}")), base + number as u64, operations)
            });
        }
    });
    // What one wrote, the other reads.
    for (writer, reader) in [(0, 1), (1, 0)] {
        let name = format!("f{writer}");
        let (one, two) = (std::fs::read(mounts[writer].at(&name)), std::fs::read(mounts[reader].at(&name)));
        assert!(one.unwrap() == two.unwrap(), "the mounts differ in {name}");
    }
}

#[test]
fn random_operations_agree_with_the_model_on_one_mount() {
    let ground = Ground::new();
    let base = seed(12);
    for round in 0..count(8, 200) {
        model::check(&[ground.root().to_owned()], base + round, 300);
    }
}

#[test]
fn random_operations_agree_with_the_model_on_two_mounts() {
    let cluster = Cluster::start();
    let (one, two) = (cluster.mount(), cluster.mount());
    let base = seed(13);
    for round in 0..count(8, 200) {
        model::check(&[one.path().to_owned(), two.path().to_owned()], base + round, 200);
    }
}
