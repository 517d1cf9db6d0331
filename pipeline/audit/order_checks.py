"""V3, V4: entries that are missing, messages that are there twice or in the wrong order.

Pure.  Rules:

- Entries of a ledger are numbered without a gap, and ledgers that have ended hold as many as their
  record says.
- Whoever looks at a producer's messages as a whole sees suspects only (`suspects`): its order
  counts key by key.  Of these, all rows of one key are looked at in the order of the topic
  (`check_key`); a message that is there twice has the same stamp and the same content, in another
  entry: some clients number batches, not the messages in them.
- From a parent to its child only the publish times are compared: each segment has sequence ids of
  its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.audit.seen import SeenProducer, SeenRange, Stamp, missing_of
from pipeline.audit.snapshot import Snapshot
from pipeline.audit.violations import Findings, Rule, Violation
from protocol.ids import Position

__all__ = ["KeyedRow", "check_entries", "check_key", "suspects"]

_REMEMBERED = 100_000
"""Rows of one key that are remembered, to know one that comes again."""


class KeyedRow(NamedTuple):
    """One row of a suspect producer; rows of a key are in the order of the topic."""

    segment_id: int
    position: Position
    stamp: Stamp
    content: int
    """Its hash."""


def check_entries(seen: SeenRange, snapshot: Snapshot, findings: Findings) -> None:
    """All of one segment."""
    segment = snapshot.segments[seen.segment_id]
    findings.held(Rule.V3)
    for hole in missing_of(seen, segment.entries_of, segment.earliest):
        taken = hole.before(segment.trimmed_to)
        if taken:
            findings.cannot_tell("Entries that retention took while the audit ran.", taken)
        first, many = hole.first + taken, hole.last - hole.first + 1 - taken
        if many:
            findings.add(
                Violation(
                    Rule.V3,
                    f"{many} entries of ledger {hole.ledger_id} are missing, {first} to "
                    f"{hole.last}.",
                    seen.segment_id,
                    Position(hole.ledger_id, first),
                )
            )
    if seen.encrypted:
        findings.cannot_tell(
            f"Encrypted entries of segment {seen.segment_id}: nobody without their keys can open "
            "them, so their rows are held against nothing.",
            seen.encrypted,
        )
    for position in seen.damaged:
        findings.add(
            Violation(
                Rule.V3,
                f"The entry {position.text} cannot be taken apart.",
                seen.segment_id,
                position,
            )
        )


def suspects(
    producers: Iterable[SeenProducer], snapshot: Snapshot, findings: Findings
) -> dict[str, frozenset[int]]:
    """Producers whose messages are to be looked at key by key, and in which segments."""
    by_place = {(each.segment_id, each.producer): each for each in producers}
    found: dict[str, set[int]] = {}
    for (segment_id, name), each in by_place.items():
        findings.held(Rule.V4)
        if each.suspect is not None:
            found.setdefault(name, set()).add(segment_id)
        for child in snapshot.segments[segment_id].child_ids:
            later = by_place.get((child, name))
            if later is None:
                continue
            findings.held(Rule.V4)
            if later.first.publish_time_ms < each.last.publish_time_ms:
                found.setdefault(name, set()).update((segment_id, child))
    return {name: frozenset(segments) for name, segments in found.items()}


def check_key(producer: str, key: str | None, rows: Sequence[KeyedRow], findings: Findings) -> None:
    """All rows of one producer and key, in the order of the topic (V3, V4)."""
    known: dict[tuple[Stamp, int], KeyedRow] = {}
    highest: KeyedRow | None = None
    for row in rows:
        findings.held(Rule.V4)
        twice = known.get((row.stamp, row.content))
        if twice is not None and twice.position != row.position:
            findings.add(_twice(producer, key, twice, row))
            continue
        if len(known) < _REMEMBERED:
            known[row.stamp, row.content] = row
        if highest is not None and not _may_follow(row, highest):
            findings.add(_out_of_order(producer, key, highest, row))
            continue
        highest = row


def _may_follow(row: KeyedRow, before: KeyedRow) -> bool:
    if row.segment_id == before.segment_id:
        if row.position == before.position and row.stamp == before.stamp:
            return True
        return row.stamp.may_follow(before.stamp)
    return row.stamp.publish_time_ms >= before.stamp.publish_time_ms


def _twice(producer: str, key: str | None, first: KeyedRow, again: KeyedRow) -> Violation:
    return Violation(
        Rule.V3,
        f"Message {again.stamp.sequence_id} of producer {producer!r} with key {key!r} is there "
        f"twice: in segment {first.segment_id} at {first.position.text}, and here.",
        again.segment_id,
        again.position,
    )


def _out_of_order(producer: str, key: str | None, before: KeyedRow, row: KeyedRow) -> Violation:
    return Violation(
        Rule.V4,
        f"Message {row.stamp.sequence_id} of producer {producer!r} with key {key!r} comes after "
        f"{before.stamp.sequence_id}, which it sent later: that is in segment "
        f"{before.segment_id} at {before.position.text}.",
        row.segment_id,
        row.position,
    )


def check_views(
    views: Mapping[str, Mapping[int, tuple[int, int]]], snapshot: Snapshot, findings: Findings
) -> None:
    """V2, V3: every view has the same rows of each segment: messages and hash sum by segment.

    The first one is what the others are held against, where retention took nothing meanwhile.
    """
    names = list(views)
    for name in names[1:]:
        for segment_id, told in views[name].items():
            if snapshot.segments[segment_id].trimmed_to is not None:
                findings.cannot_tell(
                    "Views of segments of which retention took entries while the audit ran."
                )
                continue
            findings.held(Rule.V2)
            first = views[names[0]].get(segment_id, (0, 0))
            if first == told:
                continue
            more = told[0] > first[0]
            findings.add(
                Violation(
                    Rule.V2 if more else Rule.V3,
                    f"The view {name!r} has {told[0]} rows, {names[0]!r} has {first[0]}"
                    + ("." if told[0] != first[0] else ", but not the same ones."),
                    segment_id,
                )
            )
