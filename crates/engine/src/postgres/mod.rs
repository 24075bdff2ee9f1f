//! The engine whose log and state are kept in PostgreSQL, which does the replication.
//!
//! Every metadata server has a replica of its own in LMDB and reads only there. One of them leads: it writes groups of batches
//! as rows of a log table, each group in one statement that checks its fence and the last place in the order. The others
//! are standbys: they follow the log into their replicas and take over when the leader is silent ([`Standby`]). From time to
//! time the leader brings a table of pairs up to date (lazily and merged, as for its replica) and removes old rows of the
//! log; the state is always that table as of its place, and the log behind it. A server whose replica is missing or too
//! old builds it from there.
//!
//! # Leadership without synchronised clocks
//! Each commit raises a counter in the row that all agree on; without commits the leader raises it every quarter of its term.
//! It counts itself as leader until a term after it *sent* the last successful one, by its own clock. A standby takes over
//! when it saw the counter stand still for longer than the term and a margin, by its own clock, with a statement that
//! applies only if the counter still stands there. So no two clocks are ever compared.
//!
//! # Invariants
//! - A batch is durable when the statement that holds it has returned. After a statement with unknown outcome it is sent
//!   again; it applies only if the first did not, and the row that all agree on tells which.
//! - A replica never holds more than the log. If the log has lost what a replica holds, nobody opens: the database went back
//!   in time.
//! - The incarnation is at least the time in seconds, so that it rises over what a restored database has forgotten.
//!
//! # Not here
//! - Queue, overlay, group commit, checkpoints: `log_engine`. The bytes of records: `log::format`.

mod log;
mod rows;
mod schema;
mod session;
mod standby;
mod tls;

use std::time::Duration;

pub use self::session::check_url;
pub use self::standby::{Leader, Standby, Turn};
use crate::log_engine::Config;

/// How the engine over PostgreSQL behaves.
#[derive(Clone, Debug)]
pub struct PostgresConfig {
    /// `postgres://USER@HOST1,HOST2/DATABASE?…`; the one that takes writes is used.
    pub url: String,
    /// The user's password.
    pub password: Option<String>,
    /// PEM file with the authorities that sign the database's certificate; by default those of the system.
    pub ca_file: Option<std::path::PathBuf>,
    /// What others see of this server: where it listens.
    pub address: String,
    /// How long a leader counts as such after its last sign of life.
    pub lease: Duration,
    /// How much longer a standby waits.
    pub margin: Duration,
    /// How often a standby looks.
    pub poll: Duration,
    /// How long a connection may take, for each host.
    pub connect_timeout: Duration,
    /// How long a statement may take.
    pub statement_timeout: Duration,
    /// How long an engine that ends tries to reach a silent database.
    pub close_timeout: Duration,
    /// How long rows of the log are kept for standbys that are away.
    pub log_keep: Duration,
    /// Bytes asked for in one answer of the database.
    pub fetch_bytes: usize,
    /// Keys and bytes of the state that are written in one transaction.
    pub state_keys: usize,
    /// See there.
    pub state_bytes: usize,
    /// Everything else. The settings of the local log do not count.
    pub engine: Config,
}

impl Default for PostgresConfig {
    fn default() -> PostgresConfig {
        PostgresConfig {
            url: String::new(),
            password: None,
            ca_file: None,
            address: String::new(),
            lease: Duration::from_secs(2),
            margin: Duration::from_millis(250),
            poll: Duration::from_millis(200),
            connect_timeout: Duration::from_secs(2),
            statement_timeout: Duration::from_secs(10),
            close_timeout: Duration::from_secs(5),
            log_keep: Duration::from_secs(300),
            fetch_bytes: 4 << 20,
            state_keys: 2_000,
            state_bytes: 2 << 20,
            engine: Config::default(),
        }
    }
}
