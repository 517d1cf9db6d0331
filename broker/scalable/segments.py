"""Sends typed requests to the owners of segments, and carries out those of other brokers."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import ClassVar, TypeVar

import structlog

from broker.placement import BrokerAddress, OwnedElsewhere, PlacementNotReady
from broker.placement.peer_failed import PeerFailed
from broker.placement.typed_request import MalformedRequest, RequestHandler, request_handlers
from broker.scalable.host import ScalableHost
from broker.scalable.local_segments import LocalSegments, begin_seal
from broker.scalable.mirror import LocalState, Mirrors, SegmentState
from broker.scalable.segment_requests import (
    SEGMENT_REQUESTS,
    CreateSubscription,
    SegmentRequest,
    ViewRunningSegment,
    ViewSegment,
)
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.topic import SubscriptionNotFound, Topic, TopicNotFound, TopicUnavailable
from config.bounds import (
    ADMIN_SESSION_WAIT_S,
    SEGMENT_CALL_S,
    SEGMENT_OWNER_HOPS,
    SEGMENT_OWNER_RETRY_PAUSE_S,
    SEGMENT_OWNER_TRIES,
)
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName
from magnetar.protocol.server_error import InternalError, MagnetarError, PeerError, ServerError

A = TypeVar("A")
log = structlog.get_logger(__name__)


class SegmentAway(PeerError):
    """The broker that was asked does not serve the segment now: ask its owner."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class SegmentCallFailed(InternalError):
    """The owner of a segment failed on a request."""


_CROSSING: Mapping[ServerError, type[MagnetarError]] = MappingProxyType(
    {
        ServerError.TOPIC_NOT_FOUND: TopicNotFound,
        ServerError.SUBSCRIPTION_NOT_FOUND: SubscriptionNotFound,
        ServerError.CONSUMER_BUSY: ConsumerBusy,
    }
)
"""Errors of the owner that are the same errors at the broker that asked, by their code."""


class Segments:
    """Has the owner of a segment, this broker or another, carry out requests.

    A single broker carries every request out itself.  Among several the owner does, or the broker
    that would be chosen to own the segment now.
    """

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
        """Have the owner of the segment carry a request out.

        Raises what the request raises, `SegmentCallFailed`, and after SEGMENT_OWNER_TRIES also
        `SegmentAway`, `OwnedElsewhere`, `PlacementNotReady` and `TopicUnavailable`.
        """
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

    async def serve(self, request: SegmentRequest[A]) -> A:
        """Carry out a request of another broker, which has looked up or chosen this one.

        Raises `OwnedElsewhere`, `PlacementNotReady`, and what the request raises.
        """
        placement = self._broker.placement
        if placement.shared:
            # Without a session this broker can take nothing: wait for the next one.
            with suppress(TimeoutError):
                async with asyncio.timeout(ADMIN_SESSION_WAIT_S):
                    await placement.live_session()
        placed = placement.place(request.segment.topic_name, authoritative=True)
        if not placed.here:
            owner_id = placed.address.broker_id
            raise OwnedElsewhere(
                f"{request.segment} is not served by {placement.broker_id}: ask {owner_id}.",
                owner_id,
            )
        return await request.run(self._local)

    def request_handlers(self) -> Mapping[str, RequestHandler]:
        """Return a handler of each kind of request, for the channels of other brokers."""
        return request_handlers(SEGMENT_REQUESTS, lambda _, request: self.serve(request))

    async def _ask_owner(self, request: SegmentRequest[A]) -> A:
        placement = self._broker.placement
        owner = placement.owner_of(request.segment.topic_name)
        for _ in range(SEGMENT_OWNER_HOPS):
            if owner.broker_id == placement.broker_id:
                return await request.run(self._local)
            try:
                return await placement.ask(owner, request, timeout_s=SEGMENT_CALL_S)
            except PeerFailed as failure:
                # It may know the owner before this broker does.
                named = placement.brokers.get(failure.owner_id)
                if named is None:
                    raise _error(owner, failure) from failure
                owner = named
            except MalformedRequest as error:
                raise _failed(owner, str(error)) from error
        raise SegmentAway(f"Brokers take each other for the owner of {request.segment}: try again.")

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

    # Reshaping

    async def prepare(
        self, child: SegmentName, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Create a segment that is in no layout yet, with these subscriptions at Earliest.

        `subscriptions` are their properties, by name.  It needs metadata only, so it is done here:
        no broker may open the segment before the layout is published.
        """
        await self._broker.topics.purge_leftovers_if_new(child.topic_name)
        ledger = await self._broker.managed_ledgers.open(child.ledger_path)
        for name, properties in subscriptions.items():
            if name not in ledger.cursors:
                await ledger.open_cursor(name, EARLIEST, properties=properties)
        if self._shared:
            # Its owner will open the ledger.
            await self._broker.managed_ledgers.unload(child.ledger_path)

    async def carry_over(self, parent: SegmentName, children: Iterable[SegmentName]) -> None:
        """Create the parent's durable subscriptions on its children, at Earliest.

        Those that exist stay as they are.
        """
        names = list((await self.ask(ViewSegment(parent))).durable)
        for child in children:
            for name in names:
                await self.ask(CreateSubscription(child, name, EARLIEST))


def _error(owner: BrokerAddress, failure: PeerFailed) -> MagnetarError:
    """Return the error that a failure of the owner is at this broker."""
    code = failure.error_code
    if isinstance(code, int) and code in _CROSSING:
        return _CROSSING[ServerError(code)](str(failure))
    if code in (None, ServerError.SERVICE_NOT_READY):
        return SegmentAway(f"{owner.broker_id} does not serve it: {failure}")
    return _failed(owner, str(failure))


def _failed(owner: BrokerAddress, reason: str) -> SegmentCallFailed:
    return SegmentCallFailed(f"{owner.broker_id} could not do it: {reason} Try again.")
