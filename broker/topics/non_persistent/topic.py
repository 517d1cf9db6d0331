"""One non-persistent topic: producers and subscriptions, with nothing stored between them."""

import asyncio
import enum
from collections.abc import Iterator, Mapping

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.consumer import Consumer, SubscribeRequest
from broker.topics.consumer_admission import require_rate
from broker.topics.context import TopicContext
from broker.topics.dispatch.errors import (
    ConsumerBusy,
    ConsumerNotAllowed,
    SubscriptionRefused,
)
from broker.topics.dispatch.start_position import Inherits
from broker.topics.non_persistent.publishing import MessagesInFlight, NonPersistentPublishing
from broker.topics.non_persistent.subscription import NonPersistentSubscription
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.producer_records import NoProducerRecords
from broker.topics.publish_throttle import Publishing, PublishRates
from broker.topics.rates import RateSampler, sample_topic, topic_traffic
from broker.topics.replication import NonPersistentReplication, NoReplication
from broker.topics.subscribe_limit import SubscribeLimit
from broker.topics.topic import LIST_SUBSCRIPTIONS, SubscriptionNotFound, TopicUnavailable
from broker.topics.topic_producers import TopicProducers
from config.bounds import MAX_MESSAGE_SIZE
from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import CommandSubscribe
from magnetar.protocol.state_table import StateTable


class NonPersistentTopicState(enum.Enum):
    """State of a non-persistent topic; `_MOVES` has the moves between them."""

    OPEN = "open"
    CLOSING = "closing"
    """New requests are refused."""
    CLOSED = "closed"


_S = NonPersistentTopicState
_MOVES: StateTable[NonPersistentTopicState] = StateTable(
    {
        _S.OPEN: frozenset({_S.CLOSING}),
        _S.CLOSING: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    },
    defect=RuntimeError,
)


