"""Transaction keys for threads.

Generated from magnetar/transactions/keys.py by `make sync`: edit that file.
"""

from collections.abc import Sequence

from magnetar.errors import AlreadyClosed
from magnetar.protocol.txn_id import TxnId
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.transaction import Attempt
from magnetar.transactions.groups import CommittedGroup, GroupRecord, Winner
from magnetar.transactions.key_holder import LastTransaction
from magnetar.transactions.keys import TransactionKey as AsyncTransactionKey

__all__ = ["TransactionKey"]


class TransactionKey(ClosedAfterwards):
    """As `magnetar.TransactionKey`: while it is the newest, nobody else's transactions count."""

    def __init__(self, bridge: Bridge, core: AsyncTransactionKey) -> None:
        self._core = core
        self._bridge = bridge

    @property
    def core(self) -> AsyncTransactionKey:
        """The key for tasks."""
        return self._core

    @property
    def name(self) -> str:
        """The key's name."""
        return self._core.name

    @property
    def epoch(self) -> int:
        """The epoch that opening gave; others attach with it."""
        return self._core.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer epoch has shut it out."""
        return self._core.is_fenced

    @property
    def last_transaction(self) -> LastTransaction | None:
        """The last transaction of the epochs before, as the opening found it."""
        return self._core.last_transaction

    @property
    def last_group(self) -> GroupRecord | None:
        """What the last group that committed was for, as the opening found it."""
        return self._core.last_group

    def begin_attempt(
        self,
        nonce: str,
        *,
        timeout_s: float = 60.0,
        query: str | None = None,
        batch: int | None = None,
    ) -> Attempt | None:
        """An attempt in the group of that nonce, which begins with its first attempt.

        The group stays open for `timeout_s` from now at least; afterwards the broker aborts it.
        With `query` and `batch`, what the group is to commit for: None if that was committed
        before, so that there is nothing to be done.

        Raises `InvalidTransactionStatus` if the group of that nonce has ended, or something else of
        the key is open, `TransactionKeyFenced`, `NotSupported` where there are no groups,
        `NotAllowed` for a nonce that cannot be or a group that has too many attempts, and after the
        operation timeout why it could not be begun.
        """
        core = self._bridge.run(
            self._core.begin_attempt, nonce, timeout_s=timeout_s, query=query, batch=batch
        )
        return None if core is None else Attempt(self._bridge, core)

    def commit_group(
        self,
        nonce: str,
        group: TxnId | None,
        winners: Sequence[Winner],
        *,
        query: str,
        batch: int,
        positions: str | None = None,
    ) -> CommittedGroup:
        """Commit the group of that nonce, of its attempts only the winners, for a batch of a query.

        `group` is None if no attempt was begun: then the batch is recorded.  `positions` is kept
        with it.  Asking again for the same is answered the same.  A batch that is not above the
        last one of its query was committed before: the group is aborted, and the answer says so.

        Raises `InvalidTransactionStatus` if the group has ended otherwise (its time was up, or it
        was aborted), `ExpiredTransaction`, `TransactionKeyFenced`, `NotSupported`, `NotAllowed` if
        a winner is no attempt of the group, or all of it is too large for one record.
        `OperationTimedOut`: the broker has not said whether it committed; asking again tells.
        """
        return self._bridge.run(
            self._core.commit_group,
            nonce,
            group,
            winners,
            query=query,
            batch=batch,
            positions=positions,
        )

    def abort_group(self) -> bool:
        """Abort what is open of the key under this epoch; whether something was, by this.

        False, too, if it has ended, or if the epoch is not the newest: opening the newest has
        aborted it.
        """
        return self._bridge.run(self._core.abort_group)

    def extend_group(self, group: TxnId, timeout_s: float) -> None:
        """Keep the group (or that of an attempt) open for that long from now, at least.

        Raises `InvalidTransactionStatus` if it has ended, `TransactionKeyFenced`.
        """
        self._bridge.run(self._core.extend_group, group, timeout_s)

    def close(self) -> None:
        """Use it no more, which leaves the epoch to others. Idempotent."""
        try:
            self._bridge.run(self._core.close)
        except AlreadyClosed:
            return
