"""`/admin/v3/transactions`: list, show and end transactions, and find those that pin a topic.

Pulsar's own paths answer in Pulsar's form (`coordinators`, `coordinatorStats`, `slowTransactions`,
`transactionMetadata`, `abortTransaction`, and those of `transaction_stats`); the others are
Magnetar's own.  A request for one coordinator that another broker leads is redirected (307) to it;
one for all coordinators is answered here, by asking their leaders.  While transactions are off, all
requests get 503.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

from broker.admin.access import visible_owner
from broker.admin.keys import BROKER
from broker.admin.redirect import require_here
from broker.admin.rest import RestError, no_content, number, refused, topic_of
from broker.admin.transaction_inspection import Json, TransactionInspection
from broker.admin.transaction_leaders import (
    ListOpenTransactions,
    list_open_transactions,
    view_coordinators,
)
from broker.transactions.service import Transactions
from config.bounds import TXN_LISTED
from magnetar.protocol.names import TopicDomain
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from security.access import Need, on_topic
from txn.errors import CoordinatorNotFound
from txn.header import OPERATOR
from txn.records import TxnState

BASE = "/admin/v3/transactions"
ONE = "/{most}/{least}"
DEFAULT_LIMIT = 100
_ACTIONS: Mapping[str, TxnState] = {"commit": TxnState.COMMITTED, "abort": TxnState.ABORTED}
_DOMAIN = re.compile("topic|persistent|segment")


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE + "/coordinators", coordinators),
        web.get(BASE + "/coordinatorStats", coordinator_stats),
        web.get(BASE + "/slowTransactions/{timeout}", slow),
        web.get(BASE + "/transactionMetadata" + ONE, metadata),
        web.post(BASE + "/abortTransaction" + ONE, abort),
        web.get(BASE + "/open", open_ones),
        web.get(BASE + "/transaction" + ONE, show),
        web.post(BASE + "/end" + ONE, end),
        web.get(BASE + "/why/{domain}/{tenant}/{namespace}/{topic:.+}", why),
    ]


def require_enabled(request: web.Request) -> Transactions:
    """Return the broker's transactions; 503 if they are switched off."""
    transactions = request.app[BROKER].transactions
    if not transactions.enabled:
        raise RestError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "Transactions are switched off on this broker: set transactions_enabled.",
        )
    return transactions


def _inspection(request: web.Request) -> TransactionInspection:
    require_enabled(request)
    return TransactionInspection(request.app[BROKER])


def txn_of(request: web.Request) -> TxnId:
    """The transaction in the path."""
    most, least = number(request, "most"), number(request, "least")
    if most < 0 or least < 0:
        raise refused(f"({most},{least}) is no transaction: both numbers are 0 or more.")
    return TxnId(most, least)


def _coordinator(request: web.Request) -> CoordinatorId | None:
    """The coordinator of a request, which this broker must lead; None for all."""
    if "coordinatorId" not in request.query:
        return None
    asked = CoordinatorId(number(request, "coordinatorId"))
    require_led(request, asked)
    return asked


def require_led(request: web.Request, coordinator: CoordinatorId) -> None:
    """Redirect the request unless this broker leads the coordinator.

    Raises `HTTPTemporaryRedirect`, or `CoordinatorNotFound` without a leader.
    """
    served = require_enabled(request).coordinators
    try:
        served.require_served(coordinator)
    except CoordinatorNotFound:
        leader = served.assignments().get(coordinator)
        if leader is None or leader.broker_id == request.app[BROKER].placement.broker_id:
            raise
        urls = leader.web_url, leader.web_url_tls
        there = urls[request.secure] or urls[not request.secure]
        if there is None:
            raise
        raise web.HTTPTemporaryRedirect(there + str(request.rel_url)) from None


async def coordinators(request: web.Request) -> web.Response:
    """GET: each coordinator with the broker that leads it."""
    found = sorted(require_enabled(request).coordinators.assignments().items())
    return web.json_response(
        [{"id": number, "brokerServiceUrl": leader.broker_url} for number, leader in found]
    )


async def coordinator_stats(request: web.Request) -> web.Response:
    """GET `?coordinatorId=`: the number of open transactions of one coordinator, or of each."""
    inspection, asked = _inspection(request), _coordinator(request)
    if asked is None:
        return web.json_response(await view_coordinators(request.app[BROKER]))
    return web.json_response(inspection.coordinator_stats()[str(asked)])


