//! The promises of an engine, as functions that any implementation runs.
//!
//! A factory opens the same engine again and again: each call of the closure opens what the last one left behind. Every
//! promise is one function with a sentence for a name; [`all`] lists them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{Batch, Engine, Error, KEY_MAX, Result, Seq, VALUE_MAX};

/// Opens the engine under test; the second call finds what the first one wrote. Fails while another one is open.
pub type Open<'a> = dyn Fn() -> Result<Box<dyn Engine>> + 'a;

/// A promise with its name.
pub type Promise = (&'static str, fn(&Open<'_>));

const LONG: Duration = Duration::from_secs(60);

macro_rules! promises {
    ($($name:ident,)*) => {
        /// All promises. Each wants a factory of its own, over an empty store.
        pub fn all() -> Vec<Promise> {
            vec![$((stringify!($name), $name),)*]
        }
    };
}

promises! {
    a_new_engine_is_empty,
    ordered_batches_are_visible_at_once,
    places_rise_by_one,
    the_last_change_of_a_key_in_a_batch_wins,
    durable_never_exceeds_ordered,
    waiting_makes_durable,
    durable_batches_survive_a_reopen,
    a_clean_close_keeps_everything_ordered,
    places_go_on_after_a_reopen,
    fence_and_incarnation_rise_at_every_open_and_the_cluster_stays,
    a_second_opener_is_refused,
    scans_are_ordered_bounded_and_reversible,
    scans_end_when_told,
    scans_merge_old_and_new_state,
    deleted_keys_vanish_everywhere,
    scans_may_call_the_engine,
    snapshots_are_of_one_batch,
    limits_are_refused_and_harmless,
    listeners_hear_what_becomes_durable,
    concurrent_batches_are_whole_and_in_one_order,
    random_changes_match_an_ordered_map,
}

fn a_new_engine_is_empty(open: &Open<'_>) {
    let engine = must(open());
    assert_eq!(engine.ordered(), Seq(0));
    assert_eq!(must(engine.get(b"a")), None);
    assert!(pairs(&*engine, b"", b"\xff", false).is_empty());
}

fn ordered_batches_are_visible_at_once(open: &Open<'_>) {
    let engine = must(open());
    must(engine.order(batch(&[("a", Some("1")), ("b", Some("2"))])));
    assert_eq!(must(engine.get(b"a")).as_deref(), Some(&b"1"[..]));
    assert_eq!(pairs(&*engine, b"a", b"z", false).len(), 2);
    must(engine.order(batch(&[("a", None)])));
    assert_eq!(must(engine.get(b"a")), None);
    assert_eq!(pairs(&*engine, b"a", b"z", false).len(), 1);
}

fn places_rise_by_one(open: &Open<'_>) {
    let engine = must(open());
    for n in 1..=100 {
        assert_eq!(must(engine.order(batch(&[("k", Some("v"))]))), Seq(n));
        assert_eq!(engine.ordered(), Seq(n));
    }
    assert_eq!(must(engine.order(Batch::at(0))), Seq(101), "an empty batch has a place too");
}

fn the_last_change_of_a_key_in_a_batch_wins(open: &Open<'_>) {
    let engine = must(open());
    must(engine.order(batch(&[
        ("a", Some("1")),
        ("a", None),
        ("a", Some("2")),
        ("b", Some("1")),
        ("b", None),
    ])));
    assert_eq!(must(engine.get(b"a")).as_deref(), Some(&b"2"[..]));
    assert_eq!(must(engine.get(b"b")), None);
}

fn durable_never_exceeds_ordered(open: &Open<'_>) {
    let engine = must(open());
    for _ in 0..200 {
        must(engine.order(batch(&[("k", Some("v"))])));
        let durable = engine.durable();
        assert!(durable <= engine.ordered());
        assert!(engine.durable() >= durable);
    }
}

fn waiting_makes_durable(open: &Open<'_>) {
    let engine = must(open());
    for _ in 0..20 {
        let seq = must(engine.order(batch(&[("k", Some("v"))])));
        must(engine.wait_durable(seq, LONG));
        assert!(engine.durable() >= seq);
    }
    must(engine.wait_durable(Seq(0), Duration::ZERO));
}

