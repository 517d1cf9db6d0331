"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription[s]`: subscriptions of a topic.

A request on a partitioned topic is carried out on each partition: see `partition_requests`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.partition_requests import on_each_partition, partitions_in
from broker.admin.partitioned import stats_of
from broker.admin.persistent import TOPIC
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    is_number,
    no_content,
    not_found,
    number,
    properties_in,
    refused,
)
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from broker.wire.handlers.consume_position import batch_size_at
from magnetar.protocol.ack_set import pending_all, to_words
from magnetar.protocol.ids import EARLIEST, LATEST, Position, from_wire
from magnetar.protocol.names import TopicName

UINT64_MAX = 2**64 - 1
"""Ids come signed, or unsigned as in the binary protocol."""
MAX_BATCH_INDEX = 2**31 - 1
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
        web.get(SUBSCRIPTION + "/position/{position}", refuse_to_peek),
    ]


@dataclass(frozen=True, slots=True)
class _SeekTarget:
    """The first message to be delivered, or (`excluded`) the one before it."""

    position: Position
    batch_index: int = -1
    excluded: bool = False

    @property
    def at_edge(self) -> bool:
        """Whether the target is before or after all messages."""
        return self.position in (EARLIEST, LATEST)

    async def seek(self, subscription: Subscription) -> None:
        """Move the subscription to the target."""
        if self.at_edge:
            await subscription.seek(self.position)
            return
        size = 1
        if self.batch_index >= 0:
            size = max(size, await batch_size_at(subscription.ledger, self.position))
        first = min(max(self.batch_index, 0), size - 1) + self.excluded
        if first == size or (self.excluded and self.batch_index < 0):
            behind = Position(self.position.ledger_id, self.position.entry_id + 1)
            await subscription.seek(behind)
        elif first == 0:
            await subscription.seek(self.position)
        else:
            left = pending_all(size) >> first << first
            await subscription.seek(self.position, to_words(left), size)


def _target(body: object) -> _SeekTarget:
    """The target in a body: a message id, "earliest" or "latest".  None and {}: the newest."""
    position = _position(body)
    members = body if isinstance(body, dict) else {}
    batch_index, excluded = members.get("batchIndex", -1), members.get("excluded", False)
    if not is_number(batch_index, -1, MAX_BATCH_INDEX) or not isinstance(excluded, bool):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            "In a message id batchIndex is a number, and excluded true or false.",
        )
    return _SeekTarget(position, batch_index, excluded)


def _position(body: object) -> Position:
    if body is None or body == "latest":
        return LATEST
    if body == "earliest":
        return EARLIEST
    members = body if isinstance(body, dict) else {"ledgerId": body}
    ledger_id, entry_id = members.get("ledgerId"), members.get("entryId")
    if ledger_id is None and entry_id is None:
        return LATEST
    if not is_number(ledger_id, most=UINT64_MAX) or not is_number(entry_id, most=UINT64_MAX):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            'A message id needs the numbers ledgerId and entryId: give them, "earliest" or '
            '"latest".',
        )
    position = Position(from_wire(ledger_id % 2**64), from_wire(entry_id % 2**64))
    return EARLIEST if position.ledger_id < 0 else position


def _not_found_on(topic: Topic, name: str) -> RestError:
    return not_found(f"{topic.name} has no subscription {name!r}: create it with PUT.")


async def _require_unpartitioned(request: web.Request, consequence: str) -> None:
    """Raise 405 on a partitioned topic, for requests with a message id."""
    if await partitions_in(request):
        raise RestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"A message id is of one partition, so {consequence}: use a time, or name the "
            "partition.",
        )


async def _seek(
    request: web.Request, to: Callable[[Topic], Awaitable[_SeekTarget]]
) -> web.Response:
    """Move the subscription in the path; 404 if neither the topic nor any partition has it."""
    name = request.match_info["subscription"]

    async def seek(topic: Topic) -> None:
        found = topic.subscriptions.get(name)
        if found is None:
            raise _not_found_on(topic, name)
        await (await to(topic)).seek(found)

    await on_each_partition(request, seek, tolerated=HTTPStatus.NOT_FOUND)
    return no_content()


