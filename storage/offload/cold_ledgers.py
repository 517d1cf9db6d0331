"""The copies of ledgers that a process makes, reads and deletes, in all locations.

Libraries that only offloading needs are imported when there is something to offload or to read.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from config.bounds import OFFLOAD_CACHE_BYTES
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import ReadableLedger
from storage.offload.context import FILE, Location, OffloadContext, copy_of, data_key, index_key
from storage.offload.errors import OffloadedDataCorrupt

if TYPE_CHECKING:
    from storage.offload.block_cache import BlockCache
    from storage.offload.format import Index
    from storage.offload.objects import Objects, StoredObject
    from storage.offload.reading import OffloadedLedger


@dataclass(slots=True)
class OffloadCounters:
    """Counters of offloading since the process began."""

    ledgers: int = 0
    entries: int = 0
    bytes: int = 0
    failures: int = 0
    hot_deleted: int = 0
    deleted: int = 0
    opened: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of one copy, from its index.

    Hashes are SHA-256; None if Apache Pulsar wrote the copy.
    """

    ledger_id: int
    entries: int
    entries_bytes: int
    data_bytes: int
    objects: tuple[str, str]
    url: str
    data_sha256: bytes | None
    entries_sha256: bytes | None
    first_published_ms: int | None
    last_published_ms: int | None


