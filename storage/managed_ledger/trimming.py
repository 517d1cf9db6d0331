"""Pure: which ledgers of a stream may be dropped, offloaded, or deleted beside their copy."""

from collections.abc import Sequence
from dataclasses import dataclass

from magnetar.protocol.ids import Position
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import NO_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class ReaderPositions:
    """The least mark-delete of all cursors of a stream, and whether any cursor is durable."""

    slowest: Position | None
    any_durable: bool


@dataclass(frozen=True, slots=True)
class TrimDecision:
    """Ledgers to drop, oldest first, and the time at which the next may go by time alone."""

    drop: tuple[int, ...]
    next_check_ms: int | None


def decide(
    ledgers: Sequence[LedgerInfo],
    readers: ReaderPositions,
    *,
    retention: Retention | None,
    unsubscribed_retention_ms: int,
    now_ms: int,
) -> TrimDecision:
    """Choose the ledgers to drop.

    `ledgers` are oldest first; `closed_ms` 0 marks the one being written, which stays.  A ledger
    may go when every cursor, durable or not, has its mark-delete at or past the ledger's end, and
    retention lets it go: it is older than `time_ms`, or the ledgers without it have at least
    `size_bytes`.  -1 is no bound, 0 keeps nothing.

    Where no retention is set and no cursor is durable, ended ledgers stay for
    `unsubscribed_retention_ms`, whatever their size.
    """
    rule = _rule(readers, retention, unsubscribed_retention_ms)
    kept_bytes = sum(ledger.size_bytes for ledger in ledgers)
    drop: list[int] = []
    # The first ledger that stays ends the loop, so that the rest has no holes.
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
    """Choose the ledgers to delete whose copy is whole; they stay in the stream.

    They go `lag_ms` after the copy was made; -1: never.
    """
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


def offload_end(ledgers: Sequence[LedgerInfo], threshold_bytes: int) -> Position | None:
    """The position before which ended ledgers are to be offloaded.

    Then ledgers without a copy have at most `threshold_bytes`; -1 is no threshold.  None if
    nothing is to be offloaded.
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
    readers: ReaderPositions, retention: Retention | None, unsubscribed_retention_ms: int
) -> Retention:
    if retention is not None:
        return retention
    if readers.any_durable:
        return NO_RETENTION
    return Retention(unsubscribed_retention_ms, -1)
