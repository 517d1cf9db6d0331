"""The door to segments by name, wherever they run.

Rules:

- On one broker every call is made here, on the running topic.  With several it is made by the
  broker that owns the segment, or that would be chosen for it now.
- Owners change while they are asked: who is asked and owns it not says so, and the owner is looked
  up again, SEGMENT_OWNER_TRIES times.  All calls may be made twice.
- Child ledgers that no layout names yet are made here: it takes metadata only, and nobody may open
  them before the layout is published.
- Only durable subscriptions are carried over; a reader brings its own position.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from broker.placement import OwnedElsewhere, PlacementNotReady
from broker.scalable.local_segments import LocalSegments, begin_seal
from broker.scalable.mirror import LocalState, Mirrors, SegmentState
from broker.scalable.remote_segments import RemoteSegments, SegmentAway
from broker.scalable.segment_view import Members, SegmentView
from broker.topic import TopicUnavailable
from config.bounds import SEGMENT_OWNER_RETRY_PAUSE_S, SEGMENT_OWNER_TRIES
from protocol.ids import EARLIEST, Position
from protocol.names import SegmentName

if TYPE_CHECKING:
    from broker.service import Broker
    from broker.topic import Topic

T = TypeVar("T")
log = structlog.get_logger(__name__)


class SegmentHost(Protocol):
    """What can be asked of a segment where it runs; it is loaded if need be.

    Everything raises `TopicNotFound` for a segment that is none.
    """

    async def view(self, segment: SegmentName) -> SegmentView:
        """What is so now."""
        ...

    async def view_of_running(self, segment: SegmentName) -> SegmentView | None:
        """The same; None if it is not loaded."""
        ...

    async def create_subscription(
        self, segment: SegmentName, name: str, start: Position, properties: Mapping[str, str]
    ) -> None:
        """A durable subscription at EARLIEST or LATEST, unless it exists."""
        ...

    async def delete_subscription(self, segment: SegmentName, name: str, *, force: bool) -> None:
        """Raises `SubscriptionNotFound`, `ConsumerBusy`."""
        ...

    async def seek(self, segment: SegmentName, name: str, position: Position) -> None:
        """Go on at EARLIEST or LATEST.  Raises `SubscriptionNotFound`."""
        ...

    async def seek_to_time(self, segment: SegmentName, name: str, timestamp_ms: int) -> None:
        """Go on with the first message published at or after a time."""
        ...

    async def seal(self, segment: SegmentName) -> None:
        """Take no new producers, let attached ones finish, terminate."""
        ...

    async def delete(self, segment: SegmentName) -> None:
        """Remove a segment that no layout names (any longer)."""
        ...

    async def stats(self, segment: SegmentName) -> Members:
        """What is counted there."""
        ...

    async def offload(self, segment: SegmentName, url: str | None) -> None:
        """Have what has ended copied.  Raises `OffloadNotConfigured`, `InvalidOffloadUrl`."""
        ...

    async def offload_manifest(self, segment: SegmentName) -> Members:
        """How that stands, and what is known of the copies."""
        ...

    async def drop_hot(self, segment: SegmentName, ledger_ids: Sequence[int] | None) -> list[int]:
        """Delete ledgers (these, or all) whose copy is whole; which they were."""
        ...


class Segments:
    """See the module's rules.  `remote` is None on one broker."""

    def __init__(
        self,
        broker: "Broker",
        local: LocalSegments,
        remote: RemoteSegments | None = None,
        mirrors: Mirrors | None = None,
    ) -> None:
        self._broker = broker
        self._local = local
        self._remote = remote
        self._mirrors = mirrors

    # What is known without asking

    def running(self, segment: SegmentName) -> "Topic | None":
        """The segment's topic, if it is loaded here."""
        return self._local.running(segment)

    def state(self, segment: SegmentName) -> SegmentState | None:
        """What is known of a loaded segment, here or where it is followed."""
        topic = self._local.running(segment)
        if topic is not None:
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
        if self._remote is None:
            await self._local.open(segment)
        else:
            await self.view(segment)

    async def view(self, segment: SegmentName) -> SegmentView:
        """See `SegmentHost`."""
        return await self._at_owner(segment, lambda host: host.view(segment))

    async def create_subscription(
        self,
        segment: SegmentName,
        name: str,
        start: Position,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """See `SegmentHost`."""
        await self._at_owner(
            segment, lambda host: host.create_subscription(segment, name, start, properties or {})
        )

    async def delete_subscription(self, segment: SegmentName, name: str, *, force: bool) -> None:
        """See `SegmentHost`."""
        await self._at_owner(
            segment, lambda host: host.delete_subscription(segment, name, force=force)
        )

    async def seek(self, segment: SegmentName, name: str, position: Position) -> None:
        """See `SegmentHost`."""
        await self._at_owner(segment, lambda host: host.seek(segment, name, position))

    async def seek_to_time(self, segment: SegmentName, name: str, timestamp_ms: int) -> None:
        """See `SegmentHost`."""
        await self._at_owner(segment, lambda host: host.seek_to_time(segment, name, timestamp_ms))

    async def seal(self, segment: SegmentName) -> None:
        """See `SegmentHost`."""
        await self._at_owner(segment, lambda host: host.seal(segment))

    async def delete(self, segment: SegmentName) -> None:
        """See `SegmentHost`."""
        await self._at_owner(segment, lambda host: host.delete(segment))

    async def stats(self, segment: SegmentName) -> Members:
        """See `SegmentHost`."""
        return await self._at_owner(segment, lambda host: host.stats(segment))

    async def offload(self, segment: SegmentName, url: str | None) -> None:
        """See `SegmentHost`."""
        await self._at_owner(segment, lambda host: host.offload(segment, url))

    async def offload_manifest(self, segment: SegmentName) -> Members:
        """See `SegmentHost`."""
        return await self._at_owner(segment, lambda host: host.offload_manifest(segment))

    async def drop_hot(self, segment: SegmentName, ledger_ids: Sequence[int] | None) -> list[int]:
        """See `SegmentHost`."""
        return await self._at_owner(segment, lambda host: host.drop_hot(segment, ledger_ids))

    async def in_use(self, segments: Iterable[SegmentName]) -> SegmentName | None:
        """The first of them that a producer or consumer is attached to."""
        for segment in segments:
            view = await self._view_of_running(segment)
            if view is not None and view.in_use:
                return segment
        return None

    async def is_drained(self, segment: SegmentName, subscription: str) -> bool:
        """Whether a subscription has nothing more to get from a sealed segment."""
        return (await self.view(segment)).drained(subscription)

    async def _view_of_running(self, segment: SegmentName) -> SegmentView | None:
        return await self._at_owner(segment, lambda host: host.view_of_running(segment))

    async def _at_owner(
        self, segment: SegmentName, call: Callable[[SegmentHost], Awaitable[T]]
    ) -> T:
        if self._remote is None:
            return await call(self._local)
        for tried in range(1, SEGMENT_OWNER_TRIES):
            try:
                return await call(self._host_of(segment))
            except (OwnedElsewhere, PlacementNotReady, SegmentAway, TopicUnavailable) as error:
                log.debug("segment_owner_asked_again", segment=str(segment), error=str(error))
                await asyncio.sleep(SEGMENT_OWNER_RETRY_PAUSE_S * tried)
        return await call(self._host_of(segment))

    def _host_of(self, segment: SegmentName) -> SegmentHost:
        placement, name = self._broker.placement, segment.topic_name
        owner = placement.owner_of(name)
        if self._remote is None or owner.broker_id == placement.broker_id:
            return self._local
        return self._remote.at(owner)

    # Reshaping

    async def prepare(
        self, child: SegmentName, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Make a segment that no layout names yet, with these subscriptions at Earliest."""
        await self._broker.topics.make_way(child.topic_name)
        ledger = await self._broker.managed_ledgers.open(child.ledger_path)
        for name, properties in subscriptions.items():
            if name not in ledger.cursors:
                await ledger.open_cursor(name, EARLIEST, properties=properties)
        if self._remote is not None:
            # Whoever comes to own it opens it for himself.
            await self._broker.managed_ledgers.unload(child.ledger_path)

    async def carry_over(self, parent: SegmentName, children: Iterable[SegmentName]) -> None:
        """Give the parent's subscriptions to its children, at Earliest where they are missing."""
        names = list((await self.view(parent)).durable)
        for child in children:
            for name in names:
                await self.create_subscription(child, name, EARLIEST)
