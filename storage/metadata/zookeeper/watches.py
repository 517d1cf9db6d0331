"""Watches of the store, made of persistent watches of ZooKeeper."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial as bind
from typing import NamedTuple

import structlog

from config import bounds
from storage.metadata.group import Stored, check_partition_of, record_of
from storage.metadata.store import (
    Event,
    EventKind,
    MetadataError,
    PartitionMismatch,
    Wanted,
)
from storage.metadata.watches import WatchQueue
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import ChangeKind, NodeChange
from storage.metadata.zookeeper.layout import Layout, record_name
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request

_log = structlog.get_logger(__name__)

_CONNECTION_FAILURES = (Failure.CONNECTION_LOSS, Failure.SESSION_EXPIRED)
"""After these there is another connection, or no store any more."""


class NodeRecord(NamedTuple):
    """A record as it was read, with its value."""

    stored: Stored
    value: bytes


ReadRecord = Callable[[str], Awaitable[NodeRecord | None]]
Resolve = Callable[[str, NodeRecord | None], Event]
"""Makes the event for one watcher of a key and its record, as it was read."""


class NodeWatch:
    """A live subscription; see the interface `Watch`.

    Keys queue, each once.  A record is read when the event is taken, so it is the newest one, and a
    slow watcher costs no reads.
    """

    __slots__ = ("_closed", "_queue", "_read", "_resolve")

    def __init__(self, queue: WatchQueue, read: ReadRecord, resolve: Resolve) -> None:
        self._queue = queue
        self._read = read
        self._resolve = resolve
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event.  Ends the iteration once closed.  Raises `PartitionMismatch`."""
        event = await anext(self._queue)
        if event.kind is EventKind.RESYNC:
            return event
        try:
            found = await self._read(event.key)
        except MetadataError:  # the server is away: changes may be missed meanwhile
            return Event(EventKind.RESYNC)
        except BaseException:
            self._queue.offer(event)
            raise
        if self._closed:
            raise StopAsyncIteration
        try:
            return self._resolve(event.key, found)
        except PartitionMismatch as error:
            self._queue.fail(error)
            raise

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self._queue.close()


class _Watcher(NamedTuple):
    queue: WatchQueue
    sequence: bool
    wanted: Wanted | None


