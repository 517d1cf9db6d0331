"""Single messages of a topic over REST: of a backlog, by id, and counted from an end.

Each is an entry, a batch as a whole; its metadata are headers (`broker.topics.shown_message`).  The
owner of the topic answers, others redirect to it.  A partition is asked, not the partitioned topic.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.partition_requests import partitions_in
from broker.admin.persistent import TOPIC, existing_topic, message_id_json
from broker.admin.rest import RestError, body_of, not_found, number, refused
from broker.admin.subscriptions import SUBSCRIPTION, target_in
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.shown_message import shown_message
from broker.topics.topic import Topic
from config.bounds import PEEKED_ENTRIES
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.managed_ledger.types import Entry


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(SUBSCRIPTION + "/position/{position}", peek),
        web.get(TOPIC + "/ledger/{ledger}/entry/{entry}", by_id),
        web.get(TOPIC + "/examinemessage", examine),
        web.get(TOPIC + "/messageid/{timestamp}", id_at),
        web.put(TOPIC + "/backlogSize", size_behind),
    ]


async def peek(request: web.Request) -> web.Response:
    """GET: the entry with that number in the backlog of a subscription, the oldest being 1.

    404 behind the last one, by which Pulsar's admin library knows the end.
    """
    topic, name = await _topic(request), request.match_info["subscription"]
    subscription = topic.subscriptions.get(name)
    if subscription is None:
        raise not_found(f"{topic.name} has no subscription {name!r}: create it with PUT.")
    wanted = _count("position", number(request, "position"))
    position = subscription.cursor.first_unacknowledged(EARLIEST)
    for _ in range(wanted - 1):
        if position > topic.ledger.last_confirmed:
            break
        position = subscription.cursor.first_unacknowledged(
            Position(position.ledger_id, position.entry_id + 1)
        )
    return await _shown(topic, position, f"The backlog of {name!r} has fewer than {wanted} entries")


async def by_id(request: web.Request) -> web.Response:
    """GET: the entry with that id."""
    topic = await _topic(request)
    position = Position(number(request, "ledger"), number(request, "entry"))
    return await _shown(topic, position, f"{topic.name} has no entry {position.text}")


async def examine(request: web.Request) -> web.Response:
    """GET `?initialPosition=&messagePosition=`: an entry counted from `earliest` or `latest`.

    The first one is 1.  412 for an empty topic; a count beyond the other end gives the entry there.
    """
    topic = await _topic(request)
    end = request.query.get("initialPosition") or "latest"
    if end not in ("earliest", "latest"):
        raise refused(f"initialPosition = {end!r} is unknown: give earliest or latest.")
    wanted = _count("messagePosition", number(request, "messagePosition", 1))
    ledger = topic.ledger
    if not ledger.entry_count:
        raise refused(f"{topic.name} is empty: publish to it first.")
    skipped = min(wanted, ledger.entry_count) - 1
    step = ledger.next_position if end == "earliest" else ledger.previous_position
    position = step(EARLIEST if end == "earliest" else LATEST)
    for _ in range(skipped):
        position = step(position)
    return await _shown(topic, position, f"{topic.name} has no such entry")


async def id_at(request: web.Request) -> web.Response:
    """GET: the id of the first message published at or after the time, in ms.

    Behind the newest message, it is the place where the next one may be stored.
    """
    topic = await _topic(request)
    found = await first_published_since(topic.ledger, number(request, "timestamp"))
    position = topic.ledger.next_position(topic.ledger.last_confirmed) if found == LATEST else found
    return web.json_response(message_id_json(position))


async def size_behind(request: web.Request) -> web.Response:
    """PUT, message id as body: how many bytes are stored from that message on."""
    topic = await _topic(request)
    target = target_in(await body_of(request))
    if target.position == LATEST:
        return web.json_response(0)
    ranges = topic.ledger.ranges
    return web.json_response((await ranges.sums(target.position, ranges.end)).size_bytes)


async def _topic(request: web.Request) -> Topic:
    if await partitions_in(request):
        raise RestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "Messages have ids and an order within one partition alone: name the partition.",
        )
    return await existing_topic(request)


def _count(name: str, given: int) -> int:
    if not 0 < given <= PEEKED_ENTRIES:
        raise refused(f"{name} = {given} is out of bounds: give 1 to {PEEKED_ENTRIES}.")
    return given


async def _shown(topic: Topic, position: Position, missing: str) -> web.Response:
    entry = await _entry_at(topic, position)
    if entry is None:
        raise not_found(f"{missing}: it may be deleted already.")
    readable = position <= topic.max_read_position()
    shown = shown_message(entry, aborted=topic.is_aborted(entry), readable=readable)
    return web.Response(
        body=shown.body, headers=shown.headers, content_type="application/octet-stream"
    )


async def _entry_at(topic: Topic, position: Position) -> Entry | None:
    if position.ledger_id < 0 or position.entry_id < 0 or position > topic.ledger.last_confirmed:
        return None
    found = await topic.ledger.read(position, max_entries=1, max_bytes=1, up_to=position)
    return found[0] if found and found[0].position == position else None
