"""The newest message that readers of a topic get.

Rules:

- What consumers do not see is passed over: markers, and entries of aborted transactions.  Whoever
  reads up to the last message must get it, or he waits for ever.
- Nothing past the horizon counts.
- The entry at the horizon is tried first; below it, READ_BATCH_ENTRIES at a time.
"""

from typing import TYPE_CHECKING

from broker.dispatch.entry_facts import is_marker
from config.bounds import READ_BATCH_BYTES, READ_BATCH_ENTRIES
from protocol.ids import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.topic import Topic
    from storage.managed_ledger import ManagedLedger
    from storage.managed_ledger_types import Entry


async def newest_message(topic: "Topic") -> "Entry | None":
    """Its entry; None if there is none.  Raises what reading raises."""
    up_to, count = topic.max_read_position(), 1
    while up_to.entry_id >= 0:
        first = Position(up_to.ledger_id, max(0, up_to.entry_id - count + 1))
        found = await _newest_of(topic, first, up_to)
        if found is not None:
            return found
        up_to, count = topic.ledger.previous_position(first), READ_BATCH_ENTRIES
    return None


async def _newest_of(topic: "Topic", first: Position, up_to: Position) -> "Entry | None":
    newest: Entry | None = None
    while first <= up_to:
        entries = await _read(topic.ledger, first, up_to)
        if not entries:
            break
        for entry in entries:
            if entry.position <= up_to and not (is_marker(entry.data) or topic.is_aborted(entry)):
                newest = entry
        first = topic.ledger.next_position(entries[-1].position)
    return newest


async def _read(ledger: "ManagedLedger", first: Position, up_to: Position) -> "Sequence[Entry]":
    cached = ledger.read_cached(first, up_to.entry_id - first.entry_id + 1, READ_BATCH_BYTES)
    if cached is not None:
        return cached
    return await ledger.read(
        first, max_entries=READ_BATCH_ENTRIES, max_bytes=READ_BATCH_BYTES, up_to=up_to
    )
