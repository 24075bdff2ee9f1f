#!/usr/bin/env python3
"""Measures how bandwidth grows with data servers, each of which has a cable of its own that lets 40 MB/s through.

    bench/scale.py                       # replicas:1 and ec:4+2; 1, 2, 4, 8 servers; lookups beside readers: nine minutes
    bench/scale.py --quick               # less data, one round
    bench/scale.py --json --save         # for machines; --save also writes bench/results/scale-DATE-COMMIT.json

Every process is in a network namespace of its own, on a bridge in another one; `tc tbf` limits the cable of each data server,
both ways, so that the servers' bandwidth is the limit and not this machine's CPU. How busy the CPU was stands beside each
figure: where it was near 100 %, the CPU was the limit after all. Reads are cold on both sides: agents are started anew and the
kernel's caches dropped. The bound is what the cables let through: n x 40 MB/s, for writes of ec:4+2 four sixths of it. Headers count:
of 1,514 bytes on the cable TCP brings 1,448 (0.956), so a second column compares with what a bare TCP stream got through one
such cable in the same run. "most" is what the busiest cable carried, as a multiple of the mean: no run can be faster than its inverse.

Needs root. A benchmark never fails a build.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent
HERTZ = os.sysconf("SC_CLK_TCK")
LIMIT = 40_000_000  # bytes per second of each data server's cable
PIECE = 1 << 20
STREAMS = 8
METRICS = "127.0.0.1:9400"  # of each process, in its own namespace
# Bytes that do not compress, made before anything is measured.
DATA = [os.urandom(PIECE) for _ in range(4)]


def main():
    arguments = parse()
    if os.geteuid() != 0:
        sys.exit("bench/scale.py makes network namespaces and mounts; run it as root")
    lines, started = [], time.monotonic()
    tcp = bare_tcp(arguments) if arguments.plan else None
    for round_ in range(arguments.rounds):
        for scheme, counts in arguments.plan:
            for servers in counts:
                say(f"{scheme}, {servers} servers, round {round_ + 1}")
                lines += measure(arguments, scheme, servers)
    waits = lookups(arguments) if arguments.lookups else None
    report = {"conditions": conditions(arguments, time.monotonic() - started), "bare_tcp_mb_s": tcp and tcp / 1e6,
              "lines": summary(lines, tcp), "lookups": waits}
    if arguments.save:
        save(report)
    print(json.dumps(report, indent=1)) if arguments.json else show(report)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchfs", default=str(TOP / "target/release/torchfs"), help="the binary to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="how long each point takes at its bound")
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--only", choices=["replicas:1", "ec:4+2", "lookups"], help="only these")
    parser.add_argument("--servers", type=int, nargs="+", help="only these numbers of servers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under bench/results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 2
    plan = {"replicas:1": [1, 2, 4, 8], "ec:4+2": [6, 8]}
    arguments.plan = [(scheme, arguments.servers or counts) for scheme, counts in plan.items() if arguments.only in (None, scheme)]
    arguments.lookups = arguments.only in (None, "lookups")
    return arguments


class Cluster:
    """A metadata service, data servers and two clients, each in a namespace of its own."""

    def __init__(self, arguments, scheme, servers):
        self.arguments, self.servers = arguments, servers
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="tfs-scale."))
        self.name = f"tfs-scale.{os.getpid()}"
        self.processes, self.hosts, self.mounts = {}, [], []
        secret = self.home / "secret"
        secret.write_text("0123456789abcdef0123456789abcdef\n")
        secret.chmod(0o600)
        self.env = dict(os.environ, TORCHFS_META="10.77.0.1:7070", TORCHFS_SECRET_FILE=str(secret),
                        TORCHFS_RUNTIME_DIR=str(self.home / "run"), TORCHFS_CONFIG=str(self.home / "none.toml"))
        try:
            ip(f"netns add {self.name}.switch")
            ip(f"-n {self.name}.switch link add sw type bridge forward_delay 0")
            ip(f"-n {self.name}.switch link set sw up")
            self.host("meta")
            self.start("meta", "meta", "meta", "--dir", self.home / "meta", "--listen", "10.77.0.1:7070",
                       "--redundancy", scheme, "--metrics", METRICS)
            for n in range(servers):
                address = self.host(f"data-{n}")
                self.limit(f"data-{n}")
                self.start(f"data-{n}", f"data-{n}", "data", "--dir", self.home / f"data-{n}", "--listen", f"{address}:7070")
            for n in range(2):
                self.host(f"client-{n}")
                self.mounts.append(self.home / f"mnt-{n}")
                self.mounts[n].mkdir()
            self.wait_servers()
            self.mount_all()
        except BaseException:
            self.close()
            raise

    def host(self, name):
        self.hosts.append(name)
        number, space, switch = len(self.hosts), f"{self.name}.{name}", f"{self.name}.switch"
        ip(f"netns add {space}")
        ip(f"link add eth0 netns {space} type veth peer name p{number} netns {switch}")
        ip(f"-n {switch} link set p{number} master sw")
        ip(f"-n {switch} link set p{number} up")
        ip(f"-n {space} link set lo up")
        ip(f"-n {space} addr add 10.77.0.{number}/24 dev eth0")
        ip(f"-n {space} link set eth0 up")
        return f"10.77.0.{number}"

    def limit(self, name):
        """40 MB/s each way; the bucket is 5 ms of it."""
        rule = f"root tbf rate {LIMIT * 8}bit burst {LIMIT // 200} latency 200ms"
        number = self.hosts.index(name) + 1
        run("nsenter", f"--net=/run/netns/{self.name}.{name}", "tc", "qdisc", "replace", "dev", "eth0", *rule.split())
        run("nsenter", f"--net=/run/netns/{self.name}.switch", "tc", "qdisc", "replace", "dev", f"p{number}", *rule.split())

    def start(self, key, host, *words):
        with open(self.home / f"{key}.log", "ab") as log:
            command = ["nsenter", f"--net=/run/netns/{self.name}.{host}", self.arguments.torchfs, *map(str, words)]
            self.processes[key] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def ask(self, *words):
        command = ["nsenter", f"--net=/run/netns/{self.name}.client-0", self.arguments.torchfs, *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def wait_servers(self):
        def there():
            ran = self.ask("status", "--json")
            return ran.returncode == 0 and sum(s["up"] for s in json.loads(ran.stdout)["servers"]) == self.servers
        self.wait("the data servers", there)

        def even():
            """Groups are spread over the servers that joined one after the other."""
            ran = self.ask("servers", "--json")
            groups = [s["groups"] for s in json.loads(ran.stdout)["servers"]] if ran.returncode == 0 else []
            return len(groups) == self.servers and max(groups) - min(groups) <= 2
        self.wait("an even placement", even)

    def carried(self, what):
        """Bytes that each data server's cable has carried, towards the server for writes."""
        ran = subprocess.run(["ip", "-n", f"{self.name}.switch", "-j", "-s", "link"], capture_output=True, text=True, check=True)
        side = "tx" if what == "write" else "rx"
        counts = {link["ifname"]: link["stats64"][side]["bytes"] for link in json.loads(ran.stdout)}
        return [counts[f"p{n + 1}"] for n, host in enumerate(self.hosts) if host.startswith("data")]

    def cpu(self):
        """CPU seconds of all our processes so far."""
        total = 0
        for process in self.processes.values():
            fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(int(n) for n in fields[11:13])
        return total / HERTZ

    def waits(self, host):
        """The histograms of the waits on connections: bytes of Prometheus text to {name: {bound: how many up to it}}."""
        code = f"import urllib.request as u; print(u.urlopen('http://{METRICS}/metrics').read().decode())"
        command = ["nsenter", f"--net=/run/netns/{self.name}.{host}", sys.executable, "-c", code]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {}
        for line in text.splitlines():
            if line.startswith("torchfs_rpc_") and "_seconds_bucket{" in line and 'to="data"' not in line:
                name, rest = line.removeprefix("torchfs_rpc_").split("_seconds_bucket{", 1)
                bound = rest.split('le="', 1)[1].split('"', 1)[0]
                found.setdefault(name, {})[float(bound)] = float(line.rsplit(" ", 1)[1])
        return found

    def mount_all(self):
        for n, path in enumerate(self.mounts):
            self.start(f"mount-{n}", f"client-{n}", "mount", "--foreground", "--metrics", METRICS, path)
        self.wait("the mounts", lambda: all(mounted(path) for path in self.mounts))

    def wait(self, what, ask):
        deadline = time.monotonic() + 60
        while not ask():
            if time.monotonic() > deadline:
                logs = "".join(log.read_text()[-1000:] for log in self.home.glob("*.log"))
                sys.exit(f"{what} did not come:\n{logs}")
            time.sleep(0.1)

    def cold(self):
        """New agents, and nothing in the kernel's caches."""
        for n, path in enumerate(self.mounts):
            end(self.processes.pop(f"mount-{n}"))
            if mounted(path):
                subprocess.run(["umount", "-l", path], check=False)
        subprocess.run(["sync"], check=True)
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")
        self.mount_all()

    def close(self):
        for process in reversed(list(self.processes.values())):
            process.kill()
            process.wait()
        for path in self.mounts:
            if mounted(path):
                subprocess.run(["umount", "-l", path], check=False)
        for space in [*self.hosts, "switch"]:
            subprocess.run(["ip", "netns", "del", f"{self.name}.{space}"], check=False, capture_output=True)
        shutil.rmtree(self.home, ignore_errors=True)


