//! The metadata service in one process, over the embedded engine on a simulated disk, with a clock of its own.
#![allow(clippy::unwrap_used)] // helpers of tests

mod check;
mod content;
mod deleter;
mod dumps;
mod locks;
mod moves;
mod namespace;
mod orphans;
mod repair;
mod replay;
mod servers;
mod sessions;
mod standstill;
mod volumes;
mod watched;
mod world;
