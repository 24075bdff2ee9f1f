//! Erasure-coded pieces: their bytes are written down, any tolerated loss brings them back, and a few chunks cost little.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use torchfs_codec::erasure::{CODED_MIN, Code, Part, Piece, Table};
use torchfs_codec::{CHUNK, Compression, Encoded, MAX_BLOCK, encode, stored_range, verify_chunk};
use torchfs_proto::BlockId;

const BLOCK: BlockId = BlockId { incarnation: 1, counter: 7 };
const CODES: [Code; 3] =
    [Code { data: 4, parity: 2 }, Code { data: 2, parity: 1 }, Code { data: 8, parity: 3 }];

/// The same numbers for the same seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() >> 32) as u32 % n
    }
}

/// Half text, half noise, so that chunks have different lengths.
fn content(len: usize) -> Bytes {
    let mut numbers = Numbers(88_172_645_463_325_252);
    let byte =
        |i: usize| if (i >> 16).is_multiple_of(2) { b'a' + (i % 7) as u8 } else { numbers.next() as u8 };
    (0..len).map(byte).collect()
}

fn whole(piece: &Encoded) -> Piece {
    Piece { chunks: piece.chunks.clone(), payload: piece.payload.concat().into() }
}

fn split(code: Code, len: usize, compression: Compression) -> (u32, Vec<Piece>) {
    // Parts that end anywhere, as writes do.
    let bytes = content(len);
    let parts = [bytes.slice(..len / 3), bytes.slice(len / 3..len / 3 + 1), bytes.slice(len / 3 + 1..)];
    let encoded = encode(BLOCK, &parts, compression).unwrap();
    let pieces = code.split(BLOCK, &encoded).unwrap();
    (encoded.chunks.len() as u32, pieces.iter().map(whole).collect())
}

/// All ways to lose so many pieces.
fn losses(code: Code) -> Vec<(Vec<u8>, Vec<u8>)> {
    let width = code.data + code.parity;
    (0..1_u32 << width)
        .filter(|lost| lost.count_ones() == u32::from(code.parity))
        .map(|lost| (0..width).partition(|n| lost >> n & 1 == 1))
        .collect()
}

fn part_of(
    code: Code,
    pieces: &[Piece],
    table: &Table,
    piece: u8,
    span: &std::ops::Range<usize>,
) -> (Part, u32) {
    let needed = table.needed(piece, span);
    let whole = &pieces[usize::from(piece)];
    let bytes = stored_range(&whole.chunks, needed.start as usize..needed.end as usize);
    let payload = whole.payload.slice(bytes.start as usize..bytes.end as usize);
    let first = if needed.is_empty() { u32::from(piece >= code.data) } else { needed.start };
    (Part { piece, first, payload }, needed.len() as u32)
}

