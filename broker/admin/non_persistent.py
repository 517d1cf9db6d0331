"""`/admin/v2/non-persistent/{tenant}/{namespace}[/{topic}]`: topics that store nothing.

The owner of a topic serves requests about it.  Partitioned ones are in `broker.admin.partitioned`.
What needs stored messages is refused in a sentence, with the status that Pulsar has for it.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.persistent import (
    require_known_partition,
    require_not_partitioned,
    without_excluded,
)
from broker.admin.redirect import destination_of, require_here
from broker.admin.rest import (
    RestError,
    body_of,
    flag,
    namespace_of,
    no_content,
    not_found,
    ordinary_topic_of,
    properties_in,
    require_whole_bundle,
)
from broker.topics.non_persistent.stats import (
    non_persistent_internal_stats,
    non_persistent_topic_stats,
)
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.topic import LIST_SUBSCRIPTIONS

BASE = "/admin/v2/non-persistent/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"
SUBSCRIPTION = TOPIC + "/subscription/{subscription}"

_Handler = Callable[[web.Request], Awaitable[web.Response]]

NO_BACKLOG: Final = "there is no backlog to skip"
NOTHING_EXPIRES: Final = "no message is kept to expire"
NOT_ALLOWED: Final = HTTPStatus.METHOD_NOT_ALLOWED
REFUSED: Final = (
    ("PUT", SUBSCRIPTION, HTTPStatus.BAD_REQUEST, "a subscription begins with its first consumer"),
    ("DELETE", f"{TOPIC}/truncate", HTTPStatus.PRECONDITION_FAILED, "there is nothing to truncate"),
    ("GET", f"{TOPIC}/lastMessageId", NOT_ALLOWED, "it has no last message"),
    ("POST", f"{TOPIC}/terminate", HTTPStatus.NOT_ACCEPTABLE, "it cannot be sealed: delete it"),
    ("GET", f"{TOPIC}/compaction", NOT_ALLOWED, "it is never compacted"),
    ("PUT", f"{TOPIC}/compaction", NOT_ALLOWED, "there is nothing to compact"),
    ("GET", f"{TOPIC}/offload", NOT_ALLOWED, "it is never offloaded"),
    ("PUT", f"{TOPIC}/offload", NOT_ALLOWED, "there is nothing to offload"),
    ("POST", f"{SUBSCRIPTION}/skip_all", NOT_ALLOWED, NO_BACKLOG),
    ("POST", f"{SUBSCRIPTION}/skip/{{count}}", NOT_ALLOWED, NO_BACKLOG),
    ("POST", f"{SUBSCRIPTION}/analyzeBacklog", NOT_ALLOWED, "there is no backlog to count"),
    (
        "PUT",
        f"{SUBSCRIPTION}/properties",
        NOT_ALLOWED,
        "a subscription has the properties of its first consumer",
    ),
    ("POST", f"{SUBSCRIPTION}/resetcursor", NOT_ALLOWED, "there is no position"),
    ("POST", f"{SUBSCRIPTION}/resetcursor/{{timestamp}}", NOT_ALLOWED, "there is no position"),
    ("POST", f"{SUBSCRIPTION}/expireMessages", NOT_ALLOWED, NOTHING_EXPIRES),
    ("POST", f"{SUBSCRIPTION}/expireMessages/{{seconds}}", NOT_ALLOWED, NOTHING_EXPIRES),
    (
        "POST",
        f"{TOPIC}/all_subscription/expireMessages/{{seconds}}",
        NOT_ALLOWED,
        NOTHING_EXPIRES,
    ),
    (
        "GET",
        f"{SUBSCRIPTION}/position/{{position}}",
        NOT_ALLOWED,
        "there is no message to peek at",
    ),
)
"""Requests that need stored messages: method, path, status and reason."""


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    served = [
        web.get(BASE, list_topics),
        web.put(TOPIC, create),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/internalStats", stats_of_entries),
        web.put(TOPIC + "/unload", unload),
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.delete(SUBSCRIPTION, delete_subscription),
        web.get(SUBSCRIPTION + "/properties", properties),
    ]
    refused = (web.route(how, path, refuse(code, why)) for how, path, code, why in REFUSED)
    return [*served, *refused]


def refuse(status: HTTPStatus, reason: str) -> _Handler:
    """A handler that refuses a request which needs stored messages."""

    async def refused(request: web.Request) -> web.Response:
        name = ordinary_topic_of(request)
        raise RestError(
            status, f"{name} stores nothing, so {reason}: use a persistent topic for that."
        )

    return refused


async def existing_topic(request: web.Request) -> NonPersistentTopic:
    """The topic in the path.  404 if no broker has it, 307 if another broker owns it."""
    topics, name = request.app[BROKER].topics, ordinary_topic_of(request)
    if name.partition_index is None and await topics.partitioned.count(name):
        raise not_found(f"{name} is partitioned: ask for one of its partitions.")
    if not await topics.may_be_opened(name):
        raise not_found(f"There is no topic {name} now: create it with PUT, or publish to it.")
    await require_here(request, name)
    return await topics.non_persistent.get(name, create=False)


async def list_topics(request: web.Request) -> web.Response:
    """GET `?bundle=`: the names of the topics that brokers have now, partitions included."""
    require_whole_bundle(request)
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.non_persistent.list_names(namespace))


async def create(request: web.Request) -> web.Response:
    """PUT: make an unpartitioned topic, which lasts until it is unused; 409 if it exists."""
    name = ordinary_topic_of(request)
    await require_known_partition(request, name)
    await require_here(request, name)
    if properties_in(await body_of(request)):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"{name} stores nothing, its properties neither: create it without.",
        )
    await request.app[BROKER].topics.create_non_persistent(name)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the topic; 412 while it is used, unless forced.

    Also one that no broker has, as after an unload: nothing says whether there was one.
    """
    broker, name = request.app[BROKER], ordinary_topic_of(request)
    await require_not_partitioned(request, name)
    await broker.namespaces.require(name.namespace_name)
    if await broker.topics.may_be_opened(name):
        await require_here(request, name)
    await broker.topics.delete(name, force=flag(request, "force"))
    return no_content()


