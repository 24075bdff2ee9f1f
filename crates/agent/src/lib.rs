//! The node agent: the FUSE mount over vfs.
//!
//! [`mount::mount`] opens `/dev/fuse` and mounts it, [`fuse`] speaks the kernel's protocol on it, `ops` turns requests into
//! calls of the vfs, and [`mount()`] puts the three together.
//!
//! # Invariants
//! - Only `ops` knows both the kernel's words and the vfs's; `fuse` and `mount` know nothing of volumes.
//!
//! # Not here
//! - What a file system is: `torchfs_vfs`. Reading settings and starting the runtime: `torchfs_cli`.

mod config;
mod error;
pub mod fuse;
mod fusermount;
mod metrics;
pub mod mount;
mod mounted;
mod ops;
mod refusal;
mod served;

pub use config::FuseConfig;
pub use error::Error;
pub use mounted::{Mounted, mount};
pub use served::Served;
