"""Migration: an ordinary topic, partitioned or not, becomes a scalable one in place.

PREPARED    the step is noted; partitions that were never used exist, and so do the child ledgers,
            with every subscription of the partitions at Earliest; the topic has no record
PUBLISHED   the record is created and pushed to the clients of the ordinary topic; the partitions
            take no new producers, v5 clients move to the children, and the partitions are
            terminated
SEALED      every subscription made on the partitions meanwhile is carried over; the note is gone
"""

import random
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import ClassVar

import structlog

from broker.scalable import layout
from broker.scalable.host import ScalableHost
from broker.scalable.layout import Reshape
from broker.scalable.lifecycle import Lifecycle
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.records import ScalableTopicRecord, require_storable, segment_of
from broker.scalable.reshape import LeftoverInTheWay, Reshaper, step_of
from broker.scalable.segment_requests import ViewSegment
from broker.scalable.segments import Segments
from broker.scalable.steps import Step, StepKind, new_attempt
from broker.scalable.topic_store import ScalableTopicExists, StoredTopic, TopicStore
from broker.topics.topic import TopicNotFound
from broker.topics.topic_requests import (
    ListTopicSubscriptions,
    ListUnmanagedClients,
    ViewTopicProperties,
)
from magnetar.protocol.names import InvalidTopicName, SegmentName, TopicDomain, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)

SHOWN_CLIENTS = 3


