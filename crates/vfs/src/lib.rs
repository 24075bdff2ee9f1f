//! POSIX meaning without FUSE: handles, leases, the write path.
