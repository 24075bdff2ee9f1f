//! Sessions with a fake metadata service: replays, fences, recalls, bounds and callers that go away.

mod harness;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use harness::meta::Fake;
use harness::{LONG, Net, Transport, soon, until};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use torchfs_client::{Changed, Keeper, Mark, Meta, MetaConfig};
use torchfs_proto::attr::{Kind, Raw};
use torchfs_proto::msg::meta::{Commit, Done, Event, FileLock, Grant, LockKind, LockType, Make, Op, lease};
use torchfs_proto::{Code, Ino, Result};

const BOTH: [Transport; 2] = [Transport::Local, Transport::Tcp];

struct Setup {
    fake: Arc<Fake>,
    net: Net,
    addr: String,
    meta: Arc<Meta>,
}

async fn setup(transport: Transport) -> Setup {
    with(transport, |_| {}).await
}

async fn with(transport: Transport, change: impl FnOnce(&mut MetaConfig)) -> Setup {
    let (net, fake) = (Net::default(), Fake::new());
    let addr = net.add(transport, fake.clone()).await;
    let mut config = MetaConfig::new(vec![addr.clone()], Arc::new(net.clone()), Handle::current());
    config.pause = Duration::from_millis(5);
    change(&mut config);
    let meta = soon("a session", Meta::open(config)).await.expect("a session");
    Setup { fake, net, addr, meta }
}

fn make(name: &str) -> Op {
    Op::Make(Make {
        parent: Ino::ROOT,
        name: name.as_bytes().to_vec().into(),
        kind: Kind::File,
        mode: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Raw::from(Vec::new()),
        exclusive: true,
        open: false,
    })
}

fn commit(ino: u64, grant: u64) -> Op {
    Op::Commit(Commit {
        ino: Ino(ino),
        grant,
        blocks: Vec::new(),
        ranges: Vec::new(),
        mtime: None,
        kill_privileges: false,
        expect: None,
        ends: None,
    })
}

fn lock() -> Op {
    let lock =
        FileLock { kind: LockKind::Flock, ty: LockType::Write, owner: 1, pid: 1, start: 0, end: u64::MAX };
    Op::Lock { ino: Ino(1), lock, wait: true }
}

fn lookup() -> Op {
    Op::Lookup { parent: Ino::ROOT, name: b"x".to_vec().into() }
}

fn made(changed: Result<Changed>) -> Ino {
    match changed.expect("made").done {
        Done::Made { attr, .. } => attr.ino,
        other => panic!("{other:?}"),
    }
}

fn grant(ino: u64, bits: u8, number: u64) -> Grant {
    Grant { ino: Ino(ino), bits, number }
}

/// Polls once, as a FUSE thread outside of the runtime does.
fn first_poll<F: Future + Send>(future: F) -> Option<F::Output>
where
    F::Output: Send,
{
    std::thread::scope(|scope| scope.spawn(|| future.now_or_never()).join().expect("no panic"))
}

/// A keeper that notes what it is told; recalls of the inode in `slow` wait for the gate.
struct Notes {
    recalled: Mutex<Vec<(Ino, u8)>>,
    slow: Option<Ino>,
    gate: Arc<Semaphore>,
    lost: AtomicUsize,
    fenced: AtomicUsize,
    orphaned: Mutex<Vec<Ino>>,
}

impl Notes {
    fn new(slow: Option<Ino>) -> Arc<Notes> {
        Arc::new(Notes {
            recalled: Mutex::default(),
            slow,
            gate: Arc::new(Semaphore::new(0)),
            lost: AtomicUsize::new(0),
            fenced: AtomicUsize::new(0),
            orphaned: Mutex::default(),
        })
    }

    fn keep(self: &Arc<Notes>, meta: &Meta) {
        let keeper: Arc<dyn Keeper> = self.clone();
        meta.set_keeper(Arc::downgrade(&keeper));
    }
}

