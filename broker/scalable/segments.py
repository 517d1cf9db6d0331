"""Sends typed requests to the owners of segments, and carries out those of other brokers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import structlog

from broker.placement import Placement
from broker.placement.owner_requests import OwnerRequests
from broker.placement.typed_request import RequestHandler, request_handlers
from broker.scalable.host import ScalableHost
from broker.scalable.local_segments import LocalSegments, begin_seal
from broker.scalable.mirror import LocalState, Mirrors, SegmentState
from broker.scalable.segment_requests import (
    SEGMENT_REQUESTS,
    CreateSubscription,
    InheritSequences,
    PauseSends,
    ResumeSends,
    SegmentRequest,
    ViewFinalSequences,
    ViewRunningSegment,
    ViewSegment,
)
from broker.scalable.segment_view import CarriedSubscription
from broker.topics.carried_ids import FinalSequences, common_to_partitions
from broker.topics.producer import Producer
from broker.topics.replication import is_replicator_cursor
from broker.topics.sequence_store import AWAITED_PROPERTY, awaited_property
from broker.topics.topic import Topic
from broker.topics.topic_requests import OWNER_ERRORS
from config.bounds import OWNER_RETRY_PAUSE_S, OWNERS_WAIT_S, PAUSE_ELSEWHERE_S
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName
from magnetar.protocol.server_error import MagnetarError

A = TypeVar("A")
log = structlog.get_logger(__name__)


class OwnersElsewhere:
    """See `OtherBrokers`."""

    def __init__(self, placement: Placement, segments: "Segments") -> None:
        self._placement = placement
        self._segments = segments
        self._layouts = itertools.count()
        self._changed = asyncio.Event()

    def owner_changed(self) -> None:
        """Take note that a segment has another owner."""
        self._changed.set()
        self._changed = asyncio.Event()

    def has_owner(self, segment: SegmentName) -> bool:
        """See `OtherBrokers`."""
        return self._owner_of(segment) is not None

    async def find_owners(self, segments: Collection[SegmentName]) -> None:
        """See `OtherBrokers`."""
        unowned = [each for each in segments if not self.has_owner(each)]
        with suppress(TimeoutError):
            async with asyncio.timeout(OWNERS_WAIT_S):
                loaded = await asyncio.gather(*map(self._load, unowned))
                wanted = [each for each, done in zip(unowned, loaded, strict=True) if done]
                while not all(map(self.has_owner, wanted)):
                    await self._changed.wait()

    async def _load(self, segment: SegmentName) -> bool:
        try:
            await self._segments.load(segment)
        except MagnetarError as error:
            # The clients that look it up will find its owner.
            log.debug("segment_not_loaded_yet", segment=str(segment), error=str(error))
            return False
        return True

    def has(self, segment: SegmentName) -> bool:
        """See `OtherBrokers`."""
        owner_id = self._owner_of(segment)
        return owner_id is not None and owner_id != self._placement.broker_id

    @asynccontextmanager
    async def paused(
        self, closing: Collection[SegmentName], active: Collection[SegmentName]
    ) -> AsyncIterator[bool]:
        """See `OtherBrokers`."""
        if not closing:
            yield False
            return
        holder = f"{self._placement.broker_id}/{next(self._layouts)}"
        here = self._placement.broker_id
        closed, publishing = self._by_owner(closing), self._by_owner(active)
        asked = {}
        for owner in (closed.keys() | publishing.keys()) - {here}:
            ends, others = closed.get(owner, []), publishing.get(owner, [])
            request = PauseSends((ends or others)[0], ends, others, holder)
            asked[request.segment] = asyncio.create_task(self._pause(request))
        if asked:
            await asyncio.wait(asked.values(), timeout=PAUSE_ELSEWHERE_S)
        paused = [name for name, each in asked.items() if each.done() and each.result()]
        for each in asked.values():
            each.cancel()
        try:
            yield bool(paused)
        finally:
            await asyncio.gather(*(self._resume(ResumeSends(each, holder)) for each in paused))

    async def _pause(self, request: PauseSends) -> bool:
        try:
            return await self._segments.ask(request)
        except MagnetarError as error:
            # It costs order at most: the layout must not wait for it.
            log.debug("sends_not_paused", segment=str(request.segment), error=str(error))
            return False

    async def _resume(self, request: ResumeSends) -> None:
        try:
            await self._segments.ask(request)
        except MagnetarError as error:
            # It resumes by itself.
            log.debug("sends_not_resumed", segment=str(request.segment), error=str(error))

    def _by_owner(self, segments: Iterable[SegmentName]) -> dict[str, list[SegmentName]]:
        """Segments by the broker that owns them; those without an owner are left out."""
        found: dict[str, list[SegmentName]] = {}
        for each in segments:
            owner_id = self._owner_of(each)
            if owner_id is not None:
                found.setdefault(owner_id, []).append(each)
        return found

    def _owner_of(self, segment: SegmentName) -> str | None:
        owner = self._placement.known_owner(segment.topic_name)
        return None if owner is None else owner.broker_id


class Segments:
    """Has the owner of a segment carry out requests: see `OwnerRequests`."""

    def __init__(
        self,
        broker: ScalableHost,
        local: LocalSegments,
        mirrors: Mirrors | None = None,
        *,
        retry_pause_s: float = OWNER_RETRY_PAUSE_S,
    ) -> None:
        self._broker = broker
        self._local = local
        self._shared = broker.placement.shared
        self._mirrors = mirrors
        self._owners = OwnerRequests(
            broker.placement, local, OWNER_ERRORS, retry_pause_s=retry_pause_s
        )

    # Without a request

    def running(self, segment: SegmentName) -> Topic | None:
        """Return the topic of a segment that is loaded here."""
        return self._local.running(segment)

    def state(self, segment: SegmentName) -> SegmentState | None:
        """Return the state of a segment that is loaded here, or at a broker whose feed says so."""
        topic = self._local.running(segment)
        # While it is being closed here, another broker may have loaded it already.
        if topic is not None and not topic.closing:
            return LocalState(topic)
        return None if self._mirrors is None else self._mirrors.state(segment)

    def refuse_producers(self, segment: SegmentName) -> None:
        """Refuse new producers of a segment that is SEALED in its layout, if it is loaded here."""
        topic = self._local.running(segment)
        if topic is not None:
            begin_seal(topic)

    def producers(self, segment: SegmentName) -> Collection[Producer]:
        """The producers of a segment that is loaded here."""
        return self._local.producers(segment)

    # Requests to the owner

    async def load(self, segment: SegmentName) -> None:
        """Have the owner load a segment, so that its state becomes known.

        Raises `TopicNotFound`.
        """
        if self._shared:
            await self.ask(ViewSegment(segment))
        else:
            await self._local.open(segment)

    async def ask(self, request: SegmentRequest[A]) -> A:
        """See `OwnerRequests.ask`."""
        return await self._owners.ask(request)

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each kind of request, for the channels of other brokers."""
        return request_handlers(SEGMENT_REQUESTS, lambda _, request: self._owners.serve(request))

    async def in_use(self, segments: Iterable[SegmentName]) -> SegmentName | None:
        """Return the first of these segments that a producer or consumer is attached to."""
        for segment in segments:
            view = await self.ask(ViewRunningSegment(segment))
            if view is not None and view.in_use:
                return segment
        return None

    async def is_drained(self, segment: SegmentName, subscription: str) -> bool:
        """Return whether a subscription has drained a sealed segment."""
        return (await self.ask(ViewSegment(segment))).drained(subscription)

    async def forget_partitioned(self, segments: Iterable[SegmentName]) -> None:
        """Delete the record of the partitioned topic whose partitions are these segments, if any.

        It goes before the last partition does: a client would create that anew.
        """
        legacy = {each.legacy_topic for each in segments if each.legacy_topic is not None}
        for name in {each.partitioned for each in legacy if each.partition_index is not None}:
            await self._broker.topics.partitioned.delete(name)

    # Reshaping

    async def prepare(
        self,
        child: SegmentName,
        parents: Iterable[SegmentName],
        subscriptions: Mapping[str, CarriedSubscription],
    ) -> None:
        """Create a segment that is in no layout yet, with these cursors at Earliest.

        It needs metadata only, so it is done here: no broker may open the segment before the layout
        is published.  Until the segment has the sequence ids of its parents, it compares no message
        with them.
        """
        await self._broker.topics.purge_leftovers_if_new(child.topic_name)
        ledger = await self._broker.managed_ledgers.open(child.ledger_path)
        # Another leader may have made the segment, and its ids may be there: then it is not absent.
        if AWAITED_PROPERTY not in ledger.properties:
            await ledger.set_properties({AWAITED_PROPERTY: awaited_property(parents)})
        for name, carried in subscriptions.items():
            if name not in ledger.cursors:
                await ledger.open_cursor(
                    name,
                    EARLIEST,
                    properties=carried.properties,
                    replicated=carried.replicated,
                    replication_note=carried.completeness.note,
                    begins=is_replicator_cursor(name),
                )
        if self._shared:
            # Its owner will open the ledger.
            await self._broker.managed_ledgers.unload(child.ledger_path)

    async def carry_over(self, parent: SegmentName, children: Iterable[SegmentName]) -> None:
        """Create the parent's durable subscriptions, and positions, on its children, at Earliest.

        Those that exist stay as they are.
        """
        carried_over = (await self.ask(ViewSegment(parent))).carried
        for child in children:
            for name, carried in carried_over.items():
                await self.ask(
                    CreateSubscription(
                        child,
                        name,
                        EARLIEST,
                        carried.properties,
                        replicated=carried.replicated,
                    )
                )

    async def carry_sequences(
        self, parents: Mapping[SegmentName, int], children: Iterable[SegmentName]
    ) -> None:
        """Give the children the last sequence ids and ranges of their sealed parents, durably.

        `parents` are the times at which the layout change began that sealed them.
        """
        finals = [
            await self.ask(ViewFinalSequences(parent, changed_ms))
            for parent, changed_ms in parents.items()
        ]
        if any(parent.legacy_topic is not None for parent in parents):
            together = common_to_partitions(finals)
        else:
            together = FinalSequences.together(finals)
        for child in children:
            await self.ask(InheritSequences(child, together))
