"""Transactions and attempts for threads."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from magnetar.errors import AlreadyClosed
from magnetar.protocol.txn_id import TxnId
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.transactions.attached_transaction import (
    AttachedTransaction as AsyncAttachedTransaction,
)
from magnetar.transactions.attempt import Attempt as AsyncAttempt
from magnetar.transactions.states import TransactionState
from magnetar.transactions.transaction import Transaction as AsyncTransaction
from magnetar.transactions.work import Work as AsyncWork


class Work:
    """A transaction or an attempt, as producers and consumers take it.

    It ends, or is settled, only after all messages given to producers in it have reached the loop.
    """

    def __init__(self, bridge: Bridge, core: AsyncWork) -> None:
        self.core = core
        self._bridge = bridge
        self._hand_overs: set[Callable[[], Awaitable[None]]] = set()

    @property
    def id(self) -> TxnId:
        """The id at the broker."""
        return self.core.id

    def after(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Await `hand_over` before it ends or is settled."""
        self._hand_overs.add(hand_over)

    async def _handed_over(self) -> None:
        for hand_over in tuple(self._hand_overs):
            await hand_over()


class Transaction(Work):
    """A `magnetar.Transaction` for threads: the end of its block commits it, or aborts it."""

    core: AsyncTransaction

    def __init__(self, bridge: Bridge, core: AsyncTransaction) -> None:
        super().__init__(bridge, core)

    @property
    def state(self) -> TransactionState:
        """The state of the transaction."""
        return self.core.state

    def commit(self) -> None:
        """Commit it.  Raises the errors of `magnetar.Transaction.commit`."""
        self._bridge.run(self._commit)

    def abort(self) -> None:
        """Abort it.  Raises the errors of `magnetar.Transaction.abort`."""
        self._bridge.run(self._abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bridge.run(self._exit, kind, error, traceback)

    async def _commit(self) -> None:
        await self._handed_over()
        await self.core.commit()

    async def _abort(self) -> None:
        await self._handed_over()
        await self.core.abort()

    async def _exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Exception):
            await self._handed_over()
        await self.core.__aexit__(kind, error, traceback)


class AttachedTransaction(Work, ClosedAfterwards):
    """A `magnetar.AttachedTransaction` for threads; it is ended by its id, here or elsewhere."""

    core: AsyncAttachedTransaction

    def __init__(self, bridge: Bridge, core: AsyncAttachedTransaction) -> None:
        super().__init__(bridge, core)

    def settled(self) -> None:
        """See `magnetar.AttachedTransaction.settled`."""
        self._bridge.run(self._settled)

    def close(self) -> None:
        """Stop using it here.  Idempotent."""
        try:
            self._bridge.run(self.core.close)
        except AlreadyClosed:
            return

    async def _settled(self) -> None:
        await self._handed_over()
        await self.core.settled()


class Attempt(AttachedTransaction):
    """A `magnetar.Attempt` for threads: its group commits it or aborts it."""

    core: AsyncAttempt

    def __init__(self, bridge: Bridge, core: AsyncAttempt) -> None:
        super().__init__(bridge, core)

    @property
    def group(self) -> TxnId:
        """The id of its group."""
        return self.core.group
