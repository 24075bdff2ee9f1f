//! The command line: every command with good arguments and a wrong one. A failure is one sentence that says what to do.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;
use torchfs_tests::cluster::{Client, binary, make_secret};
use torchfs_tests::ground::Up;
use torchfs_tests::ports::Port;
use torchfs_tests::{Cluster, Mount, Options, Ran, Rng, Sandbox, eventually, run, sys};

const COMMANDS: &[&str] = &[
    "up",
    "meta",
    "data",
    "mount",
    "umount",
    "status",
    "sessions",
    "fsck",
    "gc",
    "df",
    "systemd",
    "volume",
    "policy",
    "servers",
    "drain",
    "rebalance",
    "scrub",
    "top",
];

/// A command line without any cluster.
fn alone<'a>(args: impl IntoIterator<Item = &'a str>) -> Ran {
    let command = &mut Command::new(binary());
    run(command.args(args).env_remove("TORCHFS_META").env_remove("TORCHFS_SECRET_FILE"))
}

/// Panics unless the failure is short, no stack trace, and says `about`.
#[track_caller]
fn sentence(ran: Ran, about: &[&str]) {
    let call = ran.call.clone();
    let said = ran.fails();
    let lower = said.to_lowercase();
    assert!(!lower.contains("panicked") && !lower.contains("backtrace"), "{call} fell over:\n{said}");
    let lines = said.lines().filter(|l| !l.trim().is_empty()).count();
    assert!(lines <= 8, "{call} says too much:\n{said}");
    assert!(
        about.is_empty() || about.iter().any(|a| lower.contains(&a.to_lowercase())),
        "{call} should speak of {about:?}:\n{said}"
    );
}

#[test]
fn every_command_has_help_and_refuses_a_wrong_flag() {
    assert!(alone(["--version"]).ok().contains("torchfs"));
    let help = alone(["--help"]).ok();
    for command in COMMANDS {
        assert!(help.contains(command), "help must list {command}:\n{help}");
        assert!(!alone([*command, "--help"]).ok().is_empty());
        sentence(alone([*command, "--no-such-flag"]), &["--no-such-flag"]);
    }
    sentence(alone(["no-such-command"]), &["no-such-command"]);
}

#[test]
fn commands_print_json_that_machines_read() {
    let cluster = Cluster::start();
    let mount = cluster.mount();
    fs::write(mount.at("f"), "x").unwrap();
    for command in ["status", "sessions", "df", "fsck", "gc"] {
        let said = cluster.torchfs([command, "--json"]).ok();
        // Progress may come as lines before the result; every line is JSON, or the whole is.
        let whole = serde_json::from_str::<Value>(&said).is_ok();
        let lines = said.lines().all(|l| l.trim().is_empty() || serde_json::from_str::<Value>(l).is_ok());
        assert!(whole || lines, "{command} --json printed:\n{said}");
        assert!(!cluster.torchfs([command]).ok().trim().is_empty(), "{command} prints nothing");
    }
}

#[test]
fn status_and_df_count_what_was_written() {
    let cluster = Cluster::start();
    let mount = cluster.mount();
    let before = cluster.status();
    for n in 0..10 {
        fs::write(mount.at(&format!("f{n}")), Rng::new(n).bytes(1 << 20)).unwrap();
    }
    eventually("status to count ten files", || {
        let now = cluster.status();
        let grown =
            |key: &str| now[key].as_u64().unwrap_or(0) as i64 - before[key].as_u64().unwrap_or(0) as i64;
        if grown("inodes") == 10 && grown("blocks") >= 10 { Ok(()) } else { Err(now.to_string()) }
    });
    // Servers tell what they hold with their next sign of life.
    eventually("df to count what was written", || {
        let (total, free, ..) = sys::space(mount.path()).unwrap();
        if total > free { Ok(()) } else { Err(format!("{free} of {total} bytes are free")) }
    });
    let df = cluster.torchfs(["df"]).ok();
    assert!(df.lines().count() >= 2, "{df}");
    let health = cluster.status()["health"].as_str().map(str::to_owned);
    assert_eq!(health.as_deref(), Some("ok"));
}

