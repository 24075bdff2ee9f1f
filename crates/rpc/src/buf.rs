//! Buffers for bulk bytes: aligned to 4 KiB, pooled, and turned into `Bytes` without copying.
//!
//! A payload is received straight into such a buffer and stays there until the last reader is done; the alignment lets
//! the same bytes go to a file opened for direct I/O. Fresh large memory costs a page fault per 4 KiB, more than the
//! copy out of the socket, so buffers are kept, and large ones are mapped in huge pages where the kernel has some. What was not needed for a while is given back: each class of sizes
//! remembers its low-water mark, and `trim` frees that many.
//!
//! # Invariants
//! - All bytes of a buffer are initialised at any time (fresh memory is zeroed, used memory was written before).
//! - The pool holds at most its limit; a buffer that does not fit is freed.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

/// The alignment of every buffer.
pub const ALIGN: usize = 4096;

/// How many bytes of unused buffers the process keeps unless told otherwise.
const POOL_LIMIT: u64 = 128 << 20;
/// Larger buffers than this are never pooled.
const POOLED_MAX: usize = 64 << 20;
/// How often unused buffers are looked for.
const TRIM_EVERY: Duration = Duration::from_secs(2);
/// Buffers from this length on are mapped by themselves: the kernel gives them zeroed, in huge pages of this size.
const HUGE: usize = 2 << 20;
/// 4 KiB to 64 MiB: fourteen doublings of four steps each, and the last one.
const CLASSES: usize = 57;

/// Bytes aligned to 4 KiB, from the pool and back to it.
pub struct AlignedBuf {
    memory: Option<Memory>,
    len: usize,
}

impl AlignedBuf {
    /// An empty buffer, which takes no memory.
    pub const fn empty() -> AlignedBuf {
        AlignedBuf { memory: None, len: 0 }
    }

    /// A buffer of this length whose content is arbitrary (initialised, perhaps by its last user): for callers that
    /// overwrite all of it.
    pub fn with_len(len: usize) -> AlignedBuf {
        if len == 0 {
            return AlignedBuf::empty();
        }
        AlignedBuf { memory: Some(POOL.take(len)), len }
    }

    /// A buffer of zeros.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::with_len(len);
        buf.fill(0);
        buf
    }

    /// A copy of these bytes.
    pub fn copy_of(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::with_len(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// Shortens the buffer; does nothing if it is shorter already.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// How many bytes the memory below has room for.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.size)
    }

    /// The same bytes as shared `Bytes`, without copying.
    pub fn into_bytes(self) -> Bytes {
        if self.len == 0 { Bytes::new() } else { Bytes::from_owner(self) }
    }
}

/// Sets how many bytes of unused buffers this process keeps.
pub fn set_pool_limit(bytes: u64) {
    POOL.limit.store(bytes, Ordering::Relaxed);
    POOL.trim(true);
}

/// How many bytes of unused buffers this process keeps now.
pub fn pooled_bytes() -> u64 {
    POOL.held.load(Ordering::Relaxed)
}

/// Gives back what was not needed since the last time; cheap when called often. Connections do it while they idle.
pub fn trim_pool() {
    POOL.trim(false);
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            POOL.put(memory);
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: `len` never exceeds the size of the allocation, and all its bytes are initialised.
            Some(memory) => unsafe { std::slice::from_raw_parts(memory.start.as_ptr(), self.len) },
            None => &[],
        }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &self.memory {
            // SAFETY: as in `deref`; the memory has one owner, and that is borrowed mutably.
            Some(memory) => unsafe { std::slice::from_raw_parts_mut(memory.start.as_ptr(), self.len) },
            None => &mut [],
        }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for AlignedBuf {
    fn default() -> AlignedBuf {
        AlignedBuf::empty()
    }
}

impl From<AlignedBuf> for Bytes {
    fn from(buf: AlignedBuf) -> Bytes {
        buf.into_bytes()
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

/// One allocation.
struct Memory {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: the memory is plain bytes with one owner, as in `Box<[u8]>`.
unsafe impl Send for Memory {}
// SAFETY: shared references allow reading only.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(size: usize) -> Memory {
        let layout = Memory::layout(size);
        let start = match size {
            HUGE.. => map(size),
            // SAFETY: the size is never zero (the smallest class is 4 KiB).
            _ => NonNull::new(unsafe { alloc_zeroed(layout) }),
        };
        match start {
            Some(start) => Memory { start, size },
            None => handle_alloc_error(layout),
        }
    }

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, ALIGN).expect("sizes are checked against their bound before")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.size >= HUGE {
            // SAFETY: mapped in `new` with this start and size, and unmapped once.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.size) };
            return;
        }
        // SAFETY: allocated in `new` with the same layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), Memory::layout(self.size)) }
    }
}

/// Fresh zeroed memory that begins on the boundary of a huge page; `None` if there is none.
fn map(size: usize) -> Option<NonNull<u8>> {
    let all = size.checked_add(HUGE)?;
    // SAFETY: a new private mapping, at an address of the kernel's choice.
    let start = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), all, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let start = start.cast::<u8>();
    let before = start.addr().next_multiple_of(HUGE) - start.addr();
    // SAFETY: `before` and `HUGE - before` bytes at the ends of the mapping made above are given back and never used; both
    // are multiples of a page. A refused hint changes nothing.
    unsafe {
        let begin = start.add(before);
        if before > 0 {
            libc::munmap(start.cast(), before);
        }
        libc::munmap(begin.add(size).cast(), HUGE - before);
        libc::madvise(begin.cast(), size, libc::MADV_HUGEPAGE);
        NonNull::new(begin)
    }
}

