"""`AttachedTransaction`: a running transaction, used by its id."""

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
    """A running transaction, used here by its id, also if another process began it.

    Made by `Client.attach_transaction`; `async with` closes it.  Sends and acknowledgements take it
    like any transaction.  It has no deadline here: that of the broker counts.  Consumers that
    acknowledged in it do not learn how it ended.
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
        """The transaction's id at the broker."""
        return self._id

    async def settled(self) -> None:
        """Wait until all that was sent and acknowledged in it here is durable.

        Only then can it be committed.  Raises the first failure: then it must not be committed.
        """
        check_loop(self._loop)
        while self._unsettled and self._failure is None:
            await self._wait_settled()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure

    async def close(self) -> None:
        """Stop using it here; no request goes to the broker.  Sends may be under way."""
        check_loop(self._loop)
        self._closed = True
        self._tasks.cancel()

    def describe(self) -> str:
        """The name used in errors, as the beginning of a sentence."""
        return f"Transaction {self.id}"

    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        if not self._closed:
            return None
        return AlreadyClosed(f"{self.describe()} is closed here; begin another one.")

    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        return TransactionFailed(
            f"{self.describe()} cannot be used any more, because of an earlier error "
            f"({failure}) Begin another one."
        )
