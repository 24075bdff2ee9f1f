//! Settings: /etc/torchfs.toml, then TORCHFS_* variables, then flags; the later wins.
//!
//! The file gives default values to flags by their long names: a key at its top goes to every command that has such a
//! flag, a key in a table named after a command only to that command.
//!
//! ```toml
//! meta = "10.0.0.1:7070"
//! [mount]
//! op-timeout = "2m"
//! ```

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Command, CommandFactory, FromArgMatches};
use torchfs_proto::layout::Scheme;

/// What can be wrong before a command runs.
pub enum Wrong {
    /// The words on the command line; clap knows how to say it.
    Usage(clap::Error),
    /// The settings file.
    File(String),
}

/// Parses the command line with defaults from the settings file.
pub fn parse<C: CommandFactory + FromArgMatches>(words: Vec<String>) -> Result<C, Wrong> {
    let path =
        std::env::var_os("TORCHFS_CONFIG").map_or_else(|| PathBuf::from("/etc/torchfs.toml"), PathBuf::from);
    let mut command = C::command();
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
                Wrong::File(format!("{}: {}; mend the file or remove it", path.display(), e.message()))
            })?;
            command = with_defaults(command, &table)
                .map_err(|e| Wrong::File(format!("{}: {e}", path.display())))?;
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Wrong::File(format!("cannot read {}: {error}", path.display()))),
    }
    let matches = command.try_get_matches_from(words).map_err(Wrong::Usage)?;
    C::from_arg_matches(&matches).map_err(Wrong::Usage)
}

/// Hands the file's values down as defaults of flags.
fn with_defaults(mut command: Command, table: &toml::Table) -> Result<Command, String> {
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    let mut used = Vec::new();
    for name in &names {
        let own = match table.get(name) {
            Some(toml::Value::Table(own)) => {
                used.push(name.as_str());
                own.clone()
            }
            _ => toml::Table::new(),
        };
        command = command.mut_subcommand(name, |mut sub| {
            let flags: Vec<(clap::Id, String, bool)> = sub
                .get_arguments()
                .filter_map(|a| {
                    Some((
                        a.get_id().clone(),
                        a.get_long()?.to_string(),
                        matches!(a.get_action(), ArgAction::SetTrue),
                    ))
                })
                .collect();
            for (id, long, _) in flags {
                let value = own.get(&long).or_else(|| table.get(&long).filter(|v| !v.is_table()));
                if let Some(values) = value.map(as_words) {
                    sub = sub.mut_arg(id, |arg| arg.default_values(values.clone()).required(false));
                }
            }
            with_top_defaults(sub, table)
        });
    }
    for (key, value) in table {
        let known = command.get_subcommands().any(|c| {
            c.get_name() == key && value.is_table() || c.get_arguments().any(|a| a.get_long() == Some(key))
        });
        if !known {
            return Err(format!(
                "no command has a setting `{key}`; see torchfs COMMAND --help for the names"
            ));
        }
    }
    Ok(command)
}

/// The same for the commands of a command (`meta dump`), which take the keys at the top only.
fn with_top_defaults(mut command: Command, table: &toml::Table) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    for name in names {
        command = command.mut_subcommand(name, |mut sub| {
            let flags: Vec<(clap::Id, String)> = sub
                .get_arguments()
                .filter_map(|a| Some((a.get_id().clone(), a.get_long()?.to_string())))
                .collect();
            for (id, long) in flags {
                if let Some(values) = table.get(&long).filter(|v| !v.is_table()).map(as_words) {
                    sub = sub.mut_arg(id, |arg| arg.default_values(values.clone()).required(false));
                }
            }
            sub
        });
    }
    command
}

fn as_words(value: &toml::Value) -> Vec<String> {
    match value {
        toml::Value::String(s) => vec![s.clone()],
        toml::Value::Array(items) => items.iter().flat_map(as_words).collect(),
        other => vec![other.to_string()],
    }
}

/// `90`, `90s`, `5m`, `2h`, `250ms` as a time span.
pub fn duration(text: &str) -> Result<Duration, String> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let number: u64 =
        digits.parse().map_err(|_| format!("`{text}` is not a time span; write 90s, 5m or 2h"))?;
    let millis = match unit {
        "ms" => Some(1),
        "" | "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        "d" => Some(86_400_000),
        _ => None,
    };
    millis
        .and_then(|unit| number.checked_mul(unit))
        .map(Duration::from_millis)
        .ok_or_else(|| format!("`{text}` is not a time span; write 90s, 5m or 2h"))
}

/// A time span that is not 0.
pub fn positive(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err(format!("`{text}` is no time at all; write 90s, 5m or 2h")),
        span => Ok(span),
    }
}

/// `replicas:2` or `ec:4+2`.
pub fn redundancy(text: &str) -> Result<Scheme, String> {
    text.parse().map_err(|fault: torchfs_proto::Fault| fault.to_string())
}

/// `4096`, `64KiB`, `4MiB`, `2GiB`, `1TiB` (or K, M, G, T) as bytes.
pub fn bytes(text: &str) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let wrong = || format!("`{text}` is not a size; write 4096, 64KiB, 4MiB or 2GiB");
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// A size of at least 16 MiB.
pub fn memory(text: &str) -> Result<u64, String> {
    at_least(16, text)
}

/// A size of at least 1 MiB.
pub fn room(text: &str) -> Result<u64, String> {
    at_least(1, text)
}

fn at_least(mebibytes: u64, text: &str) -> Result<u64, String> {
    match bytes(text)? {
        n if n < mebibytes << 20 => Err(format!("`{text}` is too little; give at least {mebibytes}MiB")),
        n => Ok(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_are_read_as_people_write_them() {
        assert_eq!(bytes("4MiB"), Ok(4 << 20));
        assert_eq!(bytes("64k"), Ok(64 << 10));
        assert!(bytes("4 apples").is_err());
        assert!(bytes("99999999999T").is_err());
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert!(duration("soon").is_err());
        assert!(positive("0s").is_err() && positive("1ms").is_ok());
        assert!(room("1").is_err() && room("1MiB").is_ok() && memory("1MiB").is_err());
    }
}
