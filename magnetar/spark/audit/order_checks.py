"""Checks of V3 and V4: missing entries, suspect producers, views that differ.  Pure."""

from collections.abc import Iterable, Mapping

from magnetar.protocol.ids import Position
from magnetar.spark.audit.snapshot import Snapshot
from magnetar.spark.audit.violations import Findings, Rule, Violation
from magnetar.spark.range_facts import SeenProducer, SeenRange, missing_of

__all__ = ["check_entries", "check_views", "suspects"]


def check_entries(seen: SeenRange, snapshot: Snapshot, findings: Findings) -> None:
    """Check that the entries of a segment are complete and can be decoded (V3)."""
    # Entries of a ledger are numbered without a gap; of an ended one the record has their number.
    segment = snapshot.segments[seen.segment_id]
    findings.count_check(Rule.V3)
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
            f"Encrypted entries of segment {seen.segment_id}: they cannot be opened without their "
            "keys, so their rows are not checked.",
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
    """Producers whose rows `row_checks` has to check one by one, and in which segments (V4)."""
    by_place = {(each.segment_id, each.producer): each for each in producers}
    found: dict[str, set[int]] = {}
    for (segment_id, name), each in by_place.items():
        findings.count_check(Rule.V4)
        if each.suspect is not None:
            found.setdefault(name, set()).add(segment_id)
        for child in snapshot.segments[segment_id].child_ids:
            later = by_place.get((child, name))
            if later is None:
                continue
            findings.count_check(Rule.V4)
            # Only times: each segment has sequence ids of its own.
            if later.first.publish_time_ms <= each.last.publish_time_ms:
                found.setdefault(name, set()).update((segment_id, child))
    return {name: frozenset(segments) for name, segments in found.items()}


def check_views(
    views: Mapping[str, Mapping[int, tuple[int, int]]], snapshot: Snapshot, findings: Findings
) -> None:
    """Check that every view has the rows of the first one, in each segment (V2, V3).

    Views give messages and hash sum by segment.  Segments of which retention has deleted entries
    meanwhile are not compared.
    """
    names = list(views)
    for name in names[1:]:
        for segment_id, rows in views[name].items():
            if snapshot.segments[segment_id].trimmed_to is not None:
                findings.cannot_tell(
                    "Views of segments of which retention took entries while the audit ran."
                )
                continue
            findings.count_check(Rule.V2)
            first = views[names[0]].get(segment_id, (0, 0))
            if first == rows:
                continue
            more = rows[0] > first[0]
            findings.add(
                Violation(
                    Rule.V2 if more else Rule.V3,
                    f"The view {name!r} has {rows[0]} rows, {names[0]!r} has {first[0]}"
                    + ("." if rows[0] != first[0] else ", but not the same ones."),
                    segment_id,
                )
            )
