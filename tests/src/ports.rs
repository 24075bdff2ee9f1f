//! Ports that no other test and no outgoing connection takes.
//!
//! The idea: ports below the kernel's ephemeral range are never handed to an outgoing connection, so a server that is
//! killed and started again finds its port free. A lock file per port keeps tests of other processes off it.

use std::fs::{File, OpenOptions};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// A port on 127.0.0.1, held until this is dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _lock: File,
}

impl Port {
    /// Takes a free one.
    pub fn reserve() -> Port {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = std::env::temp_dir().join("torchfs-test-ports");
        std::fs::create_dir_all(&folder).expect("the temporary folder takes folders");
        let start = std::process::id().wrapping_mul(131);
        for _ in 0..10_000 {
            let number = 20_000 + ((start + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000) as u16;
            let lock = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(folder.join(number.to_string()))
                .expect("the temporary folder takes files");
            if sys::try_flock(lock.as_raw_fd())
                && TcpListener::bind(("127.0.0.1", number)).is_ok()
                && TcpStream::connect(("127.0.0.1", number)).is_err()
            {
                return Port { number, _lock: lock };
            }
        }
        panic!("no port below the ephemeral range is free")
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }
}
