#!/usr/bin/env python3
"""Measures TorchFS beside the local disk, and beside any other mount, in one interleaved run.

    bench/run.py                        # starts a cluster on this disk, measures, prints a table
    bench/run.py --quick                # small sizes, for a look
    bench/run.py --peer juicefs=/mnt/j  # adds another mount to the same rounds
    bench/run.py --json --save          # for machines; --save also writes bench/results/DATE-COMMIT.json

Rules: the same work by the same code on every target, one target after the other in every round, at least three rounds,
medians with their spread, CPU of the whole machine per operation. An absolute time means little on a shared machine; the ratio to
the local disk in the same run, and the CPU, mean more. A benchmark never fails a build.

"cold": the kernel's caches are dropped and, for TorchFS, every process is stopped and started again.
"dropped": only the kernel's caches are dropped; what the agent keeps, it keeps.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent
HERTZ = os.sysconf("SC_CLK_TCK")

# name, workload, processes, cache state before it, parameters (full size; --quick divides), unit
MB, OPS = "MB/s", "/s"
LINES = [
    ("sequential write 1 MiB + fsync", "seq_write", 1, "warm", {"mib": 512}, MB),
    ("sequential write 1 MiB, O_DIRECT, one fsync (dd)", "direct_write", 1, "warm", {"mib": 512}, MB),
    ("sequential read 1 MiB, cold", "seq_read", 1, "cold", {}, MB),
    ("sequential read 1 MiB, pages dropped", "seq_read", 1, "dropped", {}, MB),
    ("random read 128 KiB, cold", "rand_read", 1, "cold", {"reads": 2000}, MB),
    ("random read 128 KiB, pages dropped", "rand_read", 1, "dropped", {"reads": 2000}, MB),
    ("random read 128 KiB by mmap, pages dropped", "rand_read_mmap", 1, "dropped", {"reads": 1000}, MB),
    ("random write 4 KiB, fsync each 64", "rand_write", 1, "warm", {"mib": 64, "writes": 8192}, MB),
    ("fsync of a small append", "fsync_latency", 1, "warm", {"syncs": 400}, OPS),
    ("create + 4 KiB + fsync", "create_sync", 1, "warm", {"files": 600}, OPS),
    ("64 KiB files created, 4 processes", "files_write", 4, "warm", {"files": 500}, OPS),
    ("64 KiB files read, cold, 4 processes", "files_read", 4, "cold", {"files": 500}, OPS),
    ("64 KiB files read, pages dropped, 4 processes", "files_read", 4, "dropped", {"files": 500}, OPS),
    ("64 KiB files read, pages warm, 4 processes", "files_read", 4, "warm", {"files": 500}, OPS),
    ("empty files created, 1 process", "create", 1, "warm", {"files": 6000}, OPS),
    ("stat, kernel's cache empty, 1 process", "stat", 1, "dropped", {"files": 6000}, OPS),
    ("stat, warm, 1 process", "stat", 1, "warm", {"files": 6000}, OPS),
    ("readdir + stat, cold", "readdir", 1, "cold", {}, OPS),
    ("unlink, 1 process", "unlink", 1, "warm", {"files": 6000}, OPS),
    ("empty files created, 8 processes", "create", 8, "warm", {"files": 1500}, OPS),
    ("stat, kernel's cache empty, 8 processes", "stat", 8, "dropped", {"files": 1500}, OPS),
    ("readdir + stat, cold, 8 processes", "readdir", 8, "cold", {}, OPS),
    ("unlink, 8 processes", "unlink", 8, "warm", {"files": 1500}, OPS),
    ("small-file tree written", "tree_write", 1, "warm", {"files": 3000}, OPS),
    ("small-file tree read, cold", "tree_read", 1, "cold", {}, OPS),
    ("small-file tree removed", "tree_remove", 1, "warm", {}, OPS),
]

# What JuiceFS 1.3.1 (Redis, local objects), GlusterFS 10.3 and MooseFS 3.0.117 reached on a machine of this kind, each alone on it:
# the best of the three, as an absolute figure and as a ratio to ext4 in the same run. To be beaten, on both counts where the disk was
# in the same mood. Peers can be measured again with --peer.
PEERS = {
    "sequential write 1 MiB + fsync": (460, None),
    "sequential read 1 MiB, cold": (350, 0.34),
    "random read 128 KiB, pages dropped": (196, 0.40),
    "random read 128 KiB by mmap, pages dropped": (25, 0.62),
    "random write 4 KiB, fsync each 64": (29, 0.25),
    "create + 4 KiB + fsync": (663, 0.32),
    "64 KiB files created, 4 processes": (1050, 0.04),
    "64 KiB files read, cold, 4 processes": (2130, 0.30),
    "64 KiB files read, pages warm, 4 processes": (4700, 0.06),
    "empty files created, 1 process": (1800, 1.29),
    "empty files created, 8 processes": (5100, 0.10),
    "stat, kernel's cache empty, 1 process": (4400, 0.07),
    "stat, warm, 1 process": (10300, 0.02),
    "readdir + stat, cold": (86700, 1.17),
    "unlink, 8 processes": (5200, 0.04),
}


def main():
    arguments = parse()
    # Whoever ends it early leaves no mount behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    home = pathlib.Path(tempfile.mkdtemp(prefix="torchfs-bench.", dir=arguments.dir))
    targets = [Folder("local", home / "local")]
    try:
        targets.append(Cluster(home, arguments))
        targets += [Folder(name, pathlib.Path(at) / f"torchfs-bench.{os.getpid()}") for name, at in arguments.peer]
        report = {"conditions": conditions(arguments, home), "lines": measure(targets, arguments)}
        if chosen("lookups", arguments.only):
            report["lookups"] = lookups(targets[1], arguments)
        if chosen("metadata", arguments.only):
            report["metadata"] = metadata_per_file(targets[1], arguments)
        if not arguments.json:
            show(report, [t.name for t in targets])
        else:
            print(json.dumps(report, indent=1))
        if arguments.save:
            save(report)
    finally:
        for target in targets:
            target.close()
        shutil.rmtree(home, ignore_errors=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR", help="another mount for the same run")
    parser.add_argument("--rounds", type=int, default=3, help="at least 3 for a result worth keeping")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--only", metavar="WORD[,…]", help="only the lines whose name contains a WORD, and what they need")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="each role a process of its own, over TCP")
    parser.add_argument("--dir", default=None, help="work there instead of the temporary folder")
    parser.add_argument("--torchfs", default=str(TOP / "target/release/torchfs"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under bench/results")
    arguments = parser.parse_args()
    for pair in arguments.peer:
        if "=" not in pair or not os.path.isdir(pair.partition("=")[2]):
            parser.error(f"--peer takes NAME=DIR with a folder that exists, not {pair}")
    arguments.peer = [tuple(pair.split("=", 1)) for pair in arguments.peer]
    if os.geteuid() != 0:
        parser.error("mounting and dropping caches need root: sudo make bench")
    if not os.access(arguments.torchfs, os.X_OK):
        parser.error(f"{arguments.torchfs} is not there: make build")
    return arguments


class Folder:
    """A target that is just a folder: the local disk or a peer's mount."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)

    def restart(self):
        pass

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Cluster(Folder):
    """TorchFS on the same disk: `torchfs up`, or with --apart every role a process of its own."""

    def __init__(self, home, arguments):
        self.mount, self.home, self.arguments, self.processes = home / "mnt", home, arguments, []
        self.mount.mkdir()
        self.ports = [free_port() for _ in range(arguments.servers + 1)]
        secret = home / "secret"
        secret.write_text("0123456789abcdef0123456789abcdef\n")
        secret.chmod(0o600)
        self.env = dict(os.environ, TORCHFS_META=f"127.0.0.1:{self.ports[0]}", TORCHFS_SECRET_FILE=str(secret),
                        TORCHFS_RUNTIME_DIR=str(home / "run"))
        self.start()
        super().__init__("torchfs", self.mount / "bench")

    def start(self):
        address = [f"127.0.0.1:{port}" for port in self.ports]
        if self.arguments.apart:
            self.run("meta", "--dir", self.home / "meta", "--listen", address[0])
            for n in range(self.arguments.servers):
                self.run("data", "--dir", self.home / f"data-{n}", "--listen", address[n + 1])
            self.run("mount", "--foreground", self.mount)
        else:
            self.run("up", "--dir", self.home / "up", "--listen", address[0], "--servers", self.arguments.servers,
                     "--mount", self.mount)
        deadline = time.monotonic() + 120
        while not mounted(self.mount):
            if any(p.poll() is not None for p in self.processes) or time.monotonic() > deadline:
                self.stop()
                sys.exit(f"the cluster did not start:\n{(self.home / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def run(self, *words):
        with open(self.home / "log", "ab") as log:
            command = [self.arguments.torchfs, *map(str, words)]
            self.processes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def stop(self):
        # The mount was started last and goes first.
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
        if mounted(self.mount):
            subprocess.run(["umount", "-l", self.mount], check=False)

    def restart(self):
        self.stop()
        self.start()

    def close(self):
        self.stop()


def measure(targets, arguments):
    lines = [{"name": name, "unit": unit, "cache": cache, "processes": processes, "targets": {t.name: [] for t in targets}}
             for name, _, processes, cache, _, unit in LINES]
    for round_number in range(arguments.rounds):
        for line, (name, work, processes, cache, parameters, unit) in zip(lines, LINES):
            if not needed(work, name, arguments.only):
                continue
            say(f"round {round_number + 1} of {arguments.rounds}: {name}")
            # Each round another one goes first, so that nobody always finds the disk as the same neighbour left it.
            for target in targets[round_number % len(targets):] + targets[:round_number % len(targets)]:
                folder = target.folder / f"round-{round_number}"
                folder.mkdir(exist_ok=True)
                if work == "create":
                    (folder / f"empty-{processes}").mkdir(exist_ok=True)
                if work in ("create", "stat", "readdir", "unlink"):
                    folder = folder / f"empty-{processes}"
                sized = {k: max(1, v // (10 if arguments.quick else 1)) for k, v in parameters.items()}
                # What a reader reads is as large as its writer made it.
                line["targets"][target.name].append(once(target, work, folder, processes, cache, sized, round_number))
        for target in targets:
            shutil.rmtree(target.folder / f"round-{round_number}", ignore_errors=True)
    return [summary(line) for line in lines if line["targets"]["local"]]


# What a workload reads was written by another.
NEEDS = {"seq_read": "seq_write", "rand_read": "seq_write", "rand_read_mmap": "seq_write", "files_read": "files_write",
         "stat": "create", "readdir": "create", "unlink": "create", "tree_read": "tree_write", "tree_remove": "tree_write"}


def chosen(name, only):
    return not only or any(word in name for word in only.split(","))


def needed(work, name, only):
    return chosen(name, only) or any(NEEDS.get(w) == work and chosen(n, only) for n, w, *_ in LINES)


def once(target, work, folder, processes, cache, parameters, salt):
    if cache == "cold":
        target.restart()
    if cache != "warm":
        subprocess.run(["sync"], check=True)
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "work.py"), work, str(folder), json.dumps({**parameters, "part": part, "salt": salt})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for part in range(processes)
    ]
    for worker in workers:
        if worker.stdout.readline().strip() != "ready":
            sys.exit(f"{work} on {target.name} did not start")
    busy = busy_seconds()
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    done = []
    for worker in workers:
        answer = worker.communicate()[0]
        if worker.returncode != 0:
            sys.exit(f"{work} on {target.name} failed")
        done.append(json.loads(answer))
    cpu = busy_seconds() - busy
    seconds = max(d["end"] for d in done) - min(d["start"] for d in done)
    operations, size = sum(d["ops"] for d in done), sum(d["bytes"] for d in done)
    times = sorted(t for d in done for t in d["times"] or [])
    return {"seconds": seconds, "ops": operations, "bytes": size, "cpu": cpu,
            "p50_ms": times[len(times) // 2] * 1e3 if times else None,
            "p99_ms": times[len(times) * 99 // 100] * 1e3 if times else None}


def lookups(cluster, arguments):
    """Lookups a second at the metadata service, over TCP on one connection, 32 in flight."""
    rates, cpus = [], []
    for _ in range(arguments.rounds):
        busy = busy_seconds()
        command = [arguments.torchfs, "bench", "lookups", "--in-flight", "32", "--time", "2s", "--json"]
        ran = subprocess.run(command, env=cluster.env, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            sys.exit(f"the lookups failed: {ran.stderr.strip()}")
        answer = json.loads(ran.stdout)
        rates.append(answer["per_second"])
        cpus.append((busy_seconds() - busy) * 1e6 / answer["lookups"])
    return {"in_flight": 32, "median": statistics.median(rates), "least": min(rates), "most": max(rates),
            "cpu_us_per_op": statistics.median(cpus)}


def metadata_per_file(cluster, arguments):
    """How much the metadata's store grows on disk per file of 4 KiB, and how large its log is, which does not grow with files.

    The log is recycled: batches leave it for the store with a checkpoint, at most ten seconds after they came.
    """
    folder = cluster.home / "meta" if cluster.arguments.apart else cluster.home / "up" / "meta"
    if not folder.is_dir():
        return None

    def on_disk():
        # Checkpoints come every ten seconds while there is something to write.
        (cluster.folder / "now").touch()
        time.sleep(12)
        sizes = {f: f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file()}
        log = sum(size for f, size in sizes.items() if f.name.startswith("log-"))
        return sum(sizes.values()) - log, log

    (before, _), made = on_disk(), 0
    for salt in range(2 if arguments.quick else 3):
        (cluster.folder / f"meta-{salt}").mkdir()
        made += once(cluster, "create_sync", cluster.folder / f"meta-{salt}", 8, "warm", {"files": 1250}, salt)["ops"]
    after, log = on_disk()
    return {"bytes_per_file": (after - before) / made, "files": made, "log_bytes": log}


def busy_seconds():
    """CPU seconds of the whole machine: a file system works in the kernel and in daemons too."""
    fields = [int(f) for f in open("/proc/stat").readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / HERTZ


def summary(line):
    out = {k: line[k] for k in ("name", "unit", "cache", "processes")}
    out["targets"] = {}
    for name, runs in line["targets"].items():
        rates = [(r["bytes"] / 1e6 if line["unit"] == MB else r["ops"]) / max(r["seconds"], 1e-9) for r in runs]
        entry = {
            "median": statistics.median(rates), "least": min(rates), "most": max(rates), "rounds": rates,
            "cpu_us_per_op": statistics.median(r["cpu"] * 1e6 / max(r["ops"], 1) for r in runs),
        }
        if line["unit"] == MB:
            entry["cpu_s_per_gb"] = statistics.median(r["cpu"] * 1e9 / max(r["bytes"], 1) for r in runs)
        if runs[0]["p50_ms"] is not None:
            entry["p50_ms"] = statistics.median(r["p50_ms"] for r in runs)
            entry["p99_ms"] = statistics.median(r["p99_ms"] for r in runs)
        out["targets"][name] = entry
    for entry in out["targets"].values():
        entry["ratio"] = entry["median"] / out["targets"]["local"]["median"]
    return out


def show(report, names):
    c = report["conditions"]
    print(f"\n{c['when']}  commit {c['commit']}  {c['version']}  kernel {c['kernel']}  {c['cores']} cores  "
          f"{c['memory_gib']} GiB  disk {c['disk']}\n{c['servers']} data servers, {c['form']}; {c['rounds']} rounds, "
          f"{'a tenth of the work' if c['quick'] else 'full size'}; medians (least-most); CPU of the whole machine; "
          f"load before: {c['load']}\n")
    head = ["work"] + [f"{n}" for n in names] + ["best peer, another day"]
    rows = []
    for line in report["lines"]:
        row = [f"{line['name']}, {line['unit']}" if line["unit"] == MB else f"{line['name']} /s"]
        for name in names:
            e = line["targets"][name]
            text = f"{number(e['median'])} ({number(e['least'])}-{number(e['most'])})"
            if name != "local":
                text += f" x{e['ratio']:.2f}"
            text += f" {e['cpu_s_per_gb']:.2f} s/GB" if "cpu_s_per_gb" in e else f" {e['cpu_us_per_op']:.0f} µs"
            if "p50_ms" in e:
                text += f" p50 {e['p50_ms']:.1f} p99 {e['p99_ms']:.1f} ms"
            row.append(text)
        best, ratio = PEERS.get(line["name"], (None, None))
        row.append((f"{number(best)}" + (f" x{ratio:.2f}" if ratio else "")) if best else "")
        rows.append(row)
    widths = [max(len(r[i]) for r in [head] + rows) for i in range(len(head))]
    for row in [head, ["-" * w for w in widths]] + rows:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |")
    if found := report.get("lookups"):
        print(f"\nlookups at the metadata service over TCP, {found['in_flight']} in flight: {number(found['median'])}/s "
              f"({number(found['least'])}-{number(found['most'])}), {found['cpu_us_per_op']:.1f} µs of CPU on both ends")
    if found := report.get("metadata"):
        print(f"metadata on disk per file of 4 KiB: {found['bytes_per_file']:.0f} bytes over {found['files']} files; "
              f"and a log of {found['log_bytes'] >> 20} MiB, which does not grow with them")


def number(n):
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}"


def conditions(arguments, home):
    def said(*command):
        ran = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
        return ran.stdout.strip()

    mounted = said("findmnt", "-no", "SOURCE,FSTYPE", "-T", str(home)).replace("\n", " ")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": said("git", "describe", "--always", "--dirty", "--abbrev=10"),
        "version": said(arguments.torchfs, "--version"),
        "kernel": platform.release(), "cores": os.cpu_count(), "memory_gib": round(memory), "disk": mounted,
        "python": platform.python_version(), "servers": arguments.servers, "rounds": arguments.rounds, "quick": arguments.quick,
        "form": "each role a process" if arguments.apart else "all roles in one process",
        "load": round(os.getloadavg()[0], 1), "peers": dict(arguments.peer), "cpu": "all CPUs of the machine, user and system",
    }


def save(report):
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    c = report["conditions"]
    path = folder / f"{c['when'][:10]}-{c['commit']}.json"
    if path.exists():
        # A run in parts: each line as it was measured last.
        before = json.loads(path.read_text())
        names = {line["name"] for line in report["lines"]}
        lines = [line for line in before["lines"] if line["name"] not in names] + report["lines"]
        report = {**before, **report, "lines": lines}
    path.write_text(json.dumps(report, indent=1) + "\n")
    say(f"kept as {path.relative_to(TOP)}")


def mounted(path):
    """Reads the table, so that a mount that hangs does not take this program with it."""
    with open("/proc/self/mounts") as table:
        return any(line.split()[1] == str(path) for line in table)


def free_port():
    """Below the range of outgoing connections, so that it is still free after a restart."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        if port in TAKEN:
            continue
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        TAKEN.add(port)
        return port
    sys.exit("no port is free")


TAKEN = set()


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
