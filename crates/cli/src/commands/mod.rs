//! One file per command: its arguments, what it starts or asks, what it prints.

pub mod bench;
pub mod data;
pub mod df;
pub mod drain;
pub mod fsck;
pub mod gc;
pub mod meta;
pub mod mount;
pub mod policy;
pub mod rebalance;
pub mod scrub;
pub mod servers;
pub mod sessions;
pub mod status;
pub mod systemd;
pub mod top;
pub mod umount;
pub mod up;
pub mod volume;