async def list_subscriptions(request: web.Request) -> web.Response:
    """GET: names of subscriptions; of a partitioned topic those of any partition."""

    async def names(topic: Topic) -> list[str]:
        return list(topic.subscriptions)

    found = await on_each_partition(request, names, tolerated=HTTPStatus.NOT_FOUND)
    each = [str(name) for answer in found if isinstance(answer, list) for name in answer]
    return web.json_response(sorted(set(each)))


async def create(request: web.Request) -> web.Response:
    """PUT, message id and properties as body: create a subscription; 409 if it exists.

    It begins at the message id, by default behind the newest message.
    """
    name = request.match_info["subscription"]
    if flag(request, "replicated"):
        raise refused("There is one cluster, so nothing is replicated: leave replicated out.")
    body = await body_of(request)
    target = _target(body)
    properties = properties_in(body.get("properties") if isinstance(body, dict) else None)
    start = target.position
    if not target.at_edge:
        await _require_unpartitioned(
            request, "a subscription cannot begin there on every partition"
        )
        # A subscription begins after a position; the id names the first message to be delivered.
        start = Position(start.ledger_id, start.entry_id - 1)

    async def create_on(topic: Topic) -> None:
        if name in topic.subscriptions:
            raise conflict(f"{topic.name} has a subscription {name!r} already.")
        await topic.create_subscription(name, start, properties=properties)
        if target.batch_index > 0 or target.excluded:
            await target.seek(topic.subscriptions[name])

    await on_each_partition(request, create_on, tolerated=HTTPStatus.CONFLICT)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a subscription; 412 while it has consumers, unless forced."""
    name, force = request.match_info["subscription"], flag(request, "force")
    if not force:
        # All partitions are checked before the first is changed, so that a refusal changes none.
        for partition in await partitions_in(request):
            await _require_unused(request, partition, name)

    async def unsubscribe(topic: Topic) -> None:
        await topic.unsubscribe(name, force=force)

    await on_each_partition(request, unsubscribe, tolerated=HTTPStatus.NOT_FOUND)
    return no_content()


async def _require_unused(request: web.Request, partition: TopicName, name: str) -> None:
    """Raise 412 if the subscription has consumers on this partition."""
    found = (await stats_of(request.app[BROKER], partition)).get("subscriptions")
    stats = found.get(name) if isinstance(found, dict) else None
    if stats and stats.get("consumers"):
        raise refused(
            f"Subscription {name!r} on {partition} has consumers: close them, or use force."
        )


async def skip_all(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far."""

    async def newest(_topic: Topic) -> _SeekTarget:
        return _SeekTarget(LATEST)

    return await _seek(request, newest)


async def reset_to_id(request: web.Request) -> web.Response:
    """POST, message id as body: continue at that message, or with `excluded` behind it.

    405 on a partitioned topic.
    """
    await _require_unpartitioned(request, "the cursors of all cannot be set to it")
    target = _target(await body_of(request))

    async def given(_topic: Topic) -> _SeekTarget:
        return target

    return await _seek(request, given)


async def reset_to_time(request: web.Request) -> web.Response:
    """POST: continue at the first message published at or after the time, in ms."""
    since_ms = number(request, "timestamp")

    async def published(topic: Topic) -> _SeekTarget:
        return _SeekTarget(await first_published_since(topic.ledger, since_ms))

    return await _seek(request, published)


async def refuse_to_peek(request: web.Request) -> web.Response:
    """GET: refuse with 405: messages are not shown over REST."""
    # Pulsar's Java admin client takes 404 for the end of the backlog, and shows nothing.
    raise RestError(
        HTTPStatus.METHOD_NOT_ALLOWED,
        "Messages are not shown over REST yet: use `magnetar peek TOPIC`, or a reader.",
    )
