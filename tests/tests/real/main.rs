//! Real processes under test, a module per topic. See CONTRIBUTING.md for how to run one, and on what.

mod posix;
mod tidy;
