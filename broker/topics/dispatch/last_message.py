"""The newest message that readers of a topic get."""

import asyncio
from collections.abc import Sequence
from weakref import ref

from broker.topics.dispatch.entry_facts import facts_of, is_marker
from broker.topics.dispatch.source import ReadableTopic
from broker.topics.weak_references import require_present
from config.bounds import READ_BATCH_BYTES, READ_BATCH_ENTRIES
from magnetar.protocol.ids import EARLIEST, Position
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry


class LastMessage:
    """Finds and caches the newest message that a reader of the topic gets.

    A reader that reads up to the last message must get it, or it waits for ever.  So markers,
    entries of aborted transactions and entries past the max read position do not count.
    """

    __slots__ = ("_found", "_searched_up_to", "_topic")

    def __init__(self, topic: ReadableTopic) -> None:
        self._topic = ref(topic)
        self._searched_up_to = EARLIEST
        self._found: Position | None = None

    async def entry(self) -> Entry | None:
        """The entry of the message; None if there is none.  Raises the errors of reading."""
        # Entries up to the max read position never change, so each is searched once: the newest
        # entry first, then READ_BATCH_ENTRIES in a turn of the loop.
        topic = require_present(self._topic)
        end = topic.max_read_position()
        up_to, count = end, 1
        while up_to.entry_id >= 0 and up_to > self._searched_up_to:
            first = Position(up_to.ledger_id, max(0, up_to.entry_id - count + 1))
            newest = await _newest_of(topic, first, up_to)
            if newest is not None:
                self._note(end, newest.position)
                return newest
            earlier = topic.ledger.previous_position(first)
            if earlier >= first:
                # All ledgers are gone, as after a truncation: there is nothing before.
                break
            up_to, count = earlier, READ_BATCH_ENTRIES
            await asyncio.sleep(0)
        self._note(end, self._found)
        if self._found is None:
            return None
        return await entry_at(topic.ledger, self._found)

    def _note(self, end: Position, found: Position | None) -> None:
        """Keep a result, unless another search got further meanwhile."""
        if end > self._searched_up_to:
            self._searched_up_to, self._found = end, found


async def _newest_of(topic: ReadableTopic, first: Position, up_to: Position) -> Entry | None:
    newest = None
    while first <= up_to:
        entries = await _read(topic.ledger, first, up_to)
        if not entries:
            break
        for entry in entries:
            hidden = is_marker(entry.data) or topic.is_aborted(entry)
            if entry.position <= up_to and not hidden:
                newest = entry
        first = topic.ledger.next_position(entries[-1].position)
    return newest


async def entry_at(ledger: ManagedLedger, position: Position) -> Entry | None:
    """The entry at a position; None if there is none.  Raises the errors of reading."""
    entries = await _read(ledger, position, position)
    return entries[0] if entries and entries[0].position == position else None


async def _read(ledger: ManagedLedger, first: Position, up_to: Position) -> Sequence[Entry]:
    cached = ledger.read_cached(first, up_to.entry_id - first.entry_id + 1, READ_BATCH_BYTES)
    if cached is not None:
        return cached
    return await ledger.read(
        first, max_entries=READ_BATCH_ENTRIES, max_bytes=READ_BATCH_BYTES, up_to=up_to
    )


async def batch_size_at(ledger: ManagedLedger, position: Position) -> int:
    """The number of messages in the entry at a position; 0 if there is none."""
    found = await entry_at(ledger, position)
    return 0 if found is None else facts_of(found.data)[0]