fn durable_batches_survive_a_reopen(open: &Open<'_>) {
    for round in 0..3u32 {
        let engine = must(open());
        for old in 0..round {
            assert_eq!(must(engine.get(format!("k{old}").as_bytes())).as_deref(), Some(&b"v"[..]));
        }
        let seq = must(engine.order(batch(&[(&format!("k{round}"), Some("v"))])));
        must(engine.wait_durable(seq, LONG));
    }
}

fn a_clean_close_keeps_everything_ordered(open: &Open<'_>) {
    let engine = must(open());
    for n in 0..500 {
        must(engine.order(batch(&[(&format!("k{n:03}"), Some("v"))])));
    }
    drop(engine);
    assert_eq!(pairs(&*must(open()), b"k", b"l", false).len(), 500);
}

fn places_go_on_after_a_reopen(open: &Open<'_>) {
    let engine = must(open());
    let seq = must(engine.order(batch(&[("a", Some("1"))])));
    must(engine.wait_durable(seq, LONG));
    drop(engine);
    let engine = must(open());
    assert_eq!((engine.ordered(), engine.durable()), (seq, seq));
    assert_eq!(must(engine.order(batch(&[("a", Some("2"))]))), Seq(seq.0 + 1));
}

fn fence_and_incarnation_rise_at_every_open_and_the_cluster_stays(open: &Open<'_>) {
    let engine = must(open());
    let cluster = engine.cluster();
    assert_ne!(cluster.0, 0);
    let mut last = (engine.fence(), engine.incarnation());
    drop(engine);
    for _ in 0..3 {
        let engine = must(open());
        assert!(engine.fence() > last.0 && engine.incarnation() > last.1);
        assert_eq!(engine.cluster(), cluster);
        last = (engine.fence(), engine.incarnation());
    }
}

fn a_second_opener_is_refused(open: &Open<'_>) {
    let engine = must(open());
    must(engine.order(batch(&[("a", Some("1"))])));
    match open() {
        Err(Error::Locked { .. }) => {}
        Err(other) => panic!("refused for another reason: {other}"),
        Ok(_) => panic!("two openers at once"),
    }
    must(engine.order(batch(&[("a", Some("2"))])));
}

fn scans_are_ordered_bounded_and_reversible(open: &Open<'_>) {
    let engine = must(open());
    for n in [5, 3, 9, 1, 7] {
        must(engine.order(batch(&[(&format!("k{n}"), Some("v"))])));
    }
    let keys = |from: &str, to: &str, reverse| -> String {
        let pairs = pairs(&*engine, from.as_bytes(), to.as_bytes(), reverse);
        pairs.iter().map(|(key, _)| char::from(key[1])).collect()
    };
    assert_eq!(keys("k", "l", false), "13579");
    assert_eq!(keys("k", "l", true), "97531");
    assert_eq!(keys("k3", "k7", false), "35", "the upper bound is excluded, the lower is not");
    assert_eq!(keys("k3", "k7", true), "53");
    assert_eq!(keys("k7", "k3", false), "");
    assert_eq!(keys("k3", "k3", true), "");
    // Bounds need not be keys: empty and overlong ones count too.
    let long = format!("k5{}", "!".repeat(KEY_MAX));
    for settled in [false, true] {
        if settled {
            settle(&*engine);
        }
        assert_eq!(keys("", "l", false), "13579");
        assert_eq!(keys("", "", false), "");
        assert_eq!(keys("k", &long, true), "531");
        assert_eq!(keys(&long, "l", false), "79");
    }
    assert_eq!(must(engine.get(b"")), None);
    assert_eq!(must(engine.get(long.as_bytes())), None);
}

fn scans_end_when_told(open: &Open<'_>) {
    let engine = must(open());
    fill(&*engine, 2000);
    for reverse in [false, true] {
        for stop in [1, 15, 16, 17, 700] {
            let mut seen = 0;
            must(engine.scan(b"k", b"l", reverse, &mut |_, _| {
                seen += 1;
                if seen == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }));
            assert_eq!(seen, stop);
        }
    }
}

