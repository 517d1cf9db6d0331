"""The format `pulsar5`, as Spark knows it.

Rules: Spark calls these methods on the driver, in processes that it starts for one call each, and
ships what they return to others; so nothing is connected here, save to learn how values are
decoded, and options are checked by what is made.  What `schema` has learned goes with the object:
Spark pickles it afterwards.
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

from pipeline.batch_reader import BatchReader, FilteringBatchReader
from pipeline.batch_writer import BatchWriter
from pipeline.decode import Definition
from pipeline.errors import InvalidOption
from pipeline.options import Options
from pipeline.source import Source, definition_for, schema_with
from pipeline.source_options import SourceOptions
from pipeline.stream_reader import StreamReader
from pipeline.stream_writer import StreamWriter
from pipeline.worker_python import warn_of_pythons

__all__ = ["FORMAT", "Pulsar5", "register"]

FORMAT: Final = "pulsar5"


class Pulsar5(DataSource):
    """See the module's rules."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return FORMAT

    _definition: Definition | None = None
    """How values are decoded, once that is known."""

    def schema(self) -> StructType:
        """Every column.  Raises `InvalidOption`, and why a topic's schema cannot be learned."""
        options = SourceOptions.of(Options(self.options))
        self._definition = definition_for(options)
        return schema_with(options, self._definition)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Of `spark.read`.  Raises as `schema`."""
        options = SourceOptions.of(Options(self.options))
        options.check_batch()
        # Spark refuses a reader that takes filters while it is set to push none.
        kind = FilteringBatchReader if options.push_filters else BatchReader
        return kind(self._source(options, schema))

    def streamReader(  # noqa: N802 - Spark's name
        self, schema: StructType
    ) -> DataSourceStreamReader:
        """Of `spark.readStream`.  Raises as `schema`."""
        options = SourceOptions.of(Options(self.options))
        options.check_stream()
        return StreamReader(self._source(options, schema))

    def _source(self, options: SourceOptions, declared: StructType) -> Source:
        if self._definition is None:
            self._definition = definition_for(options)
        return Source(options, self._definition, declared)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Of `df.write`.  Raises `InvalidOption` and `InvalidRows`."""
        if overwrite:
            raise InvalidOption("A topic is not overwritten; write with mode append.")
        return BatchWriter(self.options, schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Of `df.writeStream`.  Raises `InvalidOption` and `InvalidRows`."""
        if overwrite:
            raise InvalidOption(
                "A topic is not overwritten; write with output mode append, and totals that "
                "change by foreachBatch."
            )
        return StreamWriter(self.options, schema)


def register(spark: SparkSession) -> None:
    """Make the format known to a session; warn of Pythons of its that cannot run it."""
    spark.dataSource.register(Pulsar5)
    warn_of_pythons(spark)
