"""A stream as it is stored, without opening it."""

from collections.abc import Mapping
from dataclasses import dataclass

from magnetar.protocol.ids import EARLIEST, LedgerId, Position
from storage.callbacks import ignore
from storage.ledger.store import NoSuchLedger, ReadableLedger
from storage.managed_ledger.core import Stores, StreamCore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.cursor_store import newest_position
from storage.managed_ledger.ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger.reader import StreamReader
from storage.managed_ledger.records import (
    INLINE_LEDGER_ID,
    REPLICATED,
    CursorRecord,
    CursorState,
    cursor_name,
    decode_cursor,
    decode_stream,
)
from storage.managed_ledger.types import Entry
from storage.metadata.keys import children_range, name_of


@dataclass(frozen=True, slots=True)
class StoredCursor:
    """A durable cursor as it is stored."""

    backlog: int
    """Entries that are not, or not wholly, acknowledged."""
    backlog_size_bytes: int
    """Bytes after its mark-delete position, in proportion within that ledger."""
    acked_run_count: int
    """Runs of acknowledged entries after its mark-delete position."""
    oldest: Position
    """The first entry that is not acknowledged, if it has a backlog."""
    properties: Mapping[str, str]
    replicated: bool


class StoredStream:
    """The ledgers and cursors of a stream; `read_stored_stream` makes it.

    Nothing is written and no writer is fenced, so the stream may be open here or elsewhere: it may
    be behind then.
    """

    def __init__(
        self,
        core: StreamCore,
        unended: Mapping[int, ReadableLedger],
        cursors: Mapping[str, StoredCursor],
    ) -> None:
        """`unended` are the ledgers whose end is not recorded."""
        self._core = core
        self._reader = StreamReader(core, unended.get, ignore)
        self.cursors = cursors
        """By name."""

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the stored entries."""
        return self._core.ledgers.total_size_bytes

    @property
    def offloaded_size_bytes(self) -> int:
        """Sum of the sizes of the ledgers that have a complete copy in an object store."""
        return sum(
            info.size_bytes
            for info in self._core.ledgers.infos
            if info.offload is not None and info.offload.complete
        )

    @property
    def created_ms(self) -> int | None:
        """Wall-clock time at which the stream was made."""
        return self._core.record.created_ms

    async def newest(self) -> Entry | None:
        """The newest entry; None without any.  Raises the errors of reading."""
        return await self.entry(self._core.last_confirmed)

    async def entry(self, position: Position) -> Entry | None:
        """The first entry at or after a position.  Raises the errors of reading."""
        found = await self._reader.read(position, max_entries=1, max_bytes=1)
        return found[0] if found else None


async def read_stored_stream(name: str, stores: Stores) -> StoredStream | None:
    """Read the records of a stream, and the ends of those that are in ledgers; None without one.

    Raises `MetadataError`, `LedgerError`, `CorruptRecord`.
    """
    core = StreamCore(name, stores)
    value = await core.record.load()
    if value is None:
        return None
    unended: dict[int, ReadableLedger] = {}
    infos = decode_stream(core.record.key, value).ledgers
    core.ledgers = LedgerMap([await _with_end(info, stores, unended) for info in infos])
    newest = core.ledgers.last
    if newest is not None:
        core.last_confirmed = newest.last
    cursors: dict[str, StoredCursor] = {}
    for record in await stores.metadata.scan(*children_range(core.record.key)):
        found = decode_cursor(record.key, record.value)
        state = await _state_of(record.key, found, stores)
        cursor = Cursor(core, cursor_name(name_of(record.key)), state.mark_delete, None)
        cursor.restore(state)
        cursor.step_over_lost()
        cursors[cursor.name] = _stored(core, cursor, found.properties)
    return StoredStream(core, unended, cursors)


def _stored(core: StreamCore, cursor: Cursor, properties: Mapping[str, str]) -> StoredCursor:
    return StoredCursor(
        cursor.backlog,
        core.ledgers.size_after(cursor.mark_delete),
        cursor.acked_run_count,
        cursor.first_unacknowledged(EARLIEST),
        {key: text for key, text in properties.items() if key != REPLICATED},
        REPLICATED in properties,
    )


async def _with_end(
    info: LedgerInfo, stores: Stores, unended: dict[int, ReadableLedger]
) -> LedgerInfo:
    """The ledger with the number of its entries, which its stream has not recorded yet.

    Its handle is added to `unended`.
    """
    if info.closed_ms:
        return info
    try:
        ledger = await stores.ledgers.open_no_recovery(LedgerId(info.ledger_id))
    except NoSuchLedger:
        return info
    unended[info.ledger_id] = ledger
    return LedgerInfo(info.ledger_id, ledger.last_add_confirmed + 1, ledger.length)


async def _state_of(key: str, record: CursorRecord, stores: Stores) -> CursorState:
    if record.ledger_id == INLINE_LEDGER_ID:
        return record.state
    try:
        ledger = await stores.ledgers.open_no_recovery(LedgerId(record.ledger_id))
    except NoSuchLedger:
        return record.state
    return await newest_position(ledger, key) or record.state
