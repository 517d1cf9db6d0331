"""Storage of a durable cursor's position (docs/decisions/cursor-positions.md)."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace

import structlog

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import (
    AppendRefused,
    CorruptEntry,
    LedgerError,
    LedgerFenced,
    NoSuchLedger,
    ReadableLedger,
    WritableLedger,
    entry_too_large,
)
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.owned_record import OwnedRecord
from storage.managed_ledger.records import (
    INLINE_LEDGER_ID,
    CursorSnapshot,
    CursorState,
    cursor_key,
    decode_cursor,
    decode_position,
    encode_cursor,
    encode_position,
    inline_bytes,
)
from storage.managed_ledger.types import CorruptRecord, CursorNotFound
from storage.metadata.store import Record, VersionConflict

log = structlog.get_logger(__name__)
TakeSnapshot = Callable[[], CursorSnapshot]


class CursorStore:
    """Stores a durable cursor's position, in the cursor's record or in a cursor ledger.

    A position that is small and seldom written is in the record: one conditional write, no ledger.
    A cursor that is written often, or whose position is large, gets a cursor ledger: each write
    appends a whole `PositionInfo`, and recovery takes the last one.  A clean close moves the
    position back into the record.

    One write runs at a time, and takes the snapshot when it begins.  A conflicting record or a
    fenced cursor ledger means another owner: the stream becomes FENCED.
    """

    __slots__ = (
        "_core",
        "_deleted",
        "_inline_writes",
        "_ledger",
        "_ledger_bytes",
        "_ledger_entries",
        "_ledger_since",
        "_lock",
        "_record",
        "_superseded",
        "corrected",
        "name",
        "properties",
        "unused_since_ms",
    )

    def __init__(self, core: StreamCore, name: str, properties: Mapping[str, str]) -> None:
        self.name = name
        self.properties = dict(properties)
        self._core = core
        self._record = OwnedRecord(core.stores.metadata, cursor_key(core.name, name))
        self._lock = asyncio.Lock()
        self._ledger: WritableLedger | None = None
        self._ledger_entries = self._ledger_bytes = 0
        self._ledger_since = 0.0
        self._inline_writes = 0
        self._deleted = False
        self._superseded: set[int] = set()
        self.corrected = False
        """Whether `load` corrected the position: write it, so that the next load finds it so."""
        self.unused_since_ms: int | None = None
        """What the record says; see `CursorSnapshot.unused_since_ms`."""

    @property
    def ledger(self) -> tuple[int, int]:
        """The cursor ledger that is written to and its last entry; -1 both without one."""
        if self._ledger is None:
            return INLINE_LEDGER_ID, -1
        return int(self._ledger.ledger_id), self._ledger_entries - 1

    async def load(self, record: Record) -> CursorState:
        """The position that the record holds, or that is in the ledger it names."""
        self._record.adopt(record)
        found = decode_cursor(record.key, record.value)
        self.properties = dict(found.properties)
        self.unused_since_ms = found.unused_since_ms
        state = found.state
        if found.ledger_id != INLINE_LEDGER_ID:
            self._superseded.add(found.ledger_id)
            state = await self._read_last(found.ledger_id) or state
        state = self._within_stream(state, found.state)
        await self._claim(record)
        return state

    async def _claim(self, record: Record) -> None:
        """Write the record back on shared stores (A3)."""
        # A3: from here on an earlier owner's write of this cursor conflicts.
        if self._core.stores.limits.claim_on_open:
            await self._guarded(self._record.put(record.value))

    def _within_stream(self, state: CursorState, recorded: CursorState) -> CursorState:
        """The position, but not beyond the end that the stream's record gives.

        Sets `corrected` if it was beyond.
        """
        # In a restored backup the log may be newer than the metadata, and the ids of the ledgers
        # that are missing there are given out again.
        newest, mark = self._core.ledgers.last, state.mark_delete
        # A stream that lists no ledger may have dropped them all.  Then the position in the
        # cursor's record is as good, and no newer than the stream's record.
        unlisted = self._core.terminated or recorded.mark_delete
        end = unlisted if newest is None else newest.last
        if state.began is not None and state.began > end:
            state = replace(state, began=end)
        if mark <= end:
            return state
        self.corrected = mark.entry_id >= 0
        if newest is not None and self.corrected:
            log.warning("cursor_position_beyond_end", cursor=self._record.key, found=mark, used=end)
        return replace(state, mark_delete=end)

    async def _read_last(self, ledger_id: int) -> CursorState | None:
        """The newest readable position of a cursor ledger; opening it fences its writer."""
        try:
            ledger = await self._core.stores.ledgers.open(LedgerId(ledger_id))
        except NoSuchLedger:
            log.warning("cursor_ledger_missing", cursor=self._record.key, ledger=ledger_id)
            return None
        return await newest_position(ledger, self._record.key)

    async def create(self, left: Record | None, snapshot: TakeSnapshot) -> None:
        """Make the record, over one that is `left` of an unfinished creation (A3).

        Raises `ManagedLedgerFenced` if another owner just made it, or owns the stream now.
        """
        # A3: the cursor counts once its record is stored and we are seen, after that, to own the
        # stream still.  Then a later owner finds the record.  If we had lost the stream we remove
        # the record; if we die first, the next creation of a cursor of that name writes over it.
        async with self._lock:
            if left is not None:
                await self._guarded(self._require_owner())
                self._record.adopt(left)
                self._superseded.add(decode_cursor(left.key, left.value).ledger_id)
                self._superseded.discard(INLINE_LEDGER_ID)
            await self._guarded(self._put(INLINE_LEDGER_ID, snapshot))
            if left is None:
                await self._guarded(self._remove_unless_owner())

    async def _require_owner(self) -> None:
        if self._core.stores.limits.claim_on_open:
            await self._core.record.require_owned()

    async def _remove_unless_owner(self) -> None:
        try:
            await self._require_owner()
        except VersionConflict:
            with suppress(VersionConflict):  # the new owner has claimed it already
                await self._record.delete()
            raise

    async def write(self, snapshot: TakeSnapshot) -> None:
        """Make the position durable.  Raises `MetadataError`, `LedgerError`, `ManagedLedgerFenced`.

        After an error the position may or may not be durable.
        """
        async with self._lock:
            if not self._deleted:
                self._core.require_running()
                await self._guarded(self._write(snapshot))

    async def change_properties(
        self, change: Callable[[Mapping[str, str]], Mapping[str, str]], snapshot: TakeSnapshot
    ) -> None:
        """Replace the cursor's properties, durably, by what `change` makes of them.

        Raises `CursorNotFound` once it is deleted, and as `write`.
        """
        async with self._lock:
            if self._deleted:
                raise CursorNotFound(
                    f"{self._core.name} has no cursor {self.name!r} any more: make it anew."
                )
            self._core.require_running()
            before, self.properties = self.properties, dict(change(self.properties))
            ledger_id = INLINE_LEDGER_ID if self._ledger is None else int(self._ledger.ledger_id)
            try:
                if self._ledger is None and not _small(snapshot()):
                    await self._guarded(self._switch(snapshot))
                else:
                    await self._guarded(self._put(ledger_id, snapshot))
            except BaseException:
                self.properties = before
                raise

    async def close(self, snapshot: TakeSnapshot, *, dirty: bool) -> None:
        """Write the position where the next opening reads it cheapest: in the record if it fits."""
        async with self._lock:
            if _small(snapshot()):
                if dirty or self._ledger is not None or self._superseded:
                    await self._guarded(self._put(INLINE_LEDGER_ID, snapshot))
            elif dirty:
                await self._guarded(self._write(snapshot))
            if self._ledger is not None:
                await self._guarded(self._ledger.close())

    async def delete(self) -> None:
        """Remove the record, then the ledger that it named."""
        async with self._lock:
            await self._guarded(self._record.delete())
            self._deleted = True
            self._give_up_ledger()
            await self._delete_superseded(INLINE_LEDGER_ID)

    async def _guarded(self, operation: Coroutine[object, object, None]) -> None:
        try:
            await operation
        except (VersionConflict, LedgerFenced) as error:
            self._core.fence(error)
            raise self._core.stopped_error() from error

    async def _write(self, snapshot: TakeSnapshot) -> None:
        if self._ledger is None:
            if self._inline_writes < bounds.CURSOR_INLINE_WRITES and _small(snapshot()):
                self._inline_writes += 1
                await self._put(INLINE_LEDGER_ID, snapshot)
            else:
                await self._switch(snapshot)
        elif (
            self._ledger_entries >= bounds.CURSOR_LEDGER_ENTRIES
            or self._ledger_bytes >= bounds.CURSOR_LEDGER_BYTES
            or self._core.loop.time() - self._ledger_since >= bounds.CURSOR_LEDGER_AGE_S
        ):
            await self._switch(snapshot)
        else:
            position = encode_position(snapshot())
            try:
                await _append(self._ledger, position, self._core.loop)
            except AppendRefused:
                # The ledger is as before.  The position is written later, when it is smaller.
                raise
            except BaseException:
                # The outcome is unknown.  Whichever entry is the last, this cursor was there.
                self._give_up_ledger()
                raise
            self._ledger_entries += 1
            self._ledger_bytes += len(position)
            if snapshot().unused_since_ms != self.unused_since_ms:
                await self._put(int(self._ledger.ledger_id), snapshot)

    async def _switch(self, snapshot: TakeSnapshot) -> None:
        """Start the next cursor ledger with the position, then name it in the record."""
        stores, loop = self._core.stores, self._core.loop
        size, largest = len(encode_position(snapshot())), stores.ledgers.max_entry_bytes
        if size > largest:
            # Before a ledger is made for it.
            raise entry_too_large(size, largest)
        made_ms = stores.clock.now_ms()
        ledger = await stores.create_ledger(self._core.name, self.name)
        ledger_id = int(ledger.ledger_id)
        try:
            position = encode_position(snapshot())
            await _append(ledger, position, loop)
            if not stores.may_name(made_ms):
                raise LedgerError(
                    f"Ledger {ledger_id} for {self._record.key} took too long to make: it is made "
                    "anew; look at the bookies."
                )
        except LedgerError:
            await stores.delete_ledger(ledger_id)
            raise
        self._give_up_ledger()
        # Until the record names the new ledger, it is one to delete.
        self._superseded.add(ledger_id)
        await self._put(ledger_id, snapshot)
        self._superseded.discard(ledger_id)
        self._ledger, self._ledger_entries, self._ledger_since = ledger, 1, loop.time()
        self._ledger_bytes = len(position)

    async def _put(self, ledger_id: int, snapshot: TakeSnapshot) -> None:
        """Write the record, and delete the ledgers that it no longer names."""
        now_ms = self._core.stores.clock.now_ms()
        taken = snapshot()
        await self._record.put(encode_cursor(ledger_id, taken, self.properties, now_ms))
        self.unused_since_ms = taken.unused_since_ms
        if self._ledger is not None and int(self._ledger.ledger_id) != ledger_id:
            self._give_up_ledger()
        await self._delete_superseded(ledger_id)

    def _give_up_ledger(self) -> None:
        if self._ledger is not None:
            self._superseded.add(int(self._ledger.ledger_id))
            self._ledger = None

    async def _delete_superseded(self, named: int) -> None:
        for ledger_id in sorted(self._superseded - {named}):
            if await self._core.stores.delete_ledger(ledger_id):
                self._superseded.discard(ledger_id)


async def newest_position(ledger: ReadableLedger, key: str) -> CursorState | None:
    """The newest readable position of a cursor ledger; `key` names the cursor in errors."""
    last = ledger.last_add_confirmed
    for entry_id in range(last, max(last - bounds.CURSOR_LEDGER_LOOKBACK, -1), -1):
        try:
            (data,) = await ledger.read(entry_id, entry_id, max_bytes=1)
            return decode_position(key, data)
        except (CorruptEntry, CorruptRecord) as error:
            log.warning("cursor_position_damaged", cursor=key, error=str(error))
    return None


def _small(snapshot: CursorSnapshot) -> bool:
    return inline_bytes(snapshot) <= bounds.CURSOR_INLINE_BYTES


async def _append(ledger: WritableLedger, data: bytes, loop: asyncio.AbstractEventLoop) -> None:
    """Append one entry and wait until it is durable."""
    durable: asyncio.Future[None] = loop.create_future()

    def done(_entry_id: int, error: LedgerError | None) -> None:
        if durable.done():
            return
        if error is None:
            durable.set_result(None)
        else:
            durable.set_exception(error)

    ledger.append(data, done)
    await durable
