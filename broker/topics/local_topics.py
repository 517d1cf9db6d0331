"""The topics of this broker, for requests about them."""

from collections.abc import Mapping
from typing import Protocol

from broker.placement import Placement
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.partitions import PartitionedTopics
from broker.topics.producer_access import ProducerBusy
from broker.topics.topic import Topic
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName


class LocalScalableTopics(Protocol):
    """Scalable topics of this broker."""

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Names of the scalable topics of a namespace."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a scalable topic and its segments."""
        ...


class LoadedTopics(Protocol):
    """The registry of topics, as requests use it."""

    @property
    def partitioned(self) -> PartitionedTopics:
        """Partitioned topics."""
        ...

    def loaded(self) -> Mapping[str, Topic]:
        """The loaded topics by full name."""
        ...

    async def list_names(self, namespace: NamespaceName) -> list[str]:
        """Full names of the persistent topics of a namespace."""
        ...

    async def get(self, name: TopicName, *, create: bool) -> Topic:
        """Return a topic, loaded."""
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
    """The parts of a broker that requests about topics use."""

    placement: Placement

    @property
    def scalable(self) -> LocalScalableTopics:
        """Scalable topics."""
        ...


class LocalTopics:
    """The topics of this broker, as the requests in `topic_requests` use them."""

    def __init__(self, broker: ClusterTopicsHost, topics: LoadedTopics) -> None:
        self.placement = broker.placement
        self._broker = broker
        self._topics = topics

    async def open(self, name: TopicName) -> Topic:
        """Return a topic, loaded if need be; a partition is created at its first use.

        Raises `TopicNotFound`, `OwnedElsewhere`, `PlacementNotReady`, `TopicUnavailable`.
        """
        return await self._topics.get(name, create=False)

    def loaded(self, name: TopicName) -> Topic | None:
        """Return a topic that is loaded."""
        return self._topics.loaded().get(str(name))

    async def unload(self, name: TopicName) -> None:
        """Close a topic, if it is loaded."""
        await self._topics.unload(name)

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a persistent or scalable topic.

        Raises `TopicNotFound` or its like, and unless forced `ProducerBusy` or `ConsumerBusy`.
        """
        if name.domain is TopicDomain.TOPIC:
            await self._broker.scalable.delete(name, force=force)
        else:
            await self._topics.delete(name, force=force)


def require_no_clients(topic: Topic) -> None:
    """Raise `ProducerBusy` or `ConsumerBusy` if producers or consumers are attached to a topic."""
    if any(producer.attached for producer in topic.producers.values()):
        raise ProducerBusy(f"{topic.name} has producers: close them, or use force.")
    for subscription in topic.subscriptions.values():
        if subscription.consumers:
            raise ConsumerBusy(
                f"Subscription {subscription.name!r} of {topic.name} has consumers: close them, "
                "or use force."
            )
