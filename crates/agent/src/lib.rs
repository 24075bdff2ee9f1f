//! The node agent: the FUSE mount over vfs.
