//! What goes in comes out, and nothing else does.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use torchfs_codec::{
    CHUNK, ChunkInfo, Compression, Error, MAX_BLOCK, checksum, chunks_of, codec, decode_chunk, encode,
    stored_range,
};
use torchfs_fuzz::Counting;
use torchfs_proto::BlockId;

#[global_allocator]
static MEMORY: Counting = Counting;

const BLOCK: BlockId = BlockId { incarnation: 3, counter: 77 };
const ALL: [Compression; 3] = [Compression::None, Compression::Lz4, Compression::Zstd(3)];

/// Bytes that no compressor shrinks, the same for the same seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()
    })
    .flatten()
    .take(len)
    .collect()
}

fn text(len: usize) -> Vec<u8> {
    (0u32..).flat_map(|i| format!("line {i} of a training log\n").into_bytes()).take(len).collect()
}

/// Cuts bytes into parts of a changing length.
fn parts(bytes: Vec<u8>, step: usize) -> Vec<Bytes> {
    let mut rest = Bytes::from(bytes);
    let mut parts = Vec::new();
    let mut n = step;
    while !rest.is_empty() {
        parts.push(rest.split_to(n.min(rest.len())));
        n = n * 3 % 100_003 + 1;
    }
    parts
}

fn round_trip(content: &[u8], step: usize, compression: Compression) {
    let encoded = encode(BLOCK, &parts(content.to_vec(), step), compression).unwrap();
    assert_eq!(encoded.chunks.len(), content.len().div_ceil(CHUNK as usize));
    let stored = Bytes::from(encoded.payload.concat());
    assert_eq!(stored.len() as u64, encoded.stored());
    let mut out = Vec::new();
    for (index, info) in encoded.chunks.iter().enumerate() {
        let range = stored_range(&encoded.chunks, index..index + 1);
        let bytes = stored.slice(range.start as usize..range.end as usize);
        out.extend_from_slice(&decode_chunk(BLOCK, index as u32, info, bytes).unwrap());
    }
    assert!(out == content, "{} bytes in parts of {step} with {compression:?}", content.len());
}

#[test]
fn what_goes_in_comes_out() {
    let mut mixed = noise(1, 150_000);
    mixed.extend(text(200_000));
    mixed.extend(noise(2, 300_000));
    mixed.extend(vec![0; 100_000]);
    for compression in ALL {
        for content in
            [vec![], vec![7], text(100), noise(3, 65_536), text(65_537), text(1 << 20), mixed.clone()]
        {
            for step in [1, 1_000, 65_536, 1 << 24] {
                round_trip(&content, step, compression);
            }
        }
    }
}

#[test]
fn text_shrinks_and_noise_is_left_alone() {
    for compression in [Compression::Lz4, Compression::Zstd(1)] {
        let packed = encode(BLOCK, &[text(1 << 20).into()], compression).unwrap();
        assert!(packed.stored() < (1 << 19));
        assert!(packed.chunks.iter().all(|c| c.codec != codec::RAW));
        let raw = encode(BLOCK, &[noise(1, 1 << 20).into()], compression).unwrap();
        assert!(raw.chunks.iter().all(|c| c.codec == codec::RAW));
    }
}

#[test]
fn bytes_that_stay_raw_are_not_copied() {
    let input = Bytes::from(noise(5, 3 * CHUNK as usize + 100));
    let encoded = encode(BLOCK, std::slice::from_ref(&input), Compression::Lz4).unwrap();
    assert_eq!(encoded.payload.len(), 1);
    assert_eq!(encoded.payload[0].as_ptr(), input.as_ptr());
    let first = encoded.payload[0].slice(..CHUNK as usize);
    assert_eq!(decode_chunk(BLOCK, 0, &encoded.chunks[0], first).unwrap().as_ptr(), input.as_ptr());
}