#[test]
fn the_bytes_of_pieces_are_these_forever() {
    let mut lines = Vec::new();
    for code in CODES {
        for (len, compression) in
            [(CODED_MIN as usize * 2, Compression::None), ((1 << 20) + 12_345, Compression::Lz4)]
        {
            let (_, pieces) = split(code, len, compression);
            for (n, piece) in pieces.iter().enumerate() {
                let chunks: Vec<u8> = piece.chunks.iter().flat_map(|c| c.crc.to_be_bytes()).collect();
                lines.push(format!(
                    "ec:{}+{} of {len} bytes, piece {n}: {} chunks {:08x}, {} bytes {:08x}",
                    code.data,
                    code.parity,
                    piece.chunks.len(),
                    crc32c::crc32c(&chunks),
                    piece.payload.len(),
                    crc32c::crc32c(&piece.payload)
                ));
            }
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pieces.txt");
    let now = lines.join("\n") + "\n";
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    assert_eq!(
        now,
        std::fs::read_to_string(path).unwrap(),
        "pieces that are stored could not be read any more"
    );
}

#[test]
fn any_tolerated_loss_brings_the_same_pieces_back() {
    let mut numbers = Numbers(5);
    for code in CODES.into_iter().chain([Code { data: 5, parity: 2 }, Code { data: 6, parity: 3 }]) {
        for compression in [Compression::None, Compression::Lz4] {
            let least = CODED_MIN.max(u32::from(code.data) << 16);
            let len = least + numbers.below(700_000);
            let (count, pieces) = split(code, len as usize, compression);
            for (gone, left) in losses(code) {
                let have: Vec<(u8, Piece)> =
                    left.iter().map(|n| (*n, pieces[usize::from(*n)].clone())).collect();
                let back = code.rebuild(BLOCK, count, &have, &gone).unwrap();
                for (n, piece) in gone.iter().zip(back) {
                    assert!(
                        piece == pieces[usize::from(*n)],
                        "piece {n} of {code:?}, {gone:?} of {len} lost"
                    );
                }
            }
        }
    }
}

#[test]
fn the_largest_block_splits_and_comes_back() {
    for code in CODES {
        let (count, pieces) = split(code, MAX_BLOCK as usize, Compression::None);
        assert!(pieces.iter().all(|piece| piece.chunks.len() <= torchfs_codec::MAX_CHUNKS));
        let have: Vec<(u8, Piece)> =
            (code.parity..code.data + code.parity).map(|n| (n, pieces[usize::from(n)].clone())).collect();
        let back = code.rebuild(BLOCK, count, &have, &[0]).unwrap();
        assert!(back[0] == pieces[0]);
    }
}

#[test]
fn a_few_chunks_come_back_from_as_many_of_others() {
    let mut numbers = Numbers(9);
    for code in CODES {
        for compression in [Compression::None, Compression::Lz4] {
            let (count, pieces) = split(code, (2 << 20) + 30_000, compression);
            for (gone, left) in losses(code) {
                let Some(want) = gone.iter().copied().find(|n| *n < code.data) else { continue };
                let parity = left.iter().copied().find(|n| *n >= code.data).unwrap();
                let head = pieces[usize::from(parity)].chunks[0].stored as usize;
                let bytes = &pieces[usize::from(parity)].payload[..head];
                let table = Table::decode(BLOCK, code, count, bytes).unwrap();
                let all = code.chunks_of(want, count);
                let first = numbers.below(all.len() as u32);
                let chunks = first..first + 1 + numbers.below(all.len() as u32 - first);
                let span = table.span(want, chunks.clone());
                let mut have = Vec::new();
                for piece in &left {
                    let (part, fetched) = part_of(code, &pieces, &table, *piece, &span);
                    if compression == Compression::None {
                        assert!(fetched <= chunks.len() as u32, "{fetched} chunks of {piece} for {chunks:?}");
                    }
                    have.push(part);
                }
                let back = table.rebuild(BLOCK, &have, want, chunks.clone()).unwrap();
                assert_eq!(back.len(), chunks.len());
                for (index, (info, stored)) in (all.start + chunks.start..).zip(&back) {
                    verify_chunk(BLOCK, index, info, stored).unwrap();
                }
            }
        }
    }
}

#[test]
fn each_chunk_is_in_exactly_one_data_piece() {
    for data in 1..=16 {
        let code = Code { data, parity: 2 };
        for count in u32::from(data)..=256 {
            let mut next = 0;
            for piece in 0..data {
                let range = code.chunks_of(piece, count);
                assert!(range.start == next && !range.is_empty());
                assert!(range.clone().all(|chunk| code.piece_of(chunk, count) == piece));
                next = range.end;
            }
            assert_eq!(next, count);
        }
    }
}

#[test]
fn small_blocks_and_codes_of_one_piece_are_not_coded() {
    let code = Code { data: 4, parity: 2 };
    assert!(!code.applies(CODED_MIN - 1) && code.applies(CODED_MIN));
    let wide = Code { data: 8, parity: 3 };
    assert!(!wide.applies(7 << 16) && wide.applies((7 << 16) + 1));
    assert!(!Code { data: 1, parity: 2 }.applies(1 << 20) && !Code { data: 4, parity: 0 }.applies(1 << 20));
}

#[test]
fn a_damaged_piece_does_not_rebuild_into_wrong_bytes() {
    let code = Code { data: 4, parity: 2 };
    let (count, pieces) = split(code, 1 << 20, Compression::None);
    for (bad, at) in [(3, 100), (3, 200_000), (1, 0), (1, 262_143)] {
        let mut have: Vec<(u8, Piece)> =
            [1, 2, 3, 4].map(|n: u8| (n, pieces[usize::from(n)].clone())).to_vec();
        let mut bytes = have[bad].1.payload.to_vec();
        bytes[at] ^= 1;
        have[bad].1.payload = bytes.into();
        assert!(code.rebuild(BLOCK, count, &have, &[0]).is_err(), "byte {at} of {bad}");
        assert!(code.rebuild(BLOCK, count, &have[..3], &[0]).is_err());
    }
    let short: Vec<(u8, Piece)> = [1, 2, 3, 4]
        .map(|n: u8| {
            let piece = &pieces[usize::from(n)];
            (n, Piece { chunks: piece.chunks.clone(), payload: piece.payload.slice(..1000) })
        })
        .to_vec();
    assert!(code.rebuild(BLOCK, count, &short, &[0]).is_err());
}

#[test]
fn tables_that_lie_are_refused() {
    let code = Code { data: 4, parity: 2 };
    let (count, pieces) = split(code, 1 << 20, Compression::Lz4);
    let head = pieces[4].payload.slice(..pieces[4].chunks[0].stored as usize);
    assert!(Table::decode(BLOCK, code, count, &head).is_ok());
    assert!(Table::decode(BLOCK, code, count + 1, &head).is_err());
    assert!(Table::decode(BLOCK, Code { data: 2, parity: 1 }, count, &head).is_err());
    for len in 0..head.len() {
        assert!(Table::decode(BLOCK, code, count, &head[..len]).is_err());
    }
    let mut lie = head.to_vec();
    lie[5..9].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(Table::decode(BLOCK, code, count, &lie).is_err());
}

#[test]
fn chunks_of_pieces_carry_the_numbers_of_the_block() {
    let code = Code { data: 4, parity: 2 };
    let (count, pieces) = split(code, (1 << 20) + 1, Compression::Lz4);
    assert_eq!(count, (1_u32 << 20).div_ceil(CHUNK) + 1);
    for (n, piece) in (0..).zip(&pieces) {
        let mut at = 0;
        for (index, info) in (code.first_index(n, count)..).zip(&piece.chunks) {
            let end = at + info.stored as usize;
            verify_chunk(BLOCK, index, info, &piece.payload[at..end]).unwrap();
            at = end;
        }
        assert_eq!(at, piece.payload.len());
    }
}
