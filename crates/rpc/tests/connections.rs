//! The life of connections: handshake, bounds, loss, shutdown, links.

mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::*;
use tokio::net::{TcpListener, TcpStream};
use torchfs_proto::{ClusterId, Code, Fault};
use torchfs_rpc::{Call, Config, Connection, Link, Listener, Peer, Role, Secret};

fn with_secret(secret: &str) -> Config {
    Config { secret: Secret::new(secret), ..Config::default() }
}

/// What a caller with the second configuration hears from a server with the first.
async fn meets(server: Config, client: Config) -> Result<Connection, Fault> {
    let server = start(Zoo::new(), server).await;
    let met = Connection::connect(&server.local_addr().to_string(), client).await;
    if met.is_ok() {
        tokio::spawn(async move {
            let _keep = server;
            std::future::pending::<()>().await
        });
    }
    met
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_secret_opens_the_door() {
    let connection = meets(with_secret("open sesame"), with_secret("open sesame\n")).await.expect("let in");
    connection.call(call(ECHO, "x")).await.expect("an answer");
    assert_eq!(connection.agreed().expect("over TCP").version, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_or_missing_secret_is_denied_both_ways_with_advice() {
    for (server, client) in [("a", "b"), ("a", ""), ("", "b")] {
        let fault = meets(with_secret(server), with_secret(client)).await.err().expect("denied");
        assert_eq!(fault.code, Code::Denied, "{server:?} {client:?}");
        assert!(fault.next.contains("--secret-file"), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_does_not_check_the_listener_is_denied_too() {
    use harness::raw;
    use tokio::io::AsyncWriteExt;
    let server = start(Zoo::new(), with_secret("right")).await;
    let mut stream = TcpStream::connect(server.local_addr()).await.expect("connected");
    stream.write_all(&raw::message(raw::HELLO, &raw::hello())).await.expect("sent");
    let (_, theirs) = raw::receive(&mut stream).await;
    let proof = raw::proof(b"caller", &raw::hello(), &theirs[..72]);
    stream.write_all(&raw::message(raw::PROOF, &proof)).await.expect("sent");
    let (kind, refusal) = raw::receive(&mut stream).await;
    assert_eq!(kind, 4);
    let fault: Fault = minicbor::decode(&refusal).expect("a fault");
    assert_eq!(fault.code, Code::Denied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_do_not_meet_are_refused_with_a_sentence() {
    for (ours, theirs) in [(1..=1, 2..=3), (2..=3, 1..=1)] {
        let server = Config { versions: ours, ..Config::default() };
        let fault =
            meets(server, Config { versions: theirs, ..Config::default() }).await.err().expect("refused");
        assert_eq!(fault.code, Code::Version);
        assert!(fault.next.contains("upgrade"), "{fault}");
    }
    let server = Config { versions: 1..=2, ..Config::default() };
    let met = meets(server, Config { versions: 2..=3, ..Config::default() }).await.expect("neighbours talk");
    assert_eq!(met.agreed().expect("over TCP").version, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_and_clusters_have_to_fit() {
    let needs = Config { features_must: 2, ..Config::default() };
    assert_eq!(meets(needs.clone(), Config::default()).await.err().expect("refused").code, Code::Version);
    assert_eq!(meets(Config::default(), needs.clone()).await.err().expect("refused").code, Code::Version);
    let knows = Config { features_may: 3, ..Config::default() };
    assert_eq!(meets(needs, knows).await.expect("fits").agreed().expect("over TCP").features, 2);

    let of = |cluster| Config { cluster: ClusterId(cluster), ..Config::default() };
    assert_eq!(meets(of(1), of(2)).await.err().expect("refused").code, Code::Denied);
    assert_eq!(meets(of(1), of(0)).await.expect("fits").agreed().expect("over TCP").cluster, ClusterId(1));
    meets(of(0), of(2)).await.expect("fits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listening_beyond_loopback_needs_a_secret() {
    let fault = Listener::bind("0.0.0.0:0", Config::default()).await.err().expect("refused");
    assert_eq!(fault.code, Code::Denied);
    Listener::bind("0.0.0.0:0", with_secret("x")).await.expect("bound");
    Listener::bind("0.0.0.0:0", Config { insecure: true, ..Config::default() }).await.expect("bound");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_never_answers_the_handshake_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("an address").to_string();
    let config = Config { connect_timeout: Duration::from_millis(50), ..Config::default() };
    let fault = Connection::connect(&addr, config).await.err().expect("given up");
    assert_eq!(fault.code, Code::Unreachable);
    assert!(fault.what.contains(&addr));
}

/// Makes so many gated calls over a world with these bounds and returns how many ran at once at most.
async fn most_at_once(server: Config, client: Config, calls: usize, payload: usize) -> usize {
    let world = World::with(Over::Tcp, server, client).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..calls {
        let call = call(GATE, n.to_le_bytes().to_vec()).payload(pattern(payload, n as u64));
        tasks.spawn(world.connection.call(call));
    }
    until("some run", || world.zoo.running.load(Ordering::SeqCst) > 0).await;
    world.zoo.open_gate(calls);
    while let Some(reply) = tasks.join_next().await {
        reply.expect("no panic").expect("an answer");
    }
    assert_eq!(world.zoo.started.load(Ordering::SeqCst), calls);
    world.zoo.running_most.load(Ordering::SeqCst)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_takes_no_more_requests_at_once_than_it_may() {
    let server = Config { requests_max: 4, ..Config::default() };
    assert!(most_at_once(server, Config::default(), 100, 0).await <= 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_takes_no_more_bytes_at_once_than_it_may() {
    let server = Config { connection_bytes_max: 1 << 20, ..Config::default() };
    assert!(most_at_once(server, Config::default(), 20, 400_000).await <= 2);
    let server = Config { total_bytes_max: 1 << 20, ..Config::default() };
    assert!(most_at_once(server, Config::default(), 20, 400_000).await <= 2);
    // One that is larger than the bound goes alone.
    let server = Config { connection_bytes_max: 1000, total_bytes_max: 1000, ..Config::default() };
    assert!(most_at_once(server, Config::default(), 5, 400_000).await <= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_has_no_more_calls_in_flight_than_it_may() {
    let client = Config { calls_max: 3, ..Config::default() };
    assert!(most_at_once(Config::default(), client, 50, 10).await <= 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_for_its_place_ends_by_its_deadline() {
    let client = Config { calls_max: 1, ..Config::default() };
    let world = World::with(Over::Tcp, Config::default(), client).await;
    let first = tokio::spawn(world.connection.call(call(HANG, "")));
    until("the first runs", || world.zoo.running.load(Ordering::SeqCst) == 1).await;
    let late = world.connection.call(Call::new(ECHO, "", Duration::from_millis(20))).await;
    assert_eq!(late.expect_err("no place").code, Code::Timeout);
    first.abort();
    world.connection.call(call(ECHO, "")).await.expect("the place is free again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_fails_all_its_calls_and_stays_lost() {
    let mut world = World::new(Over::Tcp).await;
    let calls: Vec<_> = (0..10).map(|_| tokio::spawn(world.connection.call(call(HANG, "")))).collect();
    until("all run", || world.zoo.running.load(Ordering::SeqCst) == 10).await;
    drop(world.server.take());
    for call in calls {
        let fault = call.await.expect("no panic").expect_err("lost");
        assert_eq!(fault.code, Code::Unreachable);
        assert!(fault.what.contains(world.connection.addr()));
    }
    assert!(world.connection.lost().is_some());
    assert_eq!(world.connection.call(call(ECHO, "")).await.expect_err("lost").code, Code::Unreachable);
    until("the requests are dropped", || world.zoo.running.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_a_connection_fails_its_calls_and_joins_its_tasks() {
    let world = World::new(Over::Tcp).await;
    let hang = tokio::spawn(world.connection.call(call(HANG, "")));
    until("it runs", || world.zoo.running.load(Ordering::SeqCst) == 1).await;
    world.connection.close().await;
    assert_eq!(hang.await.expect("no panic").expect_err("closed").code, Code::Unreachable);
    until("the request is dropped", || world.zoo.running.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("an address").to_string();
    let silent = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        harness::raw::accept(&mut stream).await;
        std::future::pending::<()>().await
    });
    let config = Config {
        ping_every: Duration::from_millis(20),
        silence_max: Duration::from_millis(100),
        ..Config::default()
    };
    let connection = Connection::connect(&addr, config).await.expect("connected");
    let fault = connection.call(call(ECHO, "")).await.expect_err("given up");
    assert_eq!(fault.code, Code::Unreachable);
    silent.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_holds_a_connection_back_says_that_it_lives() {
    use harness::raw;
    use tokio::io::AsyncWriteExt;
    use torchfs_rpc::frame::{Kind, PONG};
    let config = Config { requests_max: 1, ping_every: Duration::from_millis(10), ..Config::default() };
    let server = start(Zoo::new(), config).await;
    let mut stream = raw::connect(&server.local_addr().to_string()).await;
    for id in 1..=2 {
        stream.write_all(&raw::frame(Kind::Request, id, GATE, b"", b"")).await.expect("sent");
    }
    // The second is not read before the first ends, nor would a ping be.
    for _ in 0..3 {
        let (header, ..) = tokio::time::timeout(LONG, raw::read_frame(&mut stream)).await.expect("a pong");
        assert_eq!((header.kind, header.id, header.flags), (Kind::Ping, 0, PONG));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_lets_requests_in_flight_finish() {
    let mut world =
        World::with(Over::Tcp, Config { grace: LONG, ..Config::default() }, Config::default()).await;
    let gated = tokio::spawn(world.connection.call(call(GATE, "in flight")));
    until("it runs", || world.zoo.running.load(Ordering::SeqCst) == 1).await;
    let server = world.server.take().expect("a server");
    let addr = server.local_addr();
    let down = tokio::spawn(server.shutdown());
    until("it no longer listens", || std::net::TcpStream::connect(addr).is_err()).await;
    world.zoo.open_gate(1);
    assert_eq!(gated.await.expect("no panic").expect("answered").body, "in flight");
    down.await.expect("shut down");
    assert_eq!(world.zoo.closed.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_ever() {
    let config = Config { grace: Duration::from_millis(20), ..Config::default() };
    let mut world = World::with(Over::Tcp, config, Config::default()).await;
    let hang = tokio::spawn(world.connection.call(call(HANG, "")));
    until("it runs", || world.zoo.running.load(Ordering::SeqCst) == 1).await;
    world.server.take().expect("a server").shutdown().await;
    assert_eq!(world.zoo.running.load(Ordering::SeqCst), 0);
    assert_eq!(hang.await.expect("no panic").expect_err("lost").code, Code::Unreachable);
}

#[test]
fn the_first_poll_sends_the_request_from_a_thread_without_a_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let world = runtime.block_on(World::new(Over::Tcp));
    let mut hang = world.connection.call(call(HANG, ""));
    assert!(poll_once(&mut hang).is_pending());
    runtime.block_on(until("it runs", || world.zoo.running.load(Ordering::SeqCst) == 1));
    drop(hang);
    runtime.block_on(until("it is dropped", || world.zoo.dropped.load(Ordering::SeqCst) == 1));
    // And moves into a task afterwards, as the agent does with a miss.
    let mut echo = world.connection.call(call(ECHO_LATER, "x"));
    let reply = match poll_once(&mut echo) {
        std::task::Poll::Ready(reply) => reply,
        std::task::Poll::Pending => runtime.block_on(async { tokio::spawn(echo).await.expect("no panic") }),
    };
    assert_eq!(reply.expect("an answer").body, "x");
    drop(world);
}

#[test]
fn a_local_call_that_is_ready_needs_no_runtime() {
    let zoo = Zoo::new();
    let connection = Connection::local(zoo, Peer::new("this process", Role::Agent));
    match poll_once(&mut connection.call(call(ECHO, "x"))) {
        std::task::Poll::Ready(reply) => assert_eq!(reply.expect("an answer").body, "x"),
        std::task::Poll::Pending => panic!("not ready at once"),
    }
}

/// An address that can be taken down and up again without giving up its port.
struct Door {
    addr: String,
    open: Arc<AtomicBool>,
    passing: Arc<parking_lot::Mutex<Vec<tokio::task::AbortHandle>>>,
}

impl Door {
    async fn new(to: std::net::SocketAddr) -> Door {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let addr = listener.local_addr().expect("an address").to_string();
        let door = Door { addr, open: Arc::new(AtomicBool::new(true)), passing: Arc::default() };
        let (open, passing) = (door.open.clone(), door.passing.clone());
        tokio::spawn(async move {
            while let Ok((mut here, _)) = listener.accept().await {
                if open.load(Ordering::SeqCst) {
                    let task = tokio::spawn(async move {
                        let mut there = TcpStream::connect(to).await.expect("connected");
                        let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                    });
                    passing.lock().push(task.abort_handle());
                }
            }
        });
        door
    }

    fn shut(&self) {
        self.open.store(false, Ordering::SeqCst);
        self.passing.lock().drain(..).for_each(|task| task.abort());
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_comes_back_after_its_server_did() {
    let server = start(Zoo::new(), Config::default()).await;
    let door = Door::new(server.local_addr()).await;
    let config = Config {
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(20),
        ..Config::default()
    };
    let link = Link::new(door.addr.clone(), config);
    assert_eq!(link.health().connections, 0);
    for _ in 0..4 {
        link.call(call(ECHO, "x")).await.expect("an answer");
    }
    assert_eq!(link.health().connections, 2);
    assert!(link.health().round_trip.is_some());
    door.shut();
    until("both are lost", || link.health().connections == 0).await;
    let fault = link.call(call(ECHO, "x")).await.expect_err("down");
    assert_eq!(fault.code, Code::Unreachable);
    assert!(link.health().last_failure.is_some());
    assert!(link.health().failures > 0);
    door.open();
    let end = Instant::now() + LONG;
    while link.call(call(ECHO, "x")).await.is_err() {
        assert!(Instant::now() < end, "the link did not come back");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(link.health().failures, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_failed_says_so_at_once_until_it_tries_again() {
    let server = start(Zoo::new(), with_secret("a")).await;
    let config = Config {
        backoff_min: Duration::from_secs(3600),
        backoff_max: Duration::from_secs(3600),
        ..with_secret("b")
    };
    let link = Link::new(server.local_addr().to_string(), config);
    for _ in 0..5 {
        assert_eq!(link.call(call(ECHO, "")).await.expect_err("denied").code, Code::Denied);
    }
    assert_eq!(link.health().failures, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_come_together_share_one_attempt() {
    let zoo = Zoo::new();
    let server = start(zoo.clone(), Config { connections_max: 1, ..Config::default() }).await;
    let link = Link::new(server.local_addr().to_string(), Config { lanes: 1, ..Config::default() });
    let calls: Vec<_> = (0..50).map(|_| tokio::spawn(link.call(call(ECHO, "x")))).collect();
    for call in calls {
        call.await.expect("no panic").expect("an answer");
    }
    drop(link);
    until("the one connection is closed", || zoo.closed.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fixed_link_is_its_connection() {
    let world = World::new(Over::Local).await;
    let link = Link::fixed(world.connection.clone());
    for lane in 0..3 {
        assert_eq!(link.call_on(lane, call(ECHO, "x")).await.expect("an answer").body, "x");
    }
    assert_eq!(link.health().connections, 1);
    assert_eq!(link.addr(), "this process");
}
