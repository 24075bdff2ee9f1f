//! The vfs over a real metadata service in the same process and data servers in memory.
#![allow(clippy::unwrap_used)]

mod content;
mod nameless;
mod names;
mod overtaken;
mod policy;
mod two;
mod world;
