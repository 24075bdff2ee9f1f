//! INIT: what we ask of the kernel and what we insist on.
//!
//! The kernel offers features, we answer with those we want. A few are promises the rest of the crate rests on (the
//! long form of SETXATTR is decoded without asking again); a kernel without them is refused with a sentence.
//!
//! # Invariants
//! - The reply never names a feature the kernel did not offer.

use super::abi::{VERSION_MAJOR, VERSION_MINOR, VERSION_MINOR_MIN, feature};
use super::reply::{Reply, put_u16, put_u32};
use super::request::Init;

/// What we would like, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Largest WRITE payload and largest READ, in bytes; a multiple of the page size.
    pub max_write: u32,
    /// How far the kernel may read ahead, in bytes.
    pub max_readahead: u32,
    /// How many requests nobody waits for (readahead, asynchronous direct I/O) may be under way.
    pub max_background: u16,
    /// Let the kernel gather writes in its page cache. It then decides sizes and times on its own, which two mounts of
    /// one volume cannot live with; for tests and single-mount use.
    pub writeback_cache: bool,
}

/// What was agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The smaller of both minor versions.
    pub minor: u32,
    /// Features in force.
    pub features: u64,
    /// Largest WRITE payload.
    pub max_write: u32,
}

impl Agreed {
    /// Whether all these features are in force.
    pub fn has(&self, features: u64) -> bool {
        self.features & features == features
    }
}

/// Why the kernel and we cannot work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// Another or too old a version of the protocol.
    #[error(
        "the kernel speaks FUSE {major}.{minor}, which is older than 7.{VERSION_MINOR_MIN}; use Linux 5.17 or newer"
    )]
    Version {
        /// The kernel's major version.
        major: u32,
        /// The kernel's minor version.
        minor: u32,
    },
    /// Features this crate rests on are missing.
    #[error("the kernel's FUSE lacks needed features ({missing:#x}); use Linux 5.17 or newer")]
    Features {
        /// The missing bits.
        missing: u64,
    },
}

/// Features without which requests would be read wrongly or promises broken.
const NEEDED: u64 = feature::BIG_WRITES
    | feature::POSIX_LOCKS
    | feature::FLOCK_LOCKS
    | feature::MAX_PAGES
    | feature::HANDLE_KILLPRIV_V2
    | feature::SETXATTR_EXT
    | feature::INIT_EXT;

/// Features taken where offered. Not among them, on purpose: ATOMIC_O_TRUNC (truncation is a SETATTR like any other),
/// AUTO_INVAL_DATA (we say ourselves when data changed), EXPLICIT_INVAL_DATA (whenever the kernel learns of another length it
/// zeroes what its pages hold beyond that; it must then drop them, or a length that was overtaken leaves zeros in a page that
/// held newer bytes), POSIX_ACL (refused, see docs/semantics.md), DONT_MASK (the kernel applies the umask).
const WANTED: u64 = feature::ASYNC_READ
    | feature::EXPORT_SUPPORT
    | feature::DO_READDIRPLUS
    | feature::READDIRPLUS_AUTO
    | feature::ASYNC_DIO
    | feature::PARALLEL_DIROPS
    | feature::CACHE_SYMLINKS
    | feature::HAS_EXPIRE_ONLY
    | feature::DIRECT_IO_ALLOW_MMAP
    | feature::HAS_RESEND;

const PAGE: u32 = 4096;

