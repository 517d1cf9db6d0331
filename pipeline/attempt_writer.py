"""One try of one task: its rows in an attempt, counted where they ended up.

    NEW    nothing was asked yet: a task without rows asks for nothing, unless it takes long
    OPEN   has an attempt, and writes in it
    DONE   was told that the batch was committed before: its rows are dropped
    SETTLED, FAILED   nothing more is written

Rules:

- W1 The attempt is begun with the first row, or when that is long in coming (`expect_rows`): then
  it may be this task alone that keeps the group open.  The task's query and batch go along, so that
  a batch that is done is not written again.
- W2 A report is given when every row has its receipt; it counts each where its receipt says that it
  is, so a segment that is sealed meanwhile makes no difference.  Any row that has none fails the
  try: Spark makes another one, in another attempt.
- W3 While it is open the group is kept open: its deadline is moved on whenever half of it has gone
  by.  Readers wait for open groups, so the first time that is told to the log.  Who cannot move it
  on fails.
- W4 Where rows may come twice (no `attempts`), they are written at once, and in no group.
- W5 No more rows are in memory than the sender allows, and one Arrow batch.

Each step is a method of its own, so that a subclass can watch it, or do something before or after.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from magnetar.errors import AlreadyClosed
from magnetar.transactions.txn_id import TxnId
from pipeline.errors import CommitRefused
from pipeline.sink_rows import Rows
from pipeline.task_report import RowCount, TaskReport

__all__ = ["AttemptWriter", "Attempts", "Sender", "Task", "WriterState"]

_log: Final = logging.getLogger(__name__)


class WriterState(enum.Enum):
    """See the module's docstring."""

    NEW = "new"
    OPEN = "open"
    DONE = "done"
    SETTLED = "settled"
    FAILED = "failed"


