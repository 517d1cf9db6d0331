"""The options `start` and `end`, and the cuts that they mean.

    earliest | latest | 2026-01-31T12:00:00Z | 1769860800000 | {"v":1,...} | [{"v":1,...},...]

`BoundKind` says what each of them means.
"""

import datetime
import enum
from dataclasses import dataclass, replace

from magnetar.layout import Layout
from magnetar.spark.cut import BEGINNING, END, Cut, Place, enter_children
from magnetar.spark.cut_json import cut_of_text
from magnetar.spark.errors import InvalidOption
from magnetar.spark.range_planning import Budget, Ordering, Planner, is_over
from magnetar.spark.reading import Reading
from magnetar.spark.tasks import SegmentRange

__all__ = ["Bound", "BoundKind", "bound_of", "end_cut", "retained", "start_cut"]


class BoundKind(enum.Enum):
    """The kinds of `start` and `end`."""

    EARLIEST = enum.auto()
    """The first retained entry of each path through the DAG."""
    LATEST = enum.auto()
    """The max read positions: as a start of the active segments, as an end of all segments."""
    TIME = enum.auto()
    """The first entry of each path that was published then or later, by its producer's clock."""
    CUT = enum.auto()
    """A cut as JSON; of an array of cuts the one of this topic and name."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One `start` or `end`: `time_ms` (since 1970) for a TIME, `text` for a CUT."""

    kind: BoundKind
    time_ms: int = 0
    text: str = ""


def bound_of(name: str, text: str) -> Bound:
    """Read the option `name`.  Raises `InvalidOption`, also for a time without a time zone."""
    if text.lower() in ("earliest", "latest"):
        return Bound(BoundKind[text.upper()])
    if text.startswith(("{", "[")):
        return Bound(BoundKind.CUT, text=text)
    if text.isascii() and text.isdecimal():
        return Bound(BoundKind.TIME, time_ms=int(text))
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidOption(
            f"The option {name} is {text!r:.100}; it is earliest, latest, a time such as "
            "2026-01-31T12:00:00Z or milliseconds since 1970, or a cut as it was written."
        )
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return Bound(BoundKind.TIME, time_ms=max(since // datetime.timedelta(milliseconds=1), 0))


def start_cut(bound: Bound, reading: Reading, layout: Layout, nowhere: Cut) -> Cut:
    """The cut at which to begin; `nowhere` is a cut of the topic and name without positions."""
    if bound.kind is BoundKind.CUT:
        return cut_of_text(bound.text, nowhere.topic, nowhere.name)
    if bound.kind is BoundKind.EARLIEST:
        return _first(None, reading, layout, nowhere)
    if bound.kind is BoundKind.LATEST:
        pos = {
            segment.segment_id: Place.at(reading.plan(segment.topic, None).horizon)
            for segment in layout.active
        }
        return replace(nowhere, pos=pos)
    return _first(bound.time_ms, reading, layout, nowhere)


def retained(each: SegmentRange, reading: Reading) -> SegmentRange:
    """The part of a range that is retained, if it begins with its segment; else the range."""
    if each.start != BEGINNING:
        return each
    first = Place.at(reading.plan(each.topic, None, max_messages=1).start)
    return replace(each, start=min(first, each.end))


def end_cut(bound: Bound, reading: Reading, layout: Layout, start: Cut) -> Cut:
    """The cut at which to end a read that begins at `start`."""
    if bound.kind is BoundKind.LATEST:
        return Planner(reading, Ordering.NONE, fail_on_data_loss=False).next_cut(
            start, layout, Budget()
        )
    return start_cut(bound, reading, layout, replace(start, pos={}, through=()))


def _first(time_ms: int | None, reading: Reading, layout: Layout, nowhere: Cut) -> Cut:
    """The cut of the first entry of each path from a time on; None: the first retained one."""
    cut, seen = enter_children(nowhere, layout), set[int]()
    while unseen := [i for i in cut.unfinished if i not in seen]:
        seen.update(unseen)
        for segment_id in unseen:
            plan = reading.plan(
                layout.segments[segment_id].topic,
                None,
                from_publish_time_ms=time_ms,
                max_messages=1,
            )
            # A segment without such an entry goes to its end, so that its children are planned.
            over = is_over(plan, layout.segments[segment_id], plan.start)
            cut = cut.moved(segment_id, END if over else Place.at(plan.start))
        cut = enter_children(cut, layout)
    return cut
