//! Golden requests, and bytes that are none.

use super::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A request with this opcode and body.
fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&((abi::IN_HEADER + body.len()) as u32).to_ne_bytes());
    out.extend_from_slice(&opcode.to_ne_bytes());
    out.extend_from_slice(&0x1234u64.to_ne_bytes());
    out.extend_from_slice(&7u64.to_ne_bytes());
    for number in [1000u32, 100, 42, 0] {
        out.extend_from_slice(&number.to_ne_bytes());
    }
    out.extend_from_slice(body);
    out
}

/// Numbers of mixed width as one body.
macro_rules! body {
    ($($number:expr),* ; $tail:expr) => {{
        let mut out: Vec<u8> = Vec::new();
        $(out.extend_from_slice(&$number.to_ne_bytes());)*
        out.extend_from_slice($tail);
        out
    }};
}

fn decode_op_of(opcode: u32, body: &[u8]) -> String {
    let bytes = request(opcode, body);
    let request = Request::decode(&bytes).unwrap();
    let expected =
        Header { len: bytes.len() as u32, opcode, unique: 0x1234, nodeid: 7, uid: 1000, gid: 100, pid: 42 };
    assert_eq!(request.header, expected);
    format!("{:?}", request.op)
}

#[test]
fn golden_requests_are_read_field_by_field() {
    let is = |opcode, body: &[u8], expected: Op<'_>| {
        assert_eq!(decode_op_of(opcode, body), format!("{expected:?}"));
    };
    is(op::LOOKUP, b"name\0", Op::Lookup { name: b"name" });
    is(op::FORGET, &body![3u64; b""], Op::Forget { count: 3 });
    is(op::GETATTR, &body![1u32, 0u32, 9u64; b""], Op::Getattr { fh: Some(9) });
    is(op::GETATTR, &body![0u32, 0u32, 9u64; b""], Op::Getattr { fh: None });
    is(op::STATX, &body![1u32, 0u32, 9u64, 2u32, 3u32; b""], Op::Statx { fh: Some(9), flags: 2, mask: 3 });
    is(op::SYMLINK, b"name\0target\0", Op::Symlink { name: b"name", target: b"target" });
    let mknod = Op::Mknod { name: b"n", mode: 0o10644, rdev: 5, umask: 0o22 };
    is(op::MKNOD, &body![0o10644u32, 5u32, 0o22u32, 0u32; b"n\0"], mknod);
    is(op::MKDIR, &body![0o755u32, 0o22u32; b"d\0"], Op::Mkdir { name: b"d", mode: 0o755, umask: 0o22 });
    let rename = |flags| Op::Rename { name: b"a", new_parent: 8, new_name: b"b", flags };
    is(op::RENAME, &body![8u64; b"a\0b\0"], rename(0));
    is(op::RENAME2, &body![8u64, 2u32, 0u32; b"a\0b\0"], rename(2));
    is(op::LINK, &body![8u64; b"a\0"], Op::Link { inode: 8, name: b"a" });
    is(op::OPEN, &body![2u32, 1u32; b""], Op::Open { flags: 2, kill_suidgid: true });
    let read = Op::Read { fh: 9, offset: 4096, size: 512, flags: 2, lock_owner: Some(6) };
    is(op::READ, &body![9u64, 4096u64, 512u32, 2u32, 6u64, 2u32, 0u32; b""], read);
    let write = Write { fh: 9, offset: 5, flags: 1, lock_owner: Some(6), cached: true, kill_suidgid: true };
    let body = body![9u64, 5u64, 3u32, 7u32, 6u64, 1u32, 0u32; b"abc"];
    is(op::WRITE, &body, Op::Write { write, data: b"abc" });
    assert_eq!(request(op::WRITE, &body).len(), abi::WRITE_HEADER + 3);
    let release = Op::Release { fh: 9, flags: 1, lock_owner: 6, flush: false, flock_unlock: true };
    is(op::RELEASE, &body![9u64, 1u32, 2u32, 6u64; b""], release);
    is(op::FLUSH, &body![9u64, 0u64, 6u64; b""], Op::Flush { fh: 9, lock_owner: 6 });
    is(op::FSYNC, &body![9u64, 1u32, 0u32; b""], Op::Fsync { fh: 9, data_only: true });
    let setxattr = Op::Setxattr { name: b"user.a", value: b"v\0v", flags: 1 };
    is(op::SETXATTR, &body![3u32, 1u32, 0u64; b"user.a\0v\0v"], setxattr);
    is(op::GETXATTR, &body![64u32, 0u32; b"user.a\0"], Op::Getxattr { name: b"user.a", size: 64 });
    let readdir = Op::Readdir { fh: 9, offset: 77, size: 4096, plus: true };
    is(op::READDIRPLUS, &body![9u64, 77u64, 4096u32, 0u32, 0u64, 0u32, 0u32; b""], readdir);
    let lock = Lock { fh: 9, owner: 6, start: 1, end: 2, kind: 1, pid: 42, flock: true };
    let body = body![9u64, 6u64, 1u64, 2u64, 1u32, 42u32, 1u32, 0u32; b""];
    is(op::SETLKW, &body, Op::Setlk { lock, wait: true });
    is(op::SETLK, &body, Op::Setlk { lock, wait: false });
    is(op::GETLK, &body, Op::Getlk(lock));
    let create = Op::Create { name: b"n", flags: 2, mode: 0o644, umask: 0o22, kill_suidgid: false };
    is(op::CREATE, &body![2u32, 0o644u32, 0o22u32, 0u32; b"n\0"], create);
    is(op::INTERRUPT, &body![0x1234u64; b""], Op::Interrupt { unique: 0x1234 });
    let fallocate = Op::Fallocate { fh: 9, offset: 1, length: 2, mode: 3 };
    is(op::FALLOCATE, &body![9u64, 1u64, 2u64, 3u32, 0u32; b""], fallocate);
    is(op::LSEEK, &body![9u64, 5u64, 3u32, 0u32; b""], Op::Lseek { fh: 9, offset: 5, whence: 3 });
    let copy = |wide| Op::CopyFileRange {
        fh: 1,
        offset: 2,
        out_inode: 3,
        out_fh: 4,
        out_offset: 5,
        len: 6,
        flags: 0,
        wide,
    };
    let body = body![1u64, 2u64, 3u64, 4u64, 5u64, 6u64, 0u64; b""];
    is(op::COPY_FILE_RANGE, &body, copy(false));
    is(op::COPY_FILE_RANGE_64, &body, copy(true));
    is(op::IOCTL, b"whatever", Op::Other);
    is(9999, b"", Op::Other);
    let body = body![7u32, 45u32, 131072u32, 0x4000_0001u32, 0x80u32; &[0; 44]];
    let init = Init { major: 7, minor: 45, max_readahead: 131072, features: 0x80_4000_0001 };
    is(op::INIT, &body, Op::Init(init));
}

