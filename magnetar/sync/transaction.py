"""Transactions and their keys for threads.

Rule: a transaction ends when everything that was given to producers in it has reached the loop.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from magnetar.errors import AlreadyClosed
from magnetar.sync.bridge import Bridge, ClosedAfterwards

if TYPE_CHECKING:
    from magnetar.transactions.keys import TransactionKey as AsyncTransactionKey
    from magnetar.transactions.states import TransactionState
    from magnetar.transactions.transaction import Transaction as AsyncTransaction
    from magnetar.transactions.txn_id import TxnId


class Transaction:
    """As `magnetar.Transaction`: leaving its block commits it, or aborts it on an error."""

    def __init__(self, bridge: Bridge, core: "AsyncTransaction") -> None:
        self.core = core
        self._bridge = bridge
        self._hand_overs: set[Callable[[], Awaitable[None]]] = set()

    @property
    def id(self) -> "TxnId":
        """What the broker calls it."""
        return self.core.id

    @property
    def state(self) -> "TransactionState":
        """Where it stands."""
        return self.core.state

    def after(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Its end waits for this."""
        self._hand_overs.add(hand_over)

    def commit(self) -> None:
        """Make everything in it take effect.  Raises what `magnetar.Transaction.commit` raises."""
        self._bridge.run(self._commit)

    def abort(self) -> None:
        """Undo everything in it.  Raises what `magnetar.Transaction.abort` raises."""
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

    async def _handed_over(self) -> None:
        for hand_over in tuple(self._hand_overs):
            await hand_over()

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


class TransactionKey(ClosedAfterwards):
    """As `magnetar.TransactionKey`: while it is the newest, nobody else's transactions count."""

    def __init__(self, bridge: Bridge, core: "AsyncTransactionKey") -> None:
        self.core = core
        self._bridge = bridge

    @property
    def name(self) -> str:
        """What it is called."""
        return self.core.name

    @property
    def epoch(self) -> int:
        """For others to attach with."""
        return self.core.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether somebody else has opened it since."""
        return self.core.is_fenced

    def close(self) -> None:
        """Use it no more.  Idempotent."""
        try:
            self._bridge.run(self.core.close)
        except AlreadyClosed:
            return
