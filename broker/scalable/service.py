"""Scalable topics as the rest of the broker sees them.

Rules:

- `start` finishes what a crash left half done before anybody is let in; `stop` ends all work in
  the background, which the next start takes up again.
- A segment exists by the word of its topic's layout alone: `segment_backing` decides whether it may
  be opened, so a pruned one never comes back to life.
- Changes that a client or operator began go on when he goes away.
- With several brokers only the one that leads a topic changes it, so every change begins by taking
  the lead; it is also the leader who takes up what was left half done.
"""

import asyncio
import importlib
from collections.abc import Coroutine, Mapping, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

import structlog

from broker.placement.typed_request import RequestHandler
from broker.policies.namespaces import retention
from broker.scalable.controller_record import ControllerRecord
from broker.scalable.controllers import Controllers
from broker.scalable.feed import SegmentFeeds
from broker.scalable.history import HistoryEntry, readable
from broker.scalable.host import ScalableHost
from broker.scalable.housekeeping import Housekeeping
from broker.scalable.layout import Segment
from broker.scalable.leftovers import Leftovers
from broker.scalable.lifecycle import Lifecycle
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.local_segments import LocalSegments
from broker.scalable.mirror import Mirrors
from broker.scalable.namespace_watch import NamespaceWatches
from broker.scalable.pruning import Pruner
from broker.scalable.records import ScalableTopicRecord, SubscriptionKind, segment_of
from broker.scalable.relay import Relays
from broker.scalable.reports import SegmentReports, segment_of_topic
from broker.scalable.reshape import Reshaper
from broker.scalable.segment_requests import (
    DropHotLedgers,
    OffloadManifest,
    OffloadSegment,
    SealSegment,
    SegmentStats,
)
from broker.scalable.segment_view import Members
from broker.scalable.segments import Segments
from broker.scalable.stats import TopicStats
from broker.scalable.steps import Step, StepKind
from broker.scalable.subscriptions import TopicSubscriptions
from broker.scalable.topic_leadership import TopicLeadership
from broker.scalable.topic_store import ScalableTopicExists, TopicStore
from broker.scalable.watch import DagSessions
from broker.topics.idle_topics import IdleWatch
from broker.topics.offloading import location_of
from broker.topics.topic import Topic, TopicNotFound
from magnetar.protocol.ids import Position
from magnetar.protocol.names import (
    NamespaceName,
    SegmentName,
    TopicDomain,
    TopicName,
    segment_name,
)
from storage.managed_ledger.records import cursor_key
from storage.managed_ledger.types import MINUTE_MS, Retention

if TYPE_CHECKING:
    from broker.scalable.feed_follower import FeedFollower

T = TypeVar("T")
log = structlog.get_logger(__name__)


