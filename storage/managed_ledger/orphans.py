"""Ledgers on shared stores that no record names: a crash came before one did, or after none did.

Rules, by which no ledger is taken that is named or that somebody may still name:

- A ledger says which metadata store its maker goes by (`core.INSTANCE`).  Only those
  of ours count: bookies may hold others, whose records are elsewhere, or of other applications.
- Its maker names it within LEDGER_NAMING_MS or never, and replaces it within that time if no record
  is to name it (health checks).  Only a ledger older than ORPHANED_LEDGER_AGE_MS counts.  What is
  in between covers calls under way and clocks that differ.
- A ledger is named in one place at most: the record of the stream that made it, or of a cursor
  of that.  These are read after the ledgers were listed, past every acknowledged write, and once
  more before one is deleted.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.store import NoSuchLedger
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
"""Component of ledgers that no record is ever to name."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OrphanedLedger:
    """A ledger that nobody knows of, and what it was made for; `stream` is empty for health."""

    ledger_id: LedgerId
    stream: str
    cursor: str
    created_ms: int


async def find_orphans(stores: Stores) -> list[OrphanedLedger]:
    """By id.  Raises `LedgerError`, `MetadataError`, `CorruptRecord`."""
    listed = await stores.ledgers.list_ledgers()
    named = {
        info.ledger_id
        for record in await stream_records(stores.metadata, fresh=True)
        for info in decode_stream(record.key, record.value).ledgers
    }
    instance = await stores.instance()
    found: list[OrphanedLedger] = []
    for some in chunks([ledger_id for ledger_id in listed if ledger_id not in named]):
        told = await asyncio.gather(*(_described(stores, each, instance) for each in some))
        found.extend(each for each in told if each is not None)
    orphans: list[OrphanedLedger] = []
    for stream, ledgers in _by_stream(found).items():
        orphans.extend(await _unnamed(stores.metadata, stream, ledgers))
    return sorted(orphans, key=lambda each: each.ledger_id)


async def delete_orphans(stores: Stores) -> list[OrphanedLedger]:
    """Delete them; those that were.  What cannot be deleted now is logged, and found again."""
    deleted: list[OrphanedLedger] = []
    for stream, ledgers in _by_stream(await find_orphans(stores)).items():
        for each in await _unnamed(stores.metadata, stream, ledgers):
            if await stores.delete_data_ledger(each.ledger_id):
                log.info("orphaned_ledger_deleted", ledger=each.ledger_id, name=stream)
                deleted.append(each)
    return sorted(deleted, key=lambda each: each.ledger_id)


async def _described(stores: Stores, ledger_id: LedgerId, instance: bytes) -> OrphanedLedger | None:
    """The ledger, if it is one of ours and so old that a record names it or none ever will."""
    try:
        told = await stores.ledgers.describe(ledger_id)
    except NoSuchLedger:
        return None
    made_ms, custom = told.created_ms, told.custom
    if made_ms is None or custom.get(INSTANCE) != instance:
        return None
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
    """Those of them that the records of their stream and of its cursors do not name now."""
    if not stream:
        return ledgers
    key = ledger_key(stream)
    record = await metadata.get(key, fresh=True)
    cursors = await metadata.scan(*children_range(key), fresh=True)
    named = {decode_cursor(each.key, each.value).ledger_id for each in cursors}
    if record is not None:
        named.update(info.ledger_id for info in decode_stream(key, record.value).ledgers)
    return [each for each in ledgers if each.ledger_id not in named]


async def stream_records(metadata: MetadataStore, *, fresh: bool = False) -> list[Record]:
    """The records of all streams.  Raises `MetadataError`."""
    hits = await metadata.scan_index(NAMES_INDEX, "", LAST, fresh=fresh)
    return [hit.record for hit in hits if is_ledger_key(hit.record.key)]


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many at a time as the metadata store takes."""
    size = bounds.METADATA_BATCH_OPERATIONS
    return (items[start : start + size] for start in range(0, len(items), size))
