"""Typed requests about topics to the brokers that serve them, and their table.

Requests of this broker, of other brokers, and of operators over REST are of these types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypeVar

import structlog

from broker.placement.owner_requests import OwnedRequest
from broker.placement.typed_request import Request
from broker.topics.compaction.reserved import require_of_clients, require_of_users
from broker.topics.dispatch.errors import ConsumerBusy, SubscriptionRefused
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.internal_stats import internal_stats
from broker.topics.local_topics import (
    LocalTopics,
    properties_of_users,
    require_no_clients,
)
from broker.topics.message_expiry import expire_messages
from broker.topics.producer_access import ProducerBusy
from broker.topics.seek_target import SeekTarget
from broker.topics.subscription import Subscription
from broker.topics.topic import SubscriptionNotFound, Topic, TopicNotFound
from broker.topics.truncation import move_behind, truncate
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import MagnetarError, ServerError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from txn.records import TxnState

A_co = TypeVar("A_co", covariant=True)
log = structlog.get_logger(__name__)

OWNER_ERRORS: Mapping[ServerError, type[MagnetarError]] = MappingProxyType(
    {each.code: each for each in (TopicNotFound, SubscriptionNotFound, ConsumerBusy, ProducerBusy)}
)
"""Errors of an owner that are the same errors at the broker that asked, by their code."""


@dataclass(frozen=True, slots=True)
class LoadTopic(Request[LocalTopics, None]):
    """Load a topic or segment, unless another broker owns it already.

    It is sent to the broker that is to own the topic, which no other broker owns then.
    """

    KIND: ClassVar[str] = "topic.load"
    topic: TopicName

    async def run(self, topics: LocalTopics) -> None:
        """See `LocalTopics.load`."""
        await topics.load(self.topic)


@dataclass(frozen=True, slots=True)
class TopicRequest(OwnedRequest[LocalTopics, A_co]):
    """A request to the owner of a topic.

    Unless it says otherwise the owner loads the topic if need be; then a topic that does not exist
    raises `TopicNotFound`.
    """

    topic: TopicName

    @property
    def owned(self) -> TopicName:
        """See `OwnedRequest`."""
        return self.topic


@dataclass(frozen=True, slots=True)
class UnloadTopic(TopicRequest[None]):
    """Close a topic or segment if the broker owns it, for `destination` (a broker id) to load."""

    KIND: ClassVar[str] = "topic.unload"
    destination: str | None = None

    async def run(self, topics: LocalTopics) -> None:
        """Close it, and then have the destination load it."""
        placement = topics.placement
        if not placement.owns(self.topic):
            return
        await topics.unload(self.topic)
        target = None if self.destination is None else placement.brokers.get(self.destination)
        if target is None or target.broker_id == placement.broker_id:
            return
        try:
            # Loaded at once, so that its clients find it there.
            await placement.ask(target, LoadTopic(self.topic))
        except MagnetarError as error:
            # The next broker that is asked for the topic loads it.
            log.info(
                "topic_not_taken",
                topic=str(self.topic),
                broker=self.destination,
                error=str(error),
            )


@dataclass(frozen=True, slots=True)
class DeleteTopic(TopicRequest[None]):
    """Delete a topic of any domain; a stored one need not be loaded.

    Raises `TopicNotFound`; unless forced, `ProducerBusy` or `ConsumerBusy` while it is used.
    """

    KIND: ClassVar[str] = "topic.delete"
    force: bool

    async def run(self, topics: LocalTopics) -> None:
        """See `LocalTopics.delete`."""
        await topics.delete(self.topic, force=self.force)


@dataclass(frozen=True, slots=True)
class RequireUnused(TopicRequest[None]):
    """Raise `ProducerBusy` or `ConsumerBusy` if a topic is used.  One not loaded is not used."""

    KIND: ClassVar[str] = "topic.require-unused"

    async def run(self, topics: LocalTopics) -> None:
        """See `require_no_clients`."""
        topic = topics.attached(self.topic)
        if topic is not None:
            require_no_clients(topic)


@dataclass(frozen=True, slots=True)
class ListUnmanagedClients(TopicRequest[list[str]]):
    """Describe the attached clients that are no v5 clients.  A topic not loaded has none."""

    KIND: ClassVar[str] = "topic.unmanaged-clients"

    async def run(self, topics: LocalTopics) -> list[str]:
        """See `LocalTopics.unmanaged_clients`."""
        return topics.unmanaged_clients(self.topic)


@dataclass(frozen=True, slots=True)
class EndOnTopic(TopicRequest[None]):
    """Carry out the end of a transaction on a topic; return when readers see it.

    `subscriptions` have acknowledgements of the transaction.  A topic that is not loaded has no
    readers, and reads the end when it is loaded.
    """

    KIND: ClassVar[str] = "topic.end-transaction"
    txn: str
    committed: bool
    subscriptions: list[str]

    async def run(self, topics: LocalTopics) -> None:
        """See `Topic.carry_out_end`."""
        topic = topics.loaded(self.topic)
        if topic is not None:
            end = TxnState.COMMITTED if self.committed else TxnState.ABORTED
            await topic.carry_out_end(TxnId.parse(self.txn), end, self.subscriptions)


@dataclass(frozen=True, slots=True)
class ViewTopicProperties(TopicRequest[dict[str, str]]):
    """Return the properties that users set."""

    KIND: ClassVar[str] = "topic.properties"

    async def run(self, topics: LocalTopics) -> dict[str, str]:
        """See `properties_of_users`."""
        return properties_of_users((await topics.open(self.topic)).ledger.properties)


@dataclass(frozen=True, slots=True)
class ViewTopicStats(TopicRequest[dict[str, object]]):
    """Return TopicStats, as REST shows them."""

    KIND: ClassVar[str] = "topic.stats"

    async def run(self, topics: LocalTopics) -> dict[str, object]:
        """See `LocalTopics.stats`."""
        return await topics.stats(self.topic)


@dataclass(frozen=True, slots=True)
class ViewInternalStats(TopicRequest[dict[str, object]]):
    """Return PersistentTopicInternalStats, as REST shows them."""

    KIND: ClassVar[str] = "topic.internal-stats"
    with_records: bool = False

    async def run(self, topics: LocalTopics) -> dict[str, object]:
        """See `internal_stats`."""
        topic = await topics.open(self.topic)
        return await internal_stats(topic, with_records=self.with_records)


@dataclass(frozen=True, slots=True)
class SealTopic(TopicRequest[dict[str, int]]):
    """Seal a topic for ever, and return its last message id as REST shows it."""

    KIND: ClassVar[str] = "topic.seal"

    async def run(self, topics: LocalTopics) -> dict[str, int]:
        """See `Topic.seal`."""
        last = await (await topics.open(self.topic)).seal()
        index = -1 if self.topic.partition_index is None else self.topic.partition_index
        return {"ledgerId": last.ledger_id, "entryId": last.entry_id, "partitionIndex": index}


@dataclass(frozen=True, slots=True)
class TrimTopic(TopicRequest[None]):
    """Delete the ledgers that every subscription has read and no policy keeps."""

    KIND: ClassVar[str] = "topic.trim"

    async def run(self, topics: LocalTopics) -> None:
        """See `ManagedLedger.trim`."""
        await (await topics.open(self.topic)).ledger.trim()


@dataclass(frozen=True, slots=True)
class TruncateTopic(TopicRequest[None]):
    """Move all subscriptions to the end, and drop what is stored."""

    KIND: ClassVar[str] = "topic.truncate"

    async def run(self, topics: LocalTopics) -> None:
        """See `truncate`."""
        await truncate(await topics.open(self.topic))


@dataclass(frozen=True, slots=True)
class CompactTopic(TopicRequest[bool]):
    """Begin to compact a topic, and return whether it was not being compacted."""

    KIND: ClassVar[str] = "topic.compact"

    async def run(self, topics: LocalTopics) -> bool:
        """See `Compactions.begin`."""
        return await topics.compactions.begin(await topics.open(self.topic))


@dataclass(frozen=True, slots=True)
class ViewCompaction(TopicRequest[dict[str, object]]):
    """Return LongRunningProcessStatus of the last compaction, as REST shows it."""

    KIND: ClassVar[str] = "topic.compaction"

    async def run(self, topics: LocalTopics) -> dict[str, object]:
        """See `CompactionHistory`."""
        return (await topics.open(self.topic)).compaction.as_status()


@dataclass(frozen=True, slots=True)
class ListTopicSubscriptions(TopicRequest[list[str]]):
    """Return the names of all subscriptions."""

    KIND: ClassVar[str] = "topic.subscriptions"

    async def run(self, topics: LocalTopics) -> list[str]:
        """See `Topic.subscriptions`."""
        return list((await topics.open(self.topic)).subscriptions)


@dataclass(frozen=True, slots=True)
class CreateTopicSubscription(TopicRequest[bool]):
    """Make a durable subscription, and return whether there was none of that name.

    It begins at the message of a `SeekTarget`.  Only EARLIEST and LATEST go to other brokers.
    """

    KIND: ClassVar[str] = "topic.create-subscription"
    name: str
    position: Position
    properties: Mapping[str, str] = field(default_factory=dict)
    batch_index: int = -1
    excluded: bool = False
    replicated: bool = False

    async def run(self, topics: LocalTopics) -> bool:
        """Make it at the start of the target's entry, and then move it to the target."""
        topic = await topics.open(self.topic)
        require_of_clients(self.name)
        if self.name in topic.subscriptions:
            return False
        target = SeekTarget(self.position, self.batch_index, self.excluded)
        made = await topic.create_missing_subscription(
            self.name, target.start, properties=self.properties, replicated=self.replicated
        )
        if made is None:
            # Somebody else was faster: its position and properties are not to be changed.
            return False
        if target.within_entry:
            await target.seek(made)
        return True