class ColdLedgers:
    """Makes, reads and deletes the copies of ledgers in object storage.

    `origin` is metadata for tools, of this cluster.
    """

    def __init__(self, rng: random.Random, origin: Mapping[str, bytes] | None = None) -> None:
        self._rng = rng
        self._origin = origin or {}
        self._objects: dict[Location, Objects] = {}
        self._cache: BlockCache | None = None
        self.counters = OffloadCounters()

    @property
    def cache(self) -> "BlockCache":
        """The cache of blocks that were read."""
        if self._cache is None:
            from storage.offload.block_cache import BlockCache  # noqa: PLC0415

            self._cache = BlockCache(OFFLOAD_CACHE_BYTES)
        return self._cache

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cached blocks."""
        return 0 if self._cache is None else self._cache.size_bytes

    @property
    def cache_hits(self) -> int:
        """Number of reads of blocks that were in memory."""
        return 0 if self._cache is None else self._cache.hits

    @property
    def cache_misses(self) -> int:
        """Number of reads of blocks that were neither in memory nor being fetched."""
        return 0 if self._cache is None else self._cache.misses

    def new_context(self, location: Location) -> OffloadContext:
        """A new attempt to make a copy at that location."""
        uid = UUID(int=self._rng.getrandbits(128), version=4)
        return OffloadContext(uid, location.driver, location.properties)

    def _open_objects(self, location: Location, size_hint_bytes: int = 0) -> "Objects":
        found = self._objects.get(location)
        if found is None or size_hint_bytes:
            found = _objects_at(location, size_hint_bytes)
            self._objects.setdefault(location, found)
        return found

    async def write(
        self, ledger: ReadableLedger, context: OffloadContext, name: str, now_ms: int
    ) -> None:
        """Make the copy of an ended ledger and read it again.  Raises `LedgerError`."""
        from storage.offload.writing import CopyMetadata, verify_copy, write_copy  # noqa: PLC0415

        objects = self._open_objects(context.location, ledger.length)
        custom = {
            "application": b"pulsar",
            "component": b"managed-ledger",
            "pulsar/managed-ledger": name.encode(),
            **self._origin,
        }
        try:
            metadata = CopyMetadata(custom, now_ms)
            index = await write_copy(ledger, objects, context.uid, metadata)
            await verify_copy(objects, context.uid, int(ledger.ledger_id), index)
        except BaseException:
            self.counters.failures += 1
            raise
        self.counters.ledgers += 1
        self.counters.entries += index.entries
        self.counters.bytes += index.entries_bytes

    async def open(self, ledger_id: int, context: OffloadContext) -> "OffloadedLedger":
        """Open a copy to read it.  Raises `LedgerError`, `InvalidOffloadUrl`."""
        from storage.offload.reading import OffloadedLedger  # noqa: PLC0415
        from storage.offload.writing import read_index  # noqa: PLC0415

        objects = self._open_objects(context.location)
        index = await read_index(objects, context.uid, ledger_id)
        self.counters.opened += 1
        return OffloadedLedger(LedgerId(ledger_id), context, index, objects, self.cache)

    async def require_whole(
        self, ledger_id: int, context: OffloadContext, entries: int, size_bytes: int
    ) -> None:
        """Raise `LedgerError` unless the copy has these numbers of entries and bytes."""
        index = (await self.open(ledger_id, context)).index
        key = data_key(context.uid, ledger_id)
        stored_bytes = await self._open_objects(context.location).size(key)
        found = (index.entries, index.entries_bytes, stored_bytes)
        if found != (entries, size_bytes, index.data_bytes):
            raise OffloadedDataCorrupt(
                f"The copy {key} in {context.location.url} has {found[0]} entries of {found[1]} "
                f"bytes in {found[2]} instead of {entries} of {size_bytes} in {index.data_bytes}: "
                "the ledger is kept; offload it again elsewhere, or restore the object."
            )

    async def manifest(self, ledger_id: int, context: OffloadContext) -> Manifest:
        """Describe a copy.  Raises `LedgerError`, `InvalidOffloadUrl`."""
        index: Index = (await self.open(ledger_id, context)).index
        checks = index.checks
        return Manifest(
            ledger_id,
            index.entries,
            index.entries_bytes,
            index.data_bytes,
            (data_key(context.uid, ledger_id), index_key(context.uid, ledger_id)),
            context.location.url,
            None if checks is None else checks.data_sha256,
            None if checks is None else checks.entries_sha256,
            index.first_published_ms,
            index.last_published_ms,
        )

    async def delete(self, ledger_id: int, context: OffloadContext) -> None:
        """Remove a copy, whole or not.  Raises `LedgerError`, `InvalidOffloadUrl`."""
        objects = self._open_objects(context.location)
        # The index first: after half a deletion the copy cannot be opened.
        await objects.delete(index_key(context.uid, ledger_id))
        await objects.delete(data_key(context.uid, ledger_id))
        self.counters.deleted += 1

    async def objects_of_copies(self, location: Location) -> "list[StoredObject]":
        """Every object of a copy at that location, of any cluster.  Raises `LedgerError`.

        A record names a copy before its objects are made: to find orphans, read the records after
        this call.
        """
        found = self._open_objects(location).list()
        return [each async for each in found if _copy_of(each.key) is not None]

    async def delete_objects(self, location: Location, keys: Collection[str]) -> None:
        """Remove these objects.  Raises `LedgerError`."""
        objects = self._open_objects(location)
        for key in keys:
            await objects.delete(key)
            self.counters.deleted += 1

    async def close(self) -> None:
        """Cancel reads of blocks."""
        if self._cache is not None:
            await self._cache.close()


def _objects_at(location: Location, size_hint_bytes: int) -> "Objects":
    """The objects of a location; `size_hint_bytes` is the size of the largest one to write.

    Raises `OffloadFailed` for settings that the library refuses.
    """
    if location.scheme == FILE:
        from storage.offload.path_objects import PathObjects  # noqa: PLC0415

        return PathObjects(location)
    from storage.offload.remote_objects import RemoteObjects  # noqa: PLC0415

    return RemoteObjects(location, size_hint_bytes=size_hint_bytes)


def _copy_of(key: str) -> tuple[UUID, int] | None:
    from storage.offload.objects import WRITING  # noqa: PLC0415

    return copy_of(key.removesuffix(WRITING))


def attempt_of(key: str) -> UUID | None:
    """The attempt to which an object belongs; None for other objects."""
    found = _copy_of(key)
    return None if found is None else found[0]
