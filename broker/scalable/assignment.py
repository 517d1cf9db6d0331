"""The assignment of segments to ordered consumers: pure functions over immutable values.

A segment has one consumer, or several that share it by its entry buckets (PIP-486).  An exclusive
consumer and sharers can never be attached to a segment at once, so a segment whose mode changes is
first taken from all of its consumers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

from broker.scalable.layout import Layout, Segment

Consumers = frozenset[str]
Plan = Mapping[int, Consumers]
"""The consumers that are to have each segment.  Where there are several, they share it."""
NOBODY: Consumers = frozenset()
NO_SEGMENTS: frozenset[int] = frozenset()


def by_consumer(consumers: Plan) -> dict[str, frozenset[int]]:
    """Turn the consumers of each segment into the segments of each consumer."""
    found: dict[str, set[int]] = {}
    for segment_id, names in consumers.items():
        for name in names:
            found.setdefault(name, set()).add(segment_id)
    return {name: frozenset(ids) for name, ids in found.items()}


@dataclass(frozen=True)  # without slots, for the cached property
class Holdings:
    """The consumers that have segments, by segment id, and those that are to have them.

    A segment that is taken from a consumer goes from `granted` to `releasing`, and is granted to
    the same consumer again only after `release`.  An exclusive segment is granted when nobody
    has it or has yet to release it; a shared one while no exclusive consumer has, or has yet to.
    """

    granted: Mapping[int, Consumers] = field(default_factory=dict)
    """The consumers whose assignments have the segment."""
    releasing: Mapping[int, Consumers] = field(default_factory=dict)
    """Former consumers that have not detached from the segment yet."""
    shared: frozenset[int] = frozenset()
    """The segments in `granted` or `releasing` that were granted to be shared."""
    plan: Plan = field(default_factory=dict)

    def of(self, consumer: str) -> frozenset[int]:
        """The segments in a consumer's assignment."""
        return self._by_consumer.get(consumer, NO_SEGMENTS)

    def to_release(self, consumer: str) -> frozenset[int]:
        """The segments that a consumer has yet to release."""
        return self._releasing_by_consumer.get(consumer, NO_SEGMENTS)

    @cached_property
    def _releasing_by_consumer(self) -> Mapping[str, frozenset[int]]:
        return by_consumer(self.releasing)

    @cached_property
    def _by_consumer(self) -> Mapping[str, frozenset[int]]:
        return by_consumer(self.granted)

    def owners(self, segment_id: int) -> Consumers:
        """The consumers whose assignments have a segment."""
        return self.granted.get(segment_id, NOBODY)

    def former(self, segment_id: int) -> Consumers:
        """The consumers that have yet to release a segment."""
        return self.releasing.get(segment_id, NOBODY)


def assignable(layout: Layout, drained: Collection[int], *, ordered: bool) -> tuple[Segment, ...]:
    """The segments that consumers may have now, in order of range.

    `drained` are sealed segments of which the subscription may read everything and has acknowledged
    it (W14); `ordered` is True for STREAM subscriptions.  They get a segment only when all its
    ancestors are drained, and never a drained sealed one.  CHECKPOINT consumers get all segments,
    as they have positions of their own.
    """
    chosen = _readable_in_order(layout, frozenset(drained)) if ordered else layout.segments.values()
    return tuple(sorted(chosen, key=lambda segment: segment.range_key))


def _readable_in_order(layout: Layout, drained: frozenset[int]) -> list[Segment]:
    """The ACTIVE or undrained segments whose ancestors are all drained."""
    readable: list[Segment] = []
    passed: set[int] = set()
    """Segments that are drained, as are all of their ancestors."""
    for segment_id, segment in layout.segments.items():  # parents have lower ids
        if not passed.issuperset(segment.parent_ids):
            continue
        if segment_id in drained:
            passed.add(segment_id)
        if segment.active or segment_id not in drained:
            readable.append(segment)
    return readable


