"""`df.write.format("pulsar5")`: the whole write is one group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from magnetar.spark.attempt_writer import Task
from magnetar.spark.sink import Sink, SinkMessage, new_nonce
from magnetar.spark.sink_options import SinkOptions

__all__ = ["BatchWriter"]

_ONLY_BATCH: Final = 0


class BatchWriter(DataSourceArrowWriter):
    """The writer of one job, made on the driver and pickled for tasks, commit and abort.

    The option `jobId` names the job: run again under the same transaction key, it finds that it is
    done and writes nothing.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Check the options and the columns.  Raises `InvalidOption` and `InvalidRows`."""
        self.sink = self.make_sink(SinkOptions.of(options, streaming=False), schema)
        self.nonce = new_nonce()
        # Without a `jobId` the nonce names the job, so that no other run is taken for it.
        self.query = f"job:{self.sink.options.job or self.nonce}"

    def make_sink(self, options: SinkOptions, schema: StructType) -> Sink:
        """Make the sink; a subclass may make another one."""
        return Sink(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Write the rows of a task; runs in the task."""
        context = TaskContext.get()
        assert context is not None, "Spark writes in tasks"
        task = Task(self.nonce, context.partitionId(), self.query, _ONLY_BATCH)
        return SinkMessage(self.sink.write(task, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: make the rows of the job visible."""
        self.sink.commit(messages, _ONLY_BATCH)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: abort the open group, and the transactions in the messages."""
        self.sink.abort(messages)
