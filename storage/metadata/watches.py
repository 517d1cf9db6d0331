"""Watches: who is told about which change, through bounded queues that never block a writer.

Rules:
- Everything here runs on the event loop, after the commit that made the changes is durable.
- A queue holds the newest state of each key, once; a key that changes again before it is read
  keeps its place, so that a busy key cannot be put off for ever.
- A queue above its bounds (events or value bytes) becomes one RESYNC; what happens before the
  watcher has read that needs no event, as the watcher lists afterwards.
- Watches on an exact secondary key are found by look-up, so thousands of them on one index cost a
  writer nothing; wider ranges are compared one by one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

from config import bounds
from storage.metadata.group import Change, check_partition_of
from storage.metadata.keys import exact_range, level_of
from storage.metadata.store import (
    Event,
    EventKind,
    IndexEntry,
    InvalidMetadataRequest,
    PartitionMismatch,
)

K = TypeVar("K")

_RESYNC = Event(EventKind.RESYNC)


class WatchQueue:
    """The events of one watcher.  `__anext__` belongs to one task."""

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
        if self._closed or self._error is not None or self._resync_pending:
            return
        older = self._pending.get(event.key)
        if older is not None:
            self._bytes -= _size(older)
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
        """Drop what is queued and tell the watcher to list again."""
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
        """Run `forget` when the watch is closed (once), after what was given before."""
        before = self._forget
        if before is None:
            self._forget = forget
            return

        def forget_both() -> None:
            before()
            forget()

        self._forget = forget_both

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
    """All watches of one store, found by what changes."""

    __slots__ = ("_children", "_exact", "_keys", "_ranges", "_sequences")

    def __init__(self) -> None:
        self._keys: _Registry[str] = _Registry()
        self._children: _Registry[str] = _Registry()
        self._sequences: _Registry[str] = _Registry()
        self._exact: _Registry[IndexEntry] = _Registry()
        self._ranges: _Registry[str] = _Registry()

    def watch_key(self, key: str, partition: str | None) -> WatchQueue:
        """Changes of one record."""
        return self._keys.add(key, _Watcher(partition=partition))

    def watch_level(self, level: str) -> WatchQueue:
        """Changes of all records of one level."""
        return self._children.add(level, _Watcher())

    def watch_sequence(self, prefix: str, partition: str) -> WatchQueue:
        """New keys of a sequence."""
        return self._sequences.add(prefix, _Watcher(partition=partition))

    def watch_index(self, index: str, lo: str, hi: str) -> WatchQueue:
        """Records in a range of an index."""
        watcher = _Watcher(lo=lo, hi=hi)
        if (lo, hi) == exact_range(lo):
            return self._exact.add(IndexEntry(index, lo), watcher)
        return self._ranges.add(index, watcher)

    def __bool__(self) -> bool:
        """Whether anybody watches anything."""
        return bool(self._keys or self._children or self._exact or self._ranges or self._sequences)

    def wants(self, key: str) -> bool:
        """Whether a change of this key concerns a watch on it, on its level or on a sequence."""
        if key in self._keys.watchers:
            return True
        level = level_of(key)
        return level in self._children.watchers or level in self._sequences.watchers

    def resync(self) -> None:
        """Tell every watcher to list again."""
        for registry in (self._keys, self._children, self._sequences, self._ranges):
            registry.resync()
        self._exact.resync()

    def publish(self, changes: Iterable[Change]) -> None:
        """Tell every watcher that is concerned; call it once for each commit, in their order."""
        keys = self._keys.watchers
        levels = bool(self._children or self._sequences)
        indexes = bool(self._exact or self._ranges)
        for change in changes:
            event = _LazyEvent(change)
            for watcher in keys.get(change.key, ()):
                _tell_key(watcher, change, event)
            if levels:
                self._publish_level(change, event)
            if indexes:
                self._publish_index(change, event)

    def close(self) -> None:
        """End every watch."""
        for registry in (self._keys, self._children, self._sequences, self._ranges):
            registry.close()
        self._exact.close()

    def _publish_level(self, change: Change, event: "_LazyEvent") -> None:
        level = level_of(change.key)
        for watcher in self._children.watchers.get(level, ()):
            watcher.queue.offer(event.get())
        if change.before is not None or change.after is None:
            return
        for watcher in self._sequences.watchers.get(level, ()):
            if change.after.partition == watcher.partition:
                watcher.queue.offer_hint(Event(EventKind.UPSERT, change.key))

    def _publish_index(self, change: Change, event: "_LazyEvent") -> None:
        before = () if change.before is None else change.before.indexes
        after = () if change.after is None else change.after.indexes
        listed = self._index_watchers(after)
        for watcher in self._index_watchers(before):
            if watcher not in listed:
                watcher.queue.offer(Event(EventKind.REMOVED, change.key))
        for watcher in listed:
            watcher.queue.offer(event.get())

    def _index_watchers(self, entries: tuple[IndexEntry, ...]) -> "dict[_Watcher, None]":
        exact, ranges = self._exact.watchers, self._ranges.watchers
        found: dict[_Watcher, None] = {}
        for entry in entries:
            if exact and (watchers := exact.get(entry)):
                found.update(watchers)
            for watcher in ranges.get(entry.index, ()):
                if watcher.lo <= entry.key < watcher.hi:
                    found[watcher] = None
        return found


class _Watcher:
    """A queue and what it is for."""

    __slots__ = ("hi", "lo", "partition", "queue")

    def __init__(self, *, partition: str | None = None, lo: str = "", hi: str = "") -> None:
        self.queue = WatchQueue()
        self.partition = partition
        self.lo = lo
        self.hi = hi


class _Registry(Generic[K]):
    """Watchers by what they watch.  A closed one is gone at once."""

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: dict[K, dict[_Watcher, None]] = {}
        """Read directly where changes are told: a call for each would be most of that."""

    def __bool__(self) -> bool:
        return bool(self.watchers)

    def add(self, key: K, watcher: _Watcher) -> WatchQueue:
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

    def _forget(self, key: K, watcher: _Watcher) -> None:
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


def _tell_key(watcher: _Watcher, change: Change, event: _LazyEvent) -> None:
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
