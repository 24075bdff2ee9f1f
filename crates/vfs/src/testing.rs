//! What the tests of this crate share: a small generator of numbers, and how many rounds to go.

use std::ops::Range;

/// Seeds for a test: fixed ones, or many more fresh ones.
pub(crate) fn rounds(count: u64) -> Range<u64> {
    torchfs_fuzz::seeds(1, count, count * 50)
}

/// SplitMix64: enough for picking operations.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound.max(1)
    }
}
