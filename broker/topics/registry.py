"""The topics of this broker: finding, creating, loading, unloading and deleting them."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

import structlog

from broker.placement import OwnedElsewhere
from broker.policies.message_rate import MessageRate
from broker.policies.namespaces import Namespaces, Policies, confirm_creation
from broker.policies.policies_in_force import PoliciesInForce, concerns
from broker.policies.topic_policies import TopicPolicies
from broker.topics.cluster_topics import ClusterTopics
from broker.topics.context import TopicContext
from broker.topics.local_topics import ClusterTopicsHost, LocalScalableTopics, require_no_clients
from broker.topics.non_persistent.topics import NonPersistentTopics
from broker.topics.partitions import PartitionedTopicExists, PartitionedTopics, PartitionWork
from broker.topics.producer_names import ProducerNames
from broker.topics.publish_limits import PublishLimits
from broker.topics.rate_timer import SampledTopic
from broker.topics.replication import NoReplication, TopicReplication
from broker.topics.reserved_names import require_not_reserved
from broker.topics.schemas import SchemaRegistry
from broker.topics.sequence_store import SequenceStore
from broker.topics.served_topic import ServedTopic
from broker.topics.throttle import Level, RateLimit
from broker.topics.topic import Topic, TopicEvents, TopicNotFound, TopicUnavailable
from broker.topics.topic_changes import TopicChanges
from broker.topics.topic_counts import TopicCounts
from broker.topics.topic_listing import TopicListings
from broker.topics.topic_lists import TopicListener, TopicLists
from broker.topics.unloaded_backlogs import UnloadedBacklogs
from config.bounds import DRAIN_TOPICS_AT_ONCE, LOADS_PER_COLLECTION
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import Position
from magnetar.protocol.names import (
    InvalidTopicName,
    NamespaceName,
    SegmentName,
    TopicDomain,
    TopicName,
    parse_topic_name,
    require_creatable,
    require_persistent,
    segment_name,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.clock import Clock
from storage.ledger.store import LedgersDamaged
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import ledger_key
from storage.metadata.counted_metadata import CountedMetadata
from txn.buffer import SegmentBuffer
from txn.forget_segment import forget_records, forget_segment
from txn.parts import TransactionParts
from txn.segment_owner import SegmentOwner

log = structlog.get_logger(__name__)

_SCALABLE = (TopicDomain.TOPIC, TopicDomain.SEGMENT)


class TopicNotAllowed(PeerError):
    """A topic of that name is not opened in this way."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TopicExists(PeerError):
    """A topic of that name exists."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class ScalableNames(TopicEvents, LocalScalableTopics, Protocol):
    """Scalable topics, as the registry uses them."""

    async def is_sealed(self, segment: SegmentName) -> bool:
        """Whether a segment is SEALED in its layout.  Raises `TopicNotFound` if it is in none."""
        ...

    async def exists(self, name: TopicName) -> bool:
        """Whether a scalable topic of that name exists."""
        ...

    async def has_legacy_segments(self, name: TopicName) -> bool:
        """Whether segments of the scalable topic of that name are ordinary topics."""
        ...

    async def recognise_segment(self, topic: Topic) -> None:
        """Find out whether a sealed ordinary topic is a legacy segment, to report its events."""
        ...


class TransactionsOfTopics(Protocol):
    """Transactions, as the registry passes them to topics."""

    @property
    def parts(self) -> TransactionParts:
        """Shared parts of all transactional components in this process."""
        ...


class RegistryHost(ClusterTopicsHost, Protocol):
    """The parts of a broker that the registry uses."""

    settings: Settings
    clock: Clock
    random: random.Random
    metadata: CountedMetadata
    managed_ledgers: ManagedLedgerFactory
    namespaces: Namespaces
    topic_policies: TopicPolicies
    policies: PoliciesInForce
    schemas: SchemaRegistry
    producer_names: ProducerNames
    publish_limits: PublishLimits
    topic_counts: TopicCounts

    @property
    def transactions(self) -> TransactionsOfTopics:
        """Transactions of this process."""
        ...

    @property
    def scalable(self) -> ScalableNames:
        """Scalable topics; from the start of the broker on."""
        ...


class TopicRegistry:
    """Finds, creates, loads, unloads and deletes the topics of this broker; loads each one once.

    Loading, unloading and deleting of one name happen one after the other.  A topic is acquired
    before it is loaded, created or deleted, and released when it is unloaded.  A topic that this
    process no longer owns is closed.
    """

    buffer_class: ClassVar[type[SegmentBuffer]] = SegmentBuffer

    def __init__(self, broker: RegistryHost) -> None:
        self._broker = broker
        self._topics: dict[str, Topic] = {}
        self._loads: dict[str, tuple[bool, asyncio.Task[Topic]]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._work = BackgroundTasks(
            log, failure_event="background_work_failed", expected=(MagnetarError,)
        )
        self.unloaded = UnloadedBacklogs()
        self._listeners: dict[object, TopicListener] = {}
        self._closed = False
        self._loads_since_collection = 0
        self._forget_owners = broker.placement.on_change(self._owner_changed)
        self.partitioned = PartitionedTopics(
            broker.metadata, broker.settings.max_num_partitions_per_partitioned_topic
        )
        self.partition_work = PartitionWork()
        self.cluster = ClusterTopics(broker, self)
        self.listings = TopicListings(broker.metadata, ledger_key)
        self._lists = TopicLists(broker.metadata, ledger_key)
        self.changes = TopicChanges(self.follow)
        settings = broker.settings
        self._context = TopicContext(
            clock=broker.clock,
            random=broker.random,
            settings=settings,
            producer_names=broker.producer_names,
            publish_limits=broker.publish_limits,
            transactions=broker.transactions.parts,
            policies=broker.policies.of,
            publish_limit=_broker_limit(
                settings.broker_publisher_throttling_max_message_rate,
                settings.broker_publisher_throttling_max_byte_rate,
            ),
            dispatch_limit=_broker_limit(
                settings.dispatch_throttling_rate_in_msg,
                settings.dispatch_throttling_rate_in_byte,
            ),
        )
        self.replicate: Callable[[Topic], TopicReplication] = NoReplication.of
        """Makes what sends a topic to other clusters; set before the first topic is loaded."""
        self.after_unload: Callable[[Topic], None] = lambda _: None
        """Called with each topic that was closed here and still exists."""
        broker.policies.on_change(self._policies_changed)
        self.non_persistent = NonPersistentTopics(
            self._context,
            broker.placement,
            broker.policies,
            self.partitioned,
            self.require_auto_creation,
        )

    # Finding

    def loaded(self) -> Mapping[str, Topic]:
        """The loaded topics by full name."""
        return MappingProxyType(self._topics)

    def sampled(self) -> Iterator[SampledTopic]:
        """The topics of every domain that have counters here."""
        yield from self._topics.values()
        yield from self.non_persistent.loaded().values()

    def require_served(self, name: TopicName) -> None:
        """Raise for names that this broker does not serve, or not as it is configured.

        `ReservedTopicName`, `InvalidTopicName`.
        """
        require_not_reserved(name)
        if name.domain in _SCALABLE and not self._broker.settings.scalable_topics_enabled:
            raise InvalidTopicName(
                f"{name} is refused, because scalable topics are off: set "
                "scalable_topics_enabled, or use a persistent:// name."
            )

    async def create(self, name: TopicName, properties: Mapping[str, str] | None = None) -> Topic:
        """Create a persistent topic for an operator, whether or not clients may create one.

        Raises `TopicExists`, `TooManyTopics`, `TopicNotAllowed`, `TopicUnavailable`, and what
        storage raises.
        """
        self.require_served(name)
        if await self.exists(name):
            raise _exists(name)
        if await self.has_scalable_twin(name):
            raise TopicExists(f"{name.in_domain(TopicDomain.TOPIC)} exists: use another name.")
        require_creatable(name)
        await self._broker.namespaces.require(name.namespace_name)
        async with self._lock(str(name)):
            # Whoever had the lock before may have created it, and may serve it.
            if str(name) in self._topics or await self._is_stored(name):
                raise _exists(name)
            async with self._acquired(name), self._room(name), self._unloaded_on_failure(name):
                if not await self.purge_leftovers_if_new(name):
                    raise _exists(name)
                ledger = await self._broker.managed_ledgers.open(name.ledger_path, create=True)
                await self._confirm_creation(name)
                if properties:
                    await ledger.set_properties(properties)
        self._notify(name, exists=True)
        return await self.get(name, create=False)

    async def create_non_persistent(self, name: TopicName) -> None:
        """Make a topic that stores nothing, for an operator.  Raises as `create`."""
        self.require_served(name)
        if await self.exists(name):
            raise _exists(name)
        require_creatable(name)
        await self.non_persistent.create(name)

    async def create_partition(self, name: TopicName) -> None:
        """Create a partition that is missing, without loading it.

        Raises `TopicNotFound`, `TopicNotAllowed`, and what storage raises.
        """
        # Thousands of partitions are created at once, and most are not used soon: loaded topics
        # take memory, and make every garbage collection longer.
        self.require_served(name)
        async with self._lock(str(name)):
            if str(name) in self._topics:
                return
            policies = await self._broker.namespaces.require(name.namespace_name)
            await self._require_openable(name, policies, create=True)
            async with self._acquired(name):
                created = await self.purge_leftovers_if_new(name)
                if created:
                    ledgers = self._broker.managed_ledgers
                    await ledgers.open(name.ledger_path, create=True)
                    await self._confirm_creation(name)
                    self._notify(name, exists=True)
                    await ledgers.unload(name.ledger_path)
            await self._broker.placement.release(name)

    async def serve(self, name: TopicName, *, create: bool) -> ServedTopic:
        """The topic for a client that is about to attach; created as by `get`.

        Raises as `get`.
        """
        if name.domain is not TopicDomain.NON_PERSISTENT:
            return await self.get(name, create=create)
        self.require_served(name)
        return await self.non_persistent.get(name, create=create)

    async def get(self, name: TopicName, *, create: bool) -> Topic:
        """The topic, loaded; created if it is missing, `create` is set and policies allow it.

        Raises `TopicNotFound`, `TopicNotAllowed`, `TopicUnavailable`, `NonPersistentTopicRefused`,
        and what storage raises.
        """
        key = str(name)
        while True:
            topic = self._topics.get(key)
            if topic is not None and not topic.closing:
                self._require_owned(topic)
                topic.uses += 1
                return topic
            if self._closed:
                raise TopicUnavailable(f"{name} is not served here any more: connect again.")
            creates, load = self._loads.get(key, (False, None))
            if load is None:
                require_persistent(name)
                self.require_served(name)
                load = asyncio.get_running_loop().create_task(self._load(name, create=create))
                creates = create
                self._loads[key] = (create, load)
                load.add_done_callback(lambda load: self._load_ended(key, load))
            try:
                # All callers share one load; it goes on if a caller is cancelled.
                topic = await asyncio.shield(load)
            except TopicNotFound:
                if creates or not create:
                    raise
            else:
                topic.uses += 1
                return topic

    def _load_ended(self, key: str, load: asyncio.Task[Topic]) -> None:
        self._loads.pop(key, None)
        if not load.cancelled():
            load.exception()  # no caller may be left that retrieves it

    async def exists(self, name: TopicName) -> bool:
        """Whether a topic of that name exists, partitioned or not."""
        if name.domain is TopicDomain.NON_PERSISTENT:
            if self.non_persistent.exists(name):
                return True
        elif str(name) in self._topics or await self._is_stored(name):
            return True
        return name.partition_index is None and await self.partitioned.count(name) > 0

    async def may_be_opened(self, name: TopicName) -> bool:
        """Whether a topic exists, or is a partition that is created at its first use."""
        return await self.exists(name) or await self._is_partition(name)

    async def list_names(self, namespace: NamespaceName) -> list[str]:
        """Sorted full names of the persistent topics of a namespace; each partition is one."""
        return list((await self.listings.get(namespace)).names)

    async def partition_counts(self, namespace: NamespaceName) -> dict[TopicName, int]:
        """The topics of a namespace by their numbers of partitions, 0 for those without.

        Of non-persistent ones those with partitions, as of the others nothing is stored.
        """
        whole = [
            *await self.partitioned.list(namespace),
            *await self.partitioned.list(namespace, TopicDomain.NON_PERSISTENT),
        ]
        names = [parse_topic_name(each) for each in whole]
        counts = await self.partition_work.run(names, self.partitioned.count)
        found = dict(zip(names, counts, strict=True))
        for each in await self.list_names(namespace):
            name = parse_topic_name(each)
            if name.partitioned not in found:
                found[name] = 0
        return found

    async def follow(self, namespace: NamespaceName, listener: TopicListener) -> Callable[[], None]:
        """Call `listener` when any broker creates or deletes a topic of a namespace.

        It may be called for other namespaces too.  Returns a function that removes it.  Where
        stores are shared this waits until the namespace could be read; failures of that are tried
        again, and not raised.
        """
        if self._broker.placement.shared:
            return await self._lists.follow(namespace, self.list_names, listener)
        return self.on_change(listener)

    def on_change(self, listener: TopicListener) -> Callable[[], None]:
        """Call `listener` when this broker creates or deletes a topic.

        Returns a function that removes it.
        """
        token = object()
        self._listeners[token] = listener
        return lambda: (self._listeners.pop(token, None), None)[1]

    def _policies_changed(self, namespace: NamespaceName, local_name: str | None) -> None:
        """Apply a change of policies to the loaded topics that it concerns."""
        for topic in list(self._topics.values()):
            if concerns(namespace, local_name, topic.name) and not topic.closing:
                topic.apply_policies(self._broker.policies.of(topic.name))

    # Loading

    async def _load(self, name: TopicName, *, create: bool) -> Topic:
        async with self._lock(str(name)):
            known = self._topics.get(str(name))
            if known is not None:
                return known
            policies = await self._broker.policies.require(name)
            sealed_by_layout = await self._require_openable(name, policies, create=create)
            async with self._acquired(name):
                if self._broker.placement.shared:
                    # Checked again: another owner may have changed the topic until now.
                    sealed_by_layout = await self._require_openable(name, policies, create=create)
                async with self._room(name):
                    created = await self.purge_leftovers_if_new(name)
                    topic = await self._open(name, created=created)
            self._topics[str(name)] = topic
            self.unloaded.forget(str(name))
            self._collect_garbage_in_parts()
            topic.opened()
            # A change while it was being loaded was not applied to it.
            if (applied := self._broker.policies.of(name)) != topic.policies:
                topic.apply_policies(applied)
            if sealed_by_layout:
                topic.begin_seal()
            if topic.sealed and name.domain is TopicDomain.PERSISTENT:
                self._work.start(self._broker.scalable.recognise_segment(topic))
            log.debug("topic_loaded", topic=str(name), state=topic.state.value, created=created)
            if created:
                self._notify(name, exists=True)
            if not self._broker.placement.owns(name):
                self.give_up(topic)  # lost while it was being loaded
            return topic

    def _collect_garbage_in_parts(self) -> None:
        """Count a load, and collect garbage after LOADS_PER_COLLECTION of them."""
        # The objects of a topic last.  The collector comes rarely, and would go through those of
        # thousands of topics at once, for as long as 0.4 s; behind it they count as old.
        self._loads_since_collection += 1
        if self._loads_since_collection >= LOADS_PER_COLLECTION:
            self._loads_since_collection = 0
            gc.collect(1)

    @asynccontextmanager
    async def _acquired(self, name: TopicName) -> AsyncIterator[None]:
        """Acquire a topic, and release it again if the block raises.

        The caller has the lock of the name.
        """
        await self._broker.placement.acquire(name)
        try:
            yield
        except BaseException:
            await self._broker.placement.release(name)
            raise

    @asynccontextmanager
    async def _unloaded_on_failure(self, name: TopicName) -> AsyncIterator[None]:
        """Close the ledger of a topic again if the block raises: the topic will be released."""
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self._broker.managed_ledgers.unload, name.ledger_path)
            yield
            on_failure.pop_all()

    @asynccontextmanager
    async def _room(self, name: TopicName) -> AsyncIterator[None]:
        """Keep a place in the namespace for a topic that the block creates, if it is missing.

        The caller has the lock of the name.  Raises `TooManyTopics`.
        """
        counts = self._broker.topic_counts
        if (
            name.domain is not TopicDomain.PERSISTENT
            or not await counts.limit(name.namespace_name)
            or await self._is_stored(name)
            or await self._is_partition(name)
        ):
            yield
            return
        async with counts.room(name):
            yield

    async def _is_partition(self, name: TopicName) -> bool:
        index = name.partition_index
        return index is not None and index < await self.partitioned.count(name.partitioned)

    def _require_owned(self, topic: Topic) -> None:
        if not self._broker.placement.owns(topic.name):
            raise TopicUnavailable(f"{topic.name} is another broker's now: look it up again.")

    def _owner_changed(self, name: TopicName) -> None:
        owner = self._broker.placement.known_owner(name)
        if owner is not None and owner.broker_id != self._broker.placement.broker_id:
            self.unloaded.forget(str(name))
        topic = self._topics.get(str(name))
        if topic is not None and not self._broker.placement.owns(name):
            log.warning("topic_ownership_lost", topic=str(name))
            self.give_up(topic)

    async def purge_leftovers_if_new(self, name: TopicName) -> bool:
        """Delete records of transactions that an earlier topic left, if the topic has no ledger.

        Returns whether it has none.  Raises `MetadataError`, `CorruptTransactionRecord`.
        """
        if await self._is_stored(name):
            return False
        parts = self._broker.transactions.parts
        if not parts.eager_epochs:
            await forget_records(parts.store, str(name))
        return True

    async def _confirm_creation(self, name: TopicName) -> None:
        """Delete a topic that was just created again if its namespace is being deleted.

        Of segments the layout decides: their scalable topic was confirmed.
        Raises `NamespaceNotFound`, and what storage raises.
        """

        async def undo() -> None:
            await self._broker.managed_ledgers.delete(name.ledger_path)
            await self._forget_transactions(name)

        if name.domain is TopicDomain.PERSISTENT:
            await confirm_creation(self._broker.metadata, name.namespace_name, undo)

    async def _open(self, name: TopicName, *, created: bool) -> Topic:
        """Open the ledger of a topic, and load its state.

        W7, A3: epoch, ledger, claims, headers, aborted set, acknowledgements; in this order.
        """
        store = SequenceStore(
            self._broker.clock,
            lambda: self._broker.policies.of(name).retention,
            segment_name(name) if name.domain is TopicDomain.SEGMENT else None,
        )
        owner = await self._owner(name)
        async with self._unloaded_on_failure(name):
            ledger = await self._broker.managed_ledgers.open(
                name.ledger_path, create=True, retention=store.retention
            )
            if created:
                await self._confirm_creation(name)
            topic = await Topic.load(
                self._context,
                name,
                ledger,
                store=store,
                owner=owner,
                events=self._broker.scalable,
                give_up=self.give_up,
                buffer_class=self.buffer_class,
                replicate=self.replicate,
            )
            # Checked again: a loss may have been found since the ledger was opened.
            ledger.require_whole()
        return topic

    async def _owner(self, name: TopicName) -> SegmentOwner:
        """Create the `SegmentOwner`.  In a cluster, take its epoch before the ledger opens (W7)."""

        def lost(error: MagnetarError) -> None:
            topic = self._topics.get(str(name))
            if topic is not None and topic.owner.lost is error:
                topic.ownership_lost(error)

        parts = self._broker.transactions.parts
        owner = SegmentOwner(str(name), parts, lost)
        if parts.eager_epochs:
            await owner.take()
        return owner

    async def _require_openable(self, name: TopicName, policies: Policies, *, create: bool) -> bool:
        """Raise unless the topic exists or may be created; returns whether its layout is SEALED."""
        if name.domain is TopicDomain.TOPIC:
            raise TopicNotAllowed(
                f"{name} is a scalable topic: use a v5 client, or open its segments."
            )
        stored = await self._is_stored(name)
        if name.domain is TopicDomain.SEGMENT:
            # Only the layout of its scalable topic decides whether a segment exists.
            sealed = await self._broker.scalable.is_sealed(segment_name(name))
            if sealed and not stored:
                raise TopicNotFound(f"{name} is gone: look its topic up again.")
            return sealed
        if not stored:
            await self._require_auto_creation(name, policies, create=create)
        return False

    async def require_auto_creation(self, name: TopicName) -> None:
        """Raise, as opening it would, unless a missing topic would be created at its first use."""
        self.require_served(name)
        policies = await self._broker.namespaces.require(name.namespace_name)
        await self._require_auto_creation(name, policies, create=True)

    async def _require_auto_creation(
        self, name: TopicName, policies: Policies, *, create: bool
    ) -> None:
        """Raise unless a missing topic may be created now."""
        if name.partition_index is not None:
            count = await self.partitioned.count(name.partitioned)
            if name.partition_index < count:
                if await self.is_migrated(name):
                    # All of them existed when the topic was migrated: this one has been pruned.
                    raise TopicNotFound(f"{name} is gone: look its scalable topic up again.")
                return
            if count:
                raise TopicNotFound(f"{name.partitioned} has {count} partitions: use one of them.")
        elif await self.partitioned.count(name):
            raise TopicNotAllowed(f"{name} is partitioned: open its partitions.")
        if not create or not self._auto_creation(policies):
            raise TopicNotFound(f"Topic {name} does not exist: create it first.")
        require_creatable(name)
        persistent = name.domain is TopicDomain.PERSISTENT
        if persistent and self._broker.settings.scalable_topics_enabled:
            # A client that knows the partitions of a migrated topic may come back late.
            for each in {name, name.partitioned}:
                if await self.has_scalable_twin(each):
                    raise TopicNotFound(
                        f"{name} does not exist and {each.in_domain(TopicDomain.TOPIC)} does: use "
                        "that."
                    )
        if name.partition_index is not None:
            # Clients of a partitioned topic that is deleted connect again, partition by partition.
            raise TopicNotAllowed(
                f"{name} is named as a partition, and {name.partitioned} has none: create the "
                "partitioned topic, or use another name."
            )

    async def has_scalable_twin(self, name: TopicName) -> bool:
        """Whether a scalable topic has the same local name."""
        return await self._broker.scalable.exists(name.in_domain(TopicDomain.TOPIC))

    async def is_migrated(self, name: TopicName) -> bool:
        """Whether a topic or partition is, or was, a legacy segment of a topic that has some."""
        enabled = self._broker.settings.scalable_topics_enabled
        if not enabled or name.domain is TopicDomain.NON_PERSISTENT:
            return False
        twin = name.partitioned.in_domain(TopicDomain.TOPIC)
        return await self._broker.scalable.has_legacy_segments(twin)

    async def partitions_of(self, name: TopicName, *, create: bool) -> int:
        """The number of a topic's partitions, 0 when it is not partitioned.

        With `create` a missing topic is created with partitions if its namespace's policy says so;
        without it a missing topic raises `TopicNotFound`.  Raises `TooManyTopics` too.
        """
        self.require_served(name)
        if name.domain in _SCALABLE or name.partition_index is not None:
            return 0
        count = await self.partitioned.count(name)
        if count or await self.exists(name):
            return count
        twin = name.domain is TopicDomain.PERSISTENT and await self.has_scalable_twin(name)
        if not create:
            if twin:
                return 0
            raise TopicNotFound(f"Topic {name} does not exist: create it first.")
        policies = await self._broker.namespaces.require(name.namespace_name)
        wanted = self._default_partitions(policies) if self._auto_creation(policies) else 0
        if not wanted or twin:
            return 0
        try:
            async with self._broker.topic_counts.room(name, partitions=wanted):
                await self.partitioned.create(name, wanted)
        except PartitionedTopicExists:
            return await self.partitioned.count(name)
        return wanted

    def _default_partitions(self, policies: Policies) -> int:
        settings, of_namespace = self._broker.settings, policies.default_partitions
        if of_namespace is not None:
            return of_namespace
        partitioned = settings.auto_topic_creation_type == "partitioned"
        return settings.default_num_partitions if partitioned else 0

    def _auto_creation(self, policies: Policies) -> bool:
        allowed = policies.auto_topic_creation
        return self._broker.settings.auto_topic_creation if allowed is None else allowed

    async def _is_stored(self, name: TopicName) -> bool:
        return await self._broker.metadata.get(ledger_key(name.ledger_path)) is not None

    # Ending

    def give_up(self, topic: Topic) -> None:
        """Close a topic in the background, so that the next request loads it anew.

        Its ledger failed, or its ownership was lost.
        """
        self._work.start(self._give_up(topic))

    def entries_lost(self, ledger_path: str) -> None:
        """Close the topic of that ledger path if it is refused now that entries of it were lost."""
        for topic in self._topics.values():
            if topic.name.ledger_path == ledger_path:
                try:
                    topic.ledger.require_whole()
                except LedgersDamaged as error:
                    log.error("topic_refused", topic=str(topic.name), reason=str(error))
                    self.give_up(topic)

    async def _give_up(self, topic: Topic) -> None:
        key = str(topic.name)
        async with self._lock(key):
            if self._topics.get(key) is topic:
                await self._unload(key)

    async def unload(self, name: TopicName) -> None:
        """Close a topic; clients connect again and load it anew."""
        if name.domain is TopicDomain.NON_PERSISTENT:
            await self.non_persistent.unload(name)
            return
        await self._work.finish(self._unload_alone(str(name)))

    async def unload_if(self, topic: Topic, still: Callable[[], bool]) -> bool:
        """Close a topic if `still()` is true in the turn of the loop in which closing begins.

        Returns whether it was closed.
        """
        return await self._work.finish(self._unload_if(topic, still))

    async def _unload_if(self, topic: Topic, still: Callable[[], bool]) -> bool:
        key = str(topic.name)
        async with self._lock(key):
            if self._topics.get(key) is not topic or not still():
                return False
            await self._unload(key)
            return True

    async def _unload_alone(self, key: str) -> None:
        async with self._lock(key):
            await self._unload(key)

    async def _unload(self, key: str) -> None:
        topic = self._topics.get(key)
        name = await self._close(key)
        if topic is not None and name is not None:
            await self._broker.placement.release(name)
            self.after_unload(topic)

    async def _close(self, key: str) -> TopicName | None:
        """Close a topic, if it is loaded; it stays acquired."""
        topic = self._topics.get(key)
        if topic is None:
            return None
        try:
            await topic.close()
        except MagnetarError as error:
            log.warning("topic_not_closed_cleanly", topic=key, error=str(error))
        finally:
            self._topics.pop(key, None)
            self._broker.scalable.topic_unloaded(topic)
        await self._broker.managed_ledgers.unload(topic.name.ledger_path)
        return topic.name

    async def delete(
        self,
        name: TopicName,
        *,
        force: bool,
        require_unused: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Delete a topic with all its data; `require_unused` as of a managed ledger.

        Raises `TopicNotFound`; unless `force`, `ProducerBusy` or `ConsumerBusy` while it is used.
        A non-persistent topic need not be there: of one that was unloaded only schemas are left.
        """
        if name.domain is TopicDomain.NON_PERSISTENT:
            await self._work.finish(self._delete_non_persistent(name, force=force))
        else:
            await self._work.finish(self._delete(name, force, require_unused))

    async def _delete_non_persistent(self, name: TopicName, *, force: bool) -> None:
        topic = self.non_persistent.loaded().get(str(name))
        if topic is None:
            if self.non_persistent.exists(name):
                await self.cluster.delete(name, force=force)
                return
        else:
            if not force:
                require_no_clients(topic)
            await self.non_persistent.unload(name)
        if name.partition_index is None:
            await self._forget_schemas(name)

    async def _delete(
        self,
        name: TopicName,
        force: bool,
        require_unused: Callable[[], Awaitable[None]] | None,
    ) -> None:
        async with self._lock(str(name)):
            topic = self._topics.get(str(name))
            if topic is not None and not force:
                require_no_clients(topic)
            await self._close(str(name))
            # A topic's own records: a partition has none.
            alone = name.domain is TopicDomain.PERSISTENT and name.partition_index is None
            if alone:
                await self._forget_policies(name)
            async with self._acquired(name):
                if topic is None and await self.purge_leftovers_if_new(name):
                    raise TopicNotFound(f"Topic {name} does not exist: check its name.")
                await self._broker.managed_ledgers.delete(
                    name.ledger_path, require_unused=require_unused
                )
                # At once: the topic is gone, even if its other records cannot be deleted now.
                self._notify(name, exists=False)
                self.unloaded.forget(str(name))
                await self._forget_transactions(name)
            if alone:
                await self._forget_schemas(name)
            await self._broker.placement.release(name)

    async def delete_if(self, topic: Topic, still: Callable[[], bool]) -> bool:
        """Delete a loaded topic if `still()` is true in the turn of the loop in which it closes.

        Nothing is deleted if another broker opened the topic meanwhile and changed it.  Returns
        whether it was deleted.  Raises what storage raises.
        """
        return await self._work.finish(self._delete_if(topic, still))

    async def _delete_if(self, topic: Topic, still: Callable[[], bool]) -> bool:
        name, key = topic.name, str(topic.name)
        async with self._lock(key):
            if self._topics.get(key) is not topic or not still():
                return False
            known = _contents_of(topic.ledger)

            def require_unchanged(ledger: ManagedLedger) -> None:
                if _contents_of(ledger) != known:
                    raise TopicUnavailable(f"{name} was used meanwhile: it is not deleted.")

            # From here on requests for the topic wait for the lock, and load what is there then.
            await self._close(key)
            async with self._acquired(name):
                await self._broker.managed_ledgers.delete(
                    name.ledger_path, require_unchanged=require_unchanged
                )
                self._notify(name, exists=False)
                self.unloaded.forget(key)
                await self._forget_transactions(name)
            if name.partition_index is None:
                # Only now is it known that no other broker serves the topic.
                await self._forget_policies(name)
                await self._forget_schemas(name)
            await self._broker.placement.release(name)
        return True

    async def delete_partitioned(self, name: TopicName, *, force: bool) -> None:
        """Delete a partitioned topic with all its partitions.  Raises as `delete`."""
        count = await self.partitioned.count(name)
        if not count:
            raise TopicNotFound(f"{name} is not a partitioned topic: check its name.")
        partitions = [name.partition(index) for index in range(count)]
        if not force:
            await self.partition_work.run(partitions, self.cluster.require_unused)
        if name.domain is TopicDomain.PERSISTENT:
            await self._forget_policies(name)
        await self.partitioned.delete(name)

        async def delete(partition: TopicName) -> None:
            try:
                await self._delete_anywhere(partition, force=force)
            except TopicNotFound:
                return

        await self.partition_work.run(partitions, delete)
        await self._forget_schemas(name)

    async def _delete_anywhere(self, name: TopicName, *, force: bool) -> None:
        try:
            await self.delete(name, force=force)
        except OwnedElsewhere:
            await self.cluster.delete(name, force=force)

    async def _forget_transactions(self, name: TopicName) -> None:
        """Delete the records of transactions of a topic."""
        # What is left after a failure is deleted at the next try, or before the name is used again.
        try:
            await forget_segment(self._broker.transactions.parts.store, str(name))
        except MagnetarError as error:
            log.warning("transaction_records_left", topic=str(name), error=str(error))

    async def _forget_policies(self, name: TopicName) -> None:
        """Delete grants and policies of a topic: before its data, or a namesake inherits them."""
        if not await self.has_scalable_twin(name):
            await self._broker.namespaces.forget_grants(name)
            await self._broker.topic_policies.forget(name)

    async def _forget_schemas(self, name: TopicName) -> None:
        if not await self._has_namesake(name):
            await self._broker.schemas.forget(name.schema_id)
            if name.domain is TopicDomain.NON_PERSISTENT:
                await self._broker.namespaces.forget_grants(name)

    async def _has_namesake(self, name: TopicName) -> bool:
        """Whether a topic of another domain shares the schemas and the grants of a name."""
        others = {TopicDomain.PERSISTENT, TopicDomain.NON_PERSISTENT} - {name.domain}
        exist = [await self.exists(name.in_domain(domain)) for domain in others]
        return any(exist) or await self.has_scalable_twin(name)

    async def hand_over(self) -> None:
        """Close and release all topics, a few at a time, for other brokers to load."""
        slots = asyncio.Semaphore(DRAIN_TOPICS_AT_ONCE)

        async def unload(key: str) -> None:
            async with slots:
                await self._unload_alone(key)

        await asyncio.gather(*(unload(key) for key in list(self._topics)))
        await self.non_persistent.hand_over()

    async def close(self) -> None:
        """Close every topic; nothing is loaded from now on."""
        self._closed = True
        self._forget_owners()
        self._lists.close()
        for _, load in list(self._loads.values()):
            await asyncio.wait({load})
        await asyncio.gather(*(self._unload(key) for key in list(self._topics)))
        await self.non_persistent.close()
        await self._work.wait()

    def _lock(self, key: str) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def _notify(self, name: TopicName, *, exists: bool) -> None:
        if not exists:
            self._broker.topic_counts.deleted(name)
        if name.domain is TopicDomain.PERSISTENT:
            for listener in list(self._listeners.values()):
                listener(name, exists)


def _exists(name: TopicName) -> TopicExists:
    return TopicExists(f"{name} exists already: use it, or delete it first.")


def _contents_of(ledger: ManagedLedger) -> tuple[Position, frozenset[str]]:
    """The end of a topic and the names of its subscriptions."""
    return ledger.last_confirmed, frozenset(ledger.cursors)


def _broker_limit(messages: int, size_bytes: int) -> RateLimit | None:
    """The limit of a rate per second that the broker's settings give; None if it is 0."""
    if not messages and not size_bytes:
        return None
    return RateLimit(MessageRate(messages, size_bytes), Level.BROKER)
