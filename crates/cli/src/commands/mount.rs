//! `torchfs mount`: the node agent as a process of its own; also what `mount -t torchfs` calls.
//!
//! Without `--foreground` the command starts itself again in the background, waits until that one says that the mount
//! is there, and ends; so fstab and scripts find the mount ready.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::connect::{self, Connect, Found};
use crate::http;
use crate::roles::{self, MountOptions};

/// Mount a volume
///
///   torchfs mount /mnt/t                          # the default volume
///   torchfs mount train /mnt/t --meta 10.0.0.1:7070 --secret-file secret
///   mount -t torchfs 10.0.0.1:7070/train /mnt/t -o secret_file=/etc/torchfs.secret
///
/// The last form, and fstab, work once /sbin/mount.torchfs links to this program: `make install` does that.
#[derive(clap::Args)]
#[command(verbatim_doc_comment, override_usage = "torchfs mount [OPTIONS] [VOLUME] PATH")]
pub struct Args {
    /// [VOLUME] and the folder to mount at
    #[arg(value_names = ["VOLUME", "PATH"], num_args = 1..=2, required = true)]
    what: Vec<String>,

    /// Stay in the foreground; Ctrl-C unmounts
    #[arg(long, short)]
    foreground: bool,

    /// The process that waits for the mount; without it there is none
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,

    /// Where the background process logs [default: a file in the runtime folder]
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// Serve /metrics and /healthz here
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,

    #[command(flatten)]
    connect: Connect,

    #[command(flatten)]
    options: MountOptions,
}

/// Mounts.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let found = args.connect.find()?;
    let (volume, path) = match args.what.as_slice() {
        [path] => ("", path),
        [volume, path] => (volume.as_str(), path),
        _ => bail!("give [VOLUME] and PATH"),
    };
    let path = PathBuf::from(path);
    if !args.foreground {
        return in_background(&args, &path, &found);
    }
    let volume = volume.to_string();
    roles::block_on(async move {
        let mut stop = std::pin::pin!(roles::stop_signal()?);
        let ended = || format!("ended by a signal before {} was mounted", path.display());
        end_with_parent(args.parent)?;
        let pages = http::collect(args.metrics.as_deref()).await?;
        let cluster = roles::Cluster::remote(&found);
        let opened = tokio::select! {
            opened = roles::Mount::open(&path, &volume, &cluster, &args.options) => opened?,
            () = &mut stop => bail!(ended()),
        };
        let mount = roles::Mount::start(opened, &path, &args.options).await?;
        http::serve(pages, mount.health())?;
        // Before it is told: who hears it ends at once, and its end is not to be ours then.
        live_on(args.parent)?;
        let told = writeln!(std::io::stdout(), "{MOUNTED} {}", path.display());
        if told.is_err() && args.parent.is_some() {
            // Whoever asked for the mount was told that there is none, or nothing.
            mount.stop().await?;
            bail!(ended());
        }
        roles::ready();
        tokio::select! {
            () = stop => {}
            () = mount.ended() => {}
        }
        mount.stop().await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Until the mount is there, this process is to end with the one that waits for it: nobody else would know of it. Both
/// calls are made by the same thread, the one that the signal belongs to.
fn end_with_parent(parent: Option<i32>) -> anyhow::Result<()> {
    let Some(parent) = parent else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        bail!("the process that asked for the mount is gone");
    }
    Ok(())
}

fn live_on(parent: Option<i32>) -> anyhow::Result<()> {
    if parent.is_some() {
        rustix::process::set_parent_process_death_signal(None)?;
    }
    Ok(())
}

/// Starts this program again with `--foreground`, and waits for its word on stdout.
fn in_background(args: &Args, path: &Path, found: &Found) -> anyhow::Result<ExitCode> {
    let words: Vec<String> = std::env::args().collect();
    let words = translate_mount_helper(&words).map_err(anyhow::Error::msg)?.unwrap_or_default();
    let log_path = match &args.log_file {
        Some(file) => file.clone(),
        None => connect::runtime_file(&format!("mount{}.log", path.display().to_string().replace('/', "-")))?,
    };
    let log =
        OpenOptions::new().create(true).append(true).mode(0o600).open(&log_path).with_context(|| {
            format!("cannot write the log {}; choose another --log-file", log_path.display())
        })?;
    let begin = log.metadata()?.len();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(words.iter().skip(1)).arg("--foreground");
    command.arg("--parent").arg(std::process::id().to_string()).env("TORCHFS_META", found.meta.join(","));
    if let Some(secret) = &found.secret_file {
        command.env("TORCHFS_SECRET_FILE", secret);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).process_group(0);
    let mut child = command.spawn().context("cannot start the agent")?;
    let (tell, told) = mpsc::channel();
    let stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut word = String::new();
        // Ends without a word when the process does.
        let _ = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut word));
        let _ = tell.send(word);
    });
    let word = told.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        eprintln!(
            "torchfs: waiting for the metadata service at {}; Ctrl-C gives up, {} tells more",
            found.meta.join(", "),
            log_path.display()
        );
        told.recv().unwrap_or_default()
    });
    if word.starts_with(MOUNTED) {
        return Ok(ExitCode::SUCCESS);
    }
    let _ = child.wait();
    let log = std::fs::read(&log_path).unwrap_or_default();
    let log = String::from_utf8_lossy(log.get(begin as usize..).unwrap_or_default()).into_owned();
    match log.lines().rev().find_map(|line| line.strip_prefix("torchfs: ")) {
        Some(sentence) => bail!("{sentence}"),
        None => bail!("the mount at {} did not start; see {}", path.display(), log_path.display()),
    }
}

