//! Which seeds a random test runs: few fixed ones in `make test`, many fresh ones in `make soak`, one to see a failure again.
//!
//! `SOAK=1` means full counts, from `SOAK_SEED` on, which `make soak` draws and prints. `TORCHFS_SEED` is the one to repeat.

use std::ops::Range;

/// Whether counts are full.
pub fn soak() -> bool {
    std::env::var_os("SOAK").is_some_and(|v| v == "1")
}

/// `usual` in `make test`, `full` in `make soak`.
pub fn rounds(usual: u64, full: u64) -> u64 {
    if soak() { full } else { usual }
}

/// The seed of a test that runs one; `usual` in `make test`.
pub fn seed(usual: u64) -> u64 {
    given("TORCHFS_SEED").or_else(|| given("SOAK_SEED")).unwrap_or(usual)
}

/// The seeds of a test that runs many: so many in `make test`, from `first` on, and so many in `make soak`.
pub fn seeds(first: u64, usual: u64, full: u64) -> Range<u64> {
    if let Some(one) = given("TORCHFS_SEED") {
        return one..one + 1;
    }
    let first = given("SOAK_SEED").unwrap_or(first);
    first..first + rounds(usual, full)
}

fn given(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
