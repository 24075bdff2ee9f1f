//! Settings: /etc/torchfs.toml, then TORCHFS_* variables, then flags; the later wins.
//!
//! The file gives default values to flags by their long names: a key at its top, or in the table `[all]`, goes to every
//! command that has such a flag, a key in a table named after a command only to that command.
//!
//! ```toml
//! [all]
//! meta = "10.0.0.1:7070"
//! [mount]
//! op-timeout = "2m"
//! ```
//!
//! `[all]` is there because TOML takes no key `meta` beside a table `[meta]`.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Command, CommandFactory, FromArgMatches};
use torchfs_proto::layout::Scheme;

/// The table whose keys go to every command.
const ALL: &str = "all";

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
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let name = path.display();
            return Err(Wrong::File(format!("cannot read {name}: {error}; make it readable, or remove it")));
        }
    };
    parse_with(words, &text).map_err(|wrong| match wrong {
        Wrong::File(sentence) => Wrong::File(format!("{}: {sentence}", path.display())),
        usage => usage,
    })
}

fn parse_with<C: CommandFactory + FromArgMatches>(words: Vec<String>, text: &str) -> Result<C, Wrong> {
    let table: toml::Table = text.parse().map_err(|error| Wrong::File(unreadable(text, &error)))?;
    let file = File::new(table).map_err(Wrong::File)?;
    let command = with_defaults(C::command(), &file).map_err(Wrong::File)?;
    let matches =
        command.try_get_matches_from(&words).map_err(|error| match wrong_value(&file, &words, &error) {
            Some(sentence) => Wrong::File(sentence),
            None => Wrong::Usage(error),
        })?;
    C::from_arg_matches(&matches).map_err(Wrong::Usage)
}

/// The file, in two parts: what goes to every command, and tables of single commands.
struct File {
    all: toml::Table,
    commands: toml::Table,
}

impl File {
    fn new(table: toml::Table) -> Result<File, String> {
        let (mut commands, mut all): (toml::Table, toml::Table) =
            table.into_iter().partition(|(_, value)| value.is_table());
        if let Some(toml::Value::Table(more)) = commands.remove(ALL) {
            for (key, value) in more {
                if all.insert(key.clone(), value).is_some() {
                    return Err(format!("`{key}` stands at the top and in [{ALL}]; remove one of them"));
                }
            }
        }
        Ok(File { all, commands })
    }

    /// What the file says about a flag of a command.
    fn find(&self, command: &str, long: &str) -> Option<&toml::Value> {
        let own = self.commands.get(command).and_then(|own| own.get(long));
        own.or_else(|| self.all.get(long))
    }
}

/// Where the file cannot be understood, and why.
fn unreadable(text: &str, error: &toml::de::Error) -> String {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let line = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    let hint = match error.message().contains("duplicate key") {
        true => format!("; a key for every command beside a table of that name goes into the table [{ALL}]"),
        false => String::new(),
    };
    format!("line {line}: {}{hint}; mend the file or remove it", error.message())
}

/// Hands the file's values down as defaults of flags.
fn with_defaults(mut command: Command, file: &File) -> Result<Command, String> {
    let own = longs(&command);
    command = fill(command, |long| file.all.get(long));
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    let mut known = own.clone();
    for name in &names {
        let mut flags = Vec::new();
        command = command.mut_subcommand(name, |sub| {
            flags = longs(&sub);
            let below: Vec<String> = sub.get_subcommands().map(|c| c.get_name().to_string()).collect();
            let sub = fill(sub, |long| file.find(name, long));
            // The commands of a command (`meta dump`) take what goes to every command only.
            below.into_iter().fold(sub, |sub, name| {
                sub.mut_subcommand(name, |sub| {
                    flags.extend(longs(&sub));
                    fill(sub, |long| file.all.get(long))
                })
            })
        });
        known.extend(flags.iter().cloned());
        let table = file.commands.get(name).and_then(|table| table.as_table());
        if let Some(key) = table.and_then(|table| table.keys().find(|key| !flags.contains(key))) {
            return Err(unknown(
                key,
                &flags,
                &format!("`torchfs {name}` has"),
                &format!("torchfs {name} --help"),
            ));
        }
    }
    if let Some(key) = file.all.keys().find(|key| !known.contains(key)) {
        return Err(unknown(key, &known, "no command has", "torchfs COMMAND --help"));
    }
    match file.commands.keys().find(|key| !names.contains(key)) {
        Some(key) => Err(format!(
            "[{key}] is no command; see torchfs --help for their names, [{ALL}] is for every one"
        )),
        None => Ok(command),
    }
}

fn unknown(key: &str, flags: &[String], who: &str, help: &str) -> String {
    let meant = key.replace('_', "-");
    let who = if who.starts_with("no ") { who.to_string() } else { format!("{who} no") };
    let article = if who.starts_with("no ") { " a" } else { "" };
    match flags.contains(&meant) {
        true => format!("{who}{article} setting `{key}`; write {meant}"),
        false => format!("{who}{article} setting `{key}`; see {help} for the names"),
    }
}

