"""One try of one task: its rows in an attempt, counted by the segments that they are stored in.

Rules:

- W1 The attempt begins with the first row, or earlier if that row is long in coming
  (`expect_rows`): this task may be the only one that keeps the group open.  The request names query
  and batch, so that a batch that is done is not written again.
- W2 The report is made when every row has its receipt.  It counts a row in the segment that the
  receipt names, so it stays right if a segment is sealed meanwhile.  A row without receipt fails
  the try; Spark makes another one, in another attempt.
- W3 An open writer extends the deadline of the group whenever half of it has gone by.  Readers wait
  for open groups, so the first extension is logged.  If an extension fails, the try fails.
- W4 For at-least-once (no `attempts`) rows are written at once, in no group.
- W5 At most one Arrow batch is in memory besides the rows that the sender holds.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from magnetar.errors import AlreadyClosed
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.errors import CommitRefused
from magnetar.spark.sink_rows import Rows
from magnetar.spark.task_report import RowCount, TaskReport

__all__ = ["AttemptWriter", "Attempts", "Sender", "Task", "WriterState"]

_log: Final = logging.getLogger(__name__)


class WriterState(enum.Enum):
    """The states of an `AttemptWriter`."""

    NEW = "new"
    """It has sent no request."""
    OPEN = "open"
    """It has an attempt, or needs none, and writes."""
    DONE = "done"
    """The batch was committed before, by the coordinator's answer: rows are dropped."""
    SETTLED = "settled"
    """All rows are stored and reported."""
    FAILED = "failed"
    """It writes nothing more."""


_S: Final = WriterState
_NEXT: Final[StateTable[WriterState]] = StateTable(
    {
        _S.NEW: frozenset({_S.OPEN, _S.DONE, _S.SETTLED, _S.FAILED}),
        _S.OPEN: frozenset({_S.SETTLED, _S.FAILED}),
        _S.DONE: frozenset({_S.SETTLED, _S.FAILED}),
        _S.SETTLED: frozenset(),
        _S.FAILED: frozenset(),
    },
    defect=AssertionError,
)


@dataclass(frozen=True, slots=True)
class Task:
    """One try of one task.  `query` and `batch` are None where Spark does not name them."""

    nonce: str
    partition: int
    query: str | None = None
    batch: int | None = None


class OpenAttempt(Protocol):
    """An open attempt, as the client returns it."""

    @property
    def id(self) -> TxnId:
        """The transaction id that its rows carry."""
        ...

    async def settled(self) -> None:
        """Wait until all messages sent in it are durable.  Raises the first failure."""
        ...

    async def close(self) -> None:
        """Stop using it; the group decides whether it is committed."""
        ...


B = TypeVar("B", bound=OpenAttempt)
B_co = TypeVar("B_co", bound=OpenAttempt, covariant=True)
R = TypeVar("R")


class Attempts(Protocol[B_co]):
    """A task's requests to the coordinator, under a key and an epoch."""

    async def begin(self, task: Task, timeout_s: float) -> B_co | None:
        """Send BEGIN_ATTEMPT; None if the batch is done."""
        ...

    async def extend(self, group: TxnId, timeout_s: float) -> None:
        """Send EXTEND_GROUP."""
        ...

    async def abandon(self, attempt: TxnId) -> None:
        """Give the attempt of a failed try up.  Raises nothing."""
        ...


class Sender(Protocol):
    """Writes rows to the topic, in one attempt."""

    async def send(self, rows: Rows) -> None:
        """Send rows, and wait for room for more.  Raises the first failure that is known."""
        ...

    async def settle(self) -> Mapping[str, RowCount]:
        """Wait for all receipts; rows by segment topic.  Raises the first failure."""
        ...

    async def close(self) -> None:
        """Close the producer; raises no failure of rows."""
        ...


