//! The handshake: who are you, which words do you speak, and do you know the secret.
//!
//! Four messages: hello (caller), hello with proof (listener), proof (caller), welcome (listener). Either end may send a
//! refusal with a fault instead of its next message. A proof is an HMAC-SHA256 with the cluster's secret over both hellos,
//! each with fresh random bytes, so it is worth nothing on another connection. The way a message is framed never changes
//! between versions; that is what lets neighbouring versions refuse each other with a sentence.
//!
//! # Invariants
//! - Nothing but these messages is read before the secret was proven; none is longer than `MESSAGE_MAX`.
//! - The caller proves nothing to a listener that has not proven itself first.
//!
//! # Not here
//! - Protection of the frames that follow: without TLS they can be read and changed on the way.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torchfs_proto::{ClusterId, Code, Fault, Result};

use crate::config::{Config, Role, Secret};

/// Begins every handshake message.
pub const MAGIC: [u8; 4] = *b"TFSW";
/// The longest message after its eight bytes of head.
pub const MESSAGE_MAX: usize = 4096;

const HEAD_LEN: usize = 8;
const HELLO: u8 = 1;
const PROOF: u8 = 2;
const WELCOME: u8 = 3;
const REFUSAL: u8 = 4;

const HELLO_LEN: usize = 72;
const PROOF_LEN: usize = 32;
/// In a hello: this end has a secret.
const HAS_SECRET: u8 = 1 << 0;

/// What an end says about itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Protocol versions it speaks; a listener answers with the one it chose.
    pub versions: RangeInclusive<u16>,
    /// Feature bits the other end has to know.
    pub features_must: u64,
    /// Feature bits it knows besides.
    pub features_may: u64,
    /// The number of its role; a later version may have more of them.
    pub role: u8,
    /// Bit 0: it has a secret. Further bits are for tokens and TLS.
    pub auth: u8,
    /// Its cluster, 0 if it does not know yet.
    pub cluster: ClusterId,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

/// What both ends agreed on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Agreed {
    /// The protocol version.
    pub version: u16,
    /// Feature bits that both know.
    pub features: u64,
    /// The other end's role.
    pub role: Role,
    /// The other end's cluster, 0 if it does not know.
    pub cluster: ClusterId,
    /// How long the listener took to answer the first message.
    pub round_trip: Duration,
}

/// Shakes hands as the one who called.
pub(crate) async fn call(stream: &mut TcpStream, addr: &str, config: &Config) -> Result<Agreed> {
    let ours = Hello::of(config).encode();
    let asked = Instant::now();
    send(stream, addr, HELLO, &[&ours]).await?;
    let answer = receive(stream, addr, HELLO).await?;
    let round_trip = asked.elapsed();
    let (theirs, rest) = answer.split_first_chunk::<HELLO_LEN>().ok_or_else(|| nonsense(addr))?;
    let hello = Hello::decode(theirs).ok_or_else(|| nonsense(addr))?;
    let proof = rest.first_chunk::<PROOF_LEN>().ok_or_else(|| nonsense(addr))?;
    let agreed = agree(config, &hello, addr, round_trip)?;
    if !proves(&config.secret, b"listener", &ours, theirs, proof) {
        return Err(wrong_secret(addr, config, &hello));
    }
    send(stream, addr, PROOF, &[&prove(&config.secret, b"caller", &ours, theirs)]).await?;
    receive(stream, addr, WELCOME).await?;
    Ok(agreed)
}

