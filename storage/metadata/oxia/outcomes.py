"""What a lost answer means: from the write, and what is read back.  Pure.

When a stream ends, the writes on it may have taken effect or not.  Before any of them is judged,
a new stream is open and a put of ours on it is acknowledged.  So the leader that answers is the
real one, and what the old stream had sent is in the log before that put, or lost: later it does
nothing.  The log also keeps the order of a stream: if a write of it took effect, then all writes
before it were applied (or failed their conditions).

What is known of a record then:

- It has the id of one of our puts in its note: that put took effect, and its result is read from
  the record.  Our earlier writes to the key were applied too, but their results are gone: unknown.
  Later ones were not applied: they are sent again.
- Its version is not above the highest one that was acknowledged to us before the stream ended.
  Versions rise in a shard, so it was written before any of the lost writes: none of them took
  effect, all are sent again.
- It is newer, and not ours: somebody wrote since.  Ours may have been in between, or not: unknown.
- There is none.  A delete of ours has what it asked for (who else may have removed it cannot be
  told apart).  A put that creates is sent again, on condition that there still is none: to be
  wrong, somebody must have removed a record within the moments since this put made it.  A put that
  expects a version is unknown: it found it or somebody removed it.

What is sent again without a condition of its caller gets one: the version just read.  So if the
judgement was wrong after all, nothing is overwritten, and the note tells (`recheck`).

A put on a sequence is never sent again: it would make a second key.  It is looked for among the
sequence's keys by its id; if it is not there, the outcome stays unknown to the caller.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.metadata.operations import Delete
from storage.metadata.oxia.records import Found
from storage.metadata.oxia.writes import Write
from storage.metadata.store import PutResult


@dataclass(frozen=True, slots=True)
class Resend:
    """Send it again, on condition that the record has this version id (-1: is not there)."""

    expected: int | None


class Doubt(enum.Enum):
    """Why a write has no result."""

    UNKNOWN = "it may or may not have taken effect"
    CONFLICT = "its condition did not hold"


Verdict = PutResult | bool | Resend | Doubt


def settle_key(writes: Sequence[Write], found: Found | None, highest: int) -> list[Verdict]:
    """A verdict for each of the lost writes to one key, in their order.

    `highest` is the highest version id that the shard had acknowledged to us when they were lost.
    """
    if found is None:
        return _settle_absent(writes)
    ours = [n for n, write in enumerate(writes) if _is_ours(write, found)]
    if ours:
        applied = ours[-1]
        later = _send_again(writes[applied + 1 :], found.version_id)
        return [*_unknown(applied), result_of(found), *later]
    if found.version_id <= highest:
        return _send_again(writes, found.version_id)
    return _unknown(len(writes))


def settle_sequence(writes: Iterable[Write], found: Mapping[str, Found]) -> list[Verdict]:
    """The same for puts on one sequence, from its records by the ids in their notes."""
    return [
        result_of(found[write.put_id]) if write.put_id in found else Doubt.UNKNOWN
        for write in writes
    ]


def recheck(write: Write, found: Found | None) -> PutResult | bool | Doubt:
    """A write that was sent again has failed its condition: what that means.

    It had not taken effect when it was sent again.  So either it did so late, by its first
    sending, which its note tells; or somebody wrote since.  Then it is not sent once more, even if
    its caller had no condition: later writes of this process, which were not held back, may be
    among what was written.
    """
    if found is not None and _is_ours(write, found):
        return result_of(found)
    if isinstance(write.operation, Delete) and found is None:
        return True
    if write.expected is not None:
        return Doubt.CONFLICT
    return Doubt.UNKNOWN


def result_of(found: Found) -> PutResult:
    """The result of the put that made this record."""
    record = found.record
    return PutResult(record.key, record.version, record.modifications)


def _settle_absent(writes: Sequence[Write]) -> list[Verdict]:
    deletes = [n for n, write in enumerate(writes) if isinstance(write.operation, Delete)]
    if deletes:
        later = _settle_absent(writes[deletes[-1] + 1 :])
        return [*_unknown(deletes[-1]), True, *later]
    if any(write.expected is not None and write.expected >= 0 for write in writes[:1]):
        return _unknown(len(writes))
    return _send_again(writes, -1)


def _send_again(writes: Sequence[Write], version_id: int) -> list[Verdict]:
    """The first one guards the others: they follow it in the log."""
    return [
        Resend(version_id if n == 0 and write.expected is None else write.expected)
        for n, write in enumerate(writes)
    ]


def _is_ours(write: Write, found: Found) -> bool:
    return not isinstance(write.operation, Delete) and write.put_id == found.put_id


def _unknown(count: int) -> list[Verdict]:
    return [Doubt.UNKNOWN] * count
