"""Transactions and their coordinators (PIP-473, PIP-31; commands 50 to 63, 79 to 81).

Clients before version 5 do not set `scalable`.  The same coordinators serve them, with what they
rely on besides (docs/decisions/legacy-transactions.md).
Every answer to NEW_TXN, ADD_* and END_TXN names the coordinator, errors included: a client finds
the waiting request by it, and closes the connection if it cannot.  Any connection of a
transaction's principal may end it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
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
    CommandEndTxnOnPartition,
    CommandEndTxnOnPartitionResponse,
    CommandEndTxnOnSubscription,
    CommandEndTxnOnSubscriptionResponse,
    CommandEndTxnResponse,
    CommandNewTxn,
    CommandNewTxnResponse,
    CommandTcClientConnectResponse,
    TxnAction,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn.errors import CoordinatorNotFound, TransactionNotFound
from txn.header import OPERATOR
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH, require_name_of_request

log = structlog.get_logger(__name__)

_NOT_ALLOWED = WireError.NotAllowedError
_BETWEEN_BROKERS = "Brokers carry out ends of transactions by themselves: end it with END_TXN."
_GO_CLIENT = "Pulsar-Go"
"""How the versions of Pulsar's Go client begin in CONNECT."""
_ACTIONS = {TxnAction.COMMIT: TxnState.COMMITTED, TxnAction.ABORT: TxnState.ABORTED}


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


class _CoordinatorRequest(Protocol):
    """A request to a coordinator."""

    scalable: bool


class _Response(Protocol):
    """An answer that can carry an error."""

    error: WireError
    message: str


R = TypeVar("R", bound=_Response)
T = TypeVar("T")
_Keyed = CommandNewTxn | CommandAddPartitionToTxn | CommandAddSubscriptionToTxn | CommandEndTxn


def require_enabled(connection: Connection, *, scalable: bool = True) -> Transactions:
    """Return the service.  Raises as `Transactions.require_enabled`."""
    transactions = connection.broker.transactions
    transactions.require_enabled(scalable=scalable)
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


async def run_as_owner(
    connection: Connection,
    work: Callable[[str | None, KeyEpoch | None], Awaitable[T]],
    key: KeyEpoch | None,
) -> T:
    """Run `work` with the connection's role and a key as the owner of a transaction.

    If the role is not the owner, but a superuser, run it as an operator: superusers may use the
    transactions of every role, and those without an owner.
    """
    try:
        return await work(connection.owner, key)
    except TransactionNotFound:
        # In this order a superuser's own transaction needs its key and epoch, as any other (K4).
        authorizer = connection.broker.authorizer
        if authorizer is None or not authorizer.is_superuser(connection.roles):
            raise
    return await work(OPERATOR, None)


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


async def _release_go_client(
    connection: Connection, request: _CoordinatorRequest, work: Awaitable[None]
) -> None:
    """Await the work.

    If another broker leads the coordinator, close a Go client's connection after the answer.
    """
    try:
        await work
    except CoordinatorNotFound as error:
        # Other v4 clients look the coordinator up after this error.  Pulsar's Go client does so
        # only after it lost its connection, and would get this error for ever.
        if not request.scalable and connection.client_version.startswith(_GO_CLIENT):
            asyncio.get_running_loop().call_soon(connection.close, str(error))
        raise


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
        if request.scalable:
            transactions.coordinators.require_served(CoordinatorId(request.tc_id))
        else:
            transactions.require_served_to_v4(CoordinatorId(request.tc_id))
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
    # Pulsar's Go client ends its process if one of the numbers is missing, in an error too.
    response = CommandNewTxnResponse(
        request_id=request.request_id, txnid_most_bits=request.tc_id, txnid_least_bits=0
    )

    async def work() -> None:
        txn = await transactions.coordinators.begin(
            CoordinatorId(request.tc_id),
            request.txn_ttl_millis,
            connection.owner,
            _key(request),
            require_name_of_request(request.transaction_key_beginner),
        )
        response.txnid_least_bits = txn.least

    await complete_response(response, _release_go_client(connection, request, work()))
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
        require_open = partial(transactions.coordinators.require_open, txn)
        await run_as_owner(connection, require_open, _key(request))
        if not request.scalable:
            await transactions.require_participants(names)
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
    await complete_response(response, _release_go_client(connection, request, work()))
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

    async def work() -> None:
        require_open = partial(transactions.coordinators.require_open, txn)
        await run_as_owner(connection, require_open, _key(request))
        if not request.scalable:
            require_partition_count(len(request.subscription))
            names = [parse_topic_name(each.topic) for each in request.subscription]
            await transactions.require_participants(names)

    response = CommandAddSubscriptionToTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await complete_response(response, _release_go_client(connection, request, work()))
    connection.send(
        BaseCommand(
            type=BaseCommand.ADD_SUBSCRIPTION_TO_TXN_RESPONSE,
            add_subscription_to_txn_response=response,
        )
    )


