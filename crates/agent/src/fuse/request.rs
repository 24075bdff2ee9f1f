//! Requests of the kernel, decoded: every length is checked, nothing is copied.
//!
//! The kernel is trusted more than a peer on the wire, but a request that does not hold what its opcode needs is
//! answered with an error and never read past its end.
//!
//! # Invariants
//! - [`Request::decode`] is total: any bytes give a request or a [`Malformed`].
//! - A `name` is not empty, holds no NUL and is at most [`abi::NAME_MAX`] long.

use super::abi::{self, op};

/// One request: who asks, about which inode, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The part every request has.
    pub header: Header,
    /// What is asked.
    pub op: Op<'a>,
}

/// The part every request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The whole length, header included.
    pub len: u32,
    /// The opcode as sent.
    pub opcode: u32,
    /// Names the request in its reply and in an INTERRUPT.
    pub unique: u64,
    /// The inode the request is about.
    pub nodeid: u64,
    /// File-system user of the caller.
    pub uid: u32,
    /// File-system group of the caller.
    pub gid: u32,
    /// The caller's process; 0 when the kernel itself asks.
    pub pid: u32,
}

impl Header {
    /// Whether the kernel handed this request out before (see the notification RESEND).
    pub fn resent(&self) -> bool {
        self.unique & abi::UNIQUE_RESEND != 0
    }
}

/// A point in time as the kernel sends it: seconds may lie before 1970, nanoseconds count upward from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    /// Seconds since 1970, negative before.
    pub secs: i64,
    /// Nanoseconds after `secs`, below 10^9.
    pub nanos: u32,
}

/// A time in SETATTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// This time.
    At(Time),
}

/// SETATTR: what is `None` stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SetAttr {
    /// Permission bits and set-id bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Truncate or grow to this length.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Change time; sent only when the kernel keeps times itself.
    pub ctime: Option<Time>,
    /// The open file this comes through (ftruncate).
    pub fh: Option<u64>,
    /// Who holds locks, for mandatory ones.
    pub lock_owner: Option<u64>,
    /// Clear set-user-id and set-group-id.
    pub kill_suidgid: bool,
}

/// WRITE without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// The open file.
    pub fh: u64,
    /// Where the payload goes; means nothing for O_APPEND.
    pub offset: u64,
    /// The open file's flags (O_APPEND, O_DIRECT, …).
    pub flags: u32,
    /// Who holds locks, for mandatory ones.
    pub lock_owner: Option<u64>,
    /// Pages the kernel writes on its own (mmap): handle and process are a guess.
    pub cached: bool,
    /// Clear set-user-id and set-group-id.
    pub kill_suidgid: bool,
}

