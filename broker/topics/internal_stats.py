"""Ledgers and cursors of one topic, under the member names that Pulsar's tools read.

The members are those of Pulsar's `PersistentTopicInternalStats`.  Its admin library waits for ever
for an answer that it cannot read: so every member has Pulsar's type.
"""

import asyncio
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from config.bounds import LEDGER_RECORDS_AT_ONCE, SHOWN_ACK_RUNS
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import ManagedLedgerState

_STATES: Final = {
    ManagedLedgerState.LOADING: "None",
    ManagedLedgerState.ROLLING: "CreatingLedger",
    ManagedLedgerState.TERMINATED: "Terminated",
    ManagedLedgerState.FENCED: "Fenced",
    ManagedLedgerState.CLOSED: "Closed",
}
"""Pulsar's word for a state.  OPEN has two, by whether a ledger is being written to."""


async def internal_stats(topic: Topic, *, with_records: bool = False) -> dict[str, object]:
    """PersistentTopicInternalStats of a loaded topic.

    `with_records` adds the record of each ledger as text.  Raises `LedgerError`.
    """
    ledger, subscriptions = topic.ledger, topic.subscriptions
    created_ms = ledger.current_ledger_created_ms
    current = None if created_ms is None or not ledger.ledgers else ledger.ledgers[-1]
    waiting = {name: _waits(each) for name, each in subscriptions.items()}
    return {
        "entriesAddedCounter": ledger.entries_known,
        "numberOfEntries": ledger.entry_count,
        "totalSize": ledger.total_size_bytes,
        "currentLedgerEntries": 0 if current is None else current.entries,
        "currentLedgerSize": 0 if current is None else current.size_bytes,
        "lastLedgerCreatedTimestamp": None if created_ms is None else _time(created_ms),
        "lastLedgerCreationFailureTimestamp": None,
        "waitingCursorsCount": sum(waiting.values()),
        "pendingAddEntriesCount": ledger.pending_entries,
        "lastConfirmedEntry": ledger.last_confirmed.text,
        "state": _state(ledger, is_written=current is not None),
        "ledgers": await _ledgers(ledger, with_records=with_records),
        "cursors": {
            name: _cursor(ledger, cursor, subscriptions.get(name), waits=waiting.get(name, False))
            for name, cursor in ledger.cursors.items()
        },
        "schemaLedgers": [],  # Schemas are in the metadata store.
        "compactedLedger": await _compacted_ledger(ledger, with_record=with_records),
    }


def _state(ledger: ManagedLedger, *, is_written: bool) -> str:
    if ledger.state is ManagedLedgerState.OPEN:
        return "LedgerOpened" if is_written else "ClosedLedger"
    return _STATES[ledger.state]


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _waits(subscription: Subscription) -> bool:
    """Whether it has consumers, and has read everything."""
    dispatcher = subscription.dispatcher
    if dispatcher is None or not subscription.consumers:
        return False
    return dispatcher.reader.next_position > subscription.ledger.last_confirmed


async def _ledgers(ledger: ManagedLedger, *, with_records: bool) -> list[dict[str, object]]:
    infos = list(ledger.ledgers)
    shown = [_ledger(info) for info in infos]
    if with_records:
        for first in range(0, len(infos), LEDGER_RECORDS_AT_ONCE):
            part = infos[first : first + LEDGER_RECORDS_AT_ONCE]
            records = await asyncio.gather(*(ledger.ledger_record(each.ledger_id) for each in part))
            for members, record in zip(shown[first:], records, strict=False):
                members["metadata"] = record
    return shown


def _ledger(info: LedgerInfo) -> dict[str, object]:
    return {
        "ledgerId": info.ledger_id,
        "entries": info.entries,
        "size": info.size_bytes,
        "timestamp": info.closed_ms,
        "offloaded": info.offload is not None and info.offload.complete,
        "underReplicated": False,
    }


def _cursor(
    ledger: ManagedLedger, cursor: Cursor, subscription: Subscription | None, *, waits: bool
) -> dict[str, object]:
    dispatcher = None if subscription is None else subscription.dispatcher
    if dispatcher is None:
        read = cursor.first_unacknowledged(cursor.mark_delete)
    else:
        read = dispatcher.reader.next_position
    ledger_id, last_entry = cursor.ledger
    runs = [
        f"({in_ledger}:{first - 1}..{in_ledger}:{last}]"
        for in_ledger, first, last in islice(cursor.acked_runs(), SHOWN_ACK_RUNS)
    ]
    run_count = cursor.acked_run_count
    more = ["..."] if run_count > len(runs) else []
    return {
        "markDeletePosition": cursor.mark_delete.text,
        "readPosition": read.text,
        "waitingReadOp": waits,
        "pendingReadOps": 0,
        "messagesConsumedCounter": ledger.entries_known - cursor.backlog,
        "cursorLedger": ledger_id,
        "cursorLedgerLastEntry": last_entry,
        "individuallyDeletedMessages": f"[{','.join(runs + more)}]",
        "lastLedgerSwitchTimestamp": None,
        "state": "NoLedger" if ledger_id < 0 else "Open",
        "active": subscription is not None and bool(subscription.consumers),
        "numberOfEntriesSinceFirstNotAckedMessage": cursor.entries_up_to(
            ledger.previous_position(read)
        ),
        "totalNonContiguousDeletedMessagesRange": run_count,
        "subscriptionHavePendingRead": waits,
        "subscriptionHavePendingReplayRead": False,
        # Numbers alone, as Pulsar stores them with a position.  Those that users set are in the
        # topic's statistics.
        "properties": dict(cursor.numbers),
    }


async def _compacted_ledger(stream: ManagedLedger, *, with_record: bool) -> dict[str, object]:
    """The compacted ledger of a topic; its id is -1 if there is none.  Raises `LedgerError`."""
    ledger = stream.compaction.use()
    found: dict[str, object] = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False}
    if ledger is not None:
        try:
            found["ledgerId"] = ledger.ledger_id
            found["entries"] = await ledger.entry_count()
            found["size"] = await ledger.size_bytes()
            if with_record:
                found["metadata"] = await stream.ledger_record(ledger.ledger_id)
        finally:
            stream.compaction.leave(ledger)
    return found
