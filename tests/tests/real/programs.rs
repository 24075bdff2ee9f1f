//! Real programs on the mount: what people do on the first day.

use std::fs;
use std::path::Path;
use std::process::Command;

use torchfs_tests::{Ground, Rng, run, sh};

/// A folder of files of many sizes, made outside the mount.
fn tree(folder: &Path) {
    let mut rng = Rng::new(20);
    for n in 0..200u64 {
        let below = folder.join(format!("d{}/e{}", n % 7, n % 3));
        fs::create_dir_all(&below).unwrap();
        let len = *rng.pick(&[0, 1, 100, 4096, 65_536, 300_000]);
        fs::write(below.join(format!("f{n}")), rng.bytes(len)).unwrap();
    }
    std::os::unix::fs::symlink("d0/e0", folder.join("link")).unwrap();
    fs::hard_link(folder.join("d0/e0/f0"), folder.join("hard")).unwrap();
    fs::write(folder.join("big"), rng.bytes(12 << 20)).unwrap();
}

const SUMS: &str = "find . -type f -print0 | sort -z | xargs -0 sha256sum";

#[test]
fn git_clones_commits_and_finds_nothing_wrong() {
    let ground = Ground::new();
    let origin = ground.sandbox().folder("origin");
    tree(&origin);
    let git = "git -c user.name=t -c user.email=t@example.org -c init.defaultBranch=main";
    sh(&origin, &format!("{git} init -q && {git} add -A && {git} commit -qm first"));
    sh(ground.root(), &format!("git clone -q --no-local '{}' copy", origin.display()));
    let copy = ground.at("copy");
    sh(&copy, "git fsck --full --strict && test -z \"$(git status --porcelain)\"");
    sh(
        &copy,
        &format!(
            "for i in 1 2 3 4 5; do echo $i > new$i; {git} add -A; {git} commit -qm $i; done; git gc -q; git fsck"
        ),
    );
    assert_eq!(sh(&copy, "git rev-list --count HEAD").trim(), "6");
}

#[test]
fn cargo_builds_and_runs_a_crate() {
    let ground = Ground::new();
    let folder = ground.at("hello");
    fs::create_dir_all(folder.join("src")).unwrap();
    fs::write(
        folder.join("Cargo.toml"),
        "[package]\nname = \"hello\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n",
    )
    .unwrap();
    fs::write(folder.join("src/lib.rs"), "pub fn word() -> &'static str { \"built\" }\n").unwrap();
    fs::write(folder.join("src/main.rs"), "fn main() { println!(\"{} on the mount\", hello::word()); }\n")
        .unwrap();
    let mut cargo = Command::new("cargo");
    // The outer build's settings are not this crate's.
    for (key, _) in std::env::vars_os().filter(|(k, _)| k.to_string_lossy().starts_with("CARGO_")) {
        if key != "CARGO_HOME" {
            cargo.env_remove(key);
        }
    }
    cargo.env_remove("RUSTFLAGS").args(["run", "--offline", "--quiet"]).current_dir(&folder);
    assert_eq!(run(&mut cargo).ok().trim(), "built on the mount");
    // A second build finds nothing to do, so times were kept.
    fs::write(folder.join("src/lib.rs"), "pub fn word() -> &'static str { \"rebuilt\" }\n").unwrap();
    assert_eq!(run(&mut cargo).ok().trim(), "rebuilt on the mount");
}

#[test]
fn sqlite_keeps_its_integrity_in_both_journal_modes() {
    let ground = Ground::new();
    for mode in ["wal", "delete"] {
        let script = format!(
            "PRAGMA journal_mode={mode}; CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB);\n\
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<2000) INSERT INTO t SELECT i, randomblob(500) FROM n;\n\
             BEGIN; UPDATE t SET v=randomblob(300) WHERE id%3=0; COMMIT; DELETE FROM t WHERE id%5=0; VACUUM; PRAGMA integrity_check;"
        );
        fs::write(ground.at("script.sql"), script).unwrap();
        let said = sh(ground.root(), &format!("sqlite3 {mode}.db < script.sql"));
        assert!(said.trim_end().ends_with("ok"), "{mode}: {said}");
        // Four writers at once, each in its own process: the locks hold.
        let four = "for w in 1 2 3 4; do ( for i in $(seq 15); do sqlite3 -cmd '.timeout 60000' DB \
                    \"INSERT INTO t(v) VALUES('w$w-$i')\"; done ) & done; wait; \
                    sqlite3 DB \"SELECT count(*) FROM t WHERE v LIKE 'w%'; PRAGMA integrity_check\"";
        let said = sh(ground.root(), &four.replace("DB", &format!("{mode}.db")));
        assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["60", "ok"], "{mode}");
    }
}

#[test]
fn tar_and_rsync_bring_back_what_they_took() {
    let ground = Ground::new();
    let origin = ground.sandbox().folder("origin");
    tree(&origin);
    let want = sh(&origin, SUMS);
    sh(
        ground.root(),
        &format!("tar -C '{}' -cf all.tar . && mkdir tar && tar -C tar -xpf all.tar", origin.display()),
    );
    assert_eq!(sh(ground.at("tar"), SUMS), want);
    sh(ground.root(), &format!("rsync -aHX '{}/' rsync/", origin.display()));
    assert_eq!(sh(ground.at("rsync"), SUMS), want);
    let again = sh(ground.root(), &format!("rsync -aHX --itemize-changes '{}/' rsync/", origin.display()));
    assert_eq!(again.trim(), "", "a second rsync must find nothing to do");
    let back = ground.sandbox().folder("back");
    sh(ground.root(), &format!("rsync -aHX --checksum rsync/ '{}/'", back.display()));
    assert_eq!(sh(&back, SUMS), want);
    assert_eq!(fs::read_link(back.join("link")).unwrap().to_string_lossy(), "d0/e0");
    assert_eq!(sh(&back, "stat -c %h hard").trim(), "2");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let ground = Ground::new();
    for (name, flags) in [
        ("buffered", "--rw=randwrite --bs=4k --direct=0 --fsync=64"),
        ("direct", "--rw=randwrite --bs=64k --direct=1"),
        ("mapped", "--rw=randwrite --bs=4k --ioengine=mmap"),
    ] {
        sh(
            ground.root(),
            &format!(
                "fio --name={name} --filename={name} --size=8m --io_size=8m --randseed=1 {flags} \
                 --verify=crc32c --do_verify=1 --verify_fatal=1 --minimal"
            ),
        );
    }
}

#[test]
fn shells_and_core_tools_do_their_daily_work() {
    let ground = Ground::new();
    tree(ground.root());
    sh(
        ground.root(),
        "cp -a d0 copy && diff -r d0 copy && mv copy moved && du -s moved >/dev/null && find . | wc -l >/dev/null \
         && chmod -R go-w moved && rm -rf moved && ! test -e moved && dd if=big of=other bs=1M status=none \
         && cmp big other && truncate -s 5M other && test $(stat -c %s other) = 5242880 && split -b 1M big part- \
         && cat part-* | cmp - big && sort -R --random-source=big <(seq 1000) | sort -n | cmp - <(seq 1000)",
    );
}
