"""Transaction keys, as a client gives them: a holder of a key, and the groups of its batches.

Rules: as of `key_holder.py`.  A key's groups are asked for under its epoch like its transactions;
what has no answer is asked again for the operation timeout, which the nonce makes harmless
(`groups.py`).
"""

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

    `async with` closes it, which leaves the epoch to others.
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
        """As `KeyHolder`."""
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
        """An attempt in the group of that nonce, which begins with its first attempt.

        The group stays open for `timeout_s` from now at least; afterwards the broker aborts it.
        With `query` and `batch`, what the group is to commit for: None if that was committed
        before, so that there is nothing to be done.

        Raises `InvalidTransactionStatus` if the group of that nonce has ended, or something else of
        the key is open, `TransactionKeyFenced`, `NotSupported` where there are no groups,
        `NotAllowed` for a nonce that cannot be or a group that has too many attempts, and after the
        operation timeout why it could not be begun.
        """
        check_positive("timeout_s", timeout_s)
        command = attempt_request(nonce, math.ceil(timeout_s * 1000), query, batch)
        answer = await self._coordinators.ask_of_key(self, command, "The beginning of an attempt")
        told = answer.begin_attempt_response
        if told.done:
            return None
        id = TxnId(told.txnid_most_bits, told.txnid_least_bits)
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
        """Commit the group of that nonce, of its attempts only the winners, for a batch of a query.

        `group` is None if no attempt was begun: then the batch is recorded.  `positions` is kept
        with it.  Asking again for the same is answered the same.  A batch that is not above the
        last one of its query was committed before: the group is aborted, and the answer says so.

        Raises `InvalidTransactionStatus` if the group has ended otherwise (its time was up, or it
        was aborted), `ExpiredTransaction`, `TransactionKeyFenced`, `NotSupported`, `NotAllowed` if
        a winner is no attempt of the group, or all of it is too large for one record.
        `OperationTimedOut`: the broker has not said whether it committed; asking again tells.
        """
        command = commit_request(nonce, group, winners, query, batch, positions)
        what = f"The commit of batch {batch} of {query!r}"
        try:
            answer = await self._coordinators.ask_of_key(self, command, what)
        except MagnetarError as error:
            if not is_retriable(error):
                raise
            raise OperationTimedOut(
                f"The broker has not said in time whether batch {batch} of {query!r} was committed "
                f"({error}) Ask for the same commit again; it tells."
            ) from error
        told = answer.commit_group_response
        named = told.HasField("group_least_bits")
        return CommittedGroup(
            told.done, TxnId(told.txnid_most_bits, told.group_least_bits) if named else None
        )

    async def abort_group(self) -> bool:
        """Abort what is open of the key under this epoch; whether something was, by this.

        False, too, if it has ended, or if the epoch is not the newest: opening the newest has
        aborted it.
        """
        try:
            answer = await self._coordinators.ask_of_key(self, abort_request(), "An abort")
        except TransactionKeyFenced:
            return False
        return answer.abort_group_response.aborted

    async def extend_group(self, group: TxnId, timeout_s: float) -> None:
        """Keep the group (or that of an attempt) open for that long from now, at least.

        Raises `InvalidTransactionStatus` if it has ended, `TransactionKeyFenced`.
        """
        check_positive("timeout_s", timeout_s)
        command = extend_request(group, math.ceil(timeout_s * 1000))
        await self._coordinators.ask_of_key(self, command, f"The extension of group {group}")
