//! The metadata service: namespace, sessions, leases, members.
