"""What the handlers of producers and consumers use of a topic, stored or not."""

from typing import Protocol

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.consumer import Consumer, SubscribeRequest
from broker.topics.dispatch.start_position import Inherits
from broker.topics.producer import Producer, ProducerRequest
from magnetar.protocol.ids import Position
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import CommandSubscribe


class ServedTopic(Protocol):
    """A topic that producers and consumers attach to.

    SENDs go to `Producer.topic`, and what consumers send to `Consumer.subscription`.
    """

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def policies(self) -> AppliedPolicies:
        """The policies in force."""
        ...

    def require_open(self, request: ProducerRequest) -> None:
        """Raise `TopicTerminated` or `TopicUnavailable` unless the topic takes this producer."""
        ...

    async def require_room(self) -> None:
        """Raise `BacklogQuotaExceeded` if the backlog reaches a quota that refuses producers."""
        ...

    async def add_producer(self, request: ProducerRequest) -> Producer:
        """Attach a producer by its access mode; one that waits for others has `ready` set.

        Raises `ProducerBusy`, `ProducerFenced`, and as `require_open`.
        """
        ...

    async def create_initial_subscription(self, name: str) -> None:
        """Create the subscription that a PRODUCER names, where it would keep messages."""
        ...

    async def start_of(self, request: CommandSubscribe, inherits: Inherits) -> Position:
        """The start of the subscription, if this SUBSCRIBE creates it."""
        ...

    async def subscribe(self, request: SubscribeRequest) -> Consumer:
        """Attach a consumer, and create its subscription if need be.

        Raises `SubscriptionNotFound`, `SubscriptionRefused`, `TopicUnavailable`, `ConsumerBusy`,
        `ConsumerAssignError`.
        """
        ...
