"""`/admin/v2/{domain}/{tenant}/{namespace}/{topic}/partitions`: partitioned topics, stored or not.

A body has the number of partitions as a number, as text, or (when the topic is created) as Pulsar's
PartitionedTopicMetadata, which may have properties.  Any broker serves these requests.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.not_served import require_no_shadow
from broker.admin.partition_requests import copy_subscriptions, on_each_partition, partitions_in
from broker.admin.persistent import (
    TOPIC,
    persistent_name,
    require_not_migrated,
    without_excluded,
)
from broker.admin.rest import (
    RestError,
    body_of,
    conflict,
    flag,
    namespace_of,
    no_content,
    no_topic,
    not_found,
    ordinary_topic_of,
    properties_in,
    refused,
)
from broker.admin.topic_stats import stats_of_all
from broker.app.service import Broker
from broker.policies.json_numbers import is_number
from broker.topics.partitions import PartitionedTopic
from broker.topics.reserved_names import COORDINATORS
from broker.topics.topic import TopicNotFound
from broker.topics.topic_requests import SealTopic, TrimTopic, TruncateTopic, ViewInternalStats
from magnetar.protocol.names import (
    PARTITION_SUFFIX,
    TopicDomain,
    TopicName,
    require_creatable,
)

COUNT_CHARACTERS = 20
METADATA_MEMBERS = frozenset({"partitions", "properties", "deleted"})


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    found: list[web.RouteDef] = []
    for domain in (TopicDomain.PERSISTENT, TopicDomain.NON_PERSISTENT):
        namespace = f"/admin/v2/{domain.value}/{{tenant}}/{{namespace}}"
        topic = namespace + "/{topic}"
        found += [
            web.get(namespace + "/partitioned", _listed(domain)),
            web.get(topic + "/partitions", get_partitions),
            web.put(topic + "/partitions", create_partitioned),
            web.post(topic + "/partitions", grow_partitions),
            web.delete(topic + "/partitions", delete_partitioned),
            web.get(topic + "/partitioned-stats", partitioned_stats),
        ]
    found += [
        web.get(TOPIC + "/partitioned-internalStats", stats_of_ledgers),
        web.post(TOPIC + "/terminate/partitions", terminate_partitions),
        web.post(TOPIC + "/trim", trim),
        web.post(TOPIC + "/createMissedPartitions", create_missing),
        web.delete(TOPIC + "/truncate", truncate),
    ]
    return found


def _count_in(value: object) -> int:
    """A number of partitions, given as a number or as text."""
    if is_number(value):
        return value
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < COUNT_CHARACTERS:
        return int(value)
    raise RestError(
        HTTPStatus.NOT_ACCEPTABLE,
        f"{value!r} is no number of partitions: send a number as the body, or, only when the topic "
        'is created, {"partitions": number, "properties": {...}}.',
    )


def _metadata_in(body: object) -> tuple[int, Mapping[str, str]]:
    """The number of partitions and the properties in a body."""
    if not isinstance(body, dict):
        return _count_in(body), {}
    unknown = sorted(body.keys() - METADATA_MEMBERS)
    if unknown or body.get("deleted"):
        unsupported = ", ".join(unknown) or "deleted = true"
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"A partitioned topic cannot be created with {unsupported}: send partitions and "
            "properties.",
        )
    return _count_in(body.get("partitions")), properties_in(body.get("properties"))


def _listed(domain: TopicDomain) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def list_partitioned(request: web.Request) -> web.Response:
        """GET: names of partitioned topics."""
        broker = request.app[BROKER]
        namespace = namespace_of(request)
        await broker.namespaces.require(namespace)
        return web.json_response(await broker.topics.partitioned.list(namespace, domain))

    return list_partitioned


async def get_partitions(request: web.Request) -> web.Response:
    """GET: `{"partitions": N}`, 0 for an unpartitioned topic; with its properties if it has any.

    Clients that are about to open the topic add `?checkAllowAutoCreation=true`.  A missing topic
    that may be created automatically then answers 0 partitions instead of 404, or is created with
    partitions now, if its namespace's policy has it so.  The name of v4 coordinators has one for
    each coordinator.
    """
    broker = request.app[BROKER]
    topics, name = broker.topics, ordinary_topic_of(request)
    if name == COORDINATORS:
        count = broker.settings.coordinators_of_v4_clients
        return web.json_response(_metadata_json(PartitionedTopic(count)))
    found = await topics.partitioned.find(name)
    if found is None and not await topics.may_be_opened(name):
        if not flag(request, "checkAllowAutoCreation"):
            raise no_topic(name)
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
    """PUT, the number of partitions or PartitionedTopicMetadata as body: create the topic.

    The clusters to which it is replicated get it too, unless `?createLocalTopicOnly=true`.
    """
    broker = request.app[BROKER]
    name = ordinary_topic_of(request)
    broker.topics.require_served(name)
    require_creatable(name)
    if PARTITION_SUFFIX in name.local_name:
        raise refused(
            f"A partitioned topic may not have {PARTITION_SUFFIX!r} in its name, as its partitions "
            "do: use another name."
        )
    await broker.namespaces.require(namespace_of(request))
    count, properties = _metadata_in(await body_of(request))
    require_no_shadow(properties)
    if await broker.topics.exists(name):
        raise conflict(f"The topic {name} exists already.")
    async with broker.topic_counts.room(name, partitions=count):
        await broker.topics.partitioned.create(name, count, properties)
    await _create_partitions(broker, name, count)
    if not flag(request, "createLocalTopicOnly"):
        _make_in_other_clusters(broker, name, count)
    return no_content()


def _make_in_other_clusters(broker: Broker, name: TopicName, count: int) -> None:
    if name.domain is TopicDomain.PERSISTENT:
        clusters = broker.policies.of(name).replication_clusters
        broker.replications.make_partitions(name, count, clusters)


async def _create_partitions(broker: Broker, name: TopicName, count: int) -> None:
    """Create the first `count` partitions, if this is the only broker and they are stored."""
    # In a cluster the broker that first serves a partition creates it; otherwise this one would
    # own all of them.
    if broker.placement.shared or name.domain is TopicDomain.NON_PERSISTENT:
        return

    partitions = [name.partition(index) for index in range(count)]
    await broker.topics.partition_work.run(partitions, broker.topics.create_partition)


async def grow_partitions(request: web.Request) -> web.Response:
    """POST, the new number as body: add partitions, with the subscriptions of the first one.

    The clusters to which it is replicated get them too, unless `?updateLocalTopicOnly=true`.
    409 if the topic is not partitioned.
    """
    broker = request.app[BROKER]
    name = ordinary_topic_of(request)
    await require_not_migrated(request, name)
    count = _count_in(await body_of(request))
    before = await broker.topics.partitioned.count(name)
    if not before:
        raise conflict(f"{name} is not partitioned: create it with PUT first.")
    first = await broker.topics.cluster.stats(name.partition(0))
    async with broker.topic_counts.room(name, partitions=count, before=before):
        await broker.topics.partitioned.grow(name, count)
    await _create_partitions(broker, name, count)
    if name.domain is TopicDomain.PERSISTENT:
        added = [name.partition(index) for index in range(before, count)]
        await copy_subscriptions(broker, first, added)
    if not flag(request, "updateLocalTopicOnly"):
        _make_in_other_clusters(broker, name, count)
    return no_content()


async def create_missing(request: web.Request) -> web.Response:
    """POST: create the partitions that are not stored yet; among several brokers their first use.

    404 for a topic without partitions.
    """
    broker, name = request.app[BROKER], persistent_name(request)
    await require_not_migrated(request, name)
    count = await broker.topics.partitioned.count(name)
    if not count:
        raise not_found(f"{name} is not partitioned: create it with PUT .../partitions.")
    await _create_partitions(broker, name, count)
    return no_content()


async def delete_partitioned(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the topic with its partitions; 409 if it is not partitioned."""
    topics, name = request.app[BROKER].topics, ordinary_topic_of(request)
    await require_not_migrated(request, name)
    if not await topics.partitioned.count(name) and await topics.exists(name):
        raise conflict(f"{name} is not partitioned: delete it without /partitions.")
    await topics.delete_partitioned(name, force=flag(request, "force"))
    return no_content()


