//! The one binary of TorchFS.

fn main() {}
