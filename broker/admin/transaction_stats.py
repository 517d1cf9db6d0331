"""`/admin/v3/transactions/...Stats`: transactions on one topic or subscription, in Pulsar's form.

The topics are `persistent://`, one partition at a time; their owner answers, others redirect to it.
Pulsar shows its logs and its buffer's snapshots too; here there are none, so `...InternalStats` is
405.  While transactions are off, all requests get 503.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.persistent import existing_topic
from broker.admin.rest import RestError, body_of, not_found, number, refused
from broker.admin.transactions import BASE, ONE, require_enabled, txn_of
from broker.policies.json_numbers import is_number
from broker.topics.topic import Topic
from magnetar.protocol.ids import Position
from txn.pending_acks import PendingAcks

TOPIC = "/{tenant}/{namespace}/{topic}"
SUBSCRIPTION = TOPIC + "/{subscription}"
LARGEST_BATCH_INDEX = 2**31 - 1
READY, NONE = "Ready", "None"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE + "/transactionBufferStats" + TOPIC, buffer_stats),
        web.get(BASE + "/transactionInBufferStats" + TOPIC + ONE, stats_in_buffer),
        web.get(BASE + "/pendingAckStats" + SUBSCRIPTION, pending_ack_stats),
        web.get(BASE + "/transactionInPendingAckStats" + SUBSCRIPTION + ONE, stats_in_pending_ack),
        web.get(
            BASE + "/positionStatsInPendingAck" + SUBSCRIPTION + "/{ledger}/{entry}",
            position_in_pending_ack,
        ),
        web.get(BASE + "/coordinatorInternalStats/{coordinator}", refuse_internal_stats),
        web.get(BASE + "/transactionBufferInternalStats" + TOPIC, refuse_internal_stats),
        web.get(BASE + "/pendingAckInternalStats" + SUBSCRIPTION, refuse_internal_stats),
        web.post(BASE + "/transactionCoordinator/replicas", refuse_more_coordinators),
    ]


async def _topic(request: web.Request) -> Topic:
    require_enabled(request)
    return await existing_topic(request)


async def _pending_acks(request: web.Request) -> tuple[Topic, PendingAcks | None]:
    """The topic, and the subscription's acknowledgements in transactions; None if not durable."""
    topic = await _topic(request)
    name = request.match_info["subscription"]
    subscription = topic.subscriptions.get(name)
    if subscription is None:
        raise not_found(f"{topic.name} has no subscription {name!r}: create it with PUT.")
    acks = subscription.transactional
    return topic, None if acks is None else acks.pending


async def buffer_stats(request: web.Request) -> web.Response:
    """GET: TransactionBufferStats.  There are no snapshots, so their time is 0."""
    buffer = (await _topic(request)).buffer
    return web.json_response(
        {
            "state": READY,
            "maxReadPosition": buffer.max_read_position.text,
            "lastSnapshotTimestamps": 0,
            "ongoingTxnSize": buffer.open_count,
            "totalAbortedTransactions": buffer.aborted_count,
        }
    )


async def stats_in_buffer(request: web.Request) -> web.Response:
    """GET: TransactionInBufferStats; null as the position of one that wrote nothing there."""
    txn = txn_of(request)
    buffer = (await _topic(request)).buffer
    start = buffer.start_of(txn)
    return web.json_response(
        {
            "startPosition": None if start is None else start.text,
            "aborted": buffer.is_aborted(txn),
        }
    )


async def pending_ack_stats(request: web.Request) -> web.Response:
    """GET: TransactionPendingAckStats; the state None is of a subscription that is not durable."""
    _, acks = await _pending_acks(request)
    return web.json_response(
        {
            "state": NONE if acks is None else READY,
            "ongoingTxnSize": 0 if acks is None else len(acks.core.open_transactions),
        }
    )


async def stats_in_pending_ack(request: web.Request) -> web.Response:
    """GET: TransactionInPendingAckStats: how far the transaction acknowledged cumulatively."""
    txn = txn_of(request)
    _, acks = await _pending_acks(request)
    reached = None if acks is None else acks.core.held.cumulative_position_of(txn)
    return web.json_response({"cumulativeAckPosition": None if reached is None else reached.text})


async def position_in_pending_ack(request: web.Request) -> web.Response:
    """GET `?batchIndex=`: PositionInPendingAckStats of an entry, or of one message of a batch."""
    position = Position(number(request, "ledger"), number(request, "entry"))
    index = number(request, "batchIndex", -1)
    if not -1 <= index <= LARGEST_BATCH_INDEX:
        raise refused(f"batchIndex = {index} is no place in a batch: give 0 or more, or none.")
    topic, acks = await _pending_acks(request)
    if acks is None:
        return web.json_response({"state": "PendingAckNotReady"})
    if position.entry_id < 0 or position > topic.ledger.last_confirmed:
        state = "InvalidPosition"
    elif acks.core.held.holds(position, None if index < 0 else index):
        state = "PendingAck"
    elif acks.core.held.is_acknowledged(position, None if index < 0 else index):
        state = "MarkDelete"
    else:
        state = "NotInPendingAck"
    return web.json_response({"state": state})


async def refuse_internal_stats(request: web.Request) -> web.Response:
    """GET: 405, as transactions have no logs of their own."""
    require_enabled(request)
    raise RestError(
        HTTPStatus.METHOD_NOT_ALLOWED,
        "Transactions have no logs here, their records are in the metadata store: ask for the "
        "stats without Internal, or for records/persistent/TENANT/NAMESPACE/TOPIC.",
    )


async def refuse_more_coordinators(request: web.Request) -> web.Response:
    """POST, the number as body: 406, as the number of coordinators is fixed."""
    coordinators = require_enabled(request).coordinators
    if not is_number(await body_of(request), 1):
        raise refused("The body is no number of coordinators: send a number above 0.")
    raise RestError(
        HTTPStatus.NOT_ACCEPTABLE,
        f"There are {coordinators.parallelism} coordinators, and their number cannot change: it is "
        "fixed by transaction_coordinators when the data directory is first used.",
    )