#[test]
fn a_dead_data_server_shows_in_status() {
    let mut cluster = Cluster::start();
    cluster.data[1].kill();
    eventually("status to miss the server", || {
        let status = cluster.status();
        let up = torchfs_tests::cluster::living_servers(&status);
        if up == 2 && status["health"].as_str() != Some("ok") { Ok(()) } else { Err(status.to_string()) }
    });
    cluster.restart();
    eventually("status to be well again", || {
        let status = cluster.status();
        if status["health"].as_str() == Some("ok") { Ok(()) } else { Err(status.to_string()) }
    });
}

#[test]
fn an_address_in_use_is_said() {
    let sandbox = Sandbox::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = sandbox.path("d").to_string_lossy().into_owned();
    sentence(alone(["meta", "--dir", &dir, "--listen", &address]), &["in use"]);
    sentence(alone(["up", "--dir", &dir, "--listen", &address, "--servers", "1"]), &["in use"]);
    let cluster = Cluster::start();
    let dir = sandbox.path("e").to_string_lossy().into_owned();
    sentence(cluster.torchfs(["data", "--dir", &dir, "--listen", &address]), &["in use"]);
}

#[test]
fn a_folder_that_cannot_be_used_is_said() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("file");
    fs::write(&file, "").unwrap();
    let port = Port::reserve();
    for role in ["meta", "data"] {
        let mut command = Command::new(binary());
        command.args([role, "--dir", &file.to_string_lossy(), "--listen", &port.address()]);
        sentence(run(command.env("TORCHFS_META", "127.0.0.1:1")), &[&file.to_string_lossy()]);
    }
    // Without rights, as somebody else, with a copy of the binary that he may run.
    let copy = sandbox.path("torchfs");
    fs::copy(binary(), &copy).unwrap();
    let private = sandbox.folder("private");
    sh_ok(&format!("chmod 700 '{}' && chmod 755 '{}'", private.display(), copy.display()));
    let dir = private.join("d").to_string_lossy().into_owned();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=1", "--regid=1", "--clear-groups"]).arg(&copy);
    sentence(
        run(command.args(["meta", "--dir", &dir, "--listen", &port.address()])),
        &["permission", "rights"],
    );
}

fn sh_ok(line: &str) -> String {
    torchfs_tests::sh("/", line)
}

#[test]
fn mount_points_that_cannot_be_used_are_said() {
    let cluster = Cluster::start();
    let sandbox = cluster.sandbox().clone();
    let none = sandbox.path("none").to_string_lossy().into_owned();
    sentence(cluster.torchfs(["mount", &none]), &[&none]);
    let file = sandbox.path("file").to_string_lossy().into_owned();
    fs::write(&file, "").unwrap();
    sentence(cluster.torchfs(["mount", &file]), &[&file]);
    // Taken already.
    let mut mount = cluster.mount();
    let path = mount.path().to_string_lossy().into_owned();
    sentence(cluster.torchfs(["mount", &path]), &["umount", "already"]);
    // In use when it is to be unmounted.
    let open = File::create(mount.at("f")).unwrap();
    sentence(cluster.torchfs(["umount", &path]), &["busy", "in use"]);
    drop(open);
    // Left behind by an agent that died.
    mount.agent.kill();
    sentence(cluster.torchfs(["mount", &path]), &["umount"]);
    cluster.torchfs(["umount", &path]).ok();
    assert!(!sys::mounted(mount.path()), "a stale mount can be taken away");
    mount.start();
    mount.unmount(cluster.client());
    sentence(cluster.torchfs(["umount", &path]), &["not", "nothing"]);
}

