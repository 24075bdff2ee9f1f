//! Faults on machines of their own: kills, stops, cut and slow cables, full disks, flipped bits, power cuts, several at once and in
//! every order, while groups move, and while writers and readers record what they were told.
//!
//! The idea: at the end nothing that was acknowledged is lost, nothing wrong was read, and every block has full redundancy. The
//! storms bring more than a hundred faults in `make test` and thousands in `make soak`. Each prints its seed; `TORCHFS_SEED`
//! repeats it.

use torchfs_tests::storm::{Climate, Fault, Storm};
use torchfs_tests::{count, seed, sys};

use Fault::{Cut, Fill, Flip, Kill, Power, Slow, Stop};

const EVERY_FAULT: &[Fault] = &[Kill, Stop, Cut, Slow, Power, Fill, Flip];

const COPIES: Climate = Climate {
    servers: 3,
    redundancy: "replicas:2",
    width: 2,
    tolerated: 1,
    data: EVERY_FAULT,
    moves: false,
    meta_args: &[],
};

const CODED: Climate = Climate { servers: 4, redundancy: "ec:2+1", width: 3, ..COPIES };

/// One storm from a printed seed.
fn storm(number: u64, climate: Climate, faults: u64) {
    let seed = seed(number);
    let mut storm = Storm::new(seed, climate);
    storm.rage(faults);
    sys::say(&format!("storm {number}: {} faults, seed {seed}\n", storm.faults()));
}

#[test]
fn storms_over_two_copies_lose_nothing_and_show_nothing_wrong() {
    storm(80, COPIES, count(36, 600));
}

#[test]
fn storms_over_coded_blocks_lose_nothing_and_show_nothing_wrong() {
    storm(82, CODED, count(30, 600));
}

#[test]
fn storms_while_groups_of_copies_move_lose_nothing() {
    storm(83, Climate { servers: 4, moves: true, ..COPIES }, count(24, 500));
}

#[test]
fn storms_while_groups_of_coded_blocks_move_lose_nothing() {
    storm(84, Climate { servers: 5, moves: true, ..CODED }, count(18, 400));
}

#[test]
fn storms_that_strike_two_servers_of_a_wide_code_lose_nothing() {
    let wide = Climate { servers: 8, redundancy: "ec:4+2", width: 6, tolerated: 2, ..COPIES };
    storm(85, wide, count(12, 300));
}

/// Found in the first minute of the first storm, and it needed no storm: zeros at the end of a log that another mount had
/// closed, in pages that the kernel kept after it had heard of lengths in the wrong order.
#[test]
fn readers_elsewhere_see_every_closed_byte_of_a_growing_log() {
    let mut storm = Storm::new(seed(81), Climate { tolerated: 0, data: &[], ..COPIES });
    for _ in 0..count(3, 100) {
        storm.calm();
    }
}