fn scans_merge_old_and_new_state(open: &Open<'_>) {
    let engine = must(open());
    fill(&*engine, 3000);
    settle(&*engine);
    let mut wanted: BTreeMap<Vec<u8>, Vec<u8>> = pairs(&*engine, b"k", b"l", false).into_iter().collect();
    assert_eq!(wanted.len(), 3000);
    for n in (0..3000).step_by(3) {
        let (old, new) = (format!("k{n:06}"), format!("k{n:06}+"));
        must(engine.order(batch(&[(&old, Some("changed")), (&new, Some("new"))])));
        wanted.insert(old.into(), b"changed".to_vec());
        wanted.insert(new.into(), b"new".to_vec());
    }
    let wanted: Vec<_> = wanted.into_iter().collect();
    assert!(pairs(&*engine, b"k", b"l", false) == wanted);
    let backwards: Vec<_> = wanted.into_iter().rev().collect();
    assert!(pairs(&*engine, b"k", b"l", true) == backwards);
}

fn deleted_keys_vanish_everywhere(open: &Open<'_>) {
    let engine = must(open());
    fill(&*engine, 3000);
    settle(&*engine);
    // A long run, so that whole chunks hold nothing, and single ones.
    for n in (100..2900).chain((0..100).step_by(2)) {
        must(engine.order(batch(&[(&format!("k{n:06}"), None)])));
    }
    let check = |engine: &dyn Engine| {
        assert_eq!(must(engine.get(b"k001000")), None);
        assert_eq!(pairs(engine, b"k", b"l", false).len(), 150);
        assert_eq!(pairs(engine, b"k", b"l", true).len(), 150);
    };
    check(&*engine);
    settle(&*engine);
    check(&*engine);
    drop(engine);
    check(&*must(open()));
}

fn scans_may_call_the_engine(open: &Open<'_>) {
    let engine = must(open());
    fill(&*engine, 100);
    settle(&*engine);
    let mut seen = 0;
    must(engine.scan(b"k", b"l", false, &mut |key, value| {
        assert_eq!(must(engine.get(key)).as_deref(), Some(value));
        must(engine.order(batch(&[("seen", Some("x"))])));
        must(engine.scan(key, b"l", false, &mut |_, _| ControlFlow::Break(())));
        seen += 1;
        ControlFlow::Continue(())
    }));
    assert_eq!(seen, 100);
}

fn snapshots_are_of_one_batch(open: &Open<'_>) {
    let engine = must(open());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 0..300 {
                let value = n.to_string();
                must(engine.order(batch(&[("a", Some(&value)), ("z", Some(&value))])));
            }
        });
        for _ in 0..5 {
            let mut found = Vec::new();
            let seq = must(engine.snapshot(&mut |_, value| {
                found.push(value.to_vec());
                ControlFlow::Continue(())
            }));
            assert!(seq <= engine.durable());
            match (&found[..], seq) {
                ([], Seq(0)) => {}
                ([a, z], Seq(n)) => {
                    assert_eq!(a, z);
                    assert_eq!(a, &(n - 1).to_string().into_bytes());
                }
                other => panic!("not the state after one batch: {other:?}"),
            }
        }
        writer.join().unwrap_or_else(|_| panic!("the writer failed"));
    });
}

fn limits_are_refused_and_harmless(open: &Open<'_>) {
    let engine = must(open());
    let mut too_long = Batch::at(0);
    too_long.put(vec![b'k'; KEY_MAX + 1], "v");
    let mut too_much = Batch::at(0);
    too_much.put("good", "v").put("k", vec![0; VALUE_MAX + 1]);
    for bad in [too_long, too_much] {
        assert!(matches!(engine.order(bad), Err(Error::TooLarge { .. })));
    }
    assert_eq!((engine.ordered(), must(engine.get(b"good"))), (Seq(0), None));
    let mut largest = Batch::at(0);
    largest.put(vec![b'k'; KEY_MAX], vec![7; VALUE_MAX]);
    let seq = must(engine.order(largest));
    must(engine.wait_durable(seq, LONG));
    settle(&*engine);
    assert_eq!(must(engine.get(&[b'k'; KEY_MAX])).map(|value| value.len()), Some(VALUE_MAX));
}

