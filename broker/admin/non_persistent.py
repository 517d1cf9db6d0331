"""`/admin/v2/non-persistent/{tenant}/{namespace}[/{topic}]`: topics that store nothing.

The owner of a topic serves requests about it.  Partitioned ones are in `broker.admin.partitioned`.
What needs stored messages is refused in a sentence, with the status that Pulsar has for it.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.persistent import without_excluded
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
)
from broker.topics.non_persistent.stats import (
    non_persistent_internal_stats,
    non_persistent_topic_stats,
)
from broker.topics.non_persistent.topic import NonPersistentTopic

BASE = "/admin/v2/non-persistent/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"
SUBSCRIPTION = TOPIC + "/subscription/{subscription}"

_Handler = Callable[[web.Request], Awaitable[web.Response]]


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    not_allowed = HTTPStatus.METHOD_NOT_ALLOWED
    return [
        web.get(BASE, list_topics),
        web.put(TOPIC, create),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/internalStats", stats_of_entries),
        web.put(TOPIC + "/unload", unload),
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.delete(SUBSCRIPTION, delete_subscription),
        web.put(
            SUBSCRIPTION,
            refuse(HTTPStatus.BAD_REQUEST, "a subscription begins with its first consumer"),
        ),
        web.delete(
            TOPIC + "/truncate",
            refuse(HTTPStatus.PRECONDITION_FAILED, "there is nothing to truncate"),
        ),
        web.get(TOPIC + "/lastMessageId", refuse(not_allowed, "it has no last message")),
        web.post(TOPIC + "/terminate", refuse(not_allowed, "it cannot be sealed: delete it")),
        web.get(TOPIC + "/compaction", refuse(not_allowed, "it is never compacted")),
        web.put(TOPIC + "/compaction", refuse(not_allowed, "there is nothing to compact")),
        web.get(TOPIC + "/offload", refuse(not_allowed, "it is never offloaded")),
        web.put(TOPIC + "/offload", refuse(not_allowed, "there is nothing to offload")),
        web.post(SUBSCRIPTION + "/skip_all", refuse(not_allowed, "there is no backlog to skip")),
        web.post(SUBSCRIPTION + "/resetcursor", refuse(not_allowed, "there is no position")),
        web.post(
            SUBSCRIPTION + "/resetcursor/{timestamp}",
            refuse(not_allowed, "there is no position"),
        ),
        web.post(
            SUBSCRIPTION + "/expireMessages", refuse(not_allowed, "no message is kept to expire")
        ),
        web.post(
            SUBSCRIPTION + "/expireMessages/{seconds}",
            refuse(not_allowed, "no message is kept to expire"),
        ),
        web.post(
            TOPIC + "/all_subscription/expireMessages/{seconds}",
            refuse(not_allowed, "no message is kept to expire"),
        ),
        web.get(
            SUBSCRIPTION + "/position/{position}",
            refuse(not_allowed, "there is no message to peek at"),
        ),
    ]


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
    """GET: the names of the topics that brokers have now, partitions included."""
    broker = request.app[BROKER]
    namespace = namespace_of(request)
    await broker.namespaces.require(namespace)
    return web.json_response(await broker.topics.non_persistent.list_names(namespace))


async def create(request: web.Request) -> web.Response:
    """PUT: make an unpartitioned topic, which lasts until it is unused; 409 if it exists."""
    name = ordinary_topic_of(request)
    await require_here(request, name)
    if properties_in(await body_of(request)):
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"{name} stores nothing, its properties neither: create it without.",
        )
    await request.app[BROKER].topics.create_non_persistent(name)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the topic; 412 while it is used, unless forced."""
    topic = await existing_topic(request)
    await request.app[BROKER].topics.delete(topic.name, force=flag(request, "force"))
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


async def delete_subscription(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete a subscription; 412 while it has consumers, unless forced."""
    topic = await existing_topic(request)
    await topic.unsubscribe(request.match_info["subscription"], force=flag(request, "force"))
    return no_content()
