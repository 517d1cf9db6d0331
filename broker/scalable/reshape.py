"""Splits, merges and rebuckets, as durable steps that a restart can finish.

PREPARED    the step is noted; child ledgers exist, with every subscription of the parents, and
            every position of a replicator, at Earliest; they await the parents' sequence ids; no
            layout names them
PUBLISHED   the record is changed and pushed; parents take no new producers, finish what the
            attached ones have in flight, and are terminated
SEALED      every subscription and position made on the parents meanwhile is carried over, and so
            are the last sequence ids of their producers; the note is gone
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

import structlog

from broker.scalable import history, layout
from broker.scalable.counters import ScalableCounters
from broker.scalable.layout import IllegalReshape, Layout, Reshape
from broker.scalable.leftovers import Leftovers
from broker.scalable.live_topics import LiveTopic, LiveTopics, not_found, twin
from broker.scalable.records import segment_of
from broker.scalable.segment_requests import DeleteSegment, SealSegment, ViewSegment
from broker.scalable.segment_view import CarriedSubscription, SegmentView
from broker.scalable.segments import Segments
from broker.scalable.steps import Step, StepKind, new_attempt
from broker.scalable.topic_leadership import not_led
from broker.scalable.topic_store import ConcurrentChange, StoredTopic, TopicStore
from config.bounds import MAX_SEGMENTS, RESHAPE_RETRY_PAUSE_S, RESHAPE_TRIES, SEAL_WAIT_S
from magnetar.protocol.names import SegmentName, TopicName
from magnetar.protocol.server_error import InternalError, MagnetarError
from storage.clock import Clock
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)

Change = Callable[[Layout, int], Reshape]
"""Makes a new layout of a layout and the time in milliseconds."""


class LeftoverInTheWay(InternalError):
    """An earlier change of the topic was unfinished and had to be cleared away: try again."""


class Reshaper:
    """Splits, merges and rebuckets segments: publishes the new layout, then seals the parents.

    Parents are sealed only after clients were sent the children, so that no message on its way is
    refused by a broker that could still take it (Apache Pulsar 5.0.0-M1 seals first).  Changes of
    one topic wait for its lock until PUBLISHED; sealing runs beside later changes.

    A step whose children are in the stored layout is finished, any other is undone; while the store
    cannot say which it is, neither happens.  Another leader may have noted the same change as a
    step of its own: children of that one, and its note, stay.

    `sealed` is called when a topic's parents have been sealed; `leads` says whether this process
    leads a topic.
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        clock: Clock,
        rng: random.Random,
        sealed: Callable[[LiveTopic], None],
        leads: Callable[[TopicName], bool],
        leftovers: Leftovers,
        *,
        max_buckets: int,
        counters: ScalableCounters,
        settles_s: float = 0,
    ) -> None:
        """A segment gets at most `max_buckets` entry buckets.

        Until `settles_s` after a segment was made, and those before it were sealed, it is not
        changed: senders that know it are still connecting, and what they have queued would be sent
        again behind newer messages.
        """
        self._topics = topics
        self._store = store
        self._segments = segments
        self._clock = clock
        self._rng = rng
        self._sealed = sealed
        self._leads = leads
        self._leftovers = leftovers
        self._max_buckets = max_buckets
        self._counters = counters
        self._settles_ms = int(settles_s * 1000)
        self._finishing: dict[Step, asyncio.Future[None]] = {}

    # Each returns when the new layout is stored and pushed.

    async def split(self, name: TopicName, segment_id: int) -> None:
        """Split an ACTIVE segment into halves."""
        await self.reshape(name, lambda now, ms: layout.split(now, segment_id, now_ms=ms))

    async def merge(self, name: TopicName, segment_ids: Collection[int]) -> None:
        """Merge neighbours, two or more, into one."""
        most = self._max_buckets
        await self.reshape(
            name, lambda now, ms: layout.merge(now, segment_ids, now_ms=ms, max_buckets=most)
        )

    async def rebucket(
        self, name: TopicName, segment_ids: Collection[int], bucket_count: int
    ) -> None:
        """Replace ACTIVE segments, each by one with another number of entry buckets."""
        layout.require_bucket_count(bucket_count, self._max_buckets)
        await self.reshape(
            name, lambda now, ms: layout.rebucket(now, segment_ids, bucket_count, now_ms=ms)
        )

    async def recover(self, step: Step) -> None:
        """Finish or undo a step that an earlier process, or a failing store, left unfinished.

        The caller holds the topic's lock.
        """
        live = await self._topics.reload_locked(step.topic)
        if live is not None and not _is_published(live, step):
            # The change of the record may still be on its way: after this write it fails.
            await self._store.refresh(live.stored)
            live = await self._topics.reload_locked(step.topic)
        if live is None or not _is_published(live, step):
            await self._undo(step)
            return
        live.sealing.update(parent.segment_id for parent in step.ends)
        await self._finish(live, step, recorded=False)

    async def take_in_sealed(self, live: LiveTopic) -> None:
        """Take in that another process has sealed segments of a topic that this one leads.

        An earlier process may go on for a while, and finish a step that this one has tried too.  A
        segment that it has sealed may be open here, if it was loaded before: it is sealed again,
        which shows that the ledger has another owner, and then loaded anew.
        """
        # Before the notes are read: then no segment of a later step is among these.
        sealing = set(live.sealing)
        names = (segment_of(live.name, each) for each in live.layout.sealed)
        open_here = [each for each in names if self._is_open_here(each)]
        if not (sealing or open_here):
            return
        # The note of a step goes last, so what is SEALED in the layout and in no note is sealed.
        noted = {each for step in await self._store.begun_for(live.name) for each in step.ends}
        finished = sealing - {each.segment_id for each in noted}
        live.sealing -= finished
        stale = [each for each in open_here if each not in noted]
        for segment in stale:
            try:
                await self._segments.ask(SealSegment(segment))
            except MagnetarError as error:
                log.info("stale_segment_closed", segment=str(segment), because=str(error))
        if finished or stale:
            self._sealed(live)

    def _is_open_here(self, segment: SegmentName) -> bool:
        if segment.legacy_topic is not None:
            return False  # see `Migrator.finish_late`
        topic = self._segments.running(segment)
        return topic is not None and not topic.sealed

    # A topic that becomes scalable (see `migration`)

    async def create(self, step: Step, create: Callable[[], Awaitable[LiveTopic]]) -> LiveTopic:
        """Prepare the children of a noted step, and have `create` store a record that names them.

        If that fails the step is undone.  The caller holds the topic's lock.
        """
        if not self._leads(step.topic):
            raise not_led(step.topic)
        try:
            parents = [await self._segments.ask(ViewSegment(parent)) for parent in step.ends]
            await self._prepare(step, parents)
            live = await create()
        except MetadataError:
            # It is not known whether the record was created: neither undo nor finish now.
            self._leftovers.add(step)
            raise
        except MagnetarError:
            await self._try_to_undo(step)
            raise
        live.sealing.update(parent.segment_id for parent in step.ends)
        self._counters.layout_changes[history.ChangeKind.MIGRATE] += 1
        return live

    def finish_in_background(self, live: LiveTopic, step: Step) -> None:
        """Seal the parents of a published step, and carry their subscriptions over."""
        self._finish_in_background(live, step, recorded=False)

    # PREPARED

    async def reshape(self, name: TopicName, change: Change, *, cause: str = "") -> None:
        """Make a change of the layout; `cause` is the policy's sentence for the history."""
        name = twin(name)
        await self._await_settled(name, change)
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
            step = replace(step_of(name, reshape, new_attempt(self._rng)), cause=cause)
            before = await self._begin(live, before, step)
            parents = [await self._segments.ask(ViewSegment(segment)) for segment in step.ends]
            stored = await self._change(before, step, reshape, parents)
            self._publish(live, stored, reshape)
            recorded = await self._record(live, reshape, cause)
            self._finish_in_background(live, step, recorded=recorded)

    async def _await_settled(self, name: TopicName, change: Change) -> None:
        if not self._settles_ms:
            return
        live, now_ms = await self._topics.get(name), self._clock.now_ms()
        parents = change(live.layout, now_ms).parents
        names = {segment_of(live.name, each) for each in parents}
        made_by = [work for step, work in self._finishing.items() if names & set(step.makes)]
        age_ms = min(max(0, now_ms - each.created_at_ms) for each in parents)
        if made_by:
            # Senders have not left the segments before them.
            await asyncio.wait(made_by, timeout=SEAL_WAIT_S)
            age_ms = 0
        await asyncio.sleep(max(0, self._settles_ms - age_ms) / 1000)

    async def _begin(self, live: LiveTopic, before: StoredTopic, step: Step) -> StoredTopic:
        """Note the step; return the record to change, which recovering a leftover may rewrite."""
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
        """Change the record that the reshape was computed from.

        Raises `ConcurrentChange` if the record was changed since.
        """
        if not self._leads(before.name):
            raise not_led(before.name)
        try:
            await self._prepare(step, parents)
            after = replace(before.record, layout=reshape.layout)
            return await self._store.change(before, after)
        except MetadataError:
            # It is not known whether the record was changed: neither undo nor finish now.
            self._leftovers.add(step)
            raise
        except ConcurrentChange:
            # At once, whatever note stands: children that were prepared after the next leader had
            # undone the step are in no note.
            await self._try_to_undo(step)
            await self._topics.reload_locked(before.name)
            raise
        except MagnetarError:
            await self._try_to_undo(step)
            raise

    async def _prepare(self, step: Step, parents: list[SegmentView]) -> None:
        views = dict(zip(step.ends, parents, strict=True))
        for ends, makes in step.families:
            carried = [views[end].carried for end in ends]
            subscriptions = {
                name: CarriedSubscription.of_child([each.get(name) for each in carried])
                for name in dict.fromkeys(name for each in carried for name in each)
            }
            for child in makes:
                await self._segments.prepare(child, ends, subscriptions)

    async def _try_to_undo(self, step: Step) -> None:
        try:
            await self._undo(step)
        except MagnetarError as error:
            self._leftovers.add(step)
            log.warning("reshape_rollback_failed", step=step.key, error=str(error))

    async def _undo(self, step: Step) -> None:
        if not self._leads(step.topic):
            return  # the next leader undoes it
        # Of two steps that make the same children the later one answers for them: it finishes or
        # deletes them.  If each waited for the note of the other, neither would ever be undone.
        noted = await self._store.begun_for(step.topic)
        later = [each for each in noted if each.epoch >= step.epoch and each != step]
        left_to_others = {child for each in later for child in each.makes}
        for child in step.makes:
            if child not in left_to_others:
                await self._segments.ask(DeleteSegment(child, step.attempt))
        await self._store.end(step)
        self._leftovers.discard(step)

    # PUBLISHED

    def _publish(self, live: LiveTopic, stored: StoredTopic, reshape: Reshape) -> None:
        """Push the layout; parents that run here refuse new producers from this turn on."""
        live.sealing.update(parent.segment_id for parent in reshape.parents)
        self._topics.publish(live, stored)
        self._counters.layout_changes[history.ChangeKind[reshape.kind.name]] += 1
        log.info(
            "layout_changed",
            topic=str(live.name),
            epoch=reshape.layout.epoch,
            sealed=[parent.segment_id for parent in reshape.parents],
            made=[child.segment_id for child in reshape.children],
        )

    async def _record(self, live: LiveTopic, reshape: Reshape, cause: str) -> bool:
        entry = history.of_reshape(reshape, now_ms=self._clock.now_ms(), cause=cause)
        try:
            await self._store.append_history(live.name, entry)
        except MetadataError as error:
            log.warning("history_not_recorded", topic=str(live.name), error=str(error))
            return False
        return True

    # SEALED

    def is_finishing(self, step: Step) -> bool:
        """Whether a published step is being finished in the background."""
        task = self._finishing.get(step)
        return task is not None and not task.done()

    def _finish_in_background(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        work = self._finish_with_retries(live, step, recorded=recorded)
        self._finishing[step] = live.work.start(work)

    async def _finish_with_retries(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        try:
            for tried in range(1, RESHAPE_TRIES + 1):
                try:
                    await self._finish(live, step, recorded=recorded)
                except MagnetarError as error:
                    log.warning("reshape_finish_failed", step=step.key, error=str(error))
                    await asyncio.sleep(RESHAPE_RETRY_PAUSE_S * tried)
                else:
                    return
        finally:
            # Before it is a leftover: housekeeping leaves a step alone while it is being finished.
            self._finishing.pop(step, None)
        self._leftovers.add(step)
        log.error("reshape_unfinished", step=step.key, next="tried again while the broker runs")

    async def _finish(self, live: LiveTopic, step: Step, *, recorded: bool) -> None:
        if not recorded:
            await self._store.complete_history(live.stored, now_ms=self._clock.now_ms())
        # No child waits for parents that are not its own: their producers may take a while.
        await _all(self._finish_family(live, *family) for family in step.families)
        live.sealing.difference_update(parent.segment_id for parent in step.ends)
        self._sealed(live)
        await self._store.end(step)
        self._leftovers.discard(step)

    async def _finish_family(
        self, live: LiveTopic, ends: Collection[SegmentName], makes: Collection[SegmentName]
    ) -> None:
        """Seal these parents; give their subscriptions and sequence ids to the children.

        Segments below a child that was split since get the ids from that child.
        """
        segments = live.layout.segments
        # A parent that has been pruned since was sealed, and all subscriptions had drained it.
        parents = [each for each in ends if each.segment_id in segments]
        changed_ms = {each: segments[each.segment_id].sealed_at_ms for each in parents}
        await _all(self._segments.ask(SealSegment(parent)) for parent in parents)
        for parent in parents:
            # A child may itself have been split by now: all descendants get the subscriptions.
            below = live.layout.descendants(parent.segment_id)
            children = [segment_of(live.name, live.layout.segments[s]) for s in sorted(below)]
            await self._segments.carry_over(parent, children)
        # A child that has been pruned since had its ids, and passed them on.
        children = [child for child in makes if child.segment_id in live.layout.segments]
        await self._segments.carry_sequences(changed_ms, children)


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Await all of it; then raise the first error."""
    for failure in await asyncio.gather(*work, return_exceptions=True):
        if failure is not None:
            raise failure


def step_of(name: TopicName, reshape: Reshape, attempt: str = "") -> Step:
    """The step of a change of the layout, by its attempt."""
    return Step(
        name,
        StepKind[reshape.kind.name],
        reshape.layout.epoch,
        tuple(segment_of(name, parent) for parent in reshape.parents),
        tuple(segment_of(name, child) for child in reshape.children),
        attempt,
        carries_sequences=True,
    )


def _is_published(live: LiveTopic, step: Step) -> bool:
    names = {segment_of(live.name, segment) for segment in live.layout.segments.values()}
    # Children come into the layout together; one may have been pruned before a late note is found.
    return any(child in names for child in step.makes)
