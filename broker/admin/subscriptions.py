"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription[s]`: subscriptions by hand."""

from http import HTTPStatus

from aiohttp import web

from broker.admin.persistent import TOPIC, existing_topic
from broker.admin.rest import RestError, conflict, flag, mapping_of, no_content, not_found, number
from broker.dispatch.start_position import first_published_since
from broker.subscription import Subscription
from protocol.ids import EARLIEST, LATEST, Position, from_wire

SUBSCRIPTION = TOPIC + "/subscription/{subscription}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.put(SUBSCRIPTION, create),
        web.delete(SUBSCRIPTION, delete),
        web.post(SUBSCRIPTION + "/skip_all", skip_all),
        web.post(SUBSCRIPTION + "/resetcursor", reset_to_id),
        web.post(SUBSCRIPTION + "/resetcursor/{timestamp}", reset_to_time),
    ]


def _position(body: dict[str, object]) -> Position:
    """A message id from a body; {} is the newest, as in Pulsar's tools."""
    ledger_id, entry_id = body.get("ledgerId"), body.get("entryId")
    if ledger_id is None and entry_id is None:
        return LATEST
    if not isinstance(ledger_id, int) or not isinstance(entry_id, int):
        raise RestError(
            HTTPStatus.BAD_REQUEST, "A message id needs the numbers ledgerId and entryId."
        )
    position = Position(from_wire(ledger_id % 2**64), from_wire(entry_id % 2**64))
    return EARLIEST if position.ledger_id < 0 else position


async def _subscription(request: web.Request) -> Subscription:
    topic = await existing_topic(request)
    name = request.match_info["subscription"]
    found = topic.subscriptions.get(name)
    if found is None:
        raise not_found(f"{topic.name} has no subscription {name!r}: create it with PUT.")
    return found


async def list_subscriptions(request: web.Request) -> web.Response:
    """GET: names."""
    topic = await existing_topic(request)
    return web.json_response(sorted(topic.subscriptions))


async def create(request: web.Request) -> web.Response:
    """PUT, message id as body (the newest by default); 409 if it exists."""
    topic = await existing_topic(request)
    name = request.match_info["subscription"]
    if name in topic.subscriptions:
        raise conflict(f"{topic.name} has a subscription {name!r} already.")
    start = _position(await mapping_of(request))
    # A subscription begins after a position; the id names the first message to be delivered.
    at_edge = start in (EARLIEST, LATEST)
    await topic.create_subscription(
        name, start if at_edge else Position(start.ledger_id, start.entry_id - 1)
    )
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: 412 while it has consumers."""
    topic = await existing_topic(request)
    await topic.unsubscribe(request.match_info["subscription"], force=flag(request, "force"))
    return no_content()


async def skip_all(request: web.Request) -> web.Response:
    """POST: nothing published so far is delivered any more."""
    subscription = await _subscription(request)
    await subscription.seek(LATEST)
    return no_content()


async def reset_to_id(request: web.Request) -> web.Response:
    """POST, message id as body: the first message to be delivered."""
    subscription = await _subscription(request)
    await subscription.seek(_position(await mapping_of(request)))
    return no_content()


async def reset_to_time(request: web.Request) -> web.Response:
    """POST: continue at the first message published at or after the time, in ms."""
    subscription = await _subscription(request)
    ledger = subscription.topic.ledger
    await subscription.seek(await first_published_since(ledger, number(request, "timestamp")))
    return no_content()
