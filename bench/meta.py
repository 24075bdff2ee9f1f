#!/usr/bin/env python3
"""Measures the metadata service with its log on its own disk and in PostgreSQL, in one interleaved run.

    bench/meta.py                  # starts both on this disk, measures, prints a table
    bench/meta.py --quick          # one short round, for a look
    bench/meta.py --takeovers 10   # also kills leaders, and times until a standby serves; --fill 1000000 makes so many files first
    bench/meta.py --json --save    # for machines; --save also writes bench/results/DATE-COMMIT-meta.json

Each client is a session with a connection and one request under way; changes count when they are durable. CPU is that of the metadata
server and, with PostgreSQL, of all processes of the database; the load's own is not counted. What checkpoints cost later (the replica,
and the database's table of pairs) is measured apart, per creation. Bytes are those per file of
1 KiB written through a mount, after a checkpoint: in the replica, and in the database's table of pairs with its index.
"""

import argparse
import datetime
import glob
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

TOP = pathlib.Path(__file__).resolve().parent.parent
TORCHFS = os.environ.get("TORCHFS_BIN", str(TOP / "target/release/torchfs"))
HERTZ = os.sysconf("SC_CLK_TCK")
WORKS = ["creates", "lookups", "renames"]
CLIENTS = [1, 16, 64]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu(pid):
    """CPU seconds of a process, its children and its dead children."""
    total = 0
    try:
        fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
        total += sum(int(n) for n in fields[11:15])
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
    except OSError:
        return 0
    return total / HERTZ + sum(cpu(int(child)) for child in children)


class Database:
    """A PostgreSQL of its own, with the settings of a small server and fsync as it should be."""

    def __init__(self, root):
        self.bin = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda p: int(p.split("/")[4]))[-1]
        self.data, self.port = root / "pg", free_port()
        self.data.mkdir()
        self.user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
        if self.user:
            root.chmod(0o755)
            shutil.chown(self.data, "postgres", "postgres")
        quiet = dict(stdout=subprocess.DEVNULL, check=True)
        subprocess.run([*self.user, f"{self.bin}/initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"], **quiet)
        options = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=128MB", "max_wal_size=1GB"]
        settings = [word for option in options for word in ("-c", option)]
        self.server = subprocess.Popen(
            [*self.user, f"{self.bin}/postgres", "-D", self.data, "-p", str(self.port), *settings],
            stderr=open(root / "pg.log", "w"))
        url = f"postgres://postgres@127.0.0.1:{self.port}/postgres"
        while subprocess.run([f"{self.bin}/pg_isready", "-q", "-d", url]).returncode:
            time.sleep(0.1)
        subprocess.run(["psql", "-q", "-d", url, "-c", "CREATE DATABASE torchfs"], **quiet)
        self.url = f"postgres://postgres@127.0.0.1:{self.port}/torchfs"

    def version(self):
        return subprocess.run([f"{self.bin}/postgres", "--version"], capture_output=True, text=True).stdout.strip()

    def stop(self):
        self.server.send_signal(signal.SIGINT)
        self.server.wait()


