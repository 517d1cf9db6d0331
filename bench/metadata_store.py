"""How do puts of the SQLite metadata store share commits?  Measures on the disk at hand.

    python bench/metadata_store.py [--dir DIR] [--seconds S] [--uvloop]

Each caller puts one record of 200 bytes with one index entry, waits until it is durable, and puts
the next; keys go round among 20,000.  Printed for 1, 64 and 1,000 callers: puts each second, the
ratio to one caller, puts in a commit, and the median wait.  Then the same callers read by key, and
at last one caller puts, gets and scans 1,000 records beside socket traffic that never rests.
"""

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import uvloop

from storage.clock import SystemClock
from storage.metadata.operations import Operation
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.sqlite_writer import CommitResult, SqliteWriter
from storage.metadata.store import IndexEntry

KEYS = 20_000
VALUE = os.urandom(200)
CALLERS = (1, 64, 1000)
WORK_US = (10, 100)


def key_of(number: int) -> str:
    return f"/bench/{number % KEYS:08}"


async def measure(
    operation: Callable[[int], Awaitable[object]], callers: int, seconds: float
) -> tuple[float, float]:
    """Operations each second, and the median wait in milliseconds."""
    waits: list[float] = []
    end = time.perf_counter() + seconds

    async def call(number: int) -> None:
        while (begin := time.perf_counter()) < end:
            await operation(number)
            waits.append(time.perf_counter() - begin)
            number += callers

    begin = time.perf_counter()
    await asyncio.gather(*(call(number) for number in range(callers)))
    return len(waits) / (time.perf_counter() - begin), statistics.median(waits) * 1000


def count_commits(writer: SqliteWriter) -> Callable[[], int]:
    """The number of commits from now on."""
    commits = 0
    commit = writer.commit

    def counted(operations: Sequence[Operation]) -> CommitResult:
        nonlocal commits
        commits += 1
        return commit(operations)

    writer.commit = counted  # type: ignore[method-assign]
    return lambda: commits


class Echo(asyncio.Protocol):
    """Sends back what it gets, with a little work for each: traffic that never rests."""

    def __init__(self, stop: asyncio.Event, work_us: int) -> None:
        self.stop = stop
        self.work_s = work_us / 1e6

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        end = time.perf_counter() + self.work_s
        while time.perf_counter() < end:
            pass
        if self.stop.is_set():
            self.transport.close()
        else:
            self.transport.write(data)


async def start_traffic(stop: asyncio.Event, work_us: int) -> None:
    """Sixteen messages of 1 KiB between pairs of sockets, for ever."""
    loop = asyncio.get_running_loop()
    for _ in range(16):
        here, there = socket.socketpair()
        transport, _ = await loop.create_connection(lambda: Echo(stop, work_us), sock=here)
        await loop.create_connection(lambda: Echo(stop, work_us), sock=there)
        transport.write(bytes(1024))


async def run(directory: Path, seconds: float) -> None:
    store = await SqliteMetadataStore.open(directory / "metadata.db", SystemClock())
    commits = count_commits(store._files.writer)

    async def put(number: int) -> None:
        await store.put(key_of(number), VALUE, indexes=[IndexEntry("i", f"{number % 97}")])

    print(f"{'callers':>8} {'puts/s':>9} {'ratio':>6} {'per commit':>10} {'p50 ms':>7}")
    first = 0.0
    for callers in CALLERS:
        before = commits()
        rate, wait_ms = await measure(put, callers, seconds)
        first = first or rate
        grouped = rate * seconds / max(1, commits() - before)
        print(f"{callers:8} {rate:9.0f} {rate / first:6.1f} {grouped:10.1f} {wait_ms:7.2f}")

    print(f"{'callers':>8} {'gets/s':>9} {'ratio':>6} {'':>10} {'p50 ms':>7}")
    first = 0.0
    for callers in CALLERS:
        rate, wait_ms = await measure(lambda number: store.get(key_of(number)), callers, seconds)
        first = first or rate
        print(f"{callers:8} {rate:9.0f} {rate / first:6.1f} {'':10} {wait_ms:7.2f}")

    await asyncio.gather(*(store.put(f"/scan/{number:04}", VALUE) for number in range(1000)))
    operations: tuple[tuple[str, Callable[[int], Awaitable[object]]], ...] = (
        ("put", put),
        ("get", lambda number: store.get(key_of(number))),
        ("scan of 1,000", lambda _: store.scan("/scan/", "/scan//")),
    )
    for work_us in WORK_US:
        stop = asyncio.Event()
        await start_traffic(stop, work_us)
        for name, operation in operations:
            _, wait_ms = await measure(operation, 1, seconds)
            print(f"beside sockets with {work_us} us of work a message: {name} {wait_ms:.2f} ms")
        stop.set()
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    parser.add_argument("--uvloop", action="store_true", help="on uvloop, as the broker")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        factory = uvloop.new_event_loop if options.uvloop else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run(Path(directory), options.seconds))


if __name__ == "__main__":
    main()