/// The long names of a command's flags.
fn longs(command: &Command) -> Vec<String> {
    command.get_arguments().filter_map(|arg| Some(arg.get_long()?.to_string())).collect()
}

/// Gives flags the values that are found for them.
fn fill<'a>(mut command: Command, find: impl Fn(&str) -> Option<&'a toml::Value>) -> Command {
    for long in longs(&command) {
        let Some(values) = find(&long).map(as_words) else { continue };
        let id =
            command.get_arguments().find(|arg| arg.get_long() == Some(&long)).map(|arg| arg.get_id().clone());
        if let Some(id) = id {
            command = command.mut_arg(id, |arg| arg.default_values(values).required(false));
        }
    }
    command
}

/// Whether a value that clap refuses is from the file, and what to say then.
fn wrong_value(file: &File, words: &[String], error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?.split([' ', '=']).next()?;
    let value = text(ContextKind::InvalidValue)?;
    let long = flag.strip_prefix("--")?;
    let given = words.iter().any(|word| word == flag || word.starts_with(&format!("{flag}=")));
    let command = words.iter().skip(1).find(|word| !word.starts_with('-'))?;
    let from_file =
        file.find(command, long).is_some_and(|found| as_words(found).iter().any(|word| word == value));
    if given || !from_file {
        return None;
    }
    let why = error.source().map_or_else(String::new, |why| format!(": {why}"));
    Some(format!("`{value}` is no value for {long}{why}; mend the file"))
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

    #[derive(clap::Parser, Debug)]
    struct Cli {
        #[command(subcommand)]
        command: Sub,
    }

    #[derive(clap::Subcommand, Debug)]
    enum Sub {
        Meta {
            #[arg(long, required = true)]
            dir: Vec<String>,
        },
        Mount {
            #[arg(long)]
            meta: Option<String>,
            #[arg(long, default_value = "5m", value_parser = duration)]
            op_timeout: Duration,
            #[arg(long)]
            ro: bool,
        },
    }

    fn read(line: &str, file: &str) -> Result<Sub, String> {
        let words = line.split(' ').map(str::to_string).collect();
        match parse_with::<Cli>(words, file) {
            Ok(cli) => Ok(cli.command),
            Err(Wrong::File(sentence)) => Err(sentence),
            Err(Wrong::Usage(error)) => Err(format!("usage: {error}")),
        }
    }

    #[test]
    fn the_file_gives_defaults_to_all_commands_or_to_one() {
        let file = "[all]\nmeta = \"a:1\"\n[meta]\ndir = [\"/x\", \"/y\"]\n[mount]\nop-timeout = \"2m\"\nro = true\n";
        match read("torchfs mount", file) {
            Ok(Sub::Mount { meta, op_timeout, ro: true }) => {
                assert_eq!((meta.as_deref(), op_timeout), (Some("a:1"), Duration::from_secs(120)));
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(read("torchfs meta", file), Ok(Sub::Meta { dir }) if dir == ["/x", "/y"]));
        let flagged = read("torchfs mount --meta b:2", "meta = \"a:1\"");
        assert!(
            matches!(&flagged, Ok(Sub::Mount { meta, .. }) if meta.as_deref() == Some("b:2")),
            "{flagged:?}"
        );
    }

    #[test]
    fn what_is_wrong_in_the_file_is_named() {
        for (file, about) in [
            ("meta = \"a:1\"\n[meta]\ndir = \"/x\"\n", "goes into the table [all]"),
            ("meta = \"a:1\"\n\n= 3\n", "line 3: "),
            ("meta = \"a:1\"\n[all]\nmeta = \"b:1\"\n", "at the top and in [all]"),
            (
                "[mount]\nop_timeout = \"2m\"\n",
                "`torchfs mount` has no setting `op_timeout`; write op-timeout",
            ),
            ("[mount]\nnonsense = 3\n", "`torchfs mount` has no setting `nonsense`"),
            ("nonsense = 3\n", "no command has a setting `nonsense`"),
            ("[nonsense]\nmeta = 3\n", "[nonsense] is no command"),
            (
                "[mount]\nop-timeout = \"soon\"\n",
                "`soon` is no value for op-timeout: `soon` is not a time span",
            ),
        ] {
            let said = read("torchfs mount", file).expect_err(file);
            assert!(said.contains(about) && !said.starts_with("usage"), "{file}: {said}");
        }
        let usage = read("torchfs mount --op-timeout soon", "[mount]\nop-timeout = \"soon\"\n");
        assert!(usage.is_err_and(|said| said.starts_with("usage")), "a wrong flag is a wrong flag");
    }

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
