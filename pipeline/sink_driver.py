"""The driver's part of a batch: the one decision that makes its rows visible, or their abort.

Rules:

- D1 The key was opened before the query was started (`pipeline.open_key`), so whatever an earlier
  driver had open is aborted.  This driver presents the epoch that it was given, and raises none.
- D2 A batch is decided by one COMMIT_GROUP, which carries winners, query, batch and positions.  It
  is asked again, under the same nonce, as long as its answer may have been lost.
- D3 Whatever else is wrong is raised: a group that was aborted, or whose time was up, is never
  taken for one that was committed before.  Only the coordinator's word `done`, of this query and
  batch, says that.
- D4 Positions are read before anything is asked, so a batch is never committed without them.
- D5 An abort aborts what is open of this epoch, whatever is known of it.  After a commit, and for
  who is fenced, it does nothing.
- D6 Tasks that were told that their batch is done have dropped its rows.  Where positions are kept
  the coordinator is asked all the same, for it alone can tell whether that was this batch, or
  another one under its number, planned anew after the checkpoint had lost it: that is refused.

Each step is a method of its own, so that a subclass can watch it, or do something before or after.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from magnetar.errors import TransactionKeyFenced
from pipeline.commit import AlreadyDone, Decision, judge
from pipeline.errors import CommitRefused
from pipeline.task_report import TaskReport

__all__ = ["BatchOutcome", "Checkpoint", "Groups", "SinkDriver"]


class BatchOutcome(enum.Enum):
    """What became of a batch whose commit has returned."""

    COMMITTED = "committed"
    """By this commit, or by this one when it was asked before."""
    DONE_BEFORE = "done before"
    """By an earlier try; what this one wrote is not seen."""


class Groups(Protocol):
    """What is asked of the coordinator, under a key and an epoch."""

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        """COMMIT_GROUP.  Whether the batch was done before."""
        ...

    async def abort(self) -> bool:
        """ABORT_GROUP.  Whether something was open."""
        ...


class Checkpoint(Protocol):
    """The checkpoint of the query."""

    async def positions(self, batch: int) -> str:
        """How far the sources have been read by the end of that batch."""
        ...

    async def query(self) -> str:
        """Whose checkpoint it is."""
        ...


class SinkDriver:
    """See the module's rules.  One for each call of Spark."""

    def __init__(
        self, groups: Groups, checkpoint: Checkpoint | None, *, track_positions: bool = False
    ) -> None:
        """Without a `checkpoint` no positions can be tracked."""
        assert checkpoint is not None or not track_positions, "there is nothing to be read"
        self._groups = groups
        self._checkpoint = checkpoint
        self._track_positions = track_positions

    async def commit(self, reports: Sequence[TaskReport | None], batch: int) -> BatchOutcome:
        """Decide the batch that has these reports, of each task one.

        Raises `CommitRefused` and `PositionsUnreadable` before anything is asked,
        `TransactionKeyFenced`, `InvalidTransactionStatus` when its group was aborted, or the batch
        was committed with other positions, and `OperationTimedOut` when nobody has said what became
        of it.
        """
        verdict = judge(reports, batch, await self._query(reports))
        positions = await self.read_positions(batch)
        if isinstance(verdict, AlreadyDone):
            return await self._done_before(verdict, positions)
        done = await self.decide(verdict, positions)
        return BatchOutcome.DONE_BEFORE if done else BatchOutcome.COMMITTED

    async def read_positions(self, batch: int) -> str | None:
        """D4.  None if they are not tracked."""
        if self._checkpoint is None or not self._track_positions:
            return None
        return await self._checkpoint.positions(batch)

    async def decide(self, decision: Decision, positions: str | None) -> bool:
        """D2.  Whether the batch was done before."""
        return await self._groups.commit(decision, positions)

    async def abort(self) -> bool:
        """D5.  Whether something was open."""
        try:
            return await self._groups.abort()
        except TransactionKeyFenced:
            return False  # Whoever opened the key since has aborted it.

    async def _done_before(self, found: AlreadyDone, positions: str | None) -> BatchOutcome:
        """D6."""
        if positions is None or found.query is None:
            await self.abort()
        else:
            again = Decision(found.nonce, None, (), found.query, found.batch)
            if not await self.decide(again, positions):
                raise CommitRefused(
                    f"Batch {found.batch} of query {found.query!r} was told as done to its tasks, "
                    "and is not known any more: too many other queries have the key. Give each "
                    "query a key of its own, and begin with a new checkpoint."
                )
        return BatchOutcome.DONE_BEFORE

    async def _query(self, reports: Sequence[TaskReport | None]) -> str | None:
        """Of the checkpoint, where no task was told."""
        if self._checkpoint is None or any(r is not None and r.query is not None for r in reports):
            return None
        return await self._checkpoint.query()
