"""Splits and merges, as durable steps that a start can finish.

    PREPARED    the step is noted; child ledgers exist, with every subscription of the parents at
                Earliest; no layout names them
    PUBLISHED   the record is changed and pushed; parents take no new producers, finish what the
                attached ones have in flight, and are terminated
    SEALED      every subscription made on the parents meanwhile is carried over; the note is gone

Rules:

- The change of the record divides undo from finish: a step whose children are in the layout is
  finished, any other is undone.  While the store cannot say which, neither happens.  Before an undo
  the record is written back as it is, so that a change which is still on its way fails.
- Changes of one topic queue up behind its lock until PUBLISHED; sealing goes on beside later ones.
- Nothing is sealed before its successors are known to everyone, so sends that were on their way
  are never refused by a broker that could still take them (Apache Pulsar 5.0.0-M1 seals first).
- Who has lost the lead of a topic undoes nothing: the segments he made may be his successor's.
- Subscriptions are carried over to everything below a parent, as a child may itself have been
  split by then.
"""

import asyncio
from collections.abc import Callable

import structlog

from broker.scalable import history, layout
from broker.scalable.layout import IllegalReshape, Layout, Reshape
from broker.scalable.leftovers import Leftovers
from broker.scalable.live_topics import LiveTopic, LiveTopics, not_found, twin
from broker.scalable.records import ScalableTopicRecord, segment_of
from broker.scalable.segment_requests import DeleteSegment, SealSegment, ViewSegment
from broker.scalable.segment_view import SegmentView
from broker.scalable.segments import Segments
from broker.scalable.steps import Step, StepKind
from broker.scalable.topic_leadership import not_led
from broker.scalable.topic_store import ConcurrentChange, StoredTopic, TopicStore
from config.bounds import MAX_SEGMENTS, RESHAPE_RETRY_PAUSE_S, RESHAPE_TRIES
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import InternalError, MagnetarError
from storage.clock import Clock
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)

Change = Callable[[Layout, int], Reshape]
"""From a layout and the time in milliseconds to the layout after the change."""


class LeftoverInTheWay(InternalError):
    """An earlier change of the topic failed half-way and cannot be cleared away now: try again."""