#[test]
fn setattr_knows_now_and_times_before_1970() {
    use abi::fattr;
    let valid = fattr::MODE | fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW | fattr::KILL_SUIDGID;
    let body = body![
        valid, 0u32, 9u64, 10u64, 11u64, -2i64, 0i64, 0i64, 500_000_000u32, 0u32, 0u32, 0o600u32, 0u32, 1u32, 2u32,
        0u32; b""
    ];
    let bytes = request(op::SETATTR, &body);
    let expected = SetAttr {
        mode: Some(0o600),
        atime: Some(SetTime::At(Time { secs: -2, nanos: 500_000_000 })),
        mtime: Some(SetTime::Now),
        kill_suidgid: true,
        ..SetAttr::default()
    };
    assert_eq!(Request::decode(&bytes).unwrap().op, Op::Setattr(expected));
}

#[test]
fn a_batch_of_forgets_is_read_row_by_row() {
    let body = body![2u32, 0u32, 5u64, 1u64, 6u64, 2u64; b""];
    let bytes = request(op::BATCH_FORGET, &body);
    let Op::BatchForget { rows } = Request::decode(&bytes).unwrap().op else { panic!() };
    assert_eq!(rows.iter().collect::<Vec<_>>(), [(5, 1), (6, 2)]);
    let short = request(op::BATCH_FORGET, &body[..body.len() - 1]);
    assert!(matches!(Request::decode(&short), Err(Malformed::Body { .. })));
    let huge = request(op::BATCH_FORGET, &body![u32::MAX, 0u32; b""]);
    assert!(matches!(Request::decode(&huge), Err(Malformed::Body { .. })));
}

#[test]
fn names_are_neither_empty_nor_unended_nor_endless() {
    for body in [&b""[..], b"\0", b"name", &[b'a'; 5000], &[&[b'a'; 5000][..], b"\0"].concat()] {
        let bytes = request(op::LOOKUP, body);
        assert_eq!(Request::decode(&bytes), Err(Malformed::Body { unique: 0x1234, opcode: op::LOOKUP }));
    }
}

#[test]
fn extensions_at_the_end_are_skipped_and_checked() {
    let mut bytes = request(op::MKDIR, &body![0o755u32, 0u32; b"d\0\0\0\0\0\0\0EXTENDED"]);
    bytes[36] = 1;
    let expected = Op::Mkdir { name: b"d", mode: 0o755, umask: 0 };
    assert_eq!(Request::decode(&bytes).unwrap().op, expected);
    bytes[37] = 1;
    assert!(matches!(Request::decode(&bytes), Err(Malformed::Body { .. })));
}

#[test]
fn a_header_that_lies_about_the_length_is_no_request() {
    let mut bytes = request(op::LOOKUP, b"name\0");
    bytes[0] += 1;
    assert!(matches!(Request::decode(&bytes), Err(Malformed::Header { .. })));
    assert!(matches!(Request::decode(&bytes[..20]), Err(Malformed::Header { .. })));
    assert!(matches!(Request::decode(b""), Err(Malformed::Header { .. })));
}

#[test]
fn any_bytes_give_a_request_or_an_error() {
    let (seed, rounds) = (torchfs_fuzz::seed(7), torchfs_fuzz::rounds(300_000, 20_000_000));
    let mut rng = StdRng::seed_from_u64(seed);
    let mut good = 0u64;
    for round in 0..rounds {
        let len = rng.random_range(0..200usize);
        let mut body: Vec<u8> = (0..len).map(|_| rng.random()).collect();
        // Small numbers and NULs make bodies that go further into the decoder.
        for byte in &mut body {
            if rng.random_bool(0.7) {
                *byte = if rng.random_bool(0.8) { 0 } else { b'a' };
            }
        }
        let mut bytes = request(rng.random_range(0..60), &body);
        if rng.random_bool(0.1) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
        }
        if rng.random_bool(0.1) {
            bytes.truncate(rng.random_range(0..=bytes.len()));
        }
        match Request::decode(&bytes) {
            Ok(Request { op: Op::BatchForget { rows }, .. }) => {
                assert!(rows.iter().count() * 16 <= bytes.len(), "seed {seed} round {round}");
            }
            Ok(_) => good += 1,
            Err(_) => {}
        }
    }
    assert!(good > rounds / 10, "only {good} of {rounds} were requests: the fuzz has lost its bite");
}
