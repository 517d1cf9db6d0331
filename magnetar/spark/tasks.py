"""From two cuts to the ranges between them, and to the tasks that read these ranges.

Pure.  Rules:

- T1 Ranges follow from the two cuts and any layout since then, so a batch that is read again has
  the same rows.
- T2 A segment with a range that is not retained any more raises `DataLost`, or is left out.
- T3 `Ordering.KEY`: a segment is one task; with `chain` a child of one parent follows it in the
  parent's task, in order of ids, which rise along every path.
- T4 `Ordering.NONE`: each range is a task of its own, and large ones are split (`split_large`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from magnetar.layout import Layout
from magnetar.spark.cut import BEGINNING, END, Cut, Place, behind
from magnetar.spark.errors import DataLost
from magnetar.spark.reading import Reading

__all__ = [
    "SegmentRange",
    "ranges_between",
    "split_large",
    "segments_gone_between",
    "refuse_gone",
    "rows_in",
    "tasks_of",
]


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A range of one segment, from `start` to before `end`; both may be inside an entry."""

    segment_id: int
    topic: str
    """The topic to read: the segment's own, or a regular one."""
    start: Place
    end: Place


def ranges_between(start: Cut, end: Cut, layout: Layout) -> list[SegmentRange]:
    """The ranges from one cut to a later one, in order of ids (T1)."""
    done, through = behind(start, layout), behind(end, layout)
    found: list[SegmentRange] = []
    for segment_id in sorted(layout.segments):
        if segment_id in done:
            continue
        first = start.pos.get(segment_id, BEGINNING)
        last = end.pos.get(segment_id, END if segment_id in through else BEGINNING)
        if first < last:
            topic = layout.segments[segment_id].topic
            found.append(SegmentRange(segment_id, topic, first, last))
    return found


def segments_gone_between(start: Cut, end: Cut, layout: Layout) -> list[int]:
    """Segments that have a range between the cuts and that the layout has no more (T2)."""
    wanted = {i for i, place in start.unfinished.items() if end.pos.get(i) != place}
    wanted |= {
        i for i, place in end.pos.items() if place != BEGINNING and start.pos.get(i) != place
    }
    wanted |= {i for i in end.through if start.pos.get(i) != END}
    return sorted(wanted - layout.segments.keys())


def refuse_gone(start: Cut, end: Cut, layout: Layout) -> None:
    """Refuse a batch of which a segment is not retained any more (T2).  Raises `DataLost`."""
    if gone := segments_gone_between(start, end, layout):
        raise DataLost(
            f"The batch cannot be read again: segments {gone} of {start.topic} are not retained "
            "any more. Keep data for longer than a batch may take; to go on with the entries that "
            "are left, set the option failOnDataLoss to false."
        )


def tasks_of(
    ranges: Iterable[SegmentRange], layout: Layout, *, chain: bool
) -> list[list[SegmentRange]]:
    """Divide ranges into tasks; each task reads its ranges one after the other (T3)."""
    tasks: dict[int, list[SegmentRange]] = {}
    for each in sorted(ranges, key=lambda found: found.segment_id):
        parents = layout.segments[each.segment_id].parent_ids
        elder = tasks.get(parents[0]) if chain and len(parents) == 1 else None
        if elder is None:
            elder = []
        elder.append(each)
        tasks[each.segment_id] = elder
    return [task for segment_id, task in tasks.items() if task[0].segment_id == segment_id]


def rows_in(reading: Reading, ranges: Iterable[SegmentRange]) -> int | None:
    """The number of rows of the ranges that may be read now; None if brokers do not count them."""
    total = 0
    for each in ranges:
        plan = reading.plan(each.topic, each.start.position, end=each.end.entries_end)
        if plan.messages is None:
            return None
        total += plan.messages
    return total


def split_large(reading: Reading, ranges: Iterable[SegmentRange], size: int) -> list[SegmentRange]:
    """Split ranges into pieces of about `size` stored bytes (T4)."""
    pieces: list[SegmentRange] = []
    for each in ranges:
        place = each.start
        while place < each.end:
            plan = reading.plan(
                each.topic,
                place.position,
                end=each.end.entries_end,
                max_bytes=size,
            )
            last = plan.entries == 0 or plan.end <= place.position
            middle = Place.at(plan.end)
            if last or middle >= each.end:
                middle = each.end
            elif each.end == END and plan.end >= plan.raw_end:
                middle = END
            pieces.append(SegmentRange(each.segment_id, each.topic, place, middle))
            place = middle
    return pieces
