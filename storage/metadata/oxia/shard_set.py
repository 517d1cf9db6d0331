"""Writer, reader and notifications of every shard in the map of shards."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from magnetar.background_tasks import BackgroundTasks
from storage.metadata.keys import KeyFamilies
from storage.metadata.oxia.errors import defect, shard_gone
from storage.metadata.oxia.loops import log_defect
from storage.metadata.oxia.lost_writes import Answers
from storage.metadata.oxia.notifications import NotificationFollower, NotificationListener
from storage.metadata.oxia.shard_reader import ShardReader
from storage.metadata.oxia.shard_writer import ShardWriter
from storage.metadata.oxia.shards import Shards
from storage.metadata.oxia.writes import Write

_log = structlog.get_logger(__name__)

Part = NotificationFollower | ShardWriter | ShardReader


class ShardSet:
    """The writer, reader and notifications of every shard.  `start` once the map is known.

    A new shard is a gap of notifications until its position is known.  A shard that leaves the map
    is a gap too, and its queued writes are routed again.
    """

    def __init__(
        self,
        shards: Shards,
        answers: Answers,
        listener: NotificationListener,
        route_again: Callable[[Write], None],
    ) -> None:
        self.shards = shards
        self.writers: dict[int, ShardWriter] = {}
        self.readers: dict[int, ShardReader] = {}
        self._followers: dict[int, NotificationFollower] = {}
        self._answers = answers
        self._listener = listener
        self._route_again = route_again
        self._closing = BackgroundTasks()

    @property
    def families(self) -> KeyFamilies:
        """The key families, for records that other programs put."""
        return self._answers.families

    async def start(self) -> None:
        """Return when every shard sends its notifications.  Raises `MetadataError`."""
        for shard_id in self.shards.table.ids:
            self._add(shard_id)
        await asyncio.gather(*(each.wait_positioned() for each in self._followers.values()))

    def shards_changed(self) -> None:
        """Take the shards and leaders of a new map."""
        present = set(self.shards.table.ids)
        for shard_id in present - self.writers.keys():
            self._add(shard_id, late=True)
        for shard_id in self.writers.keys() - present:
            self._drop(shard_id)
        for shard_id in present:
            leader = self.shards.table.leader(shard_id)
            self.writers[shard_id].set_leader(leader)
            self._followers[shard_id].set_leader(leader)

    def reader(self, shard_id: int) -> ShardReader:
        """The reader of a shard.  Raises `ShardGone`."""
        found = self.readers.get(shard_id)
        if found is None:
            raise shard_gone(shard_id)
        return found

    async def flush(self) -> None:
        """Return when every queued write has an outcome."""
        await asyncio.gather(*(writer.flush() for writer in self.writers.values()))

    async def close(self) -> None:
        """Close all parts, those of shards that are gone included."""
        parts: list[Part] = [*self._followers.values(), *self.writers.values()]
        try:
            await self._close(*parts, *self.readers.values())
        finally:
            await self._closing.wait()

    def _add(self, shard_id: int, *, late: bool = False) -> None:
        self.writers[shard_id] = ShardWriter(shard_id, self.shards, self._answers)
        self.readers[shard_id] = ShardReader(shard_id, self.shards, self.families)
        self._followers[shard_id] = NotificationFollower(
            shard_id, self.shards, self._listener, late=late
        )

    def _drop(self, shard_id: int) -> None:
        """Remove a shard, close its parts in the background, and route its writes again."""
        _log.info("oxia_shard_gone", shard=shard_id)
        writer = self.writers.pop(shard_id)
        reader = self.readers.pop(shard_id)
        follower = self._followers.pop(shard_id)
        self._closing.start(self._close(follower, writer, reader), name="oxia-shard-gone")
        for write in writer.take_queued():
            try:
                self._route_again(write)
            except Exception as error:  # noqa: BLE001 - a defect; nothing else ends this write
                log_defect("the routing of a write", error)
                write.complete(defect(write.what, error))
        self._listener.gap(shard_id)

    async def _close(self, *parts: Part) -> None:
        """Close each part, in order, even if one fails or this is cancelled."""
        async with AsyncExitStack() as ends:
            for part in reversed(parts):
                ends.push_async_callback(part.close)