@dataclass(frozen=True, slots=True)
class DeleteTopicSubscription(TopicRequest[None]):
    """Delete a subscription.  Raises `SubscriptionNotFound`, `ConsumerBusy` unless forced."""

    KIND: ClassVar[str] = "topic.delete-subscription"
    name: str
    force: bool

    async def run(self, topics: LocalTopics) -> None:
        """See `Topic.unsubscribe`."""
        await (await topics.open(self.topic)).unsubscribe(self.name, force=self.force)


@dataclass(frozen=True, slots=True)
class ViewReplicated(TopicRequest[dict[str, bool]]):
    """Return whether a subscription moves in other clusters too, by the name of its topic.

    Raises `SubscriptionNotFound`.
    """

    KIND: ClassVar[str] = "topic.replicated"
    name: str

    async def run(self, topics: LocalTopics) -> dict[str, bool]:
        """See `Cursor.replicated`."""
        cursor = subscription_of(await topics.open(self.topic), self.name).cursor
        return {str(self.topic): cursor.replicated}


@dataclass(frozen=True, slots=True)
class SetReplicated(TopicRequest[None]):
    """Have a subscription move in other clusters too, or not.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "topic.set-replicated"
    name: str
    replicated: bool

    async def run(self, topics: LocalTopics) -> None:
        """See `Topic.set_replicated`."""
        topic = await topics.open(self.topic)
        await topic.set_replicated(subscription_of(topic, self.name), replicated=self.replicated)


@dataclass(frozen=True, slots=True)
class RemoveSubscription(TopicRequest[None]):
    """Delete a subscription of an ordinary or scalable topic, unless it has consumers.

    Raises `SubscriptionNotFound`, `ConsumerBusy`.
    """

    KIND: ClassVar[str] = "topic.remove-subscription"
    name: str

    async def run(self, topics: LocalTopics) -> None:
        """See `Topic.unsubscribe`."""
        if self.topic.domain is TopicDomain.TOPIC:
            await topics.scalable.delete_subscription(self.topic, self.name, force=False)
        else:
            await (await topics.open(self.topic)).unsubscribe(self.name, force=False)


@dataclass(frozen=True, slots=True)
class SkipBacklog(TopicRequest[None]):
    """Skip all published messages of a subscription of an ordinary or scalable topic.

    With the name of a replicator's cursor, what is skipped is never sent to its cluster.
    With an empty name of all subscriptions but `__compaction`.  Messages from the first one of an
    open transaction on stay: they are not published yet.  Raises `SubscriptionNotFound`,
    `ReservedSubscription`.
    """

    KIND: ClassVar[str] = "topic.skip-backlog"
    name: str

    async def run(self, topics: LocalTopics) -> None:
        """See `move_behind`."""
        if self.topic.domain is TopicDomain.TOPIC:
            await topics.scalable.skip_backlog(self.topic, self.name)
            return
        topic = await topics.open(self.topic)
        last, subscriptions = topic.max_read_position(), topic.subscriptions
        if self.name:
            if (cursor := topic.replicator_cursors.get(self.name)) is not None:
                # Its replicator goes on: a seek would have it attach again.
                await cursor.skip_oldest(cursor.backlog)
                return
            subscription = subscription_of(topic, self.name)
            require_of_users(self.name)
            await move_behind(topic, subscription, last)
            return
        for name in sorted(subscriptions.keys() - {COMPACTION_CURSOR}):
            if name in subscriptions:
                await move_behind(topic, subscriptions[name], last)


@dataclass(frozen=True, slots=True)
class ViewSubscriptionProperties(TopicRequest[dict[str, str]]):
    """Return the properties that users gave a subscription.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "topic.subscription-properties"
    name: str

    async def run(self, topics: LocalTopics) -> dict[str, str]:
        """See `Cursor.properties`."""
        return dict(subscription_of(await topics.open(self.topic), self.name).cursor.properties)


