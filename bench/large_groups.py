"""`python -m bench.large_groups`: what others wait while a group of the largest size ends.

One embedded broker.  A group of attempts writes a message to each segment of a topic and commits,
with all of them as winners; the broker cleans up behind it; the same again, and this time the
broker is killed after the commit and loads the segments from what is there.  A client in a process
of its own asks on all the while (`bench.bystander`).

Rules: the longest PING of a phase bounds the longest callback of the broker's loop from above; the
other requests go through the metadata store too.  The defaults are the largest group that is
allowed (docs/transactions.md).  There is no pass mark.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.__main__ import OUTPUT, say
from magnetar import connect
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from tests.support.broker_process import ROOT, BrokerProcess, running
from tests.support.child_process import HOST
from tests.support.group_client import GroupClient
from tests.support.key_client import Kind, Txn
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawProducer

WINNERS: Final = 32_768
SEGMENTS: Final = 4
AT_ONCE: Final = 128
TIMEOUT_MS: Final = 3_600_000
ANSWER_TIMEOUT_S: Final = 600.0
CLEANED_TIMEOUT_S: Final = 1800.0
RECORDS: Final = "pulsar_txn_metadata_store_outstanding_op_records"
TOPIC: Final = "large-groups"
BESIDE: Final = "beside"
CLEANED_POLL_S: Final = 0.5
REQUESTS: Final = ("PING", "NEW_TXN", "SEND", "END_TXN")


@dataclass(frozen=True)
class Phase:
    """A part of the load, by the machine's monotonic clock."""

    name: str
    begin_s: float
    end_s: float


class Phases:
    """The phases so far, one after the other."""

    def __init__(self) -> None:
        self.all: list[Phase] = []
        self._begin_s = time.monotonic()

    def end(self, name: str) -> None:
        """What went on since the last call was this."""
        now_s = time.monotonic()
        self.all.append(Phase(name, self._begin_s, now_s))
        self._begin_s = now_s
        say(f"{name}: {self.all[-1].end_s - self.all[-1].begin_s:.1f} s")


async def segments_of(broker: BrokerProcess, topic: str) -> list[str]:
    """The names of the topic's active segments."""
    async with await connect(f"pulsar://{HOST}:{broker.port}") as client:
        return [each.topic for each in (await client.layout(topic)).active]


async def write_group(
    client: GroupClient, nonce: str, count: int, segments: Sequence[str]
) -> list[Txn]:
    """Begin that many attempts, each with a message in each segment."""
    producers = [await client.raw.create_producer(segment) for segment in segments]
    attempts: list[Txn] = []
    for first in range(0, count, AT_ONCE):
        some = range(first, min(first + AT_ONCE, count))
        begun = await asyncio.gather(
            *(client.begin_attempt(nonce, timeout_ms=TIMEOUT_MS) for _ in some)
        )
        here = [(each.txnid_most_bits, each.txnid_least_bits) for each in begun]
        await asyncio.gather(*(write(producers, attempt) for attempt in here))
        attempts += here
    return attempts


async def write(producers: Sequence[RawProducer], attempt: Txn) -> None:
    """A message of the attempt in each segment."""
    most, least = attempt
    send = pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least)
    metadata = pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least)
    await asyncio.gather(*(each.send(b"x", send=send, metadata=metadata) for each in producers))


async def commit(
    client: GroupClient, nonce: str, batch: int, attempts: Sequence[Txn], segments: Sequence[str]
) -> None:
    """Commit the group with all of these attempts; what they wrote is told in totals."""
    command = pb.CommandCommitGroup(
        tc_id=client.coordinator,
        key=client.key,
        epoch=client.epoch,
        nonce=nonce,
        group_least_bits=TxnId(*attempts[0]).group.least,
        query="q",
        batch=batch,
        winners=[pb.GroupWinner(attempt_least_bits=least) for _, least in attempts],
        totals=[pb.SegmentCount(segment=each, messages=len(attempts)) for each in segments],
    )
    await client.raw.request(Kind.COMMIT_GROUP, command)


