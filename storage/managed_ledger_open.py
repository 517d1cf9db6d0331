"""Opening a managed ledger.

Rules, in this order (so that an earlier owner is shut out before anything is served):

- Read the record.  Open every ledger in it that has not ended, which fences its writer and
  recovers it; note its end, drop it if it is empty.
- Write the record if that changed it, or always where several processes share the stores: an
  earlier owner's next write of it conflicts then.
- Open the cursors, which fences the writers of their ledgers.
- No ledger is made: the first append does that.
"""

from protocol.ids import EARLIEST, LedgerId
from storage.managed_ledger import ManagedLedger
from storage.managed_ledger_core import Stores, StreamCore
from storage.managed_ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger_records import decode_stream
from storage.managed_ledger_types import ManagedLedgerNotFound, RetentionSource


async def open_stream(
    name: str, stores: Stores, retention: RetentionSource, *, create: bool
) -> ManagedLedger:
    """The stream of that ledger path, ready.

    Raises `ManagedLedgerNotFound` unless `create`, `MetadataError`, `LedgerError`,
    `CorruptRecord`, and `ManagedLedgerFenced` when another owner opened it meanwhile.
    """
    core = StreamCore(name, stores)
    value = await core.record.load()
    if value is None and not create:
        raise ManagedLedgerNotFound(f"There is no managed ledger {name}: create the topic first.")
    if value is not None:
        await _restore(core, value)
    async with core.lock:
        await core.save()
    await core.collect()
    ledger = ManagedLedger(core, retention)
    await ledger.load(fresh=value is None)
    return ledger


async def _restore(core: StreamCore, value: bytes) -> None:
    """Take over what the record says, with the true ends of ledgers that were being written."""
    record = decode_stream(core.record.key, value)
    infos = [await _ended(core, info) for info in record.ledgers]
    core.loaded(value)
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


async def _ended(core: StreamCore, info: LedgerInfo) -> LedgerInfo:
    if info.closed_ms:
        return info
    ledger = await core.stores.ledgers.open(LedgerId(info.ledger_id))
    return LedgerInfo(
        info.ledger_id,
        ledger.last_add_confirmed + 1,
        ledger.length,
        core.stores.clock.now_ms(),
    )
