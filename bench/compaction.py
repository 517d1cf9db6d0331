"""`python -m bench.compaction`: time, memory and disk of a compaction, and what others notice.

One embedded broker.  A topic gets `--keys` keys twice, in batches; then it is compacted, and once
more after a tenth of the keys has changed.  Meanwhile a producer of another topic sends a message
each 20 ms.

Rules: memory is the broker's resident set, read each 0.2 s; disk is that of its open files without
a name.  There is no pass mark.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.__main__ import OUTPUT, say
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.support.broker_process import BrokerProcess, running
from tests.support.waiting import until

KEYS: Final = 10_000_000
BATCH: Final = 1_000
WINDOW: Final = 64
VALUE_BYTES: Final = 20
SEND_PAUSE_S: Final = 0.02
SAMPLE_PAUSE_S: Final = 0.2
TIMEOUT_S: Final = 7200.0
TOPIC: Final = "persistent://public/default/compacted"
BESIDE: Final = "persistent://public/default/beside"
PATH: Final = "/persistent/public/default/compacted/compaction"
MIB: Final = 1024 * 1024


@dataclass
class Phase:
    """One phase: what it did, took and cost."""

    name: str
    messages: int
    seconds: float = 0.0
    memory_before_mib: float = 0.0
    memory_most_mib: float = 0.0
    unnamed_files_mib: float = 0.0
    send_median_ms: float = 0.0
    send_worst_ms: float = 0.0


class Observer:
    """Samples a broker's memory and files, and times SENDs to another topic."""

    def __init__(self, broker: BrokerProcess, pid: int, phase: Phase) -> None:
        self._broker = broker
        self._proc = Path(f"/proc/{pid}")
        self._phase = phase
        self._waits_ms: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Observer":
        self._phase.memory_before_mib = self._resident_mib()
        self._began_s = time.monotonic()
        self._tasks = [asyncio.create_task(each()) for each in (self._sample, self._send)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._phase.seconds = round(time.monotonic() - self._began_s, 2)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        waits = sorted(self._waits_ms)
        if waits:
            self._phase.send_median_ms = round(waits[len(waits) // 2], 2)
            self._phase.send_worst_ms = round(waits[-1], 2)

    async def _sample(self) -> None:
        while True:
            phase = self._phase
            phase.memory_most_mib = max(phase.memory_most_mib, self._resident_mib())
            phase.unnamed_files_mib = max(phase.unnamed_files_mib, self._unnamed_mib())
            await asyncio.sleep(SAMPLE_PAUSE_S)

    async def _send(self) -> None:
        client = await self._broker.connect()
        producer = await client.create_producer(BESIDE)
        while True:
            began_s = time.monotonic()
            await producer.send(b"x")
            self._waits_ms.append(1000 * (time.monotonic() - began_s))
            await asyncio.sleep(SEND_PAUSE_S)

    def _resident_mib(self) -> float:
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
        return 0.0

    def _unnamed_mib(self) -> float:
        total = 0
        for each in (self._proc / "fd").iterdir():
            try:
                found = each.stat()
            except OSError:
                continue
            if found.st_nlink == 0:
                total += found.st_size
        return round(total / MIB, 1)


async def fill(broker: BrokerProcess, first: int, count: int, word: bytes) -> None:
    """Send one message of each key, in batches."""
    client = await broker.connect()
    producer = await client.create_producer(TOPIC)
    receipts: list[object] = []
    for sent, start in enumerate(range(first, first + count, BATCH)):
        metadata = pb.MessageMetadata(num_messages_in_batch=min(BATCH, first + count - start))
        payload = build_batch(
            (
                pb.SingleMessageMetadata(partition_key=f"key-{key}", payload_size=0),
                b"%s-%d" % (word, key),
            )
            for key in range(start, min(start + BATCH, first + count))
        )
        number, frame = producer.frame(payload, metadata=metadata)
        producer.send_frame(number, frame, receipts.append)
        await until(partial(_has, receipts, sent - WINDOW), TIMEOUT_S, poll_s=0.001)
    await until(partial(_has, receipts, -(-count // BATCH)), TIMEOUT_S)
    await client.close()


def _has(receipts: list[object], count: int) -> bool:
    return len(receipts) >= count


async def compact(broker: BrokerProcess, phase: Phase, pid: int) -> None:
    """Compact the topic, observed."""
    async with Observer(broker, pid, phase):
        status, answer = await broker.rest("PUT", PATH)
        assert status == 204, answer
        while True:
            _, shown = await broker.rest("GET", PATH)
            assert isinstance(shown, dict)
            if shown["status"] != "RUNNING":
                break
            await asyncio.sleep(SAMPLE_PAUSE_S)
    assert shown["status"] == "SUCCESS", shown


async def measure(keys: int, directory: Path) -> list[Phase]:
    """All phases."""
    async with running(directory) as broker:
        pid = broker.pid
        phases = [Phase("idle", 0)]
        async with Observer(broker, pid, phases[0]):
            await asyncio.sleep(5)
        say(f"filling the topic with {2 * keys} messages")
        for word in (b"old", b"new"):
            await fill(broker, 0, keys, word)
        phases.append(Phase("all changed once", 2 * keys))
        await compact(broker, phases[-1], pid)
        await fill(broker, 0, keys // 10, b"newer")
        phases.append(Phase("a tenth again", keys + keys // 10))
        await compact(broker, phases[-1], pid)
        return phases


def show(phases: list[Phase]) -> None:
    """Print the phases as a table."""
    titles = "phase", "messages", "s", "MiB before", "most MiB", "file MiB", "SEND ms", "worst ms"
    table = Table(*titles)
    for each in phases:
        table.add_row(
            each.name,
            str(each.messages),
            f"{each.seconds:.1f}",
            f"{each.memory_before_mib:.0f}",
            f"{each.memory_most_mib:.0f}",
            f"{each.unnamed_files_mib:.0f}",
            f"{each.send_median_ms:.1f}",
            f"{each.send_worst_ms:.1f}",
        )
    Console().print(table)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("compaction.json"))
    given = parser.parse_args()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compaction-", dir=OUTPUT.parent) as directory:
        phases = asyncio.run(measure(given.keys, Path(directory)))
    show(phases)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps([asdict(each) for each in phases], indent=2) + "\n")


if __name__ == "__main__":
    main()