async def partitioned_stats(request: web.Request) -> web.Response:
    """GET `?perPartition=`: TopicStats of all partitions together, and of each one.

    `?excludePublishers=&excludeConsumers=` as for one topic.  A partition that no broker has loaded
    is not loaded for it: there may be thousands.
    """
    broker = request.app[BROKER]
    name = ordinary_topic_of(request)
    found = await broker.topics.partitioned.find(name)
    if found is None:
        raise not_found(f"{name} is not partitioned: ask for /stats.")
    partitions = [name.partition(index) for index in range(found.partitions)]

    async def stats(partition: TopicName) -> Mapping[str, object]:
        found = await broker.topics.cluster.stats_without_loading(partition)
        return without_excluded(request, found)

    found_stats = await broker.topics.partition_work.run(partitions, stats)
    each = {str(name): one for name, one in zip(partitions, found_stats, strict=True)}
    shown = each if request.query.get("perPartition", "true").lower() == "true" else {}
    metadata = _metadata_json(found)
    return web.json_response(
        {**stats_of_all(each.values()), "metadata": metadata, "partitions": shown}
    )


async def stats_of_ledgers(request: web.Request) -> web.Response:
    """GET `?metadata=`: PersistentTopicInternalStats of each partition that exists."""
    with_records = flag(request, "metadata")
    topics, name = request.app[BROKER].topics, persistent_name(request)
    found = await topics.partitioned.find(name)
    if found is None:
        raise not_found(f"{name} is not partitioned: ask for /internalStats.")
    partitions = [name.partition(index) for index in range(found.partitions)]

    async def stats(partition: TopicName) -> Mapping[str, object] | None:
        try:
            return await topics.cluster.ask(ViewInternalStats(partition, with_records))
        except TopicNotFound:
            return None

    each = await topics.partition_work.run(partitions, stats)
    shown = {str(name): one for name, one in zip(partitions, each, strict=True) if one is not None}
    return web.json_response({"metadata": _metadata_json(found), "partitions": shown})


async def terminate_partitions(request: web.Request) -> web.Response:
    """POST: seal all partitions for ever; the last message id of each, by its index."""
    if not await partitions_in(request):
        raise RestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"{persistent_name(request)} has no partitions: use /terminate.",
        )
    last = await on_each_partition(request, SealTopic)
    by_index = sorted(last, key=lambda each: each["partitionIndex"])
    return web.json_response({str(each["partitionIndex"]): each for each in by_index})


async def trim(request: web.Request) -> web.Response:
    """POST: delete now what every subscription has read and no policy keeps."""
    await on_each_partition(request, TrimTopic)
    return no_content()


async def truncate(request: web.Request) -> web.Response:
    """DELETE: move every subscription to the end, and delete what is stored, also if kept.

    409 for a segment of a scalable topic, and during a compaction.
    """
    name = persistent_name(request)
    for each in await partitions_in(request) or [name]:
        await require_not_migrated(request, each)
    await on_each_partition(request, TruncateTopic)
    return no_content()
