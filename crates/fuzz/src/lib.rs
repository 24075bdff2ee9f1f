//! Damage to bytes, from a seed: every decoder of ours is fed with it and must answer, not panic, and take no more memory
//! than its input justifies.
//!
//! A target gives good samples and a function that decodes. [`Fuzz::run`] changes samples at random (flipped bits, bytes,
//! numbers that are too large, cuts, repeats, two samples spliced) and hands them in. The test executable counts memory
//! with [`Counting`], so that a length that is believed before it is checked shows as an allocation.
//!
//! # Invariants
//! What follows from a seed never depends on a library; which seeds a run has is said in `seeds.rs`.
#![allow(unsafe_code)] // an allocator is

mod seeds;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub use seeds::{rounds, seed, seeds, soak};

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which remembers the largest request of each thread. Install it in the test executable:
/// `#[global_allocator] static MEMORY: torchfs_fuzz::Counting = torchfs_fuzz::Counting;`
pub struct Counting;

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is ours.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller's promise is ours.
        unsafe { System.realloc(at, layout, size) }
    }
}

fn note(size: usize) {
    // A thread that ends has no such variable any more, and nothing to tell.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

/// A run over one decoder.
pub struct Fuzz {
    seed: u64,
    rounds: u64,
    memory_max: usize,
}

impl Fuzz {
    /// A run of this many rounds in `make test` and a hundred times as many in `make soak`.
    pub fn rounds(rounds: u64) -> Fuzz {
        Fuzz { seed: seed(1), rounds: self::rounds(rounds, rounds * 100), memory_max: 256 << 10 }
    }

    /// The largest single allocation that the decoder may ask for beyond 64 times its input.
    pub fn memory_max(mut self, bytes: usize) -> Fuzz {
        self.memory_max = bytes;
        self
    }

    /// Feeds the decoder; it says whether it took the bytes for good. Panics with the bytes in hand if it panics or takes
    /// too much memory, and if it takes nothing or everything for good: then the damage has lost its bite.
    pub fn run(&self, samples: &[Vec<u8>], mut decode: impl FnMut(&[u8]) -> bool) {
        assert!(!samples.is_empty(), "there is nothing to damage");
        let mut random = Random(self.seed);
        let mut good = 0u64;
        for sample in samples {
            assert!(decode(sample), "an undamaged sample is refused: {}", hex(sample));
        }
        for round in 0..self.rounds {
            let bytes = damaged(&mut random, samples);
            LARGEST.set(0);
            let taken = catch_unwind(AssertUnwindSafe(|| decode(&bytes)));
            let largest = LARGEST.get();
            let here = || format!("TORCHFS_SEED={} round {round}: {}", self.seed, hex(&bytes));
            match taken {
                Ok(taken) => good += u64::from(taken),
                Err(panic) => {
                    eprintln!("the decoder panicked at {}", here());
                    resume_unwind(panic);
                }
            }
            let most = self.memory_max + 64 * bytes.len();
            assert!(largest <= most, "{largest} bytes were asked for at once at {}", here());
        }
        assert!(good < self.rounds, "nothing is ever refused");
    }
}

fn damaged(random: &mut Random, samples: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = samples[random.below(samples.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let more = random.below(16);
                bytes.splice(at..at, (0..more).map(|n| n as u8)).for_each(drop);
            }
            4 => {
                // A number where one may be, as large as they come.
                let ones = [0xff; 8];
                let end = bytes.len().min(at + 1 + random.below(8));
                bytes[at..end].copy_from_slice(&ones[..end - at]);
            }
            5 => {
                let end = at + random.below(bytes.len() - at + 1);
                bytes.drain(at..end);
            }
            6 => {
                let end = at + random.below(bytes.len() - at + 1).min(64);
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again).for_each(drop);
            }
            7 => {
                let other = &samples[random.below(samples.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[random.below(other.len() + 1)..]);
            }
            _ => {
                // A CBOR head that promises a lot: array, map, bytes or text of up to 2^64 things.
                let head = [0x9b, 0xbb, 0x5b, 0x7b, 0x9a, 0xba, 0x5a, 0x7a][random.below(8)];
                let length = random.next() >> random.below(64);
                bytes.truncate(at);
                bytes.push(head);
                bytes.extend_from_slice(&length.to_be_bytes());
                bytes.extend_from_slice(&samples[0]);
            }
        }
    }
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().take(4096).map(|byte| format!("{byte:02x}")).collect()
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}
