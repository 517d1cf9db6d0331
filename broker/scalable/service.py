"""Scalable topics as the rest of the broker sees them.

Rules:

- `start` finishes what a crash left half done before anybody is let in; `stop` ends all work in
  the background, which the next start takes up again.
- A segment exists by the word of its topic's layout alone: `segment_backing` decides whether it may
  be opened, so a pruned one never comes back to life.
- Changes that a client or operator began go on when he goes away.
"""

import asyncio
import enum
from collections.abc import Coroutine, Mapping, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

import structlog

from broker.events import SegmentEvents
from broker.idle_topics import IdleWatch
from broker.namespaces import retention
from broker.scalable.controllers import Controllers
from broker.scalable.history import HistoryEntry, readable
from broker.scalable.leadership import Leadership
from broker.scalable.lifecycle import Lifecycle
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.namespace_watch import NamespaceWatches
from broker.scalable.pruning import Pruner
from broker.scalable.records import ScalableTopicRecord, SubscriptionKind, segment_of
from broker.scalable.reshape import Reshaper
from broker.scalable.segments import Segments
from broker.scalable.stats import TopicStats
from broker.scalable.steps import Step, StepKind
from broker.scalable.subscriptions import TopicSubscriptions
from broker.scalable.topic_store import ScalableTopicExists, TopicStore
from broker.scalable.watch import DagSessions
from broker.topic import TopicNotFound
from protocol.ids import Position
from protocol.names import (
    NamespaceName,
    SegmentName,
    TopicDomain,
    TopicName,
    segment_name,
)
from protocol.server_error import MagnetarError
from storage.managed_ledger_types import MINUTE_MS, Retention

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.service import Broker
    from broker.topic import Topic

T = TypeVar("T")
log = structlog.get_logger(__name__)


class SegmentBacking(enum.Enum):
    """What the layout says of a segment that it names."""

    ACTIVE = "ACTIVE"
    SEALED = "SEALED"


