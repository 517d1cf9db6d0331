"""Shared state of the parts of one managed ledger: its ledgers, its record, its state."""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

import structlog

from config import bounds
from magnetar.protocol.ids import EARLIEST, LedgerId, Position
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.damage import EntryRange
from storage.ledger.store import LedgerError, LedgerStore, WritableLedger
from storage.managed_ledger.compacted_record import compaction_ledgers
from storage.managed_ledger.entry_cache import EntryCache
from storage.managed_ledger.entry_index import RecentIndexes, index_key
from storage.managed_ledger.ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger.owned_record import OwnedRecord
from storage.managed_ledger.records import NAMES_INDEX, StreamRecord, encode_stream, ledger_key
from storage.managed_ledger.types import (
    MOVES,
    Limits,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
    ManagedLedgerState,
    ManagedLedgerTerminated,
    Persistence,
    PersistenceSource,
)
from storage.metadata.instance import instance_of
from storage.metadata.store import IndexEntry, MetadataError, MetadataStore, VersionConflict
from storage.offload.cold_ledgers import ColdLedgers
from storage.offload.context import InvalidOffloadUrl, OffloadContext

log = structlog.get_logger(__name__)
StopListener = Callable[[MagnetarError], None]
LagSource = Callable[[str], int]
"""Returns the time that an offloaded ledger of a stream stays beside its copy, -1 for ever."""
COMPONENT = "component"
MANAGED_LEDGER = b"managed-ledger"
STREAM = "pulsar/managed-ledger"
CURSOR = "pulsar/cursor"
INSTANCE = "magnetar/instance"
"""Custom metadata of a ledger; the last one, on shared stores, is the id of the metadata store."""
TRIMMED_PROPERTY = "magnetar.trimmed"
"""Of a stream: ledger and entry id of the newest entry that was trimmed."""


class Stores:
    """Stores, caches and limits that all managed ledgers of a process share."""

    __slots__ = (
        "_instance",
        "cache",
        "clock",
        "cold",
        "index_builds",
        "indexes",
        "ledgers",
        "limits",
        "metadata",
        "offload_lag_ms",
        "persistence",
    )

    def __init__(
        self,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        clock: Clock,
        limits: Limits,
        cold: ColdLedgers | None = None,
        offload_lag_ms: LagSource | None = None,
        persistence: PersistenceSource | None = None,
    ) -> None:
        self.metadata = metadata
        self.ledgers = ledgers
        self.clock = clock
        self.limits = limits
        self.cache = EntryCache(limits.entry_cache_bytes)
        self.cold = cold or ColdLedgers(random.Random())
        self.offload_lag_ms = offload_lag_ms or self._usual_lag_ms
        self.persistence = persistence or _no_persistence
        self.indexes = RecentIndexes(bounds.ENTRY_INDEXES_KEPT)
        self.index_builds = asyncio.Semaphore(bounds.ENTRY_INDEX_BUILDS)
        self._instance: bytes | None = None

    def _usual_lag_ms(self, _: str) -> int:
        return self.limits.offload_deletion_lag_ms

    async def create_ledger(self, name: str, cursor: str | None = None) -> WritableLedger:
        """A new ledger with the copies of the stream's policy, and custom metadata as Pulsar's.

        Tools read the metadata.  A record may name the ledger only while `may_name` allows it,
        given the time before this call.
        """
        custom = {"application": b"pulsar", COMPONENT: MANAGED_LEDGER, STREAM: name.encode()}
        if cursor is not None:
            custom[CURSOR] = cursor.encode()
        if self.limits.claim_on_open:
            custom[INSTANCE] = await self.instance()
        return await self.ledgers.create(custom=custom, copies=self.persistence(name).copies)

    async def instance(self) -> bytes:
        """The id of the metadata store.  Raises `MetadataError`."""
        if self._instance is None:
            self._instance = await instance_of(self.metadata)
        return self._instance

    def may_name(self, made_ms: int) -> bool:
        """Whether a record may still name a ledger that was made at `made_ms`."""
        # Never later: the search for orphans deletes old ledgers that no record names (`orphans`).
        return self.clock.now_ms() - made_ms < bounds.LEDGER_NAMING_MS

    async def delete_ledger(self, ledger_id: int) -> bool:
        """Delete a ledger that no record names; False if it failed and is to be tried again."""
        try:
            await self.ledgers.delete(LedgerId(ledger_id))
        except (LedgerError, MetadataError) as error:
            log.warning("ledger_not_deleted", ledger=ledger_id, error=str(error))
            return False
        return True

    async def delete_data_ledger(self, ledger_id: int) -> bool:
        """Delete a ledger of a stream, and its index; False if it is to be tried again."""
        self.indexes.drop(ledger_id)
        if not await self.delete_ledger(ledger_id):
            return False
        try:
            await self.metadata.delete(index_key(ledger_id))
        except MetadataError as error:
            log.warning("entry_index_not_deleted", ledger=ledger_id, error=str(error))
            return False
        return True

    async def delete_copy(self, ledger_id: int, copy: OffloadContext) -> bool:
        """Delete a copy that no record names; False if it failed and is to be tried again."""
        try:
            await self.cold.delete(ledger_id, copy)
        except (LedgerError, InvalidOffloadUrl) as error:
            log.warning("offloaded_copy_not_deleted", ledger=ledger_id, error=str(error))
            return False
        return True


