"""Which on-disk form should ledgers have?  Measures the candidates on the disk at hand.

    python bench/ledger_forms.py [--dir DIR] [--seconds S] [--store]

With `--store` it measures the ledger store as built instead: appends with a window, reads of what
was appended, and the memory of the process.

Every form makes groups durable one after the other, as group commit does: a group holds the same
number of 1 KiB entries of each active ledger, and counts when all its bytes are on disk.  Two
shapes of group: one entry of each ledger (publishers that wait for each receipt) and 512 entries
in all (publishers with a deep window).  Forms:

- file-per-ledger   append to one file for each ledger, one fdatasync for each
- shared            append to one log, one fdatasync
- shared-odsync     one log, synchronous writes (RWF_DSYNC): one system call less
- shared-fallocate  one log, space reserved with posix_fallocate, one fdatasync
- shared-zeroed     one log, space filled with zeros beforehand, one fdatasync
"""

import argparse
import asyncio
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from storage.clock import SystemClock
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerError, WritableLedger
from storage.metadata.memory import MemoryMetadataStore

ENTRY = os.urandom(1024)
HEADER = os.urandom(28)
LOG_BYTES = 64 * 1024 * 1024
IOV_MAX = os.sysconf("SC_IOV_MAX")

Commit = Callable[[int, int], None]
"""Makes durable: this many ledgers, this many entries of each."""


def buffers(entries: int) -> list[bytes]:
    return [HEADER, ENTRY] * entries


def write_all(fd: int, pieces: list[bytes]) -> int:
    written = 0
    for start in range(0, len(pieces), IOV_MAX):
        written += os.writev(fd, pieces[start : start + IOV_MAX])
    return written


class Log:
    """One shared log that starts a new file when the current one is full."""

    def __init__(self, root: Path, prepare: Callable[[int], None], *, dsync: bool) -> None:
        self.root = root
        self.prepare = prepare
        self.flags = os.RWF_DSYNC if dsync else 0
        self.number = 0
        self.fd = -1
        self.size = LOG_BYTES

    def commit(self, ledgers: int, entries: int) -> None:
        if self.size + ledgers * entries * 1052 > LOG_BYTES:
            self.roll()
        pieces = buffers(ledgers * entries)
        for start in range(0, len(pieces), IOV_MAX):
            chunk = pieces[start : start + IOV_MAX]
            self.size += os.pwritev(self.fd, chunk, self.size, self.flags)
        if not self.flags:
            os.fdatasync(self.fd)

    def roll(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            (self.root / f"{self.number}.log").unlink()
        self.number += 1
        self.fd = os.open(self.root / f"{self.number}.log", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.prepare(self.fd)
        os.fsync(self.fd)
        self.size = 0

    def close(self) -> None:
        os.close(self.fd)


class FilePerLedger:
    """One file for each ledger, and one fdatasync for each that a group touched."""

    def __init__(self, root: Path, ledgers: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self.fds = [os.open(root / f"{n}.ledger", flags) for n in range(ledgers)]

    def commit(self, ledgers: int, entries: int) -> None:
        for fd in self.fds[:ledgers]:
            write_all(fd, buffers(entries))
        for fd in self.fds[:ledgers]:
            os.fdatasync(fd)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def leave(fd: int) -> None:
    """Let the file grow by itself."""


def reserve(fd: int) -> None:
    os.posix_fallocate(fd, 0, LOG_BYTES)


def fill_with_zeros(fd: int) -> None:
    zeros = bytes(1 << 20)
    for offset in range(0, LOG_BYTES, len(zeros)):
        os.pwrite(fd, zeros, offset)


@contextmanager
def form(name: str, root: Path, ledgers: int) -> Iterator[Commit]:
    target = Path(tempfile.mkdtemp(dir=root))
    made: Log | FilePerLedger
    if name == "file-per-ledger":
        made = FilePerLedger(target, ledgers)
    else:
        prepare = {"shared-fallocate": reserve, "shared-zeroed": fill_with_zeros}.get(name, leave)
        made = Log(target, prepare, dsync=name == "shared-odsync")
    try:
        yield made.commit
    finally:
        made.close()
        shutil.rmtree(target)


def measure(commit: Commit, ledgers: int, entries: int, seconds: float) -> tuple[float, float]:
    """Entries each second, and the median milliseconds of a group."""
    commit(ledgers, entries)
    times: list[float] = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds:
        commit(ledgers, entries)
        times.append(time.perf_counter() - now)
    total = time.perf_counter() - begin
    return len(times) * ledgers * entries / total, sorted(times)[len(times) // 2] * 1000


async def fill(ledgers: list[WritableLedger], entries: int, window: int) -> float:
    """Append with so many appends under way; returns the seconds it took."""
    finished = asyncio.get_running_loop().create_future()
    sent = done = 0

    def acknowledged(_: int, error: LedgerError | None) -> None:
        nonlocal done
        done += 1
        if error is not None:
            finished.set_exception(error)
        elif done == entries:
            finished.set_result(None)
        elif sent < entries:
            send()

    def send() -> None:
        nonlocal sent
        ledgers[sent % len(ledgers)].append(ENTRY, acknowledged)
        sent += 1

    begin = time.perf_counter()
    for _ in range(window):
        send()
    await finished
    return time.perf_counter() - begin


async def read_back(ledger: WritableLedger) -> float:
    """Entries each second, read in batches of 200 from the log (mostly the page cache)."""
    begin = time.perf_counter()
    at = 0
    while at <= ledger.last_add_confirmed:
        last = min(at + 199, ledger.last_add_confirmed)
        at += len(await ledger.read(at, last, max_bytes=4 * 1024 * 1024))
    return at / (time.perf_counter() - begin)


async def measure_store(root: Path) -> None:
    print(f"{'ledgers':>8}{'window':>8}{'appends/s':>12}{'reads/s':>12}{'peak MB':>9}")
    for ledgers, window, entries in (
        (1, 1, 3000),
        (1, 64, 60_000),
        (1, 1000, 200_000),
        (64, 1000, 200_000),
    ):
        target = Path(tempfile.mkdtemp(dir=root))
        clock = SystemClock()
        store = LocalLedgerStore(RealDisk(target), MemoryMetadataStore(clock), clock)
        await store.start()
        handles = [await store.create(custom={}) for _ in range(ledgers)]
        appends = entries / await fill(handles, entries, window)
        reads = await read_back(handles[0])
        await store.close()
        shutil.rmtree(target)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{ledgers:8}{window:8}{appends:12,.0f}{reads:12,.0f}{peak:9.0f}", flush=True)


FORMS = ("file-per-ledger", "shared", "shared-odsync", "shared-fallocate", "shared-zeroed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare on-disk forms for ledgers.")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--store", action="store_true", help="measure the store as built")
    args = parser.parse_args()
    if args.store:
        uvloop.run(measure_store(args.dir))
        return
    print(f"{'form':18}{'ledgers':>8}  {'one each: entries/s':>20}{'p50 ms':>8}", end="")
    print(f"  {'512 in all: entries/s':>22}{'p50 ms':>8}")
    for ledgers in (1, 8, 64):
        for name in FORMS:
            with form(name, args.dir, ledgers) as commit:
                one = measure(commit, ledgers, 1, args.seconds)
                deep = measure(commit, ledgers, 512 // ledgers, args.seconds)
            print(f"{name:18}{ledgers:8}  {one[0]:20,.0f}{one[1]:8.2f}", end="")
            print(f"  {deep[0]:22,.0f}{deep[1]:8.2f}", flush=True)


if __name__ == "__main__":
    main()