def measure(arguments, scheme, servers):
    """Writes, reads cold, and with erasure coding reads with two servers gone; one dict per figure."""
    coded = scheme.startswith("ec")
    bound = {"read": servers * LIMIT, "write": servers * LIMIT * (4 / 6 if coded else 1)}
    each = int(bound["write"] * arguments.seconds / STREAMS / PIECE) * PIECE
    cluster = Cluster(arguments, scheme, servers)
    try:
        lines = [line(scheme, servers, "write", bound["write"], stream(cluster, "write", each))]
        cluster.cold()
        lines.append(line(scheme, servers, "read", bound["read"], stream(cluster, "read", each)))
        if coded:
            for n in range(2):
                cluster.processes.pop(f"data-{n}").kill()
            cluster.cold()
            lines.append(line(scheme, servers, "read, 2 servers gone", (servers - 2) * LIMIT, stream(cluster, "read", each)))
        return lines
    finally:
        cluster.close()


def line(scheme, servers, what, bound, measured):
    return {"scheme": scheme, "servers": servers, "what": what, "bound": bound, **measured}


def stream(cluster, what, each):
    """Eight files at once over two clients: bytes per second, share of the CPU that was busy, CPU seconds of our processes per GB, and how
    much more the busiest cable carried than the mean."""
    before = cluster.carried(what)
    began, busy, own = time.monotonic(), busy_seconds(), cluster.cpu()
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        work = write_file if what == "write" else read_file
        # Read by the other client than the one that wrote it: nothing of it can be there.
        shift = 0 if what == "write" else 1
        jobs = [pool.submit(work, cluster.mounts[(n + shift) % 2] / f"f{n}", each, n) for n in range(STREAMS)]
        total = sum(job.result() for job in jobs)
    seconds, cpu, own = time.monotonic() - began, busy_seconds() - busy, cluster.cpu() - own
    carried = [b - a for a, b in zip(before, cluster.carried(what))]
    carried = [bytes_ for bytes_ in carried if bytes_ > 0.1 * max(carried)]  # servers that are gone carry nothing
    return {"rate": total / seconds, "cpu": cpu / seconds / os.cpu_count(), "cpu_s_per_gb": own / (total / 1e9),
            "most": max(carried) / statistics.mean(carried)}


