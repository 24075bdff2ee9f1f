//! `torchfs top`: what each client and each data server does right now.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torchfs_client::Tool;
use torchfs_proto::SessionId;
use torchfs_proto::layout::ServerInfo;
use torchfs_proto::msg::meta::{Done, Op, SessionTop};

use crate::connect::Ask;
use crate::{print, roles, settings};

/// Show what each client and each data server does, the busiest first
///
///   torchfs top
///   torchfs top --once --json
///
/// Rates are taken over the interval. Requests are served fairly per session, so a busy one
/// does not starve the others. Ctrl-C ends it.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    ask: Ask,

    /// How long to count
    #[arg(long, default_value = "2s", value_parser = settings::duration, value_name = "SPAN")]
    interval: Duration,

    /// One interval only; the default when the output is no terminal
    #[arg(long)]
    once: bool,
}

/// Figures of all sessions at one moment.
struct Sample {
    at: Instant,
    sessions: Vec<SessionTop>,
}

/// What one session did in an interval, per second.
struct Rate<'a> {
    session: &'a SessionTop,
    ops: f64,
    gets: f64,
    puts: f64,
    read: f64,
    written: f64,
}

/// Counts and prints until told to stop.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    roles::block_on(async move {
        let tool = roles::tool(&found);
        let stop = roles::stop_signal()?;
        tokio::pin!(stop);
        let once = args.once || args.ask.json || !std::io::stdout().is_terminal();
        let mut last = sample(&tool).await?;
        loop {
            tokio::select! {
                () = &mut stop => return Ok(ExitCode::SUCCESS),
                () = tokio::time::sleep(args.interval) => {}
            }
            let now = sample(&tool).await?;
            let servers = tool.status().await?.servers;
            let rates = rates(&last, &now);
            if args.ask.json {
                println!("{:#}", describe(&rates, &servers));
            } else {
                let page = page(&rates, &servers);
                // Home and clear, as `top` does, so that the page stands still.
                let clear = if once { "" } else { "\x1b[H\x1b[2J" };
                print!("{clear}{page}");
                std::io::stdout().flush()?;
            }
            if once {
                return Ok(ExitCode::SUCCESS);
            }
            last = now;
        }
    })
}

async fn sample(tool: &Tool) -> anyhow::Result<Sample> {
    match tool.ask(Op::Top).await? {
        Done::Top(sessions) => Ok(Sample { at: Instant::now(), sessions }),
        other => anyhow::bail!("the metadata service answered a question about sessions with {other:?}"),
    }
}

/// The busiest first; figures that went back (a server was restarted) count from zero.
fn rates<'a>(last: &Sample, now: &'a Sample) -> Vec<Rate<'a>> {
    let seconds = now.at.duration_since(last.at).as_secs_f64().max(0.001);
    let before: HashMap<SessionId, &SessionTop> = last.sessions.iter().map(|s| (s.session, s)).collect();
    let mut rates: Vec<Rate> = now
        .sessions
        .iter()
        .map(|session| {
            let old = before.get(&session.session);
            let rate = |now: u64, of: fn(&SessionTop) -> u64| {
                let from = old.map_or(now, |old| of(old));
                (if from <= now { now - from } else { now }) as f64 / seconds
            };
            Rate {
                session,
                ops: rate(session.ops, |s| s.ops),
                gets: rate(session.load.gets, |s| s.load.gets),
                puts: rate(session.load.puts, |s| s.load.puts),
                read: rate(session.load.read_bytes, |s| s.load.read_bytes),
                written: rate(session.load.written_bytes, |s| s.load.written_bytes),
            }
        })
        .collect();
    let weight = |r: &Rate| r.read + r.written + 4096.0 * r.ops;
    rates.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    rates
}

