//! The one binary of TorchFS: parses, builds, prints.
//!
//! Each command has a file under `commands/`; what a role is made of stands in `roles.rs`. File-system meaning lives in
//! the crates below, never here.

mod commands;
mod connect;
mod http;
mod logging;
mod print;
mod roles;
mod serving;
mod settings;
mod watch;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A distributed file system for machine-learning training.
///
/// One machine, all roles in one process:
///
///   torchfs up --dir ./data --servers 3 --mount /mnt/t
///
/// The same roles apart: `meta` once, `data` on every storage machine, `mount` wherever programs
/// run. Settings come from /etc/torchfs.toml, then the TORCHFS_* variables that the help of a
/// command names, then flags.
#[derive(Parser)]
#[command(
    name = "torchfs",
    version,
    verbatim_doc_comment,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct Cli {
    /// How much to log to stderr: error, warn, info, debug, or a filter such as `torchfs_meta=debug`
    #[arg(long, global = true, env = "TORCHFS_LOG", default_value = "info", value_name = "LEVEL")]
    log: String,

    /// Log one JSON object per line
    #[arg(long, global = true)]
    log_json: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(commands::up::Args),
    Meta(Box<commands::meta::Args>),
    Data(commands::data::Args),
    Mount(commands::mount::Args),
    Umount(commands::umount::Args),
    Status(commands::status::Args),
    Sessions(commands::sessions::Args),
    Fsck(commands::fsck::Args),
    Gc(commands::gc::Args),
    Df(commands::df::Args),
    Volume(commands::volume::Args),
    Policy(commands::policy::Args),
    Servers(commands::servers::Args),
    Drain(commands::drain::Args),
    Rebalance(commands::rebalance::Args),
    Scrub(commands::scrub::Args),
    Top(commands::top::Args),
    Systemd(commands::systemd::Args),
    #[command(hide = true)]
    Bench(commands::bench::Args),
}

fn main() -> ExitCode {
    end_quietly_without_readers();
    let words: Vec<String> = std::env::args().collect();
    let words = match commands::mount::translate_mount_helper(&words) {
        Ok(Some(words)) => words,
        Ok(None) => return ExitCode::SUCCESS,
        Err(sentence) => return fail(&sentence),
    };
    let cli = match settings::parse::<Cli>(words) {
        Ok(cli) => cli,
        Err(settings::Wrong::Usage(error)) => {
            // clap prints help on stdout with status 0 and mistakes on stderr with status 2.
            let code = if error.use_stderr() { 2 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
        Err(settings::Wrong::File(sentence)) => return fail(&sentence),
    };
    logging::start(&cli.log, cli.log_json);
    let result = match cli.command {
        Command::Up(args) => commands::up::run(args),
        Command::Meta(args) => commands::meta::run(*args),
        Command::Data(args) => commands::data::run(args),
        Command::Mount(args) => commands::mount::run(args),
        Command::Umount(args) => commands::umount::run(args),
        Command::Status(args) => commands::status::run(args),
        Command::Sessions(args) => commands::sessions::run(args),
        Command::Fsck(args) => commands::fsck::run(args),
        Command::Gc(args) => commands::gc::run(args),
        Command::Df(args) => commands::df::run(args),
        Command::Volume(args) => commands::volume::run(args),
        Command::Policy(args) => commands::policy::run(args),
        Command::Servers(args) => commands::servers::run(args),
        Command::Drain(args) => commands::drain::run(args),
        Command::Rebalance(args) => commands::rebalance::run(args),
        Command::Scrub(args) => commands::scrub::run(args),
        Command::Top(args) => commands::top::run(args),
        Command::Systemd(args) => commands::systemd::run(args),
        Command::Bench(args) => commands::bench::run(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => fail(&sentence(&error)),
    }
}

/// `torchfs … | head` ends like any other program when nobody reads on. The signal that would do it stays off, since servers
/// must outlive their peers; so the failure to print arrives as a panic.
fn end_quietly_without_readers() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        usual(panic);
    }));
}

/// What happened and why, each cause once, and what to do where whoever failed did not say it.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if !text.contains(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
    }
    let kind = error.chain().find_map(|cause| Some(cause.downcast_ref::<io::Error>()?.kind()));
    // Advice follows a semicolon.
    match kind.filter(|_| !text.contains(';')).and_then(advice) {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

fn advice(kind: io::ErrorKind) -> Option<&'static str> {
    Some(match kind {
        io::ErrorKind::PermissionDenied => "run it as a user who may do that, or give another path",
        io::ErrorKind::NotADirectory => "give a folder, or a path whose parts are folders",
        io::ErrorKind::IsADirectory => "give the name of a file, not of a folder",
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room there, or give another path",
        io::ErrorKind::ReadOnlyFilesystem => "give a path on a file system that takes writes",
        io::ErrorKind::AddrInUse => "choose another port, or stop what listens there",
        io::ErrorKind::AddrNotAvailable => "give an address of this machine",
        _ => return None,
    })
}

/// One clear sentence on stderr and a status that is not zero.
fn fail(sentence: &str) -> ExitCode {
    eprintln!("torchfs: {sentence}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_each_cause_once_and_says_what_to_do() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let twice = anyhow::Error::new(full()).context(format!("cannot make log-000001: {}", full()));
        assert_eq!(
            sentence(&twice),
            format!("cannot make log-000001: {}; make room there, or give another path", full())
        );
        let told = anyhow::Error::new(full()).context("cannot write; take another disk");
        assert_eq!(sentence(&told), format!("cannot write; take another disk: {}", full()));
        let other = anyhow::anyhow!("why").context("cannot do it");
        assert_eq!(sentence(&other), "cannot do it: why");
    }

    #[test]
    fn examples_stand_on_lines_of_their_own() {
        fn look(command: &mut clap::Command) {
            let help = command.render_long_help().to_string();
            for line in help.lines().filter(|line| line.trim_start().starts_with("torchfs ")) {
                let example = line.trim();
                let told = example.contains(" torchfs ") && !example.contains(['#', '&', '.']);
                assert!(!told, "{example}");
            }
            command.get_subcommands_mut().for_each(look);
        }
        let mut all = <Cli as clap::CommandFactory>::command().term_width(100);
        all.build();
        look(&mut all);
        let drain = all.find_subcommand_mut("drain").unwrap().render_long_help().to_string();
        assert!(drain.contains("\n  torchfs servers remove 3 "), "{drain}");
        let mount = all.find_subcommand_mut("mount").unwrap().render_usage().to_string();
        assert!(mount.contains("[VOLUME] PATH"), "{mount}");
    }
}
