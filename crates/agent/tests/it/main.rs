//! The session on the real device, under a small file system in memory.
//!
//! They need `/dev/fuse` and the right to mount; without either they say so and pass, since the protocol itself is
//! tested without it.

#![allow(clippy::unwrap_used)] // helpers of tests

mod session;
mod stage;
mod toy;
