"""A metadata store that counts the requests of this process, and times the writes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from storage.histogram import Histogram
from storage.metadata.store import (
    Event,
    IndexEntry,
    IndexHit,
    MetadataStore,
    PutResult,
    Record,
    Session,
    Version,
    Wanted,
    Watch,
)
from storage.metadata.store_wrapper import MetadataStoreWrapper

WRITE_BUCKETS_MS: Final = (1.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3)
"""Pulsar's buckets."""

_T = TypeVar("_T")


def _histogram() -> Histogram:
    return Histogram(WRITE_BUCKETS_MS)


@dataclass(slots=True)
class WriteCounters:
    """Requests for one kind of write, and their durations in ms by success and failure."""

    asked: int = 0
    succeeded: Histogram = field(default_factory=_histogram)
    failed: Histogram = field(default_factory=_histogram)


@dataclass(slots=True)
class ReadCounters:
    """Records asked for by key, listings and scans, and events taken from watches."""

    gets: int = 0
    scans: int = 0
    events: int = 0


class _CountedWatch:
    """A watch whose events are counted."""

    __slots__ = ("_counters", "_watch")

    def __init__(self, watch: Watch, counters: ReadCounters) -> None:
        self._watch = watch
        self._counters = counters

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._watch.__anext__()
        # Only now has a shared store read the record for it.
        self._counters.events += 1
        return event

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()


class CountedMetadata(MetadataStoreWrapper):
    """Counts the requests of this process to the metadata store, and times the writes.

    A write counts when it is asked for, its time when it ends.  A failed condition is a failure, as
    in Pulsar; a cancelled write has no time.  Each key of a `get_many`, each listing and each scan
    count once.  Writes that a store of ledgers makes for itself are not counted, as on BookKeeper
    another client makes them.  `elapsed_s` is a clock that never goes back.
    """

    def __init__(self, store: MetadataStore, elapsed_s: Callable[[], float]) -> None:
        super().__init__(store)
        self.puts = WriteCounters()
        self.deletes = WriteCounters()
        self.reads = ReadCounters()
        self._elapsed_s = elapsed_s

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        """See `MetadataStore`."""
        write = super().put(
            key,
            value,
            partition=partition,
            expect=expect,
            session=session,
            sequence=sequence,
            indexes=indexes,
        )
        return await self._counted(self.puts, write)

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """See `MetadataStore`."""
        write = super().delete(key, partition=partition, expect=expect)
        return await self._counted(self.deletes, write)

    async def _counted(self, counters: WriteCounters, write: Awaitable[_T]) -> _T:
        counters.asked += 1
        began_s = self._elapsed_s()
        try:
            result = await write
        except Exception:
            counters.failed.observe(1000 * (self._elapsed_s() - began_s))
            raise
        counters.succeeded.observe(1000 * (self._elapsed_s() - began_s))
        return result

    def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Coroutine[object, object, Record | None]:
        """See `MetadataStore`."""
        self.reads.gets += 1
        return super().get(key, partition=partition, fresh=fresh)

    def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> Coroutine[object, object, list[Record | None]]:
        """See `MetadataStore`."""
        self.reads.gets += len(keys)
        return super().get_many(keys, partition=partition)

    def children(self, key: str) -> Coroutine[object, object, list[str]]:
        """See `MetadataStore`."""
        self.reads.scans += 1
        return super().children(key)

    def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> Coroutine[object, object, list[Record]]:
        """See `MetadataStore`."""
        self.reads.scans += 1
        return super().scan(lo, hi, partition=partition, fresh=fresh)

    def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> Coroutine[object, object, list[IndexHit]]:
        """See `MetadataStore`."""
        self.reads.scans += 1
        return super().scan_index(
            index, lo, hi, partition=partition, fresh=fresh, limit=limit, max_bytes=max_bytes
        )

    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """See `MetadataStore`."""
        return _CountedWatch(super().watch_key(key, partition=partition), self.reads)

    def watch_children(self, key: str, *, wanted: Wanted | None = None) -> Watch:
        """See `MetadataStore`."""
        return _CountedWatch(super().watch_children(key, wanted=wanted), self.reads)

    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """See `MetadataStore`."""
        return _CountedWatch(super().watch_sequence(prefix, partition=partition), self.reads)
