"""Requests on a topic that are carried out on each of its partitions, at their owners."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.persistent import existing_topic, persistent_name
from broker.app.service import Broker
from broker.topics.topic_requests import CreateTopicSubscription, TopicRequest
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR

A = TypeVar("A")

PROPERTIES = "subscriptionProperties"


async def partitions_in(request: web.Request) -> list[TopicName]:
    """The partitions of the topic in the path; empty if it has none or is one itself."""
    name = persistent_name(request)
    if name.partition_index is not None:
        return []
    count = await request.app[BROKER].topics.partitioned.count(name)
    return [name.partition(index) for index in range(count)]


async def on_each_partition(
    request: web.Request,
    request_of: Callable[[TopicName], TopicRequest[A]],
    *,
    tolerated: Collection[ServerError] = (),
) -> list[A]:
    """Carry a typed request out on the topic in the path, or on each of its partitions.

    Returns the answers.  The owner of each partition is asked.  Errors of partitions with a code in
    `tolerated` are left out; if all partitions fail so, the first error is raised.  Any other error
    is raised at once.
    """
    cluster = request.app[BROKER].topics.cluster
    partitions = await partitions_in(request)
    if not partitions:
        topic = await existing_topic(request)
        return [await request_of(topic.name).run(cluster.local)]
    answers: list[A] = []
    refusals: list[MagnetarError] = []

    async def at_owner(partition: TopicName) -> None:
        try:
            answers.append(await cluster.ask(request_of(partition)))
        except MagnetarError as error:
            if error.code not in tolerated:
                raise
            refusals.append(error)

    await request.app[BROKER].topics.partition_work.run(partitions, at_owner)
    if not answers:
        raise refusals[0]
    return answers


async def copy_subscriptions(
    broker: Broker, stats: Mapping[str, object], partitions: Sequence[TopicName]
) -> None:
    """Create the durable subscriptions of an old partition, given by its TopicStats, on new ones.

    They begin at the first message, so that a subscription to the whole topic misses none.
    """
    found = stats.get("subscriptions")
    durable = {
        str(name): (
            {str(key): str(text) for key, text in one.get(PROPERTIES, {}).items()},
            one.get("isReplicated") is True,
        )
        for name, one in (found.items() if isinstance(found, dict) else ())
        if one.get("isDurable") and name != COMPACTION_CURSOR
    }
    cluster = broker.topics.cluster

    async def copy(partition: TopicName) -> None:
        for name, (properties, replicated) in durable.items():
            await cluster.ask(
                CreateTopicSubscription(
                    partition, name, EARLIEST, properties, replicated=replicated
                )
            )

    if durable:
        await broker.topics.partition_work.run(partitions, copy)
