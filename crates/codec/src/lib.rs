//! The bytes of a block: chunks, checksums, compression; pure.