fn listeners_hear_what_becomes_durable(open: &Open<'_>) {
    let engine = must(open());
    let heard = Arc::new(AtomicU64::new(0));
    let ears = heard.clone();
    engine.on_durable(Box::new(move |news| {
        let seq = must(news);
        assert!(ears.swap(seq.0, Ordering::SeqCst) < seq.0, "news only rise");
    }));
    let seq = must(engine.order(batch(&[("a", Some("1"))])));
    engine.hurry(seq);
    let deadline = Instant::now() + LONG;
    while heard.load(Ordering::SeqCst) < seq.0 {
        assert!(Instant::now() < deadline, "nobody was told");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(engine.durable() >= seq);
}

fn concurrent_batches_are_whole_and_in_one_order(open: &Open<'_>) {
    let engine = must(open());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let engine = &engine;
            scope.spawn(move || {
                for n in 0..250 {
                    let value = format!("{thread}.{n}");
                    let seq = must(engine.order(batch(&[
                        ("first", Some(&value)),
                        (&format!("t{thread}.{n:03}"), Some("x")),
                        ("second", Some(&value)),
                    ])));
                    if n % 50 == 0 {
                        must(engine.wait_durable(seq, LONG));
                    }
                }
            });
        }
    });
    assert_eq!(engine.ordered(), Seq(1000));
    let check = |engine: &dyn Engine| {
        assert_eq!(must(engine.get(b"first")), must(engine.get(b"second")));
        assert_eq!(pairs(engine, b"t", b"u", false).len(), 1000);
    };
    check(&*engine);
    drop(engine);
    check(&*must(open()));
}

fn random_changes_match_an_ordered_map(open: &Open<'_>) {
    let mut engine = must(open());
    let mut model = BTreeMap::new();
    let mut random = Random(0x5eed);
    for step in 0..3000 {
        let mut batch = Batch::at(step);
        for _ in 0..random.below(4) + 1 {
            let key = format!("k{:03}", random.below(400)).into_bytes();
            if random.below(3) == 0 {
                batch.delete(key.clone());
                model.remove(&key);
            } else {
                let value = vec![random.below(256) as u8; random.below(40) as usize];
                batch.put(key.clone(), value.clone());
                model.insert(key, value);
            }
        }
        must(engine.order(batch));
        match random.below(300) {
            0 => settle(&*engine),
            1 => {
                drop(engine);
                engine = must(open());
            }
            2..12 => {
                let (from, to) = (format!("k{:03}", random.below(400)), format!("k{:03}", random.below(400)));
                let (from, to) = (from.as_bytes(), to.as_bytes());
                let reverse = random.below(2) == 0;
                let mut wanted: Vec<(Vec<u8>, Vec<u8>)> = model
                    .iter()
                    .filter(|(key, _)| key.as_slice() >= from && key.as_slice() < to)
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect();
                if reverse {
                    wanted.reverse();
                }
                assert!(pairs(&*engine, from, to, reverse) == wanted, "step {step}");
            }
            _ => {
                let key = format!("k{:03}", random.below(400)).into_bytes();
                assert_eq!(must(engine.get(&key)), model.get(&key).cloned(), "step {step}");
            }
        }
    }
}

fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}

fn batch(changes: &[(&str, Option<&str>)]) -> Batch {
    let mut batch = Batch::at(1);
    for (key, value) in changes {
        match value {
            Some(value) => batch.put(*key, *value),
            None => batch.delete(*key),
        };
    }
    batch
}

fn fill(engine: &dyn Engine, count: usize) {
    for n in 0..count {
        must(engine.order(batch(&[(&format!("k{n:06}"), Some("old"))])));
    }
}

/// Brings everything ordered so far where it finally lives.
fn settle(engine: &dyn Engine) {
    must(engine.snapshot(&mut |_, _| ControlFlow::Break(())));
}

fn pairs(engine: &dyn Engine, from: &[u8], to: &[u8], reverse: bool) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut found = Vec::new();
    must(engine.scan(from, to, reverse, &mut |key, value| {
        found.push((key.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    }));
    found
}

/// Enough randomness for a test, the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}
