//! One connection to the database, used by one thread at a time; opened when it is needed and again after it was lost.
//!
//! It has a runtime of its own that lives on the caller's thread: the engine stays synchronous, nothing is handed between
//! threads for one answer, and the engine works whether or not there is a runtime around it. The price is that nobody notices
//! that a connection died before it is used the next time, which is early enough.
//!
//! It may be used within a runtime of several threads, where it takes the thread it is called on, and outside of any.
//!
//! # Invariants
//! - Every statement has a deadline, here and at the server. After an error that leaves the outcome open the connection is
//!   given up.
//! - Passwords appear in no message.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Config, Row, Statement};

use super::{PostgresConfig, schema, tls};
use crate::error::{Error, Result};

/// How connections are protected.
#[derive(Clone)]
pub enum Tls {
    /// Not at all: a unix socket, loopback, or told so.
    Off,
    /// Encrypted, and the server's certificate is checked.
    On(Arc<tls::Verifier>),
}

/// Parameters of a statement.
pub type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// Where and how to connect.
#[derive(Clone)]
pub struct Target {
    config: Config,
    tls: Tls,
    statement_timeout: Duration,
    connect_timeout: Duration,
    /// Commits return before they are durable.
    relaxed: bool,
}

/// A connection, or the wish for one.
pub struct Session {
    target: Target,
    /// Always there; taken out at the end.
    runtime: Option<Runtime>,
    open: Option<Open>,
}

struct Open {
    client: Client,
    statements: HashMap<&'static str, Statement>,
}

/// Refuses a URL that cannot work, with a sentence.
pub fn check_url(url: &str) -> Result<()> {
    parse(url, None).map(|_| ())
}

impl Target {
    /// Reads the URL.
    pub fn new(config: &PostgresConfig) -> Result<Target> {
        let (mut target, mode) = parse(&config.url, config.password.as_deref())?;
        target.connect_timeout(config.connect_timeout);
        let tls = match mode {
            SslMode::Disable => Tls::Off,
            _ => {
                target.ssl_mode(SslMode::Require);
                Tls::On(Arc::new(tls::Verifier::load(config.ca_file.as_deref())?))
            }
        };
        target.ssl_mode(mode);
        let hosts = target.get_hosts().len().max(1) as u32;
        Ok(Target {
            config: target,
            tls,
            statement_timeout: config.statement_timeout,
            connect_timeout: config.connect_timeout * hosts,
            relaxed: false,
        })
    }
}

impl Target {
    /// The same, for commits that later, durable ones cover.
    pub fn relaxed(&self) -> Target {
        Target { relaxed: true, ..self.clone() }
    }
}

/// The URL as a configuration, and whether to encrypt. Without `sslmode` everything beyond this machine is encrypted.
fn parse(url: &str, password: Option<&str>) -> Result<(Config, SslMode)> {
    let wrong = |what: String| Error::Database { what };
    // Certificates are always checked where there is encryption; the names that promise it are the same to us.
    let url =
        url.replace("sslmode=verify-full", "sslmode=require").replace("sslmode=verify-ca", "sslmode=require");
    let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
        let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        wrong(format!("the URL makes no sense ({why}); write postgres://USER@HOST1,HOST2/DATABASE"))
    })?;
    if config.get_password().is_some() {
        return Err(wrong(
            "the URL holds a password, which others can see in the list of processes; write it into a file and give \
             --pg-password-file, or set PGPASSWORD or PGPASSFILE"
                .into(),
        ));
    }
    if config.get_hosts().is_empty() {
        return Err(wrong("the URL names no host; write postgres://USER@HOST1,HOST2/DATABASE".into()));
    }
    if let Some(password) = password {
        config.password(password);
    }
    let here = config.get_hosts().iter().all(|host| match host {
        Host::Tcp(name) => matches!(name.as_str(), "localhost" | "127.0.0.1" | "::1"),
        Host::Unix(_) => true,
    });
    let mode = match config.get_ssl_mode() {
        _ if url.contains("sslmode=disable") => SslMode::Disable,
        _ if url.contains("sslmode=require") => SslMode::Require,
        _ if here => SslMode::Disable,
        _ => SslMode::Require,
    };
    if config.get_application_name().is_none() {
        config.application_name("torchfs");
    }
    config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    config.keepalives_idle(Duration::from_secs(10));
    config.tcp_user_timeout(Duration::from_secs(10));
    Ok((config, mode))
}

