"""Ledgers on shared stores that no record names, left by a crash
(docs/decisions/orphaned-ledgers.md).
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import NoSuchLedger
from storage.managed_ledger.compacted_record import compaction_ledgers
from storage.managed_ledger.core import COMPONENT, CURSOR, INSTANCE, MANAGED_LEDGER, STREAM, Stores
from storage.managed_ledger.records import (
    NAMES_INDEX,
    decode_cursor,
    decode_stream,
    is_ledger_key,
    ledger_key,
)
from storage.metadata.keys import LAST, children_range
from storage.metadata.store import MetadataStore, Record

log = structlog.get_logger(__name__)
HEALTH = b"health"
"""Component of the ledgers of health checks, which no record ever names."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OrphanedLedger:
    """A ledger that no record names, and what it was made for; `stream` is empty for health."""

    ledger_id: LedgerId
    stream: str
    cursor: str
    created_ms: int


async def find_orphans(stores: Stores) -> list[OrphanedLedger]:
    """The orphaned ledgers of shared stores, by id.

    Raises `LedgerError`, `MetadataError`, `CorruptRecord`.
    """
    # The records are read after the ledgers were listed, and past every acknowledged write, so a
    # ledger that is named meanwhile is no orphan.
    listed = await stores.ledgers.list_ledgers()
    named: set[int] = set()
    for record in await stream_records(stores.metadata, fresh=True):
        named |= _named_by(record)
    instance = await stores.instance()
    found: list[OrphanedLedger] = []
    for some in chunks([ledger_id for ledger_id in listed if ledger_id not in named]):
        described = await asyncio.gather(*(_candidate(stores, each, instance) for each in some))
        found.extend(each for each in described if each is not None)
    orphans: list[OrphanedLedger] = []
    for stream, ledgers in _by_stream(found).items():
        orphans.extend(await _unnamed(stores.metadata, stream, ledgers))
    return sorted(orphans, key=lambda each: each.ledger_id)


async def delete_orphans(stores: Stores) -> list[OrphanedLedger]:
    """Delete the orphaned ledgers, and return those that were deleted.

    Failures are logged; the next call finds these ledgers again.  Raises as `find_orphans`.
    """
    deleted: list[OrphanedLedger] = []
    for stream, ledgers in _by_stream(await find_orphans(stores)).items():
        # The records are read once more right before the deletion.
        for each in await _unnamed(stores.metadata, stream, ledgers):
            if await stores.delete_data_ledger(each.ledger_id):
                log.info("orphaned_ledger_deleted", ledger=each.ledger_id, name=stream)
                deleted.append(each)
    return sorted(deleted, key=lambda each: each.ledger_id)


async def _candidate(stores: Stores, ledger_id: LedgerId, instance: bytes) -> OrphanedLedger | None:
    """The ledger, if it is ours and too old to be named by a record that is yet to be written."""
    try:
        description = await stores.ledgers.describe(ledger_id)
    except NoSuchLedger:
        return None
    made_ms, custom = description.created_ms, description.custom
    # Bookies may hold ledgers of other applications, or of clusters with another metadata store.
    if made_ms is None or custom.get(INSTANCE) != instance:
        return None
    # A ledger is named within LEDGER_NAMING_MS or never, and a health check replaces its ledger
    # within that time.  The greater age here covers calls in flight and clocks that differ.
    if stores.clock.now_ms() - made_ms < bounds.ORPHANED_LEDGER_AGE_MS:
        return None
    stream, cursor = custom.get(STREAM, b"").decode(), custom.get(CURSOR, b"").decode()
    component = custom.get(COMPONENT)
    if component != HEALTH and (component != MANAGED_LEDGER or not stream):
        return None
    return OrphanedLedger(ledger_id, stream, cursor, made_ms)


def _by_stream(ledgers: Iterable[OrphanedLedger]) -> Mapping[str, list[OrphanedLedger]]:
    found: dict[str, list[OrphanedLedger]] = {}
    for each in ledgers:
        found.setdefault(each.stream, []).append(each)
    return found


async def _unnamed(
    metadata: MetadataStore, stream: str, ledgers: list[OrphanedLedger]
) -> list[OrphanedLedger]:
    """The ledgers that the records of their stream and its cursors do not name now."""
    # No other record can name them: a ledger is named by the stream that made it, or by a cursor
    # of that stream.
    if not stream:
        return ledgers
    key = ledger_key(stream)
    record = await metadata.get(key, fresh=True)
    cursors = await metadata.scan(*children_range(key), fresh=True)
    named = {decode_cursor(each.key, each.value).ledger_id for each in cursors}
    if record is not None:
        named |= _named_by(record)
    return [each for each in ledgers if each.ledger_id not in named]


def _named_by(record: Record) -> set[int]:
    """The ledgers that the record of a stream names."""
    found = decode_stream(record.key, record.value)
    return {info.ledger_id for info in found.ledgers} | compaction_ledgers(found.properties)


async def stream_records(metadata: MetadataStore, *, fresh: bool = False) -> list[Record]:
    """The records of all streams.  Raises `MetadataError`."""
    hits = await metadata.scan_index(NAMES_INDEX, "", LAST, fresh=fresh)
    return [hit.record for hit in hits if is_ledger_key(hit.record.key)]


def streams_on(blocks: Sequence[bytes], names: Iterable[str]) -> list[str]:
    """The streams among `names` of which keys are in these blocks of a metadata file."""
    keys = sorted(((ledger_key(name).encode(), name) for name in names), reverse=True)
    found: set[str] = set()
    for block in blocks:
        for key, name in keys:
            if key in block:
                found.add(name)
                # A name may begin with another one, which is not in the block for that.
                block = block.replace(key, b"")
    return sorted(found)


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Divide the items by the number of operations that the metadata store takes at once."""
    size = bounds.METADATA_BATCH_OPERATIONS
    return (items[start : start + size] for start in range(0, len(items), size))
