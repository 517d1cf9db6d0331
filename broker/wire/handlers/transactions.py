"""Transactions: coordinators, and the life of a transaction (PIP-473; commands 50 to 63, 79 to 81).

Rules:

- Every answer to NEW_TXN, ADD_* and END_TXN names the coordinator, errors included: clients find by
  it who waits, and close the connection if they cannot.
- Who ends a transaction need not be the connection that began it, but its principal.
- A request may be made under a transaction key, in private fields (K4).  A transaction that was
  begun under one needs it in every request; plain ones, all of stock clients, have none.
- A broker that stops is found as a coordinator by nobody any more; who has found it goes on.
- ADD_PARTITION_TO_TXN has the owner of each topic join before it is answered, so that the first
  SEND finds it done.  A topic that cannot join now is left to that SEND.
- What clients say that use coordinators of an older form (`scalable` not set) is refused, and so is
  everything while transactions are off: requests get ERROR NotAllowedError; the watch of
  coordinators, which has no request id, gets its own update with that error.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import ClassVar, Protocol, TypeVar, cast

import structlog

from broker.transactions.assignment_watches import watch_error
from broker.transactions.service import Transactions
from broker.wire.connection import Connection, Handler, UnexpectedFailure
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandAddPartitionToTxn,
    CommandAddPartitionToTxnResponse,
    CommandAddSubscriptionToTxn,
    CommandAddSubscriptionToTxnResponse,
    CommandEndTxn,
    CommandEndTxnResponse,
    CommandNewTxn,
    CommandNewTxnResponse,
    CommandTcClientConnectResponse,
    TxnAction,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn.errors import CoordinatorNotFound
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH, require_name_of_request

log = structlog.get_logger(__name__)

_ACTIONS = {TxnAction.COMMIT: TxnState.COMMITTED, TxnAction.ABORT: TxnState.ABORTED}


class TransactionsOff(PeerError):
    """Transactions are switched off, or of a form that is not served."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class UnknownAction(PeerError):
    """END_TXN says neither commit nor abort."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class _Names(Protocol):
    """A request about one transaction."""

    txnid_most_bits: int
    txnid_least_bits: int


class _Response(Protocol):
    """An answer that can carry an error."""

    error: WireError
    message: str


R = TypeVar("R", bound=_Response)
_Keyed = CommandNewTxn | CommandAddPartitionToTxn | CommandAddSubscriptionToTxn | CommandEndTxn


def enabled(connection: Connection, *, scalable: bool = True) -> Transactions:
    """Raise `TransactionsOff` unless such requests are served."""
    transactions = connection.broker.transactions
    if not transactions.enabled:
        raise TransactionsOff(
            "Transactions are switched off on this broker: set transactions_enabled, or use a "
            "client without them."
        )
    if not scalable:
        raise TransactionsOff(
            "Transactions of clients before version 5 are not served: use the v5 client."
        )
    return transactions


def _txn(request: _Names) -> TxnId:
    return TxnId(request.txnid_most_bits, request.txnid_least_bits)


def _key(request: _Keyed) -> KeyEpoch | None:
    """The key that the request is made under.  Without an epoch it is under none that there is."""
    if not request.HasField("transaction_key"):
        return None
    has_epoch = request.HasField("transaction_key_epoch")
    return KeyEpoch(
        request.transaction_key, request.transaction_key_epoch if has_epoch else NO_EPOCH
    )


async def answered(response: R, work: Awaitable[object]) -> R:
    """The response, with the error of the work if it fails."""
    try:
        await work
    except Exception as error:
        known = error
        if not isinstance(known, MagnetarError):
            log.error("transaction_request_failed", exc_info=error)
            known = UnexpectedFailure("The broker failed on this: its log has the cause.")
        response.error = cast("WireError", int(known.code))
        response.message = str(known)
    return response


def watch(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_TC_ASSIGNMENTS: who leads each coordinator, now and at each change."""
    watch_id = command.watch_tc_assignments.watch_id
    try:
        enabled(connection).watches.open(connection, watch_id)
    except MagnetarError as error:
        connection.send(watch_error(watch_id, error))


