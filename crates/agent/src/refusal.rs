//! Which errno a fault becomes, and which faults a person should read about.
//!
//! A program only gets a number; what happened and what to do about it would be lost. So faults that are not part of
//! everyday life are logged, but not more often than once a second: a dead server fails thousands of operations.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use torchfs_proto::{Code, Fault};

/// Turns faults into errnos.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    began: OnceLock<Instant>,
    /// The second after `began`, plus one, in which a fault was logged last.
    last_s: AtomicU64,
    /// Faults since then that were not.
    unheard: AtomicU64,
}

impl Refusals {
    /// The errno for the program; the log may hear of the fault, too.
    pub(crate) fn errno(&self, fault: &Fault) -> i32 {
        if is_trouble(fault.code) {
            self.log(fault);
        }
        errno(fault.code)
    }

    fn log(&self, fault: &Fault) {
        let now_s = self.began.get_or_init(Instant::now).elapsed().as_secs() + 1;
        if self.last_s.swap(now_s, Ordering::Relaxed) == now_s {
            self.unheard.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let unheard = self.unheard.swap(0, Ordering::Relaxed);
        tracing::warn!(code = ?fault.code, unheard, "an operation failed: {fault}");
    }
}

/// What the program sees.
fn errno(code: Code) -> i32 {
    match code {
        // "Try again" means something to programs that is not meant here: these were tried again below, in vain.
        Code::Overloaded | Code::StalePlacement => libc::EIO,
        // Who cancels is the one who was signalled.
        Code::Cancelled => libc::EINTR,
        code => code.errno(),
    }
}

/// Whether something is broken, rather than asked in vain.
fn is_trouble(code: Code) -> bool {
    matches!(
        code,
        Code::NoSpace
            | Code::Io
            | Code::Corrupt
            | Code::Gone
            | Code::NoSession
            | Code::Fenced
            | Code::NotLeader
            | Code::Grace
            | Code::Timeout
            | Code::Unreachable
            | Code::Overloaded
            | Code::StalePlacement
            | Code::Denied
            | Code::Version
            | Code::Protocol
            | Code::Internal
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_an_errno_the_kernel_takes() {
        for &code in Code::ALL {
            assert!((1..512).contains(&errno(code)), "{code:?}");
        }
    }

    #[test]
    fn only_locks_say_try_again() {
        for &code in Code::ALL {
            assert_eq!(errno(code) == libc::EAGAIN, code == Code::WouldBlock, "{code:?}");
        }
    }
}
