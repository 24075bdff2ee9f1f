//! What a caller may rely on, over TCP and within a process alike.

mod harness;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use harness::*;
use torchfs_proto::Code;
use torchfs_rpc::{AlignedBuf, Call, Payload, frame};

/// Each sentence becomes two tests.
macro_rules! over_both {
    ($($name:ident;)*) => {
        mod over_tcp { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::Over::Tcp).await; }
        )* }
        mod within_a_process { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::Over::Local).await; }
        )* }
    };
}

over_both! {
    bodies_and_payloads_come_back_as_they_were;
    every_kind_of_answer_arrives_as_its_bytes;
    every_kind_of_payload_can_be_sent;
    many_calls_are_in_flight_at_once_and_answers_find_their_calls;
    a_dropped_call_drops_the_services_future;
    a_call_ends_by_its_deadline_and_names_the_peer;
    a_deadline_in_the_past_is_not_sent;
    a_fault_arrives_whole;
    a_panic_of_the_service_is_one_failed_call;
    the_service_sees_deadline_and_trace;
    what_one_frame_cannot_carry_is_refused;
    a_file_that_is_too_short_is_a_fault;
    the_service_hears_when_its_peer_is_gone;
    a_call_nobody_polled_never_happened;
}

async fn bodies_and_payloads_come_back_as_they_were(over: Over) {
    let world = World::new(over).await;
    for method in [ECHO, ECHO_LATER] {
        for (body, payload) in
            [(0, 0), (1, 0), (0, 1), (100, 4096), (70_000, 65_536), (3, 1 << 20), (1 << 20, 5 << 20)]
        {
            let (body, payload) = (pattern(body, 1), pattern(payload, 2));
            let call = call(method, body.clone()).payload(payload.clone());
            let reply = world.connection.call(call).await.expect("an answer");
            assert_eq!(reply.body, body);
            assert_eq!(&*reply.payload, &payload[..]);
        }
    }
}

async fn every_kind_of_answer_arrives_as_its_bytes(over: Over) {
    let world = World::new(over).await;
    for round in 0..3 {
        for kind in 0..KINDS {
            let reply = world.connection.call(call(KIND, vec![kind])).await.expect("an answer");
            assert_eq!(reply.body[..], [kind]);
            assert!(*reply.payload == Zoo::expected(kind)[..], "kind {kind} in round {round}");
        }
    }
}

async fn every_kind_of_payload_can_be_sent(over: Over) {
    let world = World::new(over).await;
    let files = Files::new();
    let all = pattern(300_000, 7);
    let kinds: [fn(&Files, &[u8]) -> Payload; 6] = [
        |_, all| Payload::Bytes(Bytes::copy_from_slice(all)),
        |_, all| Payload::Parts(all.chunks(4321).map(Bytes::copy_from_slice).collect()),
        |_, all| Payload::Buf(AlignedBuf::copy_of(all)),
        |files, _| Payload::File { file: files.real.clone(), ranges: vec![(0, 300_000)] },
        |files, _| Payload::File { file: files.double.clone(), ranges: vec![(0, 1), (1, 299_999)] },
        |_, all| Payload::from(all.to_vec()),
    ];
    for make in kinds {
        for carries_sums in [false, true] {
            let mut call = call(ECHO, "x").payload(make(&files, &all));
            call.carries_sums = carries_sums;
            let reply = world.connection.call(call).await.expect("an answer");
            assert!(*reply.payload == all[..]);
        }
    }
}

