//! The harness for real processes under test: clusters, mounts, power cuts, recorded promises and a reference model.
//!
//! The idea: a test says what happens (`Cluster::start`, `kill`, `cut`) and what must hold; everything that makes such
//! tests flaky or dirty elsewhere sits here once: ports, readiness, deadlines, logs, leftovers, hangs.
//!
//! # Invariants
//! - A test waits for a condition, never for a time, and every wait has a deadline of a minute or more.
//! - Whatever a test leaves behind (processes, mounts, loop devices, folders) is named after its process, and the next
//!   run sweeps what belongs to a process that is gone.
//! - A test that hangs is ended: its processes are killed and its mounts are detached, so that blocked threads come free.
//!
//! # Not here
//! Assertions about the product. They are in `tests/real/`, a module per topic.

pub mod cluster;
pub mod database;
pub mod ground;
pub mod model;
pub mod netns;
pub mod nursery;
pub mod ports;
pub mod powercut;
pub mod process;
pub mod promises;
pub mod proxy;
pub mod readers;
pub mod rng;
pub mod sandbox;
pub mod shell;
pub mod storm;
pub mod sys;
pub mod wait;

pub use cluster::{Cluster, Mount, Options};
pub use database::Database;
pub use ground::Ground;
pub use process::Proc;
pub use rng::{Rng, count, seed, soak};
pub use sandbox::Sandbox;
pub use shell::{Ran, run, sh, tool};
pub use wait::eventually;
