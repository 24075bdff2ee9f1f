//! Typed calls to other processes: Meta, Blocks.
