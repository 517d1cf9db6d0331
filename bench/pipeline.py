"""`python -m bench.pipeline`: what Spark, our client, source and sink do with the same rows.

Rules: one broker and one session (`local[2,4]`, 1 GiB) for all; each shape runs once to warm up,
then all shapes in turn, `--runs` times, so that load which comes and goes meets each of them; the
median counts, and the load before each run is kept.  Rates are rows a second, begun when the query
is, so with Spark's own start of a job.  A sink writes to a topic of its own each time.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

import magnetar
import pipeline
from bench.__main__ import OUTPUT, machine, running, say
from bench.__main__ import magnetar as magnetar_process
from bench.measures import create_topic
from bench.pipeline_readers import FORMAT, PATIENCE_S, BenchReaders
from magnetar.reads import MessageColumns, take_apart
from tests.support.broker_process import ROOT
from tests.support.child_process import HOST

SCALABLE: Final = "topic://public/default/"
KEYS: Final = 1000
BATCHES: Final = 5
"""Of a query from topic to topic, about."""
RECEIVED: Final = 1000
QUICK_ROWS: Final = 20_000
RATIOS: Final = (
    ("source", "client, ranges", "goal 0.5"),
    ("source", "reader: poll", ""),
    ("source", "reader: message", ""),
    ("source", "generator", ""),
    ("sink, exactly once", "sink, plain", "goal 0.8"),
    ("sink, exactly once", "generator", ""),
)


@dataclass
class Ground:
    """What all shapes of one size and number of segments stand on."""

    spark: SparkSession
    url: str
    new_topic: Callable[[], str]
    rows: int
    size: int
    filled: str = ""
    shares: str = ""

    def generated(self) -> DataFrame:
        """Rows of `size` bytes that Spark makes."""
        value = f"rpad(cast(id AS string), {self.size}, 'x')"
        return self.spark.range(self.rows, numPartitions=2).selectExpr(
            f"concat('k', id % {KEYS}) AS key", f"cast({value} AS binary) AS value"
        )

    def source(self, topic: str) -> DataFrame:
        """A topic's rows."""
        reader = self.spark.read.format("pulsar5").schema("key string, value binary")
        return reader.options(serviceUrl=self.url, topic=topic).load()

    def sink(self, topic: str, **options: str) -> None:
        """The generator's rows into a topic."""
        writer = self.generated().write.format("pulsar5").mode("append")
        writer.options(serviceUrl=self.url, topic=topic, **options).save()


def noop(rows: DataFrame) -> None:
    """Read them all, and do nothing with them."""
    rows.write.format("noop").mode("overwrite").save()


def generator(ground: Ground) -> None:
    noop(ground.generated())


def source(ground: Ground) -> None:
    noop(ground.source(ground.filled))


def as_others_read(ground: Ground, shape: str) -> None:
    reader = ground.spark.read.format(FORMAT)
    noop(reader.options(serviceUrl=ground.url, shape=shape, shares=ground.shares).load())


def sink_plain(ground: Ground) -> None:
    ground.sink(ground.new_topic(), delivery="at-least-once")


def sink_once(ground: Ground) -> None:
    topic = ground.new_topic()
    ground.sink(topic, **pipeline.open_key(ground.url, topic.rpartition("/")[2]).options)


def topic_to_topic(ground: Ground) -> None:
    """A stream, exactly once, with positions."""
    topic = ground.new_topic()
    key = pipeline.open_key(ground.url, topic.rpartition("/")[2])
    reader = ground.spark.readStream.format("pulsar5").schema("key string, value binary")
    limit = ground.rows // BATCHES
    rows = reader.options(
        serviceUrl=ground.url, topic=ground.filled, maxRowsPerTrigger=limit
    ).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            rows.writeStream.format("pulsar5")
            .options(**key.options)
            .options(serviceUrl=ground.url, topic=topic, trackPositions="true")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


def client_ranges(ground: Ground) -> None:
    """Our client without Spark: what tasks of the source do, in one process."""
    asyncio.run(_read_ranges(ground))


async def _read_ranges(ground: Ground) -> None:
    async with magnetar.connect(ground.url) as client:
        read = 0
        for segment in (await client.layout(ground.filled)).segments.values():
            plan = await client.plan_range(segment.topic)
            columns = MessageColumns()
            async for entries in client.read_range(segment.topic, plan.start, plan.end):
                for entry in entries:
                    read += take_apart(entry, columns)
                columns.clear()
    assert read == ground.rows, f"{read} of {ground.rows} rows"


