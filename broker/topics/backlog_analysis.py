"""The entries and messages in the backlog of a subscription, counted by reading them."""

import asyncio
from dataclasses import dataclass

from broker.topics.subscription import Subscription
from config.bounds import ANALYSIS_S, ANALYZED_ENTRIES, READ_BATCH_BYTES, READ_BATCH_ENTRIES
from magnetar.protocol.ids import Position
from storage.managed_ledger.entry_index import facts_of
from storage.managed_ledger.stream_ranges import after
from storage.managed_ledger.types import Entry


@dataclass(slots=True)
class BacklogAnalysis:
    """Counts of the entries that were read and are not acknowledged.

    As in Apache Pulsar a batch counts whole, one that is partly acknowledged too, and a marker is
    an entry with one message.
    """

    entries: int = 0
    messages: int = 0
    markers: int = 0
    aborted: bool = False
    """Whether it ended at a bound: it is to be continued behind `last`."""
    first: Position | None = None
    last: Position | None = None

    def add(self, entry: Entry) -> None:
        """Count one more entry."""
        messages = facts_of(entry.data).messages
        self.entries += 1
        self.messages += messages or 1
        self.markers += not messages
        self.first = self.first or entry.position
        self.last = entry.position

    def as_members(self) -> dict[str, object]:
        """AnalyzeSubscriptionBacklogResult.  There are no entry filters: all is accepted."""
        return {
            "entries": self.entries,
            "messages": self.messages,
            "markerMessages": self.markers,
            "filterAcceptedEntries": self.entries,
            "filterAcceptedMessages": self.messages,
            "filterRejectedEntries": 0,
            "filterRejectedMessages": 0,
            "filterRescheduledEntries": 0,
            "filterRescheduledMessages": 0,
            "aborted": self.aborted,
            "firstMessageId": None if self.first is None else self.first.text,
            "lastMessageId": None if self.last is None else self.last.text,
        }


async def analyze_backlog(subscription: Subscription, start: Position) -> BacklogAnalysis:
    """Count the backlog from `start` on: ANALYZED_ENTRIES at most, for ANALYSIS_S at most.

    Entries that an open transaction holds back are counted, as in the backlog.  Raises as
    `ManagedLedger.read`.
    """
    ledger, cursor, found = subscription.ledger, subscription.cursor, BacklogAnalysis()
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + ANALYSIS_S
    position = cursor.first_unacknowledged(start)
    while position <= ledger.last_confirmed:
        room = min(READ_BATCH_ENTRIES, ANALYZED_ENTRIES - found.entries)
        if room <= 0 or loop.time() >= deadline_s:
            found.aborted = True
            break
        entries = await ledger.read(position, max_entries=room, max_bytes=READ_BATCH_BYTES)
        if not entries:
            break
        for entry in entries:
            if not cursor.is_acknowledged(entry.position):
                found.add(entry)
        position = cursor.first_unacknowledged(after(entries[-1].position))
        await asyncio.sleep(0)
    return found
