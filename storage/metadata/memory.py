"""The metadata store in memory: for simulation and tests."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import structlog

from storage.clock import Clock
from storage.metadata import group, operations
from storage.metadata.embedded_store import EmbeddedStore, QueuedRequest, error_of_one
from storage.metadata.group import Change, Group, Stored, check_partition_of, record_of
from storage.metadata.keys import children_range, level_of, name_of
from storage.metadata.operations import Operation
from storage.metadata.store import IndexEntry, IndexHit, Record

_log = structlog.get_logger(__name__)


class MemoryMetadataStore(EmbeddedStore):
    """`MetadataStore` in memory, for simulation and tests.  Make it on the running loop.

    Deterministic: it has no threads, and no time but the injected clock and the loop's timers.
    Operations issued in one turn of the loop are one commit, made in the next turn.  Nothing
    outlives the process.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._tables = MemoryTables()
        self._pending: list[QueuedRequest[Operation]] = []

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        """See `MetadataStore.get`.  Always fresh."""
        return (await self.get_many([key], partition=partition))[0]

    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        """See `MetadataStore.get_many`."""
        for key in keys:
            operations.check_key(key)
        operations.check_partition(partition)
        await self._turn()
        records = [self._tables.record(key) for key in keys]
        for record in records:
            if record is not None:
                check_partition_of(record.key, record.partition, partition)
        return records

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore.children`."""
        operations.check_level(key)
        await self._turn()
        return [name_of(child) for child in self._tables.keys(*children_range(key))]

    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        """See `MetadataStore.scan`.  Always fresh."""
        operations.check_scan(lo, hi)
        operations.check_partition(partition)
        await self._turn()
        records = list(map(self._tables.existing_record, self._tables.keys(lo, hi)))
        if partition is not None:
            for record in records:
                check_partition_of(record.key, record.partition, partition)
        return records

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        """See `MetadataStore.scan_index`.  Always fresh."""
        operations.check_index_range(index, lo, hi)
        operations.check_partition(partition)
        await self._turn()
        hits: list[IndexHit] = []
        size = 0
        for index_key, key in self._tables.index_entries(index, lo, hi):
            if limit is not None and len(hits) >= limit:
                break
            if hits and max_bytes is not None and size >= max_bytes:
                break
            record = self._tables.existing_record(key)
            if partition is None or record.partition == partition:
                hits.append(IndexHit(index_key, record))
                size += len(record.value)
        return hits

    def _enqueue(self, waiting: QueuedRequest[Operation]) -> None:
        if not self._pending:
            self._loop.call_soon(self._commit)
        self._pending.append(waiting)

    def _commit(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            made = Group(self._tables, self._tables.revision)
            outcomes = [made.apply(waiting.request) for waiting in pending]
            changes = made.net_changes()
            self._tables.save(made, changes)
        except Exception as error:  # noqa: BLE001 - dying here would leave every caller waiting
            _log.error("metadata_commit_failed", operations=len(pending), exc_info=error)
            outcomes, changes = [error_of_one(error) for _ in pending], []
        self._committed(pending, outcomes, changes)

    async def _turn(self) -> None:
        self._check_open()
        # A turn of the loop, so that a simulation sees the interleavings of a real store.
        await asyncio.sleep(0)

    async def _shut_down(self) -> None:
        self._commit()


class MemoryTables:
    """The committed state; the `View` that groups are applied to."""

    def __init__(self) -> None:
        self.revision = 0
        self._records: dict[str, tuple[Stored, bytes]] = {}
        self._levels: dict[str, list[str]] = {}
        self._indexes: dict[str, list[tuple[str, str]]] = {}
        self._sequences: dict[str, group.Sequence] = {}
        self._session_keys: dict[int, set[str]] = {}

    def stored(self, key: str) -> Stored | None:
        """See `View.stored`."""
        found = self._records.get(key)
        return None if found is None else found[0]

    def sequence(self, prefix: str) -> group.Sequence | None:
        """See `View.sequence`."""
        return self._sequences.get(prefix)

    def count_children(self, level: str) -> int:
        """See `View.count_children`."""
        return len(self._levels.get(level, ()))

    def session_exists(self, session_id: int) -> bool:
        """See `View.session_exists`."""
        return session_id in self._session_keys

    def session_keys(self, session_id: int) -> Iterable[str]:
        """See `View.session_keys`."""
        return self._session_keys[session_id]

    def record(self, key: str) -> Record | None:
        """The record of a key."""
        found = self._records.get(key)
        return None if found is None else record_of(key, *found)

    def existing_record(self, key: str) -> Record:
        """The record of a key that is surely there, as a table has just named it."""
        return record_of(key, *self._records[key])

    def keys(self, lo: str, hi: str) -> list[str]:
        """Keys of one level within scan bounds, in order."""
        level = level_of(lo)
        keys = self._levels.get(level, [])
        end = len(keys) if hi == f"{level}/" else bisect_left(keys, hi)
        return keys[bisect_left(keys, lo) : end]

    def index_entries(self, index: str, lo: str, hi: str) -> list[tuple[str, str]]:
        """(secondary key, key) within bounds, in order."""
        entries = self._indexes.get(index, [])
        return entries[bisect_left(entries, (lo,)) : bisect_left(entries, (hi,))]

    def save(self, made: Group, changes: Iterable[Change]) -> None:
        """Make a group's outcome the committed state."""
        self.revision = made.revision
        self._sequences.update(made.sequences)
        for session_id in made.new_sessions:
            self._session_keys[session_id] = set()
        for change in changes:
            self._save_change(change)
        for session_id in made.ended_sessions:
            del self._session_keys[session_id]

    def _save_change(self, change: Change) -> None:
        before, after, key = change.before, change.after, change.key
        if before is not None:
            for entry in before.indexes:
                self._remove_index_entry(entry, key)
            if before.session_id is not None:
                self._session_keys[before.session_id].discard(key)
        if after is None:
            del self._records[key]
            _remove_sorted(self._levels, level_of(key), key)
            return
        if before is None:
            insort(self._levels.setdefault(level_of(key), []), key)
        self._records[key] = (after, change.value)
        for entry in after.indexes:
            insort(self._indexes.setdefault(entry.index, []), (entry.key, key))
        if after.session_id is not None:
            self._session_keys[after.session_id].add(key)

    def _remove_index_entry(self, entry: IndexEntry, key: str) -> None:
        entries = self._indexes[entry.index]
        del entries[bisect_left(entries, (entry.key, key))]
        if not entries:
            del self._indexes[entry.index]


def _remove_sorted(levels: dict[str, list[str]], level: str, key: str) -> None:
    keys = levels[level]
    del keys[bisect_left(keys, key)]
    if not keys:
        del levels[level]
