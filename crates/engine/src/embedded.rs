//! The engine on one machine: the log in files of its own folder, no other process beside it.
//!
//! # Not here
//! - How batches are ordered, grouped and checkpointed: `log_engine`. Formats: `log::format` and docs/disk.md.

use std::io;
use std::path::Path;
use std::sync::Arc;

use torchfs_disk::LocalDisk;
use torchfs_proto::disk::Disk;

use crate::error::{Error, Result};
use crate::identity::{self, Identity};
use crate::log::{Log, Segments};
use crate::log_engine::{Config, LogEngine, Parts};
use crate::overlay::Overlay;
use crate::replica::{Lmdb, Replica};

/// The engine on one machine: [`LogEngine`] over files of its own.
pub type Embedded = LogEngine;

impl LogEngine {
    /// Opens the engine in this folder, making it if it is empty or missing. No other process can open it meanwhile.
    pub fn open(dir: impl AsRef<Path>, config: Config) -> Result<LogEngine> {
        let (disk, replica) = open_folder(dir.as_ref(), &config)?;
        LogEngine::open_with(disk, replica, config)
    }

    /// Opens the engine on a disk and replica at hand.
    pub fn open_with(disk: Arc<dyn Disk>, replica: Box<dyn Replica>, config: Config) -> Result<LogEngine> {
        let mark = replica.mark()?;
        let mut applied = mark.map_or_else(Default::default, |mark| mark.applied);
        let mut identity = match Identity::load(&*disk)? {
            Some(identity) => identity,
            None if applied.0 > 0 => {
                return Err(Error::Foreign {
                    what: format!(
                        "the folder holds the replica of a database with the metadata of cluster {:016x}, or its engine.id was \
                         lost; give the --engine of that database, too, or an empty --dir",
                        mark.map_or(0, |mark| mark.cluster.0)
                    ),
                });
            }
            None => {
                let cluster = config.cluster.map_or_else(identity::draw_cluster, Ok)?;
                Segments::create(&disk, &config.log, cluster)?;
                Identity::create(&*disk, cluster)?
            }
        };
        for expected in [config.cluster, mark.map(|mark| mark.cluster)].into_iter().flatten() {
            if expected != identity.cluster() {
                return Err(Error::WrongCluster { found: identity.cluster(), expected });
            }
        }
        // Names made by a process that died may be visible and not yet durable.
        disk.sync_names().map_err(Error::io("cannot sync the names of the metadata folder"))?;
        let writer = identity.rise(config.floor)?;

        let mut overlay = Overlay::default();
        let (log, mut last) =
            Segments::open(disk.clone(), config.log.clone(), writer, applied, &mut |_, changes| {
                overlay.apply(changes);
                Ok(())
            })?;
        if let Some(floor) = config.floor.filter(|floor| last.0 == 0 && floor.seq.0 > 0) {
            // The replica says where the order begins; an empty log follows it.
            replica.commit(&log.mark(floor.seq), &mut std::iter::empty())?;
            (applied, last) = (floor.seq, floor.seq);
        }
        tracing::info!(
            cluster = format_args!("{:016x}", writer.cluster.0),
            fence = writer.fence.0,
            %last,
            replayed = last.0 - applied.0,
            "metadata engine opened"
        );
        LogEngine::start(Parts { config, disk, replica, log: Box::new(log), writer, overlay, applied, last })
    }
}

/// Locks a folder and opens the replica in it.
pub(crate) fn open_folder(dir: &Path, config: &Config) -> Result<(Arc<dyn Disk>, Box<dyn Replica>)> {
    let disk = LocalDisk::open_locked(dir).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => Error::Locked { what: e.to_string() },
        _ => Error::Io { what: "cannot open the metadata folder".into(), source: e },
    })?;
    let replica = Lmdb::open(&dir.join("replica"), &config.lmdb)?;
    disk.sync_names().map_err(Error::io("cannot sync the names of the metadata folder"))?;
    Ok((Arc::new(disk), Box::new(replica)))
}