class AttemptWriter(Generic[B]):
    """Writes the rows of one try of one task (W1 to W5).

    Each step is a method, which a subclass may wrap or replace.
    """

    def __init__(
        self,
        task: Task,
        attempts: Attempts[B] | None,
        open_sender: Callable[[B | None], Awaitable[Sender]],
        *,
        timeout_s: float,
    ) -> None:
        """`open_sender` makes the sender of an attempt, or of none."""
        self.task = task
        self.state = WriterState.NEW
        self.rows = 0
        """Number of rows given to the sender."""
        self.timeout_s = timeout_s
        self._attempts = attempts
        self._open_sender = open_sender
        self._attempt: B | None = None
        self._sender: Sender | None = None
        self._extension_task: asyncio.Task[None] | None = None
        self._begin_lock = asyncio.Lock()
        self._failure: Exception | None = None
        """Why the attempt could not begin, raised again by later calls."""

    async def expect_rows(self) -> None:
        """Begin without rows, because they are long in coming (W1).  See `write` for errors."""
        if self._attempts is not None:
            await self._begin_once()

    async def write(self, rows: Rows) -> None:
        """Write some rows.  Raises why these or earlier ones cannot be written."""
        if not rows:
            return
        await self._begin_once()
        # The caller takes its next Arrow batch when the sender has these rows (W5).
        if self.state is WriterState.OPEN:
            await self._run_while_open(self.send(rows))
            self.rows += len(rows)
        elif self.state is not WriterState.DONE:
            raise _closed_error(self.state)

    async def finish(self) -> TaskReport:
        """Wait until all rows are stored; the report to the driver (W2).  Raises the failure."""
        counts: Mapping[str, RowCount] = {}
        if self._failure is not None:
            raise self._failure
        if self.state is WriterState.OPEN:
            counts = await self._run_while_open(self.settle())
        elif self.state in (WriterState.SETTLED, WriterState.FAILED):
            raise _closed_error(self.state)
        done = self.state is WriterState.DONE
        self._enter(WriterState.SETTLED)
        return self.report(counts, done=done)

    async def close(self) -> None:
        """Close the attempt and its sender, in any state; give a failed attempt up."""
        if self.state not in (WriterState.SETTLED, WriterState.FAILED):
            self._enter(WriterState.FAILED)
        if self._extension_task is not None:
            self._extension_task.cancel()
            await asyncio.wait((self._extension_task,))
        if self._sender is not None:
            await self._sender.close()
        if self._attempt is not None:
            await self._attempt.close()
            if self.state is WriterState.FAILED and self._attempts is not None:
                await self._attempts.abandon(self._attempt.id)

    # The steps

    async def begin(self) -> None:
        """Begin the attempt (W1); without `attempts` only open the sender (W4)."""
        if self._attempts is None:
            self._sender = await self._open_sender(None)
            self._enter(WriterState.OPEN)
            return
        self._attempt = await self._attempts.begin(self.task, self.timeout_s)
        if self._attempt is None:
            self._enter(WriterState.DONE)
            return
        group = self._attempt.id.group
        self._extension_task = asyncio.get_running_loop().create_task(self._keep_open(group))
        self._sender = await self._open_sender(self._attempt)
        self._enter(WriterState.OPEN)

    async def send(self, rows: Rows) -> None:
        """Give the rows to the sender."""
        assert self._sender is not None, "an open writer has a sender"
        await self._sender.send(rows)

    async def settle(self) -> Mapping[str, RowCount]:
        """Wait for all receipts, and count the rows (W2)."""
        assert self._sender is not None, "an open writer has a sender"
        counts = await self._sender.settle()
        if self._attempt is not None:
            await self._attempt.settled()
        stored = sum(count.messages for count in counts.values())
        if stored != self.rows:
            raise CommitRefused(
                f"Of {self.rows} rows of partition {self.task.partition}, {stored} have a "
                "receipt. The task is tried again; report this."
            )
        return counts

    def report(self, counts: Mapping[str, RowCount], *, done: bool) -> TaskReport:
        """Make the report to the driver."""
        attempt = self._attempt
        return TaskReport(
            nonce=self.task.nonce,
            partition=self.task.partition,
            query=self.task.query,
            batch=self.task.batch,
            group=None if attempt is None else attempt.id.group,
            attempt=None if attempt is None else attempt.id,
            done=done,
            rows=self.rows,
            counts=dict(counts),
        )

    async def extend(self, group: TxnId) -> None:
        """Extend the deadline of the group once (W3)."""
        assert self._attempts is not None, "only attempts have groups"
        await self._attempts.extend(group, self.timeout_s)

    # Helpers of the steps

    async def _begin_once(self) -> None:
        """Begin, unless an earlier call has; raise the failure of that call."""
        async with self._begin_lock:
            if self._failure is not None:
                raise self._failure
            if self.state is not WriterState.NEW:
                return
            try:
                await self.begin()
            except Exception as error:
                self._failure = error
                self._enter(WriterState.FAILED)
                raise

    async def _keep_open(self, group: TxnId) -> None:
        """Extend the deadline until the task is cancelled or an extension fails (W3)."""
        is_logged = False
        while True:
            await asyncio.sleep(self.timeout_s / 2)
            await self.extend(group)
            if not is_logged:
                is_logged = True
                _log.warning(
                    "Partition %d of batch %s has been written for %g s, and readers of the topic "
                    "wait for it: trigger the query more often, or limit its batches.",
                    self.task.partition,
                    self.task.batch,
                    self.timeout_s / 2,
                )

    async def _run_while_open(self, work: Awaitable[R]) -> R:
        """Await the work, and fail at once if the group cannot be kept open meanwhile (W3)."""
        doing = asyncio.ensure_future(work)
        extending = self._extension_task
        try:
            if extending is not None:
                await asyncio.wait((doing, extending), return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    await extending
            return await doing
        finally:
            doing.cancel()
            await asyncio.wait((doing,))

    def _enter(self, state: WriterState) -> None:
        self.state = _NEXT.move(self.state, state, "The writer of an attempt")


def _closed_error(state: WriterState) -> AlreadyClosed:
    return AlreadyClosed(f"The writer of this attempt is {state.value}; make another one.")
