//! A peer made by hand from docs/wire.md, to say what no honest peer would.
#![allow(dead_code)]

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torchfs_rpc::frame::{HEADER_LEN, Header, Kind, PAYLOAD_CRC};

pub const HELLO: u8 = 1;
pub const PROOF: u8 = 2;
pub const WELCOME: u8 = 3;

/// A handshake message.
pub fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"TFSW".to_vec();
    bytes.extend_from_slice(&[kind, 0]);
    bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
    bytes.extend_from_slice(body);
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}

/// The hello of a tool that speaks version 1 and has no secret.
pub fn hello() -> [u8; 72] {
    let mut bytes = [0; 72];
    bytes[0] = 1;
    bytes[2] = 1;
    bytes[4] = 4;
    bytes[40..].fill(0x5A);
    bytes
}

/// What proves an empty secret.
pub fn proof(who: &[u8], caller: &[u8], listener: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(b"").expect("any key");
    for part in [&b"torchfs handshake 1 "[..], who, caller, listener] {
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

/// A connection after its handshake.
pub async fn connect(addr: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.expect("connected");
    let ours = hello();
    stream.write_all(&message(HELLO, &ours)).await.expect("sent");
    let (kind, theirs) = receive(&mut stream).await;
    assert_eq!(kind, HELLO);
    stream.write_all(&message(PROOF, &proof(b"caller", &ours, &theirs[..72]))).await.expect("sent");
    assert_eq!(receive(&mut stream).await.0, WELCOME);
    stream
}

/// The listener's side of the handshake.
pub async fn accept(stream: &mut TcpStream) {
    let (kind, theirs) = receive(stream).await;
    assert_eq!(kind, HELLO);
    let ours = hello();
    let mut answer = ours.to_vec();
    answer.extend(proof(b"listener", &theirs[..72], &ours));
    stream.write_all(&message(HELLO, &answer)).await.expect("sent");
    assert_eq!(receive(stream).await.0, PROOF);
    stream.write_all(&message(WELCOME, &[])).await.expect("sent");
}

/// The next handshake message.
pub async fn receive(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let mut head = [0; 8];
    stream.read_exact(&mut head).await.expect("a head");
    assert_eq!(&head[..4], b"TFSW");
    let mut body = vec![0; usize::from(u16::from_le_bytes([head[6], head[7]])) + 4];
    stream.read_exact(&mut body).await.expect("a body");
    body.truncate(body.len() - 4);
    (head[4], body)
}

/// A whole frame.
pub fn frame(kind: Kind, id: u64, method: u16, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Header {
        flags: PAYLOAD_CRC,
        method,
        body_len: body.len() as u32,
        payload_len: payload.len() as u32,
        deadline_ms: 60_000,
        body_crc: crc32c::crc32c(body),
        payload_crc: crc32c::crc32c(payload),
        ..Header::bare(kind, id)
    };
    [&header.encode(), body, payload].concat()
}

/// The next frame of an honest peer.
pub async fn read_frame(stream: &mut TcpStream) -> (Header, Vec<u8>, Vec<u8>) {
    let mut head = [0; HEADER_LEN];
    stream.read_exact(&mut head).await.expect("a header");
    let header = Header::decode(&head).expect("an honest header");
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).await.expect("a body");
    let mut payload = vec![0; header.payload_len as usize];
    stream.read_exact(&mut payload).await.expect("a payload");
    (header, body, payload)
}

/// Reads until the other end closes the connection.
pub async fn until_closed(stream: &mut TcpStream) {
    let mut sink = vec![0; 64 << 10];
    let drained = async { while matches!(stream.read(&mut sink).await, Ok(n) if n > 0) {} };
    tokio::time::timeout(Duration::from_secs(60), drained)
        .await
        .expect("the other end closes the connection");
}