async def run_groups(broker: BrokerProcess, winners: int, segments: Sequence[str]) -> Phases:
    """Two groups: one that is cleaned up, one that a broker finds when it starts."""
    phases = Phases()
    for batch, nonce in enumerate(("cleaned", "loaded")):
        raw = await RawClient.open(HOST, broker.port, timeout_s=ANSWER_TIMEOUT_S)
        client = GroupClient(raw, "large-groups")
        await client.open()
        attempts = await write_group(client, nonce, winners, segments)
        phases.end(f"attempts begin and write ({nonce})")
        await commit(client, nonce, batch, attempts, segments)
        phases.end(f"commit ({nonce})")
        if nonce == "cleaned":
            await cleaned_up(broker)
            phases.end("cleaning up")
    broker.kill()
    await broker.start()
    phases.end("kill and start")
    raw = await RawClient.open(HOST, broker.port, timeout_s=ANSWER_TIMEOUT_S)
    await asyncio.gather(*(raw.create_producer(segment) for segment in segments))
    phases.end("segments load")
    await cleaned_up(broker)
    phases.end("cleaning up after the start")
    return phases


async def cleaned_up(broker: BrokerProcess) -> None:
    """Return when no claims are left but those of the client beside."""
    deadline_s = time.monotonic() + CLEANED_TIMEOUT_S
    while await broker.metric(RECORDS) > 1:
        assert time.monotonic() < deadline_s, f"claims are left after {CLEANED_TIMEOUT_S:.0f} s"
        await asyncio.sleep(CLEANED_POLL_S)


@contextmanager
def bystander(broker: BrokerProcess, topic: str, output: Path) -> Iterator[None]:
    """A client beside, whose times go to that file."""
    command = [sys.executable, "-m", "bench.bystander"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(broker.port), "--topic", topic], cwd=ROOT, stdout=file
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


Longest = dict[str, dict[str, float]]


def longest_of(phases: Sequence[Phase], lines: Sequence[str]) -> Longest:
    """By phase and request, the longest answer in seconds; a request counts where it was asked."""
    longest: Longest = {phase.name: {} for phase in phases}
    for line in lines:
        asked_s, what, took_s = json.loads(line)
        for phase in phases:
            if phase.begin_s <= asked_s < phase.end_s:
                found = longest[phase.name]
                found[what] = max(found.get(what, 0.0), took_s)
    return longest


async def measure(winners: int, segment_count: int, directory: Path) -> tuple[Phases, Longest]:
    """All of it on a broker of its own."""
    async with running(directory) as broker:
        await broker.create_scalable(TOPIC, segment_count)
        await broker.create_scalable(BESIDE, 1)
        (beside,) = await segments_of(broker, BESIDE)
        output = directory / "beside.jsonl"
        with bystander(broker, beside, output):
            phases = await run_groups(broker, winners, await segments_of(broker, TOPIC))
        return phases, longest_of(phases.all, output.read_text().splitlines())


def print_longest(phases: Sequence[Phase], longest: Longest) -> None:
    """A line for each phase."""
    table = Table(title="Longest answer to a client beside a large group, in seconds")
    table.add_column("")
    table.add_column("the phase took", justify="right")
    for what in REQUESTS:
        table.add_column(what, justify="right")
    for phase in phases:
        times = (longest[phase.name].get(what) for what in REQUESTS)
        cells = ("" if time_s is None else f"{time_s:.3f}" for time_s in times)
        table.add_row(phase.name, f"{phase.end_s - phase.begin_s:.1f}", *cells)
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.large_groups", description=__doc__)
    parser.add_argument("--winners", type=int, default=WINNERS)
    parser.add_argument("--segments", type=int, default=SEGMENTS)
    options = parser.parse_args()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="large-groups-", dir=OUTPUT.parent))
    try:
        phases, longest = asyncio.run(measure(options.winners, options.segments, directory))
        print_longest(phases.all, longest)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
