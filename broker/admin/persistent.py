"""`/admin/v2/persistent/{tenant}/{namespace}[/{topic}]`: regular topics.

For scalable topics and their segments see /admin/v2/scalable.  The owner of a topic serves requests
about it; any broker serves those about a namespace.
"""

from collections.abc import Mapping

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.not_served import require_no_shadow
from broker.admin.redirect import destination_of, require_here
from broker.admin.rest import (
    body_of,
    conflict,
    flag,
    namespace_of,
    no_content,
    no_topic,
    not_found,
    properties_in,
    refused,
    require_whole_bundle,
    topic_of,
)
from broker.admin.topic_stats import without
from broker.topics.internal_stats import internal_stats
from broker.topics.topic import Topic
from broker.topics.topic_stats import topic_stats
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicDomain, TopicName

BASE = "/admin/v2/persistent/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_topics),
        web.put(TOPIC, create),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/internalStats", stats_of_ledgers),
        web.get(TOPIC + "/lastMessageId", last_message_id),
        web.post(TOPIC + "/terminate", terminate),
        web.put(TOPIC + "/unload", unload),
    ]


def persistent_name(request: web.Request) -> TopicName:
    """The `persistent://` topic in the path."""
    return topic_of(request, "persistent")


async def existing_topic(request: web.Request) -> Topic:
    """The topic in the path, loaded.  404 if it does not exist, 307 if another broker owns it."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    if name.partition_index is None and await broker.topics.partitioned.count(name):
        raise not_found(f"{name} is partitioned: ask for one of its partitions.")
    if not await broker.topics.may_be_opened(name):
        raise no_topic(name)
    await require_here(request, name)
    return await broker.topics.get(name, create=False)


async def require_known_partition(request: web.Request, name: TopicName) -> None:
    """Raise 412 for the name of a partition that is none of a partitioned topic."""
    index = name.partition_index
    if index is None:
        return
    count = await request.app[BROKER].topics.partitioned.count(name.partitioned)
    if index >= count:
        raise refused(
            f"{name} is named as a partition, and {name.partitioned} has {count} of them: use "
            "another name, or create the partitioned topic."
        )


async def require_not_partitioned(request: web.Request, name: TopicName) -> None:
    """Raise 409 for a partitioned topic, of which the request would delete nothing."""
    topics = request.app[BROKER].topics
    if name.partition_index is None and await topics.partitioned.count(name):
        raise conflict(
            f"{name} is partitioned: delete it with DELETE .../partitions "
            "(pulsar-admin topics delete-partitioned-topic)."
        )


async def require_not_migrated(request: web.Request, name: TopicName) -> None:
    """Raise 409 for an ordinary topic, or a partition, that is a segment of a scalable topic."""
    if await request.app[BROKER].topics.is_migrated(name):
        raise conflict(
            f"{name} is a segment of {name.partitioned.in_domain(TopicDomain.TOPIC)}, and is "
            "deleted when every subscription has read it: change the scalable topic."
        )


def message_id_json(position: Position) -> dict[str, int]:
    """A message id as Pulsar's tools read it."""
    return {
        "ledgerId": position.ledger_id,
        "entryId": position.entry_id,
        "partitionIndex": -1,
    }


async def list_topics(request: web.Request) -> web.Response:
    """GET `?bundle=`: the names of persistent topics, partitions included."""
    require_whole_bundle(request)
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.list_names(namespace))


async def create(request: web.Request) -> web.Response:
    """PUT, properties as body: create an unpartitioned topic; 409 if it exists."""
    name = persistent_name(request)
    await require_known_partition(request, name)
    await require_here(request, name)
    properties = properties_in(await body_of(request))
    require_no_shadow(properties)
    await request.app[BROKER].topics.create(name, properties)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the topic; 412 while it is used, unless forced."""
    await require_not_partitioned(request, persistent_name(request))
    topic = await existing_topic(request)
    await require_not_migrated(request, topic.name)
    await request.app[BROKER].topics.delete(topic.name, force=flag(request, "force"))
    return no_content()


async def stats(request: web.Request) -> web.Response:
    """GET `?excludePublishers=&excludeConsumers=`: TopicStats."""
    topic = await existing_topic(request)
    owner = request.app[BROKER].broker_id
    return web.json_response(without_excluded(request, await topic_stats(topic, owner)))


def without_excluded(request: web.Request, stats: Mapping[str, object]) -> dict[str, object]:
    """TopicStats without the publishers or consumers that the request excludes."""
    return without(
        stats,
        publishers=flag(request, "excludePublishers"),
        consumers=flag(request, "excludeConsumers"),
    )


async def stats_of_ledgers(request: web.Request) -> web.Response:
    """GET `?metadata=`: PersistentTopicInternalStats: ledgers, with their records, and cursors."""
    topic = await existing_topic(request)
    stats = await internal_stats(topic, with_records=flag(request, "metadata"))
    return web.json_response(stats)


async def last_message_id(request: web.Request) -> web.Response:
    """GET: the newest message that readers get; -1:-1 if there is none."""
    newest = await (await existing_topic(request)).last_message.entry()
    return web.json_response(
        message_id_json(Position(-1, -1) if newest is None else newest.position)
    )


async def terminate(request: web.Request) -> web.Response:
    """POST: seal the topic for ever, and answer with the last message id."""
    topic = await existing_topic(request)
    return web.json_response(message_id_json(await topic.seal()))


async def unload(request: web.Request) -> web.Response:
    """PUT `?destinationBroker=`: close the topic; clients reconnect, and it is loaded anew.

    With a destination, that broker loads it; 412 if it takes no topics.
    """
    broker = request.app[BROKER]
    name = persistent_name(request)
    if name.partition_index is None and (count := await broker.topics.partitioned.count(name)):
        for index in range(count):
            await broker.topics.cluster.unload(name.partition(index))
        return no_content()
    topic = await existing_topic(request)
    await broker.topics.cluster.unload(topic.name, destination_of(request))
    return no_content()
