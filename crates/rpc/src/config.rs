//! Settings of both ends of a connection, and who may listen where.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use torchfs_proto::{ClusterId, Code, Fault, Result};

/// What a process is to its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Role {
    /// A node agent.
    Agent = 1,
    /// A metadata server.
    Meta = 2,
    /// A data server.
    Data = 3,
    /// A command of the command line.
    Tool = 4,
}

impl Role {
    /// The role of a number on the wire.
    pub fn from_number(number: u8) -> Option<Role> {
        [Role::Agent, Role::Meta, Role::Data, Role::Tool].into_iter().find(|role| *role as u8 == number)
    }
}

/// What all members of a cluster share to know each other; empty means that anybody may connect.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes, without the whitespace around them that editors leave in files.
    pub fn new(bytes: impl AsRef<[u8]>) -> Secret {
        Secret(bytes.as_ref().trim_ascii().to_vec())
    }

    /// No secret: anybody may connect.
    pub fn none() -> Secret {
        Secret::default()
    }

    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_none() { "Secret(none)" } else { "Secret(…)" })
    }
}

/// Settings of one end; both ends use the same struct.
#[derive(Clone, Debug)]
pub struct Config {
    /// What this process is.
    pub role: Role,
    /// The cluster this process belongs to; 0 while it does not know yet.
    pub cluster: ClusterId,
    /// The cluster's secret.
    pub secret: Secret,
    /// Listen beyond loopback without a secret.
    pub insecure: bool,
    /// The protocol versions this end speaks.
    pub versions: RangeInclusive<u16>,
    /// Feature bits the other end has to know.
    pub features_must: u64,
    /// Feature bits this end knows besides.
    pub features_may: u64,

    /// A connection has to stand, handshake included, within this.
    pub connect_timeout: Duration,
    /// An accepted connection has to finish its handshake within this.
    pub handshake_timeout: Duration,
    /// A frame that began has to be complete within this, plus a second for every `frame_rate_min` bytes.
    pub frame_timeout: Duration,
    /// The slowest a peer may send, in bytes per second.
    pub frame_rate_min: u64,
    /// A peer that takes no bytes for so long, while some wait for it, is dropped.
    pub stall_timeout: Duration,
    /// Callers ping so often, so that both ends know that the other lives.
    pub ping_every: Duration,
    /// A peer that sent nothing for so long is dropped.
    pub silence_max: Duration,
    /// A server that shuts down waits so long for requests in flight.
    pub grace: Duration,

    /// Connections a listener holds at a time, of peers that proved themselves. The metadata service allows 10,000 sessions, and an
    /// agent has up to `lanes` connections to it.
    pub connections_max: usize,
    /// Connections besides, that are still in the handshake.
    pub strangers_max: usize,
    /// When there are that many, the oldest goes after so long, though `handshake_timeout` has not passed.
    pub strangers_patience: Duration,
    /// Requests in flight on one connection before its server stops reading.
    pub requests_max: usize,
    /// Calls in flight on one connection before further ones wait at the caller.
    pub calls_max: usize,
    /// Bytes of bodies and payloads in flight on one connection before its server stops reading.
    pub connection_bytes_max: u64,
    /// The same over all connections of a listener.
    pub total_bytes_max: u64,
    /// Bytes that are read ahead to find headers.
    pub read_buffer: usize,

    /// Connections a link holds to its server.
    pub lanes: usize,
    /// A link waits so long after its first failed attempt; the time doubles.
    pub backoff_min: Duration,
    /// And not longer than this.
    pub backoff_max: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            role: Role::Tool,
            cluster: ClusterId(0),
            secret: Secret::none(),
            insecure: false,
            versions: 1..=1,
            features_must: 0,
            features_may: 0,
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(5),
            frame_timeout: Duration::from_secs(15),
            frame_rate_min: 256 << 10,
            stall_timeout: Duration::from_secs(30),
            ping_every: Duration::from_secs(5),
            silence_max: Duration::from_secs(20),
            grace: Duration::from_secs(2),
            connections_max: 32_768,
            strangers_max: 256,
            strangers_patience: Duration::from_millis(100),
            requests_max: 4096,
            calls_max: 1024,
            connection_bytes_max: 128 << 20,
            total_bytes_max: 1 << 30,
            read_buffer: 64 << 10,
            lanes: 2,
            backoff_min: Duration::from_millis(50),
            backoff_max: Duration::from_secs(2),
        }
    }
}

impl Config {
    /// Decides whether a role with these settings may listen here: beyond loopback only with a secret, or when told
    /// that it is meant.
    pub fn may_listen(&self, addr: &SocketAddr) -> Result<()> {
        if addr.ip().to_canonical().is_loopback() || !self.secret.is_none() || self.insecure {
            return Ok(());
        }
        Err(Fault::new(Code::Denied, format!("will not listen on {addr} without a cluster secret")).next(
            "give all processes of the cluster the same --secret-file, listen on 127.0.0.1, or pass --insecure \
             if everybody who reaches this address may read and write everything",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_without_a_secret_listens_on_loopback_only() {
        let open = Config::default();
        for near in ["127.0.0.1:1", "[::1]:1", "127.9.9.9:1", "[::ffff:127.0.0.1]:1"] {
            assert!(open.may_listen(&near.parse().expect("an address")).is_ok(), "{near}");
        }
        for far in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            let far = far.parse().expect("an address");
            let fault = open.may_listen(&far).expect_err("refused");
            assert_eq!(fault.code, Code::Denied);
            assert!(fault.next.contains("--secret-file"));
            assert!(Config { insecure: true, ..Config::default() }.may_listen(&far).is_ok());
            assert!(Config { secret: Secret::new("x"), ..Config::default() }.may_listen(&far).is_ok());
        }
    }

    #[test]
    fn secrets_are_not_printed_and_lose_the_whitespace_around_them() {
        assert_eq!(format!("{:?}", Secret::new("abc")), "Secret(…)");
        assert_eq!(Secret::new("abc\n"), Secret::new("abc"));
        assert!(Secret::new(" \n").is_none());
    }
}
