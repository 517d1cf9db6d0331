"""Operations on topics of the whole cluster: done here, or requested of the owning broker."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Protocol
from urllib.parse import quote

import structlog

from broker.placement import BrokerAddress, Placement
from broker.topics.partitions import PartitionedTopics
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError, ServerError

log = structlog.get_logger(__name__)

UNLOAD = "/admin/v2/brokers/topics/unload"
TAKE = "/admin/v2/brokers/topics/take"


class LocalScalableTopics(Protocol):
    """Scalable topics of this broker."""

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Names of the scalable topics of a namespace."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a scalable topic and its segments."""
        ...


class LocalTopics(Protocol):
    """Topics of this broker."""

    @property
    def partitioned(self) -> PartitionedTopics:
        """Partitioned topics."""
        ...

    def loaded(self) -> Mapping[str, object]:
        """The loaded topics by full name."""
        ...

    async def list_names(self, namespace: NamespaceName) -> list[str]:
        """Full names of the persistent topics of a namespace."""
        ...

    async def unload(self, name: TopicName) -> None:
        """Close a topic."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic."""
        ...

    async def delete_partitioned(self, name: TopicName, *, force: bool) -> None:
        """Delete a partitioned topic and its partitions."""
        ...


class ClusterTopicsHost(Protocol):
    """The parts of a broker that `ClusterTopics` uses."""

    placement: Placement

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        ...

    @property
    def scalable(self) -> LocalScalableTopics:
        """Scalable topics."""
        ...


class ClusterTopics:
    """Unloads, deletes and inspects topics on whichever broker owns them."""

    def __init__(self, broker: ClusterTopicsHost, topics: LocalTopics) -> None:
        self._broker = broker
        self._topics = topics

    def other_owner(self, name: TopicName) -> BrokerAddress | None:
        """The other broker that owns the topic; None if this one or, as far as known, none does."""
        owner = self._broker.placement.known_owner(name)
        return None if owner is None or owner.broker_id == self._broker.broker_id else owner

    async def unload(self, name: TopicName, destination: str | None = None) -> None:
        """Close a topic at its owner, for `destination` (a broker id) to load.

        Raises `PeerFailed`.
        """
        elsewhere = self.other_owner(name)
        if elsewhere is not None:
            query = {"topic": str(name)}
            if destination is not None:
                query["destinationBroker"] = destination
            await self._broker.placement.call(elsewhere, "PUT", UNLOAD, query)
            return
        await self._topics.unload(name)
        target = None if destination is None else self._broker.placement.brokers.get(destination)
        if target is None or target.broker_id == self._broker.broker_id:
            return
        try:
            # Loaded at once, so that its clients find it there.
            await self._broker.placement.call(target, "PUT", TAKE, {"topic": str(name)})
        except MagnetarError as error:
            # The next broker that is asked for the topic loads it.
            log.info("topic_not_taken", topic=str(name), broker=destination, error=str(error))

    async def unload_namespace(self, namespace: NamespaceName) -> None:
        """Close every topic and segment of a namespace.

        Raises the first `PeerFailed`, after all were tried.
        """
        known = {*self._topics.loaded(), *self._broker.placement.owners()}
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
        partitioned = await topics.partitioned.list(namespace)
        texts = [
            *await scalable.list(namespace, {}),
            *partitioned,
            *await topics.list_names(namespace),
        ]

        async def delete(name: TopicName) -> None:
            if name.partition_index is not None and str(name.partitioned) in partitioned:
                return
            try:
                if str(name) in partitioned:
                    await topics.delete_partitioned(name, force=True)
                else:
                    await self._delete_anywhere(name)
            except MagnetarError as error:
                if not _is_gone(error):
                    raise

        await _on_each(delete, map(parse_topic_name, texts))

    async def _delete_anywhere(self, name: TopicName) -> None:
        placed = self._broker.placement.place(name, authoritative=False)
        if not placed.here:
            await self.delete(placed.address, name, force=True)
        elif name.domain is TopicDomain.TOPIC:
            await self._broker.scalable.delete(name, force=True)
        else:
            await self._topics.delete(name, force=True)

    async def stats(self, owner: BrokerAddress, name: TopicName) -> Mapping[str, object]:
        """The TopicStats of another broker's persistent topic; {} if it has none of that name.

        Raises `PeerFailed`.
        """
        try:
            found = await self._broker.placement.call(owner, "GET", f"{rest_path(name)}/stats", {})
        except MagnetarError as error:
            if _is_gone(error):
                return {}
            raise
        return found if isinstance(found, dict) else {}

    async def is_used(self, owner: BrokerAddress, name: TopicName) -> bool:
        """Whether another broker's persistent topic has producers or consumers."""
        stats = await self.stats(owner, name)
        subscriptions = stats.get("subscriptions")
        each_stats = subscriptions.values() if isinstance(subscriptions, dict) else ()
        return bool(stats.get("publishers")) or any(one.get("consumers") for one in each_stats)

    async def delete(self, owner: BrokerAddress, name: TopicName, *, force: bool) -> None:
        """Have another broker delete its topic.  Raises `PeerFailed`."""
        query = {"force": str(force).lower()}
        await self._broker.placement.call(owner, "DELETE", rest_path(name), query)


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
    status = getattr(error, "http_status", None)
    return status is HTTPStatus.NOT_FOUND or error.code is ServerError.TOPIC_NOT_FOUND


def rest_path(name: TopicName) -> str:
    """The REST resource of a persistent or scalable topic."""
    resource = "scalable" if name.domain is TopicDomain.TOPIC else "persistent"
    return f"/admin/v2/{resource}/{name.namespace_name}/{quote(name.local_name, safe='')}"