@dataclass(frozen=True, slots=True)
class ReplaceSubscriptionProperties(TopicRequest[None]):
    """Give a subscription these properties and no others.

    Raises `SubscriptionNotFound`, `ReservedSubscription`, and `SubscriptionRefused` for one that is
    not durable.
    """

    KIND: ClassVar[str] = "topic.replace-subscription-properties"
    name: str
    properties: Mapping[str, str]

    async def run(self, topics: LocalTopics) -> None:
        """See `Cursor.replace_properties`."""
        subscription = subscription_of(await topics.open(self.topic), self.name)
        require_of_users(self.name)
        if not subscription.durable:
            raise SubscriptionRefused(
                f"Subscription {self.name!r} is not durable and has no properties: give them to a "
                "durable one."
            )
        await subscription.cursor.replace_properties(self.properties)


@dataclass(frozen=True, slots=True)
class SeekTopicSubscription(TopicRequest[None]):
    """Move a subscription to the message of a `SeekTarget`.  Raises `SubscriptionNotFound`.

    Only EARLIEST and LATEST go to other brokers.
    """

    KIND: ClassVar[str] = "topic.seek"
    name: str
    position: Position
    batch_index: int = -1
    excluded: bool = False

    async def run(self, topics: LocalTopics) -> None:
        """See `SeekTarget.seek`."""
        subscription = subscription_of(await topics.open(self.topic), self.name)
        await SeekTarget(self.position, self.batch_index, self.excluded).seek(subscription)


