"""The format `pulsar5`: the entry points that Spark calls for sources and sinks.

Spark calls these methods on the driver, each in a process that it starts for that call, and pickles
what they return for other processes.
"""

from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from magnetar.spark.batch_reader import BatchReader, FilteringBatchReader
from magnetar.spark.batch_writer import BatchWriter
from magnetar.spark.decode import Definition
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Options
from magnetar.spark.source import Source, definition_for, schema_with
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.stream_reader import StreamReader
from magnetar.spark.stream_writer import StreamWriter
from magnetar.spark.worker_python import warn_of_pythons

__all__ = ["FORMAT", "Pulsar5", "register"]

FORMAT: Final = "pulsar5"


class Pulsar5(DataSource):
    """The format `pulsar5`; Spark makes one for each `load`, `save` and `start`.

    Only `schema`, and readers without it, connect to brokers, and only where values are decoded by
    the topic's own schema.
    """

    @classmethod
    def name(cls) -> str:
        """The name that users give to `format`."""
        return FORMAT

    _definition: Definition | None = None
    """How values are decoded; None until it is known, and where they are not decoded."""

    def schema(self) -> StructType:
        """Every column.  Raises `InvalidOption`, and the error of fetching a topic's schema."""
        options = SourceOptions.of(Options(self.options))
        # Spark pickles this object after `schema`, so readers need not ask the broker again.
        self._definition = definition_for(options)
        return schema_with(options, self._definition)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of `spark.read`.  Raises as `schema`."""
        options = SourceOptions.of(Options(self.options))
        options.check_batch()
        # Spark refuses a reader that takes filters while it is set to push none.
        kind = FilteringBatchReader if options.push_filters else BatchReader
        return kind(self._source(options, schema))

    def streamReader(  # noqa: N802 - Spark's name
        self, schema: StructType
    ) -> DataSourceStreamReader:
        """Make the reader of `spark.readStream`.  Raises as `schema`."""
        options = SourceOptions.of(Options(self.options))
        options.check_stream()
        return StreamReader(self._source(options, schema))

    def _source(self, options: SourceOptions, declared: StructType) -> Source:
        if self._definition is None:
            self._definition = definition_for(options)
        return Source(options, self._definition, declared)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the writer of `df.write`.  Raises `InvalidOption` and `InvalidRows`."""
        if overwrite:
            raise InvalidOption("A topic is not overwritten; write with mode append.")
        return BatchWriter(self.options, schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Make the writer of `df.writeStream`.  Raises `InvalidOption` and `InvalidRows`."""
        if overwrite:
            raise InvalidOption(
                "A topic is not overwritten; write with output mode append, and totals that "
                "change by foreachBatch."
            )
        return StreamWriter(self.options, schema)


def register(spark: SparkSession) -> None:
    """Make the format known to a session; warn if a Python of the session cannot run it."""
    spark.dataSource.register(Pulsar5)
    warn_of_pythons(spark)
