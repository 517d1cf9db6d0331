"""The topics of this broker, for requests about them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from broker.placement import Placement
from broker.policies.policies_in_force import PoliciesInForce
from broker.topics.client_connection import ClientConnection
from broker.topics.compactor import Compactions
from broker.topics.consumer import Consumer
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.non_persistent.stats import non_persistent_topic_stats
from broker.topics.non_persistent.topics import NonPersistentTopics
from broker.topics.partitions import PartitionedTopics
from broker.topics.producer import Producer
from broker.topics.producer_access import ProducerBusy
from broker.topics.producer_records import TOPIC_EPOCH_PROPERTY
from broker.topics.served_topic import ServedTopic
from broker.topics.topic import Topic, TopicNotFound
from broker.topics.topic_stats import topic_stats
from magnetar.protocol.managed_clients import is_managed
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName
from storage.clock import Clock
from storage.managed_ledger.factory import ManagedLedgerFactory

_OWN_PREFIX = "magnetar."


class LocalScalableTopics(Protocol):
    """Scalable topics of this broker."""

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Names of the scalable topics of a namespace."""
        ...

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a scalable topic and its segments."""
        ...

    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Delete a subscription of a scalable topic on every segment."""
        ...

    async def skip_backlog(self, name: TopicName, subscription: str) -> None:
        """Skip all messages of one subscription, or with an empty name of all."""
        ...

    def asks_layouts(self, connection: ClientConnection) -> bool:
        """Whether a client has asked for layouts of topics over a connection."""
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

    @property
    def non_persistent(self) -> NonPersistentTopics:
        """Topics that store nothing."""
        ...

    async def get(self, name: TopicName, *, create: bool) -> Topic:
        """Return a topic, loaded."""
        ...

    async def serve(self, name: TopicName, *, create: bool) -> ServedTopic:
        """Return a topic of any domain that clients attach to."""
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
    clock: Clock
    managed_ledgers: ManagedLedgerFactory
    policies: PoliciesInForce

    @property
    def compactions(self) -> Compactions:
        """Compactions of this broker's topics."""
        ...

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

    @property
    def compactions(self) -> Compactions:
        """Compactions of this broker's topics."""
        return self._broker.compactions

    @property
    def scalable(self) -> LocalScalableTopics:
        """Scalable topics of this broker."""
        return self._broker.scalable

    async def open(self, name: TopicName) -> Topic:
        """Return a topic, loaded if need be; a partition is created at its first use.

        Raises `TopicNotFound`, `OwnedElsewhere`, `PlacementNotReady`, `TopicUnavailable`.
        """
        return await self._topics.get(name, create=False)

    async def load(self, name: TopicName) -> None:
        """Load a topic that clients attach to; one that stores nothing is made.  As `open`."""
        await self._topics.serve(name, create=name.domain is TopicDomain.NON_PERSISTENT)

    def loaded(self, name: TopicName) -> Topic | None:
        """Return a topic that is loaded."""
        return self._topics.loaded().get(str(name))

    def attached(self, name: TopicName) -> "TopicOfClients | None":
        """Return a loaded topic of any domain that clients attach to."""
        return self.loaded(name) or self._topics.non_persistent.loaded().get(str(name))

    async def stats(self, name: TopicName) -> dict[str, object]:
        """TopicStats, as REST shows them.  Raises as `open`."""
        owner = self.placement.broker_id
        if name.domain is not TopicDomain.NON_PERSISTENT:
            return await topic_stats(await self.open(name), owner)
        topic = self._topics.non_persistent.loaded().get(str(name))
        if topic is None:
            raise TopicNotFound(f"Topic {name} does not exist: publish to it first.")
        return non_persistent_topic_stats(topic, owner)

    def unmanaged_clients(self, name: TopicName) -> list[str]:
        """Describe the clients of a topic that are no v5 clients; of one not loaded there are none.

        See the function of that name.
        """
        topic = self.loaded(name)
        if topic is None:
            return []
        return unmanaged_clients(topic, self._broker.scalable.asks_layouts)

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


def unmanaged_clients(topic: Topic, asks_layouts: Callable[[ClientConnection], bool]) -> list[str]:
    """Describe the attached producers and consumers that are no v5 clients.

    They would not follow if the topic became scalable.  Checkpoint consumers of 5.0.0-M1 do not
    say what they are, but other requests of their connection do: those of managed clients, and
    those for layouts (`asks_layouts`).
    """
    managed: set[ClientConnection] = {
        producer.connection
        for producer in topic.producers.values()
        if is_managed(producer.request.properties)
    }
    managed.update(
        consumer.connection
        for subscription in topic.subscriptions.values()
        for consumer in subscription.consumers
        if is_managed(consumer.metadata)
    )

    def is_v4(consumer: Consumer, *, durable: bool) -> bool:
        connection = consumer.connection
        shown = connection in managed or asks_layouts(connection)
        return not is_managed(consumer.metadata) and (durable or not shown)

    producers = [
        f"producer {producer.name!r} from {producer.connection.remote}"
        for producer in topic.producers.values()
        if producer.attached and not is_managed(producer.request.properties)
    ]
    consumers = [
        f"consumer {consumer.name!r} of {name!r} from {consumer.connection.remote}"
        for name, subscription in topic.subscriptions.items()
        for consumer in subscription.consumers
        if is_v4(consumer, durable=subscription.durable)
    ]
    return [*producers, *consumers]


def is_own_property(key: str) -> bool:
    """Whether a property of a topic is the broker's: users neither see nor set it."""
    return key == TOPIC_EPOCH_PROPERTY or key.startswith(_OWN_PREFIX)


def properties_of_users(properties: Mapping[str, str]) -> dict[str, str]:
    """Return those of a managed ledger's properties that users set."""
    return {key: value for key, value in properties.items() if not is_own_property(key)}


class _WithConsumers(Protocol):
    """A subscription."""

    @property
    def name(self) -> str:
        """Name of the subscription."""
        ...

    @property
    def consumers(self) -> Sequence[Consumer]:
        """The connected consumers."""
        ...


class TopicOfClients(Protocol):
    """A topic of any domain, with its clients."""

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def producers(self) -> Mapping[str, Producer]:
        """Producers by name."""
        ...

    @property
    def subscriptions(self) -> Mapping[str, _WithConsumers]:
        """Subscriptions by name."""
        ...


def require_no_clients(topic: TopicOfClients) -> None:
    """Raise `ProducerBusy` or `ConsumerBusy` if producers or consumers are attached to a topic."""
    if any(producer.attached for producer in topic.producers.values()):
        raise ProducerBusy(f"{topic.name} has producers: close them, or use force.")
    for subscription in topic.subscriptions.values():
        if subscription.consumers:
            raise ConsumerBusy(
                f"Subscription {subscription.name!r} of {topic.name} has consumers: close them, "
                "or use force."
            )
