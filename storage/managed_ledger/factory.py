"""All managed ledgers of a process, by name; the search for orphans."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from magnetar.protocol.ids import LedgerId
from storage.clock import Clock
from storage.ledger.store import LedgerAssertion, LedgerStore
from storage.managed_ledger.compacted_record import compaction_ledgers
from storage.managed_ledger.core import LagSource, Stores
from storage.managed_ledger.entry_cache import EntryCache
from storage.managed_ledger.ledger import ManagedLedger, open_stream
from storage.managed_ledger.orphans import (
    OrphanedLedger,
    chunks,
    delete_orphans,
    find_orphans,
    stream_records,
)
from storage.managed_ledger.records import decode_cursor, decode_stream, ledger_key
from storage.managed_ledger.stored_stream import StoredStream, read_stored_stream
from storage.managed_ledger.types import (
    Limits,
    ManagedLedgerClosed,
    ManagedLedgerState,
    PersistenceSource,
    Retention,
    RetentionSource,
    StoresNotShared,
)
from storage.metadata.keys import children_range
from storage.metadata.store import MetadataStore
from storage.offload.cold_ledgers import ColdLedgers, attempt_of
from storage.offload.context import Location

if TYPE_CHECKING:
    from storage.offload.objects import StoredObject

log = structlog.get_logger(__name__)
_STOPPED = (ManagedLedgerState.FENCED, ManagedLedgerState.CLOSED)


class _Slot:
    """One name: the number of its users now, and its instance."""

    __slots__ = ("ledger", "lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ledger: ManagedLedger | None = None
        self.users = 0


class ManagedLedgerFactory:
    """Opens each managed ledger once, and shares it among its users.

    Concurrent opens of a name share one instance; opening, unloading and deleting one name wait for
    each other.  The next open replaces an instance that was FENCED.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        clock: Clock,
        limits: Limits | None = None,
        cold: ColdLedgers | None = None,
        offload_lag_ms: LagSource | None = None,
        persistence: PersistenceSource | None = None,
    ) -> None:
        self._stores = Stores(
            metadata, ledgers, clock, limits or Limits(), cold, offload_lag_ms, persistence
        )
        self._slots: dict[str, _Slot] = {}
        self._sweeping = asyncio.Lock()
        self._closed = False

    @property
    def limits(self) -> Limits:
        """The operator's settings, and whether other processes may open the same streams."""
        return self._stores.limits

    @property
    def max_entry_bytes(self) -> int:
        """The largest entry that the ledger store takes."""
        return self._stores.ledgers.max_entry_bytes

    @property
    def cache(self) -> EntryCache:
        """The newest entries of all streams."""
        return self._stores.cache

    @property
    def cold(self) -> ColdLedgers:
        """The copies of offloaded ledgers."""
        return self._stores.cold

    def loaded(self) -> Mapping[str, ManagedLedger]:
        """The streams that are open now."""
        return {name: slot.ledger for name, slot in self._slots.items() if slot.ledger is not None}

    async def open(
        self, name: str, create: bool = True, *, retention: RetentionSource | None = None
    ) -> ManagedLedger:
        """The stream of a ledger path (`public/default/persistent/x`), loaded once.

        `retention` returns the retention policy at any time.  Raises
        `ManagedLedgerNotFound` unless `create`, `MetadataError`, `LedgerError`, `CorruptRecord`,
        and `LedgersDamaged` if entries of it were lost and the operator wants it refused then.
        """
        async with self._slot(name) as slot:
            ledger = slot.ledger
            if ledger is not None and ledger.state in _STOPPED:
                await ledger.close()
                ledger = slot.ledger = None
            if ledger is None:
                async with self._sweeping:
                    pass
                source = retention or _no_policy
                ledger = await open_stream(name, self._stores, source, create=create)
                slot.ledger = ledger
            elif retention is not None:
                ledger.use_retention(retention)
            return ledger

    async def exists(self, name: str) -> bool:
        """Whether there is such a stream.  Raises `MetadataError`."""
        return await self._stores.metadata.get(ledger_key(name)) is not None

    async def stored_stream(self, name: str) -> StoredStream | None:
        """A stream as it is stored, without opening it; see `read_stored_stream`."""
        return await read_stored_stream(name, self._stores)

    async def unload(self, name: str) -> None:
        """Close the stream if it is open; its state is durable then."""
        async with self._slot(name) as slot:
            if slot.ledger is not None:
                await slot.ledger.close()
                slot.ledger = None

    async def delete(
        self,
        name: str,
        *,
        require_unused: Callable[[], Awaitable[None]] | None = None,
        require_unchanged: Callable[[ManagedLedger], None] | None = None,
    ) -> None:
        """Remove the stream, its cursors and its entries.

        `require_unused` may refuse it by raising.  It is called once the stream is open: if another
        owner opens the stream after that, the removal fails with `ManagedLedgerFenced`.  So may
        `require_unchanged`, which gets the stream as it is then.

        Raises `ManagedLedgerNotFound`, `MetadataError`, `LedgerError`: delete it again then.
        """
        async with self._slot(name) as slot:
            ledger = slot.ledger
            if ledger is None or ledger.state in _STOPPED:
                ledger = await open_stream(
                    name, self._stores, _no_policy, create=False, damaged=True
                )
            slot.ledger = None
            try:
                if require_unused is not None:
                    await require_unused()
                if require_unchanged is not None:
                    require_unchanged(ledger)
                await ledger.delete()
            finally:
                await ledger.close()

    async def close(self) -> None:
        """Close all streams at once, and refuse to open any."""
        self._closed = True
        await asyncio.gather(*(self._close_slot(slot) for slot in list(self._slots.values())))
        self._slots.clear()
        await self.cold.close()

    async def _close_slot(self, slot: _Slot) -> None:
        async with slot.lock:
            if slot.ledger is not None:
                await slot.ledger.close()
                slot.ledger = None

    @asynccontextmanager
    async def _slot(self, name: str) -> AsyncIterator[_Slot]:
        slot = self._slots.setdefault(name, _Slot())
        slot.users += 1
        try:
            async with slot.lock:
                if self._closed:
                    raise ManagedLedgerClosed("This broker is stopping: look the topic up again.")
                yield slot
        finally:
            slot.users -= 1
            if slot.users == 0 and slot.ledger is None:
                self._slots.pop(name, None)

    async def sweep_orphans(self) -> list[LedgerId]:
        """Delete the ledgers that no record names, and return their ids.

        Call it before the first `open`, which waits for it.  Does nothing on shared stores, and
        while the ledger store keeps everything because data was lost.
        """
        # A ledger that another process just made, and has not named yet, looks like an orphan.
        if self.limits.claim_on_open or self._stores.ledgers.keeps_everything:
            return []
        async with self._sweeping:
            if self.loaded():
                raise LedgerAssertion(
                    "Orphaned ledgers were to be swept while streams are open: sweep at start."
                )
            stored = await self._stores.ledgers.list_ledgers()
            named = await self._named_ledgers()
            orphans = [ledger_id for ledger_id in stored if ledger_id not in named]
            for ledger_id in orphans:
                log.info("orphaned_ledger_deleted", ledger=ledger_id)
                await self._stores.ledgers.delete(ledger_id)
            return orphans

    async def orphaned_ledgers(self) -> list[OrphanedLedger]:
        """Ledgers of shared stores that no record names (see `find_orphans`).

        Raises `LedgerError`, `MetadataError`, `CorruptRecord`, and `StoresNotShared` if the stores
        are not shared.
        """
        self._require_shared()
        return await find_orphans(self._stores)

    async def delete_orphaned_ledgers(self) -> list[OrphanedLedger]:
        """Delete the orphaned ledgers of shared stores, and return those that were deleted.

        Raises as `orphaned_ledgers`.
        """
        self._require_shared()
        return await delete_orphans(self._stores)

    def _require_shared(self) -> None:
        if not self.limits.claim_on_open:
            raise StoresNotShared(
                "This broker has its stores for itself, and deletes orphaned ledgers when it "
                "starts: restart it."
            )

    async def orphaned_copies(self, location: Location) -> "list[StoredObject]":
        """Objects of copies at that location that no record of these stores names.

        Copies of other clusters are among them if they share the location.  Raises `LedgerError`,
        `MetadataError`.
        """
        stored = await self.cold.objects_of_copies(location)
        named = {
            info.offload.uid
            for record in await stream_records(self._stores.metadata)
            for info in decode_stream(record.key, record.value).ledgers
            if info.offload is not None
        }
        return [each for each in stored if attempt_of(each.key) not in named]

    async def _named_ledgers(self) -> set[int]:
        """Every ledger that the record of a stream or of a cursor names."""
        metadata = self._stores.metadata
        named: set[int] = set()
        streams = await stream_records(metadata)
        for record in streams:
            found = decode_stream(record.key, record.value)
            named.update(info.ledger_id for info in found.ledgers)
            named.update(compaction_ledgers(found.properties))
        for some in chunks(streams):
            scans = (metadata.scan(*children_range(record.key)) for record in some)
            for cursors in await asyncio.gather(*scans):
                named.update(decode_cursor(each.key, each.value).ledger_id for each in cursors)
        return named


def _no_policy() -> Retention | None:
    return None
