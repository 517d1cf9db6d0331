"""The format `pulsar5`, as Spark knows it.

Rules: Spark calls these methods on the driver, in processes that it starts for one call each, and
ships what they return to others; so nothing is connected here, and options are checked by what is
made.
"""

from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from pipeline.batch_writer import BatchWriter
from pipeline.errors import InvalidOption
from pipeline.stream_writer import StreamWriter

__all__ = ["FORMAT", "Pulsar5", "register"]

FORMAT: Final = "pulsar5"


class Pulsar5(DataSource):
    """See the module's rules."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return FORMAT

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
                "A topic is not overwritten; write with output mode append or update."
            )
        return StreamWriter(self.options, schema)


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    spark.dataSource.register(Pulsar5)