def rebalance(
    holdings: Holdings,
    segments: Sequence[int],
    consumers: Collection[str],
    places: Mapping[int, int] | None = None,
) -> Holdings:
    """The holdings after `segments` (in order of range) are shared out among `consumers`.

    `places` are the numbers of consumers that may share a segment; a segment that is not in it has
    one consumer.  See `planned`.  What a consumer must give up goes to `releasing`; nothing is
    granted that would meet a consumer of the other mode.
    """
    plan = planned(holdings.plan, segments, consumers, places or {})
    granted: dict[int, Consumers] = {}
    releasing: dict[int, Consumers] = {}
    shared: set[int] = set()
    for segment_id in {**holdings.granted, **holdings.releasing, **plan}:
        wanted = plan.get(segment_id, NOBODY)
        now, off = holdings.owners(segment_id), holdings.former(segment_id)
        in_shared_mode = segment_id in holdings.shared
        if not (now or off):
            now, in_shared_mode = wanted, len(wanted) > 1
        elif in_shared_mode and len(wanted) > 1:
            off |= now - wanted
            now = wanted - off
        else:
            # An exclusive consumer stays only alone; everybody else has to detach first.
            kept = NOBODY if in_shared_mode or len(wanted) > 1 else now & wanted
            now, off = kept, off | (now - kept)
        if now:
            granted[segment_id] = now
        if off:
            releasing[segment_id] = off
        if in_shared_mode and (now or off):
            shared.add(segment_id)
    return Holdings(granted, releasing, frozenset(shared), plan)


def planned(
    before: Plan, segments: Sequence[int], consumers: Collection[str], places: Mapping[int, int]
) -> dict[int, Consumers]:
    """The consumers that are to have each of `segments`, which are in order of range.

    With no more consumers than segments each segment has one consumer, and all consumers have the
    same number of segments, give or take one.  Of more consumers each has one segment: the surplus
    is dealt round robin over the segments that have less consumers than `places`; those without a
    place have no segment.  No more consumers change their segments than that needs.
    """
    names = sorted(consumers)
    if not names or not segments:
        return {}
    if len(names) > len(segments) and any(places.get(each, 1) > 1 for each in segments):
        return _shared_plan(before, segments, names, places)
    return _exclusive_plan(_keepers(before, segments, names), segments, names)


def release(holdings: Holdings, segment_id: int, consumer: str) -> Holdings:
    """The holdings after a former consumer of a segment has detached from it."""
    left = holdings.former(segment_id) - {consumer}
    releasing = {s: former for s, former in holdings.releasing.items() if s != segment_id}
    if left:
        releasing[segment_id] = left
    used = left or holdings.owners(segment_id)
    shared = holdings.shared if used else holdings.shared - {segment_id}
    return Holdings(holdings.granted, releasing, shared, holdings.plan)


def granting(holdings: Holdings, segment_id: int, consumer: str) -> Holdings:
    """The holdings after a consumer is known to have a segment, whatever was planned.

    It has it beside others if the segment is shared, else alone.
    """
    freed = release(holdings, segment_id, consumer)
    others = freed.owners(segment_id) if segment_id in freed.shared else NOBODY
    owners = others | {consumer}
    return Holdings(
        {**freed.granted, segment_id: owners},
        freed.releasing,
        freed.shared,
        {**freed.plan, segment_id: owners},
    )


def still_attached(holdings: Holdings, segment_id: int, consumer: str) -> Holdings:
    """The holdings after a consumer without a share was found at a segment that nobody has."""
    former = holdings.former(segment_id) | {consumer}
    releasing = {**holdings.releasing, segment_id: former}
    return Holdings(holdings.granted, releasing, holdings.shared, holdings.plan)


# One consumer for each segment