class UnmanagedClientsAttached(PeerError):
    """V4 clients are attached, which would not follow the topic when it becomes scalable."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class IllegalMigration(PeerError):
    """The name is not that of a whole ordinary topic."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class Migrator:
    """Turns ordinary topics into scalable ones.

    The topic, or each partition, becomes a SEALED legacy segment under its own name, and a parent
    of every new segment.  So it is read first, with the positions that its subscriptions have, and
    order per key holds as over a split.

    The migration is published by one conditional write, which creates the topic's record.  Before
    it the ordinary topic is served as ever, and undoing the step only deletes the children.  After
    it the step is finished as a split is: see `Reshaper`, which also recovers it.

    `published` is called with the name, in the turn of the loop in which the topic became scalable.
    """

    def __init__(
        self,
        broker: ScalableHost,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        reshaper: Reshaper,
        lifecycle: Lifecycle,
        rng: random.Random,
        published: Callable[[TopicName], None],
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._store = store
        self._segments = segments
        self._reshaper = reshaper
        self._lifecycle = lifecycle
        self._rng = rng
        self._published = published

    async def migrate(self, name: TopicName, *, force: bool) -> None:
        """Make an ordinary topic scalable; returns when clients were sent the layout.

        The caller leads the topic.  Without `force` it raises `UnmanagedClientsAttached` while v4
        clients are attached.  Raises `TopicNotFound`, `IllegalMigration`, `ScalableTopicExists`,
        `IllegalSegmentCount`, `RecordTooLarge`, and what storage raises.
        """
        name = twin(name)
        async with self._topics.lock(name):
            await self._lifecycle.clear_leftover(name)
            partitions = await self._ordinary_topics(name)
            await self._require_not_compacted(name, partitions)
            await self._require_not_replicated(partitions[0])
            if not force:
                await self._require_managed(name, partitions)
            properties = await self._properties(partitions)
            reshape = layout.migrated(
                list(map(str, partitions)),
                now_ms=self._broker.clock.now_ms(),
                bucket_budget=self._broker.settings.scalable_topic_entry_bucket_budget,
            )
            step = self._step(name, reshape)
            await self._begin(step)
            record = ScalableTopicRecord(reshape.layout, properties)
            live = await self._publish(step, record, partitions, force=force)
            log.info("topic_migrated", topic=str(name), partitions=len(partitions), forced=force)
            self._reshaper.finish_in_background(live, step)

    async def finish_late(self, live: LiveTopic) -> None:
        """Finish a migration that an earlier leader published when its step was undone already.

        Nothing can make the late creation of a record fail, as nothing was there to be changed.
        Partitions that are known to be terminated are not asked again.
        """
        if live.sealed_legacy.issuperset(each.segment_id for each in live.layout.legacy.values()):
            return
        async with self._topics.lock(live.name):
            if self._topics.known(live.name) is not live or live.sealing:
                return
            if any(s.kind is StepKind.MIGRATE for s in await self._store.begun_for(live.name)):
                return
            segments = live.layout.segments
            legacy = list(live.layout.legacy.values())
            ends = [segment_of(live.name, each) for each in legacy]
            if await self._all_sealed(live, ends):
                return
            children = sorted({child for each in legacy for child in each.child_ids})
            makes = [segment_of(live.name, segments[each]) for each in children]
            epoch = legacy[0].sealed_at_epoch
            step = Step(
                live.name,
                StepKind.MIGRATE,
                epoch,
                tuple(ends),
                tuple(makes),
                new_attempt(self._rng),
                carries_sequences=True,
            )
            if await self._store.begin(step) is None:
                await self._reshaper.recover(step)
                log.warning("late_migration_finished", topic=str(live.name))

    async def _all_sealed(self, live: LiveTopic, legacy: Sequence[SegmentName]) -> bool:
        """Whether the owners of all these partitions say that they are terminated."""
        for each in legacy:
            if each.segment_id in live.sealed_legacy:
                continue
            if not (await self._segments.ask(ViewSegment(each))).sealed:
                return False
            live.sealed_legacy.add(each.segment_id)
        return True

    async def _ordinary_topics(self, name: TopicName) -> list[TopicName]:
        """The topic in the persistent domain, or its partitions in order."""
        if await self._topics.find(name) is not None:
            raise ScalableTopicExists(f"{name} is scalable already: use it.")
        if name.partition_index is not None:
            raise IllegalMigration(f"{name} is one partition: migrate {name.partitioned}.")
        try:
            ordinary = name.in_domain(TopicDomain.PERSISTENT)
        except InvalidTopicName as error:
            raise TopicNotFound(f"There is no ordinary topic {name}: check its name.") from error
        if not await self._broker.topics.exists(ordinary):
            raise TopicNotFound(f"Topic {ordinary} does not exist: create a scalable one instead.")
        count = await self._broker.topics.partitioned.count(ordinary)
        return [ordinary.partition(index) for index in range(count)] or [ordinary]

    async def _require_not_compacted(
        self, name: TopicName, partitions: Sequence[TopicName]
    ) -> None:
        """Raise `IllegalMigration` if compaction keeps data: as a segment nothing would move it."""
        topics = self._broker.topics

        async def subscriptions(partition: TopicName) -> list[str]:
            return await topics.cluster.ask(ListTopicSubscriptions(partition))

        found = await topics.partition_work.run(partitions, subscriptions)
        if any(COMPACTION_CURSOR in each for each in found):
            raise IllegalMigration(
                f"{name} is compacted, and scalable topics are not: set compactionThreshold to 0, "
                f"delete the subscription {COMPACTION_CURSOR!r}, which drops the compacted data, "
                "and migrate then."
            )

    async def _require_not_replicated(self, name: TopicName) -> None:
        """Raise `IllegalMigration` if a list names other clusters.

        There the topic of the name is an ordinary one, to which no segments are sent, and what it
        lacks yet would be sent by nobody.
        """
        names = (await self._broker.policies.read(name)).replication_clusters
        if names:
            raise IllegalMigration(
                f"{name.partitioned} is replicated among {', '.join(sorted(names))}, where it "
                "stays an ordinary topic: set its list of clusters to the local one alone, migrate "
                "it in each cluster, and set the list again."
            )

    async def _require_managed(self, name: TopicName, partitions: Sequence[TopicName]) -> None:
        topics = self._broker.topics

        async def clients(partition: TopicName) -> list[str]:
            return await topics.cluster.ask(ListUnmanagedClients(partition))

        found = await topics.partition_work.run(partitions, clients)
        attached = [client for each in found for client in each]
        if attached:
            shown = ", ".join(attached[:SHOWN_CLIENTS])
            more = len(attached) - SHOWN_CLIENTS
            others = f" and {more} more" if more > 0 else ""
            raise UnmanagedClientsAttached(
                f"{name} has v4 clients, which would not follow ({shown}{others}): close them, or "
                "migrate with force=true, and they get TopicTerminated."
            )

    async def _properties(self, partitions: Sequence[TopicName]) -> dict[str, str]:
        """The properties that users gave the topic."""
        first = partitions[0]
        if first.partition_index is None:
            properties = await self._broker.topics.cluster.ask(ViewTopicProperties(first))
        else:
            found = await self._broker.topics.partitioned.find(first.partitioned)
            properties = {} if found is None else dict(found.properties)
        require_storable(properties)
        return properties

    def _step(self, name: TopicName, reshape: Reshape) -> Step:
        return step_of(name, reshape, new_attempt(self._rng))

    async def _begin(self, step: Step) -> None:
        """Note the step, after undoing an earlier one."""
        leftover = await self._store.begin(step)
        if leftover is not None:
            await self._reshaper.recover(leftover)
            leftover = await self._store.begin(step)
        if leftover is not None:
            raise LeftoverInTheWay(
                f"An earlier migration of {step.topic} was in the way and is cleared away: try "
                "again."
            )

    async def _publish(
        self,
        step: Step,
        record: ScalableTopicRecord,
        partitions: Sequence[TopicName],
        *,
        force: bool,
    ) -> LiveTopic:
        """Prepare the children, create the record and push it."""

        async def create() -> LiveTopic:
            if await self._ordinary_topics(step.topic) != list(partitions):
                raise LeftoverInTheWay(f"{step.topic} got more partitions meanwhile: try again.")
            if not force:
                # Again: the children took a while.
                await self._require_managed(step.topic, partitions)
            return self._topics.add(await self._create(step.topic, record))

        live = await self._reshaper.create(step, create)
        self._published(live.name)
        return live

    async def _create(self, name: TopicName, record: ScalableTopicRecord) -> StoredTopic:
        try:
            return await self._store.create(name, record)
        except MetadataError:
            # The store may have written the record all the same.
            stored = await self._store.load(name)
            if stored is None or stored.record != record:
                raise
            return stored
