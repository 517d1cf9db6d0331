"""`df.writeStream.format("pulsar5")`: a batch of the query is one group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from magnetar.spark.attempt_writer import Task
from magnetar.spark.sink import Sink, SinkMessage, new_nonce
from magnetar.spark.sink_options import SinkOptions

__all__ = ["StreamWriter"]

QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of one batch.

    Spark makes it before the tasks of the batch, pickles it for them, and makes another one for the
    commit or the abort.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Check the options and the columns.  Raises `InvalidOption` and `InvalidRows`."""
        self.sink = self.make_sink(SinkOptions.of(options, streaming=True), schema)
        # For the tasks alone: the commit, another object, takes the nonce from their messages.
        self.nonce = new_nonce()

    def make_sink(self, options: SinkOptions, schema: StructType) -> Sink:
        """Make the sink; a subclass may make a different kind."""
        return Sink(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Write the rows of a task; runs in the task."""
        context = TaskContext.get()
        assert context is not None, "Spark writes in tasks"
        # Only these properties name the query and the batch in a task.
        batch = context.getLocalProperty(BATCH_PROPERTY)
        task = Task(
            nonce=self.nonce,
            partition=context.partitionId(),
            query=context.getLocalProperty(QUERY_PROPERTY),
            batch=None if batch is None else int(batch),
        )
        return SinkMessage(self.sink.write(task, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: make the rows of the batch visible."""
        self.sink.commit(messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: abort the open group, and the transactions in the messages."""
        self.sink.abort(messages)