class ScalableTopics(SegmentReports):
    """Facade of scalable topics for connections, REST and the topic registry."""

    def __init__(self, broker: ScalableHost) -> None:
        self._broker = broker
        settings, clock, placement = broker.settings, broker.clock, broker.placement
        self._shared = placement.shared
        self._store = TopicStore(broker.metadata)
        self._topics = LiveTopics(
            self._store,
            shared=self._shared,
            is_awaited=lambda name: self.sessions.count(name) > 0,
        )
        self._leads = TopicLeadership(
            placement,
            recover=self._recover_steps_of,
            ended=self._lead_ended,
        )
        self._mirrors = Mirrors(self)
        self._follower = self._make_follower() if self._shared else None
        self.feeds = SegmentFeeds(broker)
        self.local_segments = LocalSegments(broker, self.feeds, self._is_named)
        self._segments = Segments(
            broker,
            self.local_segments,
            self._mirrors,
        )
        # Sessions hear of a layout before controllers do: clients know a segment they are given.
        self.sessions = DagSessions(
            self._topics,
            placement,
            clock,
            create_missing=self._create_missing,
            partition_count=self._partition_count,
        )
        self._topics.on_renewal(self.sessions.created)
        self.relays = Relays(placement, self._is_there)
        self.controllers = Controllers(
            self._topics,
            self._store,
            self._segments,
            self._leads,
            ControllerRecord(broker),
            self._follower,
            self.relays,
            grace_s=settings.scalable_consumer_grace_period_s,
        )
        # Last, in the same turn: who is refused as a producer was told the new layout before.
        self._topics.on_layout(self._refuse_producers)
        self.namespace_watches = NamespaceWatches(broker.metadata, self._store, broker.namespaces)
        self._assemble_changes()
        self._work: set[asyncio.Task[object]] = set()
        self._idle: IdleWatch[LiveTopic] = IdleWatch(settings.idle_topic_unload_s)
        self._forget = (
            placement.on_change(self._owner_changed),
            placement.on_brokers(self.sessions.all_moved),
        )

    def _make_follower(self) -> "FeedFollower":
        # Not at the top: a single broker needs none of it, and starts the sooner.
        module = importlib.import_module("broker.scalable.feed_follower")
        follower: FeedFollower = module.FeedFollower(self._broker.placement, self._mirrors)
        return follower

    def _assemble_changes(self) -> None:
        """Those who change topics, by order and by themselves."""
        broker, settings = self._broker, self._broker.settings
        clock, leads, leftovers = broker.clock, self._leads, Leftovers()
        parts = (self._topics, self._store, self._segments, clock)
        self._lifecycle = Lifecycle(*parts, self.controllers.topic_deleted, leads, leftovers)
        self._reshaper = Reshaper(*parts, self._segments_sealed, leads.leads, leftovers)
        self._pruner = Pruner(
            *parts, settings.unsubscribed_retention_minutes * MINUTE_MS, leftovers
        )
        self._subscriptions = TopicSubscriptions(
            self._topics, self._store, self._segments, self.controllers
        )
        self._housekeeping = Housekeeping(
            self._topics,
            self._store,
            self._pruner,
            leads,
            broker.placement,
            leftovers,
            recover=self._recover,
            retention_of=self._retention_of,
            interval_s=settings.sealed_segment_prune_interval_s,
        )

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each request that other brokers send, by its kind."""
        return {**self._segments.request_handlers(), **self.feeds.request_handlers()}

    # Life

    async def start(self) -> None:
        """Finish what a crash left half done, then look after topics from time to time."""
        await self._housekeeping.start()

    async def stop(self) -> None:
        """End all work in the background, and let others lead.  May be called again.

        Sessions, and followers at other brokers, are told of what goes on until `close`.
        """
        await self._housekeeping.stop()
        work: list[asyncio.Task[object]] = list(self._work)
        background = [task for live in self._topics.all() for task in live.work]
        for task in (*work, *background):
            task.cancel()
        await asyncio.gather(*work, *background, return_exceptions=True)
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

    async def prune_all(self) -> None:
        """One round of housekeeping: leftovers first, then every topic with sealed segments."""
        await self._housekeeping.prune_all()

    async def _retention_of(self, namespace: NamespaceName) -> Retention:
        settings = self._broker.settings
        policies = await self._broker.namespaces.require(namespace)
        default = retention(settings.retention_time_minutes, settings.retention_size_mb)
        return policies.retention or default

    # What nobody uses

    def needs(self, topic: Topic) -> bool:
        """Whether a segment has to stay loaded though nobody is attached to it.

        So it is while its topic is changed, and until its subscriptions are carried over.
        """
        segment = segment_of_topic(topic)
        live = None if segment is None else self._topics.known(segment.parent)
        if segment is None or live is None:
            return False
        return segment.segment_id in live.sealing or self._topics.is_changing(live.name)

    async def let_go_of_idle(self, now_s: float) -> None:
        """One look: forget topics that nobody has used for `idle_topic_unload_s`."""
        self._topics.forget_names()
        running = self._running_topics()
        seen = ((live, live.uses, self._is_idle(live, running)) for live in self._topics.all())
        for live in self._idle.look(seen, now_s):
            if self._is_idle(live, self._running_topics()):
                self._topics.let_go(live)
                await self.controllers.let_go(live.name)
                if self._is_idle(live, self._running_topics()):
                    await self._leads.give_up(live.name)

    def _running_topics(self) -> set[TopicName]:
        """Topics whose record has to be followed, because segments of them run here."""
        if not self._shared:
            return set()
        segments = map(segment_of_topic, self._broker.topics.loaded().values())
        return {segment.parent for segment in segments if segment is not None}

    def _is_idle(self, live: LiveTopic, running: Set[TopicName]) -> bool:
        """Topics with sealed segments stay: pruning looks at them again and again."""
        busy = live.layout.sealed or live.sealing or live.work or live.name in running
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
        """Make one.  Raises `ScalableTopicExists`, `IllegalSegmentCount`, `InvalidTopicName`."""
        await self._see_through(self._create(name, segments=segments, properties=properties))

    async def _create(
        self, name: TopicName, *, segments: int, properties: Mapping[str, str]
    ) -> LiveTopic:
        live = await self._lifecycle.create(name, segments=segments, properties=properties)
        self.sessions.created(live.name)
        return live

    async def get(self, name: TopicName) -> ScalableTopicRecord:
        """The record of a topic.  Raises `ScalableTopicNotFound`."""
        return (await self._topics.get(name)).stored.record

    async def exists(self, name: TopicName) -> bool:
        """Whether there is a topic of that name."""
        return await self._topics.find(name) is not None

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Full names of the topics of a namespace that have all these properties, in order."""
        return [str(name) for name in await self._store.find(namespace, list(filters.items()))]

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Remove a topic with its data.

        Raises `ScalableTopicNotFound`; without `force` also `ScalableTopicInUse`.
        """
        await self._see_through(self._delete(name, force=force))

    async def _delete(self, name: TopicName, *, force: bool) -> None:
        await self._lead(name)
        await self._lifecycle.delete(name, force=force)
        await self._leads.give_up(twin(name))
        regular = (
            twin(name).in_domain(TopicDomain.PERSISTENT) if "/" not in name.local_name else None
        )
        if regular is None or not await self._broker.topics.exists(regular):
            await self._broker.schemas.forget(twin(name).schema_id)

    async def split(self, name: TopicName, segment_id: int) -> None:
        """Split a segment.  Raises `ScalableTopicNotFound`, `UnknownSegment`, `IllegalReshape`."""
        await self._lead_and(name, self._reshaper.split(name, segment_id))

    async def merge(self, name: TopicName, first_id: int, second_id: int) -> None:
        """Merge two segments.  Raises as `split`."""
        await self._lead_and(name, self._reshaper.merge(name, first_id, second_id))

    async def history(self, name: TopicName) -> Sequence[HistoryEntry]:
        """Every change of a topic's layout, oldest first.  Raises `ScalableTopicNotFound`."""
        live = await self._topics.get(name)
        return readable(await self._store.history(live.name))

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
        return TopicStats(live, counted, kinds, controller, self._broker.placement).to_json()

    async def offload(self, name: TopicName, url: str | None) -> Sequence[int]:
        """Have what has ended of every segment copied; the segments.  Raises as `Offloads`."""
        location_of(self._broker.settings, url)  # refused here, before others are asked
        asked = []
        sealed = {each.segment_id for each in (await self._topics.get(name)).layout.sealed}
        for segment_id, segment in await self._segments_of(name):
            if segment_id in sealed:
                await self._segments.ask(
                    SealSegment(segment)
                )  # its last ledger has not ended before
            await self._segments.ask(OffloadSegment(segment, url))
            asked.append(segment_id)
        return asked

    async def offload_manifests(self, name: TopicName) -> dict[int, Members]:
        """How offloading stands with each segment.  Raises `ScalableTopicNotFound`."""
        return {
            segment_id: await self._segments.ask(OffloadManifest(segment))
            for segment_id, segment in await self._segments_of(name)
        }

    async def drop_hot(self, name: TopicName) -> dict[int, Sequence[int]]:
        """Delete all ledgers of all segments whose copy is whole; which they were."""
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
        self, name: TopicName, subscription: str, *, kind: str, start: Position
    ) -> None:
        """Make a subscription of `kind` STREAM or QUEUE on every ACTIVE segment."""
        await self._lead_and(
            name, self._subscriptions.create(name, subscription, SubscriptionKind(kind), start)
        )

    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Remove it from every segment.  Raises `SubscriptionNotFound`, `ConsumerBusy`."""
        await self._lead_and(name, self._subscriptions.delete(name, subscription, force=force))

    async def seek_subscription(
        self, name: TopicName, subscription: str, timestamp_ms: int
    ) -> None:
        """Go on with the first message published at or after a time, on every segment."""
        await self._lead_and(name, self._subscriptions.seek(name, subscription, timestamp_ms))

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        """Go on with what is published from now on, on every segment."""
        await self._lead_and(name, self._subscriptions.skip_all(name, subscription))

    # Segments

    async def is_sealed(self, segment: SegmentName) -> bool:
        """Whether the layout says SEALED of a segment.  Raises `TopicNotFound` if it names none.

        Where others change topics too, the record is read anew: what is known of it may be old.
        """
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
        """Whether a durable subscription made now on a segment begins at Earliest.

        So it is while a segment above has it and is still being sealed: it will be carried over.
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
        """The same from what is stored: the leader's notes, and cursors of the segments above."""
        if not segments:
            return False
        steps = await self._store.begun_for(name)
        ending = {each for step in steps if step.makes for each in step.ends} & segments
        paths = [cursor_key(each.ledger_path, subscription) for each in sorted(ending)]
        records = await self._broker.metadata.get_many(paths) if paths else []
        return any(record is not None for record in records)

    # What comes of changes

    def _refuse_producers(self, live: LiveTopic) -> None:
        for segment in live.layout.sealed:
            self._segments.refuse_producers(segment_of(live.name, segment))

    def _segments_sealed(self, live: LiveTopic) -> None:
        controller = self.controllers.of(live.name)
        if controller is not None:
            controller.look_at_drained()

    def _owner_changed(self, name: TopicName) -> None:
        """A segment, or the lead of a topic, has another owner now, or none."""
        if name.domain is TopicDomain.SEGMENT:
            self.sessions.moved(segment_name(name).parent)
        elif name.domain is TopicDomain.TOPIC:
            self.sessions.moved(name)

    def _lead_ended(self, name: TopicName) -> None:
        self.controllers.lead_ended(name)
        live = self._topics.known(name)
        if live is not None:
            live.sealing.clear()
            for task in live.work:
                task.cancel()

    async def _is_named(self, segment: SegmentName) -> bool:
        """Whether the stored layout has a segment."""
        stored = await self._topics.refresh(segment.parent)
        return stored is not None and _found(stored.record, segment) is not None

    async def _is_there(self, name: TopicName) -> bool:
        return await self._topics.refresh(name) is not None

    # Names of clients

    async def _create_missing(self, name: TopicName) -> LiveTopic | None:
        """A topic that a lookup asked for in vain, with one segment, if that is allowed."""
        settings = self._broker.settings
        policies = await self._broker.namespaces.require(name.namespace_name)
        allowed = policies.auto_topic_creation
        if allowed is None:
            allowed = settings.auto_topic_creation
        if not (allowed and settings.scalable_topic_auto_create):
            return None
        try:
            return await self._see_through(self._create(name, segments=1, properties={}))
        except ScalableTopicExists:
            return await self._topics.find(name)

    async def _partition_count(self, name: TopicName) -> int:
        return await self._broker.topics.partitioned.count(name)

    async def _lead(self, name: TopicName) -> None:
        """Be the one who may change a topic that is there.  `NotController`."""
        if self._shared:
            await self._leads.take_to_change((await self._topics.get(name)).name)

    async def _lead_and(self, name: TopicName, work: Coroutine[object, object, T]) -> T:
        """Change a topic that this broker leads, whatever becomes of who asked."""
        try:
            await self._lead(name)
        except BaseException:
            work.close()
            raise
        return await self._see_through(work)

    async def _see_through(self, work: Coroutine[object, object, T]) -> T:
        """Do it in a task of ours, so that it is not left half done when the caller goes away."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return await asyncio.shield(task)


def _found(record: ScalableTopicRecord, segment: SegmentName) -> Segment | None:
    found = record.layout.segments.get(segment.segment_id)
    same = found is not None and segment_of(segment.parent, found) == segment
    return found if same else None
