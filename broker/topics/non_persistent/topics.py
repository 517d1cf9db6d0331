"""The non-persistent topics of this broker: making, listing, closing and deleting them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from weakref import WeakValueDictionary

import structlog

from broker.placement import Placement
from broker.policies.policies_in_force import PoliciesInForce, concerns
from broker.topics.context import TopicContext
from broker.topics.non_persistent.publishing import MessagesInFlight
from broker.topics.non_persistent.topic import NonPersistentTopic
from broker.topics.partitions import PartitionedTopics
from broker.topics.replication import NonPersistentReplication, NoReplication
from broker.topics.topic import TopicNotFound, TopicUnavailable
from config.bounds import NON_PERSISTENT_CHECK_S, NON_PERSISTENT_TOPIC_IDLE_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

RequireCreatable = Callable[[TopicName], Awaitable[None]]
"""Raises `TopicNotFound` or `TopicNotAllowed` unless a missing topic may be created by its use."""


class NonPersistentTopics:
    """Makes each topic once, at the broker that owns its name, and forgets it when it is unused.

    A topic exists as long as its owner has it: there is no record of it.
    """

    def __init__(
        self,
        context: TopicContext,
        placement: Placement,
        policies: PoliciesInForce,
        partitioned: PartitionedTopics,
        require_creatable: RequireCreatable,
    ) -> None:
        self._context = context
        self._placement = placement
        self._policies = policies
        self._partitioned = partitioned
        self._require_creatable = require_creatable
        self._in_flight = MessagesInFlight(
            context.settings.max_concurrent_non_persistent_messages_per_connection
        )
        self._topics: dict[str, NonPersistentTopic] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._work = BackgroundTasks(
            log, failure_event="background_work_failed", expected=(MagnetarError,)
        )
        self.replicate: Callable[[NonPersistentTopic], NonPersistentReplication] = NoReplication.of
        """Makes the replication of a topic."""
        self._closed = False
        self._forget_owners = placement.on_change(self._owner_changed)
        policies.on_change(self._policies_changed)

    def loaded(self) -> Mapping[str, NonPersistentTopic]:
        """The topics of this broker by full name."""
        return MappingProxyType(self._topics)

    def start(self) -> None:
        """Forget unused topics from time to time."""
        self._work.keep_every(
            NON_PERSISTENT_CHECK_S, "unused_non_persistent_topics", self.forget_unused
        )

    async def get(self, name: TopicName, *, create: bool) -> NonPersistentTopic:
        """The topic; made if it is missing, `create` is set and policies allow it.

        Raises `TopicNotFound`, `TopicNotAllowed`, `TopicUnavailable`, `OwnedElsewhere`,
        `PlacementNotReady`, `NamespaceNotFound`.
        """
        key = str(name)
        topic = self._topics.get(key)
        if topic is not None and not topic.closing and self._placement.owns(name):
            return topic
        async with self._lock(key):
            topic = self._topics.get(key)
            if topic is not None and not topic.closing:
                if not self._placement.owns(name):
                    raise TopicUnavailable(f"{name} is another broker's now: look it up again.")
                return topic
            await self._policies.require(name)
            if self._placement.known_owner(name) is None or not self._placement.shared:
                if not create and not await self._is_partition(name):
                    raise TopicNotFound(f"Topic {name} does not exist: create it first.")
                await self._require_creatable(name)
            return await self._make(name)

    async def create(self, name: TopicName) -> None:
        """Make a topic for an operator, whatever the policies say."""
        await self._policies.require(name)
        async with self._lock(str(name)):
            if str(name) not in self._topics:
                await self._make(name)

    async def _make(self, name: TopicName) -> NonPersistentTopic:
        if self._closed:
            raise TopicUnavailable(f"{name} is not served here any more: connect again.")
        await self._placement.acquire(name)
        topic = self._topics[str(name)] = NonPersistentTopic(self._context, name, self._in_flight)
        topic.replication = self.replicate(topic)
        topic.replication.apply()
        log.debug("non_persistent_topic_made", topic=str(name))
        self._owner_changed(name)  # it may have been lost while it was acquired
        return topic

    async def _is_partition(self, name: TopicName) -> bool:
        index = name.partition_index
        return index is not None and index < await self._partitioned.count(name.partitioned)

    def exists(self, name: TopicName) -> bool:
        """Whether a broker has the topic now."""
        if str(name) in self._topics:
            return True
        return self._placement.shared and self._placement.known_owner(name) is not None

    async def list_names(self, namespace: NamespaceName) -> list[str]:
        """Sorted full names: those that brokers have now, and all partitions."""
        known = {*self._topics, *self._placement.owners()}
        names = {
            text
            for text in known
            if (name := parse_topic_name(text)).domain is TopicDomain.NON_PERSISTENT
            and name.namespace_name == namespace
        }
        for whole in await self._partitioned.list(namespace, TopicDomain.NON_PERSISTENT):
            name = parse_topic_name(whole)
            count = await self._partitioned.count(name)
            names.update(str(name.partition(index)) for index in range(count))
        return sorted(names)

    # Ending

    async def unload(self, name: TopicName) -> None:
        """Close a topic; clients connect again and make it anew."""
        await self._work.finish(self._unload(str(name)))

    async def _unload(
        self, key: str, still: Callable[[NonPersistentTopic], bool] | None = None
    ) -> bool:
        """Close a topic, if `still` is true of it; returns whether there was one."""
        async with self._lock(key):
            topic = self._topics.get(key)
            if topic is None or (still is not None and not still(topic)):
                return False
            await topic.close()
            del self._topics[key]
            await self._placement.release(topic.name)
            return True

    async def forget_unused(self) -> None:
        """Delete topics that had neither producers nor subscriptions for long enough."""

        def is_old(topic: NonPersistentTopic) -> bool:
            now_s = asyncio.get_running_loop().time()
            return topic.unused and now_s - topic.used_s >= NON_PERSISTENT_TOPIC_IDLE_S

        for key in [key for key, topic in self._topics.items() if is_old(topic)]:
            if await self._unload(key, is_old):
                log.debug("unused_non_persistent_topic_deleted", topic=key)

    async def hand_over(self) -> None:
        """Close and release all topics, for other brokers to make."""
        for key in list(self._topics):
            await self._unload(key)

    async def close(self) -> None:
        """Close all topics; none is made from now on."""
        self._closed = True
        self._forget_owners()
        await self.hand_over()
        await self._work.stop()

    def _owner_changed(self, name: TopicName) -> None:
        topic = self._topics.get(str(name))
        if topic is not None and not self._placement.owns(name):
            log.warning("topic_ownership_lost", topic=str(name))
            self._work.start(self._unload(str(name), lambda present: present is topic))

    def _policies_changed(self, namespace: NamespaceName, local_name: str | None) -> None:
        for topic in self._topics.values():
            if concerns(namespace, local_name, topic.name):
                topic.apply_policies(self._policies.of(topic.name))

    def _lock(self, key: str) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
