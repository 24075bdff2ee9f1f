//! The open `/dev/fuse`: requests are read from it whole, replies and notifications written whole.
//!
//! # Invariants
//! - One descriptor for all threads: requests read from a cloned one end when it closes, so a mount could not outlive
//!   its agent.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::Bytes;

use super::reply::{Body, Reply, out_header};

/// The open device of one mount.
#[derive(Debug)]
pub struct Device(File);

/// What one read of the device brought.
#[derive(Debug)]
pub enum Received {
    /// A request of this many bytes.
    Request(usize),
    /// Nothing this time; read again.
    Nothing,
    /// The mount is gone.
    Ended,
}

/// What became of a reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent {
    /// The kernel took it.
    Delivered,
    /// The kernel no longer waits for it.
    Unwanted,
}

/// The kernel takes at most this many parts in one write.
const PARTS_MAX: usize = 1000;

impl Device {
    /// Takes over a descriptor of `/dev/fuse` on which a mount was made.
    pub fn new(fd: OwnedFd) -> Device {
        Device(File::from(fd))
    }

    /// Waits for the next request.
    pub fn receive(&self, room: &mut [u8]) -> io::Result<Received> {
        match (&self.0).read(room) {
            Ok(0) => Ok(Received::Ended),
            Ok(len) => Ok(Received::Request(len)),
            Err(error) => match error.raw_os_error() {
                // ENOENT: the request was aborted while it was being read.
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => Ok(Received::Nothing),
                Some(libc::ENODEV | libc::ECONNABORTED) => Ok(Received::Ended),
                _ => Err(error),
            },
        }
    }

    /// Answers a request.
    pub fn reply(&self, unique: u64, reply: &Reply) -> io::Result<Sent> {
        let sent = match &reply.body {
            Body::Error(errno) => self.send(-errno, unique, &[]),
            Body::Fixed(bytes) => self.send(0, unique, &[bytes]),
            Body::Data(parts) => self.send_parts(0, unique, &[], parts),
        };
        match sent {
            Ok(()) => Ok(Sent::Delivered),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED) => Ok(Sent::Unwanted),
                _ => Err(error),
            },
        }
    }

    /// Sends a notification: a code, a fixed part and perhaps data.
    pub fn notify(&self, code: i32, fixed: &[u8], data: &[Bytes]) -> io::Result<()> {
        self.send_parts(code, 0, fixed, data)
    }

    fn send_parts(&self, error: i32, unique: u64, fixed: &[u8], data: &[Bytes]) -> io::Result<()> {
        if data.len() > PARTS_MAX {
            return self.send(error, unique, &[fixed, &data.concat()]);
        }
        let len = fixed.len() + data.iter().map(Bytes::len).sum::<usize>();
        let header = out_header(len, error, unique);
        let mut parts = Vec::with_capacity(data.len() + 2);
        parts.push(IoSlice::new(&header));
        parts.push(IoSlice::new(fixed));
        parts.extend(data.iter().map(|part| IoSlice::new(part)));
        self.write(&parts)
    }

    fn send(&self, error: i32, unique: u64, parts: &[&[u8]]) -> io::Result<()> {
        let header = out_header(parts.iter().map(|part| part.len()).sum(), error, unique);
        match parts {
            [] => self.write(&[IoSlice::new(&header)]),
            [one] => self.write(&[IoSlice::new(&header), IoSlice::new(one)]),
            [one, two, ..] => self.write(&[IoSlice::new(&header), IoSlice::new(one), IoSlice::new(two)]),
        }
    }

    fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        // The kernel takes a message whole or not at all.
        (&self.0).write_vectored(parts).map(|_| ())
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
