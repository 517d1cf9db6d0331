"""Pure: which ledgers of a stream may go now, and of which the copy is enough.

Rules:

- Only a run of ledgers from the oldest one on goes, so that what stays has no holes.
- The ledger that is being written never goes; every other one may, also the newest one of a
  sealed or idle stream.
- A ledger goes only when every cursor, durable or not, has its mark-delete at or past its end, and
  retention lets it: that keeps a consumed ledger until it is older than `time_ms`, or the ledgers
  without it are at least `size_bytes`, whichever comes first.  -1 is no bound, 0 keeps nothing.
- Without any durable cursor a retention that somebody set decides; if nobody did, closed ledgers
  stay for `unsubscribed_retention_ms`, whatever their size.
- A ledger whose copy is whole goes by itself some time (`lag_ms`, -1: never) after that was made;
  it stays in the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from magnetar.protocol.ids import Position
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import NO_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a stream: the least mark-delete of all cursors, and whether any is durable."""

    slowest: Position | None
    any_durable: bool


@dataclass(frozen=True, slots=True)
class TrimDecision:
    """Ledgers to drop, oldest first, and when time alone may let the next one go (or None)."""

    drop: tuple[int, ...]
    next_look_ms: int | None


def decide(
    ledgers: Sequence[LedgerInfo],
    readers: Readers,
    *,
    retention: Retention | None,
    unsubscribed_retention_ms: int,
    now_ms: int,
) -> TrimDecision:
    """What may go of `ledgers` (oldest first; `closed_ms` 0 marks the one being written)."""
    rule = _rule(readers, retention, unsubscribed_retention_ms)
    kept_bytes = sum(ledger.size_bytes for ledger in ledgers)
    drop: list[int] = []
    for ledger in ledgers:
        if ledger.closed_ms == 0:
            break
        if readers.slowest is not None and readers.slowest < ledger.last:
            break
        too_much = rule.size_bytes >= 0 and kept_bytes - ledger.size_bytes >= rule.size_bytes
        if not too_much:
            if rule.time_ms < 0:
                break
            due_ms = ledger.closed_ms + rule.time_ms
            if now_ms < due_ms:
                return TrimDecision(tuple(drop), due_ms)
        kept_bytes -= ledger.size_bytes
        drop.append(ledger.ledger_id)
    return TrimDecision(tuple(drop), None)


def hot_to_drop(ledgers: Sequence[LedgerInfo], *, lag_ms: int, now_ms: int) -> TrimDecision:
    """Ledgers of which only the copy is to stay, and when the next one will be."""
    if lag_ms < 0:
        return TrimDecision((), None)
    drop: list[int] = []
    next_ms: int | None = None
    for ledger in ledgers:
        if ledger.offload is not None and ledger.offload.complete and ledger.hot:
            due_ms = ledger.offload.offloaded_ms + lag_ms
            if due_ms <= now_ms:
                drop.append(ledger.ledger_id)
            else:
                next_ms = due_ms if next_ms is None else min(next_ms, due_ms)
    return TrimDecision(tuple(drop), next_ms)


def beyond(ledgers: Sequence[LedgerInfo], threshold_bytes: int) -> Position | None:
    """Up to where ended ledgers are to be copied so that at most so many bytes are not.

    None if nothing is to be; -1 is no threshold.
    """
    if threshold_bytes < 0:
        return None
    left = sum(ledger.size_bytes for ledger in ledgers if not _is_copied(ledger))
    up_to: Position | None = None
    for ledger in ledgers:
        if left <= threshold_bytes or ledger.closed_ms == 0:
            break
        if ledger.entries and not _is_copied(ledger):
            left -= ledger.size_bytes
            up_to = Position(ledger.ledger_id, ledger.entries)
    return up_to


def _is_copied(ledger: LedgerInfo) -> bool:
    return ledger.offload is not None and ledger.offload.complete


def _rule(
    readers: Readers, retention: Retention | None, unsubscribed_retention_ms: int
) -> Retention:
    if retention is not None:
        return retention
    if readers.any_durable:
        return NO_RETENTION
    return Retention(unsubscribed_retention_ms, -1)
