"""The assignment of segments to ordered consumers: pure functions over immutable values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from broker.scalable.layout import Layout, Segment


@dataclass(frozen=True, slots=True)
class Holdings:
    """The consumers that have segments, by segment id.  No segment is in both maps.

    A segment that changes its consumer goes from `granted` to `releasing`, and is granted again
    (even to the same consumer) only after `release`.  So no segment is ever granted to two.
    """

    granted: Mapping[int, str] = field(default_factory=dict)
    """The consumer whose assignment has the segment."""
    releasing: Mapping[int, str] = field(default_factory=dict)
    """The former consumer, which has not detached from the segment yet."""

    def of(self, consumer: str) -> frozenset[int]:
        """The segments in a consumer's assignment."""
        return frozenset(s for s, owner in self.granted.items() if owner == consumer)


def assignable(layout: Layout, drained: Collection[int], *, ordered: bool) -> tuple[Segment, ...]:
    """The segments that consumers may have now, in order of range.

    `drained` are sealed segments of which the subscription may read everything and has acknowledged
    it (W14); `ordered` is True for STREAM subscriptions.  They get a segment only when all its
    ancestors are drained, and never a drained sealed one.  CHECKPOINT consumers get all segments,
    as they have positions of their own.
    """
    if ordered:
        chosen = [
            segment
            for segment in layout.segments.values()
            if not (segment.segment_id in drained and not segment.active)
            and layout.ancestors(segment.segment_id) <= set(drained)
        ]
    else:
        chosen = list(layout.segments.values())
    return tuple(sorted(chosen, key=lambda segment: segment.range_key))


def rebalance(holdings: Holdings, segments: Sequence[int], consumers: Collection[str]) -> Holdings:
    """The holdings after `segments` (in order of range) are shared among `consumers`.

    All get the same number of segments, give or take one, and no more segments move than that
    needs.  A segment that its consumer must give up goes to `releasing`; those that are there
    already are not granted.
    """
    # The preferred consumers are those of Pulsar's assignment: segments in order of range, round
    # robin over the consumers in order of name.
    names = sorted(consumers)
    target = {s: names[i % len(names)] for i, s in enumerate(segments)} if names else {}
    held: dict[str, list[int]] = {name: [] for name in names}
    for segment_id in segments:
        owner = holdings.granted.get(segment_id)
        if owner in held:
            held[owner].append(segment_id)
    quotas = _quotas(held, len(segments))
    granted: dict[int, str] = {}
    for name, own in held.items():
        own.sort(key=lambda segment_id: target[segment_id] != name)
        granted.update(dict.fromkeys(own[: quotas[name]], name))
    taken = {s: owner for s, owner in holdings.granted.items() if s not in granted}
    releasing = {**holdings.releasing, **taken}
    room = {name: quota - min(quota, len(held[name])) for name, quota in quotas.items()}
    for segment_id, preferred in target.items():
        if segment_id not in granted and segment_id not in releasing:
            owner = preferred if room[preferred] else next(name for name in names if room[name])
            granted[segment_id] = owner
            room[owner] -= 1
    return Holdings(granted, releasing)


def release(holdings: Holdings, segment_id: int) -> Holdings:
    """The holdings after the former consumer of a segment has detached from it."""
    left = {s: owner for s, owner in holdings.releasing.items() if s != segment_id}
    return Holdings(holdings.granted, left)


def _quotas(held: Mapping[str, Sequence[int]], count: int) -> dict[str, int]:
    """The number of segments that each may have; those with most keep the odd ones."""
    if not held:
        return {}
    base, odd = divmod(count, len(held))
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    return {name: base + (place < odd) for place, name in enumerate(ranked)}
