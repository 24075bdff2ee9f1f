//! What the tests of this crate share: a small generator of numbers, and how many rounds to go.

/// Seeds for a test: fixed ones, more of them under SOAK, or the one of TORCHFS_SEED.
pub(crate) fn rounds(count: u64) -> Vec<u64> {
    if let Some(seed) = std::env::var("TORCHFS_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return vec![seed];
    }
    let count = if std::env::var_os("SOAK").is_some() { count * 50 } else { count };
    (1..=count).collect()
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
