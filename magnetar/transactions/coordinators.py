"""`Coordinators`, which sends the requests of transactions to their coordinators."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from magnetar.context import ClientContext
from magnetar.errors import (
    CoordinatorNotFound,
    ExpiredTransaction,
    InvalidTransactionStatus,
    MagnetarError,
    NotAllowed,
    NotSupported,
    OperationTimedOut,
    TransactionNotFound,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.txn_id import TxnId
from magnetar.retries import retried
from magnetar.transactions.coordinator_connections import CoordinatorConnections
from magnetar.transactions.key_holder import KeyHolder
from magnetar.wire.attachment import is_retriable
from magnetar.wire.connection import Connection

__all__ = ["EXPIRED", "Coordinators", "unknown_end"]

EXPIRED: Final = "ExpiredTransaction"
"""The word in an error that says that an older epoch of the key began the transaction."""
_UNDONE_TTL_MS: Final = 10_000
"""The deadline of a transaction that is begun only to be ended, in `_end_unanswered`."""


class Coordinators:
    """Sends requests to the transaction coordinators, and retries them.  One for each client.

    A request without an answer, from a coordinator that has moved or over a lost connection, is
    sent again until the operation timeout; each may be sent twice without harm.  Requests under a
    transaction key wait until the key is attached.
    """

    def __init__(self, context: ClientContext) -> None:
        self.connections: Final = CoordinatorConnections(context)
        self._context = context

    async def close(self) -> None:
        """Close the connections; bounded in time."""
        await self.connections.close()

    async def begin(self, ttl_ms: int, key: KeyHolder | None = None) -> TxnId:
        """Begin a transaction, which the broker aborts after `ttl_ms`.

        An attempt that fails goes to the next coordinator; a transaction that it may have begun is
        left to its deadline.  Raises `NotSupported`, `NotAllowed` where transactions are off,
        `TransactionKeyFenced`, and the last error after the operation timeout.
        """
        # The same in every attempt, so that a key's transaction that was begun is returned again.
        beginner = f"{self._context.rng.getrandbits(128):032x}"
        if key is None:
            return await self._begin(ttl_ms, None, beginner)
        await self._end_unanswered(key)
        try:
            return await self._begin(ttl_ms, key, beginner)
        except BaseException as error:
            if not isinstance(error, MagnetarError) or is_retriable(error):
                key.unanswered = beginner
            raise

    async def _begin(self, ttl_ms: int, key: KeyHolder | None, beginner: str) -> TxnId:
        async def ask() -> TxnId:
            number = await (
                self.connections.next_number()
                if key is None
                else self.connections.number_of_key(key.name)
            )
            request = pb.CommandNewTxn(
                request_id=0, txn_ttl_millis=ttl_ms, tc_id=number, scalable=True
            )
            if key is not None:
                request.transaction_key_beginner = beginner
            answer = await self._once(
                number,
                lambda: pb.BaseCommand(type=pb.BaseCommand.NEW_TXN, new_txn=request),
                request,
                key,
            )
            response = answer.new_txn_response
            return TxnId(response.txnid_most_bits, response.txnid_least_bits)

        return await retried(self._context, ask, "The beginning of a transaction")

    async def _end_unanswered(self, key: KeyHolder) -> None:
        """End the key's transaction whose NEW_TXN was not answered, if there is one."""
        if key.unanswered is None:
            return
        async with key.undoing:
            if key.unanswered is None:
                return
            txn = await self._begin(_UNDONE_TTL_MS, key, key.unanswered)
            with suppress(InvalidTransactionStatus, TransactionNotFound):  # It has timed out.
                await self.end(txn, commit=False, key=key)
            key.unanswered = None

    async def add_topic(self, txn: TxnId, topic: str, key: KeyHolder | None = None) -> None:
        """Register a topic or a segment to which the transaction writes."""
        request = pb.CommandAddPartitionToTxn(
            request_id=0,
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
            partitions=[topic],
            scalable=True,
        )
        await self._ask(
            txn,
            lambda: pb.BaseCommand(
                type=pb.BaseCommand.ADD_PARTITION_TO_TXN, add_partition_to_txn=request
            ),
            request,
            key,
        )

    async def add_subscription(
        self, txn: TxnId, topic: str, subscription: str, key: KeyHolder | None = None
    ) -> None:
        """Register a subscription of a topic or a segment on which the transaction acknowledges."""
        request = pb.CommandAddSubscriptionToTxn(
            request_id=0,
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
            subscription=[pb.Subscription(topic=topic, subscription=subscription)],
            scalable=True,
        )
        await self._ask(
            txn,
            lambda: pb.BaseCommand(
                type=pb.BaseCommand.ADD_SUBSCRIPTION_TO_TXN, add_subscription_to_txn=request
            ),
            request,
            key,
        )

    async def end(self, txn: TxnId, *, commit: bool, key: KeyHolder | None = None) -> None:
        """Commit or abort a transaction; calling it again for the same end is safe.

        Raises `InvalidTransactionStatus` if it ended the other way, `ExpiredTransaction` if another
        process opened its key, `TransactionNotFound`, `TransactionKeyFenced`.
        """
        request = pb.CommandEndTxn(
            request_id=0,
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
            txn_action=pb.TxnAction.COMMIT if commit else pb.TxnAction.ABORT,
            scalable=True,
        )
        await self._ask(
            txn,
            lambda: pb.BaseCommand(type=pb.BaseCommand.END_TXN, end_txn=request),
            request,
            key,
        )

    async def end_for_sure(self, txn: TxnId, *, commit: bool) -> None:
        """Like `end`; raises `OperationTimedOut` if it is not known how it ended."""
        try:
            await self.end(txn, commit=commit)
        except MagnetarError as error:
            if is_retriable(error):
                raise unknown_end(txn, error, commit=commit) from error
            raise

    async def _ask(
        self,
        txn: TxnId,
        command: Callable[[], pb.BaseCommand],
        request: "_KeyedRequest",
        key: KeyHolder | None,
    ) -> None:
        await retried(
            self._context,
            lambda: self._once(txn.most, command, request, key),
            f"A request of transaction {txn}",
        )

    async def _once(
        self,
        number: int,
        command: Callable[[], pb.BaseCommand],
        request: "_KeyedRequest",
        key: KeyHolder | None,
    ) -> pb.BaseCommand:
        """Send a request once, under the key if there is one."""
        if key is None:
            await self.connections.wait_leaders()
            connection = await self.connections.of(number).ready()
        else:
            connection = await key.ready()
            request.transaction_key = key.name
            request.transaction_key_epoch = key.epoch
        return await self._answer(connection, command(), number, key)

    async def ask_of_key(
        self, key: KeyHolder, command: pb.BaseCommand, what: str
    ) -> pb.BaseCommand:
        """Send a request of a key's groups, with coordinator, key and epoch; returns the answer.

        Raises `NotSupported` where there are no groups, `InvalidTransactionStatus`,
        `ExpiredTransaction`, `TransactionKeyFenced`, and `NotAllowed` for an invalid request.
        """

        async def ask() -> pb.BaseCommand:
            connection = await key.ready()
            if not connection.transaction_groups:
                raise NotSupported(
                    f"The broker at {connection.address} has no groups of transactions; use a "
                    "Magnetar broker with them, or one transaction for each batch."
                )
            body = getattr(command, FIELD_OF_TYPE[command.type])
            body.tc_id = await self.connections.number_of_key(key.name)
            body.key, body.epoch = key.name, key.epoch
            try:
                return await self._answer(connection, command, body.tc_id, None)
            except CoordinatorNotFound as error:
                key.again(error)
                raise
            except NotAllowed as error:
                # An old epoch gets the same code as an invalid request.
                if await key.is_newest(connection):
                    raise
                raise key.fence(error) from error

        return await retried(self._context, ask, what)

    async def _answer(
        self,
        connection: Connection,
        command: pb.BaseCommand,
        number: int,
        key: KeyHolder | None,
    ) -> pb.BaseCommand:
        try:
            return await connection.request(command)
        except CoordinatorNotFound as error:
            self.connections.of(number).again(error)
            if key is not None:
                key.again(error)
            raise
        except NotAllowed as error:
            if key is None:
                raise
            raise key.fence(error) from error
        except InvalidTransactionStatus as error:
            if EXPIRED in str(error):
                raise ExpiredTransaction(*error.args) from error
            raise


def unknown_end(txn: TxnId, error: MagnetarError, *, commit: bool) -> OperationTimedOut:
    """The error for a transaction of which it is not known how it ended."""
    how = "committed" if commit else "aborted"
    return OperationTimedOut(
        f"The broker did not say in time whether transaction {txn} was {how} ({error}) "
        "If it did not get the request, it aborts the transaction at its deadline."
    )


_KeyedRequest = (
    pb.CommandNewTxn
    | pb.CommandAddPartitionToTxn
    | pb.CommandAddSubscriptionToTxn
    | pb.CommandEndTxn
)
