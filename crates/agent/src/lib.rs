//! The node agent: the FUSE mount over vfs.
//!
//! `fuse` speaks the kernel's protocol, `mount` makes and takes away mounts.

mod config;
mod error;
pub mod fuse;
mod metrics;
pub mod mount;
mod mounted;

pub use config::FuseConfig;
pub use error::Error;
pub use mounted::Mounted;
