//! Sums of multiples of shards: the arithmetic below the code.
//!
//! The parity shards are those of `reed-solomon-simd`: each is a sum of multiples of the data shards in GF(2^16), and a row of
//! factors tells which. Bringing shards back is a sum of the same kind, with factors from the inverse of a small matrix.
//! The crate's own decoder finds them anew for each call, which costs as much as decoding a megabyte; so the factors are
//! computed here, from its tables, and its vector instructions do the bulk.
//!
//! # Invariants
//! - Byte `i` of a sum depends on the bytes of the same group of [`LANE`] alone: any run of whole groups can be computed apart.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use reed_solomon_simd::ReedSolomonEncoder;
use reed_solomon_simd::engine::{DefaultEngine, Engine, GF_MODULUS, GfElement, tables, utils};

use super::Code;

/// Bytes that are computed together: the code's 16-bit numbers have their low halves in the first half, their high ones in the
/// second.
pub(super) const LANE: usize = 64;
/// So many groups are summed up at a time, to stay in the nearest cache.
const STRIP: usize = 64;
/// Codes whose factors are remembered.
const CODES_MAX: usize = 64;

/// A row of factors, one for each shard that a sum is made of.
pub(super) type Factors = Vec<GfElement>;

static ENGINE: LazyLock<DefaultEngine> = LazyLock::new(DefaultEngine::new);

/// The rows by which the wanted shards follow from those that are there. `None` if these do not suffice.
pub(super) fn rows(code: Code, have: &[u8], want: &[u8]) -> Option<Vec<Factors>> {
    let data = usize::from(code.data);
    if have.len() != data || want.iter().chain(have).any(|piece| usize::from(*piece) >= code.width()) {
        return None;
    }
    let parity = parity_rows(code)?;
    // Each shard that is there, as a sum of data shards; their inverse gives the data shards as sums of what is there.
    let row = |piece: u8| match usize::from(piece) {
        n if n < data => (0..data).map(|i| u16::from(i == n)).collect(),
        n => parity[n - data].clone(),
    };
    let back = invert(have.iter().map(|piece| row(*piece)).collect())?;
    let wanted = |piece: &u8| {
        let row = row(*piece);
        (0..data).map(|i| (0..data).fold(0, |sum, n| sum ^ mul(row[n], back[n][i]))).collect()
    };
    Some(want.iter().map(wanted).collect())
}

/// The sum of the shards, each times its factor. All are as long as `out`.
pub(super) fn sum(out: &mut [[u8; LANE]], factors: &[GfElement], shards: &[&[[u8; LANE]]]) {
    let log = &tables::get_exp_log().log;
    let mut product = vec![[0; LANE]; STRIP.min(out.len())];
    for (strip, out) in out.chunks_mut(STRIP).enumerate() {
        for (factor, shard) in factors.iter().zip(shards) {
            let shard = &shard[strip * STRIP..strip * STRIP + out.len()];
            match factor {
                0 => {}
                1 => utils::xor(out, shard),
                factor => {
                    let product = &mut product[..out.len()];
                    product.copy_from_slice(shard);
                    ENGINE.mul(product, log[usize::from(*factor)]);
                    utils::xor(out, product);
                }
            }
        }
    }
}

/// The factors of the parity shards, read off what the encoder makes of single ones.
fn parity_rows(code: Code) -> Option<Arc<Vec<Factors>>> {
    static KNOWN: LazyLock<Mutex<HashMap<Code, Arc<Vec<Factors>>>>> = LazyLock::new(Mutex::default);
    if let Some(rows) = KNOWN.lock().get(&code) {
        return Some(rows.clone());
    }
    let mut rows = vec![Vec::with_capacity(code.data.into()); code.parity.into()];
    let mut encoder = ReedSolomonEncoder::new(code.data.into(), code.parity.into(), LANE).ok()?;
    for one in 0..code.data {
        for n in 0..code.data {
            let mut shard = [0; LANE];
            shard[0] = u8::from(n == one);
            encoder.add_original_shard(shard).ok()?;
        }
        let result = encoder.encode().ok()?;
        for (row, shard) in rows.iter_mut().zip(result.recovery_iter()) {
            row.push(u16::from_le_bytes([shard[0], shard[LANE / 2]]));
        }
    }
    let rows = Arc::new(rows);
    let mut known = KNOWN.lock();
    if known.len() >= CODES_MAX {
        known.clear();
    }
    known.insert(code, rows.clone());
    Some(rows)
}

fn mul(a: GfElement, b: GfElement) -> GfElement {
    let tables = tables::get_exp_log();
    if b == 0 { 0 } else { tables::mul(a, tables.log[usize::from(b)], &tables.exp, &tables.log) }
}

fn inverse(a: GfElement) -> GfElement {
    let tables = tables::get_exp_log();
    tables.exp[usize::from(GF_MODULUS - tables.log[usize::from(a)])]
}

/// The inverse of a square matrix, by elimination.
fn invert(mut left: Vec<Factors>) -> Option<Vec<Factors>> {
    let n = left.len();
    let mut right: Vec<Factors> = (0..n).map(|i| (0..n).map(|j| u16::from(i == j)).collect()).collect();
    for column in 0..n {
        let pivot = (column..n).find(|row| left[*row][column] != 0)?;
        left.swap(column, pivot);
        right.swap(column, pivot);
        let by = inverse(left[column][column]);
        for side in [&mut left, &mut right] {
            side[column].iter_mut().for_each(|x| *x = mul(*x, by));
        }
        for row in (0..n).filter(|row| *row != column) {
            let by = left[row][column];
            for side in [&mut left, &mut right] {
                let pivot = side[column].clone();
                side[row].iter_mut().zip(pivot).for_each(|(x, p)| *x ^= mul(p, by));
            }
        }
    }
    Some(right)
}
