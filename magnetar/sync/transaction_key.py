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
    """A `magnetar.TransactionKey` for threads."""

    def __init__(self, bridge: Bridge, core: AsyncTransactionKey) -> None:
        self._core = core
        self._bridge = bridge

    @property
    def core(self) -> AsyncTransactionKey:
        """The asyncio key."""
        return self._core

    @property
    def name(self) -> str:
        """The key's name."""
        return self._core.name

    @property
    def epoch(self) -> int:
        """The epoch of the key, with which other processes can attach."""
        return self._core.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a newer epoch has fenced it."""
        return self._core.is_fenced

    @property
    def last_transaction(self) -> LastTransaction | None:
        """The last transaction of earlier epochs, as opening found it."""
        return self._core.last_transaction

    @property
    def last_group(self) -> GroupRecord | None:
        """The last batch that a group of any epoch committed, as opening found it."""
        return self._core.last_group

    def begin_attempt(
        self,
        nonce: str,
        *,
        timeout_s: float = 60.0,
        query: str | None = None,
        batch: int | None = None,
    ) -> Attempt | None:
        """Begin an attempt in the group of that nonce, which begins with its first attempt.

        The group stays open for at least `timeout_s` from now; afterwards the broker aborts it.
        With the `query` and `batch` for which the group will commit, the result is None if that
        batch was committed before.

        Raises `InvalidTransactionStatus` if the group of that nonce has ended, or another group or
        transaction of the key is open, `TransactionKeyFenced`, `NotSupported` where there are no
        groups, `NotAllowed` for an invalid nonce or too many attempts, and the last error after the
        operation timeout.
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
        """Commit the winners of the group of that nonce, for a batch of a query.

        `group` is None if no attempt was begun: then only the batch is recorded.  `positions` is
        stored with it.  The same call again has the same result.  A batch that is not above the
        last one of its query was committed before: then the group is aborted, and `done` is true.

        Raises `InvalidTransactionStatus` if the group has timed out or was aborted,
        `ExpiredTransaction`, `TransactionKeyFenced`, `NotSupported`, `NotAllowed` if a winner is
        not an attempt of the group or the commit is too large for one record, and
        `OperationTimedOut` if the broker did not answer: call it again to learn the result.
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
        """Abort the open group of the key under this epoch; returns whether this aborted one.

        It is False too if the group has ended, or if the epoch is not the newest: opening a newer
        epoch has aborted it.
        """
        return self._bridge.run(self._core.abort_group)

    def extend_group(self, group: TxnId, timeout_s: float) -> None:
        """Keep a group open for at least `timeout_s` from now; `group` may be an attempt's id.

        Raises `InvalidTransactionStatus` if it has ended, and `TransactionKeyFenced`.
        """
        self._bridge.run(self._core.extend_group, group, timeout_s)

    def close(self) -> None:
        """Close it; the epoch stays valid for other holders. Idempotent."""
        try:
            self._bridge.run(self._core.close)
        except AlreadyClosed:
            return
