//! `torchfs meta load`: fills an empty engine from a dump.

use std::fs::File;
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;
use torchfs_engine::postgres::Standby;
use torchfs_engine::{Embedded, dump};
use torchfs_meta::dumps::restore::{self, Loaded};
use torchfs_proto::Incarnation;
use torchfs_proto::clock::{Clock, SystemClock};

use crate::print;
use crate::roles::DatabaseOptions;

/// An empty database is taken over after a lease term; one that somebody leads is not.
const LEAD_MAX: Duration = Duration::from_secs(30);

/// Fill an empty folder, or an empty database, with the metadata of a dump
///
/// What happened after the dump is lost: stop the old service first, and never start it again.
/// All sessions end, so every client mounts again. When the service runs on the new folder it
/// has the data servers forget what was written after the dump; `torchfs fsck` names what was
/// deleted since.
///
///   torchfs meta load /backup/meta.dump --dir /var/lib/torchfs/meta
///
/// With --engine the metadata goes into the database, and the folder is the replica of the
/// server that will run there.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The dump
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// The folder to fill; empty or missing
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,

    #[command(flatten)]
    database: DatabaseOptions,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks the dump, then loads it.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let loaded = load(&args.file, &args.dir, &args.database, Incarnation(0), args.json)?;
    if args.json {
        println!("{:#}", report(&loaded, &args.dir));
    } else {
        println!("{}", told(&loaded, &args.dir, &args.database));
    }
    Ok(ExitCode::SUCCESS)
}

/// Fills a folder or a database; `known` is the highest incarnation that anybody knows of.
pub fn load(
    file: &Path,
    dir: &Path,
    database: &DatabaseOptions,
    known: Incarnation,
    quiet: bool,
) -> anyhow::Result<Loaded> {
    check_empty(dir)?;
    crate::roles::make_dir(dir)?;
    let open = || -> anyhow::Result<BufReader<File>> {
        let file = File::open(file)
            .with_context(|| format!("cannot read {}; give the file of a dump", file.display()))?;
        Ok(BufReader::with_capacity(1 << 20, file))
    };
    let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
    // Twice over the file: nothing is filled from a dump that is not whole.
    let bar = print::progress("checking", bytes, quiet);
    let (header, trailer) = dump::check(open()?, |done| bar.set_position(done))?;
    bar.finish_and_clear();
    let wall_ns = SystemClock.wall_ns();
    let floor = restore::floor(&header, &trailer, known, wall_ns)?;
    let config = torchfs_engine::Config {
        cluster: Some(header.cluster),
        floor: Some(floor),
        ..torchfs_engine::Config::default()
    };
    let engine = match &database.engine {
        None => Embedded::open(dir, config)?,
        Some(_) => open_database(dir, database, config)?,
    };
    let bar = print::progress("loading", bytes, quiet);
    let loaded = restore::load(&engine, open()?, wall_ns, |done| bar.set_position(done))?;
    engine.checkpoint()?;
    bar.finish_and_clear();
    Ok(loaded)
}

/// Opens an empty database as its leader.
fn open_database(
    dir: &Path,
    database: &DatabaseOptions,
    config: torchfs_engine::Config,
) -> anyhow::Result<Embedded> {
    let standby = Standby::open(dir, database.config("torchfs meta load", config)?)?;
    let patience = Instant::now() + LEAD_MAX;
    let engine = standby.run(&mut |_| match Instant::now() < patience {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    })?;
    engine.context("a metadata server leads this database; stop it, and load into an empty database")
}

/// Refuses a folder that holds metadata.
pub fn check_empty(dir: &Path) -> anyhow::Result<()> {
    if dir.join("engine.id").exists() {
        bail!(
            "{} holds metadata already, or a load that was cut off; give an empty folder. Nothing was changed",
            dir.display()
        );
    }
    Ok(())
}

/// What was loaded, and what to do next.
pub fn told(loaded: &Loaded, dir: &Path, database: &DatabaseOptions) -> String {
    let engine = database.engine.as_ref().map_or_else(String::new, |url| format!(" --engine '{url}'"));
    let made = loaded.trailer.wall_ns.div_euclid(1_000_000_000);
    let now = SystemClock.wall_ns().div_euclid(1_000_000_000);
    let ago = print::span(u64::try_from(now - made).unwrap_or(0));
    format!(
        "loaded {} records as of batch {}, dumped at {} ({ago} ago)\n\
         lost: every change of names, attributes and content after that moment\n\
         ended: {} sessions; clients mount again\n\
         next: start `torchfs meta --dir {}{engine}` at the old address, wait for `torchfs gc`, then run `torchfs fsck`: it names\n\
         files whose blocks were deleted after the dump",
        print::count(loaded.changes),
        loaded.trailer.seq,
        print::utc(made),
        loaded.sessions,
        dir.display(),
    )
}

/// The same for programs.
pub fn report(loaded: &Loaded, dir: &Path) -> serde_json::Value {
    json!({
        "dir": dir,
        "cluster": format!("{:016x}", loaded.header.cluster.0),
        "batch": loaded.trailer.seq.0,
        "dumped_unix_s": loaded.trailer.wall_ns.div_euclid(1_000_000_000),
        "changes": loaded.changes,
        "sessions_ended": loaded.sessions,
        "incarnation": loaded.incarnation.0,
        "incarnation_of_dump": loaded.header.incarnation.0,
    })
}
