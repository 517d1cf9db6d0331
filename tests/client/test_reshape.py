"""Asynchronous senders at full rate while segments split and merge, ten times, and readers.

No message is lost or duplicated, and messages of one key stay in order.  With the official client
they do not: `tests/java/test_reshape.py` counts its breaks.
"""

import asyncio
import itertools
import random
from collections import Counter

import pytest

import magnetar
from tests.client.conftest import MakeTopic, Topic
from tests.conftest import Report
from tests.support.waiting import until

KEYS = 64
CHANGES = 10
RECEIVE_S = 30
MAX_SENT = 150_000
"""Beyond it senders stop, on a machine that changes layouts slowly."""


class Senders:
    """All keys in turn, as fast as there is room; `sent` counts by key."""

    def __init__(self, producer: magnetar.Producer[str]) -> None:
        self.sent = Counter[str]()
        self.longest_gap_s = 0.0
        self._producer = producer
        self._stopping = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        for number in itertools.count():
            if self._stopping or number >= MAX_SENT:
                break
            await self._producer.room()
            now = loop.time()
            self.longest_gap_s = max(self.longest_gap_s, now - last)
            last = now
            key = f"k{number % KEYS}"
            self._producer.send_nowait(f"{key}:{self.sent[key]}", key=key)
            self.sent[key] += 1
            if number % 100 == 0:
                await asyncio.sleep(0)  # others have work to do too
        await self._producer.flush()

    def stop(self) -> None:
        self._stopping = True


class Reader:
    """Checks the order of each key as messages come; `read` counts by key."""

    def __init__(self) -> None:
        self.read = Counter[str]()
        self.wrong: list[str] = []

    def take(self, value: str) -> None:
        key, _, number = value.partition(":")
        if int(number) != self.read[key]:
            self.wrong.append(f"{key}: {number} came when {self.read[key]} was due")
        self.read[key] = max(self.read[key], int(number) + 1)


async def read_in_order(consumer: magnetar.StreamConsumer[str], reader: Reader) -> None:
    while True:
        batch = await consumer.receive_batch(max_messages=1000, timeout_s=RECEIVE_S)
        for message in batch:
            reader.take(message.value)
        if batch:
            await consumer.ack(batch[-1])


async def read_shared(consumer: magnetar.QueueConsumer[str], seen: Counter[str]) -> None:
    while True:
        for message in await consumer.receive_batch(max_messages=1000, timeout_s=RECEIVE_S):
            seen[message.value] += 1
            await consumer.ack(message)


async def change_layout(topic: Topic, rng: random.Random) -> None:
    """A split or a merge, whichever is possible; both come up."""
    active = await topic.active_by_range()
    if len(active) < 2 or (len(active) < 6 and rng.random() < 0.5):
        await topic.split(rng.choice(active))
    else:
        at = rng.randrange(len(active) - 1)
        await topic.merge(active[at], active[at + 1])


@pytest.mark.magnetar_only(
    "what it seals under load stays fenced a while, and its readers then wait too long"
)
async def test_ten_splits_and_merges_under_full_load(
    client: magnetar.Client, topic: MakeTopic, report: Report
) -> None:
    made = await topic(segments=2)
    rng = random.Random(7)
    async with (
        client.stream_consumer(
            made.name, "ordered", schema=str, initial_position="earliest"
        ) as stream,
        client.queue_consumer(
            made.name, "shared", schema=str, initial_position="earliest"
        ) as shared,
        client.producer(made.name, schema=str) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        senders, reader, seen = Senders(producer), Reader(), Counter[str]()
        reading = [
            tasks.create_task(read_in_order(stream, reader)),
            tasks.create_task(read_shared(shared, seen)),
        ]
        sending = tasks.create_task(senders.run())
        for number in range(CHANGES):
            least = reader.read.total() + 10 * KEYS
            await change_layout(made, rng)
            await until(lambda least=least: reader.read.total() >= least or sending.done())  # type: ignore[misc]
            assert not sending.done(), f"senders were done at change {number}"
        senders.stop()
        await sending
        total = senders.sent.total()
        await until(lambda: reader.read.total() >= total and len(seen) >= total)
        for task in reading:
            task.cancel()
    assert not reader.wrong, reader.wrong[:10]
    assert reader.read == senders.sent
    assert set(seen) == {f"{key}:{n}" for key, count in senders.sent.items() for n in range(count)}
    assert max(seen.values()) == 1
    report(
        f"{CHANGES} layout changes under this project's client: {total} messages, 0 order breaks, "
        f"longest pause between two sends {senders.longest_gap_s * 1000:.0f} ms"
    )
