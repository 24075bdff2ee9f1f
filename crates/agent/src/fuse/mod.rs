//! The kernel's FUSE protocol, spoken by ourselves: decoding, encoding, interrupts, notifications and the session loop.
//!
//! Why no crate does this for us: docs/decisions/0001-own-fuse-protocol.md.
//!
//! # Invariants
//! - Nothing below this module knows the vfs; it speaks to a [`Handler`].
//!
//! # Not here
//! - What an operation means: `crate::ops`. How a mount is made: `crate::mount`.

pub mod abi;
mod buffer;
mod device;
mod init;
mod interrupt;
mod notify;
mod reply;
mod request;
mod session;

pub use device::Device;
pub use init::{Agreed, Unfit, Wish};
pub use notify::{Notice, Notifier};
pub use reply::{Attr, Entry, Listing, Reply, Statfs, Undo};
pub use request::{Forgets, Header, Init, Lock, Malformed, Op, Request, SetAttr, SetTime, Time, Write};
pub use session::{Call, Handler, Session};
