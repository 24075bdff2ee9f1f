//! `torchfs sessions`: who is connected and what they hold; ends a session by hand.

use std::process::ExitCode;

use serde_json::json;
use torchfs_proto::SessionId;

use crate::connect::Ask;
use crate::{print, roles};

/// Show who is connected and what they hold, or end a session
///
///   torchfs sessions
///   torchfs sessions evict 17     # its locks and leases end now; what it had not written back is lost
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,

    #[command(flatten)]
    ask: Ask,
}

#[derive(clap::Subcommand)]
enum Action {
    /// End a session now
    Evict {
        /// Its number, as `torchfs sessions` shows it
        id: u64,
    },
}

/// Asks and prints.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.ask.find()?;
    if let Some(Action::Evict { id }) = args.action {
        roles::block_on(async move { Ok(roles::tool(&found).evict(SessionId(id)).await?) })?;
        args.ask.print(&json!({ "evicted": id }), &format!("session {id} is ended"));
        return Ok(ExitCode::SUCCESS);
    }
    let sessions = roles::block_on(async move { Ok(roles::tool(&found).sessions().await?) })?;
    if args.ask.json {
        let sessions: Vec<_> = sessions
            .iter()
            .map(|s| {
                json!({"id": s.session.0, "host": s.who.host, "pid": s.who.pid, "mount": s.who.mount,
                       "volume": volume(&s.who.volume), "version": s.who.version, "age_s": s.age_s,
                       "renewed_ms": s.renewed_ms, "leases": s.leases, "writing": s.writing, "locks": s.locks,
                       "orphans": s.orphans, "ops": s.ops})
            })
            .collect();
        println!("{:#}", json!({ "sessions": sessions }));
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = sessions
        .iter()
        .map(|s| {
            vec![
                s.session.to_string(),
                format!("{}:{}", s.who.host, s.who.pid),
                print::span(s.age_s),
                format!("{} ms", s.renewed_ms),
                print::count(s.leases),
                print::count(s.writing),
                print::count(s.locks),
                print::count(s.orphans),
                print::count(s.ops),
                volume(&s.who.volume).to_string(),
                s.who.mount.clone(),
            ]
        })
        .collect();
    let headings = [
        "SESSION", "WHO", "AGE", "RENEWED", "LEASES", "WRITING", "LOCKS", "UNLINKED", "CALLS", "VOLUME",
        "MOUNT",
    ];
    print!("{}", print::table(&headings, &rows));
    Ok(ExitCode::SUCCESS)
}

/// Who asks for no volume by name gets the first one.
fn volume(name: &str) -> &str {
    if name.is_empty() { "main" } else { name }
}
