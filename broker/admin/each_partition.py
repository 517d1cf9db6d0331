"""Requests on a topic that are carried out on each of its partitions.

Rules: a topic without partitions is meant itself.  For a partition of another broker the same
request is sent there.  If some partitions refuse as is tolerated (no such subscription, or it is
there already), the others count; if all refuse, the first refusal is raised.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
"""Of a path, split at its slashes: nothing, admin, v2, domain, tenant, namespace, topic."""

Work = Callable[[Topic], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request about a topic: what follows the topic in its path."""

    method: str
    tail: str
    query: Mapping[str, str]
    body: object


async def _asked(request: web.Request) -> _Asked:
    tail = request.rel_url.raw_path.split("/", PARTS_BEFORE_TAIL)[PARTS_BEFORE_TAIL]
    query = {key: value for key, value in request.query.items() if key != AUTHORITATIVE}
    return _Asked(request.method, tail, query, await body_of(request))


async def partitions_in(request: web.Request) -> list[TopicName]:
    """The partitions of the topic in the path; none if it has none or is one itself."""
    name = persistent_name(request)
    if name.partition_index is not None:
        return []
    count = await request.app[BROKER].topics.partitioned.count(name)
    return [name.partition(index) for index in range(count)]


async def on_each(request: web.Request, work: Work, tolerated: HTTPStatus) -> list[object]:
    """What the topic in the path answers, or those partitions that do not refuse as is `tolerated`.

    Raises their refusal when all refuse, and any other at once.
    """
    partitions = await partitions_in(request)
    if not partitions:
        return [await work(await existing_topic(request))]
    broker, asked = request.app[BROKER], await _asked(request)
    answers: list[object] = []
    refusals: list[RestError | MagnetarError] = []
    for partition in partitions:
        try:
            answers.append(await _at_owner(broker, partition, work, asked))
        except (RestError, MagnetarError) as error:
            status = error.status if isinstance(error, RestError) else status_of(error)
            if status is not tolerated:
                raise
            refusals.append(error)
    if not answers:
        raise refusals[0]
    return answers


async def carry_subscriptions(
    broker: Broker, stats: Mapping[str, object], partitions: Iterable[TopicName]
) -> None:
    """Give new partitions the durable subscriptions of an old one, whose TopicStats these are.

    They begin at the first message: who subscribed to the whole topic missed none of it.
    """
    held = stats.get("subscriptions")
    durable = {
        str(name): {str(key): str(text) for key, text in one.get(PROPERTIES, {}).items()}
        for name, one in (held.items() if isinstance(held, dict) else ())
        if one.get("isDurable")
    }
    for partition in partitions:
        for name, properties in durable.items():
            tail = f"subscription/{quote(name, safe='')}"
            body = {"ledgerId": -1, "entryId": -1, "properties": properties}
            make = partial(_make_at_first, name, properties)
            try:
                await _at_owner(broker, partition, make, _Asked("PUT", tail, {}, body))
            except MagnetarError as error:
                if status_of(error) is not HTTPStatus.CONFLICT:
                    raise


async def _make_at_first(name: str, properties: Mapping[str, str], topic: Topic) -> None:
    await topic.create_subscription(name, EARLIEST, properties=properties)


async def _at_owner(broker: Broker, partition: TopicName, work: Work, asked: _Asked) -> object:
    for tried in range(1, SEGMENT_OWNER_TRIES):
        try:
            return await _once_at_owner(broker, partition, work, asked)
        except (OwnedElsewhere, PlacementNotReady, TopicUnavailable) as error:
            log.debug("partition_asked_again", topic=str(partition), error=str(error))
            await asyncio.sleep(SEGMENT_OWNER_RETRY_PAUSE_S * tried)
    return await _once_at_owner(broker, partition, work, asked)


async def _once_at_owner(broker: Broker, partition: TopicName, work: Work, asked: _Asked) -> object:
    placed = broker.placement.place(partition, authoritative=False)
    if placed.here:
        return await work(await broker.topics.get(partition, create=True))
    path = f"{rest_path(partition)}/{asked.tail}"
    return await broker.placement.call(
        placed.address, asked.method, path, asked.query, body=asked.body
    )
