"""The stream reader on a broker, called as Spark calls it, but without Spark: many small batches.

While they are read the topic splits and merges, transactions commit, abort and stay open for a
while.  Every row that readers may see comes once, the rows of a key come in order, and a batch that
is read again later, by another reader, has the same rows.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import magnetar
from magnetar.spark.data_source import Pulsar5
from magnetar.spark.stream_reader import StreamReader
from tests.client.conftest import Topic
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline.conftest import MakeTopic

ROUNDS = 60
KEYS = 12
PATIENCE_S = 60
IDLE_STEPS = 3
"""Batches without rows after which everything that was written has been read."""


@dataclass
class Written:
    """Rows that readers are to see, of each key in order."""

    rows: list[tuple[str, int]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    def next_of(self, key: str) -> tuple[str, int]:
        self.counters[key] += 1
        return key, self.counters[key]


async def write(
    client: magnetar.Client, topic: Topic, luck: random.Random
) -> list[tuple[str, int]]:
    """Rounds of rows, some in transactions, some of which are aborted; between them reshapes."""
    written = Written()
    async with client.producer(topic.name) as producer:
        for _ in range(ROUNDS):
            rows = [
                written.next_of(f"k{luck.randrange(KEYS)}") for _ in range(luck.randrange(1, 30))
            ]
            how = luck.choice(["plain", "plain", "commit", "abort"])
            if how == "plain":
                for key, number in rows:
                    producer.send_nowait(b"%d" % number, key=key)
                await producer.flush()
            else:
                async with client.transaction() as transaction:
                    for key, number in rows:
                        producer.send_nowait(b"%d" % number, key=key, transaction=transaction)
                    if luck.random() < 0.3:
                        await reshape(topic, luck)
                    await producer.flush()
                    if how == "abort":
                        await transaction.abort()
            if how != "abort":
                written.rows += rows
            if luck.random() < 0.2:
                await reshape(topic, luck)
    return written.rows


async def reshape(topic: Topic, luck: random.Random) -> None:
    active = await topic.active_by_range()
    if len(active) < 2 or (len(active) < 6 and luck.random() < 0.5):
        await topic.split(luck.choice(active))
    else:
        at = luck.randrange(len(active) - 1)
        await topic.merge(active[at], active[at + 1])


@dataclass
class Steps:
    """What Spark does with a reader, batch after batch."""

    options: dict[str, str]
    batches: list[tuple[str, str, list[list[tuple[str, int]]]]] = field(default_factory=list)
    """Both offsets as texts, and the rows of each task."""

    def reader(self) -> StreamReader:
        source = Pulsar5(self.options)
        found = source.streamReader(source.schema())
        assert isinstance(found, StreamReader)
        return found

    def tasks(self, start: str, end: str) -> list[list[tuple[str, int]]]:
        reader = self.reader()
        tasks = []
        for partition in reader.partitions(json.loads(start), json.loads(end)):
            batches = [batch for batch in reader.read(partition) if batch.num_rows]
            rows = pa.Table.from_batches(batches).to_pylist() if batches else []
            tasks.append([(row["key"], int(row["value"])) for row in rows])
        return tasks

    def run(self, luck: random.Random, done: asyncio.Event) -> None:
        """Until everything is read; readers are made anew now and then, as after a restart."""
        reader = self.reader()
        start, idle = json.dumps(reader.initialOffset()), 0
        while idle < IDLE_STEPS:
            was_done = done.is_set()
            limit = ReadMaxRows(luck.choice([5, 50, 5000]))
            end = json.dumps(reader.latestOffset(json.loads(start), limit))
            if end == start:
                idle += was_done
                continue
            idle = 0
            self.batches.append((start, end, self.tasks(start, end)))
            start = end
            if luck.random() < 0.2:
                reader = self.reader()


@pytest.mark.parametrize(
    ("ordering", "chain"), [("key", "false"), ("key", "true"), ("none", "false")]
)
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_row_once_and_again_alike(
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    ordering: str,
    chain: str,
    seed: int,
) -> None:
    made = await topic(2)
    steps = Steps(
        {"serviceUrl": service.url, "topic": made.name, "ordering": ordering, "chain": chain}
    )
    done = asyncio.Event()
    reading = asyncio.create_task(asyncio.to_thread(steps.run, random.Random(seed), done))
    try:
        written = await write(client, made, random.Random(seed))
    finally:
        done.set()
    await asyncio.wait_for(reading, PATIENCE_S)
    found = [row for _, _, tasks in steps.batches for task in tasks for row in task]
    assert sorted(found) == sorted(written)
    if ordering == "key":
        check_order(steps, written)
    for start, end, tasks in random.Random(seed).sample(steps.batches, min(10, len(steps.batches))):
        again = await asyncio.to_thread(steps.tasks, start, end)
        assert sorted(row for task in again for row in task) == sorted(
            row for task in tasks for row in task
        )


def check_order(steps: Steps, written: list[tuple[str, int]]) -> None:
    """The tasks of a batch run side by side, so a key is in one of them."""
    for key in {key for key, _ in written}:
        numbers: list[int] = []
        for _, _, tasks in steps.batches:
            mine = [[number for each, number in task if each == key] for task in tasks]
            assert sum(1 for each in mine if each) <= 1, f"{key} is in two tasks of a batch"
            numbers += [number for each in mine for number in each]
        assert numbers == [number for each, number in written if each == key]
