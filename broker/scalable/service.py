"""The facade of scalable topics: all that the rest of the broker calls."""

import asyncio
import importlib
from collections.abc import Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import structlog

from broker.placement.typed_request import RequestHandler
from broker.scalable.auto_scaler import AutoScaler
from broker.scalable.controller_record import ControllerRecord
from broker.scalable.controllers import Controllers
from broker.scalable.counters import ScalableCounters
from broker.scalable.feed import SegmentFeeds
from broker.scalable.grace_periods import GracePeriods
from broker.scalable.history import HistoryEntry, readable
from broker.scalable.host import ScalableHost
from broker.scalable.housekeeping import Housekeeping
from broker.scalable.layout import Segment
from broker.scalable.leftovers import Leftovers
from broker.scalable.lifecycle import Lifecycle
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.load_reporter import LoadReporter
from broker.scalable.local_segments import LocalSegments
from broker.scalable.migration import Migrator
from broker.scalable.mirror import Mirrors
from broker.scalable.namespace_watch import NamespaceWatches
from broker.scalable.pruning import Pruner
from broker.scalable.records import ScalableTopicRecord, SubscriptionKind, segment_of
from broker.scalable.relay import Relays
from broker.scalable.reports import SegmentReports
from broker.scalable.reshape import Reshaper
from broker.scalable.segment_requests import (
    DropHotLedgers,
    OffloadManifest,
    OffloadSegment,
    SealSegment,
    SegmentStats,
)
from broker.scalable.segment_view import Members
from broker.scalable.segments import OwnersElsewhere, Segments
from broker.scalable.source_topics import ScalableSourceTopics
from broker.scalable.stats import TopicStats
from broker.scalable.steps import Step, StepKind
from broker.scalable.subscription_exchange import SubscriptionExchange
from broker.scalable.subscriptions import TopicSubscriptions
from broker.scalable.topic_leadership import TopicLeadership
from broker.scalable.topic_store import ScalableTopicExists, TopicStore
from broker.scalable.watch import DagSessions
from broker.topics.client_connection import ClientConnection
from broker.topics.idle_topics import IdleWatch
from broker.topics.offloading import location_of
from broker.topics.topic import Topic, TopicNotFound
from config.bounds import SEGMENT_SETTLES_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import Position
from magnetar.protocol.names import (
    NamespaceName,
    SegmentName,
    TopicDomain,
    TopicName,
    segment_name,
)
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.records import cursor_key
from storage.managed_ledger.types import MINUTE_MS, NO_RETENTION, Retention

if TYPE_CHECKING:
    # A single broker starts without the parts of a cluster.
    from broker.scalable.feed_follower import FeedFollower

T = TypeVar("T")
log = structlog.get_logger(__name__)


