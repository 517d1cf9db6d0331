"""`df.writeStream.format("pulsar5")`: a batch of the query is one group.

Rules: Spark makes this object once for each batch, before its tasks, and again for its commit or
its abort.  The nonce that is drawn here counts where it gets to the tasks; the commit has that of
their messages.  Which query and batch it is of, tasks are told by local properties of Spark.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pipeline.attempt_writer import Task
from pipeline.sink import Sink, SinkMessage, new_nonce
from pipeline.sink_options import SinkOptions

__all__ = ["StreamWriter"]

QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"


class StreamWriter(DataSourceStreamArrowWriter):
    """See the module's rules."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Raises `InvalidOption` and `InvalidRows`."""
        self.sink = self.make_sink(SinkOptions.of(options, streaming=True), schema)
        self.nonce = new_nonce()

    def make_sink(self, options: SinkOptions, schema: StructType) -> Sink:
        """What it writes to; a subclass may give another one."""
        return Sink(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """In a task: write its rows."""
        context = TaskContext.get()
        assert context is not None, "Spark writes in tasks"
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
        """On the driver: abort what is open, and what the messages tell."""
        self.sink.abort(messages)
