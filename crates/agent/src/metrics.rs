//! What the agent counts. Handles are looked up once: a request should not pay for its own bookkeeping.

use std::sync::LazyLock;

use ::metrics::{Counter, counter, describe_counter};

use crate::fuse::abi::op;

/// One request came from the kernel.
pub(crate) fn request(opcode: u32) {
    static BY_OP: LazyLock<Vec<Counter>> = LazyLock::new(|| {
        describe_counter!("torchfs_fuse_requests_total", "Requests from the kernel, by operation");
        (0..=op::COPY_FILE_RANGE_64)
            .map(|op| counter!("torchfs_fuse_requests_total", "op" => name(op)))
            .collect()
    });
    // Opcode 0 does not exist; what is unknown is counted there.
    let index = if opcode <= op::COPY_FILE_RANGE_64 { opcode as usize } else { 0 };
    BY_OP[index].increment(1);
}

macro_rules! counters {
    ($($function:ident $name:literal $meaning:literal;)*) => {$(
        #[doc = $meaning]
        pub(crate) fn $function() -> &'static Counter {
            static COUNTER: LazyLock<Counter> = LazyLock::new(|| {
                describe_counter!($name, $meaning);
                counter!($name)
            });
            &COUNTER
        }
    )*};
}

counters! {
    errors "torchfs_fuse_errors_total" "Replies to the kernel that carry an errno";
    moved "torchfs_fuse_moved_total" "Requests that had to wait and were moved into a task";
    full "torchfs_fuse_full_total" "Times a reader waited because too many operations were under way";
    interrupts "torchfs_fuse_interrupts_total" "Signals to processes that waited for a reply";
    malformed "torchfs_fuse_malformed_total" "Requests that could not be decoded";
    notices "torchfs_fuse_notices_total" "Notifications sent to the kernel";
}

fn name(opcode: u32) -> &'static str {
    match opcode {
        op::LOOKUP => "lookup",
        op::FORGET | op::BATCH_FORGET => "forget",
        op::GETATTR | op::STATX => "getattr",
        op::SETATTR => "setattr",
        op::READLINK => "readlink",
        op::SYMLINK => "symlink",
        op::MKNOD => "mknod",
        op::MKDIR => "mkdir",
        op::UNLINK => "unlink",
        op::RMDIR => "rmdir",
        op::RENAME | op::RENAME2 => "rename",
        op::LINK => "link",
        op::OPEN => "open",
        op::READ => "read",
        op::WRITE => "write",
        op::STATFS => "statfs",
        op::RELEASE => "release",
        op::FSYNC => "fsync",
        op::SETXATTR => "setxattr",
        op::GETXATTR => "getxattr",
        op::LISTXATTR => "listxattr",
        op::REMOVEXATTR => "removexattr",
        op::FLUSH => "flush",
        op::INIT => "init",
        op::OPENDIR => "opendir",
        op::READDIR => "readdir",
        op::READDIRPLUS => "readdirplus",
        op::RELEASEDIR => "releasedir",
        op::FSYNCDIR => "fsyncdir",
        op::GETLK => "getlk",
        op::SETLK | op::SETLKW => "setlk",
        op::ACCESS => "access",
        op::CREATE => "create",
        op::INTERRUPT => "interrupt",
        op::DESTROY => "destroy",
        op::FALLOCATE => "fallocate",
        op::LSEEK => "lseek",
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => "copy_file_range",
        op::SYNCFS => "syncfs",
        op::TMPFILE => "tmpfile",
        _ => "other",
    }
}
