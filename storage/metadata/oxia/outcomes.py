"""The outcomes of writes whose answer was lost, from the records that are read back.  Pure.

When a stream ends, the writes on it may have taken effect or not.  Before any of them is judged,
a new stream is open and a put of ours on it is acknowledged.  So the leader that answers is the
real one, and the writes of the old stream are in the log before that put, or lost for good.  The
log also keeps the order of a stream: if a write took effect, then all writes before it were applied
(or failed their conditions).
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.metadata.operations import Delete
from storage.metadata.oxia.records import ShardRecord
from storage.metadata.oxia.writes import Write
from storage.metadata.store import PutResult


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the write again, on condition that the record has this version id (-1: is absent).

    None means no condition.
    """

    expected: int | None


class Doubt(enum.Enum):
    """The reason why a write has no result."""

    UNKNOWN = "it may or may not have taken effect"
    CONFLICT = "its condition did not hold"


Verdict = PutResult | bool | Resend | Doubt


def settle_key(writes: Sequence[Write], found: ShardRecord | None, highest: int) -> list[Verdict]:
    """A verdict for each of the lost writes to one key, in their order.

    `highest` is the highest version id that the shard had acknowledged to us when they were lost.
    """
    if found is None:
        return _settle_absent(writes)
    ours = [n for n, write in enumerate(writes) if _is_ours(write, found)]
    if ours:
        # The record has the id of this put, which therefore took effect.  Our earlier writes were
        # applied too, but their results are gone; later ones were not applied.
        applied = ours[-1]
        later = _send_again(writes[applied + 1 :], found.version_id)
        return [*_unknown(applied), result_of(found), *later]
    if found.version_id <= highest:
        # Versions rise in a shard: the record is older than all the lost writes.
        return _send_again(writes, found.version_id)
    # Another process wrote since: ours may have taken effect in between, or not.
    return _unknown(len(writes))


def settle_sequence(writes: Iterable[Write], found: Mapping[str, ShardRecord]) -> list[Verdict]:
    """The same for puts on one sequence, from its records by the ids in their notes."""
    # They are never sent again: that could make a second key.
    return [
        result_of(found[write.put_id]) if write.put_id in found else Doubt.UNKNOWN
        for write in writes
    ]


def recheck(write: Write, found: ShardRecord | None) -> PutResult | bool | Doubt:
    """The outcome of a write that was sent again and has failed its condition.

    It had not taken effect when it was sent again.  So either its first sending took effect late,
    which its note shows, or another write came in between.  Then it is not sent once more, even if
    its caller had no condition: that other write may be a later one of this process.
    """
    if found is not None and _is_ours(write, found):
        return result_of(found)
    if isinstance(write.operation, Delete) and found is None:
        return True
    if write.expected is not None:
        return Doubt.CONFLICT
    return Doubt.UNKNOWN


def result_of(found: ShardRecord) -> PutResult:
    """The result of the put that made this record."""
    record = found.record
    return PutResult(record.key, record.version, record.modifications)


def _settle_absent(writes: Sequence[Write]) -> list[Verdict]:
    deletes = [n for n, write in enumerate(writes) if isinstance(write.operation, Delete)]
    if deletes:
        # The delete has its effect, even if another process may have removed the record.
        later = _settle_absent(writes[deletes[-1] + 1 :])
        return [*_unknown(deletes[-1]), True, *later]
    if any(write.expected is not None and write.expected >= 0 for write in writes[:1]):
        # The version was there, or else another process removed the record.
        return _unknown(len(writes))
    # Wrong only if the put took effect and its record was removed within these moments.
    return _send_again(writes, -1)


def _send_again(writes: Sequence[Write], version_id: int) -> list[Verdict]:
    # Without a condition of its caller, the first write gets one: the version just read.  So
    # nothing is overwritten if the judgement was wrong, and `recheck` finds out.  It guards the
    # others, which follow it in the log.
    return [
        Resend(version_id if n == 0 and write.expected is None else write.expected)
        for n, write in enumerate(writes)
    ]


def _is_ours(write: Write, found: ShardRecord) -> bool:
    return not isinstance(write.operation, Delete) and write.put_id == found.put_id


def _unknown(count: int) -> list[Verdict]:
    return [Doubt.UNKNOWN] * count