class NodeWatches:
    """All watches of one store, by the node that reports their changes.

    A watch is requested on the connection of reads, before anything that its holder reads later: so
    it reports every change that such a read misses.  Watches on one node share one of ZooKeeper's,
    which is removed with the last of them.
    """

    def __init__(
        self, layout: Layout, submit: Callable[[Request, Done], None], read: ReadRecord
    ) -> None:
        """`submit` sends a request, see `ZooKeeperClient.submit`."""
        self._layout = layout
        self._submit = submit
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._keys: dict[str, dict[_Watcher, str]] = {}
        self._levels: dict[str, dict[_Watcher, str]] = {}
        self._asked: dict[str, int] = {}
        self._refused: dict[str, asyncio.TimerHandle] = {}
        """Nodes whose watch was refused: it is asked for again."""

    def watch_key(self, key: str, partition: str | None) -> NodeWatch:
        """Changes of one record."""
        queue = self._add(self._keys, self._layout.record(key), key)
        return NodeWatch(queue, self._read, bind(_resolve_key, partition))

    def watch_level(self, level: str, wanted: Wanted | None = None) -> NodeWatch:
        """Changes of the records of a level, all of them or those that are wanted."""
        queue = self._add(self._levels, self._layout.directory(level), level, wanted=wanted)
        return NodeWatch(queue, self._read, _resolve)

    def watch_sequence(self, prefix: str, _partition: str) -> WatchQueue:
        """New keys of a sequence, which has one partition."""
        return self._add(self._levels, self._layout.directory(prefix), prefix, sequence=True)

    def changed(self, change: NodeChange) -> None:
        """Queue events for the watches that a change of a node concerns."""
        try:
            self._offer(change)
        except Exception as error:  # noqa: BLE001 - a watcher would never get the change
            _log.error("change_not_told", path=change.path, exc_info=error)
            for queue in self._queues():
                queue.resync()

    def ask_again(self) -> None:
        """Request all watches again on a new connection; changes since the last one are missed."""
        for path in self._asked:
            self._ask(path)
        for queue in self._queues():
            queue.resync()

    def close(self) -> None:
        """End every watch."""
        self._asked.clear()
        for timer in self._refused.values():
            timer.cancel()
        for queue in self._queues():
            queue.close()

    def _ask(self, path: str) -> None:
        self._submit(requests.add_watch(path, recursive=True), bind(self._taken, path))

    def _taken(self, path: str, answer: Answer) -> None:
        if answer.failure is None or answer.failure in _CONNECTION_FAILURES:
            return
        if path in self._asked and path not in self._refused:
            _log.warning("watch_refused", path=path, failure=answer.failure.name)
            pause_s = bounds.ZOOKEEPER_RECONNECT_MAX_S
            self._refused[path] = self._loop.call_later(pause_s, self._ask_refused, path)

    def _ask_refused(self, path: str) -> None:
        # Changes since it was refused were missed.
        del self._refused[path]
        if path in self._asked:
            self._ask(path)
            for registry in (self._keys, self._levels):
                for watcher in registry.get(path, {}):
                    watcher.queue.resync()

    def _offer(self, change: NodeChange) -> None:
        directory, _, name = change.path.rpartition("/")
        for watcher, key in self._keys.get(change.path, {}).items():
            watcher.queue.offer(Event(EventKind.UPSERT, key))
        levels = self._levels.get(directory)
        if levels:
            self._offer_to_level(levels, name, change.kind)

    def _add(
        self,
        registry: dict[str, dict[_Watcher, str]],
        path: str,
        name: str,
        *,
        sequence: bool = False,
        wanted: Wanted | None = None,
    ) -> WatchQueue:
        watcher = _Watcher(WatchQueue(), sequence, wanted)
        registry.setdefault(path, {})[watcher] = name
        watcher.queue.on_close(bind(self._forget, registry, path, watcher))
        self._asked[path] = self._asked.get(path, 0) + 1
        if self._asked[path] == 1:
            self._ask(path)
        return watcher.queue

    def _forget(
        self, registry: dict[str, dict[_Watcher, str]], path: str, watcher: _Watcher
    ) -> None:
        del registry[path][watcher]
        if not registry[path]:
            del registry[path]
        if path in self._asked:
            self._asked[path] -= 1
            if not self._asked[path]:
                del self._asked[path]
                self._submit(requests.remove_watch(path), _ignore)

    def _queues(self) -> list[WatchQueue]:
        return [
            watcher.queue
            for registry in (self._keys, self._levels)
            for watchers in registry.values()
            for watcher in watchers
        ]

    def _offer_to_level(self, watchers: dict[_Watcher, str], node: str, kind: ChangeKind) -> None:
        name = record_name(node)
        if name is None:
            return
        for watcher, level in watchers.items():
            key = f"{level}{name}"
            if watcher.wanted is not None and not watcher.wanted(key):
                continue
            event = Event(EventKind.UPSERT, key)
            if not watcher.sequence:
                watcher.queue.offer(event)
            elif kind is ChangeKind.CREATED:
                watcher.queue.offer_hint(event)


def _ignore(_answer: Answer) -> None:
    """Ignore the answer: events of a node that is not watched any more go nowhere."""


def _resolve(key: str, found: NodeRecord | None) -> Event:
    if found is None:
        return Event(EventKind.REMOVED, key)
    return Event(EventKind.UPSERT, key, record_of(key, found.stored, found.value))


def _resolve_key(partition: str | None, key: str, found: NodeRecord | None) -> Event:
    if found is not None:
        check_partition_of(key, found.stored.partition, partition)
    return _resolve(key, found)