/// Shakes hands as the one who listened. A caller that is refused is told why. `admit` gives a place to a caller that has proven
/// itself, or a reason to refuse even that one.
pub(crate) async fn answer<T>(
    stream: &mut TcpStream,
    addr: &str,
    config: &Config,
    admit: impl FnOnce() -> Result<T>,
) -> Result<(Agreed, T)> {
    let asked = Instant::now();
    let question = receive(stream, addr, HELLO).await?;
    let theirs = question.first_chunk::<HELLO_LEN>().ok_or_else(|| nonsense(addr))?;
    let hello = Hello::decode(theirs).ok_or_else(|| nonsense(addr))?;
    // Refusals come after the hello was read: bytes left unread would reset the connection and take the refusal along.
    let mut agreed = match agree(config, &hello, addr, Duration::ZERO) {
        Ok(agreed) => agreed,
        Err(fault) => return refuse(stream, addr, fault).await,
    };
    let ours = Hello { versions: agreed.version..=agreed.version, ..Hello::of(config) }.encode();
    let proof = prove(&config.secret, b"listener", theirs, &ours);
    send(stream, addr, HELLO, &[&ours, &proof]).await?;
    let proof = receive(stream, addr, PROOF).await?;
    let proof = proof.first_chunk::<PROOF_LEN>().ok_or_else(|| nonsense(addr))?;
    if !proves(&config.secret, b"caller", theirs, &ours, proof) {
        return refuse(stream, addr, wrong_secret(addr, config, &hello)).await;
    }
    let place = match admit() {
        Ok(place) => place,
        Err(fault) => return refuse(stream, addr, fault).await,
    };
    send(stream, addr, WELCOME, &[]).await?;
    agreed.round_trip = asked.elapsed();
    Ok((agreed, place))
}

/// Tells a peer why it is sent away, and returns the same fault.
async fn refuse<T>(stream: &mut TcpStream, addr: &str, fault: Fault) -> Result<T> {
    let mut told = fault.clone();
    told.what.truncate(told.what.floor_char_boundary(1024));
    told.next.truncate(told.next.floor_char_boundary(1024));
    if let Ok(bytes) = minicbor::to_vec(&told) {
        // The refusal itself is the news; that it could not be told is not.
        let _ = send(stream, addr, REFUSAL, &[&bytes]).await;
    }
    Err(fault)
}

impl Hello {
    fn of(config: &Config) -> Hello {
        Hello {
            versions: config.versions.clone(),
            features_must: config.features_must,
            features_may: config.features_may,
            role: config.role as u8,
            auth: if config.secret.is_none() { 0 } else { HAS_SECRET },
            cluster: config.cluster,
            nonce: rand::random(),
        }
    }

    /// The hello's bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[0..2].copy_from_slice(&self.versions.start().to_le_bytes());
        bytes[2..4].copy_from_slice(&self.versions.end().to_le_bytes());
        bytes[4] = self.role;
        bytes[5] = self.auth;
        bytes[8..16].copy_from_slice(&self.features_must.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.features_may.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.cluster.0.to_le_bytes());
        bytes[40..72].copy_from_slice(&self.nonce);
        bytes
    }

    /// Reads a hello; `None` if it makes no sense.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Option<Hello> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u64_at = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[40..72]);
        let hello = Hello {
            versions: u16_at(0)..=u16_at(2),
            role: bytes[4],
            auth: bytes[5],
            features_must: u64_at(8),
            features_may: u64_at(16),
            cluster: ClusterId(u64_at(24)),
            nonce,
        };
        (!hello.versions.is_empty()).then_some(hello)
    }
}

/// Finds what both ends can do, or says what keeps them apart.
fn agree(config: &Config, hello: &Hello, addr: &str, round_trip: Duration) -> Result<Agreed> {
    let version = *config.versions.end().min(hello.versions.end());
    if !config.versions.contains(&version) || !hello.versions.contains(&version) {
        let (ours, theirs) = (&config.versions, &hello.versions);
        let older = if ours.end() < theirs.start() { "this process" } else { "the process at the other end" };
        return Err(Fault::new(
            Code::Version,
            format!("{addr} speaks protocol versions {theirs:?}, this process speaks {ours:?}"),
        )
        .next(format!("upgrade {older}; neighbouring releases can talk to each other")));
    }
    let we_know = config.features_must | config.features_may;
    let they_know = hello.features_must | hello.features_may;
    let missing = (hello.features_must & !we_know) | (config.features_must & !they_know);
    if missing != 0 {
        return Err(Fault::new(
            Code::Version,
            format!(
                "{addr} and this process do not both know the features {missing:#x} that one of them needs"
            ),
        )
        .next("upgrade the older of the two"));
    }
    if config.cluster.0 != 0 && hello.cluster.0 != 0 && config.cluster != hello.cluster {
        return Err(Fault::new(
            Code::Denied,
            format!(
                "{addr} belongs to cluster {:016x}, this process to {:016x}",
                hello.cluster.0, config.cluster.0
            ),
        )
        .next(
            "check the address; a server that was set up anew needs an empty folder to join another cluster",
        ));
    }
    let Some(role) = Role::from_number(hello.role) else {
        return Err(Fault::new(Code::Version, format!("{addr} has an unknown role {}", hello.role))
            .next("upgrade this process"));
    };
    Ok(Agreed { version, features: we_know & they_know, role, cluster: hello.cluster, round_trip })
}

