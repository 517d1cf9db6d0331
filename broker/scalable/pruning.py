"""Pruning: sealed segments that nobody needs leave the layout, and their data is deleted."""

import random
from collections.abc import Callable
from dataclasses import replace

import structlog

from broker.scalable import history, layout
from broker.scalable.counters import ScalableCounters
from broker.scalable.last_changes import last_changes
from broker.scalable.layout import Segment
from broker.scalable.leftovers import Leftovers
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.records import segment_of
from broker.scalable.replicated_segments import is_needed
from broker.scalable.segment_requests import DeleteSegment, ViewSegment
from broker.scalable.segment_view import SegmentView
from broker.scalable.segments import Segments
from broker.scalable.steps import RESHAPES, Step, StepKind, new_attempt
from broker.scalable.topic_store import StoredTopic, TopicStore
from broker.topics.source_positions import REPLICATOR_PREFIX
from magnetar.protocol.names import TopicName
from storage.clock import Clock
from storage.managed_ledger.types import Retention

log = structlog.get_logger(__name__)


class Pruner:
    """Removes sealed segments from the layout once every subscription has drained them.

    A segment may go when all of these hold:

    - It is SEALED, its subscriptions are carried over, and no parent of it is in the layout.
    - No reader (a subscription that is not durable) is attached to it.
    - All its durable subscriptions have drained it, and every cluster to which it is replicated.
    - It was sealed longer ago than the namespace retains acknowledged data; if it has entries and
      no durable subscription, also longer ago than `unsubscribed_retention_ms`.

    It leaves the layout by compare-and-set first, and is deleted then.
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        clock: Clock,
        rng: random.Random,
        unsubscribed_retention_ms: int,
        leftovers: Leftovers,
        counters: ScalableCounters,
        ask_soon: Callable[[TopicName, str], None],
    ) -> None:
        """`ask_soon` has a cluster told of the subscriptions of a topic."""
        self._ask_soon = ask_soon
        self._topics = topics
        self._store = store
        self._segments = segments
        self._clock = clock
        self._rng = rng
        self._unsubscribed_retention_ms = unsubscribed_retention_ms
        self._leftovers = leftovers
        self._counters = counters

    async def prune(self, live: LiveTopic, retention: Retention) -> list[int]:
        """Prune the segments that may go; return their ids.  Raises `ConcurrentChange`."""
        if not live.layout.sealed:
            return []
        async with self._topics.lock(live.name):
            if self._topics.known(live.name) is not live:
                return []
            stored = live.stored
            gone = sorted(await self._choose(live, retention))
            return gone if gone and await self._prune(live, stored, gone, retention) else []

    async def recover(self, step: Step) -> None:
        """Finish a prune that reached the layout; forget one that did not.

        The caller holds the topic's lock.
        """
        live = await self._topics.reload_locked(step.topic)
        ends = {segment.segment_id for segment in step.ends}
        if live is not None and ends & set(live.layout.segments):
            # The change of the record may still be on its way: after this write it fails.
            await self._store.refresh(live.stored)
            live = await self._topics.reload_locked(step.topic)
        named = set(live.layout.segments) if live is not None else set()
        for segment in step.ends:
            if segment.segment_id not in named:
                await self._segments.ask(DeleteSegment(segment))
                await self._store.remove_load(step.topic, segment.segment_id)
        if live is not None:
            await self._store.complete_history(live.stored, now_ms=self._clock.now_ms())
        await self._store.end(step)
        self._leftovers.discard(step)

    async def _choose(self, live: LiveTopic, retention: Retention) -> dict[int, SegmentView]:
        gone: dict[int, SegmentView] = {}
        reshaped = await self._reshaped(live.name)
        for segment in live.layout.sealed:
            if (
                segment.segment_id in live.sealing | reshaped
                or set(segment.parent_ids) - gone.keys()
            ):
                continue
            view = await self._segments.ask(ViewSegment(segment_of(live.name, segment)))
            if self._may_go(segment, view, retention):
                gone[segment.segment_id] = view
        return gone

    async def _reshaped(self, name: TopicName) -> set[int]:
        """The parents in noted splits and merges, whose subscriptions are not carried over yet."""
        return {
            segment.segment_id
            for step in await self._store.begun_for(name)
            if step.kind in RESHAPES
            for segment in step.ends
        }

    def _may_go(self, segment: Segment, view: SegmentView, retention: Retention) -> bool:
        if not view.sealed or is_needed(view.replicator_cursors):
            return False
        subscriptions = view.subscriptions.values()
        durable = [subscription for subscription in subscriptions if subscription.durable]
        if any(s.consumers for s in subscriptions if not s.durable):
            return False
        if any(subscription.backlog for subscription in durable):
            return False
        kept_ms = retention.time_ms
        if not durable and view.entries:
            kept_ms = -1 if kept_ms < 0 else max(kept_ms, self._unsubscribed_retention_ms)
        return kept_ms >= 0 and self._clock.now_ms() - segment.sealed_at_ms >= kept_ms

    async def _prune(
        self, live: LiveTopic, found: StoredTopic, gone: list[int], retention: Retention
    ) -> bool:
        """Remove segments from the layout, then delete them; False if they have to stay."""
        before = found.record
        after = layout.prune(before.layout, gone)
        names = tuple(segment_of(live.name, before.layout.segments[s]) for s in gone)
        attempt = new_attempt(self._rng)
        step = Step(live.name, StepKind.PRUNE, after.epoch, names, attempt=attempt)
        leftover = await self._store.begin(step)
        self._leftovers.add(leftover or step)
        if leftover is not None:
            log.info("prune_postponed", topic=str(live.name), because=leftover.key)
            return False
        # While the step was being noted a client may have subscribed, or a seek gone back.
        views = await self._choose(live, retention)
        if sorted(views) != gone:
            await self._store.end(step)
            self._leftovers.discard(step)
            return False
        if not after.legacy:
            await self._segments.forget_partitioned(names)
        kept = last_changes(before.layout, before.kept_changes)
        record = replace(before, layout=after, kept_changes=kept)
        stored = await self._store.change(found, record)
        self._topics.publish(live, stored)
        # They may have copies of these segments, of which nobody tells any more (F8).
        for cursor in {name for view in views.values() for name in view.replicator_cursors}:
            self._ask_soon(live.name, cursor.removeprefix(REPLICATOR_PREFIX))
        self._counters.layout_changes[history.ChangeKind.PRUNE] += 1
        entry = history.of_prune(after, gone, now_ms=self._clock.now_ms())
        await self._store.append_history(live.name, entry)
        for segment in names:
            await self._segments.ask(DeleteSegment(segment))
            await self._store.remove_load(live.name, segment.segment_id)
        await self._store.end(step)
        self._leftovers.discard(step)
        log.info("segments_pruned", topic=str(live.name), segments=gone, epoch=after.epoch)
        return True