class ScalableTopics(SegmentEvents):
    """See the module's rules."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        settings, clock = broker.settings, broker.clock
        self._store = TopicStore(broker.metadata)
        self._topics = LiveTopics(self._store)
        self._segments = Segments(broker)
        # Sessions hear of a layout before controllers do: clients know a segment they are given.
        self.sessions = DagSessions(
            self._topics,
            broker.placement,
            clock,
            create_missing=self._create_missing,
            partition_count=self._partition_count,
        )
        self.controllers = Controllers(
            self._topics,
            self._store,
            self._segments,
            Leadership(broker),
            grace_s=settings.scalable_consumer_grace_period_s,
        )
        self.namespace_watches = NamespaceWatches(broker.metadata, self._store, broker.namespaces)
        self._lifecycle = Lifecycle(
            self._topics, self._store, self._segments, clock, self.controllers.topic_deleted
        )
        self._reshaper = Reshaper(
            self._topics, self._store, self._segments, clock, self._segments_sealed
        )
        self._pruner = Pruner(
            self._topics,
            self._store,
            self._segments,
            clock,
            settings.unsubscribed_retention_minutes * MINUTE_MS,
        )
        self._subscriptions = TopicSubscriptions(
            self._topics, self._store, self._segments, self.controllers
        )
        self._work: set[asyncio.Task[object]] = set()
        self._unrecovered: set[str] = set()
        """Keys of steps that the start could neither finish nor undo."""
        self._idle: IdleWatch[LiveTopic] = IdleWatch(settings.idle_topic_unload_s)
        self._housekeeping: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Finish what a crash left half done, then look after topics from time to time."""
        await self._recover_all({step.key for step in await self._store.begun()})
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def stop(self) -> None:
        """End all work in the background.  May be called again."""
        work: list[asyncio.Task[object]] = list(self._work)
        background = [task for live in self._topics.all() for task in live.work]
        if self._housekeeping is not None:
            background.append(self._housekeeping)
        for task in (*work, *background):
            task.cancel()
        await asyncio.gather(*work, *background, return_exceptions=True)
        await self.namespace_watches.stop()
        await self.controllers.stop()

    async def _recover_all(self, keys: Set[str]) -> None:
        """Recover those of the noted steps; what fails is tried again while the broker runs."""
        if not keys:
            return
        noted = (step for step in await self._store.begun() if step.key in keys)
        self._unrecovered.clear()
        for step in sorted(noted, key=lambda step: (step.topic, step.epoch)):
            try:
                await self._recover(step)
                log.info("step_recovered", step=step.key)
            except MagnetarError as error:
                self._unrecovered.add(step.key)
                log.error("step_not_recovered", step=step.key, error=str(error))

    async def _recover(self, step: Step) -> None:
        if step.kind is StepKind.DELETE:
            await self._lifecycle.recover(step)
        elif step.kind is StepKind.PRUNE:
            await self._pruner.recover(step)
        else:
            await self._reshaper.recover(step)

    async def _keep_house(self) -> None:
        interval_s = self._broker.settings.sealed_segment_prune_interval_s
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.prune_all()
            except MagnetarError as error:
                log.warning("housekeeping_failed", error=str(error))

    async def prune_all(self) -> None:
        """One round of housekeeping: leftovers first, then every topic with sealed segments."""
        await self._recover_all(set(self._unrecovered))
        await self._reshaper.finish_leftovers()
        await self._lifecycle.finish_leftovers()
        await self._pruner.finish_leftovers()
        for name in await self._store.with_sealed_segments():
            try:
                live = await self._topics.find(name)
                if live is not None:
                    await self._pruner.prune(live, await self._retention_of(name.namespace_name))
            except MagnetarError as error:
                log.warning("prune_failed", topic=str(name), error=str(error))

    async def _retention_of(self, namespace: NamespaceName) -> Retention:
        settings = self._broker.settings
        policies = await self._broker.namespaces.require(namespace)
        default = retention(settings.retention_time_minutes, settings.retention_size_mb)
        return policies.retention or default

    # What nobody uses

    def needs(self, topic: "Topic") -> bool:
        """Whether a segment has to stay loaded though nobody is attached to it.

        So it is while its topic is changed, and until its subscriptions are carried over.
        """
        segment = _segment_of_topic(topic)
        live = None if segment is None else self._topics.known(segment.parent)
        if segment is None or live is None:
            return False
        return segment.segment_id in live.sealing or self._topics.is_changing(live.name)

    async def let_go_of_idle(self, now_s: float) -> None:
        """One look: forget topics that nobody has used for `idle_topic_unload_s`."""
        seen = ((live, live.uses, self._is_idle(live)) for live in self._topics.all())
        for live in self._idle.look(seen, now_s):
            if self._is_idle(live):
                self._topics.let_go(live)
                await self.controllers.let_go(live.name)

    def _is_idle(self, live: LiveTopic) -> bool:
        """Topics with sealed segments stay: pruning looks at them again and again."""
        busy = live.layout.sealed or live.sealing or live.work
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

    async def list(self, namespace: NamespaceName, filters: Mapping[str, str]) -> list[str]:
        """Full names of the topics of a namespace that have all these properties, in order."""
        return [str(name) for name in await self._store.find(namespace, list(filters.items()))]

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Remove a topic with its data.

        Raises `ScalableTopicNotFound`; without `force` also `ScalableTopicInUse`.
        """
        await self._see_through(self._delete(name, force=force))

    async def _delete(self, name: TopicName, *, force: bool) -> None:
        await self._lifecycle.delete(name, force=force)
        regular = (
            twin(name).in_domain(TopicDomain.PERSISTENT) if "/" not in name.local_name else None
        )
        if regular is None or not await self._broker.topics.exists(regular):
            await self._broker.schemas.forget(twin(name).schema_id)

    async def split(self, name: TopicName, segment_id: int) -> None:
        """Split a segment.  Raises `ScalableTopicNotFound`, `UnknownSegment`, `IllegalReshape`."""
        await self._see_through(self._reshaper.split(name, segment_id))

    async def merge(self, name: TopicName, first_id: int, second_id: int) -> None:
        """Merge two segments.  Raises as `split`."""
        await self._see_through(self._reshaper.merge(name, first_id, second_id))

    async def history(self, name: TopicName) -> Sequence[HistoryEntry]:
        """Every change of a topic's layout, oldest first.  Raises `ScalableTopicNotFound`."""
        live = await self._topics.get(name)
        return readable(await self._store.history(live.name))

    async def stats(self, name: TopicName) -> dict[str, object]:
        """A topic's statistics.  Raises `ScalableTopicNotFound`."""
        live = await self._topics.get(name)
        running: dict[int, Topic] = {}
        for segment in list(live.layout.segments.values()):
            try:
                opened = await self._segments.open(segment_of(live.name, segment))
            except TopicNotFound:
                continue
            running[segment.segment_id] = opened
        kinds = await self._store.subscriptions(live.name)
        controller = self.controllers.of(live.name)
        return TopicStats(live, running, kinds, controller, self._broker.placement).to_json()

    # Subscriptions

    async def create_subscription(
        self, name: TopicName, subscription: str, *, kind: str, start: Position
    ) -> None:
        """Make a subscription of `kind` STREAM or QUEUE on every ACTIVE segment."""
        await self._see_through(
            self._subscriptions.create(name, subscription, SubscriptionKind(kind), start)
        )

    async def delete_subscription(self, name: TopicName, subscription: str, *, force: bool) -> None:
        """Remove it from every segment.  Raises `SubscriptionNotFound`, `ConsumerBusy`."""
        await self._see_through(self._subscriptions.delete(name, subscription, force=force))

    async def seek_subscription(
        self, name: TopicName, subscription: str, timestamp_ms: int
    ) -> None:
        """Go on with the first message published at or after a time, on every segment."""
        await self._see_through(self._subscriptions.seek(name, subscription, timestamp_ms))

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        """Go on with what is published from now on, on every segment."""
        await self._see_through(self._subscriptions.skip_all(name, subscription))

    # Segments

    async def segment_backing(self, segment: SegmentName) -> SegmentBacking:
        """Whether a segment may be opened, and how.  Raises `TopicNotFound`."""
        live = await self._topics.find(segment.parent)
        found = None if live is None else live.layout.segments.get(segment.segment_id)
        if live is None or found is None or segment_of(live.name, found) != segment:
            raise TopicNotFound(
                f"{segment} is no segment of {segment.parent}: look the topic up again."
            )
        return SegmentBacking.ACTIVE if found.active else SegmentBacking.SEALED

    async def inherits_subscription(self, segment: SegmentName, subscription: str) -> bool:
        """Whether a durable subscription made now on a segment begins at Earliest.

        So it is while a segment above has it and is still being sealed: it will be carried over.
        """
        live = await self._topics.find(segment.parent)
        if live is None or segment.segment_id not in live.layout.segments:
            return False
        for above in live.layout.ancestors(segment.segment_id) & live.sealing:
            name = segment_of(live.name, live.layout.segments[above])
            topic = self._segments.running(name)
            found = None if topic is None else topic.subscriptions.get(subscription)
            if found is not None and found.durable:
                return True
        return False

    # SegmentEvents

    def consumer_attached(self, topic: "Topic", subscription: str, consumer: "Consumer") -> None:
        """See `SegmentEvents`."""
        segment = _segment_of_topic(topic)
        controller = None if segment is None else self.controllers.of(segment.parent)
        if segment is not None and controller is not None:
            controller.attached(segment.segment_id, subscription, consumer)

    def consumer_closed(
        self, topic: "Topic", subscription: str, consumer: "Consumer", *, by_command: bool
    ) -> None:
        """See `SegmentEvents`."""
        segment = _segment_of_topic(topic)
        controller = None if segment is None else self.controllers.of(segment.parent)
        if controller is not None:
            controller.detached(consumer, by_command=by_command)

    def subscription_drained(self, topic: "Topic", subscription: str) -> None:
        """See `SegmentEvents`."""
        self._backlog_changed(topic, subscription)

    def subscription_rewound(self, topic: "Topic", subscription: str) -> None:
        """See `SegmentEvents`."""
        self._backlog_changed(topic, subscription)

    def producers_gone(self, topic: "Topic") -> None:
        """Nothing to do: a topic that is being sealed waits for its producers itself."""

    def _backlog_changed(self, topic: "Topic", subscription: str) -> None:
        segment = _segment_of_topic(topic)
        controller = None if segment is None else self.controllers.of(segment.parent)
        if segment is not None and controller is not None:
            controller.backlog_changed(segment.segment_id, topic, subscription)

    def _segments_sealed(self, live: LiveTopic) -> None:
        controller = self.controllers.of(live.name)
        if controller is not None:
            controller.look_at_drained()

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

    async def _see_through(self, work: Coroutine[object, object, T]) -> T:
        """Do it in a task of ours, so that it is not left half done when the caller goes away."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return await asyncio.shield(task)


def _segment_of_topic(topic: "Topic") -> SegmentName | None:
    return segment_name(topic.name) if topic.name.domain is TopicDomain.SEGMENT else None
