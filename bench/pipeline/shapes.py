"""The same rows, by each way that they can go: Spark alone, the client alone, source, sink, both.

Rules: each shape runs with fewer rows to warm up, then all shapes in turn, `runs` times, so that
load which comes and goes meets each of them; the median counts, and the load before each run is
kept.  What a shape has written is deleted when it is measured.  Rates are rows a second, begun when
the query is, so with Spark's own start of a job.  Streams write epochs that last about `EPOCH_S`,
and their first one is not counted.  A reader that waits for each message by itself has a part of
the rows, for it takes as long as all the others.
"""

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame

import magnetar
from bench.pipeline.ground import Ground, row_of
from bench.pipeline.readers import FORMAT, PATIENCE_S
from bench.pipeline.streams import measured_epochs
from magnetar.reads import MessageColumns, take_apart

BATCHES: Final = 5
"""Of a query from topic to topic, about."""
RECEIVED: Final = 1000
EPOCH_S: Final = 5.0
PART: Final = 5
"""One row in so many is read message by message."""
WARM_PART: Final = 20
"""One row in so many warms up."""
RATIOS: Final = (
    ("source", "client, ranges", "goal 0.5"),
    ("source", "reader: poll", ""),
    ("source", "reader: message", ""),
    ("source", "generator", ""),
    ("epochs, exactly once", "epochs, plain", "goal 0.8"),
    ("sink, exactly once", "sink, plain", ""),
    ("sink, exactly once", "generator", ""),
)


@dataclass
class Rows:
    """So many rows of one size, and a topic of so many segments that has them."""

    ground: Ground
    rows: int
    size: int
    segments: int
    filled: str = ""
    shares: str = ""
    plain_rows_per_s: float = 0.0
    """Of the sink, when it was last asked."""

    @contextmanager
    def written(self) -> Iterator[None]:
        """With the topic."""
        with self.topic() as self.filled:
            self.ground.sink(self.generated(), self.filled, delivery="at-least-once")
            self.shares = asyncio.run(_shares(self.ground.url, self.filled))
            yield

    def topic(self) -> AbstractContextManager[str]:
        """An empty one of as many segments, for as long as it is needed."""
        return self.ground.topic(self.segments)

    def generated(self) -> DataFrame:
        """The rows, by Spark."""
        return self.ground.generated(self.rows, self.size)

    def source(self) -> DataFrame:
        """The topic's rows."""
        reader = self.ground.spark.read.format("pulsar5").schema("key string, value binary")
        return reader.options(serviceUrl=self.ground.url, topic=self.filled).load()


async def _shares(url: str, topic: str) -> str:
    """Each segment and how many messages it has."""
    async with magnetar.connect(url) as client:
        segments = (await client.layout(topic)).segments.values()
        plans = [await client.plan_range(each.topic) for each in segments]
    pairs = zip(segments, plans, strict=True)
    return "\n".join(f"{segment.topic} {plan.messages}" for segment, plan in pairs)


def _noop(rows: DataFrame) -> None:
    """Read them all, and do nothing with them."""
    rows.write.format("noop").mode("overwrite").save()


def _timed(work: Callable[[], object], rows: int) -> float:
    begin = time.perf_counter()
    work()
    return rows / (time.perf_counter() - begin)


def _generator(of: Rows) -> float:
    return _timed(lambda: _noop(of.generated()), of.rows)


def _source(of: Rows) -> float:
    return _timed(lambda: _noop(of.source()), of.rows)


def _poll(of: Rows) -> float:
    return _as_others_read(of, "poll", 1)


def _message(of: Rows) -> float:
    return _as_others_read(of, "message", PART)


