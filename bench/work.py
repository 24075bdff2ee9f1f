"""One process of one workload: waits for "go" on stdin, works in a folder, prints what it did as one line of JSON.

Run by run.py; the same code runs on every target, so that what Python costs is the same for all.
"""

import json
import mmap
import os
import random
import sys
import time

MIB = 1 << 20


def pieces():
    """Random bytes, so that compression finds nothing: sixteen megabytes, given in turn."""
    source = random.Random(1)
    return [source.randbytes(MIB) for _ in range(16)]


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


# Every workload gives (operations, bytes). The folder exists; what a reader reads was left there by its writer.


def seq_write(folder, p):
    data = pieces()
    yield
    fd = os.open(f"{folder}/seq", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    for n in range(p["mib"]):
        write_all(fd, data[n % 16])
    os.fsync(fd)
    os.close(fd)
    yield p["mib"], p["mib"] * MIB


def direct_write(folder, p):
    """What `dd bs=1M oflag=direct conv=fsync` does."""
    memory = mmap.mmap(-1, MIB)
    memory.write(pieces()[0])
    yield
    fd = os.open(f"{folder}/direct", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    for _ in range(p["mib"]):
        os.write(fd, memory)
    os.fsync(fd)
    os.close(fd)
    yield p["mib"], p["mib"] * MIB


def seq_read(folder, p):
    yield
    fd = os.open(f"{folder}/seq", os.O_RDONLY)
    total, buffer = 0, bytearray(MIB)
    while n := os.readv(fd, [buffer]):
        total += n
    os.close(fd)
    yield total // MIB, total


def rand_read(folder, p):
    yield
    fd = os.open(f"{folder}/seq", os.O_RDONLY)
    places, chance = os.fstat(fd).st_size // (128 << 10), random.Random(p["salt"])
    buffer = bytearray(128 << 10)
    for _ in range(p["reads"]):
        os.preadv(fd, [buffer], chance.randrange(places) * (128 << 10))
    os.close(fd)
    yield p["reads"], p["reads"] * (128 << 10)


def rand_read_mmap(folder, p):
    yield
    fd = os.open(f"{folder}/seq", os.O_RDONLY)
    size, chance = os.fstat(fd).st_size, random.Random(p["salt"])
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        for _ in range(p["reads"]):
            at = chance.randrange(size // (128 << 10)) * (128 << 10)
            bytes(mapped[at:at + (128 << 10)])
    os.close(fd)
    yield p["reads"], p["reads"] * (128 << 10)


def rand_write(folder, p):
    data, chance = random.Random(2).randbytes(4096), random.Random(p["salt"])
    fd = os.open(f"{folder}/random", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(fd, p["mib"] * MIB)
    os.fsync(fd)
    yield
    for n in range(p["writes"]):
        os.pwrite(fd, data, chance.randrange(p["mib"] * 256) * 4096)
        if n % 64 == 63:
            os.fsync(fd)
    os.fsync(fd)
    os.close(fd)
    yield p["writes"], p["writes"] * 4096


def fsync_latency(folder, p):
    fd = os.open(f"{folder}/log-{p['part']}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    yield
    times = []
    for _ in range(p["syncs"]):
        start = time.monotonic()
        os.write(fd, b"x" * 200)
        os.fsync(fd)
        times.append(time.monotonic() - start)
    os.close(fd)
    p["times"] = times
    yield p["syncs"], p["syncs"] * 200


def create_sync(folder, p):
    data = random.Random(3).randbytes(4096)
    yield
    for n in range(p["files"]):
        fd = os.open(f"{folder}/synced-{p['part']}-{n}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
    yield p["files"], p["files"] * 4096


def files_write(folder, p):
    data = random.Random(4 + p["part"]).randbytes(64 << 10)
    os.makedirs(f"{folder}/files/{p['part']}", exist_ok=True)
    yield
    for n in range(p["files"]):
        fd = os.open(f"{folder}/files/{p['part']}/{n}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        os.write(fd, data)
        os.close(fd)
    yield p["files"], p["files"] * (64 << 10)


def files_read(folder, p):
    names = [f"{folder}/files/{p['part']}/{n}" for n in range(p["files"])]
    random.Random(p["salt"]).shuffle(names)
    yield
    total = 0
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        total += len(os.read(fd, 64 << 10))
        os.close(fd)
    yield len(names), total


def create(folder, p):
    """Empty files; every process in the same folder, as a data loader's cache or a queue would."""
    yield
    for n in range(p["files"]):
        os.close(os.open(f"{folder}/empty-{p['part']}-{n}", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))
    yield p["files"], 0


def stat(folder, p):
    names = [f"{folder}/empty-{p['part']}-{n}" for n in range(p["files"])]
    random.Random(p["salt"]).shuffle(names)
    yield
    for name in names:
        os.stat(name)
    yield len(names), 0


def readdir(folder, p):
    yield
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)
            count += 1
    yield count, 0


def unlink(folder, p):
    yield
    for n in range(p["files"]):
        os.unlink(f"{folder}/empty-{p['part']}-{n}")
    yield p["files"], 0


def tree_write(folder, p):
    """A source tree: many small files in many folders."""
    data, chance = random.Random(5).randbytes(64 << 10), random.Random(6)
    yield
    for n in range(p["files"]):
        below = f"{folder}/tree-{p['part']}/{n // 20 % 10}/{n // 200}"
        if n % 20 == 0:
            os.makedirs(below, exist_ok=True)
        fd = os.open(f"{below}/{n}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, data[:chance.randrange(200, 12_000)])
        os.close(fd)
    yield p["files"], 0


def tree_read(folder, p):
    yield
    count = total = 0
    for at, _, names in os.walk(f"{folder}/tree-{p['part']}"):
        for name in names:
            with open(f"{at}/{name}", "rb", buffering=0) as file:
                total += len(file.read())
            count += 1
    yield count, total


def tree_remove(folder, p):
    yield
    count = 0
    for at, folders, names in os.walk(f"{folder}/tree-{p['part']}", topdown=False):
        for name in names:
            os.unlink(f"{at}/{name}")
            count += 1
        for name in folders:
            os.rmdir(f"{at}/{name}")
    os.rmdir(f"{folder}/tree-{p['part']}")
    yield count, 0


WORK = {
    f.__name__: f
    for f in [
        seq_write, direct_write, seq_read, rand_read, rand_read_mmap, rand_write, fsync_latency, create_sync, files_write, files_read,
        create, stat, readdir, unlink, tree_write, tree_read, tree_remove,
    ]
}


def main():
    name, folder, parameters = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    work = WORK[name](folder, parameters)
    next(work)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    operations, size = next(work)
    end = time.monotonic()
    print(json.dumps({"start": start, "end": end, "ops": operations, "bytes": size, "times": parameters.get("times")}))


if __name__ == "__main__":
    main()