async def stats(request: web.Request) -> web.Response:
    """GET `?excludePublishers=&excludeConsumers=`: NonPersistentTopicStats."""
    topic = await existing_topic(request)
    found = non_persistent_topic_stats(topic, request.app[BROKER].broker_id)
    return web.json_response(without_excluded(request, found))


async def stats_of_entries(request: web.Request) -> web.Response:
    """GET: PersistentTopicInternalStats, without ledgers."""
    return web.json_response(non_persistent_internal_stats(await existing_topic(request)))


async def unload(request: web.Request) -> web.Response:
    """PUT `?destinationBroker=`: close the topic; clients reconnect, and it is made anew."""
    topics, name = request.app[BROKER].topics, ordinary_topic_of(request)
    destination = destination_of(request)
    if count := await topics.partitioned.count(name):
        for index in range(count):
            await topics.cluster.unload(name.partition(index))
        return no_content()
    topic = await existing_topic(request)
    await topics.cluster.unload(topic.name, destination)
    return no_content()


async def list_subscriptions(request: web.Request) -> web.Response:
    """GET: names of subscriptions."""
    return web.json_response(sorted((await existing_topic(request)).subscriptions))


async def properties(request: web.Request) -> web.Response:
    """GET: the properties that a subscription got from its first consumer."""
    topic, name = await existing_topic(request), request.match_info["subscription"]
    found = topic.subscriptions.get(name)
    if found is None:
        raise not_found(f"{topic.name} has no subscription {name!r} now: {LIST_SUBSCRIPTIONS}")
    return web.json_response(dict(found.properties))


async def delete_subscription(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a subscription; 412 while it has consumers, unless forced."""
    topic = await existing_topic(request)
    await topic.unsubscribe(request.match_info["subscription"], force=flag(request, "force"))
    return no_content()