def _as_others_read(of: Rows, shape: str, part: int) -> float:
    shares = [line.rpartition(" ") for line in of.shares.splitlines()]
    asked = [(topic, int(count) // part) for topic, _, count in shares]
    reader = of.ground.spark.read.format(FORMAT).options(
        serviceUrl=of.ground.url,
        shape=shape,
        shares="\n".join(f"{topic} {count}" for topic, count in asked),
    )
    return _timed(lambda: _noop(reader.load()), sum(count for _, count in asked))


def _sink_plain(of: Rows) -> float:
    with of.topic() as topic:
        of.plain_rows_per_s = _timed(
            lambda: of.ground.sink(of.generated(), topic, delivery="at-least-once"), of.rows
        )
    return of.plain_rows_per_s


def _sink_once(of: Rows) -> float:
    with of.topic() as topic:
        key = of.ground.key(topic)
        return _timed(lambda: of.ground.sink(of.generated(), topic, **key), of.rows)


def _epochs_plain(of: Rows) -> float:
    with of.topic() as topic:
        return _epochs(of, topic, {"delivery": "at-least-once"})


def _epochs_once(of: Rows) -> float:
    with of.topic() as topic:
        return _epochs(of, topic, of.ground.key(topic))


def _epochs(of: Rows, topic: str, options: Mapping[str, str]) -> float:
    """A stream of Spark's own rows, of which each epoch has about `EPOCH_S` of writing."""
    each = max(1, int((of.plain_rows_per_s or of.rows) * EPOCH_S))
    generated = (
        of.ground.spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=each, numPartitions=2)
        .load()
        .selectExpr(*row_of("value", of.size))
    )
    options = {**options, "serviceUrl": of.ground.url, "topic": topic}
    return measured_epochs(generated, options, math.ceil(of.rows / each))


def _topic_to_topic(of: Rows) -> float:
    """A stream, exactly once, with positions."""
    rows = of.ground.stream(of.filled, maxRowsPerTrigger=str(max(1, of.rows // BATCHES)))
    with of.topic() as topic, tempfile.TemporaryDirectory() as checkpoint:
        key = of.ground.key(topic)
        writer = (
            rows.writeStream.format("pulsar5")
            .options(**key)
            .options(serviceUrl=of.ground.url, topic=topic, trackPositions="true")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
        )
        return _timed(lambda: writer.start().awaitTermination(), of.rows)


def _client_ranges(of: Rows) -> float:
    """Our client without Spark: what tasks of the source do, in one process."""
    return _timed(lambda: asyncio.run(_read_ranges(of)), of.rows)


async def _read_ranges(of: Rows) -> None:
    async with magnetar.connect(of.ground.url) as client:
        read = 0
        for segment in (await client.layout(of.filled)).segments.values():
            plan = await client.plan_range(segment.topic)
            columns = MessageColumns()
            async for entries in client.read_range(segment.topic, plan.start, plan.end):
                for entry in entries:
                    read += take_apart(entry, columns)
                columns.clear()
    assert read == of.rows, f"{read} of {of.rows} rows"


def _client_messages(of: Rows) -> float:
    """Our client without Spark, by a consumer."""
    return _timed(lambda: asyncio.run(_receive(of)), of.rows)


async def _receive(of: Rows) -> None:
    async with (
        magnetar.connect(of.ground.url) as client,
        client.checkpoint_consumer(of.filled) as consumer,
    ):
        left = of.rows
        while left:
            left -= len(await consumer.receive_batch(RECEIVED, timeout_s=PATIENCE_S))


SHAPES: Final[Mapping[str, Callable[[Rows], float]]] = {
    "generator": _generator,
    "client, ranges": _client_ranges,
    "client, messages": _client_messages,
    "source": _source,
    "reader: poll": _poll,
    "reader: message": _message,
    "sink, plain": _sink_plain,
    "sink, exactly once": _sink_once,
    "epochs, plain": _epochs_plain,
    "epochs, exactly once": _epochs_once,
    "topic to topic": _topic_to_topic,
}
"""Each answers with its rows a second."""
Figures = dict[str, dict[str, list[float]]]


def measured(of: Rows, shapes: Sequence[str], runs: int) -> Figures:
    """Rows a second of each run, and the load before it."""
    found: Figures = {shape: {"rows_per_s": [], "load_before": []} for shape in shapes}
    of.plain_rows_per_s = _warmed_up(of, shapes)
    with of.written():
        for _ in range(runs):
            for shape in shapes:
                found[shape]["load_before"].append(os.getloadavg()[0])
                found[shape]["rows_per_s"].append(SHAPES[shape](of))
    return found


def _warmed_up(of: Rows, shapes: Sequence[str]) -> float:
    """After a run of each with fewer rows; how fast the sink was."""
    warm = Rows(of.ground, max(of.segments, of.rows // WARM_PART), of.size, of.segments)
    with warm.written():
        _sink_plain(warm)
        for shape in shapes:
            SHAPES[shape](warm)
    return warm.plain_rows_per_s
