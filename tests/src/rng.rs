//! Seeds and counts, as all random tests have them (`torchfs_fuzz`), and numbers that follow from a seed.
//!
//! # Invariants
//! The numbers that follow from a seed never depend on a library's version, so that a seed in a bug report stays good.

pub use torchfs_fuzz::{rounds as count, soak};

/// The seed of this run, mixed with the test's own number so that tests differ. Printed, so that a failure can be repeated.
pub fn seed(test: u64) -> u64 {
    let base = torchfs_fuzz::seed(1);
    let seed = Rng::new(base ^ test.rotate_left(32)).next();
    println!("seed {seed} (TORCHFS_SEED={base})");
    seed
}

/// A small, fast, repeatable source of numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)] // an endless sequence needs no Option
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// A number in `[from, to)`.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from))
    }

    /// One of the given things.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    /// Puts things into any order.
    pub fn shuffle<T>(&mut self, of: &mut [T]) {
        for last in (1..of.len()).rev() {
            of.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// True `n` times in `of`.
    pub fn chance(&mut self, n: u64, of: u64) -> bool {
        self.below(of) < n
    }

    /// `len` repeatable bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.next().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}
