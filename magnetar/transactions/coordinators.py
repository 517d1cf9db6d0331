"""The transaction coordinators: transactions begin, are told of, and end there.

Rules:

- Each coordinator is attached to (TC_CLIENT_CONNECT_REQUEST) when it is first needed, and again
  when its connection is lost or another broker leads it.
- New transactions go to the coordinators in turn, from coordinator 1 on; an attempt that fails goes
  to the next one.  A transaction whose NEW_TXN was answered too late is left to its deadline.
- What a coordinator that has moved, or a lost connection, did not answer is asked again until the
  operation timeout; each request may be sent twice without harm.
- Under a transaction key every request waits until the key is attached, and names it; a refusal
  that only an old epoch gets fences the key.  What a beginning that was given up may have begun
  there is ended before the next one.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    CoordinatorNotFound,
    ExpiredTransaction,
    InvalidTransactionStatus,
    MagnetarError,
    NotAllowed,
    NotSupported,
    OperationTimedOut,
    TransactionNotFound,
)
from magnetar.retries import retried
from magnetar.transactions.coordinator_watch import CoordinatorWatch
from magnetar.transactions.standing import Standing
from magnetar.transactions.txn_id import TxnId
from magnetar.wire.attachment import AttachmentState, is_retriable
from magnetar.wire.connection import Connection, PeerKind
from protocol import pulsar_pb2 as pb
from protocol.commands import FIELD_OF_TYPE
from protocol.key_hash import coordinator_of_key

if TYPE_CHECKING:
    from magnetar.transactions.keys import TransactionKey

__all__ = ["EXPIRED", "Coordinator", "Coordinators", "unknown_end"]

EXPIRED: Final = "ExpiredTransaction"
"""The word by which a broker says that an older epoch of the key began the transaction."""
_FIRST: Final = 1
"""The coordinator of the first transaction."""
_UNDONE_TTL_MS: Final = 10_000
"""Of a transaction that is begun only to be ended: the one that was given up had not begun."""


class Coordinator(Standing):
    """The connection to one coordinator."""

    def __init__(self, context: ClientContext, number: int, watch: CoordinatorWatch) -> None:
        super().__init__(context)
        self.number: Final = number
        self.url: str | None = None
        """The broker that it is looked for at."""
        self._watch = watch
        # No command names it: by it the connection tells of its loss.
        self._session_id: Final = context.ids.session_id()

    def describe(self) -> str:
        """What it is."""
        return f"Transaction coordinator {self.number}"

    async def find(self) -> Connection:
        """The broker that leads it."""
        await self._watch.told()
        self.url = self._watch.leaders.get(self.number)
        if self.url is None:
            raise CoordinatorNotFound(
                f"Transaction coordinator {self.number} has no leader now; look whether the "
                "brokers are up."
            )
        return await self.context.pool.at(self.url)

    async def attach(self, connection: Connection) -> None:
        """Say that this connection uses it."""
        connection.attach(PeerKind.COORDINATORS, self._session_id, self)
        request = pb.CommandTcClientConnectRequest(request_id=0, tc_id=self.number, scalable=True)
        await connection.request(
            pb.BaseCommand(
                type=pb.BaseCommand.TC_CLIENT_CONNECT_REQUEST, tc_client_connect_request=request
            )
        )


class Coordinators:
    """See the module's rules.  One for each client."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._watch = CoordinatorWatch(context, self._leaders_changed)
        self._coordinators: dict[int, Coordinator] = {}
        self._turns = count(_FIRST)
        self._closed = False

    async def close(self) -> None:
        """Leave them; bounded in time."""
        self._closed = True
        for coordinator in list(self._coordinators.values()):
            await coordinator.close()
        await self._watch.close()

    # Who they are

    async def number_of_key(self, key: str) -> int:
        """The coordinator that serves a transaction key."""
        await self._watching()
        return coordinator_of_key(key, max(1, self._watch.parallelism))

    def of(self, number: int) -> Coordinator:
        """One of them; anew after it has failed for good."""
        known = self._coordinators.get(number)
        if known is None or known.state is AttachmentState.FAILED:
            if self._closed:
                raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
            known = self._coordinators[number] = Coordinator(self._context, number, self._watch)
        return known

    async def _watching(self) -> None:
        if self._closed:
            raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")
        if self._watch.state is AttachmentState.FAILED:
            self._watch = CoordinatorWatch(self._context, self._leaders_changed)
        await self._watch.told()

    async def _next(self) -> int:
        """Whose turn it is."""
        await self._watching()
        numbers = list(self._watch.leaders)
        if not numbers:
            raise CoordinatorNotFound(
                "No transaction coordinator has a leader now; look whether the brokers are up."
            )
        return numbers[next(self._turns) % len(numbers)]

    def _leaders_changed(self) -> None:
        for coordinator in self._coordinators.values():
            url = self._watch.leaders.get(coordinator.number)
            if url is not None and coordinator.url is not None and url != coordinator.url:
                coordinator.again(CoordinatorNotFound(f"{coordinator.describe()} has moved."))

    # What they do

    async def begin(self, ttl_ms: int, key: "TransactionKey | None" = None) -> TxnId:
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

    async def _begin(self, ttl_ms: int, key: "TransactionKey | None", beginner: str) -> TxnId:
        async def ask() -> TxnId:
            number = await (self._next() if key is None else self.number_of_key(key.name))
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

    async def _undo(self, key: "TransactionKey") -> None:
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

    async def add_topic(self, txn: TxnId, topic: str, key: "TransactionKey | None" = None) -> None:
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
        self, txn: TxnId, topic: str, subscription: str, key: "TransactionKey | None" = None
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

    async def end(self, txn: TxnId, *, commit: bool, key: "TransactionKey | None" = None) -> None:
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
        key: "TransactionKey | None",
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
        key: "TransactionKey | None",
    ) -> pb.BaseCommand:
        """One attempt; errors are those of this module's rules."""
        if key is None:
            await self._watching()
            connection = await self.of(number).ready()
        else:
            connection = await key.ready()
            request.transaction_key = key.name
            request.transaction_key_epoch = key.epoch
        return await self._answer(connection, command(), number, key)

    async def ask_of_key(
        self, key: "TransactionKey", command: pb.BaseCommand, what: str
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
            body.tc_id = await self.number_of_key(key.name)
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
        key: "TransactionKey | None",
    ) -> pb.BaseCommand:
        try:
            return await connection.request(command)
        except CoordinatorNotFound as error:
            self.of(number).again(error)
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
