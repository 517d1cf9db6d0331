"""`AttachedTransaction`: a transaction that runs, used by its id, whoever began it.

Rules:

- It is given wherever a transaction is.  Nothing is asked of the broker for its end: `close` only
  says that this process uses it no more, and may be called with sends under way.
- `settled` returns when everything that was sent and acknowledged in it, here, is durable; only
  then may it be ended as committed.  What other processes have in it they settle themselves.
- It has no deadline here: the broker's counts, from the beginning.
- Whoever acknowledges in it is not told of its end by it: that is known where it is ended.
"""

from typing import Final

from magnetar.context import ClientContext, check_loop
from magnetar.errors import AlreadyClosed, MagnetarError, TransactionFailed
from magnetar.opening import ClosedAfterwards
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.key_holder import KeyHolder
from magnetar.transactions.work import Work

__all__ = ["AttachedTransaction"]


class AttachedTransaction(Work, ClosedAfterwards):
    """A transaction that another process began, used here by its id.

    Made by `Client.attach_transaction`; `async with` closes it.
    """

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        id: TxnId,
        key: KeyHolder | None = None,
    ) -> None:
        super().__init__(context, coordinators, key)
        self._id: Final = id
        self._closed = False

    @property
    def id(self) -> TxnId:
        """What the broker calls it."""
        return self._id

    async def settled(self) -> None:
        """Until all that was sent and acknowledged in it here is durable.

        Raises the first failure of those: then it must not be committed.
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
        self._tasks.cancel()

    def describe(self) -> str:
        """What it is, as the beginning of a sentence."""
        return f"Transaction {self.id}"

    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        if not self._closed:
            return None
        return AlreadyClosed(f"{self.describe()} is used no more here; begin another one.")

    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        return TransactionFailed(
            f"{self.describe()} can only be given up, because of an earlier error "
            f"({failure}) Begin another one."
        )