/// The kernel waits for the lock of a page to drop it; who reads it holds the lock and waits for the agent, which cannot end.
#[test]
fn umount_frees_an_agent_that_was_killed_and_cannot_end() {
    let cluster = Cluster::start();
    for how in [["umount", "--stale"].as_slice(), &["umount"]] {
        let (mut one, two) = (cluster.mount(), cluster.mount());
        fs::write(two.at("f"), Rng::new(6).bytes(1 << 20)).unwrap();
        cluster.data.iter().for_each(|d| d.signal(libc::SIGSTOP));
        let mut reader =
            Command::new("cat").arg(one.at("f")).stdout(std::process::Stdio::null()).spawn().unwrap();
        eventually("the reader to wait for a page", || {
            let stack = sys::stacks(reader.id() as i32);
            if stack.contains("filemap") { Ok(()) } else { Err(stack) }
        });
        std::thread::scope(|scope| {
            scope.spawn(|| File::options().write(true).open(two.at("f")).unwrap().set_len(10).unwrap());
            eventually("the agent to wait for the page", || {
                let stack = sys::stacks(one.agent.pid());
                if stack.contains("invalidate_inode_pages2") { Ok(()) } else { Err(stack) }
            });
            sys::kill(one.agent.pid(), libc::SIGKILL);
            eventually("the other threads to end", || {
                let stat = fs::read_to_string(format!("/proc/{}/stat", one.agent.pid())).unwrap();
                if stat.contains(") Z ") { Ok(()) } else { Err(stat) }
            });
            let path = one.path().to_string_lossy().into_owned();
            let umount = cluster.torchfs(how.iter().copied().chain([path.as_str()]));
            match how.len() {
                2 => drop(umount.ok()),
                _ => sentence(umount, &["its agent ended before", "log"]),
            }
            eventually("the reader to end", || match reader.try_wait() {
                Ok(Some(_)) => Ok(()),
                _ => Err(sys::stacks(reader.id() as i32)),
            });
            cluster.data.iter().for_each(|d| d.signal(libc::SIGCONT));
        });
        one.kill();
    }
}

#[test]
fn a_forced_umount_frees_those_who_wait_for_an_agent_that_hangs() {
    let cluster = Cluster::start();
    let mut mount = cluster.mount();
    let path = mount.path().to_string_lossy().into_owned();
    mount.agent.signal(libc::SIGSTOP);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| fs::read_dir(mount.at("nothing")).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(!waits.is_finished(), "nobody can have answered");
        cluster.torchfs(["umount", "--force", &path]).ok();
        waits.join().unwrap().unwrap_err();
    });
    assert!(!sys::mounted(mount.path()));
    mount.kill();
}

#[test]
fn a_missing_fuse_device_is_said() {
    let cluster = Cluster::start();
    let path = cluster.sandbox().folder("mnt").to_string_lossy().into_owned();
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind /dev/null /dev/fuse && exec \"$0\" mount --foreground \"$1\"",
    ]);
    command.arg(binary()).arg(&path).env("TORCHFS_META", cluster.address());
    sentence(run(command.env("TORCHFS_SECRET_FILE", cluster.sandbox().path("secret"))), &["/dev/fuse"]);
}

#[test]
fn a_wrong_secret_is_said() {
    let cluster = Cluster::start();
    let wrong = cluster.sandbox().path("wrong-secret");
    fs::write(&wrong, "ffffffffffffffffffffffffffffffff\n").unwrap();
    sys::private(&wrong);
    let client = Client::new(cluster.sandbox(), cluster.address(), &wrong);
    sentence(client.torchfs(["status"]), &["secret"]);
    let path = cluster.sandbox().folder("mnt").to_string_lossy().into_owned();
    sentence(client.torchfs(["mount", &path]), &["secret"]);
    let missing = Client::new(cluster.sandbox(), cluster.address(), &cluster.sandbox().path("no-secret"));
    sentence(missing.torchfs(["status"]), &["no-secret"]);
}

