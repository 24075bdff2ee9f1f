//! Names of dumps of the metadata, as data servers keep them.
//!
//! # Invariants
//! - The order of names is the order of the states: a later incarnation is later, whatever the clocks said.
//! - A name as text has one form only; text of any other form is no name.

use std::fmt;
use std::str::FromStr;

use minicbor::{Decode, Encode};

use crate::{Incarnation, Seq};

/// One dump.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Encode, Decode)]
pub struct DumpName {
    /// The incarnation of the metadata that made it.
    #[n(0)]
    pub incarnation: Incarnation,
    /// The last batch ordered when it was begun.
    #[n(1)]
    pub seq: Seq,
    /// When it was begun, in milliseconds since 1970.
    #[n(2)]
    pub wall_ms: u64,
}

impl fmt::Display for DumpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dump-{:08x}-{:016x}-{:016x}", self.incarnation.0, self.seq.0, self.wall_ms)
    }
}

/// Text that is no name of a dump.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoDumpName;

impl FromStr for DumpName {
    type Err = NoDumpName;

    fn from_str(text: &str) -> Result<DumpName, NoDumpName> {
        let mut parts = text.strip_prefix("dump-").ok_or(NoDumpName)?.split('-');
        let mut number = || {
            let part = parts.next().ok_or(NoDumpName)?;
            u64::from_str_radix(part, 16).map_err(|_| NoDumpName)
        };
        let (incarnation, seq, wall_ms) = (number()?, number()?, number()?);
        let incarnation = Incarnation(u32::try_from(incarnation).map_err(|_| NoDumpName)?);
        let name = DumpName { incarnation, seq: Seq(seq), wall_ms };
        // One form only: what reads as a name and is written otherwise is another file's.
        if name.to_string() == text { Ok(name) } else { Err(NoDumpName) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_keep_their_order() {
        let name = |incarnation, seq, wall_ms| DumpName {
            incarnation: Incarnation(incarnation),
            seq: Seq(seq),
            wall_ms,
        };
        let first = name(3, 0xffff, 900);
        assert_eq!(first.to_string(), "dump-00000003-000000000000ffff-0000000000000384");
        assert_eq!(first.to_string().parse(), Ok(first));
        for later in [name(3, 0x10000, 5), name(4, 1, 5), name(3, 0xffff, 901)] {
            assert!(later > first && later.to_string() > first.to_string());
        }
        for text in [
            "",
            "dump-",
            "dump-3-ffff-384",
            "dump-00000003-000000000000FFFF-0000000000000384",
            "dump-00000003",
        ] {
            assert_eq!(text.parse::<DumpName>(), Err(NoDumpName), "{text}");
        }
        let long = format!("{first}-0");
        assert_eq!(long.parse::<DumpName>(), Err(NoDumpName));
    }
}
