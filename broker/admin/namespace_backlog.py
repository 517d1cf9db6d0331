"""`/admin/v2/namespaces/{tenant}/{namespace}/clearBacklog` and `unsubscribe`: all topics at once.

Each persistent and scalable topic is asked at its owner, a bounded number at a time.  After a
failure the others are tried nevertheless, and the first one is answered.
"""

from collections.abc import Callable

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.namespaces import NAMESPACE
from broker.admin.rest import NOT_FOUND_CODES, namespace_of, no_content
from broker.topics.topic_requests import RemoveSubscription, SkipBacklog, TopicRequest
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError


def routes() -> list[web.RouteDef]:
    """The resources' routes."""
    return [
        web.post(NAMESPACE + "/clearBacklog", clear_backlog),
        web.post(NAMESPACE + "/clearBacklog/{subscription}", clear_backlog),
        web.post(NAMESPACE + "/unsubscribe/{subscription}", unsubscribe),
    ]


async def clear_backlog(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far, on one subscription or on all."""
    subscription = request.match_info.get("subscription", "")
    await _on_each_topic(request, lambda topic: SkipBacklog(topic, subscription))
    return no_content()


async def unsubscribe(request: web.Request) -> web.Response:
    """POST: delete a subscription wherever it is; 412 if it has consumers on a topic."""
    subscription = request.match_info["subscription"]
    await _on_each_topic(request, lambda topic: RemoveSubscription(topic, subscription))
    return no_content()


async def _on_each_topic(
    request: web.Request, request_of: Callable[[TopicName], TopicRequest[None]]
) -> None:
    broker, namespace = request.app[BROKER], namespace_of(request)
    await broker.namespaces.require(namespace)
    topics, failures = broker.topics, list[MagnetarError]()

    async def at_owner(name: TopicName) -> None:
        try:
            # A partition that was never used has no subscriptions, and is not made for this.  The
            # legacy segments of a scalable topic are reached through it.
            if name.domain is TopicDomain.TOPIC or (
                await topics.exists(name) and not await topics.is_migrated(name)
            ):
                await topics.cluster.ask(request_of(name))
        except MagnetarError as error:
            if error.code not in NOT_FOUND_CODES:
                failures.append(error)

    texts = [*await topics.list_names(namespace), *await broker.scalable.list(namespace, {})]
    await topics.partition_work.run([parse_topic_name(text) for text in texts], at_owner)
    if failures:
        raise failures[0]
