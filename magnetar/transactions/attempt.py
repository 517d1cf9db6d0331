"""`Attempt`: one try of one part of a batch; its group decides whether it counts.

Rules:

- It is given wherever a transaction is.  Nothing is asked of the broker for its end: `close` only
  says that this process uses it no more, and may be called with sends under way.
- `settled` returns when everything that was sent and acknowledged in it is durable; then it may be
  named among the winners of its group.  What was not settled must not be.
- It has no deadline here: its group has one, which others may extend.
- Whoever acknowledges in it is not told of its end by it: that is known where the group ends.
"""

from typing import TYPE_CHECKING, Final

from magnetar.context import ClientContext, check_loop
from magnetar.errors import AlreadyClosed, MagnetarError, TransactionFailed
from magnetar.opening import ClosedAfterwards
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.txn_id import TxnId
from magnetar.transactions.work import Work

if TYPE_CHECKING:
    from magnetar.transactions.keys import TransactionKey

__all__ = ["Attempt"]


class Attempt(Work, ClosedAfterwards):
    """See the module's rules.  Made by `TransactionKey.begin_attempt`; `async with` closes it."""

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        key: "TransactionKey",
        id: TxnId,
    ) -> None:
        super().__init__(context, coordinators, key)
        self._id: Final = id
        self._closed = False

    @property
    def id(self) -> TxnId:
        """What the broker calls it."""
        return self._id

    @property
    def group(self) -> TxnId:
        """What the broker calls its group."""
        return self._id.group

    async def settled(self) -> None:
        """Until all that was sent and acknowledged in it is durable.

        Raises the first failure of those: then it must not be a winner.
        """
        check_loop(self._loop)
        while self._unsettled and self._failure is None:
            await self._settles()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure

    async def close(self) -> None:
        """Use it no more.  Nothing is said to the broker."""
        check_loop(self._loop)
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()

    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        if not self._closed:
            return None
        return AlreadyClosed(f"Attempt {self.id} is closed; begin another one.")

    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        return TransactionFailed(
            f"Attempt {self.id} can only be given up, because of an earlier error "
            f"({failure}) Begin another one."
        )
