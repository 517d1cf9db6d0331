"""What is asked of the transaction coordinators: transactions begin, are told of, and end there.

Rules:

- An attempt to begin that fails goes to the next coordinator.  A transaction whose NEW_TXN was
  answered too late is left to its deadline.
- What a coordinator that has moved, or a lost connection, did not answer is asked again until the
  operation timeout; each request may be sent twice without harm.
- Under a transaction key every request waits until the key is attached, and names it; a refusal
  that only an old epoch gets fences the key.  What a beginning that was given up may have begun
  there is ended before the next one.
"""

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
"""The word by which a broker says that an older epoch of the key began the transaction."""
_UNDONE_TTL_MS: Final = 10_000
"""Of a transaction that is begun only to be ended: the one that was given up had not begun."""


class Coordinators:
    """Sends requests to the transaction coordinators, and repeats those that may be repeated.

    One for each client.
    """

    def __init__(self, context: ClientContext) -> None:
        self.connections: Final = CoordinatorConnections(context)
        self._context = context

    async def close(self) -> None:
        """Leave them; bounded in time."""
        await self.connections.close()

    async def begin(self, ttl_ms: int, key: KeyHolder | None = None) -> TxnId:
        """A new transaction, which the broker aborts after that time.

        Raises `NotSupported`, `NotAllowed` where transactions are off, `TransactionKeyFenced`, and
        after the operation timeout what the last attempt failed with.
        """
        # The same in every attempt: a key's transaction that was begun is given again.
        beginner = f"{self._context.rng.getrandbits(128):032x}"
        if key is None:
            return await self._begin(ttl_ms, None, beginner)
        await self._undo(key)
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
            told = answer.new_txn_response
            return TxnId(told.txnid_most_bits, told.txnid_least_bits)

        return await retried(self._context, ask, "The beginning of a transaction")

    async def _undo(self, key: KeyHolder) -> None:
        """End what a beginning that was given up may have begun under the key."""
        if key.unanswered is None:
            return
        async with key.undoing:
            if key.unanswered is None:
                return
            txn = await self._begin(_UNDONE_TTL_MS, key, key.unanswered)
            with suppress(InvalidTransactionStatus, TransactionNotFound):  # its time was up
                await self.end(txn, commit=False, key=key)
            key.unanswered = None

    async def add_topic(self, txn: TxnId, topic: str, key: KeyHolder | None = None) -> None:
        """The transaction writes to that topic, or segment."""
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
        """The transaction acknowledges on that subscription of a topic, or segment."""
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
        """Commit it, or abort it; asking again for the same end is fine.

        Raises `InvalidTransactionStatus` if it has the other end, `ExpiredTransaction` if its key
        was opened anew, `TransactionNotFound`, `TransactionKeyFenced`.
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
        """As `end`; `OperationTimedOut` if the broker has not said how it ended."""
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
        """One attempt; errors are those of this module's rules."""
        if key is None:
            await self.connections.watching()
            connection = await self.connections.of(number).ready()
        else:
            connection = await key.ready()
            request.transaction_key = key.name
            request.transaction_key_epoch = key.epoch
        return await self._answer(connection, command(), number, key)

    async def ask_of_key(
        self, key: KeyHolder, command: pb.BaseCommand, what: str
    ) -> pb.BaseCommand:
        """The answer to a request of a key's groups, which is given coordinator, key and epoch.

        Raises `NotSupported` where there are no groups, `InvalidTransactionStatus`,
        `ExpiredTransaction`, `TransactionKeyFenced`, and `NotAllowed` for what cannot be, whoever
        has the key: so it is asked whether the epoch is old.
        """

        async def ask() -> pb.BaseCommand:
            connection = await key.ready()
            if not connection.transaction_groups:
                raise NotSupported(
                    f"The broker at {connection.address} has no groups of transactions; use a "
                    "Magnetar broker that has, or one transaction for each batch."
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
    """What is raised where the broker has not said how a transaction ended."""
    how = "committed" if commit else "aborted"
    return OperationTimedOut(
        f"The broker has not said in time whether transaction {txn} was {how} ({error}) "
        "Its deadline decides if the broker did not hear of it."
    )


_KeyedRequest = (
    pb.CommandNewTxn
    | pb.CommandAddPartitionToTxn
    | pb.CommandAddSubscriptionToTxn
    | pb.CommandEndTxn
)
