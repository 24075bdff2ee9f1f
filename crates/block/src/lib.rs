//! The data server: immutable blocks in recycled segments on local disks.