class ScalableTopics(SegmentReports):
    """Facade of scalable topics for connections, REST and the topic registry.

    With several brokers only the leader of a topic changes it, so every change first takes the
    lead.  A change that a client or operator began goes on when the caller goes away.
    """

    def __init__(self, broker: ScalableHost) -> None:
        self._broker = broker
        settings, clock, placement = broker.settings, broker.clock, broker.placement
        self._shared = placement.shared
        self.counters = ScalableCounters()
        self._store = TopicStore(broker.metadata)
        self._topics = LiveTopics(
            self._store,
            shared=self._shared,
            is_awaited=lambda name: self.sessions.count(name) > 0 or self.controllers.awaits(name),
        )
        self._leads = TopicLeadership(
            placement, recover=self._recover_steps_of, ended=self._lead_ended
        )
        self._mirrors = Mirrors(self)
        self._follower = self._make_follower() if self._shared else None
        self.feeds = SegmentFeeds(broker, self._topics.segment_of)
        self.local_segments = LocalSegments(
            broker, self.feeds, self._is_named, self._topics.find, self.counters
        )
        self._segments = Segments(broker, self.local_segments, self._mirrors)
        self._owners_elsewhere = OwnersElsewhere(placement, self._segments)
        # A layout reaches sessions before controllers, so that a client knows the segments that it
        # is assigned.
        self.sessions = DagSessions(
            self._topics,
            placement,
            clock,
            create_missing=self._create_missing,
            partition_count=self._partition_count,
            producers_of=self._segments.producers,
            others=self._owners_elsewhere if self._shared else None,
        )
        self._topics.on_renewal(self._renewed)
        self.relays = Relays(placement, self._is_there)
        self._grace_periods = GracePeriods(
            broker.namespaces, settings.scalable_consumer_grace_period_s
        )
        self.controllers = self._make_controllers()
        # Last, in the same turn: a producer that is refused has been sent the new layout before.
        self._topics.on_layout(self._refuse_producers)
        self.namespace_watches = NamespaceWatches(broker.metadata, self._store, broker.namespaces)
        self.replicated = ScalableSourceTopics(
            self._segments, self._read_anew, self.renew_incarnation, self._topics.on_incarnation
        )
        self.subscription_exchange = self._make_exchange()
        self._assemble_changes()
        self._work = BackgroundTasks()
        self._idle: IdleWatch[LiveTopic] = IdleWatch(settings.idle_topic_unload_s)
        self._forget = (
            placement.on_change(self._owner_changed),
            placement.on_brokers(self.sessions.all_moved),
        )

    def _make_controllers(self) -> Controllers:
        return Controllers(
            self._topics,
            self._store,
            self._segments,
            self._leads,
            ControllerRecord(self._broker),
            self._follower,
            self.relays,
            grace_periods=self._grace_periods,
            counters=self.counters,
        )

    def _make_exchange(self) -> SubscriptionExchange:
        settings = self._broker.settings
        return SubscriptionExchange(
            self._broker.placement,
            self._segments,
            self._read_anew,
            self.replicated.incarnation_of,
            self._broker.replications,
            settings.cluster_name,
            self._broker.clock,
            period_s=settings.replicated_subscriptions_snapshot_frequency_ms / 1000,
        )

    def _make_follower(self) -> "FeedFollower":
        # Not at the top: a single broker does not need the module, and starts faster without it.
        module = importlib.import_module("broker.scalable.feed_follower")
        follower: FeedFollower = module.FeedFollower(self._broker.placement, self._mirrors)
        return follower

    def _assemble_changes(self) -> None:
        """Create the parts that change topics, on request and in the background."""
        broker, settings = self._broker, self._broker.settings
        clock, leads, leftovers = broker.clock, self._leads, Leftovers()
        parts = (self._topics, self._store, self._segments, clock, broker.random)
        self._lifecycle = Lifecycle(
            *parts,
            self.controllers,
            leads,
            leftovers,
            entry_buckets=settings.scalable_topic_entry_bucket_budget,
        )
        self._reshaper = Reshaper(
            *parts,
            self._segments_sealed,
            leads.leads,
            leftovers,
            max_buckets=settings.scalable_topic_entry_bucket_max_per_segment,
            counters=self.counters,
            settles_s=SEGMENT_SETTLES_S if self._shared else 0,
        )
        self._migrator = Migrator(
            broker,
            self._topics,
            self._store,
            self._segments,
            self._reshaper,
            self._lifecycle,
            broker.random,
            self._migrated,
        )
        kept_ms = settings.unsubscribed_retention_minutes * MINUTE_MS
        ask_soon = self.subscription_exchange.ask_soon
        self._pruner = Pruner(*parts, kept_ms, leftovers, self.counters, ask_soon)
        self.load_reporter = LoadReporter(broker, self._topics, self._store)
        self.scaler = AutoScaler(
            broker,
            self._topics,
            self._store,
            self._segments,
            leads,
            self.controllers,
            self.load_reporter,
            self._reshaper,
        )
        self._subscriptions = TopicSubscriptions(*parts[:3], self.controllers)
        self._housekeeping = Housekeeping(
            self._topics,
            self._store,
            self._pruner,
            leads,
            broker.placement,
            leftovers,
            recover=self._recover,
            is_finishing=self._reshaper.is_finishing,
            finish_late=self._migrator.finish_late,
            take_in_sealed=self._reshaper.take_in_sealed,
            retention_of=self._retention_of,
            interval_s=settings.sealed_segment_prune_interval_s,
        )

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each request that other brokers send, by its kind."""
        return {
            **self._segments.request_handlers(),
            **self.feeds.request_handlers(),
            **self.subscription_exchange.request_handlers(),
        }

    # Start and stop

    async def start(self) -> None:
        """Finish the steps that a crash left, if this is the only broker; start housekeeping.

        Among several brokers the leader of each topic finishes its steps.
        """
        await self._housekeeping.start()
        self.load_reporter.start()
        self.scaler.start()

    async def stop(self) -> None:
        """End all work in the background, and give up all leads.  May be called again.

        The next start, or leader, takes up that work again.  Sessions, and followers at other
        brokers, are still sent changes until `close`.
        """
        await self.subscription_exchange.stop()
        await self.scaler.stop()
        await self.load_reporter.stop()
        await self._housekeeping.stop()
        work = [*self._work.running]
        for live in self._topics.all():
            work += live.work.running
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self.namespace_watches.stop()
        await self._leads.stop()
        await self.controllers.stop()
        if self._follower is not None:
            await self._follower.stop()

    async def close(self) -> None:
        """End everything."""
        await self.controllers.close()
        await self.stop()
        for forget in self._forget:
            forget()
        self.sessions.stop()
        self.feeds.stop()
        await self._topics.stop()

    async def _recover_steps_of(self, name: TopicName) -> None:
        await self._housekeeping.lead_taken(name)

    async def _recover(self, step: Step) -> None:
        if step.kind is StepKind.DELETE:
            await self._lifecycle.recover(step)
        elif step.kind is StepKind.PRUNE:
            await self._pruner.recover(step)
        else:
            await self._reshaper.recover(step)
            # Its clients may be connected still, if only the answer of the store was lost.
            self._migrated(step.topic)

    async def prune_all(self) -> None:
        """Run one round of housekeeping: leftovers first, then topics with sealed segments."""
        await self._housekeeping.prune_all()

    async def _retention_of(self, name: TopicName) -> Retention:
        return (await self._broker.policies.read(name)).retention or NO_RETENTION

    # Idle topics

    def needs(self, topic: Topic) -> bool:
        """Whether a segment has to stay loaded though nobody is attached to it.

        It has to while its topic is changed, and until its subscriptions are carried over.
        """
        segment = self.segment_of(topic)
        live = None if segment is None else self._topics.known(segment.parent)
        if segment is None or live is None:
            return False
        return segment.segment_id in live.sealing or self._topics.is_changing(live.name)

    async def let_go_of_idle(self, now_s: float) -> None:
        """Drop from memory the topics that nobody has used for `idle_topic_unload_s`."""
        running = self._running_topics()
        seen = (
            (live, live.uses, live.name not in running and self._is_idle(live))
            for live in self._topics.all()
        )
        for live in self._idle.observe(seen, now_s):
            # Checked again, as unloading others took time.
            if self._is_idle(live) and not self._runs_segments(live):
                self._topics.unload(live)
                await self.controllers.unload(live.name)
                if self._is_idle(live) and not self._runs_segments(live):
                    await self._leads.give_up(live.name)

    def _running_topics(self) -> set[TopicName]:
        """The topics whose records have to be followed, as segments of them run here."""
        if not self._shared:
            return set()
        # Ordinary topics that became segments are SEALED, which keeps their topic busy by itself.
        names = (topic.name for topic in self._broker.topics.loaded().values())
        return {segment_name(name).parent for name in names if name.domain is TopicDomain.SEGMENT}

    def _runs_segments(self, live: LiveTopic) -> bool:
        """Whether `_running_topics` has a topic, without going through all loaded ones."""
        segments = live.layout.segments.values() if self._shared else ()
        return any(self._segments.running(segment_of(live.name, each)) for each in segments)

    def _is_idle(self, live: LiveTopic) -> bool:
        """Whether nobody uses a topic, its segments aside."""
        # Topics with sealed segments stay in memory, as each round of pruning reads them.
        busy = live.layout.sealed or live.sealing or live.work.busy
        return not (
            busy
            or self._topics.is_changing(live.name)
            or self.sessions.count(live.name)
            or not self.controllers.is_idle(live.name)
        )

    # Topics

    async def create(
        self, name: TopicName, *, segments: int, properties: Mapping[str, str]
    ) -> None:
        """Create a topic.

        Raises `ScalableTopicExists`, `IllegalSegmentCount`, `InvalidTopicName`, `TooManyTopics`.
        """
        await self._work.finish(self._create(name, segments=segments, properties=properties))

    async def _create(
        self, name: TopicName, *, segments: int, properties: Mapping[str, str]
    ) -> LiveTopic:
        async with self._broker.topic_counts.room(twin(name)):
            live = await self._lifecycle.create(name, segments=segments, properties=properties)
        self._created(live.name)
        return live

    async def get(self, name: TopicName) -> ScalableTopicRecord:
        """The record of a topic, as new as any change that was answered.

        Raises `ScalableTopicNotFound`.
        """
        return (await self._read_anew(name)).stored.record

    async def _read_anew(self, name: TopicName) -> LiveTopic:
        if self._shared:
            await self._topics.refresh(twin(name))
        return await self._topics.get(name)

    async def renew_incarnation(self, name: TopicName, known: int | None) -> int:
        """Draw another incarnation for a topic if it has the one that is `known`, or none.

        Answers the one that it has then.  Any broker may do it.  Raises `ScalableTopicNotFound`,
        `ConcurrentChange`.
        """
        return await self._work.finish(self._lifecycle.renew_incarnation(name, known))

    async def exists(self, name: TopicName) -> bool:
        """Whether there is a topic of that name."""
        return await self._topics.find(name) is not None

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Full names of the topics of a namespace that have all these properties, in order."""
        return [str(name) for name in await self._store.find(namespace, list(filters.items()))]

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic with its data.

        Raises `ScalableTopicNotFound`; without `force` also `ScalableTopicInUse`.
        """
        await self._work.finish(self._delete(name, force=force))

    async def _delete(self, name: TopicName, *, force: bool) -> None:
        await self._lead(name)
        await self._lifecycle.delete(
            name, force=force, before=lambda: self._forget_policies_unless_shared(name)
        )
        await self._leads.give_up(twin(name))
        if not await self._has_regular_twin(name):
            await self._broker.schemas.forget(twin(name).schema_id)

    async def _forget_policies_unless_shared(self, name: TopicName) -> None:
        # Before the topic goes, or a namesake could inherit them.
        if not await self._has_regular_twin(name):
            await self._broker.namespaces.forget_grants(name)
            await self._broker.topic_policies.forget(name)

    async def _has_regular_twin(self, name: TopicName) -> bool:
        """Whether a persistent topic has the same local name, and is no segment of it."""
        live = self._topics.known(twin(name))
        if "/" in name.local_name or (live is not None and live.layout.legacy):
            return False
        return await self._broker.topics.exists(twin(name).in_domain(TopicDomain.PERSISTENT))

    async def migrate(self, name: TopicName, *, force: bool) -> None:
        """Make an ordinary topic scalable.  Raises as `Migrator.migrate`, and `NotController`."""
        await self._work.finish(self._migrate(twin(name), force=force))

    async def _migrate(self, name: TopicName, *, force: bool) -> None:
        if self._shared:
            await self._leads.take_to_change(name)
        try:
            await self._migrator.migrate(name, force=force)
        except MagnetarError:
            if self._topics.known(name) is None:
                await self._leads.give_up(name)
            raise

    def asks_layouts(self, connection: ClientConnection) -> bool:
        """Whether a client has asked for layouts of topics over a connection."""
        return self.sessions.had(connection)

    async def has_legacy_segments(self, name: TopicName) -> bool:
        """Whether a scalable topic was made of an ordinary one that is not all pruned yet."""
        live = await self._topics.find(name)
        return live is not None and bool(live.layout.legacy)

    async def recognise_segment(self, topic: Topic) -> None:
        """Report a sealed ordinary topic that was just loaded, if it is a legacy segment."""
        await self._topics.find(topic.name.partitioned)
        segment = self.segment_of(topic)
        if segment is not None and not topic.closing:
            self.feeds.seen(segment, topic)

    async def split(self, name: TopicName, segment_id: int) -> None:
        """Split a segment.  Raises `ScalableTopicNotFound`, `UnknownSegment`, `IllegalReshape`."""
        await self._lead_and(name, self._reshaper.split(name, segment_id))

    async def merge(self, name: TopicName, segment_ids: Collection[int]) -> None:
        """Merge neighbours, two or more.  Raises as `split`."""
        await self._lead_and(name, self._reshaper.merge(name, segment_ids))

    async def rebucket(
        self, name: TopicName, segment_ids: Collection[int], bucket_count: int
    ) -> None:
        """Give each of these segments so many entry buckets, at once.  Raises as `split`."""
        await self._lead_and(name, self._reshaper.rebucket(name, segment_ids, bucket_count))

    async def set_consumer_grace(self, name: TopicName, grace_s: int | None) -> None:
        """Set how long lost ordered consumers of a topic keep their segments.

        None: as long as the namespace says, or the broker.  Raises `ScalableTopicNotFound`,
        `ConcurrentChange`.
        """
        await self._lead_and(
            name,
            self._lifecycle.amend(name, lambda record: replace(record, consumer_grace_s=grace_s)),
        )

    async def applied_consumer_grace_s(self, name: TopicName) -> int:
        """The grace period in force for a topic: its own, its namespace's or the broker's."""
        live = await self._topics.get(name)
        await self._grace_periods.follow(live)
        return self._grace_periods.grace_s(live)

    async def set_auto_scale_policy(
        self, name: TopicName, override: Mapping[str, object] | None
    ) -> None:
        """Set the topic's policy of automatic splits; None removes it.

        Raises `ScalableTopicNotFound`, `InvalidAutoScalePolicy`, `ConcurrentChange`.
        """
        if override is not None:
            await self.scaler.require_fitting_topic(name, override)
        await self._lead_and(
            name,
            self._lifecycle.amend(name, lambda record: replace(record, auto_scale_policy=override)),
        )

    def require_fitting_policy(self, override: Mapping[str, object]) -> None:
        """Raise `InvalidAutoScalePolicy` if a namespace's policy does not fit the broker's."""
        self.scaler.require_fitting(override)

    async def explain_scaling(self, name: TopicName) -> dict[str, object]:
        """Return the decision of the policy of now, and why.  See `AutoScaler.explain`."""
        return await self.scaler.explain(await self._topics.get(name))

    async def history(self, name: TopicName) -> Sequence[HistoryEntry]:
        """Every change of a topic's layout, oldest first.  Raises `ScalableTopicNotFound`."""
        live = await self._topics.get(name)
        return readable(await self._store.history(live.name))

    def in_memory(self) -> Sequence[LiveTopic]:
        """The topics in memory here: all that clients of this broker use, and that it leads."""
        return self._topics.all()

    async def stats(self, name: TopicName) -> dict[str, object]:
        """A topic's statistics.  Raises `ScalableTopicNotFound`."""
        live = await self._topics.get(name)
        counted: dict[int, Members] = {}
        for segment in list(live.layout.segments.values()):
            try:
                told = await self._segments.ask(SegmentStats(segment_of(live.name, segment)))
            except TopicNotFound:
                continue
            counted[segment.segment_id] = told
        kinds = await self._store.subscriptions(live.name)
        controller = self.controllers.of(live.name)
        key_hash = (await self._broker.policies.read(live.name)).replication_key_hash
        placement = self._broker.placement
        return {
            **TopicStats(live, counted, kinds, controller, placement, key_hash).to_json(),
            "replicatedSubscriptions": await self.subscription_exchange.view(live.name),
        }

    async def segment_stats(self, name: TopicName, segment_id: int) -> dict[str, object]:
        """The statistics of one segment, from its owner.

        Raises `ScalableTopicNotFound`, and `UnknownSegment` for one that is not in the layout.
        """
        live = await self._topics.get(name)
        segment = segment_of(live.name, live.layout.segment(segment_id))
        counted = await self._segments.ask(SegmentStats(segment))
        owner = self._broker.placement.owner_of(segment.topic_name)
        return {"ownerBroker": owner.broker_id, **counted}

    async def offload(self, name: TopicName, url: str | None) -> Sequence[int]:
        """Offload the ended ledgers of all segments; the segments' ids.  Raises as `Offloads`."""
        location_of(self._broker.settings, url)  # refused here, before others are asked
        asked = []
        sealed = {each.segment_id for each in (await self._topics.get(name)).layout.sealed}
        for segment_id, segment in await self._segments_of(name):
            if segment_id in sealed:
                # The last ledger of a segment only ends when it is terminated.
                await self._segments.ask(SealSegment(segment))
            await self._segments.ask(OffloadSegment(segment, url))
            asked.append(segment_id)
        return asked

    async def offload_manifests(self, name: TopicName) -> dict[int, Members]:
        """The state of offloading of each segment, by id.  Raises `ScalableTopicNotFound`."""
        return {
            segment_id: await self._segments.ask(OffloadManifest(segment))
            for segment_id, segment in await self._segments_of(name)
        }

    async def drop_hot(self, name: TopicName) -> dict[int, Sequence[int]]:
        """Delete all ledgers whose offloaded copy is complete; their ids, by segment."""
        return {
            segment_id: await self._segments.ask(DropHotLedgers(segment, None))
            for segment_id, segment in await self._segments_of(name)
        }

    async def _segments_of(self, name: TopicName) -> Sequence[tuple[int, SegmentName]]:
        live = await self._topics.get(name)
        segments = live.layout.segments.values()
        return [(each.segment_id, segment_of(live.name, each)) for each in segments]

    # Subscriptions

    async def create_subscription(
        self,
        name: TopicName,
        subscription: str,
        *,
        kind: str,
        start: Position,
        replicated: bool = False,
    ) -> None:
        """Create a subscription of `kind` STREAM or QUEUE on every ACTIVE segment.

        `replicated`: it moves in other clusters too.
        """
        creation = self._subscriptions.create(
            name, subscription, SubscriptionKind(kind), start, replicated=replicated
        )
        await self._lead_and(name, creation)

    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Delete a subscription on every segment.

        Raises `SubscriptionNotFound`; without `force` also `ConsumerBusy`.
        """
        await self._lead_and(name, self._subscriptions.delete(name, subscription, force=force))

    async def replicated_subscription(self, name: TopicName, subscription: str) -> dict[str, bool]:
        """Whether a subscription moves in other clusters too, by the name of the segment.

        Raises `SubscriptionNotFound`.
        """
        return await self._subscriptions.replicated(name, subscription)

    async def set_replicated(self, name: TopicName, subscription: str, *, replicated: bool) -> None:
        """Have a subscription move in other clusters too, or not.

        Raises `SubscriptionNotFound`.
        """
        change = self._subscriptions.set_replicated(name, subscription, replicated=replicated)
        await self._lead_and(name, change)

    async def seek_subscription(
        self, name: TopicName, subscription: str, timestamp_ms: int
    ) -> None:
        """Seek to the first message published at or after a time, on every segment."""
        await self._lead_and(name, self._subscriptions.seek(name, subscription, timestamp_ms))

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        """Skip all messages that are stored, on every segment."""
        await self._lead_and(name, self._subscriptions.skip_all(name, subscription))

    async def skip_backlog(self, name: TopicName, subscription: str) -> None:
        """Skip all messages that are stored, of one subscription or with an empty name of all.

        Nothing is done if the topic does not have the subscription.
        """
        names = set(await self._store.subscriptions(twin(name)))
        for each in sorted({subscription} & names if subscription else names):
            await self.skip_all(name, each)

    # Segments

    async def is_sealed(self, segment: SegmentName) -> bool:
        """Whether a segment is SEALED in its topic's layout.

        The layout alone decides whether a segment exists, so a pruned one is never opened again.
        Raises `TopicNotFound` if the layout has no such segment.
        """
        # Other brokers change topics too: the record in memory may be old.
        if self._shared:
            await self._topics.refresh(segment.parent)
        live = await self._topics.find(segment.parent)
        found = None if live is None else _found(live.stored.record, segment)
        if found is None:
            raise TopicNotFound(
                f"{segment} is no segment of {segment.parent}: look the topic up again."
            )
        return not found.active

    async def inherits_subscription(self, segment: SegmentName, subscription: str) -> bool:
        """Whether a durable subscription created now on a segment begins at Earliest.

        It does while an ancestor has it and is still being sealed: then it will be carried over.
        """
        live = await self._topics.find(segment.parent)
        if live is None or segment.segment_id not in live.layout.segments:
            return False
        above = live.layout.ancestors(segment.segment_id)
        names = {segment_of(live.name, live.layout.segments[each]) for each in above}
        if self._shared:
            return await self._is_stored_on_one_being_sealed(live.name, names, subscription)
        for each in above & live.sealing:
            topic = self._segments.running(segment_of(live.name, live.layout.segments[each]))
            found = None if topic is None else topic.subscriptions.get(subscription)
            if found is not None and found.durable:
                return True
        return False

    async def _is_stored_on_one_being_sealed(
        self, name: TopicName, segments: Set[SegmentName], subscription: str
    ) -> bool:
        """Decide the same by the leader's notes and the cursors stored for the ancestors."""
        if not segments:
            return False
        steps = await self._store.begun_for(name)
        ending = {each for step in steps if step.makes for each in step.ends} & segments
        paths = [cursor_key(each.ledger_path, subscription) for each in sorted(ending)]
        records = await self._broker.metadata.get_many(paths) if paths else []
        return any(record is not None for record in records)

    # After changes

    def _renewed(self, name: TopicName) -> None:
        self._created(name)
        self._migrated(name)

    def _created(self, name: TopicName) -> None:
        """Have the clients of an earlier topic of this name ask anew."""
        self.sessions.created(name)
        self.controllers.created(name)

    def _migrated(self, name: TopicName) -> None:
        """Push the layout to clients of the ordinary topic, which refuses producers from now on."""
        self.sessions.migrated(name)
        live = self._topics.known(name)
        if live is not None:
            self._refuse_producers(live)

    def _refuse_producers(self, live: LiveTopic) -> None:
        for segment in live.layout.sealed:
            self._segments.refuse_producers(segment_of(live.name, segment))

    def _segments_sealed(self, live: LiveTopic) -> None:
        controller = self.controllers.of(live.name)
        if controller is not None:
            controller.check_drained()

    def _owner_changed(self, name: TopicName) -> None:
        """Push addresses anew: a segment, or the lead of a topic, has another owner, or none."""
        if name.domain is TopicDomain.SEGMENT:
            self._owners_elsewhere.owner_changed()
            self.sessions.moved(segment_name(name).parent)
        elif name.domain is TopicDomain.TOPIC:
            self.sessions.moved(name)

    def _lead_ended(self, name: TopicName) -> None:
        self.scaler.forget(name)
        self.controllers.lead_ended(name)
        live = self._topics.known(name)
        if live is not None:
            live.sealing.clear()
            live.work.cancel()

    async def _is_named(self, segment: SegmentName, attempt: str) -> bool:
        """Whether the stored layout has a segment, or a step of another attempt makes it.

        Notes of a topic that is gone do not count: nothing of it stays.
        """
        # The notes first: a step that ends after that has changed the record before.
        noted = await self._store.begun_for(segment.parent)
        stored = await self._topics.refresh(segment.parent)
        if stored is None:
            # Of a migration the record comes last: one that is undone spares those of another.
            noted = [step for step in noted if attempt and step.kind is StepKind.MIGRATE]
        made = any(segment in step.makes and step.attempt != attempt for step in noted)
        return made or (stored is not None and _found(stored.record, segment) is not None)

    async def _is_there(self, name: TopicName) -> bool:
        return await self._topics.refresh(name) is not None

    # Names of clients

    async def _create_missing(self, name: TopicName) -> LiveTopic | None:
        """Create a topic with one segment for a lookup that found none, if that is allowed."""
        settings = self._broker.settings
        policies = await self._broker.namespaces.require(name.namespace_name)
        allowed = policies.auto_topic_creation
        if allowed is None:
            allowed = settings.auto_topic_creation
        if not (allowed and settings.scalable_topic_auto_create):
            return None
        try:
            return await self._work.finish(self._create(name, segments=1, properties={}))
        except ScalableTopicExists:
            return await self._topics.find(name)

    async def _partition_count(self, name: TopicName) -> int:
        return await self._broker.topics.partitioned.count(name)

    async def _lead(self, name: TopicName) -> None:
        """Lead a topic that exists, to change it.  Raises `NotController`."""
        if self._shared:
            await self._leads.take_to_change((await self._topics.get(name)).name)

    async def _lead_and(self, name: TopicName, work: Coroutine[object, object, T]) -> T:
        """Take the lead of a topic and do `work`, even if the caller is cancelled."""
        try:
            await self._lead(name)
        except BaseException:
            work.close()
            raise
        # Not in the caller's task: it may go away, and nothing may be left half done.
        return await self._work.finish(work)


def _found(record: ScalableTopicRecord, segment: SegmentName) -> Segment | None:
    found = record.layout.segments.get(segment.segment_id)
    same = found is not None and segment_of(segment.parent, found) == segment
    return found if same else None
