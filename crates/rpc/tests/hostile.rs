//! Peers that break every rule: they lose their connection and harm nobody else.

mod harness;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::raw::{self, frame, message, until_closed};
use harness::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use torchfs_proto::Code;
use torchfs_rpc::frame::{BODY_MAX, HEADER_LEN, Header, Kind, PAYLOAD_MAX};
use torchfs_rpc::hello::Hello;
use torchfs_rpc::{Config, Connection, Secret, ServerHandle};

/// A server, a good connection to it, and its address.
async fn victim(config: Config) -> (Arc<Zoo>, ServerHandle, Connection, String) {
    let zoo = Zoo::new();
    let server = start(zoo.clone(), config).await;
    let addr = server.local_addr().to_string();
    let good = Connection::connect(&addr, Config::default()).await.expect("connected");
    (zoo, server, good, addr)
}

async fn still_serves(good: &Connection) {
    good.call(call(ECHO, "still there")).await.expect("an answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_made_by_hand_from_the_document_is_served() {
    let (_zoo, _server, _good, addr) = victim(Config::default()).await;
    let mut stream = raw::connect(&addr).await;
    stream.write_all(&frame(Kind::Request, 77, ECHO, b"body", b"payload")).await.expect("sent");
    let (header, body, payload) = raw::read_frame(&mut stream).await;
    assert_eq!((header.kind, header.id, header.method), (Kind::Reply, 77, ECHO));
    assert_eq!((&body[..], &payload[..]), (&b"body"[..], &b"payload"[..]));
    stream.write_all(&Header::bare(Kind::Ping, 5).encode()).await.expect("sent");
    let (header, ..) = raw::read_frame(&mut stream).await;
    assert_eq!((header.kind, header.id, header.flags), (Kind::Ping, 5, torchfs_rpc::frame::PONG));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_instead_of_a_handshake_closes_the_connection() {
    let (_zoo, _server, good, addr) = victim(Config::default()).await;
    let long = [&b"TFSW\x01\x00"[..], &5000u16.to_le_bytes()].concat();
    let wrong_sum = {
        let mut bytes = message(raw::HELLO, &raw::hello());
        bytes[20] ^= 1;
        bytes
    };
    let short = message(raw::HELLO, &[0; 71]);
    let early_proof = message(raw::PROOF, &[0; 32]);
    let http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
    for bytes in [long, wrong_sum, short, early_proof, http] {
        let mut stream = TcpStream::connect(&addr).await.expect("connected");
        stream.write_all(&bytes).await.expect("sent");
        until_closed(&mut stream).await;
    }
    still_serves(&good).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_among_frames_closes_the_connection() {
    let (zoo, _server, good, addr) = victim(Config::default()).await;
    let lengths = |body_len, payload_len| {
        Header { body_len, payload_len, ..Header::bare(Kind::Request, 1) }.encode().to_vec()
    };
    let wrong_body = {
        let mut bytes = frame(Kind::Request, 1, ECHO, b"body", b"");
        bytes[HEADER_LEN] ^= 1;
        bytes
    };
    let wrong_payload = {
        let mut bytes = frame(Kind::Request, 1, ECHO, b"", b"payload");
        bytes[HEADER_LEN] ^= 1;
        bytes
    };
    let twice = [frame(Kind::Request, 1, HANG, b"", b""), frame(Kind::Request, 1, HANG, b"", b"")].concat();
    let bad = [
        vec![0; 64],
        vec![0xFF; 4096],
        lengths(BODY_MAX as u32 + 1, 0),
        lengths(0, PAYLOAD_MAX as u32 + 1),
        lengths(u32::MAX, u32::MAX),
        wrong_body,
        wrong_payload,
        twice,
        frame(Kind::Reply, 1, ECHO, b"", b""),
        Header { flags: torchfs_rpc::frame::PONG, ..Header::bare(Kind::Ping, 1) }.encode().to_vec(),
    ];
    for bytes in bad {
        let mut stream = raw::connect(&addr).await;
        stream.write_all(&bytes).await.expect("sent");
        until_closed(&mut stream).await;
    }
    still_serves(&good).await;
    until("nothing runs", || zoo.running.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_frame_and_then_nothing_is_dropped_in_time() {
    let config = Config { frame_timeout: Duration::from_millis(50), ..Config::default() };
    let (zoo, _server, good, addr) = victim(config).await;
    let whole = frame(Kind::Request, 1, ECHO, &[1; 100], &[2; 100_000]);
    for cut in [1, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 50, HEADER_LEN + 100, whole.len() - 1] {
        let mut stream = raw::connect(&addr).await;
        let _ = stream.write_all(&whole[..cut]).await; // the server may be quicker
        until_closed(&mut stream).await;
        // And the same when the peer goes away.
        let mut stream = raw::connect(&addr).await;
        let _ = stream.write_all(&whole[..cut]).await;
    }
    still_serves(&good).await;
    assert_eq!(zoo.started.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_drips_is_dropped_in_time() {
    let config = Config { frame_timeout: Duration::from_millis(200), ..Config::default() };
    let (zoo, _server, good, addr) = victim(config).await;
    let mut stream = raw::connect(&addr).await;
    let dripping = async {
        // Never silent for long, never done: 60,000 bytes, one at a time.
        for byte in frame(Kind::Request, 1, ECHO, &[1; 60_000], b"") {
            if stream.write_all(&[byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("the whole frame was taken");
    };
    tokio::time::timeout(LONG, dripping).await.expect("dropped in time");
    still_serves(&good).await;
    assert_eq!(zoo.started.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_that_stops_is_dropped_in_time() {
    let config = Config { handshake_timeout: Duration::from_millis(50), ..Config::default() };
    let zoo = Zoo::new();
    let server = start(zoo, config).await;
    let addr = server.local_addr().to_string();
    let hello = message(raw::HELLO, &raw::hello());
    for cut in [0, 1, 8, hello.len() - 1, hello.len()] {
        let mut stream = TcpStream::connect(&addr).await.expect("connected");
        let _ = stream.write_all(&hello[..cut]).await; // the server may be quicker
        until_closed(&mut stream).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_peer_is_dropped() {
    let config = Config { silence_max: Duration::from_millis(400), ..Config::default() };
    let zoo = Zoo::new();
    let server = start(zoo.clone(), config).await;
    let addr = server.local_addr().to_string();
    let mut silent = raw::connect(&addr).await;
    until_closed(&mut silent).await;
    until("closed was called", || zoo.closed.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_reads_no_answers_is_held_back_and_dropped() {
    let config = Config {
        stall_timeout: Duration::from_millis(100),
        connection_bytes_max: 8 << 20,
        requests_max: 64,
        ..Config::default()
    };
    let (zoo, _server, good, addr) = victim(config).await;
    let mut stream = raw::connect(&addr).await;
    let (mut from, mut to) = stream.split();
    let request = frame(Kind::Request, 1, BULK, &(1u32 << 20).to_le_bytes(), b"");
    // All of these together would be 10 GB of answers.
    let asking = async {
        for _ in 0..10_000 {
            if to.write_all(&request).await.is_err() {
                return;
            }
        }
        // The requests fit into the buffers between; the server must close nevertheless.
    };
    tokio::time::timeout(LONG, asking).await.expect("asked, or refused");
    until("the server gave up", || zoo.closed.load(Ordering::SeqCst) == 1).await;
    let mut sink = vec![0; 1 << 20];
    while matches!(from.read(&mut sink).await, Ok(n) if n > 0) {}
    // Its buffers, the bound, and the kernel's own; far from what was asked for.
    assert!(zoo.started.load(Ordering::SeqCst) < 200, "{}", zoo.started.load(Ordering::SeqCst));
    still_serves(&good).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_bound_are_told_so() {
    let config = Config { connections_max: 2, ..Config::default() };
    let zoo = Zoo::new();
    let server = start(zoo.clone(), config).await;
    let addr = server.local_addr().to_string();
    let first = Connection::connect(&addr, Config::default()).await.expect("connected");
    let _second = Connection::connect(&addr, Config::default()).await.expect("connected");
    let fault = Connection::connect(&addr, Config::default()).await.err().expect("refused");
    assert_eq!(fault.code, Code::Overloaded, "{fault}");
    first.close().await;
    until("a place is free", || zoo.closed.load(Ordering::SeqCst) == 1).await;
    // The place is free once the connection's task has ended, a moment after `closed`.
    let end = std::time::Instant::now() + LONG;
    while Connection::connect(&addr, Config::default()).await.is_err() {
        assert!(std::time::Instant::now() < end, "no place became free");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_prove_nothing_keep_nobody_out() {
    let with_secret = |secret| Config { secret: Secret::new(secret), ..Config::default() };
    let config = Config {
        connections_max: 2,
        strangers_max: 4,
        strangers_patience: Duration::from_millis(1),
        handshake_timeout: LONG,
        ..with_secret("s")
    };
    let server = start(Zoo::new(), config).await;
    let addr = server.local_addr().to_string();
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(&addr).await.expect("connected"));
    }
    // The oldest are gone, and the others do not count among those who know the secret.
    let first = Connection::connect(&addr, with_secret("s")).await.expect("connected");
    let _second = Connection::connect(&addr, with_secret("s")).await.expect("connected");
    still_serves(&first).await;
    until_closed(&mut silent[0]).await;
    let fault = Connection::connect(&addr, with_secret("s")).await.err().expect("refused");
    assert_eq!(fault.code, Code::Overloaded, "{fault}");
    // Whoever knows no secret does not even learn that.
    let fault = Connection::connect(&addr, with_secret("guess")).await.err().expect("refused");
    assert_eq!(fault.code, Code::Denied, "{fault}");
}

/// A listener that shakes hands honestly and then does something else.
async fn liar<F, Fut>(then: F) -> Connection
where
    F: FnOnce(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("an address").to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        raw::accept(&mut stream).await;
        then(stream).await;
    });
    Connection::connect(&addr, Config::default()).await.expect("connected")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_sends_garbage_fails_the_calls() {
    for garbage in [vec![0; 100], frame(Kind::Request, 1, 1, b"", b""), frame(Kind::Cancel, 1, 0, b"", b"")] {
        let connection = liar(|mut stream| async move {
            raw::read_frame(&mut stream).await;
            stream.write_all(&garbage).await.expect("sent");
            until_closed(&mut stream).await;
        })
        .await;
        let fault = connection.call(call(ECHO, "")).await.expect_err("lost");
        assert_eq!(fault.code, Code::Unreachable);
        assert!(connection.lost().is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_nobody_waits_for_are_read_over() {
    let connection = liar(|mut stream| async move {
        let (header, ..) = raw::read_frame(&mut stream).await;
        for id in [0, 1, u64::MAX, header.id ^ 1 << 32, header.id ^ 1] {
            stream.write_all(&frame(Kind::Reply, id, 1, &[1; 5000], &[2; 300_000])).await.expect("sent");
        }
        stream.write_all(&frame(Kind::Reply, header.id, 1, b"this one", b"")).await.expect("sent");
        // And once more, after it was answered.
        stream.write_all(&frame(Kind::Reply, header.id, 1, b"again", b"")).await.expect("sent");
        let (header, ..) = raw::read_frame(&mut stream).await;
        stream.write_all(&frame(Kind::Reply, header.id, 1, b"next", b"")).await.expect("sent");
        until_closed(&mut stream).await;
    })
    .await;
    assert_eq!(connection.call(call(ECHO, "")).await.expect("an answer").body, "this one");
    assert_eq!(connection.call(call(ECHO, "")).await.expect("an answer").body, "next");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_that_cannot_be_read_is_still_a_fault() {
    let connection = liar(|mut stream| async move {
        let (header, ..) = raw::read_frame(&mut stream).await;
        let body = b"\xff\xff nonsense";
        let header = Header {
            flags: torchfs_rpc::frame::FAULT,
            body_len: body.len() as u32,
            body_crc: crc32c::crc32c(body),
            ..Header::bare(Kind::Reply, header.id)
        };
        stream.write_all(&[&header.encode(), &body[..]].concat()).await.expect("sent");
        until_closed(&mut stream).await;
    })
    .await;
    assert_eq!(connection.call(call(ECHO, "")).await.expect_err("a fault").code, Code::Protocol);
}

/// A generator whose seed can be given from outside.
struct Dice(u64);

impl Dice {
    fn new(test: u64) -> Dice {
        let seed = torchfs_fuzz::seed(20_261);
        println!("TORCHFS_SEED={seed}");
        Dice(seed ^ test.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn rounds(usual: usize) -> usize {
    torchfs_fuzz::rounds(usual as u64, usual as u64 * 50) as usize
}

/// Changes, cuts, doubles or inserts a few bytes.
fn mutate(bytes: &mut Vec<u8>, dice: &mut Dice) {
    for _ in 0..=dice.below(3) {
        if bytes.is_empty() {
            return;
        }
        let at = dice.below(bytes.len());
        match dice.below(5) {
            0 => bytes[at] ^= 1 << dice.below(8),
            1 => bytes[at] = dice.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let part = bytes[at..(at + 40).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
            _ => drop(bytes.drain(at..(at + 1 + dice.below(60)).min(bytes.len()))),
        }
    }
}

/// A header with honest checksum and arbitrary fields.
fn arbitrary_header(dice: &mut Dice) -> [u8; HEADER_LEN] {
    let kind = [Kind::Request, Kind::Reply, Kind::Cancel, Kind::Ping][dice.below(4)];
    let small = |dice: &mut Dice| if dice.below(4) == 0 { dice.next() as u32 } else { dice.below(50) as u32 };
    Header {
        kind,
        flags: dice.below(8) as u16,
        method: dice.below(12) as u16,
        id: dice.below(3) as u64,
        body_len: small(dice),
        payload_len: small(dice),
        deadline_ms: small(dice),
        body_crc: dice.next() as u32,
        trace: dice.next(),
        payload_crc: dice.next() as u32,
    }
    .encode()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_survives_mutated_conversations() {
    let (zoo, server, good, addr) = victim(Config::default()).await;
    let mut dice = Dice::new(1);
    for round in 0..rounds(300) {
        let in_handshake = round % 4 == 0;
        let mut bytes = Vec::new();
        if in_handshake {
            bytes.extend(message(raw::HELLO, &raw::hello()));
            bytes.extend(message(raw::PROOF, &[0; 32]));
        } else {
            for id in 0..=dice.below(4) as u64 {
                let method = [ECHO, ECHO_LATER, HANG, FAIL][dice.below(4)];
                let (body, payload) = (pattern(dice.below(300), id), pattern(dice.below(20_000), id));
                bytes.extend(frame(Kind::Request, id, method, &body, &payload));
                if dice.below(3) == 0 {
                    bytes.extend(Header::bare(Kind::Cancel, dice.below(5) as u64).encode());
                }
            }
        }
        match dice.below(3) {
            0 if !in_handshake => bytes.extend(arbitrary_header(&mut dice)),
            _ => mutate(&mut bytes, &mut dice),
        }
        let mut stream = if in_handshake {
            TcpStream::connect(&addr).await.expect("connected")
        } else {
            raw::connect(&addr).await
        };
        // The server may close in the middle of it.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        until_closed(&mut stream).await;
        if round % 50 == 0 {
            still_serves(&good).await;
        }
    }
    still_serves(&good).await;
    until("nothing runs", || zoo.running.load(Ordering::SeqCst) == 0).await;
    server.shutdown().await;
}

#[test]
fn decoders_survive_arbitrary_bytes() {
    let mut dice = Dice::new(2);
    let mut taken = 0;
    for round in 0..rounds(100_000) {
        let mut bytes = match round % 3 {
            0 => arbitrary_header(&mut dice),
            _ => frame(Kind::Request, dice.next(), 1, b"", b"").try_into().expect("a bare header"),
        };
        if round % 3 == 2 {
            bytes[dice.below(HEADER_LEN)] ^= 1 << dice.below(8);
        }
        if let Ok(header) = Header::decode(&bytes) {
            taken += 1;
            assert!(header.body_len as usize <= BODY_MAX && header.payload_len as usize <= PAYLOAD_MAX);
            assert_eq!(header.encode(), bytes);
        }
        let mut bytes = [0; 72];
        bytes.iter_mut().for_each(|byte| *byte = if dice.below(3) == 0 { dice.next() as u8 } else { 0 });
        if let Some(hello) = Hello::decode(&bytes) {
            assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }
    }
    assert!(taken > 0);
}
