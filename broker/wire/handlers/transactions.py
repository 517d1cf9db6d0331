"""Transactions and their coordinators (PIP-473; commands 50 to 63, 79 to 81).

Every answer to NEW_TXN, ADD_* and END_TXN names the coordinator, errors included: a client finds
the waiting request by it, and closes the connection if it cannot.  Any connection of a
transaction's principal may end it.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import ClassVar, Protocol, TypeVar, cast

import structlog

from broker.transactions.assignment_watches import watch_error
from broker.transactions.service import Transactions
from broker.wire.connection import Connection, Handler, UnexpectedFailure
from config.bounds import TXN_JOINS_AT_ONCE, TXN_PARTITIONS_OF_REQUEST
from magnetar.protocol.names import TopicName, parse_topic_name
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
    """Transactions are off, or the client uses a form of them that is not served."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class UnknownAction(PeerError):
    """END_TXN has no action: neither commit nor abort."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TooManyPartitions(PeerError):
    """ADD_PARTITION_TO_TXN names more partitions than one request may: split it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class _TransactionRequest(Protocol):
    """A request of one transaction."""

    txnid_most_bits: int
    txnid_least_bits: int


class _Response(Protocol):
    """An answer that can carry an error."""

    error: WireError
    message: str


R = TypeVar("R", bound=_Response)
_Keyed = CommandNewTxn | CommandAddPartitionToTxn | CommandAddSubscriptionToTxn | CommandEndTxn


def require_enabled(connection: Connection, *, scalable: bool = True) -> Transactions:
    """Return the service.

    Raises `TransactionsOff` if transactions are off, and for clients of coordinators before PIP-473
    (`scalable` is not set).
    """
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


def _txn(request: _TransactionRequest) -> TxnId:
    return TxnId(request.txnid_most_bits, request.txnid_least_bits)


def _key(request: _Keyed) -> KeyEpoch | None:
    """The key and epoch that the request is made under (K4), in private fields; None without key.

    A transaction that was begun under a key has it in every request.  A request without an epoch
    gets `NO_EPOCH`, which no key has.
    """
    if not request.HasField("transaction_key"):
        return None
    has_epoch = request.HasField("transaction_key_epoch")
    return KeyEpoch(
        request.transaction_key, request.transaction_key_epoch if has_epoch else NO_EPOCH
    )


async def complete_response(response: R, work: Awaitable[object]) -> R:
    """Await the work; returns the response, with the error of the work if it fails."""
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
    """WATCH_TC_ASSIGNMENTS: send the leader of each coordinator, now and at each change."""
    watch_id = command.watch_tc_assignments.watch_id
    # The request has no request id: an error is sent as its update.
    try:
        require_enabled(connection).watches.open(connection, watch_id)
    except MagnetarError as error:
        connection.send(watch_error(watch_id, error))