struct Pool {
    limit: AtomicU64,
    held: AtomicU64,
    state: Mutex<State>,
}

struct State {
    classes: [Class; CLASSES],
    trimmed: Option<Instant>,
}

struct Class {
    free: Vec<Memory>,
    /// The fewest unused buffers since the last trim: nobody needed that many.
    low: usize,
}

static POOL: Pool = Pool {
    limit: AtomicU64::new(POOL_LIMIT),
    held: AtomicU64::new(0),
    state: Mutex::new(State {
        classes: [const { Class { free: Vec::new(), low: 0 } }; CLASSES],
        trimmed: None,
    }),
};

impl Pool {
    fn take(&self, len: usize) -> Memory {
        let (class, size) = class_of(len);
        if class < CLASSES {
            let mut state = self.state.lock();
            let class = &mut state.classes[class];
            if let Some(memory) = class.free.pop() {
                class.low = class.low.min(class.free.len());
                self.held.fetch_sub(memory.size as u64, Ordering::Relaxed);
                return memory;
            }
        }
        Memory::new(size)
    }

    fn put(&self, memory: Memory) {
        let (class, _) = class_of(memory.size);
        if class >= CLASSES {
            return;
        }
        let mut state = self.state.lock();
        // `held` changes only under the lock; it is atomic for those who just look.
        let held = self.held.load(Ordering::Relaxed) + memory.size as u64;
        if held <= self.limit.load(Ordering::Relaxed) {
            self.held.store(held, Ordering::Relaxed);
            state.classes[class].free.push(memory);
        }
    }

    fn trim(&self, all: bool) {
        let now = Instant::now();
        let mut unused = Vec::new();
        let mut state = self.state.lock();
        if !all && state.trimmed.is_some_and(|last| now < last + TRIM_EVERY) {
            return;
        }
        state.trimmed = Some(now);
        for class in &mut state.classes {
            let count = if all { class.free.len() } else { class.low };
            unused.extend(class.free.drain(..count.min(class.free.len())));
            class.low = class.free.len();
        }
        let freed: u64 = unused.iter().map(|memory| memory.size as u64).sum();
        self.held.fetch_sub(freed, Ordering::Relaxed);
        drop(state);
        // Freed here, outside the lock: unmapping is slow.
        drop(unused);
    }
}

/// The class of a length and its size: four steps per doubling, so that at most a quarter is wasted.
fn class_of(len: usize) -> (usize, usize) {
    let len = len.max(1).next_multiple_of(ALIGN);
    let power = usize::BITS - 1 - len.leading_zeros();
    let step = (1usize << power >> 2).max(1);
    let size = len.next_multiple_of(step);
    if size > POOLED_MAX {
        return (CLASSES, len);
    }
    let power = usize::BITS - 1 - size.leading_zeros();
    let quarter = (size - (1 << power)) / ((1usize << power) >> 2);
    ((power as usize - ALIGN.trailing_zeros() as usize) * 4 + quarter, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_a_class_that_holds_it() {
        let mut last = (0, 0);
        for len in (1..POOLED_MAX).step_by(4095).chain([POOLED_MAX]) {
            let (class, size) = class_of(len);
            assert!(class < CLASSES && size >= len, "{len}");
            assert_eq!(class_of(size), (class, size), "{len}");
            assert!(size - len < ALIGN.max(len / 4 + ALIGN), "{len} in {size}");
            assert!((class, size) >= last, "{len}");
            last = (class, size);
        }
        assert_eq!(class_of(POOLED_MAX + 1).0, CLASSES);
    }

    #[test]
    fn buffers_are_aligned_and_become_bytes_in_place() {
        for len in [1, 100, 4096, 65_536, 70_000, 4 << 20] {
            let mut buf = AlignedBuf::with_len(len);
            assert_eq!(buf.as_ptr() as usize % ALIGN, 0);
            assert_eq!(buf.len(), len);
            buf.fill(7);
            let at = buf.as_ptr();
            let bytes = buf.into_bytes();
            assert_eq!(bytes.as_ptr(), at);
            assert!(bytes.iter().all(|b| *b == 7));
        }
        assert_eq!(AlignedBuf::empty().into_bytes().len(), 0);
    }

    #[test]
    fn zeroed_buffers_show_nothing_of_their_last_user() {
        for _ in 0..4 {
            AlignedBuf::with_len(9000).fill(0xEE);
            assert!(AlignedBuf::zeroed(9000).iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn a_pool_keeps_to_its_limit_and_gives_back_what_nobody_needs() {
        let pool = Pool {
            limit: AtomicU64::new(1 << 20),
            held: AtomicU64::new(0),
            state: Mutex::new(State {
                classes: [const { Class { free: Vec::new(), low: 0 } }; CLASSES],
                trimmed: None,
            }),
        };
        let taken: Vec<_> = (0..64).map(|_| pool.take(65_536)).collect();
        taken.into_iter().for_each(|memory| pool.put(memory));
        assert_eq!(pool.held.load(Ordering::Relaxed), 1 << 20);
        pool.trim(false); // the low-water mark is still that of the busy time
        assert_eq!(pool.held.load(Ordering::Relaxed), 1 << 20);
        pool.put(pool.take(65_536));
        pool.state.lock().trimmed = None;
        pool.trim(false); // one was in use at a time, the others idle
        assert_eq!(pool.held.load(Ordering::Relaxed), 65_536);
        pool.trim(true);
        assert_eq!(pool.held.load(Ordering::Relaxed), 0);
    }
}