class Reshaper:
    """Splits and merges segments: publishes the new layout, then seals the parents.

    `sealed` is called when a topic's parents have become SEALED.

    `leads`: whether this process may change a topic.
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        clock: Clock,
        sealed: Callable[[LiveTopic], None],
        leads: Callable[[TopicName], bool],
        leftovers: Leftovers,
    ) -> None:
        self._topics = topics
        self._store = store
        self._segments = segments
        self._clock = clock
        self._sealed = sealed
        self._leads = leads
        self._leftovers = leftovers

    async def split(self, name: TopicName, segment_id: int) -> None:
        """Split an ACTIVE segment in two; returns when the new layout is stored and pushed."""
        await self._reshape(name, lambda now, ms: layout.split(now, segment_id, now_ms=ms))

    async def merge(self, name: TopicName, first_id: int, second_id: int) -> None:
        """Merge two neighbours into one; returns when the new layout is stored and pushed."""
        await self._reshape(name, lambda now, ms: layout.merge(now, first_id, second_id, now_ms=ms))

    async def recover(self, step: Step) -> None:
        """Finish or undo what an earlier process (or a failure of the store) left half done.

        Under the topic's lock.
        """
        live = await self._topics.reload_locked(step.topic)
        if live is not None and not _is_published(live, step):
            # The change of the record may still be on its way: from now on it comes too late.
            await self._store.refresh(live.stored)
            live = await self._topics.reload_locked(step.topic)
        if live is None or not _is_published(live, step):
            await self._undo(step)
            return
        live.sealing.update(parent.segment_id for parent in step.ends)
        await self._finish(live, step, recorded=False)

    # PREPARED

    async def _reshape(self, name: TopicName, change: Change) -> None:
        name = twin(name)
        async with self._topics.lock(name):
            live = await self._topics.find(name)
            if live is None:
                raise not_found(name)
            before = live.stored
            reshape = change(before.record.layout, self._clock.now_ms())
            if len(reshape.layout.segments) > MAX_SEGMENTS:
                raise IllegalReshape(
                    f"{name} would have {len(reshape.layout.segments)} segments, sealed ones "
                    f"included, and may have {MAX_SEGMENTS}: let consumers drain it, then try "
                    "again."
                )
            step = _step(name, reshape)
            before = await self._begin(live, before, step)
            parents = [await self._segments.ask(ViewSegment(segment)) for segment in step.ends]
            stored = await self._change(before, step, reshape, parents)
            self._publish(live, stored, reshape)
            recorded = await self._record(live, reshape)
            self._finish_in_background(live, step, recorded=recorded)

    async def _begin(self, live: LiveTopic, before: StoredTopic, step: Step) -> StoredTopic:
        """Note the step; the record to change, which clearing a leftover away writes anew."""
        leftover = await self._store.begin(step)
        if leftover is None:
            return before
        await self.recover(leftover)
        if live.layout.epoch == before.record.layout.epoch:
            before = live.stored
            leftover = await self._store.begin(step)
        if leftover is not None:
            raise LeftoverInTheWay(
                f"An earlier change of {step.topic} was in the way and is cleared away: try again."
            )
        return before

    async def _change(
        self, before: StoredTopic, step: Step, reshape: Reshape, parents: list[SegmentView]
    ) -> StoredTopic:
        """Change the record that the reshape was made of; somebody else may have since."""
        if not self._leads(before.name):
            raise not_led(before.name)
        try:
            await self._prepare(step, parents)
            record = before.record
            after = ScalableTopicRecord(reshape.layout, record.properties, record.auto_scale_policy)
            return await self._store.change(before, after)
        except MetadataError:
            # Whether the record has changed is not known: neither undo nor go on now.
            self._leftovers.add(step)
            raise
        except ConcurrentChange:
            await self._try_to_undo(step)
            await self._topics.reload_locked(before.name)
            raise
        except MagnetarError:
            await self._try_to_undo(step)
            raise

    async def _prepare(self, step: Step, parents: list[SegmentView]) -> None:
        subscriptions = {
            name: properties for parent in parents for name, properties in parent.durable.items()
        }
        for child in step.makes:
            await self._segments.prepare(child, subscriptions)

    async def _try_to_undo(self, step: Step) -> None:
        try:
            await self._undo(step)
        except MagnetarError as error:
            self._leftovers.add(step)
            log.warning("reshape_not_undone_yet", step=step.key, error=str(error))

    async def _undo(self, step: Step) -> None:
        if not self._leads(step.topic):
            return
        for child in step.makes:
            await self._segments.ask(DeleteSegment(child))
        await self._store.end(step)
        self._leftovers.discard(step)

    # PUBLISHED

    def _publish(self, live: LiveTopic, stored: StoredTopic, reshape: Reshape) -> None:
        """Tell everybody; parents that run here refuse new producers from this turn on."""
        live.sealing.update(parent.segment_id for parent in reshape.parents)
        self._topics.publish(live, stored)
        log.info(
            "layout_changed",
            topic=str(live.name),
            epoch=reshape.layout.epoch,
            sealed=[parent.segment_id for parent in reshape.parents],
            made=[child.segment_id for child in reshape.children],
        )

    async def _record(self, live: LiveTopic, reshape: Reshape) -> bool:
        entry = history.of_reshape(reshape, now_ms=self._clock.now_ms())
        try:
            await self._store.append_history(live.name, entry)
        except MetadataError as error:
            log.warning("history_not_recorded", topic=str(live.name), error=str(error))
            return False
        return True

    # SEALED

    def _finish_in_background(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        live.work.start(self._finish_patiently(live, step, recorded=recorded))

    async def _finish_patiently(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        for tried in range(1, RESHAPE_TRIES + 1):
            try:
                await self._finish(live, step, recorded=recorded)
            except MagnetarError as error:
                log.warning("reshape_not_finished_yet", step=step.key, error=str(error))
                await asyncio.sleep(RESHAPE_RETRY_PAUSE_S * tried)
            else:
                return
        self._leftovers.add(step)
        log.error("reshape_unfinished", step=step.key, next="tried again while the broker runs")

    async def _finish(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        if not recorded:
            await self._store.complete_history(live.stored, now_ms=self._clock.now_ms())
        # What has been pruned since was sealed, and everybody had read it.
        parents = [each for each in step.ends if each.segment_id in live.layout.segments]
        results = await asyncio.gather(
            *(self._segments.ask(SealSegment(parent)) for parent in parents), return_exceptions=True
        )
        for failure in results:
            if failure is not None:
                raise failure
        for parent in parents:
            below = live.layout.descendants(parent.segment_id)
            children = [segment_of(live.name, live.layout.segments[s]) for s in sorted(below)]
            await self._segments.carry_over(parent, children)
        live.sealing.difference_update(parent.segment_id for parent in step.ends)
        self._sealed(live)
        await self._store.end(step)
        self._leftovers.discard(step)


def _step(name: TopicName, reshape: Reshape) -> Step:
    return Step(
        name,
        StepKind.SPLIT if len(reshape.parents) == 1 else StepKind.MERGE,
        reshape.layout.epoch,
        tuple(segment_of(name, parent) for parent in reshape.parents),
        tuple(segment_of(name, child) for child in reshape.children),
    )


def _is_published(live: LiveTopic, step: Step) -> bool:
    names = {segment_of(live.name, segment) for segment in live.layout.segments.values()}
    return all(child in names for child in step.makes)
