//! The cache before a source whose answers the test gives by hand.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use torchfs_cache::{Cache, CacheConfig, Fetch};
use torchfs_proto::extent::BlockRef;
use torchfs_proto::{BlockId, Code, Fault, LayoutId, Result};

const CHUNK: usize = 64 << 10;

/// A source that answers when it is told to.
#[derive(Default)]
struct Hand {
    open: Mutex<HashMap<usize, Open>>,
    asked: Mutex<Vec<(BlockId, Range<u16>)>>,
    /// Fetches that were dropped before they were answered.
    dropped: Mutex<Vec<usize>>,
}

#[derive(Default)]
struct Open {
    answer: Option<Result<()>>,
    waker: Option<Waker>,
}

struct Fetching {
    hand: Arc<Hand>,
    number: usize,
    block: BlockId,
    chunks: Range<u16>,
    over: bool,
}

/// The test's own handle on a source.
#[derive(Clone, Default)]
struct Source(Arc<Hand>);

impl Fetch for Source {
    fn fetch(&self, block: &BlockRef, chunks: Range<u16>) -> BoxFuture<'static, Result<Vec<Bytes>>> {
        let mut asked = self.0.asked.lock();
        asked.push((block.id, chunks.clone()));
        let number = asked.len() - 1;
        self.0.open.lock().entry(number).or_default();
        Fetching { hand: self.0.clone(), number, block: block.id, chunks, over: false }.boxed()
    }
}

impl Future for Fetching {
    type Output = Result<Vec<Bytes>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let hand = self.hand.clone();
        let mut open = hand.open.lock();
        let open = open.entry(self.number).or_default();
        match open.answer.clone() {
            None => {
                open.waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(answer) => {
                self.over = true;
                let (block, chunks) = (self.block, self.chunks.clone());
                Poll::Ready(answer.map(|()| chunks.map(|index| content(block, index)).collect()))
            }
        }
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if !self.over {
            self.hand.dropped.lock().push(self.number);
        }
    }
}