class StreamCore:
    """The ledgers, the record and the state of one managed ledger, shared by its parts.

    The record changes only under `lock`, by `save` and `remove`, and the list of ledgers after it.
    Without the lock `drop` takes an empty ledger off the list, and the newest ledger's counts grow.
    """

    __slots__ = (
        "_copies",
        "_deleting",
        "_dropped",
        "_garbage",
        "_leaving",
        "_saved",
        "_stop_listeners",
        "last_confirmed",
        "ledgers",
        "lock",
        "loop",
        "name",
        "properties",
        "record",
        "state",
        "stores",
        "terminated",
        "trim_soon",
    )

    def __init__(self, name: str, stores: Stores) -> None:
        self.name = name
        self.stores = stores
        self.loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        index = IndexEntry(NAMES_INDEX, name)
        self.record = OwnedRecord(stores.metadata, ledger_key(name), (index,))
        self.state = ManagedLedgerState.LOADING
        self.ledgers = LedgerMap()
        self.last_confirmed = EARLIEST
        self.terminated: Position | None = None
        self.properties: Mapping[str, str] = {}
        self.trim_soon: Callable[[], None] = _no_trimmer
        """Called when a cursor has passed the end of a ledger."""
        self._saved: bytes | None = None
        # A ledger or a copy is deleted only once the record no longer names it: it moves from
        # `_dropped` to `_garbage` in `save`.  A crash before the deletion leaves an orphan, which
        # the searches for orphans find (`ManagedLedgerFactory`).
        self._dropped: set[int] = set()
        self._garbage: set[int] = set()
        self._deleting: asyncio.Task[None] | None = None
        self._leaving = False
        self._copies: dict[UUID, tuple[int, OffloadContext]] = {}
        self._stop_listeners: list[StopListener] = []

    def cursor_pause_s(self) -> float:
        """The time from a change of a cursor until it is written, by the limits and the policy."""
        stores = self.stores
        return stores.persistence(self.name).cursor_pause_s(stores.limits.cursor_flush_ms / 1000)

    def move(self, state: ManagedLedgerState) -> None:
        """Change the state as `MOVES` allows.  Raises `LedgerAssertion` otherwise."""
        self.state = MOVES.move(self.state, state, "Managed ledger {}", self.name)

    def stopped_error(self) -> MagnetarError:
        """The error with which the stream refuses calls in its present state."""
        if self.state is ManagedLedgerState.FENCED:
            return ManagedLedgerFenced(
                f"Managed ledger {self.name} was taken over by another owner: look it up again."
            )
        if self.state is ManagedLedgerState.TERMINATED:
            return ManagedLedgerTerminated(
                f"Managed ledger {self.name} is terminated: write to its successors."
            )
        return ManagedLedgerClosed(f"Managed ledger {self.name} is closed: open it again.")

    def require_running(self) -> None:
        """Raise unless the stream may be changed and read."""
        if self.state in (ManagedLedgerState.FENCED, ManagedLedgerState.CLOSED):
            raise self.stopped_error()

    def release(self) -> None:
        """Drop the callbacks of a closed stream: it is freed without a garbage collection."""
        self.trim_soon = _no_trimmer
        self._stop_listeners.clear()

    def on_stop(self, listener: StopListener) -> None:
        """Call `listener` with the error when the stream becomes FENCED."""
        self._stop_listeners.append(listener)

    def fence(self, cause: MagnetarError) -> None:
        """Stop the stream for good and call the listeners, once.

        Conflicting writes of the record, fenced ledgers and broken invariants lead here.
        """
        if self.state in (ManagedLedgerState.FENCED, ManagedLedgerState.CLOSED):
            return
        # Stores that are not shared have no other owner, so losing them is a fault.
        level = logging.WARNING if self.stores.limits.claim_on_open else logging.ERROR
        log.log(level, "managed_ledger_fenced", name=self.name, error=str(cause))
        self.move(ManagedLedgerState.FENCED)
        error = self.stopped_error()
        error.__cause__ = cause
        for listener in self._stop_listeners:
            self.loop.call_soon(listener, error)

    async def save(
        self,
        *,
        adding: LedgerInfo | None = None,
        without: Collection[int] = (),
        terminated: Position | None = None,
        properties: Mapping[str, str] | None = None,
        offloads: Mapping[int, OffloadContext | None] | None = None,
    ) -> None:
        """Make the list and the given changes durable, then apply them.  The caller holds `lock`.

        Raises `ManagedLedgerFenced` (and fences) on a conflict, `MetadataError` when the outcome
        is unknown: nothing changed in memory then.
        """
        self.require_running()
        offloads = offloads or {}
        ledgers = [
            replace(info, offload=offloads[info.ledger_id]) if info.ledger_id in offloads else info
            for info in self.ledgers.infos
            if info.ledger_id not in without
        ]
        if adding is not None:
            self.ledgers.require_newer(adding.ledger_id)
            ledgers.append(adding)
        terminated = terminated if terminated is not None else self.terminated
        properties = properties if properties is not None else self.properties
        properties = self._with_trimmed_position(without, properties)
        dropped = set(self._dropped)
        await self._put(encode_stream(StreamRecord(tuple(ledgers), terminated, properties)))
        self._dropped -= dropped
        self._garbage |= dropped
        self._garbage.update(without)
        self._take_copies(offloads)
        self._forget(without)
        if adding is not None:
            self.ledgers.add(adding)
        self.terminated = terminated
        self.properties = properties

    async def complete(self, writing: Coroutine[None, None, None]) -> None:
        """Wait until a write of the record is over, also when the caller is cancelled.

        A store carries out a write whose caller was cancelled.  The next one would take it for that
        of another owner.
        """
        task = self.loop.create_task(writing)
        try:
            await asyncio.shield(task)
        finally:
            await asyncio.wait((task,))

    def _with_trimmed_position(
        self, without: Collection[int], properties: Mapping[str, str]
    ) -> Mapping[str, str]:
        """The properties, with the last entry of the ledgers that are trimmed."""
        trimmed = [info.last for info in self.ledgers.infos if info.ledger_id in without]
        trimmed = [last for last in trimmed if last.entry_id >= 0]
        if not trimmed:
            return properties
        ledger_id, entry_id = max(trimmed)
        return {**properties, TRIMMED_PROPERTY: f"{ledger_id}:{entry_id}"}

    def lost_entries(self, ledger_id: int) -> Sequence[EntryRange]:
        """Ranges of entries to step over: lost, in no copy, and the operator goes on without."""
        info = self.ledgers.get(ledger_id)
        if info is not None and info.offload is not None and info.offload.complete:
            return ()
        return self.stores.ledgers.missing_entries(ledger_id)

    @property
    def last_trimmed(self) -> Position | None:
        """The newest entry that was trimmed; None if none was, or none is recorded."""
        noted = self.properties.get(TRIMMED_PROPERTY)
        if noted is None:
            return None
        try:
            ledger_id, entry_id = noted.split(":")
            return Position(int(ledger_id), int(entry_id))
        except ValueError:
            log.error("trimmed_position_unreadable", name=self.name, value=noted)
            return None

    def has_lost(self, start: Position) -> bool:
        """Whether entries at or after `start` were trimmed."""
        trimmed = self.last_trimmed
        if trimmed is not None:
            return start <= trimmed
        if start.ledger_id < 0:
            return False
        infos = self.ledgers.infos
        return start < Position(infos[0].ledger_id, 0) if infos else start <= self.last_confirmed

    async def _put(self, value: bytes) -> None:
        if value == self._saved:
            return
        self._saved = None
        try:
            await self.record.put(value)
        except VersionConflict as error:
            self.fence(error)
            raise self.stopped_error() from error
        self._saved = value

    def note_loaded(self, value: bytes) -> None:
        """Note that the record was read and holds `value`."""
        # On shared stores the next save must write, even the same bytes: that write is the claim.
        self._saved = None if self.stores.limits.claim_on_open else value

    def drop(self, ledger_id: int) -> None:
        """Forget an empty ledger; it is deleted once a record without it is saved."""
        self._forget((ledger_id,))
        self._dropped.add(ledger_id)

    def _take_copies(self, offloads: Mapping[int, OffloadContext | None]) -> None:
        """Note the copies that the record names now; those that they replaced are discarded."""
        for ledger_id, offload in offloads.items():
            info = self.ledgers.get(ledger_id)
            if info is not None:
                if offload is None or info.offload is None or offload.uid != info.offload.uid:
                    self._discard_copy(info)
                info.offload = offload

    def _discard_copy(self, info: LedgerInfo) -> None:
        if info.offload is not None:
            self._copies[info.offload.uid] = (info.ledger_id, info.offload)

    def _forget(self, ledger_ids: Collection[int]) -> None:
        for ledger_id in ledger_ids:
            info = self.ledgers.get(ledger_id)
            if info is not None:
                self._discard_copy(info)
        self.ledgers.drop(ledger_ids)
        for ledger_id in ledger_ids:
            self.stores.cache.drop(ledger_id)

    async def remove(self) -> None:
        """Remove the record; every ledger is garbage then.  The caller holds `lock`."""
        self.require_running()
        try:
            await self.record.delete()
        except VersionConflict as error:
            self.fence(error)
            raise self.stopped_error() from error
        ids = [info.ledger_id for info in self.ledgers.infos]
        self._garbage.update(ids, self._dropped, compaction_ledgers(self.properties))
        self._forget(ids)

    def discard(self, ledger_ids: Collection[int]) -> None:
        """Have `collect` delete ledgers that the saved record does not name any more."""
        self._garbage.update(ledger_ids)

    @property
    def has_garbage(self) -> bool:
        """True if `collect` has something to do."""
        return bool(self._garbage or self._copies)

    async def collect(self) -> None:
        """Delete ledgers and copies that the record no longer names; failures are tried again."""
        for ledger_id in sorted(self._garbage):
            if await self.stores.delete_data_ledger(ledger_id):
                self._garbage.discard(ledger_id)
        if self._copies and not self._leaving:
            deleting = self._deleting
            if deleting is None or deleting.done():
                deleting = self._deleting = self.loop.create_task(self._delete_copies())
            await asyncio.wait({deleting})
            if not deleting.cancelled():
                deleting.result()

    async def _delete_copies(self) -> None:
        for uid, (ledger_id, copy) in list(self._copies.items()):
            if not await self.stores.delete_copy(ledger_id, copy):
                break  # the others are in the same object store, and each try may take long
            self._copies.pop(uid, None)

    def leave_copies(self) -> None:
        """Stop deleting copies, as the stream closes: an object store may answer slowly."""
        self._leaving = True
        if self._deleting is not None:
            self._deleting.cancel()
        if self._copies:
            log.info("offloaded_copies_left", name=self.name, count=len(self._copies))


def _no_trimmer() -> None:
    """Do nothing: there is no trimmer yet."""


def _no_persistence(_: str) -> Persistence:
    return Persistence()
