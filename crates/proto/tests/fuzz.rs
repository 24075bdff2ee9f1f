//! Damaged messages and records: each decoder answers, and takes no memory by a length it was told.
#![allow(clippy::unwrap_used)] // helpers of tests

use torchfs_fuzz::{Counting, Fuzz};
use torchfs_proto::key::Parts;
use torchfs_proto::msg::{block, decode, meta};
use torchfs_proto::record;

#[global_allocator]
static MEMORY: Counting = Counting;

/// The golden messages whose names begin so.
fn golden(prefix: &str) -> Vec<Vec<u8>> {
    let bytes = |hex: &str| {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    };
    let lines = include_str!("golden/v1.txt").lines();
    lines.filter(|line| line.starts_with(prefix)).map(|line| bytes(line.split(' ').nth(1).unwrap())).collect()
}

#[test]
fn requests_to_the_metadata_service() {
    Fuzz::rounds(150_000).run(&golden("meta.request."), |bytes| decode::<meta::Request>(bytes).is_ok());
}

#[test]
fn replies_of_the_metadata_service() {
    Fuzz::rounds(150_000).run(&golden("meta.reply."), |bytes| decode::<meta::Reply>(bytes).is_ok());
}

#[test]
fn requests_to_data_servers() {
    Fuzz::rounds(150_000).run(&golden("block.request."), |bytes| decode::<block::Request>(bytes).is_ok());
}

#[test]
fn replies_of_data_servers() {
    Fuzz::rounds(150_000).run(&golden("block.reply."), |bytes| decode::<block::Reply>(bytes).is_ok());
}

#[test]
fn records_of_the_store() {
    // Whatever the kind, the bytes of all messages are tried as every record: what fits by chance is no harm.
    let samples = golden("meta.");
    Fuzz::rounds(60_000).run(&samples, |bytes| {
        let _ = decode::<record::Format>(bytes).is_ok();
        let _ = decode::<record::Volume>(bytes).is_ok();
        let _ = decode::<record::Inode>(bytes).is_ok();
        let _ = decode::<record::Entry>(bytes).is_ok();
        let _ = decode::<record::Extent>(bytes).is_ok();
        let _ = decode::<record::Block>(bytes).is_ok();
        let _ = decode::<record::Session>(bytes).is_ok();
        let _ = decode::<record::Outcome>(bytes).is_ok();
        let _ = decode::<record::Server>(bytes).is_ok();
        let _ = decode::<record::LayoutRecord>(bytes).is_ok();
        let _ = Parts::of(bytes);
        decode::<meta::Request>(bytes).is_ok() || decode::<meta::Reply>(bytes).is_ok()
    });
}
