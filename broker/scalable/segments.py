"""Asks the owner of a segment, which may be this broker, to carry out a request.

Rules:

- One broker carries every request out itself.  Among several the owner does, or the broker that
  would be chosen to own the segment now.
- A broker that no longer owns the segment rejects the request.  The owner is looked up again and
  asked, SEGMENT_OWNER_TRIES times in all.
- Child ledgers that no layout names yet are made here: it takes metadata only, and nobody may open
  them before the layout is published.
- Only durable subscriptions are carried over; a reader brings its own position.
"""

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar

import structlog

from broker.placement import BrokerAddress, OwnedElsewhere, PlacementNotReady
from broker.placement.peer_failed import PeerFailed
from broker.placement.typed_request import MalformedRequest
from broker.scalable.host import ScalableHost
from broker.scalable.local_segments import LocalSegments, begin_seal
from broker.scalable.mirror import LocalState, Mirrors, SegmentState
from broker.scalable.segment_requests import (
    CreateSubscription,
    SegmentRequest,
    ViewRunningSegment,
    ViewSegment,
)
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.topic import SubscriptionNotFound, Topic, TopicNotFound, TopicUnavailable
from config.bounds import SEGMENT_CALL_S, SEGMENT_OWNER_RETRY_PAUSE_S, SEGMENT_OWNER_TRIES
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError

SEGMENT_REQUESTS_PATH = "/admin/v2/segment-requests"
"""Where the owner of a segment takes the requests of other brokers."""
A = TypeVar("A")
log = structlog.get_logger(__name__)


class SegmentAway(PeerError):
    """The broker asked does not serve the segment now: ask its owner."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class SegmentCallFailed(InternalError):
    """The owner of a segment could not do it."""


_CROSSING: Mapping[ServerError, type[MagnetarError]] = MappingProxyType(
    {
        ServerError.TOPIC_NOT_FOUND: TopicNotFound,
        ServerError.SUBSCRIPTION_NOT_FOUND: SubscriptionNotFound,
        ServerError.CONSUMER_BUSY: ConsumerBusy,
    }
)
"""Errors of the owner that are the same errors at the broker that asked, by their code."""


class Segments:
    """Sends a typed request to the owner of a segment, and to the next owner if it has moved."""

    def __init__(
        self,
        broker: ScalableHost,
        local: LocalSegments,
        mirrors: Mirrors | None = None,
        *,
        retry_pause_s: float = SEGMENT_OWNER_RETRY_PAUSE_S,
    ) -> None:
        self._broker = broker
        self._local = local
        self._shared = broker.placement.shared
        self._mirrors = mirrors
        self._retry_pause_s = retry_pause_s

    # What is known without asking

    def running(self, segment: SegmentName) -> Topic | None:
        """The segment's topic, if it is loaded here."""
        return self._local.running(segment)

    def state(self, segment: SegmentName) -> SegmentState | None:
        """What is known of a loaded segment, here or where it is followed.

        One that is being closed here may be loaded elsewhere already: that counts.
        """
        topic = self._local.running(segment)
        if topic is not None and not topic.closing:
            return LocalState(topic)
        return None if self._mirrors is None else self._mirrors.state(segment)

    def refuse_producers(self, segment: SegmentName) -> None:
        """The layout calls it SEALED: if it runs here, it takes no new producers from now on."""
        topic = self._local.running(segment)
        if topic is not None:
            begin_seal(topic)

    # At the owner

    async def load(self, segment: SegmentName) -> None:
        """Have it loaded by its owner, so that its state becomes known.  `TopicNotFound`."""
        if self._shared:
            await self.ask(ViewSegment(segment))
        else:
            await self._local.open(segment)

    async def ask(self, request: SegmentRequest[A]) -> A:
        """Have the segment's owner carry it out.  Raises what the request raises."""
        if not self._shared:
            return await request.run(self._local)
        for tried in range(1, SEGMENT_OWNER_TRIES):
            try:
                return await self._ask_owner(request)
            except (OwnedElsewhere, PlacementNotReady, SegmentAway, TopicUnavailable) as error:
                log.debug(
                    "segment_owner_asked_again", segment=str(request.segment), error=str(error)
                )
                await asyncio.sleep(self._retry_pause_s * tried)
        return await self._ask_owner(request)

    async def _ask_owner(self, request: SegmentRequest[A]) -> A:
        placement = self._broker.placement
        owner = placement.owner_of(request.segment.topic_name)
        if owner.broker_id == placement.broker_id:
            return await request.run(self._local)
        path = f"{SEGMENT_REQUESTS_PATH}/{request.KIND}"
        try:
            # Authoritative: whoever asks has looked up, or chosen, the owner.
            answer = await placement.call(
                owner,
                "POST",
                path,
                {"authoritative": "true"},
                body=request.to_json(),
                timeout_s=SEGMENT_CALL_S,
            )
            return request.answer_from_json(answer)
        except PeerFailed as failure:
            raise _error(owner, failure) from failure
        except MalformedRequest as error:
            raise _failed(owner, str(error)) from error

    async def in_use(self, segments: Iterable[SegmentName]) -> SegmentName | None:
        """The first of them that a producer or consumer is attached to."""
        for segment in segments:
            view = await self.ask(ViewRunningSegment(segment))
            if view is not None and view.in_use:
                return segment
        return None

    async def is_drained(self, segment: SegmentName, subscription: str) -> bool:
        """Whether a subscription has nothing more to get from a sealed segment."""
        return (await self.ask(ViewSegment(segment))).drained(subscription)

    # Reshaping

    async def prepare(
        self, child: SegmentName, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Make a segment that no layout names yet, with these subscriptions at Earliest."""
        await self._broker.topics.purge_leftovers_if_new(child.topic_name)
        ledger = await self._broker.managed_ledgers.open(child.ledger_path)
        for name, properties in subscriptions.items():
            if name not in ledger.cursors:
                await ledger.open_cursor(name, EARLIEST, properties=properties)
        if self._shared:
            # Whoever comes to own it opens it for himself.
            await self._broker.managed_ledgers.unload(child.ledger_path)

    async def carry_over(self, parent: SegmentName, children: Iterable[SegmentName]) -> None:
        """Give the parent's subscriptions to its children, at Earliest where they are missing."""
        names = list((await self.ask(ViewSegment(parent))).durable)
        for child in children:
            for name in names:
                await self.ask(CreateSubscription(child, name, EARLIEST))


def _error(owner: BrokerAddress, failure: PeerFailed) -> MagnetarError:
    """What the failure of the owner is here."""
    code = failure.error_code
    if isinstance(code, int) and code in _CROSSING:
        return _CROSSING[ServerError(code)](str(failure))
    if code in (None, ServerError.SERVICE_NOT_READY):
        return SegmentAway(f"{owner.broker_id} does not serve it: {failure}")
    return _failed(owner, str(failure))


def _failed(owner: BrokerAddress, reason: str) -> SegmentCallFailed:
    return SegmentCallFailed(f"{owner.broker_id} could not do it: {reason} Try again.")
