"""Which ordered consumer has which segment: pure functions over immutable values.

Rules:

- Parents first: a segment is given to a STREAM subscription only when *everything* above it in the
  DAG is drained, sealed intermediates included; a drained sealed segment is given to nobody.
  A CHECKPOINT group has no such gate, its positions say where it stands.
- Release before grant: a segment that changes hands is first taken out of its owner's assignment,
  and granted again (even to the same consumer) only when `release` has been told that the owner
  is off it.  So no segment is ever granted to two.
- Balance: each consumer has the same number of segments, give or take one.  From nothing, the
  segments in order of range are dealt round robin to the consumers in order of name, as Apache
  Pulsar does; from there on only what balance demands is moved.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from broker.scalable.layout import Layout, Segment


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who has what.  No segment is in both maps."""

    granted: Mapping[int, str] = field(default_factory=dict)
    """Segment to the consumer in whose assignment it is."""
    releasing: Mapping[int, str] = field(default_factory=dict)
    """Segment to the consumer that has yet to let it go."""

    def of(self, consumer: str) -> frozenset[int]:
        """The segments in a consumer's assignment."""
        return frozenset(s for s, owner in self.granted.items() if owner == consumer)


def assignable(layout: Layout, drained: Collection[int], *, ordered: bool) -> tuple[Segment, ...]:
    """The segments that consumers may have now, in order of range.

    `drained` are sealed segments of which the subscription may read everything and has acknowledged
    it (W14); `ordered` is True for STREAM subscriptions.
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
    """The holdings after dealing `segments` (in order of range) to `consumers`.

    What an owner must give up goes to `releasing`; what waits there is not dealt.
    """
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
    """The holdings once the former owner is off a segment."""
    left = {s: owner for s, owner in holdings.releasing.items() if s != segment_id}
    return Holdings(holdings.granted, left)


def _quotas(held: Mapping[str, Sequence[int]], count: int) -> dict[str, int]:
    """How many segments each may have: the odd ones stay with those who have most."""
    if not held:
        return {}
    base, odd = divmod(count, len(held))
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    return {name: base + (place < odd) for place, name in enumerate(ranked)}