fn page(rates: &[Rate], servers: &[ServerInfo]) -> String {
    let rows: Vec<Vec<String>> = rates
        .iter()
        .map(|r| {
            let who = r.session.who.as_ref();
            vec![
                if r.session.session.0 == 0 { "-".into() } else { r.session.session.to_string() },
                who.map_or_else(|| nobody(r.session.session), |w| format!("{}:{}", w.host, w.pid)),
                format!("{:.0}", r.ops),
                format!("{:.0}", r.gets),
                format!("{:.0}", r.puts),
                format!("{}/s", print::size(r.read as u64)),
                format!("{}/s", print::size(r.written as u64)),
                print::size(r.session.load.read_bytes),
                print::size(r.session.load.written_bytes),
                who.map(|w| w.mount.clone()).unwrap_or_default(),
            ]
        })
        .collect();
    let headings = [
        "SESSION",
        "WHO",
        "CALLS/s",
        "GETS/s",
        "PUTS/s",
        "READ",
        "WRITTEN",
        "READ IN ALL",
        "WRITTEN IN ALL",
        "MOUNT",
    ];
    let mut page = print::table(&headings, &rows);
    page.push('\n');
    let rows: Vec<Vec<String>> = servers
        .iter()
        .map(|s| {
            vec![
                s.id.to_string(),
                super::servers::state(s),
                s.load.gets.to_string(),
                s.load.puts.to_string(),
                format!("{}/s", print::size(s.load.read_bytes)),
                format!("{}/s", print::size(s.load.written_bytes)),
                s.load.waiting.to_string(),
                s.addr.clone(),
            ]
        })
        .collect();
    let headings = ["SERVER", "STATE", "GETS/s", "PUTS/s", "READ", "WRITTEN", "WAITING", "ADDRESS"];
    page + &print::table(&headings, &rows)
}

/// What a session without an owner is called: data servers remember those that ended for a while.
fn nobody(session: SessionId) -> String {
    if session.0 == 0 { "servers and tools".into() } else { "(ended)".into() }
}

fn describe(rates: &[Rate], servers: &[ServerInfo]) -> Value {
    let sessions: Vec<Value> = rates
        .iter()
        .map(|r| {
            let who = r.session.who.as_ref();
            json!({
                "session": r.session.session.0,
                "host": who.map(|w| w.host.clone()),
                "pid": who.map(|w| w.pid),
                "mount": who.map(|w| w.mount.clone()),
                "volume": who.map(|w| w.volume.clone()),
                "ops": r.session.ops, "ops_per_s": r.ops,
                "gets": r.session.load.gets, "gets_per_s": r.gets,
                "puts": r.session.load.puts, "puts_per_s": r.puts,
                "read_bytes": r.session.load.read_bytes, "read_bytes_per_s": r.read,
                "written_bytes": r.session.load.written_bytes, "written_bytes_per_s": r.written,
            })
        })
        .collect();
    let servers: Vec<Value> = servers
        .iter()
        .map(|s| {
            json!({"id": s.id.0, "addr": s.addr, "state": s.state.to_string(), "gets_per_s": s.load.gets,
                   "puts_per_s": s.load.puts, "read_bytes_per_s": s.load.read_bytes,
                   "written_bytes_per_s": s.load.written_bytes, "waiting": s.load.waiting})
        })
        .collect();
    json!({"sessions": sessions, "servers": servers})
}

#[cfg(test)]
mod tests {
    use super::*;
    use torchfs_proto::msg::block::SessionLoad;

    #[test]
    fn the_busiest_session_comes_first_and_restarts_are_no_negative_rates() {
        let session = |id, read_bytes| SessionTop {
            session: SessionId(id),
            who: None,
            ops: 0,
            load: SessionLoad { session: id, read_bytes, ..SessionLoad::default() },
        };
        let start = Instant::now();
        let last = Sample { at: start, sessions: vec![session(1, 1000), session(2, 5000)] };
        let later = start + Duration::from_secs(2);
        let now = Sample { at: later, sessions: vec![session(1, 5000), session(2, 200), session(3, 9999)] };
        let rates = rates(&last, &now);
        let seen: Vec<(u64, f64)> = rates.iter().map(|r| (r.session.session.0, r.read)).collect();
        assert_eq!(seen, [(1, 2000.0), (2, 100.0), (3, 0.0)]);
        assert_eq!(
            (nobody(SessionId(0)), nobody(SessionId(3))),
            ("servers and tools".into(), "(ended)".into())
        );
    }
}