#[test]
fn a_cluster_that_does_not_answer_is_said() {
    let sandbox = Sandbox::new();
    let port = Port::reserve();
    let secret = make_secret(&sandbox);
    let client = Client::new(&sandbox, &port.address(), &secret);
    sentence(client.torchfs(["status"]), &[&port.address()]);
    sentence(client.torchfs(["status", "--meta", "no address"]), &[]);
}

#[test]
fn the_first_address_that_answers_is_used() {
    let cluster = Cluster::start();
    let dead = Port::reserve();
    let both = format!("{},{}", dead.address(), cluster.address());
    cluster.torchfs(["status", "--meta", &both]).ok();
}

#[test]
fn listening_to_the_world_needs_a_secret_or_a_word() {
    let sandbox = Sandbox::new();
    let port = Port::reserve();
    let address = port.address().replace("127.0.0.1", "0.0.0.0");
    let dir = sandbox.path("d").to_string_lossy().into_owned();
    sentence(alone(["meta", "--dir", &dir, "--listen", &address]), &["--insecure"]);
}

#[test]
fn up_stops_cleanly_and_comes_back() {
    let sandbox = Sandbox::new();
    let mut up = Up::start(&sandbox, &Options::default());
    fs::write(up.mount.at("f"), "kept").unwrap();
    for signal in [libc::SIGTERM, libc::SIGINT] {
        up.mount.agent.signal(signal);
        let status = up.mount.agent.wait_end();
        assert!(status.success(), "signal {signal}: {status}\n{}", up.mount.agent.log());
        assert!(!sys::mounted(up.mount.path()), "signal {signal}: still mounted");
        up.mount.start();
        assert_eq!(fs::read_to_string(up.mount.at("f")).unwrap(), "kept");
    }
    assert!(up.client.torchfs(["status"]).ok().contains("SERVER"));
}

#[test]
fn roles_stop_cleanly_one_by_one() {
    let mut cluster = Cluster::start();
    let mut mount = cluster.mount();
    fs::write(mount.at("f"), "kept").unwrap();
    mount.unmount(cluster.client());
    cluster.data.iter_mut().for_each(torchfs_tests::Proc::stop);
    cluster.meta.stop();
    cluster.restart();
    mount.start();
    assert_eq!(fs::read_to_string(mount.at("f")).unwrap(), "kept");
    mount.agent.stop();
    assert!(!sys::mounted(mount.path()), "an agent that is stopped unmounts");
}

#[test]
fn mount_in_the_background_returns_when_the_mount_answers() {
    let cluster = Cluster::start();
    let path = cluster.sandbox().folder("mnt");
    cluster.torchfs(["mount", &path.to_string_lossy()]).ok();
    fs::write(path.join("f"), "at once").unwrap();
    assert_eq!(fs::read_to_string(path.join("f")).unwrap(), "at once");
    // By a link to it, too.
    let link = cluster.sandbox().path("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    // A list that others change while it is read may lack a line.
    eventually("the mount to name its volume", || {
        let shown = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = shown.lines().find(|line| line.contains(&*path.to_string_lossy()));
        if line.is_some_and(|line| line.contains("torchfs:main")) { Ok(()) } else { Err(format!("{line:?}")) }
    });
    assert!(cluster.torchfs(["sessions"]).ok().contains("main"), "so do sessions");
    cluster.torchfs(["umount", &link.to_string_lossy()]).ok();
    assert!(!sys::mounted(&path));
    let sessions: Value = serde_json::from_str(&cluster.torchfs(["sessions", "--json"]).ok()).unwrap();
    assert_eq!(sessions["sessions"].as_array().map(Vec::len), Some(0), "the session has ended: {sessions}");
}

#[test]
fn what_a_cluster_stores_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let cluster = Cluster::start();
    let mount = cluster.mount();
    fs::write(mount.at("f"), Rng::new(1).bytes(1 << 20)).unwrap();
    let mut looked = 0;
    let mut look = vec![cluster.sandbox().path("meta"), cluster.data_dir(0)];
    while let Some(folder) = look.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let mode = entry.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", entry.path().display());
            looked += 1;
            // LMDB gives its own files the usual mode; its folder keeps others out.
            if entry.file_type().unwrap().is_dir() && entry.file_name() != "replica" {
                look.push(entry.path());
            }
        }
    }
    assert!(looked > 5, "{looked} files and folders");
}

