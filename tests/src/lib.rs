//! The harness for real processes under test.
