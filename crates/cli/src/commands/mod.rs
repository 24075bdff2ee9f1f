//! One file per command: its arguments, what it starts or asks, what it prints.

pub mod bench;
pub mod data;
pub mod df;
pub mod fsck;
pub mod gc;
pub mod meta;
pub mod mount;
pub mod sessions;
pub mod status;
pub mod systemd;
pub mod umount;
pub mod up;
