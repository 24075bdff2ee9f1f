//! Real processes under test, a module per topic. See CONTRIBUTING.md for how to run one, and on what.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod cli;
mod coded;
mod crash;
mod disks;
mod dump;
mod faults;
mod operator;
mod posix;
mod postgres;
mod programs;
mod resilience;
mod storage;
mod suites;
mod takeover;
mod tidy;
mod two_mounts;
mod volumes;