impl Session {
    /// Connects to nobody yet.
    pub fn new(target: Target) -> Result<Session> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::io("cannot make a runtime for the database"))?;
        Ok(Session { target, runtime: Some(runtime), open: None })
    }

    /// Runs a statement and says how many rows it changed.
    pub fn execute(&mut self, sql: &'static str, params: Params<'_>) -> Result<u64> {
        self.with(sql, async |client, statement| client.execute(statement, params).await)
    }

    /// Runs a statement and gives its rows.
    pub fn query(&mut self, sql: &'static str, params: Params<'_>) -> Result<Vec<Row>> {
        self.with(sql, async |client, statement| client.query(statement, params).await)
    }

    /// Runs a statement that gives one row.
    pub fn query_one(&mut self, sql: &'static str, params: Params<'_>) -> Result<Row> {
        let rows = self.query(sql, params)?;
        rows.into_iter().next().ok_or_else(|| Error::Database {
            what: "a row of the metadata's tables is missing; is this the right database?".into(),
        })
    }

    /// Runs several statements without parameters.
    pub fn batch(&mut self, sql: &str) -> Result<()> {
        self.connect()?;
        let limit = self.target.statement_timeout * 2;
        let Some(open) = &self.open else { return Err(lost("connect")) };
        let done =
            wait(&self.runtime, async { tokio::time::timeout(limit, open.client.batch_execute(sql)).await })?;
        self.judge(done)
    }

    /// Whether the connection of the last statement is not known to be lost.
    pub fn is_open(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.client.is_closed())
    }

    /// Gives the connection up.
    pub fn reset(&mut self) {
        self.open = None;
    }

    fn with<T>(
        &mut self,
        sql: &'static str,
        run: impl AsyncFnOnce(&Client, &Statement) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T> {
        self.connect()?;
        let limit = self.target.statement_timeout;
        let Some(open) = &mut self.open else { return Err(lost("connect")) };
        let done = wait(&self.runtime, async {
            tokio::time::timeout(limit, async {
                let statement = match open.statements.get(sql) {
                    Some(statement) => statement.clone(),
                    None => {
                        let statement = open.client.prepare(sql).await?;
                        open.statements.insert(sql, statement.clone());
                        statement
                    }
                };
                run(&open.client, &statement).await
            })
            .await
        })?;
        self.judge(done)
    }

    fn judge<T>(
        &mut self,
        done: Result<Result<T, tokio_postgres::Error>, tokio::time::error::Elapsed>,
    ) -> Result<T> {
        let error = match done {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => classify(&error),
            Err(_) => Error::Silent { what: format!("no answer within {:?}", self.target.statement_timeout) },
        };
        // Whatever it was: a fresh connection finds the writable server and forgets old statements.
        self.open = None;
        Err(error)
    }

    fn connect(&mut self) -> Result<()> {
        if self.is_open() {
            return Ok(());
        }
        self.open = None;
        let target = &self.target;
        let limit = target.connect_timeout + target.statement_timeout;
        let client = wait(&self.runtime, async {
            tokio::time::timeout(limit, connect(target)).await.unwrap_or_else(|_| Err(lost("connect")))
        })??;
        self.open = Some(Open { client, statements: HashMap::new() });
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.open = None;
        if let Some(runtime) = self.runtime.take() {
            // Its one thread is the caller's: nothing is left running, and nothing is waited for.
            runtime.shutdown_background();
        }
    }
}

/// Runs something to its end on this thread.
fn wait<T>(runtime: &Option<Runtime>, work: impl Future<Output = T>) -> Result<T> {
    let Some(runtime) = runtime else { return Err(lost("connect")) };
    Ok(tokio::task::block_in_place(|| runtime.block_on(work)))
}