def close_watch(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_TC_ASSIGNMENTS_CLOSE.  No answer."""
    watch_id = command.watch_tc_assignments_close.watch_id
    connection.broker.transactions.watches.close_one(connection, watch_id)


def _require_lasting(connection: Connection) -> None:
    """Raise `CoordinatorNotFound` if this broker stops.

    The stock client notes where a coordinator is only some time after the answer; if the connection
    is lost between the two, it never asks for that coordinator again.
    """
    if not connection.broker.serving:
        raise CoordinatorNotFound(
            "This broker stops: ask for the coordinator again, its next leader is told soon."
        )


def connect(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """TC_CLIENT_CONNECT_REQUEST: the client will use this coordinator here."""
    request = command.tc_client_connect_request
    transactions = enabled(connection, scalable=request.scalable)
    response = CommandTcClientConnectResponse(request_id=request.request_id)
    try:
        _require_lasting(connection)
        transactions.coordinators.require_served(CoordinatorId(request.tc_id))
    except MagnetarError as error:
        response.error = cast("WireError", int(error.code))
        response.message = str(error)
    connection.send(
        BaseCommand(
            type=BaseCommand.TC_CLIENT_CONNECT_RESPONSE, tc_client_connect_response=response
        )
    )


async def begin(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """NEW_TXN; its timeout is in milliseconds."""
    request = command.new_txn
    transactions = enabled(connection, scalable=request.scalable)
    response = CommandNewTxnResponse(request_id=request.request_id, txnid_most_bits=request.tc_id)

    async def work() -> None:
        txn = await transactions.coordinators.begin(
            CoordinatorId(request.tc_id),
            request.txn_ttl_millis,
            connection.principal,
            _key(request),
            require_name_of_request(request.transaction_key_beginner),
        )
        response.txnid_least_bits = txn.least

    await answered(response, work())
    connection.send(BaseCommand(type=BaseCommand.NEW_TXN_RESPONSE, new_txn_response=response))


async def add_partitions(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """ADD_PARTITION_TO_TXN: it is going to write to these topics."""
    request = command.add_partition_to_txn
    transactions = enabled(connection, scalable=request.scalable)
    txn = _txn(request)

    async def work() -> None:
        names = [parse_topic_name(partition) for partition in request.partitions]
        await transactions.coordinators.require_open(txn, connection.principal, _key(request))
        if len(names) == 1:
            await transactions.join(txn, names[0])
        else:
            await asyncio.gather(*(transactions.join(txn, name) for name in names))

    response = CommandAddPartitionToTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await answered(response, work())
    connection.send(
        BaseCommand(
            type=BaseCommand.ADD_PARTITION_TO_TXN_RESPONSE, add_partition_to_txn_response=response
        )
    )


async def add_subscriptions(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """ADD_SUBSCRIPTION_TO_TXN: it is going to acknowledge on these subscriptions."""
    request = command.add_subscription_to_txn
    transactions = enabled(connection, scalable=request.scalable)
    txn = _txn(request)
    response = CommandAddSubscriptionToTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    coordinators = transactions.coordinators
    await answered(response, coordinators.require_open(txn, connection.principal, _key(request)))
    connection.send(
        BaseCommand(
            type=BaseCommand.ADD_SUBSCRIPTION_TO_TXN_RESPONSE,
            add_subscription_to_txn_response=response,
        )
    )


async def end(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """END_TXN: commit or abort."""
    request = command.end_txn
    transactions = enabled(connection, scalable=request.scalable)
    txn = _txn(request)

    async def work() -> None:
        if not request.HasField("txn_action"):
            raise UnknownAction("END_TXN says neither commit nor abort: set txn_action.")
        action = _ACTIONS[request.txn_action]
        await transactions.coordinators.end_transaction(
            txn, action, connection.principal, _key(request)
        )

    response = CommandEndTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await answered(response, work())
    connection.send(BaseCommand(type=BaseCommand.END_TXN_RESPONSE, end_txn_response=response))


def refuse(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """Commands between coordinators of the older form and brokers."""
    enabled(connection, scalable=False)


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.NEW_TXN: begin,
    BaseCommand.ADD_PARTITION_TO_TXN: add_partitions,
    BaseCommand.ADD_SUBSCRIPTION_TO_TXN: add_subscriptions,
    BaseCommand.END_TXN: end,
    BaseCommand.END_TXN_ON_PARTITION: refuse,
    BaseCommand.END_TXN_ON_SUBSCRIPTION: refuse,
    BaseCommand.TC_CLIENT_CONNECT_REQUEST: connect,
    BaseCommand.WATCH_TC_ASSIGNMENTS: watch,
    BaseCommand.WATCH_TC_ASSIGNMENTS_CLOSE: close_watch,
}
