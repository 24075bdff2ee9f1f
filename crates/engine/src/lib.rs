//! The ordered log of metadata batches and its local replica; synchronous.