@dataclass(frozen=True, slots=True)
class SeekTopicSubscriptionToTime(TopicRequest[None]):
    """Move a subscription to the first message published at or after a time.

    Raises `SubscriptionNotFound`.
    """

    KIND: ClassVar[str] = "topic.seek-to-time"
    name: str
    timestamp_ms: int

    async def run(self, topics: LocalTopics) -> None:
        """See `first_published_since`."""
        topic = await topics.open(self.topic)
        subscription = subscription_of(topic, self.name)
        await subscription.seek(await first_published_since(topic.ledger, self.timestamp_ms))


@dataclass(frozen=True, slots=True)
class ExpireMessages(TopicRequest[int]):
    """Count messages of a subscription that were published before a time as acknowledged.

    `before_ms` is by the broker's clock.  Returns the number of entries.  Raises
    `SubscriptionNotFound`.
    """

    KIND: ClassVar[str] = "topic.expire-messages"
    name: str
    before_ms: int

    async def run(self, topics: LocalTopics) -> int:
        """See `expire_messages`."""
        topic = await topics.open(self.topic)
        return await expire_messages(topic, skippable_of(topic, self.name), self.before_ms)


@dataclass(frozen=True, slots=True)
class SkipEntries(TopicRequest[int]):
    """Count the oldest `count` unacknowledged entries of a subscription as acknowledged.

    Returns and raises as `ExpireMessages`.
    """

    KIND: ClassVar[str] = "topic.skip"
    name: str
    count: int

    async def run(self, topics: LocalTopics) -> int:
        """See `Subscription.skip_oldest`."""
        return await skippable_of(await topics.open(self.topic), self.name).skip_oldest(self.count)


@dataclass(frozen=True, slots=True)
class ExpireUpTo(TopicRequest[int]):
    """Count messages of a subscription up to a message id as acknowledged.

    Returns and raises as `ExpireMessages`.
    """

    KIND: ClassVar[str] = "topic.expire-up-to"
    name: str
    position: Position
    excluded: bool = False
    """Whether the message with that id stays."""

    async def run(self, topics: LocalTopics) -> int:
        """See `Subscription.expire_before`."""
        subscription = subscription_of(await topics.open(self.topic), self.name)
        if self.excluded or self.position in (EARLIEST, LATEST):
            return await subscription.expire_before(self.position)
        behind = self.position.following
        return await subscription.expire_before(behind)


def subscription_of(topic: Topic, name: str) -> Subscription:
    """The subscription of that name.  Raises `SubscriptionNotFound`."""
    found = topic.subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(
            f"{topic.name} has no subscription {name!r}: create it with PUT."
        )
    return found


def skippable_of(topic: Topic, name: str) -> Subscription:
    """The same, or the cursor of a replicator: what is skipped there is never sent."""
    return topic.replicator_cursors.get(name) or subscription_of(topic, name)


TOPIC_REQUESTS: Mapping[str, type[Request[LocalTopics, object]]] = MappingProxyType(
    {
        each.KIND: each
        for each in (
            LoadTopic,
            UnloadTopic,
            DeleteTopic,
            RequireUnused,
            ListUnmanagedClients,
            EndOnTopic,
            ViewTopicProperties,
            ViewTopicStats,
            ViewInternalStats,
            SealTopic,
            TrimTopic,
            TruncateTopic,
            CompactTopic,
            ViewCompaction,
            ListTopicSubscriptions,
            CreateTopicSubscription,
            DeleteTopicSubscription,
            ViewReplicated,
            SetReplicated,
            RemoveSubscription,
            SkipBacklog,
            ViewSubscriptionProperties,
            ReplaceSubscriptionProperties,
            SeekTopicSubscription,
            SeekTopicSubscriptionToTime,
            ExpireMessages,
            ExpireUpTo,
            SkipEntries,
        )
    }
)