/// Whoever waits longer than this is told for what.
const PATIENCE: Duration = Duration::from_secs(2);

/// The first word on stdout once the mount is there.
const MOUNTED: &str = "mounted at";

/// `mount.torchfs SPEC PATH [-sfnv] [-o OPTIONS]`, as mount(8) calls it, in the words of `torchfs mount`; none if nothing is to
/// be done.
///
/// SPEC is HOST:PORT[,HOST:PORT][/VOLUME] or just a volume's name; it is the source that `mount` shows, so that `mount -a`
/// finds its own. Options that are flags of `torchfs mount` are handed on (`cache_size=2GiB` as `--cache-size 2GiB`); those
/// that are for mount(8) alone are dropped.
pub fn translate_mount_helper(words: &[String]) -> Result<Option<Vec<String>>, String> {
    let name = words.first().map(Path::new).and_then(|p| p.file_name()).and_then(|n| n.to_str());
    // By the second name it is asked about a mount that is there, whose type has two parts.
    if !matches!(name, Some("mount.torchfs" | "mount.fuse.torchfs")) {
        return Ok(Some(words.to_vec()));
    }
    let usage = "usage: mount -t torchfs HOST:PORT[/VOLUME] PATH [-o OPTIONS]";
    let [spec, path, rest @ ..] = &words[1..] else { return Err(usage.to_string()) };
    let (addr, volume) = match spec.split_once('/') {
        Some((addr, volume)) => (addr, volume),
        None if spec.starts_with("torchfs:") => ("", spec.trim_start_matches("torchfs:")),
        None if spec.contains(':') => (spec.as_str(), ""),
        None => ("", if spec == "torchfs" || spec == "none" { "" } else { spec.as_str() }),
    };
    let mut out = vec![words[0].clone(), "mount".to_string()];
    out.extend([volume, path].into_iter().filter(|w| !w.is_empty()).map(str::to_string));
    if !addr.is_empty() {
        out.extend(["--meta".to_string(), addr.to_string()]);
    }
    out.extend(["--source".to_string(), spec.clone()]);
    let (mut fake, mut sloppy, mut options) = (false, false, Vec::new());
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        match word.strip_prefix('-') {
            Some("o") => options.extend(rest.next().map(String::as_str).unwrap_or_default().split(',')),
            Some(letters) => {
                fake |= letters.contains('f');
                sloppy |= letters.contains('s');
            }
            None => return Err(usage.to_string()),
        }
    }
    for option in options.into_iter().filter(|option| !option.is_empty()) {
        match mount_option(option, path) {
            Ok(words) => out.extend(words),
            Err(_) if sloppy => {}
            Err(sentence) => return Err(sentence),
        }
    }
    Ok((!fake).then_some(out))
}