def _keepers(before: Plan, segments: Sequence[int], names: Collection[str]) -> dict[int, str]:
    """One of the consumers that are to have each segment, so that many keep a segment."""
    kept: dict[str, int] = dict.fromkeys(names, 0)
    keepers: dict[int, str] = {}
    for segment_id in sorted(segments, key=lambda each: len(before.get(each, NOBODY))):
        among = [name for name in before.get(segment_id, NOBODY) if name in kept]
        if among:
            keeper = min(among, key=lambda name: (kept[name], name))
            keepers[segment_id] = keeper
            kept[keeper] += 1
    return keepers


def _exclusive_plan(
    before: Mapping[int, str], segments: Sequence[int], names: Sequence[str]
) -> dict[int, Consumers]:
    # The preferred consumers are those of Pulsar's assignment: segments in order of range, round
    # robin over the consumers in order of name.
    target = {s: names[i % len(names)] for i, s in enumerate(segments)}
    held: dict[str, list[int]] = {name: [] for name in names}
    for segment_id in segments:
        owner = before.get(segment_id)
        if owner in held:
            held[owner].append(segment_id)
    quotas = _quotas(held, len(segments))
    plan: dict[int, str] = {}
    for name, own in held.items():
        own.sort(key=lambda segment_id: target[segment_id] != name)
        plan.update(dict.fromkeys(own[: quotas[name]], name))
    quota_left = {name: quota - min(quota, len(held[name])) for name, quota in quotas.items()}
    # Quotas that are used up stay so: such a name is not tried again.
    others = iter(names)
    other = next(others)
    for segment_id, preferred in target.items():
        if segment_id not in plan:
            while not quota_left[other]:
                other = next(others)
            owner = preferred if quota_left[preferred] else other
            plan[segment_id] = owner
            quota_left[owner] -= 1
    return {segment_id: frozenset({plan[segment_id]}) for segment_id in segments}


def _quotas(held: Mapping[str, Sequence[int]], count: int) -> dict[str, int]:
    """The number of segments that each may have; those with most keep the odd ones."""
    base, odd = divmod(count, len(held))
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    return {name: base + (place < odd) for place, name in enumerate(ranked)}


# One segment for each consumer


def _shared_plan(
    before: Plan, segments: Sequence[int], names: Sequence[str], places: Mapping[int, int]
) -> dict[int, Consumers]:
    counts = _counts(before, segments, names, places)
    plan: dict[int, set[str]] = {segment_id: set() for segment_id in segments}
    choices: dict[str, list[int]] = {name: [] for name in names}
    for segment_id in segments:
        for name in before.get(segment_id, NOBODY) & choices.keys():
            choices[name].append(segment_id)
    placed: set[str] = set()
    # Those with fewest choices first, so that one with several takes none from them.
    for name in sorted(names, key=lambda each: (len(choices[each]), each)):
        free = [s for s in choices[name] if len(plan[s]) < counts[s]]
        if free:
            plan[min(free, key=lambda s: len(plan[s]))].add(name)
            placed.add(name)
    lacking = [
        (len(plan[s]), place) for place, s in enumerate(segments) if len(plan[s]) < counts[s]
    ]
    heapify(lacking)
    for name in names:
        if name not in placed and lacking:
            number, place = heappop(lacking)
            segment_id = segments[place]
            plan[segment_id].add(name)
            if number + 1 < counts[segment_id]:
                heappush(lacking, (number + 1, place))
    return {segment_id: frozenset(owners) for segment_id, owners in plan.items()}


def _counts(
    before: Plan, segments: Sequence[int], names: Sequence[str], places: Mapping[int, int]
) -> dict[int, int]:
    """The number of consumers of each segment; segments with most now get the odd ones."""
    known = frozenset(names)
    ranked = sorted(segments, key=lambda s: -len(before.get(s, NOBODY) & known))
    counts = dict.fromkeys(segments, 1)
    surplus = len(names) - len(segments)
    while surplus:
        free = [s for s in ranked if counts[s] < places.get(s, 1)][:surplus]
        if not free:
            break
        for segment_id in free:
            counts[segment_id] += 1
        surplus -= len(free)
    return counts
