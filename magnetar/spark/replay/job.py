"""The replay as a job of Spark: a stream with an end, under Trigger.AvailableNow."""

import os
import time
from dataclasses import dataclass
from typing import Final

from pyspark.errors import AnalysisException, ParseException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery

import magnetar.spark
from magnetar.errors import TopicNotFound
from magnetar.layout import Layout
from magnetar.spark.cut import Cut, enter_children
from magnetar.spark.cut_json import cut_of_text, text_of
from magnetar.spark.data_source import FORMAT
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Connection, Options
from magnetar.spark.progress import Progress
from magnetar.spark.replay.checkpoint import ReplayCheckpoint
from magnetar.spark.replay.request import Job, Replay, chosen_columns
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.spark_failure import query_failed
from magnetar.spark.starting import Bound, BoundKind, end_cut, start_cut
from magnetar.spark.tasks import SegmentRange, ranges_between, rows_in
from magnetar.spark.topic_reading import TopicReading

__all__ = ["Outcome", "Speed", "replay"]

POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Speed:
    """Bounds that may differ from run to run."""

    rows_per_batch: int | None = None
    rows_per_second: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run; `finished`: the last committed batch has reached the end."""

    finished: bool
    rows: int
    """Rows that this run has read, including those that the filter has left out."""
    written: int
    """The rows of these that passed the filter."""
    batches: int

    def sentence(self) -> str:
        """The outcome as a sentence."""
        if self.finished and not self.batches:
            return "The replay is finished: everything up to its end was written before."
        if self.finished:
            return f"The replay is finished: {self._done()}."
        return (
            f"{self._done()}; the other rows before the end cannot be read yet, as transactions "
            "are open (magnetar txn why names them). Run the same command again to go on."
        )

    def _done(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        return f"{self.rows:,} rows read in {batches}, {self.written:,} of them for the target"


def replay(
    spark: SparkSession,
    connection: Connection,
    asked: Replay,
    checkpoint: str,
    speed: Speed,
    progress: Progress,
) -> Outcome:
    """Begin a replay, or go on with it.

    The first run resolves the range to two cuts and writes them into the checkpoint.  A run that
    an open transaction keeps from the end is not finished, and a later one goes on.

    Raises `InvalidOption`, `PipelineError` where the query has failed, and what the client does.
    """
    files = ReplayCheckpoint(checkpoint, connection.operation_timeout_ms / 1000)
    job = files.job()
    options = _options(connection, asked)
    topic = TopicReading(connection, options.topic)
    magnetar.spark.register(spark)
    _require_target(TopicReading(connection, asked.target))
    if job is None:
        job = _resolve_job(asked, options, topic)
        _read(spark, connection, job, speed)  # An invalid request must not reach the checkpoint.
        files.begin(job)
    job.check(asked)
    ahead = _ranges_ahead(files, job, options, topic)
    if not ahead:
        return Outcome(finished=True, rows=0, written=0, batches=0)
    total = rows_in(topic, ahead)
    frame = _read(spark, connection, job, speed)
    # Opening its key fences an earlier run of this job that is still alive.
    key = magnetar.spark.open_key(connection.service_url, job.key, **connection.client_options())
    query = (
        frame.writeStream.format(FORMAT)
        .options(**connection.options(), **key.options)
        .options(topic=asked.target, trackPositions="true")
        .option("checkpointLocation", checkpoint)
        .queryName(job.key)
        .trigger(availableNow=True)
        .start()
    )
    rows, written, batches = _follow(query, progress, total)
    return Outcome(not _ranges_ahead(files, job, options, topic), rows, written, batches)


def _require_target(target: TopicReading) -> None:
    """Check that the target exists.  Raises `InvalidOption`."""
    # The sink would have a broker create the topic, even under a misspelt name.
    try:
        target.layout()
    except TopicNotFound as error:
        raise InvalidOption(
            f"There is no topic {target.topic} to write to; make it first (magnetar topics create "
            f"{target.topic}), or correct its name."
        ) from error


def _options(connection: Connection, asked: Replay) -> SourceOptions:
    given = {"topic": asked.source, "start": asked.start, "end": asked.end}
    return SourceOptions.of(Options({**connection.options(), **given}))


def _resolve_job(asked: Replay, options: SourceOptions, topic: TopicReading) -> Job:
    """The job of a request, with the range that it has now."""
    layout = topic.layout()
    bound = options.start or Bound(BoundKind.EARLIEST)
    start = enter_children(start_cut(bound, topic, layout, options.nowhere), layout)
    end = enter_children(end_cut(options.end, topic, layout, start), layout)
    return Job(asked, text_of(start), text_of(end), f"replay-{os.urandom(8).hex()}")


def _ranges_ahead(
    files: ReplayCheckpoint, job: Job, options: SourceOptions, topic: TopicReading
) -> list[SegmentRange]:
    """The ranges that are still to be read."""
    reached = files.reached()
    start, end = _cut(reached or job.start, options), _cut(job.end, options)
    return _ranges_with_entries(start, end, topic.layout_with(max((*start.pos, *end.pos))), topic)


def _cut(text: str, options: SourceOptions) -> Cut:
    return cut_of_text(text, options.topic, options.name)


def _ranges_with_entries(
    start: Cut, end: Cut, layout: Layout, topic: TopicReading
) -> list[SegmentRange]:
    """The ranges between two cuts that have an entry."""
    found = []
    for each in ranges_between(start, end, layout):
        plan = topic.plan(each.topic, each.start.position, end=each.end.entries_end)
        upto = min(each.end.entries_end, plan.raw_end)
        if plan.start < upto:
            found.append(each)
    return found


def _read(spark: SparkSession, connection: Connection, job: Job, speed: Speed) -> DataFrame:
    """The rows of the range, filtered and projected."""
    asked = job.asked
    # Rows of a key stay in order; a child segment is read in the task of its only parent.
    reader = spark.readStream.format(FORMAT).options(
        **connection.options(),
        topic=asked.source,
        start=job.start,
        end=job.end,
        ordering="key",
        chain="true",
        decode=asked.decode,
    )
    if speed.rows_per_batch is not None:
        reader = reader.option("maxRowsPerTrigger", speed.rows_per_batch)
    if speed.rows_per_second is not None:
        reader = reader.option("maxRowsPerSecond", speed.rows_per_second)
    frame = reader.load()
    try:
        if asked.where is not None:
            frame = frame.where(asked.where)
        made = [(text, frame.selectExpr(text).columns) for text in asked.select]
        chosen = chosen_columns(made)
        return frame.select(
            *(F.col(name) if text is None else F.expr(text) for name, text in chosen.items())
        )
    except (AnalysisException, ParseException) as error:
        raise InvalidOption(
            f"The filter or a selected column is not valid ({_first_line(error)}). Write it in SQL "
            f"on the columns {', '.join(frame.columns)}."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _follow(query: StreamingQuery, progress: Progress, total: int | None) -> tuple[int, int, int]:
    """Wait for the end of the query and show its progress; rows read and written, and batches."""
    rows, written, seen = 0, 0, set[int]()
    try:
        active = True
        while active:
            time.sleep(POLL_S)
            active = query.isActive
            for each in query.recentProgress:
                if each.batchId not in seen and each.numInputRows:
                    seen.add(each.batchId)
                    rows += each.numInputRows
                    written += max(each.sink.numOutputRows, 0)
                    rate = each.processedRowsPerSecond
                    progress.show(rows, total, _progress_text(rows, total, each.batchId, rate))
        query.awaitTermination()
    except StreamingQueryException as error:
        raise query_failed(error) from error
    finally:
        if query.isActive:
            query.stop()
    return rows, written, len(seen)


def _progress_text(rows: int, total: int | None, batch: int, rate: float) -> str:
    of = "" if total is None else f" of {total:,}"
    return f"{rows:,}{of} rows read, batch {batch}, {rate:,.0f} rows/s"
