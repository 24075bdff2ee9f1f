//! `torchfs meta dump`: the whole metadata in one file.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use serde_json::json;
use torchfs_engine::dump::{self, Header, Trailer};
use torchfs_proto::attr::Raw;
use torchfs_proto::clock::{Clock, SystemClock};
use torchfs_proto::msg::meta::{Done, Op};

use crate::connect::Connect;
use crate::{print, roles};

/// Write the whole metadata into a file, while the cluster goes on working
///
/// The file is the state after one batch of the log, and is checked before it gets its name. It
/// holds names, attributes and where blocks lie, not the blocks. `torchfs meta load` fills any
/// engine from it.
///
///   torchfs meta dump /backup/meta.dump
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The file to write, readable by its owner alone; one of that name is replaced when the new one is complete
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Dump the metadata in this folder, whose service is stopped, instead of a running one's
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    #[command(flatten)]
    connect: Connect,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Writes beside the file, checks, and renames.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let target = find_target(&args.file)?;
    let mut part = target.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let made = match &args.dir {
        Some(dir) => dump_folder(dir, &part, args.json),
        None => dump_service(&args, &part),
    };
    let done = made.and_then(|()| complete(&part, &target, args.json));
    let (header, trailer, bytes) = match done {
        Ok(done) => done,
        Err(error) => {
            // Half a dump is worth nothing; it may not even be there.
            let _ = std::fs::remove_file(&part);
            return Err(error);
        }
    };
    if args.json {
        println!(
            "{:#}",
            json!({
                "file": args.file,
                "bytes": bytes,
                "changes": trailer.changes,
                "batch": trailer.seq.0,
                "cluster": format!("{:016x}", header.cluster.0),
                "incarnation": header.incarnation.0,
                "seconds": started.elapsed().as_secs_f64(),
            })
        );
    } else {
        println!(
            "{}: {} records in {}, as of batch {}",
            args.file.display(),
            print::count(trailer.changes),
            print::size(bytes),
            trailer.seq
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The file that is to be replaced: links are followed, and what is no plain file is refused, since a rename would put a
/// file in the place of a device.
fn find_target(file: &Path) -> anyhow::Result<PathBuf> {
    const LINKS_MAX: usize = 40;
    if file == Path::new("-") {
        bail!(
            "a dump is read back and checked before it counts, which cannot be done on a pipe; give the name of a file"
        );
    }
    let mut target = file.to_path_buf();
    for _ in 0..LINKS_MAX {
        let Ok(next) = std::fs::read_link(&target) else { break };
        target = target.parent().unwrap_or(Path::new("")).join(next);
    }
    match std::fs::symlink_metadata(&target) {
        Ok(found) if found.is_dir() => {
            bail!(
                "{} is a folder; give the name of a file in it: {}/meta.dump",
                file.display(),
                file.display()
            )
        }
        Ok(found) if !found.is_file() => {
            bail!(
                "{} is not a plain file, and a dump would take its place; give the name of a file",
                file.display()
            )
        }
        _ => Ok(target),
    }
}

/// Fetches a dump from the running service.
fn dump_service(args: &Args, part: &Path) -> anyhow::Result<()> {
    let found = args.connect.find()?;
    let mut file = create(part)?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        let bar = print::progress("metadata", 0, args.json);
        let mut cursor = Raw::from(Vec::new());
        loop {
            let done = tool.ask(Op::Dump { cursor }).await?;
            let Done::Dumped { bytes, cursor: next, pairs, total } = done else {
                bail!("the metadata service answered a dump with {done:?}");
            };
            file.write_all(&bytes).with_context(|| format!("cannot write {}", part.display()))?;
            bar.set_length(total);
            bar.set_position(pairs);
            if next.is_empty() {
                bar.finish_and_clear();
                return Ok(());
            }
            cursor = next;
        }
    })
}

/// Dumps a folder that no service has open.
fn dump_folder(dir: &Path, part: &Path, quiet: bool) -> anyhow::Result<()> {
    if !dir.join("engine.id").exists() {
        bail!("{} holds no metadata; give the --dir of a stopped `torchfs meta`", dir.display());
    }
    let engine = torchfs_engine::Embedded::open(dir, torchfs_engine::Config::default())?;
    let mut file = create(part)?;
    let stats = torchfs_engine::Engine::stats(&engine);
    let bar = print::progress("metadata", stats.replica_keys + stats.overlay_keys, quiet);
    dump::store(&engine, SystemClock.wall_ns(), &mut file, |pairs| bar.set_position(pairs))?;
    bar.finish_and_clear();
    Ok(())
}

fn create(path: &Path) -> anyhow::Result<File> {
    torchfs_disk::create_private(path)
        .with_context(|| format!("cannot write {}; choose another file", path.display()))
}

/// Reads back what was written, and gives it its name when it is durable and right.
fn complete(part: &Path, file: &Path, quiet: bool) -> anyhow::Result<(Header, Trailer, u64)> {
    let written = File::open(part)?;
    written.sync_all().with_context(|| format!("cannot sync {}", part.display()))?;
    let bytes = written.metadata()?.len();
    let bar = print::progress("checking", bytes, quiet);
    let reader = std::io::BufReader::with_capacity(1 << 20, written);
    let (header, trailer) = dump::check(reader, |done| bar.set_position(done))?;
    bar.finish_and_clear();
    let named = || -> std::io::Result<()> {
        std::fs::rename(part, file)?;
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    };
    named().with_context(|| format!("cannot name {}", file.display()))?;
    Ok((header, trailer, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_replaces_files_and_what_links_lead_to_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "").expect("written");
        for (link, to) in [("one", "file"), ("two", "one"), ("open", "not-yet"), ("device", "/dev/null")] {
            std::os::unix::fs::symlink(to, at(link)).expect("linked");
        }
        std::os::unix::fs::symlink("round", at("round")).expect("linked");
        for (name, target) in [("file", "file"), ("two", "file"), ("open", "not-yet"), ("fresh", "fresh")] {
            assert_eq!(find_target(&at(name)).expect("a file"), at(target));
        }
        for refused in [at("device"), at("round"), at(""), "/dev/full".into(), "-".into()] {
            let words = find_target(&refused).expect_err("no file").to_string();
            assert!(words.contains("give the name of a file"), "{words}");
        }
    }
}