class NonPersistentTopic:
    """One topic that stores nothing.

    Made by `NonPersistentTopics`; to the handlers of clients it is a `ServedTopic`.
    """

    sealed = False
    """Nothing ends such a topic for its clients: see `PublishedTopic`."""

    def __init__(self, context: TopicContext, name: TopicName, in_flight: MessagesInFlight) -> None:
        self.context = context
        self.name = name
        self.state = NonPersistentTopicState.OPEN
        self.policies = context.policies(name)
        self.created_ms = context.clock.now_ms()
        now_s = asyncio.get_running_loop().time()
        self.used_s = now_s
        """Time of the last request for the topic or end of a client, of the event loop."""
        self._subscriptions: dict[str, NonPersistentSubscription] = {}
        self.consumer_count = 0
        """Attached consumers, those of readers included."""
        self._producers = TopicProducers(self, NoProducerRecords())
        self._publishing = NonPersistentPublishing(in_flight, self._deliver, self._flush)
        self.replication: NonPersistentReplication = NoReplication()
        """What is sent to other clusters."""
        self._past_out = 0, 0
        """Messages and bytes that subscriptions sent which are gone."""
        self.entries_total = 0
        """Entries that were delivered or dropped since the topic was made."""
        self.rate_sampler = RateSampler(now_s, len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""
        self._subscribe_limit = SubscribeLimit()
        self.publish_rates = PublishRates(
            self._publishing, context.throttled_sends, context.publish_limit, self._publish_by
        )
        self.apply_policies(self.policies)

    def _publish_by(self, path: Publishing) -> None:
        """Serve all SENDs by this path from now on."""
        self.publish = path.publish
        self.refuse = path.refuse
        self.damaged = path.damaged

    # Queries

    @property
    def closing(self) -> bool:
        """Whether this instance serves no more: the next request makes a new one."""
        return self.state is not NonPersistentTopicState.OPEN

    @property
    def unused(self) -> bool:
        """Whether it has neither producers nor subscriptions."""
        return not self.producers and not self._subscriptions

    @property
    def subscriptions(self) -> Mapping[str, NonPersistentSubscription]:
        """Subscriptions by name."""
        return self._subscriptions

    @property
    def producers(self) -> Mapping[str, Producer]:
        """Producers by name: attached, waiting, or with something still in flight."""
        return self._producers.by_name

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """The counters of which rates are taken, in the order of `Traffic`."""
        return topic_traffic(self._producers, self._subscriptions, self._past_out)

    @property
    def messages_dropped_total(self) -> int:
        """Messages that were dropped because too many of their connection were in flight."""
        now = sum(producer.messages_dropped for producer in self.producers.values())
        return self._producers.past_messages_dropped + now

    def sample_rates(self, now_s: float) -> Iterator[None]:
        """Read the counters of the topic, its subscriptions and its clients, one in each step."""
        self.replication.sample_rates(now_s)
        return sample_topic(
            self.rate_sampler, now_s, self._producers, self._subscriptions, self._past_out
        )

    def apply_policies(self, policies: AppliedPolicies) -> None:
        """Use these policies from now on.  Attached clients stay, also above a maximum.

        Only producers that do not encrypt are closed where that is required.
        """
        self.policies = policies
        self._publishing.require_encryption(policies.requires_encryption)
        self._producers.policies_changed()
        self._publishing.limit_messages(policies.max_message_bytes or MAX_MESSAGE_SIZE)
        self.publish_rates.apply(policies.publish_rate)
        self._subscribe_limit.apply(policies.subscribe_rate)
        self.replication.apply()

    # Messages

    def _deliver(self, data: bytes, message_count: int) -> None:
        self.entries_total += 1
        for subscription in self._subscriptions.values():
            subscription.deliver(data, message_count)
        self.replication.send(data)

    def _flush(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.flush()

    # Producers

    def require_open(self, request: ProducerRequest) -> None:
        """Raise unless the topic takes this producer.

        `TopicUnavailable`, `EncryptionRequired`, `OwnReplicator`.
        """
        self._require_open()
        self._producers.require_allowed(request)

    async def require_room(self) -> None:
        """Do nothing: no backlog is stored."""

    async def add_producer(self, request: ProducerRequest) -> Producer:
        """Attach a producer by its access mode: see `ServedTopic`."""
        self.require_open(request)
        return await self._producers.add(request)

    def producer_gone(self, producer: Producer) -> None:
        """Remove a closed producer that has nothing in flight any more."""
        self._producers.remove(producer)
        self._note_use()

    async def create_initial_subscription(self, name: str) -> None:
        """Do nothing, as in Pulsar: without consumers it would keep no messages."""

    # Subscriptions

    async def start_of(self, request: CommandSubscribe, inherits: Inherits) -> Position:
        """Every subscription begins with the next message, whatever position it names."""
        return LATEST

    async def subscribe(self, request: SubscribeRequest) -> Consumer:
        """Attach a consumer, and create its subscription if need be: see `ServedTopic`."""
        self._require_open()
        if request.read_compacted:
            raise ConsumerNotAllowed(
                f"{self.name} stores nothing that could be compacted: subscribe without "
                "readCompacted."
            )
        if request.type.label not in self.policies.subscription_types:
            raise SubscriptionRefused(
                f"{request.type.label} subscriptions are not enabled on {self.name}: use one of "
                f"{', '.join(sorted(self.policies.subscription_types))}."
            )
        require_rate(self._subscribe_limit, self.name, request)
        subscription = self._subscriptions.get(request.subscription)
        if subscription is not None:
            return await subscription.add_consumer(request)
        self._require_below_maximum()
        subscription = NonPersistentSubscription(
            self, request.subscription, durable=request.durable, properties=request.properties
        )
        self._subscriptions[request.subscription] = subscription
        try:
            return await subscription.add_consumer(request)
        except BaseException:
            self._forget_if_empty(request.subscription)
            raise

    def _require_below_maximum(self) -> None:
        """Raise `SubscriptionRefused` if there are as many subscriptions as the policies allow."""
        most = self.policies.max_subscriptions
        if most and len(self._subscriptions) >= most:
            raise SubscriptionRefused(
                f"{self.name} has {len(self._subscriptions)} subscriptions, and the maximum is "
                f"{most}: delete one, or raise maxSubscriptionsPerTopic."
            )

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription.

        Raises `ConsumerBusy` while it has consumers unless `force`, `SubscriptionNotFound`.
        """
        subscription = self._subscriptions.get(name)
        if subscription is None:
            raise SubscriptionNotFound(
                f"{self.name} has no subscription {name!r}: {LIST_SUBSCRIPTIONS}"
            )
        if subscription.consumers and not force:
            raise ConsumerBusy(
                f"Subscription {name!r} on {self.name} has consumers: close them, or force."
            )
        self._forget(name)
        subscription.close()

    def consumer_attached(self) -> None:
        """Note that a consumer was added to a subscription."""
        self.consumer_count += 1

    def consumer_left(self, subscription: str) -> None:
        """Note that a consumer left; the subscription of a reader ends with it."""
        self.consumer_count -= 1
        self._note_use()
        found = self._subscriptions.get(subscription)
        if found is not None and not found.durable:
            self._forget_if_empty(subscription)

    def _forget_if_empty(self, name: str) -> None:
        subscription = self._subscriptions.get(name)
        if subscription is not None and not subscription.consumers:
            self._forget(name)
            subscription.close()

    def _forget(self, name: str) -> None:
        messages, size_bytes, _ = self._subscriptions.pop(name).traffic
        self._past_out = self._past_out[0] + messages, self._past_out[1] + size_bytes
        self._note_use()

    # The end of this instance

    async def close(self) -> None:
        """Disconnect all clients; they connect again."""
        if self.closing:
            return
        self._move(NonPersistentTopicState.CLOSING)
        self.publish_rates.close()
        await self._producers.disconnect_all()
        for name in list(self._subscriptions):
            self._subscriptions[name].close()
        await self.replication.close()
        self._move(NonPersistentTopicState.CLOSED)

    def _note_use(self) -> None:
        self.used_s = asyncio.get_running_loop().time()

    def _require_open(self) -> None:
        if self.closing:
            raise TopicUnavailable(f"{self.name} is {self.state.value}: try again at once.")
        self._note_use()

    def _move(self, to: NonPersistentTopicState) -> None:
        self.state = _MOVES.move(self.state, to, "{}", self.name)
