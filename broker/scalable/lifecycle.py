"""The creation and deletion of scalable topics."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import ClassVar, Protocol

import structlog

from broker.scalable import history, layout
from broker.scalable.leftovers import Leftovers
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.records import ScalableTopicRecord, require_storable, segment_of
from broker.scalable.segment_requests import DeleteSegment
from broker.scalable.segments import Segments
from broker.scalable.steps import Step, StepKind, new_attempt
from broker.scalable.topic_leadership import TopicLeadership
from broker.scalable.topic_store import (
    ConcurrentChange,
    ScalableTopicExists,
    StoredTopic,
    TopicStore,
)
from magnetar.protocol.names import TopicName, require_creatable
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError
from storage.clock import Clock

log = structlog.get_logger(__name__)


class ScalableTopicInUse(PeerError):
    """The topic has producers or consumers, and is not deleted without force."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_BUSY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class DeletionUnfinished(InternalError):
    """Parts of a deleted topic could not be removed; they are tried again until they are gone."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class OrderedConsumers(Protocol):
    """The ordered consumers of topics; see `Controllers`."""

    async def topic_deleted(self, name: TopicName) -> None:
        """Assign segments of a topic no more."""
        ...

    def deletion_decided(self, name: TopicName, is_gone: bool) -> None:
        """Take in whether a topic that was to be deleted is gone."""
        ...


class Lifecycle:
    """Creates and deletes scalable topics, each in steps that a restart can finish.

    A topic exists as soon as its record does; segments get their ledgers when they are first used,
    so a creation that fails leaves nothing behind.  Any broker may create a topic, only its leader
    deletes it.

    A deletion is noted first; then the record goes, then the segments with their data, then all
    other records of the topic.  Its DAG sessions get no message: an error would end them for good,
    and closed connections would let clients create the topic anew.

    `consumers` are told when a deletion has begun, and when it is known whether the topic is gone:
    its record may have been changed, or the store may have failed.
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        clock: Clock,
        rng: random.Random,
        consumers: OrderedConsumers,
        leads: TopicLeadership,
        leftovers: Leftovers,
        *,
        entry_buckets: int,
    ) -> None:
        """`entry_buckets` are those of a new topic, which its segments share."""
        self._topics = topics
        self._store = store
        self._segments = segments
        self._clock = clock
        self._rng = rng
        self._consumers = consumers
        self._leads = leads
        self._leftovers = leftovers
        self._entry_buckets = entry_buckets

    async def create(
        self, name: TopicName, *, segments: int, properties: Mapping[str, str]
    ) -> LiveTopic:
        """Create a topic.

        Raises `ScalableTopicExists`, `IllegalSegmentCount`, `InvalidTopicName`, `RecordTooLarge`,
        and as `delete` if an earlier topic of that name is not all deleted.
        """
        name = twin(name)
        require_creatable(name)
        require_storable(properties)
        now_ms = self._clock.now_ms()
        first = layout.initial(segments, now_ms=now_ms, bucket_budget=self._entry_buckets)
        async with self._topics.lock(name):
            if await self._topics.find(name) is not None:
                raise ScalableTopicExists(f"{name} exists already: use it, or choose another name.")
            await self.clear_leftover(name)
            # Before the record: an entry without a topic is harmless, and no topic lacks its first.
            await self._store.append_history(name, history.of_creation(first, now_ms=now_ms))
            record = ScalableTopicRecord(first, dict(properties))
            live = self._topics.add(await self._store.create(name, record))
        log.info("scalable_topic_created", topic=str(name), segments=segments)
        return live

    async def amend(
        self, name: TopicName, change: Callable[[ScalableTopicRecord], ScalableTopicRecord]
    ) -> None:
        """Change what a topic's record says beside the layout.

        Raises `ScalableTopicNotFound`, `ConcurrentChange`.
        """
        async with self._topics.lock(twin(name)):
            live = await self._topics.get(name)
            record = change(live.stored.record)
            if record == live.stored.record:
                return
            try:
                stored = await self._store.change(live.stored, record)
            except ConcurrentChange:
                # The next try is one of what is stored.
                await self._topics.reload_locked(live.name)
                raise
            self._topics.publish(live, stored)

    async def renew_incarnation(self, name: TopicName, known: int | None) -> int:
        """Draw another incarnation for a topic if it has the one that is `known`, or none.

        The write is conditional, so no broker has to lead the topic for it.  Answers the one that
        it has then.  Raises as `amend`.
        """
        drawn = self._rng.getrandbits(64)

        def change(record: ScalableTopicRecord) -> ScalableTopicRecord:
            is_known = record.incarnation in (None, known)
            return replace(record, incarnation=drawn) if is_known else record

        await self.amend(name, change)
        found = (await self._topics.get(name)).stored.record.incarnation
        log.info("incarnation_drawn", topic=str(name), drawn=found == drawn)
        return drawn if found is None else found

    async def delete(
        self, name: TopicName, *, force: bool, before: Callable[[], Awaitable[None]]
    ) -> None:
        """Delete a topic with its data; `before` is called when nothing hinders that any more.

        Raises `ScalableTopicNotFound`, `ConcurrentChange`; without `force` also
        `ScalableTopicInUse`; `DeletionUnfinished` when the topic is gone and parts of it are not
        yet.
        """
        name = twin(name)
        async with self._topics.lock(name):
            await self._topics.get(name)
            await self.clear_leftover(name)
            live = await self._topics.get(name)
            found = live.stored
            ends = tuple(segment_of(name, s) for s in found.record.layout.segments.values())
            used = None if force else await self._segments.in_use(ends)
            if used is not None:
                raise ScalableTopicInUse(
                    f"{name} has producers or consumers (on {used}): close them, or delete with "
                    "force=true."
                )
            await before()
            step = Step(name, StepKind.DELETE, 0, ends, attempt=new_attempt(self._rng))
            leftover = await self._store.begin(step)
            if leftover is not None:
                self._leftovers.add(leftover)
                raise ConcurrentChange(f"{name} is being deleted by another request: try again.")
            self._topics.begin_deletion(live)
            try:
                await self._remove_record(live, found, step)
                await self._finish(step)
            finally:
                self._topics.end_deletion(name)
        log.info("scalable_topic_deleted", topic=str(name))

    async def recover(self, step: Step) -> None:
        """Finish a deletion, under the topic's lock.

        A topic that still has its record was not deleted, and stays.
        """
        live = await self._topics.reload_locked(step.topic)
        if live is not None:
            # The removal of the record may still be on its way: after this write it fails.
            await self._store.refresh(live.stored)
            live = await self._topics.reload_locked(step.topic)
        self._consumers.deletion_decided(step.topic, live is None)
        if live is not None:
            await self._store.end(step)
        else:
            await self._finish(step)
        self._leftovers.discard(step)

    async def clear_leftover(self, name: TopicName) -> None:
        """Finish the deletion of an earlier topic of the name.  The caller holds its lock."""
        leftover = await self._store.noted(Step(name, StepKind.DELETE, 0))
        if leftover is not None:
            # The lead is refused while the broker that deletes the topic is still at work.
            await self._leads.take(name)
            await self.recover(leftover)

    async def _remove_record(self, live: LiveTopic, found: StoredTopic, step: Step) -> None:
        await live.work.end()
        await self._consumers.topic_deleted(live.name)
        try:
            await self._store.remove(found)
        except MagnetarError:
            self._leftovers.add(step)
            raise
        self._consumers.deletion_decided(live.name, True)

    async def _finish(self, step: Step) -> None:
        """Delete the segments and all other records of a topic whose record is gone."""
        others = [s for s in await self._store.begun_for(step.topic) if s.key != step.key]
        segments = {*step.ends, *(s for other in others for s in (*other.ends, *other.makes))}
        await self._segments.forget_partitioned(segments)
        failures: list[MagnetarError] = []
        for segment in sorted(segments):
            try:
                await self._segments.ask(DeleteSegment(segment))
            except MagnetarError as error:
                failures.append(error)
        if failures:
            self._leftovers.add(step)
            raise DeletionUnfinished(
                f"{step.topic} is deleted, but {len(failures)} of its segments could not be "
                f"removed yet ({failures[0]}): they are removed in the background."
            )
        # If another leader has ended the note, the records may be those of a topic created since.
        if not self._leads.leads(step.topic) or await self._store.noted(step) != step:
            raise DeletionUnfinished(
                f"{step.topic} is led by another broker now, which removes what is left of it."
            )
        await self._store.remove_dependents(step.topic)
        for segment in segments:
            await self._store.remove_load(step.topic, segment.segment_id)
        for done in (*others, step):
            await self._store.end(done)
