//! The two disks behind the seam: the local one and one whose power can be cut.