def write_file(path, each, salt):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for n in range(each // PIECE):
        os.write(fd, DATA[(n + salt) % 4])
    os.fsync(fd)
    os.close(fd)
    return each


def read_file(path, each, _salt):
    fd, done = os.open(path, os.O_RDONLY), 0
    while got := os.read(fd, PIECE):
        done += len(got)
    os.close(fd)
    if done != each:
        sys.exit(f"{path} has {done} bytes instead of {each}")
    return done


def bare_tcp(arguments):
    """Bytes per second of one TCP stream through one cable, without us."""
    cluster = Cluster(arguments, "replicas:1", 1)
    try:
        send = ("import socket, time; s = socket.create_server(('', 9000)); c, _ = s.accept(); b = bytes(1 << 20); "
                "end = time.monotonic() + 3\nwhile time.monotonic() < end: c.sendall(b)")
        take = ("import socket, time; c = socket.create_connection(('10.77.0.2', 9000)); b = bytearray(1 << 20)\n"
                "end = time.monotonic() + 0.5\nwhile time.monotonic() < end: c.recv_into(b)\n"
                "began, got = time.monotonic(), 0\nwhile n := c.recv_into(b): got += n\nprint(got / (time.monotonic() - began))")
        inside = lambda host, code: ["nsenter", f"--net=/run/netns/{cluster.name}.{host}", sys.executable, "-c", code]
        sender = subprocess.Popen(inside("data-0", send))
        time.sleep(0.5)
        got = subprocess.run(inside("client-0", take), capture_output=True, text=True, check=True).stdout
        sender.wait()
        return float(got)
    finally:
        cluster.close()


def lookups(arguments):
    """How long a stat takes and where it waits, with and without eight readers that stream; interleaved."""
    say("lookups with and without eight streaming readers")
    cluster = Cluster(arguments, "replicas:1", 2)
    rounds, seconds, pause = max(5, arguments.rounds), 3, 1.5
    try:
        each = int(2 * LIMIT * (seconds + 2 * pause) / STREAMS / PIECE) * PIECE
        stream(cluster, "write", each)
        alone, beside, reading = [], [], []
        for round_ in range(rounds):
            cluster.cold()
            alone.append(stat_waits(cluster, seconds, f"a{round_}"))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                readers = pool.submit(stream, cluster, "read", each)
                time.sleep(pause)
                beside.append(stat_waits(cluster, seconds, f"b{round_}"))
                if readers.done():
                    say("the readers ended before the lookups did: this round says little")
                reading.append(readers.result())
        names = {"start": "in the service, from arrival to execution", "answer": "in the service, from arrival to the answer sent",
                 "send": "at the client, from the call to the socket", "whole": "whole stat, as the program sees it"}
        waits = []
        for name, what in names.items():
            a, b = [w[name] for w in alone], [w[name] for w in beside]
            ratios = [y / x for x, y in zip(a, b)]
            waits.append({"what": what, "alone_us": statistics.median(a), "beside_us": statistics.median(b),
                          "ratio": statistics.median(ratios), "ratios": ratios, "alone_all_us": a, "beside_all_us": b})
        return {"waits": waits, "readers_mb_s": statistics.median(r["rate"] for r in reading) / 1e6,
                "cpu": statistics.median(r["cpu"] for r in reading)}
    finally:
        cluster.close()


def stat_waits(cluster, seconds, tag):
    """Stats names that do not exist, each once, so that no cache can answer: medians in microseconds."""
    before = {**cluster.waits("meta"), "send": cluster.waits("client-0").get("send", {})}
    whole, end, n = [], time.monotonic() + seconds, 0
    while time.monotonic() < end:
        path, began = cluster.mounts[0] / f"no-{tag}-{n}", time.perf_counter()
        if path.exists():
            sys.exit(f"{path} exists")
        whole.append((time.perf_counter() - began) * 1e6)
        n += 1
    after = {**cluster.waits("meta"), "send": cluster.waits("client-0")["send"]}
    found = {name: middle(before.get(name, {}), after[name]) for name in ("start", "answer", "send")}
    return {**found, "whole": statistics.median(whole)}


def middle(before, after):
    """The median of what a histogram counted in between, in microseconds, straight within a class."""
    counts = [(bound, count - before.get(bound, 0)) for bound, count in sorted(after.items())]
    half, last, low = counts[-1][1] / 2, 0, 0
    for bound, count in counts:
        if count >= half and count > last:
            return (low + (bound - low) * (half - last) / (count - last)) * 1e6
        last, low = count, bound
    return 0


def summary(lines, tcp):
    keys = list(dict.fromkeys((l["scheme"], l["servers"], l["what"]) for l in lines))
    out = []
    for scheme, servers, what in keys:
        same = [l for l in lines if (l["scheme"], l["servers"], l["what"]) == (scheme, servers, what)]
        rates = sorted(l["rate"] for l in same)
        rate, bound = statistics.median(rates), same[0]["bound"]
        most = statistics.median(l["most"] for l in same)
        out.append({"scheme": scheme, "servers": servers, "what": what, "mb_s": rate / 1e6, "low": rates[0] / 1e6,
                    "high": rates[-1] / 1e6, "bound_mb_s": bound / 1e6, "of_bound": rate / bound, "of_tcp": rate / (bound * tcp / LIMIT), "most": most,
                    "cpu_busy": statistics.median(l["cpu"] for l in same),
                    "cpu_s_per_gb": statistics.median(l["cpu_s_per_gb"] for l in same)})
    for entry in out:
        if entry["what"].startswith("read,"):
            healthy = next(e for e in out if (e["scheme"], e["servers"], e["what"]) == (entry["scheme"], entry["servers"], "read"))
            entry["of_healthy"] = entry["mb_s"] / healthy["mb_s"]
    return out


def show(report):
    for key, value in report["conditions"].items():
        print(f"{key}: {value}")
    if report["lines"]:
        print(f"a bare TCP stream through one such cable: {report['bare_tcp_mb_s']:.1f} MB/s")
        print(f"\n{'scheme':12}{'servers':>8}  {'what':22}{'MB/s':>8}{'spread':>14}{'bound':>8}{'of it':>7}{'of TCP':>8}{'most':>7}"
              f"{'CPU':>7}{'CPU s/GB':>10}")
    for e in report["lines"]:
        spread = f"{e['low']:.0f}-{e['high']:.0f}"
        more = f"   {e['of_healthy']:.2f} of healthy" if "of_healthy" in e else ""
        print(f"{e['scheme']:12}{e['servers']:>8}  {e['what']:22}{e['mb_s']:>8.0f}{spread:>14}{e['bound_mb_s']:>8.0f}"
              f"{e['of_bound']:>7.2f}{e['of_tcp']:>8.2f}{e['most']:>7.2f}{e['cpu_busy']:>7.0%}{e['cpu_s_per_gb']:>10.2f}{more}")
    if waits := report["lookups"]:
        print(f"\nstat of a name that no cache knows, one at a time through the mount of a client that streams, beside eight readers of "
              f"{waits['readers_mb_s']:.0f} MB/s (CPU {waits['cpu']:.0%} busy); medians, us")
        print(f"{'':52}{'alone':>8}{'beside':>8}{'ratio':>7}{'ratios':>14}")
        for e in waits["waits"]:
            print(f"{e['what']:52}{e['alone_us']:>8.1f}{e['beside_us']:>8.1f}{e['ratio']:>7.2f}"
                  f"{min(e['ratios']):>9.2f}-{max(e['ratios']):.2f}")


def conditions(arguments, seconds):
    def said(*command):
        return subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": said("git", "describe", "--always", "--dirty", "--abbrev=10"),
        "version": said(arguments.torchfs, "--version"), "kernel": platform.release(), "cores": os.cpu_count(),
        "cable": f"tc tbf, {LIMIT // 1_000_000} MB/s each way at each data server", "clients": "2 agents, 4 streams each, 1 MiB calls",
        "data": "random bytes, not compressible", "cache": "agents anew, kernel's caches dropped before reads",
        "cpu": "busy: all CPUs of the machine, everything on it; s/GB: our processes", "rounds": arguments.rounds, "took_s": round(seconds),
    }


def save(report):
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    c = report["conditions"]
    path = folder / f"scale-{c['when'][:10]}-{c['commit']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    say(f"kept as {path.relative_to(TOP)}")


def busy_seconds():
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _wait, irq, soft, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + soft) / HERTZ


def end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def mounted(path):
    """Reads the table, so that a mount that hangs does not take this program with it."""
    with open("/proc/self/mounts") as table:
        return any(line.split()[1] == str(path) for line in table)


def ip(words):
    run("ip", *words.split())


def run(*words):
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"{' '.join(words)}: {ran.stderr.strip()}")


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
