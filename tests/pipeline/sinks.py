"""Queries into the sink that tests have in common: the counting source, into a topic.

And the sink with tasks that fail at the worst moment, made at the seams that it has.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import magnetar
import magnetar.spark
from magnetar.spark.attempt_writer import AttemptWriter, Task
from magnetar.spark.data_source import FORMAT, Pulsar5
from magnetar.spark.sink import AnyGroups, Sink
from magnetar.spark.sink_options import SinkOptions
from magnetar.spark.stream_writer import StreamWriter
from magnetar.spark.task_report import RowCount
from tests.pipeline.rows import Pair
from tests.pipeline.toy import KEYS, Toy


class LateWriter(AttemptWriter[magnetar.AttachedTransaction]):
    """The first tries of task 1 fail when all their rows are stored."""

    failures: ClassVar = 2

    async def settle(self) -> Mapping[str, RowCount]:
        counts = await super().settle()
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() < self.failures:
            raise RuntimeError("this try fails when all its rows are stored")
        return counts


class HopelessWriter(LateWriter):
    """Each try of task 1 fails."""

    failures: ClassVar = 99


class LateSink(Sink):
    """Writes by such writers."""

    kind: ClassVar[type[LateWriter]] = LateWriter

    def attempt_writer(
        self, client: magnetar.Client, groups: AnyGroups | None, task: Task
    ) -> LateWriter:
        return self.kind(
            task, groups, partial(self.open_sender, client), timeout_s=self.options.timeout_s
        )


class HopelessSink(LateSink):
    """Writes by writers without hope."""

    kind: ClassVar = HopelessWriter


class LateStreamWriter(StreamWriter):
    """Writes to such a sink."""

    kind: ClassVar[type[LateSink]] = LateSink

    def make_sink(self, options: SinkOptions, schema: StructType) -> Sink:
        return self.kind(options, schema)


class HopelessStreamWriter(LateStreamWriter):
    """Writes to a sink without hope."""

    kind: ClassVar = HopelessSink


class LateFailure(Pulsar5):
    """The sink `late-failure`."""

    @classmethod
    def name(cls) -> str:
        return "late-failure"

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return LateStreamWriter(self.options, schema)


class Hopeless(Pulsar5):
    """The sink `hopeless`."""

    @classmethod
    def name(cls) -> str:
        return "hopeless"

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return HopelessStreamWriter(self.options, schema)


def expected(total: int) -> list[Pair]:
    """Key and value of each row of the counting source, in order."""
    return [(f"k{number % KEYS}", b"%d" % number) for number in range(total)]


def counted(spark: SparkSession, *, rows: int, total: int) -> DataFrame:
    """The counting source as a stream of key and value, `rows` in a batch."""
    spark.dataSource.register(Toy)
    toy = spark.readStream.format("toy").options(rows=rows, total=total).load()
    return toy.selectExpr("key", "CAST(number AS STRING) AS value")


def started(
    frame: DataFrame, options: Mapping[str, object], checkpoint: Path | str, sink: str = FORMAT
) -> StreamingQuery:
    """Into the sink, or another one that is registered, until all is done."""
    magnetar.spark.register(frame.sparkSession)
    frame.sparkSession.dataSource.register(LateFailure)
    frame.sparkSession.dataSource.register(Hopeless)
    return (
        frame.writeStream.format(sink)
        .options(**{name: str(value) for name, value in options.items()})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
