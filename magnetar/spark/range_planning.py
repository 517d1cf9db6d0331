"""From a cut to the next one: the range of each segment that a batch reads.

Pure, apart from the answers of `Reading`.  Rules:

- P1 A segment is read up to the lowest of its max read position, the batch's budget and a limit
  (`current_limits`).  A sealed segment that is read to its last entry goes to `END`; then
  `enter_children` adds its children.
- P2 A budget of rows or bytes is shared in proportion to the backlogs of the segments, at least one
  entry each, so that none starves.  Entries are never split, so a batch may be larger by an entry
  of each segment.
- P3 `Ordering.KEY`: a batch never crosses an edge of the DAG, for its tasks run side by side.  The
  exception is a parent that was drained before the batch, or is drained without a row.  With
  `chain` a child with one parent is read after it, by the same task.  `Ordering.NONE` crosses every
  edge.
- P4 A segment is planned once in a step; a child gets the budget that its ancestors have left.
- P5 `window_ms`: nothing is read that was published more than `window_ms` after the first unread
  entry of the slowest segment.  The slowest segment always moves.  A time beyond the largest bound
  limits nothing.
- P6 A segment with nothing to read keeps its exact place, so that a step without progress returns
  the cut that it began with.  Skipping entries that are not retained is progress.
"""

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import LONG_MAX, Position
from magnetar.reads.plan import RangePlan
from magnetar.spark.cut import (
    BEGINNING,
    END,
    Cut,
    Place,
    ancestors,
    behind,
    enter_children,
    not_retained,
)
from magnetar.spark.errors import DataLost
from magnetar.spark.reading import Reading

_log: Final = logging.getLogger(__name__)

__all__ = [
    "Budget",
    "Limits",
    "Ordering",
    "Planner",
    "current_limits",
    "is_over",
    "limits_of",
    "lower",
    "raw_ends",
    "shares",
]

Limits = Mapping[int, Place]
"""The places up to which segments may be read, by id; a segment without one is not read."""


class Ordering(enum.Enum):
    """The order in which a source gives its rows."""

    KEY = "key"
    """The rows of a key come in order, over all batches."""
    NONE = "none"
    """The rows come in any order; the column `order_key` sorts them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one batch reads: rows, and bytes of stored entries; None: no limit."""

    rows: int | None = None
    bytes: int | None = None

    @property
    def is_unbounded(self) -> bool:
        """Whether neither rows nor bytes are bounded."""
        return self.rows is None and self.bytes is None

    def less(self, plan: RangePlan) -> "Budget":
        """The budget that is left after a range, not below 0."""
        rows = None if self.rows is None else max(self.rows - (plan.messages or 0), 0)
        left = None if self.bytes is None else max(self.bytes - (plan.bytes or 0), 0)
        return Budget(rows, left)

    @property
    def is_spent(self) -> bool:
        """Whether no rows or no bytes are left."""
        return self.rows == 0 or self.bytes == 0


