"""Transactions, attempts and their keys for threads.

Rule: a transaction ends, and an attempt is settled, when everything that was given to producers in
it has reached the loop.
"""

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from magnetar.errors import AlreadyClosed
from magnetar.sync.bridge import Bridge, ClosedAfterwards

if TYPE_CHECKING:
    from magnetar.transactions.attached import AttachedTransaction as AsyncAttachedTransaction
    from magnetar.transactions.attempt import Attempt as AsyncAttempt
    from magnetar.transactions.groups import CommittedGroup, GroupRecord, Winner
    from magnetar.transactions.keys import LastTransaction
    from magnetar.transactions.keys import TransactionKey as AsyncTransactionKey
    from magnetar.transactions.states import TransactionState
    from magnetar.transactions.transaction import Transaction as AsyncTransaction
    from magnetar.transactions.txn_id import TxnId
    from magnetar.transactions.work import Work as AsyncWork


class Work:
    """What a producer and a consumer take as their transaction."""

    def __init__(self, bridge: Bridge, core: "AsyncWork") -> None:
        self.core = core
        self._bridge = bridge
        self._hand_overs: set[Callable[[], Awaitable[None]]] = set()

    @property
    def id(self) -> "TxnId":
        """What the broker calls it."""
        return self.core.id

    def after(self, hand_over: Callable[[], Awaitable[None]]) -> None:
        """Its end waits for this."""
        self._hand_overs.add(hand_over)

    async def _handed_over(self) -> None:
        for hand_over in tuple(self._hand_overs):
            await hand_over()


class Transaction(Work):
    """As `magnetar.Transaction`: leaving its block commits it, or aborts it on an error."""

    core: "AsyncTransaction"

    def __init__(self, bridge: Bridge, core: "AsyncTransaction") -> None:
        super().__init__(bridge, core)

    @property
    def state(self) -> "TransactionState":
        """Where it stands."""
        return self.core.state

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
    """As `magnetar.AttachedTransaction`: it is ended by its id, here or elsewhere."""

    core: "AsyncAttachedTransaction"

    def __init__(self, bridge: Bridge, core: "AsyncAttachedTransaction") -> None:
        super().__init__(bridge, core)

    def settled(self) -> None:
        """As `magnetar.AttachedTransaction.settled`."""
        self._bridge.run(self._settled)

    def close(self) -> None:
        """Use it no more.  Idempotent."""
        try:
            self._bridge.run(self.core.close)
        except AlreadyClosed:
            return

    async def _settled(self) -> None:
        await self._handed_over()
        await self.core.settled()


class Attempt(AttachedTransaction):
    """As `magnetar.Attempt`: its group decides whether what is in it counts."""

    core: "AsyncAttempt"

    def __init__(self, bridge: Bridge, core: "AsyncAttempt") -> None:
        super().__init__(bridge, core)

    @property
    def group(self) -> "TxnId":
        """What the broker calls its group."""
        return self.core.group


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

    @property
    def last_transaction(self) -> "LastTransaction | None":
        """What the opening found: the last transaction of the epochs before."""
        return self.core.last_transaction

    @property
    def last_group(self) -> "GroupRecord | None":
        """What the opening found: what the last group that committed was for."""
        return self.core.last_group

    def begin_attempt(
        self,
        nonce: str,
        *,
        timeout_s: float = 60.0,
        query: str | None = None,
        batch: int | None = None,
    ) -> Attempt | None:
        """As `magnetar.TransactionKey.begin_attempt`."""
        core = self._bridge.run(
            self.core.begin_attempt, nonce, timeout_s=timeout_s, query=query, batch=batch
        )
        return None if core is None else Attempt(self._bridge, core)

    def commit_group(
        self,
        nonce: str,
        group: "TxnId | None",
        winners: "Sequence[Winner]",
        *,
        query: str,
        batch: int,
        positions: str | None = None,
    ) -> "CommittedGroup":
        """As `magnetar.TransactionKey.commit_group`."""
        return self._bridge.run(
            self.core.commit_group,
            nonce,
            group,
            winners,
            query=query,
            batch=batch,
            positions=positions,
        )

    def abort_group(self) -> bool:
        """As `magnetar.TransactionKey.abort_group`."""
        return self._bridge.run(self.core.abort_group)

    def extend_group(self, group: "TxnId", timeout_s: float) -> None:
        """As `magnetar.TransactionKey.extend_group`."""
        self._bridge.run(self.core.extend_group, group, timeout_s)

    def close(self) -> None:
        """Use it no more.  Idempotent."""
        try:
            self._bridge.run(self.core.close)
        except AlreadyClosed:
            return
