//! `torchfs systemd ROLE`: prints a unit file.

use std::process::ExitCode;

use clap::ValueEnum;

/// Print a systemd unit file for a role
///
///   torchfs systemd data > /etc/systemd/system/torchfs-data.service
///   systemctl enable --now torchfs-data
///
/// What follows the role is handed to it: folders, a volume, a mount point, any flag. Without that, folders below
/// /var/lib/torchfs and the mount point /mnt/torchfs are used; --from-file leaves the folders to the settings file.
///
///   torchfs systemd data -- --dir /disk1 --dir /disk2
///   torchfs systemd mount -- train /mnt/train
///
/// The roles read /etc/torchfs.toml, so put what all of them need there: meta, secret-file.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Which role
    role: Role,

    /// Name no folders: the settings file has them, for example dir = ["/disk1", "/disk2"] in [data]
    #[arg(long)]
    from_file: bool,

    /// Words for the role, after `--`
    #[arg(last = true, value_name = "WORD")]
    words: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Role {
    /// The metadata service
    Meta,
    /// A data server
    Data,
    /// A mount
    Mount,
    /// All roles in one process
    Up,
}

/// Prints the unit.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe()?;
    print!("{}", unit(&args, &program.display().to_string()));
    Ok(ExitCode::SUCCESS)
}

fn unit(args: &Args, program: &str) -> String {
    let usual: &[&str] = match args.role {
        Role::Mount => &["/mnt/torchfs"],
        _ if args.from_file => &[],
        Role::Meta => &["--dir", "/var/lib/torchfs/meta"],
        Role::Data => &["--dir", "/var/lib/torchfs/data"],
        Role::Up => &["--dir", "/var/lib/torchfs", "--mount", "/mnt/torchfs"],
    };
    let words: Vec<&str> = match args.words.as_slice() {
        [] => usual.to_vec(),
        words => words.iter().map(String::as_str).collect(),
    };
    let (what, role) = match args.role {
        Role::Meta => ("metadata service", "meta"),
        Role::Data => ("data server", "data"),
        Role::Mount => ("mount", "mount --foreground"),
        Role::Up => ("all roles", "up"),
    };
    let mount = match args.role {
        Role::Mount => words.iter().copied().rfind(|word| word.starts_with('/')),
        Role::Up => {
            words.iter().position(|word| *word == "--mount").and_then(|at| words.get(at + 1).copied())
        }
        _ => None,
    };
    // A mount whose agent was killed is in the way of the next one.
    let before = mount.map_or_else(String::new, |path| {
        let path = quoted(path);
        format!("ExecStartPre=-{program} umount --stale {path}\nExecStartPre=-/bin/mkdir -p {path}\n")
    });
    let stop = match (args.role, mount) {
        (Role::Mount, Some(path)) => format!("ExecStop={program} umount {}\n", quoted(path)),
        // Those unmount when they are told to end.
        _ => String::new(),
    };
    // A data server may wait long for its cluster; what starts after it should not wait for that, too.
    let kind = if matches!(args.role, Role::Data) { "exec" } else { "notify" };
    let words: String = words.iter().map(|word| format!(" {}", quoted(word))).collect();
    format!(
        "[Unit]\nDescription=TorchFS {what}\nAfter=network-online.target\nWants=network-online.target\n\n\
         [Service]\nType={kind}\n{before}ExecStart={program} {role}{words}\n{stop}Restart=on-failure\nRestartSec=1\n\
         LimitNOFILE=1048576\nTimeoutStartSec=infinity\nTimeoutStopSec=330\nKillSignal=SIGTERM\n\n\
         [Install]\nWantedBy=multi-user.target\n"
    )
}

/// A word as systemd reads it.
fn quoted(word: &str) -> String {
    let word = word.replace('%', "%%");
    match word.contains(|c: char| c.is_whitespace() || "\"\\$;'".contains(c)) {
        true => format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "$$")),
        false => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(role: Role, from_file: bool, words: &[&str]) -> String {
        let words = words.iter().map(ToString::to_string).collect();
        unit(&Args { role, from_file, words }, "/bin/torchfs")
    }

    #[test]
    fn units_start_what_they_are_told_to() {
        let data = printed(Role::Data, false, &["--dir", "/disk 1", "--dir", "/disk2"]);
        assert!(data.contains("ExecStart=/bin/torchfs data --dir \"/disk 1\" --dir /disk2\n"), "{data}");
        assert!(printed(Role::Data, true, &[]).contains("ExecStart=/bin/torchfs data\n"));
        let mount = printed(Role::Mount, false, &["train", "/mnt/train"]);
        for line in [
            "Type=notify",
            "ExecStartPre=-/bin/torchfs umount --stale /mnt/train",
            "ExecStartPre=-/bin/mkdir -p /mnt/train",
            "ExecStart=/bin/torchfs mount --foreground train /mnt/train",
            "ExecStop=/bin/torchfs umount /mnt/train",
        ] {
            assert!(mount.lines().any(|l| l == line), "{line}:\n{mount}");
        }
        assert!(printed(Role::Up, false, &[]).contains("umount --stale /mnt/torchfs"));
    }
}