impl Source {
    fn answer(&self, number: usize, answer: Result<()>) {
        let waker = {
            let mut open = self.0.open.lock();
            let open = open.entry(number).or_default();
            open.answer = Some(answer);
            open.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn asked(&self) -> Vec<Range<u16>> {
        self.0.asked.lock().iter().map(|(_, chunks)| chunks.clone()).collect()
    }
}

fn content(block: BlockId, index: u16) -> Bytes {
    let mut bytes = vec![block.counter as u8; CHUNK];
    bytes[0] = index as u8;
    bytes.into()
}

fn block(counter: u64) -> BlockRef {
    BlockRef {
        id: BlockId { incarnation: 1, counter },
        layout: LayoutId(1),
        block_len: 64 * CHUNK as u32,
        substitutes: Vec::new(),
    }
}

fn cache(chunks: u64) -> (Source, Arc<Cache>) {
    let source = Source::default();
    let config = CacheConfig { bytes_max: chunks * CHUNK as u64 };
    let cache = Cache::new(Arc::new(source.clone()), config);
    (source, cache)
}

fn expect(counter: u64, chunks: Range<u16>) -> Vec<Bytes> {
    chunks.map(|index| content(block(counter).id, index)).collect()
}

#[test]
fn what_is_here_is_answered_at_the_first_poll() {
    let (source, cache) = cache(100);
    cache.insert(block(1).id, 2, expect(1, 2..4));
    let got = cache.get(&block(1), 2..4).now_or_never().expect("ready").expect("here");
    assert_eq!(got, expect(1, 2..4));
    assert!(source.asked().is_empty());
    assert_eq!(cache.find(block(1).id, 2..4), Some(expect(1, 2..4)));
    assert_eq!(cache.find(block(1).id, 2..5), None);
}

#[test]
fn only_what_is_missing_is_fetched_and_neighbours_come_in_one_request() {
    let (source, cache) = cache(100);
    cache.insert(block(1).id, 3, expect(1, 3..4));
    source.answer(0, Ok(()));
    source.answer(1, Ok(()));
    let got = cache.get(&block(1), 0..6).now_or_never().expect("ready").expect("fetched");
    assert_eq!(got, expect(1, 0..6));
    assert_eq!(source.asked(), [0..3, 4..6]);
    assert!(cache.get(&block(1), 0..6).now_or_never().is_some(), "now all is here");
    assert_eq!(source.asked().len(), 2);
}

#[test]
fn one_fetch_serves_all_who_ask() {
    let (source, cache) = cache(100);
    let one = block(1);
    let mut first = Box::pin(cache.get(&one, 0..4));
    let mut second = Box::pin(cache.get(&one, 2..6));
    assert!(first.as_mut().now_or_never().is_none());
    assert!(second.as_mut().now_or_never().is_none());
    assert_eq!(source.asked(), [0..4, 4..6], "the second joins two chunks and fetches two");
    source.answer(0, Ok(()));
    source.answer(1, Ok(()));
    assert_eq!(second.now_or_never().expect("ready").expect("joined"), expect(1, 2..6));
    assert_eq!(first.now_or_never().expect("ready").expect("fetched"), expect(1, 0..4));
}

#[test]
fn a_fetch_goes_on_when_the_one_who_began_it_goes_away() {
    let (source, cache) = cache(100);
    let one = block(1);
    let mut owner = Box::pin(cache.get(&one, 0..4));
    assert!(owner.as_mut().now_or_never().is_none());
    let mut joined = Box::pin(cache.get(&one, 1..3));
    assert!(joined.as_mut().now_or_never().is_none());
    drop(owner);
    assert!(source.0.dropped.lock().is_empty());
    source.answer(0, Ok(()));
    assert_eq!(joined.now_or_never().expect("ready").expect("handed over"), expect(1, 1..3));
    assert_eq!(source.asked().len(), 1);
    assert!(cache.find(one.id, 0..4).is_some(), "all of the run is kept");
}

#[test]
fn a_fetch_that_nobody_waits_for_is_dropped_with_its_claim() {
    let (source, cache) = cache(100);
    let one = block(1);
    let mut owner = Box::pin(cache.get(&one, 0..4));
    assert!(owner.as_mut().now_or_never().is_none());
    drop(owner);
    assert_eq!(*source.0.dropped.lock(), [0]);
    let mut next = Box::pin(cache.get(&one, 0..4));
    assert!(next.as_mut().now_or_never().is_none());
    assert_eq!(source.asked().len(), 2, "it is fetched anew");
    source.answer(1, Ok(()));
    assert!(next.now_or_never().is_some());
}

#[test]
fn a_fault_reaches_all_who_wait_and_is_not_kept() {
    let (source, cache) = cache(100);
    let one = block(1);
    let mut first = Box::pin(cache.get(&one, 0..1));
    let mut second = Box::pin(cache.get(&one, 0..1));
    assert!(first.as_mut().now_or_never().is_none());
    assert!(second.as_mut().now_or_never().is_none());
    source.answer(0, Err(Fault::new(Code::Gone, "no server has it")));
    assert_eq!(first.now_or_never().expect("ready").expect_err("gone").code, Code::Gone);
    assert_eq!(second.now_or_never().expect("ready").expect_err("gone").code, Code::Gone);
    source.answer(1, Ok(()));
    assert!(cache.get(&one, 0..1).now_or_never().expect("ready").is_ok(), "the next one tries again");
}

#[test]
fn a_prefetch_leaves_alone_what_is_here_or_on_its_way() {
    let (source, cache) = cache(100);
    let one = block(1);
    cache.insert(one.id, 0, expect(1, 0..1));
    let mut reader = Box::pin(cache.get(&one, 1..2));
    assert!(reader.as_mut().now_or_never().is_none());
    source.answer(1, Ok(()));
    cache.prefetch(&one, 0..4).now_or_never().expect("does not wait for the reader's fetch");
    assert_eq!(source.asked(), [1..2, 2..4]);
    assert!(cache.find(one.id, 2..4).is_some());
}

#[test]
fn memory_stays_within_its_bound_and_a_scan_spares_what_is_used_again() {
    let (source, cache) = cache(10);
    cache.insert(block(1).id, 0, expect(1, 0..2));
    for _ in 0..2 {
        assert!(cache.find(block(1).id, 0..2).is_some());
    }
    for counter in 2..50 {
        source.answer(counter as usize - 2, Ok(()));
        cache.get(&block(counter), 0..4).now_or_never().expect("ready").expect("fetched");
        assert!(cache.bytes() <= 10 * CHUNK as u64);
    }
    assert!(cache.find(block(1).id, 0..2).is_some());
}

#[test]
fn a_removed_block_is_not_here_any_more() {
    let (_source, cache) = cache(10);
    cache.insert(block(1).id, 0, expect(1, 0..2));
    cache.insert(block(2).id, 0, expect(2, 0..2));
    cache.remove(block(1).id);
    assert_eq!(cache.find(block(1).id, 0..1), None);
    assert!(cache.find(block(2).id, 0..2).is_some());
    assert_eq!(cache.bytes(), 2 * CHUNK as u64);
}

/// Many threads read and go away at random; everybody who stays gets the right bytes.
#[test]
fn readers_on_many_threads_get_their_bytes_whoever_goes_away() {
    let (source, cache) = cache(40);
    // Every fetch is answered by this thread as it comes.
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let answering = std::thread::spawn({
        let (source, stop) = (source.clone(), stop.clone());
        move || {
            let mut next = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let asked = source.0.asked.lock().len();
                while next < asked {
                    source.answer(next, Ok(()));
                    next += 1;
                }
                std::thread::yield_now();
            }
        }
    });
    let readers: Vec<_> = (0..4u64)
        .map(|seed| {
            let cache = cache.clone();
            std::thread::spawn(move || {
                let mut random = seed * 7919 + 1;
                for _ in 0..500 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let counter = random >> 33 & 7;
                    let from = (random >> 40 & 15) as u16;
                    let to = from + 1 + (random >> 50 & 7) as u16;
                    let block = block(counter);
                    let reading = cache.get(&block, from..to);
                    if random >> 60 == 0 {
                        let _ = reading.now_or_never();
                        continue;
                    }
                    let got = wait(reading).expect("fetched");
                    assert_eq!(got, expect(counter, from..to));
                }
            })
        })
        .collect();
    readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    answering.join().expect("no panic");
    assert!(cache.bytes() <= 40 * CHUNK as u64);
}

/// Polls a future on this thread until it is done.
fn wait<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn what_was_fetched_ahead_is_not_used_again_when_it_is_first_asked_for() {
    let (source, cache) = cache(5);
    cache.insert(block(2).id, 0, expect(2, 0..1));
    assert!(cache.find(block(2).id, 0..1).is_some(), "used again: it stays, whatever streams by");
    for index in 0..10 {
        source.answer(usize::from(index), Ok(()));
        assert!(cache.prefetch(&block(1), index..index + 1).now_or_never().is_some());
        assert!(cache.get(&block(1), index..index + 1).now_or_never().is_some());
    }
    assert_eq!(source.asked().len(), 10, "what was fetched ahead was here when it was asked for");
    assert!(cache.find(block(2).id, 0..1).is_some(), "a stream pushes out only itself");
}