class Service:
    """Metadata servers on one engine, and how commands reach them."""

    def __init__(self, root, name, database=None, servers=1):
        self.root, self.name, self.database = root, name, database
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(servers)]
        self.env = dict(os.environ, TORCHFS_META=",".join(self.addresses), TORCHFS_CONFIG="/nonexistent",
                        TORCHFS_RUNTIME_DIR=str(root / f"run-{name}"))
        self.servers = [None] * servers
        for n in range(servers):
            self.start(n)
        self.wait()

    def start(self, n):
        args = [TORCHFS, "meta", "--dir", self.root / f"{self.name}-{n}", "--listen", self.addresses[n]]
        if self.database:
            args += ["--engine", self.database.url]
        log = open(self.root / f"{self.name}-{n}.log", "a")
        self.servers[n] = subprocess.Popen(args, env=self.env, stdout=log, stderr=log)

    def torchfs(self, *args):
        ran = subprocess.run([TORCHFS, *args], env=self.env, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"torchfs {' '.join(args)}: {ran.stderr}")
        return ran.stdout

    def status(self):
        return json.loads(self.torchfs("meta", "status", "--json"))

    def wait(self):
        for _ in range(600):
            try:
                return self.status()
            except RuntimeError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.name} does not answer")

    def cpu(self):
        spent = sum(cpu(server.pid) for server in self.servers)
        return spent + (cpu(self.database.server.pid) if self.database else 0)

    def measure(self, work, clients, seconds):
        before = self.cpu()
        out = json.loads(self.torchfs("bench", "meta", work, "--clients", str(clients), "--time", f"{seconds}s", "--keep", "--json"))
        return out["per_second"], (self.cpu() - before) / out["count"] * 1e6

    def checkpoint_cpu(self, clients, seconds):
        """CPU µs per creation that is spent after it: until everything is in the replica and in the database's pairs."""
        self.settled()
        start = self.cpu()
        out = json.loads(self.torchfs("bench", "meta", "creates", "--clients", str(clients), "--time", f"{seconds}s", "--keep", "--json"))
        middle = self.cpu()
        self.settled()
        return {"during": (middle - start) / out["count"] * 1e6, "after": (self.cpu() - middle) / out["count"] * 1e6}

    def bytes_per_file(self, files):
        """Writes small files through a mount; what a file takes in the replica and in the database."""
        data = subprocess.Popen([TORCHFS, "data", "--dir", self.root / f"{self.name}-data", "--listen", f"127.0.0.1:{free_port()}"],
                                env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        mount = self.root / f"{self.name}-mnt"
        mount.mkdir()
        for _ in range(200):
            if any(s["up"] for s in json.loads(self.torchfs("status", "--json"))["servers"]):
                break
            time.sleep(0.1)
        self.torchfs("mount", str(mount))
        try:
            before = self.settled()
            os.mkdir(mount / "d")
            for n in range(files):
                (mount / "d" / f"file-{n:06}").write_bytes(os.urandom(1024))
            after = self.settled()
        finally:
            self.torchfs("umount", str(mount))
            data.send_signal(signal.SIGTERM)
            data.wait()
        return {what: (after[what] - before[what]) / files for what in ("replica_bytes", "state_bytes")}

    def settled(self):
        """The status when everything durable is in the replica."""
        while True:
            status = self.status()
            if status["applied"] >= status["durable"] - 50:
                # The database's figure is taken with the checkpoint, and free pages of the replica are not.
                return status
            time.sleep(0.5)

    def stop(self):
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
        for server in self.servers:
            server.wait()


def takeovers(root, database, count, fill):
    """Kills the leader again and again while files are made; seconds until the next answer that is durable. Nobody else may lead."""
    service = Service(root, "takeover", database, servers=2)
    while fill > 0:
        out = json.loads(service.torchfs("bench", "meta", "creates", "--clients", "32", "--time", "10s", "--keep", "--json"))
        fill -= out["count"]
        print(f"  {fill:,} files to go", file=sys.stderr)
    took = []
    for _ in range(count):
        while not any(s["silent_ms"] < 3000 for s in service.status()["standbys"]):
            time.sleep(0.2)
        leader = service.addresses.index(service.status()["leader"])
        load = subprocess.Popen([TORCHFS, "bench", "meta", "creates", "--clients", "4", "--time", "1s"], env=service.env,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        service.servers[leader].kill()
        began = time.time()
        service.servers[leader].wait()
        service.torchfs("bench", "meta", "creates", "--clients", "1", "--time", "1ms")
        took.append(time.time() - began)
        load.wait()
        service.start(leader)
    service.stop()
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="per measurement")
    parser.add_argument("--files", type=int, default=3000, help="small files for bytes per file; 0 leaves it out (it needs a mount)")
    parser.add_argument("--takeovers", type=int, default=0)
    parser.add_argument("--fill", type=int, default=0, help="files to make before the takeovers")
    parser.add_argument("--only-takeovers", action="store_true")
    parser.add_argument("--dir", default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    rounds, seconds = (1, 1) if args.quick else (args.rounds, args.seconds)
    if args.only_takeovers:
        root = pathlib.Path(tempfile.mkdtemp(prefix="torchfs-bench-meta.", dir=args.dir))
        database = Database(root)
        try:
            took = takeovers(root, database, args.takeovers or 10, args.fill)
        finally:
            database.stop()
            shutil.rmtree(root, ignore_errors=True)
        print(f"takeover: median {statistics.median(took):.2f} s, {min(took):.2f} to {max(took):.2f} s, {len(took)} kills")
        return

    root = pathlib.Path(tempfile.mkdtemp(prefix="torchfs-bench-meta.", dir=args.dir))
    database = Database(root)
    services = [Service(root, "embedded"), Service(root, "postgres", database)]
    found = {}
    try:
        for turn in range(rounds):
            for work in WORKS:
                for clients in CLIENTS:
                    for service in services:
                        rate, spent = service.measure(work, clients, seconds)
                        found.setdefault((work, clients, service.name), []).append((rate, spent))
                        where = f"round {turn + 1}: {work}, {clients} clients, {service.name}"
                        print(f"  {where}: {rate:,.0f}/s, {spent:.0f} µs CPU", file=sys.stderr)
        later = {s.name: s.checkpoint_cpu(16, seconds) for s in services}
        sizes = {s.name: s.bytes_per_file(args.files) for s in services} if args.files else {}
        services.pop().stop()
        took = takeovers(root, database, args.takeovers, args.fill) if args.takeovers else []
    finally:
        for service in services:
            service.stop()
        database.stop()
        shutil.rmtree(root, ignore_errors=True)

    commit = subprocess.run(["git", "-C", TOP, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = []
    for (work, clients, name), values in found.items():
        rates, spent = [v[0] for v in values], [v[1] for v in values]
        rows.append({"work": work, "clients": clients, "engine": name, "per_second": statistics.median(rates),
                     "least": min(rates), "most": max(rates), "cpu_us": statistics.median(spent)})
    out = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commit": commit,
        "kernel": platform.release(), "cores": os.cpu_count(), "database": database.version(), "rounds": rounds,
        "seconds": seconds, "rows": rows, "cpu_us_per_create": later, "bytes_per_file": sizes, "takeover_seconds": took,
        "takeover_files": args.fill,
    }
    if args.save:
        folder = TOP / "bench/results"
        folder.mkdir(exist_ok=True)
        path = folder / f"{out['date'][:10]}-{commit}-meta.json"
        path.write_text(json.dumps(out, indent=1) + "\n")
        print(f"saved {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(out, indent=1))
        return
    print(f"{out['kernel']}, {out['cores']} cores, {out['database']}, commit {commit}, {rounds} rounds of {seconds} s, medians")
    print(f"{'':24}{'embedded':>24}{'PostgreSQL':>32}")
    by = {(r["work"], r["clients"], r["engine"]): r for r in rows}
    for work in WORKS:
        for clients in CLIENTS:
            one, two = by[work, clients, "embedded"], by[work, clients, "postgres"]
            cell = lambda r: f"{r['per_second']:>9,.0f}/s {r['cpu_us']:>5.0f} µs CPU"
            print(f"{work + ', ' + str(clients) + ' clients':24}{cell(one):>24}{cell(two):>24}  {two['per_second'] / one['per_second']:.2f}")
    for name, spent in later.items():
        print(f"{name}: a creation costs {spent['during']:.0f} µs CPU, and {spent['after']:.0f} µs later in checkpoints")
    for name, size in sizes.items():
        print(f"{name}: {size['replica_bytes']:.0f} bytes per small file in the replica, {size['state_bytes']:.0f} in the database")
    if took:
        print(f"takeover: median {statistics.median(took):.2f} s, {min(took):.2f} to {max(took):.2f} s, {len(took)} kills")


if __name__ == "__main__":
    main()