async def slow(request: web.Request) -> web.Response:
    """GET `?coordinatorId=`: transactions open for longer than `{timeout}` ms, in Pulsar's form.

    The oldest TXN_LISTED are listed; the header `X-Total-Count` has the number of all that the role
    may see.
    """
    found = await _open_ones(request, number(request, "timeout"), TXN_LISTED)
    listed = found["transactions"]
    rows = listed if isinstance(listed, list) else []
    return web.json_response(
        {_pulsar_id(row): _pulsar_form(row) for row in rows},
        headers={"X-Total-Count": str(found["open"])},
    )


async def metadata(request: web.Request) -> web.Response:
    """GET: one transaction, in Pulsar's form."""
    inspection, owner = _inspection(request), await visible_owner(request)
    return web.json_response(_pulsar_form(await inspection.show(txn_of(request), owner=owner)))


async def abort(request: web.Request) -> web.Response:
    """POST: abort a transaction."""
    await _end(request, TxnState.ABORTED)
    return no_content()


async def open_ones(request: web.Request) -> web.Response:
    """GET `?coordinatorId=&olderThanMs=&limit=`: open transactions, the oldest first."""
    limit = number(request, "limit", DEFAULT_LIMIT)
    if not 0 < limit <= TXN_LISTED:
        raise refused(f"limit = {limit} is out of bounds: give 1 to {TXN_LISTED}.")
    older_than_ms = number(request, "olderThanMs", 0)
    return web.json_response(await _open_ones(request, older_than_ms, limit))


async def _open_ones(request: web.Request, older_than_ms: int, limit: int) -> Json:
    require_enabled(request)
    coordinator, owner = _coordinator(request), await visible_owner(request)
    asked = ListOpenTransactions(older_than_ms, limit, owner)
    return await list_open_transactions(request.app[BROKER], coordinator, asked)


async def show(request: web.Request) -> web.Response:
    """GET: one transaction with its writes and acknowledgements."""
    inspection, owner = _inspection(request), await visible_owner(request)
    return web.json_response(await inspection.show(txn_of(request), owner=owner))


async def end(request: web.Request) -> web.Response:
    """POST `?action=commit|abort`: end a transaction."""
    asked = request.query.get("action", "")
    action = _ACTIONS.get(asked)
    if action is None:
        raise refused(f"action = {asked!r} is unknown: give commit or abort.")
    await _end(request, action)
    return no_content()


async def why(request: web.Request) -> web.Response:
    """GET: the open transactions that keep readers from the end of a topic.

    Admins of the tenant see all of them; other roles see how many there are, and their own ones.
    """
    domain = request.match_info["domain"]
    if not _DOMAIN.fullmatch(domain):
        raise refused(f"{domain!r} is no domain: give topic, persistent or segment.")
    name = topic_of(request, domain)
    if name.domain is not TopicDomain.TOPIC:
        await require_here(request, name)  # the owner knows most
    inspection = _inspection(request)
    owner = await visible_owner(request, on_topic(Need.TENANT_ADMIN, name))
    return web.json_response(await inspection.why(name, owner=owner))


async def _end(request: web.Request, action: TxnState) -> None:
    txn = txn_of(request)
    require_led(request, txn.coordinator)
    owner = await visible_owner(request)
    if owner is not None:
        await _inspection(request).require_own(txn, owner)
    # K4: an owner ends it here as operators do, under any key and epoch: no worker asks for this.
    await require_enabled(request).coordinators.end_transaction(txn, action, OPERATOR)


def _pulsar_id(row: Mapping[str, object]) -> str:
    most, _, least = str(row["txnId"]).partition("_")
    return f"({most},{least})"


def _pulsar_form(row: Mapping[str, object]) -> dict[str, object]:
    """Pulsar's TransactionMetadata, whose `timeoutAt` is the timeout, despite its name."""
    produced: dict[str, object] = {}
    acknowledged: dict[str, dict[str, object]] = {}
    writes, acks = row.get("writes"), row.get("acknowledgements")
    for write in writes if isinstance(writes, list) else ():
        produced[write["segment"]] = {
            "startPosition": write["floor"],
            "aborted": row["status"] == TxnState.ABORTED.value,
        }
    for ack in acks if isinstance(acks, list) else ():
        of_topic = acknowledged.setdefault(ack["segment"], {})
        of_topic[ack["subscription"]] = {
            "cumulativeAckPosition": ack["positions"][-1] if ack["cumulative"] else None
        }
    return {
        "txnId": _pulsar_id(row),
        "status": row["status"],
        "openTimestamp": row["createdMs"],
        "timeoutAt": row["timeoutMs"],
        "owner": row["owner"],
        "producedPartitions": produced,
        "ackedPartitions": acknowledged,
    }
