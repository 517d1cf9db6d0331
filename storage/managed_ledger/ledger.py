"""`ManagedLedger`: one stream made of many ledgers, and how it is opened."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from magnetar.protocol.ids import EARLIEST, LATEST, LedgerId, Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import NoSuchLedger, ReadableLedger
from storage.managed_ledger.compacted import StreamCompaction
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.core import StopListener, Stores, StreamCore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.cursors import Cursors
from storage.managed_ledger.ledger_indexes import LedgerIndexes
from storage.managed_ledger.ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger.offload import StreamOffload
from storage.managed_ledger.reader import StreamReader
from storage.managed_ledger.records import REPLICATED, decode_stream
from storage.managed_ledger.stream_ranges import StreamRanges
from storage.managed_ledger.trimmer import Trimmer
from storage.managed_ledger.types import (
    Entry,
    ManagedLedgerClosed,
    ManagedLedgerNotFound,
    ManagedLedgerState,
    ManagedLedgerTerminated,
    PublishCallback,
    RetentionSource,
)
from storage.managed_ledger.writer import GroupCallback, LedgerWriter

log = structlog.get_logger(__name__)


class ManagedLedger:
    """One stream of entries, over all its ledgers.  Made by `ManagedLedgerFactory.open`.

    Entries are confirmed in order; a confirmed entry is readable and survives any crash.  The
    stream has one owner: an instance that another owner replaced is FENCED.
    """

    __slots__ = (
        "_closing",
        "_core",
        "_cursors",
        "_index",
        "_reader",
        "_terminating",
        "_trimmer",
        "_writer",
        "compaction",
        "offload",
        "ranges",
    )

    def __init__(self, core: StreamCore, retention: RetentionSource) -> None:
        """A loading stream; `open_stream` makes it usable."""
        self._core = core
        self._cursors = Cursors(core)
        self._reader = StreamReader(core, self._current, self._cursors.step_over)
        self._index = LedgerIndexes(core, self._reader.read)
        self._writer = LedgerWriter(core, self._ledgers_changed, self._index.appended)
        self.ranges = StreamRanges(core, self._index, self._reader.read)
        """Messages and bytes in ranges of entries."""
        self.offload = StreamOffload(core, self._reader.forget)
        """Copies of its ended ledgers in object stores: making them, deleting the originals."""
        self.compaction = StreamCompaction(core, self._cursors)
        """Its compacted ledger."""
        self._trimmer = Trimmer(
            core, self._cursors, retention, self._index.ledgers_changed, self.offload
        )
        core.trim_soon = self._trimmer.trim_soon
        self._terminating = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def load(self, *, fresh: bool) -> None:
        """Open the cursors (a fresh stream has none) and the stream itself.  For the factory."""
        if not fresh:
            await self._cursors.load()
        core = self._core
        core.move(
            ManagedLedgerState.OPEN if core.terminated is None else ManagedLedgerState.TERMINATED
        )
        await self.compaction.load()
        self._trimmer.trim_soon()

    # State

    @property
    def name(self) -> str:
        """The path of the managed ledger."""
        return self._core.name

    @property
    def state(self) -> ManagedLedgerState:
        """The present state of the managed ledger."""
        return self._core.state

    @property
    def last_confirmed(self) -> Position:
        """The newest durable entry; (-1, -1) if there was none, or all were gone at opening."""
        return self._core.last_confirmed

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties of the stream, those of users among them."""
        return self._core.properties

    @property
    def cursors(self) -> Mapping[str, Cursor]:
        """The durable cursors by name."""
        return self._cursors.durable

    @property
    def total_size_bytes(self) -> int:
        """Sum of the sizes of the stored entries."""
        return self._core.ledgers.total_size_bytes

    @property
    def entry_count(self) -> int:
        """Number of stored entries."""
        return self._core.ledgers.entry_count

    @property
    def entries_known(self) -> int:
        """Number of entries that were stored since it was opened, or were there then."""
        return self._core.ledgers.total

    @property
    def pending_entries(self) -> int:
        """Number of entries that were taken and are not decided yet."""
        return self._writer.pending_entries

    async def created_ms(self) -> int | None:
        """Wall-clock time at which the stream was made.  Raises `MetadataError`."""
        return await self._core.record.creation_ms()

    @property
    def current_ledger_created_ms(self) -> int | None:
        """Wall-clock time at which the ledger that is written to was made; None without one."""
        age_s = self._writer.ledger_age_s
        return None if age_s is None else self._core.stores.clock.now_ms() - int(age_s * 1000)

    @property
    def ledgers(self) -> Sequence[LedgerInfo]:
        """The ledgers of the log, oldest first.  Not to be changed."""
        return self._core.ledgers.infos

    # Appending

    @property
    def max_entry_bytes(self) -> int:
        """The largest entry that its ledger store takes."""
        return self._core.stores.ledgers.max_entry_bytes

    def append(self, data: bytes, done: PublishCallback) -> None:
        """Store one entry; `done` is called on the loop, in order, when that is decided.

        Raises `ManagedLedgerTerminated`, `ManagedLedgerFenced`, `ManagedLedgerClosed`,
        `ManagedLedgerBusy` and `AppendRefused`: the entry was not taken and `done` is not called.
        """
        self._writer.append(data, done)

    def append_all(self, entries: Sequence[bytes], done: GroupCallback) -> int:
        """Store entries in order; returns how many were taken, the first at least.

        `done` is called on the loop, in order, when that is decided.  Call again for the rest:
        raises as `append` does if the first one is not taken.
        """
        return self._writer.append_all(entries, done)

    def on_append(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` once for each group of entries that became readable.

        The call follows the group's publish callbacks.  Of many listeners, some are called in later
        turns of the loop, and then once for all groups until then.  Returns a function that removes
        it.
        """
        return self._writer.on_append(listener)

    def on_stop(self, listener: StopListener) -> None:
        """Call `listener` with the error when the stream becomes FENCED."""
        self._core.on_stop(listener)

    async def terminate(self) -> Position:
        """Seal the stream for ever and return its last position.  Idempotent.

        A caller that is cancelled while the end is written waits for that write.

        Entries taken before are decided first.  From the call on `append` raises
        `ManagedLedgerTerminated`, also if this raises: `LedgerError`, `MetadataError`,
        `AppendOutcomeUnknown` (call again), `ManagedLedgerFenced`, `ManagedLedgerClosed`.
        """
        core = self._core
        async with self._terminating:
            core.require_running()
            if core.terminated is None:
                self._writer.refuse(
                    ManagedLedgerTerminated(
                        f"Managed ledger {core.name} is terminated: write to its successors."
                    )
                )
                await self._writer.finish()
                await core.complete(self._save_end())
            return core.terminated or core.last_confirmed

    async def _save_end(self) -> None:
        core = self._core
        async with core.lock:
            await core.save(terminated=core.last_confirmed)
        core.move(ManagedLedgerState.TERMINATED)
        self._ledgers_changed()

    # Reading

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """Entries from the first at or after `start`, from memory; [] at the end.

        None: they are not in the cache, use `read`.
        """
        return self._reader.read_cached(start, max_entries, max_bytes)

    async def read(
        self,
        start: Position,
        *,
        max_entries: int,
        max_bytes: int,
        up_to: Position | None = None,
    ) -> list[Entry]:
        """Entries from the first at or after `start`, none after `up_to`; [] at the end.

        `max_bytes` bounds their data, but one entry always comes.  Raises `LedgerError`,
        `MetadataError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`.
        """
        limit = LATEST if up_to is None else up_to
        return await self._reader.read(
            start, max_entries=max_entries, max_bytes=max_bytes, up_to=limit
        )

    async def ledger_record(self, ledger_id: int) -> str | None:
        """The record of a ledger as text; None if there is none.  Raises `LedgerError`."""
        try:
            return (await self._core.stores.ledgers.describe(LedgerId(ledger_id))).record
        except NoSuchLedger:  # It is offloaded, or was deleted just now.
            return None

    def next_position(self, position: Position) -> Position:
        """The first entry after `position`; at the end, a position that has no entry yet."""
        return self._core.ledgers.next(position)

    def previous_position(self, position: Position) -> Position:
        """The last entry before `position`; entry -1 of the first ledger if there is none."""
        return self._core.ledgers.before(position)

    def entry_at(self, index: int) -> Position:
        """The stored entry with that number, the oldest being 0; at the end as `next_position`."""
        ledgers = self._core.ledgers
        return ledgers.at(ledgers.total - ledgers.entry_count + index)

    def size_after(self, position: Position) -> int:
        """Bytes of the entries after `position`, in proportion within its ledger.  Reads nothing.

        `ranges` has the exact number.
        """
        return self._core.ledgers.size_after(position)

    def with_size_after(self, size_bytes: int) -> Position:
        """The first of the newest entries that have at most so many bytes, as `size_after` counts.

        At the end of the stream, a position that has no entry yet.
        """
        return self._core.ledgers.with_size_after(size_bytes)

    def has_lost(self, start: Position) -> bool:
        """Whether entries at or after `start` were trimmed.

        Exact for entries that Magnetar trimmed.  Apache Pulsar records no trimmed position: then a
        position in a ledger that is gone counts as lost, and the very beginning does not.
        """
        return self._core.has_lost(start)

    async def find_first(self, predicate: Callable[[Entry], bool]) -> Position | None:
        """The first entry for which `predicate` holds, given that it holds for all later ones.

        None if it holds for none.  Reads about log2 of the number of entries; raises as `read`.
        """
        return await self._reader.find_first(predicate)

    # Cursors

    async def open_cursor(
        self,
        name: str,
        start: Position,
        *,
        properties: Mapping[str, str] | None = None,
        replicated: bool = False,
        replication_note: str = "",
        begins: bool = False,
    ) -> Cursor:
        """The durable cursor `name`; made at EARLIEST, LATEST or after `start` if it is new.

        `replicated` and `replication_note` as in `Cursor`, of a new one; `begins`: it notes where
        it began.  Raises `MetadataError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`.
        """
        noted = {REPLICATED: replication_note} if replicated else {}
        stored = {**(properties or {}), **noted}
        return await self._cursors.open(name, start, stored, begins=begins)

    def open_reader_cursor(self, name: str, start: Position) -> Cursor:
        """A new cursor that is not durable and keeps entries until `delete_cursor`.

        Raises `CursorExists` for a name in use.
        """
        return self._cursors.open_reader(name, start)

    async def delete_cursor(self, name: str) -> None:
        """Remove a cursor, durable or not.  Raises `CursorNotFound`.

        With the cursor of compaction the compacted ledger goes.
        """
        if name == COMPACTION_CURSOR:
            await self.compaction.drop()
        await self._cursors.delete(name)

    # Properties, trimming, closing, deleting

    async def set_properties(self, changes: Mapping[str, str | None]) -> None:
        """Change properties durably; None removes one.

        A caller that is cancelled waits for the write.
        """
        await self._core.complete(self._set_properties(changes))

    async def _set_properties(self, changes: Mapping[str, str | None]) -> None:
        core = self._core
        async with core.lock:
            merged = {**core.properties, **changes}
            kept = {key: value for key, value in merged.items() if value is not None}
            await core.save(properties=kept)

    def use_retention(self, retention: RetentionSource) -> None:
        """Set the source of the retention policy; call `trim_soon` when the policy changes."""
        self._trimmer.retention = retention
        self._trimmer.trim_soon()

    def trim_soon(self) -> None:
        """Drop, in a task, the ledgers that may go by the policies of now."""
        self._trimmer.trim_soon()

    async def trim(self) -> None:
        """Drop the ledgers that may go; this also happens by itself.  Raises `MetadataError`."""
        await self._trimmer.trim()

    async def end_ledger(self) -> None:
        """End the ledger that is written to: the next entry opens another one.

        A failure is logged: the ledger goes on then.  Raises `ManagedLedgerFenced`,
        `ManagedLedgerClosed`.
        """
        self._core.require_running()
        if self._core.terminated is None:
            await self._writer.end_ledger()

    async def drop_up_to(self, last: Position) -> None:
        """Drop every ended ledger without entries behind `last` that all cursors have read.

        No policy keeps them.  Raises as `trim`.
        """
        await self._trimmer.drop_up_to(last)

    def next_trim_ms(self) -> int | None:
        """Wall-clock time at which a ledger may go by time alone; None if none ever may.

        Valid for a closed stream too: it tells when to open the stream again.
        """
        return self._trimmer.due_ms()

    def require_whole(self) -> None:
        """Raise `LedgersDamaged` if entries were lost and the operator wants it refused then."""
        _require_whole(self._core, self._core.ledgers.infos)

    def _current(self, ledger_id: int) -> ReadableLedger | None:
        return self._writer.reader(ledger_id)

    def _ledgers_changed(self) -> None:
        self._index.ledgers_changed()
        self._cursors.refresh_boundaries()
        self._trimmer.trim_soon()

    async def close(self) -> None:
        """Finish the entries taken, make all state durable, and stop.  Idempotent, never raises.

        State that cannot be made durable now is recovered by the next opening, as after a crash.
        """
        if self._closing is None:
            self._writer.refuse(
                ManagedLedgerClosed(f"Managed ledger {self.name} is closed: open it again.")
            )
            self._closing = self._core.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        core = self._core
        async with self._terminating:
            if core.state is ManagedLedgerState.CLOSED:
                return
            await self.offload.stop()
            core.leave_copies()
            await self.compaction.stop()
            await self._trimmer.stop()
            try:
                await self._writer.finish()
            except MagnetarError as error:
                log.warning("managed_ledger_not_finished", name=core.name, error=str(error))
            await self._cursors.close()
            await self._index.close()
            try:
                if core.state is not ManagedLedgerState.FENCED:
                    async with core.lock:
                        await core.save()
                    await self._writer.discard_prepared()
                    await core.collect()
            except MagnetarError as error:
                log.warning("managed_ledger_not_closed", name=core.name, error=str(error))
            self._release()

    async def delete(self) -> None:
        """Remove the stream: cursors, record, ledgers.  For the factory.

        A crash in between leaves a whole stream with fewer cursors, or orphaned ledgers.
        """
        core = self._core
        self._writer.refuse(
            ManagedLedgerClosed(f"Managed ledger {core.name} is deleted: create it again.")
        )
        async with self._terminating:
            await self.offload.stop()
            await self.compaction.stop()
            await self._trimmer.stop()
            try:
                await self._writer.finish()
            except MagnetarError as error:
                log.warning("deleted_with_failed_writes", name=core.name, error=str(error))
            core.require_running()
            await self._index.close()
            for name in [*self._cursors.readers, *self._cursors.durable]:
                await self._cursors.delete(name)
            async with core.lock:
                await core.remove()
            self._release()
        await core.collect()

    def _release(self) -> None:
        core = self._core
        if core.state is not ManagedLedgerState.CLOSED:
            core.move(ManagedLedgerState.CLOSED)
        for info in core.ledgers.infos:
            core.stores.cache.drop(info.ledger_id)
        # The parts call each other.  A collection of the oldest garbage comes rarely, and stands
        # the event loop still when thousands of streams were closed.
        core.release()
        self._writer.release()
        self._reader.release()
        self._cursors.release()


async def open_stream(
    name: str, stores: Stores, retention: RetentionSource, *, create: bool, damaged: bool = False
) -> ManagedLedger:
    """Open the stream of that ledger path.  No ledger is made: the first append makes one.

    `damaged` opens it even if entries were lost and the operator wants it refused then: for its
    deletion.  Raises `ManagedLedgerNotFound` unless `create`, `MetadataError`, `LedgerError`,
    `CorruptRecord`, `LedgersDamaged`, and `ManagedLedgerFenced` when another owner opened it
    meanwhile.
    """
    core = StreamCore(name, stores)
    value = await core.record.load()
    if value is None and not create:
        raise ManagedLedgerNotFound(f"There is no managed ledger {name}: create the topic first.")
    # This order shuts an earlier owner out before the stream serves anything.  First its ledgers
    # are opened, which fences their writers and recovers them.
    if value is not None:
        if not damaged:
            # Before a ledger is opened: that would record the end of what is left as its end.
            _require_whole(core, decode_stream(core.record.key, value).ledgers)
        await _restore(core, value)
    # Then the record is written: if that changed it, and always on shared stores.  From here on
    # every write of an earlier owner conflicts.
    async with core.lock:
        await core.save()
    await core.collect()
    ledger = ManagedLedger(core, retention)
    # Last the cursors are opened, which fences the writers of their ledgers.
    await ledger.load(fresh=value is None)
    return ledger


def _require_whole(core: StreamCore, infos: Sequence[LedgerInfo]) -> None:
    """Raise `LedgersDamaged` if entries were lost that no copy has."""
    ledgers = [
        info.ledger_id for info in infos if info.offload is None or not info.offload.complete
    ]
    core.stores.ledgers.require_whole(core.name, ledgers)


async def _restore(core: StreamCore, value: bytes) -> None:
    """Take the stream's state from its record, with the true ends of ledgers left open."""
    record = decode_stream(core.record.key, value)
    infos = [await _end_of(core, info) for info in record.ledgers]
    core.note_loaded(value)
    core.ledgers = LedgerMap(infos)
    core.terminated = record.terminated
    core.properties = record.properties
    for info in infos:
        if info.entries == 0:
            core.drop(info.ledger_id)
    core.last_confirmed = EARLIEST
    if record.terminated is not None:
        core.ledgers.remember(record.terminated)
        core.last_confirmed = record.terminated
    newest = core.ledgers.last
    if newest is not None:
        core.last_confirmed = newest.last


async def _end_of(core: StreamCore, info: LedgerInfo) -> LedgerInfo:
    """The ledger with its end; one left open is opened, which fences and recovers it."""
    if info.closed_ms:
        return info
    ledger = await core.stores.ledgers.open(LedgerId(info.ledger_id))
    return LedgerInfo(
        info.ledger_id,
        ledger.last_add_confirmed + 1,
        ledger.length,
        core.stores.clock.now_ms(),
    )