#[test]
fn a_mount_that_waits_for_its_service_says_so_and_can_be_ended() {
    let sandbox = Sandbox::new();
    let port = Port::reserve();
    let client = Client::new(&sandbox, &port.address(), &make_secret(&sandbox));
    let path = sandbox.folder("mnt").to_string_lossy().into_owned();
    sentence(client.torchfs(["mount", &path, "--connect-timeout", "1s"]), &[&port.address()]);

    let mut agent = client.process("agent", "mount");
    agent.args(["--foreground", &path, "--connect-timeout", "1h"]).start();
    eventually("it to say that it waits", || {
        if agent.log().contains("waiting for the metadata service") { Ok(()) } else { Err(agent.log()) }
    });
    agent.signal(libc::SIGTERM);
    assert!(!agent.wait_end().success());
    assert!(agent.log().contains("before") && agent.log().contains(&path), "{}", agent.log());

    // In the background: the agent ends with the command that waits for it, and mounts nothing later.
    let mut command = client.process("command", "mount");
    command.args([&path, "--connect-timeout", "1h"]).start();
    eventually("the command to say what it waits for", || {
        if command.log().contains(&port.address()) { Ok(()) } else { Err(command.log()) }
    });
    let parent = format!("--parent\0{}\0", command.pid());
    let agents = || {
        let lines =
            fs::read_dir("/proc").unwrap().filter_map(|e| fs::read(e.ok()?.path().join("cmdline")).ok());
        lines.filter(|line| String::from_utf8_lossy(line).contains(&parent)).count()
    };
    assert_eq!(agents(), 1);
    command.kill();
    eventually("the agent to end", || if agents() == 0 { Ok(()) } else { Err("it lives".into()) });
}

#[test]
fn umount_waits_until_what_was_written_is_on_its_servers() {
    let cluster = Cluster::with(Options { mount_args: vec!["--writeback".into()], ..Options::default() });
    let mut mount = cluster.mount();
    let bytes = Rng::new(1).bytes(4 << 20);
    cluster.data.iter().for_each(|server| server.signal(libc::SIGSTOP));
    fs::write(mount.at("f"), &bytes).unwrap();
    let mut umount = cluster.client().process("umount", "umount");
    umount.args([mount.path()]).start();
    eventually("umount to say what it waits for", || {
        if umount.log().contains("on its servers") { Ok(()) } else { Err(umount.log()) }
    });
    assert!(umount.running() && mount.agent.running());
    cluster.data.iter().for_each(|server| server.signal(libc::SIGCONT));
    let status = umount.wait_end();
    assert!(status.success(), "{status}: {}", umount.log());
    assert!(mount.agent.wait_end().success());
    mount.start();
    assert_eq!(fs::read(mount.at("f")).unwrap(), bytes);
}

#[test]
fn umount_says_when_what_was_written_is_lost() {
    let mount_args = ["--writeback", "--op-timeout", "2s"].map(String::from).to_vec();
    let mut cluster = Cluster::with(Options { mount_args, ..Options::default() });
    let mut mount = cluster.mount();
    let mut file = File::create(mount.at("f")).unwrap();
    file.write_all(b"x").unwrap();
    file.sync_all().unwrap();
    drop(file);
    cluster.data.iter_mut().for_each(torchfs_tests::Proc::kill);
    fs::write(mount.at("f"), Rng::new(1).bytes(4 << 20)).unwrap();
    let path = mount.path().to_string_lossy().into_owned();
    sentence(cluster.torchfs(["umount", &path]), &["could not be written back"]);
    assert!(!mount.agent.wait_end().success(), "the agent says so, too");
    assert!(!sys::mounted(mount.path()));
}

