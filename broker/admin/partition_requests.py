"""Requests on a topic that are carried out on each of its partitions, at their owners."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import quote

import structlog
from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.persistent import existing_topic, persistent_name
from broker.admin.redirect import AUTHORITATIVE
from broker.admin.rest import RestError, body_of, status_of
from broker.app.service import Broker
from broker.placement import OwnedElsewhere, PlacementNotReady
from broker.topics.cluster_topics import rest_path
from broker.topics.topic import Topic, TopicUnavailable
from config.bounds import SEGMENT_OWNER_RETRY_PAUSE_S, SEGMENT_OWNER_TRIES
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

PROPERTIES = "subscriptionProperties"
PARTS_BEFORE_TAIL = 7
"""Parts of a path before its tail: "", admin, v2, domain, tenant, namespace, topic."""

Work = Callable[[Topic], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _TopicRequest:
    """A request about a topic; `tail` is the path behind the topic."""

    method: str
    tail: str
    query: Mapping[str, str]
    body: object


async def _topic_request(request: web.Request) -> _TopicRequest:
    tail = request.rel_url.raw_path.split("/", PARTS_BEFORE_TAIL)[PARTS_BEFORE_TAIL]
    query = {key: value for key, value in request.query.items() if key != AUTHORITATIVE}
    return _TopicRequest(request.method, tail, query, await body_of(request))


async def partitions_in(request: web.Request) -> list[TopicName]:
    """The partitions of the topic in the path; empty if it has none or is one itself."""
    name = persistent_name(request)
    if name.partition_index is not None:
        return []
    count = await request.app[BROKER].topics.partitioned.count(name)
    return [name.partition(index) for index in range(count)]


async def on_each_partition(
    request: web.Request, work: Work, tolerated: HTTPStatus
) -> list[object]:
    """Run `work` on the topic in the path, or on each of its partitions; returns the answers.

    A partition of another broker is sent the same request.  Refusals with the status `tolerated`
    (no such subscription, or it exists already) are left out; if all partitions refuse so, the
    first refusal is raised.  Any other error is raised at once.
    """
    partitions = await partitions_in(request)
    if not partitions:
        return [await work(await existing_topic(request))]
    broker, topic_request = request.app[BROKER], await _topic_request(request)
    answers: list[object] = []
    refusals: list[RestError | MagnetarError] = []

    async def at_owner(partition: TopicName) -> None:
        try:
            answers.append(await _at_owner(broker, partition, work, topic_request))
        except (RestError, MagnetarError) as error:
            status = error.status if isinstance(error, RestError) else status_of(error)
            if status is not tolerated:
                raise
            refusals.append(error)

    await broker.topics.partition_work.run(partitions, at_owner)
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
        str(name): {str(key): str(text) for key, text in one.get(PROPERTIES, {}).items()}
        for name, one in (found.items() if isinstance(found, dict) else ())
        if one.get("isDurable")
    }

    async def copy(partition: TopicName) -> None:
        for name, properties in durable.items():
            tail = f"subscription/{quote(name, safe='')}"
            body = {"ledgerId": -1, "entryId": -1, "properties": properties}
            create = partial(_create_at_earliest, name, properties)
            topic_request = _TopicRequest("PUT", tail, {}, body)
            try:
                await _at_owner(broker, partition, create, topic_request)
            except MagnetarError as error:
                if status_of(error) is not HTTPStatus.CONFLICT:
                    raise

    if durable:
        await broker.topics.partition_work.run(partitions, copy)


async def _create_at_earliest(name: str, properties: Mapping[str, str], topic: Topic) -> None:
    await topic.create_subscription(name, EARLIEST, properties=properties)


async def _at_owner(
    broker: Broker, partition: TopicName, work: Work, topic_request: _TopicRequest
) -> object:
    for tried in range(1, SEGMENT_OWNER_TRIES):
        try:
            return await _once_at_owner(broker, partition, work, topic_request)
        except (OwnedElsewhere, PlacementNotReady, TopicUnavailable) as error:
            log.debug("partition_asked_again", topic=str(partition), error=str(error))
            await asyncio.sleep(SEGMENT_OWNER_RETRY_PAUSE_S * tried)
    return await _once_at_owner(broker, partition, work, topic_request)


async def _once_at_owner(
    broker: Broker, partition: TopicName, work: Work, topic_request: _TopicRequest
) -> object:
    placed = broker.placement.place(partition, authoritative=False)
    if placed.here:
        return await work(await broker.topics.get(partition, create=True))
    path = f"{rest_path(partition)}/{topic_request.tail}"
    return await broker.placement.call(
        placed.address, topic_request.method, path, topic_request.query, body=topic_request.body
    )
