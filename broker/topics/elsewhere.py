"""What is done with topics wherever they are: here, or by asking the broker that has them.

Rules: a topic of another broker is closed, deleted and looked at by that broker.  A moved topic is
loaded where it was sent, so that its clients find it there; if that fails, whoever is asked for it
next takes it.
"""

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


class ScalableTopicsHere(Protocol):
    """Scalable topics of this broker."""

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Those of a namespace."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete one and its segments."""
        ...


class TopicsHere(Protocol):
    """Topics of this broker."""

    @property
    def partitioned(self) -> PartitionedTopics:
        """Partitioned topics."""
        ...

    def loaded(self) -> Mapping[str, object]:
        """Those that are loaded, by full name."""
        ...

    async def list_names(self, namespace: NamespaceName) -> list[str]:
        """Full names of the persistent topics of a namespace."""
        ...

    async def unload(self, name: TopicName) -> None:
        """Close one."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete one."""
        ...

    async def delete_partitioned(self, name: TopicName, *, force: bool) -> None:
        """Delete one with its partitions."""
        ...


class ElsewhereHost(Protocol):
    """What is needed of the broker."""

    placement: Placement

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        ...

    @property
    def scalable(self) -> ScalableTopicsHere:
        """Scalable topics."""
        ...


class TopicsElsewhere:
    """Unloads, deletes and inspects topics on whichever broker owns them."""

    def __init__(self, broker: ElsewhereHost, topics: TopicsHere) -> None:
        self._broker = broker
        self._topics = topics

    def owner_elsewhere(self, name: TopicName) -> BrokerAddress | None:
        """The other broker that has it; None when it is here or nobody's, as far as is known."""
        owner = self._broker.placement.known_owner(name)
        return None if owner is None or owner.broker_id == self._broker.broker_id else owner

    async def unload(self, name: TopicName, destination: str | None = None) -> None:
        """Close it where it is, for `destination` (a broker id) to take.  Raises `PeerFailed`."""
        elsewhere = self.owner_elsewhere(name)
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
            await self._broker.placement.call(target, "PUT", TAKE, {"topic": str(name)})
        except MagnetarError as error:
            log.info("topic_not_taken", topic=str(name), broker=destination, error=str(error))

    async def unload_namespace(self, namespace: NamespaceName) -> None:
        """Close every topic and segment of a namespace.  Raises the first `PeerFailed`, at last."""
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
        """Delete every topic of a namespace, used or not.  Raises the first failure, at last."""
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
        """TopicStats of another broker's persistent topic; {} if it has none of that name.

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
        held = subscriptions.values() if isinstance(subscriptions, dict) else ()
        return bool(stats.get("publishers")) or any(one.get("consumers") for one in held)

    async def delete(self, owner: BrokerAddress, name: TopicName, *, force: bool) -> None:
        """Have another broker delete its topic.  Raises `PeerFailed`."""
        query = {"force": str(force).lower()}
        await self._broker.placement.call(owner, "DELETE", rest_path(name), query)


async def _on_each(
    work: Callable[[TopicName], Awaitable[None]], names: Iterable[TopicName]
) -> None:
    """Do it with all of them, whatever fails.  Raises the first failure, at last."""
    failure: MagnetarError | None = None
    for name in names:
        try:
            await work(name)
        except MagnetarError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _is_gone(error: MagnetarError) -> bool:
    """Whether there is no such topic, here or where another broker was asked."""
    status = getattr(error, "http_status", None)
    return status is HTTPStatus.NOT_FOUND or error.code is ServerError.TOPIC_NOT_FOUND


def rest_path(name: TopicName) -> str:
    """The REST resource of a persistent or scalable topic."""
    resource = "scalable" if name.domain is TopicDomain.TOPIC else "persistent"
    return f"/admin/v2/{resource}/{name.namespace_name}/{quote(name.local_name, safe='')}"