def shares(total: int, backlogs: Sequence[int | None]) -> list[int]:
    """Divide `total` in proportion to backlogs, at least 1 each; evenly if one is unknown (P2)."""
    known = [backlog for backlog in backlogs if backlog is not None]
    weights = (
        [max(each, 1) for each in known] if len(known) == len(backlogs) else [1] * len(backlogs)
    )
    whole = sum(weights)
    found = [max(total * weight // whole, 1) for weight in weights]
    # The remainder of rounding goes to the largest backlogs.
    by_weight = sorted(range(len(weights)), key=lambda i: -weights[i])
    for i in by_weight[: max(total - sum(found), 0)]:
        found[i] += 1
    return found


def is_over(plan: RangePlan, segment: Segment, place: Position) -> bool:
    """Whether a segment has no entry, and never will have one, from `place` on, hidden or not.

    Where the plan does not say whether the segment is sealed (Apache Pulsar), the layout does.
    """
    sealed = not segment.active if plan.sealed is None else plan.sealed
    return sealed and place >= plan.raw_end


def _is_empty(plan: RangePlan) -> bool:
    return plan.start >= plan.end if plan.entries is None else plan.entries == 0


@dataclass(slots=True)
class _Step:
    """The state of planning one batch."""

    cut: Cut
    budget: Budget
    plans: dict[int, RangePlan] = field(default_factory=dict)
    """The readable range of every unfinished segment."""
    moved: set[int] = field(default_factory=set)
    """Segments of which this batch reads something."""
    before_ms: int | None = None
    """P5: entries that were published then or later are not read."""


class Planner:
    """Plans one batch after the other of one source (P1 to P6).

    It keeps nothing between two steps but `gaps` and `planned_rows`, so any step can be planned
    again, from the same cut, by another planner.
    """

    def __init__(
        self,
        reading: Reading,
        ordering: Ordering,
        *,
        chain: bool = False,
        window_ms: int | None = None,
        fail_on_data_loss: bool = True,
    ) -> None:
        self._reading = reading
        self._ordering: Final = ordering
        self._chain: Final = chain
        self._window_ms: Final = window_ms
        self._fail_on_data_loss: Final = fail_on_data_loss
        self.gaps = 0
        """Number of segments, or beginnings of segments, that were skipped as not retained."""
        self.planned_rows = 0
        """Rows of the last step, as far as brokers count them."""

    def next_cut(
        self, start: Cut, layout: Layout, budget: Budget, limits: Limits | None = None
    ) -> Cut:
        """The end of the batch that begins at `start`; `start` itself if there is nothing (P6).

        Raises `DataLost` for entries that are not retained, unless they are to be skipped.
        """
        self.planned_rows = 0
        step = _Step(self._skip_pruned(start, layout), budget)
        # A segment is planned once: `moved` excludes it from later rounds (P4).
        self._advance_without_reading(step, layout, limits)
        while not step.budget.is_spent and self._plan_round(step, layout, limits):
            self._advance_without_reading(step, layout, limits)
        if step.cut.pos == start.pos:
            return start
        passed = behind(step.cut, layout) - behind(start, layout) - start.pos.keys()
        return replace(step.cut, through=tuple(sorted(passed - step.cut.pos.keys())))

    def _skip_pruned(self, cut: Cut, layout: Layout) -> Cut:
        """The cut with unfinished segments that are not retained any more moved to `END`."""
        for segment_id in not_retained(cut, layout):
            self._count_gap(f"segment {segment_id} of {cut.topic}, which was not read to its end,")
            cut = cut.moved(segment_id, END)
        return cut

    def _count_gap(self, what: str) -> None:
        self.gaps += 1
        _log.warning("%s is not retained any more; gaps so far: %d", what, self.gaps)
        if self._fail_on_data_loss:
            raise DataLost(
                f"The next entries to read are gone: {what} is not retained any more. Keep data "
                "for longer than readers may stand still; to go on with the entries that are left, "
                "set the option failOnDataLoss to false."
            )

    def _advance_without_reading(self, step: _Step, layout: Layout, limits: Limits | None) -> None:
        """Finish segments, and enter their children, as far as that needs no reading (P1)."""
        while True:
            step.cut = enter_children(step.cut, layout)
            unknown = [i for i in step.cut.unfinished if i not in step.plans]
            for segment_id in unknown:
                plan = self._backlog_of(step.cut, segment_id, layout, limits)
                if plan is None:
                    continue
                step.plans[segment_id] = plan
                if plan.lost:
                    # Skipped, so that the next plan does not report the gap again.
                    first = max(plan.start, plan.earliest)
                    step.cut = step.cut.moved(segment_id, Place.at(first))
                if is_over(plan, layout.segments[segment_id], plan.start):
                    step.cut = step.cut.moved(segment_id, END)
            if not any(step.cut.pos[i] == END for i in unknown):
                return

    def _backlog_of(
        self, cut: Cut, segment_id: int, layout: Layout, limits: Limits | None
    ) -> RangePlan | None:
        """The range of a segment that may be read; None if its limit is reached."""
        place = cut.pos[segment_id]
        limit = END if limits is None else limits.get(segment_id, BEGINNING)
        if place >= limit:
            return None
        plan = self._plan(layout.segments[segment_id].topic, place, limit)
        if plan.lost:
            self._count_gap(f"the place {place} of segment {segment_id}")
        return plan

    def _plan(self, topic: str, place: Place, limit: Place, **bounds: int | None) -> RangePlan:
        return self._reading.plan(
            topic,
            place.position,
            end=limit.position,
            **bounds,
        )

    def _plan_round(self, step: _Step, layout: Layout, limits: Limits | None) -> bool:
        """Plan a range of every segment that may be read next; whether any has entries."""
        chosen = [
            i
            for i in step.cut.unfinished
            if i in step.plans
            and i not in step.moved
            and not _is_empty(step.plans[i])
            and self._may_follow(i, step, layout)
        ]
        if self._window_ms is not None and step.before_ms is None:
            # The first round of a step fixes the window (P5).
            times = [self._first_publish_time_ms(i, step, layout, limits) for i in chosen]
            known = [time for time in times if time is not None]
            end_ms = min(known) + self._window_ms if known else LONG_MAX + 1
            step.before_ms = end_ms if end_ms <= LONG_MAX else None
        before = len(step.moved)
        for segment_id, plan in self._ranges_within_budget(step, chosen, layout, limits):
            if _is_empty(plan):
                continue
            step.moved.add(segment_id)
            step.budget = step.budget.less(plan)
            self.planned_rows += plan.messages or 0
            ended = is_over(plan, layout.segments[segment_id], plan.end)
            step.cut = step.cut.moved(segment_id, END if ended else Place.at(plan.end))
        return len(step.moved) > before

    def _first_publish_time_ms(
        self, segment_id: int, step: _Step, layout: Layout, limits: Limits | None
    ) -> int | None:
        """The publish time of its first unread entry, in ms; None if it has none (P5)."""
        # A range of one byte has one entry: the time that a plan gives is the lowest of its range.
        limit = END if limits is None else limits[segment_id]
        topic, place = layout.segments[segment_id].topic, step.cut.pos[segment_id]
        return self._plan(topic, place, limit, max_bytes=1).first_publish_time_ms

    def _may_follow(self, segment_id: int, step: _Step, layout: Layout) -> bool:
        """Whether a segment may be read in the step that reads its ancestors (P3)."""
        # They may have rows of the same keys, in other tasks.
        if self._ordering is Ordering.NONE or not step.moved & ancestors(segment_id, layout):
            return True
        parents = layout.segments[segment_id].parent_ids
        if not self._chain or len(parents) != 1:
            return False
        return parents[0] in step.moved or self._may_follow(parents[0], step, layout)

    def _ranges_within_budget(
        self, step: _Step, chosen: Sequence[int], layout: Layout, limits: Limits | None
    ) -> list[tuple[int, RangePlan]]:
        """The range of each chosen segment, with its share of the budget (P2)."""
        if step.budget.is_unbounded and step.before_ms is None:
            return [(i, step.plans[i]) for i in chosen]
        rows: list[int | None] = [None] * len(chosen)
        sizes: list[int | None] = [None] * len(chosen)
        if step.budget.rows is not None:
            backlogs = [step.plans[i].backlog_messages for i in chosen]
            rows = [*shares(step.budget.rows, backlogs)]
        if step.budget.bytes is not None:
            backlogs = [step.plans[i].backlog_bytes for i in chosen]
            sizes = [*shares(step.budget.bytes, backlogs)]
        return [
            (
                i,
                self._plan(
                    layout.segments[i].topic,
                    step.cut.pos[i],
                    END if limits is None else limits[i],
                    max_messages=max_rows,
                    max_bytes=max_bytes,
                    before_publish_time_ms=step.before_ms,
                ),
            )
            for i, max_rows, max_bytes in zip(chosen, rows, sizes, strict=True)
        ]


def limits_of(end: Cut, layout: Layout) -> dict[int, Place]:
    """The limits of reading that ends at a cut."""
    return {**dict.fromkeys(behind(end, layout), END), **end.pos}


def lower(limits: Limits | None, other: Limits | None) -> Limits | None:
    """The lower limit of each segment; None allows everything."""
    if limits is None or other is None:
        return other if limits is None else limits
    return {i: min(limits[i], other[i]) for i in limits.keys() & other.keys()}


def current_limits(reading: Reading, layout: Layout) -> dict[int, Place]:
    """The places up to which segments may be read now, as limits that later data does not move."""
    limits: dict[int, Place] = {}
    for segment_id, segment in layout.segments.items():
        plan = reading.plan(segment.topic, None)
        whole = is_over(plan, segment, plan.horizon)
        limits[segment_id] = END if whole else Place.at(plan.horizon)
    return limits


def raw_ends(reading: Reading, layout: Layout, topic: str, name: str) -> Cut:
    """The end of all stored entries, hidden ones included: for display, not to read from."""
    pos = {
        segment.segment_id: Place.at(reading.plan(segment.topic, None).raw_end)
        for segment in layout.active
    }
    return Cut(topic, name, pos)
