//! Faults on machines of their own: kills, stops, cut and slow cables, power cuts, several at once and in every order, while
//! writers and readers record what they were told.
//!
//! The idea: at the end nothing that was acknowledged is lost and nothing wrong was read. The storm brings forty faults in
//! `make test` and more than a thousand in `make soak`. Each prints its seed; `TORCHFS_SEED` repeats it.

use torchfs_tests::storm::{Climate, Fault, Storm};
use torchfs_tests::{count, seed, sys};

use Fault::{Cut, Kill, Power, Slow, Stop};

/// One storm from a printed seed.
fn storm(number: u64, climate: Climate, faults: u64) {
    let seed = seed(number);
    let mut storm = Storm::new(seed, climate);
    storm.rage(faults);
    sys::say(&format!("storm {number}: {} faults, seed {seed}\n", storm.faults()));
}

#[test]
fn storms_over_two_copies_lose_nothing_and_show_nothing_wrong() {
    let climate = Climate {
        servers: 3,
        redundancy: "replicas:2",
        tolerated: 1,
        data: &[Kill, Stop, Cut, Slow, Power],
        meta_args: &[],
    };
    storm(80, climate, count(40, 1500));
}

/// Found in the first minute of the first storm, and it needed no storm: zeros at the end of a log that another mount had
/// closed, in pages that the kernel kept after it had heard of lengths in the wrong order.
#[test]
fn readers_elsewhere_see_every_closed_byte_of_a_growing_log() {
    let climate = Climate { servers: 3, redundancy: "replicas:2", tolerated: 0, data: &[], meta_args: &[] };
    let mut storm = Storm::new(seed(81), climate);
    for _ in 0..count(3, 300) {
        storm.calm();
    }
}