def close_watch(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """WATCH_TC_ASSIGNMENTS_CLOSE: close a watch.  It has no answer."""
    watch_id = command.watch_tc_assignments_close.watch_id
    connection.broker.transactions.watches.close_one(connection, watch_id)


def _require_not_stopping(connection: Connection) -> None:
    """Raise `CoordinatorNotFound` if this broker stops; clients that found it before go on."""
    # Pulsar's Java client stores a coordinator's broker only some time after the answer; if the
    # connection is lost between the two, it never asks for that coordinator again.
    if not connection.broker.serving:
        raise CoordinatorNotFound(
            "This broker stops: look the coordinator up again, it has a new leader soon."
        )


def connect(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """TC_CLIENT_CONNECT_REQUEST: the client will use this coordinator here."""
    request = command.tc_client_connect_request
    transactions = require_enabled(connection, scalable=request.scalable)
    response = CommandTcClientConnectResponse(request_id=request.request_id)
    try:
        _require_not_stopping(connection)
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
    transactions = require_enabled(connection, scalable=request.scalable)
    response = CommandNewTxnResponse(request_id=request.request_id, txnid_most_bits=request.tc_id)

    async def work() -> None:
        txn = await transactions.coordinators.begin(
            CoordinatorId(request.tc_id),
            request.txn_ttl_millis,
            connection.owner,
            _key(request),
            require_name_of_request(request.transaction_key_beginner),
        )
        response.txnid_least_bits = txn.least

    await complete_response(response, work())
    connection.send(BaseCommand(type=BaseCommand.NEW_TXN_RESPONSE, new_txn_response=response))


async def add_partitions(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """ADD_PARTITION_TO_TXN: have the owner of each topic join the transaction, then answer.

    So the first SEND need not wait.  A topic that cannot join now is left to that SEND.  Many
    topics join in parts, one request of a connection after the other.
    """
    request = command.add_partition_to_txn
    transactions = require_enabled(connection, scalable=request.scalable)
    txn = _txn(request)

    async def work() -> None:
        require_partition_count(len(request.partitions))
        names = [parse_topic_name(partition) for partition in request.partitions]
        await transactions.coordinators.require_open(txn, connection.owner, _key(request))
        if len(names) == 1:
            await transactions.join(txn, names[0])
        elif len(names) <= TXN_JOINS_AT_ONCE:
            await asyncio.gather(*(transactions.join(txn, name) for name in names))
        else:
            async with connection.costly():
                await _join_in_parts(transactions, txn, names)

    response = CommandAddPartitionToTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await complete_response(response, work())
    connection.send(
        BaseCommand(
            type=BaseCommand.ADD_PARTITION_TO_TXN_RESPONSE, add_partition_to_txn_response=response
        )
    )


def require_partition_count(count: int) -> None:
    """Raise `TooManyPartitions` for more partitions, or subscriptions, than a request may name."""
    if count > TXN_PARTITIONS_OF_REQUEST:
        raise TooManyPartitions(
            f"The request names {count} partitions or subscriptions, and may name "
            f"{TXN_PARTITIONS_OF_REQUEST}: split it into several requests."
        )


async def _join_in_parts(transactions: Transactions, txn: TxnId, names: list[TopicName]) -> None:
    for first in range(0, len(names), TXN_JOINS_AT_ONCE):
        part = names[first : first + TXN_JOINS_AT_ONCE]
        await asyncio.gather(*(transactions.join(txn, name) for name in part))
        # Joins of topics that are loaded and joined already do not wait for anything.
        await asyncio.sleep(0)


async def add_subscriptions(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """ADD_SUBSCRIPTION_TO_TXN: require that the transaction is open."""
    request = command.add_subscription_to_txn
    transactions = require_enabled(connection, scalable=request.scalable)
    txn = _txn(request)
    response = CommandAddSubscriptionToTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    coordinators = transactions.coordinators
    await complete_response(
        response, coordinators.require_open(txn, connection.owner, _key(request))
    )
    connection.send(
        BaseCommand(
            type=BaseCommand.ADD_SUBSCRIPTION_TO_TXN_RESPONSE,
            add_subscription_to_txn_response=response,
        )
    )


async def end(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """END_TXN: commit or abort a transaction."""
    request = command.end_txn
    transactions = require_enabled(connection, scalable=request.scalable)
    txn = _txn(request)

    async def work() -> None:
        if not request.HasField("txn_action"):
            raise UnknownAction("END_TXN has neither commit nor abort: set txn_action.")
        action = _ACTIONS[request.txn_action]
        await transactions.coordinators.end_transaction(
            txn, action, connection.owner, _key(request)
        )

    response = CommandEndTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await complete_response(response, work())
    connection.send(BaseCommand(type=BaseCommand.END_TXN_RESPONSE, end_txn_response=response))


def refuse(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """Refuse commands between brokers and coordinators before PIP-473."""
    require_enabled(connection, scalable=False)


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