async fn many_calls_are_in_flight_at_once_and_answers_find_their_calls(over: Over) {
    let world = World::new(over).await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0u64..16 {
        let connection = world.connection.clone();
        tasks.spawn(async move {
            for round in 0u64..50 {
                let calls: Vec<_> = (0..8u64)
                    .map(|n| {
                        let body = (task << 32 | round << 8 | n).to_le_bytes().to_vec();
                        let method = if n % 2 == 0 { ECHO } else { ECHO_LATER };
                        let payload = pattern((n * 1000) as usize, n);
                        (
                            body.clone(),
                            payload.clone(),
                            tokio::spawn(connection.call(call(method, body).payload(payload))),
                        )
                    })
                    .collect();
                for (body, payload, call) in calls {
                    let reply = call.await.expect("no panic").expect("an answer");
                    assert_eq!(reply.body, body);
                    assert_eq!(&*reply.payload, &payload[..]);
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no panic");
    }
}

async fn a_dropped_call_drops_the_services_future(over: Over) {
    let world = World::new(over).await;
    let hang = tokio::spawn(world.connection.call(call(HANG, "")));
    until("the request runs", || world.zoo.running.load(Ordering::SeqCst) == 1).await;
    hang.abort();
    until("the request is dropped", || world.zoo.dropped.load(Ordering::SeqCst) == 1).await;
    world.connection.call(call(ECHO, "still there")).await.expect("an answer");
}

async fn a_call_ends_by_its_deadline_and_names_the_peer(over: Over) {
    let world = World::new(over).await;
    let (started, dropped) = (&world.zoo.started, &world.zoo.dropped);
    // On a busy machine the time may be up before the request is sent; then it is not sent at all.
    while started.load(Ordering::SeqCst) == 0 {
        let late = world.connection.call(Call::new(HANG, "", Duration::from_millis(30))).await;
        let fault = late.expect_err("too late");
        assert_eq!(fault.code, Code::Timeout);
        assert!(fault.what.contains(world.connection.addr()) || fault.what.contains("the server"), "{fault}");
    }
    until("the request is dropped", || dropped.load(Ordering::SeqCst) == started.load(Ordering::SeqCst))
        .await;
    // A later deadline first, an earlier one after: both are kept.
    let long = tokio::spawn(world.connection.call(call(HANG, "")));
    let late = world.connection.call(Call::new(HANG, "", Duration::from_millis(20))).await;
    assert_eq!(late.expect_err("too late").code, Code::Timeout);
    long.abort();
}

async fn a_deadline_in_the_past_is_not_sent(over: Over) {
    let world = World::new(over).await;
    let mut late = call(ECHO, "");
    late.deadline = Instant::now();
    assert_eq!(world.connection.call(late).await.expect_err("too late").code, Code::Timeout);
    world.connection.call(call(ECHO, "")).await.expect("an answer");
    assert_eq!(world.zoo.started.load(Ordering::SeqCst), 1);
}

async fn a_fault_arrives_whole(over: Over) {
    let world = World::new(over).await;
    let fault = world.connection.call(call(FAIL, "")).await.expect_err("a fault");
    assert_eq!((fault.code, &*fault.what, &*fault.next), (Code::NoSpace, "disk 3 is full", "add a disk"));
}

async fn a_panic_of_the_service_is_one_failed_call(over: Over) {
    let world = World::new(over).await;
    for method in [PANIC, PANIC_LATER] {
        let fault = world.connection.call(call(method, "")).await.expect_err("a fault");
        assert_eq!(fault.code, Code::Internal);
    }
    world.connection.call(call(ECHO, "still there")).await.expect("an answer");
}

async fn the_service_sees_deadline_and_trace(over: Over) {
    let world = World::new(over).await;
    let reply = world.connection.call(call(ABOUT, "").trace(0xABCD)).await.expect("an answer");
    let number = |at: usize| u64::from_le_bytes(reply.body[at..at + 8].try_into().expect("eight bytes"));
    assert!(number(0) > 0 && number(0) <= LONG.as_millis() as u64);
    assert_eq!(number(8), 0xABCD);
}

async fn what_one_frame_cannot_carry_is_refused(over: Over) {
    let world = World::new(over).await;
    let long = call(ECHO, vec![0; frame::BODY_MAX + 1]);
    assert_eq!(world.connection.call(long).await.expect_err("too long").code, Code::TooLarge);
    let long = call(ECHO, "").payload(vec![0; frame::PAYLOAD_MAX + 1]);
    assert_eq!(world.connection.call(long).await.expect_err("too long").code, Code::TooLarge);
    let long = call(BULK, (frame::PAYLOAD_MAX as u32 + 1).to_le_bytes().to_vec());
    assert_eq!(world.connection.call(long).await.expect_err("too long").code, Code::TooLarge);
    let most = call(BULK, (frame::PAYLOAD_MAX as u32).to_le_bytes().to_vec());
    assert_eq!(world.connection.call(most).await.expect("fits").payload.len(), frame::PAYLOAD_MAX);
}

async fn a_file_that_is_too_short_is_a_fault(over: Over) {
    let world = World::new(over).await;
    let files = Files::new();
    for file in [files.real, files.double] {
        let short =
            call(ECHO, "").payload(Payload::File { file, ranges: vec![(299_990, 11)] }).carries_sums();
        assert_eq!(world.connection.call(short).await.expect_err("too short").code, Code::Io);
    }
    world.connection.call(call(ECHO, "still there")).await.expect("an answer");
}

async fn the_service_hears_when_its_peer_is_gone(over: Over) {
    let World { zoo, connection, server } = World::new(over).await;
    connection.call(call(ECHO, "")).await.expect("an answer");
    assert_eq!(zoo.closed.load(Ordering::SeqCst), 0);
    drop(connection);
    until("closed was called", || zoo.closed.load(Ordering::SeqCst) == 1).await;
    drop(server);
}

async fn a_call_nobody_polled_never_happened(over: Over) {
    let world = World::new(over).await;
    drop(world.connection.call(call(ECHO, "")));
    world.connection.call(call(ECHO, "")).await.expect("an answer");
    assert_eq!(world.zoo.started.load(Ordering::SeqCst), 1);
}
