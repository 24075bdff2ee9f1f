//! A network of its own for one cluster: every machine is a network namespace with one address, all on one switch.
//!
//! The idea: the switch is a bridge in a namespace too, so nothing of a test's network is in the machine's own one,
//! every test may use the same addresses, and no frame ever leaves. A machine's cable is a pair of virtual interfaces: `eth0` at
//! the machine, a port at the switch. Pulling it, or letting only so many bits through, is done at the cable.
//!
//! # Invariants
//! Namespaces are named after the test's process, and [`sweep`] takes away those of a process that is gone.
//!
//! # Not here
//! What runs on the machines; see `cluster`. Processes enter a namespace by `nsenter`, which leaves the mount table alone:
//! a mount made on one of these machines is visible to the test.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::shell::run;

const PREFIX: &str = "tfs-test.";
/// Where `ip netns` keeps the names of namespaces.
const NAMES: &str = "/run/netns";

/// A switch, to which machines are added. Taken away when the last machine is dropped.
#[derive(Debug)]
pub struct Net {
    name: String,
    machines: AtomicU32,
}

/// One machine.
#[derive(Debug)]
pub struct Host {
    net: Arc<Net>,
    number: u32,
    namespace: String,
}

impl Net {
    /// A switch without machines.
    pub fn new() -> Arc<Net> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{PREFIX}{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let net = Net { name, machines: AtomicU32::new(0) };
        let switch = net.switch();
        ip(&[
            &format!("netns add {switch}"),
            &format!("-n {switch} link add sw type bridge forward_delay 0"),
            &format!("-n {switch} link set sw up"),
        ]);
        Arc::new(net)
    }

    /// One more machine on it.
    pub fn host(self: &Arc<Net>, name: &str) -> Host {
        let number = self.machines.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(number < 250, "a test's network has room for 250 machines");
        let host = Host { net: self.clone(), number, namespace: format!("{}.{name}", self.name) };
        let (machine, switch, port) = (&host.namespace, self.switch(), host.port());
        ip(&[
            &format!("netns add {machine}"),
            &format!("link add eth0 netns {machine} type veth peer name {port} netns {switch}"),
            &format!("-n {switch} link set {port} master sw"),
            &format!("-n {switch} link set {port} up"),
            &format!("-n {machine} link set lo up"),
            &format!("-n {machine} addr add {}/24 dev eth0", host.address()),
            &format!("-n {machine} link set eth0 up"),
        ]);
        host
    }

    fn switch(&self) -> String {
        format!("{}.switch", self.name)
    }
}

impl Host {
    /// Its address.
    pub fn address(&self) -> String {
        format!("10.77.0.{}", self.number)
    }

    /// Its address with a port.
    pub fn at(&self, port: u16) -> String {
        format!("{}:{port}", self.address())
    }

    /// The name of its namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Pulls the cable out: nothing comes, nothing goes, nobody is told.
    pub fn cut(&self) {
        ip(&[&format!("-n {} link set {} down", self.net.switch(), self.port())]);
    }

    /// Puts the cable back.
    pub fn rejoin(&self) {
        ip(&[&format!("-n {} link set {} up", self.net.switch(), self.port())]);
    }

    /// Lets this much through the cable, each way.
    pub fn limit(&self, bytes_per_s: u64) {
        // A bucket of 5 ms at this rate, and a queue of a fifth of a second as a cheap switch has.
        let bucket = (bytes_per_s / 200).max(4 << 10);
        let rule = format!("root tbf rate {}bit burst {bucket} latency 200ms", bytes_per_s * 8);
        tc(&self.namespace, &format!("qdisc replace dev eth0 {rule}"));
        tc(&self.net.switch(), &format!("qdisc replace dev {} {rule}", self.port()));
    }

    /// Lets everything through again.
    pub fn unlimit(&self) {
        tc(&self.namespace, "qdisc del dev eth0 root");
        tc(&self.net.switch(), &format!("qdisc del dev {} root", self.port()));
    }

    fn port(&self) -> String {
        format!("p{}", self.number)
    }
}

/// The command that runs `program` in a namespace; its arguments follow.
pub fn enter(namespace: &str, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={NAMES}/{namespace}")).arg(program);
    command
}

impl Drop for Host {
    fn drop(&mut self) {
        remove(&self.namespace);
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        remove(&self.switch());
    }
}

/// Takes away the networks of test processes that are gone.
pub fn sweep() {
    for entry in std::fs::read_dir(NAMES).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('.').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&name);
        }
    }
}

fn remove(namespace: &str) {
    run(Command::new("ip").args(["netns", "del", namespace]));
}

fn ip(lines: &[&str]) {
    for line in lines {
        run(Command::new("ip").args(line.split(' '))).ok();
    }
}

fn tc(namespace: &str, line: &str) {
    run(enter(namespace, Path::new("tc")).args(line.split(' '))).ok();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::run_for;
    use std::time::Duration;

    /// Whether one machine can open a connection to another.
    fn reaches(from: &Host, to: &Host) -> bool {
        let line = format!("exec 3<>/dev/tcp/{}/9", to.address());
        let mut command = enter(from.namespace(), Path::new("timeout"));
        let ran = run_for(Duration::from_secs(30), command.args(["2", "bash", "-c", &line]));
        // Refused is an answer too: the machine is there, nobody listens.
        ran.err.contains("refused")
    }

    #[test]
    fn machines_reach_each_other_until_the_cable_is_pulled() {
        crate::nursery::open();
        if run(Command::new("id").arg("-u")).out.trim() != "0" {
            return; // only root makes namespaces; the real-process tests run as root
        }
        let net = Net::new();
        let (a, b) = (net.host("a"), net.host("b"));
        assert!(reaches(&a, &b) && reaches(&b, &a));
        b.cut();
        assert!(!reaches(&a, &b), "the cable is out and still works");
        b.rejoin();
        assert!(reaches(&a, &b));
        b.limit(1 << 20);
        assert!(reaches(&a, &b));
        b.unlimit();
        assert!(reaches(&a, &b));
    }
}
