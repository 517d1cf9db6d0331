"""What stream and batch writers share: from Spark's calls to an attempt, and to a decision.

Rules: Spark makes a writer on the driver, pickles it for the tasks, and makes others to commit and
to abort, so nothing that a writer learns gets from one call to the next but by the messages of its
tasks.  Nothing is connected before there are rows, or something to be decided.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

import magnetar
from pipeline.attempt_writer import AttemptWriter, Sender, Task
from pipeline.checkpoint_files import CheckpointFiles, GivenPositions
from pipeline.connecting import connected
from pipeline.key_groups import KeyGroups
from pipeline.row_sender import RowSender
from pipeline.sink_driver import BatchOutcome, SinkDriver
from pipeline.sink_options import SinkOptions
from pipeline.sink_rows import RowColumns
from pipeline.task_report import TaskReport

__all__ = ["Sink", "SinkMessage", "new_nonce"]


def new_nonce() -> str:
    """The name of one try of a batch.  Workers are forked, so their generators draw the same."""
    return os.urandom(16).hex()


@dataclass
class SinkMessage(WriterCommitMessage):
    """What a task tells the driver."""

    report: TaskReport


class Sink:
    """Of one topic.  What it makes is made by methods that a subclass may replace."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Raises `InvalidRows`."""
        self.options = options
        self.columns = RowColumns.of(
            [(field.name, field.dataType.simpleString()) for field in schema.fields]
        )

    # What a subclass may replace

    def attempt_writer(
        self, client: magnetar.Client, groups: KeyGroups | None, task: Task
    ) -> AttemptWriter[magnetar.Attempt]:
        """What writes the rows of one task."""

        return AttemptWriter(
            task, groups, partial(self.open_sender, client), timeout_s=self.options.timeout_s
        )

    async def open_sender(
        self, client: magnetar.Client, attempt: magnetar.Attempt | None
    ) -> Sender:
        """What sends rows in an attempt, or in none."""
        options = self.options
        producer = await client.producer(
            options.topic, compression=options.compression, chunking=options.chunking
        )
        return RowSender(producer, attempt, client.layout)

    def driver(self, groups: KeyGroups) -> SinkDriver:
        """What decides about one batch."""
        options = self.options
        if options.positions is not None:
            return SinkDriver(groups, GivenPositions(options.positions), track_positions=True)
        return SinkDriver(
            groups,
            None if options.checkpoint is None else CheckpointFiles(options.checkpoint),
            track_positions=options.track_positions,
        )

    # What Spark's calls amount to

    def write(self, task: Task, batches: Iterable[pa.RecordBatch]) -> TaskReport:
        """Write the rows of a task.  Raises why they are not all stored."""
        writing: _Writing | None = None
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                if writing is None:
                    writing = _Writing(self, task)
                writing.write(batch)
            if writing is None:
                return TaskReport(task.nonce, task.partition, task.query, task.batch)
            return writing.finish()
        finally:
            if writing is not None:
                writing.close()

    def commit(
        self, messages: Sequence[WriterCommitMessage | None], batch: int
    ) -> BatchOutcome | None:
        """Decide a batch; None where there is nothing to be decided.  Raises as `SinkDriver`."""
        reports = [each.report if isinstance(each, SinkMessage) else None for each in messages]
        option = self.options.key
        if option is None:
            return None

        async def decided(client: magnetar.Client) -> BatchOutcome:
            groups = KeyGroups(client, option)
            try:
                return await self.driver(groups).commit(reports, batch)
            finally:
                await groups.close()

        return connected(self.options.connection).run(decided)

    def abort(self) -> bool:
        """Abort what is open.  Whether something was."""
        option = self.options.key
        if option is None:
            return False

        async def aborted(client: magnetar.Client) -> bool:
            groups = KeyGroups(client, option)
            try:
                return await self.driver(groups).abort()
            finally:
                await groups.close()

        return connected(self.options.connection).run(aborted)


class _Writing:
    """A task that has rows: its writer, on the thread of the client."""

    def __init__(self, sink: Sink, task: Task) -> None:
        self._columns = sink.columns
        self._connected = connected(sink.options.connection)
        self._groups: KeyGroups | None = None

        async def made(client: magnetar.Client) -> AttemptWriter[magnetar.Attempt]:
            if sink.options.key is not None:
                self._groups = KeyGroups(client, sink.options.key)
            return sink.attempt_writer(client, self._groups, task)

        self._writer = self._connected.run(made)

    def write(self, batch: pa.RecordBatch) -> None:
        rows = self._columns.rows(batch)

        async def written(client: magnetar.Client) -> None:
            await self._writer.write(rows)

        self._connected.run(written)

    def finish(self) -> TaskReport:
        async def finished(client: magnetar.Client) -> TaskReport:
            return await self._writer.finish()

        return self._connected.run(finished)

    def close(self) -> None:
        async def closed(client: magnetar.Client) -> None:
            await self._writer.close()
            if self._groups is not None:
                await self._groups.close()

        self._connected.run(closed)
