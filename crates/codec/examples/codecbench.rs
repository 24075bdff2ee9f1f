//! What packing and erasure coding cost: CPU seconds per GB of content, on one thread.
//!
//!   cargo run --release -p torchfs-codec --example codecbench
//!
//! Each figure is the median of seven rounds of at least a tenth of a second, with the least and the most. CPU time, not wall
//! time, so a busy machine disturbs it little. A copy of the same bytes (memcpy) stands beside it as the yardstick.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use torchfs_codec::erasure::{Code, Part, Piece, Table};
use torchfs_codec::{Compression, Encoded, decode_chunk, encode, stored_range};
use torchfs_proto::BlockId;

const BLOCK: BlockId = BlockId { incarnation: 1, counter: 1 };
const BLOCKS: usize = 16;
const LEN: usize = 4 << 20;
const ROUNDS: usize = 7;

fn main() {
    println!("CPU seconds per GB of content, blocks of 4 MiB: median (least to most) of {ROUNDS} rounds\n");
    let noise: Vec<Bytes> = (0..BLOCKS).map(|n| noise(n as u64)).collect();
    let text: Vec<Bytes> = (0..BLOCKS).map(|n| text(n as u64)).collect();
    let mut room = vec![0u8; LEN];
    show("copy (memcpy)", &noise, |block| room.copy_from_slice(block));
    for (kind, blocks) in [("noise", &noise), ("text", &text)] {
        for (how, compression) in
            [("none", Compression::None), ("lz4", Compression::Lz4), ("zstd:3", Compression::Zstd(3))]
        {
            let pack = |block: &Bytes| encode(BLOCK, std::slice::from_ref(block), compression).unwrap();
            let share = blocks.iter().map(|b| pack(b).stored()).sum::<u64>() as f64 / (BLOCKS * LEN) as f64;
            show(&format!("pack {kind} with {how} (to {:.0} %)", share * 100.0), blocks, |block| {
                pack(block);
            });
            let packed: Vec<Encoded> = blocks.iter().map(pack).collect();
            show(&format!("check and unpack {kind} with {how}"), &packed, unpack);
        }
    }
    let packed: Vec<Encoded> =
        noise.iter().map(|b| encode(BLOCK, std::slice::from_ref(b), Compression::None).unwrap()).collect();
    for (data, parity) in [(2, 1), (4, 2), (8, 3)] {
        let code = Code { data, parity };
        let name = format!("ec:{data}+{parity}");
        show(&format!("{name}: cut and compute parity"), &packed, |encoded| {
            code.split(BLOCK, encoded).unwrap();
        });
        let count = packed[0].chunks.len() as u32;
        let pieces: Vec<Vec<(u8, Piece)>> = packed.iter().map(|e| pieces(code, e)).collect();
        for lost in 1..=parity {
            let gone: Vec<u8> = (0..lost).collect();
            show(&format!("{name}: rebuild {lost} of {data} data pieces"), &pieces, |pieces| {
                code.rebuild(BLOCK, count, &pieces[usize::from(lost)..], &gone).unwrap();
            });
        }
        // One chunk of a lost piece; counted per GB of what comes back.
        let per_chunk = measure(&pieces, |pieces| one_chunk(code, count, pieces)) * f64::from(count);
        println!("{:48} {per_chunk:.3}", format!("{name}: rebuild single chunks"));
    }
}

fn pieces(code: Code, encoded: &Encoded) -> Vec<(u8, Piece)> {
    let pieces = code.split(BLOCK, encoded).unwrap();
    (0..)
        .zip(pieces.into_iter().map(|p| Piece { chunks: p.chunks, payload: p.payload.concat().into() }))
        .collect()
}

fn one_chunk(code: Code, count: u32, pieces: &[(u8, Piece)]) {
    let parity = &pieces[usize::from(code.data)].1;
    let head = &parity.payload[..parity.chunks[0].stored as usize];
    let table = Table::decode(BLOCK, code, count, head).unwrap();
    let span = table.span(0, 1..2);
    let part = |(n, piece): &(u8, Piece)| {
        let needed = table.needed(*n, &span);
        let range = stored_range(&piece.chunks, needed.start as usize..needed.end as usize);
        let payload = piece.payload.slice(range.start as usize..range.end as usize);
        Part { piece: *n, first: needed.start, payload }
    };
    let parts: Vec<Part> = pieces[1..=usize::from(code.data)].iter().map(part).collect();
    table.rebuild(BLOCK, &parts, 0, 1..2).unwrap();
}

fn unpack(encoded: &Encoded) {
    let stored: Bytes = match encoded.payload.as_slice() {
        [one] => one.clone(),
        many => many.concat().into(),
    };
    let mut at = 0;
    for (index, info) in (0..).zip(&encoded.chunks) {
        let end = at + info.stored as usize;
        decode_chunk(BLOCK, index, info, stored.slice(at..end)).unwrap();
        at = end;
    }
}

fn show<T>(what: &str, blocks: &[T], work: impl FnMut(&T)) {
    let times = rounds(blocks, work);
    println!("{what:48} {:.3} ({:.3} to {:.3})", times[ROUNDS / 2], times[0], times[ROUNDS - 1]);
}

fn measure<T>(blocks: &[T], work: impl FnMut(&T)) -> f64 {
    rounds(blocks, work)[ROUNDS / 2]
}

/// CPU seconds per GB of each round, sorted.
fn rounds<T>(blocks: &[T], mut work: impl FnMut(&T)) -> Vec<f64> {
    blocks.iter().for_each(&mut work);
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            // The system counts in steps of some milliseconds.
            let (began, mut turns) = (cpu_ns(), 0);
            while cpu_ns() - began < 100_000_000 {
                blocks.iter().for_each(&mut work);
                turns += 1;
            }
            (cpu_ns() - began) as f64 / (turns * BLOCKS * LEN) as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Nanoseconds that this process has run.
fn cpu_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

fn noise(seed: u64) -> Bytes {
    let mut state = seed * 2 + 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()
    })
    .flatten()
    .take(LEN)
    .collect()
}

/// Lines of a training log.
fn text(seed: u64) -> Bytes {
    let line =
        |i: u64| format!("epoch {} step {} loss {:.5}\n", seed, i, 1.0 / (1 + (i * 7919) % 1009) as f64);
    (0..).flat_map(|i| line(i).into_bytes()).take(LEN).collect()
}