#[test]
fn mount_a_finds_its_own_mounts_and_honours_their_options() {
    let cluster = Cluster::start();
    let path = cluster.sandbox().folder("mnt");
    let table = cluster.sandbox().path("fstab");
    let secret = cluster.sandbox().path("secret");
    let line = format!(
        "{} {} torchfs noexec,nosuid,nodev,ro,secret_file={} 0 0\n",
        cluster.address(),
        path.display(),
        secret.display()
    );
    fs::write(&table, line).unwrap();
    // mount(8) looks for its helpers in one folder only; nobody else sees what is put over it here.
    let script = r#"
        set -e
        mount -t tmpfs none /sbin
        ln -s "$0" /sbin/mount.torchfs
        ln -s "$0" /sbin/mount.fuse.torchfs
        mount -a -f -T "$1" && ! mountpoint -q "$2"
        mount -a -T "$1"
        mount -a -T "$1"
        grep " $2 " /proc/self/mountinfo
        mount -o remount,rw "$2" && exit 3
        "$0" umount "$2""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).arg(binary()).arg(&table).arg(&path);
    command.env("TORCHFS_RUNTIME_DIR", cluster.sandbox().path("run")).env_remove("TORCHFS_META");
    let ran = run(&mut command);
    assert!(ran.err.contains("cannot be remounted"), "{}\n{}", ran.out, ran.err);
    let shown = ran.ok();
    assert_eq!(shown.lines().count(), 1, "mounted once: {shown}");
    for word in ["ro,", "noexec", "nosuid", "nodev", cluster.address()] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
}

#[test]
fn servers_that_listen_everywhere_tell_an_address_that_others_can_use() {
    let cluster = Cluster::start();
    let mut data = cluster.client().process("data-everywhere", "data");
    let dir = cluster.sandbox().path("everywhere");
    data.args(["--dir".into(), dir.clone().into_os_string()]).args(["--listen", "0.0.0.0:0"]).start();
    eventually("the fourth server", || {
        let servers = cluster.status()["servers"].as_array().cloned().unwrap_or_default();
        let usable = servers.iter().all(|s| s["addr"].as_str().is_some_and(|a| a.starts_with("127.0.0.1:")));
        if servers.len() == 4 && usable { Ok(()) } else { Err(format!("{servers:?}\n{}", data.log())) }
    });
    let dir = cluster.sandbox().path("d").to_string_lossy().into_owned();
    let everywhere = ["--dir", &dir, "--listen", "0.0.0.0:0", "--insecure"];
    let database = ["--engine", "postgres://nobody@127.0.0.1:1/none"];
    sentence(alone(["meta"].into_iter().chain(everywhere).chain(database)), &["--advertise"]);
    sentence(alone(["up"].into_iter().chain(everywhere)), &["--advertise"]);
}

#[test]
fn a_new_data_server_waits_for_its_metadata_service() {
    let sandbox = Sandbox::new();
    let port = Port::reserve();
    let client = Client::new(&sandbox, &port.address(), &make_secret(&sandbox));
    let mut data = client.process("data", "data");
    data.args(["--dir".into(), sandbox.path("d").into_os_string()]).start();
    eventually("it to say that it waits", || {
        if data.log().contains("waiting for the metadata service") { Ok(()) } else { Err(data.log()) }
    });
    data.signal(libc::SIGTERM);
    let status = data.wait_end();
    assert!(status.success(), "{status}: {}", data.log());
}

