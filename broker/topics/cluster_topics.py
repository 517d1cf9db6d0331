"""Operations on topics of the whole cluster, which their owners carry out."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from broker.placement.owner_requests import OwnerRequests
from broker.placement.typed_request import EventSink, Request, RequestHandler, request_handlers
from broker.topics.local_topics import ClusterTopicsHost, LoadedTopics, LocalTopics
from broker.topics.stored_stats import stored_topic_stats
from broker.topics.topic import TopicNotFound
from broker.topics.topic_requests import (
    OWNER_ERRORS,
    TOPIC_REQUESTS,
    DeleteTopic,
    RequireUnused,
    TopicRequest,
    UnloadTopic,
    ViewTopicStats,
)
from config.bounds import OWNER_RETRY_PAUSE_S
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError, ServerError

A = TypeVar("A")


class ClusterTopics:
    """Sends requests about topics to whichever broker owns them, and serves those of others."""

    def __init__(
        self,
        broker: ClusterTopicsHost,
        topics: LoadedTopics,
        *,
        retry_pause_s: float = OWNER_RETRY_PAUSE_S,
    ) -> None:
        self._broker = broker
        self._placement = broker.placement
        self._topics = topics
        self.local = LocalTopics(broker, topics)
        self._owners = OwnerRequests(
            broker.placement, self.local, OWNER_ERRORS, retry_pause_s=retry_pause_s
        )

    # Requests

    async def ask(self, request: TopicRequest[A]) -> A:
        """See `OwnerRequests.ask`."""
        return await self._owners.ask(request)

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each kind of request, for the channels of other brokers."""

        async def serve(_: EventSink, request: Request[LocalTopics, object]) -> object:
            if isinstance(request, TopicRequest):
                return await self._owners.serve(request)
            return await request.run(self.local)

        return request_handlers(TOPIC_REQUESTS, serve)

    # One topic

    async def unload(self, name: TopicName, destination: str | None = None) -> None:
        """Close a topic at its owner, for `destination` (a broker id) to load.

        Raises as `OwnerRequests.ask`.
        """
        if self._placement.known_owner(name) is not None:
            await self.ask(UnloadTopic(name, destination))

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic at its owner.  Raises as `DeleteTopic`."""
        await self.ask(DeleteTopic(name, force))

    async def require_unused(self, name: TopicName) -> None:
        """Raise `ProducerBusy` or `ConsumerBusy` if a topic is used here or at another broker."""
        request = RequireUnused(name)
        if self.local.attached(name) is not None:
            await request.run(self.local)
        elif self._placement.known_owner(name) is not None:
            await self.ask(request)

    async def stats(self, name: TopicName) -> Mapping[str, object]:
        """The TopicStats of a topic; {} if its owner has none of that name."""
        try:
            return await self.ask(ViewTopicStats(name))
        except TopicNotFound:
            return {}

    async def stats_without_loading(self, name: TopicName) -> Mapping[str, object]:
        """The TopicStats of a topic: of one that is not loaded what is stored; {} without one.

        See `stored_topic_stats`.  Raises as `ask`, and the errors of reading.
        """
        placement = self._placement
        is_owned = placement.shared and placement.known_owner(name) is not None
        is_stored = name.domain is TopicDomain.PERSISTENT
        if not is_stored or is_owned or self.local.loaded(name) is not None:
            return await self.stats(name)
        stream = await self._broker.managed_ledgers.stored_stream(name.ledger_path)
        if stream is None:
            return {}
        policies = await self._broker.policies.require_of(name)
        return await stored_topic_stats(stream, policies, self._broker.clock.now_ms())

    # Namespaces

    async def unload_namespace(self, namespace: NamespaceName) -> None:
        """Close every topic and segment of a namespace.

        Raises the first failure, after all were tried.
        """
        here = {*self._topics.loaded(), *self._topics.non_persistent.loaded()}
        known = {*here, *self._placement.owners()}
        names = [parse_topic_name(text) for text in sorted(known)]
        await _on_each(
            self.unload,
            (
                name
                for name in names
                if name.namespace_name == namespace and name.domain is not TopicDomain.TOPIC
            ),
        )

    async def delete_namespace(self, namespace: NamespaceName) -> None:
        """Delete every topic of a namespace, used or not.

        Raises the first failure, after all were tried.
        """
        topics, scalable = self._topics, self._broker.scalable
        partitioned = [
            *await topics.partitioned.list(namespace),
            *await topics.partitioned.list(namespace, TopicDomain.NON_PERSISTENT),
        ]
        texts = [
            *await scalable.list(namespace, {}),
            *partitioned,
            *await topics.list_names(namespace),
            *await topics.non_persistent.list_names(namespace),
        ]

        async def delete(name: TopicName) -> None:
            if name.partition_index is not None and str(name.partitioned) in partitioned:
                return
            try:
                if str(name) in partitioned:
                    await topics.delete_partitioned(name, force=True)
                else:
                    await self.delete(name, force=True)
            except MagnetarError as error:
                if not _is_gone(error):
                    raise

        await _on_each(delete, map(parse_topic_name, texts))


async def _on_each(
    work: Callable[[TopicName], Awaitable[None]], names: Iterable[TopicName]
) -> None:
    """Run `work` on every name.  Raises the first failure, after all were tried."""
    failure: MagnetarError | None = None
    for name in names:
        try:
            await work(name)
        except MagnetarError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _is_gone(error: MagnetarError) -> bool:
    """Whether the error says, here or at another broker, that there is no such topic."""
    return error.code is ServerError.TOPIC_NOT_FOUND
