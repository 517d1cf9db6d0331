"""`TransactionKey`: a transaction key held by a client, and the groups of its batches."""

import math
from collections.abc import Sequence

from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, OperationTimedOut, TransactionKeyFenced
from magnetar.protocol.txn_id import TxnId
from magnetar.settings import check_positive
from magnetar.transactions.attempt import Attempt
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.groups import (
    CommittedGroup,
    Winner,
    abort_request,
    attempt_request,
    commit_request,
    extend_request,
)
from magnetar.transactions.key_holder import NO_EPOCH, KeyHolder
from magnetar.wire.attachment import is_retriable

__all__ = ["TransactionKey"]


class TransactionKey(KeyHolder):
    """A transaction key held by this process: begins attempts and commits groups under its epoch.

    Made by `Client.transaction_key` and `Client.attach_transaction_key`.  `async with` closes it;
    the epoch stays valid for other holders.
    """

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        name: str,
        epoch: int = NO_EPOCH,
        *,
        attach: bool = False,
    ) -> None:
        """See `KeyHolder`."""
        super().__init__(context, coordinators.connections, name, epoch, attach=attach)
        self._coordinators = coordinators

    async def begin_attempt(
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
        check_positive("timeout_s", timeout_s)
        command = attempt_request(nonce, math.ceil(timeout_s * 1000), query, batch)
        answer = await self._coordinators.ask_of_key(self, command, "The beginning of an attempt")
        begun = answer.begin_attempt_response
        if begun.done:
            return None
        id = TxnId(begun.txnid_most_bits, begun.txnid_least_bits)
        return Attempt(self.context, self._coordinators, self, id)

    async def commit_group(
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
        command = commit_request(nonce, group, winners, query, batch, positions)
        what = f"The commit of batch {batch} of {query!r}"
        try:
            answer = await self._coordinators.ask_of_key(self, command, what)
        except MagnetarError as error:
            if not is_retriable(error):
                raise
            raise OperationTimedOut(
                f"The broker did not say in time whether batch {batch} of {query!r} was committed "
                f"({error}) Request the same commit again to learn it."
            ) from error
        result = answer.commit_group_response
        has_group = result.HasField("group_least_bits")
        return CommittedGroup(
            result.done,
            TxnId(result.txnid_most_bits, result.group_least_bits) if has_group else None,
        )

    async def abort_group(self) -> bool:
        """Abort the open group of the key under this epoch; returns whether this aborted one.

        It is False too if the group has ended, or if the epoch is not the newest: opening a newer
        epoch has aborted it.
        """
        try:
            answer = await self._coordinators.ask_of_key(self, abort_request(), "An abort")
        except TransactionKeyFenced:
            return False
        return answer.abort_group_response.aborted

    async def extend_group(self, group: TxnId, timeout_s: float) -> None:
        """Keep a group open for at least `timeout_s` from now; `group` may be an attempt's id.

        Raises `InvalidTransactionStatus` if it has ended, and `TransactionKeyFenced`.
        """
        check_positive("timeout_s", timeout_s)
        command = extend_request(group, math.ceil(timeout_s * 1000))
        await self._coordinators.ask_of_key(self, command, f"The extension of group {group}")