fn wrong_secret(addr: &str, config: &Config, hello: &Hello) -> Fault {
    let (what, next) = match (config.secret.is_none(), hello.auth & HAS_SECRET == 0) {
        (true, _) => (
            format!("{addr} asks for the cluster secret, and this process has none"),
            "pass --secret-file with the secret that the cluster uses",
        ),
        (_, true) => (
            format!("{addr} has no cluster secret, and this process wants one"),
            "start the other process with the same --secret-file",
        ),
        _ => (
            format!("{addr} has another cluster secret than this process"),
            "copy the secret file of a working server to this machine and pass it with --secret-file",
        ),
    };
    Fault::new(Code::Denied, what).next(next)
}

fn mac(secret: &Secret, who: &[u8], caller: &[u8; HELLO_LEN], listener: &[u8; HELLO_LEN]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("HMAC takes keys of any length");
    for part in [&b"torchfs handshake 1 "[..], who, caller, listener] {
        mac.update(part);
    }
    mac
}

fn prove(
    secret: &Secret,
    who: &[u8],
    caller: &[u8; HELLO_LEN],
    listener: &[u8; HELLO_LEN],
) -> [u8; PROOF_LEN] {
    mac(secret, who, caller, listener).finalize().into_bytes().into()
}

/// Compares in a time that does not depend on where the two differ.
fn proves(
    secret: &Secret,
    who: &[u8],
    caller: &[u8; HELLO_LEN],
    listener: &[u8; HELLO_LEN],
    proof: &[u8; PROOF_LEN],
) -> bool {
    mac(secret, who, caller, listener).verify_slice(proof).is_ok()
}

async fn send(stream: &mut TcpStream, addr: &str, kind: u8, parts: &[&[u8]]) -> Result<()> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut message = Vec::with_capacity(HEAD_LEN + len + 4);
    message.extend_from_slice(&MAGIC);
    message.extend_from_slice(&[kind, 0]);
    message.extend_from_slice(&(len as u16).to_le_bytes());
    parts.iter().for_each(|part| message.extend_from_slice(part));
    message.extend_from_slice(&crc32c::crc32c(&message).to_le_bytes());
    stream.write_all(&message).await.map_err(|e| lost(addr, &e))
}

/// The next message, if it is of this kind; a refusal is its fault.
async fn receive(stream: &mut TcpStream, addr: &str, want: u8) -> Result<Vec<u8>> {
    let mut head = [0; HEAD_LEN];
    stream.read_exact(&mut head).await.map_err(|e| lost(addr, &e))?;
    let len = decode_head(&head).ok_or_else(|| nonsense(addr))?;
    let mut message = vec![0; len + 4];
    stream.read_exact(&mut message).await.map_err(|e| lost(addr, &e))?;
    let crc = message.split_off(len);
    if crc32c::crc32c_append(crc32c::crc32c(&head), &message).to_le_bytes() != crc[..] {
        return Err(nonsense(addr));
    }
    match head[4] {
        kind if kind == want => Ok(message),
        REFUSAL => Err(match minicbor::decode::<Fault>(&message) {
            Ok(fault) => Fault { what: format!("{addr} refused the connection: {}", fault.what), ..fault },
            Err(_) => nonsense(addr),
        }),
        _ => Err(nonsense(addr)),
    }
}

