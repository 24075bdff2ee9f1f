//! Nouns and messages of TorchFS: ids, records, requests, faults, and the seams Disk and Clock. No I/O.
//!
//! # Invariants
//! - Numbers of fields, codes and methods are on the wire and on disk: they are added, never reused.
//! - Decoding takes no memory that the input does not pay for.

pub mod attr;
pub mod chunk;
pub mod clock;
pub mod disk;
pub mod dump;
pub mod extent;
pub mod fault;
pub mod ids;
pub mod key;
pub mod layout;
pub mod msg;
pub mod record;

pub use fault::{Code, Fault, Result};
pub use ids::*;