_S: Final = WriterState
_NEXT: Final[Mapping[WriterState, frozenset[WriterState]]] = MappingProxyType(
    {
        _S.NEW: frozenset({_S.OPEN, _S.DONE, _S.SETTLED, _S.FAILED}),
        _S.OPEN: frozenset({_S.SETTLED, _S.FAILED}),
        _S.DONE: frozenset({_S.SETTLED, _S.FAILED}),
        _S.SETTLED: frozenset(),
        _S.FAILED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class Task:
    """Whose try it is.  `query` and `batch` as far as the task is told them."""

    nonce: str
    partition: int
    query: str | None = None
    batch: int | None = None


class Begun(Protocol):
    """An attempt, as the client gives it."""

    @property
    def id(self) -> TxnId:
        """What its rows carry."""
        ...

    async def settled(self) -> None:
        """Until all that was sent in it is durable.  Raises the first failure."""
        ...

    async def close(self) -> None:
        """Use it no more; its group decides."""
        ...


B = TypeVar("B", bound=Begun)
B_co = TypeVar("B_co", bound=Begun, covariant=True)
R = TypeVar("R")


class Attempts(Protocol[B_co]):
    """What is asked of the coordinator, under a key and an epoch."""

    async def begin(self, task: Task, timeout_s: float) -> B_co | None:
        """BEGIN_ATTEMPT; None: the batch is done."""
        ...

    async def extend(self, group: TxnId, timeout_s: float) -> None:
        """EXTEND_GROUP."""
        ...

    async def abandon(self, attempt: TxnId) -> None:
        """Nothing will come of it.  Raises nothing."""
        ...


class Sender(Protocol):
    """Writes rows to the topic, in one attempt."""

    async def send(self, rows: Rows) -> None:
        """Returns when there is room for more.  Raises the first failure that is known."""
        ...

    async def settle(self) -> Mapping[str, RowCount]:
        """When all rows have their receipts: how many are where.  Raises the first failure."""
        ...

    async def close(self) -> None:
        """Leave; raises nothing of rows."""
        ...


class AttemptWriter(Generic[B]):
    """See the module's rules."""

    def __init__(
        self,
        task: Task,
        attempts: Attempts[B] | None,
        open_sender: Callable[[B | None], Awaitable[Sender]],
        *,
        timeout_s: float,
    ) -> None:
        """`open_sender` makes what writes in an attempt, or in none."""
        self.task = task
        self.state = WriterState.NEW
        self.rows = 0
        """Given to the sender."""
        self.timeout_s = timeout_s
        self._attempts = attempts
        self._open_sender = open_sender
        self._attempt: B | None = None
        self._sender: Sender | None = None
        self._extending: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._failure: Exception | None = None
        """Of the beginning, for who asks again."""

    async def expect_rows(self) -> None:
        """Rows are long in coming: begin without them.  Raises as `write`."""
        if self._attempts is not None:
            await self._begun()

    async def write(self, rows: Rows) -> None:
        """Write some rows.  Raises why they cannot be, then or earlier."""
        if not rows:
            return
        await self._begun()
        if self.state is WriterState.OPEN:
            await self._kept_open(self.send(rows))
            self.rows += len(rows)
        elif self.state is not WriterState.DONE:
            raise _misused(self.state)

    async def finish(self) -> TaskReport:
        """When everything is stored: what to tell the driver.  Raises why it is not."""
        counts: Mapping[str, RowCount] = {}
        if self._failure is not None:
            raise self._failure
        if self.state is WriterState.OPEN:
            counts = await self._kept_open(self.settle())
        elif self.state in (WriterState.SETTLED, WriterState.FAILED):
            raise _misused(self.state)
        done = self.state is WriterState.DONE
        self._enter(WriterState.SETTLED)
        return self.report(counts, done=done)

    async def close(self) -> None:
        """Leave the attempt to its group, whatever became of it."""
        if self.state not in (WriterState.SETTLED, WriterState.FAILED):
            self._enter(WriterState.FAILED)
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.wait((self._extending,))
        if self._sender is not None:
            await self._sender.close()
        if self._attempt is not None:
            await self._attempt.close()
            if self.state is WriterState.FAILED and self._attempts is not None:
                await self._attempts.abandon(self._attempt.id)

    # Its steps

    async def begin(self) -> None:
        """W1, W4."""
        if self._attempts is None:
            self._sender = await self._open_sender(None)
            self._enter(WriterState.OPEN)
            return
        self._attempt = await self._attempts.begin(self.task, self.timeout_s)
        if self._attempt is None:
            self._enter(WriterState.DONE)
            return
        group = self._attempt.id.group
        self._extending = asyncio.get_running_loop().create_task(self._keep_open(group))
        self._sender = await self._open_sender(self._attempt)
        self._enter(WriterState.OPEN)

    async def send(self, rows: Rows) -> None:
        """Give them to the sender."""
        assert self._sender is not None, "only who is open sends"
        await self._sender.send(rows)

    async def settle(self) -> Mapping[str, RowCount]:
        """W2."""
        assert self._sender is not None, "only who is open settles"
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
        """What it tells the driver."""
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
        """W3, once."""
        assert self._attempts is not None, "only attempts have groups"
        await self._attempts.extend(group, self.timeout_s)

    # How it is done

    async def _begun(self) -> None:
        """Begin once, whoever asks first."""
        async with self._beginning:
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
        """Until it is cancelled, or the deadline cannot be moved on."""
        told = False
        while True:
            await asyncio.sleep(self.timeout_s / 2)
            await self.extend(group)
            if not told:
                told = True
                _log.warning(
                    "Partition %d of batch %s has been written for %g s, and readers of the topic "
                    "wait for it: trigger the query more often, or limit its batches.",
                    self.task.partition,
                    self.task.batch,
                    self.timeout_s / 2,
                )

    async def _kept_open(self, work: Awaitable[R]) -> R:
        """The result of the work, unless the group cannot be kept open meanwhile."""
        doing = asyncio.ensure_future(work)
        extending = self._extending
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
        assert state in _NEXT[self.state], (self.state, state)
        self.state = state


def _misused(state: WriterState) -> AlreadyClosed:
    return AlreadyClosed(f"The writer of this attempt is {state.value}; make another one.")
