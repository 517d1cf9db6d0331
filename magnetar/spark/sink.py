"""The common part of stream and batch writers: from Spark's calls to an attempt and a decision.

Spark makes a writer on the driver, pickles it for the tasks, and makes other objects to commit and
to abort.  So a writer keeps nothing from one call to the next: only the messages of its tasks reach
the commit.
"""

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

import magnetar
from magnetar.errors import MagnetarError
from magnetar.spark.attempt_writer import AttemptWriter, Sender, Task
from magnetar.spark.checkpoint_files import CheckpointFiles, GivenPositions
from magnetar.spark.connecting import ClientThread, process_client
from magnetar.spark.key_groups import KeyGroups
from magnetar.spark.options import Connection
from magnetar.spark.plain_groups import PlainGroups, too_many_tasks
from magnetar.spark.row_sender import RowSender
from magnetar.spark.sink_driver import BatchOutcome, SinkDriver
from magnetar.spark.sink_options import SinkOptions, StateOption, TransactionKeyOption
from magnetar.spark.sink_rows import RowColumns
from magnetar.spark.state_topic import ReadSoFar
from magnetar.spark.task_report import TaskReport

__all__ = ["AnyGroups", "Sink", "SinkMessage", "new_nonce"]

T = TypeVar("T")
AnyGroups = KeyGroups | PlainGroups
"""Groups at brokers that have them, or the same over plain transactions."""
MAX_KEYS: Final = 16
"""Keys for which a process remembers how far it has read their logs."""
PATIENCE: Final = 4
"""A task waits for its first row for this part of the group's timeout, then begins without it."""
_log: Final = logging.getLogger(__name__)


@lru_cache(maxsize=MAX_KEYS)
def _read_so_far(
    pid: int, connection: Connection, key: TransactionKeyOption, state: StateOption
) -> ReadSoFar:
    """The cached state of a key's log; the same process commits most batches of a query."""
    return ReadSoFar(state.start)


def new_nonce() -> str:
    """A random name for one try of a batch."""
    # Not by `random`: workers are forked, and their generators would draw the same.
    return os.urandom(16).hex()


@dataclass
class SinkMessage(WriterCommitMessage):
    """The message with which a task reports to the driver."""

    report: TaskReport


class Sink:
    """One topic to write to.  It is pickled, and connects only when there is something to do.

    A subclass may replace the methods that make its parts.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Find the columns to write.  Raises `InvalidRows`."""
        self.options = options
        self.columns = RowColumns.of(
            [(field.name, field.dataType.simpleString()) for field in schema.fields]
        )

    # Parts, which a subclass may replace

    def groups(
        self, client: magnetar.Client, reported: Sequence[magnetar.TxnId] = ()
    ) -> AnyGroups | None:
        """Make the requests to coordinators; None for at-least-once.

        `reported` are the transactions that tasks have written in.
        """
        key, state = self.options.key, self.options.state
        if key is None:
            return None
        if state is None:
            return KeyGroups(client, key)
        known = _read_so_far(os.getpid(), self.options.connection, key, state)
        return PlainGroups(client, key, state, known, reported, timeout_s=self.options.timeout_s)

    def attempt_writer(
        self, client: magnetar.Client, groups: AnyGroups | None, task: Task
    ) -> AttemptWriter[magnetar.AttachedTransaction]:
        """Make the writer of one task's rows."""

        return AttemptWriter(
            task, groups, partial(self.open_sender, client), timeout_s=self.options.timeout_s
        )

    async def open_sender(
        self, client: magnetar.Client, attempt: magnetar.AttachedTransaction | None
    ) -> Sender:
        """Make the sender of rows in an attempt; None: outside of transactions."""
        options = self.options
        producer = await client.producer(
            options.topic,
            compression=options.compression,
            chunking=options.chunking,
            send_timeout_s=options.connection.operation_timeout_ms / 1000,
        )
        # By the given name: brokers return the layout of a regular topic under a scalable name.
        return RowSender(producer, attempt, partial(client.layout, options.topic))

    def driver(self, groups: AnyGroups) -> SinkDriver:
        """Make the part that commits or aborts one batch."""
        options = self.options
        if options.positions is not None:
            return SinkDriver(groups, GivenPositions(options.positions), track_positions=True)
        return SinkDriver(
            groups,
            self._checkpoint(),
            track_positions=options.track_positions,
        )

    def _checkpoint(self) -> CheckpointFiles | None:
        """The checkpoint of the query; None if its location is not known."""
        location, connection = self.options.checkpoint, self.options.connection
        if location is None:
            return None
        return CheckpointFiles(location, connection.operation_timeout_ms / 1000)

    # Calls of Spark

    def write(self, task: Task, batches: Iterable[pa.RecordBatch]) -> TaskReport:
        """Write the rows of a task.  Raises why they are not all stored."""
        writing = _TaskWriter(self, task)
        try:
            for batch in batches:
                if batch.num_rows:
                    writing.write(batch)
            return writing.finish()
        finally:
            writing.close()

    def commit(
        self, messages: Sequence[WriterCommitMessage | None], batch: int
    ) -> BatchOutcome | None:
        """Decide a batch; None for at-least-once.  Raises the errors of `SinkDriver.commit`."""
        if self.options.key is None:
            return None
        reports = _reports_of(messages)
        # Plain transactions cannot be committed together (P1 of `plain_groups`).
        if self.options.state is not None and len(reports) > 1:
            self.abort(messages)
            raise too_many_tasks(len(reports))
        return self._run_driver(lambda driver: driver.commit(reports, batch), messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None] = ()) -> bool:
        """Abort the open group, or the transactions in the messages; whether there was one.

        Raises no `MagnetarError`: Spark would show that error, and not why the batch has failed.
        """
        if self.options.key is None:
            return False
        try:
            return self._run_driver(lambda driver: driver.abort(), messages)
        except MagnetarError as error:
            _log.warning(
                "The open transactions of a failed batch could not be aborted (%s): the next "
                "opening of the key %s aborts them, or their deadline does.",
                error,
                self.options.key.name,
            )
            return False

    def _run_driver(
        self,
        work: Callable[[SinkDriver], Awaitable[T]],
        messages: Sequence[WriterCommitMessage | None],
    ) -> T:
        reports = [each for each in _reports_of(messages) if each is not None]
        attempts = [each.attempt for each in reports if each.attempt is not None]

        async def decided(client: magnetar.Client) -> T:
            groups = self.groups(client, attempts)
            assert groups is not None, "the callers have checked that there is a key"
            try:
                return await work(self.driver(groups))
            finally:
                await groups.close()

        return process_client(self.options.connection).run(decided)


