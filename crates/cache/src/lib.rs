//! What this node keeps of blocks, and the one fetch in flight for each piece.