/// One option of `-o` in the words of `torchfs mount`.
fn mount_option(option: &str, path: &str) -> Result<Vec<String>, String> {
    let (key, value) = option.split_once('=').map_or((option, None), |(k, v)| (k, Some(v)));
    match key {
        "rw" | "defaults" | "_netdev" | "auto" | "noauto" | "user" | "nouser" | "users" | "owner"
        | "group" | "nofail" | "dev" | "suid" | "exec" | "async" | "atime" | "noatime" | "diratime"
        | "nodiratime" | "relatime" | "norelatime" | "nostrictatime" | "silent" | "loud" => {
            return Ok(Vec::new());
        }
        "remount" => {
            return Err(format!(
                "a mount of torchfs cannot be remounted with other options; end it with `torchfs umount {path}` and mount again"
            ));
        }
        key if key.starts_with("x-") || key.starts_with("X-") || key.starts_with("comment") => {
            return Ok(Vec::new());
        }
        _ => {}
    }
    let long = key.replace('_', "-");
    let command = <Args as clap::Args>::augment_args(clap::Command::new("mount"));
    let flag = command.get_arguments().find(|flag| flag.get_long() == Some(&long));
    let takes_value = match flag {
        Some(flag) => flag.get_action().takes_values(),
        None => {
            return Err(format!(
                "`-o {option}` is no option of a torchfs mount; the long flags that `torchfs mount --help` lists are, such as \
                 -o cache_size=2GiB"
            ));
        }
    };
    match (takes_value, value) {
        (true, Some(value)) => Ok(vec![format!("--{long}"), value.to_string()]),
        (false, None) => Ok(vec![format!("--{long}")]),
        (true, None) => Err(format!("`-o {key}` needs a value: -o {key}=VALUE")),
        (false, Some(_)) => Err(format!("`-o {option}` takes no value: -o {key}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_string).collect()
    }

    fn translated(line: &str) -> Result<Option<String>, String> {
        translate_mount_helper(&words(line)).map(|words| words.map(|words| words.join(" ")))
    }

    #[test]
    fn mount_of_fstab_becomes_torchfs_mount() {
        let line = "/sbin/mount.torchfs 10.0.0.1:7070/train /mnt/t -o rw,_netdev,secret_file=/etc/s,ro,noexec,nosuid,nodev";
        let want = "/sbin/mount.torchfs mount train /mnt/t --meta 10.0.0.1:7070 --source 10.0.0.1:7070/train \
                    --secret-file /etc/s --ro --noexec --nosuid --nodev";
        assert_eq!(translated(line), Ok(Some(want.to_string())));
        let want = "mount.torchfs mount main /mnt/t --source main";
        assert_eq!(translated("mount.torchfs main /mnt/t"), Ok(Some(want.to_string())));
        assert!(translated("mount.torchfs main").is_err());
        assert_eq!(translated("torchfs mount /mnt/t"), Ok(Some("torchfs mount /mnt/t".to_string())));
    }

    #[test]
    fn a_fake_mount_does_nothing_and_a_remount_is_refused() {
        assert_eq!(translated("mount.torchfs main /mnt/t -fv -o rw"), Ok(None));
        let refused = translated("mount.fuse.torchfs torchfs:main /mnt/t -o rw,remount,ro");
        assert!(refused.clone().is_err_and(|why| why.contains("torchfs umount /mnt/t")), "{refused:?}");
    }

    #[test]
    fn wrong_mount_options_are_named_as_they_were_given() {
        for (option, about) in [
            ("sync", "`-o sync` is no option"),
            ("foo=bar", "`-o foo=bar` is no option"),
            ("cache_size", "-o cache_size=VALUE"),
            ("writeback=1", "takes no value"),
        ] {
            let refused = translated(&format!("mount.torchfs main /mnt/t -o {option}"));
            assert!(refused.clone().is_err_and(|why| why.contains(about)), "{refused:?}");
            assert!(translated(&format!("mount.torchfs main /mnt/t -s -o {option}")).is_ok());
        }
    }
}
