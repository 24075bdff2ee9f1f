//! `torchfs systemd ROLE`: prints a unit file.

use std::process::ExitCode;

use clap::ValueEnum;

/// Print a systemd unit file for a role
///
///   torchfs systemd data > /etc/systemd/system/torchfs-data.service
///   systemctl enable --now torchfs-data
///
/// The roles read /etc/torchfs.toml, so put their settings there.
#[derive(clap::Args)]
pub struct Args {
    /// Which role
    role: Role,
}

#[derive(Clone, Copy, ValueEnum)]
enum Role {
    /// The metadata service
    Meta,
    /// A data server
    Data,
    /// A mount at /mnt/torchfs
    Mount,
    /// All roles in one process
    Up,
}

/// Prints the unit.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe()?;
    let program = program.display();
    let (what, command, stop) = match args.role {
        Role::Meta => {
            ("metadata service", format!("{program} meta --dir /var/lib/torchfs/meta"), String::new())
        }
        Role::Data => ("data server", format!("{program} data --dir /var/lib/torchfs/data"), String::new()),
        Role::Mount => (
            "mount",
            format!("{program} mount --foreground /mnt/torchfs"),
            format!("ExecStop={program} umount /mnt/torchfs\n"),
        ),
        Role::Up => {
            ("all roles", format!("{program} up --dir /var/lib/torchfs --mount /mnt/torchfs"), String::new())
        }
    };
    print!(
        "[Unit]\nDescription=TorchFS {what}\nAfter=network-online.target\nWants=network-online.target\n\n\
         [Service]\nType=simple\nExecStart={command}\n{stop}Restart=on-failure\nRestartSec=1\nLimitNOFILE=1048576\n\
         TimeoutStopSec=90\nKillSignal=SIGTERM\n\n[Install]\nWantedBy=multi-user.target\n"
    );
    Ok(ExitCode::SUCCESS)
}
