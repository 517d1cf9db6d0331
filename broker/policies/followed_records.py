"""Records of the metadata store that are read once and then kept current by a watch each."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import structlog

from magnetar.background_tasks import BackgroundTasks
from storage.metadata.store import Event, MetadataStore, Record
from storage.metadata.watch_follower import WatchFollower

T = TypeVar("T")
log = structlog.get_logger(__name__)


class FollowedRecords(Generic[T]):
    """Decoded records by path, from the first time that each is required.

    A path without a record is not remembered.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        tasks: BackgroundTasks,
        task_name: str,
        decode: Callable[[Record], T],
    ) -> None:
        """`tasks` runs the watches, each under `task_name`."""
        self._metadata = metadata
        self._tasks = tasks
        self._task_name = task_name
        self._decode = decode
        self._values: dict[str, T] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._openings: dict[str, asyncio.Future[None]] = {}
        self._changes: Counter[str] = Counter()
        """Events of each followed record so far."""
        self._listeners: list[Callable[[str], None]] = []

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the path of each record that changed or went."""
        self._listeners.append(listener)

    def known(self, path: str) -> T | None:
        """The value, without asking the store; None if it was never required or is gone."""
        return self._values.get(path)

    async def require(self, path: str) -> T | None:
        """The value; None if there is no record.  Raises `MetadataError`."""
        while True:
            value = self._values.get(path)
            if value is not None:
                return value
            opening = self._openings.get(path)
            if opening is None:
                break
            # Another caller opens the watch: what is read before that may be stale.
            await asyncio.wait((opening,))
        opened = self._openings[path] = asyncio.get_running_loop().create_future()
        try:
            return await self._open(path)
        finally:
            del self._openings[path]
            opened.set_result(None)

    async def _open(self, path: str) -> T | None:
        """Watch a record, and then read it."""
        if path not in self._followers:
            watch_ready = asyncio.Event()
            following = self._following(path, watch_ready)
            self._followers[path] = self._tasks.keep(self._task_name, following.run)
            await watch_ready.wait()
        changes = -1
        while changes != self._changes[path]:
            # Read again if it changed meanwhile: what was read may be older than the event.
            changes = self._changes[path]
            record = await self._metadata.get(path)
        if record is None:
            self.forget(path)
            return None
        value = self._decode(record)
        if path in self._followers:
            self._values[path] = value
        return value

    def put(self, path: str, value: T) -> None:
        """Take a value that this process has written, if the record is followed."""
        if path in self._followers:
            self._values[path] = value
            self._report(path)

    def forget(self, path: str) -> None:
        """Stop following a record, which is gone."""
        known = self._values.pop(path, None)
        self._changes.pop(path, None)
        follower = self._followers.pop(path, None)
        if follower is not None:
            follower.cancel()
        if known is not None:
            self._report(path)

    def clear(self) -> None:
        """Forget all of them, and report nothing.  The owner of the tasks stops them."""
        self._followers.clear()
        self._values.clear()

    def _following(self, path: str, ready: asyncio.Event) -> WatchFollower:
        async def read() -> None:
            # The first time `require` reads the record itself, once the watch is open.
            if ready.is_set():
                self._take(path, await self._metadata.get(path))
            ready.set()

        async def take(event: Event) -> None:
            self._take(path, event.record)

        return WatchFollower(partial(self._metadata.watch_key, path), read, take)

    def _take(self, path: str, record: Record | None) -> None:
        self._changes[path] += 1
        self._values.pop(path, None)
        if record is not None:
            try:
                self._values[path] = self._decode(record)
            except ValueError as error:
                # Without a value it is read again when it is required, which then fails.
                log.error("followed_record_unreadable", path=path, error=str(error))
        self._report(path)

    def _report(self, path: str) -> None:
        for listener in self._listeners:
            listener(path)
