"""The consumer that gets a message of a non-persistent topic, by the type of its subscription."""

from abc import ABC, abstractmethod

from broker.topics.consumer import Consumer, KeySharedMode, KeySharedPolicy, SubscriptionType
from broker.topics.dispatch.entry_facts import has_key_within, keyed_facts_of
from broker.topics.dispatch.selection import (
    AutoSplit,
    KeyAssignment,
    Rotation,
    StickyRanges,
    choose_active,
)
from magnetar.protocol.names import TopicName


class Delivery(ABC):
    """Chooses consumers by the rules of the dispatcher of the same type, without waiting."""

    def __init__(self) -> None:
        self.consumers: list[Consumer] = []

    @property
    def active(self) -> Consumer | None:
        """The consumer that gets all messages, if one does."""
        return None

    @abstractmethod
    def add(self, consumer: Consumer) -> None:
        """Add a consumer.  Raises `ConsumerAssignError`, and then changes nothing."""

    @abstractmethod
    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer."""

    @abstractmethod
    def receiver(self, data: bytes) -> Consumer | None:
        """The consumer that a message goes to; None if no consumer can receive it now."""

    def announce(self, consumer: Consumer) -> None:  # noqa: B027 - most have nothing to send
        """Send a consumer what it could not take in before the answer to its SUBSCRIBE."""

    def is_wanted(self, data: bytes) -> bool:
        """Whether a consumer asks for messages of this key; the others are not counted as lost."""
        return True


class ActiveDelivery(Delivery):
    """Exclusive and Failover: the active consumer gets everything."""

    def __init__(self, topic: TopicName, *, failover: bool) -> None:
        super().__init__()
        self._topic = topic
        self._failover = failover
        self._active: Consumer | None = None

    @property
    def active(self) -> Consumer | None:
        """See the base class."""
        return self._active

    def add(self, consumer: Consumer) -> None:
        """See the base class.  The consumer may become the active one."""
        if consumer.key_shared.ranges:
            # For its checks only: the ranges of several readers may overlap.
            StickyRanges["Consumer"]().add(consumer, consumer.key_shared.ranges)
        self.consumers.append(consumer)
        self._choose()

    def remove(self, consumer: Consumer) -> None:
        """See the base class."""
        self.consumers.remove(consumer)
        if consumer is self._active:
            self._active = None
            self._choose()

    def receiver(self, data: bytes) -> Consumer | None:
        """See the base class."""
        active = self._active
        return active if active is not None and active.can_receive() else None

    def announce(self, consumer: Consumer) -> None:
        """Send ACTIVE_CONSUMER_CHANGE to a Failover consumer, active or not."""
        if self._failover:
            consumer.send_active_change(consumer is self._active)

    def is_wanted(self, data: bytes) -> bool:
        """See the base class: a reader may ask for hash ranges."""
        active = self._active
        if active is None or not active.key_shared.ranges:
            return True
        return has_key_within(data, active.key_shared.ranges)

    def _choose(self) -> None:
        if not self.consumers:
            return
        chosen = choose_active(self.consumers, self._topic)
        if chosen is self._active:
            return
        self._active = chosen
        if self._failover:
            for consumer in self.consumers:
                if consumer.is_open:
                    consumer.send_active_change(consumer is chosen)


class SharedDelivery(Delivery):
    """Shared: the consumers take turns; one that cannot receive is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self._rotation: Rotation[Consumer] = Rotation()

    def add(self, consumer: Consumer) -> None:
        """See the base class."""
        self.consumers.append(consumer)
        self._rotation.add(consumer)

    def remove(self, consumer: Consumer) -> None:
        """See the base class."""
        self.consumers.remove(consumer)
        self._rotation.remove(consumer)

    def receiver(self, data: bytes) -> Consumer | None:
        """See the base class."""
        return self._rotation.next(Consumer.can_receive)


class KeySharedDelivery(Delivery):
    """Key_Shared: the owner of the key's hash gets the message."""

    def __init__(self, policy: KeySharedPolicy) -> None:
        super().__init__()
        self._assignment: KeyAssignment[Consumer] = (
            StickyRanges() if policy.mode is KeySharedMode.STICKY else AutoSplit()
        )

    def add(self, consumer: Consumer) -> None:
        """See the base class."""
        self._assignment.add(consumer, consumer.key_shared.ranges)
        self.consumers.append(consumer)

    def remove(self, consumer: Consumer) -> None:
        """See the base class."""
        self.consumers.remove(consumer)
        self._assignment.remove(consumer)

    def receiver(self, data: bytes) -> Consumer | None:
        """See the base class."""
        _, _, key_hash = keyed_facts_of(data)
        owner = self._assignment.owner(key_hash)
        return owner if owner is not None and owner.can_receive() else None


def delivery_of(kind: SubscriptionType, policy: KeySharedPolicy, topic: TopicName) -> Delivery:
    """The delivery of a subscription of this type on a topic."""
    if kind is SubscriptionType.SHARED:
        return SharedDelivery()
    if kind is SubscriptionType.KEY_SHARED:
        return KeySharedDelivery(policy)
    return ActiveDelivery(topic, failover=kind is SubscriptionType.FAILOVER)
