"""Notifications of the changes in a shard: one stream, resumed after a break; gaps are detected."""

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
    """The relation of a batch's offset to the one before."""

    FIRST = "the position is known from here"
    NEXT = "the batch follows the last one"
    REPEATED = "the batch was seen before"
    GAP = "batches may be missing before it"


class NotificationPosition:
    """The position in a shard's notifications.  Pure: times are seconds of any one clock.

    Servers keep notifications for a limited time, and resume behind a gap without a word.
    """

    __slots__ = ("_down_since_s", "_forgotten", "_kept_s", "offset")

    def __init__(
        self, *, kept_s: float = bounds.OXIA_NOTIFICATIONS_KEPT_S, late: bool = False
    ) -> None:
        """With `late` the store has read already, so even the first position is behind a gap."""
        self.offset: int | None = None
        self._kept_s = kept_s
        self._down_since_s: float | None = None
        self._forgotten = late

    def take(self, offset: int) -> Step:
        """Note the offset of a batch that came."""
        self._down_since_s = None
        last, self.offset = self.offset, offset
        if last is None:
            forgotten, self._forgotten = self._forgotten, False
            return Step.GAP if forgotten else Step.FIRST
        if offset <= last:
            self.offset = last
            return Step.REPEATED
        # On releases after 0.14 a jump may mean nothing: then watchers list once too often.
        return Step.NEXT if offset == last + 1 else Step.GAP

    def lost(self, now_s: float, *, was_connected: bool) -> None:
        """Note that the stream ended; `was_connected` if a server had answered it."""
        if self._down_since_s is None or was_connected:
            self._down_since_s = now_s

    def resume(self, now_s: float) -> int | None:
        """The offset to resume behind; None: begin anew, as servers may have dropped later ones."""
        down_since_s = self._down_since_s
        if down_since_s is not None and now_s - down_since_s > self._kept_s / 2:
            self._forgotten = self._forgotten or self.offset is not None
            self.offset = None
        return self.offset


class NotificationListener(Protocol):
    """The receiver of notifications."""

    def notified(self, shard_id: int, batch: pb.NotificationBatch) -> None:
        """Take the changes of one write."""
        ...

    def gap(self, shard_id: int) -> None:
        """Take note that notifications may have been missed."""
        ...


class NotificationFollower:
    """Follows the notifications of one shard.  Made on the running loop.

    After a break it resumes behind the last batch; repeated batches are dropped.
    """

    def __init__(
        self,
        shard_id: int,
        shards: Shards,
        listener: NotificationListener,
        *,
        late: bool = False,
    ) -> None:
        self.shard_id = shard_id
        self.position = NotificationPosition(late=late)
        self._gap_pending = False
        self._shards = shards
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._positioned: asyncio.Future[None] = self._loop.create_future()
        self._stream: asyncio.Task[None] | None = None
        self._leader: str | None = None
        name = f"oxia-notifications-{shard_id}"
        self._stream_loop = Loop(name, self._run, shards.backoff(), self._broken)

    async def wait_positioned(self) -> None:
        """Return when the position is known.  Raises `MetadataError`."""
        # The store reads nothing before that, so no change is missed in between.
        try:
            async with asyncio.timeout(bounds.OXIA_REQUEST_TIMEOUT_S):
                await asyncio.shield(self._positioned)
        except TimeoutError:
            raise MetadataError(
                f"Oxia's shard {self.shard_id} sends no notifications: "
                "check that the shard has a leader."
            ) from None

    def set_leader(self, leader: str | None) -> None:
        """Leave the stream if the map names another leader."""
        # The stream of a leader that was replaced may stay open and silent.
        if self._stream is not None and leader is not None and leader != self._leader:
            self._stream.cancel()

    async def close(self) -> None:
        """Stop following."""
        try:
            await self._stream_loop.stop()
        finally:
            if not self._positioned.done():
                self._positioned.set_exception(shard_gone(self.shard_id))
                self._positioned.exception()

    def _broken(self, _defect: BaseException) -> None:
        # The listener may not have taken the last batch: it has to list.
        self._gap_pending = True
        self.position.lost(self._loop.time(), was_connected=False)

    async def _run(self) -> None:
        backoff = self._shards.backoff()
        if self._gap_pending:
            self._listener.gap(self.shard_id)
            self._gap_pending = False
        while True:
            began_s, before = self._loop.time(), self.position.offset
            failure = _ENDED
            try:
                await self._follow_leader(self.position.resume(began_s))
            except CallFailed as error:
                failure = error.failure
            now_s = self._loop.time()
            connected = self.position.offset != before or now_s - began_s > _SURELY_CONNECTED_S
            self.position.lost(now_s, was_connected=connected)
            if connected:
                backoff.reset()
            if failure.action is Action.TELL_OPERATOR and not self._positioned.done():
                self._positioned.set_exception(refused(failure, "notifications"))
            _log.info("oxia_notifications_broken", shard=self.shard_id, text=failure.text)
            await self._shards.pause(failure, backoff.pause_s())

    async def _follow_leader(self, after_offset: int | None) -> None:
        """Follow until the stream ends, or the shard has another leader."""
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
            step = self.position.take(batch.offset)
            if step is Step.REPEATED:
                continue
            if step is Step.GAP:
                _log.warning("oxia_notifications_gap", shard=self.shard_id, offset=batch.offset)
                self._listener.gap(self.shard_id)
            if batch.notifications:
                self._listener.notified(self.shard_id, batch)
            if not self._positioned.done():
                self._positioned.set_result(None)
