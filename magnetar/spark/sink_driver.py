"""The driver's part of a batch: the one decision that makes its rows visible, or their abort.

Rules:

- D1 The key was opened before the query was started (`magnetar.spark.open_key`), which aborted
  the open groups of an earlier driver.  This driver uses the epoch that it was given, and does not
  raise it.
- D2 One COMMIT_GROUP decides a batch.  It carries winners, query, batch and positions.  It is sent
  again, under the same nonce, as long as its answer may have been lost.
- D3 Every other error is raised: a group that was aborted or has timed out never counts as one that
  was committed before.  Only the coordinator's answer `done`, for this query and batch, says so.
- D4 Positions are read before any request, so a batch is never committed without them.
- D5 An abort aborts every open group of this epoch.  After a commit, or under a fenced epoch, it
  does nothing.
- D6 A task that learned that its batch is done has dropped its rows.  Where positions are kept, the
  coordinator is asked all the same: only it knows whether that was this batch, or another one under
  the same number, planned anew after the checkpoint had lost it.  The latter is refused.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from magnetar.errors import TransactionKeyFenced
from magnetar.spark.commit import AlreadyDone, Decision, judge
from magnetar.spark.errors import CommitRefused
from magnetar.spark.task_report import TaskReport

__all__ = ["BatchOutcome", "Checkpoint", "Groups", "SinkDriver"]


class BatchOutcome(enum.Enum):
    """The outcome of a batch whose commit has returned."""

    COMMITTED = "committed"
    """This commit has committed it, now or in a request whose answer was lost."""
    DONE_BEFORE = "done before"
    """An earlier try has committed it; the rows of this one stay invisible."""


class Groups(Protocol):
    """The driver's requests to the coordinator, under a key and an epoch."""

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        """Send COMMIT_GROUP; whether the batch was done before."""
        ...

    async def abort(self) -> bool:
        """Send ABORT_GROUP; whether a group was open."""
        ...


class Checkpoint(Protocol):
    """The checkpoint of the query."""

    async def positions(self, batch: int) -> str:
        """The positions of the sources at the end of a batch."""
        ...

    async def query(self) -> str:
        """The id of the checkpoint's query."""
        ...


class SinkDriver:
    """Commits or aborts one batch (D1 to D6); each call of Spark makes its own.

    Each step is a method, which a subclass may wrap or replace.
    """

    def __init__(
        self, groups: Groups, checkpoint: Checkpoint | None, *, track_positions: bool = False
    ) -> None:
        """Make the driver; tracking positions needs a `checkpoint`."""
        assert checkpoint is not None or not track_positions, "positions need a checkpoint"
        self._groups = groups
        self._checkpoint = checkpoint
        self._track_positions = track_positions

    async def commit(self, reports: Sequence[TaskReport | None], batch: int) -> BatchOutcome:
        """Decide a batch by the reports of its tasks, one of each task.

        Raises `CommitRefused` and `PositionsUnreadable` before any request, `TransactionKeyFenced`,
        `InvalidTransactionStatus` when the group was aborted or the batch was committed with other
        positions, and `OperationTimedOut` when its outcome is not known.
        """
        verdict = judge(reports, batch, await self._query(reports))
        # Before any request (D4).
        positions = await self.read_positions(batch)
        if isinstance(verdict, AlreadyDone):
            return await self._done_before(verdict, positions)
        done = await self.decide(verdict, positions)
        return BatchOutcome.DONE_BEFORE if done else BatchOutcome.COMMITTED

    async def read_positions(self, batch: int) -> str | None:
        """Read the batch's positions from the checkpoint (D4); None if they are not tracked."""
        if self._checkpoint is None or not self._track_positions:
            return None
        return await self._checkpoint.positions(batch)

    async def decide(self, decision: Decision, positions: str | None) -> bool:
        """Send the decision (D2); whether the batch was done before."""
        # No error means done: only the coordinator's answer does (D3).
        return await self._groups.commit(decision, positions)

    async def abort(self) -> bool:
        """Abort the open group (D5); whether there was one."""
        try:
            return await self._groups.abort()
        except TransactionKeyFenced:
            return False  # The key was opened since, which aborted the group.

    async def _done_before(self, found: AlreadyDone, positions: str | None) -> BatchOutcome:
        """Confirm that a batch which tasks learned to be done is this one (D6)."""
        if positions is None or found.query is None:
            await self.abort()
        else:
            # Without a group and winners: the coordinator compares the positions alone.
            again = Decision(found.nonce, None, (), found.query, found.batch)
            if not await self.decide(again, positions):
                raise CommitRefused(
                    f"Batch {found.batch} of query {found.query!r} was done when its tasks began, "
                    "and is not known any more: too many other queries have the key. Give each "
                    "query a key of its own, and begin with a new checkpoint."
                )
        return BatchOutcome.DONE_BEFORE

    async def _query(self, reports: Sequence[TaskReport | None]) -> str | None:
        """The query that the checkpoint names, if no task has reported one."""
        if self._checkpoint is None or any(r is not None and r.query is not None for r in reports):
            return None
        return await self._checkpoint.query()
