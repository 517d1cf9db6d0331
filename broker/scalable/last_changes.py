"""When a topic was last split, merged and rebucketed, automatically or on request.  Pure.

A layout tells it as long as it has the parents.  Pruning keeps the times of what it removes, in the
topic's record: the cooldowns of the scaling policy begin with them.
"""

from dataclasses import dataclass

from broker.scalable.layout import Layout, Segment


@dataclass(frozen=True, slots=True)
class LastChanges:
    """Times of the last split, merge and rebucket of a topic; None if none is known."""

    split_ms: int | None = None
    merge_ms: int | None = None
    rebucket_ms: int | None = None

    def or_later(self, other: "LastChanges") -> "LastChanges":
        """The later time of each kind."""
        return LastChanges(
            _later(self.split_ms, other.split_ms),
            _later(self.merge_ms, other.merge_ms),
            _later(self.rebucket_ms, other.rebucket_ms),
        )

    def to_json(self) -> dict[str, int]:
        """The known times, as a topic's record has them."""
        members = {
            "splitMs": self.split_ms,
            "mergeMs": self.merge_ms,
            "rebucketMs": self.rebucket_ms,
        }
        return {key: time_ms for key, time_ms in members.items() if time_ms is not None}


def decode_last_changes(value: object) -> LastChanges | None:
    """Decode what `LastChanges.to_json` made; None for None.  Raises `ValueError`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"the times of the last changes are {value!r}")
    times = (value.get(key) for key in ("splitMs", "mergeMs", "rebucketMs"))
    return LastChanges(*(None if each is None else int(each) for each in times))


def last_changes(layout: Layout, kept: LastChanges | None) -> LastChanges:
    """Times of the last changes of a topic with this layout.

    `kept` are the times of the changes whose parents were pruned.  They are None where nothing was
    pruned, or only by brokers that did not keep them: then a single segment without parents may
    come from any change, so it counts as each.
    """
    made: dict[int, list[Segment]] = {}
    for segment in layout.segments.values():
        if segment.created_at_epoch > 0:
            made.setdefault(segment.created_at_epoch, []).append(segment)
    found = LastChanges() if kept is None else kept
    for children in made.values():
        found = found.or_later(_changes_that_made(layout, children, parents_kept=kept is not None))
    return found


def _changes_that_made(
    layout: Layout, children: list[Segment], *, parents_kept: bool
) -> LastChanges:
    """The change, or the possible changes, that made all segments of one epoch."""
    time_ms = children[0].created_at_ms
    # A rebucket of several segments whose parents were pruned one by one still has some of them.
    child = next((each for each in children if each.parent_ids), None)
    if child is None and parents_kept:
        return LastChanges()
    if child is None:
        # Brokers that did not keep the times made one segment by a rebucket.
        several = len(children) > 1
        return LastChanges(time_ms) if several else LastChanges(time_ms, time_ms, time_ms)
    parent = layout.segments[child.parent_ids[0]]
    if (parent.hash_start, parent.hash_end) == (child.hash_start, child.hash_end):
        return LastChanges(rebucket_ms=time_ms)
    if len(children) == 1 and len(child.parent_ids) > 1:
        return LastChanges(merge_ms=time_ms)
    return LastChanges(split_ms=time_ms)


def _later(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
