"""What changed in a shard, told as it happens: place, resume, gaps.

Rules:
- The stream is that of the leader that the map names: the stream of a leader that was replaced may
  stay open and silent.
- The place is known before the store reads anything, so no change falls between.
- After a break the stream goes on behind the last batch that was seen; batches seen twice are
  dropped.
- The follower of a shard that came later knows no place from before: what changed until it has one
  is a gap.  A defect on our side is one too.
- Servers keep notifications for a while only, and do not say when they go on behind a gap.  A jump
  of the offset tells it (on releases after 0.14 a jump may mean nothing: then a list is read once
  too often), and after an outage of half the time of keeping nothing is resumed at all.  Either
  way watchers are told to list.
"""

import asyncio
import enum
from typing import Protocol

import structlog

from config import bounds
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed, Peer
from storage.metadata.oxia.errors import Action, Failure, refused, shard_gone
from storage.metadata.oxia.loops import Loop
from storage.metadata.oxia.shards import Shards
from storage.metadata.store import MetadataError

_log = structlog.get_logger(__name__)

_ENDED = Failure(Action.RETRY, "UNAVAILABLE", "the stream of notifications ended")
_MOVED = Failure(Action.RETRY, "CANCELLED", "the shard has another leader")
_SURELY_CONNECTED_S = bounds.OXIA_KEEPALIVE_S + bounds.OXIA_KEEPALIVE_TIMEOUT_S
"""A stream that lived longer was answered by a server, even if nothing changed."""


class Step(enum.Enum):
    """What an offset means."""

    FIRST = "the place is known from here"
    NEXT = "what follows"
    REPEATED = "seen before"
    GAP = "something is missing before it"


class Place:
    """Where in a shard's notifications we are.  Pure: times are seconds of any one clock."""

    __slots__ = ("_down_since_s", "_forgotten", "_kept_s", "offset")

    def __init__(
        self, *, kept_s: float = bounds.OXIA_NOTIFICATIONS_KEPT_S, late: bool = False
    ) -> None:
        """`late`: the store has read already, so even the first place is behind a gap."""
        self.offset: int | None = None
        self._kept_s = kept_s
        self._down_since_s: float | None = None
        self._forgotten = late

    def take(self, offset: int) -> Step:
        """A batch of this offset came."""
        self._down_since_s = None
        last, self.offset = self.offset, offset
        if last is None:
            forgotten, self._forgotten = self._forgotten, False
            return Step.GAP if forgotten else Step.FIRST
        if offset <= last:
            self.offset = last
            return Step.REPEATED
        return Step.NEXT if offset == last + 1 else Step.GAP

    def lost(self, now_s: float, *, was_connected: bool) -> None:
        """The stream ended; `was_connected` if a server had answered it."""
        if self._down_since_s is None or was_connected:
            self._down_since_s = now_s

    def resume(self, now_s: float) -> int | None:
        """Behind which offset to go on; None: from now, as the servers may have forgotten more."""
        down_since_s = self._down_since_s
        if down_since_s is not None and now_s - down_since_s > self._kept_s / 2:
            self._forgotten = self._forgotten or self.offset is not None
            self.offset = None
        return self.offset


class NotificationListener(Protocol):
    """Who is told."""

    def notified(self, shard_id: int, batch: pb.NotificationBatch) -> None:
        """What one write changed."""
        ...

    def gap(self, shard_id: int) -> None:
        """Some changes were not told."""
        ...


class NotificationFollower:
    """Follows one shard.  Made on the running loop."""

    def __init__(
        self,
        shard_id: int,
        shards: Shards,
        listener: NotificationListener,
        *,
        late: bool = False,
    ) -> None:
        self.shard_id = shard_id
        self.place = Place(late=late)
        self._untold = False
        self._shards = shards
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._placed: asyncio.Future[None] = self._loop.create_future()
        self._stream: asyncio.Task[None] | None = None
        self._leader: str | None = None
        name = f"oxia-notifications-{shard_id}"
        self._following = Loop(name, self._run, shards.backoff(), self._broken)

    async def placed(self) -> None:
        """Return when the place is known.  Raises `MetadataError`."""
        try:
            async with asyncio.timeout(bounds.OXIA_REQUEST_TIMEOUT_S):
                await asyncio.shield(self._placed)
        except TimeoutError:
            raise MetadataError(
                f"Oxia's shard {self.shard_id} tells no changes: check that the shard has a leader."
            ) from None

    def led_by(self, leader: str | None) -> None:
        """The map names this leader."""
        if self._stream is not None and leader is not None and leader != self._leader:
            self._stream.cancel()

    async def close(self) -> None:
        """Stop following."""
        try:
            await self._following.stop()
        finally:
            if not self._placed.done():
                self._placed.set_exception(shard_gone(self.shard_id))
                self._placed.exception()

    def _broken(self, _defect: BaseException) -> None:
        """What was told last may not have arrived: whoever listens has to list."""
        self._untold = True
        self.place.lost(self._loop.time(), was_connected=False)

    async def _run(self) -> None:
        backoff = self._shards.backoff()
        if self._untold:
            self._listener.gap(self.shard_id)
            self._untold = False
        while True:
            began_s, before = self._loop.time(), self.place.offset
            failure = _ENDED
            try:
                await self._follow_leader(self.place.resume(began_s))
            except CallFailed as error:
                failure = error.failure
            now_s = self._loop.time()
            connected = self.place.offset != before or now_s - began_s > _SURELY_CONNECTED_S
            self.place.lost(now_s, was_connected=connected)
            if connected:
                backoff.reset()
            if failure.action is Action.TELL_OPERATOR and not self._placed.done():
                self._placed.set_exception(refused(failure, "notifications"))
            _log.info("oxia_notifications_broken", shard=self.shard_id, text=failure.text)
            await self._shards.pause(failure, backoff.pause_s())

    async def _follow_leader(self, after_offset: int | None) -> None:
        """Until the stream ends, or the shard has another leader."""
        peer = self._shards.peer(self.shard_id)
        self._leader = peer.address
        stream = self._stream = asyncio.create_task(self._follow(peer, after_offset))
        try:
            await asyncio.wait({stream})
            if stream.cancelled():
                raise CallFailed(_MOVED)
            stream.result()
        finally:
            self._stream = None
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    async def _follow(self, peer: Peer, after_offset: int | None) -> None:
        async for batch in peer.notifications(self.shard_id, after_offset):
            step = self.place.take(batch.offset)
            if step is Step.REPEATED:
                continue
            if step is Step.GAP:
                _log.warning("oxia_notifications_gap", shard=self.shard_id, offset=batch.offset)
                self._listener.gap(self.shard_id)
            if batch.notifications:
                self._listener.notified(self.shard_id, batch)
            if not self._placed.done():
                self._placed.set_result(None)