#[test]
fn servers_of_the_wrong_kind_or_cluster_are_said() {
    let cluster = Cluster::start();
    let mut other = Cluster::start();
    let data = cluster.data_addresses().remove(0);
    sentence(cluster.torchfs(["status", "--meta", &data]), &["address of a data server"]);
    let meta = ["meta", "recover", "--list", "--data", cluster.address()];
    sentence(cluster.torchfs(meta), &["address of a metadata service"]);
    other.data[0].stop();
    let dir = other.data_dir(0).to_string_lossy().into_owned();
    sentence(cluster.torchfs(["data", "--dir", &dir]), &["another cluster"]);
}

#[test]
fn nothing_is_not_taken_for_a_size_or_a_time() {
    for flag in [["--op-timeout", "0"], ["--cache-size", "1"], ["--connect-timeout", "0s"]] {
        sentence(alone(["mount", "/mnt"].into_iter().chain(flag)), &[flag[0]]);
    }
    sentence(alone(["data", "--dir", "/none", "--capacity", "0"]), &["--capacity"]);
    let cluster = Cluster::start();
    sentence(cluster.torchfs(["servers", "--no-wait"]), &["--wait"]);
}

#[test]
fn the_mount_helper_takes_what_fstab_gives() {
    let cluster = Cluster::start();
    let path = cluster.sandbox().folder("mnt");
    // `mount -t torchfs SPEC DIR` runs `mount.torchfs SPEC DIR -o OPTIONS`.
    let helper = cluster.sandbox().path("mount.torchfs");
    std::os::unix::fs::symlink(binary(), &helper).unwrap();
    let secret = cluster.sandbox().path("secret");
    let options = format!("rw,noatime,secret_file={}", secret.display());
    let mut mount = Command::new(&helper);
    mount.arg(cluster.address()).arg(&path).args(["-o", &options]);
    run(mount.env("TORCHFS_RUNTIME_DIR", cluster.sandbox().path("run"))).ok();
    fs::write(path.join("f"), "from fstab").unwrap();
    cluster.torchfs(["umount", &path.to_string_lossy()]).ok();
}

#[test]
fn every_role_serves_metrics_and_health() {
    let sandbox = Sandbox::new();
    let ports: Vec<Port> = (0..3).map(|_| Port::reserve()).collect();
    let flag = |n: usize| vec!["--metrics".to_owned(), ports[n].address()];
    let options = Options {
        servers: 1,
        meta_args: flag(0),
        data_args: flag(1),
        mount_args: flag(2),
        ..Options::default()
    };
    let cluster = Cluster::inside(&sandbox, options);
    let mount = cluster.mount();
    fs::write(mount.at("f"), "x").unwrap();
    for port in &ports {
        let health = get(&port.address(), "/healthz");
        assert!(health.starts_with("HTTP/1.1 200"), "{health}");
        let metrics = get(&port.address(), "/metrics");
        assert!(metrics.contains("# TYPE torchfs_"), "no metrics of ours:\n{metrics}");
        for series in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
            assert!(metrics.contains(&format!("# HELP {series} ")), "{series} is not explained");
        }
        assert!(get(&port.address(), "/none").starts_with("HTTP/1.1 404"));
    }
    // What somebody would have an alarm on.
    let figure = |port: &Port, wanted: &str, least: f64, most: f64| {
        eventually(wanted, || {
            let metrics = get(&port.address(), "/metrics");
            let line = metrics.lines().find(|line| line.starts_with(wanted)).unwrap_or("nothing");
            let value = line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
            let fits = value.is_some_and(|value| (least..=most).contains(&value));
            if fits { Ok(()) } else { Err(format!("not {least} to {most}: {line}")) }
        });
    };
    for (series, least, most) in [
        ("torchfs_meta_servers{state=\"up\"}", 1.0, 1.0),
        ("torchfs_meta_servers{state=\"down\"}", 0.0, 0.0),
        ("torchfs_meta_servers_full", 0.0, 1.0),
        ("torchfs_meta_data_free_bytes", 0.0, f64::MAX),
        ("torchfs_meta_groups_to_repair", 0.0, f64::MAX),
        ("torchfs_meta_groups_at_risk", 0.0, f64::MAX),
        ("torchfs_meta_pieces_to_repair", 0.0, 0.0),
        ("torchfs_meta_blocks_lost", 0.0, 0.0),
        ("torchfs_meta_disks_failed", 0.0, 0.0),
        ("torchfs_meta_sessions", 1.0, 1.0),
        ("torchfs_meta_replica_lag_batches", 0.0, f64::MAX),
        ("torchfs_meta_leads", 1.0, 1.0),
    ] {
        figure(&ports[0], series, least, most);
    }
    figure(&ports[1], "torchfs_block_disk_total_bytes{", 1.0, f64::MAX);
    figure(&ports[1], "torchfs_block_disk_failed{", 0.0, 0.0);
}

