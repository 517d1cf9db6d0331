"""The compaction as a job of Spark: a batch read up to a cut, one row of each key, one write."""

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.window import WindowSpec

import magnetar
import magnetar.spark
from magnetar.errors import MagnetarError
from magnetar.spark.compact.combine import combine
from magnetar.spark.compact.request import Compaction, job_id, key_name
from magnetar.spark.connecting import process_client
from magnetar.spark.cut import enter_children
from magnetar.spark.cut_json import cut_of_text, text_of
from magnetar.spark.data_source import FORMAT
from magnetar.spark.errors import InvalidOption
from magnetar.spark.key_groups import KeyGroups
from magnetar.spark.keys import OpenedKey
from magnetar.spark.options import Connection, Options
from magnetar.spark.progress import Progress
from magnetar.spark.sink_options import TransactionKeyOption
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.spark_failure import query_failed
from magnetar.spark.starting import Bound, BoundKind, end_cut, start_cut
from magnetar.spark.tasks import ranges_between, rows_in
from magnetar.spark.topic_reading import TopicReading

__all__ = ["Generation", "compact"]

POLL_S: Final = 0.5
COLUMNS: Final = (
    "key string, value binary, properties map<string,string>, publish_time timestamp, "
    "event_time timestamp, order_key binary"
)


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation: the topic that this run or an earlier one has written."""

    topic: str
    cut: str
    """The cut up to which rows were read, as text."""
    made_before: bool
    read: int = 0
    """Number of rows that this run has read."""
    combined: int = 0
    """Number of these rows that were shuffled, after each task had reduced its range."""
    torn: int = 0
    """Number of keys with rows in several partitions; the publish time decided their last row."""

    def sentence(self) -> str:
        """The outcome as a sentence."""
        if self.made_before:
            return f"{self.topic} was made before, up to {self.cut}. Nothing was written."
        said = (
            f"{self.topic} is made, up to {self.cut}: {self.read:,} rows read, "
            f"{self.combined:,} of them sorted by key."
        )
        if not self.torn:
            return said
        return (
            f"{said} {self.torn:,} keys have rows in several partitions, between which there is no "
            "order: of each the row was taken that was published last, by producers' clocks."
        )


def compact(
    spark: SparkSession, connection: Connection, asked: Compaction, progress: Progress
) -> Generation:
    """Make a generation.

    The write is one group, so readers of the new topic see all of it or nothing.  The cut is kept
    with the commit: a reader of the generation can go on from there in the source.  If an earlier
    run has made the generation, no row is read or written; if that run failed, none of its rows is
    visible, and the work begins anew.

    Raises `InvalidOption`, `JobFailed` where Spark gave up, and what the client does.
    """
    given = {"topic": asked.source, "end": asked.end}
    options = SourceOptions.of(Options({**connection.options(), **given}))
    topic = TopicReading(connection, options.topic)
    layout = topic.layout()
    start = enter_children(
        start_cut(Bound(BoundKind.EARLIEST), topic, layout, options.nowhere), layout
    )
    end = enter_children(end_cut(options.end, topic, layout, start), layout)
    cut = text_of(end)
    key = magnetar.spark.open_key(
        connection.service_url, key_name(asked.target), **connection.client_options()
    )
    if key.last is not None:
        return _existing_generation(asked, options, key, cut)
    _refuse_rows_of_others(TopicReading(connection, asked.target))
    magnetar.spark.register(spark)
    partitions = [each.segment_id for each in layout.segments.values() if each.legacy]
    frame = (
        spark.read.format(FORMAT)
        .schema(COLUMNS)
        .options(**connection.options(), topic=asked.source, end=cut)
        .load()
    )
    counts = Counts()
    writer = (
        last_rows(frame, asked, counts, partitions)
        .write.format(FORMAT)
        .options(**connection.options(), **key.options)
        .options(topic=asked.target, jobId=job_id(options.topic, cut), positions=f"[{cut}]")
        .mode("append")
    )
    try:
        with _show_progress(spark, progress, rows_in(topic, ranges_between(start, end, layout))):
            writer.save()
    except PySparkException as error:
        raise query_failed(error) from error
    except KeyboardInterrupt:
        _abort(connection, key)
        raise
    torn = counts.of("torn") if len(partitions) > 1 else 0
    return Generation(asked.target, cut, False, counts.of("read"), counts.of("combined"), torn)


class Counts:
    """Counts of rows at steps of the job; rows of a task that is tried again count again."""

    def __init__(self) -> None:
        self._observed: dict[str, Observation] = {}

    def counted(self, frame: DataFrame, name: str, which: Column | None = None) -> DataFrame:
        """The same rows, of which those with `which` true (None: all) are counted as `name`."""
        self._observed[name] = Observation(name)
        one = F.lit(1) if which is None else F.when(which, 1)
        return frame.observe(self._observed[name], F.count(one).alias("rows"))

    def of(self, name: str) -> int:
        """The count named `name`; waits until the rows are written."""
        return int(self._observed[name].get["rows"])


def last_rows(
    frame: DataFrame, asked: Compaction, counts: Counts, partitions: Collection[int] = ()
) -> DataFrame:
    """The last row of each key, unless that is an old tombstone, and rows without key if wanted.

    `partitions` are the segments that are partitions of a regular topic.
    """
    rows = counts.counted(frame, "read")
    if not asked.keyless:
        rows = rows.where("key IS NOT NULL")
    # Each task reduces its own range first, in bounded memory, so that less is shuffled.
    rows = counts.counted(rows.mapInArrow(combine, frame.schema), "combined")
    # Rows without key are each a group of their own, so that they are shuffled evenly.
    group = (F.col("key"), F.when(F.col("key").isNull(), F.col("order_key")))
    of_key = Window.partitionBy(*group)
    # An `order_key` sorts along every path of splits and merges.
    newest = of_key.orderBy(F.col("order_key").desc())
    if len(partitions) > 1:
        rows = _by_publish_time(rows, of_key, newest, partitions, counts)
    else:
        rows = rows.withColumn("rank", F.row_number().over(newest))
    rows = rows.where("rank = 1")
    if asked.tombstones_ms is not None:
        horizon = F.timestamp_millis(F.lit(int(time.time() * 1000) - asked.tombstones_ms))
        dropped = F.col("value").isNull() & (F.col("publish_time") < horizon)
        rows = rows.where(~F.coalesce(dropped, F.lit(False)))
    return rows.select("key", "value", "properties", "event_time")


def _by_publish_time(
    rows: DataFrame,
    of_key: WindowSpec,
    newest: WindowSpec,
    partitions: Collection[int],
    counts: Counts,
) -> DataFrame:
    """The last row of each key in each segment, with its `rank` among these, from 1.

    Partitions of a regular topic have no order among them, and a key is in several of them if their
    number was changed.  So the publish time, by producers' clocks, decides between the last rows of
    partitions.  Rows written after the topic became a scalable one come after all partitions.
    """
    # The first 8 bytes of an order key are the segment.
    segment = F.conv(F.hex(F.substring("order_key", 1, 8)), 16, 10).cast("bigint")
    rows = rows.withColumn("segment", segment)
    later = F.lag("segment").over(newest)
    rows = rows.withColumn("later", later).where("later IS NULL OR later != segment")
    rows = rows.withColumn("partition", F.col("segment").isin(*partitions))
    published = F.when(F.col("partition"), F.col("publish_time"))
    latest = of_key.orderBy(F.col("partition").asc(), published.desc(), F.col("order_key").desc())
    rows = rows.withColumn("rank", F.row_number().over(latest))
    rows = rows.withColumn("again", F.lag("partition").over(latest))
    return counts.counted(rows, "torn", (F.col("rank") == 2) & F.col("again"))


def _abort(connection: Connection, key: OpenedKey) -> None:
    """Abort the open group of the write, because Spark ends before its own abort."""

    async def abort(client: magnetar.Client) -> None:
        groups = KeyGroups(client, TransactionKeyOption(key.name, key.epoch))
        try:
            await groups.abort()
        finally:
            await groups.close()

    with suppress(MagnetarError):  # Its deadline aborts it, or the next one that opens the key.
        process_client(connection).run(abort)


def _existing_generation(
    asked: Compaction, options: SourceOptions, key: OpenedKey, cut: str
) -> Generation:
    """The generation that is there.  Raises `InvalidOption` if another one was asked for."""
    assert key.last is not None, "the caller has checked it"
    known = key.last.positions or ""
    made = text_of(cut_of_text(known, options.topic, options.name))
    if options.end.kind is BoundKind.CUT and made != cut:
        raise InvalidOption(
            f"{asked.target} was made from another cut ({made}); give this one another name, or "
            "another --generation."
        )
    return Generation(asked.target, made, made_before=True)


def _refuse_rows_of_others(target: TopicReading) -> None:
    for segment in target.layout().segments.values():
        plan = target.plan(segment.topic, None)
        for entries in target.entries(segment.topic, plan.earliest, plan.horizon):
            if entries:
                raise InvalidOption(
                    f"{target.topic} has rows already, which are not of this compaction; give a "
                    "new topic, or another --generation."
                )


@contextmanager
def _show_progress(spark: SparkSession, progress: Progress, total: int | None) -> Iterator[None]:
    """Show the progress of the stages that run within the block."""
    tracker = spark.sparkContext.statusTracker()
    ended = threading.Event()
    of = "" if total is None else f" of {total:,} rows"

    def watch() -> None:
        while not ended.wait(POLL_S):
            for stage in sorted(tracker.getActiveStageIds()):
                info = tracker.getStageInfo(stage)
                if info is None:
                    continue
                done, tasks = info.numCompletedTasks, info.numTasks
                progress.show(done, tasks, f"stage {stage}{of}, {done:,} of {tasks:,} tasks")

    watcher = threading.Thread(target=watch, name="progress of the compaction", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