async fn connect(target: &Target) -> Result<Client> {
    let client = match &target.tls {
        Tls::Off => {
            let (client, connection) =
                target.config.connect(tokio_postgres::NoTls).await.map_err(|e| classify(&e))?;
            tokio::spawn(connection);
            client
        }
        Tls::On(verifier) => {
            let (client, connection) =
                target.config.connect(tls::Connector::new(verifier)).await.map_err(|e| classify(&e))?;
            tokio::spawn(connection);
            client
        }
    };
    let millis = target.statement_timeout.as_millis();
    client
        .batch_execute(&format!(
            "SET statement_timeout = {millis}; SET idle_in_transaction_session_timeout = {millis}; \
             SET client_min_messages = warning; SET default_transaction_isolation = 'read committed'"
        ))
        .await
        .map_err(|e| classify(&e))?;
    let row = client.query_one(schema::DURABILITY, &[]).await.map_err(|e| classify(&e))?;
    let (commit, fsync): (String, String) = (row.get(0), row.get(1));
    if target.relaxed {
        client.batch_execute("SET synchronous_commit = off").await.map_err(|e| classify(&e))?;
        return Ok(client);
    }
    if commit == "off" {
        client.batch_execute("SET synchronous_commit = on").await.map_err(|e| classify(&e))?;
    }
    if fsync == "off" {
        tracing::warn!(
            "the database runs with fsync = off: what it calls durable does not survive its machine"
        );
    }
    Ok(client)
}

fn lost(what: &str) -> Error {
    Error::Silent { what: format!("cannot {what} in time") }
}

/// Whether it may be tried again.
fn classify(error: &tokio_postgres::Error) -> Error {
    let text = match (error.as_db_error(), std::error::Error::source(error)) {
        (Some(db), _) => db.message().to_string(),
        (None, Some(source)) => format!("{error}: {source}"),
        (None, None) => error.to_string(),
    };
    let Some(code) = error.code() else {
        // Mistakes of this program or of its settings have no code either, and do not pass.
        let ours = ["error serializing", "error deserializing", "invalid c", "authentication error"];
        let advice = advice(&text);
        return match advice.is_some() || ours.iter().any(|start| text.starts_with(start)) {
            true => Error::Database { what: text + advice.unwrap_or_default() },
            false => Error::Silent { what: text },
        };
    };
    let class = code.code().get(..2).unwrap_or_default();
    let passing = matches!(class, "08" | "40" | "53" | "57" | "58")
        || [SqlState::READ_ONLY_SQL_TRANSACTION, SqlState::LOCK_NOT_AVAILABLE].contains(code);
    match passing {
        true => Error::Silent { what: text },
        false if class == "28" => Error::Database {
            what: format!(
                "{text}; check the user in the URL, --pg-password-file and the server's pg_hba.conf"
            ),
        },
        false if *code == SqlState::INVALID_CATALOG_NAME => {
            Error::Database { what: format!("{text}; make it with: createdb NAME") }
        }
        // Without any right to a schema there is none to make tables in.
        false if [SqlState::INSUFFICIENT_PRIVILEGE, SqlState::INVALID_SCHEMA_NAME].contains(code) => {
            Error::Database {
                what: format!(
                    "{text} ({}); give the user in the URL a database of its own: createdb NAME --owner USER",
                    code.code()
                ),
            }
        }
        false => Error::Database { what: format!("{text} ({})", code.code()) },
    }
}

/// What to do about a connection that no waiting brings about.
fn advice(text: &str) -> Option<&'static str> {
    let known = [
        (
            "server does not support TLS",
            "; turn TLS on at the server, or, if nobody can listen in on the way there, add ?sslmode=disable to the URL",
        ),
        ("password missing", "; give --pg-password-file, or set PGPASSWORD or PGPASSFILE"),
        (
            "CaUsedAsEndEntity",
            "; the server shows the certificate of an authority as its own: make an authority (CA:TRUE) and have it sign \
             another one for the server, and give --pg-ca-file the authority's",
        ),
        ("UnknownIssuer", "; give --pg-ca-file the authority that signed the server's certificate"),
        ("NotValidForName", "; name the host in the URL as its certificate does"),
        ("Expired", "; give the server a new certificate"),
        ("invalid peer certificate", "; look at the server's certificate and at --pg-ca-file"),
    ];
    known.iter().find(|(sign, _)| text.contains(sign)).map(|(_, advice)| *advice)
}

/// The content of a PEM file.
pub fn read_pem(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(Error::io(format!("cannot read the certificates in {}", path.display())))
}