def client_messages(ground: Ground) -> None:
    """Our client without Spark, by a consumer."""
    asyncio.run(_receive(ground))


async def _receive(ground: Ground) -> None:
    async with (
        magnetar.connect(ground.url) as client,
        client.checkpoint_consumer(ground.filled) as consumer,
    ):
        left = ground.rows
        while left:
            left -= len(await consumer.receive_batch(RECEIVED, timeout_s=PATIENCE_S))


SHAPES: Final[Mapping[str, Callable[[Ground], None]]] = {
    "generator": generator,
    "client, ranges": client_ranges,
    "client, messages": client_messages,
    "source": source,
    "reader: poll": lambda ground: as_others_read(ground, "poll"),
    "reader: message": lambda ground: as_others_read(ground, "message"),
    "sink, plain": sink_plain,
    "sink, exactly once": sink_once,
    "topic to topic": topic_to_topic,
}
Figures = dict[str, dict[str, list[float]]]


def measured(ground: Ground, shapes: Sequence[str], runs: int) -> Figures:
    """Rows a second of each run, and the load before it."""
    found: Figures = {shape: {"rows_per_s": [], "load_before": []} for shape in shapes}
    for run in range(runs + 1):
        for shape in shapes:
            load = os.getloadavg()[0]
            begin = time.perf_counter()
            SHAPES[shape](ground)
            took_s = time.perf_counter() - begin
            if run:
                found[shape]["rows_per_s"].append(ground.rows / took_s)
                found[shape]["load_before"].append(load)
    return found


async def _shares(url: str, topic: str) -> str:
    """Each segment and how many messages it has."""
    async with magnetar.connect(url) as client:
        segments = (await client.layout(topic)).segments.values()
        plans = [await client.plan_range(each.topic) for each in segments]
    pairs = zip(segments, plans, strict=True)
    return "\n".join(f"{segment.topic} {plan.messages}" for segment, plan in pairs)


def filled(ground: Ground) -> Ground:
    """With a topic that has the rows."""
    ground.filled = ground.new_topic()
    ground.sink(ground.filled, delivery="at-least-once")
    ground.shares = asyncio.run(_shares(ground.url, ground.filled))
    return ground


def session(directory: Path) -> SparkSession:
    """Spark as it is measured."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT), SPARK_LOCAL_IP=HOST)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", HOST)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(directory))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    pipeline.register(spark)
    spark.dataSource.register(BenchReaders)
    return spark


def print_figures(title: str, figures: Figures) -> None:
    """Medians with their range, and the ratios that have goals."""
    table = Table(title=title)
    for column in ("", "rows/s", "least", "most", "load"):
        table.add_column(column, justify="right" if column else "left")
    medians = {shape: statistics.median(each["rows_per_s"]) for shape, each in figures.items()}
    for shape, each in figures.items():
        rates = each["rows_per_s"]
        load = statistics.median(each["load_before"])
        cells = (medians[shape], min(rates), max(rates))
        table.add_row(shape, *(f"{cell:,.0f}" for cell in cells), f"{load:.1f}")
    console = Console()
    console.print(table)
    for first, second, goal in RATIOS:
        if first in medians and second in medians:
            ratio = medians[first] / medians[second]
            console.print(f"{first} by {second}: {ratio:.2f} {f'({goal})' if goal else ''}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: shows that it works")
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bytes", type=int, action="append", help="100 and 1024 by default")
    parser.add_argument("--segments", type=int, action="append", help="2 and 8 by default")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="measure only this")
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("pipeline.json"))
    given = parser.parse_args()
    if given.quick:
        given.rows, given.runs = QUICK_ROWS, 1
        given.bytes, given.segments = given.bytes or [100], given.segments or [2]
    return given


def main() -> int:
    given = options()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="magnetar-", dir=OUTPUT.parent))
    results: dict[str, Figures] = {}
    try:
        with running(magnetar_process(directory)) as broker:
            spark = session(directory / "spark")
            for size in given.bytes or (100, 1024):
                for segments in given.segments or (2, 8):

                    def new_topic(count: int = segments) -> str:
                        name = f"bench-{uuid.uuid4().hex[:8]}"
                        create_topic(broker, name, count)
                        return SCALABLE + name

                    title = f"{given.rows:,} rows of {size} B, {segments} segments"
                    say(title)
                    ground = filled(Ground(spark, broker.url, new_topic, given.rows, size))
                    results[title] = measured(ground, given.shape or [*SHAPES], given.runs)
                    print_figures(title, results[title])
            spark.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    document = {"machine": machine(), "results": results}
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"as JSON: {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
