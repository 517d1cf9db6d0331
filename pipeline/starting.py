"""Where reading begins and ends, as users say it, and the cut that this is.

    earliest | latest | 2026-01-31T12:00:00Z | 1769860800000 | {"v":1,...} | [{"v":1,...},...]

Rules:

- `earliest` is the first entry that is retained: what is gone by then is not missed.  Segments of
  which nothing is left are not begun at; `retained` says it of those behind them.
- A time means the first entry of each path that was published then or later, by its producer's
  clock; a number is milliseconds since 1970.  A moment without a time zone is refused.
- `latest` is the horizon of now, of active segments.  As an end it is the horizon of everything.
- A cut is JSON as it was written; of positions (an array) the one of this topic and name counts.
"""

import datetime
import enum
from dataclasses import dataclass, replace

from magnetar.layout import Layout
from pipeline.cut import BEGINNING, END, Cut, Place, entered
from pipeline.cut_json import cut_of_text
from pipeline.errors import InvalidOption
from pipeline.range_planning import Budget, Ordering, Planner, is_over
from pipeline.reading import Reading
from pipeline.tasks import SegmentRange

__all__ = ["Bound", "BoundKind", "bound_of", "end_cut", "retained", "start_cut"]


class BoundKind(enum.Enum):
    """What a bound says."""

    EARLIEST = enum.auto()
    LATEST = enum.auto()
    TIME = enum.auto()
    CUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Bound:
    """`time_ms` of a time; `text` of a cut."""

    kind: BoundKind
    time_ms: int = 0
    text: str = ""


def bound_of(name: str, text: str) -> Bound:
    """What the option `name` says.  Raises `InvalidOption`."""
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
    """Where to begin; `nowhere` is a cut of the topic and name without positions."""
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
    """Of a range that begins with its segment, what is left of that."""
    if each.start != BEGINNING:
        return each
    first = Place.at(reading.plan(each.topic, None, max_messages=1).start)
    return replace(each, start=min(first, each.end))


def end_cut(bound: Bound, reading: Reading, layout: Layout, start: Cut) -> Cut:
    """Where to end, of a range that begins at `start`."""
    if bound.kind is BoundKind.LATEST:
        return Planner(reading, Ordering.NONE, fail_on_data_loss=False).next_cut(
            start, layout, Budget()
        )
    return start_cut(bound, reading, layout, replace(start, pos={}, through=()))


def _first(time_ms: int | None, reading: Reading, layout: Layout, nowhere: Cut) -> Cut:
    """Along every path the first segment that is not over at the time, or that has anything."""
    cut, seen = entered(nowhere, layout), set[int]()
    while unseen := [i for i in cut.unfinished if i not in seen]:
        seen.update(unseen)
        for segment_id in unseen:
            plan = reading.plan(
                layout.segments[segment_id].topic,
                None,
                from_publish_time_ms=time_ms,
                max_messages=1,
            )
            over = is_over(plan, layout.segments[segment_id], plan.start)
            cut = cut.moved(segment_id, END if over else Place.at(plan.start))
        cut = entered(cut, layout)
    return cut
