"""Watches of a store: changes reach watchers through bounded queues that never block a writer.

Everything here runs on the event loop, after the commit that made the changes is durable.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable

from config import bounds
from storage.metadata.group import Change, check_partition_of
from storage.metadata.keys import level_of
from storage.metadata.store import (
    Event,
    EventKind,
    InvalidMetadataRequest,
    PartitionMismatch,
    Wanted,
)

_RESYNC = Event(EventKind.RESYNC)


class WatchQueue:
    """The events of one watcher: the newest state of each key, once.

    A queue above its bounds (events or value bytes) becomes one RESYNC.  `__anext__` belongs to one
    task.
    """

    __slots__ = (
        "_bytes",
        "_closed",
        "_error",
        "_forget",
        "_max_bytes",
        "_max_events",
        "_pending",
        "_waiter",
    )

    def __init__(
        self,
        *,
        max_events: int = bounds.WATCH_QUEUE_EVENTS,
        max_bytes: int = bounds.WATCH_QUEUE_BYTES,
    ) -> None:
        self._pending: OrderedDict[str, Event] = OrderedDict()
        self._bytes = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._error: PartitionMismatch | None = None
        self._forget: Callable[[], None] | None = None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event.  Ends the iteration once closed; raises what `fail` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise InvalidMetadataRequest(
                    "Two tasks iterate one watch: give each task a watch of its own."
                )
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        _, event = self._pending.popitem(last=False)
        self._bytes -= _size(event)
        return event

    def offer(self, event: Event) -> None:
        """Queue an event; the newest of a key replaces an older one."""
        # Until the watcher has read a RESYNC it needs no event, as it lists afterwards.
        if self._closed or self._error is not None or self._resync_pending:
            return
        older = self._pending.get(event.key)
        if older is not None:
            self._bytes -= _size(older)
        # The key keeps its place in the order, so that a busy key is not put off for ever.
        self._pending[event.key] = event
        self._bytes += _size(event)
        if len(self._pending) > self._max_events or self._bytes > self._max_bytes:
            self.resync()
        self._wake()

    def offer_hint(self, event: Event) -> None:
        """Queue an event that makes all waiting ones needless."""
        self._pending.clear()
        self._bytes = 0
        self.offer(event)

    def resync(self) -> None:
        """Drop the queued events and queue a RESYNC: the watcher lists again."""
        self._pending.clear()
        self._pending[_RESYNC.key] = _RESYNC
        self._bytes = 0
        self._wake()

    def fail(self, error: PartitionMismatch) -> None:
        """Raise this from every later `__anext__`."""
        self._pending.clear()
        self._bytes = 0
        self._error = error
        self._wake()

    def on_close(self, forget: Callable[[], None]) -> None:
        """Run `forget` when the watch is closed (once)."""
        self._forget = forget

    def close(self) -> None:
        """End the iteration, a pending one too."""
        if self._closed:
            return
        self._closed = True
        self._pending.clear()
        self._bytes = 0
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()
        self._wake()

    @property
    def _resync_pending(self) -> bool:
        return _RESYNC.key in self._pending

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WatchHub:
    """All watches of one store, found by the key that changes."""

    __slots__ = ("_children", "_keys", "_sequences")

    def __init__(self) -> None:
        self._keys = _Registry()
        self._children = _Registry()
        self._sequences = _Registry()

    def watch_key(self, key: str, partition: str | None) -> WatchQueue:
        """Changes of one record."""
        return self._keys.add(key, _Watcher(partition=partition))

    def watch_level(self, level: str, wanted: Wanted | None = None) -> WatchQueue:
        """Changes of the records of one level, all of them or those that are wanted."""
        return self._children.add(level, _Watcher(wanted=wanted))

    def watch_sequence(self, prefix: str, partition: str) -> WatchQueue:
        """New keys of a sequence."""
        return self._sequences.add(prefix, _Watcher(partition=partition))

    def __bool__(self) -> bool:
        """Whether anybody watches anything."""
        return bool(self._keys or self._children or self._sequences)

    def wants(self, key: str) -> bool:
        """Whether a change of this key concerns a watch on it, on its level or on a sequence."""
        if key in self._keys.watchers:
            return True
        level = level_of(key)
        if level in self._sequences.watchers:
            return True
        return any(watcher.wants(key) for watcher in self._children.watchers.get(level, ()))

    def resync(self) -> None:
        """Tell every watcher to list again."""
        for registry in (self._keys, self._children, self._sequences):
            registry.resync()

    def publish(self, changes: Iterable[Change]) -> None:
        """Queue events for the watches concerned; call it once for each commit, in their order."""
        keys = self._keys.watchers
        levels = bool(self._children or self._sequences)
        for change in changes:
            event = _LazyEvent(change)
            for watcher in keys.get(change.key, ()):
                _offer_to_key_watch(watcher, change, event)
            if levels:
                self._publish_level(change, event)

    def close(self) -> None:
        """End every watch."""
        for registry in (self._keys, self._children, self._sequences):
            registry.close()

    def _publish_level(self, change: Change, event: "_LazyEvent") -> None:
        level = level_of(change.key)
        for watcher in self._children.watchers.get(level, ()):
            if watcher.wants(change.key):
                watcher.queue.offer(event.get())
        if change.before is not None or change.after is None:
            return
        for watcher in self._sequences.watchers.get(level, ()):
            if change.after.partition == watcher.partition:
                watcher.queue.offer_hint(Event(EventKind.UPSERT, change.key))


class _Watcher:
    """A queue, and the partition or predicate of its watch."""

    __slots__ = ("_wanted", "partition", "queue")

    def __init__(
        self,
        *,
        partition: str | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        self.queue = WatchQueue()
        self.partition = partition
        self._wanted = wanted

    def wants(self, key: str) -> bool:
        """Whether the watch reports changes of this key."""
        return self._wanted is None or self._wanted(key)


class _Registry:
    """Watchers by the key, level or prefix that they watch.  A closed one is gone at once."""

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: dict[str, dict[_Watcher, None]] = {}
        """Read directly by `WatchHub.publish`: a call for each change would cost most of it."""

    def __bool__(self) -> bool:
        return bool(self.watchers)

    def add(self, key: str, watcher: _Watcher) -> WatchQueue:
        self.watchers.setdefault(key, {})[watcher] = None
        watcher.queue.on_close(lambda: self._forget(key, watcher))
        return watcher.queue

    def close(self) -> None:
        for watchers in list(self.watchers.values()):
            for watcher in list(watchers):
                watcher.queue.close()

    def resync(self) -> None:
        for watchers in self.watchers.values():
            for watcher in watchers:
                watcher.queue.resync()

    def _forget(self, key: str, watcher: _Watcher) -> None:
        watchers = self.watchers[key]
        del watchers[watcher]
        if not watchers:
            del self.watchers[key]


class _LazyEvent:
    """The event of a change, made when the first watcher wants it."""

    __slots__ = ("_change", "_event")

    def __init__(self, change: Change) -> None:
        self._change = change
        self._event: Event | None = None

    def get(self) -> Event:
        if self._event is None:
            record = self._change.record
            kind = EventKind.REMOVED if record is None else EventKind.UPSERT
            self._event = Event(kind, self._change.key, record)
        return self._event


def _offer_to_key_watch(watcher: _Watcher, change: Change, event: _LazyEvent) -> None:
    stored = change.after or change.before
    if stored is not None:
        try:
            check_partition_of(change.key, stored.partition, watcher.partition)
        except PartitionMismatch as error:
            watcher.queue.fail(error)
            return
    watcher.queue.offer(event.get())


def _size(event: Event) -> int:
    return 0 if event.record is None else len(event.record.value)
