"""The history of a topic: an entry for each change of its layout, and for changes that its policy
wanted and could not make.  Pure.
"""

import enum
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from broker.scalable.layout import Layout, Reshape, Segment


class ChangeKind(enum.Enum):
    """The kind of a change in a topic's history."""

    CREATE = "create"
    SPLIT = "split"
    MERGE = "merge"
    REBUCKET = "rebucket"
    MIGRATE = "migrate"
    PRUNE = "prune"
    MOVE = "move"
    REFUSAL = "refusal"
    """The policy wanted to change the layout, and a cause that no cooldown ends forbids it."""


_NO_CHANGES = frozenset({ChangeKind.MOVE, ChangeKind.REFUSAL})
"""Kinds of entries after which the layout is as before."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One change or refusal.  `parents` are the segments it ended, `children` those it created.

    `cause` is the sentence of the policy that decided it; empty for a change on request.
    """

    time_ms: int
    kind: ChangeKind
    epoch: int
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    cause: str = ""

    def to_json(self) -> dict[str, object]:
        """The entry as it is stored and as REST shows it."""
        members: dict[str, object] = {
            "timeMs": self.time_ms,
            "kind": self.kind.value,
            "epoch": self.epoch,
            "parents": list(self.parents),
            "children": list(self.children),
        }
        return {**members, "cause": self.cause} if self.cause else members


def encode(entry: HistoryEntry) -> bytes:
    """Encode the record of an entry."""
    return json.dumps(entry.to_json(), separators=(",", ":")).encode()


def decode(value: bytes) -> HistoryEntry:
    """Decode the record of an entry.  Raises ValueError, KeyError, TypeError."""
    members = json.loads(value)
    return HistoryEntry(
        int(members["timeMs"]),
        ChangeKind(members["kind"]),
        int(members["epoch"]),
        tuple(members["parents"]),
        tuple(members["children"]),
        str(members.get("cause", "")),
    )


def of_reshape(change: Reshape, *, now_ms: int, cause: str = "") -> HistoryEntry:
    """The entry of a split, merge, rebucket or migration."""
    return HistoryEntry(
        now_ms,
        ChangeKind[change.kind.name],
        change.layout.epoch,
        tuple(parent.segment_id for parent in change.parents),
        tuple(child.segment_id for child in change.children),
        cause,
    )


def of_refusal(layout: Layout, cause: str, *, now_ms: int) -> HistoryEntry:
    """The entry of a change that the policy wanted and did not make."""
    return HistoryEntry(now_ms, ChangeKind.REFUSAL, layout.epoch, cause=cause)


def of_prune(layout: Layout, gone: Collection[int], *, now_ms: int) -> HistoryEntry:
    """The entry of a prune that led to `layout`."""
    return HistoryEntry(now_ms, ChangeKind.PRUNE, layout.epoch, tuple(sorted(gone)))


def of_creation(layout: Layout, *, now_ms: int) -> HistoryEntry:
    """The entry of a new topic."""
    return HistoryEntry(now_ms, ChangeKind.CREATE, layout.epoch, (), tuple(layout.segments))


def readable(entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """The entries in order, one for each change.

    A write without a known outcome may have stored an entry twice: the last one counts.
    """
    changes = {entry.epoch: entry for entry in entries if entry.kind not in _NO_CHANGES}
    return [e for e in entries if e.kind in _NO_CHANGES or changes[e.epoch] is e]


def missing(layout: Layout, entries: Sequence[HistoryEntry], *, now_ms: int) -> list[HistoryEntry]:
    """The entries that the changes of a layout lack, in order, derived from the layout.

    An entry is written after the change of the record (that of a creation before it), so a process
    that dies in between leaves a gap.
    """
    recorded = {entry.epoch for entry in entries if entry.kind not in _NO_CHANGES}
    epochs = [epoch for epoch in range(layout.epoch + 1) if epoch not in recorded]
    found = [_derived(layout, epoch, now_ms) for epoch in epochs]
    prunes = [number for number, entry in enumerate(found) if entry.kind is ChangeKind.PRUNE]
    if prunes:
        # With several prunes missing it is not known which one removed which segment: the last one
        # gets them all.
        made = {child for entry in (*entries, *found) for child in entry.children}
        ended = {s for e in entries if e.kind is ChangeKind.PRUNE for s in e.parents}
        last = found[prunes[-1]]
        gone = tuple(sorted(made - ended - layout.segments.keys()))
        found[prunes[-1]] = HistoryEntry(now_ms, ChangeKind.PRUNE, last.epoch, gone)
    return found


def _derived(layout: Layout, epoch: int, now_ms: int) -> HistoryEntry:
    made = [s for s in layout.segments.values() if s.created_at_epoch == epoch]
    ended = tuple(s.segment_id for s in layout.segments.values() if s.sealed_at_epoch == epoch)
    children = tuple(segment.segment_id for segment in made)
    if epoch == 0:
        time_ms = made[0].created_at_ms if made else now_ms
        return HistoryEntry(time_ms, ChangeKind.CREATE, 0, (), children)
    if not made:
        return HistoryEntry(now_ms, ChangeKind.PRUNE, epoch)
    return HistoryEntry(
        made[0].created_at_ms, _derived_kind(layout, ended, made), epoch, ended, children
    )


def _derived_kind(layout: Layout, ended: Sequence[int], made: Sequence[Segment]) -> ChangeKind:
    if any(layout.segments[each].legacy_topic_name is not None for each in ended):
        return ChangeKind.MIGRATE
    # Parents may have been pruned since, so only a range that is the same shows a rebucket.
    spans = {(child.hash_start, child.hash_end) for child in made}
    parents = [layout.segments[each] for each in ended]
    if any((parent.hash_start, parent.hash_end) in spans for parent in parents):
        return ChangeKind.REBUCKET
    return ChangeKind.SPLIT if len(made) > 1 else ChangeKind.MERGE