async def end(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """END_TXN: commit or abort a transaction.

    The answer to a v4 client comes when readers see the end, as far as that does not take too long.
    """
    request = command.end_txn
    transactions = require_enabled(connection, scalable=request.scalable)
    txn = _txn(request)

    async def work() -> None:
        if not request.HasField("txn_action"):
            raise UnknownAction("END_TXN has neither commit nor abort: set txn_action.")
        action = _ACTIONS[request.txn_action]
        end_transaction = partial(transactions.coordinators.end_transaction, txn, action)
        await run_as_owner(connection, end_transaction, _key(request))
        if not request.scalable:
            await transactions.carry_out_end(txn, action)

    response = CommandEndTxnResponse(
        request_id=request.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least
    )
    await complete_response(response, _release_go_client(connection, request, work()))
    connection.send(BaseCommand(type=BaseCommand.END_TXN_RESPONSE, end_txn_response=response))


def refuse_end_of_brokers(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """END_TXN_ON_PARTITION, END_TXN_ON_SUBSCRIPTION: refused to everybody, superusers too.

    Brokers of Apache Pulsar send them to each other; here brokers follow the headers.
    """
    answer = BaseCommand()
    request: CommandEndTxnOnPartition | CommandEndTxnOnSubscription
    response: CommandEndTxnOnPartitionResponse | CommandEndTxnOnSubscriptionResponse
    if command.type == BaseCommand.END_TXN_ON_PARTITION:
        answer.type = BaseCommand.END_TXN_ON_PARTITION_RESPONSE
        request, response = command.end_txn_on_partition, answer.end_txn_on_partition_response
    else:
        answer.type = BaseCommand.END_TXN_ON_SUBSCRIPTION_RESPONSE
        request, response = command.end_txn_on_subscription, answer.end_txn_on_subscription_response
    response.request_id = request.request_id
    response.txnid_most_bits = request.txnid_most_bits
    response.txnid_least_bits = request.txnid_least_bits
    response.error, response.message = _NOT_ALLOWED, _BETWEEN_BROKERS
    connection.send(answer)


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.NEW_TXN: begin,
    BaseCommand.ADD_PARTITION_TO_TXN: add_partitions,
    BaseCommand.ADD_SUBSCRIPTION_TO_TXN: add_subscriptions,
    BaseCommand.END_TXN: end,
    BaseCommand.END_TXN_ON_PARTITION: refuse_end_of_brokers,
    BaseCommand.END_TXN_ON_SUBSCRIPTION: refuse_end_of_brokers,
    BaseCommand.TC_CLIENT_CONNECT_REQUEST: connect,
    BaseCommand.WATCH_TC_ASSIGNMENTS: watch,
    BaseCommand.WATCH_TC_ASSIGNMENTS_CLOSE: close_watch,
}
