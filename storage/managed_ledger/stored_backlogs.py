"""The backlogs of a stream as they are stored, without opening it."""

from collections.abc import Mapping

from magnetar.protocol.ids import LedgerId
from storage.ledger.store import NoSuchLedger
from storage.managed_ledger.core import Stores, StreamCore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.cursor_store import newest_position
from storage.managed_ledger.ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger.records import (
    INLINE_LEDGER_ID,
    CursorState,
    cursor_name,
    decode_cursor,
    decode_stream,
)
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import Record


async def stored_backlogs(name: str, stores: Stores) -> Mapping[str, int]:
    """Entries that each durable cursor has not acknowledged, by cursor; none if it has no record.

    Nothing is written and no writer is fenced, so the stream may be open here or elsewhere: the
    answer may be behind then.  Raises `MetadataError`, `LedgerError`, `CorruptRecord`.
    """
    core = StreamCore(name, stores)
    value = await core.record.load()
    if value is None:
        return {}
    infos = decode_stream(core.record.key, value).ledgers
    core.ledgers = LedgerMap([await _with_end(info, stores) for info in infos])
    backlogs: dict[str, int] = {}
    for record in await stores.metadata.scan(*children_range(core.record.key)):
        state = await _state_of(record, stores)
        cursor = Cursor(core, cursor_name(name_of(record.key)), state.mark_delete, None)
        cursor.restore(state)
        cursor.step_over_lost()
        backlogs[cursor.name] = cursor.backlog
    return backlogs


async def _with_end(info: LedgerInfo, stores: Stores) -> LedgerInfo:
    """The ledger with the number of its entries, which its stream has not recorded yet."""
    if info.closed_ms:
        return info
    try:
        ledger = await stores.ledgers.open_no_recovery(LedgerId(info.ledger_id))
    except NoSuchLedger:
        return info
    return LedgerInfo(info.ledger_id, ledger.last_add_confirmed + 1, ledger.length)


async def _state_of(record: Record, stores: Stores) -> CursorState:
    found = decode_cursor(record.key, record.value)
    if found.ledger_id == INLINE_LEDGER_ID:
        return found.state
    try:
        ledger = await stores.ledgers.open_no_recovery(LedgerId(found.ledger_id))
    except NoSuchLedger:
        return found.state
    return await newest_position(ledger, record.key) or found.state