/// Answers INIT: the reply to send and what holds from then on.
pub fn negotiate(init: &Init, wish: &Wish) -> Result<(Reply, Agreed), Unfit> {
    if init.major != VERSION_MAJOR || init.minor < VERSION_MINOR_MIN {
        return Err(Unfit::Version { major: init.major, minor: init.minor });
    }
    let missing = NEEDED & !init.features;
    if missing != 0 {
        return Err(Unfit::Features { missing });
    }
    let writeback = if wish.writeback_cache { feature::WRITEBACK_CACHE } else { 0 };
    let features = (NEEDED | WANTED | writeback) & init.features;
    let max_pages = (wish.max_write.div_ceil(PAGE)).clamp(1, 4096);
    let agreed = Agreed { minor: init.minor.min(VERSION_MINOR), features, max_write: wish.max_write };

    let mut out = Vec::with_capacity(64);
    put_u32(&mut out, VERSION_MAJOR);
    put_u32(&mut out, VERSION_MINOR);
    put_u32(&mut out, init.max_readahead.min(wish.max_readahead));
    put_u32(&mut out, features as u32);
    put_u16(&mut out, wish.max_background);
    put_u16(&mut out, wish.max_background - wish.max_background / 4);
    put_u32(&mut out, wish.max_write);
    put_u32(&mut out, 1); // granularity of times: a nanosecond
    put_u16(&mut out, max_pages as u16);
    put_u16(&mut out, 0);
    put_u32(&mut out, (features >> 32) as u32);
    out.resize(64, 0); // no stacking, no request timeout, the rest is reserved
    Ok((Reply::fixed(out), agreed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::reply::Body;

    const WISH: Wish =
        Wish { max_write: 1 << 20, max_readahead: 8 << 20, max_background: 64, writeback_cache: false };
    const KERNEL: Init = Init { major: 7, minor: 45, max_readahead: 128 << 10, features: u64::MAX };

    #[test]
    fn only_what_was_offered_is_taken() {
        let offered = NEEDED | feature::ASYNC_READ | feature::POSIX_ACL;
        let (_, agreed) = negotiate(&Init { features: offered, ..KERNEL }, &WISH).unwrap();
        assert_eq!(agreed.features, NEEDED | feature::ASYNC_READ);
    }

    #[test]
    fn what_changes_meaning_is_left_alone_unless_asked_for() {
        let (_, agreed) = negotiate(&KERNEL, &WISH).unwrap();
        for unwanted in [
            feature::WRITEBACK_CACHE,
            feature::AUTO_INVAL_DATA,
            feature::EXPLICIT_INVAL_DATA,
            feature::ATOMIC_O_TRUNC,
            feature::POSIX_ACL,
            feature::DONT_MASK,
        ] {
            assert!(!agreed.has(unwanted), "{unwanted:#x}");
        }
        let (_, agreed) = negotiate(&KERNEL, &Wish { writeback_cache: true, ..WISH }).unwrap();
        assert!(agreed.has(feature::WRITEBACK_CACHE));
    }

    #[test]
    fn a_kernel_that_cannot_do_it_is_refused_with_a_sentence() {
        let old = negotiate(&Init { minor: 31, ..KERNEL }, &WISH).unwrap_err();
        assert!(old.to_string().contains("7.31"), "{old}");
        let poor = negotiate(&Init { features: !feature::SETXATTR_EXT, ..KERNEL }, &WISH).unwrap_err();
        assert_eq!(poor, Unfit::Features { missing: feature::SETXATTR_EXT });
    }

    #[test]
    fn the_reply_has_every_field_in_its_place() {
        let (reply, _) = negotiate(&KERNEL, &WISH).unwrap();
        let Body::Fixed(out) = reply.body else { panic!("{reply:?}") };
        assert_eq!(out.len(), 64);
        assert_eq!(out[..4], 7u32.to_ne_bytes());
        assert_eq!(out[8..12], (128u32 << 10).to_ne_bytes());
        assert_eq!(out[16..18], 64u16.to_ne_bytes());
        assert_eq!(out[18..20], 48u16.to_ne_bytes());
        assert_eq!(out[20..24], (1u32 << 20).to_ne_bytes());
        assert_eq!(out[24..28], 1u32.to_ne_bytes());
        assert_eq!(out[28..30], 256u16.to_ne_bytes());
        assert_eq!(
            out[32..36],
            ((feature::HAS_RESEND | feature::DIRECT_IO_ALLOW_MMAP | feature::HAS_EXPIRE_ONLY) >> 32)
                .to_ne_bytes()[..4]
        );
    }
}
