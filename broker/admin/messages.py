"""Single messages of a topic over REST: of a backlog, by id, and counted from an end.

Each is an entry, a batch as a whole; its metadata are headers (`broker.topics.shown_message`).  The
owner of the topic answers, others redirect to it.  A partition is asked, not the partitioned topic.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.message_ids import target_in
from broker.admin.partition_requests import partitions_in
from broker.admin.persistent import TOPIC, existing_topic, message_id_json
from broker.admin.rest import RestError, body_of, not_found, number, refused
from broker.admin.subscriptions import SUBSCRIPTION
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.shown_message import shown_message
from broker.topics.topic import Topic
from broker.topics.topic_requests import subscription_of
from magnetar.protocol.ids import LATEST, Position
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
    subscription = subscription_of(topic, name)
    wanted = _count("position", number(request, "position"))
    position = subscription.cursor.nth_unacknowledged(wanted)
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
    position = ledger.entry_at(skipped if end == "earliest" else ledger.entry_count - 1 - skipped)
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
    """PUT, message id as body: how many bytes are stored from that message on.

    Bytes are those of entries, so that a message of a batch counts as the batch.
    """
    topic = await _topic(request)
    body = await body_of(request)
    if not body:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            'The bytes are counted from a message on: send its id, "earliest" or "latest".',
        )
    target = target_in(body, topic.name)
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
    if given < 1:
        raise refused(f"{name} = {given} is out of bounds: the first one is 1.")
    return given


async def _shown(topic: Topic, position: Position, missing: str) -> web.Response:
    entry = await _entry_at(topic, position)
    if entry is None:
        raise not_found(f"{missing}: it may be deleted already.")
    readable = position <= topic.max_read_position()
    shown = shown_message(entry, aborted=topic.is_aborted(entry), readable=readable)
    answer = web.Response(body=shown.body, content_type="application/octet-stream")
    for name, text in shown.headers:
        answer.headers.add(name, text)
    return answer


async def _entry_at(topic: Topic, position: Position) -> Entry | None:
    if position.ledger_id < 0 or position.entry_id < 0 or position > topic.ledger.last_confirmed:
        return None
    found = await topic.ledger.read(position, max_entries=1, max_bytes=1, up_to=position)
    return found[0] if found and found[0].position == position else None