#[test]
fn every_flipped_bit_is_found() {
    for compression in ALL {
        let encoded = encode(BLOCK, &[text(3_000).into()], compression).unwrap();
        let stored = encoded.payload.concat();
        for bit in 0..stored.len() * 8 {
            let mut broken = stored.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            let got = decode_chunk(BLOCK, 0, &encoded.chunks[0], broken.into());
            assert!(matches!(got, Err(Error::Corrupt { .. })), "bit {bit} with {compression:?}");
        }
    }
}

#[test]
fn a_chunk_of_another_block_or_place_never_passes() {
    let content = noise(9, CHUNK as usize);
    let stored = Bytes::from(content);
    let encoded = encode(BLOCK, std::slice::from_ref(&stored), Compression::None).unwrap();
    let info = &encoded.chunks[0];
    assert!(decode_chunk(BLOCK, 0, info, stored.clone()).is_ok());
    assert!(decode_chunk(BLOCK, 1, info, stored.clone()).is_err());
    let other = BlockId { counter: 78, ..BLOCK };
    assert!(decode_chunk(other, 0, info, stored.clone()).is_err());
    let other = BlockId { incarnation: 4, ..BLOCK };
    assert!(decode_chunk(other, 0, info, stored).is_err());
}

#[test]
fn infos_that_lie_about_lengths_and_codecs_are_refused() {
    for compression in ALL {
        let encoded = encode(BLOCK, &[text(9_000).into()], compression).unwrap();
        let stored = Bytes::from(encoded.payload.concat());
        let good = encoded.chunks[0];
        for raw in [0, 1, 8_999, 9_001, CHUNK, CHUNK + 1, u32::MAX] {
            let info = torchfs_codec::ChunkInfo { raw, ..good };
            assert!(decode_chunk(BLOCK, 0, &info, stored.clone()).is_err(), "raw {raw} with {compression:?}");
        }
        for codec in (0..=255).filter(|codec| *codec != good.codec) {
            let info = torchfs_codec::ChunkInfo { codec, ..good };
            assert!(
                decode_chunk(BLOCK, 0, &info, stored.clone()).is_err(),
                "codec {codec} with {compression:?}"
            );
        }
        let shorter = stored.slice(..stored.len() - 1);
        assert!(decode_chunk(BLOCK, 0, &good, shorter).is_err());
    }
}

#[test]
fn a_block_has_a_limit() {
    let most = Bytes::from(vec![0; MAX_BLOCK as usize]);
    assert!(encode(BLOCK, std::slice::from_ref(&most), Compression::Lz4).is_ok());
    let more = [most, Bytes::from_static(b"x")];
    assert!(matches!(encode(BLOCK, &more, Compression::None), Err(Error::TooLarge { .. })));
}

#[test]
fn ranges_name_the_chunks_that_cover_them() {
    let chunk = u64::from(CHUNK);
    assert_eq!(chunks_of(0..0), 0..0);
    assert_eq!(chunks_of(0..1), 0..1);
    assert_eq!(chunks_of(0..chunk), 0..1);
    assert_eq!(chunks_of(chunk - 1..chunk + 1), 0..2);
    assert_eq!(chunks_of(5 * chunk..5 * chunk + 4096), 5..6);
}

#[test]
fn any_bytes_give_a_chunk_or_an_error() {
    for compression in ALL {
        let encoded = encode(BLOCK, &[text(60_000).into()], compression).unwrap();
        let info = encoded.chunks[0];
        let sample: Vec<u8> = encoded.payload.iter().flat_map(|part| part.to_vec()).collect();
        torchfs_fuzz::Fuzz::rounds(10_000).run(&[sample], |bytes| {
            // The checksum is made good again, so that the damage reaches the library that unpacks.
            let crc = checksum(BLOCK, 0, [bytes]);
            let info = ChunkInfo { stored: bytes.len() as u32, crc, ..info };
            decode_chunk(BLOCK, 0, &info, bytes.to_vec().into())
                .is_ok_and(|raw| raw.len() == info.raw as usize)
        });
    }
}