/// The length of the message after this head; `None` if it is no head of ours.
fn decode_head(head: &[u8; HEAD_LEN]) -> Option<usize> {
    let len = usize::from(u16::from_le_bytes([head[6], head[7]]));
    (head[..4] == MAGIC && len <= MESSAGE_MAX).then_some(len)
}

fn lost(addr: &str, error: &std::io::Error) -> Fault {
    Fault::new(Code::Unreachable, format!("the connection to {addr} was lost in the handshake: {error}"))
}

fn nonsense(addr: &str) -> Fault {
    Fault::new(Code::Protocol, format!("{addr} does not speak the TorchFS protocol"))
        .next("check the address and port")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            versions: 1..=3,
            features_must: 1,
            features_may: 6,
            role: Role::Data as u8,
            auth: HAS_SECRET,
            cluster: ClusterId(0x0102_0304),
            nonce: [9; 32],
        }
    }

    #[test]
    fn a_hello_survives_its_bytes() {
        assert_eq!(Hello::decode(&hello().encode()), Some(hello()));
        let backwards = Hello { versions: std::ops::RangeInclusive::new(3, 1), ..hello() };
        assert_eq!(Hello::decode(&backwards.encode()), None);
    }

    #[test]
    fn the_bytes_of_a_hello_never_change() {
        let bytes = hello().encode();
        assert_eq!(bytes[..32], {
            let mut golden = [0; 32];
            golden[..6].copy_from_slice(&[1, 0, 3, 0, 3, 1]);
            golden[8] = 1;
            golden[16] = 6;
            golden[24..28].copy_from_slice(&[4, 3, 2, 1]);
            golden
        });
    }

    #[test]
    fn versions_meet_at_the_highest_both_speak() {
        let config = Config { versions: 2..=5, features_may: 7, ..Config::default() };
        let agreed = agree(&config, &hello(), "x", Duration::ZERO).expect("they overlap");
        assert_eq!((agreed.version, agreed.features), (3, 7));
        let config = Config { versions: 4..=5, ..config };
        let fault = agree(&config, &hello(), "x", Duration::ZERO).expect_err("apart");
        assert_eq!(fault.code, Code::Version);
        assert!(fault.next.contains("the process at the other end"), "{fault}");
    }

    #[test]
    fn a_feature_that_one_end_needs_and_the_other_lacks_keeps_them_apart() {
        let config = Config { features_may: 6, ..Config::default() };
        assert_eq!(agree(&config, &hello(), "x", Duration::ZERO).expect_err("apart").code, Code::Version);
        let config = Config { features_must: 8, features_may: 7, ..Config::default() };
        assert_eq!(agree(&config, &hello(), "x", Duration::ZERO).expect_err("apart").code, Code::Version);
    }

    #[test]
    fn clusters_do_not_mix() {
        let config = Config { cluster: ClusterId(5), features_may: 7, ..Config::default() };
        assert_eq!(agree(&config, &hello(), "x", Duration::ZERO).expect_err("apart").code, Code::Denied);
    }

    #[test]
    fn a_proof_holds_for_its_secret_its_role_and_its_connection_only() {
        let (secret, a, b) =
            (Secret::new("s"), hello().encode(), Hello { nonce: [8; 32], ..hello() }.encode());
        let proof = prove(&secret, b"caller", &a, &b);
        assert!(proves(&secret, b"caller", &a, &b, &proof));
        assert!(!proves(&secret, b"listener", &a, &b, &proof));
        assert!(!proves(&secret, b"caller", &b, &a, &proof));
        assert!(!proves(&Secret::new("t"), b"caller", &a, &b, &proof));
    }

    #[test]
    fn any_bytes_give_a_hello_or_none() {
        torchfs_fuzz::Fuzz::rounds(100_000).run(&[hello().encode().to_vec()], |bytes| {
            let head = bytes.first_chunk::<HEAD_LEN>().and_then(decode_head);
            assert!(head.is_none_or(|len| len <= 64 << 10), "a hello of {head:?} bytes is believed");
            bytes.first_chunk::<HELLO_LEN>().and_then(Hello::decode).is_some()
        });
    }
}
