//! The two disks behind the seam [`torchfs_proto::disk`]: the local one and one whose power can be cut.
//!
//! The log of the engine and the block store do their I/O through the traits `Disk` and `DiskFile`. [`LocalDisk`] is a
//! folder of the machine; [`SimDisk`] lives in memory and loses on demand what was not synced, so that thousands of
//! power cuts fit into a second.
//!
//! # Not here
//! - Formats: both disks move bytes and know nothing of what is in them.
//! - Latching: a failed sync is reported once; whoever called it remembers it and never syncs again.

mod local;
mod sim;

pub use local::{LocalDisk, create_private, make_dir_durably};
pub use sim::{Op, SimDisk};
