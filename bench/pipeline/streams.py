"""Streams: epochs of the sink, catching up over many generations, and how soon rows are visible.

Rules: what Spark tells of each batch counts (`triggerExecution`), the first one not; visible is
what a consumer of the output has in its hands, by the clock of this machine.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import magnetar
from bench.pipeline.ground import Ground

LOOK_S: Final = 1
SENT_AT_ONCE: Final = 10
"""Rows that the producer of `visible` sends at a time."""
RECEIVED: Final = 1000
SETTLED_S: Final = 10.0
"""What is published before is not counted: the query begins."""


def measured_epochs(rows: DataFrame, options: Mapping[str, str], epochs: int) -> float:
    """Rows a second of a stream into the sink, over so many epochs after the first."""
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = _into(rows, options, checkpoint)
        query = writer.start()
        try:
            _await(query, lambda: len(query.recentProgress) > epochs)
            counted = query.recentProgress[1 : epochs + 1]
        finally:
            query.stop()
    took_ms = sum(each.durationMs["triggerExecution"] for each in counted)
    return float(sum(each.numInputRows for each in counted) / took_ms * 1000)


def _into(rows: DataFrame, options: Mapping[str, str], checkpoint: str) -> DataStreamWriter:
    writer = rows.writeStream.format("pulsar5").options(**options)
    return writer.option("checkpointLocation", checkpoint)


def _await(query: StreamingQuery, done: Callable[[], bool]) -> None:
    """Raises what the query failed with."""
    while not done():
        if query.awaitTermination(LOOK_S):
            raise AssertionError("the query ended by itself")


CATCH_UPS: Final[Mapping[str, Mapping[str, str]]] = {
    "by key": {},
    "by key, chained": {"chain": "true"},
    "without order": {"ordering": "none"},
}
CatchUp = dict[str, dict[str, list[float]]]


def generations(ground: Ground, count: int, rows: int) -> str:
    """A topic that was split and merged in turn, `count` generations with a share of rows each."""
    topic = ground.new_topic(1)
    asyncio.run(_generations(ground, topic, count, rows // count))
    return topic


async def _generations(ground: Ground, topic: str, count: int, rows: int) -> None:
    value = b"x" * 100
    async with magnetar.connect(ground.url) as client:
        for generation in range(count):
            if generation:
                active = (await client.layout(topic)).active
                ids = [str(each.segment_id) for each in active]
                step = f"split/{ids[0]}" if len(ids) == 1 else f"merge/{'/'.join(ids)}"
                await asyncio.to_thread(ground.reshape, topic, step)
            async with client.producer(topic) as producer:
                keys = [f"k{number % 1000}" for number in range(rows)]
                await (await producer.send_many([value] * rows, keys=keys)).stored()


def catch_up(ground: Ground, topic: str, rows: int, runs: int) -> CatchUp:
    """Rows a second and batches of a stream that begins at the beginning, in turn."""
    found: CatchUp = {name: {"rows_per_s": [], "batches": []} for name in CATCH_UPS}
    for run in range(runs + 1):
        for name, options in CATCH_UPS.items():
            begin = time.perf_counter()
            read, batches = _caught_up(ground, topic, options)
            took_s = time.perf_counter() - begin
            assert read == rows, f"{name}: {read} of {rows} rows"
            if run:
                found[name]["rows_per_s"].append(rows / took_s)
                found[name]["batches"].append(batches)
    return found


def _caught_up(ground: Ground, topic: str, options: Mapping[str, str]) -> tuple[int, int]:
    rows = ground.stream(topic, **options)
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = rows.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        told = query.recentProgress
    return sum(each.numInputRows for each in told), len(told)


def visible(ground: Ground, rows_per_s: int, last_s: float) -> dict[str, float]:
    """From publishing a row to having what a query made of it: milliseconds, p50 and p99.

    `direct_*` are the same rows, consumed as they were published.
    """
    source, target = ground.new_topic(2), ground.new_topic(2)
    key = ground.key(target)
    rows = ground.stream(source)
    with tempfile.TemporaryDirectory() as checkpoint:
        options = {**key, "serviceUrl": ground.url, "topic": target, "trackPositions": "true"}
        query = _into(rows, options, checkpoint).start()
        try:
            direct, through = asyncio.run(_latencies(ground, source, target, rows_per_s, last_s))
            batches = [each.durationMs["triggerExecution"] for each in query.recentProgress]
        finally:
            query.stop()
    return {
        "direct_p50_ms": _percentile(direct, 50),
        "direct_p99_ms": _percentile(direct, 99),
        "query_p50_ms": _percentile(through, 50),
        "query_p99_ms": _percentile(through, 99),
        "batch_p50_ms": statistics.median(batches),
    }


async def _latencies(
    ground: Ground, source: str, target: str, rows_per_s: int, last_s: float
) -> tuple[list[float], list[float]]:
    count = int(rows_per_s * (SETTLED_S + last_s))
    async with magnetar.connect(ground.url) as client, asyncio.TaskGroup() as tasks:
        direct = tasks.create_task(_received(client, source, count))
        through = tasks.create_task(_received(client, target, count))
        tasks.create_task(_published(client, source, rows_per_s, count))
    settled = int(rows_per_s * SETTLED_S)
    return direct.result()[settled:], through.result()[settled:]


async def _published(client: magnetar.Client, topic: str, rows_per_s: int, count: int) -> None:
    """At a steady rate, each row with the time at which it was to be sent."""
    async with client.producer(topic) as producer:
        begin = time.time()
        for first in range(0, count, SENT_AT_ONCE):
            due = begin + first / rows_per_s
            await asyncio.sleep(max(0.0, due - time.time()))
            for _ in range(min(SENT_AT_ONCE, count - first)):
                producer.send_nowait(repr(due).encode(), key=f"k{random.randrange(1000)}")
        await producer.flush()


async def _received(client: magnetar.Client, topic: str, count: int) -> list[float]:
    """Milliseconds from publishing to here, in the order of publishing."""
    took: list[tuple[float, float]] = []
    async with client.checkpoint_consumer(topic) as consumer:
        while len(took) < count:
            messages = await consumer.receive_batch(RECEIVED, timeout_s=60)
            now = time.time()
            sent = [float(message.value) for message in messages]
            took += [(each, (now - each) * 1000) for each in sent]
    return [ms for _, ms in sorted(took)]


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
