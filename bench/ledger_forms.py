"""Which on-disk form should ledgers have?  Measures the candidates on the disk at hand.

    python bench/ledger_forms.py [--dir DIR] [--seconds S]

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
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


FORMS = ("file-per-ledger", "shared", "shared-odsync", "shared-fallocate", "shared-zeroed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare on-disk forms for ledgers.")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
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