def _reports_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport | None]:
    return [each.report if isinstance(each, SinkMessage) else None for each in messages]


class _TaskWriter:
    """Runs the `AttemptWriter` of one task on the client's thread.

    The writer is made for the first row.  If that is long in coming, a timer makes it earlier (W1),
    so that the group of the batch is kept open while its last task computes its rows.
    """

    def __init__(self, sink: Sink, task: Task) -> None:
        self._sink = sink
        self._task = task
        self._columns = sink.columns
        self._client_thread: ClientThread | None = None
        self._groups: AnyGroups | None = None
        self._made: AttemptWriter[magnetar.AttachedTransaction] | None = None
        self._make_lock = threading.Lock()
        self._timer = threading.Timer(sink.options.timeout_s / PATIENCE, self._expect_rows)
        self._timer.daemon = True
        if sink.options.key is not None:
            self._timer.start()

    def write(self, batch: pa.RecordBatch) -> None:
        rows, writer = self._columns.rows(batch), self._writer()

        async def written(client: magnetar.Client) -> None:
            await writer.write(rows)

        self._run(written)

    def finish(self) -> TaskReport:
        self._stop_timer()
        task, writer = self._task, self._made
        if writer is None:
            return TaskReport(task.nonce, task.partition, task.query, task.batch)

        async def finished(client: magnetar.Client) -> TaskReport:
            return await writer.finish()

        return self._run(finished)

    def close(self) -> None:
        self._stop_timer()
        writer, groups = self._made, self._groups
        if writer is None:
            return

        async def closed(client: magnetar.Client) -> None:
            try:
                await writer.close()
            finally:
                if groups is not None:
                    await groups.close()

        self._run(closed)

    def _writer(self) -> AttemptWriter[magnetar.AttachedTransaction]:
        """The writer, made by the first caller."""
        with self._make_lock:
            if self._made is None:
                self._client_thread = process_client(self._sink.options.connection)
                self._made = self._run(self._make)
            return self._made

    async def _make(self, client: magnetar.Client) -> AttemptWriter[magnetar.AttachedTransaction]:
        self._groups = self._sink.groups(client)
        return self._sink.attempt_writer(client, self._groups, self._task)

    def _expect_rows(self) -> None:
        """Begin without rows, on the timer's thread; the first row meets the same error again."""
        try:
            writer = self._writer()

            async def expected(client: magnetar.Client) -> None:
                await writer.expect_rows()

            self._run(expected)
        except MagnetarError as error:
            _log.warning("Partition %d waits for its rows: %s", self._task.partition, error)

    def _stop_timer(self) -> None:
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()

    def _run(self, work: Callable[[magnetar.Client], Awaitable[T]]) -> T:
        assert self._client_thread is not None, "the writer is made after connecting"
        return self._client_thread.run(work)