impl Keeper for Notes {
    fn recall(&self, ino: Ino, bits: u8, _names: Vec<Raw>) -> BoxFuture<'static, bool> {
        self.recalled.lock().push((ino, bits));
        let gate = self.gate.clone();
        let slow = self.slow == Some(ino);
        async move {
            if slow {
                gate.acquire().await.expect("open").forget();
            }
            slow
        }
        .boxed()
    }

    fn orphaned(&self, ino: Ino) {
        self.orphaned.lock().push(ino);
    }

    fn changed(&self, _ino: Ino) {}

    fn lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn open_inodes(&self) -> Vec<Ino> {
        vec![Ino(42)]
    }

    fn fenced(&self) {
        self.fenced.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn within_a_process_calls_finish_at_the_first_poll_on_any_thread() {
    let Setup { meta, .. } = setup(Transport::Local).await;
    assert_eq!(first_poll(meta.ask(lookup())), Some(Ok(Done::Entry(None))));
    let changed = first_poll(meta.change(make("a"))).expect("at once").expect("made");
    assert_eq!(first_poll(meta.durable(changed.seq)), Some(Ok(())));
    assert_eq!(first_poll(meta.durable(Mark::default())), Some(Ok(())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_is_told_again_in_order_to_the_next_leader() {
    for transport in BOTH {
        let Setup { fake, meta, .. } = setup(transport).await;
        fake.set(|state| state.auto_sync = false);
        let mut inos = Vec::new();
        for n in 0..300 {
            inos.push(made(soon("a change", meta.change(make(&n.to_string()))).await));
        }
        fake.set(|state| state.durable = 100);
        fake.kill();
        let after = soon("a change", meta.change(make("after"))).await.expect("made");
        assert_eq!(fake.sequences(), (1..=301).collect::<Vec<_>>(), "in order, each once");
        fake.sync();
        soon("durability", meta.durable(after.seq)).await.expect("durable");
        soon("durability", meta.durable_all()).await.expect("durable");
        // The same inodes were made again, though the new leader would have chosen others.
        let log = fake.state.lock().log.len();
        assert_eq!(log, 301);
        assert_eq!(inos, (101..=400).map(Ino).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_in_flight_wait_for_the_next_leader_and_get_one_answer() {
    for transport in BOTH {
        let Setup { fake, meta, .. } = setup(transport).await;
        fake.set(|state| state.hold = true);
        let callers: Vec<_> = (0..20)
            .map(|n| {
                let meta = meta.clone();
                tokio::spawn(async move { made(meta.change(make(&n.to_string())).await) })
            })
            .collect();
        until("all are in flight", || fake.sequences().len() == 20).await;
        fake.kill();
        let mut inos = Vec::new();
        for caller in callers {
            inos.push(soon("an answer", caller).await.expect("no panic"));
        }
        inos.sort();
        inos.dedup();
        assert_eq!(inos.len(), 20);
        let mut sequences = fake.sequences();
        sequences.sort_unstable();
        assert_eq!(sequences, (1..=20).collect::<Vec<_>>(), "each happened once");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_connection_is_made_again_and_nothing_happens_twice() {
    let Setup { fake, net, addr, meta } = setup(Transport::Tcp).await;
    for round in 0..5 {
        for n in 0..20 {
            made(soon("a change", meta.change(make(&format!("{round}.{n}")))).await);
        }
        net.cut();
        let waiting = tokio::spawn({
            let meta = meta.clone();
            async move { meta.change(make("waits")).await.map(|_| ()) }
        });
        net.serve_again(&addr, fake.clone()).await;
        soon("the caller that waited", waiting).await.expect("no panic").expect("made");
    }
    let sequences = fake.sequences();
    assert_eq!(sequences, (1..=105).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_with_a_lower_fence_is_refused() {
    let net = Net::default();
    let (old, new) = (Fake::new(), Fake::new());
    let addrs =
        vec![net.add(Transport::Local, old.clone()).await, net.add(Transport::Local, new.clone()).await];
    let mut config = MetaConfig::new(addrs, Arc::new(net.clone()), Handle::current());
    config.pause = Duration::from_millis(1);
    let meta = Meta::open(config).await.expect("a session");
    new.set(|state| state.fence = 5);
    old.set(|state| state.follower = true);
    soon("the new leader", meta.change(make("a"))).await.expect("made");
    assert_eq!((old.sequences().len(), new.sequences().len()), (0, 1));
    // The old one believes to lead again while the new one is silent.
    new.set(|state| state.follower = true);
    old.set(|state| state.follower = false);
    let resumes = || old.count(|op| matches!(op, Op::ResumeSession));
    let before = resumes();
    let waiting = tokio::spawn({
        let meta = meta.clone();
        async move { meta.change(make("b")).await.map(|_| ()) }
    });
    until("the old one was tried", || resumes() > before + 1).await;
    assert!(old.sequences().is_empty());
    new.set(|state| state.follower = false);
    soon("the new leader", waiting).await.expect("no panic").expect("made");
    assert!(old.sequences().is_empty(), "nothing was told to the old one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_gone_fails_every_call_with_a_sentence() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    let notes = Notes::new(None);
    notes.keep(&meta);
    fake.set(|state| state.forgot = true);
    for _ in 0..2 {
        let fault = soon("a fault", meta.change(make("a"))).await.expect_err("gone");
        assert_eq!(fault.code, Code::NoSession);
        assert!(fault.what.contains("session") && fault.next.contains("mount again"), "{fault}");
    }
    assert!(meta.ask(lookup()).await.is_err());
    assert!(meta.durable_all().await.is_err());
    assert!(soon("a fault", meta.block_id()).await.is_err());
    until("the keeper knows", || notes.fenced.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recall_that_overtakes_the_reply_with_the_grant_wins() {
    for transport in BOTH {
        let Setup { fake, meta, .. } = setup(transport).await;
        let notes = Notes::new(None);
        notes.keep(&meta);
        fake.set(|state| {
            state.hold_lookups = true;
            state.grants.push_back(vec![grant(9, lease::ATTR, 10), grant(8, lease::ATTR, 9)]);
        });
        let asking = tokio::spawn({
            let meta = meta.clone();
            async move { meta.ask(lookup()).await }
        });
        until("the grant is on its way", || fake.state.lock().grants.is_empty()).await;
        let recall = Event::Recall { ino: Ino(9), bits: lease::ATTR, number: 10, names: Vec::new() };
        fake.set(|state| state.events.push((1, recall)));
        until("the recall is acknowledged", || fake.count(|op| matches!(op, Op::Ack { .. })) == 1).await;
        fake.set(|state| state.hold_lookups = false);
        soon("the reply", asking).await.expect("no panic").expect("answered");
        assert_eq!(meta.holds(Ino(9), lease::ATTR), None);
        assert!(meta.holds(Ino(8), lease::ATTR).is_some());
        assert_eq!(*notes.recalled.lock(), [(Ino(9), lease::ATTR)]);
        fake.set(|state| state.grants.push_back(vec![grant(9, lease::ATTR, 11)]));
        soon("a reply", meta.ask(lookup())).await.expect("answered");
        assert!(meta.holds(Ino(9), lease::ATTR).is_some(), "a newer grant is good");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_recall_keeps_no_other_waiting() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    let notes = Notes::new(Some(Ino(1)));
    notes.keep(&meta);
    fake.set(|state| state.grants.push_back(vec![grant(1, lease::WRITE, 3), grant(2, lease::READ, 4)]));
    meta.ask(lookup()).await.expect("answered");
    assert_eq!(meta.grant_number(Ino(1)), 3);
    fake.set(|state| {
        let recall = |ino, bits, number| Event::Recall { ino: Ino(ino), bits, number, names: Vec::new() };
        state.events = vec![
            (1, recall(1, lease::WRITE, 3)),
            (2, recall(2, lease::READ, 4)),
            (3, Event::Orphaned { ino: Ino(5) }),
        ];
    });
    let acked = |event| {
        let asked = fake.state.lock().asked.clone();
        asked.iter().any(|op| matches!(op, Op::Ack { events } if events.contains(&event)))
    };
    until("the quick one is acknowledged", || acked((2, false))).await;
    assert_eq!(meta.holds(Ino(1), lease::WRITE), None);
    assert_eq!(meta.grant_number(Ino(1)), 3, "what is dirty is committed under the old grant");
    notes.gate.add_permits(1);
    until("the slow one is acknowledged", || acked((1, true))).await;
    assert_eq!(meta.grant_number(Ino(1)), 0);
    until("the keeper knows of the orphan", || *notes.orphaned.lock() == [Ino(5)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_lease_epoch_rises_all_leases_are_lost() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    let notes = Notes::new(None);
    notes.keep(&meta);
    fake.set(|state| state.grants.push_back(vec![grant(1, lease::ATTR, 3)]));
    meta.ask(lookup()).await.expect("answered");
    assert!(meta.holds(Ino(1), lease::ATTR).is_some());
    fake.set(|state| state.lease_epoch = 2);
    meta.ask(lookup()).await.expect("answered");
    assert_eq!(meta.holds(Ino(1), lease::ATTR), None);
    assert_eq!(meta.lease_epoch(), 2);
    until("the keeper knows", || notes.lost.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_reclaimed_and_commits_follow_their_grant_to_its_new_number() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    let notes = Notes::new(None);
    notes.keep(&meta);
    fake.set(|state| {
        state.auto_sync = false;
        let both = vec![grant(1, lease::WRITE, 30), grant(2, lease::NAMES, 31)];
        state.grants.push_back(both);
        state.regrants.insert(Ino(1), grant(1, lease::WRITE, 2));
    });
    meta.ask(lookup()).await.expect("answered");
    meta.change(commit(1, meta.grant_number(Ino(1)))).await.expect("committed");
    fake.kill();
    soon("the next leader", meta.ask(lookup())).await.expect("answered");
    assert_eq!(meta.grant_number(Ino(1)), 2);
    assert!(meta.holds(Ino(1), lease::WRITE).is_some());
    assert_eq!(meta.holds(Ino(2), lease::NAMES), None);
    until("what was not granted anew is recalled", || *notes.recalled.lock() == [(Ino(2), lease::NAMES)])
        .await;
    // One that was prepared before the leader changed names the same grant.
    soon("a commit", meta.change(commit(1, 30))).await.expect("committed");
    let grants: Vec<u64> = fake
        .state
        .lock()
        .log
        .iter()
        .map(|(.., op)| match op {
            Op::Commit(commit) => commit.grant,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(grants, [2, 2]);
    let told = fake.count(|op| matches!(op, Op::Reclaim { open, .. } if *open == [Ino(42)]));
    assert_eq!((told, notes.lost.load(Ordering::Relaxed)), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_to_write_that_went_to_others_is_reclaimed_only_for_commits_that_are_lost() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    fake.set(|state| {
        state.auto_sync = false;
        let both = vec![grant(1, lease::WRITE, 3), grant(2, lease::WRITE, 4)];
        state.grants.push_back(both);
    });
    meta.ask(lookup()).await.expect("answered");
    for ino in [1, 2] {
        meta.change(commit(ino, meta.grant_number(Ino(ino)))).await.expect("committed");
        let number = meta.grant_number(Ino(ino));
        fake.set(|state| state.events.push((ino, recall(ino, number))));
        until("it is given back", || meta.grant_number(Ino(ino)) == 0).await;
    }
    // The first commit is durable by now, which was not heard here.
    fake.set(|state| state.durable = 1);
    fake.kill();
    soon("the next leader", meta.ask(lookup())).await.expect("answered");
    let reclaimed = |ino| {
        let named = |leases: &[(Ino, u8)]| leases.iter().any(|(named, _)| *named == Ino(ino));
        fake.count(|op| matches!(op, Op::Reclaim { leases, .. } if named(leases))) > 0
    };
    assert_eq!((reclaimed(1), reclaimed(2)), (false, true));
    assert_eq!(fake.sequences(), [1, 2], "each happened once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ledger_is_bounded_and_makes_room_by_syncing() {
    let Setup { fake, meta, .. } = with(Transport::Local, |config| config.ledger_max = 4).await;
    fake.set(|state| state.auto_sync = false);
    for n in 0..4 {
        meta.change(make(&n.to_string())).await.expect("made");
    }
    let fifth = tokio::spawn({
        let meta = meta.clone();
        async move { meta.change(make("fifth")).await.map(|_| ()) }
    });
    until("it asks for durability", || fake.count(|op| matches!(op, Op::Sync { .. })) > 0).await;
    assert_eq!(fake.sequences().len(), 4);
    fake.sync();
    soon("room", fifth).await.expect("no panic").expect("made");
    assert_eq!(fake.state.lock().came.last(), Some(&(5, 4)), "its watermark lets the results be dropped");
}

/// A session whose first change waits for another session to give a lease back, and whose ledger is full behind it.
async fn crowded() -> (Setup, tokio::task::JoinHandle<Ino>) {
    let setup = with(Transport::Local, |config| config.ledger_max = 4).await;
    setup.fake.set(|state| {
        let both = vec![grant(1, lease::WRITE, 3), grant(2, lease::WRITE, 4)];
        state.grants.push_back(both);
    });
    setup.meta.ask(lookup()).await.expect("answered");
    let meta = setup.meta.clone();
    setup.fake.hold(|op| matches!(op, Op::Make(make) if make.name.as_slice() == b"waits"));
    let waits = tokio::spawn(async move { made(meta.change(make("waits")).await) });
    until("it is under way", || setup.fake.sequences().len() == 1).await;
    for n in 0..3 {
        setup.meta.change(make(&n.to_string())).await.expect("made");
    }
    (setup, waits)
}

fn recall(ino: u64, number: u64) -> Event {
    Event::Recall { ino: Ino(ino), bits: lease::WRITE, number, names: Vec::new() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_honours_a_recall_never_waits_for_room() {
    let (Setup { fake, meta, .. }, waits) = crowded().await;
    let notes = Notes::new(Some(Ino(1)));
    notes.keep(&meta);
    let commits = |ino| {
        let meta = meta.clone();
        tokio::spawn(async move { meta.change(commit(ino, meta.grant_number(Ino(ino)))).await.map(|_| ()) })
    };
    let (awaited, common) = (commits(1), commits(2));
    until("they wait for room", || fake.count(|op| matches!(op, Op::Sync { .. })) > 0).await;
    assert_eq!(fake.count(|op| matches!(op, Op::Commit(_))), 0);
    // The session that the first change waits for waits for this file.
    fake.set(|state| state.events.push((1, recall(1, 3))));
    soon("the commit", awaited).await.expect("no panic").expect("committed");
    soon("its blocks' ids", meta.block_id()).await.expect("an id");
    let further = soon("another commit", commits(1)).await;
    further.expect("no panic").expect("committed");
    assert_eq!(fake.count(|op| matches!(op, Op::Commit(commit) if commit.ino == Ino(2))), 0);
    fake.set(|state| state.hold = false);
    soon("the first", waits).await.expect("no panic");
    soon("the rest", common).await.expect("no panic").expect("committed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_waited_for_keeps_no_change_waiting() {
    for transport in BOTH {
        let Setup { fake, meta, .. } = with(transport, |config| {
            (config.ledger_max, config.lock_wait) = (4, LONG);
        })
        .await;
        fake.hold(|op| matches!(op, Op::Lock { .. }));
        let waits = tokio::spawn({
            let meta = meta.clone();
            async move { meta.change(lock()).await.map(|_| ()) }
        });
        until("it is under way", || fake.sequences().len() == 1).await;
        for n in 0..20 {
            made(soon("a change", meta.change(make(&n.to_string()))).await);
        }
        until("it is asked for again", || fake.count(|op| matches!(op, Op::Lock { .. })) > 1).await;
        fake.set(|state| state.hold = false);
        soon("the lock", waits).await.expect("no panic").expect("granted");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_given_up_wakes_those_who_wait_for_room() {
    let Setup { fake, meta, .. } = with(Transport::Local, |config| config.ledger_max = 4).await;
    fake.hold(|op| matches!(op, Op::Lock { .. }));
    let mut caller = Box::pin(meta.change(lock()));
    assert!(caller.as_mut().now_or_never().is_none());
    for n in 0..3 {
        made(meta.change(make(&n.to_string())).await);
    }
    let mut fifth = Box::pin(meta.change(make("fifth")));
    assert!(fifth.as_mut().now_or_never().is_none(), "there is no room, and nobody looks after the lock");
    let fifth = async { made(fifth.await) };
    let dropped = async { drop(caller) };
    soon("room", futures_util::future::join(fifth, dropped)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_sync_serves_all_who_wait() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    fake.set(|state| state.auto_sync = false);
    let mut marks = Vec::new();
    for n in 0..10 {
        marks.push(meta.change(make(&n.to_string())).await.expect("made").seq);
    }
    let mut waiting: Vec<_> = marks.iter().rev().map(|mark| Box::pin(meta.durable(*mark))).collect();
    for waiter in &mut waiting {
        assert!(waiter.as_mut().now_or_never().is_none());
    }
    assert_eq!(fake.count(|op| matches!(op, Op::Sync { .. })), 1);
    // The one who sent it goes away: somebody else sends another.
    drop(waiting.remove(0));
    let rest = tokio::spawn({
        let (meta, mark) = (meta.clone(), marks[9]);
        async move { meta.durable(mark).await }
    });
    until("another Sync", || fake.count(|op| matches!(op, Op::Sync { .. })) == 2).await;
    fake.sync();
    for waiter in waiting {
        soon("durability", waiter).await.expect("durable");
    }
    soon("durability", rest).await.expect("no panic").expect("durable");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_outlives_the_caller_that_was_interrupted() {
    for transport in BOTH {
        let Setup { fake, meta, .. } = setup(transport).await;
        fake.set(|state| state.hold = true);
        let mut caller = Box::pin(meta.change(make("a")));
        assert!(caller.as_mut().now_or_never().is_none());
        until("it arrived", || fake.sequences().len() == 1).await;
        drop(caller);
        fake.set(|state| state.hold = false);
        // Its answer is consumed: the watermark passes it.
        let passed = async {
            loop {
                let changed = meta.change(make("b")).await.expect("made");
                meta.durable(changed.seq).await.expect("durable");
                if fake.state.lock().came.last().is_some_and(|(_, watermark)| *watermark >= 1) {
                    break;
                }
            }
        };
        soon("the watermark", passed).await;
        assert_eq!(fake.sequences()[0], 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_change_is_replayed_all_the_same() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    fake.set(|state| state.hold = true);
    let mut caller = Box::pin(meta.change(make("a")));
    assert!(caller.as_mut().now_or_never().is_none());
    drop(caller);
    fake.kill();
    until("it happens under the next leader", || fake.sequences() == [1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_to_an_interrupted_change_that_was_replayed_is_not_kept() {
    for transport in BOTH {
        let Setup { fake, net, addr, meta } = with(transport, |config| config.ledger_max = 4).await;
        fake.set(|state| state.hold = true);
        let mut caller = Box::pin(meta.change(make("a")));
        assert!(caller.as_mut().now_or_never().is_none());
        until("it arrived", || fake.sequences().len() == 1).await;
        drop(caller);
        match transport {
            Transport::Local => fake.kill(),
            Transport::Tcp => {
                net.cut();
                fake.set(|state| state.hold = false);
                net.serve_again(&addr, fake.clone()).await;
            }
        }
        // There is room for any number of further ones.
        for n in 0..20 {
            made(soon("a change", meta.change(make(&n.to_string()))).await);
        }
        soon("durability", meta.durable_all()).await.expect("durable");
        made(soon("a change", meta.change(make("last"))).await);
        assert_eq!(fake.state.lock().came.last(), Some(&(22, 21)), "nothing holds back the watermark");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_waited_for_is_given_up_with_its_caller() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    fake.set(|state| state.hold = true);
    let mut caller = Box::pin(meta.change(lock()));
    assert!(caller.as_mut().now_or_never().is_none());
    drop(caller);
    fake.set(|state| state.hold = false);
    made(meta.change(make("a")).await);
    assert_eq!(fake.state.lock().came.last(), Some(&(2, 1)), "nothing holds back the watermark");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_change_is_not_kept() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    let fault = meta.change(make("taken")).await.expect_err("refused");
    assert_eq!(fault.code, Code::Exists);
    fake.set(|state| state.auto_sync = false);
    assert_eq!(meta.durable_all().now_or_never(), Some(Ok(())), "nothing to make durable");
    fake.kill();
    made(soon("a change", meta.change(make("a"))).await);
    assert_eq!(fake.sequences(), [2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_service_is_named_when_time_is_up() {
    let Setup { fake, meta, addr, .. } =
        with(Transport::Local, |config| config.op_timeout = Duration::from_secs(2)).await;
    fake.set(|state| state.mute = true);
    let both = futures_util::future::join(meta.ask(lookup()), meta.change(make("a")));
    let (asked, changed) = soon("an end", both).await;
    for fault in [asked.expect_err("silent"), changed.expect_err("silent")] {
        assert_eq!(fault.code, Code::Timeout);
        assert!(fault.what.contains(&addr), "{fault}");
    }
    fake.set(|state| state.mute = false);
    until("the change happens nevertheless", || fake.sequences() == [1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_ids_are_unique_and_come_from_durable_ranges() {
    let Setup { fake, meta, .. } = with(Transport::Local, |config| config.ids_per_grant = 8).await;
    let takers: Vec<_> = (0..4)
        .map(|_| {
            let meta = meta.clone();
            tokio::spawn(async move {
                let mut ids = Vec::new();
                for _ in 0..50 {
                    ids.push(soon("an id", meta.block_id()).await.expect("an id"));
                }
                ids
            })
        })
        .collect();
    let mut ids = Vec::new();
    for taker in takers {
        ids.extend(taker.await.expect("no panic"));
    }
    let state = fake.state.lock();
    let durable = |counter: u64| {
        state.log.iter().filter(|(_, place, _)| *place <= state.durable).count() as u64 * 8 > counter
    };
    assert!(ids.iter().all(|id| durable(id.counter)));
    drop(state);
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_is_told_in_the_background() {
    let Setup { fake, meta, .. } = setup(Transport::Local).await;
    fake.set(|state| state.grants.push_back(vec![grant(1, lease::ATTR | lease::READ, 3)]));
    meta.ask(lookup()).await.expect("answered");
    meta.give_back(Ino(1), lease::READ);
    assert_eq!(meta.holds(Ino(1), lease::READ), None);
    assert!(meta.holds(Ino(1), lease::ATTR).is_some());
    let told = |entry| {
        let asked = fake.state.lock().asked.clone();
        asked.iter().any(|op| matches!(op, Op::Forget { leases } if leases.contains(&entry)))
    };
    until("the lease is given back", || told((Ino(1), lease::READ, 3))).await;
    meta.forget(Ino(1));
    until("the inode is forgotten", || told((Ino(1), 255, 3))).await;
    meta.release(Ino(6));
    until("the orphan is released", || {
        fake.count(|op| matches!(op, Op::Release { inos } if *inos == [Ino(6)])) == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_release_reaches_the_service_however_many_there_are_and_whatever_it_refuses() {
    let short = Duration::from_millis(1);
    let Setup { fake, meta, .. } = with(Transport::Local, |config| config.refused_pause = short).await;
    fake.set(|state| state.refuse_releases = 3);
    let orphans: BTreeSet<Ino> = (1_000..4_000).map(Ino).collect();
    orphans.iter().for_each(|ino| meta.release(*ino));
    until("all are released", || {
        let state = fake.state.lock();
        let told = state.log.iter().filter_map(|(_, _, op)| match op {
            Op::Release { inos } => Some(inos),
            _ => None,
        });
        told.flatten().copied().collect::<BTreeSet<_>>() == orphans
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_waits_for_tasks_and_makes_everything_durable() {
    let Setup { fake, meta, .. } = with(Transport::Tcp, |config| config.close_timeout = LONG).await;
    made(meta.change(make("a")).await);
    let task = meta.clone();
    meta.spawn(async move {
        tokio::task::yield_now().await;
        made(task.change(make("b")).await);
    });
    soon("the end", meta.close()).await.expect("closed");
    {
        let state = fake.state.lock();
        assert_eq!((state.log.len(), state.durable, state.closed), (2, 2, true));
    }
    assert!(meta.change(make("c")).await.is_err());
    meta.close().await.expect("twice is once");
}