/// One HTTP request by hand.
fn get(address: &str, path: &str) -> String {
    eventually("an answer over HTTP", || {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(std::time::Duration::from_secs(20)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().map_err(|e| e.to_string())
    })
}

#[test]
fn systemd_units_are_printed_for_each_role() {
    for role in ["up", "meta", "data", "mount"] {
        let unit = alone(["systemd", role]).ok();
        assert!(unit.contains("[Service]") && unit.contains("ExecStart=") && unit.contains(role), "{unit}");
    }
    sentence(alone(["systemd", "no-such-role"]), &["no-such-role"]);
}

#[test]
fn garbage_on_the_ports_is_survived() {
    let cluster = Cluster::start();
    let mount = cluster.mount();
    let mut rng = Rng::new(70);
    let mut addresses = cluster.data_addresses();
    addresses.push(cluster.address().to_owned());
    for address in &addresses {
        for len in [0, 1, 7, 64, 4096, 100_000] {
            let mut stream = TcpStream::connect(address).unwrap();
            // The other side may hang up in the middle.
            stream.write_all(&rng.bytes(len)).ok();
        }
        let mut http = TcpStream::connect(address).unwrap();
        http.write_all(b"GET / HTTP/1.1\r\n\r\n").ok();
    }
    // One that connects and says nothing keeps nobody else out.
    let _silent: Vec<TcpStream> = addresses.iter().map(|a| TcpStream::connect(a).unwrap()).collect();
    fs::write(mount.at("f"), "served").unwrap();
    let fresh = cluster.mount();
    assert_eq!(fs::read_to_string(fresh.at("f")).unwrap(), "served");
    cluster.fsck();
}

#[test]
fn an_agent_leaves_no_descriptors_behind() {
    let cluster = Cluster::start();
    let mount: Mount = cluster.mount();
    let work = |round: u64| {
        for n in 0..200 {
            let path = mount.at(&format!("f{}", n % 20));
            fs::write(&path, Rng::new(round).bytes(1000)).unwrap();
            fs::read(&path).unwrap();
        }
    };
    work(0);
    let before = sys::open_files(mount.agent.pid());
    (1..6).for_each(work);
    eventually("descriptors to be given back", || {
        let now = sys::open_files(mount.agent.pid());
        if now <= before + 20 { Ok(()) } else { Err(format!("{before} → {now}")) }
    });
}

#[test]
fn make_run_shows_a_mount_and_ends_by_itself() {
    let top: PathBuf = PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned();
    let built = top.join("target/release/torchfs");
    if !built.exists() || built.canonicalize().unwrap() != binary().canonicalize().unwrap_or_default() {
        println!("the binary under test is not the one that make run starts; nothing was tested");
        return;
    }
    let _sandbox: Arc<Sandbox> = Sandbox::new();
    let said = run(Command::new(top.join("scripts/run")).current_dir(&top)).ok();
    assert!(said.contains("hello from TorchFS"), "{said}");
    assert!(said.contains("What to try next"), "{said}");
}
