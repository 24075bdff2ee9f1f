//! Request buffers: a WRITE's payload lands on a page boundary and leaves as `Bytes` without a copy.
//!
//! The kernel writes a request front to back: 80 bytes of headers, then the payload. So reading at 80 bytes before a
//! page boundary puts the payload on it, and all of it stays contiguous for the decoder.
//!
//! # Invariants
//! - At most `max` buffers exist, and a few of those nobody needs; when all are lent out, payloads are copied instead. Nothing waits.
//! - A payload much smaller than its buffer is copied, so that 4 KiB waiting to be stored never hold 1 MiB.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

use super::abi::{READ_MIN, WRITE_HEADER};

const PAGE: usize = 4096;
/// Most buffers that are kept while nobody needs them; a burst of writes leaves no more memory taken than these.
const IDLE_MAX: usize = 64;

/// Gives out buffers and takes them back.
#[derive(Debug)]
pub struct Pool {
    max_write: usize,
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    made: usize,
    free: Vec<Buffer>,
}

/// Room for one request.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<u8>,
    /// Where a WRITE's payload begins: on a page boundary.
    payload: usize,
}

impl Pool {
    /// A pool of at most `max` buffers, each for requests with up to `max_write` bytes of payload.
    pub fn new(max_write: usize, max: usize) -> Arc<Pool> {
        Arc::new(Pool { max_write: max_write.max(READ_MIN), max, state: Mutex::default() })
    }

    /// A buffer of a reader's own; not counted, never given back.
    pub fn own(&self) -> Buffer {
        Buffer::new(self.max_write)
    }

    /// Makes `data`, the payload of the request in `buffer`, live on: the buffer is lent out and replaced, or the
    /// payload is copied where that is cheaper or the pool is empty.
    pub fn keep(self: &Arc<Pool>, buffer: &mut Buffer, len: usize) -> Bytes {
        let data = buffer.payload..buffer.payload + len;
        if len >= self.max_write / 2
            && let Some(fresh) = self.take()
        {
            let lent = Lent { buffer: Some(std::mem::replace(buffer, fresh)), pool: Arc::clone(self) };
            return Bytes::from_owner(lent).slice(data);
        }
        Bytes::copy_from_slice(&buffer.memory[data])
    }

    fn take(&self) -> Option<Buffer> {
        let mut state = self.state.lock();
        if let Some(buffer) = state.free.pop() {
            return Some(buffer);
        }
        if state.made == self.max {
            return None;
        }
        state.made += 1;
        drop(state);
        Some(Buffer::new(self.max_write))
    }
}

impl Buffer {
    fn new(max_write: usize) -> Buffer {
        let memory = vec![0; WRITE_HEADER + PAGE + max_write];
        let start = memory.as_ptr().addr() + WRITE_HEADER;
        let payload = WRITE_HEADER + (start.next_multiple_of(PAGE) - start);
        Buffer { memory, payload }
    }

    /// Where to read a request to.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.memory[self.payload - WRITE_HEADER..]
    }

    /// The request of this length.
    pub fn request(&self, len: usize) -> &[u8] {
        &self.memory[self.payload - WRITE_HEADER..][..len]
    }
}

/// A buffer on loan; it comes back when the last `Bytes` over it is dropped.
struct Lent {
    buffer: Option<Buffer>,
    pool: Arc<Pool>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.memory)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let mut state = self.pool.state.lock();
        if state.free.len() < IDLE_MAX {
            state.free.push(buffer);
        } else {
            state.made -= 1;
            drop(state); // freeing so much memory takes a while
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_payload_leaves_on_a_page_boundary_without_a_copy() {
        let pool = Pool::new(1 << 20, 2);
        let mut buffer = pool.own();
        buffer.room()[WRITE_HEADER..][..1 << 20].fill(7);
        let at = buffer.request(WRITE_HEADER + 1)[WRITE_HEADER..].as_ptr();
        assert_eq!(at.addr() % PAGE, 0);
        let data = pool.keep(&mut buffer, 1 << 20);
        assert_eq!(data.as_ptr(), at);
        assert!(data.iter().all(|&b| b == 7));
    }

    #[test]
    fn buffers_come_back_and_their_number_is_bounded() {
        let pool = Pool::new(1 << 20, 2);
        let mut buffer = pool.own();
        let lent: Vec<Bytes> = (0..5).map(|_| pool.keep(&mut buffer, 1 << 20)).collect();
        assert_eq!(pool.state.lock().made, 2);
        drop(lent);
        assert_eq!(pool.state.lock().free.len(), 2);
        let again = pool.keep(&mut buffer, 1 << 20);
        assert_eq!(pool.state.lock().free.len(), 1);
        drop(again);
    }

    #[test]
    fn after_a_burst_only_a_few_buffers_are_kept() {
        let pool = Pool::new(READ_MIN, 2 * IDLE_MAX);
        let mut buffer = pool.own();
        let lent: Vec<Bytes> = (0..2 * IDLE_MAX).map(|_| pool.keep(&mut buffer, READ_MIN)).collect();
        assert_eq!(pool.state.lock().made, 2 * IDLE_MAX);
        drop(lent);
        let state = pool.state.lock();
        assert_eq!((state.made, state.free.len()), (IDLE_MAX, IDLE_MAX));
    }

    #[test]
    fn a_small_payload_is_copied_and_the_buffer_stays() {
        let pool = Pool::new(1 << 20, 2);
        let mut buffer = pool.own();
        buffer.room()[WRITE_HEADER..][..3].copy_from_slice(b"abc");
        assert_eq!(pool.keep(&mut buffer, 3), "abc");
        assert_eq!(pool.state.lock().made, 0);
    }
}
