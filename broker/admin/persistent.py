"""`/admin/v2/persistent/{tenant}/{namespace}[/{topic}]`: regular topics, partitioned or not.

Scalable topics and their segments are not here: see /admin/v2/scalable.  What concerns one topic is
answered by its owner; what concerns a namespace or a partitioned topic, by any broker.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.redirect import destination_of, require_here
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    namespace_of,
    no_content,
    not_found,
    topic_of,
)
from broker.admin.topic_stats import internal_stats, topic_stats
from broker.topic import Topic
from protocol.ids import Position
from protocol.names import TopicName, require_creatable

if TYPE_CHECKING:
    from broker.service import Broker

BASE = "/admin/v2/persistent/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_topics),
        web.get(BASE + "/partitioned", list_partitioned),
        web.put(TOPIC, create),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/partitions", get_partitions),
        web.put(TOPIC + "/partitions", create_partitioned),
        web.post(TOPIC + "/partitions", grow_partitions),
        web.delete(TOPIC + "/partitions", delete_partitioned),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/partitioned-stats", partitioned_stats),
        web.get(TOPIC + "/internalStats", stats_of_ledgers),
        web.get(TOPIC + "/lastMessageId", last_message_id),
        web.post(TOPIC + "/terminate", terminate),
        web.put(TOPIC + "/unload", unload),
    ]


def persistent_name(request: web.Request) -> TopicName:
    """The `persistent://` topic in the path."""
    return topic_of(request, "persistent")


async def existing_topic(request: web.Request) -> Topic:
    """The topic in the path, loaded.  404 when there is none, 307 when it is another broker's."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    if name.partition_index is None and await broker.topics.partitioned.count(name):
        raise not_found(f"{name} is partitioned: ask for one of its partitions.")
    if not await broker.topics.exists(name):
        raise not_found(f"There is no topic {name}: create it with PUT, or publish to it.")
    await require_here(request, name)
    return await broker.topics.get(name, create=False)


def message_id_json(position: Position) -> dict[str, int]:
    """A message id as Pulsar's tools read it."""
    return {
        "ledgerId": position.ledger_id,
        "entryId": position.entry_id,
        "partitionIndex": -1,
    }


async def list_topics(request: web.Request) -> web.Response:
    """GET: names of persistent topics, partitions included."""
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.list_names(namespace))


async def list_partitioned(request: web.Request) -> web.Response:
    """GET: names of partitioned topics."""
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.partitioned.list(namespace))


async def create(request: web.Request) -> web.Response:
    """PUT: an unpartitioned topic; 409 if it exists."""
    name = persistent_name(request)
    await require_here(request, name)
    await request.app[BROKER].topics.create(name)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`."""
    topic = await existing_topic(request)
    await request.app[BROKER].topics.delete(topic.name, force=flag(request, "force"))
    return no_content()


async def _partition_count(request: web.Request) -> int:
    count = await body_of(request)
    if not isinstance(count, int) or isinstance(count, bool):
        raise RestError(HTTPStatus.NOT_ACCEPTABLE, "The body must be the number of partitions.")
    return count


async def get_partitions(request: web.Request) -> web.Response:
    """GET: `{"partitions": N}`, 0 for an unpartitioned topic."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    count = await broker.topics.partitioned.count(name)
    if not count and not await broker.topics.exists(name):
        raise not_found(f"There is no topic {name}: create it with PUT, or publish to it.")
    return web.json_response({"partitions": count, "deleted": False})


async def create_partitioned(request: web.Request) -> web.Response:
    """PUT, number of partitions as body."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    require_creatable(name)
    await broker.namespaces.require(namespace_of(request))
    count = await _partition_count(request)
    if await broker.topics.exists(name):
        raise conflict(f"The topic {name} exists already.")
    await broker.topics.partitioned.create(name, count)
    await _make_partitions(broker, name, count)
    return no_content()


async def _make_partitions(broker: "Broker", name: TopicName, count: int) -> None:
    """A single broker makes them now; where there are others, each is made by who first serves it.

    Otherwise all of them would begin at the one broker that was asked.
    """
    if broker.placement.shared:
        return
    for index in range(count):
        await broker.topics.get(name.partition(index), create=True)


async def grow_partitions(request: web.Request) -> web.Response:
    """POST, the new number as body; it may only grow."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    count = await _partition_count(request)
    await broker.topics.partitioned.grow(name, count)
    await _make_partitions(broker, name, count)
    return no_content()


async def delete_partitioned(request: web.Request) -> web.Response:
    """DELETE `?force=true`: the topic with its partitions."""
    await request.app[BROKER].topics.delete_partitioned(
        persistent_name(request), force=flag(request, "force")
    )
    return no_content()


async def stats(request: web.Request) -> web.Response:
    """GET: TopicStats."""
    return web.json_response(topic_stats(await existing_topic(request)))


async def partitioned_stats(request: web.Request) -> web.Response:
    """GET: TopicStats of every partition."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    count = await broker.topics.partitioned.count(name)
    if not count:
        raise not_found(f"{name} is not partitioned: ask for /stats.")
    each = {
        str(name.partition(index)): await _stats_of(broker, name.partition(index))
        for index in range(count)
    }
    return web.json_response({"metadata": {"partitions": count}, "partitions": each})


async def _stats_of(broker: "Broker", name: TopicName) -> Mapping[str, object]:
    """Of a partition, wherever it is; {} of one that nobody has used yet, or that cannot tell."""
    placed = broker.placement.place(name, authoritative=False)
    if placed.here:
        return topic_stats(await broker.topics.get(name, create=True))
    return await broker.topics.elsewhere.stats(placed.address, name)


async def stats_of_ledgers(request: web.Request) -> web.Response:
    """GET: ledgers and cursors."""
    return web.json_response(internal_stats(await existing_topic(request)))


async def last_message_id(request: web.Request) -> web.Response:
    """GET: the newest message that readers get; -1:-1 if there is none."""
    newest = await (await existing_topic(request)).last_message.entry()
    return web.json_response(
        message_id_json(Position(-1, -1) if newest is None else newest.position)
    )


async def terminate(request: web.Request) -> web.Response:
    """POST: seal it for ever; the last message id."""
    topic = await existing_topic(request)
    return web.json_response(message_id_json(await topic.seal()))


async def unload(request: web.Request) -> web.Response:
    """PUT `?destinationBroker=`: close it; clients reconnect and it is loaded anew, there if given.

    412 for a destination that takes no topics.
    """
    broker = request.app[BROKER]
    name = persistent_name(request)
    if name.partition_index is None and (count := await broker.topics.partitioned.count(name)):
        for index in range(count):
            await broker.topics.elsewhere.unload(name.partition(index))
        return no_content()
    topic = await existing_topic(request)
    await broker.topics.elsewhere.unload(topic.name, destination_of(request))
    return no_content()
