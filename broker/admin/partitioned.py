"""`/admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions`: partitioned topics.

A number of partitions comes as a number, as its text, or (when the topic is made) as Pulsar's
PartitionedTopicMetadata, which may name properties.  Any broker answers.
"""

from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

from broker.admin.each_partition import carry_subscriptions
from broker.admin.keys import BROKER
from broker.admin.persistent import BASE, TOPIC, as_asked, persistent_name
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    is_number,
    namespace_of,
    no_content,
    not_found,
    properties_in,
)
from broker.admin.topic_stats import stats_of_all, topic_stats
from broker.app.service import Broker
from broker.topics.partitions import PartitionedTopic
from magnetar.protocol.names import TopicName, require_creatable

PARTITIONS = TOPIC + "/partitions"
COUNT_CHARACTERS = 20
METADATA_MEMBERS = frozenset({"partitions", "properties", "deleted"})


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE + "/partitioned", list_partitioned),
        web.get(PARTITIONS, get_partitions),
        web.put(PARTITIONS, create_partitioned),
        web.post(PARTITIONS, grow_partitions),
        web.delete(PARTITIONS, delete_partitioned),
        web.get(TOPIC + "/partitioned-stats", partitioned_stats),
    ]


def _count_in(value: object) -> int:
    """A number, or its text."""
    if is_number(value):
        return value
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < COUNT_CHARACTERS:
        return int(value)
    raise RestError(
        HTTPStatus.NOT_ACCEPTABLE,
        f"{value!r} is no number of partitions: send a number as the body, or, only when the topic "
        'is made, {"partitions": number, "properties": {...}}.',
    )


def _metadata_in(body: object) -> tuple[int, Mapping[str, str]]:
    """How many partitions a topic shall have, and its properties."""
    if not isinstance(body, dict):
        return _count_in(body), {}
    unknown = sorted(body.keys() - METADATA_MEMBERS)
    if unknown or body.get("deleted"):
        what = ", ".join(unknown) or "deleted = true"
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"A partitioned topic cannot be made with {what}: send partitions and properties.",
        )
    return _count_in(body.get("partitions")), properties_in(body.get("properties"))


async def list_partitioned(request: web.Request) -> web.Response:
    """GET: names of partitioned topics."""
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.partitioned.list(namespace))


async def get_partitions(request: web.Request) -> web.Response:
    """GET: `{"partitions": N}`, 0 for an unpartitioned topic; with its properties if it has any.

    Clients that are about to open it add `?checkAllowAutoCreation=true`.  Then a missing topic that
    may be made answers 0 partitions instead of 404; if its namespace says so, it is made
    partitioned now.
    """
    topics = request.app[BROKER].topics
    name = persistent_name(request)
    found = await topics.partitioned.find(name)
    if found is None and not await topics.may_be_opened(name):
        if not flag(request, "checkAllowAutoCreation"):
            raise not_found(f"There is no topic {name}: create it with PUT, or publish to it.")
        await topics.require_auto_creation(name)
        await topics.partitions_of(name, create=True)
        found = await topics.partitioned.find(name)
    return web.json_response(_metadata_json(found))


def _metadata_json(found: PartitionedTopic | None) -> dict[str, object]:
    """PartitionedTopicMetadata."""
    answer: dict[str, object] = {"partitions": found.partitions if found else 0, "deleted": False}
    if found is not None and found.properties:
        answer["properties"] = dict(found.properties)
    return answer


async def create_partitioned(request: web.Request) -> web.Response:
    """PUT: the number of partitions as body, or PartitionedTopicMetadata."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    require_creatable(name)
    await broker.namespaces.require(namespace_of(request))
    count, properties = _metadata_in(await body_of(request))
    if await broker.topics.exists(name):
        raise conflict(f"The topic {name} exists already.")
    await broker.topics.partitioned.create(name, count, properties)
    await _make_partitions(broker, name, count)
    return no_content()


async def _make_partitions(broker: Broker, name: TopicName, count: int) -> None:
    """A single broker makes them now; where there are others, each is made by who first serves it.

    Otherwise all of them would begin at the one broker that was asked.
    """
    if broker.placement.shared:
        return
    for index in range(count):
        await broker.topics.get(name.partition(index), create=True)


async def grow_partitions(request: web.Request) -> web.Response:
    """POST, the new number as body; it may only grow.  Subscriptions of the first come along."""
    broker = request.app[BROKER]
    name = persistent_name(request)
    count = _count_in(await body_of(request))
    before = await broker.topics.partitioned.count(name)
    first = await stats_of(broker, name.partition(0)) if before else {}
    await broker.topics.partitioned.grow(name, count)
    await _make_partitions(broker, name, count)
    added = [name.partition(index) for index in range(before, count)]
    await carry_subscriptions(broker, first, added)
    return no_content()


async def delete_partitioned(request: web.Request) -> web.Response:
    """DELETE `?force=true`: the topic with its partitions."""
    await request.app[BROKER].topics.delete_partitioned(
        persistent_name(request), force=flag(request, "force")
    )
    return no_content()


async def partitioned_stats(request: web.Request) -> web.Response:
    """GET `?perPartition=`: TopicStats of all partitions together, and of every one.

    `?excludePublishers=&excludeConsumers=` as of one topic.
    """
    broker = request.app[BROKER]
    name = persistent_name(request)
    found = await broker.topics.partitioned.find(name)
    if found is None:
        raise not_found(f"{name} is not partitioned: ask for /stats.")
    partitions = [name.partition(index) for index in range(found.partitions)]
    each = {
        str(partition): as_asked(request, await stats_of(broker, partition))
        for partition in partitions
    }
    shown = each if request.query.get("perPartition", "true").lower() == "true" else {}
    metadata = _metadata_json(found)
    return web.json_response(
        {**stats_of_all(each.values()), "metadata": metadata, "partitions": shown}
    )


async def stats_of(broker: Broker, name: TopicName) -> Mapping[str, object]:
    """TopicStats of a partition, from whoever has it; {} if that broker has none of the name."""
    placed = broker.placement.place(name, authoritative=False)
    if placed.here:
        return topic_stats(await broker.topics.get(name, create=True), broker.broker_id)
    return await broker.topics.cluster.stats(placed.address, name)
