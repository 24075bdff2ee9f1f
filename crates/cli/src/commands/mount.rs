//! `torchfs mount`: the node agent as a process of its own; also what `mount -t torchfs` calls.
//!
//! Without `--foreground` the command starts itself again in the background, waits until that one says that the mount
//! is there, and ends; so fstab and scripts find the mount ready.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

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
/// The last form works from fstab once /sbin/mount.torchfs links to this program.
#[derive(clap::Args)]
pub struct Args {
    /// [VOLUME] and the folder to mount at
    #[arg(value_names = ["VOLUME", "PATH"], num_args = 1..=2, required = true)]
    what: Vec<String>,

    /// Stay in the foreground; Ctrl-C unmounts
    #[arg(long, short)]
    foreground: bool,

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
        let stop = roles::stop_signal()?;
        let pages = http::collect(args.metrics.as_deref()).await?;
        let cluster = roles::Cluster::remote(&found);
        let mount = roles::Mount::start(&path, &volume, &cluster, &args.options).await?;
        http::serve(pages, mount.health())?;
        println!("{MOUNTED} {}", path.display());
        tokio::select! {
            () = stop => {}
            () = mount.ended() => {}
        }
        mount.stop().await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Starts this program again with `--foreground`, and waits for its word on stdout.
fn in_background(args: &Args, path: &Path, found: &Found) -> anyhow::Result<ExitCode> {
    let words: Vec<String> = std::env::args().collect();
    let words = translate_mount_helper(&words).map_err(anyhow::Error::msg)?;
    let log_path = match &args.log_file {
        Some(file) => file.clone(),
        None => connect::runtime_file(&format!("mount{}.log", path.display().to_string().replace('/', "-")))?,
    };
    let log =
        OpenOptions::new().create(true).append(true).open(&log_path).with_context(|| {
            format!("cannot write the log {}; choose another --log-file", log_path.display())
        })?;
    let begin = log.metadata()?.len();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(&words[1..]).arg("--foreground").env("TORCHFS_META", found.meta.join(","));
    if let Some(secret) = &found.secret_file {
        command.env("TORCHFS_SECRET_FILE", secret);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).process_group(0);
    let mut child = command.spawn().context("cannot start the agent")?;
    let mut word = String::new();
    if let Some(stdout) = child.stdout.take() {
        // Ends without a word when the process does.
        let _ = BufReader::new(stdout).read_line(&mut word);
    }
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

/// The first word on stdout once the mount is there.
const MOUNTED: &str = "mounted at";

/// `mount.torchfs SPEC PATH [-sfnv] [-o OPTIONS]`, as mount(8) calls it, in the words of `torchfs mount`.
///
/// SPEC is HOST:PORT[,HOST:PORT][/VOLUME] or just a volume's name. Options that are flags of `torchfs mount` are handed
/// on (`cache_size=2GiB` as `--cache-size 2GiB`); those that are mount(8)'s own are dropped.
pub fn translate_mount_helper(words: &[String]) -> Result<Vec<String>, String> {
    let name = words.first().map(Path::new).and_then(|p| p.file_name()).and_then(|n| n.to_str());
    if name != Some("mount.torchfs") {
        return Ok(words.to_vec());
    }
    let usage = "usage: mount -t torchfs HOST:PORT[/VOLUME] PATH [-o OPTIONS]";
    let [spec, path, rest @ ..] = &words[1..] else { return Err(usage.to_string()) };
    let (addr, volume) = match spec.split_once('/') {
        Some((addr, volume)) => (addr, volume),
        None if spec.contains(':') => (spec.as_str(), ""),
        None => ("", if spec == "torchfs" || spec == "none" { "" } else { spec.as_str() }),
    };
    let mut out = vec![words[0].clone(), "mount".to_string()];
    out.extend([volume, path].into_iter().filter(|w| !w.is_empty()).map(str::to_string));
    if !addr.is_empty() {
        out.extend(["--meta".to_string(), addr.to_string()]);
    }
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        if word != "-o" {
            continue;
        }
        for option in rest.next().map(String::as_str).unwrap_or_default().split(',').filter(|o| !o.is_empty())
        {
            let (key, value) = option.split_once('=').map_or((option, None), |(k, v)| (k, Some(v)));
            match key {
                "ro" => out.push("--ro".into()),
                "rw" | "defaults" | "_netdev" | "auto" | "noauto" | "user" | "users" | "nofail" | "dev"
                | "nodev" | "suid" | "nosuid" | "exec" | "noexec" | "noatime" | "relatime" => {}
                key if key.starts_with("x-") || key.starts_with("comment") => {}
                key => {
                    out.push(format!("--{}", key.replace('_', "-")));
                    out.extend(value.map(str::to_string));
                }
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_string).collect()
    }

    #[test]
    fn mount_of_fstab_becomes_torchfs_mount() {
        let line = "/sbin/mount.torchfs 10.0.0.1:7070/train /mnt/t -o rw,_netdev,secret_file=/etc/s,ro";
        let want = "/sbin/mount.torchfs mount train /mnt/t --meta 10.0.0.1:7070 --secret-file /etc/s --ro";
        assert_eq!(translate_mount_helper(&words(line)), Ok(words(want)));
        let line = "mount.torchfs main /mnt/t";
        assert_eq!(translate_mount_helper(&words(line)), Ok(words("mount.torchfs mount main /mnt/t")));
        assert!(translate_mount_helper(&words("mount.torchfs main")).is_err());
    }
}