/// A byte range with its kind, as GETLK, SETLK and SETLKW carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The open file.
    pub fh: u64,
    /// Who holds it, made up by the kernel: a process for fcntl, an open file for flock.
    pub owner: u64,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` is "to the end".
    pub end: u64,
    /// F_RDLCK, F_WRLCK or F_UNLCK.
    pub kind: u32,
    /// The process, for GETLK of others.
    pub pid: u32,
    /// A flock and not an fcntl lock.
    pub flock: bool,
}

/// What is asked.
#[allow(missing_docs)] // fields are named as in the protocol; where a word needs one, the variant explains it
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op<'a> {
    /// Find an entry and take a reference on its inode.
    Lookup {
        name: &'a [u8],
    },
    /// Give back references on the header's inode. Never answered.
    Forget {
        count: u64,
    },
    /// Give back references on many inodes. Never answered.
    BatchForget {
        rows: Forgets<'a>,
    },
    Getattr {
        fh: Option<u64>,
    },
    /// Attributes in the manner of statx(2), with birth time.
    Statx {
        fh: Option<u64>,
        flags: u32,
        mask: u32,
    },
    Setattr(SetAttr),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    /// RENAME and RENAME2; the header's inode is the old parent.
    Rename {
        name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    /// The header's inode is the new parent.
    Link {
        inode: u64,
        name: &'a [u8],
    },
    Open {
        flags: u32,
        kill_suidgid: bool,
    },
    Read {
        fh: u64,
        offset: u64,
        size: u32,
        flags: u32,
        lock_owner: Option<u64>,
    },
    Write {
        write: Write,
        data: &'a [u8],
    },
    Statfs,
    Release {
        fh: u64,
        flags: u32,
        lock_owner: u64,
        flush: bool,
        flock_unlock: bool,
    },
    Fsync {
        fh: u64,
        data_only: bool,
    },
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
    },
    /// `size` 0 asks for the length only.
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    /// `size` 0 asks for the length only.
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    /// A descriptor of the open file was closed.
    Flush {
        fh: u64,
        lock_owner: u64,
    },
    Init(Init),
    Opendir {
        flags: u32,
    },
    /// READDIR and, with `plus`, READDIRPLUS.
    Readdir {
        fh: u64,
        offset: u64,
        size: u32,
        plus: bool,
    },
    Releasedir {
        fh: u64,
        flags: u32,
    },
    Fsyncdir {
        fh: u64,
        data_only: bool,
    },
    Getlk(Lock),
    /// SETLK and, with `wait`, SETLKW.
    Setlk {
        lock: Lock,
        wait: bool,
    },
    Access {
        mask: u32,
    },
    Create {
        name: &'a [u8],
        flags: u32,
        mode: u32,
        umask: u32,
        kill_suidgid: bool,
    },
    /// O_TMPFILE: an open file without a name.
    Tmpfile {
        flags: u32,
        mode: u32,
        umask: u32,
    },
    /// The caller of that request got a signal. Answered only with EAGAIN, or not at all.
    Interrupt {
        unique: u64,
    },
    /// The mount is going away.
    Destroy,
    Fallocate {
        fh: u64,
        offset: u64,
        length: u64,
        mode: u32,
    },
    Lseek {
        fh: u64,
        offset: u64,
        whence: u32,
    },
    /// `wide` answers with a 64-bit count.
    CopyFileRange {
        fh: u64,
        offset: u64,
        out_inode: u64,
        out_fh: u64,
        out_offset: u64,
        len: u64,
        flags: u64,
        wide: bool,
    },
    Syncfs,
    /// Nothing we serve (BMAP, IOCTL, POLL, …) or nothing we know.
    Other,
}

/// INIT as the kernel sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Init {
    /// The kernel's major version.
    pub major: u32,
    /// The kernel's minor version.
    pub minor: u32,
    /// How far the kernel would read ahead, in bytes.
    pub max_readahead: u32,
    /// What the kernel offers, both words.
    pub features: u64,
}

/// The rows of a BATCH_FORGET: inode and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgets<'a>(&'a [u8]);

impl Forgets<'_> {
    /// Inode and count of each row.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.chunks_exact(16).map(|row| {
            let mut fields = Fields(row);
            (fields.u64().unwrap_or(0), fields.u64().unwrap_or(0))
        })
    }
}

/// A request that does not hold what its opcode needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not even a header, or a header that lies about the length.
    #[error("{have} bytes from the FUSE device are no request (its header claims {claimed})")]
    Header {
        /// Bytes read.
        have: usize,
        /// The header's length field, 0 if there was none.
        claimed: usize,
    },
    /// The header is good, the rest is not.
    #[error("FUSE request {unique} with opcode {opcode} is malformed")]
    Body {
        /// Whom to answer.
        unique: u64,
        /// What it wanted to be.
        opcode: u32,
    },
}

impl<'a> Request<'a> {
    /// Reads one request from exactly the bytes one read of the device returned.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let mut fields = Fields(bytes);
        let (header, extensions) =
            header(&mut fields).ok_or(Malformed::Header { have: bytes.len(), claimed: 0 })?;
        if header.len as usize != bytes.len() {
            return Err(Malformed::Header { have: bytes.len(), claimed: header.len as usize });
        }
        let malformed = Malformed::Body { unique: header.unique, opcode: header.opcode };
        // Extensions sit at the end, in units of eight bytes; we negotiate none but skip them where they come.
        let body = fields.0.len().checked_sub(extensions * 8).ok_or(malformed)?;
        let op = decode_op(&header, Fields(&fields.0[..body])).ok_or(malformed)?;
        Ok(Request { header, op })
    }
}

fn header(fields: &mut Fields<'_>) -> Option<(Header, usize)> {
    let header = Header {
        len: fields.u32()?,
        opcode: fields.u32()?,
        unique: fields.u64()?,
        nodeid: fields.u64()?,
        uid: fields.u32()?,
        gid: fields.u32()?,
        pid: fields.u32()?,
    };
    let extensions = fields.u16()?;
    fields.u16()?;
    Some((header, usize::from(extensions)))
}

fn decode_op<'a>(header: &Header, mut f: Fields<'a>) -> Option<Op<'a>> {
    Some(match header.opcode {
        op::LOOKUP => Op::Lookup { name: f.name()? },
        op::FORGET => Op::Forget { count: f.u64()? },
        op::BATCH_FORGET => {
            let count = f.u32()? as usize;
            f.u32()?;
            Op::BatchForget { rows: Forgets(f.bytes(count.checked_mul(16)?)?) }
        }
        op::GETATTR => {
            let flags = f.u32()?;
            f.u32()?;
            let fh = f.u64()?;
            Op::Getattr { fh: (flags & abi::flag::GETATTR_FH != 0).then_some(fh) }
        }
        op::STATX => {
            let getattr_flags = f.u32()?;
            f.u32()?;
            let fh = f.u64()?;
            let (flags, mask) = (f.u32()?, f.u32()?);
            Op::Statx { fh: (getattr_flags & abi::flag::GETATTR_FH != 0).then_some(fh), flags, mask }
        }
        op::SETATTR => Op::Setattr(setattr(&mut f)?),
        op::READLINK => Op::Readlink,
        op::SYMLINK => Op::Symlink { name: f.name()?, target: f.text()? },
        op::MKNOD => {
            let (mode, rdev, umask) = (f.u32()?, f.u32()?, f.u32()?);
            f.u32()?;
            Op::Mknod { name: f.name()?, mode, rdev, umask }
        }
        op::MKDIR => {
            let (mode, umask) = (f.u32()?, f.u32()?);
            Op::Mkdir { name: f.name()?, mode, umask }
        }
        op::UNLINK => Op::Unlink { name: f.name()? },
        op::RMDIR => Op::Rmdir { name: f.name()? },
        op::RENAME => {
            let new_parent = f.u64()?;
            Op::Rename { name: f.name()?, new_parent, new_name: f.name()?, flags: 0 }
        }
        op::RENAME2 => {
            let (new_parent, flags) = (f.u64()?, f.u32()?);
            f.u32()?;
            Op::Rename { name: f.name()?, new_parent, new_name: f.name()?, flags }
        }
        op::LINK => Op::Link { inode: f.u64()?, name: f.name()? },
        op::OPEN => {
            let (flags, open) = (f.u32()?, f.u32()?);
            Op::Open { flags, kill_suidgid: open & abi::flag::OPEN_KILL_SUIDGID != 0 }
        }
        op::READ => {
            let (fh, offset, size, read) = (f.u64()?, f.u64()?, f.u32()?, f.u32()?);
            let (owner, flags) = (f.u64()?, f.u32()?);
            let lock_owner = (read & abi::flag::READ_LOCKOWNER != 0).then_some(owner);
            Op::Read { fh, offset, size, flags, lock_owner }
        }
        op::WRITE => write(&mut f)?,
        op::STATFS => Op::Statfs,
        op::RELEASE => {
            let (fh, flags, release, lock_owner) = (f.u64()?, f.u32()?, f.u32()?, f.u64()?);
            Op::Release {
                fh,
                flags,
                lock_owner,
                flush: release & abi::flag::RELEASE_FLUSH != 0,
                flock_unlock: release & abi::flag::RELEASE_FLOCK_UNLOCK != 0,
            }
        }
        op::FSYNC => {
            let (fh, flags) = (f.u64()?, f.u32()?);
            Op::Fsync { fh, data_only: flags & abi::flag::FSYNC_DATA != 0 }
        }
        op::SETXATTR => {
            // The long form: SETXATTR_EXT is always negotiated, see `init`.
            let (size, flags) = (f.u32()? as usize, f.u32()?);
            f.u64()?;
            Op::Setxattr { name: f.name()?, value: f.bytes(size)?, flags }
        }
        op::GETXATTR => {
            let size = f.u32()?;
            f.u32()?;
            Op::Getxattr { name: f.name()?, size }
        }
        op::LISTXATTR => Op::Listxattr { size: f.u32()? },
        op::REMOVEXATTR => Op::Removexattr { name: f.name()? },
        op::FLUSH => {
            let fh = f.u64()?;
            f.u64()?;
            Op::Flush { fh, lock_owner: f.u64()? }
        }
        op::INIT => {
            let (major, minor, max_readahead) = (f.u32()?, f.u32()?, f.u32()?);
            let low = u64::from(f.u32()?);
            let high = if low & abi::feature::INIT_EXT != 0 { u64::from(f.u32()?) << 32 } else { 0 };
            Op::Init(Init { major, minor, max_readahead, features: low | high })
        }
        op::OPENDIR => Op::Opendir { flags: f.u32()? },
        op::READDIR | op::READDIRPLUS => {
            let (fh, offset, size) = (f.u64()?, f.u64()?, f.u32()?);
            Op::Readdir { fh, offset, size, plus: header.opcode == op::READDIRPLUS }
        }
        op::RELEASEDIR => Op::Releasedir { fh: f.u64()?, flags: f.u32()? },
        op::FSYNCDIR => {
            let (fh, flags) = (f.u64()?, f.u32()?);
            Op::Fsyncdir { fh, data_only: flags & abi::flag::FSYNC_DATA != 0 }
        }
        op::GETLK => Op::Getlk(lock(&mut f)?),
        op::SETLK => Op::Setlk { lock: lock(&mut f)?, wait: false },
        op::SETLKW => Op::Setlk { lock: lock(&mut f)?, wait: true },
        op::ACCESS => Op::Access { mask: f.u32()? },
        op::CREATE | op::TMPFILE => {
            let (flags, mode, umask, open) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
            if header.opcode == op::TMPFILE {
                // The kernel sends a name here, but it means nothing.
                return Some(Op::Tmpfile { flags, mode, umask });
            }
            let kill_suidgid = open & abi::flag::OPEN_KILL_SUIDGID != 0;
            Op::Create { name: f.name()?, flags, mode, umask, kill_suidgid }
        }
        op::INTERRUPT => Op::Interrupt { unique: f.u64()? },
        op::DESTROY => Op::Destroy,
        op::FALLOCATE => {
            let (fh, offset, length, mode) = (f.u64()?, f.u64()?, f.u64()?, f.u32()?);
            Op::Fallocate { fh, offset, length, mode }
        }
        op::LSEEK => Op::Lseek { fh: f.u64()?, offset: f.u64()?, whence: f.u32()? },
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => Op::CopyFileRange {
            fh: f.u64()?,
            offset: f.u64()?,
            out_inode: f.u64()?,
            out_fh: f.u64()?,
            out_offset: f.u64()?,
            len: f.u64()?,
            flags: f.u64()?,
            wide: header.opcode == op::COPY_FILE_RANGE_64,
        },
        op::SYNCFS => Op::Syncfs,
        _ => Op::Other,
    })
}

fn setattr(f: &mut Fields<'_>) -> Option<SetAttr> {
    use abi::fattr;
    let valid = f.u32()?;
    f.u32()?;
    let (fh, size, lock_owner) = (f.u64()?, f.u64()?, f.u64()?);
    // Seconds are unsigned in the protocol's header, but the kernel puts a signed number in.
    let secs = [f.u64()?, f.u64()?, f.u64()?].map(u64::cast_signed);
    let nanos = [f.u32()?, f.u32()?, f.u32()?].map(|n| n.min(999_999_999));
    let mode = f.u32()?;
    f.u32()?;
    let (uid, gid) = (f.u32()?, f.u32()?);
    f.u32()?;
    let has = |bit| valid & bit != 0;
    let at = |i: usize| Time { secs: secs[i], nanos: nanos[i] };
    let set = |bit, now, i| has(bit).then(|| if has(now) { SetTime::Now } else { SetTime::At(at(i)) });
    Some(SetAttr {
        mode: has(fattr::MODE).then_some(mode),
        uid: has(fattr::UID).then_some(uid),
        gid: has(fattr::GID).then_some(gid),
        size: has(fattr::SIZE).then_some(size),
        atime: set(fattr::ATIME, fattr::ATIME_NOW, 0),
        mtime: set(fattr::MTIME, fattr::MTIME_NOW, 1),
        ctime: has(fattr::CTIME).then(|| at(2)),
        fh: has(fattr::FH).then_some(fh),
        lock_owner: has(fattr::LOCKOWNER).then_some(lock_owner),
        kill_suidgid: has(fattr::KILL_SUIDGID),
    })
}

fn write<'a>(f: &mut Fields<'a>) -> Option<Op<'a>> {
    let (fh, offset, size, write) = (f.u64()?, f.u64()?, f.u32()? as usize, f.u32()?);
    let (owner, flags) = (f.u64()?, f.u32()?);
    f.u32()?;
    let data = f.bytes(size)?;
    let write = Write {
        fh,
        offset,
        flags,
        lock_owner: (write & abi::flag::WRITE_LOCKOWNER != 0).then_some(owner),
        cached: write & abi::flag::WRITE_CACHE != 0,
        kill_suidgid: write & abi::flag::WRITE_KILL_SUIDGID != 0,
    };
    Some(Op::Write { write, data })
}

fn lock(f: &mut Fields<'_>) -> Option<Lock> {
    let (fh, owner, start, end) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
    let (kind, pid, flags) = (f.u32()?, f.u32()?, f.u32()?);
    Some(Lock { fh, owner, start, end, kind, pid, flock: flags & abi::flag::LK_FLOCK != 0 })
}

/// The bytes of a request not yet read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_ne_bytes)
    }

    /// Bytes up to a NUL, which is taken too.
    fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&b| b == 0)?;
        let text = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Some(text)
    }

    fn name(&mut self) -> Option<&'a [u8]> {
        self.text().filter(|name| !name.is_empty() && name.len() <= abi::NAME_MAX)
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
